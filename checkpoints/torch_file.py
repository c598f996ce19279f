"""Tensors of a `torch.save` file (`.bin`), mapped to memory without torch and without running what the pickle says.

The format (torch 1.6 and later) is a zip of uncompressed entries: `NAME/data.pkl`, a pickle of {weight name: tensor},
and `NAME/data/KEY`, the raw storages. A pickle is a program for a stack machine that can call any function it names.
Here its instructions are decoded (`pickletools.genops` runs nothing) and interpreted by a machine that knows only those
a state dict is made of, and whose only functions are `_GLOBALS`. Anything else is refused by name.
"""

import pickletools
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from mamba_jax.checkpoints.files import open_regular
from mamba_jax.checkpoints.stored import MAX_AXES, StoredTensor, Version, numpy_dtype, refuse_pointer, version_of
from mamba_jax.messages import clip, shown

_STORAGES = {
    "BFloat16Storage": "bfloat16",
    "BoolStorage": "bool",
    "ByteStorage": "uint8",
    "CharStorage": "int8",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "IntStorage": "int32",
    "LongStorage": "int64",
    "ShortStorage": "int16",
}
_MAX_PICKLE_BYTES = 100_000_000
_LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature, ..., length of the name, length of the extra field
_ZIP_ERRORS = (
    zipfile.BadZipFile,
    zipfile.LargeZipFile,
    NotImplementedError,
    EOFError,
    IndexError,
    OverflowError,
    RuntimeError,
    ValueError,
    struct.error,
)


class _Region(NamedTuple):
    """Bytes of a file."""

    offset: int
    nbytes: int


class _StorageType(NamedTuple):
    """What the pickle calls `torch.FloatStorage` and so on."""

    dtype: str


class _Storage(NamedTuple):
    """A storage: a run of elements in the file."""

    region: _Region
    dtype: np.dtype


class _Function(NamedTuple):
    """A function that the pickle may call; its name is for errors."""

    name: str


_ORDERED_DICT = _Function("collections OrderedDict")
_REBUILD_TENSOR = _Function("torch._utils _rebuild_tensor_v2")
_REBUILD_PARAMETER = _Function("torch._utils _rebuild_parameter")
_GLOBALS: dict[str, _Function | _StorageType] = {
    **{function.name: function for function in (_ORDERED_DICT, _REBUILD_TENSOR, _REBUILD_PARAMETER)},
    **{f"torch {name}": _StorageType(dtype) for name, dtype in _STORAGES.items()},
}


def read_torch(file: Path) -> dict[str, StoredTensor]:
    """Find the tensors of a `torch.save` file; their bytes are not read. Views of one storage keep sharing it.

    Args:
        file: the file.

    Returns:
        The tensors by name.

    Raises:
        ValueError: if the file is truncated, not of this format, or names anything but tensors; the message names the
            file, and the key or the refused global.
        OSError: if it cannot be read.
    """
    with open_regular(file) as stream:
        version = version_of(stream)
        head = stream.read(32)
        refuse_pointer(head, file)
        if not head.startswith(b"PK\x03\x04"):
            raise ValueError(
                f"{file}: truncated, or not a torch archive: got first bytes {head[:4]!r}, wanted a zip; a file from "
                "before torch 1.6 has to be saved again by torch.save of a later version"
            )
        regions = _entries(stream, file, version)
        pickles = [name for name in regions if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise ValueError(f"{file}: got {len(pickles)} entries named data.pkl, wanted 1")
        root = pickles[0].removesuffix("data.pkl")
        if regions[pickles[0]].nbytes > _MAX_PICKLE_BYTES:
            raise ValueError(f"{file}: data.pkl: {regions[pickles[0]].nbytes} bytes are too many for names and shapes")
        if f"{root}constants.pkl" in regions:
            raise ValueError(f"{file}: this is a TorchScript program, not a state dict of weights")
        if _read(stream, regions.get(f"{root}byteorder")) not in (b"", b"little"):
            raise ValueError(f"{file}: {clip(root)}byteorder: wanted little")
        data = _read(stream, regions[pickles[0]])
    return _Machine(file, version, root, regions).run(data)


def _entries(stream: BinaryIO, file: Path, version: Version) -> dict[str, _Region]:
    """Where each entry's bytes lie. Checksums are not compared: torch may be told not to write them."""
    _, _, size, _ = version
    regions: dict[str, _Region] = {}
    try:
        infos = zipfile.ZipFile(stream).infolist()
    except _ZIP_ERRORS as error:
        raise ValueError(f"{file}: truncated or corrupt zip archive: {clip(error)}") from error
    for info in infos:
        name, where = info.filename, f"{file}: {clip(info.filename)}"
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
            raise ValueError(f"{where}: compressed; torch archives store their entries uncompressed")
        stream.seek(max(info.header_offset, 0))
        header = stream.read(_LOCAL_HEADER.size)
        if info.header_offset < 0 or len(header) < _LOCAL_HEADER.size or not header.startswith(b"PK\x03\x04"):
            raise ValueError(f"{where}: no entry at byte {info.header_offset}")
        _, name_length, extra_length = _LOCAL_HEADER.unpack(header)
        offset = info.header_offset + _LOCAL_HEADER.size + name_length + extra_length
        if offset + info.file_size > size:
            raise ValueError(f"{where}: ends at byte {offset + info.file_size}, the file has {size}")
        if name in regions:
            raise ValueError(f"{where}: two entries of this name")
        regions[name] = _Region(offset, info.file_size)
    return regions


def _read(stream: BinaryIO, region: _Region | None) -> bytes:
    if region is None:
        return b""
    stream.seek(region.offset)
    return stream.read(region.nbytes)


class _Machine:
    """Interprets the pickle of a state dict.

    The stack holds plain data, storages and stored tensors, nothing that can be called. Errors never print what comes
    from the stack: nested data may be endless.
    """

    def __init__(self, file: Path, version: Version, root: str, regions: dict[str, _Region]) -> None:
        self.file, self.version, self.root, self.regions = file, version, root, regions
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def run(self, data: bytes) -> dict[str, StoredTensor]:
        """Interpret the pickle and check that it made a state dict."""
        try:
            with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # of escapes in broken strings
                for opcode, argument, _ in pickletools.genops(data):
                    if opcode.name not in _OPERATIONS:
                        raise ValueError(f"refused instruction {opcode.name}")
                    _OPERATIONS[opcode.name](self, argument)
            result = self.stack.pop()
        except (ValueError, TypeError, KeyError, IndexError) as error:
            problem = clip(error, 1000)
            raise ValueError(f"{self.file}: {clip(self.root)}data.pkl: corrupt or refused: {problem}") from error
        if not isinstance(result, dict):
            raise ValueError(f"{self.file}: holds a {type(result).__name__}, wanted a dict of tensors")
        for key, value in result.items():
            if not isinstance(key, str) or not isinstance(value, StoredTensor):
                got = type(value).__name__
                raise ValueError(f"{self.file}: {shown(key)}: got a {got}, wanted a tensor under a name")
        return result

    def pop_mark(self) -> list[Any]:
        """Take everything above the last mark."""
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def set_items(self, items: list[Any]) -> None:
        """Put key, value, key, value, ... into the dict on top."""
        target = self.stack[-1]
        if not isinstance(target, dict) or len(items) % 2:
            raise ValueError("items for something that is not a dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str | int):  # hashing a nested tuple may take for ever
                raise ValueError(f"dict key: got a {type(key).__name__}, wanted a name")
            if key in target:
                raise ValueError(f"{shown(key)}: given twice")
            target[key] = value

    def extend(self, items: list[Any]) -> None:
        """Append to the list on top."""
        if not isinstance(self.stack[-1], list):
            raise ValueError("items for something that is not a list")
        self.stack[-1].extend(items)

    def push_global(self, name: str) -> None:
        """Push one of the known globals."""
        if name not in _GLOBALS:
            raise ValueError(f"refused global {clip(name.replace(' ', '.'))}: a weight file needs only tensors")
        self.stack.append(_GLOBALS[name])

    def push_stack_global(self) -> None:
        """Push a global whose module and name are on the stack."""
        name, module = self.stack.pop(), self.stack.pop()
        self.push_global(f"{module} {name}")

    def push_storage(self) -> None:
        """Replace ("storage", type, key, location, elements) by the storage."""
        kind, storage_type, key, _, count = self.stack.pop()
        if kind != "storage" or not isinstance(storage_type, _StorageType) or not isinstance(key, str):
            raise ValueError("persistent id: wanted a storage of a known type")
        region, dtype = self.regions.get(f"{self.root}data/{key}"), numpy_dtype(storage_type.dtype)
        if region is None:
            raise ValueError(f"storage {shown(key)}: no entry {clip(f'{self.root}data/{key}')}")
        if not _are_sizes((count,)) or region.nbytes != count * dtype.itemsize:
            got = f"{region.nbytes} bytes"
            raise ValueError(f"storage {shown(key)}: {got} are not the elements of {dtype} it should hold")
        self.stack.append(_Storage(region, dtype))

    def call(self) -> None:
        """Replace function and arguments by the result."""
        arguments, function = self.stack.pop(), self.stack.pop()
        if not isinstance(function, _Function) or not isinstance(arguments, tuple):
            raise ValueError(f"refused call of a {type(function).__name__}")
        if function is _ORDERED_DICT and not arguments:
            self.stack.append({})
        elif function is _REBUILD_TENSOR:
            storage, start, shape, strides, *_ = arguments
            self.stack.append(self.tensor(storage, start, shape, strides))
        elif function is _REBUILD_PARAMETER and isinstance(arguments[0], StoredTensor):
            self.stack.append(arguments[0])
        else:
            raise ValueError(f"refused arguments for {function.name.replace(' ', '.')}")

    def tensor(self, storage: Any, start: Any, shape: Any, strides: Any) -> StoredTensor:
        """A view of a storage, checked against its bounds; no element is part of it twice."""
        name = next((shown(item) for item in self.stack[:-5:-1] if isinstance(item, str)), "of no name")
        if not isinstance(storage, _Storage):
            raise ValueError(f"tensor {name}: got a {type(storage).__name__}, wanted a storage")
        if not (_are_sizes((start,)) and _are_sizes(shape) and _are_sizes(strides) and len(shape) == len(strides)):
            raise ValueError(f"tensor {name}: its start, shape or strides are no sizes")
        if len(shape) > MAX_AXES:
            raise ValueError(f"tensor {name}: got {len(shape)} axes, wanted at most {MAX_AXES}")
        region, dtype = storage
        last = start + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        view = f"tensor {name}: shape {shown(shape)} with strides {shown(strides)} from {start}"
        if 0 not in shape and last >= region.nbytes // dtype.itemsize:
            raise ValueError(f"{view} ends beyond its storage")
        if 0 not in shape and _overlap(shape, strides):
            raise ValueError(f"{view} repeats elements of its storage, wanted each once: save a clone of it")
        return StoredTensor(self.file, self.version, region.offset, region.nbytes, dtype, shape, start, strides)

    def drop_state(self) -> None:
        """Ignore the attributes of a state dict (`_metadata`); nothing else may have any."""
        self.stack.pop()
        if not isinstance(self.stack[-1], dict):
            raise ValueError(f"attributes for a {type(self.stack[-1]).__name__}: refused")


def _overlap(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether elements of a view may lie in one place: an axis does not step over all that the axes inside it span."""
    span = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1 and stride < span:
            return True
        span += (size - 1) * stride
    return False


def _are_sizes(values: Any) -> bool:
    return isinstance(values, tuple) and all(type(value) is int and 0 <= value < 2**63 for value in values)


_Operation = Callable[[_Machine, Any], None]


def _push(make: Callable[[], Any]) -> _Operation:
    return lambda machine, _: machine.stack.append(make())


def _push_tuple(count: int) -> _Operation:
    def operation(machine: _Machine, _: Any) -> None:
        items = [machine.stack.pop() for _ in range(count)]
        machine.stack.append(tuple(reversed(items)))

    return operation


def _ignore(machine: _Machine, _: Any) -> None:
    pass


def _push_argument(machine: _Machine, argument: Any) -> None:
    machine.stack.append(argument)


def _put(machine: _Machine, index: Any) -> None:
    machine.memo[len(machine.memo) if index is None else index] = machine.stack[-1]


def _get(machine: _Machine, index: Any) -> None:
    machine.stack.append(machine.memo[index])


_VALUES = ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8")
_OPERATIONS: dict[str, _Operation] = {
    **dict.fromkeys(("PROTO", "FRAME", "STOP"), _ignore),
    **dict.fromkeys(_VALUES, _push_argument),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT", "MEMOIZE"), _put),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _get),
    "NONE": _push(lambda: None),
    "NEWTRUE": _push(lambda: True),
    "NEWFALSE": _push(lambda: False),
    "EMPTY_DICT": _push(dict),
    "EMPTY_LIST": _push(list),
    "EMPTY_TUPLE": _push(tuple),
    "TUPLE1": _push_tuple(1),
    "TUPLE2": _push_tuple(2),
    "TUPLE3": _push_tuple(3),
    "MARK": lambda machine, _: machine.marks.append(len(machine.stack)),
    "TUPLE": lambda machine, _: machine.stack.append(tuple(machine.pop_mark())),
    "SETITEM": lambda machine, _: machine.set_items([machine.stack.pop(-2), machine.stack.pop()]),
    "SETITEMS": lambda machine, _: machine.set_items(machine.pop_mark()),
    "APPEND": lambda machine, _: machine.extend([machine.stack.pop()]),
    "APPENDS": lambda machine, _: machine.extend(machine.pop_mark()),
    "GLOBAL": lambda machine, name: machine.push_global(name),
    "STACK_GLOBAL": lambda machine, _: machine.push_stack_global(),
    "BINPERSID": lambda machine, _: machine.push_storage(),
    "REDUCE": lambda machine, _: machine.call(),
    "BUILD": lambda machine, _: machine.drop_state(),
}
