"""Portable JAX/XLA inference for state-space language models."""

from mamba_jax.cache import MambaCache, init_cache
from mamba_jax.config import MambaConfig
from mamba_jax.params import Params, TextInfo, init_params, param_shapes

__version__ = "0.1.0"

__all__ = ["MambaCache", "MambaConfig", "Params", "TextInfo", "init_cache", "init_params", "param_shapes"]
