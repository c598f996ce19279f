"""What runs for a text: its segments and their chunk sizes, decided before anything is dispatched.

Without a policy the choice is static: the fastest measured chunk size of each segment length and the cheapest cover of
the text under those measurements (`scheduler/calibration.py`), or stated rules where nobody measured. A policy decides
chunk sizes instead, by length or by a statistic of the text itself.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from mamba_jax.arguments import as_integer
from mamba_jax.config import MambaConfig
from mamba_jax.scheduler.calibration import Calibration, Shape, Timing, device_name, find_calibration
from mamba_jax.scheduler.chunks import ChunkSize, default_chunk_size, fit_chunk_size
from mamba_jax.scheduler.policies import Decision, LearnedTable, PerLayer, Policy, check_policy, nearest_candidate
from mamba_jax.scheduler.policies import policy as parse_policy
from mamba_jax.scheduler.segments import DEFAULT_COSTS, LONGEST_TEXT, batch_bucket, lengths_used, plan_segments
from mamba_jax.scheduler.signals import Estimator, Watch

# Segments between the one whose statistic is read and the one that it chooses for: while the device works on the one
# between them, the host reads, decides and dispatches, so that neither waits for the other.
LAG = 2
Reading = tuple[int, ChunkSize, Watch | None]  # a program that reads: its length, chunk size and what it watches
DEFAULT_POLICY = "measured"
MOST_PLANNED = 2**33  # how many lengths times the longest `programs_for` takes with a policy: a minute of planning
SLACK = 0.005  # how much slower than the fastest a chunk size may be that `Careful` takes


@dataclasses.dataclass(frozen=True)
class Careful:
    """Another policy's choice, moved to the nearest chunk size that was measured to cost next to nothing.

    Whatever the policy says, reading takes at most `SLACK` longer than with the fastest chunk size; where nobody
    measured, nothing but the stated rule's chunk size is left.
    """

    policy: Policy

    def __post_init__(self) -> None:
        check_policy("policy", self.policy)

    @property
    def name(self) -> str:
        """As `as_policy` reads it."""
        return f"careful:{self.policy.name}"

    @property
    def estimator(self) -> Estimator | None:
        """The other policy's."""
        return self.policy.estimator

    @property
    def candidates(self) -> tuple[int, ...]:
        """The other policy's; what is left of them depends on the segment."""
        return self.policy.candidates

    def choose(
        self,
        length: int,
        layer: int | None = None,
        statistics: Mapping[str, float] | None = None,
        position: int = 0,
    ) -> Decision:
        """The other policy's choice."""
        return dataclasses.replace(self.policy.choose(length, layer, statistics, position), policy=self.name)


@dataclasses.dataclass(frozen=True)
class Model:
    """What choices depend on.

    Attributes:
        config: the architecture.
        dtype: of the weights.
        platform: "cpu", "gpu" ("cuda", "rocm") or "tpu".
        device_kind: as JAX names it.
    """

    config: MambaConfig
    dtype: str
    platform: str
    device_kind: str

    @property
    def device(self) -> str:
        """The device as tables name it."""
        return device_name(self.platform, self.device_kind)


@dataclasses.dataclass(frozen=True)
class Choices:
    """The static choice by length.

    Attributes:
        chunk_sizes: the best for each segment length.
        near_best: those that cost at most `SLACK` more than the best.
        costs: of each segment length, in seconds where they were measured for this very shape.
        source: where both come from, in words.
        measured: they were measured for this very shape on this device.
    """

    chunk_sizes: Mapping[int, int]
    near_best: Mapping[int, tuple[int, ...]]
    costs: Mapping[int, float]
    source: str
    measured: bool


@dataclasses.dataclass(frozen=True)
class Segment:
    """One call of a program.

    Attributes:
        length: positions that the program reads.
        chunk_size: of its scans.
        decisions: how the chunk size came about, one for all layers or one a layer.
        seconds: what the call is expected to take; None where it was not measured.
        watch: the statistic that the call also computes, because a later segment's chunk size is chosen by it.
    """

    length: int
    chunk_size: ChunkSize
    decisions: tuple[Decision, ...]
    seconds: float | None
    watch: Watch | None = None


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything that reading a text runs.

    Attributes:
        length: positions of the text.
        batch: rows, dummy ones included.
        segments: in order.
        candidates: by segment length, chunk sizes that a statistic may choose among at run time for segments from the
            third on, instead of those planned; empty if none does.
        source: where lengths and default chunk sizes come from.
    """

    length: int
    batch: int
    segments: tuple[Segment, ...]
    candidates: Mapping[int, tuple[int, ...]]
    source: str

    @property
    def seconds(self) -> float | None:
        """What reading the text is expected to take; None where that was not measured."""
        each = [segment.seconds for segment in self.segments]
        return None if None in each else sum(second for second in each if second is not None)

    @property
    def programs(self) -> tuple[Reading, ...]:
        """The programs that may run, each once."""
        found: dict[Reading, None] = {}
        for i, (length, watch) in enumerate((segment.length, segment.watch) for segment in self.segments):
            chosen = self.candidates.get(length, ()) if i >= LAG else ()
            sizes = [fit_chunk_size(size, length) for size in chosen] or [self.segments[i].chunk_size]
            found |= {(length, size, watch): None for size in sizes}
        return tuple(found)


def shape_of(model: Model, batch: int) -> Shape:
    """What timings of a model are filed under."""
    c = model.config
    dims: dict[str, str | int] = {
        "layer": c.layer,
        "d_model": c.d_model,
        "n_layer": c.n_layer,
        "d_inner": c.d_inner,
        "d_state": c.d_state,
        "headdim": c.headdim,
        "ngroups": c.ngroups,
        "vocab": c.padded_vocab_size,
    }
    return Shape(tuple(dims.items()), model.dtype, batch)


@functools.lru_cache(maxsize=256)
def choices(model: Model, batch: int) -> Choices:
    """The static choice by length for a model at a (bucketed) batch size."""
    shape = shape_of(model, batch)
    found = find_calibration(model.device, shape)
    if found is None or not found.best:
        sizes = {length: default_chunk_size(model.platform, model.config.layer, length) for length in DEFAULT_COSTS}
        hint = "a rule: nobody measured this kind of model on this device; `mamba-jax calibrate` does"
        return Choices(sizes, {length: (size,) for length, size in sizes.items()}, DEFAULT_COSTS, hint, measured=False)
    return Choices(
        chunk_sizes={length: timing.chunk_size for length, timing in found.best.items()},
        near_best={length: _near(found, timing) for length, timing in found.best.items()},
        costs={length: timing.median for length, timing in found.best.items()},
        source=_source(found, shape),
        measured=found.shape == shape,
    )


def _near(calibration: Calibration, best: Timing) -> tuple[int, ...]:
    same = (timing for timing in calibration.timings if timing.length == best.length)
    return tuple(sorted(timing.chunk_size for timing in same if timing.median <= (1 + SLACK) * best.median))


def _source(calibration: Calibration, shape: Shape) -> str:
    of = "" if calibration.shape == shape else f" of the nearest shape, {calibration.shape}"
    return f"measured on {calibration.device}, {calibration.date}, jax {calibration.jax}{of}"


def make_plan(model: Model, batch: int, length: int, policy: Policy | None = None) -> Plan:
    """Plan the reading of a text, or of a batch whose longest text it is.

    Args:
        model: what is run, and where.
        batch: rows, 1 to `MOST_ROWS`.
        length: positions, 1 to `LONGEST_TEXT` (both of `scheduler/segments.py`).
        policy: decides chunk sizes; None takes the fastest measured ones.

    Raises:
        ValueError: if batch or length is no integer of that range.
    """
    length = as_integer("length", length, 1, LONGEST_TEXT)  # here: a cached plan answers to 1.0 and True as well
    return _plan(model, batch_bucket(batch), length, cast(Any, policy))  # policies are frozen, thus hashable


@functools.lru_cache(maxsize=16384)
def _plan(model: Model, batch: int, length: int, policy: Policy | None) -> Plan:
    static, watch = choices(model, batch), watch_for(policy)
    segments, sizes = [], plan_segments(length, static.costs)
    for i, size in enumerate(sizes):
        best = static.chunk_sizes[size]
        if policy is None or watch is not None:
            decisions: tuple[Decision, ...] = (Decision(length, None, None, None, best, DEFAULT_POLICY),)
        else:
            decisions = decide(model, batch, policy, length, None, i, size)
        chunk_size = run_chunk_size(decisions, size)
        seconds = static.costs[size] if static.measured and chunk_size == fit_chunk_size(best, size) else None
        looked_at = watch if i + LAG < len(sizes) else None
        segments.append(Segment(size, chunk_size, honour(decisions, chunk_size), seconds, looked_at))
    candidates = {}
    if policy is not None and watch is not None:
        candidates = {segment.length: _allowed(static, policy, segment.length) for segment in segments[LAG:]}
    return Plan(length, batch, tuple(segments), candidates, static.source)


def _allowed(static: Choices, policy: Policy, length: int) -> tuple[int, ...]:
    """The chunk sizes that a policy may run on a segment."""
    sizes = policy.candidates
    if isinstance(policy, Careful):
        sizes = tuple(sorted({nearest_candidate(size, static.near_best[length]) for size in sizes}))
    return sizes


def watch_for(policy: Policy | None) -> Watch | None:
    """What programs have to compute for a policy to decide at run time; None if it decides beforehand."""
    if policy is None or policy.estimator is None:
        return None
    return Watch(policy.estimator, with_variance="variance" in _features(policy))


def decide(
    model: Model,
    batch: int,
    policy: Policy,
    length: int,
    statistics: np.ndarray | None,
    position: int,
    segment: int,
) -> tuple[Decision, ...]:
    """A policy's decisions for one segment of a text.

    Args:
        model: what is run.
        batch: rows, dummy ones included.
        policy: decides.
        length: positions of the text.
        statistics: (layers, 2) of the layers that were watched, as `Watch` gives them; None for none.
        position: index of the segment.
        segment: its positions.

    Returns:
        One decision for all layers, or one a layer if the policy looks at layers.
    """
    layers = range(model.config.n_layer) if "layer" in _features(policy) else (None,)
    near = choices(model, batch).near_best[segment] if isinstance(policy, Careful) else None
    mean = None if statistics is None else statistics.mean(axis=0)
    return tuple(_choose(policy, length, layer, mean, position, near) for layer in layers)


def decide_layers(model: Model, policy: Policy, length: int, statistics: np.ndarray) -> PerLayer:
    """One chunk size a layer, each from that layer's own statistics.

    Args:
        model: what is run.
        policy: decides.
        length: positions of the text that the statistics are of.
        statistics: (n_layer, 2) of every layer, as `Watch` gives them.
    """
    static = choices(model, 1)
    near = static.near_best[max(plan_segments(length, static.costs))] if isinstance(policy, Careful) else None
    decisions = (_choose(policy, length, layer, row, 0, near) for layer, row in enumerate(statistics))
    return PerLayer(tuple(decision.chunk for decision in decisions))


def _choose(
    policy: Policy, length: int, layer: int | None, statistics: np.ndarray | None, position: int, near: Any
) -> Decision:
    named = None if statistics is None else dict(zip(("entropy", "variance"), statistics.tolist(), strict=True))
    decision = policy.choose(length, layer, named, position)
    return decision if near is None else dataclasses.replace(decision, chunk=nearest_candidate(decision.chunk, near))


def _features(policy: Policy) -> tuple[str, ...]:
    """What a policy looks at that not every policy does."""
    if isinstance(inner := getattr(policy, "policy", None), Policy):
        return _features(inner)
    if isinstance(policy, LearnedTable):
        return policy.features
    return ("layer",) if isinstance(policy, PerLayer) else ()


def programs_for(model: Model, batch: int, low: int, high: int, policy: Policy | None = None) -> tuple[Reading, ...]:
    """The programs that reading texts of `low` to `high` positions may run.

    With a policy every length is planned, since it may decide anything by length: some 50 microseconds each, and as
    much for every few segments.

    Raises:
        ValueError: if there are more lengths than `MOST_PLANNED` says, or an argument is out of range.
    """
    batch = batch_bucket(batch)
    if policy is None:
        static = choices(model, batch)
        lengths = lengths_used(low, high, static.costs)
        return tuple((length, fit_chunk_size(static.chunk_sizes[length], length), None) for length in lengths)
    if (high - low + 1) * high > MOST_PLANNED:
        raise ValueError(
            f"lengths: got {low} to {high}, each of which is planned for policy {policy.name!r}, wanted no more than "
            f"{MOST_PLANNED // high} lengths up to {high}"
        )
    found: dict[Reading, None] = {}
    for length in range(low, high + 1):
        found |= dict.fromkeys(make_plan(model, batch, length, policy).programs)
    return tuple(found)


def forget_choices() -> None:
    """Look at the tables again: they have changed."""
    choices.cache_clear()
    _plan.cache_clear()


def run_chunk_size(decisions: Sequence[Decision], length: int) -> ChunkSize:
    """What runs for decisions on a segment of `length` positions."""
    chunks = tuple(decision.chunk for decision in decisions)
    return fit_chunk_size(chunks[0] if len(chunks) == 1 else chunks, length)


def honour(decisions: Sequence[Decision], chunk_size: ChunkSize) -> tuple[Decision, ...]:
    """The decisions, marked as honoured where the chunk size that runs is the one decided on."""
    ran = chunk_size if isinstance(chunk_size, tuple) else (chunk_size,) * len(decisions)
    pairs = zip(decisions, ran, strict=True)
    return tuple(dataclasses.replace(decision, honoured=decision.chunk == chunk) for decision, chunk in pairs)


def as_policy(policy: Policy | str | None, n_layer: int | None = None) -> Policy | None:
    """The policy that a name stands for; None and "measured" are the static choice by measured tables.

    Names are those of `mamba_jax.scheduler.policies.policy`, and "careful:" before one of them.

    Raises:
        ValueError: if it is no policy and names none, or has chunk sizes for another number of layers than `n_layer`.
        OSError: if a table's file cannot be read.
    """
    if isinstance(policy, str):
        if policy == DEFAULT_POLICY:
            return None
        policy = parse_policy(policy, {"careful": lambda rest: Careful(parse_policy(rest or "entropy:sampled"))})
    elif policy is not None:
        check_policy("policy", policy)
    inner: Any = policy
    while isinstance(within := getattr(inner, "policy", None), Policy):
        inner = within
    if isinstance(inner, PerLayer) and n_layer is not None and len(inner.chunks) != n_layer:
        got = f"{inner.name!r:.80} with {len(inner.chunks)} chunk sizes"
        raise ValueError(f"policy: got {got}, wanted one for each of {n_layer} layers")
    return policy
