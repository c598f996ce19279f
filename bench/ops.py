"""Time the ops alone: `python -m bench.ops [--length 512] [--out ops.json]`.

Prints JSON: the device, and for each op its median time, compile time, temporaries and what that means as bandwidth
or rate. Rounds visit all ops in turn and a probe of the memory's bandwidth with them, so that a machine whose speed
wanders (a shared CPU) does so for all of them alike: compare figures of one run.
"""

import dataclasses
import functools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import typer

from bench.common import environment, seconds_of
from bench.specs import SCAN_BENCH, SSD_BENCH, SSDSpec, scan_inputs, ssd_inputs
from mamba_jax.ops.linear import linear
from mamba_jax.ops.scan import selective_scan, selective_scan_step
from mamba_jax.ops.ssd import ssd, ssd_step

# (out, in) of the 130M models' weights: Mamba-2's in_proj, out_proj and head.
MATRICES = ((3352, 768), (768, 1536), (50288, 768))
DTYPES = ("float32", "bfloat16", "float16")
STREAM_BYTES = 128 << 20  # weights that a matvec case reads, more than caches hold
STEPS = 64


@dataclasses.dataclass
class Case:
    """One compiled call; `work` is what it moves or computes, in `unit`s, and it does so `repeats` times a call."""

    name: str
    call: Callable[..., Any]
    args: tuple[Any, ...]
    work: float
    unit: str
    compile_s: float
    temporaries_mib: float
    repeats: int = 1
    seconds: list[float] = dataclasses.field(default_factory=list)


def compiled(name: str, f: Callable[..., Any], args: tuple[Any, ...], work: float, unit: str, repeats: int = 1) -> Case:
    """Compile a call and run it once."""
    lowered = jax.jit(f).lower(*args)
    start = time.perf_counter()
    call = lowered.compile()
    compile_s = time.perf_counter() - start
    jax.block_until_ready(call(*args))
    memory = call.memory_analysis()
    temporaries = memory.temp_size_in_bytes / 2**20 if memory else float("nan")
    return Case(name, call, args, work, unit, compile_s, temporaries, repeats)


def probe() -> Case:
    """One large float32 matrix-vector product: what the memory gives."""
    weight = jnp.ones((STREAM_BYTES // 4096, 1024))
    return compiled("probe", linear, (jnp.ones((1, 1024)), weight), weight.nbytes / 1e9, "GB")


def matvec(shape: tuple[int, int], dtype: str, rows: int) -> Case:
    """Products with enough different weights to come from memory, each waiting for the one before."""
    size = shape[0] * shape[1] * jnp.dtype(dtype).itemsize
    count = max(1, STREAM_BYTES // size)
    weights = [jax.random.normal(jax.random.key(i), shape, jnp.float32).astype(dtype) for i in range(count)]

    def chain(x: Any, weights: Any) -> Any:
        for weight in weights:
            x = x + 1e-6 * linear(x, weight)[:, :1]
        return x

    x = jnp.ones((rows, shape[1]), dtype)
    return compiled(f"linear {shape[0]}x{shape[1]} {dtype} rows={rows}", chain, (x, weights), count * size / 1e9, "GB")


def scan_case(
    name: str, op: Callable[..., Any], inputs: dict[str, Any], dtype: str, flop: float, **static: Any
) -> Case:
    """One call of a scan over a whole sequence."""
    arrays, fixed = split(inputs, dtype)
    f = functools.partial(lambda arrays, **static: op(**arrays, **static), **fixed, **static)
    return compiled(name, f, (arrays,), flop / 1e9, "GFLOP")


def step_case(name: str, op: Callable[..., Any], inputs: dict[str, Any], dtype: str) -> Case:
    """Single steps in a loop on the device, each on the state of the one before."""
    arrays, fixed = split(inputs, dtype)
    state = arrays.pop("initial_state")
    arrays = {k: v[:, 0] if k in ("x", "dt", "B", "C", "z") else v for k, v in arrays.items()}

    def loop(arrays: Any, state: Any) -> Any:
        def step(_: int, carry: Any) -> Any:
            x, state = carry
            y, state = op(**arrays | {"x": x}, **fixed, state=state)
            return x + 1e-6 * y, state

        return jax.lax.fori_loop(0, STEPS, step, (arrays["x"], state))

    return compiled(name, loop, (arrays, state), STEPS * 2 * state.nbytes / 1e9, "GB", STEPS)


def split(inputs: dict[str, Any], dtype: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arrays (x, B, C, z in `dtype`) and static arguments of an op."""
    arrays = {k: jnp.asarray(v) for k, v in inputs.items() if hasattr(v, "shape")}
    arrays = {k: v.astype(dtype) if k in ("x", "B", "C", "z") else v for k, v in arrays.items()}
    return arrays, {k: v for k, v in inputs.items() if k in ("dt_softplus", "dt_limit")}


def ssd_flop(spec: SSDSpec, q: int) -> float:
    """Of the products: inside chunks, into the states, out of them."""
    return 2.0 * spec.b * spec.l * (q * (spec.g * spec.n + spec.h * spec.p) + 2 * spec.h * spec.p * spec.n)


def cases(length: int, size: str) -> list[Case]:
    """All cases of one length and one published size ("130m" or the largest)."""
    found = [matvec(shape, dtype, rows) for shape in MATRICES for dtype in DTYPES for rows in (1, 16)]
    for spec in (s for s in SSD_BENCH if s.l == length and size in s.name):
        inputs = ssd_inputs(spec)
        for dtype in DTYPES:
            for q in spec.chunks:
                name = f"ssd {spec.name} {dtype} chunk={q}"
                found.append(scan_case(name, ssd, inputs, dtype, ssd_flop(spec, q), chunk_size=q))
            first = ssd_inputs(dataclasses.replace(spec, l=1, initial_state=True))
            found.append(step_case(f"ssd_step {spec.name} {dtype}", ssd_step, first, dtype))
    for scan in (s for s in SCAN_BENCH if s.l == length and size in s.name):
        flop = 7.0 * scan.b * scan.l * scan.d * scan.n
        for q in scan.chunks:
            name = f"selective_scan {scan.name} float32 chunk={q}"
            found.append(scan_case(name, selective_scan, scan_inputs(scan), "float32", flop, chunk_size=q))
        first = scan_inputs(dataclasses.replace(scan, l=1, initial_state=True))
        found.append(step_case(f"selective_scan_step {scan.name} float32", selective_scan_step, first, "float32"))
    return found


def main(length: int = 512, size: str = "130m", rounds: int = 9, out: Path | None = None) -> None:
    """Measure and print; lengths and sizes are those of `bench.specs`."""
    everything = [probe(), *cases(length, size)]
    for _ in range(rounds):
        for case in everything:
            case.seconds.append(seconds_of(case.call, *case.args))
    report = environment("ops") | {
        "rounds": rounds,
        "ops": [
            {
                "name": case.name,
                "median_ms": round(1e3 * statistics.median(case.seconds) / case.repeats, 4),
                "best_ms": round(1e3 * min(case.seconds) / case.repeats, 4),
                f"{case.unit}/s": round(case.work / statistics.median(case.seconds), 1),
                "compile_s": round(case.compile_s, 2),
                "temporaries_mib": round(case.temporaries_mib, 1),
            }
            for case in everything
        ],
    }
    text = json.dumps(report, indent=1)
    if out is not None:
        out.write_text(text + "\n")
    typer.echo(text)


if __name__ == "__main__":
    typer.run(main)
