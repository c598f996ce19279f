"""Which neighbours of an operator chain to fuse: the planner of the COREY paper, as a tool for analysis.

The paper ("Entropy-Guided Runtime Chunk Scheduling for Selective Scan Kernels") partitions a chain of operators into
contiguous regions. Its appendix B.1 prints one objective,

    maximise over partitions  sum_R U(R),   U(R) = alpha H(R) + beta AI(R) - gamma M(R)
    such that every region has  registers <= R_max, shared memory <= S_max, occupancy >= O_min            (Eq. 4)

with H(R) the entropy of the tensor that enters R's first operator, AI and M sums over its operators, and solves it by
dynamic programming (Algorithm 1). All its figures come from something else: a greedy solver that extends a region while
a *score* exceeds a threshold. Both are here, since they disagree:

* AI and M are additive, so they are the same for every partition, while H is counted once a region. With nothing to
  pay for a region the optimum is therefore every operator on its own. `optimal_plan` takes the missing launch cost c;
  with it, and away from the limits, the optimum cuts before exactly those operators whose alpha H exceeds c. By the
  printed objective high entropy argues against fusing, the opposite of what the paper wants.
* The score normalises each signal within the chain, discounts sums by depth and adds a bonus for depth. It is no sum
  over regions, so the greedy solver does not approximate the printed optimum.

XLA decides what the engine's own programs fuse; nothing in the engine calls this module.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence


@dataclasses.dataclass(frozen=True)
class Operator:
    """One operator of a chain.

    `entropy` is that of the tensor entering it (nats, bits or a share of the ceiling: one unit within a chain),
    `arithmetic_intensity` and `memory_traffic` are in units of the caller's cost model. The rest is what a block of
    threads running it needs, in the units of `Limits`; `occupancy` is the share of a processor's threads it keeps busy.
    """

    name: str
    entropy: float
    arithmetic_intensity: float
    memory_traffic: float
    registers: int
    shared_memory: int
    occupancy: float


Region = tuple[Operator, ...]
Plan = tuple[Region, ...]


@dataclasses.dataclass(frozen=True)
class Limits:
    """What one fused region may use: at most so many registers and so much shared memory, at least that occupancy."""

    registers: int
    shared_memory: int
    occupancy: float

    def admit(self, region: Sequence[Operator]) -> bool:
        """Whether a region fits (Eq. 4): registers and shared memory add up, the least occupancy counts.

        The sum over shared memory is the form of Theorem 1 for operators of unequal cost (appendix C.2).
        """
        return (
            sum(op.registers for op in region) <= self.registers
            and sum(op.shared_memory for op in region) <= self.shared_memory
            and min(op.occupancy for op in region) >= self.occupancy
        )


@dataclasses.dataclass(frozen=True)
class Weights:
    """Weights of entropy, arithmetic intensity and memory traffic (Table 10)."""

    alpha: float = 0.45
    beta: float = 0.35
    gamma: float = 0.20


PAPER_WEIGHTS = Weights()


def utility(region: Sequence[Operator], weights: Weights = PAPER_WEIGHTS) -> float:
    """U(R) of appendix B.1, in the units of its inputs."""
    intensity = sum(op.arithmetic_intensity for op in region)
    traffic = sum(op.memory_traffic for op in region)
    return weights.alpha * region[0].entropy + weights.beta * intensity - weights.gamma * traffic


def chain_score(chain: Sequence[Operator], weights: Weights = PAPER_WEIGHTS) -> Callable[[Region], float]:
    """The score by which the paper's figures were made, for regions of one chain.

    For a region of d operators, n(.) mapping the least and greatest value of a single operator of the chain to 0 and 1
    (clipped; 0.5 where they are equal):

        alpha n(mean entropy) + beta n(sum AI / d^0.5) - gamma n(sum M / d^1.15) + min(0.18 (d - 1), 0.36)

    The paper prints neither the powers of d nor the last term; they are those of its published prototype.

    Args:
        chain: the operators whose extremes normalise the signals; not empty.
        weights: of the three signals.

    Returns:
        A function from a region to its score, about -0.2 to 1.2.

    Raises:
        ValueError: if the chain is empty.
    """
    _check_not_empty(chain)
    entropy = _normaliser([op.entropy for op in chain])
    intensity = _normaliser([op.arithmetic_intensity for op in chain])
    traffic = _normaliser([op.memory_traffic for op in chain])

    def score(region: Region) -> float:
        depth = len(region)
        return (
            weights.alpha * entropy(sum(op.entropy for op in region) / depth)
            + weights.beta * intensity(sum(op.arithmetic_intensity for op in region) / depth**0.5)
            - weights.gamma * traffic(sum(op.memory_traffic for op in region) / depth**1.15)
            + min(0.18 * (depth - 1), 0.36)
        )

    return score


def unfused_plan(chain: Sequence[Operator]) -> Plan:
    """Every operator on its own, whatever it needs."""
    return tuple((op,) for op in chain)


def static_plan(chain: Sequence[Operator], limits: Limits, size: int = 3) -> Plan:
    """Blocks of `size` operators from the left; a block over the limits gives its last operators to the next one.

    Args:
        chain: operators in order; not empty.
        limits: of a region.
        size: operators in a block (Table 10: 3).

    Raises:
        ValueError: if the chain is empty, size is below 1, or an operator alone exceeds the limits.
    """
    _check_solvable(chain, limits)
    if size < 1:
        raise ValueError(f"size: got {size}, wanted at least 1")
    plan: list[Region] = []
    start = 0
    while start < len(chain):
        region = tuple(chain[start : start + size])
        while not limits.admit(region):
            region = region[:-1]
        plan.append(region)
        start += len(region)
    return tuple(plan)


def greedy_plan(
    chain: Sequence[Operator], limits: Limits, score: Callable[[Region], float], threshold: float = 0.52
) -> Plan:
    """The paper's runtime solver: extend a region while its score exceeds the threshold and it fits.

    An operator that may not join starts the next region, whatever its own score is.

    Args:
        chain: operators in order; not empty.
        limits: of a region.
        score: of a region, such as `chain_score(chain)`.
        threshold: tau; 0.52 in Table 10, 0.5 for Table 33.

    Raises:
        ValueError: if the chain is empty or an operator alone exceeds the limits.
    """
    _check_solvable(chain, limits)
    plan: list[Region] = [(chain[0],)]
    for op in chain[1:]:
        longer = (*plan[-1], op)
        if score(longer) > threshold and limits.admit(longer):
            plan[-1] = longer
        else:
            plan.append((op,))
    return tuple(plan)


def optimal_plan(
    chain: Sequence[Operator], limits: Limits, value: Callable[[Region], float], launch_cost: float = 0.0
) -> Plan:
    """The partition with the greatest sum of `value(region) - launch_cost` (Algorithm 1, with the cost of a launch).

    Quadratic in the length of the chain, in calls of `value`. Of equal partitions one with longer regions wins.

    Args:
        chain: operators in order; not empty.
        limits: of a region.
        value: of a region: `utility`, a score, or minus the latency by a cost model.
        launch_cost: charged for each region, in the unit of `value`. With `utility` and no launch cost the answer is
            always `unfused_plan` where entropies are positive.

    Raises:
        ValueError: if the chain is empty or an operator alone exceeds the limits.
    """
    _check_solvable(chain, limits)
    best = [0.0]  # best[i]: of the first i operators
    start = [0]  # start[i]: where their last region begins
    for end in range(1, len(chain) + 1):
        options = [
            (best[begin] + value(region) - launch_cost, -begin)
            for begin in range(end)
            if limits.admit(region := tuple(chain[begin:end]))
        ]
        total, begin = max(options)
        best.append(total)
        start.append(-begin)
    plan: list[Region] = []
    end = len(chain)
    while end:
        plan.append(tuple(chain[start[end] : end]))
        end = start[end]
    return tuple(reversed(plan))


def max_depth(shared_memory: float, per_operator: float) -> int:
    """Operators that fit in one region when each adds the same shared memory: F <= M / C (Theorem 1).

    Args:
        shared_memory: M, of a block of threads, not negative.
        per_operator: C, added by each operator, in the same unit, positive.

    Raises:
        ValueError: if an argument is out of its range.
    """
    if not shared_memory >= 0:
        raise ValueError(f"shared_memory: got {shared_memory}, wanted at least 0")
    if not per_operator > 0:
        raise ValueError(f"per_operator: got {per_operator}, wanted more than 0")
    return math.floor(shared_memory / per_operator)


def adaptive_threshold(entropy: float, bins: int, base: float, responsiveness: float) -> float:
    """tau_t = tau_0 + rho (H - H_min) / (H_max - H_min) with H_min = 0 and H_max = ln(bins) (appendix B.3).

    Args:
        entropy: H, in nats, from 0 to ln(bins).
        bins: of the histogram that gave it, at least 2.
        base: tau_0, in the unit of the score.
        responsiveness: rho; the paper gives no value. Positive ones fuse less where entropy is high.

    Returns:
        A threshold for `greedy_plan`.

    Raises:
        ValueError: if entropy or bins is out of its range. An entropy in bits is caught here when it exceeds the
            ceiling in nats; the paper's own tau_0 of "5.0 nats" was in bits.
    """
    if bins < 2:
        raise ValueError(f"bins: got {bins}, wanted at least 2")
    ceiling = math.log(bins)
    if not -1e-9 <= entropy <= ceiling + 1e-9:
        raise ValueError(f"entropy: got {entropy}, wanted nats between 0 and ln {bins} = {ceiling:.4f}")
    return base + responsiveness * entropy / ceiling


def _normaliser(values: Sequence[float]) -> Callable[[float], float]:
    low, high = min(values), max(values)
    if high <= low:
        return lambda value: 0.5
    return lambda value: min(max((value - low) / (high - low), 0.0), 1.0)


def _check_not_empty(chain: Sequence[Operator]) -> None:
    if not chain:
        raise ValueError("chain: got no operators, wanted at least one")


def _check_solvable(chain: Sequence[Operator], limits: Limits) -> None:
    _check_not_empty(chain)
    too_large = [op.name for op in chain if not limits.admit((op,))]
    if too_large:
        raise ValueError(f"chain: got {', '.join(too_large)}, which alone exceed the limits; wanted within {limits}")
