"""The interface of a task of federated runs: clients, model and evaluation.

A new task is one module that makes a :class:`FederatedTask`, and one command that hands a
:class:`TaskCommand` to ``federated_runs``. Everything else (mechanisms, timers, devices,
checkpoints, metrics, statements) is the same for all tasks.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from absl import flags

HELDOUT, TEST = "heldout", "test"


def sha256_of(arrays: Iterable[np.ndarray]) -> str:
    """Returns the SHA-256 of arrays, in hexadecimal digits: of their dtypes, shapes and numbers."""
    digest = hashlib.sha256()
    for array in arrays:
        # Shape and type too, so that no number can move from one array to the next unseen.
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


@dataclasses.dataclass(frozen=True, eq=False)
class FederatedTask:
    """Clients and model of a run, once TensorFlow is loaded.

    Attributes:
      client_ids: The population: texts, each another one.
      client_dataset: Takes a client's id and a round, from 0, and returns its
        ``tf.data.Dataset`` of batches in that round; a function of the two alone.
      model_fn: What ``tff.learning`` builds its model from.
      initial_weights: The weights that are trained, as training begins with them.
      evaluate: Takes the weights that are trained, and :data:`HELDOUT` or :data:`TEST`, and
        returns the model's ``loss`` and ``accuracy`` on that split.
      accuracy: The name of the metric of ``model_fn`` that is the accuracy in training.
      facts: What the result of a run says besides, by name: baselines, for example.
    """

    client_ids: tuple[str, ...]
    client_dataset: Callable[[str, int], Any]
    model_fn: Callable[[], Any]
    initial_weights: tuple[np.ndarray, ...]
    evaluate: Callable[[Sequence[np.ndarray], str], Mapping[str, float]]
    accuracy: str
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def num_parameters(self) -> int:
        """The number of parameters that are trained."""
        return sum(int(weight.size) for weight in self.initial_weights)


class TaskData(Protocol):
    """A task's data before TensorFlow is loaded: what a run is planned and checked with."""

    @property
    def name(self) -> str:
        """The data set, for messages: a file, where it is one."""

    @property
    def num_clients(self) -> int:
        """The training clients."""

    def fingerprint(self) -> str:
        """Returns a fingerprint of the data set."""

    def load(self, seed: int) -> FederatedTask:
        """Returns the task.

        Args:
          seed: Seed for the initial weights and for what clients sample of their data.
        """


@dataclasses.dataclass(frozen=True)
class TaskCommand:
    """A command that runs one task.

    Attributes:
      name: The command.
      description: What ``--help`` says first.
      define_flags: Defines the flags of the task alone.
      defaults: Takes the flags as given and returns the defaults of this run, by flag;
        ``max_bands``, which is no flag, is the most bands that a mechanism gets without
        ``--num_bands``.
      default_texts: What ``--help`` says of the defaults, by flag.
      check_flags: Checks the task's own flags, defaults filled in; raises ValueError.
      open_data: Takes all flags, defaults filled in, and returns the data.
      outcome_lines: Takes the task's facts and returns lines of the result that a person reads.
    """

    name: str
    description: str
    define_flags: Callable[[flags.FlagValues], None]
    defaults: Callable[[flags.FlagValues], Mapping[str, Any]]
    default_texts: Mapping[str, str]
    check_flags: Callable[[Mapping[str, Any]], None]
    open_data: Callable[[Mapping[str, Any]], TaskData]
    outcome_lines: Callable[[Mapping[str, Any]], Sequence[tuple[str, str]]]


def default_texts(
    defaults: Mapping[str, Any],
    others: Mapping[str, Any],
    condition: str,
    text: Callable[[Any], str] = str,
) -> dict[str, str]:
    """Returns the help on each default, by flag, and on other defaults under a condition."""
    texts = {}
    for name, default in defaults.items():
        other = f"; {text(others[name])} with {condition}" if others[name] != default else ""
        texts[name] = f"Default: {text(default)}{other}."
    # This is no flag: it bounds the default of --num_bands.
    texts.pop("max_bands", None)
    return texts
