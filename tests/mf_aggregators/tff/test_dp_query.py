"""The query: clipping, sums and noise, without TensorFlow Federated."""

import collections
import math
import pathlib
import re
import shutil
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hypothesis_numpy
from tensorflow.python.framework import config

import mf_aggregators as mfa
from mf_aggregators import AdaptiveClip, mf_dp_aggregator, workloads
from mf_aggregators import aggregator as numpy_aggregator
from mf_aggregators.factorizations import (
    DenseFactorization,
    Factorization,
    banded,
    identity,
    optimal,
)
from mf_aggregators.kernel import integers
from mf_aggregators.kernel.claim import Claim, Pattern
from mf_aggregators.kernel.draws import TILE
from mf_aggregators.kernel.integers import STEPS_PER_CLIP_NORM, IntegerRows, IntegerSums, Rounding
from mf_aggregators.kernel.rows import BandedNoise, NoiseRecursion
from mf_aggregators.participation import SingleParticipation
from mf_aggregators.tff import dp_query
from mf_aggregators.tff.dp_query import MatrixFactorizationSumQuery
from tests.examples import examples
from tests.mf_aggregators.statistics_of_noise import check_standard_normal
from tests.mf_aggregators.tff import secure_sum_table
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
    return dp_query.NoiseParts.of([claim], 1.0, specs, **options)


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
    query = _query(identity(3), 1.0, sums=numpy_aggregator._integer_sums(24, 2, 2), specs=_FOUR)
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
    recursion = BandedNoise(2**20)
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


# Clipping to a grid, in graphs and in NumPy, against exact integers; sums of what clients send.


_STEPS = [STEPS_PER_CLIP_NORM, 2**21, 1000, 3, 1]


def _clipped(
    tensors: list[np.ndarray], clip_norm: float = 1.0, steps: int = STEPS_PER_CLIP_NORM
) -> np.ndarray:
    record = [tf.constant(tensor) for tensor in tensors]
    limit = tf.constant(clip_norm, tf.float64)
    found = dp_query._clip_to_grid(record, limit, steps)
    assert all(tensor.dtype == tf.int32 for tensor in found)
    in_numpy = integers.clip_to_grid(tensors, clip_norm, steps)
    for tensor, array in zip(found, in_numpy, strict=True):
        np.testing.assert_array_equal(tensor.numpy(), array)
    return np.concatenate([tensor.numpy().ravel() for tensor in found])


def _norm_squared(integers: np.ndarray) -> int:
    """In integers without a bound."""
    return sum(int(integer) ** 2 for integer in integers)


_any_floats = hypothesis_numpy.arrays(
    st.sampled_from([np.float32, np.float64]), st.integers(1, 40), elements={"allow_nan": True}
)


@given(
    st.lists(_any_floats, min_size=1, max_size=3), st.floats(1e-30, 1e30), st.sampled_from(_STEPS)
)
@settings(deadline=None, max_examples=examples(400))
def test_no_record_is_longer_than_the_clip_norm(
    tensors: list[np.ndarray], clip_norm: float, steps: int
) -> None:
    """Whatever the record is, NaN, infinite or the largest float: in exact arithmetic."""
    found = _clipped(tensors, clip_norm, steps)
    assert _norm_squared(found) <= steps**2
    if not all(np.all(np.isfinite(tensor)) for tensor in tensors):
        assert not np.any(found)


@given(
    hypothesis_numpy.arrays(np.float64, st.integers(1, 60), elements=st.floats(-1.0, 1.0)),
    st.floats(0.01, 10.0),
    st.sampled_from([STEPS_PER_CLIP_NORM, 2**21, 1000]),
)
@settings(deadline=None, max_examples=examples(400))
def test_records_keep_their_direction_and_what_length_they_may(
    record: np.ndarray, clip_norm: float, steps: int
) -> None:
    found = _clipped([record], clip_norm, steps)
    norm = math.hypot(*record)
    expected = record * min(1.0, clip_norm / norm if norm else 1.0) * steps / clip_norm
    # Rounded to the nearest step, or towards zero by less than one, after a margin of 1e-9.
    np.testing.assert_allclose(found, expected, rtol=2e-9, atol=1.0)
    if norm < clip_norm * (1.0 - len(record) / steps):
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=0.5 + 1e-6)


@pytest.mark.parametrize("size", [2, 100, 30_000])
def test_half_of_the_clipped_records_are_rounded_to_nearest(size: int) -> None:
    """Both ways to round are taken: a bound that is never met would show nothing."""
    generator = np.random.default_rng(size)
    to_nearest = 0
    for _ in range(40):
        record = generator.normal(size=size)
        exact = record / np.linalg.norm(record) * STEPS_PER_CLIP_NORM
        found = _clipped([record * 5.0])
        assert _norm_squared(found) <= STEPS_PER_CLIP_NORM**2
        nearest = np.abs(found - exact) <= 0.5 + 1e-4
        to_nearest += bool(np.all(nearest))
        # Nothing is lost but the rounding.
        assert np.linalg.norm(found - exact) <= 2.0 * math.sqrt(size)
    # Of 40 fair coins, 3 or fewer or 37 or more: once in 50 million runs.
    assert 3 < to_nearest < 37


def test_a_record_that_is_as_long_as_the_clip_norm_keeps_its_length() -> None:
    np.testing.assert_array_equal(_clipped([np.array([0.0, -1.0])]), [0, -STEPS_PER_CLIP_NORM])
    np.testing.assert_array_equal(
        _clipped([np.array([3.0]), np.array([4.0])], 5.0, 1000), [600, 800]
    )


def test_nothing_is_released_of_a_record_that_floats_left_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The integers have the last word, whatever the arithmetic before them does."""
    of_graph: Any = dp_query._scaling
    scaling: Any = integers.scaling

    def longer(*arguments: Any) -> Any:
        (unit, scale), *others = of_graph(*arguments)
        return (unit, 1.001 * scale), *others

    def longer_scale(*arguments: Any) -> Any:
        unit, scale, is_within = scaling(*arguments)
        return unit, 1.001 * scale, is_within

    record = [np.array([3.0, 4.0]), np.array([12.0])]
    assert np.all(_clipped(record) != 0)
    monkeypatch.setattr(dp_query, "_scaling", longer)
    monkeypatch.setattr(integers, "scaling", longer_scale)
    np.testing.assert_array_equal(_clipped(record), np.zeros(3))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_records_of_several_tiles_have_the_kernels_integers(dtype: Any) -> None:
    """Shorter and longer than the norm, with the largest entry and NaN in the last tile."""
    record = np.random.default_rng(3).normal(size=TILE + 2**14 + 1).astype(dtype)
    record[-1] = -9.0
    small = record[:70].astype(np.float64)
    for clip_norm in (1.0, 3.0, 1e4):
        assert np.any(_clipped([record, small], clip_norm))
    record[-2] = np.nan
    assert not np.any(_clipped([record, small]))


@pytest.mark.parametrize("excess", [1e-15, 1e-12, 1e-9, 1e-6, 5e-5, 1e-3])
def test_a_record_hardly_above_the_clip_norm_is_hardly_shortened(excess: float) -> None:
    for size in (1, 7, 1000):
        record = np.random.default_rng(size).normal(size=size)
        record *= (1.0 + excess) / np.linalg.norm(record)
        length = math.sqrt(_norm_squared(_clipped([record])))
        assert (1.0 - 1e-6) * STEPS_PER_CLIP_NORM <= length <= STEPS_PER_CLIP_NORM


# Sums


def _adversarial_cohort(generator: np.random.Generator) -> tuple[np.ndarray, int]:
    """Updates of magnitudes that floats add up wrongly, and the client that is taken out."""
    size, dimension = int(generator.integers(2, 12)), 3
    exponents = generator.integers(-40, 40, size=(size, 1)).astype(np.float64)
    updates = generator.choice([-1.0, 1.0], size=(size, dimension)) * 2.0**exponents
    updates[:, int(generator.integers(1, 4)) :] = 0.0
    updates *= 1.0 + 2.0 ** -generator.integers(1, 50, size=(size, dimension)).astype(np.float64)
    if generator.random() < 0.1:
        updates[generator.integers(size), generator.integers(dimension)] = generator.choice(
            [np.nan, np.inf, 1e308, 5e-324]
        )
    return updates, int(generator.integers(size))


def test_ten_thousand_cohorts_in_which_one_client_never_moves_the_sum_too_far() -> None:
    generator = np.random.default_rng(7)
    clip = tf.function(
        # One call for all clients, each clipped by itself.
        lambda records: tf.map_fn(
            lambda record: dp_query._clip_to_grid([record], tf.constant(0.7, tf.float64), 2**30)[0],
            records,
            fn_output_signature=tf.int32,
        ),
        input_signature=[tf.TensorSpec([None, 3], tf.float64)],
        autograph=False,
    )
    clipped_to = Fraction(0.7)
    step = clipped_to / 2**30
    for _ in range(examples(10_000, one_in=40)):
        updates, target = _adversarial_cohort(generator)
        steps = clip(tf.constant(updates)).numpy().astype(np.int64)
        with_it = np.sum(steps, axis=0)
        steps[target] = np.zeros_like(steps[target])
        order = generator.permutation(len(steps))
        without = np.zeros_like(with_it)
        for client in order:
            without += steps[client]
        moved = sum((int(entry) * step) ** 2 for entry in with_it - without)
        assert moved <= clipped_to**2


# How many bits they take


def test_the_table_of_the_documents() -> None:
    rows = secure_sum_table.rows()
    assert len(rows) >= 4
    for row in rows:
        sums = numpy_aggregator._integer_sums(row.bits, row.clients, row.clients)
        for size, number in row.printed.items():
            if number == "refused":
                with refuses("secure_aggregation_bits"):
                    numpy_aggregator._check_rounding(sums, size)
            else:
                found = numpy_aggregator._rounding(sums, size)
                assert number == f"{found:.1e}".replace("e-0", "e-")
                numpy_aggregator._check_rounding(sums, size)


def test_the_largest_cohort_of_an_adaptive_norm_in_24_bits_is_that_of_the_documents() -> None:
    page = (pathlib.Path(__file__).parents[3] / "docs" / "noise.md").read_text(encoding="utf-8")
    (printed,) = re.findall(r"24 bits [^)]* at most ([0-9,]+) clients", page)
    mechanism = mfa.Mechanism(
        mfa.factorizations.identity(2), mfa.participation.SingleParticipation(), 1.0
    )
    most = int(printed.replace(",", ""))
    options: dict[str, Any] = {"clip_norm": AdaptiveClip(1.0), "secure_aggregation_bits": 24}
    mfa.Aggregator(mechanism, clients_per_round=most, **options)
    with refuses("secure_aggregation_bits"):
        mfa.Aggregator(mechanism, clients_per_round=most + 1, **options)
