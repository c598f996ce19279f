"""What the decode kernels share: loads, layouts, and calls that update arrays in place.

The kernels read device memory straight into registers, 2 to 16 bytes a thread at a time, and ask for everything before
they use anything: at batch 1 each byte is needed once, so shared memory would only add a stop on the way.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

WARPS, LANES = 4, 32
THREADS = WARPS * LANES  # of a block
MAX_BATCH = 1  # rows of a decode step
_LOADS_A_VIEW = "idx" not in inspect.signature(plgpu.load).parameters or (
    inspect.signature(plgpu.load).parameters["idx"].default is not inspect.Parameter.empty
)  # jax 0.11


class Registers:
    """Moves arrays between device memory and registers; in the interpreter, which knows no layouts, plainly."""

    def __init__(self, interpret: Any) -> None:
        self._plain = bool(interpret)

    def load(self, ref: Any, index: tuple[Any, ...], layout: Any, *, turned: bool = False) -> Any:
        """ref[index], with its two axes exchanged if turned, spread over the threads as the layout says."""
        if self._plain:
            return ref[index].T if turned else ref[index]
        load: Any = plgpu.load
        if turned:
            ref, index = ref.at[index].transpose((1, 0)), (slice(None), slice(None))
        if _LOADS_A_VIEW:
            return load(ref.at[index], layout=layout, optimized=False)
        return load(ref, index, layout=layout, optimized=False)

    def store(self, ref: Any, index: tuple[Any, ...], value: Any, *, turned: bool = False) -> None:
        """ref[index] = value; with the two axes of ref[index] exchanged if turned."""
        if self._plain:
            ref[index] = value.T if turned else value
            return
        view = ref.at[index].transpose((1, 0)) if turned else ref.at[index]
        if hasattr(plgpu, "store"):  # since jax 0.11
            plgpu.store(view, value, optimized=False)
        else:
            view[...] = value

    def spread(self, x: Any, shape: tuple[int, ...], axes: int | tuple[int, ...], layout: Any) -> Any:
        """An array along some axes of a larger one, the same at every place of the others."""
        x = lax.broadcast_in_dim(x, shape, (axes,) if isinstance(axes, int) else axes)
        return x if self._plain else plgpu.layout_cast(x, layout)


def columns_layout(rows: int, vector: int) -> Any:
    """Columns over all threads of a block, `vector` neighbours a thread; each thread has all `rows`."""
    tiling = plgpu.Tiling(((rows, THREADS * vector), (LANES * vector,), (vector,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


def rows_layout(vector: int) -> Any:
    """Every fourth row to a warp, columns over its lanes, `vector` neighbours a lane."""
    tiling = plgpu.Tiling(((WARPS, LANES * vector), (vector,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


def call(
    body: Callable[..., None],
    name: str,
    grid: Sequence[int],
    inputs: Sequence[jax.Array],
    mutable: Sequence[jax.Array],
    out: jax.ShapeDtypeStruct,
    interpret: Any,
) -> tuple[jax.Array, ...]:
    """Run body(ids, *inputs, *mutable, out) on each block of a grid.

    Returns the output, then the mutable arrays as the blocks left them: XLA passes them on without a copy where nothing
    else wants the old ones.
    """
    axes = tuple(f"axis_{i}" for i in range(len(grid)))

    def run(refs: Sequence[Any]) -> jax.Array:
        def kernel(*args: Any) -> None:
            body(tuple(lax.axis_index(axis) for axis in axes), *args[:-1], *refs, args[-1])

        kernel_call: Any = pl.kernel(
            kernel,
            out_type=(out,),
            mesh=plgpu.Mesh(grid=tuple(grid), grid_names=axes),
            name=name,
            compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True, reduction_scratch_bytes=1024),
            interpret=interpret,
        )
        return kernel_call(*inputs)[0]

    if interpret:  # the interpreter of jax 0.10 wants to be told which memory a reference is in
        refs = [jax.new_ref(array, memory_space=plgpu.GMEM) for array in mutable]
        y = run(refs)
        return (y, *(jax.freeze(ref) for ref in refs))

    def update(refs: tuple[Any, ...]) -> None:
        refs[-1][...] = run(refs[:-1])

    *updated, y = pl.run_state(update)((*mutable, jnp.zeros(out.shape, out.dtype)))
    return (y, *updated)


def vector_width(size: int) -> int | None:
    """Widest vector of 2, 4 or 8 columns a thread with which whole blocks of threads cover an axis; None if none."""
    return next((vector for vector in (8, 4, 2) if size % (THREADS * vector) == 0), None)


def unrounded(dtype: Any) -> Any:
    """What gated outputs are kept in between kernels: a weight's dtype, but for float16, whose range they may leave."""
    return jnp.float32 if dtype == jnp.float16 else dtype


def silu(x: Any) -> Any:
    """Multiply x by its sigmoid."""
    return x / (1.0 + jnp.exp(-x))


def softplus(x: Any) -> Any:
    """log(1 + exp(x)), exact for small exp(x) too: log(u) e / (u - 1) with u = 1 + e, rounded alike above and below."""
    e = jnp.exp(-jnp.abs(x))
    u = 1.0 + e
    near_one = u == 1.0
    return jnp.maximum(x, 0.0) + jnp.where(near_one, e, e * (jnp.log(u) / jnp.where(near_one, 1.0, u - 1.0)))


def convolve(taps: Sequence[Any], bias: Any | None, window: Sequence[Any], x: Any) -> Any:
    """Silu of one position of a depthwise convolution, in float32, from the positions before it and x itself."""
    y = x.astype(jnp.float32) * taps[-1].astype(jnp.float32)
    for tap, past in zip(taps, window, strict=False):
        y = y + past.astype(jnp.float32) * tap.astype(jnp.float32)
    return silu(y if bias is None else y + bias.astype(jnp.float32))
