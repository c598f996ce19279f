"""Counting what XLA compiles in this process, by JAX's own events: also what no program table knows of."""

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

import jax

_COMPILED = "/jax/core/compile/backend_compile_duration"  # of every program, also one that came from the cache
_FETCHED = "/jax/compilation_cache/cache_hits"
_lock = threading.Lock()
_counting: "list[Compilations]" = []
_listening = False


@dataclasses.dataclass
class Compilations:
    """How many programs this process got, over a while.

    Attributes:
        compiled: by XLA.
        fetched: from the persistent cache, ready.
    """

    compiled: int = 0
    fetched: int = 0


@contextlib.contextmanager
def count_compilations() -> Iterator[Compilations]:
    """Count compilations of all threads while the context lasts."""
    counts = Compilations()
    with _lock:
        _listen()
        _counting.append(counts)
    try:
        yield counts
    finally:
        with _lock:
            _counting[:] = [other for other in _counting if other is not counts]


def _listen() -> None:
    global _listening  # noqa: PLW0603 - listeners cannot be taken back, so there is one for the whole process
    if not _listening:
        jax.monitoring.register_event_duration_secs_listener(_on_duration)
        jax.monitoring.register_event_listener(_on_event)
        _listening = True


def _on_duration(event: str, duration_secs: float, **_: Any) -> None:
    del duration_secs
    if event == _COMPILED:
        with _lock:
            for counts in _counting:
                counts.compiled += 1


def _on_event(event: str, **_: Any) -> None:
    if event == _FETCHED:
        with _lock:
            for counts in _counting:
                counts.fetched += 1
                counts.compiled -= 1  # its time is reported like a compilation's
