"""Norms of the rows of C^-1 against the dense matrix."""

from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators.kernel.rows import NoiseRecursion
from mf_aggregators.noise import noising_matrices
from tests.mf_aggregators import random_recursions


@given(random_recursions.recursions(), st.integers(1, 4))
@settings(deadline=None)
def test_row_norms_are_those_of_the_matrix(recursion: NoiseRecursion, columns: int) -> None:
    """Whatever they are computed from, and however many columns are treated at a time."""
    with mock.patch.object(noising_matrices, "_COLUMNS", columns):
        found = noising_matrices.row_norms(recursion)
    matrix = noising_matrices.dense(recursion)
    assert found == pytest.approx(np.linalg.norm(matrix, axis=1), rel=1e-9)
    assert noising_matrices.largest_row_norm(recursion) == pytest.approx(np.max(found))
