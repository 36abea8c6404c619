"""What the noise that is drawn adds to delta, and where nothing is stated."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators.kernel import discrete_gaussian, gaussian
from tests.refusals import refuses


@given(st.floats(0.2, 1e6), st.floats(-10.0, -0.01), st.integers(1, 2**44))
@settings(deadline=None, max_examples=100)
def test_the_failure_probability_is_taken_from_delta(
    sigma: float, log_delta: float, num_coordinates: int
) -> None:
    delta = 10.0**log_delta
    failure = discrete_gaussian.failure_probability(num_coordinates)
    if failure > 1e-3 * delta:
        with pytest.raises(gaussian.TailError):
            gaussian.delta_left(delta, sigma, num_coordinates)
    else:
        left = gaussian.delta_left(delta, sigma, num_coordinates)
        assert left + failure == pytest.approx(delta, rel=1e-15)
        assert 0.999 * delta <= left <= delta


@pytest.mark.parametrize("sigma", [0.1999, 0.1, 1e-3, 1e-300])
def test_so_little_noise_is_refused(sigma: float) -> None:
    with pytest.raises(gaussian.TailError):
        gaussian.delta_left(0.1, sigma, 1)
    assert gaussian.delta_left(0.1, 0.2, 1) == pytest.approx(0.1)


def test_a_run_of_any_size_costs_little() -> None:
    """A hundred billion parameters and ten rounds: the default covers as many numbers."""
    assert gaussian.DEFAULT_NUM_COORDINATES >= 10**12
    gaussian.delta_left(1e-12, 1.0, gaussian.DEFAULT_NUM_COORDINATES)


def test_runs_that_draw_more_than_is_charged_are_refused() -> None:
    """All statements charge for 2^40 numbers where nobody says how many there are."""
    gaussian.check_charged(2**20, 2**20)
    with refuses("1.1e+12", "2^40"):
        gaussian.check_charged(2**20 + 1, 2**20)
    with refuses("8.8e+12"):
        gaussian.check_charged(2**31, 4096)


def test_bad_arguments_are_refused() -> None:
    with refuses("noise_multiplier"):
        gaussian.delta_left(1e-6, 0.0, 1)
    with refuses("num_coordinates"):
        gaussian.delta_left(1e-6, 1.0, 0)
