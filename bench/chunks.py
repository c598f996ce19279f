"""Chunk sizes of one scan: `python -m bench.chunks` (COREY, Tables 17 to 19).

One program scans the whole sequence and carries its state from chunk to chunk, at each chunk size: Mamba-1's selective
scan of the paper's shape (1024 channels, 16 states, a batch of one) and Mamba-2's of that width (16 heads of 64, 128
states). Several calls are in flight, each on the state that the one before left, so that dispatch hides behind them.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import typer

from bench.common import Bench, Row, Section, Setting, command, lines, seconds_of, significant, turns
from bench.ops import split
from bench.specs import ScanSpec, SSDSpec, scan_inputs, ssd_inputs
from mamba_jax.ops.scan import selective_scan
from mamba_jax.ops.ssd import ssd

SIZES = (16, 32, 64, 128, 256, 512)
CALLS = 4
# ms by chunk size: Tables 17 (RTX 3070) and 18 (H800), FP16, 4096 positions, no state carried.
RTX_3070 = {32: 6.315, 64: 3.299, 128: 1.867, 256: 1.148, 512: 0.748}
H800 = {64: 2.299, 256: 0.587, 512: 0.300}


def chained(call: Callable[..., Any], state: Any) -> Any:
    """CALLS calls, each from the state that the one before left."""
    for _ in range(CALLS):
        y, state = call(state)
    return y, state


def scans(width: int, length: int, dtype: str) -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """The two scans and their inputs."""
    first = ScanSpec(name="chunks", l=length, d=width, chunks=SIZES, gate=False, initial_state=True)
    second = SSDSpec(name="chunks", l=length, h=width // 64, p=64, n=128, chunks=SIZES, initial_state=True)
    return {"Mamba-1": (selective_scan, scan_inputs(first)), "Mamba-2": (ssd, ssd_inputs(second))}


def run(setting: Setting) -> list[Section]:
    rows: list[Row] = []
    width = int(setting.models[0])
    for length in setting.lengths:
        calls = {}
        for family, (op, inputs) in scans(width, length, setting.weights).items():
            arrays, fixed = split(inputs, setting.weights)
            state = arrays.pop("initial_state")
            for size in (size for size in SIZES if size <= length):
                scan = jax.jit(
                    functools.partial(
                        lambda arrays, state, op, **s: op(**arrays, initial_state=state, **s),
                        op=op,
                        chunk_size=size,
                        **fixed,
                    )
                )
                calls[family, size] = functools.partial(seconds_of, chained, functools.partial(scan, arrays), state)
        found = turns(calls, setting.rounds)
        best = {family: min(s for (f, _), s in found.items() if f == family) for family, _ in found}
        for (family, size), seconds in found.items():
            alike = family == "Mamba-1" and length != 8192  # of which the paper has other figures
            rows.append(
                {
                    "scan": family,
                    "positions": length,
                    "chunk": size,
                    "ms": significant(1e3 * seconds / CALLS),
                    "over the best %": significant(100 * (seconds / best[family] - 1), 3),
                    "paper RTX 3070 ms": RTX_3070.get(size) if alike else None,
                    "paper H800 ms": H800.get(size) if alike else None,
                }
            )
    fastest = {f"{row['scan']} at {row['positions']}": row["chunk"] for row in rows if row["over the best %"] == 0}
    return [
        Section(
            f"Tables 17 to 19: one scan of {width} channels by chunk size",
            rows,
            "The paper (1024 channels, 4096 positions, FP16): one kernel a slice from Python, no state handed on, "
            "so its times are those of launches and not comparable. Here one program for the whole sequence, state "
            f"carried, {setting.weights}.",
            "Fastest chunk size: " + ", ".join(f"{size} ({what})" for what, size in fastest.items()) + ".",
        )
    ]


def draw(sections: list[Section], figure: Any) -> None:
    panel = figure.subplots()
    lines(panel, sections[0].rows, "chunk", "ms", ("scan", "positions"))
    shown = [row for row in sections[0].rows if row["paper RTX 3070 ms"] is not None]
    if shown:
        panel.plot([r["chunk"] for r in shown], [r["paper RTX 3070 ms"] for r in shown], "k:", label="paper, RTX 3070")
    panel.set(title=sections[0].title.partition(": ")[2], xlabel="chunk size", ylabel="ms", yscale="log")


BENCH = Bench(
    "chunks",
    "Chunk sizes of one scan (COREY, Tables 17 to 19)",
    small=Setting(("128",), (512,), rounds=5),
    full=Setting(("1024",), (4096, 8192), rounds=10),
    run=run,
    draw=draw,
)
main = command(BENCH)

if __name__ == "__main__":
    typer.run(main)
