"""What both scans make of dt and A: dt = clamp(softplus(dt_raw + dt_bias), dt_limit), 0 at padding, and a finite A."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from mamba_jax.params import MAX_A_LOG

LARGE_STEP = 2.0**60  # SSD takes step sizes beyond this in two factors: B.C dt may overflow where dt x does not
FASTEST = -(2.0**127)  # finite in float32, also when a kernel divides it by log 2


def step_size(
    dt: Float[Array, "*b channels"],
    dt_bias: Float[Array, "channels"] | None,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
    valid: Bool[Array, "*b"] | None = None,
) -> Float[Array, "*b channels"]:
    """Compute dt in float32.

    Args:
        dt: raw steps, any float dtype.
        dt_bias: added before the softplus.
        dt_softplus: apply softplus, in the form that does not overflow.
        dt_limit: (low, high) clamp, after the softplus.
        valid: False at padding. Its dt becomes 0 after the clamp (a positive low must not undo it), so that padding
            neither decays the state nor enters it.

    Returns:
        dt, float32.
    """
    dt = dt.astype(jnp.float32)
    if valid is not None:
        dt = jnp.where(valid[..., None], dt, 0.0)  # else gradients would be NaN where padding is
    if dt_bias is not None:
        dt = dt + dt_bias.astype(jnp.float32)
    if dt_softplus:
        dt = jax.nn.softplus(dt)
    if dt_limit != (0.0, math.inf):
        dt = jnp.clip(dt, *dt_limit)
    if valid is not None:
        dt = jnp.where(valid[..., None], dt, 0.0)
    return dt


def decay_rates(A_log: Float[Array, "..."]) -> Float[Array, "..."]:
    """A = -exp(A_log), float32 and finite, and so are its gradients."""
    return -jnp.exp(jnp.minimum(A_log.astype(jnp.float32), MAX_A_LOG))


def finite_rates(A: Float[Array, "..."]) -> Float[Array, "..."]:
    """A in float32, never -inf: a step of 0 keeps the state, where 0 * inf would make it NaN."""
    return jnp.maximum(A.astype(jnp.float32), FASTEST)
