"""Peak memory of generation: `python -m bench.memory` ("Compiler-First State Space Duality", Table 11, Fig. 3).

Two figures: what the largest of a request's programs needs by XLA's own accounting (arguments, results, temporaries),
and the peak that the device reports, or on a CPU the process's. Lengths run in ascending order, all cached ones first,
since such peaks never fall. "whole text" is the paper's way without a cache: logits of the whole text in one program.
Our own recomputation (`mode="recompute"`) reads in segments and needs no more than the cached way.
"""

import concurrent.futures
import functools
import resource
import sys
from typing import Any

import jax
import jax.numpy as jnp
import typer

from bench.common import Bench, Row, Section, Setting, command, lines, program_bytes, significant
from bench.decode import LENGTHS, PROMPT, SIZES
from bench.models import beside, decode_spec, load_model, published, random_ids
from mamba_jax import Params, forward, generate
from mamba_jax.planning import make_plan
from mamba_jax.programs import model_of, program, reading_specs

# MB by length: Table 11 (TPU v6e).
TABLE_11: dict[tuple[str, str], dict[int, float]] = {
    ("mamba2-130m", "cached"): dict.fromkeys(LENGTHS, 545.6),
    ("mamba2-130m", "whole text"): dict(zip(LENGTHS, (565, 585, 624, 702, 857, 1169), strict=True)),
    ("mamba2-370m", "cached"): dict.fromkeys(LENGTHS, 1591.9),
    ("mamba2-370m", "whole text"): dict(zip(LENGTHS, (1644, 1696, 1799, 2007, 2422, 3251), strict=True)),
    ("mamba2-780m", "cached"): dict.fromkeys(LENGTHS, 3322.8),
    ("mamba2-2.7b", "cached"): {4096: 10900},
    ("mamba2-2.7b", "whole text"): {4096: 16000},
}


def measured_peak() -> float:
    """MB that the process has used at most so far: of the accelerator, or of the host's memory on a CPU."""
    stats = jax.devices()[0].memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"] / 1e6
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def cached_bytes(params: Params) -> int:
    """The most that a program of a generation needs; none of them knows how long it will be."""
    plan = make_plan(model_of(params), 1, PROMPT)
    specs = [*reading_specs("prefill", 1, plan.programs), decode_spec(params)]
    return max(program_bytes(program(params, spec)) for spec in specs)


def whole_text(params: Params, length: int) -> Any:
    """The compiled program that gives the logits of a whole text."""
    tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)
    return jax.jit(forward).lower(params, tokens).compile()


def run(setting: Setting) -> list[Section]:
    rows: list[Row] = []
    lengths = sorted(setting.lengths)

    def add(name: str, method: str, length: int, bytes_: int) -> None:
        rows.append(
            {
                "model": name,
                "method": method,
                "tokens": length,
                "programs MB": significant(bytes_ / 1e6, 5),
                "measured peak MB": significant(measured_peak(), 5),
                "paper MB": TABLE_11.get((published(name), method), {}).get(length),
            }
        )

    for name in setting.models:
        params = load_model(name, setting.weights)
        with concurrent.futures.ThreadPoolExecutor() as pool:  # all compiled before anything is measured
            needed = cached_bytes(params)
            programs = dict(zip(lengths, pool.map(functools.partial(whole_text, params), lengths), strict=True))
        generate(params, random_ids(params, PROMPT), max_new_tokens=8, stop_token_ids=[])
        for n in lengths:
            generate(params, random_ids(params, PROMPT), max_new_tokens=n, stop_token_ids=[])
            add(name, "cached", n, needed)
        for n, compiled in programs.items():
            jax.block_until_ready(compiled(params, jnp.asarray([random_ids(params, n)], jnp.int32)))
            add(name, "whole text", n, program_bytes(compiled))
        del params, programs
    first = [row for row in rows if (row["model"], row["method"]) == (setting.models[0], "cached")]
    cached = [row["measured peak MB"] for row in first]
    growth = 100 * (cached[-1] / cached[0] - 1)
    return [
        Section(
            "Table 11: peak memory of one row",
            rows,
            f"The paper: TPU v6e, float32 weights. Here: {setting.weights} weights; a peak never falls, so the "
            f"measured column means something where it is above that of the rows before.{beside(setting.models)}",
            f"With the cache the programs are the same at every length; from {lengths[0]} to {lengths[-1]} tokens the "
            f"measured peak of {setting.models[0]} grew by {growth:.2f}%.",
        )
    ]


def draw(sections: list[Section], figure: Any) -> None:
    """Fig. 3."""
    panel = figure.subplots()
    lines(panel, sections[0].rows, "tokens", "programs MB", ("model", "method"))
    panel.set(title="Peak memory by XLA's accounting", xlabel="tokens", ylabel="MB", yscale="log")


BENCH = Bench(
    "memory",
    "Peak memory of generation (Table 11, Fig. 3)",
    small=Setting(("mamba2-small",), (128, 256, 512, 1024), rounds=1),
    full=Setting(SIZES, LENGTHS, rounds=1),
    run=run,
    draw=draw,
)
main = command(BENCH)

if __name__ == "__main__":
    typer.run(main)
