"""The interface of a task of federated runs (clients, model and evaluation), and tasks of images.

A new task is one module that makes a :class:`FederatedTask`, and one command that hands a
:class:`TaskCommand` to ``run_command``. Everything else (mechanisms, timers, devices,
checkpoints, metrics, statements) is the same for all tasks. Tasks of labelled images share
:class:`ImageData` as well: each has its images, its model and its defaults alone. TensorFlow is
imported by :func:`image_task` and nowhere else.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
from absl import flags

from mf_aggregators import inputs

HELDOUT, TEST = "heldout", "test"
ACCURACY = "accuracy"
_Option = TypeVar("_Option")


def sha256_of(arrays: Iterable[np.ndarray]) -> str:
    """Returns one SHA-256 of the dtypes, shapes and numbers of arrays, in hexadecimal digits."""
    digest = hashlib.sha256()
    for array in arrays:
        # Shape and dtype are hashed too, so that moving a number to the next array changes the
        # digest.
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


@dataclasses.dataclass(frozen=True, eq=False)
class FederatedTask:
    """Interface of a task in TensorFlow, with its clients, model and evaluation.

    Attributes:
      client_ids: The ids of all clients, as distinct texts.
      client_dataset: Takes a client's id and a round, from 0, and returns the client's
        ``tf.data.Dataset`` of batches in that round, which depends on these two alone.
      model_fn: A function without arguments from which ``tff.learning`` builds its model.
      initial_weights: The weights that are trained, as training begins with them.
      evaluate: Takes the weights that are trained, and :data:`HELDOUT` or :data:`TEST`, and
        returns the model's ``loss`` and ``accuracy`` on that split.
      accuracy: The name of the metric of ``model_fn`` that is the accuracy in training.
      facts: Further facts for the result of a run, by name: baselines, for example.
    """

    client_ids: tuple[str, ...]
    client_dataset: Callable[[str, int], Any]
    model_fn: Callable[[], Any]
    initial_weights: tuple[np.ndarray, ...]
    evaluate: Callable[[Sequence[np.ndarray], str], Mapping[str, float]]
    accuracy: str
    facts: Mapping[str, object] = dataclasses.field(default_factory=dict)

    @property
    def num_parameters(self) -> int:
        """The number of parameters that are trained."""
        return sum(int(weight.size) for weight in self.initial_weights)


class TaskData(Protocol):
    """Interface of a task's data without TensorFlow, with which a run is planned and checked."""

    @property
    def name(self) -> str:
        """The name of the data set for messages, or its file."""

    @property
    def num_clients(self) -> int:
        """The number of training clients."""

    def fingerprint(self) -> str:
        """Returns a fingerprint of the data set, which differs if any data differ."""

    def load(self, seed: int) -> FederatedTask:
        """Loads TensorFlow and returns the task on these data.

        Args:
          seed: Seed for the initial weights and for what clients sample of their data.
        """


@dataclasses.dataclass(frozen=True)
class TaskCommand:
    """Definition of a training command: its task's name, flags, defaults and data.

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
    defaults: Callable[[flags.FlagValues], Mapping[str, object]]
    default_texts: Mapping[str, str]
    check_flags: Callable[[Mapping[str, object]], None]
    open_data: Callable[[Mapping[str, object]], TaskData]
    outcome_lines: Callable[[Mapping[str, object]], Sequence[tuple[str, str]]]


def option(options: Mapping[str, object], kind: type[_Option], name: str) -> _Option | None:
    """Returns the value of an option, after a check of its type; None if it is not given.

    Raises:
      TypeError: If it has another type.
    """
    return None if options[name] is None else inputs.part(options[name], kind)


def integers(options: Mapping[str, object], *names: str) -> tuple[int, ...]:
    """Returns the values of options that are integers; raises TypeError if one is not."""
    return tuple(inputs.part(options[name], int) for name in names)


def default_texts(
    defaults: Mapping[str, object],
    others: Mapping[str, object],
    condition: str,
    text: Callable[[object], str] = str,
) -> dict[str, str]:
    """Returns help texts on flags' defaults, and on other defaults under a condition."""
    texts = {}
    for name, default in defaults.items():
        other = f"; {text(others[name])} with {condition}" if others[name] != default else ""
        texts[name] = f"Default: {text(default)}{other}."
    # max_bands is not a flag: it bounds the default of --num_bands.
    texts.pop("max_bands", None)
    return texts


@dataclasses.dataclass(frozen=True, eq=False)
class Images:
    """Labelled images: an array of pixels and an array of class labels.

    Attributes:
      pixels: (m, ...) array, images of one shape.
      labels: (m,) array of integers, the classes from 0.
    """

    pixels: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, chosen: slice | np.ndarray) -> "Images":
        """Returns the images at a slice or at given places."""
        return Images(self.pixels[chosen], self.labels[chosen])

    def fingerprint(self) -> str:
        """Returns the SHA-256 of pixels and labels, in hexadecimal digits."""
        return sha256_of((self.pixels, self.labels))


def concatenated(parts: Sequence[Images]) -> Images:
    """Returns the images of several parts (at least one) joined into one Images."""
    return Images(
        np.concatenate([part.pixels for part in parts]),
        np.concatenate([part.labels for part in parts]),
    )


@dataclasses.dataclass(frozen=True, eq=False)
class ClientImages:
    """Training images divided among clients, and the held-out and test images of a task.

    Attributes:
      train: The training images.
      places: The places of each client's images in ``train``, by the client's name.
      heldout: The images that are evaluated as the model is trained.
      test: The images that the final model is evaluated on.
    """

    train: Images
    places: Mapping[str, np.ndarray]
    heldout: Images
    test: Images

    def of(self, client: str) -> Images:
        """Returns the training images of a client."""
        return self.train[self.places[client]]


@dataclasses.dataclass(frozen=True)
class ImageData:
    """Data of a run on labelled images, read when needed; see :class:`TaskData`.

    Attributes:
      name: The data set.
      read: Returns the images of clients.
      keras_model: Makes the untrained model, from pixels to logits; see :func:`image_task`.
      options: The flags of the run, by name.
      known_clients: The number of clients, if it is known before images are read.
    """

    name: str
    read: Callable[[], ClientImages]
    keras_model: Callable[[], Any]
    options: Mapping[str, object]
    known_clients: int | None = None

    @functools.cached_property
    def images(self) -> ClientImages:
        """The images of all clients, read once."""
        return self.read()

    @property
    def num_clients(self) -> int:
        """The number of training clients."""
        return len(self.images.places) if self.known_clients is None else self.known_clients

    def fingerprint(self) -> str:
        """Returns the SHA-256 of all images and of their division among clients."""
        images = self.images
        every = concatenated([images.train, images.heldout, images.test])
        digest = hashlib.sha256(every.fingerprint().encode())
        for places in images.places.values():
            digest.update(np.asarray([len(places), *places], "<i8").tobytes())
        return digest.hexdigest()

    def load(self, seed: int) -> FederatedTask:
        """Loads TensorFlow and returns the task on these data.

        Args:
          seed: Seed for the initial weights and the order of a client's images in a round.
        """
        batch_size, epochs = integers(self.options, "batch_size", "client_epochs")
        return image_task(self.images, self.keras_model, batch_size, epochs, seed)


def as_input(pixels: np.ndarray) -> np.ndarray:
    """Returns pixels as float32 input of a model, with uint8 pixels scaled to [-1, 1]."""
    if pixels.dtype != np.uint8:
        return pixels
    return (pixels.astype(np.float32) - 127.5) / np.float32(127.5)


def image_task(
    images: ClientImages, keras_model: Callable[[], Any], batch_size: int, epochs: int, seed: int
) -> FederatedTask:
    """Returns the task of training an image classifier; imports TensorFlow.

    Args:
      images: The images and their division among clients.
      keras_model: Makes the untrained model, from pixels as :func:`as_input` returns them to
        logits; its weights are all trainable.
      batch_size: The number of images in a local step.
      epochs: How often a client goes through its images.
      seed: Seed for the initial weights and the order of a client's images in a round.
    """
    import tensorflow as tf
    import tensorflow_federated as tff

    from simulations.training.training_parts import batches, keras_evaluation, sample_order

    def trained_by() -> dict[str, object]:
        return {
            "loss": tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            "metrics": [tf.keras.metrics.SparseCategoricalAccuracy(name=ACCURACY)],
        }

    def client_dataset(client_id: str, round_index: int) -> Any:
        own = images.of(client_id)
        chosen = own[sample_order(seed, round_index, client_id, len(own))]
        slices = (as_input(chosen.pixels), chosen.labels)
        return batches(tf.data.Dataset.from_tensor_slices(slices), batch_size, epochs)

    def model_fn() -> Any:
        model = keras_model()
        input_spec = (
            tf.TensorSpec(model.input_shape, tf.float32),
            tf.TensorSpec((None,), tf.int32),
        )
        return tff.learning.models.from_keras_model(model, input_spec=input_spec, **trained_by())

    def compiled() -> Any:
        model = keras_model()
        model.compile(**trained_by())
        return model

    tf.keras.utils.set_random_seed(seed % 2**32)
    evaluation = keras_evaluation(compiled)
    splits = {
        split: (as_input(own.pixels), own.labels)
        for split, own in ((HELDOUT, images.heldout), (TEST, images.test))
    }
    most_frequent = int(np.argmax(np.bincount(images.train.labels)))
    return FederatedTask(
        client_ids=tuple(images.places),
        client_dataset=client_dataset,
        model_fn=model_fn,
        initial_weights=tuple(keras_model().get_weights()),
        evaluate=lambda weights, split: evaluation(weights, *splits[split]),
        accuracy=ACCURACY,
        facts={
            "num_examples": len(images.train),
            "most_frequent_class": most_frequent,
            "most_frequent_class_accuracy": float(np.mean(images.test.labels == most_frequent)),
            "num_heldout": len(images.heldout),
        },
    )


def outcome_lines(facts: Mapping[str, object]) -> list[tuple[str, str]]:
    """Returns lines about the images for a run's result, from the facts of :func:`image_task`."""
    return [
        ("training images", f"{facts['num_examples']:,}"),
        (
            f"always {facts['most_frequent_class']}",
            f"{100 * inputs.part(facts['most_frequent_class_accuracy'], float):.2f} %",
        ),
    ]
