"""Where training begins, and which part of a model is trained.

A run may begin with weights of a file, and may train some weights alone. Those that are not trained
are frozen: they go to the clients with every round as the model's other weights do, and come out as
they were, bit for bit. Updates are those of the trained part, so that clipping, noise and the size
of a model count nothing else.
"""

import collections
import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from simulations.training import weights_files
from simulations.training.federated_task import FederatedTask

# The most names of weights in a message.
_NAMED = 12


def weight_names(model_fn: Callable[[], tff.learning.models.VariableModel]) -> tuple[str, ...]:
    """Returns the names of a model's trainable weights, in its order, as ``layer/weight``.

    They are those of the first model of a program: Keras goes on counting layers after it.

    Args:
      model_fn: What ``tff.learning`` builds its model from.
    """
    with tf.Graph().as_default():
        variables = model_fn().trainable_variables
    return tuple(variable.name.partition(":")[0] for variable in variables)


def beginning_with(
    task: FederatedTask, path: str | os.PathLike[str], sha256: str | None
) -> FederatedTask:
    """Returns a task that begins training with the weights of a file.

    Args:
      task: The task; one with ``keras_model`` reads the files of Keras.
      path: As ``weights_files.find`` takes it.
      sha256: Of the file that the run began with; None for any.

    Raises:
      ValueError: If the file cannot be read, is of another model, or is another one by now.
    """
    file = weights_files.find(path)
    names: tuple[str, ...] | None = None
    if file.suffix in weights_files.KERAS_SUFFIXES:
        weights = _of_keras(task, os.fspath(file))
    else:
        names, weights = weights_files.load(file)
    if sha256 is not None and weights_files.sha256(file) != sha256:
        raise ValueError(f"{file} is not what this run began with: restore it, or start a new run.")
    of_task = weight_names(task.model_fn)
    if len(weights) != len(of_task):
        raise ValueError(
            f"{file} is of another model: it has {len(weights)} weights, and the task's has "
            f"{len(of_task)}."
        )
    found = []
    for number, (name, weight, initial) in enumerate(
        zip(of_task, weights, task.initial_weights, strict=True)
    ):
        if names is not None and names[number] != name:
            raise ValueError(
                f"{file} is of another model: its weight {number + 1} is {names[number]}, and the "
                f"task's is {name}."
            )
        if weight.shape != initial.shape or weight.dtype.kind != "f":
            raise ValueError(
                f"{file} is of another model: for {name} it has {weight.dtype} of shape "
                f"{weight.shape}, and not {initial.dtype} of shape {initial.shape}."
            )
        if not np.all(np.isfinite(weight)):
            raise ValueError(f"{file} has NaN or infinite numbers in {name}.")
        found.append(weight.astype(initial.dtype))
    return dataclasses.replace(task, initial_weights=tuple(found))


def _of_keras(task: FederatedTask, file: str) -> list[np.ndarray]:
    """The trainable weights of a Keras file, read by the task's own model: no code of it is run."""
    if task.keras_model is None:
        raise ValueError(
            f"{file} is a file of Keras, and this task does not say which Keras model it has "
            "(FederatedTask.keras_model): give the directory of a run."
        )
    model = task.keras_model()
    try:
        model.load_weights(file)
    except Exception as error:
        # Keras and HDF5 raise errors of many kinds on files of other models.
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{file} cannot be read as weights of this model: {reason}") from None
    return [weight.numpy() for weight in model.trainable_weights]


def training_only(task: FederatedTask, layers: Sequence[str]) -> FederatedTask:
    """Returns a task of which some layers or weights are trained, and the others are frozen.

    Args:
      task: The task, all of whose weights are trained.
      layers: Names of weights, or what they begin with up to a slash: ``lstm`` is
        ``lstm/lstm_cell/kernel`` and its like, and not ``lstm_2``.

    Raises:
      ValueError: If a name is of no weight.
    """
    names = weight_names(task.model_fn)
    for layer in layers:
        if not any(_is_of(name, layer) for name in names):
            more = "" if len(names) <= _NAMED else f" and {len(names) - _NAMED} more"
            raise ValueError(
                f"the model has no weight or layer {layer!r}: its weights are "
                f"{', '.join(names[:_NAMED])}{more}."
            )
    trained = tuple(
        number for number, name in enumerate(names) if any(_is_of(name, layer) for layer in layers)
    )
    frozen = {
        number: weight
        for number, weight in enumerate(task.initial_weights)
        if number not in trained
    }
    part = dataclasses.replace(
        task,
        model_fn=functools.partial(_PartTrained, task.model_fn, trained),
        initial_weights=tuple(task.initial_weights[number] for number in trained),
        frozen_weights=frozen,
        keras_model=None,
    )

    def evaluate(weights: Sequence[np.ndarray], split: str) -> Mapping[str, float]:
        return task.evaluate(part.all_weights(weights), split)

    return dataclasses.replace(part, evaluate=evaluate)


def _is_of(name: str, layer: str) -> bool:
    return name == layer or name.startswith(f"{layer}/")


class _PartTrained(tff.learning.models.VariableModel):
    """A model of which some of the trainable variables are trained, and the others are not."""

    def __init__(
        self,
        model_fn: Callable[[], tff.learning.models.VariableModel],
        trained: Sequence[int],
    ) -> None:
        self._model = model_fn()
        self._trained = frozenset(trained)

    def _variables(self, are_trained: bool) -> list[tf.Variable]:
        return [
            variable
            for number, variable in enumerate(self._model.trainable_variables)
            if (number in self._trained) == are_trained
        ]

    @property
    def trainable_variables(self) -> list[tf.Variable]:
        """Those that are trained."""
        return self._variables(are_trained=True)

    @property
    def non_trainable_variables(self) -> list[tf.Variable]:
        """Those that are frozen, and those that the model itself does not train."""
        return [*self._variables(are_trained=False), *self._model.non_trainable_variables]

    @property
    def local_variables(self) -> Sequence[tf.Variable]:
        """The variables of metrics."""
        return self._model.local_variables

    @property
    def input_spec(self) -> Any:
        """The type of the model's input."""
        return self._model.input_spec

    def predict_on_batch(self, batch_input: Any, training: bool = True) -> Any:
        """Predicts as the model does."""
        return self._model.predict_on_batch(batch_input, training)

    def forward_pass(
        self, batch_input: Any, training: bool = True
    ) -> tff.learning.models.BatchOutput:
        """Returns the loss, as the model does."""
        return self._model.forward_pass(batch_input, training)

    def report_local_unfinalized_metrics(self) -> collections.OrderedDict[str, Any]:
        """Returns the model's metrics."""
        return self._model.report_local_unfinalized_metrics()

    def metric_finalizers(self) -> collections.OrderedDict[str, Any]:
        """Returns the finalizers of the metrics."""
        return self._model.metric_finalizers()

    def reset_metrics(self) -> None:
        """Sets the metrics back."""
        self._model.reset_metrics()
