"""Figures with panels, the room that a panel has in its figure, and files."""

from typing import IO, Any

import matplotlib.axes
import matplotlib.backends.backend_agg
import matplotlib.figure
import matplotlib.layout_engine
import matplotlib.ticker
import numpy as np

from mf_aggregators.figures.text import POINTS_PER_INCH, SMALL, WIDTH_OF_CHARACTER
from mf_aggregators.figures.ticks import Ticks

_DOTS_PER_INCH = 100
_INCHES_PER_PANEL = (5.2, 3.6)
# The axis and its label at the left of a panel.
_POINTS_BESIDE_A_PANEL = 50


def panels(
    num_rows: int,
    num_columns: int,
    inches: tuple[float, float] = _INCHES_PER_PANEL,
    **options: Any,
) -> tuple[matplotlib.figure.Figure, np.ndarray]:
    """Returns a figure with panels.

    Args:
      num_rows: Rows of panels.
      num_columns: Columns of panels.
      inches: Width and height of a panel.
      **options: Of ``matplotlib.figure.Figure.subplots``: which axes are shared, and ratios.

    Returns:
      The figure, and a (num_rows, num_columns) array of its axes.
    """
    figure = matplotlib.figure.Figure(
        figsize=(inches[0] * num_columns, inches[1] * num_rows),
        dpi=_DOTS_PER_INCH,
        layout=_Layout(w_pad=0.08, h_pad=0.08),
    )
    matplotlib.backends.backend_agg.FigureCanvasAgg(figure)
    grid = figure.subplots(num_rows, num_columns, squeeze=False, **options)
    for axes in grid.ravel():
        axes.tick_params(labelsize=SMALL)
    return figure, grid


def save(figure: matplotlib.figure.Figure, file: IO[bytes] | str, suffix: str = "png") -> None:
    """Writes a figure.

    Args:
      figure: The figure.
      file: An open binary file, or the path of one.
      suffix: ``png``, ``pdf`` or ``svg``.

    Raises:
      OSError: If it cannot be written.
    """
    # The same figure is the same bytes, whichever version of matplotlib is installed.
    options: dict[str, Any] = {"metadata": {"Software": None}} if suffix == "png" else {}
    if suffix == "png":
        options["pil_kwargs"] = {"optimize": True}
    figure.savefig(file, dpi=_DOTS_PER_INCH, format=suffix, **options)


class _Layout(matplotlib.layout_engine.ConstrainedLayoutEngine):
    """A constrained layout of panels whose ticks depend on their size.

    More ticks may need a margin for the label of the last one, in which there is then less room
    for ticks: the ticks of a first layout are those that the second makes room for.
    """

    def execute(self, fig: matplotlib.figure.Figure) -> Any:
        """Lays a figure out."""
        ticks = [
            locator
            for axes in fig.axes
            for axis in (axes.xaxis, axes.yaxis)
            if isinstance(locator := axis.get_major_locator(), Ticks)
        ]
        for locator in ticks:
            locator.settled = None
        super().execute(fig)
        for locator in ticks:
            locator.settled = locator()
        return super().execute(fig)


def free_width(axes: matplotlib.axes.Axes) -> float:
    """Returns the panel's share of the figure, without what names of rows and axes take.

    Args:
      axes: The panel.

    Returns:
      The width in dots.
    """
    place = axes.get_subplotspec()
    whole: float = axes.figure.bbox.width
    if place is None:
        return 0.8 * whole
    num_columns = place.get_gridspec().ncols
    ratios = np.resize(
        np.array(place.get_gridspec().get_width_ratios() or [1.0], float), num_columns
    )
    share = np.sum(ratios[place.colspan.start : place.colspan.stop]) / np.sum(ratios)
    characters = 0
    for column in range(num_columns):
        below = [other for other in axes.figure.axes if _is_in_column(other, column)]
        characters += max((_characters_of_names(other) for other in below), default=0)
    points = characters * SMALL * WIDTH_OF_CHARACTER + num_columns * _POINTS_BESIDE_A_PANEL
    return (whole - points / POINTS_PER_INCH * float(axes.figure.dpi)) * float(share)


def _is_in_column(axes: matplotlib.axes.Axes, column: int) -> bool:
    place = axes.get_subplotspec()
    return place is not None and place.colspan.start == column


def _characters_of_names(axes: matplotlib.axes.Axes) -> int:
    """The longest line of the names of a panel's rows; 0 without such names."""
    if not isinstance(axes.yaxis.get_major_locator(), matplotlib.ticker.FixedLocator):
        return 0
    names = [label.get_text() for label in axes.get_yticklabels()]
    return max((len(line) for name in names for line in name.split("\n")), default=0)
