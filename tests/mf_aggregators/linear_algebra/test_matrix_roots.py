"""Triangular factors on the right side, and inverse roots beside eigendecompositions."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mf_aggregators.linear_algebra import matrix_roots
from mf_aggregators.linear_algebra.matrix_roots import lower_triangular_factor
from tests.refusals import refuses


@given(st.integers(1, 10), st.integers(1, 10), st.integers(0, 2**32 - 1))
def test_the_factor_is_on_the_right_side_lower_triangular_and_banded(
    num_rounds: int, num_bands: int, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    root: np.ndarray = np.tril(generator.normal(size=(num_rounds, num_rounds)))
    root -= np.tril(root, -num_bands)
    np.fill_diagonal(root, 2.0)
    gram = root.T @ root
    factor = lower_triangular_factor(gram)
    np.testing.assert_allclose(factor.T @ factor, gram, atol=1e-9)
    assert np.array_equal(factor, np.tril(factor))
    np.testing.assert_allclose(np.tril(factor, -num_bands), 0.0, atol=1e-12)
    # There is one such factor with a positive diagonal.
    np.testing.assert_allclose(factor, root, atol=1e-8)


def test_indefinite_matrices_are_refused() -> None:
    with pytest.raises(np.linalg.LinAlgError):
        lower_triangular_factor(np.array([[1.0, 2.0], [2.0, 1.0]]))


@given(
    st.floats(-100.0, 100.0),
    st.floats(0.0, 15.0),
    st.lists(st.floats(0.0, 1.0), min_size=1, max_size=20),
)
def test_sums_are_inverse_roots_between_their_bounds(
    digits: float, digits_of_condition: float, places: list[float]
) -> None:
    least = 10.0**digits
    largest = least * 10.0**digits_of_condition
    shifts, weights = matrix_roots._inverse_square_root(least, largest)
    x = least * 10.0 ** (digits_of_condition * np.array(places))
    found = np.sum(weights / (x[:, np.newaxis] + shifts), axis=1)
    np.testing.assert_allclose(found, x**-0.5, rtol=1e-12)
    # (H + shift I)^-1 is that of a positive definite matrix, and nothing cancels.
    assert np.all(shifts > 0.0)
    assert np.all(weights > 0.0)


@pytest.mark.parametrize(
    ("least", "largest"),
    [(0.0, 1.0), (-1.0, 1.0), (2.0, 1.0), (1.0, np.inf), (np.nan, 1.0), (1e-30, 1e30)],
)
def test_bounds_that_allow_no_sum_are_refused(least: float, largest: float) -> None:
    with refuses("bounds"):
        matrix_roots._inverse_square_root(least, largest)


@given(st.integers(1, 7), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_blocks_and_the_whole_are_those_of_a_dense_matrix(
    num_blocks: int, size: int, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    diagonal = generator.uniform(-1.0, 1.0, (num_blocks, size, size))
    diagonal += diagonal.transpose(0, 2, 1) + 5.0 * size * np.eye(size)
    above = generator.uniform(-1.0, 1.0, (num_blocks - 1, size, size))
    whole = np.zeros((num_blocks * size, num_blocks * size))
    for k, block in enumerate(diagonal):
        here = slice(k * size, (k + 1) * size)
        whole[here, here] = block
        if k + 1 < num_blocks:
            after = slice((k + 1) * size, (k + 2) * size)
            whole[here, after], whole[after, here] = above[k], above[k].T
    values, vectors = np.linalg.eigh(whole)
    assert values[-1] <= matrix_roots.largest_row_sum(diagonal, above) * (1 + 1e-12)
    expected = (vectors / np.sqrt(values)) @ vectors.T
    found = matrix_roots.inverse_root_blocks(diagonal, above, 0.5 * values[0])
    for k, block in enumerate(found):
        here = slice(k * size, (k + 1) * size)
        np.testing.assert_allclose(block, expected[here, here], atol=1e-12)
    found = matrix_roots.inverse_root(diagonal, above, 0.5 * values[0])
    np.testing.assert_allclose(found, expected, atol=1e-12)
