"""Checkpoints: `load` and `save` models in the layouts that Mamba models are published in."""

if __name__ != "mamba_jax.checkpoints":
    raise ImportError(f"this package is mamba_jax.checkpoints; it was imported as {__name__!r}")

from mamba_jax.checkpoints.configs import parse_config
from mamba_jax.checkpoints.loading import load
from mamba_jax.checkpoints.saving import save

__all__ = ["load", "parse_config", "save"]
