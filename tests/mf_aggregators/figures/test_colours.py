"""Names and the colours that they get, and text on coloured backgrounds."""

import itertools

import matplotlib.colors
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators import figures
from tests import figure_checks


@given(
    st.lists(
        st.one_of(
            st.sampled_from(["identity", "tree, full", "banded 8", "banded 9", "blt", "BandMF"]),
            st.text(max_size=5),
        ),
        unique=True,
        max_size=27,
    )
)
@settings(deadline=None, max_examples=20)
def test_no_two_names_have_one_colour(names: list[str]) -> None:
    styles = figures.styles(names)
    assert list(styles) == names
    colours = [style.colour for style in styles.values()]
    for one, other in itertools.combinations(colours, 2):
        assert figure_checks.difference(one, other) >= 10.0
    white = (1.0, 1.0, 1.0)
    assert all(figures.contrast(matplotlib.colors.to_rgb(c), white) > 1.3 for c in colours)


def test_a_mechanism_has_one_colour_everywhere() -> None:
    for names in (["banded"], ["BandMF, amplified", "identity"], ["loss", "blt", "banded 342"]):
        (name,) = [each for each in names if "band" in each.lower()]
        assert figures.styles(names)[name].colour == figures.styles(["banded"])["banded"].colour
    of_inverse = figures.styles(["banded_inverse 16"])["banded_inverse 16"].colour
    assert of_inverse != figures.styles(["banded"])["banded"].colour
    tree = figures.styles(["tree"])["tree"].colour
    assert figures.styles(["Optimal TreeAgg"])["Optimal TreeAgg"].colour == tree


@given(st.tuples(*[st.floats(0.0, 1.0)] * 3))
def test_text_in_cells_can_be_read(background: tuple[float, float, float]) -> None:
    """The root of 21 is the contrast that the better of black and white has at least."""
    text = matplotlib.colors.to_rgb(figures.text_colour(background))
    assert figures.contrast(text, background) >= 4.5


def test_contrasts_of_the_standard() -> None:
    """WCAG 2.1: black on white is 21 to 1; the grey #767676 on white is the last with 4.5."""
    assert figures.contrast((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)) == pytest.approx(21.0)
    for level, at_least in ((0x76, True), (0x77, False)):
        found = figures.contrast([level / 255] * 3, (1.0, 1.0, 1.0))
        assert (found >= 4.5) == at_least
