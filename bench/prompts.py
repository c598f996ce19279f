"""Prompts for benchmarks: texts of eight serving regimes and rows of four LongBench tasks.

They lie in the folder `data` beside that of the reference checkpoints, which $MAMBA_JAX_REFERENCE names:
`regimes/REGIME/*.txt`, `longbench/TASK.jsonl` with LongBench's templates, and the `tokenizer` of GPT-NeoX.
"""

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from mamba_jax.text import decode, encode, load_tokenizer

TASKS = ("narrativeqa", "qasper", "multifieldqa_en", "gov_report")


class Codec(Protocol):
    """Text to ids and back."""

    def encode(self, text: str) -> list[int]:
        """Give the ids of a text."""

    def decode(self, ids: list[int]) -> str:
        """Give the text of ids."""


class Tokens:
    """The tokenizer of a folder."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = load_tokenizer(str(folder))

    def encode(self, text: str) -> list[int]:
        return encode(self._tokenizer, text)

    def decode(self, ids: list[int]) -> str:
        return decode(self._tokenizer, ids)


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A prompt as token ids; `kind` is its regime or LongBench task."""

    name: str
    kind: str
    ids: tuple[int, ...]


def reference_folder(given: Path | None) -> Path:
    """The folder of the reference checkpoints: `given`, else that of the environment.

    Raises:
        ValueError: if neither is there.
    """
    folder = given or Path(os.environ.get("MAMBA_JAX_REFERENCE", ""))
    if not (folder / "kernel_goldens.safetensors").is_file():
        raise ValueError("reference: name the folder of the reference checkpoints (--reference, MAMBA_JAX_REFERENCE)")
    return folder


def regime_prompts(data: Path, codec: Codec, cap: int) -> list[Prompt]:
    """Every text of every regime, at most `cap` tokens of each."""
    files = sorted((data / "regimes").glob("*/*.txt"))
    texts = [(file.stem, file.parent.name, file.read_text(encoding="utf-8")) for file in files]
    return [Prompt(name, kind, cut(codec.encode(text), cap, codec)) for name, kind, text in texts]


def longbench_prompts(data: Path, codec: Codec, cap: int, rows: int | None = None) -> list[Prompt]:
    """The first `rows` rows of each task (None: all) in LongBench's templates, at most `cap` tokens of each."""
    templates = json.loads((data / "longbench" / "dataset2prompt.json").read_text(encoding="utf-8"))
    found = []
    for task in TASKS:
        lines = (data / "longbench" / f"{task}.jsonl").read_text(encoding="utf-8").splitlines()
        for i, line in enumerate(lines[:rows]):
            text = templates[task].format(**json.loads(line))
            found.append(Prompt(f"{task}_{i}", task, cut(codec.encode(text), cap, codec)))
    return found


def cut(ids: Sequence[int], cap: int, codec: Codec) -> tuple[int, ...]:
    """At most `cap` ids, those in the middle left out as LongBench does.

    Its two halves become text and are tokenised again; what is then still too many goes from the middle too.
    """
    if len(ids) <= cap:
        return tuple(ids)
    left, right = halves(ids, cap)
    again = codec.encode(codec.decode(left) + codec.decode(right))
    if len(again) <= cap:
        return tuple(again)
    left, right = halves(again, cap)
    return (*left, *right)


def halves(ids: Sequence[int], cap: int) -> tuple[list[int], list[int]]:
    """The first half of `cap` ids and the last."""
    return list(ids[: cap // 2]), list(ids[len(ids) - (cap - cap // 2) :])
