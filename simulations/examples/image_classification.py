"""The task of classifying images with a Keras model."""

import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from simulations.examples.images import ClientImages, Images
from simulations.training.federated_task import HELDOUT, TEST, FederatedTask
from simulations.training.task_parts import KerasEvaluation, batches, sample_order

ACCURACY = "accuracy"


def as_input(pixels: np.ndarray) -> np.ndarray:
    """Returns pixels as a model takes them, float32: uint8 ones in [-1, 1], others as they are."""
    if pixels.dtype != np.uint8:
        return pixels
    return (pixels.astype(np.float32) - 127.5) / np.float32(127.5)


def image_task(
    images: ClientImages,
    keras_model: Callable[[], tf.keras.Model],
    batch_size: int,
    epochs: int,
    seed: int,
) -> FederatedTask:
    """Returns the task of a classifier.

    Args:
      images: The images, and whose they are.
      keras_model: Makes the untrained model, from pixels as :func:`as_input` returns them to
        logits; its weights are all trainable.
      batch_size: The number of images in a local step.
      epochs: How often a client goes through its images.
      seed: Seed for the initial weights and the order of a client's images in a round.
    """

    def client_dataset(client_id: str, round_index: int) -> tf.data.Dataset:
        own = images.of(client_id)
        chosen = own[sample_order(seed, round_index, client_id, len(own))]
        slices = (as_input(chosen.pixels), chosen.labels)
        return batches(tf.data.Dataset.from_tensor_slices(slices), batch_size, epochs)

    tf.keras.utils.set_random_seed(seed % 2**32)
    splits = {
        split: Images(as_input(own.pixels), own.labels)
        for split, own in ((HELDOUT, images.heldout), (TEST, images.test))
    }
    most_frequent = int(np.argmax(np.bincount(images.train.labels)))
    return FederatedTask(
        client_ids=tuple(images.places),
        client_dataset=client_dataset,
        model_fn=functools.partial(_model, keras_model),
        initial_weights=tuple(keras_model().get_weights()),
        evaluate=functools.partial(
            _evaluate, KerasEvaluation(functools.partial(_compiled, keras_model)), splits
        ),
        accuracy=ACCURACY,
        keras_model=keras_model,
        facts={
            "num_examples": len(images.train),
            "most_frequent_class": most_frequent,
            "most_frequent_class_accuracy": float(np.mean(images.test.labels == most_frequent)),
            "num_heldout": len(images.heldout),
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
