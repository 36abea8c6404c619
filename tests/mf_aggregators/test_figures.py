"""Colours of names, readable text, ticks at places, curves that are the same, and files."""

import io
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
    colours = [style["color"] for style in styles.values()]
    for one, other in itertools.combinations(colours, 2):
        assert figure_checks.difference(one, other) >= 10.0
    white = (1.0, 1.0, 1.0)
    assert all(figure_checks.contrast(matplotlib.colors.to_rgb(c), white) > 1.3 for c in colours)


def test_a_mechanism_has_one_colour_everywhere() -> None:
    for names in (["banded"], ["BandMF, amplified", "identity"], ["loss", "blt", "banded 342"]):
        (name,) = [each for each in names if "band" in each.lower()]
        assert figures.styles(names)[name]["color"] == figures.styles(["banded"])["banded"]["color"]
    of_inverse = figures.styles(["banded_inverse 16"])["banded_inverse 16"]["color"]
    assert of_inverse != figures.styles(["banded"])["banded"]["color"]
    tree = figures.styles(["tree"])["tree"]["color"]
    assert figures.styles(["Optimal TreeAgg"])["Optimal TreeAgg"]["color"] == tree


def test_curves_that_are_the_same_are_one_with_all_names() -> None:
    figure, ((axes,),) = figures.panels(1, 1, (4.0, 3.0))
    places = [1, 2, 4]
    figures.lines(axes, {"a": (places, places), "b": (places, [3, 2, 1]), "c": (places, places)})
    assert sorted(line.get_label() for line in axes.get_lines()) == ["a = c", "b"]
    assert figure_checks.faults(figure) == []


def test_a_figure_is_the_same_bytes_again() -> None:
    files = []
    for _ in range(2):
        figure, ((axes,),) = figures.panels(1, 1, (4.0, 3.0))
        figures.lines(axes, {"a": ([1, 2], [1, 2])}, title="same")
        file = io.BytesIO()
        figures.save(figure, file)
        files.append(file.getvalue())
    assert files[0] == files[1]
    assert files[0].startswith(b"\x89PNG")
