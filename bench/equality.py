"""Does the chunk size change what a model says? `python -m bench.equality` (the COREY paper's Tables 8 and 28).

80 prompts of eight serving regimes and four LongBench tasks, at most 1024 tokens of each, are continued greedily in
float32 with every static chunk size and every policy; token ids are compared with those of the default policy. Then
every policy reads the prompts with the default's continuations: the perplexity of the whole over the default's is 1
where nothing changed.

A statistic chooses from the third segment of a text on, so policies that look at one are compared a second time, with
short segments (`--segments`), of which a prompt has many. The baseline is the default policy with segments as planned
both times, so that segments are compared too. What runs the same programs runs once.

A token on which two logits nearly tie may flip: then the margin at the first difference is reported.
"""

import contextlib
import dataclasses
import datetime
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, cast

import jax
import numpy as np
import typer
from rich.console import Console

import mamba_jax
from bench.common import Row, Section, environment, show
from bench.prompts import Codec, Prompt, Tokens, longbench_prompts, reference_folder, regime_prompts
from bench.regimes import Key, chunk_shares, ran
from mamba_jax import planning
from mamba_jax.params import Params
from mamba_jax.planning import LAG, as_policy, make_plan
from mamba_jax.programs import Spec, compile_programs, model_of, program, program_weights, read_prompts, segments
from mamba_jax.progress import track
from mamba_jax.scheduler.calibration import Calibration, Timing, write_calibration
from mamba_jax.scheduler.policies import LearnedTable, PerLayer, Policy, Rule

BATCH = 16
PROMPTS = 80
# Beginnings of texts fill the prompts up to 80: lengths around those of segments and chunks.
BEGINNINGS = (1, 2, 15, 16, 17, 33, 63, 64, 65, 100, 127, 128, 129, 200, 255, 256, 257, 400, 511, 512, 513, 800)
CHUNK_SIZES = (16, 32, 64, 128, 256, 512)
POLICIES = (
    *(f"static:{size}" for size in CHUNK_SIZES),
    "midpoint",
    "random:0",
    "random:1:16..256",
    "length",
    "corey-default",
    "corey-legacy",
    "corey-h800",
    "bits-tile-legacy",
    "entropy:sampled",
    "entropy:sampled-robust",
    "entropy:token",
    "entropy:cheap",
    "entropy:variance",
    "entropy:kurtosis",
    "guarded:sampled",
    "guarded:histogram:16..256",
    "careful:entropy:sampled",
    "careful:corey-default",
)
TABLE = LearnedTable(
    (Rule(16, length_max=100), Rule(32, layer_max=1), Rule(256, entropy_min=3.2), Rule(128, variance_min=0.5)), 64
)
DEFAULT = planning.DEFAULT_POLICY


@dataclasses.dataclass
class Outcome:
    """What one policy made of all prompts.

    Attributes:
        tokens: continuations.
        logprobs: of their tokens.
        total: log-probability of each prompt with the baseline's continuation.
        keys: the programs that read the prompts.
    """

    tokens: list[list[int]]
    logprobs: list[list[float]]
    total: list[float]
    keys: list[Key]


class Reader:
    """Continues prompts in batches of like lengths; what runs the same programs runs once."""

    def __init__(self, params: Params, prompts: Sequence[Prompt], new: int) -> None:
        self.params, self.weights, self.prompts, self.new = params, program_weights(params), prompts, new
        self.model = model_of(self.weights)
        order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i].ids))
        self.batches = [order[start : start + BATCH] for start in range(0, len(order), BATCH)]
        self.generated: dict[tuple[int, Key], list[mamba_jax.Generation]] = {}
        self.scored: dict[tuple[int, Key], list[float]] = {}

    def compile(self, policies: Sequence[Policy | None]) -> None:
        """Compile, side by side, what is known to run before anything does."""
        specs: dict[Spec, None] = {}
        for policy in policies:
            for batch in self.batches:
                longest = len(self.prompts[batch[0]].ids)
                for kind, length in (("prefill", longest), ("score", longest + self.new)):
                    plan = make_plan(self.model, len(batch), length, policy)
                    specs[Spec("init", plan.batch)] = None
                    # What a statistic chooses for is left out; so is what scoring would only watch.
                    for one in plan.segments[: LAG if plan.candidates else None]:
                        reading = one.reading if kind == "prefill" else one.reading._replace(watch=None)
                        specs[Spec(kind, plan.batch, *reading)] = None
        compile_programs(self.weights, specs)

    def key(self, rows: list[list[int]], policy: Policy | None) -> Key:
        """The programs that reading rows runs; what a statistic chooses is found by reading."""
        plan = make_plan(self.model, len(rows), max(map(len, rows)), policy)
        if not plan.candidates:
            return tuple(segment.reading for segment in plan.segments)
        return ran(plan, read_prompts(self.weights, rows, policy)[2])

    def continuations(self, policy: Policy | None) -> tuple[list[mamba_jax.Generation], list[Key]]:
        """Of every prompt, and the programs that read it."""
        found: dict[int, tuple[mamba_jax.Generation, Key]] = {}
        for number, batch in enumerate(self.batches):
            rows = [list(self.prompts[i].ids) for i in batch]
            key = self.key(rows, policy)
            if (number, key) not in self.generated:
                results = mamba_jax.generate(
                    self.params, rows, max_new_tokens=self.new, stop_token_ids=[], logprobs=True, policy=policy
                )
                self.generated[number, key] = cast(list[mamba_jax.Generation], results)
            found |= {i: (one, key) for i, one in zip(batch, self.generated[number, key], strict=True)}
        return [found[i][0] for i in range(len(found))], [found[i][1] for i in range(len(found))]

    def totals(self, texts: Sequence[list[int]], policy: Policy | None) -> list[float]:
        """Log-probability of every text, read with the chunk sizes that a policy chooses for it."""
        found: dict[int, float] = {}
        for number, batch in enumerate(self.batches):
            rows = [texts[i] for i in batch]
            key = tuple(reading._replace(watch=None) for reading in self.key(rows, policy))
            if (number, key) not in self.scored:
                self.scored[number, key] = self._score(rows, key)
            found |= dict(zip(batch, self.scored[number, key], strict=True))
        return [found[i] for i in range(len(found))]

    def _score(self, rows: list[list[int]], key: Key) -> list[float]:
        """Log-probabilities of rows, each but its first token, with the chunk sizes of a key."""
        plan = make_plan(self.model, len(rows), max(map(len, rows)))
        total = np.zeros(plan.batch)
        cache, _ = program(self.weights, Spec("init", plan.batch))()
        for reading, (offset, tokens, lengths) in zip(key, segments(rows, plan), strict=True):
            targets, counted = np.zeros_like(tokens), np.zeros(tokens.shape, bool)
            for i, row in enumerate(rows):
                part = row[offset + 1 : offset + 1 + reading.length]
                targets[i, : len(part)], counted[i, : len(part)] = part, True
            run = program(self.weights, Spec("score", plan.batch, *reading))
            cache, logprobs, _ = run(self.weights, tokens, targets, lengths, cache)
            total += np.sum(np.asarray(logprobs, np.float64), axis=1, where=counted)
        return total[: len(rows)].tolist()

    def outcome(self, policy: Policy | None, baseline: Outcome | None) -> Outcome:
        """What a policy makes of the prompts and of the baseline's continuations (None: of its own)."""
        results, keys = self.continuations(policy)
        tokens = [result.tokens for result in results]
        follow = tokens if baseline is None else baseline.tokens
        texts = [[*prompt.ids, *more] for prompt, more in zip(self.prompts, follow, strict=True)]
        logprobs = [cast(list[float], result.logprobs) for result in results]
        return Outcome(tokens, logprobs, self.totals(texts, policy), keys)


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The first position at which two continuations differ; None for equal ones."""
    if len(a) != len(b):
        raise ValueError(f"continuations: got {len(a)} and {len(b)} tokens, wanted as many of both")
    return next((i for i, (one, other) in enumerate(zip(a, b, strict=True)) if one != other), None)


def margin(params: Params, ids: Sequence[int], tokens: tuple[int, int]) -> Row:
    """How near to a tie two tokens are after a text: the difference of their logits and of the best two."""
    logits = np.asarray(mamba_jax.forward(params, np.array([ids])), np.float64)[0, -1]
    best = np.sort(logits)[-2:]
    return {"tokens": list(tokens), "between": float(logits[tokens[0]] - logits[tokens[1]]), "top": float(np.ptp(best))}


def compare(params: Params, prompts: Sequence[Prompt], outcome: Outcome, baseline: Outcome) -> Row:
    """A policy against the baseline."""
    differing, furthest, ratios = [], 0.0, []
    for i, prompt in enumerate(prompts):
        ours, theirs = outcome.tokens[i], baseline.tokens[i]
        at = first_difference(ours, theirs)
        same = slice(0, at)
        apart = np.abs(np.subtract(outcome.logprobs[i][same], baseline.logprobs[i][same]))
        furthest = max(furthest, float(apart.max(initial=0)))
        ratios.append(math.exp((baseline.total[i] - outcome.total[i]) / (len(prompt.ids) + len(theirs) - 1)))
        if at is not None:
            text = [*prompt.ids, *theirs[:at]]
            where = {"prompt": prompt.name, "position": at, **margin(params, text, (theirs[at], ours[at]))}
            differing.append(where)
    worst = max(ratios, key=lambda ratio: abs(ratio - 1))
    return {
        "prompts": len(prompts),
        "equal": len(prompts) - len(differing),
        "differing": differing,
        "logprob_apart": furthest,
        "perplexity_ratio": worst,
        "same_programs": sum(a == b for a, b in zip(outcome.keys, baseline.keys, strict=True)),
        "chunks": chunk_shares(outcome.keys),
    }


def choose_prompts(data: Path, codec: Codec, cap: int, count: int) -> list[Prompt]:
    """Regimes and LongBench rows, then beginnings of them; spread evenly if fewer are wanted."""
    whole = regime_prompts(data, codec, cap) + longbench_prompts(data, codec, cap)
    found = whole + beginnings(whole)
    if count >= len(found):
        return found
    return [found[i * len(found) // count] for i in range(count)]


def beginnings(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Beginnings of all BEGINNINGS lengths that there are longer prompts of, each of another prompt."""
    found: list[Prompt] = []
    for n, length in enumerate(BEGINNINGS):
        if longer := [prompt for prompt in prompts if len(prompt.ids) > length]:
            prompt = longer[7 * n % len(longer)]  # 7: the kind changes each time
            found.append(Prompt(f"{prompt.name}, {length} tokens", prompt.kind, prompt.ids[:length]))
    return found


@contextlib.contextmanager
def segments_of(params: Params, lengths: Sequence[int]) -> Iterator[None]:
    """While it lasts texts are read in segments of these lengths and, by default, half as long chunks.

    By an invented table in which all chunk sizes cost nearly the same, so that a careful policy may choose any.
    """
    model = model_of(params)
    timings = []
    for length in lengths:
        for size in (16, 32, 64, 128, 256):
            if size <= length:
                preferred = size == max(16, length // 2)
                timings.append(Timing(length, size, (length + 4.0 if preferred else (length + 4.0) * 1.001,)))
    today = datetime.date.today().isoformat()
    tables = [
        Calibration(model.device, planning.shape_of(model, batch), jax.__version__, today, tuple(timings))
        for batch in (1, BATCH)
    ]
    with tempfile.TemporaryDirectory() as folder:
        for table in tables:
            write_calibration(table, Path(folder))
        before = os.environ.get("MAMBA_JAX_CACHE")
        os.environ["MAMBA_JAX_CACHE"] = folder
        planning.forget_choices()
        try:
            yield
        finally:
            if before is None:
                del os.environ["MAMBA_JAX_CACHE"]
            else:
                os.environ["MAMBA_JAX_CACHE"] = before
            planning.forget_choices()


def run(
    params: Params, prompts: Sequence[Prompt], policies: Sequence[str], short: Sequence[Sequence[int]], new: int
) -> dict[str, dict[str, Row]]:
    """Every policy against the default with segments as planned; by segments, then by policy."""
    reader = Reader(params, prompts, new)
    reader.compile([None])
    baseline = reader.outcome(None, None)
    report: dict[str, dict[str, Row]] = {}
    longest = max(prompts, key=lambda prompt: len(prompt.ids))
    for lengths in ((), *short):
        title = f"segments of {', '.join(map(str, lengths))}" if lengths else "segments as planned"
        with segments_of(params, lengths) if lengths else contextlib.nullcontext():
            chosen = contenders(params, longest, policies)
            if lengths:  # those that decide beforehand were compared already
                chosen = {name: one for name, one in chosen.items() if one is None or planning.watch_for(one)}
            reader.compile(list(chosen.values()))
            report[title] = {}
            with track(title, len(chosen)) as advance:
                for name, policy in chosen.items():
                    outcome = reader.outcome(policy, baseline)
                    report[title][name] = compare(params, prompts, outcome, baseline)
                    advance(1)
    return report


def contenders(params: Params, text: Prompt, policies: Sequence[str]) -> Mapping[str, Policy | None]:
    """The default, policies by their names, chunk sizes by layer and a table."""
    sizes = (16, 64, 32, 128, 256)
    layers = PerLayer(tuple(sizes[i % len(sizes)] for i in range(params.config.n_layer)))
    return {
        DEFAULT: None,
        **{name: as_policy(name) for name in policies},
        "layers by entropy:sampled": mamba_jax.fix_layers(params, text.ids, "entropy:sampled"),
        layers.name: layers,
        "table of length, layer, entropy, variance": TABLE,
    }


def section(title: str, rows: Mapping[str, Row]) -> Section:
    """The comparison as a table."""
    shown = []
    for name, row in rows.items():
        first = min((one["position"] for one in row["differing"]), default=None)
        shown.append(
            {
                "policy": name,
                "same tokens": f"{row['equal']}/{row['prompts']}",
                "first difference": first,
                "logprobs apart": f"{row['logprob_apart']:.1e}",
                "perplexity ratio - 1": f"{row['perplexity_ratio'] - 1:+.1e}",
                "same programs": f"{row['same_programs']}/{row['prompts']}",
                "chunk sizes": ", ".join(f"{size} {share:.0%}" for size, share in row["chunks"].items()),
            }
        )
    differing = [(name, one) for name, row in rows.items() for one in row["differing"]]
    worst = max((abs(row["perplexity_ratio"] - 1) for row in rows.values()), default=0.0)
    flips = "; ".join(
        f"{name}, {one['prompt']}, token {one['position']} (logits {one['between']:.1e} apart, best {one['top']:.1e})"
        for name, one in differing[:8]
    )
    return Section(
        f"Tables 8 and 28: {title}",
        shown,
        "Greedy, float32, against the default with segments as planned. Paper: 80/80 after 8 tokens, ratio 1.0000.",
        f"{len(differing)} continuations differ{': ' + flips if flips else ''}. Perplexities differ by {worst:.1e} at "
        "most.",
    )


def main(
    model: Annotated[list[str] | None, typer.Option(help="Checkpoints: folders, or names in the reference.")] = None,
    reference: Annotated[Path | None, typer.Option(help="Folder of the reference checkpoints.")] = None,
    policy: Annotated[list[str] | None, typer.Option(help="Policies beside the default.")] = None,
    segments: Annotated[list[str] | None, typer.Option(help="Lengths of short segments, as in 64,16.")] = None,
    prompts: Annotated[int, typer.Option(min=1, help="How many.")] = PROMPTS,
    cap: Annotated[int, typer.Option(help="Most tokens of a prompt.")] = 1024,
    new: Annotated[int, typer.Option(min=1, help="Tokens of a continuation.")] = 96,
    out: Annotated[Path | None, typer.Option("--json", help="Write the report.")] = None,
) -> None:
    """Compare greedy tokens and perplexities between chunk sizes and policies."""
    folder = reference_folder(reference)
    data = folder.parent / "data"
    chosen = choose_prompts(data, Tokens(data / "tokenizer"), cap, prompts)
    short = [tuple(map(int, lengths.split(","))) for lengths in segments or ["256"]]
    mamba_jax.enable_compilation_cache()
    console = Console(width=None if sys.stdout.isatty() else 180)
    report: dict[str, Any] = {
        **environment("equality"),
        "prompts": [{"name": one.name, "kind": one.kind, "tokens": len(one.ids)} for one in chosen],
        "new_tokens": new,
        "models": {},
    }
    for name in model or ["mamba1-12m", "mamba2-12m-hf"]:
        path, start = Path(name), time.perf_counter()
        params = mamba_jax.load(path if path.is_dir() else folder / name, dtype="float32")
        found = run(params, chosen, POLICIES if policy is None else policy, short, new)
        seconds = time.perf_counter() - start
        for title, rows in found.items():
            show(section(f"{name}, {title}", rows), console)
        console.print(f"{name}: {seconds:.0f} s on {report['device']}")
        report["models"][name] = {"seconds": seconds, **found}
        if out is not None:
            out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
