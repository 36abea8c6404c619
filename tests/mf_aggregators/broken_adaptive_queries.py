"""Adaptive clipping that was broken on purpose, to be found by tests and by the audit."""

from typing import Any

import tensorflow as tf

from mf_aggregators.tff.dp_query import AdaptiveClipSumQuery, _AdaptiveState


class ScaledByTheNextNorm(AdaptiveClipSumQuery):
    """Noise with the norm that follows from this round's clients."""

    def get_noised_result(self, sample_state: Any, global_state: _AdaptiveState) -> Any:
        """As the intact query, but for what is broken."""
        result, state, event = super().get_noised_result(sample_state, global_state)
        exact = [
            tf.cast(steps, tf.float64) * self.mechanism._unit * global_state.clip.norm
            for steps in sample_state.steps[0]
        ]
        ratio = state.clip.norm / global_state.clip.norm
        wrong = [
            tf.cast(sums + (tf.cast(each, tf.float64) - sums) * ratio, each.dtype)
            for sums, each in zip(exact, result, strict=True)
        ]
        return wrong, state, event


class MetricsWithHalfTheNoise(AdaptiveClipSumQuery):
    """Private metrics count twice in the sum, and are halved in what is released."""

    def preprocess_record(self, params: Any, record: Any) -> Any:
        """As the intact query, but for what is broken."""
        sums = super().preprocess_record(params, record)
        *others, metrics = sums.steps
        return sums._replace(steps=(*others, 2 * metrics))

    def _means(self, sums: tf.Tensor) -> tf.Tensor:
        return super()._means(0.5 * sums)


class MetricsLeftOut(AdaptiveClipSumQuery):
    """Noise as for updates and indicators alone: metrics are not in the sensitivity."""

    def __init__(self, mechanism: Any, specs: Any, options: Any) -> None:
        super().__init__(mechanism, specs, options)
        split, number = self._split, len(options.metrics.metrics)
        squared = split.vector_norm**2 - number * (0.5 * split.metric_weight) ** 2
        self.mechanism._noise_stddev *= squared**0.5 / split.vector_norm


class IndicatorLeftOut(AdaptiveClipSumQuery):
    """Noise as for updates alone: the indicator is not in the sensitivity."""

    def __init__(self, mechanism: Any, specs: Any, options: Any) -> None:
        super().__init__(mechanism, specs, options)
        self.mechanism._noise_stddev /= self._split.vector_norm


class IndicatorWithoutNoise(AdaptiveClipSumQuery):
    """The fraction is released as it is."""

    def get_noised_result(self, sample_state: Any, global_state: _AdaptiveState) -> Any:
        """As the intact query, but for what is broken."""
        result, state, event = super().get_noised_result(sample_state, global_state)
        clip = self._next(global_state.clip, self._exact(sample_state))
        return result, state._replace(clip=clip), event

    def _exact(self, sample_state: Any) -> tf.Tensor:
        weighted = tf.cast(sample_state.steps[1], tf.float64) * self.mechanism._unit
        return 0.5 + weighted / (self._split.indicator_weight * self._clients)


class NormOfWhatIsNotReleased(IndicatorWithoutNoise):
    """A noisy fraction is shown, and the norm follows the exact one."""

    def get_noised_result(self, sample_state: Any, global_state: _AdaptiveState) -> Any:
        """As the intact query, but for what is broken."""
        shown = AdaptiveClipSumQuery.get_noised_result(self, sample_state, global_state)
        result, state, event = super().get_noised_result(sample_state, global_state)
        clip = state.clip._replace(released_fraction=shown[1].clip.released_fraction)
        return result, state._replace(clip=clip), event
