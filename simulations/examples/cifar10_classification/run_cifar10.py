r"""run-cifar10: one training run of CIFAR-10 with single images as clients, private or not.

The papers' centralised setting (BandMF Sec. 5 and App. H): 20 epochs over 50,000 images in
batches of 500, with a guarantee for each image. --sampling=poisson draws the batches as the
papers account for them; without it no image is used again within 100 rounds, and nothing is
amplified. With --num_clients the images belong to clients that prefer some classes. At that size
it is for machines with many cores, and for --workers. Run again with the same --output_dir, it
resumes.

Examples:
  run-cifar10 --output_dir=runs/cifar10 --sampling=poisson --num_bands=32
  run-cifar10 --output_dir=runs/cifar10_sgd --sampling=poisson --mechanism=identity \
    --server_momentum=0 --server_learning_rate=2
  run-cifar10 --output_dir=runs/small --cifar10_dir=cifar-10-batches-bin --num_rounds=20 \
    --clients_per_round=50
"""

import functools
import pathlib
from collections.abc import Mapping
from typing import Any, NoReturn

from absl import flags

from mf_aggregators.commands.flag_groups import FlagGroup
from simulations.examples import image_clients
from simulations.examples.cifar10_classification import data
from simulations.examples.image_clients import ImageClients
from simulations.examples.labelled_images import outcome_lines
from simulations.runs import federated_runs
from simulations.training.federated_task import TaskCommand, default_texts

# The server's rate is not the papers', which print none.
_DEFAULTS: Mapping[str, Any] = {
    "client_optimizer": "sgd",
    "client_learning_rate": 1.0,
    "client_epochs": 1,
    "batch_size": 1,
    "server_learning_rate": 0.1,
    "server_momentum": 0.95,
    "server_warmup": 0.0,
    "server_cooldown": 0.25,
    "evaluate_every": 50,
    "target_epsilon": 8.0,
    "delta": 1e-5,
    "max_bands": 64,
    "num_rounds": 2000,
    "clients_per_round": 500,
    "clip_norm": 1.0,
}


def _define_flags(values: flags.FlagValues) -> None:
    group = FlagGroup(values, "Data")
    group.path(
        "cifar10_dir",
        "The directory of CIFAR-10's binary version (data_batch_1.bin, ..., test_batch.bin). "
        "Default: Keras downloads the data set into ~/.keras/datasets.",
    )
    image_clients.define_flags(group)


def _keras_model() -> Any:
    from simulations.examples.cifar10_classification import task

    return task.keras_model()


def _open_data(options: Mapping[str, Any]) -> ImageClients:
    given = options["cifar10_dir"]
    directory = None if given is None else pathlib.Path(given)
    return ImageClients(
        "CIFAR-10" if directory is None else str(directory),
        functools.partial(data.num_training_images, directory),
        functools.partial(data.load, directory),
        _keras_model,
        options,
    )


COMMAND = TaskCommand(
    name="run-cifar10",
    description=__doc__ or "",
    define_flags=_define_flags,
    defaults=lambda values: _DEFAULTS,
    default_texts=default_texts(_DEFAULTS, _DEFAULTS, ""),
    check_flags=functools.partial(image_clients.check_flags, command="run-cifar10"),
    open_data=_open_data,
    outcome_lines=outcome_lines,
)


def run() -> NoReturn:
    """Entry point of the console command."""
    federated_runs.run(COMMAND)


if __name__ == "__main__":
    run()
