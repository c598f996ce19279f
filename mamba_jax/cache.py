"""The O(1) cache of a model: what a token leaves behind is one convolution window and one state a layer."""

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float

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


def init_cache(
    config: MambaConfig, batch: int, dtype: DTypeLike = jnp.bfloat16, state_dtype: DTypeLike = jnp.float32
) -> MambaCache:
    """The cache before the first token: zeros.

    Args:
        config: the architecture.
        batch: rows, at least 1.
        dtype: of the convolution windows: the model's dtype (`params.dtype`).
        state_dtype: of the SSM states. 16-bit states lose slow decays (0.999 rounds to 1 in bfloat16).

    Returns:
        A zero cache.

    Raises:
        ValueError: if batch is below 1.
    """
    if batch < 1:
        raise ValueError(f"batch: got {batch}, wanted at least 1")
    c = config
    state = (batch, c.d_state, c.d_inner) if c.layer == "mamba1" else (batch, c.nheads, c.headdim, c.d_state)
    window = (batch, c.d_conv - 1, c.conv_channels)
    return MambaCache(
        conv=tuple(jnp.zeros(window, dtype) for _ in range(c.n_layer)),
        ssm=tuple(jnp.zeros(state, state_dtype) for _ in range(c.n_layer)),
    )


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
