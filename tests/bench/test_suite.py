"""The benchmark suite, each benchmark as small as a test may be: what it writes, and what must hold on any machine."""

import dataclasses
import importlib
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from bench import engine
from bench.all import SUITE
from bench.common import Section, Setting, perform, significant, turns
from bench.models import PUBLISHED, load_model, published
from bench.report import write_report
from mamba_jax import cli
from tests.tiny import tiny_params

pytest.importorskip("matplotlib", reason="extra `bench`")
ROOT = Path(__file__).parents[2]
TINY = {
    "decode": {"lengths": (16, 64)},
    "memory": {"lengths": (64, 256)},
    "utilisation": {"lengths": (32, 64)},
    "compilation": {"lengths": (128,)},
    "masking": {"lengths": (128,)},
    "decay": {"lengths": (128,)},
    "batches": {"lengths": (256,)},
    "training": {"lengths": (64,)},
    "chunks": {"lengths": (128,)},
    "kernels": {"lengths": (128,), "models": ("64",)},
    "parallel": {"lengths": (8, 4)},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("results")


@pytest.fixture(scope="module")
def rows(folder):
    """Rows of a benchmark's tables, which runs once."""
    found = {}

    def get(name):
        if name not in found:
            bench = importlib.import_module(f"bench.{name}").BENCH
            report = perform(bench, dataclasses.replace(bench.small, rounds=1, **TINY[name]), folder)
            found[name] = [section["rows"] for section in report["sections"]]
        return found[name]

    return get


@pytest.mark.parametrize("name", SUITE)
def test_a_benchmark_writes_its_figures_and_a_picture(rows, folder, name):
    tables = rows(name)
    report = json.loads((folder / f"{name}.json").read_text())
    assert {"device", "date", "versions", "command", "python", "setting", "seconds", "sections"} < set(report)
    assert [section["rows"] for section in report["sections"]] == tables
    for section in report["sections"]:
        assert section["settings"], "what made the paper's figures, and whether they compare"
        assert all(list(row) == list(section["rows"][0]) for row in section["rows"])
    if name != "batches":  # a figure of the paper that is not in its text as numbers
        assert any(column.startswith("paper") for table in tables for column in table[0])
    assert (folder / f"{name}.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_all_strategies_decode_at_every_length(rows):
    (table,) = rows("decode")
    assert {(row["method"], row["tokens"]) for row in table} == {
        (method, tokens) for method in ("device", "host", "recompute") for tokens in (16, 64)
    }
    assert all(row["tok/s"] > 0 for row in table)


def test_a_cached_generation_needs_the_same_memory_at_every_length(rows):
    (table,) = rows("memory")
    cached = {row["programs MB"] for row in table if row["method"] == "cached"}
    whole = [row["programs MB"] for row in table if row["method"] == "whole text"]
    assert len(cached) == 1
    assert whole == sorted(set(whole))  # grows


def test_a_mask_by_rows_changes_no_logit(rows):
    (table,) = rows("masking")
    assert all(row["largest difference of logits"] < 1e-5 for row in table)


def test_decays_in_16_bits_are_seen_and_undone(rows):
    (table,) = rows("decay")
    for row in table:
        assert (row["largest error of a logit"] > 0) == (row["decays"] == "bfloat16")
    from bench.decay import logits_of

    params = load_model("mamba2-small", "float32")
    assert (logits_of(params, 64) == logits_of(params, 64)).all()


def test_perplexity_is_the_same_at_every_batch_size(rows):
    (table,) = rows("batches")
    assert len(table) > 3
    assert max(row["from batch 1"] for row in table) < 1e-6


def test_slices_hand_their_state_on(rows):
    (table,) = rows("kernels")
    assert {row["launches"] for row in table} == {1, 2, 128}
    assert all(row["final state off by"] < 1e-5 for row in table)


def test_a_warm_cache_is_used(rows):
    (table,) = rows("compilation")
    assert all(row["warm s"] < row["cold s"] for row in table)


def test_two_devices_give_the_tokens_of_one(tmp_path):
    command = [sys.executable, "-m", "bench.parallel", "--small", "--rounds", "1", "--out", str(tmp_path)]
    command += ["--length", "8", "--length", "4"]
    subprocess.run(command, check=True, cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True)
    (section,) = json.loads((tmp_path / "parallel.json").read_text())["sections"]
    assert [(row["devices"], row["same tokens"]) for row in section["rows"]] == [(1, "yes"), (2, "yes")]


def test_the_page_holds_every_result(rows, folder):
    for name in ("masking", "kernels"):
        rows(name)
    (folder / "other.json").write_text('{"of": "another kind"}')
    page = write_report(folder).read_text()
    for name in ("masking", "kernels"):
        assert f'<h2 id="{name}">' in page
    assert page.count("data:image/png;base64,") == page.count("<h2 ") >= 2
    with pytest.raises(ValueError, match="folder: got"):
        write_report(folder / "none")


@pytest.mark.parametrize("new", [("2", "4"), ("96", "32"), ("0", "64"), ("32", "32")])
def test_generations_too_close_to_time_their_difference_are_refused(new):
    app = typer.Typer()
    app.command()(engine.main)
    result = CliRunner().invoke(app, ["--new", *new])
    assert result.exit_code == 2
    assert f"got {new[0]} {new[1]}, wanted a short and a long" in " ".join(result.output.replace("│", "").split())


def test_a_longer_generation_that_took_no_longer_is_an_error():
    ours = types.SimpleNamespace(params=tiny_params("mamba2"), batch=1)
    timing = engine.Timing("mamba_jax", "decode", [(-1e-6, 9.0, 9.0)])
    with pytest.raises(ValueError, match="mamba_jax, decode: more tokens took no longer: set --new further apart"):
        engine.summarise([timing], ours, 1.0)


def test_the_command_runs_a_benchmark_with_its_options(tmp_path):
    result = CliRunner().invoke(cli.app, ["bench", "nothing"])
    assert result.exit_code == 2
    assert "utilisation" in result.output
    options = ["--small", "--length", "32", "--rounds", "1", "--out", str(tmp_path)]
    command = [sys.executable, "-m", "mamba_jax.cli", "bench", "masking", *options]
    environ = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    subprocess.run(command, check=True, cwd=tmp_path, env=environ, capture_output=True)
    report = json.loads((tmp_path / "masking.json").read_text())
    assert report["setting"]["lengths"] == [32]
    assert report["command"] == f"python -m bench.masking {' '.join(options)}"


def test_calls_take_turns_and_the_median_counts():
    visited = []

    def call(name):
        visited.append(name)
        return float(len(visited))

    found = turns({name: lambda name=name: call(name) for name in "ab"}, 3)
    assert "".join(visited) == "ab" + "ab" + "ba" + "ab"
    assert found == {"a": 6.0, "b": 5.0}


def test_figures_are_rounded_to_what_they_mean():
    assert [significant(value) for value in (0.0, 123456.7, 12.3456, 0.000123456)] == [0.0, 123457, 12.35, 0.0001235]


def test_models_are_named():
    assert published("mamba2-2.7b") == "mamba2-2.7b"
    assert published("mamba2-small") in PUBLISHED
    with pytest.raises(ValueError, match="model: got 'nothing'"):
        load_model("nothing", "float32")


def test_settings_take_the_platforms_dtype():
    assert Setting((), (), 1).weights == "float32"
    assert Setting((), (), 1, dtype="bfloat16").weights == "bfloat16"
    assert Section("t", [], "s").finding == ""
