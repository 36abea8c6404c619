"""Labelled images as the clients of a run, without TensorFlow unless Keras downloads them.

A task of images has the reading of its files, its model and its defaults in a file of its own. The
data of a run and the command are the same for all of them.
"""

import dataclasses
import functools
import hashlib
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from absl import flags

from mf_aggregators.commands import command_line
from mf_aggregators.commands.command_line import FlagGroup
from mf_aggregators.kernel import numbers
from simulations import flag_fields
from simulations.training.federated_task import (
    HELDOUT,
    TEST,
    FederatedTask,
    TaskCommand,
    default_texts,
    sha256_of,
)

ACCURACY = "accuracy"
# Hsu et al. call such clients moderately different.
_DEFAULT_CONCENTRATION = 1.0
# A client's share of each class is a float64: smaller ones give nothing but zeros.
_SMALLEST_CONCENTRATION = 1e-3
_LARGEST_CONCENTRATION = 1e6
# Seeds are 64 bits wide.
_LARGEST_SEED = 2**63 - 1
# The share of the test images that is evaluated as a model is trained; no others are seen before
# training has ended. The papers have no such split, and train with all training images.
_HELDOUT_SHARE = 0.2


# The defaults of every task of images. The server's rate falls at the end.
COMMON_DEFAULTS: Mapping[str, Any] = {
    "client_optimizer": "sgd",
    "server_warmup": 0.0,
    "target_epsilon": 8.0,
    "max_bands": 64,
}
# The defaults of clients that have one image each: one step.
OF_SINGLE_IMAGES: Mapping[str, Any] = {"batch_size": 1, "client_epochs": 1}


@dataclasses.dataclass(frozen=True, eq=False)
class Images:
    """Labelled images.

    Attributes:
      pixels: (m, ...) array, images of one shape.
      labels: (m,) array of integers, the classes from 0.
    """

    pixels: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, chosen: slice | np.ndarray) -> "Images":
        """Returns some of the images, by a slice or by their places."""
        return Images(self.pixels[chosen], self.labels[chosen])

    def fingerprint(self) -> str:
        """Returns the SHA-256 of pixels and labels, in hexadecimal digits."""
        return sha256_of((self.pixels, self.labels))


def concatenated(parts: Sequence[Images]) -> Images:
    """Returns all images of the parts, at least one, as one."""
    return Images(
        np.concatenate([part.pixels for part in parts]),
        np.concatenate([part.labels for part in parts]),
    )


@dataclasses.dataclass(frozen=True, eq=False)
class ClientImages:
    """The images of a task, and the client of each.

    Attributes:
      train: The training images.
      places: The places of each client's images among them, by the client's name.
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
    """The data of a run on labelled images; see ``federated_task.TaskData``.

    Attributes:
      name: The data set.
      read: Returns the images of clients.
      keras_model: Makes the untrained model, from pixels to logits; see ``image_task``.
      options: The flags of the run, by name.
      known_clients: The number of clients, if it is known before images are read.
    """

    name: str
    read: Callable[[], ClientImages]
    keras_model: Callable[[], Any]
    options: Mapping[str, Any]
    known_clients: int | None = None

    @functools.cached_property
    def images(self) -> ClientImages:
        """The images, read once."""
        return self.read()

    @property
    def num_clients(self) -> int:
        """The training clients."""
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
        """Returns the task.

        Args:
          seed: Seed for the initial weights and the order of a client's images in a round.
        """
        batch_size, epochs = self.options["batch_size"], self.options["client_epochs"]
        return image_task(self.images, self.keras_model, batch_size, epochs, seed)


def as_input(pixels: np.ndarray) -> np.ndarray:
    """Returns pixels as a model takes them, float32: uint8 ones in [-1, 1], others as they are."""
    if pixels.dtype != np.uint8:
        return pixels
    return (pixels.astype(np.float32) - 127.5) / np.float32(127.5)


def image_task(
    images: ClientImages, keras_model: Callable[[], Any], batch_size: int, epochs: int, seed: int
) -> FederatedTask:
    """Returns the task of a classifier. Needs TensorFlow, which is imported here.

    Args:
      images: The images, and whose they are.
      keras_model: Makes the untrained model, from pixels as :func:`as_input` returns them to
        logits; its weights are all trainable.
      batch_size: The number of images in a local step.
      epochs: How often a client goes through its images.
      seed: Seed for the initial weights and the order of a client's images in a round.
    """
    import tensorflow as tf
    import tensorflow_federated as tff

    from simulations.training.task_parts import batches, keras_evaluation, sample_order

    def trained_by() -> dict[str, Any]:
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


def dirichlet_split(
    labels: np.ndarray, num_clients: int, concentration: float, seed: int
) -> tuple[np.ndarray, ...]:
    """Splits examples among clients that prefer some classes to others.

    Each client draws the proportions of its classes from a symmetric Dirichlet distribution, and
    then examples without replacement by these proportions; a class that is used up is left to the
    others (Hsu, Qi and Brown, *Measuring the Effects of Non-Identical Data Distribution for
    Federated Visual Classification*, 2019).

    Args:
      labels: (m,) integers, the classes from 0.
      num_clients: How many clients, at most m.
      concentration: The parameter of the Dirichlet distribution, 1e-3 to 1e6: near the least, a
        client has one class, and near the most, it has all classes alike.
      seed: The split is a function of the arguments and of this seed.

    Returns:
      The places of each client's examples: every place once. Numbers of examples differ by one at
      most, and the first clients have the larger ones.
    """
    generator = np.random.default_rng(seed)
    num_classes = int(np.max(labels)) + 1
    waiting = [generator.permutation(np.flatnonzero(labels == each)) for each in range(num_classes)]
    left = np.array([len(each) for each in waiting])
    smaller, larger_clients = divmod(len(labels), num_clients)
    found = []
    for client in range(num_clients):
        proportions = generator.dirichlet(np.full(num_classes, concentration))
        wanted = smaller + (client < larger_clients)
        taken = np.zeros(num_classes, np.int64)
        while missing := wanted - int(np.sum(taken)):
            weights = np.where(taken < left, proportions, 0.0)
            if not np.sum(weights) > 0.0:
                # Its own classes are used up: it takes images that are left.
                weights = (left - taken).astype(np.float64)
            drawn = generator.multinomial(missing, weights / np.sum(weights))
            taken = np.minimum(taken + drawn, left)
        own = [waiting[each][left[each] - taken[each] : left[each]] for each in range(num_classes)]
        left -= taken
        found.append(np.sort(np.concatenate(own)))
    return tuple(found)


def task_command(
    name: str,
    description: str | None,
    data_set: str,
    directory_flag: tuple[str, str],
    size: int,
    read: Callable[[pathlib.Path | None], tuple[Images, Images]],
    keras_model: Callable[[], Any],
    single_images: Mapping[str, Any],
    groups: Mapping[str, Any],
) -> TaskCommand:
    """Returns the command of a task of images.

    Args:
      name: The command.
      description: What ``--help`` says first.
      data_set: The name of the images.
      directory_flag: The flag that names the directory of their files, and its help.
      size: The number of training images without such a directory.
      read: Takes that directory, or None for the usual images, and returns the training and the
        test images, uint8 pixels.
      keras_model: Makes the untrained model, from pixels in [-1, 1] to logits.
      single_images: The defaults of a run, by flag, where every image is a client.
      groups: The defaults with ``--num_clients``.
    """
    flag, meaning = directory_flag

    def open_data(options: Mapping[str, Any]) -> ImageData:
        directory = None if options[flag] is None else pathlib.Path(options[flag])
        name, number = options[flag] or data_set, options["num_clients"]

        def clients() -> ClientImages:
            train, test = command_line.naming(flag)(read)(directory)
            _check_number(number, len(train))
            if len(test) < 2:
                raise ValueError(f"{name} has one test image, and evaluations need two.")
            places: Sequence[np.ndarray] = list(np.arange(len(train))[:, np.newaxis])
            if number is not None:
                concentration, seed = options["concentration"], options["split_seed"]
                places = dirichlet_split(train.labels, number, concentration, seed)
            digits, heldout = len(str(len(places))), max(1, round(_HELDOUT_SHARE * len(test)))
            of_clients = {f"{place:0{digits}}": own for place, own in enumerate(places)}
            return ClientImages(train, of_clients, test[:heldout], test[heldout:])

        known = None
        if directory is None:
            _check_number(number, size)
            known = number or size
        return ImageData(name, clients, keras_model, options, known)

    def define_flags(values: flags.FlagValues) -> None:
        group, texts = FlagGroup(values, "Data"), flag_fields.texts_of(check_flags)
        group.path(flag, meaning)
        group.integer("num_clients", texts["num_clients"])
        group.number("concentration", texts["concentration"], _DEFAULT_CONCENTRATION)
        group.integer("split_seed", texts["split_seed"], 0)

    return TaskCommand(
        name=name,
        description=description or "",
        define_flags=define_flags,
        defaults=lambda values: single_images if values["num_clients"].value is None else groups,
        default_texts=default_texts(single_images, groups, "--num_clients"),
        check_flags=functools.partial(check_flags, command=name),
        open_data=open_data,
        outcome_lines=outcome_lines,
    )


def _check_number(num_clients: int | None, num_images: int) -> None:
    if num_clients is not None and num_clients > num_images:
        raise ValueError(
            f"--num_clients={num_clients} is more than the {num_images} training images: each "
            "client needs one at least."
        )


def check_flags(options: Mapping[str, Any], command: str) -> None:
    """Checks the flags that divide the training images among clients.

    Flags:
      num_clients: The number of clients that share the training images, by a Dirichlet split.
        Default: every image is a client, the papers' centralised setting.
      concentration: The parameter of the Dirichlet split: the smaller, the fewer classes has a
        client. With --num_clients alone.
      split_seed: The seed of the Dirichlet split.

    Args:
      options: All flags by name, defaults filled in.
      command: The command, for messages.

    Raises:
      ValueError: If one is out of its range, or does nothing beside the others.
    """
    concentration = numbers.positive_number(options["concentration"], "--concentration")
    if not _SMALLEST_CONCENTRATION <= concentration <= _LARGEST_CONCENTRATION:
        raise ValueError(
            f"--concentration must be from {_SMALLEST_CONCENTRATION:g} to "
            f"{_LARGEST_CONCENTRATION:g}, found {concentration:g}."
        )
    numbers.integer_at_least(options["split_seed"], 0, "--split_seed")
    if options["split_seed"] > _LARGEST_SEED:
        raise ValueError(f"--split_seed must be at most {_LARGEST_SEED}.")
    if options["num_clients"] is not None:
        numbers.positive_integer(options["num_clients"], "--num_clients")
        return
    of_split = {"concentration": _DEFAULT_CONCENTRATION, "split_seed": 0}
    for name, value in {**OF_SINGLE_IMAGES, **of_split}.items():
        if options[name] != value:
            raise ValueError(
                f"--{name} must be {value} in {command} where a client has one image: found "
                f"{options[name]}; --num_clients gives clients more."
            )


def checked_labels(
    labels: np.ndarray, num_classes: int, data_set: str, path: pathlib.Path
) -> np.ndarray:
    """Returns the labels of a file as int32.

    Raises:
      ValueError: If one is not from 0 to ``num_classes`` - 1.
    """
    if np.max(labels) >= num_classes:
        raise ValueError(
            f"{path} has the class {np.max(labels)}, and {data_set}'s are 0 to {num_classes - 1}: "
            "it is damaged, or is of another data set."
        )
    return labels.astype(np.int32)


def downloaded(
    module: str, data_set: str, shape: tuple[int, ...], advice: str
) -> tuple[Images, Images]:
    """Returns the training and the test images that Keras downloads.

    Args:
      module: The module of ``keras.datasets`` that has them.
      data_set: Their name, for messages.
      shape: The shape of an image.
      advice: What to do on a machine without a network: a sentence.

    Raises:
      ValueError: If the download fails.
    """
    import tensorflow as tf

    try:
        parts = getattr(tf.keras.datasets, module).load_data()
    except Exception as error:
        # Keras raises a bare Exception for a failed download, and others for damaged files.
        reason = str(error).strip() or type(error).__name__
        raise ValueError(
            f"{data_set} could not be downloaded or read by Keras ({reason.splitlines()[-1]}). "
            f"{advice} If files of an earlier download in ~/.keras/datasets are damaged, delete "
            "them."
        ) from error
    train, test = (
        Images(pixels.reshape(-1, *shape), labels.reshape(-1).astype(np.int32))
        for pixels, labels in parts
    )
    return train, test


def outcome_lines(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns the lines of a result on its images, from the facts of ``image_task``."""
    return [
        ("training images", f"{facts['num_examples']:,}"),
        (
            f"always {facts['most_frequent_class']}",
            f"{100 * facts['most_frequent_class_accuracy']:.2f} %",
        ),
    ]
