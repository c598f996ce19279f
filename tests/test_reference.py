"""The trained reference checkpoints against a float64 recurrence and mamba_ssm's own outputs."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from mamba_jax import forward, generate, init_cache, load, prefill, score, step

pytestmark = pytest.mark.reference

NAMES = ("mamba1-12m", "mamba2-12m-hf")
CHUNK_SIZES = (16, 32, 64, 128, 256, 512)
TRUTH_ATOL = 3e-5  # float32 against the float64 recurrence; logits have a standard deviation of about 3


@pytest.fixture(scope="module", params=NAMES)
def reference(request, reference_dir):
    folder = reference_dir / request.param
    return folder, load(folder, dtype="float32"), load_file(folder / "golden.safetensors")


@pytest.mark.parametrize("chunk_size", CHUNK_SIZES)
def test_float32_meets_the_truth_at_every_chunk_size(reference, chunk_size):
    _, params, golden = reference
    logits, hidden = forward(params, golden["ids"][None], chunk_size=chunk_size, output_hidden_states=True)
    assert np.abs(np.asarray(hidden[-1][0], np.float64) - golden["truth_hidden"]).max() < TRUTH_ATOL
    assert np.abs(np.asarray(logits[0, :, :256], np.float64) - golden["truth_logits256"]).max() < TRUTH_ATOL
    np.testing.assert_array_equal(np.argmax(logits[0], axis=-1), golden["truth_argmax"])


def test_bfloat16_is_no_farther_from_the_truth_than_mamba_ssm(reference):
    folder, _, golden = reference
    logits = forward(load(folder, dtype="bfloat16"), golden["ids"][None])
    truth = golden["truth_logits256"]
    theirs = np.abs(golden["logits256_bf16"].astype(np.float64) - truth).max()
    assert np.abs(np.asarray(logits[0, :, :256], np.float64) - truth).max() < 1.1 * theirs


def test_greedy_continuations_are_mamba_ssm_s(reference):
    folder, params, _ = reference
    cases = list(json.loads((folder / "greedy_fp32.json").read_text()).values())
    assert len(cases) == 12
    options = {"max_new_tokens": 96, "stop_token_ids": []}
    batch = generate(params, [case["prompt"] for case in cases], **options)
    for case, row in zip(cases, batch, strict=True):
        assert row.tokens == case["new"]
        assert generate(params, case["prompt"], **options).tokens == case["new"]


def test_u18_u47_steps_scores_and_forward_agree_and_errors_do_not_grow(reference):
    _, params, golden = reference
    ids, truth = golden["ids"], golden["truth_logits256"]
    _, cache = prefill(params, ids[None, :29])
    errors = []
    for position in range(29, 512):
        logits, cache = step(params, ids[position : position + 1], cache)
        errors.append(np.abs(np.asarray(logits[0, :256], np.float64) - truth[position]).max())
    assert max(errors) < TRUTH_ATOL
    assert max(errors[-64:]) < 2 * max(errors[:64]) + 1e-5
    whole = np.asarray(forward(params, ids[None])[0], np.float64)
    logprobs = whole - np.log(np.exp(whole).sum(-1, keepdims=True))
    want = logprobs[np.arange(511), ids[1:]]
    np.testing.assert_allclose(score(params, ids).logprobs[1:], want, atol=1e-4)


def test_float16_is_finite_and_near_the_truth(reference):
    folder, _, golden = reference
    logits = forward(load(folder, dtype="float16"), golden["ids"][None])
    assert np.abs(np.asarray(logits[0, :, :256], np.float64) - golden["truth_logits256"]).max() < 0.03


def test_cache_shapes(reference):
    _, params, _ = reference
    cache = init_cache(params.config, 3, params.dtype)
    state = (3, 16, 384) if params.config.layer == "mamba1" else (3, 6, 64, 128)
    assert {leaf.shape for leaf in cache.ssm} == {state}
    assert {leaf.shape for leaf in cache.conv} == {(3, 3, params.config.conv_channels)}
