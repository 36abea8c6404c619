"""A task that does not do what it says is refused before a round is released."""

import csv
import dataclasses
import math
import os
import pathlib
import shutil
import types
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
from tensorflow.core.util import event_pb2

from mf_aggregators import factorizations, private_metrics
from mf_aggregators.noise import places
from mf_aggregators.noise.places import NoiseStorage
from mf_aggregators.tff import client_sums
from mf_aggregators.tff.processes import StopRequest
from simulations.examples.digits import COMMAND
from simulations.runs import run_plan, trainer
from simulations.runs.run_directory import RunDirectory
from simulations.runs.run_plan import Run
from simulations.runs.run_reports import RunStatements
from simulations.runs.trainer import RoundMetrics
from simulations.training import training_parts
from simulations.training.federated_task import TEST, FederatedTask, ImageData
from tests.refusals import refuses
from tests.simulations.parsed_flags import config_of


def _plan(path: pathlib.Path, *arguments: str) -> Run:
    options = config_of(COMMAND, "--num_rounds=2", "--mechanism=identity", *arguments)
    return run_plan.plan(options, COMMAND.open_data(options), RunDirectory(path), seed=1)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return _plan(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def task(plan: Run) -> FederatedTask:
    return plan.data.load(1)


def _train(plan: Run, task: FederatedTask, path: pathlib.Path) -> Any:
    run = dataclasses.replace(plan, directory=RunDirectory(path))
    return trainer.train(run, task, RunStatements(run), StopRequest())


def _loss_alone(weights: Sequence[np.ndarray], split: str) -> Mapping[str, float]:
    return {"loss": 1.0}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"client_ids": ("0", "1")}, "143"),
        ({"evaluate": _loss_alone}, "accuracy"),
        pytest.param({"accuracy": "hits"}, "hits", marks=pytest.mark.long),
    ],
)
def test_a_task_that_is_not_what_it_says_is_refused(
    plan: Run,
    task: FederatedTask,
    tmp_path: pathlib.Path,
    changes: dict[str, Any],
    named: str,
) -> None:
    with refuses(named):
        _train(plan, dataclasses.replace(task, **changes), tmp_path)
    assert not (tmp_path / "privacy.json").exists()
    assert not (tmp_path / "participation.npz").exists()


def test_the_number_of_clients_is_that_of_the_plan(
    plan: Run, task: FederatedTask, tmp_path: pathlib.Path
) -> None:
    assert isinstance(plan.data, ImageData)
    more = dataclasses.replace(plan.data, known_clients=144)
    with refuses("143 clients", "144"):
        _train(dataclasses.replace(plan, data=more), task, tmp_path)


@pytest.fixture(scope="module")
def trained(
    plan: Run, task: FederatedTask, tmp_path_factory: pytest.TempPathFactory
) -> pathlib.Path:
    path = tmp_path_factory.mktemp("trained")
    outcome = _train(plan, task, path)
    assert outcome.num_rounds == 2
    with np.load(path / "final_model.npz") as archive:
        assert list(archive["names"]) == ["dense/kernel", "dense/bias"]
        model = [archive["weight_0"], archive["weight_1"]]
    assert task.evaluate(model, TEST)["accuracy"] == outcome.test_accuracy
    assert not np.array_equal(model[0], task.initial_weights[0])
    return path


def _rows(path: pathlib.Path) -> list[dict[str, str]]:
    with (path / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.long
def test_the_task_as_it_is_trains(trained: pathlib.Path) -> None:
    assert (trained / "privacy.json").exists()


@pytest.mark.long
def test_layers_that_are_frozen_stay_as_they_were(
    plan: Run, task: FederatedTask, tmp_path: pathlib.Path
) -> None:
    def model_fn() -> Any:
        inputs = tf.keras.Input((64,))
        halves = tf.keras.initializers.Constant(0.5)
        frozen = tf.keras.layers.Dense(4, None, True, halves, name="frozen", trainable=False)
        return tff.learning.models.from_keras_model(
            tf.keras.Model(inputs, tf.keras.layers.Dense(10, name="last")(frozen(inputs))),
            loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=[tf.keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
            input_spec=task.model_fn().input_spec,
        )

    part = dataclasses.replace(
        task,
        model_fn=model_fn,
        initial_weights=(np.zeros((4, 10), np.float32), np.zeros(10, np.float32)),
        evaluate=lambda weights, split: {"loss": 1.0, "accuracy": 0.5},
    )
    assert _train(plan, part, tmp_path).num_parameters == 50
    with np.load(tmp_path / "final_model.npz") as archive:
        names = [str(name) for name in archive["names"]]
        assert names == ["last/kernel", "last/bias", "frozen/kernel", "frozen/bias"]
        assert np.any(archive["weight_0"])
        np.testing.assert_array_equal(archive["weight_2"], np.full((64, 4), 0.5))


# Of the clients that train.
_RELEASED = ("train_loss", "train_accuracy", "clipped_fraction", "examples_per_client")
# From flags, from what was released before, or from data that no round trains on; who takes part
# is no secret under timers.
_PUBLIC = (
    *("round", "clients_per_round", "epsilon_spent", "epsilon_planned", "noise_norm"),
    *("released_norm", "heldout_loss", "heldout_accuracy"),
    *("num_updates", "eligible_clients", "available_clients", "selected_clients", "attempts"),
    *(f"{name}_stddev" for name in _RELEASED),
)
# Of other runs: a clip norm that adapts, and batches that are drawn.
_OF_OTHER_RUNS = ("clip_norm", "unclipped_fraction", "unclipped_fraction_stddev")


def _tags(path: pathlib.Path) -> set[str]:
    """What TensorBoard shows of a run."""
    (file,) = (path / "tensorboard").iterdir()
    events = (
        event_pb2.Event.FromString(record.numpy())
        for record in tf.data.TFRecordDataset(os.fspath(file))
    )
    return {value.tag for event in events for value in event.summary.value}


@pytest.mark.long
def test_a_run_with_private_metrics_shows_nothing_of_its_clients_without_noise(
    plan: Run, task: FederatedTask, trained: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    bounds = ("--largest_loss=5", "--largest_examples=20", "--noise_multiplier=0.25")
    run = _plan(tmp_path, "--private_metrics", *bounds)
    run.directory.write_json("config.json", {"flags": {}})
    process = trainer.learning_process(run, task, "state")
    # All that leaves the clients is one sum, with noise.
    (only,) = client_sums.of(process.next)
    assert only.is_noised
    outcome = _train(run, task, tmp_path)
    assert outcome.facts == {}
    first, second = _rows(tmp_path)
    assert set(first) == {*_RELEASED, *_PUBLIC, *_OF_OTHER_RUNS, "num_updates_stddev"}
    for name in (*_OF_OTHER_RUNS, "num_updates_stddev"):
        assert first[name] == second[name] == ""
    assert _tags(tmp_path) == {*_RELEASED, *_PUBLIC} - {"round"}
    # The first round of both runs has the same model and the same clients.
    (exact, _), z = _rows(trained), 0.25
    # Four metrics share what 1 % more noise on the updates leaves.
    stddev = 1.01 * z * math.sqrt(4.0 / (1.01**2 - 1.0)) / 2.0 / 10
    ranges = {"train_loss": 5.0, "train_accuracy": 1.0, "clipped_fraction": 1.0}
    for name, width in {**ranges, "examples_per_client": 20.0}.items():
        for row in (first, second):
            assert float(row[f"{name}_stddev"]) == pytest.approx(width * stddev, rel=1e-6)
    for name, width in ranges.items():
        # Within six standard deviations; tff/test_averaging_with_metrics.py has them without noise.
        off = abs(float(first[name]) - float(exact[name]))
        assert 1e-6 < off < 6.0 * width * stddev
    assert first["num_updates"] == first["clients_per_round"] == "10"
    assert float(first["noise_norm"]) == pytest.approx(
        1.01 * z / plan.mechanism.noise_multiplier * float(exact["noise_norm"])
    )
    # A round that is run again releases the same.
    before = (tmp_path / "metrics.csv").read_bytes()
    shutil.rmtree(tmp_path / "checkpoints" / "round_2")
    _train(run, task, tmp_path)
    assert (tmp_path / "metrics.csv").read_bytes() == before


def test_rows_of_private_metrics_have_columns_of_what_was_released_alone() -> None:
    columns = ("num_updates_stddev", *_RELEASED, *_PUBLIC, *_OF_OTHER_RUNS)
    assert {"round", *trainer._COLUMNS_OF_PRIVATE_METRICS} == set(columns)


@pytest.mark.parametrize("is_drawn", [False, True], ids=["timers", "sampler"])
def test_how_many_clients_might_have_come_is_a_secret_of_a_sampler(
    is_drawn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {private_metrics.LOSS: 1.5, **({private_metrics.COUNT: 0.9} if is_drawn else {})}
    monkeypatch.setattr(training_parts, "released_metrics", lambda measured: found)
    clip = {"unclipped_fraction": 0.25}
    monkeypatch.setattr(training_parts, "released_clip", lambda measured: clip)
    rows = object.__new__(RoundMetrics)
    config: Any = types.SimpleNamespace(cohort=10, adaptive_clip=None)
    run: Any = types.SimpleNamespace(config=config)
    rows._run, rows._stddevs = run, {}
    devices = types.SimpleNamespace(num_available=8, num_selected=6, attempts=1)
    finished: Any = types.SimpleNamespace(
        metrics={"aggregator": {"released_norm": 2.0}},
        ledger=types.SimpleNamespace(cohorts=[[1, 2, 4]]),
        index=0,
        num_eligible=20,
        devices=None if is_drawn else devices,
    )
    asked = {"eligible_clients", "available_clients", "selected_clients", "attempts"}
    row = {**rows._released(finished), **rows._of_devices(finished, is_private=True)}
    assert row["num_updates"] == (9.0 if is_drawn else 3)
    assert set(row) == {"released_norm", "train_loss", "num_updates", "clipped_fraction"} | (
        set() if is_drawn else asked
    )


def test_a_run_goes_on_with_the_storage_that_it_began_with(
    plan: Run, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toeplitz = factorizations.toeplitz(50, num_bands=25)
    directory = RunDirectory(tmp_path)
    mechanism = dataclasses.replace(plan.mechanism, factorization=toeplitz)
    banded = dataclasses.replace(plan, mechanism=mechanism, directory=directory)
    directory.write_json("config.json", {"flags": {}})
    assert trainer.noise_storage_of(banded, 100_000) == "disk"
    # Whatever a later version finds cheaper.
    other = NoiseStorage.STATE
    cost = places.NoiseCost.of_run([toeplitz.noise_recursion()], 100_000, other)
    monkeypatch.setattr(places.NoiseCost, "of_run", lambda *_: cost)
    assert trainer.noise_storage_of(banded, 100_000) == "disk"
    assert directory.read_config() == {"flags": {}, "noise_storage": "disk"}
    asked = dataclasses.replace(
        banded, config=dataclasses.replace(plan.config, noise_storage=other.value)
    )
    assert trainer.noise_storage_of(asked, 100_000) == other.value
