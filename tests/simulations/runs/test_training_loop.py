"""Rounds in TFF: cohorts under timers, and runs that resume where they stopped."""

import collections
import dataclasses
import pathlib
import shutil
import types
from typing import Any, TypeAlias

import numpy as np
import pytest
import tensorflow_federated as tff

import mf_aggregators as mfa
from mf_aggregators.participation import (
    MinSeparation,
    Participation,
    PoissonSampling,
    SingleParticipation,
)
from mf_aggregators.privacy import guarantees
from mf_aggregators.privacy.guarantees import StoppingRule
from mf_aggregators.tff.client_sums import UnnoisedSumError
from mf_aggregators.tff.processes import StopRequest
from simulations.devices.device_behaviour import DeviceBehaviour, Independent
from simulations.devices.device_populations import (
    DevicePopulation,
    DeviceRound,
)
from simulations.runs import training_loop
from simulations.runs.run_directory import LedgerError, ParticipationLedger
from simulations.runs.training_loop import FederatedRun, StoppedByRuleError
from tests.refusals import refuses
from tests.simulations import linear_run

_NUM_ROUNDS = 6
_WholeRun: TypeAlias = tuple[list[np.ndarray], ParticipationLedger]


@pytest.fixture(scope="module")
def process() -> Any:
    """With noise for clients that return after two rounds, where timers mostly ask for three."""
    return linear_run.learning_process(_NUM_ROUNDS, participation=MinSeparation(2))


def _run(process: Any, **changes: Any) -> FederatedRun:
    return linear_run.federated_run(process, _NUM_ROUNDS, **changes)


@pytest.fixture(scope="module")
def whole_directory(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Where the whole run is."""
    return tmp_path_factory.mktemp("whole")


@pytest.fixture(scope="module")
def whole_run(process: Any, whole_directory: pathlib.Path) -> _WholeRun:
    """The models and the ledger of a run that nothing happens to."""
    return linear_run.finish(_run(process), whole_directory)


def _cohorts(ledger: ParticipationLedger) -> list[list[int]]:
    return [list(cohort) for cohort in ledger.cohorts]


@pytest.mark.parametrize(
    "stops", [[2, 1], *(pytest.param([1] * count, marks=pytest.mark.long) for count in (1, 5))]
)
def test_a_run_that_was_stopped_and_resumed_equals_one_that_was_not(
    process: Any,
    whole_run: _WholeRun,
    tmp_path: pathlib.Path,
    stops: list[int],
) -> None:
    models, ledger = whole_run
    parts: list[np.ndarray] = []
    for at_most in [*stops, None]:
        more, resumed = linear_run.finish(_run(process), tmp_path / "parts", at_most)
        parts.extend(more)
    np.testing.assert_array_equal(np.array(parts), np.array(models))
    assert _cohorts(resumed) == _cohorts(ledger)


def test_a_round_whose_state_was_lost_is_run_again_as_it_was(
    process: Any,
    whole_run: _WholeRun,
    tmp_path: pathlib.Path,
) -> None:
    """Killed after the ledger and before the state: the same cohort, data and noise."""
    models, whole = whole_run
    linear_run.finish(_run(process), tmp_path / "cut", at_most=2)
    # A third round in the ledger, as if the process had ended before its state was saved.
    whole.first_rounds(3).save(tmp_path / "cut" / "ledger.npz")
    # What TFF leaves of a state that was being saved.
    (tmp_path / "cut" / "states" / "round_3_temp1234").mkdir()
    rest, resumed = linear_run.finish(_run(process), tmp_path / "cut")
    assert not list((tmp_path / "cut" / "states").glob("*temp*"))
    np.testing.assert_array_equal(np.array(rest), np.array(models[2:]))
    assert _cohorts(resumed) == _cohorts(whole)


def _went_back(run: FederatedRun, directory: pathlib.Path) -> ParticipationLedger:
    """Four rounds of a run whose states are those after two again; returns its ledger."""
    linear_run.finish(run, directory, at_most=2)
    shutil.copytree(directory / "states", directory / "copy")
    _, ledger = linear_run.finish(run, directory, at_most=2)
    shutil.rmtree(directory / "states")
    (directory / "copy").rename(directory / "states")
    assert ledger.num_rounds == 4
    return ledger


@pytest.mark.long
def test_an_older_state_runs_the_same_rounds_again_and_the_ledger_keeps_all(
    process: Any,
    whole_run: _WholeRun,
    tmp_path: pathlib.Path,
) -> None:
    models, whole = whole_run
    _went_back(_run(process), tmp_path / "back")
    store = linear_run.store_of(tmp_path / "back")
    progress = training_loop.start(_run(process), store)
    assert progress.num_rounds == 2
    assert _cohorts(progress.ledger) == _cohorts(whole.first_rounds(4))

    first, after_first = linear_run.finish(_run(process), tmp_path / "back", at_most=1)
    # Released rounds stay in the ledger while they are run again, on disk as well.
    assert _cohorts(after_first) == _cohorts(whole.first_rounds(4))
    on_disk = ParticipationLedger.load(tmp_path / "back" / "ledger.npz")
    assert _cohorts(on_disk) == _cohorts(whole.first_rounds(4))

    rest, resumed = linear_run.finish(_run(process), tmp_path / "back")
    np.testing.assert_array_equal(np.array([*first, *rest]), np.array(models[2:]))
    assert _cohorts(resumed) == _cohorts(whole)


@pytest.mark.long
@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 2},
        pytest.param({"clients_per_round": 2}, marks=pytest.mark.long),
        pytest.param({"participation": MinSeparation(5)}, marks=pytest.mark.long),
    ],
)
def test_an_older_state_is_refused_if_other_clients_would_be_drawn(
    process: Any, tmp_path: pathlib.Path, changes: dict[str, Any]
) -> None:
    # A separation of two leaves six of nine clients to draw three from.
    participation = MinSeparation(2)
    ledger = _went_back(_run(process, participation=participation), tmp_path)
    with refuses("round 3", error=LedgerError):
        linear_run.finish(_run(process, **{"participation": participation, **changes}), tmp_path)
    # Nothing was released or forgotten.
    assert not (tmp_path / "states" / "round_3").exists()
    assert _cohorts(ParticipationLedger.load(tmp_path / "ledger.npz")) == _cohorts(ledger)


@pytest.mark.long
@pytest.mark.parametrize("num_rounds", [pytest.param(3, marks=pytest.mark.long), 4])
def test_the_ledger_of_another_run_is_refused(
    process: Any, tmp_path: pathlib.Path, num_rounds: int
) -> None:
    """It may be of the same population, and as long or longer."""
    linear_run.finish(_run(process), tmp_path / "run", at_most=3)
    _, other = linear_run.finish(_run(process, seed=2), tmp_path / "other", at_most=num_rounds)
    own = ParticipationLedger.load(tmp_path / "run" / "ledger.npz")
    assert _cohorts(own) != _cohorts(other.first_rounds(3))
    other.first_rounds(num_rounds).save(tmp_path / "run" / "ledger.npz")
    with refuses("state", error=LedgerError):
        linear_run.finish(_run(process), tmp_path / "run")
    own.save(tmp_path / "run" / "ledger.npz")
    linear_run.finish(_run(process), tmp_path / "run", at_most=1)


def test_a_later_cohort_that_was_altered_stops_the_run(
    process: Any, tmp_path: pathlib.Path
) -> None:
    ledger = _went_back(_run(process), tmp_path)
    absent = next(client for client in range(9) if client not in ledger.cohorts[3])
    altered = ledger.first_rounds(3).with_round(np.sort([*ledger.cohorts[3][1:], absent]))
    altered.save(tmp_path / "ledger.npz")
    with refuses("round 4", error=LedgerError):
        linear_run.finish(_run(process), tmp_path)
    assert not (tmp_path / "states" / "round_4").exists()


@pytest.mark.long
def test_a_rule_ends_a_run_before_its_limit_and_again_when_it_is_started_again(
    process: Any, whole_run: _WholeRun, tmp_path: pathlib.Path
) -> None:
    """Nine clients in cohorts of three: the fourth round is a second participation."""
    factorization = mfa.factorizations.banded(mfa.workloads.prefix_sum(_NUM_ROUNDS), 3)
    plan = guarantees.planned(factorization, MinSeparation(3), 1.0, 1e-5)
    # Of three bands, three rounds apart, two participations change by the square root of two.
    one, two = (mfa.accounting.epsilon((2.0 / k) ** 0.5, 1e-5) for k in (1, 2))
    rule = StoppingRule(plan, 0.5 * (one + two))
    models, whole = whole_run
    for _ in range(2):
        with refuses("3 rounds", "round 4", error=StoppedByRuleError):
            linear_run.finish(_run(process, stopping_rule=rule), tmp_path)
        ledger = ParticipationLedger.load(tmp_path / "ledger.npz")
        assert _cohorts(ledger) == _cohorts(whole.first_rounds(3))
    # Its rounds are those of the run without a rule, which goes on where it ended.
    rest, _ = linear_run.finish(_run(process), tmp_path)
    np.testing.assert_array_equal(np.array(rest), np.array(models[3:]))


def test_a_process_that_releases_its_updates_a_second_time_is_refused(process: Any) -> None:
    def without_noise(updates: Any) -> Any:
        return collections.OrderedDict(again=tff.federated_sum(updates))

    aggregator = mfa.mf_dp_aggregator(
        mfa.factorizations.identity(_NUM_ROUNDS),
        participation=MinSeparation(3),
        noise_multiplier=1.0,
        clip_norm=1.0,
        clients_per_round=3,
    )
    measured = tff.aggregators.add_measurements(aggregator, client_measurement_fn=without_noise)
    doubled = measured.create(tff.TensorType(np.float32, [2]))
    with pytest.raises(UnnoisedSumError):
        _run(types.SimpleNamespace(next=doubled.next, initialize=tuple))


def test_the_noise_seed_is_saved_before_the_first_round(
    process: Any, tmp_path: pathlib.Path
) -> None:
    store = linear_run.store_of(tmp_path)
    first = training_loop.start(_run(process), store).state
    again = training_loop.start(_run(process), store).state

    def seed(state: Any) -> list[int]:
        return list(state.aggregator.query_state.numerator_state.seed)

    assert seed(first) == seed(again)
    assert (tmp_path / "states" / "round_0").is_dir()


def test_a_ledger_that_does_not_fit_stops_the_run(process: Any, tmp_path: pathlib.Path) -> None:
    linear_run.finish(_run(process), tmp_path, at_most=2)
    ledger = ParticipationLedger.load(tmp_path / "ledger.npz")
    ledger.first_rounds(1).save(tmp_path / "ledger.npz")
    with refuses("new run", error=LedgerError):
        linear_run.finish(_run(process), tmp_path)
    ledger.save(tmp_path / "ledger.npz")
    with refuses("new run", error=LedgerError):
        linear_run.finish(_run(process, client_ids=(*linear_run.CLIENTS, "another")), tmp_path)


def test_lost_states_are_never_replaced_by_fresh_noise(
    process: Any, tmp_path: pathlib.Path
) -> None:
    linear_run.finish(_run(process), tmp_path, at_most=2)
    shutil.rmtree(tmp_path / "states")
    with refuses("2 released rounds", error=LedgerError):
        linear_run.finish(_run(process), tmp_path)
    assert ParticipationLedger.load(tmp_path / "ledger.npz").num_rounds == 2


# Three of nine clients are needed, and two are enough at the end of a round.
_DISTURBED = DeviceBehaviour(
    Independent(0.8),
    over_selection=1.4,
    dropout_probability=0.1,
    upload_loss_probability=0.05,
    late_upload_probability=0.1,
    minimum_uploads=2,
    abandonment_probability=0.2,
    history_loss_probability=0.03,
)
_BY_CLOCK = DeviceBehaviour(
    Independent(0.8),
    timer_hours=1000.0 / 3600.0,
    over_selection=1.4,
    dropout_probability=0.1,
    upload_loss_probability=0.1,
    history_loss_probability=0.1,
)


def _disturbed_run(process: Any, **changes: Any) -> FederatedRun:
    # With this seed the timers leave enough of the nine clients in all rounds.
    arguments: dict[str, Any] = {
        "behaviour": _DISTURBED,
        "participation": MinSeparation(2),
        "seed": 4,
    }
    return _run(process, **{**arguments, **changes})


@pytest.mark.long_cases(1)
@pytest.mark.long
@pytest.mark.parametrize("behaviour", [_DISTURBED, pytest.param(_BY_CLOCK, marks=pytest.mark.long)])
def test_devices_of_a_resumed_run_do_what_they_did_without_a_pause(
    process: Any, tmp_path: pathlib.Path, behaviour: DeviceBehaviour
) -> None:
    run = _disturbed_run(process, behaviour=behaviour)
    population = DevicePopulation(9, MinSeparation(2), 3, behaviour, run.seed)
    expected: list[DeviceRound] = []
    while len(expected) < _NUM_ROUNDS:
        expected.append(population.next_round())
    # The test is of rounds that the cohorts before them do not determine.
    assert any(found.num_selected > 3 for found in expected)
    models, ledger = linear_run.finish(run, tmp_path / "whole")
    assert _cohorts(ledger) == [list(found.cohort) for found in expected]

    store = linear_run.store_of(tmp_path / "parts")
    parts: list[np.ndarray] = []
    for at_most in (1, 2, None):
        stop = StopRequest()
        progress = training_loop.start(run, store)
        finished_rounds = training_loop.rounds(run, store, progress, stop)
        for number, finished in enumerate(finished_rounds, 1):
            parts.append(linear_run.weights_of(process, finished.state))
            found, planned = finished.devices, expected[finished.index]
            assert found is not None
            assert found.start_seconds == planned.start_seconds
            assert found.num_selected == planned.num_selected
            assert finished.num_eligible == found.num_eligible == planned.num_eligible
            stop.is_set = number == at_most
    np.testing.assert_array_equal(np.array(parts), np.array(models))
    on_disk = ParticipationLedger.load(tmp_path / "parts" / "ledger.npz")
    assert _cohorts(on_disk) == _cohorts(ledger)


def test_a_run_whose_flags_were_changed_repeats_its_rounds_as_they_were(
    process: Any, tmp_path: pathlib.Path
) -> None:
    """From an older state as well: rounds before the change have the cohorts of their own flags."""
    first = _run(process)
    linear_run.finish(first, tmp_path, at_most=2)
    shutil.copytree(tmp_path / "states", tmp_path / "older")
    changed = dataclasses.replace(
        first,
        behaviour=DeviceBehaviour(over_selection=1.5, minimum_uploads=1),
        earlier_behaviours={2: first.behaviour},
    )
    linear_run.finish(changed, tmp_path, at_most=1)
    again = dataclasses.replace(
        changed,
        behaviour=DeviceBehaviour(minimum_uploads=2),
        earlier_behaviours={3: changed.behaviour, 2: first.behaviour},
    )
    models, ledger = linear_run.finish(again, tmp_path)
    shutil.rmtree(tmp_path / "states")
    (tmp_path / "older").rename(tmp_path / "states")
    repeated, of_repeated = linear_run.finish(again, tmp_path)
    np.testing.assert_array_equal(repeated[-len(models) :], models)
    assert _cohorts(of_repeated) == _cohorts(ledger)
    # Without what was before, the rounds cannot be those of the ledger.
    with refuses("round 1", error=LedgerError):
        linear_run.finish(dataclasses.replace(again, earlier_behaviours={}), tmp_path)


def test_an_attempt_that_was_abandoned_uses_no_row_of_noise(
    process: Any, tmp_path: pathlib.Path
) -> None:
    """The models are those of a server that never knew of it, with the same row for each round."""
    run = _disturbed_run(process)
    store = linear_run.store_of(tmp_path)
    found = list(training_loop.rounds(run, store, training_loop.start(run, store), StopRequest()))
    assert sum(each.devices.num_abandoned for each in found if each.devices) == 2
    assert {len(cohort) for cohort in found[-1].ledger.cohorts} == {2, 3}
    state = run.initial_state
    for number, each in enumerate(found, 1):
        data = [
            run.client_dataset(linear_run.CLIENTS[one], each.index)
            for one in each.ledger.cohorts[-1]
        ]
        state = process.next(state, data).state
        expected = linear_run.weights_of(process, state)
        np.testing.assert_array_equal(linear_run.weights_of(process, each.state), expected)
        of_query = each.metrics["aggregator"]["dp_query_metrics"]
        assert of_query["rounds_released"] == each.ledger.num_rounds == number
    summed = guarantees.observed_participation(found[-1].ledger.rounds_of_clients(), _NUM_ROUNDS)
    assert guarantees.keeps_plan(run.participation, summed)


@pytest.mark.short_cases(1)
@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 1},
        {"behaviour": DeviceBehaviour(Independent(0.3))},
        {"behaviour": DeviceBehaviour(dropout_probability=0.999, max_attempts=1)},
    ],
)
def test_other_devices_do_not_go_on_with_a_run(
    process: Any, tmp_path: pathlib.Path, changes: dict[str, Any]
) -> None:
    """What they remember of the rounds before is not known."""
    linear_run.finish(_disturbed_run(process), tmp_path, at_most=2)
    with refuses("round 1", error=LedgerError):
        linear_run.finish(_disturbed_run(process, **changes), tmp_path)
    assert ParticipationLedger.load(tmp_path / "ledger.npz").num_rounds == 2


# The noise of the process is for clients that return after two rounds or more.
@pytest.mark.parametrize(
    ("participation", "is_allowed"),
    [
        (MinSeparation(1), False),
        (MinSeparation(2), True),
        (MinSeparation(4, 2), True),
        (MinSeparation(1, 1), True),
        (SingleParticipation(), True),
    ],
    ids=str,
)
def test_timers_that_allow_more_than_the_noise_covers_are_refused(
    process: Any, participation: Participation, is_allowed: bool
) -> None:
    for behaviour in (DeviceBehaviour(), _BY_CLOCK):
        if is_allowed:
            run = _run(process, participation=participation, behaviour=behaviour)
            assert run.participation == participation
        else:
            with refuses("participation schema", "2 rounds"):
                _run(process, participation=participation, behaviour=behaviour)


def test_noise_for_one_participation_is_not_for_timers_that_let_clients_return() -> None:
    process = linear_run.learning_process(_NUM_ROUNDS, participation=SingleParticipation())
    with refuses("participation"):
        _run(process, participation=MinSeparation(1))
    once = _run(process, participation=SingleParticipation())
    # What a data sampler draws is accounted for by its scheme, from one participation.
    sampler = PoissonSampling(_NUM_ROUNDS, 2, 9, 3).sampler(1)
    assert _run(process, sampler=sampler).sampling == sampler.scheme
    # A state of which nothing is known declares nothing.
    assert dataclasses.replace(once, initial_state=(), participation=MinSeparation(1))


@pytest.mark.parametrize(
    "change",
    [
        {"noise_multiplier": 2.0},
        *(
            pytest.param(change, marks=pytest.mark.long)
            for change in ({"clip_norm": 0.5}, {"clients_per_round": 4})
        ),
    ],
    ids=str,
)
def test_a_run_is_not_resumed_with_another_mechanism(
    change: dict[str, Any], process: Any, tmp_path: pathlib.Path
) -> None:
    """Two scales of one row would tell the sum; and no guarantee is about both."""
    training_loop.start(_run(process), linear_run.store_of(tmp_path))
    other = linear_run.learning_process(_NUM_ROUNDS, participation=MinSeparation(2), **change)
    with refuses("mechanism", "options", error=LedgerError):
        training_loop.start(_run(other), linear_run.store_of(tmp_path))
    again = training_loop.start(_run(process), linear_run.store_of(tmp_path))
    assert again.num_rounds == 0


def test_a_resumed_run_keeps_the_schema_of_its_noise(process: Any, tmp_path: pathlib.Path) -> None:
    """Each process fits its own timers, and their noise is of two sizes."""
    later_process = linear_run.learning_process(_NUM_ROUNDS)
    linear_run.finish(_run(process), tmp_path, at_most=2)
    linear_run.finish(_run(process), tmp_path, at_most=1)
    with refuses("3 rounds", "2 rounds", error=LedgerError):
        linear_run.finish(_run(later_process), tmp_path)
    assert ParticipationLedger.load(tmp_path / "ledger.npz").num_rounds == 3
    _, ledger = linear_run.finish(_run(process), tmp_path)
    assert ledger.num_rounds == _NUM_ROUNDS
