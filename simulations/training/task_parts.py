"""Parts of tasks: the batches of clients in rounds, and evaluations."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from mf_aggregators import random_streams
from mf_aggregators.kernel import numbers

# The number of clients with examples in memory: a large cohort.
_MOST_CACHED = 2000


def client_datasets(
    client_data: tff.simulation.datasets.ClientData,
    batch_size: int,
    epochs: int,
    max_examples: int | None,
    seed: int,
    most_cached: int = _MOST_CACHED,
) -> Callable[[str, int], tf.data.Dataset]:
    """Returns a function from a client and a round to a data set.

    A client trains on a sample of its own in each round: the first ``max_examples`` of its
    shuffled examples, in the same order in all epochs. Order and sample are a function of (seed,
    round, client) alone, and not of other clients or TensorFlow's global seed, so a round that is
    run again after a crash sees the same data.

    ``client_data`` is not asked again for a client whose examples are still in memory: a random
    preprocessing gives the same in all rounds.

    Args:
      client_data: The clients. Their examples are single ones, not batches, in any structure
        of tensors that ``tf.data`` knows. All examples of a client have the same shapes:
        ``client_data.preprocess`` pads what is of different length.
      batch_size: Examples in a local step; the last step of an epoch may have fewer.
      epochs: How often a client goes through its examples of a round.
      max_examples: The most examples of a client in a round; None for all.
      seed: Any non-negative integer; the same for all rounds of a run.
      most_cached: The clients whose examples stay in memory; beyond them, those of the clients that
        were used longest ago are read again. 0 for none.

    Returns:
      From a client's id and a round, from 0, to the client's batches in that round. It raises
      ValueError for a client without end (``repeat`` without a count) or with examples of
      different shapes, and what ``client_data`` raises for a client that it does not have.

    Raises:
      ValueError: If a number is out of its range.
    """
    most = 1 if max_examples is None else max_examples
    for name, number in (("batch_size", batch_size), ("epochs", epochs), ("max_examples", most)):
        numbers.positive_integer(number, name)
    examples_of = functools.lru_cache(most_cached)(functools.partial(_read, client_data))

    def dataset_of(client_id: str, round_index: int) -> tf.data.Dataset:
        number, examples = examples_of(client_id)
        # Dataset.shuffle would mix TensorFlow's global seed into the order.
        chosen = sample_order(seed, round_index, client_id, number)[:max_examples]
        if number:
            examples = tf.data.Dataset.from_tensor_slices(
                tf.nest.map_structure(lambda leaf: tf.gather(leaf, chosen), examples)
            )
        return batches(examples, batch_size, epochs)

    return dataset_of


def sample_order(seed: int, round_index: int, client_id: str, number: int) -> np.ndarray:
    """Returns (number,) int64: the order of a client's examples in a round.

    It is a uniform permutation, and a function of the seed of the run, the round (from 0) and the
    client's name: not of its position, so that its sample does not depend on others.
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


def keras_evaluation(
    compiled_model: Callable[[], tf.keras.Model],
) -> Callable[..., Mapping[str, float]]:
    """Returns a function that evaluates weights on examples. Its graph is made once.

    Args:
      compiled_model: Makes the model, compiled with its loss and metrics. It is called at each
        evaluation; the first model is the one that is evaluated.

    Returns:
      A function of the model's weights, in its order; the inputs and the targets, (m, ...) arrays
      with an example in each row; and ``batch_size``, the examples of a step, 32 by default, on
      which values do not depend but for rounding. It returns ``loss`` and the metrics by name.
    """
    first_model = functools.cache(compiled_model)

    def evaluate(
        weights: Sequence[np.ndarray], inputs: np.ndarray, targets: np.ndarray, batch_size: int = 32
    ) -> Mapping[str, float]:
        model = first_model()
        # tff.learning builds models in graphs of its own, where Keras exchanges the classes of the
        # model and of each of its layers for those of TensorFlow 1, until all of them are made
        # outside a graph again. That is quick, compared with tracing an evaluation.
        compiled_model()
        model.set_weights(list(weights))
        values = model.evaluate(inputs, targets, batch_size=batch_size, verbose=0, return_dict=True)
        return {name: float(value) for name, value in values.items()}

    return evaluate


def _read(client_data: tff.simulation.datasets.ClientData, client_id: str) -> tuple[int, Any]:
    """A client's number of examples, and a tensor for each of their parts; or an empty data set."""
    dataset = client_data.create_tf_dataset_for_client(client_id)
    if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise ValueError(
            "the data set of a client has no end: take `repeat` out of its "
            "preprocessing, and say how often a client goes through its data by epochs."
        )
    examples = list(dataset)
    if not examples:
        return 0, dataset
    try:
        stacked = tf.nest.map_structure(lambda *leaves: tf.stack(leaves), *examples)
    except tf.errors.InvalidArgumentError:
        raise ValueError(
            "the examples of a client have different shapes: pad them by client_data.preprocess."
        ) from None
    return len(examples), stacked
