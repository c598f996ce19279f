"""Every matrix product of the project: y = x W^T + bias, and the einsums of the scans.

Products accumulate in float32. Float32 operands multiply at highest precision on every backend. Low-precision operands
go to the matrix units as they are, except on the CPU, where XLA's low-precision dot is ten times slower than reading
the weight as float32.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from mamba_jax.ops.checks import check_shape

# On the CPU, up to this many rows a low-precision weight is multiplied and reduced row by row as it streams from
# memory; above, it is widened once and multiplied by float32's matrix product.
_MAX_STREAMED_ROWS = 4


def linear(
    x: Float[Array, "*b i"],
    weight: Float[Array, "o i"],
    bias: Float[Array, "o"] | None = None,
    *,
    out_dtype: DTypeLike | None = None,
) -> Float[Array, "*b o"]:
    """Multiply by a weight stored (out, in), as checkpoints have it.

    Args:
        x: inputs; used in the weight's dtype.
        weight: (out, in).
        bias: added in float32.
        out_dtype: dtype of the result; x's if None.

    Returns:
        x W^T + bias.

    Raises:
        ValueError: if shapes do not agree.
    """
    check_shape("weight", weight, (weight.shape[0], x.shape[-1]), "(o, i)")
    out_dtype = x.dtype if out_dtype is None else out_dtype
    rows = x.reshape(-1, x.shape[-1]).astype(weight.dtype)
    if weight.dtype == jnp.float32:
        y = _dot(rows, weight)
    else:
        cpu = _streamed_dot if rows.shape[0] <= _MAX_STREAMED_ROWS else _widened_dot
        y = jax.lax.platform_dependent(rows, weight, cpu=cpu, default=_dot)
    if bias is not None:
        check_shape("bias", bias, weight.shape[:1], "(o,)")
        y = y + bias.astype(jnp.float32)
    return y.astype(out_dtype).reshape(*x.shape[:-1], weight.shape[0])


def einsum(spec: str, a: Float[Array, "..."], b: Float[Array, "..."]) -> Float[Array, "..."]:
    """Multiply two arrays of one dtype, accumulating in float32; `linear`'s rules for precision and the CPU.

    Float16 is widened to float32 first: a scan's products may leave its range.
    """
    if a.dtype == jnp.float32:
        return jnp.einsum(spec, a, b, precision=jax.lax.Precision.HIGHEST)

    def low(a: Array, b: Array) -> Array:
        return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)

    def wide(a: Array, b: Array) -> Array:
        return jnp.einsum(spec, a.astype(jnp.float32), b.astype(jnp.float32), precision=jax.lax.Precision.HIGH)

    if a.dtype == jnp.float16:
        return wide(a, b)
    return jax.lax.platform_dependent(a, b, cpu=wide, default=low)


def _dot(rows: Float[Array, "r i"], weight: Float[Array, "o i"]) -> Float[Array, "r o"]:
    precision = jax.lax.Precision.HIGHEST if weight.dtype == jnp.float32 else None
    contract = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(rows, weight, contract, precision=precision, preferred_element_type=jnp.float32)


def _widened_dot(rows: Float[Array, "r i"], weight: Float[Array, "o i"]) -> Float[Array, "r o"]:
    return _dot(rows.astype(jnp.float32), weight.astype(jnp.float32))


def _streamed_dot(rows: Float[Array, "r i"], weight: Float[Array, "o i"]) -> Float[Array, "r o"]:
    products = weight.astype(jnp.float32)[:, None, :] * rows.astype(jnp.float32)  # fused into the sum, never stored
    return products.sum(-1).T
