"""Time whole models: `python -m bench.engine [--model mamba2-130m] [--dtype float32] [--against transformers]`.

Weights are random, of the published sizes (speed does not depend on their values). Decoding is timed as the difference
of a long and a short generation, prefill as the time to the last position's logits and the cache, from ids on the host;
for a prompt of one segment the compiled program is also timed alone ("program_seconds" in the report). Contenders take
turns, round after round; a turn is the median of as many runs as fill a fifth of a second. A probe of the memory's read
bandwidth stands before and after each turn: on a shared CPU a turn counts only if its two probes agree. The figure is
the median of the turns; compilation is timed apart.
"""

import dataclasses
import functools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

import mamba_jax
from bench.common import bandwidth_probe, environment, matmul_rate
from bench.models import PUBLISHED, decode_spec, random_params
from mamba_jax.ops.dispatch import Implementation
from mamba_jax.planning import Plan, make_plan
from mamba_jax.programs import (
    Spec,
    compile_programs,
    model_of,
    program,
    program_weights,
    read_prompts,
    reading_specs,
)

TURN = 0.2  # seconds of a short task's runs between two probes
LEAST_NEW = 16  # tokens between a short and a long generation; the difference of fewer is noise
AGREE = 0.15  # largest relative difference of two probes around a timing that counts


class Contender(Protocol):
    """A model that can be timed."""

    def decode(self, count: int) -> float:
        """Seconds to generate `count` tokens, plus what does not depend on `count`."""

    def prefill(self, length: int) -> float:
        """Seconds to read `length` tokens."""


class Ours:
    """mamba_jax."""

    def __init__(
        self, name: str, dtype: str, batch: int, prompt: int, implementation: Implementation | None = None
    ) -> None:
        self.params = program_weights(random_params(name, dtype))
        self.batch, self.prompt, self.implementation = batch, prompt, implementation

    def _prompts(self, length: int) -> list[list[int]]:
        return np.random.default_rng(length).integers(0, 50277, (self.batch, length)).tolist()

    def decode(self, count: int) -> float:
        prompts = self._prompts(self.prompt)
        results: Any = mamba_jax.generate(
            self.params, prompts, max_new_tokens=count, stop_token_ids=[], implementation=self.implementation
        )
        return results[0].timings["decode_s"]

    def prefill(self, length: int) -> float:
        prompts = self._prompts(length)
        start = time.perf_counter()
        jax.block_until_ready(read_prompts(self.params, prompts, implementation=self.implementation))
        return time.perf_counter() - start

    def plan(self, length: int) -> Plan:
        """What reading `length` tokens runs."""
        return make_plan(model_of(self.params), self.batch, length, implementation=self.implementation)

    def segment(self, length: int) -> float:
        """Seconds of the compiled program alone that reads `length` tokens, its arguments on the device."""
        plan = self.plan(length)
        run = program(self.params, reading_specs("prefill", plan.batch, plan.programs)[1])
        rows = np.zeros((plan.batch, length), np.int32)
        rows[: self.batch] = self._prompts(length)
        tokens, lengths = jnp.asarray(rows), jnp.where(jnp.arange(plan.batch) < self.batch, length, 0)
        state = program(self.params, Spec("init", plan.batch))()
        times = []
        for _ in range(10):
            jax.block_until_ready(state)
            start = time.perf_counter()
            *state, _ = jax.block_until_ready(run(self.params, tokens, lengths, *state))
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    def compile(self, lengths: list[int]) -> float:
        """Seconds to compile what all timings need."""
        plans = [self.plan(length) for length in (self.prompt, *lengths)]
        specs = [spec for plan in plans for spec in reading_specs("prefill", plan.batch, plan.programs)]
        start = time.perf_counter()
        compile_programs(self.params, [*specs, decode_spec(self.params, plans[0].batch, self.implementation)])
        return time.perf_counter() - start

    def temporaries(self, length: int) -> int:
        """Bytes of temporaries of the largest program that a prompt of this length runs."""
        plan = self.plan(length)
        specs = reading_specs("prefill", plan.batch, plan.programs)
        analyses: Any = [program(self.params, spec).memory_analysis() for spec in specs]
        return max(analysis.temp_size_in_bytes for analysis in analyses)


class Transformers:
    """transformers on torch, two threads, its cached greedy generation."""

    def __init__(self, name: str, dtype: str, batch: int, prompt: int) -> None:
        import torch
        import transformers

        c = PUBLISHED[name]
        shared: dict[str, Any] = {
            "vocab_size": c.padded_vocab_size,
            "hidden_size": c.d_model,
            "state_size": c.d_state,
            "num_hidden_layers": c.n_layer,
            "tie_word_embeddings": True,
            "pad_token_id": 0,
            "eos_token_id": 0,
        }
        if c.layer == "mamba1":
            model: Any = transformers.MambaForCausalLM(transformers.MambaConfig(**shared))
        else:
            heads: dict[str, Any] = {"num_heads": c.nheads, "head_dim": c.headdim, "n_groups": c.ngroups}
            model = transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**shared, **heads))
        self.torch, self.batch, self.prompt = torch, batch, prompt
        self.model = model.to(getattr(torch, dtype)).eval()

    def _prompts(self, length: int) -> Any:
        return self.torch.from_numpy(np.random.default_rng(length).integers(1, 50277, (self.batch, length)))

    def decode(self, count: int) -> float:
        ids = self._prompts(self.prompt)
        start = time.perf_counter()
        with self.torch.inference_mode():
            self.model.generate(ids, min_new_tokens=count, max_new_tokens=count, do_sample=False)
        return time.perf_counter() - start

    def prefill(self, length: int) -> float:
        ids = self._prompts(length)
        start = time.perf_counter()
        with self.torch.inference_mode():
            self.model(ids, use_cache=True, logits_to_keep=1)
        return time.perf_counter() - start


@dataclasses.dataclass
class Timing:
    """One task of one contender: every run, and the probe bandwidths (GB/s) before and after it."""

    contender: str
    task: str
    runs: list[tuple[float, float, float]] = dataclasses.field(default_factory=list)

    @property
    def kept(self) -> list[tuple[float, float]]:
        """(seconds, probe) of the runs whose probes agree; of all runs if none does."""
        good = [(s, (a + b) / 2) for s, a, b in self.runs if abs(a - b) <= AGREE * max(a, b)]
        return good or [(s, (a + b) / 2) for s, a, b in self.runs]

    @property
    def seconds(self) -> float:
        """Median."""
        return statistics.median(s for s, _ in self.kept)

    @property
    def probe(self) -> float:
        """Median read bandwidth around the kept runs, GB/s."""
        return statistics.median(p for _, p in self.kept)


def measure(
    contenders: dict[str, Contender], lengths: list[int], new: tuple[int, int], rounds: int, probe: Callable[[], float]
) -> list[Timing]:
    """All timings, contenders taking turns."""
    tasks: dict[str, Callable[[Contender], float]] = {
        f"prefill {length}": functools.partial(lambda c, n: c.prefill(n), n=length) for length in lengths
    }
    tasks["decode"] = lambda c: (c.decode(new[1]) - c.decode(new[0])) / (new[1] - new[0])
    timings = {(name, task): Timing(name, task) for task in tasks for name in contenders}
    for name, task in timings:  # warm-up: first calls allocate and, for torch, choose kernels
        tasks[task](contenders[name])
    turns = [key for _ in range(rounds) for key in timings]
    for name, task in track(turns, description="Timing", console=Console(stderr=True), transient=True):
        before = probe()
        seconds = _median(functools.partial(tasks[task], contenders[name]))
        timings[name, task].runs.append((seconds, before, probe()))
    return list(timings.values())


def _median(task: Callable[[], float]) -> float:
    """Median of as many runs as fill TURN, at least one."""
    end, times = time.perf_counter() + TURN, [task()]
    while time.perf_counter() < end:
        times.append(task())
    return statistics.median(times)


def summarise(timings: list[Timing], ours: Ours, rate: float) -> list[dict[str, Any]]:
    """A row for each timing: tokens per second, and what part of the machine's limits that is."""
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(ours.params))
    every_token = sum(leaf.size for leaf in jax.tree.leaves(ours.params.layers))
    state = _state_bytes(ours)
    rows = []
    for timing in timings:
        if timing.seconds <= 0:
            raise ValueError(f"{timing.contender}, {timing.task}: more tokens took no longer: set --new further apart")
        tokens = ours.batch * (1 if timing.task == "decode" else int(timing.task.split()[1]))
        row = {
            "contender": timing.contender,
            "task": timing.task,
            "seconds": timing.seconds,
            "tokens_per_s": tokens / timing.seconds,
            "probe_gb_s": timing.probe,
            "kept": len(timing.kept),
            "runs": timing.runs,
        }
        if timing.task == "decode":
            row["bandwidth_share"] = (weights + 2 * state) / timing.seconds / 1e9 / timing.probe
        else:
            head = ours.params.embedding.size * ours.batch  # meets the last token of a row alone
            row["matmul_share"] = 2 * (every_token * tokens + head) / timing.seconds / 1e12 / rate
            if timing.contender == "mamba_jax":
                length = int(timing.task.split()[1])
                row["temporaries_bytes"] = ours.temporaries(length)
                if [segment.length for segment in ours.plan(length).segments] == [length]:
                    row["program_seconds"] = ours.segment(length)
        rows.append(row)
    return rows


def _state_bytes(ours: Ours) -> int:
    cache = jax.eval_shape(lambda: mamba_jax.init_cache(ours.params.config, ours.batch, ours.params.dtype))
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))


def show(report: dict[str, Any]) -> None:
    """Print the report as a table."""
    table = Table(title=f"{report['device']}, {report['date']}")
    for column in ("model", "dtype", "batch", "task", "contender", "ms", "tokens/s", "share of limit", "probe GB/s"):
        table.add_column(column, justify="right" if column not in ("model", "task", "contender") else "left")
    for run in report["runs"]:
        for row in run["rows"]:
            share = row.get("bandwidth_share", row.get("matmul_share"))
            what = (run["model"], run["dtype"], str(run["batch"]), row["task"], row["contender"])
            speed = (f"{row['seconds'] * 1e3:.2f}", f"{row['tokens_per_s']:.1f}")
            table.add_row(*what, *speed, f"{share:.0%}", f"{row['probe_gb_s']:.1f}")
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def draw(report: dict[str, Any], path: Path) -> None:
    """Bars of tokens per second, a panel for each task."""
    import matplotlib.pyplot as plt

    rows = [{**row, "label": f"{run['model']}\n{run['dtype']}"} for run in report["runs"] for row in run["rows"]]
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    figure, panels = plt.subplots(1, len(tasks), figsize=(4.5 * len(tasks), 4.5), squeeze=False, layout="constrained")
    for panel, task in zip(panels[0], tasks, strict=True):
        labels = list(dict.fromkeys(row["label"] for row in rows))
        names = list(dict.fromkeys(row["contender"] for row in rows))
        for i, name in enumerate(names):
            found = {r["label"]: r["tokens_per_s"] for r in rows if r["contender"] == name and r["task"] == task}
            places = np.arange(len(labels)) + (i - (len(names) - 1) / 2) * 0.8 / len(names)
            bars = panel.bar(places, [found.get(label, 0) for label in labels], 0.8 / len(names), label=name)
            panel.bar_label(bars, fmt="{:.0f}", fontsize=8)
        panel.set_xticks(np.arange(len(labels)), labels, fontsize=8)
        panel.set_ylabel("tokens per second")
        panel.set_title(task)
    figure.legend(*panels[0][-1].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    figure.suptitle(f"{report['device']}, {report['date']}")
    figure.savefig(path, dpi=120)


def main(
    model: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(PUBLISHED)}.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="float32, bfloat16 or float16.")] = None,
    prefill: Annotated[list[int] | None, typer.Option(help="Prompt lengths.")] = None,
    new: Annotated[tuple[int, int], typer.Option(help="Short and long generation.")] = (32, 96),
    prompt: Annotated[int, typer.Option(help="Tokens before those that are decoded.")] = 16,
    batch: int = 1,
    rounds: int = 5,
    against: Literal["transformers", "none"] = "none",
    implementation: Annotated[
        Literal["xla", "pallas"] | None, typer.Option(help="Of scans and steps.", show_default="the plan's")
    ] = None,
    out: Annotated[Path | None, typer.Option("--json", help="Write the report.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a picture.")] = None,
) -> None:
    """Time whole models with random weights."""
    if not 1 <= new[0] <= new[1] - LEAST_NEW:
        problem = f"got {new[0]} {new[1]}, wanted a short and a long generation, {LEAST_NEW} tokens or more apart"
        raise typer.BadParameter(problem, param_hint="--new")
    lengths = prefill or [512, 2048]
    probe = bandwidth_probe()
    packages = ("jax", "jaxlib", *(("torch", "transformers") if against == "transformers" else ()))
    report: dict[str, Any] = {
        **environment("engine", packages),
        "runs": [],
    }
    for name in model or ["mamba2-130m"]:
        for kind in dtype or ["float32"]:
            ours = Ours(name, kind, batch, prompt, implementation)
            compile_s = ours.compile(lengths)
            contenders: dict[str, Contender] = {"mamba_jax": ours}
            if against == "transformers":
                contenders["transformers"] = Transformers(name, kind, batch, prompt)
            rate = matmul_rate(kind)
            timings = measure(contenders, lengths, new, rounds, probe)
            rows = summarise(timings, ours, rate)
            facts = {
                "model": name,
                "dtype": kind,
                "batch": batch,
                "prompt": prompt,
                "decoded_by": decode_spec(ours.params, batch, implementation).implementation,
                "read_by": {n: [s.implementation for s in ours.plan(n).segments] for n in lengths},
                "compile_s": compile_s,
                "matmul_tflop_s": rate,
            }
            report["runs"].append({**facts, "rows": rows})
            if out is not None:
                out.write_text(json.dumps(report, indent=1))
    show(report)
    if plot is not None:
        draw(report, plot)


if __name__ == "__main__":
    typer.run(main)
