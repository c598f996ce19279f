"""`load`: from a folder or hub id to `Params`, strictly and without a second copy of the weights."""

import dataclasses
import os
from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from mamba_jax.arguments import FLOAT_DTYPES, float_dtype
from mamba_jax.checkpoints.archive import open_weights
from mamba_jax.checkpoints.configs import read_config
from mamba_jax.checkpoints.hub import find_folder
from mamba_jax.checkpoints.keys import EMBEDDING, LM_HEAD, Layout, file_weights
from mamba_jax.checkpoints.stored import StoredTensor
from mamba_jax.config import MambaConfig
from mamba_jax.messages import clip, shown, some
from mamba_jax.params import Params, build_params
from mamba_jax.progress import at_terminal, track

_STORED_DTYPES = (*FLOAT_DTYPES, "float64")
_ALIGNMENT = 64
_BLOCK = 1 << 20  # elements looked at together


def load(
    path_or_hub_id: str | os.PathLike[str],
    *,
    dtype: DTypeLike | None = None,
    revision: str | None = None,
    allow_nonfinite: bool = False,
    progress: bool | None = None,
) -> Params:
    """Load a checkpoint: original or Hugging Face layout, safetensors or torch's `.bin`, one file or shards.

    Files are mapped to memory and converted weight by weight, so beside the result only one weight is held at a time.
    Nothing pickled is run.

    Args:
        path_or_hub_id: a folder, or a hub id such as "state-spaces/mamba2-130m", downloaded once through
            huggingface_hub (`HF_HOME`, `HF_HUB_OFFLINE` and `HF_ENDPOINT` hold).
        dtype: of the weights: bfloat16, float16 or float32; None keeps the file's (the embedding's, where they differ;
            float64 becomes float32). A_log, D and dt_bias are float32 always.
        revision: branch, tag or commit of a hub id.
        allow_nonfinite: accept NaN and infinity in weights.
        progress: show a progress bar on stderr; None shows one if stderr is a terminal.

    Returns:
        The model; `params.config` is its architecture, `params.text` what the checkpoint says about text.

    Raises:
        ValueError: if an argument, the config or a file is wrong; missing, unexpected and mis-shaped weights and wrong
            dtypes are reported together.
        OSError: if the hub cannot be reached, or a file cannot be read.
    """
    kept = None if dtype is None else float_dtype("dtype", dtype)
    show = at_terminal() if progress is None else progress
    folder = find_folder(path_or_hub_id, revision, show)
    config, text = read_config(folder)
    config, stored = match_weights(config, open_weights(folder), str(folder))
    bad: list[str] = []
    with track(f"Loading {folder.name}", sum(map(_nbytes, stored.values())), in_bytes=True, show=show) as advance:

        def make(path: str, shape: tuple[int, ...], leaf_dtype: jnp.dtype) -> jax.Array:
            array = _convert(stored[path], leaf_dtype)
            if not allow_nonfinite and not is_finite(array):
                overflows = is_finite(np.ascontiguousarray(stored[path].map()))
                bad.append(f"{path} (overflows {leaf_dtype})" if overflows else path)
            # On the CPU this is the array itself; elsewhere, waiting frees the host's copy before the next is made.
            leaf = jax.block_until_ready(jnp.asarray(array.reshape(shape)))
            advance(_nbytes(stored[path]))
            return leaf

        params = build_params(config, kept or _kept_dtype(stored["embedding"]), make, text)
    if bad:
        raise ValueError(f"{folder}: NaN or infinity in {some(bad, '; ')}; allow_nonfinite=True loads it all the same")
    return params


def match_weights(
    config: MambaConfig, stored: Mapping[str, StoredTensor], where: str
) -> tuple[MambaConfig, dict[str, StoredTensor]]:
    """Find every weight of the architecture among stored tensors, and nothing else.

    Args:
        config: the architecture.
        stored: the tensors of a checkpoint by name.
        where: what to call the checkpoint in errors.

    Returns:
        The architecture, padded as the embedding is, and the tensors by path in `Params`.

    Raises:
        ValueError: if anything is missing, unexpected, mis-shaped or of a wrong dtype: all of it in one message.
    """
    stored = _plain_names(stored)
    layout: Layout = "original" if EMBEDDING["original"] in stored else "hf"
    config = _fit_vocabulary(config, stored.get(EMBEDDING[layout]))
    if config.n_layer > len(stored):
        raise ValueError(f"{where}: the config has {config.n_layer} layers, the files hold only {len(stored)} tensors")
    weights = file_weights(config, layout)
    wanted = {weight.name: weight.shape for weight in weights}
    if config.tie_embeddings and LM_HEAD in stored:  # a copy, or another name, of the embedding
        wanted[LM_HEAD] = wanted[EMBEDDING[layout]]
    found = {name: tensor for name, tensor in stored.items() if name in wanted}
    problems = {
        "missing": sorted(wanted.keys() - stored.keys()),
        "unexpected": sorted(stored.keys() - wanted.keys()),
        "wrong shape": [
            f"{clip(name)}: got {shown(tensor.shape)}, wanted {wanted[name]}"
            for name, tensor in found.items()
            if tensor.shape != wanted[name]
        ],
        "wrong dtype": [
            f"{name}: got {tensor.dtype}, wanted one of {', '.join(_STORED_DTYPES)}"
            for name, tensor in found.items()
            if tensor.dtype.name not in _STORED_DTYPES
        ],
    }
    if any(problems.values()):
        lines = [f"{len(names)} {kind}: {some(names, '; ')}" for kind, names in problems.items() if names]
        raise ValueError("\n  ".join([f"{where}: the weights are not those of its config:", *lines]))
    if config.tie_embeddings and LM_HEAD in stored and not _are_equal(stored[LM_HEAD], stored[EMBEDDING[layout]]):
        raise ValueError(
            f"{where}: {LM_HEAD} differs from {EMBEDDING[layout]}, but the config ties them "
            "(tie_embeddings, tie_word_embeddings): wanted equal weights, or false there"
        )
    return config, {weight.path: stored[weight.name] for weight in weights}


def _plain_names(stored: Mapping[str, StoredTensor]) -> Mapping[str, StoredTensor]:
    """Without the "model." that every name of Mistral's files begins with."""
    if all(name.startswith("model.") for name in stored):
        return {name.removeprefix("model."): tensor for name, tensor in stored.items()}
    return stored


def _fit_vocabulary(config: MambaConfig, embedding: StoredTensor | None) -> MambaConfig:
    """The embedding may come without the rows that pad it."""
    rows = None if embedding is None else embedding.shape[:1]
    if rows == (config.vocab_size,) and rows != (config.padded_vocab_size,):
        return dataclasses.replace(config, pad_vocab_size_multiple=1)
    return config


def _kept_dtype(embedding: StoredTensor) -> np.dtype:
    return np.dtype(np.float32) if embedding.dtype == np.float64 else embedding.dtype


def _convert(tensor: StoredTensor, dtype: np.dtype) -> np.ndarray:
    """A copy of a stored tensor, in C order and aligned so that JAX on a CPU takes it without another copy."""
    memory = np.empty(tensor.size * dtype.itemsize + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    array = memory[start : start + tensor.size * dtype.itemsize].view(dtype).reshape(tensor.shape)
    with np.errstate(over="ignore"):  # infinity is reported by name
        np.copyto(array, tensor.map(), casting="unsafe")
    return array


def _nbytes(tensor: StoredTensor) -> int:
    return tensor.size * tensor.dtype.itemsize


def _blocks(array: np.ndarray) -> Iterator[np.ndarray]:
    flat = array.reshape(-1)
    return (flat[start : start + _BLOCK] for start in range(0, flat.size, _BLOCK))


def is_finite(array: np.ndarray) -> bool:
    """Whether a C-ordered floating array holds neither NaN nor infinity; reads its bits, so no wider copy is made."""
    bits = np.dtype(f"u{array.dtype.itemsize}")
    exponent = np.array(np.inf, array.dtype).view(bits)  # infinity is the exponent, all ones
    magnitude = bits.type(np.iinfo(bits).max >> 1)
    return all(int((block.view(bits) & magnitude).max()) < exponent for block in _blocks(array))


def _are_equal(a: StoredTensor, b: StoredTensor) -> bool:
    if a == b:  # one storage under two names
        return True
    if a.dtype != b.dtype:
        return False
    pairs = zip(_blocks(a.map()), _blocks(b.map()), strict=True)
    return all(np.array_equal(x.view(np.uint8), y.view(np.uint8)) for x, y in pairs)
