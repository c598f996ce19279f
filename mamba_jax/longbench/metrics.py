"""How well a prediction answers: exact match, token F1 and ROUGE-L, each the best over all right answers.

As LongBench's own scripts compute them: words are lower-cased and lose punctuation and articles for the first two;
ROUGE-L is that of the package `rouge`, which does neither. Other packages of ROUGE give other figures.
"""

import collections
import re
import string
from collections.abc import Callable, Sequence
from typing import Any, Literal

Metric = Literal["f1", "rouge_l"]
NAMES = ("exact_match", "f1", "rouge_l")

# The one of these by which LongBench ranks models in a task. Its tasks that are missing here (choices, counts,
# retrieval, code, Chinese) have metrics of their own.
METRICS: dict[str, Metric] = {
    "narrativeqa": "f1",
    "qasper": "f1",
    "multifieldqa_en": "f1",
    "hotpotqa": "f1",
    "2wikimqa": "f1",
    "musique": "f1",
    "triviaqa": "f1",
    "gov_report": "rouge_l",
    "qmsum": "rouge_l",
    "multi_news": "rouge_l",
    "samsum": "rouge_l",
}
FIRST_LINE = ("trec", "triviaqa", "samsum", "lsht")  # few-shot tasks: a model goes on with further examples

_DROP_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def score_prediction(task: str, prediction: str, answers: Sequence[str]) -> dict[str, float]:
    """All metrics of one prediction, 0 to 1.

    Args:
        task: its name; of some tasks only the first line counts.
        prediction: the model's text.
        answers: the right answers, at least one.

    Raises:
        ValueError: if there is no answer.
        ImportError: if the package `rouge` is missing.
    """
    if not answers:
        raise ValueError("answers: got none, wanted at least one")
    if task in FIRST_LINE:
        prediction = prediction.lstrip("\n").split("\n")[0]
    metrics: tuple[Callable[[str, str], float], ...] = (exact_match, token_f1, rouge_l)
    return {
        name: max(metric(prediction, answer) for answer in answers) for name, metric in zip(NAMES, metrics, strict=True)
    }


def words(text: str) -> list[str]:
    """Lower-cased words without punctuation and articles, as SQuAD has them."""
    return _ARTICLES.sub(" ", text.lower().translate(_DROP_PUNCTUATION)).split()


def exact_match(prediction: str, answer: str) -> float:
    """1 if both have the same words in the same order."""
    return float(words(prediction) == words(answer))


def token_f1(prediction: str, answer: str) -> float:
    """F1 of the words that both have, counted as often as they occur."""
    predicted, wanted = words(prediction), words(answer)
    common = (collections.Counter(predicted) & collections.Counter(wanted)).total()
    return 2 * common / (len(predicted) + len(wanted)) if common else 0.0


def rouge_l(prediction: str, answer: str) -> float:
    """F of ROUGE-L by the package `rouge`; 0 where it has none: for a text without words, or one too long for it."""
    rouge = require_rouge()
    try:
        return float(rouge.get_scores([prediction], [answer], avg=True)["rouge-l"]["f"])
    except (ValueError, RecursionError, ZeroDivisionError):
        return 0.0


def require_rouge() -> Any:
    """The package `rouge`, for ROUGE-L alone.

    Raises:
        ImportError: if it is missing; the message says how to get it.
    """
    try:
        import rouge
    except ImportError as error:
        raise ImportError("LongBench needs the package rouge: pip install 'mamba-jax[eval]'") from error
    return rouge.Rouge(metrics=["rouge-l"], stats=["f"])
