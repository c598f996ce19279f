"""Axes of arrays: pad one, gather along one, run along the first, leave out those of size 1."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped


def pad_axis(x: Shaped[Array, "..."], axis: int, size: int) -> Shaped[Array, "..."]:
    """Pad one axis at its end with zeros, up to `size`."""
    missing = size - x.shape[axis]
    return x if missing == 0 else jnp.pad(x, [(0, missing if i == axis else 0) for i in range(x.ndim)])


def take_positions(x: Shaped[Array, "b l *rest"], index: Int[Array, "b m"]) -> Shaped[Array, "b m *rest"]:
    """Gather along the second axis, each row its own; zeros where the index is past the end."""
    index = index.reshape(*index.shape, *(1,) * (x.ndim - 2))
    return jnp.take_along_axis(x, index, axis=1, mode="fill", fill_value=0)


def scan_like(
    x: Shaped[Array, "n *rest"], f: Callable[[Any, Any], tuple[Any, Array]], carry: Any, xs: Any
) -> tuple[Any, Shaped[Array, "n *rest"]]:
    """`jax.lax.scan(f, carry, xs)` for outputs of the shape and dtype of x, which may be one of xs.

    The outputs of `jax.lax.scan` start as zeros. XLA's CPU backend writes the zeros for the loops of all layers of a
    model before it computes the first, and holds them. There the outputs start as an entry of x instead, and so not
    before there is an x.
    """

    def from_entry(x: Array, carry: Any, xs: Any) -> tuple[Any, Array]:
        def turn(loop: tuple[Any, Array], at: tuple[Array, Any]) -> tuple[tuple[Any, Array], None]:
            carry, ys = loop
            i, xs_i = at
            carry, y = f(carry, xs_i)
            return (carry, jax.lax.dynamic_update_index_in_dim(ys, y, i, 0)), None

        ys = jnp.full_like(x, jax.lax.stop_gradient(x[(0,) * x.ndim]))
        return jax.lax.scan(turn, (carry, ys), (jnp.arange(x.shape[0]), xs))[0]

    def from_zeros(_: Array, carry: Any, xs: Any) -> tuple[Any, Array]:
        return jax.lax.scan(f, carry, xs)

    return jax.lax.platform_dependent(x, carry, xs, cpu=from_entry, default=from_zeros)


def without_unit_axes(x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """Drop the axes of size 1.

    With them XLA picks layouts that it then has to copy into those a loop wants, and on a CPU its code for a recurrence
    is up to twenty times slower.
    """
    return x.reshape([size for size in x.shape if size > 1])
