"""Errors, slopes and duals of banded matrices against dense inverses."""

import numpy as np
import pytest
import scipy.linalg
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators import workloads
from mf_aggregators.linear_algebra import power_series
from mf_aggregators.linear_algebra.banded_covariances import BandedCovariances, WorkloadBlocks
from mf_aggregators.noise import recursions
from tests.examples import examples


def _bands(num_rounds: int, num_bands: int, generator: np.random.Generator) -> np.ndarray:
    """A square root with noise: well-conditioned, and no two rows are the same."""
    series = power_series.square_root_coefficients(num_bands)
    bands = series * (1.0 + 0.2 * generator.normal(size=(num_rounds, num_bands)))
    bands[:, 0] = generator.uniform(0.5, 2.0, num_rounds)
    return np.where(np.tri(num_rounds, num_bands, dtype=bool), bands, 0.0)


@given(st.data())
@settings(max_examples=examples(100), deadline=None)
def test_all_that_follows_from_bands_is_what_dense_inverses_give(data: st.DataObject) -> None:
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    num_rounds = data.draw(st.sampled_from([1, 2, 3, 7, 24, 25, 49, 120, 200]))
    num_bands = data.draw(st.integers(1, num_rounds))
    momentum = data.draw(st.sampled_from([0.0, 0.9]))
    rates = data.draw(st.sampled_from([None, tuple(generator.uniform(0.2, 2.0, num_rounds))]))
    workload = workloads.Workload("momentum_sgd", num_rounds, momentum, rates)
    bands = _bands(num_rounds, num_bands, generator)
    strategy, matrix = recursions.matrix_from_bands(bands), workload.matrix()
    decoder = scipy.linalg.solve_triangular(strategy, matrix.T, lower=True, trans="T").T
    weighted = scipy.linalg.solve_triangular(strategy, decoder.T, lower=True).T
    dual = weighted.T @ weighted
    for blocks in (
        WorkloadBlocks.of_inverse(workload.inverse_bands(), num_bands),
        WorkloadBlocks.of_matrix(matrix),
    ):
        found = BandedCovariances(bands, blocks)
        rows = np.sum(np.square(decoder), axis=1)
        assert found.squared_error == pytest.approx(np.sum(rows), rel=1e-11)
        np.testing.assert_allclose(found.squared_rows(), rows, rtol=1e-11)
        expected = recursions.bands_of_matrix(dual, num_bands)
        largest = np.max(np.abs(dual))
        np.testing.assert_allclose(found.dual_band(), expected, atol=1e-11 * largest)
        slope = recursions.bands_of_matrix(-2.0 * strategy @ dual, num_bands)
        np.testing.assert_allclose(found.slope(), slope, atol=1e-10 * largest)


def test_the_identity_gives_the_row_norms_of_the_inverse() -> None:
    bands = _bands(90, 7, np.random.default_rng(0))
    inverse = np.linalg.inv(recursions.matrix_from_bands(bands))
    rows = BandedCovariances(bands, WorkloadBlocks.identity(90, 7)).squared_rows()
    np.testing.assert_allclose(rows, np.sum(np.square(inverse), axis=1), rtol=1e-12)


def test_equal_blocks_of_a_workload_are_held_once() -> None:
    inverse = workloads.Workload("prefix_sum", 100_000).inverse_bands()
    blocks = WorkloadBlocks.of_inverse(inverse, 32).blocks
    assert len(blocks) > 3000
    # The first has nothing before it, and the last may be filled up.
    assert len({id(block) for block in blocks}) <= 3


def test_matrices_beyond_floats_have_no_finite_error() -> None:
    bands = np.where(np.tri(400, 2, dtype=bool), np.array([1.0, 50.0]), 0.0)
    with np.errstate(all="ignore"):
        blocks = WorkloadBlocks.identity(400, 2)
        assert not np.isfinite(BandedCovariances(bands, blocks).squared_error)
