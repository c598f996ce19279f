"""Which chunk size a scan should use: policies behind one interface, each decision a record.

COREY's rule (Eq. 2) turns an entropy H into a power of two between C_min and C_max,

    C = clip(2 ** round(log2(C_min + r (C_max - C_min))), C_min, C_max),    r = min(H / H_ref, 1),

where the exponent is rounded half to even. The paper gives H_ref = ln K, C_min = 32, C_max = 512 as its default, but
its tables come from three different rules, all of which are here under names of their own (`PRESETS`). None of them
knows the machine, and larger chunks are not faster everywhere: compare any of them with what was measured there.
"""

import abc
import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, Protocol, TypeVar, get_args, runtime_checkable

import numpy as np

from mamba_jax.arguments import as_path
from mamba_jax.ops.dispatch import Implementation
from mamba_jax.scheduler.signals import Estimator, Kind

COARSE_BUCKETS = (32, 64, 128, 256, 512)
FEATURES = ("length", "layer", "entropy", "variance")
FULL, SAMPLED, BITS = Estimator(), Estimator("sampled"), Estimator(units="bits")
LARGEST = 1 << 30  # chunk; none cuts a text any more
MOST_NESTED = 8  # "guarded:" in a row
LARGEST_TABLE = 1 << 20  # bytes of a table's file
LEGACY_H_REF = 8.0  # log2 256: the ceiling in bits, which the paper's earlier revisions divided nats by

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Decision:
    """One choice of a chunk size, as a record.

    Attributes:
        length: positions of the block.
        layer: index of the layer; None where one choice serves all.
        statistic: what the policy's estimator gave; None where nothing was asked for.
        raw_chunk: the rule's value before rounding; None where there is none.
        chunk: the choice, one of the policy's candidates.
        guard_fired: whether a guard replaced the prediction by its fallback.
        policy: name of the policy.
        honoured: whether the chunk was run; whoever runs something else replaces this.
        implementation: what ran the scans; policies choose chunks of XLA's.
    """

    length: int
    layer: int | None
    statistic: float | None
    raw_chunk: float | None
    chunk: int
    policy: str
    guard_fired: bool = False
    honoured: bool = True
    implementation: Implementation = "xla"


@runtime_checkable
class Policy(Protocol):
    """What chooses chunk sizes. Policies are immutable and equal inputs give equal decisions."""

    @property
    def name(self) -> str:
        """What `policy` parses, where it can."""

    @property
    def estimator(self) -> Estimator | None:
        """The statistic that `choose` wants as statistics["entropy"]; None for none."""

    @property
    def candidates(self) -> tuple[int, ...]:
        """All chunk sizes it may choose, ascending."""

    def choose(
        self,
        length: int,
        layer: int | None = None,
        statistics: Mapping[str, float] | None = None,
        position: int = 0,
    ) -> Decision:
        """Choose.

        Args:
            length: positions of the block, at least 1.
            layer: index of the layer, or None for one choice that serves all.
            statistics: "entropy" (in the unit of `estimator`) and "variance" of the block's activations.
            position: which block of the text, or which call, this is; only `Random` looks at it.

        Raises:
            ValueError: if something the policy needs is missing or not finite, or length is below 1.
        """


def check_policy(name: str, value: Any) -> None:
    """Raise a `ValueError` unless it is a policy, which can be hashed."""
    if not isinstance(value, type) and isinstance(value, Policy):
        try:
            hash(value)
            return
        except TypeError:
            pass
    raise ValueError(f"{name}: got {value!r:.80}, wanted a policy that is immutable, or the name of one")


# Rules


def round_to_power_of_two(raw: float) -> int:
    """2 ** round(log2 raw), halves of the exponent to the even one, at least 1."""
    return int(2 ** round(math.log2(max(raw, 1.0))))


def raw_chunk(entropy: float, h_ref: float, c_min: int = 32, c_max: int = 512) -> float:
    """The chunk of Eq. 2 before rounding: C_min + r (C_max - C_min), r = min(H / H_ref, 1)."""
    return c_min + min(max(entropy, 0.0) / h_ref, 1.0) * (c_max - c_min)


def chunk_of_entropy(entropy: float, h_ref: float, c_min: int = 32, c_max: int = 512) -> int:
    """The chunk of Eq. 2."""
    return min(max(round_to_power_of_two(raw_chunk(entropy, h_ref, c_min, c_max)), c_min), c_max)


def tile(entropy: float, h_ref: float) -> int:
    """Tile size T(e): Eq. 2 between 64 and 512, one of 64, 128, 256, 512."""
    return chunk_of_entropy(entropy, h_ref, 64, 512)


def tile_superseded(entropy: float, h_ref: float = LEGACY_H_REF) -> int:
    """The paper's superseded tile size: the nearest multiple of 32 of Eq. 2's raw value between 64 and 512."""
    return 32 * round(raw_chunk(entropy, h_ref, 64, 512) / 32)


def coarse_bucket(chunk: float, buckets: Sequence[int] = COARSE_BUCKETS) -> int:
    """The bucket nearest in absolute distance, ties to the smaller."""
    return min(buckets, key=lambda bucket: (abs(bucket - chunk), bucket))


def nearest_candidate(chunk: float, candidates: Sequence[int]) -> int:
    """The candidate nearest in log2, ties to the smaller."""
    return min(candidates, key=lambda candidate: (abs(math.log2(candidate) - math.log2(chunk)), candidate))


def h_ref_sensitivity(
    entropies: Iterable[float], h_refs: Iterable[float], c_min: int = 32, c_max: int = 512
) -> list[dict[str, float]]:
    """What Eq. 2 makes of each entropy under each reference (the paper's Table 20).

    Returns:
        A row for each pair, references first: "h_ref", "entropy", "r", "raw_chunk", "chunk".
    """
    entropies = list(entropies)
    return [
        {
            "h_ref": h_ref,
            "entropy": entropy,
            "r": min(entropy / h_ref, 1.0),
            "raw_chunk": raw_chunk(entropy, h_ref, c_min, c_max),
            "chunk": chunk_of_entropy(entropy, h_ref, c_min, c_max),
        }
        for h_ref in h_refs
        for entropy in entropies
    ]


def _exponents(c_min: int, c_max: int) -> range:
    """The exponents that Eq. 2 can round to."""
    return range(round(math.log2(c_min)), round(math.log2(c_max)) + 1)


def _clipped_powers(c_min: int, c_max: int) -> tuple[int, ...]:
    """What Eq. 2 can give, ascending: powers of two, but for ends that are none."""
    return tuple(min(max(1 << exponent, c_min), c_max) for exponent in _exponents(c_min, c_max))


def _check_chunks(name: str, chunks: Sequence[int]) -> None:
    if not chunks or any(type(chunk) is not int or not 1 <= chunk <= LARGEST for chunk in chunks):
        raise ValueError(f"{name}: got {chunks!r:.80}, wanted whole numbers from 1 to {LARGEST}")


def _check_range(c_min: int, c_max: int) -> None:
    if not 1 <= c_min <= c_max <= LARGEST:
        raise ValueError(f"c_min, c_max: got {c_min}, {c_max}, wanted 1 <= c_min <= c_max <= {LARGEST}")


# Policies


@dataclasses.dataclass(frozen=True)
class _Block:
    """What a choice is made for."""

    length: int
    layer: int | None
    statistics: Mapping[str, float]
    position: int

    def statistic(self, name: str, policy: str) -> float:
        value = self.statistics.get(name)
        if value is None or not math.isfinite(value):
            raise ValueError(f"statistics: got {value} for {name!r}, wanted a finite number: {policy!r} needs it")
        return float(value)


class _Rule(abc.ABC):
    """A policy but for its choice."""

    @property
    def estimator(self) -> Estimator | None:
        """None: no statistic."""
        return None

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """What `policy` parses."""

    @abc.abstractmethod
    def _decide(self, block: _Block) -> Decision: ...

    def choose(
        self,
        length: int,
        layer: int | None = None,
        statistics: Mapping[str, float] | None = None,
        position: int = 0,
    ) -> Decision:
        """See `Policy.choose`."""
        if length < 1:
            raise ValueError(f"length: got {length}, wanted at least 1")
        return self._decide(_Block(length, layer, statistics or {}, position))

    def _decision(
        self, block: _Block, chunk: int, statistic: float | None = None, raw: float | None = None
    ) -> Decision:
        return Decision(block.length, block.layer, statistic, raw, chunk, self.name)


@dataclasses.dataclass(frozen=True)
class Static(_Rule):
    """Always `chunk`."""

    chunk: int

    def __post_init__(self) -> None:
        _check_chunks("chunk", (self.chunk,))

    @property
    def name(self) -> str:
        """static:CHUNK."""
        return f"static:{self.chunk}"

    @property
    def candidates(self) -> tuple[int, ...]:
        """The one chunk."""
        return (self.chunk,)

    def _decide(self, block: _Block) -> Decision:
        return self._decision(block, self.chunk)


@dataclasses.dataclass(frozen=True)
class Midpoint(_Rule):
    """Eq. 2 of half the largest entropy, whatever the text: the control that has a rule but no signal."""

    c_min: int = 32
    c_max: int = 512

    def __post_init__(self) -> None:
        _check_range(self.c_min, self.c_max)

    @property
    def name(self) -> str:
        """midpoint[:MIN..MAX]."""
        return "midpoint" + _range_suffix(self.c_min, self.c_max)

    @property
    def candidates(self) -> tuple[int, ...]:
        """The one chunk."""
        return (chunk_of_entropy(0.5, 1.0, self.c_min, self.c_max),)

    def _decide(self, block: _Block) -> Decision:
        return self._decision(block, self.candidates[0], raw=raw_chunk(0.5, 1.0, self.c_min, self.c_max))


@dataclasses.dataclass(frozen=True)
class Random(_Rule):
    """One of the powers of two of Eq. 2, all equally likely: a function of seed, length, layer and position."""

    seed: int = 0
    c_min: int = 32
    c_max: int = 512

    def __post_init__(self) -> None:
        _check_range(self.c_min, self.c_max)
        if self.seed < 0:
            raise ValueError(f"seed: got {self.seed}, wanted at least 0")

    @property
    def name(self) -> str:
        """random:SEED[:MIN..MAX]."""
        return f"random:{self.seed}" + _range_suffix(self.c_min, self.c_max)

    @property
    def candidates(self) -> tuple[int, ...]:
        """Powers of two from c_min to c_max."""
        return _clipped_powers(self.c_min, self.c_max)

    def _decide(self, block: _Block) -> Decision:
        layer = 0 if block.layer is None else block.layer + 1
        generator = np.random.default_rng([self.seed, block.length, layer, block.position])
        return self._decision(block, self.candidates[generator.integers(len(self.candidates))])


@dataclasses.dataclass(frozen=True)
class EntropyRule(_Rule):
    """COREY's rule, Eq. 2.

    Attributes:
        estimator: the statistic.
        c_min: smallest chunk.
        c_max: largest chunk.
        h_ref: entropy from which on c_max is chosen; None takes the estimator's maximum, log K.
        label: a name of its own.
    """

    estimator: Estimator = FULL
    c_min: int = 32
    c_max: int = 512
    h_ref: float | None = None
    label: str = ""

    def __post_init__(self) -> None:
        _check_range(self.c_min, self.c_max)
        if self.h_ref is not None and not 0 < self.h_ref < math.inf:
            raise ValueError(f"h_ref: got {self.h_ref}, wanted a positive finite number, or None for log K")

    @property
    def name(self) -> str:
        """The label, else entropy:STATISTIC[:MIN..MAX], which does not tell every estimator and h_ref."""
        robust = "-robust" if self.estimator.range == "robust" else ""
        return self.label or f"entropy:{self.estimator.kind}{robust}" + _range_suffix(self.c_min, self.c_max)

    @property
    def reference(self) -> float:
        """H_ref."""
        return self.estimator.maximum if self.h_ref is None else self.h_ref

    @property
    def candidates(self) -> tuple[int, ...]:
        """What Eq. 2 can give."""
        return _clipped_powers(self.c_min, self.c_max)

    @property
    def boundaries(self) -> tuple[float, ...]:
        """Entropies from which on the next candidate is chosen, one fewer than candidates.

        `candidates[sum(H > b for b in boundaries)]` is the rule as a program on a device may compute it.
        """
        raws = [2 ** (exponent + 0.5) for exponent in _exponents(self.c_min, self.c_max)[:-1]]
        return tuple((raw - self.c_min) / (self.c_max - self.c_min) * self.reference for raw in raws)

    def _decide(self, block: _Block) -> Decision:
        entropy = block.statistic("entropy", self.name)
        raw = raw_chunk(entropy, self.reference, self.c_min, self.c_max)
        chunk = chunk_of_entropy(entropy, self.reference, self.c_min, self.c_max)
        return self._decision(block, chunk, entropy, raw)


@dataclasses.dataclass(frozen=True)
class TileRule(_Rule):
    """The superseded tile rule, then the nearest coarse bucket: the paper's Tables 14 and 22.

    There the statistic is of the token embeddings, in bits that are printed as nats.
    """

    estimator: Estimator = BITS
    h_ref: float = LEGACY_H_REF

    @property
    def name(self) -> str:
        """bits-tile-legacy."""
        return "bits-tile-legacy"

    @property
    def candidates(self) -> tuple[int, ...]:
        """The buckets that tiles of 64 to 512 fall into."""
        return COARSE_BUCKETS[1:]

    def _decide(self, block: _Block) -> Decision:
        entropy = block.statistic("entropy", self.name)
        chunk = coarse_bucket(tile_superseded(entropy, self.h_ref))
        return self._decision(block, chunk, entropy, raw_chunk(entropy, self.h_ref, 64, 512))


@dataclasses.dataclass(frozen=True)
class LengthRule(_Rule):
    """`short` up to and with `threshold` positions, `long` above."""

    threshold: int = 50
    short: int = 128
    long: int = 512

    def __post_init__(self) -> None:
        _check_chunks("short, long", (self.short, self.long))

    @property
    def name(self) -> str:
        """`length`."""
        return "length"

    @property
    def candidates(self) -> tuple[int, ...]:
        """Both chunks."""
        return tuple(sorted({self.short, self.long}))

    def _decide(self, block: _Block) -> Decision:
        return self._decision(block, self.short if block.length <= self.threshold else self.long)


@dataclasses.dataclass(frozen=True)
class PerLayer(_Rule):
    """A fixed chunk for each layer."""

    chunks: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "chunks", tuple(self.chunks))
        _check_chunks("chunks", self.chunks)

    @property
    def name(self) -> str:
        """layers:CHUNK,CHUNK,..."""
        return "layers:" + ",".join(map(str, self.chunks))

    @property
    def candidates(self) -> tuple[int, ...]:
        """The chunks of all layers."""
        return tuple(sorted(set(self.chunks)))

    def _decide(self, block: _Block) -> Decision:
        layer = block.layer
        if layer is None or not 0 <= layer < len(self.chunks):
            raise ValueError(f"layer: got {layer}, wanted an index of the {len(self.chunks)} layers of {self.name!r}")
        return self._decision(block, self.chunks[layer])


@dataclasses.dataclass(frozen=True)
class Guarded(_Rule):
    """Another policy's choice if it is far from a safe one, else the safe one.

    Attributes:
        policy: what predicts.
        fallback: the safe chunk.
        min_delta_buckets: powers of two that the prediction must be away from it to count.
    """

    policy: Policy
    fallback: int = 512
    min_delta_buckets: int = 2

    def __post_init__(self) -> None:
        check_policy("policy", self.policy)
        _check_chunks("fallback", (self.fallback,))
        if self.min_delta_buckets < 0:
            raise ValueError(f"min_delta_buckets: got {self.min_delta_buckets}, wanted at least 0")

    @property
    def name(self) -> str:
        """guarded:STATISTIC[:MIN..MAX] or guarded:POLICY."""
        return f"guarded:{self.policy.name.removeprefix('entropy:')}"

    @property
    def estimator(self) -> Estimator | None:
        """That of the policy."""
        return self.policy.estimator

    @property
    def candidates(self) -> tuple[int, ...]:
        """The fallback and what passes the guard."""
        passing = {chunk for chunk in self.policy.candidates if not self._fires(chunk)}
        return tuple(sorted(passing | {self.fallback}))

    def _fires(self, chunk: int) -> bool:
        return abs(round(math.log2(chunk)) - round(math.log2(self.fallback))) < self.min_delta_buckets

    def _decide(self, block: _Block) -> Decision:
        predicted = self.policy.choose(block.length, block.layer, block.statistics, block.position)
        fires = self._fires(predicted.chunk)
        chunk = self.fallback if fires else predicted.chunk
        return dataclasses.replace(predicted, chunk=chunk, guard_fired=fires, policy=self.name)


@dataclasses.dataclass(frozen=True)
class Restricted(_Rule):
    """Another policy's choice, moved to the nearest of `chunks` in log2, ties to the smaller."""

    policy: Policy
    chunks: tuple[int, ...]

    def __post_init__(self) -> None:
        check_policy("policy", self.policy)
        object.__setattr__(self, "chunks", tuple(sorted(set(self.chunks))))
        _check_chunks("chunks", self.chunks)

    @property
    def name(self) -> str:
        """That of the policy."""
        return self.policy.name

    @property
    def estimator(self) -> Estimator | None:
        """That of the policy."""
        return self.policy.estimator

    @property
    def candidates(self) -> tuple[int, ...]:
        """Those of `chunks` that some choice is nearest to."""
        return tuple(sorted({nearest_candidate(chunk, self.chunks) for chunk in self.policy.candidates}))

    def _decide(self, block: _Block) -> Decision:
        choice = self.policy.choose(block.length, block.layer, block.statistics, block.position)
        return dataclasses.replace(choice, chunk=nearest_candidate(choice.chunk, self.chunks))


# Tables


@dataclasses.dataclass(frozen=True)
class Rule:
    """A chunk and the bounds, all inclusive, within which it holds; None bounds nothing."""

    chunk: int
    length_min: int | None = None
    length_max: int | None = None
    layer_min: int | None = None
    layer_max: int | None = None
    entropy_min: float | None = None
    entropy_max: float | None = None
    variance_min: float | None = None
    variance_max: float | None = None

    def __post_init__(self) -> None:
        _check_chunks("chunk", (self.chunk,))
        for feature in FEATURES:
            whole = feature in ("length", "layer")
            for name in (f"{feature}_min", f"{feature}_max"):
                value = getattr(self, name)
                fits = type(value) is int or (type(value) is float and not whole and math.isfinite(value))
                if value is not None and not fits:
                    raise ValueError(f"{name}: got {value!r:.80}, wanted a {'whole' if whole else 'finite'} number")
            low, high = self.bounds(feature) or (0, 0)
            if low > high:
                raise ValueError(f"{feature}_min, {feature}_max: got {low}, {high}, wanted the smaller first")

    def bounds(self, feature: str) -> tuple[float, float] | None:
        """Lowest and highest value of a feature, or None if the rule does not look at it."""
        low, high = getattr(self, f"{feature}_min"), getattr(self, f"{feature}_max")
        if low is None and high is None:
            return None
        return -math.inf if low is None else low, math.inf if high is None else high

    def holds(self, values: Mapping[str, float]) -> bool:
        """Whether every bound that the rule has holds for the values of the features it looks at."""
        bounds = {feature: self.bounds(feature) for feature in values}
        return all(bound is None or bound[0] <= values[feature] <= bound[1] for feature, bound in bounds.items())


@dataclasses.dataclass(frozen=True)
class LearnedTable(_Rule):
    """Ordered rules of which the first that holds decides; a statistic is asked for only if some rule looks at it.

    Attributes:
        rules: in order.
        default: the chunk where none holds.
        statistic: what gives the entropies that rules bound.
        label: name, "table:PATH" for one that was read from a file.
    """

    rules: tuple[Rule, ...]
    default: int
    statistic: Estimator = SAMPLED
    label: str = "table"

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", tuple(self.rules))
        _check_chunks("default", (self.default,))

    @property
    def name(self) -> str:
        """The label."""
        return self.label

    @property
    def features(self) -> tuple[str, ...]:
        """The features that rules look at, of "length", "layer", "entropy" and "variance"."""
        return tuple(f for f in FEATURES if any(rule.bounds(f) is not None for rule in self.rules))

    @property
    def estimator(self) -> Estimator | None:
        """The statistic if some rule looks at it."""
        return self.statistic if {"entropy", "variance"} & set(self.features) else None

    @property
    def candidates(self) -> tuple[int, ...]:
        """The default and the chunks of all rules."""
        return tuple(sorted({self.default, *(rule.chunk for rule in self.rules)}))

    def _decide(self, block: _Block) -> Decision:
        values: dict[str, float] = {"length": block.length}
        if "layer" in self.features:
            if block.layer is None:
                raise ValueError(f"layer: got None, wanted an index: {self.name!r} has rules by layer")
            values["layer"] = block.layer
        for feature in {"entropy", "variance"} & set(self.features):
            values[feature] = block.statistic(feature, self.name)
        chunk = next((rule.chunk for rule in self.rules if rule.holds(values)), self.default)
        return self._decision(block, chunk, values.get("entropy"))

    def to_json(self) -> str:
        """The table as JSON, without its label; bounds that are None are left out."""
        rules = [{k: v for k, v in dataclasses.asdict(rule).items() if v is not None} for rule in self.rules]
        statistic = dataclasses.asdict(self.statistic)
        return json.dumps({"default": self.default, "estimator": statistic, "rules": rules}, indent=1)

    @classmethod
    def from_json(cls, text: str, label: str = "table") -> "LearnedTable":
        """The table of `to_json`.

        Raises:
            ValueError: if the text is not JSON, or has keys missing, unknown or of a wrong type; it names label and
                key.
        """
        try:
            table = json.loads(text)
            _check_keys("table", table, {"default", "rules"}, {"estimator"})
            if not isinstance(table["rules"], list):
                raise ValueError(f"rules: got {table['rules']!r:.80}, wanted a list")
            rules = tuple(_from_object(f"rules[{i}]", Rule, rule) for i, rule in enumerate(table["rules"]))
            statistic = _from_object("estimator", Estimator, table["estimator"]) if "estimator" in table else SAMPLED
            return cls(rules, table["default"], statistic, label)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{label}: not a table of rules: {error}") from error

    @classmethod
    def read(cls, path: str) -> "LearnedTable":
        """The table of a file, labelled "table:PATH".

        Raises:
            ValueError: if the file is larger than a MiB or not UTF-8, and as `from_json`.
            OSError: if it cannot be read.
        """
        label = f"table:{path}"
        if not path:
            raise ValueError(f"got {label!r}, wanted a file's path after the colon")
        with as_path("table", path).open("rb") as file:
            content = file.read(LARGEST_TABLE + 1)
        if len(content) > LARGEST_TABLE:
            raise ValueError(f"{label}: not a table of rules: got a file of more than {LARGEST_TABLE} bytes")
        try:
            text = content.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{label}: not a table of rules: {error}") from error
        return cls.from_json(text, label)


def _check_keys(name: str, entry: Any, due: Set[str], others: Set[str]) -> None:
    """Raise a `ValueError` unless it is an object of JSON with all keys that are due, and at most some of others."""
    if not isinstance(entry, dict):
        raise ValueError(f"{name}: got {entry!r:.80}, wanted an object")
    if missing := due - entry.keys():
        raise ValueError(f"{name}: got no {', '.join(sorted(missing))}")
    if unknown := entry.keys() - due - others:
        known = ", ".join(sorted(due | others))
        raise ValueError(f"{name}: got {', '.join(sorted(unknown))!r:.80}, wanted no keys but {known}")


def _from_object(name: str, kind: type[T], entry: Any) -> T:
    """A dataclass from an object of JSON that has its fields."""
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    due = {field.name for field in fields if field.default is dataclasses.MISSING}
    _check_keys(name, entry, due, {field.name for field in fields} - due)
    try:
        return kind(**entry)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


@dataclasses.dataclass(frozen=True)
class Sample:
    """One measured workload: its features and the chunk that was fastest in a sweep of static chunks."""

    chunk: int
    length: int
    layer: int | None = None
    entropy: float | None = None
    variance: float | None = None


def fit_table(
    samples: Sequence[Sample],
    features: Sequence[str] | None = None,
    max_depth: int = 3,
    min_samples_leaf: int = 1,
    statistic: Estimator = SAMPLED,
    label: str = "table",
) -> LearnedTable:
    """Fit a decision tree (scikit-learn) to measured workloads and write it down as rules.

    The rules are the tree's leaves, which exclude each other; the chunk of most samples becomes the default.

    Args:
        samples: measured workloads, at least one.
        features: which to use; None takes those that every sample has.
        max_depth: of the tree.
        min_samples_leaf: fewest samples that a rule stands on.
        statistic: what gave the samples' entropies.
        label: the table's name.

    Raises:
        ImportError: without scikit-learn (extra `calibrate`).
        ValueError: without samples, for a feature that does not exist, or one that a sample lacks.
    """
    if not samples:
        raise ValueError("samples: got none, wanted at least one")
    if features is None:
        features = [f for f in FEATURES if all(getattr(sample, f) is not None for sample in samples)]
    if not features or set(features) - set(FEATURES):
        raise ValueError(f"features: got {', '.join(features) or 'none'}, wanted some of {', '.join(FEATURES)}")
    for feature in features:
        if any(getattr(sample, feature) is None for sample in samples):
            raise ValueError(f"samples: got some without {feature}, wanted it in all of them")
    try:
        from sklearn.tree import DecisionTreeClassifier
    except ImportError as error:
        raise ImportError("fit_table needs scikit-learn: pip install 'mamba-jax[calibrate]'") from error
    inputs = np.array([[getattr(sample, feature) for feature in features] for sample in samples], np.float32)
    labels = np.array([sample.chunk for sample in samples])
    tree = DecisionTreeClassifier(max_depth=max_depth, min_samples_leaf=min_samples_leaf, random_state=0)
    tree.fit(inputs, labels)
    chunks, counts = np.unique(labels, return_counts=True)
    default = int(chunks[np.argmax(counts)])
    rules = [rule for rule in _leaves(tree, features) if rule.chunk != default]
    return LearnedTable(tuple(rules), default, statistic, label)


def _leaves(tree: Any, features: Sequence[str]) -> Iterable[Rule]:
    """The leaves of a fitted tree as rules, left to right."""
    nodes = tree.tree_

    def visit(node: int, bounds: dict[str, float]) -> Iterable[Rule]:
        left, right = nodes.children_left[node], nodes.children_right[node]
        if left == right:
            yield Rule(int(tree.classes_[np.argmax(nodes.value[node][0])]), **bounds)  # type: ignore[arg-type]
            return
        feature, threshold = features[nodes.feature[node]], float(nodes.threshold[node])
        # The tree asks value <= threshold; both bounds of a rule are inclusive.
        whole = feature in ("length", "layer")
        high = math.floor(threshold) if whole else threshold
        low = high + 1 if whole else math.nextafter(threshold, math.inf)
        yield from visit(left, bounds | {f"{feature}_max": high})
        yield from visit(right, bounds | {f"{feature}_min": low})

    return visit(0, {})


# Names

PRESETS: Mapping[str, Policy] = {
    "corey-default": EntropyRule(label="corey-default"),
    "corey-legacy": EntropyRule(h_ref=LEGACY_H_REF, label="corey-legacy"),
    "corey-h800": EntropyRule(c_min=128, c_max=2048, label="corey-h800"),
    "bits-tile-legacy": TileRule(),
}
Maker = Callable[[str], Policy]


def policy(spec: str, more: Mapping[str, Maker] | None = None) -> Policy:
    """The policy that a string names.

    - a preset: "corey-default", "corey-legacy", "corey-h800", "bits-tile-legacy";
    - "static:128", "length", "layers:64,128,128", "table:PATH";
    - "midpoint", "random:7", "entropy" or "entropy:sampled" (a kind of `Estimator`, "sampled-robust" for the robust
      range), each with its range of chunks if that is not 32 to 512: "midpoint:128..2048", "random:7:128..2048",
      "entropy:sampled:128..2048";
    - "guarded:sampled", which is "entropy:sampled" guarded, with a range too, or "guarded:" and any other string.

    Args:
        spec: the string.
        more: further names, which come first; each with the function that makes its policy of what follows the colon.

    Raises:
        ValueError: for a string that names none, saying what there is.
        OSError: if a table's file cannot be read.
    """
    if not isinstance(spec, str):
        raise ValueError(f"policy: got {spec!r:.80}, wanted a string")
    if spec.startswith("guarded:" * (MOST_NESTED + 1)):
        raise ValueError(f"policy: got {spec!r:.80}, wanted at most {MOST_NESTED} times 'guarded:'")
    head, _, rest = spec.partition(":")
    makers: dict[str, Maker] = {**_MAKERS, "guarded": lambda inner: _guarded(inner, more), **(more or {})}
    if head in makers:
        try:
            return makers[head](rest)
        except ValueError as error:
            raise ValueError(f"policy {spec!r:.200}: {error}") from error
    if spec in PRESETS:
        return PRESETS[spec]
    forms = (*(more or {}), *PRESETS, *_FORMS)
    raise ValueError(f"policy: got {spec!r:.200}, wanted one of {', '.join(forms)}")


_FORMS = (
    "static:CHUNK",
    "midpoint[:MIN..MAX]",
    "random:SEED[:MIN..MAX]",
    "entropy[:STATISTIC][:MIN..MAX]",
    "guarded[:STATISTIC][:MIN..MAX]",
    "guarded:POLICY",
    "length",
    "layers:CHUNK,CHUNK,...",
    "table:PATH",
)


def _midpoint(rest: str) -> Policy:
    first, bounds = _split(rest)
    if first:
        raise ValueError(f"got {first!r}, wanted a range MIN..MAX or nothing")
    return Midpoint(*bounds)


def _random(rest: str) -> Policy:
    first, bounds = _split(rest)
    return Random(_whole(first or "0", "a seed"), *bounds)


def _entropy(rest: str) -> Policy:
    first, bounds = _split(rest)
    return EntropyRule(_estimator(first or "histogram"), *bounds)


def _guarded(rest: str, more: Mapping[str, Maker] | None) -> Policy:
    first, bounds = _split(rest)
    own = first.removesuffix("-robust") in ("", *get_args(Kind))
    return Guarded(EntropyRule(_estimator(first or "sampled"), *bounds) if own else policy(rest, more))


def _length(rest: str) -> Policy:
    if rest:
        raise ValueError(f"got {rest!r}, wanted nothing after 'length'")
    return LengthRule()


_MAKERS: Mapping[str, Maker] = {
    "static": lambda rest: Static(_whole(rest, "a chunk")),
    "midpoint": _midpoint,
    "random": _random,
    "entropy": _entropy,
    "length": _length,
    "layers": lambda rest: PerLayer(tuple(_whole(chunk, "chunks with commas") for chunk in rest.split(","))),
    "table": LearnedTable.read,
}


def _estimator(text: str) -> Estimator:
    kind: Any = text.removesuffix("-robust")
    return Estimator(kind, range="robust" if text.endswith("-robust") else "minmax")


def _split(rest: str) -> tuple[str, tuple[int, int] | tuple[()]]:
    """Split "sampled:128..2048" into "sampled" and (128, 2048); either may be missing."""
    first, _, last = rest.rpartition(":")
    low, dots, high = last.partition("..")
    if not dots:
        return rest, ()
    return first, (_whole(low, "MIN..MAX"), _whole(high, "MIN..MAX"))


def _range_suffix(c_min: int, c_max: int) -> str:
    return "" if (c_min, c_max) == (32, 512) else f":{c_min}..{c_max}"


def _whole(text: str, wanted: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 20):
        raise ValueError(f"got {text!r:.80}, wanted {wanted}")
    return int(text)
