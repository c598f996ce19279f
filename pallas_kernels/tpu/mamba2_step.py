"""A Mamba-2 layer's decode step on TPUs, one kernel between the projections; the equations are those of `ops/ssd.py`.

The grid runs over rows and, in order, blocks of heads. The first block convolves the row; each block reads and writes
its heads' state once, in place, while the next one's is fetched; the last one gates and normalises the row. Values
inside stay float32 where the XLA step rounds them to the weights' dtype.
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
from mamba_jax.ops.dt import decay_rates, step_size
from mamba_jax.pallas_kernels.tpu.common import VMEM_LIMIT, convolve, declined_dtype, declined_vmem, padded, silu
from mamba_jax.params import Mamba2Layer

_STATE_BYTES = 512 * 1024  # of a block of heads, about
_SCALARS = 16 * 1024  # steps and decays that scalar memory holds


def declines(layer: Mamba2Layer, config: MambaConfig, conv_state: Array, ssm_state: Array) -> str | None:
    """Why the kernel does not take a layer; None if it does."""
    c, batch = config, conv_state.shape[0]
    if declined := declined_dtype(weights=layer.in_proj, conv_state=conv_state, ssm_state=ssm_state):
        return declined
    if c.headdim % 8 or c.d_state % 8:
        return f"headdim {c.headdim} and d_state {c.d_state} (wanted: multiples of 8)"
    if 2 * batch * c.nheads > _SCALARS:
        return f"{batch} rows of {c.nheads} heads (wanted: at most {_SCALARS // 2} heads in all)"
    return declined_vmem(4 * _heads(c) * _head_bytes(c) + 64 * padded(8, 2 * c.d_inner + c.conv_channels))


def _head_bytes(config: MambaConfig) -> int:
    return 4 * padded(config.headdim, config.d_state)


def _heads(config: MambaConfig) -> int:
    """Heads of a block."""
    h, most = config.nheads, max(1, _STATE_BYTES // _head_bytes(config))
    return next(size for size in range(min(h, most), 0, -1) if h % size == 0)


def mix(
    layer: Mamba2Layer,
    config: MambaConfig,
    zxbcdt: Float[Array, "b 2*d+2*g*n+h"],
    conv_state: Float[Array, "b w-1 d+2*g*n"],
    ssm_state: Float[Array, "b h p n"],
    *,
    interpret: Any = False,
) -> tuple[Float[Array, "b d"], Float[Array, "b w-1 d+2*g*n"], Float[Array, "b h p n"]]:
    """One position a row, from what in_proj gave to what out_proj takes.

    Args:
        layer: weights that `declines` declines not.
        config: the model.
        zxbcdt: gate, x, B, C and raw step sizes.
        conv_state: window of the convolution.
        ssm_state: state of the heads.
        interpret: as in `pl.pallas_call`.

    Returns:
        The gated and normed output in the weights' dtype, and the states in their own.
    """
    c = config
    b, d, h, heads = zxbcdt.shape[0], c.d_inner, c.nheads, _heads(c)
    dt = step_size(zxbcdt[:, -h:], layer.dt_bias, True, c.dt_limit)
    decay = jnp.exp(dt * decay_rates(layer.A_log))
    weights = [layer.conv.T]
    weights += [] if layer.conv_bias is None else [layer.conv_bias[None]]
    weights += [] if layer.gated_norm is None else [layer.gated_norm[None]]

    def of_row(a: Array | jax.ShapeDtypeStruct) -> pl.BlockSpec:
        return pl.BlockSpec((1, *a.shape[1:]), lambda row, block: (row, 0, 0))

    of_state = pl.BlockSpec((1, heads, *ssm_state.shape[2:]), lambda row, block: (row, block, 0, 0))
    rows = zxbcdt[:, None]
    out = jax.ShapeDtypeStruct((b, 1, d), layer.out_proj.dtype)
    skip = layer.D.reshape(h // heads, heads, -1)
    arrays = [dt, decay, rows, conv_state, ssm_state, skip, *weights]
    y, conv_state, ssm_state = pl.pallas_call(
        partial(_kernel, c, layer.conv_bias is not None, layer.gated_norm is not None),
        out_shape=(out, *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (conv_state, ssm_state))),
        grid=(b, h // heads),
        in_specs=[
            *[pl.BlockSpec(memory_space=pltpu.SMEM)] * 2,
            of_row(rows),
            of_row(conv_state),
            of_state,
            pl.BlockSpec((1, *skip.shape[1:]), lambda row, block: (block, 0, 0)),
            *(pl.BlockSpec(a.shape, lambda row, block: (0, 0)) for a in weights),
        ],
        out_specs=(of_row(out), of_row(conv_state), of_state),
        scratch_shapes=[
            pltpu.VMEM((2 * c.ngroups, c.d_state), jnp.float32),
            *[pltpu.VMEM((h // heads, heads, c.headdim), jnp.float32)] * 2,
        ],
        input_output_aliases={3: 1, 4: 2},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
        ),
        cost_estimate=pl.CostEstimate(
            flops=5 * ssm_state.size + 2 * c.d_conv * b * c.conv_channels + 10 * b * d,
            transcendentals=b * (c.conv_channels + d),
            bytes_accessed=sum(a.nbytes for a in (*arrays, conv_state, ssm_state)) + b * d * out.dtype.itemsize,
        ),
        interpret=interpret,
        name="mamba2_step",
    )(*arrays)
    return y[:, 0], conv_state, ssm_state


def _kernel(config, has_bias, has_norm, *refs):
    c = config
    dt_ref, decay_ref, row_ref, window_ref, state_ref, skip_ref, taps_ref, *refs = refs
    bias_ref = refs[0] if has_bias else None
    norm_ref = refs[has_bias] if has_norm else None
    y_ref, new_window_ref, new_state_ref, maps_ref, x_ref, out_ref = refs[has_bias + has_norm :]
    d, p, n, g = c.d_inner, c.headdim, c.d_state, c.ngroups
    row, block = pl.program_id(0), pl.program_id(1)
    blocks, heads, _ = x_ref.shape

    @pl.when(block == 0)
    def _():
        window = window_ref[0].astype(jnp.float32)
        raw = row_ref[0, :, d : d + c.conv_channels].astype(jnp.float32)
        xBC = convolve(taps_ref[...], None if bias_ref is None else bias_ref[...], window, raw)
        new_window_ref[0] = jnp.concatenate([window[1:], raw]).astype(new_window_ref.dtype)
        maps_ref[...] = _fold(xBC[:, d:], 2 * g, n)
        x = xBC[:, :d]
        for k in range(blocks):
            x_ref[k] = _fold(x[:, k * heads * p : (k + 1) * heads * p], heads, p)

    columns = x_ref[block].T  # (p, heads)
    outputs = []
    for i in range(heads):
        head = block * heads + i
        group = lax.div(head, c.nheads // g)
        B, C = (maps_ref[pl.ds(first + group, 1)] for first in (0, g))
        entering = columns[:, i : i + 1] * dt_ref[row, head]
        state = state_ref[0, i].astype(jnp.float32) * decay_ref[row, head] + entering * B
        new_state_ref[0, i] = state.astype(new_state_ref.dtype)
        outputs.append(jnp.sum(state * C, axis=1, keepdims=True))
    out_ref[block] = jnp.concatenate(outputs, axis=1).T + skip_ref[0] * x_ref[block]

    @pl.when(block == blocks - 1)
    def _():
        y = jnp.concatenate([out_ref[k, i : i + 1] for k in range(blocks) for i in range(heads)], axis=1)
        gate = silu(row_ref[0, :, :d].astype(jnp.float32))
        if norm_ref is None or not c.norm_before_gate:
            y = y * gate
        if norm_ref is not None:
            y = _group_norm(y, g, c.norm_eps) * norm_ref[...].astype(jnp.float32)
            if c.norm_before_gate:
                y = y * gate
        y_ref[0] = y.astype(y_ref.dtype)


def _fold(row, rows, width):
    """A row of rows * width lanes as that many rows."""
    return jnp.concatenate([row[:, i * width : (i + 1) * width] for i in range(rows)])


def _group_norm(y, groups, eps):
    size = y.shape[1] // groups
    parts = [y[:, i * size : (i + 1) * size] for i in range(groups)]
    return jnp.concatenate(
        [part * lax.rsqrt(jnp.mean(part * part, axis=1, keepdims=True) + eps) for part in parts], axis=1
    )
