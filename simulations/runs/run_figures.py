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

import matplotlib.figure
import numpy as np
import scipy.stats

from mf_aggregators import atomic_files, figures
from mf_aggregators.kernel import validation

# A row of metrics.csv: text, as csv.DictReader gives it, or numbers.
Row: TypeAlias = Mapping[str, Any]

_PANELS_OF_A_ROW = 2
_INCHES_OF_A_PANEL = (5.2, 2.6)


def column(rows: Sequence[Row], name: str) -> np.ndarray:
    """Returns a column of ``metrics.csv``.

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
    """A line of a panel: the column, its name in the legend, and what its values are times.

    With a window, it shows means of so many values, as far back as there are any.
    """

    column: str
    label: str
    factor: float = 1.0
    window: int = 1


@dataclasses.dataclass(frozen=True)
class _Panel:
    """Axes of a figure: lines, and levels that hold for the whole run."""

    label: str
    lines: tuple[_Line, ...]
    levels: tuple[tuple[str, float | None], ...] = ()
    logarithmic: bool = False

    def has_data(self, rows: Sequence[Row]) -> bool:
        """Whether any of its lines has a point."""
        return any(np.any(np.isfinite(column(rows, line.column))) for line in self.lines)


def draw(
    rows: Sequence[Row],
    path: str | os.PathLike[str] | None,
    title: str,
    *,
    clip_norm: float | None = None,
    target_unclipped_quantile: float | None = None,
    planned_epsilon: float | None = None,
    delta: float | None = None,
    clients_per_round: int | None = None,
    released_window: int | None = None,
) -> matplotlib.figure.Figure:
    """Draws the figure of a run and writes it, whole or not at all.

    Its panels are accuracy, loss, norms of the clients' updates, how many of them were clipped
    or zeroed, the released fraction within a clip norm that adapts, norms of noise and released
    mean, clients who might have joined, and the privacy budget. A panel without any data is left
    out; a missing or empty cell is a gap that its line goes straight across.

    Args:
      rows: The rows of ``metrics.csv``, in any order: mappings from the columns ``round``,
        ``train_loss``, ``train_accuracy``, ``heldout_loss``, ``heldout_accuracy``,
        ``eligible_clients``, ``available_clients``, ``update_norm``, ``max_update_norm``,
        ``clipped_fraction``, ``zeroed_fraction``, ``clip_norm``, ``unclipped_fraction``,
        ``noise_norm``, ``released_norm`` and ``epsilon_spent`` to numbers or their text. Others
        are not looked at; a row without its round is left out.
      path: The file; its suffix, ``.png``, ``.pdf`` or ``.svg``, is its format. What stands
        there is replaced. None for none.
      title: What stands above.
      clip_norm: Drawn as a level beside the norms of updates. One that adapts is a column.
      target_unclipped_quantile: Of a clip norm that adapts: a level beside the fraction within it.
      planned_epsilon: Drawn as a level beside the budget that was spent; None or infinity
        for none.
      delta: The delta of both the planned and the spent epsilon, for the label.
      clients_per_round: Drawn as a level beside the clients who might have joined.
      released_window: Of metrics of training that were released with noise, how many rounds the
        lines show the mean of, at least 1: noise that is correlated cancels there. None for metrics
        without noise, which are drawn as they are.

    Returns:
      The figure.

    Raises:
      OSError: If the file cannot be written.
      ValueError: If the suffix is another.
    """
    quantile = target_unclipped_quantile
    target = None if quantile is None else 100.0 * quantile
    window, release = 1, ""
    if released_window is not None:
        window = validation.positive_integer(released_window, "released_window")
        release = " (a private release" + (f", mean of {window})" if window > 1 else ")")
    at_delta = "" if delta is None else f" at delta {figures.scientific(delta)}"
    panels = (
        _Panel(
            "accuracy, %",
            (
                _Line("train_accuracy", f"training{release}", 100.0, window),
                _Line("heldout_accuracy", "held out", 100.0),
            ),
        ),
        _Panel(
            "loss",
            (
                _Line("train_loss", f"training{release}", window=window),
                _Line("heldout_loss", "held out"),
            ),
        ),
        _Panel(
            "L2 norm of updates",
            (
                _Line("update_norm", "mean"),
                _Line("max_update_norm", "largest"),
                _Line("clip_norm", "clip norm (a private release)"),
            ),
            (("clip norm", clip_norm),),
            logarithmic=True,
        ),
        _Panel(
            "of the updates, %",
            (
                _Line("clipped_fraction", f"clipped{release}", 100.0, window),
                _Line("zeroed_fraction", "zeroed", 100.0),
            ),
        ),
        _Panel(
            "within the clip norm, %",
            (_Line("unclipped_fraction", "a private release", 100.0),),
            (("target", target),),
        ),
        _Panel(
            "L2 norm of a round",
            (_Line("released_norm", "released mean"), _Line("noise_norm", "noise in it")),
            logarithmic=True,
        ),
        _Panel(
            "clients",
            (
                _Line("eligible_clients", "the timer allows it"),
                _Line("available_clients", "and available"),
            ),
            (("clients per round", clients_per_round),),
            logarithmic=True,
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
    num_columns = min(_PANELS_OF_A_ROW, max(1, len(drawn)))
    num_lines = max(1, -(-len(drawn) // num_columns))
    figure, grid = figures.panels(num_lines, num_columns, _INCHES_OF_A_PANEL)
    axes = list(grid.ravel())
    for each, panel in zip(axes, drawn, strict=False):
        _draw_panel(each, panel, rows)
    for each in axes[len(drawn) :]:
        each.set_axis_off()
    if not drawn:
        axes[0].text(0.5, 0.5, "no metrics", ha="center", va="center")
    figures.heading(figure, title)
    figure.align_ylabels()
    _write(figure, path)
    return figure


def _draw_panel(axes: Any, panel: _Panel, rows: Sequence[Row]) -> None:
    rounds = column(rows, "round")
    curves = {}
    for line in panel.lines:
        values = line.factor * column(rows, line.column)
        known = np.isfinite(values)
        if np.any(known):
            curves[line.label] = (rounds[known], _smoothed(values[known], line.window))
    levels = {
        label: float(level)
        for label, level in panel.levels
        if level is not None and math.isfinite(level)
    }
    figures.lines(
        axes,
        curves,
        x="round",
        y=panel.label,
        logarithmic="y" if panel.logarithmic else "",
        levels=levels,
    )


def _smoothed(values: np.ndarray, window: int) -> np.ndarray:
    """The mean of each value and those before it, ``window`` of them where there are so many."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - window, 0)
    return np.asarray((sums[ends] - sums[starts]) / (ends - starts))


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
      confidence: The confidence of the interval, above 0 and below 1, for values that are
        normally distributed over seeds.

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
    path: str | os.PathLike[str] | None,
    *,
    title: str = "",
    accuracies: Sequence[figures.Interval] = (),
    name: str = "heldout_accuracy",
    label: str = "held-out accuracy, %",
    factor: float = 100.0,
    confidence: float = 0.95,
) -> matplotlib.figure.Figure:
    """Draws one metric of several mechanisms, each a mean with an interval over seeds.

    Args:
      series: For each mechanism, by its name, the rows of ``metrics.csv`` of its runs, one
        for each seed. Each mechanism has a panel of its own, where the others are pale.
      path: The file; its suffix, ``.png``, ``.pdf`` or ``.svg``, is its format. None for none.
      title: What stands above.
      accuracies: Test accuracies in percent, drawn in the first panel; none for no such panel.
      name: The column of ``metrics.csv``.
      label: The label of the vertical axis.
      factor: What values are multiplied by: 100 for per cent.
      confidence: The confidence of the interval of the mean; see :func:`mean_curve`.

    Returns:
      The figure.

    Raises:
      OSError: If the file cannot be written.
      ValueError: If a mechanism has no run, nothing can be drawn, or an argument is out of
        its range.
    """
    curves = {each: mean_curve(runs, name, confidence) for each, runs in series.items()}
    for each, curve in curves.items():
        if len(curve.rounds) == 0:
            raise ValueError(
                f"the runs of {each} have no round in common with a value of {name}: leave it out, "
                "or name another column."
            )
    if not curves:
        raise ValueError("there must be at least one mechanism to draw.")
    styles = figures.styles([*(each.name for each in accuracies), *curves])
    figure, places = _panels(accuracies, len(curves))
    if accuracies:
        figures.intervals(
            places.pop(0),
            accuracies,
            title="After training",
            x=f"test accuracy, %, with {100 * confidence:g} % intervals; pale: all runs",
            own_styles=styles,
        )
    limits = _limits(curves, factor)
    for axes, (each, curve) in zip(places, curves.items(), strict=True):
        others = {other: found for other, found in curves.items() if other != each}
        _draw_curve(axes, each, curve, others, styles[each], factor)
        runs = "one run" if curve.num_runs == 1 else f"{curve.num_runs} runs"
        figures.describe(axes, title=f"{each} ({runs})", x="round", y=label)
        axes.set_ylim(*limits)
    words = [title] if title else []
    if any(curve.num_runs > 1 for curve in curves.values()):
        words.append(
            f"by round: mean and its {100 * confidence:g} % interval over seeds"
            + ("; grey: the other mechanisms" if len(curves) > 1 else "")
        )
    figures.heading(figure, "\n".join(words))
    _write(figure, path)
    return figure


def _panels(
    accuracies: Sequence[figures.Interval], num_curves: int
) -> tuple[matplotlib.figure.Figure, list[Any]]:
    """A figure and its panels: one for the accuracies, if there are any, and one for each curve."""
    num_panels = num_curves + bool(accuracies)
    num_columns = min(num_panels, _PANELS_OF_A_ROW)
    height = 2.9
    if accuracies:
        height = max(height, figures.height_of_rows([each.name for each in accuracies]))
    figure, grid = figures.panels(
        -(-num_panels // num_columns), num_columns, (_INCHES_OF_A_PANEL[0], height)
    )
    places = list(grid.ravel())
    for axes in places[num_panels:]:
        axes.set_axis_off()
    return figure, places[:num_panels]


def _draw_curve(
    axes: Any,
    name: str,
    curve: MeanCurve,
    others: Mapping[str, MeanCurve],
    style: figures.Style,
    factor: float,
) -> None:
    for other in others.values():
        axes.plot(other.rounds, factor * other.mean, color="0.75", linewidth=1.0, zorder=1.5)
    mean, half_width = factor * curve.mean, abs(factor) * curve.half_width
    if curve.num_runs > 1:
        axes.fill_between(
            curve.rounds, mean - half_width, mean + half_width, color=style.colour, alpha=0.2, lw=0
        )
    axes.plot(
        curve.rounds,
        mean,
        color=style.colour,
        marker=style.marker if len(curve.rounds) <= figures.MOST_MARKED_POINTS else "",
        markersize=4,
        label=name,
    )


def _limits(curves: Mapping[str, MeanCurve], factor: float) -> tuple[float, float]:
    """The range of all panels: of means and intervals, but not below zero where no mean is."""
    ends = [
        factor * curve.mean + sign * abs(factor) * np.nan_to_num(curve.half_width)
        for curve in curves.values()
        for sign in (-1.0, 1.0)
    ]
    low, high = float(np.min([np.min(e) for e in ends])), float(np.max([np.max(e) for e in ends]))
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    least = min(float(np.min(factor * curve.mean)) for curve in curves.values())
    # Intervals of few runs reach to where no metric is.
    return (0.0 if least >= 0.0 > low - margin else low - margin), high + margin


def _write(figure: matplotlib.figure.Figure, path: str | os.PathLike[str] | None) -> None:
    if path is None:
        return
    suffix = pathlib.Path(path).suffix.lower()
    if suffix not in (".png", ".pdf", ".svg"):
        raise ValueError(f"a figure is a .png, .pdf or .svg file, found {os.fspath(path)!r}.")
    with atomic_files.writing(path) as file:
        figures.save(figure, file, suffix[1:])
