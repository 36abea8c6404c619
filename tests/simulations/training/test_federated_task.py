"""The task of labelled images: what clients train on, evaluations, and inputs."""

import numpy as np
import pytest

from simulations.examples import digits as digit_images
from simulations.training.federated_task import (
    HELDOUT,
    TEST,
    FederatedTask,
    as_input,
    concatenated,
    image_task,
)

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


def test_inputs_are_within_one() -> None:
    found = as_input(np.array([0, 51, 255], np.uint8))
    np.testing.assert_allclose(found, [-1.0, -0.6, 1.0], rtol=1e-6)
    assert found.dtype == np.float32
