"""Mamba-1's selective scan for NVIDIA GPUs of Hopper's kind or newer; the equations are those of `ops/scan.py`.

A block runs the recurrence over some positions of 256 channels, two channels a thread, the state in registers. One such
block is far less than a GPU, so rows are split in length too: a first pass finds where each split's state ends if it
begins at zero, a small kernel chains these, and a second pass starts every split from its true state and makes the
outputs. Both passes cost an exponential for each number of the state and position, which is what bounds them.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

_TILE = 256  # channels a block
_STEP = 16  # positions a copy
_STATE = 16  # d_state
_BLOCKS = 264  # blocks to aim for: two on each of a large GPU's 132 multiprocessors
_SHORTEST = 64  # positions of a split


def declines(x: Array, A: Array) -> str | None:
    """Why the kernel does not take these arguments of `ops.scan.selective_scan`; None if it does."""
    d, n = A.shape
    if d % _TILE or n != _STATE:
        return f"{d} channels and d_state {n} (wanted: a multiple of {_TILE}, and {_STATE})"
    if x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"x of dtype {x.dtype} (wanted: bfloat16, float16 or float32)"
    return None


def selective_scan(
    x: Float[Array, "b l d"],
    dt: Float[Array, "b l d"],
    A: Float[Array, "d n"],
    B: Float[Array, "b l n"],
    C: Float[Array, "b l n"],
    D: Float[Array, "d"] | None,
    z: Float[Array, "b l d"] | None,
    dt_bias: Float[Array, "d"] | None,
    lengths: Int[Array, "b"] | None,
    initial_state: Float[Array, "b n d"],
    *,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
    interpret: Any = False,
) -> tuple[Float[Array, "b l d"], Float[Array, "b n d"]]:
    """Scan whole rows; arguments and results are those of `ops.scan.selective_scan`."""
    b, l, d = x.shape  # noqa: E741
    splits = max(1, min(_BLOCKS // (b * (d // _TILE)), l // _SHORTEST))
    size = -(-l // (splits * _STEP)) * _STEP
    splits = -(-l // size)
    if lengths is None:
        lengths = jnp.full((b,), l, jnp.int32)
    x, dt, B, C = (_pad(a, splits * size) for a in (x, dt, B, C))
    float32 = jnp.float32
    rates = A.T.astype(float32) * (1.0 / math.log(2.0))
    channels = [jnp.zeros((d,), float32) if a is None else a.astype(float32) for a in (dt_bias, D, None)]
    vectors = jnp.concatenate([rates, jnp.stack(channels)])
    B, C = B.astype(float32), C.astype(float32)
    lengths = jnp.minimum(lengths.astype(jnp.int32), l)
    run = partial(_run, splits, dt_softplus, dt_limit, interpret)

    starts = initial_state[:, None]
    if splits > 1:
        ends, sums = run((x, dt, B), vectors, lengths, None)
        starts = _chain(ends, sums, rates, initial_state, interpret)
    gate = () if z is None else (_pad(z, splits * size),)
    y, ends = run((x, dt, B, C, *gate), vectors, lengths, starts)
    return y[:, :l], ends[:, -1]


def _pad(a: Array, length: int) -> Array:
    missing = length - a.shape[1]
    return a if missing == 0 else jnp.pad(a, ((0, 0), (0, missing), (0, 0)))


def _compiler_params() -> plgpu.CompilerParams:
    # A barrier around each load and store of a position would cost an eighth of the time.
    return plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True)


def _chain(
    ends: Float[Array, "b s n d"],
    sums: Float[Array, "b s d"],
    rates: Float[Array, "n d"],
    initial_state: Float[Array, "b n d"],
    interpret: Any,
) -> Float[Array, "b s n d"]:
    """The state that each split starts from."""
    b, splits, n, d = ends.shape

    def body(ends_ref, sums_ref, rates_ref, initial_ref, starts_ref):
        i, row = lax.axis_index("state"), lax.axis_index("row")
        channels = pl.ds(lax.axis_index("tile") * _TILE, _TILE)
        state, rate = initial_ref[row, i, channels], rates_ref[i, channels]
        for first in range(0, splits, 8):  # eight splits' loads are on their way together
            group = range(first, min(first + 8, splits))
            decays = [jnp.exp2(sums_ref[row, k, channels] * rate) for k in group]
            added = [ends_ref[row, k, i, channels] for k in group]
            for k, decay, end in zip(group, decays, added, strict=True):
                starts_ref[row, k, i, channels] = state
                state = decay * state + end

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(ends.shape, jnp.float32),
        grid=(d // _TILE, n, b),
        grid_names=("tile", "state", "row"),
        interpret=interpret,
        compiler_params=_compiler_params(),
    )(ends, sums, rates, initial_state)


def _run(
    splits: int,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
    interpret: Any,
    inputs: tuple[Array, ...],
    vectors: Float[Array, "n+3 d"],
    lengths: Int[Array, "b"],
    starts: Float[Array, "b s n d"] | None,
) -> tuple[Array, Array]:
    """One pass: (ends, sums of dt) from zero without `starts`, else (y, ends)."""
    x = inputs[0]
    b, _, d = x.shape
    ends = jax.ShapeDtypeStruct((b, splits, _STATE, d), jnp.float32)
    sums = jax.ShapeDtypeStruct((b, splits, d), jnp.float32)
    kernel = plgpu.kernel(
        partial(_kernel, len(inputs), starts is not None, dt_softplus, dt_limit),
        out_type=(ends, sums) if starts is None else (jax.ShapeDtypeStruct(x.shape, x.dtype), ends),
        grid=(d // _TILE, splits, b),
        grid_names=("tile", "split", "row"),
        interpret=interpret,
        compiler_params=_compiler_params(),
    )
    return kernel(*inputs, vectors, lengths, *(() if starts is None else (starts,)))


def _kernel(count, outputs, dt_softplus, dt_limit, *refs):
    inputs, (vectors_ref, lengths_ref, *others) = refs[:count], refs[count:]
    splits = others[-2 if not outputs else -1].shape[1]
    steps = inputs[0].shape[1] // splits // _STEP
    tile, split, row = lax.axis_index("tile"), lax.axis_index("split"), lax.axis_index("row")
    channels = pl.ds(tile * _TILE, _TILE)
    rates = [vectors_ref[i, channels] for i in range(_STATE)]
    bias, skip = vectors_ref[_STATE, channels], vectors_ref[_STATE + 1, channels]
    length = lengths_ref[row]
    zeros = vectors_ref[_STATE + 2, channels]  # read, since a loop's carry must have the layout of what is read

    of_channels = plgpu.BlockSpec((_STEP, _TILE), lambda i: (split * steps + i, tile))
    of_state = plgpu.BlockSpec((_STEP, _STATE), lambda i: (split * steps + i, 0))

    def step_size(raw, position):
        dt = raw.astype(jnp.float32) + bias
        if dt_softplus:
            dt = _softplus(dt)
        if dt_limit != (0.0, math.inf):
            dt = jnp.minimum(jnp.maximum(dt, dt_limit[0]), dt_limit[1])
        return jnp.where(position < length, dt, 0.0)  # whatever dt is there, NaN too

    def advance(state, dt, xdt, B, t):
        decays = [jnp.exp2(dt * rate) for rate in rates]
        return [decay * h + B[t, i] * xdt for i, (decay, h) in enumerate(zip(decays, state, strict=True))]

    def find_end(index, x, dt, B, carry):
        def position(t, carry):
            *state, total = carry
            step = step_size(dt[t], (split * steps + index[0]) * _STEP + t)
            total = jnp.minimum(total + step, 2.0**127)  # finite, for an A of 0
            return (*advance(state, step, x[t].astype(jnp.float32) * step, B, t), total)

        carry = lax.fori_loop(0, _STEP, position, carry)
        plgpu.commit_smem()  # all threads have read: the next copy may begin
        return carry

    def output(index, x, dt, B, C, *rest):
        *gate, state = rest

        def position(t, state):
            at = (split * steps + index[0]) * _STEP + t
            step = step_size(dt[t], at)
            x_t = x[t].astype(jnp.float32)
            state = advance(state, step, x_t * step, B, t)
            out = x_t * skip
            for i, h in enumerate(state):
                out = out + C[t, i] * h
            if gate:
                z = gate[0][t].astype(jnp.float32)
                out = out * (z / (1.0 + jnp.exp(-z)))
            y_ref[row, at, channels] = out.astype(y_ref.dtype)
            return tuple(state)

        state = lax.fori_loop(0, _STEP, position, state)
        plgpu.commit_smem()
        return state

    in_specs = [of_state if a.shape[2] == _STATE else of_channels for a in inputs]
    pipeline = partial(plgpu.emit_pipeline, grid=(steps,), in_specs=in_specs, max_concurrent_steps=2)
    if outputs:
        starts_ref, y_ref, ends_ref = others
        start = tuple(starts_ref[row, split, i, channels] for i in range(_STATE))
        state = pipeline(output, init_carry=start)(*(a.at[row] for a in inputs))
    else:
        ends_ref, sums_ref = others
        *state, total = pipeline(find_end, init_carry=(zeros,) * (_STATE + 1))(*(a.at[row] for a in inputs))
        sums_ref[row, split, channels] = total
    for i, h in enumerate(state):
        ends_ref[row, split, i, channels] = h


def _softplus(x: Array) -> Array:
    """log(1 + exp(x)), with log(1 + u) = 2 atanh(u / (2 + u)) by its series: a fast logarithm is coarse near 1."""
    u = jnp.exp(-jnp.abs(x))
    s = u / (2.0 + u)
    square = s * s
    series = jnp.full_like(x, 1 / 15)
    for k in (13, 11, 9, 7, 5, 3, 1):
        series = series * square + 1 / k
    return jnp.maximum(x, 0.0) + 2.0 * s * series
