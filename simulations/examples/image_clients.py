"""Labelled images as the clients of a run, without TensorFlow: one each, or in groups of one kind.

A task of images has its files, its model and its defaults in a folder of its own; whose the images
are, and the command, are the same for all of them.
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
from mf_aggregators.commands.flag_groups import FlagGroup
from mf_aggregators.kernel import numbers
from simulations import flag_texts
from simulations.examples.labelled_images import Images, concatenated, outcome_lines
from simulations.training.federated_task import FederatedTask, TaskCommand, default_texts

# What Hsu et al. call moderately different clients.
_DEFAULT_CONCENTRATION = 1.0
# A client's share of each class is a float64: smaller ones give nothing but zeros.
_SMALLEST_CONCENTRATION = 1e-3
_LARGEST_CONCENTRATION = 1e6
# Seeds are 64 bits wide.
_LARGEST_SEED = 2**63 - 1


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

    Raises:
      ValueError: If an argument is out of its range.
    """
    labels = np.asarray(labels)
    numbers.positive_integer(num_clients, "num_clients")
    if num_clients > len(labels):
        raise ValueError(
            f"num_clients is {num_clients}, and there are {len(labels)} examples: a client needs "
            "one at least."
        )
    _check_concentration(concentration, "concentration")
    numbers.integer_at_least(seed, 0, "seed")
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
                # Its own classes are used up: it takes what there is.
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

    def open_data(options: Mapping[str, Any]) -> ImageClients:
        given = options[flag]
        directory = None if given is None else pathlib.Path(given)
        return ImageClients(
            given or data_set,
            None if given else size,
            command_line.naming(flag)(functools.partial(read, directory)),
            keras_model,
            options,
        )

    def define_flags(values: flags.FlagValues) -> None:
        group, texts = FlagGroup(values, "Data"), flag_texts.of(check_flags)
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


def check_flags(options: Mapping[str, Any], command: str) -> None:
    """Checks the flags that say whose the training images are.

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
    _check_concentration(options["concentration"], "--concentration")
    numbers.integer_at_least(options["split_seed"], 0, "--split_seed")
    if options["split_seed"] > _LARGEST_SEED:
        raise ValueError(f"--split_seed must be at most {_LARGEST_SEED}.")
    if options["num_clients"] is not None:
        numbers.positive_integer(options["num_clients"], "--num_clients")
        return
    of_one_image = {"batch_size": 1, "client_epochs": 1}
    of_split = {"concentration": _DEFAULT_CONCENTRATION, "split_seed": 0}
    for name, value in {**of_one_image, **of_split}.items():
        if options[name] != value:
            raise ValueError(
                f"--{name} must be {value} in {command} where a client has one image: found "
                f"{options[name]}; --num_clients gives clients more."
            )


def _check_concentration(value: float, name: str) -> None:
    numbers.positive_number(value, name)
    if not _SMALLEST_CONCENTRATION <= value <= _LARGEST_CONCENTRATION:
        raise ValueError(
            f"{name} must be from {_SMALLEST_CONCENTRATION:g} to {_LARGEST_CONCENTRATION:g}, found "
            f"{value:g}."
        )


@dataclasses.dataclass(frozen=True)
class ImageClients:
    """The data of a run on labelled images.

    Attributes:
      name: The data set.
      size: The number of training images, if it is known before they are read.
      read: Returns the training and the test images, uint8 pixels.
      keras_model: Makes the untrained model, from pixels in [-1, 1] to logits.
      options: The flags of the run, by name.
    """

    name: str
    size: int | None
    read: Callable[[], tuple[Images, Images]]
    keras_model: Callable[[], Any]
    options: Mapping[str, Any]

    @functools.cached_property
    def num_clients(self) -> int:
        """The training clients.

        Raises:
          ValueError: If there are more clients than images.
        """
        number, images = self.options["num_clients"], self.size or len(self._images[0])
        if number is not None and number > images:
            raise ValueError(
                f"--num_clients={number} is more than the {images} training images: each client "
                "needs one at least."
            )
        return images if number is None else int(number)

    def fingerprint(self) -> str:
        """Returns the SHA-256 of all images and of whose they are."""
        digest = hashlib.sha256(concatenated(self._images).fingerprint().encode())
        if self.options["num_clients"] is not None:
            for places in self._places:
                digest.update(np.asarray([len(places), *places], "<i8").tobytes())
        return digest.hexdigest()

    def load(self, seed: int) -> FederatedTask:
        """Returns the task.

        Args:
          seed: Seed for the initial weights and the order of a client's images in a round.
        """
        from simulations.examples import image_classification

        batch_size, epochs = self.options["batch_size"], self.options["client_epochs"]
        return image_classification.task_of_clients(
            *self._images, self._places, self.keras_model, batch_size, epochs, seed
        )

    @functools.cached_property
    def _images(self) -> tuple[Images, Images]:
        train, test = self.read()
        if len(test) < 2:
            raise ValueError(f"{self.name} has one test image, and evaluations need two.")
        return train, test

    @functools.cached_property
    def _places(self) -> Sequence[np.ndarray]:
        labels = self._images[0].labels
        if self.options["num_clients"] is None:
            return tuple(np.arange(len(labels))[:, np.newaxis])
        return dirichlet_split(
            labels,
            self.options["num_clients"],
            self.options["concentration"],
            self.options["split_seed"],
        )
