"""Small random models for tests: every size differs from every other, so that a swapped axis cannot pass."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from mamba_jax import MambaConfig, Params, TextInfo, cast_params, init_params

KINDS = ("mamba1", "mamba2", "falcon", "mamba2-groups")

_CONFIGS: dict[str, dict[str, Any]] = {
    "mamba1": {"layer": "mamba1", "d_inner": 48, "d_state": 8, "dt_rank": 3},
    "falcon": {
        "layer": "mamba1",
        "d_inner": 48,
        "d_state": 8,
        "dt_rank": 3,
        "bcdt_norm_eps": 1e-6,
    },
    "mamba2": {"layer": "mamba2", "d_inner": 48, "d_state": 16, "headdim": 12},
    "mamba2-groups": {
        "layer": "mamba2",
        "d_inner": 48,
        "d_state": 16,
        "headdim": 12,
        "ngroups": 2,
        "proj_bias": True,
        "block_norm": "layer",
    },
}


def tiny_config(kind: str, **changes: Any) -> MambaConfig:
    """The configuration of a kind, with changes."""
    sizes: dict[str, Any] = {"vocab_size": 101, "pad_vocab_size_multiple": 8, "d_model": 24, "n_layer": 2}
    sizes["tie_embeddings"] = kind == "mamba1"
    return MambaConfig(**(sizes | _CONFIGS[kind] | changes))


def tiny_params(
    kind: str, dtype: str = "float32", seed: int = 0, text: TextInfo | None = None, **changes: Any
) -> Params:
    """Random weights of a scale at which greedy choices are not near ties and, untied, texts are not one token."""
    params = init_params(tiny_config(kind, **changes), jax.random.key(seed), jnp.float32)
    noise = iter(jax.random.split(jax.random.key(seed + 1), len(jax.tree.leaves(params))))
    params = jax.tree.map(
        lambda x: x + 0.1 * jax.random.normal(next(noise), x.shape), params
    )  # no weight left at 0 or 1
    lm_head = None if params.lm_head is None else 10 * params.lm_head
    params = dataclasses.replace(params, embedding=10 * params.embedding, lm_head=lm_head, text=text or TextInfo())
    return cast_params(params, dtype)
