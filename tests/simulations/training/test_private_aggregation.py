"""Zeroing, clipping, noise and measurements, in TensorFlow Federated's own execution."""

import functools
import warnings
from typing import Any

import numpy as np
import pytest
import scipy.stats
import tensorflow_federated as tff

import mf_aggregators as mfa
from mf_aggregators.noise import FixedSeedWarning
from mf_aggregators.tff import noise_states
from simulations.training import private_aggregation

_NUM_ROUNDS = 6
_PARTICIPATION = mfa.participation.MinSeparation(3)
_VECTOR = tff.TensorType(np.float32, [3])


def _aggregator(**changes: Any) -> Any:
    arguments: dict[str, Any] = {
        "factorization": mfa.factorizations.banded(mfa.workloads.prefix_sum(_NUM_ROUNDS), 3),
        "participation": _PARTICIPATION,
        "noise_multiplier": 0.0,
        "allow_no_noise": True,
        "clip_norm": 1.0,
        "clients_per_round": 4,
    }
    arguments.update(changes)
    return private_aggregation.aggregator(arguments.pop("factorization"), **arguments)


def _process(value_type: Any = _VECTOR, **changes: Any) -> tff.templates.AggregationProcess:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FixedSeedWarning)
        return _aggregator(**changes).create(value_type)


@functools.cache
def _usual_process() -> tff.templates.AggregationProcess:
    """One for several tests: it takes seconds to make."""
    return _process()


def _update(*entries: float) -> np.ndarray:
    return np.array(entries, np.float32)


_UPDATES = [
    _update(0.3, 0.0, 0.4),  # of norm 0.5: passes
    _update(0.0, -1.2, 1.6),  # of norm 2: clipped
    _update(30.0, 40.0, 0.0),  # of norm 50: zeroed, or clipped
    _update(0.6, 0.0, 0.8),  # of norm 1, rounded
    _update(0.1, np.nan, 0.1),
    _update(0.1, -np.inf, 0.1),
]


@pytest.mark.long
@pytest.mark.parametrize("zeroing_norm", [pytest.param(None, marks=pytest.mark.long), 10.0])
def test_the_state_tells_the_schema_of_the_noise(zeroing_norm: float | None) -> None:
    """Wherever the aggregator stands among others, at first and after a round."""
    weighted = tff.aggregators.as_weighted_aggregator(_aggregator(zeroing_norm=zeroing_norm))
    for process, arguments in (
        (_process(zeroing_norm=zeroing_norm), (_UPDATES,)),
        (weighted.create(_VECTOR, tff.TensorType(np.float32)), (_UPDATES, [1.0] * 6)),
    ):
        first = process.initialize()
        for state in (first, process.next(first, *arguments).state):
            assert noise_states.participations_in(state) == (_PARTICIPATION,)


def test_measurements_of_a_round_with_zeroing() -> None:
    process = _process(zeroing_norm=10.0, clip_norm=1.01)
    output = process.next(process.initialize(), _UPDATES)
    found = output.measurements
    assert found["num_updates"] == 6
    assert found["non_finite_updates"] == 2
    assert found["update_norm"] == pytest.approx((0.5 + 2.0 + 50.0 + 1.0) / 4, rel=1e-6)
    assert found["max_update_norm"] == pytest.approx(50.0, rel=1e-6)
    assert found["zeroed_fraction"] == pytest.approx(1 / 6)
    assert found["clipped_fraction"] == pytest.approx(1 / 6)
    kept = _UPDATES[0] + _UPDATES[1] * 1.01 / 2.0 + _UPDATES[3]
    np.testing.assert_allclose(output.result, kept / 4, rtol=1e-5, atol=1e-7)
    assert found["released_norm"] == pytest.approx(np.linalg.norm(kept) / 4, rel=1e-5)
    # What the inner processes measure is kept.
    assert found["zeroing"]["dp_query_metrics"]["rounds_released"] == 1
    assert found["zeroing_norm"] == pytest.approx(10.0)


@pytest.mark.short_cases(1)
@pytest.mark.parametrize("zeroing_norm", [pytest.param(None, marks=pytest.mark.long), 10.0])
def test_a_clip_norm_that_adapts_is_released_and_not_measured(zeroing_norm: float | None) -> None:
    clip = mfa.AdaptiveClip(1.01, update_period=1)
    process = _process(zeroing_norm=zeroing_norm, clip_norm=clip)
    output = process.next(process.initialize(), _UPDATES)
    assert "clipped_fraction" not in output.measurements
    found = private_aggregation.released_clip(output.measurements)
    # Of norms 0.5, 1, 2 and 50, NaN and infinity. What is zeroed, infinity as well, is within.
    within, above = (4, 1) if zeroing_norm else (2, 2)
    fraction = 0.5 + (within - above) / 2 / 4
    assert found["clip_norm"] == pytest.approx(1.01)
    assert found["unclipped_fraction"] == pytest.approx(fraction)
    assert found["next_clip_norm"] == pytest.approx(1.01 * np.exp(0.5 - fraction))


@pytest.mark.short_cases(1)
@pytest.mark.parametrize(
    ("bad", "position", "zeroing_norm"),
    [
        (np.nan, 2, 5.0),
        (np.inf, 2, 5.0),
        pytest.param(np.nan, 0, None, marks=pytest.mark.long),
        pytest.param(np.inf, 2, None, marks=pytest.mark.long),
        pytest.param(-np.inf, 0, None, marks=pytest.mark.long),
    ],
)
def test_a_broken_update_breaks_no_measurement(
    bad: float, position: int, zeroing_norm: float | None
) -> None:
    process = _process(zeroing_norm=zeroing_norm)
    broken = _update(3.0, 3.0, 3.0)
    broken[position] = bad
    output = process.next(process.initialize(), [_update(0.6, 0.8, 0.0), broken])
    assert np.all(np.isfinite(output.result))
    assert output.measurements["non_finite_updates"] == 1
    assert output.measurements["update_norm"] == pytest.approx(1.0, rel=1e-6)
    assert output.measurements["max_update_norm"] == pytest.approx(1.0, rel=1e-6)
    assert output.measurements["zeroed_fraction"] == 0.0


def test_without_finite_updates_norms_are_zero() -> None:
    process = _usual_process()
    state = process.initialize()
    for updates in ([], [_update(np.nan, 0.0, 0.0)]):
        found = process.next(state, updates).measurements
        assert found["num_updates"] == len(updates)
        assert found["update_norm"] == 0.0
        assert found["max_update_norm"] == 0.0
        assert found["clipped_fraction"] == 0.0
        assert found["released_norm"] == 0.0


@pytest.mark.short_cases(1)
@pytest.mark.parametrize("zeroing_norm", [None, pytest.param(0.5, marks=pytest.mark.long), 20.0])
def test_one_client_moves_the_sum_by_at_most_the_clip_norm(zeroing_norm: float | None) -> None:
    # The same noise in all calls, from one seed: what differs is the client.
    clip_norm, divisor = 1.5, 4
    process = _process(
        zeroing_norm=zeroing_norm,
        clip_norm=clip_norm,
        clients_per_round=divisor,
        noise_multiplier=1.0,
        seed=3,
    )
    others = [_update(0.3, -0.1, 0.2), _update(4.0, 0.4, 0.1)]
    without = np.array(process.next(process.initialize(), others).result, np.float64)
    generator = np.random.default_rng(5)
    furthest = 0.0
    for magnitude in [1e-3, 0.4, 0.6, 1.0, 5.0, 19.0, 21.0, 1e4, 1e38]:
        direction = generator.normal(size=3)
        direction *= magnitude / np.max(np.abs(direction))
        output = process.next(process.initialize(), [*others, direction.astype(np.float32)])
        change = divisor * float(np.linalg.norm(np.array(output.result, np.float64) - without))
        assert change <= clip_norm * (1 + 1e-5)
        furthest = max(furthest, change)
    # The bound is reached unless what is kept is smaller than the clip norm.
    if zeroing_norm != 0.5:
        assert furthest == pytest.approx(clip_norm, rel=1e-4)


@pytest.mark.long
def test_the_aggregators_noise_has_the_expected_norm() -> None:
    # For d independent normal numbers, |noise|^2 / variance is chi-squared of d degrees of
    # freedom: 2 x 6 tests, each false with probability 1e-8.
    num_parameters = 4000
    arguments: dict[str, Any] = {
        "participation": _PARTICIPATION,
        "noise_multiplier": 0.7,
        "clip_norm": 3.0,
        "clients_per_round": 5,
    }
    factorization = mfa.factorizations.banded(mfa.workloads.prefix_sum(_NUM_ROUNDS), 3)
    expected = private_aggregation.expected_noise_norm(
        factorization, num_parameters=num_parameters, **arguments
    )
    # The check can tell: rounds differ by more than its width.
    assert np.max(expected) > 1.2 * np.min(expected)
    low, high = scipy.stats.chi2.ppf([1e-8, 1 - 1e-8], num_parameters)
    process = _process(tff.TensorType(np.float32, [num_parameters]), **arguments)
    state = process.initialize()
    for index in range(_NUM_ROUNDS):
        output = process.next(state, [np.zeros(num_parameters, np.float32)])
        state = output.state
        found = float(output.measurements["released_norm"])
        assert found == pytest.approx(np.linalg.norm(output.result), rel=1e-5)
        assert low < num_parameters * (found / expected[index]) ** 2 < high
