"""Rows of noise: transitions and blocks against definitions, their norms, and their arrays."""

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

from mf_aggregators.factorizations import (
    Factorization,
    banded_inverse,
    identity,
    noise_rows,
    toeplitz,
)
from mf_aggregators.factorizations.noise_rows import dense_rows
from mf_aggregators.kernel import rows as kernel_rows
from mf_aggregators.kernel.numbers import NotProved
from mf_aggregators.kernel.rows import (
    BandedNoise,
    Blocks,
    NoiseRecursion,
    ScaledNoise,
    StateSpaceNoise,
    Strategy,
    WindowNoise,
    strategy_of,
)
from mf_aggregators.noise.places import NoiseCost
from tests.examples import examples
from tests.mf_aggregators import random_recursions
from tests.mf_aggregators.random_recursions import banded_rows, toeplitz_rows
from tests.mf_aggregators.small_mechanisms import blt
from tests.refusals import refuses

_NUM_ROUNDS = 300
# Several of the largest blocks, of both sizes.
_LONG_RECURSIONS = random_recursions.recursions(_NUM_ROUNDS)


@given(random_recursions.recursions(), st.sampled_from([(), (3,), (2, 3), (0,)]))
@settings(max_examples=examples(200), deadline=None)
def test_rows_follow_their_definition(recursion: NoiseRecursion, shape: tuple[int, ...]) -> None:
    num_rounds = recursion.num_rounds
    z = np.random.default_rng(0).normal(size=(num_rounds, *shape))
    expected, _ = random_recursions.by_definition(
        recursion, z.reshape(num_rounds, int(np.prod(shape)))
    )
    size = max(1.0, float(np.max(np.abs(expected), initial=0.0)))
    rows = noise_rows.apply(recursion, z)
    np.testing.assert_allclose(rows, expected.reshape(z.shape), atol=1e-10 * size)
    dense = noise_rows.dense(recursion)
    product = np.tensordot(dense, z, axes=1)
    np.testing.assert_allclose(product, rows, atol=1e-9 * size)
    assert not np.any(np.triu(dense, 1))


_ARRAYS: tuple[tuple[type[NoiseRecursion], dict[str, Any]], ...] = (
    (BandedNoise, {"num_rounds": 4, "bands": np.tri(4, 3)}),
    (BandedNoise, {"num_rounds": 4, "bands": np.ones((1, 6))}),
    (
        WindowNoise,
        {
            "num_rounds": 4,
            "window": np.ones((4, 2)),
            "left": np.full((4, 1), 0.5),
            "right": np.full((4, 1), 0.5),
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
    again = dataclasses.replace(recursion)
    sent = pickle.loads(pickle.dumps(recursion))
    np.testing.assert_array_equal(noise_rows.dense(sent), rows)
    for made in (recursion, recursion.normalised, again, sent, copy.deepcopy(recursion)):
        np.testing.assert_array_equal(noise_rows.dense(recursion), rows)
        for array in vars(made).values():
            if isinstance(array, np.ndarray):
                with refuses("read-only"):
                    array[...] = 0
                with refuses("WRITEABLE"):
                    array.setflags(write=True)


@pytest.mark.parametrize("huge", [1e6, 1.7e308])
def test_entries_that_do_not_count_become_zero(huge: float) -> None:
    """Multiplied by a power of two, as graphs do it, the larger one would be infinite."""
    banded = banded_rows(np.where(np.tri(4, 3, dtype=bool), 1.0, huge))
    np.testing.assert_array_equal(banded.bands, np.tri(4, 3))
    long = toeplitz_rows(2, np.array([1.0, 0.5, huge]))
    np.testing.assert_array_equal(long.bands, [[1.0, 0.5, 0.0]])
    dense = dense_rows(np.where(np.tri(4, dtype=bool), 1.0, huge))
    np.testing.assert_array_equal(noise_rows.dense(dense), np.tri(4))
    none = np.ones((2, 0))
    window = WindowNoise(2, np.array([[1.0, 0.5, huge]]), none, none)
    np.testing.assert_array_equal(window.window, [[1.0, 0.5, 0.0]])
    windows = WindowNoise(2, np.array([[1.0, huge, huge], [1.0, 0.5, huge]]), none, none)
    np.testing.assert_array_equal(windows.window, [[1.0, 0.0, 0.0], [1.0, 0.5, 0.0]])


def test_a_state_space_without_state_is_independent_noise() -> None:
    none = np.ones((2, 0))
    sources = np.zeros((2, 0), np.int64)
    rows = StateSpaceNoise(np.arange(3) % 2, np.array([1.0, 2.0]), none, sources, none, none)
    np.testing.assert_array_equal(noise_rows.dense(rows), np.diag([1.0, 2.0, 1.0]))


@pytest.mark.parametrize(
    ("kind", "fields", "names"),
    [
        (BandedNoise, {"num_rounds": 4, "bands": np.ones(4)}, ["bands", "(4,)"]),
        (BandedNoise, {"num_rounds": 4, "bands": np.ones((4, 0))}, ["bands", "(4, 0)"]),
        (BandedNoise, {"num_rounds": 0, "bands": np.ones((1, 1))}, ["num_rounds"]),
        (BandedNoise, {"num_rounds": 2.5, "bands": np.ones((1, 1))}, ["num_rounds"]),
        (BandedNoise, {"num_rounds": 4, "bands": np.ones((3, 1))}, ["bands", "(4, any)"]),
        (WindowNoise, {**_ARRAYS[2][1], "right": np.ones((3, 1))}, ["right", "(4, 1)"]),
        (WindowNoise, {**_ARRAYS[2][1], "window": np.ones((3, 2))}, ["window", "(4, any)"]),
        (StateSpaceNoise, {**_ARRAYS[4][1], "phases": np.full(4, 2)}, ["phases", "2"]),
        (StateSpaceNoise, {**_ARRAYS[4][1], "phases": np.ma.masked_less([-1] * 4, 0)}, ["phases"]),
        (StateSpaceNoise, {**_ARRAYS[4][1], "phases": np.full(4, 0.5)}, ["phases", "integers"]),
        (StateSpaceNoise, {**_ARRAYS[4][1], "sources": np.full((2, 3), 3)}, ["sources", "3"]),
        (StateSpaceNoise, {**_ARRAYS[4][1], "sources": np.full((2, 3), -1)}, ["sources", "0"]),
    ],
)
def test_fields_that_are_no_recursion_are_refused(
    kind: type[NoiseRecursion], fields: dict[str, Any], names: list[str]
) -> None:
    with refuses(*names):
        kind(**fields)


def test_an_inverse_that_is_not_square_is_refused() -> None:
    with refuses("square", "(4, 3)"):
        dense_rows(np.ones((4, 3)))


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
    assert same.fingerprint(["a"]) == recursion.fingerprint(["a"])
    if not arrays:
        return
    name = data.draw(st.sampled_from(sorted(arrays)))
    number, place = arrays[name], data.draw(st.integers(0, arrays[name].size - 1))
    before = number.flat[place]
    number.flat[place] = 0 if number.dtype == np.int64 else np.nextafter(before, np.inf)
    changed = dataclasses.replace(fields, **arrays)
    is_same = np.array_equal(getattr(changed, name), getattr(recursion, name))
    assert (changed.fingerprint(["a"]) == recursion.fingerprint(["a"])) is is_same


def test_fingerprints_tell_classes_shapes_and_rounds_apart() -> None:
    numbers = np.array([1.0, 0.5])
    every = [
        banded_rows(numbers[np.newaxis]),
        banded_rows(numbers[:, np.newaxis]),
        dense_rows(np.diag(numbers)),
        BandedNoise(2),
        BandedNoise(3),
        toeplitz_rows(2, numbers),
        toeplitz_rows(3, numbers),
        ScaledNoise(toeplitz_rows(2, numbers), np.ones(2), np.ones(2)),
        ScaledNoise(toeplitz_rows(2, numbers), np.ones(2), numbers),
    ]
    found = {each.fingerprint([]) for each in every}
    assert len(found) == len(every)
    assert {len(each) for each in found} == {32}


@given(random_recursions.recursions(max_rounds=40), st.integers(1, 9))
@settings(deadline=None, max_examples=examples(200))
def test_norms_are_those_of_products_with_the_identity(
    recursion: NoiseRecursion, fewest: int
) -> None:
    """However many rows are treated at a time."""
    normalised = recursion.normalised
    with mock.patch.object(kernel_rows, "_FEWEST_ROWS", fewest):
        found, most = normalised.row_norms()
    rows, states = random_recursions.by_definition(normalised, np.eye(recursion.num_rounds))
    assert found == pytest.approx(np.linalg.norm(rows, axis=1), rel=1e-8)
    expected = np.max([np.linalg.norm(state, axis=1) for state in states], axis=0)
    assert most == pytest.approx(expected, rel=1e-8)


@st.composite
def _blocks(draw: st.DrawFn) -> Blocks:
    """Plans as they are made, and others: weights are right for any blocks."""
    recursion = draw(_LONG_RECURSIONS)
    if draw(st.booleans()):
        return Blocks.of(recursion)
    n = recursion.num_rounds
    inner = draw(st.sets(st.integers(1, n - 1), max_size=8)) if n > 1 else set()
    return Blocks(recursion, np.array([0, *sorted(inner), n], np.int64))


def _rows_in_blocks(blocks: Blocks, z: np.ndarray) -> np.ndarray:
    """The rows, each block from what it is said to need and nothing else."""
    recursion = blocks.recursion
    rows = np.full(z.shape, np.nan)
    vectors = np.zeros((recursion.num_state_vectors, z.shape[1]))
    for block in range(blocks.num_blocks):
        start, end = int(blocks.starts[block]), int(blocks.starts[block + 1])
        earlier = rows[start - blocks.num_earlier_rows(block) : start]
        rows_of_z = z[blocks.first_row_of_z(block) : end]
        weights = blocks.transition(block)
        assert len(weights) == end - start + recursion.num_state_vectors
        of_rows, of_vectors = weights[: end - start], weights[end - start :]
        driving = rows_of_z
        if not recursion.draws_earlier_rows_of_z:
            # No row has a weight for itself or for a later one.
            driving = np.zeros((end - start, z.shape[1]))
        for i, of_row in enumerate(of_rows):
            rows[start + i] = z[start + i]
            rows[start + i] += of_row @ np.concatenate([earlier, vectors, driving])
            if not recursion.draws_earlier_rows_of_z:
                driving[i] = rows[start + i]
        if len(of_vectors):
            vectors = of_vectors @ np.concatenate([vectors, driving])
    return rows * recursion.diagonal[:, np.newaxis]


@given(_blocks())
@settings(max_examples=examples(200), deadline=None)
def test_blocks_of_random_weights_give_the_rows_of_the_recursion(blocks: Blocks) -> None:
    z = np.random.default_rng(0).normal(size=(blocks.recursion.num_rounds, 2))
    expected = noise_rows.apply(blocks.recursion, z)
    size = max(1.0, float(np.max(np.abs(expected))))
    np.testing.assert_allclose(_rows_in_blocks(blocks, z), expected, rtol=0.0, atol=1e-10 * size)


@given(_LONG_RECURSIONS)
@settings(deadline=None)
def test_blocks_cover_all_rounds_and_at_most_double(recursion: NoiseRecursion) -> None:
    blocks = Blocks.of(recursion)
    assert blocks.starts.dtype == np.int64
    assert (blocks.starts[0], blocks.starts[-1]) == (0, recursion.num_rounds)
    sizes = np.diff(blocks.starts)
    assert len(sizes) == blocks.num_blocks
    largest = np.max(sizes)
    assert np.all(sizes >= 1)
    assert sizes[0] == 1
    # A block is made while the one before it is used: rounds must not get much longer.
    assert np.all(sizes[1:] <= 2 * sizes[:-1])
    assert np.all(sizes[1:] <= blocks.starts[1:-1])
    # All but the small first blocks and the last one are as large as any.
    assert np.sum(sizes < largest) <= np.log2(largest) + 3


def _check_distinct_weights(blocks: Blocks) -> int:
    distinct = blocks.distinct_transitions()
    assert distinct.shape == (blocks.num_blocks,)
    for block, first in enumerate(distinct):
        assert first <= block
        assert distinct[first] == first
        # Bit for bit, since the files of either are read.
        np.testing.assert_array_equal(blocks.transition(int(first)), blocks.transition(block))
    return len(np.unique(distinct))


@given(_blocks())
@settings(deadline=None)
def test_weights_that_are_said_to_be_equal_are(blocks: Blocks) -> None:
    _check_distinct_weights(blocks)


@pytest.mark.parametrize(
    "factorization",
    [
        identity(2000),
        toeplitz(2000, 20, coefficients="square_root"),
        toeplitz(2000, 20, coefficients="square_root", equal_column_norms=True),
        blt(2000, 2),
        banded_inverse(2000, 20, coefficients="square_root"),
    ],
    ids=lambda factorization: f"{factorization.mechanism}-{factorization.parameters}",
)
def test_matrices_that_are_the_same_in_all_rounds_need_few_weights(
    factorization: Factorization,
) -> None:
    blocks = Blocks.of(factorization.noise_recursion())
    # The doubling blocks, the large ones and the last one.
    assert _check_distinct_weights(blocks) <= 11
    assert blocks.num_blocks > 20


@given(_LONG_RECURSIONS)
@settings(max_examples=examples(200), deadline=None)
def test_the_kept_rows_are_enough(recursion: NoiseRecursion) -> None:
    """Tiles make the next block at any round of a block, the first and the last included."""
    blocks = Blocks.of(recursion)
    ring = np.full(NoiseCost.rows_kept(blocks), -1)

    def write(block: int) -> None:
        rounds = np.arange(blocks.starts[block], blocks.starts[block + 1])
        ring[rounds % NoiseCost.rows_kept(blocks)] = rounds

    def check(first: int, stop: int) -> None:
        rounds = np.arange(first, stop)
        np.testing.assert_array_equal(ring[rounds % NoiseCost.rows_kept(blocks)], rounds)

    write(0)
    for block in range(blocks.num_blocks):
        start, end = int(blocks.starts[block]), int(blocks.starts[block + 1])
        if block + 1 < blocks.num_blocks:
            check(end - blocks.num_earlier_rows(block + 1), end)
            write(block + 1)
            check(end, int(blocks.starts[block + 2]))
        # What is still read in the rounds of this block, if the next one is made in its first.
        check(start, end)


def test_rows_of_other_classes_or_of_fewer_rounds_are_refused() -> None:
    class Other(BandedNoise):
        pass

    kernel_rows.check_rounds(BandedNoise(4), 4)
    with pytest.raises(NotProved, match="4 rounds, not 5"):
        kernel_rows.check_rounds(BandedNoise(4), 5)
    with pytest.raises(NotProved, match="classes"):
        kernel_rows.check_rounds(Other(4, np.ones((1, 1))), 4)


def _exact(array: object) -> np.ndarray:
    """Floats as fractions, with the same shape."""
    given = np.asarray(array)
    exact = np.empty(given.shape, object)
    for index in np.ndindex(given.shape):
        exact[index] = Fraction(float(given[index]))
    return exact


def _solved(lower: np.ndarray) -> np.ndarray:
    """The exact inverse of a lower-triangular matrix of fractions."""
    inverse = _exact(np.zeros(lower.shape))
    for i, row in enumerate(lower):
        inverse[i, i] = 1 / row[i]
        for j in range(i):
            inverse[i, j] = -inverse[i, i] * sum(row[k] * inverse[k, j] for k in range(j, i))
    return inverse


def exact_strategy(rows: NoiseRecursion) -> np.ndarray:
    """C in fractions, from the definitions of the classes."""
    n = rows.num_rounds
    result = _exact(np.zeros((n, n)))
    if isinstance(rows, ScaledNoise):
        scales = np.multiply.outer(_exact(rows.scales), _exact(rows.row_scales))
        return np.asarray(exact_strategy(rows.inner) / scales)
    if isinstance(rows, BandedNoise):
        bands = np.broadcast_to(rows.bands, (n, rows.bands.shape[1]))
        for i in range(n):
            for t in range(min(i + 1, bands.shape[1])):
                result[i, i - t] = Fraction(float(bands[i, t]))
        return result
    if isinstance(rows, WindowNoise):
        window = _exact(np.broadcast_to(rows.window, (n, rows.rows_of_z_per_round)))
        left, right = _exact(rows.left), _exact(rows.right)
        for i in range(n):
            for j in range(i + 1):
                entry = window[i, i - j] if i - j < rows.rows_of_z_per_round else Fraction(0)
                if j <= i - rows.rows_of_z_per_round + 1:
                    entry += sum(left[i] * right[j])
                result[i, j] = entry
        return _solved(result)
    assert isinstance(rows, StateSpaceNoise)
    gains, outputs, decays, feedbacks = map(
        _exact, (rows.gains, rows.outputs, rows.decays, rows.feedbacks)
    )
    identity, state = _exact(np.eye(n)), _exact(np.zeros((rows.num_state_vectors, n)))
    for i, p in enumerate(rows.phases):
        result[i] = gains[p] * identity[i] + outputs[p] @ state
        state = decays[p][:, np.newaxis] * state[rows.sources[p]]
        state = state + np.multiply.outer(feedbacks[p], result[i])
    return _solved(result)


def dense(found: Strategy) -> np.ndarray:
    """A strategy matrix as an (n, n) array."""
    if found.is_dense:
        return found.entries
    n, b = found.num_rounds, found.entries.shape[1]
    matrix, bands = np.zeros((n, n)), np.broadcast_to(found.entries, (n, b))
    for i in range(n):
        for t in range(min(i + 1, b)):
            matrix[i, i - t] = bands[i, t]
    return matrix if found.scales is None else matrix * np.multiply.outer(*found.scales)


def _kind(found: Strategy) -> str:
    if found.is_dense:
        return "dense"
    return "Toeplitz" if len(found.entries) == 1 else "banded"


@given(random_recursions.recursions(), st.integers(1, 9), st.booleans())
@settings(max_examples=examples(200), deadline=None)
def test_errors_are_within_their_bound(rows: NoiseRecursion, first: int, is_small: bool) -> None:
    """For all kinds, the leading part included, and no bound is far from its errors."""
    first = min(first, rows.num_rounds)
    exact = exact_strategy(rows)[:first, :first]
    norms = np.linalg.norm(exact.astype(np.float64), axis=0)
    with pytest.MonkeyPatch.context() as patch:
        if is_small:
            # In several blocks.
            patch.setattr(kernel_rows, "_ROWS_AT_A_TIME", 2)
        found = strategy_of(rows, first)
    matrix = dense(found)
    errors = np.linalg.norm((exact - _exact(matrix)).astype(np.float64), axis=0)
    # The errors of an inverse are those of its condition.
    magnitudes = np.abs(exact.astype(np.float64))
    noising = np.abs(_solved(exact).astype(np.float64))
    condition = np.linalg.norm(magnitudes @ noising, 2)
    assert np.max(errors) <= found.error
    assert found.error <= 1e-13 * (1.0 + condition**2) * np.max(norms)
    assert not np.any(np.triu(matrix, 1))
    if isinstance(rows, BandedNoise):
        assert found.error == 0.0


@pytest.mark.parametrize("kind", ["bands", "window", "states", "phases"])
@pytest.mark.parametrize("unit", [2.0**-12, -(2.0**12)])
def test_errors_of_any_units_and_scales_are_within_their_bounds(kind: str, unit: float) -> None:
    """Rows of one size beside columns of another, and gains that are far from one."""
    n, generator = 6, np.random.default_rng(0)
    series, none = np.array([[1.0, 1 / 3, -1 / 7]]) * unit, np.ones((n, 0))
    weights = generator.uniform(0.2, 0.4, (3, 2, 2))
    states = StateSpaceNoise(
        np.arange(n) % 2, unit * np.ones(2), weights[0], np.tile([0, 1], (2, 1)), *weights[1:]
    )
    same = dataclasses.replace(states, phases=np.zeros(n, np.int64))
    inner: dict[str, NoiseRecursion] = {
        **{"bands": BandedNoise(n, series), "window": WindowNoise(n, series, none, none)},
        **{"states": same, "phases": states},
    }
    every = [inner[kind]]
    cases = itertools.product(((0, 0), (-9, 0), (9, 0), (0, -9), (0, 9)), (0, n - 1))
    for powers, lonely in cases if kind != "phases" else ():
        scales = generator.uniform(0.9, 1.0, (2, n))
        scales[[0, 1], lonely] *= np.exp2(powers)
        every += [ScaledNoise(inner[kind], *scales), ScaledNoise(inner[kind], *scales / 64.0)]
    for rows in every:
        found, size = kernel_rows._of_kind(rows, n)
        exact = exact_strategy(rows)
        errors = np.linalg.norm((exact - _exact(dense(found))).astype(np.float64), axis=0)
        largest = np.max(np.linalg.norm(exact.astype(np.float64), axis=0))
        assert np.max(errors) <= found.error <= 1e-10 * largest
        assert size <= largest * (1.0 + 1e-12)


def test_bands_and_columns_of_each_kind() -> None:
    bands = np.array([[2.0, 0.0, 0.0], [3.0, 7.0, 0.0], [5.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    matrix = np.diag([2.0, 3.0, 5.0, 1.0]) + np.diag([7.0, 0.0, 0.0], -1)
    for found in (Strategy(bands, 4), Strategy(matrix, 4, is_dense=True)):
        assert found.num_bands == 2
        np.testing.assert_array_equal(found.columns((0, 1, 2, 3)), matrix)
        np.testing.assert_array_equal(found.compact_columns(1)[:, 0], np.diag(matrix))
    assert kernel_rows._largest_column(matrix) == np.hypot(2.0, 7.0)
    assert kernel_rows._largest_column_of_bands(bands) == np.hypot(2.0, 7.0)
    for width in (2, 3):
        window = WindowNoise(3, np.ones((1, width)), *np.array([[[5.0], [4.0], [3.0]]] * 2))
        truth = random_recursions.by_definition(window, np.eye(3))[0]
        np.testing.assert_array_equal(noise_rows.dense(window), truth)


def test_kinds_give_their_own_data() -> None:
    """So that theorems about Toeplitz and banded matrices apply."""
    none, one = np.ones((5, 0)), np.zeros(5, np.int64)
    sources = np.arange(2)[np.newaxis]
    decays = np.array([[0.9, 0.5]])
    state = StateSpaceNoise(one, np.ones(1), -decays, sources, decays, np.ones((1, 2)))
    for rows, kind in (
        (BandedNoise(5), "Toeplitz"),
        (banded_rows(np.tri(5, 2)), "banded"),
        (toeplitz_rows(5, np.ones(2)), "Toeplitz"),
        (WindowNoise(5, np.array([[1.0, -0.5]]), none, none), "Toeplitz"),
        (WindowNoise(5, np.tri(5, 2), none, none), "dense"),
        (state, "Toeplitz"),
        (dataclasses.replace(state, sources=sources[:, ::-1]), "dense"),
        (dense_rows(np.tri(5)), "dense"),
        (ScaledNoise(state, np.ones(5), np.ones(5)), "Toeplitz"),
    ):
        assert _kind(strategy_of(rows, 5)) == kind
        # In blocks, so that the leading part has as few bands.
        assert dense(strategy_of(rows, 1)).shape == (1, 1)


def test_phases_after_the_run_do_not_count() -> None:
    rows = StateSpaceNoise(
        np.array([1, 1, 0]),
        np.array([1.0, 2.0]),
        np.ones((2, 1)),
        np.zeros((2, 1), np.int64),
        np.full((2, 1), 0.5),
        np.ones((2, 1)),
    )
    found = strategy_of(rows, 2)
    assert _kind(found) == "Toeplitz"
    np.testing.assert_allclose(found.entries[0], [0.5, -0.5])
    assert _kind(strategy_of(rows, 3)) == "dense"


def test_zeros_of_an_inverse_are_zeros() -> None:
    """The number of bands decides which theorem applies."""
    generator = np.random.default_rng(3)
    bands = np.tril(generator.uniform(0.1, 1.0, (60, 4)))
    bands[:, 0] += 2.0
    strategy = dense(strategy_of(banded_rows(bands), 60))
    found = strategy_of(dense_rows(np.linalg.inv(strategy)), 60)
    np.testing.assert_array_equal(dense(found) != 0.0, strategy != 0.0)
    assert 0.0 < found.error < 1e-12


@pytest.mark.parametrize(
    ("rows", "num_rounds", "words"),
    [
        (banded_rows(np.tri(4, 2)), 5, ["4", "5"]),
        (dense_rows(np.tril(np.ones((4, 4)), -1)), 4, ["zero"]),
        (banded_rows(np.full((3, 1), 1e-150)), 3, ["singular"]),
        (banded_rows(np.full((3, 1), 1e150)), 3, ["singular"]),
        # Of a condition beyond floats.
        (dense_rows(np.eye(60) - 2.0 * np.tri(60, k=-1)), 60, ["singular"]),
        (WindowNoise(60, np.array([[1.0] + [-2.0] * 59]), *np.ones((2, 60, 0))), 60, ["singular"]),
        (WindowNoise(3, np.array([[0.0, 1.0]]), *np.ones((2, 3, 0))), 3, ["zero"]),
        (banded_rows(np.tri(3, 2, -1)), 3, ["zero"]),
    ],
)
def test_what_is_not_proved_is_refused(
    rows: NoiseRecursion, num_rounds: int, words: list[str]
) -> None:
    with refuses(*words):
        strategy_of(rows, num_rounds)


def test_rows_whose_normalised_numbers_overflow_are_not_proved() -> None:
    one = np.ones((1, 1))
    rows = StateSpaceNoise(
        np.zeros(3, np.int64), np.full(1, 1e-200), 1e200 * one, np.zeros((1, 1), np.int64), one, one
    )
    with pytest.raises(NotProved, match="finite"):
        strategy_of(rows, 3)


@pytest.mark.parametrize(
    "rows",
    [
        WindowNoise(10**6, np.ones((10**6, 1)), *np.ones((2, 10**6, 0))),
        StateSpaceNoise(
            phases=np.arange(10**6) % 2,
            gains=np.ones(2),
            outputs=np.ones((2, 1)),
            sources=np.zeros((2, 1), np.int64),
            decays=np.ones((2, 1)),
            feedbacks=np.ones((2, 1)),
        ),
    ],
)
def test_too_many_rounds_are_refused(rows: NoiseRecursion) -> None:
    with refuses(str(rows.num_rounds)):
        strategy_of(rows, rows.num_rounds)


def test_long_runs() -> None:
    """A state space of a million rounds, bands of a hundred thousand, in seconds."""
    rounds = 10**6
    decays = np.array([[0.999, 0.9]])
    rows = StateSpaceNoise(
        np.zeros(rounds, np.int64),
        np.full(1, 2.0),
        np.array([[-0.5, -0.25]]),
        np.arange(2)[np.newaxis],
        decays,
        np.ones((1, 2)),
    )
    found = strategy_of(rows, rounds)
    assert _kind(found) == "Toeplitz"
    lag = 10_000
    expected = 0.25 * 0.999 ** (lag - 1) + 0.125 * 0.9 ** (lag - 1)
    assert found.entries[0][lag] == pytest.approx(expected, rel=1e-12)
    assert found.error < 1e-13
    window = WindowNoise(rounds, np.array([[1.0, -0.5, -0.125]]), *np.ones((2, rounds, 0)))
    assert strategy_of(window, rounds).error < 1e-12
    # The square root of prefix sums, of as many coefficients as rounds.
    lags = np.arange(1, 10**5)
    series, expected = (np.cumprod(np.append(1.0, (lags + a) / lags)) for a in (-1.5, -0.5))
    found = strategy_of(WindowNoise(10**5, series[None], *np.ones((2, 10**5, 0))), 10**5)
    assert _kind(found) == "Toeplitz"
    assert np.linalg.norm(found.entries[0] - expected) <= found.error < 1e-11
    banded = banded_rows(np.tri(10**5, 8) / np.arange(1.0, 9.0))
    assert strategy_of(banded, 10**5).error == 0.0


@given(random_recursions.recursions(), st.integers(1, 4))
@settings(max_examples=examples(60), deadline=None)
def test_columns_and_bands_are_those_of_the_matrix(rows: NoiseRecursion, width: int) -> None:
    found = strategy_of(rows, rows.num_rounds)
    matrix = dense(found)
    n = len(matrix)
    lags = [i - j for i in range(n) for j in range(n) if matrix[i, j]]
    assert found.num_bands == 1 + max(lags)
    compact = found.compact_columns(width)
    for j in range(n):
        column = np.append(matrix[j:, j], np.zeros(width))
        np.testing.assert_array_equal(compact[j], column[:width])
    chosen = tuple(range(0, n, 2))
    np.testing.assert_array_equal(found.columns(chosen), matrix[:, chosen])


def test_the_bounds_of_errors_are_those_of_their_proofs() -> None:
    """Terms that are far above the errors of small matrices, term by term."""
    unit = Fraction(1, 2**53)
    gammas = {k: float(k * unit / (1 - k * unit)) for k in range(1, 40)}
    for k, gamma in gammas.items():
        assert kernel_rows._gamma(k) == pytest.approx(gamma, rel=1e-14, abs=0.0)
    assert kernel_rows._gamma(2**51) == pytest.approx(1.0 / 3.0, rel=1e-14)
    assert kernel_rows._error(0.25) == pytest.approx(0.2525 / 0.7475, rel=1e-14)
    assert kernel_rows._error(0.49) < np.inf == kernel_rows._error(0.5)
    # A matrix whose product with its inverse is exact, and the residual is roundings alone.
    noising, terms = np.array([[2.0, 0.0], [1.0, 8.0]]), 3
    sizes = 2.0 * np.abs(noising)
    found, largest = kernel_rows._inverted(noising, sizes, terms)
    magnitudes = np.array([[0.5, 0.0], [0.0625, 0.125]])
    product = magnitudes @ sizes
    norm = np.sqrt(np.max(np.sum(product, axis=1)) * np.max(np.sum(product, axis=0)))
    assert largest == np.hypot(0.5, 0.0625)
    assert found.error == pytest.approx(1.01 * gammas[6] * norm * largest, rel=1e-9, abs=0.0)
    # A residual, and an entry that counts as zero, whatever the unit.
    for unit_of_rows in (1.0, 2.0**-10):
        near = np.array([[1.0, 0.0], [1e-14, 1.0]]) * unit_of_rows
        found, _ = kernel_rows._inverted(near, np.abs(near), 0)
        assert found.is_dense
        np.testing.assert_array_equal(found.entries, np.eye(2) / unit_of_rows)
        expected = (1.01 * gammas[3] + 1e-14) / unit_of_rows
        assert found.error == pytest.approx(expected, rel=1e-9, abs=0.0)
    # Series: at least the sum of magnitudes of the product less one.
    series, wrong = np.array([1.0, -0.5, 0.25]), np.array([1.0, 0.5, 0.0, 0.5])
    exact = np.convolve(series, wrong)[:4] - np.eye(4)[0]
    residual = kernel_rows._residual_of_series(wrong, series)
    assert residual == pytest.approx(np.sum(np.abs(exact)), rel=1e-13)
    right = np.array([1.0, 0.5, 0.0, -0.125])
    sizes_of_series = 1.625 * np.linalg.norm(series) + 2.0 * np.linalg.norm(right) * 1.75
    epsilon = float(np.finfo(np.longdouble).eps) / 2.0
    least = np.sqrt(4.0) * 16.0 * 3 * epsilon * sizes_of_series
    assert least <= kernel_rows._residual_of_series(right, series) <= 1.5 * least


def test_errors_and_sizes_are_refused_beyond_their_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each limit is met by what equals it."""
    for size, is_known in ((1e-100, True), (1e100, True), (9e-101, False), (1.1e100, False)):
        rows = banded_rows(np.full((1, 1), size))
        if is_known:
            assert strategy_of(rows, 1).error == 0.0
        else:
            with refuses("singular"):
                strategy_of(rows, 1)
    for error, is_known in ((1e-6, True), (1.001e-6, False), (np.nan, False)):
        found = Strategy(np.ones((1, 1)), 1, error)
        monkeypatch.setattr(kernel_rows, "_of_kind", lambda *_, found=found: (found, 1.0))
        if is_known:
            assert strategy_of(dense_rows(np.ones((1, 1))), 1) is found
        else:
            with refuses("singular"):
                strategy_of(dense_rows(np.ones((1, 1))), 1)


def test_sizes_of_low_rank_rows_are_sums_of_magnitudes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding is relative to the terms of an entry, which may cancel."""
    seen: list[Any] = []

    def inverted(*given: Any) -> tuple[Strategy, float]:
        seen.append(given)
        return Strategy(np.eye(2), 2, 0.0, is_dense=True), 1.0

    monkeypatch.setattr(kernel_rows, "_inverted", inverted)
    left, right = np.array([[1.0, -1.0], [-4.0, 4.0]]), np.array([[3.0, 2.0]] * 2)
    strategy_of(WindowNoise(2, np.array([[2.0], [-8.0]]), left, right), 2)
    ((noising, sizes, terms),) = seen
    np.testing.assert_allclose(noising, [[3.0, 0.0], [-4.0, -12.0]], rtol=1e-15)
    np.testing.assert_allclose(sizes, [[7.0, 0.0], [20.0, 28.0]], rtol=1e-15)
    assert terms == 2 + 8


def test_state_vectors_are_largest_after_any_round() -> None:
    """Also where the round after it makes them small."""
    phases, ones, none = np.arange(7) % 2, np.ones(2), np.zeros((2, 1), np.int64)
    for large in ([4.0, 1.0], [1.0, 4.0]):
        weights = np.zeros((2, 1)), none, np.zeros((2, 1)), np.array(large)[:, np.newaxis]
        assert StateSpaceNoise(phases, ones, *weights).row_norms()[1] == pytest.approx(4.0)


@pytest.mark.parametrize("seed", range(12))
def test_norms_are_no_less_than_in_fractions_where_sums_cancel(seed: int) -> None:
    """32 bits hold rows of these norms: less of them and the noise would wrap."""
    large = float(np.random.default_rng(seed).uniform(0.5e8, 2e8))
    weights = np.array([[0, 1]]), np.zeros((1, 2)), np.array([[large, large + 1.3]])
    rows = StateSpaceNoise(np.zeros(4, np.int64), np.ones(1), np.array([[1.0, -1.0]]), *weights)
    left = np.tile(weights[2] * [1.0, -1.0], (4, 1))
    for each in (rows, WindowNoise(4, np.ones((1, 2)), left, np.ones((4, 2)))):
        with mock.patch.object(kernel_rows, "_FEWEST_ROWS", 1):
            found, _ = each.row_norms()
        squares = [sum(row**2) for row in _solved(exact_strategy(each))]
        assert all(np.square(found) >= np.array(squares, np.float64) * (1.0 - 1e-12))


def test_columns_of_scaled_matrices() -> None:
    scales = np.array([1.0, 10.0, 100.0]), np.array([1.0, 3.0, 5.0])
    found = Strategy(np.array([[2.0, 1.0]]), 3, scales=scales)
    truth = np.array([[2.0, 0.0, 0.0], [10.0, 60.0, 0.0], [0.0, 300.0, 1000.0]])
    np.testing.assert_array_equal(found.columns((0, 1, 2)), truth)
    np.testing.assert_array_equal(
        found.compact_columns(2), [[2.0, 10.0], [60.0, 300.0], [1000.0, 0.0]]
    )


def test_scaled_rows_take_toeplitz_rows_and_positive_scales_alone() -> None:
    inner, ones = BandedNoise(3, np.array([[2.0, 1.0]])), np.ones(3)
    assert ScaledNoise(inner, ones, ones).num_rounds == 3
    changing = BandedNoise(3, np.array([[2.0, 0.0], [1.0, 1.0], [3.0, 1.0]]))
    with refuses("inner", "Toeplitz"):
        ScaledNoise(changing, ones, ones)
    with refuses("inner", "scales", error=TypeError):
        ScaledNoise(ScaledNoise(inner, ones, ones), ones, ones)
    for name in ("scales", "row_scales"):
        for number in (0.0, -1.0, 1e-51, 1e51):
            values = {"scales": ones, "row_scales": ones, name: np.array([1.0, number, 1.0])}
            with refuses(name, "ScaledNoise"):
                ScaledNoise(inner, **values)
        with refuses(name, "finite"):
            ScaledNoise(inner, **{**values, name: np.array([1.0, np.nan, 1.0])})
    other = ScaledNoise(inner, ones, np.array([1.0, 1.0, np.nextafter(1.0, 2.0)]))
    plain = ScaledNoise(inner, ones, ones)
    digests = {each.fingerprint(0) for each in (plain, other, inner)}
    assert len(digests) == 3
    assert copy.copy(plain).fingerprint(0) == plain.fingerprint(0)


def test_inner_rows_that_are_not_known_to_be_toeplitz_are_not_proved() -> None:
    ones = np.ones(4)
    crossed = StateSpaceNoise(
        phases=np.zeros(4, np.int64),
        gains=np.ones(1),
        outputs=np.array([[0.3, 0.2]]),
        sources=np.array([[1, 0]]),
        decays=np.array([[0.5, 0.5]]),
        feedbacks=np.array([[1.0, 1.0]]),
    )
    for rounds in (1, 4):
        with refuses("ScaledNoise", "Toeplitz", error=NotProved):
            strategy_of(ScaledNoise(crossed, ones, ones), rounds)
    # The squares of 1e-120 would leave floats, though C has columns of norm 1e-70.
    with refuses("inner", "1e-120", error=NotProved):
        strategy_of(ScaledNoise(toeplitz_rows(4, np.array([1e-120])), np.full(4, 1e-50), ones), 4)


_NONE = np.ones((6, 0))
_STATES = StateSpaceNoise(
    *(np.zeros(6, np.int64), np.array([2.0]), np.array([[0.5, 0.25]])),
    *(np.array([[1, 0]]), np.array([[0.5, -0.75]]), np.array([[0.25, 1.0]])),
)


@pytest.mark.parametrize(
    ("rows", "reach"),
    [
        (BandedNoise(6, np.tri(6, 3)), 3),
        (BandedNoise(6, np.ones((1, 1))), 1),
        (WindowNoise(6, np.ones((1, 3)), _NONE, _NONE), 6),
        (_STATES, 6),
        (kernel_rows.full_tree_rows(2), 2),
    ],
)
def test_a_column_of_c_reaches_as_far_as_is_said(rows: NoiseRecursion, reach: int) -> None:
    columns = np.linalg.inv(noise_rows.dense(rows))
    assert rows.reach == reach
    assert not np.any(np.abs(np.tril(columns, -reach)) > 1e-12)
    assert rows.first_row_of_z(5) == (3 if isinstance(rows, WindowNoise) else 5)
    assert rows.first_row_of_z(1) == (0 if isinstance(rows, WindowNoise) else 1)


def test_state_vectors_come_from_those_before_a_block() -> None:
    unit = _STATES.normalised
    expected, states = random_recursions.by_definition(unit, np.eye(6))
    norms, most = unit.row_norms()
    assert norms == pytest.approx(np.linalg.norm(expected, axis=1))
    assert most == pytest.approx(np.max([np.linalg.norm(s, axis=1) for s in states], axis=0))
    rows, later = np.split(unit.linear_map(0, 3), [3])
    np.testing.assert_allclose(rows[:, 2:], expected[:3, :3])
    # Three rounds more, from the state vectors that three rounds leave.
    ends = unit.linear_map(3, 6) @ np.vstack(
        [np.hstack([later[:, 2:], np.zeros((2, 3))]), np.eye(3, 6, 3)]
    )
    np.testing.assert_allclose(ends[:3], expected[3:])


def test_a_diagonal_with_one_zero_and_scales_at_their_ends() -> None:
    with refuses("diagonal"):
        _ = WindowNoise(2, np.array([[1.0], [0.0]]), _NONE[:2], _NONE[:2]).normalised
    plain, least = toeplitz_rows(2, np.ones(1)), kernel_rows.LEAST_SCALE
    ends = np.array([least, 1.0 / least])
    np.testing.assert_array_equal(ScaledNoise(plain, ends, np.ones(2)).diagonal, ends)
    inner = toeplitz_rows(2, np.array([2.0, 0.5]))
    scales = np.array([[2.0, 4.0], [0.5, 8.0]])
    scaled = ScaledNoise(inner, *scales)
    matrix = scales[1, :, np.newaxis] * noise_rows.dense(inner) * scales[0]
    np.testing.assert_array_equal(scaled.diagonal, np.diag(matrix))
    unit = matrix / scaled.diagonal[:, np.newaxis]
    np.testing.assert_array_equal(noise_rows.dense(scaled.normalised), unit)
    for outside in (np.nextafter(least, 0.0), np.nextafter(1.0 / least, np.inf)):
        with refuses("1e-50"):
            ScaledNoise(plain, np.array([1.0, outside]), np.ones(2))
