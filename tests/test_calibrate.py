"""Calibration: what is checked before anything is measured, what is kept of a run that ends early."""

import logging
import sys

import numpy as np
import pytest

import mamba_jax
from mamba_jax import planning
from mamba_jax.programs import model_of
from mamba_jax.scheduler.calibration import read_calibrations, table_path
from tests.tiny import tiny_params

lib = sys.modules["mamba_jax.calibrate"]  # the package has a function of that name
SMALL = {"n_layer": 1, "d_model": 8, "d_inner": 16, "headdim": 8, "d_state": 8, "vocab_size": 61}
QUICK = {"lengths": (16,), "chunk_sizes": (16,), "rounds": 2}


@pytest.fixture(scope="module")
def params():
    return tiny_params("mamba2", **SMALL)


@pytest.fixture
def nothing_is_measured(monkeypatch):
    def measure(*_):
        raise AssertionError("measured before all was checked")

    monkeypatch.setattr(lib, "_calibrate", measure)


@pytest.mark.parametrize("given", [str, lambda path: path])
def test_what_was_measured_is_kept_in_a_file_of_the_device(params, tmp_path, given):
    results = mamba_jax.calibrate(params, batch=[np.int64(1), 2], folder=given(tmp_path / "new"), **QUICK)
    path = table_path(model_of(params).device, tmp_path / "new")
    assert [each.shape for each in read_calibrations(path)] == [each.shape for each in results]
    assert [each.shape.batch for each in results] == [1, 2]


def test_each_batch_is_kept_when_it_is_done(params, tmp_path, monkeypatch):
    measure = lib._calibrate

    def interrupted(weights, batch, *rest):
        if batch == 4:
            raise KeyboardInterrupt
        return measure(weights, batch, *rest)

    monkeypatch.setattr(lib, "_calibrate", interrupted)
    monkeypatch.setenv("MAMBA_JAX_CACHE", str(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        mamba_jax.calibrate(params, batch=(1, 2, 4), **QUICK)
    path = table_path(model_of(params).device)
    assert [each.shape.batch for each in read_calibrations(path)] == [1, 2]
    assert planning.choices(model_of(params), 2).measured  # later requests of this process go by it
    path.unlink()
    planning.forget_choices()
    assert not planning.choices(model_of(params), 2).measured


@pytest.mark.usefixtures("nothing_is_measured")
def test_a_table_of_another_kind_or_a_folder_that_cannot_be_written_are_seen_first(params, tmp_path):
    path = table_path(model_of(params).device, tmp_path)
    path.write_text("{")
    with pytest.raises(ValueError, match=r"no table of timings.*delete it"):
        mamba_jax.calibrate(params, folder=tmp_path)
    assert path.read_text() == "{"
    with pytest.raises(OSError, match=r"timings-.*\.json"):
        mamba_jax.calibrate(params, folder=path)
    path.unlink()
    path.mkdir()
    with pytest.raises(IsADirectoryError):
        mamba_jax.calibrate(params, folder=tmp_path)


@pytest.mark.usefixtures("nothing_is_measured")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch": []}, "batch: got no"),
        ({"batch": "8"}, "batch: got '8'"),
        ({"batch": True}, "batch: got True"),
        ({"batch": 2.0}, "batch: got 2.0"),
        ({"batch": 10**9}, "batch: got"),
        ({"lengths": ()}, r"lengths: got \(\)"),
        ({"lengths": 16}, "lengths: got 16"),
        ({"lengths": (0,)}, "lengths: got"),
        ({"lengths": (16.0,)}, "lengths: got"),
        ({"lengths": (2**14 + 1,)}, "lengths: got .*, wanted one or more integers from 1 to 16384"),
        ({"chunk_sizes": (True,)}, "chunk_sizes: got"),
        ({"chunk_sizes": "16"}, "chunk_sizes: got '16'"),
        ({"rounds": 0}, "rounds: got 0"),
        ({"rounds": "7"}, "rounds: got '7'"),
        ({"rounds": 2.0}, "rounds: got 2.0"),
        ({"rounds": 1001}, "rounds: got 1001, wanted an integer from 1 to 1000"),
        ({"folder": 5}, "folder: got 5, wanted a path"),
        ({"folder": "~nouser/x"}, "folder: got '~nouser/x', wanted a path"),
    ],
)
def test_bad_arguments_are_named(params, tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        mamba_jax.calibrate(params, **{"folder": tmp_path, **arguments})


def test_a_single_round_is_warned_about(params, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="mamba_jax"):
        mamba_jax.calibrate(params, folder=tmp_path, **QUICK)
        assert not caplog.records
        mamba_jax.calibrate(params, folder=tmp_path, **QUICK | {"rounds": 1})
    assert "rounds: a single sample" in caplog.text


def test_generation_needs_no_home_and_no_good_table(params, tmp_path, monkeypatch, caplog):
    before = mamba_jax.generate(params, [1, 2, 3], max_new_tokens=3).tokens
    monkeypatch.setenv("MAMBA_JAX_CACHE", str(tmp_path))
    table_path(model_of(params).device).write_text("{")
    for own in (str(tmp_path), "~nouser/x"):
        monkeypatch.setenv("MAMBA_JAX_CACHE", own)
        planning.forget_choices()
        assert mamba_jax.generate(params, [1, 2, 3], max_new_tokens=3).tokens == before
    planning.forget_choices()
    (record,) = caplog.records
    assert "no table of timings" in record.getMessage()


def test_kernels_are_timed_once_a_length_where_they_take_the_model(params, tmp_path, monkeypatch):
    class Run:
        def __init__(self, _, spec, table):
            self.spec = spec

        def sample(self):
            return 1.0 if self.spec.implementation == "xla" else 0.5

    monkeypatch.setattr(lib, "_Run", Run)
    monkeypatch.setattr(lib, "_compile", lambda *_: {})
    quick = QUICK | {"lengths": (16, 32), "chunk_sizes": (16, 32)}
    (found,) = mamba_jax.calibrate(params, folder=tmp_path, **quick)
    assert {timing.implementation for timing in found.timings} == {"xla"}  # the CPU has none
    monkeypatch.setattr(planning, "kernels_decline", lambda *_: (None, "no steps"))
    planning.forget_choices()
    (found,) = mamba_jax.calibrate(params, folder=tmp_path, **quick)
    kernels = [timing for timing in found.timings if timing.implementation == "pallas"]
    assert [(timing.length, timing.chunk_size, timing.seconds) for timing in kernels] == [
        (16, 0, (0.5, 0.5)),
        (32, 0, (0.5, 0.5)),
    ]
    assert {length: timing.implementation for length, timing in found.best.items()} == {16: "pallas", 32: "pallas"}
    monkeypatch.undo()
    planning.forget_choices()
