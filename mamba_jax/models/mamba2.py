"""The Mamba-2 mixer: in_proj -> causal convolution of x, B, C -> SSD -> gated norm -> out_proj.

Source: Dao and Gu, "Transformers are SSMs" (2024), section 7; names follow mamba_ssm.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mamba_jax.config import MambaConfig
from mamba_jax.ops.conv import causal_conv1d, causal_conv1d_step
from mamba_jax.ops.dispatch import Implementation, over_devices
from mamba_jax.ops.dt import decay_rates
from mamba_jax.ops.linear import linear
from mamba_jax.ops.norm import gated_rms_norm, rms_norm
from mamba_jax.ops.ssd import ssd, ssd_step
from mamba_jax.params import Mamba2Layer
from mamba_jax.scheduler.signals import Watch

# (layer, config, zxbcdt, window, state) -> (what out_proj takes, window, state)
Mix = Callable[[Mamba2Layer, MambaConfig, Array, Array, Array], tuple[Array, Array, Array]]


def mamba2_mixer(
    layer: Mamba2Layer,
    config: MambaConfig,
    u: Float[Array, "b l m"],
    conv_state: Float[Array, "b w-1 d+2*g*n"],
    ssm_state: Float[Array, "b h p n"] | None,
    *,
    lengths: Int[Array, "b"] | None,
    segment_ids: Int[Array, "b l"] | None,
    chunk_size: int,
    watch: Watch | None,
    implementation: Implementation | None,
) -> tuple[Float[Array, "b l m"], Float[Array, "b w-1 d+2*g*n"], Float[Array, "b h p n"], Float[Array, "2"] | None]:
    """Mix a block of positions.

    Returns the output, the two states after each row's last valid position, and what `watch` makes of x as the scan
    gets it.
    """
    with jax.named_scope("in_proj"):
        z, xBC, dt = _split_zxbcdt(config, linear(u, layer.in_proj, layer.in_proj_bias))
    with jax.named_scope("conv"):
        xBC, conv_state = causal_conv1d(
            xBC, layer.conv, layer.conv_bias, window=conv_state, lengths=lengths, segment_ids=segment_ids
        )
        statistic = None if watch is None else watch(xBC[..., : config.d_inner], lengths)
        x, B, C = _split_xBC(config, xBC)
    with jax.named_scope("ssd"):
        fuse_gate = not config.gated_norm
        y, ssm_state = ssd(
            x,
            dt,
            decay_rates(layer.A_log),
            B,
            C,
            chunk_size=chunk_size,
            D=layer.D,
            z=_heads(config, z) if fuse_gate else None,
            dt_bias=layer.dt_bias,
            dt_softplus=True,
            dt_limit=config.dt_limit,
            initial_state=ssm_state,
            lengths=lengths,
            segment_ids=segment_ids,
            implementation=implementation,
        )
    return _project(layer, config, _gate(layer, config, y, z)), conv_state, ssm_state, statistic


def mamba2_step(
    layer: Mamba2Layer,
    config: MambaConfig,
    u: Float[Array, "b m"],
    conv_state: Float[Array, "b w-1 d+2*g*n"],
    ssm_state: Float[Array, "b h p n"],
    mix: Mix | None = None,
) -> tuple[Float[Array, "b m"], Float[Array, "b w-1 d+2*g*n"], Float[Array, "b h p n"]]:
    """Mix one position a row by the recurrence itself; `mix` is what runs between the projections, if not XLA's ops."""
    with jax.named_scope("in_proj"):
        zxbcdt = linear(u, layer.in_proj, layer.in_proj_bias)
    y, conv_state, ssm_state = (mix or _mix)(layer, config, zxbcdt, conv_state, ssm_state)
    return _project(layer, config, y), conv_state, ssm_state


def _mix(
    layer: Mamba2Layer, config: MambaConfig, zxbcdt: Array, conv_state: Array, ssm_state: Array
) -> tuple[Array, Array, Array]:
    z, xBC, dt = _split_zxbcdt(config, zxbcdt)
    with jax.named_scope("conv"):
        xBC, conv_state = causal_conv1d_step(xBC, layer.conv, layer.conv_bias, conv_state)
        x, B, C = _split_xBC(config, xBC)
    with jax.named_scope("ssd"):
        fuse_gate = not config.gated_norm
        y, ssm_state = ssd_step(
            x,
            dt,
            decay_rates(layer.A_log),
            B,
            C,
            ssm_state,
            D=layer.D,
            z=_heads(config, z) if fuse_gate else None,
            dt_bias=layer.dt_bias,
            dt_softplus=True,
            dt_limit=config.dt_limit,
        )
    return _gate(layer, config, y, z), conv_state, ssm_state


def heads_of_device(config: MambaConfig, over: tuple[jax.sharding.AbstractMesh, str]) -> MambaConfig:
    """The heads that a device has, as a model without the norm, which sees those of all."""
    return dataclasses.replace(config, d_inner=config.d_inner // over[0].shape[over[1]], gated_norm=False)


def mix_over_devices(mix: Mix, over: tuple[jax.sharding.AbstractMesh, str]) -> Mix:
    """`mix`, run by each device for heads of its own, and XLA's norm of them all.

    For models of one group, whose B and C every device has, and without norm_before_gate.
    """

    def divided(
        layer: Mamba2Layer, config: MambaConfig, zxbcdt: Array, conv_state: Array, ssm_state: Array
    ) -> tuple[Array, Array, Array]:
        d, part = config.d_inner, heads_of_device(config, over)

        def run(z: Array, dt: Array, state: Array, dt_bias: Array, A_log: Array, D: Array, xs: Any, maps: Any) -> Any:
            xBC, window, taps, *bias = (jnp.concatenate(each, axis=-1) for each in zip(xs, maps, strict=True))
            heads = dataclasses.replace(
                layer,
                conv=taps.T,
                conv_bias=bias[0] if bias else None,
                dt_bias=dt_bias,
                A_log=A_log,
                D=D,
                gated_norm=None,
            )
            y, window, state = mix(heads, part, jnp.concatenate([z, xBC, dt], axis=-1), window, state)
            return y, state, window[..., : part.d_inner], window[..., part.d_inner :]

        z, xBC, dt = _split_zxbcdt(config, zxbcdt)
        channels = [xBC, conv_state, layer.conv.T, *([] if layer.conv_bias is None else [layer.conv_bias])]
        xs, maps = zip(*(jnp.split(each, (d,), axis=-1) for each in channels), strict=True)
        last = tuple(each.ndim - 1 for each in channels)
        scan = over_devices(run, over, (1, 1, 1, 0, 0, 0, last, (None,) * len(last)), (1, 1, 2, None))
        y, ssm_state, x, maps = scan(z, dt, ssm_state, layer.dt_bias, layer.A_log, layer.D, xs, maps)
        if layer.gated_norm is not None:
            y = rms_norm(y.astype(jnp.float32), None, config.norm_eps) * layer.gated_norm.astype(jnp.float32)
        return y.astype(layer.out_proj.dtype), jnp.concatenate([x, maps], axis=-1), ssm_state

    return divided


def _split_zxbcdt(config: MambaConfig, zxbcdt: Array) -> tuple[Array, Array, Array]:
    z, xBC, dt = jnp.split(zxbcdt, (config.d_inner, config.d_inner + config.conv_channels), axis=-1)
    return z, xBC, dt


def _split_xBC(config: MambaConfig, xBC: Array) -> tuple[Array, Array, Array]:
    x, B, C = jnp.split(xBC, (config.d_inner, config.d_inner + config.ngroups * config.d_state), axis=-1)
    groups = (*x.shape[:-1], config.ngroups, config.d_state)
    return _heads(config, x), B.reshape(groups), C.reshape(groups)


def _heads(config: MambaConfig, x: Array) -> Array:
    return x.reshape(*x.shape[:-1], config.nheads, config.headdim)


def _gate(layer: Mamba2Layer, config: MambaConfig, y: Array, z: Array) -> Array:
    y = y.reshape(z.shape)
    if layer.gated_norm is None:
        return y
    with jax.named_scope("gated_norm"):
        return gated_rms_norm(
            y,
            z,
            layer.gated_norm,
            config.norm_eps,
            ngroups=config.ngroups,
            norm_before_gate=config.norm_before_gate,
        )


def _project(layer: Mamba2Layer, config: MambaConfig, y: Array) -> Array:
    """out_proj; a float32 residual takes the product as it is, not rounded to the weights' dtype first."""
    with jax.named_scope("out_proj"):
        out_dtype = jnp.float32 if config.residual_in_fp32 else None
        return linear(y, layer.out_proj, layer.out_proj_bias, out_dtype=out_dtype)
