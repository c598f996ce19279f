"""Matrix products: every dtype and every number of rows, the memory of a decode loop, gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mamba_jax.ops.linear import einsum, linear
from tests.ops.cases import error
from tests.tolerances import OP_ATOL

DTYPES = ["float32", "bfloat16", "float16"]


def operands(rows, o, i, dtype):
    rng = np.random.default_rng(0)
    make = lambda *shape: jnp.asarray(rng.standard_normal(shape) / i**0.5, dtype)  # noqa: E731
    return make(rows, i) * i**0.5, make(o, i), make(o)


def product(x, weight, bias=0.0):
    return np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T + np.asarray(bias, np.float64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 4, 5, 15, 16, 17, 64])
def test_every_number_of_rows(dtype, rows):
    """Products of operands as they are, added up in float32: only the operands' rounding is the dtype's."""
    for o, i in ((96, 48), (40, 768), (7, 5), (5, 13)):
        x, weight, bias = operands(rows, o, i, dtype)
        y = jax.jit(lambda *a: linear(*a, out_dtype=jnp.float32))(x, weight, bias)
        assert error(y, product(x, weight, bias)) < 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
def test_leading_axes_and_dtype_of_the_result(dtype):
    x, weight, bias = operands(6, 8, 12, dtype)
    for shape in ((12,), (6, 12), (2, 3, 12), (1, 6, 12)):
        given = x[0] if shape == (12,) else x.reshape(shape)
        y = linear(given, weight, bias)
        assert y.dtype == dtype
        assert error(y, product(given, weight, bias)) < OP_ATOL[dtype]
    assert linear(x.astype(jnp.float32), weight).dtype == jnp.float32
    assert linear(x, weight, out_dtype="float32").dtype == jnp.float32


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("rows", [1, 4, 16])
def test_decode_loop_holds_no_widened_copy_of_its_weights(dtype, rows):
    """XLA moves what does not change out of a loop; a float32 copy of every weight would be twice the model."""
    x, weight, _ = operands(rows, 512, 512, dtype)
    weights = [weight] * 8

    def decode(weights, x):
        def step(_, x):
            for weight in weights:
                x = jnp.tanh(linear(x, weight))
            return x

        return jax.lax.fori_loop(0, 4, step, x)

    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (weights, x))
    memory = jax.jit(decode).lower(*shapes).compile().memory_analysis()
    one_widened = 4 * weight.size
    assert memory.temp_size_in_bytes < 1.5 * one_widened


@pytest.mark.parametrize(("dtype", "rows"), [("float32", 1), ("bfloat16", 1), ("float16", 1), ("float16", 4)])
def test_what_computes_the_rows_is_not_done_again_for_every_output(dtype, rows):
    """Fused into a product that reads each input many times, it would be: Mamba's gate made a float16 product slow."""
    x, weight, _ = operands(rows, 256, 240, dtype)

    def gated(x, gates, weight):
        for gate in gates:
            x = x * gate
        return linear(x, weight)

    gates = [x] * 8
    cost = jax.jit(gated).lower(x, gates, weight).compile().cost_analysis()
    assert cost["flops"] < 4 * rows * weight.size  # widen, multiply, add


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 5])
def test_gradient(dtype, rows):
    x, weight, bias = operands(rows, 12, 24, dtype)
    dy = np.random.default_rng(1).standard_normal((rows, 12)).astype(np.float32)

    def loss(x, weight, bias):
        return (linear(x, weight, bias, out_dtype=jnp.float32) * dy).sum()

    dx, dweight, dbias = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(x, weight, bias)
    assert (dx.dtype, dweight.dtype, dbias.dtype) == (dtype, dtype, dtype)
    tolerance = 1e-5 if dtype == "float32" else OP_ATOL[dtype]
    assert error(dx, dy.astype(np.float64) @ np.asarray(weight, np.float64)) < tolerance
    assert error(dweight, dy.astype(np.float64).T @ np.asarray(x, np.float64)) < tolerance * rows
    assert error(dbias, dy.sum(0)) < tolerance * rows


@pytest.mark.parametrize("dtype", DTYPES)
def test_vmap_over_rows_and_over_weights(dtype):
    x, weight, _ = operands(4, 12, 24, dtype)
    assert error(jax.vmap(lambda x: linear(x, weight, out_dtype="float32"))(x), product(x, weight)) < 1e-5
    weights = jnp.stack([weight, weight + 1])
    got = jax.jit(jax.vmap(lambda w: linear(x, w, out_dtype="float32")))(weights)
    assert error(got, np.stack([product(x, w) for w in weights])) < 1e-4


def test_einsum_of_float16_leaves_its_range():
    a = jnp.full((1, 4), 300.0, jnp.float16)
    assert error(einsum("ij,kj->ik", a, a, jnp.float16), np.full((1, 1), 360000.0)) == 0.0


def test_shapes_that_do_not_agree_are_refused_by_name():
    x, weight, bias = operands(2, 3, 4, "float32")
    with pytest.raises(ValueError, match=r"^weight: got shape \(3, 3\), wanted \(o, i\) = \(3, 4\)"):
        linear(x, weight[:, 1:])
    with pytest.raises(ValueError, match=r"^bias: got shape \(2,\)"):
        linear(x, weight, bias[1:])
