"""Discrete Gaussian noise in a graph: the integers of NumPy, bit for bit."""

import os

import numpy as np
import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import tensorflow as tf

from mf_aggregators.kernel import draws
from mf_aggregators.tff import tensor_rows
from tests.mf_aggregators.forced_ties import words_that_tie


def _from_words(words: np.ndarray, further: np.ndarray) -> tuple[np.ndarray, int]:
    """Noise from a graph, and how often it drew words for ties."""
    drawn = tf.Variable(0)

    @tf.function(autograph=False)
    def graph(words: tf.Tensor, further: tf.Tensor) -> tf.Tensor:
        def tie_words(ties: tf.Tensor) -> tf.Tensor:
            drawn.assign_add(1)
            return further[:ties]

        table = tensor_rows.graph_table()
        return tensor_rows.from_words(table, tf.transpose(words), tie_words)

    return graph(tf.constant(words), tf.constant(further)).numpy(), int(drawn.numpy())


def _in_numpy(words: np.ndarray, further: np.ndarray) -> np.ndarray:
    return draws.from_words(words, lambda ties: further[:ties])


@pytest.mark.parametrize("count", [1, 2, 16384])
def test_integers_are_those_of_numpy(count: int) -> None:
    random = np.random.default_rng(count)
    words = random.integers(0, 2**32, (count, 3), dtype=np.uint32)
    further = random.integers(0, 2**32, (50, 9), dtype=np.uint32)
    found, calls = _from_words(words, further)
    assert found.dtype == np.int64
    np.testing.assert_array_equal(found, _in_numpy(words, further))
    # Words are drawn only where something ties: once in 2^16 words.
    assert calls <= 1 if count > 100 else calls == 0


def test_ties_are_decided_as_in_numpy() -> None:
    words, further = words_that_tie(8, 5000)
    found, calls = _from_words(words, further)
    assert calls == 1
    np.testing.assert_array_equal(found, _in_numpy(words, further))
    # The words of ties matter.
    assert np.any(found != _in_numpy(words, ~further))


@pytest.mark.parametrize("row", [0, 1, 2])
def test_a_single_tie_is_found(row: int) -> None:
    """In each of the three draws, among draws that do not tie."""
    table = draws.table()
    # Columns without a threshold of zero, which words of zeros in their fraction are below.
    columns = np.flatnonzero(table.packed >> np.uint32(16) > 0)[:300].astype(np.uint32)
    words = columns.reshape(100, 3)
    column = next(c for c in columns.tolist() if int(table.packed[c]) & 0xFFFF != c)
    words[57, row] = int(table.packed[column]) & 0xFFFF0000 | column
    results = []
    for filler in (0, 2**32 - 1):
        further = np.full((1, 9), filler, np.uint32)
        found, calls = _from_words(words, further)
        assert calls == 1
        expected = _in_numpy(words, further)
        np.testing.assert_array_equal(found, expected)
        results.append(found)
    assert np.flatnonzero(results[0] != results[1]).tolist() == [57]


def test_largest_noise_is_drawn_from_zeros() -> None:
    found, calls = _from_words(np.zeros((2, 3), np.uint32), np.zeros((6, 9), np.uint32))
    assert found.tolist() == [-draws.LARGEST] * 2
    assert calls == 1
