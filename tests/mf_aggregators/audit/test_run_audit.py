"""Audits of one run: bounds that hold, on simulated runs that are intact and that are broken."""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import scipy.special
import scipy.stats

from benchmarks import canary_power
from mf_aggregators.audit import one_run, run_audit, statistics
from mf_aggregators.audit.run_audit import Canaries
from mf_aggregators.factorizations import banded
from mf_aggregators.mechanism import Mechanism
from mf_aggregators.participation import MinSeparation, PoissonSampling
from tests.console_commands import ROOT
from tests.refusals import refuses

# A statistical test fails on correct code with at most this probability.
_FALSE_ALARM = 1e-6


@pytest.fixture(scope="module")
def mechanism() -> Mechanism:
    """That of the quick start."""
    return canary_power.mechanism()


def test_an_intact_run_is_not_refuted_and_both_bounds_reach_half_of_epsilon_8(
    mechanism: Mechanism,
) -> None:
    found = canary_power.simulated(mechanism)
    assert not found.is_refuted
    assert found.noise.p_value > 0.01
    stated = run_audit.RunAudit.of_statement(1000, found)
    bound = Decimal(str(stated["epsilon_lower_bound"]))
    assert 6.0 < bound <= Decimal(found.epsilon_lower_bound) < 8.0
    assert 4.0 < float(str(stated["epsilon_lower_bound_any_mechanism"])) < 8.0
    assert found.included == pytest.approx(500, abs=100)


@pytest.mark.parametrize(
    ("broken", "by_noise", "by_canaries"),
    [
        ({"noise": 0.5}, True, True),
        ({"noise": 0.9}, True, None),
        ({"twice": (50, 120)}, True, False),
        ({"separation": 10}, False, True),
    ],
    ids=["noise-halved", "noise-a-tenth-less", "a-row-twice", "timers-ignored"],
)
def test_a_broken_run_is_refuted(
    mechanism: Mechanism, broken: dict[str, Any], by_noise: bool, by_canaries: bool | None
) -> None:
    found = canary_power.simulated(mechanism, **broken)
    assert found.is_refuted
    assert (found.noise.p_value < run_audit.FALSE_ALARM_RATE) == by_noise
    if by_canaries is not None:
        assert (found.mu_lower_bound > found.mu) == by_canaries
    if "twice" in broken:
        assert found.noise.weakest_round == 121
        assert found.noise.share < 0.3


@pytest.mark.long
def test_the_table_of_the_documents_has_the_refuted_runs(mechanism: Mechanism) -> None:
    """Two numbers of its first row, by all of their 40 runs."""
    text = (ROOT / "docs" / "audit.md").read_text(encoding="utf-8")
    separations, refuted = (
        [int(each) for each in re.findall(r"\d+", row)]
        for row in re.findall(r"^\| (?:canaries|120) \|(.*)\|$", text, re.M)
    )
    stated = dict(zip(separations, refuted, strict=True))
    half = 0.5 * run_audit.FALSE_ALARM_RATE
    for separation in (24, 10):
        runs = [
            canary_power.simulated(mechanism, seed=seed, canaries=120, separation=separation)
            for seed in range(40)
        ]
        mus = [run_audit.mu_of_right_guesses(each.right, 120, half) for each in runs]
        assert sum(mu > runs[0].mu for mu in mus) == stated[separation]


def test_what_a_perfect_attack_shows_is_printed() -> None:
    text = " ".join((ROOT / "docs" / "audit.md").read_text(encoding="utf-8").split())
    found = []
    for canaries in (120, 1000):
        mu = run_audit.mu_of_right_guesses(canaries, canaries, run_audit.MISS_PROBABILITY)
        epsilon = statistics.epsilon_of_mu(mu, canary_power.DELTA)
        found.append(f"{math.floor(10.0 * epsilon) / 10.0:.1f}")
    assert (
        f"120 canaries show an epsilon of {found[0]}, and 1,000 canaries one of {found[1]}" in text
    )


@pytest.mark.parametrize("mu", [0.5, 1.84, 3.0])
def test_bounds_are_above_the_truth_no_more_often_than_they_say(mu: float) -> None:
    """Of 600 audits of 100 canaries with scores of exactly mu, each bound misses 5 % at most."""
    trials, canaries = 600, 100
    generator = np.random.default_rng(round(100 * mu))
    is_in = generator.integers(0, 2, size=(trials, canaries)).astype(bool)
    certainty = mu * (generator.normal(size=is_in.shape) + mu * is_in - 0.5 * mu)
    is_right = (certainty > 0.0) == is_in
    most = scipy.stats.binom.isf(_FALSE_ALARM, trials, run_audit.MISS_PROBABILITY)
    bound = {
        right: run_audit.mu_of_right_guesses(right, canaries, run_audit.MISS_PROBABILITY)
        for right in range(canaries + 1)
    }
    missed = [bound[right] > mu for right in np.sum(is_right, axis=1)]
    # They are sharp: a bound for twice the probability would miss too often to pass.
    assert 0.01 * trials < sum(missed) <= most
    guesses = 20
    surest = np.argsort(-np.abs(certainty), axis=1)[:, :guesses]
    found = np.sum(np.take_along_axis(is_right, surest, axis=1), axis=1)
    of_any = {
        right: run_audit._mu_of_any_mechanism(right, guesses, canaries, run_audit.MISS_PROBABILITY)
        for right in np.unique(found)
    }
    assert sum(of_any[right] > mu for right in found) <= most


def test_all_guesses_right_and_none() -> None:
    """With n of n right, the bound is where Phi(mu / 2)^n is the probability of a miss."""
    for guesses in (1, 40, 1000):
        bound = run_audit.mu_of_right_guesses(guesses, guesses, 0.05)
        expected = 2.0 * scipy.special.ndtri(0.05 ** (1.0 / guesses))
        assert bound == pytest.approx(max(0.0, expected))
    assert run_audit.mu_of_right_guesses(20, 40, 0.05) == 0.0


def test_one_canary_of_any_mechanism_is_guessed_with_the_probability_of_one_gaussian() -> None:
    for probability in (0.6, 0.95):
        bound = run_audit._mu_of_any_mechanism(1, 1, 1, probability)
        assert bound == pytest.approx(2.0 * scipy.special.ndtri(probability), abs=1e-6)


@pytest.mark.parametrize("guesses", [1, 5, 8])
def test_the_bound_of_any_mechanism_holds_for_a_release_that_all_canaries_share(
    guesses: int,
) -> None:
    """Enumerated: a sum of all coins with noise, of which all guesses are the same.

    The right guesses of such a release are far from independent. The probability that the bound is
    above mu is computed exactly, for each probability of a miss that is asked for.
    """
    canaries, mu = 8, 1.0
    probability = np.zeros(guesses + 1)
    for coins in itertools.product((0, 1), repeat=canaries):
        # All are guessed to be in where the noisy sum is above its mean.
        all_in = scipy.special.ndtr(mu * (sum(coins) - 0.5 * canaries))
        right = sum(coins[:guesses])
        probability[right] += all_in / 2**canaries
        probability[guesses - right] += (1.0 - all_in) / 2**canaries
    assert np.sum(probability) == pytest.approx(1.0)
    for right in range(guesses + 1):
        reached = float(np.sum(probability[right:]))
        # A miss probability just below what this mechanism reaches must not refute it.
        assert (
            run_audit._mu_of_any_mechanism(right, guesses, canaries, 0.999 * reached) <= mu + 1e-9
        )


def test_the_bound_of_any_mechanism_is_never_above_that_of_independent_noise() -> None:
    """Independent releases are one of the mechanisms that it covers."""
    for right in (5, 15, 19, 20):
        independent = run_audit.mu_of_right_guesses(right, 20, 0.05)
        assert run_audit._mu_of_any_mechanism(right, 20, 20, 0.05) <= independent + 1e-9


def test_the_number_of_guesses_is_chosen_for_the_claim() -> None:
    """More certain guesses are worth abstaining for, and few canaries leave few to guess."""
    for canaries in (10, 1000):
        guesses = run_audit._choose_guesses(canaries, 1.84, 0.05)
        assert 1 <= guesses <= canaries
        right = math.floor(0.97 * guesses)
        chosen = run_audit._mu_of_any_mechanism(right, guesses, canaries, 0.05)
        everyone = math.floor(scipy.special.ndtr(0.92) * canaries)
        assert chosen >= run_audit._mu_of_any_mechanism(everyone, canaries, canaries, 0.05)


def test_fresh_noise_has_the_p_values_that_it_says_whatever_clients_send() -> None:
    """Clients that undo all noise of earlier rounds do not make fresh noise look weak."""
    num_rounds, directions, trials = 3, 40, 400
    generator = np.random.default_rng(3)
    alarms = {0.0: 0, -3.0: 0}
    for feedback in alarms:
        for _ in range(trials):
            released = np.zeros((num_rounds, directions))
            for i in range(num_rounds):
                released[i] = generator.normal(size=directions) + feedback * np.sum(
                    released[:i], axis=0
                )
            alarms[feedback] += run_audit._fresh_noise(released, np.eye(num_rounds)).p_value < 0.05
    for count in alarms.values():
        assert 0.02 * trials < count <= scipy.stats.binom.isf(_FALSE_ALARM, trials, 0.05)
    with refuses("directions"):
        run_audit._fresh_noise(np.ones((3, 3)), np.eye(3))


def test_scores_are_the_likelihood_ratio_of_the_noise() -> None:
    """Compared with the closed form for a known covariance."""
    generator = np.random.default_rng(5)
    mixing = np.array([[1.0, 0.0, 0.0], [0.5, 2.0, 0.0], [-1.0, 0.3, 0.5]])
    projected = mixing @ generator.normal(size=(3, 200_002))
    takes_part = np.array([[True, False], [False, False], [True, False]])
    statistic, powers = run_audit._scores(projected, takes_part, 0.7)
    added = 0.7 * np.array([1.0, 0.0, 1.0])
    precision = np.linalg.inv(mixing @ mixing.T)
    power = math.sqrt(added @ precision @ added)
    assert powers == pytest.approx([power, 0.0], rel=0.02)
    assert statistic[0] == pytest.approx(added @ precision @ projected[:, 0] / power, abs=0.05)
    assert statistic[1] == 0.0
    projected[0, 0] = np.nan
    with refuses("finite"):
        run_audit._scores(projected, takes_part, 0.7)


def test_blocks_have_no_coordinate_in_common_and_updates_the_norm() -> None:
    canaries = Canaries.drawn(7, 30, 10_000, 50)
    used = canaries.coordinates.ravel()
    assert np.unique(used).size == used.size
    assert canaries.signs.shape == canaries.coordinates.shape
    for canary in (0, 29):
        update = np.zeros(10_000)
        coordinates, entries = canaries.update(canary, 2.5)
        update[coordinates] = entries
        assert np.linalg.norm(update) == pytest.approx(2.5)
        along = canaries.project(update)
        assert along[canary] == pytest.approx(2.5)
        assert np.count_nonzero(along) == 1


def test_coins_are_fair_and_follow_from_the_seed_alone() -> None:
    drawn = [Canaries.drawn(seed, 2000, 20_000, 10) for seed in (1, 1, 2)]
    np.testing.assert_array_equal(drawn[0].is_included, drawn[1].is_included)
    np.testing.assert_array_equal(drawn[0].coordinates, drawn[1].coordinates)
    assert np.any(drawn[0].is_included != drawn[2].is_included)
    low, high = scipy.stats.binom.interval(1.0 - _FALSE_ALARM, 2000, 0.5)
    assert low <= np.sum(drawn[0].is_included) <= high
    # A larger model has the same coins.
    larger = Canaries.drawn(1, 2000, 40_000, 10)
    np.testing.assert_array_equal(larger.is_included, drawn[0].is_included)


def test_models_that_are_too_small_are_refused() -> None:
    assert Canaries.drawn(0, 100, 150, 10).coordinates.shape == (150, 1)
    with refuses("canaries", "parameters", "150", "149"):
        Canaries.drawn(0, 100, 149, 10)
    with refuses("canaries"):
        Canaries.drawn(0, 0, 149, 10)


_OWN_SIZE, _OWN_ROUNDS = 600, 6
_TIMERS = MinSeparation(2)
_OWN = Mechanism(banded(_OWN_ROUNDS, 2), _TIMERS, 0.8)
_SIZES: dict[str, Any] = {
    "num_parameters": _OWN_SIZE,
    "clip_norm": 2.0,
    "clients_per_round": 20,
    "canaries": 60,
}
_CanariesOf = Callable[[int], list[np.ndarray]]


def _own_loop(
    canaries_of: _CanariesOf, seed: int, *, noise: float = 1.0, clip: float = 2.0, row: int = -1
) -> Iterator[np.ndarray]:
    """A stack without this library: clipped float updates, a sum, C^-1 Z, and a mean of 20.

    Broken by less noise, by a larger clip norm, or by a row of Z that is the first one again.
    """
    generator = np.random.default_rng(seed)
    rows = generator.normal(size=(_OWN_ROUNDS, _OWN_SIZE))
    rows[row] = rows[0] if row >= 0 else rows[row]
    matrix = _OWN.factorization.strategy_matrix()
    # Two participations two rounds apart have orthogonal columns: their norms add up in squares.
    largest = max(sum(np.sum(matrix[:, i::2] ** 2, axis=0)) for i in (0, 1))
    correlated = np.linalg.solve(matrix, rows) * (0.8 * 2.0 * math.sqrt(largest) * noise)
    for i in range(_OWN_ROUNDS):
        updates = [0.05 * generator.normal(size=_OWN_SIZE) for _ in range(20)] + canaries_of(i)
        norms = [float(np.linalg.norm(each)) for each in updates]
        clipped = [each * min(1.0, clip / norm) for each, norm in zip(updates, norms, strict=True)]
        yield (np.sum(clipped, axis=0) + correlated[i]) / 20.0


def _own_audit(
    seed: int, rate: float = 1e-4, canaries: int = 60, **broken: Any
) -> run_audit.RunAudit:
    options = _SIZES | {"canaries": canaries, "false_alarm_rate": rate, "seed": seed}
    return one_run(lambda canaries_of: _own_loop(canaries_of, seed, **broken), _OWN, **options)


def test_intact_stacks_are_refuted_no_more_often_than_the_false_alarm_rate() -> None:
    """Of 120 runs at a rate of a fifth; bounds are above epsilon in 5 % of them at most."""
    found = [_own_audit(seed, 0.2) for seed in range(120)]
    assert sum(each.is_refuted for each in found) <= scipy.stats.binom.isf(_FALSE_ALARM, 120, 0.2)
    above = sum(each.epsilon_lower_bound > each.epsilon for each in found)
    assert above <= scipy.stats.binom.isf(_FALSE_ALARM, 120, run_audit.MISS_PROBABILITY)
    assert found[0].epsilon == _OWN.guarantee(1e-6).epsilon
    # The attack is no empty one.
    assert np.mean([each.epsilon_lower_bound for each in found]) > 0.3 * found[0].epsilon


@pytest.mark.parametrize(
    "broken",
    [{"noise": 0.5}, {"row": 3}, {"clip": 20.0, "canaries": 300}],
    ids=["half-noise", "row-twice", "clip"],
)
def test_broken_stacks_are_refuted(broken: dict[str, Any]) -> None:
    assert all(_own_audit(seed, **broken).is_refuted for seed in range(5))


def test_a_run_that_ended_early_is_audited() -> None:
    def loop(canaries_of: _CanariesOf) -> Iterable[np.ndarray]:
        return itertools.islice(_own_loop(canaries_of, 1, noise=0.5), 4)

    assert one_run(loop, _OWN, **_SIZES).is_refuted


@pytest.mark.parametrize(
    ("loop", "words"),
    [
        (lambda canaries_of: [], ["no round"]),
        (lambda canaries_of: [np.zeros(_OWN_SIZE)], ["round 0", "without asking"]),
        (lambda canaries_of: [canaries_of(0) and np.zeros(7)], ["(7,)", f"({_OWN_SIZE},)"]),
        (lambda canaries_of: [canaries_of(_OWN_ROUNDS)], ["0 to 5", "6"]),
    ],
)
def test_loops_that_no_audit_can_judge_are_refused(loop: Any, words: list[str]) -> None:
    with refuses(*words):
        one_run(loop, _OWN, **_SIZES)


def test_claims_that_no_run_can_refute_are_refused() -> None:
    drawn = PoissonSampling(_OWN_ROUNDS, 2, 200, 20)
    with refuses("sampling scheme", "audit_drawn"):
        one_run(lambda _: [], dataclasses.replace(_OWN, participation=drawn), **_SIZES)
    with refuses("5 canaries", "0.8"):
        one_run(lambda _: [], _OWN, **_SIZES | {"canaries": 5})
    with refuses("noise_multiplier"):
        one_run(lambda _: [], dataclasses.replace(_OWN, noise_multiplier=0.0), **_SIZES)
    with pytest.raises(TypeError, match="Mechanism"):
        one_run(lambda _: [], _OWN.factorization, **_SIZES)  # type: ignore[arg-type]
