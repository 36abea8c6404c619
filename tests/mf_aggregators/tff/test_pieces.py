"""Elementwise functions of large tensors, a piece at a time."""

import numpy as np
import pytest
import tensorflow as tf

from mf_aggregators.tff import pieces
from mf_aggregators.tff.pieces import PIECE


def _combined(steps: tf.Tensor, row: tf.Tensor) -> tf.Tensor:
    return tf.cast(steps, tf.float64) / 3.0 + tf.cast(row, tf.float64)


@pytest.mark.parametrize(
    "shape", [(), (0,), (5, 0), (7,), (PIECE,), (PIECE + 1,), (3, PIECE), (5, PIECE // 2 + 3)]
)
def test_pieces_together_are_the_whole(shape: tuple[int, ...]) -> None:
    generator = np.random.default_rng(len(shape))
    steps = tf.constant(generator.integers(-(2**62), 2**62, shape))
    row = tf.constant(generator.integers(-(2**31), 2**31, shape, dtype=np.int32))
    mapped = tf.function(lambda *tensors: pieces.map_pieces(_combined, tf.float64, *tensors))
    result = mapped(steps, row)
    assert result.shape == shape
    # A machine may fuse the product and the sum of one of them.
    np.testing.assert_allclose(result, _combined(steps, row), rtol=1e-15)


def test_no_temporary_has_the_size_of_the_whole() -> None:
    seen: list[int | None] = []

    def function(piece: tf.Tensor) -> tf.Tensor:
        seen.append(piece.shape[0])
        return -piece

    graph = tf.function(lambda tensor: pieces.map_pieces(function, tf.float32, tensor))
    large = tf.ones([40 * PIECE])
    np.testing.assert_array_equal(graph(large), -large)
    assert all(count is None or count <= PIECE for count in seen)
