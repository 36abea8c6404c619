"""Figures as elements of pages: ids of their own, no other files, and colours for the dark."""

import html
import itertools
import pathlib
import re

import matplotlib.colors
import numpy as np
import pytest

from docs.extensions import svg_elements
from mf_aggregators import figures
from mf_aggregators.figures.colours import COLOURS
from tests import figure_checks, page_checks

_AWKWARD = "a \"curve\" <of> 'A & B'"


def _drawn(name: str, description: str = "two curves") -> svg_elements.InlineSvg:
    figure, ((first, second),) = figures.panels(1, 2)
    places = np.arange(1.0, 60.0)
    figures.lines(first, {"banded": (places, places), "tree": (places, 2.0 * places)}, title="A")
    figures.heat_map(figure, second, np.eye(3), title="B")
    return svg_elements.inline_svg(figure, name, description)


def test_figures_of_one_page_share_no_id(tmp_path: pathlib.Path) -> None:
    drawn = [_drawn("one"), _drawn("two")]
    colours = "".join(
        f"--colour-{colour[1:]}: {dark};" for colour, dark in drawn[0].colours_in_the_dark.items()
    )
    style = f"<style>@media (prefers-color-scheme: dark) {{ :root {{ {colours} }} }}</style>"
    path = tmp_path / "page.html"
    path.write_text(style + drawn[0].element + drawn[1].element)
    assert page_checks.read(path).faults == []

    path.write_text(style + drawn[0].element + drawn[0].element)
    assert any("2 parts are one-" in fault for fault in page_checks.read(path).faults)


def test_the_same_figure_is_the_same_bytes() -> None:
    assert _drawn("one") == _drawn("one")


def test_no_style_is_that_of_the_whole_page() -> None:
    element = _drawn("one").element
    assert not re.search(r"<(style|script|metadata|title)\b", element)
    assert not re.search(r"\bxmlns|\bns\d:", element)


def test_what_is_said_of_a_figure_is_escaped() -> None:
    element = _drawn("one", _AWKWARD).element
    (label,) = re.findall(r'aria-label="([^"]*)"', element)
    assert "<" not in label
    assert html.unescape(label) == _AWKWARD


@pytest.mark.parametrize("colour", [*COLOURS.values(), "#000000", "#9a9a9a"])
def test_colours_stand_out_in_the_dark(colour: str) -> None:
    dark = matplotlib.colors.to_rgb(svg_elements.in_the_dark(colour))
    background = matplotlib.colors.to_rgb(svg_elements.DARK_BACKGROUND)
    assert figures.contrast(dark, background) >= 3.0


def test_text_can_be_read_in_the_dark() -> None:
    black = matplotlib.colors.to_rgb(svg_elements.in_the_dark("#000000"))
    background = matplotlib.colors.to_rgb(svg_elements.in_the_dark("#ffffff"))
    assert figures.contrast(black, background) >= 7.0


def test_curves_are_told_apart_in_the_dark() -> None:
    """All styles of a figure of six curves, and two shades of one mechanism."""
    names = [*COLOURS, "banded 2", "tree 2", "blt 2"]
    colours = {name: style.colour for name, style in figures.styles(names).items()}
    for (one, colour), (other, another) in itertools.combinations(colours.items(), 2):
        difference = figure_checks.difference(
            svg_elements.in_the_dark(colour), svg_elements.in_the_dark(another)
        )
        assert difference >= 10.0, (one, other)
