"""A tensor inside a file: where its bytes lie, known before any of them is read."""

import dataclasses
import math
from pathlib import Path

import numpy as np


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor at rest. Its bounds were checked against the file when the file was opened.

    Attributes:
        file: the file that holds it.
        offset: first byte of its storage.
        nbytes: bytes of its storage, which a view may not fill.
        dtype: numpy dtype of the elements.
        shape: its shape.
        start: first element of the view within the storage.
        strides: elements between neighbours along each axis; None is C order.
    """

    file: Path
    offset: int
    nbytes: int
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int = 0
    strides: tuple[int, ...] | None = None

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def map(self) -> np.ndarray:
        """The tensor, mapped to memory read-only; its pages leave memory with the last reference to the array."""
        if not self.size:
            return np.empty(self.shape, self.dtype)
        storage = np.memmap(self.file, np.uint8, mode="r", offset=self.offset, shape=(self.nbytes,))
        size = self.dtype.itemsize
        strides = None if self.strides is None else tuple(stride * size for stride in self.strides)
        return np.ndarray(self.shape, self.dtype, buffer=storage, offset=self.start * size, strides=strides)


def numpy_dtype(dtype: str) -> np.dtype:
    """The little-endian numpy dtype of that name, those of ml_dtypes included."""
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, dtype)) if hasattr(ml_dtypes, dtype) else np.dtype(dtype).newbyteorder("<")


def refuse_pointer(head: bytes, file: Path) -> None:
    """Refuse what git leaves in place of a large file that was not fetched.

    Raises:
        ValueError: if `head`, the first bytes of `file`, begin a Git LFS pointer.
    """
    if head.startswith(b"version https://git-lfs"):
        raise ValueError(f"{file}: this is a Git LFS pointer, not the weights: run `git lfs pull`, or load by hub id")
