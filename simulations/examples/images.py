"""Shared parts of image-classification tasks, as their flags and images' division among clients.

The module of a single task reads its files, makes its model and has its defaults.
``federated_task`` has the data of a run, in the same form for all these tasks.
"""

import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from absl import flags

from mf_aggregators import inputs
from mf_aggregators.commands import command_line
from mf_aggregators.commands.command_line import FlagGroup
from mf_aggregators.kernel import numbers
from simulations import flag_fields
from simulations.training.federated_task import (
    ClientImages,
    ImageData,
    Images,
    TaskCommand,
    default_texts,
    option,
    outcome_lines,
)

# Default of --concentration; Hsu et al. call clients with this value moderately different.
_DEFAULT_CONCENTRATION = 1.0
# The least Dirichlet concentration. Below it, all of a client's float64 class shares may round to
# zero.
_SMALLEST_CONCENTRATION = 1e-3
_LARGEST_CONCENTRATION = 1e6
# The largest seed of a split: seeds are signed 64-bit integers.
_LARGEST_SEED = 2**63 - 1
# The share of the test images that is evaluated during training; the other test images are used
# only after training. The papers have no such split, and train with all training images.
_HELDOUT_SHARE = 0.2


# Default flags that all image tasks share. The server's learning rate has no warm-up; each task
# says how it falls at the end.
COMMON_DEFAULTS: Mapping[str, object] = {
    "client_optimizer": "sgd",
    "server_warmup": 0.0,
    "target_epsilon": 8.0,
    "max_bands": 64,
}
# Default flags if each client has one image: it takes one local step.
OF_SINGLE_IMAGES: Mapping[str, object] = {"batch_size": 1, "client_epochs": 1}


def dirichlet_split(
    labels: np.ndarray, num_clients: int, concentration: float, seed: int
) -> tuple[np.ndarray, ...]:
    """Splits labelled examples among clients, each with its own preference for some classes.

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
                # The classes that the client prefers are used up: it takes images of the classes
                # that are left.
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
    single_images: Mapping[str, object],
    groups: Mapping[str, object],
) -> TaskCommand:
    """Returns the command that trains on one image data set.

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

    def open_data(options: Mapping[str, object]) -> ImageData:
        given, number = option(options, str, flag), option(options, int, "num_clients")
        directory, name = None if given is None else pathlib.Path(given), given or data_set

        def clients() -> ClientImages:
            train, test = command_line.naming(flag)(read)(directory)
            _check_number(number, len(train))
            if len(test) < 2:
                raise ValueError(f"{name} has one test image, and evaluations need at least two.")
            places: Sequence[np.ndarray] = list(np.arange(len(train))[:, np.newaxis])
            if number is not None:
                concentration = numbers.positive_number(options["concentration"], "--concentration")
                seed = inputs.part(options["split_seed"], int)
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
            "client needs at least one."
        )


def check_flags(options: Mapping[str, object], command: str) -> None:
    """Checks the flags that say how the training images are divided among clients.

    Flags:
      num_clients: The number of clients that share the training images, by a Dirichlet split.
        Default: every image is a client, the papers' centralised setting.
      concentration: The parameter of the Dirichlet split: the smaller, the fewer classes has a
        client. With --num_clients alone.
      split_seed: With --num_clients: the seed of the Dirichlet split.

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
    if numbers.integer_at_least(options["split_seed"], 0, "--split_seed") > _LARGEST_SEED:
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
    """Returns labels that were read from a file, checked and as int32.

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
    """Returns the training images and the test images of a data set that Keras downloads.

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
        # Catch all errors: Keras raises a bare Exception for a failed download, and other types for
        # damaged files.
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
