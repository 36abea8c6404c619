"""What runs that are compared must share besides their flags: versions of packages, and data."""

import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from mf_aggregators import validation
from mf_aggregators.commands.command_line import CommandError
from simulations.runs import federated_runs, run_directory
from simulations.runs.run_directory import RunDirectory

_WHAT_TO_DO = (
    "they cannot be compared. Choose another --output_dir, or delete the results and directories "
    "of the older runs."
)


def check_alike(directories: Iterable[pathlib.Path]) -> None:
    """Checks that runs had the same versions of packages and the same data.

    What a run has not written, because it has not come so far, or what was deleted since, is
    not compared.

    Args:
      directories: The directories of the runs.

    Raises:
      CommandError: If two of them differ; the message names both and what to do.
    """
    runs = [RunDirectory(path) for path in directories]
    _check_equal(
        {run.path: _kept(run.path / run_directory.CONFIG_FILE, "versions") for run in runs}
    )
    _check_equal({run.path: _kept(run.data, "fingerprint") for run in runs})


def check_versions(directories: Iterable[pathlib.Path]) -> None:
    """Checks that runs had the versions of packages that further ones would have now.

    Args:
      directories: The directories of the runs.

    Raises:
      CommandError: If one had others; the message names it and what to do.
    """
    now = federated_runs.versions()
    for path in directories:
        versions = _kept(path / run_directory.CONFIG_FILE, "versions")
        if versions is not None and versions != now:
            raise CommandError(
                f"{path} is of other versions of packages than further runs would be "
                f"({_difference(versions, now)}): {_WHAT_TO_DO}"
            )


def _check_equal(kept: Mapping[pathlib.Path, Any]) -> None:
    known = {path: value for path, value in kept.items() if value is not None}
    if not known:
        return
    first, expected = next(iter(known.items()))
    for path, value in known.items():
        if value != expected:
            difference = (
                f"versions of packages ({_difference(expected, value)})"
                if isinstance(value, dict)
                else "data"
            )
            raise CommandError(f"{first} and {path} are of different {difference}: {_WHAT_TO_DO}")


def _difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{package} {one.get(package)} and {other.get(package)}"
        for package in sorted({*one, *other})
        if one.get(package) != other.get(package)
    )


def _kept(path: pathlib.Path, name: str) -> Any:
    """An entry of a JSON file; None if the file is not there or not readable."""
    try:
        contents = validation.parsed_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return contents.get(name) if isinstance(contents, dict) else None
