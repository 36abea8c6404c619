"""Bounds on whole privacy profiles: against integrals, and how often they fail."""

import math

import numpy as np
import pytest
import scipy.stats
from dp_accounting.pld import privacy_loss_distribution
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators.kernel import certificate, profiles
from mf_aggregators.kernel.dominating_pairs import (
    DominatingPair,
    MinSeparationRounds,
    RoundsDistribution,
)
from tests.examples import examples
from tests.mf_aggregators.kernel.test_certificate import _CASES, _divergences
from tests.mf_aggregators.participation.monte_carlo.participation_patterns import dominating_pair

_EPSILONS = np.array([0.0, 0.1, 0.4, 1.0, 1.7, 2.5, 4.0])


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
    upper, lower = profile.upper(_EPSILONS), profile.lower(_EPSILONS)
    for direction, name in enumerate(("with_client", "without_client")):
        above, below = getattr(upper, name), getattr(lower, name)
        assert np.all(above >= truth[direction])
        assert np.all(below <= truth[direction])
        error = 8.0 * np.sqrt(truth[direction] / 2**14) + 2e-3
        assert np.all(above <= truth[direction] + error)
        assert np.all(below >= truth[direction] - error)
    # The integral's own error is far smaller than what moments alone leave open.
    assert np.all(profile.renyi_bounds(_EPSILONS) >= truth[0])
    assert np.any(upper.with_client < 0.8 * profile.renyi_bounds(_EPSILONS))


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
            for bound in (profiles._upper_mean, profiles._lower_mean)
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
    upper, lower = profile.upper(_EPSILONS), profile.lower(_EPSILONS)
    truths = (exact._pmf_remove, exact._pmf_add)
    for truth, name in zip(truths, ("with_client", "without_client"), strict=True):
        known = truth.get_delta_for_epsilon(list(_EPSILONS))
        # Their losses are rounded up, by much less than bounds are apart.
        assert np.all(getattr(upper, name) >= known * (1.0 - 1e-6) - 1e-14)
        assert np.all(getattr(lower, name) <= known)
        shown = known > 1e-3
        assert np.all(getattr(upper, name)[shown] <= 1.25 * known[shown])
    # Where samples show nothing, the tail of a convex function does.
    assert upper.without_client[4] < 1e-4


def test_samples_follow_from_pair_and_seed_alone() -> None:
    pair = DominatingPair(np.ones((4, 1)), 1.0, MinSeparationRounds(0.2, 1))

    def bounds(seed: int, failure: float = 1e-6) -> np.ndarray:
        profile = profiles.Profile(pair, failure, 1e-3, seed=seed, samples=2**12)
        return profile.upper(_EPSILONS).with_client

    np.testing.assert_array_equal(bounds(1), bounds(1))
    assert np.any(bounds(1) != bounds(2))
    # Who fails less often says less.
    assert np.all(bounds(1, 1e-12) >= bounds(1))


@pytest.mark.parametrize(("distribution", "matrix", "sigma"), _CASES)
def test_divergences_are_bounded_closely(
    distribution: RoundsDistribution, matrix: list[list[float]], sigma: float
) -> None:
    """Against the integral of that of P from Q; the other one is another number."""
    exact = _divergences(distribution, np.array(matrix), sigma)
    of = dominating_pair(distribution, np.array(matrix), sigma)
    epsilons = (0.0, 0.4, 1.0, 2.0)
    found = profiles.divergences(of, epsilons, num_samples=2**15, failure=1e-9, seed=3)
    assert [epsilon for epsilon, _ in found] == list(epsilons)
    for epsilon, bound in found:
        forward, backward = exact(epsilon)
        assert forward < bound < forward + 8.0 * math.sqrt(forward / 2**15) + 1e-3
        assert epsilon == 0.0 or backward < 0.99 * forward
    with_failure = profiles.divergences(of, epsilons, num_samples=64, failure=0.2, seed=3)
    assert all(bound > 0.2 for _, bound in with_failure)


def test_all_bounds_of_an_attacker_hold_together() -> None:
    """Each of many fails with its share of the probability that any of them does."""
    of = DominatingPair(np.ones((4, 1)), 1.5, MinSeparationRounds(0.1, 1))
    epsilons, failure = tuple(0.25 * step for step in range(41)), 1e-6
    together = profiles.divergences(of, epsilons, num_samples=512, failure=failure, seed=3)
    each = failure / len(epsilons)
    for (epsilon, bound), wanted in zip(together, epsilons, strict=True):
        assert epsilon == wanted
        ((_, alone),) = profiles.divergences(of, (epsilon,), num_samples=512, failure=each, seed=3)
        assert bound - failure == pytest.approx(alone - each, rel=1e-9)
    # Without its share, a bound would be lower by more than that.
    ((_, without),) = profiles.divergences(of, (0.0,), num_samples=512, failure=failure, seed=3)
    assert without < together[0][1] * (1.0 - 1e-3)


@given(
    st.integers(1, 300), st.sampled_from([0.0, 1.0]) | st.floats(1e-12, 1.0), st.floats(1e-9, 0.4)
)
@settings(max_examples=examples(60), deadline=None)
def test_averages_are_bounded_as_often_as_they_say(
    samples: int, mean: float, failure: float
) -> None:
    """For zeros and ones, whose distribution is known, and no less than by exact binomials."""
    counts = np.arange(samples + 1)
    bounds = np.array([profiles.upper_mean(count / samples, samples, failure) for count in counts])
    distribution = scipy.stats.binom.pmf(counts, samples, mean)
    assert np.sum(distribution[bounds < mean]) <= failure * (1.0 + 1e-9)
    assert bounds[-1] == 1.0
    assert np.all(np.diff(bounds) >= 0.0)
    for count in (0, samples // 2):
        exact = certificate.upper_probability(count, samples, failure)
        assert exact <= bounds[count] + 1e-9
    # No successes: as tight as it can be.
    assert bounds[0] == pytest.approx(1.0 - failure ** (1.0 / samples), abs=1e-9)
