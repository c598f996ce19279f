"""Mamba-1's selective scan for NVIDIA GPUs of Hopper's kind or newer; the equations are those of `ops/scan.py`.

A block of 128 threads runs the recurrence over a whole row, for few channels: a thread holds 2 or 4 numbers of a
channel's state in registers, so that the neighbours that share a channel sum its output by exchanging registers. What a
channel needs once a position (softplus, gate, D) is done for a stretch of positions at a time, before and after the
recurrence, in shared memory. An exponential for each number of the state and position is what bounds the time.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from mamba_jax.ops.axes import pad_axis
from mamba_jax.pallas_kernels.gpu.common import LANES, THREADS, WARPS, Registers, silu

_STATE = 16  # d_state
_POSITIONS = 64  # a copy into shared memory
_GROUP = 16  # positions whose operands are read together
_BLOCKS = 132  # multiprocessors of a large GPU: with fewer blocks, a thread takes less of a state


def declines(x: Array, A: Array) -> str | None:
    """Why the kernel does not take these arguments of `ops.scan.selective_scan`; None if it does."""
    d, n = A.shape
    if d % 32 or n != _STATE:
        return f"{d} channels and d_state {n} (wanted: a multiple of 32, and {_STATE})"
    if x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"x of dtype {x.dtype} (wanted: bfloat16, float16 or float32)"
    return None


def selective_scan(
    x: Float[Array, "b l d"],
    dt: Float[Array, "b l d"],
    A: Float[Array, "d n"],
    B: Float[Array, "b l n"],
    C: Float[Array, "b l n"],
    D: Float[Array, "d"] | None,
    z: Float[Array, "b l d"] | None,
    dt_bias: Float[Array, "d"] | None,
    lengths: Int[Array, "b"] | None,
    initial_state: Float[Array, "b n d"],
    *,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
    interpret: Any = False,
) -> tuple[Float[Array, "b l d"], Float[Array, "b n d"]]:
    """Scan whole rows; arguments and results are those of `ops.scan.selective_scan`."""
    b, l, d = x.shape  # noqa: E741
    float32 = jnp.float32
    padded = -(-l // _POSITIONS) * _POSITIONS
    x, dt, B, C = (pad_axis(a, 1, padded) for a in (x, dt, B.astype(float32), C.astype(float32)))
    gate = () if z is None else (pad_axis(z, 1, padded),)
    rates = A.astype(float32) * (1.0 / math.log(2.0))
    channels = jnp.stack([jnp.zeros((d,), float32) if a is None else a.astype(float32) for a in (dt_bias, D)])
    lengths = jnp.full((b,), l, jnp.int32) if lengths is None else jnp.minimum(lengths.astype(jnp.int32), l)
    numbers = 4 if b * d >= 32 * _BLOCKS else 2  # of a state in a thread
    width = THREADS * numbers // _STATE  # channels of a block
    kernel: Any = plgpu.kernel(
        partial(_kernel, numbers, dt_softplus, dt_limit, interpret),
        out_type=(jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct((b, d, _STATE), float32)),
        grid=(d // width, b),
        grid_names=("tile", "row"),
        scratch_types=[plgpu.SMEM((_POSITIONS, width), float32)] * 3,
        interpret=interpret,
        # Automatic barriers would stand around every access to shared memory.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )
    y, state = kernel(x, dt, B, C, *gate, rates, channels, lengths, initial_state.swapaxes(1, 2))
    return y[:, :l], state.swapaxes(1, 2)


def _kernel(numbers, dt_softplus, dt_limit, interpret, *refs):
    *inputs, rates_ref, channels_ref, lengths_ref, initial_ref, y_ref, final_ref, dt_s, xdt_s, y_s = refs
    width = THREADS * numbers // _STATE
    registers = Registers(interpret)
    load, store, spread = registers.load, registers.store, registers.spread
    # (channels, state): neighbours of a warp share a channel.
    of_state = plgpu.Layout.TILED(
        plgpu.Tiling(((width, _STATE), (width // WARPS, numbers))), warp_dims=(-4,), lane_dims=(-3, -2), vector_dim=-1
    )
    # (positions, channels): four neighbouring channels a thread.
    rows = 4 * LANES // width  # of a warp
    of_stretch = plgpu.Layout.TILED(
        plgpu.Tiling(((WARPS * rows, width), (rows, 4))), warp_dims=(-4,), lane_dims=(-3, -2), vector_dim=-1
    )
    stretch, whole = (_POSITIONS, width), (slice(None), slice(None))
    tile, row = lax.axis_index("tile"), lax.axis_index("row")
    channels = pl.ds(tile * width, width)
    rates = load(rates_ref, (channels, slice(None)), of_state)
    bias, skip = (load(channels_ref, (i, channels), of_stretch.reduce(0)) for i in range(2))
    length = lengths_ref[row]

    def step_sizes(raw, first):
        dt = raw.astype(jnp.float32) + spread(bias, stretch, 1, of_stretch)
        if dt_softplus:
            dt = _softplus(dt)
        if dt_limit != (0.0, math.inf):
            dt = jnp.minimum(jnp.maximum(dt, dt_limit[0]), dt_limit[1])
        if interpret:
            positions = lax.broadcasted_iota(jnp.int32, stretch, 0)
        else:
            positions = plgpu.broadcasted_iota(jnp.int32, stretch, 0, layout=of_stretch)
        return jnp.where(positions < length - first, dt, 0.0)  # whatever dt is at padding, NaN too

    def recur(B, C, group, state):
        places = [group * _GROUP + t for t in range(_GROUP)]

        def each(ref, axis):
            return [
                spread(load(ref, (t, slice(None)), of_state.reduce(1 - axis)), rates.shape, axis, of_state)
                for t in places
            ]

        steps, inputs, maps_in, maps_out = each(dt_s, 0), each(xdt_s, 0), each(B, 1), each(C, 1)
        outputs = []
        for dt, xdt, B_t, C_t in zip(steps, inputs, maps_in, maps_out, strict=True):
            state = jnp.exp2(dt * rates) * state + xdt * B_t
            outputs.append(jnp.sum(state * C_t, axis=1))
        for t, y in zip(places, outputs, strict=True):
            store(y_s, (t, slice(None)), y)
        return state

    def advance(index, x_ref, raw_ref, B, C, *rest):
        *gate, state = rest
        first = index[0] * _POSITIONS
        x = load(x_ref, whole, of_stretch).astype(jnp.float32)
        dt = step_sizes(load(raw_ref, whole, of_stretch), first)
        store(dt_s, whole, dt)
        store(xdt_s, whole, x * dt)
        plgpu.commit_smem()
        state = lax.fori_loop(0, _POSITIONS // _GROUP, partial(recur, B, C), state)
        plgpu.commit_smem()
        y = load(y_s, whole, of_stretch) + x * spread(skip, stretch, 1, of_stretch)
        if gate:
            y = y * silu(load(gate[0], whole, of_stretch).astype(jnp.float32))
        store(y_ref, (row, pl.ds(first, _POSITIONS), channels), y.astype(y_ref.dtype))
        plgpu.commit_smem()  # all threads have read: the next copy may begin
        return state

    of_channels = plgpu.BlockSpec((_POSITIONS, width), lambda i: (i, tile))
    of_maps = plgpu.BlockSpec((_POSITIONS, _STATE), lambda i: (i, 0))
    run = plgpu.emit_pipeline(
        advance,
        grid=(inputs[0].shape[1] // _POSITIONS,),
        in_specs=[of_channels, of_channels, of_maps, of_maps, of_channels][: len(inputs)],
        max_concurrent_steps=2,
        init_carry=load(initial_ref, (row, channels, slice(None)), of_state),
    )
    store(final_ref, (row, channels, slice(None)), run(*(a.at[row] for a in inputs)))


def _softplus(x: Array) -> Array:
    """log(1 + exp(x)), with log(1 + u) = 2 atanh(u / (2 + u)) by its series: a fast logarithm is coarse near 1."""
    u = jnp.exp(-jnp.abs(x))
    s = u / (2.0 + u)
    square = s * s
    series = jnp.full_like(x, 1 / 15)
    for k in (13, 11, 9, 7, 5, 3, 1):
        series = series * square + 1 / k
    return jnp.maximum(x, 0.0) + 2.0 * s * series
