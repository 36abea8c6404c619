"""What the times of rounds allow: never better than who took part, and attained."""

import pathlib

import numpy as np
import pytest

from mf_aggregators import accounting
from mf_aggregators.factorizations import banded, blt, toeplitz
from mf_aggregators.mechanism import Mechanism
from mf_aggregators.participation import MinSeparation, PoissonSampling, SingleParticipation
from mf_aggregators.privacy import guarantees
from mf_aggregators.privacy.ledgers import Ledger, LedgerError
from mf_aggregators.privacy.round_times import RoundTimes
from mf_aggregators.privacy.statements import RunFacts
from simulations.devices.availability import Always, Availability, Diurnal, Independent
from simulations.devices.device_behaviour import DeviceBehaviour
from simulations.devices.device_populations import DevicePopulation, TooFewEligibleClientsError
from simulations.devices.reference_timer import Device, Policy, Request
from tests.refusals import refuses

_HOUR = 3600.0


def _exact(starts: object, ends: object, hours: float, **others: object) -> RoundTimes:
    """Timers without drift and margin."""
    options = {"clock_drift": 0.0, "clock_margin_minutes": 0.0, **others}
    return RoundTimes(np.asarray(starts), np.asarray(ends), hours, **options)  # type: ignore[arg-type]


def _dated(seconds: float) -> str:
    return str(np.datetime64("2026-03-01T00:00:00") + np.timedelta64(int(seconds), "s"))


def test_a_file_is_read_in_all_its_forms(tmp_path: pathlib.Path) -> None:
    """Starts that nobody wrote down are the ends of the rounds before."""
    file = tmp_path / "times.csv"
    texts = [
        "round,start,end\n0,{0}Z,{1}Z\n1,{1}Z,{2}Z\n2,{2}Z,{3}Z\n",
        "start,{0}Z\n0,{1}Z\n\n1,{2}Z\n2,{3}Z\n",
        "\ufeffRound,End\nstart,{0}+00:00\n0,{1}+00:00\n1,{2}z\n2,{3}+00:00\n",
    ]
    for text in texts:
        file.write_text(text.format(*map(_dated, (0, 3600, 9000, 9600))), encoding="utf-8")
        read = RoundTimes.load(file, 5.0, max_participations=2)
        begin = read.starts[0]
        assert list(read.starts - begin) == [0.0, 3600.0, 9000.0]
        assert list(read.ends - begin) == [3600.0, 9000.0, 9600.0]
        assert (read.timer_hours, read.max_participations) == (5.0, 2)
    file.write_text("start,1772323200\n0,1772326800.5\n")
    assert list(RoundTimes.load(file, 5.0).ends) == [1772326800.5]


_START = "start,2026-03-01T00:00:00Z\n"
_BROKEN = {
    "no start of the first round": ("0,2026-03-01T01:00:00Z\n", "line 1"),
    "a round is missing": (f"{_START}0,2026-03-01T01:00:00Z\n2,2026-03-01T02:00:00Z\n", "line 3"),
    "a round is there twice": (f"{_START}" + "0,2026-03-01T01:00:00Z\n" * 2, "line 3"),
    "rounds from 1": (f"{_START}1,2026-03-01T01:00:00Z\n", "line 2"),
    "no UTC offset": ("start,2026-03-01T00:00:00\n0,2026-03-01T01:00:00\n", "UTC"),
    "milliseconds": ("start,1772323200000\n0,1772326800000\n", "1970"),
    "minutes": ("start,0\n0,5\n", "1970"),
    "digits of dates": ("start,20260301\n0,20260302\n", "1970"),
    "dates and seconds": (f"{_START}0,1772326800\n", "line 2"),
    "nan": ("start,nan\n0,nan\n", "line 1"),
    "four fields": (f"0,{_START.strip()},1,2\n", "line 1"),
    "two widths": (f"{_START}0,2026-03-01T00:00:00Z,2026-03-01T01:00:00Z\n", "line 2"),
    "a heading further down": (f"{_START}0,2026-03-01T01:00:00Z\nround,end\n", "line 3"),
    "nothing": ("", "times.csv"),
    "no round": (_START, "times.csv"),
}


@pytest.mark.parametrize("what", _BROKEN)
def test_a_file_with_another_meaning_is_refused(what: str, tmp_path: pathlib.Path) -> None:
    text, named = _BROKEN[what]
    file = tmp_path / "times.csv"
    file.write_text(text)
    with refuses(named, error=LedgerError):
        RoundTimes.load(file, 48.0)


def test_no_file_and_no_text_are_refused(tmp_path: pathlib.Path) -> None:
    with refuses("nowhere.csv", error=LedgerError):
        RoundTimes.load(tmp_path / "nowhere.csv", 48.0)
    (tmp_path / "times.csv").write_bytes(b"\xff\xfe0\x00")
    with refuses("times.csv", error=LedgerError):
        RoundTimes.load(tmp_path / "times.csv", 48.0)


def _observed_by_devices(seed: int) -> tuple[RoundTimes, list[list[int]]]:
    """Rounds at random times, and devices that ask and upload whenever they may, by the reference.

    Their clocks differ by up to a minute from the server's, which the margin covers twice.
    """
    generator = np.random.default_rng(seed)
    number, hours = int(generator.integers(5, 80)), float(generator.uniform(3.0, 30.0))
    gaps = generator.choice([0.0, 0.0, 0.5, 4.0], number)
    lengths = generator.uniform(0.05, 2.5, number)
    ends = np.cumsum(gaps + lengths) * _HOUR
    starts = ends - lengths * _HOUR
    most = None if generator.random() < 0.5 else int(generator.integers(1, 5))
    policy = Policy(seconds=hours * _HOUR, tolerance=60.0, most=most)
    rounds: list[list[int]] = [[] for _ in range(4)]
    devices = [Device(-1.0)] * len(rounds)
    for index in range(number):
        for asked in np.sort(generator.uniform(starts[index], ends[index], 3)).tolist():
            for device in range(len(rounds)):
                request = Request("run", index, asked, 0.0, "token")
                clock = asked + generator.uniform(-60.0, 60.0)
                after = devices[device].ask(request, policy, clock)
                if after.job is not None and generator.random() < 0.9:
                    rounds[device].append(index)
                    after = after.upload()
                devices[device] = after.end(False)
    times = _exact(starts, ends, hours, clock_margin_minutes=2.0, max_participations=most)
    return times, rounds


def _observed_by_simulation(seed: int) -> tuple[RoundTimes, list[list[int]]]:
    """A population of ``simulate-participation``: hours, zones, and all that fails."""
    generator = np.random.default_rng(seed)
    models: list[Availability] = [
        Always(),
        Independent(float(generator.uniform(0.2, 1.0))),
        Diurnal(),
        Diurnal(utc_offsets=(-5.0,)),
    ]
    hours = float(generator.uniform(2.0, 60.0))
    most = None if generator.random() < 0.5 else int(generator.integers(1, 6))
    behaviour = DeviceBehaviour(
        availability=models[int(generator.integers(len(models)))],
        timer_hours=hours,
        over_selection=float(generator.uniform(1.0, 1.5)),
        dropout_probability=float(generator.uniform(0.0, 0.2)),
        upload_loss_probability=float(generator.uniform(0.0, 0.1)),
        history_loss_probability=float(generator.choice([0.0, 0.01])),
        round_minutes=float(generator.uniform(5.0, 60.0)),
        max_attempts=100,
    )
    population = DevicePopulation(400, MinSeparation(1, most), 6, behaviour, seed)
    starts, rounds = [], [list[int]() for _ in range(400)]
    for index in range(int(generator.integers(20, 120))):
        try:
            device_round = population.next_round()
        except TooFewEligibleClientsError:
            break
        starts.append(device_round.start_seconds)
        for device in device_round.cohort.tolist():
            rounds[device].append(index)
    begun = np.array(starts)
    times = _exact(begun, begun + behaviour.round_seconds, hours, max_participations=most)
    return times, rounds


def _check_never_better(seed: int) -> int | None:
    """Compares times with ids, and returns by how much the separation from times is lower."""
    observe = (_observed_by_devices, _observed_by_simulation)[seed % 2]
    times, rounds = observe(seed)
    if not times.num_rounds:
        return None
    by_times = times.participation()
    by_ids = guarantees.observed_participation(rounds, times.num_rounds)
    assert by_ids.max_participations <= by_times.max_participations
    if by_ids.separation is not None:
        assert by_times.separation is not None
        assert by_times.separation <= by_ids.separation
    schema = MinSeparation(4, 3)
    # Participations overlap within 4 rounds, and at any distance.
    for bands in (min(4, times.num_rounds), None):
        factorization = toeplitz(times.num_rounds, num_bands=bands, coefficients="square_root")
        plan = guarantees.planned(factorization, schema, 1.0, 1e-6)
        stated, true = (guarantees.observed(plan, each) for each in (by_times, by_ids))
        assert stated.epsilon >= true.epsilon - 1e-9
        assert stated.noise_multiplier <= true.noise_multiplier * (1.0 + 1e-12)
    if by_ids.separation is None or by_times.separation is None:
        return None
    return by_ids.separation - by_times.separation


def test_times_are_never_better_than_ids() -> None:
    assert any(_check_never_better(seed) is not None for seed in range(16))


@pytest.mark.long
def test_times_are_never_better_than_ids_of_many_populations() -> None:
    found = [_check_never_better(seed) for seed in range(200)]
    known = [each for each in found if each is not None]
    # They agree in some: no condition is stronger than it has to be.
    assert len(known) > 100
    assert min(known) == 0


def _rounds_of_ten_minutes(number: int, separation: int) -> RoundTimes:
    ends = 600.0 * np.arange(1, number + 1)
    return _exact(ends - 600.0, ends, 600.0 * (separation + 1) / _HOUR)


_PUBLISHED = [
    (1300, 400, 484, 3, 0.15),
    (2000, 1000, 1428, 2, 0.0144),
    (2000, 1000, 1132, 2, 0.0144),
]


@pytest.mark.parametrize(("number", "bands", "separation", "most", "rho"), _PUBLISHED)
def test_published_guarantees_follow_from_times(
    number: int, bands: int, separation: int, most: int, rho: float
) -> None:
    """Of models of Gboard, for another matrix of as many bands: theirs cannot be had.

    With no more bands than the separation, k participations have the root of k of the sensitivity
    of one, so that rho is k times that of one, whatever the entries are.
    """
    times = _rounds_of_ten_minutes(number, separation)
    factorization = toeplitz(
        number, num_bands=bands, coefficients="square_root", equal_column_norms=True
    )
    found = times.participation()
    assert (found.separation, found.max_participations) == (separation, most)
    once = Mechanism(factorization, SingleParticipation(), np.sqrt(0.5 * most / rho))
    guarantee = once.observed(times).guarantee(1e-10)
    assert guarantee.sensitivity.is_exact
    assert guarantee.rho == pytest.approx(rho)


@pytest.mark.parametrize(("rho", "epsilon"), [(0.15, 3.42), (0.0144, 0.994)])
def test_published_epsilons_follow_from_rho(rho: float, epsilon: float) -> None:
    """Within the last digit that was printed of either."""
    digit = 0.5 * 10.0 ** -len(f"{rho}".partition(".")[2])
    least, most = (
        accounting.epsilon(accounting.noise_multiplier_of_zcdp(each), 1e-10)
        for each in (rho - digit, rho + digit)
    )
    assert least - 0.005 <= epsilon <= most + 0.005


@pytest.mark.long
@pytest.mark.parametrize(("number", "bands", "separation", "most", "rho"), _PUBLISHED)
def test_a_blt_in_their_place_has_a_little_more(
    number: int, bands: int, separation: int, most: int, rho: float
) -> None:
    """Its participations overlap at any distance: by as much as its sensitivity says."""
    factorization = blt(number, 4, participation=MinSeparation(bands, most))
    once = Mechanism(factorization, SingleParticipation(), np.sqrt(0.5 * most / rho))
    times = _rounds_of_ten_minutes(number, separation)
    guarantee = once.observed(times).guarantee(1e-10)
    ratio = guarantee.sensitivity / factorization.sensitivity(SingleParticipation()).value
    assert guarantee.rho == pytest.approx(rho * ratio**2 / most)
    assert rho < guarantee.rho < 1.04 * rho


def test_a_mechanism_takes_times_in_the_place_of_a_ledger() -> None:
    """What follows is that of a ledger of the closest and the most participations."""
    schema = MinSeparation(4, 3)
    mechanism = Mechanism(banded(12, 4), schema, 1.0)
    hour = np.arange(12.0) * _HOUR
    times = _exact(hour, hour + 0.5 * _HOUR, 4.5)
    observed = mechanism.observed(times)
    ledger = Ledger(("ada", "bo"), (np.array([0, 5, 10]), np.array([1, 5])), 12)
    by_ids = mechanism.observed(ledger)
    assert observed.participation.separation == 4
    assert (observed.ledger, observed.keeps_participation) == (None, True)
    assert (observed.worst_client(1e-6), observed.num_alike_names) == (None, 0)
    assert observed.guarantee(1e-6).epsilon == by_ids.guarantee(1e-6).epsilon
    facts = RunFacts(
        mechanism="banded",
        population=100,
        clients_per_round=5,
        clip=1.0,
        public_data="none",
        enforcement="Timers on devices.",
    )
    statement = observed.statement(facts, 1e-6)
    assert "at least 4 rounds apart" in statement.to_markdown()
    assert observed.participation.conditions is not None
    assert observed.participation.conditions in statement.to_markdown()
    told = statement.to_dict()["participation"]["observed"]
    assert (told["num_clients"], told["conditions"]) == (None, observed.participation.conditions)
    assert by_ids.participation.to_dict().get("conditions") is None
    # A shorter timer: the plan is not shown, and what is stated is worse.
    sooner = mechanism.observed(_exact(hour, hour + 0.5 * _HOUR, 3.0))
    assert sooner.keeps_participation is False
    assert sooner.guarantee(1e-6).epsilon > mechanism.guarantee(1e-6).epsilon
    assert sooner.worst_case(1e-6).epsilon >= sooner.guarantee(1e-6).epsilon
    with refuses("12", "11"):
        Mechanism(banded(11, 4), schema, 1.0).observed(times)
    scheme = PoissonSampling(num_rounds=12, num_bands=4, population=40, clients_per_round=2)
    with refuses("poisson"):
        Mechanism(banded(12, 4), scheme, 1.0).observed(times)
