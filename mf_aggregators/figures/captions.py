"""What is written around panels: titles, names of axes, and legends."""

from typing import Any

import matplotlib.axes
import matplotlib.figure
import matplotlib.ticker

from mf_aggregators.figures.number_labels import PlainNumbers
from mf_aggregators.figures.panel_layout import free_width
from mf_aggregators.figures.text import (
    CHARACTERS_OF_NAME,
    POINTS_PER_INCH,
    SMALL,
    TEXT,
    TITLE,
    WIDTH_OF_CHARACTER,
    in_lines,
)
from mf_aggregators.figures.ticks import LinearTicks, LogarithmicTicks

# Inches of legends that panels have room for.
_HEIGHT_WITH_ROOM = 0.45


def describe(axes: matplotlib.axes.Axes, *, title: str = "", x: str = "", y: str = "") -> None:
    """Writes what a panel shows, and gives its axes the ticks of all figures.

    Args:
      axes: The panel, with its scales set.
      title: Above it; broken into lines where it is longer than the panel is wide.
      x: Below it.
      y: Beside it.
    """
    axes.set_ylabel(y, fontsize=TEXT)
    width = free_width(axes) / axes.figure.dpi * POINTS_PER_INCH
    axes.set_title(in_lines(title, int(width / (TITLE * WIDTH_OF_CHARACTER))), fontsize=TITLE)
    axes.set_xlabel(in_lines(x, int(width / (TEXT * WIDTH_OF_CHARACTER))), fontsize=TEXT)
    axes.grid(True, alpha=0.3, linewidth=0.6)
    axes.set_axisbelow(True)
    for axis in (axes.xaxis, axes.yaxis):
        if isinstance(axis.get_major_locator(), matplotlib.ticker.FixedLocator):
            continue
        if axis.get_scale() == "log":
            axis.set_major_locator(LogarithmicTicks())
            axis.set_minor_locator(matplotlib.ticker.NullLocator())
        else:
            axis.set_major_locator(LinearTicks())
        axis.set_major_formatter(PlainNumbers())


def heading(figure: matplotlib.figure.Figure, text: str) -> None:
    """Writes a title above all panels, in lines that are not longer than the figure is wide.

    Args:
      figure: The figure.
      text: The title.
    """
    width = figure.get_figwidth() * POINTS_PER_INCH
    broken = in_lines(text, int(width / (1.1 * TITLE * WIDTH_OF_CHARACTER)))
    figure.suptitle(broken, fontsize=1.1 * TITLE)


def legend(axes: matplotlib.axes.Axes) -> None:
    """Draws the legend of a panel between the panel and its title, where it covers no data.

    Args:
      axes: The panel, with all that the legend names, and its title.
    """
    handles, labels = axes.get_legend_handles_labels()
    if not handles:
        return
    labels = [in_lines(label, CHARACTERS_OF_NAME) for label in labels]
    renderer = _renderer(axes)
    for num_columns in range(min(len(handles), 4), 0, -1):
        drawn = axes.legend(
            handles,
            labels,
            fontsize=SMALL,
            loc="lower center",
            bbox_to_anchor=(0.5, 1.0),
            ncols=num_columns,
            frameon=False,
            borderaxespad=0.7,
            columnspacing=1.2,
        )
        box = drawn.get_window_extent(renderer)
        if box.width <= free_width(axes):
            break
    height = box.height / axes.figure.dpi
    axes.set_title(axes.get_title(), fontsize=TITLE, pad=height * POINTS_PER_INCH + 14.0)
    # The figure becomes higher, so that the panels stay as high as they were.
    beside = [_height_of_legend(other) for other in axes.figure.axes if other is not axes]
    more = height - max([_HEIGHT_WITH_ROOM, *beside])
    if more > 0.0:
        whole = axes.get_figure(root=True)
        assert whole is not None
        whole.set_size_inches(whole.get_figwidth(), whole.get_figheight() + more)


def _renderer(axes: matplotlib.axes.Axes) -> Any:
    canvas: Any = axes.figure.canvas
    return canvas.get_renderer()


def _height_of_legend(axes: matplotlib.axes.Axes) -> float:
    """In inches, of what :func:`legend` has drawn."""
    drawn = axes.get_legend()
    if drawn is None:
        return 0.0
    box = drawn.get_window_extent(_renderer(axes))
    return float(box.height / axes.figure.dpi)
