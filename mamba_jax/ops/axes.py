"""Axes of arrays: pad one, gather along one, leave out those of size 1."""

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


def without_unit_axes(x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """Drop the axes of size 1.

    With them XLA picks layouts that it then has to copy into those a loop wants, and on a CPU its code for a recurrence
    is up to twenty times slower.
    """
    return x.reshape([size for size in x.shape if size > 1])
