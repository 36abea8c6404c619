"""All experiments by name."""

import types
from collections.abc import Mapping, Sequence

from mf_aggregators.commands import command_line
from reproduction import (
    adaptive_streams,
    amplification_by_epochs,
    banded_errors,
    banded_guarantees,
    best_bands,
    coins_under_timers,
    errors_on_images,
    library_comparison,
    prefix_sums,
    training,
)
from reproduction.experiment import Experiment

NUMBERS = "numbers"
TRAINING = "training"


def experiments() -> Mapping[str, Experiment]:
    """Returns the experiments by name, in the order of the papers."""
    every = (
        *prefix_sums.experiments(),
        *adaptive_streams.experiments(),
        *banded_errors.experiments(),
        *best_bands.experiments(),
        *amplification_by_epochs.experiments(),
        *errors_on_images.experiments(),
        *banded_guarantees.experiments(),
        *coins_under_timers.experiments(),
        *library_comparison.experiments(),
        *training.experiments(),
    )
    return types.MappingProxyType({experiment.name: experiment for experiment in every})


def chosen(names: Sequence[str]) -> list[Experiment]:
    """Returns experiments by their names.

    Args:
      names: Names, or ``numbers`` or ``training`` for all of a kind; each counts once.

    Returns:
      The experiments, in the order of the papers.

    Raises:
      CommandError: If there is none of such a name, or no name at all.
    """
    known = experiments()
    wanted = set()
    for name in names:
        if name in (NUMBERS, TRAINING):
            wanted |= {
                each.name for each in known.values() if bool(each.targets) == (name == TRAINING)
            }
            continue
        command_line.check_choice(
            name in known, f"--only knows no experiment {name!r}; --list prints the names."
        )
        wanted.add(name)
    command_line.check_choice(bool(wanted), "--only names no experiment; --list prints the names.")
    return [experiment for name, experiment in known.items() if name in wanted]
