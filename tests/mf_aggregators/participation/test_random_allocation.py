"""Random allocation: epsilons beside those of a peer, draws and ledgers."""

import itertools

import numpy as np
import pytest
import scipy.stats

from mf_aggregators.kernel.losses import _losses_of_cycle, _step_of_grid
from mf_aggregators.participation import BallsInBins, RandomAllocation
from tests.mf_aggregators.scheme_rates import rounds_of_cycle


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
    step = _step_of_grid(sigma, rounds)
    losses = _losses_of_cycle(sigma, rounds, rounds, step).self_compose(cycles)
    for pmf, (mean, error) in zip((losses._pmf_remove, losses._pmf_add), means, strict=True):
        assert abs(float(pmf.get_delta_for_epsilon(epsilon)) - mean) <= 3.0 * error
    scheme = RandomAllocation(rounds * cycles, 1, 10 * rounds, 10)
    assert scheme.epsilon(sigma, 1e-2) < 0.95 * certified


def test_noise_multipliers_are_those_of_their_epsilons() -> None:
    scheme = RandomAllocation(24, 2, 1200, 100)
    assert rounds_of_cycle(scheme) == 6
    sigma = scheme.noise_multiplier(3.0, 1e-5)
    assert 2.998 <= scheme.epsilon(sigma, 1e-5) <= 3.0
    # Never above the guarantee of who knows all draws.
    assert scheme.epsilon(50.0, 1e-5) <= scheme.epsilon(20.0, 1e-5) <= 0.3


def test_every_client_is_once_in_every_cycle() -> None:
    scheme = RandomAllocation(48, 2, 90, 11)
    assert rounds_of_cycle(scheme) == 4
    sampler = scheme.sampler(7)
    cohorts = [sampler.draw(index) for index in range(48)]
    for group, cycle in itertools.product(range(2), range(6)):
        rounds = [group + 2 * (4 * cycle + place) for place in range(4)]
        clients = np.concatenate([cohorts[index] for index in rounds])
        expected = np.sort(sampler.group_of_round(group))
        np.testing.assert_array_equal(np.sort(clients), expected)
    # Places in a cycle, and pairs of places in adjacent ones, are as likely as each other: two
    # chi-square tests with 1e-6 of false alarms.
    assert scheme.as_draws().group_size == 44
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
