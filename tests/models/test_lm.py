"""Forward, prefill and step: one call against any split of it, padding, packing, dtypes, bad arguments."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mamba_jax import forward, init_cache, prefill, step
from tests.tiny import KINDS, tiny_config, tiny_params
from tests.tolerances import SPLIT_ATOL

RNG = np.random.default_rng(0)
IDS = RNG.integers(0, 101, (2, 40))


def assert_close(got, want, atol=SPLIT_ATOL):
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-5, atol=atol), got, want)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("split", [(16, 16, 8), (39, 1), (1, 39), (1, 16, 1, 1, 1, 1, 1, 1, 1, 16), (40,)])
def test_u20_any_split_of_a_prefill_equals_one_call(kind, split):
    params = tiny_params(kind)
    want_logits, want_cache = prefill(params, IDS, chunk_size=16)
    cache, start = init_cache(params.config, 2, params.dtype), 0
    for size in split:
        logits, cache = prefill(params, IDS[:, start : start + size], cache=cache, chunk_size=16)
        start += size
    assert_close(logits, want_logits)
    assert_close(cache, want_cache)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prompt", [1, 3, 4, 5])
def test_u26_u27_steps_after_a_prefill_equal_the_forward_pass(kind, prompt):
    params = tiny_params(kind)
    want = forward(params, IDS[:, :9], chunk_size=4)  # for every prompt
    logits, cache = prefill(params, IDS[:, :prompt])
    assert_close(logits, want[:, prompt - 1])
    for position in range(prompt, prompt + 4):
        logits, cache = step(params, IDS[:, position], cache)
        assert_close(logits, want[:, position])


@pytest.mark.parametrize("kind", KINDS)
def test_u12_one_token_prefill_equals_a_step_from_zero(kind):
    params = tiny_params(kind)
    got = prefill(params, IDS[:, :1])
    want = step(params, IDS[:, 0], init_cache(params.config, 2, params.dtype))
    assert_close(got, want)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk_size", [16, 512])
def test_chunk_size_changes_nothing(kind, chunk_size):
    params = tiny_params(kind)
    assert_close(forward(params, IDS, chunk_size=chunk_size), forward(params, IDS, chunk_size=1), atol=3e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_u04_right_padding_leaves_the_cache_at_the_true_end(kind):
    params = tiny_params(kind)
    lengths = np.array([5, 12])
    logits, cache = prefill(params, IDS[:, :16], lengths=lengths)
    for row, length in enumerate(lengths):
        want_logits, want_cache = prefill(params, IDS[row : row + 1, :length])
        assert_close(logits[row : row + 1], want_logits)
        assert_close(jax.tree.map(lambda x, row=row: x[row : row + 1], cache), want_cache)


@pytest.mark.parametrize("kind", KINDS)
def test_u05_a_padded_single_row_equals_the_unpadded_one(kind):
    params = tiny_params(kind)
    ids = IDS[:1, :5]
    want = forward(params, ids)
    right = np.pad(ids, ((0, 0), (0, 11)), constant_values=7)
    assert_close(forward(params, right, lengths=[5])[:, :5], want)
    left = np.pad(ids, ((0, 0), (3, 0)), constant_values=7)
    assert_close(forward(params, left, segment_ids=[[-1, -1, -1, 0, 0, 0, 0, 0]])[:, 3:], want)


@pytest.mark.parametrize("kind", KINDS)
def test_u01_u03_left_and_right_padding_score_alike(kind):
    params = tiny_params(kind)
    lengths, width = (3, 17, 33, 40), 40
    texts = [RNG.integers(0, 101, n) for n in lengths]
    right, left = np.full((4, width), 9), np.full((4, width), 9)
    ids = np.full((4, width), -1)
    for row, text in enumerate(texts):
        right[row, : len(text)] = text
        left[row, width - len(text) :] = text
        ids[row, width - len(text) :] = 0
    on_right = forward(params, right, lengths=lengths)
    on_left = forward(params, left, segment_ids=ids)
    for row, text in enumerate(texts):
        alone = forward(params, text[None])[0]
        assert_close(on_right[row, : len(text)], alone)
        assert_close(on_left[row, width - len(text) :], alone)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences_see_nothing_of_each_other(kind):
    params = tiny_params(kind)
    lengths = (17, 1, 17, 5)
    packed = forward(params, IDS[:1], segment_ids=np.repeat(np.arange(4), lengths)[None], chunk_size=16)
    ends = list(itertools.accumulate(lengths))
    for start, end in zip([0, *ends], ends, strict=False):
        assert_close(packed[:, start:end], forward(params, IDS[:1, start:end]))


@pytest.mark.parametrize("ids", [[3] * 5 + [1] * 7, [0] * 4 + [1] * 1 + [0] * 7, [0] * 5 + [7] * 7])
def test_sequences_may_have_any_ids(ids):
    params = tiny_params("mamba2")
    packed = forward(params, IDS[:1, :12], segment_ids=[ids])
    ends = [i for i in range(1, 13) if i == 12 or ids[i] != ids[i - 1]]
    for start, end in zip([0, *ends], ends, strict=False):
        assert_close(packed[:, start:end], forward(params, IDS[:1, start:end]))


def test_unsigned_segment_ids_are_refused():
    mask = np.array([[0] * 4 + [1] * 8], np.uint8)
    with pytest.raises(ValueError, match="segment_ids: got uint8, wanted signed"):
        forward(tiny_params("mamba2"), IDS[:1, :12], segment_ids=mask - np.uint8(1))


@pytest.mark.parametrize("kind", KINDS)
def test_u14_continuing_from_a_snapshot_leaves_it_as_it_was(kind):
    params = tiny_params(kind)
    _, snapshot = prefill(params, IDS[:, :16])
    before = jax.tree.map(np.array, snapshot)
    prefill(params, IDS[:, 16:17], cache=snapshot)
    step(params, IDS[:, 16], snapshot)
    branch, _ = prefill(params, IDS[:, 16:18], cache=snapshot)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.array, snapshot), before)
    assert_close(branch, forward(params, IDS[:, :18])[:, -1])


@pytest.mark.parametrize("d_model", [2048, 256, 320])
def test_u22_any_consistent_width_works(d_model):
    params = tiny_params("mamba2", d_model=d_model, d_inner=2 * d_model, headdim=64, n_layer=1)
    ids = RNG.integers(0, 101, (1, 64))
    want, _ = prefill(params, ids)
    cache = None
    for start in range(0, 64, 16):
        logits, cache = prefill(params, ids[:, start : start + 16], cache=cache)
    assert_close(logits, want, atol=1e-4)


@pytest.mark.parametrize("kind", ["mamba1", "mamba2"])
@pytest.mark.parametrize("residual_in_fp32", [True, False])
def test_u45_residual_dtype_follows_the_flag(kind, residual_in_fp32):
    params = tiny_params(kind, "bfloat16", residual_in_fp32=residual_in_fp32)
    logits, hidden = forward(params, IDS, output_hidden_states=True)
    assert logits.dtype == jnp.float32
    assert {h.dtype for h in hidden} == {jnp.dtype("bfloat16")}
    assert len(hidden) == params.config.n_layer + 1
    jaxpr = str(jax.make_jaxpr(forward)(params, IDS))
    b, length = IDS.shape
    adds = [line for line in jaxpr.splitlines() if f":f32[{b},{length},24] = add " in line]
    # With the flag one residual addition a layer in float32; without it none.
    assert bool(adds) == residual_in_fp32


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_u42_low_precision_stays_near_float32(kind, dtype):
    want = forward(tiny_params(kind), IDS)
    got = forward(tiny_params(kind, dtype), IDS)
    assert np.isfinite(got).all()
    error = np.abs(np.asarray(got) - np.asarray(want)).max() / np.asarray(want).std()
    assert error < {"bfloat16": 0.15, "float16": 0.02}[dtype]


def test_u36_without_the_gated_norm_there_is_no_weight_and_bfloat16_runs():
    params = tiny_params("mamba2", "bfloat16", gated_norm=False)
    assert params.layers[0].gated_norm is None
    assert np.isfinite(forward(params, IDS)).all()
    full = tiny_params("mamba2", gated_norm=False)
    assert_close(step(full, IDS[:, 0], init_cache(full.config, 2, "float32"))[0], forward(full, IDS[:, :1])[:, 0])


def test_norm_before_gate_changes_the_result():
    params = tiny_params("mamba2")
    other = params.replace(config=dataclasses.replace(params.config, norm_before_gate=True))
    assert np.abs(forward(params, IDS) - forward(other, IDS)).max() > 1e-2


@pytest.mark.parametrize("kind", ["mamba1", "mamba2"])
def test_rates_beyond_float32_make_no_nan(kind):
    """exp(100) is infinite in float32, and 0 times it, at padding or where a step vanishes, is no number."""
    params = tiny_params(kind)
    layers = [
        dataclasses.replace(x, A_log=x.A_log.at[:2].set(100.0), dt_bias=x.dt_bias.at[0].set(-200.0))
        for x in params.layers
    ]
    params = dataclasses.replace(params, layers=tuple(layers))
    want = forward(params, IDS[:, :12], chunk_size=4)
    logits, cache = prefill(params, IDS[:, :16], lengths=[11, 11], chunk_size=4)
    assert_close(logits, want[:, 10])
    assert_close(step(params, IDS[:, 11], cache)[0], want[:, 11])
    grads = jax.grad(lambda p: forward(p, IDS[:, :12], lengths=[12, 7], chunk_size=4).sum())(params)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))


@pytest.mark.parametrize("kind", KINDS)
def test_forward_is_differentiable(kind):
    params = tiny_params(kind, n_layer=1)

    @jax.jit
    def loss(params):
        logits = forward(params, IDS, chunk_size=16)
        return -jax.nn.log_softmax(logits)[:, :-1][np.arange(2)[:, None], np.arange(39), IDS[:, 1:]].mean()

    grads = jax.grad(loss)(params)
    assert all(np.isfinite(g).all() and np.abs(g).max() > 0 for g in jax.tree.leaves(grads))
    weights, grads = (jax.tree.map(np.asarray, tree) for tree in (params, grads))
    direction = jax.tree.map(lambda x: np.sign(x) * np.float32(1e-3), grads)
    slope = sum(jax.tree.leaves(jax.tree.map(lambda g, d: (g * d).sum(), grads, direction)))
    ahead, behind = (loss(jax.tree.map(lambda p, d, s=s: p + s * d, weights, direction)) for s in (1, -1))
    np.testing.assert_allclose((ahead - behind) / 2, slope, rtol=3e-2)


def test_tokens_outside_the_embedding_are_refused_or_nan():
    params = tiny_params("mamba1")
    with pytest.raises(ValueError, match="tokens: got ids from 0 to 104, wanted 0 to 103"):
        forward(params, [[0, 104]])
    with pytest.raises(ValueError, match="tokens"):
        step(params, [-1], init_cache(params.config, 1, "float32"))
    traced = jax.jit(lambda t: forward(params, t))
    assert np.isnan(traced(jnp.array([[3, 104]]))[0, 1]).all()
    assert np.isnan(traced(jnp.array([[3, -1]]))[0, 1]).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": [1, 2]}, "tokens"),
        ({"tokens": np.zeros((1, 0), int)}, "tokens"),
        ({"tokens": [[0.5]]}, "tokens"),
        ({"tokens": [[1, 2]], "lengths": [3]}, "lengths"),
        ({"tokens": [[1, 2]], "lengths": [0]}, "lengths"),
        ({"tokens": [[1, 2]], "lengths": [1, 1]}, "lengths"),
        ({"tokens": [[1, 2]], "chunk_size": 0}, "chunk_size"),
        ({"tokens": [[1, 2]], "chunk_size": "best"}, "chunk_size"),
        ({"tokens": [[1, 2]], "segment_ids": [[0]]}, "segment_ids"),
        ({"tokens": [[1, 2]], "segment_ids": [[0, 0]], "lengths": [2]}, "segment_ids"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        forward(tiny_params("mamba2"), **arguments)


def test_u25_u28_a_cache_of_another_shape_is_refused():
    params = tiny_params("mamba2")
    for config, batch in ((tiny_config("mamba1"), 1), (tiny_config("mamba2", ngroups=2), 1), (params.config, 2)):
        with pytest.raises(ValueError, match="cache"):
            prefill(params, IDS[:1], cache=init_cache(config, batch, "float32"))
    with pytest.raises(ValueError, match="segment_ids"):
        forward(params, IDS[:1], cache=init_cache(params.config, 1, "float32"), segment_ids=np.zeros((1, 40), int))


@pytest.mark.parametrize("kind", ["mamba1", "mamba2"])
def test_a_cache_of_another_dtype_is_refused(kind):
    params = tiny_params(kind)
    cache = init_cache(params.config, 1, "float32")
    wrong = [
        (init_cache(params.config, 1, "bfloat16"), r"cache.conv\[0\]: got bfloat16\[1, 3, .*, wanted float32\[1, 3, "),
        (jax.tree.map(lambda x: x.astype("int8"), cache), r"cache.conv\[0\]: got int8"),
        (cache.replace(ssm=(*cache.ssm[:1], cache.ssm[1].astype("int32"))), r"cache.ssm\[1\]: got int32.*bfloat16 or"),
        (cache.replace(ssm=cache.ssm[:1]), r"cache.ssm: got a tuple of 1, wanted a tuple of 2 arrays"),
        (cache.replace(conv=list(cache.conv)), r"cache.conv: got a list of 2, wanted a tuple of 2 arrays"),
        (cache.replace(conv=(None, None)), r"cache.conv\[0\]: got nothing"),
        ((cache.conv, cache.ssm), "cache: got a tuple, wanted a MambaCache"),
    ]
    for bad, message in wrong:
        for call in (
            lambda cache: step(params, [5], cache),
            lambda cache: prefill(params, [[5]], cache=cache),
            lambda cache: forward(params, [[5]], cache=cache),
        ):
            with pytest.raises(ValueError, match=message):
                call(bad)
    with pytest.raises(ValueError, match="cache: got a NoneType"):
        step(params, [5], None)
    half = init_cache(params.config, 1, "float32", "bfloat16")
    assert {x.dtype.name for x in step(params, [5], half)[1].ssm} == {"bfloat16"}


@pytest.mark.parametrize("ids", [np.array([5, 5 + 2**32] * 2), [2**31 + 1] * 4, [-(2**33), 2**40, 2**40, -(2**33)]])
def test_segment_ids_of_64_bits_stay_apart(ids):
    params = tiny_params("mamba2")
    values = list(ids)
    small = [[-1 if i < 0 else values.index(i) for i in values]]
    got = forward(params, [[5, 6, 7, 8]], segment_ids=[ids])
    assert_close(got, forward(params, [[5, 6, 7, 8]], segment_ids=small))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": np.array([[2**32 + 5]])}, "tokens: got ids from 4294967301"),
        ({"tokens": [[2**40]]}, "tokens: got ids from"),
        ({"tokens": [[2**70]]}, "tokens: got .*wanted integers"),
        ({"tokens": np.array([[2**63 + 5]], np.uint64)}, "tokens: got ids from"),
        ({"tokens": [[1, 2], [3]]}, r"tokens: got \[\[1, 2\], \[3\]\], wanted integers"),
        ({"tokens": [["a"]]}, "tokens: got"),
        ({"tokens": None}, "tokens: got None"),
        ({"tokens": [b"ab"]}, "tokens: got"),
        ({"tokens": np.zeros((2, 2), object)}, "tokens: got"),
        ({"tokens": memoryview(np.zeros((2, 2), np.uint8))}, "tokens: got <memory"),
        ({"tokens": [[1, 2]], "lengths": bytearray(b"\x01")}, "lengths: got bytearray"),
        ({"tokens": [[1, 2, 3, 4]], "lengths": np.array([2**32 + 3])}, "lengths: got .4294967299., wanted each from 1"),
        ({"tokens": [[1, 2, 3, 4]], "lengths": [2**70]}, "lengths: got"),
        ({"tokens": [[1, 2]], "segment_ids": [[2**70, 1]]}, "segment_ids: got"),
        ({"tokens": [[1, 2]], "segment_ids": [[True, False]]}, "segment_ids: got bool"),
    ],
)
def test_what_does_not_fit_32_bits_is_refused_not_wrapped(arguments, message):
    with pytest.raises(ValueError, match=message):
        forward(tiny_params("mamba2"), **arguments)


def test_a_list_of_traced_tokens_is_taken():
    params = tiny_params("mamba2")
    traced = jax.jit(lambda a, b: forward(params, [[a, b]]))(3, 4)
    assert_close(traced, forward(params, [[3, 4]]))


@pytest.mark.parametrize("chunk_size", [np.int64(4), jnp.int32(4), [4, 8], np.array([4, 8])])
def test_chunk_sizes_may_be_of_any_integer_type(chunk_size):
    params = tiny_params("mamba2")
    assert_close(forward(params, IDS, chunk_size=chunk_size), forward(params, IDS, chunk_size=4))
    for bad in (True, 2.0, None, [4], np.array([4.0, 8.0])):
        with pytest.raises(ValueError, match="chunk_size: got"):
            forward(params, IDS, chunk_size=bad)


def test_weights_that_are_not_those_of_the_config_are_refused():
    params = tiny_params("mamba1")
    wrong = [
        (params.replace(layers=params.layers[:1]), r"layers\.1\.norm: got nothing, wanted float32\[24\]"),
        (
            params.replace(embedding=params.embedding[:-1]),
            r"embedding: got float32\[103, 24\], wanted float32\[104",
        ),
        (params.replace(embedding=params.embedding.astype("int32")), "embedding: got int32"),
        (params.replace(embedding=None), "embedding: got nothing"),
        (params.replace(norm_f=1.0), "norm_f: got 1.0"),
        (params.replace(layers=list(params.layers)), "list of layers"),
        ({"embedding": params.embedding}, "params: got a dict"),
    ]
    for bad, message in wrong:
        for call in (lambda bad: forward(bad, IDS), lambda bad: step(bad, [1], None)):
            with pytest.raises(ValueError, match=message):
                call(bad)


def test_u22_u28_conv_channels_hold_b_and_c():
    config = tiny_config("mamba2", d_inner=4096, headdim=64, ngroups=8, d_state=128)
    assert init_cache(config, 1, "float32").conv[0].shape == (1, 3, 6144)


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
@pytest.mark.parametrize("kind", KINDS)
def test_u46_float32_multiplies_at_highest_precision_on_every_platform(kind, platform):
    params = tiny_params(kind)
    cache = init_cache(params.config, 2, params.dtype)

    def both(params, cache):
        logits, cache = prefill(params, IDS, cache=cache, chunk_size=16)
        return logits, step(params, IDS[:, 0], cache)

    lowered = jax.jit(both).trace(params, cache).lower(lowering_platforms=(platform,)).as_text()
    products = [line for line in lowered.splitlines() if "dot_general" in line]
    assert len(products) > 4 * params.config.n_layer
    assert all("precision = [HIGHEST, HIGHEST]" in line for line in products)
