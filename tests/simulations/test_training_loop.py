"""Rounds in TFF: cohorts under timers, and runs that resume where they stopped."""

import os
import pathlib
import shutil
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import tensorflow as tf
import tensorflow_federated as tff

import mf_aggregators as mfa
from mf_aggregators.dp_query import FixedSeedWarning
from mf_aggregators.participation import MinSeparation
from simulations import quiet, training_loop
from simulations.cohorts import TooFewEligibleClientsError
from simulations.participation_ledger import LedgerError, ParticipationLedger
from simulations.quiet import StopRequest
from simulations.training_loop import FederatedRun, StateStore

_NUM_ROUNDS = 6
_CLIENTS = tuple(f"client_{i}" for i in range(9))
_PARTICIPATION = MinSeparation(3)


@pytest.fixture(scope="module", autouse=True)
def _no_worker_outlives_the_tests() -> Iterator[None]:
    yield
    quiet.end_workers()


def _model_fn() -> tff.learning.models.VariableModel:
    inputs = tf.keras.Input((2,))
    outputs = tf.keras.layers.Dense(1, kernel_initializer="zeros")(inputs)
    return tff.learning.models.from_keras_model(
        tf.keras.Model(inputs, outputs),
        loss=tf.keras.losses.MeanSquaredError(),
        input_spec=(tf.TensorSpec((None, 2)), tf.TensorSpec((None, 1))),
    )


def _data(client_id: str, round_index: int) -> tf.data.Dataset:
    number = int(client_id.split("_")[1])
    x = np.full((2, 2), number + 0.1 * round_index, np.float32)
    return tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(2)


@pytest.fixture(scope="module")
def process() -> tff.learning.templates.LearningProcess:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FixedSeedWarning)
        return tff.learning.algorithms.build_unweighted_fed_avg(
            _model_fn,
            tff.learning.optimizers.build_sgdm(0.01),
            model_aggregator=mfa.mf_dp_aggregator(
                mfa.factorizations.banded(mfa.workloads.prefix_sum(_NUM_ROUNDS), 3),
                participation=_PARTICIPATION,
                noise_multiplier=1.0,
                clip_norm=1.0,
                clients_per_round=3,
                seed=5,
            ),
        )


def _run(process: Any, **changes: Any) -> FederatedRun:
    arguments: dict[str, Any] = {
        "process": process,
        "initial_state": process.initialize(),
        "participation": _PARTICIPATION,
        "num_rounds": _NUM_ROUNDS,
        "clients_per_round": 3,
        "client_ids": _CLIENTS,
        "client_dataset": _data,
        "seed": 1,
    }
    arguments.update(changes)
    return FederatedRun(**arguments)


def _finish(
    run: FederatedRun, directory: pathlib.Path, at_most: int | None = None
) -> tuple[list[np.ndarray], ParticipationLedger]:
    """Runs rounds, stopping after some; returns the model after each and the last ledger."""
    directory.mkdir(exist_ok=True)
    store = StateStore(directory / "states", directory / "ledger.npz")
    state, ledger = training_loop.start(run, store)
    stop, models = StopRequest(), []
    for finished in training_loop.rounds(run, store, state, ledger, stop):
        weights = run.process.get_model_weights(finished.state).trainable
        models.append(np.concatenate([np.ravel(weight) for weight in weights]))
        ledger = finished.ledger
        if len(models) == at_most:
            stop.is_set = True
    return models, ledger


def test_all_rounds_run_under_the_timers(
    process: tff.learning.templates.LearningProcess, tmp_path: pathlib.Path
) -> None:
    models, ledger = _finish(_run(process), tmp_path)
    assert len(models) == ledger.num_rounds == _NUM_ROUNDS
    took_place = mfa.guarantees.realised_participation(ledger.rounds_of_clients(), _NUM_ROUNDS)
    assert mfa.guarantees.keeps_plan(_PARTICIPATION, took_place)
    assert all(len(cohort) == 3 for cohort in ledger.cohorts)
    on_disk = ParticipationLedger.load(tmp_path / "ledger.npz")
    assert [list(cohort) for cohort in on_disk.cohorts] == [
        list(cohort) for cohort in ledger.cohorts
    ]


@pytest.mark.parametrize("stops", [[1], [2, 1], [1, 1, 1, 1, 1]])
def test_a_run_that_was_stopped_and_resumed_equals_one_that_was_not(
    process: tff.learning.templates.LearningProcess, tmp_path: pathlib.Path, stops: list[int]
) -> None:
    models, ledger = _finish(_run(process), tmp_path / "whole")
    parts: list[np.ndarray] = []
    for at_most in [*stops, None]:
        more, resumed = _finish(_run(process), tmp_path / "parts", at_most)
        parts.extend(more)
    np.testing.assert_array_equal(np.array(parts), np.array(models))
    assert [list(cohort) for cohort in resumed.cohorts] == [
        list(cohort) for cohort in ledger.cohorts
    ]


def test_a_round_whose_state_was_lost_is_run_again_as_it_was(
    process: tff.learning.templates.LearningProcess, tmp_path: pathlib.Path
) -> None:
    """Killed after the ledger and before the state: the same cohort, data and noise."""
    models, _ = _finish(_run(process), tmp_path / "whole")
    _finish(_run(process), tmp_path / "cut", at_most=2)
    ledger = ParticipationLedger.load(tmp_path / "cut" / "ledger.npz")
    # A third round in the ledger, as if the process had ended before its state was saved.
    ledger.with_round(np.array([0, 1, 2])).save(tmp_path / "cut" / "ledger.npz")
    rest, resumed = _finish(_run(process), tmp_path / "cut")
    np.testing.assert_array_equal(np.array(rest), np.array(models[2:]))
    took_place = mfa.guarantees.realised_participation(resumed.rounds_of_clients(), _NUM_ROUNDS)
    assert mfa.guarantees.keeps_plan(_PARTICIPATION, took_place)


def test_the_noise_seed_is_saved_before_the_first_round(
    process: tff.learning.templates.LearningProcess, tmp_path: pathlib.Path
) -> None:
    store = StateStore(tmp_path / "states", tmp_path / "ledger.npz")
    first, _ = training_loop.start(_run(process), store)
    again, _ = training_loop.start(_run(process), store)

    def seed(state: Any) -> list[int]:
        return list(state.aggregator.query_state.numerator_state.noise.seed)

    assert seed(first) == seed(again)
    assert (tmp_path / "states" / "round_0").is_dir()


def test_a_ledger_that_does_not_fit_stops_the_run(
    process: tff.learning.templates.LearningProcess, tmp_path: pathlib.Path
) -> None:
    _finish(_run(process), tmp_path, at_most=2)
    ledger = ParticipationLedger.load(tmp_path / "ledger.npz")
    ledger.first_rounds(1).save(tmp_path / "ledger.npz")
    with pytest.raises(LedgerError, match="Start a new run"):
        _finish(_run(process), tmp_path)
    ledger.save(tmp_path / "ledger.npz")
    with pytest.raises(LedgerError, match="Start a new run"):
        _finish(_run(process, client_ids=(*_CLIENTS, "another")), tmp_path)


def test_lost_states_are_never_replaced_by_fresh_noise(
    process: tff.learning.templates.LearningProcess, tmp_path: pathlib.Path
) -> None:
    _finish(_run(process), tmp_path, at_most=2)
    shutil.rmtree(tmp_path / "states")
    with pytest.raises(LedgerError, match="records 2 released rounds"):
        _finish(_run(process), tmp_path)
    assert ParticipationLedger.load(tmp_path / "ledger.npz").num_rounds == 2


def test_a_damaged_newest_state_falls_back_to_the_one_before(
    process: tff.learning.templates.LearningProcess,
    tmp_path: pathlib.Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    models, _ = _finish(_run(process), tmp_path / "whole")
    _finish(_run(process), tmp_path / "cut", at_most=3)
    newest = tmp_path / "cut" / "states" / "round_3"
    for path in newest.rglob("variables.data*"):
        path.write_bytes(path.read_bytes()[:10])
    rest, _ = _finish(_run(process), tmp_path / "cut")
    assert "round_3 is damaged; going on from round 2" in caplog.text
    np.testing.assert_array_equal(np.array(rest), np.array(models[2:]))


def test_without_a_readable_state_the_run_stops(
    process: tff.learning.templates.LearningProcess, tmp_path: pathlib.Path
) -> None:
    _finish(_run(process), tmp_path, at_most=2)
    for path in (tmp_path / "states").rglob("variables.data*"):
        path.write_bytes(b"")
    with pytest.raises(LedgerError, match="no state in"):
        _finish(_run(process), tmp_path)


def test_too_few_clients_end_the_run_and_leave_its_rounds(
    process: tff.learning.templates.LearningProcess, tmp_path: pathlib.Path
) -> None:
    run = _run(process, participation=MinSeparation(3, 1))
    with pytest.raises(TooFewEligibleClientsError, match="round 4"):
        _finish(run, tmp_path)
    assert ParticipationLedger.load(tmp_path / "ledger.npz").num_rounds == 3
