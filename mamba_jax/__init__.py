"""Portable JAX/XLA inference for state-space language models."""

from pathlib import Path

from mamba_jax.cache import MambaCache, init_cache
from mamba_jax.calibrate import calibrate, fix_layers
from mamba_jax.checkpoints import load, save
from mamba_jax.config import MambaConfig
from mamba_jax.generate import Generation, generate, stream
from mamba_jax.models import forward, prefill, step
from mamba_jax.params import Params, TextInfo, cast_params, init_params, param_shapes
from mamba_jax.perplexity import Perplexity, perplexity
from mamba_jax.scheduler.compilation_cache import enable_compilation_cache
from mamba_jax.scoring import Score, embed, score
from mamba_jax.warm import warm

__version__ = "0.1.0"


def default_model() -> Path:
    """Folder of the embedded default model, for `load`."""
    return Path(__file__).parent / "default_model"


__all__ = [
    "Generation",
    "MambaCache",
    "MambaConfig",
    "Params",
    "Perplexity",
    "Score",
    "TextInfo",
    "calibrate",
    "cast_params",
    "default_model",
    "embed",
    "enable_compilation_cache",
    "fix_layers",
    "forward",
    "generate",
    "init_cache",
    "init_params",
    "load",
    "param_shapes",
    "perplexity",
    "prefill",
    "save",
    "score",
    "step",
    "stream",
    "warm",
]
