"""What the TPU kernels share: products by the rules of `ops/linear.py`, activations, and blocks of axes."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

LANES = 128  # of a vector register
VMEM_LIMIT = 16 * 1024 * 1024  # bytes a kernel may take where the least is to be had


def dot(a: Any, b: Any, a_axis: int, b_axis: int, dtype: Any) -> Any:
    """Contract one axis of each of two matrices, as operands of `dtype`, into float32."""
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None
    return lax.dot_general(
        a.astype(dtype),
        b.astype(dtype),
        (((a_axis,), (b_axis,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def silu(x: Any) -> Any:
    """Multiply x by its sigmoid."""
    return x / (1.0 + jnp.exp(-x))


def softplus(x: Any) -> Any:
    """log(1 + exp(x)), in the form that does not overflow."""
    return jnp.maximum(x, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(x)))


def convolve(taps: Any, bias: Any | None, window: Any, x: Any) -> Any:
    """Silu of one position of a depthwise convolution: taps (w, d), the window (w-1, d) before it, and x (1, d)."""
    taps = taps.astype(jnp.float32)
    y = x * taps[-1:] + jnp.sum(window * taps[:-1], axis=0, keepdims=True)
    return silu(y if bias is None else y + bias.astype(jnp.float32))


def padded(rows: int, columns: int) -> int:
    """Elements of a float32 matrix in whole registers."""
    return -(-rows // 8) * 8 * -(-columns // LANES) * LANES


def declined_dtype(**arrays: jax.Array) -> str | None:
    """Which of the arrays is of a dtype that the kernels do not compute with; TPUs have no float16."""
    for name, array in arrays.items():
        if array.dtype not in (jnp.bfloat16, jnp.float32):
            return f"{name} of dtype {array.dtype} (wanted: bfloat16 or float32)"
    return None


def declined_vmem(needed: int) -> str | None:
    """What to say of a kernel that needs more memory than there is for sure."""
    return f"{needed} bytes of VMEM (wanted: at most {VMEM_LIMIT})" if needed > VMEM_LIMIT else None


def lane_block(size: int, limit: int) -> int | None:
    """Largest part of an axis of lanes that is whole registers, or the whole axis, within a limit; None if none is."""
    if size <= limit:
        return size
    return next((part for part in range(limit - limit % LANES, 0, -LANES) if size % part == 0), None)
