"""TFF's character task on the plays: its own preprocessing, client by client."""

from typing import Any

import numpy as np
import pytest
import tensorflow_federated as tff
from tensorflow_federated.python.simulation.baselines.shakespeare import (
    char_prediction_preprocessing,
)

from simulations.training.federated_task import FederatedTask
from stackoverflow_nwp import character_task, shakespeare
from stackoverflow_nwp.shakespeare import Speeches

_ROLES = {
    f"play_{role}": [f"{role} speaks number {i}.\nAnd goes on {'so ' * (7 * i)}" for i in range(8)]
    for role in ("KING", "FOOL", "QUEEN", "GHOST", "CLOWN", "LORD", "LADY", "PAGE", "BOY")
}
_OPTIONS: dict[str, Any] = {
    "batch_size": 2,
    "client_epochs": 1,
    "sentences_per_client": 5,
    "heldout_sentences": 3,
    "test_sentences": 4,
}


@pytest.fixture(scope="module")
def speeches() -> Speeches:
    return Speeches("plays", shakespeare.split(_ROLES))


@pytest.fixture(scope="module")
def task(speeches: Speeches) -> FederatedTask:
    return character_task.federated_task(speeches, _OPTIONS, seed=3)


@pytest.mark.long
def test_clients_train_on_what_tffs_preprocessing_makes_of_their_speeches(
    task: FederatedTask, speeches: Speeches
) -> None:
    assert sum(weights.size for weights in task.initial_weights) == 820_522
    assert sorted(task.client_ids) == sorted(_ROLES)
    spec = tff.simulation.baselines.ClientSpec(num_epochs=1, batch_size=1, shuffle_buffer_size=1)
    preprocess = char_prediction_preprocessing.create_preprocess_fn(spec)
    client = "play_FOOL"
    client_data = tff.simulation.datasets.TestClientData(
        {client: {"snippets": [text.encode() for text in speeches.by_split["train"][client]]}}
    )
    dataset = preprocess(client_data.create_tf_dataset_for_client(client))
    expected = {given.tobytes() + wanted.tobytes() for given, wanted in dataset.as_numpy_iterator()}
    seen = set()
    for round_index in range(6):
        batches = list(task.client_dataset(client, round_index).as_numpy_iterator())
        assert [len(given) for given, _ in batches] == [2, 2, 1]
        for given, wanted in batches:
            np.testing.assert_array_equal(given[:, 1:], wanted[:, :-1])
            seen |= {a.tobytes() + b.tobytes() for a, b in zip(given, wanted, strict=True)}
    assert seen <= expected
    assert len(seen) > 5


@pytest.mark.long
def test_an_untrained_model_knows_nothing(task: FederatedTask) -> None:
    for split in ("heldout", "test"):
        values = task.evaluate(task.initial_weights, split)
        assert values["loss"] == pytest.approx(np.log(90), abs=0.05)
        assert 0 <= values["accuracy"] < 0.1
