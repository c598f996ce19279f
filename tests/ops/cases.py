"""What the tests of both scans share: one description of each op, so that a case is written once and run on both."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.specs import SCAN_SPECS, SSD_SPECS, ScanSpec, SSDSpec, scan_inputs, ssd_inputs
from mamba_jax.ops.reference import selective_scan_ref, ssd_ref
from mamba_jax.ops.scan import selective_scan, selective_scan_step
from mamba_jax.ops.ssd import ssd, ssd_step

STATIC = ("chunk_size", "dt_softplus", "dt_limit", "num_segments")
IN_TIME = ("x", "dt", "B", "C", "z")  # arguments with a position axis
IN_DTYPE = ("x", "B", "C", "z")  # arguments in the model's dtype


@dataclasses.dataclass(frozen=True)
class Op:
    """One of the two scans with its step, its reference and its inputs."""

    name: str
    scan: Callable[..., Any]
    step: Callable[..., Any]
    reference: Callable[..., Any]
    inputs: Callable[..., dict[str, Any]]
    specs: tuple[Any, ...]
    small: Any

    def run(self, inputs: dict[str, Any], **more: Any) -> tuple[Any, Any]:
        return jax.jit(self.scan, static_argnames=STATIC)(**inputs, **more)


OPS = (
    Op(
        name="ssd",
        scan=ssd,
        step=ssd_step,
        reference=ssd_ref,
        inputs=ssd_inputs,
        specs=SSD_SPECS,
        small=SSDSpec(
            name="small", b=2, l=40, h=4, p=6, g=2, n=8, chunks=(16,), D="channel", gate=True, initial_state=True
        ),
    ),
    Op(
        name="scan",
        scan=selective_scan,
        step=selective_scan_step,
        reference=selective_scan_ref,
        inputs=scan_inputs,
        specs=SCAN_SPECS,
        small=ScanSpec(name="small", b=2, l=40, d=12, n=5, chunks=(16,), initial_state=True),
    ),
)


def in_dtype(inputs: dict[str, Any], dtype: str) -> dict[str, Any]:
    """The inputs with x, B, C and z in a dtype."""
    return {k: jnp.asarray(v, dtype) if k in IN_DTYPE and v is not None else v for k, v in inputs.items()}


def piece(inputs: dict[str, Any], start: int, stop: int, rows: slice = slice(None)) -> dict[str, Any]:
    """The inputs of some positions, of some rows."""
    cut = {k: v[rows, start:stop] if k in IN_TIME and v is not None else v for k, v in inputs.items()}
    if inputs["initial_state"] is not None:
        cut["initial_state"] = inputs["initial_state"][rows]
    return cut


def end_of_float32(inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs with steps of 3e38 whose x brings dt x back to common numbers, or to none, while B.C dt overflows."""
    dt = np.random.default_rng(6).uniform(0.01, 1.0, inputs["dt"].shape).astype(np.float32)
    x, A = inputs["x"].copy(), inputs["A"].copy()
    x[:, [3, 17]] *= 1e-35
    x[:, [18, 39]] = 0.0
    A[-1] = 0.0
    dt[:, [3, 17, 18, 39]] = 3e38
    changed = {"x": x, "dt": dt, "A": A, "B": 3 * inputs["B"], "D": inputs["D"] / 3}
    return inputs | changed | {"dt_softplus": False, "dt_bias": None}


def at(inputs: dict[str, Any], t: int) -> dict[str, Any]:
    """The inputs of one position, without the position axis; no initial state."""
    cut = {k: v[:, t] if k in IN_TIME and v is not None else v for k, v in inputs.items()}
    del cut["initial_state"]
    return cut


def padded(inputs: dict[str, Any], left: int, right: int, fill: float = 3.0) -> dict[str, Any]:
    """The inputs with positions of rubbish before and after."""

    def pad(v: Any) -> Any:
        return np.pad(v, [(0, 0), (left, right)] + [(0, 0)] * (v.ndim - 2), constant_values=fill)

    return {k: pad(v) if k in IN_TIME and v is not None else v for k, v in inputs.items()}


def error(got: Any, want: Any) -> float:
    """Largest absolute error, both sides in float64; infinite if anything is not finite."""
    got, want = np.asarray(got).astype(np.float64), np.asarray(want).astype(np.float64)
    assert got.shape == want.shape
    return float(np.abs(got - want).max(initial=0.0)) if np.isfinite(got).all() else float("inf")
