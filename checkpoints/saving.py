"""`save`: from `Params` to a folder that this package and transformers (or mamba_ssm's config and names) read."""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mamba_jax.arguments import as_integer, as_path
from mamba_jax.checkpoints.config_writing import write_config, write_generation_config
from mamba_jax.checkpoints.files import CONFIG_FILES, GENERATION_CONFIG, INDEX_SUFFIX, TOKENIZER_FILES
from mamba_jax.checkpoints.hub import download
from mamba_jax.checkpoints.keys import LAYOUTS, Layout, Weight, file_weights, leaves
from mamba_jax.checkpoints.safetensors_file import write_safetensors
from mamba_jax.messages import some
from mamba_jax.params import Params, check_params

_SINGLE = "model.safetensors"


def save(
    params: Params, directory: str | os.PathLike[str], layout: Layout = "hf", *, max_shard_size: int = 5_000_000_000
) -> None:
    """Write a checkpoint: safetensors, strict-JSON config, generation config, and the tokenizer if there is one.

    Everything is written under a hidden name first and moved into place at the end, config.json last, so a save that
    fails leaves nothing that loads.

    Args:
        params: the model.
        directory: folder to write to; it is made if absent, and must not hold a checkpoint.
        layout: "hf" (Hugging Face; transformers loads it) or "original" (state-spaces; mamba_ssm's names and config).
        max_shard_size: bytes of weights a file; what is larger is split into shards with an index.

    Raises:
        ValueError: if an argument is wrong, the folder holds a checkpoint, the weights are not those of the config, or
            the layout cannot express the architecture; the message names what it cannot.
        OSError: if a file cannot be written.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout: got {layout!r:.80}, wanted one of {', '.join(LAYOUTS)}")
    as_integer("max_shard_size", max_shard_size, 1)
    check_params(params)  # others would not load
    config = write_config(params.config, params.text, params.dtype.name, layout)
    target = as_path("directory", directory, "the path of a folder")
    _refuse_occupied(target)
    tokenizer = _tokenizer_folder(params.text.tokenizer)
    created = not target.exists()
    target.mkdir(parents=True, exist_ok=True)
    hidden = Path(tempfile.mkdtemp(prefix=".saving-", dir=target))
    try:
        _write_weights(params, hidden, layout, max_shard_size)
        if generation := write_generation_config(params.text):
            _write_json(hidden / GENERATION_CONFIG, generation)
        for name in TOKENIZER_FILES:
            if tokenizer is not None and (tokenizer / name).is_file():
                shutil.copyfile(tokenizer / name, hidden / name)
        for file in sorted(hidden.iterdir()):
            file.replace(target / file.name)
        _write_json(hidden / CONFIG_FILES[0], config)
        (hidden / CONFIG_FILES[0]).replace(target / CONFIG_FILES[0])
    finally:
        shutil.rmtree(hidden)
        if created and not any(target.iterdir()):
            target.rmdir()


def _refuse_occupied(target: Path) -> None:
    if target.exists() and not target.is_dir():
        raise ValueError(f"{target}: is a file, wanted a folder")
    taken = {*CONFIG_FILES, GENERATION_CONFIG, *TOKENIZER_FILES}
    found = [item.name for item in target.iterdir()] if target.exists() else []
    there = sorted(name for name in found if name in taken or name.endswith((".safetensors", ".bin", INDEX_SUFFIX)))
    if there:
        raise ValueError(f"{target}: holds {some(there)}, which are not overwritten; wanted another folder")


def _tokenizer_folder(tokenizer: str | None) -> Path | None:
    if tokenizer is None or (folder := as_path("tokenizer", tokenizer)).is_dir():
        return None if tokenizer is None else folder
    return download(tokenizer, list(TOKENIZER_FILES), revision=None, progress=False)


def _write_weights(params: Params, folder: Path, layout: Layout, max_shard_size: int) -> None:
    arrays = leaves(params)
    weights = {weight.name: weight for weight in file_weights(params.config, layout)}
    shards = _shards(arrays, list(weights.values()), max_shard_size)
    single = len(shards) == 1
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = _SINGLE if single else f"model-{number:05}-of-{len(shards):05}.safetensors"
        specs = [(weight.name, np.dtype(arrays[weight.path].dtype), weight.shape) for weight in shard]
        write_safetensors(folder / file, specs, lambda name: np.asarray(arrays[weights[name].path]))
        weight_map |= {weight.name: file for weight in shard}
    if not single:
        total = sum(leaf.nbytes for leaf in arrays.values())
        _write_json(folder / (_SINGLE + INDEX_SUFFIX), {"metadata": {"total_size": total}, "weight_map": weight_map})


def _shards(arrays: dict[str, jax.Array], weights: list[Weight], max_shard_size: int) -> list[list[Weight]]:
    """Weights in order, a new shard whenever the next one would not fit; a weight is never split."""
    shards: list[list[Weight]] = [[]]
    size = 0
    for weight in weights:
        nbytes = arrays[weight.path].nbytes
        if shards[-1] and size + nbytes > max_shard_size:
            shards.append([])
            size = 0
        shards[-1].append(weight)
        size += nbytes
    return shards


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")
