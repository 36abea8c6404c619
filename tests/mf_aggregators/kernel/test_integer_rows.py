"""Rows of noise as integers, against exact rational arithmetic."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators.factorizations import Factorization, noise_rows, tree_aggregation
from mf_aggregators.kernel import discrete_gaussian, draws
from mf_aggregators.kernel.draws import NoiseSource
from mf_aggregators.kernel.integer_rows import IntegerRows
from mf_aggregators.kernel.rows import (
    BandedNoise,
    DenseNoise,
    NoiseRecursion,
    StateSpaceNoise,
    WindowNoise,
    independent_rows,
)
from tests.examples import examples
from tests.mf_aggregators import random_recursions, small_mechanisms
from tests.refusals import refuses

_SEED = np.array([2**62 + 12345, -(2**61) - 999], np.int64)
_EVERY_MECHANISM = pytest.mark.parametrize(
    "factorization", small_mechanisms.factorizations(64), ids=str
)


def _exact(array: np.ndarray) -> np.ndarray:
    """The same numbers as fractions."""
    return np.vectorize(Fraction, otypes=[object])(array)


def _rounded(number: Fraction) -> int:
    """To nearest, ties to even."""
    return round(number)


def _rows_by_definition(rows: IntegerRows, z: np.ndarray) -> np.ndarray:
    """The rows of the module's docstring, with all earlier ones at hand and no rounding else."""
    unit, shift = rows.normalised, rows.shift
    made: list[list[int]] = []
    vectors: list[list[Fraction]] = []
    for i in range(unit.num_rounds):
        row = []
        for d in range(z.shape[1]):
            earlier = _earlier(unit, i, d, made, z, vectors)
            if not isinstance(unit, DenseNoise | WindowNoise):
                earlier *= 2**shift
            w = int(z[i, d]) + _rounded(earlier)
            row.append(math.floor(Fraction(w + 2 ** (shift - 1), 2**shift)))
        made.append(row)
        if isinstance(unit, StateSpaceNoise):
            vectors = _following(unit, i, row, vectors)
    return np.array(made)


def _earlier(
    unit: NoiseRecursion,
    i: int,
    d: int,
    made: list[list[int]],
    z: np.ndarray,
    vectors: list[list[Fraction]],
) -> Fraction:
    total = Fraction(0)
    if isinstance(unit, BandedNoise):
        weights = unit.bands[i if len(unit.bands) > 1 else 0]
        for lag in range(1, min(len(weights), i + 1)):
            total -= Fraction(weights[lag]) * made[i - lag][d]
    elif isinstance(unit, DenseNoise):
        for j in range(i):
            total += Fraction(unit.inverse[i, j]) * int(z[j, d])
    elif isinstance(unit, WindowNoise):
        window = unit.window[i if len(unit.window) > 1 else 0]
        for lag in range(1, min(unit.window_length, i + 1)):
            total += Fraction(window[lag]) * int(z[i - lag, d])
        for j in range(min(i - unit.window_length + 2, i)):
            gain = sum(
                map(math.prod, zip(_exact(unit.left[i]), _exact(unit.right[j]), strict=True))
            )
            total += gain * int(z[j, d])
    elif isinstance(unit, StateSpaceNoise) and vectors:
        outputs = unit.outputs[unit.phases[i]]
        total = sum(
            (Fraction(w) * v[d] for w, v in zip(outputs, vectors, strict=True)), Fraction(0)
        )
    return total


def _following(
    unit: StateSpaceNoise, i: int, row: list[int], vectors: list[list[Fraction]]
) -> list[list[Fraction]]:
    p = unit.phases[i]
    vectors = vectors or [[Fraction(0)] * len(row)] * unit.num_state_vectors
    return [
        [
            Fraction(unit.decays[p, s]) * before + Fraction(unit.feedbacks[p, s]) * number
            for before, number in zip(vectors[unit.sources[p, s]], row, strict=True)
        ]
        for s in range(unit.num_state_vectors)
    ]


def _all_rows(rows: IntegerRows, z: np.ndarray) -> np.ndarray:
    state, found = rows.initial_state(z.shape[1]), []
    for row_of_z in z:
        row, state = rows.next_row(state, row_of_z)
        found.append(row)
    return np.array(found)


def _z(num_rounds: int, size: int) -> np.ndarray:
    return np.array(
        [draws.integers(NoiseSource.PHILOX, _SEED, i, 0, size) for i in range(num_rounds)]
    )


@pytest.mark.short_cases(6)
@_EVERY_MECHANISM
def test_rows_are_those_of_exact_rational_arithmetic(factorization: Factorization) -> None:
    """Bit for bit: floats err by less than a thousandth of a step, so that few could differ."""
    rows = IntegerRows.of(factorization.noise_recursion())
    z = _z(64, 3)
    np.testing.assert_array_equal(_all_rows(rows, z), _rows_by_definition(rows, z))


@_EVERY_MECHANISM
def test_rows_are_those_of_real_arithmetic_but_for_their_rounding(
    factorization: Factorization,
) -> None:
    recursion = factorization.noise_recursion()
    rows = IntegerRows.of(recursion)
    z = _z(64, 50)
    exact = noise_rows.apply(recursion, z * draws.STEP)
    found = _all_rows(rows, z) * rows.steps[:, np.newaxis]
    assert np.max(np.abs(found - exact)) < 4.0 * np.max(np.abs(rows.steps))
    assert np.max(np.abs(rows.steps)) < 1e-6


@given(random_recursions.recursions())
@settings(deadline=None, max_examples=examples(200))
def test_no_row_exceeds_its_integers_where_z_is_at_most_twenty_standard_deviations(
    recursion: NoiseRecursion,
) -> None:
    """With the Z of that norm that makes each row the largest."""
    rows = IntegerRows.of(recursion)
    matrix = noise_rows.dense(rows.normalised)
    norms = np.linalg.norm(matrix, axis=1)
    # Column i is the worst for row i; Z is a normal number's worth along the row.
    worst = 20.0 * discrete_gaussian.STANDARD_DEVIATION * matrix.T / norms
    found = _all_rows(rows, np.rint(worst).astype(np.int64))
    own = np.diagonal(found)
    assert np.all(np.abs(own) < 2**31)
    assert np.all(np.abs(own) * 2.0**rows.shift <= rows.largest_row)
    # The finest shift of which this holds, but for one.
    assert np.max(np.abs(own)) > 2**29 or rows.shift == 1


def test_roundings_count_among_what_32_bits_hold() -> None:
    """Coarse steps of many rounds, all of which drive the last row."""
    inverse = np.eye(400)
    inverse[-1, :-1] = 1e3
    rows = IntegerRows.of(DenseNoise(inverse))
    last = np.abs(noise_rows.dense(rows.normalised)[-1])
    of_z = 20.0 * discrete_gaussian.STANDARD_DEVIATION * float(np.linalg.norm(last))
    # Half a step of a row and half of Z, in each round and with the sign of its weight.
    of_roundings = (2.0 ** (rows.shift - 1) + 0.5) * float(np.sum(last))
    assert of_roundings > 1e-5 * of_z
    assert of_z + of_roundings <= rows.largest_row < 2.0 ** (31 + rows.shift)


def test_a_matrix_that_is_nearly_singular_is_refused() -> None:
    with refuses("singular"):
        IntegerRows.of(DenseNoise(np.array([[1.0, 0.0], [1e9, 1.0]])))
    with refuses("diagonal"):
        IntegerRows.of(DenseNoise(np.array([[1.0, 0.0], [1.0, 0.0]])))


def test_states_are_values() -> None:
    rows = IntegerRows.of(tree_aggregation(9).noise_recursion())
    z = _z(9, 4)
    state = rows.initial_state(4)
    for row_of_z in z:
        before = state.history.copy(), row_of_z.copy()
        first, following = rows.next_row(state, row_of_z)
        second, _ = rows.next_row(state, row_of_z)
        np.testing.assert_array_equal(first, second)
        np.testing.assert_array_equal(state.history, before[0])
        np.testing.assert_array_equal(row_of_z, before[1])
        state = following
    with refuses("rounds"):
        rows.next_row(state, z[0])


@given(st.integers(0, 20_000), random_recursions.recursions())
@settings(deadline=None, max_examples=examples(20))
def test_pieces_of_coordinates_do_not_matter(size: int, recursion: NoiseRecursion) -> None:
    rows = IntegerRows.of(recursion)
    z = _z(recursion.num_rounds, size)
    whole = _all_rows(rows, z)
    ends = _all_rows(rows, z[:, -3:])
    np.testing.assert_array_equal(whole[:, -3:], ends)


def test_independent_noise_is_z_rounded_to_a_coarser_grid() -> None:
    rows = IntegerRows.of(independent_rows(3))
    z = _z(3, 1000)
    np.testing.assert_array_equal(_all_rows(rows, z), np.floor(z / 2.0**rows.shift + 0.5))
