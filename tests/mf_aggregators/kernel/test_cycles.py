"""Losses of cycles of random allocation, against integrals, closed forms and simulations."""

import functools
import itertools
import math

import numpy as np
import pytest
import scipy.special
import scipy.stats
from dp_accounting.pld import privacy_loss_distribution

from mf_aggregators.kernel import cycles
from mf_aggregators.kernel.groups import poisson_divergences
from tests.mf_aggregators import brute_force

_EPSILONS = np.array([0.0, 0.3, 1.0, 2.5])


def _losses(
    sigma: float, rounds: int, taking_place: int | None = None
) -> privacy_loss_distribution.PrivacyLossDistribution:
    step = cycles.step_of_grid(sigma, rounds)
    return cycles.losses_of_cycle(sigma, rounds, taking_place or rounds, step)


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
        exact = np.array([step**2 * brute_force.hockey_stick(upper, lower, e) for e in _EPSILONS])
        assert np.all(deltas >= exact - 1e-6)
        np.testing.assert_allclose(deltas, exact, rtol=1e-3, atol=2e-6)


@pytest.mark.parametrize(("sigma", "rounds"), [(0.6, 4), (1.2, 10)])
def test_the_first_round_alone_is_a_poisson_sample(sigma: float, rounds: int) -> None:
    found = _deltas(_losses(sigma, rounds, 1))
    known = poisson_divergences(sigma, 1.0 / rounds, _EPSILONS)
    for deltas, exact in zip(found, known, strict=True):
        assert np.all(deltas >= exact - 1e-14)
        np.testing.assert_allclose(deltas, exact, rtol=2e-3, atol=1e-12)


def test_cycles_are_independent() -> None:
    """Two whole cycles of three rounds and a third one of which two rounds take place."""
    sigma = 0.9
    sets = [
        tuple(place + 3 * cycle for cycle, place in enumerate(places) if place + 3 * cycle < 8)
        for places in itertools.product(range(3), repeat=3)
    ]
    found = _deltas(cycles.losses_of_cycles(3, 8, sigma, cycles.step_of_grid(sigma, 3, 0.02)))
    simulated, errors = _simulated(sets, 8, sigma)
    for deltas, means, error in zip(found, simulated, errors, strict=True):
        assert np.all(np.abs(deltas - means) <= 5.0 * error + 2e-3 * means)


@pytest.mark.parametrize(("chosen", "rounds", "sigma"), [(2, 4, 0.7), (2, 5, 1.0), (3, 6, 0.8)])
def test_several_of_many_rounds_are_at_most_as_many_cycles(
    chosen: int, rounds: int, sigma: float
) -> None:
    """All subsets of so many rounds, against cycles of floor(t / k) and ceil(t / k) rounds."""
    sizes = [rounds // chosen + (index < rounds % chosen) for index in range(chosen)]
    step = cycles.step_of_grid(sigma, max(sizes))
    parts = [cycles.losses_of_cycle(sigma, size, size, step) for size in sizes]
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
