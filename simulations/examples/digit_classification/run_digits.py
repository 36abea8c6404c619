"""run-digits: one federated training run of digit classification, private or not.

A small model learns handwritten digits from groups of images that are like writers, under a
banded matrix-factorization mechanism with participation timers, in a minute or two. With
--examples_per_client=1 every image is a client, as in a data centre that protects single
examples; a data sampler may then draw the batches. Run again with the same --output_dir, it
resumes.

Examples:
  run-digits --output_dir=runs/digits
  run-digits --output_dir=runs/digits_not_private --mechanism=none
  run-digits --output_dir=runs/centralised --examples_per_client=1 --sampling=poisson --num_bands=8
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NoReturn

from absl import flags

from mf_aggregators.commands.flag_groups import FlagGroup
from mf_aggregators.kernel import numbers
from simulations.examples.digit_classification import data
from simulations.examples.labelled_images import Images, concatenated, outcome_lines
from simulations.runs import federated_runs
from simulations.training.federated_task import FederatedTask, TaskCommand, default_texts

# What a run uses where its flags do not say otherwise.
_COMMON: Mapping[str, Any] = {
    "client_optimizer": "sgd",
    "client_learning_rate": 0.5,
    "server_momentum": 0.0,
    "server_warmup": 0.0,
    "server_cooldown": 0.4,
    "evaluate_every": 10,
    "target_epsilon": 8.0,
    "delta": 1e-4,
    "max_bands": 64,
}
_GROUPS: Mapping[str, Any] = {
    **_COMMON,
    "num_rounds": 140,
    "clients_per_round": 10,
    "batch_size": 10,
    "client_epochs": 3,
    "server_learning_rate": 2.0,
    "clip_norm": 0.3,
}
_SINGLE_EXAMPLES: Mapping[str, Any] = {
    **_COMMON,
    "num_rounds": 100,
    "clients_per_round": 50,
    "batch_size": 1,
    "client_epochs": 1,
    "server_learning_rate": 5.0,
    "clip_norm": 1.0,
}


@dataclasses.dataclass(frozen=True)
class DigitsData:
    """The digits, and how clients use them.

    Attributes:
      forms: What ``data.load`` returned.
      examples_per_client: The most images of a client.
      batch_size: Images in a local step.
      epochs: How often a client goes through its images.
    """

    forms: tuple[Images, ...]
    examples_per_client: int
    batch_size: int
    epochs: int

    @property
    def name(self) -> str:
        """The data set."""
        return "scikit-learn's digits"

    @functools.cached_property
    def num_clients(self) -> int:
        """The training clients."""
        return len(data.clients(self.forms, self.examples_per_client))

    def fingerprint(self) -> str:
        """Returns the SHA-256 of all images."""
        return concatenated(self.forms).fingerprint()

    def load(self, seed: int) -> FederatedTask:
        """Returns the task.

        Args:
          seed: Seed for the order of a client's images in a round.
        """
        from simulations.examples.digit_classification import task

        return task.federated_task(
            self.forms, self.examples_per_client, self.batch_size, self.epochs, seed
        )


def _define_flags(values: flags.FlagValues) -> None:
    FlagGroup(values, "Data").integer(
        "examples_per_client",
        "The most images of a client, consecutive ones of one form. 1 is the papers' centralised "
        "setting: every image is a client.",
        10,
    )


def _defaults(values: flags.FlagValues) -> Mapping[str, Any]:
    return _SINGLE_EXAMPLES if values["examples_per_client"].value == 1 else _GROUPS


def _check_flags(options: Mapping[str, Any]) -> None:
    numbers.positive_integer(options["examples_per_client"], "--examples_per_client")


def _open_data(options: Mapping[str, Any]) -> DigitsData:
    return DigitsData(
        data.load(),
        options["examples_per_client"],
        options["batch_size"],
        options["client_epochs"],
    )


COMMAND = TaskCommand(
    name="run-digits",
    description=__doc__ or "",
    define_flags=_define_flags,
    defaults=_defaults,
    default_texts=default_texts(_GROUPS, _SINGLE_EXAMPLES, "--examples_per_client=1"),
    check_flags=_check_flags,
    open_data=_open_data,
    outcome_lines=outcome_lines,
)


def run() -> NoReturn:
    """Entry point of the console command."""
    federated_runs.run(COMMAND)


if __name__ == "__main__":
    run()
