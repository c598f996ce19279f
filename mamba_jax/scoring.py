"""What a model makes of given texts: log-probabilities of their tokens, and hidden states."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

import numpy as np

from mamba_jax.generate import Prompt, as_rows
from mamba_jax.ops.dispatch import Implementation
from mamba_jax.params import Params
from mamba_jax.planning import make_plan
from mamba_jax.programs import Spec, compile_programs, model_of, program, program_weights, reading_specs, segments
from mamba_jax.progress import track
from mamba_jax.scheduler.policies import Policy
from mamba_jax.text import Tokenizer

BATCH = 8  # texts read together; longer ones first, so that neighbours are of like lengths


@dataclasses.dataclass(frozen=True)
class Score:
    """Log-probabilities of one text.

    Attributes:
        tokens: its ids.
        logprobs: natural logarithm of the probability of each id given those before it, over all rows of the
            embedding; None for the first, which nothing predicts.
    """

    tokens: list[int]
    logprobs: list[float | None]

    @property
    def total(self) -> float:
        """Log-probability of the whole text but its first token."""
        return float(np.sum(np.array(self.logprobs[1:], np.float64)))


@overload
def score(params: Params, texts: Prompt, *, tokenizer: Tokenizer | str | None = None) -> Score: ...  # type: ignore[overload-overlap]


@overload
def score(params: Params, texts: Sequence[Prompt], *, tokenizer: Tokenizer | str | None = None) -> list[Score]: ...


def score(
    params: Params, texts: Prompt | Sequence[Prompt], *, tokenizer: Tokenizer | str | None = None
) -> Score | list[Score]:
    """Log-probability of every token of every text; texts of any length, in flat memory.

    Args:
        params: the model.
        texts: a string, token ids, or a list of either with unequal lengths.
        tokenizer: one to use instead of the checkpoint's, or the folder of one.

    Returns:
        A `Score` for a single text, a list of them for a list.

    Raises:
        ValueError: if an argument does not fit; the message names it.
    """
    rows, single, _ = as_rows(params, texts, tokenizer, "texts")
    found = token_logprobs(program_weights(params), rows)
    scores = [Score(row, [None, *logprobs.tolist()]) for row, (logprobs, _) in zip(rows, found, strict=True)]
    return scores[0] if single else scores


def token_logprobs(
    weights: Params,
    rows: list[list[int]],
    *,
    batch: int = BATCH,
    policy: Policy | None = None,
    implementation: Implementation | None = None,
    bar: bool | None = None,
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Log-probability of every token of every row but its first, and whether it is the likeliest.

    Args:
        weights: the model as programs take it.
        rows: token ids, each row at least one.
        batch: rows read together.
        policy: decides chunk sizes beforehand; one that looks at a statistic leaves them as None does, the fastest
            measured ones.
        implementation: of the scans, as in `generate`.
        bar: whether to show one; None does so on a terminal where there is more than one segment to read.

    Returns:
        For each row a float32 and a bool array, both one shorter than the row.

    Raises:
        FloatingPointError: if one is not finite.
    """

    def segment(
        run: Any, group: list[list[int]], cache: Any, offset: int, tokens: np.ndarray, lengths: np.ndarray
    ) -> Any:
        targets = np.zeros_like(tokens)
        for i, row in enumerate(group):
            part = row[offset + 1 : offset + 1 + tokens.shape[1]]
            targets[i, : len(part)] = part
        return run(weights, tokens, targets, lengths, cache)

    found = _read(weights, rows, "score", segment, batch=batch, policy=policy, implementation=implementation, bar=bar)
    return [(logprobs[:-1], likeliest[:-1]) for logprobs, likeliest in found]


@overload
def embed(params: Params, texts: Prompt, *, tokenizer: Tokenizer | str | None = None) -> np.ndarray: ...  # type: ignore[overload-overlap]


@overload
def embed(params: Params, texts: Sequence[Prompt], *, tokenizer: Tokenizer | str | None = None) -> list[np.ndarray]: ...


def embed(
    params: Params, texts: Prompt | Sequence[Prompt], *, tokenizer: Tokenizer | str | None = None
) -> np.ndarray | list[np.ndarray]:
    """Final hidden states (after norm_f) of every position of every text.

    Args:
        params: the model.
        texts: a string, token ids, or a list of either with unequal lengths.
        tokenizer: one to use instead of the checkpoint's, or the folder of one.

    Returns:
        A float32 array (positions, d_model) for a single text, a list of them for a list.

    Raises:
        ValueError: if an argument does not fit; the message names it.
    """
    rows, single, _ = as_rows(params, texts, tokenizer, "texts")
    weights = program_weights(params)

    def segment(
        run: Any, group: list[list[int]], cache: Any, offset: int, tokens: np.ndarray, lengths: np.ndarray
    ) -> Any:
        del group, offset
        return run(weights, tokens, lengths, cache)

    states = [state for (state,) in _read(weights, rows, "embed", segment)]
    return states[0] if single else states


def _read(
    weights: Params,
    rows: list[list[int]],
    kind: str,
    segment: Callable[..., Any],
    *,
    batch: int = BATCH,
    policy: Policy | None = None,
    implementation: Implementation | None = None,
    bar: bool | None = None,
) -> list[list[np.ndarray]]:
    """Run rows through `segment(program, group, cache, offset, tokens, lengths) -> (cache, *values)`; values by row."""
    groups = list(_groups(rows, batch))
    plans = [
        make_plan(model_of(weights), len(indices), len(rows[indices[0]]), policy, implementation) for indices in groups
    ]
    readings = [[segment.reading._replace(watch=None) for segment in plan.segments] for plan in plans]
    specs = (reading_specs(kind, plan.batch, reading) for plan, reading in zip(plans, readings, strict=True))
    compile_programs(weights, itertools.chain.from_iterable(specs))
    values: list[list[np.ndarray]] = [[] for _ in rows]
    total = sum(len(plan.segments) for plan in plans)
    with track("Reading", total, show=bar if total > 1 else False) as advance:
        for indices, plan, reading in zip(groups, plans, readings, strict=True):
            group = [rows[i] for i in indices]
            cache, _ = program(weights, Spec("init", plan.batch))()
            parts: list[list[np.ndarray]] = []
            for one, (offset, tokens, lengths) in zip(reading, segments(group, plan), strict=True):
                run = program(weights, Spec(kind, plan.batch, *one))
                cache, *part = segment(run, group, cache, offset, tokens, lengths)
                parts.append([np.asarray(value) for value in part])
                advance(1)
            joined = [np.concatenate(value, axis=1) for value in zip(*parts, strict=True)]
            for position, i in enumerate(indices):
                values[i] = [value[position, : len(rows[i])].copy() for value in joined]
                if not all(np.isfinite(value).all() for value in values[i]):
                    raise FloatingPointError(
                        f"texts: what the model gives for text {i} is not finite; check the weights"
                    )
    return values


def _groups(rows: list[list[int]], batch: int) -> Iterator[list[int]]:
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
    for start in range(0, len(order), batch):
        yield order[start : start + batch]
