"""Rows of Z: standard normal, and a function of seed, row and coordinate alone."""

import os
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mf_aggregators.noise import discrete_gaussian, random_bits, row_layout, rows_of_z
from mf_aggregators.noise.random_bits import NoiseSource
from mf_aggregators.noise.row_layout import CHUNK
from tests.mf_aggregators.statistics_of_noise import check_standard_normal

_HALF = CHUNK // 2
_SEED = np.array([2**62 + 12345, -(2**61) - 999], np.int64)
# Three chunks and a part of a fourth.
_LONG = {
    source: rows_of_z.integers(source, _SEED, 7, 0, 3 * CHUNK + 1001) for source in NoiseSource
}


@given(st.sampled_from(NoiseSource), st.data())
@settings(deadline=None, max_examples=200)
def test_any_range_is_a_part_of_the_row(source: NoiseSource, data: st.DataObject) -> None:
    long = _LONG[source]
    edges = [chunk * CHUNK + half * _HALF for chunk in range(4) for half in range(2)]
    near_edges = st.tuples(st.sampled_from(edges), st.integers(-3, 3)).map(sum)
    coordinates = st.one_of(st.integers(0, len(long)), near_edges)
    first, stop = sorted(min(max(data.draw(coordinates), 0), len(long)) for _ in range(2))
    part = rows_of_z.integers(source, _SEED, 7, first, stop - first)
    assert part.dtype == np.int64
    np.testing.assert_array_equal(part, long[first:stop])


@given(st.sampled_from(NoiseSource), st.integers(0, 3 * CHUNK + 1000))
@example(NoiseSource.PHILOX, 0)
@example(NoiseSource.AES, 2 * CHUNK - 1)
@settings(deadline=None)
def test_single_coordinates_follow_the_definition(source: NoiseSource, coordinate: int) -> None:
    def word(index: int) -> int:
        integers = random_bits.integers(source, _SEED, 7, index - index % 2, 2)
        return int(integers[index % 2])

    words = np.array([[word(3 * coordinate + number)] for number in range(3)], np.uint64)
    drawn = discrete_gaussian.from_words(words, lambda level: words)
    found = rows_of_z.integers(source, _SEED, 7, coordinate, 1)
    assert found[0] == drawn[0]


@pytest.mark.parametrize("first", [0, 1, 77, CHUNK - 1])
def test_words_for_ties_come_from_ranges_of_their_own(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With words that all tie: level by level, from the same places further on."""
    drawn = []

    def zeros(source: NoiseSource, seed: np.ndarray, row: int, index: int, size: int) -> Any:
        drawn.append((index, size))
        return np.zeros(size, np.uint64)

    monkeypatch.setattr(random_bits, "integers", zeros)
    found = rows_of_z.integers(NoiseSource.PHILOX, _SEED, 0, first, 2)
    assert np.all(found * rows_of_z.STEP < -15.9)
    start, size = 3 * (first - first % 2), 3 * (2 + first % 2)
    assert drawn[0] == (start, size)
    later = {(start + level * 2**58, size) for level in range(1, 6)}
    assert set(drawn[1:]) <= later
    assert len(set(drawn)) >= 4


@given(st.integers(0, 2 * CHUNK), st.integers(0, 3 * CHUNK))
@settings(deadline=None, max_examples=50)
@example(0, 100)
def test_no_more_integers_are_drawn_than_needed(first: int, count: int) -> None:
    """Three for each coordinate, and up to an even number where a range begins."""
    drawn = []
    original = random_bits.integers

    def counted(source: NoiseSource, seed: np.ndarray, row: int, index: int, size: int) -> Any:
        drawn.append(size)
        return original(source, seed, row, index, size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(random_bits, "integers", counted)
        rows_of_z.integers(NoiseSource.PHILOX, _SEED, 0, first, count)
    assert 3 * count <= sum(drawn) <= 3 * count + 3 * len(drawn)


@pytest.mark.parametrize("source", NoiseSource)
def test_rows_are_independent_standard_normals_across_seeds(source: NoiseSource) -> None:
    """Over coordinates, chunks and rows; false alarm once in ten million runs."""
    # On both sides of every edge.
    ranges = [(0, 3), (_HALF - 1, 4), (CHUNK - 1, 3)]
    samples = []
    for _ in range(1000):
        seed = np.frombuffer(os.urandom(16), np.int64)
        samples.append(
            np.concatenate(
                [
                    rows_of_z.integers(source, seed, row, first, count)
                    for row in (0, 1)
                    for first, count in ranges
                ]
            )
        )
    check_standard_normal(np.array(samples) * rows_of_z.STEP)


@pytest.mark.parametrize("source", NoiseSource)
def test_coordinates_of_one_row_are_independent_standard_normals(source: NoiseSource) -> None:
    seed = np.frombuffer(os.urandom(16), np.int64)
    row = rows_of_z.integers(source, seed, 3, 0, 8 * CHUNK) * rows_of_z.STEP
    check_standard_normal(row.reshape(-1, 64))
    # Halves of chunks against each other.
    check_standard_normal(row.reshape(16, _HALF).T)


@pytest.mark.parametrize("source", NoiseSource)
def test_no_two_entries_of_z_occur_twice(source: NoiseSource) -> None:
    """Over rows, chunks and seeds: a chance repeat of two neighbours has probability 2^-30."""
    seeds = [np.frombuffer(os.urandom(16), np.int64) for _ in range(2)]
    parts = [
        rows_of_z.integers(source, seed, row, first, 1000)
        for seed in seeds
        for row in (0, 1, 2, 2**62)
        for first in (0, _HALF, CHUNK, CHUNK + _HALF, 2**40)
    ]
    pairs = np.concatenate([np.stack([part[:-1], part[1:]], axis=1) for part in parts])
    assert len(np.unique(pairs, axis=0)) == len(pairs)


def test_segments_are_ranges_of_a_row() -> None:
    layout = row_layout.RowLayout(((5,), (3,)), ("float64", "float32"))
    singles, doubles = (
        rows_of_z.segment_of_row(NoiseSource.AES, _SEED, 7, segment) for segment in layout.segments
    )
    np.testing.assert_array_equal(singles, _LONG[NoiseSource.AES][:3])
    np.testing.assert_array_equal(doubles, _LONG[NoiseSource.AES][CHUNK : CHUNK + 5])


def test_bad_arguments_are_refused() -> None:
    for row, first, count, message in (
        (0, -1, 1, "first_coordinate must be at least 0"),
        (0, 0, -1, "count must be at least 0"),
        (-1, 0, 1, "row must be at least 0"),
        (0, 2**56 - 1, 2, "below 2\\^56"),
    ):
        with pytest.raises(ValueError, match=message):
            rows_of_z.integers(NoiseSource.PHILOX, _SEED, row, first, count)
