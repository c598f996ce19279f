"""`load`: the weights it gives, what it refuses, the memory it takes."""

import contextlib
import json
import os
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mamba_jax import MambaConfig, TextInfo, init_params
from mamba_jax.checkpoints import load, save
from mamba_jax.checkpoints.archive import open_weights
from mamba_jax.checkpoints.loading import is_finite
from mamba_jax.params import build_params
from tests.checkpoints import folders, torch_archives

DTYPES = ("bfloat16", "float16", "float32")


def as_float64(array):
    return np.asarray(array, np.float64)


def test_u58_an_original_checkpoint_of_only_a_bin_file(tmp_path):
    arrays = folders.mamba1_folder(tmp_path)
    params = load(tmp_path)
    assert params.config == MambaConfig(
        layer="mamba1",
        vocab_size=29,
        pad_vocab_size_multiple=8,
        d_model=16,
        n_layer=2,
        d_inner=32,
        d_state=16,
        dt_rank=1,
    )
    assert params.text == TextInfo()  # no tokenizer lies there
    assert params.lm_head is None
    np.testing.assert_array_equal(params.embedding, arrays["backbone.embedding.weight"])
    np.testing.assert_array_equal(params.norm_f, arrays["backbone.norm_f.weight"])
    for i, layer in enumerate(params.layers):
        prefix = f"backbone.layers.{i}."
        np.testing.assert_array_equal(layer.norm, arrays[prefix + "norm.weight"])
        np.testing.assert_array_equal(layer.conv, arrays[prefix + "mixer.conv1d.weight"][:, 0])
        np.testing.assert_array_equal(layer.dt_bias, arrays[prefix + "mixer.dt_proj.bias"])
        for field, name in {
            "in_proj": "in_proj.weight",
            "conv_bias": "conv1d.bias",
            "x_proj": "x_proj.weight",
            "dt_proj": "dt_proj.weight",
            "A_log": "A_log",
            "D": "D",
            "out_proj": "out_proj.weight",
        }.items():
            np.testing.assert_array_equal(getattr(layer, field), arrays[f"{prefix}mixer.{name}"])
        assert layer.in_proj_bias is None
        assert layer.norm_bias is None


def test_a_hugging_face_checkpoint(tmp_path):
    arrays = folders.mamba2_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    params = load(str(tmp_path))
    assert (params.config.layer, params.config.ngroups, params.config.tie_embeddings) == ("mamba2", 2, False)
    assert params.text == TextInfo(str(tmp_path), (5,), 1, None)
    np.testing.assert_array_equal(params.lm_head, arrays["lm_head.weight"])
    np.testing.assert_array_equal(params.embedding, arrays["backbone.embeddings.weight"])
    layer = params.layers[1]
    np.testing.assert_array_equal(layer.gated_norm, arrays["backbone.layers.1.mixer.norm.weight"])
    np.testing.assert_array_equal(layer.dt_bias, arrays["backbone.layers.1.mixer.dt_bias"])
    np.testing.assert_array_equal(layer.conv, arrays["backbone.layers.1.mixer.conv1d.weight"][:, 0])


def test_u58_shards_of_both_kinds_and_which_kind_is_preferred(tmp_path):
    def folder(name):
        (tmp_path / name).mkdir()
        folders.write_json(tmp_path / name / "config.json", folders.MAMBA2)
        return tmp_path / name

    arrays = folders.random_arrays(folders.mamba2_shapes())
    others = folders.random_arrays(folders.mamba2_shapes(), seed=1)

    def loads(path, want):
        np.testing.assert_array_equal(load(path).layers[1].out_proj, want["backbone.layers.1.mixer.out_proj.weight"])

    bins, shards = folder("bins"), folder("shards")
    folders.write_shards(bins, arrays, "pytorch_model", "bin")
    loads(bins, arrays)
    folders.write_shards(shards, arrays, "model", "safetensors", 3)
    loads(shards, arrays)
    torch_archives.write(shards / "pytorch_model.bin", others)
    loads(shards, arrays)
    single = folder("single")
    folders.write_safetensors(single / "model.safetensors", arrays)
    folders.write_shards(single, others, "pytorch_model", "bin")
    loads(single, arrays)


@pytest.mark.parametrize("stored", [*DTYPES, "float64"])
@pytest.mark.parametrize("dtype", [*DTYPES, None])
def test_u43_dtypes_and_what_stays_float32(tmp_path, stored, dtype):
    arrays = folders.mamba2_folder(tmp_path, stored)
    params = load(tmp_path, dtype=dtype)
    want = dtype or ("float32" if stored == "float64" else stored)
    kind = ml_dtypes.bfloat16 if want == "bfloat16" else np.dtype(want)
    assert params.dtype == kind
    layer, prefix = params.layers[0], "backbone.layers.0.mixer."
    np.testing.assert_array_equal(as_float64(layer.in_proj), as_float64(arrays[prefix + "in_proj.weight"].astype(kind)))
    for field in ("A_log", "D", "dt_bias"):
        assert getattr(layer, field).dtype == np.float32
        np.testing.assert_array_equal(getattr(layer, field), arrays[prefix + field].astype(np.float32))


def test_mixed_dtypes_take_the_embeddings(tmp_path):
    arrays = folders.mamba2_folder(tmp_path)
    arrays["backbone.embeddings.weight"] = arrays["backbone.embeddings.weight"].astype(ml_dtypes.bfloat16)
    folders.write_safetensors(tmp_path / "model.safetensors", arrays)
    params = load(tmp_path)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(params)} == {"bfloat16", "float32"}
    assert params.layers[0].in_proj.dtype == "bfloat16"


def test_everything_wrong_is_reported_together(tmp_path):
    arrays = folders.mamba2_folder(tmp_path)
    del arrays["backbone.norm_f.weight"]
    arrays["backbone.layers.2.norm.weight"] = np.ones(16, np.float32)
    arrays["backbone.layers.0.mixer.in_proj.weight"] = np.ones((3, 16), np.float32)
    arrays["backbone.layers.1.mixer.D"] = np.ones(4, np.int64)
    arrays["backbone.layers.1.mixer.A_log"] = np.ones(4, np.complex64)
    folders.write_safetensors(tmp_path / "model.safetensors", arrays)
    with pytest.raises(ValueError, match="not those of its config") as error:
        load(tmp_path)
    for part in (
        str(tmp_path),
        "1 missing: backbone.norm_f.weight",
        "1 unexpected: backbone.layers.2.norm.weight",
        "1 wrong shape: backbone.layers.0.mixer.in_proj.weight: got (3, 16), wanted (100, 16)",
        "2 wrong dtype",
        "backbone.layers.1.mixer.D: got int64, wanted one of bfloat16, float16, float32, float64",
        "backbone.layers.1.mixer.A_log: got complex64",
    ):
        assert part in str(error.value)


def test_a_long_list_of_problems_says_how_many_more(tmp_path):
    folders.mamba2_folder(tmp_path)
    folders.write_json(tmp_path / "config.json", folders.MAMBA2 | {"num_hidden_layers": 9})
    with pytest.raises(ValueError, match=r"63 missing: .*; and 53 more"):
        load(tmp_path)


def test_a_layer_count_beyond_reason_is_an_error_at_once(tmp_path):
    folders.mamba2_folder(tmp_path, num_hidden_layers=10**12)
    with pytest.raises(ValueError, match="the config has 1000000000000 layers, the files hold only 21 tensors"):
        load(tmp_path)


def test_u28_a_conv_of_other_channels_than_the_config_says_is_an_error(tmp_path):
    arrays = folders.mamba2_folder(tmp_path)
    for i in range(2):  # d_inner channels, without those of B and C
        arrays[f"backbone.layers.{i}.mixer.conv1d.weight"] = np.ones((32, 1, 4), np.float32)
    folders.write_safetensors(tmp_path / "model.safetensors", arrays)
    with pytest.raises(ValueError, match=r"layers\.1\.mixer\.conv1d\.weight: got \(32, 1, 4\), wanted \(64, 1, 4\)"):
        load(tmp_path)


def test_u28_channels_of_nemotron_h_dims_load(tmp_path):
    config = MambaConfig(
        layer="mamba2", vocab_size=8, d_model=2688, n_layer=1, d_inner=4096, d_state=128, headdim=64, ngroups=8
    )
    shapes = {"conv": (6144, 4), "in_proj": (4096 + 6144 + 64, 2688)}
    layer = jax.eval_shape(lambda: init_params(config, jax.random.key(0))).layers[0]
    assert {name: getattr(layer, name).shape for name in shapes} == shapes


@pytest.mark.parametrize("rows", [29, 32])
def test_a_padded_or_unpadded_vocabulary(tmp_path, rows):
    arrays = folders.tied(folders.random_arrays(folders.mamba1_shapes(vocab=rows)))
    folders.mamba1_folder(tmp_path)
    torch_archives.write(tmp_path / "pytorch_model.bin", arrays)
    params = load(tmp_path)
    assert (params.config.vocab_size, params.config.padded_vocab_size) == (29, rows)
    assert params.embedding.shape == (rows, 16)


def test_a_vocabulary_of_neither_size_is_an_error(tmp_path):
    arrays = folders.tied(folders.random_arrays(folders.mamba1_shapes(vocab=31)))
    folders.mamba1_folder(tmp_path)
    torch_archives.write(tmp_path / "pytorch_model.bin", arrays)
    with pytest.raises(ValueError, match=r"backbone\.embedding\.weight: got \(31, 16\), wanted \(32, 16\)"):
        load(tmp_path)


def test_a_tied_head_may_be_absent_or_a_copy_but_no_other(tmp_path):
    arrays = folders.mamba1_folder(tmp_path)
    copy = arrays | {"lm_head.weight": arrays["lm_head.weight"].copy()}
    absent = {name: array for name, array in arrays.items() if name != "lm_head.weight"}
    for variant in (copy, absent):
        torch_archives.write(tmp_path / "pytorch_model.bin", variant)
        assert load(tmp_path).lm_head is None
    copy["lm_head.weight"][3, 2] += 1
    torch_archives.write(tmp_path / "pytorch_model.bin", copy)
    with pytest.raises(ValueError, match=r"lm_head\.weight differs from backbone\.embedding\.weight"):
        load(tmp_path)
    folders.write_json(tmp_path / "config.json", folders.MAMBA1 | {"tie_embeddings": False})
    np.testing.assert_array_equal(load(tmp_path).lm_head, copy["lm_head.weight"])


@pytest.mark.parametrize("stored", [*DTYPES, "float64"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_are_an_error_unless_allowed(tmp_path, stored, value):
    arrays = folders.mamba2_folder(tmp_path, stored)
    arrays["backbone.layers.1.mixer.out_proj.weight"][-1, -1] = value
    arrays["backbone.layers.0.mixer.A_log"][0] = value
    folders.write_safetensors(tmp_path / "model.safetensors", arrays)
    with pytest.raises(ValueError, match=r"NaN or infinity in layers\.0\.A_log; layers\.1\.out_proj; allow_nonfinite"):
        load(tmp_path)
    got = load(tmp_path, allow_nonfinite=True).layers[1].out_proj[-1, -1]
    np.testing.assert_array_equal(np.float32(got), np.float32(value))


def test_a_weight_that_overflows_the_dtype_is_an_error(tmp_path):
    arrays = folders.mamba2_folder(tmp_path)
    arrays["backbone.layers.1.mixer.out_proj.weight"][0, 0] = 1e5
    folders.write_safetensors(tmp_path / "model.safetensors", arrays)
    with pytest.raises(ValueError, match=r"layers\.1\.out_proj \(overflows float16\)"):
        load(tmp_path, dtype="float16")
    load(tmp_path, dtype="bfloat16")


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32, np.float64])
def test_is_finite_agrees_with_numpy(dtype):
    largest = ml_dtypes.finfo(dtype).max
    for value in (0.0, -0.0, float(largest), -float(largest), float(ml_dtypes.finfo(dtype).smallest_subnormal)):
        assert is_finite(np.array([1, value, 2]).astype(dtype))
    for value in (np.inf, -np.inf, np.nan, -np.nan):
        assert not is_finite(np.array([1, value, 2]).astype(dtype))
    late = np.zeros(3_000_000, dtype)
    late[-1] = np.nan
    assert not is_finite(late)


def test_indexes_that_disagree_with_their_shards(tmp_path):
    folders.write_json(tmp_path / "config.json", folders.MAMBA2)
    arrays = folders.random_arrays(folders.mamba2_shapes())
    folders.write_shards(tmp_path, arrays, "model", "safetensors")
    index = tmp_path / "model.safetensors.index.json"
    whole = json.loads(index.read_text())["weight_map"]
    first, second = sorted(set(whole.values()))

    def refused(weight_map, message):
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(ValueError, match=message) as error:
            load(tmp_path)
        assert str(index) in str(error.value)

    refused(
        whole | {"backbone.norm_f.weight": "model-00009-of-00009.safetensors"}, "names model-00009-of-00009.safetensors"
    )
    refused(whole | {"ghost": first}, f"ghost is not in {first}")
    name = next(name for name, shard in whole.items() if shard == first)
    refused(whole | {name: second}, f"{name} lies in {first}, the index has it in {second}")
    refused(
        {key: value for key, value in whole.items() if key != name}, f"{name} lies in {first}, the index has it in no"
    )
    refused(whole | {name: "../../etc/passwd"}, "wanted the name of a file beside the index")
    refused({}, "'weight_map'")
    refused(whole | {name: 3}, "wanted the name of a file")
    index.write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        load(tmp_path)
    index.write_text(json.dumps({"weight_map": whole}))
    (tmp_path / second).write_bytes((tmp_path / second).read_bytes()[:-4])
    with pytest.raises(ValueError, match=f"{second}: truncated or corrupt"):
        load(tmp_path)


@pytest.mark.parametrize("make", [folders.mamba1_folder, folders.mamba2_folder])
def test_a_file_that_changes_after_its_header_was_read_is_an_error(tmp_path, make):
    make(tmp_path / "model")
    make(tmp_path / "other", seed=1)
    (file,) = (item for item in (tmp_path / "model").iterdir() if item.suffix in (".bin", ".safetensors"))
    name = "backbone.norm_f.weight"
    before = open_weights(file.parent)[name]
    np.testing.assert_array_equal(before.map(), before.map())
    (tmp_path / "other" / file.name).replace(file)  # of the same size
    with pytest.raises(ValueError, match=f"{file}: was replaced or written to while it was being loaded"):
        before.map()
    before = open_weights(file.parent)[name]
    with file.open("r+b") as stream:
        stream.truncate(100)
    with pytest.raises(ValueError, match="was replaced or written to"):
        before.map()


@contextlib.contextmanager
def at_most(seconds):
    """Ends what waits for ever."""

    def end(*_):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="makes FIFOs and reads /dev")
@pytest.mark.parametrize("device", [False, True])
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (folders.mamba2_folder, "config.json"),
        (folders.mamba2_folder, "model.safetensors"),
        (folders.mamba1_folder, "pytorch_model.bin"),
        (folders.mamba2_folder, "generation_config.json"),
        (folders.mamba2_folder, "model.safetensors.index.json"),
        (folders.mamba2_folder, "shard.safetensors"),
    ],
)
def test_what_is_no_regular_file_is_not_waited_for(tmp_path, make, name, device):
    make(tmp_path)
    file = tmp_path / name
    file.unlink(missing_ok=True)
    if device:
        file.symlink_to("/dev/zero")
    else:
        os.mkfifo(file)
    if name in ("model.safetensors.index.json", "shard.safetensors"):
        (tmp_path / "model.safetensors").unlink()
    if name == "shard.safetensors":
        folders.write_json(tmp_path / "model.safetensors.index.json", {"weight_map": {"a": name}})
    with at_most(20), pytest.raises(ValueError, match=f"{file}: is not a regular file"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_folder_or_a_loop_of_links_in_place_of_a_file(tmp_path, name):
    folders.mamba2_folder(tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    with pytest.raises(IsADirectoryError, match=name):
        load(tmp_path)
    (tmp_path / name).rmdir()
    (tmp_path / name).symlink_to(name)
    with pytest.raises(OSError, match=f"symbolic links: .*{name}"):
        load(tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("nowhere")
    with pytest.raises(FileNotFoundError, match=name):
        load(tmp_path)


def test_errors_stay_short_whatever_the_files_say(tmp_path):
    folders.mamba2_folder(tmp_path / "model")
    long, weights = "x" * 1_000_000, tmp_path / "model" / "model.safetensors"
    whole = json.loads((tmp_path / "model" / "config.json").read_text())

    def refused(path=tmp_path / "model"):
        with pytest.raises(ValueError, match=r"\w") as error:
            load(path)
        assert len(str(error.value)) < 5000
        assert "\x1b" not in str(error.value)
        return str(error.value)

    for key in whole:
        for value in (long, [long] * 3, {long: long}, [[0] * 100_000], "\x1b[2J"):
            folders.write_json(tmp_path / "model" / "config.json", whole | {key: value})
            with contextlib.suppress(pytest.fail.Exception):  # what is not read may say anything
                refused()
    folders.write_json(tmp_path / "model" / "config.json", whole)
    arrays = folders.random_arrays(folders.mamba2_shapes())
    folders.write_safetensors(weights, arrays | {f"{i}{long}": np.zeros(1, np.float32) for i in range(12)})
    assert "12 unexpected: " in refused()
    folders.write_safetensors(weights, arrays | {"\x1b[2J": np.zeros(1, np.float32)})
    assert r"unexpected: \x1b[2J" in refused()
    torch_archives.write(tmp_path / "model" / "pytorch_model.bin", arrays | {long: np.zeros(1, np.float32)})
    weights.unlink()
    assert "1 unexpected: " in refused()
    (tmp_path / "model" / "pytorch_model.bin").unlink()
    folders.write_json(tmp_path / "model" / "model.safetensors.index.json", {"weight_map": {"a": long}})
    assert "wanted the name of a file beside the index" in refused()
    folder = tmp_path / "many"
    folder.mkdir()
    for i in range(1000):
        (folder / f"{i:04}-{'y' * 200}").touch()
    assert "no config.json or params.json; found 0000-" in refused(folder)
    folders.write_json(folder / "config.json", whole)
    assert "and 991 more" in refused(folder)


def test_u60_mistral_files_with_params_json(tmp_path):
    raw = {
        "dim": 64,
        "n_layers": 2,
        "vocab_size": 32,
        "n_groups": 2,
        "tie_embeddings": False,
        "pad_vocab_size_multiple": 1,
    }
    folders.write_json(tmp_path / "params.json", raw | {"model_type": "mamba"})
    shapes = folders.mamba2_shapes(m=64, h=2, p=64, g=2, n=128)
    arrays = folders.random_arrays(shapes)
    names = {f"model.{name.replace('embeddings', 'embedding')}": array for name, array in arrays.items()}
    folders.write_safetensors(tmp_path / "consolidated.safetensors", names)
    params = load(tmp_path)
    assert (params.config.layer, params.config.nheads, params.config.ngroups) == ("mamba2", 2, 2)
    np.testing.assert_array_equal(params.lm_head, arrays["lm_head.weight"])


def test_arguments_and_folders_that_are_wrong(tmp_path):
    folders.mamba1_folder(tmp_path)
    with pytest.raises(ValueError, match="dtype: got 'int8'"):
        load(tmp_path, dtype="int8")
    with pytest.raises(ValueError, match="revision: got 'main' for the local folder"):
        load(tmp_path, revision="main")
    with pytest.raises(ValueError, match="is a file, wanted the folder"):
        load(tmp_path / "config.json")
    for name in ("./nowhere", "/no/such/folder", "a/b/c", "../x", tmp_path / "nowhere"):
        with pytest.raises(ValueError, match="no such folder, and no hub id"):
            load(name)
    for name in ("", "a\0b", "x" * 10_000_000):
        with pytest.raises(ValueError, match=r"path_or_hub_id: got .*, wanted a folder") as error:
            load(name)
        assert len(str(error.value)) < 400
    (tmp_path / "pytorch_model.bin").rename(tmp_path / "weights.gguf")
    with pytest.raises(
        ValueError, match=r"no weights; wanted one of model.safetensors.*found config.json, weights.gguf"
    ):
        load(tmp_path)


def test_progress_goes_to_stderr_when_asked(tmp_path, capfd):
    folders.mamba1_folder(tmp_path)
    load(tmp_path)
    load(tmp_path, progress=False)
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")
    load(tmp_path, progress=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert f"Loading {tmp_path.name}" in err
    assert "0:00:00" in err  # time left


def test_progress_is_shown_to_a_terminal(tmp_path, capfd, monkeypatch):
    folders.mamba1_folder(tmp_path)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    load(tmp_path)
    assert "Loading" in capfd.readouterr().err


def test_the_tokenizer_of_a_relative_folder_is_found_from_anywhere(tmp_path, monkeypatch):
    folders.mamba2_folder(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert load("model").text.tokenizer == str(tmp_path / "model")


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_damaged_checkpoints_load_or_raise_value_error(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("fuzz")
    make = data.draw(st.sampled_from([folders.mamba1_folder, folders.mamba2_folder]))
    make(folder)
    victim = data.draw(st.sampled_from(sorted(folder.iterdir())))
    content = bytearray(victim.read_bytes())
    for position in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=4)):
        content[position] ^= 1 << data.draw(st.integers(0, 7))
    victim.write_bytes(content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content)
    with contextlib.suppress(ValueError):
        assert load(folder).config.n_layer == 2


PEAK = """
import sys
from mamba_jax.checkpoints import load

def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) * 1024

load(sys.argv[1])  # starts the backend and takes its memory
before = peak()
params = load(sys.argv[2], dtype=sys.argv[3])
print(peak() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_loading_holds_no_second_copy_of_the_weights(tmp_path):
    def ones(layers):
        sizes = {"d_model": 768, "d_inner": 1536, "d_state": 128, "headdim": 64}
        config = MambaConfig(layer="mamba2", vocab_size=1000, n_layer=layers, **sizes)
        return build_params(config, "float32", lambda _, shape, dtype: jnp.ones(shape, dtype))

    params = ones(13)
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    largest = max(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert total > 190_000_000
    save(ones(1), tmp_path / "small")
    save(params, tmp_path / "safetensors")
    arrays = {name: tensor.map() for name, tensor in open_weights(tmp_path / "safetensors").items()}
    (tmp_path / "bin").mkdir()
    torch_archives.write(tmp_path / "bin" / "pytorch_model.bin", arrays)
    (tmp_path / "bin" / "config.json").write_bytes((tmp_path / "safetensors" / "config.json").read_bytes())
    runs = [("safetensors", "float32", total), ("safetensors", "bfloat16", total // 2), ("bin", "float32", total)]
    for kind, dtype, kept in runs:
        arguments = [str(tmp_path / "small"), str(tmp_path / kind), dtype]
        done = subprocess.run([sys.executable, "-c", PEAK, *arguments], capture_output=True, text=True, check=True)
        assert int(done.stdout) < kept + 3 * largest, (kind, dtype)  # one weight mapped, and an allocator's slack


@pytest.mark.reference
@pytest.mark.parametrize(
    ("name", "layer", "tokens"), [("mamba1-12m", "mamba1", 50277), ("mamba2-12m-hf", "mamba2", 50288)]
)
def test_the_reference_checkpoints_load(reference_dir, name, layer, tokens):
    params = load(reference_dir / name)
    assert (params.config.layer, params.config.vocab_size, params.config.n_layer) == (layer, tokens, 8)
    assert params.dtype == "bfloat16"
    assert load(reference_dir / name, dtype="float32").dtype == "float32"
