"""Which compiled lengths cover a text: segments read one after the other, each continuing from the cache before it.

The cover is the cheapest one under given costs: measured seconds where somebody measured (`calibration.py`), else a
stated rule. Batches are covered more simply: dummy rows fill them up to a compiled size.
"""

import functools
from collections.abc import Mapping

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
        length: positions to cover, at least 1.
        costs: what reading a segment costs (in any unit), by compiled length.

    Returns:
        Segment lengths, longest first; their sum is at least `length`, and less than `length` without the last.

    Raises:
        ValueError: if length is below 1, or a compiled length or a cost is not above 0, or there is none.
    """
    if length < 1:
        raise ValueError(f"length: got {length}, wanted at least 1")
    return _cover(length, _checked(costs))


def lengths_used(low: int, high: int, costs: Mapping[int, float] = DEFAULT_COSTS) -> tuple[int, ...]:
    """The compiled lengths that occur in the plans of any text of `low` to `high` positions, shortest first."""
    if not 1 <= low <= high:
        raise ValueError(f"lengths: got {low} to {high}, wanted at least 1 and the first no larger than the second")
    table = _checked(costs)
    longest = max(size for size, _ in table)
    # Plans beyond the exact range are plans within it and segments of one more length, so one period shows them all.
    last = min(high, low + (_EXACT + 1) * longest)
    return tuple(sorted({size for length in range(low, last + 1) for size in _cover(length, table)}))


def batch_bucket(batch: int) -> int:
    """The compiled number of rows that a batch is filled up to: a power of two up to 8, then a multiple of 8."""
    if not 1 <= batch < 2**31:
        raise ValueError(f"batch: got {batch}, wanted 1 to {2**31 - 1}")
    return 1 << (batch - 1).bit_length() if batch <= 8 else -(-batch // 8) * 8


def _checked(costs: Mapping[int, float]) -> tuple[tuple[int, float], ...]:
    if not costs or min(costs) < 1 or not all(0 < cost < float("inf") for cost in costs.values()):
        raise ValueError(f"costs: got {dict(costs)}, wanted a cost above 0 for each of one or more lengths above 0")
    return tuple(costs.items())


@functools.lru_cache(maxsize=65536)
def _cover(length: int, costs: tuple[tuple[int, float], ...]) -> tuple[int, ...]:
    exact = _EXACT * max(size for size, _ in costs)
    best = min(costs, key=lambda item: (item[1] / item[0], -item[0]))[0]
    head = max(0, -(-(length - exact) // best))
    rest, first = length - head * best, _first_segments(costs)
    segments = [best] * head
    while rest > 0:
        segments.append(first[rest])
        rest -= first[rest]
    return tuple(sorted(segments, reverse=True))


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
