"""The figure of a run, from the rows of its ``metrics.csv``.

matplotlib's figure objects are used and not pyplot: no state stays, and no window is opened.
"""

import math
import types
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import matplotlib.figure
import numpy as np

from mf_aggregators import figures

# A row of metrics.csv: text, as csv.DictReader gives it, or numbers.
Row: TypeAlias = Mapping[str, Any]

_PANELS_OF_A_ROW = 2
_INCHES_OF_A_PANEL = (5.2, 2.6)
_SMOOTHED = ("train_accuracy", "train_loss", "clipped_fraction")
# The panels by their labels: columns with their names in the legend. {} says how it was released.
_PANELS: Mapping[str, Mapping[str, str]] = {
    "accuracy, %": {"train_accuracy": "training{}", "heldout_accuracy": "held out"},
    "loss": {"train_loss": "training{}", "heldout_loss": "held out"},
    "L2 norm of updates": {
        "update_norm": "mean",
        "max_update_norm": "largest",
        "clip_norm": "clip norm (a private release)",
    },
    "of the updates, %": {"clipped_fraction": "clipped{}", "zeroed_fraction": "zeroed"},
    "within the clip norm, %": {"unclipped_fraction": "a private release"},
    "L2 norm of a round": {"noise_norm": "noise in it", "released_norm": "released mean"},
    "clients": {
        "eligible_clients": "free by the timer",
        "available_clients": "available of these",
    },
    "epsilon": {"epsilon_spent": "spent"},
}


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
    title: str,
    levels: Mapping[str, tuple[str, float]] = types.MappingProxyType({}),
    delta: float | None = None,
    released_window: int | None = None,
) -> matplotlib.figure.Figure:
    """Returns the figure of a run.

    Its panels are accuracy, loss, norms of the clients' updates, how many of them were clipped
    or zeroed, the released fraction within a clip norm that adapts, norms of noise and released
    mean, clients who might have joined, and the privacy budget. A panel without any data is left
    out; a missing or empty cell is a gap that its line goes straight across.

    Args:
      rows: The rows of ``metrics.csv``: mappings from columns to numbers or their text.
      title: The heading.
      levels: Numbers that are drawn as levels, each with its name, by the label of their panel:
        ``L2 norm of updates``, ``within the clip norm, %``, ``clients`` or ``epsilon``. An infinite
        one is left out.
      delta: The delta of epsilons, for their label.
      released_window: Of metrics of training that were released with noise, how many rounds the
        lines show the mean of, at least 1: noise that is correlated cancels there. None for metrics
        without noise, which are drawn as they are.
    """
    window, release = released_window or 1, ""
    if released_window is not None:
        release = f" (a private release{f', mean of {window}' if window > 1 else ''})"
    drawn = {label: _curves(rows, label, lines, window) for label, lines in _PANELS.items()}
    drawn = {label: curves for label, curves in drawn.items() if curves}
    figure, places = panels(max(1, len(drawn)), _INCHES_OF_A_PANEL)
    for axes, (label, curves) in zip(places, drawn.items(), strict=False):
        name, level = levels.get(label, ("", math.inf))
        with_delta = "" if delta is None else f" at delta {figures.scientific(delta)}"
        figures.lines(
            axes,
            {legend.format(release): curve for legend, curve in curves.items()},
            x="round",
            y=f"{label}{with_delta}" if label == "epsilon" else label,
            logarithmic="y" if label.startswith(("L2", "clients")) else "",
            levels={name: level} if math.isfinite(level) else {},
        )
    if not drawn:
        places[0].set_axis_off()
        places[0].text(0.5, 0.5, "no metrics", ha="center", va="center")
    figures.heading(figure, title)
    figure.align_ylabels()
    return figure


def _curves(
    rows: Sequence[Row], label: str, lines: Mapping[str, str], window: int
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The curves of a panel, by their names in the legend: rounds and values that are known."""
    rounds, factor = column(rows, "round"), 100.0 if label.endswith("%") else 1.0
    curves = {}
    for name, legend in lines.items():
        values = factor * column(rows, name)
        known = np.isfinite(rounds + values)
        if np.any(known):
            values = _smoothed(values[known], window if name in _SMOOTHED else 1)
            curves[legend] = (rounds[known], values)
    return curves


def _smoothed(values: np.ndarray, window: int) -> np.ndarray:
    """The mean of each value and those before it, over at most ``window`` values."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - window, 0)
    return np.asarray((sums[ends] - sums[starts]) / (ends - starts))


def panels(number: int, inches: tuple[float, float]) -> tuple[matplotlib.figure.Figure, list[Any]]:
    """Returns a figure and a number of panels, the last of which fills the rest of its row.

    Args:
      number: The number of panels, at least 1.
      inches: The width and height of a panel.
    """
    num_columns = min(number, _PANELS_OF_A_ROW)
    figure, grid = figures.panels(-(-number // num_columns), num_columns, inches)
    places = list(grid.ravel())
    for axes in places[number:]:
        axes.remove()
    place = places[number - 1].get_subplotspec()
    places[number - 1].set_subplotspec(place.get_gridspec()[-1, place.colspan.start :])
    return figure, places[:number]
