"""Prompts: a template around each sample, and what is done with one that is too long."""

import dataclasses
import json
import string
from pathlib import Path
from typing import Any

from mamba_jax import text as text_lib
from mamba_jax.longbench.data import Sample
from mamba_jax.text import Tokenizer

PROMPTS_FILE, LENGTHS_FILE = "dataset2prompt.json", "dataset2maxlen.json"  # LongBench's names
_FIELDS = {"context", "input"}


@dataclasses.dataclass(frozen=True)
class Template:
    """How a task is put to a model.

    Attributes:
        text: the prompt, with {context} and {input} where these go.
        max_new_tokens: most tokens of an answer.
    """

    text: str
    max_new_tokens: int

    def render(self, sample: Sample) -> str:
        """The prompt of a sample."""
        return self.text.format(context=sample.context, input=sample.input)


def load_templates(folder: Path) -> dict[str, Template]:
    """Read the templates by task from dataset2prompt.json and dataset2maxlen.json, in the folder or its `config`.

    Raises:
        ValueError: if a file is missing or does not fit; the message names it.
    """
    texts, lengths = _read(folder, PROMPTS_FILE), _read(folder, LENGTHS_FILE)
    templates = {}
    for task, text in texts.items():
        where = f"{PROMPTS_FILE}: {task}"
        if not isinstance(text, str):
            raise ValueError(f"{where}: got {text!r:.60}, wanted a text")
        try:
            fields = {field for _, field, _, _ in string.Formatter().parse(text) if field is not None}
        except ValueError as error:
            raise ValueError(f"{where}: got a template that does not parse: {error}") from error
        if unknown := fields - _FIELDS:
            raise ValueError(f"{where}: got the fields {sorted(unknown)}, wanted {{context}} and {{input}}")
        length = lengths.get(task)
        if not isinstance(length, int) or length < 1:
            raise ValueError(f"{LENGTHS_FILE}: {task}: got {length!r}, wanted a number of at least 1")
        templates[task] = Template(text, length)
    return templates


def _read(folder: Path, name: str) -> dict[str, Any]:
    for path in (folder / name, folder / "config" / name):
        if path.is_file():
            try:
                value = json.loads(path.read_text(encoding="utf-8"))
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}: got no JSON: {error}") from error
            if not isinstance(value, dict):
                raise ValueError(f"{path}: got {type(value).__name__}, wanted an object with a value for each task")
            return value
    raise ValueError(f"data: got {folder}, which has no {name}, wanted LongBench's templates beside the samples")


def cut_middle(tokenizer: Tokenizer, prompt: str, max_length: int | None) -> tuple[list[int], int]:
    """Token ids of a prompt; of one that is too long, without its middle, as LongBench does.

    The question stands at the end of a prompt and the instruction at its beginning, so both stay. The first and the
    last max_length // 2 tokens are decoded, joined and tokenized again, which may give a few tokens more or fewer.

    Args:
        tokenizer: the model's.
        prompt: the whole prompt.
        max_length: most tokens; None for no limit.

    Returns:
        The ids, and how many tokens were cut out.
    """
    ids = text_lib.encode(tokenizer, prompt)
    if max_length is None or len(ids) <= max_length:
        return ids, 0
    half = max_length // 2
    kept = text_lib.decode(tokenizer, ids[:half]) + text_lib.decode(tokenizer, ids[-half:])
    return text_lib.encode(tokenizer, kept), len(ids) - 2 * half
