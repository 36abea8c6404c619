"""What noise costs by its storage: counted against real states and files, and the choice."""

import pathlib

import numpy as np
import pytest
import tensorflow as tf

from mf_aggregators.factorizations import (
    BandedFactorization,
    DenseFactorization,
    Factorization,
    StructuredFactorization,
    banded_inverse,
    identity,
    toeplitz,
    tree_aggregation,
)
from mf_aggregators.factorizations.noise_rows import dense_rows
from mf_aggregators.kernel.integers import IntegerRows
from mf_aggregators.kernel.rows import (
    BandedNoise,
    Blocks,
    NoiseRecursion,
    StateSpaceNoise,
    WindowNoise,
)
from mf_aggregators.noise import costs
from mf_aggregators.noise.costs import NoiseStorage
from mf_aggregators.tff import rows_on_disk, tensor_rows
from mf_aggregators.tff.rows_on_disk import RowsOnDisk
from tests.mf_aggregators.random_recursions import toeplitz_rows
from tests.mf_aggregators.small_mechanisms import blt
from tests.refusals import refuses

# So many that all files of a ring are there.
_NUM_ROUNDS = 300
_QUICKSTART_ROUNDS = 100
_LARGE = 4_000_000


def _factorizations() -> list[Factorization]:
    n = _NUM_ROUNDS
    diagonals = np.where(np.tri(n, 2, dtype=bool), [1.0, 0.5], 0.0)
    return [
        identity(n),
        BandedFactorization(np.tri(n, 4)),
        toeplitz(n, 24, coefficients="square_root"),
        tree_aggregation(n),
        blt(n, 3),
        banded_inverse(n, 8, coefficients="square_root"),
        StructuredFactorization(diagonals, np.ones((n, 2)), np.full((n, 2), 1e-3)),
        DenseFactorization(np.tri(n)),
    ]


_EVERY_MECHANISM = pytest.mark.parametrize(
    "factorization", _factorizations(), ids=lambda factorization: factorization.mechanism
)


def _files_bytes(recursion: NoiseRecursion, size: int, directory: pathlib.Path) -> int:
    """The bytes of all files that a run has at its end, weights included."""
    blocks = Blocks.of(recursion)
    (segment,) = tensor_rows.layout_of((tf.TensorSpec((size,), tf.float32),)).segments
    files = RowsOnDisk.prepared(IntegerRows.of(recursion), blocks, (segment,), directory)

    @tf.function(autograph=False)
    def make(block: tf.Tensor, tile: tf.Tensor) -> tf.Tensor:
        nothing, table = tf.zeros([2], tf.int64), tensor_rows.graph_table()
        return rows_on_disk._StreamFiles(files, segment, nothing, nothing, table).make(block, tile)

    for block in range(blocks.num_blocks):
        for tile in range(segment.num_tiles):
            make(tf.constant(block, tf.int64), tf.constant(tile, tf.int64))
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


@pytest.mark.long_cases(3)
@pytest.mark.short_cases(1)
@_EVERY_MECHANISM
def test_files_of_small_models_take_no_more_than_said(
    factorization: Factorization, tmp_path: pathlib.Path
) -> None:
    """Their files are small, but for what each begins with."""
    recursion = factorization.noise_recursion()
    cost = costs.NoiseCost.of_run([recursion], 50, NoiseStorage.DISK)
    assert cost.storage is NoiseStorage.DISK
    assert cost.state_bytes == 0
    assert _files_bytes(recursion, 50, tmp_path) <= cost.disk_bytes


def _dense(num_rounds: int) -> WindowNoise:
    return dense_rows(np.tri(num_rounds))


@pytest.mark.parametrize(
    ("recursion", "num_parameters", "expected"),
    [
        (blt(2000, 2).noise_recursion(), 10_000, NoiseStorage.STATE),
        (blt(2000, 2).noise_recursion(), _LARGE, NoiseStorage.DISK),
        # Measured in TFF: 14 and 18 ms a round, 25 and 17 ms, 530 and 25 ms.
        (toeplitz_rows(_QUICKSTART_ROUNDS, np.ones(25)), 100, NoiseStorage.STATE),
        (toeplitz_rows(_QUICKSTART_ROUNDS, np.ones(25)), 10_000, NoiseStorage.DISK),
        (toeplitz_rows(_QUICKSTART_ROUNDS, np.ones(25)), 100_000, NoiseStorage.DISK),
        (toeplitz_rows(2000, np.ones(24)), _LARGE, NoiseStorage.DISK),
        (toeplitz_rows(2000, np.ones(1)), _LARGE, NoiseStorage.STATE),
        (tree_aggregation(2048).noise_recursion(), _LARGE, NoiseStorage.DISK),
        (BandedNoise(2000), 1, NoiseStorage.STATE),
        (BandedNoise(2000), 100_000, NoiseStorage.STATE),
        (BandedNoise(2000), _LARGE, NoiseStorage.STATE),
        (BandedNoise(2000), 10**9, NoiseStorage.STATE),
        (_dense(16), 1, NoiseStorage.STATE),
        (_dense(16), 5_000, NoiseStorage.STATE),
        (_dense(2052), 1, NoiseStorage.DISK),
        (_dense(2052), 100_000, NoiseStorage.DISK),
    ],
    ids=lambda value: value.name if isinstance(value, NoiseStorage) else None,
)
def test_the_storage_is_chosen_by_what_it_costs(
    recursion: NoiseRecursion, num_parameters: int, expected: NoiseStorage
) -> None:
    choice = costs.NoiseCost.of_run([recursion], num_parameters)
    assert choice.storage is expected
    assert choice == costs.NoiseCost.of_run([recursion], num_parameters, expected)


@pytest.mark.parametrize("num_parameters", [1, 1000, 100_000, _LARGE, 10**9])
@pytest.mark.parametrize("num_rounds", [1, 100, 2000])
def test_a_choice_never_is_a_state_that_does_not_fit(num_parameters: int, num_rounds: int) -> None:
    recursions: list[NoiseRecursion] = [
        BandedNoise(num_rounds),
        toeplitz_rows(num_rounds, np.ones(num_rounds // 2 + 1)),
        banded_inverse(num_rounds, 1, coefficients="square_root").noise_recursion(),
        tree_aggregation(num_rounds).noise_recursion(),
        _dense(num_rounds),
    ]
    for recursion in recursions:
        choice = costs.NoiseCost.of_run([recursion], num_parameters)
        assert choice.state_bytes <= costs._CHEAP_STATE_IN_BYTES
        assert choice.seconds_per_round > 0.0
        state, disk = (
            costs._cost(recursion, num_parameters, storage)
            for storage in (NoiseStorage.STATE, NoiseStorage.DISK)
        )
        state_fits = costs._fits_in_graph(recursion) and (
            state.state_bytes <= costs._CHEAP_STATE_IN_BYTES
        )
        # The cheaper of the two, by its time.
        fitting = [state, disk] if state_fits else [disk]
        assert choice.seconds_per_round == min(each.seconds_per_round for each in fitting)


def test_an_extended_run_keeps_its_noise_where_it_was() -> None:
    first, whole = BandedNoise(8), tree_aggregation(1024).noise_recursion()
    assert costs.NoiseCost.of_run([first], _LARGE).storage is NoiseStorage.STATE
    assert costs.NoiseCost.of_run([whole], _LARGE).storage is NoiseStorage.DISK
    for before, expected in ((first, NoiseStorage.STATE), (whole, NoiseStorage.DISK)):
        found = costs.NoiseCost.of_run([before, whole], _LARGE, NoiseStorage.AUTO)
        assert found == costs.NoiseCost.of_run([whole], _LARGE, expected)


def test_a_state_that_is_too_large_is_refused() -> None:
    costs.NoiseCost.of_run([_dense(2052)], 10, NoiseStorage.DISK)
    for recursion, size, words in (
        (tree_aggregation(1024).noise_recursion(), 100 * _LARGE, "GiB of server state"),
        (_dense(2052), 10, "too large to be put into a graph"),
    ):
        with refuses("noise_storage='disk'", words):
            costs.NoiseCost.of_run([recursion], size, NoiseStorage.STATE)


def test_large_tables_do_not_fit_in_a_graph() -> None:
    assert not costs._fits_in_graph(_dense(2052))
    assert costs._fits_in_graph(_dense(256))
    assert costs._fits_in_graph(BandedNoise(10**9))
    none = np.empty((3000, 0))
    assert costs._fits_in_graph(WindowNoise(3000, np.ones((1, 3000)), none, none))
    assert not costs._fits_in_graph(WindowNoise(3000, np.ones((3000, 3000)), none, none))
    for n, fits in ((1000, True), (10_000_000, False)):
        rounds, table = np.zeros(n, np.int64), np.zeros((1, 2))
        recursion = StateSpaceNoise(rounds, np.ones(1), table, table.astype(np.int64), table, table)
        assert costs._fits_in_graph(recursion) == fits
