"""Inverse square roots against powers of numbers and of dense matrices."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mf_aggregators.linear_algebra import inverse_square_roots
from mf_aggregators.linear_algebra.inverse_square_roots import InverseSquareRoot
from tests.refusals import refuses


@given(
    st.floats(-100.0, 100.0),
    st.floats(0.0, 15.0),
    st.lists(st.floats(0.0, 1.0), min_size=1, max_size=20),
)
def test_sums_are_inverse_roots_between_their_bounds(
    digits: float, digits_of_condition: float, places: list[float]
) -> None:
    least = 10.0**digits
    root = InverseSquareRoot.between(least, least * 10.0**digits_of_condition)
    x = least * 10.0 ** (digits_of_condition * np.array(places))
    np.testing.assert_allclose(root.at(x), x**-0.5, rtol=1e-12)
    # (H + shift I)^-1 is that of a positive definite matrix, and nothing cancels.
    assert np.all(root.shifts > 0.0)
    assert np.all(root.weights > 0.0)


@pytest.mark.parametrize(
    ("least", "largest"),
    [(0.0, 1.0), (-1.0, 1.0), (2.0, 1.0), (1.0, np.inf), (np.nan, 1.0), (1e-30, 1e30)],
)
def test_bounds_that_allow_no_sum_are_refused(least: float, largest: float) -> None:
    with refuses("bounds"):
        InverseSquareRoot.between(least, largest)


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
    assert values[-1] <= inverse_square_roots.largest_row_sum(diagonal, above) * (1 + 1e-12)
    expected = (vectors / np.sqrt(values)) @ vectors.T
    found = inverse_square_roots.diagonal_blocks(diagonal, above, 0.5 * values[0])
    for k, block in enumerate(found):
        here = slice(k * size, (k + 1) * size)
        np.testing.assert_allclose(block, expected[here, here], atol=1e-12)
    found = inverse_square_roots.whole(diagonal, above, 0.5 * values[0])
    np.testing.assert_allclose(found, expected, atol=1e-12)
