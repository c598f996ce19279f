"""What a scheduler may know of an activation: one number, computed where the activation is.

For a tensor u the entropy of its histogram is (COREY, Eq. 1)

    H = -sum_k p_k log(p_k + eps),    p_k = share of the values in the k-th of K bins of equal width,

between 0 (all values in one bin) and log K. The bins span the values' own minimum and maximum (`range="minmax"`, the
paper's reading, which one outlier stretches and which therefore falls as tensors grow), or at most four mean absolute
deviations around their mean (`range="robust"`, values beyond which count in the first and last bin).

The proxies are moments put on the same scale (over all values):

    cheap      log K * mean|u| / (rms + eps)
    variance   log K * std / (mean|u| + std + eps)
    kurtosis   log K * (1 - exp(-max(m4 / std**4 - 3, 0) / 8))

They are controls: "variance" and "kurtosis" are larger where the entropy is smaller, and a constant has the largest
"cheap" there is.

Every estimator is defined for every input. A position counts for nothing if it is padding or if any of its channels is
not finite. With nothing left to count all are 0; of one value, or of equal values, all but "cheap" are.
"""

import dataclasses
import math
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import xlogy
from jaxtyping import Array, Bool, Float, Int

from mamba_jax.arguments import as_integer, as_number

Kind = Literal["histogram", "sampled", "token", "cheap", "variance", "kurtosis"]
Range = Literal["minmax", "robust"]
Units = Literal["nats", "bits"]
T = TypeVar("T")

MOST_BINS = 1 << 16
ROBUST_DEVIATIONS = 4.0  # half width of the robust range in mean absolute deviations (3.2 sigma of a normal)
# Positions count in turn in copies of a histogram, or a GPU's atomic additions to full bins would wait for each other:
# 0.05 ms instead of 0.97 for 2048 x 1536 values on an H200, and as fast as before on a CPU.
_COPIES = 64
_SMALLEST_SPAN = 1e-30  # values no further apart than this are equal: bins / span must stay a float32


def max_entropy(bins: int, units: Units = "nats") -> float:
    """Entropy of `bins` equally full bins: ln K or log2 K."""
    return math.log(bins) if units == "nats" else math.log2(bins)


@dataclasses.dataclass(frozen=True)
class Estimator:
    """A statistic of an activation, as a function of it; two equal estimators give equal programs.

    Attributes:
        kind: "histogram" of all values; "sampled": of every `stride`-th position; "token": the mean of the entropies
            of every `stride`-th position, each a histogram over the channels with a range of its own; or a proxy,
            "cheap", "variance" or "kurtosis".
        bins: K.
        eps: in the logarithm of Eq. 1, and in the proxies' denominators.
        range: what the bins span, "minmax" or "robust"; proxies have none.
        units: "nats" or "bits".
        stride: of "sampled" and "token", in positions.

    Raises:
        ValueError: for a kind, range or unit that does not exist, bins that are no integer from 2 to 65536, a negative
            or infinite eps, a stride that is no integer from 1 to 2**31 - 1.
    """

    kind: Kind = "histogram"
    bins: int = 256
    eps: float = 1e-8
    range: Range = "minmax"
    units: Units = "nats"
    stride: int = 8

    def __post_init__(self) -> None:
        for name, value, known in (
            ("kind", self.kind, Kind),
            ("range", self.range, Range),
            ("units", self.units, Units),
        ):
            if value not in get_args(known):
                raise ValueError(f"{name}: got {value!r}, wanted one of {', '.join(get_args(known))}")
        as_integer("bins", self.bins, 2, MOST_BINS)
        as_number("eps", self.eps, lambda eps: 0 <= eps < math.inf, "a finite number of at least 0")
        as_integer("stride", self.stride, 1, 2**31 - 1)

    @property
    def maximum(self) -> float:
        """The largest value: log K in the estimator's unit."""
        return max_entropy(self.bins, self.units)

    @property
    def _step(self) -> int:
        return self.stride if self.kind in ("sampled", "token") else 1

    def __call__(self, u: Float[Array, "*b l d"], lengths: Int[Array, "*b"] | None = None) -> Float[Array, ""]:
        """The statistic as a float32 scalar on the device; traceable.

        Counting is one scatter into int32, which a CPU does at a nanosecond a value (comparing values with all bins
        takes hundreds of times as long).

        Args:
            u: activations of any floating dtype; computed in float32.
            lengths: positions that count, from the left; None counts all.

        Raises:
            ValueError: if u has fewer than two axes or is not floating, if lengths does not have u's leading axes, or
                if there are 2**31 values, or bins of tokens, or more.
        """
        _check(u, lengths)
        x = jnp.asarray(u)[..., :: self._step, :].astype(jnp.float32)
        if x.size == 0:
            return jnp.float32(0)
        with jax.named_scope(f"statistic_{self.kind}"):
            rows = _rows(x, lengths, self._step)
            if self.kind not in ("histogram", "sampled", "token"):
                return self._proxy(rows) * self.maximum
            nats = self._token_entropy(rows) if self.kind == "token" else self._entropy(rows)
            return nats * (self.maximum / math.log(self.bins))

    def _entropy(self, rows: "_Rows") -> Float[Array, ""]:
        """Entropy of all values, in nats."""
        low = jnp.min(rows.low, where=rows.counted, initial=jnp.inf)
        high = jnp.max(rows.high, where=rows.counted, initial=-jnp.inf)
        if self.range == "robust":
            power = _power(jnp.maximum(-low, high))
            y = rows.x * power
            mean = _mean(y, rows.counted)
            width = ROBUST_DEVIATIONS * _mean(jnp.abs(y - mean), rows.counted)
            low = jnp.maximum(low, (mean - width) / power)
            high = jnp.minimum(high, (mean + width) / power)
        bins = jnp.where(rows.counted[..., None], self._bins(rows.x, low, high), self.bins)
        copy = jnp.arange(bins.shape[-2], dtype=jnp.int32)[:, None] % _COPIES
        counts = _count(copy * (self.bins + 1) + bins, _COPIES * (self.bins + 1)).reshape(_COPIES, -1)
        return self._entropy_of(jnp.sum(counts, 0)[: self.bins])

    def _token_entropy(self, rows: "_Rows") -> Float[Array, ""]:
        """Mean over positions of the entropy of their channels, in nats."""
        low, high = rows.low[..., None], rows.high[..., None]
        if self.range == "robust":
            power = _power(jnp.maximum(-low, high))
            y = rows.x * power
            mean = jnp.mean(y, -1, keepdims=True)
            width = ROBUST_DEVIATIONS * jnp.mean(jnp.abs(y - mean), -1, keepdims=True)
            low = jnp.maximum(low, (mean - width) / power)
            high = jnp.minimum(high, (mean + width) / power)
        bins = jnp.where(rows.counted[..., None], self._bins(rows.x, low, high), 0)
        if rows.counted.size * self.bins >= 2**31:
            raise ValueError(f"u: got {rows.counted.size} positions of {self.bins} bins, wanted fewer than 2**31 bins")
        first = jnp.arange(rows.counted.size, dtype=jnp.int32).reshape(*rows.counted.shape, 1) * self.bins
        counts = _count(first + bins, rows.counted.size * self.bins)
        entropies = self._entropy_of(counts.reshape(*rows.counted.shape, self.bins))
        return jnp.sum(entropies, where=rows.counted) / jnp.maximum(jnp.sum(rows.counted), 1)

    def _bins(self, x: Array, low: Array, high: Array) -> Array:
        """Which bin each value is in. Halves, since the span of two finite numbers may be infinite."""
        span = 0.5 * high - 0.5 * low
        scale = jnp.where(span > _SMALLEST_SPAN, self.bins / span, 0.0)
        return jnp.clip((0.5 * x - 0.5 * low) * scale, 0, self.bins - 1).astype(jnp.int32)

    def _entropy_of(self, counts: Int[Array, "*g k"]) -> Float[Array, "*g"]:
        p = counts / jnp.maximum(jnp.sum(counts, -1, keepdims=True), 1).astype(jnp.float32)
        return jnp.maximum(-jnp.sum(xlogy(p, p + self.eps), -1), 0.0)

    def _proxy(self, rows: "_Rows") -> Float[Array, ""]:
        """The proxy as a share of log K."""
        low = jnp.min(rows.low, where=rows.counted, initial=jnp.inf)
        high = jnp.max(rows.high, where=rows.counted, initial=-jnp.inf)
        power = _power(jnp.maximum(-low, high))
        y, eps = rows.x * power, self.eps * power
        if self.kind == "cheap":
            rms = jnp.sqrt(_mean(y * y, rows.counted))
            return jnp.clip(_mean(jnp.abs(y), rows.counted) / jnp.maximum(rms + eps, _SMALLEST_SPAN), 0, 1)
        centred = jnp.where(low < high, y - _mean(y, rows.counted), 0.0)  # equal values: exactly 0
        std = jnp.sqrt(_mean(centred * centred, rows.counted))
        if self.kind == "variance":
            size = _mean(jnp.abs(y), rows.counted)
            return jnp.clip(std / jnp.maximum(size + std + eps, _SMALLEST_SPAN), 0, 1)
        excess = _mean((centred / jnp.maximum(std, _SMALLEST_SPAN)) ** 4, rows.counted) - 3
        return -jnp.expm1(-jnp.maximum(excess, 0) / 8)

    def numpy(self, u: Any, lengths: Any = None) -> float:
        """The same statistic of host arrays, without JAX; within 1e-5 of `__call__` on a CPU.

        Args:
            u: (..., length, channels) of any floating dtype.
            lengths: u's leading axes, or None.

        Raises:
            ValueError: as `__call__`.
        """
        _check(u, lengths)
        x = np.asarray(u)[..., :: self._step, :].astype(np.float32)
        counted = np.isfinite(x).all(-1)
        if lengths is not None:
            counted &= np.arange(0, u.shape[-2], self._step) < np.asarray(lengths)[..., None]
        x = x[counted]
        if x.size == 0:
            return 0.0
        if self.kind == "token":
            nats = sum(map(self._numpy_entropy, x)) / len(x)
        elif self.kind in ("histogram", "sampled"):
            nats = self._numpy_entropy(x.ravel())
        else:
            return self._numpy_proxy(x.ravel().astype(np.float64)) * self.maximum
        return nats * self.maximum / math.log(self.bins)

    def _numpy_entropy(self, x: np.ndarray) -> float:
        half, low, high = np.float32(0.5), x.min(), x.max()
        if self.range == "robust":
            mean = x.mean(dtype=np.float64)
            width = ROBUST_DEVIATIONS * np.abs(x - mean).mean()
            low, high = np.float32(max(low, mean - width)), np.float32(min(high, mean + width))
        span = half * high - half * low
        if not span > _SMALLEST_SPAN:
            return 0.0
        bins = np.clip((half * x - half * low) * (np.float32(self.bins) / span), 0, self.bins - 1).astype(np.int64)
        p = np.bincount(bins) / x.size
        p = p[p > 0]
        return max(-float(np.sum(p * np.log(p + self.eps))), 0.0)

    def _numpy_proxy(self, x: np.ndarray) -> float:
        size, std = np.abs(x).mean(), x.std()
        if self.kind == "cheap":
            rms = math.sqrt(np.mean(x * x))
            return float(np.clip(size / max(rms + self.eps, _SMALLEST_SPAN), 0, 1))
        if self.kind == "variance":
            return float(std / max(size + std + self.eps, _SMALLEST_SPAN))
        excess = np.mean(((x - x.mean()) / max(std, _SMALLEST_SPAN)) ** 4) - 3
        return -math.expm1(-max(excess, 0) / 8)


def ema(previous: T | None, value: T, decay: float = 0.85) -> T:
    """Exponential moving average (COREY, Eq. 3): `decay` of the average so far, the rest of the new value.

    Args:
        previous: the average so far, a number or an array; None before the first value.
        value: the new value.
        decay: share of what was, at least 0 and below 1.

    Raises:
        ValueError: if decay is outside.
    """
    if not 0 <= decay < 1:
        raise ValueError(f"decay: got {decay}, wanted at least 0 and below 1")
    past: Any = previous
    new: Any = value
    return value if previous is None else decay * past + (1 - decay) * new


def every_kth_layer(n_layer: int, k: int) -> tuple[int, ...]:
    """For each layer the one whose statistic it uses: 0, k, 2k, ... measure, the layers after them reuse.

    Raises:
        ValueError: if n_layer is negative or k below 1.
    """
    if n_layer < 0:
        raise ValueError(f"n_layer: got {n_layer}, wanted at least 0")
    if k < 1:
        raise ValueError(f"k: got {k}, wanted at least 1")
    return tuple(layer // k * k for layer in range(n_layer))


def variance(u: Float[Array, "*b l d"], lengths: Int[Array, "*b"] | None = None) -> Float[Array, ""]:
    """Population variance of all values as a float32 scalar: the feature of learned tables.

    Positions count as in `Estimator`; 0 where none does, infinite where float32 does not reach.

    Args:
        u: activations of any floating dtype.
        lengths: positions that count, from the left; None counts all.

    Raises:
        ValueError: as `Estimator.__call__`.
    """
    _check(u, lengths)
    x = jnp.asarray(u).astype(jnp.float32)
    if x.size == 0:
        return jnp.float32(0)
    counted = _rows(x, lengths).counted
    return _mean((x - _mean(x, counted)) ** 2, counted)


class _Rows(NamedTuple):
    """Values with the smallest and largest of each position, and which positions count."""

    x: Float[Array, "*b l d"]
    low: Float[Array, "*b l"]
    high: Float[Array, "*b l"]
    counted: Bool[Array, "*b l"]


def _rows(x: Float[Array, "*b l d"], lengths: Int[Array, "*b"] | None, step: int = 1) -> _Rows:
    low, high = jnp.min(x, -1), jnp.max(x, -1)
    counted = jnp.all(jnp.isfinite(x), -1)  # XLA's minimum on a CPU is not always NaN where a value is
    if lengths is not None:
        counted &= jnp.arange(x.shape[-2]) * step < jnp.asarray(lengths)[..., None]
    return _Rows(x, low, high, counted)


def _mean(x: Float[Array, "*b l d"], counted: Bool[Array, "*b l"]) -> Float[Array, ""]:
    """Mean over the positions that count; 0 where none does."""
    total = jnp.sum(jnp.mean(x, -1), where=counted)
    return total / jnp.maximum(jnp.sum(counted), 1)


def _power(largest: Array) -> Array:
    """A power of two that brings values of this size to where neither their squares nor sums of these overflow."""
    return jnp.where(largest > 2.0**50, 2.0**-78, jnp.where(largest < 2.0**-50, 2.0**76, 1.0)).astype(jnp.float32)


def _count(bins: Int[Array, "..."], length: int) -> Int[Array, " length"]:
    return jnp.zeros(length, jnp.int32).at[bins.ravel()].add(1, mode="promise_in_bounds")


def _check(u: Any, lengths: Any) -> None:
    if len(u.shape) < 2:
        raise ValueError(f"u: got shape {tuple(u.shape)}, wanted (..., length, channels)")
    if not jnp.issubdtype(u.dtype, jnp.floating):
        raise ValueError(f"u: got dtype {u.dtype}, wanted a floating one")
    if math.prod(u.shape) >= 2**31:
        raise ValueError(f"u: got {math.prod(u.shape)} values, wanted fewer than 2**31")  # counts are int32
    if lengths is not None and np.shape(lengths) != tuple(u.shape[:-2]):
        raise ValueError(f"lengths: got shape {np.shape(lengths)}, wanted u's leading axes {tuple(u.shape[:-2])}")


@dataclasses.dataclass(frozen=True)
class Watch:
    """What a program computes of the activations that pass through it.

    Attributes:
        estimator: of which statistic.
        every: looks at every `every`-th layer, from the first on.
        with_variance: also the variance; else a zero stands in its place.
    """

    estimator: Estimator
    every: int = 4
    with_variance: bool = False

    def __call__(self, u: Float[Array, "*b l d"], lengths: Int[Array, "*b"] | None = None) -> Float[Array, "2"]:
        """The statistic and the variance of one layer's activations; as `Estimator.__call__`."""
        second = variance(u, lengths) if self.with_variance else jnp.float32(0)
        return jnp.stack([self.estimator(u, lengths), second])
