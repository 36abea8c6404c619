"""Bounds on the divergence of P from Q at small epsilons: integrals, and how often they fail."""

import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators.kernel import certificate
from mf_aggregators.kernel.dominating_pairs import (
    DominatingPair,
    MinSeparationRounds,
    RoundsDistribution,
)
from mf_aggregators.participation.monte_carlo import divergences
from tests.examples import examples
from tests.mf_aggregators.kernel.test_certificate import _CASES, _divergences
from tests.mf_aggregators.participation.monte_carlo.participation_patterns import dominating_pair


@pytest.mark.parametrize(("distribution", "matrix", "sigma"), _CASES)
def test_divergences_are_bounded_closely(
    distribution: RoundsDistribution, matrix: list[list[float]], sigma: float
) -> None:
    """Against the integral of that of P from Q; the other one is another number."""
    exact = _divergences(distribution, np.array(matrix), sigma)
    of = dominating_pair(distribution, np.array(matrix), sigma)
    epsilons = (0.0, 0.4, 1.0, 2.0)
    found = divergences.divergences(of, epsilons, num_samples=2**15, failure=1e-9, seed=3)
    assert [epsilon for epsilon, _ in found] == list(epsilons)
    for epsilon, bound in found:
        forward, backward = exact(epsilon)
        assert forward < bound < forward + 8.0 * math.sqrt(forward / 2**15) + 1e-3
        assert epsilon == 0.0 or backward < 0.99 * forward
    with_failure = divergences.divergences(of, epsilons, num_samples=64, failure=0.2, seed=3)
    assert all(bound > 0.2 for _, bound in with_failure)


def test_all_bounds_of_an_attacker_hold_together() -> None:
    """Each of many fails with its share of the probability that any of them does."""
    of = DominatingPair(np.ones((4, 1)), 1.5, MinSeparationRounds(0.1, 1))
    epsilons, failure = tuple(0.25 * step for step in range(41)), 1e-6
    together = divergences.divergences(of, epsilons, num_samples=512, failure=failure, seed=3)
    each = failure / len(epsilons)
    for (epsilon, bound), wanted in zip(together, epsilons, strict=True):
        assert epsilon == wanted
        ((_, alone),) = divergences.divergences(
            of, (epsilon,), num_samples=512, failure=each, seed=3
        )
        assert bound - failure == pytest.approx(alone - each, rel=1e-9)
    # Without its share, a bound would be lower by more than that.
    ((_, without),) = divergences.divergences(of, (0.0,), num_samples=512, failure=failure, seed=3)
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
    bounds = np.array(
        [divergences.upper_mean(count / samples, samples, failure) for count in counts]
    )
    distribution = scipy.stats.binom.pmf(counts, samples, mean)
    assert np.sum(distribution[bounds < mean]) <= failure * (1.0 + 1e-9)
    assert bounds[-1] == 1.0
    assert np.all(np.diff(bounds) >= 0.0)
    for count in (0, samples // 2):
        exact = certificate.upper_probability(count, samples, failure)
        assert exact <= bounds[count] + 1e-9
    # No successes: as tight as it can be.
    assert bounds[0] == pytest.approx(1.0 - failure ** (1.0 / samples), abs=1e-9)
