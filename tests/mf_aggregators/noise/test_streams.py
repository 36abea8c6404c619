"""Streams over nests: C^-1 Z of every mechanism, by values that can be used again."""

import collections
import copy
import os
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators import workloads
from mf_aggregators.factorizations import (
    Factorization,
    TreeAggregationFactorization,
    banded,
    identity,
)
from mf_aggregators.noise import rows_of_z, streams
from mf_aggregators.noise.recursions import NoiseRecursion
from mf_aggregators.noise.rows_of_z import NoiseSource
from mf_aggregators.noise.streams import NoiseStreamState
from tests.mf_aggregators import small_mechanisms
from tests.refusals import refuses

_NUM_ROUNDS = 9
_SEED = np.array([2**62 + 12345, -(2**61) - 999], np.int64)


class _Layer(NamedTuple):
    kernel: Any
    bias: Any


def _template() -> dict[str, Any]:
    """Keys out of order, empty and scalar leaves, every container, every dtype."""
    return {
        "layers": [_Layer(np.ones((2, 3), np.float32), np.ones(3, np.float64)), ()],
        "empty": np.zeros((0, 4), np.float32),
        "deep": collections.OrderedDict(z=np.float16(3.0), a=(np.zeros((), np.float64),)),
        "half": np.zeros((4,), np.float16),
        "number": 0.5,
    }


# The leaves in the order of sorted keys: deep.a, deep.z, empty, half, layers, number.
_SHAPES: tuple[tuple[int, ...], ...] = ((), (), (0, 4), (4,), (2, 3), (3,), ())
_DTYPES = ("float64", "float32", "float32", "float32", "float32", "float64", "float64")


def _leaves(row: dict[str, Any]) -> list[np.ndarray]:
    layer = row["layers"][0]
    deep = row["deep"]
    flat = [deep["a"][0], deep["z"], row["empty"], row["half"], layer.kernel, layer.bias]
    return [*flat, row["number"]]


_FACTORIZATIONS = small_mechanisms.factorizations(_NUM_ROUNDS)
_EVERY_MECHANISM = pytest.mark.parametrize("factorization", _FACTORIZATIONS, ids=str)


def _inverse(factorization: Factorization) -> np.ndarray:
    if isinstance(factorization, TreeAggregationFactorization):
        # Its stream draws one row of Z a round: a square matrix of its own.
        return factorization.noise_rows(np.eye(_NUM_ROUNDS))
    return np.linalg.inv(factorization.strategy_matrix())


def _z(source: NoiseSource, seed: np.ndarray) -> list[np.ndarray]:
    """Z by its definition, each leaf's rows as an array."""
    singles = sum(int(np.prod(shape)) for shape in _SHAPES if shape in ((0, 4), (4,), (2, 3))) + 1
    rows = []
    for i in range(_NUM_ROUNDS):
        single = rows_of_z.integers(source, seed, i, 0, singles) * rows_of_z.STEP
        double = rows_of_z.integers(source, seed, i, rows_of_z.TILE, 5) * rows_of_z.STEP
        rows.append(
            [
                double[0].reshape(()),
                single[0].reshape(()),
                single[:0].reshape(0, 4),
                single[1:5],
                single[5:11].reshape(2, 3),
                double[1:4],
                double[4].reshape(()),
            ]
        )
    return [np.array([row[position] for row in rows]) for position in range(len(_SHAPES))]


def _all_rows(recursion: NoiseRecursion, source: NoiseSource) -> list[list[np.ndarray]]:
    state = streams.initial_state(recursion, _template(), _SEED, source)
    rows = []
    for i in range(recursion.num_rounds):
        assert state.round_index == i
        row, state = streams.next_row(recursion, state)
        rows.append(_leaves(row))
    return rows


@_EVERY_MECHANISM
@pytest.mark.parametrize("source", NoiseSource)
def test_rows_are_those_of_the_dense_product(
    factorization: Factorization, source: NoiseSource
) -> None:
    rows = _all_rows(factorization.noise_recursion(), source)
    inverse = _inverse(factorization)
    for position, z in enumerate(_z(source, _SEED)):
        found = np.array([row[position] for row in rows])
        assert found.dtype == _DTYPES[position]
        assert found.shape == (_NUM_ROUNDS, *_SHAPES[position])
        expected = np.tensordot(inverse, z, axes=1)
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def _content(state: NoiseStreamState) -> tuple[Any, ...]:
    return (
        state.round_index,
        state.seed.tobytes(),
        [(history.round_index, history.history.tobytes()) for history in state.histories],
    )


@_EVERY_MECHANISM
def test_a_state_can_be_used_again(factorization: Factorization) -> None:
    """All states of a run are kept, and each then gives its row again, bit for bit."""
    recursion = factorization.noise_recursion()
    states = [streams.initial_state(recursion, _template(), _SEED)]
    contents, rows = [_content(states[0])], []
    for _ in range(_NUM_ROUNDS):
        row, state = streams.next_row(recursion, states[-1])
        rows.append(copy.deepcopy(row))
        states.append(state)
        contents.append(_content(state))
        # A row is the caller's to change.
        for leaf in _leaves(row):
            leaf[...] = np.nan
    for i in reversed(range(_NUM_ROUNDS)):
        assert _content(states[i]) == contents[i]
        row, state = streams.next_row(recursion, states[i])
        assert _content(state) == contents[i + 1]
        for leaf, expected in zip(_leaves(row), _leaves(rows[i]), strict=True):
            np.testing.assert_array_equal(leaf, expected)


@_EVERY_MECHANISM
@pytest.mark.parametrize("source", NoiseSource)
def test_the_iterator_gives_the_same_rows(
    factorization: Factorization, source: NoiseSource
) -> None:
    recursion = factorization.noise_recursion()
    expected = _all_rows(recursion, source)
    count = 0
    for row in streams.rows(recursion, _template(), _SEED, source):
        for leaf, other in zip(_leaves(row), expected[count], strict=True):
            np.testing.assert_array_equal(leaf, other)
            # A row is the caller's to change.
            leaf[...] = np.nan
        count += 1
    assert count == _NUM_ROUNDS


def test_rows_have_the_structure_of_the_template() -> None:
    recursion = identity(2).noise_recursion()
    template = _template()
    row, _ = streams.next_row(recursion, streams.initial_state(recursion, template, _SEED))
    assert list(row) == list(template)
    assert isinstance(row["layers"], list)
    assert isinstance(row["layers"][0], _Layer)
    assert row["layers"][1] == ()
    assert isinstance(row["deep"], collections.OrderedDict)
    assert list(row["deep"]) == ["z", "a"]
    assert isinstance(row["deep"]["a"], tuple)
    for leaf, shape, dtype in zip(_leaves(row), _SHAPES, _DTYPES, strict=True):
        assert isinstance(leaf, np.ndarray)
        assert (leaf.shape, leaf.dtype) == (shape, dtype)


_NESTS = st.recursive(
    st.sampled_from([np.zeros(3, np.float32), np.zeros((2, 1)), np.zeros((), np.float16)]),
    lambda nests: st.one_of(
        st.lists(nests, max_size=3),
        st.lists(nests, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=2), nests, max_size=3),
    ),
    max_leaves=8,
)


def _flattened(nest: Any) -> list[Any]:
    if isinstance(nest, dict):
        return [leaf for key in sorted(nest) for leaf in _flattened(nest[key])]
    if isinstance(nest, list | tuple):
        return [leaf for child in nest for leaf in _flattened(child)]
    return [nest]


@given(_NESTS)
@settings(deadline=None)
def test_nests_differ_only_in_their_structure_from_their_list_of_leaves(nest: Any) -> None:
    recursion = banded(workloads.prefix_sum(3), 2).noise_recursion()
    of_nest = streams.rows(recursion, nest, _SEED)
    of_list = streams.rows(recursion, _flattened(nest), _SEED)
    for row, leaves in zip(of_nest, of_list, strict=True):
        for found, expected in zip(_flattened(row), leaves, strict=True):
            np.testing.assert_array_equal(found, expected)


def test_order_of_insertion_does_not_count() -> None:
    recursion = identity(1).noise_recursion()
    (first,) = streams.rows(recursion, {"a": 0.0, "b": 0.0}, _SEED)
    (second,) = streams.rows(recursion, {"b": 0.0, "a": 0.0}, _SEED)
    assert first == second
    assert first["a"] != first["b"]


class _Bfloat16:
    """A dtype of another library, as ``tf.bfloat16`` and that of ml_dtypes name it."""

    name = "bfloat16"


class _Specification:
    """A shape and a dtype without values."""

    shape = (2, 2)
    dtype = _Bfloat16()


def test_specifications_of_other_libraries_will_do() -> None:
    recursion = identity(1).noise_recursion()
    (row,) = streams.rows(recursion, [_Specification()], _SEED)
    expected = rows_of_z.integers(NoiseSource.CHACHA20, _SEED, 0, 0, 4) * rows_of_z.STEP
    np.testing.assert_allclose(row[0], expected.reshape(2, 2), atol=1e-6)
    assert row[0].dtype == np.float32


@pytest.mark.parametrize(
    "leaf",
    [
        np.zeros(3, np.int32),
        np.zeros(2, bool),
        np.zeros((), np.complex64),
        np.zeros(3, np.longdouble),
        7,
        True,
        None,
        "weights",
    ],
    ids=repr,
)
def test_what_is_not_floating_point_is_refused(leaf: Any) -> None:
    recursion = identity(2).noise_recursion()
    for start in (streams.initial_state, streams.rows):
        with pytest.raises(TypeError):
            start(recursion, {"a": np.zeros(3), "b": [leaf]}, _SEED)


@_EVERY_MECHANISM
@pytest.mark.parametrize("template", [np.zeros(2), np.zeros((0,)), {}], ids=repr)
def test_rows_past_the_last_round_are_refused(factorization: Factorization, template: Any) -> None:
    recursion = factorization.noise_recursion()
    state = streams.initial_state(recursion, template, _SEED)
    for _ in range(_NUM_ROUNDS):
        row, state = streams.next_row(recursion, state)
        if not isinstance(template, dict):
            assert row.shape == template.shape
    with refuses("9 rounds", "10"):
        streams.next_row(recursion, state)


def test_the_seed_is_copied_and_checked() -> None:
    recursion = identity(2).noise_recursion()
    seed = _SEED.copy()
    state = streams.initial_state(recursion, np.zeros(3), seed)
    stream = streams.rows(recursion, np.zeros(3), seed)
    seed[:] = 0
    expected = rows_of_z.integers(NoiseSource.CHACHA20, _SEED, 0, 0, 3) * rows_of_z.STEP
    np.testing.assert_allclose(streams.next_row(recursion, state)[0], expected, atol=1e-7)
    np.testing.assert_allclose(next(stream), expected, atol=1e-7)
    floats: Any = np.zeros(2)
    for start in (streams.initial_state, streams.rows):
        with refuses("int64"):
            start(recursion, np.zeros(3), floats)


def test_sources_and_seeds_give_streams_of_their_own() -> None:
    recursion = identity(1).noise_recursion()
    other = np.frombuffer(os.urandom(16), np.int64)
    entries = [
        next(streams.rows(recursion, np.zeros(100), seed, source))
        for seed in (_SEED, other)
        for source in NoiseSource
    ]
    assert len(np.unique(entries)) == 400


def test_the_state_holds_what_the_recursion_keeps() -> None:
    recursion = banded(workloads.prefix_sum(_NUM_ROUNDS), 4).noise_recursion()
    state = streams.initial_state(recursion, _template(), _SEED)
    kept = recursion.floats_per_parameter
    assert [history.history.shape for history in state.histories] == [(kept, 11), (kept, 5)]
    assert [history.history.dtype for history in state.histories] == ["int32", "int32"]
