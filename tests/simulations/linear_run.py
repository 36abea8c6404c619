"""A small federated run of a linear model, for tests that stop, kill and resume it.

As a program it waits for two lines on its standard input, a directory and the noise's
storage. Then it runs the rounds that are left in the directory, and leaves there what a test
needs to kill it at a chosen moment and to compare what it released.
"""

import dataclasses
import os
import pathlib
import sys
import warnings
from typing import Any

import numpy as np

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import tensorflow as tf
import tensorflow_federated as tff

import mf_aggregators as mfa
from mf_aggregators.dp_query import FixedSeedWarning
from mf_aggregators.participation import MinSeparation
from mf_aggregators.row_layout import PANEL
from simulations import atomic_files, quiet, training_loop
from simulations.quiet import StopRequest
from simulations.state_store import StateStore
from simulations.training_loop import FederatedRun

CLIENTS = tuple(f"client_{i}" for i in range(9))
PARTICIPATION = MinSeparation(3)
# Of the program: with three bands, blocks of 1, 1, 2, 4 and 4 rounds, of two panels.
PROGRAM_ROUNDS = 12
PROGRAM_FEATURES = PANEL + 1000


def learning_process(
    num_rounds: int, num_features: int = 2, **noise: Any
) -> tff.learning.templates.LearningProcess:
    """Returns federated averaging of a linear model under banded noise of a fixed seed.

    Args:
      num_rounds: The rounds that there is noise for.
      num_features: The model has one parameter more.
      **noise: Arguments of the aggregator.
    """

    def model_fn() -> tff.learning.models.VariableModel:
        inputs = tf.keras.Input((num_features,))
        outputs = tf.keras.layers.Dense(1, kernel_initializer="zeros")(inputs)
        return tff.learning.models.from_keras_model(
            tf.keras.Model(inputs, outputs),
            loss=tf.keras.losses.MeanSquaredError(),
            input_spec=(tf.TensorSpec((None, num_features)), tf.TensorSpec((None, 1))),
        )

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FixedSeedWarning)
        return tff.learning.algorithms.build_unweighted_fed_avg(
            model_fn,
            tff.learning.optimizers.build_sgdm(0.01),
            model_aggregator=mfa.mf_dp_aggregator(
                mfa.factorizations.banded(mfa.workloads.prefix_sum(num_rounds), 3),
                participation=PARTICIPATION,
                noise_multiplier=1.0,
                clip_norm=1.0,
                clients_per_round=3,
                seed=5,
                **noise,
            ),
        )


def federated_run(
    process: Any, num_rounds: int, num_features: int = 2, **changes: Any
) -> FederatedRun:
    """Returns a run of the process.

    Args:
      process: What :func:`learning_process` returned.
      num_rounds: The number of rounds.
      num_features: Of the process.
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


def run_program(directory: pathlib.Path, noise_storage: str) -> None:
    """Runs the rounds that are left; see the module's docstring.

    ``marks-<pid>`` has a line ``began <round>`` and one ``ended <round>`` around the
    process's part of each round, and ``released/<round>-<pid>`` the model after it.

    Args:
      directory: Of the run.
      noise_storage: Of the aggregator.
    """
    noise = {"noise_storage": noise_storage, "noise_directory": directory / "noise"}
    process = learning_process(PROGRAM_ROUNDS, PROGRAM_FEATURES, **noise)
    run = federated_run(process, PROGRAM_ROUNDS, PROGRAM_FEATURES)
    store = store_of(directory)
    progress = training_loop.start(run, store)
    marked = _MarkedProcess(process, progress.num_rounds, directory / f"marks-{os.getpid()}")
    run = dataclasses.replace(run, process=marked)
    (directory / "released").mkdir(exist_ok=True)
    for finished in training_loop.rounds(run, store, progress, StopRequest()):
        path = directory / "released" / f"{finished.index}-{os.getpid()}"
        with atomic_files.writing(path) as file:
            np.save(file, weights_of(process, finished.state))


class _MarkedProcess:
    """A learning process that writes down when a round begins and ends."""

    def __init__(self, process: Any, first_round: int, marks: pathlib.Path) -> None:
        self._process = process
        self._round = first_round
        self._marks = marks

    def next(self, state: Any, data: Any) -> Any:
        self._mark("began")
        output = self._process.next(state, data)
        self._mark("ended")
        self._round += 1
        return output

    def _mark(self, what: str) -> None:
        with self._marks.open("a") as file:
            file.write(f"{what} {self._round}\n")


if __name__ == "__main__":
    quiet.prepare_environment()
    quiet.end_workers_at_exit()
    # Nothing is read if it was never needed.
    if directory_line := sys.stdin.readline():
        run_program(pathlib.Path(directory_line.strip()), sys.stdin.readline().strip())
