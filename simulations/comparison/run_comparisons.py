"""What repeated runs show: accuracies with intervals, and which of them are apart."""

import csv
import dataclasses
import itertools
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import scipy.stats

from mf_aggregators.printed_guarantees import rounded_up
from simulations.comparison.repeated_runs import FinishedRun
from simulations.runs import round_records, run_directory

if TYPE_CHECKING:
    # matplotlib is imported when something is drawn.
    from mf_aggregators import figures
    from simulations.runs import run_figures

CONFIDENCE = 0.95

_EPSILON_TOLERANCE = 1e-3
_METRIC = "heldout_accuracy"


@dataclasses.dataclass(frozen=True)
class Row:
    """The repetitions of one mechanism.

    Attributes:
      mechanism: The mechanism.
      repetitions: How many runs there are.
      test_accuracy_mean: The mean of their test accuracies, fractions.
      test_accuracy_half_width: Half the width of the 95 % interval of Student's t around the
        mean, for accuracies that are normally distributed over runs; None for a single run.
      test_accuracy_min: The smallest.
      test_accuracy_max: The largest.
      epsilon: The largest epsilon of a run; None if one of them is not private.
      delta: The largest delta of a run; None if one of them is not private.
      seconds_mean: The mean wall time of the runs that were never resumed; None if there
        is none.
    """

    mechanism: str
    repetitions: int
    test_accuracy_mean: float
    test_accuracy_half_width: float | None
    test_accuracy_min: float
    test_accuracy_max: float
    epsilon: float | None
    delta: float | None
    seconds_mean: float | None


def summarise(runs: Mapping[str, Sequence[FinishedRun]]) -> tuple[Row, ...]:
    """Summarises repeated runs.

    Args:
      runs: By mechanism its runs, at least one.

    Returns:
      A row for each mechanism: those that are not private first, for what privacy is compared
      with, and then the highest mean test accuracy first.

    Raises:
      ValueError: If a mechanism has no run.
    """
    rows = [_row(mechanism, finished) for mechanism, finished in runs.items()]
    return tuple(sorted(rows, key=lambda row: (row.epsilon is not None, -row.test_accuracy_mean)))


def _row(mechanism: str, runs: Sequence[FinishedRun]) -> Row:
    if not runs:
        raise ValueError(f"there must be at least one run of {mechanism}.")
    accuracies = np.array([run.test_accuracy for run in runs], dtype=np.float64)
    half_width = None
    if len(runs) > 1:
        quantile = scipy.stats.t.ppf(0.5 + CONFIDENCE / 2.0, len(runs) - 1)
        half_width = float(quantile * np.std(accuracies, ddof=1) / math.sqrt(len(runs)))
    seconds = [run.seconds for run in runs if run.seconds is not None]
    return Row(
        mechanism=mechanism,
        repetitions=len(runs),
        test_accuracy_mean=float(np.mean(accuracies)),
        test_accuracy_half_width=half_width,
        test_accuracy_min=float(np.min(accuracies)),
        test_accuracy_max=float(np.max(accuracies)),
        epsilon=_largest([run.epsilon for run in runs]),
        delta=_largest([run.delta for run in runs]),
        seconds_mean=float(np.mean(seconds)) if seconds else None,
    )


def _largest(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return max(known) if len(known) == len(values) else None


def separated(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Returns the pairs of rows whose intervals do not overlap.

    Args:
      rows: The rows, in any order.

    Returns:
      Pairs of mechanisms, the higher first, in the order of their means. Single runs have no
      interval, and are in none.
    """
    intervals = [
        (row.test_accuracy_mean, row.test_accuracy_half_width, row.mechanism)
        for row in sorted(rows, key=lambda row: -row.test_accuracy_mean)
    ]
    return [
        (higher, lower)
        for (mean, width, higher), (lower_mean, lower_width, lower) in itertools.combinations(
            intervals, 2
        )
        if width is not None and lower_width is not None and mean - width > lower_mean + lower_width
    ]


def unfairness(runs: Mapping[str, Sequence[FinishedRun]]) -> str | None:
    """Returns why accuracies of these runs say nothing of their mechanisms.

    Args:
      runs: By mechanism its runs.

    Returns:
      One sentence if the private runs have epsilons that differ by more than 0.1 %, or
      other deltas, or some run has another number of rounds; else None.
    """
    every = [run for of_mechanism in runs.values() for run in of_mechanism]
    epsilons = [run.epsilon for run in every if run.epsilon is not None]
    if epsilons and max(epsilons) > (1.0 + _EPSILON_TOLERANCE) * min(epsilons):
        return (
            f"the private runs have epsilons from {rounded_up(min(epsilons), '.5g')} to "
            f"{rounded_up(max(epsilons), '.5g')}, "
            "and less noise is more accurate under any mechanism."
        )
    deltas = sorted({run.delta for run in every if run.delta is not None})
    if len(deltas) > 1:
        return (
            f"the private runs have deltas from {rounded_up(deltas[0], '.6g')} to "
            f"{rounded_up(deltas[-1], '.6g')}."
        )
    rounds = sorted({run.rounds for run in every})
    if len(rounds) > 1:
        return f"the runs have from {rounds[0]} to {rounds[-1]} rounds."
    return None


def separation_line(rows: Sequence[Row], pairs: Sequence[tuple[str, str]], why: str | None) -> str:
    """Returns one sentence on the order that intervals support.

    Args:
      rows: The rows.
      pairs: What :func:`separated` returned for them.
      why: What :func:`unfairness` returned.
    """
    if why is not None:
        return f"This comparison is not fair, and claims no order: {why}"
    if len(rows) == 1:
        return "A single mechanism is compared with nothing."
    if any(row.test_accuracy_half_width is None for row in rows):
        return "Single runs have no interval, and no order is claimed."
    if not pairs:
        return "Intervals of all mechanisms overlap, and no order is claimed."
    listed = ", ".join(f"{higher} above {lower}" for higher, lower in pairs)
    return f"With non-overlapping intervals: {listed}."


def to_markdown(rows: Sequence[Row]) -> str:
    """Returns a Markdown table whose columns are aligned, for people to read as it is.

    Args:
      rows: The rows, in their order.
    """

    def percent(fraction: float | None) -> str:
        return "-" if fraction is None else f"{100 * fraction:.2f} %"

    header = ["mechanism", "test accuracy", "95 % interval", "min", "max", "epsilon", "delta"]
    cells = [
        [*header, "runs", "minutes"],
        *(
            [
                row.mechanism,
                percent(row.test_accuracy_mean),
                "-"
                if row.test_accuracy_half_width is None
                else f"± {percent(row.test_accuracy_half_width)}",
                percent(row.test_accuracy_min),
                percent(row.test_accuracy_max),
                "-" if row.epsilon is None else rounded_up(row.epsilon, ".3f"),
                "-" if row.delta is None else rounded_up(row.delta, ".6g"),
                str(row.repetitions),
                "-" if row.seconds_mean is None else f"{row.seconds_mean / 60.0:.1f}",
            ]
            for row in rows
        ),
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    # The first column is of names; the others are of numbers.
    cells.insert(1, ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
    return "\n".join(
        "| "
        + " | ".join(
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        + " |"
        for line in cells
    )


def draw(
    directories: Mapping[str, Sequence[pathlib.Path]],
    rows: Sequence[Row],
    path: pathlib.Path,
    title: str,
) -> list[str]:
    """Draws test accuracies, and held-out accuracy by round, means with intervals.

    Args:
      directories: By mechanism, the directories of its runs.
      rows: What :func:`summarise` returned for them, in the order of the figure.
      path: The PNG file; nothing is left there if there is nothing to draw.
      title: The title above the figure.

    Returns:
      The mechanisms that are left out, because no round has the metric in all of their runs.

    Raises:
      OSError: If a file cannot be read or written.
    """
    from simulations.runs import run_figures

    series = {
        mechanism: [_metrics(directory) for directory in directories[mechanism]]
        for mechanism in (row.mechanism for row in rows)
    }
    left_out = [
        mechanism
        for mechanism, metrics in series.items()
        if len(run_figures.mean_curve(metrics, _METRIC, CONFIDENCE).rounds) == 0
    ]
    drawn = {name: metrics for name, metrics in series.items() if name not in left_out}
    path.unlink(missing_ok=True)
    if drawn:
        run_figures.compare(
            drawn,
            path,
            title=title,
            accuracies=[_interval(row) for row in rows],
            name=_METRIC,
            confidence=CONFIDENCE,
        )
    return left_out


def _interval(row: Row) -> "figures.Interval":
    """The test accuracy of a mechanism, in percent."""
    from mf_aggregators import figures

    half_width = row.test_accuracy_half_width
    return figures.Interval(
        row.mechanism,
        100.0 * row.test_accuracy_mean,
        None if half_width is None else 100.0 * half_width,
        100.0 * row.test_accuracy_min,
        100.0 * row.test_accuracy_max,
    )


def mean_accuracy(directories: Sequence[pathlib.Path]) -> "run_figures.MeanCurve":
    """Returns the mean held-out accuracy by round over runs.

    Args:
      directories: The runs' directories.

    Raises:
      OSError: If a file cannot be read.
      RunDirectoryError: If one holds no metrics.
    """
    from simulations.runs import run_figures

    metrics = [_metrics(directory) for directory in directories]
    return run_figures.mean_curve(metrics, _METRIC, CONFIDENCE)


def _metrics(directory: pathlib.Path) -> list[dict[str, str]]:
    path = directory / run_directory.METRICS_FILE
    round_records.check_metrics(path)
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        return list(csv.DictReader(file))
