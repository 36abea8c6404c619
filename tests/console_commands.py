"""The console commands of setup.py, called in this process."""

import ast
import contextlib
import importlib
import io
import pathlib
import sys
from collections.abc import Callable, Mapping
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
    found = []

    def record(
        description: str,
        define_flags: Callable[[flags.FlagValues], None],
        main: Any,
        argv: Any = None,
    ) -> int:
        found.append(command_line.flags_of(define_flags))
        return 0

    with mock.patch.object(command_line, "run", record):
        call(command)
    return found[0]


def call(command: str, *arguments: str) -> Ended:
    """Calls a command by its entry point, as a console script would."""
    module, _, function = of_setup()["commands"][command].partition(":")
    run = getattr(importlib.import_module(module), function)
    printed, errors = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", [command, *arguments]),
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(errors),
    ):
        try:
            run()
        except SystemExit as ended:
            return Ended(ended.code, printed.getvalue(), errors.getvalue())
    raise AssertionError(f"{command} did not exit.")
