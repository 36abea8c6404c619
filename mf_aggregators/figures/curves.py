"""Curves in a panel, of which none hides another."""

import math
from collections.abc import Mapping
from typing import Any

import matplotlib.axes
import numpy as np

from mf_aggregators.figures.captions import describe, legend
from mf_aggregators.figures.mechanism_styles import LEVELS, Style, styles
from mf_aggregators.figures.ticks import Numbers, set_places

# Single points of a line with more of them are not marked.
MOST_MARKED_POINTS = 60
# Curves that are apart by less of the height of a panel hide each other.
_HIDING = 0.012
# Between names of curves that are one.
_AND_THE_SAME = "\0"


def lines(
    axes: matplotlib.axes.Axes,
    curves: Mapping[str, tuple[Numbers, Numbers]],
    *,
    title: str = "",
    x: str = "",
    y: str = "",
    logarithmic: str = "",
    places: Numbers | None = None,
    levels: Mapping[str, float] | None = None,
    own_styles: Mapping[str, Style] | None = None,
    with_legend: bool = True,
) -> None:
    """Draws curves into a panel, with a legend above it.

    Curves that are the same are drawn once, under all of their names; of curves that nearly
    hide each other, the lower one is broad and pale.

    Args:
      axes: The panel.
      curves: By their names in the legend, their points' places and values.
      title: Above the panel.
      x: Below it.
      y: Beside it.
      logarithmic: Which axes are logarithmic: ``x``, ``y``, ``xy`` or none. An axis without
        a positive number is linear.
      places: Where the horizontal axis has its ticks; where they fit, by default.
      levels: Horizontal lines, by name.
      own_styles: By name; default: those of :func:`styles` for these names.
      with_legend: Whether to draw the legend.
    """
    given = {name: (np.asarray(p, float), np.asarray(v, float)) for name, (p, v) in curves.items()}
    chosen = own_styles if own_styles is not None else styles(list(given))
    _set_scales(axes, given, levels or {}, logarithmic)
    merged = _merged(given)
    low, high = _range(values for _, values in given.values())
    is_log = axes.get_yscale() == "log"
    order = list(merged)
    hides = {
        name: any(
            _is_near(merged[name], merged[other], low, high, is_log)
            for other in order[order.index(name) + 1 :]
        )
        for name in order
    }
    for name, (where, values) in merged.items():
        style = chosen[name.partition(_AND_THE_SAME)[0]]
        is_marked = len(where) <= MOST_MARKED_POINTS
        axes.plot(
            where,
            values,
            label=_written(name),
            color=style.colour,
            linestyle=style.line if not hides[name] else "-",
            marker=style.marker if is_marked and not hides[name] else "",
            markersize=4,
            linewidth=5.0 if hides[name] else 1.4,
            alpha=0.45 if hides[name] else 1.0,
            solid_capstyle="butt",
        )
    for shade, (name, value) in zip(LEVELS, (levels or {}).items(), strict=False):
        axes.axhline(value, color=shade, linestyle="--", linewidth=1.2, label=name)
    describe(axes, title=title, x=x, y=y)
    if places is not None:
        set_places(axes.xaxis, places)
    if with_legend:
        legend(axes)


def _written(name: str) -> str:
    """The name of a curve as the legend has it."""
    if _AND_THE_SAME not in name:
        return name
    return f"{name.replace(_AND_THE_SAME, '; ')} (the same)"


def _merged(
    curves: Mapping[str, tuple[np.ndarray, np.ndarray]],
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Curves that are equal at every point as one, under all of their names."""
    found: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for name, (places, values) in curves.items():
        for other, (other_places, other_values) in found.items():
            if np.array_equal(places, other_places) and np.allclose(
                values, other_values, rtol=1e-9, atol=0.0, equal_nan=True
            ):
                found[f"{other}{_AND_THE_SAME}{name}"] = found.pop(other)
                break
        else:
            found[name] = (places, values)
    return found


def _range(values: Any) -> tuple[float, float]:
    every = np.concatenate([np.ravel(each) for each in values] or [np.zeros(0)])
    every = every[np.isfinite(every)]
    return (float(np.min(every)), float(np.max(every))) if every.size else (0.0, 1.0)


def _is_near(
    one: tuple[np.ndarray, np.ndarray],
    other: tuple[np.ndarray, np.ndarray],
    low: float,
    high: float,
    is_log: bool,
) -> bool:
    """Whether two curves are on top of each other for most of their way."""
    if min(len(one[0]), len(other[0])) < 2:
        return False
    order = np.argsort(other[0], kind="stable")
    values, others = one[1], np.interp(one[0], other[0][order], other[1][order])
    if is_log:
        positive = (values > 0.0) & (others > 0.0)
        if not np.any(positive) or low <= 0.0:
            return False
        distance = np.abs(np.log(values[positive] / others[positive]))
        height = math.log(high / low)
    else:
        distance, height = np.abs(values - others), high - low
    return bool(height > 0.0 and np.mean(distance < _HIDING * height) > 0.7)


def _set_scales(
    axes: matplotlib.axes.Axes,
    curves: Mapping[str, tuple[np.ndarray, np.ndarray]],
    levels: Mapping[str, float],
    logarithmic: str,
) -> None:
    """Logarithmic axes, for what has a positive number to show on them."""
    if "x" in logarithmic and any(np.any(places > 0.0) for places, _ in curves.values()):
        axes.set_xscale("log")
    values = [np.ravel(each) for _, each in curves.values()] + [np.array(list(levels.values()))]
    if "y" in logarithmic and any(np.any(each > 0.0) for each in values):
        axes.set_yscale("log")
