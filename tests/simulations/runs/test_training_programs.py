"""TFF's own training program resumes a private run without a second use of any noise."""

import asyncio
import copy
import pathlib
import shutil
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow_federated as tff

from mf_aggregators.participation import MinSeparation
from mf_aggregators.privacy.ledgers import LedgerError
from mf_aggregators.tff import compatibility, declared_participation
from simulations.runs.round_records import ParticipationLedger
from simulations.runs.training_loop import FederatedRun
from simulations.runs.training_programs import CohortDataSource, ModelReleaseManager
from tests.refusals import refuses
from tests.simulations import linear_run

_NUM_ROUNDS = 6
_SEPARATION_3 = declared_participation.declare(MinSeparation(3))


# The data source alone, which runs nothing


@pytest.fixture(scope="module")
def small_process() -> Any:
    """Has the types of a process, and is not run."""

    @compatibility.federated_computation(
        compatibility.FederatedType(np.int32, compatibility.SERVER),
        compatibility.FederatedType(np.int32, compatibility.CLIENTS),
    )
    def round_of(state: Any, values: Any) -> Any:
        return state, compatibility.federated_sum(values)

    return types.SimpleNamespace(next=round_of)


def _source(process: Any, directory: pathlib.Path, **changes: Any) -> CohortDataSource:
    arguments: dict[str, Any] = {
        "process": process,
        "initial_state": (_SEPARATION_3,),
        "client_ids": linear_run.CLIENTS,
        "client_dataset": lambda client_id, round_index: (client_id, round_index),
        "participation": MinSeparation(3),
        "num_rounds": _NUM_ROUNDS,
        "clients_per_round": 3,
        "seed": 1,
        "ledger_path": directory / "ledger.npz",
    }
    arguments.update(changes)
    return CohortDataSource(arguments.pop("process"), arguments.pop("initial_state"), **arguments)


def _selected(iterator: Any, number: int) -> list[Any]:
    return [iterator.select(3) for _ in range(number)]


def test_rounds_are_in_the_ledger_before_their_data_are_handed_out(
    small_process: Any, tmp_path: pathlib.Path
) -> None:
    source = _source(small_process, tmp_path)
    iterator = source.iterator()
    assert iterator.federated_type == source.federated_type
    for index in range(_NUM_ROUNDS):
        data = iterator.select(3)
        on_disk = ParticipationLedger.load(tmp_path / "ledger.npz")
        assert on_disk.num_rounds == index + 1
        assert data == [(linear_run.CLIENTS[client], index) for client in on_disk.cohorts[index]]
    # Nine clients in cohorts of three, three rounds apart: each takes part once in three rounds.
    for start in (0, 3):
        cohorts = source.ledger.cohorts[start : start + 3]
        assert sorted(np.concatenate(cohorts)) == list(range(9))
    with refuses("6 rounds"):
        iterator.select(3)


@pytest.mark.parametrize("position", range(5))
def test_whatever_state_it_goes_on_from_the_clients_are_the_same(
    small_process: Any, tmp_path: pathlib.Path, position: int
) -> None:
    """Also with another seed: of released rounds, the ledger has the last word."""
    iterator = _source(small_process, tmp_path).iterator()
    saved = [copy.deepcopy(iterator).to_bytes()]
    first = []
    for _ in range(4):
        first += _selected(iterator, 1)
        saved.append(copy.deepcopy(iterator).to_bytes())
    again = _source(small_process, tmp_path, seed=2)
    resumed = type(again.iterator()).from_bytes(saved[position])
    assert resumed.to_bytes() == saved[position]
    assert _selected(resumed, 4 - position) == first[position:]
    assert again.ledger.num_rounds == 4
    # Further rounds keep the schema.
    _selected(resumed, 2)
    for rounds in again.ledger.rounds_of_clients():
        assert np.all(np.diff(rounds) >= 3)


def test_a_copy_is_at_the_same_place_and_has_the_same_ledger(
    small_process: Any, tmp_path: pathlib.Path
) -> None:
    source = _source(small_process, tmp_path)
    iterator = source.iterator()
    _selected(iterator, 1)
    before = copy.deepcopy(iterator)
    _selected(iterator, 1)
    # A program that discards a round goes back to the copy.
    with refuses("round 2", "should_discard_round"):
        before.select(3)
    assert source.ledger.num_rounds == 2


def test_released_rounds_without_their_state_are_refused(
    small_process: Any, tmp_path: pathlib.Path
) -> None:
    _selected(_source(small_process, tmp_path).iterator(), 2)
    with refuses("2 rounds", error=LedgerError):
        _source(small_process, tmp_path).iterator().select(3)


def test_a_first_state_of_another_run_is_refused(
    small_process: Any, tmp_path: pathlib.Path
) -> None:
    """A program saves one before it asks for clients: its noise is not that of the ledger."""
    begun_and_killed = _source(small_process, tmp_path).iterator().to_bytes()
    iterator = _source(small_process, tmp_path).iterator()
    own = iterator.to_bytes()
    _selected(iterator, 2)
    # All states were lost, and the program was started again.
    restarted = _source(small_process, tmp_path)
    anew = copy.deepcopy(restarted.iterator()).to_bytes()
    for buffer in (begun_and_killed, anew):
        with refuses("2 rounds", error=LedgerError):
            type(restarted.iterator()).from_bytes(buffer)
    assert len(_selected(type(restarted.iterator()).from_bytes(own), 3)) == 3
    (tmp_path / "ledger.npz.run").unlink()
    with refuses("ledger.npz.run", error=LedgerError):
        type(restarted.iterator()).from_bytes(own)


@pytest.mark.parametrize("buffer", [b"", b"{", b"[]", b"{}", b'{"num_rounds": "x"}', b"\xff"])
def test_a_damaged_state_is_refused_by_one_error(
    buffer: bytes, small_process: Any, tmp_path: pathlib.Path
) -> None:
    iterator = _source(small_process, tmp_path).iterator()
    with refuses("damaged", error=LedgerError):
        type(iterator).from_bytes(buffer)


def test_a_ledger_that_is_not_the_one_of_the_state_is_refused(
    small_process: Any, tmp_path: pathlib.Path
) -> None:
    iterator = _source(small_process, tmp_path).iterator()
    _selected(iterator, 2)
    saved = iterator.to_bytes()
    (tmp_path / "other").mkdir()
    _selected(_source(small_process, tmp_path / "other", seed=2).iterator(), 2)
    for changes in (
        {"ledger_path": tmp_path / "other" / "ledger.npz"},
        {"ledger_path": tmp_path / "none.npz"},
    ):
        source = _source(small_process, tmp_path, **changes)
        with refuses("program state", error=LedgerError):
            type(source.iterator()).from_bytes(saved)
    with refuses("population", error=LedgerError):
        _source(small_process, tmp_path, client_ids=linear_run.CLIENTS[::-1])
    sooner = _source(
        small_process,
        tmp_path,
        initial_state=(declared_participation.declare(MinSeparation(2)),),
    )
    with refuses("schema", error=LedgerError):
        type(sooner.iterator()).from_bytes(saved)
    # Timers that did not allow what is in the ledger.
    twice = ParticipationLedger(linear_run.CLIENTS)
    for _ in range(2):
        twice = twice.with_round(np.arange(3))
    twice.save(tmp_path / "ledger.npz")
    with refuses("timers", error=LedgerError):
        _source(small_process, tmp_path)


def test_numbers_that_do_not_fit_are_refused(small_process: Any, tmp_path: pathlib.Path) -> None:
    with refuses("3 clients", "2"):
        _source(small_process, tmp_path).iterator().select(2)
    with refuses("3 clients", "None"):
        _source(small_process, tmp_path).iterator().select()
    with refuses("timers"):
        _source(small_process, tmp_path, participation=MinSeparation(2))
    assert not (tmp_path / "ledger.npz").exists()


# Whole programs of TFF


@pytest.fixture
def _federated_context() -> Iterator[None]:
    """What a program needs; the usual context comes back after it."""
    before = compatibility.get_context_stack().current
    local = tff.backends.native.create_async_local_cpp_execution_context()
    compatibility.set_default_context(tff.program.NativeFederatedContext(local))
    yield
    compatibility.set_default_context(before)


@pytest.fixture(scope="module")
def run() -> FederatedRun:
    """A run of the simulations, whose process, state and clients the program gets."""
    return linear_run.federated_run(linear_run.learning_process(_NUM_ROUNDS), _NUM_ROUNDS)


def _run_program(
    run: FederatedRun, directory: pathlib.Path, num_rounds: int, **changes: Any
) -> dict[str, Any]:
    """Runs TFF's program up to a round, and returns what it released of the model."""
    directory.mkdir(exist_ok=True)
    source = _source(
        run.process,
        directory,
        initial_state=run.initial_state,
        client_dataset=run.client_dataset,
    )
    released = tff.program.MemoryReleaseManager()
    asyncio.run(
        tff.learning.programs.train_model(
            train_process=run.process,
            initial_train_state=run.initial_state,
            train_data_source=source,
            train_per_round_clients=3,
            train_total_rounds=num_rounds,
            program_state_manager=tff.program.FileProgramStateManager(
                str(directory / "states"), keep_total=0
            ),
            model_output_manager=ModelReleaseManager(run.process, released),
            evaluation_manager=None,
            evaluation_periodicity=100,
            **changes,
        )
    )
    values: dict[str, Any] = released.values()
    return values


def _weights(released: dict[str, Any], num_rounds: int) -> np.ndarray:
    value = released[f"training_checkpoint_round_{num_rounds}"]
    value = value[0] if isinstance(value, tuple) and not hasattr(value, "trainable") else value
    return np.concatenate([np.ravel(each) for each in value.trainable])


@pytest.mark.long
@pytest.mark.usefixtures("_federated_context")
def test_a_program_resumes_from_any_state_and_releases_the_same(
    run: FederatedRun, tmp_path: pathlib.Path
) -> None:
    whole = _run_program(run, tmp_path / "whole", 5)
    ledger = ParticipationLedger.load(tmp_path / "whole" / "ledger.npz")
    # Ended and started again.
    _run_program(run, tmp_path / "cut", 2)
    cut = _run_program(run, tmp_path / "cut", 5)
    np.testing.assert_array_equal(_weights(cut, 5), _weights(whole, 5))
    assert ParticipationLedger.load(tmp_path / "cut" / "ledger.npz").digest() == ledger.digest()
    # Killed before its newer states were on disk: rounds 3 to 5 are run again as they were.
    for number in (3, 4, 5):
        shutil.rmtree(tmp_path / "cut" / "states" / f"program_state_{number}")
    again = _run_program(run, tmp_path / "cut", 5)
    np.testing.assert_array_equal(_weights(again, 5), _weights(whole, 5))
    assert ParticipationLedger.load(tmp_path / "cut" / "ledger.npz").digest() == ledger.digest()
    # All states lost: there would be other noise for the rounds that were released. Nor does it
    # help that the first attempt has saved a first state.
    shutil.rmtree(tmp_path / "cut" / "states")
    for _ in range(2):
        with refuses("release", error=LedgerError):
            _run_program(run, tmp_path / "cut", 5)
    assert (tmp_path / "cut" / "states" / "program_state_0").is_dir()


@pytest.mark.long
@pytest.mark.usefixtures("_federated_context")
def test_rounds_that_are_discarded_are_refused(run: FederatedRun, tmp_path: pathlib.Path) -> None:
    with refuses("round 1"):
        _run_program(run, tmp_path, 2, should_discard_round=lambda result: True)


@pytest.mark.long
@pytest.mark.usefixtures("_federated_context")
def test_what_is_released_of_a_state_is_the_model_alone(
    run: FederatedRun, tmp_path: pathlib.Path
) -> None:
    released = _run_program(run, tmp_path, 1)
    (value,) = released.values()
    assert _weights(released, 1).shape == (3,)
    assert not declared_participation.in_state(value)
    # The program itself would have released the state, in which the noise's seed stands.
    assert declared_participation.in_state(run.initial_state)
