"""Text on coloured backgrounds."""

import matplotlib.colors
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mf_aggregators import figures


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
