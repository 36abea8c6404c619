"""Balls in bins amplify trees, by the square matrix whose inverse makes their rows of noise."""

import dataclasses
import math

import numpy as np
import pytest

from mf_aggregators import accounting
from mf_aggregators.factorizations import noise_rows, tree_aggregation
from mf_aggregators.kernel import certificate as certificates
from mf_aggregators.kernel.certificate import _BinVectors, dominating_pair
from mf_aggregators.kernel.draws_of_clients import StrategyColumns
from mf_aggregators.participation import (
    BallsInBins,
    MinSeparationSampling,
    PoissonSampling,
    SingleParticipation,
)
from mf_aggregators.participation.certificate_search import Certification
from tests.mf_aggregators import small_mechanisms
from tests.refusals import refuses

_QUICK = Certification(max_samples=2**13)


def _chosen(num_rounds: int, num_bins: int) -> np.ndarray:
    return np.equal.outer(np.arange(num_rounds) % num_bins, np.arange(num_bins)).astype(float)


@pytest.mark.parametrize("decoder", ["online", "full"])
@pytest.mark.parametrize("num_rounds", [2, 3, 5, 6, 8])
def test_bins_have_the_products_of_what_a_tree_releases(num_rounds: int, decoder: str) -> None:
    """For all bins: against the covariance of rows of noise from all nodes, and against the nodes.

    With all nodes known the pair is that of their sums; the estimator from below reveals less.
    """
    tree = tree_aggregation(num_rounds, decoder)
    noising, nodes = tree.noising_matrix(), tree.strategy_matrix()
    precision = np.linalg.inv(noising @ noising.T)
    for num_bins in range(1, num_rounds + 2):
        scheme = BallsInBins(num_rounds, num_rounds, 4 * num_bins, 4, num_bins)
        tree.check_scheme(scheme)
        columns = tree.columns_for(scheme)
        assert columns is not None
        assert columns.norm == tree.sensitivity(SingleParticipation()).value
        pair = dominating_pair(scheme.run(1.3, dataclasses.replace(columns, rounding=0.0)))
        assert isinstance(pair.products, _BinVectors)
        vectors = pair.products.vectors
        chosen = _chosen(num_rounds, num_bins)
        products = columns.norm**2 * vectors.T @ vectors
        np.testing.assert_allclose(products, chosen.T @ precision @ chosen, atol=1e-12)
        of_nodes = chosen.T @ nodes.T @ nodes @ chosen
        assert np.min(np.linalg.eigvalsh(of_nodes - products)) >= -1e-12
        if decoder == "full":
            np.testing.assert_allclose(products, of_nodes, atol=1e-12)


@pytest.mark.parametrize("decoder", ["online", "full"])
def test_no_entry_of_the_square_matrix_is_negative(decoder: str) -> None:
    """So that the pair of absolute entries is its own, and is attained."""
    for num_rounds in (1, 2, 7, 8, 21, 64):
        tree = tree_aggregation(num_rounds, decoder)
        square = np.linalg.inv(noise_rows.dense(tree.noise_recursion()))
        assert np.min(square) >= -1e-13
        assert np.all(np.abs(np.triu(square, 1)) <= 1e-13)


def test_a_tree_has_a_certified_guarantee() -> None:
    tree, scheme = tree_aggregation(16), BallsInBins(16, 16, 200, 25, 8)
    found = small_mechanisms.sampled(tree, scheme, 2.0, 1e-3, certification=_QUICK)
    assert found.claim.certificate is not None
    assert found.epsilon == found.claim.certificate.epsilon
    pair = dominating_pair(scheme.run(2.0, tree.columns_for(scheme)))
    assert certificates.is_proved(pair, found.claim.certificate)
    # Who knows the bins has what the nodes say of them, or less: the estimator tells less.
    nodes = tree.sensitivity(scheme.schema()).value / tree.sensitivity(SingleParticipation()).value
    assert found.together.norm < nodes
    multiplier = found.noise_multiplier / found.together.norm
    assert 2.0 / nodes <= multiplier <= 1.2 * 2.0 / nodes
    assert found.epsilon < 0.97 * accounting.epsilon(multiplier, 1e-3)
    with refuses("triangular"):
        small_mechanisms.sampled(tree, PoissonSampling(16, 16, 320, 10), 1.0, 1e-3)
    once = MinSeparationSampling(16, 16, 3200, 10, 16)
    assert (
        small_mechanisms.sampled(tree, once, 1.0, 1e-3, certification=_QUICK).claim.certificate
        is not None
    )


def test_a_column_longer_than_what_noise_is_scaled_to_is_refused() -> None:
    entries = np.array([[3.0, 4.0], [5.0, 0.0]])
    assert np.max(StrategyColumns(entries, norm=10.0).scaled()) == 0.5
    assert math.isclose(np.max(StrategyColumns(entries, norm=5.0).scaled()), 1.0)
    with refuses("norm"):
        StrategyColumns(entries, norm=4.99).scaled()
