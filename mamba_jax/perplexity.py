"""Perplexity of a text: exp of the mean negative log-probability of its tokens.

Either in windows, as language models are compared: each token is scored once, in the first window that holds it, given
what precedes it there; so every token beyond the first window has at least window - stride tokens before it. Or with
the state carried through the whole text, which is what a recurrent model can do and needs no windows.
"""

import dataclasses
import math
import time
from pathlib import Path
from typing import Any

import numpy as np

from mamba_jax import records
from mamba_jax.arguments import as_integer, as_path
from mamba_jax.generate import Prompt, as_rows
from mamba_jax.ops.dispatch import Implementation
from mamba_jax.params import Params
from mamba_jax.planning import DEFAULT_POLICY, as_policy, reading_implementation
from mamba_jax.programs import model_of, program_weights
from mamba_jax.progress import track
from mamba_jax.scheduler.policies import Policy
from mamba_jax.scoring import BATCH, token_logprobs
from mamba_jax.text import Tokenizer


@dataclasses.dataclass(frozen=True)
class Perplexity:
    """Perplexity of one text under a model.

    Attributes:
        perplexity: exp of the mean negative log-probability; infinite where it exceeds a float.
        tokens_scored: all of the text's but the first, which nothing predicts.
        window: tokens a window; None where the state was carried through.
        stride: tokens from a window's beginning to the next one's; None likewise.
        dtype: of the weights.
        seconds: reading took, compilation included; of a run that was taken up again, its last part.
    """

    perplexity: float
    tokens_scored: int
    window: int | None
    stride: int | None
    dtype: str
    seconds: float


def perplexity(
    params: Params,
    text: Prompt,
    *,
    window: int | None = 1024,
    stride: int = 512,
    batch: int = BATCH,
    policy: Policy | str | None = None,
    implementation: Implementation | None = None,
    tokenizer: Tokenizer | str | None = None,
    out: str | Path | None = None,
) -> Perplexity:
    """Perplexity of a text, with a bar while it is read.

    Args:
        params: the model.
        text: a string, which no special tokens are added to, or token ids; at least two tokens.
        window: tokens a window; None carries the state through the whole text instead.
        stride: tokens from a window's beginning to the next one's, at least 1 and less than `window`.
        batch: windows read together; speed only: the result is the same to 1e-6.
        policy: decides chunk sizes; speed only. As in `generate`.
        implementation: of the scans, as in `generate`.
        tokenizer: one to use instead of the checkpoint's, or the folder of one.
        out: folder that keeps each window as it is done, so that a run that was killed goes on there and reads none
            again; None keeps nothing.

    Raises:
        ValueError: if an argument does not fit; the message names it. Also if `out` holds a run of another model, text
            or configuration.
        NotImplementedError: if implementation is "pallas" and the kernels do not take the model, batch or device.
        OSError: if `out` cannot be written.
        FloatingPointError: if the model's log-probabilities are not finite.
    """
    rows, single, _ = as_rows(params, text, tokenizer, "text")
    if not single or len(rows[0]) < 2:
        number = len(rows[0]) if text != "" else 0  # an empty prompt begins with BOS
        got = f"{len(rows)} texts" if not single else "1 token" if number == 1 else f"{number} tokens"
        raise ValueError(f"text: got {got}, wanted a single text of at least two tokens")
    if window is not None:
        window, stride = as_integer("window", window, 2), as_integer("stride", stride, 1)
        if stride >= window:  # each token needs one before it in its window
            raise ValueError(f"stride: got {stride}, wanted 1 to {window - 1}, less than the window")
    batch = as_integer("batch", batch, 1)
    tokens, start, chosen = rows[0], time.perf_counter(), as_policy(policy, params.config.n_layer)
    spans = windows(len(tokens), window, stride)
    weights, path = program_weights(params), None
    reading_implementation(model_of(weights), batch, chosen, implementation)  # raises if there is none
    done: dict[int, dict[str, Any]] = {}
    if out is not None:
        config = {
            "weights": records.fingerprint(params),
            "dtype": params.dtype.name,
            "text": records.digest(np.asarray(tokens, np.int32).tobytes()),
            "window": window,
            "stride": None if window is None else stride,
            "policy": DEFAULT_POLICY if chosen is None else chosen.name,
            "implementation": implementation,
        }
        folder = as_path("out", out)
        records.claim(folder, {"config": config, "batch": batch})
        path = folder / "windows.jsonl"
        done = records.read_lines(path)
    several = len(spans) > 1
    with track("Windows", len(spans), show=None if several else False) as advance:
        for first in range(0, len(spans), batch):
            group = range(first, min(first + batch, len(spans)))
            if left := [i for i in group if i not in done]:
                texts = [tokens[spans[i][0] : spans[i][1]] for i in left]
                pieces = token_logprobs(
                    weights,
                    texts,
                    batch=batch,
                    policy=chosen,
                    implementation=implementation,
                    bar=False if several else None,
                )
                new = [_record(i, logprobs, spans[i][2]) for i, (logprobs, _) in zip(left, pieces, strict=True)]
                if path is not None:
                    records.append_lines(path, new)
                done |= {record["index"]: record for record in new}
            advance(len(group))
    total, number = math.fsum(record["logprob"] for record in done.values()), len(tokens) - 1
    return Perplexity(
        perplexity=perplexity_of(total, number),
        tokens_scored=number,
        window=window,
        stride=None if window is None else stride,
        dtype=params.dtype.name,
        seconds=time.perf_counter() - start,
    )


def _record(index: int, logprobs: np.ndarray, scored: int) -> dict[str, Any]:
    """What is kept of a window: the log-probability of the tokens that it scores, those at its end."""
    return {"index": index, "logprob": float(logprobs[len(logprobs) - scored :].sum(dtype=np.float64))}


def perplexity_of(total: float, number: int) -> float:
    """Perplexity of `number` tokens whose log-probabilities sum to `total`; infinite where it exceeds a float."""
    try:
        return math.exp(-total / number)
    except OverflowError:
        return math.inf


def windows(length: int, window: int | None, stride: int) -> list[tuple[int, int, int]]:
    """Windows over a text as (begin, end, tokens to score at its end); each token but the first is scored once."""
    if window is None or window >= length:
        return [(0, length, length - 1)]
    spans = [(0, window, window - 1)]
    while spans[-1][1] < length:
        begin, end, _ = spans[-1]
        after = min(begin + stride + window, length)
        spans.append((begin + stride, after, after - end))
    return spans
