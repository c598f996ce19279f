"""Small random models for tests: every size differs from every other, so that a swapped axis cannot pass."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mamba_jax import MambaConfig, Params, TextInfo
from mamba_jax.params import build_params

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
    """Random weights of a scale at which greedy choices are not near ties and, untied, texts are not one token.

    Made by NumPy, as compiling JAX's random numbers of every shape takes longer than most tests; about those of
    `init_params` otherwise, with none left at 0 or 1.
    """
    config, rng = tiny_config(kind, **changes), np.random.default_rng(seed)

    def make(path: str, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
        values, name = 0.1 * rng.normal(size=shape), path.rsplit(".", 1)[-1]
        if name in ("embedding", "lm_head"):
            values *= 10
        elif name in ("norm", "norm_f", "gated_norm", "D"):
            values += 1
        elif name == "A_log":
            values += np.log(np.arange(1, shape[-1] + 1))
        elif name == "dt_bias":
            values += np.log(np.expm1(np.geomspace(1e-3, 1e-1, shape[0])))
        elif name in ("conv", "conv_bias"):
            values += rng.uniform(-0.5, 0.5, shape)
        elif not name.endswith("_bias"):
            values += rng.uniform(-1, 1, shape) / shape[-1] ** 0.5
        return jnp.asarray(values.astype(dtype))

    return dataclasses.replace(build_params(config, dtype, make), text=text or TextInfo())
