"""Norms of noise rows and of state vectors, against products with the identity."""

from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators.kernel import noising_matrices
from mf_aggregators.kernel.rows import NoiseRecursion, StateSpaceNoise, WindowNoise
from tests.examples import examples
from tests.mf_aggregators import random_recursions


@given(random_recursions.recursions(max_rounds=40), st.integers(1, 9), st.integers(1, 9))
@settings(deadline=None, max_examples=examples(200))
def test_norms_are_those_of_products_with_the_identity(
    recursion: NoiseRecursion, rows: int, fewest: int
) -> None:
    """However many rows are treated at a time."""
    normalised = recursion.normalised
    with mock.patch.multiple(noising_matrices, _ROWS=rows, _FEWEST_ROWS=fewest):
        found = noising_matrices.row_norms(normalised)
    state = normalised.initial_state((recursion.num_rounds,))
    norms, most = [], np.zeros(normalised.num_state_vectors)
    for unit in np.eye(recursion.num_rounds):
        row, state = random_recursions.next_row(normalised, state, unit)
        norms.append(np.linalg.norm(row))
        vectors = state.history[len(state.history) - len(most) :]
        most = np.maximum(most, np.linalg.norm(vectors, axis=1))
    assert found == pytest.approx(norms, rel=1e-9)
    bounds = noising_matrices.state_vector_norms(normalised)
    if isinstance(normalised, StateSpaceNoise):
        assert bounds == pytest.approx(most, rel=1e-9)
    elif isinstance(normalised, WindowNoise):
        assert np.all(bounds >= most * (1.0 - 1e-9))
    assert bounds.shape == most.shape
