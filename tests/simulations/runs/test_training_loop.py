"""Rounds in TFF: cohorts under timers, and runs that resume where they stopped."""

import collections
import dataclasses
import os
import pathlib
import shutil
import subprocess
import tempfile
import types
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mf_aggregators as mfa
from mf_aggregators.kernel.ledger import ObservedParticipation
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
from simulations.devices.device_populations import DevicePopulation, DeviceRound
from simulations.runs import training_loop
from simulations.runs.run_directory import LedgerError, ParticipationLedger
from simulations.runs.training_loop import (
    DamagedDirectoryError,
    FederatedRun,
    Progress,
    StateNotSavedError,
    StateStore,
    StoppedByRuleError,
)
from tests.examples import covering, examples
from tests.mf_aggregators.small_mechanisms import plan_of
from tests.refusals import refuses
from tests.simulations import linear_run
from tests.simulations.small_disks import files_of_at_most

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
    plan = plan_of(factorization, MinSeparation(3), 1.0, 1e-5)
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
    summed = ObservedParticipation.of(found[-1].ledger.rounds_of_clients(), _NUM_ROUNDS)
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


# States on disk: whole or not there, and never gone on from once a byte of them was altered.


_CLIENTS = ("a", "b", "c")


def _state(num_rounds: int) -> dict[str, Any]:
    """A state of every round, none like another in any of its leaves."""
    rng = np.random.default_rng(num_rounds)
    return {
        "model": [rng.normal(size=(40, 5)).astype(np.float32), rng.normal(size=3)],
        "round": np.int32(num_rounds),
        "seed": rng.integers(0, 2**63, size=2),
    }


def _progress(num_rounds: int) -> Progress:
    ledger = ParticipationLedger(_CLIENTS)
    for index in range(num_rounds):
        ledger = ledger.with_round(np.array([index % 3]))
    return Progress(_state(num_rounds), num_rounds, ledger)


def _store(directory: pathlib.Path) -> StateStore:
    return StateStore(directory / "states", directory / "ledger.npz")


def _saved(directory: pathlib.Path, *rounds: int) -> StateStore:
    store = _store(directory)
    for num_rounds in rounds:
        store.save(_progress(num_rounds))
    return store


def _load(store: StateStore) -> Progress | None:
    return store.load(_state(0), _CLIENTS)


def _is_state_of(state: Any, num_rounds: int) -> bool:
    ours, theirs = tf.nest.flatten(state), tf.nest.flatten(_state(num_rounds))
    return len(ours) == len(theirs) and all(
        np.asarray(mine).dtype == np.asarray(other).dtype and np.array_equal(mine, other)
        for mine, other in zip(ours, theirs, strict=True)
    )


def _assert_goes_on_from(store: StateStore, num_rounds: int) -> None:
    progress = _load(store)
    assert progress is not None
    assert progress.num_rounds == num_rounds
    assert _is_state_of(progress.state, num_rounds)


def _names(directory: pathlib.Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


@pytest.fixture(scope="module")
def three_saved(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A run after three rounds; tests work on copies."""
    directory = tmp_path_factory.mktemp("three")
    _saved(directory, 0, 1, 2, 3)
    return directory


@pytest.fixture
def run(three_saved: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy of its own of a run after three rounds."""
    return shutil.copytree(three_saved, tmp_path / "run")


def test_the_two_newest_states_are_kept_and_nothing_else(run: pathlib.Path) -> None:
    assert _names(run) == {"states", "ledger.npz"}
    assert _names(run / "states") == {"round_2", "round_3"}
    _assert_goes_on_from(_store(run), 3)
    assert (run / "states").stat().st_mode & 0o077 == 0


@settings(
    max_examples=examples(60),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_no_altered_byte_is_gone_on_from(
    three_saved: pathlib.Path, caplog: pytest.LogCaptureFixture, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as name:
        run = shutil.copytree(three_saved, pathlib.Path(name) / "run")
        newest = run / "states" / "round_3"
        files = sorted(path for path in newest.rglob("*") if path.is_file())
        path = data.draw(st.sampled_from(files), label="file")
        contents = bytearray(path.read_bytes())
        position = data.draw(st.integers(0, len(contents) - 1), label="position")
        contents[position] ^= data.draw(st.integers(1, 255), label="bits")
        path.write_bytes(contents)
        caplog.clear()
        _assert_goes_on_from(_store(run), 2)
        assert f"{newest} is damaged; continuing from round 2" in caplog.text
        # Whichever of the two was altered, both are named.
        assert path.name in caplog.text
        assert _names(run / "states") == {"round_2"}


def _cut_in_half(newest: pathlib.Path, path: pathlib.Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _empty_file(newest: pathlib.Path, path: pathlib.Path) -> None:
    os.truncate(path, 0)


def _missing_file(newest: pathlib.Path, path: pathlib.Path) -> None:
    path.unlink()


def _link_to_itself(newest: pathlib.Path, path: pathlib.Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def _directory_in_place_of_a_file(newest: pathlib.Path, path: pathlib.Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("harm", "name"),
    covering(
        [_cut_in_half, _empty_file, _missing_file, _link_to_itself, _directory_in_place_of_a_file],
        [
            "saved_model.pb",
            "fingerprint.pb",
            "variables/variables.index",
            "variables/variables.data-00000-of-00001",
            training_loop.CHECKSUM_FILE,
        ],
    ),
)
def test_a_harmed_file_falls_back(
    run: pathlib.Path,
    caplog: pytest.LogCaptureFixture,
    harm: Callable[[pathlib.Path, pathlib.Path], None],
    name: str,
) -> None:
    newest = run / "states" / "round_3"
    harm(newest, newest / name)
    store = _store(run)
    _assert_goes_on_from(store, 2)
    assert "round_3 is damaged; continuing from round 2" in caplog.text
    assert pathlib.Path(name).name in caplog.text
    # The round is run again, and its state saved under the same name.
    store.save(_progress(3))
    _assert_goes_on_from(store, 3)


def _replace_by_file(newest: pathlib.Path) -> None:
    shutil.rmtree(newest)
    newest.write_bytes(b"state")


def _empty(newest: pathlib.Path) -> None:
    shutil.rmtree(newest)
    newest.mkdir()


def _without_checksums(newest: pathlib.Path) -> None:
    (newest / training_loop.CHECKSUM_FILE).unlink()


def _state_of_another_round(newest: pathlib.Path) -> None:
    shutil.rmtree(newest)
    shutil.copytree(newest.with_name("round_2"), newest)


def _one_file_more(newest: pathlib.Path) -> None:
    (newest / "saved_model.pbtxt").write_text("")


@pytest.mark.parametrize(
    "harm",
    [
        _replace_by_file,
        _empty,
        _without_checksums,
        _state_of_another_round,
        _one_file_more,
    ],
)
def test_a_harmed_state_falls_back(
    run: pathlib.Path, caplog: pytest.LogCaptureFixture, harm: Callable[[pathlib.Path], None]
) -> None:
    harm(run / "states" / "round_3")
    store = _store(run)
    _assert_goes_on_from(store, 2)
    assert "round_3 is damaged; continuing from round 2" in caplog.text
    store.save(_progress(3))
    _assert_goes_on_from(store, 3)


@pytest.mark.parametrize("mode", [0o701, 0o740, 0o755], ids=oct)
def test_states_that_others_may_read_are_refused(three_saved: pathlib.Path, mode: int) -> None:
    states = three_saved / "states"
    states.chmod(mode)
    with refuses("accessible to other users", f"chmod 700 {states}"):
        _store(three_saved)
    states.chmod(0o700)
    _assert_goes_on_from(_store(three_saved), 3)


def test_a_state_that_the_manager_cannot_load_falls_back_and_its_values_stay_secret(
    run: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    newest = run / "states" / "round_3"
    (newest / "saved_model.pb").write_bytes(b"no model")
    (newest / training_loop.CHECKSUM_FILE).unlink()
    training_loop.seal(newest, "state after round 3")
    _assert_goes_on_from(_store(run), 2)
    assert "round_3 cannot be loaded" in caplog.text


def test_without_a_state_that_is_whole_the_run_stops_and_nothing_is_removed(
    run: pathlib.Path,
) -> None:
    _cut_in_half(run, run / "states" / "round_3" / "saved_model.pb")
    _cut_in_half(run, run / "states" / "round_2" / "fingerprint.pb")
    with refuses("saved_model.pb", "fingerprint.pb", error=LedgerError):
        _load(_store(run))
    assert _names(run / "states") == {"round_2", "round_3"}


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_writes_that_the_kernel_refuses_leave_the_states_before(run: pathlib.Path) -> None:
    sizes = sorted({path.stat().st_size for path in run.rglob("*") if path.is_file()})
    store = _store(run)
    refused = 0
    # Nothing at all, and all of each file but its last byte.
    limits = [0, *(size - 1 for size in sizes)]
    for num_bytes in limits:
        with files_of_at_most(num_bytes):
            try:
                store.save(_progress(4))
            except StateNotSavedError as error:
                refused += 1
                message = str(error)
        # The ledger may have the round already; nobody was shown its result.
        assert _names(run) == {"states", "ledger.npz"}
        if (run / "states" / "round_4").exists():
            _assert_goes_on_from(store, 4)
            shutil.rmtree(run / "states" / "round_4")
            shutil.copytree(run / "states" / "round_3", run / "states" / "round_2")
            continue
        assert _names(run / "states") == {"round_2", "round_3"}
        _assert_goes_on_from(_store(run), 3)
        assert "\n" not in message
        assert "round 4 could not be saved" in message
        assert "newest saved state is round 3's" in message
        assert "run the same command again" in message
    # Sizes of the next round's files differ by a few bytes from those of the rounds before.
    assert refused >= len(limits) - 2
    store.save(_progress(4))
    assert _names(run / "states") == {"round_3", "round_4"}
    _assert_goes_on_from(_store(run), 4)


class _Snapshots:
    """Copies of a run's directory as a kill would leave it, around every step of a save."""

    def __init__(self, run: pathlib.Path, copies: pathlib.Path) -> None:
        self._run = run
        self._copies = copies
        self.steps: list[str] = []

    def take(self, step: str) -> None:
        # shutil.copytree would take part in what is watched.
        subprocess.run(["cp", "-a", self._run, self._copies / str(len(self.steps))], check=True)
        self.steps.append(step)

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any, **named: Any) -> Any:
            self.take(f"before {name}")
            result = function(*arguments, **named)
            self.take(f"after {name}")
            return result

        return watched


@pytest.mark.long
def test_whenever_a_save_is_cut_off_the_state_before_or_after_it_is_there(
    run: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = tmp_path / "copies"
    copies.mkdir()
    snapshots = _Snapshots(run, copies)
    steps = [
        (os, "fsync"),
        (os, "unlink"),
        (os, "rmdir"),
        (pathlib.Path, "mkdir"),
        (pathlib.Path, "rename"),
        (pathlib.Path, "replace"),
        (tf.io.gfile, "makedirs"),
        (tf.io.gfile, "rename"),
        (tf.saved_model, "save"),
    ]
    store = _store(run)
    with monkeypatch.context() as patch:
        for owner, name in steps:
            patch.setattr(owner, name, snapshots.around(name, getattr(owner, name)))
        store.save(_progress(4))
    assert {"after replace", "after rename", "after rmdir", "after save"} <= set(snapshots.steps)
    assert len(snapshots.steps) > 30
    reached = []
    for number in range(len(snapshots.steps)):
        cut = copies / str(number)
        progress = _load(_store(cut))
        assert progress is not None
        assert _is_state_of(progress.state, progress.num_rounds)
        assert progress.ledger.num_rounds >= progress.num_rounds
        reached.append(progress.num_rounds)
        # No part of a state, and with it the seed, is left lying about.
        assert _names(cut) == {"states", "ledger.npz"}
        assert all(name.startswith("round_") for name in _names(cut / "states"))
        assert not [name for name in _names(cut / "states") if "temp" in name]
        # Damage to the newest of them still leaves one: nothing is removed too early.
        older = progress.num_rounds - 1
        training_loop.check_seal(cut / "states" / f"round_{older}", f"state after round {older}")
    assert reached == sorted(reached)
    assert set(reached) == {3, 4}


def test_a_state_takes_its_name_after_its_files_and_the_ledger_are_on_the_disk(
    run: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without that, a loss of power could leave the name and not the contents."""
    on_disk: list[int] = []
    named: list[tuple[list[int], list[int]]] = []
    fsync, rename = os.fsync, pathlib.Path.rename

    def watched_fsync(descriptor: int) -> None:
        fsync(descriptor)
        on_disk.append(os.fstat(descriptor).st_ino)

    def watched_rename(path: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
        inodes = [entry.stat().st_ino for entry in (path, *path.rglob("*"))]
        inodes.append((run / "ledger.npz").stat().st_ino)
        named.append((inodes, list(on_disk)))
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", watched_fsync)
        patch.setattr(pathlib.Path, "rename", watched_rename)
        store = _store(run)
        store.save(_progress(4))
    ((inodes, synchronised),) = named
    assert set(inodes) <= set(synchronised)
    # The name itself.
    assert on_disk[-1] == (run / "states").stat().st_ino


def test_what_killed_processes_left_is_removed(run: pathlib.Path) -> None:
    (run / "states" / "unfinished" / "round_4_temp1234").mkdir(parents=True)
    (run / "states" / "round_4_temp1234").mkdir()
    (run / ".ledger.npz.abc").write_bytes(b"half")
    (run / "states" / "sampling_seed.json").write_text("{}")
    _assert_goes_on_from(_store(run), 3)
    assert _names(run) == {"states", "ledger.npz"}
    assert _names(run / "states") == {"round_2", "round_3", "sampling_seed.json"}


def test_a_directory_is_only_what_it_was_sealed_as(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("contents")
    with refuses("SHA256SUMS", error=DamagedDirectoryError):
        training_loop.check_seal(tmp_path, "round 7")
    training_loop.seal(tmp_path, "round 7")
    with refuses("SHA256SUMS", error=DamagedDirectoryError):
        training_loop.check_seal(tmp_path, "round 9")
    with (tmp_path / training_loop.CHECKSUM_FILE).open("ab") as checksums:
        checksums.write(b" \n\n")
    with refuses("SHA256SUMS", error=DamagedDirectoryError):
        training_loop.check_seal(tmp_path, "round 7")
    (tmp_path / "file").write_text("content")
    with refuses(str(tmp_path), "file", error=DamagedDirectoryError):
        training_loop.check_seal(tmp_path, "round 7")
