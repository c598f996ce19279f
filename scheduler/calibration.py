"""Measured tables: what reading a segment costs on a device, by segment length, implementation and chunk size.

A file holds one device's calibrations, each of one model shape, with every sample. Files are looked for in the user's
cache folder, then among those that ship with the package. One that cannot be used is warned about once and passed over;
deleting the user's own undoes what was measured.
"""

import contextlib
import dataclasses
import functools
import json
import logging
import math
import os
import re
import statistics
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock

from mamba_jax.ops.dispatch import Implementation
from mamba_jax.scheduler.compilation_cache import make_folder, own_folder
from mamba_jax.scheduler.segments import LONGEST_SEGMENT

logger = logging.getLogger(__name__)
VERSION = 1  # of the files
FAR = 6.0  # doublings between two shapes beyond which timings of one say nothing about the other
SHIPPED = Path(__file__).parent / "tables"
LONGEST_SECONDS = 1e5  # that reading a segment may take
LOCK_SECONDS = 60.0  # that another process may take to put a calibration into a file


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

    @property
    def names(self) -> frozenset[str]:
        """What the dims are called."""
        return frozenset(name for name, _ in self.dims)

    def __str__(self) -> str:
        dims = dict(self.dims)
        return f"{dims['layer']} {dims['n_layer']} x {dims['d_model']} {self.dtype} batch {self.batch}"


@dataclasses.dataclass(frozen=True)
class Timing:
    """Reading one segment.

    Attributes:
        length: positions.
        chunk_size: of XLA's scans; 0 for kernels, which cut rows their own way.
        seconds: every sample, or none if `dropped` says why.
        dropped: why it was not measured; None if it was.
        implementation: of the scans.
    """

    length: int
    chunk_size: int
    seconds: tuple[float, ...]
    dropped: str | None = None
    implementation: Implementation = "xla"

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
        timings: every length by every chunk size of XLA's, and by kernels where they were measured.
    """

    device: str
    shape: Shape
    jax: str
    date: str
    timings: tuple[Timing, ...]

    @functools.cached_property
    def best(self) -> Mapping[int, Timing]:
        """The fastest way of each length that was measured."""
        return fastest(self.timings)


def fastest(timings: Iterable[Timing]) -> dict[int, Timing]:
    """The timing of the least median of each length that was measured."""
    found: dict[int, Timing] = {}
    for timing in timings:
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

    A calibration of the user's own goes before one that ships with the package. A file that cannot be used is passed
    over, and a warning says why.
    """
    best: tuple[float, Calibration] | None = None
    for calibration in (each for path in _files(device) for each in _usable(*path, device, shape.names)):
        distance = _distance(calibration.shape, shape)
        if distance <= FAR and calibration.best and (best is None or distance < best[0]):
            best = distance, calibration
    return best[1] if best else None


def read_calibrations(
    path: Path, device: str | None = None, dims: frozenset[str] | None = None
) -> tuple[Calibration, ...]:
    """The calibrations in a file.

    Args:
        path: the file.
        device: that they have to be of; None takes any.
        dims: that shapes have to have; None takes any.

    Raises:
        ValueError: if it is no file of this kind and version, of this device and with these dims; the message names it.
        OSError: if it cannot be read.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if type(content["version"]) is not int or content["version"] != VERSION:
            raise ValueError(f"got version {content['version']!r}, wanted {VERSION}")
        if not isinstance(content["device"], str) or device not in (None, content["device"]):
            raise ValueError(f"device: got {content['device']!r:.80}, wanted {device or 'a name'!r}")
        found = tuple(_from_json(content["device"], entry) for entry in content["calibrations"])
        for each in found:
            if dims not in (None, each.shape.names):
                raise ValueError(f"shape: got {_list(each.shape.names)}, wanted {_list(dims)}")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        problem: object = f"there is no {error}" if isinstance(error, KeyError) else error
        if isinstance(error, TypeError):
            problem = "a list, an object or a number stands where another of these is wanted"
        raise ValueError(f"{path}: no table of timings: {problem}") from error
    return found


def table_path(device: str, folder: Path | None = None) -> Path:
    """The file of a device's calibrations.

    Args:
        device: as `device_name` gives it.
        folder: where the files are; None is the user's cache folder, where `find_calibration` looks.

    Raises:
        OSError: if the user has no folder.
    """
    return (own_folder() if folder is None else folder) / _file_name(device)


def check_table(device: str, shape: Shape, folder: Path | None = None) -> None:
    """See whether a calibration of that device and shape could be written: the folder is made, the file read.

    Raises:
        ValueError: if the file holds something else; the message names it.
        OSError: if the folder cannot be made or written to, or the file cannot be read.
    """
    path = table_path(device, folder)
    with _locked(path):
        _read_own(path, device, shape)


def write_calibration(calibration: Calibration, folder: Path | None = None) -> Path:
    """Put a calibration into its device's file, in place of an older one of the same shape.

    What other processes and threads put there at the same time is kept.

    Args:
        calibration: what was measured.
        folder: where the files are; None is the user's cache folder, where `find_calibration` looks.

    Returns:
        The file.

    Raises:
        ValueError: if there is a file that holds something else; the message names it.
        OSError: if the file cannot be written.
    """
    path = table_path(calibration.device, folder)
    with _locked(path):
        there = _read_own(path, calibration.device, calibration.shape)
        kept = [each for each in there if each.shape != calibration.shape]
        shapes = sorted((_to_json(each) for each in (*kept, calibration)), key=lambda each: json.dumps(each["shape"]))
        content = {"version": VERSION, "device": calibration.device, "calibrations": shapes}
        partial = path.with_suffix(f".{uuid.uuid4().hex}.partial")
        try:
            partial.write_text(_compact(content), encoding="utf-8")
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    return path


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """The only one that writes this file, in a folder that can be written."""
    with FileLock(make_folder(path.parent) / f"{path.name}.lock", timeout=LOCK_SECONDS):
        yield


def _list(names: Iterable[str] | None) -> str:
    return ", ".join(sorted(names or ()))


def _read_own(path: Path, device: str, shape: Shape) -> tuple[Calibration, ...]:
    try:
        return read_calibrations(path, device, shape.names) if path.exists() else ()
    except ValueError as error:
        raise ValueError(f"{error}; nothing is added to it: delete it or name another folder") from error


def _files(device: str) -> Iterator[tuple[Path, tuple[int, ...]]]:
    """Files that may be there, with what tells each from what it was before."""
    with contextlib.suppress(OSError):  # the user has no folder, or none that this process may look into
        yield _stamped(own_folder() / _file_name(device))
    with contextlib.suppress(OSError):
        yield _stamped(SHIPPED / _file_name(device))


def _stamped(path: Path) -> tuple[Path, tuple[int, ...]]:
    stat = path.stat()
    return path, (stat.st_mtime_ns, stat.st_ino, stat.st_size)


def _file_name(device: str) -> str:
    return f"timings-{re.sub(r'[^a-z0-9]+', '-', device.lower()).strip('-')}.json"


@functools.lru_cache(maxsize=64)
def _usable(path: Path, changed: tuple[int, ...], device: str, dims: frozenset[str]) -> tuple[Calibration, ...]:
    del changed  # a file that changed is another one to the cache, and warned about again
    try:
        return read_calibrations(path, device, dims)
    except (ValueError, OSError) as error:
        logger.warning("%s; another table or a rule serves instead", error)
        return ()


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
            {"length": t.length}
            | ({"chunk_size": t.chunk_size} if t.implementation == "xla" else {"implementation": t.implementation})
            | ({"dropped": t.dropped} if t.dropped else {"seconds": [float(f"{s:.4g}") for s in t.seconds]})
            for t in calibration.timings
        ],
    }


def _from_json(device: str, entry: Mapping[str, Any]) -> Calibration:
    dims = dict(entry["shape"])
    batch, dtype = _count(dims, "batch"), dims.pop("dtype")
    del dims["batch"]
    if not isinstance(dims.get("layer"), str) or not isinstance(dtype, str):
        raise ValueError(f"shape: got layer {dims.get('layer')!r:.80} and dtype {dtype!r:.80}, wanted two names")
    for name in dims.keys() - {"layer"}:
        _count(dims, name, least=0)
    for name, pattern, wanted in (("jax", r"[\w.+-]+", "a version"), ("date", r"\d{4}-\d\d-\d\d", "YYYY-MM-DD")):
        if not isinstance(entry[name], str) or not re.fullmatch(pattern, entry[name], re.ASCII):
            raise ValueError(f"{name}: got {entry[name]!r:.80}, wanted {wanted}")
    shape = Shape(tuple(dims.items()), dtype, batch)
    timings = tuple(map(_timing, entry["timings"]))
    return Calibration(device, shape, entry["jax"], entry["date"], timings)


def _timing(entry: Mapping[str, Any]) -> Timing:
    length = _count(entry, "length", most=LONGEST_SEGMENT)
    covering = 1 << (length - 1).bit_length()
    seconds, dropped = _seconds(entry), entry.get("dropped")
    if not isinstance(dropped, str | None) or (dropped is None) != bool(seconds):
        raise ValueError(f"dropped: got {dropped!r:.80} beside {len(seconds)} seconds, wanted a reason or seconds")
    implementation = entry.get("implementation", "xla")  # tables from before there were kernels do not say
    if implementation not in ("xla", "pallas"):
        raise ValueError(f"implementation: got {implementation!r:.80}, wanted 'xla' or 'pallas'")
    if implementation == "pallas":
        if "chunk_size" in entry:
            raise ValueError(f"chunk_size: got {entry['chunk_size']!r:.80} beside 'pallas', wanted none for kernels")
        return Timing(length, 0, seconds, dropped, implementation)
    return Timing(length, _count(entry, "chunk_size", most=covering), seconds, dropped)


def _count(entry: Mapping[str, Any], name: str, least: int = 1, most: int = 2**31 - 1) -> int:
    value = entry[name]
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name}: got {value!r:.80}, wanted an integer from {least} to {most}")
    return value


def _seconds(entry: Mapping[str, Any]) -> tuple[float, ...]:
    samples = entry.get("seconds", ())
    if not isinstance(samples, list | tuple):
        raise ValueError(f"seconds: got {samples!r:.80}, wanted a list of numbers")
    for value in samples:
        if type(value) not in (int, float) or not 0 < value <= LONGEST_SECONDS:
            raise ValueError(f"seconds: got {value!r:.80}, wanted numbers above 0, at most {LONGEST_SECONDS:g}")
    return tuple(samples)


def _compact(content: dict[str, Any]) -> str:
    """JSON with a line for each timing."""
    text = json.dumps(content, indent=1)
    return re.sub(r"\{\s+\"length\"[^}]*\}", lambda match: re.sub(r"\s*\n\s*", " ", match[0]), text) + "\n"
