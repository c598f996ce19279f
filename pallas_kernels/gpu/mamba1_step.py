"""A Mamba-1 layer's decode step in four kernels; the equations are those of `ops/scan.py`.

1. RMSNorm, in_proj and the convolution of x.
2. x_proj.
3. dt_proj, state update, output, D and gate of each channel: the state is read and written once, in place.
4. out_proj and the residual.

Values between the kernels stay float32 where the XLA step rounds them to the weights' dtype.
"""

from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxtyping import Array, Float

from mamba_jax.config import MambaConfig
from mamba_jax.pallas_kernels.gpu import matvec as matvec_kernel
from mamba_jax.pallas_kernels.gpu.common import LANES, WARPS, Registers, call, silu, softplus, unrounded
from mamba_jax.pallas_kernels.gpu.matvec import Conv, matvec
from mamba_jax.params import MAX_A_LOG, Mamba1Layer

_CHANNELS = LANES  # that a block updates: one a lane; its warps share the numbers of a channel's state


def declines(layer: Mamba1Layer, config: MambaConfig, batch: int) -> str | None:
    """Why the kernels do not take a layer; None if they do."""
    c = config
    if c.block_norm != "rms" or c.proj_bias:
        return "a LayerNorm before the mixer, or projections with biases"
    if c.bcdt_norm_eps is not None:
        return "norms of B, C and dt"
    if c.dt_rank % 16 or c.d_state % 8 or c.d_state > 64:
        return f"dt_rank {c.dt_rank} and d_state {c.d_state} (wanted: multiples of 16 and of 8, and at most 64)"
    weights = layer.in_proj, layer.x_proj, layer.out_proj
    return next(filter(None, (matvec_kernel.declines(weight, batch) for weight in weights)), None)


def mamba1_layer_step(
    layer: Mamba1Layer,
    config: MambaConfig,
    residual: Float[Array, "b m"],
    conv_state: Float[Array, "b w-1 d"],
    ssm_state: Float[Array, "b n d"],
    *,
    interpret: Any = None,
) -> tuple[Float[Array, "b m"], Float[Array, "b w-1 d"], Float[Array, "b n d"]]:
    """One position a row through norm, mixer and residual.

    Args:
        layer: weights that `declines` declines not.
        config: the model.
        residual: (b, d_model).
        conv_state: window of the convolution.
        ssm_state: state of the channels.
        interpret: as in `pl.kernel`.

    Returns:
        The new residual, window and state, in the dtypes that came.
    """
    xz, window = matvec(
        layer.in_proj,
        residual,
        norm=layer.norm,
        eps=config.norm_eps,
        conv=Conv(layer.conv, layer.conv_bias, conv_state),
        conv_rows=(0, config.d_inner, 0),
        block_rows=4,
        name="norm_in_proj_conv",
        interpret=interpret,
    )
    assert window is not None
    selected, _ = matvec(layer.x_proj, xz, block_rows=2, name="x_proj", interpret=interpret)
    y, ssm_state = state_update(
        xz, selected, layer, config, ssm_state, out_dtype=unrounded(layer.out_proj.dtype), interpret=interpret
    )
    residual, _ = matvec(
        layer.out_proj,
        y,
        residual=residual,
        block_rows=2,
        out_dtype=residual.dtype,
        name="out_proj",
        interpret=interpret,
    )
    return residual, window, ssm_state


@partial(jax.jit, static_argnames=("config", "out_dtype", "interpret"))
def state_update(
    xz: Float[Array, "b 2*d"],
    selected: Float[Array, "b r+2*n"],
    layer: Mamba1Layer,
    config: MambaConfig,
    ssm_state: Float[Array, "b n d"],
    *,
    out_dtype: Any,
    interpret: Any = None,
) -> tuple[Float[Array, "b d"], Float[Array, "b n d"]]:
    """Make dt, update the state, and gate the output; a lane has a channel, a warp a part of its state and of dt_proj.

    Args:
        xz: x after its convolution, and the gate.
        selected: low-rank dt, B and C.
        layer: its dt_proj, dt_bias, A_log and D are read.
        config: the model.
        ssm_state: state of the channels.
        out_dtype: of the output.
        interpret: as in `pl.kernel`.

    Returns:
        (C state + D x) silu(z) and the state.
    """
    d, n, r = config.d_inner, config.d_state, config.dt_rank
    b = xz.shape[0]
    of_state = plgpu.Layout.TILED(
        plgpu.Tiling(((_CHANNELS, n), (n // WARPS,), (1,))), warp_dims=(-3,), lane_dims=(-4,), vector_dim=-1
    )
    vector = 8 if r % (8 * WARPS) == 0 else 4  # columns of dt_proj that a thread reads at once
    of_weight = plgpu.Layout.TILED(
        plgpu.Tiling(((_CHANNELS, WARPS * vector), (vector,))), warp_dims=(-2,), lane_dims=(-3,), vector_dim=-1
    )
    at_channels, at_state, at_rank = of_state.reduce(1), of_state.reduce(0), of_weight.reduce(0)
    registers = Registers(interpret)
    load, spread = registers.load, registers.spread

    def body(ids: tuple[Any, Any], xz_ref: Any, selected_ref: Any, *refs: Any) -> None:
        dt_proj, dt_bias, A_log, D, state_ref, y_ref = refs
        row, part = ids
        mine = pl.ds(part * _CHANNELS, _CHANNELS)
        state = load(state_ref, (row, slice(None), mine), of_state, turned=True)
        A = -jnp.exp(jnp.minimum(load(A_log, (mine, slice(None)), of_state), MAX_A_LOG))
        weight = load(dt_proj, (mine, slice(None)), of_weight)
        bias, skip = load(dt_bias, (mine,), at_channels), load(D, (mine,), at_channels)
        x = load(xz_ref, (row, mine), at_channels)
        z = load(xz_ref, (row, pl.ds(d + part * _CHANNELS, _CHANNELS)), at_channels)
        low = load(selected_ref, (row, pl.ds(0, r)), at_rank)
        B = load(selected_ref, (row, pl.ds(r, n)), at_state)
        C = load(selected_ref, (row, pl.ds(r + n, n)), at_state)
        dt = jnp.sum(weight.astype(jnp.float32) * spread(low, (_CHANNELS, r), 1, of_weight), axis=1)
        dt = softplus((dt if interpret else plgpu.layout_cast(dt, at_channels)) + bias)

        def over(vector: Any, axis: int) -> Any:
            return spread(vector, (_CHANNELS, n), axis, of_state)

        state = state.astype(jnp.float32) * jnp.exp(over(dt, 0) * A) + over(x * dt, 0) * over(B, 1)
        y = jnp.sum(state * over(C, 1), axis=1)
        registers.store(state_ref, (row, slice(None), mine), state.astype(state_ref.dtype), turned=True)
        registers.store(y_ref, (row, mine), ((y + skip * x) * silu(z)).astype(out_dtype))

    inputs = [xz, selected, layer.dt_proj, layer.dt_bias, layer.A_log, layer.D]
    out = jax.ShapeDtypeStruct((b, d), out_dtype)
    y, state = call(body, "state_update", (b, d // _CHANNELS), inputs, [ssm_state], out, interpret)
    return y, state
