"""Which code an experiment's numbers follow from."""

import ast
import functools
import hashlib
import pathlib
from typing import Any

from reproduction.experiment import Experiment

_PACKAGE = "reproduction"


def fingerprint(experiment: Experiment) -> str:
    """Returns what tells versions of an experiment's code and printed tables apart.

    Args:
      experiment: The experiment.

    Returns:
      A digest of the module that computes it and of all that this one imports from this
      package, directly or not. Other experiments' modules do not count, so that a change there
      leaves a result of hours as it is. What is outside of this package is told apart by the
      versions that results have.
    """
    run: Any = experiment.run
    while isinstance(run, functools.partial):
        run = run.func
    digest = hashlib.sha256()
    for name in sorted(_needed(run.__module__.removeprefix(f"{_PACKAGE}."))):
        digest.update(name.encode() + b"\0" + _path(name).read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _needed(module: str) -> set[str]:
    """The module and those of this package that it imports, directly or not."""
    found: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += _imported(_path(name).read_text(encoding="utf-8"))
    return found


def _imported(source: str) -> list[str]:
    """The modules of this package that a source imports."""
    names: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            # What is imported from the package itself are modules; from a module, its contents.
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    own = [name.removeprefix(f"{_PACKAGE}.") for name in names if name.startswith(f"{_PACKAGE}.")]
    return [name for name in own if _path(name).exists()]


def _path(module: str) -> pathlib.Path:
    return pathlib.Path(__file__).with_name(f"{module}.py")
