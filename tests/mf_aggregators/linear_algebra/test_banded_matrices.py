"""Banded matrices against dense ones."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators.linear_algebra.banded_matrices import BandedMatrix
from tests.examples import examples


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
