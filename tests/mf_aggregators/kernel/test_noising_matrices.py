"""Norms of rows against products with the identity, and rows in blocks against recursions."""

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
from mf_aggregators.kernel import noising_matrices
from mf_aggregators.kernel.noising_matrices import Blocks
from mf_aggregators.kernel.rows import (
    DenseNoise,
    NoiseRecursion,
    StateSpaceNoise,
    WindowNoise,
    banded_rows,
    independent_rows,
    toeplitz_rows,
)
from mf_aggregators.linear_algebra.banded_matrices import matrix_from_bands
from mf_aggregators.noise import costs
from tests.examples import examples
from tests.mf_aggregators import random_recursions
from tests.mf_aggregators.small_mechanisms import blt

_NUM_ROUNDS = 300
# Several of the largest blocks, of both sizes.
_LONG_RECURSIONS = random_recursions.recursions(_NUM_ROUNDS)


@given(random_recursions.recursions(max_rounds=40), st.integers(1, 9), st.integers(1, 9))
@settings(deadline=None, max_examples=examples(200))
def test_norms_are_those_of_products_with_the_identity(
    recursion: NoiseRecursion, rows: int, fewest: int
) -> None:
    """However many rows are treated at a time."""
    normalised = recursion.normalised
    with mock.patch.multiple(noising_matrices, _ROWS=rows, _FEWEST_ROWS=fewest):
        found = noising_matrices.row_norms(normalised)
    state = normalised.initial_state((recursion.num_rounds,))
    norms, most = [], np.zeros(normalised.num_state_vectors)
    for unit in np.eye(recursion.num_rounds):
        row, state = random_recursions.next_row(normalised, state, unit)
        norms.append(np.linalg.norm(row))
        vectors = state.history[len(state.history) - len(most) :]
        most = np.maximum(most, np.linalg.norm(vectors, axis=1))
    assert found == pytest.approx(norms, rel=1e-9)
    bounds = noising_matrices.state_vector_norms(normalised)
    if isinstance(normalised, StateSpaceNoise):
        assert bounds == pytest.approx(most, rel=1e-9)
    elif isinstance(normalised, WindowNoise):
        assert np.all(bounds >= most * (1.0 - 1e-9))
    assert bounds.shape == most.shape


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
        DenseNoise(np.tri(2000)),
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
