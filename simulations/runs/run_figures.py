"""Figures of finished runs: one run from its ``metrics.csv``, and mechanisms beside each other.

matplotlib's figure objects are used and not pyplot: no state stays, and no window is opened.
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
from mf_aggregators.kernel import numbers

# A row of metrics.csv: text, as csv.DictReader gives it, or numbers.
Row: TypeAlias = Mapping[str, Any]

CONFIDENCE = 0.95

_METRIC = "heldout_accuracy"
_PANELS_OF_A_ROW = 2
_INCHES_OF_A_PANEL = (5.2, 2.6)
_HEIGHT_OF_A_COMPARISON = 2.9
_SMOOTHED = ("train_accuracy", "train_loss", "clipped_fraction")


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
      rows: The rows of ``metrics.csv``, in any order: mappings from columns to numbers or their
        text. A row without its round is left out.
      path: The file; its suffix, ``.png``, ``.pdf`` or ``.svg``, is its format. A file that is
        there is replaced. None for none.
      title: The heading.
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
    window, release = 1, ""
    if released_window is not None:
        window = numbers.positive_integer(released_window, "released_window")
        release = " (a private release" + (f", mean of {window})" if window > 1 else ")")
    epsilon = "epsilon" + ("" if delta is None else f" at delta {figures.scientific(delta)}")
    panels = {
        "accuracy, %": {"train_accuracy": f"training{release}", "heldout_accuracy": "held out"},
        "loss": {"train_loss": f"training{release}", "heldout_loss": "held out"},
        "L2 norm of updates": {
            "update_norm": "mean",
            "max_update_norm": "largest",
            "clip_norm": "clip norm (a private release)",
        },
        "of the updates, %": {
            "clipped_fraction": f"clipped{release}",
            "zeroed_fraction": "zeroed",
        },
        "within the clip norm, %": {"unclipped_fraction": "a private release"},
        "L2 norm of a round": {"released_norm": "released mean", "noise_norm": "noise in it"},
        "clients": {
            "eligible_clients": "the timer allows it",
            "available_clients": "and available",
        },
        epsilon: {"epsilon_spent": "spent"},
    }
    quantile = target_unclipped_quantile
    levels = {
        "L2 norm of updates": ("clip norm", clip_norm),
        "within the clip norm, %": ("target", None if quantile is None else 100.0 * quantile),
        "clients": ("clients per round", clients_per_round),
        epsilon: ("planned", planned_epsilon),
    }
    rows = [row for row in rows if math.isfinite(_number(row.get("round")))]
    rows.sort(key=lambda row: _number(row["round"]))
    drawn = {label: _curves(rows, label, lines, window) for label, lines in panels.items()}
    drawn = {label: curves for label, curves in drawn.items() if curves}
    figure, places = _panels(max(1, len(drawn)), _INCHES_OF_A_PANEL[1])
    for axes, (label, curves) in zip(places, drawn.items(), strict=False):
        name, level = levels.get(label, ("", None))
        figures.lines(
            axes,
            curves,
            x="round",
            y=label,
            logarithmic="y" if label.startswith(("L2", "clients")) else "",
            levels={name: float(level)} if level is not None and math.isfinite(level) else {},
        )
    if not drawn:
        places[0].set_axis_off()
        places[0].text(0.5, 0.5, "no metrics", ha="center", va="center")
    figures.heading(figure, title)
    figure.align_ylabels()
    _write(figure, path)
    return figure


def _curves(
    rows: Sequence[Row], label: str, lines: Mapping[str, str], window: int
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The curves of a panel, by their names in the legend: rounds and values that are known."""
    rounds, factor = column(rows, "round"), 100.0 if label.endswith("%") else 1.0
    curves = {}
    for name, legend in lines.items():
        values = factor * column(rows, name)
        known = np.isfinite(values)
        if np.any(known):
            values = _smoothed(values[known], window if name in _SMOOTHED else 1)
            curves[legend] = (rounds[known], values)
    return curves


def _smoothed(values: np.ndarray, window: int) -> np.ndarray:
    """The mean of each value and those before it, ``window`` of them where there are so many."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - window, 0)
    return np.asarray((sums[ends] - sums[starts]) / (ends - starts))


@dataclasses.dataclass(frozen=True, eq=False)
class MeanCurve:
    """The mean held-out accuracy of runs that differ in their seeds.

    Attributes:
      rounds: (m,) float64: the rounds at which every run has a value, increasing.
      mean: (m,) float64, fractions.
      half_width: (m,) float64: of the 95 % interval of Student's t around the mean; NaN of a
        single run.
      num_runs: How many runs there are.
    """

    rounds: np.ndarray
    mean: np.ndarray
    half_width: np.ndarray
    num_runs: int


def mean_curve(runs: Sequence[Sequence[Row]]) -> MeanCurve:
    """Returns the mean held-out accuracy of several runs, with an interval of Student's t.

    Rounds that some run has no value for are left out: a mean over the other runs would be one of
    other runs.

    Args:
      runs: The rows of ``metrics.csv`` of each run, at least one.

    Returns:
      The curve; without any round if there is none that all runs have.
    """
    known = [
        {
            number: value
            for number, value in zip(column(rows, "round"), column(rows, _METRIC), strict=True)
            if math.isfinite(number) and math.isfinite(value)
        }
        for rows in runs
    ]
    rounds = sorted(set(known[0]).intersection(*known[1:]))
    values = np.array([[run[number] for number in rounds] for run in known], dtype=np.float64)
    half_width = np.full(len(rounds), math.nan)
    if len(runs) > 1:
        quantile = scipy.stats.t.ppf(0.5 + CONFIDENCE / 2.0, len(runs) - 1)
        half_width = quantile * np.std(values, axis=0, ddof=1) / math.sqrt(len(runs))
    return MeanCurve(
        np.array(rounds, dtype=np.float64), np.mean(values, axis=0), half_width, len(runs)
    )


def compare(
    curves: Mapping[str, MeanCurve],
    path: str | os.PathLike[str] | None,
    *,
    title: str = "",
    accuracies: Sequence[figures.Interval] = (),
) -> matplotlib.figure.Figure:
    """Draws held-out accuracies of mechanisms by round, each a mean with an interval over seeds.

    Args:
      curves: By mechanism, at least one, the mean over its runs, of at least one round. Each
        mechanism has a panel of its own, where the others are grey.
      path: The file; its suffix, ``.png``, ``.pdf`` or ``.svg``, is its format. None for none.
      title: The heading.
      accuracies: Test accuracies in percent, drawn in the first panel; none for no such panel.

    Returns:
      The figure.

    Raises:
      OSError: If the file cannot be written.
      ValueError: If the suffix is another.
    """
    styles = figures.styles([*(each.name for each in accuracies), *curves])
    height = _HEIGHT_OF_A_COMPARISON
    if accuracies:
        height = max(height, figures.height_of_rows([each.name for each in accuracies]))
    figure, places = _panels(len(curves) + bool(accuracies), height)
    if accuracies:
        figures.intervals(
            places.pop(0),
            accuracies,
            title="After training",
            x=f"test accuracy, %, with {100 * CONFIDENCE:g} % intervals; pale: all runs",
            own_styles=styles,
        )
    bands = {name: _band(curve) for name, curve in curves.items()}
    everywhere = np.concatenate([ends for band in bands.values() for ends in band])
    low, high = float(np.min(everywhere)), float(np.max(everywhere))
    margin = 0.05 * (high - low) or 1.0
    for axes, (name, curve) in zip(places, curves.items(), strict=True):
        for other in (each for each in curves.values() if each is not curve):
            axes.plot(other.rounds, 100.0 * other.mean, color="0.75", linewidth=1.0, zorder=1.5)
        style, runs = styles[name], f"{curve.num_runs} runs"
        if curve.num_runs > 1:
            axes.fill_between(curve.rounds, *bands[name], color=style.colour, alpha=0.2, lw=0)
        marker = style.marker if len(curve.rounds) <= figures.MOST_MARKED_POINTS else ""
        axes.plot(
            *(curve.rounds, 100.0 * curve.mean),
            color=style.colour,
            marker=marker,
            markersize=4,
            label=name,
        )
        heading = f"{name} ({'one run' if curve.num_runs == 1 else runs})"
        figures.describe(axes, title=heading, x="round", y="held-out accuracy, %")
        axes.set_ylim(low - margin, high + margin)
    words = [title] if title else []
    if any(curve.num_runs > 1 for curve in curves.values()):
        grey = "; grey: the other mechanisms" if len(curves) > 1 else ""
        words.append(f"by round: mean and its {100 * CONFIDENCE:g} % interval over seeds{grey}")
    figures.heading(figure, "\n".join(words))
    _write(figure, path)
    return figure


def _band(curve: MeanCurve) -> tuple[np.ndarray, np.ndarray]:
    """The ends of the intervals of accuracies, in percent, within what accuracies can be."""
    half_width = np.nan_to_num(curve.half_width)
    low, high = curve.mean - half_width, curve.mean + half_width
    return 100.0 * np.maximum(low, 0.0), 100.0 * np.minimum(high, 1.0)


def _panels(number: int, height: float) -> tuple[matplotlib.figure.Figure, list[Any]]:
    """A figure and as many panels; others that fill its last row are left empty."""
    num_columns = min(number, _PANELS_OF_A_ROW)
    size = (_INCHES_OF_A_PANEL[0], height)
    figure, grid = figures.panels(-(-number // num_columns), num_columns, size)
    places = list(grid.ravel())
    for axes in places[number:]:
        axes.set_axis_off()
    return figure, places[:number]


def _write(figure: matplotlib.figure.Figure, path: str | os.PathLike[str] | None) -> None:
    if path is None:
        return
    suffix = pathlib.Path(path).suffix.lower()
    if suffix not in (".png", ".pdf", ".svg"):
        raise ValueError(f"a figure is a .png, .pdf or .svg file, found {os.fspath(path)!r}.")
    with atomic_files.writing(path) as file:
        figures.save(figure, file, suffix[1:])
