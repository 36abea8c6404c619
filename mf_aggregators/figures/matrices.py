"""Matrices as coloured squares, and tables whose cells have colours."""

from collections.abc import Sequence
from typing import Any

import matplotlib.axes
import matplotlib.figure
import numpy as np

from mf_aggregators.figures.captions import describe
from mf_aggregators.figures.contrasts import text_colour
from mf_aggregators.figures.number_labels import PlainNumbers
from mf_aggregators.figures.text import SMALL, TEXT


def heat_map(
    figure: matplotlib.figure.Figure,
    axes: matplotlib.axes.Axes,
    values: np.ndarray,
    *,
    title: str,
    limit: float | None = None,
    bar: bool = True,
) -> None:
    """Draws a matrix into a panel: from white for zero to red, and to blue for below zero.

    Args:
      figure: The figure.
      axes: The panel.
      values: (rows, columns) floats.
      title: Above the panel.
      limit: The magnitude of the darkest colours; the largest one by default.
      bar: Whether to draw a colour bar.
    """
    largest = float(np.max(np.abs(values))) if limit is None else limit
    is_signed = bool(np.min(values) < 0.0)
    image = axes.imshow(
        values,
        cmap="RdBu_r" if is_signed else "Reds",
        vmin=-largest if is_signed else 0.0,
        vmax=largest or 1.0,
        # What is smaller than a dot of the file is averaged; single entries stay squares.
        interpolation="antialiased",
    )
    describe(axes, title=title)
    axes.grid(False)
    axes.set(xticks=[], yticks=[])
    if bar:
        _colour_bar(figure, axes, image, "")


def cells(
    figure: matplotlib.figure.Figure,
    axes: matplotlib.axes.Axes,
    values: np.ndarray,
    texts: Sequence[Sequence[str]],
    *,
    names_of_rows: Sequence[str],
    names_of_columns: Sequence[str],
    title: str,
    x: str,
    y: str,
    bar: str,
    colours: str,
    limits: tuple[float, float],
) -> None:
    """Draws a table whose cells have colours, with text that is black or white by its contrast.

    Args:
      figure: The figure.
      axes: The panel.
      values: (rows, columns) floats: the colours.
      texts: What is in the cells.
      names_of_rows: Beside the rows.
      names_of_columns: Below the columns.
      title: Above the panel.
      x: What columns are.
      y: What rows are.
      bar: What colours are.
      colours: The name of matplotlib's colour map.
      limits: The values of its ends.
    """
    image = axes.imshow(values, cmap=colours, vmin=limits[0], vmax=limits[1], aspect="auto")
    for (row, column), value in np.ndenumerate(values):
        background = image.cmap(image.norm(value))
        axes.text(
            column,
            row,
            texts[row][column],
            ha="center",
            va="center",
            fontsize=SMALL - 1,
            color=text_colour(tuple(background)),
        )
    axes.set_xticks(range(len(names_of_columns)), names_of_columns)
    axes.set_yticks(range(len(names_of_rows)), names_of_rows)
    describe(axes, title=title, x=x, y=y)
    axes.grid(False)
    _colour_bar(figure, axes, image, bar)


def _colour_bar(
    figure: matplotlib.figure.Figure, axes: matplotlib.axes.Axes, image: Any, text: str
) -> None:
    bar = figure.colorbar(image, ax=axes, shrink=0.9)
    bar.ax.tick_params(labelsize=SMALL)
    bar.ax.yaxis.set_major_formatter(PlainNumbers())
    bar.set_label(text, fontsize=TEXT)
