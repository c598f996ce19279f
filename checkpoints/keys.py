"""Names and shapes of the weights in a file, for each weight of `Params`.

| weight of `Params` | in the file | there |
|---|---|---|
| embedding | backbone.embedding.weight (original), backbone.embeddings.weight (hf) | |
| layers.3.in_proj | backbone.layers.3.mixer.in_proj.weight | |
| layers.3.conv | backbone.layers.3.mixer.conv1d.weight | (channels, 1, w), as torch's Conv1d has it |
| layers.3.dt_bias | backbone.layers.3.mixer.dt_proj.bias (Mamba-1), .mixer.dt_bias (Mamba-2) | |
| layers.3.D | backbone.layers.3.mixer.D | flat, where it has a headdim |
| layers.3.gated_norm | backbone.layers.3.mixer.norm.weight | |
"""

import dataclasses
import math
from typing import Literal

import jax

from mamba_jax.config import MambaConfig
from mamba_jax.params import Params, param_shapes

Layout = Literal["hf", "original"]
LAYOUTS: tuple[Layout, ...] = ("hf", "original")

EMBEDDING: dict[Layout, str] = {"hf": "backbone.embeddings.weight", "original": "backbone.embedding.weight"}
LM_HEAD = "lm_head.weight"
_TOP = {"norm_f": "backbone.norm_f.weight", "norm_f_bias": "backbone.norm_f.bias", "lm_head": LM_HEAD}
_LAYER = {
    "norm": "norm.weight",
    "norm_bias": "norm.bias",
    "in_proj": "mixer.in_proj.weight",
    "in_proj_bias": "mixer.in_proj.bias",
    "conv": "mixer.conv1d.weight",
    "conv_bias": "mixer.conv1d.bias",
    "x_proj": "mixer.x_proj.weight",
    "dt_proj": "mixer.dt_proj.weight",
    "A_log": "mixer.A_log",
    "D": "mixer.D",
    "gated_norm": "mixer.norm.weight",
    "out_proj": "mixer.out_proj.weight",
    "out_proj_bias": "mixer.out_proj.bias",
}
_DT_BIAS = {"mamba1": "mixer.dt_proj.bias", "mamba2": "mixer.dt_bias"}


@dataclasses.dataclass(frozen=True)
class Weight:
    """One weight: its path in `Params`, and the name and shape it has in a file."""

    path: str
    name: str
    shape: tuple[int, ...]


def file_weights(config: MambaConfig, layout: Layout) -> list[Weight]:
    """The weights a file of that layout has to hold, in the order of `Params`."""
    found: list[Weight] = []
    for key_path, leaf in jax.tree_util.tree_leaves_with_path(param_shapes(config)):
        path = jax.tree_util.keystr(key_path, simple=True, separator=".")
        found.append(Weight(path, _file_name(path, config, layout), _file_shape(path, leaf.shape)))
    return found


def leaves(params: Params) -> dict[str, jax.Array]:
    """The weights by path: "embedding", "layers.3.in_proj"."""
    pairs = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in pairs}


def _file_name(path: str, config: MambaConfig, layout: Layout) -> str:
    if path == "embedding":
        return EMBEDDING[layout]
    if path in _TOP:
        return _TOP[path]
    _, index, field = path.split(".")
    name = _DT_BIAS[config.layer] if field == "dt_bias" else _LAYER[field]
    return f"backbone.layers.{index}.{name}"


def _file_shape(path: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    field = path.rpartition(".")[2]
    if field == "conv":
        return (shape[0], 1, shape[1])
    return (math.prod(shape),) if field == "D" else shape
