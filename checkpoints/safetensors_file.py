"""The safetensors format, read as memory maps and written one tensor at a time.

A file is: u64 (little-endian) size of the header; the header, JSON of {name: {"dtype", "shape", "data_offsets"}}; the
tensors' bytes, C order, little-endian, without holes. Format: https://github.com/huggingface/safetensors.
It is parsed here rather than by its library because weights must stay mapped (the library copies each into memory, and
its numpy side has no view of bfloat16) and an error must name file, key, got and wanted.
"""

import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mamba_jax.checkpoints.files import open_regular, parse_json
from mamba_jax.checkpoints.stored import MAX_AXES, StoredTensor, Version, numpy_dtype, refuse_pointer, version_of
from mamba_jax.messages import clip, shown

_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def read_safetensors(file: Path) -> dict[str, StoredTensor]:
    """Find the tensors of a safetensors file; their bytes are not read.

    Args:
        file: the file.

    Returns:
        The tensors by name.

    Raises:
        ValueError: if the file is truncated or not of this format; the message names the file, and the key with what
            it has and what was wanted.
        OSError: if it cannot be read.
    """
    with open_regular(file) as stream:
        version = version_of(stream)
        _, _, size, _ = version
        head = stream.read(8)
        length = int.from_bytes(head, "little")
        refuse_pointer(head + stream.read(24), file)
        if len(head) < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            raise ValueError(
                f"{file}: truncated or not safetensors: the header should take {length} bytes, the file has {size}"
            )
        stream.seek(8)
        text = stream.read(length)
    header = _parse_header(text, file)
    tensors = {name: _entry(file, version, name, entry, 8 + length) for name, entry in header.items()}
    _check_layout(file, tensors, 8 + length, size)
    return tensors


def _parse_header(text: bytes, file: Path) -> dict[str, Any]:
    try:
        header = parse_json(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: corrupt safetensors header: {error}") from error
    if not isinstance(header, dict):
        raise ValueError(f"{file}: corrupt safetensors header: got a {type(header).__name__}, wanted an object")
    header.pop("__metadata__", None)
    return header


def _entry(file: Path, version: Version, name: str, entry: Any, base: int) -> StoredTensor:
    where = f"{file}: {clip(name)}"
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise ValueError(f"{where}: got {shown(entry)}, wanted dtype, shape and data_offsets")
    kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(kind, str) or kind not in _DTYPES:
        raise ValueError(f"{where}: dtype: got {shown(kind)}, wanted one of {', '.join(_DTYPES)}")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise ValueError(
            f"{where}: got shape {shown(shape)} and data_offsets {shown(offsets)}, wanted sizes and two offsets"
        )
    dtype, (begin, end) = numpy_dtype(_DTYPES[kind]), offsets
    if len(shape) > MAX_AXES:
        raise ValueError(f"{where}: got {len(shape)} axes, wanted at most {MAX_AXES}")
    nbytes = math.prod(shape) * dtype.itemsize
    if end - begin != nbytes:
        raise ValueError(
            f"{where}: data_offsets {offsets} hold {end - begin} bytes, "
            f"wanted {nbytes} for shape {shown(tuple(shape))} of {kind}"
        )
    return StoredTensor(file, version, base + begin, nbytes, dtype, tuple(shape))


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def _check_layout(file: Path, tensors: dict[str, StoredTensor], base: int, size: int) -> None:
    position = base
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if tensor.offset != position:
            raise ValueError(
                f"{file}: {clip(name)}: begins at byte {tensor.offset - base} of the data, wanted {position - base}: "
                "tensors overlap or leave a hole"
            )
        position += tensor.nbytes
    if position != size:
        raise ValueError(f"{file}: truncated or corrupt: the file has {size} bytes, its header describes {position}")


Spec = tuple[str, np.dtype, tuple[int, ...]]


def write_safetensors(file: Path, specs: Sequence[Spec], get: Callable[[str], np.ndarray]) -> None:
    """Write a safetensors file, holding one tensor at a time.

    Args:
        file: the file to create.
        specs: name, dtype and shape of each tensor.
        get: gives the tensor of a name.
    """
    # Wide elements first keep every tensor aligned to its element.
    ordered = sorted(specs, key=lambda spec: (-spec[1].itemsize, spec[0]))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers asks for a format
    position = 0
    for name, dtype, shape in ordered:
        end = position + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype.name], "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("xb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name, dtype, shape in ordered:
            array = np.ascontiguousarray(get(name).astype(dtype, copy=False)).reshape(shape)
            stream.write(array.reshape(-1).view(np.uint8).data)
        stream.flush()
        os.fsync(stream.fileno())
