"""Perplexity by batch size: `python -m bench.batches` ("Compiler-First State Space Duality", Fig. 5).

Windows of one text are read 1, 2, ... at a time; the perplexity must not know. Random weights and tokens will do, since
what is shown is that a row's result does not depend on its neighbours.
"""

import functools
from typing import Any

import typer

from bench.common import Bench, Row, Section, Setting, command, seconds_of, significant, turns
from bench.models import load_model, random_ids
from mamba_jax import perplexity

SIZES = (1, 2, 4, 8, 16)
WINDOW = 128


def run(setting: Setting) -> list[Section]:
    rows: list[Row] = []
    length = setting.lengths[0]
    for name in setting.models:
        params = load_model(name, setting.weights)
        ids = random_ids(params, length)
        window = min(8 * WINDOW, length // 8)
        measure = functools.partial(perplexity, params, ids, window=window, stride=window // 2)
        found = {size: measure(batch=size).perplexity for size in SIZES}
        calls = {size: functools.partial(seconds_of, functools.partial(measure, batch=size)) for size in SIZES}
        for size, seconds in turns(calls, setting.rounds, warm_up=False).items():
            rows.append(
                {
                    "model": name,
                    "batch": size,
                    "perplexity": found[size],
                    "from batch 1": abs(found[size] / found[1] - 1),
                    "tok/s": significant((length - 1) / seconds),
                }
            )
    worst = max(row["from batch 1"] for row in rows)
    return [
        Section(
            "Fig. 5: perplexity by batch size",
            rows,
            f"The paper: the 130M checkpoint on WikiText-103. Here {setting.weights} weights and {length} random ids "
            f"in windows of {window}, stride {window // 2}: that it is invariant compares, the perplexity does not.",
            f"Largest relative difference from batch 1: {worst:.1e}.",
        )
    ]


def draw(sections: list[Section], figure: Any) -> None:
    panel = figure.subplots()
    for name in dict.fromkeys(row["model"] for row in sections[0].rows):
        rows = [row for row in sections[0].rows if row["model"] == name]
        first = rows[0]["perplexity"]
        values = [1e6 * (row["perplexity"] / first - 1) for row in rows]
        panel.plot([row["batch"] for row in rows], values, "o-", label=f"{name}: {first:.2f} at batch 1")
    reach = max(1.0, 1.2 * max(map(abs, panel.get_ylim())))
    panel.set(title="Perplexity by batch size", xlabel="windows read together", ylabel="millionths from batch 1")
    panel.set(xscale="log", ylim=(-reach, reach), xticks=SIZES, xticklabels=SIZES)
    panel.grid(alpha=0.3)
    panel.legend()


BENCH = Bench(
    "batches",
    "Perplexity by batch size (Fig. 5)",
    small=Setting(("mamba2-small",), (1024,), rounds=2),
    full=Setting(("mamba2-130m",), (65536,), rounds=1, dtype="float32"),
    run=run,
    draw=draw,
)
main = command(BENCH)

if __name__ == "__main__":
    typer.run(main)
