"""Discrete Gaussian noise in TensorFlow: the integers that NumPy computes, bit for bit."""

import os

import numpy as np
import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import tensorflow as tf

from mf_aggregators.noise import discrete_gaussian
from mf_aggregators.tff import tensor_discrete_gaussian
from tests.mf_aggregators.forced_ties import words_that_tie


def _from_words(words: np.ndarray, further: np.ndarray) -> tuple[np.ndarray, int]:
    """Noise from a graph, and how often it drew words for ties."""
    drawn = tf.Variable(0)

    @tf.function
    def graph(words: tf.Tensor, further: tf.Tensor) -> tf.Tensor:
        def tie_words(level: tf.Tensor) -> tf.Tensor:
            drawn.assign_add(1)
            return further[level]

        table = tensor_discrete_gaussian.graph_table()
        return tensor_discrete_gaussian.from_words(table, words, tie_words)

    return graph(tf.constant(words), tf.constant(further)).numpy(), int(drawn.numpy())


def _from_numpy(words: np.ndarray, further: np.ndarray) -> np.ndarray:
    return discrete_gaussian.from_words(words, lambda level: further[level])


@pytest.mark.parametrize("count", [1, 2, 16384])
def test_integers_are_those_of_numpy(count: int) -> None:
    random = np.random.default_rng(count)
    words = random.integers(0, 2**64, (3, count), dtype=np.uint64)
    further = random.integers(0, 2**64, (5, 3, count), dtype=np.uint64)
    found, ties = _from_words(words, further)
    assert found.dtype == np.int64
    assert ties == 0
    expected = _from_numpy(words, further)
    np.testing.assert_array_equal(found, expected)


def test_ties_are_decided_as_in_numpy() -> None:
    words, further = words_that_tie(8, 5000)
    found, ties = _from_words(words, further)
    expected = _from_numpy(words, further)
    np.testing.assert_array_equal(found, expected)
    assert ties == len(further)
    # The words of ties matter.
    other = _from_numpy(words, ~further)
    assert np.any(other != expected)


@pytest.mark.parametrize("row", [0, 1, 2])
def test_a_single_tie_is_found(row: int) -> None:
    """In each of the three draws, among draws that do not tie."""
    random = np.random.default_rng(row)
    words = random.integers(0, 2**64, (3, 100), dtype=np.uint64)
    tying, _ = words_that_tie(row, 200)
    packed = discrete_gaussian.table().packed
    entries = packed[(tying[row] & np.uint64(0xFFFF)).astype(int)]
    ties = np.flatnonzero(entries >> np.uint64(16) == tying[row] >> np.uint64(16))
    aliases = entries & np.uint64(0xFFFF)
    # The tie must matter: another alias, and a threshold that further words are below or above.
    place = next(i for i in ties if aliases[i] != tying[row, i] & np.uint64(0xFFFF))
    words[row, 57] = tying[row, place]
    results = []
    for filler in (0, 2**64 - 1):
        further = np.full((5, 3, 100), filler, np.uint64)
        found, drawn = _from_words(words, further)
        assert drawn >= 1
        np.testing.assert_array_equal(found, _from_numpy(words, further))
        results.append(found)
    assert np.flatnonzero(results[0] != results[1]).tolist() == [57]


def test_largest_noise_is_drawn_from_zeros() -> None:
    found, ties = _from_words(np.zeros((3, 2), np.uint64), np.zeros((5, 3, 2), np.uint64))
    assert found.tolist() == [-discrete_gaussian.LARGEST] * 2
    assert ties >= 3
