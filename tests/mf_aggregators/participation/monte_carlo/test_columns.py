"""Columns of banded matrices, against dense matrices."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators.participation.monte_carlo.columns import columns_of_encoder, columns_of_matrix
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
    columns = columns_of_matrix(matrix, bands)
    for i in range(rounds):
        height = min(bands, rounds - i)
        np.testing.assert_array_equal(columns[i, :height], matrix[i : i + height, i])
        assert not np.any(columns[i, height:])
    np.testing.assert_array_equal(columns_of_encoder(lambda x: matrix @ x, rounds, bands), columns)


def test_more_bands_than_stated_are_refused() -> None:
    matrix = _banded(0, 6, 3)
    with refuses("2 bands", "column 0"):
        columns_of_matrix(matrix, 2)
    with refuses("2 bands"):
        columns_of_encoder(lambda x: matrix @ x, 6, 2)
    with refuses("triangular"):
        columns_of_matrix(matrix.T, 3)
    with refuses("3 bands"):
        columns_of_encoder(lambda x: matrix.T @ x, 6, 3)
    with refuses("finite"):
        columns_of_encoder(lambda x: np.full_like(x, np.nan), 6, 3)
