"""The convolution against the loop: lengths around its width, windows, unequal rows, packed and left-padded rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from mamba_jax.ops.conv import causal_conv1d, causal_conv1d_step
from mamba_jax.ops.reference import causal_conv1d_ref, ssd_ref
from mamba_jax.ops.ssd import ssd
from tests.ops.cases import error
from tests.tolerances import OP_ATOL

D, W = 10, 4


def inputs(length, b=2, w=W, seed=0):
    rng = np.random.default_rng(seed)
    make = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    return make(b, length, D), make(D, w), make(D), make(b, w - 1, D)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 20])
@pytest.mark.parametrize("w", [1, 2, 4])
@pytest.mark.parametrize("activation", ["silu", None])
def test_u14_any_length_with_and_without_window(length, w, activation):
    """The new window is the last w-1 of (old window ++ inputs), also for fewer inputs than that."""
    x, weight, bias, window = inputs(length, w=w)
    for old, b in ((window, bias), (None, None)):
        y, new = causal_conv1d(x, weight, b, window=old, activation=activation)
        want, want_new = causal_conv1d_ref(x, weight, b, window=old, activation=activation)
        assert error(y, want) < 1e-5
        assert error(new, want_new) == 0.0


def test_u14_branches_leave_their_snapshot_alone():
    x, weight, bias, window = inputs(2)
    snapshot = jnp.asarray(window)
    _, one = causal_conv1d(x[:, :1], weight, bias, window=snapshot)
    _, two = causal_conv1d(x, weight, bias, window=snapshot)
    assert error(snapshot, window) == 0.0
    assert error(one, np.concatenate([window[:, 1:], x[:, :1]], axis=1)) == 0.0
    assert error(two, np.concatenate([window[:, 2:], x], axis=1)) == 0.0


@pytest.mark.parametrize("prefill", [1, 3, 4, 5])
def test_u26_u27_steps_continue_the_prefill(prefill):
    """The window holds raw inputs: no bias, no activation."""
    x, weight, bias, _ = inputs(prefill + 3)
    want, _ = causal_conv1d_ref(x, weight, bias)
    _, window = causal_conv1d(x[:, :prefill], weight, bias)
    for t in range(prefill, prefill + 3):
        y, window = causal_conv1d_step(x[:, t], weight, bias, window)
        assert error(y, want[:, t]) < 1e-5
    assert error(window, x[:, -3:]) == 0.0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtypes(dtype):
    x, weight, bias, window = (jnp.asarray(a, dtype) for a in inputs(9))
    y, new = causal_conv1d(x, weight, bias, window=window)
    want, want_new = causal_conv1d_ref(*(np.asarray(a, np.float32) for a in (x, weight, bias)), window=window)
    assert (y.dtype, new.dtype) == (dtype, dtype)
    assert error(y, want) < OP_ATOL[dtype]
    assert error(new, want_new) == 0.0
    step, new = causal_conv1d_step(x[:, 0], weight, bias, window.astype(jnp.float32))
    assert (step.dtype, new.dtype) == (dtype, jnp.float32)
    assert error(step, want[:, 0]) < OP_ATOL[dtype]


def test_a_single_tap_has_an_empty_window():
    x, weight, bias, _ = inputs(5, w=1)
    want, _ = causal_conv1d_ref(x, weight, bias)
    ids = np.repeat([[-1, 0, 1, -1]], [1, 2, 1, 1], axis=1).repeat(2, 0)
    for more, valid in (({}, [0, 5]), ({"lengths": np.array([3, 3])}, [0, 3]), ({"segment_ids": ids}, [1, 4])):
        y, window = causal_conv1d(x, weight, bias, **more)
        assert window.shape == (2, 0, D)
        assert error(y[:, slice(*valid)], want[:, slice(*valid)]) < 1e-5
    for t in range(5):
        y, window = causal_conv1d_step(x[:, t], weight, bias, window)
        assert window.shape == (2, 0, D)
        assert error(y, want[:, t]) < 1e-5


def test_u04_window_of_unequal_rows_ends_at_their_last_position():
    x, weight, bias, window = inputs(12, b=4)
    lengths = [0, 2, 5, 12]
    y, new = jax.jit(causal_conv1d)(x, weight, bias, window=window, lengths=jnp.array(lengths))
    for row, length in enumerate(lengths):
        one = slice(row, row + 1)
        want, want_new = causal_conv1d_ref(x[one, :length], weight, bias, window=window[one])
        assert error(y[one, :length], want) < 1e-5
        assert error(y[one, length:], np.zeros((1, 12 - length, D))) == 0.0
        assert error(new[one], want_new) == 0.0


def test_packed_rows_do_not_see_each_other():
    x, weight, bias, window = inputs(12, b=1)
    ids = np.repeat([0, 2, 3, -1], [4, 5, 2, 1])[None]
    y, new = jax.jit(causal_conv1d)(x, weight, bias, window=window, segment_ids=ids)
    for start, stop in ((0, 4), (4, 9), (9, 11)):
        want, _ = causal_conv1d_ref(x[:, start:stop], weight, bias, window=window if start == 0 else None)
        assert error(y[:, start:stop], want) < 1e-5
    assert error(y[:, 11:], np.zeros((1, 1, D))) == 0.0
    assert error(new, np.concatenate([np.zeros((1, 1, D)), x[:, 9:11]], axis=1)) == 0.0


def test_u01_left_padding_and_padding_alone():
    """The window stands right before the first valid position; a row of padding keeps its window."""
    x, weight, bias, window = inputs(8, b=3)
    ids = np.stack([np.repeat([-1, 0], [k, 8 - k]) for k in (0, 6, 8)])
    y, new = jax.jit(causal_conv1d)(x, weight, bias, window=window, segment_ids=ids)
    for row, start in enumerate((0, 6, 8)):
        one = slice(row, row + 1)
        want, want_new = causal_conv1d_ref(x[one, start:], weight, bias, window=window[one])
        assert error(y[one, start:], want) < 1e-5
        assert error(y[one, :start], np.zeros((1, start, D))) == 0.0
        assert error(new[one], want_new) == 0.0


def test_u02_bias_does_not_leak_through_padding():
    """Five pads and three tokens under a bias of one: what leaves conv and SSD is that of the three tokens alone."""
    x, weight, _, _ = inputs(8, b=1)
    ids, bias = np.repeat([-1, 0], [5, 3])[None], np.ones(D, np.float32)
    out, _ = causal_conv1d(x, weight, bias, segment_ids=ids)

    def scan(op, out, **more):
        x, B, C = (np.asarray(out[..., i : i + 3]).reshape(1, -1, 1, 3) for i in (0, 3, 6))
        dt = np.full((1, out.shape[1], 1), 0.3, np.float32)
        return op(x, dt, -np.ones(1, np.float32), B, C, **more)

    y, state = scan(ssd, out, chunk_size=4, segment_ids=ids)
    want_y, want_state = scan(ssd_ref, causal_conv1d_ref(x[:, 5:], weight, bias)[0])
    assert error(y[:, 5:], want_y) < 1e-5
    assert error(state, want_state) < 1e-5
    _, after_pads = scan(ssd, out[:, :5], chunk_size=4, segment_ids=ids[:, :5])
    assert error(after_pads, np.zeros_like(want_state)) == 0.0


def test_gradient_equals_finite_differences():
    x, weight, bias, window = inputs(9)
    ids = np.repeat([[-1, 0, 1], [0, 1, -1]], [3, 4, 2, 3, 4, 2]).reshape(2, 9)
    for more in ({}, {"segment_ids": ids}):

        def loss(x, weight, bias, window, more=more):
            return (causal_conv1d(x, weight, bias, window=window, **more)[0] ** 2).sum()

        check_grads(loss, (x, weight, bias, window), order=1, modes=("rev",), rtol=2e-2, atol=2e-2)


def test_arguments_that_do_not_agree_are_refused_by_name():
    x, weight, bias, window = inputs(5)
    for match, args, more in (
        (r"^x: got shape \(5, 10\)", (x[0], weight, bias), {}),
        (r"^weight: got shape \(9, 4\)", (x, weight[1:], bias), {}),
        (r"^bias: got shape \(9,\)", (x, weight, bias[1:]), {}),
        (r"^window: got shape \(2, 2, 10\)", (x, weight, bias), {"window": window[:, 1:]}),
        (r"^activation: got 'relu'", (x, weight, bias), {"activation": "relu"}),
        (r"^lengths: got shape \(1,\)", (x, weight, bias), {"lengths": np.array([3])}),
        (
            r"^lengths and segment_ids",
            (x, weight, bias),
            {"lengths": np.array([3, 3]), "segment_ids": np.zeros((2, 5), int)},
        ),
    ):
        with pytest.raises(ValueError, match=match):
            causal_conv1d(*args, **more)
    with pytest.raises(ValueError, match=r"^window: got shape"):
        causal_conv1d_step(x[:, 0], weight, bias, window[:, 1:])
