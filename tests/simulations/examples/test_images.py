"""Whose images are: a split into groups of one kind, and the flags that ask for it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from simulations.examples import images
from simulations.examples.images import dirichlet_split
from simulations.training.federated_task import ImageData, Images
from tests.refusals import refuses

_LABELS = np.random.default_rng(5).permutation(np.repeat(np.arange(10), 60))


def _counts(places: Sequence[np.ndarray], labels: np.ndarray) -> np.ndarray:
    return np.array([np.bincount(labels[own], minlength=10) for own in places])


@pytest.mark.parametrize("concentration", [1e-3, 0.3, 1.0, 1e6])
@pytest.mark.parametrize("num_clients", [1, 7, 120, 600])
def test_a_split_is_a_partition_into_equal_sizes(num_clients: int, concentration: float) -> None:
    places = dirichlet_split(_LABELS, num_clients, concentration, seed=3)
    np.testing.assert_array_equal(np.sort(np.concatenate(places)), np.arange(600))
    smaller, larger = divmod(600, num_clients)
    assert [len(own) for own in places] == [
        smaller + (client < larger) for client in range(num_clients)
    ]
    np.testing.assert_array_equal(_counts(places, _LABELS).sum(axis=0), np.full(10, 60))


def test_a_split_is_a_function_of_its_seed() -> None:
    one, same, other = (dirichlet_split(_LABELS, 30, 1.0, seed) for seed in (4, 4, 5))
    assert all(map(np.array_equal, one, same))
    assert not all(map(np.array_equal, one, other))


_OPTIONS: dict[str, Any] = {
    "num_clients": None,
    "concentration": 1.0,
    "split_seed": 0,
    "batch_size": 1,
    "client_epochs": 1,
}


def test_flags_that_do_nothing_are_refused() -> None:
    images.check_flags(_OPTIONS, "run")
    images.check_flags(
        {**_OPTIONS, "num_clients": 5, "split_seed": 2, "batch_size": 3, "concentration": 0.1},
        "run",
    )
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"split_seed": 2}, "--num_clients"),
        ({"batch_size": 2}, "--num_clients"),
        ({"num_clients": 5, "concentration": 1e9}, "--concentration"),
        ({"num_clients": 5, "split_seed": 2**64}, "--split_seed"),
    )
    for changed, named in cases:
        with refuses(named):
            images.check_flags({**_OPTIONS, **changed}, "run")


def _data(num_test: int = 10, **changed: Any) -> ImageData:
    generator = np.random.default_rng(0)
    every = Images(generator.integers(0, 256, (600, 2, 2, 1)).astype(np.uint8), _LABELS)
    command = images.task_command(
        name="run",
        description=None,
        data_set="images",
        directory_flag=("data_dir", "Where they are."),
        size=600,
        read=lambda directory: (every, every[:num_test]),
        keras_model=lambda: None,
        single_images={},
        groups={},
    )
    data = command.open_data({**_OPTIONS, "data_dir": "images", **changed})
    assert isinstance(data, ImageData)
    return data


def test_the_fingerprint_tells_images_and_splits_apart() -> None:
    assert _data().num_clients == 600
    assert _data(num_clients=30).num_clients == 30
    found = [
        each.fingerprint()
        for each in (
            _data(),
            _data(num_clients=599),
            _data(num_clients=30),
            _data(num_clients=30, split_seed=1),
            _data(num_clients=30, concentration=0.5),
        )
    ]
    assert len(set(found)) == len(found)
    assert _data(num_clients=30).fingerprint() == found[2]
    with refuses("--num_clients=601", "600"):
        assert _data(num_clients=601).num_clients
    with refuses("--num_clients=601", "600"):
        _data(num_clients=601, data_dir=None)
    with refuses("one test image"):
        assert _data(num_test=1).num_clients
