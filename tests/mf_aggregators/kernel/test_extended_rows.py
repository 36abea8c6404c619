"""Rows of a run that was extended: those that were released, their steps, and what they cover."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from mf_aggregators.factorizations import Factorization, noise_rows, toeplitz, tree_aggregation
from mf_aggregators.kernel import discrete_gaussian, draws, noising_matrices
from mf_aggregators.kernel.draws import STEP, NoiseSource
from mf_aggregators.kernel.integer_rows import IntegerRows, Rounding
from mf_aggregators.kernel.noising_matrices import Blocks
from mf_aggregators.kernel.rows import DenseNoise, NoiseRecursion, independent_rows
from mf_aggregators.participation import MinSeparation
from tests.mf_aggregators import random_recursions, small_mechanisms
from tests.refusals import refuses

_ROUNDS, _WHOLE = 9, 30
_SEED = np.array([5, -7], np.int64)
_SIZES: dict[str, Any] = {"num_parameters": 10**6, "largest_cohort": 100}


def _goes_on(factorization: Factorization) -> bool:
    is_full = factorization.parameters.get("decoder") == "full"
    is_scaled = (
        factorization.mechanism == "toeplitz" and factorization.parameters["equal_column_norms"]
    )
    return bool(factorization.goes_on) and not is_full and not is_scaled


_EXTENDABLE = [
    *filter(_goes_on, small_mechanisms.factorizations(_ROUNDS)),
    toeplitz(_ROUNDS),
    toeplitz(_ROUNDS, coefficients="square_root"),
]
_EVERY = pytest.mark.parametrize(
    "factorization",
    _EXTENDABLE,
    ids=[f"{i}-{each.mechanism}" for i, each in enumerate(_EXTENDABLE)],
)


def _recursions(factorization: Factorization) -> tuple[NoiseRecursion, NoiseRecursion]:
    """Those of the plan and of the whole, in the scale of the plan."""
    sensitivity = factorization.sensitivity(MinSeparation(4)).value
    whole = factorization.extended(_WHOLE)
    first, second = (
        random_recursions.divided(each.noise_recursion(), sensitivity)
        for each in (factorization, whole)
    )
    return first, second


def _rows(
    rows: IntegerRows | NoiseRecursion, size: int, before: Any = None, change: int = 0
) -> np.ndarray:
    """All rows, of which the first ``change`` are made by the rows before."""
    num_rounds = rows.num_rounds if isinstance(rows, NoiseRecursion) else rows.recursion.num_rounds
    shape: Any = (size,) if isinstance(rows, NoiseRecursion) else size
    state, made = (before or rows).initial_state(shape), []
    for i in range(num_rounds):
        z: Any = draws.integers(NoiseSource.PHILOX, _SEED, i, 0, size)
        now = before if before is not None and i < change else rows
        if isinstance(now, NoiseRecursion):
            row, state = random_recursions.next_row(now, state, z)
        else:
            row, state = now.next_row(state, z)
        made.append(row)
    return np.array(made)


@_EVERY
def test_integers_and_steps_that_were_released_stay(factorization: Factorization) -> None:
    first, whole = _recursions(factorization)
    before, after = IntegerRows.of(first), IntegerRows.of(whole, first)
    np.testing.assert_array_equal(_rows(after, 500)[:_ROUNDS], _rows(before, 500))
    np.testing.assert_array_equal(after.steps[:_ROUNDS], before.steps)
    assert after.shift == before.shift


@_EVERY
def test_later_rows_are_those_of_the_whole_matrix(factorization: Factorization) -> None:
    first, whole = _recursions(factorization)
    rows = IntegerRows.of(whole, first)
    made = _rows(rows, 50) * rows.steps[:, np.newaxis]
    z = np.array([draws.integers(NoiseSource.PHILOX, _SEED, i, 0, 50) for i in range(_WHOLE)])
    np.testing.assert_allclose(made, noise_rows.apply(whole, z * STEP), rtol=0, atol=1e-6)


@_EVERY
def test_rows_go_on_from_a_state_of_any_round(factorization: Factorization) -> None:
    """In integers and in floats, as those of the whole matrix from its first row on."""
    first, whole = _recursions(factorization)
    pairs: list[tuple[Any, Any]] = [
        (IntegerRows.of(first), IntegerRows.of(whole, first)),
        (first, whole),
    ]
    for before, after in pairs:
        expected = _rows(after, 40)
        for change in range(_ROUNDS + 1):
            np.testing.assert_array_equal(_rows(after, 40, before, change), expected)


def test_a_state_of_a_matrix_that_is_not_extended_is_refused() -> None:
    short, long = (toeplitz(rounds).noise_recursion() for rounds in (4, 9))
    few = toeplitz(20, 3).noise_recursion()
    for recursion, other, rounds in ((short, long, 1), (few, long, 1), (long, few, 3)):
        state = other.initial_state((2,))
        for _ in range(rounds):
            _, state = random_recursions.next_row(other, state, np.ones(2))
        with refuses("another"):
            random_recursions.next_row(recursion, state, np.ones(2))
    # A ring that was gone round lacks its first rows.
    state = dataclasses.replace(short.initial_state((2,)), round_index=5)
    with refuses("another"):
        random_recursions.next_row(long, state, np.ones(2))


@_EVERY
@pytest.mark.parametrize("storage", ["state", "disk"])
def test_noise_stays_and_covers_what_is_stated(factorization: Factorization, storage: str) -> None:
    first, whole = _recursions(factorization)
    is_on_disk = storage == "disk"
    before = Rounding.of(IntegerRows.of(first), Blocks.of(first) if is_on_disk else None)
    after = Rounding.of(
        IntegerRows.of(whole, first),
        Blocks.of(whole, (_ROUNDS,)) if is_on_disk else None,
    )
    drawn = before.enlarged(1.5, **_SIZES)
    covered = after.covered(drawn, **_SIZES)
    # The bound of the module's docstring, in its own terms, for the least s and for one.
    rows = after.rows
    least = 1.0 / np.max(np.abs(whole.diagonal))
    for s in (least, 1.0, 1.7):
        moved = s * (1.0 / drawn + 1e3 * np.max(np.abs(rows.steps)))
        moved += after.operator_norm * (1.0 + 2.0 * after.float_error) * STEP * 1e3 * _WHOLE**0.5
        assert moved <= s / covered
    # It is no looser than it has to be, for the least s.
    s = least
    moved = s * (1.0 / drawn + 1e3 * np.max(np.abs(rows.steps)))
    moved += after.operator_norm * (1.0 + 2.0 * after.float_error) * STEP * 1e3 * _WHOLE**0.5
    assert covered * (1.0 + 1e-6) >= s / moved


@_EVERY
def test_covering_is_the_inverse_of_enlarging(factorization: Factorization) -> None:
    first, _ = _recursions(factorization)
    rounding = Rounding.of(IntegerRows.of(first))
    for stddev in (5e-4, 1.5, 20.0):
        found = rounding.covered(rounding.enlarged(stddev, **_SIZES), **_SIZES)
        assert found <= stddev
        assert found == pytest.approx(stddev, rel=1e-9)


def test_less_than_before_is_covered_by_more_rounds_of_independent_noise() -> None:
    first, whole = independent_rows(100), independent_rows(400)
    before = Rounding.of(IntegerRows.of(first))
    after = Rounding.of(IntegerRows.of(whole, first))
    drawn = before.enlarged(1.0, **_SIZES)
    share_before, share_after = 1.0 - 1.0 / drawn, 1.0 - after.covered(drawn, **_SIZES) / drawn
    # Roundings of rows count by the root of the rounds, and those of sums once.
    assert share_before < share_after < 2.0 * share_before


@pytest.mark.parametrize(("deviations", "holds"), [(9.0, False), (16.9, False), (17.1, True)])
def test_longer_rows_are_held_to_seventeen_standard_deviations(
    deviations: float, holds: bool
) -> None:
    """Twelve in the world that released a number, and five that a client moves it by."""
    first = np.array([[1.0]])
    shift = IntegerRows.of(DenseNoise(first)).shift
    norm = 2.0 ** (31 + shift) / (deviations * discrete_gaussian.STANDARD_DEVIATION)
    longer = DenseNoise(np.array([[1.0, 0.0], [(norm**2 - 1.0) ** 0.5, 1.0]]))
    if holds:
        rows = IntegerRows.of(longer, DenseNoise(first))
        assert rows.largest_row >= 17.0 * discrete_gaussian.STANDARD_DEVIATION * norm
    else:
        with refuses("2 rounds", "extended"):
            IntegerRows.of(longer, DenseNoise(first))


def test_integers_that_would_not_hold_longer_rows_are_refused() -> None:
    # The norm of a row of a tree grows without end.
    first = tree_aggregation(2).noise_recursion()
    longer = tree_aggregation(2**14).noise_recursion()
    assert np.max(noising_matrices.row_norms(longer.normalised)) > 2.0 * np.max(
        noising_matrices.row_norms(first.normalised)
    )
    with refuses("16384 rounds", "extended"):
        IntegerRows.of(longer, first)


@pytest.mark.short_cases(1)
@pytest.mark.parametrize("num_rounds", [4, 5, 15, 255, 256, 1023, 1024, 2047])
def test_trees_of_any_length_can_become_four_times_as_long(num_rounds: int) -> None:
    made = tree_aggregation(num_rounds)
    rows = IntegerRows.of(made.extended(4 * num_rounds).noise_recursion(), made.noise_recursion())
    # Seventeen standard deviations of a row, of which five are the client's.
    largest = (
        17.0
        * discrete_gaussian.STANDARD_DEVIATION
        * np.max(noising_matrices.row_norms(rows.normalised))
    )
    assert largest < 2.0 ** (31 + rows.shift)
