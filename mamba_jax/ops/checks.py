"""Argument checks shared by the ops: a `ValueError` that names the argument, what came and what was wanted."""

import math
from typing import Any

import jax.numpy as jnp


def check_shape(name: str, array: Any, want: tuple[int, ...], dims: str) -> None:
    """Raise a `ValueError` unless `array` has the shape `want`; `dims` spells it in letters, as "(b, l, h)"."""
    if array.shape != want:
        raise ValueError(f"{name}: got shape {array.shape}, wanted {dims} = {want}")


def check_rank(name: str, array: Any, dims: str) -> None:
    """Raise a `ValueError` unless `array` has one axis for each letter of `dims`, as "(b, l, h)"."""
    rank = dims.count(",") + 1
    if array.ndim != rank or math.prod(array.shape) == 0:
        raise ValueError(f"{name}: got shape {array.shape}, wanted {rank} axes {dims} of at least 1")


def check_same_dtype(**arrays: Any) -> None:
    """Raise a `ValueError` unless the arrays that are not None share one dtype."""
    dtypes = {name: str(array.dtype) for name, array in arrays.items() if array is not None}
    if len(set(dtypes.values())) > 1:
        raise ValueError(f"{', '.join(dtypes)}: got dtypes {', '.join(dtypes.values())}, wanted one for all")


def check_dt_limit(dt_limit: tuple[float, float]) -> None:
    """Raise a `ValueError` unless dt_limit is an interval of non-negative steps."""
    low, high = dt_limit
    if not 0.0 <= low <= high:
        raise ValueError(f"dt_limit: got {dt_limit}, wanted 0 <= low <= high")


def check_positions(lengths: Any, segment_ids: Any, b: int, seqlen: int) -> None:
    """Check the two ways of saying which positions are valid, of which at most one may be used."""
    if lengths is not None and segment_ids is not None:
        raise ValueError("lengths and segment_ids: got both, wanted at most one of them")
    for name, array, want, dims in (
        ("lengths", lengths, (b,), "(b,)"),
        ("segment_ids", segment_ids, (b, seqlen), "(b, l)"),
    ):
        if array is not None:
            check_shape(name, array, want, dims)
            if not jnp.issubdtype(array.dtype, jnp.integer):
                raise ValueError(f"{name}: got dtype {array.dtype}, wanted integers")


def check_scan(
    chunk_size: int,
    dt_limit: tuple[float, float],
    lengths: Any,
    segment_ids: Any,
    num_segments: int | None,
    row_shape: tuple[int, int],
) -> None:
    """Check the arguments that both scans share; `row_shape` is (b, l)."""
    if chunk_size < 1:
        raise ValueError(f"chunk_size: got {chunk_size}, wanted at least 1")
    check_dt_limit(dt_limit)
    check_positions(lengths, segment_ids, *row_shape)
    if num_segments is not None:
        if segment_ids is None:
            raise ValueError(f"num_segments: got {num_segments} without segment_ids, wanted both or neither")
        if num_segments < 1:
            raise ValueError(f"num_segments: got {num_segments}, wanted at least 1")
