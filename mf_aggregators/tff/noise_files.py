"""Files that TFF's worker reads and writes with TensorFlow's own operations.

A graph cannot rename files, so a file is made whole or not at all by what it says of
itself: it begins with a checksum of its contents and with the number that it is for. A
file that was cut off in the middle, is damaged, is for another number or is missing reads
as "not there", and the caller makes its contents again.

Paths must not have characters with a meaning in patterns (``noise_directory`` refuses them):
TensorFlow's only test of a file's existence would take them as such.

:class:`ReleaseRecord` is kept in such files: what each round's noise was added to, so that it is
added to nothing else. Two sums under one row of noise reveal their difference. A process that goes
on from an older state, after a crash or because somebody restored it, asks for the noise of a round
again: the same clients with the same data give the same sum, and any other sum must not be
released. The record keeps a few numbers of each round's sum, and a round whose numbers
differ fails.

It is a guard against mistakes, and no part of the guarantee, which rests on not making
them: it knows only of rounds in its own directory, takes sums whose numbers differ by a
hundredth of a per cent of the largest for the same, and forgets a round whose file is
damaged (as that of a process that was killed while it wrote). The numbers follow from the
clients' data: they are as secret as the noise rows beside them.
"""

import dataclasses
import functools
import os
import pathlib

import tensorflow as tf

from mf_aggregators.noise.rows_of_z import TILE
from mf_aggregators.tff import processes

# Decimal digits of a checksum or number.
_DIGITS = 20
_CHECKSUMS = 2**62
# Of a round's sum, what the record keeps.
_NUMBERS = 64
# Sums of the same updates in another order differ by far less than this share of the largest
# number, and other clients' sums by more.
_TOLERANCE = 1e-4
# In clip norms: for sums that cancel out.
_SMALLEST_DIFFERENCE = 1e-6
# Weights of coordinates within [0.5, 1.5): multiples of it modulo 1 never repeat.
_GOLDEN_RATIO = (5.0**0.5 - 1.0) / 2.0


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


@dataclasses.dataclass(frozen=True)
class ReleaseRecord:
    """The record of all streams in one directory.

    Attributes:
      directory: Where it is kept.
    """

    directory: str

    @classmethod
    def in_directory(cls, directory: pathlib.Path) -> "ReleaseRecord":
        """Returns the record in a directory of noise, made if it is missing."""
        own = directory / "released"
        own.mkdir(mode=0o700, exist_ok=True)
        return cls(os.fspath(own))

    def check(
        self,
        stream: tf.Tensor,
        i: tf.Tensor,
        sums: list[tf.Tensor],
        unit: tf.Tensor,
        clip_norm: float,
        step: tf.Tensor,
    ) -> list[tf.Tensor]:
        """Returns the sums of a round, if its noise was added to nothing else before.

        Args:
          stream: (2,) int64: the name of the noise stream.
          i: int64 scalar: the round.
          sums: The sums of the clients' clipped updates, before noise, in steps.
          unit: float64 scalar: their step.
          clip_norm: The L2 norm that updates are clipped to.
          step: float64 scalar: that of the row of noise. The same sums beside the same row, but in
            other steps, would reveal the sums.

        Returns:
          The sums. Running the graph fails with InvalidArgumentError if the round was
          recorded with other sums.
        """

        # Inside a function, operations with effects run in order and are never left out.
        @tf.function(autograph=False)
        def checked(
            stream: tf.Tensor,
            i: tf.Tensor,
            unit: tf.Tensor,
            step: tf.Tensor,
            sums: tuple[tf.Tensor, ...],
        ) -> tuple[tf.Tensor, ...]:
            name = tf.strings.reduce_join(tf.strings.as_string(stream), separator="-")
            path = tf.strings.join(
                [self.directory, "/stream-", name, "/round-", tf.strings.as_string(i)]
            )
            numbers = tf.concat([_numbers(sums) * unit, step[tf.newaxis]], axis=0)
            recorded_numbers, is_there = read(path, i, [_NUMBERS + 1], tf.float64)
            before = recorded_numbers[:-1]
            difference = tf.reduce_max(tf.abs(numbers[:-1] - before))
            most = _TOLERANCE * tf.reduce_max(tf.abs(before)) + _SMALLEST_DIFFERENCE * clip_norm
            is_same = tf.debugging.assert_equal(
                tf.logical_not(is_there)
                | ((difference <= most) & tf.equal(recorded_numbers[-1], step)),
                True,
                message=processes.refusal(
                    "The noise of this round was added to other data before, so this aggregate "
                    "is not released: the difference of the two would have no noise. Go on from "
                    "this state with the clients and data of that time, or start a new run from "
                    f"a fresh state (the record is in {self.directory})."
                ),
            )
            with tf.control_dependencies([is_same]):
                is_recorded = tf.identity(is_there)

            def record() -> tf.Tensor:
                with tf.control_dependencies([write(path, i, numbers)]):
                    return tf.constant(True)

            recorded = tf.cond(is_recorded, lambda: tf.constant(True), record)
            with tf.control_dependencies([recorded]):
                return tuple(tf.identity(tensor) for tensor in sums)

        return list(checked(stream, i, unit, step, tuple(sums)))


def _numbers(sums: tuple[tf.Tensor, ...]) -> tf.Tensor:
    """Weighted sums over consecutive shares of each tensor's entries, (_NUMBERS,) float64.

    Gradients often have rows that add up to zero, whatever the data: each coordinate has a
    weight of its own.
    """
    total = tf.zeros([_NUMBERS], tf.float64)
    for tensor in sums:
        flat = tf.reshape(tensor, [-1])
        size = int(flat.shape[0])
        length = -(-size // _NUMBERS)
        if size <= TILE:
            padded = tf.pad(_weighted(flat, 0), [[0, _NUMBERS * length - size]])
            total += tf.reduce_sum(tf.reshape(padded, [_NUMBERS, length]), axis=1)
        else:
            total += tf.map_fn(
                functools.partial(_weighted_sum, flat, length),
                tf.range(_NUMBERS),
                fn_output_signature=tf.float64,
                parallel_iterations=1,
            )
    return total


def _weighted_sum(flat: tf.Tensor, length: int, number: tf.Tensor) -> tf.Tensor:
    """The sum of one share of this length: large tensors have no temporaries of their size."""
    start = number * length
    return tf.reduce_sum(_weighted(flat[start : start + length], start))


def _weighted(values: tf.Tensor, start: tf.Tensor | int) -> tf.Tensor:
    """The float64 products of values with the weights of their coordinates, from the first one."""
    multiples = tf.cast(tf.range(tf.size(values)) + start, tf.float64) * _GOLDEN_RATIO
    return tf.cast(values, tf.float64) * (0.5 + multiples - tf.floor(multiples))
