"""Banded matrices and power series beside dense matrices, exact fractions and closed forms."""

import fractions
import math

import numpy as np
import pytest
import scipy.linalg
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators import linear_algebra, workloads
from mf_aggregators.factorizations.factorization import BandedFactorization, bands_of_matrix
from mf_aggregators.linear_algebra import (
    BandedCovariances,
    BandedMatrix,
    WorkloadBlocks,
    square_root_bands,
)
from tests.examples import examples
from tests.mf_aggregators import toeplitz_cases


def _dense(matrix: BandedMatrix) -> np.ndarray:
    size = len(matrix.rows)
    return matrix.dense_rows(0, size)[:, matrix.lower : matrix.lower + size]


@st.composite
def _matrices(draw: st.DrawFn, size: int) -> tuple[np.ndarray, BandedMatrix]:
    lower, upper = draw(st.integers(0, size + 2)), draw(st.integers(0, size + 2))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    lags = np.arange(size) - np.arange(size)[:, np.newaxis]
    dense = np.where((lags >= -lower) & (lags <= upper), generator.normal(size=lags.shape), 0.0)
    columns = np.arange(size)[:, np.newaxis] + np.arange(-lower, upper + 1)
    inside = (columns >= 0) & (columns < size)
    rows = np.take_along_axis(dense, np.clip(columns, 0, size - 1), axis=1)
    return dense, BandedMatrix(lower, upper, np.where(inside, rows, 0.0))


@given(st.data())
@settings(max_examples=examples(100), deadline=None)
def test_products_and_norms_are_those_of_dense_matrices(data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([1, 2, 5, 9, 70, 150]))
    first, one = data.draw(_matrices(size))
    second, other = data.draw(_matrices(size))
    np.testing.assert_array_equal(_dense(one), first)
    np.testing.assert_array_equal(_dense(one.transposed()), first.T)
    np.testing.assert_array_equal(one.diagonal, np.diagonal(first))
    product = one.times(other)
    np.testing.assert_allclose(_dense(product), first @ second, atol=1e-11)
    # Nothing is left where there is no column.
    np.testing.assert_allclose(product.squared_norm(), np.sum(np.square(_dense(product))))
    np.testing.assert_allclose(one.largest_row_sum(), np.linalg.norm(first, np.inf))
    narrowed = one.narrowed(one.lower // 2, one.upper // 2)
    lags = np.arange(size) - np.arange(size)[:, np.newaxis]
    kept = (lags >= -narrowed.lower) & (lags <= narrowed.upper)
    np.testing.assert_array_equal(_dense(narrowed), np.where(kept, first, 0.0))


def test_bands_below_the_diagonal_give_a_lower_triangle_or_both() -> None:
    bands = np.array([[1.0, 0.0], [2.0, 5.0], [3.0, 6.0]])
    expected = np.array([[1.0, 0.0, 0.0], [5.0, 2.0, 0.0], [0.0, 6.0, 3.0]])
    np.testing.assert_array_equal(_dense(BandedMatrix.lower_triangular(bands)), expected)
    both = _dense(BandedMatrix.symmetric(bands))
    np.testing.assert_array_equal(both, expected + np.tril(expected, -1).T)


def _bands(num_rounds: int, num_bands: int, generator: np.random.Generator) -> np.ndarray:
    """A square root with noise: well-conditioned, and no two rows are the same."""
    series = linear_algebra.square_root_coefficients(num_bands)
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
    strategy, matrix = BandedFactorization(bands).strategy_matrix(), workload.matrix()
    decoder = scipy.linalg.solve_triangular(strategy, matrix.T, lower=True, trans="T").T
    weighted = scipy.linalg.solve_triangular(strategy, decoder.T, lower=True).T
    dual = weighted.T @ weighted
    inverse = workload.inverse_bands()
    assert inverse is not None
    for blocks in (
        WorkloadBlocks.of_inverse(inverse, num_bands),
        WorkloadBlocks.of_matrix(matrix),
    ):
        found = BandedCovariances(bands, blocks)
        rows = np.sum(np.square(decoder), axis=1)
        assert found.squared_error == pytest.approx(np.sum(rows), rel=1e-11)
        np.testing.assert_allclose(found.squared_rows(), rows, rtol=1e-11)
        expected = bands_of_matrix(dual, num_bands)
        largest = np.max(np.abs(dual))
        np.testing.assert_allclose(found.dual_band(), expected, atol=1e-11 * largest)
        slope = bands_of_matrix(-2.0 * strategy @ dual, num_bands)
        np.testing.assert_allclose(found.slope(), slope, atol=1e-10 * largest)


@pytest.mark.parametrize("decades", [0.0, 4.0])
def test_sums_of_sums_of_sums_keep_their_digits(decades: float) -> None:
    """Rows that are averages of models with momentum are very much like the ones before."""
    generator = np.random.default_rng(0)
    # The inverse of 1 / ((1 - x) (1 - 0.99 x) (1 - 0.999 x)).
    taps = np.convolve(np.convolve([1.0, -1.0], [1.0, -0.99]), [1.0, -0.999])
    bands = square_root_bands(1000, 4)
    inverse = np.tri(1000, 4) * taps
    workload = np.linalg.inv(BandedFactorization(inverse).strategy_matrix())
    weights = 10.0 ** generator.uniform(-decades, 0.0, 1000)
    for t in range(inverse.shape[1]):
        inverse[t:, t] /= np.sqrt(weights[: 1000 - t])
    rows = BandedCovariances(bands, WorkloadBlocks.of_inverse(inverse, 4, weights)).squared_rows()
    strategy = BandedFactorization(bands).strategy_matrix()
    decoder = scipy.linalg.solve_triangular(strategy, workload.T, lower=True, trans="T")
    np.testing.assert_allclose(rows, weights * np.sum(np.square(decoder), axis=0), rtol=1e-6)


def test_the_identity_gives_the_row_norms_of_the_inverse() -> None:
    bands = _bands(90, 7, np.random.default_rng(0))
    inverse = np.linalg.inv(BandedFactorization(bands).strategy_matrix())
    rows = BandedCovariances(bands, WorkloadBlocks.of_inverse(np.ones((90, 1)), 7)).squared_rows()
    np.testing.assert_allclose(rows, np.sum(np.square(inverse), axis=1), rtol=1e-12)


def test_equal_blocks_of_a_workload_are_held_once() -> None:
    inverse = workloads.Workload("prefix_sum", 100_000).inverse_bands()
    assert inverse is not None
    blocks = WorkloadBlocks.of_inverse(inverse, 32).blocks
    assert len(blocks) > 3000
    # The first has nothing before it, and the last may be filled up.
    assert len({id(block) for block in blocks}) <= 3


def test_matrices_beyond_floats_have_no_finite_error() -> None:
    bands = np.where(np.tri(400, 2, dtype=bool), np.array([1.0, 50.0]), 0.0)
    with np.errstate(all="ignore"):
        blocks = WorkloadBlocks.of_inverse(np.ones((400, 1)), 2)
        assert not np.isfinite(BandedCovariances(bands, blocks).squared_error)


def _series(length: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=length)


_LENGTHS = st.integers(1, 80)
_SEEDS = st.integers(0, 2**32 - 1)


def test_the_square_root_in_exact_fractions() -> None:
    expected = [float(fractions.Fraction(math.comb(2 * lag, lag), 4**lag)) for lag in range(40)]
    np.testing.assert_allclose(
        linear_algebra.square_root_coefficients(40), expected, rtol=1e-15, atol=0
    )
    np.testing.assert_array_equal(
        linear_algebra.square_root_coefficients(4), [1.0, 0.5, 0.375, 0.3125]
    )
    np.testing.assert_array_equal(
        linear_algebra.square_root_coefficients(4, inverse=True), [1.0, -0.5, -0.125, -0.0625]
    )


@pytest.mark.parametrize("length", [1, 2, 33, 2052, 10**6])
def test_the_square_root_squared_is_the_prefix_sum(length: int) -> None:
    root = linear_algebra.square_root_coefficients(length)
    squared = linear_algebra.product_of_series(root, root, length)
    np.testing.assert_allclose(squared, 1.0, rtol=0, atol=1e-12)
    inverse = linear_algebra.square_root_coefficients(length, inverse=True)
    product = linear_algebra.product_of_series(root, inverse, length)
    np.testing.assert_allclose(product, np.eye(1, length)[0], rtol=0, atol=1e-12)


@given(_LENGTHS, _LENGTHS, _LENGTHS, _SEEDS)
@settings(max_examples=examples(150), deadline=None)
def test_products_of_series_are_products_of_matrices(
    first: int, second: int, length: int, seed: int
) -> None:
    left, right = _series(first, seed), _series(second, seed + 1)
    expected = toeplitz_cases.dense(left, length) @ toeplitz_cases.dense(right, length)[:, 0]
    found = linear_algebra.product_of_series(left, right, length)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


@given(_LENGTHS, _LENGTHS, st.data())
@settings(max_examples=examples(150), deadline=None)
def test_correlation_is_the_transposed_product(
    num_rounds: int, terms: int, data: st.DataObject
) -> None:
    length = data.draw(st.integers(1, num_rounds))
    seed = data.draw(_SEEDS)
    values, series = _series(num_rounds, seed), _series(terms, seed + 1)
    expected = (toeplitz_cases.dense(series, num_rounds).T @ values)[:length]
    found = linear_algebra.correlation(values, series, length)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


@given(st.integers(1, 60), _LENGTHS, _SEEDS)
@settings(max_examples=100, deadline=None)
def test_reciprocals_are_inverse_matrices(terms: int, length: int, seed: int) -> None:
    series = _series(terms, seed) / terms
    series[0] = 1.5
    identity = np.eye(length)
    expected = scipy.linalg.solve_triangular(
        toeplitz_cases.dense(series, length), identity, lower=True
    )[:, 0]
    found = linear_algebra.reciprocal_series(series, length)
    assert found.shape == (length,)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("length", [1, 4095, 4096, 4097, 8192, 8193, 100_000])
def test_long_reciprocals_meet_the_recursion_and_their_closed_form(length: int) -> None:
    decay = 0.999
    found = linear_algebra.reciprocal_series(np.array([1.0, -decay]), length)
    np.testing.assert_allclose(found, decay ** np.arange(length), rtol=0, atol=1e-11)
    root = linear_algebra.square_root_coefficients(length)
    np.testing.assert_allclose(
        linear_algebra.reciprocal_series(root, length),
        linear_algebra.square_root_coefficients(length, inverse=True),
        rtol=0,
        atol=1e-12,
    )


def test_a_reciprocal_of_few_bands_multiplies_back_to_one_at_a_million_rounds() -> None:
    length = 10**6
    series = linear_algebra.square_root_coefficients(100)
    inverse = linear_algebra.reciprocal_series(series, length)
    residual = linear_algebra.product_of_series(series, inverse, length)
    residual[0] -= 1.0
    assert float(np.max(np.abs(residual))) <= 1e-13


def test_padding_cuts_fills_and_copies() -> None:
    series = np.array([1.0, 2.0, 3.0])
    np.testing.assert_array_equal(linear_algebra.padded(series, 2), [1.0, 2.0])
    np.testing.assert_array_equal(linear_algebra.padded(series, 5), [1.0, 2.0, 3.0, 0.0, 0.0])
    same = linear_algebra.padded(series, 3)
    same[0] = 7.0
    assert series[0] == 1.0
