"""Statistics of activations: the paper's figures, the numpy twin, padding, odd inputs, what is compiled."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mamba_jax.scheduler.policies import chunk_of_entropy
from mamba_jax.scheduler.signals import Estimator, ema, every_kth_layer, max_entropy, variance

KINDS = ("histogram", "sampled", "token", "cheap", "variance", "kurtosis")
HISTOGRAMS = KINDS[:3]
EVERY = [Estimator(kind, range=r) for kind in HISTOGRAMS for r in ("minmax", "robust")] + [
    Estimator(k) for k in KINDS[3:]
]
SHAPE = (3, 40, 96)  # what most tests run, so that an estimator is compiled once for them
ALL = np.full(3, 40, np.int32)


def label(estimator):
    return f"{estimator.kind}-{estimator.range}"


@functools.cache
def program(estimator):
    return jax.jit(estimator)


def both(estimator, u, lengths=None):
    """The value of the program and of the numpy twin, which agree."""
    value = float(program(estimator)(jnp.asarray(u), None if lengths is None else jnp.asarray(lengths)))
    assert value == pytest.approx(estimator.numpy(np.asarray(u), lengths), abs=1e-5)
    return value


def column(values):
    return np.asarray(values, np.float32)[:, None]


@pytest.fixture(scope="module")
def normal():
    return np.random.default_rng(20260417).standard_normal(10**6)


# The paper's figures


@pytest.mark.parametrize(
    ("bins", "entropy", "r"),
    [
        (32, 2.644, 0.763),
        (64, 3.334, 0.802),
        (128, 4.027, 0.830),
        (256, 4.720, 0.851),
        (512, 5.413, 0.868),
        (1024, 6.106, 0.881),
    ],
)
def test_tables_1_and_21_normal(normal, bins, entropy, r):
    value = both(Estimator(bins=bins), column(normal))
    assert round(value, 3) == entropy
    assert round(value / max_entropy(bins), 3) == r
    assert chunk_of_entropy(value, max_entropy(bins)) == 512
    assert chunk_of_entropy(value, 8.0) == (512 if bins == 1024 else 256)


@pytest.mark.parametrize("bins", [32, 64, 128, 256, 512])
def test_tables_1_and_21_uniform(bins):
    value = both(Estimator(bins=bins), column(np.random.default_rng(20260417).random(10**6)))
    assert round(value, 3) == round(math.log(bins), 3)
    assert chunk_of_entropy(value, max_entropy(bins)) == 512
    assert chunk_of_entropy(value, 8.0) == (512 if bins >= 256 else 256)


def perturbation(name, seed):
    """Table 3's inputs: 4.2 million values in float16."""
    rng = np.random.default_rng(seed)
    shape = (1024, 4096)
    if name == "uniform":
        x = rng.random(shape, np.float32)
    elif name == "laplace":
        u = rng.random(shape, np.float32) - 0.5
        x = -np.sign(u) * np.log(1 - 2 * np.abs(u) + 1e-8)
    else:
        share, scale = {"normal": (1.0, 1), "sparse 10%": (0.10, 1), "sparse 2%": (0.02, 5)}[name]
        x = rng.standard_normal(shape, np.float32) * (rng.random(shape, np.float32) < share) * scale
    return x.astype(np.float16)


@pytest.mark.parametrize(
    ("name", "paper", "spread", "paper_chunk", "default_chunks"),
    [
        ("uniform", 5.545, 0.001, 512, {512}),
        ("normal", 4.612, 0.06, 256, {512}),
        ("laplace", 3.892, 0.18, 256, {256, 512}),
        ("sparse 10%", 0.789, 0.012, 64, {128}),
        ("sparse 2%", 0.192, 0.003, 32, {64}),
    ],
)
def test_table_3_is_within_the_spread_of_seeds_and_its_chunks_are_the_legacy_rules(
    name, paper, spread, paper_chunk, default_chunks
):
    for seed in range(2):
        value = Estimator().numpy(perturbation(name, seed))
        assert value == pytest.approx(paper, abs=spread)
        assert chunk_of_entropy(value, 8.0) == paper_chunk
        assert chunk_of_entropy(value, max_entropy(256)) in default_chunks


def test_proxies_do_not_rank_as_entropy_does(normal):
    rng = np.random.default_rng(0)
    inputs = {
        "normal": normal,
        "uniform": rng.random(10**6),
        "sparse 10%": rng.standard_normal(10**6) * (rng.random(10**6) < 0.1),
    }
    table = {name: [both(Estimator(kind), column(x)) for kind in KINDS[3:]] for name, x in inputs.items()}
    assert table["normal"] == pytest.approx([4.42, 3.09, 0.0], abs=0.02)
    assert table["uniform"] == pytest.approx([4.80, 2.03, 0.0], abs=0.01)
    assert table["sparse 10%"] == pytest.approx([1.40, 4.43, 5.36], abs=0.02)


@pytest.mark.parametrize(
    ("sigma", "entropy", "chunk"), [(8, 4.43, 512), (16, 3.94, 512), (24, 3.61, 256), (64, 2.74, 256), (256, 1.44, 128)]
)
def test_one_outlier_moves_the_minmax_range_but_not_the_robust_one(normal, sigma, entropy, chunk):
    x = column(np.append(normal[:-1], sigma))
    value = both(Estimator(), x)
    assert value == pytest.approx(entropy, abs=0.02)
    assert chunk_of_entropy(value, max_entropy(256)) == chunk
    clean = both(Estimator(range="robust"), column(normal))
    assert both(Estimator(range="robust"), x) == pytest.approx(clean, abs=0.001)


def test_the_minmax_entropy_depends_on_the_number_of_values_and_the_robust_one_does_not(normal):
    sizes = [4096, 65536, 10**6]
    minmax = [Estimator().numpy(column(normal[:n])) for n in sizes]
    robust = [Estimator(range="robust").numpy(column(normal[:n])) for n in sizes]
    assert minmax[0] - minmax[-1] > 0.15
    assert minmax == sorted(minmax, reverse=True)
    assert max(robust) - min(robust) < 0.04  # what is left is the bias (K - 1) / 2N of counting N values
    # Of a normal, bins of 8 * 0.798 sigma / 256: its differential entropy less the bins' width, tails in the end bins.
    assert robust[-1] == pytest.approx(0.5 * math.log(2 * math.pi * math.e) + math.log(256 / (8 * 0.7979)), abs=0.01)


# Exact values


def test_entropies_that_can_be_counted_by_hand():
    quarters = np.array([[0.0, 1.0, 2.0, 3.0]], np.float32)
    assert both(Estimator(bins=4), quarters) == pytest.approx(math.log(4), abs=1e-6)
    assert both(Estimator(bins=4, units="bits"), quarters) == pytest.approx(2, abs=1e-6)
    assert both(Estimator(bins=2), np.array([[0.0, 1.0, 1.0, 1.0]], np.float32)) == pytest.approx(
        -0.25 * math.log(0.25) - 0.75 * math.log(0.75), abs=1e-6
    )
    # eps as large as p itself halves the argument of the logarithm's reciprocal.
    assert both(Estimator(bins=4, eps=0.25), quarters) == pytest.approx(math.log(2), abs=1e-6)


def test_bins_are_half_open_but_for_the_last():
    x = np.array([[0.0, 1.0, 2.0, 3.0, 4.0]], np.float32)  # bins of width 1: 0 | 1 | 2 | 3 and 4
    expected = -3 * 0.2 * math.log(0.2) - 0.4 * math.log(0.4)
    assert both(Estimator(bins=4, eps=0.0), x) == pytest.approx(expected, abs=1e-6)


def test_tokens_have_ranges_of_their_own():
    rng = np.random.default_rng(0)
    x = (rng.random((1, 8, 4096)) * 10.0 ** np.arange(8)[:, None]).astype(np.float32)
    each = np.mean([Estimator().numpy(x[:, i : i + 1]) for i in range(8)])
    assert both(Estimator("token", stride=1), x) == pytest.approx(each, abs=1e-5)
    assert both(Estimator(), x) < each - 2


@pytest.mark.parametrize("kind", ["sampled", "token"])
def test_sampling_looks_at_every_eighth_position(kind):
    x = np.random.default_rng(1).standard_normal(SHAPE).astype(np.float32)
    x[:, np.arange(40) % 8 != 0] *= np.arange(96)  # else, other values: other entropies
    kept = dataclasses.replace(Estimator(kind), stride=1)
    assert both(Estimator(kind), x, ALL) == pytest.approx(kept.numpy(x[:, ::8]), abs=1e-5)
    assert kept.numpy(x) != pytest.approx(kept.numpy(x[:, ::8]), abs=1e-2)


@pytest.mark.parametrize("kind", ["histogram", "token", "cheap"])
def test_bits_are_nats_by_another_name(kind):
    x = np.random.default_rng(2).standard_t(3, SHAPE).astype(np.float32)
    nats, bits = Estimator(kind), Estimator(kind, units="bits")
    assert both(bits, x, ALL) == pytest.approx(both(nats, x, ALL) / math.log(2), rel=1e-6)
    assert bits.maximum == pytest.approx(8)
    assert nats.maximum == pytest.approx(5.545, abs=1e-3)


# The program and its twin


@pytest.mark.parametrize("estimator", EVERY, ids=label)
@pytest.mark.parametrize(
    ("shape", "dtype", "lengths"),
    [
        (SHAPE, jnp.float32, np.array([40, 7, 0], np.int32)),
        ((2, 2, 5, 7), jnp.bfloat16, np.array([[5, 1], [3, 4]], np.int32)),
        ((700, 1536), jnp.float16, None),
    ],
)
def test_program_and_twin_agree(estimator, shape, dtype, lengths):
    rng = np.random.default_rng(3)
    for loc in (0.0, 3.0):
        u = jax.nn.silu(jnp.asarray(2 * rng.standard_normal(shape) + loc, dtype))
        value = both(estimator, u, lengths)
        assert 0 <= value <= estimator.maximum * (1 + 1e-6)


@pytest.mark.parametrize("estimator", EVERY, ids=label)
@pytest.mark.parametrize("garbage", [0.0, 1e30, np.nan, -np.inf])
def test_padding_counts_for_nothing(estimator, garbage):
    rng = np.random.default_rng(5)
    u = rng.standard_t(3, SHAPE).astype(np.float32)
    lengths = np.array([40, 9, 0], np.int32)
    for row, length in zip(u, lengths, strict=True):
        row[length:] = garbage
    step = estimator.stride if estimator.kind in ("sampled", "token") else 1
    # The positions that are left, one after the other.
    dense = np.concatenate([row[:length:step] for row, length in zip(u, lengths, strict=True)])
    unpadded = dataclasses.replace(estimator, stride=1).numpy(dense)
    assert both(estimator, u, lengths) == pytest.approx(unpadded, abs=1e-5)


@pytest.mark.parametrize("kind", HISTOGRAMS)
def test_a_histogram_of_padded_rows_is_bit_for_bit_that_of_the_rows(kind):
    u = np.random.default_rng(9).standard_normal(SHAPE).astype(np.float32)
    lengths = np.array([23, 23, 0], np.int32)
    alone = float(program(Estimator(kind))(u[:2, :23], None))
    assert float(program(Estimator(kind))(u, lengths)) == alone


# Odd inputs


@pytest.mark.parametrize("estimator", EVERY, ids=label)
def test_nothing_to_tell_is_zero(estimator):
    for value in (0.1, 0.0, -3.0, 3e38, 1e-40, np.nan, -np.inf):
        u = np.full(SHAPE, value, np.float32)
        for lengths in (ALL, np.array([0, 1, 0], np.int32), np.zeros(3, np.int32)):
            result = both(estimator, u, lengths)
            if estimator.kind == "cheap" and lengths.any() and abs(value) > 0.01 and np.isfinite(value):
                assert result == pytest.approx(estimator.maximum, rel=1e-6)  # mean |u| is the rms: the proxy's flaw
            else:
                assert result == 0


@pytest.mark.parametrize("estimator", EVERY, ids=label)
@pytest.mark.parametrize("shape", [(2, 0, 8), (2, 9, 0), (0, 9, 8)])
def test_no_values_are_zero(estimator, shape):
    assert float(estimator(jnp.zeros(shape))) == estimator.numpy(np.zeros(shape, np.float32)) == 0


@pytest.mark.parametrize("estimator", EVERY, ids=label)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_position_with_a_value_that_is_not_finite_counts_for_nothing(estimator, bad):
    clean = np.random.default_rng(6).standard_t(3, SHAPE).astype(np.float32)
    clean[0, 8] *= 20
    broken = clean.copy()
    broken[0, 8, 5] = broken[2, 0, 0] = bad
    one = dataclasses.replace(estimator, stride=1)
    step = estimator.stride if estimator.kind in ("sampled", "token") else 1
    kept = [row for b in range(3) for i, row in enumerate(clean[b]) if i % step == 0 and (b, i) not in ((0, 8), (2, 0))]
    value = both(estimator, broken, ALL)
    assert value == pytest.approx(one.numpy(np.stack(kept)), abs=1e-5)
    assert value != pytest.approx(both(estimator, clean, ALL), abs=1e-4)


@pytest.mark.parametrize(
    ("estimator", "exponent"),
    # "cheap" and "variance" add eps to a scale: tiny values are felt.
    [(e, n) for e in EVERY for n in (-10, -100, 100, 125) if n != -100 or e.kind not in ("cheap", "variance")],
)
def test_scale_does_not_matter(estimator, exponent):
    u = np.clip(np.random.default_rng(7).standard_t(3, SHAPE), -7, 7).astype(np.float32)
    value = both(estimator, np.ldexp(u, exponent), ALL)
    assert value == pytest.approx(both(estimator, u, ALL), abs=1e-4)


@pytest.mark.parametrize("kind", HISTOGRAMS)
def test_two_values_fill_the_outer_bins(kind):
    u = np.tile(np.array([1.0, -2.0], np.float32), (3, 40, 48))
    assert both(Estimator(kind), u, ALL) == pytest.approx(math.log(2), abs=1e-6)


# What is compiled


@pytest.mark.parametrize("estimator", EVERY, ids=label)
def test_programs_neither_sort_nor_leave_the_device(estimator):
    shape = jax.ShapeDtypeStruct((2, 64, 32), jnp.bfloat16)
    lowered = jax.jit(estimator).lower(shape, jax.ShapeDtypeStruct((2,), jnp.int32))
    assert lowered.out_info.dtype == jnp.float32
    assert lowered.out_info.shape == ()
    text = lowered.as_text()
    for operation in ("stablehlo.sort", "custom_call", "outfeed", "f64"):
        assert operation not in text
    # Counts are whole numbers, added up in one scatter.
    scatters = re.findall(r"stablehlo\.scatter.*?-> tensor<\d+x(\w+)>", text, re.DOTALL)
    assert scatters == (["i32"] if estimator.kind in HISTOGRAMS else [])


def test_memory_of_a_histogram_is_an_index_and_a_count_for_each_value():
    u = jax.ShapeDtypeStruct((1, 512, 1536), jnp.float32)
    memory = jax.jit(Estimator()).lower(u, jax.ShapeDtypeStruct((1,), jnp.int32)).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 2.3 * 4 * 512 * 1536


def test_equal_estimators_make_one_program():
    traces = 0

    def statistic(u, estimator):
        nonlocal traces
        traces += 1
        return estimator(u)

    program = jax.jit(statistic, static_argnames="estimator")
    u = jnp.ones((1, 4, 4))
    for estimator in (Estimator(), Estimator("histogram"), Estimator(bins=256)):
        program(u, estimator=estimator)
    assert traces == 1


# Arguments


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"kind": "median"}, "kind"),
        ({"range": "quantile"}, "range"),
        ({"units": "bans"}, "units"),
        ({"bins": 1}, "bins"),
        ({"eps": -1.0}, "eps"),
        ({"eps": math.nan}, "eps"),
        ({"stride": 0}, "stride"),
    ],
)
def test_estimators_that_cannot_be_are_named(changes, name):
    with pytest.raises(ValueError, match=f"^{name}: got"):
        Estimator(**changes)


@pytest.mark.parametrize(
    ("u", "lengths", "name"),
    [
        (np.zeros(5, np.float32), None, "u"),
        (np.zeros((2, 5), np.int32), None, "u"),
        (np.zeros((2, 5, 4), np.float32), np.zeros(3, np.int32), "lengths"),
        (np.zeros((5, 4), np.float32), np.zeros(1, np.int32), "lengths"),
    ],
)
def test_arrays_that_do_not_fit_are_named(u, lengths, name):
    for call in (Estimator(), Estimator().numpy, variance):
        with pytest.raises(ValueError, match=f"^{name}: got"):
            call(u, lengths)


def test_more_values_than_counts_hold_are_refused():
    with pytest.raises(ValueError, match=r"^u: got 4294967296 values"):
        jax.eval_shape(Estimator(), jax.ShapeDtypeStruct((2**16, 2**16), jnp.float32))
    with pytest.raises(ValueError, match=r"^u: got 8388608 positions"):
        jax.eval_shape(Estimator("token", stride=1), jax.ShapeDtypeStruct((2**23, 1), jnp.float32))


# The rest


def test_variance_is_the_plain_one():
    rng = np.random.default_rng(8)
    u = (rng.standard_normal((2, 50, 30)) * 2 + 1).astype(np.float32)
    assert float(variance(u)) == pytest.approx(u.astype(np.float64).var(), rel=1e-5)
    lengths = np.array([50, 20], np.int32)
    kept = np.concatenate([u[0], u[1, :20]]).astype(np.float64)
    assert float(jax.jit(variance)(u, lengths)) == pytest.approx(kept.var(), rel=1e-5)
    u[1, 20:] = np.nan
    assert float(variance(u)) == pytest.approx(kept.var(), rel=1e-5)
    assert float(variance(np.zeros((0, 3), np.float32))) == 0


def test_ema():
    assert ema(None, 3.0) == 3.0
    assert ema(1.0, 3.0) == pytest.approx(0.85 + 0.45)
    average = None
    for _ in range(7):
        average = ema(average, 1.0) if average is not None else 0.0
    assert average == pytest.approx(1 - 0.85**6)  # e ** -1 of a step is left after 6.15 updates
    assert float(ema(jnp.float32(0), jnp.float32(2), 0.5)) == 1
    with pytest.raises(ValueError, match=r"^decay: got"):
        ema(1.0, 1.0, 1.0)


def test_every_kth_layer():
    assert every_kth_layer(10, 4) == (0, 0, 0, 0, 4, 4, 4, 4, 8, 8)
    assert every_kth_layer(3, 1) == (0, 1, 2)
    assert every_kth_layer(0, 4) == ()
    with pytest.raises(ValueError, match=r"^k: got"):
        every_kth_layer(3, 0)
    with pytest.raises(ValueError, match=r"^n_layer: got"):
        every_kth_layer(-1, 1)
