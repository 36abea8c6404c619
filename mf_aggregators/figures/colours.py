"""Colours: one for each mechanism in all figures, and text that stands out from its background."""

import colorsys
import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import matplotlib.colors
import numpy as np

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
COLOURS = {
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
LEVELS = ("black", "#9a9a9a")
_LINES = ("-", "--", (0, (1, 1.2)))
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
    known = {name: mechanism_of(name) for name in distinct}
    colours = list(COLOURS.values())
    shades = [(shade, colour) for shade in range(len(_SHADES)) for colour in colours]
    taken: set[tuple[int, str]] = set()
    chosen: dict[str, tuple[int, str]] = {}
    for name, mechanism in known.items():
        if mechanism is not None:
            own = [(shade, COLOURS[mechanism]) for shade in range(len(_SHADES))]
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


def mechanism_of(name: str) -> str | None:
    """Returns the mechanism that a name stands for, a key of ``COLOURS``, or None.

    Args:
      name: A name as the library or the papers have it, or any other.
    """
    for pattern, mechanism in _MECHANISMS:
        if re.search(pattern, name, re.IGNORECASE):
            return mechanism
    return None


def _shaded(colour: str, lightness: float) -> str:
    hue, light, saturation = colorsys.rgb_to_hls(*matplotlib.colors.to_rgb(colour))
    lighter = min(0.80, max(0.12, light + lightness))
    return str(matplotlib.colors.to_hex(colorsys.hls_to_rgb(hue, lighter, saturation)))


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
