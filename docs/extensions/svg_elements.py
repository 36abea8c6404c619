"""Figures as elements of a web page, with colours that a dark page can replace."""

import colorsys
import dataclasses
import io
import re
from collections.abc import Mapping
from xml.etree import ElementTree

import matplotlib.colors
import matplotlib.figure

from mf_aggregators.figures import contrast, save

# The background of figures on a dark page.
DARK_BACKGROUND = "#15181c"
# Least contrast of lines and bars on it: WCAG 2.1, success criterion 1.4.11.
_LEAST_CONTRAST = 3.0
_WHITE, _BLACK = "#ffffff", "#000000"
# Chromatic colours have lightnesses in this range in the dark, and greys in another.
_DARKEST, _LIGHTEST = 0.45, 0.85
_GREY_FOR_BLACK, _GREYS = 0.92, 0.75
_STEP = 0.01

_COLOUR = re.compile(r"#[0-9a-f]{6}\b")
_REFERENCE = re.compile(r"url\(#([^)]+)\)")
# Attributes that would fix a figure's size.
_SIZES = ("width", "height")
_NOT_SHOWN = ("metadata", "style", "title", "desc")


@dataclasses.dataclass(frozen=True)
class InlineSvg:
    """A figure as an ``<svg>`` element without styles, scripts or references to other files.

    Lines end as the browser has it: a page that wants matplotlib's own joins styles ``svg *``.

    Attributes:
      element: The element. Each colour is the custom property ``--colour-rrggbb`` of the page, with
        ``#rrggbb`` where the page has none.
      colours_in_the_dark: By ``#rrggbb``, the colour that replaces it on a dark page.
    """

    element: str
    colours_in_the_dark: Mapping[str, str]


def inline_svg(figure: matplotlib.figure.Figure, name: str, description: str) -> InlineSvg:
    """Returns a figure as an element of a page.

    Text is drawn as outlines, so that it takes the room that it was laid out for in any browser.

    Args:
      figure: The figure, which has no text but what is drawn.
      name: Begins the ids of the element's parts: each figure of a page needs another one.
      description: What the figure shows, for a reader who does not see it.

    Returns:
      The element, whose bytes are the same for the same figure.
    """
    buffer = io.BytesIO()
    save(figure, buffer, "svg")
    root = ElementTree.fromstring(buffer.getvalue())
    _remove(root)
    _rename(root)
    _number(root, name)
    colours = _colour(root)
    for size in _SIZES:
        del root.attrib[size]
    root.attrib |= {"role": "img", "aria-label": description}
    root.set("style", f"fill: {_property(_BLACK)}")
    element = ElementTree.tostring(root, encoding="unicode")
    return InlineSvg(element, {each: in_the_dark(each) for each in sorted({*colours, _BLACK})})


def in_the_dark(colour: str) -> str:
    """Returns the colour that replaces another one on ``DARK_BACKGROUND``.

    White becomes the background and black nearly white. What was darker than another colour of its
    hue is lighter than that one.

    Args:
      colour: ``#rrggbb``.

    Returns:
      ``#rrggbb``.
    """
    if colour == _WHITE:
        return DARK_BACKGROUND
    hue, lightness, saturation = colorsys.rgb_to_hls(*matplotlib.colors.to_rgb(colour))
    if saturation == 0.0:
        grey = _GREY_FOR_BLACK - _GREYS * lightness
        return _hex(hue, grey, saturation)
    lightness = min(max(1.0 - lightness, _DARKEST), _LIGHTEST)
    background = matplotlib.colors.to_rgb(DARK_BACKGROUND)
    while contrast(colorsys.hls_to_rgb(hue, lightness, saturation), background) < _LEAST_CONTRAST:
        lightness += _STEP
    return _hex(hue, lightness, saturation)


def _hex(hue: float, lightness: float, saturation: float) -> str:
    return str(matplotlib.colors.to_hex(colorsys.hls_to_rgb(hue, lightness, saturation)))


def _property(colour: str) -> str:
    return f"var(--colour-{colour.removeprefix('#')}, {colour})"


def _remove(element: ElementTree.Element) -> None:
    """Removes what is not drawn, and style sheets, which would apply to the page."""
    for child in list(element):
        if _local(child.tag) in _NOT_SHOWN:
            element.remove(child)
        else:
            _remove(child)


def _rename(root: ElementTree.Element) -> None:
    """Removes namespaces, which HTML does not have."""
    for element in root.iter():
        element.tag = _local(element.tag)
        element.attrib = {_local(key): value for key, value in element.attrib.items()}
        element.text = element.tail = None


def _local(name: str) -> str:
    return name.rpartition("}")[2]


def _number(root: ElementTree.Element, name: str) -> None:
    """Gives ids that something refers to numbers of this figure, and removes the others."""
    referred: dict[str, str] = {}

    def new(old: str) -> str:
        return referred.setdefault(old, f"{name}-{len(referred)}")

    for element in root.iter():
        for key, value in element.attrib.items():
            if key == "href" and value.startswith("#"):
                element.set(key, f"#{new(value[1:])}")
            else:
                element.set(key, _REFERENCE.sub(lambda found: f"url(#{new(found[1])})", value))
    for element in root.iter():
        old = element.attrib.pop("id", None)
        if old in referred:
            element.set("id", referred[old])


def _colour(root: ElementTree.Element) -> set[str]:
    """Makes custom properties of colours; returns the colours."""
    found: set[str] = set()
    for element in root.iter():
        for key in ("style", "fill", "stroke"):
            value = element.get(key)
            if value is not None:
                found.update(_COLOUR.findall(value))
                element.set(key, _COLOUR.sub(lambda each: _property(each[0]), value))
    return found
