"""The style of every figure: colours of mechanisms, text, ticks, legends, cells and files.

Figures are matplotlib's own objects: no pyplot, no window, no state between figures. Nothing
here is imported by ``import mf_aggregators``, which works without matplotlib.
"""

import colorsys
import dataclasses
import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import IO, Any, TypeAlias

import matplotlib.axes
import matplotlib.axis
import matplotlib.backends.backend_agg
import matplotlib.colors
import matplotlib.figure
import matplotlib.layout_engine
import matplotlib.ticker
import numpy as np

Numbers: TypeAlias = Sequence[float] | np.ndarray

_DOTS_PER_INCH = 100
_INCHES_PER_PANEL = (5.2, 3.6)
# Text, in points.
_TITLE, _TEXT, _SMALL = 11, 10, 9
_POINTS_PER_INCH = 72
# Of a character, on average, in units of the size of its text.
_WIDTH_OF_CHARACTER = 0.6
# The axis and its label at the left of a panel.
_POINTS_BESIDE_A_PANEL = 50
# Longer names are broken into lines.
_CHARACTERS_OF_NAME = 32
# Inches of legends that panels have room for.
_HEIGHT_WITH_ROOM = 0.45
# Single points of a line with more of them are not marked.
MOST_MARKED_POINTS = 60
# Curves that are apart by less of the height of a panel hide each other.
_HIDING = 0.012

# What a name has to contain to be of a mechanism; the first that fits. The papers' names count.
_MECHANISMS = (
    (r"^none\b|no noise|not private", "none"),
    (r"banded_inverse", "banded_inverse"),
    (r"banded|bandmf", "banded"),
    (r"structured", "structured"),
    (r"tree|honaker", "tree"),
    (r"\bopt|multi-epoch|single-epoch", "optimal"),
    (r"toeplitz", "toeplitz"),
    (r"\bblt", "blt"),
    (r"identity|independent|sgd", "identity"),
)
_COLOURS = {
    "banded": "#0b61b0",
    "identity": "#d95f02",
    "tree": "#16985a",
    "optimal": "#a63d97",
    "blt": "#d9a300",
    "toeplitz": "#29a9cf",
    "none": "#595959",
    "banded_inverse": "#a4765c",
    "structured": "#8fa31e",
}
# Lightness, added, of a mechanism's colour for a second and a third line of it in a figure.
_SHADES = (0.0, -0.20, 0.20)
# Of lines that mark a level; there are never more.
_LEVELS = ("black", "#9a9a9a")
_LINES = ("-", "--", (0, (1, 1.2)))
_MOST_TICKS = 9
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h", "*")


@dataclasses.dataclass(frozen=True)
class Style:
    """How a curve is drawn.

    Attributes:
      colour: ``#rrggbb``.
      line: matplotlib's line style.
      marker: matplotlib's marker.
    """

    colour: str
    line: Any
    marker: str


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
        axes.tick_params(labelsize=_SMALL)
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


def styles(names: Sequence[str]) -> dict[str, Style]:
    """Returns a style for each of the names that one figure has.

    Args:
      names: Names of mechanisms, as the library or the papers have them, or any others.

    Returns:
      By name its style. A mechanism has the same colour in every figure; further lines of it
      have other shades and line styles, and other names the colours that are left. No two of
      up to 27 names have one colour, nor one marker of up to twelve.
    """
    distinct = tuple(dict.fromkeys(names))
    known = {name: _mechanism(name) for name in distinct}
    colours = list(_COLOURS.values())
    shades = [(shade, colour) for shade in range(len(_SHADES)) for colour in colours]
    taken: set[tuple[int, str]] = set()
    chosen: dict[str, tuple[int, str]] = {}
    for name, mechanism in known.items():
        if mechanism is not None:
            own = [(shade, _COLOURS[mechanism]) for shade in range(len(_SHADES))]
            free = [each for each in own if each not in taken]
            if free:
                chosen[name] = free[0]
                taken.add(free[0])
    for place, name in enumerate(each for each in distinct if each not in chosen):
        free = [each for each in shades if each not in taken]
        chosen[name] = free[0] if free else shades[place % len(shades)]
        taken.add(chosen[name])
    return {
        name: Style(
            _shaded(chosen[name][1], _SHADES[chosen[name][0]]),
            _LINES[chosen[name][0]],
            _MARKERS[place % len(_MARKERS)],
        )
        for place, name in enumerate(distinct)
    }


def as_solid(style: Style) -> Style:
    """Returns the style with an unbroken line, for a curve that jumps from round to round.

    Args:
      style: A style.
    """
    return dataclasses.replace(style, line="-")


def _mechanism(name: str) -> str | None:
    for pattern, mechanism in _MECHANISMS:
        if re.search(pattern, name, re.IGNORECASE):
            return mechanism
    return None


def _shaded(colour: str, lightness: float) -> str:
    hue, light, saturation = colorsys.rgb_to_hls(*matplotlib.colors.to_rgb(colour))
    lighter = min(0.80, max(0.12, light + lightness))
    return str(matplotlib.colors.to_hex(colorsys.hls_to_rgb(hue, lighter, saturation)))


def describe(axes: matplotlib.axes.Axes, *, title: str = "", x: str = "", y: str = "") -> None:
    """Writes what a panel shows, and gives its axes the ticks of all figures.

    Args:
      axes: The panel, with its scales set.
      title: Above it; broken into lines where it is longer than the panel is wide.
      x: Below it.
      y: Beside it.
    """
    axes.set_ylabel(y, fontsize=_TEXT)
    width = _free_width(axes) / axes.figure.dpi * _POINTS_PER_INCH
    axes.set_title(_broken(title, int(width / (_TITLE * _WIDTH_OF_CHARACTER))), fontsize=_TITLE)
    axes.set_xlabel(_broken(x, int(width / (_TEXT * _WIDTH_OF_CHARACTER))), fontsize=_TEXT)
    axes.grid(True, alpha=0.3, linewidth=0.6)
    axes.set_axisbelow(True)
    for axis in (axes.xaxis, axes.yaxis):
        if isinstance(axis.get_major_locator(), matplotlib.ticker.FixedLocator):
            continue
        if axis.get_scale() == "log":
            axis.set_major_locator(_LogarithmicTicks())
            axis.set_minor_locator(matplotlib.ticker.NullLocator())
        else:
            axis.set_major_locator(_LinearTicks())
        axis.set_major_formatter(_PlainNumbers())


def heading(figure: matplotlib.figure.Figure, text: str) -> None:
    """Writes a title above all panels, in lines that are not longer than the figure is wide.

    Args:
      figure: The figure.
      text: The title.
    """
    width = figure.get_figwidth() * _POINTS_PER_INCH
    broken = _broken(text, int(width / (1.1 * _TITLE * _WIDTH_OF_CHARACTER)))
    figure.suptitle(broken, fontsize=1.1 * _TITLE)


def set_places(axis: matplotlib.axis.Axis, places: Numbers) -> None:
    """Puts ticks of an axis at the places that have points, as many as have room.

    Args:
      axis: The axis, with its scale set.
      places: The places.
    """
    axis.set_major_locator(_Places(places))
    axis.set_minor_locator(matplotlib.ticker.NullLocator())
    axis.set_major_formatter(_PlainNumbers())


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
    for shade, (name, value) in zip(_LEVELS, (levels or {}).items(), strict=False):
        axes.axhline(value, color=shade, linestyle="--", linewidth=1.2, label=name)
    describe(axes, title=title, x=x, y=y)
    if places is not None:
        set_places(axes.xaxis, places)
    if with_legend:
        legend(axes)


# Between names of curves that are one.
_AND_THE_SAME = "\0"


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


def legend(axes: matplotlib.axes.Axes) -> None:
    """Draws the legend of a panel between the panel and its title, where it covers no data.

    Args:
      axes: The panel, with all that the legend names, and its title.
    """
    handles, labels = axes.get_legend_handles_labels()
    if not handles:
        return
    labels = [_broken(label, _CHARACTERS_OF_NAME) for label in labels]
    renderer = _renderer(axes)
    for num_columns in range(min(len(handles), 4), 0, -1):
        drawn = axes.legend(
            handles,
            labels,
            fontsize=_SMALL,
            loc="lower center",
            bbox_to_anchor=(0.5, 1.0),
            ncols=num_columns,
            frameon=False,
            borderaxespad=0.7,
            columnspacing=1.2,
        )
        box = drawn.get_window_extent(renderer)
        if box.width <= _free_width(axes):
            break
    height = box.height / axes.figure.dpi
    axes.set_title(axes.get_title(), fontsize=_TITLE, pad=height * _POINTS_PER_INCH + 14.0)
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


def _free_width(axes: matplotlib.axes.Axes) -> float:
    """In dots: the panel's share of the figure without what names of rows and axes take."""
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
    points = characters * _SMALL * _WIDTH_OF_CHARACTER + num_columns * _POINTS_BESIDE_A_PANEL
    return (whole - points / _POINTS_PER_INCH * float(axes.figure.dpi)) * float(share)


def _is_in_column(axes: matplotlib.axes.Axes, column: int) -> bool:
    place = axes.get_subplotspec()
    return place is not None and place.colspan.start == column


def _characters_of_names(axes: matplotlib.axes.Axes) -> int:
    """The longest line of the names of a panel's rows; 0 without such names."""
    if not isinstance(axes.yaxis.get_major_locator(), matplotlib.ticker.FixedLocator):
        return 0
    names = [label.get_text() for label in axes.get_yticklabels()]
    return max((len(line) for name in names for line in name.split("\n")), default=0)


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
    broken = [_broken(name, _CHARACTERS_OF_NAME) for name in names]
    axes.set_yticks(range(len(names)), broken, fontsize=_SMALL)
    axes.set_ylim(len(names) - 0.5, -0.5)


def height_of_rows(names: Sequence[str]) -> float:
    """Returns the inches that a panel with a row for each name needs.

    Args:
      names: The names of the rows.
    """
    most = max((_broken(name, _CHARACTERS_OF_NAME).count("\n") for name in names), default=0)
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
    colours = [_COLOURS.get(_mechanism(name) or "", _LEVELS[1]) for name in names]
    axes.barh(range(len(names)), values, 0.66, color=colours)
    for place, value in enumerate(values):
        axes.annotate(
            format(value, form),
            (value, place),
            xytext=(3, 0),
            textcoords="offset points",
            va="center",
            fontsize=_SMALL,
        )
    name_rows(axes, names)
    describe(axes, title=title, x=x)
    # Room for the numbers.
    axes.set_xlim(0.0, 1.35 * max((float(value) for value in values), default=0.0) or 1.0)
    axes.grid(False, axis="y")


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
            fontsize=_SMALL - 1,
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
    bar.ax.tick_params(labelsize=_SMALL)
    bar.ax.yaxis.set_major_formatter(_PlainNumbers())
    bar.set_label(text, fontsize=_TEXT)


def text_colour(background: tuple[float, ...]) -> str:
    """Returns black or white, whichever stands out more: with a contrast of at least 4.5.

    Args:
      background: Red, green and blue from 0 to 1, and perhaps an opacity of 1.

    Returns:
      ``black`` or ``white``.
    """
    return max(
        ("black", "white"),
        key=lambda each: contrast(matplotlib.colors.to_rgb(each), background),
    )


def contrast(one: Sequence[float], other: Sequence[float]) -> float:
    """Returns the contrast of two colours, from 1 to 21 (WCAG 2.1, "contrast ratio").

    Args:
      one: Red, green and blue from 0 to 1.
      other: Likewise.
    """
    lighter, darker = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(colour: Sequence[float]) -> float:
    parts = np.asarray(colour[:3], float)
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    return float(linear @ (0.2126, 0.7152, 0.0722))


def _broken(text: str, most_characters: int) -> str:
    """Text in lines of at most so many characters; its own line breaks stay."""
    found = []
    for line in text.split("\n"):
        found += textwrap.wrap(line, max(8, most_characters), break_on_hyphens=False) or [""]
    return "\n".join(found)


class _PlainNumbers(matplotlib.ticker.Formatter):
    """Numbers with as few digits as tell them apart, without an offset somewhere else."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        del pos
        return _number(x, 6)

    def format_ticks(self, values: Sequence[float]) -> list[str]:
        """Returns the labels of all ticks: on a linear axis with equally many decimals."""
        steps = np.diff(np.unique(np.asarray(values, float)))
        error = 0.01 * float(np.min(steps)) if steps.size else math.inf
        labels: list[str] = []
        digits = 2
        for digits in range(2, 16):
            labels = [_number(value, digits) for value in values]
            if all(abs(float(f"{value:.{digits}g}") - value) <= error for value in values):
                break
        is_linear = self.axis is not None and self.axis.get_scale() == "linear"  # type: ignore[union-attr]
        if not is_linear and any("$" in label for label in labels):
            labels = [_power(value, digits) for value in values]
        decimals = max((len(label.partition(".")[2]) for label in labels), default=0)
        if is_linear and decimals and not any("$" in label for label in labels):
            labels = [f"{value:,.{decimals}f}".replace("-", "−") for value in values]
        return labels


def scientific(number: float) -> str:
    """Returns a number as people write it in a sentence: 1e-6, not 1e-06.

    Args:
      number: The number.
    """
    return re.sub(r"e([-+])0*", r"e\1", f"{number:g}").replace("e+", "e")


def _number(value: float, digits: int) -> str:
    if value == 0.0 or not math.isfinite(value):
        return f"{abs(value):g}"
    rounded = float(f"{value:.{digits}g}")
    exponent = math.floor(math.log10(abs(rounded)))
    if not -4 <= exponent < 6:
        return _power(value, digits)
    text = f"{rounded:,.{max(0, digits - 1 - exponent)}f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return text.replace("-", "−")


def _power(value: float, digits: int) -> str:
    """A number times a power of ten."""
    if value == 0.0:
        return "0"
    mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
    mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
    factor = {"1": "", "-1": "-"}.get(mantissa, f"{mantissa}\\cdot ")
    return f"${factor}10^{{{int(exponent)}}}$"


class _Ticks(matplotlib.ticker.Locator):
    """Ticks that depend on the room that they have, until a layout settles them."""

    settled: Sequence[float] | None = None

    def __call__(self) -> Sequence[float]:
        assert isinstance(self.axis, matplotlib.axis.Axis)
        if self.settled is not None:
            return self.settled
        return self.tick_values(*self.axis.get_view_interval())


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
            if isinstance(locator := axis.get_major_locator(), _Ticks)
        ]
        for locator in ticks:
            locator.settled = None
        super().execute(fig)
        for locator in ticks:
            locator.settled = locator()
        return super().execute(fig)


class _LinearTicks(_Ticks):
    """Ticks of a linear axis: round numbers, as many as have room."""

    def tick_values(self, vmin: float, vmax: float) -> Sequence[float]:
        """Returns the places of the ticks."""
        assert isinstance(self.axis, matplotlib.axis.Axis)
        return _round_numbers(self.axis, *sorted((vmin, vmax)))


class _LogarithmicTicks(_Ticks):
    """Ticks of a logarithmic axis: numbers that people count in, as many as have room."""

    def tick_values(self, vmin: float, vmax: float) -> Sequence[float]:
        """Returns the places of the ticks."""
        assert isinstance(self.axis, matplotlib.axis.Axis)
        low, high = sorted((vmin, vmax))
        if not 0.0 < low < high or not math.isfinite(high):
            return []
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        for factors, every in (
            ((1, 1.5, 2, 3, 4, 5, 6, 7, 8), 1),
            ((1, 2, 3, 5, 7), 1),
            ((1, 2, 5), 1),
            ((1, 3), 1),
            *(((1,), every) for every in range(1, 2 + (last - first) // 2)),
        ):
            found = [
                factor * 10.0**exponent
                for exponent in range(first, last + 1)
                if exponent % every == 0
                for factor in factors
                if low <= factor * 10.0**exponent <= high
            ]
            if 2 <= len(found) <= _MOST_TICKS and _have_room(self.axis, found):
                return found
        # Less than a factor of two: as on a linear axis.
        return _round_numbers(self.axis, low, high)


class _Places(_Ticks):
    """Ticks at given places, or at every second or third of them where there is no room."""

    def __init__(self, places: Numbers) -> None:
        self._places = np.unique(np.asarray(places, float))

    def tick_values(self, vmin: float, vmax: float) -> Sequence[float]:
        """Returns the places of the ticks."""
        assert isinstance(self.axis, matplotlib.axis.Axis)
        low, high = sorted((vmin, vmax))
        inside = [float(place) for place in self._places if low <= place <= high]
        for every in range(1, len(inside)):
            if _have_room(self.axis, inside[::every]):
                return inside[::every]
        return inside[:1]


def _round_numbers(axis: matplotlib.axis.Axis, low: float, high: float) -> list[float]:
    found: list[float] = []
    for number in range(_MOST_TICKS, 0, -1):
        locator = matplotlib.ticker.MaxNLocator(number, steps=[1, 2, 2.5, 5, 10])
        found = [float(place) for place in locator.tick_values(low, high) if low <= place <= high]
        if _have_room(axis, found):
            return found
    return found[:1]


def _have_room(axis: matplotlib.axis.Axis, places: Sequence[float]) -> bool:
    """Whether the labels of ticks are apart."""
    if len(places) < 2:
        return True
    box = axis.axes.bbox
    where = axis.get_transform().transform(np.array([*axis.get_view_interval(), *places], float))
    share = float(np.min(np.diff(np.sort(where[2:]))) / abs(where[1] - where[0]))
    if axis is axis.axes.yaxis:
        length, size = box.height, 1.5 * _SMALL
    else:
        labels = axis.get_major_formatter().format_ticks(list(places))
        # Powers have words of mathematical text that are not written.
        most = max(len(re.sub(r"\\cdot|[${}^]", "", label)) for label in labels)
        length, size = box.width, (most + 1) * _SMALL * 0.65
    points = length / float(axis.axes.figure.dpi) * _POINTS_PER_INCH
    return share * points >= size
