"""Compile ahead everything that a class of requests can need, so that no request waits for a compiler."""

import dataclasses
import os
import time
from collections.abc import Iterable, Iterator, Sequence, Set
from pathlib import Path
from typing import Any

from mamba_jax import tpu
from mamba_jax.arguments import as_integer, as_integers, as_path
from mamba_jax.ops.dispatch import Implementation
from mamba_jax.params import Params
from mamba_jax.planning import Model, as_policy, decode_implementation, programs_for
from mamba_jax.programs import (
    BLOCK,
    TABLE,
    Spec,
    compile_programs,
    lower_shapes,
    model_of,
    program_weights,
    reading_specs,
)
from mamba_jax.scheduler.compilation_cache import enable_compilation_cache
from mamba_jax.scheduler.monitoring import count_compilations
from mamba_jax.scheduler.policies import Policy
from mamba_jax.scheduler.programs import ProgramTable
from mamba_jax.scheduler.segments import LONGEST_TEXT, batch_buckets

TASKS = ("generate", "score", "embed")


@dataclasses.dataclass(frozen=True)
class Warmth:
    """What warming did.

    Attributes:
        programs: those that the requests can need.
        compiled: of these, how many XLA compiled now.
        fetched: of these, how many came from the folder instead.
        seconds: the whole took.
        folder: where compiled programs are kept.
        bytes_written: that the folder grew by.
    """

    programs: tuple[Spec, ...]
    compiled: int
    fetched: int
    seconds: float
    folder: Path
    bytes_written: int


def warm(
    params: Params,
    *,
    batch: int | Iterable[int] = (1,),
    lengths: tuple[int, int] = (1, 2048),
    max_new_tokens: int = 128,
    policies: Iterable[Policy | str | None] = (None,),
    tasks: Sequence[str] = ("generate",),
    implementation: Implementation | None = None,
    folder: str | os.PathLike[str] | None = None,
    strict: bool = False,
    table: ProgramTable = TABLE,
) -> Warmth:
    """Compile all programs that such requests can need, into this process and into the persistent cache.

    Afterwards the process's table counts as complete: a program that is still compiled logs a warning that names it.

    Args:
        params: the model; only shapes, dtypes and placement matter.
        batch: numbers of prompts a request may have; each is filled up to 1, 2, 4, 8 or a multiple of 8 rows, and only
            those are served.
        lengths: fewest and most tokens of a prompt, those that a tokenizer or an empty prompt begins with included; of
            `score` and `embed`: of a text. Generated tokens do not count.
        max_new_tokens: most tokens a request may generate; 0 for none. Decoding has the same programs for any number
            above 0. What reads `lengths[1] + max_new_tokens` positions is compiled as well, since a generation that a
            stop string ended is read again where its cache is wanted: so there may be longer segments than prompts of
            those lengths need.
        policies: that requests may name; None is the static choice by measured tables.
        tasks: of "generate", "score" and "embed".
        implementation: that the requests name, as in `generate` and `perplexity`; None for those that name none, as
            `score` and `embed` never do.
        folder: of the persistent cache, which `enable_compilation_cache` is called with. It holds executable code and
            must be trusted; one made here belongs to the user alone. One that cannot be written still serves to fetch
            from.
        strict: a program that is still compiled afterwards is an error (`ColdProgramError`) instead of a warning.
        table: where programs are kept.

    Returns:
        What was done.

    Raises:
        ValueError: if an argument does not fit; the message names it. Also if lengths with all new tokens exceed
            `LONGEST_TEXT`, or are too many to plan for a policy, which may decide by length: 1 to 90,000 are not.
        NotImplementedError: if implementation is "pallas" and the kernels do not take the model, batch or device.
        OSError: if the folder cannot be made.
    """
    where = None if folder is None else as_path("folder", folder)
    weights = program_weights(params)
    specs = specs_for(
        model_of(weights),
        batch=batch,
        lengths=lengths,
        max_new_tokens=max_new_tokens,
        policies=policies,
        tasks=tasks,
        implementation=implementation,
    )
    where = enable_compilation_cache(where)
    before, start = _bytes_in(where), time.perf_counter()
    with count_compilations() as counts:
        compile_programs(weights, specs, table=table, expected=True)
    table.complete, table.strict = True, strict
    return Warmth(
        programs=specs,
        compiled=counts.compiled,
        fetched=counts.fetched,
        seconds=time.perf_counter() - start,
        folder=where,
        bytes_written=_bytes_in(where) - before,
    )


@dataclasses.dataclass(frozen=True)
class Ahead:
    """What a program that was compiled for another machine's TPU would cost there; computed, not measured."""

    spec: Spec
    cost: tpu.Cost
    seconds: float  # of compiling


def warm_tpu(model: Model, topology: str, **wanted: Any) -> Iterator[Ahead]:
    """Compile for a TPU, on a machine that has none, all programs that such requests can need there.

    Nothing is kept: the TPU's process compiles again. What is learnt is that everything compiles, fits and why it takes
    its time.

    Args:
        model: what is known of a model without its weights.
        topology: as in `mamba_jax.tpu.topology_devices`; programs are for its first device.
        wanted: as in `warm`: batch, lengths, max_new_tokens, policies, tasks, implementation.

    Yields:
        Each program but "init" and "row", which compute nothing.

    Raises:
        ValueError: if an argument does not fit.
        NotImplementedError: as in `warm`.
        ImportError: if there is no compiler (extra `tpu-aot`).
    """
    device = tpu.topology_devices(topology)[0]
    chip = tpu.CHIPS[topology.partition(":")[0]]
    params = tpu.abstract_params(model.config, model.dtype, device)
    for spec in specs_for(model_of(params), **wanted):
        if spec.kind not in ("init", "row"):
            start = time.perf_counter()
            compiled = lower_shapes(params, spec).compile()
            yield Ahead(spec, tpu.cost_of(compiled, chip), time.perf_counter() - start)


def specs_for(
    model: Model,
    *,
    batch: int | Iterable[int],
    lengths: tuple[int, int],
    max_new_tokens: int,
    policies: Iterable[Policy | str | None],
    tasks: Sequence[str],
    implementation: Implementation | None = None,
) -> tuple[Spec, ...]:
    """The programs that such requests can need; arguments and errors as in `warm`."""
    batches = batch_buckets(batch)
    max_new_tokens = as_integer("max_new_tokens", max_new_tokens, 0, LONGEST_TEXT)
    if not isinstance(tasks, Sequence | Set) or isinstance(tasks, str) or not all(task in TASKS for task in tasks):
        raise ValueError(f"tasks: got {tasks!r:.80}, wanted a list of {', '.join(map(repr, TASKS))}")
    if not tasks:
        raise ValueError("tasks: got none, wanted at least one")
    if not isinstance(policies, Iterable) or isinstance(policies, str):
        raise ValueError(f"policies: got {policies!r:.80}, wanted a list of policies")
    chosen = [as_policy(policy, model.config.n_layer) for policy in policies]  # once: they may be a generator
    if not chosen:
        raise ValueError("policies: got none, wanted at least one (None: the default)")
    low, high = _range(lengths, max_new_tokens if "generate" in tasks else 0)
    found: dict[Spec, None] = {}
    for rows in batches:
        for task in tasks:
            # Generation reads its own text again where a stop string ended it and the cache is wanted.
            last = high + max_new_tokens if task == "generate" else high
            for policy in chosen if task == "generate" else [None]:
                kind = "prefill" if task == "generate" else task
                reading = programs_for(model, rows, low, last, policy, implementation)
                found |= dict.fromkeys(reading_specs(kind, rows, reading))
            if task == "generate":
                found[Spec("row", rows)] = None
                if max_new_tokens:
                    decode = Spec(
                        "decode", rows, BLOCK, implementation=decode_implementation(model, rows, implementation)
                    )
                    found |= {decode._replace(sampling=sampling): None for sampling in (False, True)}
    return tuple(found)


def _range(lengths: Any, more: int) -> tuple[int, int]:
    """The fewest and the most tokens, which with `more` are still a length that can be planned."""
    ends = as_integers(lengths) if isinstance(lengths, Sequence) and len(lengths) == 2 else None
    if ends is None:
        raise ValueError(f"lengths: got {lengths!r:.80}, wanted two integers, the fewest and the most tokens")
    low, high = ends
    if not 1 <= low <= high:
        raise ValueError(f"lengths: got {low} to {high}, wanted at least 1, and the fewest first")
    if high + more > LONGEST_TEXT:
        raise ValueError(f"lengths: got {low} to {high} and {more} new tokens, wanted at most {LONGEST_TEXT} together")
    return low, high


def _bytes_in(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
