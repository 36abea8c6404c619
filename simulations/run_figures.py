"""Figures of finished runs: one run from its ``metrics.csv``, and mechanisms beside each other.

Nothing here keeps a state between figures: matplotlib's own figure objects are used, not
pyplot, and no window is opened.
"""

import dataclasses
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import matplotlib.backends.backend_agg
import matplotlib.figure
import numpy as np
import scipy.stats

from simulations import atomic_files

# A row of metrics.csv: text, as csv.DictReader gives it, or numbers.
Row: TypeAlias = Mapping[str, Any]

_DOTS_PER_INCH = 120
# Rounds between evaluations leave single points, which a line alone would not show.
_MOST_MARKED_POINTS = 60


def column(rows: Sequence[Row], name: str) -> np.ndarray:
    """Returns a column of ``metrics.csv`` as numbers.

    Args:
      rows: The rows: mappings from the names of columns to numbers or their text.
      name: The column.

    Returns:
      (len(rows),) float64, NaN where a row has no such cell, an empty one, or one that is no
      finite number.
    """
    return np.array([_number(row.get(name)) for row in rows], dtype=np.float64)


def _number(cell: Any) -> float:
    try:
        number = float(cell)
    except (TypeError, ValueError):
        return math.nan
    return number if math.isfinite(number) else math.nan


@dataclasses.dataclass(frozen=True)
class _Line:
    """A line of a panel: the column, its name in the legend, and what its values are times."""

    column: str
    label: str
    factor: float = 1.0
    style: str = "-"


@dataclasses.dataclass(frozen=True)
class _Panel:
    """Axes of a figure: lines, and levels that hold for the whole run."""

    label: str
    lines: tuple[_Line, ...]
    levels: tuple[tuple[str, float | None], ...] = ()
    # Fractions, drawn against an axis of their own on the right.
    shares: tuple[_Line, ...] = ()
    logarithmic: bool = False

    def has_data(self, rows: Sequence[Row]) -> bool:
        """Whether any of its lines has a point."""
        return any(
            np.any(np.isfinite(column(rows, line.column))) for line in (*self.lines, *self.shares)
        )


def draw(
    rows: Sequence[Row],
    path: str | os.PathLike[str],
    title: str,
    *,
    clip_norm: float | None = None,
    planned_epsilon: float | None = None,
    delta: float | None = None,
    clients_per_round: int | None = None,
) -> None:
    """Draws the figure of a run and writes it, whole or not at all.

    Its panels are accuracy, loss, norms of the clients' updates with the clipped and zeroed
    fractions, norms of noise and released mean, clients who might have joined, and the
    privacy budget. A panel without any data is left out; a missing or empty cell is a gap
    that its line goes straight across.

    Args:
      rows: The rows of ``metrics.csv``, in any order: mappings from the columns ``round``,
        ``train_loss``, ``train_accuracy``, ``heldout_loss``, ``heldout_accuracy``,
        ``eligible_clients``, ``available_clients``, ``update_norm``, ``max_update_norm``,
        ``clipped_fraction``, ``zeroed_fraction``, ``noise_norm``, ``released_norm`` and
        ``epsilon_spent`` to numbers or their text. Others are not looked at; a row without
        its round is left out.
      path: The file; its suffix, ``.png``, ``.pdf`` or ``.svg``, is its format. What stands
        there is replaced.
      title: What stands above.
      clip_norm: Drawn as a level beside the norms of updates.
      planned_epsilon: Drawn as a level beside the budget that was spent; None or infinity
        for none.
      delta: Of both, for the label.
      clients_per_round: Drawn as a level beside the clients who might have joined.

    Raises:
      OSError: If the file cannot be written.
      ValueError: If the suffix is another.
    """
    figure = run_figure(
        rows,
        title,
        clip_norm=clip_norm,
        planned_epsilon=planned_epsilon,
        delta=delta,
        clients_per_round=clients_per_round,
    )
    _write(figure, path)


def run_figure(
    rows: Sequence[Row],
    title: str,
    *,
    clip_norm: float | None = None,
    planned_epsilon: float | None = None,
    delta: float | None = None,
    clients_per_round: int | None = None,
) -> matplotlib.figure.Figure:
    """Returns the figure that :func:`draw` writes; the arguments are the same."""
    at_delta = "" if delta is None else f" at delta {delta:g}"
    panels = (
        _Panel(
            "accuracy, %",
            (
                _Line("train_accuracy", "training", 100.0),
                _Line("heldout_accuracy", "held out", 100.0),
            ),
        ),
        _Panel("loss", (_Line("train_loss", "training"), _Line("heldout_loss", "held out"))),
        _Panel(
            "L2 norm of updates",
            (_Line("update_norm", "mean"), _Line("max_update_norm", "largest", style=":")),
            (("clip norm", clip_norm),),
            (
                _Line("clipped_fraction", "clipped", 100.0, ":"),
                _Line("zeroed_fraction", "zeroed", 100.0, "--"),
            ),
            logarithmic=True,
        ),
        _Panel(
            "L2 norm",
            (_Line("released_norm", "released mean"), _Line("noise_norm", "noise in it")),
            logarithmic=True,
        ),
        _Panel(
            "clients",
            (
                _Line("eligible_clients", "timer allows it"),
                _Line("available_clients", "and available"),
            ),
            (("clients per round", clients_per_round),),
        ),
        _Panel(
            f"epsilon{at_delta}",
            (_Line("epsilon_spent", "spent"),),
            (("planned", planned_epsilon),),
        ),
    )
    rows = sorted(
        (row for row in rows if math.isfinite(_number(row.get("round")))),
        key=lambda row: _number(row["round"]),
    )
    drawn = [panel for panel in panels if panel.has_data(rows)]
    columns = min(3, max(1, len(drawn)))
    lines = max(1, -(-len(drawn) // columns))
    figure = _figure(5.0 * columns, 3.4 * lines)
    figure.suptitle(title)
    axes = figure.subplots(lines, columns, squeeze=False).ravel()
    for each, panel in zip(axes, drawn, strict=False):
        _draw_panel(each, panel, rows)
    for each in axes[len(drawn) :]:
        each.set_axis_off()
    if not drawn:
        axes[0].text(0.5, 0.5, "no metrics", ha="center", va="center")
    return figure


def _draw_panel(axes: Any, panel: _Panel, rows: Sequence[Row]) -> None:
    _draw_lines(axes, panel.lines, rows, 0)
    for number, (label, level) in enumerate(panel.levels):
        if level is not None and math.isfinite(level):
            axes.axhline(level, color=f"C{number + 7}", linestyle="--", label=label)
    # A logarithmic axis has no place for norms that are all zero.
    if panel.logarithmic and any(np.max(line.get_ydata()) > 0.0 for line in axes.get_lines()):
        axes.set_yscale("log")
    axes.set(xlabel="round", ylabel=panel.label)
    axes.grid(alpha=0.3)
    handles, labels = axes.get_legend_handles_labels()
    topmost = axes
    if any(np.any(np.isfinite(column(rows, line.column))) for line in panel.shares):
        topmost = right = axes.twinx()
        _draw_lines(right, panel.shares, rows, len(panel.lines))
        right.set(ylabel="of the updates, %", ylim=(-2.0, 102.0))
        more_handles, more_labels = right.get_legend_handles_labels()
        handles, labels = handles + more_handles, labels + more_labels
    # Above the panel, where it covers no curve.
    topmost.legend(
        handles,
        labels,
        fontsize="small",
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
        ncols=2,
        frameon=False,
    )


def _draw_lines(axes: Any, lines: Sequence[_Line], rows: Sequence[Row], first_color: int) -> None:
    rounds = column(rows, "round")
    for number, line in enumerate(lines, first_color):
        values = line.factor * column(rows, line.column)
        known = np.isfinite(values)
        if np.any(known):
            axes.plot(
                rounds[known],
                values[known],
                linestyle=line.style,
                color=f"C{number}",
                label=line.label,
                marker="." if np.count_nonzero(known) <= _MOST_MARKED_POINTS else None,
            )


@dataclasses.dataclass(frozen=True, eq=False)
class MeanCurve:
    """The mean of a column over runs that differ in their seeds.

    Attributes:
      rounds: (m,) float64: the rounds at which every run has a value, increasing.
      mean: (m,) float64.
      half_width: (m,) float64: of the confidence interval of the mean over seeds; NaN of a
        single run.
      num_runs: How many runs there are.
    """

    rounds: np.ndarray
    mean: np.ndarray
    half_width: np.ndarray
    num_runs: int


def mean_curve(runs: Sequence[Sequence[Row]], name: str, confidence: float = 0.95) -> MeanCurve:
    """Returns the mean of a column over several runs, with an interval of Student's t.

    Rounds that some run has no value for are left out: a mean over those that went on
    would be one of other runs.

    Args:
      runs: The rows of each run's ``metrics.csv``.
      name: The column.
      confidence: Of the interval, above 0 and below 1; for values that are normally
        distributed over seeds.

    Returns:
      The curve; without any round if there is none that all runs have.

    Raises:
      ValueError: If there is no run, or the confidence is out of its range.
    """
    if not runs:
        raise ValueError("there must be at least one run to draw.")
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence must be above 0 and below 1, found {confidence}.")
    known = [
        {
            number: value
            for number, value in zip(column(rows, "round"), column(rows, name), strict=True)
            if math.isfinite(number) and math.isfinite(value)
        }
        for rows in runs
    ]
    rounds = sorted(set(known[0]).intersection(*known[1:]))
    values = np.array([[run[number] for number in rounds] for run in known], dtype=np.float64)
    if len(runs) == 1:
        half_width = np.full(len(rounds), math.nan)
    else:
        quantile = scipy.stats.t.ppf(0.5 + confidence / 2.0, len(runs) - 1)
        half_width = quantile * np.std(values, axis=0, ddof=1) / math.sqrt(len(runs))
    return MeanCurve(
        np.array(rounds, dtype=np.float64), np.mean(values, axis=0), half_width, len(runs)
    )


def compare(
    series: Mapping[str, Sequence[Sequence[Row]]],
    path: str | os.PathLike[str],
    *,
    title: str = "",
    name: str = "heldout_accuracy",
    label: str = "held-out accuracy, %",
    factor: float = 100.0,
    confidence: float = 0.95,
) -> None:
    """Draws one metric of several mechanisms, each a mean with an interval over seeds.

    Args:
      series: For each mechanism, by the name that it gets in the legend, the rows of
        ``metrics.csv`` of its runs, one for each seed.
      path: The file; its suffix, ``.png``, ``.pdf`` or ``.svg``, is its format.
      title: What stands above.
      name: The column of ``metrics.csv``.
      label: Of the vertical axis.
      factor: What values are multiplied by: 100 for per cent.
      confidence: Of the interval of the mean; see :func:`mean_curve`.

    Raises:
      OSError: If the file cannot be written.
      ValueError: If a mechanism has no run, nothing can be drawn, or an argument is out of
        its range.
    """
    figure = comparison_figure(
        series, title=title, name=name, label=label, factor=factor, confidence=confidence
    )
    _write(figure, path)


def comparison_figure(
    series: Mapping[str, Sequence[Sequence[Row]]],
    *,
    title: str = "",
    name: str = "heldout_accuracy",
    label: str = "held-out accuracy, %",
    factor: float = 100.0,
    confidence: float = 0.95,
) -> matplotlib.figure.Figure:
    """Returns the figure that :func:`compare` writes; the arguments are the same."""
    curves = {each: mean_curve(runs, name, confidence) for each, runs in series.items()}
    for each, curve in curves.items():
        if len(curve.rounds) == 0:
            raise ValueError(
                f"the runs of {each} have no round in common with a value of {name}: leave it out, "
                "or name another column."
            )
    if not curves:
        raise ValueError("there must be at least one mechanism to draw.")
    figure = _figure(7.0, 4.0)
    axes = figure.subplots()
    for number, (each, curve) in enumerate(curves.items()):
        color = f"C{number}"
        runs = "one run" if curve.num_runs == 1 else f"{curve.num_runs} runs"
        marker = "." if len(curve.rounds) <= _MOST_MARKED_POINTS else None
        mean, half_width = factor * curve.mean, abs(factor) * curve.half_width
        axes.plot(curve.rounds, mean, color=color, marker=marker, label=f"{each} ({runs})")
        if curve.num_runs > 1:
            axes.fill_between(
                curve.rounds, mean - half_width, mean + half_width, color=color, alpha=0.2, lw=0
            )
    if any(curve.num_runs > 1 for curve in curves.values()):
        title = f"{title}\n" if title else ""
        title += f"mean and its {100 * confidence:g} % interval over seeds"
    axes.set(xlabel="round", ylabel=label, title=title)
    axes.grid(alpha=0.3)
    if axes.get_ylim()[0] < 0.0 <= min(np.min(curve.mean) for curve in curves.values()):
        # Intervals of few runs reach to where no metric is.
        axes.set_ylim(bottom=0.0)
    # Accuracies rise.
    axes.legend(loc="lower right")
    return figure


def _figure(width: float, height: float) -> matplotlib.figure.Figure:
    figure = matplotlib.figure.Figure(figsize=(width, height), layout="constrained")
    matplotlib.backends.backend_agg.FigureCanvasAgg(figure)
    return figure


def _write(figure: matplotlib.figure.Figure, path: str | os.PathLike[str]) -> None:
    suffix = pathlib.Path(path).suffix.lower()
    if suffix not in (".png", ".pdf", ".svg"):
        raise ValueError(f"a figure is a .png, .pdf or .svg file, found {os.fspath(path)!r}.")
    with atomic_files.writing(path) as file:
        figure.savefig(file, format=suffix[1:], dpi=_DOTS_PER_INCH)
