"""Saves and loads results of experiments, and writes a report of all results."""

import collections
import dataclasses
import hashlib
import html
import importlib.metadata
import json
import math
import pathlib
import platform
import re
from collections.abc import Sequence

from mf_aggregators import __version__, atomic_files, inputs
from mf_aggregators.kernel.numbers import Error
from reproduction.experiment import (
    AGREES,
    DIFFERS,
    FAILS,
    HOLDS,
    NOT_PRINTED,
    Drawing,
    Row,
)

# The packages that a result's numbers depend on, so without those that draw figures.
_PACKAGES = ("numpy", "scipy", "dp-accounting")
_LIST_OF_NUMBERS = re.compile(r"\[[-+\d.eE,\s]+\]")
MARKDOWN_FILE = "report.md"

_REPORT_TITLE = "Printed and recomputed"


class DamagedResultError(Error, ValueError):
    """A saved result is damaged; the message names the file."""


@dataclasses.dataclass(frozen=True)
class Result:
    """Saved result of an experiment: its outcome, and how it was computed.

    Attributes:
      name: The experiment's name, with the data set if it is not the usual one.
      source: The paper and the place in it.
      title: What the table or figure shows.
      rows: The numbers.
      notes: Remarks for readers.
      drawing: The data of the figure.
      seconds: Wall time; less where factorizations came from the cache.
      command: The command that computes the result again.
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


def versions() -> dict[str, str]:
    """Returns the versions of the packages that numbers depend on."""
    return {
        "mf-aggregators": __version__,
        "python": platform.python_version(),
        **{package: importlib.metadata.version(package) for package in _PACKAGES},
    }


def save(result: Result, directory: pathlib.Path) -> None:
    """Writes a result and its figure; the result has the figure's hash.

    Args:
      result: The result.
      directory: Where the result goes.

    Raises:
      OSError: If a file cannot be written.
    """
    # Import here, because matplotlib is installed only with the extra ``reports``.
    from mf_aggregators import figures
    from reproduction import drawings

    with atomic_files.writing(directory / f"{result.name}.png") as file:
        figures.save(drawings.draw(result.drawing), file)
    contents = {
        **_contents(result),
        "figure_sha256": _sha256(directory / f"{result.name}.png"),
    }
    text = json.dumps({**contents, "sha256": _digest(contents)}, indent=1)
    # Put each list of numbers on one line of the JSON file.
    text = _LIST_OF_NUMBERS.sub(lambda found: " ".join(found[0].split()), text)
    atomic_files.write(directory / f"{result.name}.json", text + "\n")


def load(name: str, directory: pathlib.Path) -> Result | None:
    """Reads a saved result of an experiment.

    Args:
      name: The result's name.
      directory: Where :func:`save` wrote it.

    Returns:
      The result; None if there is none.

    Raises:
      DamagedResultError: If it cannot be read, is incomplete, was altered, or its figure
        is not the one that was drawn with it.
    """
    if not (directory / f"{name}.json").exists():
        return None
    result, figure = _read(directory / f"{name}.json")
    try:
        found = _sha256(directory / f"{result.name}.png")
    except OSError as error:
        raise DamagedResultError(f"{directory / result.name}.png is missing.") from error
    if found != figure:
        raise DamagedResultError(f"{directory / name}.png is not that of {directory / name}.json.")
    return result


def _read(path: pathlib.Path) -> tuple[Result, str]:
    """Reads a result's JSON file; returns the result and the SHA-256 of its figure."""
    try:
        contents = inputs.part(inputs.parsed_json(path.read_text(encoding="utf-8")), dict)
        stated = contents.pop("sha256")
        if stated != _digest(contents):
            raise DamagedResultError(f"{path} was altered.")
        # Ignore the entry "code", which results of earlier versions have.
        contents.pop("code", None)
        figure = contents.pop("figure_sha256")
        return _result(contents), figure
    except DamagedResultError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedResultError(f"{path} cannot be read ({error}).") from error


def _sha256(path: pathlib.Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _contents(result: Result) -> dict[str, object]:
    contents = dataclasses.asdict(result)
    contents["rows"] = [
        # Infinite and undefined numbers become text, because JSON has none.
        {**row, "ours": row["ours"] if math.isfinite(row["ours"]) else str(row["ours"])}
        for row in contents["rows"]
    ]
    as_read: dict[str, object] = json.loads(json.dumps(contents))  # noqa: TID251
    return as_read


def _result(contents: dict[str, object]) -> Result:
    entries = inputs.part(contents, list, "rows")
    rows = tuple(Row(**{**row, "ours": float(row["ours"])}) for row in entries)
    drawing = Drawing(**inputs.part(contents, dict, "drawing"))
    made = {"rows": rows, "notes": tuple(inputs.part(contents, list, "notes")), "drawing": drawing}
    return Result(**{**contents, **made})  # type: ignore[arg-type]  # As _contents wrote them.


def _digest(contents: dict[str, object]) -> str:
    return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()


def write_report(
    results: Sequence[Result],
    missing: Sequence[str],
    directory: pathlib.Path,
) -> None:
    """Writes the report to the directory of the results.

    Args:
      results: In the order of the report.
      missing: Names of experiments that have no result yet.
      directory: Where the results' figures are.

    Raises:
      OSError: If a file cannot be written.
    """
    lines = [f"# {_REPORT_TITLE}", "", *_opening(results), *_differences(results)]
    lines += ["## Experiments", "", *_summary(results), ""]
    if missing:
        lines += [f"Not computed yet: {', '.join(f'`{name}`' for name in missing)}.", ""]
    for result in results:
        lines += _section(result)
    text = "\n".join(lines).rstrip() + "\n"
    atomic_files.write(directory / MARKDOWN_FILE, text)


def verdict(rows: Sequence[Row]) -> str:
    """Returns one line that says how many numbers agree, and by how much others differ.

    Args:
      rows: The rows of an experiment.

    Returns:
      ``agreed: ...`` or ``differs: ...`` for printed numbers, and how many claims in words
      hold.
    """
    counts = collections.Counter(row.verdict for row in rows)
    words = []
    printed = counts[AGREES] + counts[DIFFERS]
    if counts[DIFFERS]:
        differences = [
            abs(row.relative_difference)
            for row in rows
            if row.verdict == DIFFERS and row.relative_difference is not None
        ]
        by = f", by at most {100.0 * max(differences):.3g} %" if differences else ""
        words.append(f"differs: {counts[DIFFERS]} of {printed} printed numbers{by}")
    elif printed:
        words.append(f"agreed: all {printed} printed numbers, to their printed digits")
    claims = counts[HOLDS] + counts[FAILS]
    if claims:
        words.append(f"{counts[HOLDS]} of {claims} statements in words hold")
    return "; ".join(words) or f"nothing printed to compare with ({len(rows)} numbers of ours)"


def _opening(results: Sequence[Result]) -> list[str]:
    counts = collections.Counter(row.verdict for result in results for row in result.rows)
    printed, claims = counts[AGREES] + counts[DIFFERS], counts[HOLDS] + counts[FAILS]
    return [
        f"**{counts[AGREES]} of {printed} printed numbers agree** to their printed digits, or keep "
        f"a printed bound. {counts[DIFFERS]} differ, and stand below with their reasons. Of what "
        f"papers say in words, {counts[HOLDS]} of {claims} statements hold. {counts[NOT_PRINTED]} "
        "numbers of ours have nothing printed beside them.",
        "",
    ]


def _differences(results: Sequence[Result]) -> list[str]:
    """Lists the numbers that differ and the claims that fail, grouped by experiment and reason."""
    lines = ["## Differences", ""]
    for result in results:
        by_reason: dict[str, list[Row]] = {}
        for row in result.rows:
            if row.verdict in (DIFFERS, FAILS):
                by_reason.setdefault(row.explanation or "", []).append(row)
        if not by_reason:
            continue
        lines += [f"[{result.name}](#{result.name}), {result.source}:", ""]
        for reason, rows in by_reason.items():
            lines += [
                *([f"{reason[0].upper()}{reason[1:]}.", ""] if reason else []),
                "| where | quantity | paper | ours | verdict |",
                "| --- | --- | --- | --- | --- |",
                *(f"{_numbers(row)} {_cell(_verdict_of(row))} |" for row in rows),
                "",
            ]
    return lines


def _numbers(row: Row) -> str:
    return (
        f"| {_cell(row.row)} | {_cell(row.quantity)} | {_cell(row.printed or '-')} | "
        f"{row.ours:.6g} |"
    )


def _summary(results: Sequence[Result]) -> list[str]:
    lines = ["| experiment | what | verdict | seconds |", "| --- | --- | --- | --- |"]
    lines += [
        f"| [{result.name}](#{result.name}) | {_cell(result.source)} | "
        f"{_cell(verdict(result.rows))} | {result.seconds:.0f} |"
        for result in results
    ]
    versions = {", ".join(f"{k} {v}" for k, v in result.versions.items()) for result in results}
    lines += [
        "",
        "Seconds leave out matrices that came from the cache and runs that had finished before.",
        "",
        "Errors of factorizations are at sensitivity 1 and noise multiplier 1 unless a row says "
        "otherwise.",
        "",
        *(f"Versions: {version}." for version in sorted(versions)),
    ]
    return lines


def _section(result: Result) -> list[str]:
    lines = [
        f"### {result.name}",
        "",
        f"{result.source}. {result.title}.",
        "",
        f"`{result.command}` ({result.seconds:.0f} s, mf-aggregators "
        f"{result.versions['mf-aggregators']}): {verdict(result.rows)}.",
        "",
        f"![{result.title}]({result.name}.png)",
        "",
        f'<details markdown="1"><summary>All {len(result.rows)} numbers</summary>',
        "",
        "| where | quantity | paper | ours | verdict |",
        "| --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"{_numbers(row)} {_cell(_verdict_of(row))}"
        f"{_cell(f' ({row.explanation})') if row.explanation else ''} |"
        for row in result.rows
    ]
    lines += ["", "</details>"]
    for note in result.notes:
        lines += ["", note]
    return [*lines, ""]


def _verdict_of(row: Row) -> str:
    if row.verdict == DIFFERS and row.relative_difference is not None:
        return f"{row.verdict} by {100.0 * row.relative_difference:+.3g} %"
    return row.verdict


def _cell(text: str) -> str:
    # Escape comparison signs, which are not markup, and bars, which would end the table's cell.
    return html.escape(text, quote=False).replace("|", "\\|")
