"""Mamba-1's selective scan, chunked.

For each channel, with the state as (n, d) so that channels lie along the vectors:

    state[t] = exp(dt[t] A^T) * state[t-1] + B[t] (dt[t] x[t])        y[t] = (C[t].state[t] + D x[t]) * silu(z[t])

All chunks step through their positions together, each from a zero state; then chunks hand the state on in order, and
what it adds inside a chunk is exp(A s[t]) times it, s the running sum of dt. One chunk (chunk_size >= l) is the plain
recurrence: best on a CPU, whose cores one position fills. Source: Gu and Dao, "Mamba", 2023.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mamba_jax.ops.axes import pad_axis, scan_like
from mamba_jax.ops.checks import check_dt_limit, check_rank, check_scan, check_shape
from mamba_jax.ops.dispatch import Implementation, Kernel, device_axis, dispatch, over_devices
from mamba_jax.ops.dt import FASTEST, finite_rates, step_size
from mamba_jax.ops.segments import WIPE, chain_chunks, later_starts, plan_chunks, valid_positions
from mamba_jax.pallas_kernels.gpu import selective_scan as gpu
from mamba_jax.pallas_kernels.tpu import selective_scan as tpu

# Positions between the states that the gradient keeps; it computes those between again.
_STRETCH = 32
_UNROLL = 4


class _Inputs(NamedTuple):
    """What the recurrence reads, float32."""

    xdt: Float[Array, "b c q d"]
    dt: Float[Array, "b c q d"]
    B: Float[Array, "b c q n"]
    C: Float[Array, "b c q n"]
    wipe: Float[Array, "b c q"] | None  # added to the exponents: WIPE where another sequence begins


def selective_scan(
    x: Float[Array, "b l d"],
    dt: Float[Array, "b l d"],
    A: Float[Array, "d n"],
    B: Float[Array, "b l n"],
    C: Float[Array, "b l n"],
    *,
    chunk_size: int,
    D: Float[Array, "d"] | None = None,
    z: Float[Array, "b l d"] | None = None,
    dt_bias: Float[Array, "d"] | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    initial_state: Float[Array, "b *s n d"] | None = None,
    lengths: Int[Array, "b"] | None = None,
    segment_ids: Int[Array, "b l"] | None = None,
    num_segments: int | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "b l d"], Float[Array, "b *s n d"]]:
    """Scan whole sequences.

    Args:
        x: inputs.
        dt: raw step sizes.
        A: decay rates, negative; -inf wipes the state at any step above 0, and at a step of 0 keeps it.
        B: input maps.
        C: output maps.
        chunk_size: positions a chunk; changes speed and memory, not results.
        D: skip.
        z: gate.
        dt_bias: added to dt before softplus.
        dt_softplus: apply softplus to dt.
        dt_limit: clamp of dt after softplus.
        initial_state: state before the first position; zeros if None. It belongs to the row's first sequence, or with
            num_segments it is (b, num_segments, n, d), one for each sequence.
        lengths: valid positions of each row, the rest is padding on the right: x, B and C are to be finite
            there, as the convolution leaves them, dt may be anything.
        segment_ids: sequence of each position, nondecreasing; no state crosses from one to the next. Below 0: padding.
        num_segments: number of packed sequences, empty ones included; asks for the final state of each.
        implementation: "xla"; "pallas", the kernel for GPUs of Hopper's kind or newer, which takes a multiple of 32
            channels and d_state 16, or for TPUs, which takes at most 512 or a multiple of 128 and d_state up to 64, but
            no float16. Neither takes segment_ids; they cut rows their own way. None leaves it to `ops.dispatch`.

    Returns:
        y in x's dtype (of no meaning at padding), and the float32 state after the last valid position: (b, n, d), or
        with num_segments (b, num_segments, n, d), where an empty sequence keeps its initial state.

    Raises:
        ValueError: if shapes do not agree, chunk_size < 1, both lengths and segment_ids are given, or num_segments
            comes without segment_ids.
        NotImplementedError: if implementation is "pallas" and the kernel cannot do this.
    """
    check_rank("x", x, "(b, l, d)")
    b, seqlen, d = x.shape
    n = _check_inputs(x, dt, A, B, C, D, z, dt_bias)
    check_scan(chunk_size, dt_limit, lengths, segment_ids, num_segments, (b, seqlen))
    s = 1 if num_segments is None else num_segments
    shape = (b, n, d) if num_segments is None else (b, s, n, d)
    if initial_state is None:
        initial_state = jnp.zeros(shape, jnp.float32)
    check_shape("initial_state", initial_state, shape, "(b, n, d)" if num_segments is None else "(b, s, n, d)")

    def scan_xla(
        x: Array,
        dt: Array,
        A: Array,
        B: Array,
        C: Array,
        D: Array | None,
        z: Array | None,
        dt_bias: Array | None,
        lengths: Array | None,
        initial_state: Array,
    ) -> tuple[Array, Array]:
        dt = step_size(dt, dt_bias, dt_softplus, dt_limit, valid_positions(lengths, segment_ids, seqlen))
        wipe = None
        if segment_ids is not None and num_segments is None:
            wipe = jnp.where(later_starts(segment_ids), jnp.float32(WIPE), jnp.float32(0.0))
        inputs = _Inputs(x.astype(jnp.float32) * dt, dt, B.astype(jnp.float32), C.astype(jnp.float32), wipe)

        plan = plan_chunks(chunk_size, seqlen, segment_ids, num_segments)
        inputs = jax.tree.map(lambda a: plan.lay(a).reshape(b, plan.chunks, plan.q, *a.shape[2:]), inputs)
        states = initial_state.reshape(b, s, n, -1)
        y, states = _scan_chunks(states, inputs, plan.segment, A.T)
        y = plan.restore(y.reshape(b, -1, x.shape[2]))
        return _skip_and_gate(y, x, D, z), states.reshape(initial_state.shape)

    packed = None if segment_ids is None else "segment_ids"
    options: Any = {"dt_softplus": dt_softplus, "dt_limit": dt_limit}

    def scan(*args: Any) -> Any:  # of all channels, or of those of a device
        x, dt, A = args[:3]
        chosen = dispatch(
            implementation,
            xla=scan_xla,
            cuda=Kernel(partial(gpu.selective_scan, **options), packed or gpu.declines(x, A)),
            tpu=Kernel(partial(tpu.selective_scan, **options), packed or tpu.declines(x, dt, A)),
        )
        return chosen(*args)

    args = (x, dt, finite_rates(A), B, C, D, z, dt_bias, lengths, initial_state.astype(jnp.float32))
    if over := device_axis(implementation, (d,), args):
        return over_devices(scan, over, (2, 2, 0, None, None, 0, 2, 0, None, 2), (2, 2))(*args)
    return scan(*args)


def selective_scan_step(
    x: Float[Array, "b d"],
    dt: Float[Array, "b d"],
    A: Float[Array, "d n"],
    B: Float[Array, "b n"],
    C: Float[Array, "b n"],
    state: Float[Array, "b n d"],
    *,
    D: Float[Array, "d"] | None = None,
    z: Float[Array, "b d"] | None = None,
    dt_bias: Float[Array, "d"] | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
) -> tuple[Float[Array, "b d"], Float[Array, "b n d"]]:
    """Scan one position; arguments as in `selective_scan`, without the position axis.

    Returns:
        y in x's dtype, and the new state in the state's dtype (computed in float32).

    Raises:
        ValueError: if shapes do not agree.
    """
    check_rank("x", x, "(b, d)")
    b, d = x.shape
    n = _check_inputs(x, dt, A, B, C, D, z, dt_bias)
    check_dt_limit(dt_limit)
    check_shape("state", state, (b, n, d), "(b, n, d)")
    dt = step_size(dt, dt_bias, dt_softplus, dt_limit)

    def rows(a: Array) -> Array:
        return a.astype(jnp.float32).reshape(*_rows(b), *a.shape[1:])

    inputs = _Inputs(rows(x * dt), rows(dt), rows(B), rows(C), None)
    new_state, y = _recur(rows(state), inputs, finite_rates(A).T)
    return _skip_and_gate(y.reshape(b, d), x, D, z), new_state.reshape(b, n, d).astype(state.dtype)


def _check_inputs(
    x: Array, dt: Array, A: Array, B: Array, C: Array, D: Array | None, z: Array | None, dt_bias: Array | None
) -> int:
    """Check what `selective_scan` and `selective_scan_step` share; returns n."""
    *row, d = x.shape
    check_rank("A", A, "(d, n)")
    n = A.shape[1]
    check_shape("A", A, (d, n), "(d, n)")
    check_shape("dt", dt, x.shape, "the shape of x")
    check_shape("B", B, (*row, n), "(..., n)")
    check_shape("C", C, (*row, n), "(..., n)")
    for name, array in (("D", D), ("dt_bias", dt_bias)):
        if array is not None:
            check_shape(name, array, (d,), "(d,)")
    if z is not None:
        check_shape("z", z, x.shape, "the shape of x")
    return n


def _skip_and_gate(
    y: Float[Array, "*b d"], x: Float[Array, "*b d"], D: Float[Array, "d"] | None, z: Float[Array, "*b d"] | None
) -> Float[Array, "*b d"]:
    if D is not None:
        y = y + D.astype(jnp.float32) * x.astype(jnp.float32)
    if z is not None:
        y = y * jax.nn.silu(z.astype(jnp.float32))
    return y.astype(x.dtype)


def _rows(count: int) -> tuple[int, ...]:
    """Leading axes of the recurrence: none for a single row (see `without_unit_axes`)."""
    return (count,) if count > 1 else ()


def _decay(dt: Float[Array, "*b d"], A: Float[Array, "n d"], wipe: Float[Array, "*b"] | None) -> Float[Array, "*b n d"]:
    exponent = dt[..., None, :] * A
    return jnp.exp(exponent if wipe is None else exponent + wipe[..., None, None])


def _recur(
    state: Float[Array, "*b n d"], inputs: _Inputs, A: Float[Array, "n d"]
) -> tuple[Float[Array, "*b n d"], Float[Array, "*b d"]]:
    """One position of the recurrence, for any leading axes."""
    xdt, dt, B, C, wipe = inputs
    state = _decay(dt, A, wipe) * state + B[..., :, None] * xdt[..., None, :]
    return state, (C[..., :, None] * state).sum(-2)


def _scan_chunks(
    states: Float[Array, "b s n d"],
    inputs: _Inputs,
    segment: Int[Array, "b c"] | None,
    A: Float[Array, "n d"],
) -> tuple[Float[Array, "b c q d"], Float[Array, "b s n d"]]:
    """Scan each chunk, then hand the states on and add what they bring."""
    b, c, _, d = inputs.dt.shape
    n = A.shape[0]
    if c == 1:
        ends, y = _scan_positions(states, inputs, A)
        return y, ends
    ends, y = _scan_positions(jnp.zeros((b, c, n, d), jnp.float32), inputs, A)
    since_start = jnp.minimum(jnp.cumsum(inputs.dt, axis=2), -FASTEST)  # finite, for an A of 0
    wiped = None if inputs.wipe is None else jnp.cumsum(inputs.wipe, axis=2)
    decay = _decay(since_start[:, :, -1], A, None if wiped is None else wiped[:, :, -1])
    incoming, states = chain_chunks(states, decay, ends, segment)
    incoming = incoming.reshape(*_rows(b * c), n, d)

    @jax.checkpoint
    def bring(xs: tuple[Array, Array | None, Array]) -> Array:
        since_start, wiped, C = xs
        return (C[..., None] * _decay(since_start, A, wiped) * incoming).sum(-2)

    brought = jax.lax.map(bring, jax.tree.map(_to_stretches, (since_start, wiped, inputs.C)))
    return y + _from_stretches(brought, y.shape), states


def _scan_positions(
    states: Float[Array, "b c n d"], inputs: _Inputs, A: Float[Array, "n d"]
) -> tuple[Float[Array, "b c n d"], Float[Array, "b c q d"]]:
    """Step through the positions of all chunks; the gradient keeps the state before each stretch."""

    @jax.checkpoint
    def stretch(states: Array, xs: _Inputs) -> tuple[Array, Array]:
        return jax.lax.scan(lambda state, at: _recur(state, at, A), states, xs, unroll=min(_UNROLL, xs.dt.shape[0]))

    b, c, *_ = states.shape
    xs = jax.tree.map(_to_stretches, inputs)
    ends, y = scan_like(xs.xdt, stretch, states.reshape(*_rows(b * c), *A.shape), xs)
    return ends.reshape(states.shape), _from_stretches(y, inputs.dt.shape)


def _to_stretches(a: Float[Array, "b c q *rest"]) -> Float[Array, "stretches positions *rows rest"]:
    """Positions first, in stretches of `_STRETCH`; the last one is filled with dt = 0."""
    b, c, q, *rest = a.shape
    size = min(_STRETCH, q)
    a = jnp.moveaxis(a.reshape(*_rows(b * c), q, *rest), len(_rows(b * c)), 0)
    return pad_axis(a, 0, -(-q // size) * size).reshape(-1, size, *a.shape[1:])


def _from_stretches(y: Float[Array, "stretches positions *rows d"], shape: tuple[int, ...]) -> Float[Array, "b c q d"]:
    b, c, q, d = shape
    return jnp.moveaxis(y.reshape(-1, b, c, d)[:q], 0, 2)
