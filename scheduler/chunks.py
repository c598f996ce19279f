"""Chunk sizes: what they may be, and a stated rule by platform, layer kind and length for where nobody measured."""

from typing import Any

from mamba_jax.arguments import as_integers, is_integer

ChunkSize = int | tuple[int, ...]  # one for all layers, or one a layer


def default_chunk_size(platform: str, layer: str, length: int) -> int:
    """Chunk size of the scans for a block of `length` positions.

    Args:
        platform: "cpu", "gpu" ("cuda", "rocm") or "tpu".
        layer: "mamba1" or "mamba2".
        length: positions in the block.

    Returns:
        A power of two, no longer than needed to cover the block.
    """
    covering = 1 << max(length - 1, 0).bit_length()
    if platform == "cpu":
        # One position of Mamba-1 fills a CPU's cores: chunks would only add work. Mamba-2 wants at least two chunks,
        # which XLA leaves in a loop: unrolled, their intermediate results are computed several times over.
        best = {"mamba1": covering, "mamba2": min(max(covering // 2, 32), 64)}
    else:
        best = {"mamba1": 32, "mamba2": 128}
    return min(best[layer], covering)


def fit_chunk_size(chunk_size: ChunkSize, length: int) -> ChunkSize:
    """The chunk size that does the same work on `length` positions: none longer than the power of two that covers them.

    A tuple of equal sizes becomes the one size.
    """
    covering = 1 << max(length - 1, 0).bit_length()
    if isinstance(chunk_size, int):
        return min(chunk_size, covering)
    sizes = tuple(min(size, covering) for size in chunk_size)
    return sizes[0] if len(set(sizes)) == 1 else sizes


def as_chunk_size(chunk_size: Any, n_layer: int) -> ChunkSize:
    """An integer of at least 1, or one for each layer in a tuple; anything else is a ValueError."""
    sizes = [int(chunk_size)] if is_integer(chunk_size) else as_integers(chunk_size)
    if sizes is None or min(sizes, default=0) < 1 or (not is_integer(chunk_size) and len(sizes) != n_layer):
        raise ValueError(
            f"chunk_size: got {chunk_size!r}, wanted 'auto', an integer of at least 1, or a tuple of {n_layer} of them"
        )
    return sizes[0] if is_integer(chunk_size) else tuple(sizes)
