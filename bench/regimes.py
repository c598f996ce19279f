"""Do prompts of different kinds want different chunk sizes, and does any policy find them? `python -m bench.regimes`.

Prompts of eight serving regimes (and rows of LongBench as longer ones) are read with every static chunk size and with
every policy: the COREY paper's Tables 5, 6 and 7 for prefill alone. The oracle is the fastest static chunk size of each
prompt. A policy's figure is its time over the oracle's in the same round, the median of rounds, the geometric mean of
prompts; the oracle is chosen in one half of the rounds and met in the other, since the fastest of several noisy timings
is too fast. The interval is a bootstrap over prompts.

Each round takes the prompts in random order and for each prompt all contenders in random order, after a run that does
not count. A sample is the mean of as many runs as fill 20 ms. Contenders that run the very same programs on a prompt
share their timing there and differ by exactly nothing; only the default policy always has its own, which shows what
measurements of the same programs differ by.

A statistic chooses from the third segment of a text on, so below some thousand tokens it has nothing to do unless
segments are short: `--segments 256` repeats the study with segments of that length alone.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import io
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import typer
from rich.console import Console
from rich.progress import Progress

import mamba_jax
from bench.common import Row, Section, environment, show
from bench.models import PUBLISHED, random_params
from bench.prompts import TASKS, Prompt, Tokens, longbench_prompts, reference_folder, regime_prompts
from mamba_jax import planning
from mamba_jax.calibrate import CHUNK_SIZES, SAMPLE_SECONDS
from mamba_jax.params import Params
from mamba_jax.planning import Model, Plan, Reading, as_policy, make_plan, run_chunk_size
from mamba_jax.programs import Spec, compile_programs, model_of, program, program_weights, read_prompts, segments
from mamba_jax.scheduler.monitoring import count_compilations
from mamba_jax.scheduler.policies import SAMPLED, Decision, LearnedTable, PerLayer, Policy, Sample, fit_table
from mamba_jax.scheduler.segments import DEFAULT_LENGTHS
from mamba_jax.scheduler.signals import Watch

Key = tuple[Reading, ...]  # the programs that reading a prompt runs, one after the other
Samples = Mapping[str, Sequence[float]]  # seconds by contender, round by round

DEFAULT = "measured"
PAPER_ORACLE = "static:512"
SIZES = (*CHUNK_SIZES, 1024, 2048)
LEAST = 4  # rounds, whatever `--seconds` says: two to choose the oracle in and two to meet it in
POLICIES = (
    "midpoint",
    "random:0",
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
    "careful:corey-default",
    "careful:entropy:sampled",
)
FIXED = ("corey-default", "corey-legacy", "entropy:sampled", "careful:entropy:sampled")  # chunk sizes a layer, by these
TABLES = {"table of length": ("length",), "table of length, entropy": ("length", "entropy")}

# The paper's slowdown against static 512 (Tables 5 and 27): Mamba-370M, 976 tokens and 32 new ones, H800.
PAPER = {
    "static:128": 1.0013,
    "static:256": 1.0257,
    "static:512": 1.0,
    "midpoint": 1.0137,
    "random:0": 1.0086,
    "corey-h800": 1.0883,
    "entropy:sampled": 1.0462,
    "entropy:token": 1.1213,
    "entropy:cheap": 1.0340,
    "entropy:variance": 1.0486,
    "entropy:kurtosis": 1.0353,
    "guarded:sampled": 1.0129,
    "length": 1.0069,
}
# Table 6, ms: chunk 128, 256, 512; RTX 3070.
TABLE_6 = {
    "short_chat": (184.1, 185.5, 187.6),
    "long_document_qa": (307.8, 306.0, 305.0),
    "source_code": (349.1, 347.3, 345.9),
    "structured_logs": (347.6, 342.6, 342.7),
    "tabular": (371.5, 349.8, 349.7),
    "repetitive_policy": (319.5, 312.9, 312.5),
    "mixed_language": (346.5, 345.2, 344.2),
    "form_style": (352.0, 349.9, 349.6),
}
# Tables 7 and 38: percent against static 512 on the mix; the guarded row is of Table 5's single prompt.
TABLE_7 = {"static:512": 0.0, "oracle by regime": -0.14, "length": -0.14, "guarded:sampled": 1.29}


@dataclasses.dataclass(frozen=True)
class Contender:
    """A way to read prompts; `only` are the indices of those that it is for."""

    name: str
    policy: Policy | None
    only: frozenset[int] | None = None


@dataclasses.dataclass
class Study:
    """What one model did with one set of segment lengths.

    Attributes:
        prompts: all of them.
        plans: the default policy's, by prompt.
        statics: names of the static chunk sizes.
        keys: which programs each contender ran, by prompt.
        owners: whose samples are each contender's, by prompt.
        samples: seconds, by prompt and owner.
        facts: of the whole.
        policies: what planning costs, by contender.
    """

    prompts: list[Prompt]
    plans: list[Plan]
    statics: list[str]
    keys: list[dict[str, Key]]
    owners: list[dict[str, str]]
    samples: list[dict[str, list[float]]]
    facts: dict[str, Any]
    policies: dict[str, dict[str, float]]

    def of(self, index: int) -> dict[str, Sequence[float]]:
        """Every contender's samples on a prompt."""
        return {name: self.samples[index][owner] for name, owner in self.owners[index].items()}

    def seconds(self, index: int, name: str) -> float:
        """Median of a contender on a prompt."""
        return statistics.median(self.samples[index][self.owners[index][name]])

    def best(self, index: int) -> str:
        """The fastest static chunk size of a prompt."""
        return min(self.statics, key=lambda name: self.seconds(index, name))

    @property
    def reference(self) -> str:
        """Static 512, the paper's oracle, or else the largest static chunk size."""
        return PAPER_ORACLE if PAPER_ORACLE in self.statics else self.statics[-1]

    def read_by(self, name: str) -> list[int]:
        """Prompts that a contender read."""
        return [i for i, owners in enumerate(self.owners) if name in owners]


# What ran


def ran(plan: Plan, decisions: Sequence[Decision]) -> Key:
    """The programs that a reading ran, of its plan and the decisions it gave back."""
    groups: list[list[Decision]] = []
    for decision in decisions:
        if not decision.layer:
            groups.append([])
        groups[-1].append(decision)
    return tuple(
        segment.reading._replace(chunk_size=run_chunk_size(group, segment.length))
        for segment, group in zip(plan.segments, groups, strict=True)
    )


def owners_of(keys: Mapping[str, Key]) -> dict[str, str]:
    """Whose timing stands for each contender's: the first with the same programs; the default's is its own."""
    first: dict[Key, str] = {}
    return {name: DEFAULT if name == DEFAULT else first.setdefault(key, name) for name, key in keys.items()}


def chunk_shares(keys: Sequence[Key]) -> dict[str, float]:
    """Share of the positions that each chunk size read, 0 being kernels; of many layers' sizes each for its layers."""
    count: collections.Counter[int] = collections.Counter()
    for length, chunk, _, implementation in (one for key in keys for one in key):
        sizes = (0,) if implementation == "pallas" else chunk if isinstance(chunk, tuple) else (chunk,)
        for size in sizes:
            count[size] += length / len(sizes)  # type: ignore[assignment]
    return {str(size): count[size] / count.total() for size in sorted(count)}


# Timing


def measure(
    run: Callable[[int, str], float], tasks: Mapping[int, Sequence[str]], rounds: int, seconds: float, seed: int = 0
) -> list[dict[str, list[float]]]:
    """Samples by prompt and contender, all taking turns.

    Args:
        run: gives a sample of a contender on a prompt.
        tasks: contenders by prompt.
        rounds: samples of each.
        seconds: no further round is begun after these, but for the first LEAST ones.
        seed: of the order.
    """
    samples: list[dict[str, list[float]]] = [{name: [] for name in names} for names in tasks.values()]
    order, start = random.Random(seed), time.perf_counter()
    with bar(rounds * sum(map(len, tasks.values()))) as advance:
        for done in range(rounds):
            if done >= LEAST and time.perf_counter() - start > seconds:
                break
            for prompt in order.sample(list(tasks), len(tasks)):
                names = tasks[prompt]
                run(prompt, order.choice(names))  # another prompt was read before: does not count
                for name in order.sample(list(names), len(names)):
                    samples[prompt][name].append(run(prompt, name))
                advance(len(names))
    return samples


@contextlib.contextmanager
def bar(total: int) -> Iterator[Callable[[int], None]]:
    """A bar of our own on a terminal, and none of those that reading a long prompt shows: they would be timed too."""
    console = Console(file=sys.stderr)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("Timing", total=total)
        with contextlib.redirect_stderr(io.StringIO()):
            yield lambda count: progress.advance(task, count)


def read_once(weights: Params, prompt: Prompt, policy: Policy | None) -> tuple[float, tuple[Decision, ...]]:
    """Seconds from token ids on the host to the cache and the last logits, and the decisions."""
    rows = [list(prompt.ids)]
    start = time.perf_counter()
    cache, logits, decisions = read_prompts(weights, rows, policy)
    jax.block_until_ready((cache, logits))
    return time.perf_counter() - start, decisions


def sample(weights: Params, prompt: Prompt, policy: Policy | None) -> float:
    """Mean of as many readings as fill SAMPLE_SECONDS."""
    times: list[float] = []
    while sum(times) < SAMPLE_SECONDS:
        times.append(read_once(weights, prompt, policy)[0])
    return sum(times) / len(times)


def planning_cost(model: Model, policy: Policy | None, lengths: Sequence[int]) -> dict[str, float]:
    """Microseconds that a request waits for its plan, and a segment for a decision at run time; medians.

    Args:
        model: what is planned for.
        policy: decides.
        lengths: that this policy was not asked about before.
    """
    plan = functools.partial(make_plan, model, 1, policy=policy)
    cost = {"new_length_us": microseconds(plan, lengths), "known_length_us": microseconds(plan, lengths)}
    if policy is not None and planning.watch_for(policy) is not None:
        layers, segment = np.full((12, 2), 3.0, np.float32), max(planning.choices(model, 1).costs)
        cost["decision_us"] = microseconds(
            lambda length: planning.decide(model, 1, policy, length, layers, 2, segment), lengths
        )
    return cost


def microseconds(call: Callable[[int], Any], arguments: Sequence[int]) -> float:
    """Median of calls, the first left out."""
    times = []
    for argument in (arguments[0], *arguments):
        start = time.perf_counter()
        call(argument)
        times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times[1:])


# The study


def run_study(
    params: Params,
    prompts: list[Prompt],
    chunk_sizes: Sequence[int],
    policies: Sequence[str],
    rounds: int,
    seconds: float,
) -> Study:
    """Everything for one model with the segment lengths that stand."""
    weights, start = program_weights(params), time.perf_counter()
    model = model_of(weights)
    train = frozenset(range(0, len(prompts), 2))
    contenders = [Contender(f"static:{size}", as_policy(f"static:{size}")) for size in sorted(chunk_sizes)]
    statics = [contender.name for contender in contenders]
    contenders += [Contender(DEFAULT, None), *(Contender(name, as_policy(name)) for name in policies)]
    with count_compilations() as counts:
        longest = max((prompts[i] for i in train), key=lambda prompt: len(prompt.ids))
        compile_all(weights, prompts, contenders)
        for name in FIXED:
            if name in policies:
                fixed = mamba_jax.fix_layers(params, longest.ids, name)
                contenders.append(Contender(f"layers by {name}", fixed))
        compile_all(weights, prompts, contenders)
        keys = keys_of(weights, prompts, contenders)
        for contender in fit_tables(weights, prompts, train, statics, keys):
            contenders.append(contender)
        compile_all(weights, prompts, contenders)
        keys = keys_of(weights, prompts, contenders)
    compile_s = time.perf_counter() - start
    costs = {c.name: planning_cost(model, c.policy, range(2 + i, 2049, 40)) for i, c in enumerate(contenders)}
    owners = [owners_of(each) for each in keys]
    by_name = {contender.name: contender.policy for contender in contenders}
    tasks = {i: sorted(set(each.values())) for i, each in enumerate(owners)}
    with bar(len(tasks)) as advance:  # warm-up
        for i, names in tasks.items():
            for name in names:
                read_once(weights, prompts[i], by_name[name])
            advance(1)
    begin = time.perf_counter()
    samples = measure(lambda i, name: sample(weights, prompts[i], by_name[name]), tasks, rounds, seconds)
    facts = {
        "segments": sorted(planning.choices(model, 1).chunk_sizes),
        "source": planning.choices(model, 1).source,
        "programs": len({one for each in keys for key in each.values() for one in key}),
        "compiled": counts.compiled,
        "fetched": counts.fetched,
        "prepare_s": compile_s,
        "timing_s": time.perf_counter() - begin,
        "rounds": len(next(iter(samples[0].values()))),
        "layers": {c.name: c.policy.name for c in contenders if isinstance(c.policy, PerLayer)},
        "tables": {c.name: json.loads(c.policy.to_json()) for c in contenders if isinstance(c.policy, LearnedTable)},
    }
    plans = [make_plan(model, 1, len(prompt.ids)) for prompt in prompts]
    return Study(prompts, plans, statics, keys, owners, samples, facts, costs)


def compile_all(weights: Params, prompts: Sequence[Prompt], contenders: Sequence[Contender]) -> None:
    """Compile, side by side, what is known to run before anything does."""
    model, specs = model_of(weights), {Spec("init", 1): None}
    for contender in contenders:
        for i, prompt in enumerate(prompts):
            if contender.only is None or i in contender.only:
                plan = make_plan(model, 1, len(prompt.ids), contender.policy)
                specs |= {Spec("prefill", 1, *segment.reading): None for segment in plan.segments}
    compile_programs(weights, specs)


def keys_of(weights: Params, prompts: Sequence[Prompt], contenders: Sequence[Contender]) -> list[dict[str, Key]]:
    """Which programs each contender runs on each prompt; what a statistic chooses is found by reading."""
    model = model_of(weights)

    def find(prompt: Prompt, contender: Contender) -> Key:
        plan = make_plan(model, 1, len(prompt.ids), contender.policy)
        if not plan.candidates:
            return tuple(segment.reading for segment in plan.segments)
        return ran(plan, read_once(weights, prompt, contender.policy)[1])

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:  # what has to be compiled is, side by side
        futures = [
            {c.name: pool.submit(find, prompt, c) for c in contenders if c.only is None or i in c.only}
            for i, prompt in enumerate(prompts)
        ]
        return [{name: future.result() for name, future in each.items()} for each in futures]


def fit_tables(
    weights: Params,
    prompts: Sequence[Prompt],
    train: frozenset[int],
    statics: Sequence[str],
    keys: Sequence[Mapping[str, Key]],
) -> Iterator[Contender]:
    """Tables fitted to the fastest static chunk size of half of the prompts, for the other half."""
    others = frozenset(range(len(prompts))) - train
    owners = {i: owners_of({name: keys[i][name] for name in statics}) for i in sorted(train)}
    chosen = {name: as_policy(name) for name in statics}
    order = list(owners)
    tasks = {n: sorted(set(owners[i].values())) for n, i in enumerate(order)}
    run = lambda n, name: sample(weights, prompts[order[n]], chosen[name])  # noqa: E731
    samples = measure(run, tasks, 3, 0.0, seed=1)
    labels = []
    for i, seconds in zip(order, samples, strict=True):
        best = min(seconds, key=lambda name: statistics.median(seconds[name]))
        entropy = first_entropy(weights, prompts[i])
        labels.append(Sample(int(best.removeprefix("static:")), len(prompts[i].ids), entropy=entropy))
    for label, features in TABLES.items():
        yield Contender(label, fit_table(labels, features, min_samples_leaf=2, label=label), others)


def first_entropy(weights: Params, prompt: Prompt) -> float:
    """The sampled entropy of a prompt's first segment, as a decision at run time would see it."""
    plan = make_plan(model_of(weights), 1, len(prompt.ids))
    segment, (_, tokens, lengths) = plan.segments[0], next(segments([list(prompt.ids)], plan))
    run = program(weights, Spec("prefill", 1, *segment.reading._replace(watch=Watch(SAMPLED))))
    return float(np.asarray(run(weights, tokens, lengths, *program(weights, Spec("init", 1))())[2])[:, 0].mean())


# Figures


def over_oracle(samples: Samples, name: str, statics: Sequence[str]) -> float:
    """Logarithm of a contender's time over the fastest static one's, which the other half of the rounds chooses."""
    rounds = range(len(samples[name]))
    parts = (rounds[::2], rounds[1::2]) if len(rounds) > 1 else (rounds, rounds)
    found = []
    for here, there in (parts, parts[::-1]):
        best = min(statics, key=lambda static: statistics.median(samples[static][i] for i in there))
        found.append(statistics.median(math.log(samples[name][i] / samples[best][i]) for i in here))
    return statistics.mean(found)


def interval(values: Sequence[float], draws: int = 10000) -> tuple[float, float]:
    """The 95% bootstrap interval of a mean."""
    drawn = np.random.default_rng(0).choice(np.asarray(values), (draws, len(values))).mean(1)
    return float(np.quantile(drawn, 0.025)), float(np.quantile(drawn, 0.975))


def summarise(study: Study) -> list[Row]:
    """A row for each contender."""
    rows = []
    for name in study.owners[0] | study.owners[1]:
        read = study.read_by(name)
        values = [over_oracle(study.of(i), name, study.statics) for i in read]
        total = sum(study.seconds(i, name) for i in read)
        rows.append(
            {
                "contender": name,
                "over_oracle": math.expm1(statistics.mean(values)),
                "interval": [math.expm1(end) for end in interval(values)],
                "worst": math.expm1(max(values)),
                "same_programs": sum(study.keys[i][name] == study.keys[i][study.best(i)] for i in read),
                "prompts": len(read),
                "seconds": total,
                "over_static_512": total / sum(study.seconds(i, study.reference) for i in read),
                "chunks": chunk_shares([study.keys[i][name] for i in read]),
                "by_prompt": {study.prompts[i].name: math.expm1(value) for i, value in zip(read, values, strict=True)},
                **study.policies[name],
            }
        )
    return rows


def same_measured_twice(study: Study) -> list[float]:
    """Logarithm of the default's timing over another one of the same programs, by prompt."""
    found = []
    for i, keys in enumerate(study.keys):
        twin = next((name for name, key in keys.items() if name != DEFAULT and key == keys[DEFAULT]), None)
        if twin is not None:
            samples = study.of(i)
            pairs = zip(samples[DEFAULT], samples[twin], strict=True)
            found.append(statistics.median(math.log(a / b) for a, b in pairs))
    return found


def percent(value: float) -> float:
    return round(100 * value, 2)


def table_5(study: Study, rows: Sequence[Row], title: str) -> Section:
    shown = []
    for row in rows:
        low, high = row["interval"]
        shares = sorted(row["chunks"].items(), key=lambda item: -item[1])
        chunks = ", ".join(f"{size} {share:.0%}" for size, share in shares[:3]) + (" .." if len(shares) > 3 else "")
        shown.append(
            {
                "policy": row["contender"],
                "over oracle %": percent(row["over_oracle"]),
                "95 %": f"{percent(low)} .. {percent(high)}",
                "worst %": percent(row["worst"]),
                "same programs": f"{row['same_programs']}/{row['prompts']}",
                "x static 512": round(row["over_static_512"], 4),
                "paper": PAPER.get(row["contender"]),
                "chunk sizes": chunks,
                "plan us": f"{row['new_length_us']:.0f} / {row['known_length_us']:.1f}",
                "decision us": round(row["decision_us"], 1) if "decision_us" in row else None,
            }
        )
    by_name = {row["contender"]: row for row in rows}
    adaptive = [row for row in rows if not row["contender"].startswith("static") and row["contender"] != DEFAULT]
    within = [row["contender"] for row in adaptive if row["over_oracle"] <= 0.005]
    default = by_name[DEFAULT]
    own = by_name.get("layers by corey-default", {}).get("over_oracle")
    literal = "" if own is None else f" The paper's default preset from the first token on: {percent(own):+} %."
    twins = same_measured_twice(study) or [0.0]
    apart, low, high = (percent(math.expm1(x)) for x in (statistics.mean(twins), *interval(twins)))
    alike = default["same_programs"]
    return Section(
        f"Tables 5 and 27: {title}",
        shown,
        f"Prefill alone, {len(study.prompts)} prompts, {study.facts['rounds']} rounds; ours over the oracle of each "
        "prompt, the paper's over static 512. Same programs: prompts where exactly the oracle's ran. The paper's full "
        "histogram is corey-h800, its learned table the rule by length. Planning: for a length that is new / known.",
        f"The default is measured {percent(default['over_oracle']):+} % from the oracle, whose very programs it ran on "
        f"{alike} of {default['prompts']} prompts. Within 0.5 %: "
        f"{', '.join(within) or 'no other'}.{literal} The same programs measured twice differ by "
        f"{apart:+} % on {len(twins)} prompts (95 %: {low} .. {high}).",
    )


def table_6(study: Study) -> Section:
    shown = []
    for kind in dict.fromkeys(prompt.kind for prompt in study.prompts):
        found = [i for i, prompt in enumerate(study.prompts) if prompt.kind == kind]
        tokens = statistics.mean(len(study.prompts[i].ids) for i in found)
        mean = {name: statistics.mean(study.seconds(i, name) for i in found) for name in study.statics}
        row: Row = {"regime": kind, "prompts": len(found), "tokens": round(tokens)}
        row |= {f"{name.removeprefix('static:')} ms": round(1000 * value, 2) for name, value in mean.items()}
        row |= {"best": min(mean, key=lambda name: mean[name]).removeprefix("static:")}
        paper = TABLE_6.get(kind)
        row |= {f"paper {size}": paper[n] if paper else None for n, size in enumerate((128, 256, 512))}
        shown.append(row)
    return Section(
        "Table 6: static chunk sizes by regime",
        shown,
        "Means of the prompts' medians. The paper's: RTX 3070, Mamba-370M, prefill and 4 new tokens.",
        "",
    )


def table_7(study: Study, rows: Sequence[Row]) -> Section:
    kinds = [kind for kind in dict.fromkeys(prompt.kind for prompt in study.prompts) if kind not in TASKS]
    of_kind = {kind: [i for i, prompt in enumerate(study.prompts) if prompt.kind == kind] for kind in kinds}

    def average(seconds: Callable[[int], float], read: Sequence[int]) -> float:
        both = [[i for i in found if i in read] for found in of_kind.values()]
        return statistics.mean(statistics.mean(map(seconds, found)) for found in both if found)

    def of(name: str) -> Callable[[int], float]:
        return lambda i: study.seconds(i, name)

    def oracle(i: int) -> float:
        return study.seconds(i, study.best(i))

    everything = range(len(study.prompts))
    one = min(study.statics, key=lambda name: average(of(name), everything))
    regime = {k: min(study.statics, key=lambda s: sum(map(of(s), found))) for k, found in of_kind.items()}
    strategies: dict[str, tuple[Callable[[int], float], Sequence[int]]] = {
        study.reference: (of(study.reference), everything),
        f"best static: {one.removeprefix('static:')}": (of(one), everything),
        "oracle by regime": (lambda i: study.seconds(i, regime[study.prompts[i].kind]), everything),
        "oracle by prompt": (oracle, everything),
    }
    names = [row["contender"] for row in rows if row["contender"] not in study.statics]
    strategies |= {name: (of(name), study.read_by(name)) for name in names}
    shown = []
    for name, (seconds, read) in strategies.items():
        mean = average(seconds, read)
        shown.append(
            {
                "strategy": name,
                "prompts": sum(i in read for found in of_kind.values() for i in found),
                "ms": round(1000 * mean, 2),
                "over static 512 %": percent(mean / average(of(study.reference), read) - 1),
                "paper %": TABLE_7.get(name),
                "over oracle %": percent(mean / average(oracle, read) - 1),
            }
        )
    return Section(
        "Tables 7 and 38: the mix, regimes weighted alike",
        shown,
        "Eight regimes without LongBench; medians of all rounds, so that noise makes the oracle too fast. Tables "
        "were fitted on the other prompts. The paper's guarded row is of another device and of one prompt.",
        "All that any choice of a chunk size by prompt could gain over the best single one is "
        f"{percent(average(of(one), everything) / average(oracle, everything) - 1)} %.",
    )


def sanity(study: Study) -> Section:
    """What the table picks for each prompt and what the sweep finds."""
    shown = []
    order = sorted(range(len(study.prompts)), key=lambda i: len(study.prompts[i].ids))
    for i in order:
        ranked = sorted(study.statics, key=lambda name: study.seconds(i, name))
        distinct = list(dict.fromkeys(study.owners[i][name] for name in ranked))
        best, second = study.seconds(i, distinct[0]), study.seconds(i, distinct[min(1, len(distinct) - 1)])
        shown.append(
            {
                "tokens": len(study.prompts[i].ids),
                "segments": " ".join(str(segment.length) for segment in study.plans[i].segments),
                "table": " ".join(str(segment.chunk_size) for segment in study.plans[i].segments),
                "sweep": distinct[0].removeprefix("static:"),
                "next": distinct[min(1, len(distinct) - 1)].removeprefix("static:"),
                "next %": percent(second / best - 1),
                "default over sweep %": percent(math.expm1(over_oracle(study.of(i), DEFAULT, study.statics))),
            }
        )
    return Section(
        "The table's chunk sizes and the sweep's",
        shown,
        f"Table: {study.facts['source']}.",
        "",
    )


def draw(reports: Sequence[tuple[str, Study, list[Row]]], path: Path) -> None:
    """What each contender costs over the oracle, and what each chunk size costs by length."""
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(
        len(reports), 2, figsize=(14, 6.5 * len(reports)), squeeze=False, layout="constrained"
    )
    for (title, study, rows), (left, right) in zip(reports, panels, strict=True):
        values = [100 * row["over_oracle"] for row in rows]
        errors = [[100 * abs(row["over_oracle"] - row["interval"][side]) for row in rows] for side in (0, 1)]
        colours = ["tab:gray" if row["contender"] in study.statics else "tab:blue" for row in rows]
        places = np.arange(len(rows))
        left.barh(places, values, xerr=errors, color=colours, error_kw={"lw": 0.8})
        left.set_yticks(places, [row["contender"] for row in rows], fontsize=8)
        left.invert_yaxis()
        left.set_xscale("symlog", linthresh=1)
        left.axvline(0, color="black", lw=0.7)
        left.set(title=title, xlabel="% over the fastest static chunk size of each prompt, 95 % interval")
        order = sorted(range(len(study.prompts)), key=lambda i: len(study.prompts[i].ids))
        for name in study.statics:
            ratios = [100 * (study.seconds(i, name) / study.seconds(i, study.best(i)) - 1) for i in order]
            right.plot([len(study.prompts[i].ids) for i in order], ratios, "o-", label=name.removeprefix("static:"))
        right.set(title="Chunk size by length", xlabel="tokens", ylabel="% over the fastest", xscale="log")
        right.set_yscale("symlog", linthresh=10)
        right.legend(title="chunk size")
    figure.savefig(path, dpi=110)


# Command line


@contextlib.contextmanager
def segment_lengths(
    params: Params, lengths: Sequence[int] | None, chunk_sizes: Sequence[int], rounds: int
) -> Iterator[None]:
    """While it lasts texts are read in segments of these lengths (None: those of the device's table), measured here.

    Nothing is measured where a table of this very model is at hand.
    """
    if lengths is None and planning.choices(model_of(params), 1).measured:
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        before = os.environ.get("MAMBA_JAX_CACHE")
        os.environ["MAMBA_JAX_CACHE"] = folder
        try:
            mamba_jax.calibrate(
                params,
                lengths=lengths or DEFAULT_LENGTHS,
                chunk_sizes=chunk_sizes,
                rounds=rounds,
                folder=Path(folder),
            )
            yield
        finally:
            if before is None:
                del os.environ["MAMBA_JAX_CACHE"]
            else:
                os.environ["MAMBA_JAX_CACHE"] = before
            planning.forget_choices()


def load(name: str, reference: Path, dtype: str) -> Params:
    """A model of published size with random weights, or a checkpoint by its folder or its name."""
    if name in PUBLISHED:
        return random_params(name, dtype)
    kind: Any = dtype
    path = Path(name)
    return mamba_jax.load(path if path.is_dir() else reference / name, dtype=kind)


def main(
    model: Annotated[list[str] | None, typer.Option(help=f"A checkpoint, or one of {', '.join(PUBLISHED)}.")] = None,
    reference: Annotated[Path | None, typer.Option(help="Folder of the reference checkpoints.")] = None,
    dtype: Annotated[str, typer.Option(help="Empty: float32 on a CPU, else bfloat16.")] = "",
    chunk_size: Annotated[list[int] | None, typer.Option(help="Static ones.")] = None,
    policy: Annotated[list[str] | None, typer.Option(help="Policies beside the default.")] = None,
    segments: Annotated[list[str] | None, typer.Option(help="Also with these segment lengths alone: 256,64.")] = None,
    cap: Annotated[int, typer.Option(help="Most tokens of a regime's prompt.")] = 2048,
    longbench: Annotated[int, typer.Option(help="Rows of each LongBench task.")] = 1,
    long_cap: Annotated[int, typer.Option(help="Most tokens of a LongBench row.")] = 8192,
    every: Annotated[int, typer.Option(help="Takes every so manieth prompt.")] = 1,
    short_every: Annotated[int, typer.Option(help="The same, with --segments.")] = 3,
    rounds: int = 10,
    seconds: Annotated[float, typer.Option(help=f"Begin no round after these, but for {LEAST}.")] = 600.0,
    oracle_from_table: Annotated[bool, typer.Option(help="Also print what the table picks for each prompt.")] = False,
    out: Annotated[Path | None, typer.Option("--json", help="Write the report.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a picture.")] = None,
) -> None:
    """Read prompts of eight regimes with every static chunk size and every policy."""
    folder = reference_folder(reference)
    data = folder.parent / "data"
    codec = Tokens(data / "tokenizer")
    prompts = regime_prompts(data, codec, cap) + longbench_prompts(data, codec, long_cap, longbench)
    dtype = dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    mamba_jax.enable_compilation_cache()
    console = Console(width=None if sys.stdout.isatty() else 180)
    report: dict[str, Any] = {
        **environment("regimes"),
        "dtype": dtype,
        "runs": [],
    }
    drawn = []
    for name in model or ["mamba1-12m", "mamba2-12m-hf"]:
        params = load(name, folder, dtype)
        for lengths in (None, *(tuple(map(int, each.split(","))) for each in segments or ())):
            taken = prompts[:: every if lengths is None else short_every]
            sizes = chunk_size or SIZES
            begin = time.perf_counter()
            with segment_lengths(params, lengths, sizes, 7):
                study = run_study(params, taken, sizes, POLICIES if policy is None else policy, rounds, seconds)
            study.facts["total_s"] = time.perf_counter() - begin
            rows = summarise(study)
            kind = f"{dtype}, random weights" if name in PUBLISHED else dtype
            title = f"{name} {kind}, {report['device']}, " + (
                "segments as planned" if lengths is None else f"segments of {', '.join(map(str, lengths))}"
            )
            sections = [table_5(study, rows, title), table_6(study), table_7(study, rows)]
            if oracle_from_table:
                sections.append(sanity(study))
            for section in sections:
                show(section, console)
            console.print({k: v for k, v in study.facts.items() if k != "tables"})
            report["runs"].append({"model": name, "title": title, **to_json(study, rows)})
            drawn.append((title, study, rows))
            if out is not None:
                out.write_text(json.dumps(report, indent=1) + "\n")
    if plot is not None:
        draw(drawn, plot)


def to_json(study: Study, rows: list[Row]) -> dict[str, Any]:
    """A study as JSON takes it, every sample among it."""
    prompts = [
        {
            "name": prompt.name,
            "kind": prompt.kind,
            "tokens": len(prompt.ids),
            "segments": [segment.length for segment in plan.segments],
            "runs": {
                name: [[length, chunk, watch and watch.estimator.kind, by] for length, chunk, watch, by in key]
                for name, key in keys.items()
            },
            "timing_of": owners,
            "seconds": {name: [float(f"{s:.5g}") for s in each] for name, each in samples.items()},
        }
        for prompt, plan, keys, owners, samples in zip(
            study.prompts, study.plans, study.keys, study.owners, study.samples, strict=True
        )
    ]
    return {"facts": study.facts, "contenders": rows, "prompts": prompts}


if __name__ == "__main__":
    typer.run(main)
