"""The COREY paper's Tier-1 prototype: synthetic activations, a chain of seven operators and a deterministic price list.

It measures no hardware: its "latency" is arithmetic on an operator table, and every figure of the paper's Table 11 and
Fig. 1 follows from numpy's generator and the constants below, which are those of the published prototype. For a region
of d operators with mean entropy H, traffic M and intensity AI (both sums), at L tokens:

    reuse   = clip(1 - 0.09 (d - 1) - 0.08 H + surcharge max(0, 0.62 - H) - saving max(0, gain), 0.42, 1.1)
    latency = 0.012 M reuse log2 L + 0.007 AI log2 L / speedup + launch + 0.03 max(0, d - 3) - bonus min(d - 1, 2)

Surcharge, saving, launch and bonus depend on who made the plan, not on the plan (`Prices`). Two policies are compared
by it only under the same prices.
"""

import dataclasses
import math
from collections.abc import Iterator
from types import MappingProxyType
from typing import Literal

import numpy as np

from mamba_jax.scheduler.fusion import Limits, Operator, Plan, Region
from mamba_jax.scheduler.hadamard import hadamard, own_masses, shannon, shared_masses

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
BUCKETS = MappingProxyType(
    {"short": LENGTHS[:2], "medium": LENGTHS[2:4], "long": LENGTHS[4:6], "ultra-long": LENGTHS[6:]}
)
BINS = 64
MARGIN = 0.05  # by which a histogram's range is widened on each side
CHANNELS = 192
PROJECTION = 256
EMA_DECAY = 0.85

# Name, arithmetic intensity, memory traffic, registers, shared memory, occupancy.
OPERATORS = (
    ("input_norm", 1.6, 18.0, 20, 8, 0.94),
    ("gate_projection", 2.7, 22.0, 36, 12, 0.91),
    ("selective_scan", 4.8, 31.0, 72, 28, 0.79),
    ("state_mix", 3.9, 24.0, 54, 22, 0.83),
    ("output_projection", 3.4, 19.0, 48, 18, 0.87),
    ("activation", 1.9, 14.0, 24, 8, 0.96),
    ("residual_merge", 1.5, 12.0, 18, 6, 0.97),
)

Precision = Literal["fp16", "w8a8", "w4a8"]


@dataclasses.dataclass(frozen=True)
class Prices:
    """What the model charges a policy, besides what its plan costs anyone.

    `launch_ms` a region; `launch_bonus_ms` off that for each of the first two operators that join it; `gain_saving`
    the share of traffic spared per unit of Hadamard entropy gain; `low_entropy_surcharge` the share of traffic added
    per unit of entropy below 0.62; `over_fusion` scales the quality penalty of deep plans; `rotated` says whether the
    Hadamard rotation is credited with quality.
    """

    launch_ms: float = 0.16
    launch_bonus_ms: float = 0.0
    gain_saving: float = 0.0
    low_entropy_surcharge: float = 0.0
    over_fusion: float = 1.0
    rotated: bool = False


UNFUSED_PRICES = Prices(launch_ms=0.28, over_fusion=0.0)
STATIC_PRICES = Prices(low_entropy_surcharge=0.04)
COREY_PRICES = Prices(launch_bonus_ms=0.02, gain_saving=0.06, over_fusion=0.35, rotated=True)

_SPEEDUP: dict[Precision, float] = {"fp16": 1.0, "w8a8": 1.12, "w4a8": 1.22}
_SENSITIVITY: dict[Precision, float] = {"fp16": 0.0, "w8a8": 0.7, "w4a8": 1.3}


@dataclasses.dataclass(frozen=True, eq=False)
class Trial:
    """One draw of the prototype: its operator chain and what was measured on its activations.

    Entropies are shares of ln 64, over each tensor's own widened range. `entropy_after_ema` is the smoothed value that
    the quality proxy reads: the prototype feeds both tensors of every draw to one moving average, before then after.
    `masses` are the histograms of both tensors over common bins, `outliers` the shares of values beyond 6 standard
    deviations, `parity_error` the greatest difference that rotating inputs and weight makes to their product.
    """

    length: int
    repeat: int
    chain: tuple[Operator, ...]
    limits: Limits
    entropy_before: float
    entropy_after: float
    entropy_after_ema: float
    masses: tuple[np.ndarray, np.ndarray]
    outliers: tuple[float, float]
    parity_error: float

    @property
    def gain(self) -> float:
        """Entropy after the rotation less that before it, as a share of ln 64 (Fig. 1)."""
        return self.entropy_after - self.entropy_before


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The model's figures for one plan; `quality_penalty` is the "diagnostic proxy" of Table 11."""

    latency_ms: float
    dram_bytes_per_token: float
    quality_penalty: float
    depth: float


def prototype_trials(repeats: int = 5, seed: int = 7) -> Iterator[Trial]:
    """The prototype's draws, `repeats` of each length in `LENGTHS`, from one stream of random numbers.

    A draw is N(0, 1) + (1 + log2(L) / 20) 0.35 t_3 of shape (min(4096, max(512, L / 8)), 192), then a weight of
    N(0, 1) of shape (256, 192). The rotation pads 192 channels to 256.

    Args:
        repeats: draws a length, at least 1. Other numbers give other activations at every length but the first.
        seed: of numpy's default generator; Table 11 has 7.

    Yields:
        Trials in ascending order of length.

    Raises:
        ValueError: if repeats is below 1.
    """
    if repeats < 1:
        raise ValueError(f"repeats: got {repeats}, wanted at least 1")
    rng = np.random.default_rng(seed)
    for length in LENGTHS:
        smoothed = 0.0
        for repeat in range(repeats):
            shape = (min(4096, max(512, length // 8)), CHANNELS)
            normal = rng.normal(size=shape)
            x = normal + (1 + math.log2(length) / 20) * (0.35 * rng.standard_t(3.0, size=shape))
            weight = rng.normal(size=(PROJECTION, CHANNELS))
            z = hadamard(x)
            before, after = _entropy(x), _entropy(z)
            smoothed = before if repeat == 0 else EMA_DECAY * smoothed + (1 - EMA_DECAY) * before
            smoothed = EMA_DECAY * smoothed + (1 - EMA_DECAY) * after
            yield Trial(
                length=length,
                repeat=repeat,
                chain=_chain(x, z[:, :CHANNELS], length),
                limits=prototype_limits(length),
                entropy_before=before,
                entropy_after=after,
                entropy_after_ema=smoothed,
                masses=shared_masses(x, z, BINS, MARGIN),
                outliers=(_outliers(x), _outliers(z)),
                parity_error=float(np.abs(x @ weight.T - z @ hadamard(weight).T).max()),
            )


def prototype_limits(length: int) -> Limits:
    """Limits of a fused region at `length` tokens: longer contexts leave fewer registers and less shared memory."""
    taken = int(2 * math.log2(length))
    return Limits(registers=180 - taken, shared_memory=96 - taken, occupancy=0.72)


def region_cost(region: Region, trial: Trial, prices: Prices, precision: Precision = "fp16") -> tuple[float, float]:
    """Memory traffic after reuse (the model's unit) and latency in ms of one region."""
    depth, scale = len(region), math.log2(trial.length)
    entropy = sum(op.entropy for op in region) / depth
    reuse = 1 - 0.09 * (depth - 1) - 0.08 * entropy
    reuse += prices.low_entropy_surcharge * max(0.0, 0.62 - entropy)
    reuse -= prices.gain_saving * max(0.0, trial.gain)
    traffic = sum(op.memory_traffic for op in region) * scale * min(max(reuse, 0.42), 1.1)
    compute = sum(op.arithmetic_intensity for op in region) * scale / _SPEEDUP[precision]
    launch = prices.launch_ms + 0.03 * max(depth - 3, 0) - prices.launch_bonus_ms * min(depth - 1, 2)
    return traffic, 0.012 * traffic + 0.007 * compute + launch


def estimate(plan: Plan, trial: Trial, prices: Prices, precision: Precision = "fp16") -> Estimate:
    """The model's figures for a plan of the trial's chain, under one policy's prices.

    Args:
        plan: regions, in the chain's order.
        trial: whose chain it partitions.
        prices: of the policy that is charged.
        precision: "fp16", "w8a8" or "w4a8".

    Raises:
        ValueError: if the plan is no partition of the trial's chain.
    """
    if tuple(op for region in plan for op in region) != trial.chain:
        raise ValueError(f"plan: got {plan}, wanted a partition of the trial's chain")
    costs = [region_cost(region, trial, prices, precision) for region in plan]
    depth = len(trial.chain) / len(plan)
    penalty = _SENSITIVITY[precision] * (0.12 + 10 * trial.outliers[0])
    penalty += prices.over_fusion * max(0.0, depth - 2) * max(0.0, 0.63 - trial.entropy_after_ema)
    if prices.rotated:
        penalty -= 0.45 * max(0.0, trial.gain) + 5 * max(0.0, trial.outliers[0] - trial.outliers[1])
    return Estimate(
        latency_ms=sum(latency for _, latency in costs),
        dram_bytes_per_token=sum(traffic for traffic, _ in costs) * 1024 / trial.length,
        quality_penalty=max(0.0, penalty),
        depth=depth,
    )


@dataclasses.dataclass(frozen=True)
class Ramp:
    """A synthetic chain of Table 33: each signal starts at its first number and grows by its second per operator."""

    entropy: tuple[float, float]
    arithmetic_intensity: tuple[float, float]
    memory_traffic: tuple[float, float]
    registers: int
    shared_memory: int
    occupancy: float

    def chain(self, count: int) -> tuple[Operator, ...]:
        """Its first `count` operators.

        Raises:
            ValueError: if count is below 1.
        """
        if count < 1:
            raise ValueError(f"count: got {count}, wanted at least 1")
        return tuple(
            Operator(
                name=f"op{i}",
                entropy=self.entropy[0] + i * self.entropy[1],
                arithmetic_intensity=self.arithmetic_intensity[0] + i * self.arithmetic_intensity[1],
                memory_traffic=self.memory_traffic[0] + i * self.memory_traffic[1],
                registers=self.registers,
                shared_memory=self.shared_memory,
                occupancy=self.occupancy,
            )
            for i in range(count)
        )


# Table 33's "entropy regimes". The score normalises entropy within the chain, and a straight line normalised is the
# same straight line whatever its start and slope: the regimes differ by their other columns only.
RAMPS = MappingProxyType(
    {
        "low": Ramp((1.5, 0.05), (0.8, 0.10), (0.6, 0.04), 14, 28, 0.75),
        "mixed": Ramp((2.0, 0.10), (1.0, 0.20), (0.5, 0.05), 16, 32, 0.80),
        "high": Ramp((3.5, 0.15), (1.8, 0.25), (0.4, 0.03), 18, 36, 0.82),
    }
)
RAMP_LIMITS = Limits(registers=256, shared_memory=512, occupancy=0.5)
RAMP_THRESHOLD = 0.5
DISPATCH_MS = 3.299 / 64  # Table 17: 64 calls of the paper's static-64 harness


def scan_traffic(
    length: int, chunk: int, d_inner: int = 1024, d_state: int = 16, batch: int = 1, itemsize: int = 2
) -> int:
    """Bytes that a scan moves when each chunk is a call of its own: the "analytic HBM proxy" of appendix A.16.

    u, delta and y pass once, in the activations' type; every call also moves A, B, C (constant in time, as in the
    paper's harness), one state and D in float32. The paper gives totals, not this breakdown; it accounts for them to
    every digit.

    Args:
        length: positions.
        chunk: positions a call; the last call may have fewer.
        d_inner: channels.
        d_state: states a channel.
        batch: rows.
        itemsize: bytes of an activation.

    Raises:
        ValueError: if an argument is below 1.
    """
    sizes = {
        "length": length,
        "chunk": chunk,
        "d_inner": d_inner,
        "d_state": d_state,
        "batch": batch,
        "itemsize": itemsize,
    }
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name}: got {size}, wanted at least 1")
    calls = -(-length // chunk)
    return 3 * batch * length * d_inner * itemsize + calls * 4 * d_inner * ((3 + batch) * d_state + 1)


def _chain(x: np.ndarray, z: np.ndarray, length: int) -> tuple[Operator, ...]:
    """The seven operators; each reads the entropy of its own slice of the channels, before and after the rotation."""
    scale = 1 + math.log2(length) / 6
    slices = np.array_split(np.arange(CHANNELS), len(OPERATORS))
    return tuple(
        Operator(
            name=name,
            entropy=0.55 * _entropy(x[:, channels]) + 0.45 * _entropy(z[:, channels]),
            arithmetic_intensity=intensity * scale,
            memory_traffic=traffic * scale,
            registers=registers,
            shared_memory=shared_memory,
            occupancy=occupancy,
        )
        for channels, (name, intensity, traffic, registers, shared_memory, occupancy) in zip(
            slices, OPERATORS, strict=True
        )
    )


def _entropy(x: np.ndarray) -> float:
    return shannon(own_masses(x, BINS, MARGIN)) / math.log(BINS)


def _outliers(x: np.ndarray) -> float:
    return float(np.mean(np.abs(x) > 6 * np.std(x)))
