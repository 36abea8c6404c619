"""A DPQuery that releases a clip norm, and metrics, with the records, inside one matrix mechanism.

It adds two steps to ``dp_query``, and no noise of its own. Before the sum, each client turns its
record into a vector: the record over the round's clip norm, clipped to norm 1, and a weighted
clipped-count indicator, which tells whether it had to be (``adaptive_clip``). After it, the noisy
sum of records is multiplied by the clip norm, and the noisy sum of indicators moves the clip norm
of later rounds.

With private metrics, a record has metrics beside its tensors, and the vector has one more
coordinate for each of them (``private_metrics``). Their noisy sums, over the clients that are
expected, are what is released of them.

*Why it is private.* The first step is a function of one record and of what was released before;
the second is one of what is released. Between them is MatrixFactorizationSumQuery on vectors of a
few more coordinates, which clips them once more, in integers, to the norm R that its noise is
scaled to. So whatever the two steps did, what is released is a function of a mechanism with the
noise multiplier z (``docs/privacy-proofs.md``, section 8).
"""

import collections
from typing import Any, NamedTuple

import dp_accounting
import tensorflow as tf

from mf_aggregators import adaptive_clip, inputs
from mf_aggregators.adaptive_clip import AdaptiveClip, ClipState, NoiseSplit
from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.integers import IntegerSums
from mf_aggregators.kernel.rows import NoiseRecursion
from mf_aggregators.participation import Participation
from mf_aggregators.private_metrics import BoundedMetric, PrivateMetrics
from mf_aggregators.tff import compatibility, dp_query, grid, tensor_streams
from mf_aggregators.tff.dp_query import GlobalState, MatrixFactorizationSumQuery, SampleState
from mf_aggregators.tff.tensor_streams import NoiseParts

# The two parts of a record with private metrics.
_UPDATE, _METRICS = "update", "metrics"


class AdaptiveState(NamedTuple):
    """The state of an AdaptiveClipSumQuery between rounds.

    Attributes:
      clip: The clip norm.
      mechanism: The state of the mechanism.
      released_metrics: (k,) float64: the private metrics that the last round released, NaN before
        the first one; an empty tuple without metrics.
    """

    clip: ClipState
    mechanism: GlobalState
    released_metrics: Any


class AdaptiveParams(NamedTuple):
    """What clients need.

    Attributes:
      clip_norm: float64 scalar: the round's clip norm.
      vector_norm: float64 scalar: the norm that their vectors are clipped to.
    """

    clip_norm: Any
    vector_norm: Any


class AdaptiveClipSumQuery(compatibility.SumAggregationDPQuery):
    """Clips records to a norm that adapts, sums them, and adds correlated noise.

    In round t the result is the sum of the clipped records plus row t of
    ``z_delta * c_t * sens(C) * C^-1 Z``, up to roundings. A record with a NaN or infinite entry
    counts as zero, and its indicator as well. The query is pure, as MatrixFactorizationSumQuery is:
    a round that is run again from the same state has the same clip norm and the same noise.
    """

    def __init__(
        self,
        recursion: NoiseRecursion | None,
        specs: Any,
        *,
        clip: AdaptiveClip,
        noise_multiplier: float,
        clients_per_round: float,
        seed: int | None = None,
        noise: NoiseParts | None = None,
        participation: Participation | None = None,
        sums: IntegerSums | None = None,
        metrics: PrivateMetrics | None = None,
    ) -> None:
        """Creates the query.

        Args:
          recursion: How the rows of C^-1 Z follow from one another, for a C of sensitivity 1; None
            where ``noise`` has them.
          specs: A structure of tf.TensorSpec: the records' floating-point tensors, of known
            shapes.
          clip: How the clip norm adapts.
          noise_multiplier: z, of all that is released together; zero adds no noise.
          clients_per_round: What the sum of indicators is divided by: fixed in advance.
          seed: As of MatrixFactorizationSumQuery.
          noise: As there, for the tensors of :func:`vector_specs` and the norm of
            :func:`split_of`.
          participation: As there.
          sums: As there: the grid is that of vectors, multiples of their norm. None where
            ``noise`` has it.
          metrics: The metrics that are released as well; None for none. With metrics, records have
            the structure of :func:`record_of`.

        Raises:
          TypeError: If a tensor is not floating point.
          ValueError: If a number is out of its range, or as MatrixFactorizationSumQuery does.
        """
        multiplier = numbers.non_negative_number(noise_multiplier, "noise_multiplier")
        self._clip = clip
        self._clients = numbers.positive_number(clients_per_round, "clients_per_round")
        self._metrics = metrics
        self._split = split_of(clip, multiplier, self._clients, metrics)
        norm = self._split.vector_norm
        self._structure, self._specs = specs, dp_query.checked_specs(specs)
        dtypes = [spec.dtype.name for spec in self._specs]
        of_updates = self._split.update_noise_multiplier
        clip.check_floats(of_updates, self._clients, dtypes)
        self.mechanism = MatrixFactorizationSumQuery(
            recursion,
            vector_specs(specs, metrics),
            l2_norm_clip=None if recursion is None else norm,
            noise_stddev=None if recursion is None else multiplier * norm,
            seed=seed,
            noise=noise,
            participation=participation,
            sums=sums,
        )
        release = self.mechanism.release
        if release.norm != norm:
            raise ValueError(f"noise must be made for vectors of norm {norm}.")
        weights = self._split.indicator_weight, self._split.metric_weight
        inputs.check_means(release.sums, norm, *weights)

    def initial_global_state(self) -> AdaptiveState:
        """Returns the state before the first round."""
        norm = tf.constant(self._clip.initial_norm, tf.float64)
        return AdaptiveState(
            ClipState(
                norm=norm,
                released_norm=norm,
                released_fraction=tf.constant(float("nan"), tf.float64),
                fraction_sum=tf.zeros([], tf.float64),
                num_fractions=tf.zeros([], tf.int64),
            ),
            self.mechanism.initial_global_state(),
            ()
            if self._metrics is None
            else tf.fill([len(self._metrics.metrics)], tf.constant(float("nan"), tf.float64)),
        )

    def derive_sample_params(self, global_state: AdaptiveState) -> AdaptiveParams:
        """Returns the norms that clients need."""
        vector_norm = self.mechanism.derive_sample_params(global_state.mechanism)
        return AdaptiveParams(global_state.clip.norm, vector_norm)

    def initial_sample_state(self, template: Any = None) -> SampleState:
        """Returns the sum of no vectors; see MatrixFactorizationSumQuery."""
        if template is None:
            template = self._structure
        elif self._metrics is not None:
            template = template[_UPDATE]
        return self.mechanism.initial_sample_state(
            (template, *vector_specs(self._structure, self._metrics)[1:])
        )

    def preprocess_record(self, params: AdaptiveParams, record: Any) -> SampleState:
        """Returns a client's vector, in steps: clipped record, weighted indicator and metrics."""
        update = record if self._metrics is None else record[_UPDATE]
        tensors = dp_query.tensors_of(update, self._structure)
        clipped, indicator = grid.clip_with_indicator(tensors, params.clip_norm)
        vector: tuple[Any, ...] = (clipped, indicator * self._split.indicator_weight)
        if self._metrics is not None:
            # If the update is not finite, the client counts as absent, its metrics included.
            is_there = tf.cast(tf.not_equal(indicator, 0.0), tf.float64)
            bounded = [
                _bounded(record[_METRICS][each.name], each) for each in self._metrics.metrics
            ]
            vector = (*vector, tf.stack(bounded) * is_there * self._split.metric_weight)
        return self.mechanism.preprocess_record(params.vector_norm, vector)

    def get_noised_result(
        self, sample_state: SampleState, global_state: AdaptiveState
    ) -> tuple[Any, AdaptiveState, dp_accounting.DpEvent]:
        """Returns the sum plus the round's noise, the next state and a DpEvent.

        As MatrixFactorizationSumQuery does. The next state has the norm of the next round.
        """
        norm = global_state.clip.norm
        # Noise and sum alike are in units of this round's norm, which was known before it.
        per_indicator = 1.0 / (self._split.indicator_weight * self._clients)
        scales: list[Any] = [*(norm for _ in self._specs), per_indicator]
        scales += [] if self._metrics is None else [1.0]
        released, mechanism, event = self.mechanism.scaled_result(
            sample_state, global_state.mechanism, scales
        )
        records, indicators, *metrics = released
        narrowed = [
            tf.cast(record, tensor_streams.noise_dtype(spec.dtype))
            for record, spec in zip(tf.nest.flatten(records), self._specs, strict=True)
        ]
        result = tf.nest.pack_sequence_as(sample_state.steps[0], narrowed)
        fraction = adaptive_clip.INDICATOR_WITHIN + indicators
        state = AdaptiveState(
            self._next(global_state.clip, fraction),
            mechanism,
            self._means(metrics[0]) if metrics else global_state.released_metrics,
        )
        return result, state, event

    def _means(self, sums: tf.Tensor) -> tf.Tensor:
        """The released metrics, (k,), from the noisy sums of the clients' clipped metrics."""
        assert self._metrics is not None
        middles = [metric.middle for metric in self._metrics.metrics]
        ranges = [metric.range for metric in self._metrics.metrics]
        return middles + sums * ranges / (self._split.metric_weight * self._clients)

    def _next(self, clip: ClipState, fraction: tf.Tensor) -> ClipState:
        """The norm after a round; ``AdaptiveClip.next_norm`` in a graph."""
        period = self._clip.update_period
        total, number = clip.fraction_sum + fraction, clip.num_fractions + 1
        is_due = tf.equal(number, period)
        # A product, because TensorFlow's optimizer makes one of a quotient.
        error = total * (1.0 / period) - self._clip.target_unclipped_quantile
        smallest, largest = self._clip.bounds
        most = tf.constant(adaptive_clip.largest_exponent(self._clip), tf.float64)
        exponent = tf.minimum(tf.maximum(-self._clip.learning_rate * error, -most), most)
        moved = clip.norm * adaptive_clip.exponential(exponent)
        moved = tf.minimum(tf.maximum(moved, smallest), largest)
        return ClipState(
            norm=tf.where(is_due, moved, clip.norm),
            released_norm=clip.norm,
            released_fraction=fraction,
            fraction_sum=tf.where(is_due, tf.zeros_like(total), total),
            num_fractions=tf.where(is_due, tf.zeros_like(number), number),
        )

    def derive_metrics(self, global_state: AdaptiveState) -> collections.OrderedDict[str, Any]:
        """Returns what the last round released: norm, fraction, next norm, and private metrics."""
        found = collections.OrderedDict(
            **self.mechanism.derive_metrics(global_state.mechanism),
            clip_norm=global_state.clip.released_norm,
            unclipped_fraction=global_state.clip.released_fraction,
            next_clip_norm=global_state.clip.norm,
        )
        if self._metrics is not None:
            found["private_metrics"] = collections.OrderedDict(
                (metric.name, global_state.released_metrics[position])
                for position, metric in enumerate(self._metrics.metrics)
            )
        return found


def split_of(
    clip: AdaptiveClip,
    noise_multiplier: float,
    clients_per_round: float,
    metrics: PrivateMetrics | None = None,
) -> NoiseSplit:
    """Returns how noise is split, with the norm of a client's vector.

    Args:
      clip: How the clip norm adapts.
      noise_multiplier: z, of all that is released together.
      clients_per_round: The number of clients that is expected.
      metrics: The metrics that are released as well; None for none.

    Raises:
      ValueError: If the noise is too little for them.
    """
    if metrics is not None:
        return metrics.split_noise(noise_multiplier, clip, clients_per_round)
    stddev = clip.clipped_count_stddev_for(noise_multiplier, clients_per_round)
    return adaptive_clip.split_noise(noise_multiplier, stddev)


def record_of(update: Any, metrics: Any) -> collections.OrderedDict[str, Any]:
    """Returns the record of a query with private metrics.

    Args:
      update: The client's update: a structure of floating-point tensors.
      metrics: The client's metrics by name, one number each; what is not finite counts as the
        middle of its range.
    """
    return collections.OrderedDict([(_UPDATE, update), (_METRICS, metrics)])


def update_of(record: Any) -> Any:
    """Returns the update of a record that :func:`record_of` made, or its type."""
    return record[_UPDATE]


def _bounded(value: Any, metric: BoundedMetric) -> tf.Tensor:
    """A metric over its range, from the middle of it: float64 in [-1/2, 1/2]."""
    wide = tf.cast(value, tf.float64)
    clipped = tf.clip_by_value(wide, metric.smallest, metric.largest)
    return tf.where(
        tf.math.is_finite(wide), (clipped - metric.middle) / metric.range, tf.zeros_like(wide)
    )


def vector_specs(specs: Any, metrics: PrivateMetrics | None = None) -> tuple[Any, ...]:
    """Returns the tensors of vectors: those of records in float64, a scalar, and metrics.

    Args:
      specs: A structure of tf.TensorSpec, of known shapes.
      metrics: The private metrics, which are a vector; None for none.

    Raises:
      TypeError: If a tensor is not floating point.
      ValueError: If a shape is not known.
    """
    dp_query.checked_specs(specs)
    wide = tf.nest.map_structure(lambda spec: tf.TensorSpec(spec.shape, tf.float64), specs)
    of_vector = (wide, tf.TensorSpec([], tf.float64))
    if metrics is None:
        return of_vector
    return (*of_vector, tf.TensorSpec([len(metrics.metrics)], tf.float64))
