"""Noise rows of all rounds: norms against the dense matrix, and products in float32."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings

from mf_aggregators.factorizations import (
    BandedFactorization,
    Factorization,
    banded_inverse,
    blt,
    noise_rows,
    toeplitz,
    tree_aggregation,
)
from mf_aggregators.kernel.rows import NoiseRecursion
from tests.mf_aggregators import random_recursions


@given(random_recursions.recursions())
@settings(deadline=None)
def test_row_norms_are_those_of_the_matrix(recursion: NoiseRecursion) -> None:
    norms = np.linalg.norm(noise_rows.dense(recursion), axis=1)
    assert noise_rows.row_norms(recursion) == pytest.approx(norms, rel=1e-9)


@pytest.mark.long_cases(2)
@pytest.mark.short_cases(1)
@pytest.mark.parametrize(
    "make",
    [
        lambda: tree_aggregation(10_000, "full"),
        lambda: toeplitz(10_000, 16, coefficients="square_root", equal_column_norms=True),
        lambda: blt(10_000, 3),
        lambda: banded_inverse(10_000, 8, coefficients="square_root"),
        # More of the same kinds.
        *(
            pytest.param(make, marks=pytest.mark.long)
            for make in (
                lambda: tree_aggregation(10_000),
                lambda: toeplitz(10_000, 16, coefficients="square_root"),
                lambda: BandedFactorization(np.tri(10_000, 16) / np.arange(1.0, 17.0)),
            )
        ),
    ],
)
def test_rounding_in_single_precision_does_not_add_up(make: Callable[[], Factorization]) -> None:
    """Neither in the rows nor in their prefix sums, which are what training uses."""
    recursion = make().noise_recursion()
    z = np.random.default_rng(2).normal(size=(10_000, 2))
    exact = noise_rows.apply(recursion, z)
    rounded = noise_rows.apply(recursion, z.astype(np.float32))
    assert rounded.dtype == np.float32
    assert np.max(np.abs(rounded - exact)) < 2e-6 * np.max(np.abs(exact))
    difference = np.abs(np.cumsum(rounded - exact, axis=0))
    assert np.max(difference) < 1e-4 * np.max(np.abs(np.cumsum(exact, axis=0)))
