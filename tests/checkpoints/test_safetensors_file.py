"""The safetensors reader and writer against the format's own library, and files that are not what they should be."""

import contextlib
import json

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from mamba_jax.checkpoints.safetensors_file import read_safetensors, write_safetensors

RNG = np.random.default_rng(0)
ARRAYS = {
    "a": RNG.standard_normal((3, 5)).astype(np.float32),
    "b.weight": RNG.standard_normal(7).astype(ml_dtypes.bfloat16),
    "c": RNG.standard_normal((2, 1, 4)).astype(np.float16),
    "d": RNG.standard_normal(3).astype(np.float64),
    "empty": np.zeros((0, 4), np.float32),
}


def file_of(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def assert_same(got, want):
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    assert got.tobytes() == want.tobytes()


def test_reads_what_the_library_writes(tmp_path):
    safetensors.numpy.save_file(ARRAYS, tmp_path / "x.safetensors", {"format": "pt"})
    tensors = read_safetensors(tmp_path / "x.safetensors")
    assert tensors.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert_same(tensors[name].map(), array)


def test_writes_what_the_library_reads(tmp_path):
    specs = [(name, array.dtype, array.shape) for name, array in ARRAYS.items()]
    write_safetensors(tmp_path / "x.safetensors", specs, ARRAYS.__getitem__)
    for name, array in safetensors.numpy.load_file(tmp_path / "x.safetensors").items():
        assert_same(array, ARRAYS[name])
    for name, tensor in read_safetensors(tmp_path / "x.safetensors").items():
        assert_same(tensor.map(), ARRAYS[name])
        assert tensor.offset % tensor.dtype.itemsize == 0


def test_u64_bfloat16_is_exact_and_stays_mapped(tmp_path):
    every = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)  # every bit pattern there is
    safetensors.numpy.save_file({"x": every}, tmp_path / "x.safetensors")
    array = read_safetensors(tmp_path / "x.safetensors")["x"].map()
    assert array.dtype == ml_dtypes.bfloat16
    assert not array.flags.owndata
    assert not array.flags.writeable
    assert_same(array, every)
    piece = array[0x3F80:0x3F90]  # a slice of the map
    np.testing.assert_array_equal(piece.astype(np.float32), 1 + np.arange(16, dtype=np.float32) / 128)


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "truncated or not safetensors"),
        (b"\x10\x00\x00\x00", "truncated or not safetensors"),
        (b"PK\x03\x04" + b"x" * 60, "truncated or not safetensors"),
        (file_of({"a": F32})[:20], "truncated or not safetensors"),
        (file_of({"a": F32}, b"1234567"), "truncated or corrupt: the file has .* bytes, its header describes"),
        (file_of({"a": F32}, b"123456789"), "truncated or corrupt"),
        (file_of(b"[1, 2]"), "corrupt safetensors header: got a list"),
        (file_of(b"{nonsense"), "corrupt safetensors header"),
        (file_of(b"[" * 200_000), "corrupt safetensors header"),
        (file_of(b"\xff\xfe"), "corrupt safetensors header"),
        (file_of(b'{"a": 1, "a": 2}'), "keys given twice: a"),
        (file_of({"a": 3}), "a: got 3, wanted dtype"),
        (file_of({"a": F32 | {"dtype": "F9"}}, b"12345678"), "a: dtype: got 'F9'"),
        (file_of({"a": F32 | {"dtype": ["F32"]}}, b"12345678"), "a: dtype: got"),
        (file_of({"a": F32 | {"shape": [3]}}, b"12345678"), r"a: data_offsets \[0, 8\] hold 8 bytes, wanted 12"),
        (file_of({"a": F32 | {"shape": [-2]}}, b"12345678"), "a: got shape"),
        (file_of({"a": F32 | {"shape": [True, 2]}}, b"12345678"), "a: got shape"),
        (file_of({"a": F32 | {"data_offsets": [8, 0]}}, b"12345678"), "a: data_offsets"),
        (file_of({"a": F32 | {"data_offsets": [0]}}, b"12345678"), "a: got shape"),
        (file_of({"a": F32, "b": F32}, b"12345678"), "b: begins at byte 0 of the data, wanted 8: tensors overlap"),
        (file_of({"a": F32 | {"data_offsets": [4, 12]}}, b"1" * 12), "a: begins at byte 4 of the data, wanted 0"),
        (file_of({"a": F32 | {"data_offsets": [10**30, 10**30 + 8]}}), "a: got shape"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "Git LFS pointer"),
    ],
)
def test_a_file_that_is_wrong_is_one_clear_error(tmp_path, content, message):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        read_safetensors(path)
    assert str(path) in str(error.value)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_damaged_files_raise_nothing_but_value_errors(tmp_path_factory, data):
    whole = bytearray(safetensors.numpy.save(ARRAYS))
    end = data.draw(st.integers(0, len(whole)))
    for position, bit in data.draw(st.lists(st.tuples(st.integers(0, len(whole) - 1), st.integers(0, 7)), max_size=3)):
        whole[position] ^= 1 << bit
    path = tmp_path_factory.mktemp("fuzz") / "x.safetensors"
    path.write_bytes(whole[:end] if data.draw(st.booleans()) else whole)
    tensors = {}
    with contextlib.suppress(ValueError):
        tensors = read_safetensors(path)
    for tensor in tensors.values():
        assert tensor.map().shape == tensor.shape
