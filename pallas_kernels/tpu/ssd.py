"""Mamba-2's scan on TPUs; the equations are those of `ops/ssd.py`.

The grid runs over rows, groups, blocks of a group's heads and, innermost and in order, chunks. The state of a block of
heads stays in VMEM from chunk to chunk, as (n, heads * p): so both products with it fill the matrix unit, whatever p
is. Decay matrices never leave VMEM. Pallas fetches a chunk's inputs while the chunk before is worked on.
"""

from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.tpu as pltpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from mamba_jax.ops.axes import pad_axis
from mamba_jax.ops.dt import LARGE_STEP
from mamba_jax.pallas_kernels.tpu.common import (
    LANES,
    VMEM_LIMIT,
    declined_dtype,
    declined_vmem,
    dot,
    silu,
)

CHUNK = 128
_WIDTH = 1024  # most channels of a block of heads
_ROWS = 16  # sublanes of a 16-bit register


def declines(x: Array, B: Array) -> str | None:
    """Why the kernel does not take these arguments of `ops.ssd.ssd`; None if it does."""
    h, p = x.shape[-2:]
    g, n = B.shape[-2:]
    if declined := declined_dtype(x=x):
        return declined
    heads = _heads(h // g, p)
    if p % 8 or n % 8 or heads is None:
        return f"{h // g} heads a group, headdim {p} and d_state {n} (wanted: sizes of whole registers)"
    return declined_vmem(_vmem(heads, p, n))


def _heads(per_group: int, p: int) -> int | None:
    """Heads of a block: whole registers along both axes they lie on, or all of a group."""
    if per_group * p <= _WIDTH:
        return per_group
    sizes = range(_WIDTH // p // 8 * 8, 0, -8)
    return next((size for size in sizes if per_group % size == 0 and size * p % LANES == 0), None)


def _vmem(heads: int, p: int, n: int) -> int:
    """Bytes of a block at most: everything float32, with a second buffer for what is fetched or written."""
    width, lanes = -(-heads * p // LANES) * LANES, -(-n // LANES) * LANES
    fetched = 3 * CHUNK * width + 2 * CHUNK * lanes + 2 * width * lanes
    return 4 * (2 * fetched + 2 * lanes * width + 3 * CHUNK * width + 6 * CHUNK * CHUNK)


def ssd(
    x: Float[Array, "b l h p"],
    dt: Float[Array, "b l h"],
    dA: Float[Array, "b l h"],
    B: Float[Array, "b l g n"],
    C: Float[Array, "b l g n"],
    D: Float[Array, "h p"] | None,
    z: Float[Array, "b l h p"] | None,
    initial_state: Float[Array, "b h p n"],
    *,
    interpret: Any = False,
) -> tuple[Float[Array, "b l h p"], Float[Array, "b h p n"]]:
    """Scan whole rows.

    Args:
        x: inputs, bfloat16 or float32 like B and C.
        dt: step sizes after softplus and clamp, float32; 0 at padding.
        dA: dt A, float32.
        B: input maps; head i uses group i // (h // g).
        C: output maps, like B.
        D: skip, float32.
        z: gate.
        initial_state: float32.
        interpret: as in `pl.pallas_call`.

    Returns:
        y, and the float32 state after the last position.
    """
    b, l, h, p = x.shape  # noqa: E741
    g, n = B.shape[2:]
    per_group = h // g
    heads = _heads(per_group, p)
    assert heads is not None
    q = min(CHUNK, -(-l // _ROWS) * _ROWS)
    chunks = -(-l // q)
    blocks, width = per_group // heads, heads * p
    # Blocks of whole registers are cut out of the channels where they lie; other groups get an axis of their own.
    cut = width % LANES == 0 or g == 1

    def channels(a: Array) -> Array:  # (b, l, h, p) -> (b, 1, l, h * p) or (b, g, l, h // g * p)
        a = pad_axis(a, 1, chunks * q).reshape(b, chunks * q, 1 if cut else g, -1)
        return a.swapaxes(1, 2)

    def maps(a: Array) -> Array:
        return pad_axis(a, 1, chunks * q).swapaxes(1, 2)

    def steps(a: Array) -> Array:
        return maps(a).reshape(b, g, per_group, chunks * q)

    def at(row: Any, group: Any, block: Any, chunk: Any) -> tuple[Any, ...]:
        return (row, 0, chunk, group * blocks + block) if cut else (row, group, chunk, block)

    of_channels = pl.BlockSpec((1, 1, q, width), at)
    of_maps = pl.BlockSpec((1, 1, q, n), lambda row, group, block, chunk: (row, group, chunk, 0))
    of_steps = pl.BlockSpec((1, 1, heads, q), lambda row, group, block, chunk: (row, group, block, chunk))
    of_skip = pl.BlockSpec((1, 1, width), lambda row, group, block, chunk: (group * blocks + block, 0, 0))
    of_state = pl.BlockSpec((1, 1, width, n), lambda row, group, block, chunk: (row, group * blocks + block, 0, 0))

    inputs = [channels(x), steps(dt), steps(dA), maps(B), maps(C), initial_state.reshape(b, -1, width, n)]
    in_specs = [of_channels, of_steps, of_steps, of_maps, of_maps, of_state]
    if D is not None:
        inputs, in_specs = [*inputs, D.reshape(-1, 1, width)], [*in_specs, of_skip]
    if z is not None:
        inputs, in_specs = [*inputs, channels(z)], [*in_specs, of_channels]
    y, state = pl.pallas_call(
        partial(_kernel, p=p, has_skip=D is not None, has_gate=z is not None),
        out_shape=(
            jax.ShapeDtypeStruct(inputs[0].shape, x.dtype),
            jax.ShapeDtypeStruct((b, h * p // width, width, n), jnp.float32),
        ),
        grid=(b, g, blocks, chunks),
        in_specs=in_specs,
        out_specs=(of_channels, of_state),
        scratch_shapes=[
            pltpu.VMEM((n, width), jnp.float32),
            pltpu.VMEM((q, width), jnp.float32),
            pltpu.VMEM((q, width), x.dtype),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * b * chunks * q * (h // heads * q * n + h * p * (q + 2 * n)),
            transcendentals=b * chunks * q * h * q,
            bytes_accessed=sum(a.nbytes for a in (*inputs, x, initial_state, *[B, C] * (blocks - 1))),
        ),
        interpret=interpret,
        name="ssd",
    )(*inputs)
    y = y.swapaxes(1, 2).reshape(b, chunks * q, h, p)[:, :l]
    return y, state.reshape(initial_state.shape)


def _kernel(x_ref, dt_ref, dA_ref, B_ref, C_ref, initial_ref, *refs, p, has_skip, has_gate):
    skip_ref = refs[0] if has_skip else None
    gate_ref = refs[has_skip] if has_gate else None
    y_ref, final_ref, state_ref, carried_ref, weighted_ref = refs[has_skip + has_gate :]
    q, width = x_ref.shape[2:]
    dtype = x_ref.dtype
    chunk = pl.program_id(3)

    @pl.when(chunk == 0)
    def _():
        state_ref[...] = initial_ref[0, 0].T

    B, C, dt, dA = B_ref[0, 0], C_ref[0, 0], dt_ref[0, 0], dA_ref[0, 0]
    enlarged, dt = jnp.maximum(dt / LARGE_STEP, 1.0).T, jnp.minimum(dt, LARGE_STEP)
    row, column = (lax.broadcasted_iota(jnp.int32, (q, q), axis) for axis in (0, 1))
    causal = row >= column
    coarse = jnp.round(dA * 64.0) * (1.0 / 64.0)
    up_to = (row <= column).astype(jnp.float32)
    coarse, fine = (dot(part, up_to, 1, 0, jnp.float32) for part in (coarse, dA - coarse))  # (heads, q)
    from_start, through = jnp.exp(coarse + fine).T, jnp.exp(coarse[:, -1:] + fine[:, -1:])
    to_end = (jnp.exp(_no_more_than_0(coarse[:, -1:] - coarse, fine[:, -1:] - fine)) * dt).T
    coarse_down, fine_down = coarse.T, fine.T

    scores = dot(C, B, 1, 1, dtype)
    carried_ref[...] = dot(C, state_ref[...], 1, 0, dtype)
    for i in range(width // p):
        mine = slice(i * p, (i + 1) * p)
        raw_x = x_ref[0, 0, :, mine].astype(jnp.float32)
        x = raw_x * enlarged[:, i : i + 1]
        exponent = _no_more_than_0(
            coarse_down[:, i : i + 1] - coarse[i : i + 1], fine_down[:, i : i + 1] - fine[i : i + 1]
        )
        decayed = jnp.where(causal, scores * jnp.exp(exponent) * dt[i : i + 1], 0.0)
        y = dot(decayed, x, 1, 0, dtype) + carried_ref[:, mine] * from_start[:, i : i + 1]
        if has_skip:
            y = y + skip_ref[0, :, mine] * raw_x
        if has_gate:
            y = y * silu(gate_ref[0, 0, :, mine].astype(jnp.float32))
        y_ref[0, 0, :, mine] = y.astype(dtype)
        weighted_ref[:, mine] = (x * to_end[:, i : i + 1]).astype(dtype)
        state_ref[:, mine] = state_ref[:, mine] * through[i : i + 1]
    state_ref[...] += dot(B, weighted_ref[...], 0, 0, dtype)

    @pl.when(chunk == pl.num_programs(3) - 1)
    def _():
        final_ref[0, 0] = state_ref[...].T


def _no_more_than_0(coarse, fine):
    """Difference of running sums, which rounding must not lift above 0."""
    return jnp.minimum(coarse + fine, 0.0)
