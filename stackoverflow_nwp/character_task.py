"""TFF's Shakespeare task of predicting the next character, with TFF's model and preprocessing."""

import collections
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff
from tensorflow_federated.python.simulation.baselines import keras_metrics
from tensorflow_federated.python.simulation.baselines.shakespeare import (
    char_prediction_models,
    char_prediction_preprocessing,
    char_prediction_tasks,
)

from mf_aggregators import random_streams
from simulations.training import training_parts
from simulations.training.federated_task import HELDOUT, TEST, FederatedTask, integers
from simulations.training.training_parts import keras_evaluation
from stackoverflow_nwp.shakespeare import CHARACTER_MODEL, Speeches

# TFF's name of the accuracy, which does not count padding.
ACCURACY = "accuracy"

_SEQUENCE_LENGTH = CHARACTER_MODEL["sequence_length"]
_PADDING = char_prediction_preprocessing.get_special_tokens()[0]


def federated_task(speeches: Speeches, options: Mapping[str, object], seed: int) -> FederatedTask:
    """Returns TFF's next-character task on Shakespeare's plays.

    Args:
        speeches: The speeches of all roles, which are the clients.
        options: The flags of the run, by name.
        seed: Seed for the initial weights and for what clients sample of their data.
    """
    of_split = {split: _client_data(speeches.by_split[split]) for split in ("train", HELDOUT, TEST)}
    task = char_prediction_tasks.create_character_prediction_task_from_datasets(
        _SPEC, None, _SEQUENCE_LENGTH, of_split["train"], of_split[TEST]
    )
    preprocess = char_prediction_preprocessing.create_preprocess_fn(_SPEC, _SEQUENCE_LENGTH)
    wanted = integers(options, "heldout_sentences", "test_sentences")
    pieces = {
        split: _pieces(of_split[split], preprocess, wanted[number], seed, number)
        for number, split in enumerate((HELDOUT, TEST))
    }
    in_round = ("batch_size", "client_epochs", "sentences_per_client")
    batch_size, epochs, most = integers(options, *in_round)
    evaluation = keras_evaluation(_compiled_model)

    def evaluate(weights: Sequence[np.ndarray], split: str) -> Mapping[str, float]:
        return evaluation(weights, *pieces[split], batch_size=64)

    tf.keras.utils.set_random_seed(seed % 2**32)
    token, accuracy = _most_frequent(pieces[HELDOUT][1], pieces[TEST][1])
    return FederatedTask(
        client_ids=tuple(of_split["train"].client_ids),
        client_dataset=training_parts.client_datasets(
            of_split["train"].preprocess(lambda dataset: preprocess(dataset).unbatch()),
            batch_size,
            epochs,
            most,
            seed,
        ),
        model_fn=task.model_fn,
        initial_weights=tuple(_keras_model().get_weights()),
        evaluate=evaluate,
        accuracy=ACCURACY,
        facts={
            "most_frequent_character": char_prediction_preprocessing.CHAR_VOCAB[token - 1],
            "most_frequent_character_accuracy": accuracy,
        },
    )


# TFF's preprocessing gives a client's speeches in their order, once, in batches of one. It does not
# shuffle: the run's seed alone decides which speeches a round uses.
_SPEC = tff.simulation.baselines.ClientSpec(num_epochs=1, batch_size=1, shuffle_buffer_size=1)


def _client_data(by_role: Mapping[str, Sequence[str]]) -> tff.simulation.datasets.ClientData:
    return tff.simulation.datasets.TestClientData(
        {
            role: collections.OrderedDict(snippets=[speech.encode() for speech in own])
            for role, own in by_role.items()
        }
    )


def _pieces(
    client_data: tff.simulation.datasets.ClientData,
    preprocess: Callable[[tf.data.Dataset], tf.data.Dataset],
    at_most: int,
    seed: int,
    number: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns inputs and targets of randomly chosen whole roles, until there are enough."""
    generator = random_streams.generator_of(seed, random_streams.Stream.EVALUATION, number)
    ids = client_data.client_ids
    inputs: list[np.ndarray] = []
    targets: list[np.ndarray] = []
    for place in generator.permutation(len(ids)):
        dataset = preprocess(client_data.create_tf_dataset_for_client(ids[place]))
        for given, wanted in dataset.as_numpy_iterator():
            inputs.append(given)
            targets.append(wanted)
        if len(inputs) >= at_most:
            break
    return np.concatenate(inputs)[:at_most], np.concatenate(targets)[:at_most]


def _most_frequent(heldout: np.ndarray, test: np.ndarray) -> tuple[int, float]:
    """Returns the most frequent character of held-out speeches, and its test accuracy."""
    number = len(char_prediction_preprocessing.CHAR_VOCAB)
    counts = np.bincount(heldout.ravel(), minlength=number + 1)[1 : number + 1]
    token = 1 + int(np.argmax(counts))
    targets = test[test != _PADDING]
    return token, float(np.mean(targets == token))


def _keras_model() -> tf.keras.Model:
    return char_prediction_models.create_recurrent_model(
        char_prediction_tasks.VOCAB_LENGTH, _SEQUENCE_LENGTH
    )


def _loss() -> tf.keras.losses.Loss:
    return tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=_PADDING)


def _compiled_model() -> tf.keras.Model:
    model = _keras_model()
    metric = keras_metrics.MaskedCategoricalAccuracy(name=ACCURACY, masked_tokens=[_PADDING])
    model.compile(loss=_loss(), weighted_metrics=[metric])
    return model
