"""The query: clipping, sums and noise, without TensorFlow Federated."""

import collections
import os
import pathlib
import shutil
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import tensorflow as tf
from tensorflow.python.framework import config

from mf_aggregators import AdaptiveClip, inputs, mf_dp_aggregator, workloads
from mf_aggregators.factorizations import (
    DenseFactorization,
    Factorization,
    banded,
    identity,
    optimal,
)
from mf_aggregators.kernel.claim import Claim, Pattern
from mf_aggregators.kernel.integers import IntegerRows, IntegerSums, Rounding
from mf_aggregators.kernel.rows import NoiseRecursion, independent_rows
from mf_aggregators.participation import SingleParticipation
from mf_aggregators.tff import dp_query
from mf_aggregators.tff.dp_query import MatrixFactorizationSumQuery
from tests.examples import examples
from tests.mf_aggregators.statistics_of_noise import check_standard_normal
from tests.mf_aggregators.tff.small_aggregators import sum_of, sum_query
from tests.refusals import refuses

_NUM_ROUNDS = 5
_SPECS = collections.OrderedDict(
    first=tf.TensorSpec((2, 2), tf.float32), second=tf.TensorSpec((2,), tf.float64)
)


_FOUR = [tf.TensorSpec((4,), tf.float32)]


def _query(
    factorization: Factorization, noise_stddev: float = 0.0, seed: int | None = None, **other: Any
) -> MatrixFactorizationSumQuery:
    return sum_query(
        factorization.noise_recursion(),
        other.pop("specs", _SPECS),
        noise_stddev=noise_stddev,
        seed=seed,
        **other,
    )


def _parts(
    recursion: NoiseRecursion, specs: tuple[tf.TensorSpec, ...], **options: Any
) -> dp_query.NoiseParts:
    claim = Claim(recursion, Pattern((0,)), 1.0, 1e-5)
    return dp_query.make([claim], 1.0, specs, **options)


def _record(*values: float) -> Any:
    entries = np.array(values)
    return collections.OrderedDict(
        first=tf.constant(entries[:4].reshape(2, 2), tf.float32),
        second=tf.constant(entries[4:], tf.float64),
    )


def _flat(record: Any) -> np.ndarray:
    return np.concatenate([np.ravel(tensor.numpy()) for tensor in tf.nest.flatten(record)])


def _run(query: MatrixFactorizationSumQuery, rounds: list[list[Any]]) -> list[np.ndarray]:
    state = query.initial_global_state()
    results = []
    for records in rounds:
        sums = sum_of(query, query.derive_sample_params(state), records)
        result, state, _ = query.get_noised_result(sums, state)
        results.append(_flat(result))
    return results


def test_without_noise_the_sum_of_clipped_records_is_exact() -> None:
    inside = _record(0.1, -0.2, 0.3, 0.0, 0.25, -0.5)
    outside = _record(3.0, 0.0, -4.0, 0.0, 0.0, 12.0)
    (result,) = _run(_query(banded(workloads.prefix_sum(3), 2)), [[inside, outside]])
    expected = _flat(inside) + _flat(outside) / 13.0
    np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-7)
    # A record within the norm loses half a step at most.
    (alone,) = _run(_query(identity(3)), [[inside]])
    np.testing.assert_allclose(alone, _flat(inside), rtol=1e-7, atol=0.5 * 2.0**-30)


@pytest.mark.short_cases(2)
@pytest.mark.parametrize("entries", [[0.3, -0.1], [-0.4, 0.2], [0.0, 0.0], [2.0**-40, 0.7]])
def test_released_numbers_are_multiples_of_a_step_that_no_data_determine(
    entries: list[float],
) -> None:
    """Bit for bit, whatever is released: the step follows from matrix, clip norm and noise."""
    factorization = banded(workloads.prefix_sum(_NUM_ROUNDS), 3)
    rows = IntegerRows.of(factorization.noise_recursion())
    stddev = 1.5 * Rounding.of(rows).enlarged(
        0.7 / 1.5, num_parameters=2, largest_cohort=IntegerSums().largest_cohort
    )
    specs = [tf.TensorSpec((2,), tf.float64)]
    query = _query(factorization, 0.7, seed=4, specs=specs, l2_norm_clip=1.5)
    released = _run(query, [[[tf.constant(entries, tf.float64)]]] * _NUM_ROUNDS)
    zeros = _run(query, [[[tf.zeros([2], tf.float64)]]] * _NUM_ROUNDS)
    for i, step in enumerate(stddev * rows.steps):
        for numbers in (released[i], zeros[i]):
            np.testing.assert_array_equal(np.rint(numbers / step) * step, numbers)
        # The noise is the same, and the sum is rounded to the step before it is added.
        moved = np.rint(released[i] / step) - np.rint(zeros[i] / step)
        np.testing.assert_allclose(moved * step, entries, rtol=0.0, atol=0.51 * abs(step) + 1e-9)


@pytest.mark.long_cases(1)
@pytest.mark.parametrize(
    "mechanism",
    [
        # Rows of every kind of recursion are compared with NumPy's in tests of their own.
        "banded",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("identity", "optimal")),
    ],
)
def test_released_noise_has_the_covariance_of_the_mechanism(mechanism: str) -> None:
    """Over fresh seeds: C Y / stddev is white, so cov(Y) = stddev^2 (C^T C)^-1.

    False alarm once in ten million runs.
    """
    workload = workloads.prefix_sum(_NUM_ROUNDS)
    factorization: Factorization = {
        "identity": lambda: identity(_NUM_ROUNDS),
        "banded": lambda: banded(workload, 3),
        "optimal": lambda: optimal(workload),
    }[mechanism]()
    stddev = 1.7
    query = _query(factorization, stddev)
    zeros = query.initial_sample_state()
    step = tf.function(lambda state: query.get_noised_result(zeros, state)[:2], autograph=False)
    start = tf.function(query.initial_global_state, autograph=False)
    samples = []
    for _ in range(examples(400)):
        state, rows = start(), []
        for _ in range(_NUM_ROUNDS):
            result, state = step(state)
            rows.append(_flat(result))
        whitened = factorization.strategy_matrix() @ np.array(rows) / stddev
        samples.append(whitened.ravel())
    check_standard_normal(np.array(samples))


def test_a_round_of_more_clients_than_fit_releases_nothing() -> None:
    query = _query(identity(3), 1.0, sums=inputs.integer_sums(24, 2, 2), specs=_FOUR)
    record = [tf.ones([4])]
    state = query.initial_global_state()
    params = query.derive_sample_params(state)
    query.get_noised_result(sum_of(query, params, [record] * 2), state)
    with refuses("2", "clients", error=tf.errors.InvalidArgumentError):
        query.get_noised_result(sum_of(query, params, [record] * 3), state)


@pytest.mark.parametrize("is_traced", [False, True], ids=["eager", "graph"])
def test_every_start_has_noise_of_its_own_with_deterministic_operations(is_traced: bool) -> None:
    """``tf.config.experimental.enable_op_determinism``, which other tests do not have."""
    query = _query(identity(3), 1.0)
    start = query.initial_global_state
    config.enable_op_determinism()
    try:
        traced = tf.function(start, autograph=False) if is_traced else start
        states = [traced() for _ in range(20)]
        query.get_noised_result(query.initial_sample_state(), states[0])
    finally:
        config.disable_op_determinism()
    assert len({tuple(state.seed.numpy()) for state in states}) == 20
    assert len({tuple(state.stream.numpy()) for state in states}) == 20


@pytest.mark.short_cases(4)
@pytest.mark.parametrize("seed", [0, 2**31 - 1, 2**31, 2**32, 2**63, 2**64 + 1, 10**40])
def test_fixed_seeds_of_any_size_repeat_and_differ(seed: int) -> None:
    def noise(value: int) -> np.ndarray:
        return _run(_query(identity(2), 1.0, seed=value), [[_record(0, 0, 0, 0, 0, 0)]])[0]

    np.testing.assert_array_equal(noise(seed), noise(seed))
    assert not np.any(noise(seed) == noise(seed + 1))
    assert not np.any(noise(seed) == noise(seed + 2**32))


def test_unknown_shapes_are_refused() -> None:
    with refuses("shape"):
        _query(identity(2), specs=[tf.TensorSpec((None,), tf.float32)])


def test_states_that_tff_cannot_pass_are_refused() -> None:
    factorization = banded(workloads.prefix_sum(64), 64, max_evaluations=1000)
    specs = [tf.TensorSpec((10_000_000,), tf.float32)]
    with refuses("GiB", "noise_storage"):
        _query(factorization, 1.0, specs=specs)


def test_matrices_that_no_graph_should_hold_are_refused() -> None:
    factorization = DenseFactorization(np.tri(600))
    with refuses("matrix", "noise_storage"):
        _query(factorization, 1.0)


def test_noise_of_another_query_is_refused() -> None:
    recursion = banded(workloads.prefix_sum(4), 2).noise_recursion()
    specs = tuple(tf.nest.flatten(_SPECS))
    parts = _parts(recursion, specs)
    with refuses("noise", "tensors"):
        MatrixFactorizationSumQuery(parts, specs[:1])


def test_disks_without_room_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class _Usage:
        free = 2**30

    monkeypatch.setattr(shutil, "disk_usage", lambda path: _Usage())
    factorization = banded(workloads.prefix_sum(64), 64, max_evaluations=1000)
    specs = (tf.TensorSpec((10_000_000,), tf.float32),)
    with refuses("noise_directory"):
        _parts(factorization.noise_recursion(), specs)


def test_more_noise_than_guarantees_are_stated_for_is_refused(tmp_path: pathlib.Path) -> None:
    """2^40 numbers in all rounds; one more of each row where the clip norm adapts."""
    recursion = independent_rows(2**20)
    with refuses("2^40"):
        sum_query(recursion, tf.TensorSpec([2**20 + 1]), noise_stddev=1.0)

    def factory(clip_norm: float | AdaptiveClip, multiplier: float) -> Any:
        return mf_dp_aggregator(
            identity(2**20),
            participation=SingleParticipation(),
            noise_multiplier=multiplier,
            clip_norm=clip_norm,
            clients_per_round=10,
            noise_directory=tmp_path / "noise",
            noise_storage="disk",
        )

    cases: list[tuple[float | AdaptiveClip, int]] = [
        (1.0, 2**20 + 1),
        (AdaptiveClip(1.0), 2**20),
    ]
    for clip_norm, size in cases:
        with refuses("2^40"):
            factory(clip_norm, 1.0).query(tf.TensorSpec([size]))
    # Nothing was begun.
    assert not (tmp_path / "noise").exists()
