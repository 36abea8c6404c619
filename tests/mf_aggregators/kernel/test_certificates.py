"""Candidates that are true, candidates that are false, and what their tests need."""

import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import scipy.stats

from mf_aggregators.kernel import certificates
from mf_aggregators.kernel.arrays import FloatArray
from mf_aggregators.kernel.certificates import Certificate
from mf_aggregators.kernel.dominating_pairs import (
    BallsInBinsRounds,
    DominatingPair,
    MinSeparationRounds,
    RoundsDistribution,
)
from mf_aggregators.kernel.importance_sampling import ImportanceSampler, SamplerOfQ
from mf_aggregators.participation import sampling_scheme
from mf_aggregators.participation.monte_carlo import search
from tests.mf_aggregators.participation.monte_carlo import participation_patterns
from tests.mf_aggregators.participation.monte_carlo.participation_patterns import dominating_pair
from tests.refusals import refuses

_DELTA = 1e-3


def _candidate_of(
    pair: DominatingPair, epsilon: float, delta: float, *, max_samples: int
) -> Certificate:
    """The first candidate of a search that ended at an epsilon: it is likely to be proved."""
    tuning = search._TuningSamples(
        pair, search._best_sampler(pair, epsilon, delta), delta, 0, max_samples
    )
    tuning.grow_for(epsilon)
    return search._candidate_by(tuning, pair, epsilon, delta, 0, 0, max_samples)


def _divergences(
    distribution: RoundsDistribution, matrix: np.ndarray, sigma: float
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
    q = np.prod(scipy.stats.norm.pdf(points, 0.0, sigma), axis=0) * (axis[1] - axis[0]) ** 2
    p = q * np.exp(patterns.log_ratios(points))

    def divergences(epsilon: float) -> tuple[float, float]:
        factor = math.exp(epsilon)
        return (
            float(np.sum(np.maximum(p - factor * q, 0.0))),
            float(np.sum(np.maximum(q - factor * p, 0.0))),
        )

    return divergences


def _epsilon(divergence: Callable[[float], float], delta: float) -> float:
    low, high = 0.0, 30.0
    while high - low > 1e-6:
        middle = 0.5 * (low + high)
        low, high = (middle, high) if divergence(middle) > delta else (low, middle)
    return high


_CASES: list[tuple[RoundsDistribution, list[list[float]], float]] = [
    (MinSeparationRounds(0.2, 2), [[0.8, 0.0], [0.6, 1.0]], 0.8),
    (MinSeparationRounds(0.1, 1, is_stationary=False), [[1.0, 0.0], [0.0, 1.0]], 1.5),
    (BallsInBinsRounds(3), [[0.8, 0.0], [0.6, 1.0]], 0.7),
    # Participations that share rows, with entries of both signs.
    (
        BallsInBinsRounds(2),
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


@pytest.mark.parametrize(("distribution", "matrix", "sigma"), _CASES)
def test_divergences_are_bounded_closely(
    distribution: RoundsDistribution, matrix: list[list[float]], sigma: float
) -> None:
    """Against the integral of that of P from Q; the other one is another number."""
    exact = _divergences(distribution, np.array(matrix), sigma)
    of = dominating_pair(distribution, np.array(matrix), sigma)
    epsilons = (0.0, 0.4, 1.0, 2.0)
    found = certificates.divergences(of, epsilons, num_samples=2**15, failure=1e-9, seed=3)
    assert [epsilon for epsilon, _ in found] == list(epsilons)
    for epsilon, bound in found:
        forward, backward = exact(epsilon)
        assert forward < bound < forward + 8.0 * math.sqrt(forward / 2**15) + 1e-3
        assert epsilon == 0.0 or backward < 0.99 * forward
    with_failure = certificates.divergences(of, epsilons, num_samples=64, failure=0.2, seed=3)
    assert all(bound > 0.2 for _, bound in with_failure)


@pytest.mark.short_cases(2)
@pytest.mark.parametrize(("distribution", "matrix", "sigma"), _CASES)
def test_what_is_proved_is_true_and_near_the_truth(
    distribution: RoundsDistribution, matrix: list[list[float]], sigma: float
) -> None:
    """Against the integrals of both divergences, for mechanisms of two rounds."""
    exact = _divergences(distribution, np.array(matrix), sigma)
    truth = _epsilon(lambda epsilon: max(exact(epsilon)), _DELTA)
    of = dominating_pair(distribution, np.array(matrix), sigma)
    candidate = search.proved(of, _DELTA, max_samples=2**15)
    assert candidate is not None
    assert truth <= candidate.epsilon <= 1.06 * truth
    # Anybody can prove it again.
    assert certificates.is_proved(of, candidate)
    assert certificates.from_dict(json.loads(json.dumps(candidate.to_dict()))) == candidate


@pytest.mark.short_cases(4)
@pytest.mark.parametrize(("distribution", "matrix", "sigma"), _CASES)
@pytest.mark.parametrize("direction", [0, 1])
def test_false_candidates_are_not_proved(
    distribution: RoundsDistribution,
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
    distribution, epsilon = MinSeparationRounds(probability, 1), 0.4
    larger, smaller = _divergences(distribution, np.eye(2), 1.0)(epsilon)
    assert larger > 2.0 * smaller
    of = dominating_pair(distribution, np.eye(2), 1.0)
    candidate = _candidate_of(of, epsilon, 1.6 * larger, max_samples=2**16)
    assert certificates.is_proved(of, candidate)
    with pytest.raises(search.SampleBudgetError):
        _candidate_of(of, epsilon, 0.9 * larger, max_samples=2**16)
    assert not certificates.is_proved(of, dataclasses.replace(candidate, delta=0.9 * larger))


def test_the_certificate_takes_its_share_of_delta() -> None:
    of = dominating_pair(*_CASES[0][:1], np.array(_CASES[0][1]), _CASES[0][2])
    candidate = _candidate_of(of, 5.0, _DELTA, max_samples=2**15)
    all_attempts = certificates.ATTEMPTS * certificates.MECHANISMS * candidate.failure_probability
    assert candidate.failure_probability > 0.0
    assert candidate.largest_divergence + all_attempts == pytest.approx(_DELTA, rel=1e-12)


def test_a_test_that_draws_too_little_proves_nothing() -> None:
    """Of order 1, whose terms are of P itself, and nearly always zero at this epsilon."""
    of = dominating_pair(*_CASES[0][:1], np.array(_CASES[0][1]), _CASES[0][2])
    candidate = _candidate_of(of, 6.0, _DELTA, max_samples=2**15)
    bet = 0.3 / (certificates.largest_term(0.0, 1, 6.0) - candidate.largest_divergence)
    gain = math.log1p(bet * candidate.largest_divergence)
    enough = math.ceil(-math.log(candidate.failure_probability) / gain)
    plain = dataclasses.replace(candidate, order=1, bet=bet, num_samples=enough)
    assert certificates.is_proved(of, dataclasses.replace(plain, num_samples=2 * enough))
    assert not certificates.is_proved(of, dataclasses.replace(plain, num_samples=enough // 2))
    # Bets that could lose more than there is are no bets.
    assert not certificates.is_proved(of, dataclasses.replace(plain, bet=1.1))
    assert not certificates.is_proved(of, dataclasses.replace(plain, thresholds=(0.0, -1.0)))


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
    of = DominatingPair(np.ones((rounds, 1)), sigma, MinSeparationRounds(probability, 1))
    candidate = search.proved(of, delta, max_samples=2**16)
    assert candidate is not None
    # The distribution is rounded up by up to 1e-4 of epsilon.
    assert exact * (1 - 1e-3) <= candidate.epsilon <= 1.04 * exact


def test_what_would_take_too_many_samples_is_refused() -> None:
    of = DominatingPair(np.ones((40, 1)), 3.0, MinSeparationRounds(0.1, 1))
    with pytest.raises(search.SampleBudgetError, match=r"it would take about .* samples") as e:
        _candidate_of(of, 1.2, 1e-7, max_samples=10_000)
    assert 10_000 < e.value.num_samples < math.inf
    with pytest.raises(search.SampleBudgetError, match="a larger epsilon") as e:
        _candidate_of(of, 0.01, 1e-5, max_samples=10_000)
    assert math.isinf(e.value.num_samples)


@pytest.mark.parametrize("order", [1, 2, 3, 5, 8])
def test_no_term_is_larger_than_the_largest(order: int) -> None:
    """Also for orders whose largest term is more than 1; it is nearly attained."""
    of = dominating_pair(MinSeparationRounds(0.4, 1), np.eye(2), 0.8)
    log_moment = ImportanceSampler(of, order).log_mgf
    for epsilon in (0.1, 1.0, 4.0):
        losses = np.linspace(epsilon - 1.0, epsilon + 30.0, 100_001)
        values = certificates.terms(losses, log_moment, order, epsilon)
        largest = certificates.largest_term(log_moment, order, epsilon)
        assert largest * (1 - 1e-4) <= np.max(values) <= largest
        assert np.all(values[losses < epsilon - 1e-6] == 0.0)


def test_nothing_is_claimed_beyond_what_is_known() -> None:
    of = DominatingPair(np.ones((4, 1)), 1.0, MinSeparationRounds(0.5, 1))
    assert search.proved(of, 1e-3, below=0.5, max_samples=2**13) is None


@pytest.mark.parametrize("share", [pytest.param(0.5, marks=pytest.mark.long), 2.0, 0.98])
def test_the_lower_tail_is_bounded_with_the_failure_probability_of_the_candidate(
    monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """What is so only half of the time is not proved, by the counts of the test."""
    low_count, high_count, samples, thresholds = 60, 400, 2**11, (-0.5, -0.2)
    counts = [np.array([low_count, high_count])]
    monkeypatch.setattr(certificates, "in_batches", lambda *unused: counts)
    of = DominatingPair(np.ones((4, 1)), 1.0, MinSeparationRounds(0.1, 1))
    candidate = Certificate(0.0, _DELTA, 0, 2, 1, 1.0, samples, thresholds, 0)

    def largest_divergence(epsilon: float, failure: float) -> float:
        tail = certificates.lower_tail(low_count, high_count, samples, thresholds, failure)
        return tail.divergence(epsilon)

    beta, tested = 0.01 * _DELTA / (4 * 16), 0.99 * _DELTA
    assert candidate.failure_probability == pytest.approx(beta)
    assert candidate.largest_divergence == pytest.approx(tested)
    epsilon = 0.5001
    while largest_divergence(epsilon, beta) > share * tested:
        epsilon += 1e-4
    # With one half in the place of beta, all three would be proved.
    assert largest_divergence(epsilon, 0.5) < 0.9 * tested
    found = certificates._q_from_p_is_small(
        of, dataclasses.replace(candidate, epsilon=epsilon), None
    )
    assert found == (share < 1.0)


def test_wealth_is_compared_with_the_failure_probability_of_the_candidate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of = DominatingPair(np.ones((4, 1)), 1.0, MinSeparationRounds(0.1, 1))
    candidate = _candidate_of(of, 2.0, 1e-4, max_samples=2**14)
    assert candidate.num_samples
    needed = -math.log(0.01 * 1e-4 / (4 * 16))
    for factor, is_proved in ((1.0 + 1e-9, True), (1.0 - 1e-9, False), (math.nan, False)):
        grown = [0.25 * factor * needed, 0.75 * factor * needed]
        monkeypatch.setattr(certificates, "in_batches", lambda *unused, grown=grown: grown)
        assert certificates._p_from_q_is_small(of, candidate, None) == is_proved


def test_a_test_draws_no_more_than_its_wealth_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wealth that was ever large enough proves (Ville): no later batch is drawn."""
    of = DominatingPair(np.ones((4, 1)), 1.0, MinSeparationRounds(0.1, 1))
    candidate = _candidate_of(of, 2.0, 1e-4, max_samples=2**14)
    needed, drawn = -math.log(candidate.failure_probability), []

    def batches(*unused: Any) -> Iterator[float]:
        for grown in (0.6 * needed, 0.5 * needed, -needed):
            drawn.append(grown)
            yield grown

    monkeypatch.setattr(certificates, "in_batches", batches)
    assert certificates._p_from_q_is_small(of, candidate, None)
    assert len(drawn) == 2


def test_nothing_is_drawn_after_the_last_batch_that_is_asked_for() -> None:
    of, drawn = DominatingPair(np.ones((4, 1)), 1.0, MinSeparationRounds(0.1, 1)), []

    def summary(losses: FloatArray) -> None:
        drawn.append(losses)
        time.sleep(1e-3)

    batches = certificates.in_batches(SamplerOfQ(of), 1, 2**20, summary)
    next(batches)
    del batches
    assert 1 <= len(drawn) < 2**10


def test_losses_that_are_not_numbers_count_against_a_candidate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of = DominatingPair(np.ones((4, 1)), 1.0, MinSeparationRounds(0.1, 1))
    candidate = Certificate(3.0, _DELTA, 0, 2, 1, 1.0, 100, (-0.5, -0.1), 0)
    counts = []

    def one_batch(*arguments: Any) -> list[Any]:
        counts.append(arguments[3](np.array([math.nan, -0.7, -0.3, 0.0])))
        return counts

    monkeypatch.setattr(certificates, "in_batches", one_batch)
    certificates._q_from_p_is_small(of, candidate, None)
    np.testing.assert_array_equal(counts[0], [2, 2])


def test_all_bounds_of_an_attacker_hold_together() -> None:
    """Each of many fails with its share of the probability that any of them does."""
    of = DominatingPair(np.ones((4, 1)), 1.5, MinSeparationRounds(0.1, 1))
    epsilons, failure = tuple(0.25 * step for step in range(41)), 1e-6
    together = certificates.divergences(of, epsilons, num_samples=512, failure=failure, seed=3)
    each = failure / len(epsilons)
    for (epsilon, bound), wanted in zip(together, epsilons, strict=True):
        assert epsilon == wanted
        ((_, alone),) = certificates.divergences(
            of, (epsilon,), num_samples=512, failure=each, seed=3
        )
        assert bound - failure == pytest.approx(alone - each, rel=1e-9)
    # Without its share, a bound would be lower by more than that.
    ((_, without),) = certificates.divergences(of, (0.0,), num_samples=512, failure=failure, seed=3)
    assert without < together[0][1] * (1.0 - 1e-3)


@pytest.mark.parametrize("loss", [-1e6, -1e3, -200.0, 1e3, 1e6])
@pytest.mark.parametrize("order", [1, 2, 8])
def test_losses_beyond_floats_have_terms(loss: float, order: int) -> None:
    """A loss below epsilon has a term of zero, however large the other factor is."""
    with np.errstate(all="raise", under="ignore"):
        (term,) = certificates.terms(np.array([loss]), 0.0, order, 1.0)
        largest = certificates.largest_term(1e6, order, 1.0)
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
    assert len({certificates.key_of(*each) for each in changes}) == len(changes)
    assert certificates.key_of(*changes[0]) == certificates.key_of(*changes[0])


@pytest.mark.parametrize(
    "description",
    [
        {},
        {"epsilon": 1.0},
        {**dataclasses.asdict(Certificate(1, 1e-5, 0, 2, 1, 1, 1, (0, 1), 0)), "thresholds": 3},
        {**dataclasses.asdict(Certificate(1, 1e-5, 0, 2, 1, 1, 1, (0, 1), 0)), "epsilon": "1"},
        {**dataclasses.asdict(Certificate(1, 1e-5, 0, 2, 1, 1, 1, (0, 1), 0)), "delta": math.nan},
        {**dataclasses.asdict(Certificate(1, 1e-5, 0, 2, 1, 1, 1, (0, 1), 0)), "num_samples": True},
        {**dataclasses.asdict(Certificate(1, 1e-5, 0, 2, 1, 1, 1, (0, 1), 0)), "order": 2.0},
    ],
)
def test_other_descriptions_are_refused(description: dict[str, object]) -> None:
    with refuses("certificate"):
        certificates.from_dict(description)
