"""Compiled executables by what they are for: found with a dictionary look-up, compiled once ahead of time.

A program takes its weights as arguments, so one serves every model of its shape.
"""

import concurrent.futures
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Hashable

import jax

from mamba_jax.scheduler.chunks import ChunkSize

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ProgramKey:
    """Everything that makes two programs different; the test for one and its place in the store are the same key.

    Attributes:
        kind: what it does: "init", "prefill", "score", "embed", "decode" or "row".
        config: the architecture.
        dtype: of the weights.
        batch: rows.
        length: positions a call reads, or the most tokens a call generates.
        chunk_size: of the scans, one for all layers or one a layer; 0 where there is none.
        placement: platform, device kind and sharding of the weights.
        variant: options that change the program ("greedy", "sample", an estimator).
        implementation: of the scans or steps: "xla" or "pallas".
    """

    kind: str
    config: Hashable
    dtype: str
    batch: int
    length: int
    chunk_size: ChunkSize
    placement: Hashable
    variant: str = ""
    implementation: str = "xla"

    def __str__(self) -> str:
        variant = f" {self.variant}" if self.variant else ""
        chunk = f" chunk {self.chunk_size}" if self.chunk_size else ""
        kernels = "" if self.implementation == "xla" else f" {self.implementation}"
        return f"{self.kind}{variant} batch {self.batch} length {self.length}{chunk} {self.dtype}{kernels}"


@dataclasses.dataclass(frozen=True)
class Compilation:
    """One compilation that happened.

    Attributes:
        key: the program.
        seconds: tracing, lowering and compiling, or fetching from the persistent cache.
    """

    key: ProgramKey
    seconds: float


class ColdProgramError(RuntimeError):
    """A program was wanted that a strict table does not have."""


class ProgramTable:
    """Programs by key. Safe to share among threads; a program is compiled once, and different ones side by side.

    Attributes:
        compilations: what was compiled, in order of completion.
        complete: everything that is expected was compiled ahead: a further compilation logs a warning.
        strict: where the table is complete, a further compilation is an error.
    """

    def __init__(self) -> None:
        self.compilations: list[Compilation] = []
        self.complete = False
        self.strict = False
        self._programs: dict[ProgramKey, jax.stages.Compiled] = {}
        self._pending: dict[ProgramKey, concurrent.futures.Future[jax.stages.Compiled]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._programs)

    def __contains__(self, key: ProgramKey) -> bool:
        return key in self._programs

    def get(
        self, key: ProgramKey, lower: Callable[[], jax.stages.Lowered], *, expected: bool = False
    ) -> jax.stages.Compiled:
        """The program of `key`, compiled from `lower()` if this is the first call for it.

        Args:
            key: which.
            lower: traces and lowers it.
            expected: compiling it is no surprise, though the table was said to be complete.

        Raises:
            ColdProgramError: if it has to be compiled in a complete, strict table.
        """
        program = self._programs.get(key)
        if program is not None:
            return program
        while True:
            with self._lock:
                if key in self._programs:
                    return self._programs[key]
                pending = self._pending.get(key)
                if pending is None:
                    self._refuse_or_warn(key, expected)
                    mine: concurrent.futures.Future[jax.stages.Compiled] = concurrent.futures.Future()
                    self._pending[key] = mine
            if pending is None:
                return self._compile(key, lower, mine)
            try:
                return pending.result()
            except concurrent.futures.CancelledError:  # its thread was interrupted: this one compiles it instead
                continue

    def _refuse_or_warn(self, key: ProgramKey, expected: bool) -> None:
        if not self.complete or expected:
            return
        if self.strict:
            raise ColdProgramError(f"{key}: not among the programs that were compiled ahead; warm it too")
        logger.warning("compiling %s, which was not compiled ahead", key)

    def _compile(
        self,
        key: ProgramKey,
        lower: Callable[[], jax.stages.Lowered],
        pending: concurrent.futures.Future[jax.stages.Compiled],
    ) -> jax.stages.Compiled:
        start = time.perf_counter()
        try:
            program = lower().compile()
            with self._lock:
                self._programs[key] = program
                self.compilations.append(Compilation(key, time.perf_counter() - start))
                del self._pending[key]
            pending.set_result(program)
        except BaseException as error:
            with self._lock:
                self._pending.pop(key, None)
            if isinstance(error, Exception):
                pending.set_exception(error)
            else:  # Ctrl-C is for the thread that got it, not for those that wait
                pending.cancel()
            raise
        logger.info("compiled %s in %.2f s", key, time.perf_counter() - start)
        return program
