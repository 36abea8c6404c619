"""Clients who cannot be asked are left out, and nothing else of a sampler changes."""

import dataclasses

import numpy as np
import pytest
import scipy.stats

from mf_aggregators.participation import BallsInBins, MinSeparationSampling, SeparatedScheme
from simulations.devices.availability import Always, Availability, AvailableClients, Independent

_FALSE_ALARM = 1e-4
_SCHEMES: list[SeparatedScheme] = [
    MinSeparationSampling(40, 3, 6500, 500, 4),
    BallsInBins(40, 3, 6500, 1625, 4),
]


@dataclasses.dataclass(frozen=True)
class _Recorded(Availability):
    """Even devices are available after the first ten rounds; what is asked is kept."""

    asked: list[tuple[float, int, int]]

    def available(
        self, devices: np.ndarray, seconds: float, round_index: int, seed: int
    ) -> np.ndarray:
        self.asked.append((seconds, round_index, seed))
        return (devices % 2 == 0) & (round_index >= 10)


@pytest.mark.parametrize("scheme", _SCHEMES, ids=str)
def test_absences_do_not_move_later_rounds(scheme: SeparatedScheme) -> None:
    """A timer starts in every round that its coin says, whoever could be asked in it."""
    sampler = scheme.sampler(3)
    availability: Availability = _Recorded([])
    available = AvailableClients(sampler, availability, 8, 300.0)
    assert available.scheme == scheme
    for index in range(scheme.num_rounds):
        drawn = sampler.draw(index)
        expected = drawn[drawn % 2 == 0] if index >= 10 else drawn[:0]
        np.testing.assert_array_equal(available.draw(index), expected)
        assert available.num_eligible(index) == sampler.num_eligible(index)
    assert isinstance(availability, _Recorded)
    assert availability.asked == [(300.0 * index, index, 8) for index in range(40)]


@pytest.mark.parametrize("scheme", _SCHEMES, ids=str)
def test_each_drawn_client_is_there_with_the_probability_of_availability(
    scheme: SeparatedScheme,
) -> None:
    """A binomial test of all rounds, which a correct sampler fails for 1e-4 of all seeds."""
    sampler = scheme.sampler(3)
    available = AvailableClients(sampler, Independent(0.7), 9, 300.0)
    there = sum(len(available.draw(index)) for index in range(40))
    drawn = sum(len(sampler.draw(index)) for index in range(40))
    assert scipy.stats.binomtest(there, drawn, 0.7).pvalue > _FALSE_ALARM
    again = AvailableClients(scheme.sampler(3), Independent(0.7), 9, 300.0)
    np.testing.assert_array_equal(again.draw(7), available.draw(7))


@pytest.mark.parametrize("scheme", _SCHEMES, ids=str)
def test_ledgers_with_absences_are_those_of_the_scheme(scheme: SeparatedScheme) -> None:
    sampler = scheme.sampler(4)
    available = AvailableClients(sampler, Independent(0.5), 9, 300.0)
    cohorts = [available.draw(index) for index in range(40)]
    assert available.deviation(6500, cohorts) is None
    found = sampler.deviation(6500, cohorts)
    assert found == "the clients of round 1 (counted from 1) are not those that the sampler draws"
    assert sampler.deviation(6500, cohorts, may_be_absent=True) is None
    everybody = AvailableClients(sampler, Always(), 9, 300.0)
    np.testing.assert_array_equal(everybody.draw(5), sampler.draw(5))
