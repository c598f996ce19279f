"""Measure on this device and on texts, so that chunk sizes and segments are chosen by fact."""

import dataclasses
import datetime
import logging
import os
import random
import time
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from mamba_jax import planning
from mamba_jax.arguments import as_integer, as_integers, as_path
from mamba_jax.generate import Prompt, as_rows
from mamba_jax.params import Params
from mamba_jax.programs import Spec, compile_programs, model_of, program, program_weights, segments
from mamba_jax.progress import track
from mamba_jax.scheduler.calibration import Calibration, Timing, check_table, write_calibration
from mamba_jax.scheduler.chunks import default_chunk_size
from mamba_jax.scheduler.policies import PerLayer, Policy
from mamba_jax.scheduler.programs import ProgramTable
from mamba_jax.scheduler.segments import DEFAULT_LENGTHS, LONGEST_SEGMENT, batch_buckets
from mamba_jax.text import Tokenizer

logger = logging.getLogger(__name__)
CHUNK_SIZES = (16, 32, 64, 128, 256, 512)
SAMPLE_SECONDS = 0.02  # a sample is the mean of as many runs as fill this


def calibrate(
    params: Params,
    *,
    batch: int | Iterable[int] = (1,),
    lengths: Sequence[int] = DEFAULT_LENGTHS,
    chunk_sizes: Sequence[int] = CHUNK_SIZES,
    rounds: int = 7,
    folder: str | os.PathLike[str] | None = None,
) -> tuple[Calibration, ...]:
    """Time every segment length at every chunk size and by kernels, and keep the table for later requests.

    Programs take turns, in another order each round, the chunk sizes of a length one after the other, so that a device
    that slows down does so for all of them. What does not fit into memory is left out and says so. Kernels are timed
    where they take the model and the device has them, once a length: they cut rows their own way.

    The table is a file named after the device, `timings-DEVICE.json`; deleting it undoes the calibration. It gets each
    batch as soon as that is measured, beside what it held of other models and batches.

    Args:
        params: the model; weights' values do not matter.
        batch: numbers of prompts, each filled up to a compiled number of rows.
        lengths: of segments, each 1 to `LONGEST_SEGMENT`.
        chunk_sizes: of the scans; one longer than a segment is left out. The stated rule's is always among them.
        rounds: samples of each program, at most 1000. A single one cannot tell a difference from noise, and a warning
            says so.
        folder: where tables are kept; None is the user's cache folder (that of `enable_compilation_cache`, but for what
            JAX itself was set to), where later requests look.

    Returns:
        What was measured, a calibration for each number of rows.

    Raises:
        ValueError: if an argument does not fit; the message names it. Also if the table is there and holds something
            else. Nothing is measured then.
        OSError: if the table cannot be written, which is tried before anything is measured.
    """
    weights, batches = program_weights(params), batch_buckets(batch)
    lengths, chunk_sizes = _sizes("lengths", lengths), _sizes("chunk_sizes", chunk_sizes)
    rounds = as_integer("rounds", rounds, 1, 1000)
    where = None if folder is None else as_path("folder", folder)
    model = model_of(weights)
    check_table(model.device, planning.shape_of(model, batches[0]), where)
    if rounds == 1:
        logger.warning("rounds: a single sample of each program cannot tell a difference from noise")
    results = []
    for rows in batches:
        results.append(_calibrate(weights, rows, lengths, chunk_sizes, rounds))
        write_calibration(results[-1], where)
        planning.forget_choices()
    return tuple(results)


def fix_layers(
    params: Params, text: Prompt, policy: Policy | str, *, tokenizer: Tokenizer | str | None = None
) -> PerLayer:
    """Let the statistics of a text, layer by layer, fix a chunk size for each layer, which programs then hold.

    Args:
        params: the model.
        text: a string or token ids, like those that will be read later.
        policy: decides, by a statistic: a policy, or a name that `mamba_jax.scheduler.policies.policy` knows.
        tokenizer: one to use instead of the checkpoint's, or the folder of one.

    Returns:
        The policy of those chunk sizes; its `name` serves wherever a policy's name does.

    Raises:
        ValueError: if the policy looks at no statistic, or another argument does not fit.
    """
    chosen = planning.as_policy(policy)
    watch = planning.watch_for(chosen)
    if chosen is None or watch is None:
        raise ValueError(f"policy: got {policy!r}, wanted one that looks at a statistic, as 'entropy:sampled' does")
    rows, single, _ = as_rows(params, text, tokenizer, "text")
    if not single:
        raise ValueError(f"text: got a list of {len(rows)} texts, wanted a single one")
    weights, watch = program_weights(params), dataclasses.replace(watch, every=1)
    model, length = model_of(weights), len(rows[0])
    plan = planning.make_plan(model, 1, length)
    specs = [Spec("prefill", plan.batch, *each.reading._replace(watch=watch)) for each in plan.segments]
    compile_programs(weights, [Spec("init", plan.batch), *specs])
    cache, logits = program(weights, Spec("init", plan.batch))()
    total = np.zeros((model.config.n_layer, 2))
    with track("Reading", len(plan.segments)) as advance:
        for spec, (_, tokens, lengths) in zip(specs, segments(rows, plan), strict=True):
            run = program(weights, spec)
            cache, logits, statistics = run(weights, tokens, lengths, cache, logits)
            total += np.asarray(statistics) * lengths.sum()
            advance(1)
    return planning.decide_layers(model, chosen, length, total / length)


def _sizes(name: str, sizes: Any) -> list[int]:
    found = as_integers(sizes)
    if not found or min(found) < 1 or max(found) > LONGEST_SEGMENT:
        raise ValueError(f"{name}: got {sizes!r:.80}, wanted one or more integers from 1 to {LONGEST_SEGMENT}")
    return found


def _calibrate(
    weights: Params, batch: int, lengths: Sequence[int], chunk_sizes: Sequence[int], rounds: int
) -> Calibration:
    model, table = model_of(weights), ProgramTable()
    layer = model.config.layer
    specs = []
    for length in sorted(set(lengths)):
        rule = default_chunk_size(model.platform, layer, length)
        sizes = {size for size in chunk_sizes if size <= length} | {rule}
        specs += [Spec("prefill", batch, length, size) for size in sorted(sizes)]
        if planning.declined(model, batch)[0] is None:
            specs.append(Spec("prefill", batch, length, rule, implementation="pallas"))
    dropped = _compile(weights, specs, table)
    runs = {spec: _Run(weights, spec, table) for spec in specs if spec not in dropped}
    samples: dict[Spec, list[float]] = {spec: [] for spec in runs}
    order = _turns(list(runs), rounds)
    with track("Timing", len(order)) as advance:
        for spec in order:
            if spec not in dropped:
                try:
                    samples[spec].append(runs[spec].sample())
                except jax.errors.JaxRuntimeError as error:
                    dropped[spec] = _first_line(error)
            advance(1)
    timings = tuple(
        Timing(
            length=spec.length,
            chunk_size=int(str(spec.chunk_size)) if spec.implementation == "xla" else 0,
            seconds=() if spec in dropped else tuple(samples[spec]),
            dropped=dropped.get(spec),
            implementation=spec.implementation,
        )
        for spec in specs
    )
    today = datetime.date.today().isoformat()
    return Calibration(model.device, planning.shape_of(model, batch), jax.__version__, today, timings)


def _turns(specs: list[Spec], rounds: int) -> list[Spec]:
    """An order for each round, in which the chunk sizes of a length follow each other: they are to be compared."""
    shuffle, order = random.Random(0), []
    lengths = sorted({spec.length for spec in specs})
    by_length = [[spec for spec in specs if spec.length == length] for length in lengths]
    for _ in range(rounds):
        for alike in shuffle.sample(by_length, len(by_length)):
            order += shuffle.sample(alike, len(alike))
    return order


def _compile(weights: Params, specs: Sequence[Spec], table: ProgramTable) -> dict[Spec, str]:
    """Compile what compiles and fits; gives why for the rest."""
    compile_programs(weights, [Spec("init", specs[0].batch)], table=table)
    failed = compile_programs(weights, specs, table=table, tolerated=jax.errors.JaxRuntimeError)
    dropped = {spec: _first_line(error) for spec, error in failed.items()}
    limit = _memory_limit(weights)
    for spec in specs:
        if spec not in dropped and limit is not None:
            plan: Any = program(weights, spec, table=table).memory_analysis()
            needed = plan.temp_size_in_bytes + plan.argument_size_in_bytes + plan.output_size_in_bytes
            needed -= plan.alias_size_in_bytes  # the cache is donated
            if needed > limit:
                dropped[spec] = f"needs {needed} bytes, the device has {limit}"
    return dropped


class _Run:
    """A program that reads the same segment again and again."""

    def __init__(self, weights: Params, spec: Spec, table: ProgramTable) -> None:
        self._weights, self._program = weights, program(weights, spec, table=table)
        self._init = program(weights, Spec("init", spec.batch), table=table)
        rows = weights.config.vocab_size
        self._tokens = np.random.default_rng(0).integers(0, rows, (spec.batch, spec.length), np.int32)
        self._lengths = np.full(spec.batch, spec.length, np.int32)
        self._warm = False

    def sample(self) -> float:
        """Seconds of one run, its empty cache made before and its first run left out."""
        if not self._warm:
            self._once()
            self._warm = True
        times: list[float] = []
        while sum(times) < SAMPLE_SECONDS:
            times.append(self._once())
        return sum(times) / len(times)

    def _once(self) -> float:
        state = jax.block_until_ready(self._init())
        start = time.perf_counter()
        jax.block_until_ready(self._program(self._weights, self._tokens, self._lengths, *state))
        return time.perf_counter() - start


def _memory_limit(weights: Params) -> int | None:
    device = next(iter(weights.embedding.devices()))
    stats = device.memory_stats()
    return None if stats is None else stats.get("bytes_limit")


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:200]
