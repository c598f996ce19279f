"""The functions that are compiled ahead of time, and the running of texts of any length through them.

Every text goes through the same few programs: its prompt in segments of compiled lengths, its continuation in blocks of
at most `BLOCK` tokens. Weights and options are arguments of fixed shape, so neither another model of the same shape nor
another option compiles anything.
"""

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from mamba_jax.cache import MambaCache, init_cache
from mamba_jax.models.lm import decode_step, head, hidden_states, last_valid
from mamba_jax.params import FLOAT32_FIELDS, Params, TextInfo
from mamba_jax.progress import track
from mamba_jax.sampling import Sampler, most_likely, row_keys, sample
from mamba_jax.scheduler.chunks import default_chunk_size
from mamba_jax.scheduler.programs import ProgramKey, ProgramTable
from mamba_jax.scheduler.segments import plan_segments

BLOCK = 64  # most tokens one call of the decode program generates
SCORE_BLOCK = 128  # positions whose logits exist at one time while scoring
TABLE = ProgramTable()  # the process's programs
# For XLA, by platform. Where a CPU has vectors of 512 bits, LLVM would use 256 of them: a tenth slower in decoding.
COMPILER_OPTIONS = {"cpu": {"xla_cpu_prefer_vector_width": 512}}


@struct.dataclass
class DecodeState:
    """What the decode loop carries from token to token; donated from block to block."""

    cache: MambaCache
    logits: Float[Array, "b v"]  # of the next token
    finished: Bool[Array, "b"]
    position: Int[Array, ""]  # tokens generated so far
    seen: Bool[Array, "b v"] | None  # ids in the prompt or generated; None in the greedy program


@struct.dataclass
class DecodeOptions:
    """Everything a request may choose, as arrays of fixed shape."""

    stop: Bool[Array, "v"]  # ids that end a row
    valid_vocab: Int[Array, ""]  # ids from here on are padding of the embedding
    sampler: Sampler | None  # None in the greedy program
    keys: PRNGKeyArray | None  # (b,), None in the greedy program


def first_state(params: Params, batch: int) -> tuple[MambaCache, Float[Array, "b v"]]:
    """Zero cache and zero logits."""
    logits = jnp.zeros((batch, params.config.padded_vocab_size), jnp.float32)
    return init_cache(params.config, batch, params.dtype), logits


def prefill_segment(
    params: Params,
    tokens: Int[Array, "b l"],
    lengths: Int[Array, "b"],
    cache: MambaCache,
    logits: Float[Array, "b v"],
    *,
    chunk_size: int,
) -> tuple[MambaCache, Float[Array, "b v"]]:
    """Read one segment; a row with no position in it keeps its cache and its logits."""
    hidden, cache, _ = hidden_states(params, tokens, cache, lengths=lengths, chunk_size=chunk_size)
    new = head(params, last_valid(hidden, lengths))
    return cache, jnp.where((lengths > 0)[:, None], new, logits)


def score_segment(
    params: Params,
    tokens: Int[Array, "b l"],
    targets: Int[Array, "b l"],
    lengths: Int[Array, "b"],
    cache: MambaCache,
    *,
    chunk_size: int,
) -> tuple[MambaCache, Float[Array, "b l"]]:
    """Log-probabilities of `targets`, each given the tokens up to its position; logits exist a block at a time."""
    hidden, cache, _ = hidden_states(params, tokens, cache, lengths=lengths, chunk_size=chunk_size)
    batch, length, width = hidden.shape
    block = min(SCORE_BLOCK, length)
    pad = -length % block
    hidden = jnp.pad(hidden, ((0, 0), (0, pad), (0, 0))).reshape(batch, -1, block, width).swapaxes(0, 1)
    targets = jnp.pad(targets, ((0, 0), (0, pad))).reshape(batch, -1, block).swapaxes(0, 1)
    logprobs = jax.lax.map(lambda args: _target_logprobs(params, *args), (hidden, targets))
    return cache, logprobs.swapaxes(0, 1).reshape(batch, length + pad)[:, :length]


def _target_logprobs(params: Params, hidden: Float[Array, "b l m"], targets: Int[Array, "b l"]) -> Float[Array, "b l"]:
    logits = head(params, hidden)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)


def embed_segment(
    params: Params, tokens: Int[Array, "b l"], lengths: Int[Array, "b"], cache: MambaCache, *, chunk_size: int
) -> tuple[MambaCache, Float[Array, "b l m"]]:
    """Final hidden states of one segment, in float32."""
    hidden, cache, _ = hidden_states(params, tokens, cache, lengths=lengths, chunk_size=chunk_size)
    return cache, hidden.astype(jnp.float32)


def decode_block(
    params: Params, state: DecodeState, options: DecodeOptions, limit: Int[Array, ""]
) -> tuple[DecodeState, Int[Array, "b n"], Float[Array, "b n"]]:
    """Generate up to `limit` tokens a row, leaving the loop when every row has finished.

    Args:
        params: the model.
        state: where the rows stand.
        options: of the request.
        limit: tokens to generate, at most BLOCK.

    Returns:
        The new state; its cache and logits follow each row's last token. Then (b, BLOCK) tokens, -1 where there is
        none, and the log-probabilities that the model (before any sampling option) gave them.
    """
    batch, vocab = state.logits.shape
    ids = jnp.arange(vocab)

    def unfinished(carry: tuple[Array, DecodeState, Array, Array]) -> Array:
        i, state, _, _ = carry
        return (i < limit) & ~jnp.all(state.finished)

    def body(carry: tuple[Array, DecodeState, Array, Array]) -> tuple[Array, DecodeState, Array, Array]:
        i, state, tokens, logprobs = carry
        with jax.named_scope("choose"):
            logits = jnp.where(ids < options.valid_vocab, state.logits, -jnp.inf)
            if options.sampler is None or options.keys is None or state.seen is None:
                token = most_likely(logits)
            else:
                token = sample(logits, options.keys, state.position, options.sampler, state.seen)
            chosen = jnp.take_along_axis(state.logits, token[:, None], axis=-1)[:, 0]
            logprob = chosen - jax.nn.logsumexp(state.logits, axis=-1)
            emitted = jnp.where(state.finished, -1, token)
        new_logits, cache = decode_step(params, token, state.cache)
        if batch > 1:  # a finished row stays where it is; alone it ends the loop
            keep = functools.partial(_keep_finished, state.finished)
            new_logits, cache = jax.tree.map(keep, (state.logits, state.cache), (new_logits, cache))
        seen = None if state.seen is None else state.seen.at[jnp.arange(batch), token].set(True)
        state = DecodeState(
            cache=cache,
            logits=new_logits,
            finished=state.finished | options.stop[token],
            position=state.position + 1,
            seen=seen,
        )
        return i + 1, state, tokens.at[:, i].set(emitted), logprobs.at[:, i].set(logprob)

    empty = jnp.full((batch, BLOCK), -1, jnp.int32), jnp.zeros((batch, BLOCK), jnp.float32)
    _, state, tokens, logprobs = jax.lax.while_loop(unfinished, body, (jnp.int32(0), state, *empty))
    return state, tokens, logprobs


def _keep_finished(finished: Bool[Array, "b"], old: Array, new: Array) -> Array:
    return jnp.where(finished.reshape(-1, *(1,) * (old.ndim - 1)), old, new)


def program(
    kind: str, params: Params, batch: int, length: int, *, sampling: bool = False, table: ProgramTable = TABLE
) -> jax.stages.Compiled:
    """The compiled program of a kind for this model's shape, from the table.

    Args:
        kind: "init", "prefill", "score", "embed" or "decode".
        params: the model; only shapes, dtypes and placement matter.
        batch: rows.
        length: positions a call reads; BLOCK for "decode", 0 for "init".
        sampling: "decode" only: the program with sampling options instead of the greedy one.
        table: where programs are kept.
    """
    key = _key(kind, params, batch, length, sampling)
    return table.get(key, lambda: _lower(key, params, sampling))


def compile_programs(
    params: Params, wanted: Iterable[tuple[str, int, int]], *, sampling: bool = False, table: ProgramTable = TABLE
) -> None:
    """Compile those of the wanted programs, as (kind, batch, length), that the table lacks, with a bar."""
    missing = [program for program in wanted if _key(program[0], params, *program[1:], sampling) not in table]
    if not missing:
        return
    with track("Compiling", len(missing)) as advance:
        for kind, batch, length in missing:
            program(kind, params, batch, length, sampling=sampling, table=table)
            advance(1)


def _key(kind: str, params: Params, batch: int, length: int, sampling: bool) -> ProgramKey:
    device, sharding = _device(params), params.embedding.sharding
    # On one device all weights lie alike; over several each has a layout of its own.
    alone = len(sharding.device_set) == 1
    shardings = sharding if alone else tuple(leaf.sharding for leaf in jax.tree.leaves(params))
    scans = kind not in ("init", "decode")
    return ProgramKey(
        kind=kind,
        config=params.config,
        dtype=params.dtype.name,
        batch=batch,
        length=length,
        chunk_size=default_chunk_size(device.platform, params.config.layer, length) if scans else 0,
        placement=(device.platform, device.device_kind, shardings),
        variant=("sample" if sampling else "greedy") if kind == "decode" else "",
    )


def _device(params: Params) -> Any:  # jaxlib does not type devices
    return min(params.embedding.sharding.device_set, key=lambda device: cast(Any, device).id)


def _lower(key: ProgramKey, params: Params, sampling: bool) -> jax.stages.Lowered:
    kind, batch, length, chunk_size = key.kind, key.batch, key.length, key.chunk_size
    sharding = params.embedding.sharding
    replicated = jax.NamedSharding(sharding.mesh, jax.P()) if isinstance(sharding, jax.NamedSharding) else sharding
    compiler_options = COMPILER_OPTIONS.get(_device(params).platform)
    jit = functools.partial(jax.jit, compiler_options=compiler_options, out_shardings=replicated)

    def placed(tree: Any) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated), tree)

    weights = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), program_weights(params)
    )
    if kind == "init":
        return jit(lambda: first_state(params, batch)).lower()
    cache, logits = placed(jax.eval_shape(lambda: first_state(params, batch)))
    tokens, lengths = placed(
        (jax.ShapeDtypeStruct((batch, length), jnp.int32), jax.ShapeDtypeStruct((batch,), jnp.int32))
    )
    match kind:
        case "prefill":
            prefill = functools.partial(prefill_segment, chunk_size=chunk_size)
            return jit(prefill, donate_argnums=(3, 4)).lower(weights, tokens, lengths, cache, logits)
        case "score":
            score = functools.partial(score_segment, chunk_size=chunk_size)
            return jit(score, donate_argnums=4).lower(weights, tokens, tokens, lengths, cache)
        case "embed":
            embed = functools.partial(embed_segment, chunk_size=chunk_size)
            return jit(embed, donate_argnums=3).lower(weights, tokens, lengths, cache)
        case "decode":
            state, options, limit = placed(jax.eval_shape(lambda: _decode_arguments(params, batch, sampling)))
            return jit(decode_block, donate_argnums=1).lower(weights, state, options, limit)
    raise ValueError(f"kind: got {kind!r}, wanted 'init', 'prefill', 'score', 'embed' or 'decode'")


def _decode_arguments(params: Params, batch: int, sampling: bool) -> tuple[DecodeState, DecodeOptions, Array]:
    """Arguments of the decode program by shape; for `jax.eval_shape`."""
    cache, logits = first_state(params, batch)
    vocab = logits.shape[1]
    state = DecodeState(
        cache=cache,
        logits=logits,
        finished=jnp.zeros(batch, bool),
        position=jnp.int32(0),
        seen=jnp.zeros((batch, vocab), bool) if sampling else None,
    )
    options = DecodeOptions(
        stop=jnp.zeros(vocab, bool),
        valid_vocab=jnp.int32(0),
        sampler=Sampler.of(batch) if sampling else None,
        keys=row_keys(0, batch) if sampling else None,
    )
    return state, options, jnp.int32(0)


def program_weights(params: Params) -> Params:
    """The model as programs take it: what a checkpoint says about text is no part of them.

    Raises:
        ValueError: if a weight is no JAX array or not of the dtype its field has; the message names it.
    """
    float32 = jnp.dtype(jnp.float32)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        wanted = float32 if path[-1].name in FLOAT32_FIELDS else params.dtype
        if not isinstance(leaf, jax.Array) or leaf.dtype != wanted:
            name, got = jax.tree_util.keystr(path), f"{leaf.dtype} in a {type(leaf).__name__}"
            raise ValueError(f"params{name}: got {got}, wanted {wanted} in a jax.Array (see mamba_jax.cast_params)")
    return dataclasses.replace(params, text=TextInfo())


def segments(rows: Sequence[Sequence[int]]) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Cut rows of unequal lengths into segments of compiled lengths.

    Args:
        rows: token ids, each row at least one.

    Yields:
        Offset of the segment, its (b, l) tokens padded with zeros on the right, and the (b,) valid positions a row.
    """
    lengths = np.array([len(row) for row in rows], np.int32)
    offset = 0
    for size in plan_segments(int(lengths.max())):
        tokens = np.zeros((len(rows), size), np.int32)
        for i, row in enumerate(rows):
            part = row[offset : offset + size]
            tokens[i, : len(part)] = part
        yield offset, tokens, np.clip(lengths - offset, 0, size)
        offset += size


def read_prompts(weights: Params, rows: Sequence[Sequence[int]]) -> tuple[MambaCache, Float[Array, "b v"]]:
    """Cache and next-token logits after each row, in memory that does not grow with the rows' lengths."""
    batch, sizes = len(rows), plan_segments(max(len(row) for row in rows))
    cache, logits = program("init", weights, batch, 0)()
    with track("Reading", len(sizes), show=None if len(sizes) > 1 else False) as advance:
        for _, tokens, lengths in segments(rows):
            run = program("prefill", weights, batch, tokens.shape[1])
            cache, logits = run(weights, tokens, lengths, cache, logits)
            advance(1)
    return cache, logits
