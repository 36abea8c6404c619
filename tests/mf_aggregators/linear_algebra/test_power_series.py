"""Power series against dense matrices, exact fractions and closed forms."""

import fractions
import math

import numpy as np
import pytest
import scipy.linalg
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators.linear_algebra import power_series
from tests.examples import examples


def _dense(series: np.ndarray, num_rounds: int) -> np.ndarray:
    column = np.zeros(num_rounds)
    column[: min(len(series), num_rounds)] = series[:num_rounds]
    return np.asarray(scipy.linalg.toeplitz(column, np.zeros(num_rounds)))


def _series(length: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=length)


_LENGTHS = st.integers(1, 80)
_SEEDS = st.integers(0, 2**32 - 1)


def test_the_square_root_in_exact_fractions() -> None:
    expected = [float(fractions.Fraction(math.comb(2 * lag, lag), 4**lag)) for lag in range(40)]
    np.testing.assert_allclose(
        power_series.square_root_coefficients(40), expected, rtol=1e-15, atol=0
    )
    np.testing.assert_array_equal(
        power_series.square_root_coefficients(4), [1.0, 0.5, 0.375, 0.3125]
    )
    np.testing.assert_array_equal(
        power_series.square_root_coefficients(4, inverse=True), [1.0, -0.5, -0.125, -0.0625]
    )


@pytest.mark.parametrize("length", [1, 2, 33, 2052, 10**6])
def test_the_square_root_squared_is_the_prefix_sum(length: int) -> None:
    root = power_series.square_root_coefficients(length)
    squared = power_series.product(root, root, length)
    np.testing.assert_allclose(squared, 1.0, rtol=0, atol=1e-12)
    inverse = power_series.square_root_coefficients(length, inverse=True)
    product = power_series.product(root, inverse, length)
    np.testing.assert_allclose(product, np.eye(1, length)[0], rtol=0, atol=1e-12)


@given(_LENGTHS, _LENGTHS, _LENGTHS, _SEEDS)
@settings(max_examples=examples(150), deadline=None)
def test_products_of_series_are_products_of_matrices(
    first: int, second: int, length: int, seed: int
) -> None:
    left, right = _series(first, seed), _series(second, seed + 1)
    expected = _dense(left, length) @ _dense(right, length)[:, 0]
    found = power_series.product(left, right, length)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


@given(_LENGTHS, _LENGTHS, st.data())
@settings(max_examples=examples(150), deadline=None)
def test_correlation_is_the_transposed_product(
    num_rounds: int, terms: int, data: st.DataObject
) -> None:
    length = data.draw(st.integers(1, num_rounds))
    seed = data.draw(_SEEDS)
    values, series = _series(num_rounds, seed), _series(terms, seed + 1)
    expected = (_dense(series, num_rounds).T @ values)[:length]
    found = power_series.correlation(values, series, length)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


@given(st.integers(1, 60), _LENGTHS, _SEEDS)
@settings(max_examples=100, deadline=None)
def test_reciprocals_are_inverse_matrices(terms: int, length: int, seed: int) -> None:
    series = _series(terms, seed) / terms
    series[0] = 1.5
    identity = np.eye(length)
    expected = scipy.linalg.solve_triangular(_dense(series, length), identity, lower=True)[:, 0]
    found = power_series.reciprocal(series, length)
    assert found.shape == (length,)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("length", [1, 4095, 4096, 4097, 8192, 8193, 100_000])
def test_long_reciprocals_meet_the_recursion_and_their_closed_form(length: int) -> None:
    decay = 0.999
    found = power_series.reciprocal(np.array([1.0, -decay]), length)
    np.testing.assert_allclose(found, decay ** np.arange(length), rtol=0, atol=1e-11)
    root = power_series.square_root_coefficients(length)
    np.testing.assert_allclose(
        power_series.reciprocal(root, length),
        power_series.square_root_coefficients(length, inverse=True),
        rtol=0,
        atol=1e-12,
    )


def test_a_reciprocal_of_few_bands_multiplies_back_to_one_at_a_million_rounds() -> None:
    length = 10**6
    series = power_series.square_root_coefficients(100)
    inverse = power_series.reciprocal(series, length)
    residual = power_series.product(series, inverse, length)
    residual[0] -= 1.0
    assert float(np.max(np.abs(residual))) <= 1e-13


def test_padding_cuts_fills_and_copies() -> None:
    series = np.array([1.0, 2.0, 3.0])
    np.testing.assert_array_equal(power_series.padded(series, 2), [1.0, 2.0])
    np.testing.assert_array_equal(power_series.padded(series, 5), [1.0, 2.0, 3.0, 0.0, 0.0])
    same = power_series.padded(series, 3)
    same[0] = 7.0
    assert series[0] == 1.0
