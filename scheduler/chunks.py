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
    # One position of Mamba-1 fills a CPU's cores: chunks would only add work.
    best = {"mamba1": covering, "mamba2": 64} if platform == "cpu" else {"mamba1": 32, "mamba2": 128}
    return min(best[layer], covering)
