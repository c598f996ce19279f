"""The Mamba-1 mixer: in_proj -> causal convolution of x -> selective scan -> gate -> out_proj.

Source: Gu and Dao, "Mamba" (2023), section 3; names follow mamba_ssm. Falcon-Mamba adds a weightless RMSNorm on B, C
and the low-rank dt, before dt_proj.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mamba_jax.config import MambaConfig
from mamba_jax.ops.conv import causal_conv1d, causal_conv1d_step
from mamba_jax.ops.dispatch import Implementation
from mamba_jax.ops.dt import decay_rates
from mamba_jax.ops.linear import linear
from mamba_jax.ops.norm import rms_norm
from mamba_jax.ops.scan import selective_scan, selective_scan_step
from mamba_jax.params import Mamba1Layer
from mamba_jax.scheduler.signals import Watch

# (layer, config, xz, window, state) -> (what out_proj takes, window, state)
Mix = Callable[[Mamba1Layer, MambaConfig, Array, Array, Array], tuple[Array, Array, Array]]


def mamba1_mixer(
    layer: Mamba1Layer,
    config: MambaConfig,
    u: Float[Array, "b l m"],
    conv_state: Float[Array, "b w-1 d"],
    ssm_state: Float[Array, "b n d"] | None,
    *,
    lengths: Int[Array, "b"] | None,
    segment_ids: Int[Array, "b l"] | None,
    chunk_size: int,
    watch: Watch | None,
    implementation: Implementation | None,
) -> tuple[Float[Array, "b l m"], Float[Array, "b w-1 d"], Float[Array, "b n d"], Float[Array, "2"] | None]:
    """Mix a block of positions.

    Returns the output, the two states after each row's last valid position, and what `watch` makes of x as the scan
    gets it.
    """
    with jax.named_scope("in_proj"):
        x, z = jnp.split(linear(u, layer.in_proj, layer.in_proj_bias), 2, axis=-1)
    with jax.named_scope("conv"):
        x, conv_state = causal_conv1d(
            x, layer.conv, layer.conv_bias, window=conv_state, lengths=lengths, segment_ids=segment_ids
        )
        statistic = None if watch is None else watch(x, lengths)
    with jax.named_scope("x_proj"):
        dt, B, C = _select(layer, config, x)
    with jax.named_scope("scan"):
        y, ssm_state = selective_scan(
            x,
            dt,
            decay_rates(layer.A_log),
            B,
            C,
            chunk_size=chunk_size,
            D=layer.D,
            z=z,
            dt_bias=layer.dt_bias,
            dt_softplus=True,
            initial_state=ssm_state,
            lengths=lengths,
            segment_ids=segment_ids,
            implementation=implementation,
        )
    return _project(layer, config, y), conv_state, ssm_state, statistic


def mamba1_step(
    layer: Mamba1Layer,
    config: MambaConfig,
    u: Float[Array, "b m"],
    conv_state: Float[Array, "b w-1 d"],
    ssm_state: Float[Array, "b n d"],
    mix: Mix | None = None,
) -> tuple[Float[Array, "b m"], Float[Array, "b w-1 d"], Float[Array, "b n d"]]:
    """Mix one position a row by the recurrence itself; `mix` is what runs between the projections, if not XLA's ops."""
    with jax.named_scope("in_proj"):
        xz = linear(u, layer.in_proj, layer.in_proj_bias)
    y, conv_state, ssm_state = (mix or _mix)(layer, config, xz, conv_state, ssm_state)
    return _project(layer, config, y), conv_state, ssm_state


def _mix(
    layer: Mamba1Layer, config: MambaConfig, xz: Array, conv_state: Array, ssm_state: Array
) -> tuple[Array, Array, Array]:
    x, z = jnp.split(xz, 2, axis=-1)
    with jax.named_scope("conv"):
        x, conv_state = causal_conv1d_step(x, layer.conv, layer.conv_bias, conv_state)
    with jax.named_scope("x_proj"):
        dt, B, C = _select(layer, config, x)
    with jax.named_scope("scan"):
        y, ssm_state = selective_scan_step(
            x, dt, decay_rates(layer.A_log), B, C, ssm_state, D=layer.D, z=z, dt_bias=layer.dt_bias, dt_softplus=True
        )
    return y, conv_state, ssm_state


def _select(layer: Mamba1Layer, config: MambaConfig, x: Array) -> tuple[Array, Array, Array]:
    """dt, B and C of each position; dt_bias is added in the scan, in float32."""
    dt, B, C = jnp.split(linear(x, layer.x_proj), (config.dt_rank, config.dt_rank + config.d_state), axis=-1)
    if config.bcdt_norm_eps is not None:
        dt, B, C = (rms_norm(t, None, config.bcdt_norm_eps) for t in (dt, B, C))
    return linear(dt, layer.dt_proj), B, C


def _project(layer: Mamba1Layer, config: MambaConfig, y: Array) -> Array:
    """out_proj; a float32 residual takes the product as it is, not rounded to the weights' dtype first."""
    with jax.named_scope("out_proj"):
        out_dtype = jnp.float32 if config.residual_in_fp32 else None
        return linear(y, layer.out_proj, layer.out_proj_bias, out_dtype=out_dtype)
