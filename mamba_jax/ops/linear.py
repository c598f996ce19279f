"""Every matrix product of the project: y = x W^T + bias, and the einsums of the scans.

Products accumulate in float32. Float32 operands multiply at highest precision on every backend, low-precision operands
go to the matrix units as they are, with two exceptions. On the CPU XLA has no bfloat16 or float16 matrix-vector product
and would write a float32 copy of the weight first, ten times the cost of reading it; the forms below avoid that copy.
On NVIDIA GPUs a single row is multiplied and reduced: that reads the weight a third faster than XLA's matrix products.
"""

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from mamba_jax.ops.checks import check_shape

# An axis is cut into at most this many parts: with more in a streamed row, LLVM no longer makes vector code of its sum.
_MAX_PARTS = 12
# Float16 rows up to this many are streamed one by one; from there on widening the weight is cheaper.
_MAX_STREAMED_ROWS = 4
# A vector's lanes: right-hand sides, and the parts of a streamed row, are multiples of it.
_LANES = 16


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
    wide = bias is not None or weight.dtype == jnp.float32
    y = _multiply(rows, weight, jnp.dtype(jnp.float32 if wide else out_dtype))
    if bias is not None:
        check_shape("bias", bias, weight.shape[:1], "(o,)")
        y = y + bias.astype(jnp.float32)
    return y.astype(out_dtype).reshape(*x.shape[:-1], weight.shape[0])


def einsum(spec: str, a: Float[Array, "..."], b: Float[Array, "..."], dtype: DTypeLike) -> Float[Array, "..."]:
    """Multiply two arrays into float32, by the rules of this module for operands of `dtype`.

    Bfloat16 operands are rounded to it only where the platform multiplies bfloat16. Float16 is widened everywhere (on
    GPUs to TF32, of the same precision): what a scan multiplies may leave its range.
    """
    dtype = jnp.dtype(dtype)

    def wide(a: Array, b: Array) -> Array:
        precision = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.HIGH
        return jnp.einsum(spec, a.astype(jnp.float32), b.astype(jnp.float32), precision=precision)

    def narrow(a: Array, b: Array) -> Array:
        return jnp.einsum(spec, a.astype(dtype), b.astype(dtype), preferred_element_type=jnp.float32)

    if dtype == jnp.bfloat16:
        return jax.lax.platform_dependent(a, b, cpu=wide, default=narrow)
    return wide(a, b)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _multiply(rows: Float[Array, "r i"], weight: Float[Array, "o i"], out_dtype: jnp.dtype) -> Float[Array, "r o"]:
    """Multiply rows by W^T."""
    r = rows.shape[0]
    cuda = _rows_first
    if weight.dtype == jnp.float32:
        cpu = _weight_first
    elif weight.dtype == jnp.bfloat16:
        cpu = _streamed if r == 1 else _padded
    else:
        cpu = _streamed if r <= _MAX_STREAMED_ROWS else _widened
    if weight.dtype != jnp.float32 and r == 1:
        cuda = _reduced
    return jax.lax.platform_dependent(
        rows,
        weight,
        cpu=lambda *operands: cpu(*operands).astype(out_dtype),
        cuda=functools.partial(cuda, out_dtype=out_dtype),
        default=functools.partial(_rows_first, out_dtype=out_dtype),
    )


def _multiply_forward(rows: Array, weight: Array, out_dtype: jnp.dtype) -> tuple[Array, tuple[Array, Array]]:
    return _multiply(rows, weight, out_dtype), (rows, weight)


def _multiply_backward(_: jnp.dtype, operands: tuple[Array, Array], dy: Float[Array, "r o"]) -> tuple[Array, Array]:
    rows, weight = operands
    dtype = weight.dtype
    return einsum("ro,oi->ri", dy, weight, dtype).astype(dtype), einsum("ro,ri->oi", dy, rows, dtype).astype(dtype)


_multiply.defvjp(_multiply_forward, _multiply_backward)


def _rows_first(rows: Float[Array, "r i"], weight: Float[Array, "o i"], out_dtype: jnp.dtype) -> Float[Array, "r o"]:
    return _contract(rows, weight, 1, 1, out_dtype)


def _reduced(rows: Float[Array, "1 i"], weight: Float[Array, "o i"], out_dtype: jnp.dtype) -> Float[Array, "1 o"]:
    """The GPU's form for one low-precision row: XLA fuses it into one reduction that runs near the memory's speed."""
    return (weight.astype(jnp.float32) * rows.astype(jnp.float32)).sum(-1)[None].astype(out_dtype)


def _weight_first(rows: Float[Array, "r i"], weight: Float[Array, "o i"]) -> Float[Array, "r o"]:
    """The CPU's form for float32: its matrix-vector product reads a weight that comes first faster."""
    return _contract(weight, rows, 1, 1).T


def _streamed(rows: Float[Array, "r i"], weight: Float[Array, "o i"]) -> Float[Array, "r o"]:
    """The CPU's form for few low-precision rows: widen, multiply and add in one pass over the weight.

    Each row of the weight is folded into a vector of lanes (plain elementwise code, which LLVM vectorises), and the
    lanes are then added by a float32 product.
    """
    # Tied to the rows, the weight changes with each turn of a decode loop, so XLA can't move a widened copy out of it.
    weight, rows = jax.lax.optimization_barrier((weight, rows))
    o, i = weight.shape
    parts = _divisor(i, _LANES)
    weight = weight.reshape(o, parts, i // parts).astype(jnp.float32)
    rows = rows.reshape(-1, parts, i // parts)
    if rows.dtype == jnp.float16:
        # A product with the identity makes XLA store the rows. It stores bfloat16 ones anyway, but what computes
        # float16 ones it would fuse in here and do again for every row of the weight.
        rows = jnp.stack([_contract(jnp.eye(parts), row.astype(jnp.float32), 1, 0) for row in rows])
    rows = rows.astype(jnp.float32)
    ones = jnp.ones((i // parts, 1))
    columns = [_contract(sum(weight[:, k] * row[k] for k in range(parts)), ones, 1, 0) for row in rows]
    return jnp.concatenate(columns, axis=1).T


def _padded(rows: Float[Array, "r i"], weight: Float[Array, "o i"]) -> Float[Array, "r o"]:
    """The CPU's form for several bfloat16 rows: the only one for which XLA calls a bfloat16 kernel.

    That takes a row-major right-hand side, for few rows the transposed rows, for many the transposed weight: whichever
    costs less. A bare transpose would be folded back into the product; padding it to whole vectors, at least one lane
    more, keeps it.
    """
    (r, i), o = rows.shape, weight.shape[0]
    if r < min(i, o) // 2:
        columns = jnp.pad(rows.T, ((0, 0), (0, _LANES - r % _LANES)))
        return _contract(weight, columns, 1, 0)[:, :r].T
    # Padded with an entry of the rows: with a constant XLA would transpose the weights of all layers beforehand.
    columns = jax.lax.pad(weight.T, rows[0, 0], ((0, 0, 0), (0, _LANES - o % _LANES, 0)))
    return _contract(rows, columns, 1, 0)[:, :o]


def _widened(rows: Float[Array, "r i"], weight: Float[Array, "o i"]) -> Float[Array, "r o"]:
    """The CPU's form for many float16 rows, for which it has no kernel.

    A loop over parts of the weight: XLA would widen the weights of all layers first, and then multiply.
    """
    o, i = weight.shape
    parts, rows = weight.reshape(_divisor(o), -1, i), rows.astype(jnp.float32)
    return jax.lax.map(lambda part: _contract(part.astype(jnp.float32), rows, 1, 1), parts).reshape(o, -1).T


def _divisor(size: int, unit: int = 1) -> int:
    """Number of equal parts to cut an axis into; the parts are multiples of `unit` if they can be."""
    return max((n for n in range(1, _MAX_PARTS + 1) if size % (n * unit) == 0), default=1)


def _contract(a: Array, b: Array, a_axis: int, b_axis: int, out_dtype: DTypeLike = jnp.float32) -> Float[Array, "..."]:
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dims = (((a_axis,), (b_axis,)), ((), ()))
    return jax.lax.dot_general(a, b, dims, precision=precision, preferred_element_type=out_dtype)
