"""Streams of noise rows against the dense product C^-1 Z and the recursions' definitions."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators.factorizations import (
    BandedFactorization,
    DenseFactorization,
    IdentityFactorization,
    banded_inverse,
    blt,
    noise_rows,
    structured,
    toeplitz,
    tree_aggregation,
)
from mf_aggregators.kernel.rows import (
    BandedNoise,
    DenseNoise,
    NoiseRecursion,
    StateSpaceNoise,
    WindowNoise,
    banded_rows,
    fingerprint,
    independent_rows,
    toeplitz_rows,
)
from tests.examples import examples
from tests.mf_aggregators import random_recursions, small_mechanisms
from tests.refusals import refuses


def _by_definition(recursion: NoiseRecursion, z: np.ndarray) -> np.ndarray:
    """The rows as the classes' docstrings define them, with all earlier rows at hand."""
    rows = np.zeros_like(z)
    if isinstance(recursion, DenseNoise):
        return recursion.inverse @ z
    if isinstance(recursion, BandedNoise):
        matrix = np.zeros((len(z), len(z)))
        bands = np.broadcast_to(recursion.bands, (len(z), recursion.bands.shape[1]))
        for i in range(len(z)):
            for t in range(min(bands.shape[1], i + 1)):
                matrix[i, i - t] = bands[i, t]
        scales = np.ones(len(z)) if recursion.row_scales is None else recursion.row_scales
        return np.linalg.solve(matrix, z) * scales[:, np.newaxis]
    if isinstance(recursion, WindowNoise):
        length = recursion.window_length
        scales = np.ones(len(z)) if recursion.row_scales is None else recursion.row_scales
        windows = np.broadcast_to(recursion.window, (len(z), length))
        for i in range(len(z)):
            for t in range(min(length, i + 1)):
                rows[i] += windows[i, t] * z[i - t]
            for j in range(i - length + 2):
                rows[i] += recursion.left[i] @ recursion.right[j] * z[j]
        return rows * scales[:, np.newaxis]
    assert isinstance(recursion, StateSpaceNoise)
    state = np.zeros((recursion.num_state_vectors, z.shape[1]))
    for i, p in enumerate(recursion.phases):
        rows[i] = recursion.gains[p] * z[i] + recursion.outputs[p] @ state
        state = np.array(
            [
                recursion.decays[p, d] * state[recursion.sources[p, d]]
                + recursion.feedbacks[p, d] * rows[i]
                for d in range(recursion.num_state_vectors)
            ]
        )
    return rows


@given(random_recursions.recursions(), st.sampled_from([(), (3,), (2, 3), (0,)]))
@settings(max_examples=examples(200), deadline=None)
def test_rows_follow_their_definition(recursion: NoiseRecursion, shape: tuple[int, ...]) -> None:
    num_rounds = recursion.num_rounds
    z = np.random.default_rng(0).normal(size=(num_rounds, *shape))
    expected = _by_definition(recursion, z.reshape(num_rounds, int(np.prod(shape))))
    size = max(1.0, float(np.max(np.abs(expected), initial=0.0)))
    rows = noise_rows.apply(recursion, z)
    np.testing.assert_allclose(rows, expected.reshape(z.shape), atol=1e-10 * size)
    dense = noise_rows.dense(recursion)
    product = np.tensordot(dense, z, axes=1)
    np.testing.assert_allclose(product, rows, atol=1e-9 * size)
    assert not np.any(np.triu(dense, 1))


@given(random_recursions.recursions())
@settings(deadline=None)
def test_the_state_holds_what_is_said_and_no_row_comes_after_the_last(
    recursion: NoiseRecursion,
) -> None:
    state = recursion.initial_state((5,))
    kept = recursion.floats_per_parameter
    if isinstance(recursion, DenseNoise | WindowNoise):
        # NumPy is given its rows of Z and has to keep what it cannot draw again.
        kept += recursion.rows_of_z_per_round
    assert state.history.shape == (kept, 5)
    assert state.history.dtype == np.float64
    for i in range(recursion.num_rounds):
        assert state.round_index == i
        row, state = random_recursions.next_row(recursion, state, np.ones(5))
        assert row.shape == (5,)
        assert row.dtype == np.float64
        assert state.history.shape == (kept, 5)
    with refuses("rounds"):
        random_recursions.next_row(recursion, state, np.ones(5))


@given(random_recursions.recursions(), st.sampled_from([(), (3,), (2, 3), (0,)]))
@settings(max_examples=examples(200), deadline=None)
def test_states_are_values(recursion: NoiseRecursion, shape: tuple[int, ...]) -> None:
    """Every state of a run gives its row and its next state again, bit for bit."""
    z = np.random.default_rng(3).normal(size=(recursion.num_rounds, *shape))
    expected = noise_rows.apply(recursion, z)
    states = [recursion.initial_state(shape)]
    contents = [states[0].history.tobytes()]
    for i, row_of_z in enumerate(z):
        row, state = random_recursions.next_row(recursion, states[i], row_of_z)
        np.testing.assert_array_equal(row, expected[i])
        states.append(state)
        contents.append(state.history.tobytes())
        # A row is the caller's to change.
        row[...] = np.nan
    for i in reversed(range(recursion.num_rounds)):
        assert (states[i].round_index, states[i].history.tobytes()) == (i, contents[i])
        row, state = random_recursions.next_row(recursion, states[i], z[i])
        np.testing.assert_array_equal(row, expected[i])
        assert state.history.tobytes() == contents[i + 1]


def test_what_each_mechanism_keeps_between_rounds() -> None:
    base = BandedFactorization(np.tri(16, 16))
    expected = {
        # Two of them for an extension.
        tree_aggregation(16): (6, 1),
        toeplitz(16, 5, coefficients="square_root"): (4, 1),
        # Above half of the bands, rows of Z are drawn again instead.
        toeplitz(16, coefficients="square_root"): (0, 16),
        blt(16, 2): (2, 1),
        banded_inverse(16, 5): (0, 5),
        structured(base, 2, 3): (3, 3),
        IdentityFactorization(16): (0, 1),
        BandedFactorization(np.tri(16, 5)): (4, 1),
        DenseFactorization(np.tri(16)): (0, 16),
    }
    for factorization, costs in expected.items():
        recursion = factorization.noise_recursion()
        found = (recursion.floats_per_parameter, recursion.rows_of_z_per_round)
        assert found == costs, factorization


_ARRAYS: tuple[tuple[type[NoiseRecursion], dict[str, Any]], ...] = (
    (BandedNoise, {"num_rounds": 4, "bands": np.tri(4, 3)}),
    (
        BandedNoise,
        {"num_rounds": 4, "bands": np.ones((1, 6)), "row_scales": np.ones(4)},
    ),
    (DenseNoise, {"inverse": np.tri(4)}),
    (
        WindowNoise,
        {
            "num_rounds": 4,
            "window": np.ones((4, 2)),
            "left": np.full((4, 1), 0.5),
            "right": np.full((4, 1), 0.5),
            "row_scales": np.ones(4),
        },
    ),
    (
        WindowNoise,
        {
            "num_rounds": 4,
            "window": np.ones((1, 6)),
            "left": np.ones((4, 0)),
            "right": np.ones((4, 0)),
        },
    ),
    (
        StateSpaceNoise,
        {
            # The second set of weights and the third state vector are for no round.
            "phases": np.zeros(4, np.int64),
            "gains": np.ones(2),
            "outputs": np.full((2, 3), 0.5),
            "sources": np.zeros((2, 3), np.int64),
            "decays": np.full((2, 3), 0.5),
            "feedbacks": np.full((2, 3), 0.5),
        },
    ),
)
_FLOATS = [
    (kind, fields, name)
    for kind, fields in _ARRAYS
    for name, value in fields.items()
    if isinstance(value, np.ndarray) and value.dtype == np.float64 and value.size
]


@pytest.mark.parametrize(("kind", "fields", "name"), _FLOATS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_no_entry_is_other_than_finite_wherever_it_is(
    kind: type[NoiseRecursion], fields: dict[str, Any], name: str, value: float
) -> None:
    """Also where no row needs it: a graph multiplies it by zero."""
    for index in np.ndindex(fields[name].shape):
        array = fields[name].copy()
        array[index] = value
        with refuses(name, kind.__name__):
            kind(**{**fields, name: array})


@pytest.mark.parametrize(("kind", "fields"), _ARRAYS)
def test_arrays_stay_what_was_checked(kind: type[NoiseRecursion], fields: dict[str, Any]) -> None:
    """Whatever their owner does with those that it passed, or with a view of them."""
    passed = {
        name: value.copy() if isinstance(value, np.ndarray) else value
        for name, value in fields.items()
    }
    views = {
        name: value[:] if isinstance(value, np.ndarray) else value for name, value in passed.items()
    }
    for view in views.values():
        if isinstance(view, np.ndarray):
            view.setflags(write=False)
    recursion = kind(**views)
    rows = noise_rows.dense(recursion)
    for value in passed.values():
        if isinstance(value, np.ndarray):
            value[...] = 1
            value *= 0
    np.testing.assert_array_equal(noise_rows.dense(kind(**fields)), rows)
    again = dataclasses.replace(recursion)  # type: ignore[type-var]
    for made in (recursion, recursion.normalised, again):
        np.testing.assert_array_equal(noise_rows.dense(recursion), rows)
        for array in vars(made).values():
            if isinstance(array, np.ndarray):
                with refuses("read-only"):
                    array[...] = 0


@pytest.mark.parametrize("huge", [1e6, 1.7e308])
def test_entries_that_do_not_count_become_zero(huge: float) -> None:
    """Multiplied by a power of two, as graphs do it, the larger one would be infinite."""
    banded = banded_rows(np.where(np.tri(4, 3, dtype=bool), 1.0, huge))
    np.testing.assert_array_equal(banded.bands, np.tri(4, 3))
    long = toeplitz_rows(2, np.array([1.0, 0.5, huge]))
    np.testing.assert_array_equal(long.bands, [[1.0, 0.5, 0.0]])
    dense = DenseNoise(np.where(np.tri(4, dtype=bool), 1.0, huge))
    np.testing.assert_array_equal(noise_rows.dense(dense), np.tri(4))
    none = np.ones((2, 0))
    window = WindowNoise(2, np.array([[1.0, 0.5, huge]]), none, none)
    np.testing.assert_array_equal(window.window, [[1.0, 0.5, 0.0]])
    windows = WindowNoise(2, np.array([[1.0, huge, huge], [1.0, 0.5, huge]]), none, none)
    np.testing.assert_array_equal(windows.window, [[1.0, 0.0, 0.0], [1.0, 0.5, 0.0]])


@pytest.mark.parametrize(
    ("kind", "fields", "names"),
    [
        (BandedNoise, {"num_rounds": 4, "bands": np.ones(4)}, ["bands", "(4,)"]),
        (BandedNoise, {"num_rounds": 4, "bands": np.ones((4, 0))}, ["bands", "(4, 0)"]),
        (BandedNoise, {"num_rounds": 0, "bands": np.ones((1, 1))}, ["num_rounds"]),
        (
            BandedNoise,
            {"num_rounds": 4, "bands": np.ones((1, 2)), "row_scales": np.ones(1)},
            ["row_scales", "BandedNoise"],
        ),
        (DenseNoise, {"inverse": np.ones((4, 3))}, ["inverse", "(4, 4)"]),
        (BandedNoise, {"num_rounds": 2.5, "bands": np.ones((1, 1))}, ["num_rounds"]),
        (BandedNoise, {"num_rounds": 4, "bands": np.ones((3, 1))}, ["bands", "(4, any)"]),
        (WindowNoise, {**_ARRAYS[3][1], "right": np.ones((3, 1))}, ["right", "(4, 1)"]),
        (WindowNoise, {**_ARRAYS[3][1], "window": np.ones((3, 2))}, ["window", "(4, any)"]),
        (StateSpaceNoise, {**_ARRAYS[5][1], "phases": np.full(4, 2)}, ["phases", "2"]),
        (StateSpaceNoise, {**_ARRAYS[5][1], "phases": np.full(4, -1)}, ["phases", "0"]),
        (StateSpaceNoise, {**_ARRAYS[5][1], "phases": np.full(4, 0.5)}, ["phases", "integers"]),
        (StateSpaceNoise, {**_ARRAYS[5][1], "sources": np.full((2, 3), 3)}, ["sources", "3"]),
        (StateSpaceNoise, {**_ARRAYS[5][1], "sources": np.full((2, 3), -1)}, ["sources", "0"]),
    ],
)
def test_fields_that_are_no_recursion_are_refused(
    kind: type[NoiseRecursion], fields: dict[str, Any], names: list[str]
) -> None:
    with refuses(*names):
        kind(**fields)


def test_what_overflows_in_the_unit_recursion_is_refused() -> None:
    small = banded_rows(np.array([[1e-300, 0.0], [1.0, 1e10]]))
    with refuses("bands", "BandedNoise"):
        _ = small.normalised


# Fingerprints tell noising matrices and descriptions from one another.


@given(random_recursions.recursions(), st.data())
@settings(deadline=None)
def test_a_change_of_any_bit_changes_a_fingerprint(
    recursion: NoiseRecursion, data: st.DataObject
) -> None:
    fields: Any = recursion
    arrays = {each.name: getattr(recursion, each.name) for each in dataclasses.fields(fields)}
    arrays = {name: value.copy() for name, value in arrays.items() if np.size(value) > 1}
    same = dataclasses.replace(fields, **arrays)
    assert fingerprint(["a"], same) == fingerprint(["a"], recursion)
    if not arrays:
        return
    name = data.draw(st.sampled_from(sorted(arrays)))
    number, place = arrays[name], data.draw(st.integers(0, arrays[name].size - 1))
    before = number.flat[place]
    number.flat[place] = 0 if number.dtype == np.int64 else np.nextafter(before, np.inf)
    changed = dataclasses.replace(fields, **arrays)
    is_same = np.array_equal(getattr(changed, name), getattr(recursion, name))
    assert (fingerprint(["a"], changed) == fingerprint(["a"], recursion)) is is_same


def test_fingerprints_tell_classes_shapes_and_rounds_apart() -> None:
    numbers = np.array([1.0, 0.5])
    every = [
        banded_rows(numbers[np.newaxis]),
        banded_rows(numbers[:, np.newaxis]),
        DenseNoise(np.diag(numbers)),
        independent_rows(2),
        independent_rows(3),
        toeplitz_rows(2, numbers),
        toeplitz_rows(3, numbers),
        toeplitz_rows(2, numbers, np.ones(2)),
        toeplitz_rows(2, np.ones(2), numbers),
    ]
    found = {fingerprint([], each) for each in every}
    assert len(found) == len(every)
    assert {len(each) for each in found} == {32}


@pytest.mark.parametrize(
    "other",
    [1.0, {"a": 2.0}, {"b": 1.0}, [1.0], {"a": [1.0, None]}, {"a": 1.0 + 2.0**-52}, {"a": True}],
    ids=str,
)
def test_descriptions_differ(other: object) -> None:
    recursion = independent_rows(4)
    assert fingerprint({"a": 1.0}, recursion) != fingerprint(other, recursion)
    assert fingerprint({"a": 1.0}, recursion) == fingerprint({"a": 1.0}, independent_rows(4))


def test_every_mechanism_has_a_fingerprint_of_its_own() -> None:
    every = small_mechanisms.factorizations(9)
    found = {fingerprint([], each.noise_recursion()) for each in every}
    assert len(found) == len(every)
