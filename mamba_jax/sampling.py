"""The next token from logits: filters, then the Gumbel-max draw, row by row.

For one row with logits x, in the order transformers applies them:

    repetition penalty r   x_i <- x_i / r if x_i > 0 else x_i * r, for ids i that the row has seen
    temperature T          x_i <- x_i / T; T = 0 takes the largest x_i and ends here
    top_k                  keep the k largest x_i
    top_p                  keep x_i if the kept tokens above it hold less than top_p of the kept probability
    min_p                  keep x_i if its probability is at least min_p times the largest
    token                  argmax of x_i - log E_i over what is kept, E_i ~ Exp(1)

Tokens that tie at a threshold are all kept. Thresholds are found without sorting: `_threshold` halves the range of
float32 values 32 times, so the same static control flow runs on every backend.

A row's token depends on its own logits, settings, key and step alone, whatever the batch around it is.
"""

import math
from collections.abc import Callable, Sequence, Set
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32, UInt32

from mamba_jax.arguments import as_array, as_integer, as_integers, as_number, is_integer

_PART = 256  # logits that the CPU's argmax looks at together
_MAX, _TINY = float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny)


@struct.dataclass
class Sampler:
    """How to sample, one entry a row; shapes do not depend on which settings are used, so programs do not either."""

    temperature: Float32[Array, "b"]  # 0: greedy
    top_k: Int32[Array, "b"]  # 0: off
    top_p: Float32[Array, "b"]  # 1: off
    min_p: Float32[Array, "b"]  # 0: off
    repetition_penalty: Float32[Array, "b"]  # 1: off

    @classmethod
    def of(
        cls,
        batch: int,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float = 1.0,
    ) -> "Sampler":
        """The same settings for every row of a batch.

        Args:
            batch: rows.
            temperature: 0 for greedy, else what logits are divided by.
            top_k: keep this many of the likeliest tokens; None for all.
            top_p: keep the likeliest tokens that together reach this probability; None for all.
            min_p: keep tokens at least this fraction as likely as the likeliest; None for all.
            repetition_penalty: above 1 makes tokens seen before less likely, below 1 likelier.

        Raises:
            ValueError: if a setting is out of its range; the message names it.
        """
        if top_k is not None:
            top_k = as_integer("top_k", top_k, 1)

        def rows(name: str, value: float, accept: Callable[[float], bool], wanted: str) -> Array:
            number = as_number(name, value, accept, wanted)
            nearest = min(max(number, _TINY), _MAX) if number else 0.0  # of float32, without an overflow
            return cast(Array, np.full((batch,), nearest, np.float32))  # programs take either

        return cls(
            temperature=rows("temperature", temperature, lambda t: 0 <= t < math.inf, "a finite number of at least 0"),
            top_k=cast(Array, np.full((batch,), min(top_k or 0, 2**31 - 1), np.int32)),
            top_p=rows(
                "top_p", 1.0 if top_p is None else top_p, lambda p: 0 < p <= 1, "above 0 and at most 1, or None"
            ),
            min_p=rows("min_p", 0.0 if min_p is None else min_p, lambda p: 0 <= p <= 1, "from 0 to 1, or None"),
            repetition_penalty=rows(
                "repetition_penalty", repetition_penalty, lambda r: 0 < r < math.inf, "a finite number above 0"
            ),
        )


def row_keys(seed: int | Sequence[int], batch: int) -> np.ndarray:
    """Data of threefry keys, one a row, whatever jax_default_prng_impl and jax_enable_x64 say.

    Args:
        seed: one seed for all rows (rows with the same prompt then draw the same tokens), or one a row.
        batch: rows.

    Returns:
        (batch, 2) uint32.

    Raises:
        ValueError: if a seed is no integer from 0 to 2**64 - 1, or there is not one a row.
    """
    seeds = [int(as_array(seed))] * batch if is_integer(seed) else as_integers(seed)
    if seeds is None or isinstance(seed, Set) or not all(0 <= item < 2**64 for item in seeds):
        raise ValueError(f"seed: got {seed!r:.80}, wanted an integer from 0 to 2**64 - 1, or a list with one a row")
    if len(seeds) != batch:
        raise ValueError(f"seed: got {len(seeds)} seeds for {batch} rows, wanted one, or one a row")
    return np.array([[item >> 32, item & 0xFFFFFFFF] for item in seeds], np.uint32).reshape(batch, 2)


def sample(
    logits: Float[Array, "b v"],
    keys: UInt32[Array, "b 2"],
    step: Int32[Array, "..."] | int,
    sampler: Sampler,
    seen: Bool[Array, "b v"],
) -> Int32[Array, "b"]:
    """Choose one token a row.

    An id with logit -inf or NaN is never chosen, so the padding of a vocabulary is masked with -inf before. +inf counts
    as the largest float32.

    Args:
        logits: (b, v), any float dtype; computed in float32.
        keys: (b, 2) uint32, as `row_keys` makes them; never split, so the same ones serve every step.
        step: number of the draw, one for all rows or (b,).
        sampler: settings of each row.
        seen: (b, v), the ids that the repetition penalty applies to.

    Returns:
        (b,) int32. Where a row has nothing to choose, all its logits being -inf or NaN, it is 0, whose log-probability
        is then no finite number either.
    """
    x = _penalised(logits, sampler.repetition_penalty, seen)
    greedy = most_likely(x)
    sampled = sampler.temperature > 0
    filtered = (sampler.top_k > 0) | (sampler.top_p < 1) | (sampler.min_p > 0)

    def draw(scaled: Float32[Array, "b v"]) -> Int32[Array, "b"]:
        token = most_likely(scaled + _gumbel(keys, step, scaled.shape))
        return jnp.where(sampled, token, greedy)

    # At run time only what some row asks for is computed; a row gets the same token from each branch that serves it.
    branch = jnp.any(sampled).astype(jnp.int32) + jnp.any(sampled & filtered).astype(jnp.int32)
    return lax.switch(
        branch,
        (
            lambda: greedy,
            lambda: draw(_scale(x, sampler.temperature)),
            lambda: draw(_filter(_scale(x, sampler.temperature), sampler)),
        ),
    )


def most_likely(logits: Float[Array, "b v"]) -> Int32[Array, "b"]:
    """`argmax` of each row: the first of the largest entries; some index where there is a NaN."""
    return lax.platform_dependent(logits, cpu=_argmax_of_parts, default=_argmax)


def choose_greedily(
    logits: Float[Array, "b v"], valid_vocab: Int32[Array, ""]
) -> tuple[Int32[Array, "b"], Float32[Array, "b"]]:
    """The most likely id below `valid_vocab`, and the log-sum-exp over all ids, of each row."""
    return lax.platform_dependent(logits, valid_vocab, cuda=_choose_in_one_pass, default=_choose_in_passes)


def _choose_in_passes(logits: Array, valid_vocab: Array) -> tuple[Array, Array]:
    valid = jnp.arange(logits.shape[1]) < valid_vocab
    return most_likely(jnp.where(valid, logits, -jnp.inf)), jax.nn.logsumexp(logits, axis=-1)


def _choose_in_one_pass(logits: Array, valid_vocab: Array) -> tuple[Array, Array]:
    """One reduction instead of three, each of which would cost a GPU two kernels as short as their launch."""
    ids = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    largest = jnp.where(ids < valid_vocab, logits, -jnp.inf)

    def merge(a: tuple[Array, ...], b: tuple[Array, ...]) -> tuple[Array, ...]:
        (x, i, m, total), (other_x, other_i, other_m, other_total) = a, b
        first = (x > other_x) | ((x == other_x) & (i < other_i)) | jnp.isnan(x)
        top = jnp.maximum(m, other_m)
        parts = [jnp.where(mine == top, t, t * jnp.exp(mine - top)) for mine, t in ((m, total), (other_m, other_total))]
        return jnp.where(first, x, other_x), jnp.where(first, i, other_i), top, parts[0] + parts[1]

    operands = (largest, ids, logits, jnp.ones_like(logits))
    nothing = (jnp.float32(-jnp.inf), jnp.int32(logits.shape[1]), jnp.float32(-jnp.inf), jnp.float32(0.0))
    _, chosen, top, total = lax.reduce(operands, nothing, merge, (1,))
    return chosen, top + jnp.log(total)


def _argmax(x: Float[Array, "b v"]) -> Int32[Array, "b"]:
    return jnp.argmax(x, axis=-1).astype(jnp.int32)


def _argmax_of_parts(x: Float[Array, "b v"]) -> Int32[Array, "b"]:
    """The CPU's form: XLA makes vector code of a maximum, not of an argmax, so that only looks into one part a row."""
    batch, size = x.shape
    parts = jnp.pad(x, ((0, 0), (0, -size % _PART)), constant_values=-jnp.inf).reshape(batch, -1, _PART)
    part = _argmax(parts.max(-1))
    inside = _argmax(jnp.take_along_axis(parts, part[:, None, None], axis=1)[:, 0])
    return part * _PART + inside


def _penalised(
    logits: Float[Array, "b v"], penalty: Float32[Array, "b"], seen: Bool[Array, "b v"]
) -> Float32[Array, "b v"]:
    """Logits after the repetition penalty, finite or -inf."""
    x, penalty = logits.astype(jnp.float32), penalty[:, None]
    x = jnp.where(seen, jnp.where(x > 0, x / penalty, x * penalty), x)
    return jnp.where(jnp.isnan(x), -jnp.inf, jnp.minimum(x, _MAX))


def _scale(x: Float32[Array, "b v"], temperature: Float32[Array, "b"]) -> Float32[Array, "b v"]:
    """Divide by the temperature, the largest of each row being moved to 0 first: nothing can overflow upwards."""
    top = x.max(-1, keepdims=True)
    temperature = jnp.where(temperature > 0, temperature, 1.0)[:, None]
    return jnp.where(x > -jnp.inf, (x - top) / temperature, x)  # -inf over an infinite temperature would be NaN


def _filter(x: Float32[Array, "b v"], sampler: Sampler) -> Float32[Array, "b v"]:
    """Set what top_k, top_p and min_p drop to -inf; the largest x of each row is 0 and always kept."""
    image = _ordered(x)
    k = jnp.where(sampler.top_k > 0, sampler.top_k, x.shape[-1])
    kept = image >= _threshold(image, jnp.ones(x.shape, jnp.int32), k)[:, None]

    weight = jnp.where(kept, jnp.exp(x), 0.0)
    # A top_p that rounds to nothing still asks for the likeliest token.
    nucleus = _threshold(image, weight, jnp.maximum(sampler.top_p * weight.sum(-1), _TINY))
    # The weights' sum is rounded, so only this makes top_p = 1 keep every token.
    kept &= (image >= nucleus[:, None]) | (sampler.top_p >= 1)[:, None]
    kept &= weight >= sampler.min_p[:, None]
    return jnp.where(kept, x, -jnp.inf)


def _ordered(x: Float32[Array, "b v"]) -> UInt32[Array, "b v"]:
    """Integers in the order of the floats: the sign bit is flipped, and the other bits too below zero."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)  # -0.0 is 0.0
    return jnp.where(bits >> 31, ~bits, bits | jnp.uint32(1 << 31))


def _threshold(image: UInt32[Array, "b v"], weight: Array, target: Array) -> UInt32[Array, "b"]:
    """The largest t for which the weights of all image >= t sum to at least the target; 0 if none does.

    The sum falls as t rises, so t is found bit by bit from the top.
    """

    def fix_bit(i: Int32[Array, ""], low: UInt32[Array, "b"]) -> UInt32[Array, "b"]:
        t = low | (jnp.uint32(1 << 31) >> jnp.uint32(i))
        total = jnp.where(image >= t[:, None], weight, 0).sum(-1)
        return jnp.where(total >= target, t, low)

    return lax.fori_loop(0, 32, fix_bit, jnp.zeros(image.shape[0], jnp.uint32))


def _gumbel(
    keys: UInt32[Array, "b 2"], step: Int32[Array, "..."] | int, shape: tuple[int, ...]
) -> Float32[Array, "b v"]:
    """Gumbel noise -log E, E ~ Exp(1), each row from its own key and step.

    E = -log(1 - u) keeps the precision of small u, which are the large noises that unlikely tokens win with. u is
    kept below 1, where E would be infinite.
    """
    typed = jax.random.wrap_key_data(keys, impl="threefry2x32")
    rows = jax.vmap(jax.random.fold_in)(typed, jnp.broadcast_to(jnp.asarray(step, jnp.int32), shape[:1]))
    bits = jax.vmap(lambda key: jax.random.bits(key, shape[1:], jnp.uint32))(rows)
    u = jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return -jnp.log(-jnp.log1p(-u))
