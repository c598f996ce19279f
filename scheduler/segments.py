"""Which compiled lengths cover a text: segments read one after the other, each continuing from the cache before it.

The cover is the cheapest one under given costs: measured seconds where somebody measured (`calibration.py`), else a
stated rule. Batches are covered more simply: dummy rows fill them up to a compiled size.
"""

import functools
from collections.abc import Iterable, Mapping
from typing import cast

from mamba_jax.arguments import as_integer, is_integer

# Beyond these a plan is a mistake, or would take minutes and gigabytes to make.
LONGEST_TEXT = 2**26  # positions
LONGEST_SEGMENT = 2**14  # positions that one program reads
MOST_ROWS = 2**16

# Without measurements a segment costs its positions and this many more: reading every weight once costs about as much.
SEGMENT_OVERHEAD = 64
DEFAULT_LENGTHS = (16, 32, 64, 128, 256, 512, 1024, 2048)
DEFAULT_COSTS = {length: float(length + SEGMENT_OVERHEAD) for length in DEFAULT_LENGTHS}
_EXACT = 4  # times the longest segment: up to here every cover is weighed


def plan_segments(length: int, costs: Mapping[int, float] = DEFAULT_COSTS) -> tuple[int, ...]:
    """The cheapest cover of `length` positions by compiled lengths.

    Exact up to four times the longest compiled length; what is beyond that is covered by the length that costs least
    for each position.

    Args:
        length: positions to cover, 1 to `LONGEST_TEXT`.
        costs: what reading a segment costs (in any unit), by compiled length.

    Returns:
        Segment lengths, longest first; their sum is at least `length`, and less than `length` without the last.

    Raises:
        ValueError: if length is out of range, or a compiled length is not 1 to `LONGEST_SEGMENT`, or a cost is not
            above 0, or there is none.
    """
    table = _checked(costs)
    best, head, tail = _cover(as_integer("length", length, 1, LONGEST_TEXT), table)
    return tuple(sorted((best,) * head + tail, reverse=True))


def lengths_used(low: int, high: int, costs: Mapping[int, float] = DEFAULT_COSTS) -> tuple[int, ...]:
    """The compiled lengths that occur in the plans of any text of `low` to `high` positions, shortest first."""
    if not 1 <= low <= high <= LONGEST_TEXT:
        raise ValueError(
            f"lengths: got {low} to {high}, wanted 1 to {LONGEST_TEXT} and the first no larger than the second"
        )
    table = _checked(costs)
    longest = max(size for size, _ in table)
    # Plans beyond the exact range are plans within it and segments of one more length, so one period shows them all.
    last = min(high, low + (_EXACT + 1) * longest)
    covers = (_cover(length, table) for length in range(low, last + 1))
    return tuple(sorted({size for best, head, tail in covers for size in (*tail, *([best] if head else []))}))


def batch_bucket(batch: int) -> int:
    """The compiled number of rows that a batch is filled up to: a power of two up to 8, then a multiple of 8."""
    batch = as_integer("batch", batch, 1, MOST_ROWS)
    return 1 << (batch - 1).bit_length() if batch <= 8 else -(-batch // 8) * 8


def batch_buckets(batch: int | Iterable[int]) -> tuple[int, ...]:
    """The compiled numbers of rows of a batch or of several, each once, the smallest first."""
    if is_integer(batch) or isinstance(batch, str | bytes) or not isinstance(batch, Iterable):
        return (batch_bucket(cast(int, batch)),)
    sizes = {batch_bucket(each) for each in batch}
    if not sizes:
        raise ValueError(f"batch: got no number of prompts in {batch!r:.80}, wanted at least one")
    return tuple(sorted(sizes))


def _checked(costs: Mapping[int, float]) -> tuple[tuple[int, float], ...]:
    fits = all(1 <= length <= LONGEST_SEGMENT and 0 < cost < float("inf") for length, cost in costs.items())
    if not costs or not fits:
        raise ValueError(
            f"costs: got {dict(costs)}, wanted a cost above 0 for each of one or more lengths from 1 to "
            f"{LONGEST_SEGMENT}"
        )
    return tuple(costs.items())


@functools.lru_cache(maxsize=65536)
def _cover(length: int, costs: tuple[tuple[int, float], ...]) -> tuple[int, int, tuple[int, ...]]:
    """The length that costs least for each position, how often it covers the beginning, and what covers the rest."""
    exact = _EXACT * max(size for size, _ in costs)
    best = min(costs, key=lambda item: (item[1] / item[0], -item[0]))[0]
    head = max(0, -(-(length - exact) // best))
    rest, first = length - head * best, _first_segments(costs)
    tail = []
    while rest > 0:
        tail.append(first[rest])
        rest -= first[rest]
    return best, head, tuple(tail)


@functools.lru_cache(maxsize=64)
def _first_segments(costs: tuple[tuple[int, float], ...]) -> tuple[int, ...]:
    """By number of positions: one segment of its cheapest cover (of equal ones, of that with fewest segments)."""
    exact = _EXACT * max(size for size, _ in costs)
    cheapest, first = [(0.0, 0)], [0]
    for length in range(1, exact + 1):
        options = []
        for size, cost in costs:
            before = cheapest[max(length - size, 0)]
            options.append(((before[0] + cost, before[1] + 1), -size))
        total, negative = min(options)
        cheapest.append(total)
        first.append(-negative)
    return tuple(first)
