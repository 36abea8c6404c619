"""Bets and bounds of means against exact probabilities, and how often they fail."""

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators.kernel import certificate as certificates
from mf_aggregators.participation.monte_carlo import curves, search
from tests.examples import examples


@given(st.floats(0.01, 0.8), st.floats(1.0, 50.0), st.integers(0, 1000))
@settings(max_examples=examples(40), deadline=None)
def test_the_best_bet_is_the_best(ratio: float, largest: float, seed: int) -> None:
    terms = largest * np.random.default_rng(seed).beta(0.3, 3.0, 500)
    mean = min(float(np.mean(terms)) / ratio, 0.9 * largest)
    bet, growth = search.best_bet(terms, mean, largest)
    assert 0.0 < bet < 1.0 / (largest - mean)
    assert growth == pytest.approx(certificates.log_wealth(terms, mean, bet) / 500)
    for share in np.linspace(0.0, 0.999, 50):
        other = certificates.log_wealth(terms, mean, share / (largest - mean)) / 500
        assert growth >= other - 1e-6
    below = float(np.mean(terms)) * 0.99
    assert search.best_bet(terms, below, largest) == (0.0, 0.0)


@given(
    st.integers(1, 300), st.sampled_from([0.0, 1.0]) | st.floats(1e-12, 1.0), st.floats(1e-9, 0.4)
)
@settings(max_examples=examples(60), deadline=None)
def test_means_are_bounded_as_often_as_they_say(samples: int, mean: float, failure: float) -> None:
    """For zeros and ones, whose distribution is known, and no less than by exact binomials."""
    counts = np.arange(samples + 1)
    bounds = np.array([curves.upper_mean(count / samples, samples, failure) for count in counts])
    distribution = scipy.stats.binom.pmf(counts, samples, mean)
    assert np.sum(distribution[bounds < mean]) <= failure * (1.0 + 1e-9)
    assert bounds[-1] == 1.0
    assert np.all(np.diff(bounds) >= 0.0)
    for count in (0, samples // 2):
        exact = certificates.upper_probability(count, samples, failure)
        assert exact <= bounds[count] + 1e-9
    # No successes: as tight as it can be.
    assert bounds[0] == pytest.approx(1.0 - failure ** (1.0 / samples), abs=1e-9)
