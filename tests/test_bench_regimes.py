"""The study of regimes: what it makes of timings, and a whole run on a tiny model."""

import json
import math
import random

import pytest

from bench import prompts as prompts_lib
from bench import regimes
from bench.prompts import Prompt, cut
from bench.regimes import DEFAULT, chunk_shares, interval, measure, over_oracle, owners_of, ran
from mamba_jax import planning
from mamba_jax.planning import Model, as_policy, make_plan
from mamba_jax.programs import model_of, program_weights, read_prompts
from tests.tiny import tiny_config, tiny_params

GPU = Model(tiny_config("mamba2"), "float32", "gpu", "Unknown Device")
STATICS = ["static:16", "static:32"]


class Letters:
    """A token a letter."""

    def encode(self, text):
        return [ord(letter) for letter in text]

    def decode(self, ids):
        return "".join(map(chr, ids))


class Pairs(Letters):
    """The text of an id is two letters, so that what is tokenised again is longer."""

    def decode(self, ids):
        return "".join(2 * chr(i) for i in ids)


def test_a_long_prompt_loses_its_middle():
    ids = list(range(97, 117))
    assert cut(ids, 20, Letters()) == tuple(ids)
    assert cut(ids, 7, Letters()) == (97, 98, 99, 113, 114, 115, 116)
    assert cut(ids, 4, Pairs()) == (97, 97, 116, 116)


def test_the_folder_of_checkpoints_has_to_be_named(monkeypatch):
    monkeypatch.delenv("MAMBA_JAX_REFERENCE", raising=False)
    with pytest.raises(ValueError, match="reference: name the folder"):
        prompts_lib.reference_folder(None)


@pytest.mark.parametrize("name", ["length", "layers:64,32", "corey-default", "layers:64,64"])
def test_what_ran_is_found_in_the_decisions(name):
    weights = program_weights(tiny_params("mamba2"))
    ids, policy = [5] * (3 * 2048 + 100), as_policy(name)
    plan = make_plan(model_of(weights), 1, len(ids), policy)
    key = ran(plan, read_prompts(weights, [ids], policy)[2])
    assert [reading.length for reading in key] == [segment.length for segment in plan.segments]
    if not plan.candidates:
        assert key == tuple((segment.length, segment.chunk_size, None, "xla") for segment in plan.segments)
    else:
        assert [reading.chunk_size for reading in key[:2]] == [segment.chunk_size for segment in plan.segments[:2]]
        assert [reading.watch is not None for reading in key] == [i < len(key) - 2 for i in range(len(key))]
        assert set(key) <= set(plan.programs)


def test_the_same_programs_are_timed_once_but_for_the_default():
    same, other = ((64, 16, None, "xla"),), ((64, 32, None, "xla"),)
    keys = {"static:16": same, "static:32": other, DEFAULT: same, "length": other, "midpoint": same}
    owners = owners_of(keys)
    assert owners["length"] == "static:32"
    assert owners["midpoint"] == "static:16"
    assert owners[DEFAULT] == DEFAULT


def test_chunk_sizes_share_the_positions():
    keys = [((64, 16, None, "xla"), (32, (16, 32), None, "xla")), ((32, 32, None, "xla"),)]
    assert chunk_shares(keys) == {"16": pytest.approx(80 / 128), "32": pytest.approx(48 / 128)}


def test_the_oracle_is_met_in_rounds_that_did_not_choose_it():
    samples = {"static:16": [1.0, 2.0, 1.0, 2.0], "static:32": [2.0, 1.0, 2.0, 1.0], "own": [1.0] * 4}
    # Even rounds choose 16, which takes 2 in the odd ones, and the other way round.
    assert over_oracle(samples, "own", STATICS) == pytest.approx(math.log(0.5))
    steady = {"static:16": [1.0] * 6, "static:32": [2.0] * 6, "own": [1.01] * 6}
    assert over_oracle(steady, "own", STATICS) == pytest.approx(math.log(1.01))
    assert over_oracle(steady, "static:16", STATICS) == 0
    assert over_oracle({name: each[:1] for name, each in steady.items()}, "own", STATICS) == pytest.approx(
        math.log(1.01)
    )


def test_an_interval_holds_the_mean():
    values = [random.Random(i).gauss(1, 0.1) for i in range(30)]
    low, high = interval(values)
    assert low < sum(values) / 30 < high
    assert high - low == pytest.approx(4 * 0.1 / 30**0.5, rel=0.3)
    assert interval([0.5, 0.5]) == (0.5, 0.5)


def test_contenders_take_turns_in_another_order_each_round():
    seen = []

    def run(prompt, name):
        seen.append((prompt, name))
        return float(len(seen))

    samples = measure(run, {0: ["a", "b"], 1: ["a", "b", "c"]}, rounds=6, seconds=0.0)
    assert [{name: len(each) for name, each in found.items()} for found in samples] == [
        {"a": 4, "b": 4},
        {"a": 4, "b": 4, "c": 4},
    ]
    assert len(seen) == 4 * (3 + 4)  # one more for each prompt of a round, which does not count
    rounds = [tuple(seen[i : i + 7]) for i in range(0, 28, 7)]
    assert len(set(rounds)) == 4


def test_a_whole_study(capsys):
    params = tiny_params("mamba2")
    generator = random.Random(0)
    lengths = [20, 30, 100, 90, 330, 300]
    made = [
        Prompt(f"p{i}", ("short_chat", "tabular", "qasper")[i // 2], tuple(generator.choices(range(99), k=length)))
        for i, length in enumerate(lengths)
    ]
    names = ("length", "corey-default", "careful:entropy:sampled")
    with regimes.segment_lengths(params, (64,), (16, 32), 1):
        assert planning.choices(model_of(params), 1).measured
        study = regimes.run_study(params, made, (16, 32, 64), names, 4, 0.0)
    assert not planning.choices(model_of(params), 1).measured
    rows = regimes.summarise(study)
    found = {row["contender"]: row for row in rows}
    assert set(found) >= {DEFAULT, *names, "layers by corey-default", "table of length", "static:64"}
    assert found[DEFAULT]["prompts"] == 6
    assert found["table of length"]["prompts"] == 3
    assert found["length"]["chunks"] == {"64": 1.0}
    assert found["length"]["over_oracle"] == found["static:64"]["over_oracle"]
    for section in (regimes.table_5(study, rows, "t"), regimes.table_6(study), regimes.table_7(study, rows)):
        assert section.rows
    assert len(regimes.sanity(study).rows) == 6
    written = json.loads(json.dumps(regimes.to_json(study, rows)))
    assert [prompt["segments"] for prompt in written["prompts"]] == [[64] * -(-n // 64) for n in lengths]
    assert capsys.readouterr().out == ""
