"""The kernels for NVIDIA GPUs: `python -m bench.gpu [--part checks] [--model mamba2-130m] [--out gpu.json]`.

Checks each kernel against the float64 recurrence and beside XLA's op, then times scans, decode and prefill, and says
which kernels a decode step spends its time in. Weights are random, of the published sizes, in bfloat16; states are
float32; decoding is greedy and timed as the difference of a long and a short generation. The JSON is written after each
part, so that a run that is cut off keeps what it has.
"""

import collections
import dataclasses
import functools
import itertools
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from rich.console import Console
from safetensors.numpy import load_file

from bench.common import DATASHEET, Row, Section, device_name, environment, matmul_rate, seconds_of, show, significant
from bench.models import PUBLISHED, Prefill, random_ids, random_params
from bench.ops import split
from bench.specs import (
    SCAN_KERNEL_SPECS,
    SSD_KERNEL_SPECS,
    ScanSpec,
    SSDSpec,
    scan_inputs,
    ssd_inputs,
)
from mamba_jax import Params, cast_params, forward, generate, init_cache, init_params, load, step
from mamba_jax.cache import MambaCache
from mamba_jax.ops.reference import selective_scan_ref, ssd_ref
from mamba_jax.ops.scan import selective_scan
from mamba_jax.ops.ssd import ssd
from mamba_jax.programs import program_weights

CHAIN = 20  # calls of a scan in a row
SHORT, LONG = 64, 256  # new tokens of the two generations whose difference is decode's time
REPEATS = 100
SSD_TIMED = tuple(
    SSDSpec(name=f"ssd {b} x {length} x {h}", b=b, l=length, h=h, p=64, n=128, chunks=(128,), initial_state=True)
    for b, length, h in ((1, 1024, 24), (1, 4096, 24), (1, 1024, 80), (1, 4096, 80), (1, 8192, 80), (8, 4096, 80))
)
SCAN_TIMED = tuple(
    ScanSpec(name=f"scan 1 x {length} x {d}", l=length, d=d, chunks=(64,), gate=True, initial_state=True)
    for length, d in ((1024, 1536), (4096, 1024), (4096, 5120))
)
DECODED = (
    *(f"mamba2-{size}" for size in ("130m", "370m", "1.3b", "2.7b")),
    *(f"mamba1-{size}" for size in ("130m", "370m", "1.4b", "2.8b")),
)
PREFILLED = {
    "mamba2-130m": (1024,),
    "mamba2-2.7b": (1024, 4096, 8192),
    "mamba1-130m": (1024,),
    "mamba1-2.8b": (4096, 8192),
}
PARTS = ("checks", "scans", "models", "profile")


def norm_error(got: Any, want: Any) -> float:
    """The norm of the difference over the norm of what is wanted."""
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def check_scans() -> Iterator[Row]:
    """Outputs and states of both scans, by kernel and by XLA, against the recurrence in float64."""
    scans: Any = (
        *((ssd, ssd_ref, ssd_inputs, spec, "bfloat16") for spec in SSD_KERNEL_SPECS),
        *(
            (selective_scan, selective_scan_ref, scan_inputs, spec, dtype)
            for spec in (
                *SCAN_KERNEL_SPECS,
                ScanSpec(name="split", b=2, l=700, d=256, chunks=(64,), initial_state=True),
            )
            for dtype in ("bfloat16", "float16", "float32")
        ),
    )
    for op, reference, inputs_of, spec, dtype in scans:
        arrays, fixed = split(inputs_of(spec), dtype)
        truth = reference(**{k: np.asarray(v, np.float64) for k, v in arrays.items()}, **fixed)
        got, plain = (op(**arrays, **fixed, chunk_size=64, implementation=name) for name in ("pallas", "xla"))
        for what, value, other, want in zip(("y", "state"), got, plain, truth, strict=True):
            yield compared(f"{op.__name__} {spec.name} {dtype} {what}", value, other, want)


def check_steps() -> Iterator[Row]:
    """A decode step of two layers of each family against the same weights in float32."""
    for name in ("mamba2-130m", "mamba2-2.7b", "mamba1-130m", "mamba1-2.8b"):
        for dtype in ("bfloat16", "float16"):
            config = dataclasses.replace(PUBLISHED[name], n_layer=2)
            params = init_params(config, jax.random.key(1), dtype)
            cache = random_cache(params)
            exact = cast_params(params, "float32")
            wide = MambaCache(conv=tuple(x.astype(jnp.float32) for x in cache.conv), ssm=cache.ssm)
            tokens = np.array([7], np.int32)
            truth = step(exact, tokens, wide, implementation="xla")
            got = step(params, tokens, cache, implementation="pallas")
            plain = step(params, tokens, cache, implementation="xla")
            for what, value, other, want in zip(
                ("logits", "states"),
                (got[0], got[1].ssm[1]),
                (plain[0], plain[1].ssm[1]),
                (truth[0], truth[1].ssm[1]),
                strict=True,
            ):
                yield compared(f"step {name} {dtype} {what}", value, other, want)


def random_cache(params: Params) -> MambaCache:
    """A cache of random numbers, batch 1."""
    keys = iter(jax.random.split(jax.random.key(2), 1000))
    return jax.tree.map(
        lambda x: jax.random.normal(next(keys), x.shape, jnp.float32).astype(x.dtype),
        init_cache(params.config, 1, params.dtype),
    )


def compared(name: str, kernel: Any, xla: Any, want: Any) -> Row:
    """The kernel is right if it is no farther from the truth than XLA's op, within 10% and float32's rounding."""
    mine, others = norm_error(kernel, want), norm_error(xla, want)
    return {
        "check": name,
        "kernel's error": float(f"{mine:.2e}"),
        "XLA's error": float(f"{others:.2e}"),
        "holds": mine <= 1.1 * others + 2e-6,
    }


def check_repeats() -> Iterator[Row]:
    """One generation again and again."""
    for name in ("mamba2-130m", "mamba1-130m"):
        params = program_weights(random_params(name, "bfloat16"))
        runs = [tokens_of(params, 64) for _ in range(REPEATS)]
        same = sum(run == runs[0] for run in runs)
        yield {"check": f"{name}: {REPEATS} generations of 64 tokens", "alike": same, "holds": same == REPEATS}
        plain = np.asarray(step(params, np.array([7]), random_cache(params), implementation="pallas")[0])
        again = [
            np.asarray(step(params, np.array([7]), random_cache(params), implementation="pallas")[0])
            for _ in range(REPEATS)
        ]
        same = sum(np.array_equal(run, plain) for run in again)
        yield {"check": f"{name}: {REPEATS} steps, logits bit by bit", "alike": same, "holds": same == REPEATS}


def tokens_of(params: Params, count: int) -> list[int]:
    result: Any = generate(params, random_ids(params, 16), max_new_tokens=count, stop_token_ids=[])
    return result.tokens


def check_reference(folder: Path) -> Iterator[Row]:
    """A trained checkpoint: greedy tokens in float32 against the recorded ones, bfloat16 logits against the truth."""
    cases = json.loads((folder / "greedy_fp32.json").read_text()).values()
    golden = load_file(folder / "golden.safetensors")
    params = load(folder, dtype="float32")
    made: Any = generate(params, [case["prompt"] for case in cases], max_new_tokens=96, stop_token_ids=[])
    same = sum(row.tokens == case["new"] for case, row in zip(cases, made, strict=True))
    yield {"check": f"{folder.name} float32, {len(cases)} greedy texts", "alike": same, "holds": same == len(cases)}
    params = cast_params(params, "bfloat16")
    ids, truth = golden["ids"], golden["truth_logits256"]
    kernel, xla = (np.asarray(forward(params, ids[None], implementation=name)) for name in ("pallas", "xla"))
    yield compared(f"{folder.name} bfloat16 logits", kernel[0, :, :256], xla[0, :, :256], truth)


def checks(reference: Path | None) -> list[Section]:
    """All checks."""
    errors = "errors are norms, relative"
    sections = [
        Section("Kernels against the truth", [*check_scans(), *check_steps()], errors),
        Section("Repeats", list(check_repeats()), "one process, greedy"),
    ]
    if reference is not None:
        folders = sorted(path.parent for path in reference.glob("*/greedy_fp32.json"))
        rows = [row for folder in folders for row in check_reference(folder)]
        sections.append(Section("Trained checkpoints", rows, errors))
    return sections


def chained(op: Callable[..., Any], arrays: dict[str, Any], fixed: dict[str, Any]) -> Callable[[], float]:
    """Seconds of a call among `CHAIN` on the device, each of the outputs and the state of the one before."""
    first = arrays.pop("initial_state")

    def run(arrays: Any, state: Any) -> Any:
        def once(_: Any, carry: Any) -> Any:
            x, state = carry
            y, state = op(**arrays | {"x": x}, **fixed, initial_state=state)
            return x + (1e-3 * y).astype(x.dtype), state

        return jax.lax.fori_loop(0, CHAIN, once, (arrays["x"], state))

    compiled = jax.jit(run)
    jax.block_until_ready(compiled(arrays, first))
    return lambda: statistics.median(seconds_of(compiled, arrays, first) for _ in range(7)) / CHAIN


def scans() -> list[Section]:
    """Scans alone."""
    rows = []
    specs: tuple[Any, ...] = (*SSD_TIMED, *SCAN_TIMED)
    for spec in specs:
        op, inputs = (ssd, ssd_inputs(spec)) if isinstance(spec, SSDSpec) else (selective_scan, scan_inputs(spec))
        arrays, fixed = split(inputs, "bfloat16")
        kernel, plain = (
            chained(functools.partial(op, chunk_size=spec.chunks[0], implementation=name), dict(arrays), fixed)()
            for name in ("pallas", "xla")
        )
        rows.append(
            {
                "scan": spec.name,
                "kernel us": significant(1e6 * kernel),
                "XLA us": significant(1e6 * plain),
                "ratio": significant(plain / kernel, 3),
            }
        )
    settings = f"bfloat16, float32 states, {CHAIN} calls in a row on the device, an addition between them, median of 7"
    return [Section("Scans alone: (batch, length, heads or channels)", rows, settings)]


def models(names: tuple[str, ...], rounds: int, batches: tuple[int, ...]) -> Iterator[list[Section]]:
    """Decode and prefill of whole models."""
    rate, limit = matmul_rate("bfloat16"), DATASHEET.get(device_name(), (0.0, 0.0))[1] * 1e9
    decode: list[Row] = []
    prefill: list[Row] = []
    for name in names:
        params = program_weights(random_params(name, "bfloat16"))
        weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
        size = sum(leaf.size for leaf in jax.tree.leaves(params))
        for batch in batches if name in ("mamba2-130m", "mamba2-2.7b") else (1,):
            prompts = [random_ids(params, 16, seed) for seed in range(batch)]
            compile_s = seconds_of(functools.partial(decoded, params, prompts, 1))
            seconds = per_token(params, prompts, rounds)
            cache = jax.eval_shape(lambda params=params, batch=batch: init_cache(params.config, batch, params.dtype))
            moved = weights + 2 * sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(cache))
            decode.append(
                {
                    "model": name,
                    "batch": batch,
                    "tok/s": significant(batch / seconds),
                    "us a step": significant(1e6 * seconds),
                    "HBU %": significant(100 * moved / seconds / limit, 3) if limit else None,
                    "compile s": significant(compile_s, 3),
                }
            )
        for length in PREFILLED.get(name, ()):
            start = time.perf_counter()
            run = Prefill(params, length, 128, "pallas")
            compile_s = time.perf_counter() - start
            jax.block_until_ready(run())
            seconds = statistics.median(seconds_of(run) for _ in range(4 * rounds))
            memory: Any = run.compiled.memory_analysis()
            prefill.append(
                {
                    "model": name,
                    "tokens": length,
                    "ms": significant(1e3 * seconds),
                    "MFU %": significant(100 * 2 * size * length / seconds / rate / 1e12, 3),
                    "temporaries GB": significant(memory.temp_size_in_bytes / 1e9, 3),
                    "compile s": significant(compile_s, 3),
                }
            )
        yield [
            Section("Decode", decode, f"greedy, {LONG} less {SHORT} new tokens; bytes of weights and twice the states"),
            *(
                [Section("Prefill, one compiled program", prefill, f"batch 1; limit {rate:.0f} TFLOP/s")]
                if prefill
                else []
            ),
        ]


def decoded(params: Params, prompts: list[list[int]], count: int) -> float:
    result: Any = generate(params, prompts, max_new_tokens=count, stop_token_ids=[])
    return result[0].timings["decode_s"]


def per_token(params: Params, prompts: list[list[int]], rounds: int) -> float:
    """Seconds of a step."""
    short, long = (statistics.median(decoded(params, prompts, count) for _ in range(rounds)) for count in (SHORT, LONG))
    return (long - short) / (LONG - SHORT)


def profile(names: tuple[str, ...], batches: tuple[int, ...]) -> Iterator[Section]:
    """Where the time of decoding `SHORT` tokens, and of reading a prompt, goes."""
    for name in names:
        params = program_weights(random_params(name, "bfloat16"))
        for batch in batches:
            prompts = [random_ids(params, 16, seed) for seed in range(batch)]
            rows = kernels_of(functools.partial(decoded, params, prompts, SHORT), SHORT)
            yield Section(f"Decode of {name}, batch {batch}", rows, f"{SHORT} tokens, traced; a token")
        for length in PREFILLED.get(name, ())[:1]:
            rows = kernels_of(Prefill(params, length, 128, "pallas"), 1)
            yield Section(f"Prefill of {name}, {length} tokens", rows, "one compiled program, traced; a call")


def kernels_of(call: Callable[[], Any], share: int) -> list[Row]:
    """The kernels that a call spends most time in, each for a part of `share` of the call, and the gaps between."""
    jax.block_until_ready(call())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(call())
        found = next(Path(folder).rglob("*.xplane.pb"))
        data = jax.profiler.ProfileData.from_file(str(found))
    events: list[tuple[float, float, str]] = []
    for plane in data.planes:
        if plane.name.startswith("/device:GPU"):
            for line in plane.lines:
                if "Stream" in line.name:
                    events += [(event.start_ns, event.duration_ns, event.name) for event in line.events]
    events.sort()
    busy: collections.defaultdict[str, list[float]] = collections.defaultdict(list)
    for _, duration, kernel in events:
        busy[kernel.rstrip("0123456789").rstrip("_")].append(duration / 1e3)

    def row(name: str, durations: list[float]) -> Row:
        return {
            "kernel": name[:60],
            "times": significant(len(durations) / share, 3),
            "us each": significant(statistics.median(durations), 3) if durations else None,
            "us": significant(sum(durations) / share, 3),
        }

    gaps = [max(0.0, b[0] - a[0] - a[1]) / 1e3 for a, b in itertools.pairwise(events)]
    largest = sorted(busy.items(), key=lambda item: -sum(item[1]))
    return [
        *(row(kernel, durations) for kernel, durations in largest[:20]),
        row("all kernels", [duration for durations in busy.values() for duration in durations]),
        row("gaps below 5 us", [gap for gap in gaps if gap < 5]),
        row("gaps from 5 us", [gap for gap in gaps if gap >= 5]),
    ]


def main(
    part: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(PARTS)}; several times.")] = None,
    model: Annotated[list[str] | None, typer.Option(help="Published sizes that are timed.")] = None,
    batch: Annotated[
        list[int] | None, typer.Option(help="Of decode, where several are timed, and of the profile.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    reference: Annotated[Path | None, typer.Option(help="Folder of trained checkpoints, checked too.")] = None,
    out: Annotated[Path, typer.Option(help="JSON.")] = Path("gpu.json"),
) -> None:
    """Check and time the kernels for NVIDIA GPUs."""
    console = Console(width=150)
    report: dict[str, Any] = {**environment("gpu"), "sections": []}
    start = time.perf_counter()

    def keep(done: list[Section], sections: list[Section]) -> None:
        report["sections"] = [dataclasses.asdict(section) for section in (*done, *sections)]
        report["seconds"] = round(time.perf_counter() - start, 1)
        out.write_text(json.dumps(report, indent=1) + "\n")

    done: list[Section] = []
    for name in part or PARTS:
        sections: list[Section] = []
        match name:
            case "checks":
                sections = checks(reference)
            case "scans":
                sections = scans()
            case "models":
                for sections in models(tuple(model or DECODED), rounds, tuple(batch or (1, 16))):
                    keep(done, sections)
            case "profile":
                sections = list(profile(tuple(model or ("mamba2-130m", "mamba1-130m")), tuple(batch or (1,))))
            case _:
                raise typer.BadParameter(f"got {name!r}, wanted one of {', '.join(PARTS)}", param_hint="--part")
        for section in sections:
            show(section, console)
        done += sections
        keep(done, [])
        console.print(f"{name}: {time.perf_counter() - start:.0f} s")
    if not all(row.get("holds", True) for section in done for row in section.rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
