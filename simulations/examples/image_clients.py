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
from mf_aggregators.kernel import validation
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
    validation.positive_integer(num_clients, "num_clients")
    if num_clients > len(labels):
        raise ValueError(
            f"num_clients is {num_clients}, and there are {len(labels)} examples: a client needs "
            "one at least."
        )
    _check_concentration(concentration, "concentration")
    validation.integer_at_least(seed, 0, "seed")
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
    find_directory: Callable[[pathlib.Path | None], pathlib.Path | None],
    count: Callable[[pathlib.Path | None], int],
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
      find_directory: From what the flag says, which may be nothing, to the directory; None for
        images that are downloaded.
      count: Takes that directory, and returns how many training images there are.
      read: Takes it, and returns the training and the test images, uint8 pixels.
      keras_model: Makes the untrained model, from pixels in [-1, 1] to logits.
      single_images: The defaults of a run, by flag, where every image is a client.
      groups: The defaults with ``--num_clients``.
    """

    def open_data(options: Mapping[str, Any]) -> ImageClients:
        named = command_line.naming(directory_flag[0])
        given = options[directory_flag[0]]
        directory = find_directory(None if given is None else pathlib.Path(given))
        return ImageClients(
            data_set if directory is None else str(directory),
            named(functools.partial(count, directory)),
            named(functools.partial(read, directory)),
            keras_model,
            options,
        )

    return TaskCommand(
        name=name,
        description=description or "",
        define_flags=functools.partial(_define_flags, directory_flag),
        defaults=lambda values: single_images if values["num_clients"].value is None else groups,
        default_texts=default_texts(single_images, groups, "--num_clients"),
        check_flags=functools.partial(check_flags, command=name),
        open_data=open_data,
        outcome_lines=outcome_lines,
    )


def _define_flags(directory_flag: tuple[str, str], values: flags.FlagValues) -> None:
    group = FlagGroup(values, "Data")
    group.path(*directory_flag)
    group.integer(
        "num_clients",
        "The number of clients that share the training images, by a Dirichlet split. Default: "
        "every image is a client, the papers' centralised setting.",
    )
    group.number(
        "concentration",
        "The parameter of the Dirichlet split: the smaller, the fewer classes has a client. With "
        "--num_clients alone.",
        _DEFAULT_CONCENTRATION,
    )
    group.integer("split_seed", "The seed of the Dirichlet split.", 0)


def check_flags(options: Mapping[str, Any], command: str) -> None:
    """Checks the flags that say whose the training images are.

    Args:
      options: All flags by name, defaults filled in.
      command: The command, for messages.

    Raises:
      ValueError: If one is out of its range, or does nothing beside the others.
    """
    _check_concentration(options["concentration"], "--concentration")
    validation.integer_at_least(options["split_seed"], 0, "--split_seed")
    if options["split_seed"] > _LARGEST_SEED:
        raise ValueError(f"--split_seed must be at most {_LARGEST_SEED}.")
    if options["num_clients"] is not None:
        validation.positive_integer(options["num_clients"], "--num_clients")
        return
    for name in ("batch_size", "client_epochs"):
        if options[name] != 1:
            raise ValueError(
                f"--{name} must be 1 in {command} where a client has one image: found "
                f"{options[name]}; --num_clients gives clients more."
            )
    for name, default in (("concentration", _DEFAULT_CONCENTRATION), ("split_seed", 0)):
        if options[name] != default:
            raise ValueError(f"--{name} is of the split that --num_clients asks for: name both.")


def _check_concentration(value: float, name: str) -> None:
    validation.positive_number(value, name)
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
      count: Returns how many training images there are, without reading them.
      read: Returns the training and the test images, uint8 pixels.
      keras_model: Makes the untrained model, from pixels in [-1, 1] to logits.
      options: The flags of the run, by name.
    """

    name: str
    count: Callable[[], int]
    read: Callable[[], tuple[Images, Images]]
    keras_model: Callable[[], Any]
    options: Mapping[str, Any]

    @functools.cached_property
    def num_clients(self) -> int:
        """The training clients.

        Raises:
          ValueError: If there are more clients than images.
        """
        number, images = self.options["num_clients"], self.count()
        if number is None:
            return images
        if number > images:
            raise ValueError(
                f"--num_clients={number} is more than the {images} training images: each client "
                "needs one at least."
            )
        return int(number)

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

        train, test = self._images
        return image_classification.task_of_clients(
            train,
            test,
            self._places,
            self.keras_model,
            self.options["batch_size"],
            self.options["client_epochs"],
            seed,
        )

    @functools.cached_property
    def _images(self) -> tuple[Images, Images]:
        return self.read()

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
