"""Schemas against their definition: patterns by enumeration, sums over every pattern."""

import copy
import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators.kernel.schemas import Schema, Unit, pattern_sum, pattern_sum_adjoint
from mf_aggregators.participation import maximal_patterns
from tests.mf_aggregators import brute_force
from tests.refusals import refuses

_SCHEMAS = st.builds(
    Schema, st.none() | st.integers(1, 6), st.integers(1, 6), is_even=st.booleans()
)
_ALL = [
    Schema(most, separation, is_even)
    for most in (None, 1, 2, 3, 7)
    for separation in range(1, 7)
    for is_even in (False, True)
]


class _Integer(int):
    pass


@pytest.mark.parametrize(
    ("values", "name", "error"),
    [
        ((1, 0), "separation", ValueError),
        ((0, 1), "most", ValueError),
        ((1, None), "separation", TypeError),
        ((1, 1.0), "separation", TypeError),
        ((True, 1), "most", TypeError),
        ((1, np.int64(1)), "separation", TypeError),
        ((_Integer(1), 1), "most", TypeError),
        ((1, 1, 1), "is_even", TypeError),
        ((1, 1, None), "is_even", TypeError),
        ((1, 1, np.bool_(True)), "is_even", TypeError),
    ],
)
def test_numbers_are_exactly_of_their_types(values: Any, name: str, error: type) -> None:
    with refuses(name, "found", error=error):
        Schema(*values)


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
    assert sorted(maximal_patterns(schema, num_rounds)) == maximal
    if schema.is_even:
        assert list(schema.starts_in(num_rounds)) == [first for first, *_ in maximal]


@pytest.mark.parametrize("num_rounds", [1, 2, 5, 6])
def test_a_schema_allows_another_exactly_if_it_has_all_its_patterns(num_rounds: int) -> None:
    patterns = {each: set(brute_force.patterns(each, num_rounds)) for each in _ALL}
    for wider in _ALL:
        for narrower in _ALL:
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
        assert list(maximal_patterns(schema, 3)) == [(0,), (1,), (2,)]


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
    column, values = np.random.default_rng(num_rounds).integers(-9, 10, (2, num_rounds))
    expected = np.zeros(num_rounds, np.int64)
    for start in range(0, most * separation, separation):
        expected[start:] += column[: num_rounds - start]
    found = pattern_sum(column.astype(float), separation, most)
    np.testing.assert_array_equal(found, expected)
    adjoint = pattern_sum_adjoint(values.astype(float), separation, most)
    assert found @ values == column @ adjoint


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
    unit = Unit(3, 4, window=window, num_windows=num_windows)
    assert unit.schema_in(60) == schema
    assert Unit(3, 4, True, window=8, num_windows=1).schema_in(60) == Schema(2, 4, True)
