"""Private aggregation for simulations: zeroing, clipping, correlated noise, and measurements.

Each client's update is measured, set to zero if any of its entries is too large, and clipped;
the sum gets the round's noise. That order keeps the guarantee: zeroing and clipping are
functions of one client's update alone, with thresholds fixed in advance, so whatever an
update was, what enters the sum has an L2 norm of at most the clip norm, and one client
changes the sum by no more. The sensitivity is that of clipping alone. (A threshold that
followed from the updates of a round, a quantile of their norms for instance, has to be
released privately itself, as that of ``mf_aggregators.AdaptiveClip`` is.)

The measurements are exact statistics of the clients' updates, without any noise. They are
for simulations on data that may be looked at; published from a deployment, they would void
the guarantee.
"""

import collections
import math
import os
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

import mf_aggregators as mfa
from mf_aggregators import AdaptiveClip, Mechanism
from mf_aggregators.factorizations import Factorization
from mf_aggregators.kernel import numbers
from mf_aggregators.participation import Participation
from mf_aggregators.private_metrics import PrivateMetrics

# The sums over clients, and the largest norm.
_TOTALS = ("updates", "non_finite", "zeroed", "clipped", "norms", "max_norm")
_OF_CLIP = ("clip_norm", "unclipped_fraction", "next_clip_norm")


def aggregator(
    mechanism: Mechanism | Factorization | str | os.PathLike[str],
    *,
    clip_norm: float | AdaptiveClip,
    clients_per_round: float,
    zeroing_norm: float | None = None,
    measure: bool = True,
    metrics: PrivateMetrics | None = None,
    **others: Any,
) -> tff.aggregators.UnweightedAggregationFactory:
    """Returns ``mf_aggregators.mf_dp_aggregator`` with zeroing and measurements.

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
        **others,
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
    """Returns the metrics that a round released with noise, by name; empty without private metrics.

    Args:
      measurements: The measurements of a round, of ``mf_dp_aggregator``.
    """
    of_query = measurements.get("dp_query_metrics", {})
    return {name: float(value) for name, value in of_query.get("private_metrics", {}).items()}


def released_clip(measurements: Any) -> dict[str, float]:
    """Returns the releases of a round on a clip norm that adapts.

    Args:
      measurements: The measurements of a round, of an aggregator of :func:`aggregator`.

    Returns:
      ``clip_norm``, that of the round; ``unclipped_fraction``, the noisy fraction of the
      clients whose updates were within it, shifted towards one half by clients that are
      missing; and ``next_clip_norm``. All three are private. Empty for a constant clip norm.
    """
    of_query = measurements.get("zeroing", measurements).get("dp_query_metrics", {})
    return {name: float(of_query[name]) for name in _OF_CLIP if name in of_query}


def _measured(updates: Any, clip_norm: float | None, zeroing_norm: float | None) -> Any:
    """Statistics of the updates of a round, which are at the clients, at the server."""

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
    """The totals of one client's update."""
    norm = _norm(update)
    finite = tf.math.is_finite(norm)
    zeroed = tf.constant(False)
    if zeroing_norm is not None:
        # The comparison is in single precision, as that of TFF's zeroing. The largest magnitude of
        # an empty tensor is below all numbers.
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
    """The L2 norm, float64; NaN or infinite if an entry is."""
    # Squares of single-precision numbers do not overflow double precision.
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
      factorization: What makes the noise.
      participation: The schema that the noise is scaled to.
      noise_multiplier: That of the aggregator: the scaled one of a simulation with fewer
        clients than the cohort it stands for.
      clip_norm: That of the aggregator.
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
