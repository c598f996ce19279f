"""The norms against their definitions in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from mamba_jax.ops.norm import gated_rms_norm, layer_norm, rms_norm
from tests.ops.cases import error
from tests.tolerances import OP_ATOL

EPS = 1e-2  # large, so that a test would notice where it is added
RNG = np.random.default_rng(0)
Y, Z = (RNG.standard_normal((2, 3, 12)).astype(np.float32) for _ in range(2))
WEIGHT, BIAS = (RNG.standard_normal(12).astype(np.float32) for _ in range(2))


def unit_rms(x):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS)


def silu(x):
    return x / (1 + np.exp(-x))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_results_have_the_weights_dtype(dtype):
    """A float32 residual stream goes into a norm, the model's dtype comes out; inside all is float32."""
    weight, bias = jnp.asarray(WEIGHT, dtype), jnp.asarray(BIAS, dtype)
    w, b = np.asarray(weight, np.float64), np.asarray(bias, np.float64)
    y = Y.astype(np.float64)
    centred = y - y.mean(-1, keepdims=True)
    for got, want in (
        (rms_norm(Y, weight, EPS), unit_rms(y) * w),
        (layer_norm(Y, weight, bias, EPS), unit_rms(centred) * w + b),
        (layer_norm(Y, weight, None, EPS), unit_rms(centred) * w),
        (gated_rms_norm(Y, Z, weight, EPS), unit_rms(y * silu(Z)) * w),
    ):
        assert got.dtype == dtype
        assert error(got, want) < min(OP_ATOL[dtype], 2e-2)


def test_norm_without_weight_keeps_the_inputs_dtype():
    got = rms_norm(jnp.asarray(Y, jnp.bfloat16), None, EPS)
    assert got.dtype == jnp.bfloat16
    assert error(rms_norm(Y, None, EPS), unit_rms(Y.astype(np.float64))) < 1e-6


def test_float16_squares_do_not_overflow():
    got = rms_norm(jnp.full((1, 8), 300.0, jnp.float16), jnp.ones(8, jnp.float16), EPS)
    assert error(got, np.ones((1, 8))) < OP_ATOL["float16"]


@pytest.mark.parametrize("ngroups", [1, 3, 12])
@pytest.mark.parametrize("before", [False, True])
def test_gated_norm_a_group_at_a_time(ngroups, before):
    y, gate = Y.astype(np.float64), silu(Z.astype(np.float64))
    groups = (y if before else y * gate).reshape(2, 3, ngroups, -1)
    want = unit_rms(groups).reshape(y.shape) * WEIGHT * (gate if before else 1.0)
    assert error(gated_rms_norm(Y, Z, WEIGHT, EPS, ngroups=ngroups, norm_before_gate=before), want) < 1e-5


def test_arguments_that_do_not_agree_are_refused_by_name():
    for match, call in (
        (r"^weight: got shape \(11,\)", lambda: rms_norm(Y, WEIGHT[1:], EPS)),
        (r"^weight: got shape \(11,\)", lambda: layer_norm(Y, WEIGHT[1:], BIAS, EPS)),
        (r"^bias: got shape \(11,\)", lambda: layer_norm(Y, WEIGHT, BIAS[1:], EPS)),
        (r"^z: got shape", lambda: gated_rms_norm(Y, Z[:1], WEIGHT, EPS)),
        (r"^ngroups: got 5", lambda: gated_rms_norm(Y, Z, WEIGHT, EPS, ngroups=5)),
        (r"^ngroups: got 0", lambda: gated_rms_norm(Y, Z, WEIGHT, EPS, ngroups=0)),
    ):
        with pytest.raises(ValueError, match=match):
            call()
