"""The figures of experiments: matplotlib's own objects, no pyplot and no window."""

from collections.abc import Mapping, Sequence
from typing import IO

import matplotlib.axes
import matplotlib.backends.backend_agg
import matplotlib.figure
import numpy as np

_DOTS_PER_INCH = 100
_INCHES_PER_PANEL = (5.2, 3.6)


def panels(
    num_rows: int, num_columns: int, inches: tuple[float, float] = _INCHES_PER_PANEL
) -> tuple[matplotlib.figure.Figure, np.ndarray]:
    """Returns a figure with panels.

    Args:
      num_rows: Rows of panels.
      num_columns: Columns of panels.
      inches: Width and height of a panel.

    Returns:
      The figure, and a (num_rows, num_columns) array of its axes.
    """
    figure = matplotlib.figure.Figure(
        figsize=(inches[0] * num_columns, inches[1] * num_rows), layout="constrained"
    )
    matplotlib.backends.backend_agg.FigureCanvasAgg(figure)
    return figure, figure.subplots(num_rows, num_columns, squeeze=False)


def save(figure: matplotlib.figure.Figure, file: IO[bytes]) -> None:
    """Writes a figure as PNG.

    Args:
      figure: The figure.
      file: An open binary file.

    Raises:
      OSError: If it cannot be written.
    """
    figure.savefig(file, dpi=_DOTS_PER_INCH, format="png", metadata={"Software": None})


def lines(
    axes: matplotlib.axes.Axes,
    curves: Mapping[str, tuple[Sequence[float] | np.ndarray, Sequence[float] | np.ndarray]],
    *,
    title: str,
    x: str,
    y: str,
    marker: str = "",
    logarithmic: str = "",
) -> None:
    """Draws curves into a panel, with a legend.

    Args:
      axes: The panel.
      curves: By their names in the legend, their points' places and values.
      title: Above the panel.
      x: Below it.
      y: Beside it.
      marker: matplotlib's marker of points; none by default.
      logarithmic: Which axes are logarithmic: ``x``, ``y``, ``xy`` or none.
    """
    for name, (places, values) in curves.items():
        axes.plot(places, values, label=name, marker=marker, markersize=4, linewidth=1.2)
    if "x" in logarithmic:
        axes.set_xscale("log")
    if "y" in logarithmic:
        axes.set_yscale("log")
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.grid(True, alpha=0.3)
    axes.legend(fontsize="small")


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
        vmax=largest,
        interpolation="nearest",
    )
    axes.set_title(title, fontsize="medium")
    axes.set(xticks=[], yticks=[])
    if bar:
        figure.colorbar(image, ax=axes, shrink=0.8)
