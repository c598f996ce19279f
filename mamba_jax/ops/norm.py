"""Norms, computed in float32 whatever comes in.

RMSNorm: x / sqrt(mean(x^2) + eps) * weight. Gated (Mamba-2): RMSNorm(y * silu(z)) a group of channels at a time.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from mamba_jax.ops.checks import check_shape


def rms_norm(x: Float[Array, "*b d"], weight: Float[Array, "d"] | None, eps: float) -> Float[Array, "*b d"]:
    """Normalise the last axis to a root mean square of one.

    Args:
        x: any float dtype.
        weight: scale of each channel; None for a norm without one.
        eps: added to the mean square.

    Returns:
        The result in the weight's dtype, or in x's if there is no weight.

    Raises:
        ValueError: if weight does not fit x.
    """
    y = _unit_rms(x.astype(jnp.float32), eps)
    if weight is None:
        return y.astype(x.dtype)
    check_shape("weight", weight, x.shape[-1:], "(d,)")
    return (y * weight.astype(jnp.float32)).astype(weight.dtype)


def layer_norm(
    x: Float[Array, "*b d"], weight: Float[Array, "d"], bias: Float[Array, "d"] | None, eps: float
) -> Float[Array, "*b d"]:
    """Normalise the last axis to mean zero and variance one.

    Args:
        x: any float dtype.
        weight: scale of each channel.
        bias: added to each channel.
        eps: added to the variance.

    Returns:
        The result in the weight's dtype.

    Raises:
        ValueError: if weight or bias does not fit x.
    """
    check_shape("weight", weight, x.shape[-1:], "(d,)")
    x = x.astype(jnp.float32)
    centred = x - x.mean(-1, keepdims=True)
    y = _unit_rms(centred, eps) * weight.astype(jnp.float32)
    if bias is not None:
        check_shape("bias", bias, x.shape[-1:], "(d,)")
        y = y + bias.astype(jnp.float32)
    return y.astype(weight.dtype)


def gated_rms_norm(
    y: Float[Array, "*b d"],
    z: Float[Array, "*b d"],
    weight: Float[Array, "d"],
    eps: float,
    *,
    ngroups: int = 1,
    norm_before_gate: bool = False,
) -> Float[Array, "*b d"]:
    """Gate and normalise, each of `ngroups` groups of channels by its own root mean square.

    Args:
        y: output of the scan.
        z: gate.
        weight: scale of each channel.
        eps: added to the mean square.
        ngroups: groups of d / ngroups channels.
        norm_before_gate: norm(y) * silu(z) instead of norm(y * silu(z)).

    Returns:
        The result in the weight's dtype.

    Raises:
        ValueError: if shapes do not agree, or ngroups does not divide d.
    """
    d = y.shape[-1]
    check_shape("z", z, y.shape, "the shape of y")
    check_shape("weight", weight, (d,), "(d,)")
    if ngroups < 1 or d % ngroups:
        raise ValueError(f"ngroups: got {ngroups}, wanted a divisor of d={d}")
    gate = jax.nn.silu(z.astype(jnp.float32))
    y = y.astype(jnp.float32)
    if not norm_before_gate:
        y = y * gate
    y = _unit_rms(y.reshape(*y.shape[:-1], ngroups, d // ngroups), eps).reshape(y.shape) * weight.astype(jnp.float32)
    if norm_before_gate:
        y = y * gate
    return y.astype(weight.dtype)


def _unit_rms(x: Float[Array, "*b d"], eps: float) -> Float[Array, "*b d"]:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
