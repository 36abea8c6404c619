"""Replicas against sums over all tuples of patterns, and what is drawn against exact integrals."""

import itertools
import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators.kernel import importance_sampling
from mf_aggregators.kernel.dominating_pairs import (
    BallsInBinsRounds,
    DominatingPair,
    MinSeparationRounds,
    RoundsDistribution,
)
from mf_aggregators.kernel.importance_sampling import ImportanceSampler, SamplerOfQ
from tests.examples import examples
from tests.mf_aggregators.participation.monte_carlo import participation_patterns
from tests.mf_aggregators.participation.monte_carlo.participation_patterns import (
    cases,
    dominating_pair,
)


@given(cases())
@settings(max_examples=examples(60), deadline=None)
def test_moments_are_those_of_all_tuples(
    case: tuple[RoundsDistribution, np.ndarray, float],
) -> None:
    patterns = participation_patterns.of(*case)
    gram = patterns.means @ patterns.means.T / case[2] ** 2
    order = 1
    while order <= 4 and len(patterns.probabilities) ** order <= 3000:
        expected = sum(
            np.prod(patterns.probabilities[list(each)])
            * math.exp(sum(gram[i, j] for i, j in itertools.combinations(each, 2)))
            for each in itertools.product(range(len(gram)), repeat=order)
        )
        found = ImportanceSampler(dominating_pair(*case), order).log_mgf
        assert found == pytest.approx(math.log(expected), abs=1e-11)
        order += 1


@pytest.mark.parametrize(
    ("distribution", "matrix"),
    [
        (MinSeparationRounds(0.35, 2), [[0.8, 0.0], [0.6, 1.0]]),
        (MinSeparationRounds(0.35, 1, is_stationary=False), [[1.0, 0.0], [0.0, 0.7]]),
        (MinSeparationRounds(1.0, 2), [[0.8, 0.0], [0.6, 0.9]]),
        (BallsInBinsRounds(3), [[0.8, 0.0], [0.6, 1.0]]),
    ],
)
@pytest.mark.parametrize("order", [0, 1, 2, 4])
def test_losses_have_the_sampling_distribution(
    distribution: RoundsDistribution, matrix: list[list[float]], order: int
) -> None:
    """The distribution of losses, against a fine grid of outputs: Kolmogorov and Smirnov.

    Each of these sixteen tests fails by chance with probability 1e-6; the seed is fixed.
    """
    c, sigma = np.array(matrix), 0.9
    of = dominating_pair(distribution, c, sigma)
    rng = np.random.default_rng(order)
    outputs: ImportanceSampler | SamplerOfQ = (
        ImportanceSampler(of, order) if order else SamplerOfQ(of)
    )
    drawn = np.sort(np.concatenate([outputs.log_ratios(rng, 1000) for _ in range(6)]))
    axis = np.linspace(-7.0, 11.0, 401)
    grid = np.stack(np.meshgrid(axis, axis, indexing="ij")).reshape(2, -1)
    losses = participation_patterns.of(distribution, c, sigma).log_ratios(grid)
    weights = np.exp(order * losses) * np.prod(scipy.stats.norm.pdf(grid, 0.0, sigma), axis=0)
    by_loss = np.argsort(losses)
    cumulative = np.cumsum(weights[by_loss]) / np.sum(weights)
    expected = np.interp(drawn, losses[by_loss], cumulative)
    steps = np.arange(len(drawn) + 1) / len(drawn)
    distance = max(np.max(np.abs(expected - steps[1:])), np.max(np.abs(expected - steps[:-1])))
    assert distance < scipy.stats.kstwo.isf(1e-6, len(drawn)) + 4e-3


def test_orders_end_where_tables_are_large() -> None:
    rng = np.random.default_rng(0)
    columns = rng.uniform(0.0, 1.0, (2052, 64))
    for separation, expected in ((64, [1, 2, 3]), (342, [1, 2])):
        kinds: list[RoundsDistribution] = [
            MinSeparationRounds(0.01, separation),
            BallsInBinsRounds(separation),
        ]
        for distribution in kinds:
            of = DominatingPair(columns, 1.0, distribution)
            orders = importance_sampling.possible_orders(of)
            assert orders == expected


def test_bands_beyond_the_separation_are_refused() -> None:
    with pytest.raises(ValueError, match="a separation of 2 is below the 3 bands"):
        DominatingPair(np.ones((5, 3)), 1.0, MinSeparationRounds(0.1, 2))


@given(st.integers(1, 3), st.integers(0, 1000))
@settings(max_examples=examples(12), deadline=None)
def test_replicas_keep_their_separation(order: int, seed: int) -> None:
    """In no window of b rounds do more participations begin than there are replicas."""
    distribution = MinSeparationRounds(0.6, 3)
    chains = importance_sampling._Chains(
        distribution, dominating_pair(distribution, np.eye(20), 1.0), order
    )
    counts = chains.draw(np.random.default_rng(seed), 50)
    windows = sum(counts[shift : shift + 18] for shift in range(3))
    assert np.max(windows) <= order
    assert np.max(counts) >= 1
