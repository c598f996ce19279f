"""Perplexity: windows, weights, batches, the carried state; against the reference figures of mamba_ssm."""

import json
import math

import numpy as np
import pytest
from typer.testing import CliRunner

import mamba_jax
from mamba_jax import cli, forward
from mamba_jax.perplexity import perplexity, windows
from tests.tiny import tiny_params

TOKENS = np.random.default_rng(0).integers(0, 101, 700).tolist()


def by_hand(params, spans):
    """Mean over the tokens that each span scores at its end, from `forward` and float64."""
    total, count = 0.0, 0
    for begin, end, scored in spans:
        logits = np.asarray(forward(params, [TOKENS[begin:end]])[0], np.float64)
        logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        chosen = logprobs[np.arange(end - begin - 1), TOKENS[begin + 1 : end]]
        total += chosen[len(chosen) - scored :].sum()
        count += scored
    return math.exp(-total / count), count


@pytest.mark.parametrize(
    ("length", "window", "stride", "wanted"),
    [
        (10, 4, 2, [(0, 4, 3), (2, 6, 2), (4, 8, 2), (6, 10, 2)]),
        (9, 4, 3, [(0, 4, 3), (3, 7, 3), (6, 9, 2)]),
        (4, 4, 2, [(0, 4, 3)]),
        (3, 4, 1, [(0, 3, 2)]),
        (7, None, 512, [(0, 7, 6)]),
    ],
)
def test_each_token_but_the_first_is_scored_once(length, window, stride, wanted):
    spans = windows(length, window, stride)
    assert spans == wanted
    assert sum(count for _, _, count in spans) == length - 1


@pytest.mark.parametrize("kind", ["mamba1", "mamba2"])
@pytest.mark.parametrize("window", [128, None])
def test_it_is_the_token_weighted_mean_over_all_windows(kind, window):
    params = tiny_params(kind)
    wanted, count = by_hand(params, windows(len(TOKENS), window, 48))
    result = perplexity(params, TOKENS, window=window, stride=48)
    assert result.perplexity == pytest.approx(wanted, rel=1e-5)
    assert result.tokens_scored == count == len(TOKENS) - 1
    assert (result.window, result.stride, result.dtype) == (window, 48 if window else None, "float32")


@pytest.mark.parametrize("batch", [1, 3, 5, 16])
def test_the_batch_size_changes_nothing(batch):
    params = tiny_params("mamba2")
    plain = perplexity(params, TOKENS, window=64, stride=32).perplexity
    assert perplexity(params, TOKENS, window=64, stride=32, batch=batch).perplexity == pytest.approx(plain, rel=1e-6)
    chunked = perplexity(params, TOKENS, window=64, stride=32, policy="static:16").perplexity
    assert chunked == pytest.approx(plain, rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"text": [5]}, "text: got 1 token"),
        ({"text": [[5, 6], [7, 8]]}, "text: got 2 texts"),
        ({"window": 1}, "window: got 1"),
        ({"stride": 0}, "stride: got 0"),
        ({"window": 8, "stride": 8}, "stride: got 8, wanted 1 to 7"),
        ({"batch": 0}, "batch: got 0"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        perplexity(tiny_params("mamba2"), **{"text": TOKENS, **arguments})


def test_the_command_prints_one_object(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("It was the best of times, it was the worst of times. " * 20, encoding="utf-8")
    options = ["--window", "64", "--stride", "32", "--chunk-size", "16", "--dtype", "float32", "--json"]
    result = CliRunner().invoke(cli.app, ["perplexity", "--text", str(file), *options])
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    assert set(printed) == {"perplexity", "tokens_scored", "window", "stride", "dtype", "seconds"}
    params = mamba_jax.load(mamba_jax.default_model(), dtype="float32")
    again = perplexity(params, file.read_text(), window=64, stride=32)
    assert printed["perplexity"] == pytest.approx(again.perplexity, rel=1e-6)
    assert (printed["window"], printed["stride"], printed["dtype"]) == (64, 32, "float32")
    assert CliRunner().invoke(cli.app, ["perplexity", "--text", str(file), "--chunk-size", "x"]).exit_code == 2
