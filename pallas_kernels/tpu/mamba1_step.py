"""A Mamba-1 layer's decode step on TPUs, one kernel between the projections; the equations are those of `ops/scan.py`.

The grid runs twice over blocks of channels, all rows together: first each block is convolved and added to the low-rank
dt, B and C that x_proj makes of all channels, then it gets its step sizes, updates its state in place, and is gated.
The blocks of the second pass are fetched while the first still runs. Values inside stay float32 where the XLA step
rounds them to the weights' dtype.
"""

from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.tpu as pltpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from mamba_jax.config import MambaConfig
from mamba_jax.pallas_kernels.tpu.common import (
    VMEM_LIMIT,
    convolve,
    declined_dtype,
    declined_vmem,
    dot,
    lane_block,
    padded,
    silu,
    softplus,
)
from mamba_jax.params import MAX_A_LOG, Mamba1Layer

_WIDTH = 1024  # most channels of a block
_MAX_BATCH = 16  # rows, which the kernel goes through one by one in its code


def declines(layer: Mamba1Layer, config: MambaConfig, conv_state: Array, ssm_state: Array) -> str | None:
    """Why the kernel does not take a layer; None if it does."""
    c, batch = config, conv_state.shape[0]
    if declined := declined_dtype(weights=layer.in_proj, conv_state=conv_state, ssm_state=ssm_state):
        return declined
    if batch > _MAX_BATCH:
        return f"{batch} rows (wanted: at most {_MAX_BATCH})"
    width = lane_block(c.d_inner, _WIDTH)
    if width is None or width % 128:
        return f"{c.d_inner} channels (wanted: a multiple of 128)"
    needed = 8 * (
        batch * (padded(8, width) + 2 * padded(c.d_state, width))
        + padded(c.dt_rank + 2 * c.d_state, width)
        + padded(c.dt_rank, width)
        + 8 * padded(8, width)
    )
    return declined_vmem(needed)


def mix(
    layer: Mamba1Layer,
    config: MambaConfig,
    xz: Float[Array, "b 2*d"],
    conv_state: Float[Array, "b w-1 d"],
    ssm_state: Float[Array, "b n d"],
    *,
    interpret: Any = False,
) -> tuple[Float[Array, "b d"], Float[Array, "b w-1 d"], Float[Array, "b n d"]]:
    """One position a row, from what in_proj gave to what out_proj takes.

    Args:
        layer: weights that `declines` declines not.
        config: the model.
        xz: x and the gate.
        conv_state: window of the convolution.
        ssm_state: state of the channels.
        interpret: as in `pl.pallas_call`.

    Returns:
        The gated output in the weights' dtype, and the states in their own.
    """
    c = config
    b, d, n = xz.shape[0], c.d_inner, c.d_state
    width = lane_block(d, _WIDTH)
    assert width is not None
    tiles = d // width
    selected = c.dt_rank + 2 * n

    def first(phase: Any, tile: Any) -> Any:
        return tile + phase * (tiles - 1 - tile)

    def second(phase: Any, tile: Any) -> Any:
        return phase * tile

    of_window = pl.BlockSpec((b, c.d_conv - 1, width), lambda *at: (0, 0, first(*at)))
    of_state = pl.BlockSpec((b, n, width), lambda *at: (0, 0, second(*at)))
    of_rows = pl.BlockSpec((b, width), lambda *at: (0, second(*at)))
    inputs = [
        (xz, pl.BlockSpec((b, width), lambda *at: (0, first(*at)))),
        (xz, pl.BlockSpec((b, width), lambda *at: (0, tiles + second(*at)))),
        (conv_state, of_window),
        (ssm_state, of_state),
        (layer.conv.T, pl.BlockSpec((c.d_conv, width), lambda *at: (0, first(*at)))),
        (layer.x_proj, pl.BlockSpec((selected, width), lambda *at: (0, first(*at)))),
        (layer.dt_proj.T, pl.BlockSpec((c.dt_rank, width), lambda *at: (0, second(*at)))),
        (layer.A_log.T, pl.BlockSpec((n, width), lambda *at: (0, second(*at)))),
        (layer.dt_bias[None], pl.BlockSpec((1, width), lambda *at: (0, second(*at)))),
        (layer.D[None], pl.BlockSpec((1, width), lambda *at: (0, second(*at)))),
    ]
    if layer.conv_bias is not None:
        inputs.append((layer.conv_bias[None], pl.BlockSpec((1, width), lambda *at: (0, first(*at)))))
    arrays, in_specs = zip(*inputs, strict=True)
    out = jax.ShapeDtypeStruct((b, d), layer.out_proj.dtype)
    y, conv_state, ssm_state = pl.pallas_call(
        partial(_kernel, c, layer.conv_bias is not None),
        out_shape=(out, *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (conv_state, ssm_state))),
        grid=(2, tiles),
        in_specs=in_specs,
        out_specs=(of_rows, of_window, of_state),
        scratch_shapes=[pltpu.VMEM((tiles, b, width), jnp.float32), pltpu.VMEM((b, selected), jnp.float32)],
        input_output_aliases={2: 1, 3: 2},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
        ),
        cost_estimate=pl.CostEstimate(
            flops=6 * ssm_state.size + 2 * b * d * (selected + c.dt_rank + c.d_conv + 6),
            transcendentals=ssm_state.size + 4 * b * d,
            bytes_accessed=sum(a.nbytes for a in (*arrays[1:], conv_state, ssm_state)) + b * d * out.dtype.itemsize,
        ),
        interpret=interpret,
        name="mamba1_step",
    )(*arrays)
    return y, conv_state, ssm_state


def _kernel(config, has_bias, *refs):
    inputs, (y_ref, new_window_ref, new_state_ref, conv_ref, selected_ref) = refs[:-5], refs[-5:]
    raw_ref, gate_ref, window_ref, state_ref, taps_ref, x_proj_ref, dt_proj_ref, A_log_ref, dt_bias_ref, D_ref = inputs[
        :10
    ]
    r, n = config.dt_rank, config.d_state
    tile = pl.program_id(1)
    b = raw_ref.shape[0]
    weights = x_proj_ref.dtype

    @pl.when(pl.program_id(0) == 0)
    def _():
        raw = raw_ref[...].astype(jnp.float32)
        rows = []
        for i in range(b):
            window = window_ref[i].astype(jnp.float32)
            mine = raw[i : i + 1]
            rows.append(convolve(taps_ref[...], inputs[10][...] if has_bias else None, window, mine))
            new_window_ref[i] = jnp.concatenate([window[1:], mine]).astype(new_window_ref.dtype)
        x = jnp.concatenate(rows)
        conv_ref[tile] = x
        part = dot(x, x_proj_ref[...], 1, 1, weights)
        selected_ref[...] = jnp.where(tile == 0, part, selected_ref[...] + part)

    @pl.when(pl.program_id(0) == 1)
    def _():
        parts = (selected_ref[:, :r], selected_ref[:, r : r + n], selected_ref[:, r + n :])
        if config.bcdt_norm_eps is not None:
            parts = [
                part * lax.rsqrt(jnp.mean(part * part, axis=1, keepdims=True) + config.bcdt_norm_eps) for part in parts
            ]
        low, B, C = parts
        dt = softplus(dot(low, dt_proj_ref[...], 1, 0, weights) + dt_bias_ref[...])
        x, B, C, rates = conv_ref[tile], B.T, C.T, -jnp.exp(jnp.minimum(A_log_ref[...], MAX_A_LOG))
        rows = []
        for i in range(b):
            mine, column = slice(i, i + 1), (slice(None), slice(i, i + 1))
            state = state_ref[i].astype(jnp.float32) * jnp.exp(dt[mine] * rates) + B[column] * (dt[mine] * x[mine])
            new_state_ref[i] = state.astype(new_state_ref.dtype)
            rows.append(jnp.sum(C[column] * state, axis=0, keepdims=True))
        y = jnp.concatenate(rows) + D_ref[...] * x
        y_ref[...] = (y * silu(gate_ref[...].astype(jnp.float32))).astype(y_ref.dtype)
