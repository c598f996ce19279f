"""Chunk size when nobody measured: a stated rule by platform, layer kind and length."""


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
