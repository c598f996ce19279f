"""Hadamard rotation and what it does to the entropy of a histogram: the transform, the theorem's premise, its failure.

The COREY paper rotates activations with the normalised Walsh-Hadamard matrix, z = H x, and argues (its Theorem 2,
stated again as 3) that entropy grows: if the histograms before and after obey q = B p with a doubly stochastic B, then
-sum q ln q >= -sum p ln p. By Hardy, Littlewood and Polya such a B exists exactly when p majorizes q, which sorting
both decides (`majorizes`); the paper recommends that test and fits a B instead (`sinkhorn_fit`).

Both statements need *one* set of bins. The paper's entropies take each tensor's own range, and then a change of range
alone moves them: a rotation that spreads an outlier narrows the range and "gains", one that collects a mean mu in a
single coordinate, sqrt(d) mu, widens it and "loses". `entropy_gain` measures that; `shared_masses` gives histograms
over common bins, to which the theorem applies.
"""

import dataclasses
import functools
import math

import numpy as np


def hadamard(x: np.ndarray) -> np.ndarray:
    """Rotate the last axis by H / sqrt(d): orthonormal, symmetric, its own inverse.

    H is symmetric, so a projection's weight (out, in) absorbs the rotation as `hadamard(weight)`:
    `hadamard(x) @ hadamard(weight).T == x @ weight.T` (exactly so in real numbers, also with padding).

    Args:
        x: (..., n) numbers; n is padded with zeros to the next power of two d.

    Returns:
        (..., d) float64. Norms are kept, so the mean square falls by n / d; and |z| <= sum |x| / sqrt(d) (Theorem 4).

    Raises:
        ValueError: if x is a scalar or its last axis is empty.
    """
    x = np.asarray(x, np.float64)
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ValueError(f"x: got shape {x.shape}, wanted a last axis of at least 1")
    n = x.shape[-1]
    d = 1 << (n - 1).bit_length()
    z = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, d - n)])
    width = 1
    while width < d:
        pairs = z.reshape(*x.shape[:-1], d // (2 * width), 2, width)
        left, right = pairs[..., 0, :], pairs[..., 1, :]
        z = np.stack([left + right, left - right], axis=-2).reshape(*x.shape[:-1], d)
        width *= 2
    return z / math.sqrt(d)


def shannon(masses: np.ndarray) -> float:
    """-sum p ln p in nats; empty bins add nothing.

    The paper's Eq. 1 has ln(p + 1e-12), which changes the result by less than 1e-10.
    """
    present = masses[masses > 0]
    return float(-(present * np.log(present)).sum())


def own_masses(values: np.ndarray, bins: int = 64, margin: float = 0.0) -> np.ndarray:
    """Histogram over the values' own range, widened on each side by `margin` times its width.

    With a margin of 0.05, as in the paper's prototype, a uniform tensor reaches about ln(bins / 1.1), not ln(bins).

    Returns:
        (bins,) shares that sum to 1.

    Raises:
        ValueError: if values is empty or holds NaN or infinity, bins is below 1, or margin is negative.
    """
    _check_values("values", values)
    return _masses(values, bins, _range(bins, margin, values))


def shared_masses(
    before: np.ndarray, after: np.ndarray, bins: int = 64, margin: float = 0.05
) -> tuple[np.ndarray, np.ndarray]:
    """Histograms p and q of two tensors over common bins, which span both.

    Returns:
        Two (bins,) arrays of shares that sum to 1.

    Raises:
        ValueError: if a tensor is empty or holds NaN or infinity, bins is below 1, or margin is negative.
    """
    _check_values("before", before)
    _check_values("after", after)
    span = _range(bins, margin, before, after)
    return _masses(before, bins, span), _masses(after, bins, span)


def entropy_gain(before: np.ndarray, after: np.ndarray, bins: int = 64, margin: float = 0.0) -> float:
    """Entropy of `after` less that of `before` in nats, each over its own range: the paper's measure.

    Raises:
        ValueError: as `own_masses`.
    """
    return shannon(own_masses(after, bins, margin)) - shannon(own_masses(before, bins, margin))


def majorizes(p: np.ndarray, q: np.ndarray, tolerance: float = 1e-12) -> bool:
    """Whether q = B p for some doubly stochastic B: no prefix of q, sorted downwards, outweighs p's (appendix C.1).

    True means that Theorem 3 applies and q has at least p's entropy. False means that no such B exists, so that the
    theorem says nothing about the pair, whichever entropy is greater.

    Args:
        p: (m,) shares before.
        q: (m,) shares after.
        tolerance: by which prefix sums may be exceeded, for rounding.

    Raises:
        ValueError: if the shapes differ, or either is not a distribution.
    """
    _check_masses("p", p)
    _check_masses("q", q)
    if p.shape != q.shape:
        raise ValueError(f"q: got shape {q.shape}, wanted p's {p.shape}")
    prefix_p, prefix_q = (np.cumsum(np.sort(x)[::-1]) for x in (p, q))
    return bool((prefix_q <= prefix_p + tolerance).all())


@dataclasses.dataclass(frozen=True)
class SinkhornFit:
    """How far B p is from q: residuals, the chosen kernel's squared width in bins, and the error of B's row sums."""

    l1: float
    l2: float
    width2: float
    row_error: float


# Squared widths among which the paper's fit chooses, in units of a bin's squared width.
SINKHORN_WIDTHS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)


def sinkhorn_fit(p: np.ndarray, q: np.ndarray) -> SinkhornFit:
    """The paper's proxy for `majorizes`: the least |q - B p|_1 among seven fixed Gaussian blurs made doubly stochastic.

    A small residual is no evidence of mixing: compare it with |q - p|_1, the residual of B = identity, of which the
    narrowest blur is an approximation.

    Args:
        p: (m,) shares before, over bins of equal width, m at least 2.
        q: (m,) shares after, over the same bins.

    Raises:
        ValueError: if the shapes differ, or either is not a distribution.
    """
    _check_masses("p", p)
    _check_masses("q", q)
    if p.shape != q.shape:
        raise ValueError(f"q: got shape {q.shape}, wanted p's {p.shape}")
    fits = []
    for width2 in SINKHORN_WIDTHS:
        blur = _doubly_stochastic_blur(len(p), width2)
        residual = q - blur @ p
        row_error = float(np.abs(blur.sum(1) - 1).max())
        fits.append(SinkhornFit(float(np.abs(residual).sum()), float(np.linalg.norm(residual)), width2, row_error))
    return min(fits, key=lambda fit: fit.l1)


@functools.lru_cache(maxsize=64)
def _doubly_stochastic_blur(bins: int, width2: float) -> np.ndarray:
    centres = np.arange(bins)
    blur = np.maximum(np.exp(-((centres[:, None] - centres) ** 2) / width2), 1e-12)
    for _ in range(200):
        blur /= blur.sum(1, keepdims=True)
        blur /= blur.sum(0, keepdims=True)
    blur.flags.writeable = False
    return blur


def _range(bins: int, margin: float, *tensors: np.ndarray) -> tuple[float, float]:
    if bins < 1:
        raise ValueError(f"bins: got {bins}, wanted at least 1")
    if not margin >= 0:
        raise ValueError(f"margin: got {margin}, wanted at least 0")
    low = min(float(x.min()) for x in tensors)
    high = max(float(x.max()) for x in tensors)
    # A constant tensor gets a range of width 1 around it, so that it falls into one bin.
    edge = margin * (high - low) if high > low else 0.5
    return low - edge, high + edge


def _masses(values: np.ndarray, bins: int, span: tuple[float, float]) -> np.ndarray:
    counts, _ = np.histogram(values, bins, span)
    return counts / values.size


def _check_values(name: str, values: np.ndarray) -> None:
    if values.size == 0:
        raise ValueError(f"{name}: got no values, wanted at least one")
    if not np.isfinite(values).all():
        raise ValueError(f"{name}: got NaN or infinity, wanted finite values")


def _check_masses(name: str, masses: np.ndarray) -> None:
    if masses.ndim != 1 or masses.size == 0 or (masses < 0).any() or not math.isclose(masses.sum(), 1, abs_tol=1e-9):
        raise ValueError(f"{name}: got shape {masses.shape} and sum {masses.sum()}, wanted (m,) shares that sum to 1")
