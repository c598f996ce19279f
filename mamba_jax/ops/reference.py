"""The recurrences as plain loops in float64 numpy: slow, obvious, and the truth that every op is tested against."""

import math
from typing import Any

import numpy as np
from jaxtyping import Float64

from mamba_jax.ops.dt import FASTEST


def _f64(a: Any) -> Float64[np.ndarray, "..."]:
    return np.asarray(a).astype(np.float64)


def _silu(x: Float64[np.ndarray, "..."]) -> Float64[np.ndarray, "..."]:
    return x / (1.0 + np.exp(-x))


def _step_size(dt: Any, dt_bias: Any, dt_softplus: bool, dt_limit: tuple[float, float]) -> Float64[np.ndarray, "..."]:
    dt = _f64(dt)
    if dt_bias is not None:
        dt = dt + _f64(dt_bias)
    if dt_softplus:
        dt = np.logaddexp(dt, 0.0)
    return np.clip(dt, *dt_limit)


def ssd_ref(
    x: Any,
    dt: Any,
    A: Any,
    B: Any,
    C: Any,
    *,
    D: Any = None,
    z: Any = None,
    dt_bias: Any = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    initial_state: Any = None,
) -> tuple[Float64[np.ndarray, "b l h p"], Float64[np.ndarray, "b h p n"]]:
    """Mamba-2's recurrence, one position after the other; arguments as in `mamba_jax.ops.ssd.ssd`."""
    x, A, B, C = _f64(x), np.maximum(_f64(A), FASTEST), _f64(B), _f64(C)
    b, seqlen, h, p = x.shape
    g, n = B.shape[2:]
    dt = _step_size(dt, dt_bias, dt_softplus, dt_limit)
    state = np.zeros((b, h, p, n)) if initial_state is None else _f64(initial_state).copy()
    y = np.zeros((b, seqlen, h, p))
    for t in range(seqlen):
        for i in range(h):
            group = i // (h // g)
            decay = np.exp(dt[:, t, i] * A[i])[:, None, None]
            enters = dt[:, t, i, None, None] * x[:, t, i, :, None] * B[:, t, group, None, :]
            state[:, i] = decay * state[:, i] + enters
            y[:, t, i] = (state[:, i] * C[:, t, group, None, :]).sum(-1)
    if D is not None:
        y = y + _f64(D).reshape(h, -1) * x
    return (y if z is None else y * _silu(_f64(z))), state


def selective_scan_ref(
    x: Any,
    dt: Any,
    A: Any,
    B: Any,
    C: Any,
    *,
    D: Any = None,
    z: Any = None,
    dt_bias: Any = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    initial_state: Any = None,
) -> tuple[Float64[np.ndarray, "b l d"], Float64[np.ndarray, "b n d"]]:
    """Mamba-1's recurrence, one position after the other; arguments as in `mamba_jax.ops.scan.selective_scan`."""
    x, A, B, C = _f64(x), np.maximum(_f64(A), FASTEST), _f64(B), _f64(C)
    b, seqlen, d = x.shape
    dt = _step_size(dt, dt_bias, dt_softplus, dt_limit)
    state = np.zeros((b, A.shape[1], d)) if initial_state is None else _f64(initial_state).copy()
    y = np.zeros((b, seqlen, d))
    for t in range(seqlen):
        state = np.exp(dt[:, t, None, :] * A.T) * state + B[:, t, :, None] * (dt[:, t] * x[:, t])[:, None, :]
        y[:, t] = (state * C[:, t, :, None]).sum(1)
    if D is not None:
        y = y + _f64(D) * x
    return (y if z is None else y * _silu(_f64(z))), state


def causal_conv1d_ref(
    x: Any, weight: Any, bias: Any = None, *, window: Any = None, activation: str | None = "silu"
) -> tuple[Float64[np.ndarray, "b l d"], Float64[np.ndarray, "b w-1 d"]]:
    """The causal depthwise convolution as a loop; arguments as in `mamba_jax.ops.conv.causal_conv1d`."""
    x, weight = _f64(x), _f64(weight)
    b, seqlen, d = x.shape
    w = weight.shape[1]
    row = np.concatenate([np.zeros((b, w - 1, d)) if window is None else _f64(window), x], axis=1)
    y = np.zeros((b, seqlen, d))
    for t in range(seqlen):
        for k in range(w):
            y[:, t] += weight[:, k] * row[:, t + k]
    if bias is not None:
        y = y + _f64(bias)
    return (_silu(y) if activation == "silu" else y), row[:, seqlen:]
