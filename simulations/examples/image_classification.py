"""Tasks that classify images with a Keras model."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from simulations.examples.labelled_images import Images, as_input
from simulations.training.federated_task import HELDOUT, TEST, FederatedTask
from simulations.training.task_parts import KerasEvaluation, batches, sample_order

ACCURACY = "accuracy"

# The share of the test images that is evaluated as a model is trained; no others are seen before
# training has ended. The papers have no such split, and train with all training images.
_HELDOUT_SHARE = 0.2


def task_of_clients(
    train: Images,
    test: Images,
    places: Sequence[np.ndarray],
    keras_model: Callable[[], tf.keras.Model],
    batch_size: int,
    epochs: int,
    seed: int,
) -> FederatedTask:
    """Returns the task of a classifier whose clients have some of the training images each.

    Args:
      train: The training images, uint8 pixels.
      test: The test images, at least two.
      places: The places of each client's images among the training images.
      keras_model: Makes the untrained model, from pixels in [-1, 1] to logits.
      batch_size: Images in a local step.
      epochs: How often a client goes through its images.
      seed: Seed for the initial weights and the order of a client's images in a round.
    """
    digits = len(str(len(places)))
    names = [f"{place:0{digits}}" for place in range(len(places))]

    def client_dataset(client_id: str, round_index: int) -> tf.data.Dataset:
        own = places[int(client_id)]
        images = train[own[sample_order(seed, round_index, client_id, len(own))]]
        slices = (as_input(images.pixels), images.labels)
        return batches(tf.data.Dataset.from_tensor_slices(slices), batch_size, epochs)

    tf.keras.utils.set_random_seed(seed % 2**32)
    prepared = Images(as_input(test.pixels), test.labels)
    num_heldout = max(1, round(_HELDOUT_SHARE * len(test)))
    return image_task(
        names,
        client_dataset,
        keras_model,
        keras_model().get_weights(),
        train.labels,
        prepared[:num_heldout],
        prepared[num_heldout:],
        facts={"num_heldout": num_heldout},
    )


def image_task(
    client_ids: Sequence[str],
    client_dataset: Callable[[str, int], tf.data.Dataset],
    keras_model: Callable[[], tf.keras.Model],
    initial_weights: Sequence[np.ndarray],
    train_labels: np.ndarray,
    heldout: Images,
    test: Images,
    facts: Mapping[str, Any],
) -> FederatedTask:
    """Returns the task of a classifier.

    Args:
      client_ids: The population.
      client_dataset: From a client's id and a round to its batches of (pixels, labels): float32
        pixels of the shape that the model takes, and int32 labels.
      keras_model: Makes the untrained model, from pixels to logits; its weights are all
        trainable.
      initial_weights: The weights that training begins with.
      train_labels: All labels that clients have, from 0.
      heldout: What is evaluated as the model is trained; pixels as clients have them.
      test: What the final model is evaluated on.
      facts: What the result says besides; the number of examples and the class that most
        examples have, with its test accuracy, are added.
    """
    evaluation = KerasEvaluation(functools.partial(_compiled, keras_model))
    most_frequent = int(np.argmax(np.bincount(train_labels)))
    return FederatedTask(
        client_ids=tuple(client_ids),
        client_dataset=client_dataset,
        model_fn=functools.partial(_model, keras_model),
        initial_weights=tuple(initial_weights),
        evaluate=functools.partial(_evaluate, evaluation, {HELDOUT: heldout, TEST: test}),
        accuracy=ACCURACY,
        keras_model=keras_model,
        facts={
            "num_examples": len(train_labels),
            "most_frequent_class": most_frequent,
            "most_frequent_class_accuracy": float(np.mean(test.labels == most_frequent)),
            **facts,
        },
    )


def _model(keras_model: Callable[[], tf.keras.Model]) -> tff.learning.models.VariableModel:
    model = keras_model()
    return tff.learning.models.from_keras_model(
        model,
        loss=_loss(),
        input_spec=(
            tf.TensorSpec(model.input_shape, tf.float32),
            tf.TensorSpec((None,), tf.int32),
        ),
        metrics=[_accuracy()],
    )


def _compiled(keras_model: Callable[[], tf.keras.Model]) -> tf.keras.Model:
    model = keras_model()
    model.compile(loss=_loss(), metrics=[_accuracy()])
    return model


def _evaluate(
    evaluation: KerasEvaluation,
    splits: Mapping[str, Images],
    weights: Sequence[np.ndarray],
    split: str,
) -> Mapping[str, float]:
    images = splits[split]
    return evaluation(weights, images.pixels, images.labels)


def _loss() -> tf.keras.losses.Loss:
    return tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _accuracy() -> tf.keras.metrics.Metric:
    return tf.keras.metrics.SparseCategoricalAccuracy(name=ACCURACY)
