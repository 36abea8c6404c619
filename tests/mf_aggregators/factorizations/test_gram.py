"""C^T C = X, not C C^T = X."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators.factorizations.gram import lower_triangular_factor


@given(st.integers(1, 10), st.integers(1, 10), st.integers(0, 2**32 - 1))
@settings(deadline=None)
def test_the_factor_is_on_the_right_side_lower_triangular_and_banded(
    num_rounds: int, num_bands: int, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    root = np.tril(generator.normal(size=(num_rounds, num_rounds)))
    root -= np.tril(root, -num_bands)
    np.fill_diagonal(root, 2.0)
    gram = root.T @ root
    factor = lower_triangular_factor(gram)
    np.testing.assert_allclose(factor.T @ factor, gram, atol=1e-9)
    assert np.array_equal(factor, np.tril(factor))
    np.testing.assert_allclose(np.tril(factor, -num_bands), 0.0, atol=1e-12)
    # There is one such factor with a positive diagonal.
    np.testing.assert_allclose(factor, root, atol=1e-8)


def test_the_wrong_side_would_be_noticed() -> None:
    gram = np.array([[2.0, 1.0], [1.0, 1.0]])
    wrong = np.linalg.cholesky(gram)
    assert not np.allclose(wrong.T @ wrong, gram)


def test_indefinite_matrices_are_refused() -> None:
    with pytest.raises(np.linalg.LinAlgError):
        lower_triangular_factor(np.array([[1.0, 2.0], [2.0, 1.0]]))
