"""Bounds against exact probabilities, and how often they fail."""

import math

import numpy as np
import pytest
import scipy.integrate
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators.kernel import certificates
from tests.examples import examples


def test_bets_win_by_chance_no_more_often_than_they_say() -> None:
    """Terms of 0 or M of the least mean that is not claimed: the wealth's whole distribution."""
    largest, mean, samples = 5.0, 0.5, 40
    for share in (0.1, 0.5, 0.99):
        bet = share / (largest - mean)
        counts = np.arange(samples + 1)
        distribution = scipy.stats.binom.pmf(counts, samples, mean / largest)
        wealths = np.array(
            [
                math.exp(
                    certificates.log_wealth(np.repeat([0.0, largest], [samples - k, k]), mean, bet)
                )
                for k in counts
            ]
        )
        assert distribution @ wealths == pytest.approx(1.0)
        for failure in (0.5, 0.1, 0.01):
            assert np.sum(distribution[wealths >= 1.0 / failure]) <= failure


@given(st.floats(0.01, 0.8), st.floats(1.0, 50.0), st.integers(0, 1000))
@settings(max_examples=examples(40), deadline=None)
def test_the_best_bet_is_the_best(ratio: float, largest: float, seed: int) -> None:
    terms = largest * np.random.default_rng(seed).beta(0.3, 3.0, 500)
    mean = min(float(np.mean(terms)) / ratio, 0.9 * largest)
    bet, growth = certificates.best_bet(terms, mean, largest)
    assert 0.0 < bet < 1.0 / (largest - mean)
    assert growth == pytest.approx(certificates.log_wealth(terms, mean, bet) / 500)
    for share in np.linspace(0.0, 0.999, 50):
        other = certificates.log_wealth(terms, mean, share / (largest - mean)) / 500
        assert growth >= other - 1e-6
    below = float(np.mean(terms)) * 0.99
    assert certificates.best_bet(terms, below, largest) == (0.0, 0.0)


@given(st.integers(1, 2000), st.floats(0.0, 1.0), st.floats(1e-9, 0.4))
@settings(max_examples=examples(60), deadline=None)
def test_probabilities_are_bounded_as_by_exact_binomials(
    samples: int, share: float, failure: float
) -> None:
    count = round(share * samples)
    upper = certificates.upper_probability(count, samples, failure)
    lower = certificates.lower_probability(count, samples, failure)
    assert lower <= count / samples <= upper
    if count < samples:
        assert scipy.stats.binom.cdf(count, samples, upper) == pytest.approx(failure, rel=1e-6)
    else:
        assert upper == 1.0
    if count > 0:
        assert scipy.stats.binom.sf(count - 1, samples, lower) == pytest.approx(failure, rel=1e-6)
    else:
        assert lower == 0.0


@given(
    st.integers(1, 300), st.sampled_from([0.0, 1.0]) | st.floats(1e-12, 1.0), st.floats(1e-9, 0.4)
)
@settings(max_examples=examples(60), deadline=None)
def test_means_are_bounded_as_often_as_they_say(samples: int, mean: float, failure: float) -> None:
    """For zeros and ones, whose distribution is known, and no less than by exact binomials."""
    counts = np.arange(samples + 1)
    bounds = np.array(
        [certificates.upper_mean(count / samples, samples, failure) for count in counts]
    )
    distribution = scipy.stats.binom.pmf(counts, samples, mean)
    assert np.sum(distribution[bounds < mean]) <= failure * (1.0 + 1e-9)
    assert bounds[-1] == 1.0
    assert np.all(np.diff(bounds) >= 0.0)
    for count in (0, samples // 2):
        exact = certificates.upper_probability(count, samples, failure)
        assert exact <= bounds[count] + 1e-9
    # No successes: as tight as it can be.
    assert bounds[0] == pytest.approx(1.0 - failure ** (1.0 / samples), abs=1e-9)


@given(st.floats(-3.0, -0.2), st.floats(0.3, 3.0), st.floats(0.0, 6.0))
@settings(max_examples=examples(60), deadline=None)
def test_tails_of_one_normal_number_are_exact(mean: float, width: float, epsilon: float) -> None:
    """L = mean + width G: the line is the tail, and the divergence an integral."""
    threshold = max(mean - width, -epsilon)
    tail = certificates.LowerTail(threshold, (threshold - mean) / width, 1.0 / width)
    expected = scipy.integrate.quad(
        lambda g: -math.expm1(epsilon + mean + width * g) * scipy.stats.norm.pdf(g),
        -14.0,
        (-epsilon - mean) / width,
    )[0]
    assert tail.divergence(epsilon) == pytest.approx(expected, rel=1e-6, abs=1e-14)
    assert tail.divergence(-threshold - 1e-6) == 1.0


def test_extrapolated_tails_hold_for_convex_functions() -> None:
    """A log of a mean of exponentials, which is what losses are: its tail by integration.

    Counts are what is expected, so that the bounds of Clopper and Pearson are as wide as they are.
    """
    losses = np.linspace(-12.0, 12.0, 400_001)
    density = scipy.stats.norm.pdf(losses)
    step = losses[1] - losses[0]
    for rate in (0.02, 0.3, 0.9):
        values = np.log1p(rate * np.expm1(1.3 * losses - 0.5 * 1.3**2))
        thresholds = (float(np.interp(-2.0, losses, values)), float(np.interp(0.0, losses, values)))
        samples = 100_000
        counts = [round(samples * step * np.sum(density[values <= t])) for t in thresholds]
        tail = certificates.lower_tail(counts[0], counts[1], samples, thresholds, 1e-6)
        assert tail.slope > 0.0
        for epsilon in np.linspace(-thresholds[0], -math.log1p(-rate) + 1.0, 9):
            truth = step * np.sum(density * np.maximum(-np.expm1(epsilon + values), 0.0))
            assert truth <= tail.divergence(float(epsilon))


def test_counts_that_say_nothing_bound_nothing() -> None:
    tail = certificates.lower_tail(100, 100, 100, (-1.0, 0.0), 1e-6)
    assert tail.slope == 0.0
    assert tail.divergence(5.0) == 1.0
