"""A weight times few rows, with what stands before and after it in a decode step: y = residual + W norm(x).

Each block has a few rows of the weight and reads all of x, so the norm's scale needs no other block. Outputs in a given
range also go through the causal convolution, whose window moves on by one.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from mamba_jax.pallas_kernels.gpu.common import MAX_BATCH, Registers, call, columns_layout, convolve, vector_width


class Conv(NamedTuple):
    """The convolution of some channels of a layer, and where the matrix product has their raw values."""

    weight: Float[Array, "channels w"]
    bias: Float[Array, "channels"] | None
    window: Float[Array, "b w-1 channels"]  # updated in place


def declines(weight: Any, batch: int) -> str | None:
    """Why the kernel does not take a weight and so many rows; None if it does."""
    if batch > MAX_BATCH:
        return f"batches of {batch} (wanted: at most {MAX_BATCH})"
    if weight.dtype not in (jnp.bfloat16, jnp.float16):
        return f"weights of dtype {weight.dtype} (wanted: bfloat16 or float16)"
    if vector_width(weight.shape[1]) is None:
        return f"a weight of {weight.shape[1]} columns (wanted: a multiple of 256)"
    if weight.shape[0] % 2:
        return f"a weight of {weight.shape[0]} rows (wanted: an even number)"
    return None


@partial(jax.jit, static_argnames=("eps", "conv_rows", "block_rows", "out_dtype", "name", "interpret"))
def matvec(
    weight: Float[Array, "o i"],
    x: Float[Array, "b i_or_more"],
    *,
    norm: Float[Array, "i"] | None = None,
    eps: float = 0.0,
    residual: Float[Array, "b o"] | None = None,
    conv: Conv | None = None,
    conv_rows: tuple[int, int, int] = (0, 0, 0),
    block_rows: int = 4,
    out_dtype: Any = jnp.float32,
    name: str = "matvec",
    interpret: Any = None,
) -> tuple[Float[Array, "b o"], Float[Array, "b w-1 channels"] | None]:
    """Multiply few rows by a weight, accumulating in float32.

    Args:
        weight: (out, in), bfloat16 or float16; in is a multiple of 256.
        x: inputs of any float dtype, used in float32; columns beyond the weight's are not read.
        norm: scale of an RMSNorm of x; None for none.
        eps: of that norm.
        residual: added to the product.
        conv: convolution of some of the outputs.
        conv_rows: (start, stop, channel): outputs start to stop are the channels from `channel` on of `conv`.
        block_rows: rows of the weight a block multiplies; a smaller divisor is taken where it does not fit.
        out_dtype: of the result.
        name: of the kernel in profiles.
        interpret: as in `pl.kernel`.

    Returns:
        y, and the convolution's window moved on by one (None without a convolution).
    """
    (o, k), b = weight.shape, x.shape[0]
    start, stop, channel = conv_rows
    rows = next(r for r in (block_rows, 4, 2) if not any(size % r for size in (o, start, stop, channel)))
    vector = vector_width(k)
    assert vector is not None
    layout = columns_layout(rows, vector)
    at_rows, at_columns = layout.reduce(1), layout.reduce(0)
    registers = Registers(interpret)
    load = registers.load
    optional = {"norm": norm, "residual": residual}
    if conv is not None:
        optional |= {"taps": conv.weight, "bias": conv.bias}
    given = {key: array for key, array in optional.items() if array is not None}

    def body(ids: tuple[Any], w_ref: Any, x_ref: Any, *refs: Any) -> None:
        at = dict(zip(given, refs, strict=False))
        y_ref = refs[-1]
        first = ids[0] * rows

        def block(convolved: bool) -> None:
            here = pl.ds(first, rows)
            w = load(w_ref, (here, slice(None)), layout)
            scale = None if norm is None else load(at["norm"], (slice(None),), at_columns)
            if convolved:
                window = refs[-2]
                width = at["taps"].shape[1]
                channels = pl.ds(first - start + channel, rows)
                taps = [load(at["taps"], (channels, j), at_rows) for j in range(width)]
                bias = load(at["bias"], (channels,), at_rows) if "bias" in at else None

            def one(n: Any, _: None) -> None:
                values = load(x_ref, (n, pl.ds(0, k)), at_columns)
                added = None if residual is None else load(at["residual"], (n, here), at_rows)
                past = [load(window, (n, j, channels), at_rows) for j in range(width - 1)] if convolved else []
                values = values.astype(jnp.float32)
                scaled = values if scale is None else values * scale.astype(jnp.float32)
                y = jnp.sum(w.astype(jnp.float32) * registers.spread(scaled, (rows, k), 1, layout), axis=1)
                if norm is not None:
                    y = y * lax.rsqrt(jnp.sum(values * values, axis=0) / k + eps)
                if added is not None:
                    y = y + added.astype(jnp.float32)
                if convolved:
                    raw = y.astype(window.dtype)
                    y = convolve(taps, bias, past, raw)
                    for j, value in enumerate([*past[1:], raw]):
                        registers.store(window, (n, j, channels), value)
                registers.store(y_ref, (n, here), y.astype(out_dtype))

            if b == 1:
                one(0, None)
            else:
                lax.fori_loop(0, b, one, None)

        if conv is None:
            block(False)
        else:
            inside = (first >= start) & (first < stop)
            pl.when(inside)(partial(block, True))
            pl.when(jnp.logical_not(inside))(partial(block, False))

    out = jax.ShapeDtypeStruct((b, o), out_dtype)
    mutable = [] if conv is None else [conv.window]
    y, *windows = call(body, name, (o // rows,), [weight, x, *given.values()], mutable, out, interpret)
    return y, windows[0] if windows else None
