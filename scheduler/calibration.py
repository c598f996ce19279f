"""Measured tables: what reading a segment costs on a device, by segment length and chunk size.

A file holds one device's calibrations, each of one model shape, with every sample. Files are looked for in the user's
cache folder, then among those that ship with the package.
"""

import dataclasses
import functools
import json
import math
import os
import re
import statistics
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mamba_jax.scheduler.compilation_cache import own_folder

VERSION = 1  # of the files
FAR = 6.0  # doublings between two shapes beyond which timings of one say nothing about the other
SHIPPED = Path(__file__).parent / "tables"


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a timing depends on besides the device: dims of the model, dtype of its weights, rows.

    Attributes:
        dims: of the model, "layer" (its kind) among them.
        dtype: of the weights.
        batch: rows.
    """

    dims: tuple[tuple[str, str | int], ...]
    dtype: str
    batch: int

    def __str__(self) -> str:
        dims = dict(self.dims)
        return f"{dims['layer']} {dims['n_layer']} x {dims['d_model']} {self.dtype} batch {self.batch}"


@dataclasses.dataclass(frozen=True)
class Timing:
    """Reading one segment.

    Attributes:
        length: positions.
        chunk_size: of the scans.
        seconds: every sample, or none if `dropped` says why.
        dropped: why it was not measured; None if it was.
    """

    length: int
    chunk_size: int
    seconds: tuple[float, ...]
    dropped: str | None = None

    @property
    def median(self) -> float:
        """Seconds; infinity if it was not measured."""
        return statistics.median(self.seconds) if self.seconds else math.inf


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Timings of one shape on one device.

    Attributes:
        device: as `device_name` gives it.
        shape: what was timed.
        jax: its version.
        date: of the measurement, ISO.
        timings: every length and chunk size.
    """

    device: str
    shape: Shape
    jax: str
    date: str
    timings: tuple[Timing, ...]

    @functools.cached_property
    def best(self) -> Mapping[int, Timing]:
        """The fastest chunk size of each length that was measured."""
        found: dict[int, Timing] = {}
        for timing in self.timings:
            if timing.seconds and (timing.length not in found or timing.median < found[timing.length].median):
                found[timing.length] = timing
        return found


def device_name(platform: str, device_kind: str) -> str:
    """The device as tables name it; a CPU by its instruction set and the cores that this process may use."""
    if platform != "cpu":
        return device_kind
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{os.uname().machine if hasattr(os, 'uname') else device_kind} CPU, {cores} cores"


def find_calibration(device: str, shape: Shape) -> Calibration | None:
    """The calibration of this shape on this device, or else of a near shape with layers of the same kind.

    A calibration of the user's own goes before one that ships with the package.
    """
    best: tuple[float, Calibration] | None = None
    for path in _files(device):
        for calibration in _read(path, path.stat().st_mtime_ns):
            distance = _distance(calibration.shape, shape)
            if distance <= FAR and (best is None or distance < best[0]):
                best = distance, calibration
    return best[1] if best else None


def read_calibrations(path: Path) -> tuple[Calibration, ...]:
    """The calibrations in a file.

    Raises:
        ValueError: if it is no file of this kind and version; the message names it.
        OSError: if it cannot be read.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["version"] != VERSION:
            raise ValueError(f"got version {content['version']!r}, wanted {VERSION}")
        return tuple(_from_json(content["device"], entry) for entry in content["calibrations"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path}: no table of timings: {error}") from error


def write_calibration(calibration: Calibration, folder: Path | None = None) -> Path:
    """Put a calibration into its device's file, in place of an older one of the same shape.

    Args:
        calibration: what was measured.
        folder: where the files are; None is the user's cache folder, where `find_calibration` looks.

    Returns:
        The file.
    """
    path = (folder or own_folder()) / _file_name(calibration.device)
    others = read_calibrations(path) if path.is_file() else ()
    kept = [other for other in others if other.shape != calibration.shape]
    entries = sorted((_to_json(each) for each in (*kept, calibration)), key=lambda entry: json.dumps(entry["shape"]))
    content = {"version": VERSION, "device": calibration.device, "calibrations": entries}
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = path.with_suffix(f".{uuid.uuid4().hex}.partial")  # another process may be writing too
    partial.write_text(_compact(content), encoding="utf-8")
    partial.replace(path)
    return path


def _files(device: str) -> Iterator[Path]:
    yield from (path for folder in (own_folder(), SHIPPED) if (path := folder / _file_name(device)).is_file())


def _file_name(device: str) -> str:
    return f"timings-{re.sub(r'[^a-z0-9]+', '-', device.lower()).strip('-')}.json"


@functools.lru_cache(maxsize=64)
def _read(path: Path, changed: int) -> tuple[Calibration, ...]:
    del changed  # a file that changed is another one to the cache
    return read_calibrations(path)


def _distance(a: Shape, b: Shape) -> float:
    """0 for the same shape, infinity for layers of another kind, else how many doublings lie between the two."""
    if a == b:
        return 0.0
    a_dims, b_dims = dict(a.dims), dict(b.dims)
    if a_dims.pop("layer") != b_dims.pop("layer") or a_dims.keys() != b_dims.keys():
        return math.inf
    sizes = [(a.batch, b.batch), *((int(a_dims[name]), int(b_dims[name])) for name in a_dims)]
    doublings = sum(abs(math.log2(max(one, 1) / max(other, 1))) for one, other in sizes)
    return doublings + (a.dtype != b.dtype) + 1e-6


def _to_json(calibration: Calibration) -> dict[str, Any]:
    shape = calibration.shape
    return {
        "shape": {**dict(shape.dims), "dtype": shape.dtype, "batch": shape.batch},
        "jax": calibration.jax,
        "date": calibration.date,
        "timings": [
            {"length": t.length, "chunk_size": t.chunk_size}
            | ({"dropped": t.dropped} if t.dropped else {"seconds": [float(f"{s:.4g}") for s in t.seconds]})
            for t in calibration.timings
        ],
    }


def _from_json(device: str, entry: Mapping[str, Any]) -> Calibration:
    dims = dict(entry["shape"])
    batch, dtype = _count(dims, "batch"), dims.pop("dtype")
    del dims["batch"]
    if "layer" not in dims:
        raise ValueError("shape: got no layer")
    for name in dims.keys() - {"layer"}:
        _count(dims, name, least=0)
    shape = Shape(tuple(dims.items()), dtype, batch)
    timings = tuple(
        Timing(_count(t, "length"), _count(t, "chunk_size"), _seconds(t), t.get("dropped")) for t in entry["timings"]
    )
    return Calibration(device, shape, entry["jax"], entry["date"], timings)


def _count(entry: Mapping[str, Any], name: str, least: int = 1) -> int:
    value = entry[name]
    if type(value) is not int or value < least:
        raise ValueError(f"{name}: got {value!r}, wanted an integer of at least {least}")
    return value


def _seconds(entry: Mapping[str, Any]) -> tuple[float, ...]:
    samples = entry.get("seconds", ())
    for value in samples:
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise ValueError(f"seconds: got {value!r}, wanted numbers above 0")
    return tuple(samples)


def _compact(content: dict[str, Any]) -> str:
    """JSON with a line for each timing."""
    text = json.dumps(content, indent=1)
    return re.sub(r"\{\s+\"length\"[^}]*\}", lambda match: re.sub(r"\s*\n\s*", " ", match[0]), text) + "\n"
