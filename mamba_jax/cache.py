"""The O(1) cache of a model: what a token leaves behind is one convolution window and one state a layer."""

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float

from mamba_jax.arguments import FLOAT_DTYPES, as_integer, describe, float_dtype, is_array
from mamba_jax.config import MambaConfig


@struct.dataclass
class MambaCache:
    """One entry a layer; steps return the same structure, shapes and dtypes, so the buffers can be donated.

    The channel axis comes last in every leaf, so that a TPU's lanes and a CPU's vectors are full.
    """

    conv: tuple[Float[Array, "b w-1 channels"], ...]  # last d_conv - 1 inputs of the convolution, raw
    ssm: tuple[Float[Array, "b ..."], ...]  # Mamba-1: (b, n, d); Mamba-2: (b, h, p, n)

    @property
    def batch(self) -> int:
        """Number of rows."""
        return self.conv[0].shape[0]


def init_cache(config: MambaConfig, batch: int, dtype: DTypeLike, state_dtype: DTypeLike = jnp.float32) -> MambaCache:
    """The cache before the first token: zeros.

    Args:
        config: the architecture.
        batch: rows, from 1 to 2**31 - 1.
        dtype: of the convolution windows: `params.dtype`.
        state_dtype: of the SSM states. 16-bit states lose slow decays (0.999 rounds to 1 in bfloat16).

    Returns:
        A zero cache.

    Raises:
        ValueError: if batch is out of its range or too large for the device's memory, or a dtype is none that weights
            may have.
    """
    if not isinstance(config, MambaConfig):
        raise ValueError(f"config: got {config!r:.80}, wanted a MambaConfig, as in params.config")
    rows = as_integer("batch", batch, 1, 2**31 - 1)
    dtype, state_dtype = float_dtype("dtype", dtype), float_dtype("state_dtype", state_dtype)
    try:
        return MambaCache(
            conv=tuple(jnp.zeros((rows, *window_shape(config)), dtype) for _ in range(config.n_layer)),
            ssm=tuple(jnp.zeros((rows, *state_shape(config)), state_dtype) for _ in range(config.n_layer)),
        )
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f"batch: got {rows}, wanted a cache that fits the device's memory: {error}") from error


def window_shape(config: MambaConfig) -> tuple[int, ...]:
    """Shape of a row's convolution window."""
    return (config.d_conv - 1, config.conv_channels)


def state_shape(config: MambaConfig) -> tuple[int, ...]:
    """Shape of a row's SSM state."""
    c = config
    return (c.d_state, c.d_inner) if c.layer == "mamba1" else (c.nheads, c.headdim, c.d_state)


def check_cache(cache: MambaCache, config: MambaConfig, batch: int, dtype: DTypeLike) -> None:
    """Raise a `ValueError` unless it is a cache of that model, batch and dtype of weights.

    States may be of any dtype that `init_cache` takes.
    """
    if not isinstance(cache, MambaCache):
        raise ValueError(f"cache: got a {type(cache).__name__}, wanted a MambaCache")
    for name, arrays, row, dtypes in (
        ("conv", cache.conv, window_shape(config), (jnp.dtype(dtype).name,)),
        ("ssm", cache.ssm, state_shape(config), FLOAT_DTYPES),
    ):
        wanted = f"{' or '.join(dtypes)}{[batch, *row]}"
        if not isinstance(arrays, tuple) or len(arrays) != config.n_layer:
            got = f"a {type(arrays).__name__} of {len(arrays)}" if hasattr(arrays, "__len__") else f"{arrays!r:.80}"
            raise ValueError(f"cache.{name}: got {got}, wanted a tuple of {config.n_layer} arrays {wanted}")
        for i, array in enumerate(arrays):
            if not is_array(array, (batch, *row), dtypes):
                raise ValueError(f"cache.{name}[{i}]: got {describe(array)}, wanted {wanted} for this model and batch")


def take_rows(cache: MambaCache, slots: ArrayLike) -> MambaCache:
    """Rows of a cache, as a cache of their own; (r,) slots from 0 to `cache.batch` - 1."""
    return jax.tree.map(lambda leaf: leaf[jnp.asarray(slots)], cache)


def put_rows(cache: MambaCache, slots: ArrayLike, rows: MambaCache) -> MambaCache:
    """Write rows into slots of a cache.

    Args:
        cache: the cache to write to (it is left as it was, unless donated).
        slots: (r,) where each row goes; a slot below 0 or beyond the cache marks a dummy row, which goes nowhere.
        rows: a cache of r rows.

    Returns:
        The cache with those rows replaced, and every other bit as it was.
    """
    at = jnp.asarray(slots)
    return jax.tree.map(
        lambda leaf, new: leaf.at[at].set(new.astype(leaf.dtype), mode="drop", wrap_negative_indices=False), cache, rows
    )
