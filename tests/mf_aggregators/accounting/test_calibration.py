"""Noise multipliers for a target, and zCDP, against printed values and as inverses."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators import accounting
from tests.examples import examples
from tests.refusals import refuses


def test_the_production_guarantee_of_the_papers() -> None:
    """BandMF App. K.1: rho 0.52 gives epsilon 6.69 at delta 1e-10."""
    multiplier = accounting.noise_multiplier_of_zcdp(0.52)
    assert accounting.zcdp_rho(multiplier) == pytest.approx(0.52)
    assert round(accounting.epsilon(multiplier, 1e-10), 2) == 6.69


@given(st.floats(1e-300, 1e300))
def test_noise_for_a_rho_is_the_least_of_which_no_larger_one_is_stated(rho: float) -> None:
    multiplier = accounting.noise_multiplier_of_zcdp(rho)
    assert accounting.zcdp_rho(multiplier) <= rho
    assert accounting.zcdp_rho(multiplier * (1.0 - 1e-15)) > rho


@given(st.floats(0.05, 50.0), st.floats(-12.0, -1.0))
@settings(deadline=None, max_examples=examples(60))
def test_the_two_directions_are_inverse(epsilon: float, log_delta: float) -> None:
    delta = 10.0**log_delta
    multiplier = accounting.noise_multiplier(epsilon, delta)
    found = accounting.epsilon(multiplier, delta)
    assert found <= epsilon
    if found < epsilon * (1 - 1e-5):
        # The target needs less noise than anything can be stated for.
        with pytest.raises(accounting.TailError):
            accounting.epsilon(multiplier * (1 - 1e-6), delta)


@pytest.mark.parametrize("epsilon", [0.0, -1.0, float("inf"), float("nan"), 1e30])
def test_bad_epsilons_are_refused(epsilon: float) -> None:
    with refuses("epsilon"):
        accounting.noise_multiplier(epsilon, 1e-6)
