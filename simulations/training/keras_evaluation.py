"""Evaluations of one Keras model with the weights of many rounds, whose graph is made once."""

import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tensorflow as tf


class KerasEvaluation:
    """A function of weights and examples: the loss and the metrics of a model."""

    def __init__(self, compiled_model: Callable[[], tf.keras.Model]) -> None:
        """Creates it.

        Args:
          compiled_model: Makes the model, compiled with its loss and metrics. It is called at each
            evaluation; the first model is the one that is evaluated.
        """
        self._compiled_model = compiled_model

    @functools.cached_property
    def _model(self) -> tf.keras.Model:
        return self._compiled_model()

    def __call__(
        self,
        weights: Sequence[np.ndarray],
        inputs: np.ndarray,
        targets: np.ndarray,
        batch_size: int = 32,
    ) -> Mapping[str, float]:
        """Returns ``loss`` and the metrics by name.

        Args:
          weights: The model's weights, in the model's order.
          inputs: What the model takes; the first axis is that of the examples.
          targets: What its loss takes, likewise.
          batch_size: Examples of a step; the values do not depend on it, but for rounding.
        """
        model = self._model
        # tff.learning builds models in graphs of its own, where Keras exchanges the classes of the
        # model and of each of its layers for those of TensorFlow 1, until all of them are made
        # outside a graph again. That is quick beside tracing an evaluation.
        self._compiled_model()
        model.set_weights(list(weights))
        values = model.evaluate(inputs, targets, batch_size=batch_size, verbose=0, return_dict=True)
        return {name: float(value) for name, value in values.items()}
