"""Rounding of noise rows to integers does not add up over rounds, in the state and in files."""

import functools
import os
import pathlib
from collections.abc import Callable

import numpy as np
import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import tensorflow as tf

from mf_aggregators.factorizations import (
    BandedFactorization,
    DenseFactorization,
    Factorization,
    StructuredFactorization,
    banded_inverse,
    blt,
    noise_rows,
    toeplitz,
    tree_aggregation,
)
from mf_aggregators.kernel import draws
from mf_aggregators.kernel.draws import NoiseSource
from mf_aggregators.kernel.integers import IntegerRows
from mf_aggregators.kernel.rows import Blocks, NoiseRecursion
from mf_aggregators.linear_algebra.banded_matrices import matrix_from_bands
from mf_aggregators.tff import rows_on_disk, tensor_rows, tensor_streams
from mf_aggregators.tff.tensor_rows import RowsInState, tile_rows
from mf_aggregators.tff.tensor_streams import TensorNoise

pytestmark = pytest.mark.begun_first

_SEED = np.array([2**62 + 12345, -(2**61) - 999], np.int64)
_WIDTH = 3
_ROUNDS = pytest.mark.parametrize("num_rounds", [500, pytest.param(10_000, marks=pytest.mark.long)])


def _square_root(num_bands: int) -> np.ndarray:
    lags = np.arange(1, num_bands)
    return np.concatenate([[1.0], np.cumprod((2.0 * lags - 1.0) / (2.0 * lags))])


def _scaled_bands(n: int) -> Factorization:
    scales = np.random.default_rng(0).uniform(0.5, 2.0, (n, 1))
    bands = np.where(np.tri(n, 16, dtype=bool), _square_root(16), 0.0)
    return BandedFactorization(bands * scales)


def _structured(n: int) -> Factorization:
    diagonals = np.where(np.tri(n, 4, dtype=bool), _square_root(4), 0.0)
    left = np.exp(np.multiply.outer(np.arange(n), [-1e-3, -1e-4]))
    return StructuredFactorization(diagonals, left, np.array([0.05, 0.01]) / left)


def _dense(n: int) -> Factorization:
    return DenseFactorization(np.tril(matrix_from_bands(np.tile(_square_root(n), (n, 1)))))


# Those whose rows do not draw thousands of rows of Z again, and those that do.
_OF_LINEAR_COST: dict[str, Callable[[int], Factorization]] = {
    "tree_online": tree_aggregation,
    "tree_full": lambda n: tree_aggregation(n, "full"),
    "toeplitz": lambda n: toeplitz(n, 16, coefficients="square_root"),
    "toeplitz of equal norms": lambda n: toeplitz(
        n, 100, coefficients="square_root", equal_column_norms=True
    ),
    "banded": _scaled_bands,
    "blt": lambda n: blt(n, 3),
    "banded_inverse": lambda n: banded_inverse(n, 8, coefficients="square_root"),
    "structured": _structured,
}
# Kinds of recursions that differ; the others are mechanisms of the same kinds.
_KINDS = [
    name if name in ("banded", "blt", "structured") else pytest.param(name, marks=pytest.mark.long)
    for name in _OF_LINEAR_COST
]
_OF_QUADRATIC_COST: dict[str, Callable[[int], Factorization]] = {
    "toeplitz of all bands": lambda n: toeplitz(
        n, coefficients="square_root", equal_column_norms=True
    ),
    "dense": _dense,
}
_MOST_OF_QUADRATIC_COST = 2048


@functools.cache
def _recursion(name: str, num_rounds: int) -> NoiseRecursion:
    if name in _OF_QUADRATIC_COST:
        found = _OF_QUADRATIC_COST[name](min(num_rounds, _MOST_OF_QUADRATIC_COST))
    else:
        found = _OF_LINEAR_COST[name](num_rounds)
    return found.noise_recursion()


@functools.cache
def _z(num_rounds: int) -> np.ndarray:
    rows = tf.function(
        lambda seed: tile_rows(
            NoiseSource.CHACHA20,
            seed,
            tf.zeros([], tf.int64),
            tf.constant(num_rounds),
            tf.zeros([], tf.int64),
            _WIDTH,
            tensor_rows.graph_table(),
        ),
        autograph=False,
    )(tf.constant(_SEED))
    return np.asarray(rows.numpy())


@functools.cache
def _exact(name: str, num_rounds: int) -> np.ndarray:
    recursion = _recursion(name, num_rounds)
    return noise_rows.apply(recursion, _z(num_rounds)[: recursion.num_rounds] * draws.STEP)


def _check(integers: np.ndarray, name: str, num_rounds: int) -> None:
    """Neither rows nor prefix sums, which are what training uses, may drift."""
    exact = _exact(name, num_rounds)
    steps = IntegerRows.of(_recursion(name, num_rounds)).steps
    rows = integers * steps[:, np.newaxis]
    assert np.max(np.abs(rows - exact)) < 2e-7 * np.max(np.abs(exact))
    difference = np.abs(np.cumsum(rows - exact, axis=0))
    assert np.max(difference) < 1e-5 * np.max(np.abs(np.cumsum(exact, axis=0)))


@pytest.mark.long_cases(1)
@pytest.mark.long
@pytest.mark.short_cases(1)
@pytest.mark.parametrize(
    "name",
    [*_KINDS, *(pytest.param(name, marks=pytest.mark.long) for name in _OF_QUADRATIC_COST)],
)
@_ROUNDS
def test_rounding_of_blocks_does_not_add_up(
    name: str, num_rounds: int, tmp_path: pathlib.Path
) -> None:
    """Hundreds of rounds in the blocks of a run, each from files of the one before it."""
    recursion = _recursion(name, num_rounds)
    blocks = Blocks.of(recursion)
    (segment,) = tensor_streams.segments_of((tf.TensorSpec((_WIDTH,), tf.float32),))
    files = rows_on_disk.prepare(
        IntegerRows.of(recursion), blocks, (segment,), NoiseSource.CHACHA20, tmp_path
    )

    @tf.function(autograph=False)
    def make(block: tf.Tensor) -> tf.Tensor:
        made = rows_on_disk._StreamFiles(
            files,
            segment,
            tf.constant(_SEED),
            tf.zeros([2], tf.int64),
            tensor_rows.graph_table(),
        )
        return made.make(block, tf.zeros([], tf.int64))

    rows = np.concatenate(
        [make(tf.constant(block, tf.int64)).numpy() for block in range(blocks.num_blocks)]
    )
    _check(rows, name, num_rounds)


@pytest.mark.long_cases(1)
@pytest.mark.short_cases(1)
@pytest.mark.parametrize("name", _KINDS)
@_ROUNDS
def test_rounding_of_states_does_not_add_up(name: str, num_rounds: int) -> None:
    recursion = _recursion(name, num_rounds)
    store = RowsInState(IntegerRows.of(recursion))
    noise = TensorNoise(store, (tf.TensorSpec((_WIDTH,), tf.float32),))
    next_row = tf.autograph.experimental.do_not_convert(noise.next_row)

    @tf.function
    def run(seed: tf.Tensor) -> tf.Tensor:
        rows = tf.TensorArray(tf.int32, num_rounds)
        state = noise.initial_state(seed, tf.zeros([2], tf.int64))
        for position in tf.range(num_rounds):
            (row,), _, state = next_row(state)
            rows = rows.write(position, row)
        return rows.stack()

    _check(run(tf.constant(_SEED)).numpy(), name, num_rounds)
