"""Rows of Z: standard normal, and a function of seed, row and coordinate alone."""

import math
import os
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mf_aggregators.noise import random_bits, row_layout, rows_of_z
from mf_aggregators.noise.random_bits import NoiseSource
from mf_aggregators.noise.row_layout import CHUNK
from tests.mf_aggregators.statistics_of_noise import check_standard_normal

_HALF = CHUNK // 2
_SEED = np.array([2**62 + 12345, -(2**61) - 999], np.int64)
# Three chunks and a part of a fourth.
_LONG = {
    source: rows_of_z.standard_normal(source, _SEED, 7, 0, 3 * CHUNK + 1001, np.float64)
    for source in NoiseSource
}


@given(st.sampled_from(NoiseSource), st.data())
@settings(deadline=None, max_examples=200)
def test_any_range_is_a_part_of_the_row(source: NoiseSource, data: st.DataObject) -> None:
    long = _LONG[source]
    edges = [chunk * CHUNK + half * _HALF for chunk in range(4) for half in range(2)]
    near_edges = st.tuples(st.sampled_from(edges), st.integers(-3, 3)).map(sum)
    coordinates = st.one_of(st.integers(0, len(long)), near_edges)
    first, stop = sorted(min(max(data.draw(coordinates), 0), len(long)) for _ in range(2))
    dtype = data.draw(st.sampled_from([np.float32, np.float64]))
    part = rows_of_z.standard_normal(source, _SEED, 7, first, stop - first, dtype)
    assert part.dtype == dtype
    np.testing.assert_array_equal(part, long[first:stop].astype(dtype))


@given(st.sampled_from(NoiseSource), st.integers(0, 3 * CHUNK + 1000))
@example(NoiseSource.PHILOX, 0)
@example(NoiseSource.AES, 2 * CHUNK - 1)
@settings(deadline=None)
def test_single_coordinates_follow_the_definition(source: NoiseSource, coordinate: int) -> None:
    chunk, offset = divmod(coordinate, CHUNK)

    def upper_bits(index: int) -> int:
        integers = random_bits.integers(source, _SEED, 7, index - index % 2, 2)
        return int(integers[index % 2]) >> 11

    pair = chunk * CHUNK + offset % _HALF
    radius = math.sqrt(-2.0 * math.log((upper_bits(pair) + 1) * 2.0**-53))
    angle = 2.0 * math.pi * upper_bits(pair + _HALF) * 2.0**-53
    expected = radius * (math.cos(angle) if offset < _HALF else math.sin(angle))
    found = rows_of_z.standard_normal(source, _SEED, 7, coordinate, 1, np.float64)
    assert found[0] == pytest.approx(expected, rel=1e-12, abs=1e-14)


@given(st.integers(0, 2 * CHUNK), st.integers(0, 3 * CHUNK))
@settings(deadline=None, max_examples=50)
@example(0, 100)
@example(0, _HALF)
def test_no_more_integers_are_drawn_than_needed(first: int, count: int) -> None:
    """A radius and an angle for each pair, and up to an even number at a range's ends."""
    drawn = []
    original = random_bits.integers

    def counted(source: NoiseSource, seed: np.ndarray, row: int, index: int, size: int) -> Any:
        drawn.append(size)
        return original(source, seed, row, index, size)

    coordinates = np.arange(first, first + count)
    pairs = np.unique(coordinates // CHUNK * CHUNK + coordinates % _HALF)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(random_bits, "integers", counted)
        rows_of_z.standard_normal(NoiseSource.PHILOX, _SEED, 0, first, count, np.float32)
    # At most the first and the last chunk are partial, each in at most two ranges.
    assert 2 * len(pairs) <= sum(drawn) <= 2 * len(pairs) + 2 * 2 * 4
    if first == 0 and count <= _HALF:
        assert sum(drawn) == 2 * (count + count % 2)


@pytest.mark.parametrize("source", NoiseSource)
def test_rows_are_independent_standard_normals_across_seeds(source: NoiseSource) -> None:
    """Over pairs' halves, chunks and rows; false alarm once in ten million runs."""
    # Cosines and sines of the same pairs, on both sides of every edge.
    ranges = [(0, 3), (_HALF - 1, 4), (CHUNK - 1, 3)]
    samples = []
    for _ in range(1000):
        seed = np.frombuffer(os.urandom(16), np.int64)
        samples.append(
            np.concatenate(
                [
                    rows_of_z.standard_normal(source, seed, row, first, count, np.float64)
                    for row in (0, 1)
                    for first, count in ranges
                ]
            )
        )
    check_standard_normal(np.array(samples))


@pytest.mark.parametrize("source", NoiseSource)
def test_coordinates_of_one_row_are_independent_standard_normals(source: NoiseSource) -> None:
    seed = np.frombuffer(os.urandom(16), np.int64)
    row = rows_of_z.standard_normal(source, seed, 3, 0, 8 * CHUNK, np.float32)
    check_standard_normal(row.astype(np.float64).reshape(-1, 64))
    # Cosines against sines, chunks against chunks.
    check_standard_normal(row.astype(np.float64).reshape(16, _HALF).T)


@pytest.mark.parametrize("source", NoiseSource)
def test_no_entry_of_z_occurs_twice(source: NoiseSource) -> None:
    """Over rows, chunks and seeds: 2^53 radii make a chance repeat unlikely."""
    seeds = [np.frombuffer(os.urandom(16), np.int64) for _ in range(2)]
    entries = np.concatenate(
        [
            rows_of_z.standard_normal(source, seed, row, first, 1000, np.float64)
            for seed in seeds
            for row in (0, 1, 2, 2**62)
            for first in (0, _HALF, CHUNK, CHUNK + _HALF, 2**40)
        ]
    )
    assert len(np.unique(entries)) == len(entries)


def test_tails_reach_as_far_as_53_bits_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest uniform gives 8.57 standard deviations, the largest zero; both are finite."""

    def constant(source: NoiseSource, seed: np.ndarray, row: int, index: int, size: int) -> Any:
        # Two pairs, with the smallest and the largest radius integer; angles are zero.
        return np.array([0, 2**64 - 1] if index == 0 else [0, 0], np.uint64)

    monkeypatch.setattr(random_bits, "integers", constant)
    found = rows_of_z.standard_normal(NoiseSource.PHILOX, _SEED, 0, 0, 2, np.float64)
    np.testing.assert_allclose(found, [math.sqrt(2 * 53 * math.log(2)), 0.0])


def test_segments_are_ranges_of_a_row() -> None:
    layout = row_layout.RowLayout(((5,), (3,)), ("float64", "float32"))
    singles, doubles = (
        rows_of_z.segment_of_row(NoiseSource.AES, _SEED, 7, segment) for segment in layout.segments
    )
    np.testing.assert_array_equal(singles, _LONG[NoiseSource.AES][:3].astype(np.float32))
    np.testing.assert_array_equal(doubles, _LONG[NoiseSource.AES][CHUNK : CHUNK + 5])
    assert (singles.dtype, doubles.dtype) == (np.float32, np.float64)


def test_bad_arguments_are_refused() -> None:
    for row, first, count, dtype, message in (
        (0, -1, 1, np.float32, "first_coordinate must be at least 0"),
        (0, 0, -1, np.float32, "count must be at least 0"),
        (-1, 0, 1, np.float32, "row must be at least 0"),
        (0, 2**63 - 1, 2, np.float32, "below 2\\^63"),
        (0, 0, 1, np.float16, "float32 or float64, found float16"),
        (0, 0, 1, np.int64, "float32 or float64, found int64"),
    ):
        with pytest.raises(ValueError, match=message):
            rows_of_z.standard_normal(NoiseSource.PHILOX, _SEED, row, first, count, dtype)
