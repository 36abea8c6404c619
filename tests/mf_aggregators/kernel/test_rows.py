"""Rows of noise: transitions and blocks against definitions, their norms, and their arrays."""

import dataclasses
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators import workloads
from mf_aggregators.factorizations import (
    BandedFactorization,
    DenseFactorization,
    Factorization,
    IdentityFactorization,
    StructuredFactorization,
    TreeAggregationFactorization,
    banded_inverse,
    identity,
    noise_rows,
    optimal,
    structured,
    toeplitz,
    tree_aggregation,
)
from mf_aggregators.kernel import rows as kernel_rows
from mf_aggregators.kernel.numbers import NotProved
from mf_aggregators.kernel.rows import (
    BandedNoise,
    Blocks,
    NoiseRecursion,
    StateSpaceNoise,
    WindowNoise,
    banded_rows,
    dense_rows,
    fingerprint,
    independent_rows,
    toeplitz_rows,
)
from mf_aggregators.linear_algebra.banded_matrices import matrix_from_bands
from mf_aggregators.noise import costs
from tests.examples import examples
from tests.mf_aggregators import random_recursions, small_mechanisms
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
    for factorization, sizes in expected.items():
        recursion = factorization.noise_recursion()
        found = (recursion.floats_per_parameter, recursion.rows_of_z_per_round)
        assert found == sizes, factorization


_ARRAYS: tuple[tuple[type[NoiseRecursion], dict[str, Any]], ...] = (
    (BandedNoise, {"num_rounds": 4, "bands": np.tri(4, 3)}),
    (
        BandedNoise,
        {"num_rounds": 4, "bands": np.ones((1, 6)), "row_scales": np.ones(4)},
    ),
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
    dense = dense_rows(np.where(np.tri(4, dtype=bool), 1.0, huge))
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
        (BandedNoise, {"num_rounds": 2.5, "bands": np.ones((1, 1))}, ["num_rounds"]),
        (BandedNoise, {"num_rounds": 4, "bands": np.ones((3, 1))}, ["bands", "(4, any)"]),
        (WindowNoise, {**_ARRAYS[2][1], "right": np.ones((3, 1))}, ["right", "(4, 1)"]),
        (WindowNoise, {**_ARRAYS[2][1], "window": np.ones((3, 2))}, ["window", "(4, any)"]),
        (StateSpaceNoise, {**_ARRAYS[4][1], "phases": np.full(4, 2)}, ["phases", "2"]),
        (StateSpaceNoise, {**_ARRAYS[4][1], "phases": np.full(4, -1)}, ["phases", "0"]),
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
        dense_rows(np.diag(numbers)),
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


@given(random_recursions.recursions(max_rounds=40), st.integers(1, 9))
@settings(deadline=None, max_examples=examples(200))
def test_norms_are_those_of_products_with_the_identity(
    recursion: NoiseRecursion, fewest: int
) -> None:
    """However many rows are treated at a time."""
    normalised = recursion.normalised
    with mock.patch.object(kernel_rows, "_FEWEST_ROWS", fewest):
        found, most = kernel_rows.row_norms(normalised)
    rows, states = random_recursions.by_definition(normalised, np.eye(recursion.num_rounds))
    assert found == pytest.approx(np.linalg.norm(rows, axis=1), rel=1e-9)
    expected = np.max([np.linalg.norm(state, axis=1) for state in states], axis=0)
    assert most == pytest.approx(expected, rel=1e-9)


@st.composite
def _blocks(draw: st.DrawFn) -> Blocks:
    """Plans as they are made, and others: weights are right for any blocks."""
    recursion = draw(_LONG_RECURSIONS)
    if draw(st.booleans()):
        return Blocks.of(recursion)
    n = recursion.num_rounds
    inner = draw(st.sets(st.integers(1, n - 1), max_size=8)) if n > 1 else set()
    return Blocks(recursion, np.array([0, *sorted(inner), n], np.int64))


def _factorizations() -> list[Factorization]:
    n = _NUM_ROUNDS
    decays = np.exp(np.multiply.outer(np.arange(n), [-0.02, -0.002]))
    diagonals = np.where(np.tri(n, 3, dtype=bool), [1.0, 0.5, 0.375], 0.0)
    lags = np.arange(1, n)
    coefficients = np.concatenate([[1.0], np.cumprod((2.0 * lags - 1.0) / (2.0 * lags))])
    scales = np.random.default_rng(0).uniform(0.5, 2.0, (n, 1))

    def banded_of(num_bands: int) -> Factorization:
        bands = np.where(np.tri(n, num_bands, dtype=bool), coefficients[:num_bands], 0.0)
        return BandedFactorization(bands * scales)

    dense = scales * matrix_from_bands(np.where(np.tri(n, dtype=bool), coefficients, 0.0))
    return [
        identity(n),
        banded_of(1),
        banded_of(2),
        # More and fewer bands than the largest block has rows.
        banded_of(40),
        banded_of(100),
        banded_of(n),
        DenseFactorization(dense),
        tree_aggregation(n),
        tree_aggregation(n, "full"),
        toeplitz(n, 3, coefficients="square_root"),
        toeplitz(n, 100, coefficients="square_root", equal_column_norms=True),
        toeplitz(n, coefficients="square_root"),
        toeplitz(n, coefficients="square_root", equal_column_norms=True),
        blt(n, 3),
        banded_inverse(n, 4, coefficients="square_root"),
        StructuredFactorization(diagonals, decays, 0.1 / decays),
        structured(optimal(workloads.prefix_sum(40)), 2, 2),
    ]


_EVERY_MECHANISM = pytest.mark.parametrize(
    "factorization",
    _factorizations(),
    ids=lambda factorization: f"{factorization.mechanism}-{factorization.parameters}",
)


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


@_EVERY_MECHANISM
def test_blocks_of_every_mechanism_give_the_dense_product(factorization: Factorization) -> None:
    n = factorization.num_rounds
    blocks = Blocks.of(factorization.noise_recursion())
    z = np.random.default_rng(1).normal(size=(n, 2))
    if isinstance(factorization, TreeAggregationFactorization):
        # Its stream draws one row of Z a round: a square matrix of its own.
        expected = factorization.noise_rows(np.eye(n)) @ z
    else:
        expected = np.linalg.solve(factorization.strategy_matrix(), z)
    rows = _rows_in_blocks(blocks, z)
    np.testing.assert_allclose(rows, expected, rtol=1e-9, atol=1e-9)


@given(_LONG_RECURSIONS)
@settings(deadline=None)
def test_blocks_cover_all_rounds_and_at_most_double(recursion: NoiseRecursion) -> None:
    blocks = Blocks.of(recursion)
    assert blocks.starts.dtype == np.int64
    assert (blocks.starts[0], blocks.starts[-1]) == (0, recursion.num_rounds)
    sizes = np.diff(blocks.starts)
    assert len(sizes) == blocks.num_blocks
    assert np.max(sizes) == costs.largest_block(blocks)
    assert np.all(sizes >= 1)
    assert sizes[0] == 1
    # A block is made while the one before it is used: rounds must not get much longer.
    assert np.all(sizes[1:] <= 2 * sizes[:-1])
    assert np.all(sizes[1:] <= blocks.starts[1:-1])
    # All but the small first blocks and the last one are as large as any.
    assert np.sum(sizes < costs.largest_block(blocks)) <= np.log2(costs.largest_block(blocks)) + 3


@pytest.mark.parametrize("num_bands", [1, 2, 64, 128, 129, 300, 1500])
def test_blocks_are_large_and_add_little_to_what_is_kept(num_bands: int) -> None:
    """Each block reads all that is kept once; its own rows are kept as well."""
    blocks = Blocks.of(toeplitz_rows(2000, np.ones(num_bands)))
    assert costs.largest_block(blocks) >= 16
    assert costs.rows_kept(blocks) <= max(256, 1.5 * num_bands)


@pytest.mark.parametrize(
    "recursion",
    [
        dense_rows(np.tri(2000)),
        banded_inverse(2000, 2000, coefficients="square_root").noise_recursion(),
    ],
    ids=lambda recursion: type(recursion).__name__,
)
def test_rows_of_z_are_not_drawn_again_often(recursion: NoiseRecursion) -> None:
    blocks = Blocks.of(recursion)
    drawn = sum(
        blocks.rounds(block)[1] - blocks.first_row_of_z(block) for block in range(blocks.num_blocks)
    )
    # Row by row, it would be 1000.
    assert drawn / 2000 < 20


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


@_EVERY_MECHANISM
def test_weights_of_mechanisms_that_are_said_to_be_equal_are(factorization: Factorization) -> None:
    _check_distinct_weights(Blocks.of(factorization.noise_recursion()))


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
    ring = np.full(costs.rows_kept(blocks), -1)

    def write(block: int) -> None:
        rounds = np.arange(blocks.starts[block], blocks.starts[block + 1])
        ring[rounds % costs.rows_kept(blocks)] = rounds

    def check(first: int, stop: int) -> None:
        rounds = np.arange(first, stop)
        np.testing.assert_array_equal(ring[rounds % costs.rows_kept(blocks)], rounds)

    write(0)
    for block in range(blocks.num_blocks):
        start, end = int(blocks.starts[block]), int(blocks.starts[block + 1])
        if block + 1 < blocks.num_blocks:
            check(end - blocks.num_earlier_rows(block + 1), end)
            write(block + 1)
            check(end, int(blocks.starts[block + 2]))
        # What is still read in the rounds of this block, if the next one is made in its first.
        check(start, end)


def test_what_blocks_need() -> None:
    banded = Blocks.of(banded_rows(np.tri(300, 5)))
    assert (banded.recursion.num_earlier_rows, banded.recursion.num_state_vectors) == (4, 0)
    assert [banded.num_earlier_rows(block) for block in range(5)] == [0, 1, 2, 4, 4]
    tree = Blocks.of(tree_aggregation(300).noise_recursion())
    assert (tree.recursion.num_earlier_rows, tree.recursion.num_state_vectors) == (0, 10)
    window = Blocks.of(structured(BandedFactorization(np.tri(16)), 2, 3).noise_recursion())
    assert (window.recursion.num_earlier_rows, window.recursion.num_state_vectors) == (0, 3)
    # Blocks from rounds 0, 1, 2, 4 and 8, each with the two rows of Z before it.
    assert [window.first_row_of_z(block) for block in range(5)] == [0, 0, 0, 2, 6]
    dense = Blocks.of(DenseFactorization(np.tri(16)).noise_recursion())
    assert [dense.first_row_of_z(block) for block in range(5)] == [0] * 5
    single = Blocks.of(independent_rows(1))
    assert (single.num_blocks, costs.largest_block(single), costs.rows_kept(single)) == (1, 1, 2)


def test_rows_of_other_classes_or_of_fewer_rounds_are_refused() -> None:
    class Other(BandedNoise):
        pass

    kernel_rows.check_rounds(independent_rows(4), 4)
    with pytest.raises(NotProved, match="4 rounds, and not 5"):
        kernel_rows.check_rounds(independent_rows(4), 5)
    with pytest.raises(NotProved, match="classes"):
        kernel_rows.check_rounds(Other(4, np.ones((1, 1))), 4)
