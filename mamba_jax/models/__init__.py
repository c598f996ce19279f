"""Mamba-1 and Mamba-2 language models as pure functions."""

from mamba_jax.models.lm import forward, prefill, step

__all__ = ["forward", "prefill", "step"]
