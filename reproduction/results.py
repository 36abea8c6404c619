"""What experiments have found, on disk: one JSON file and one figure each."""

import dataclasses
import hashlib
import importlib.metadata
import json
import math
import pathlib
import platform
from typing import Any

from mf_aggregators import version
from reproduction import figures
from reproduction.experiment import Experiment, Outcome, Row
from simulations import atomic_files

_PACKAGES = ("numpy", "scipy", "dp-accounting", "matplotlib")


class DamagedResultError(ValueError):
    """A result that is not as it was written; the message names the file."""


@dataclasses.dataclass(frozen=True)
class Result:
    """The outcome of an experiment, and how it came about.

    Attributes:
      name: The experiment's name.
      source: The paper and the place in it.
      title: What it shows.
      rows: The numbers.
      notes: What a reader has to know.
      seconds: Wall time; less where factorizations came from the cache.
      command: What computes it again.
      versions: Of the packages that it was computed with, and of Python.
      processors: The processors of the machine.
    """

    name: str
    source: str
    title: str
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    seconds: float
    command: str
    versions: dict[str, str]
    processors: int

    @property
    def figure_file(self) -> str:
        """The name of its figure, beside its own file."""
        return f"{self.name}.png"


def versions() -> dict[str, str]:
    """Returns the versions of what numbers depend on, by package."""
    return {
        "mf-aggregators": version.__version__,
        "python": platform.python_version(),
        **{package: importlib.metadata.version(package) for package in _PACKAGES},
    }


def save(
    experiment: Experiment,
    outcome: Outcome,
    seconds: float,
    processors: int,
    directory: pathlib.Path,
) -> Result:
    """Writes an outcome, the figure first, so that a result is there only when it is whole.

    Args:
      experiment: The experiment.
      outcome: What it has found.
      seconds: Its wall time.
      processors: The processors of the machine.
      directory: Where it goes.

    Returns:
      The result.

    Raises:
      OSError: If it cannot be written.
    """
    result = Result(
        experiment.name,
        experiment.source,
        experiment.title,
        outcome.rows,
        outcome.notes,
        seconds,
        f"reproduce-paper --only={experiment.name}",
        versions(),
        processors,
    )
    with atomic_files.writing(directory / result.figure_file) as file:
        figures.save(outcome.figure, file)
    contents = _contents(result)
    text = json.dumps({**contents, "sha256": _digest(contents)}, indent=1)
    atomic_files.write_text(directory / f"{result.name}.json", text + "\n")
    return result


def load(experiment: Experiment, directory: pathlib.Path) -> Result | None:
    """Reads the result of an experiment.

    Args:
      experiment: The experiment.
      directory: Where :func:`save` wrote it.

    Returns:
      The result; None if there is none, or if it is of another version of the library.

    Raises:
      DamagedResultError: If it cannot be read, is not whole, was altered or has no figure.
    """
    path = directory / f"{experiment.name}.json"
    if not path.exists():
        return None
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
        stated = contents.pop("sha256")
        if stated != _digest(contents):
            raise DamagedResultError(f"{path} was altered.")
        result = _result(contents)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, DamagedResultError):
            raise
        raise DamagedResultError(f"{path} cannot be read ({error}).") from error
    if not (directory / result.figure_file).exists():
        raise DamagedResultError(f"{directory / result.figure_file} is missing.")
    return result if result.versions.get("mf-aggregators") == version.__version__ else None


def _contents(result: Result) -> dict[str, Any]:
    contents = dataclasses.asdict(result)
    contents["rows"] = [
        # JSON has no infinity.
        {**row, "ours": row["ours"] if math.isfinite(row["ours"]) else str(row["ours"])}
        for row in contents["rows"]
    ]
    as_read: dict[str, Any] = json.loads(json.dumps(contents))
    return as_read


def _result(contents: dict[str, Any]) -> Result:
    rows = tuple(Row(**{**row, "ours": float(row["ours"])}) for row in contents["rows"])
    return Result(**{**contents, "rows": rows, "notes": tuple(contents["notes"])})


def _digest(contents: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()
