"""Panels with a row for each name: bars, and means with their intervals."""

import dataclasses
from collections.abc import Mapping, Sequence

import matplotlib.axes

from mf_aggregators.figures.captions import describe
from mf_aggregators.figures.mechanism_styles import COLOURS, LEVELS, Style, mechanism_of, styles
from mf_aggregators.figures.text import CHARACTERS_OF_NAME, SMALL, in_lines
from mf_aggregators.figures.ticks import Numbers


@dataclasses.dataclass(frozen=True)
class Interval:
    """A mean with what it may be, as a line of :func:`intervals`.

    Attributes:
      name: What it is of.
      mean: The mean.
      half_width: Of its confidence interval; None where there is none.
      lowest: The smallest of the values that the mean is of; None where they are not known.
      highest: The largest of them.
    """

    name: str
    mean: float
    half_width: float | None = None
    lowest: float | None = None
    highest: float | None = None


def intervals(
    axes: matplotlib.axes.Axes,
    rows: Sequence[Interval],
    *,
    title: str = "",
    x: str = "",
    own_styles: Mapping[str, Style] | None = None,
) -> None:
    """Draws means with their intervals, a line for each name, the first on top.

    Args:
      axes: The panel.
      rows: What is drawn. The range of the values is a pale bar behind the interval.
      title: Above the panel.
      x: Below it.
      own_styles: By name; default: those of :func:`styles`.
    """
    chosen = own_styles if own_styles is not None else styles([row.name for row in rows])
    for place, row in enumerate(rows):
        style = chosen[row.name]
        if row.lowest is not None and row.highest is not None:
            axes.plot(
                [row.lowest, row.highest],
                [place, place],
                color=style.colour,
                alpha=0.3,
                linewidth=8.0,
                solid_capstyle="butt",
            )
        axes.errorbar(
            [row.mean],
            [place],
            xerr=None if row.half_width is None else [row.half_width],
            color=style.colour,
            marker=style.marker,
            markersize=5,
            linewidth=1.4,
            capsize=3,
        )
    name_rows(axes, [row.name for row in rows])
    describe(axes, title=title, x=x)


def name_rows(axes: matplotlib.axes.Axes, names: Sequence[str]) -> None:
    """Names the places 0, 1, ... of the vertical axis, from top to bottom.

    Args:
      axes: The panel.
      names: The names; long ones are broken into lines.
    """
    broken = [in_lines(name, CHARACTERS_OF_NAME) for name in names]
    axes.set_yticks(range(len(names)), broken, fontsize=SMALL)
    axes.set_ylim(len(names) - 0.5, -0.5)


def height_of_rows(names: Sequence[str]) -> float:
    """Returns the inches that a panel with a row for each name needs.

    Args:
      names: The names of the rows.
    """
    most = max((in_lines(name, CHARACTERS_OF_NAME).count("\n") for name in names), default=0)
    return 1.2 + max(len(names), 2) * (0.28 + 0.16 * most)


def bars(
    axes: matplotlib.axes.Axes,
    names: Sequence[str],
    values: Numbers,
    *,
    title: str = "",
    x: str = "",
    form: str = ".3g",
) -> None:
    """Draws one horizontal bar for each name, with its number beside it.

    Args:
      axes: The panel.
      names: From top to bottom.
      values: The lengths, not negative.
      title: Above the panel.
      x: Below it.
      form: Of the numbers.
    """
    # Lines of one mechanism need no shades: each has its name beside it.
    colours = [COLOURS.get(mechanism_of(name) or "", LEVELS[1]) for name in names]
    axes.barh(range(len(names)), values, 0.66, color=colours)
    for place, value in enumerate(values):
        axes.annotate(
            format(value, form),
            (value, place),
            xytext=(3, 0),
            textcoords="offset points",
            va="center",
            fontsize=SMALL,
        )
    name_rows(axes, names)
    describe(axes, title=title, x=x)
    # Room for the numbers.
    axes.set_xlim(0.0, 1.35 * max((float(value) for value in values), default=0.0) or 1.0)
    axes.grid(False, axis="y")
