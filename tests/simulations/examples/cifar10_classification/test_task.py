"""The task: one image for each client, a model of known size, evaluations of the two splits."""

import os

import numpy as np
import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from simulations.examples.cifar10_classification import data, run_cifar10
from simulations.examples.image_classification import task_of_clients
from simulations.examples.labelled_images import Images, as_input
from simulations.training.federated_task import HELDOUT, TEST, FederatedTask
from tests.simulations.examples.cifar10_classification import cifar10_files


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> tuple[Images, Images]:
    directory = tmp_path_factory.mktemp("cifar10") / "bin"
    return data.load(cifar10_files.write_binary(directory, 30))


@pytest.fixture(scope="module")
def cifar10(images: tuple[Images, Images]) -> FederatedTask:
    return _task(images, 3)


def _task(images: tuple[Images, Images], seed: int) -> FederatedTask:
    return task_of_clients(
        *images,
        tuple(np.arange(len(images[0]))[:, np.newaxis]),
        run_cifar10.keras_model,
        1,
        1,
        seed,
    )


def test_each_client_has_its_own_image_once(
    cifar10: FederatedTask, images: tuple[Images, Images]
) -> None:
    assert len(cifar10.client_ids) == len(set(cifar10.client_ids)) == 150
    for place in (0, 9, 149):
        ((pixels, labels),) = cifar10.client_dataset(
            cifar10.client_ids[place], 4
        ).as_numpy_iterator()
        np.testing.assert_array_equal(pixels, as_input(images[0].pixels[place : place + 1]))
        np.testing.assert_array_equal(labels, images[0].labels[place : place + 1])


def test_the_network_has_as_many_parameters_as_its_source_says(cifar10: FederatedTask) -> None:
    assert sum(weights.size for weights in cifar10.initial_weights) == 550_570
    assert run_cifar10.keras_model().count_params() == 550_570


def test_initial_weights_follow_from_the_seed(
    cifar10: FederatedTask, images: tuple[Images, Images]
) -> None:
    for seed, same in ((3, True), (4, False)):
        weights = _task(images, seed).initial_weights
        assert np.array_equal(weights[0], cifar10.initial_weights[0]) == same


@pytest.mark.long
def test_evaluations_are_of_two_splits_that_share_no_image(
    cifar10: FederatedTask, images: tuple[Images, Images]
) -> None:
    """With zero weights and one bias, the model says one class, whatever it sees."""
    weights = [np.zeros_like(array) for array in cifar10.initial_weights]
    for digit in range(10):
        weights[-1] = np.eye(10, dtype=np.float32)[digit]
        of_split = {
            split: cifar10.evaluate(weights, split)["accuracy"] for split in (HELDOUT, TEST)
        }
        assert of_split[HELDOUT] == pytest.approx(np.mean(images[1].labels[:6] == digit))
        assert of_split[TEST] == pytest.approx(np.mean(images[1].labels[6:] == digit))


def test_facts(cifar10: FederatedTask, images: tuple[Images, Images]) -> None:
    counts = np.bincount(images[0].labels, minlength=10)
    digit = cifar10.facts["most_frequent_class"]
    assert counts[digit] == counts.max()
    assert cifar10.facts["num_examples"] == 150
    assert cifar10.facts["num_heldout"] == 6
    assert cifar10.facts["most_frequent_class_accuracy"] == np.mean(images[1].labels[6:] == digit)
