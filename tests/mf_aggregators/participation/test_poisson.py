"""The losses of a sampled Gaussian, against dp-accounting's own and against their definition."""

import types

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from mf_aggregators.kernel.losses import DenseLosses
from mf_aggregators.participation import poisson
from tests.examples import examples
from tests.refusals import refuses

_SIGMAS = st.floats(0.03, 30.0)
_PROBABILITIES = st.floats(1e-4, 1.0)
# Newer versions of dp-accounting have a third.
_ADJACENCIES = (AdjacencyType.ADD, AdjacencyType.REMOVE)


@settings(max_examples=examples(200), deadline=None)
@given(_SIGMAS, _PROBABILITIES, st.sampled_from(_ADJACENCIES))
def test_deltas_are_those_of_dp_accounting(
    sigma: float, probability: float, adjacency: AdjacencyType
) -> None:
    given_once = {"sensitivity": 1.0, "sampling_prob": probability, "adjacency_type": adjacency}
    slow = GaussianPrivacyLoss(sigma, **given_once)
    bounds = slow.connect_dots_bounds()
    epsilons = np.linspace(bounds.epsilon_lower, bounds.epsilon_upper, 50)
    # At zero, and where a sample has no larger or no smaller loss.
    epsilons = np.append(epsilons, [0.0, np.log1p(-0.5 * probability), -np.log1p(-probability / 2)])
    found = poisson.SampledGaussianLoss(sigma, **given_once).get_delta_for_epsilon(epsilons)
    expected = [slow.get_delta_for_epsilon(float(epsilon)) for epsilon in epsilons]
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("adjacency", _ADJACENCIES)
@pytest.mark.parametrize(("sigma", "probability"), [(0.4, 0.02), (1.3, 0.5), (6.0, 1e-3)])
def test_deltas_are_integrals_of_densities(
    sigma: float, probability: float, adjacency: AdjacencyType
) -> None:
    points, width = np.linspace(-12.0 * sigma - 1, 12.0 * sigma + 1, 400_001, retstep=True)
    without = stats.norm.pdf(points, 0.0, sigma)
    sampled = (1 - probability) * without + probability * stats.norm.pdf(points, 1.0, sigma)
    upper, lower = (without, sampled) if adjacency == AdjacencyType.ADD else (sampled, without)
    loss = poisson.SampledGaussianLoss(
        sigma, sensitivity=1.0, sampling_prob=probability, adjacency_type=adjacency
    )
    epsilons = np.array([-2.0, -0.3, 0.0, 1e-3, 0.1, 0.5, 2.0])
    expected = [
        np.sum(np.maximum(upper - np.exp(epsilon) * lower, 0.0)) * width for epsilon in epsilons
    ]
    np.testing.assert_allclose(loss.get_delta_for_epsilon(epsilons), expected, atol=1e-7)


@pytest.mark.long_cases(2)
@pytest.mark.short_cases(1)
@pytest.mark.parametrize(
    ("sigma", "probability"),
    [
        (0.9, 0.3),
        (2.0, 1.0),
        (4.0, 0.004),
        (1e-3, 0.1),
        pytest.param(0.2, 0.01, marks=pytest.mark.long),
        pytest.param(0.5, 1.0, marks=pytest.mark.long),
    ],
)
def test_grids_are_those_of_dp_accounting(sigma: float, probability: float) -> None:
    interval = 1e-3 if sigma > 0.1 else 50.0
    found = poisson.PoissonSampling.loss_distribution(sigma, probability, interval).self_compose(7)
    expected = privacy_loss_distribution.from_gaussian_mechanism(
        sigma, value_discretization_interval=interval, sampling_prob=probability
    ).self_compose(7)
    # Both compose by Fourier transforms, which round deltas by about 1e-15.
    for delta in (1e-3, 1e-6):
        assert found.get_epsilon_for_delta(delta) == pytest.approx(
            expected.get_epsilon_for_delta(delta), rel=1e-8
        )
    for epsilon in (0.0, interval, 0.7, 3.0, 100.0):
        assert found.get_delta_for_epsilon(epsilon) == pytest.approx(
            expected.get_delta_for_epsilon(epsilon), rel=1e-8, abs=1e-13
        )


def test_an_adjacency_that_is_not_accounted_for_is_refused() -> None:
    """Whatever others dp-accounting has; version 0.4.3 has none."""
    others = [each for each in AdjacencyType if each not in _ADJACENCIES]
    for adjacency in (*others, types.SimpleNamespace(value="REPLACE")):
        with refuses("ADD", "REMOVE", "REPLACE"):
            poisson.SampledGaussianLoss(
                1.0, sensitivity=1.0, sampling_prob=0.5, adjacency_type=adjacency
            )


def test_deltas_that_rounding_makes_larger_are_made_no_smaller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A delta is at most an earlier one, and at least what was computed."""
    seen: list[np.ndarray] = []
    make = DenseLosses.of_deltas
    compute = poisson.SampledGaussianLoss.get_delta_for_epsilon
    computed: list[np.ndarray] = []

    def rough(loss: poisson.SampledGaussianLoss, epsilon: np.ndarray) -> np.ndarray:
        deltas = compute(loss, epsilon)
        deltas[1::2] *= 0.9
        computed.append(deltas)
        return deltas

    def record(interval: float, lower: int, deltas: np.ndarray) -> object:
        seen.append(np.asarray(deltas))
        return make(interval, lower, deltas)

    monkeypatch.setattr(poisson.SampledGaussianLoss, "get_delta_for_epsilon", rough)
    monkeypatch.setattr(DenseLosses, "of_deltas", record)
    poisson.PoissonSampling.loss_distribution(1.0, 0.3, 1e-3)
    for deltas, before in zip(seen, computed, strict=True):
        assert np.any(np.diff(before) > 0.0)
        assert np.all(np.diff(deltas) <= 0.0)
        assert np.all(deltas >= before)
