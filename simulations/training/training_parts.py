"""Parts of training in TensorFlow: clients' batches, evaluations, learning rates, private sums.

Batches and evaluations are for tasks to use. Private aggregation is that of all runs: each client's
update is measured, set to zero if any of its entries is too large, and clipped; the sum gets the
round's noise. This order keeps the guarantee. Zeroing and clipping are functions of one client's
update alone, with thresholds fixed in advance. Whatever an update is, its clipped form in the sum
has an L2 norm of at most the clip norm, and one client changes the sum by no more. The sensitivity
is that of clipping alone. (A threshold that followed from the updates of a round, a quantile of
their norms for instance, has to be released privately itself, as ``mf_aggregators.AdaptiveClip``
releases its clip norm.)

The measurements are exact statistics of the clients' updates, without any noise. They are
for simulations on data that may be looked at; published from a deployment, they would void
the guarantee.
"""

import collections
import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

import mf_aggregators as mfa
from mf_aggregators import AdaptiveClip, Mechanism, random_streams
from mf_aggregators.factorizations import Factorization
from mf_aggregators.kernel import numbers
from mf_aggregators.participation import Participation
from mf_aggregators.private_metrics import PrivateMetrics

# The default of most_cached, the number of clients with examples in memory: a large cohort.
_MOST_CACHED = 2000
# The statistics of a round's updates: sums over clients, and the largest norm.
_TOTALS = ("updates", "non_finite", "zeroed", "clipped", "norms", "max_norm")
_OF_CLIP = ("clip_norm", "unclipped_fraction", "next_clip_norm")


def client_datasets(
    client_data: tff.simulation.datasets.ClientData,
    batch_size: int,
    epochs: int,
    max_examples: int | None,
    seed: int,
    most_cached: int = _MOST_CACHED,
) -> Callable[[str, int], tf.data.Dataset]:
    """Returns a function from a client's id and a round to the client's batches in that round.

    A client trains on a sample of its own in each round: the first ``max_examples`` of its
    shuffled examples, in the same order in all epochs. Order and sample are a function of (seed,
    round, client) alone, and not of other clients or TensorFlow's global seed, so a round that is
    run again after a crash sees the same data.

    As long as a client's examples are in memory, ``client_data`` is not read again: a random
    preprocessing then gives the same examples in all rounds.

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
        # The order is not made by Dataset.shuffle, which would mix TensorFlow's global seed into
        # it.
        chosen = sample_order(seed, round_index, client_id, number)[:max_examples]
        if number:
            examples = tf.data.Dataset.from_tensor_slices(
                tf.nest.map_structure(lambda leaf: tf.gather(leaf, chosen), examples)
            )
        return batches(examples, batch_size, epochs)

    return dataset_of


def sample_order(seed: int, round_index: int, client_id: str, number: int) -> np.ndarray:
    """Returns the random order of a client's examples in a round, as (number,) int64 places.

    The order is a uniform permutation and a function of the run's seed, the round (from 0) and the
    client's name. It does not depend on the client's position, so not on other clients.
    """
    name = int.from_bytes(client_id.encode("utf-8"), "little")
    generator = random_streams.generator_of(seed, random_streams.Stream.EXAMPLES, round_index, name)
    return generator.permutation(number)


def batches(dataset: tf.data.Dataset, batch_size: int, epochs: int) -> tf.data.Dataset:
    """Returns a data set of a client's in-memory examples in batches, repeated for each epoch."""
    options = tf.data.Options()
    # tf.data's optimisations are off: for a few batches they cost more time than they save.
    options.autotune.enabled = False
    options.experimental_optimization.apply_default_optimizations = False
    return dataset.batch(batch_size).repeat(epochs).with_options(options)


def keras_evaluation(
    compiled_model: Callable[[], tf.keras.Model],
) -> Callable[..., Mapping[str, float]]:
    """Returns a function that evaluates a Keras model's weights; its graph is made once.

    Args:
      compiled_model: Makes the model, compiled with its loss and metrics. This function is called
        at each evaluation, but the first model is evaluated each time.

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
        # Make another model, outside a graph, before each evaluation. When tff.learning builds
        # models in graphs of its own, Keras exchanges the classes of models and layers for those of
        # TensorFlow 1, until a model is made outside a graph again. Making a model is quick,
        # compared with tracing an evaluation.
        compiled_model()
        model.set_weights(list(weights))
        values = model.evaluate(inputs, targets, batch_size=batch_size, verbose=0, return_dict=True)
        return {name: float(value) for name, value in values.items()}

    return evaluate


def _read(client_data: tff.simulation.datasets.ClientData, client_id: str) -> tuple[int, Any]:
    """Returns a client's number of examples, and these as tensors (if none, an empty data set)."""
    dataset = client_data.create_tf_dataset_for_client(client_id)
    if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise ValueError(
            "the data set of a client is infinite: remove `repeat` from its preprocessing, and "
            "give the number of passes as epochs."
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


def rate_of_round(rates: Sequence[float] | np.ndarray) -> Callable[[Any], Any]:
    """Returns the function for ``tff.learning.optimizers.schedule_learning_rate``.

    Args:
      rates: The n learning rates, finite and not negative.

    Returns:
      A function from a scalar integer tensor, the round from 0, to its learning rate, a
      scalar float32 tensor. From round n on it is the last rate: TFF asks for the rate of
      the round that comes after the last.

    Raises:
      ValueError: If the rates are not a vector of at least one finite, non-negative number.
    """
    values = np.asarray(rates, dtype=np.float64)
    if values.ndim != 1 or not values.size or not np.all((values >= 0.0) & np.isfinite(values)):
        raise ValueError("rates must be a vector of finite numbers of at least 0, one a round.")

    def rate(round_index: Any) -> Any:
        # Make the constant here, so that it belongs to the graph that TFF is building.
        table = tf.constant(values, tf.float32)
        return tf.gather(table, tf.minimum(round_index, len(values) - 1))

    return rate


def aggregator(
    mechanism: Mechanism | Factorization | str | os.PathLike[str],
    *,
    clip_norm: float | AdaptiveClip,
    clients_per_round: float,
    zeroing_norm: float | None = None,
    measure: bool = True,
    metrics: PrivateMetrics | None = None,
    **others: object,
) -> tff.aggregators.UnweightedAggregationFactory:
    """Returns ``mf_aggregators.mf_dp_aggregator`` with zeroing of large updates and measurements.

    With ``measure``, the metrics of a round of ``tff.learning`` have, below ``aggregator``
    (float64 but for the int64 counts; without noise, see the module's docstring):

    * ``num_updates``: how many clients' updates arrived;
    * ``non_finite_updates``: how many of them had a NaN or infinite entry (or, in double
      precision, one above 1e154); they count in nothing below but the divisor of the
      fractions;
    * ``update_norm``, ``max_update_norm``: mean and largest L2 norm of the updates, before
      zeroing and clipping; 0 if there are none;
    * ``zeroed_fraction``: of the updates, those that had an entry above ``zeroing_norm``; 0
      without zeroing;
    * ``clipped_fraction``: of the updates, those that were scaled down and not zeroed; not for
      a clip norm that adapts, which is released with its own fraction, see
      :func:`released_clip`;
    * ``released_norm``: L2 norm of the released mean, noise included; this one is private.

    The metrics of the inner processes are there as well; zeroing puts those of
    ``mf_dp_aggregator`` below ``zeroing``.

    Args:
      mechanism: The mechanism; or a factorization, or the directory of its checkpoint, with
        ``participation=`` and ``noise_multiplier=`` as ``mf_dp_aggregator`` takes them.
      clip_norm: The L2 norm to which each client's update is clipped, or how it adapts.
      clients_per_round: What the noisy sum is divided by.
      zeroing_norm: The largest magnitude that an entry of an update may have; an update
        with a larger one is replaced by zeros before clipping (its l-infinity norm; BandMF
        App. I). None for no zeroing.
      measure: Whether to measure.
      metrics: Metrics that are released with noise, as ``mf_dp_aggregator`` takes them. Nothing is
        measured then but ``released_norm``, and zeroing is for clients to do
        (``averaging_with_metrics``): what they send is more than an update.
      **others: Further arguments of ``mf_dp_aggregator``.

    Returns:
      A ``tff.aggregators.UnweightedAggregationFactory``, to be passed as
      ``model_aggregator``.

    Raises:
      CheckpointError: If the checkpoint cannot be read.
      TypeError: If an argument has the wrong type; at ``create``, if a tensor of the updates
        is not floating point.
      ValueError: If a number is out of its range, or there is zeroing with metrics.
    """
    if metrics is not None and zeroing_norm is not None:
        raise ValueError("with metrics, clients zero their updates: leave out zeroing_norm.")
    if zeroing_norm is not None:
        zeroing_norm = numbers.positive_number(zeroing_norm, "zeroing_norm")
    process: tff.aggregators.UnweightedAggregationFactory = mfa.mf_dp_aggregator(
        mechanism,
        clip_norm=clip_norm,
        clients_per_round=clients_per_round,
        metrics=metrics,
        **others,  # type: ignore[arg-type]  # Its own options, which it checks.
    )
    if metrics is not None:
        return tff.aggregators.add_measurements(process, server_measurement_fn=_released_norm)
    if zeroing_norm is not None:
        process = tff.aggregators.zeroing_factory(zeroing_norm, process, norm_order=math.inf)
    if not measure:
        return process
    constant = None if isinstance(clip_norm, AdaptiveClip) else float(clip_norm)
    return tff.aggregators.add_measurements(
        process,
        client_measurement_fn=lambda updates: _measured(updates, constant, zeroing_norm),
        server_measurement_fn=_released_norm,
    )


def released_metrics(measurements: Any) -> dict[str, float]:
    """Returns a round's training metrics that were released with noise, by name; or an empty dict.

    Args:
      measurements: The measurements of a round, of ``mf_dp_aggregator``.
    """
    of_query = measurements.get("dp_query_metrics", {})
    return {name: float(value) for name, value in of_query.get("private_metrics", {}).items()}


def released_clip(measurements: Any) -> dict[str, float]:
    """Returns the values that a round released about its adaptive clip norm.

    Args:
      measurements: The measurements of a round, of an aggregator of :func:`aggregator`.

    Returns:
      ``clip_norm``, that of the round; ``unclipped_fraction``, the noisy fraction of clients whose
      updates were within the clip norm, shifted towards one half by clients that are missing; and
      ``next_clip_norm``. All three are private. Empty for a constant clip norm.
    """
    of_query = measurements.get("zeroing", measurements).get("dp_query_metrics", {})
    return {name: float(of_query[name]) for name in _OF_CLIP if name in of_query}


def _measured(updates: Any, clip_norm: float | None, zeroing_norm: float | None) -> Any:
    """Returns a TFF value at the server with statistics of the updates at the clients."""

    @tff.tensorflow.computation(updates.type_signature.member)
    def summarise(update: Any) -> Any:
        return _summary(update, clip_norm, zeroing_norm)

    @tff.tensorflow.computation
    def nothing() -> Any:
        zero = tf.constant(0.0, tf.float64)
        return collections.OrderedDict((name, zero) for name in _TOTALS)

    @tff.tensorflow.computation(nothing.type_signature.result, nothing.type_signature.result)
    def merge(left: Any, right: Any) -> Any:
        merged = collections.OrderedDict((name, left[name] + right[name]) for name in left)
        merged["max_norm"] = tf.maximum(left["max_norm"], right["max_norm"])
        return merged

    @tff.tensorflow.computation(nothing.type_signature.result)
    def report(totals: Any) -> Any:
        updates = totals["updates"]
        finite = updates - totals["non_finite"]
        found = collections.OrderedDict(
            num_updates=tf.cast(updates, tf.int64),
            non_finite_updates=tf.cast(totals["non_finite"], tf.int64),
            update_norm=tf.math.divide_no_nan(totals["norms"], finite),
            max_update_norm=totals["max_norm"],
            zeroed_fraction=tf.math.divide_no_nan(totals["zeroed"], updates),
        )
        if clip_norm is not None:
            found["clipped_fraction"] = tf.math.divide_no_nan(totals["clipped"], updates)
        return found

    summaries = tff.federated_map(summarise, updates)
    return tff.federated_aggregate(summaries, nothing(), merge, merge, report)


def _summary(
    update: Any, clip_norm: float | None, zeroing_norm: float | None
) -> collections.OrderedDict[str, tf.Tensor]:
    """Returns one client's contribution to the totals over clients (see _TOTALS)."""
    norm = _norm(update)
    finite = tf.math.is_finite(norm)
    zeroed = tf.constant(False)
    if zeroing_norm is not None:
        # Compare in single precision, as TFF's zeroing does. The 0.0 stands in for updates without
        # numbers: the largest magnitude of an empty tensor is minus infinity.
        magnitudes = [tf.reduce_max(tf.abs(tensor)) for tensor in tf.nest.flatten(update)]
        largest = tf.stack([tf.cast(each, tf.float32) for each in (0.0, *magnitudes)])
        zeroed = finite & tf.reduce_any(largest > tf.constant(zeroing_norm, tf.float32))
    clipped = tf.constant(False)
    if clip_norm is not None:
        clipped = finite & ~zeroed & (norm > clip_norm)
    norm = tf.where(finite, norm, tf.zeros_like(norm))
    totals = (True, ~finite, zeroed, clipped, norm, norm)
    return collections.OrderedDict(
        (name, tf.cast(total, tf.float64)) for name, total in zip(_TOTALS, totals, strict=True)
    )


def _norm(value: Any) -> tf.Tensor:
    """Returns the L2 norm of an update, float64; NaN or infinite if an entry is."""
    # Squares are in double precision, which squares of single-precision numbers cannot overflow.
    squares = [
        tf.reduce_sum(tf.square(tf.cast(tensor, tf.float64))) for tensor in tf.nest.flatten(value)
    ]
    return tf.sqrt(tf.add_n([tf.constant(0.0, tf.float64), *squares]))


def _released_norm(mean: Any) -> Any:
    @tff.tensorflow.computation
    def norm_of(value: Any) -> Any:
        return collections.OrderedDict(released_norm=_norm(value))

    return tff.federated_map(norm_of, mean)


def expected_noise_norm(
    factorization: Factorization,
    participation: Participation,
    noise_multiplier: float,
    clip_norm: float,
    clients_per_round: float,
    num_parameters: int,
) -> np.ndarray:
    """Returns the root mean square L2 norm of the noise in the released mean of every round.

    Row i of the noise is noise_multiplier * clip_norm * sens(C) * [C^-1 Z]_i, so that each
    of its entries has that factor times the norm of row i of C^-1 as its standard deviation;
    d independent entries have the sqrt(d)-fold as the root mean square of their norm, from
    which the norm of models of many parameters hardly differs.

    Args:
      factorization: The factorization whose rows correlate the noise.
      participation: The participation schema that the noise is scaled to.
      noise_multiplier: The aggregator's noise multiplier; in a simulation with fewer clients than
        the cohort they stand for, the scaled one.
      clip_norm: The aggregator's clip norm.
      clients_per_round: What the aggregator divides by.
      num_parameters: The number d of the model's parameters, 0 or more.

    Returns:
      (n,) float64.

    Raises:
      TypeError: If the participation is no schema.
    """
    stddev = noise_multiplier * clip_norm / clients_per_round
    sensitivity = factorization.sensitivity(participation).value
    rows = factorization.noise_recursion()
    norms = np.abs(rows.diagonal) * rows.normalised.row_norms()[0]
    return stddev * math.sqrt(num_parameters) * sensitivity * norms
