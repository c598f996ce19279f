"""A Mamba-2 layer's decode step in three kernels; the equations are those of `ops/ssd.py`.

1. RMSNorm, in_proj, and the convolution of B and C, which every head reads.
2. A head's convolution of x, state update, output, D and gate: the state is read and written once, in place.
3. Gated norm, out_proj and the residual.

Values between the kernels stay float32 where the XLA step rounds them to the weights' dtype.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jaxtyping import Array, Float

from mamba_jax.config import MambaConfig
from mamba_jax.pallas_kernels.gpu import matvec as matvec_kernel
from mamba_jax.pallas_kernels.gpu.common import (
    LANES,
    Registers,
    call,
    convolve,
    rows_layout,
    silu,
    softplus,
    unrounded,
)
from mamba_jax.pallas_kernels.gpu.matvec import Conv, matvec
from mamba_jax.params import MAX_A_LOG, Mamba2Layer

_STATE_ROWS = 4  # of a head's state that one block updates


def declines(layer: Mamba2Layer, config: MambaConfig, batch: int) -> str | None:
    """Why the kernels do not take a layer; None if they do."""
    c = config
    if c.block_norm != "rms" or c.proj_bias:
        return "a LayerNorm before the mixer, or projections with biases"
    if c.gated_norm and (c.norm_before_gate or c.ngroups > 1):
        return "a gated norm before the gate, or in groups"
    if c.headdim % _STATE_ROWS or c.d_state not in (64, 128, 256):
        return f"headdim {c.headdim} and d_state {c.d_state} (wanted: a multiple of {_STATE_ROWS}, and 64, 128 or 256)"
    return matvec_kernel.declines(layer.in_proj, batch) or matvec_kernel.declines(layer.out_proj, batch)


def mamba2_layer_step(
    layer: Mamba2Layer,
    config: MambaConfig,
    residual: Float[Array, "b m"],
    conv_state: Float[Array, "b w-1 d+2*g*n"],
    ssm_state: Float[Array, "b h p n"],
    *,
    interpret: Any = None,
) -> tuple[Float[Array, "b m"], Float[Array, "b w-1 d+2*g*n"], Float[Array, "b h p n"]]:
    """One position a row through norm, mixer and residual.

    Args:
        layer: weights that `declines` declines not.
        config: the model.
        residual: (b, d_model).
        conv_state: window of the convolution.
        ssm_state: state of the heads.
        interpret: as in `pl.kernel`.

    Returns:
        The new residual, window and state, in the dtypes that came.
    """
    c = config
    maps = (2 * c.d_inner, 2 * c.d_inner + 2 * c.ngroups * c.d_state, c.d_inner)
    conv = Conv(layer.conv, layer.conv_bias, conv_state)
    zxbcdt, window = matvec(
        layer.in_proj,
        residual,
        norm=layer.norm,
        eps=c.norm_eps,
        conv=conv,
        conv_rows=maps,
        block_rows=4,
        name="norm_in_proj",
        interpret=interpret,
    )
    assert window is not None
    y, window, ssm_state = state_update(
        zxbcdt, layer, c, window, ssm_state, out_dtype=unrounded(layer.out_proj.dtype), interpret=interpret
    )
    residual, _ = matvec(
        layer.out_proj,
        y,
        norm=layer.gated_norm,
        eps=c.norm_eps,
        residual=residual,
        block_rows=2,
        out_dtype=residual.dtype,
        name="norm_out_proj",
        interpret=interpret,
    )
    return residual, window, ssm_state


@partial(jax.jit, static_argnames=("config", "out_dtype", "interpret"))
def state_update(
    zxbcdt: Float[Array, "b 2*d+2*g*n+h"],
    layer: Mamba2Layer,
    config: MambaConfig,
    conv_state: Float[Array, "b w-1 d+2*g*n"],
    ssm_state: Float[Array, "b h p n"],
    *,
    out_dtype: Any,
    interpret: Any = None,
) -> tuple[Float[Array, "b d"], Float[Array, "b w-1 d+2*g*n"], Float[Array, "b h p n"]]:
    """Convolve x, update the state, and gate the output.

    Args:
        zxbcdt: what in_proj gave, B and C after their convolution.
        layer: its conv, conv_bias, A_log, dt_bias and D are read.
        config: the model.
        conv_state: window, moved on already where it holds B and C.
        ssm_state: state of the heads.
        out_dtype: of the output.
        interpret: as in `pl.kernel`.

    Returns:
        (C state + D x) silu(z), the window and the state.
    """
    c = config
    d, p, n, g, h = c.d_inner, c.headdim, c.d_state, c.ngroups, c.nheads
    b, width = zxbcdt.shape[0], c.d_conv
    size, rows = (_STATE_ROWS, n), _STATE_ROWS
    layout = rows_layout(n // LANES)
    at_rows, at_columns = layout.reduce(1), layout.reduce(0)
    registers = Registers(interpret)
    load = registers.load
    inputs = [zxbcdt, layer.A_log, layer.dt_bias, layer.D, layer.conv]
    inputs += [] if layer.conv_bias is None else [layer.conv_bias]

    def body(ids: tuple[Any, Any, Any], values: Any, A_log: Any, dt_bias: Any, D: Any, taps: Any, *refs: Any) -> None:
        row, head, part = ids
        *biases, window, state_ref, y_ref = refs
        mine = pl.ds(part * rows, rows)
        channels = pl.ds(head * p + part * rows, rows)
        group = head // (h // g)
        state = load(state_ref, (row, head, mine, slice(None)), layout)
        raw = load(values, (row, pl.ds(d + head * p + part * rows, rows)), at_rows)
        past = [load(window, (row, j, channels), at_rows) for j in range(width - 1)]
        filters = [load(taps, (channels, j), at_rows) for j in range(width)]
        bias = load(biases[0], (channels,), at_rows) if biases else None
        z = load(values, (row, channels), at_rows)
        B = load(values, (row, pl.ds(2 * d + group * n, n)), at_columns)
        C = load(values, (row, pl.ds(2 * d + g * n + group * n, n)), at_columns)
        skip = D[head] if len(D.shape) == 1 else load(D, (head, mine), at_rows)
        dt = softplus(values[row, 2 * d + 2 * g * n + head] + dt_bias[head])
        if c.dt_limit != (0.0, math.inf):
            dt = jnp.clip(dt, *c.dt_limit)
        decay = jnp.exp(-dt * jnp.exp(jnp.minimum(A_log[head], MAX_A_LOG)))

        raw = raw.astype(window.dtype)
        x = convolve(filters, bias, past, raw)
        state = state.astype(jnp.float32) * decay
        state = state + registers.spread(x * dt, size, 0, layout) * registers.spread(B, size, 1, layout)
        y = jnp.sum(state * registers.spread(C, size, 1, layout), axis=1)
        for j, value in enumerate([*past[1:], raw]):
            registers.store(window, (row, j, channels), value)
        registers.store(state_ref, (row, head, mine, slice(None)), state.astype(state_ref.dtype))
        registers.store(y_ref, (row, channels), ((y + skip * x) * silu(z)).astype(out_dtype))

    out = jax.ShapeDtypeStruct((b, d), out_dtype)
    y, window, state = call(body, "state_update", (b, h, p // rows), inputs, [conv_state, ssm_state], out, interpret)
    return y, window, state
