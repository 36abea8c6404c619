"""The audit's statistics against exact binomial sums, densities and enumeration."""

import itertools
import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

import mf_aggregators as mfa
from mf_aggregators.audit import statistics
from mf_aggregators.audit.statistics import ErrorRates, NoiseModel
from mf_aggregators.factorizations import noise_rows
from mf_aggregators.participation import (
    FixedEpochOrder,
    MinSeparation,
    Participation,
    SingleParticipation,
)
from tests.examples import examples
from tests.mf_aggregators.brute_force import patterns, scalar_sensitivity
from tests.refusals import refuses


@settings(max_examples=examples(300))
@given(
    trials=st.integers(1, 60),
    rate=st.floats(0.0, 1.0),
    miss_probability=st.sampled_from([0.5, 0.05, 1e-4]),
)
def test_the_bound_on_a_rate_is_missed_as_seldom_as_it_says(
    trials: int, rate: float, miss_probability: float
) -> None:
    """The exact probability of the counts whose bound is below the truth."""
    missed = sum(
        float(scipy.stats.binom.pmf(events, trials, rate))
        for events in range(trials + 1)
        if statistics.upper_bound_of_rate(events, trials, miss_probability) < rate
    )
    assert missed <= miss_probability * (1.0 + 1e-9)


def _exact(threshold: float, mu: float) -> ErrorRates:
    """The true error rates of N(0, 1) against N(mu, 1)."""
    alpha, beta = scipy.stats.norm.sf(threshold), scipy.stats.norm.cdf(threshold - mu)
    return ErrorRates(threshold, 0, 1, 0, 1, float(alpha), float(beta))


@given(mu=st.floats(0.01, 4.0), position=st.floats(-0.5, 1.5))
def test_a_point_of_a_gaussian_curve_gives_its_mu(mu: float, position: float) -> None:
    assert _exact(position * mu, mu).mu_lower_bound == pytest.approx(mu, rel=1e-6)


@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 0.1), (0.1, 1.0), (1.0, 1.0), (0.7, 0.4)])
def test_rates_of_chance_prove_nothing(alpha: float, beta: float) -> None:
    rates = ErrorRates(0.0, 1, 1, 1, 1, alpha, beta)
    assert rates.mu_lower_bound == 0.0
    assert rates.epsilon_lower_bound_any_mechanism(1e-6) == 0.0


@pytest.mark.parametrize(("alpha", "beta"), [(0.001, 0.5), (0.5, 0.001)])
def test_either_error_may_be_the_rare_one(alpha: float, beta: float) -> None:
    bound = ErrorRates(0.0, 1, 1, 1, 1, alpha, beta).epsilon_lower_bound_any_mechanism(0.1)
    assert bound == pytest.approx(math.log((1.0 - 0.5 - 0.1) / 0.001))


@given(
    mu=st.floats(0.05, 6.0),
    threshold=st.floats(-3.0, 9.0),
    delta=st.sampled_from([1e-9, 1e-6, 1e-3, 0.1, 0.5]),
)
def test_no_threshold_shows_more_than_the_exact_epsilon(
    mu: float, threshold: float, delta: float
) -> None:
    bound = _exact(threshold, mu).epsilon_lower_bound_any_mechanism(delta)
    assert bound <= mfa.accounting.exact_epsilon(1.0 / mu, delta) + 1e-6


@pytest.mark.short_cases(2)
@pytest.mark.parametrize("mu", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("delta", [1e-6, 0.1])
def test_the_best_thresholds_show_the_exact_epsilon(mu: float, delta: float) -> None:
    """The supremum over thresholds is epsilon itself (Dong, Roth and Su, Cor. 2.13)."""
    thresholds = np.linspace(0.0, 12.0, 3001)
    best = max(_exact(t, mu).epsilon_lower_bound_any_mechanism(delta) for t in thresholds)
    assert best == pytest.approx(mfa.accounting.exact_epsilon(1.0 / mu, delta), abs=1e-3)


def test_scores_are_counted_and_what_is_no_number_is_an_error() -> None:
    rates = statistics.ErrorRates.of_scores(
        np.array([-1.0, 0.0, 2.0, 3.0]), np.array([0.5, 1.0, 1.5, math.nan]), 1.0, 0.01
    )
    assert (rates.false_positives, rates.absences) == (2, 4)
    assert (rates.false_negatives, rates.presences) == (3, 4)
    assert rates.false_positive_bound == statistics.upper_bound_of_rate(2, 4, 0.01)
    assert rates.false_negative_bound == statistics.upper_bound_of_rate(3, 4, 0.01)


_SIZES = (100_000, 2000, 1e-4 / 6.0)


@pytest.mark.short_cases(2)
@pytest.mark.parametrize("power", [0.3, 1.0, 3.0, 700.0])
def test_thresholds_are_better_than_any_other(power: float) -> None:
    """Better by the bound on mu and by epsilon at either delta, expected of Gaussian scores."""
    absences, presences, miss_probability = _SIZES
    deltas = (1e-6, 0.1)

    def bounds(threshold: float) -> np.ndarray:
        rates = ErrorRates.of_counts(
            threshold,
            absences * scipy.stats.norm.sf(threshold),
            absences,
            presences * scipy.stats.norm.cdf(threshold - power),
            presences,
            miss_probability,
        )
        epsilons = [rates.epsilon_lower_bound_any_mechanism(delta) for delta in deltas]
        return np.array([rates.mu_lower_bound, *epsilons])

    chosen = statistics.choose_thresholds(power, absences, presences, miss_probability, deltas)
    reached = np.array([bounds(threshold)[i] for i, threshold in enumerate(chosen)])
    generator = np.random.default_rng(0)
    others = np.max([bounds(t) for t in generator.uniform(-3.0, power + 4.0, 500)], axis=0)
    assert np.all(reached >= 0.999 * others)


@pytest.mark.short_cases(1)
@pytest.mark.parametrize(("noise", "flagged"), [(1.0, False), (0.9, True)])
def test_ten_percent_too_little_noise_is_flagged_and_enough_noise_is_not(
    noise: float, flagged: bool
) -> None:
    """4000 clients at the claim mu = 3: decided rightly in more than 99.9 % of 5000 audits.

    The false alarm rate is 1e-4; the generator is seeded.
    """
    claimed, presences, absences, miss_probability = 3.0, 4000, 200_000, 1e-4 / 6.0
    mu = claimed / noise
    (threshold,) = statistics.choose_thresholds(mu, absences, presences, miss_probability, ())
    generator = np.random.default_rng(1)
    positives = generator.binomial(absences, scipy.stats.norm.sf(threshold), 5000)
    negatives = generator.binomial(presences, scipy.stats.norm.cdf(threshold - mu), 5000)
    bounds = np.array(
        [
            ErrorRates.of_counts(
                threshold, a, absences, b, presences, miss_probability
            ).mu_lower_bound
            for a, b in zip(positives, negatives, strict=True)
        ]
    )
    assert np.mean((bounds > claimed) == flagged) > 0.999
    # What an audit of this size reaches of the claim.
    assert np.mean(bounds) > 0.94 * mu


_SCHEMAS = st.one_of(
    st.just(SingleParticipation()),
    st.builds(FixedEpochOrder, st.integers(1, 4), st.integers(1, 5)),
    st.builds(MinSeparation, st.integers(1, 5), st.one_of(st.none(), st.integers(1, 4))),
)


def _model(strategy: np.ndarray, clip_norm: float = 1.0) -> NoiseModel:
    """Noise C^-1 Z of a known C, as if estimated from infinitely many coordinates."""
    return NoiseModel(np.zeros(strategy.shape[1]), strategy.T @ strategy / clip_norm**2, 10**12)


@given(schema=_SCHEMAS, num_rounds=st.integers(1, 6), seed=st.integers(0, 2**32 - 1))
def test_the_contribution_is_the_worst_one(
    schema: Participation, num_rounds: int, seed: int
) -> None:
    """Its power is the largest of all patterns and signs: the sensitivity of C."""
    strategy = np.random.default_rng(seed).normal(size=(num_rounds, num_rounds))
    found = _model(strategy, 3.0).worst_contribution(schema, 3.0)
    assert found.rounds in set(patterns(schema, num_rounds))
    assert found.power == pytest.approx(scalar_sensitivity(strategy, schema), rel=1e-9)


@pytest.mark.parametrize("is_signed", [False, True])
def test_many_participations_of_a_positive_matrix_have_its_signs(is_signed: bool) -> None:
    """The worst pattern of falling Toeplitz coefficients is 0, b, 2 b, ... (Kalinin, Lampert).

    A sign for each column of C changes the signs of the worst contribution, and its power
    not at all.
    """
    factorization = mfa.factorizations.toeplitz(64)
    schema = MinSeparation(4)
    signs = np.random.default_rng(2).choice([-1, 1], 64) if is_signed else np.ones(64, int)
    found = _model(factorization.strategy_matrix() * signs).worst_contribution(schema, 1.0)
    assert found.rounds == tuple(range(0, 64, 4))
    assert len(set(found.groups)) == 1
    assert found.signs == tuple(signs[0] * signs[::4])
    assert found.power == pytest.approx(factorization.sensitivity(schema).value, rel=1e-9)


def test_signs_are_free_between_orthogonal_rounds_and_only_there() -> None:
    strategy = np.eye(5)
    strategy[3, 0] = -0.5
    found = _model(strategy).worst_contribution(MinSeparation(1), 1.0)
    assert found.rounds == (0, 1, 2, 3, 4)
    assert found.groups == (0, 1, 2, 0, 4)
    assert found.signs == (1, 1, 1, -1, 1)


def test_the_score_is_the_log_likelihood_ratio_of_the_stream() -> None:
    """Against the densities of SciPy, with a sign for each group."""
    generator = np.random.default_rng(3)
    strategy = mfa.factorizations.banded(mfa.workloads.prefix_sum(6), 2).strategy_matrix()
    clip_norm = 1.5
    mean = generator.normal(size=6)
    model = NoiseModel(mean, strategy.T @ strategy, 10**12)
    found = model.worst_contribution(MinSeparation(2), clip_norm)
    assert len(found.rounds) == 3
    residuals = generator.normal(size=(6, 8))
    signs = np.array(list(itertools.product([1.0, -1.0], repeat=3))).T
    scores = model.scores(found, signs, residuals)
    covariance = np.linalg.inv(strategy.T @ strategy)
    for m in range(8):
        contribution = np.zeros(6)
        contribution[list(found.rounds)] = clip_norm * signs[:, m]
        with_client = scipy.stats.multivariate_normal(mean + contribution, covariance)
        without = scipy.stats.multivariate_normal(mean, covariance)
        ratio = with_client.logpdf(residuals[:, m]) - without.logpdf(residuals[:, m])
        assert found.power * scores[m] - found.power**2 / 2 == pytest.approx(ratio, rel=1e-9)


@pytest.mark.parametrize("mechanism", ["identity", "tree", "blt"])
def test_the_noise_is_learned_from_samples(mechanism: str) -> None:
    """The squared power from 40000 coordinates: within 7 standard deviations, sqrt(2 / 40000).

    The generator is seeded.
    """
    factorization: mfa.factorizations.Factorization = {
        "identity": lambda: mfa.factorizations.identity(8),
        "tree": lambda: mfa.factorizations.tree_aggregation(8),
        "blt": lambda: mfa.factorizations.blt(8, 2),
    }[mechanism]()
    streamed = noise_rows.dense(factorization.noise_recursion())
    samples = streamed @ np.random.default_rng(5).normal(size=(8, 40_000))
    model = NoiseModel.fitted(np.array_split(samples, 3, axis=1), 1.0)
    exact = np.linalg.inv(streamed @ streamed.T)
    np.testing.assert_allclose(
        np.diagonal(model.precision), np.diagonal(exact), rtol=7.0 * math.sqrt(2.0 / 40_000)
    )
    assert model.samples == 40_000


@pytest.mark.parametrize("fault", ["repeated row", "round without noise", "no noise"])
def test_missing_noise_is_a_huge_power_and_no_error(fault: str) -> None:
    """Results are float32: rounding is all that is left of the missing noise."""
    noise = np.random.default_rng(6).normal(size=(4, 20_000))
    if fault == "repeated row":
        noise[2] = noise[1]
    elif fault == "round without noise":
        noise[2] = 0.0
    else:
        noise[:] = 0.0
    noise = noise.astype(np.float32).astype(np.float64)
    model = NoiseModel.fitted([noise], 1.0)
    found = model.worst_contribution(SingleParticipation(), 1.0)
    assert 1e3 < found.power < math.inf
    if fault == "repeated row":
        assert found.rounds in ((1,), (2,))


def test_noise_that_is_not_finite_is_refused() -> None:
    with refuses("finite"):
        NoiseModel.fitted([np.array([[0.0, math.nan]])], 1.0)
