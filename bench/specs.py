"""Named shapes of the ops, shared by the tests of every implementation and by the benchmarks."""

import dataclasses
import math
from typing import Any, Literal

import numpy as np

SkipKind = Literal["none", "head", "channel"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SSDSpec:
    """One case of Mamba-2's scan: sizes, the optional inputs it has, and the chunk sizes worth trying."""

    name: str
    b: int = 1
    l: int  # noqa: E741 - the field's letter for a length
    h: int
    p: int
    g: int = 1
    n: int
    chunks: tuple[int, ...]
    D: SkipKind = "head"
    gate: bool = False
    dt_bias: bool = True
    initial_state: bool = False
    dt_limit: tuple[float, float] = (0.0, math.inf)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScanSpec:
    """One case of Mamba-1's scan."""

    name: str
    b: int = 1
    l: int  # noqa: E741
    d: int
    n: int = 16
    chunks: tuple[int, ...]
    D: bool = True
    gate: bool = True
    dt_bias: bool = True
    initial_state: bool = False
    dt_limit: tuple[float, float] = (0.0, math.inf)


SSD_SPECS = (
    SSDSpec(name="plain", b=2, l=37, h=4, p=8, n=16, chunks=(1, 8, 37, 64), D="none", dt_bias=False),
    SSDSpec(name="grouped", b=2, l=48, h=6, p=8, g=3, n=16, chunks=(16, 48), initial_state=True),
    SSDSpec(name="full", b=2, l=50, h=4, p=8, g=2, n=16, chunks=(7, 16), D="channel", gate=True, initial_state=True),
    SSDSpec(name="odd", l=100, h=6, p=80, g=3, n=96, chunks=(48,), gate=True),
    SSDSpec(name="one", b=2, l=1, h=4, p=8, n=16, chunks=(1, 64), gate=True, initial_state=True),
    SSDSpec(name="limited", l=40, h=4, p=8, n=16, chunks=(16,), dt_limit=(0.1, 0.5), initial_state=True),
    SSDSpec(name="long", l=4096, h=2, p=8, n=8, chunks=(64, 256)),
)
SCAN_SPECS = (
    ScanSpec(name="plain", b=2, l=37, d=12, n=5, chunks=(1, 8, 37, 64), D=False, gate=False, dt_bias=False),
    ScanSpec(name="full", b=2, l=50, d=24, chunks=(7, 16, 64), initial_state=True),
    ScanSpec(name="odd", l=100, d=80, n=6, chunks=(48, 100)),
    ScanSpec(name="one", b=2, l=1, d=16, chunks=(1, 64), initial_state=True),
    ScanSpec(name="limited", l=40, d=16, chunks=(16, 40), dt_limit=(0.1, 0.5), initial_state=True),
    ScanSpec(name="long", l=4096, d=8, n=8, chunks=(64, 4096)),
)
# Sizes that the kernels for GPUs take; they are interpreted, which is slow, so these are few and small.
SSD_KERNEL_SPECS = (
    SSDSpec(name="grouped", l=150, h=2, p=64, g=2, n=64, chunks=(64,), initial_state=True),
    SSDSpec(name="limited", l=390, h=1, p=64, n=128, chunks=(64,), D="none", dt_limit=(0.1, 0.5)),
    SSDSpec(name="gated", b=2, l=80, h=1, p=64, n=64, chunks=(64,), D="channel", gate=True, initial_state=True),
)
SCAN_KERNEL_SPECS = (
    ScanSpec(name="gated", l=42, d=256, chunks=(16,), initial_state=True),
    ScanSpec(name="rows", b=2, l=24, d=256, chunks=(16,), D=False, gate=False, dt_bias=False, initial_state=True),
)
# What a layer of the published 130M and 2.7B models asks for.
SSD_BENCH = tuple(
    SSDSpec(name=f"mamba2-{size}-{length}", l=length, h=heads, p=64, n=128, chunks=(64, 128, 256))
    for size, heads in (("130m", 24), ("2.7b", 80))
    for length in (512, 2048)
)
SCAN_BENCH = tuple(
    ScanSpec(name=f"mamba1-{size}-{length}", l=length, d=d, chunks=(16, 64, length))
    for size, d in (("130m", 1536), ("2.8b", 5120))
    for length in (512, 2048)
)


def ssd_inputs(spec: SSDSpec, seed: int = 0) -> dict[str, Any]:
    """Random float32 arguments of `ssd` by name; dt comes before its softplus and is about 0.01 to 1 after it."""
    rng, s = np.random.default_rng(seed), spec
    skip = {"none": None, "head": (s.h,), "channel": (s.h, s.p)}[s.D]
    return {
        "x": _normal(rng, s.b, s.l, s.h, s.p),
        "dt": _normal(rng, s.b, s.l, s.h) - 2,
        "A": -rng.uniform(0.5, 8.0, s.h).astype(np.float32),
        "B": _normal(rng, s.b, s.l, s.g, s.n),
        "C": _normal(rng, s.b, s.l, s.g, s.n) * np.float32(s.n**-0.5),
        "D": None if skip is None else _normal(rng, *skip),
        "z": _normal(rng, s.b, s.l, s.h, s.p) if s.gate else None,
        "dt_bias": 0.1 * _normal(rng, s.h) if s.dt_bias else None,
        "dt_softplus": True,
        "dt_limit": s.dt_limit,
        "initial_state": _normal(rng, s.b, s.h, s.p, s.n) if s.initial_state else None,
    }


def scan_inputs(spec: ScanSpec, seed: int = 0) -> dict[str, Any]:
    """Random float32 arguments of `selective_scan` by name."""
    rng, s = np.random.default_rng(seed), spec
    return {
        "x": _normal(rng, s.b, s.l, s.d),
        "dt": _normal(rng, s.b, s.l, s.d) - 2,
        "A": -rng.uniform(0.5, 8.0, (s.d, s.n)).astype(np.float32),
        "B": _normal(rng, s.b, s.l, s.n),
        "C": _normal(rng, s.b, s.l, s.n) * np.float32(s.n**-0.5),
        "D": _normal(rng, s.d) if s.D else None,
        "z": _normal(rng, s.b, s.l, s.d) if s.gate else None,
        "dt_bias": 0.1 * _normal(rng, s.d) if s.dt_bias else None,
        "dt_softplus": True,
        "dt_limit": s.dt_limit,
        "initial_state": _normal(rng, s.b, s.n, s.d) if s.initial_state else None,
    }


def _normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)
