"""The data sets of clients in rounds, from any ``tff.simulation.datasets.ClientData``."""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from mf_aggregators import validation
from simulations import cohorts


def client_datasets(
    client_data: tff.simulation.datasets.ClientData,
    batch_size: int,
    epochs: int,
    max_examples: int | None,
    seed: int,
) -> Callable[[str, int], tf.data.Dataset]:
    """Returns what a run asks for the data set of a client in a round.

    A client's examples are shuffled anew for each round, and the first ``max_examples`` of
    them are what it trains on: a sample of its own in each round, which all epochs go through
    in the same order. Order and sample are a function of (seed, round, client) alone. They
    depend neither on other clients nor on TensorFlow's global seed, so a round that is run
    again after a crash sees the same data.

    Args:
      client_data: The clients. Their examples are single ones, not batches, in any structure
        of tensors that ``tf.data`` knows. All examples of a client have the same shapes:
        ``client_data.preprocess`` pads what is of different length.
      batch_size: Examples in a local step; the last step of an epoch may have fewer.
      epochs: How often a client goes through its examples of a round.
      max_examples: The most examples of a client in a round; None for all.
      seed: Any non-negative integer; the same for all rounds of a run.

    Returns:
      From a client's id and a round, from 0, to the client's batches in that round. It raises
      ValueError for a client without end (``repeat`` without a count) or with examples of
      different shapes, and what ``client_data`` raises for a client that it does not have.

    Raises:
      ValueError: If a number is out of its range.
    """
    validation.positive_integer(batch_size, "batch_size")
    validation.positive_integer(epochs, "epochs")
    if max_examples is not None:
        validation.positive_integer(max_examples, "max_examples")
    validation.integer_at_least(seed, 0, "seed")

    def dataset_of(client_id: str, round_index: int) -> tf.data.Dataset:
        dataset = client_data.create_tf_dataset_for_client(client_id)
        if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
            raise ValueError(
                f"the data set of client {client_id!r} has no end: take `repeat` out of its "
                "preprocessing, and say how often a client goes through its data by epochs."
            )
        # Dataset.shuffle would mix TensorFlow's global seed into the order.
        examples = list(dataset)
        order = _generator(seed, round_index, client_id).permutation(len(examples))
        chosen = [examples[place] for place in order[:max_examples]]
        if chosen:
            dataset = tf.data.Dataset.from_tensor_slices(_stacked(chosen, client_id))
        return dataset.batch(batch_size).repeat(epochs)

    return dataset_of


def _generator(seed: int, round_index: int, client_id: str) -> np.random.Generator:
    # A client's name, not its position, so that its sample does not depend on others.
    name = int.from_bytes(client_id.encode("utf-8"), "little")
    # Cohorts are drawn with the round alone.
    return cohorts.generator_of(seed, 1, round_index, name)


def _stacked(examples: list[Any], client_id: str) -> Any:
    try:
        return tf.nest.map_structure(lambda *leaves: tf.stack(leaves), *examples)
    except tf.errors.InvalidArgumentError:
        raise ValueError(
            f"the examples of client {client_id!r} have different shapes: pad them by "
            "client_data.preprocess."
        ) from None
