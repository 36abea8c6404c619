"""Certified epsilons of balls in bins against enumeration, integration and attacks.

Two bins leave two numbers of all outputs. Their divergences are integrals over one number of a
closed form in the other one, for any weights of the bins, and so for what an adaptive server makes
of them after any round. More bins are compared with samples of another distribution than that of
the certificates: the dominating mixture itself and one of larger means, half of each.
"""

import itertools
import math
from typing import Any

import numpy as np
import pytest
from scipy import special

from mf_aggregators.kernel.certificate import _BallsInBinsRounds
from mf_aggregators.participation import certificate_search
from tests.mf_aggregators import brute_force, participation_patterns
from tests.mf_aggregators.participation_patterns import dominating_pair

_DELTA = 1e-3
# Where normal numbers are integrated over, with what exponentials make of them; and more coarsely.
_FINE, _COARSE = np.linspace(-9.0, 15.0, 241), np.linspace(-7.0, 11.0, 73)
_KINDS = ("positive", "signs", "alternating", "decaying")


def _matrix(kind: str, num_rounds: int) -> np.ndarray:
    """A lower-triangular matrix whose largest column has norm one."""
    rng = np.random.default_rng(num_rounds)
    lags = np.subtract.outer(np.arange(num_rounds), np.arange(num_rounds))
    matrix = {
        "positive": rng.uniform(0.05, 1.0, lags.shape),
        "signs": rng.uniform(-1.0, 1.0, lags.shape),
        "alternating": np.where(lags % 2, -0.6, 0.5),
        "decaying": 0.7 ** np.abs(lags),
    }[kind]
    matrix[np.diag_indices(num_rounds)] = 1.0
    matrix = np.tril(matrix)
    return np.asarray(matrix / np.sqrt(np.max(np.sum(matrix**2, axis=0))))


def _chosen(num_rounds: int, num_bins: int) -> np.ndarray:
    return np.equal.outer(np.arange(num_rounds) % num_bins, np.arange(num_bins)).astype(float)


def _above(weights: np.ndarray, gram: np.ndarray, level: float) -> np.ndarray:
    """E max(0, w_1 e_1 + w_2 e_2 - level), for e of normal numbers of covariances ``gram``.

    Args:
      weights: (..., 2), not negative.
      gram: (..., 2, 2), of both exponents, with the same axes before.
      level: Above 0.
    """
    nodes, masses = _FINE, _masses(_FINE)
    long = np.sqrt(gram[..., 0, 0])
    across = gram[..., 0, 1] / np.where(long > 0.0, long, 1.0)
    rest = np.sqrt(np.maximum(gram[..., 1, 1] - across**2, 0.0))[..., None]
    long, across = long[..., None], across[..., None]
    left = level - weights[..., :1] * np.exp(long * nodes - long**2 / 2)
    mean = weights[..., 1:] * np.exp(across * nodes - across**2 / 2)
    mean, left = np.broadcast_arrays(mean, left)
    # The mean of max(0, m e^(r z - r^2 / 2) - left), as the price of an option.
    spread = np.maximum(np.broadcast_to(rest, mean.shape), 1e-9)
    with np.errstate(divide="ignore", invalid="ignore"):
        first = np.log(mean / left) / spread + spread / 2
        option = mean * special.ndtr(first) - left * special.ndtr(first - spread)
    option = np.where(left <= 0.0, mean - left, np.where(mean > 0.0, option, 0.0))
    return np.asarray(option @ masses)


def _masses(nodes: np.ndarray) -> np.ndarray:
    density = np.exp(-(nodes**2) / 2) / math.sqrt(2.0 * math.pi)
    return np.asarray(density * (nodes[1] - nodes[0]))


def _both(gram: np.ndarray, epsilon: float) -> np.ndarray:
    """Both hockey-stick divergences of two bins at most, by covariances of their exponents."""
    half = np.full((*gram.shape[:-2], 2), 0.5)
    forward = _above(half, gram, math.exp(epsilon))
    # max(0, k - x) is max(0, x - k) + k - x, and the mean of P/Q is one.
    low = math.exp(-epsilon)
    backward = math.exp(epsilon) * (_above(half, gram, low) + low - 1.0)
    return np.stack([forward, backward])


def _certified(matrix: np.ndarray, num_bins: int, sigma: float) -> float:
    pair = dominating_pair(_BallsInBinsRounds(num_bins), np.abs(matrix), sigma)
    found = certificate_search.proved(
        pair, _DELTA, certificate_search.Certification(max_samples=2**15)
    )
    assert found is not None
    return found.epsilon


def test_integrals_are_those_of_one_and_two_normal_numbers() -> None:
    """Against the closed form of one Gaussian mechanism, and the sum over a grid of two numbers."""
    gram = np.full((2, 2), 0.8)
    mu, epsilon = math.sqrt(0.8), 0.7
    expected = special.ndtr(mu / 2 - epsilon / mu)
    expected -= math.exp(epsilon) * special.ndtr(-mu / 2 - epsilon / mu)
    np.testing.assert_allclose(_both(gram, epsilon), expected, rtol=1e-3)
    means = np.array([[1.1, 0.0], [0.3, 0.9]])
    axis = np.linspace(-9.0, 10.0, 1201)
    grid = np.stack(np.meshgrid(axis, axis, indexing="ij"))
    q = np.exp(-np.sum(grid**2, axis=0) / 2) / (2 * math.pi) * (axis[1] - axis[0]) ** 2
    exponents = np.tensordot(means, grid, axes=1) - np.sum(means**2, axis=1)[:, None, None] / 2
    p = q * np.mean(np.exp(exponents), axis=0)
    found = [brute_force.hockey_stick(*pair, 0.4) for pair in ((p, q), (q, p))]
    np.testing.assert_allclose(_both(means @ means.T, 0.4), found, rtol=2e-3)


_SHORT = [("positive", 3), ("signs", 5), ("decaying", 8)]
_ALL = [(kind, n) for kind in _KINDS for n in range(2, 9) if (kind, n) not in _SHORT]


@pytest.mark.long_cases(5)
@pytest.mark.short_cases(1)
@pytest.mark.parametrize(
    ("kind", "num_rounds"),
    [*_SHORT, *(pytest.param(*each, marks=pytest.mark.long) for each in _ALL)],
)
def test_no_server_gets_beyond_what_two_bins_are_certified_for(kind: str, num_rounds: int) -> None:
    """All updates of -1, 0 and 1, and servers that choose one of them by what was released.

    The best of them has nearly the delta that is certified where entries are of one sign.
    """
    matrix, chosen = _matrix(kind, num_rounds), _chosen(num_rounds, 2)
    sigma = 0.6 * math.sqrt(num_rounds)
    epsilon = _certified(matrix, 2, sigma)
    vectors = np.abs(matrix) @ chosen / sigma
    pair = float(np.max(_both(vectors.T @ vectors, epsilon)))
    assert 0.6 * _DELTA <= pair <= _DELTA

    updates = np.array(list(itertools.product([-1.0, 0.0, 1.0], repeat=num_rounds - 1)))
    updates = np.concatenate([np.ones((len(updates), 1)), updates], axis=1)
    means = np.einsum("ij,uj,jb->uib", matrix, updates, chosen) / sigma
    grams = np.einsum("uib,uic->ubc", means, means)
    attacks = np.max(_both(grams, epsilon), axis=0)
    assert np.max(attacks) <= pair * (1.0 + 1e-6) + 1e-9
    if np.all(matrix >= 0.0):
        # A tenth less than what is certified is false.
        assert np.max(_both(grams[np.argmax(attacks)], 0.9 * epsilon)) > _DELTA

    # In two dimensions, of all updates along both axes.
    if num_rounds <= 5:
        choices = np.array([[0.0, 0.0], [1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]])
        picked = np.array(list(itertools.product(range(4), repeat=num_rounds)))
        planar = np.einsum("ij,ujd,jb->uibd", matrix, choices[picked], chosen) / sigma
        found = _both(np.einsum("uibd,uicd->ubc", planar, planar), epsilon)
        assert np.max(attacks) <= np.max(found) * (1.0 + 1e-9) <= pair * (1.0 + 1e-6)

    # One update is chosen for each output of the rounds before, those after it are as before.
    best = updates[np.argmax(attacks)]
    for turn in sorted({1, num_rounds // 2, num_rounds - 1}):
        adaptive = _adaptive(matrix, best, turn, sigma, epsilon)
        assert np.max(attacks) * (1.0 - 1e-2) <= adaptive <= pair * (1.0 + 1e-2)


def _adaptive(
    matrix: np.ndarray, updates: np.ndarray, turn: int, sigma: float, epsilon: float
) -> float:
    """The larger divergence if the update of one round is the worst one for what came before."""
    chosen = _chosen(len(matrix), 2)
    before: Any = np.linalg.qr(matrix[:turn] @ (updates[:, None] * chosen) / sigma, mode="r")
    axes = np.meshgrid(*[_COARSE] * len(before), indexing="ij")
    grid = np.stack(axes).reshape(len(before), -1)
    masses = np.prod(_masses(_COARSE)[np.searchsorted(_COARSE, grid)], axis=0)
    exponents = before.T @ grid - 0.5 * np.sum(before**2, axis=0)[:, None]
    weights = 0.5 * np.exp(exponents.T)
    best = np.zeros((2, len(weights)))
    for choice in (-1.0, 0.0, 1.0):
        changed = updates.copy()
        changed[turn] = choice
        later = matrix[turn:] @ (changed[:, None] * chosen) / sigma
        gram = np.broadcast_to(later.T @ later, (len(weights), 2, 2))
        low = math.exp(-epsilon)
        forward = _above(weights, gram, math.exp(epsilon))
        below = _above(weights, gram, low) + low - np.sum(weights, axis=1)
        best = np.maximum(best, [forward, math.exp(epsilon) * below])
    return float(np.max(best @ masses))


def _sampled(
    distribution: _BallsInBinsRounds, matrix: np.ndarray, sigma: float, epsilon: float, count: int
) -> tuple[float, float]:
    """The divergence of P from Q and its standard error, by a mixture of P and larger means."""
    rng, pattern = np.random.default_rng(7), participation_patterns.of(distribution, matrix, sigma)
    means, squares = pattern.means, np.sum(pattern.means**2, axis=1)[:, None]
    scales = rng.choice([1.0, 1.6], size=count)
    which = rng.integers(len(means), size=count)
    outputs = scales * means[which].T + rng.normal(0.0, sigma, (means.shape[1], count))
    products = means @ outputs
    p, far = (
        np.mean(np.exp((scale * products - scale**2 * squares / 2) / sigma**2), axis=0)
        for scale in (1.0, 1.6)
    )
    terms = np.maximum(p - math.exp(epsilon), 0.0) / (0.5 * (p + far))
    return float(np.mean(terms)), float(np.std(terms)) / math.sqrt(count)


_SHORT_BINS = [("signs", 5, 1), ("positive", 5, 3), ("alternating", 8, 8)]
_ALL_BINS = [
    (kind, n, bins)
    for kind in _KINDS
    for n in range(2, 9)
    for bins in range(1, n + 2)
    if (kind, n, bins) not in _SHORT_BINS
]


@pytest.mark.long_cases(15)
@pytest.mark.short_cases(1)
@pytest.mark.parametrize(
    ("kind", "num_rounds", "num_bins"),
    [
        *_SHORT_BINS,
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in [*_ALL_BINS, ("decaying", 40, 6), ("signs", 60, 16)]
        ),
    ],
)
def test_what_is_certified_holds_for_any_number_of_bins(
    kind: str, num_rounds: int, num_bins: int
) -> None:
    """And hardly more does; five standard errors are exceeded once in three million tests."""
    matrix = np.abs(_matrix(kind, num_rounds))
    sigma = 0.8 * math.sqrt(num_rounds / num_bins) + 0.4
    epsilon = _certified(matrix, num_bins, sigma)
    found, error = _sampled(_BallsInBinsRounds(num_bins), matrix, sigma, epsilon, 2**17)
    assert error < 0.1 * _DELTA
    assert found - 5.0 * error <= _DELTA
    # The larger of both divergences is nearly what is certified, in bins that are few the other.
    less, _ = _sampled(_BallsInBinsRounds(num_bins), matrix, sigma, 0.8 * epsilon, 2**17)
    assert less > 1.2 * _DELTA
