"""Files of a run that can be killed at any point: what was asked for, and a line for each sample that is done."""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mamba_jax.params import Params

RUN_FILE, SUMMARY_FILE = "run.json", "summary.json"


def claim(folder: Path, run: Mapping[str, Any]) -> None:
    """Write down what a folder's run was asked for, or check that it was the same before.

    Args:
        folder: made if need be.
        run: "config", which must stay the same; the rest tells about the first start.

    Raises:
        ValueError: if the folder holds a run that was asked for something else; the message says what.
    """
    path = folder / RUN_FILE
    if path.exists():
        before = _leaves(read_run(folder)["config"])
        now = _leaves(json.loads(json.dumps(run["config"])))
        changed = [name for name in sorted(before | now) if before.get(name, ...) != now.get(name, ...)]
        if changed:
            shown = "; ".join(f"{name} was {_short(before, name)}, now {_short(now, name)}" for name in changed[:5])
            raise ValueError(
                f"out: {folder} holds a run of another configuration ({shown}); wanted the same one, or another folder"
            )
        return
    folder.mkdir(parents=True, exist_ok=True)
    write_json(path, run)


def read_run(folder: Path) -> dict[str, Any]:
    """What a folder's run was asked for.

    Raises:
        ValueError: if there is no run in the folder.
    """
    try:
        run = json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError, RecursionError) as error:
        raise ValueError(f"{folder}: got a folder with no readable {RUN_FILE}, wanted one of a run") from error
    if not isinstance(run, dict) or not isinstance(run.get("config"), dict):
        raise ValueError(f"{folder}: {RUN_FILE}: got {run!r:.80}, wanted an object with the config of a run")
    return run


def _leaves(value: Any, name: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {name: value}
    return {k: v for key, part in value.items() for k, v in _leaves(part, f"{name}.{key}".lstrip(".")).items()}


def _short(values: Mapping[str, Any], name: str) -> str:
    return f"{values[name]!r:.40}" if name in values else "absent"


def write_json(path: Path, value: Any) -> None:
    """Write a file whole or not at all."""
    _replace(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_lines(path: Path) -> dict[int, dict[str, Any]]:
    """The records of a file by their index; a half-written last line is taken out of the file.

    Raises:
        ValueError: if another line is no record, or two have one index; the message names it.
    """
    if not path.exists():
        return {}
    data = path.read_bytes()
    whole, _, rest = data.rpartition(b"\n")
    if rest:
        complete = _parse(rest) is not None  # all but its newline was written
        with path.open("r+b") as file:
            file.seek(len(data) if complete else len(data) - len(rest))
            file.write(b"\n" if complete else b"")
            file.truncate()
        whole = data if complete else whole
    records: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(whole.splitlines(), 1):
        record = _parse(line)
        if record is None or record["index"] in records:
            got = "no record" if record is None else f"a second record of sample {record['index']}"
            raise ValueError(f"{path}, line {number}: got {got}; take the line out, and its sample runs again")
        records[record["index"]] = record
    return records


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("index"), int) else None


def append_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Add records to a file; they are on the disk when this returns."""
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(map(_line, records)))
        file.flush()
        os.fsync(file.fileno())


def write_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Write a file of records in the order of their index, whole or not at all."""
    _replace(path, "".join(_line(record) for record in sorted(records, key=lambda record: record["index"])))


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"


def _replace(path: Path, text: str) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with beside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def fingerprint(params: Params) -> str:
    """Tells weights apart, by their shapes and the first numbers of each."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        digest.update(f"{jax.tree_util.keystr(path)} {leaf.shape} {leaf.dtype}".encode())
        digest.update(np.asarray(leaf[:1]).tobytes())
    return digest.hexdigest()[:16]


def digest(data: bytes) -> str:
    """Tells contents apart."""
    return hashlib.sha256(data).hexdigest()[:16]
