"""Ticks of any range, curves that are the same, and files."""

import io
import re

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mf_aggregators import figures
from tests import figure_checks


def _value(label: str) -> float:
    """The number that a tick label states."""
    text = label.replace("−", "-").replace(",", "").strip("$")
    match = re.fullmatch(r"(-?[\d.]*)(?:\\cdot )?10\^\{(-?\d+)\}", text)
    if match is None:
        return float(text)
    mantissa = {"": 1.0, "-": -1.0}.get(match[1]) or float(match[1])
    return mantissa * 10.0 ** int(match[2])


@pytest.mark.long
@given(
    st.floats(-12.0, 12.0),
    st.floats(1e-4, 14.0),
    st.booleans(),
    st.sampled_from([(2.0, 2.0), (4.0, 3.0), (8.0, 2.5)]),
)
@example(0.0078125, 0.0625, False, (2.0, 2.0))  # a single tick, at 1.05
@example(-5.3125, 0.9375, False, (2.0, 2.0))  # labels of powers beside the panel
@settings(deadline=None, max_examples=15)
def test_ticks_say_where_they_are(
    start: float, decades: float, is_logarithmic: bool, inches: tuple[float, float]
) -> None:
    """Any range: labels state the places of their ticks, and none is on another."""
    figure, ((axes,),) = figures.panels(1, 1, inches)
    ends = [10.0**start, 10.0 ** (start + decades)]
    kinds = "xy" if is_logarithmic else ""
    figures.lines(axes, {"a": (ends, ends)}, x="x", y="y", logarithmic=kinds)
    assert figure_checks.faults(figure) == []
    for axis in (axes.xaxis, axes.yaxis):
        low, high = sorted(axis.get_view_interval())
        shown = {
            tick.get_loc(): tick.label1.get_text()
            for tick in axis.get_major_ticks()
            if low <= tick.get_loc() <= high
        }
        # Numbers of many digits do not fit twice below two inches.
        assert len(shown) >= (2 if inches[0] > 2.0 else 1)
        assert len(set(shown.values())) == len(shown)
        for place, label in shown.items():
            assert _value(label) == pytest.approx(place, rel=0.01, abs=1e-3 * (high - low))


def test_ticks_at_places_are_as_many_as_have_room() -> None:
    for count, all_shown in ((5, True), (60, False)):
        figure, ((axes,),) = figures.panels(1, 1, (4.0, 3.0))
        places = np.geomspace(1.0, 1000.0, count)
        figures.lines(axes, {"a": (places, places)}, logarithmic="x", places=places)
        assert figure_checks.faults(figure) == []
        shown = axes.get_xticks()
        assert set(np.round(shown, 9)) <= set(np.round(places, 9))
        assert (len(shown) == count) == all_shown


def test_curves_that_are_the_same_are_one_with_all_names() -> None:
    figure, ((axes,),) = figures.panels(1, 1, (4.0, 3.0))
    places = [1, 2, 4]
    figures.lines(axes, {"a": (places, places), "b": (places, [3, 2, 1]), "c": (places, places)})
    assert sorted(line.get_label() for line in axes.get_lines()) == ["a; c (the same)", "b"]
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


def test_a_pale_bar_ends_at_the_lowest_and_the_highest() -> None:
    """Round or square ends would add the half of its width."""
    figure, ((axes,),) = figures.panels(1, 1, (4.0, 3.0))
    figures.intervals(axes, [figures.Interval("banded", 10.0, 2.0, 9.0, 12.0)])
    (pale,) = (line for line in axes.get_lines() if line.get_alpha() == 0.3)
    assert list(pale.get_xdata()) == [9.0, 12.0]
    assert pale.get_solid_capstyle() == "butt"
    assert figure_checks.faults(figure) == []
