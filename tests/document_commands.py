"""Runs the commands that documents print, in this process, as their entry points would.

TensorFlow Federated takes many seconds to start, and is started once for all of them. What is
printed, files in the current directory and the exit status are those of a process of its own.
"""

import contextlib
import dataclasses
import functools
import importlib
import runpy
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

from absl import flags

from docs.extensions import command_pages
from mf_aggregators.commands import command_line, flag_groups
from reproduction import reproduce_paper
from simulations import compare_mechanisms
from simulations.comparison.repeated_runs import MODULES
from simulations.devices import device_flags
from simulations.runs import run_config
from simulations.workers import worker_addresses
from tests.documents import ROOT, Command

# Flags of one command may be checked while those of another are.
_RUN = command_line.run
_VIRTUAL_ENVIRONMENT = ".venv/bin/"


@dataclasses.dataclass(frozen=True)
class Ran:
    """A command that has been run.

    Attributes:
      command: As the document prints it.
      printed: What it wrote to standard output.
      as_printed: Whether its arguments were those of the document.
    """

    command: Command
    printed: str
    as_printed: bool


def is_ours(command: Command) -> bool:
    """Whether a command is this project's own, printed with or without its directory."""
    return command.name in command_pages.entry_points() or command.name.startswith("benchmarks/")


def all_commands() -> list[Command]:
    """Returns all commands of this project's own, without flags."""
    scripts = sorted(path.name for path in (ROOT / "benchmarks").glob("*.py"))
    python = f"{_VIRTUAL_ENVIRONMENT}python"
    return [
        *(
            Command("", (f"{_VIRTUAL_ENVIRONMENT}{name}",))
            for name in sorted(command_pages.entry_points())
        ),
        *(Command("", (python, f"benchmarks/{name}")) for name in scripts),
    ]


def flag_names(command: Command) -> frozenset[str]:
    """Returns the names of a command's flags."""
    found: set[str] = set()

    def define(description: str, define_flags: Any, *rest: Any, **others: Any) -> int:
        values = flags.FlagValues()
        define_flags(values)
        found.update(("format", *values))
        return 0

    with mock.patch.object(command_line, "run", define):
        _call(command, ())
    return frozenset(found)


def check_runs_from_the_clone(command: Command) -> None:
    """Checks that the program is found where the project is set up and nothing else is done.

    Raises:
      AssertionError: If it is not.
    """
    program = command.words[0]
    if command.is_script:
        assert program == f"{_VIRTUAL_ENVIRONMENT}python", f"{command}: which Python?"
        assert (ROOT / command.name).is_file(), f"{command}: there is no such file"
    else:
        assert program == f"{_VIRTUAL_ENVIRONMENT}{command.name}", (
            f"{command}: it is in {_VIRTUAL_ENVIRONMENT}, not on the PATH"
        )


def check_some_flags(command: Command, arguments: Sequence[str]) -> None:
    """Checks flags as :func:`check_flags` does, of a command whose other flags are not printed."""
    with mock.patch.object(flag_groups, "required", return_value=[]):
        check_flags(command, arguments)


def check_flags(command: Command, arguments: Sequence[str] | None = None) -> None:
    """Parses flags by the command itself, and checks what it checks before it works.

    Args:
      command: One of this project's own.
      arguments: In place of those that are printed.

    Raises:
      AssertionError: If it refuses them.
    """
    given = command.arguments if arguments is None else arguments
    checks = _CHECKS.get(command.name, lambda values: None)

    def parse(description: str, define_flags: Any, main: Any, *rest: Any, **others: Any) -> int:
        return _RUN(description, define_flags, checks, *rest, **others)

    with mock.patch.object(command_line, "run", parse):
        _call(command, given)


def run(command: Command, arguments: Sequence[str]) -> Ran:
    """Runs a command of this project's own.

    Args:
      command: The command as it is printed.
      arguments: What it is given.

    Raises:
      AssertionError: If its exit status is not 0.
    """
    return Ran(command, _call(command, arguments), tuple(arguments) == command.arguments)


def _call(command: Command, arguments: Sequence[str]) -> str:
    with (
        # Files, not buffers: TFF's worker is handed them when it is started.
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as err,
        _own_signals(),
        mock.patch.object(sys, "argv", [command.name, *arguments]),
    ):
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                _entry(command)()
                status: Any = 0
            except SystemExit as ended:
                status = ended.code
        out.seek(0)
        err.seek(0)
        assert status in (0, None), (
            f"{command}\nwith {' '.join(arguments)}\nended with status {status}:\n"
            f"{err.read()[-2000:]}"
        )
        return out.read()


def _entry(command: Command) -> Callable[[], object]:
    if command.is_script:
        path = str(ROOT / command.name)
        return functools.partial(runpy.run_path, path, run_name="__main__")
    entry: Callable[[], object] = command_pages.entry_points()[command.name].load()
    return entry


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Gives back the signals that a command handles until its process ends."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _check_run(values: flags.FlagValues, name: str) -> None:
    module = importlib.import_module(MODULES[name])
    task = module.command() if hasattr(module, "command") else module.COMMAND
    run_config.of_flags(values, task)
    device_flags.behaviour(values)
    if values.workers is not None:
        worker_addresses.parse(values.workers)


def _check_comparison(values: flags.FlagValues) -> None:
    for variant in {each.variant for each in compare_mechanisms._planned(values)}:
        arguments = (f"--mechanism={variant.mechanism}", *variant.flags)
        check_flags(Command(f"--flags of {variant.name}", (values.command, *arguments)))


def _check_reproduction(values: flags.FlagValues) -> None:
    chosen = reproduce_paper.experiments_named(values.only)
    reproduce_paper._trainable(chosen, values, reproduce_paper._targets(values))


def _check_of_runs(name: str) -> Callable[[flags.FlagValues], None]:
    return lambda values: _check_run(values, name)


_CHECKS: dict[str, Callable[[flags.FlagValues], None]] = {
    **{name: _check_of_runs(name) for name in MODULES},
    "compare-mechanisms": _check_comparison,
    "reproduce-paper": _check_reproduction,
}
