"""Closed forms of BLT errors against sums over all rounds and finite differences."""

import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators.factorizations import BltFactorization
from mf_aggregators.factorizations.blt import _log_squared_rows, _log_squared_sensitivity
from mf_aggregators.factorizations.toeplitz import PatternOfRounds
from mf_aggregators.participation import FixedEpochOrder
from mf_aggregators.workloads import Workload
from tests.mf_aggregators.toeplitz_cases import ErrorMeasure

_ERRORS = st.sampled_from(["mean", "max"])


def _log_error(
    distances: np.ndarray, pattern: PatternOfRounds, error: ErrorMeasure
) -> tuple[float, np.ndarray]:
    """The logarithm of the squared error for prefix sums, and its gradient, by closed forms."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[BltFactorization.__module__], "_MOST_ROUNDS_OF_SUMS", 0)
        of_pattern, by_pattern = _log_squared_sensitivity(distances, pattern)
    of_rows, by_rows = _log_squared_rows(distances, pattern.num_rounds, error == "max")
    return of_pattern + of_rows, by_pattern + by_rows


@st.composite
def _problems(draw: st.DrawFn) -> tuple[np.ndarray, PatternOfRounds]:
    num_rounds = draw(st.integers(1, 60))
    separation = draw(st.integers(1, num_rounds))
    most = draw(st.integers(1, -(-num_rounds // separation)))
    count = draw(st.integers(1, 4))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    # Distances range from evenly spread ones to some very close to a decay of one.
    power = draw(st.floats(1.0, 8.0))
    distances = np.sort(generator.uniform(1e-2, 1.0 - 1e-6, 2 * count)) ** power
    return distances, PatternOfRounds(num_rounds, separation, most)


@given(_problems(), _ERRORS)
@settings(deadline=None)
def test_the_error_is_that_of_the_factorization(
    problem: tuple[np.ndarray, PatternOfRounds], error: ErrorMeasure
) -> None:
    distances, pattern = problem
    decays = 1.0 - distances
    factorization = BltFactorization(pattern.num_rounds, decays[0::2], decays[1::2])
    schema = FixedEpochOrder(pattern.most, pattern.separation)
    workload = Workload("prefix_sum", pattern.num_rounds).matrix()
    expected = (
        factorization.rmse(workload, schema)
        if error == "mean"
        else factorization.max_error(workload, schema)
    )
    value, _ = _log_error(distances, pattern, error)
    assert np.exp(value / 2.0) == pytest.approx(expected, rel=1e-7)


@given(_problems(), _ERRORS)
@settings(deadline=None)
def test_the_gradient_is_the_slope(
    problem: tuple[np.ndarray, PatternOfRounds], error: ErrorMeasure
) -> None:
    distances, pattern = problem
    _, gradient = _log_error(distances, pattern, error)
    for j in range(len(distances)):
        # Neighbours may be close: a step that keeps the order.
        gaps = np.abs(np.delete(distances, j) - distances[j])
        step = 1e-4 * min(distances[j], 1.0 - distances[j], *gaps)
        moved: np.ndarray = np.zeros_like(distances)
        moved[j] = step
        above, _ = _log_error(distances + moved, pattern, error)
        below, _ = _log_error(distances - moved, pattern, error)
        slope = (above - below) / 2.0
        assert gradient[j] * step == pytest.approx(slope, rel=1e-4, abs=1e-12)


def test_distances_near_zero_lose_no_digits() -> None:
    """A decay that is one for all that 10^6 rounds can tell, beside its limit."""
    pattern = PatternOfRounds(10**6, 10**6, 1)
    tiny, _ = _log_error(np.array([1e-15, 0.25]), pattern, "max")
    # c_t = (1 - e) for all t >= 1, e = 3 / 4, and b_t = e^t.
    squared_sensitivity = 1.0 + (10**6 - 1) * 0.25**2
    squared_rows = 1.0 / (1.0 - 0.75**2)
    assert tiny == pytest.approx(np.log(squared_sensitivity * squared_rows), abs=1e-7)
