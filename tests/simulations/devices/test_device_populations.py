"""Device populations: timers hold that are not broken, whatever devices and servers go through.

Statistical tests use fixed seeds. Each refuses a correct population with a probability of at
most 1e-4 over the choice of its seed.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import math
from typing import Any

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators import random_streams
from mf_aggregators.kernel import cohorts
from mf_aggregators.kernel.ledger import ObservedParticipation
from mf_aggregators.kernel.sensitivity import Schema
from mf_aggregators.participation import (
    BallsInBins,
    FixedEpochOrder,
    MinSeparation,
    MinSeparationSampling,
    Participation,
    PoissonSampling,
    SamplingScheme,
    Shuffling,
    SingleParticipation,
)
from mf_aggregators.privacy import guarantees
from mf_aggregators.random_streams import Stream
from simulations.devices import device_behaviour
from simulations.devices.device_behaviour import (
    REJOIN,
    WAIT,
    Always,
    Availability,
    DeviceBehaviour,
    Diurnal,
    Independent,
    Trace,
)
from simulations.devices.device_populations import (
    DevicePopulation,
    DeviceRound,
    DeviceTimers,
    TooFewEligibleClientsError,
    draw_cohort,
)
from simulations.training import training_parts
from tests.examples import covering, examples
from tests.mf_aggregators import brute_force
from tests.refusals import refuses

_FALSE_ALARM = 1e-4
_HOUR = 3600.0
_SCHEMAS = st.one_of(
    st.just(SingleParticipation()),
    st.builds(MinSeparation, st.integers(1, 5), st.none() | st.integers(1, 4)),
)
_PROBABILITIES = st.just(0.0) | st.floats(0.0, 0.5)


@st.composite
def _traces(draw: st.DrawFn) -> Trace:
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    starts = generator.uniform(0.0, 20.0, 60)
    lengths = generator.uniform(0.5, 4.0, 60)
    return Trace(
        generator.integers(0, 20, 60), starts * _HOUR, (starts + lengths) * _HOUR, 24 * _HOUR
    )


_MODELS = st.one_of(
    st.just(Always()),
    st.builds(Independent, st.floats(0.3, 1.0)),
    st.builds(
        Diurnal,
        utc_offsets=st.sampled_from([(0.0,), (-8.0, 0.0, 8.0)]),
        nightly_probability=st.floats(0.5, 1.0),
    ),
    _traces(),
)


def _behaviours(**fixed: Any) -> st.SearchStrategy[DeviceBehaviour]:
    fields: dict[str, st.SearchStrategy[Any]] = {
        "availability": _MODELS,
        "timer_hours": st.none(),
        "over_selection": st.floats(1.0, 2.5),
        "dropout_probability": _PROBABILITIES,
        "upload_loss_probability": _PROBABILITIES,
        "late_upload_probability": _PROBABILITIES,
        "minimum_uploads": st.none() | st.just(1),
        "abandonment_probability": _PROBABILITIES,
        "history_loss_probability": _PROBABILITIES,
        "broken_timers": st.sampled_from([0.0, 0.0, 0.1]),
        "round_minutes": st.sampled_from([10.0, 60.0, 300.0]),
        "retry_minutes": st.sampled_from([10.0, 60.0]),
        "max_attempts": st.integers(1, 30),
    }
    return st.builds(DeviceBehaviour, **{**fields, **fixed})


_SIZES = st.tuples(st.integers(20, 40), st.integers(1, 4))
_SEEDS = st.integers(0, 2**128 - 1)


def _rounds(population: DevicePopulation, num_rounds: int) -> list[DeviceRound]:
    """Up to so many rounds: fewer if no more are possible."""
    found: list[DeviceRound] = []
    with contextlib.suppress(TooFewEligibleClientsError):
        while len(found) < num_rounds:
            found.append(population.next_round())
    return found


def _rounds_of(device_rounds: list[DeviceRound], num_devices: int) -> list[tuple[int, ...]]:
    of_device: list[tuple[int, ...]] = [()] * num_devices
    for device_round in device_rounds:
        for device in device_round.cohort:
            of_device[device] = (*of_device[device], device_round.round_index)
    return of_device


def _working(
    rounds_of: list[tuple[int, ...]], population: DevicePopulation
) -> list[tuple[int, ...]]:
    """The rounds of the devices whose timers are not broken."""
    broken = set(population.broken.tolist())
    return [rounds for device, rounds in enumerate(rounds_of) if device not in broken]


@given(_SCHEMAS, _behaviours(), _SIZES, _SEEDS)
@settings(deadline=None, max_examples=examples(300))
def test_no_device_takes_part_too_soon_or_too_often(
    schema: Participation, behaviour: DeviceBehaviour, sizes: tuple[int, int], seed: int
) -> None:
    """It holds for every model, with dropouts, lost uploads and devices that lost their history.

    Where some timers are broken, it holds for all other devices.
    """
    num_devices, clients_per_round = sizes
    population = DevicePopulation(num_devices, schema, clients_per_round, behaviour, seed)
    device_rounds = _rounds(population, 14)
    separation = schema.separation_in(14)
    for rounds in _working(_rounds_of(device_rounds, num_devices), population):
        assert len(rounds) <= schema.most_participations(14)
        assert all(later - earlier >= separation for earlier, later in itertools.pairwise(rounds))
    _check_rounds(device_rounds, behaviour, num_devices, clients_per_round, seed)


@given(_behaviours(timer_hours=st.floats(0.2, 50.0)), _SIZES, _SEEDS)
@settings(deadline=None, max_examples=examples(200))
def test_no_device_takes_part_before_its_wall_clock_timer_allows_it(
    behaviour: DeviceBehaviour, sizes: tuple[int, int], seed: int
) -> None:
    num_devices, clients_per_round = sizes
    schema = MinSeparation(10, 3)
    population = DevicePopulation(num_devices, schema, clients_per_round, behaviour, seed)
    device_rounds = _rounds(population, 14)
    assert behaviour.timer_seconds is not None
    for rounds in _working(_rounds_of(device_rounds, num_devices), population):
        assert len(rounds) <= 3
        for earlier, later in itertools.pairwise(rounds):
            upload = device_rounds[earlier].start_seconds + behaviour.round_seconds
            assert device_rounds[later].start_seconds >= upload + behaviour.timer_seconds
    _check_rounds(device_rounds, behaviour, num_devices, clients_per_round, seed)


def _check_rounds(
    device_rounds: list[DeviceRound],
    behaviour: DeviceBehaviour,
    num_devices: int,
    clients_per_round: int,
    seed: int,
) -> None:
    """Sizes, times and availability of every round."""
    start = 0.0
    for index, found in enumerate(device_rounds):
        assert found.round_index == index
        assert found.cohort.dtype == np.int64
        fewest = behaviour.fewest_uploads(clients_per_round)
        assert fewest <= len(found.cohort) <= clients_per_round
        assert np.all(np.diff(found.cohort) > 0)
        assert 0 <= found.cohort[0] <= found.cohort[-1] < num_devices
        assert found.start_seconds == start + (found.attempts - 1) * behaviour.retry_seconds
        assert 1 <= found.attempts <= behaviour.max_attempts
        start = found.start_seconds + behaviour.round_seconds
        not_summed = (
            found.num_dropped_out,
            found.num_uploads_lost,
            found.num_uploads_late,
            found.num_discarded,
        )
        assert found.num_selected == len(found.cohort) + sum(not_summed)
        assert min(not_summed) >= 0
        assert 0 <= found.num_abandoned < found.attempts
        most_selected = math.ceil(clients_per_round * behaviour.over_selection)
        assert found.num_selected <= found.attempts * most_selected
        assert fewest <= found.num_available <= found.num_eligible <= num_devices
        model = behaviour.availability
        assert np.all(model.available(found.cohort, found.start_seconds, index, seed))


@given(
    _SCHEMAS,
    _behaviours(timer_hours=st.none() | st.floats(0.2, 50.0)) | st.just(DeviceBehaviour()),
    _SIZES,
    _SEEDS,
    st.integers(0, 8),
)
@settings(deadline=None, max_examples=examples(200))
def test_a_population_that_follows_another_goes_on_as_it_does(
    schema: Participation,
    behaviour: DeviceBehaviour,
    sizes: tuple[int, int],
    seed: int,
    stopped_after: int,
) -> None:
    arguments = (sizes[0], schema, sizes[1], behaviour, seed)
    whole = _rounds(DevicePopulation(*arguments), 12)
    resumed = DevicePopulation(*arguments)
    for found in whole[:stopped_after]:
        assert resumed.follow(found.cohort)
    rest = whole[stopped_after:]
    for expected in rest:
        found = resumed.next_round()
        np.testing.assert_array_equal(found.cohort, expected.cohort)
        plain = [
            [value for name, value in vars(one).items() if name != "cohort"]
            for one in (found, expected)
        ]
        assert plain[0] == plain[1]
        assert resumed.seconds == found.start_seconds + behaviour.round_seconds


def test_a_cohort_of_other_devices_cannot_be_followed() -> None:
    behaviour = DeviceBehaviour(dropout_probability=0.1, over_selection=2.0)
    first = DevicePopulation(100, MinSeparation(2), 5, behaviour, 1).next_round().cohort
    assert DevicePopulation(100, MinSeparation(2), 5, behaviour, 1).follow(first)
    assert not DevicePopulation(100, MinSeparation(2), 5, behaviour, 2).follow(first)
    unable = DeviceBehaviour(dropout_probability=0.999, max_attempts=1)
    assert not DevicePopulation(100, MinSeparation(2), 5, unable, 1).follow(first)


@given(_SCHEMAS, st.integers(8, 30), st.integers(1, 4), st.integers(0, 2**64))
@settings(deadline=None, max_examples=examples(100))
def test_undisturbed_devices_are_drawn_among_those_whose_timers_allow_it(
    schema: Participation, num_devices: int, clients_per_round: int, seed: int
) -> None:
    """By all patterns of the schema, and a plain draw."""
    population = DevicePopulation(num_devices, schema, clients_per_round, seed=seed)
    allowed = set(brute_force.patterns(schema, 12))
    histories: list[tuple[int, ...]] = [()] * num_devices
    for index in range(12):
        eligible = np.array([(*history, index) in allowed for history in histories])
        if np.count_nonzero(eligible) < clients_per_round:
            with refuses("timers", error=TooFewEligibleClientsError):
                population.next_round()
            return
        found = population.next_round()
        np.testing.assert_array_equal(
            found.cohort, draw_cohort(eligible, clients_per_round, seed, index)
        )
        assert found.num_eligible == found.num_available == np.count_nonzero(eligible)
        assert (found.attempts, found.start_seconds) == (1, 300.0 * index)
        for device in found.cohort:
            histories[device] = (*histories[device], index)


@given(_MODELS, _SCHEMAS, st.integers(0, 2**64), st.integers(20, 50))
@settings(deadline=None, max_examples=examples(150))
def test_eligible_and_available_devices_are_counted(
    model: Any, schema: Participation, seed: int, num_devices: int
) -> None:
    """Without losses the cohorts are all that timers know: each count against each device."""
    behaviour = DeviceBehaviour(model, round_minutes=60.0, retry_minutes=60.0, max_attempts=40)
    population = DevicePopulation(num_devices, schema, 3, behaviour, seed)
    everyone, histories = np.arange(num_devices), [()] * num_devices
    allowed = set(brute_force.patterns(schema, 8))
    for found in _rounds(population, 8):
        eligible = np.array([(*rounds, found.round_index) in allowed for rounds in histories])
        assert found.num_eligible == np.count_nonzero(eligible)
        there = model.available(everyone, found.start_seconds, found.round_index, seed)
        if found.available_is_exact:
            assert found.num_available == np.count_nonzero(eligible & there)
        # The attempts before it found fewer than three.
        for attempt in range(1, found.attempts):
            earlier = found.start_seconds - attempt * _HOUR
            there = model.available(everyone, earlier, found.round_index, seed)
            assert np.count_nonzero(eligible & there) < 3
        for device in found.cohort:
            histories[device] = (*histories[device], found.round_index)


class _Half(Availability):
    """Fixed devices, of even number or below a limit, that are always there."""

    def __init__(self, num_available: int) -> None:
        self.num_available = num_available

    def available(
        self, devices: np.ndarray, seconds: float, round_index: int, seed: int
    ) -> np.ndarray:
        return (devices % 2 == 0) & (devices < 2 * self.num_available)


@pytest.mark.short_cases(1)
@pytest.mark.parametrize(
    ("devices", "over_selection"),
    # The cohort is found by draws alone; by either way, as the first draws turn out; by asking
    # every device.
    covering([(8000, 2500, {False}), (240, 40, {False, True}), (60, 25, {True})], [1.0, 1.5]),
)
def test_selection_is_uniform(devices: tuple[int, int, set[bool]], over_selection: float) -> None:
    """A chi-square test over 4000 first rounds, each of 10 of the available devices."""
    num_devices, num_available, scans = devices
    behaviour = DeviceBehaviour(_Half(num_available), over_selection=over_selection)
    counts, ways = np.zeros(num_available), set()
    for seed in range(4000):
        population = DevicePopulation(num_devices, MinSeparation(3), 10, behaviour, seed)
        found = population.next_round()
        assert np.all(found.cohort % 2 == 0)
        counts[found.cohort // 2] += 1
        ways.add(found.available_is_exact)
    assert ways == scans
    expected = 4000 * 10 / num_available
    # Without replacement, counts vary by that share of what a multinomial's would.
    statistic = np.sum((counts - expected) ** 2 / expected) / (1.0 - 10 / num_available)
    p_value = scipy.stats.chi2.sf(statistic, num_available - 1)
    assert _FALSE_ALARM / 2 < p_value < 1.0 - _FALSE_ALARM / 2


def test_devices_that_drop_out_start_no_timer_and_all_uploads_do() -> None:
    """The number of devices whose timers run is that of all uploads, summed or not.

    Among the latter are those that are lost, late, and of attempts that were abandoned.
    """
    behaviour = DeviceBehaviour(
        over_selection=1.7,
        dropout_probability=0.3,
        upload_loss_probability=0.1,
        late_upload_probability=0.05,
        abandonment_probability=0.1,
    )
    population = DevicePopulation(5000, MinSeparation(4), 50, behaviour, 7)
    device_rounds = _rounds(population, 30)
    assert len(device_rounds) == 30
    uploads = [found.num_selected - found.num_dropped_out for found in device_rounds]
    for index, found in enumerate(device_rounds):
        if found.attempts == 1:
            assert found.num_eligible == 5000 - sum(uploads[max(0, index - 3) : index])
    assert max(found.attempts for found in device_rounds) > 1
    assert sum(found.num_discarded for found in device_rounds) > 0
    assert sum(found.num_uploads_late for found in device_rounds) > 0
    # Devices are always there: every attempt but the last of a round was abandoned.
    for found in device_rounds:
        assert found.num_abandoned == found.attempts - 1


def test_a_round_is_closed_at_its_goal_and_at_its_end_with_enough() -> None:
    """Of the uploads in time, as many as are needed are summed; fewer are, down to the minimum."""
    sizes = {}
    for fewest in (None, 30):
        behaviour = DeviceBehaviour(
            over_selection=1.3,
            upload_loss_probability=0.15,
            late_upload_probability=0.15,
            minimum_uploads=fewest,
        )
        population = DevicePopulation(20_000, MinSeparation(5), 50, behaviour, 3)
        device_rounds = _rounds(population, 100)
        assert len(device_rounds) == 100
        sizes[fewest] = [len(found.cohort) for found in device_rounds]
        for found in device_rounds:
            if len(found.cohort) < 50:
                assert found.num_discarded == 0
        attempts = [found.attempts for found in device_rounds]
        # Of 65 uploads 47 arrive in time on average, and hardly ever fewer than 30.
        assert (max(attempts) > 2) == (fewest is None)
    assert set(sizes[None]) == {50}
    assert min(sizes[30]) < 50 == max(sizes[30])


@pytest.mark.parametrize("hours", [None, 5 / 12])
def test_losses_have_their_probabilities(hours: float | None) -> None:
    behaviour = DeviceBehaviour(
        timer_hours=hours,
        over_selection=2.0,
        dropout_probability=0.2,
        upload_loss_probability=0.1,
        late_upload_probability=0.07,
        history_loss_probability=0.01,
    )
    population = DevicePopulation(20_000, MinSeparation(5), 100, behaviour, 2)
    device_rounds = _rounds(population, 200)
    selected = sum(found.num_selected for found in device_rounds)
    assert selected == 200 * 200
    dropped_out = sum(found.num_dropped_out for found in device_rounds)
    lost = sum(found.num_uploads_lost for found in device_rounds)
    late = sum(found.num_uploads_late for found in device_rounds)
    arrived = selected - dropped_out - lost
    tests = [(dropped_out, selected, 0.2), (arrived, selected - dropped_out, 0.9)]
    tests += [(late, arrived, 0.07)]
    for number, of, probability in tests:
        assert scipy.stats.binomtest(number, of, probability).pvalue > _FALSE_ALARM / 6
    # Whoever uploaded in the last so many rounds is away, and so is whoever lost its history
    # in as many. By the wall clock it is one round more: an upload comes at a round's end.
    rounds_away = 4 if hours is None else 5
    uploads = (selected - dropped_out) / 200
    expected = 20_000 - (20_000 - rounds_away * uploads) * 0.99**rounds_away
    waiting = np.mean([20_000 - found.num_eligible for found in device_rounds[50:]])
    assert abs(waiting - expected) < 0.03 * expected


@pytest.mark.parametrize(("most", "num_rounds"), [(1, 1), (2, 2), (5, 2), (6, 3), (10, 3)])
def test_by_the_wall_clock_a_lost_history_counts_as_many_participations_as_fit(
    most: int, num_rounds: int
) -> None:
    """All forget before each round. Uploads come from 300 s on, 200 s apart at the least.

    Before the rounds at 300, 1200 and 2100 s that is 1, 5 and 10 times, and all wait until
    the second attempt.
    """
    behaviour = DeviceBehaviour(
        timer_hours=200.0 / 3600.0, history_loss_probability=1.0, max_attempts=5
    )
    population = DevicePopulation(50, MinSeparation(1, most), 5, behaviour, 1)
    device_rounds = _rounds(population, 4)
    assert len(device_rounds) == num_rounds
    assert [found.start_seconds for found in device_rounds] == [0.0, 900.0, 1800.0][:num_rounds]


@pytest.mark.parametrize("hours", [None, 10 / 12])
def test_devices_that_rejoin_break_the_schema_and_the_report_notices(
    hours: float | None,
) -> None:
    schema = MinSeparation(10, 3)
    waits = DeviceBehaviour(timer_hours=hours, history_loss_probability=0.05)
    rejoins = dataclasses.replace(waits, after_history_loss=REJOIN)
    for behaviour, keeps in ((waits, True), (rejoins, False)):
        population = DevicePopulation(400, schema, 10, behaviour, 1)
        device_rounds = _rounds(population, 25 if keeps else 100)
        rounds_of = [np.array(rounds) for rounds in _rounds_of(device_rounds, 400)]
        observed = ObservedParticipation.of(rounds_of, len(device_rounds))
        assert guarantees.keeps_plan(schema, observed) == keeps
        if not keeps:
            assert len(device_rounds) == 100
            assert observed.separation is not None
            assert observed.separation < 10


def test_without_broken_timers_devices_are_drawn_as_ever() -> None:
    """What version 2.0.0 drew."""
    behaviour = DeviceBehaviour(
        Diurnal(), over_selection=1.3, dropout_probability=0.1, history_loss_probability=0.01
    )
    population = DevicePopulation(300, MinSeparation(9, 4), 10, behaviour, 7)
    cohorts = np.concatenate([population.next_round().cohort for _ in range(20)])
    digest = hashlib.sha256(cohorts.astype("<i8").tobytes()).hexdigest()
    assert digest == "77e83043d5037423f27efdd0981f892426f36a5ddd59af5ec397f6b0cfd6dd57"


@pytest.mark.parametrize("hours", [None, 1000 / 12])
@pytest.mark.parametrize("after", [WAIT, REJOIN])
def test_devices_with_broken_timers_join_as_if_they_never_took_part(
    hours: float | None, after: str
) -> None:
    """Every device could join every round; with working timers there would be 5 rounds."""
    behaviour = DeviceBehaviour(
        timer_hours=hours, broken_timers=1.0, history_loss_probability=0.1, after_history_loss=after
    )
    population = DevicePopulation(50, MinSeparation(1000, 1), 10, behaviour, 1)
    device_rounds = _rounds(population, 40)
    assert [found.num_eligible for found in device_rounds] == [50] * 40
    counts = np.bincount(np.concatenate([found.cohort for found in device_rounds]), minlength=50)
    assert np.min(counts) > 1
    # Also where nothing else goes wrong.
    alone = DevicePopulation(50, MinSeparation(1000, 1), 10, DeviceBehaviour(broken_timers=1.0), 1)
    assert [found.num_eligible for found in _rounds(alone, 9)] == [50] * 9
    # Beside working ones, they are all that is left once these have taken part.
    some = dataclasses.replace(behaviour, broken_timers=0.2, after_history_loss=WAIT)
    population = DevicePopulation(50, MinSeparation(1000, 1), 10, some, 1)
    device_rounds = _rounds(population, 40)
    assert len(device_rounds) == 40
    rounds_of = _rounds_of(device_rounds, 50)
    assert all(len(rounds) <= 1 for rounds in _working(rounds_of, population))
    assert all(len(rounds_of[device]) > 30 for device in population.broken)
    np.testing.assert_array_equal(device_rounds[-1].cohort, population.broken)
    # The rounds that are simulated break the schema for these devices alone.
    returned = [np.array(rounds) for rounds in rounds_of if len(rounds) > 1]
    gaps = np.concatenate([np.diff(rounds) for rounds in returned])
    sizes = np.array([len(rounds) for rounds in returned])
    found = guarantees.num_outside_schema(Schema(1, 1000), sizes, gaps)
    assert found == len(population.broken)


def test_too_few_devices_by_their_timers_end_the_rounds() -> None:
    behaviour = DeviceBehaviour(dropout_probability=0.01, over_selection=1.1)
    population = DevicePopulation(25, MinSeparation(9), 10, behaviour, 1)
    assert len(_rounds(population, 5)) == 2
    with refuses("round 3", "25", error=TooFewEligibleClientsError):
        population.next_round()
    by_clock = DeviceBehaviour(timer_hours=278.0, max_attempts=3)
    population = DevicePopulation(25, MinSeparation(9), 10, by_clock, 1)
    assert len(_rounds(population, 2)) == 2
    with refuses("3 attempts", "25 clients", error=TooFewEligibleClientsError):
        population.next_round()


@pytest.mark.parametrize(
    ("num_devices", "schema", "behaviour"),
    [
        (25, MinSeparation(9), DeviceBehaviour()),
        (25, MinSeparation(9), DeviceBehaviour(dropout_probability=0.3, over_selection=1.1)),
        (25, MinSeparation(9), DeviceBehaviour(timer_hours=2.8, max_attempts=3)),
        (30, MinSeparation(1), DeviceBehaviour(Independent(0.05), max_attempts=4)),
        (2000, MinSeparation(2), DeviceBehaviour(dropout_probability=0.9, max_attempts=5)),
        (2000, MinSeparation(2), DeviceBehaviour(abandonment_probability=0.9, max_attempts=2)),
        (30, MinSeparation(30), DeviceBehaviour()),
    ],
)
def test_what_a_run_is_told_lets_it_go_on(
    num_devices: int, schema: Participation, behaviour: DeviceBehaviour
) -> None:
    """Advice is followed as printed until the round takes place, or no client may join it."""

    def stopped(flags: dict[str, Any]) -> TooFewEligibleClientsError | None:
        population = DevicePopulation(num_devices, schema, 10, behaviour, 1)
        for cohort in before:
            assert population.follow(cohort)
        population.change(dataclasses.replace(behaviour, **flags))
        try:
            population.next_round()
        except TooFewEligibleClientsError as error:
            return error
        return None

    population = DevicePopulation(num_devices, schema, 10, behaviour, 1)
    before: list[np.ndarray] = []
    flags: dict[str, Any] = {}
    with pytest.raises(TooFewEligibleClientsError) as caught:
        before.extend(population.next_round().cohort for _ in range(10))
    error: TooFewEligibleClientsError | None = caught.value
    for _ in range(8):
        if error is None or not error.to_go_on:
            break
        printed = dict(each.removeprefix("--").split("=") for each in error.to_go_on.split())
        assert printed.keys() <= set(device_behaviour.MAY_CHANGE)
        flags |= {name: int(value) for name, value in printed.items()}
        error = stopped(flags)
    assert error is None or (not error.to_go_on and " allow 0 of " in error.found)


def test_a_server_waits_for_the_night() -> None:
    """Windows open at 22 at the earliest, at midnight UTC the first round starts at 14 there."""
    nights = Diurnal((-10.0,), window_spread_hours=0.0, nightly_probability=1.0)
    behaviour = DeviceBehaviour(nights, retry_minutes=10.0)
    found = DevicePopulation(300, MinSeparation(2), 10, behaviour, 1).next_round()
    assert (found.start_seconds, found.attempts) == (8 * _HOUR, 49)
    assert found.num_available == 300


def test_bad_populations_are_refused() -> None:
    with refuses("clients_per_round"):
        DevicePopulation(10, MinSeparation(1), 0)
    with refuses("timers"):
        DevicePopulation(10, FixedEpochOrder(2, 3), 2)
    trace = Trace(np.array([10]), np.array([0.0]), np.array([1.0]))
    with refuses("10"):
        DevicePopulation(10, MinSeparation(1), 2, DeviceBehaviour(trace))


# Cohorts: uniform, repeatable, never bent.


@given(
    st.integers(1, 30),
    st.integers(1, 8),
    st.integers(1, 8),
    st.integers(1, 12),
    st.integers(0, 2**32 - 1),
)
@settings(deadline=None, max_examples=examples(200))
def test_plans_found_feasible_never_run_out_of_clients(
    num_clients: int, clients_per_round: int, separation: int, num_rounds: int, seed: int
) -> None:
    """With as many participations as fit, what check_population accepts can be run to its end."""
    schema = MinSeparation(separation)
    try:
        schema.check_population(num_rounds, num_clients, clients_per_round)
    except ValueError:
        return
    timers = DeviceTimers.by_rounds(num_clients, schema)
    for round_index in range(num_rounds):
        timers.advance(round_index)
        cohort = draw_cohort(timers.eligible(), clients_per_round, seed, round_index)
        timers.record(cohort, round_index)


@given(st.integers(0, 60_000), st.floats(0.0, 1.0), st.integers(1, 40), st.integers(0, 2**64))
@settings(deadline=None, max_examples=60)
def test_a_cohort_is_a_choice_from_the_list_of_eligible_clients(
    num_clients: int, share: float, clients_per_round: int, seed: int
) -> None:
    """Whatever blocks of clients it is found in."""
    eligible = np.random.default_rng(seed).random(num_clients) < share
    candidates = np.flatnonzero(eligible)
    if len(candidates) < clients_per_round:
        with refuses(str(len(candidates)), error=TooFewEligibleClientsError):
            draw_cohort(eligible, clients_per_round, seed, 4)
        return
    chosen = random_streams.generator_of(seed, 4).choice(
        candidates, clients_per_round, replace=False
    )
    drawn = draw_cohort(eligible, clients_per_round, seed, 4)
    np.testing.assert_array_equal(drawn, np.sort(chosen))


def test_no_two_streams_of_a_seed_coincide(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a run draws from its seed, by the functions that draw it; the task's by hand."""
    owners: dict[tuple[int, ...], str] = {}
    original, owner = random_streams.generator_of, ""

    def generator_of(seed: int, *coordinates: int) -> np.random.Generator:
        assert owners.setdefault(coordinates, owner) == owner
        return original(seed, *coordinates)

    for module in (random_streams, cohorts):
        monkeypatch.setattr(module, "generator_of", generator_of)
    rounds = 12
    owner = "cohorts"
    for i in range(rounds):
        draw_cohort(np.ones(8, bool), 3, 5, i)
    owner = "examples"
    for i in range(rounds):
        for client in ("", "a", "b", "a client of a long name"):
            training_parts.sample_order(5, i, client, 4)
    owner = "batches"
    schemes: list[SamplingScheme] = [
        PoissonSampling(rounds, 3, 60, 4),
        Shuffling(rounds, 3, 60, 4),
        MinSeparationSampling(rounds, 3, 60, 4, 5),
        BallsInBins(rounds, 3, 60, 4, 15),
    ]
    for scheme in schemes:
        sampler = scheme.sampler(5)
        for i in range(rounds):
            sampler.draw(i)
    owner = "evaluation"
    for split in range(3):
        generator_of(5, Stream.EVALUATION, split)
    owner = "devices"
    for kind in (0, 1):
        for i in range(rounds):
            generator_of(5, Stream.DEVICES, kind, i)
    states = {original(5, *each).bit_generator.random_raw(4).tobytes() for each in owners}
    assert len(states) == len(owners) > 6 * rounds
    # Only cohorts have one coordinate, and all others a stream's number before their own.
    for coordinates, name in owners.items():
        assert (len(coordinates) == 1) == (name == "cohorts")
        assert name == "cohorts" or Stream(coordinates[0]).name.lower() == name


@pytest.mark.parametrize(
    ("coordinates", "number"),
    [
        ((2,), 15069943504308478841),
        ((Stream.EXAMPLES, 4, 97), 12797478197352895144),
        ((Stream.BATCHES, 1, 2), 16331471807744859014),
        ((Stream.DEVICES, 0, 3, 1), 10234321911205539965),
    ],
)
def test_streams_are_those_that_runs_were_begun_with(coordinates: Any, number: int) -> None:
    """A run that is resumed draws what it would have drawn."""
    assert int(random_streams.generator_of(7, *coordinates).bit_generator.random_raw()) == number


# Timers: no client ever breaks its schema, whoever is drawn.


@given(
    _SCHEMAS,
    st.integers(1, 10),
    st.integers(0, 2**32 - 1),
    st.floats(0.1, 1.0),
    st.floats(0, 0.5),
)
@settings(deadline=None, max_examples=examples(300))
def test_timers_in_place_allow_what_the_schema_allows(
    schema: Participation, num_rounds: int, seed: int, share: float, loss: float
) -> None:
    """Every device against all patterns: of all its rounds, and of those that it remembers.

    With losses of history, after which devices wait: no pattern of all rounds is ever broken.
    Without any, nobody is kept out without reason.
    """
    generator = np.random.default_rng(seed)
    num_devices = 6
    timers = DeviceTimers.by_rounds(num_devices, schema)
    histories: list[tuple[int, ...]] = [()] * num_devices
    allowed = set(brute_force.patterns(schema, num_rounds)) | {()}
    losses = 0
    for round_index in range(num_rounds):
        timers.advance(round_index)
        lost = np.flatnonzero(generator.random(num_devices) < loss)
        if round_index and len(lost):
            losses += len(lost)
            most = schema.most_participations(round_index)
            timers.lose_history(lost, round_index - 1, most)
            timers.advance(round_index)
        eligible = timers.eligible().copy()
        assert timers.num_eligible == np.count_nonzero(eligible)
        np.testing.assert_array_equal(timers.allow(np.arange(num_devices)[::-1]), eligible[::-1])
        for device in range(num_devices):
            possible = (*histories[device], round_index) in allowed
            assert not eligible[device] or possible
            if not losses:
                assert eligible[device] == possible
        joining = np.flatnonzero(eligible & (generator.random(num_devices) < share))
        for device in joining:
            histories[device] = (*histories[device], round_index)
        timers.record(joining, round_index)
        assert not np.any(timers.allow(joining))
    assert set(histories) <= allowed


def test_the_wait_after_a_loss_is_no_longer_than_needed() -> None:
    """Lost before round 4, with 3 rounds between: the last time may have been round 3."""
    timers = DeviceTimers.by_rounds(2, MinSeparation(3, 3))
    timers.lose_history(np.array([1]), latest=3, most=2)
    found = []
    for round_index in range(4, 9):
        timers.advance(round_index)
        found.append(bool(timers.allow(np.array([1]))[0]))
    assert found == [False, False, True, True, True]
    timers.record(np.array([1]), 8)
    timers.advance(1000)
    # Two assumed participations and one of its own.
    assert list(timers.eligible()) == [True, False]
    assert timers.num_eligible == 1


@given(
    st.lists(st.tuples(st.floats(0.0, 5.0), st.integers(0, 2**6 - 1)), max_size=12),
    st.floats(0.1, 12.0),
    st.none() | st.integers(1, 3),
)
@settings(deadline=None, max_examples=examples(300))
def test_wall_clock_timers_count_seconds(
    steps: list[tuple[float, int]], period: float, limit: int | None
) -> None:
    """Any devices that may, at any moments, whose timers start somewhat later."""
    timers, now = DeviceTimers(6, period, limit), 0.0
    starts: list[list[float]] = [[] for _ in range(6)]
    for wait, some in steps:
        now += wait
        timers.advance(now)
        expected = [
            not since or (now >= since[-1] + period and (limit is None or len(since) < limit))
            for since in starts
        ]
        assert list(timers.eligible()) == expected
        assert timers.num_eligible == sum(expected)
        joining = [device for device in range(6) if expected[device] and some >> device & 1]
        for device in joining:
            starts[device].append(now + 0.25)
        timers.record(np.array(joining, np.int64), now + 0.25)
