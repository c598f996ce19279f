"""Segment plans: exact covers, cheapest under given costs, cheap to make."""

import functools
import time

import pytest

from mamba_jax.scheduler.segments import DEFAULT_COSTS, batch_bucket, lengths_used, plan_segments

MEASURED = {16: 3.1, 64: 4.0, 256: 21.0, 1024: 60.0}  # not in proportion: 256 costs more than four times 64


@pytest.mark.parametrize("costs", [DEFAULT_COSTS, MEASURED], ids=["rule", "measured"])
@pytest.mark.parametrize("length", [*range(1, 300), 2047, 2048, 2049, 5000, 100_000])
def test_a_plan_covers_the_length_and_only_its_last_segment_is_padded(length, costs):
    plan = plan_segments(length, costs)
    assert sum(plan) >= length
    assert sum(plan[:-1]) < length
    assert set(plan) <= set(costs)
    assert list(plan) == sorted(plan, reverse=True)


@pytest.mark.parametrize("costs", [DEFAULT_COSTS, MEASURED, {7: 2.0, 5: 1.5}], ids=["rule", "measured", "odd"])
def test_no_cover_is_cheaper(costs):
    @functools.cache
    def cheapest(length):
        return 0.0 if length <= 0 else min(cost + cheapest(length - size) for size, cost in costs.items())

    for length in range(1, 900):
        assert sum(costs[size] for size in plan_segments(length, costs)) == pytest.approx(cheapest(length), rel=1e-12)


def test_far_beyond_the_longest_segment_the_cheapest_a_position_repeats():
    plan = plan_segments(1_000_000, MEASURED)
    assert plan.count(1024) >= 970  # 60 / 1024 is the least there is
    assert plan_segments(1_000_000, {16: 1.0, 64: 5.0}) == (16,) * 62500


@pytest.mark.parametrize(("low", "high"), [(1, 1), (1, 40), (17, 200), (900, 1000), (3000, 3000), (1, 9000)])
@pytest.mark.parametrize("costs", [DEFAULT_COSTS, MEASURED], ids=["rule", "measured"])
def test_the_lengths_used_are_those_of_all_plans(low, high, costs):
    plans = (plan_segments(length, costs) for length in range(low, high + 1))
    assert lengths_used(low, high, costs) == tuple(sorted({size for plan in plans for size in plan}))


def test_planning_costs_microseconds():
    plan_segments(1)  # makes the table
    start = time.perf_counter()
    for length in range(1, 4001):
        plan_segments(length)
    assert (time.perf_counter() - start) / 4000 < 200e-6  # some 10 on an idle machine


def test_batches_are_filled_up():
    assert [batch_bucket(n) for n in (1, 2, 3, 4, 5, 8, 9, 16, 17, 100)] == [1, 2, 4, 4, 8, 8, 16, 16, 24, 104]
    with pytest.raises(ValueError, match="batch: got 0"):
        batch_bucket(0)
    with pytest.raises(ValueError, match="batch: got 1000000000000, wanted 1 to 2147483647"):
        batch_bucket(10**12)


@pytest.mark.parametrize(
    ("length", "costs", "name"),
    [(0, {16: 1.0}, "length"), (5, {}, "costs"), (5, {0: 1.0}, "costs"), (5, {16: 0.0}, "costs")],
)
def test_bad_arguments_are_named(length, costs, name):
    with pytest.raises(ValueError, match=f"{name}: got"):
        plan_segments(length, costs)


def test_a_bad_range_is_named():
    with pytest.raises(ValueError, match="lengths: got 5 to 4"):
        lengths_used(5, 4)
