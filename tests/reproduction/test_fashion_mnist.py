"""Fashion-MNIST for a small model: features, gradients, and which images are for what."""

import pathlib

import numpy as np
import pytest

from reproduction import fashion_mnist
from tests.refusals import refuses
from tests.simulations.examples import fashion_mnist_files


def test_features_are_histograms_of_gradients() -> None:
    """A ramp to the right: all gradients point that way, but for the border of zeros."""
    image = np.zeros((1, 28, 28, 1), np.uint8)
    image[0, :, :, 0] = 9 * np.arange(28)
    found = fashion_mnist.features(image)
    assert found.shape == (1, 145)
    assert found.dtype == np.float32
    assert found[0, -1] == 1.0
    assert np.linalg.norm(found[0, :-1]) == pytest.approx(3.0, rel=1e-5)
    cells = found[0, :-1].reshape(4, 4, 9)
    assert np.all(cells[1:3, 1:3, 1:8] < 1e-6)
    # 49 pixels with a difference of 18 / 255 to the right, and half of the brightness.
    brightness = 0.5 * np.sum(9 * np.arange(7, 14) / 255) * 7
    ratio = np.sqrt(49 * 18 / 255 / brightness)
    assert cells[1, 1, 0] / cells[1, 1, 8] == pytest.approx(ratio, rel=1e-4)
    # Turned by a right angle, it is the middle direction of eight.
    turned = fashion_mnist.features(image.transpose(0, 2, 1, 3))[0, :-1].reshape(4, 4, 9)
    np.testing.assert_allclose(turned[1:3, 1:3, 4], cells[1:3, 1:3, 0].T, rtol=1e-4)
    assert np.all(fashion_mnist.features(np.zeros((1, 28, 28, 1), np.uint8))[0, :-1] == 0.0)


def test_gradients_are_those_of_the_cross_entropy() -> None:
    generator = np.random.default_rng(0)
    inputs, weights = generator.normal(size=(3, 4)), generator.normal(size=(4, 5))
    labels = np.array([4, 0, 2])

    def loss(at: np.ndarray, example: int) -> float:
        scores = inputs[example] @ at
        return float(np.log(np.sum(np.exp(scores))) - scores[labels[example]])

    found = fashion_mnist.gradients(weights, inputs, labels)
    for example in range(3):
        for place in np.ndindex(4, 5):
            step = np.zeros((4, 5))
            step[place] = 1e-5
            slope = (loss(weights + step, example) - loss(weights - step, example)) / 2e-5
            assert found[example][place] == pytest.approx(slope, abs=1e-8)


def test_accuracies_are_of_images_that_train_nothing(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 20 test images, the first eight choose learning rates, and the others are the test."""
    directory = fashion_mnist_files.write(tmp_path / "files", 60, 20)
    monkeypatch.setattr(fashion_mnist.data, "DEBIAN_DIRECTORY", directory)
    monkeypatch.setattr(fashion_mnist, "_NUM_HELDOUT", 8)
    with refuses("60000", "60"):
        fashion_mnist._clients()
    monkeypatch.setattr(fashion_mnist, "_POPULATION", 60)
    clients = fashion_mnist._clients()
    train, test = fashion_mnist.data.load(directory)
    assert clients.shape == (145, 10)
    cohort = np.array([5, 41])
    weights = np.random.default_rng(0).normal(size=clients.shape).astype(np.float32)
    np.testing.assert_allclose(
        clients.updates(weights, cohort),
        fashion_mnist.gradients(
            weights, fashion_mnist.features(train.pixels[cohort]), train.labels[cohort]
        ),
        atol=1e-5,
    )
    said = np.argmax(fashion_mnist.features(test.pixels) @ weights, axis=1) == test.labels
    assert clients.heldout_accuracy(weights) == pytest.approx(np.mean(said[:8]))
    assert clients.test_accuracy(weights) == pytest.approx(np.mean(said[8:]))
    most = np.argmax(np.bincount(train.labels))
    assert clients.share_of_most_frequent == np.mean(test.labels[8:] == most)
