"""Many small systems at once, against LAPACK's solution of each."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mf_aggregators.linear_algebra import stacked_cholesky


@given(st.integers(0, 7), st.integers(1, 9), st.integers(0, 2**32))
def test_each_system_is_solved(count: int, size: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    roots = generator.normal(size=(count, size, size))
    matrices = roots @ roots.transpose(0, 2, 1) + 0.1 * np.eye(size)
    columns = generator.normal(size=(count, size))
    given_to_it = np.tril(matrices), columns.copy()
    found = stacked_cholesky.solve(*given_to_it)
    assert found.shape == (count, size)
    for matrix, column, solution in zip(matrices, columns, found, strict=True):
        # Errors are at most the condition number, 1000 or so, times the unit roundoff.
        expected = np.linalg.solve(matrix, column)
        np.testing.assert_allclose(
            solution, expected, rtol=0.0, atol=1e-10 * np.max(np.abs(expected))
        )
    np.testing.assert_array_equal(given_to_it[0], np.tril(matrices))
    np.testing.assert_array_equal(given_to_it[1], columns)


@pytest.mark.parametrize("entry", [0.0, -1.0, np.nan])
def test_a_matrix_that_is_not_positive_definite_is_refused(entry: float) -> None:
    matrices = np.array([np.eye(3), np.diag([1.0, 1.0, entry])])
    with pytest.raises(np.linalg.LinAlgError):
        stacked_cholesky.solve(matrices, np.ones((2, 3)))
