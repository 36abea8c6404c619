"""simulate-participation as scripts and people use it."""

import datetime
import functools
import itertools
import pathlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mf_aggregators as mfa
from mf_aggregators.kernel.ledger import ObservedParticipation
from mf_aggregators.kernel.numbers import rounded_up
from mf_aggregators.participation import FixedEpochOrder, MinSeparation, PoissonSampling
from mf_aggregators.privacy import ledgers
from mf_aggregators.privacy.ledgers import RoundTimes
from simulations import simulate_participation
from simulations.devices.device_behaviour import DeviceBehaviour, Diurnal
from simulations.devices.device_populations import DevicePopulation
from simulations.runs.run_directory import ParticipationLedger
from tests import console_commands
from tests.mf_aggregators.small_mechanisms import plan_of

_SETTING = ("--population=300", "--clients_per_round=10", "--num_rounds=40")
_WALL_CLOCK = ("--timer=wall_clock", "--timer_hours=2")


_call = functools.partial(console_commands.call, "simulate-participation")


def _fields(*arguments: str) -> dict[str, Any]:
    return _call(*_SETTING, *arguments, "--format=json").fields()


@given(st.lists(st.sets(st.integers(0, 10**7), max_size=6) | st.sets(st.integers(0, 5))))
def test_a_summary_is_that_of_each_device(cohorts: list[set[int]]) -> None:
    observed, fields = simulate_participation.summarise(
        [np.array(sorted(cohort), np.int64) for cohort in cohorts]
    )
    rounds_of: dict[int, list[int]] = {}
    for index, cohort in enumerate(cohorts):
        for device in cohort:
            rounds_of.setdefault(device, []).append(index)
    expected = ObservedParticipation.of(list(rounds_of.values()), len(cohorts))
    assert observed == expected
    distances = [b - a for rounds in rounds_of.values() for a, b in itertools.pairwise(rounds)]
    counts = [len(rounds) for rounds in rounds_of.values()]
    assert fields["participations_mean"] == (np.mean(counts) if counts else 0.0)
    median, percentile = None, None
    if distances:
        median, percentile = np.median(distances), np.percentile(distances, 1)
    assert fields["separation_median"] == median
    assert fields["separation_percentile_1"] == percentile


def test_the_numbers_are_those_of_the_rounds(tmp_path: pathlib.Path) -> None:
    ledger_file = tmp_path / "ledger.npz"
    of_server: dict[str, Any] = {
        "over_selection": 1.5,
        "dropout_probability": 0.1,
        "upload_loss_probability": 0.05,
        "late_upload_probability": 0.04,
        "minimum_uploads": 8,
        "abandonment_probability": 0.03,
        "history_loss_probability": 0.001,
        "round_minutes": 30.0,
        "retry_minutes": 45.0,
    }
    of_night: dict[str, Any] = {
        "window_start_hour": 21.5,
        "window_spread_hours": 1.0,
        "shortest_window_hours": 5.0,
        "longest_window_hours": 9.0,
        "nightly_probability": 0.9,
    }
    fields = _fields(
        *("--separation=9", "--max_participations=4", "--seed=3", f"--output={ledger_file}"),
        *("--availability=diurnal", "--utc_offsets=-5,1", "--utc_weights=3,1"),
        *(f"--{name}={value}" for name, value in {**of_server, **of_night}.items()),
    )
    nights = Diurnal(utc_offsets=(-5.0, 1.0), utc_weights=(3.0, 1.0), **of_night)
    behaviour = DeviceBehaviour(nights, **of_server)
    population = DevicePopulation(300, MinSeparation(9, 4), 10, behaviour, 3)
    device_rounds = [population.next_round() for _ in range(40)]
    ledger = ParticipationLedger.load(ledger_file)
    assert len(ledger.client_ids) == 300
    for found, expected in zip(ledger.cohorts, device_rounds, strict=True):
        np.testing.assert_array_equal(found, expected.cohort)
    for field, name in (
        ("attempts", "attempts"),
        ("selected", "num_selected"),
        ("dropped_out", "num_dropped_out"),
        ("uploads_lost", "num_uploads_lost"),
        ("uploads_late", "num_uploads_late"),
        ("discarded", "num_discarded"),
        ("abandoned_attempts", "num_abandoned"),
    ):
        assert fields[field] == sum(getattr(found, name) for found in device_rounds)
        assert fields[field] > 0
    assert fields["summed_min"] == min(len(found.cohort) for found in device_rounds)
    for field in ("eligible", "available"):
        numbers = [getattr(found, f"num_{field}") for found in device_rounds]
        assert fields[f"{field}_min"] == min(numbers)
        assert fields[f"{field}_mean"] == np.mean(numbers)
    assert fields["most_attempts"] == max(found.attempts for found in device_rounds)
    assert fields["most_attempts"] > 1
    assert fields["days"] == population.seconds / 86400.0
    by_hour: dict[int, list[int]] = {}
    for one in device_rounds:
        by_hour.setdefault(int(one.start_seconds / 3600.0) % 24, []).append(one.num_available)
    assert fields["available_by_hour"] == [
        np.mean(by_hour[hour]) if hour in by_hour else None for hour in range(24)
    ]
    record = ledgers.load(ledger_file, 40)
    observed = ObservedParticipation.of(record.rounds_of_clients, 40)
    assert fields["realised_separation"] == observed.separation
    assert fields["realised_separation"] >= 9
    assert fields["most_participations"] == observed.max_participations <= 4
    assert fields["num_clients"] == observed.num_clients
    assert fields["keeps_plan"]
    assert fields["stopped"] is None
    assert "planned_epsilon" not in fields


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("checkpoint") / "banded"
    factorization = mfa.factorizations.banded(
        mfa.workloads.prefix_sum(50), 8, participation=MinSeparation(8, 4)
    )
    mfa.checkpoints.save(factorization, directory)
    return str(directory)


@pytest.mark.parametrize(
    ("arguments", "keeps_plan"),
    [
        ((), True),
        (("--history_loss_probability=0.05", "--after_history_loss=rejoin"), False),
        (("--broken_timers=0", "--history_loss_probability=0.05"), True),
        (("--broken_timers=0.03",), False),
        (("--broken_timers=1", "--timer=wall_clock", "--timer_hours=0.9"), False),
        (("--timer=wall_clock", "--timer_hours=0.9"), True),
        (("--timer=wall_clock", "--timer_hours=0.2"), False),
    ],
)
def test_the_guarantee_is_that_of_what_was_observed(
    tmp_path: pathlib.Path, checkpoint: str, arguments: tuple[str, ...], keeps_plan: bool
) -> None:
    """The schema is the checkpoint's; devices that forget and rejoin break it, and it shows."""
    setting = ["--population=300", "--clients_per_round=10", "--num_rounds=20", "--seed=2"]
    privacy = [f"--checkpoint={checkpoint}", "--noise_multiplier=0.8", "--delta=1e-5"]
    output = f"--output={tmp_path / 'ledger.npz'}"
    fields = _call(*setting, *privacy, *arguments, output, "--format=json").fields()
    assert fields["participation"] == str(MinSeparation(8, 4))
    record = ledgers.load(tmp_path / "ledger.npz", 20)
    observed = ObservedParticipation.of(record.rounds_of_clients, 20)
    factorization = mfa.checkpoints.load(checkpoint)
    plan = plan_of(factorization, MinSeparation(8, 4), 0.8, 1e-5)
    guarantee = observed.guarantee(plan)
    assert fields["rounds"] == 20
    assert fields["keeps_plan"] == keeps_plan
    assert fields["planned_epsilon"] == plan.epsilon
    assert fields["realised_epsilon"] == guarantee.epsilon
    assert fields["realised_sensitivity"] == guarantee.sensitivity
    broke = [
        client
        for client, rounds in zip(record.client_ids, record.rounds_of_clients, strict=True)
        if len(rounds) > 4 or np.min(np.diff(rounds), initial=8) < 8
    ]
    assert fields["clients_beyond_plan"] == len(broke)
    behaviour = DeviceBehaviour(broken_timers={9: 0.03, 300: 1.0}.get(fields["broken_timers"], 0.0))
    broken = DevicePopulation(300, MinSeparation(8, 4), 10, behaviour, 2).broken
    assert fields["broken_timers"] == len(broken)
    if len(broken):
        assert broke
        assert {int(client) for client in broke} <= set(broken.tolist())
    text = _call(*setting, *privacy, *arguments).done()
    if keeps_plan:
        assert fields["widened_epsilon"] is None
        assert f"The plan was kept: ({rounded_up(plan.epsilon)}, 1e-05)-DP" in text
    else:
        worst_case = observed.worst_case(plan).epsilon
        assert fields["widened_epsilon"] == worst_case > plan.epsilon
        assert f"\n\nWARNING: the schema of the plan ({MinSeparation(8, 4)}) is broken" in text
        assert f"need not hold for the {len(broke)} of {fields['num_clients']} devices" in text
        assert "The plan was kept" not in text
        assert f"({rounded_up(worst_case)}, 1e-05)-DP" in text
    assert ("do not enforce a separation" in text) == ("--timer=wall_clock" in arguments)


def test_a_run_that_ends_early_reports_its_rounds() -> None:
    arguments = ("--separation=9", "--max_participations=1", "--format=json")
    ended = _call(*_SETTING, *arguments)
    fields = ended.fields(2)
    assert fields["rounds"] == 30
    assert fields["realised_separation"] is None
    assert fields["most_participations"] == 1
    assert "round 31 needs 10 clients" in fields["stopped"]
    assert "simulate-participation: stopped: round 31 needs 10 clients" in ended.errors
    # Without any round there is nothing to report.
    _call("--population=9", "--clients_per_round=10", "--separation=1", "--num_rounds=2").refused(
        "round 1 needs 10 clients"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--separation=2", "--margin=1"), "--margin must be below 1, found 1"),
        ((), "--timer=rounds needs --separation"),
        (("--separation=2", "--after_history_loss=rejoin"), "--history_loss_probability"),
        (
            (
                *("--separation=2", "--availability=trace", "--trace=x.npz"),
                *("--output=./x.npz", "--overwrite"),
            ),
            "--output would replace x.npz, which --trace reads",
        ),
        (
            ("--separation=2", "--availability=independent"),
            "--availability=independent needs --available_probability",
        ),
        (
            ("--separation=2", "--availability=diurnal", "--utc_offsets=1,x"),
            "take numbers separated by commas, found 1,x",
        ),
        (
            ("--separation=2", "--population=2000000", "--output=x.npz"),
            "--population must be at most",
        ),
    ],
)
def test_bad_flags_are_refused_in_one_line(arguments: tuple[str, ...], message: str) -> None:
    line = _call(*_SETTING, *arguments).refused(message)
    assert line.startswith("simulate-participation:")


def test_round_times_are_written_as_reports_read_them(tmp_path: pathlib.Path) -> None:
    """Of the attempts that succeeded; and no device came sooner than times and timers allow."""
    file, ledger = tmp_path / "times.csv", tmp_path / "ledger.npz"
    trouble = ("--abandonment_probability=0.3", "--retry_minutes=7", "--round_minutes=20")
    outputs = (f"--write_round_times={file}", f"--output={ledger}")
    fields = _fields(*_WALL_CLOCK, *trouble, *outputs, "--seeds=1")
    assert fields["abandoned_attempts"] > 0
    times = RoundTimes.load(file, timer_hours=2.0, clock_drift=0.0, clock_margin_minutes=0.0)
    assert times.num_rounds == fields["rounds"] == 40
    first = datetime.datetime(2026, 1, 1, tzinfo=datetime.timezone.utc).timestamp()
    behaviour = DeviceBehaviour(
        timer_hours=2.0,
        abandonment_probability=0.3,
        retry_minutes=7.0,
        round_minutes=20.0,
    )
    population = DevicePopulation(300, MinSeparation(1), 10, behaviour, 0)
    starts = [population.next_round().start_seconds for _ in range(40)]
    assert times.starts - first == pytest.approx(starts, abs=1e-5)
    assert times.ends - times.starts == pytest.approx([1200.0] * 40, abs=1e-5)
    possible = times.participation()
    assert possible.separation <= fields["realised_separation"]
    assert possible.max_participations >= fields["most_participations"]
    # As it is there, it is not replaced.
    _call(*_SETTING, *_WALL_CLOCK, outputs[0]).refused("--write_round_times")


def test_a_saved_mechanism_has_its_noise_and_its_participation(
    tmp_path: pathlib.Path, checkpoint: str
) -> None:
    matrix, saved = mfa.checkpoints.load(checkpoint), str(tmp_path / "saved")
    mfa.Mechanism(matrix, MinSeparation(8, 4), 0.8).save(saved)
    of_matrix = (f"--checkpoint={checkpoint}", "--noise_multiplier=0.8")
    expected = _fields(*of_matrix)
    found = _fields(f"--checkpoint={saved}")
    repeated = ("--separation=8", "--max_participations=4", "--noise_multiplier=0.8")
    for each in (found, _fields(f"--checkpoint={saved}", *repeated)):
        assert each["planned_epsilon"] == mfa.accounting.epsilon(0.8, 1e-6)
        assert {**each, "seconds": 0} == {**expected, "seconds": 0}
    for flag in ("--separation=7", "--separation=9", "--noise_multiplier=0.9", "--target_rho=1"):
        _call(*_SETTING, f"--checkpoint={saved}", flag).refused("is a Mechanism")
    for participation in (FixedEpochOrder(4, 8), PoissonSampling(50, 8, 300, 10)):
        mfa.Mechanism(matrix, participation, 0.8).save(saved)
        _call(*_SETTING, f"--checkpoint={saved}").refused(f" is for {participation}")


def test_without_a_plan_none_is_kept_and_several_seeds_suggest_one() -> None:
    timer = ("--timer=wall_clock", "--timer_hours=2", "--seed=3", "--seeds=4")
    fields = _fields(*timer)
    assert fields["keeps_plan"] is None
    assert fields["participation"] is None
    assert "planned_epsilon" not in fields
    alone = [_fields(*timer[:2], f"--seed={seed}", "--seeds=1") for seed in range(3, 7)]
    one_by_one = [each["realised_separation"] for each in alone]
    assert fields["separations_of_seeds"] == one_by_one
    most = [each["most_participations"] for each in alone]
    assert fields["participations_of_seeds"] == most
    fitting = MinSeparation(fields["suggested_separation"]).most_participations(40)
    assert fields["suggested_max_participations"] == min(max(most) + 1, fitting)
    suggested = fields["suggested_separation"]
    assert 1 <= suggested < min(one_by_one)
    assert suggested <= 0.9 * min(one_by_one)
    assert min(one_by_one) - suggested >= max(one_by_one) - min(one_by_one)
    # A plan for it is kept, also with a count that devices do not keep.
    planned = _fields(*timer[:3], f"--separation={suggested}")
    assert planned["most_participations"] <= fields["suggested_max_participations"]
    assert planned["keeps_plan"] is True
    assert "suggested_separation" not in planned

    text = _call(*_SETTING, *timer).done()
    assert "There is no plan to keep or to break." in text
    assert f"For a plan: {fields['rule']}" in text
    assert fields["rule"].startswith(f"--separation={suggested} is")
    assert "The plan was kept" not in text


@pytest.mark.parametrize("hours", ["1.5", "3", "9"])
def test_a_suggestion_is_what_the_times_of_rounds_show(hours: str, tmp_path: pathlib.Path) -> None:
    file, timer = tmp_path / "times.csv", ("--timer=wall_clock", f"--timer_hours={hours}")
    rounds = ("--round_minutes=40", "--num_rounds=40", f"--write_round_times={file}")
    fields = _fields(*timer, *rounds)
    shown = RoundTimes.load(file, timer_hours=float(hours)).participation()
    assert 1 <= fields["suggested_separation"] <= (shown.separation or 40)


@pytest.mark.parametrize(
    ("separations", "counts", "num_rounds", "margin", "expected"),
    [
        ([100, 101], [3, 2], 1000, 0.1, (90, 4)),
        # They differ by more than the share.
        ([100, 130], [3, 2], 1000, 0.1, (70, 4)),
        # Times of rounds show 95.
        ([100, 100], [3, 3], 1000, 0.0, (95, 3)),
        # No more than fit: rounds 0, 90 and 180.
        ([100, 100], [9, 9], 181, 0.1, (90, 3)),
        # Something is always suggested.
        ([1, 9], [1, 1], 20, 0.1, (1, 2)),
        # No simulation had all rounds.
        ([5, 5], [], 60, 0.0, (5, 12)),
    ],
)
def test_a_suggestion_follows_the_rule(
    separations: list[int],
    counts: list[int],
    num_rounds: int,
    margin: float,
    expected: tuple[int, int],
) -> None:
    found = simulate_participation.suggested_schema(
        separations, counts, num_rounds, margin, shown=95
    )
    assert found == expected
