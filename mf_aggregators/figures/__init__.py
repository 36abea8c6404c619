"""The style of every figure: colours of mechanisms, text, ticks, legends, cells and files.

Figures are matplotlib's own objects: no pyplot, no window, no state between figures. Nothing
here is imported by ``import mf_aggregators``, which works without matplotlib.
"""

from mf_aggregators.figures.colours import Style, contrast, styles, text_colour
from mf_aggregators.figures.plots import (
    MOST_MARKED_POINTS,
    Interval,
    bars,
    cells,
    describe,
    heading,
    heat_map,
    height_of_rows,
    intervals,
    legend,
    lines,
    panels,
    save,
    scientific,
)

__all__ = [
    "MOST_MARKED_POINTS",
    "Interval",
    "Style",
    "bars",
    "cells",
    "contrast",
    "describe",
    "heading",
    "heat_map",
    "height_of_rows",
    "intervals",
    "legend",
    "lines",
    "panels",
    "save",
    "scientific",
    "styles",
    "text_colour",
]
