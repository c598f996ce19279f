"""Causal depthwise convolution: y[t] = act(bias + sum_k weight[:, k] * x[t - (w - 1) + k]).

Inputs before the first are the window of a cache (raw inputs of the positions before), or zeros.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mamba_jax.ops.axes import take_positions
from mamba_jax.ops.checks import check_positions, check_rank, check_shape


def causal_conv1d(
    x: Float[Array, "b l d"],
    weight: Float[Array, "d w"],
    bias: Float[Array, "d"] | None,
    *,
    window: Float[Array, "b w-1 d"] | None = None,
    lengths: Int[Array, "b"] | None = None,
    segment_ids: Int[Array, "b l"] | None = None,
    activation: Literal["silu"] | None = "silu",
) -> tuple[Float[Array, "b l d"], Float[Array, "b w-1 d"]]:
    """Convolve along positions, in float32.

    Args:
        x: raw inputs.
        weight: one filter a channel; the last tap meets the current position.
        bias: added before the activation.
        window: the w-1 raw inputs before the first (valid) position; zeros if None. With segment_ids it belongs to the
            row's first sequence.
        lengths: valid positions of each row, the rest is padding on the right.
        segment_ids: sequence of each position; a tap sees inputs of its own sequence only. Below 0: padding.
        activation: "silu" or None.

    Returns:
        y in x's dtype, zero at padding; and the last w-1 raw inputs of (window ++ valid x), in the window's dtype. With
        segment_ids, those of the last valid position's sequence alone, zeros before them.

    Raises:
        ValueError: if shapes do not agree, or both lengths and segment_ids are given.
    """
    check_rank("x", x, "(b, l, d)")
    b, seqlen, d = x.shape
    w = _check_filter(weight, bias, d, activation)
    check_positions(lengths, segment_ids, b, seqlen)
    if window is None:
        window = jnp.zeros((b, w - 1, d), x.dtype)
    check_shape("window", window, (b, w - 1, d), "(b, w-1, d)")
    if segment_ids is not None:
        return _conv_segments(x, weight, bias, window, segment_ids, activation)

    # Only the first w-1 outputs see the window; added one by one they stay part of the loop over all outputs.
    y = _taps(jnp.pad(x.astype(jnp.float32), ((0, 0), (w - 1, 0), (0, 0))), weight, seqlen)
    edge = _taps(jnp.pad(window.astype(x.dtype), ((0, 0), (0, w - 1), (0, 0))), weight, w - 1)
    position = jnp.arange(seqlen)[:, None]
    for t in range(min(w - 1, seqlen)):
        y = jnp.where(position == t, y + edge[:, t : t + 1], y)
    y = _activate(y, bias, activation)
    if lengths is None:
        new = min(w - 1, seqlen)
        recent = x[:, seqlen - new :].astype(window.dtype)
        return y.astype(x.dtype), jnp.concatenate([window[:, new:], recent], axis=1)
    new_window = _window_at(window, x, lengths)
    valid = jnp.arange(seqlen) < lengths[:, None]
    return jnp.where(valid[..., None], y, 0.0).astype(x.dtype), new_window


def causal_conv1d_step(
    x: Float[Array, "b d"],
    weight: Float[Array, "d w"],
    bias: Float[Array, "d"] | None,
    window: Float[Array, "b w-1 d"],
    *,
    activation: Literal["silu"] | None = "silu",
) -> tuple[Float[Array, "b d"], Float[Array, "b w-1 d"]]:
    """Convolve one position.

    Args:
        x: raw input.
        weight: one filter a channel.
        bias: added before the activation.
        window: the w-1 raw inputs before.
        activation: "silu" or None.

    Returns:
        y in x's dtype, and the window moved on by one, in its own dtype.

    Raises:
        ValueError: if shapes do not agree.
    """
    check_rank("x", x, "(b, d)")
    b, d = x.shape
    w = _check_filter(weight, bias, d, activation)
    check_shape("window", window, (b, w - 1, d), "(b, w-1, d)")
    taps = weight.astype(jnp.float32)
    y = x.astype(jnp.float32) * taps[:, -1]
    for k in range(w - 1):
        y = y + window[:, k].astype(jnp.float32) * taps[:, k]
    y = _activate(y, bias, activation)
    return y.astype(x.dtype), jnp.concatenate([window, x[:, None].astype(window.dtype)], axis=1)[:, 1:]


def _check_filter(weight: Array, bias: Array | None, d: int, activation: str | None) -> int:
    check_rank("weight", weight, "(d, w)")
    w = weight.shape[1]
    check_shape("weight", weight, (d, w), "(d, w)")
    if bias is not None:
        check_shape("bias", bias, (d,), "(d,)")
    if activation not in ("silu", None):
        raise ValueError(f"activation: got {activation!r}, wanted 'silu' or None")
    return w


def _taps(
    row: Float[Array, "b l+w-1 d"],
    weight: Float[Array, "d w"],
    seqlen: int,
    ids: Int[Array, "b l+w-1"] | None = None,
) -> Float[Array, "b l d"]:
    """Sum of the shifted inputs times their taps; with ids, of those taps that stay in the sequence."""
    w = weight.shape[1]
    weight = weight.astype(jnp.float32)
    total = jnp.zeros((row.shape[0], seqlen, row.shape[2]), jnp.float32)
    for k in range(w):
        term = row[:, k : k + seqlen].astype(jnp.float32) * weight[:, k]
        if ids is not None:
            term = jnp.where((ids[:, k : k + seqlen] == ids[:, w - 1 :])[..., None], term, 0.0)
        total = total + term
    return total


def _window_at(
    window: Float[Array, "b w-1 d"], x: Float[Array, "b l d"], lengths: Int[Array, "b"]
) -> Float[Array, "b w-1 d"]:
    """The last w-1 inputs of (window ++ x[:length]) of each row."""
    kept = window.shape[1]
    at = lengths[:, None] + jnp.arange(kept)
    from_window = take_positions(window, jnp.minimum(at, kept - 1))
    from_x = take_positions(x, jnp.maximum(at - kept, 0)).astype(window.dtype)
    return jnp.where((at < kept)[..., None], from_window, from_x)


def _activate(y: Float[Array, "*b d"], bias: Float[Array, "d"] | None, activation: str | None) -> Float[Array, "*b d"]:
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    return jax.nn.silu(y) if activation == "silu" else y


def _conv_segments(
    x: Float[Array, "b l d"],
    weight: Float[Array, "d w"],
    bias: Float[Array, "d"] | None,
    window: Float[Array, "b w-1 d"],
    segment_ids: Int[Array, "b l"],
    activation: str | None,
) -> tuple[Float[Array, "b l d"], Float[Array, "b w-1 d"]]:
    """The convolution of packed or left-padded rows."""
    seqlen, w = x.shape[1], weight.shape[1]
    valid = segment_ids >= 0
    first = jnp.argmax(valid, axis=1)
    end = seqlen - jnp.argmax(valid[:, ::-1], axis=1)
    end = jnp.where(valid.any(axis=1), end, first)  # a row of padding keeps its window

    # The window stands right before the first valid position, wherever padding puts that, and takes its sequence's id.
    start = jnp.take_along_axis(segment_ids, first[:, None], axis=1)
    place = jax.vmap(lambda row, part, at: jax.lax.dynamic_update_slice_in_dim(row, part, at, axis=0))
    row = jnp.pad(jnp.where(valid[..., None], x, 0), ((0, 0), (w - 1, 0), (0, 0)))
    row = place(row, window.astype(x.dtype), first)
    ids = jnp.pad(segment_ids, ((0, 0), (w - 1, 0)), constant_values=-1)
    ids = place(ids, jnp.broadcast_to(start, (x.shape[0], w - 1)), first)

    y = _activate(_taps(row, weight, seqlen, ids), bias, activation)
    recent = end[:, None] + jnp.arange(w - 1)
    recent_ids = take_positions(ids, recent)
    kept = recent_ids == recent_ids[:, -1:]
    new_window = jnp.where(kept[..., None], take_positions(row, recent), 0)
    return jnp.where(valid[..., None], y, 0.0).astype(x.dtype), new_window.astype(window.dtype)
