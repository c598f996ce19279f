"""Hub ids, against a stand-in for the hub on this machine: what is fetched, cached, resumed and refused.

Each load runs in a process of its own: huggingface_hub reads its environment when it is imported.
"""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from tests.checkpoints import folders, hub_server, torch_archives
from tests.small_tokenizers import byte_level

LOAD = """
import json, sys
from mamba_jax.checkpoints import load
try:
    params = load(sys.argv[1], **json.loads(sys.argv[2]))
except (ValueError, OSError) as error:
    print(json.dumps({"kind": type(error).__name__, "error": str(error)}))
else:
    facts = {"layer": params.config.layer, "norm_f": params.norm_f.tolist(), "tokenizer": params.text.tokenizer}
    print(json.dumps(facts))
"""


@pytest.fixture
def environment(tmp_path):
    """The environment of a process that asks the hub at `url`, with a cache of this test's own."""

    def make(url, offline=False):
        kept = {
            key: value for key, value in os.environ.items() if not key.startswith("HF_") and "proxy" not in key.lower()
        }
        return kept | {"HF_ENDPOINT": url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": str(int(offline))}

    return make


@pytest.fixture
def load_from(environment, tmp_path):
    """Loads in a new process from the hub at `url`."""

    def run(url, name, offline=False, **arguments):
        command = [sys.executable, "-c", LOAD, name, json.dumps(arguments)]
        env = environment(url, offline)
        done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout) | {"stderr": done.stderr}

    return run


@pytest.fixture
def repository(tmp_path):
    """A repository with weights of both kinds, a tokenizer, and much that nobody asked for."""
    folder = tmp_path / "repository"
    arrays = folders.mamba2_folder(folder)
    torch_archives.write(folder / "pytorch_model.bin", arrays)
    byte_level().save_pretrained(folder)
    for name in ("README.md", "model.gguf", "flax_model.msgpack", "consolidated.safetensors", "training.py"):
        (folder / name).write_text("x" * 1000)
    return folder, arrays


def test_a_hub_id_fetches_the_preferred_weights_only_and_once(load_from, repository):
    folder, arrays = repository
    with hub_server.running({"someone/small": folder}) as hub:
        got = load_from(hub.url, "someone/small")
        assert got["layer"] == "mamba2"
        np.testing.assert_array_equal(np.float32(got["norm_f"]), arrays["backbone.norm_f.weight"])
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(hub.downloads())
        unasked = {"pytorch_model.bin", "README.md", "model.gguf", "consolidated.safetensors", "training.py"}
        assert not unasked & set(hub.downloads())
        assert "snapshots" in got["tokenizer"]
        assert got["stderr"] == ""
        hub.log.clear()
        again = load_from(hub.url, "someone/small", revision="v1")
        assert again["norm_f"] == got["norm_f"]
        assert not hub.downloads()  # cached
    for offline in (True, False):  # told so, and found out
        again = load_from(hub.url, "someone/small", offline=offline)
        assert again["norm_f"] == got["norm_f"], again
        assert again["tokenizer"] == got["tokenizer"]


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_shards_named_by_the_index_are_fetched(load_from, tmp_path, suffix):
    folder = tmp_path / "repository"
    folder.mkdir()
    arrays = folders.random_arrays(folders.mamba2_shapes())
    folders.write_json(folder / "config.json", folders.MAMBA2)
    stem = {"safetensors": "model", "bin": "pytorch_model"}[suffix]
    folders.write_shards(folder, arrays, stem, suffix, 3)
    (folder / f"{stem}-other.{suffix}").write_text("x")
    with hub_server.running({"someone/shards": folder}) as hub:
        got = load_from(hub.url, "someone/shards")
        np.testing.assert_array_equal(np.float32(got["norm_f"]), arrays["backbone.norm_f.weight"])
        shards = [f"{stem}-0000{i}-of-00003.{suffix}" for i in (1, 2, 3)]
        assert hub.downloads() == sorted(["config.json", *shards, f"{stem}.{suffix}.index.json"])


def test_a_broken_download_is_resumed(load_from, tmp_path):
    folder = tmp_path / "repository"
    folder.mkdir()
    rows = 100_000  # huggingface_hub keeps whole pieces of 10 MiB
    arrays = folders.random_arrays(folders.mamba2_shapes(vocab=rows))
    folders.write_json(folder / "config.json", folders.MAMBA2 | {"vocab_size": rows})
    folders.write_safetensors(folder / "model.safetensors", arrays)
    with hub_server.running({"someone/large": folder}) as hub:
        hub.cut["model.safetensors"] = 11_000_000
        got = load_from(hub.url, "someone/large")
        np.testing.assert_array_equal(np.float32(got["norm_f"]), arrays["backbone.norm_f.weight"])
        ranges = [asked for method, path, asked in hub.log if method == "GET" and path.endswith("model.safetensors")]
        assert ranges == [None, f"bytes={10 << 20}-"]


def test_names_that_lead_nowhere_say_what_was_tried(load_from, repository, tmp_path):
    folder, _ = repository
    with hub_server.running({"someone/small": folder}) as hub:
        got = load_from(hub.url, "someone/absent")
        assert got["kind"] == "ValueError"
        for part in (
            "'someone/absent': no such folder",
            str(tmp_path / "someone" / "absent"),
            "no hub repository",
            hub.url,
        ):
            assert part in got["error"]
        got = load_from(hub.url, "someone/small", revision="v9")
        assert got["kind"] == "ValueError"
        assert "no hub repository 'someone/small' at revision 'v9'" in got["error"]
    for offline in (True, False):
        got = load_from(hub.url, "someone/small", offline=offline)  # the server is gone, the cache empty
        assert got["kind"] == "OSError"
        hub_said = ["offline mode (HF_HUB_OFFLINE)"] if offline else ["could not be reached", hub.url]
        for part in ("'someone/small': no such folder", *hub_said, str(tmp_path / "home")):
            assert part in got["error"]
        assert ("could not be reached" in got["error"]) != offline


def test_a_repository_without_weights_says_what_it_holds(load_from, tmp_path):
    (tmp_path / "repository").mkdir()
    folders.write_json(tmp_path / "repository" / "config.json", folders.MAMBA2)
    with hub_server.running({"someone/empty": tmp_path / "repository"}) as hub:
        got = load_from(hub.url, "someone/empty")
    assert got["kind"] == "ValueError"
    assert "hub repository 'someone/empty': no weights" in got["error"]
    assert "found config.json" in got["error"]


SAVE = """
import dataclasses, sys
from mamba_jax.checkpoints import load, save
params = load(sys.argv[1])
save(params.replace(text=dataclasses.replace(params.text, tokenizer="someone/tokenizer")), sys.argv[2])
print(load(sys.argv[2]).text.tokenizer)
"""


def test_save_copies_a_tokenizer_that_is_a_hub_id(environment, tmp_path):
    folders.mamba1_folder(tmp_path / "model")
    byte_level().save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "model.safetensors").write_text("x")
    with hub_server.running({"someone/tokenizer": tmp_path / "tokenizer"}) as hub:
        command = [sys.executable, "-c", SAVE, str(tmp_path / "model"), str(tmp_path / "out")]
        done = subprocess.run(command, capture_output=True, text=True, env=environment(hub.url), check=False)
        assert done.stdout.strip() == str(tmp_path / "out"), done.stderr
        assert "model.safetensors" not in hub.downloads()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "tokenizer" / name).read_bytes()
