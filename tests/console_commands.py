"""The project's commands, called in this process as their entry points would be.

TensorFlow Federated takes many seconds to start, and is started once for all of them. What is
printed, files in the current directory and the exit status are those of a process of its own.
"""

import ast
import contextlib
import importlib
import json
import pathlib
import runpy
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple
from unittest import mock

from absl import flags

from mf_aggregators.commands import command_line

ROOT = pathlib.Path(__file__).resolve().parent.parent


class Ended(NamedTuple):
    """How a command ended: its exit status, and what it printed."""

    status: Any
    printed: str
    errors: str

    def done(self, status: int = 0) -> str:
        """Returns what a command printed that has to end with a status."""
        assert self.status == status, self
        return self.printed

    def fields(self, status: int = 0) -> dict[str, Any]:
        """Returns the JSON object, in one line, of a command that has to end with a status."""
        (line,) = self.done(status).splitlines()
        found: dict[str, Any] = json.loads(line)
        return found

    def refused(self, *named: str, has_begun: bool = False) -> str:
        """Returns the one line of a command that has to refuse its flags and print nothing else.

        Args:
          *named: Words of that line.
          has_begun: Whether progress or warnings may stand before it.
        """
        assert (self.status, self.printed) == (2, ""), self
        *before, line = self.errors.splitlines()
        assert has_begun or not before, self
        assert all(each in line for each in named), self
        return line


def of_setup() -> Mapping[str, Any]:
    """Returns the lists of requirements that setup.py names, and its commands' entry points."""
    tree = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
    found: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.List):
            found[ast.unparse(node.targets[0])] = ast.literal_eval(node.value)
    scripts = [*found["_COMMANDS"], *found["_COMMANDS_OF_A_CLONE"]]
    found["commands"] = dict(sorted(script.split("=") for script in scripts))
    return found


def flags_of(command: str) -> flags.FlagValues:
    """Returns the flags of a command, as it defines them before it parses any."""
    found = [flags.FlagValues()]

    def record(
        description: str,
        define_flags: Callable[[flags.FlagValues], None],
        *rest: Any,
        **others: Any,
    ) -> int:
        found.append(command_line.flags_of(define_flags))
        return 0

    with mock.patch.object(command_line, "run", record):
        call(command)
    return found[-1]


def call(command: str, *arguments: str) -> Ended:
    """Calls a command by its entry point, or runs a script.

    Args:
      command: The name of a console command, or the path of a script below the project's folder.
      *arguments: Its flags.
    """
    with (
        # Files, not buffers: TFF's worker is handed them when it is started.
        tempfile.TemporaryFile("w+", newline="", encoding="utf-8", errors="surrogateescape") as out,
        tempfile.TemporaryFile("w+", newline="", encoding="utf-8", errors="surrogateescape") as err,
        mock.patch.object(sys, "argv", [command, *arguments]),
        _own_signals(),
    ):
        status: Any = 0
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                status = _entry(command)() or 0
            except SystemExit as ended:
                status = ended.code or 0
        out.seek(0)
        err.seek(0)
        return Ended(status, out.read(), err.read())


def _entry(command: str) -> Callable[[], Any]:
    if command.endswith(".py"):
        return lambda: runpy.run_path(str(ROOT / command), run_name="__main__") and 0
    module, _, function = of_setup()["commands"][command].partition(":")
    entry: Callable[[], Any] = getattr(importlib.import_module(module), function)
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
