"""Searches whose values are known less well than their slopes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mf_aggregators.factorizations.optimal import _ObjectiveBySlopes, _with_walls
from mf_aggregators.factorizations.searches import Objective, minimise

_ROUNDING = 1e-9


def _rounded(scales: np.ndarray, generator: np.random.Generator) -> Objective:
    """The sum of log(2 cosh(scale x)), with values that are off by up to 1e-9."""

    def objective(x: np.ndarray) -> tuple[float, np.ndarray]:
        value = float(np.sum(np.logaddexp(scales * x, -scales * x)))
        return value + _ROUNDING * generator.uniform(-1.0, 1.0), scales * np.tanh(scales * x)

    return objective


@given(st.integers(0, 2**32 - 1))
def test_slopes_lead_on_where_values_are_rounded(seed: int) -> None:
    generator = np.random.default_rng(seed)
    scales = generator.uniform(0.5, 3.0, 8)
    objective = _ObjectiveBySlopes(_rounded(scales, generator))
    start = generator.uniform(-1.0, 1.0, 8)
    result = minimise(
        objective,
        start,
        max_evaluations=200,
        corrections=10,
        least_change=0.0,
        callback=objective.accept,
    )
    # By values the minimum is known to about the root of their rounding, 3e-5.
    assert np.max(np.abs(result.x)) < 1e-6


@given(st.lists(st.floats(-5.0, 5.0), min_size=2, max_size=12))
def test_shown_values_differ_as_true_ones_do(places: list[float]) -> None:
    def objective(x: np.ndarray) -> tuple[float, np.ndarray]:
        return float(np.sum(x**4)), 4.0 * x**3

    shown = _ObjectiveBySlopes(objective)
    first, _ = shown(np.array(places[:1]))
    assert first == 0.0
    for place in places[1:]:
        x = np.array([place])
        value, gradient = shown(x)
        true = objective(x)[0] - objective(np.array(places[:1]))[0]
        assert value == pytest.approx(true, rel=1e-9, abs=2e-6 * len(places))
        np.testing.assert_array_equal(gradient, 4.0 * x**3)
        shown.accept(x)


def test_behind_a_wall_the_value_is_above_the_last_one() -> None:
    def objective(x: np.ndarray) -> tuple[float, np.ndarray]:
        if x[0] < 0.0:
            raise np.linalg.LinAlgError
        return float(x[0]), np.ones(1)

    walled = _with_walls(objective)
    with pytest.raises(np.linalg.LinAlgError):
        walled(np.array([-1.0]))
    assert walled(np.array([2.0])) == (2.0, np.ones(1))
    value, gradient = walled(np.array([-1.0]))
    assert value == 5.0
    assert gradient[0] == -1.0
