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

from mf_aggregators.kernel import draws
from mf_aggregators.kernel.draws import TILE
from mf_aggregators.tff import tensor_rows
from tests.examples import examples
from tests.mf_aggregators.statistics_of_noise import check_standard_normal

_HALF = TILE // 2
_SEED = np.array([2**62 + 12345, -(2**61) - 999], np.int64)
_INT64 = st.one_of(
    st.integers(-(2**63), 2**63 - 1), st.sampled_from([0, 1, -1, 2**63 - 1, -(2**63)])
)


@functools.cache
def _drawer(width: int, num_rows: int | None) -> Callable[..., tf.Tensor]:
    """A graph of :func:`tile_rows`; ``num_rows`` is None for a number that is a tensor."""

    def draw(seed: tf.Tensor, first_row: tf.Tensor, tile: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
        return tensor_rows.tile_rows(
            seed,
            first_row,
            rows if num_rows is None else num_rows,
            tile,
            width,
            tensor_rows.graph_table(),
        )

    return tf.function(draw, autograph=False)


@pytest.fixture(scope="module", autouse=True)
def _graphs() -> Iterator[None]:
    """Lets graphs go while Python is still whole: later, TensorFlow complains."""
    yield
    _drawer.cache_clear()


def _drawn(
    seed: np.ndarray,
    first_row: int,
    num_rows: int,
    tile: int,
    width: int,
    is_dynamic: bool = True,
) -> np.ndarray:
    draw = _drawer(width, None if is_dynamic else num_rows)
    rows = draw(
        tf.constant(seed, tf.int64),
        tf.constant(first_row, tf.int64),
        tf.constant(tile, tf.int64),
        tf.constant(num_rows, tf.int32),
    ).numpy()
    assert (rows.shape, rows.dtype) == ((num_rows, width), np.int64)
    return np.asarray(rows)


@pytest.mark.parametrize(
    "width", [17, TILE, *(pytest.param(each, marks=pytest.mark.long) for each in (1, TILE - 1))]
)
def test_rows_are_those_of_numpy_at_every_width(width: int) -> None:
    for is_dynamic, num_rows in ((False, 1), (True, 2)):
        rows = _drawn(_SEED, 5, num_rows, 3, width, is_dynamic)
        expected = [draws.integers(_SEED, 5 + row, 3 * TILE, width) for row in range(num_rows)]
        np.testing.assert_array_equal(rows, expected)


@given(
    seed=st.tuples(_INT64, _INT64),
    first_row=st.one_of(st.integers(0, 20), st.integers(0, 2**63 - 20)),
    num_rows=st.integers(0, 5),
    tile=st.one_of(st.integers(0, 20), st.integers(0, 2**39)),
)
@settings(max_examples=examples(60), deadline=None)
def test_rows_are_those_of_numpy_for_every_seed_row_and_tile(
    seed: tuple[int, int], first_row: int, num_rows: int, tile: int
) -> None:
    array = np.array(seed, np.int64)
    rows = _drawn(array, first_row, num_rows, tile, 7)
    for row in range(num_rows):
        expected = draws.integers(array, first_row + row, tile * TILE, 7)
        np.testing.assert_array_equal(rows[row], expected)


@pytest.mark.parametrize("width", [5, 200])
def test_ties_have_the_words_that_numpy_gives_them(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where everything ties: 15 ties, more than are prepared for, and 600."""
    packed, original = draws.table().packed, draws._random_blocks
    # A column that is not its own alias, so that the words of ties matter.
    column = next(i for i in range(2**15, 2**16) if int(packed[i]) & 0xFFFF != i)
    tying = (int(packed[column]) & 0xFFFF0000) | column

    def tying_blocks(seed: np.ndarray, row: int, block: int, count: int) -> np.ndarray:
        if block < draws.FIRST_TIE_BLOCK:
            return np.full((count, 16), tying, np.uint32)
        return original(seed, row, block, count)

    graph_blocks = tensor_rows.chacha20

    def tying_graph(seed: tf.Tensor, row: tf.Tensor, *ranges: Any) -> list[tf.Tensor]:
        drawn = graph_blocks(seed, row, *ranges)
        first = [tf.fill(tf.shape(drawn[0]), tf.constant(tying, tf.uint32))]
        return [*first, *drawn[1:]] if len(drawn) > 1 else drawn

    monkeypatch.setattr(draws, "_random_blocks", tying_blocks)
    monkeypatch.setattr(tensor_rows, "chacha20", tying_graph)
    _drawer.cache_clear()
    rows = _drawn(_SEED, 4, 2, 3, width)
    _drawer.cache_clear()
    expected = [draws.integers(_SEED, 4 + row, 3 * TILE, width) for row in range(2)]
    np.testing.assert_array_equal(rows, expected)
    assert len(np.unique(rows)) > 2


def test_coordinates_of_a_row_are_independent_standard_normals() -> None:
    """Halves, rows and tiles against each other; 1e-7 false alarms each."""
    seed = np.frombuffer(os.urandom(16), np.int64)
    rows = np.concatenate([_drawn(seed, 7, 3, tile, TILE) for tile in (0, 1)])
    rows = rows * draws.STEP
    check_standard_normal(rows.reshape(-1, 64))
    check_standard_normal(rows.reshape(12, _HALF).T)
