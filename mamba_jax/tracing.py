"""The rules that functions here are traced by, whatever the caller's configuration of JAX says."""

import contextlib
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def default_rules() -> Iterator[None]:
    """Ranks and dtypes are promoted as by JAX's default; a caller may have made that an error for code of its own."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield
