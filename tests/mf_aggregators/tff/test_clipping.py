"""Clipping to a grid, in graphs and in NumPy, against exact integers; sums of what clients send."""

import math
import os
import pathlib
import re
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hypothesis_numpy

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import tensorflow as tf

import mf_aggregators as mfa
from mf_aggregators import AdaptiveClip, inputs
from mf_aggregators.kernel import integers
from mf_aggregators.kernel.integers import STEPS_PER_CLIP_NORM
from mf_aggregators.tff import dp_query
from tests.examples import examples
from tests.mf_aggregators.tff import secure_sum_table
from tests.refusals import refuses

_STEPS = [STEPS_PER_CLIP_NORM, 2**21, 1000, 3, 1]


def _clipped(
    tensors: list[np.ndarray], clip_norm: float = 1.0, steps: int = STEPS_PER_CLIP_NORM
) -> np.ndarray:
    record = [tf.constant(tensor) for tensor in tensors]
    limit = tf.constant(clip_norm, tf.float64)
    found = dp_query.clip_to_grid(record, limit, steps)
    assert all(tensor.dtype == tf.int64 for tensor in found)
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

    def longer(exact: Any) -> Any:
        def of(*arguments: Any) -> Any:
            scaled, *others = exact(*arguments)
            return [1.001 * tensor for tensor in scaled], *others

        return of

    record = [np.array([3.0, 4.0]), np.array([12.0])]
    assert np.all(_clipped(record) != 0)
    monkeypatch.setattr(dp_query, "_clipped", longer(dp_query._clipped))
    monkeypatch.setattr(integers, "clipped", longer(integers.clipped))
    np.testing.assert_array_equal(_clipped(record), np.zeros(3))


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
            lambda record: dp_query.clip_to_grid([record], tf.constant(0.7, tf.float64), 2**30)[0],
            records,
            fn_output_signature=tf.int64,
        ),
        input_signature=[tf.TensorSpec([None, 3], tf.float64)],
        autograph=False,
    )
    clipped_to = Fraction(0.7)
    step = clipped_to / 2**30
    for _ in range(examples(10_000, one_in=40)):
        updates, target = _adversarial_cohort(generator)
        steps = clip(tf.constant(updates)).numpy()
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
    assert len(rows) >= 8
    for row in rows:
        sums = inputs.integer_sums(row.bits, row.clients, row.clients)
        for size, number in row.printed.items():
            if number == "refused":
                with refuses("secure_aggregation_bits"):
                    inputs.check_rounding(sums, size)
            else:
                inputs.check_rounding(sums, size)
                assert number == f"{inputs.rounding(sums, size):.1e}".replace("e-0", "e-")


def test_the_largest_cohort_of_an_adaptive_norm_in_24_bits_is_that_of_the_documents() -> None:
    page = (pathlib.Path(__file__).parents[3] / "docs" / "noise.md").read_text(encoding="utf-8")
    (printed,) = re.findall(r"cohorts have at most ([0-9,]+) clients", page)
    mechanism = mfa.Mechanism(
        mfa.factorizations.identity(2), mfa.participation.SingleParticipation(), 1.0
    )
    most = int(printed.replace(",", ""))
    options: dict[str, Any] = {"clip_norm": AdaptiveClip(1.0), "secure_aggregation_bits": 24}
    mfa.Aggregator(mechanism, clients_per_round=most, **options)
    with refuses("secure_aggregation_bits"):
        mfa.Aggregator(mechanism, clients_per_round=most + 1, **options)
