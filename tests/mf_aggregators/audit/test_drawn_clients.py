"""Audits of clients that a scheme draws, against an aggregator in NumPy."""

from typing import Any

import numpy as np
import pytest
import scipy.stats

import mf_aggregators as mfa
from mf_aggregators import audit
from mf_aggregators.audit import DrawnResult, audit_drawn, check_scheme
from mf_aggregators.audit.statistics import NoiseModel
from mf_aggregators.participation import BallsInBins, MinSeparationSampling, PoissonSampling
from tests.mf_aggregators.float_aggregator import FloatAggregator
from tests.refusals import refuses

# Two tests of intact mechanisms fail with a probability of at most 2e-6.
_ROUNDS, _DELTA, _FALSE_ALARM = 8, 0.02, 1e-6
_BANDED = mfa.factorizations.banded(_ROUNDS, num_bands=2)
_SCHEMES = {
    "balls_in_bins": BallsInBins(_ROUNDS, 2, 496, 62, 8),
    "poisson": PoissonSampling(_ROUNDS, 2, 500, 125),
}


def _audited(name: str, noise_factor: float = 1.0) -> DrawnResult:
    mechanism = mfa.Mechanism(_BANDED, _SCHEMES[name], 0.5)
    stddev = noise_factor * mechanism.sigma
    return audit_drawn(
        lambda: FloatAggregator(_BANDED, stddev, 1.0, 10.0),
        mechanism,
        clip_norm=1.0,
        clients_per_round=10.0,
        delta=_DELTA,
        canaries=3000,
        false_alarm_rate=_FALSE_ALARM,
    )


@pytest.mark.parametrize("name", _SCHEMES)
def test_who_does_not_know_the_draws_learns_nearly_what_is_claimed_and_no_more(name: str) -> None:
    result = _audited(name)
    bound, rates = result.bounds[0], result.rates[0]
    assert not result.exceeded
    assert 0.55 * bound.epsilon <= bound.epsilon_lower_bound <= bound.epsilon
    assert bound.epsilon == result.mechanism.guarantee(_DELTA).epsilon
    # Less than who knows the draws.
    most = _SCHEMES[name].most_participations()
    alone = mfa.accounting.exact_epsilon(0.5 / np.sqrt(most), _DELTA)
    assert bound.epsilon < 0.8 * alone
    assert (rates.presences, rates.absences) == (3000, 150_000)


def test_too_little_noise_is_caught() -> None:
    assert _audited("balls_in_bins", 0.6).exceeded


def test_draws_of_another_scheme_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that take part in half of the rounds, and not in one of eight."""
    draws = audit._draws

    def doubled(scheme: Any) -> np.ndarray:
        found = draws(scheme)
        return np.asarray(sum(np.roll(found, shift, axis=1) for shift in (0, 2, 4, 6)))

    monkeypatch.setattr(audit, "_draws", doubled)
    assert _audited("balls_in_bins").exceeded


def test_scores_are_logarithms_of_ratios_of_densities() -> None:
    rng = np.random.default_rng(3)
    root = rng.normal(size=(3, 3)) + 2.0 * np.eye(3)
    covariance, mean = root @ root.T, rng.normal(size=3)
    model = NoiseModel(mean, np.linalg.inv(covariance), 100)
    shifts, weights = rng.normal(size=(4, 3)), np.array([0.1, 0.2, 0.3, 0.4])
    outputs = rng.normal(size=(3, 5))
    found = audit._mixture_scores(model, shifts, weights, outputs)
    for score, output in zip(found, outputs.T, strict=True):
        densities = [
            weight * scipy.stats.multivariate_normal(mean + shift, covariance).pdf(output)
            for weight, shift in zip(weights, shifts, strict=True)
        ]
        without = scipy.stats.multivariate_normal(mean, covariance).pdf(output)
        assert score == pytest.approx(np.log(sum(densities) / without), rel=1e-9)


def test_the_mixture_has_the_probabilities_of_the_scheme() -> None:
    patterns, weights = audit._mixture(_SCHEMES["balls_in_bins"])
    assert np.array_equal(patterns, np.eye(8)[::-1])
    # Of 4,000 draws, beyond five standard deviations with a probability of 6e-7.
    assert np.all(np.abs(weights - 0.125) <= 5.0 * np.sqrt(0.125 * 0.875 / 3900))
    # Of one group alone, whose rounds are every second one.
    patterns, weights = audit._mixture(_SCHEMES["poisson"])
    assert not np.any(patterns[:, 1::2])
    assert weights @ np.sum(patterns, axis=1) == pytest.approx(4 * 0.5, abs=0.08)


def test_schemes_whose_clients_depend_on_each_other_are_refused() -> None:
    for name in ("fixed_size", "truncated_poisson", "random_allocation", "shuffling"):
        scheme = mfa.participation.sampling_scheme(
            name, num_rounds=_ROUNDS, num_bands=2, population=500, clients_per_round=50
        )
        with refuses(name, "--participation"):
            check_scheme(scheme)
    check_scheme(MinSeparationSampling(_ROUNDS, 2, 500, 50, 3))
