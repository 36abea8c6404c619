"""Separations and numbers of participations that fleets survive."""

import math

import numpy as np
import pytest
from scipy import stats

from benchmarks.fleets import OtherFleet
from mf_aggregators.factorizations import from_coefficients
from mf_aggregators.participation import MinSeparation
from mf_aggregators.planning import fleets
from mf_aggregators.planning.fleets import Fleet
from mf_aggregators.workloads import Workload
from simulations.devices.device_behaviour import DeviceBehaviour, Independent
from simulations.devices.device_populations import DevicePopulation

_EXACT = {"dropout": 0.0, "spread": 0.0, "interruptions": 0.0}


@pytest.mark.parametrize(("population", "clients"), [(100, 7), (2511, 100), (35, 35)])
def test_without_faults_the_population_is_the_limit(population: int, clients: int) -> None:
    fleet = Fleet(population, clients, **_EXACT)

    pairs = fleet.choose(40)

    assert {pair.participation.separation for pair in pairs[:1]} == {population // clients}
    assert not fleet.survives(40, MinSeparation(population // clients + 1))


def test_devices_that_may_not_return_leave_the_fleet() -> None:
    # 30 devices, 5 a round and one participation each: enough for 6 rounds.
    fleet, schema = Fleet(30, 5, **_EXACT), MinSeparation(1, 1)

    assert list(fleet.ends(20, schema, 3)) == [6, 6, 6]


def test_devices_stay_away_after_their_timers() -> None:
    # A device is back within 100 attempts with probability 1/2; after them, a fleet ends. The other
    # device comes back while the server waits for the first, too: if the first one is still away
    # with probability u, uniform from 1/2 to 1, the other is back in time with 1 - u/2.
    fleet = Fleet(2, 1, **_EXACT, absent_rounds=100.0)
    ends = fleet.ends(4, MinSeparation(2), 3000)

    assert stats.binomtest(int(np.sum(ends > 2)), 3000, 1 / 2).pvalue > 1e-4
    assert stats.binomtest(int(np.sum(ends == 4)), 3000, 5 / 16).pvalue > 1e-4
    assert not fleet.survives(4, MinSeparation(2))


@pytest.mark.parametrize(
    ("dropout", "over_selection", "returning", "schema"),
    [
        (0.2, 1.5, 1.0, MinSeparation(10)),
        (0.3, 1.6, 0.7, MinSeparation(9)),
        (0.2, 1.4, 1.0, MinSeparation(4, 4)),
    ],
)
def test_counts_end_as_devices_with_names_do(
    dropout: float, over_selection: float, returning: float, schema: MinSeparation
) -> None:
    fleet = Fleet(130, 10, dropout, over_selection, returning, spread=0.0, interruptions=0.0)
    behaviour = DeviceBehaviour(
        Independent(returning), over_selection=over_selection, dropout_probability=dropout
    )

    ends = fleet.ends(40, schema, 400)
    named = [
        len(DevicePopulation(130, schema, 10, behaviour, seed).starves(40)[1])
        for seed in range(150)
    ]

    # Neither all nor none survive, or nothing would be compared.
    assert 0.02 < np.mean(ends < 40) < 0.999
    # A false alarm in 10^4.
    assert stats.ks_2samp(ends, named).pvalue > 1e-4


@pytest.mark.parametrize(("clients", "dropout", "spread"), [(10, 0.2, 0.0), (100, 0.1, 0.25)])
def test_the_selection_starts_the_fewest_timers(
    clients: int, dropout: float, spread: float
) -> None:
    fleet = Fleet(10_000, clients, dropout, spread=spread, returning=1.0)
    selected = np.arange(clients, 3 * clients)
    law = stats.binom(selected, dropout)
    drawn = fleet.draws(np.full(200_000, dropout), np.random.default_rng(1))
    assert np.std(drawn) == pytest.approx(spread * dropout, rel=0.02)
    if spread > 0.0:
        total = dropout * (1.0 - dropout) / (spread * dropout) ** 2 - 1.0
        law = stats.betabinom(selected, dropout * total, (1.0 - dropout) * total)

    chances = law.cdf(selected - clients)
    np.testing.assert_allclose(fleet.chances_of_attempts(selected), chances, atol=1e-9)
    # An attempt that fails counts as ten.
    timers = selected * (1.0 + 10.0 * (1.0 / chances - 1.0))
    assert timers[fleet.selected - clients] <= 1.01 * np.min(timers)


def test_a_simulation_keeps_the_attempts_of_its_timers_alone() -> None:
    for hours in ({}, {"timer_hours": 4.0, "round_minutes": 60.0}):
        fleet = Fleet(1000, 5, **_EXACT, absent_rounds=2.0, **hours)
        state = fleets._Fleets(fleet, 100, MinSeparation(3), 2, 0)
        while state.goes_on():
            state.step()
        assert all(state.rounds == 100)
        assert (len(state._before) if hours else len(state._due)) <= 6


def test_hours_make_the_separation_of_the_slowest_rounds() -> None:
    hours = {"timer_hours": 24.0, "round_minutes": 12.0}

    def separation(**changed: float) -> int:
        return Fleet(10**6, 100, **(hours | {"slower": 0.0} | changed)).separation_of_hours(1000)

    assert separation() == 119
    # Clocks have a margin of minutes: with none, it would be 110.
    assert separation(round_minutes=13.0) == 109
    assert separation(slower=0.1) == separation(round_minutes=13.2) == 108
    # Ten hours of five rounds each, on every day.
    assert separation(peak_hours=10.0) == 49
    # From the last round of one day to the ninth one of the day after the next.
    assert separation(peak_hours=10.0, timer_hours=40.0) == 108 - 49 - 1


def test_hours_survive_until_attempts_that_fail_bring_participations_closer() -> None:
    fleet = Fleet(
        4000, 100, dropout=0.1, over_selection=1.12, timer_hours=4.0, round_minutes=12.0, spread=0.0
    )
    share = float(fleet.chances_of_attempts(np.array([fleet.selected]))[0])
    assert 0.5 < share < 0.9

    # 20 rounds fit into the timer; of that many attempts some fail in every fleet.
    assert not fleet.survives(200, MinSeparation(19))
    assert fleet.survives(200, MinSeparation(5))
    best = fleet.choose(200)[0].participation
    assert 5 <= best.separation < 19 * share


def test_fewer_participations_have_less_noise_where_hours_set_the_separation() -> None:
    fleet = Fleet(30_000, 65, timer_hours=24.0, round_minutes=12.0)

    pairs = fleet.choose(1000)

    best, unlimited = pairs[0], pairs[-1]
    assert unlimited.participation.max_participations is None
    assert best.participation.max_participations is not None
    assert best.noise < 0.8 * unlimited.noise


def test_the_noise_is_that_of_the_matrix_it_names() -> None:
    index = np.arange(1.0, 8.0)
    coefficients = np.concatenate([[1.0], np.cumprod((index - 0.5) / index)])

    for schema in (MinSeparation(8), MinSeparation(8, 3)):
        workload = Workload("prefix_sum", 50)
        expected = [
            from_coefficients(np.pad(coefficients[:bands], (0, 50 - bands))).rmse(workload, schema)
            for bands in (1, 2, 4, 8)
        ]
        # The last column is cut in the matrix, and counted whole in the rank.
        assert min(expected) <= fleets.noise_of(50, schema) <= 1.03 * min(expected)


def test_margins_are_the_last_fleets_that_survive() -> None:
    fleet, schema = Fleet(3000, 100, dropout=0.1), MinSeparation(20)
    found = fleet.margins(100, schema)

    def survives(population: float, dropout: float) -> bool:
        changed = Fleet(round(population), 100, dropout, fleet.selected / 100)
        return changed.survives(100, schema, least=0.86)

    assert found.population < 3000
    assert survives(found.population, 0.1)
    assert not survives(0.95 * found.population, 0.1)
    assert not survives(3000, found.dropout + 0.04)


def test_margins_of_hours_follow_from_the_timer() -> None:
    fleet = Fleet(30_000, 65, timer_hours=24.0, round_minutes=12.0)
    found = fleet.margins(300, MinSeparation(108))

    assert found.longest_minutes is not None
    # Clocks are off by five minutes, and a round more begins before the timer has run out.
    assert found.longest_minutes == pytest.approx((24 * 60 - 5) / 108, rel=0.01)
    assert found.pause_hours == pytest.approx((24 * 60 - 5 - 108 * 12) / 60, abs=0.15)


def test_a_fleet_that_is_too_small_is_refused_with_one_that_is_not() -> None:
    with pytest.raises(ValueError, match="no separation leaves enough clients for 50") as error:
        Fleet(105, 100, dropout=0.2).choose(50)

    words = str(error.value).split(": use ")[1]
    assert Fleet(int(words.split()[0]), 100, dropout=0.2).choose(50)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"dropout": 1.0}, "dropout"),
        ({"over_selection": 0.9}, "over_selection"),
        ({"returning": 0.0}, "returning"),
        ({"timer_hours": 24.0}, "go together"),
        ({"peak_hours": 25.0}, "peak_hours"),
        ({"interruptions": 1.0}, "interruptions"),
        # Sums of such times are infinite.
        ({"retry_rounds": 1e308}, "retry_rounds"),
    ],
)
def test_what_is_no_fleet_is_refused(changed: dict[str, float], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Fleet(1000, 10, **changed)


@pytest.mark.parametrize(
    "number", [4, pytest.param(200, marks=pytest.mark.long)], ids=["few", "all"]
)
def test_plans_survive_fleets_that_they_were_not_made_for(number: int) -> None:
    generator = np.random.default_rng(number)
    survived, refused, wrongly = 0, 0, 0
    for index in range(number):
        other = OtherFleet.random(generator)
        num_rounds = int(generator.integers(30, 120))
        try:
            best = other.planned.choose(num_rounds)[0]
        except ValueError:
            refused += 1
            wrongly += any(
                other.survives(num_rounds, MinSeparation(each), index) for each in (1, 2, 3)
            )
            continue
        survived += other.survives(num_rounds, best.participation, index)
    planned = number - refused
    assert planned > number // 2
    assert survived / planned >= 0.95 - 3.0 * math.sqrt(0.95 * 0.05 / planned)
    assert wrongly <= max(1, 0.1 * number)
