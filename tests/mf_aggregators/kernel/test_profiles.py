"""Bounds on whole privacy profiles: against integrals, and how often they fail."""

import math

import numpy as np
import pytest
import scipy.stats
from dp_accounting.pld import privacy_loss_distribution

from mf_aggregators.accounting import losses_below
from mf_aggregators.kernel import profiles
from mf_aggregators.kernel.dominating_pairs import (
    DominatingPair,
    MinSeparationRounds,
    RoundsDistribution,
)
from tests.mf_aggregators.kernel.test_certificate import _CASES, _divergences
from tests.mf_aggregators.participation.monte_carlo.participation_patterns import dominating_pair

_EPSILONS = np.array([0.0, 0.1, 0.4, 1.0, 1.7, 2.5, 4.0])


def _lower(profile: profiles.Profile) -> tuple[np.ndarray, np.ndarray]:
    failure = 1e-6 / (2 * len(_EPSILONS))
    return profile.means(_EPSILONS + 4e-9, failure, losses_below.lower_mean)


@pytest.mark.short_cases(2)
@pytest.mark.parametrize(("distribution", "matrix", "sigma"), _CASES)
def test_both_divergences_are_between_their_bounds_and_near_them(
    distribution: RoundsDistribution, matrix: list[list[float]], sigma: float
) -> None:
    """Against the integrals of both, of which neither is the other."""
    exact = _divergences(distribution, np.array(matrix), sigma)
    pair = dominating_pair(distribution, np.array(matrix), sigma)
    profile = profiles.Profile(pair, 1e-6, 1e-4, seed=5, samples=2**14)
    truth = np.array([exact(float(epsilon)) for epsilon in _EPSILONS]).T
    upper, lower = profile.upper(_EPSILONS), _lower(profile)
    for direction, (above, below) in enumerate(zip(upper, lower, strict=True)):
        assert np.all(above >= truth[direction])
        assert np.all(below <= truth[direction])
        error = 8.0 * np.sqrt(truth[direction] / 2**14) + 2e-3
        assert np.all(above <= truth[direction] + error)
        assert np.all(below >= truth[direction] - error)
    # The integral's own error is far smaller than what moments alone leave open.
    assert np.all(profile.renyi_bounds(_EPSILONS) >= truth[0])
    assert np.any(upper[0] < 0.8 * profile.renyi_bounds(_EPSILONS))


@pytest.mark.parametrize("mean", [0.003, 0.05, 0.6])
@pytest.mark.parametrize("bet", [0.02, 0.3, 0.9])
def test_means_are_bounded_as_often_as_they_say(mean: float, bet: float) -> None:
    """Terms of 0 or M, for the whole distribution of their number, in both directions."""
    largest, samples = 2.0, 120
    counts = np.arange(samples + 1)
    distribution = scipy.stats.binom.pmf(counts, samples, mean / largest)
    for failure in (0.3, 0.02, 1e-4):
        arguments = samples, largest, bet / largest, failure
        above, below = (
            np.array([bound(np.full(count, largest), *arguments) for count in counts])
            for bound in (profiles.upper_mean, losses_below.lower_mean)
        )
        assert np.sum(distribution[above < mean]) <= failure
        assert np.sum(distribution[below > mean]) <= failure
        averages = counts * largest / samples
        assert np.all((below <= averages) & (averages <= above))
        # They are roots: a mean between both is refuted by neither wealth.
        middle = 0.5 * (above + below)
        losing = np.log1p(bet * (middle / largest - 1.0)) * counts
        losing += np.log1p(bet * middle / largest) * (samples - counts)
        inside = above < largest
        assert np.all(losing[inside] <= -math.log(failure) + 1e-6)


def test_dp_sgd_is_bounded_as_by_losses_of_poisson_sampling() -> None:
    sigma, probability, rounds = 0.9, 0.05, 12
    pair = DominatingPair(np.ones((rounds, 1)), sigma, MinSeparationRounds(probability, 1))
    one = privacy_loss_distribution.from_gaussian_mechanism(
        sigma, value_discretization_interval=1e-3, sampling_prob=probability
    )
    exact = one.self_compose(rounds)
    profile = profiles.Profile(pair, 1e-6, 1e-5, samples=2**14)
    upper, lower = profile.upper(_EPSILONS), _lower(profile)
    truths = (exact._pmf_remove, exact._pmf_add)
    for truth, above, below in zip(truths, upper, lower, strict=True):
        known = truth.get_delta_for_epsilon(list(_EPSILONS))
        # Their losses are rounded up, by much less than bounds are apart.
        assert np.all(above >= known * (1.0 - 1e-6) - 1e-14)
        assert np.all(below <= known)
        shown = known > 1e-3
        assert np.all(above[shown] <= 1.25 * known[shown])
    # Where samples show nothing, the tail of a convex function does.
    assert upper[1][4] < 1e-4


def test_samples_follow_from_pair_and_seed_alone() -> None:
    pair = DominatingPair(np.ones((4, 1)), 1.0, MinSeparationRounds(0.2, 1))

    def bounds(seed: int, failure: float = 1e-6) -> np.ndarray:
        profile = profiles.Profile(pair, failure, 1e-3, seed=seed, samples=2**12)
        return profile.upper(_EPSILONS)[0]

    np.testing.assert_array_equal(bounds(1), bounds(1))
    assert np.any(bounds(1) != bounds(2))
    # Who fails less often says less.
    assert np.all(bounds(1, 1e-12) >= bounds(1))
