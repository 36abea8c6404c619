"""Schemas by enumeration; sensitivities against all patterns, signs and vector contributions."""

import copy
import dataclasses
import itertools
import pickle
from fractions import Fraction
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mf_aggregators as mfa
from mf_aggregators.audit.statistics import _maximal_patterns
from mf_aggregators.factorizations import tree_aggregation
from mf_aggregators.factorizations.noise_rows import dense, dense_rows
from mf_aggregators.kernel import claim, sensitivity
from mf_aggregators.kernel.claim import Assumption, Basis, Claim, Pattern
from mf_aggregators.kernel.rows import (
    NoiseRecursion,
    ScaledNoise,
    StateSpaceNoise,
    Strategy,
    WindowNoise,
    strategy_of,
)
from mf_aggregators.kernel.sensitivity import Schema, Unit, pattern_sum
from tests.examples import examples
from tests.mf_aggregators import brute_force, random_recursions, small_mechanisms, toeplitz_cases
from tests.mf_aggregators.kernel import test_rows
from tests.mf_aggregators.kernel.random_claims import gaussian_epsilon, largest_change
from tests.mf_aggregators.kernel.test_trees import tree_matrix
from tests.mf_aggregators.random_recursions import banded_rows, toeplitz_rows
from tests.refusals import refuses

_RELATIVE = 1e-12
_SINGLE = Schema(1, 1)
_SEEDS = st.integers(0, 2**32 - 1)
_KINDS = ["any", "positive", "falling", "negative falling", "whole", "nearly falling", "late fall"]


def _schemas(num_rounds: int) -> st.SearchStrategy[Schema]:
    """Any schema, also of participations that do not fit."""
    numbers = st.integers(1, num_rounds + 1)
    return st.builds(Schema, st.none() | numbers, numbers, is_even=st.booleans())


@st.composite
def _matrices(draw: st.DrawFn) -> tuple[np.ndarray, Schema]:
    num_rounds = draw(st.integers(1, 9))
    generator = np.random.default_rng(draw(_SEEDS))
    matrix = generator.normal(size=(num_rounds, num_rounds))
    if draw(st.booleans()):
        matrix = np.abs(matrix)
    if draw(st.booleans()):
        matrix[generator.random(matrix.shape) < 0.5] = 0.0
    shape = draw(st.sampled_from(["lower", "full", "symmetric", "tall"]))
    bands = draw(st.integers(1, num_rounds))
    if shape in ("lower", "symmetric"):
        matrix = np.tril(matrix) - np.tril(matrix, -bands)
    if shape == "symmetric":
        matrix = matrix + matrix.T
    if shape == "tall":
        matrix = np.concatenate([matrix, generator.normal(size=(3, num_rounds))])
    return matrix, draw(_schemas(num_rounds))


def _coefficients(kind: str, count: int, seed: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    series = generator.normal(size=count)
    falling = np.sort(np.abs(series))[::-1]
    start = int(generator.integers(count + 1))
    late_fall = np.concatenate([np.abs(generator.normal(size=start)), falling[start:]])
    kinds = {
        "any": series,
        "positive": np.abs(series),
        "falling": falling,
        "negative falling": -falling,
        "whole": np.round(2.0 * series),
        "nearly falling": falling * (1.0 + 0.1 * series),
        "late fall": late_fall,
    }
    return kinds[kind]


@st.composite
def _series(draw: st.DrawFn, largest: int) -> tuple[str, np.ndarray, int, Schema]:
    num_rounds = draw(st.integers(1, largest))
    kind, count = draw(st.sampled_from(_KINDS)), draw(st.integers(1, num_rounds))
    return kind, _coefficients(kind, count, draw(_SEEDS)), num_rounds, draw(_schemas(num_rounds))


def _of_matrix(matrix: np.ndarray, schema: Schema) -> sensitivity.Sensitivity:
    return sensitivity.of_strategy(Strategy(matrix, matrix.shape[1], is_dense=True), schema)


def _of_bands(bands: np.ndarray, schema: Schema) -> sensitivity.Sensitivity:
    return sensitivity.of_strategy(Strategy(bands, len(bands)), schema)


def _of_coefficients(
    series: np.ndarray, num_rounds: int, schema: Schema
) -> sensitivity.Sensitivity:
    return sensitivity.of_strategy(Strategy(series[np.newaxis], num_rounds), schema)


def _bands_of(matrix: np.ndarray, num_bands: int) -> np.ndarray:
    bands = np.zeros((len(matrix), num_bands))
    for t in range(num_bands):
        bands[t:, t] = np.diagonal(matrix, -t)
    return bands


def _agrees(found: sensitivity.Sensitivity, truth: float) -> None:
    """Never below the truth, and equal to it if the value is said to be exact."""
    assert found.value >= truth * (1 - _RELATIVE)
    if found.is_exact:
        assert found.value == pytest.approx(truth, rel=1e-9, abs=1e-12)


# Dense matrices.


@given(_matrices())
@settings(max_examples=examples(250), deadline=None)
def test_never_below_and_if_exact_equal_to_enumeration(problem: tuple[np.ndarray, Schema]) -> None:
    matrix, schema = problem
    found = _of_matrix(matrix, schema)
    _agrees(found, brute_force.scalar_sensitivity(matrix, schema))


@given(_matrices(), st.integers(1, 40), st.integers(1, 5))
@settings(max_examples=examples(150), deadline=None)
def test_a_bound_is_that_of_the_definition_whatever_is_computed_at_a_time(
    problem: tuple[np.ndarray, Schema], entries: int, columns: int
) -> None:
    """Rows of |X| over the patterns that hold them; never above the sum of column norms."""
    matrix, schema = problem
    with (
        mock.patch.object(sensitivity, "_ENTRIES_AT_A_TIME", entries),
        mock.patch.object(sensitivity, "_COLUMNS_AT_A_TIME", columns),
    ):
        found = _of_matrix(matrix, schema)
    if found.is_exact:
        # Products of columns of other sizes are rounded otherwise.
        assert found == pytest.approx(_of_matrix(matrix, schema), rel=1e-14)
        return
    magnitudes, norms = np.abs(matrix.T @ matrix), np.linalg.norm(matrix, axis=0)
    allowed = [list(each) for each in brute_force.patterns(schema, matrix.shape[1])]
    if schema.is_even:
        squared = max(float(np.sum(magnitudes[np.ix_(each, each)])) for each in allowed)
        assert found.value**2 == pytest.approx(squared, rel=1e-9)
        return
    through = [
        max(float(np.sum(magnitudes[i, each])) for each in allowed if i in each)
        for i in range(matrix.shape[1])
    ]
    by_rows = max(sum(through[i] for i in each) for each in allowed)
    by_norms = max(float(np.sum(norms[each])) for each in allowed)
    assert found.value == pytest.approx(np.sqrt(by_rows), rel=1e-9)
    assert found.value <= by_norms * (1 + 1e-9)


@given(st.integers(1, 10), st.integers(1, 10), _SEEDS, st.data())
@settings(max_examples=examples(150), deadline=None)
def test_banded_matrices_are_exact_under_their_separation(
    num_rounds: int, num_bands: int, seed: int, data: st.DataObject
) -> None:
    matrix = np.tril(np.random.default_rng(seed).normal(size=(num_rounds, num_rounds)))
    matrix -= np.tril(matrix, -num_bands)
    separation = data.draw(st.integers(num_bands, num_bands + 3))
    schema = Schema(data.draw(st.none() | st.integers(1, 5)), separation)
    found = _of_matrix(matrix, schema)
    assert found.is_exact
    truth = brute_force.scalar_sensitivity(matrix, schema)
    assert found.value == pytest.approx(truth, rel=1e-9)


def test_the_theorems_are_named() -> None:
    falling, frustrated = (
        toeplitz_cases.dense(np.array([3.0, 2.0, 1.0]), 6),
        np.tril(1.0 - 3.0 * np.eye(6)),
    )
    for matrix, schema, theorem in (
        (falling, Schema(1, 3), "largest column norm"),
        (falling, Schema(None, 6), "largest column norm"),
        (falling, Schema(2, 2, is_even=True), "enumeration"),
        (falling, Schema(None, 3), "Alg. 5"),
        (falling, Schema(None, 2), "Thm 3"),
        (frustrated, Schema(None, 1), "Thm 3"),
        (0.0 * falling, Schema(None, 2), "Alg. 5"),
    ):
        assert theorem in _of_matrix(matrix, schema).theorem
    series = np.array([3.0, 2.0, 1.0])
    for schema, theorem in (
        (_SINGLE, "largest column norm"),
        (Schema(None, 3), "Alg. 5"),
        (Schema(None, 2), "Kalinin"),
    ):
        assert theorem in _of_coefficients(series, 6, schema).theorem


def test_frustrated_signs_are_reported_as_a_bound() -> None:
    # No signs make all three products positive, so the sum of magnitudes is not reached.
    gram = np.array([[1.0, -0.4, -0.4], [-0.4, 1.0, -0.4], [-0.4, -0.4, 1.0]])
    matrix, schema = np.linalg.cholesky(gram).T, Schema(3, 1, is_even=True)
    found = _of_matrix(matrix, schema)
    assert not found.is_exact
    assert found.value**2 == pytest.approx(5.4)
    assert found.value > brute_force.scalar_sensitivity(matrix, schema)
    with mock.patch.object(sensitivity, "_MOST_WITH_SIGNS", 2):
        # Signs would be found, but too many were to be tried.
        reached = _of_matrix(np.array([[1.0, -1.0, 1.0]]), schema)
    assert reached.value == pytest.approx(3.0)
    assert not reached.is_exact
    assert _of_matrix(np.array([[1.0, -1.0, 1.0]]), schema).is_exact


def test_a_sensitivity_is_a_float_and_survives_pickling() -> None:
    found = _of_matrix(np.eye(3), _SINGLE)
    assert isinstance(found, float)
    assert 2 * found == 2.0
    copy = pickle.loads(pickle.dumps(found))
    assert (copy.value, copy.is_exact, copy.theorem) == (1.0, True, found.theorem)
    assert repr(copy) == f"Sensitivity(1.0, is_exact=True, theorem={found.theorem!r})"


@pytest.mark.parametrize("scale", [1e-300, 1e-170, 1e170, 1e300])
@pytest.mark.parametrize("separation", [1, 7])
def test_scales_that_overflow_when_squared(scale: float, separation: int) -> None:
    matrix = np.tril(np.random.default_rng(3).normal(size=(7, 7)))
    participation = mfa.participation.MinSeparation(separation)
    found, plain = (
        mfa.sensitivity.compute(each, participation) for each in (matrix * scale, matrix)
    )
    assert found.value / scale == pytest.approx(plain.value, rel=_RELATIVE)


@pytest.mark.parametrize(
    "array",
    [np.ones(()), np.ones(0), np.ones((0, 2)), np.ones((2, 2, 2)), "12", [[np.nan]], [[-np.inf]]],
    ids=str,
)
def test_what_is_no_matrix_is_refused(array: Any) -> None:
    with refuses("strategy matrix"):
        mfa.sensitivity.compute(array, mfa.participation.SingleParticipation())


# Bands.


@given(st.integers(1, 40), st.data())
@settings(max_examples=examples(250), deadline=None)
def test_bands_give_what_the_dense_matrix_gives(num_rounds: int, data: st.DataObject) -> None:
    num_bands = data.draw(st.integers(1, num_rounds))
    generator = np.random.default_rng(data.draw(_SEEDS))
    matrix = generator.normal(size=(num_rounds, num_rounds))
    if data.draw(st.booleans()):
        matrix = np.abs(matrix)
    matrix = np.tril(np.triu(matrix, 1 - data.draw(st.integers(1, num_bands))))
    schema = data.draw(_schemas(num_rounds))
    with mock.patch.object(sensitivity, "_ENTRIES_AT_A_TIME", data.draw(st.integers(1, 400))):
        found = _of_bands(_bands_of(matrix, num_bands), schema)
    dense = _of_matrix(matrix, schema)
    assert found.value == pytest.approx(dense.value, rel=_RELATIVE)
    assert (found.is_exact, found.theorem) == (dense.is_exact, dense.theorem)


def test_bands_beyond_the_matrix_do_not_count() -> None:
    bands = np.array([[1.0, 9.0], [1.0, 2.0]])
    assert _of_bands(bands, _SINGLE).value == pytest.approx(np.sqrt(5.0))
    empty = np.array([[0.0, 9.0], [0.0, 0.0]])
    assert _of_bands(empty, _SINGLE).value == 0.0


@pytest.mark.parametrize(
    "schema",
    [
        Schema(20, 1000),
        pytest.param(Schema(50, 10), marks=pytest.mark.long),
        pytest.param(Schema(None, 1), marks=pytest.mark.long),
        pytest.param(Schema(12_500, 8, is_even=True), marks=pytest.mark.long),
        _SINGLE,
    ],
    ids=str,
)
def test_a_hundred_thousand_rounds_need_no_dense_matrix(schema: Schema) -> None:
    bands = np.where(np.tri(100_000, 32, dtype=bool), 0.9 ** np.arange(32), 0.0)
    found = _of_bands(bands, schema)
    # The worst pattern of a falling Toeplitz matrix is that of the coefficients.
    exact = _of_coefficients(0.9 ** np.arange(32), 100_000, schema)
    assert exact.is_exact
    # Sums of 100,000 terms, one after another.
    assert exact * (1 - 1e-11) <= found <= 1.2 * exact


# Trees.


def _lower_factor(gram: np.ndarray) -> np.ndarray:
    """The lower-triangular C with C^T C = X."""
    return np.asarray(np.linalg.cholesky(gram[::-1, ::-1])[::-1, ::-1].T)


@given(st.integers(2, 40), st.integers(0, 9), st.integers(1, 12), st.none() | st.integers(2, 6))
@settings(max_examples=examples(150), deadline=None)
def test_trees_are_found_by_their_products_of_columns(
    num_leaves: int, unreleased: int, separation: int, most: int | None
) -> None:
    num_rounds, schema = max(2, num_leaves - unreleased), Schema(most, separation)
    strategy = tree_matrix(num_leaves, num_rounds)
    expected = sensitivity.of_tree(num_leaves, num_rounds, schema)
    for matrix in (strategy, _lower_factor(strategy.T @ strategy)):
        found = mfa.sensitivity._of_matrix(matrix, schema)
        assert found.is_exact
        assert found.value == pytest.approx(expected.value, rel=_RELATIVE)
        if num_rounds <= 9:
            _agrees(found, brute_force.scalar_sensitivity(matrix, schema))
    if schema.most_in(num_rounds) > 1:
        even = Schema(most or 99, separation, is_even=True)
        found, expected = (
            mfa.sensitivity._of_matrix(strategy, even),
            sensitivity.of_tree(num_leaves, num_rounds, even),
        )
        assert found.value == pytest.approx(expected.value, rel=_RELATIVE)
        assert expected.theorem == found.theorem
    single = sensitivity.of_tree(num_leaves, num_rounds, _SINGLE)
    assert single.value == pytest.approx(mfa.sensitivity._of_matrix(strategy, _SINGLE).value)


@given(st.integers(2, 10), _SEEDS, st.integers(1, 3), st.floats(1e-13, 1e-3))
@settings(max_examples=examples(100), deadline=None)
def test_what_is_nearly_a_tree_is_no_better_than_it_is(
    num_rounds: int, seed: int, separation: int, size: float
) -> None:
    strategy, schema = tree_matrix(num_rounds, num_rounds), Schema(None, separation)
    generator = np.random.default_rng(seed)
    strategy[:, generator.integers(num_rounds)] *= 1.0 + size * generator.choice([-1.0, 1.0])
    strategy = np.concatenate([strategy, size * generator.normal(size=(1, num_rounds))])
    found = mfa.sensitivity._of_matrix(strategy, schema)
    _agrees(found, brute_force.scalar_sensitivity(strategy, schema))


# Toeplitz coefficients.


@given(_series(largest=9))
@settings(max_examples=examples(250), deadline=None)
def test_coefficients_are_never_below_enumeration(
    problem: tuple[str, np.ndarray, int, Schema],
) -> None:
    kind, series, num_rounds, schema = problem
    truth = brute_force.scalar_sensitivity(toeplitz_cases.dense(series, num_rounds), schema)
    found = sensitivity.toeplitz_bound(series, num_rounds, schema)
    _agrees(found, truth)
    both = _of_coefficients(series, num_rounds, schema)
    _agrees(both, truth)
    dense = _of_matrix(toeplitz_cases.dense(series, num_rounds), schema)
    least = found if found.is_exact else min(found, dense)
    assert both.value == pytest.approx(least.value, rel=_RELATIVE)
    # Fewer bands than the separation are in this as well.
    late = series[schema.separation_in(num_rounds) :]
    falls = np.all(series >= 0.0) and np.all(np.diff(late) <= 0.0)
    if kind in ("falling", "negative falling") or falls or not len(late):
        assert found.is_exact


@given(st.integers(1, 60), st.data())
@settings(max_examples=examples(150), deadline=None)
def test_no_pattern_beats_the_first_one_if_coefficients_fall_from_the_separation_on(
    num_rounds: int, data: st.DataObject
) -> None:
    generator = np.random.default_rng(data.draw(_SEEDS))
    schema = data.draw(_schemas(num_rounds))
    most, separation = schema.most_in(num_rounds), schema.separation
    series = np.sort(generator.random(num_rounds) ** 4)[::-1]
    series[:separation] = generator.random(len(series[:separation]))
    strategy = toeplitz_cases.dense(series, num_rounds)
    found = _of_coefficients(series, num_rounds, schema)
    first = np.sum(strategy[:, ::separation][:, :most], axis=1)
    assert found.value == pytest.approx(float(np.linalg.norm(first)), rel=_RELATIVE)
    for _ in range(5):
        gaps = separation + generator.geometric(0.7, size=most) - 1
        pattern = generator.integers(num_rounds) + np.cumsum(gaps) - gaps[0]
        change = np.linalg.norm(np.sum(strategy[:, pattern[pattern < num_rounds]], axis=1))
        assert change <= found.value * (1 + _RELATIVE)


@given(_series(largest=16))
@settings(max_examples=examples(100), deadline=None)
def test_a_toeplitz_bound_is_the_sum_of_its_definition(
    problem: tuple[str, np.ndarray, int, Schema],
) -> None:
    _, series, num_rounds, schema = problem
    found = sensitivity.toeplitz_bound(series, num_rounds, schema)
    if found.is_exact:
        return
    separation, most = schema.separation, schema.most_in(num_rounds)
    sizes = np.abs(toeplitz_cases.dense(series, num_rounds)[:, 0])
    envelope = [max(sizes[t:]) if t >= separation else sizes[t] for t in range(num_rounds)]
    squared = 0.0
    for i in range(most):
        for j in range(i, most):
            terms = range(j * separation, num_rounds)
            factor = sizes if i == j else envelope
            squared += (1 + (i < j)) * sum(
                sizes[s - j * separation] * factor[s - i * separation] for s in terms
            )
    assert found.value == pytest.approx(np.sqrt(squared), rel=_RELATIVE)
    assert found.value >= np.sqrt(squared)


@pytest.mark.parametrize(("bump", "is_exact"), [(1e-15, True), (1e-9, False)])
def test_only_rounding_is_forgiven(bump: float, is_exact: bool) -> None:
    for series in (
        np.array([1.0, 0.5, 0.25, 0.25 + bump, 0.125]),
        np.array([1.0, 0.5, 0.25, -bump, 0.0]),
        np.array([-1.0, -0.5, -0.25, bump, 0.0]),
    ):
        found = sensitivity.toeplitz_bound(series, 5, Schema(None, 1))
        assert found.is_exact is is_exact
        truth = brute_force.scalar_sensitivity(toeplitz_cases.dense(series, 5), Schema(None, 1))
        assert found.value >= truth * (1 - 1e-15)


def test_zeros_at_the_end_are_no_bands() -> None:
    found = sensitivity.toeplitz_bound(np.zeros(4), 6, Schema(None, 2))
    assert (found.value, found.is_exact) == (0.0, True)
    found = _of_coefficients(np.array([1.0, -2.0, 0.0, 0.0]), 6, Schema(None, 2))
    assert found.value == pytest.approx(np.sqrt(15.0))
    assert found.is_exact


def test_a_million_rounds_lose_no_digits_to_the_sums() -> None:
    """The window of two participations is a difference of long sums."""
    series = np.concatenate([[1.0], np.full(10**6 - 1, 1e-3)])
    found = _of_coefficients(series, 10**6, Schema(2, 1))
    # Entries 1, 1 + c, and 2 c from there.
    squared = 1.0 + 1.001**2 + 4e-6 * (10**6 - 2)
    assert found.value == pytest.approx(float(np.sqrt(squared)), rel=1e-9)


@pytest.mark.parametrize("scale", [0.1, 10.0])
def test_columns_of_one_scale_are_bounded_by_their_coefficients(scale: float) -> None:
    series, schema = 0.8 ** np.arange(12), Schema(None, 2)
    scales = np.full(12, scale), np.ones(12)
    found = sensitivity.of_strategy(Strategy(series[np.newaxis], 12, scales=scales), schema)
    truth = brute_force.scalar_sensitivity(scale * toeplitz_cases.dense(series, 12), schema)
    assert found.value == pytest.approx(truth, rel=_RELATIVE)


@given(st.integers(1, 8), st.integers(1, 8), st.booleans(), st.booleans(), st.data())
@settings(max_examples=examples(100), deadline=None)
def test_scaled_rows_and_columns_have_no_smaller_sensitivity(
    num_rounds: int, bands: int, has_transforms: bool, is_long: bool, data: st.DataObject
) -> None:
    """By enumeration, with sums and with transforms, from dense matrices and for many rounds."""
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    series = generator.normal(size=min(bands, num_rounds))
    rows, columns = np.exp(generator.uniform(-1.0, 1.0, (2, num_rounds)))
    schema = data.draw(_schemas(num_rounds))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sensitivity, "_MOST_ROUNDS_OF_SUMS", 0 if has_transforms else 4096)
        patch.setattr(sensitivity, "_MOST_ENTRIES", 0 if is_long else 10**6)
        scaled = Strategy(series[np.newaxis], num_rounds, scales=(rows, columns))
        found = sensitivity.of_strategy(scaled, schema)
    matrix = rows[:, np.newaxis] * toeplitz_cases.dense(series, num_rounds) * columns
    truth = brute_force.scalar_sensitivity(matrix, schema)
    assert found.value >= truth * (1.0 - 1e-14)
    if found.is_exact:
        assert found.value == pytest.approx(truth, rel=1e-11)
    if schema.most_in(num_rounds) == 1 or len(series) <= schema.separation_in(num_rounds):
        assert found.is_exact


def test_errors_of_transforms_are_added_and_are_not_exact() -> None:
    rows, series = 10.0 ** -(np.arange(6000.0) ** 0.4), 0.5 ** np.arange(3)
    for columns in (1.0 / rows, np.ones(6000)):
        scaled = Strategy(series[np.newaxis], 6000, scales=(rows, columns))
        found = sensitivity.of_strategy(scaled, Schema(1, 1))
        squared = np.correlate(np.square(rows), np.square(series), "full")[2:]
        assert found.value >= np.max(columns * np.sqrt(squared))
        assert not found.is_exact


def test_columns_of_one_norm_are_bounded_by_their_bands_for_many_rounds() -> None:
    series, schema, num_rounds = 0.9 ** np.arange(9), Schema(40, 4), 900
    norms = np.sqrt(np.cumsum(np.square(np.append(series, np.zeros(num_rounds - 9)))))[::-1]
    scaled = Strategy(series[np.newaxis], num_rounds, scales=(np.ones(num_rounds), 1.0 / norms))
    assert num_rounds**2 * 40 > sensitivity._LARGEST_DENSE_BOUND
    found = sensitivity.of_strategy(scaled, schema)
    bands = _bands_of(toeplitz_cases.dense(series, num_rounds) / norms, 9)
    assert found.value == pytest.approx(_of_bands(bands, schema).value, rel=_RELATIVE)


# From rows.


@given(random_recursions.recursions(), st.integers(1, 9), st.booleans(), st.data())
@settings(max_examples=examples(150), deadline=None)
def test_rows_never_have_less_than_their_exact_matrix(
    rows: NoiseRecursion, first: int, has_many_bands: bool, data: st.DataObject
) -> None:
    """For the rows of a run that stopped early too, and if bands would take too much memory."""
    first = min(first, rows.num_rounds)
    schema = data.draw(_schemas(first))
    most = 0 if has_many_bands else sensitivity._MOST_ENTRIES
    with mock.patch.object(sensitivity, "_MOST_ENTRIES", most):
        found = sensitivity.of_rows(rows, first, schema)
    exact = test_rows.exact_strategy(rows)[:first, :first].astype(np.float64)
    _agrees(found, brute_force.scalar_sensitivity(exact, schema))
    # No matrix has more than the sum of its column norms, and errors are small beside it.
    norms = np.linalg.norm(exact, axis=0)
    assert found.value <= schema.largest_sum(norms) * (1.0 + 1e-9)


@given(st.sampled_from([8, 24]), st.integers(0, 18), st.integers(1, 24), st.data())
@settings(max_examples=examples(100), deadline=None)
def test_rows_have_the_sensitivity_of_their_factorization(
    num_rounds: int, index: int, separation: int, data: st.DataObject
) -> None:
    """Where that is exact, of all kinds."""
    factorization = small_mechanisms.factorizations(num_rounds)[index]
    most = data.draw(st.none() | st.integers(1, num_rounds))
    separation = min(separation, num_rounds)
    timers = mfa.participation.MinSeparation(separation, most)
    for schema in (timers, mfa.participation.FixedEpochOrder(most or num_rounds, separation)):
        own = factorization.sensitivity(schema)
        rows = factorization.noise_recursion()
        found = sensitivity.of_rows(rows, num_rounds, schema.as_schema())
        if own.is_exact:
            # Roundings of an inverse of an inverse are charged.
            is_inverted = strategy_of(rows, num_rounds).is_dense
            assert found.value == pytest.approx(own.value, rel=1e-11 if is_inverted else 1e-12)
            assert found.is_exact
        assert found.value <= own.value * (1.0 + 1e-11)


def test_errors_of_columns_count_once_for_each_participation() -> None:
    rows = banded_rows(np.tri(6, 1))
    found = dataclasses.replace(strategy_of(rows, 6), error=0.25)
    with mock.patch.object(sensitivity, "strategy_of", return_value=found):
        for most in (1, 2, 3):
            value = sensitivity.of_rows(rows, 6, Schema(most, 2))
            assert value.value == pytest.approx(np.sqrt(most), rel=1e-15)
            assert value.is_exact
            assert value.theorem
            of_pattern = sensitivity.of_pattern(rows, 6, tuple(range(most)))
            for each in (value, of_pattern):
                assert each.error == pytest.approx(0.25 * most, rel=1e-13)


@pytest.mark.parametrize(("sign", "terms"), [(1.0, 0.0), (-1.0, 40 * 3 / 4)])
def test_roundings_of_the_value_are_added(sign: float, terms: float) -> None:
    """Of all entries of a pattern's columns, and more if they may cancel."""
    bands = np.exp(-np.arange(40.0) / 9.0) * np.where(np.arange(40) % 2, sign, 1.0)
    for num_rounds, most_terms in ((1000, 120), (100, 100)):
        rows, schema = banded_rows(np.tri(num_rounds, 40) * bands), Schema(3, 30)
        found = sensitivity.of_rows(rows, num_rounds, schema)
        assert found.value == _of_bands(rows.bands, schema).value
        added = (most_terms + 4 + terms) * 2.0**-52
        assert found.error == pytest.approx(added * found.value, rel=1e-9, abs=0.0)
    of_pattern = sensitivity.of_pattern(rows, 100, (0, 30, 60))
    assert of_pattern.error == pytest.approx(added * of_pattern.value, rel=1e-9, abs=0.0)


@pytest.mark.parametrize("bands", [1, 1000, 100_000])
def test_sums_of_many_terms_are_not_below_the_exact_value(bands: int) -> None:
    rows = toeplitz_rows(100_000, np.full(bands, 0.1))
    found = sensitivity.of_rows(rows, 100_000, _SINGLE)
    exact = bands * Fraction(0.1) ** 2
    total = Fraction(found.value) + Fraction(found.error)
    assert exact <= total**2 <= exact * (1 + Fraction(1, 10**10))


@given(st.integers(2, 200), st.integers(0, 60), st.integers(0, 25), st.data())
@settings(max_examples=examples(60), deadline=None)
def test_rows_of_trees_have_no_less_than_their_matrix(
    num_leaves: int, unreleased: int, extension: int, data: st.DataObject
) -> None:
    """Whole, leading and extended runs of both decoders."""
    decoder = data.draw(st.sampled_from(["online", "full"]))
    tree = mfa.factorizations.tree_aggregation(num_leaves, decoder)
    rows: NoiseRecursion = tree.noise_recursion()
    if decoder == "online" and extension:
        single = mfa.participation.SingleParticipation()
        longer = tree.extended(num_leaves + min(extension, 2 * num_leaves), participation=single)
        rows = longer.noise_recursion()
    assert isinstance(rows, StateSpaceNoise)
    first = max(1, num_leaves - unreleased)
    schema = data.draw(_schemas(first))
    strategy = test_rows.dense(strategy_of(rows, first))
    dense = _of_matrix(strategy, schema)
    rounds = tuple(sorted(data.draw(st.sets(st.integers(0, first - 1), min_size=1))))
    of_one = np.linalg.norm(np.sum(strategy[:, rounds], axis=1))
    found = sensitivity.of_rows(rows, first, schema)
    one = sensitivity.of_pattern(rows, first, rounds)
    is_whole = decoder == "full" and first == num_leaves
    of_tree = sensitivity.of_tree(num_leaves if decoder == "full" else first, first, schema)
    assert one.value == pytest.approx(of_one, rel=1e-11)
    if not is_whole:
        # The tree is a bound, and C may have another.
        assert found.value == pytest.approx(min(of_tree.value, dense.value), rel=1e-11)
        assert found.is_exact <= dense.is_exact
        assert max(found.error, one.error) <= first * 1e-12
        return
    for each, most in ((found, schema.most_in(first)), (one, len(rounds))):
        known = sensitivity._tree_of_rows(rows, first)
        assert known is not None
        error = most * known.error * known.num_leaves.bit_length() ** 0.5
        assert each.error == pytest.approx(error, rel=1e-9, abs=0.0)
        assert error <= most * 1e-12
    assert one.value == pytest.approx(
        sensitivity._sum_of_pattern(num_leaves, rounds) ** 0.5, rel=1e-14
    )
    assert found.is_exact == of_tree.is_exact
    assert of_tree.theorem == found.theorem
    assert found.value == pytest.approx(of_tree.value, rel=1e-14)
    assert found.value <= dense.value * (1.0 + 1e-11)


def test_short_runs_of_a_tree_need_what_they_release() -> None:
    """Up to 4,096 rounds C counts, and the tree's bound alone for more."""
    single = Schema(1, 1)
    for released, is_computed in ((1, True), (5, True), (4096, True), (4097, False)):
        rows = mfa.factorizations.tree_aggregation(max(released, 8)).noise_recursion()
        found = sensitivity.of_rows(rows, released, single)
        assert found.is_exact == is_computed
        ratio = found.value / released.bit_length() ** 0.5
        assert (ratio < 1.0 - 1e-9) == (is_computed and released > 1)


def test_one_other_number_is_no_long_tree() -> None:
    factorization = mfa.factorizations.tree_aggregation(100_000)
    rows, schema = factorization.noise_recursion(), Schema(6, 15_000)
    found = sensitivity.of_rows(rows, 100_000, schema)
    assert found.value == pytest.approx(
        sensitivity.of_tree(100_000, 100_000, schema).value, rel=1e-12
    )
    assert sensitivity.of_rows(rows, 8193, schema).value == pytest.approx(14**0.5, rel=1e-12)
    outputs = rows.outputs.copy()
    outputs[3, 1] += 1e-9
    for other in (dataclasses.replace(rows, outputs=outputs), dense_rows(np.eye(2))):
        with refuses("rounds"):
            sensitivity.of_rows(other, 100_000, schema)
    with refuses("100000"):
        sensitivity.of_rows(rows, 100_001, schema)


def test_long_rows_reach_their_theorems_in_a_second() -> None:
    schema = Schema(6, 15_000)
    rounds = 100_000
    decays, none = np.array([[0.99, 0.5]]), np.ones((2, rounds, 0))
    state = StateSpaceNoise(
        np.zeros(rounds, np.int64),
        np.ones(1),
        np.array([[-0.4, -0.2]]),
        np.arange(2)[np.newaxis],
        decays,
        np.ones((1, 2)),
    )
    for rows, theorem in (
        (state, "Kalinin and Lampert"),
        (WindowNoise(rounds, np.array([[1.0, -0.5, -0.49]]), *none), "Kalinin and Lampert"),
        (banded_rows(np.tri(rounds, 8) / np.arange(1.0, 9.0)), "Alg. 5"),
    ):
        found = sensitivity.of_rows(rows, rounds, schema)
        assert found.is_exact
        assert theorem in found.theorem


_DELTA = 1e-5
_SCHEMAS = st.builds(
    Schema, st.none() | st.integers(1, 6), st.integers(1, 6), is_even=st.booleans()
)


def _matrix(seed: int, num_rounds: int, bands: int, *, signed: bool) -> np.ndarray:
    rng = np.random.default_rng(seed)
    matrix = rng.uniform(-1.0 if signed else 0.0, 1.0, (num_rounds, num_rounds))
    np.fill_diagonal(matrix, rng.uniform(0.5, 2.0, num_rounds))
    return np.triu(np.tril(matrix), 1 - bands)


def _rows(matrix: np.ndarray) -> NoiseRecursion:
    return dense_rows(np.linalg.inv(matrix))


@settings(max_examples=examples(500), deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_rounds=st.integers(1, 6),
    bands=st.integers(1, 6),
    signed=st.booleans(),
    unit=st.builds(
        Unit, _SCHEMAS, st.integers(1, 3), *2 * [st.one_of(st.none(), st.integers(1, 6))]
    ),
)
def test_no_person_moves_more_than_is_proved(
    seed: int, num_rounds: int, bands: int, signed: bool, unit: Unit
) -> None:
    """In windows and in whole runs; several clients move their number of times as much."""
    # All ways of several clients to take part are many.
    num_rounds = num_rounds if unit.num_clients == 1 else min(num_rounds, 4)
    matrix = _matrix(seed, num_rounds, bands, signed=signed)
    found = sensitivity.of_rows(_rows(matrix), num_rounds, unit)
    one = sensitivity.of_rows(_rows(matrix), num_rounds, dataclasses.replace(unit, num_clients=1))
    assert found.error == unit.num_clients * one.error > 0.0
    _agrees(found, largest_change(matrix, unit))


@settings(max_examples=examples(150), deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    signed=st.booleans(),
    rounds=st.lists(st.integers(0, 4), min_size=1, max_size=7).map(sorted),
)
def test_rounds_of_a_person_count_once_for_each_client(
    seed: int, signed: bool, rounds: list[int]
) -> None:
    matrix = _matrix(seed, 5, 5, signed=signed)
    truth = largest_change(matrix, Pattern(tuple(rounds)))
    found = sensitivity.of_pattern(_rows(matrix), 5, tuple(rounds))
    assert found.value >= truth * (1.0 - 1e-12)
    if not signed:
        # All products of columns are positive.
        assert found.value == pytest.approx(truth, rel=1e-10)


def test_clients_of_a_person_count_in_nodes_of_trees() -> None:
    tree = tree_aggregation(8, "full").noise_recursion()
    found = sensitivity.of_pattern(tree, 8, (0, 0, 1))
    # Two clients and one in leaves, and three in each node above.
    assert found.value**2 == pytest.approx(4 + 1 + 3 * 9)


def test_windows_do_not_compose_like_independent_runs() -> None:
    """The root of summed squares is below the truth: windows share rows of C x."""
    matrix = np.array([[1.0, 0.0], [1.0, 0.1]])
    joint = sensitivity.of_rows(_rows(matrix), 2, Unit(Schema(1, 1), window=1))
    assert joint.value == pytest.approx(np.linalg.norm(matrix.sum(axis=1)))
    assert joint.value > 1.04 * np.linalg.norm(matrix)


def test_windows_are_exact_only_if_no_pattern_crosses_them() -> None:
    rows = toeplitz_rows(60, np.array([1.0, 0.5]))
    for most, window, is_exact in ((3, 12, False), (3, 60, True), (1, 12, True)):
        unit = Unit(Schema(most, 4), window=window, num_windows=1)
        found = sensitivity.of_rows(rows, 60, unit)
        assert found.value == sensitivity.of_rows(rows, 60, unit.schema_in(60)).value
        assert found.is_exact is is_exact


def test_a_claim_of_a_unit_is_proved_and_says_who_is_protected() -> None:
    rows = toeplitz_rows(8, np.array([1.0, 0.5]))
    unit = Unit(Schema(None, 2), num_clients=2, window=4)
    made = Claim(rows, unit, 30.0, _DELTA)
    found = claim.check(made)
    expected = gaussian_epsilon(found.sensitivity.value / 30.0, _DELTA)
    assert found.epsilon == pytest.approx(expected, rel=1e-8)
    assert found.noise_digest == made.noise_digest
    assert Assumption.PEOPLE in found.assumptions
    assert "each person with 2 devices, whose client id changes every 4 rounds" in str(found)
    plan = claim.check(Claim(rows, Schema(None, 2), 30.0, _DELTA))
    assert claim.check(plan.without_draws(taking_part=unit)) == found
    alone = claim.check(plan.without_draws(taking_part=Unit(Schema(None, 2))))
    assert (alone.epsilon, alone.assumptions) == (plan.epsilon, plan.assumptions)
    with pytest.raises(ValueError, match="found Unit"):
        _ = found.schema


def test_one_client_is_in_a_round_once() -> None:
    rows = toeplitz_rows(8, np.array([1.0, 0.5]))
    with pytest.raises(ValueError, match="several clients"):
        Claim(rows, Pattern((1, 1)), 2.0, _DELTA)
    with pytest.raises(ValueError, match="must not decrease"):
        Pattern((2, 1))
    found = claim.check(Claim(rows, Pattern((1, 1)), 9.0, _DELTA, basis=Basis.PEOPLE))
    assert found.sensitivity.value == pytest.approx(2.0 * np.sqrt(1.25))
    assert Assumption.PEOPLE in found.assumptions


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ({"num_clients": 0}, ValueError),
        ({"window": 0}, ValueError),
        ({"num_windows": 0}, ValueError),
        ({"num_clients": 1.5}, ValueError),
        ({"schema": (2, 1)}, TypeError),
    ],
)
def test_other_units_are_refused(values: dict[str, object], kind: type[Exception]) -> None:
    with pytest.raises(kind):
        Unit(**{"schema": Schema(2, 1), **values})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "who"),
    [
        ({}, "each client"),
        ({"num_clients": 3}, "each person with 3 clients"),
        ({"window": 5, "num_windows": 1}, "each client in a window of 5 rounds"),
        ({"window": 5}, "each device, whose client id changes every 5 rounds"),
        (
            {"window": 5, "num_windows": 2, "num_clients": 3},
            "each person with 3 devices, whose client id changes every 5 rounds, in 2 windows",
        ),
    ],
)
def test_units_say_who_is_protected(values: dict[str, Any], who: str) -> None:
    unit = Unit(Schema(2, 3), **values)
    assert unit.who == who
    assert str(unit).endswith(" in a window") == ("window" in values)


# Schemas


_ALL = [
    Schema(most, separation, is_even)
    for most in (None, 1, 2, 3, 7)
    for separation in range(1, 7)
    for is_even in (False, True)
]


@pytest.mark.parametrize(
    ("values", "name", "error"),
    [
        ((1, 0), "separation", ValueError),
        ((0, 1), "most", ValueError),
        ((1, None), "separation", ValueError),
        ((1, 1.0), "separation", ValueError),
        ((True, 1), "most", ValueError),
        ((1, 1, 1), "is_even", TypeError),
        ((1, 1, None), "is_even", TypeError),
        ((1, 1, np.bool_(True)), "is_even", TypeError),
    ],
)
def test_other_numbers_are_refused(values: Any, name: str, error: type) -> None:
    with refuses(name, "found", error=error):
        Schema(*values)


def test_integers_become_those_of_python() -> None:
    found = Schema(np.int64(2), np.array(3))  # type: ignore[arg-type]
    assert found == Schema(2, 3)
    assert {type(found.most), type(found.separation)} == {int}


def test_a_schema_is_frozen_and_takes_no_subclasses() -> None:
    schema = Schema(2, 3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        schema.most = 3  # type: ignore[misc]
    with refuses("Schema", "subclasses", error=TypeError):
        type("Once", (Schema,), {})
    assert pickle.loads(pickle.dumps(schema)) == copy.deepcopy(schema) == Schema(2, 3, False)
    assert len({schema, Schema(2, 3), Schema(None, 3), Schema(2, 3, True)}) == 3


@given(_SCHEMAS, st.integers(1, 8))
@settings(deadline=None)
def test_counts_and_distances_are_those_of_the_patterns(schema: Schema, num_rounds: int) -> None:
    patterns = list(brute_force.patterns(schema, num_rounds))
    gaps = [gap for each in patterns for gap in np.diff(each).tolist()]
    assert schema.most_in(num_rounds) == max(map(len, patterns))
    assert schema.separation_in(num_rounds) == min(gaps, default=num_rounds)


@given(_SCHEMAS, st.integers(1, 8))
@settings(deadline=None)
def test_maximal_patterns_are_those_of_the_definition(schema: Schema, num_rounds: int) -> None:
    every = [frozenset(each) for each in brute_force.patterns(schema, num_rounds)]
    maximal = sorted(
        tuple(sorted(each)) for each in every if not any(each < other for other in every)
    )
    assert sorted(_maximal_patterns(schema, num_rounds)) == maximal
    if schema.is_even:
        assert list(schema.starts_in(num_rounds)) == [first for first, *_ in maximal]


@pytest.mark.parametrize("num_rounds", [1, 2, 5, 6])
def test_a_schema_allows_another_exactly_if_it_has_all_its_patterns(num_rounds: int) -> None:
    every: list[Any] = [mfa.participation.MinSeparation(s.separation, s.most) for s in _ALL]
    every += [mfa.participation.FixedEpochOrder(s.most or 9, s.separation) for s in _ALL]
    patterns = {each: set(brute_force.patterns(each.as_schema(), num_rounds)) for each in every}
    for wider, narrower in itertools.product(patterns, patterns):
        found = wider.allows(narrower, num_rounds)
        assert found == (patterns[wider] >= patterns[narrower]), (wider, narrower)


@given(_SCHEMAS, st.integers(1, 7), st.data())
@settings(deadline=None)
def test_what_was_observed_is_allowed_if_its_patterns_are(
    schema: Schema, num_rounds: int, data: st.DataObject
) -> None:
    pattern = data.draw(st.sets(st.integers(0, num_rounds - 1), min_size=1).map(sorted))
    gaps = np.diff(pattern).tolist()
    found = schema.allows_separations(
        len(pattern), min(gaps, default=None), max(gaps, default=None)
    )
    assert found == (tuple(pattern) in set(brute_force.patterns(schema, num_rounds)))


@given(_SCHEMAS, st.lists(st.integers(0, 9), min_size=1, max_size=9))
@settings(deadline=None)
def test_the_largest_sum_is_that_of_all_patterns(schema: Schema, weights: list[int]) -> None:
    truth = max(
        sum(weights[i] for i in each) for each in brute_force.patterns(schema, len(weights))
    )
    assert schema.largest_sum(np.array(weights, float)) == truth


def test_separations_far_beyond_the_rounds_take_no_memory() -> None:
    for schema in (Schema(None, 10**15), Schema(4, 10**15), Schema(4, 10**15, is_even=True)):
        assert schema.largest_sum(np.array([1.0, 3.0, 2.0])) == 3.0
        assert list(_maximal_patterns(schema, 3)) == [(0,), (1,), (2,)]


def test_a_schema_says_what_it_allows() -> None:
    assert str(Schema(1, 1)) == "at most one participation"
    assert str(Schema(None, 1)) == "participations at least 1 round apart"
    assert str(Schema(2, 3)) == "at most 2 participations at least 3 rounds apart"
    assert str(Schema(1, 3)) == "at most 1 participations at least 3 rounds apart"
    assert str(Schema(2, 1)) == "at most 2 participations at least 1 round apart"
    assert (
        str(Schema(2, 3, True)) == "at most 2 participations, adjacent ones exactly 3 rounds apart"
    )


@given(st.integers(1, 40), st.integers(1, 9), st.data())
@settings(max_examples=50)
def test_sums_of_patterns_are_those_of_their_columns(
    num_rounds: int, separation: int, data: st.DataObject
) -> None:
    most = data.draw(st.integers(1, -(-num_rounds // separation)))
    column = np.random.default_rng(num_rounds).integers(-9, 10, num_rounds)
    expected = np.zeros(num_rounds, np.int64)
    for start in range(0, most * separation, separation):
        expected[start:] += column[: num_rounds - start]
    found = pattern_sum(column.astype(float), separation, most)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("window", "num_windows", "schema"),
    [
        (None, None, Schema(3, 4)),
        (60, 1, Schema(3, 4)),
        (12, 1, Schema(3, 4)),
        (8, 1, Schema(2, 4)),
        (12, 2, Schema(6, 1)),
        (12, None, Schema(15, 1)),
        (12, 9, Schema(15, 1)),
        (50, None, Schema(6, 1)),
    ],
)
def test_a_schema_of_all_rounds_allows_what_a_unit_does(
    window: int | None, num_windows: int | None, schema: Schema
) -> None:
    unit = Unit(Schema(3, 4), window=window, num_windows=num_windows)
    assert unit.schema_in(60) == schema
    assert Unit(Schema(3, 4, True), window=8, num_windows=1).schema_in(60) == Schema(2, 4, True)


@pytest.mark.parametrize(
    ("signs", "is_exact"),
    # X[0, 1], X[1, 2], X[0, 2] of four rounds, the last of which shares no row with others.
    [((1, 1, 1), True), ((-1, -1, 1), True), ((1, 1, -1), False), ((-1, -1, -1), False)],
)
def test_a_bound_is_reached_if_signs_of_contributions_fit(
    signs: tuple[int, ...], is_exact: bool
) -> None:
    gram = np.eye(4)
    gram[[0, 1, 0], [1, 2, 2]] = gram[[1, 2, 2], [0, 1, 0]] = np.array(signs) / 4.0
    # C of C^T C = X is the Cholesky factor from below.
    strategy = np.linalg.cholesky(gram[::-1, ::-1])[::-1, ::-1].T
    found = sensitivity.of_rows(dense_rows(np.linalg.inv(strategy)), 4, Schema(4, 1, True))
    changes = [np.linalg.norm(strategy @ each) for each in itertools.product((-1, 1), repeat=4)]
    assert found.value == pytest.approx(np.sqrt(4.0 + 6.0 / 4.0))
    assert found.is_exact is is_exact is bool(max(changes) > found.value - 1e-9)


@pytest.mark.parametrize("scale", [2.0**-40, 2.0**40])
def test_sensitivities_do_not_depend_on_the_unit_of_c(scale: float) -> None:
    rising = np.array([1.0, 0.25, 0.5, 0.5 + 1e-6])
    for coefficients in (rising, np.sort(rising)[::-1]):
        one, other = (
            sensitivity.toeplitz_bound(factor * coefficients, 8, Schema(3, 2))
            for factor in (1.0, scale)
        )
        assert (other.value, other.is_exact) == (scale * one.value, one.is_exact)


def test_a_scaled_matrix_has_bands_only_if_no_coefficient_is_beyond() -> None:
    schema, scales = Schema(None, 2), np.linspace(1.0, 2.0, 6)
    for coefficients, is_exact in (([1.0, 0.5], True), ([1.0, 0.5, 0.0, 0.5], False)):
        rows = ScaledNoise(toeplitz_rows(6, np.array(coefficients)), np.ones(6), 1.0 / scales)
        found = sensitivity.of_rows(rows, 6, schema)
        matrix = np.linalg.inv(dense(rows))
        assert found.is_exact is is_exact
        truth = brute_force.scalar_sensitivity(matrix, schema)
        assert truth * (1.0 - 1e-12) <= found.value <= truth * (1.0 + 1e-12 if is_exact else 1.2)


def test_edges_of_patterns_and_of_what_is_known() -> None:
    assert Schema(2, 2, True).starts_in(10) == range(8)
    assert Schema(2, 3, True).allows_separations(1, None, None)
    rows = banded_rows(np.ones((3, 1)))
    assert not sensitivity.of_pattern(rows, 3, (0, 2)).is_exact
    assert sensitivity.Sensitivity(1.0, is_exact=True, theorem="").error == 0.0
    for rounds in ((), (0, 3)):
        with refuses("3"):
            sensitivity.of_pattern(rows, 3, rounds)
