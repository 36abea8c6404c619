"""Random bits that a graph asks Python for, through files: the client of ``bit_service``."""

from typing import Any

import tensorflow as tf
from tensorflow.python.data.experimental.ops import testing

from mf_aggregators.tff import processes, tensor_files

_MICROSECONDS_BETWEEN_LOOKS = 500
_SECONDS_TO_ANSWER = 600.0


class ExchangedBits:
    """Integers from a bit service that reads requests in a directory of this machine."""

    def __init__(self, directory: str) -> None:
        """Creates the source.

        Args:
          directory: Where the service reads requests.
        """
        self._directory = directory

    def prepare(
        self,
        seed: tf.Tensor,
        first_row: tf.Tensor,
        num_rows: tf.Tensor | int,
        first_index: tf.Tensor,
        count: int,
    ) -> tf.Tensor:
        """Returns the integers of all rows, (num_rows, count) uint64, in one exchange."""

        # Inside a function, operations with effects run in order and are never left out.
        @tf.function(autograph=False)
        def exchanged(request: tf.Tensor, marks: tf.Tensor) -> tf.Tensor:
            path = tf.strings.join([self._directory, "/bits-", _joined(marks, "-")])
            written = tf.io.write_file(path + ".request", request)
            with tf.control_dependencies([written]):
                waited = _wait_while_exists(path + ".request")
            with tf.control_dependencies([waited]):
                # A request that nobody answers must not leave the seed behind.
                emptied = tf.cond(
                    tensor_files.exists(path + ".request"),
                    lambda: _written(path + ".request"),
                    lambda: tf.constant(True),
                )
            with tf.control_dependencies([emptied]):
                is_answered = tensor_files.exists(path + ".bits")
            answered = tf.debugging.assert_equal(
                is_answered,
                True,
                message=processes.refusal(
                    "The process that built this aggregator did not send random bits of the AES "
                    "source: it must be running, on the machine of TFF's worker, with the same "
                    f"noise_directory ({self._directory})."
                ),
            )
            with tf.control_dependencies([answered]):
                contents = tf.io.read_file(path + ".bits")
            with tf.control_dependencies([tf.strings.length(contents)]):
                done = tf.io.write_file(path + ".done", "")
            with tf.control_dependencies([done]):
                return tf.identity(contents)

        rows = tf.cast(num_rows, tf.int64)
        line = tf.stack(
            [seed[0], seed[1], first_row, rows, first_index, tf.constant(count, tf.int64)]
        )
        # Two exchanges at one time need two names.
        unique = tf.random.uniform([2], 0, tf.int64.max, tf.int64)
        marks = tf.concat([tf.stack([first_row, rows, first_index]), unique], axis=0)
        contents = exchanged(tf.strings.join([_joined(line, " "), " end\n"]), marks)
        integers = tf.bitcast(tf.io.decode_raw(contents, tf.int64), tf.uint64)
        return tf.reshape(integers, [num_rows, count])

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
        """Returns integers of one row among those that were prepared."""
        return tf.reshape(prepared[row, offset : offset + count], [count])


def _joined(numbers: tf.Tensor, separator: str) -> tf.Tensor:
    return tf.strings.reduce_join(tf.strings.as_string(numbers), separator=separator)


def _written(path: tf.Tensor) -> tf.Tensor:
    with tf.control_dependencies([tf.io.write_file(path, "")]):
        return tf.constant(True)


def _wait_while_exists(path: tf.Tensor) -> tf.Tensor:
    """Waits until a file is gone or the time is over; returns the seconds that it took."""
    begin = tf.timestamp()

    def is_there(waited: tf.Tensor) -> tf.Tensor:
        # An empty string that depends on the loop: what does not may be computed just once.
        nothing = tf.strings.substr(tf.strings.as_string(waited), 0, 0)
        return (waited < _SECONDS_TO_ANSWER) & tensor_files.exists(path + nothing)

    def wait(waited: tf.Tensor) -> tuple[tf.Tensor]:
        naps = tf.data.Dataset.from_tensors(waited)
        naps = naps.apply(testing.sleep(_MICROSECONDS_BETWEEN_LOOKS))
        slept = naps.reduce(waited, lambda _, done: done)
        with tf.control_dependencies([slept]):
            return (tf.timestamp() - begin,)

    (waited,) = tf.while_loop(is_there, wait, (tf.zeros([], tf.float64),), parallel_iterations=1)
    return waited
