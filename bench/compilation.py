"""Compile times: `python -m bench.compilation` ("Compiler-First State Space Duality", Table 12).

Each program is traced and compiled with an empty persistent cache (cold), then again as a second process would, from
the cache (warm). One decode program serves generations of any length, so the paper's two columns are one here.
"""

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import typer
from jax.experimental.compilation_cache import compilation_cache

from bench.common import Bench, Row, Section, Setting, command, significant
from bench.decode import SIZES
from bench.models import beside, decode_spec, load_model, published
from mamba_jax import Params, enable_compilation_cache
from mamba_jax.planning import make_plan
from mamba_jax.programs import Spec, lower_program, model_of

# Seconds: Table 12 (TPU v6e); prefill of 1024, decode of 128 and of 4096.
TABLE_12 = {
    "mamba2-130m": (5.5, 5.6, 2.5),
    "mamba2-370m": (10.2, 13.0, 6.4),
    "mamba2-780m": (13.0, 13.7, 12.6),
    "mamba2-1.3b": (10.2, 14.9, 21.4),
    "mamba2-2.7b": (15.8, 19.5, 43.0),
}
_OPTIONS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


@contextmanager
def empty_cache() -> Iterator[None]:
    """Programs are kept in an empty folder while this lasts."""
    before = {name: getattr(jax.config, name) for name in _OPTIONS}
    try:
        with tempfile.TemporaryDirectory() as folder:
            enable_compilation_cache(Path(folder))
            yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def seconds(params: Params, spec: Spec) -> tuple[float, float]:
    """Seconds to trace and lower a program, and to compile it."""
    jax.clear_caches()
    start = time.perf_counter()
    lowered = lower_program(params, spec)
    traced = time.perf_counter()
    lowered.compile()
    return traced - start, time.perf_counter() - traced


def run(setting: Setting) -> list[Section]:
    rows: list[Row] = []
    for name in setting.models:
        params = load_model(name, setting.weights)
        length = setting.lengths[0]
        specs = {
            f"prefill {length}": Spec("prefill", 1, *make_plan(model_of(params), 1, length).segments[0].reading),
            "decode, any length": decode_spec(params),
        }
        paper = TABLE_12.get(published(name))
        for label, spec in specs.items():
            with empty_cache():
                traced, compiled = seconds(params, spec)
                again, fetched = seconds(params, spec)
            papers = None if paper is None else str(paper[0]) if spec.kind == "prefill" else f"{paper[1]} / {paper[2]}"
            rows.append(
                {
                    "model": name,
                    "program": label,
                    "trace s": significant(traced, 3),
                    "compile s": significant(compiled, 3),
                    "cold s": significant(traced + compiled, 3),
                    "warm s": significant(again + fetched, 3),
                    "paper s": papers,
                }
            )
    return [
        Section(
            "Table 12: seconds until a program is ready",
            rows,
            "The paper: TPU v6e, decode of 128 / 4096 tokens. Compile times depend on the host's cores and on the "
            f"compiler of the device: compare orders of magnitude only.{beside(setting.models)}",
            "The decode program does not know how many tokens it will be asked for.",
        )
    ]


def draw(sections: list[Section], figure: Any) -> None:
    rows = sections[0].rows
    panel = figure.subplots()
    places = range(len(rows))
    for offset, column in ((-0.2, "cold s"), (0.2, "warm s")):
        shown = panel.bar([place + offset for place in places], [row[column] for row in rows], 0.4, label=column[:-2])
        panel.bar_label(shown, fmt="{:.2g}", fontsize=8)
    labels = [f"{row['model'].removeprefix('mamba2-')}\n{row['program'].partition(',')[0]}" for row in rows]
    panel.set_xticks(places, labels, fontsize=8)
    panel.set(ylabel="seconds", title="Cold and warm persistent cache")
    panel.legend()


BENCH = Bench(
    "compilation",
    "Compile times (Table 12)",
    small=Setting(("mamba2-small",), (1024,), rounds=1),
    full=Setting(SIZES, (1024,), rounds=1),
    run=run,
    draw=draw,
    panels=2,
)
main = command(BENCH)

if __name__ == "__main__":
    typer.run(main)
