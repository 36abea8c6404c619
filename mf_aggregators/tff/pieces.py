"""Elementwise functions of large tensors, a piece at a time: temporaries fit into a cache."""

from collections.abc import Callable

import tensorflow as tf

# Entries of a piece.
PIECE = 1 << 16


def map_pieces(
    function: Callable[..., tf.Tensor], dtype: tf.DType, *tensors: tf.Tensor
) -> tf.Tensor:
    """Returns an elementwise function of tensors of one shape, without temporaries of their size.

    Args:
      function: Takes pieces of the tensors, (count,) each, and returns (count,) entries.
      dtype: The type of what it returns.
      *tensors: Tensors of one shape, which is known.

    Returns:
      A tensor of that shape.
    """
    shape = tensors[0].shape
    flat = [tf.reshape(tensor, [-1]) for tensor in tensors]
    size = shape.num_elements()
    if size <= PIECE:
        return tf.reshape(function(*flat), shape)
    count = -(-size // PIECE)

    def add_piece(number: tf.Tensor, pieces: tf.TensorArray) -> tuple[tf.Tensor, tf.TensorArray]:
        start = number * PIECE
        piece = function(*(tensor[start : start + PIECE] for tensor in flat))
        return number + 1, pieces.write(number, piece)

    _, pieces = tf.while_loop(
        lambda number, _: number < count,
        add_piece,
        (tf.constant(0), tf.TensorArray(dtype, count, infer_shape=False, element_shape=[None])),
        parallel_iterations=1,
    )
    return tf.reshape(pieces.concat(), shape)
