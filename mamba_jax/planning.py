"""What runs for a text: its segments, their implementation and chunk sizes, decided before anything is dispatched.

Without a policy the choice is static: the fastest measured implementation and chunk size of each segment length and the
cheapest cover of the text under those measurements (`scheduler/calibration.py`), or stated rules where nobody measured.
A policy decides chunk sizes instead, by length or by a statistic of the text itself; they are chunk sizes of XLA's
scans, since kernels cut rows their own way. Kernels are chosen only where they take what they are given, so that what
a plan says is what runs.
"""

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from mamba_jax.arguments import as_integer
from mamba_jax.config import MambaConfig
from mamba_jax.models.lm import kernels_decline
from mamba_jax.ops import dispatch
from mamba_jax.ops.dispatch import ON_MESH, Implementation, check_implementation
from mamba_jax.scheduler.calibration import Calibration, Shape, Timing, device_name, fastest, find_calibration
from mamba_jax.scheduler.chunks import ChunkSize, default_chunk_size, fit_chunk_size
from mamba_jax.scheduler.policies import Decision, LearnedTable, PerLayer, Policy, check_policy, nearest_candidate
from mamba_jax.scheduler.policies import policy as parse_policy
from mamba_jax.scheduler.segments import DEFAULT_COSTS, LONGEST_TEXT, batch_bucket, lengths_used, plan_segments
from mamba_jax.scheduler.signals import Estimator, Watch

# Segments between the one whose statistic is read and the one that it chooses for: while the device works on the one
# between them, the host reads, decides and dispatches, so that neither waits for the other.
LAG = 2
DEFAULT_POLICY = "measured"
MOST_PLANNED = 2**33  # how many lengths times the longest `programs_for` takes with a policy: a minute of planning
SLACK = 0.005  # how much slower than the fastest a chunk size may be that `Careful` takes


class Reading(NamedTuple):
    """A program that reads."""

    length: int
    chunk_size: ChunkSize  # of its scans
    watch: Watch | None  # what it also computes
    implementation: Implementation  # of its scans


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
        devices: on which the weights lie.
    """

    config: MambaConfig
    dtype: str
    platform: str
    device_kind: str
    devices: int = 1

    @property
    def device(self) -> str:
        """The device as tables name it."""
        return device_name(self.platform, self.device_kind)


@dataclasses.dataclass(frozen=True)
class Choices:
    """The static choice by length.

    Attributes:
        chunk_sizes: the best of XLA's for each segment length.
        implementations: the best, with that chunk size, for each segment length.
        near_best: chunk sizes of XLA's that cost at most `SLACK` more than its best.
        costs: of each segment length, in seconds where they were measured for this very shape.
        source: where all this comes from, in words.
        measured: the costs are of what would run, for this very shape on this device.
    """

    chunk_sizes: Mapping[int, int]
    implementations: Mapping[int, Implementation]
    near_best: Mapping[int, tuple[int, ...]]
    costs: Mapping[int, float]
    source: str
    measured: bool


@dataclasses.dataclass(frozen=True)
class Segment:
    """One call of a program.

    Attributes:
        length: positions that the program reads.
        chunk_size: of its scans by XLA's ops; kernels cut rows their own way.
        decisions: how the chunk size came about, one for all layers or one a layer.
        seconds: what the call is expected to take; None where it was not measured.
        watch: the statistic that the call also computes, because a later segment's chunk size is chosen by it.
        implementation: of its scans.
    """

    length: int
    chunk_size: ChunkSize
    decisions: tuple[Decision, ...]
    seconds: float | None
    watch: Watch | None = None
    implementation: Implementation = "xla"

    @property
    def reading(self) -> Reading:
        """Its program."""
        return Reading(self.length, self.chunk_size, self.watch, self.implementation)


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
        for i, planned in enumerate(segment.reading for segment in self.segments):
            chosen = self.candidates.get(planned.length, ()) if i >= LAG else ()
            sizes = [fit_chunk_size(size, planned.length) for size in chosen] or [planned.chunk_size]
            found |= {planned._replace(chunk_size=size): None for size in sizes}
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
def declined(model: Model, batch: int) -> tuple[str | None, str | None]:
    """Why kernels do not read so many rows of a model, and why they do not step them; None where they do."""
    if model.devices > 1:
        return ON_MESH, ON_MESH
    return kernels_decline(model.config, model.dtype, batch, model.platform)


def decode_implementation(model: Model, batch: int, implementation: Implementation | None = None) -> Implementation:
    """What steps so many rows; arguments and errors as in `make_plan`."""
    return _implementation(model, implementation, declined(model, batch_bucket(batch))[1])


def reading_implementation(
    model: Model, batch: int, policy: Policy | None, implementation: Implementation | None
) -> Implementation | None:
    """What reads so many rows; None is left to the tables. Arguments and errors as in `make_plan`."""
    check_implementation(implementation)
    if policy is not None and implementation == "pallas":
        raise ValueError(
            f"policy: got {policy.name!r:.80} beside implementation 'pallas', wanted one of the two: a policy chooses "
            "chunk sizes, which do not reach kernels"
        )
    if policy is not None:
        return "xla"
    if implementation is None:
        return None
    return _implementation(model, implementation, declined(model, batch_bucket(batch))[0])


def _implementation(model: Model, wanted: Implementation | None, why_not: str | None) -> Implementation:
    """What was wanted if it can be; of None the rule for where nobody measured."""
    check_implementation(wanted)
    if wanted == "pallas" and why_not is not None:
        raise NotImplementedError(f"implementation: got 'pallas', but the kernels do not take {why_not}")
    by_default = why_not is None and dispatch.lowered_for(model.platform) in dispatch.KERNELS_BY_DEFAULT
    return wanted or ("pallas" if by_default else "xla")


@functools.lru_cache(maxsize=256)
def choices(model: Model, batch: int, implementation: Implementation | None = None) -> Choices:
    """The static choice by length for a model at a (bucketed) batch size; with one implementation, or None the best."""
    shape, why_not = shape_of(model, batch), declined(model, batch)[0]
    rule = _implementation(model, implementation, why_not)
    found = find_calibration(model.device, shape)
    timings = () if found is None else found.timings
    xla = fastest(timing for timing in timings if timing.implementation == "xla")
    kernels = fastest(timing for timing in timings if timing.implementation == "pallas" and why_not is None)
    # Where nobody measured kernels, the cover goes by XLA's timings all the same.
    best = {None: fastest((*xla.values(), *kernels.values())), "xla": xla, "pallas": kernels or xla}[implementation]
    by_rule = not best or (rule == "pallas" and not kernels)
    costs = {length: timing.median for length, timing in best.items()} or DEFAULT_COSTS
    sizes = {length: default_chunk_size(model.platform, model.config.layer, length) for length in costs}
    sizes |= {length: timing.chunk_size for length, timing in xla.items() if length in costs}
    return Choices(
        chunk_sizes=sizes,
        implementations={length: rule if by_rule else best[length].implementation for length in costs},
        near_best={length: _near(timings, length, xla) or (size,) for length, size in sizes.items()},
        costs=costs,
        source=_source(found if best else None, shape) + (", without the kernels that run" if best and by_rule else ""),
        measured=found is not None and found.shape == shape and not by_rule,
    )


def _near(timings: Iterable[Timing], length: int, xla: Mapping[int, Timing]) -> tuple[int, ...]:
    """The chunk sizes of XLA's that cost next to nothing more than its best; none where none was measured."""
    most = (1 + SLACK) * xla[length].median if length in xla else 0.0
    same = (timing for timing in timings if (timing.length, timing.implementation) == (length, "xla"))
    return tuple(sorted(timing.chunk_size for timing in same if timing.median <= most))


def _source(calibration: Calibration | None, shape: Shape) -> str:
    if calibration is None:
        return "a rule: nobody measured this kind of model on this device; `mamba-jax calibrate` does"
    of = "" if calibration.shape == shape else f" of the nearest shape, {calibration.shape}"
    return f"measured on {calibration.device}, {calibration.date}, jax {calibration.jax}{of}"


def make_plan(
    model: Model,
    batch: int,
    length: int,
    policy: Policy | None = None,
    implementation: Implementation | None = None,
) -> Plan:
    """Plan the reading of a text, or of a batch whose longest text it is.

    Args:
        model: what is run, and where.
        batch: rows, 1 to `MOST_ROWS`.
        length: positions, 1 to `LONGEST_TEXT` (both of `scheduler/segments.py`).
        policy: decides chunk sizes, of XLA's ops; None takes the fastest measured ones.
        implementation: "xla" or "pallas", which reads everything; None takes the faster of the two for each segment
            length where both were measured, and else leaves it to `ops.dispatch.KERNELS_BY_DEFAULT`.

    Raises:
        ValueError: if batch or length is no integer of that range, implementation no such name, or "pallas" beside a
            policy.
        NotImplementedError: if implementation is "pallas" and the kernels do not take the model, batch or device.
    """
    length = as_integer("length", length, 1, LONGEST_TEXT)  # here: a cached plan answers to 1.0 and True as well
    chosen = reading_implementation(model, batch, policy, implementation)
    return _plan(model, batch_bucket(batch), length, cast(Any, policy), chosen)  # policies are frozen, thus hashable


@functools.lru_cache(maxsize=16384)
def _plan(model: Model, batch: int, length: int, policy: Policy | None, implementation: Implementation | None) -> Plan:
    static, watch = choices(model, batch, implementation), watch_for(policy)
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
        ran = static.implementations[size]
        segments.append(Segment(size, chunk_size, honour(decisions, chunk_size, ran), seconds, looked_at, ran))
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
    near = choices(model, batch, "xla").near_best[segment] if isinstance(policy, Careful) else None
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
    static = choices(model, 1, "xla")
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


def programs_for(
    model: Model,
    batch: int,
    low: int,
    high: int,
    policy: Policy | None = None,
    implementation: Implementation | None = None,
) -> tuple[Reading, ...]:
    """The programs that reading texts of `low` to `high` positions may run; policy and implementation as in a plan.

    With a policy every length is planned, since it may decide anything by length: some 50 microseconds each, and as
    much for every few segments.

    Raises:
        ValueError: if there are more lengths than `MOST_PLANNED` says, or an argument does not fit.
        NotImplementedError: as in `make_plan`.
    """
    batch = batch_bucket(batch)
    if policy is None:
        static = choices(model, batch, reading_implementation(model, batch, policy, implementation))
        return tuple(
            Reading(length, fit_chunk_size(static.chunk_sizes[length], length), None, static.implementations[length])
            for length in lengths_used(low, high, static.costs)
        )
    if (high - low + 1) * high > MOST_PLANNED:
        raise ValueError(
            f"lengths: got {low} to {high}, each of which is planned for policy {policy.name!r}, wanted no more than "
            f"{MOST_PLANNED // high} lengths up to {high}"
        )
    found: dict[Reading, None] = {}
    for length in range(low, high + 1):
        found |= dict.fromkeys(make_plan(model, batch, length, policy, implementation).programs)
    return tuple(found)


def forget_choices() -> None:
    """Look at the tables again: they have changed."""
    for cached in (declined, choices, _plan):
        cached.cache_clear()


def run_chunk_size(decisions: Sequence[Decision], length: int) -> ChunkSize:
    """What runs for decisions on a segment of `length` positions."""
    chunks = tuple(decision.chunk for decision in decisions)
    return fit_chunk_size(chunks[0] if len(chunks) == 1 else chunks, length)


def honour(
    decisions: Sequence[Decision], chunk_size: ChunkSize, implementation: Implementation = "xla"
) -> tuple[Decision, ...]:
    """The decisions with what runs, marked as honoured where the chunk size is the one decided on."""
    ran = chunk_size if isinstance(chunk_size, tuple) else (chunk_size,) * len(decisions)
    pairs = zip(decisions, ran, strict=True)
    return tuple(
        dataclasses.replace(decision, honoured=decision.chunk == chunk, implementation=implementation)
        for decision, chunk in pairs
    )


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
