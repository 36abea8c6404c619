"""Curves that are the same."""

from mf_aggregators import figures
from tests import figure_checks


def test_curves_that_are_the_same_are_one_with_all_names() -> None:
    figure, ((axes,),) = figures.panels(1, 1, (4.0, 3.0))
    places = [1, 2, 4]
    figures.lines(axes, {"a": (places, places), "b": (places, [3, 2, 1]), "c": (places, places)})
    assert sorted(line.get_label() for line in axes.get_lines()) == ["a; c (the same)", "b"]
    assert figure_checks.faults(figure) == []
