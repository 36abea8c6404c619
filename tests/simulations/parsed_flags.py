"""Commands that train, as their words ask for them: their flags."""

from absl import flags

from mf_aggregators.commands import command_line
from simulations.runs import run_config
from simulations.runs.run_config import RunConfig
from simulations.training.federated_task import TaskCommand


def values_of(command: TaskCommand, *words: str) -> flags.FlagValues:
    """Returns the flags of a command."""
    values = command_line.flags_of(lambda own: run_config.define_flags(own, command))
    assert values([command.name, *words]) == [command.name]
    return values


def config_of(command: TaskCommand, *words: str) -> RunConfig:
    """Returns what a command is asked for, with every default filled in."""
    return run_config.of_flags(values_of(command, *words), command)
