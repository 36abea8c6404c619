"""Columns of banded matrices and products with them, against dense matrices."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators.kernel import dominating_pairs as distributions
from tests.examples import examples
from tests.refusals import refuses


def _banded(seed: int, rounds: int, bands: int) -> np.ndarray:
    lags = np.subtract.outer(np.arange(rounds), np.arange(rounds))
    matrix = np.random.default_rng(seed).uniform(-1.0, 1.0, (rounds, rounds))
    return np.asarray(matrix * ((lags >= 0) & (lags < bands)) + 2.0 * np.eye(rounds))


@given(st.integers(1, 80), st.integers(1, 80), st.integers(0, 100))
@settings(max_examples=examples(40), deadline=None)
def test_columns_hold_the_matrix(rounds: int, bands: int, seed: int) -> None:
    bands = min(bands, rounds)
    matrix = _banded(seed, rounds, bands)
    columns = distributions.columns_of_matrix(matrix, bands)
    for i in range(rounds):
        height = min(bands, rounds - i)
        np.testing.assert_array_equal(columns[i, :height], matrix[i : i + height, i])
        assert not np.any(columns[i, height:])
    np.testing.assert_array_equal(
        distributions.columns_of_encoder(lambda x: matrix @ x, rounds, bands), columns
    )
    gram, own = distributions.gram_bands(columns), matrix.T @ matrix
    for t in range(bands):
        np.testing.assert_allclose(gram[t:, t], np.diagonal(own, -t), atol=1e-12)
        assert not np.any(gram[:t, t])
    x = np.random.default_rng(seed).normal(size=(rounds, 3))
    products = distributions.BandedProducts(columns)
    np.testing.assert_allclose(products.times(x), matrix @ x, atol=1e-11)
    np.testing.assert_allclose(products.transposed_times(x), matrix.T @ x, atol=1e-11)
    scaled = distributions.normalised(columns)
    assert np.min(scaled) >= 0.0
    assert np.max(np.sum(scaled**2, axis=1)) == pytest.approx(1.0)


def test_more_bands_than_stated_are_refused() -> None:
    matrix = _banded(0, 6, 3)
    with refuses("2 bands", "column 0"):
        distributions.columns_of_matrix(matrix, 2)
    with refuses("2 bands"):
        distributions.columns_of_encoder(lambda x: matrix @ x, 6, 2)
    with refuses("triangular"):
        distributions.columns_of_matrix(matrix.T, 3)
    with refuses("3 bands"):
        distributions.columns_of_encoder(lambda x: matrix.T @ x, 6, 3)
    with refuses("finite"):
        distributions.columns_of_encoder(lambda x: np.full_like(x, np.nan), 6, 3)
    with refuses("zero"):
        distributions.normalised(np.zeros((3, 2)))
    for value in (np.nan, np.inf):
        with refuses("finite"):
            distributions.normalised(np.array([[1.0, 0.0], [value, 1.0]]))


@pytest.mark.parametrize("scale", [1e-300, 2.7e-162, 1e-20, 3.0, 1e200, 1.7e308])
def test_a_scaling_of_the_matrix_changes_nothing(scale: float) -> None:
    """Squares of entries may be beyond floats, which would leave columns of zeros."""
    columns = np.array([[1.0, -0.5], [0.25, 0.5], [1.0, 0.0]])
    np.testing.assert_allclose(
        distributions.normalised(scale * columns), np.abs(columns) / 1.25**0.5, rtol=1e-12
    )
