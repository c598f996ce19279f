"""Mamba-2's chunked scan in one kernel for Hopper GPUs; the equations are those of `ops/ssd.py`.

One block scans one head of one row from its first position to its last, in chunks of 64 that never leave the chip:

- a loading warpgroup keeps a ring of chunks of x, B, C and of the decays filled;
- a state warpgroup holds the state (p, n) in registers, hands a rounded copy of it to the next, and updates it;
- two output warpgroups take turns at the chunks: y = exp(s) (C state^T) + (C B^T * decays) x.

Differences of running sums are taken in float32 within one chunk, which is exact to well below a rounding of bfloat16,
in which the tensor cores read x, B, C and the rounded states. Float16 would do but for its range, which states leave.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from mamba_jax.ops.axes import pad_axis

CHUNK = 64
_STAGES = 4  # chunks in the ring; even, so that an output warpgroup meets every turn of its slots
_STATES = 2  # rounded states waiting for the output warpgroups, one for each
_WHOLE = ((),) if jax.__version_info__ < (0, 11) else ()  # the index that `plgpu.load` took before 0.11
_STATE, _LOAD = 2, 3  # warpgroups; 0 and 1 make the outputs
# Rows of the decays: s (running sum of dt A), r (s - log dt), both over log 2; exp(s_last - s) dt; exp(s_last).
_ROWS = 4


def declines(x: Array, B: Array) -> str | None:
    """Why the kernel does not take these arguments of `ops.ssd.ssd`; None if it does."""
    p, n = x.shape[-1], B.shape[-1]
    if x.dtype != jnp.bfloat16:
        return f"x of dtype {x.dtype} (wanted: bfloat16)"
    if p != 64 or n not in (64, 128):
        return f"headdim {p} and d_state {n} (wanted: 64, and 64 or 128)"
    return None


def ssd(
    x: Float[Array, "b l h p"],
    dt: Float[Array, "b l h"],
    dA: Float[Array, "b l h"],
    B: Float[Array, "b l g n"],
    C: Float[Array, "b l g n"],
    D: Float[Array, "h p"] | None,
    initial_state: Float[Array, "b h p n"],
    *,
    interpret: Any = False,
) -> tuple[Float[Array, "b l h p"], Float[Array, "b h p n"]]:
    """Scan whole rows.

    Args:
        x: inputs, bfloat16 like B and C.
        dt: step sizes after softplus and clamp, float32; 0 at padding.
        dA: dt A, float32, not below -128.
        B: input maps; head i uses group i // (h // g).
        C: output maps, like B.
        D: skip, float32.
        initial_state: float32.
        interpret: parameters of Pallas's interpreter for GPUs.

    Returns:
        y, and the float32 state after the last position.
    """
    b, l, h, p = x.shape  # noqa: E741
    chunks = -(-l // CHUNK)
    x, dt, dA, B, C = (pad_axis(a, 1, chunks * CHUNK) for a in (x, dt, dA, B, C))
    kernel = plgpu.kernel(
        partial(_kernel, has_skip=D is not None, interpret=bool(interpret)),
        out_type=(
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct(initial_state.shape, jnp.float32),
        ),
        grid=(h, b),
        grid_names=("head", "row"),
        num_threads=4,
        thread_name="wg",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    skip = jnp.zeros((h, p), jnp.float32) if D is None else D
    y, state = kernel(x, B, C, _decays(dt, dA), skip, initial_state)
    return y[:, :l], state


def _decays(dt: Float[Array, "b l h"], dA: Float[Array, "b l h"]) -> Float[Array, "b h c rows q"]:
    b, l, h = dt.shape  # noqa: E741
    dt, dA = (a.reshape(b, l // CHUNK, CHUNK, h).transpose(0, 3, 1, 2) for a in (dt, dA))
    up_to = (jnp.arange(CHUNK)[:, None] <= jnp.arange(CHUNK)).astype(jnp.float32)
    s = jnp.matmul(dA, up_to, precision=lax.Precision.HIGHEST)
    last = s[..., -1:]
    over = 1.0 / math.log(2.0)
    rows = (s * over, (s - jnp.log(dt)) * over, jnp.exp(last - s) * dt, jnp.broadcast_to(jnp.exp(last), s.shape))
    return jnp.stack(rows, axis=3)


def _kernel(x_ref, B_ref, C_ref, decays_ref, skip_ref, initial_ref, y_ref, final_ref, *, has_skip, interpret):
    _, length, h, p = x_ref.shape
    g, n = B_ref.shape[2:]
    dtype = x_ref.dtype
    chunks = length // CHUNK
    head, row, wg = lax.axis_index("head"), lax.axis_index("row"), lax.axis_index("wg")
    group = lax.div(head, jnp.int32(h // g))
    wgmma_rows, wgmma_columns = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)

    def tile(*shape: int) -> Any:
        return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)))

    def rows_of(ref, i):
        return ref.at[row, pl.ds(i * CHUNK, CHUNK)]

    # Pallas's interpreter knows no layouts, and multiplies neither transposed references nor arrays.
    def load_as(layout, ref, *, optimized=True):
        return ref[...] if interpret else plgpu.load(ref, *_WHOLE, layout=layout, optimized=optimized)

    def positions(shape, axis):
        if interpret:
            return lax.broadcasted_iota(jnp.int32, shape, axis)
        return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)

    def product(a, b, *, a_turned=False, b_turned=False, meanwhile=lambda: None):
        """`a @ b` in float32, of references or an array a, each transposed if turned, and what is done meanwhile."""
        m, k = a.shape[0] if not a_turned else a.shape[1], b.shape[0] if b_turned else b.shape[1]
        if interpret:
            a, b = (v if isinstance(v, jax.Array) else v[...] for v in (a, b))
            out = lax.dot(a.T if a_turned else a, b.T if b_turned else b, preferred_element_type=jnp.float32)
            return out, meanwhile()
        a = a.transpose((1, 0)) if a_turned else a
        b = b.transpose((1, 0)) if b_turned else b

        def multiply(acc):
            plgpu.wgmma(acc, a, b)
            done = meanwhile()
            return acc[...], done

        return pl.run_scoped(multiply, plgpu.ACC((m, k), jnp.float32))

    def entry(x, B, C, decays, weighted, state_copies, y, full, consumed, state_full, state_free):
        def load():
            plgpu.set_max_registers(40, action="decrease")

            def fetch(i):
                slot = lax.rem(i, jnp.int32(_STAGES))

                @pl.when(i >= _STAGES)
                def _():
                    plgpu.barrier_wait(consumed.at[slot])

                plgpu.copy_gmem_to_smem(rows_of(B_ref, i).at[:, group], B.at[slot], full.at[slot])
                plgpu.copy_gmem_to_smem(rows_of(C_ref, i).at[:, group], C.at[slot], full.at[slot])
                plgpu.copy_gmem_to_smem(rows_of(x_ref, i).at[:, head], x.at[slot], full.at[slot])
                plgpu.copy_gmem_to_smem(decays_ref.at[row, head, i], decays.at[slot], full.at[slot])

            pl.loop(0, chunks)(fetch)
            for i in range(max(0, chunks - _STAGES), chunks):
                plgpu.barrier_wait(consumed.at[i % _STAGES])

        def carry_state():
            plgpu.set_max_registers(152, action="increase")
            start = load_as(plgpu.Layout.WGMMA, initial_ref.at[row, head], optimized=False)

            def chunk(i, state):
                slot, copy = lax.rem(i, jnp.int32(_STAGES)), lax.rem(i, jnp.int32(_STATES))
                plgpu.barrier_wait(full.at[slot])
                to_end = load_as(wgmma_rows, decays.at[slot, 2])
                through = load_as(wgmma_rows, decays.at[slot, 3])
                x_chunk = load_as(plgpu.Layout.WGMMA, x.at[slot]).astype(jnp.float32)
                weighted[...] = (x_chunk * lax.broadcast_in_dim(to_end, (CHUNK, p), [0])).astype(dtype)
                plgpu.commit_smem()

                def hand_over():
                    @pl.when(i >= _STATES)
                    def _():
                        plgpu.barrier_wait(state_free.at[copy])

                    state_copies[copy] = state.astype(dtype)
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(state_full.at[copy])

                update, _ = product(weighted, B.at[slot], a_turned=True, meanwhile=hand_over)
                plgpu.barrier_arrive(consumed.at[slot])
                return state * lax.broadcast_in_dim(through, (p, n), [0]) + update

            final_ref[row, head] = lax.fori_loop(0, chunks, chunk, start)
            for i in range(max(0, chunks - _STATES), chunks):
                plgpu.barrier_wait(state_free.at[i % _STATES])

        def make_outputs():
            plgpu.set_max_registers(152, action="increase")
            if has_skip:
                skip = load_as(wgmma_columns, skip_ref.at[head], optimized=False)

            def chunk(turn, _):
                i = turn * 2 + wg
                slot, copy = lax.rem(i, jnp.int32(_STAGES)), lax.rem(i, jnp.int32(_STATES))
                plgpu.barrier_wait(full.at[slot])

                scores, _ = product(C.at[slot], B.at[slot], b_turned=True)
                s = load_as(wgmma_rows, decays.at[slot, 0])

                def weigh():
                    square = (CHUNK, CHUNK)
                    r = load_as(wgmma_columns, decays.at[slot, 1])
                    decay = jnp.exp2(lax.broadcast_in_dim(s, square, [0]) - lax.broadcast_in_dim(r, square, [1]))
                    causal = positions(square, 0) >= positions(square, 1)
                    return jnp.where(causal, scores * decay, 0.0).astype(dtype)

                plgpu.barrier_wait(state_full.at[copy])
                out, scores = product(C.at[slot], state_copies.at[copy], b_turned=True, meanwhile=weigh)
                plgpu.barrier_arrive(state_free.at[copy])
                inside, _ = product(scores, x.at[slot])
                out = out * lax.broadcast_in_dim(jnp.exp2(s), (CHUNK, p), [0]) + inside
                if has_skip:
                    x_chunk = load_as(plgpu.Layout.WGMMA, x.at[slot]).astype(jnp.float32)
                    out = out + x_chunk * lax.broadcast_in_dim(skip, (CHUNK, p), [1])

                plgpu.barrier_arrive(consumed.at[slot])

                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                y[wg] = out.astype(dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(y.at[wg], rows_of(y_ref, i).at[:, head])
                return _

            lax.fori_loop(0, lax.div(chunks - wg + 1, jnp.int32(2)), chunk, None)
            plgpu.wait_smem_to_gmem(0)

        pl.when(wg == _LOAD)(load)
        pl.when(wg == _STATE)(carry_state)
        pl.when(wg < _STATE)(make_outputs)

    pl.run_scoped(
        entry,
        x=tile(_STAGES, CHUNK, p),
        B=tile(_STAGES, CHUNK, n),
        C=tile(_STAGES, CHUNK, n),
        decays=plgpu.SMEM((_STAGES, _ROWS, CHUNK), jnp.float32),
        weighted=tile(CHUNK, p),
        state_copies=tile(_STATES, p, n),
        y=tile(2, CHUNK, p),
        full=plgpu.Barrier(num_arrivals=4, num_barriers=_STAGES),
        consumed=plgpu.Barrier(num_arrivals=2, num_barriers=_STAGES),
        state_full=plgpu.Barrier(num_barriers=_STATES),
        state_free=plgpu.Barrier(num_barriers=_STATES),
        collective_axes="wg",
    )
