"""Random allocation: losses of a cycle against integrals, closed forms and simulations."""

import functools
import itertools
import math

import numpy as np
import pytest
import scipy.special
import scipy.stats
from dp_accounting.pld import privacy_loss_distribution
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType

from mf_aggregators.participation import (
    BallsInBins,
    RandomAllocation,
    random_allocation,
    sampling_from_dict,
)
from mf_aggregators.participation.poisson import SampledGaussianLoss

_EPSILONS = np.array([0.0, 0.3, 1.0, 2.5])


def _losses(
    sigma: float, rounds: int, taking_place: int | None = None
) -> privacy_loss_distribution.PrivacyLossDistribution:
    step = random_allocation.step_of_grid(sigma, rounds)
    return random_allocation.losses_of_cycle(sigma, rounds, taking_place or rounds, step)


def _deltas(
    losses: privacy_loss_distribution.PrivacyLossDistribution,
) -> tuple[np.ndarray, np.ndarray]:
    """Of P from Q and of Q from P."""
    return (
        np.array([losses._pmf_remove.get_delta_for_epsilon(float(e)) for e in _EPSILONS]),
        np.array([losses._pmf_add.get_delta_for_epsilon(float(e)) for e in _EPSILONS]),
    )


def _simulated(
    sets: list[tuple[int, ...]], num_rounds: int, sigma: float, samples: int = 200_000
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Means and standard errors of both divergences, where the client is in a random set."""
    rng = np.random.default_rng(5)
    means = np.zeros((len(sets), num_rounds))
    for index, each in enumerate(sets):
        means[index, list(each)] = 1.0
    noise = sigma * rng.normal(size=(samples, num_rounds))
    found, errors = [], []
    for with_client in (True, False):
        outputs = noise + means[rng.integers(len(sets), size=samples)] if with_client else noise
        logs = (outputs @ means.T - 0.5 * np.sum(means, axis=1)) / sigma**2
        loss = scipy.special.logsumexp(logs, axis=1) - math.log(len(sets))
        loss = loss if with_client else -loss
        values = np.maximum(-np.expm1(np.minimum(_EPSILONS[:, None] - loss, 0.0)), 0.0)
        found.append(values.mean(axis=1))
        errors.append(values.std(axis=1) / math.sqrt(samples) + 1e-9)
    return found, errors


@pytest.mark.parametrize("sigma", [0.4, 1.0, 3.0])
def test_one_round_is_a_gaussian_mechanism(sigma: float) -> None:
    exact = scipy.stats.norm.cdf(0.5 / sigma - _EPSILONS * sigma)
    exact -= np.exp(_EPSILONS) * scipy.stats.norm.cdf(-0.5 / sigma - _EPSILONS * sigma)
    for found in _deltas(_losses(sigma, 1)):
        assert np.all(found >= exact * (1.0 - 1e-12))
        np.testing.assert_allclose(found, exact, rtol=1e-3, atol=1e-12)


@pytest.mark.parametrize("sigma", [0.5, 1.0, 2.0])
def test_one_of_two_rounds_is_an_integral_over_both_outputs(sigma: float) -> None:
    grid = np.linspace(-9.0 * sigma, 1.0 + 9.0 * sigma, 2001)
    step = grid[1] - grid[0]
    without = scipy.stats.norm.pdf(grid, 0.0, sigma)
    taking_part = scipy.stats.norm.pdf(grid, 1.0, sigma)
    q = np.outer(without, without)
    p = 0.5 * (np.outer(taking_part, without) + np.outer(without, taking_part))
    found = _deltas(_losses(sigma, 2))
    for deltas, (upper, lower) in zip(found, ((p, q), (q, p)), strict=True):
        exact = np.array(
            [step**2 * np.sum(np.maximum(upper - math.exp(e) * lower, 0.0)) for e in _EPSILONS]
        )
        assert np.all(deltas >= exact - 1e-6)
        np.testing.assert_allclose(deltas, exact, rtol=1e-3, atol=2e-6)


@pytest.mark.parametrize(("sigma", "rounds"), [(0.6, 4), (1.2, 10)])
def test_the_first_round_alone_is_a_poisson_sample(sigma: float, rounds: int) -> None:
    found = _deltas(_losses(sigma, rounds, 1))
    for deltas, adjacency in zip(found, (AdjacencyType.REMOVE, AdjacencyType.ADD), strict=True):
        exact = SampledGaussianLoss(
            sigma, sensitivity=1.0, sampling_prob=1.0 / rounds, adjacency_type=adjacency
        ).get_delta_for_epsilon(_EPSILONS)
        assert np.all(deltas >= exact - 1e-14)
        np.testing.assert_allclose(deltas, exact, rtol=2e-3, atol=1e-12)


@pytest.mark.parametrize(
    ("sigma", "rounds", "taking_place"), [(0.5, 7, 7), (0.8, 20, 20), (0.7, 9, 5)]
)
def test_simulations_agree(sigma: float, rounds: int, taking_place: int) -> None:
    """With five standard errors: of 24 means none is farther off but with probability 2e-5."""
    sets: list[tuple[int, ...]] = [(i,) for i in range(taking_place)]
    sets += [()] * (rounds - taking_place)
    found = _deltas(_losses(sigma, rounds, taking_place))
    simulated, errors = _simulated(sets, taking_place, sigma)
    for deltas, means, error in zip(found, simulated, errors, strict=True):
        assert np.all(np.abs(deltas - means) <= 5.0 * error + 1e-3 * means)


def test_cycles_are_independent() -> None:
    """Two whole cycles of three rounds and a third one of which two rounds take place."""
    sigma = 0.9
    scheme = RandomAllocation(8, 1, 30, 10)
    assert scheme.rounds_of_cycle == 3
    assert scheme.most_participations() == 3
    sets = [
        tuple(place + 3 * cycle for cycle, place in enumerate(places) if place + 3 * cycle < 8)
        for places in itertools.product(range(3), repeat=3)
    ]
    found = _deltas(scheme._composed_loss(sigma, 0.02))
    simulated, errors = _simulated(sets, 8, sigma)
    for deltas, means, error in zip(found, simulated, errors, strict=True):
        assert np.all(np.abs(deltas - means) <= 5.0 * error + 2e-3 * means)


@pytest.mark.parametrize(("chosen", "rounds", "sigma"), [(2, 4, 0.7), (2, 5, 1.0), (3, 6, 0.8)])
def test_several_of_many_rounds_are_at_most_as_many_cycles(
    chosen: int, rounds: int, sigma: float
) -> None:
    """All subsets of so many rounds, against cycles of floor(t / k) and ceil(t / k) rounds."""
    sizes = [rounds // chosen + (index < rounds % chosen) for index in range(chosen)]
    step = random_allocation.step_of_grid(sigma, max(sizes))
    parts = [random_allocation.losses_of_cycle(sigma, size, size, step) for size in sizes]
    found = _deltas(functools.reduce(lambda one, other: one.compose(other), parts))
    sets = list(itertools.combinations(range(rounds), chosen))
    simulated, errors = _simulated(sets, rounds, sigma)
    for deltas, means, error in zip(found, simulated, errors, strict=True):
        assert np.all(means - 5.0 * error <= deltas)
    # It is not far from the truth.
    assert found[0][1] <= 1.35 * simulated[0][1]


@pytest.mark.parametrize(("sigma", "rounds"), [(0.5, 30), (1.0, 300), (4.0, 3)])
def test_the_losses_are_those_of_a_pair(sigma: float, rounds: int) -> None:
    losses = _losses(sigma, rounds)
    for pmf in (losses._pmf_remove, losses._pmf_add):
        assert np.all(pmf._probs >= 0.0)
        assert np.sum(pmf._probs) + pmf._infinity_mass == pytest.approx(1.0, abs=2e-11)
        # Where nothing is lost, floats err by less than what is charged for them.
        assert abs(np.sum(pmf._probs) - 1.0) <= 1e-14 * rounds + 1e-14


def test_it_takes_less_than_a_certificate_by_simulation() -> None:
    """One round of 12 is balls in 12 bins, without a matrix."""
    bins = BallsInBins(12, 1, 120, 10, 12).epsilon(0.7, 1e-5)
    found = RandomAllocation(12, 1, 120, 10).epsilon(0.7, 1e-5)
    assert 0.9 * bins <= found <= bins


# By jax_privacy 2.0's experimental.monte_carlo, for BallsInBinsSampling(iterations=t,
# cycle_length=t) and c_col [1]: get_privacy_loss_sample(strategy, sigma, np.ones(1), rng, positive,
# 20_000) with the seeds 1 (positive) and 2, the losses of k cycles added up. Sigma, t, k, an
# epsilon and the means of max(0, 1 - e^(epsilon - loss)) at it in both directions, with their
# standard errors; and the least epsilon for which delta_from_epsilon_and_samples is at most
# get_base_delta(20_000, 0.01).
_OF_PEER = [
    ((1.0, 25, 1), 0.3982330270096502, ((1.033e-2, 3.3e-4), (5.775e-3, 2.1e-4)), 0.4532),
    ((0.7, 10, 2), 2.513963720672821, ((1.006e-2, 5.1e-4), (5.880e-4, 9.1e-5)), 2.7135),
]


@pytest.mark.parametrize(("sizes", "epsilon", "means", "certified"), _OF_PEER)
def test_jax_privacy_samples_have_the_same_delta_and_certify_more(
    sizes: tuple[float, int, int],
    epsilon: float,
    means: tuple[tuple[float, float], tuple[float, float]],
    certified: float,
) -> None:
    sigma, rounds, cycles = sizes
    losses = _losses(sigma, rounds).self_compose(cycles)
    for pmf, (mean, error) in zip((losses._pmf_remove, losses._pmf_add), means, strict=True):
        assert abs(float(pmf.get_delta_for_epsilon(epsilon)) - mean) <= 3.0 * error
    scheme = RandomAllocation(rounds * cycles, 1, 10 * rounds, 10)
    assert scheme.epsilon(sigma, 1e-2) < 0.95 * certified


def test_noise_multipliers_are_those_of_their_epsilons() -> None:
    scheme = RandomAllocation(24, 2, 1200, 100)
    assert scheme.rounds_of_cycle == 6
    sigma = scheme.noise_multiplier(3.0, 1e-5)
    assert 2.998 <= scheme.epsilon(sigma, 1e-5) <= 3.0
    # Never above the guarantee of who knows all draws.
    assert scheme.epsilon(50.0, 1e-5) <= scheme.epsilon(20.0, 1e-5) <= 0.3


def test_every_client_is_once_in_every_cycle() -> None:
    scheme = RandomAllocation(48, 2, 90, 11)
    assert scheme.rounds_of_cycle == 4
    sampler = scheme.sampler(7)
    cohorts = [sampler.draw(index) for index in range(48)]
    for group, cycle in itertools.product(range(2), range(6)):
        rounds = [group + 2 * (4 * cycle + place) for place in range(4)]
        clients = np.concatenate([cohorts[index] for index in rounds])
        expected = np.sort(sampler.group_of_round(group))
        np.testing.assert_array_equal(np.sort(clients), expected)
    # Places in a cycle, and pairs of places in adjacent ones, are as likely as each other: two
    # chi-square tests with 1e-6 of false alarms.
    assert scheme.group_size == 44
    places = np.zeros((90, 6), np.int64)
    for index, cohort in enumerate(cohorts):
        cycle, place = divmod(index // 2, 4)
        places[cohort, cycle] = place
    places = places[np.concatenate([sampler.group_of_round(group) for group in range(2)])]
    assert scipy.stats.chisquare(np.bincount(places.ravel(), minlength=4)).pvalue > 1e-6
    pairs = 4 * places[:, :-1] + places[:, 1:]
    assert scipy.stats.chisquare(np.bincount(pairs.ravel(), minlength=16)).pvalue > 1e-6
    assert scheme.deviation(90, cohorts) is None
    assert sampler.deviation(90, cohorts) is None
    assert scheme.deviation(90, cohorts[:29]) is None


def test_ledgers_that_no_draw_gives_deviate() -> None:
    scheme = RandomAllocation(8, 1, 12, 3)
    assert scheme.rounds_of_cycle == 4
    cohorts = [np.arange(12)[i % 4 :: 4] for i in range(8)]
    assert scheme.deviation(12, cohorts) is None
    twice = [cohorts[0], np.array([0, 1, 5, 9]), *cohorts[2:]]
    found = scheme.deviation(12, twice)
    assert found is not None
    assert "twice in one cycle" in found
    absent = [cohorts[0][:2], *cohorts[1:]]
    found = scheme.deviation(12, absent)
    assert found is not None
    assert "no round of a whole cycle" in found
    assert scheme.deviation(12, absent[:3]) is None


def test_schemes_describe_themselves() -> None:
    scheme = RandomAllocation(10, 2, 100, 10)
    assert sampling_from_dict(scheme.to_dict()) == scheme
    assert scheme.of_first(4) == RandomAllocation(4, 2, 100, 10)
    assert scheme.label == "1 of 5 rounds"
    with pytest.raises(ValueError, match="too small"):
        RandomAllocation(10, 2, 100, 60)
