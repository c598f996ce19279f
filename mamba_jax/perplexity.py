"""Perplexity of a text: exp of the mean negative log-probability of its tokens.

Either in windows, as language models are compared: each token is scored once, in the first window that holds it, given
what precedes it there; so every token beyond the first window has at least window - stride tokens before it. Or with
the state carried through the whole text, which is what a recurrent model can do and needs no windows.
"""

import dataclasses
import math
import time

import numpy as np

from mamba_jax.arguments import as_integer
from mamba_jax.generate import Prompt, as_rows
from mamba_jax.params import Params
from mamba_jax.planning import as_policy
from mamba_jax.programs import program_weights
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
        seconds: reading took, compilation included.
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
    tokenizer: Tokenizer | str | None = None,
) -> Perplexity:
    """Perplexity of a text, with a bar while it is read.

    Args:
        params: the model.
        text: a string, which no special tokens are added to, or token ids; at least two tokens.
        window: tokens a window; None carries the state through the whole text instead.
        stride: tokens from a window's beginning to the next one's, at least 1 and less than `window`.
        batch: windows read together; speed only: the result is the same to 1e-6.
        policy: decides chunk sizes; speed only. As in `generate`.
        tokenizer: one to use instead of the checkpoint's, or the folder of one.

    Raises:
        ValueError: if an argument does not fit; the message names it.
        FloatingPointError: if the model's log-probabilities are not finite.
    """
    rows, single, _ = as_rows(params, text, tokenizer, "text")
    if not single or len(rows[0]) < 2:
        got = f"{len(rows)} texts" if not single else f"{len(rows[0])} token"
        raise ValueError(f"text: got {got}, wanted a single text of at least two tokens")
    if window is not None:
        window, stride = as_integer("window", window, 2), as_integer("stride", stride, 1)
        if stride >= window:  # each token needs one before it in its window
            raise ValueError(f"stride: got {stride}, wanted 1 to {window - 1}, less than the window")
    batch = as_integer("batch", batch, 1)
    tokens, start = rows[0], time.perf_counter()
    spans = windows(len(tokens), window, stride)
    weights = program_weights(params)
    pieces = token_logprobs(weights, [tokens[a:b] for a, b, _ in spans], batch=batch, policy=as_policy(policy))
    scored = [piece[len(piece) - count :] for (piece, _), (_, _, count) in zip(pieces, spans, strict=True)]
    total, number = sum(float(part.sum(dtype=np.float64)) for part in scored), sum(map(len, scored))
    return Perplexity(
        perplexity=perplexity_of(total, number),
        tokens_scored=number,
        window=window,
        stride=None if window is None else stride,
        dtype=params.dtype.name,
        seconds=time.perf_counter() - start,
    )


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
