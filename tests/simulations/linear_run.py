"""A small federated run of a linear model, for tests that stop, kill and resume it.

As a program, which takes a noise storage, a number of rounds and a directory, it runs the rounds
that are left in the directory. It leaves there what a test needs to kill it at a chosen moment and
to compare what it released.
"""

import dataclasses
import os
import pathlib
import sys
import warnings
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

import mf_aggregators as mfa
from mf_aggregators import atomic_files
from mf_aggregators.kernel.draws import TILE
from mf_aggregators.noise import FixedSeedWarning
from mf_aggregators.participation import MinSeparation, Participation
from mf_aggregators.tff import processes
from mf_aggregators.tff.processes import StopRequest
from simulations.runs import training_loop
from simulations.runs.run_directory import ParticipationLedger
from simulations.runs.training_loop import FederatedRun, Progress, StateStore

CLIENTS = tuple(f"client_{i}" for i in range(9))
PARTICIPATION = MinSeparation(3)
# The features of the program: with three bands, blocks of 1, 1, 2, 4, 4, ... rounds, of two tiles.
PROGRAM_FEATURES = TILE + 1000


def learning_process(
    num_rounds: int,
    num_features: int = 2,
    participation: Participation = PARTICIPATION,
    **noise: Any,
) -> tff.learning.templates.LearningProcess:
    """Returns federated averaging of a linear model under banded noise of a fixed seed.

    Args:
      num_rounds: The rounds that there is noise for.
      num_features: The model has one parameter more.
      participation: The schema that the noise is scaled to.
      **noise: Arguments of the aggregator.
    """

    # Not Keras's, which takes TFF twice as long to build.
    @tf.function(autograph=False)
    def predict(weights: Any, features: tf.Tensor, training: bool) -> tf.Tensor:
        (kernel, bias), _ = weights
        return features @ kernel + bias

    @tf.function(autograph=False)
    def loss(predictions: tf.Tensor, labels: tf.Tensor, sample_weight: Any = None) -> tf.Tensor:
        return tf.reduce_mean((predictions - labels) ** 2)

    zeros = np.zeros((num_features, 1), np.float32), np.zeros(1, np.float32)
    model = tff.learning.models.FunctionalModel(
        initial_weights=(zeros, ()),
        predict_on_batch_fn=predict,
        loss_fn=loss,
        input_spec=(tf.TensorSpec((None, num_features)), tf.TensorSpec((None, 1))),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FixedSeedWarning)
        return tff.learning.algorithms.build_unweighted_fed_avg(
            model,
            tff.learning.optimizers.build_sgdm(0.01),
            model_aggregator=mfa.mf_dp_aggregator(
                mfa.factorizations.banded(mfa.workloads.prefix_sum(num_rounds), 3),
                participation=participation,
                **{
                    "noise_multiplier": 1.0,
                    "clip_norm": 1.0,
                    "clients_per_round": 3,
                    "seed": 5,
                    **noise,
                },
            ),
        )


def federated_run(
    process: Any, num_rounds: int, num_features: int = 2, **changes: Any
) -> FederatedRun:
    """Returns a run of the process.

    Args:
      process: What :func:`learning_process` returned.
      num_rounds: The number of rounds.
      num_features: The number of features of the process.
      **changes: Fields of the run in place of the usual ones.
    """

    def client_dataset(client_id: str, round_index: int) -> tf.data.Dataset:
        number = int(client_id.split("_")[1])
        x = np.full((2, num_features), number + 0.1 * round_index, np.float32)
        return tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(2)

    arguments: dict[str, Any] = {
        "process": process,
        "initial_state": process.initialize(),
        "participation": PARTICIPATION,
        "num_rounds": num_rounds,
        "clients_per_round": 3,
        "client_ids": CLIENTS,
        "client_dataset": client_dataset,
        "seed": 1,
    }
    arguments.update(changes)
    return FederatedRun(**arguments)


def store_of(directory: pathlib.Path) -> StateStore:
    """Returns the store of a run in a directory."""
    directory.mkdir(parents=True, exist_ok=True)
    return StateStore(directory / "states", directory / "ledger.npz")


def weights_of(process: Any, state: Any) -> np.ndarray:
    """Returns the model's parameters as one vector."""
    weights = process.get_model_weights(state).trainable
    return np.concatenate([np.ravel(weight) for weight in weights])


def finish(
    run: FederatedRun, directory: pathlib.Path, at_most: int | None = None
) -> tuple[list[np.ndarray], ParticipationLedger]:
    """Runs rounds, stopping after some; returns the model after each and the last ledger."""
    store = store_of(directory)
    progress = training_loop.start(run, store)
    stop, models, ledger = StopRequest(), [], progress.ledger
    for finished in training_loop.rounds(run, store, progress, stop):
        if run.sampler is not None:
            assert finished.num_eligible == run.sampler.num_eligible(finished.index)
        models.append(weights_of(run.process, finished.state))
        ledger = finished.ledger
        stop.is_set = len(models) == at_most
    return models, ledger


def run_program(directory: pathlib.Path, noise_storage: str, num_rounds: int) -> None:
    """Runs the rounds that are left; see the module's docstring.

    ``marks-<pid>`` says how far the process came: ``began <round>`` and ``ended <round>``
    around the process's part of each round, ``saving <round>`` and ``saved <round>`` around
    that of the store. ``released/<round>-<pid>`` has the model after the round and then all
    leaves of the state.

    Args:
      directory: The directory of the run.
      noise_storage: The noise storage of the aggregator.
      num_rounds: The number of rounds, those that are through included.
    """
    noise: dict[str, Any] = {"noise_storage": noise_storage, "noise_directory": directory / "noise"}
    process = learning_process(num_rounds, PROGRAM_FEATURES, **noise)
    run = federated_run(process, num_rounds, PROGRAM_FEATURES)
    marks = directory / f"marks-{os.getpid()}"
    store = _MarkedStore(directory / "states", directory / "ledger.npz", marks)
    progress = training_loop.start(run, store)
    run = dataclasses.replace(run, process=_MarkedProcess(process, progress.num_rounds, marks))
    (directory / "released").mkdir(exist_ok=True)
    for finished in training_loop.rounds(run, store, progress, StopRequest()):
        path = directory / "released" / f"{finished.index}-{os.getpid()}"
        leaves = [np.asarray(leaf) for leaf in tf.nest.flatten(finished.state)]
        with atomic_files.writing(path) as file:
            np.savez(file, weights_of(process, finished.state), *leaves)


class _MarkedStore(StateStore):
    """A store that writes down when it begins and ends to save a round."""

    def __init__(
        self, directory: pathlib.Path, ledger_path: pathlib.Path, marks: pathlib.Path
    ) -> None:
        super().__init__(directory, ledger_path)
        self._marks = marks

    def save(self, progress: Progress) -> None:
        _mark(self._marks, "saving", progress.num_rounds - 1)
        super().save(progress)
        _mark(self._marks, "saved", progress.num_rounds - 1)


class _MarkedProcess:
    """A learning process that writes down when a round begins and ends."""

    def __init__(self, process: Any, first_round: int, marks: pathlib.Path) -> None:
        self._process = process
        self._round = first_round
        self._marks = marks

    def next(self, state: Any, data: Any) -> Any:
        _mark(self._marks, "began", self._round)
        output = self._process.next(state, data)
        _mark(self._marks, "ended", self._round)
        self._round += 1
        return output


def _mark(marks: pathlib.Path, what: str, round_index: int) -> None:
    with marks.open("a") as file:
        file.write(f"{what} {round_index}\n")


if __name__ == "__main__":
    processes.prepare_environment()
    run_program(pathlib.Path(sys.argv[3]), sys.argv[1], int(sys.argv[2]))
    processes.end_workers()
    (pathlib.Path(sys.argv[3]) / "done").touch()
