"""Adaptive clipping in the query: sums, noise, and mechanisms that were broken on purpose."""

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
from mf_aggregators.participation import MinSeparation
from mf_aggregators.tff import dp_query, processes
from mf_aggregators.tff.dp_query import AdaptiveClipSumQuery
from tests.examples import examples
from tests.mf_aggregators import broken_adaptive_queries
from tests.mf_aggregators.statistics_of_noise import check_standard_normal
from tests.mf_aggregators.tff.small_aggregators import adaptive_query, sum_of

_NUM_ROUNDS = 4
_SPECS = [tf.TensorSpec((2, 2), tf.float32), tf.TensorSpec((), tf.float64)]
_MULTIPLIER, _COUNT_STDDEV, _CLIENTS = 1.5, 1.25, 4
_CLIP = AdaptiveClip(
    0.5, 0.5, learning_rate=2.0, clipped_count_stddev=_COUNT_STDDEV, update_period=1
)


def _factorization() -> Any:
    return banded(workloads.prefix_sum(_NUM_ROUNDS), 3)


def _query(kind: type = AdaptiveClipSumQuery, **changes: Any) -> Any:
    arguments: dict[str, Any] = {
        "clip": _CLIP,
        "noise_multiplier": _MULTIPLIER,
        "clients_per_round": _CLIENTS,
        **changes,
    }
    recursion = arguments.pop("recursion", _factorization().noise_recursion())
    return adaptive_query(recursion, arguments.pop("specs", _SPECS), kind=kind, **arguments)


def _record(entries: Any) -> list[tf.Tensor]:
    entries = np.asarray(entries, np.float64)
    return [
        tf.constant(entries[:4].reshape(2, 2), tf.float32),
        tf.constant(entries[4], tf.float64),
    ]


def _flat(result: Any) -> tf.Tensor:
    return tf.concat([tf.cast(tf.reshape(each, [-1]), tf.float64) for each in result], 0)


def _step(query: Any, state: Any, records: list[Any]) -> tuple[tf.Tensor, Any]:
    sums = sum_of(query, query.derive_sample_params(state), records)
    result, state, _ = query.get_noised_result(sums, state)
    return _flat(result), state


def _clipped(records: list[np.ndarray], norm: float) -> tuple[np.ndarray, float]:
    """The sum of clipped records, and of the indicators, in NumPy."""
    total, indicators = np.zeros(5), 0.0
    for record in records:
        if np.all(np.isfinite(record)):
            length = float(np.linalg.norm(record))
            total += record * min(1.0, norm / length)
            indicators += 0.5 if length <= norm else -0.5
    return total, indicators


_LENGTHS = (0.1, 0.4, 0.6, 3.0)
_DATA: list[np.ndarray] = [
    (length * np.eye(5)[i] + [0, 0, 0, 0, 0.01 * length]).astype(np.float32)
    for i, length in enumerate(_LENGTHS)
]


@pytest.mark.parametrize("period", [1, 2])
def test_without_noise_the_norm_follows_the_fraction(period: int) -> None:
    clip = AdaptiveClip(0.5, 0.7, learning_rate=1.0, update_period=period)
    query = _query(noise_multiplier=0.0, clip=clip)
    state, norm, fractions = query.initial_global_state(), 0.5, []
    data = [*_DATA, np.array([np.nan, 0, 0, 0, 0]), np.array([0, np.inf, 0, 0, 0])]
    for i in range(_NUM_ROUNDS):
        result, state = _step(query, state, [_record(each) for each in data])
        total, indicators = _clipped(data, norm)
        np.testing.assert_allclose(result, total, rtol=1e-6, atol=1e-7)
        metrics = query.derive_metrics(state)
        assert float(metrics["clip_norm"]) == pytest.approx(norm)
        # What is not finite counts as neither within the norm nor above it.
        assert float(metrics["unclipped_fraction"]) == pytest.approx(0.5 + indicators / _CLIENTS)
        fractions.append(0.5 + indicators / _CLIENTS)
        if (i + 1) % period == 0:
            norm = clip.next_norm(norm, float(np.mean(fractions[-period:])))
        assert float(metrics["next_clip_norm"]) == pytest.approx(norm)
        assert int(metrics["rounds_released"]) == i + 1


@given(
    st.lists(st.floats(width=32, allow_nan=True), min_size=5, max_size=5),
    st.floats(1e-6, 1e6),
    st.sampled_from([0.0, 0.3, 2.0]),
)
@settings(max_examples=examples(100), deadline=None)
def test_no_vector_is_longer_than_the_noise_is_for(
    entries: list[float], norm: float, noise_multiplier: float
) -> None:
    """In whole steps, and without help of the second clipping but for roundings."""
    query = _query(noise_multiplier=noise_multiplier)
    params = dp_query._AdaptiveParams(
        tf.constant(norm, tf.float64), tf.constant(query._split.vector_norm, tf.float64)
    )
    sums = query.preprocess_record(params, _record(entries))
    steps = np.concatenate([np.ravel(each) for each in tf.nest.flatten(sums.steps)])
    assert sum(int(step) ** 2 for step in steps) <= STEPS_PER_CLIP_NORM**2
    vector = steps * query._split.vector_norm / STEPS_PER_CLIP_NORM
    record = np.array(_flat(_record(entries)))
    if not np.all(np.isfinite(record)):
        assert not np.any(steps)
        return
    with np.errstate(over="ignore"):
        length = float(np.linalg.norm(record))
    assert abs(vector[-1]) == pytest.approx(0.5 * query._split.indicator_weight, rel=1e-6)
    if abs(length - norm) > 1e-9 * norm:
        assert (vector[-1] > 0.0) == (length <= norm)
    if np.isfinite(length) and length > 0.0:
        np.testing.assert_allclose(vector[:-1], record / max(length, norm), atol=1e-6)


def _whitened(kind: type, runs: int) -> np.ndarray:
    """C (what was released less what was summed) over its standard deviation, of fresh runs.

    The attacker knows the data, and every norm has to follow from fractions that were released.
    """
    query = _query(kind)
    records = [_record(each) for each in _DATA]
    step = tf.function(lambda state: _step(query, state, records), autograph=False)
    start = tf.function(query.initial_global_state, autograph=False)
    strategy = _factorization().strategy_matrix()
    # By hand, and not by what the query says of itself.
    of_updates = (_MULTIPLIER**-2 - (2.0 * _COUNT_STDDEV) ** -2) ** -0.5
    samples = []
    for _ in range(runs):
        state, norm, rows = start(), _CLIP.initial_norm, []
        for _ in range(_NUM_ROUNDS):
            result, state = step(state)
            fraction = float(state.clip.released_fraction)
            total, indicators = _clipped(_DATA, norm)
            update = (np.array(result) - total) / (norm * of_updates)
            count = (_CLIENTS * (fraction - 0.5) - indicators) / _COUNT_STDDEV
            rows.append([*update, count])
            norm = _CLIP.next_norm(norm, fraction)
            assert float(state.clip.norm) == pytest.approx(norm, rel=1e-9)
        samples.append(np.ravel(strategy @ np.array(rows)))
    return np.array(samples)


def test_what_is_released_has_the_covariance_of_the_mechanism() -> None:
    """Updates and indicators, whitened by C and by a norm that adapts: 1e-7 false alarms."""
    check_standard_normal(_whitened(AdaptiveClipSumQuery, examples(400)))


@pytest.mark.long_cases(1)
@pytest.mark.parametrize(
    "name",
    [
        "NormOfWhatIsNotReleased",
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ("ScaledByTheNextNorm", "IndicatorLeftOut", "IndicatorWithoutNoise")
        ),
    ],
)
def test_broken_mechanisms_do_not_have_it(name: str) -> None:
    with pytest.raises(AssertionError):
        check_standard_normal(_whitened(getattr(broken_adaptive_queries, name), 60))


def test_its_state_tells_its_participation_and_its_type_is_that_of_the_records() -> None:
    query = _query(participation=MinSeparation(2, 2))
    state = query.initial_global_state()
    assert processes.participations_in(state) == (MinSeparation(2, 2),)
    result, _, _ = query.get_noised_result(query.initial_sample_state(), state)
    assert [each.dtype for each in result] == [each.dtype for each in _SPECS]


def test_a_round_again_is_the_same_round() -> None:
    query = _query()
    records = [_record(each) for each in _DATA]
    _, state = _step(query, query.initial_global_state(), records)
    first, after = _step(query, state, records)
    again, after_again = _step(query, state, records)
    np.testing.assert_array_equal(first, again)
    assert float(after.clip.norm) == float(after_again.clip.norm)
