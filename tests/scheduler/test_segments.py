"""Segment plans: exact covers, cheapest by the stated cost, cheap to make."""

import itertools

import pytest

from mamba_jax.scheduler.segments import DEFAULT_LENGTHS, SEGMENT_OVERHEAD, plan_segments


@pytest.mark.parametrize("length", [*range(1, 300), 2047, 2048, 2049, 5000, 100_000])
def test_a_plan_covers_the_length_and_only_its_last_segment_is_padded(length):
    plan = plan_segments(length)
    assert sum(plan) >= length
    assert sum(plan[:-1]) < length
    assert set(plan) <= set(DEFAULT_LENGTHS)
    assert list(plan) == sorted(plan, reverse=True)


def test_no_cover_of_up_to_four_segments_is_cheaper():
    sizes = (16, 64, 256)
    for length in range(1, 600, 7):
        cost = min(
            sum(plan) + SEGMENT_OVERHEAD * len(plan)
            for count in range(1, 5)
            for plan in itertools.combinations_with_replacement(sizes, count)
            if sum(plan) >= length
        )
        plan = plan_segments(length, sizes)
        assert sum(plan) + SEGMENT_OVERHEAD * len(plan) == cost


@pytest.mark.parametrize(
    ("length", "lengths", "name"), [(0, (16,), "length"), (5, (), "lengths"), (5, (0, 4), "lengths")]
)
def test_bad_arguments_are_named(length, lengths, name):
    with pytest.raises(ValueError, match=f"{name}: got"):
        plan_segments(length, lengths)
