"""Mamba-2's scan (structured state-space duality), chunked.

For each head, with the B and C of its group:

    state[t] = exp(dt[t] A) state[t-1] + dt[t] x[t] B[t]^T        y[t] = (state[t] C[t] + D x[t]) * silu(z[t])

Inside a chunk the recurrence is a masked matrix product: y[i] = sum_{j<=i} (C[i].B[j]) exp(s[i] - s[j]) dt[j] x[j] with
s the running sum of dt A. Chunks hand the state on in order. Source: Dao and Gu, "Transformers are SSMs", 2024.

Differences of running sums lose digits: after a step of -100, float32 knows s to 4e-6 only. So s is kept in two parts,
multiples of 1/64, which add up exactly in any order, and small rests. Exactly, that is, up to 2^24 of them: a step
counts as at most 128, so a chunk has at most 2048 positions.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mamba_jax.ops.axes import pad_axis, scan_like, without_unit_axes
from mamba_jax.ops.checks import check_dt_limit, check_rank, check_same_dtype, check_scan, check_shape
from mamba_jax.ops.dispatch import Implementation, Kernel, device_axis, dispatch, over_devices
from mamba_jax.ops.dt import LARGE_STEP, finite_rates, step_size
from mamba_jax.ops.linear import einsum
from mamba_jax.ops.segments import WIPE, ChunkPlan, chain_chunks, later_starts, plan_chunks, valid_positions
from mamba_jax.pallas_kernels.gpu import ssd as gpu
from mamba_jax.pallas_kernels.tpu import ssd as tpu

# Chunks are worked on together while their decay matrices (b, c, h, q, q) hold no more elements than this, and in
# blocks one after the other beyond, so that memory does not grow with the sequence. A CPU wants one chunk at a time, a
# GPU or TPU enough of them to fill the machine.
_CPU_BLOCK = 1
_BLOCK = 1 << 24

_LONGEST = 2048  # positions of a chunk


class _Inputs(NamedTuple):
    """What a block of chunks reads; heads stand as g groups of r."""

    x: Float[Array, "b c g q r p"]
    z: Float[Array, "b c g q r p"] | None
    B: Float[Array, "b c g q n"]
    C: Float[Array, "b c g q n"]
    dt: Float[Array, "b c g r q"]
    dA: Float[Array, "b c g r q"]


def ssd(
    x: Float[Array, "b l h p"],
    dt: Float[Array, "b l h"],
    A: Float[Array, "h"],
    B: Float[Array, "b l g n"],
    C: Float[Array, "b l g n"],
    *,
    chunk_size: int,
    D: Float[Array, "h"] | Float[Array, "h p"] | None = None,
    z: Float[Array, "b l h p"] | None = None,
    dt_bias: Float[Array, "h"] | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    initial_state: Float[Array, "b *s h p n"] | None = None,
    lengths: Int[Array, "b"] | None = None,
    segment_ids: Int[Array, "b l"] | None = None,
    num_segments: int | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "b l h p"], Float[Array, "b *s h p n"]]:
    """Scan whole sequences.

    Args:
        x: inputs; x, B and C share one dtype.
        dt: raw step sizes.
        A: decay rates, negative; -inf wipes the state at any step above 0, and at a step of 0 keeps it.
        B: input maps; head i uses group i // (h // g).
        C: output maps, like B.
        chunk_size: positions a chunk; changes speed and memory, not results. Above 2048 it is taken as 2048.
        D: skip, per head or per channel.
        z: gate.
        dt_bias: added to dt before softplus.
        dt_softplus: apply softplus to dt.
        dt_limit: clamp of dt after softplus.
        initial_state: state before the first position; zeros if None. It belongs to the row's first sequence, or with
            num_segments it is (b, num_segments, h, p, n), one for each sequence.
        lengths: valid positions of each row, the rest is padding on the right: x, B and C are to be finite
            there, as the convolution leaves them, dt may be anything.
        segment_ids: sequence of each position, nondecreasing; no state crosses from one to the next. Below 0: padding.
        num_segments: number of packed sequences, empty ones included; asks for the final state of each.
        implementation: "xla"; "pallas", the kernel for Hopper GPUs, which takes bfloat16 x, B and C, headdim 64 and
            d_state 64 or 128, or for TPUs, which takes any but float16 and multiples of 8. Neither takes segment_ids;
            their chunk size is their own. None leaves it to `ops.dispatch`.

    Returns:
        y in x's dtype (of no meaning at padding), and the float32 state after the last valid position: (b, h, p, n), or
        with num_segments (b, num_segments, h, p, n), where an empty sequence keeps its initial state.

    Raises:
        ValueError: if shapes or dtypes do not agree, chunk_size < 1, both lengths and segment_ids are given, or
            num_segments comes without segment_ids.
        NotImplementedError: if implementation is "pallas" and the kernel cannot do this.
    """
    check_rank("x", x, "(b, l, h, p)")
    b, seqlen, h, p = x.shape
    g, n = _check_inputs(x, dt, A, B, C, D, z, dt_bias)
    check_scan(chunk_size, dt_limit, lengths, segment_ids, num_segments, (b, seqlen))
    s = 1 if num_segments is None else num_segments
    shape = (b, h, p, n) if num_segments is None else (b, s, h, p, n)
    if initial_state is None:
        initial_state = jnp.zeros(shape, jnp.float32)
    check_shape("initial_state", initial_state, shape, "(b, h, p, n)" if num_segments is None else "(b, s, h, p, n)")

    dt = step_size(dt, dt_bias, dt_softplus, dt_limit, valid_positions(lengths, segment_ids, seqlen))
    dA = jnp.maximum(dt * finite_rates(A), WIPE)
    if segment_ids is not None and num_segments is None:
        dA = jnp.where(later_starts(segment_ids)[..., None], WIPE, dA)
    if D is not None:
        D = jnp.broadcast_to(D.reshape(h, -1), (h, p)).astype(jnp.float32)

    plan = plan_chunks(min(chunk_size, _LONGEST), seqlen, segment_ids, num_segments)
    packed = None if segment_ids is None else "segment_ids"

    def scan(*args: Any) -> Any:  # of all heads, or of those of a device
        x, B = args[0], args[3]
        chosen = dispatch(
            implementation,
            xla=partial(_scan_xla, plan),
            cuda=Kernel(_scan_gpu, packed or gpu.declines(x, B)),
            tpu=Kernel(tpu.ssd, packed or tpu.declines(x, B)),
            hopper_only=True,
        )
        return chosen(*args)

    args = (x, dt, dA, B, C, D, z, initial_state.astype(jnp.float32))
    if over := device_axis(implementation, (h, h if g == 1 else g), args):
        maps = None if g == 1 else 2
        return over_devices(scan, over, (2, 2, 2, maps, maps, 0, 2, 1), (2, 1))(*args)
    return scan(*args)


def _scan_xla(
    plan: ChunkPlan,
    x: Float[Array, "b l h p"],
    dt: Float[Array, "b l h"],
    dA: Float[Array, "b l h"],
    B: Float[Array, "b l g n"],
    C: Float[Array, "b l g n"],
    D: Float[Array, "h p"] | None,
    z: Float[Array, "b l h p"] | None,
    initial_state: Float[Array, "b *s h p n"],
) -> tuple[Float[Array, "b l h p"], Float[Array, "b *s h p n"]]:
    """Scan by XLA's operations, from step sizes and exponents that are ready."""
    b, _, h, p = x.shape
    g, n = B.shape[2:]

    def chunks(a: Array) -> Array:  # (b, l, h or g, ...) -> (b, c, g, q, heads of the group, ...)
        a = plan.lay(a)
        return jnp.moveaxis(a.reshape(b, plan.chunks, plan.q, g, -1, *a.shape[3:]), 3, 2)

    inputs = _Inputs(
        x=chunks(x),
        z=None if z is None else chunks(z),
        B=chunks(B)[:, :, :, :, 0],
        C=chunks(C)[:, :, :, :, 0],
        dt=chunks(dt).swapaxes(-1, -2),
        dA=chunks(dA).swapaxes(-1, -2),
    )
    skip = None if D is None else D.reshape(g, h // g, p)
    states = initial_state.reshape(b, -1, g, h // g, p, n)
    y, states = _scan_chunks(jnp.moveaxis(states, -1, 3), inputs, plan.segment, skip)
    y = jnp.moveaxis(y, 2, 3).reshape(b, -1, h, p)
    return plan.restore(y), jnp.moveaxis(states, 3, -1).reshape(initial_state.shape)


def _scan_gpu(
    x: Float[Array, "b l h p"],
    dt: Float[Array, "b l h"],
    dA: Float[Array, "b l h"],
    B: Float[Array, "b l g n"],
    C: Float[Array, "b l g n"],
    D: Float[Array, "h p"] | None,
    z: Float[Array, "b l h p"] | None,
    initial_state: Float[Array, "b h p n"],
) -> tuple[Float[Array, "b l h p"], Float[Array, "b h p n"]]:
    """The same by the kernel; the gate follows it."""
    y, state = gpu.ssd(x, dt, dA, B, C, D, initial_state)
    if z is not None:
        y = (y.astype(jnp.float32) * jax.nn.silu(z.astype(jnp.float32))).astype(x.dtype)
    return y, state


def ssd_step(
    x: Float[Array, "b h p"],
    dt: Float[Array, "b h"],
    A: Float[Array, "h"],
    B: Float[Array, "b g n"],
    C: Float[Array, "b g n"],
    state: Float[Array, "b h p n"],
    *,
    D: Float[Array, "h"] | Float[Array, "h p"] | None = None,
    z: Float[Array, "b h p"] | None = None,
    dt_bias: Float[Array, "h"] | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
) -> tuple[Float[Array, "b h p"], Float[Array, "b h p n"]]:
    """Scan one position; arguments as in `ssd`, without the position axis.

    Returns:
        y in x's dtype, and the new state in the state's dtype (computed in float32).

    Raises:
        ValueError: if shapes or dtypes do not agree.
    """
    check_rank("x", x, "(b, h, p)")
    b, h, p = x.shape
    _, n = _check_inputs(x, dt, A, B, C, D, z, dt_bias)
    check_dt_limit(dt_limit)
    check_shape("state", state, (b, h, p, n), "(b, h, p, n)")
    dt = step_size(dt, dt_bias, dt_softplus, dt_limit)

    # The update keeps the state's own shape: then XLA works in place in a decode loop instead of on a copy.
    # The barrier makes a head's two transcendentals one small kernel, and the products with them part of the update.
    dt, decay = jax.lax.optimization_barrier((dt, jnp.exp(dt * finite_rates(A))))
    xdt = x.astype(jnp.float32) * dt[..., None]
    new_state = decay[..., None, None] * state.astype(jnp.float32) + xdt[..., None] * _each_head(B, h)
    y = jax.lax.platform_dependent(new_state, C.astype(jnp.float32), cpu=_contract_state, default=_reduce_state)
    if D is not None:
        y = y + D.astype(jnp.float32).reshape(h, -1) * x.astype(jnp.float32)
    if z is not None:
        y = y * jax.nn.silu(z.astype(jnp.float32))
    return y.astype(x.dtype), new_state.astype(state.dtype)


def _each_head(a: Float[Array, "b g n"], h: int) -> Float[Array, "b h 1 n"]:
    """The map of each head's group, to be fused into what reads it."""
    b, g, n = a.shape
    return jnp.broadcast_to(a.astype(jnp.float32)[:, :, None], (b, g, h // g, n)).reshape(b, h, 1, n)


def _reduce_state(state: Float[Array, "b h p n"], C: Float[Array, "b g n"]) -> Float[Array, "b h p"]:
    """Output of a state, in one pass with its update."""
    return (state * _each_head(C, state.shape[1])).sum(-1)


def _contract_state(state: Float[Array, "b h p n"], C: Float[Array, "b g n"]) -> Float[Array, "b h p"]:
    """Output of a state as a matrix product: on a CPU more than twice as fast as a reduction."""
    b, h, p, n = state.shape
    g = C.shape[1]
    return einsum("bgrpn,bgn->bgrp", state.reshape(b, g, h // g, p, n), C, jnp.float32).reshape(b, h, p)


def _check_inputs(
    x: Array, dt: Array, A: Array, B: Array, C: Array, D: Array | None, z: Array | None, dt_bias: Array | None
) -> tuple[int, int]:
    """Check what `ssd` and `ssd_step` share; returns (g, n)."""
    *row, h, p = x.shape
    check_rank("B", B, "(b, l, g, n)" if len(row) == 2 else "(b, g, n)")
    g, n = B.shape[-2:]
    check_shape("dt", dt, (*row, h), "(..., h)")
    check_shape("A", A, (h,), "(h,)")
    check_shape("B", B, (*row, g, n), "(..., g, n)")
    check_shape("C", C, (*row, g, n), "(..., g, n)")
    check_same_dtype(x=x, B=B, C=C)
    if h % g:
        raise ValueError(f"B: got {g} groups, wanted a divisor of h={h}")
    if D is not None and D.shape not in ((h,), (h, p)):
        raise ValueError(f"D: got shape {D.shape}, wanted (h,) = {(h,)} or (h, p) = {(h, p)}")
    if z is not None:
        check_shape("z", z, x.shape, "the shape of x")
    if dt_bias is not None:
        check_shape("dt_bias", dt_bias, (h,), "(h,)")
    return g, n


def _running_sums(dA: Float[Array, "*b q"]) -> tuple[Float[Array, "*b q"], Float[Array, "*b q"]]:
    """Running sum in two parts: exact multiples of 1/64, and rests of at most 1/128 a step.

    They are added up by a triangular matrix product: XLA would fuse a cumsum into the decay matrices and do it again
    for each of their elements.
    """
    q = dA.shape[-1]
    coarse = jax.lax.stop_gradient(jnp.round(dA * 64.0) / 64.0)
    up_to = (jnp.arange(q)[:, None] <= jnp.arange(q)).astype(jnp.float32)

    def add_up(part: Array) -> Array:
        return einsum("...j,ji->...i", part, up_to, jnp.float32)

    return add_up(coarse), add_up(dA - coarse)


def _scan_chunks(
    states: Float[Array, "b s g n r p"],
    inputs: _Inputs,
    segment: Int[Array, "b c"] | None,
    D: Float[Array, "g r p"] | None,
) -> tuple[Float[Array, "b c g q r p"], Float[Array, "b s g n r p"]]:
    """Run all chunks, in as many blocks as the platform wants."""
    b, c, g, r, q = inputs.dt.shape
    cpu, default = (-(-c // max(1, limit // (b * g * r * q * q))) for limit in (_CPU_BLOCK, _BLOCK))

    def widened(states: Array, inputs: _Inputs, *rest: Array | None) -> tuple[Array, Array]:
        wide = jax.tree.map(lambda a: a.astype(jnp.float32), inputs)  # a CPU computes in float32 anyway
        y, states = _scan_blocks(states, wide, *rest, blocks=cpu)
        return y.astype(inputs.x.dtype), states

    default_blocks = partial(_scan_blocks, blocks=default)
    return jax.lax.platform_dependent(states, inputs, segment, D, cpu=widened, default=default_blocks)


def _scan_blocks(
    states: Float[Array, "b s g n r p"],
    inputs: _Inputs,
    segment: Int[Array, "b c"] | None,
    D: Float[Array, "g r p"] | None,
    *,
    blocks: int,
) -> tuple[Float[Array, "b c g q r p"], Float[Array, "b s g n r p"]]:
    """Run blocks of chunks in order; the gradient keeps the states between them and computes a block again."""
    b, c, g, r, q = inputs.dt.shape
    k = -(-c // blocks)

    def cut(a: Array) -> Array:  # (b, c, ...) -> (blocks, b, k, ...); dt = 0 in the chunks that fill the last block
        a = pad_axis(a, 1, blocks * k)
        return jnp.moveaxis(a.reshape(b, blocks, k, *a.shape[2:]), 1, 0)

    whole = jax.tree.map(cut, (inputs, segment))

    @jax.checkpoint
    def block(states: Array, xs: tuple[_Inputs, Array | None]) -> tuple[Array, Array]:
        inputs, segment = jax.tree.map(lambda a, like: a.reshape(like.shape[1:]), xs, whole)
        states, y = _block(states, inputs, segment, D)
        return states, without_unit_axes(y)

    xs = jax.tree.map(jax.vmap(without_unit_axes), whole)
    states, y = scan_like(xs[0].x, block, states, xs)
    y = jnp.moveaxis(y.reshape(blocks, b, k, g, q, r, -1), 0, 1)
    return y.reshape(b, blocks * k, *y.shape[3:])[:, :c], states


def _block(
    states: Float[Array, "b s g n r p"],
    inputs: _Inputs,
    segment: Int[Array, "b c"] | None,
    D: Float[Array, "g r p"] | None,
) -> tuple[Float[Array, "b s g n r p"], Float[Array, "b c g q r p"]]:
    """Work on a few chunks together: products inside each chunk, then the states from one to the next.

    States stand as (n, r, p) here, so that both products with them leave x and y in the order they have in memory.
    """
    raw_x, z, B, C, dt, dA = inputs
    dtype = raw_x.dtype
    x = raw_x * jnp.maximum(dt / LARGE_STEP, 1.0).swapaxes(3, 4)[..., None]
    dt = jnp.minimum(dt, LARGE_STEP)

    coarse, fine = _running_sums(dA)
    decay = _decay(coarse[..., :, None] - coarse[..., None, :], fine[..., :, None] - fine[..., None, :])
    scores = einsum("bcgin,bcgjn->bcgij", C, B, dtype)[:, :, :, None]
    scores = _causal(scores * decay) * dt[..., None, :]
    y = einsum("bcgrij,bcgjrp->bcgrip", scores, x, dtype).swapaxes(3, 4)

    to_end = _decay(coarse[..., -1:] - coarse, fine[..., -1:] - fine) * dt
    weighted = x * to_end.swapaxes(3, 4)[..., None]
    update = einsum("bcgjn,bcgjrp->bcgnrp", B, weighted, dtype)
    from_start = jnp.exp(coarse + fine)
    incoming, states = chain_chunks(states, from_start[..., None, :, -1:], update, segment)
    carried = einsum("bcgin,bcgnrp->bcgirp", C, incoming, dtype)
    y = y + carried * from_start.swapaxes(3, 4)[..., None]

    if D is not None:
        y = y + D[:, None] * raw_x.astype(jnp.float32)
    if z is not None:
        y = y * jax.nn.silu(z.astype(jnp.float32))
    return states, y.astype(dtype)


def _causal(scores: Float[Array, "... q q"]) -> Float[Array, "... q q"]:
    """The scores of each position with itself and those before it, 0 with those after it."""
    q = scores.shape[-1]
    return jnp.where(jnp.arange(q)[:, None] >= jnp.arange(q), scores, 0.0)


def _decay(coarse: Float[Array, "..."], fine: Float[Array, "..."]) -> Float[Array, "..."]:
    """Exponential of a difference of running sums, whose exponent rounding must not lift above 0."""
    exponent = coarse + fine
    return jnp.exp(jnp.where(exponent > 0.0, 0.0, exponent))
