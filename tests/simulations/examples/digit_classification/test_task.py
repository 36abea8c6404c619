"""The task: clients and model as a run asks for them, and rounds of it that learn."""

import os
import pathlib

import numpy as np
import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import tensorflow_federated as tff

import mf_aggregators as mfa
from mf_aggregators.tff.processes import StopRequest
from simulations.examples.digit_classification import data, task
from simulations.examples.labelled_images import concatenated
from simulations.runs import training_loop
from simulations.runs.state_store import StateStore
from simulations.runs.training_loop import FederatedRun
from simulations.training.federated_task import HELDOUT, TEST, FederatedTask

_FORMS = data.load()


@pytest.fixture(scope="module")
def digits() -> FederatedTask:
    return task.federated_task(_FORMS, 10, batch_size=4, epochs=2, seed=3)


def test_clients_train_on_their_own_images(digits: FederatedTask) -> None:
    clients = data.clients(_FORMS, 10)
    assert set(digits.client_ids) == set(clients)
    for client in ("form01_001", "form11_013"):
        batches = list(digits.client_dataset(client, 7).as_numpy_iterator())
        labels = np.concatenate([labels for _, labels in batches])
        pixels = np.concatenate([pixels for pixels, _ in batches])
        seen = sorted((int(y), x.tobytes()) for x, y in zip(pixels, labels, strict=True))
        own = clients[client]
        twice = [(int(y), x.tobytes()) for x, y in zip(own.pixels, own.labels, strict=True)] * 2
        assert seen == sorted(twice)
        assert max(len(labels) for _, labels in batches) == 4


def test_the_untrained_model_knows_nothing(digits: FederatedTask) -> None:
    for split in (HELDOUT, TEST):
        values = digits.evaluate(digits.initial_weights, split)
        assert values["loss"] == pytest.approx(np.log(10.0), rel=1e-5)
        assert values["accuracy"] < 0.15


def test_evaluations_are_those_of_the_split(digits: FederatedTask) -> None:
    generator = np.random.default_rng(1)
    weights = (generator.normal(size=(64, 10)).astype(np.float32), np.arange(10, dtype=np.float32))
    for split, forms in ((HELDOUT, _FORMS[11:12]), (TEST, _FORMS[12:])):
        images = concatenated(forms)
        logits = images.pixels.astype(np.float64) @ weights[0] + weights[1]
        log_sums = np.log(np.sum(np.exp(logits), axis=1))
        own = logits[np.arange(len(images)), images.labels]
        values = digits.evaluate(weights, split)
        assert values["loss"] == pytest.approx(np.mean(log_sums - own), rel=1e-4)
        assert values["accuracy"] == pytest.approx(
            np.mean(np.argmax(logits, axis=1) == images.labels)
        )


def test_facts(digits: FederatedTask) -> None:
    train = np.concatenate([form.labels for form in _FORMS[:11]])
    test = np.concatenate([form.labels for form in _FORMS[12:]])
    digit = digits.facts["most_frequent_class"]
    counts = [int(np.sum(train == other)) for other in range(10)]
    assert counts[digit] == max(counts)
    assert digits.facts["most_frequent_class_accuracy"] == np.mean(test == digit)
    assert digits.facts["num_examples"] == len(train)


@pytest.mark.long
def test_the_training_loop_runs_it(digits: FederatedTask, tmp_path: pathlib.Path) -> None:
    num_rounds = 4
    participation = mfa.participation.MinSeparation(2)
    process = tff.learning.algorithms.build_unweighted_fed_avg(
        digits.model_fn,
        tff.learning.optimizers.build_sgdm(0.5),
        model_aggregator=mfa.mf_dp_aggregator(
            mfa.factorizations.identity(num_rounds),
            participation=participation,
            noise_multiplier=0.0,
            allow_no_noise=True,
            clip_norm=10.0,
            clients_per_round=12,
        ),
    )
    weights = tff.learning.models.ModelWeights(list(digits.initial_weights), [])
    run = FederatedRun(
        process=process,
        initial_state=process.set_model_weights(process.initialize(), weights),
        participation=participation,
        num_rounds=num_rounds,
        clients_per_round=12,
        client_ids=digits.client_ids,
        client_dataset=digits.client_dataset,
        seed=1,
    )
    store = StateStore(tmp_path / "states", tmp_path / "ledger.npz")
    rounds = list(training_loop.rounds(run, store, training_loop.start(run, store), StopRequest()))
    assert len(rounds) == num_rounds
    assert digits.accuracy in rounds[0].metrics["client_work"]["train"]
    trained = process.get_model_weights(rounds[-1].state).trainable
    # One of ten without training; chance alone reaches a half of 252 never.
    assert digits.evaluate(trained, TEST)["accuracy"] > 0.5
