"""Tables of timings: what they choose, where they are looked for, what is refused."""

import concurrent.futures
import dataclasses
import json
import math

import pytest

from mamba_jax.scheduler import calibration
from mamba_jax.scheduler.calibration import (
    SHIPPED,
    Calibration,
    Shape,
    Timing,
    check_table,
    device_name,
    find_calibration,
    read_calibrations,
    write_calibration,
)

DIMS = {"layer": "mamba2", "d_model": 768, "n_layer": 24}


def shape(batch=1, dtype="float32", **dims):
    return Shape(tuple((DIMS | dims).items()), dtype, batch)


def measured(of, best=64, device="Test Device", date="2026-01-01"):
    timings = [Timing(256, size, (3.0, 1.0, 1.0) if size == best else (3.0, 2.0, 2.0)) for size in (32, 64, 128)]
    timings += [Timing(256, 256, (), "needs 9 bytes, the device has 8"), Timing(16, 16, (0.5,))]
    return Calibration(device, of, "0.11.2", date, tuple(timings))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MAMBA_JAX_CACHE", str(tmp_path / "own"))
    monkeypatch.setattr(calibration, "SHIPPED", tmp_path / "shipped")
    return tmp_path


def test_the_fastest_median_wins_and_what_was_dropped_cannot():
    timings = (Timing(64, 16, (1.0, 9.0, 2.0)), Timing(64, 32, (3.0, 3.0, 1.0)), Timing(64, 64, (), "no memory"))
    best = dataclasses.replace(measured(shape()), timings=timings).best
    assert {length: timing.chunk_size for length, timing in best.items()} == {64: 16}
    assert best[64].median == 2.0


def test_what_is_written_is_read_again_and_the_same_shape_is_replaced(folder):
    one, two = measured(shape()), measured(shape(batch=8))
    path = write_calibration(one)
    write_calibration(two)
    write_calibration(dataclasses.replace(one, date="2026-02-02"))
    assert {(each.shape, each.date) for each in read_calibrations(path)} == {
        (one.shape, "2026-02-02"),
        (two.shape, "2026-01-01"),
    }
    assert read_calibrations(path)[0].timings == one.timings
    content = json.loads(path.read_text())
    assert (content["version"], content["device"]) == (1, "Test Device")


def test_the_nearest_shape_of_the_same_kind_serves_if_it_is_near(folder):
    write_calibration(measured(shape(d_model=1024)))
    write_calibration(measured(shape(d_model=2560, n_layer=64)))
    write_calibration(measured(shape(layer="mamba1")))

    def found(**changes):
        result = find_calibration("Test Device", shape(**changes))
        return None if result is None else dict(result.shape.dims)["d_model"]

    assert found() == 1024
    assert found(batch=2, dtype="bfloat16") == 1024
    assert found(d_model=2048, n_layer=48) == 2560
    assert found(d_model=24, n_layer=2) is None
    assert find_calibration("Other Device", shape()) is None
    assert find_calibration("Test Device", shape(layer="mamba1")).shape == shape(layer="mamba1")


def test_an_own_table_goes_before_a_shipped_one(folder):
    write_calibration(measured(shape(), best=128), folder / "shipped")
    assert find_calibration("Test Device", shape()).best[256].chunk_size == 128
    write_calibration(measured(shape(), best=32))
    assert find_calibration("Test Device", shape()).best[256].chunk_size == 32


def table(shape=None, **changes):
    """A file of one timing, with changes."""
    shape = shape or {"layer": "mamba2", "d_model": 8, "dtype": "float32", "batch": 1}
    timing = {"length": 16, "chunk_size": 16, "seconds": [0.1]} | changes
    entry = {"shape": shape, "jax": "0.10.2", "date": "2026-01-01", "timings": [timing]}
    return json.dumps({"version": 1, "device": "d", "calibrations": [entry]})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "no table of timings"),
        ('{"version": 2, "device": "d", "calibrations": []}', "got version 2, wanted 1"),
        ('{"version": 1, "device": "d", "calibrations": [{}]}', "shape"),
        ("[]", "no table of timings"),
        ("[" * 100_000, "no table of timings"),
        ("{}", "there is no 'version'"),
        ("\xff", "no table of timings"),
        (table().replace('"version": 1', '"version": true'), "got version True, wanted 1"),
        (table().replace('"2026-01-01"', '"\\u001b[31m"'), "date: got .*31m.*, wanted YYYY-MM-DD"),
        (table().replace('"0.10.2"', "{}"), "jax: got {}, wanted a version"),
        (table(seconds="0.1"), "seconds: got '0.1', wanted a list"),
        (table(seconds=[]), "dropped: got None beside 0 seconds"),
        (table(dropped="no memory"), "dropped: got 'no memory' beside 1 seconds"),
        (table(dropped=3), "dropped: got 3"),
        (table(chunk_size="16"), "chunk_size: got '16', wanted an integer from 1 to 16"),
        (table(chunk_size=0), "chunk_size: got 0, wanted an integer from 1 to 16"),
        (table(chunk_size=17), "chunk_size: got 17, wanted an integer from 1 to 16"),
        (table(length=16.5), "length: got 16.5, wanted an integer from 1 to 16384"),
        (table(length=True), "length: got True, wanted an integer from 1 to 16384"),
        (table(length=2**14 + 1), "length: got 16385, wanted an integer from 1 to 16384"),
        (table(length=10**400), "length: got 1000"),
        (table(seconds=["a"]), "seconds: got 'a', wanted numbers above 0"),
        (table(seconds=[0.1, -0.1]), "seconds: got -0.1, wanted numbers above 0"),
        (table(seconds=[math.nan]), "seconds: got nan, wanted numbers above 0"),
        (table(seconds=[10**400]), "seconds: got 1000"),
        (table(shape={"layer": "mamba2", "d_model": 10**400, "dtype": "float32", "batch": 1}), "d_model: got 1000"),
        (table(shape={"layer": 2, "d_model": 8, "dtype": "float32", "batch": 1}), "layer 2"),
        (table(shape={"layer": "mamba2", "d_model": 8, "dtype": 32, "batch": 1}), "dtype 32"),
        (table(shape={"layer": "mamba2", "d_model": "x", "dtype": "float32", "batch": 1}), "d_model: got 'x'"),
        (table(shape={"d_model": 8, "dtype": "float32", "batch": 1}), "layer"),
        (table(shape={"layer": "mamba2", "d_model": 8, "dtype": "float32", "batch": -4}), "batch: got -4"),
    ],
)
def test_a_file_of_another_kind_is_named(tmp_path, content, message):
    path = tmp_path / "timings-x.json"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(ValueError, match=message) as error:
        read_calibrations(path)
    assert str(path) in str(error.value)


def own_file(folder):
    """The file of the test device in the user's folder."""
    path = calibration.table_path("Test Device")
    path.parent.mkdir(exist_ok=True)
    return path


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "no table of timings"),
        (table(length=10**9).replace('"d"', '"Test Device"'), "length: got 1000000000"),
        (table(), "device: got 'd', wanted 'Test Device'"),
        (table().replace('"d"', '"Test Device"'), "shape: got d_model, layer, wanted d_model, layer, n_layer"),
        (None, "Is a directory"),
    ],
)
def test_a_bad_own_file_is_warned_about_once_and_the_shipped_one_serves(folder, caplog, content, message):
    write_calibration(measured(shape(), best=128), folder / "shipped")
    own_file(folder).mkdir() if content is None else own_file(folder).write_text(content)
    for batch in (1, 2, 1):
        assert find_calibration("Test Device", shape(batch)).best[256].chunk_size == 128
    (record,) = caplog.records
    assert message in record.getMessage()
    assert str(own_file(folder)) in record.getMessage()


def test_without_a_shipped_one_nothing_serves_and_another_bad_file_is_warned_about_again(folder, caplog):
    for content in ("{", "{ "):
        own_file(folder).write_text(content)
        assert find_calibration("Test Device", shape()) is None
    assert len(caplog.records) == 2


@pytest.mark.parametrize("own", ["~nouser/x", "x" * 300])
def test_where_the_user_has_no_folder_what_ships_serves(folder, monkeypatch, own):
    write_calibration(measured(shape(), best=128), folder / "shipped")
    monkeypatch.setenv("MAMBA_JAX_CACHE", own)
    assert find_calibration("Test Device", shape()).best[256].chunk_size == 128


def test_a_calibration_in_which_nothing_fitted_hides_none(folder):
    write_calibration(measured(shape(), best=128), folder / "shipped")
    write_calibration(dataclasses.replace(measured(shape()), timings=(Timing(64, 64, (), "no memory"),)))
    assert find_calibration("Test Device", shape()).best[256].chunk_size == 128


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "no table of timings"),
        (table(), "device: got 'd', wanted 'Test Device'"),
        (table().replace('"d"', '"Test Device"'), "shape: got d_model, layer, wanted"),
    ],
)
def test_nothing_is_added_to_a_file_of_another_kind(folder, content, message):
    own_file(folder).write_text(content)
    for call in (lambda: write_calibration(measured(shape())), lambda: check_table("Test Device", shape())):
        with pytest.raises(ValueError, match=f"{message}.*delete it or name another folder"):
            call()
    assert own_file(folder).read_text() == content


def test_several_writers_lose_nothing(folder):
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda batch: write_calibration(measured(shape(batch))), range(1, 25)))
    assert sorted(each.shape.batch for each in read_calibrations(own_file(folder))) == [*range(1, 25)]
    assert {path.suffix for path in own_file(folder).parent.iterdir()} <= {".json", ".lock"}


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.json")), ids=lambda path: path.stem)
def test_the_tables_that_ship_hold_samples_of_every_program(path):
    for found in read_calibrations(path):
        assert found.jax
        assert found.date >= "2026-01-01"
        assert set(found.best) == {16, 32, 64, 128, 256, 512, 1024, 2048}
        for timing in found.timings:
            assert len(timing.seconds) >= 5 or timing.dropped
        assert {timing.chunk_size for timing in found.timings} >= {16, 32, 64, 128, 256, 512}


def test_there_are_tables_of_a_cpu_and_of_an_h200():
    devices = {found.device for path in SHIPPED.glob("*.json") for found in read_calibrations(path)}
    assert devices >= {"NVIDIA H200", "x86_64 CPU, 2 cores"}


def test_devices_have_names():
    assert device_name("gpu", "NVIDIA H200") == "NVIDIA H200"
    assert device_name("cpu", "cpu").endswith("cores")


def test_kernels_are_timed_by_length_alone_and_older_tables_are_xla_s(folder):
    timings = (Timing(64, 32, (2.0,)), Timing(64, 0, (1.0,), None, "pallas"), Timing(16, 0, (), "no memory", "pallas"))
    path = write_calibration(dataclasses.replace(measured(shape()), timings=timings))
    assert read_calibrations(path)[0].timings == timings
    assert read_calibrations(path)[0].best == {64: timings[1]}
    entries = json.loads(path.read_text())["calibrations"][0]["timings"]
    assert "implementation" not in entries[0]
    assert "chunk_size" not in entries[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"implementation": "triton"}, "implementation: got 'triton', wanted 'xla' or 'pallas'"),
        ({"implementation": "pallas"}, "chunk_size: got 32 beside 'pallas', wanted none"),
    ],
)
def test_an_entry_of_no_implementation_is_named(folder, change, message):
    path = write_calibration(dataclasses.replace(measured(shape()), timings=(Timing(64, 32, (2.0,)),)))
    content = json.loads(path.read_text())
    content["calibrations"][0]["timings"][0] |= change
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        read_calibrations(path)
