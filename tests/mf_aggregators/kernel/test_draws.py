"""Rows of Z: standard normal, and a function of seed, row and coordinate alone."""

import functools
import os
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mf_aggregators.kernel import discrete_gaussian, draws, integer_rows
from mf_aggregators.kernel.draws import TILE, NoiseSource, random_blocks
from tests.examples import examples
from tests.mf_aggregators.statistics_of_noise import check_standard_normal
from tests.refusals import refuses

_HALF = TILE // 2
_SEED = np.array([2**62 + 12345, -(2**61) - 999], np.int64)


@functools.cache
def _long(source: NoiseSource) -> np.ndarray:
    """Three tiles and a part of a fourth."""
    return draws.integers(source, _SEED, 7, 0, 3 * TILE + 1001)


@given(st.sampled_from(NoiseSource), st.data())
@settings(deadline=None, max_examples=examples(30))
def test_any_range_is_a_part_of_the_row(source: NoiseSource, data: st.DataObject) -> None:
    long = _long(source)
    edges = [tile * TILE + half * _HALF for tile in range(4) for half in range(2)]
    near_edges = st.tuples(st.sampled_from(edges), st.integers(-3, 3)).map(sum)
    coordinates = st.one_of(st.integers(0, len(long)), near_edges)
    first, stop = sorted(min(max(data.draw(coordinates), 0), len(long)) for _ in range(2))
    part = draws.integers(source, _SEED, 7, first, stop - first)
    assert part.dtype == np.int64
    np.testing.assert_array_equal(part, long[first:stop])


@pytest.mark.parametrize("source", NoiseSource)
@pytest.mark.parametrize("tile", [0, 3])
def test_coordinates_follow_the_definition(source: NoiseSource, tile: int) -> None:
    """Coordinate by coordinate with Python's integers, through the tile's ties."""
    count = TILE - 16
    table = discrete_gaussian.table()
    packed, further = table.packed.tolist(), table.further.tolist()
    first_words = random_blocks(source, _SEED, 7, 3 * tile * TILE // 16, 3 * count // 16)
    first_words = first_words.tolist()
    tie_words = random_blocks(source, _SEED, 7, 2**60 + tile * 2**17, 20).ravel().tolist()
    num_ties, expected = 0, []
    for place in range(count):
        total = 0
        for number in range(3):
            word = first_words[3 * (place // 16) + number][place % 16]
            column, fraction = word & 0xFFFF, word >> 16
            threshold = packed[column] >> 16
            if fraction == threshold:
                words = tie_words[9 * num_ties : 9 * num_ties + 9]
                is_below = words < further[column]
                num_ties += 1
            else:
                is_below = fraction < threshold
            chosen = column if is_below else packed[column] & 0xFFFF
            total += (chosen - 2**15) << 10 * number
        expected.append(total)
    found = draws.integers(source, _SEED, 7, tile * TILE, count)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("source", NoiseSource)
@pytest.mark.parametrize("tile", [0, 5])
def test_words_for_ties_come_from_ranges_of_their_own(
    source: NoiseSource, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With first words that all tie, over several draws: the words of ties follow one another."""
    used = []
    original = random_blocks

    def tying(source: NoiseSource, seed: np.ndarray, row: int, block: int, count: int) -> Any:
        if block < draws.FIRST_TIE_BLOCK:
            packed = discrete_gaussian.table().packed
            return np.full((count, 16), packed[0] & np.uint32(0xFFFF0000), np.uint32)
        used.append((block - 2**60 - tile * 2**17, count))
        return original(source, seed, row, block, count)

    monkeypatch.setattr(draws, "random_blocks", tying)
    count = 20_000
    draws.integers(source, _SEED, 0, tile * TILE, count)
    # Nine words for each of three ties a coordinate: ranges meet, and share a block where a tie's
    # words are in two of them.
    assert used[0][0] == 0
    ends = [first + number for first, number in used]
    assert all(later[0] in (end - 1, end) for later, end in zip(used[1:], ends[:-1], strict=True))
    assert ends[-1] == -(-27 * count // 16)
    # All that a tile may need is its own.
    assert 27 * TILE // 16 <= draws.TIE_BLOCKS_PER_TILE


@given(st.integers(0, 2 * TILE), st.integers(0, 3 * TILE))
@settings(deadline=None, max_examples=10)
@example(0, 100)
@example(TILE, 100)
def test_no_more_blocks_are_drawn_than_needed(first: int, count: int) -> None:
    """Three for sixteen coordinates, from the tile's first one on, and those of some ties."""
    drawn = 0
    original = random_blocks

    def counted(source: NoiseSource, seed: np.ndarray, row: int, block: int, size: int) -> Any:
        nonlocal drawn
        drawn += size if block < draws.FIRST_TIE_BLOCK else 0
        return original(source, seed, row, block, size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draws, "random_blocks", counted)
        draws.integers(NoiseSource.PHILOX, _SEED, 0, first, count)
    assert 3 * count / 16 <= drawn <= 3 * ((count + first % TILE) / 16 + 1)


@pytest.mark.parametrize("source", NoiseSource)
def test_rows_are_independent_standard_normals_across_seeds(source: NoiseSource) -> None:
    """Over coordinates, tiles and rows; false alarm once in ten million runs."""
    # On both sides of the edges of groups of sixteen, and in two tiles.
    ranges = [(0, 3), (15, 4), (TILE, 3)]
    samples = []
    for _ in range(400):
        seed = np.frombuffer(os.urandom(16), np.int64)
        samples.append(
            np.concatenate(
                [
                    draws.integers(source, seed, row, first, count)
                    for row in (0, 1)
                    for first, count in ranges
                ]
            )
        )
    check_standard_normal(np.array(samples) * draws.STEP)


@pytest.mark.parametrize("source", NoiseSource)
def test_coordinates_of_one_row_are_independent_standard_normals(source: NoiseSource) -> None:
    seed = np.frombuffer(os.urandom(16), np.int64)
    row = draws.integers(source, seed, 3, 0, 4 * TILE) * draws.STEP
    check_standard_normal(row.reshape(-1, 64))
    # Halves of tiles against each other.
    check_standard_normal(row.reshape(8, _HALF).T)


@pytest.mark.parametrize("source", NoiseSource)
def test_no_two_entries_of_z_occur_twice(source: NoiseSource) -> None:
    """Over rows, tiles and seeds: a chance repeat of two neighbours has probability 2^-30."""
    seeds = [np.frombuffer(os.urandom(16), np.int64) for _ in range(2)]
    parts = [
        draws.integers(source, seed, row, first, 1000)
        for seed in seeds
        for row in (0, 1, 2, 2**62)
        for first in (0, 1000, TILE, 2**40)
    ]
    pairs = np.concatenate([np.stack([part[:-1], part[1:]], axis=1) for part in parts])
    assert len(np.unique(pairs, axis=0)) == len(pairs)


def test_segments_are_ranges_of_a_row() -> None:
    layout = integer_rows.RowLayout(((5,), (3,)), ("float64", "float32"))
    singles, doubles = (
        segment.row_of_z(NoiseSource.CHACHA20, _SEED, 7) for segment in layout.segments
    )
    np.testing.assert_array_equal(singles, _long(NoiseSource.CHACHA20)[:3])
    np.testing.assert_array_equal(doubles, _long(NoiseSource.CHACHA20)[TILE : TILE + 5])


def test_bad_arguments_are_refused() -> None:
    for row, first, count, name in (
        (0, -1, 1, "first_coordinate"),
        (0, 0, -1, "count"),
        (-1, 0, 1, "row"),
        (0, 2**56 - 1, 2, "2^56"),
    ):
        with refuses(name):
            draws.integers(NoiseSource.PHILOX, _SEED, row, first, count)
