"""Names and the colours that they get."""

import itertools

import matplotlib.colors
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
