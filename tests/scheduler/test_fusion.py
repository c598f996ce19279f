"""The fusion planner: limits, scores, solvers against every partition, and what the printed objective amounts to."""

import dataclasses
import functools
import itertools
import math

import numpy as np
import pytest

from mamba_jax.scheduler.fusion import (
    Limits,
    Operator,
    Weights,
    adaptive_threshold,
    chain_score,
    greedy_plan,
    max_depth,
    optimal_plan,
    static_plan,
    unfused_plan,
    utility,
)

BOUNDLESS = Limits(registers=10**6, shared_memory=10**6, occupancy=0.0)
SOLVERS = {
    "static": static_plan,
    "greedy": lambda chain, limits: greedy_plan(chain, limits, chain_score(chain)),
    "optimal": lambda chain, limits: optimal_plan(chain, limits, utility),
}


def operator(name="op", entropy=0.5, intensity=1.0, traffic=1.0, registers=10, shared_memory=10, occupancy=0.9):
    return Operator(name, entropy, intensity, traffic, registers, shared_memory, occupancy)


def random_chain(seed, count):
    rng = np.random.default_rng(seed)
    return tuple(
        Operator(
            name=f"op{i}",
            entropy=float(rng.uniform(0.1, 1)),
            arithmetic_intensity=float(rng.uniform(1, 5)),
            memory_traffic=float(rng.uniform(10, 30)),
            registers=int(rng.integers(10, 60)),
            shared_memory=int(rng.integers(4, 30)),
            occupancy=float(rng.uniform(0.7, 1)),
        )
        for i in range(count)
    )


def partitions(chain):
    for cuts in itertools.product((False, True), repeat=len(chain) - 1):
        ends = [i + 1 for i, cut in enumerate(cuts) if cut] + [len(chain)]
        yield tuple(chain[begin:end] for begin, end in zip([0, *ends], ends, strict=False))


def names(plan):
    return [[op.name for op in region] for region in plan]


@pytest.mark.parametrize(
    ("limits", "fits"),
    [
        (Limits(30, 24, 0.8), True),
        (Limits(29, 24, 0.8), False),
        (Limits(30, 23, 0.8), False),
        (Limits(30, 24, 0.81), False),
    ],
)
def test_a_region_fits_by_its_sums_and_its_least_occupancy(limits, fits):
    region = (operator(registers=10, shared_memory=4), operator(registers=20, shared_memory=20, occupancy=0.8))
    assert limits.admit(region) is fits


def test_depth_is_bounded_by_shared_memory_as_theorem_1_says():
    assert [max_depth(96, cost) for cost in (8, 9, 96, 97)] == [12, 10, 1, 0]
    chain = (operator(shared_memory=9),) * 30
    deepest = greedy_plan(chain, Limits(10**6, 96, 0), lambda region: 1.0, threshold=0.0)
    assert [len(region) for region in deepest] == [10, 10, 10]


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("seed", range(20))
def test_plans_are_partitions_in_order_and_every_region_fits(solver, seed):
    chain, limits = random_chain(seed, 12), Limits(120, 60, 0.7)
    plan = SOLVERS[solver](chain, limits)
    assert tuple(itertools.chain(*plan)) == chain
    assert all(limits.admit(region) for region in plan)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("launch_cost", [0.0, 0.3])
@pytest.mark.parametrize("objective", ["utility", "score"])
def test_the_dynamic_program_finds_the_best_of_all_partitions(seed, launch_cost, objective):
    chain, limits = random_chain(seed, 9), Limits(150, 70, 0.7)
    value = {"utility": utility, "score": chain_score(chain)}[objective]

    def total(plan):
        return sum(value(region) - launch_cost for region in plan)

    feasible = [plan for plan in partitions(chain) if all(map(limits.admit, plan))]
    assert 10 < len(feasible) < 2**8
    plan = optimal_plan(chain, limits, value, launch_cost)
    assert plan in feasible
    assert total(plan) == pytest.approx(max(map(total, feasible)), rel=0, abs=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_the_printed_objective_without_a_launch_cost_never_fuses(seed):
    chain = random_chain(seed, 10)
    assert optimal_plan(chain, BOUNDLESS, utility) == unfused_plan(chain)


@pytest.mark.parametrize("seed", range(5))
def test_with_a_launch_cost_it_cuts_before_operators_of_high_entropy_whatever_their_intensity_and_traffic(seed):
    chain, alpha, cost = random_chain(seed, 12), 0.45, 0.25
    plan = optimal_plan(chain, BOUNDLESS, functools.partial(utility, weights=Weights(alpha, 0.35, 0.2)), cost)
    starts = {region[0].name for region in plan[1:]}
    assert 0 < len(starts) < 11
    assert starts == {op.name for op in chain[1:] if alpha * op.entropy > cost}


def test_of_equally_good_partitions_the_longest_regions_win():
    chain = random_chain(0, 6)
    assert optimal_plan(chain, BOUNDLESS, lambda region: float(len(region))) == (chain,)


def test_utility_counts_the_entropy_that_enters_and_sums_the_rest():
    region = (operator(entropy=2.0, intensity=3.0, traffic=5.0), operator(entropy=7.0, intensity=4.0, traffic=6.0))
    assert utility(region, Weights(0.5, 0.25, 0.125)) == 0.5 * 2 + 0.25 * 7 - 0.125 * 11


def test_scores_by_hand():
    chain = (
        operator(entropy=0.0, intensity=1.0, traffic=10.0),
        operator(entropy=1.0, intensity=2.0, traffic=20.0),
        operator(entropy=0.5, intensity=5.0, traffic=18.0),
    )
    score = chain_score(chain, Weights(0.4, 0.3, 0.2))
    assert score(chain[:1]) == 0.0
    assert score(chain[1:2]) == pytest.approx(0.4 + 0.3 * 0.25 - 0.2)
    two = 0.4 * 0.5 + 0.3 * (3 / math.sqrt(2) - 1) / 4 - 0.2 * (30 / 2**1.15 - 10) / 10 + 0.18
    assert score(chain[:2]) == pytest.approx(two)
    # All three: the mean entropy is 0.5, the intensity 8 / 3^0.5 and the traffic 48 / 3^1.15, and the bonus 0.36.
    three = 0.4 * 0.5 + 0.3 * (8 / math.sqrt(3) - 1) / 4 - 0.2 * (48 / 3**1.15 - 10) / 10 + 0.36
    assert score(chain) == pytest.approx(three)


def test_scores_clip_signals_to_the_chain_and_the_bonus_to_three_operators():
    # Equal operators leave nothing to normalise by: every signal counts a half.
    chain = (operator(),) * 6
    score = chain_score(chain, Weights(0.4, 0.3, 0.2))
    signals = 0.5 * (0.4 + 0.3 - 0.2)
    bonuses = [0, 0.18, 0.36, 0.36, 0.36, 0.36]
    assert [score(chain[:d]) for d in range(1, 7)] == pytest.approx([signals + bonus for bonus in bonuses])
    # The sum over three operators is past the chain's greatest intensity, and is worth no more than it.
    steep = tuple(operator(intensity=i) for i in (1.0, 2.0, 3.0))
    assert chain_score(steep, Weights(0, 1, 0))(steep) == pytest.approx(1 + 0.36)


def test_static_blocks_shrink_from_the_right_until_they_fit():
    costs = {"a": 40, "b": 40, "c": 40, "d": 10, "e": 10, "f": 10, "g": 10}
    chain = tuple(operator(name, registers=cost) for name, cost in costs.items())
    assert names(static_plan(chain, BOUNDLESS)) == [["a", "b", "c"], ["d", "e", "f"], ["g"]]
    assert names(static_plan(chain, Limits(90, 100, 0))) == [["a", "b"], ["c", "d", "e"], ["f", "g"]]
    assert names(static_plan(chain, BOUNDLESS, size=10)) == [list("abcdefg")]


def test_the_greedy_solver_extends_while_the_score_exceeds_the_threshold():
    chain = tuple(operator(name) for name in "abcde")
    scores = {"ab": 0.6, "abc": 0.5, "cd": 0.51, "cde": 0.9}

    def score(region):
        return scores["".join(op.name for op in region)]

    assert names(greedy_plan(chain, BOUNDLESS, score, threshold=0.5)) == [["a", "b"], ["c", "d", "e"]]
    # It never asks for the score of an operator alone: `scores` has none, and such a region is always accepted.
    low = dict.fromkeys(["ab", "bc", "cd", "de"], 0.5)
    assert names(greedy_plan(chain, BOUNDLESS, lambda r: low["".join(op.name for op in r)], 0.5)) == [
        [x] for x in "abcde"
    ]


def test_the_adaptive_threshold_moves_linearly_with_entropy():
    threshold = functools.partial(adaptive_threshold, bins=64, base=0.52, responsiveness=0.1)
    assert threshold(0.0) == 0.52
    assert threshold(math.log(64)) == pytest.approx(0.62)
    assert threshold(math.log(8)) == pytest.approx(0.57)
    assert threshold(math.log(8), responsiveness=-0.1) == pytest.approx(0.47)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: chain_score(()), "chain: got no operators"),
        (lambda: static_plan((), BOUNDLESS), "chain: got no operators"),
        (lambda: greedy_plan((), BOUNDLESS, utility), "chain: got no operators"),
        (lambda: optimal_plan((), BOUNDLESS, utility), "chain: got no operators"),
        (lambda: static_plan((operator(),), BOUNDLESS, size=0), "size: got 0"),
        (lambda: max_depth(-1, 1), "shared_memory: got -1"),
        (lambda: max_depth(1, 0), "per_operator: got 0"),
        (lambda: adaptive_threshold(1.0, 1, 0.5, 0.1), "bins: got 1"),
        # 5.0 "nats" of 64 bins, the paper's own base threshold, is in bits.
        (lambda: adaptive_threshold(5.0, 64, 0.5, 0.1), r"entropy: got 5.0, wanted nats between 0 and ln 64 = 4.1589"),
        (lambda: adaptive_threshold(math.nan, 64, 0.5, 0.1), "entropy: got nan"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("solver", SOLVERS)
def test_an_operator_that_fits_nowhere_is_named(solver):
    chain = (operator("small"), dataclasses.replace(operator("large"), registers=1000))
    with pytest.raises(ValueError, match="chain: got large, which alone exceed the limits"):
        SOLVERS[solver](chain, Limits(100, 100, 0.5))
