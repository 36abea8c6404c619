"""One style for all figures: colours of mechanisms, text, ticks, legends and files.

Figures are objects of matplotlib, without pyplot, windows, or state between figures. matplotlib's
constrained layout places everything, with the sizes of ``figures.mplstyle``. This module is not
imported by ``import mf_aggregators``, which works without matplotlib.
"""

import colorsys
import contextlib
import pathlib
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import IO, TypeAlias

import matplotlib
import matplotlib.axes
import matplotlib.axis
import matplotlib.backends.backend_agg
import matplotlib.colors
import matplotlib.figure
import matplotlib.ticker
import numpy as np

_Numbers: TypeAlias = Sequence[float] | np.ndarray

# Lines with more points have no markers.
_MOST_MARKED_POINTS = 60
_STYLE = pathlib.Path(__file__).with_name("figures.mplstyle")
_INCHES_PER_PANEL = (5.2, 3.6)
# Longer names are broken into several lines.
_CHARACTERS_OF_NAME = 32
# Characters of a title that fit on an inch, and the inches that labels of a panel's vertical axis
# take.
_CHARACTERS_OF_AN_INCH, _INCHES_BESIDE_A_PANEL = 11.5, 0.7
# The width of a character of a name, in inches.
_INCHES_OF_A_CHARACTER = 0.075
# The height of a legend, in inches, for which panels have room.
_LEGENDS_WITH_ROOM = 0.45
# Curves that are closer than this share of a panel's height hide each other.
_HIDING = 0.012
# The most ticks of a logarithmic axis, or of an axis with given places.
_MOST_TICKS = 6
# Logarithmic axes with a smaller range also have ticks at 2 and 5 times powers of ten.
_FEW_DECADES = 300.0


# Patterns that find the mechanism for a name, also for the papers' names; the first match counts.
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
# The changes of lightness for the first, second and third line of one mechanism.
_SHADES = (0.0, -0.20, 0.20)
# The colours of horizontal lines that mark a level.
_LEVELS = ("black", "#9a9a9a")
_LINES = ("-", "--", (0, (1, 1.2)))
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h", "*")


def styles(names: Sequence[str]) -> dict[str, dict[str, object]]:
    """Returns the style of each curve of a figure, by name.

    Args:
      names: The names of curves: mechanisms, as the library or the papers name them, or others.

    Returns:
      The ``color``, ``linestyle`` and ``marker`` of each curve. A mechanism has the same colour in
      every figure; further curves of it have other shades and line styles, and other names get the
      remaining colours. Up to 27 names have different colours, and up to twelve have different
      markers.
    """
    distinct = list(dict.fromkeys(names))
    pairs = [(shade, colour) for shade in range(len(_SHADES)) for colour in _COLOURS.values()]
    chosen: dict[str, tuple[int, str]] = {}
    # Names of mechanisms get their colours first.
    for name in sorted(distinct, key=lambda each: _mechanism_of(each) is None):
        own = _COLOURS.get(_mechanism_of(name) or "")
        free = [each for each in pairs if each not in chosen.values()] or pairs
        chosen[name] = next((each for each in free if each[1] == own), free[0])
    return {
        name: {
            "color": _shaded(chosen[name][1], _SHADES[chosen[name][0]]),
            "linestyle": _LINES[chosen[name][0]],
            "marker": _MARKERS[place % len(_MARKERS)],
        }
        for place, name in enumerate(distinct)
    }


def _mechanism_of(name: str) -> str | None:
    """The mechanism that a name means, a key of ``_COLOURS``; None for other names."""
    found = (each for pattern, each in _MECHANISMS if re.search(pattern, name, re.IGNORECASE))
    return next(found, None)


def _shaded(colour: str, lightness: float) -> str:
    hue, light, saturation = colorsys.rgb_to_hls(*matplotlib.colors.to_rgb(colour))
    lighter = min(0.80, max(0.12, light + lightness))
    return str(matplotlib.colors.to_hex(colorsys.hls_to_rgb(hue, lighter, saturation)))


def panels(
    num_rows: int,
    num_columns: int,
    inches: tuple[float, float | Sequence[str]] = _INCHES_PER_PANEL,
    **options: object,
) -> tuple[matplotlib.figure.Figure, np.ndarray]:
    """Creates a figure with panels.

    Use it when you start a figure; the other functions draw into its panels.

    Args:
      num_rows: Rows of panels.
      num_columns: Columns of panels.
      inches: Width and height of a panel; instead of the height, a list of names, for a panel with
        a row for each name.
      **options: Options of ``matplotlib.figure.Figure.subplots``, such as shared axes and ratios.

    Returns:
      The figure, and a (num_rows, num_columns) array of its axes.

    Example:
      >>> from mf_aggregators import figures
      >>> figure, axes = figures.panels(num_rows=1, num_columns=2)
      >>> axes.shape
      (1, 2)
    """
    with _style():
        width, height = inches
        height = _height_of_rows(height) if isinstance(height, Sequence) else height
        figure = matplotlib.figure.Figure((width * num_columns, height * num_rows))
        matplotlib.backends.backend_agg.FigureCanvasAgg(figure)
        return figure, figure.subplots(num_rows, num_columns, squeeze=False, **options)


def save(figure: matplotlib.figure.Figure, file: IO[bytes] | str, suffix: str = "png") -> None:
    """Writes a figure to a file.

    Use it when the figure is complete.

    Args:
      figure: The figure.
      file: An open binary file, or the path of one.
      suffix: ``png``, ``pdf`` or ``svg``.

    Raises:
      OSError: If the file cannot be written.

    Example:
      >>> import io
      >>> from mf_aggregators import figures
      >>> figure, axes = figures.panels(num_rows=1, num_columns=1)
      >>> file = io.BytesIO()
      >>> figures.save(figure, file)
      >>> file.getvalue()[1:4]
      b'PNG'
    """
    # Removes dates and versions from the file, so that the same figure gives the same bytes.
    options: dict[str, object] = {}
    if suffix == "png":
        options = {"metadata": {"Software": None}, "pil_kwargs": {"optimize": True}}
    figure.savefig(file, dpi=figure.dpi, format=suffix, **options)


def describe(
    axes: matplotlib.axes.Axes,
    *,
    title: str = "",
    x: str = "",
    y: str = "",
    rows: Sequence[str] = (),
    with_legend: bool = False,
) -> None:
    """Adds title, labels and legend to a panel.

    Use it when your own matplotlib code has drawn a panel.

    Args:
      axes: The panel.
      title: The title above the panel, which is broken into lines if it is too long.
      x: The label below the panel.
      y: The label beside the panel.
      rows: Names of the places 0, 1, ... of the vertical axis, from top to bottom; long ones are
        broken into lines.
      with_legend: Whether to draw the legend between the panel and its title. The figure becomes
        higher, so that panels keep their height.

    Example:
      >>> from mf_aggregators import figures
      >>> figure, axes = figures.panels(num_rows=1, num_columns=1)
      >>> _ = axes[0, 0].plot([1, 2, 4], [1.0, 1.3, 1.7])
      >>> figures.describe(axes[0, 0], title="Errors", x="round", y="error")
      >>> axes[0, 0].get_xlabel()
      'round'
    """
    if rows:
        broken = [_in_lines(name, _CHARACTERS_OF_NAME) for name in rows]
        axes.set_yticks(range(len(rows)), broken, fontsize=9)
        axes.set_ylim(len(rows) - 0.5, -0.5)
    width = _characters(axes)
    with _style():
        axes.set_title(_in_lines(title, width))
        axes.set_xlabel(_in_lines(x, int(1.1 * width)))
        axes.set_ylabel(y)
    for axis in (axes.xaxis, axes.yaxis):
        if axis.get_scale() == "log":
            low, high = sorted(axis.get_view_interval())
            parts = (1.0, 2.0, 5.0) if high < _FEW_DECADES * low else (1.0,)
            axis.set_major_locator(matplotlib.ticker.LogLocator(subs=parts, numticks=_MOST_TICKS))
            axis.set_minor_locator(matplotlib.ticker.NullLocator())
            axis.set_major_formatter("{x:.6g}")
    if with_legend:
        _legend(axes)


def heading(figure: matplotlib.figure.Figure, text: str) -> None:
    """Adds a title above all panels, broken into lines if it is too long.

    Args:
      figure: The figure.
      text: The title.
    """
    with _style():
        characters = int(0.9 * _CHARACTERS_OF_AN_INCH * figure.get_figwidth())
        figure.suptitle(_in_lines(text, characters))


def _legend(axes: matplotlib.axes.Axes) -> None:
    """Draws the legend above a panel."""
    handles, labels = axes.get_legend_handles_labels()
    if not handles:
        return
    labels = [_in_lines(label, _CHARACTERS_OF_NAME) for label in labels]
    longest = max(len(line) for label in labels for line in label.split("\n"))
    num_columns = min(len(labels), 4, max(1, _characters(axes) // (longest + 6)))
    with _style():
        axes.legend(handles, labels, ncols=num_columns, bbox_to_anchor=(0.5, 1.0))
        height = _height_of_legend(axes)
        axes.set_title(axes.get_title(), pad=72.0 * height + 14.0)
    figure = axes.figure
    beside = [_height_of_legend(other) for other in figure.axes if other is not axes]
    more = max(0.0, height - max([_LEGENDS_WITH_ROOM, *beside]))
    figure.set_size_inches(figure.get_figwidth(), figure.get_figheight() + more)


def lines(
    axes: matplotlib.axes.Axes,
    curves: Mapping[str, tuple[_Numbers, _Numbers]],
    *,
    title: str = "",
    x: str = "",
    y: str = "",
    logarithmic: str = "",
    places: _Numbers | None = None,
    levels: Mapping[str, float] | None = None,
    own_styles: Mapping[str, Mapping[str, object]] | None = None,
    with_legend: bool = True,
) -> None:
    """Draws curves into a panel, with title, labels and legend.

    Use it when you draw errors or accuracies over rounds or epsilons.

    Equal curves are drawn once, with all of their names. If a curve nearly hides another one, the
    hidden curve is broad and pale.

    Args:
      axes: The panel.
      curves: The places and values of each curve's points, by its name in the legend.
      title: The title above the panel.
      x: The label below the panel.
      y: The label beside the panel.
      logarithmic: Which axes are logarithmic: ``x``, ``y``, ``xy`` or empty. An axis without a
        positive number stays linear.
      places: The ticks of the horizontal axis; None to choose them automatically.
      levels: The heights of horizontal lines, by name.
      own_styles: The style of each curve, by name; by default, from ``styles``.
      with_legend: Whether to draw the legend.

    Example:
      >>> from mf_aggregators import figures
      >>> figure, axes = figures.panels(num_rows=1, num_columns=1)
      >>> rounds = [1, 2, 4]
      >>> curves = {"banded": (rounds, [1.0, 1.3, 1.7]), "identity": (rounds, [1.0, 1.4, 2.0])}
      >>> figures.lines(axes[0, 0], curves, x="round", y="error")
      >>> [text.get_text() for text in axes[0, 0].get_legend().get_texts()]
      ['banded', 'identity']
    """
    levels = levels or {}
    chosen = own_styles if own_styles is not None else styles(list(curves))
    merged = _merged(curves)
    everywhere = np.concatenate([where for _, where, _ in merged] or [np.zeros(0)])
    heights = np.concatenate([*(values for *_, values in merged), list(levels.values())])
    if "x" in logarithmic and np.any(everywhere > 0.0):
        axes.set_xscale("log")
    if "y" in logarithmic and np.any(heights > 0.0):
        axes.set_yscale("log")
    hidden = _hidden([curve[1:] for curve in merged], axes.get_yscale() == "log")
    for (names, where, values), hides in zip(merged, hidden, strict=True):
        style = chosen[names[0]]
        is_marked = len(where) <= _MOST_MARKED_POINTS and not hides
        axes.plot(
            where,
            values,
            label=" = ".join(names),
            color=style["color"],
            linestyle="-" if hides else style["linestyle"],
            marker=style["marker"] if is_marked else "",
            linewidth=5.0 if hides else 1.4,
            markersize=4,
            alpha=0.45 if hides else 1.0,
            solid_capstyle="butt",
        )
    for shade, (name, value) in zip(_LEVELS, levels.items(), strict=False):
        axes.axhline(value, color=shade, linestyle="--", linewidth=1.2, label=name)
    describe(axes, title=title, x=x, y=y)
    if places is not None:
        ticks = matplotlib.ticker.FixedLocator(np.unique(np.asarray(places, float)), _MOST_TICKS)
        axes.xaxis.set_major_locator(ticks)
        axes.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
        axes.xaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:,.6g}"))
    if with_legend:
        _legend(axes)


def _height_of_rows(names: Sequence[str]) -> float:
    """The height, in inches, of a panel with a row for each name."""
    most = max((_in_lines(name, _CHARACTERS_OF_NAME).count("\n") for name in names), default=0)
    return 1.2 + max(len(names), 2) * (0.28 + 0.16 * most)


def bars(
    axes: matplotlib.axes.Axes,
    names: Sequence[str],
    values: _Numbers,
    *,
    title: str = "",
    x: str = "",
    form: str = ".3g",
) -> None:
    """Draws one horizontal bar for each name, and writes its number at the end of the bar.

    Args:
      axes: The panel.
      names: The names of the bars, from top to bottom.
      values: The lengths of the bars, not negative.
      title: The title above the panel.
      x: The label below the panel.
      form: The format of the numbers.
    """
    # Bars of one mechanism have the same colour, because each bar has its name.
    colours = [_COLOURS.get(_mechanism_of(name) or "", _LEVELS[1]) for name in names]
    drawn = axes.barh(range(len(names)), values, 0.66, color=colours)
    axes.bar_label(drawn, [format(value, form) for value in values], padding=3, fontsize=9)
    describe(axes, title=title, x=x, rows=names)
    # Makes room for the numbers at the ends of bars.
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
    """Draws a matrix as a heat map: zero is white, positive red, and negative blue.

    Use it when you draw a matrix.

    Args:
      figure: The figure.
      axes: The panel.
      values: (rows, columns) floats.
      title: The title above the panel.
      limit: The magnitude with the darkest colour; by default, the largest one.
      bar: Whether to draw a colour bar.

    Example:
      >>> import mf_aggregators as mfa
      >>> from mf_aggregators import figures
      >>> figure, axes = figures.panels(num_rows=1, num_columns=1)
      >>> matrix = mfa.factorizations.banded(16, num_bands=4).strategy_matrix()
      >>> figures.heat_map(figure, axes[0, 0], matrix, title="C")
      >>> axes[0, 0].get_title()
      'C'
    """
    largest = float(np.max(np.abs(values))) if limit is None else limit
    is_signed = bool(np.min(values) < 0.0)
    image = axes.imshow(
        values,
        cmap="RdBu_r" if is_signed else "Reds",
        vmin=-largest if is_signed else 0.0,
        vmax=largest or 1.0,
        # Entries smaller than a pixel are averaged; larger ones are squares.
        interpolation="antialiased",
    )
    describe(axes, title=title)
    axes.grid(False)
    axes.set(xticks=[], yticks=[])
    if bar:
        with _style():
            figure.colorbar(image, ax=axes, shrink=0.9)


def _style() -> contextlib.AbstractContextManager[None]:
    """A context in which figures have the style of this package."""
    return matplotlib.rc_context(fname=_STYLE)


def _in_lines(text: str, most_characters: int) -> str:
    """Breaks text into lines of at most ``most_characters``, and keeps its line breaks."""
    found = []
    for line in text.split("\n"):
        found += textwrap.wrap(line, max(8, most_characters), break_on_hyphens=False) or [""]
    return "\n".join(found)


def _characters(axes: matplotlib.axes.Axes) -> int:
    """About how many characters of a title fit the width of a panel, before the layout."""
    figure, place = axes.figure, axes.get_subplotspec()
    if place is None:
        return int(_CHARACTERS_OF_AN_INCH * 0.8 * figure.get_figwidth())
    grid = place.get_gridspec()
    ratios = grid.get_width_ratios() or [1.0] * grid.ncols
    share = sum(ratios[place.colspan.start : place.colspan.stop]) / sum(ratios)
    # Names of rows reduce the width of all panels of a figure.
    longest = 0
    if isinstance(axes.yaxis.get_major_locator(), matplotlib.ticker.FixedLocator):
        names = "\n".join(label.get_text() for label in axes.get_yticklabels())
        longest = max(map(len, names.split("\n")))
    width = (figure.get_figwidth() - _INCHES_OF_A_CHARACTER * longest) * share
    width -= _INCHES_BESIDE_A_PANEL
    return int(_CHARACTERS_OF_AN_INCH * width)


def _height_of_legend(axes: matplotlib.axes.Axes) -> float:
    """The height of the panel's legend in inches; 0 without a legend."""
    drawn = axes.get_legend()
    return 0.0 if drawn is None else float(drawn.get_window_extent().height / axes.figure.dpi)


def _merged(
    curves: Mapping[str, tuple[_Numbers, _Numbers]],
) -> list[tuple[list[str], np.ndarray, np.ndarray]]:
    """Merges equal curves into one with all their names, at the place of the last of them."""
    found: list[tuple[list[str], np.ndarray, np.ndarray]] = []
    for name, curve in curves.items():
        where, values = (np.asarray(each, float) for each in curve)
        names = [name]
        for each in list(found):
            if np.array_equal(each[1], where) and np.allclose(
                each[2], values, rtol=1e-9, atol=0.0, equal_nan=True
            ):
                found.remove(each)
                names = [*each[0], name]
        found.append((names, where, values))
    return found


def _hidden(curves: Sequence[tuple[np.ndarray, np.ndarray]], is_log: bool) -> list[bool]:
    """Whether each curve is hidden behind a later one for most of its length."""
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = [(where, np.log(values) if is_log else values) for where, values in curves]
        every = np.concatenate([values for _, values in scaled] or [np.zeros(0)])
        every = every[np.isfinite(every)]
        least = _HIDING * float(np.ptp(every)) if every.size else 0.0
        found = []
        for place, (where, values) in enumerate(scaled):
            shares = [0.0]
            for others, above in scaled[place + 1 :]:
                if min(len(where), len(others)) > 1:
                    order = np.argsort(others, kind="stable")
                    at_places = np.interp(where, others[order], above[order])
                    shares.append(float(np.mean(np.abs(values - at_places) < least)))
            found.append(max(shares) > 0.7)
        return found
