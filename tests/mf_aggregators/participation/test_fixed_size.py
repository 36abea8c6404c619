"""The dominating pair of fixed-size subsets, against all subsets of small parts."""

import itertools
import math

import numpy as np
import pytest
import scipy.stats
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators.participation import fixed_size
from mf_aggregators.participation.poisson import SampledGaussianLoss
from tests.examples import examples

_EPSILONS = np.array([0.0, 0.2, 0.7, 1.5, 3.0])


def _density(points: np.ndarray, means: np.ndarray, sigma: float) -> np.ndarray:
    """Of a uniform mixture of normal distributions at (k, d) points."""
    found = np.zeros(len(points))
    for mean in means:
        found += np.prod(scipy.stats.norm.pdf(points, mean, sigma), axis=1)
    return found / len(means)


@given(
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 2),
    st.floats(0.5, 2.0),
    st.integers(0, 2**32),
)
@settings(max_examples=examples(80), deadline=None)
def test_no_batch_of_small_parts_gets_beyond_the_pair(
    size: int, batch: int, dimensions: int, sigma: float, seed: int
) -> None:
    """Clients with any updates of norm at most 1; the first one is zeroed."""
    batch = min(batch, size)
    rng = np.random.default_rng(seed)
    updates = rng.normal(size=(size, dimensions))
    if rng.random() < 0.5:
        updates = np.sign(updates[:, :1]) * np.eye(dimensions)[0]
    updates /= np.maximum(1.0, np.linalg.norm(updates, axis=1, keepdims=True))
    zeroed = updates.copy()
    zeroed[0] = 0.0
    axis = np.linspace(-batch - 7.0 * sigma, batch + 7.0 * sigma, 4001 if dimensions == 1 else 301)
    points = np.stack(np.meshgrid(*[axis] * dimensions, indexing="ij"), -1).reshape(-1, dimensions)
    cell = (axis[1] - axis[0]) ** dimensions
    # Where the larger of two densities changes, a sum over cells is off by a share of their area.
    margin = 1e-6 + 0.03 * ((axis[1] - axis[0]) / sigma) ** 2
    subsets = [list(each) for each in itertools.combinations(range(size), batch)]
    p = _density(points, np.array([updates[each].sum(axis=0) for each in subsets]), sigma)
    q = _density(points, np.array([zeroed[each].sum(axis=0) for each in subsets]), sigma)
    share = batch / size
    with_client = fixed_size.divergence_with(sigma, share, _EPSILONS)
    without = fixed_size.divergence_without(sigma, share, _EPSILONS)
    for epsilon, most, most_without in zip(_EPSILONS, with_client, without, strict=True):
        factor = math.exp(epsilon)
        assert cell * np.sum(np.maximum(p - factor * q, 0.0)) <= most + margin
        assert cell * np.sum(np.maximum(q - factor * p, 0.0)) <= most_without + margin


@pytest.mark.parametrize("share", [0.05, 0.5, 1.0])
@pytest.mark.parametrize("sigma", [0.4, 1.3])
def test_the_bounds_are_attained(share: float, sigma: float) -> None:
    """Where all other clients have the opposite update, and where they have the same one."""
    grid = np.linspace(-12.0, 12.0, 100_001)
    step = grid[1] - grid[0]

    def density(mean: float) -> np.ndarray:
        return np.asarray(scipy.stats.norm.pdf(grid, mean, sigma))

    for epsilon in _EPSILONS:
        factor = math.exp(epsilon)
        p = (1 - share) * density(-1.0) + share * density(1.0)
        q = (1 - share) * density(-1.0) + share * density(0.0)
        found = fixed_size.divergence_with(sigma, share, np.array([epsilon]))[0]
        expected = step * np.sum(np.maximum(p - factor * q, 0.0))
        assert found == pytest.approx(expected, abs=1e-6)
        p, q = density(1.0), (1 - share) * density(1.0) + share * density(0.0)
        found = fixed_size.divergence_without(sigma, share, np.array([epsilon]))[0]
        assert found == pytest.approx(step * np.sum(np.maximum(q - factor * p, 0.0)), abs=1e-6)


@given(st.floats(0.3, 3.0), st.floats(0.01, 1.0))
@settings(max_examples=examples(40), deadline=None)
def test_poisson_sampling_does_not_dominate(sigma: float, share: float) -> None:
    """Subsets cost no less than Poisson samples, and where q < 1 they cost more."""
    poisson = SampledGaussianLoss(
        sigma, sensitivity=1.0, sampling_prob=share, adjacency_type=AdjacencyType.REMOVE
    ).get_delta_for_epsilon(_EPSILONS)
    found = fixed_size.divergence_with(sigma, share, _EPSILONS)
    assert np.all(found >= poisson - 1e-12)
    without = fixed_size.divergence_without(sigma, share, _EPSILONS)
    np.testing.assert_allclose(without, poisson, atol=1e-12)
    if share < 0.9 and found[2] > 1e-9:
        assert found[2] > poisson[2]


@given(st.floats(0.3, 3.0), st.floats(0.01, 1.0))
@settings(max_examples=examples(20), deadline=None)
def test_grids_round_up(sigma: float, share: float) -> None:
    loss = fixed_size.FixedSizeSampling.loss_distribution(sigma, share, 1e-3)
    exact = fixed_size.divergence_with(sigma, share, _EPSILONS)
    for epsilon, delta in zip(_EPSILONS, exact, strict=True):
        found = float(loss.get_delta_for_epsilon(float(epsilon)))
        assert delta - 1e-12 <= found <= delta * 1.01 + 1e-7


def test_two_batches_are_composed_without_loss() -> None:
    """Two subsets of one of two clients, integrated over both outputs, for fixed updates."""
    sigma, epsilon = 1.0, 0.8
    grid = np.linspace(-8.0, 8.0, 801)
    step = grid[1] - grid[0]

    def mixture(*means: float) -> np.ndarray:
        return np.asarray(np.mean([scipy.stats.norm.pdf(grid, m, sigma) for m in means], axis=0))

    loss = fixed_size.FixedSizeSampling.loss_distribution(sigma, 0.5, 1e-3).self_compose(2)
    bound = float(loss.get_delta_for_epsilon(epsilon))
    exact = []
    for other in (-1.0, 0.0, 1.0):
        p, q = mixture(other, 1.0), mixture(other, 0.0)
        both, neither = np.outer(p, p), np.outer(q, q)
        for upper, lower in ((both, neither), (neither, both)):
            exact.append(step**2 * np.sum(np.maximum(upper - math.exp(epsilon) * lower, 0.0)))
    # The two directions of one query are worst for different updates of the others.
    assert max(exact) <= bound <= 1.1 * max(exact)
