"""Metrics beside updates in the query: sums, noise, and mechanisms that were broken on purpose."""

import collections
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators import workloads
from mf_aggregators.adaptive_clip import AdaptiveClip
from mf_aggregators.factorizations import banded
from mf_aggregators.kernel.integers import STEPS_PER_CLIP_NORM
from mf_aggregators.private_metrics import BoundedMetric, PrivateMetrics
from mf_aggregators.tff.dp_query import AdaptiveClipSumQuery
from tests.examples import examples
from tests.mf_aggregators import broken_adaptive_queries
from tests.mf_aggregators.statistics_of_noise import check_standard_normal
from tests.mf_aggregators.tff.small_aggregators import adaptive_query, sum_of

_NUM_ROUNDS, _MULTIPLIER, _CLIENTS = 3, 1.5, 4
_SPECS = tf.TensorSpec((3,), tf.float32)
# Half as much noise again on the updates, so that little is enough to see what is wrong.
_METRICS = PrivateMetrics(
    (BoundedMetric("loss", 0.0, 4.0), BoundedMetric("accuracy", 0.0, 1.0)), noise_increase=0.5
)
_ADAPTIVE = AdaptiveClip(0.5, learning_rate=2.0, clipped_count_stddev=1.25, update_period=1)
_CONSTANT = AdaptiveClip.constant(0.5)
_DATA = (
    ([0.3, 0.0, 0.0], {"loss": 1.0, "accuracy": 0.25}),
    ([0.0, 2.0, 0.0], {"loss": 9.0, "accuracy": 1.0}),
    ([0.0, 0.0, 0.4], {"loss": math.nan, "accuracy": -1.0}),
)
# The same by hand: a loss of 9 counts as 4, none as the middle, an accuracy below 0 as 0.
_SUMS = np.array([(1.0 - 2.0) / 4.0 + 0.5 + 0.0, -0.25 + 0.5 - 0.5])


def _factorization() -> Any:
    return banded(workloads.prefix_sum(_NUM_ROUNDS), 2)


def _query(kind: type = AdaptiveClipSumQuery, **changes: Any) -> Any:
    arguments: dict[str, Any] = {
        "clip": _CONSTANT,
        "noise_multiplier": _MULTIPLIER,
        "clients_per_round": _CLIENTS,
        "metrics": _METRICS,
        **changes,
    }
    return adaptive_query(_factorization().noise_recursion(), _SPECS, kind=kind, **arguments)


def _record(update: Any, metrics: Mapping[str, float]) -> Any:
    named = collections.OrderedDict(
        (name, tf.constant(value, tf.float32)) for name, value in metrics.items()
    )
    return collections.OrderedDict(update=tf.constant(update, tf.float32), metrics=named)


def _step(query: Any, state: Any, records: list[Any]) -> Any:
    sums = sum_of(query, query.derive_sample_params(state), records)
    result, state, _ = query.get_noised_result(sums, state)
    return result, state, query.derive_metrics(state)


def test_without_noise_means_are_those_of_bounded_metrics() -> None:
    """Clients that do not come count in the middle, also where one sends what is no number."""
    query = _query(noise_multiplier=0.0)
    records = [_record(*each) for each in _DATA]
    broken = _record([math.nan, 0.0, 0.0], {"loss": 4.0, "accuracy": 1.0})
    for others in ([], [broken]):
        result, _, found = _step(query, query.initial_global_state(), [*records, *others])
        np.testing.assert_allclose(result, [0.3, 0.5, 0.4], atol=1e-7)
        assert float(found["unclipped_fraction"]) == pytest.approx(0.5 + 0.5 / 4)
        means = found["private_metrics"]
        assert list(means) == ["loss", "accuracy"]
        assert float(means["loss"]) == pytest.approx(2.0 + 4.0 * _SUMS[0] / 4)
        assert float(means["accuracy"]) == pytest.approx(0.5 + _SUMS[1] / 4)


def test_metrics_are_found_by_their_names() -> None:
    query = _query(noise_multiplier=0.0)
    update, metrics = _DATA[0]
    turned = dict(reversed(metrics.items()))
    found = [
        _step(query, query.initial_global_state(), [_record(update, each)])[2]["private_metrics"]
        for each in (metrics, turned)
    ]
    assert {name: float(value) for name, value in found[0].items()} == {
        name: float(value) for name, value in found[1].items()
    }


@given(
    st.lists(st.floats(width=32, allow_nan=True), min_size=3, max_size=3),
    st.floats(width=32),
    st.floats(width=32),
    st.sampled_from([0.0, 0.3, 2.0]),
)
@settings(max_examples=examples(60), deadline=None)
def test_no_vector_is_longer_than_the_noise_is_for(
    entries: list[float], loss: float, accuracy: float, noise_multiplier: float
) -> None:
    query = _query(noise_multiplier=noise_multiplier)
    params = query.derive_sample_params(query.initial_global_state())
    record = _record(entries, {"loss": loss, "accuracy": accuracy})
    update, indicator, metrics = query.preprocess_record(params, record).steps
    steps = np.concatenate([np.ravel(each) for each in (update, indicator, metrics)])
    assert sum(int(step) ** 2 for step in steps) <= STEPS_PER_CLIP_NORM**2
    split = query._split
    unit = split.vector_norm / STEPS_PER_CLIP_NORM
    if not np.all(np.isfinite(entries)):
        assert not np.any(steps)
        return
    # Each block keeps its own bound, so that none of them shortens another.
    assert np.linalg.norm(np.array(update) * unit) <= 1.0 + 1e-6
    assert abs(int(indicator)) * unit == pytest.approx(0.5 * split.indicator_weight, rel=1e-6)
    for value, number, metric in zip((loss, accuracy), metrics, _METRICS.metrics, strict=True):
        known = 0.0
        if np.isfinite(value):
            bounded = np.clip(np.float32(value), metric.smallest, metric.largest)
            known = float((bounded - metric.smallest) / metric.range - 0.5)
        assert int(number) * unit == pytest.approx(known * split.metric_weight, abs=1e-6)


def _whitened(kind: type, clip: AdaptiveClip, runs: int) -> np.ndarray:
    """C (what was released less what was summed) over its standard deviation, of fresh runs."""
    query = _query(kind, clip=clip)
    records = [_record(*each) for each in _DATA]
    step = tf.function(lambda state: _step(query, state, records), autograph=False)
    start = tf.function(query.initial_global_state, autograph=False)
    strategy = _factorization().strategy_matrix()
    # By hand, and not by what the query says of itself.
    z, number = _MULTIPLIER, 3
    if clip is _ADAPTIVE:
        z, number = (_MULTIPLIER**-2 - 2.5**-2) ** -0.5, 2
    of_metrics = math.sqrt(number / 4.0 / (z**-2 - (1.5 * z) ** -2))
    of_count = 1.25 if clip is _ADAPTIVE else of_metrics
    samples = []
    for _ in range(runs):
        state, norm, rows = start(), clip.initial_norm, []
        for _ in range(_NUM_ROUNDS):
            result, state, found = step(state)
            lengths = [float(np.linalg.norm(update)) for update, _ in _DATA]
            total = np.sum(
                [
                    np.array(update) * min(1.0, norm / length)
                    for (update, _), length in zip(_DATA, lengths, strict=True)
                ],
                axis=0,
            )
            fraction = float(found["unclipped_fraction"])
            within = sum(0.5 if length <= norm else -0.5 for length in lengths)
            means = np.array([float(each) for each in found["private_metrics"].values()])
            metrics = _CLIENTS * (means - [2.0, 0.5]) / [4.0, 1.0] - _SUMS
            rows.append(
                [
                    *((np.array(result) - total) / (norm * 1.5 * z)),
                    (_CLIENTS * (fraction - 0.5) - within) / of_count,
                    *(metrics / of_metrics),
                ]
            )
            norm = clip.next_norm(norm, fraction)
        samples.append(np.ravel(strategy @ np.array(rows)))
    return np.array(samples)


@pytest.mark.long_cases(1)
@pytest.mark.parametrize(
    ("clip", "runs"),
    [
        (_CONSTANT, 50),
        pytest.param(_CONSTANT, 400, marks=pytest.mark.long),
        pytest.param(_ADAPTIVE, 400, marks=pytest.mark.long),
    ],
)
def test_what_is_released_has_the_covariance_of_the_mechanism(
    clip: AdaptiveClip, runs: int
) -> None:
    """Updates, indicators and metrics, whitened by C: 1e-7 false alarms."""
    check_standard_normal(_whitened(AdaptiveClipSumQuery, clip, runs))


@pytest.mark.short_cases(1)
@pytest.mark.parametrize(
    ("name", "runs"),
    [
        ("MetricsWithHalfTheNoise", 200),
        pytest.param("MetricsLeftOut", 400, marks=pytest.mark.long),
    ],
)
def test_broken_mechanisms_do_not_have_it(name: str, runs: int) -> None:
    with pytest.raises(AssertionError):
        check_standard_normal(_whitened(getattr(broken_adaptive_queries, name), _CONSTANT, runs))
