"""Launches of a scan: `python -m bench.kernels` (COREY, Tables 2 and 30, done with a scan that carries its state).

One sequence, cut into slices; the host launches the scan once a slice, each from the state that the slice before left:
one position a launch, the paper's static 64, its legacy and its default choice (256 and 512), or everything in one. All
give the same final state. What remains of the paper's gain is what fewer launches save.
"""

import functools
from typing import Any

import jax
import numpy as np
import typer

from bench.chunks import scans
from bench.common import Bench, Row, Section, Setting, bars, command, seconds_of, significant, turns
from bench.ops import split

INNER = 64  # the largest chunk size inside a slice
# ms by slice: Table 2 (RTX 3070, "isolated") and Table 30 (RTX 3090: one position, 64, COREY's 9 launches).
TABLE_2 = {64: 0.101, 256: 0.017, 512: 0.013}
TABLE_30 = {1: 14.964, 64: 2.216, 512: 0.308}
POLICIES = {1: "a position a launch", 64: "static 64", 256: "COREY, legacy 8.0", 512: "COREY, default"}


def sliced(arrays: dict[str, Any], width: int) -> list[dict[str, Any]]:
    """The inputs cut along the positions; what belongs to no position is in every slice."""
    length = arrays["x"].shape[1]
    moving = {name: value for name, value in arrays.items() if name in ("x", "dt", "B", "C")}
    fixed = {name: value for name, value in arrays.items() if name not in moving}
    return [
        {**fixed, **{name: value[:, begin : begin + width] for name, value in moving.items()}}
        for begin in range(0, length, width)
    ]


def run(setting: Setting) -> list[Section]:
    rows: list[Row] = []
    width, length = int(setting.models[0]), setting.lengths[0]
    widths = [size for size in POLICIES if size < length] + [length]
    for family, (op, inputs) in scans(width, length, setting.weights).items():
        arrays, fixed = split(inputs, setting.weights)
        first = arrays.pop("initial_state")
        final, calls = {}, {}
        for size in widths:

            def scan(arrays: Any, state: Any, op: Any = op, size: int = size, fixed: Any = fixed) -> Any:
                return op(**arrays, **fixed, initial_state=state, chunk_size=min(size, INNER))[1]

            compiled, slices = jax.jit(scan), sliced(arrays, size)

            def whole(compiled: Any = compiled, slices: Any = slices, first: Any = first) -> Any:
                state = first
                for one in slices:
                    state = compiled(one, state)
                return state

            final[size] = np.asarray(whole())
            calls[size] = functools.partial(seconds_of, whole)
        scale = np.abs(final[length]).max()
        for size, seconds in turns(calls, setting.rounds).items():
            alike = family == "Mamba-1"
            rows.append(
                {
                    "scan": family,
                    "policy": POLICIES.get(size, "one program"),
                    "slice": size,
                    "launches": -(-length // size),
                    "ms": significant(1e3 * seconds),
                    "us a launch": significant(1e6 * seconds / -(-length // size)),
                    "final state off by": float(f"{np.abs(final[size] - final[length]).max() / scale:.1e}"),
                    "paper Table 2 ms": TABLE_2.get(size) if alike else None,
                    "paper Table 30 ms": TABLE_30.get(size) if alike else None,
                }
            )
    return [
        Section(
            f"Tables 2 and 30: {length} positions of {width} channels by slices",
            rows,
            "The paper times an element-wise kernel (0.9 x + 1) on one row of 4096, in Table 2 launched once, in Table "
            "30 over the whole row at each of at most 512 launches; neither is a scan, so its figures do not compare. "
            f"Here {setting.weights}, chunks of at most {INNER} inside a slice.",
            "The final state is that of the one program in each case, relative to its largest entry.",
        )
    ]


def draw(sections: list[Section], figure: Any) -> None:
    rows = sections[0].rows
    families = list(dict.fromkeys(row["scan"] for row in rows))
    for panel, family in zip(figure.subplots(1, len(families), sharey=True), families, strict=True):
        kept = [row for row in rows if row["scan"] == family]
        bars(panel, kept, lambda row: f"{row['slice']}\n{row['launches']} launches", "ms")
        panel.set(title=f"{family}: {sections[0].title.partition(': ')[2]}", xlabel="positions a launch", yscale="log")
        panel.set_ylabel("ms a sequence")


BENCH = Bench(
    "kernels",
    "Launches of a scan (COREY, Tables 2 and 30)",
    small=Setting(("128",), (512,), rounds=3),
    full=Setting(("1024",), (4096,), rounds=10),
    run=run,
    draw=draw,
    panels=2,
)
main = command(BENCH)

if __name__ == "__main__":
    typer.run(main)
