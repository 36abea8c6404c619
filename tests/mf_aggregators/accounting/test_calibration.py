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


def test_the_other_production_guarantee_of_the_papers() -> None:
    """BandMF App. K.1: rho 0.24 and epsilon 4.35 at delta 1e-10, both rounded in print.

    The exact epsilons of what rounds to rho 0.24 are 4.28 to 4.39.
    """
    assert 4.35 <= round(accounting.epsilon_of_zcdp(0.24, 1e-10), 2) <= 4.40
    assert (
        accounting.epsilon_of_zcdp(0.235, 1e-10)
        <= 4.35
        <= (accounting.epsilon_of_zcdp(0.245, 1e-10))
    )


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


def test_the_epsilon_of_zcdp_charges_its_delta() -> None:
    rho, delta = 0.5, 1e-6
    assert accounting.epsilon_of_zcdp(rho, delta) == accounting.epsilon(1.0, delta)
    half = accounting.epsilon_of_zcdp(rho, delta, zcdp_delta=0.5e-6)
    assert half == accounting.exact_epsilon(1.0, delta - 0.5e-6)
    # Never less than the numbers cost that are drawn in any case.
    assert accounting.epsilon_of_zcdp(rho, delta, zcdp_delta=0.0) == accounting.epsilon(1.0, delta)
    for bad in (delta, 1.0):
        with refuses("delta"):
            accounting.epsilon_of_zcdp(rho, delta, zcdp_delta=bad)
    with refuses("zcdp_delta"):
        accounting.epsilon_of_zcdp(rho, delta, zcdp_delta=-1e-9)


@pytest.mark.parametrize("epsilon", [0.0, -1.0, float("inf"), float("nan"), 1e30])
def test_bad_epsilons_are_refused(epsilon: float) -> None:
    with refuses("epsilon"):
        accounting.noise_multiplier(epsilon, 1e-6)
