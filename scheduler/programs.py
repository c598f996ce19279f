"""Compiled executables by what they are for: found with a dictionary look-up, compiled once ahead of time.

A program takes its weights as arguments, so one serves every model of its shape.
"""

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Hashable

import jax

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ProgramKey:
    """Everything that makes two programs different; the test for one and its place in the store are the same key.

    Attributes:
        kind: what it does: "prefill", "score", "embed" or "decode".
        config: the architecture.
        dtype: of the weights.
        batch: rows.
        length: positions a call reads, or the most tokens a call generates.
        chunk_size: of the scans; 0 where there is none.
        placement: platform, device kind and sharding of the weights.
        variant: options that change the program ("greedy", "sample").
    """

    kind: str
    config: Hashable
    dtype: str
    batch: int
    length: int
    chunk_size: int
    placement: Hashable
    variant: str = ""

    def __str__(self) -> str:
        variant = f" {self.variant}" if self.variant else ""
        chunk = f" chunk {self.chunk_size}" if self.chunk_size else ""
        return f"{self.kind}{variant} batch {self.batch} length {self.length}{chunk} {self.dtype}"


@dataclasses.dataclass(frozen=True)
class Compilation:
    """One compilation that happened.

    Attributes:
        key: the program.
        seconds: tracing, lowering and compiling, or fetching from the persistent cache.
    """

    key: ProgramKey
    seconds: float


class ProgramTable:
    """Programs by key. Safe to share among threads; a program is compiled once.

    Attributes:
        compilations: what was compiled, in order.
    """

    def __init__(self) -> None:
        self.compilations: list[Compilation] = []
        self._programs: dict[ProgramKey, jax.stages.Compiled] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._programs)

    def __contains__(self, key: ProgramKey) -> bool:
        return key in self._programs

    def get(self, key: ProgramKey, lower: Callable[[], jax.stages.Lowered]) -> jax.stages.Compiled:
        """The program of `key`, compiled from `lower()` if this is the first call for it."""
        program = self._programs.get(key)
        if program is not None:
            return program
        with self._lock:
            if key not in self._programs:
                start = time.perf_counter()
                self._programs[key] = lower().compile()
                self.compilations.append(Compilation(key, time.perf_counter() - start))
                logger.info("compiled %s in %.2f s", key, self.compilations[-1].seconds)
            return self._programs[key]
