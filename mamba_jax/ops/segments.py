"""Positions, chunks and packed sequences: which positions are valid, and how a row is cut into chunks.

A scan sees (b, c, q): c chunks of q positions. Without per-sequence states, chunks are plain slices of the row. With
`num_segments` packed sequences the row is laid out anew so that every chunk belongs to one sequence: sequence s takes
ceil(len_s / q) chunks, so ceil(l / q) + num_segments chunks hold them all whatever their lengths. A chunk then starts
from its sequence's state and leaves it updated, and no position needs a mask against another sequence.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from mamba_jax.ops.axes import pad_axis, take_positions

# A step with this exponent wipes a float32 state: exp(-128) is 0 in float32, as is anything below it.
WIPE = -128.0


class ChunkPlan(NamedTuple):
    """How rows of l positions become chunks * q slots; the arrays are None where chunks are plain slices."""

    seqlen: int
    q: int
    chunks: int
    source: Int[Array, "b cq"] | None = None  # position that each slot holds; l where it holds none
    segment: Int[Array, "b c"] | None = None  # sequence of each chunk
    home: Int[Array, "b l"] | None = None  # slot of each position; chunks * q for padding

    def lay(self, x: Shaped[Array, "b l *rest"]) -> Shaped[Array, "b cq *rest"]:
        """Put positions into slots, zeros into empty ones: their dt = 0 makes them do nothing."""
        return pad_axis(x, 1, self.chunks * self.q) if self.source is None else take_positions(x, self.source)

    def restore(self, y: Shaped[Array, "b cq *rest"]) -> Shaped[Array, "b l *rest"]:
        """Put slots back into positions."""
        return y[:, : self.seqlen] if self.home is None else take_positions(y, self.home)


def plan_chunks(
    chunk_size: int, seqlen: int, segment_ids: Int[Array, "b l"] | None, num_segments: int | None
) -> ChunkPlan:
    """Cut rows into chunks of at most chunk_size positions.

    Args:
        chunk_size: largest chunk; a shorter row, or shorter sequences, get a smaller one.
        seqlen: positions of a row.
        segment_ids: sequence of each position, 0 to num_segments - 1, nondecreasing; anything else is padding.
        num_segments: number of sequences, empty ones included; None cuts plain slices.

    Returns:
        The plan. With num_segments, chunks are no larger than the mean sequence, so at most about half of the slots
        are empty.
    """
    if num_segments is None or segment_ids is None:
        q = min(chunk_size, seqlen)
        return ChunkPlan(seqlen, q, -(-seqlen // q))
    b, s = segment_ids.shape[0], num_segments
    q = min(chunk_size, -(-seqlen // s))
    chunks = -(-seqlen // q) + s
    member = segment_ids[:, :, None] == jnp.arange(s)  # (b, l, s)
    length, first = member.sum(1), jnp.argmax(member, axis=1)  # (b, s)
    end_chunk = jnp.cumsum(-(-length // q), axis=1)
    first_chunk = end_chunk + (-length // q)

    ends = (jnp.arange(chunks)[:, None] >= end_chunk[:, None, :]).sum(-1)  # sequences that end before each chunk
    segment = jnp.minimum(ends, s - 1)
    start, chunk, size = (jnp.take_along_axis(t, segment, axis=1) for t in (first, first_chunk, length))
    offset = ((jnp.arange(chunks) - chunk) * q)[:, :, None] + jnp.arange(q)  # place in the sequence
    source = jnp.where(offset < size[:, :, None], start[:, :, None] + offset, seqlen)

    shift = jnp.take_along_axis(first_chunk * q - first, jnp.clip(segment_ids, 0, s - 1), axis=1)
    home = jnp.where(member.any(-1), jnp.arange(seqlen) + shift, chunks * q)
    return ChunkPlan(seqlen, q, chunks, source.reshape(b, -1), segment, home)


def valid_positions(
    lengths: Int[Array, "b"] | None, segment_ids: Int[Array, "b l"] | None, seqlen: int
) -> Bool[Array, "b l"] | None:
    """Mask of the positions that are no padding; None if all are valid."""
    if lengths is not None:
        return jnp.arange(seqlen) < lengths[:, None]
    return None if segment_ids is None else segment_ids >= 0


def later_starts(segment_ids: Int[Array, "b l"]) -> Bool[Array, "b l"]:
    """Mask of the first position of each sequence except the row's first; padding starts nothing."""
    latest = jax.lax.cummax(segment_ids, axis=1)
    before = jnp.pad(latest[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    return (segment_ids >= 0) & (before >= 0) & (segment_ids != before)


def chain_chunks(
    states: Float[Array, "b s *state"],
    decay: Float[Array, "b c *state"],
    update: Float[Array, "b c *state"],
    segment: Int[Array, "b c"] | None,
) -> tuple[Float[Array, "b c *state"], Float[Array, "b s *state"]]:
    """Carry the states through the chunks in order: state <- decay * state + update.

    Args:
        states: the state of each sequence before the first chunk.
        decay: factor of each chunk; its state axes broadcast.
        update: what each chunk adds, from a zero state.
        segment: sequence of each chunk; None if there is one sequence.

    Returns:
        The state that each chunk starts from, and the states after the last chunk.
    """
    rows = jnp.arange(states.shape[0])

    def step(states: Array, chunk: tuple[Array, Array, Array | None]) -> tuple[Array, Array]:
        factor, add, s = chunk
        before = states[:, 0] if s is None else states[rows, s]
        after = factor * before + add
        return (after[:, None] if s is None else states.at[rows, s].set(after)), before

    chunks = jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0), (decay, update, segment))
    states, before = jax.lax.scan(step, states, chunks, unroll=min(decay.shape[1], 8))
    return jnp.moveaxis(before, 0, 1), states
