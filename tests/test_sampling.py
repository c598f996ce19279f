import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mamba_jax import sampling
from mamba_jax.sampling import Sampler, row_keys, sample


def unseen(logits):
    return jnp.zeros(logits.shape, bool)


def stack(*samplers):
    return jax.tree.map(lambda *rows: jnp.concatenate(rows), *samplers)


def logits_of(batch, vocab, seed=0):
    return jnp.asarray(3 * np.random.default_rng(seed).normal(size=(batch, vocab)).astype("float32"))


jit_sample = jax.jit(sample)


def draw(logits, seed=0, step=0, seen=None, **settings):
    logits = jnp.asarray(logits, jnp.float32)
    batch = logits.shape[0]
    return np.asarray(
        jit_sample(
            logits,
            row_keys(seed, batch),
            step,
            Sampler.of(batch, **settings),
            unseen(logits) if seen is None else seen,
        )
    )


@jax.jit
def draw_steps(logits, keys, steps, sampler):
    """(n, b) tokens of many steps over the same logits."""
    return jax.lax.map(lambda step: sample(logits, keys, step, sampler, unseen(logits)), steps)


def final_logits(logits, sampler, seen=None):
    """What `sample` draws from by softmax."""
    seen = unseen(logits) if seen is None else seen
    x = sampling._penalised(logits, sampler.repetition_penalty, seen)
    return np.asarray(sampling._filter(sampling._scale(x, sampler.temperature), sampler), np.float64)


def probabilities(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def reference(logits, seen, temperature, top_k, top_p, min_p, repetition_penalty):
    """Float64 probabilities of one row, by sorting; ties at a threshold are kept."""
    x = np.asarray(logits, np.float64)
    x = np.where(seen, np.where(x > 0, x / repetition_penalty, x * repetition_penalty), x) / temperature
    x = np.where(x >= np.sort(x)[::-1][min(top_k or len(x), len(x)) - 1], x, -np.inf)
    p = probabilities(x)
    above = np.array([p[x > value].sum() for value in x])
    x = np.where(above < top_p, x, -np.inf) if top_p not in (None, 1.0) else x
    p = probabilities(x)
    return probabilities(np.where(p >= (min_p or 0.0) * p.max(), x, -np.inf))


SETTINGS = [
    {},
    {"temperature": 0.3},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 1000},
    {"top_p": 1.0},
    {"top_p": 0.9},
    {"top_p": 0.05},
    {"top_p": 1e-60},
    {"min_p": 0.0},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.8},
    {"temperature": 1.7, "top_k": 40, "top_p": 0.95, "min_p": 0.02, "repetition_penalty": 1.3},
    {"temperature": 0.8, "top_p": 0.7, "repetition_penalty": 0.6},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_probabilities_match_a_sorting_reference(settings):
    settings = {"temperature": 1.0, "top_k": None, "top_p": None, "min_p": None, "repetition_penalty": 1.0} | settings
    logits = logits_of(4, 257)
    seen = jnp.asarray(np.random.default_rng(1).random(logits.shape) < 0.3)
    got = probabilities(final_logits(logits, Sampler.of(4, **settings), seen))
    for row in range(4):
        want = reference(logits[row], np.asarray(seen[row]), **settings)
        np.testing.assert_array_equal(got[row] > 0, want > 0)
        np.testing.assert_allclose(got[row], want, rtol=2e-5, atol=1e-9)


@pytest.mark.parity
def test_filters_match_transformers():
    torch = pytest.importorskip("torch")
    from transformers.generation import logits_process as theirs

    logits = np.array(logits_of(3, 500, seed=2))
    ids = np.arange(30).reshape(3, 10) * 7 % 500
    seen = np.zeros(logits.shape, bool)
    np.put_along_axis(seen, ids, True, 1)
    chain = [
        theirs.RepetitionPenaltyLogitsProcessor(1.2),
        theirs.TemperatureLogitsWarper(0.7),
        theirs.TopKLogitsWarper(60),
        theirs.TopPLogitsWarper(0.92),
        theirs.MinPLogitsWarper(0.01),
    ]
    scores = torch.tensor(logits)
    for step in chain:
        scores = step(torch.tensor(ids), scores)
    want = torch.softmax(scores.double(), -1).numpy()
    sampler = Sampler.of(3, temperature=0.7, top_k=60, top_p=0.92, min_p=0.01, repetition_penalty=1.2)
    got = probabilities(final_logits(jnp.asarray(logits), sampler, jnp.asarray(seen)))
    np.testing.assert_array_equal(got > 0, want > 0)
    np.testing.assert_allclose(got, want, rtol=2e-5)


# The draw


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.5, "top_k": 9}, {"top_p": 0.8, "min_p": 0.02}], ids=str)
def test_frequencies_match_the_probabilities(settings):
    """Chi-square over 20000 draws with fixed keys; 4 standard deviations above the mean."""
    sampler = Sampler.of(2, **{"temperature": 1.0, **settings})
    logits, draws = logits_of(2, 16) / 2, 20_000
    tokens = np.asarray(draw_steps(logits, row_keys([3, 4], 2), jnp.arange(draws), sampler))
    want = probabilities(final_logits(logits, sampler))
    for row in range(2):
        counts = np.bincount(tokens[:, row], minlength=16)
        assert not counts[want[row] == 0].any()
        expected = draws * want[row][want[row] > 0]
        chi2 = ((counts[want[row] > 0] - expected) ** 2 / expected).sum()
        freedom = len(expected) - 1
        assert chi2 < freedom + 4 * np.sqrt(2 * freedom)


def test_unlikely_tokens_are_drawn_as_often_as_they_should():
    """100000 tokens of probability 5e-7 each must win 5% of the draws: the noise has no low ceiling."""
    vocab = 100_001
    logits = jnp.full((1, vocab), np.log(5e-7)).at[0, 0].set(np.log(0.95))
    tokens = draw_steps(logits, row_keys(0, 1), jnp.arange(500), Sampler.of(1, temperature=1.0))
    assert abs(np.mean(np.asarray(tokens) > 0) - 0.05) < 4 * np.sqrt(0.05 * 0.95 / 500)
    assert len(np.unique(tokens)) == 1 + np.count_nonzero(np.asarray(tokens))


def test_steps_and_seeds_are_independent():
    logits = jnp.zeros((1, 1000))
    sampler = Sampler.of(1, temperature=1.0)
    first = np.asarray(draw_steps(logits, row_keys(0, 1), jnp.arange(400), sampler))[:, 0]
    other = np.asarray(draw_steps(logits, row_keys(1, 1), jnp.arange(400), sampler))[:, 0]
    assert len(np.unique(first)) > 250
    assert np.mean(first == other) < 0.02
    assert np.mean(first[1:] == first[:-1]) < 0.02


def test_step_may_differ_by_row():
    logits = logits_of(1, 100)
    both = jnp.concatenate([logits, logits])
    got = draw(both, temperature=1.0, step=jnp.array([5, 9]))
    assert got[0] == draw(logits, temperature=1.0, step=5)[0]
    assert got[1] == draw(logits, temperature=1.0, step=9)[0]


# Rows do not see each other


MIXED = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 1.3, "top_k": 30},
    {"temperature": 0.9, "top_p": 0.7, "min_p": 0.05},
]


@pytest.mark.parametrize("prng", ["threefry2x32", "rbg"])
def test_a_row_is_the_same_alone_and_in_any_batch(prng):
    logits = logits_of(4, 300)
    sampler = stack(*(Sampler.of(1, **settings) for settings in MIXED))
    steps = jnp.arange(50)
    alone = [
        np.asarray(draw_steps(logits[i : i + 1], row_keys(i, 1), steps, Sampler.of(1, **MIXED[i]))) for i in range(4)
    ]
    with jax.default_prng_impl(prng):
        together = np.asarray(draw_steps(logits, row_keys(range(4), 4), steps, sampler))
        turned = np.asarray(
            draw_steps(logits[::-1], row_keys([3, 2, 1, 0], 4), steps, jax.tree.map(lambda a: a[::-1], sampler))
        )
    np.testing.assert_array_equal(together, np.concatenate(alone, 1))
    np.testing.assert_array_equal(turned, together[:, ::-1])


def test_every_setting_runs_in_one_program():
    traces = 0

    @jax.jit
    def counted(logits, keys, sampler):
        nonlocal traces
        traces += 1
        return sample(logits, keys, 0, sampler, unseen(logits))

    logits = logits_of(1, 300)
    for settings in [*MIXED, {"repetition_penalty": 1.5}, {"temperature": 1.0, "top_k": 3, "top_p": 0.5, "min_p": 0.1}]:
        counted(logits, row_keys(7, 1), Sampler.of(1, **settings))
    assert traces == 1


# Edges


def test_greedy_takes_the_first_of_the_largest_after_the_penalty():
    logits = jnp.array([[1.0, 5.0, 4.5, 5.0]])
    assert draw(logits) == [1]
    seen = jnp.array([[False, True, False, True]])
    assert draw(logits, seen=seen, repetition_penalty=1.2) == [2]
    assert draw(-logits, seen=jnp.array([[True, False, False, False]]), repetition_penalty=6.0) == [2]


def test_ties_at_the_threshold_are_all_kept():
    logits = jnp.array([[2.0, 1.0, 1.0, 0.0, 1.0]])
    kept = [0, 1, 2, 4]
    for settings in ({"top_k": 2}, {"top_p": 0.6}, {"min_p": float(np.exp(-1.0)) - 1e-6}):
        x = final_logits(logits, Sampler.of(1, temperature=1.0, **settings))
        assert np.flatnonzero(x[0] > -np.inf).tolist() == kept
    zeros = jnp.array([[0.0, -0.0, -1.0]])
    assert np.isfinite(final_logits(zeros, Sampler.of(1, temperature=1.0, top_k=1))[0]).tolist() == [
        True,
        True,
        False,
    ]


def test_masked_ids_are_never_chosen():
    logits = jnp.array([[0.0, 1.0, -jnp.inf, -jnp.inf]])
    assert draw(logits) == [1]
    for settings in ({"temperature": 1e30}, {"temperature": 5.0, "top_k": 3}, {"temperature": 2.0, "top_p": 1.0}):
        assert {int(draw(logits, step=step, **settings)[0]) for step in range(40)} == {0, 1}


def test_one_candidate():
    logits = jnp.array([[-jnp.inf, -7.0, -jnp.inf], [jnp.nan, jnp.nan, 3.0]])
    for settings in MIXED:
        assert draw(logits, **settings).tolist() == [1, 2]
    assert draw(jnp.array([[-2.0]]), temperature=1.0, top_p=0.5).tolist() == [0]


def test_extreme_logits():
    big = float(np.finfo(np.float32).max)
    logits = jnp.array([[jnp.nan, 1.0, jnp.inf, 0.0], [-big, big, -jnp.inf, 0.0], [1e-45, 0.0, -1e-45, -big]])
    for settings in ({}, {"temperature": 0.5}, {"temperature": 1e-30, "top_k": 2}, {"temperature": 1.0, "top_p": 0.1}):
        assert draw(logits, **settings)[:2].tolist() == [2, 1]
        assert 0 <= draw(logits, **settings)[2] < 3
    infinities = jnp.array([[jnp.inf, 3.0, jnp.inf]])
    got = {int(draw(infinities, step=step, temperature=1.0)[0]) for step in range(30)}
    assert got == {0, 2}


@pytest.mark.parametrize("settings", MIXED, ids=str)
def test_nothing_to_choose_is_zero(settings):
    logits = jnp.array([[jnp.nan] * 3, [-jnp.inf] * 3, [-jnp.inf, jnp.nan, 0.0]])
    assert draw(logits, **settings).tolist() == [0, 0, 2]


def test_a_tiny_temperature_is_greedy():
    logits = logits_of(3, 200)
    np.testing.assert_array_equal(draw(logits, temperature=1e-30), draw(logits))


def test_bfloat16_logits_are_sampled_in_float32():
    logits = logits_of(2, 200).astype(jnp.bfloat16)
    sampler, keys = Sampler.of(2, temperature=1.0, top_p=0.9), row_keys(0, 2)
    got = sample(logits, keys, 0, sampler, unseen(logits))
    np.testing.assert_array_equal(got, sample(logits.astype(jnp.float32), keys, 0, sampler, unseen(logits)))


# Arguments


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", 0),
        ("top_k", -1),
        ("top_k", 2.0),
        ("top_k", True),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", float("nan")),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", float("inf")),
    ],
)
def test_a_bad_setting_is_named(name, value):
    with pytest.raises(ValueError, match=f"^{name}: got {value!r}, wanted"):
        Sampler.of(1, **{name: value})


@pytest.mark.parametrize("seed", [-1, 2**64, 0.5, True, "1"])
def test_a_bad_seed_is_named(seed):
    with pytest.raises(ValueError, match=r"^seed: got"):
        row_keys(seed, 1)


def test_one_seed_a_row():
    with pytest.raises(ValueError, match="seed: got 2 seeds for 3 rows"):
        row_keys([1, 2], 3)
    data = row_keys([1, 2**40 + 5, 2**64 - 1], 3)
    assert data.tolist() == [[0, 1], [2**8, 5], [2**32 - 1, 2**32 - 1]]
    assert row_keys(9, 1)[0].tolist() == jax.random.key_data(jax.random.key(9, impl="threefry2x32")).tolist()


@pytest.mark.parametrize("vocab", [1, 5, 255, 256, 257, 4096])
def test_most_likely_is_argmax(vocab):
    logits = np.random.default_rng(0).integers(-3, 3, (6, vocab)).astype(np.float32)
    logits[1] = 7.0
    logits[2] = -np.inf
    logits[3, -1] = np.inf
    logits[4] = -np.inf
    logits[4, -1] = np.finfo(np.float32).min
    logits[5, vocab // 2 :] = 8.0
    np.testing.assert_array_equal(jax.jit(sampling.most_likely)(logits), jnp.argmax(logits, axis=-1))


@pytest.mark.parametrize("choose", [sampling._choose_in_passes, sampling._choose_in_one_pass])
@pytest.mark.parametrize(("vocab", "valid"), [(1, 1), (5, 3), (257, 256), (4096, 4001)])
def test_greedy_choice_and_log_sum_exp(choose, vocab, valid):
    """The choice is among valid ids, the sum over all; ties go to the first; -inf is no NaN."""
    logits = np.random.default_rng(0).integers(-3, 3, (5, vocab)).astype(np.float32)
    logits[1] = 80.0
    logits[2] = np.random.default_rng(1).normal(0, 40, vocab)
    logits[3, : vocab // 2] = -np.inf
    logits[4] = -np.inf
    token, total = jax.jit(choose)(logits, valid)
    np.testing.assert_array_equal(token, logits[:, :valid].argmax(axis=-1))
    np.testing.assert_allclose(total, np.logaddexp.reduce(logits.astype(np.float64), axis=-1), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("choose", [sampling._choose_in_passes, sampling._choose_in_one_pass])
def test_a_nan_among_logits_shows_in_the_log_sum_exp(choose):
    logits = np.zeros((1, 300), np.float32)
    logits[0, 200] = np.nan
    assert np.isnan(jax.jit(choose)(logits, 300)[1]).all()
