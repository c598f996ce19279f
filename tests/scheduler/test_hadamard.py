"""The Hadamard rotation, the exact test of the theorem's premise, and the failure of its conclusion."""

import itertools
import math

import numpy as np
import pytest
import scipy.linalg
import scipy.optimize

from mamba_jax.scheduler.hadamard import (
    SINKHORN_WIDTHS,
    entropy_gain,
    hadamard,
    majorizes,
    own_masses,
    shannon,
    shared_masses,
    sinkhorn_fit,
)

SEEDS = range(8)


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


@pytest.mark.parametrize("d", [1, 2, 8, 64])
def test_it_is_the_normalised_sylvester_matrix(d):
    x = normal(d, 3, 2, d)
    np.testing.assert_allclose(hadamard(x), x @ (scipy.linalg.hadamard(d) / math.sqrt(d)), rtol=0, atol=1e-14)
    np.testing.assert_allclose(hadamard(hadamard(x)), x, rtol=0, atol=1e-14)


@pytest.mark.parametrize(("n", "d"), [(3, 4), (192, 256), (256, 256), (257, 512)])
def test_padding_keeps_norms_and_products(n, d):
    x, weight = normal(0, 5, n), normal(1, 7, n)
    z = hadamard(x)
    assert z.shape == (5, d)
    np.testing.assert_allclose(np.linalg.norm(z, axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-14)
    np.testing.assert_allclose(z @ hadamard(weight).T, x @ weight.T, rtol=0, atol=1e-12)


def test_peaks_obey_theorem_4_and_one_outlier_falls_by_the_root_of_d():
    x = normal(0, 100, 64) * (np.random.default_rng(1).random((100, 64)) < 0.05)
    z = hadamard(x)
    bound = np.abs(x).sum(-1) / 8
    assert (np.abs(z).max(-1) <= bound * (1 + 1e-14)).all()
    spike = np.zeros(256)
    spike[37] = -12.0
    np.testing.assert_allclose(np.abs(hadamard(spike)), 12 / 16, rtol=1e-15)


def test_histograms_by_hand():
    values = np.array([0.0, 1.0, 2.0, 4.0])
    np.testing.assert_array_equal(own_masses(values, bins=4), [0.25, 0.25, 0.25, 0.25])
    np.testing.assert_array_equal(own_masses(values, bins=2), [0.5, 0.5])
    # A quarter of the width on each side: bins from -1 to 5.
    np.testing.assert_array_equal(own_masses(values, bins=2, margin=0.25), [0.5, 0.5])
    np.testing.assert_array_equal(own_masses(values, bins=6, margin=0.25), [0, 0.25, 0.25, 0.25, 0, 0.25])
    p, q = shared_masses(values, np.array([7.0, 8.0]), bins=4, margin=0.0)
    np.testing.assert_array_equal(p, [0.5, 0.25, 0.25, 0])
    np.testing.assert_array_equal(q, [0, 0, 0, 1])


def test_entropy_of_known_distributions():
    assert shannon(np.array([1.0, 0.0])) == 0
    assert shannon(np.full(64, 1 / 64)) == pytest.approx(math.log(64), abs=1e-14)
    assert shannon(np.array([0.5, 0.25, 0.25])) == pytest.approx(1.5 * math.log(2), abs=1e-15)
    assert shannon(own_masses(np.full(10, 3.0))) == 0
    # Widening the range leaves bins empty, so a uniform tensor cannot reach ln K: 58 full bins and two eleventh parts.
    even = np.linspace(0, 1, 1_000_000)
    assert shannon(own_masses(even)) == pytest.approx(math.log(64), abs=1e-6)
    width = 1.1 / 64
    ceiling = math.log(1 / width) + 2 * width / 11 * math.log(11)
    assert shannon(own_masses(even, margin=0.05)) == pytest.approx(ceiling, abs=1e-5)


def exists_doubly_stochastic(p, q):
    """Whether a linear program finds B with q = B p: the definition that `majorizes` decides by sorting."""
    m = len(p)
    rows = np.kron(np.eye(m), np.ones(m))
    columns = np.kron(np.ones(m), np.eye(m))
    products = np.kron(np.eye(m), p)
    wanted = np.concatenate([np.ones(2 * m), q])
    found = scipy.optimize.linprog(np.zeros(m * m), A_eq=np.vstack([rows, columns, products]), b_eq=wanted)
    return found.status == 0


def test_majorization_agrees_with_a_search_for_the_matrix():
    # Sixteenths keep the linear program away from its tolerance.
    rng = np.random.default_rng(0)
    answers = []
    for _ in range(60):
        p, q = (rng.multinomial(16, rng.dirichlet(np.full(4, a))) / 16 for a in (0.7, 3.0))
        answers.append(majorizes(p, q))
        assert answers[-1] == exists_doubly_stochastic(p, q)
    assert 10 < sum(answers) < 50


@pytest.mark.parametrize("seed", SEEDS)
def test_mixing_is_recognised_and_raises_entropy(seed):
    rng = np.random.default_rng(seed)
    permutations = np.array([np.eye(16)[rng.permutation(16)] for _ in range(5)])
    mixing = np.tensordot(rng.dirichlet(np.ones(5)), permutations, 1)
    p = rng.dirichlet(np.full(16, 0.5))
    q = mixing @ p
    assert majorizes(p, q)
    assert not majorizes(q, p)
    assert shannon(q) > shannon(p)


def test_the_extremes_and_an_incomparable_pair():
    point, even = np.array([0.0, 1, 0, 0]), np.full(4, 0.25)
    assert majorizes(point, even)
    assert not majorizes(even, point)
    assert majorizes(point, point[::-1].copy())
    p, q = np.array([0.6, 0.2, 0.2]), np.array([0.5, 0.4, 0.1])
    assert not majorizes(p, q)
    assert not majorizes(q, p)
    # Entropy alone proves nothing: it falls from p to q here without any order between them.
    assert shannon(q) < shannon(p)


def test_entropy_may_stay_although_the_matrix_is_no_permutation():
    # The main text's Theorem 2 claims strict growth here; appendix C asks for a row that mixes unequal values.
    p = np.array([0.25, 0.25, 0.5])
    mixing = np.array([[0.5, 0.5, 0], [0.5, 0.5, 0], [0, 0, 1]])
    assert shannon(mixing @ p) == shannon(p)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_mean_collects_in_one_coordinate_and_lowers_the_measured_entropy(seed):
    # The paper's falsification, -1.40 +- 0.37 nats over 160 real pairs, in activations with nothing real about them.
    x = np.random.default_rng(seed).normal(0.66, 1.0, (16, 2048))
    z = hadamard(x)
    np.testing.assert_allclose(z[:, 0], math.sqrt(2048) * x.mean(-1), rtol=1e-12)
    assert -1.40 - 0.37 < entropy_gain(x, z) < -1.40 + 0.37
    # It is the range: without that coordinate, or without the mean, nothing falls; over common bins nothing moves.
    assert abs(entropy_gain(x, z[:, 1:])) < 0.2
    centred = x - x.mean(-1, keepdims=True)
    assert abs(entropy_gain(centred, hadamard(centred))) < 0.2
    p, q = shared_masses(x, z)
    assert abs(shannon(q) - shannon(p)) < 0.01


def test_the_greater_the_mean_the_more_entropy_falls():
    means = (0.0, 0.1, 0.2, 0.4, 0.66, 1.0)
    draws = [[np.random.default_rng(seed).normal(mean, 1.0, (16, 2048)) for seed in SEEDS] for mean in means]
    gains = [np.mean([entropy_gain(x, hadamard(x)) for x in xs]) for xs in draws]
    assert all(after < before - 0.1 for before, after in itertools.pairwise(gains))


@pytest.mark.parametrize("seed", SEEDS)
def test_zero_mean_is_not_enough_for_a_gain_and_heavy_tails_are(seed):
    rng = np.random.default_rng(seed)
    even, heavy = rng.random((16, 2048)) - 0.5, rng.standard_t(3, (16, 2048))
    assert entropy_gain(even, hadamard(even)) < -0.4
    assert entropy_gain(heavy, hadamard(heavy)) > 1.0
    # Over common bins both gain a little, and neither by the theorem: there is no doubly stochastic matrix.
    for x in (even, heavy):
        p, q = shared_masses(x, hadamard(x), margin=0.0)
        assert 0.1 < shannon(q) - shannon(p) < 0.25
        assert not majorizes(p, q)


def test_the_sinkhorn_fit_finds_the_blur_that_was_applied():
    p = np.random.default_rng(0).dirichlet(np.full(64, 0.3))
    for width2 in SINKHORN_WIDTHS:
        kernel = np.maximum(np.exp(-(np.subtract.outer(np.arange(64), np.arange(64)) ** 2) / width2), 1e-12)
        for _ in range(200):
            kernel = kernel / kernel.sum(1)[:, None]
            kernel = kernel / kernel.sum(0)[None]
        fit = sinkhorn_fit(p, kernel @ p)
        assert fit.width2 == width2
        assert fit.l1 < 1e-12
        assert fit.row_error < 1e-4


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: hadamard(np.float64(1)), r"x: got shape \(\)"),
        (lambda: hadamard(np.ones((2, 0))), r"x: got shape \(2, 0\)"),
        (lambda: own_masses(np.ones(0)), "values: got no values"),
        (lambda: own_masses(np.array([1.0, np.nan])), "values: got NaN or infinity"),
        (lambda: own_masses(np.ones(2), bins=0), "bins: got 0"),
        (lambda: own_masses(np.ones(2), margin=-0.1), "margin: got -0.1"),
        (lambda: shared_masses(np.ones(2), np.array([np.inf])), "after: got NaN or infinity"),
        (lambda: majorizes(np.ones(2), np.ones(2) / 2), "p: got shape"),
        (lambda: majorizes(np.ones(2) / 2, np.array([1.5, -0.5])), "q: got shape"),
        (lambda: majorizes(np.ones(2) / 2, np.ones(3) / 3), "q: got shape"),
        (lambda: sinkhorn_fit(np.ones(2) / 2, np.ones(3) / 3), "q: got shape"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
