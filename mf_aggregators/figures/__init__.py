"""The style of every figure: colours of mechanisms, text, ticks, legends, cells and files.

Figures are matplotlib's own objects: no pyplot, no window, no state between figures. Nothing
here is imported by ``import mf_aggregators``, which works without matplotlib.
"""

from mf_aggregators.figures.captions import describe, heading, legend
from mf_aggregators.figures.contrasts import contrast, text_colour
from mf_aggregators.figures.curves import MOST_MARKED_POINTS, lines
from mf_aggregators.figures.matrices import cells, heat_map
from mf_aggregators.figures.mechanism_styles import Style, as_solid, styles
from mf_aggregators.figures.number_labels import scientific
from mf_aggregators.figures.panel_layout import panels, save
from mf_aggregators.figures.rows import Interval, bars, height_of_rows, intervals, name_rows
from mf_aggregators.figures.svg_elements import InlineSvg, inline_svg
from mf_aggregators.figures.ticks import set_places

__all__ = [
    "MOST_MARKED_POINTS",
    "InlineSvg",
    "Interval",
    "Style",
    "as_solid",
    "bars",
    "cells",
    "contrast",
    "describe",
    "heading",
    "heat_map",
    "height_of_rows",
    "inline_svg",
    "intervals",
    "legend",
    "lines",
    "name_rows",
    "panels",
    "save",
    "scientific",
    "set_places",
    "styles",
    "text_colour",
]
