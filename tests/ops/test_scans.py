"""Both scans against the float64 recurrence: named shapes, dtypes, splits, padding, packing, extreme numbers."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.ops.cases import OPS, at, end_of_float32, error, in_dtype, padded, piece
from tests.tolerances import OP_ATOL, SPLIT_ATOL

both = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
CASES = [
    pytest.param(op, spec, q, id=f"{op.name}-{spec.name}-{q}") for op in OPS for spec in op.specs for q in spec.chunks
]


@pytest.mark.parametrize(("op", "spec", "chunk"), CASES)
def test_equals_the_recurrence(op, spec, chunk):
    """Also U12 (one position), U33 (groups), U47 (4096 positions), U87 (odd sizes), U11 (lengths against chunks)."""
    inputs = op.inputs(spec)
    y, state = op.run(inputs, chunk_size=chunk)
    want_y, want_state = op.reference(**inputs)
    assert y.dtype == jnp.float32
    assert error(y, want_y) < OP_ATOL["float32"]
    assert error(state, want_state) < OP_ATOL["float32"]


@both
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision(op, dtype):
    inputs = in_dtype(op.inputs(op.small), dtype)
    y, state = op.run(inputs, chunk_size=16)
    want_y, want_state = op.reference(**inputs)
    assert y.dtype == dtype
    assert state.dtype == jnp.float32
    assert error(y, want_y) < OP_ATOL[dtype] * max(1.0, np.abs(want_y).max())
    assert error(state, want_state) < OP_ATOL[dtype]


@both
def test_u47_error_does_not_grow_with_the_length(op):
    spec = next(s for s in op.specs if s.name == "long")
    inputs = op.inputs(spec)
    y, _ = op.run(inputs, chunk_size=64)
    want, _ = op.reference(**inputs)
    assert error(y[:, -64:], want[:, -64:]) < 4 * error(y[:, :64], want[:, :64])


@both
@pytest.mark.parametrize("sizes", [(16, 16, 8), (39, 1), (1, 39), (5, 30, 5)])
def test_u20_any_split_equals_one_call(op, sizes):
    inputs = op.inputs(op.small)
    y, state = op.run(inputs, chunk_size=16)
    ys, part = [], inputs
    for start, stop in itertools.pairwise(np.cumsum((0, *sizes))):
        part = piece(inputs, start, stop) | {"initial_state": part["initial_state"]}
        out, last = op.run(part, chunk_size=16)
        ys.append(out)
        part["initial_state"] = last
    assert error(np.concatenate(ys, axis=1), y) < SPLIT_ATOL
    assert error(last, state) < SPLIT_ATOL


@both
def test_u12_u18_steps_equal_the_scan(op):
    inputs = op.inputs(op.small)
    y, state = op.run(inputs, chunk_size=16)
    last = jnp.asarray(inputs["initial_state"])
    step = jax.jit(op.step, static_argnames=("dt_softplus", "dt_limit"))
    for t in range(op.small.l):
        out, last = step(**at(inputs, t), state=last)
        assert error(out, y[:, t]) < SPLIT_ATOL
    assert error(last, state) < SPLIT_ATOL


@both
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_step_keeps_the_dtypes_it_gets(op, dtype):
    inputs = in_dtype(op.inputs(op.small), dtype)
    state = jnp.asarray(inputs["initial_state"], dtype)
    out, new = op.step(**at(inputs, 0), state=state)
    want, want_state = op.reference(**piece(inputs, 0, 1) | {"initial_state": np.asarray(state, np.float32)})
    assert (out.dtype, new.dtype) == (dtype, dtype)
    assert error(out, want[:, 0]) < OP_ATOL[dtype] * max(1.0, np.abs(want).max())
    assert error(new, want_state) < OP_ATOL[dtype]


@both
@pytest.mark.parametrize("batch", [1, 3])
def test_step_for_any_batch(op, batch):
    for spec in op.specs[:3]:
        inputs = op.inputs(spec)
        rows = slice(0, batch) if batch < spec.b else slice(None)
        inputs = piece(inputs, 0, 1, rows)
        shape = op.reference(**inputs)[1].shape
        state = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
        want, want_state = op.reference(**inputs | {"initial_state": state})
        out, new = op.step(**at(inputs, 0), state=jnp.asarray(state))
        assert error(out, want[:, 0]) < OP_ATOL["float32"]
        assert error(new, want_state) < OP_ATOL["float32"]


@both
@pytest.mark.parametrize("length", [1, 255, 256, 257, 511, 513])
def test_u11_a_bucket_changes_nothing(op, length):
    inputs = piece(op.inputs(op.small), 0, 1)
    rng = np.random.default_rng(0)
    for name in ("x", "dt", "B", "C", "z"):
        shape = inputs[name].shape
        inputs[name] = rng.standard_normal((shape[0], length, *shape[2:])).astype(np.float32) - 2.0 * (name == "dt")
    want, want_state = op.reference(**inputs)
    y, state = op.run(padded(inputs, 0, 520 - length), chunk_size=256, lengths=jnp.full(2, length))
    assert error(y[:, :length], want) < OP_ATOL["float32"]
    assert error(state, want_state) < OP_ATOL["float32"]


@both
def test_u01_u04_rows_of_unequal_length(op):
    """Also a row of no position at all: it keeps its state."""
    inputs = op.inputs(op.small)
    y, state = op.run(inputs, chunk_size=16, lengths=jnp.array([0, 23]))
    want, want_state = op.reference(**piece(inputs, 0, 23))
    assert error(y[1, :23], want[1]) < OP_ATOL["float32"]
    assert error(state[1], want_state[1]) < OP_ATOL["float32"]
    assert error(state[0], inputs["initial_state"][0]) == 0.0


@both
def test_u07_padded_tail_leaves_the_state_alone(op):
    inputs = op.inputs(op.small)
    _, state = op.run(inputs, chunk_size=8)
    _, middle = op.run(piece(inputs, 0, 38), chunk_size=8)
    tail = padded(piece(inputs, 38, 40), 0, 2) | {"initial_state": middle}
    _, last = op.run(tail, chunk_size=8, lengths=jnp.array([2, 2]))
    assert error(last, state) < SPLIT_ATOL


@both
@pytest.mark.parametrize("num_segments", [None, 1])
def test_u01_left_padding_by_segment_ids(op, num_segments):
    inputs = op.inputs(op.small)
    want, want_state = op.run(inputs, chunk_size=16)
    ids = np.where(np.arange(47) < 5, -1, np.where(np.arange(47) < 45, 0, -1))
    more = {"segment_ids": jnp.broadcast_to(ids, (2, 47)), "num_segments": num_segments}
    left = padded(inputs, 5, 2)
    if num_segments is not None:
        left["initial_state"] = left["initial_state"][:, None]
    y, state = op.run(left, chunk_size=16, **more)
    assert error(y[:, 5:45], want) < SPLIT_ATOL
    assert error(state.reshape(want_state.shape), want_state) < SPLIT_ATOL


PACKS = [
    [[10, 0, 20, 4], [0, 0, 30, 7]],
    [[0, 0, 0, 40], [40, 0, 0, 0]],
    [[1, 1, 1, 1], [0, 0, 0, 0]],
    [[10, 10, 10, 10], [16, 16, 8, 0]],
]


@both
@pytest.mark.parametrize("lengths", PACKS, ids=str)
@pytest.mark.parametrize("chunk", [4, 64])
def test_u19_packed_sequences(op, lengths, chunk):
    """Each sequence gives what it gives alone; an empty one keeps its initial state; padding follows."""
    inputs = op.inputs(op.small)
    states = np.random.default_rng(2).standard_normal((2, 4, *inputs["initial_state"].shape[1:])).astype(np.float32)
    ids = np.array([np.repeat([0, 1, 2, 3, -1], [*row, 40 - sum(row)]) for row in lengths])
    packed = inputs | {"initial_state": states}
    y, last = op.run(packed, chunk_size=chunk, segment_ids=ids, num_segments=4)
    for b, row in enumerate(lengths):
        for s, (start, stop) in enumerate(itertools.pairwise(np.cumsum((0, *row)))):
            part = piece(inputs, start, stop, slice(b, b + 1)) | {"initial_state": states[b : b + 1, s]}
            want, want_state = op.reference(**part)
            assert error(y[b : b + 1, start:stop], want) < OP_ATOL["float32"]
            assert error(last[b, s], want_state[0]) < OP_ATOL["float32"]


@both
@pytest.mark.parametrize("ends", [(0, 512, 512, 1024), (0, 512, 1024, 1024)])
def test_u19_empty_sequence_at_a_chunk_border(op, ends):
    spec = op.small
    inputs = piece(op.inputs(spec), 0, 1, slice(0, 1)) | {"initial_state": None}
    rng = np.random.default_rng(3)
    for name in ("x", "dt", "B", "C", "z"):
        shape = inputs[name].shape
        inputs[name] = rng.standard_normal((1, 1024, *shape[2:])).astype(np.float32) - 2.0 * (name == "dt")
    ids = np.repeat(np.arange(3), np.diff(ends))[None]
    _, last = op.run(inputs, chunk_size=256, segment_ids=ids, num_segments=3)
    for s, (start, stop) in enumerate(itertools.pairwise(ends)):
        want = op.reference(**piece(inputs, start, stop))[1][0] if stop > start else np.zeros_like(last[0, s])
        assert error(last[0, s], want) < OP_ATOL["float32"]


@both
@pytest.mark.parametrize("chunk", [1, 16, 64])
def test_segment_ids_alone_reset_the_state(op, chunk):
    """The initial state belongs to the first sequence, the final one to the last; padding may stand between them."""
    inputs = op.inputs(op.small)
    ids = np.repeat([3, -1, 5, 6, -1], [10, 3, 20, 5, 2])
    y, last = op.run(inputs, chunk_size=chunk, segment_ids=jnp.broadcast_to(ids, (2, 40)))
    for start, stop in ((0, 10), (13, 33), (33, 38)):
        part = piece(inputs, start, stop)
        want, want_state = op.reference(**part if start == 0 else part | {"initial_state": None})
        assert error(y[:, start:stop], want) < OP_ATOL["float32"]
    assert error(last, want_state) < OP_ATOL["float32"]


@both
def test_u02_state_after_padding_alone_is_zero(op):
    inputs = op.inputs(op.small) | {"initial_state": None, "dt_limit": (0.1, 1.0)}
    _, state = op.run(inputs, chunk_size=16, lengths=jnp.zeros(2, jnp.int32))
    assert error(state, np.zeros_like(state)) == 0.0


@both
def test_u40_only_dt_limit_clamps(op):
    """Steps of 0.5 and 1e-5 are kept; a lower limit holds at positions, not at padding."""
    inputs = op.inputs(op.small) | {"dt_bias": None}
    steps = np.where(np.arange(40) % 2 == 0, 0.5, 1e-5).astype(np.float32)
    steps = np.log(np.expm1(steps.astype(np.float64))).astype(np.float32)
    inputs["dt"] = np.broadcast_to(steps[:, None], inputs["dt"].shape)
    for limit in ((0.0, math.inf), (0.001, 0.1)):
        y, state = op.run(inputs | {"dt_limit": limit}, chunk_size=16, lengths=jnp.array([30, 30]))
        want, want_state = op.reference(**piece(inputs, 0, 30) | {"dt_limit": limit})
        assert error(y[:, :30], want) < OP_ATOL["float32"]
        assert error(state, want_state) < OP_ATOL["float32"]


@both
@pytest.mark.parametrize("raw", [12.0, 89.0])
def test_u42_large_steps_in_float16(op, raw):
    inputs = op.inputs(op.small)
    inputs = in_dtype(inputs | {"dt": np.full_like(inputs["dt"], raw)}, "float16")
    y, state = op.run(inputs, chunk_size=16)
    want, want_state = op.reference(**inputs)
    assert error(y, want) < OP_ATOL["float16"] * max(1.0, np.abs(want).max())
    assert error(state, want_state) < OP_ATOL["float32"] * max(1.0, np.abs(want_state).max())


def _single(op, decays, adds):
    """Arguments for one channel with a state of one number: state = decay * state + add."""
    dt, adds = -np.log(np.asarray(decays, np.float64)), np.asarray(adds, np.float64)
    ones, axes = np.ones((1, len(dt), 1), np.float32), ((..., None) if op.name == "ssd" else (...,))
    return {
        "x": (adds / dt).astype(np.float32)[None, :, None][axes],
        "dt": dt.astype(np.float32)[None, :, None],
        "A": -np.ones((1,) if op.name == "ssd" else (1, 1), np.float32),
        "B": ones[axes],
        "C": ones[axes],
    }


@both
@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_u18_length_three_by_hand(op, chunk):
    y, state = op.run(_single(op, (0.5, 0.2, 0.9), (1, 2, 3)), chunk_size=chunk)
    np.testing.assert_allclose(np.asarray(y).ravel(), [1.0, 2.2, 4.98], rtol=1e-6)
    np.testing.assert_allclose(np.asarray(state).ravel(), [4.98], rtol=1e-6)


@both
def test_u44_slow_decay_reaches_its_limit(op):
    """Decay 0.999, input 0.5, 2000 steps: float32 gets to 432 where a bfloat16 state would stick at 128."""
    want = 0.5 * (1 - 0.999**2000) / 0.001
    inputs = in_dtype(_single(op, np.full(2000, 0.999), np.full(2000, 0.5)), "bfloat16")
    x = float(inputs["x"].ravel()[0]) * -math.log(0.999)  # the input as bfloat16 holds it
    _, state = op.run(inputs, chunk_size=128)
    np.testing.assert_allclose(np.asarray(state).ravel(), [want * x / 0.5], rtol=1e-3)

    first = {k: v[:, 0] if v.ndim > 1 and k != "A" else v for k, v in inputs.items()}
    carried = jax.lax.fori_loop(0, 2000, lambda _, s: op.step(**first, state=s)[1], jnp.zeros_like(state))
    np.testing.assert_allclose(np.asarray(carried).ravel(), [want * x / 0.5], rtol=1e-3)


@both
@pytest.mark.parametrize("scale", [1e2, 1e5, 1e9])
def test_u16_huge_steps_among_tiny_ones(op, scale):
    """A running sum in float32 is not monotone and forgets tiny steps after a huge one; decays must not."""
    inputs = op.inputs(op.small) | {"dt_softplus": False, "dt_bias": None}
    rng = np.random.default_rng(4)
    dt = rng.uniform(1e-4, 1e-2, inputs["dt"].shape)
    dt[:, [3, 17, 18, 29]] = scale * rng.uniform(0.5, 1.0, dt[:, [3, 17, 18, 29]].shape)
    inputs["dt"] = dt.astype(np.float32)
    inputs["x"] = np.where(
        np.isin(np.arange(40), [3, 17, 18, 29])[(None, ..., *[None] * (inputs["x"].ndim - 2))], 0, inputs["x"]
    )
    for chunk in (8, 40):
        y, state = op.run(inputs, chunk_size=chunk)
        want, want_state = op.reference(**inputs)
        assert error(y, want) < 2e-6
        assert error(state, want_state) < 2e-6


@both
def test_huge_steps_in_a_chunk_of_any_size(op):
    """Running sums are exact up to 2048 such steps; a larger chunk is cut."""
    steps = np.where(np.arange(8192) < 8000, 300.0, 0.01)
    inputs = _single(op, np.exp(-steps), np.where(steps > 1.0, 0.0, 1.0))
    y, state = op.run(inputs, chunk_size=8192)
    want, want_state = op.reference(**inputs)
    assert error(y, want) < OP_ATOL["float32"]
    assert error(state, want_state) < OP_ATOL["float32"]


@both
@pytest.mark.parametrize("chunk", [8, 40])
def test_steps_at_the_end_of_float32(op, chunk):
    inputs = end_of_float32(op.inputs(op.small))
    want, want_state = op.reference(**inputs)
    y, state = op.run(inputs, chunk_size=chunk)
    assert error(y, want) < OP_ATOL["float32"] * np.abs(want).max()
    assert error(state, want_state) < OP_ATOL["float32"] * np.abs(want_state).max()


@both
def test_infinite_rates_wipe_at_a_step_and_hold_at_none(op):
    """exp(A_log) of 100 is infinite in float32; 0 times it is no number."""
    inputs = op.inputs(op.small) | {"dt_softplus": False, "dt_bias": None}
    rng = np.random.default_rng(7)
    inputs["dt"] = np.where(rng.random(inputs["dt"].shape) < 0.6, 0.0, 0.3).astype(np.float32)
    inputs["dt"][:, :2] = 0.0
    inputs["A"] = np.where(rng.random(inputs["A"].shape) < 0.6, -np.inf, inputs["A"])
    inputs["A"].flat[0] = -np.inf
    y, state = op.run(padded(inputs, 0, 3), chunk_size=8, lengths=jnp.array([40, 30]))
    for row, length in enumerate((40, 30)):
        want, want_state = op.reference(**piece(inputs, 0, length, slice(row, row + 1)))
        assert error(y[row, :length], want[0]) < OP_ATOL["float32"]
        assert error(state[row], want_state[0]) < OP_ATOL["float32"]

    held, step = jnp.asarray(inputs["initial_state"]), jax.jit(op.step, static_argnames=("dt_softplus", "dt_limit"))
    assert error(step(**at(inputs, 0), state=held)[1], held) == 0.0
    moved = at(inputs, 0) | {"dt": np.full_like(at(inputs, 0)["dt"], 0.3), "x": 0 * at(inputs, 0)["x"]}
    last = step(**moved, state=held)[1]
    wiped = np.isinf(inputs["A"].T) if op.name == "scan" else np.isinf(inputs["A"])[:, None, None]
    assert error(np.where(wiped, last, 0.0), np.zeros_like(last)) == 0.0

    loss = jax.jit(jax.grad(lambda A, dt: op.scan(**inputs | {"A": A, "dt": dt}, chunk_size=8)[0].sum(), (0, 1)))
    assert all(np.isfinite(g).all() for g in loss(inputs["A"], np.maximum(inputs["dt"], 0.01)))


@both
def test_u17_exponents_of_differences(op):
    """Sums of -100.0 and -100.1 differ by a decay of exp(-0.1); a first step below -87.4 makes nothing infinite."""
    inputs = _single(op, np.exp([-100.0, -0.1, -0.1]), (1.0, 1.0, 0.0))
    for chunk in (1, 3):
        y, _ = op.run(inputs, chunk_size=chunk)
        decay = math.exp(-0.1)
        np.testing.assert_allclose(np.asarray(y).ravel(), [1.0, 1.0 + decay, decay + decay**2], rtol=1e-6)


@both
@pytest.mark.parametrize("chunk", [8, 40])
def test_gradient_equals_finite_differences(op, chunk):
    """The directional derivative against central differences of the float64 recurrence."""
    inputs = op.inputs(op.small)
    floats = [k for k, v in inputs.items() if isinstance(v, np.ndarray)]
    rng = np.random.default_rng(5)
    toward = {k: rng.standard_normal(inputs[k].shape) for k in floats}
    weights = [rng.standard_normal(v.shape) for v in op.reference(**inputs)]

    def loss(arrays):
        outs = op.scan(**inputs | arrays, chunk_size=chunk)
        return sum((o * w.astype(np.float32)).sum() for o, w in zip(outs, weights, strict=True))

    def truth(step):
        moved = {k: inputs[k].astype(np.float64) + step * toward[k] for k in floats}
        return sum((o * w).sum() for o, w in zip(op.reference(**inputs | moved), weights, strict=True))

    grads = jax.jit(jax.grad(loss))({k: inputs[k] for k in floats})
    assert all(np.isfinite(g).all() for g in grads.values())
    for k in floats:
        saved = dict(toward)
        toward.update({other: np.zeros_like(toward[other]) for other in floats if other != k})
        slope = (truth(1e-5) - truth(-1e-5)) / 2e-5
        toward.update(saved)
        assert abs((np.asarray(grads[k], np.float64) * toward[k]).sum() - slope) < 1e-3 * max(1.0, abs(slope)), k


@both
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradient_in_low_precision_is_finite(op, dtype):
    inputs = in_dtype(op.inputs(op.small), dtype)

    def loss(x, B):
        return op.scan(**inputs | {"x": x, "B": B}, chunk_size=16)[0].astype(jnp.float32).sum()

    got = jax.jit(jax.grad(loss, argnums=(0, 1)))(inputs["x"], inputs["B"])
    wide = {k: np.asarray(v, np.float32) if hasattr(v, "shape") else v for k, v in inputs.items()}
    want = jax.grad(lambda x, B: op.scan(**wide | {"x": x, "B": B}, chunk_size=16)[0].sum(), (0, 1))(
        wide["x"], wide["B"]
    )
    for g, w in zip(got, want, strict=True):
        assert g.dtype == dtype
        assert error(g, w) < OP_ATOL[dtype] * max(1.0, np.abs(w).max())


@both
@pytest.mark.parametrize("rubbish", [1.0, np.nan])
def test_gradient_of_padding_is_zero(op, rubbish):
    """Also where its steps are no numbers, which shows nowhere else either."""
    inputs = op.inputs(op.small)
    padding = np.arange(40) >= np.array([[7], [23]])

    def loss(x, dt, dt_bias):
        changed = {"x": x, "dt": dt, "dt_bias": dt_bias}
        y, state = op.scan(**inputs | changed, chunk_size=16, lengths=jnp.array([7, 23]))
        return y[0, :7].sum() + y[1, :23].sum() + state.sum()

    dt = inputs["dt"].copy()
    dt[padding] = rubbish
    x, dt, dt_bias = map(np.asarray, jax.jit(jax.grad(loss, (0, 1, 2)))(inputs["x"], dt, inputs["dt_bias"]))
    for grad in (x, dt):
        assert np.abs(grad[padding]).max() == 0.0
        assert np.abs(grad[:, :7]).min() > 0.0
    assert np.isfinite(dt_bias).all()


@both
def test_vmap_equals_a_loop(op):
    inputs = [op.inputs(op.small, seed) for seed in (0, 1, 2)]
    arrays = {k: np.stack([i[k] for i in inputs]) for k, v in inputs[0].items() if isinstance(v, np.ndarray)}
    rest = {k: v for k, v in inputs[0].items() if not isinstance(v, np.ndarray)}
    y, state = jax.jit(jax.vmap(lambda a: op.scan(**a, **rest, chunk_size=16)))(arrays)
    for i, one in enumerate(inputs):
        want, want_state = op.run(one, chunk_size=16)
        assert error(y[i], want) < SPLIT_ATOL
        assert error(state[i], want_state) < SPLIT_ATOL


@both
def test_arguments_that_do_not_agree_are_refused_by_name(op):
    good = op.inputs(op.small)
    bad_shapes = {
        "dt": good["dt"][:, :-1],
        "A": good["A"][1:],
        "B": good["B"][:, 1:],
        "C": good["C"][..., 1:],
        "D": good["D"][1:],
        "z": good["z"][..., 1:],
        "dt_bias": good["dt_bias"][1:],
        "initial_state": good["initial_state"][:, 1:],
        "dt_limit": (0.5, 0.1),
    }
    for name, value in bad_shapes.items():
        with pytest.raises(ValueError, match=f"^{name}: got"):
            op.scan(**good | {name: value}, chunk_size=16)
    ids, lengths = np.zeros((2, 40), np.int32), np.array([3, 4])
    for message, more in (
        ("^chunk_size: got 0", {"chunk_size": 0}),
        ("^lengths and segment_ids: got both", {"lengths": lengths, "segment_ids": ids}),
        (r"^lengths: got shape \(3,\)", {"lengths": np.zeros(3, np.int32)}),
        ("^lengths: got dtype float32", {"lengths": np.zeros(2, np.float32)}),
        (r"^segment_ids: got shape \(2, 39\)", {"segment_ids": ids[:, 1:]}),
        ("^num_segments: got 2 without segment_ids", {"num_segments": 2}),
        ("^num_segments: got 0", {"num_segments": 0, "segment_ids": ids}),
        ("^initial_state: got shape", {"num_segments": 2, "segment_ids": ids}),
    ):
        with pytest.raises(ValueError, match=message):
            op.scan(**good | {"chunk_size": 16} | more)
    with pytest.raises(ValueError, match=r"^x: got shape"):
        op.scan(**good | {"x": good["x"][0]}, chunk_size=16)


@both
def test_step_refuses_what_does_not_agree(op):
    good = at(op.inputs(op.small), 0) | {"state": op.inputs(op.small)["initial_state"]}
    for name in ("dt", "B", "C", "z", "D", "dt_bias", "state"):
        with pytest.raises(ValueError, match=f"^{name}: got"):
            op.step(**good | {name: good[name][1:]})
