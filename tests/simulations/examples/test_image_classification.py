"""The task: clients and model as a run asks for them, and rounds of it that learn."""

import os

import numpy as np
import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from simulations.examples import digits as digit_images
from simulations.examples.image_classification import as_input, image_task
from simulations.examples.images import concatenated
from simulations.training.federated_task import HELDOUT, TEST, FederatedTask

_FORMS = digit_images.load()
_CLIENTS = digit_images.clients(_FORMS, 10)


@pytest.fixture(scope="module")
def digits() -> FederatedTask:
    return image_task(_CLIENTS, digit_images.keras_model, batch_size=4, epochs=2, seed=3)


def test_clients_train_on_their_own_images(digits: FederatedTask) -> None:
    assert set(digits.client_ids) == set(_CLIENTS.places)
    for client in ("form01_001", "form11_013"):
        batches = list(digits.client_dataset(client, 7).as_numpy_iterator())
        labels = np.concatenate([labels for _, labels in batches])
        pixels = np.concatenate([pixels for pixels, _ in batches])
        seen = sorted((int(y), x.tobytes()) for x, y in zip(pixels, labels, strict=True))
        own = _CLIENTS.of(client)
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


def test_inputs_are_within_one() -> None:
    found = as_input(np.array([0, 51, 255], np.uint8))
    np.testing.assert_allclose(found, [-1.0, -0.6, 1.0], rtol=1e-6)
    assert found.dtype == np.float32
