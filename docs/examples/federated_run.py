"""Trains a Keras model with 300 clients, some of which drop out; resumes after a kill.

    python federated_run.py run

The same command begins the run, goes on with it, and writes its statement at the end, beside the
files from which ``mf-report --statement=`` makes one that others can verify.
"""

import pathlib
import sys

import numpy as np
import sklearn.datasets
import tensorflow as tf
import tensorflow_federated as tff

import mf_aggregators as mfa
from mf_aggregators.tff import processes
from simulations.devices.device_behaviour import DeviceBehaviour
from simulations.runs.training_loop import FederatedRun, Progress, StateStore, rounds, start

NAMES = tuple(f"client {number}" for number in range(300))
NUM_ROUNDS, COHORT, DELTA = 20, 20, 1e-3
PIXELS, LABELS = sklearn.datasets.load_digits(return_X_y=True)


def client_dataset(name: str, round_index: int) -> tf.data.Dataset:
    """Returns a client's training data, which depend on its name and the round alone."""
    first = 5 * int(name.split()[1])
    pixels = (PIXELS[first : first + 5] / 16).astype(np.float32)
    labels = LABELS[first : first + 5].astype(np.int32)
    return tf.data.Dataset.from_tensor_slices((pixels, labels)).repeat(3).batch(5)


def model_fn() -> tff.learning.models.VariableModel:
    """Returns TFF's form of a Keras model, a linear classifier of digits."""
    inputs = tf.keras.Input((64,))
    outputs = tf.keras.layers.Dense(10, kernel_initializer="zeros")(inputs)
    return tff.learning.models.from_keras_model(
        tf.keras.Model(inputs, outputs),
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        input_spec=client_dataset(NAMES[0], 0).element_spec,
    )


def main(folder: pathlib.Path) -> None:
    """Runs the remaining rounds of the run in a folder."""
    # End TFF's worker with this script: it would outlive the script, and keep a pipe of its output
    # open.
    processes.end_workers_at_exit()
    timers = mfa.participation.MinSeparation(separation=8)
    matrix = mfa.factorizations.banded(NUM_ROUNDS, num_bands=8, participation=timers)
    mechanism = mfa.calibrate(matrix, timers, epsilon=4.0, delta=DELTA)
    aggregator = mfa.mf_dp_aggregator(
        mechanism, clip_norm=0.5, clients_per_round=COHORT, noise_directory=folder / "noise"
    )
    process = tff.learning.algorithms.build_unweighted_fed_avg(
        model_fn,
        client_optimizer_fn=tff.learning.optimizers.build_sgdm(learning_rate=0.5),
        model_aggregator=aggregator,
    )
    run = FederatedRun(
        process=process,
        initial_state=process.initialize(),
        participation=timers,
        num_rounds=NUM_ROUNDS,
        clients_per_round=COHORT,
        client_ids=NAMES,
        client_dataset=client_dataset,
        seed=1,
        behaviour=DeviceBehaviour(dropout_probability=0.2, over_selection=1.5),
    )
    store = StateStore(folder / "states", folder / "ledger.npz")
    progress = start(run, store)
    for done in rounds(run, store, progress, processes.StopRequest()):
        progress = Progress(done.state, done.index + 1, done.ledger)
        print(f"round {progress.num_rounds}, {len(done.ledger.cohorts[-1])} updates", flush=True)
    counts = [len(cohort) for cohort in progress.ledger.cohorts]
    # With the ledger, these are the files that mf-report needs for a statement.
    mechanism.save(folder / "mechanism")
    (folder / "counts.csv").write_text("".join(f"{count}\n" for count in counts))
    statement = aggregator.statement(
        folder / "ledger.npz",
        state=progress.state,
        round_counts=counts,
        population=len(NAMES),
        public_data="none",
        enforcement="The loop leaves out clients until their timers end.",
        simulation=["Parts of a data set stand for clients."],
        delta=DELTA,
    )
    statement.write(folder / "PRIVACY.md", folder / "PRIVACY.json")
    np.savez(folder / "model.npz", *process.get_model_weights(progress.state).trainable)
    print(f"{folder / 'PRIVACY.md'}: {statement.plan}")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
