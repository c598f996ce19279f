"""The functions that are compiled ahead of time, and the running of texts of any length through them.

Every text goes through the same few programs: its prompt in segments of compiled lengths, its continuation in blocks of
at most `BLOCK` tokens. Weights and options are arguments of fixed shape, so neither another model of the same shape nor
another option compiles anything.
"""

import concurrent.futures
import dataclasses
import functools
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, UInt32

from mamba_jax.cache import MambaCache, init_cache
from mamba_jax.models.lm import decode_step, head, hidden_states, last_valid
from mamba_jax.ops.dispatch import Implementation
from mamba_jax.params import Params, TextInfo, check_params, check_placement
from mamba_jax.planning import LAG, Model, Plan, Reading, decide, honour, make_plan, run_chunk_size
from mamba_jax.progress import track
from mamba_jax.sampling import Sampler, choose_greedily, row_keys, sample
from mamba_jax.scheduler.chunks import ChunkSize
from mamba_jax.scheduler.policies import Decision, Policy
from mamba_jax.scheduler.programs import ProgramKey, ProgramTable
from mamba_jax.scheduler.signals import Watch
from mamba_jax.tracing import default_rules

BLOCK = 64  # most tokens one call of the decode program generates
SCORE_BLOCK = 128  # positions whose logits exist at one time while scoring
TABLE = ProgramTable()  # the process's programs
# For XLA, by kind of device or platform. Where a CPU has vectors of 512 bits, LLVM would use 256 of them: a tenth
# slower in decoding.
# A GPU runs the whole decode loop as one graph, so that no token waits for the host to ask whether there is another.
# On a TPU v7x bfloat16 weights would lie in memory twice, the copy in tiles of 16 rows, from which a decode loop copies
# the whole embedding back for each token.
_GRAPHS = ("FUSION", "CUBLAS", "CUBLASLT", "CUSTOM_CALL", "CUDNN", "DYNAMIC_SLICE_FUSION", "CONDITIONAL", "WHILE")
COMPILER_OPTIONS: dict[str, dict[str, Any]] = {
    "cpu": {"xla_cpu_prefer_vector_width": 512},
    "gpu": {"xla_gpu_enable_command_buffer": ",".join(_GRAPHS)},
    "TPU7x": {"xla_tpu_control_large_2nd_minor_layout_for_x16": 0},
}


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
    keys: UInt32[Array, "b 2"] | None  # data of threefry keys; None in the greedy program


class Spec(NamedTuple):
    """Which program is wanted, of a given model."""

    kind: str  # "init", "prefill", "score", "embed", "decode" or "row"
    batch: int  # rows
    length: int = 0  # positions a call reads; BLOCK for "decode"
    chunk_size: ChunkSize = 0  # of the scans; 0 where there is none
    watch: Watch | None = None  # "prefill": also give statistics of layers
    implementation: Implementation = "xla"  # of scans or steps
    sampling: bool = False  # "decode": the program with sampling options instead of the greedy one


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
    chunk_size: ChunkSize,
    watch: Watch | None = None,
    implementation: Implementation | None = None,
) -> tuple[MambaCache, Float[Array, "b v"], Float[Array, "layers 2"] | None]:
    """Read one segment; a row with no position in it keeps its cache and its logits.

    Returns the cache, the logits after each row's last position, and what was watched.
    """
    read = hidden_states(
        params,
        tokens,
        cache,
        lengths=lengths,
        chunk_size=chunk_size,
        watch=watch,
        implementation=implementation,
    )
    new = head(params, last_valid(read.hidden, lengths))
    return read.cache, jnp.where((lengths > 0)[:, None], new, logits), read.statistics


def score_segment(
    params: Params,
    tokens: Int[Array, "b l"],
    targets: Int[Array, "b l"],
    lengths: Int[Array, "b"],
    cache: MambaCache,
    *,
    chunk_size: ChunkSize,
    implementation: Implementation | None = None,
) -> tuple[MambaCache, Float[Array, "b l"], Bool[Array, "b l"]]:
    """Log-probabilities of `targets`, each given the tokens up to its position; logits exist a block at a time.

    Returns the cache, the log-probabilities, and whether no token is likelier than the target.
    """
    hidden, cache, *_ = hidden_states(
        params, tokens, cache, lengths=lengths, chunk_size=chunk_size, implementation=implementation
    )
    batch, length, width = hidden.shape
    block = min(SCORE_BLOCK, length)
    pad = -length % block
    hidden = jnp.pad(hidden, ((0, 0), (0, pad), (0, 0))).reshape(batch, -1, block, width).swapaxes(0, 1)
    targets = jnp.pad(targets, ((0, 0), (0, pad))).reshape(batch, -1, block).swapaxes(0, 1)
    blocks = jax.lax.map(lambda args: _target_logprobs(params, *args), (hidden, targets))
    logprobs, likeliest = (part.swapaxes(0, 1).reshape(batch, length + pad)[:, :length] for part in blocks)
    return cache, logprobs, likeliest


def _target_logprobs(
    params: Params, hidden: Float[Array, "b l m"], targets: Int[Array, "b l"]
) -> tuple[Float[Array, "b l"], Bool[Array, "b l"]]:
    from optax.losses import softmax_cross_entropy_with_integer_labels  # late: importing it takes a while

    logits = head(params, hidden)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return -softmax_cross_entropy_with_integer_labels(logits, targets), chosen >= logits.max(axis=-1)


def embed_segment(
    params: Params,
    tokens: Int[Array, "b l"],
    lengths: Int[Array, "b"],
    cache: MambaCache,
    *,
    chunk_size: ChunkSize,
    implementation: Implementation | None = None,
) -> tuple[MambaCache, Float[Array, "b l m"]]:
    """Final hidden states of one segment, in float32."""
    hidden, cache, *_ = hidden_states(
        params, tokens, cache, lengths=lengths, chunk_size=chunk_size, implementation=implementation
    )
    return cache, hidden.astype(jnp.float32)


def take_row(
    cache: MambaCache, logits: Float[Array, "b v"], row: Int[Array, ""]
) -> tuple[MambaCache, Float[Array, "v"]]:
    """One row's cache, as a cache of batch 1, and its logits."""
    one = jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, row, 1), cache)
    return one, jax.lax.dynamic_index_in_dim(logits, row, keepdims=False)


def decode_block(
    params: Params,
    state: DecodeState,
    options: DecodeOptions,
    limit: Int[Array, ""],
    *,
    implementation: Implementation | None = None,
) -> tuple[DecodeState, Int[Array, "b n"], Float[Array, "b n"]]:
    """Generate up to `limit` tokens a row, leaving the loop when every row has finished.

    Args:
        params: the model.
        state: where the rows stand.
        options: of the request.
        limit: tokens to generate, at most BLOCK.
        implementation: of the step: see `models.lm.step`.

    Returns:
        The new state; its cache and logits follow each row's last token. Then (b, BLOCK) tokens, -1 where there is
        none, and the log-probabilities that the model (before any sampling option) gave them.
    """
    batch, vocab = state.logits.shape
    ids = jnp.arange(vocab)

    def over(finished: Array, last: Array) -> Array:
        return finished | ((last >= 0) & options.stop[last])

    def unfinished(carry: tuple[Array, DecodeState, Array, Array]) -> Array:
        i, state, last, _ = carry
        return (i < limit) & ~jnp.all(over(state.finished, last))

    def body(carry: tuple[Array, DecodeState, Array, Array]) -> tuple[Array, DecodeState, Array, Array]:
        i, state, last, written = carry
        # A row alone in its batch ends the loop when it has finished: in here it has not.
        finished = state.finished if batch == 1 else over(state.finished, last)
        with jax.named_scope("choose"):
            if options.sampler is None or options.keys is None or state.seen is None:
                token, total = choose_greedily(state.logits, options.valid_vocab)
            else:
                logits = jnp.where(ids < options.valid_vocab, state.logits, -jnp.inf)
                token = sample(logits, options.keys, state.position, options.sampler, state.seen)
                total = jax.nn.logsumexp(state.logits, axis=-1)
            logprob = jnp.take_along_axis(state.logits, token[:, None], axis=-1)[:, 0] - total
            emitted = token if batch == 1 else jnp.where(finished, -1, token)
        new_logits, cache = decode_step(params, token, state.cache, implementation=implementation)
        if batch > 1:  # a finished row stays where it is
            keep = functools.partial(_keep_finished, finished)
            new_logits, cache = jax.tree.map(keep, (state.logits, state.cache), (new_logits, cache))
        seen = None if state.seen is None else state.seen.at[jnp.arange(batch), token].set(True)
        state = DecodeState(cache=cache, logits=new_logits, finished=finished, position=state.position + 1, seen=seen)
        pair = jnp.stack([emitted, jax.lax.bitcast_convert_type(logprob, jnp.int32)], axis=-1)[:, None]
        return i + 1, state, emitted, jax.lax.dynamic_update_slice_in_dim(written, pair, i, axis=1)

    # Tokens and log-probabilities as bits in one array, and stop tokens looked up a turn later where the end is asked
    # for: each saves a GPU a kernel as short as its launch.
    nothing = jnp.broadcast_to(jnp.array([-1, 0], jnp.int32), (batch, BLOCK, 2))
    first = (jnp.int32(0), state, jnp.full((batch,), -1, jnp.int32), nothing)
    _, state, last, written = jax.lax.while_loop(unfinished, body, first)
    state = dataclasses.replace(state, finished=over(state.finished, last))
    return state, written[:, :, 0], jax.lax.bitcast_convert_type(written[:, :, 1], jnp.float32)


def _keep_finished(finished: Bool[Array, "b"], old: Array, new: Array) -> Array:
    return jnp.where(finished.reshape(-1, *(1,) * (old.ndim - 1)), old, new)


def program(params: Params, spec: Spec, *, table: ProgramTable = TABLE) -> jax.stages.Compiled:
    """The compiled program of a spec for this model, from the table; only shapes, dtypes and placement matter."""
    key = _key(params, spec)
    return table.get(key, lambda: lower_program(params, spec))


def compile_programs(
    params: Params,
    specs: Iterable[Spec],
    *,
    table: ProgramTable = TABLE,
    expected: bool = False,
    tolerated: type[Exception] | tuple[()] = (),
) -> dict[Spec, Exception]:
    """Compile those of the programs that the table lacks, side by side, with a bar.

    The first error, and Ctrl-C, waits for what is being compiled and drops what is queued.

    Args:
        params: the model.
        specs: the programs.
        table: where programs are kept.
        expected: no warning, though the table was said to be complete.
        tolerated: errors that end nothing but are given back.

    Returns:
        The tolerated error of each program that has none for it.
    """
    failed: dict[Spec, Exception] = {}
    missing = {key: spec for spec in specs if (key := _key(params, spec)) not in table}
    if not missing:
        return failed

    def get(key: ProgramKey, spec: Spec) -> None:
        table.get(key, lambda: lower_program(params, spec), expected=expected)

    pool = concurrent.futures.ThreadPoolExecutor(min(len(missing), os.cpu_count() or 1))
    try:
        with track("Compiling", len(missing)) as advance:
            running = {pool.submit(get, key, spec): spec for key, spec in missing.items()}
            for done in concurrent.futures.as_completed(running):
                try:
                    done.result()
                except tolerated as error:
                    failed[running[done]] = error
                advance(1)
    finally:
        pool.shutdown(cancel_futures=True)
    return failed


def _key(params: Params, spec: Spec) -> ProgramKey:
    device, sharding = _device(params), params.embedding.sharding
    # On one device all weights lie alike; over several each has a layout of its own.
    alone = len(sharding.device_set) == 1
    shardings = sharding if alone else tuple(leaf.sharding for leaf in jax.tree.leaves(params))
    variant = "" if spec.watch is None else repr(spec.watch)
    return ProgramKey(
        kind=spec.kind,
        config=params.config,
        dtype=params.dtype.name,
        batch=spec.batch,
        length=spec.length,
        chunk_size=spec.chunk_size,
        placement=(device.platform, device.device_kind, shardings),
        variant=("sample" if spec.sampling else "greedy") if spec.kind == "decode" else variant,
        implementation=spec.implementation,
    )


def _device(params: Params) -> Any:  # jaxlib does not type devices
    return min(params.embedding.sharding.device_set, key=lambda device: cast(Any, device).id)


def model_of(params: Params) -> Model:
    """What planning wants to know of a model."""
    device, devices = _device(params), len(params.embedding.sharding.device_set)
    return Model(params.config, params.dtype.name, device.platform, device.device_kind, devices)


def lower_program(params: Params, spec: Spec) -> jax.stages.Lowered:
    """Trace and lower a program for this model."""
    return lower_shapes(program_weights(params), spec)


@default_rules()
def lower_shapes(params: Params, spec: Spec, platform: str | None = None) -> jax.stages.Lowered:
    """Trace and lower a program for weights that need not exist.

    Args:
        params: the model, of which shapes, dtypes and shardings are read: `jax.ShapeDtypeStruct` leaves will do, on
            devices of another machine too (`mamba_jax.tpu`).
        spec: the program.
        platform: to lower for ("cpu", "cuda", "tpu"); None is that of the weights' devices.

    Returns:
        The lowered program.

    Raises:
        NotImplementedError: if the spec's implementation is "pallas" and the kernels cannot do this.
    """
    traced = _trace_shapes(params, spec)
    return traced.lower() if platform is None else traced.lower(lowering_platforms=(platform,))


def _trace_shapes(params: Params, spec: Spec) -> jax.stages.Traced:
    batch, length = spec.batch, spec.length
    reading: Any = {"chunk_size": spec.chunk_size, "implementation": spec.implementation}
    sharding = params.embedding.sharding
    replicated = jax.NamedSharding(sharding.mesh, jax.P()) if isinstance(sharding, jax.NamedSharding) else sharding
    device = _device(params)
    compiler_options = COMPILER_OPTIONS.get(device.device_kind, COMPILER_OPTIONS.get(device.platform))
    jit = functools.partial(jax.jit, compiler_options=compiler_options, out_shardings=replicated)

    def placed(tree: Any) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated), tree)

    weights = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params)
    if spec.kind == "init":
        return jit(lambda: first_state(params, batch)).trace()
    cache, logits = placed(jax.eval_shape(lambda: first_state(params, batch)))
    tokens, lengths, number = placed(
        (
            jax.ShapeDtypeStruct((batch, length), jnp.int32),
            jax.ShapeDtypeStruct((batch,), jnp.int32),
            jax.ShapeDtypeStruct((), jnp.int32),
        )
    )
    match spec.kind:
        case "prefill":
            prefill = functools.partial(prefill_segment, watch=spec.watch, **reading)
            return jit(prefill, donate_argnums=(3, 4)).trace(weights, tokens, lengths, cache, logits)
        case "score":
            score = functools.partial(score_segment, **reading)
            return jit(score, donate_argnums=4).trace(weights, tokens, tokens, lengths, cache)
        case "embed":
            embed = functools.partial(embed_segment, **reading)
            return jit(embed, donate_argnums=3).trace(weights, tokens, lengths, cache)
        case "decode":
            state, options, limit = placed(jax.eval_shape(lambda: _decode_arguments(params, batch, spec.sampling)))
            decode = functools.partial(decode_block, implementation=spec.implementation)
            return jit(decode, donate_argnums=1).trace(weights, state, options, limit)
        case "row":
            return jit(take_row).trace(cache, logits, number)
    raise ValueError(f"kind: got {spec.kind!r}, wanted 'init', 'prefill', 'score', 'embed', 'decode' or 'row'")


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
        keys=jnp.asarray(row_keys(0, batch)) if sampling else None,
    )
    return state, options, jnp.int32(0)


def program_weights(params: Params) -> Params:
    """The model as programs take it: what a checkpoint says about text is no part of them.

    Raises:
        ValueError: if the weights are not those of `params.config`, no JAX arrays or on different devices; the message
            names them. Programs are kept by configuration, so others would end up in its place. Also if jit is
            disabled: JAX runs nothing then that was compiled ahead.
    """
    if cast(Any, jax.config).jax_disable_jit:
        raise ValueError("jax_disable_jit: got True, wanted False: only forward, prefill and step run without jit")
    check_params(params)
    check_placement(params)
    return dataclasses.replace(params, text=TextInfo())


def reading_specs(kind: str, batch: int, reading: Iterable[Reading]) -> list[Spec]:
    """The programs that read, "prefill", "score" or "embed", and that of the empty cache."""
    return [Spec("init", batch), *(Spec(kind, batch, *one) for one in reading)]


def segments(rows: Sequence[Sequence[int]], plan: Plan) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Cut rows of unequal lengths into a plan's segments.

    Args:
        rows: token ids, each row at least one.
        plan: for as many rows or more, which are dummies, and the length of the longest.

    Yields:
        Offset of the segment, its (b, l) tokens padded with zeros on the right, and the (b,) valid positions a row:
        none in a dummy.
    """
    lengths = np.zeros(plan.batch, np.int32)
    lengths[: len(rows)] = [len(row) for row in rows]
    offset = 0
    for segment in plan.segments:
        tokens = np.zeros((plan.batch, segment.length), np.int32)
        for i, row in enumerate(rows):
            part = row[offset : offset + segment.length]
            tokens[i, : len(part)] = part
        yield offset, tokens, np.clip(lengths - offset, 0, segment.length)
        offset += segment.length


def read_prompts(
    weights: Params,
    rows: Sequence[Sequence[int]],
    policy: Policy | None = None,
    implementation: Implementation | None = None,
) -> tuple[MambaCache, Float[Array, "b v"], tuple[Decision, ...]]:
    """Read rows of unequal lengths, in memory that does not grow with them.

    Args:
        weights: the model as programs take it.
        rows: token ids, each row at least one.
        policy: decides chunk sizes; None takes the fastest measured ones.
        implementation: of the scans, as in `make_plan`.

    Returns:
        Cache and next-token logits after each row, b being the rows' number filled up to a compiled one with dummy
        rows; and the decisions about chunk sizes, segment by segment.
    """
    model = model_of(weights)
    plan = make_plan(model, len(rows), max(len(row) for row in rows), policy, implementation)
    cache, logits = program(weights, Spec("init", plan.batch))()
    decided: list[Decision] = []
    statistics: list[jax.Array] = []
    with track("Reading", len(plan.segments), show=None if len(plan.segments) > 1 else False) as advance:
        for i, (_, tokens, lengths) in enumerate(segments(rows, plan)):
            segment = plan.segments[i]
            reading, decisions = segment.reading, segment.decisions
            if policy is not None and statistics and i >= LAG:
                decisions = decide(
                    model, plan.batch, policy, plan.length, np.asarray(statistics[i - LAG]), i, segment.length
                )
                reading = reading._replace(chunk_size=run_chunk_size(decisions, segment.length))
                decisions = honour(decisions, reading.chunk_size)
            run = program(weights, Spec("prefill", plan.batch, *reading))
            cache, logits, statistic = run(weights, tokens, lengths, cache, logits)
            if statistic is not None:
                statistic.copy_to_host_async()
                statistics.append(statistic)
            decided += decisions
            advance(1)
    return cache, logits, tuple(decided)
