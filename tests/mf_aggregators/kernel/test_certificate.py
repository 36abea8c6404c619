"""Candidates that are true, candidates that are false, and what their tests need.

Likelihood ratios and samples against known values, all patterns, and adaptive servers.
"""

import dataclasses
import fractions
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import scipy.integrate
import scipy.special
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators.kernel import certificate as certificates
from mf_aggregators.kernel import draws, sensitivity
from mf_aggregators.kernel.certificate import (
    Certificate,
    DominatingPair,
    ImportanceSampler,
    _BallsInBinsRounds,
    _MinSeparationRounds,
    _RoundsDistribution,
    check_certificate,
)
from mf_aggregators.kernel.losses import (
    BallsInBins,
    MinSeparation,
    Poisson,
    SampledRun,
    StrategyColumns,
)
from mf_aggregators.participation import _columns_of_matrix, certificate_search
from tests.examples import examples
from tests.mf_aggregators import participation_patterns
from tests.mf_aggregators.kernel import random_claims
from tests.mf_aggregators.participation_patterns import (
    cases,
    dominating_pair,
    log_ratios,
)
from tests.refusals import refuses

_DELTA = 1e-3


def _candidate_of(
    pair: DominatingPair, epsilon: float, delta: float, *, max_samples: int
) -> Certificate:
    """The first candidate of a search that ended at an epsilon: it is likely to be proved."""
    tuning = certificate_search._TuningSamples(
        pair, certificate_search._best_sampler(pair, epsilon, delta), delta, 0, max_samples
    )
    tuning.grow_for(epsilon)
    of_q = certificate_search._SamplesOfQ(pair, delta, 0)
    found = tuning.candidate(of_q, epsilon, 0)
    assert found is not None
    return found


def _divergences(
    distribution: _RoundsDistribution, matrix: np.ndarray, sigma: float
) -> Callable[[float], np.ndarray]:
    """Returns what integrates both hockey-stick divergences of a run of two rounds, or two bins."""
    patterns = participation_patterns.of(distribution, np.abs(matrix), sigma)
    if len(matrix) > 2:
        # Outputs count in the plane of the means alone.
        (long, across), (one, other) = (np.zeros(2), np.zeros(2)), patterns.means
        long[0] = np.linalg.norm(one)
        across[0] = one @ other / long[0]
        across[1] = math.sqrt(other @ other - across[0] ** 2)
        patterns = dataclasses.replace(patterns, means=np.stack([long, across]))
    return functools.partial(random_claims.divergences, patterns, step=0.05)


def _epsilon(divergence: Callable[[float], float], delta: float) -> float:
    return float(random_claims._root(lambda epsilon: divergence(epsilon) - delta, 0.0, 1.0))


_CASES: list[tuple[_RoundsDistribution, list[list[float]], float]] = [
    (_MinSeparationRounds(0.2, 2), [[0.8, 0.0], [0.6, 1.0]], 0.8),
    (_MinSeparationRounds(0.1, 1), [[1.0, 0.0], [0.0, 1.0]], 1.5),
    (_BallsInBinsRounds(3), [[0.8, 0.0], [0.6, 1.0]], 0.7),
    # Participations that share rows, with entries of both signs.
    (
        _BallsInBinsRounds(2),
        [
            [0.8, 0.0, 0.0, 0.0, 0.0],
            [-0.5, 0.9, 0.0, 0.0, 0.0],
            [0.2, 0.3, 0.9, 0.0, 0.0],
            [0.1, -0.2, 0.3, 0.9, 0.0],
            [0.1, 0.1, -0.2, 0.4, 1.0],
        ],
        1.6,
    ),
]


@pytest.mark.short_cases(4)
@pytest.mark.parametrize(("distribution", "matrix", "sigma"), _CASES)
@pytest.mark.parametrize("direction", [0, 1])
def test_false_candidates_are_not_proved(
    distribution: _RoundsDistribution,
    matrix: list[list[float]],
    sigma: float,
    direction: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each of the two divergences, made 10 % larger than the candidate says, the other one let be.

    A test would pass by chance with probability beta = 1.6e-7 at most.
    """
    exact = _divergences(distribution, np.array(matrix), sigma)
    truth = _epsilon(lambda epsilon: exact(epsilon)[direction], 1.1 * _DELTA)
    whole = _epsilon(lambda epsilon: max(exact(epsilon)), _DELTA)
    of = dominating_pair(distribution, np.array(matrix), sigma)
    candidate = _candidate_of(of, 1.2 * whole, _DELTA, max_samples=2**15)
    false = dataclasses.replace(
        candidate, epsilon=truth, bet=0.1 * candidate.bet, num_samples=4 * candidate.num_samples
    )

    tests = ("_p_from_q_is_small", "_q_from_p_is_small")
    monkeypatch.setattr(certificates, tests[1 - direction], lambda *unused: True)
    assert certificates.is_proved(of, candidate)
    for seed in range(3):
        assert not certificates.is_proved(of, dataclasses.replace(false, seed=seed))


@pytest.mark.parametrize("probability", [0.05, 0.3])
def test_p_and_q_are_told_apart(probability: float) -> None:
    """The divergence of P from Q is the larger one here: that of Q from P must not stand for it."""
    distribution, epsilon = _MinSeparationRounds(probability, 1), 0.4
    larger, smaller = _divergences(distribution, np.eye(2), 1.0)(epsilon)
    assert larger > 2.0 * smaller
    of = dominating_pair(distribution, np.eye(2), 1.0)
    candidate = _candidate_of(of, epsilon, 1.6 * larger, max_samples=2**16)
    assert certificates.is_proved(of, candidate)
    with pytest.raises(AssertionError):
        _candidate_of(of, epsilon, 0.9 * larger, max_samples=2**16)
    assert not certificates.is_proved(of, dataclasses.replace(candidate, delta=0.9 * larger))


def test_a_test_that_draws_too_little_proves_nothing() -> None:
    """Of order 1, whose terms are of P itself, and nearly always zero at this epsilon."""
    of = dominating_pair(*_CASES[0][:1], np.array(_CASES[0][1]), _CASES[0][2])
    candidate = _candidate_of(of, 6.0, _DELTA, max_samples=2**15)
    tested, _ = certificates.shares_of(candidate.delta)
    bet = 0.3 / (ImportanceSampler(of, 1).largest_term(6.0) - tested)
    gain = math.log1p(bet * tested)
    enough = math.ceil(-math.log(certificates.shares_of(candidate.delta)[1]) / gain)
    plain = dataclasses.replace(candidate, order=1, bet=bet, num_samples=enough)
    assert certificates.is_proved(of, dataclasses.replace(plain, num_samples=2 * enough))
    # Bets that could lose more than there is are no bets, and nor are thresholds in another order.
    changed: Any = functools.partial(dataclasses.replace, plain)
    for false in (changed(num_samples=enough // 2), changed(bet=1.1)):
        assert not certificates._p_from_q_is_small(of, false, None)
    for false in (changed(num_untilted=0), changed(thresholds=(0.0, -1.0))):
        assert not certificates._q_from_p_is_small(of, false, None)
    # A test draws so many samples, also if they are no multiple of a batch.
    assert sum(ImportanceSampler(of, 0).batches(1, 1500, len)) == 1500


def test_the_lower_tail_is_that_of_outputs_without_the_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Losses of a client in the only round are normal numbers of mean -1/2 without it."""
    found = mock.Mock(return_value=1.0)
    monkeypatch.setattr(certificates, "divergence_of_counts", found)
    monkeypatch.setattr(certificates, "LOSS_ROUNDING", 0.1)
    of = DominatingPair(np.ones((1, 1)), 1.0, _MinSeparationRounds(1.0, 1))
    candidate = Certificate(3.0, _DELTA, 0, 2, 1, 1.0, 2**14, (-0.5, 0.5), 0)
    assert not certificates._q_from_p_is_small(of, candidate, None)
    # Five standard errors.
    counts, *others = found.call_args.args
    np.testing.assert_allclose(counts / 2**14, scipy.stats.norm.cdf([0.1, 0.9]), atol=0.0196)
    assert others == [2**14, (-0.5, 0.5), 2.9, certificates.shares_of(_DELTA)[1]]


@pytest.mark.parametrize("order", [1, 2, 3, 5, 8])
def test_no_term_is_larger_than_the_largest(order: int) -> None:
    """Also for orders whose largest term is more than 1; it is nearly attained."""
    of = dominating_pair(_MinSeparationRounds(0.4, 1), np.eye(2), 0.8)
    sampler = ImportanceSampler(of, order)
    for epsilon in (0.1, 1.0, 4.0):
        losses = np.linspace(epsilon - 1.0, epsilon + 30.0, 100_001)
        values, largest = sampler.terms(losses, epsilon), sampler.largest_term(epsilon)
        assert largest * (1 - 1e-4) <= np.max(values) <= largest
        assert np.all(values[losses < epsilon - 1e-6] == 0.0)


@pytest.mark.parametrize("share", [pytest.param(0.5, marks=pytest.mark.long), 2.0, 0.98])
def test_the_lower_tail_is_bounded_with_the_failure_probability_of_the_candidate(
    monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """What is so only half of the time is not proved, by the counts of the test."""
    low_count, high_count, samples, thresholds = 60, 400, 2**11, (-0.5, -0.2)
    counts = [np.array([low_count, high_count])]
    monkeypatch.setattr(ImportanceSampler, "batches", lambda *unused: counts)
    of = DominatingPair(np.ones((4, 1)), 1.0, _MinSeparationRounds(0.1, 1))
    candidate = Certificate(0.0, _DELTA, 0, 2, 1, 1.0, samples, thresholds, 0)

    def largest_divergence(epsilon: float, failure: float) -> float:
        return certificates.divergence_of_counts(counts[0], samples, thresholds, epsilon, failure)

    beta, tested = 0.01 * _DELTA / (4 * 16), 0.99 * _DELTA
    assert certificates.shares_of(candidate.delta)[1] == pytest.approx(beta)
    assert certificates.shares_of(_DELTA) == pytest.approx((tested, beta))
    epsilon = 0.5001
    while largest_divergence(epsilon, beta) > share * tested:
        epsilon += 1e-3
    # With one half in the place of beta, all three would be proved.
    assert largest_divergence(epsilon, 0.5) < 0.9 * tested
    found = certificates._q_from_p_is_small(
        of, dataclasses.replace(candidate, epsilon=epsilon), None
    )
    assert found == (share < 1.0)


def test_wealth_is_compared_with_the_failure_probability_of_the_candidate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Wealth that was ever large enough proves (Ville), and no later batch is drawn."""
    of = DominatingPair(np.ones((4, 1)), 1.0, _MinSeparationRounds(0.1, 1))
    candidate = _candidate_of(of, 2.0, 1e-4, max_samples=2**14)
    assert candidate.num_samples
    needed = -math.log(0.01 * 1e-4 / (4 * 16))
    for factor, is_proved in ((1.0 + 1e-9, True), (1.0 - 1e-9, False), (math.nan, False)):
        grown = iter([0.25 * factor * needed, 0.75 * factor * needed, -needed])
        monkeypatch.setattr(ImportanceSampler, "batches", lambda *unused, grown=grown: grown)
        assert certificates._p_from_q_is_small(of, candidate, None) == is_proved
        assert len(list(grown)) == is_proved


def test_losses_that_are_not_numbers_count_against_a_candidate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of = DominatingPair(np.ones((4, 1)), 1.0, _MinSeparationRounds(0.1, 1))
    candidate = Certificate(3.0, _DELTA, 0, 2, 1, 1.0, 100, (-0.5, -0.1), 0)
    counts = []

    def one_batch(*arguments: Any) -> list[Any]:
        counts.append(arguments[3](np.array([math.nan, -0.7, -0.3, 0.0])))
        return counts

    monkeypatch.setattr(ImportanceSampler, "batches", one_batch)
    certificates._q_from_p_is_small(of, candidate, None)
    np.testing.assert_array_equal(counts[0], [2, 2])


@pytest.mark.parametrize("loss", [-1e6, -1e3, -200.0, 1e3, 1e6])
@pytest.mark.parametrize("order", [1, 2, 8])
def test_losses_beyond_floats_have_terms(loss: float, order: int) -> None:
    """A loss below epsilon has a term of zero, however large the other factor is."""
    sampler = ImportanceSampler(DominatingPair(np.ones((4, 1)), 1.0, _CASES[1][0]), order)
    with np.errstate(all="raise", under="ignore"):
        sampler.log_mgf = 0.0
        (term,) = sampler.terms(np.array([loss]), 1.0)
        sampler.log_mgf = 1e6
        largest = sampler.largest_term(1.0)
    assert term == 0.0 if loss < 1.0 else 0.0 <= term <= 1.0 + 1e-6
    assert math.isfinite(largest)


def test_every_test_has_numbers_of_its_own() -> None:
    """Mechanisms, candidates and purposes tell streams apart; the same gives the same numbers."""
    of = dominating_pair(*_CASES[0][:1], np.array(_CASES[0][1]), _CASES[0][2])
    candidate = _candidate_of(of, 5.0, _DELTA, max_samples=2**14)
    changes = [
        (of, candidate, "P from Q"),
        (of, candidate, "Q from P"),
        (dataclasses.replace(of, sigma=2.0), candidate, "P from Q"),
        (of, dataclasses.replace(candidate, seed=1), "P from Q"),
        (of, dataclasses.replace(candidate, attempt=1), "P from Q"),
        (of, dataclasses.replace(candidate, epsilon=5.1), "P from Q"),
    ]
    assert len({certificates._key_of(*each) for each in changes}) == len(changes)
    assert certificates._key_of(*changes[0]) == certificates._key_of(*changes[0])


# Bounds from counts


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
                    certificates._log_wealth(np.repeat([0.0, largest], [samples - k, k]), mean, bet)
                )
                for k in counts
            ]
        )
        assert distribution @ wealths == pytest.approx(1.0)
        for failure in (0.5, 0.1, 0.01):
            assert np.sum(distribution[wealths >= 1.0 / failure]) <= failure


@given(st.integers(1, 2000), st.floats(0.0, 1.0), st.floats(1e-9, 0.4))
@settings(max_examples=examples(60), deadline=None)
def test_probabilities_are_bounded_as_by_exact_binomials(
    samples: int, share: float, failure: float
) -> None:
    count = round(share * samples)
    lower, upper = certificates._bounds_of_probability(count, samples, failure)
    assert lower <= count / samples <= upper
    if count < samples:
        assert scipy.stats.binom.cdf(count, samples, upper) == pytest.approx(failure, rel=1e-6)
    else:
        assert upper == 1.0
    if count > 0:
        assert scipy.stats.binom.sf(count - 1, samples, lower) == pytest.approx(failure, rel=1e-6)
    else:
        assert lower == 0.0


@given(st.floats(-3.0, -0.2), st.floats(0.3, 3.0), st.floats(0.0, 6.0))
@settings(max_examples=examples(60), deadline=None)
def test_tails_of_one_normal_number_are_exact(mean: float, width: float, epsilon: float) -> None:
    """L = mean + width G: the line is the tail, and the divergence an integral."""
    threshold = max(mean - width, -epsilon)
    tail = threshold, (threshold - mean) / width, 1.0 / width
    expected = scipy.integrate.quad(
        lambda g: -math.expm1(epsilon + mean + width * g) * scipy.stats.norm.pdf(g),
        -14.0,
        (-epsilon - mean) / width,
    )[0]
    found = certificates._divergence_of_tail(*tail, epsilon)
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-14)
    assert certificates._divergence_of_tail(*tail, -threshold - 1e-6) == 1.0


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
        found = [round(samples * step * np.sum(density[values <= t])) for t in thresholds]
        counts = np.array(found)
        for epsilon in np.linspace(-thresholds[0], -math.log1p(-rate) + 1.0, 9):
            truth = step * np.sum(density * np.maximum(-np.expm1(epsilon + values), 0.0))
            bound = certificates.divergence_of_counts(counts, samples, thresholds, epsilon, 1e-6)
            assert truth <= bound
        # Without a slope it is the probability of the first count.
        assert bound < 0.5 * counts[0] / samples


def test_bounds_of_counts_share_the_failure_probability() -> None:
    """A line through both bounds; a constant one where they do not rise."""
    of_count = functools.partial(certificates._bounds_of_probability, samples=2**11, failure=5e-7)
    for low, high in ((60, 60), (60, 400), (0, 0)):
        at, below = (float(scipy.special.ndtri(x)) for x in (of_count(low)[1], of_count(high)[0]))
        found = certificates.divergence_of_counts(
            np.array([low, high]), 2**11, (-0.5, -0.2), 0.6, 1e-6
        )
        known = certificates._divergence_of_tail(-0.5, at, max((below - at) / 0.3, 0.0), 0.6)
        assert found == pytest.approx(known, rel=1e-12)


def test_counts_that_say_nothing_bound_nothing() -> None:
    counts = np.array([100, 100])
    assert certificates.divergence_of_counts(counts, 100, (-1.0, 0.0), 5.0, 1e-6) == 1.0


# The check of a run's data


def _run(draws: MinSeparation | BallsInBins, num_bands: int, sigma: float) -> SampledRun:
    """Columns of powers of 0.7, rounded to nearest: NumPy's own depend on the processor."""
    powers = [float(fractions.Fraction(0.7) ** k) for k in range(num_bands)]
    rows = np.arange(draws.num_rounds)[:, None] + np.arange(num_bands)
    entries = np.where(rows < draws.num_rounds, powers, 0.0)
    return SampledRun(draws, sigma, StrategyColumns(entries))


def _certificate(*numbers: Any) -> Certificate:
    epsilon, order, num_samples, bet, thresholds = numbers
    left = 0.0009999999999990004
    return Certificate(epsilon, left, 0, order, num_samples, bet, 2**16, thresholds, 0)


# Found by version 2.0.0, with the keys of their random numbers, and five losses of Q and of order a
# that follow from another key.
_OF_2_0_0 = [
    (
        _run(MinSeparation(12, 3, 200, 10, 5), 3, 1.2),
        _certificate(
            0.840906886248953,
            7,
            15041,
            48.43825813756439,
            (-0.5211271640374493, -0.2782345365554919),
        ),
        0x691737F98D33C6086A3267E9971CBE9510882E79DDD04ADFB819B9012F2C3119,
        [
            [-0.2859387548162202, -0.07111881243118871, 0.12413777656309766],
            [0.1704482038768866, 0.4557413099015231, 0.7821380793323729],
        ],
    ),
    (
        _run(BallsInBins(12, 3, 200, 10, 20), 3, 1.2),
        _certificate(
            0.8042379839152846,
            4,
            21776,
            17.01489084994419,
            (-0.61320378018547, -0.2901471908865614),
        ),
        0x6CA82087ACA5DDB7B8BCF57746313F45EA173333EB3EE8FBFEFEE174EE3D51F8,
        [
            [0.2766646278732794, -0.07989182548315021, -0.2682630837656963],
            [0.7275430848031976, 0.5574031132916497, 0.2994075694420819],
        ],
    ),
    (
        _run(BallsInBins(40, 40, 200, 20, 10), 40, 1.5),
        _certificate(
            3.2601085160263006,
            4,
            10541,
            69.07554685922793,
            (-3.0998902355350904, -0.4952580623521028),
        ),
        0xFCF02EBFD7503E8DDCDEBA3333A335C1AC51CF7F86B44B625708AE34738883A6,
        [
            [0.8443438144437216, -0.8484194390990849, -1.7324078161336778],
            [3.908894626070423, 3.6050097809725186, 3.6390122822535353],
        ],
    ),
]
_RUN, _TRUE = _OF_2_0_0[1][:2]


def _columns_of(run: SampledRun) -> StrategyColumns:
    assert run.columns is not None
    return run.columns


@pytest.mark.parametrize(("run", "certificate", "key", "losses"), _OF_2_0_0)
def test_certificates_of_earlier_versions_are_proved_by_the_same_random_numbers(
    run: SampledRun, certificate: Certificate, key: int, losses: list[list[float]]
) -> None:
    pair = certificates.dominating_pair(run)
    assert certificates._key_of(pair, certificate, "P from Q") == key
    for order, expected in zip((0, certificate.order), losses, strict=True):
        rng = np.random.Generator(np.random.Philox(np.random.SeedSequence((7, 0))))
        found = ImportanceSampler(pair, order).log_ratios(rng, 5)[:3]
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9)
    assert check_certificate(certificate, run, _DELTA)


def test_what_was_proved_is_not_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    certificates._proves.cache_clear()
    assert check_certificate(_TRUE, _RUN, _DELTA, advance=drawn.append)
    # The first test ends early; the second one draws all.
    assert _TRUE.num_untilted < sum(drawn) <= _TRUE.num_samples + _TRUE.num_untilted
    monkeypatch.setattr(certificates, "is_proved", lambda *unused: False)
    assert check_certificate(_TRUE, _RUN, _DELTA)
    entries, replace = _columns_of(_RUN).entries, dataclasses.replace
    others: list[Any] = [
        (replace(_TRUE, epsilon=0.81), _RUN, _DELTA),
        (_TRUE, replace(_RUN, columns=StrategyColumns(entries, 5.0)), _DELTA),
        (_TRUE, replace(_RUN, columns=StrategyColumns(1.5 * entries)), _DELTA),
        (_TRUE, replace(_RUN, draws=BallsInBins(12, 3, 200, 10, 19)), _DELTA),
        (_TRUE, replace(_RUN, sigma=1.3), _DELTA),
        (_TRUE, _RUN, 2.0 * _DELTA),
        (_TRUE, _RUN, _DELTA, 2**30),
    ]
    for other in others:
        assert not check_certificate(*other)


@pytest.mark.parametrize(
    "changes",
    [
        {"delta": math.nextafter(_TRUE.delta, 1.0)},
        {"attempt": certificates.ATTEMPTS},
        {"order": 0},
        {"order": 5},
        {"bet": 0.0},
        {"num_samples": 0},
        {"num_untilted": 0},
        {"thresholds": (0.0, 0.0)},
    ],
)
def test_certificates_that_prove_nothing_are_refused(
    changes: dict[str, Any],
) -> None:
    """Delta pays for the noise as it is drawn, and for so many attempts."""
    certificates._proves.cache_clear()
    assert not check_certificate(dataclasses.replace(_TRUE, **changes), _RUN, _DELTA)


def test_participations_that_share_rows_leave_less_of_delta(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What they change in C x is the longest sum of columns of a bin."""
    run, certificate = _OF_2_0_0[2][:2]
    part = run.norm_of_all
    matrix = np.array([[0.7 ** (i - j) if i >= j else 0.0 for j in range(40)] for i in range(40)])
    sums = [np.linalg.norm(matrix[:, bin_of::10].sum(axis=1)) for bin_of in range(10)]
    assert part == pytest.approx(max(sums) / np.linalg.norm(matrix[:, 0]), rel=1e-8)
    asked = []

    def delta_left(*numbers: float) -> float:
        asked.append(numbers)
        return 0.0

    certificates._proves.cache_clear()
    monkeypatch.setattr(sensitivity, "delta_left", delta_left)
    assert not check_certificate(certificate, run, _DELTA, 2**30)
    assert asked == [(_DELTA, run.sigma / part, 2**30)]
    assert _RUN.amplified_part == _RUN.sigma


class _Optimistic(StrategyColumns):
    """Columns that say of themselves that nothing is moved."""

    def scaled(self) -> np.ndarray:
        return 0.1 * super().scaled()


class _Rare(BallsInBins):  # type: ignore[misc]
    pass


class _Seldom(SampledRun):
    pass


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (0, dict(_TRUE.to_dict())),
        (1, _Seldom(_RUN.draws, _RUN.sigma, _RUN.columns)),
        (1, SampledRun(Poisson(12, 3, 200, 10), 1.2)),
        (1, None),
        (2, "0.001"),
        (3, 2.0**40),
    ],
)
def test_data_of_other_types_is_refused(place: int, value: object) -> None:
    arguments: list[Any] = [_TRUE, _RUN, _DELTA, 2**40]
    arguments[place] = value
    with pytest.raises(TypeError, match=r"kernel's own types|draws must be one of"):
        check_certificate(*arguments)
    entries = _columns_of(_RUN).entries
    runs: list[Any] = [
        (_RUN.draws, 1.2, _Optimistic(entries)),
        (_RUN.draws, 1.2, entries),
        (_Rare(12, 3, 200, 10, 20), 1.2, _RUN.columns),
    ]
    for run in runs:
        with pytest.raises(TypeError, match=r"columns must be|draws must be one of"):
            SampledRun(*run)


@pytest.mark.parametrize(
    "changes",
    [
        {"epsilon": "1"},
        {"seed": True},
        {"order": 2.0},
        {"epsilon": -0.1},
        {"delta": 0.0},
        {"bet": math.nan},
        {"thresholds": (-math.inf, 0.0)},
        {"epsilon": math.inf},
        *({name: -1} for name in ("attempt", "order", "num_samples", "num_untilted", "seed")),
    ],
)
def test_certificates_have_numbers_in_their_ranges(changes: dict[str, Any]) -> None:
    with refuses(*changes):
        dataclasses.replace(_TRUE, **changes)


def test_numbers_of_certificates_become_those_of_python() -> None:
    """Random numbers follow from their text."""
    changes = {"epsilon": 1, "seed": np.int64(3), "thresholds": [np.float32(-1.0), 0]}
    made = dataclasses.replace(_TRUE, **changes)  # type: ignore[arg-type]
    assert repr((made.epsilon, made.seed, made.thresholds)) == "(1.0, 3, (-1.0, 0.0))"


# Likelihood ratios


@given(cases(), st.integers(0, 2**32))
@settings(max_examples=examples(100), deadline=None)
def test_ratios_are_those_of_all_patterns(
    case: tuple[_RoundsDistribution, np.ndarray, float], seed: int
) -> None:
    outputs = np.random.default_rng(seed).normal(0.0, 2.0 * case[2], (len(case[1]), 4))
    expected = participation_patterns.of(*case).log_ratios(outputs)
    np.testing.assert_allclose(
        log_ratios(dominating_pair(*case), outputs), expected, rtol=0, atol=1e-12
    )


@given(cases(most_rounds=9), st.floats(0.0, 0.3))
@settings(max_examples=examples(60), deadline=None)
def test_bins_have_the_sums_of_their_columns_and_what_roundings_move(
    case: tuple[_RoundsDistribution, np.ndarray, float], rounding: float
) -> None:
    """Turned into few coordinates, whose products are the same; a row is rounded once."""
    distribution, matrix, _ = case
    n, num_bins = len(matrix), distribution.separation
    columns = _columns_of_matrix(matrix, n)
    pair = DominatingPair(columns, 1.0, _BallsInBinsRounds(num_bins), rounding)
    vectors = np.zeros((n, num_bins))
    for row, column in itertools.product(range(n), range(n)):
        vectors[row, column % num_bins] += matrix[row, column]
    for row, first in itertools.product(range(n), range(num_bins)):
        vectors[row, first] += rounding if row >= first else 0.0
    assert pair.num_outputs == min(n, num_bins)
    ((_, turned),) = pair.blocks
    np.testing.assert_allclose(turned.T @ turned, vectors.T @ vectors, rtol=0, atol=1e-12)


@pytest.mark.parametrize("probability", [0.003, 0.5, 0.9, 1.0])
def test_numbers_too_large_for_linear_arithmetic(probability: float) -> None:
    """Long runs and large outputs: logarithms, against a recursion in exact arithmetic's place."""
    rounds, separation = 800, 3
    distribution = _MinSeparationRounds(probability, separation)
    rng = np.random.default_rng(0)
    for exponents in (
        rng.normal(0.0, 1.0, (rounds, 3)),
        rng.normal(0.0, 400.0, (rounds, 3)),
        np.full((rounds, 1), 2.5),
    ):
        expected = np.zeros(exponents.shape[1])
        for k in range(exponents.shape[1]):
            logs = [0.0] * (rounds + separation)
            for i in range(rounds - 1, -1, -1):
                terms = [math.log(probability) + exponents[i, k] + logs[i + separation]]
                if probability < 1.0:
                    terms.append(math.log1p(-probability) + logs[i + 1])
                logs[i] = max(terms) + math.log(sum(math.exp(t - max(terms)) for t in terms))
            first = distribution.first_free_probabilities()
            largest = max(logs[:separation])
            expected[k] = largest + math.log(
                sum(q * math.exp(x - largest) for q, x in zip(first, logs, strict=False))
            )
        found = distribution.log_ratios(exponents.copy())
        np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-10)


@given(st.integers(1, 80), st.integers(1, 80), st.integers(0, 100))
@settings(max_examples=examples(40), deadline=None)
def test_products_are_those_of_the_matrix(rounds: int, bands: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    matrix = np.tril(rng.uniform(-1.0, 1.0, (rounds, rounds)))
    matrix -= np.tril(matrix, -bands)
    columns = _columns_of_matrix(matrix, min(bands, rounds))
    x = rng.normal(size=(rounds, 3))
    blocks = certificates._blocks_of_columns(columns)
    products = [block.T @ x[start : start + len(block)] for start, block in blocks]
    np.testing.assert_allclose(np.concatenate(products), matrix.T @ x, atol=1e-11)
    norms = [np.sum(block**2, axis=0) for _, block in blocks]
    np.testing.assert_allclose(np.concatenate(norms), np.sum(matrix**2, axis=0))
    scaled = StrategyColumns(columns).scaled()
    assert np.min(scaled) >= 0.0
    assert np.max(np.sum(scaled**2, axis=1)) == pytest.approx(1.0)


# An adaptive server


def _hockey_stick(upper: np.ndarray, lower: np.ndarray, epsilon: float) -> np.ndarray:
    return np.asarray(np.maximum(upper - math.exp(epsilon) * lower, 0.0))


@pytest.mark.parametrize("dimensions", [1, 2])
@pytest.mark.parametrize(
    ("matrix", "distribution"),
    [
        ([[1.0, 0.0], [0.8, 0.6]], _MinSeparationRounds(0.4, 1)),
        ([[1.0, 0.0], [-0.8, 0.6]], _MinSeparationRounds(0.4, 1)),
        ([[0.7, 0.0], [0.7, 1.0]], _BallsInBinsRounds(2)),
        ([[0.6, 0.0], [-0.8, 1.0]], _BallsInBinsRounds(2)),
        ([[0.9, 0.0], [0.4, 0.9]], _MinSeparationRounds(0.7, 2)),
        # One bin and three: participations that share a row of C x, and none at all.
        ([[0.7, 0.0], [-0.7, 1.0]], _BallsInBinsRounds(1)),
        ([[0.7, 0.0], [0.7, 1.0]], _BallsInBinsRounds(3)),
    ],
)
def test_no_adaptive_server_gets_beyond_the_pair(
    matrix: list[list[float]], distribution: _RoundsDistribution, dimensions: int
) -> None:
    """Two rounds, every update of the second chosen as is worst after what the first released.

    Updates are unit vectors in one or two dimensions, and zero. For each output of the first round
    the largest divergence that is left is integrated over the outputs of the second, which is the
    divergence of the best adaptive server. It must not exceed that of the pair of |C|. The first
    round's update is along an axis without loss of generality.
    """
    c, sigma, epsilon = np.array(matrix), 1.0, 0.3
    patterns = participation_patterns.of(distribution, np.eye(2), sigma)
    grid = np.linspace(-7.0, 7.0, 85)
    step = grid[1] - grid[0]
    angles = np.linspace(0.0, np.pi, 2 if dimensions == 1 else 5)
    choices = [np.zeros(dimensions)] + [
        np.array([math.cos(a), math.sin(a)])[:dimensions] for a in angles
    ]
    first = np.eye(dimensions)[0]
    axes = np.stack(np.meshgrid(*([grid] * dimensions), indexing="ij"), axis=-1)

    def density(mean: np.ndarray) -> np.ndarray:
        return np.asarray(np.prod(scipy.stats.norm.pdf(axes, mean, sigma), axis=-1))

    zero = density(np.zeros(dimensions))
    cell = step**dimensions
    # By pattern: what the first round's output weighs, along the axis of its update alone.
    weights = patterns.probabilities[:, None] * scipy.stats.norm.pdf(
        grid[None, :], c[0, 0] * patterns.means[:, :1], sigma
    )
    without = scipy.stats.norm.pdf(grid, 0.0, sigma)
    for swapped in (False, True):
        best = np.zeros(len(grid))
        for second in choices:
            densities = np.array(
                [density(c[1, 0] * s[0] * first + c[1, 1] * s[1] * second) for s in patterns.means]
            )
            for k in range(len(grid)):
                upper, lower = np.tensordot(weights[:, k], densities, axes=1), without[k] * zero
                pair = (lower, upper) if swapped else (upper, lower)
                best[k] = max(best[k], cell * np.sum(_hockey_stick(*pair, epsilon)))
        adaptive = step * np.sum(best)
        scalar = participation_patterns.of(distribution, np.abs(c), sigma)
        points = np.stack(np.meshgrid(grid, grid, indexing="ij")).reshape(2, -1)
        q = np.prod(scipy.stats.norm.pdf(points, 0.0, sigma), axis=0)
        p = q * np.exp(scalar.log_ratios(points))
        pair = (q, p) if swapped else (p, q)
        dominating = step**2 * np.sum(_hockey_stick(*pair, epsilon))
        assert adaptive <= dominating * (1 + 1e-3) + 1e-6
        if np.all(c >= 0.0):
            # Here the pair is what a server attains.
            assert adaptive >= dominating * (1 - 2e-3)


def test_signs_need_the_absolute_matrix() -> None:
    """Updates of opposite signs undo those of C: the pair of C itself would promise too much."""
    matrix, distribution = np.array([[0.6, 0.0], [-0.8, 1.0]]), _BallsInBinsRounds(2)
    grid = np.stack(np.meshgrid(*[np.linspace(-8, 8, 161)] * 2, indexing="ij")).reshape(2, -1)
    q = np.prod(scipy.stats.norm.pdf(grid, 0.0, 1.0), axis=0)

    def divergence(signs: tuple[float, ...], c: np.ndarray) -> float:
        p = q * np.exp(
            participation_patterns.of(distribution, c * np.array(signs), 1.0).log_ratios(grid)
        )
        return float(0.01 * np.sum(_hockey_stick(p, q, 0.3)))

    attacked = max(divergence(signs, matrix) for signs in itertools.product((-1.0, 1.0), repeat=2))
    assert attacked > 1.05 * divergence((1.0, 1.0), matrix)
    assert attacked <= divergence((1.0, 1.0), np.abs(matrix)) * (1 + 1e-9)


@pytest.mark.parametrize("shape", [(11, 3), (13, 3), (12, 4)])
def test_columns_that_do_not_fit_the_scheme_are_refused(shape: tuple[int, int]) -> None:
    with refuses("scheme", "12", "3"):
        certificates.dominating_pair(
            SampledRun(MinSeparation(12, 3, 200, 10, 5), 1.2, StrategyColumns(np.ones(shape)))
        )


def test_rounding_enlarges_the_entries_or_the_rows_of_a_bin() -> None:
    """By its steps of Z for each coordinate of a row, in units of the scaled columns."""
    sigma, coordinates, steps = 1.5, 8 * 10**6, 7.0
    rows = np.arange(8)[:, None] + np.arange(2)
    entries = np.where(rows < 8, np.array([1.0, -0.5]), 0.0)
    columns = StrategyColumns(entries, steps)
    moved = sigma * steps * math.sqrt(10**6) / draws.STANDARD_DEVIATION
    assert moved > 1e-6
    apart, shared = (
        certificates.dominating_pair(
            SampledRun(BallsInBins(8, 2, 40, 10, bins), sigma, columns), coordinates
        )
        for bins in (4, 1)
    )
    scaled = np.abs(entries) / math.sqrt(1.25)
    np.testing.assert_allclose(apart.columns, scaled + moved * (rows < 8), rtol=1e-14)
    assert apart.rounding == 0.0
    np.testing.assert_allclose(shared.columns, scaled, rtol=1e-14)
    assert shared.rounding == pytest.approx(moved, rel=1e-14)
    assert (apart.sigma, apart.rounds) == (sigma, _BallsInBinsRounds(4))


def test_the_coin_is_that_of_the_rates() -> None:
    """Clients that took part in the last separation - 1 rounds are not free."""
    rounds = certificates.dominating_pair(_run(MinSeparation(12, 3, 200, 10, 5), 3, 1.0)).rounds
    assert rounds == _MinSeparationRounds(10 / (200 - 4 * 10), 5)
    assert certificates.dominating_pair(_run(BallsInBins(12, 3, 200, 10, 20), 3, 1.0)).rounds == (
        _BallsInBinsRounds(20)
    )


# Samples


@given(cases())
@settings(max_examples=examples(60), deadline=None)
def test_moments_are_those_of_all_tuples(
    case: tuple[_RoundsDistribution, np.ndarray, float],
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
        (_MinSeparationRounds(0.35, 2), [[0.8, 0.0], [0.6, 1.0]]),
        (_MinSeparationRounds(0.35, 1), [[1.0, 0.0], [0.0, 0.7]]),
        (_MinSeparationRounds(1.0, 2), [[0.8, 0.0], [0.6, 0.9]]),
        (_BallsInBinsRounds(3), [[0.8, 0.0], [0.6, 1.0]]),
    ],
)
@pytest.mark.parametrize("order", [0, 1, 2, 4])
def test_losses_have_the_sampling_distribution(
    distribution: _RoundsDistribution, matrix: list[list[float]], order: int
) -> None:
    """The distribution of losses, against a fine grid of outputs: Kolmogorov and Smirnov.

    Each of these sixteen tests fails by chance with probability 1e-6; the seed is fixed.
    """
    c, sigma = np.array(matrix), 0.9
    of = dominating_pair(distribution, c, sigma)
    rng = np.random.default_rng(order)
    outputs = ImportanceSampler(of, order)
    drawn = np.sort(np.concatenate([outputs.log_ratios(rng, 1000) for _ in range(6)]))
    axis = np.linspace(-7.0, 11.0, 401)
    grid = np.stack(np.meshgrid(axis, axis, indexing="ij")).reshape(2, -1)
    losses = participation_patterns.of(distribution, c, sigma).log_ratios(grid)
    weights = np.exp(order * losses) * np.prod(scipy.stats.norm.pdf(grid, 0.0, sigma), axis=0)
    by_loss = np.argsort(losses)
    cumulative = np.cumsum(weights[by_loss]) / np.sum(weights)
    expected = np.interp(drawn, losses[by_loss], cumulative)
    steps = np.arange(len(drawn) + 1) / len(drawn)
    above, below = np.abs(expected - steps[1:]), np.abs(expected - steps[:-1])
    distance = max(float(above.max()), float(below.max()))
    assert distance < scipy.stats.kstwo.isf(1e-6, len(drawn)) + 4e-3


def test_orders_end_where_tables_are_large() -> None:
    rng = np.random.default_rng(0)
    columns = rng.uniform(0.0, 1.0, (2052, 64))
    for separation, expected in ((64, [1, 2, 3]), (80, [1, 2, 3]), (342, [1, 2])):
        kinds: list[_RoundsDistribution] = [
            _MinSeparationRounds(0.01, separation),
            _BallsInBinsRounds(separation),
        ]
        for distribution in kinds:
            of = DominatingPair(columns, 1.0, distribution)
            orders = of.orders
            assert orders == expected
