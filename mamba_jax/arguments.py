"""What callers pass as arguments: numbers (but no bools and no text), dtypes, arrays, paths.

Numbers and ids may be Python's, or come in arrays of numpy or JAX, or in any array that numpy can read through its
`__array__`, such as a torch tensor on the CPU. Bytes of any kind are no ids. What does not fit is a `ValueError` that
names the argument, what came and what was wanted.
"""

import math
import os
from collections.abc import Callable, Sequence, Set
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mamba_jax.messages import shown

FLOAT_DTYPES = ("bfloat16", "float16", "float32")  # that weights, windows and states may have
_PATH_MAX = 4096  # characters of a path
BYTES = bytes | bytearray | memoryview


def as_array(value: Any) -> Any:
    """Another library's array as numpy's; what is no array, or one that numpy cannot read, and JAX's as it is."""
    if isinstance(value, jax.Array | np.ndarray) or not hasattr(value, "__array__"):
        return value
    try:
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError):  # on an accelerator, with a gradient, of a dtype that numpy lacks
        return value


def is_integer(value: Any) -> bool:
    """Whether it is a single integer."""
    if isinstance(value, int):
        return not isinstance(value, bool)
    value = as_array(value)
    return isinstance(value, jax.Array | np.ndarray) and value.ndim == 0 and jnp.issubdtype(value.dtype, jnp.integer)


def as_integer(name: str, value: Any, low: int, high: int | None = None) -> int:
    """A single integer, at least `low` and at most `high`."""
    number = int(as_array(value)) if is_integer(value) else None
    if number is None or number < low or (high is not None and number > high):
        wanted = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise ValueError(f"{name}: got {shown(value)}, wanted an integer {wanted}")
    return number


def as_integers(value: Any) -> list[int] | None:
    """The integers of a sequence, a set or an array of one axis; None if it is anything else."""
    value = as_array(value)
    if isinstance(value, jax.Array | np.ndarray):
        whole = value.size == 0 or jnp.issubdtype(value.dtype, jnp.integer)
        return np.asarray(value).tolist() if whole and value.ndim == 1 else None
    if isinstance(value, str | BYTES) or not isinstance(value, Sequence | Set) or not all(map(is_integer, value)):
        return None
    return [int(as_array(item)) for item in value]


def as_number(name: str, value: Any, accept: Callable[[float], bool], wanted: str) -> float:
    """A single number that `accept` takes."""
    array = as_array(value)
    single = is_integer(value) or isinstance(value, float)
    if not single and isinstance(array, jax.Array | np.ndarray):
        single = array.ndim == 0 and jnp.issubdtype(array.dtype, jnp.floating)
    try:
        number = float(array) if single else math.nan
    except OverflowError:  # an integer beyond the floats
        number = math.inf
    if not accept(number):
        raise ValueError(f"{name}: got {value!r:.80}, wanted {wanted}")
    return number


def as_path(name: str, value: Any, wanted: str = "a path") -> Path:
    """A path, a home folder at its beginning ("~" or "~user") written out.

    Args:
        name: of the argument, for errors.
        value: what came.
        wanted: what was, for errors.

    Raises:
        ValueError: if no file can be named so, or there is no such home.
    """
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(text, str) or not 0 < len(text) <= _PATH_MAX or "\0" in text:
        raise ValueError(f"{name}: got {shown(value)}, wanted {wanted}")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise ValueError(f"{name}: got {shown(value)}, wanted {wanted}: {error}") from error


def float_dtype(name: str, value: Any) -> np.dtype:
    """A dtype that weights may have, from anything that names one."""
    try:
        dtype = None if value is None else jnp.dtype(value)
    except TypeError:
        dtype = None
    if dtype is None or dtype.name not in FLOAT_DTYPES:
        raise ValueError(f"{name}: got {value!r:.80}, wanted one of {', '.join(FLOAT_DTYPES)}")
    return dtype


def is_array(value: Any, shape: tuple[int, ...], dtypes: Sequence[str]) -> bool:
    """Whether it is an array (of JAX or numpy) of that shape and one of the dtypes."""
    return isinstance(value, jax.Array | np.ndarray) and value.shape == shape and value.dtype.name in dtypes


def describe(value: Any) -> str:
    """Dtype and shape of an array, as "float32[2, 3]"; what else it is where it is none."""
    if value is None:
        return "nothing"
    if not (hasattr(value, "shape") and hasattr(value, "dtype")):
        return f"{value!r:.80}"
    return f"{value.dtype}{list(value.shape)}"
