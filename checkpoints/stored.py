"""A tensor inside a file: where its bytes lie, known before any of them is read."""

import dataclasses
import math
import os
from pathlib import Path
from typing import BinaryIO

import numpy as np

from mamba_jax.checkpoints.files import open_regular

MAX_AXES = 32  # that an array of any numpy may have
Version = tuple[int, int, int, int]


def version_of(stream: BinaryIO) -> Version:
    """What tells an open file from one that took its place, or was written to: device, inode, size, time in ns."""
    status = os.fstat(stream.fileno())
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor at rest. Its bounds were checked against the file when the file was opened.

    Attributes:
        file: the file that holds it.
        version: of the file when its bounds were read.
        offset: first byte of its storage.
        nbytes: bytes of its storage, which a view may not fill.
        dtype: numpy dtype of the elements.
        shape: its shape.
        start: first element of the view within the storage.
        strides: elements between neighbours along each axis; None is C order.
    """

    file: Path
    version: Version
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
        """The tensor, mapped to memory read-only; its pages leave memory with the last reference to the array.

        Raises:
            ValueError: if the file is not the one whose bounds were read.
            OSError: if it cannot be read.
        """
        if not self.size:
            return np.empty(self.shape, self.dtype)
        with open_regular(self.file) as stream:
            if version_of(stream) != self.version:
                raise ValueError(f"{self.file}: was replaced or written to while it was being loaded")
            storage = np.memmap(stream, np.uint8, mode="r", offset=self.offset, shape=(self.nbytes,))
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
