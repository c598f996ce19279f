"""What a run came to: means over samples, by task and over all."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from mamba_jax.longbench.metrics import METRICS, NAMES


@dataclasses.dataclass(frozen=True)
class TaskSummary:
    """Means over the samples of a task, or over those of all tasks.

    Attributes:
        samples: how many there are; everything else weighs each of them alike.
        metric: the one that LongBench ranks by in this task; None where it is none of these.
        score: that metric, 0 to 100; None likewise.
        exact_match: 0 to 100.
        f1: of tokens, 0 to 100.
        rouge_l: 0 to 100.
        prompt_tokens: mean.
        cut: samples whose prompt lost its middle.
        new_tokens: mean.
        latency_s: mean seconds from the reading of a prompt to its last token, the rest of its batch included.
        tokens_per_s: new tokens a second of all reading and generating.
        entropy: mean of the statistic that chose chunk sizes; None where none did.
    """

    samples: int
    metric: str | None
    score: float | None
    exact_match: float
    f1: float
    rouge_l: float
    prompt_tokens: float
    cut: int
    new_tokens: float
    latency_s: float
    tokens_per_s: float
    entropy: float | None


@dataclasses.dataclass(frozen=True)
class Summary:
    """What a run came to.

    Attributes:
        model: its name.
        dtype: of the weights.
        policy: what decided chunk sizes.
        max_length: most tokens of a prompt; None for no limit.
        tasks: by name.
        all: over the samples of all tasks; a task of more samples weighs more.
    """

    model: str
    dtype: str
    policy: str
    max_length: int | None
    tasks: Mapping[str, TaskSummary]
    all: TaskSummary


def summarize(config: Mapping[str, Any], predictions: Mapping[str, Sequence[Mapping[str, Any]]]) -> Summary:
    """Reduce the records of `run`, by task; tasks without any are left out."""
    tasks = {task: _means(lines, METRICS.get(task)) for task, lines in predictions.items() if lines}
    return Summary(
        model=config["model"],
        dtype=config["dtype"],
        policy=config["policy"],
        max_length=config["max_length"],
        tasks=tasks,
        all=_means([line for lines in predictions.values() for line in lines], None),
    )


def _means(lines: Sequence[Mapping[str, Any]], metric: str | None) -> TaskSummary:
    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    scores = {name: 100 * mean([line["scores"][name] for line in lines]) for name in NAMES}
    entropies = [line["entropy"] for line in lines if line["entropy"] is not None]
    new_tokens = [line["new_tokens"] for line in lines]
    return TaskSummary(
        samples=len(lines),
        metric=metric,
        score=None if metric is None else scores[metric],
        **scores,
        prompt_tokens=mean([line["prompt_tokens"] for line in lines]),
        cut=sum(line["cut_tokens"] > 0 for line in lines),
        new_tokens=mean(new_tokens),
        latency_s=mean([line["latency_s"] for line in lines]),
        tokens_per_s=sum(new_tokens) / sum(line["latency_s"] / line["batch"] for line in lines),
        entropy=mean(entropies) if entropies else None,
    )
