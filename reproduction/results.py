"""What experiments have found, on disk: one JSON file and one figure each."""

import dataclasses
import hashlib
import importlib.metadata
import json
import math
import pathlib
import platform
import re
from typing import Any

from mf_aggregators import __version__, atomic_files, validation
from reproduction.experiment import Drawing, Row

# What draws figures is not among them: numbers do not follow from it.
_PACKAGES = ("numpy", "scipy", "dp-accounting")


_LIST_OF_NUMBERS = re.compile(r"\[[-+\d.eE,\s]+\]")


class DamagedResultError(ValueError):
    """A result that is not as it was written; the message names the file."""


@dataclasses.dataclass(frozen=True)
class Result:
    """The outcome of an experiment, and how it came about.

    Attributes:
      name: The experiment's name, with the data set if it is not the usual one.
      source: The paper and the place in it.
      title: What it shows.
      rows: The numbers.
      notes: What a reader has to know.
      drawing: What its figure shows.
      seconds: Wall time; less where factorizations came from the cache.
      command: What computes it again.
      versions: The versions of the packages that it was computed with, and of Python.
      processors: The processors of the machine.
    """

    name: str
    source: str
    title: str
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    drawing: Drawing
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
        "mf-aggregators": __version__,
        "python": platform.python_version(),
        **{package: importlib.metadata.version(package) for package in _PACKAGES},
    }


def save(result: Result, code: str, directory: pathlib.Path) -> None:
    """Writes a result and its figure, which belong together by the figure's hash.

    Args:
      result: The result.
      code: The fingerprint of the experiment's code, see ``source_code``.
      directory: Where it goes.

    Raises:
      OSError: If it cannot be written.
    """
    # matplotlib is of the extra ``reports``.
    from mf_aggregators import figures
    from reproduction import drawings

    with atomic_files.writing(directory / result.figure_file) as file:
        figures.save(drawings.draw(result.drawing), file)
    contents = {
        **_contents(result),
        "code": code,
        "figure_sha256": _sha256(directory / result.figure_file),
    }
    text = json.dumps({**contents, "sha256": _digest(contents)}, indent=1)
    # A list of numbers is one line.
    text = _LIST_OF_NUMBERS.sub(lambda found: " ".join(found[0].split()), text)
    atomic_files.write_text(directory / f"{result.name}.json", text + "\n")


def load(
    name: str, code: str, directory: pathlib.Path, *, of_other_code: bool = False
) -> Result | None:
    """Reads a result.

    Args:
      name: The result's name.
      code: The fingerprint of the experiment's code.
      directory: Where :func:`save` wrote it.
      of_other_code: Whether to return a result of other code or other versions instead.

    Returns:
      The result; None if there is none, or if it is of the other kind.

    Raises:
      DamagedResultError: If it cannot be read, is not whole, was altered, or its figure is
        not the one that was drawn with it.
    """
    if not (directory / f"{name}.json").exists():
        return None
    result, of_code, figure = _read(directory / f"{name}.json")
    try:
        found = _sha256(directory / result.figure_file)
    except OSError as error:
        raise DamagedResultError(f"{directory / result.figure_file} is missing.") from error
    if found != figure:
        raise DamagedResultError(
            f"{directory / result.figure_file} is not that of {directory / f'{name}.json'}."
        )
    is_of_this = of_code == code and result.versions == versions()
    return result if is_of_this != of_other_code else None


def redraw(name: str, directory: pathlib.Path) -> bool:
    """Draws the figure of a result again, from what the result keeps of it.

    Args:
      name: The result's name.
      directory: Where :func:`save` wrote it.

    Returns:
      Whether there is such a result, of whichever code; its numbers stay as they are.

    Raises:
      DamagedResultError: If it cannot be read, is not whole, or was altered.
      OSError: If it cannot be written.
    """
    path = directory / f"{name}.json"
    if not path.exists():
        return False
    result, code, _ = _read(path)
    save(result, code, directory)
    return True


def _read(path: pathlib.Path) -> tuple[Result, str, str]:
    """A result, the fingerprint of its code, and the hash of its figure."""
    try:
        contents = validation.parsed_json(path.read_text(encoding="utf-8"))
        stated = contents.pop("sha256")
        if stated != _digest(contents):
            raise DamagedResultError(f"{path} was altered.")
        code, figure = contents.pop("code"), contents.pop("figure_sha256")
        return _result(contents), code, figure
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, DamagedResultError):
            raise
        raise DamagedResultError(f"{path} cannot be read ({error}).") from error


def _sha256(path: pathlib.Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _contents(result: Result) -> dict[str, Any]:
    contents = dataclasses.asdict(result)
    contents["rows"] = [
        # JSON has no infinity.
        {**row, "ours": row["ours"] if math.isfinite(row["ours"]) else str(row["ours"])}
        for row in contents["rows"]
    ]
    as_read: dict[str, Any] = json.loads(json.dumps(contents))  # noqa: TID251
    return as_read


def _result(contents: dict[str, Any]) -> Result:
    rows = tuple(Row(**{**row, "ours": float(row["ours"])}) for row in contents["rows"])
    drawing = Drawing(**contents["drawing"])
    return Result(
        **{**contents, "rows": rows, "notes": tuple(contents["notes"]), "drawing": drawing}
    )


def _digest(contents: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()
