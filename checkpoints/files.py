"""What lies in a checkpoint's folder: names of files, and how to pick and read them."""

import collections
import json
import os
import stat
from collections.abc import Collection
from pathlib import Path
from typing import Any, BinaryIO

from mamba_jax.messages import shown, some

CONFIG_FILES = ("config.json", "params.json")  # params.json is Mistral's; config.json wins
GENERATION_CONFIG = "generation_config.json"
INDEX_SUFFIX = ".index.json"
# In order of preference; within one kind a single file comes before a sharded one, as transformers has it.
WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors" + INDEX_SUFFIX,
    "consolidated.safetensors",  # Mistral's
    "pytorch_model.bin",
    "pytorch_model.bin" + INDEX_SUFFIX,
)
# Any of these makes a folder one that holds a tokenizer.
TOKENIZER_MARKS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "tekken.json",
)
TOKENIZER_FILES = (
    *TOKENIZER_MARKS,
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.model.v3",
    "vocab.txt",
)
_NAME_MAX = 255  # characters of what a file can be called
_MAX_JSON_BYTES = 100_000_000


def choose_weights(names: Collection[str], where: str) -> str:
    """The file to read weights from: a weight file or an index of shards.

    Args:
        names: files of the folder or repository.
        where: what to call it in an error.

    Returns:
        One of `WEIGHT_FILES`.

    Raises:
        ValueError: if there are none.
    """
    for candidate in WEIGHT_FILES:
        if candidate in names:
            return candidate
    found = some(sorted(names)) or "nothing"
    raise ValueError(f"{where}: no weights; wanted one of {', '.join(WEIGHT_FILES)}; found {found}")


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read; what is none would make its reader wait (a FIFO) or read for ever (a device).

    Raises:
        ValueError: if it is no regular file.
        OSError: if it cannot be opened.
    """
    wait_not = getattr(os, "O_NONBLOCK", 0)
    stream = open(path, "rb", opener=lambda name, flags: os.open(name, flags | wait_not))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        stream.close()
        raise ValueError(f"{path}: is not a regular file")
    return stream


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object (bare `Infinity` and `NaN` allowed, as Python writes them).

    Raises:
        ValueError: if the file is no JSON object; the message names the file.
        OSError: if it cannot be read.
    """
    with open_regular(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > _MAX_JSON_BYTES:
            raise ValueError(f"{path}: {size} bytes are too many for a JSON file of a checkpoint")
        data = stream.read()
    try:
        value = parse_json(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: got a JSON {type(value).__name__}, wanted an object")
    return value


def parse_json(text: str) -> Any:
    """Parse JSON, strictly about keys: of two alike, readers differ in which one they take.

    Raises:
        ValueError: if it is no JSON, or an object has a key twice.
        RecursionError: if it is nested too deeply.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) < len(pairs):
            counts = collections.Counter(key for key, _ in pairs)
            raise ValueError(f"keys given twice: {some([key for key, count in counts.items() if count > 1])}")
        return value

    return json.loads(text, object_pairs_hook=unique)


def read_index(path: Path) -> dict[str, str]:
    """Read an index of shards: {weight name: file name}.

    Raises:
        ValueError: if it has no usable `weight_map`; the message names the file and the entry.
    """
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(
            f"{path}: 'weight_map': got {shown(weight_map)}, wanted an object of weight names and file names"
        )
    for key, name in weight_map.items():
        # A shard lies beside its index: a path that leads elsewhere could read any file of the machine.
        if not isinstance(name, str) or not 0 < len(name) <= _NAME_MAX or Path(name).name != name:
            raise ValueError(
                f"{path}: weight_map[{shown(key)}]: got {shown(name)}, wanted the name of a file beside the index"
            )
    return weight_map


def has_tokenizer(folder: Path) -> bool:
    """Whether a tokenizer lies in the folder."""
    return any((folder / name).exists() for name in TOKENIZER_MARKS)
