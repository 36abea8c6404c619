"""Candidates that are true, candidates that are false, and what their tests need."""

import dataclasses
import fractions
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import scipy.integrate
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators.kernel import certificate as certificates
from mf_aggregators.kernel import dominating_pairs, draws_of_clients, gaussian
from mf_aggregators.kernel.certificate import Certificate, check_certificate
from mf_aggregators.kernel.dominating_pairs import (
    DominatingPair,
    ImportanceSampler,
    _BallsInBinsRounds,
    _MinSeparationRounds,
    _RoundsDistribution,
)
from mf_aggregators.kernel.draws_of_clients import (
    BallsInBins,
    MinSeparation,
    Poisson,
    SampledRun,
    StrategyColumns,
)
from mf_aggregators.participation import certificate_search
from tests.examples import examples
from tests.mf_aggregators import participation_patterns
from tests.mf_aggregators.participation_patterns import dominating_pair

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
) -> Callable[[float], tuple[float, float]]:
    """Returns what integrates both hockey-stick divergences of a run of two rounds, or two bins."""
    patterns = participation_patterns.of(distribution, np.abs(matrix), sigma)
    if len(matrix) > 2:
        # Outputs count in the plane of the means alone.
        (long, across), (one, other) = (np.zeros(2), np.zeros(2)), patterns.means
        long[0] = np.linalg.norm(one)
        across[0] = one @ other / long[0]
        across[1] = math.sqrt(other @ other - across[0] ** 2)
        patterns = dataclasses.replace(patterns, means=np.stack([long, across]))
    reach = float(np.max(patterns.means)) + 9.0 * sigma
    axis = np.linspace(-9.0 * sigma, reach, 1201)
    points = np.stack(np.meshgrid(axis, axis, indexing="ij")).reshape(2, -1)
    losses = patterns.log_ratios(points)
    by_loss = np.argsort(losses)
    losses = losses[by_loss]
    density = np.outer(*[scipy.stats.norm.pdf(axis, 0.0, sigma) * (axis[1] - axis[0])] * 2)
    q = density.ravel()[by_loss]
    # The mass of outputs with losses below the i-th one.
    below_q, below_p = (np.append(0.0, np.cumsum(each)) for each in (q, q * np.exp(losses)))

    def divergences(epsilon: float) -> tuple[float, float]:
        factor = math.exp(epsilon)
        high, low = np.searchsorted(losses, [epsilon, -epsilon])
        return (
            float(below_p[-1] - below_p[high] - factor * (below_q[-1] - below_q[high])),
            float(below_q[low] - factor * below_p[low]),
        )

    return divergences


def _epsilon(divergence: Callable[[float], float], delta: float) -> float:
    low, high = 0.0, 30.0
    while high - low > 1e-6:
        middle = 0.5 * (low + high)
        low, high = (middle, high) if divergence(middle) > delta else (low, middle)
    return high


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
    bet = 0.3 / (ImportanceSampler(of, 1).largest_term(6.0) - candidate.largest_divergence)
    gain = math.log1p(bet * candidate.largest_divergence)
    enough = math.ceil(-math.log(candidate.failure_probability) / gain)
    plain = dataclasses.replace(candidate, order=1, bet=bet, num_samples=enough)
    assert certificates.is_proved(of, dataclasses.replace(plain, num_samples=2 * enough))
    assert not certificates.is_proved(of, dataclasses.replace(plain, num_samples=enough // 2))
    # Bets that could lose more than there is are no bets.
    assert not certificates.is_proved(of, dataclasses.replace(plain, bet=1.1))
    assert not certificates.is_proved(of, dataclasses.replace(plain, thresholds=(0.0, -1.0)))


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
        tail = certificates.lower_tail(low_count, high_count, samples, thresholds, failure)
        return tail.divergence(epsilon)

    beta, tested = 0.01 * _DELTA / (4 * 16), 0.99 * _DELTA
    assert candidate.failure_probability == pytest.approx(beta)
    assert candidate.largest_divergence == pytest.approx(tested)
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
    of = DominatingPair(np.ones((4, 1)), 1.0, _MinSeparationRounds(0.1, 1))
    candidate = _candidate_of(of, 2.0, 1e-4, max_samples=2**14)
    assert candidate.num_samples
    needed = -math.log(0.01 * 1e-4 / (4 * 16))
    for factor, is_proved in ((1.0 + 1e-9, True), (1.0 - 1e-9, False), (math.nan, False)):
        grown = [0.25 * factor * needed, 0.75 * factor * needed]
        monkeypatch.setattr(ImportanceSampler, "batches", lambda *unused, grown=grown: grown)
        assert certificates._p_from_q_is_small(of, candidate, None) == is_proved


def test_a_test_draws_no_more_than_its_wealth_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wealth that was ever large enough proves (Ville): no later batch is drawn."""
    of = DominatingPair(np.ones((4, 1)), 1.0, _MinSeparationRounds(0.1, 1))
    candidate = _candidate_of(of, 2.0, 1e-4, max_samples=2**14)
    needed, drawn = -math.log(candidate.failure_probability), []

    def batches(*unused: Any) -> Iterator[float]:
        for grown in (0.6 * needed, 0.5 * needed, -needed):
            drawn.append(grown)
            yield grown

    monkeypatch.setattr(ImportanceSampler, "batches", batches)
    assert certificates._p_from_q_is_small(of, candidate, None)
    assert len(drawn) == 2


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
    upper = certificates._upper_probability(count, samples, failure)
    lower = certificates._lower_probability(count, samples, failure)
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
    tail = certificates._LowerTail(threshold, (threshold - mean) / width, 1.0 / width)
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


# The check of a run's data


def _run(draws: draws_of_clients.SecretRounds, num_bands: int, sigma: float) -> SampledRun:
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
    pair = dominating_pairs.dominating_pair(run)
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
        (_TRUE, replace(_RUN, columns=StrategyColumns(entries, norm=2.0)), _DELTA),
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
    part = run.together.largest_part
    matrix = np.array([[0.7 ** (i - j) if i >= j else 0.0 for j in range(40)] for i in range(40)])
    sums = [np.linalg.norm(matrix[:, bin_of::10].sum(axis=1)) for bin_of in range(10)]
    assert part == pytest.approx(max(sums) / np.linalg.norm(matrix[:, 0]), rel=1e-8)
    asked = []

    def delta_left(*numbers: float) -> float:
        asked.append(numbers)
        return 0.0

    certificates._proves.cache_clear()
    monkeypatch.setattr(gaussian, "delta_left", delta_left)
    assert not check_certificate(certificate, run, _DELTA, 2**30)
    assert asked == [(_DELTA, run.sigma / part, 2**30)]
    assert _RUN.together.largest_part == 1.0


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
    ("changes", "error"),
    [
        ({"epsilon": 1}, TypeError),
        ({"thresholds": [-1.0, 0.0]}, TypeError),
        ({"seed": True}, TypeError),
        ({"epsilon": -0.1}, ValueError),
        ({"delta": 0.0}, ValueError),
        ({"bet": math.nan}, ValueError),
        ({"thresholds": (-math.inf, 0.0)}, ValueError),
        ({"epsilon": math.inf}, ValueError),
        *(({name: -1}, ValueError) for name in ("attempt", "order", "num_samples", "seed")),
        ({"num_untilted": -1}, ValueError),
    ],
)
def test_certificates_have_numbers_in_their_ranges(
    changes: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error, match="certificate"):
        dataclasses.replace(_TRUE, **changes)
