r"""run-fashion-mnist: one training run of Fashion-MNIST, private or not.

By default every image is a client, as in a data centre that protects single examples, and no
image is used twice. With --num_clients the images belong to clients that prefer some classes, by a
Dirichlet split, and clients are protected. Run again with the same --output_dir, it resumes.

Examples:
  run-fashion-mnist --output_dir=runs/fashion
  run-fashion-mnist --output_dir=runs/sampled --sampling=poisson --num_bands=4
  run-fashion-mnist --output_dir=runs/federated --num_clients=3000 --concentration=0.3
  run-fashion-mnist --output_dir=runs/mine --data_dir=data/FashionMNIST/raw
"""

import functools
import pathlib
from collections.abc import Mapping
from typing import Any, NoReturn

from absl import flags

from mf_aggregators.commands.flag_groups import FlagGroup
from simulations.examples import image_clients
from simulations.examples.fashion_mnist_classification import data
from simulations.examples.image_clients import ImageClients
from simulations.examples.labelled_images import outcome_lines
from simulations.runs import federated_runs
from simulations.training.federated_task import TaskCommand, default_texts

# What a run uses where its flags do not say otherwise. Delta is that of run-cifar10.
_COMMON: Mapping[str, Any] = {
    "client_optimizer": "sgd",
    "server_momentum": 0.9,
    "server_warmup": 0.0,
    "server_cooldown": 0.25,
    "evaluate_every": 15,
    "target_epsilon": 8.0,
    "delta": 1e-5,
    "max_bands": 64,
}
_SINGLE_IMAGES: Mapping[str, Any] = {
    **_COMMON,
    "num_rounds": 60,
    "clients_per_round": 100,
    "batch_size": 1,
    "client_epochs": 1,
    "client_learning_rate": 1.0,
    "server_learning_rate": 0.2,
    "clip_norm": 1.0,
}
_GROUPS: Mapping[str, Any] = {
    **_COMMON,
    "num_rounds": 60,
    "clients_per_round": 50,
    "batch_size": 10,
    "client_epochs": 1,
    "client_learning_rate": 0.1,
    "server_learning_rate": 0.5,
    "clip_norm": 0.5,
}


def _define_flags(values: flags.FlagValues) -> None:
    group = FlagGroup(values, "Data")
    group.path(
        "data_dir",
        "The directory of Fashion-MNIST's four files (train-images-idx3-ubyte and so on, or the "
        f"same with .gz). Default: {data.DEBIAN_DIRECTORY} if it is there; else Keras downloads "
        "the data set into ~/.keras/datasets.",
    )
    image_clients.define_flags(group)


def _defaults(values: flags.FlagValues) -> Mapping[str, Any]:
    return _SINGLE_IMAGES if values["num_clients"].value is None else _GROUPS


def _keras_model() -> Any:
    from simulations.examples.fashion_mnist_classification import task

    return task.keras_model()


def _open_data(options: Mapping[str, Any]) -> ImageClients:
    given = options["data_dir"]
    directory = data.find_directory(None if given is None else pathlib.Path(given))
    return ImageClients(
        "Fashion-MNIST" if directory is None else str(directory),
        functools.partial(data.num_training_images, directory),
        functools.partial(data.load, directory),
        _keras_model,
        options,
    )


COMMAND = TaskCommand(
    name="run-fashion-mnist",
    description=__doc__ or "",
    define_flags=_define_flags,
    defaults=_defaults,
    default_texts=default_texts(_SINGLE_IMAGES, _GROUPS, "--num_clients"),
    check_flags=functools.partial(image_clients.check_flags, command="run-fashion-mnist"),
    open_data=_open_data,
    outcome_lines=outcome_lines,
)


def run() -> NoReturn:
    """Entry point of the console command."""
    federated_runs.run(COMMAND)


if __name__ == "__main__":
    run()
