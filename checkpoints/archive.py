"""All weights of a folder as stored tensors, whatever they lie in: one file or shards, safetensors or torch's."""

import os
from pathlib import Path

from mamba_jax.checkpoints.files import INDEX_SUFFIX, choose_weights, read_index
from mamba_jax.checkpoints.safetensors_file import read_safetensors
from mamba_jax.checkpoints.stored import StoredTensor
from mamba_jax.checkpoints.torch_file import read_torch
from mamba_jax.messages import clip, some


def open_weights(folder: Path) -> dict[str, StoredTensor]:
    """Find the weights of a folder; safetensors are preferred where both kinds lie there. No weight is read.

    Args:
        folder: the checkpoint's folder.

    Returns:
        The tensors by the names the files give them.

    Raises:
        ValueError: if there are no weights, a file is truncated or corrupt, an index names an absent shard or does not
            agree with its shards; the message names the file and the key.
    """
    path = folder / choose_weights(os.listdir(folder), str(folder))
    return _open_shards(path) if path.name.endswith(INDEX_SUFFIX) else _open_file(path)


def _open_file(file: Path) -> dict[str, StoredTensor]:
    return read_safetensors(file) if file.suffix == ".safetensors" else read_torch(file)


def _open_shards(index: Path) -> dict[str, StoredTensor]:
    weight_map = read_index(index)
    shards = sorted(set(weight_map.values()))
    absent = [name for name in shards if not (index.parent / name).exists()]
    if absent:
        raise ValueError(f"{index}: names {some(absent)}, which {'is' if len(absent) == 1 else 'are'} not there")
    tensors: dict[str, StoredTensor] = {}
    problems: list[str] = []
    for shard in shards:
        for name, tensor in _open_file(index.parent / shard).items():
            if weight_map.get(name) != shard:
                listed = weight_map.get(name, "no file")
                problems.append(f"{clip(name)} lies in {shard}, the index has it in {listed}")
            tensors[name] = tensor
    problems += [f"{clip(name)} is not in {shard}" for name, shard in weight_map.items() if name not in tensors]
    if problems:
        raise ValueError(f"{index}: does not agree with its shards: {some(problems, '; ')}")
    return tensors
