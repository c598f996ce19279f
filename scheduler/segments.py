"""Which compiled lengths cover a text: segments read one after the other, each continuing from the cache before it."""

import functools
from collections.abc import Sequence

# A segment's fixed cost in positions: reading every weight once costs about as much as this many more positions.
SEGMENT_OVERHEAD = 64
DEFAULT_LENGTHS = (16, 32, 64, 128, 256, 512, 1024, 2048)


def plan_segments(length: int, lengths: Sequence[int] = DEFAULT_LENGTHS) -> tuple[int, ...]:
    """The cheapest cover of `length` positions by compiled lengths, longest first; only the last may have padding.

    Args:
        length: positions to cover, at least 1.
        lengths: compiled lengths, each at least 1.

    Returns:
        Segment lengths whose sum is at least `length`, and less than `length` without the last.

    Raises:
        ValueError: if length is below 1, or lengths is empty or holds a length below 1.
    """
    if length < 1:
        raise ValueError(f"length: got {length}, wanted at least 1")
    if not lengths or min(lengths) < 1:
        raise ValueError(f"lengths: got {tuple(lengths)}, wanted at least one length, each at least 1")
    sizes = tuple(sorted(set(lengths), reverse=True))
    # Below twice the longest every cover is tried; above that the longest is always the cheapest next segment.
    head = max(0, length // sizes[0] - 1)
    return (sizes[0],) * head + _cheapest(length - head * sizes[0], sizes)


@functools.lru_cache(maxsize=65536)
def _cheapest(length: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    covering = [size for size in sizes if size >= length]
    plans: list[tuple[int, ...]] = [(min(covering),)] if covering else []
    plans += [(size, *_cheapest(length - size, sizes)) for size in sizes if size < length]
    return min(plans, key=lambda plan: (sum(plan) + SEGMENT_OVERHEAD * len(plan), len(plan), [-s for s in plan]))
