"""What benchmarks share: timing, the device's limits, the record of what ran where, tables, pictures and files.

A benchmark of the suite is a `Bench`: settings for a small run (seconds on a CPU) and a full one (published sizes), a
function that measures and gives tables, and one that draws them. `command` makes its command line of that.
"""

import dataclasses
import datetime
import importlib.metadata
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import jax
import jax.numpy as jnp
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mamba_jax import enable_compilation_cache
from mamba_jax.ops.linear import linear
from mamba_jax.progress import track

Row = dict[str, Any]
Key = TypeVar("Key", bound=Hashable)
RESULTS = Path("bench-results")
# Datasheet: dense bfloat16 TFLOP/s and GB/s of memory, by JAX's name of the device.
DATASHEET = {"NVIDIA H200": (990.0, 4800.0)}


@dataclasses.dataclass(frozen=True)
class Section:
    """One table: `settings` made the paper's figures, `finding` is what ours say about them."""

    title: str
    rows: list[Row]
    settings: str
    finding: str = ""


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a run measures.

    Attributes:
        models: names that `bench.models.load_model` knows; channels where a scan alone is measured.
        lengths: in tokens; what they mean is the benchmark's.
        rounds: turns of each contender.
        dtype: of the weights; empty takes float32 on a CPU and bfloat16 elsewhere.
    """

    models: tuple[str, ...]
    lengths: tuple[int, ...]
    rounds: int
    dtype: str = ""

    @property
    def weights(self) -> str:
        """The dtype of the weights on this machine."""
        return self.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")


@dataclasses.dataclass(frozen=True)
class Bench:
    """A benchmark of the suite.

    Attributes:
        name: of its module and its files.
        title: with the tables that it stands beside.
        small: setting on a CPU.
        full: setting on an accelerator.
        run: measures; gives tables.
        draw: draws them into a figure.
        panels: the figure's size, in panels side by side.
        prepare: has to happen before JAX looks for devices.
    """

    name: str
    title: str
    small: Setting
    full: Setting
    run: Callable[[Setting], list[Section]]
    draw: Callable[[list[Section], Any], None]
    panels: int = 1
    prepare: Callable[[], None] | None = None


def perform(bench: Bench, setting: Setting, folder: Path) -> dict[str, Any]:
    """Run a benchmark, print its tables, and write NAME.json and NAME.png into a folder; gives what the JSON holds."""
    start = time.perf_counter()
    sections = bench.run(setting)
    report = {
        "name": bench.name,
        "title": bench.title,
        **environment(bench.name),
        "setting": dataclasses.asdict(setting) | {"dtype": setting.weights},
        "seconds": round(time.perf_counter() - start, 1),
        "sections": [dataclasses.asdict(section) for section in sections],
    }
    console = Console(width=None if sys.stdout.isatty() else 160)
    for section in sections:
        show(section, console)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{bench.name}.json").write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")
    draw(bench, sections, folder / f"{bench.name}.png")
    console.print(f"{report['device']}, {report['seconds']} s, written to {folder / bench.name}.json and .png")
    return report


def draw(bench: Bench, sections: list[Section], path: Path) -> None:
    """Write a benchmark's picture, the device and the date in its title."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1 + 5.5 * bench.panels, 5), layout="constrained")
    bench.draw(sections, figure)
    figure.suptitle(f"{bench.title}\n{device_name()}, {datetime.date.today().isoformat()}", fontsize=11)
    figure.savefig(path, dpi=110)


def command(bench: Bench) -> Callable[..., None]:
    """The command line of a benchmark."""

    def main(
        full: Annotated[
            bool | None, typer.Option("--full/--small", help="Published sizes.", show_default="full but on a CPU")
        ] = None,
        model: Annotated[list[str] | None, typer.Option(help="A size, a folder, or a scan's channels.")] = None,
        dtype: Annotated[str, typer.Option(help="Of the weights. Empty: float32 on a CPU, else bfloat16.")] = "",
        length: Annotated[list[int] | None, typer.Option(min=1, help="Tokens; several times.")] = None,
        rounds: Annotated[int | None, typer.Option(min=1, help="Turns of each contender.")] = None,
        out: Annotated[Path, typer.Option(help="Folder of the JSON and the picture.")] = RESULTS,
    ) -> None:
        if bench.prepare is not None:
            bench.prepare()
        base = bench.full if (jax.default_backend() != "cpu" if full is None else full) else bench.small
        setting = Setting(
            tuple(model or base.models), tuple(length or base.lengths), rounds or base.rounds, dtype or base.dtype
        )
        enable_compilation_cache()
        perform(bench, setting, out)

    main.__doc__ = f"{bench.title}."
    return main


def environment(name: str, packages: Sequence[str] = ("jax", "jaxlib", "numpy")) -> dict[str, Any]:
    """What ran where: device, date, versions, and the command that does it again."""
    return {
        "device": device_name(),
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "versions": {package: importlib.metadata.version(package) for package in packages},
        "command": f"python -m bench.{name} {' '.join(sys.argv[1:])}".strip(),
    }


# Timing


def seconds_of(call: Callable[..., Any], *args: Any) -> float:
    """Wall-clock seconds of one call, its results computed."""
    start = time.perf_counter()
    jax.block_until_ready(call(*args))
    return time.perf_counter() - start


def turns(calls: Mapping[Key, Callable[[], float]], rounds: int, *, warm_up: bool = True) -> dict[Key, float]:
    """Median of what each call gives (seconds, as a rule) over rounds in which all take turns.

    Args:
        calls: what is measured.
        rounds: of every second one the order is reversed.
        warm_up: begin with a round that does not count.
    """
    if warm_up:
        for call in calls.values():
            call()
    found: dict[Key, list[float]] = {key: [] for key in calls}
    with track("Measuring", rounds * len(calls)) as advance:
        for number in range(rounds):
            for key in list(calls)[:: -1 if number % 2 else 1]:
                found[key].append(calls[key]())
                advance(1)
    return {key: statistics.median(values) for key, values in found.items()}


def bandwidth_probe() -> Callable[[], float]:
    """GB/s at which a large float32 matrix-vector product reads its matrix."""
    rows = 50288 if jax.default_backend() == "cpu" else 1 << 20
    matrix, vector = jnp.ones((rows, 768), jnp.float32), jnp.ones((768, 1), jnp.float32)
    multiply = jax.jit(lambda m, v: m @ v)
    jax.block_until_ready(multiply(matrix, vector))

    def probe() -> float:
        return matrix.nbytes / statistics.median(seconds_of(multiply, matrix, vector) for _ in range(5)) / 1e9

    return probe


def matmul_rate(dtype: str) -> float:
    """TFLOP/s of a large square matrix product, by `linear`: a plain bfloat16 one is no limit on a CPU."""
    size = 2304 if jax.default_backend() == "cpu" else 8192  # a power of two would miss a CPU's caches
    a = jax.random.normal(jax.random.key(0), (size, size), jnp.float32).astype(dtype)
    multiply = jax.jit(linear)
    jax.block_until_ready(multiply(a, a))
    return 2 * size**3 / statistics.median(seconds_of(multiply, a, a) for _ in range(5)) / 1e12


def program_bytes(compiled: Any) -> int:
    """Bytes of memory that a compiled program needs: arguments, results and temporaries."""
    memory = compiled.memory_analysis()
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.argument_size_in_bytes + results + memory.temp_size_in_bytes


def device_name() -> str:
    """The device as a person would name it."""
    if jax.default_backend() != "cpu":
        return jax.devices()[0].device_kind
    names = [line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores"


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.is_file() else []


# Tables and pictures


def significant(value: float, digits: int = 4) -> float:
    """A figure as a table shows it: that many digits, a whole number if it has as many before the point."""
    if value == 0 or not math.isfinite(value):
        return value
    places = digits - 1 - math.floor(math.log10(abs(value)))
    return round(value, places) if places > 0 else round(value)


def show(section: Section, console: Console) -> None:
    """Print one section."""
    table = Table()
    cells = {name: texts([row[name] for row in section.rows]) for name in section.rows[0]}
    for name in cells:
        table.add_column(name, justify="left" if isinstance(section.rows[0][name], str) else "right")
    for row in zip(*cells.values(), strict=True):
        table.add_row(*row)
    console.print(f"[bold]{escape(section.title)}")
    console.print(table)
    console.print(escape(f"Settings: {section.settings}"))
    if section.finding:
        console.print(escape(f"Finding: {section.finding}"))
    console.print()


def texts(values: Sequence[Any]) -> list[str]:
    """A column's cells: floats to the most digits that one of them has, nothing for None."""
    floats = [value for value in values if isinstance(value, float)]
    digits = max((len(str(value).partition(".")[2]) for value in floats), default=0)
    return ["" if v is None else f"{v:.{digits}f}" if isinstance(v, float) else str(v) for v in values]


def lines(panel: Any, rows: Iterable[Row], x: str, y: str, by: Sequence[str]) -> None:
    """A line for each combination of the columns `by` over a logarithmic axis; rows without a figure are left out."""
    kept = [row for row in rows if row[y] is not None]
    for label in dict.fromkeys(", ".join(str(row[name]) for name in by) for row in kept):
        points = [(row[x], row[y]) for row in kept if ", ".join(str(row[name]) for name in by) == label]
        panel.plot(*zip(*points, strict=True), "o-", label=label)
    ticks = sorted({row[x] for row in kept})
    panel.set(xscale="log", xlabel=x)
    panel.set_xticks(ticks, ticks, fontsize=8)
    panel.minorticks_off()
    panel.grid(alpha=0.3)
    panel.legend(fontsize=8)


def bars(panel: Any, rows: Sequence[Row], label: Callable[[Row], str], y: str, fmt: str = "{:.3g}") -> None:
    """A bar for each row, its figure on top."""
    places = range(len(rows))
    panel.bar_label(panel.bar(places, [row[y] for row in rows]), fmt=fmt, fontsize=8)
    panel.set_xticks(places, [label(row) for row in rows], fontsize=8)
