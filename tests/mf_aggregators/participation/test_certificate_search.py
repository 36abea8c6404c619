"""Certificates that a search finds, against the truth, and searches that give up."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators.kernel import certificate as certificates
from mf_aggregators.kernel.certificate import (
    Certificate,
    DominatingPair,
    _MinSeparationRounds,
    _RoundsDistribution,
)
from mf_aggregators.participation import (
    MinSeparationSampling,
    _columns_of_matrix,
    certificate_search,
    sampling_scheme,
)
from mf_aggregators.participation.certificate_search import Certification
from tests.examples import examples
from tests.mf_aggregators.kernel.test_certificate import _CASES, _DELTA, _divergences, _epsilon
from tests.mf_aggregators.participation_patterns import dominating_pair
from tests.refusals import refuses


@given(st.floats(0.01, 0.8), st.floats(1.0, 50.0), st.integers(0, 1000))
@settings(max_examples=examples(40), deadline=None)
def test_the_best_bet_is_the_best(ratio: float, largest: float, seed: int) -> None:
    terms = largest * np.random.default_rng(seed).beta(0.3, 3.0, 500)
    mean = min(float(np.mean(terms)) / ratio, 0.9 * largest)
    bet, growth = certificate_search._best_bet(terms, mean, largest)
    assert 0.0 < bet < 1.0 / (largest - mean)
    assert growth == pytest.approx(certificates._log_wealth(terms, mean, bet) / 500)
    for share in np.linspace(0.0, 0.999, 50):
        other = certificates._log_wealth(terms, mean, share / (largest - mean)) / 500
        assert growth >= other - 1e-6
    below = float(np.mean(terms)) * 0.99
    assert certificate_search._best_bet(terms, below, largest) == (0.0, 0.0)


@pytest.mark.parametrize(("epsilon", "delta"), [(1.2, 1e-7), (0.01, 1e-5)])
def test_what_would_take_too_many_samples_is_no_candidate(epsilon: float, delta: float) -> None:
    of = DominatingPair(np.ones((40, 1)), 3.0, _MinSeparationRounds(0.1, 1))
    sampler = certificate_search._best_sampler(of, epsilon, delta)
    tuning = certificate_search._TuningSamples(of, sampler, delta, 0, 10_000)
    tuning.grow_for(epsilon)
    needed = tuning.needed(epsilon)[1]
    assert needed > 10_000
    assert math.isfinite(needed) == (epsilon > 1.0)
    assert tuning.candidate(certificate_search._SamplesOfQ(of, delta, 0), epsilon, 0) is None


def test_nothing_is_claimed_beyond_what_is_known() -> None:
    of = DominatingPair(np.ones((4, 1)), 1.0, _MinSeparationRounds(0.5, 1))
    assert certificate_search._proved(of, 1e-3, Certification(max_samples=2**13), below=0.5) is None


@pytest.mark.parametrize(("probability", "sigma", "rounds"), [(0.04, 0.9, 30), (0.3, 2.0, 10)])
def test_one_band_is_poisson_sampling(probability: float, sigma: float, rounds: int) -> None:
    """Coins without timers: the privacy loss distribution, within the certificate."""
    delta = 1e-4
    exact = sampling_scheme(
        "poisson",
        num_rounds=rounds,
        num_bands=1,
        population=100,
        clients_per_round=round(100 * probability),
    ).epsilon(sigma, delta)
    of = DominatingPair(np.ones((rounds, 1)), sigma, _MinSeparationRounds(probability, 1))
    candidate = certificate_search._proved(of, delta, Certification(max_samples=2**16))
    assert candidate is not None
    # The distribution is rounded up by up to 1e-4 of epsilon.
    assert exact * (1 - 1e-3) <= candidate.epsilon <= 1.04 * exact


def test_no_epsilon_above_a_target_is_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    """The noise is first far too small, by an estimate that is wrong."""
    proved, check = [], certificates.check_certificate

    def recorded(candidate: Certificate, *others: Any, **options: Any) -> bool:
        proved.append(candidate.epsilon)
        return check(candidate, *others, **options)

    monkeypatch.setattr(certificates, "check_certificate", recorded)
    run = MinSeparationSampling(12, 1, 200, 10, 3).run(1.0, None)
    how = Certification(max_samples=2**13)
    estimate = how.estimated(run, 2.0, 1e-3)
    monkeypatch.setattr(Certification, "estimated", lambda *unused: 0.97 * estimate)
    found = how.calibrated(run, 2.0, 1e-3)
    assert 0.97 * estimate < found < 1.03 * estimate
    assert proved
    assert max(proved) <= 2.0


@pytest.mark.short_cases(2)
@pytest.mark.parametrize(("distribution", "matrix", "sigma"), _CASES)
def test_what_is_proved_is_true_and_near_the_truth(
    distribution: _RoundsDistribution, matrix: list[list[float]], sigma: float
) -> None:
    """Against the integrals of both divergences, for mechanisms of two rounds."""
    exact = _divergences(distribution, np.array(matrix), sigma)
    truth = _epsilon(lambda epsilon: max(exact(epsilon)), _DELTA)
    of = dominating_pair(distribution, np.array(matrix), sigma)
    candidate = certificate_search._proved(of, _DELTA, Certification(max_samples=2**15))
    assert candidate is not None
    assert truth <= candidate.epsilon <= 1.06 * truth
    # Anybody can prove it again.
    assert certificates.is_proved(of, candidate)


def _banded(seed: int, rounds: int, bands: int) -> np.ndarray:
    lags = np.subtract.outer(np.arange(rounds), np.arange(rounds))
    matrix = np.random.default_rng(seed).uniform(-1.0, 1.0, (rounds, rounds))
    return np.asarray(matrix * ((lags >= 0) & (lags < bands)) + 2.0 * np.eye(rounds))


@given(st.integers(1, 80), st.integers(1, 80), st.integers(0, 100))
@settings(max_examples=examples(40), deadline=None)
def test_columns_hold_the_matrix(rounds: int, bands: int, seed: int) -> None:
    bands = min(bands, rounds)
    matrix = _banded(seed, rounds, bands)
    columns = _columns_of_matrix(matrix, bands)
    for i in range(rounds):
        height = min(bands, rounds - i)
        np.testing.assert_array_equal(columns[i, :height], matrix[i : i + height, i])
        assert not np.any(columns[i, height:])


def test_more_bands_than_stated_are_refused() -> None:
    matrix = _banded(0, 6, 3)
    with refuses("2 bands", "column 0"):
        _columns_of_matrix(matrix, 2)
    with refuses("triangular"):
        _columns_of_matrix(matrix.T, 3)
