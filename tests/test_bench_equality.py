"""Equality of what models say: the comparison's parts, and a few policies on the reference checkpoints."""

import math

import pytest

from bench import equality
from bench.equality import BEGINNINGS, DEFAULT, Outcome, Reader, beginnings, compare, first_difference, margin, section
from bench.prompts import Prompt, Tokens
from mamba_jax import load
from mamba_jax.planning import as_policy, choices, make_plan
from mamba_jax.programs import model_of
from tests.tiny import tiny_params

KEY = ((64, 16, None, "xla"),)


def test_the_first_difference_is_found():
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 4]) == 1
    with pytest.raises(ValueError, match="continuations: got 1 and 2 tokens"):
        first_difference([1], [1, 2])


def test_beginnings_are_of_texts_that_are_longer():
    whole = [Prompt(f"p{i}", "tabular", tuple(range(length))) for i, length in enumerate((40, 300, 1024, 900))]
    found = beginnings(whole)
    assert [len(prompt.ids) for prompt in found] == list(BEGINNINGS)
    assert len({prompt.name.split(",")[0] for prompt in found}) > 2


def test_what_differs_is_counted_and_its_margin_told():
    params = tiny_params("mamba2")
    prompts = [Prompt("a", "tabular", (1, 2, 3)), Prompt("b", "tabular", (4, 5, 6, 7))]
    baseline = Outcome([[1, 2], [3, 4]], [[-1.0, -2.0], [-1.0, -1.0]], [-8.0, -10.0], [KEY, KEY])
    same = compare(params, prompts, baseline, baseline)
    assert (same["equal"], same["differing"], same["perplexity_ratio"], same["same_programs"]) == (2, [], 1.0, 2)
    other = Outcome([[1, 2], [3, 9]], [[-1.0, -2.5], [-1.25, -7.0]], [-8.0, -9.0], [KEY, ((64, 32, None, "xla"),)])
    row = compare(params, prompts, other, baseline)
    assert (row["equal"], row["prompts"], row["same_programs"]) == (1, 2, 1)
    assert row["logprob_apart"] == 0.5  # up to the first difference
    assert row["perplexity_ratio"] == pytest.approx(math.exp(-1 / 5))
    (found,) = row["differing"]
    assert (found["prompt"], found["position"], found["tokens"]) == ("b", 1, [4, 9])
    assert found["between"] == pytest.approx(margin(params, [4, 5, 6, 7, 3], (4, 9))["between"])
    assert "1 continuations differ: x, b, token 1" in section("t", {"x": row}).finding


def test_short_segments_stand_while_asked_for():
    params = tiny_params("mamba2")
    with equality.segments_of(params, (64, 16)):
        plan = make_plan(model_of(params), equality.BATCH, 150)
        assert [segment.length for segment in plan.segments] == [64, 64, 16, 16]
        assert [segment.chunk_size for segment in plan.segments] == [32, 32, 16, 16]
        assert choices(model_of(params), equality.BATCH).near_best[64] == (16, 32, 64)
    assert not choices(model_of(params), equality.BATCH).measured


def test_tiny_models_say_the_same_with_every_policy():
    params = tiny_params("mamba2", n_layer=1)
    prompts = [Prompt(str(n), "tabular", tuple((7 * i * i + n) % 99 for i in range(n))) for n in (3, 100)]
    names = ("static:16", "entropy:sampled")
    report = equality.run(params, prompts, names, [(32,)], 6)
    assert set(report) == {"segments as planned", "segments of 32"}
    for rows in report.values():
        assert set(rows) > {DEFAULT, "entropy:sampled"}
        assert {row["equal"] for row in rows.values()} == {2}
        assert all(abs(row["perplexity_ratio"] - 1) < 1e-5 for row in rows.values())
    assert report["segments as planned"][DEFAULT]["same_programs"] == 2
    assert "static:16" not in report["segments of 32"]
    assert report["segments of 32"]["entropy:sampled"]["same_programs"] == 0


@pytest.mark.reference
@pytest.mark.parametrize("name", ["mamba1-12m", "mamba2-12m-hf"])
def test_t08_tokens_and_perplexities_are_the_same_with_every_policy(reference_dir, name):
    data = reference_dir.parent / "data"
    prompts = equality.choose_prompts(data, Tokens(data / "tokenizer"), 250, 6)
    assert len({prompt.kind for prompt in prompts}) > 3
    params = load(reference_dir / name, dtype="float32")
    reader = Reader(params, prompts, 32)
    baseline = reader.outcome(None, None)
    with equality.segments_of(params, (64,)):
        for policy in ("static:16", "entropy:sampled"):
            row = compare(params, prompts, reader.outcome(as_policy(policy), baseline), baseline)
            assert row["same_programs"] == 0
            assert row["equal"] == 6, row["differing"]
            assert abs(row["perplexity_ratio"] - 1) < 1e-5
