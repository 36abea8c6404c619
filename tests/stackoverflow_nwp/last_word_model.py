"""Next words that follow from the last word alone: TensorFlow traces an LSTM for long.

As a program, this is run-stackoverflow with that model.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock


def _keras_model(task: Any) -> Any:
    import tensorflow as tf

    size = task.vocab_size + task.special_tokens.get_number_of_special_tokens()
    inputs = tf.keras.Input((None,))
    return tf.keras.Model(inputs, tf.keras.layers.Embedding(size, size)(inputs))


@contextlib.contextmanager
def in_place_of_the_lstm() -> Iterator[None]:
    """Lets runs of this process train it."""
    with mock.patch("stackoverflow_nwp.task.NextWordTask.keras_model", _keras_model):
        yield


if __name__ == "__main__":
    from stackoverflow_nwp import run_stackoverflow

    with in_place_of_the_lstm():
        run_stackoverflow.run()
