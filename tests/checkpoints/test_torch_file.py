"""The reader of `torch.save` files: what it maps, and that nothing in a file is ever run."""

import contextlib
import os
import pickle
import subprocess
import sys
import zipfile

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mamba_jax.checkpoints.torch_file import read_torch
from tests.checkpoints import torch_archives as ta

RNG = np.random.default_rng(0)
ARRAYS = {
    "a": RNG.standard_normal((3, 5)).astype(np.float32),
    "b.weight": RNG.standard_normal(7).astype(ml_dtypes.bfloat16),
    "c": RNG.standard_normal((2, 1, 4)).astype(np.float16),
    "d": RNG.integers(0, 9, 3),
}
ONE = ta.tensor("0", "float32", 6, (2, 3), (3, 1))
STORAGE = {"0": np.arange(6, dtype=np.float32).tobytes()}


def read(tmp_path, content):
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(content)
    return read_torch(path)


def test_arrays_come_back(tmp_path):
    ta.write(tmp_path / "x.bin", ARRAYS)
    tensors = read_torch(tmp_path / "x.bin")
    assert list(tensors) == list(ARRAYS)
    for name, array in ARRAYS.items():
        mapped = tensors[name].map()
        assert (mapped.dtype, mapped.shape, mapped.tobytes()) == (array.dtype, array.shape, array.tobytes())
        assert not mapped.flags.owndata
        assert not mapped.flags.writeable


def test_views_honour_strides_and_start(tmp_path):
    items = {
        "transposed": ta.tensor("0", "float32", 6, (3, 2), (1, 3)),
        "column": ta.tensor("0", "float32", 6, (2,), (3,), start=1),
        "one row": ta.tensor("0", "float32", 6, (1, 2), (0, 1), start=4),
        "scalar": ta.tensor("0", "float32", 6, (), (), start=5),
        "nothing": ta.tensor("0", "float32", 6, (0, 9), (9, 1)),
    }
    tensors = read(tmp_path, ta.archive(ta.state_dict(items), STORAGE))
    base = np.arange(6, dtype=np.float32)
    np.testing.assert_array_equal(tensors["transposed"].map(), base.reshape(2, 3).T)
    np.testing.assert_array_equal(tensors["column"].map(), [1, 4])
    np.testing.assert_array_equal(tensors["one row"].map(), [[4, 5]])
    np.testing.assert_array_equal(tensors["scalar"].map(), 5)
    assert tensors["nothing"].map().shape == (0, 9)


def test_tied_tensors_keep_sharing_their_storage(tmp_path):
    ta.write(tmp_path / "x.bin", {"a": ARRAYS["a"], "b": ARRAYS["a"]})
    tensors = read_torch(tmp_path / "x.bin")
    assert tensors["a"] == tensors["b"]


class Attack:
    """Pickles as a call; unpickling it for real creates the file."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_a_malicious_pickle_is_refused_and_not_run(tmp_path, protocol):
    witness = tmp_path / "witness"
    payload = pickle.dumps({"a": Attack(os.system, f"touch {witness}")}, protocol)
    with pytest.raises(ValueError, match=r"refused (global (posix|nt)\.system|instruction)") as error:
        read(tmp_path, ta.archive(payload, {}))
    assert "pytorch_model.bin" in str(error.value)
    assert not witness.exists()
    pickle.loads(payload)  # the payload is armed: this test would fail had it been run
    assert witness.exists()


@pytest.mark.parametrize(
    "name", ["builtins eval", "builtins getattr", "torch load", "torch._utils _rebuild_tensor", "os system"]
)
def test_globals_beyond_the_allowed_are_refused_by_name(tmp_path, name):
    module, attribute = name.split()
    payload = b"\x80\x02c" + f"{module}\n{attribute}\n".encode() + b")R."
    with pytest.raises(ValueError, match=f"refused global {module}.{attribute}"):
        read(tmp_path, ta.archive(payload, {}))
    stacked = b"\x80\x04" + ta.text(module) + ta.text(attribute) + b"\x93)R."
    with pytest.raises(ValueError, match=f"refused global {module}.{attribute}"):
        read(tmp_path, ta.archive(stacked, {}))


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (b"ccollections\nOrderedDict\n(I1\ntR.", "refused instruction INT"),
        (b"S'\\l'\nR.", "refused instruction STRING"),  # an escape that Python warns of
        (b"ccollections\nOrderedDict\n(K\x01tR.", "refused arguments for collections.OrderedDict"),
        (b"ccollections\nOrderedDict\n}" + ta.text("x") + b"K\x01sb.", "attributes for a _Function"),
        (ta.text("name") + b")R.", "refused call of a str"),
        (
            b"ctorch._utils\n_rebuild_parameter\n(K\x01K\x02NtR.",
            "refused arguments for torch._utils._rebuild_parameter",
        ),
        (b"}((K\x01K\x02tK\x03u.", "dict key: got a tuple"),
        (b"}(" + ta.text("a") + ONE + ta.text("a") + ONE + b"u.", "'a': given twice"),
        (b"}(" + ta.text("a") + b"u.", "items for something that is not a dict"),
        (b"K\x01.", "holds a int, wanted a dict of tensors"),
        (b"}(" + ta.text("state_dict") + b"}u.", "'state_dict': got a dict, wanted a tensor under a name"),
        (b"}(" + ta.text("step") + b"K\x07u.", "'step': got a int"),
        (b"}(K\x01" + ONE + b"u.", "1: got a StoredTensor, wanted a tensor under a name"),
        (b"h\x05.", "corrupt or refused"),
        (b"R.", "corrupt or refused"),
        (b".", "corrupt or refused"),
        (b"", "corrupt or refused"),
        (b"}(" + ta.text("a"), "corrupt or refused"),
        (b"\xff.", "corrupt or refused"),
        (b"(" * 1000 + b"t" * 1000 + b"Q.", "corrupt or refused"),
    ],
)
def test_pickles_of_anything_else_are_refused(tmp_path, payload, message):
    with pytest.raises(ValueError, match=message):
        read(tmp_path, ta.archive(b"\x80\x02" + payload, STORAGE))


def test_a_nest_that_would_hash_or_print_for_ever_is_refused_at_once(tmp_path):
    nest = b")" + b"".join(b"q" + bytes([i]) + b"h" + bytes([i]) + b"\x86" for i in range(200))  # (x, x), 200 times
    for payload in (b"}(" + nest + b"K\x01u.", nest + b"Q.", nest + b")R.", b"}(" + ta.text("a") + nest + b"u."):
        with pytest.raises(ValueError, match=r"pytorch_model\.bin"):
            read(tmp_path, ta.archive(b"\x80\x02" + payload, {}))


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (ta.tensor("0", "float32", 6, (7,), (1,)), r"shape \(7,\) with strides \(1,\) from 0 ends beyond"),
        (ta.tensor("0", "float32", 6, (2, 3), (3, 1), start=1), "ends beyond its storage"),
        (ta.tensor("0", "float32", 6, (2**31 - 1,), (0,)), "tensor 'a': .* repeats elements"),
        (ta.tensor("0", "float32", 6, (2, 3), (0, 1)), r"shape \(2, 3\) with strides \(0, 1\) from 0 repeats elements"),
        (ta.tensor("0", "float32", 6, (2, 3), (1, 1)), "repeats elements of its storage"),
        (ta.tensor("0", "float32", 6, (2, 2, 2), (3, 1, 1)), "repeats elements of its storage"),
        (ta.tensor("0", "float32", 6, (1,) * 40, (1,) * 40), "tensor 'a': got 40 axes"),
        (ta.tensor("0", "float32", 6, (2,), (-1,), start=3), "tensor 'a': its start, shape or strides are no sizes"),
        (ta.tensor("0", "float32", 6, (-2,), (1,)), "are no sizes"),
        (ta.tensor("0", "float32", 6, (2, 3), (1,)), "are no sizes"),
        (ta.tensor("0", "float32", 7, (7,), (1,)), "storage '0': 24 bytes are not the elements of float32"),
        (ta.tensor("0", "float64", 6, (6,), (1,)), "storage '0': 24 bytes are not the elements of float64"),
        (ta.tensor("5", "float32", 6, (6,), (1,)), "storage '5': no entry archive/data/5"),
        (ta.tensor("../0", "float32", 6, (6,), (1,)), "no entry archive/data/../0"),
    ],
)
def test_views_outside_their_storage_are_refused(tmp_path, item, message):
    with pytest.raises(ValueError, match=message):
        read(tmp_path, ta.archive(ta.state_dict({"a": item}), STORAGE))


def test_archives_that_are_none(tmp_path):
    good = ta.archive(ta.state_dict({"a": ONE}), STORAGE)
    for content, message in [
        (b"", "truncated, or not a torch archive"),
        (pickle.dumps(0x1950A86A20F9469CFC6C, 2), "from before torch 1.6"),
        (good[:-30], "truncated or corrupt zip"),
        (good[: len(good) // 2], "truncated or corrupt zip"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        (ta.archive(b"", {}, compression=zipfile.ZIP_DEFLATED), "compressed"),
        (ta.archive(ta.state_dict({"a": ONE}), STORAGE, {"archive/constants.pkl": b"x"}), "TorchScript"),
        (ta.archive(ta.state_dict({"a": ONE}), STORAGE, {"other/data.pkl": b"x"}), "2 entries named data.pkl"),
        (ta.archive(ta.state_dict({"a": ONE}), STORAGE, {"archive/byteorder": b"big"}), "byteorder: wanted little"),
    ]:
        with pytest.raises(ValueError, match=message):
            read(tmp_path, content)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damaged_archives_raise_nothing_but_value_errors(tmp_path_factory, data):
    items = {f"w{i}": ta.tensor("0", "float32", 6, (2, 3), (3, 1)) for i in range(3)}
    whole = bytearray(ta.archive(ta.state_dict(items), STORAGE))
    for position, bit in data.draw(st.lists(st.tuples(st.integers(0, len(whole) - 1), st.integers(0, 7)), max_size=3)):
        whole[position] ^= 1 << bit
    end = data.draw(st.integers(0, len(whole))) if data.draw(st.booleans()) else len(whole)
    path = tmp_path_factory.mktemp("fuzz") / "x.bin"
    path.write_bytes(whole[:end])
    tensors = {}
    with contextlib.suppress(ValueError):
        tensors = read_torch(path)
    for tensor in tensors.values():
        assert tensor.map().shape == tensor.shape


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60))
def test_arbitrary_pickles_raise_nothing_but_value_errors(tmp_path_factory, payload):
    path = tmp_path_factory.mktemp("fuzz") / "x.bin"
    path.write_bytes(ta.archive(b"\x80\x02" + payload, STORAGE))
    with contextlib.suppress(ValueError):
        read_torch(path)


def test_reading_needs_neither_torch_nor_pickle(tmp_path):
    ta.write(tmp_path / "x.bin", ARRAYS)
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import pickle\n"
        "def refuse(*a, **k): raise SystemExit('unpickled')\n"
        "from mamba_jax.checkpoints.torch_file import read_torch\n"
        "pickle.load = pickle.loads = pickle.Unpickler = refuse\n"
        "from pathlib import Path\n"
        "print(sorted(read_torch(Path(sys.argv[1]))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "x.bin")], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(sorted(ARRAYS))


@pytest.mark.parity
@pytest.mark.parametrize("protocol", [2, 4])
def test_what_torch_itself_saves(tmp_path, protocol):
    torch = pytest.importorskip("torch")
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    linear = torch.nn.Linear(3, 2).bfloat16()
    state = {
        "base": base,
        "row": base[2],
        "transposed": base.t(),
        "every other": base[:, ::2],
        "parameter": torch.nn.Parameter(torch.randn(3, 2)),
        "half": torch.randn(5).half(),
        "bfloat16": torch.randn(5).bfloat16(),
        "double": torch.randn(5).double(),
        "ids": torch.arange(5),
        **linear.state_dict(),
    }
    torch.save(state, tmp_path / "x.bin", pickle_protocol=protocol)
    tensors = read_torch(tmp_path / "x.bin")
    assert list(tensors) == list(state)
    for name, tensor in state.items():
        mapped = tensors[name].map()
        assert mapped.shape == tuple(tensor.shape)
        np.testing.assert_array_equal(mapped.astype(np.float64), tensor.detach().double().numpy())
    assert tensors["row"].offset == tensors["base"].offset

    torch.save(linear.state_dict(), tmp_path / "attributes.bin")  # an OrderedDict with _metadata
    assert list(read_torch(tmp_path / "attributes.bin")) == ["weight", "bias"]
    torch.save(linear, tmp_path / "module.bin")
    with pytest.raises(ValueError, match=r"refused global torch\.nn\.modules\.linear\.Linear"):
        read_torch(tmp_path / "module.bin")
    torch.save(linear.state_dict(), tmp_path / "legacy.bin", _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match=r"before torch 1\.6"):
        read_torch(tmp_path / "legacy.bin")
