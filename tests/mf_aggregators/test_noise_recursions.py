"""Streams of noise rows against the dense product C^-1 Z."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators import noise_recursions
from mf_aggregators.factorizations import (
    BandedFactorization,
    DenseFactorization,
    Factorization,
    IdentityFactorization,
)


@st.composite
def _factorizations(draw: st.DrawFn) -> Factorization:
    num_rounds = draw(st.integers(1, 12))
    num_bands = draw(st.integers(1, num_rounds))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    matrix = np.tril(generator.normal(size=(num_rounds, num_rounds))) / num_rounds
    np.fill_diagonal(matrix, generator.uniform(0.5, 2.0, num_rounds))
    kind = draw(st.sampled_from(["identity", "banded", "dense"]))
    if kind == "identity":
        return IdentityFactorization(num_rounds)
    if kind == "dense":
        return DenseFactorization(matrix)
    return BandedFactorization(noise_recursions.bands_of_matrix(matrix, num_bands))


@given(_factorizations(), st.sampled_from([(), (3,), (2, 3)]))
@settings(deadline=None)
def test_rows_equal_the_dense_product(factorization: Factorization, shape: tuple[int, ...]) -> None:
    num_rounds = factorization.num_rounds
    z = np.random.default_rng(0).normal(size=(num_rounds, *shape))
    rows = noise_recursions.apply(factorization.noise_recursion(), z)
    dense = np.linalg.solve(factorization.strategy_matrix(), z.reshape(num_rounds, -1))
    np.testing.assert_allclose(rows, dense.reshape(z.shape), rtol=1e-9, atol=1e-9)


@given(_factorizations())
@settings(deadline=None)
def test_the_noising_matrix_inverts_the_strategy_matrix(factorization: Factorization) -> None:
    product = factorization.strategy_matrix() @ factorization.noising_matrix()
    np.testing.assert_allclose(product, np.eye(factorization.num_rounds), atol=1e-8)


@given(_factorizations())
@settings(deadline=None)
def test_rows_past_the_last_round_are_refused(factorization: Factorization) -> None:
    recursion = factorization.noise_recursion()
    state = noise_recursions.initial_state(recursion, ())
    for _ in range(factorization.num_rounds):
        _, state = noise_recursions.next_row(recursion, state, np.zeros(()))
    with pytest.raises(ValueError, match="more rounds is needed"):
        noise_recursions.next_row(recursion, state, np.zeros(()))


def test_the_state_of_a_banded_recursion_is_its_bands() -> None:
    bands = np.tri(100, 5)
    recursion = BandedFactorization(bands).noise_recursion()
    assert noise_recursions.floats_per_parameter(recursion) == 4
    assert noise_recursions.initial_state(recursion, (7,)).history.shape == (4, 7)


def test_float32_streams_stay_close_to_float64_over_thousands_of_rounds() -> None:
    num_rounds, num_bands = 10_000, 16
    lags = np.arange(1, num_bands)
    coefficients = np.concatenate([[1.0], np.cumprod((2.0 * lags - 1.0) / (2.0 * lags))])
    bands = np.where(np.tri(num_rounds, num_bands, dtype=bool), coefficients, 0.0)
    recursion = BandedFactorization(bands).noise_recursion()
    z = np.random.default_rng(1).normal(size=(num_rounds, 4))
    exact = noise_recursions.apply(recursion, z)
    rounded = noise_recursions.apply(recursion, z.astype(np.float32))
    assert rounded.dtype == np.float32
    assert np.max(np.abs(rounded - exact)) < 1e-5 * np.max(np.abs(exact))
