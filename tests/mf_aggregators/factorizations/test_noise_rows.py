"""Noise rows of all rounds: norms against the dense matrix."""

import numpy as np
import pytest
from hypothesis import given

from mf_aggregators.factorizations import (
    noise_rows,
)
from mf_aggregators.kernel.rows import NoiseRecursion
from tests.mf_aggregators import random_recursions


@given(random_recursions.recursions())
def test_row_norms_are_those_of_the_matrix(recursion: NoiseRecursion) -> None:
    norms = np.linalg.norm(noise_rows.dense(recursion), axis=1)
    found = np.abs(recursion.diagonal) * recursion.normalised.row_norms()[0]
    assert found == pytest.approx(norms, rel=1e-9)
