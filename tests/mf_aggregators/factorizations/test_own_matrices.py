"""Matrices that are given as arrays: guarantees, rows of noise and checkpoints are those of C."""

import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.linalg
from hypothesis import given, settings
from hypothesis import strategies as st

import mf_aggregators as mfa
from mf_aggregators import checkpoints, sensitivity
from mf_aggregators.factorizations import (
    BandedFactorization,
    DenseFactorization,
    Factorization,
    ToeplitzFactorization,
    from_bands,
    from_coefficients,
    from_matrix,
    noise_rows,
)
from mf_aggregators.factorizations.factorization import bands_of_matrix
from mf_aggregators.kernel.rows import Strategy
from mf_aggregators.participation import (
    FixedEpochOrder,
    MinSeparation,
    Participation,
    SingleParticipation,
)
from tests.mf_aggregators import brute_force
from tests.refusals import refuses

_ENTRIES = st.floats(-1.0, 1.0)


@st.composite
def _matrices(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    """A lower-triangular C of some bands, with a diagonal of either sign away from zero."""
    rounds = draw(st.integers(1, 7))
    bands = draw(st.integers(1, rounds))
    values = draw(st.lists(_ENTRIES, min_size=rounds**2, max_size=rounds**2))
    matrix = np.tril(np.triu(np.reshape(values, (rounds, rounds)), 1 - bands), -1)
    signs = draw(st.lists(st.sampled_from([-1.5, 0.5, 2.0]), min_size=rounds, max_size=rounds))
    return matrix + np.diag(signs), bands


def _schemas(rounds: int) -> list[Participation]:
    separations = range(1, rounds + 1)
    return [
        SingleParticipation(),
        *(MinSeparation(each) for each in separations),
        *(FixedEpochOrder(-(-rounds // each), each) for each in separations),
    ]


def _check(made: Factorization, own: Factorization, matrix: np.ndarray) -> None:
    """Holds a factorization against the library's own, against C, and against its checkpoint."""
    rounds = len(matrix)
    z = np.random.default_rng(5).normal(size=(rounds, 3))
    workload = mfa.workloads.prefix_sum(rounds)
    with tempfile.TemporaryDirectory() as folder:
        checkpoints.save(made, pathlib.Path(folder) / "own")
        loaded = checkpoints.load(pathlib.Path(folder) / "own")
    assert made.optimality_gap is None
    assert type(made) is type(own)
    assert made.has_same_matrix(own)
    assert loaded.has_same_matrix(own)
    for each in (made, loaded):
        np.testing.assert_array_equal(each.strategy_matrix(), matrix)
        rows = np.linalg.solve(matrix, z)
        np.testing.assert_allclose(
            noise_rows.apply(each.noise_recursion(), z), rows, rtol=1e-9, atol=1e-9
        )
        decoder = workload @ np.linalg.inv(matrix)
        for schema in _schemas(rounds):
            found, generic = each.sensitivity(schema), sensitivity.compute(matrix, schema)
            assert found == own.sensitivity(schema)
            truth = brute_force.scalar_sensitivity(matrix, schema)
            assert truth * (1 - 1e-12) <= found.value <= generic.value * (1 + 1e-12)
            assert not found.is_exact or found.value == pytest.approx(truth)
            np.testing.assert_allclose(
                each.errors(workload, schema).per_round_variance,
                found.value**2 * np.sum(decoder**2, axis=1),
                rtol=1e-9,
            )


@settings(deadline=None, max_examples=20)
@given(_matrices())
def test_a_matrix_has_the_guarantees_and_the_noise_of_its_numbers(
    drawn: tuple[np.ndarray, int],
) -> None:
    matrix, _ = drawn
    num_bands = Strategy(matrix, len(matrix), is_dense=True).num_bands
    own = (
        DenseFactorization(matrix)
        if num_bands == len(matrix)
        else BandedFactorization(bands_of_matrix(matrix, num_bands))
    )
    _check(from_matrix(matrix.tolist()), own, matrix)


@settings(deadline=None, max_examples=20)
@given(_matrices())
def test_bands_have_the_guarantees_and_the_noise_of_their_numbers(
    drawn: tuple[np.ndarray, int],
) -> None:
    matrix, num_bands = drawn
    bands = bands_of_matrix(matrix, num_bands)
    _check(from_bands(bands.tolist()), BandedFactorization(bands), matrix)


@settings(deadline=None, max_examples=20)
@given(
    st.lists(_ENTRIES.filter(lambda each: each == 0.0 or abs(each) > 1e-9), max_size=6),
    st.integers(0, 3),
)
def test_coefficients_have_the_guarantees_and_the_noise_of_their_numbers(
    later: list[float], zeros: int
) -> None:
    column = np.array([1.5, *later, *np.zeros(zeros)])
    made = from_coefficients(column.tolist())
    assert made.num_bands == 1 + max(np.flatnonzero(column))
    own = ToeplitzFactorization(len(column), column[: made.num_bands])
    _check(made, own, np.tril(scipy.linalg.toeplitz(column)))


@pytest.mark.parametrize(
    ("make", "given_array"),
    [
        (from_matrix, np.tri(4)),
        (from_matrix, np.eye(4) + np.eye(4, k=-1)),
        (from_bands, np.ones((4, 1))),
        (from_coefficients, np.ones(4)),
    ],
)
def test_a_change_of_the_array_changes_no_factorization(
    make: Callable[[Any], Factorization], given_array: np.ndarray
) -> None:
    made = make(given_array)
    before = made.strategy_matrix().copy()
    given_array *= 1e-3
    np.testing.assert_array_equal(made.strategy_matrix(), before)


_TINY = 1e-300 * np.eye(6) + np.eye(6, k=-1)
# The inverse of a random triangle grows with its rounds until floats hold none of its digits.
_NEARLY_SINGULAR = np.tril(np.random.default_rng(3).normal(size=(80, 80)))


@pytest.mark.parametrize(
    ("make", "given_array", "said"),
    [
        (from_matrix, np.triu(np.ones((4, 4))), "lower triangular"),
        (from_matrix, np.diag([1.0, 0.0, 1.0]), "diagonal"),
        (from_matrix, np.full((4, 4), np.nan), "finite"),
        (from_matrix, np.ones((3, 2)), "square"),
        (from_matrix, [[1.0], [1.0, 2.0]], "array of numbers"),
        (from_matrix, _TINY, "too close to singular"),
        (from_matrix, _NEARLY_SINGULAR, "too close to singular"),
        (from_bands, np.ones((2, 2)), "zero before the first column"),
        (from_bands, np.zeros((2, 1)), "zero on the diagonal"),
        (from_bands, np.ones(3), "shape"),
        (from_bands, bands_of_matrix(_TINY, 2), "inverse"),
        (from_coefficients, [0.0, 1.0], "zero first coefficient"),
        (from_coefficients, [], "vector"),
        (from_coefficients, [1.0, np.nan], "finite"),
        (from_coefficients, [1e-300, 1.0, 0.0], "too large or too small"),
    ],
)
def test_other_arrays_are_refused_in_one_line(
    make: Callable[[Any], Factorization], given_array: Any, said: str
) -> None:
    with refuses(said) as refused:
        make(given_array)
    assert "\n" not in str(refused.value)
