"""The task: TFF's model and metrics, and data sets that are functions of client and round."""

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
from tensorflow_federated.python.simulation.baselines.stackoverflow import word_prediction_tasks

from stackoverflow_nwp import datasets, federated_text, run_stackoverflow, token_arrays
from stackoverflow_nwp.task import ACCURACY, ClientDatasets, NextWordTask, all_sentences
from stackoverflow_nwp.token_arrays import ClientTokens
from tests.stackoverflow_nwp.small_text import WORDS, client_data, small_examples

_TASK = NextWordTask(
    vocab_size=len(WORDS) - 1,
    sequence_length=6,
    embedding_size=4,
    lstm_size=5,
    shared_embedding=False,
)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> datasets.FederatedText:
    path = tmp_path_factory.mktemp("text") / "small.sqlite"
    federated_text.write(path, small_examples())
    return datasets.load(str(path), path.parent)


@pytest.fixture(scope="module")
def tokens(text: datasets.FederatedText) -> ClientTokens:
    return token_arrays.open_client_tokens(text.contents, "train", WORDS[:-1], 6)


@pytest.mark.long
def test_the_papers_model_has_the_papers_size() -> None:
    paper = run_stackoverflow.PAPER
    task = NextWordTask(paper.vocab_size, 20, paper.embedding_size, paper.lstm_size, False)
    assert task.keras_model().count_params() == 4_050_748


@pytest.mark.long
def test_metrics_agree_with_tffs_own_task(text: datasets.FederatedText) -> None:
    """TFF's baseline task, its pipeline and its evaluation, on the same model."""
    words = list(WORDS[:-1])
    client_spec = tff.simulation.baselines.ClientSpec(num_epochs=1, batch_size=4)
    split = {name: client_data(text.path, name) for name in ("train", "heldout", "test")}
    theirs = word_prediction_tasks.create_word_prediction_task_from_datasets(
        client_spec, None, 6, words, 1, split["train"], split["test"], split["heldout"]
    )
    tf.keras.utils.set_random_seed(3)
    weights = _TASK.keras_model().get_weights()
    sentences = all_sentences(
        token_arrays.open_client_tokens(text.contents, "test", words, 6), 10_000, seed=0
    )
    ours = _TASK.evaluate(weights, sentences)

    model = _TASK.keras_model()
    model.set_weights(weights)
    metrics = theirs.model_fn().metric_finalizers()
    assert ACCURACY in metrics
    predictions: list[np.ndarray] = []
    targets: list[np.ndarray] = []
    dataset = theirs.datasets.eval_preprocess_fn(split["test"].create_tf_dataset_from_all_clients())
    for inputs, target in dataset:
        predictions.append(np.argmax(model(inputs), axis=-1).ravel())
        targets.append(target.numpy().ravel())
    predicted, true = np.concatenate(predictions), np.concatenate(targets)
    words_only = (true >= 1) & (true <= len(words))
    assert ours[ACCURACY] == pytest.approx(np.mean((predicted == true)[words_only]))
    assert ours["num_tokens"] == np.count_nonzero(true)


def _rows(dataset: tf.data.Dataset) -> np.ndarray:
    return np.concatenate([inputs.numpy() for inputs, _ in dataset])


def test_client_datasets_depend_on_client_and_round_alone(tokens: ClientTokens) -> None:
    client = max(tokens.client_ids, key=lambda name: len(tokens.tokens_of(name)))
    make = ClientDatasets(tokens, sentences_per_client=2, batch_size=2, epochs=1, seed=4)
    np.testing.assert_array_equal(_rows(make(client, 3)), _rows(make(client, 3)))
    rounds = {_rows(make(client, index)).tobytes() for index in range(20)}
    assert len(rounds) > 1
    own = {row.tobytes() for row in tokens.tokens_of(client)[:, :-1]}
    assert {row.tobytes() for row in _rows(make(client, 0))} <= own
