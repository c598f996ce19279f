"""The language model around the mixers: embedding -> [residual + mixer(norm(residual))] x n_layer -> norm -> head.

Everything is a pure function of `Params`; layers are unrolled, since a scan over stacked weights copies each layer's
weights every step (docs/design.md, "Layers").
"""

import dataclasses
import functools
from typing import Any, Literal, NamedTuple, TypedDict, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, Int

from mamba_jax.arguments import BYTES, describe
from mamba_jax.cache import MambaCache, check_cache, init_cache
from mamba_jax.config import MambaConfig
from mamba_jax.models.mamba1 import mamba1_mixer, mamba1_step
from mamba_jax.models.mamba2 import heads_of_device, mamba2_mixer, mamba2_step, mix_over_devices
from mamba_jax.ops.dispatch import (
    ON_MESH,
    Implementation,
    Kernel,
    check_implementation,
    declined_on,
    device_axis,
    dispatch,
    on_mesh,
)
from mamba_jax.ops.linear import linear
from mamba_jax.ops.norm import layer_norm, rms_norm
from mamba_jax.pallas_kernels.gpu import mamba1_step as mamba1_gpu
from mamba_jax.pallas_kernels.gpu import mamba2_step as mamba2_gpu
from mamba_jax.pallas_kernels.gpu import matvec as matvec_kernel
from mamba_jax.pallas_kernels.gpu import selective_scan as scan_gpu
from mamba_jax.pallas_kernels.gpu import ssd as ssd_gpu
from mamba_jax.pallas_kernels.tpu import mamba1_step as mamba1_tpu
from mamba_jax.pallas_kernels.tpu import mamba2_step as mamba2_tpu
from mamba_jax.pallas_kernels.tpu import selective_scan as scan_tpu
from mamba_jax.pallas_kernels.tpu import ssd as ssd_tpu
from mamba_jax.params import Layer, Mamba1Layer, Params, check_axes, check_params, param_shapes
from mamba_jax.scheduler.chunks import ChunkSize, as_chunk_size, default_chunk_size
from mamba_jax.scheduler.signals import Watch, every_kth_layer
from mamba_jax.tracing import default_rules


class Reading(NamedTuple):
    """What reading a block of positions gives."""

    hidden: Float[Array, "b l m"]  # final states, after norm_f, in the weights' dtype
    cache: MambaCache  # after the block
    inputs: tuple[Float[Array, "b l m"], ...]  # of each layer; cost nothing where they are not used
    statistics: Float[Array, "layers 2"] | None  # of the layers that were to be watched


class _Scan(TypedDict):
    lengths: Array | None
    segment_ids: Array | None
    chunk_size: int
    watch: Watch | None
    implementation: Implementation | None


def hidden_states(
    params: Params,
    tokens: Int[Array, "b l"],
    cache: MambaCache | None,
    *,
    lengths: Int[Array, "b"] | None = None,
    segment_ids: Int[Array, "b l"] | None = None,
    chunk_size: ChunkSize,
    watch: Watch | None = None,
    implementation: Implementation | None = None,
) -> Reading:
    """Read a block of positions.

    Args:
        params: the model.
        tokens: ids; one outside the embedding gives NaN, never another token's row.
        cache: state before the block; None is the zero state.
        lengths: valid positions of each row, the rest being padding on the right; 0 leaves the row's cache alone.
        segment_ids: packed sequences; see `forward`.
        chunk_size: of the scans, one for all layers or one a layer.
        watch: what to compute of the x that enters the scans, and in which layers.
        implementation: of the scans: see `ops.ssd.ssd` and `ops.scan.selective_scan`.
    """
    config = params.config
    if cache is None:
        cache = init_cache(config, tokens.shape[0], params.dtype)
    residual = _embed(params, tokens)
    inputs: list[Array] = []
    conv: list[Array] = []
    ssm: list[Array] = []
    statistics: list[Array] = []
    chunk_sizes = (chunk_size,) * config.n_layer if isinstance(chunk_size, int) else chunk_size
    watched = set() if watch is None else set(every_kth_layer(config.n_layer, watch.every))
    for i, (layer, chunk) in enumerate(zip(params.layers, chunk_sizes, strict=True)):
        with jax.named_scope(f"layer_{i}"):
            inputs.append(residual.astype(params.dtype))
            residual, conv_state, ssm_state, statistic = _read_layer(
                layer,
                config,
                residual,
                cache.conv[i],
                cache.ssm[i],
                lengths=lengths,
                segment_ids=segment_ids,
                chunk_size=chunk,
                watch=watch if i in watched else None,
                implementation=implementation,
            )
            conv.append(conv_state)
            ssm.append(ssm_state)
            statistics += [] if statistic is None else [statistic]
    hidden = _block_norm(config, residual, params.norm_f, params.norm_f_bias)
    cache = MambaCache(conv=tuple(conv), ssm=tuple(ssm))
    return Reading(hidden, cache, tuple(inputs), jnp.stack(statistics) if statistics else None)


def decode_step(
    params: Params, tokens: Int[Array, "b"], cache: MambaCache, *, implementation: Implementation | None = None
) -> tuple[Float[Array, "b v"], MambaCache]:
    """Float32 logits after one more token a row, and the cache; the recurrence itself, never the chunked scan."""
    config = params.config
    residual = _embed(params, tokens)
    conv: list[Array] = []
    ssm: list[Array] = []
    for i, layer in enumerate(params.layers):
        with jax.named_scope(f"layer_{i}"):
            residual, conv_state, ssm_state = _step_layer(
                layer, config, residual, cache.conv[i], cache.ssm[i], implementation=implementation
            )
            conv.append(conv_state)
            ssm.append(ssm_state)
    return _step_head(params, residual, implementation), MambaCache(conv=tuple(conv), ssm=tuple(ssm))


def head(params: Params, hidden: Float[Array, "... m"]) -> Float[Array, "... v"]:
    """Float32 logits of final hidden states."""
    with jax.named_scope("head"):
        return linear(hidden, _head_weight(params), out_dtype=jnp.float32)


def last_valid(x: Float[Array, "b l m"], lengths: Int[Array, "b"] | None) -> Float[Array, "b m"]:
    """Each row's entry at its last valid position (position 0 where a row has none)."""
    if lengths is None:
        return x[:, -1]
    index = jnp.maximum(lengths - 1, 0)
    return jnp.take_along_axis(x, index[:, None, None], axis=1)[:, 0]


@default_rules()
def forward(
    params: Params,
    tokens: ArrayLike,
    *,
    lengths: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
    cache: MambaCache | None = None,
    chunk_size: ChunkSize | Literal["auto"] = "auto",
    output_hidden_states: bool = False,
    implementation: Implementation | None = None,
) -> Float[Array, "b l v"] | tuple[Float[Array, "b l v"], tuple[Float[Array, "b l m"], ...]]:
    """Logits of every position. Differentiable (in reverse mode).

    Args:
        params: the model.
        tokens: (b, l) integer ids.
        lengths: (b,) valid positions a row; the rest is padding on the right, whose logits mean nothing.
        segment_ids: (b, l) packed sequences: neighbouring positions of one id belong together and see nothing of
            others, not even of positions of the same id beyond another; negative ids are padding, on the left as well
            as on the right. Not with lengths or cache.
        cache: the state that precedes the first position; None is the zero state.
        chunk_size: of the scans, one for all layers or a tuple with one a layer; speed only, never results. "auto"
            picks one for the platform and the length.
        output_hidden_states: also return the hidden states.
        implementation: of the scans: "xla"; "pallas", the kernels for NVIDIA GPUs or TPUs; None leaves it to
            `ops.dispatch`.

    Returns:
        (b, l, padded vocab_size) float32 logits; with output_hidden_states, also a tuple of n_layer + 1 arrays
        (b, l, d_model) in the weights' dtype: what enters each layer, then the final states after norm_f.

    Raises:
        ValueError: if shapes, dtypes or ids do not fit; the message names the argument.
        NotImplementedError: if implementation is "pallas" and the kernel cannot do this.
    """
    ids, rows, chunk_size = _check_block(params, tokens, lengths, cache, chunk_size)
    segments = None
    if segment_ids is not None:
        if lengths is not None or cache is not None:
            raise ValueError("segment_ids: wanted neither lengths nor cache beside it; give padding a negative id")
        segments = _runs(_as_integers("segment_ids", segment_ids, ids.shape))
    return _forward(params, ids, rows, segments, cache, chunk_size, output_hidden_states, implementation)


@default_rules()
def prefill(
    params: Params,
    tokens: ArrayLike,
    *,
    lengths: ArrayLike | None = None,
    cache: MambaCache | None = None,
    chunk_size: ChunkSize | Literal["auto"] = "auto",
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "b v"], MambaCache]:
    """Read a block of positions: logits of each row's last valid position, and the cache after it.

    Args:
        params: the model.
        tokens: (b, l) integer ids, any l >= 1.
        lengths: (b,) valid positions a row, at least 1; the rest is padding on the right.
        cache: continue from this cache (it is left as it was); None starts from the zero state.
        chunk_size: as in `forward`.
        implementation: as in `forward`.

    Returns:
        (b, padded vocab_size) float32 logits and the cache.

    Raises:
        ValueError: if shapes, dtypes or ids do not fit; the message names the argument.
        NotImplementedError: if implementation is "pallas" and the kernel cannot do this.
    """
    ids, rows, chunk_size = _check_block(params, tokens, lengths, cache, chunk_size)
    return _prefill(params, ids, rows, cache, chunk_size, implementation)


@default_rules()
def step(
    params: Params, tokens: ArrayLike, cache: MambaCache, *, implementation: Implementation | None = None
) -> tuple[Float[Array, "b v"], MambaCache]:
    """One more token a row.

    Args:
        params: the model.
        tokens: (b,) integer ids.
        cache: the state before them (it is left as it was).
        implementation: "xla" takes XLA's ops; "pallas" takes the kernels for NVIDIA GPUs or TPUs, or raises; None
            leaves it to `ops.dispatch`.

    Returns:
        (b, padded vocab_size) float32 logits and the cache, of the same structure, shapes and dtypes.

    Raises:
        ValueError: if shapes, dtypes or ids do not fit; the message names the argument.
        NotImplementedError: if implementation is "pallas" and the kernels do not take the model, batch or device.
    """
    check_implementation(implementation)
    ids = _check_tokens(params, tokens, ndim=1)
    check_cache(cache, params.config, ids.shape[0], params.dtype)
    return _step(params, ids, cache, implementation=implementation)


@jax.jit(static_argnames=("chunk_size", "output_hidden_states", "implementation"))
def _forward(
    params: Params,
    tokens: Array,
    lengths: Array | None,
    segment_ids: Array | None,
    cache: MambaCache | None,
    chunk_size: ChunkSize,
    output_hidden_states: bool,
    implementation: Implementation | None,
) -> Array | tuple[Array, tuple[Array, ...]]:
    read = hidden_states(
        params,
        tokens,
        cache,
        lengths=lengths,
        segment_ids=segment_ids,
        chunk_size=chunk_size,
        implementation=implementation,
    )
    logits = head(params, read.hidden)
    return (logits, (*read.inputs, read.hidden)) if output_hidden_states else logits


@jax.jit(static_argnames=("chunk_size", "implementation"))
def _prefill(
    params: Params,
    tokens: Array,
    lengths: Array | None,
    cache: MambaCache | None,
    chunk_size: ChunkSize,
    implementation: Implementation | None,
) -> tuple[Array, MambaCache]:
    read = hidden_states(params, tokens, cache, lengths=lengths, chunk_size=chunk_size, implementation=implementation)
    return head(params, last_valid(read.hidden, lengths)), read.cache


_step = jax.jit(decode_step, static_argnames="implementation")


def _embed(params: Params, tokens: Int[Array, "..."]) -> Float[Array, "... m"]:
    with jax.named_scope("embedding"):
        # Tied to the tokens, the table changes with each turn of a decode loop: else XLA's CPU backend, which reads no
        # 16-bit rows, moves a float32 copy of the whole table out of the loop.
        table, tokens = jax.lax.optimization_barrier((params.embedding, tokens))
        rows = table.at[tokens].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
        return rows.astype(jnp.float32) if params.config.residual_in_fp32 else rows


# Compiled functions of one layer: layers of one shape are traced once. XLA inlines them where they are called.
@functools.partial(jax.jit, static_argnames=("config", "chunk_size", "watch", "implementation"))
def _read_layer(
    layer: Layer,
    config: MambaConfig,
    residual: Float[Array, "b l m"],
    conv: Float[Array, "b w-1 channels"],
    ssm: Float[Array, "b ..."],
    *,
    lengths: Int[Array, "b"] | None,
    segment_ids: Int[Array, "b l"] | None,
    chunk_size: int,
    watch: Watch | None,
    implementation: Implementation | None,
) -> tuple[Array, Array, Array, Array | None]:
    u = _block_norm(config, residual, layer.norm, layer.norm_bias)
    scan: _Scan = {
        "lengths": lengths,
        "segment_ids": segment_ids,
        "chunk_size": chunk_size,
        "watch": watch,
        "implementation": implementation,
    }
    if isinstance(layer, Mamba1Layer):
        y, new_conv, new_ssm, statistic = mamba1_mixer(layer, config, u, conv, ssm, **scan)
    else:
        y, new_conv, new_ssm, statistic = mamba2_mixer(layer, config, u, conv, ssm, **scan)
    return residual + y.astype(residual.dtype), new_conv.astype(conv.dtype), new_ssm.astype(ssm.dtype), statistic


@functools.partial(jax.jit, static_argnames=("config", "implementation"))
def _step_layer(
    layer: Layer,
    config: MambaConfig,
    residual: Float[Array, "b m"],
    conv: Float[Array, "b w-1 channels"],
    ssm: Float[Array, "b ..."],
    *,
    implementation: Implementation | None,
) -> tuple[Array, Array, Array]:
    def step(layer: Layer, residual: Array, conv: Array, ssm: Array, mix: Any = None) -> tuple[Array, Array, Array]:
        u = _block_norm(config, residual, layer.norm, layer.norm_bias)
        if isinstance(layer, Mamba1Layer):
            y, new_conv, new_ssm = mamba1_step(layer, config, u, conv, ssm, mix)
        else:
            y, new_conv, new_ssm = mamba2_step(layer, config, u, conv, ssm, mix)
        return residual + y.astype(residual.dtype), new_conv.astype(conv.dtype), new_ssm.astype(ssm.dtype)

    def cuda(layer: Layer, residual: Array, conv: Array, ssm: Array) -> tuple[Array, Array, Array]:
        if isinstance(layer, Mamba1Layer):
            return mamba1_gpu.mamba1_layer_step(layer, config, residual, conv, ssm)
        return mamba2_gpu.mamba2_layer_step(layer, config, residual, conv, ssm)

    over = None
    if config.layer == "mamba2" and config.ngroups == 1 and not config.norm_before_gate:
        over = device_axis(implementation, (config.nheads,), (layer, residual, conv, ssm))

    def tpu(layer: Layer, residual: Array, conv: Array, ssm: Array) -> tuple[Array, Array, Array]:
        if isinstance(layer, Mamba1Layer):
            return step(layer, residual, conv, ssm, mamba1_tpu.mix)
        mix = mamba2_tpu.mix if over is None else mix_over_devices(mamba2_tpu.mix, over)
        return step(layer, residual, conv, ssm, mix)

    if over is None:
        declined = _step_declines(layer, config, conv, ssm)
    else:
        declined = ON_MESH, _step_declines(layer, heads_of_device(config, over), conv, ssm)[1]
    chosen = dispatch(
        implementation,
        xla=step,
        cuda=Kernel(cuda, declined[0]),
        tpu=Kernel(tpu, declined[1]),
        over_devices=over is not None,
    )
    return chosen(layer, residual, conv, ssm)


def _step_declines(layer: Layer, config: MambaConfig, conv: Array, ssm: Array) -> tuple[str | None, str | None]:
    """Why the kernels for GPUs do not step a layer, and why those for TPUs do not."""
    batch = conv.shape[0]
    if isinstance(layer, Mamba1Layer):
        return mamba1_gpu.declines(layer, config, batch), mamba1_tpu.declines(layer, config, conv, ssm)
    return mamba2_gpu.declines(layer, config, batch), mamba2_tpu.declines(layer, config, conv, ssm)


def _step_head(
    params: Params, residual: Float[Array, "b m"], implementation: Implementation | None
) -> Float[Array, "b v"]:
    config = params.config
    weight = _head_weight(params)

    def xla(residual: Array, norm: Array, norm_bias: Array | None, weight: Array) -> Array:
        hidden = _block_norm(config, residual, norm, norm_bias)
        with jax.named_scope("head"):
            return linear(hidden, weight, out_dtype=jnp.float32)

    def cuda(residual: Array, norm: Array, norm_bias: Array | None, weight: Array) -> Array:
        logits, _ = matvec_kernel.matvec(
            weight, residual, norm=norm, eps=config.norm_eps, block_rows=4, name="norm_head"
        )
        return logits

    if on_mesh((residual, weight)):
        return xla(residual, params.norm_f, params.norm_f_bias, weight)
    declined = _head_declines(params, residual.shape[0])
    # A TPU's matrix unit takes a few rows as it takes many: XLA's product is all that a kernel could be there.
    chosen = dispatch(implementation, xla=xla, cuda=Kernel(cuda, declined), tpu=Kernel(xla, None))
    return chosen(residual, params.norm_f, params.norm_f_bias, weight)


def _head_declines(params: Params, batch: int) -> str | None:
    """Why the kernel for GPUs is not the head's."""
    if params.config.block_norm != "rms":
        return "a LayerNorm before the head"
    return matvec_kernel.declines(_head_weight(params), batch)


def _head_weight(params: Params) -> Float[Array, "v m"]:
    return params.embedding if params.lm_head is None else params.lm_head


def kernels_decline(config: MambaConfig, dtype: DTypeLike, batch: int, platform: str) -> tuple[str | None, str | None]:
    """Why a platform's kernels do not read so many rows of a model, and why they do not step them; None if they do.

    What is read is neither packed nor on several devices.
    """
    params = param_shapes(dataclasses.replace(config, n_layer=1), dtype)
    cache = jax.eval_shape(lambda: init_cache(params.config, batch, params.dtype))
    layer: Any = params.layers[0]

    def inputs(*shape: int) -> Any:
        return jax.ShapeDtypeStruct((batch, 1, *shape), params.dtype)

    if config.layer == "mamba1":
        x, A = inputs(config.d_inner), layer.A_log
        reading = declined_on(platform, scan_gpu.declines(x, A), scan_tpu.declines(x, x, A))
    else:
        x, B = inputs(config.nheads, config.headdim), inputs(config.ngroups, config.d_state)
        reading = declined_on(platform, ssd_gpu.declines(x, B), ssd_tpu.declines(x, B), hopper_only=True)
    layers = declined_on(platform, *_step_declines(layer, params.config, cache.conv[0], cache.ssm[0]))
    return reading, layers or declined_on(platform, _head_declines(params, batch), None)


def _block_norm(config: MambaConfig, residual: Array, weight: Array, bias: Array | None) -> Array:
    with jax.named_scope("norm"):
        if config.block_norm == "layer":
            return layer_norm(residual, weight, bias, config.norm_eps).astype(weight.dtype)
        return rms_norm(residual, weight, config.norm_eps).astype(weight.dtype)


def _check_block(
    params: Params,
    tokens: ArrayLike,
    lengths: ArrayLike | None,
    cache: MambaCache | None,
    chunk_size: ChunkSize | Literal["auto"],
) -> tuple[Array, Array | None, ChunkSize]:
    ids = _check_tokens(params, tokens, ndim=2)
    rows: Any = None
    batch, length = ids.shape
    if lengths is not None:
        rows = _as_integers("lengths", lengths, (batch,))
        if isinstance(rows, np.ndarray):
            if rows.min() < 1 or rows.max() > length:
                raise ValueError(f"lengths: got {rows.tolist()}, wanted each from 1 to {length}, the width of tokens")
            rows = rows.astype(np.int32)
    if cache is not None:
        check_cache(cache, params.config, batch, params.dtype)
    if isinstance(chunk_size, str) and chunk_size == "auto":
        chunk_size = default_chunk_size(jax.default_backend(), params.config.layer, length)
    else:
        chunk_size = as_chunk_size(chunk_size, params.config.n_layer)
    return ids, rows, chunk_size


def _check_tokens(params: Params, tokens: ArrayLike, ndim: int) -> Array:
    check_params(params)
    check_axes(params)
    ids = _as_integers("tokens", tokens, (None,) * ndim)
    if isinstance(ids, np.ndarray):
        rows = params.embedding.shape[0]
        if ids.min() < 0 or ids.max() >= rows:
            raise ValueError(f"tokens: got ids from {ids.min()} to {ids.max()}, wanted 0 to {rows - 1}")
        ids = ids.astype(np.int32)
    return cast(Array, ids)


def _as_integers(name: str, value: ArrayLike, shape: tuple[int | None, ...]) -> Array | np.ndarray:
    """Integers of a shape (None: any size above 0): a numpy array in the dtype they came in, or a traced array.

    Nothing is narrowed here: JAX would wrap 64 bits around to 32 without a word.
    """
    try:
        array: Any = (
            value if isinstance(value, jax.core.Tracer) else np.asarray(None if isinstance(value, BYTES) else value)
        )
    except jax.errors.TracerArrayConversionError:  # a list of traced numbers
        array = jnp.asarray(value)
    except (TypeError, ValueError, RuntimeError):  # rows of unequal lengths, arrays that numpy cannot read
        array = np.asarray(None)
    fits = len(array.shape) == len(shape) and all(
        size == wanted or (wanted is None and size > 0) for size, wanted in zip(array.shape, shape, strict=True)
    )
    if not fits or not jnp.issubdtype(array.dtype, jnp.integer):
        came = f"{value!r:.80}" if array.dtype == object else describe(array)
        sizes = ", ".join("any size above 0" if size is None else str(size) for size in shape)
        raise ValueError(f"{name}: got {came}, wanted integers of shape ({sizes})")
    return array


def _runs(segment_ids: Int[Array, "b l"] | np.ndarray) -> Int[Array, "b l"]:
    """Number the sequences in order, as the scans want them; neighbours of one id belong together."""
    if jnp.issubdtype(segment_ids.dtype, jnp.unsignedinteger):
        raise ValueError(f"segment_ids: got {segment_ids.dtype}, wanted signed integers (below 0 is padding)")
    xp = np if isinstance(segment_ids, np.ndarray) else jnp  # in numpy ids may have 64 bits
    begins = xp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))
    return xp.where(segment_ids < 0, xp.int32(-1), xp.cumsum(begins, axis=1, dtype=xp.int32))
