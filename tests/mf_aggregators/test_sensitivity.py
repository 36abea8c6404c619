"""Sensitivities against enumeration of all patterns, signs and vector contributions."""

import pickle
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators import sensitivity
from mf_aggregators.participation import (
    FixedEpochOrder,
    MinSeparation,
    Participation,
    SingleParticipation,
)
from tests.examples import examples
from tests.mf_aggregators import brute_force
from tests.mf_aggregators.toeplitz_cases import schemas
from tests.refusals import refuses

_RELATIVE = 1e-9


@st.composite
def _problems(draw: st.DrawFn, largest: int = 9) -> tuple[np.ndarray, Participation]:
    num_rounds = draw(st.integers(1, largest))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    matrix = generator.normal(size=(num_rounds, num_rounds))
    if draw(st.booleans()):
        matrix = np.abs(matrix)
    if draw(st.booleans()):
        matrix[generator.random(matrix.shape) < 0.5] = 0.0
    shape = draw(st.sampled_from(["lower", "full", "symmetric", "tall"]))
    bands = draw(st.integers(1, num_rounds))
    if shape == "lower":
        matrix = np.tril(matrix) - np.tril(matrix, -bands)
    elif shape == "symmetric":
        matrix = np.tril(matrix) - np.tril(matrix, -bands)
        matrix = matrix + matrix.T
    elif shape == "tall":
        matrix = np.concatenate([matrix, generator.normal(size=(3, num_rounds))])
    return matrix, draw(schemas(num_rounds))


@given(_problems())
@settings(max_examples=examples(300), deadline=None)
def test_never_below_and_if_exact_equal_to_enumeration(
    problem: tuple[np.ndarray, Participation],
) -> None:
    matrix, participation = problem
    computed = sensitivity.compute(matrix, participation)
    truth = brute_force.scalar_sensitivity(matrix, participation)
    assert computed.value >= truth * (1 - _RELATIVE)
    if computed.is_exact:
        assert computed.value == pytest.approx(truth, rel=_RELATIVE, abs=1e-12)


@given(_problems(), st.integers(1, 5), st.integers(1, 5))
@settings(max_examples=examples(200), deadline=None)
def test_a_bound_is_that_of_the_definition_whatever_is_computed_at_a_time(
    problem: tuple[np.ndarray, Participation], rows: int, columns: int
) -> None:
    """Rows of |X| over the patterns that hold them, or norms of columns: the smaller of both."""
    matrix, participation = problem
    with (
        mock.patch.object(sensitivity, "_ROWS_AT_A_TIME", rows),
        mock.patch.object(sensitivity, "_COLUMNS_AT_A_TIME", columns),
    ):
        computed = sensitivity.compute(matrix, participation)
    if computed.is_exact:
        return
    magnitudes, norms = np.abs(matrix.T @ matrix), np.linalg.norm(matrix, axis=0)
    allowed = [list(each) for each in brute_force.patterns(participation, matrix.shape[1])]
    if isinstance(participation, FixedEpochOrder):
        squared = max(float(np.sum(magnitudes[np.ix_(each, each)])) for each in allowed)
        assert computed.value**2 == pytest.approx(squared, rel=_RELATIVE)
        return
    through = [
        max(float(np.sum(magnitudes[i, each])) for each in allowed if i in each)
        for i in range(matrix.shape[1])
    ]
    by_rows = max(sum(through[i] for i in each) for each in allowed)
    by_norms = max(float(np.sum(norms[each])) for each in allowed)
    assert computed.value == pytest.approx(min(np.sqrt(by_rows), by_norms), rel=_RELATIVE)


@given(_problems(largest=7), st.integers(2, 4), st.integers(0, 2**32 - 1))
@settings(max_examples=examples(150), deadline=None)
def test_never_below_the_change_of_vector_contributions(
    problem: tuple[np.ndarray, Participation], dimension: int, seed: int
) -> None:
    matrix, participation = problem
    computed = sensitivity.compute(matrix, participation)
    generator = np.random.default_rng(seed)
    for pattern in brute_force.patterns(participation, matrix.shape[1]):
        change = brute_force.vector_change(matrix, pattern, dimension, generator)
        assert change <= computed.value * (1 + _RELATIVE)


@given(st.integers(1, 10), st.integers(1, 10), st.integers(0, 2**32 - 1), st.data())
@settings(max_examples=examples(200), deadline=None)
def test_banded_matrices_are_exact_under_their_separation(
    num_rounds: int, num_bands: int, seed: int, data: st.DataObject
) -> None:
    matrix = np.tril(np.random.default_rng(seed).normal(size=(num_rounds, num_rounds)))
    matrix -= np.tril(matrix, -num_bands)
    separation = data.draw(st.integers(num_bands, num_bands + 3))
    limit = data.draw(st.one_of(st.none(), st.integers(1, 5)))
    participation = MinSeparation(separation, limit)
    computed = sensitivity.compute(matrix, participation)
    assert computed.is_exact
    truth = brute_force.scalar_sensitivity(matrix, participation)
    assert computed.value == pytest.approx(truth, rel=_RELATIVE)


def test_at_most_k_participations_and_not_exactly_k() -> None:
    # Both pairs of two rounds at least 2 apart leave out the column of squared norm 10.
    matrix = np.diag(np.sqrt([1.0, 10.0, 1.0]))
    computed = sensitivity.compute(matrix, MinSeparation(2, 2))
    assert computed.is_exact
    assert computed.value**2 == pytest.approx(10.0)


def test_a_symmetric_banded_matrix_is_not_taken_for_a_banded_one() -> None:
    # C has 2 bands, C^T C has 3: columns 0 and 2 overlap in row 1.
    matrix = np.array([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0], [0.0, 1.0, 1.0]])
    computed = sensitivity.compute(matrix, MinSeparation(2))
    truth = brute_force.scalar_sensitivity(matrix, MinSeparation(2))
    assert truth > np.sqrt(4.0)
    assert computed.value >= truth * (1 - _RELATIVE)


@given(st.integers(1, 9), st.floats(0.0, 1.0), st.integers(-8, 8), st.integers(0, 2**32 - 1))
@settings(max_examples=examples(200), deadline=None)
def test_bands_are_those_of_the_entries_on_both_sides(
    num_rounds: int, share: float, above: int, seed: int
) -> None:
    """Whatever rows are empty; a Gram matrix is not trusted to be symmetric."""
    generator = np.random.default_rng(seed)
    matrix = np.tril(generator.random((num_rounds, num_rounds)), above)
    matrix[generator.random(matrix.shape) < share] = 0.0
    lags = [i - j for i, j in zip(*np.nonzero(matrix), strict=True)]
    least = max([0, *lags]) + 1
    expected = None if min([0, *lags]) < 0 else least
    assert sensitivity.lower_bands(matrix) == expected
    assert sensitivity._gram_bands(matrix) == max([0, *map(abs, lags)]) + 1


def test_cancellation_is_not_counted_on() -> None:
    # Opposite columns cancel for equal contributions, and add up for opposite ones.
    matrix = np.array([[1.0, -1.0], [0.0, 0.0]])
    computed = sensitivity.compute(matrix, FixedEpochOrder(2, 1))
    assert computed.value == pytest.approx(2.0)
    assert computed.is_exact


def test_frustrated_signs_are_reported_as_a_bound() -> None:
    # No signs make all three products positive, so the sum of magnitudes is not reached.
    gram = np.array([[1.0, -0.4, -0.4], [-0.4, 1.0, -0.4], [-0.4, -0.4, 1.0]])
    computed = sensitivity.from_gram_matrix(gram, FixedEpochOrder(3, 1))
    assert not computed.is_exact
    matrix = np.linalg.cholesky(gram).T
    assert computed.value > brute_force.scalar_sensitivity(matrix, FixedEpochOrder(3, 1))


def test_column_norms_are_refused_where_columns_overlap() -> None:
    with refuses("Thm 2"):
        sensitivity.from_column_norms(np.ones(6), MinSeparation(2), num_bands=3)


def test_the_bound_is_no_looser_than_the_papers() -> None:
    generator = np.random.default_rng(5)
    for _ in range(20):
        matrix = np.tril(generator.normal(size=(10, 10)))
        gram = np.abs(matrix.T @ matrix)
        computed = sensitivity.compute(matrix, MinSeparation(3, 3))
        assert computed.value**2 <= _algorithm_4(gram, 3, 3) * (1 + _RELATIVE)


def _algorithm_4(magnitudes: np.ndarray, separation: int, most: int) -> float:
    """BandMF Alg. 4 (of the second extraction: Alg. 3), by enumeration of patterns."""
    num_rounds = magnitudes.shape[0]
    allowed = list(brute_force.patterns(MinSeparation(separation, most), num_rounds))

    def largest(vector: np.ndarray) -> float:
        return max(float(np.sum(vector[list(pattern)])) for pattern in allowed)

    return largest(np.array([largest(row) for row in magnitudes]))


def test_a_sensitivity_is_a_float_and_survives_pickling() -> None:
    computed = sensitivity.compute(np.eye(3), SingleParticipation())
    assert isinstance(computed, float)
    assert 2 * computed == 2.0
    copy = pickle.loads(pickle.dumps(computed))
    assert (copy.value, copy.is_exact, copy.theorem) == (1.0, True, computed.theorem)


@pytest.mark.parametrize("matrix", [np.ones(3), np.ones((0, 0)), np.array([[np.nan]])])
def test_bad_matrices_are_refused(matrix: np.ndarray) -> None:
    with refuses("strategy matrix"):
        sensitivity.compute(matrix, SingleParticipation())


def test_something_else_than_a_schema_is_refused() -> None:
    with refuses("SingleParticipation", error=TypeError):
        sensitivity.compute(np.eye(2), "single")  # type: ignore[arg-type]
