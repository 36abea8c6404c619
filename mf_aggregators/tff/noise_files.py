"""Files that TFF's worker reads and writes with TensorFlow's own operations.

A graph cannot rename files, so a file is made whole or not at all by what it says of
itself: it begins with a checksum of its contents and with the number that it is for. A
file that was cut off in the middle, is damaged, is for another number or is missing reads
as "not there", and the caller makes its contents again.

Paths must not have characters with a meaning in patterns (``noise_directory`` refuses them):
TensorFlow's only test of a file's existence would take them as such.
"""

import tensorflow as tf

# Decimal digits of a checksum or number.
_DIGITS = 20
_CHECKSUMS = 2**62


def exists(path: tf.Tensor) -> tf.Tensor:
    """Returns whether a file of this path exists, as a scalar bool tensor."""
    return tf.size(tf.io.matching_files(path)) > 0


def read_contents(path: tf.Tensor) -> tf.Tensor:
    """Returns a file's contents; an empty string if there is no file."""
    return tf.cond(exists(path), lambda: tf.io.read_file(path), lambda: tf.constant(""))


def write(path: tf.Tensor, number: tf.Tensor, tensor: tf.Tensor) -> tf.Operation:
    """Writes a tensor to a file.

    Args:
      path: Scalar string.
      number: int64 scalar that :func:`read` has to be called with.
      tensor: What to write.

    Returns:
      The operation.
    """
    body = tf.io.serialize_tensor(tensor)
    return tf.io.write_file(path, tf.strings.join([_header(number, body), body]))


def read(
    path: tf.Tensor, number: tf.Tensor, shape: list[int], dtype: tf.DType
) -> tuple[tf.Tensor, tf.Tensor]:
    """Reads a tensor that :func:`write` wrote for the same path and number.

    Args:
      path: Scalar string.
      number: int64 scalar.
      shape: The shape of the tensor.
      dtype: The type of its entries.

    Returns:
      The tensor, and whether it is there; zeros if it is not.
    """
    contents = read_contents(path)
    # As operations clip at a string's end, anything shorter just has another header.
    is_long_enough = tf.strings.length(contents) > 2 * _DIGITS
    contents = tf.where(is_long_enough, contents, " " * 2 * _DIGITS)
    body = tf.strings.substr(contents, 2 * _DIGITS, tf.strings.length(contents) - 2 * _DIGITS)
    is_there = is_long_enough & tf.equal(
        tf.strings.substr(contents, 0, 2 * _DIGITS), _header(number, body)
    )
    tensor = tf.cond(
        is_there,
        lambda: tf.ensure_shape(tf.io.parse_tensor(body, dtype), shape),
        lambda: tf.zeros(shape, dtype),
    )
    return tensor, is_there


def checksum(contents: tf.Tensor) -> tf.Tensor:
    """Returns a number, int64, that changes with the contents, a scalar string."""
    return tf.strings.to_hash_bucket_fast(contents, _CHECKSUMS)


def checksum_of(contents: bytes) -> int:
    """Returns :func:`checksum` of bytes in Python."""
    # Where a graph is built, this must not become a part of it.
    with tf.init_scope():
        return int(checksum(tf.constant(contents)).numpy())


def _header(number: tf.Tensor, body: tf.Tensor) -> tf.Tensor:
    return tf.strings.join(
        [tf.strings.as_string(value, width=_DIGITS, fill="0") for value in (checksum(body), number)]
    )
