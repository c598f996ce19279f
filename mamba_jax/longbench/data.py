"""Samples of a task from a JSONL file, whatever its rows call their parts."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

# What a row may call each part, first come first served; all of them are also looked for under "metadata".
CONTEXT_KEYS = ("context", "article", "document", "documents", "passage", "passages", "text", "content")
INPUT_KEYS = ("input", "question", "query", "instruction", "prompt")
ANSWER_KEYS = ("answers", "answer", "label", "labels", "output", "outputs", "target", "targets")
ID_KEYS = ("_id", "id")


@dataclasses.dataclass(frozen=True)
class Sample:
    """One question.

    Attributes:
        index: its place in the file, from 0.
        id: the row's own, or the place.
        context: the long text; several documents are joined by blank lines.
        input: the question; empty where the task is the same for every text.
        answers: the right answers, at least one; the best match counts.
        row: the rest of what the row says.
    """

    index: int
    id: str
    context: str
    input: str
    answers: tuple[str, ...]
    row: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)


def find_tasks(folder: Path) -> dict[str, Path]:
    """The files of samples in a folder, by task: TASK.jsonl, data/TASK.jsonl or TASK/test.jsonl."""
    files = [*folder.glob("*.jsonl"), *folder.glob("data/*.jsonl")]
    return {path.parent.name: path for path in sorted(folder.glob("*/test.jsonl"))} | {
        path.stem: path for path in sorted(files)
    }


def load_samples(path: Path, *, offset: int = 0, max_samples: int | None = None) -> list[Sample]:
    """Read samples.

    Args:
        path: a file with a JSON object a line.
        offset: samples to leave out at the beginning.
        max_samples: most samples to read; None reads them all.

    Raises:
        ValueError: if an argument does not fit, or a row is no object or lacks a part; the message names the line.
    """
    if offset < 0:
        raise ValueError(f"offset: got {offset}, wanted at least 0")
    if max_samples is not None and max_samples < 1:
        raise ValueError(f"max_samples: got {max_samples}, wanted at least 1, or None")
    end = None if max_samples is None else offset + max_samples
    samples = []
    for index, (where, row) in enumerate(_rows(path)):
        if end is not None and index >= end:
            break
        if index >= offset:
            samples.append(_sample(index, row, where))
    if not samples:
        raise ValueError(f"{path}: got no sample from number {offset} on, wanted at least one")
    return samples


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                row = json.loads(line.decode("utf-8"))
                json.dumps(row, ensure_ascii=False, allow_nan=False).encode()  # it is written into the records
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{where}: got no JSON in UTF-8: {error}") from error
            if not isinstance(row, dict):
                raise ValueError(f"{where}: got {row!r:.60}, wanted a JSON object")
            yield where, row


def _sample(index: int, row: dict[str, Any], where: str) -> Sample:
    used: set[str] = set()

    def find(keys: tuple[str, ...]) -> Any:
        metadata = row.get("metadata")
        for part in (row, metadata if isinstance(metadata, dict) else {}):
            for key in keys:
                if part.get(key) is not None:
                    used.add(key)
                    return part[key]
        return None

    context, question, answers = find(CONTEXT_KEYS), find(INPUT_KEYS), find(ANSWER_KEYS)
    name = find(ID_KEYS)
    for part, value, keys in (("context", context, CONTEXT_KEYS), ("answers", answers, ANSWER_KEYS)):
        if value is None:
            raise ValueError(f"{where}: got no {part}, wanted one of {', '.join(keys)}")
    return Sample(
        index=index,
        id=str(index if name is None else name),
        context="\n\n".join(_texts(context, "context", where)),
        input="\n\n".join(_texts("" if question is None else question, "input", where)),
        answers=_texts(answers, "answers", where),
        row={key: value for key, value in row.items() if key not in used},
    )


def _texts(value: Any, part: str, where: str) -> tuple[str, ...]:
    """A part as texts: a text or a list of them; an answer may also be a number."""
    values = value if isinstance(value, list) else [value]
    numbers = (int, float) if part == "answers" else ()
    if not values or not all(isinstance(item, (str, *numbers)) and not isinstance(item, bool) for item in values):
        raise ValueError(f"{where}: {part}: got {value!r:.60}, wanted a text or a list of texts")
    return tuple(str(item) for item in values)
