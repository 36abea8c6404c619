"""Accounting against printed values and dp-accounting's discretized distributions."""

import itertools
import math

import numpy as np
import pytest
from dp_accounting.pld.privacy_loss_mechanism import GaussianPrivacyLoss
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators import accounting
from mf_aggregators.factorizations import banded, toeplitz
from mf_aggregators.kernel import sensitivity
from mf_aggregators.participation import MinSeparation
from mf_aggregators.workloads import prefix_sum
from tests.mf_aggregators import brute_force
from tests.refusals import refuses


@pytest.mark.parametrize(
    ("multiplier", "printed"),
    [(4.22468, 1.0), (2.23048, 2.0), (1.19352, 4.0), (0.65294, 8.0), (0.36861, 16.0)],
)
def test_noise_multipliers_of_the_papers(multiplier: float, printed: float) -> None:
    """BandMF Table 4, delta 1e-6; the printed multipliers have six digits."""
    assert accounting.exact_epsilon(multiplier, 1e-6) == pytest.approx(printed, rel=2e-5)
    assert accounting.epsilon(multiplier, 1e-6) == pytest.approx(printed, rel=2e-5)
    assert accounting.noise_multiplier(printed, 1e-6) == pytest.approx(multiplier, rel=3e-5)


@pytest.mark.parametrize("sigma", [0.3, 0.7, 1.5, 6.0, 40.0])
def test_deltas_and_epsilons_of_the_gaussian_mechanism(sigma: float) -> None:
    loss = GaussianPrivacyLoss(sigma)
    epsilons = np.array([-2.0, 0.0, 0.3, 2.0, 9.0])
    known = np.array([float(loss.get_delta_for_epsilon(float(each))) for each in epsilons])
    np.testing.assert_allclose(sensitivity.exact_deltas(sigma, epsilons), known, atol=1e-11)
    for delta in (1e-3, 1e-6, 1e-9):
        found = float(loss.get_delta_for_epsilon(accounting.exact_epsilon(sigma, delta)))
        assert found == pytest.approx(delta, rel=1e-5)


@pytest.mark.parametrize("delta", [1e-3, 1e-6, 1e-10])
def test_noise_that_a_client_could_leave_is_refused(delta: float) -> None:
    """Fewer standard deviations than a fifth of what one client may change."""
    for less in (0.1999, 0.1, 0.01):
        with refuses("deviations"):
            accounting.epsilon(less, delta)
        with refuses("deviations"):
            accounting.composed_epsilon([accounting.event(less)], delta)
    # A larger epsilon needs no less noise.
    assert accounting.noise_multiplier(1e4, delta) == pytest.approx(0.2, rel=1e-6)
    assert 1.0 < accounting.epsilon(0.2, delta) < 1e4


@pytest.mark.parametrize("num_coordinates", [2, 10**6, 10**14])
@pytest.mark.parametrize("multiplier", [0.22, 0.5, 1.0, 4.0])
def test_what_drawing_costs_is_charged_to_delta(multiplier: float, num_coordinates: int) -> None:
    """The exact curve and the failure probability together keep within delta."""
    delta = 1e-9
    found = accounting.epsilon(multiplier, delta, num_coordinates=num_coordinates)
    exact = GaussianPrivacyLoss(multiplier).get_delta_for_epsilon(found)
    together = exact + sensitivity.failure_probability(1.0, num_coordinates)
    assert together <= delta
    assert together == pytest.approx(delta, rel=1e-5)
    assert accounting.exact_epsilon(multiplier, delta) <= found


@pytest.mark.parametrize("multipliers", [(1.5, 1.5), (1.0, 3.0)])
def test_two_sums_of_one_run_are_one_mechanism_of_a_stacked_matrix(
    multipliers: tuple[float, float],
) -> None:
    """Mime Lite with two aggregators: a client changes an update and a gradient of each round."""
    participation = MinSeparation(2)
    matrices = (banded(prefix_sum(6), 2), toeplitz(6))
    blocks = [
        each.strategy_matrix() / (multiplier * each.sensitivity(participation).value)
        for each, multiplier in zip(matrices, multipliers, strict=True)
    ]
    # Enumerated, with other signs for updates than for gradients.
    most = 0.0
    for pattern in brute_force.patterns(participation, 6):
        signs = np.array(list(itertools.product([-1.0, 1.0], repeat=len(pattern))))
        changes = [np.sum((block[:, pattern] @ signs.T) ** 2, axis=0) for block in blocks]
        most = max(most, float(np.max(np.add.outer(*changes))))
    expected = accounting.exact_epsilon(1.0 / math.sqrt(most), 1e-5)
    events = [accounting.event(each) for each in multipliers]
    assert accounting.composed_epsilon(events, 1e-5) == pytest.approx(expected, rel=1e-2)


def test_no_noise_is_no_privacy() -> None:
    assert accounting.epsilon(0.0, 1e-6) == math.inf
    assert accounting.zcdp_rho(0.0) == math.inf
    assert accounting.zcdp_delta(0.0) == 0.0


def test_zcdp_is_approximate() -> None:
    """Its delta0 is what tables cost, which grows with the numbers that are drawn."""
    for numbers in (1, 10**9, 2**40):
        failure = sensitivity.failure_probability(1.0, numbers)
        assert 0.0 < failure == accounting.zcdp_delta(0.7, num_coordinates=numbers)
    assert accounting.zcdp_delta(0.7) == sensitivity.failure_probability(1.0, 2**40)
    with pytest.raises(accounting.TailError):
        accounting.zcdp_delta(0.19)
    # Each of four participations moves numbers of its own, by a half of all.
    assert accounting.zcdp_delta(0.19, disjoint_participations=4) > 0.0
    assert math.isfinite(accounting.epsilon(0.19, 1e-6, disjoint_participations=4))
    with refuses("participations"):
        accounting.zcdp_delta(0.7, disjoint_participations=0)


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-6, 2.0, float("nan")])
def test_bad_deltas_are_refused(delta: float) -> None:
    with refuses("delta"):
        accounting.epsilon(1.0, delta)
    with refuses("delta"):
        accounting.noise_multiplier(1.0, delta)


@pytest.mark.parametrize("multiplier", [-1.0, float("inf"), float("nan")])
def test_bad_noise_multipliers_are_refused(multiplier: float) -> None:
    with refuses("noise_multiplier"):
        accounting.epsilon(multiplier, 1e-6)
    with refuses("noise_multiplier"):
        accounting.zcdp_rho(multiplier)


@given(st.floats(0.2, 1e6), st.floats(-10.0, -0.01), st.integers(1, 2**44))
@settings(deadline=None, max_examples=100)
def test_the_failure_probability_is_taken_from_delta(
    sigma: float, log_delta: float, num_coordinates: int
) -> None:
    delta = 10.0**log_delta
    failure = sensitivity.failure_probability(1.0, num_coordinates)
    if failure > 1e-3 * delta:
        with pytest.raises(sensitivity.TailError):
            sensitivity.delta_left(delta, sigma, num_coordinates)
    else:
        left = sensitivity.delta_left(delta, sigma, num_coordinates)
        assert left + failure == pytest.approx(delta, rel=1e-15)
        assert 0.999 * delta <= left <= delta


def test_bad_arguments_are_refused() -> None:
    with refuses("noise_multiplier"):
        sensitivity.delta_left(1e-6, 0.0, 1)
    with refuses("num_coordinates"):
        sensitivity.delta_left(1e-6, 1.0, 0)
