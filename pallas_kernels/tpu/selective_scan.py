"""Mamba-1's scan on TPUs; the equations are those of `ops/scan.py`.

The grid runs over rows, blocks of channels and, innermost and in order, stretches of positions. Channels lie on lanes
and the numbers of a channel's state on sublanes; the state stays in VMEM from stretch to stretch and in registers
within one. Step sizes, skip and gate are computed for a stretch as a whole, the recurrence a position at a time.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.tpu as pltpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from mamba_jax.ops.axes import pad_axis
from mamba_jax.pallas_kernels.tpu.common import VMEM_LIMIT, declined_dtype, lane_block, silu, softplus

_STRETCH = 128  # positions
_TOGETHER = 16  # positions that are loaded and stored together: the sublanes of a 16-bit register
_WIDTH = 512  # most channels of a block
_STATE = 64  # most numbers of a channel's state: beyond, they would not stay in registers


def declines(x: Array, dt: Array, A: Array) -> str | None:
    """Why the kernel does not take these arguments of `ops.scan.selective_scan`; None if it does."""
    d, n = A.shape
    if declined := declined_dtype(x=x, dt=dt):
        return declined
    if lane_block(d, _WIDTH) is None or n > _STATE:
        return f"{d} channels and d_state {n} (wanted: at most {_WIDTH} channels or whole registers, and {_STATE})"
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
    n = A.shape[1]
    width = lane_block(d, _WIDTH)
    assert width is not None
    q = min(_STRETCH, -(-l // _TOGETHER) * _TOGETHER)
    stretches = -(-l // q)
    if lengths is None:
        lengths = jnp.full((b,), l, jnp.int32)
    zeros = jnp.zeros((d,), jnp.float32)
    vectors = jnp.stack([zeros if a is None else a.astype(jnp.float32) for a in (dt_bias, D)])
    rows = [pad_axis(a, 1, stretches * q) for a in (x, dt, B, C, *(() if z is None else (z,)))]

    of_channels = pl.BlockSpec((1, q, width), lambda row, block, stretch, *_: (row, stretch, block))
    of_maps = pl.BlockSpec((1, q, n), lambda row, block, stretch, *_: (row, stretch, 0))
    of_rates = pl.BlockSpec((n, width), lambda row, block, stretch, *_: (0, block))
    of_vectors = pl.BlockSpec((2, width), lambda row, block, stretch, *_: (0, block))
    of_state = pl.BlockSpec((1, n, width), lambda row, block, stretch, *_: (row, 0, block))
    inputs = [*rows, A.T.astype(jnp.float32), vectors, initial_state]
    y, state = pl.pallas_call(
        partial(_kernel, dt_softplus=dt_softplus, dt_limit=dt_limit, has_gate=z is not None),
        out_shape=(
            jax.ShapeDtypeStruct(rows[0].shape, x.dtype),
            jax.ShapeDtypeStruct(initial_state.shape, jnp.float32),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(b, d // width, stretches),
            in_specs=[
                *(of_channels, of_channels, of_maps, of_maps, of_channels)[: len(rows)],
                of_rates,
                of_vectors,
                of_state,
            ],
            out_specs=(of_channels, of_state),
            scratch_shapes=[pltpu.VMEM((n, width), jnp.float32), *[pltpu.VMEM((q, width), jnp.float32)] * 3],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
        ),
        cost_estimate=pl.CostEstimate(
            flops=b * stretches * q * d * (6 * n + 4),
            transcendentals=b * stretches * q * d * (n + 3),
            bytes_accessed=sum(a.nbytes for a in (*inputs, rows[0], initial_state, *rows[2:4] * (d // width - 1))),
        ),
        interpret=interpret,
        name="selective_scan",
    )(jnp.minimum(lengths.astype(jnp.int32), l), *inputs)
    return y[:, :l], state


def _kernel(lengths_ref, x_ref, dt_ref, B_ref, C_ref, *refs, dt_softplus, dt_limit, has_gate):
    gate_ref = refs[0] if has_gate else None
    rates_ref, vectors_ref, initial_ref, y_ref, final_ref, state_ref, dt_step, xdt, out = refs[has_gate:]
    q = x_ref.shape[1]
    stretch = pl.program_id(2)

    @pl.when(stretch == 0)
    def _():
        state_ref[...] = initial_ref[0]

    dt = dt_ref[0].astype(jnp.float32) + vectors_ref[:1]
    if dt_softplus:
        dt = softplus(dt)
    if dt_limit != (0.0, math.inf):
        dt = jnp.clip(dt, *dt_limit)
    position = stretch * q + lax.broadcasted_iota(jnp.int32, dt.shape, 0)
    dt = jnp.where(position < lengths_ref[pl.program_id(0)], dt, 0.0)
    dt_step[...] = dt
    xdt[...] = x_ref[0].astype(jnp.float32) * dt
    rates = rates_ref[...]

    def advance(i, state):
        at = pl.ds(i * _TOGETHER, _TOGETHER)
        B, C = (ref[0, at].astype(jnp.float32).T for ref in (B_ref, C_ref))
        steps, entering, rows = dt_step[at], xdt[at], []
        for t in range(_TOGETHER):
            mine = slice(t, t + 1)
            state = state * jnp.exp(steps[mine] * rates) + B[:, mine] * entering[mine]
            rows.append(jnp.sum(C[:, mine] * state, axis=0, keepdims=True))
        out[at] = jnp.concatenate(rows)
        return state

    state = lax.fori_loop(0, q // _TOGETHER, advance, state_ref[...])
    state_ref[...] = state
    y = out[...] + vectors_ref[1:] * x_ref[0].astype(jnp.float32)
    if has_gate:
        y = y * silu(gate_ref[0].astype(jnp.float32))
    y_ref[0] = y.astype(y_ref.dtype)

    @pl.when(stretch == pl.num_programs(2) - 1)
    def _():
        final_ref[0] = state
