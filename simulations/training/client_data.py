"""The data sets of clients in rounds, from any ``tff.simulation.datasets.ClientData``."""

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from mf_aggregators import random_streams, validation

_CACHE_BYTES = 512 * 2**20


def client_datasets(
    client_data: tff.simulation.datasets.ClientData,
    batch_size: int,
    epochs: int,
    max_examples: int | None,
    seed: int,
    cache_bytes: int = _CACHE_BYTES,
) -> Callable[[str, int], tf.data.Dataset]:
    """Returns what a run asks for the data set of a client in a round.

    A client's examples are shuffled anew for each round, and the first ``max_examples`` of
    them are what it trains on: a sample of its own in each round, which all epochs go through
    in the same order. Order and sample are a function of (seed, round, client) alone. They
    depend neither on other clients nor on TensorFlow's global seed, so a round that is run
    again after a crash sees the same data.

    ``client_data`` is asked once for a client whose examples are still in memory: its
    preprocessing is done once, and a random one gives the same in all rounds.

    Args:
      client_data: The clients. Their examples are single ones, not batches, in any structure
        of tensors that ``tf.data`` knows. All examples of a client have the same shapes:
        ``client_data.preprocess`` pads what is of different length.
      batch_size: Examples in a local step; the last step of an epoch may have fewer.
      epochs: How often a client goes through its examples of a round.
      max_examples: The most examples of a client in a round; None for all.
      seed: Any non-negative integer; the same for all rounds of a run.
      cache_bytes: The most memory for preprocessed examples; beyond it, those of the
        clients that were used longest ago are read again. 0 for none.

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

    validation.integer_at_least(cache_bytes, 0, "cache_bytes")
    cache = _Cache(client_data, cache_bytes)

    def dataset_of(client_id: str, round_index: int) -> tf.data.Dataset:
        examples = cache.examples_of(client_id)
        # Dataset.shuffle would mix TensorFlow's global seed into the order.
        order = sample_order(seed, round_index, client_id, examples.number)
        chosen = order[:max_examples]
        dataset = examples.empty
        if dataset is None:
            dataset = tf.data.Dataset.from_tensor_slices(
                tf.nest.map_structure(lambda leaf: tf.gather(leaf, chosen), examples.stacked)
            )
        return batches(dataset, batch_size, epochs)

    return dataset_of


def sample_order(seed: int, round_index: int, client_id: str, number: int) -> np.ndarray:
    """Returns the order of a client's examples in a round, a function of the arguments alone.

    Args:
      seed: The seed of the run, a non-negative integer.
      round_index: The round, from 0.
      client_id: The client's name: not its position, so that its sample does not depend on
        others.
      number: How many examples it has.

    Returns:
      (number,) int64: a uniform permutation.
    """
    name = int.from_bytes(client_id.encode("utf-8"), "little")
    generator = random_streams.generator_of(seed, random_streams.Stream.EXAMPLES, round_index, name)
    return generator.permutation(number)


def batches(dataset: tf.data.Dataset, batch_size: int, epochs: int) -> tf.data.Dataset:
    """Returns a client's examples, which are in memory, in batches, epoch after epoch."""
    options = tf.data.Options()
    # Rewriting the pipeline of a few batches costs more than it saves.
    options.autotune.enabled = False
    options.experimental_optimization.apply_default_optimizations = False
    return dataset.batch(batch_size).repeat(epochs).with_options(options)


@dataclasses.dataclass(frozen=True)
class _Examples:
    """A client's examples: how many, and one tensor for each part, or an empty data set."""

    number: int
    stacked: Any
    empty: tf.data.Dataset | None

    @property
    def num_bytes(self) -> int:
        return sum(_num_bytes(leaf) for leaf in tf.nest.flatten(self.stacked))


class _Cache:
    """The preprocessed examples of the clients that were used last."""

    def __init__(self, client_data: tff.simulation.datasets.ClientData, most_bytes: int) -> None:
        self._client_data = client_data
        self._most_bytes = most_bytes
        self._bytes = 0
        self._kept: collections.OrderedDict[str, _Examples] = collections.OrderedDict()

    def examples_of(self, client_id: str) -> _Examples:
        if client_id in self._kept:
            self._kept.move_to_end(client_id)
            return self._kept[client_id]
        examples = _read(self._client_data, client_id)
        self._kept[client_id] = examples
        self._bytes += examples.num_bytes
        while self._bytes > self._most_bytes:
            _, oldest = self._kept.popitem(last=False)
            self._bytes -= oldest.num_bytes
        return examples


def _read(client_data: tff.simulation.datasets.ClientData, client_id: str) -> _Examples:
    dataset = client_data.create_tf_dataset_for_client(client_id)
    if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise ValueError(
            "the data set of a client has no end: take `repeat` out of its "
            "preprocessing, and say how often a client goes through its data by epochs."
        )
    examples = list(dataset)
    if not examples:
        return _Examples(0, (), dataset)
    return _Examples(len(examples), _stacked(examples), None)


def _stacked(examples: list[Any]) -> Any:
    try:
        return tf.nest.map_structure(lambda *leaves: tf.stack(leaves), *examples)
    except tf.errors.InvalidArgumentError:
        raise ValueError(
            "the examples of a client have different shapes: pad them by client_data.preprocess."
        ) from None


def _num_bytes(tensor: tf.Tensor) -> int:
    if tensor.dtype == tf.string:
        return int(tf.reduce_sum(tf.strings.length(tensor)))
    return int(tf.size(tensor)) * tensor.dtype.size
