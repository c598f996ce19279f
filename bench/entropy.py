"""The COREY paper's entropies and chunks beside ours: `python -m bench.entropy [--json entropy.json] [--plot a.png]`.

Prints Tables 1, 3, 20, 21 and 29 as computed here and as printed there, which of the paper's three schedulers each of
its tables really had, how the statistic depends on the number of values, on one outlier and on the number of bins, and
what each estimator costs on this device.
"""

import dataclasses
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from rich.console import Console

from bench.common import Row, Section, device_name, environment, show
from mamba_jax.scheduler.policies import PRESETS, chunk_of_entropy, coarse_bucket, h_ref_sensitivity, tile_superseded
from mamba_jax.scheduler.signals import Estimator, Kind, Range, max_entropy

SEED = 20260417  # the paper's own, found by its figures
LEGACY = 8.0
MILLION = 10**6
SHAPES = ((1, 512, 1536), (1, 2048, 1536))  # (b, l, d) of a 130M model's layer
CALLS = 20  # of an estimator in one program

# Tables 1 and 21: K, H, chunk with H_ref = ln K, chunk with 8.0.
NORMAL = (
    (32, 2.644, 512, 256),
    (64, 3.334, 512, 256),
    (128, 4.027, 512, 256),
    (256, 4.720, 512, 256),
    (512, 5.413, 512, 256),
    (1024, 6.106, 512, 512),
)
UNIFORM = (
    (32, 3.466, 512, 256),
    (64, 4.159, 512, 256),
    (128, 4.852, 512, 256),
    (256, 5.545, 512, 512),
    (512, 6.238, 512, 512),
)
TABLE_3 = {
    "uniform": (5.545, 512),
    "normal": (4.612, 256),
    "Laplace": (3.892, 256),
    "sparse 10 %": (0.789, 64),
    "sparse 2 %": (0.192, 32),
}
# Table 20: H_ref, then r and chunk of the two entropies.
TABLE_20 = (
    (math.log(64), 1.0, 512, 0.966, 512),
    (5.0, 0.921, 512, 0.804, 512),
    (6.0, 0.767, 512, 0.67, 256),
    (8.0, 0.576, 256, 0.503, 256),
)
TABLE_29 = {
    0: (2.27, 128),
    8: (2.91, 256),
    16: (3.22, 256),
    24: (3.29, 256),
    32: (3.61, 256),
    40: (3.54, 256),
    47: (3.5, 256),
}


def entropy(values: np.ndarray, bins: int = 256, span: Range = "minmax") -> float:
    """Histogram entropy in nats of values of any shape."""
    return Estimator(bins=bins, range=span).numpy(values.reshape(-1, 1))


def default(h: float, bins: int = 256) -> int:
    return chunk_of_entropy(h, max_entropy(bins))


def legacy(h: float) -> int:
    return chunk_of_entropy(h, LEGACY)


def tables_1_and_21() -> Section:
    inputs = {
        "normal": (np.random.default_rng(SEED).standard_normal(MILLION), NORMAL),
        "uniform": (np.random.default_rng(SEED).random(MILLION), UNIFORM),
    }
    rows: list[Row] = []
    for name, (values, printed) in inputs.items():
        for bins, h, chunk, chunk_8 in printed:
            ours = entropy(values, bins)
            rows.append(
                {
                    "input": name,
                    "K": bins,
                    "H": round(ours, 3),
                    "H paper": h,
                    "r": round(ours / max_entropy(bins), 3),
                    "chunk ln K": default(ours, bins),
                    "paper": chunk,
                    "chunk 8.0": legacy(ours),
                    "paper ": chunk_8,
                }
            )
    return Section(
        "Tables 1 and 21: entropy by number of bins",
        rows,
        f"1e6 values of numpy's default_rng({SEED}), bins over the values' own range, C in 32..512.",
        "Reproduced to the digit. r of the normal runs from 0.763 to 0.881: not invariant to K, although the chunk is.",
    )


def perturbation(name: str, seed: int) -> np.ndarray:
    """An input of Table 3, 1024 x 4096 in float16."""
    rng, shape = np.random.default_rng(seed), (1024, 4096)
    if name == "uniform":
        x = rng.random(shape, np.float32)
    elif name == "Laplace":
        u = rng.random(shape, np.float32) - 0.5
        x = -np.sign(u) * np.log(1 - 2 * np.abs(u) + 1e-8)
    else:
        share, scale = {"normal": (1.0, 1), "sparse 10 %": (0.1, 1), "sparse 2 %": (0.02, 5)}[name]
        x = rng.standard_normal(shape, np.float32) * (rng.random(shape, np.float32) < share) * scale
    return x.astype(np.float16)


def table_3(seeds: int) -> Section:
    rows: list[Row] = []
    for name, (h, chunk) in TABLE_3.items():
        ours = [entropy(perturbation(name, seed)) for seed in range(seeds)]
        rows.append(
            {
                "input": name,
                "H least": round(min(ours), 3),
                "H most": round(max(ours), 3),
                "H paper": h,
                "chunk paper": chunk,
                "of paper's H: 8.0": legacy(h),
                "ln K": default(h),
                "ours, ln K": "/".join(str(c) for c in sorted({default(value) for value in ours})),
            }
        )
    return Section(
        "Table 3: five distributions",
        rows,
        f"4.2e6 values in float16, {seeds} seeds (the paper's seed was a process's hash and cannot be had again).",
        "The chunks printed are those of H_ref = 8.0; the rule that the paper calls its default gives four others.",
    )


def table_20() -> Section:
    printed = {h_ref: values for h_ref, *values in TABLE_20}
    ours = h_ref_sensitivity([4.6043, 4.022], [*printed, max_entropy(256)])
    rows = []
    for first, second in zip(ours[::2], ours[1::2], strict=True):
        r_1, chunk_1, r_2, chunk_2 = printed.get(first["h_ref"], (None,) * 4)
        rows.append(
            {
                "H_ref": round(first["h_ref"], 2),
                "r of 4.60": round(first["r"], 3),
                "paper": r_1,
                "chunk": first["chunk"],
                "paper ": chunk_1,
                "r of 4.02": round(second["r"], 3),
                "paper  ": r_2,
                "chunk ": second["chunk"],
                "paper   ": chunk_2,
            }
        )
    return Section(
        "Table 20: the reference entropy",
        rows,
        "The entropies before rounding, 4.6043 and 4.022. The second is in bits, of token embeddings: 2.788 nats.",
        f"Chunks as printed. In nats the second gives {default(4.022 * math.log(2))} with ln K.",
    )


def table_29() -> Section:
    rows = [
        {
            "layer": layer,
            "H paper": h,
            "chunk paper": chunk,
            "raw 8.0": round(32 + h / LEGACY * 480, 1),
            "8.0": legacy(h),
            "raw ln K": round(32 + h / max_entropy(256) * 480, 1),
            "ln K": default(h),
        }
        for layer, (h, chunk) in TABLE_29.items()
    ]
    return Section(
        "Table 29: seven layers of Mamba-370M",
        rows,
        "The paper's entropies through Eq. 2; its caption says H_ref = ln K and that 8.0 gives the same chunks.",
        "128 for layer 0 needs H_ref = 8.0. With ln K every layer has 256: there is no adaptation to layers.",
    )


def presets() -> Section:
    """Each table's entropies through every preset: which one gives its chunks."""
    bits = "bits-tile-legacy"
    cases = (
        ("1, 21", "H 4.720", 4.720, 512, "corey-default"),
        ("20", "H 4.60 at ln K", 4.604, 512, "corey-default"),
        ("15, 16", "H 3.10, nearly all calls", 3.10, 256, "corey-default"),
        ("3", "H 4.612, normal", 4.612, 256, "corey-legacy"),
        ("3", "H .192, sparse 2 %", 0.192, 32, "corey-legacy"),
        ("4, 23", "H 2.18..2.27, 14 of 336 calls", 2.27, 128, "corey-legacy"),
        ("18", "H 4.60", 4.604, 256, "corey-legacy"),
        ("29", "H 2.27, layer 0", 2.27, 128, "corey-legacy"),
        ("5, 27", "H 2.9..3.6", 3.22, 1024, "corey-h800"),
        ("14, 22", "4.022 printed as nats", 4.022, 256, bits),
    )
    rows = [
        {"table": table, "entropy": what, "chunk paper": chunk}
        | {name: PRESETS[name].choose(976, 0, {"entropy": h}).chunk for name in PRESETS}
        | {"made by": maker}
        for table, what, h, chunk, maker in cases
    ]
    tile = tile_superseded(4.022)
    return Section(
        "Which scheduler made which table",
        rows,
        "corey-default: ln K, 32..512. corey-legacy: 8.0, 32..512. corey-h800: ln K, 128..2048 (Tables 25, 26 and 28: "
        f"128 to 512 or 1024). {bits}: bits of token embeddings, tile {tile}, bucket {coarse_bucket(tile)}.",
        "No one rule gives all tables. Tables 3 and 29 come from another rule than the text says; nothing says that 5 "
        "and 27 have a range of their own or that 14 and 22 are in bits.",
    )


def sizes(seeds: int) -> Section:
    rows: list[Row] = []
    for count in (256, 1024, 4096, 16384, 65536, 373_000, MILLION, 4_194_304):
        values = [np.random.default_rng(seed).standard_normal(count) for seed in range(seeds)]
        row: Row = {"values": count}
        for span in ("minmax", "robust"):
            ours = [entropy(x, span=span) for x in values]
            row |= {span: round(statistics.mean(ours), 3), f"{span} spread": round(max(ours) - min(ours), 3)}
        rows.append(row)
    return Section(
        "Entropy of a normal by number of values",
        rows,
        f"K = 256, mean and spread (most less least) of {seeds} seeds; robust: within 4 mean absolute deviations.",
        "The min-max range widens with every value, so longer texts, larger batches and finer strides read as less "
        "entropy. The robust one settles; below some thousand values both lack (K - 1) / 2N.",
    )


def outliers() -> Section:
    values = np.random.default_rng(SEED).standard_normal(MILLION)
    rows: list[Row] = []
    for sigma in (None, 8, 16, 24, 64, 256, 512, 10**6):
        x = values.copy()
        if sigma is not None:
            x[-1] = sigma
        plain, robust = entropy(x), entropy(x, span="robust")
        rows.append(
            {
                "outlier": "none" if sigma is None else f"{sigma} sigma",
                "minmax": round(plain, 2),
                "chunk": default(plain),
                "robust": round(robust, 2),
                "chunk ": default(robust),
            }
        )
    return Section(
        "One outlier in 1e6 normal values",
        rows,
        "K = 256, ln K, C in 32..512.",
        "One value moves the min-max entropy through every chunk.",
    )


def bins() -> Section:
    rng = np.random.default_rng(SEED)
    normal = rng.standard_normal(MILLION)
    inputs = {
        "normal": normal,
        "uniform": rng.random(MILLION),
        "Laplace": rng.laplace(size=MILLION),
        "exponential": rng.exponential(size=MILLION),
        "SiLU of normal": normal / (1 + np.exp(-normal)),
        "Student t3": rng.standard_t(3, MILLION),
    }
    counts = (32, 64, 128, 256, 512, 1024, 2048)
    rows = [
        {"input": name}
        | {f"K {k}": default(entropy(values, k), k) for k in counts}
        | {
            "r, K 32": round(entropy(values, 32) / max_entropy(32), 3),
            "r, K 2048": round(entropy(values, 2048) / max_entropy(2048), 3),
        }
        for name, values in inputs.items()
    ]
    return Section(
        "Chunk by number of bins",
        rows,
        "1e6 values, min-max range, ln K, C in 32..512.",
        "The chunk is invariant to K for the two inputs that the paper shows, not in general.",
    )


def cost(rounds: int) -> Section:
    kinds: tuple[tuple[Kind, Range], ...] = (
        ("histogram", "minmax"),
        ("histogram", "robust"),
        ("sampled", "minmax"),
        ("sampled", "robust"),
        ("token", "minmax"),
        ("cheap", "minmax"),
        ("variance", "minmax"),
        ("kurtosis", "minmax"),
    )
    rows: list[Row] = []
    for kind, span in kinds:
        row: Row = {"estimator": kind + ("" if span == "minmax" else ", robust")}
        for shape in SHAPES:
            for dtype in ("float32", "bfloat16"):
                milliseconds = 1000 * seconds_a_call(Estimator(kind, range=span), shape, dtype, rounds)
                row["x".join(map(str, shape)) + f" {dtype}"] = float(f"{milliseconds:.3f}")
        rows.append(row)
    return Section(
        "Cost of an estimator in a program, ms a call",
        rows,
        f"{device_name()}; SiLU of normal values, lengths given; median of {rounds} programs of {CALLS} calls each, "
        "one waiting for the other: an addition to all values is in every figure.",
    )


def seconds_a_call(estimator: Estimator, shape: tuple[int, ...], dtype: str, rounds: int) -> float:
    """Median over programs that call the estimator CALLS times."""

    def repeat(u: jax.Array, lengths: jax.Array) -> jax.Array:
        body: Callable[[Any, jax.Array], jax.Array] = lambda _, h: estimator(u + (1e-9 * h).astype(u.dtype), lengths)  # noqa: E731
        return jax.lax.fori_loop(0, CALLS, body, jnp.float32(0))

    u = jax.nn.silu(jax.random.normal(jax.random.key(0), shape)).astype(dtype)
    lengths = jnp.full(shape[:-2], shape[-2] - 5, jnp.int32)
    program = jax.jit(repeat).lower(u, lengths).compile()
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        jax.block_until_ready(program(u, lengths))
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:]) / CALLS


def draw_picture(report: dict[str, Section], path: Path) -> None:
    """How the statistic depends on size and outliers, and what it costs."""
    import matplotlib.pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 4.5), layout="constrained")
    rows = report["sizes"].rows
    for span, style in (("minmax", "o-"), ("robust", "s--")):
        left.plot([row["values"] for row in rows], [row[span] for row in rows], style, label=span)
    left.set(title="Entropy of a normal, K = 256", xlabel="values", ylabel="nats", xscale="log")
    left.legend()
    rows = report["outliers"].rows
    places = np.arange(len(rows))
    for span, style in (("minmax", "o-"), ("robust", "s--")):
        middle.plot(places, [row[span] for row in rows], style, label=span)
    rule: Any = PRESETS["corey-default"]
    for boundary, chunk in zip(rule.boundaries, rule.candidates[1:], strict=True):
        middle.axhline(boundary, color="gray", lw=0.7)
        middle.text(0, boundary, f"chunk {chunk} from here", va="bottom", fontsize=8)
    middle.set_xticks(places, [row["outlier"].removesuffix(" sigma") for row in rows])
    middle.set(title="One outlier in 1e6 normal values", xlabel="outlier, sigma", ylabel="nats", ylim=(0, 5.6))
    middle.legend(loc="center right")
    rows = report["cost"].rows
    columns = [name for name in rows[0] if name.endswith("float32")]
    for i, name in enumerate(columns):
        right.barh(np.arange(len(rows)) + 0.4 * (i - 0.5), [row[name] for row in rows], 0.4, label=name)
    right.set_yticks(np.arange(len(rows)), [row["estimator"] for row in rows])
    right.invert_yaxis()
    right.set(title=f"Cost, {device_name()}", xlabel="ms a call")
    right.legend()
    figure.savefig(path, dpi=120)


def main(
    seeds: Annotated[int, typer.Option(min=1, help="Draws of Table 3's inputs and of each size.")] = 4,
    rounds: Annotated[int, typer.Option(min=1, help="Programs that are timed for each cost.")] = 9,
    out: Annotated[Path | None, typer.Option("--json", help="Write the report.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a picture.")] = None,
) -> None:
    """Print the paper's entropy tables beside ours, and what the statistics cost."""
    console = Console(width=None if sys.stdout.isatty() else 160)
    makers: dict[str, Callable[[], Section]] = {
        "tables_1_and_21": tables_1_and_21,
        "table_3": lambda: table_3(seeds),
        "table_20": table_20,
        "table_29": table_29,
        "presets": presets,
        "sizes": lambda: sizes(seeds),
        "outliers": outliers,
        "bins": bins,
        "cost": lambda: cost(rounds),
    }
    report = {}
    for name, make in makers.items():
        report[name] = make()
        show(report[name], console)
    if out is not None:
        facts = environment("entropy")
        out.write_text(json.dumps(facts | {name: dataclasses.asdict(x) for name, x in report.items()}, indent=1) + "\n")
    if plot is not None:
        draw_picture(report, plot)


if __name__ == "__main__":
    typer.run(main)
