"""`save`: what comes back, what a layout cannot hold, and that a save that fails leaves nothing that loads."""

import dataclasses
import json
import math

import jax
import numpy as np
import pytest

from mamba_jax import TextInfo, param_shapes
from mamba_jax.checkpoints import load, save, saving
from tests.checkpoints.folders import random_params
from tests.small_tokenizers import byte_level
from tests.tiny import tiny_config

LAYOUTS = ("hf", "original")
DTYPES = ("bfloat16", "float16", "float32")
TEXT = TextInfo(None, (3, 7), 1, 0)
CHANGES = {
    "hf": {
        "mamba1": {},
        "falcon": {"bcdt_norm_eps": 1e-5, "norm_eps": 1e-6},
        "mamba2": {"conv_bias": False, "dt_limit": (0.01, math.inf), "residual_in_fp32": False, "chunk_size": 64},
        "mamba2-groups": {"block_norm": "rms", "dt_limit": (0.0, 0.5)},
    },
    "original": {
        "mamba1": {"d_inner": 36, "block_norm": "layer", "tie_embeddings": False},
        "mamba2": {"norm_before_gate": True, "D_has_hdim": True, "dt_limit": (0.0, 0.5)},
        "mamba2-groups": {"gated_norm": False, "conv_bias": False, "chunk_size": 64},
    },
}
MODELS = [(layout, kind) for layout in LAYOUTS for kind in CHANGES[layout]]


def assert_same(got, want):
    assert got.config == want.config
    assert dataclasses.replace(got.text, tokenizer=None) == dataclasses.replace(want.text, tokenizer=None)
    assert jax.tree.structure(got.replace(text=want.text)) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def strict_json(path):
    def refuse(token):
        raise AssertionError(f"{path} holds {token}")

    return json.loads(path.read_text(), parse_constant=refuse)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("layout", "kind"), MODELS)
def test_what_is_saved_comes_back_bit_for_bit(tmp_path, layout, kind, dtype):
    params = random_params(kind, dtype, text=TEXT, **CHANGES[layout][kind])
    save(params, tmp_path / "out", layout)
    assert_same(load(tmp_path / "out"), params)
    files = {"config.json", "generation_config.json", "model.safetensors"}
    assert {item.name for item in (tmp_path / "out").iterdir()} == files
    for name in ("config.json", "generation_config.json"):
        strict_json(tmp_path / "out" / name)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shards_and_their_index(tmp_path, layout):
    params = random_params("mamba2", tie_embeddings=False)
    save(params, tmp_path, layout, max_shard_size=20_000)
    assert_same(load(tmp_path), params)
    index = strict_json(tmp_path / "model.safetensors.index.json")
    shards = sorted(set(index["weight_map"].values()))
    assert len(shards) > 2
    assert shards[0] == f"model-00001-of-{len(shards):05}.safetensors"
    assert index["metadata"]["total_size"] == sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    for shard in shards:
        assert (tmp_path / shard).stat().st_size < 20_000 + 4_000  # and the header


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_text_information_comes_back_as_none(tmp_path, layout):
    save(random_params("mamba2"), tmp_path, layout)
    assert load(tmp_path).text == TextInfo()


def test_the_tokenizer_is_copied_along(tmp_path):
    byte_level().save_pretrained(tmp_path / "tokenizer")
    params = random_params("mamba1", text=TextInfo(str(tmp_path / "tokenizer"), (3,)))
    save(params, tmp_path / "out")
    loaded = load(tmp_path / "out")
    assert loaded.text == TextInfo(str(tmp_path / "out"), (3,))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "tokenizer" / name).read_bytes()
    save(loaded, tmp_path / "again", "original")
    assert load(tmp_path / "again").text.tokenizer == str(tmp_path / "again")


@pytest.mark.parametrize(
    ("layout", "kind", "changes", "message"),
    [
        ("hf", "mamba2", {"norm_before_gate": True}, "norm_before_gate=True"),
        ("hf", "mamba2", {"D_has_hdim": True, "gated_norm": False}, "gated_norm=False, D_has_hdim=True"),
        ("hf", "mamba2-groups", {}, "block_norm='layer'"),
        ("hf", "mamba1", {"block_norm": "layer"}, "block_norm='layer'"),
        ("hf", "mamba2", {"d_inner": 36}, "d_inner=36, no multiple of d_model=24"),
        ("original", "falcon", {}, "bcdt_norm_eps=1e-06"),
        ("original", "mamba2", {"norm_eps": 1e-6}, "norm_eps=1e-06"),
        ("original", "mamba2", {"d_inner": 36}, "d_inner=36, no multiple of d_model=24"),
        ("original", "mamba2", {"dt_limit": (0.1, math.inf)}, r"dt_limit=\(0.1, inf\) in strict JSON"),
    ],
)
def test_what_a_layout_cannot_express_is_refused_by_name(tmp_path, layout, kind, changes, message):
    with pytest.raises(ValueError, match=f"layout '{layout}' cannot express {message}"):
        save(param_shapes(tiny_config(kind, **changes)), tmp_path / "out", layout)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "name",
    ["config.json", "model.safetensors", "pytorch_model.bin", "model-00001-of-00002.safetensors", "tokenizer.json"],
)
def test_a_folder_that_holds_a_checkpoint_is_not_overwritten(tmp_path, name):
    (tmp_path / name).write_text("mine")
    with pytest.raises(ValueError, match=f"holds {name}, which are not overwritten"):
        save(random_params("mamba1"), tmp_path)
    assert [(item.name, item.read_text()) for item in tmp_path.iterdir()] == [(name, "mine")]


def test_a_folder_with_other_files_is_used(tmp_path):
    (tmp_path / "README.md").write_text("mine")
    save(random_params("mamba1"), tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"
    load(tmp_path)


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize("fails", ["write_safetensors", "_write_json"])
def test_a_save_that_fails_leaves_nothing(tmp_path, monkeypatch, existing, fails):
    def full_disk(file, *arguments):
        file.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    target = tmp_path / "out"
    if existing:
        target.mkdir()
    monkeypatch.setattr(saving, fails, full_disk)
    with pytest.raises(OSError, match="No space left"):
        save(random_params("mamba1", text=TEXT), target)
    assert list(tmp_path.iterdir()) == ([target] if existing else [])
    assert not existing or not list(target.iterdir())


def test_a_save_that_fails_at_the_last_step_leaves_nothing_that_loads(tmp_path, monkeypatch):
    write = saving._write_json

    def fail_on_config(file, value):
        if file.name == "config.json":
            raise OSError(28, "No space left on device")
        write(file, value)

    monkeypatch.setattr(saving, "_write_json", fail_on_config)
    with pytest.raises(OSError, match="No space left"):
        save(random_params("mamba1", text=TEXT), tmp_path)
    with pytest.raises(ValueError, match=r"no config\.json"):
        load(tmp_path)


def test_arguments_that_are_wrong(tmp_path):
    params = random_params("mamba2")
    with pytest.raises(ValueError, match="layout: got 'gguf', wanted one of hf, original"):
        save(params, tmp_path, "gguf")
    with pytest.raises(ValueError, match="max_shard_size: got 0"):
        save(params, tmp_path, max_shard_size=0)
    with pytest.raises(ValueError, match="max_shard_size: got '1GB', wanted an integer"):
        save(params, tmp_path, max_shard_size="1GB")
    with pytest.raises(ValueError, match="directory: got None"):
        save(params, None)
    for path in (5, None, b"folder", [1]):
        with pytest.raises(ValueError, match="path_or_hub_id: got"):
            load(path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file, wanted a folder"):
        save(params, tmp_path / "file")
    with pytest.raises(ValueError, match=r"layers\.0\.norm: got float32\[24\], wanted bfloat16\[24\]"):
        save(params.replace(embedding=params.embedding.astype("bfloat16")), tmp_path / "out")
    with pytest.raises(ValueError, match=r"lm_head: got nothing, wanted float32\[104, 24\]"):
        save(dataclasses.replace(params, lm_head=None), tmp_path / "out")


def test_a_padded_vocabulary_keeps_both_of_its_sizes(tmp_path):
    params = random_params("mamba1")
    save(params, tmp_path)
    raw = strict_json(tmp_path / "config.json")
    assert (raw["vocab_size"], raw["unpadded_vocab_size"], raw["pad_vocab_size_multiple"]) == (104, 101, 8)
    assert load(tmp_path).config.vocab_size == 101


@pytest.mark.parametrize("path", ["", "a\0b", "x" * 5000, b"folder", 3])
def test_what_names_no_folder_is_refused_before_anything_is_written(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"directory: got .*, wanted the path of a folder") as error:
        save(random_params("mamba1"), path)
    assert len(str(error.value)) < 400
    assert not list(tmp_path.iterdir())
