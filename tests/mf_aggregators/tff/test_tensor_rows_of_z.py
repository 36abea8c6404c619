"""Rows of Z in TensorFlow: those that NumPy draws, bit for bit."""

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import tensorflow as tf

from mf_aggregators.noise import discrete_gaussian, rows_of_z
from mf_aggregators.noise.random_bits import NoiseSource
from mf_aggregators.noise.row_layout import CHUNK
from mf_aggregators.tff import tensor_discrete_gaussian, tensor_rows_of_z
from mf_aggregators.tff.tensor_rows_of_z import BitSource, PhiloxBits
from tests.mf_aggregators.statistics_of_noise import check_standard_normal

_HALF = CHUNK // 2
_SEED = np.array([2**62 + 12345, -(2**61) - 999], np.int64)
_INT64 = st.one_of(
    st.integers(-(2**63), 2**63 - 1), st.sampled_from([0, 1, -1, 2**63 - 1, -(2**63)])
)


@functools.cache
def _drawer(
    width: int, num_rows: int | None, source: type[BitSource] = PhiloxBits
) -> Callable[..., tf.Tensor]:
    """A graph of :func:`chunk_rows`; ``num_rows`` is None for a number that is a tensor."""

    def draw(seed: tf.Tensor, first_row: tf.Tensor, chunk: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
        return tensor_rows_of_z.chunk_rows(
            source(),
            seed,
            first_row,
            rows if num_rows is None else num_rows,
            chunk,
            width,
            tensor_discrete_gaussian.graph_table(),
        )

    return tf.function(draw)


@pytest.fixture(scope="module", autouse=True)
def _graphs() -> Iterator[None]:
    """Lets graphs go while Python is still whole: later, TensorFlow complains."""
    yield
    _drawer.cache_clear()


def _drawn(
    seed: np.ndarray,
    first_row: int,
    num_rows: int,
    chunk: int,
    width: int,
    is_dynamic: bool = True,
    source: type[BitSource] = PhiloxBits,
) -> np.ndarray:
    draw = _drawer(width, None if is_dynamic else num_rows, source)
    rows = draw(
        tf.constant(seed, tf.int64),
        tf.constant(first_row, tf.int64),
        tf.constant(chunk, tf.int64),
        tf.constant(num_rows, tf.int32),
    ).numpy()
    assert (rows.shape, rows.dtype) == ((num_rows, width), np.int64)
    return np.asarray(rows)


@pytest.mark.parametrize("width", [1, 2, 3, 101, _HALF - 1, _HALF, _HALF + 1, CHUNK - 1, CHUNK])
def test_rows_are_those_of_numpy_at_every_width(width: int) -> None:
    for is_dynamic, num_rows in ((False, 1), (False, 3), (True, 2)):
        rows = _drawn(_SEED, 5, num_rows, 3, width, is_dynamic)
        expected = [
            rows_of_z.integers(NoiseSource.PHILOX, _SEED, 5 + row, 3 * CHUNK, width)
            for row in range(num_rows)
        ]
        np.testing.assert_array_equal(rows, expected)


@given(
    seed=st.tuples(_INT64, _INT64),
    first_row=st.one_of(st.integers(0, 20), st.integers(0, 2**63 - 20)),
    num_rows=st.integers(0, 5),
    chunk=st.one_of(st.integers(0, 20), st.integers(0, 2**39)),
)
@settings(max_examples=200, deadline=None)
def test_rows_are_those_of_numpy_for_every_seed_row_and_chunk(
    seed: tuple[int, int], first_row: int, num_rows: int, chunk: int
) -> None:
    array = np.array(seed, np.int64)
    rows = _drawn(array, first_row, num_rows, chunk, 7)
    for row in range(num_rows):
        expected = rows_of_z.integers(NoiseSource.PHILOX, array, first_row + row, chunk * CHUNK, 7)
        np.testing.assert_array_equal(rows[row], expected)


def test_a_row_is_the_same_however_many_are_drawn_at_once() -> None:
    """Bit for bit: blocks draw many rows and single steps one."""
    rows = _drawn(_SEED, 0, 5, 1, 1001)
    for row in range(5):
        for is_dynamic in (False, True):
            single = _drawn(_SEED, row, 1, 1, 1001, is_dynamic)
            np.testing.assert_array_equal(single[0], rows[row])


class _LevelBits:
    """Zeros, which tie, and in the second range of words for ties, numbers that depend on it."""

    def prepare(
        self,
        seed: tf.Tensor,
        first_row: tf.Tensor,
        num_rows: tf.Tensor | int,
        first_index: tf.Tensor,
        count: int,
    ) -> tf.Tensor:
        return first_index

    def integers(
        self,
        prepared: Any,
        seed: tf.Tensor,
        first_row: tf.Tensor,
        row: tf.Tensor | int,
        first_index: tf.Tensor,
        offset: int,
        count: int,
    ) -> tf.Tensor:
        is_level = tf.equal(prepared, 2 * rows_of_z.WORDS_PER_LEVEL + 3 * 3 * CHUNK)
        filler = tf.where(is_level, tf.constant(2**64 - 1, tf.uint64), tf.zeros([], tf.uint64))
        return tf.fill([count], filler)


def test_ties_are_decided_by_further_ranges_of_words() -> None:
    """Column 0 is kept by zeros alone; all ones in the second range choose its alias."""
    rows = _drawn(_SEED, 0, 1, 3, 2, False, _LevelBits)
    columns = np.uint64(2**16 - 1) & discrete_gaussian.table().packed[0]
    alias = int(columns) - 2**15
    expected = alias * (1 + 2**10 + 2**20)
    np.testing.assert_array_equal(rows, [[expected, expected]])


def test_rows_are_independent_standard_normals_across_seeds() -> None:
    """Over rows and chunks; false alarm once in ten million runs."""
    samples = []
    for _ in range(400):
        seed = np.frombuffer(os.urandom(16), np.int64)
        parts = [_drawn(seed, 0, 3, chunk, 5) for chunk in (0, 1)]
        samples.append(np.concatenate(parts, axis=None) * rows_of_z.STEP)
    check_standard_normal(np.array(samples))


def test_coordinates_of_a_row_are_independent_standard_normals() -> None:
    """Halves, rows and chunks against each other; 1e-7 false alarms each."""
    seed = np.frombuffer(os.urandom(16), np.int64)
    rows = np.concatenate([_drawn(seed, 7, 3, chunk, CHUNK) for chunk in (0, 1)])
    rows = rows * rows_of_z.STEP
    check_standard_normal(rows.reshape(-1, 64))
    check_standard_normal(rows.reshape(12, _HALF).T)


def test_no_two_entries_of_z_occur_twice() -> None:
    """Over rows, chunks and seeds: a chance repeat of two neighbours has probability 2^-30."""
    parts = [
        _drawn(np.frombuffer(os.urandom(16), np.int64), first_row, 5, chunk, 1001)
        for first_row in (0, 5, 2**62)
        for chunk in (0, 1, 2**39)
    ]
    rows = np.concatenate(parts)
    pairs = np.stack([rows[:, :-1], rows[:, 1:]], axis=-1).reshape(-1, 2)
    assert len(np.unique(pairs, axis=0)) == len(pairs)
