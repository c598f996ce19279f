"""Writes what `torch.save` writes, without torch, so that its reader is tested where torch is not installed."""

import io
import struct
import zipfile

import numpy as np

STORAGES = {
    "float32": "FloatStorage",
    "float64": "DoubleStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "int64": "LongStorage",
    "complex64": "ComplexFloatStorage",
}
ORDERED_DICT = b"ccollections\nOrderedDict\n)R"


def text(value):
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def integer(value):
    return b"J" + struct.pack("<i", value)


def sizes(values):
    return b"(" + b"".join(integer(value) for value in values) + b"t"


def tensor(key, dtype, count, shape, strides, start=0):
    """The instructions that make one tensor."""
    storage = b"(" + text("storage") + b"ctorch\n" + STORAGES[dtype].encode() + b"\n" + text(key) + text("cpu")
    storage += integer(count) + b"tQ"
    view = storage + integer(start) + sizes(shape) + sizes(strides) + b"\x89" + ORDERED_DICT
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + view + b"tR"


def state_dict(items):
    """The pickle of {name: tensor}, from the instructions of each tensor, with the attributes torch gives it."""
    body = b"".join(text(name) + made for name, made in items.items())
    attributes = b"}" + text("_metadata") + ORDERED_DICT + b"s"
    return b"\x80\x02" + ORDERED_DICT + b"(" + body + b"u" + attributes + b"b."


def archive(pickled, storages, extra=None, compression=zipfile.ZIP_STORED):
    """The bytes of a `.bin` file."""
    stream = io.BytesIO()
    entries = {"archive/data.pkl": pickled, "archive/byteorder": b"little"}
    entries |= {f"archive/data/{key}": data for key, data in storages.items()} | {"archive/version": b"3\n"}
    with zipfile.ZipFile(stream, "w", compression) as file:
        for name, data in (entries | (extra or {})).items():
            file.writestr(name, data)
    return stream.getvalue()


def write(path, arrays):
    """Write {name: array}; arrays that are the same object share one storage, as tied weights do."""
    keys, storages, items = {}, {}, {}
    for name, array in arrays.items():
        key = keys.setdefault(id(array), str(len(keys)))
        storages[key] = np.ascontiguousarray(array).tobytes()
        strides = [stride // array.dtype.itemsize for stride in np.ascontiguousarray(array).strides]
        items[name] = tensor(key, array.dtype.name, array.size, array.shape, strides)
    path.write_bytes(archive(state_dict(items), storages))
