"""Programs compiled for TPUs on a machine that has none: `python -m bench.tpu_aot [--full]`.

For every topology and size the decode and prefill programs are compiled by libtpu (extra `tpu-aot`), with the kernels
and without, and a table says whether they fit the chip, what they move and compute, and what time its data sheet allows
for that. Everything is computed from the compiled program; nothing here is measured but the seconds of compiling.
Weights are shapes. Rows that the result file has are not compiled again.
"""

import dataclasses
import functools
import json
import math
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer

from bench.compilation import TABLE_12
from bench.decode import V6E
from bench.models import PUBLISHED, SMALL
from mamba_jax import MambaConfig, Params
from mamba_jax.cache import init_cache
from mamba_jax.models.lm import decode_step
from mamba_jax.ops.dispatch import Implementation
from mamba_jax.params import param_shapes
from mamba_jax.programs import BLOCK, Spec, lower_shapes, prefill_segment
from mamba_jax.progress import track
from mamba_jax.tpu import (
    CHIPS,
    ONE_CHIP,
    abstract_params,
    collectives,
    cost_of,
    decode_bytes,
    kernels,
    prefill_flops,
    topology_devices,
)

CHUNK = 128  # of the XLA scans; the kernels' own too
RESULTS = Path(__file__).parent / "results" / "tpu-aot.json"
PAGE = Path(__file__).parents[1] / "docs" / "tpu.md"
PICTURE = PAGE.with_suffix(".png")
MODELS = PUBLISHED | SMALL
RATIO = "FLOPs / algorithm's"
# "Compiler-First State Space Duality", measured on a TPU v6e, float32 weights, batch 1: Table 3, HBU (%) of 1600 GB/s
# at 4096 tokens; Table 2, MFU (%) of 918 TFLOP/s at 1024 tokens; Table 11, peak memory (MB) of cached decoding.
HBU = {"mamba2-130m": 53.3, "mamba2-370m": 59.3, "mamba2-780m": 63.0, "mamba2-1.3b": 61.9, "mamba2-2.7b": 64.1}
MFU = {"mamba2-130m": 6.22, "mamba2-370m": 7.47, "mamba2-780m": 10.62, "mamba2-1.3b": 12.53, "mamba2-2.7b": 15.23}
PEAK = {"mamba2-130m": 545.6, "mamba2-370m": 1591.9, "mamba2-780m": 3322.8, "mamba2-2.7b": 10900.0}
PAPER_TOKENS = {name: rates["device"][4096] for name, rates in V6E.items()} | {"mamba2-2.7b": 94}

Row = dict[str, Any]


def compile_one(topology: str, model: str, kind: str, length: int, implementation: Implementation) -> Row:
    """Compile a program for one device of a topology, batch 1, bfloat16 weights, and say what it would cost."""
    config, chip = MODELS[model], CHIPS[topology.partition(":")[0]]
    params = abstract_params(config, "bfloat16", topology_devices(topology)[0])
    spec = Spec("decode", 1, BLOCK) if kind == "decode" else Spec("prefill", 1, length, CHUNK)
    spec = spec._replace(implementation=implementation)
    begin = time.perf_counter()
    compiled = lower_shapes(params, spec).compile()
    seconds = time.perf_counter() - begin
    cost = cost_of(compiled, chip)
    state = jax.tree.leaves(jax.eval_shape(lambda: init_cache(config, 1, "bfloat16")))
    row: Row = {
        "topology": topology,
        "model": model,
        "program": kind,
        "length": length,
        "implementation": implementation,
        **cost._asdict(),
        "cache in place": cost.aliased >= sum(leaf.size * leaf.dtype.itemsize for leaf in state),
        "compile s": round(seconds, 1),
        "jax": jax.__version__,
    }
    if kind == "decode":
        row["bytes / (weights + 2 states)"] = round(cost.hbm_bytes / decode_bytes(config, "bfloat16"), 4)
        row["computed tok/s"] = round(1 / cost.seconds)
    else:
        row[RATIO] = round(cost.flops / prefill_flops(config, 1, length, CHUNK), 4)
        row["computed ms"] = round(1e3 * cost.seconds, 3)
    return row


def head_shardings(config: MambaConfig, mesh: jax.sharding.Mesh) -> Params:
    """Where a model's weights lie if its channels are divided over a mesh's one axis: shapes with shardings."""
    outputs = {"in_proj", "conv", "conv_bias", "dt_proj", "dt_bias", "A_log", "D", "gated_norm"}
    inputs = {"out_proj", "x_proj"}

    def place(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        name = path[-1].name
        spec = jax.P("x") if name in outputs else jax.P(None, "x") if name in inputs else jax.P()
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=jax.NamedSharding(mesh, spec))

    return jax.tree_util.tree_map_with_path(place, param_shapes(config, "bfloat16"))


def compile_two(
    topology: str, model: str, kind: str, length: int, implementation: Implementation, layers: int = 2
) -> Row:
    """Compile a step or a prefill with channels and heads divided over two devices.

    XLA's partitioner splits its ops, and each device runs the kernels for its own heads. A few layers are enough to see
    what it inserts in each.
    """
    config = dataclasses.replace(MODELS[model], n_layer=layers)
    mesh = jax.sharding.Mesh(np.array(topology_devices(topology)[:2]), "x")

    def placed(shape: tuple[int, ...], dtype: Any, spec: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, spec))

    cache = jax.eval_shape(lambda: init_cache(config, 1, "bfloat16"))
    heads = jax.P(None, "x") if config.layer == "mamba2" else jax.P(None, None, "x")
    cache = dataclasses.replace(
        cache,
        conv=tuple(placed(leaf.shape, leaf.dtype, jax.P(None, None, "x")) for leaf in cache.conv),
        ssm=tuple(placed(leaf.shape, leaf.dtype, heads) for leaf in cache.ssm),
    )
    kept = jax.tree.map(lambda leaf: leaf.sharding, cache)
    whole = jax.NamedSharding(mesh, jax.P())
    params = head_shardings(config, mesh)
    if kind == "decode":
        run = functools.partial(decode_step, implementation=implementation)
        step = jax.jit(run, donate_argnums=2, out_shardings=(whole, kept))
        lowered = step.lower(params, placed((1,), jnp.int32, jax.P()), cache)
    else:
        read = functools.partial(prefill_segment, chunk_size=CHUNK, implementation=implementation)
        tokens, lengths = placed((1, length), jnp.int32, jax.P()), placed((1,), jnp.int32, jax.P())
        logits = placed((1, config.padded_vocab_size), jnp.float32, jax.P())
        lowered = jax.jit(read, donate_argnums=(3, 4), out_shardings=(kept, whole, None)).lower(
            params, tokens, lengths, cache, logits
        )
    compiled = lowered.compile()
    memory: Any = compiled.memory_analysis()
    return {
        "topology": topology,
        "model": model,
        "program": kind,
        "length": length,
        "implementation": implementation,
        "layers": layers,
        "kernels": kernels(compiled.as_text() or ""),
        "collectives": collectives(compiled.as_text() or ""),
        "arguments a device": memory.argument_size_in_bytes,
        "aliased": memory.alias_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
    }


INTRODUCTION = """# TPU programs, computed

Made by `python -m bench.tpu_aot` from programs that libtpu compiled on a machine without a TPU: batch 1, bfloat16
weights, float32 states. **Nothing here was measured on a TPU**: a time is the larger of FLOPs and bytes over what the
chip's data sheet promises, so a bound that no program beats, not a forecast. Paper columns are what "Compiler-First
State Space Duality" measured on a TPU v6e with float32 weights (Tables 1, 2, 3, 10, 11; 12 for the seconds of
compiling, which are of another host). Bytes are what the instructions of the compiled program read from and write to
HBM. For a v7x decode programs are compiled with
`xla_tpu_control_large_2nd_minor_layout_for_x16=0`, as the engine does: else the compiler keeps the weights a second
time, in tiles of 16 rows, and turns the embedding back for each token (1.47 times the bytes at 130M).
"""
PREFILL = """FLOPs are the compiler's, in which a kernel counts what it declares (its matrix products as it runs
them) and the body of a loop once: Mamba-1's XLA scan is a loop, whose FLOPs are therefore too few. Work outside the
matrix unit, such as the exponentials of the scans, is not in the bound. A longer prompt runs the same programs segment
by segment.
"""
TWO = """What XLA's partitioner inserts in a program of two layers, with channels and heads divided over two of the
devices. Kernels it cannot split: each device runs them for its own heads or channels, under `shard_map`. Mamba-1's step
has no such form, since x_proj needs all channels in the middle of it.
"""


def decode_row(row: Row) -> Row:
    chip, model = row["topology"].partition(":")[0], row["model"]
    rate = PAPER_TOKENS.get(model) if chip == "v6e" else None
    return {
        "chip": chip,
        "model": model,
        "ops": row["implementation"],
        "MB": round(row["hbm_bytes"] / 1e6),
        "/ (weights + 2 states)": f"{row['bytes / (weights + 2 states)']:.3f}",
        "bound": row["bound"],
        "computed tok/s": row["computed tok/s"],
        "paper tok/s": rate,
        "paper MB": round(HBU[model] / 100 * 1600e9 / rate / 1e6) if rate else None,
        "peak MB": peak(row),
        "paper peak MB": PEAK.get(model) if chip == "v6e" else None,
        "cache in place": "yes" if row["cache in place"] else "no",
        "kernels": row["kernels"],
        "compile s": row["compile s"],
        "paper compile s": TABLE_12[model][1] if chip == "v6e" and model in TABLE_12 else None,
    }


def prefill_row(row: Row) -> Row:
    chip, model = row["topology"].partition(":")[0], row["model"]
    paper = None
    if chip == "v6e" and row["length"] == 1024 and model in MFU:
        weights = sum(leaf.size for leaf in jax.tree.leaves(param_shapes(MODELS[model])))
        paper = round(2e3 * weights * 1024 / (MFU[model] / 100 * 918e12), 1)
    return {
        "chip": chip,
        "model": model,
        "tokens": row["length"],
        "ops": row["implementation"],
        "GFLOP": round(row["flops"] / 1e9),
        "/ algorithm's": f"{row[RATIO]:.3f}",
        "MB": round(row["hbm_bytes"] / 1e6),
        "bound": row["bound"],
        "computed ms": row["computed ms"],
        "paper ms": paper,
        "temporaries MB": round(row["temporaries"] / 1e6),
        "peak MB": peak(row),
        "kernels": row["kernels"],
        "compile s": row["compile s"],
        "paper compile s": None if paper is None else TABLE_12[model][0],
    }


def two_row(row: Row) -> Row:
    return {
        "devices of": row["topology"],
        "model": row["model"],
        "program": row["program"] + (f" {row['length']}" if row["length"] else ""),
        "ops": row["implementation"],
        "kernels": row["kernels"],
        "collectives": ", ".join(f"{count} {name}" for name, count in row["collectives"].items()) or "none",
        "arguments a device MB": round(row["arguments a device"] / 1e6, 1),
        "temporaries MB": round(row["temporaries"] / 1e6, 1),
    }


def peak(row: Row) -> str:
    return f"{row['peak'] / 1e6:.0f}" + ("" if row["fits"] else " (does not fit)")


def markdown(rows: list[Row]) -> str:
    def line(cells: Any) -> str:
        return "| " + " | ".join("" if cell is None else str(cell) for cell in cells) + " |\n"

    if not rows:
        return "None yet.\n"
    return line(rows[0]) + line("---" for _ in rows[0]) + "".join(line(row.values()) for row in rows)


def page(one: list[Row], two: list[Row], failed: dict[str, str] | None = None) -> str:
    """The tables as Markdown."""
    rows = sorted(one, key=lambda r: (r["topology"], list(MODELS).index(r["model"]), r["length"], r["implementation"]))
    decode, prefill = ([row for row in rows if row["program"] == kind] for kind in ("decode", "prefill"))
    two = sorted(two, key=lambda r: (list(MODELS).index(r["model"]), r["program"], r["implementation"]))
    parts = [
        INTRODUCTION,
        f"![Computed cost on a TPU v6e beside the paper's measurements]({PICTURE.name})\n",
        "## Decode, a token\n",
        markdown([decode_row(row) for row in decode]),
        "## Prefill\n",
        PREFILL,
        markdown([prefill_row(row) for row in prefill]),
        "## Two devices\n",
        TWO,
        markdown([two_row(row) for row in two]),
        *(f"Not to be had: {program} ({why}).\n" for program, why in (failed or {}).items()),
    ]
    return "\n".join(parts)


def draw(one: list[Row], path: Path) -> None:
    """Write a picture of what the published sizes cost on a v6e by the compiler, and what the paper measured there."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), layout="constrained")
    panels = figure.subplots(1, 2)
    rows = [row for row in one if row["topology"] == "v6e:1x1" and row["length"] in (0, 1024)]
    parts = (
        ("decode", decode_row, "MB", "paper MB", "HBM traffic of a token, MB"),
        ("prefill", prefill_row, "computed ms", "paper ms", "1024 tokens, ms"),
    )
    for panel, (kind, cells, ours, theirs, label) in zip(panels, parts, strict=True):
        models = [model for model in PUBLISHED if any((row["program"], row["model"]) == (kind, model) for row in rows)]
        for i, (name, column) in enumerate((("xla", ours), ("pallas", ours), ("paper", theirs))):
            wanted = "pallas" if name == "paper" else name
            found = {
                row["model"]: cells(row)[column]
                for row in rows
                if (row["program"], row["implementation"]) == (kind, wanted)
            }
            heights = [found.get(model) or math.nan for model in models]
            source = "paper: measured, float32 weights" if name == "paper" else f"{name}: computed, bfloat16 weights"
            panel.bar([place + 0.27 * (i - 1) for place in range(len(models))], heights, 0.27, label=source)
        panel.set(yscale="log", ylabel=label, title=f"{kind}, batch 1")
        panel.set_xticks(range(len(models)), models, rotation=40, ha="right", fontsize=8)
        panel.grid(axis="y", alpha=0.3)
        panel.legend(fontsize=8, loc="upper left")
    figure.suptitle("TPU v6e: computed from compiled programs (bounds, not measurements)", fontsize=11)
    figure.savefig(path, dpi=110)


def main(
    models: Annotated[str, typer.Option(help="Sizes, as in mamba2-130m,mamba1-2.8b.")] = "mamba1-130m,mamba2-130m",
    topologies: Annotated[str, typer.Option(help="Topologies, as in v5e:1x1,v6e:1x1.")] = "v5e:1x1,v6e:1x1",
    lengths: Annotated[str, typer.Option(help="Tokens of a prefill program.")] = "1024",
    implementations: Annotated[str, typer.Option(help="Of xla and pallas.")] = "xla,pallas",
    programs: Annotated[str, typer.Option(help="Of decode and prefill.")] = "decode,prefill",
    two: Annotated[bool, typer.Option("--two/--no-two", help="Also programs for two devices.")] = True,
    full: Annotated[bool, typer.Option("--full", help="All sizes on all chips: two hours.")] = False,
    out: Annotated[Path, typer.Option(help="JSON of results, added to.")] = RESULTS,
) -> None:
    """Compile programs for TPUs, and write what they would cost as JSON and as a page."""
    names = list(PUBLISHED) if full else models.split(",")
    places = list(ONE_CHIP.values()) if full else topologies.split(",")
    wanted: list[tuple[Any, ...]] = [
        (topology, model, kind, length, implementation)
        for topology in places
        for model in names
        for implementation in implementations.split(",")
        for kind in programs.split(",")
        for length in (map(int, lengths.split(",")) if kind == "prefill" else [0])
    ]
    if full:  # the longest segment of a prompt, on the chip of the least memory
        wanted += [("v5e:1x1", model, "prefill", 2048, "pallas") for model in names]
    kept: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {"one": [], "two": []}
    pairs = [
        ("v6e:2x2", model, kind, 1024 * (kind == "prefill"), implementation)
        for model in names
        for kind in programs.split(",")
        for implementation in implementations.split(",")
        if two and (implementation, kind, MODELS[model].layer) != ("pallas", "decode", "mamba1")
    ]
    names_of = ("topology", "model", "program", "length", "implementation")
    have, both = ({tuple(row[name] for name in names_of) for row in kept[where]} for where in ("one", "two"))
    todo: list[tuple[Any, str, tuple[Any, ...]]] = [(compile_one, "one", key) for key in wanted if key not in have]
    todo += [(compile_two, "two", pair) for pair in pairs if pair not in both]
    kept |= {"about": "computed from programs compiled for TPUs; not measured on one", "failed": {}}
    out.parent.mkdir(parents=True, exist_ok=True)
    with track("Compiling", len(todo)) as advance:
        for compile_it, where, key in todo:
            try:
                kept[where].append(compile_it(*key))
            except jax.errors.JaxRuntimeError as error:  # the compiler fails, or JAX cannot read its program
                kept["failed"][" ".join(map(str, key))] = str(error).strip().splitlines()[-1]
            out.write_text(json.dumps(kept, indent=1) + "\n")
            advance(1)
    if out == RESULTS:
        PAGE.write_text(page(kept["one"], kept["two"], kept["failed"]))
        draw(kept["one"], PICTURE)
    for program, why in kept["failed"].items():
        sys.stderr.write(f"{program}: {why}\n")
    if kept["failed"]:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
