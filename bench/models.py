"""Published model sizes, for benchmarks with random weights: speed does not depend on their values."""

import jax
from jax.typing import DTypeLike

from mamba_jax import MambaConfig, Params, init_params

_SIZES = {"130m": (768, 24), "370m": (1024, 48), "780m": (1536, 48), "1.3b": (2048, 48), "2.7b": (2560, 64)}
_SIZES_1 = {"130m": (768, 24), "370m": (1024, 48), "790m": (1536, 48), "1.4b": (2048, 48), "2.8b": (2560, 64)}


def _mamba1(d_model: int, n_layer: int) -> MambaConfig:
    return MambaConfig(
        layer="mamba1",
        vocab_size=50277,
        pad_vocab_size_multiple=8,
        d_model=d_model,
        n_layer=n_layer,
        d_inner=2 * d_model,
        d_state=16,
        dt_rank=d_model // 16,
    )


def _mamba2(d_model: int, n_layer: int) -> MambaConfig:
    return MambaConfig(
        layer="mamba2",
        vocab_size=50277,
        pad_vocab_size_multiple=16,
        d_model=d_model,
        n_layer=n_layer,
        d_inner=2 * d_model,
        d_state=128,
        headdim=64,
    )


PUBLISHED = {f"mamba1-{name}": _mamba1(*size) for name, size in _SIZES_1.items()} | {
    f"mamba2-{name}": _mamba2(*size) for name, size in _SIZES.items()
}


def random_params(name: str, dtype: DTypeLike) -> Params:
    """Random weights of a published size."""
    return init_params(PUBLISHED[name], jax.random.key(0), dtype)
