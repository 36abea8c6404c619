"""The style of every figure: colours of mechanisms, text, ticks, legends and files.

Figures are matplotlib's own objects: no pyplot, no window, no state between figures. Room is
matplotlib's constrained layout, and sizes are those of ``figures.mplstyle``. This module is not
imported by ``import mf_aggregators``, which works without matplotlib.
"""

import colorsys
import pathlib
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import IO, Any, TypeAlias

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
# Longer names are broken into lines.
_CHARACTERS_OF_NAME = 32
# Characters of a title on an inch, and the inches that labels of an axis take.
_CHARACTERS_OF_AN_INCH, _INCHES_BESIDE_A_PANEL = 11.5, 0.7
# Inches of a character of a name.
_INCHES_OF_A_CHARACTER = 0.075
# Inches of legends that panels have room for.
_LEGENDS_WITH_ROOM = 0.45
# Curves nearer than this share of a panel's height hide each other.
_HIDING = 0.012
# The most ticks of a logarithmic axis, and at given places.
_MOST_TICKS = 6
# The range of a logarithmic axis that has 2 and 5 between powers of ten.
_FEW_DECADES = 300.0


# Patterns that tell a mechanism from a name, the papers' too; the first that matches counts.
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
# Change of lightness for a second and a third line of one mechanism.
_SHADES = (0.0, -0.20, 0.20)
# Colours of lines that mark a level.
_LEVELS = ("black", "#9a9a9a")
_LINES = ("-", "--", (0, (1, 1.2)))
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h", "*")


def styles(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Returns a style for each of the names that one figure has.

    Args:
      names: Names of mechanisms, as the library or the papers have them, or any others.

    Returns:
      By name the ``color``, ``linestyle`` and ``marker`` of its curve. A mechanism has the same
      colour in every figure; further lines of it have other shades and line styles, and other names
      the colours that are left. No two of up to 27 names have one colour, nor one marker of up to
      twelve.
    """
    distinct = list(dict.fromkeys(names))
    pairs = [(shade, colour) for shade in range(len(_SHADES)) for colour in _COLOURS.values()]
    chosen: dict[str, tuple[int, str]] = {}
    # Mechanisms choose first.
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
    """The mechanism that a name stands for, a key of ``_COLOURS``, or None."""
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
    **options: Any,
) -> tuple[matplotlib.figure.Figure, np.ndarray]:
    """Returns a figure with panels.

    Use it when a figure begins: others draw into its panels.

    Args:
      num_rows: Rows of panels.
      num_columns: Columns of panels.
      inches: Width and height of a panel; in the place of the height, names, for a panel with a
        row for each.
      **options: Of ``matplotlib.figure.Figure.subplots``: which axes are shared, and ratios.

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
    """Writes a figure.

    Use it when a figure is done.

    Args:
      figure: The figure.
      file: An open binary file, or the path of one.
      suffix: ``png``, ``pdf`` or ``svg``.

    Raises:
      OSError: If it cannot be written.

    Example:
      >>> import io
      >>> from mf_aggregators import figures
      >>> figure, axes = figures.panels(num_rows=1, num_columns=1)
      >>> file = io.BytesIO()
      >>> figures.save(figure, file)
      >>> file.getvalue()[1:4]
      b'PNG'
    """
    # The same figure is the same bytes, whichever version of matplotlib is installed.
    options: dict[str, Any] = {}
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
    """Writes title and labels of a panel, and draws its legend.

    Use it when matplotlib has drawn into a panel, and words are to look like all others.

    Args:
      axes: The panel.
      title: Above it; broken into lines where it is longer than the panel is wide.
      x: Below it.
      y: Beside it.
      rows: Names of the places 0, 1, ... of the vertical axis, from top to bottom; long ones are
        broken into lines.
      with_legend: Whether to draw the legend between the panel and its title, where it covers no
        data. The figure becomes higher, so that panels stay as high as they were.

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
    """Writes a title above all panels, in lines that are not longer than the figure is wide.

    Args:
      figure: The figure.
      text: The title.
    """
    with _style():
        characters = int(0.9 * _CHARACTERS_OF_AN_INCH * figure.get_figwidth())
        figure.suptitle(_in_lines(text, characters))


def _legend(axes: matplotlib.axes.Axes) -> None:
    """Draws the legend of a panel, with all that it names, above the panel."""
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
    own_styles: Mapping[str, Mapping[str, Any]] | None = None,
    with_legend: bool = True,
) -> None:
    """Draws curves into a panel, with a legend above it.

    Use it when errors or accuracies are drawn over rounds or epsilons.

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
      own_styles: By name; default: those of ``styles`` for these names.
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
            label=names[0] if len(names) == 1 else f"{'; '.join(names)} (the same)",
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
    """The inches that a panel with a row for each name needs."""
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
      names: From top to bottom.
      values: The lengths, not negative.
      title: Above the panel.
      x: Below it.
      form: The format of the numbers.
    """
    # Bars of one mechanism need no shades: each bar has its name.
    colours = [_COLOURS.get(_mechanism_of(name) or "", _LEVELS[1]) for name in names]
    drawn = axes.barh(range(len(names)), values, 0.66, color=colours)
    axes.bar_label(drawn, [format(value, form) for value in values], padding=3, fontsize=9)
    describe(axes, title=title, x=x, rows=names)
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

    Use it when a matrix is drawn.

    Args:
      figure: The figure.
      axes: The panel.
      values: (rows, columns) floats.
      title: Above the panel.
      limit: The magnitude of the darkest colours; the largest one by default.
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
        # Entries smaller than a dot of the file are averaged; larger ones stay squares.
        interpolation="antialiased",
    )
    describe(axes, title=title)
    axes.grid(False)
    axes.set(xticks=[], yticks=[])
    if bar:
        with _style():
            figure.colorbar(image, ax=axes, shrink=0.9)


def _style() -> Any:
    """A context in which figures get the style of this package."""
    return matplotlib.rc_context(fname=_STYLE)


def _in_lines(text: str, most_characters: int) -> str:
    """Breaks text into lines of at most ``most_characters``; its own line breaks stay."""
    found = []
    for line in text.split("\n"):
        found += textwrap.wrap(line, max(8, most_characters), break_on_hyphens=False) or [""]
    return "\n".join(found)


def _characters(axes: matplotlib.axes.Axes) -> int:
    """How many characters of a title are about as wide as a panel, before figures are laid out."""
    figure, place = axes.figure, axes.get_subplotspec()
    if place is None:
        return int(_CHARACTERS_OF_AN_INCH * 0.8 * figure.get_figwidth())
    grid = place.get_gridspec()
    ratios = grid.get_width_ratios() or [1.0] * grid.ncols
    share = sum(ratios[place.colspan.start : place.colspan.stop]) / sum(ratios)
    # Names of rows take room from all panels of a figure.
    longest = 0
    if isinstance(axes.yaxis.get_major_locator(), matplotlib.ticker.FixedLocator):
        names = "\n".join(label.get_text() for label in axes.get_yticklabels())
        longest = max(map(len, names.split("\n")))
    width = (figure.get_figwidth() - _INCHES_OF_A_CHARACTER * longest) * share
    width -= _INCHES_BESIDE_A_PANEL
    return int(_CHARACTERS_OF_AN_INCH * width)


def _height_of_legend(axes: matplotlib.axes.Axes) -> float:
    """Height of the panel's legend in inches; 0 without one."""
    drawn = axes.get_legend()
    return 0.0 if drawn is None else float(drawn.get_window_extent().height / axes.figure.dpi)


def _merged(
    curves: Mapping[str, tuple[_Numbers, _Numbers]],
) -> list[tuple[list[str], np.ndarray, np.ndarray]]:
    """Names, places and values: curves that are equal at every point as one, where the last was."""
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
    """Whether each curve is below a later one for most of its way."""
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
