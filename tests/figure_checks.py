"""What a critical reader finds in a figure: text on text, legends over data, colours alike."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import matplotlib.axes
import matplotlib.colors
import matplotlib.figure
import matplotlib.text
import numpy as np

# The least difference of colours of one panel, in CIELAB, where a difference of 2.3 is just
# noticeable side by side.
_LEAST_DIFFERENCE = 10.0
# The least contrast of text in cells: WCAG 2.1, success criterion 1.4.3.
_LEAST_CONTRAST = 4.5
# Boxes of text may touch; fonts have room inside.
_SLACK_IN_DOTS = 1.0


def faults(figure: matplotlib.figure.Figure) -> list[str]:
    """Returns what is wrong with a figure, once it is laid out; nothing of a good one."""
    figure.draw_without_rendering()
    found = [*_text_on_text(figure), *_text_outside(figure)]
    for axes in figure.axes:
        if axes.axison:
            found += [*_legend_over_data(axes), *_colours_alike(axes), *_hidden_curves(axes)]
            found += _unreadable_cells(axes)
    return found


def _texts(figure: matplotlib.figure.Figure) -> Iterator[tuple[str, Any]]:
    """All that is written, with where it stands: cells of a table by themselves."""
    renderer = figure.canvas.get_renderer()
    written: list[matplotlib.text.Text] = list(figure.texts)
    if figure._suptitle is not None and figure._suptitle not in written:
        written.append(figure._suptitle)
    for axes in figure.axes:
        written += axes.texts
        if not axes.axison:
            continue
        written += [axes.title, axes.xaxis.label, axes.yaxis.label]
        written += [axes.xaxis.get_offset_text(), axes.yaxis.get_offset_text()]
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            for tick in axis.get_major_ticks() + axis.get_minor_ticks():
                if low <= tick.get_loc() <= high:
                    written += [tick.label1, tick.label2]
        drawn = axes.get_legend()
        if drawn is not None:
            yield f"the legend of {axes.get_title()!r}", drawn.get_window_extent(renderer)
    for text in written:
        if text.get_visible() and text.get_text().strip():
            yield repr(text.get_text()), text.get_window_extent(renderer)


def _text_on_text(figure: matplotlib.figure.Figure) -> list[str]:
    return [
        f"{one} is on {other}"
        for (one, box), (other, other_box) in itertools.combinations(_texts(figure), 2)
        if min(box.x1, other_box.x1) - max(box.x0, other_box.x0) > _SLACK_IN_DOTS
        and min(box.y1, other_box.y1) - max(box.y0, other_box.y0) > _SLACK_IN_DOTS
    ]


def _text_outside(figure: matplotlib.figure.Figure) -> list[str]:
    width, height = figure.bbox.width, figure.bbox.height
    return [
        f"{name} is cut off"
        for name, box in _texts(figure)
        if min(box.x0, box.y0) < -_SLACK_IN_DOTS
        or box.x1 > width + _SLACK_IN_DOTS
        or box.y1 > height + _SLACK_IN_DOTS
    ]


def _legend_over_data(axes: matplotlib.axes.Axes) -> list[str]:
    drawn = axes.get_legend()
    if drawn is None:
        return []
    box = drawn.get_window_extent()
    panel = axes.get_window_extent()
    overlaps = (
        min(box.x1, panel.x1) - max(box.x0, panel.x0) > _SLACK_IN_DOTS
        and min(box.y1, panel.y1) - max(box.y0, panel.y0) > _SLACK_IN_DOTS
    )
    return ["a legend covers its panel"] if overlaps else []


def _named_lines(axes: matplotlib.axes.Axes) -> list[Any]:
    """The lines that a reader tells apart: those with a name."""
    return [line for line in axes.get_lines() if not str(line.get_label()).startswith("_")]


def _colours_alike(axes: matplotlib.axes.Axes) -> list[str]:
    named = [(str(line.get_label()), line.get_color()) for line in _named_lines(axes)]
    named += [
        (str(container.get_label()), container.lines[0].get_color())
        for container in axes.containers
        if hasattr(container, "has_xerr") and not str(container.get_label()).startswith("_")
    ]
    return [
        f"{one} and {other} have nearly one colour"
        for (one, colour), (other, other_colour) in itertools.combinations(named, 2)
        if difference(colour, other_colour) < _LEAST_DIFFERENCE
    ]


def contrast(one: Sequence[float], other: Sequence[float]) -> float:
    """The contrast of two colours, from 1 to 21 (WCAG 2.1, "contrast ratio")."""
    darker, lighter = sorted(map(_luminance, (one, other)))
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(colour: Sequence[float]) -> float:
    parts = np.asarray(colour[:3], float)
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    return float(linear @ (0.2126, 0.7152, 0.0722))


def difference(one: Any, other: Any) -> float:
    """The distance of two colours in CIELAB (CIE 1976)."""
    return float(np.linalg.norm(_lab(one) - _lab(other)))


def _lab(colour: Any) -> np.ndarray:
    parts = np.array(matplotlib.colors.to_rgb(colour))
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    matrix = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    xyz = np.array(matrix) @ linear / np.array([0.95047, 1.0, 1.08883])
    f = np.where(xyz > (6 / 29) ** 3, np.cbrt(xyz), xyz / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def _hidden_curves(axes: matplotlib.axes.Axes) -> list[str]:
    """Where curves lie on top of each other, the lower one has to be the broader."""
    found = []
    lines = [line for line in _named_lines(axes) if line.get_linestyle() != "None"]
    for place, lower in enumerate(lines):
        below = axes.transData.transform(np.column_stack(lower.get_data()).astype(float))
        for upper in lines[place + 1 :]:
            above = axes.transData.transform(np.column_stack(upper.get_data()).astype(float))
            if (
                len(below) < 2
                or len(above) < 2
                or not (np.all(np.isfinite(below)) and np.all(np.isfinite(above)))
            ):
                continue
            distance = np.abs(below[:, 1] - np.interp(below[:, 0], above[:, 0], above[:, 1]))
            # What is below a broken line is seen between its parts.
            is_solid = upper.get_linestyle() == "-" or lower.get_linestyle() != "-"
            is_hidden = is_solid and np.mean(distance <= 1.0) > 0.9
            if is_hidden and lower.get_linewidth() < upper.get_linewidth() + 2.0:
                found.append(f"{upper.get_label()} hides {lower.get_label()}")
    return found


def _unreadable_cells(axes: matplotlib.axes.Axes) -> list[str]:
    if not axes.images:
        return []
    (image,) = axes.images
    values = np.asarray(image.get_array())
    found = []
    for text in axes.texts:
        column, row = text.get_position()
        cell = image.cmap(image.norm(values[round(row), round(column)]))
        written = matplotlib.colors.to_rgb(text.get_color())
        if contrast(written, tuple(cell)) < _LEAST_CONTRAST:
            found.append(f"{text.get_text()} cannot be read in its cell")
    return found
