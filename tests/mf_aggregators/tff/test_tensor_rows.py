"""Noise rows in TensorFlow: C^-1 Z of every mechanism, from the state and from files.

Most of the files' tests use blocks of two rows at most, so that few rounds have several
blocks and rings of files come round.
"""

import functools
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mf_aggregators.factorizations import Factorization, TreeAggregationFactorization
from mf_aggregators.kernel import draws
from mf_aggregators.kernel.draws import TILE
from mf_aggregators.kernel.integers import IntegerRows, Segment
from mf_aggregators.kernel.rows import BandedNoise, Blocks, NoiseRecursion
from mf_aggregators.noise.places import NoiseCost
from mf_aggregators.tff import tensor_rows
from mf_aggregators.tff.processes import NoiseState
from mf_aggregators.tff.rows_on_disk import RowsOnDisk
from mf_aggregators.tff.tensor_rows import RowsInState, SegmentRows, TensorNoise
from tests.examples import examples
from tests.mf_aggregators import small_mechanisms
from tests.mf_aggregators.random_recursions import toeplitz_rows
from tests.mf_aggregators.statistics_of_noise import check_standard_normal
from tests.refusals import refuses

pytestmark = pytest.mark.begun_first

_NUM_ROUNDS = 9
_SEED = np.array([2**62 + 12345, -(2**61) - 999], np.int64)
_SPECS = (
    tf.TensorSpec((2, 3), tf.float32),
    tf.TensorSpec((), tf.float32),
    tf.TensorSpec((0,), tf.float32),
    tf.TensorSpec((4,), tf.bfloat16),
)
_MIXED_SPECS = (tf.TensorSpec((), tf.float64), *_SPECS, tf.TensorSpec((3,), tf.float64))


_FACTORIZATIONS = small_mechanisms.factorizations(_NUM_ROUNDS)
# Each kind of recursion, and what it is without earlier rows or vectors of its own; the others
# are more mechanisms of the same kinds, whose graphs take seconds to make.
_IN_SHORT = (0, 3, 5, 7, 11, 12, 13, 17)
# On disk one graph reads and writes what any of them has: rows, and vectors as well.
_ON_DISK_IN_SHORT = (3, 13, 17)


def _kinds(in_short: tuple[int, ...]) -> list[Any]:
    return [
        index if index in in_short else pytest.param(index, marks=pytest.mark.long)
        for index in range(len(_FACTORIZATIONS))
    ]


def _id(index: int) -> str:
    return f"{index}-{_FACTORIZATIONS[index].mechanism}"


_EVERY_MECHANISM_ON_DISK = pytest.mark.parametrize("index", _kinds(_ON_DISK_IN_SHORT), ids=_id)
_EVERY_MECHANISM_AND_STORAGE = pytest.mark.parametrize(
    ("index", "storage"),
    [
        pytest.param(index, storage, marks=() if index in in_short else pytest.mark.long)
        for storage, in_short in (("state", _IN_SHORT), ("disk", _ON_DISK_IN_SHORT))
        for index in range(len(_FACTORIZATIONS))
    ],
)
_BOTH_STORAGES = pytest.mark.parametrize("storage", ["state", "disk"])

_Rows = list[list[np.ndarray]]


class _Stream:
    """A stream of noise rows whose graph is traced once."""

    def __init__(
        self, recursion: NoiseRecursion, specs: tuple[tf.TensorSpec, ...], blocks: Blocks | None
    ) -> None:
        """Creates it, with files if there are blocks for them."""
        self.files: RowsOnDisk | None = None
        self.rows = IntegerRows.of(recursion)
        if blocks is not None:
            segments = TensorNoise.layout_of(specs).segments
            self.files = RowsOnDisk.prepared(self.rows, blocks, segments, _directories.new())
        self.noise = TensorNoise(self.files or RowsInState(self.rows), specs)
        self._step = tf.function(self.noise.next_row, autograph=False)
        self._streams = 0

    def start(self, seed: np.ndarray = _SEED) -> NoiseState:
        """The state before the first round of a stream with a new name."""
        self._streams += 1
        name = np.array([self._streams, -self._streams], np.int64)
        return self.noise.initial_state(tf.constant(seed), tf.constant(name))

    def next_row(self, state: NoiseState) -> tuple[list[np.ndarray], NoiseState]:
        i = int(state.round_index)
        row, step, state = self._step(state)
        assert step.numpy() == self.rows.steps[i]
        return [tensor.numpy() for tensor in row], state

    def all_rows(self, state: NoiseState) -> tuple[_Rows, list[NoiseState]]:
        """All rows, and the state before each of them and after the last."""
        rows, states = [], [state]
        for _ in range(self.noise.recursion.num_rounds):
            row, state = self.next_row(state)
            rows.append(row)
            states.append(state)
        return rows, states

    @functools.cached_property
    def expected(self) -> _Rows:
        """The rows of ``_SEED`` that are made if nothing happens to the files."""
        return self.all_rows(self.start())[0]

    def directory(self, state: NoiseState) -> pathlib.Path:
        """Where the files of the state's stream are."""
        assert self.files is not None
        first, second = state.stream.numpy()
        return pathlib.Path(self.files.directory) / f"stream-{first}-{second}"


class _Directories:
    """New directories below one that the module's tests share."""

    def __init__(self) -> None:
        self.root: pathlib.Path | None = None
        self._count = 0

    def new(self) -> pathlib.Path:
        assert self.root is not None
        self._count += 1
        directory = self.root / str(self._count)
        directory.mkdir()
        return directory


_directories = _Directories()


@pytest.fixture(scope="module", autouse=True)
def _shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    _directories.root = tmp_path_factory.mktemp("noise")
    yield
    # Graphs go while Python is still whole: later, TensorFlow complains.
    _stream.cache_clear()


def _small_blocks(recursion: NoiseRecursion, largest: int = 2) -> Blocks:
    n = recursion.num_rounds
    starts = [0, *range(1, n, largest), n]
    return Blocks(recursion, np.array(starts, np.int64))


@functools.cache
def _stream(index: int, storage: str) -> _Stream:
    """The stream of a mechanism of ``_FACTORIZATIONS``."""
    recursion = _FACTORIZATIONS[index].noise_recursion()
    blocks = _small_blocks(recursion) if storage == "disk" else None
    return _Stream(recursion, _SPECS, blocks)


def _inverse(factorization: Factorization) -> np.ndarray:
    if isinstance(factorization, TreeAggregationFactorization):
        # Its stream draws one row of Z a round: a square matrix of its own.
        return factorization.noise_rows(np.eye(factorization.num_rounds))
    return np.linalg.inv(factorization.strategy_matrix())


def _z(seed: np.ndarray, num_rounds: int, first: int, size: int) -> np.ndarray:
    """Rows of Z by NumPy's definition, in steps."""
    return np.array([draws.integers(seed, i, first, size) for i in range(num_rounds)])


def _check_rows(stream: _Stream, rows: _Rows, seed: np.ndarray) -> None:
    """Checks rows against NumPy's of the same seed, bit for bit."""
    for segment in stream.noise.segments:
        history = tuple(np.zeros((stream.rows.recursion.num_state_vectors, segment.size)))
        for i, row in enumerate(rows):
            z = segment.row_of_z(seed, i)
            expected, history = stream.rows.next_row(i, history, z)
            found = np.concatenate([row[position].ravel() for position in segment.positions])
            np.testing.assert_array_equal(found, expected)
    for tensor, spec in zip(rows[0], stream.noise.specs, strict=True):
        assert (tensor.shape, tensor.dtype) == (tuple(spec.shape), np.int32)


def _assert_same(row: list[np.ndarray], expected: list[np.ndarray]) -> None:
    """Bit for bit."""
    for tensor, other in zip(row, expected, strict=True):
        np.testing.assert_array_equal(tensor, other)


@pytest.mark.long_cases(2)
@pytest.mark.short_cases(2)
@_EVERY_MECHANISM_AND_STORAGE
def test_rows_are_those_of_the_dense_product(index: int, storage: str) -> None:
    stream = _stream(index, storage)
    seed = np.array([-7, 2**63 - 5], np.int64)
    rows, states = stream.all_rows(stream.start(seed))
    assert [int(state.round_index) for state in states] == list(range(_NUM_ROUNDS + 1))
    # Eleven float32 entries, in order, from coordinate 0.
    z = _z(seed, _NUM_ROUNDS, 0, 11) * draws.STEP
    expected = _inverse(_FACTORIZATIONS[index]) @ z
    found = np.array([np.concatenate([tensor.ravel() for tensor in row]) for row in rows])
    found = found * stream.rows.steps[:, np.newaxis]
    np.testing.assert_allclose(found, expected, rtol=0.0, atol=1e-6)
    _check_rows(stream, rows, seed)


@pytest.mark.long_cases(1)
@pytest.mark.short_cases(1)
@pytest.mark.parametrize(
    "index",
    [2, pytest.param(13, marks=pytest.mark.long)],
    ids=_id,
)
@_BOTH_STORAGES
def test_rows_of_more_than_one_tile(index: int, storage: str) -> None:
    recursion = small_mechanisms.factorizations(4)[index].noise_recursion()
    specs = (
        tf.TensorSpec((70_000,), tf.float32),
        tf.TensorSpec((), tf.float64),
        tf.TensorSpec((0, 3), tf.float64),
        tf.TensorSpec((2, 5), tf.float16),
        tf.TensorSpec((66_000,), tf.float64),
    )
    blocks = _small_blocks(recursion) if storage == "disk" else None
    stream = _Stream(recursion, specs, blocks)
    rows, _ = stream.all_rows(stream.start())
    _check_rows(stream, rows, _SEED)


# What can happen to files between two rounds.
_EVENTS = st.one_of(
    st.just("nothing"),
    st.just("delete all"),
    st.tuples(st.just("go back"), st.integers(0, 2**32 - 1)),
    st.just("older files"),
    st.tuples(st.sampled_from(["delete", "empty", "cut off", "damage"]), st.integers(0, 2**32 - 1)),
)


def _happen(event: Any, directory: pathlib.Path) -> None:
    """Does something to the files of a stream."""
    if event == "delete all":
        shutil.rmtree(directory, ignore_errors=True)
    if not isinstance(event, tuple):
        return
    what, seed = event
    if what == "go back":
        return
    generator = np.random.default_rng(seed)
    share = generator.choice([0.1, 0.5, 0.9])
    for file in sorted(directory.rglob("*")):
        if not file.is_file() or generator.uniform() > share:
            continue
        contents = bytearray(file.read_bytes())
        if what == "delete":
            file.unlink()
        elif what == "empty":
            file.write_bytes(b"")
        elif what == "cut off":
            file.write_bytes(contents[: generator.integers(0, len(contents) + 1)])
        elif contents:
            contents[generator.integers(0, len(contents))] ^= 1 << generator.integers(0, 8)
            file.write_bytes(contents)


@pytest.mark.long_cases(2)
@_EVERY_MECHANISM_ON_DISK
@given(events=st.lists(_EVENTS, min_size=1, max_size=2 * _NUM_ROUNDS))
@example(events=["delete all"] * _NUM_ROUNDS)
@example(events=["nothing", "delete all"] * _NUM_ROUNDS)
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_whatever_happens_to_the_files_rows_stay_the_same(index: int, events: list[Any]) -> None:
    stream = _stream(index, "disk")
    state = stream.start()
    directory = stream.directory(state)
    states = [state]
    older = directory.with_name(directory.name + "-older")
    for event in (*events, *["nothing"] * _NUM_ROUNDS):
        if event[0] == "go back":
            state = states[event[1] % len(states)]
        if event == "older files" and directory.exists():
            # The first such event copies the files; the next one restores the copy, as a backup.
            if older.exists():
                shutil.rmtree(directory)
                older.rename(directory)
            else:
                shutil.copytree(directory, older)
        _happen(event, directory)
        i = int(state.round_index)
        if i == _NUM_ROUNDS:
            continue
        row, state = stream.next_row(state)
        _assert_same(row, stream.expected[i])
        if len(states) == i + 1:
            states.append(state)
    for path in (directory, older):
        shutil.rmtree(path, ignore_errors=True)


@pytest.mark.long_cases(4)
@_EVERY_MECHANISM_ON_DISK
def test_rows_are_files_of_a_bounded_number(index: int) -> None:
    stream = _stream(index, "disk")
    assert stream.files is not None
    blocks = stream.files.blocks
    state = stream.start()
    for _ in range(_NUM_ROUNDS):
        _, state = stream.next_row(state)
        (tile,) = stream.directory(state).iterdir()
        names = [path.name for path in tile.iterdir()]
        assert sum(name.startswith("row") for name in names) <= NoiseCost.rows_kept(blocks)
        assert sum(name.startswith("state") for name in names) <= 4
        assert all(name.startswith(("row", "state")) for name in names)
    assert (
        NoiseCost.rows_kept(blocks) < _NUM_ROUNDS
        or blocks.recursion.num_earlier_rows >= _NUM_ROUNDS - 3
    )


def test_streams_in_one_directory_do_not_mix() -> None:
    """With names whose digits run together, of other seeds, in turns."""
    stream = _stream(3, "disk")
    names = [(1, 23), (12, 3), (-1, 23), (1, -23), (2**63 - 1, -(2**63)), (23, 1)]
    seeds = [np.array([number, 5], np.int64) for number in range(len(names))]
    states = [
        stream.noise.initial_state(tf.constant(seed), tf.constant(name, tf.int64))
        for seed, name in zip(seeds, names, strict=True)
    ]
    rows: list[_Rows] = [[] for _ in names]
    for _ in range(_NUM_ROUNDS):
        for number in range(len(names)):
            row, states[number] = stream.next_row(states[number])
            rows[number].append(row)
    for of_stream, seed in zip(rows, seeds, strict=True):
        _check_rows(stream, of_stream, seed)


def test_files_of_another_stream_are_none_wherever_they_are() -> None:
    """A backup that is put back into the wrong directory."""
    stream = _stream(3, "disk")
    ours, theirs = stream.start(), stream.start(np.array([3, 5], np.int64))
    _, after = stream.next_row(theirs)
    stream.next_row(after)
    shutil.copytree(stream.directory(theirs), stream.directory(ours))
    _check_rows(stream, stream.all_rows(ours)[0], _SEED)


def test_recursions_in_one_directory_do_not_mix(tmp_path: pathlib.Path) -> None:
    """Nor layouts or blocks: each has files of its own, and the same ones again."""
    recursion = _FACTORIZATIONS[3].noise_recursion()
    toeplitz_noise = _FACTORIZATIONS[8].noise_recursion()
    assert isinstance(toeplitz_noise, BandedNoise)
    other = toeplitz_rows(_NUM_ROUNDS, toeplitz_noise.bands[0] * [1.0, 1.0, 1.1])
    of_specs = TensorNoise.layout_of(_SPECS).segments
    cases = [
        (Blocks.of(recursion), of_specs),
        (_small_blocks(recursion), of_specs),
        (Blocks.of(recursion), TensorNoise.layout_of(_MIXED_SPECS).segments),
        (Blocks.of(recursion), TensorNoise.layout_of(_SPECS[:2]).segments),
        (Blocks.of(toeplitz_noise), of_specs),
        (Blocks.of(other), of_specs),
    ]

    def directories() -> list[str]:
        return [
            RowsOnDisk.prepared(
                IntegerRows.of(blocks.recursion), blocks, segments, tmp_path
            ).directory
            for blocks, segments in cases
        ]

    found = directories()
    assert len(set(found)) == len(cases)
    assert directories() == found
    assert all(pathlib.Path(directory).parent == tmp_path for directory in found)
    assert {pathlib.Path(directory).stat().st_mode & 0o777 for directory in found} == {0o700}


@pytest.mark.long
def test_weights_are_made_whole_again_when_a_run_is_resumed() -> None:
    recursion = _FACTORIZATIONS[3].noise_recursion()
    stream = _Stream(recursion, _SPECS, _small_blocks(recursion))
    files = stream.files
    assert files is not None
    rows, _ = stream.all_rows(stream.start())
    for contents in (b"", bytes(8)):
        for path in files.transitions:
            pathlib.Path(path).write_bytes(contents)
        again = RowsOnDisk.prepared(
            files.rows,
            files.blocks,
            stream.noise.segments,
            pathlib.Path(files.directory).parent,
        )
        assert again.transitions == files.transitions
        for row, expected in zip(stream.all_rows(stream.start())[0], rows, strict=True):
            _assert_same(row, expected)
    names = {path.name for path in pathlib.Path(files.directory).iterdir() if path.is_file()}
    assert names == {pathlib.Path(path).name for path in files.transitions}


@pytest.mark.parametrize(
    "index",
    [3, 13, *(pytest.param(index, marks=pytest.mark.long) for index in (5, 11))],
    ids=_id,
)
def test_damaged_weights_give_no_rows(index: int) -> None:
    """Rather than those of another matrix."""
    stream = _stream(index, "disk")
    files = stream.files
    assert files is not None
    # Of the second block, since nothing comes before the first.
    path = pathlib.Path(files.transitions[1])
    whole = path.read_bytes()
    try:
        for damaged in (whole[:-1], b"", bytes(len(whole)), whole[:-1] + b"\1", whole + whole):
            path.write_bytes(damaged)
            with refuses("weights", error=tf.errors.InvalidArgumentError):
                stream.next_row(stream.start())
    finally:
        path.write_bytes(whole)
    _assert_same(stream.next_row(stream.start())[0], stream.expected[0])


@pytest.mark.long
def test_every_round_makes_its_share_of_the_next_block() -> None:
    """The row has five tiles, and no round has to wait for a whole block of a large model."""
    recursion = toeplitz_rows(20, np.array([2.0, 1.0]))
    specs = (tf.TensorSpec((4 * draws.TILE + 1,), tf.float32),)
    blocks = Blocks(recursion, np.array([0, 1, 2, 4, 8, 12, 20], np.int64))
    # So many that no file is written over in the rounds that are looked at.
    assert NoiseCost.rows_kept(blocks) == 16
    stream = _Stream(recursion, specs, blocks)
    state = stream.start()
    made = []
    for _ in range(8):
        _, state = stream.next_row(state)
        made.append(sum(1 for _ in stream.directory(state).rglob("row-*")))
    # The first two blocks at once, then those of 2, 4 and 4 rows in 1, 2 and 4 rounds.
    assert np.diff([0, *made]).tolist() == [5 * 2, 5 * 2, 2 * 4, 3 * 4, 4, 4, 4, 2 * 4]


# Rows of Z in TensorFlow: those that NumPy draws, bit for bit.


_HALF = TILE // 2
_INT64 = st.one_of(
    st.integers(-(2**63), 2**63 - 1), st.sampled_from([0, 1, -1, 2**63 - 1, -(2**63)])
)


@functools.cache
def _drawer(width: int, num_rows: int | None) -> Callable[..., tf.Tensor]:
    """A graph of ``SegmentRows.of_z``; ``num_rows`` is None for a number that is a tensor."""

    def draw(seed: tf.Tensor, first_row: tf.Tensor, tile: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
        rows_of_noise = IntegerRows.of(BandedNoise(1))
        drawn = SegmentRows(rows_of_noise, Segment("float32", 0, width, (0,)), seed)
        return drawn.of_z(tile, first_row, rows if num_rows is None else num_rows)

    return tf.function(draw, autograph=False)


@pytest.fixture(scope="module", autouse=True)
def _graphs() -> Iterator[None]:
    """Lets graphs go while Python is still whole: later, TensorFlow complains."""
    yield
    _drawer.cache_clear()


def _drawn(
    seed: np.ndarray,
    first_row: int,
    num_rows: int,
    tile: int,
    width: int,
    is_dynamic: bool = True,
) -> np.ndarray:
    draw = _drawer(width, None if is_dynamic else num_rows)
    rows = draw(
        tf.constant(seed, tf.int64),
        tf.constant(first_row, tf.int64),
        tf.constant(tile, tf.int64),
        tf.constant(num_rows, tf.int32),
    ).numpy()
    assert (rows.shape, rows.dtype) == ((num_rows, width), np.int64)
    return np.asarray(rows)


@pytest.mark.parametrize(
    "width", [17, TILE, *(pytest.param(each, marks=pytest.mark.long) for each in (1, TILE - 1))]
)
def test_rows_are_those_of_numpy_at_every_width(width: int) -> None:
    for is_dynamic, num_rows in ((False, 1), (True, 2)):
        rows = _drawn(_SEED, 5, num_rows, 3, width, is_dynamic)
        expected = [draws.integers(_SEED, 5 + row, 3 * TILE, width) for row in range(num_rows)]
        np.testing.assert_array_equal(rows, expected)


@given(
    seed=st.tuples(_INT64, _INT64),
    first_row=st.one_of(st.integers(0, 20), st.integers(0, 2**63 - 20)),
    num_rows=st.integers(0, 5),
    tile=st.one_of(st.integers(0, 20), st.integers(0, 2**39)),
)
@settings(max_examples=examples(60), deadline=None)
def test_rows_are_those_of_numpy_for_every_seed_row_and_tile(
    seed: tuple[int, int], first_row: int, num_rows: int, tile: int
) -> None:
    array = np.array(seed, np.int64)
    rows = _drawn(array, first_row, num_rows, tile, 7)
    for row in range(num_rows):
        expected = draws.integers(array, first_row + row, tile * TILE, 7)
        np.testing.assert_array_equal(rows[row], expected)


@pytest.mark.parametrize("width", [5, 200])
def test_ties_have_the_words_that_numpy_gives_them(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where everything ties: 15 ties, more than are prepared for, and 600."""
    packed, original = draws.table().packed, draws._random_blocks
    # A column that is not its own alias, so that the words of ties matter.
    column = next(i for i in range(2**15, 2**16) if int(packed[i]) & 0xFFFF != i)
    tying = (int(packed[column]) & 0xFFFF0000) | column

    def tying_blocks(seed: np.ndarray, row: int, block: int, count: int) -> np.ndarray:
        if block < draws.FIRST_TIE_BLOCK:
            return np.full((count, 16), tying, np.uint32)
        return original(seed, row, block, count)

    graph_blocks = tensor_rows.chacha20

    def tying_graph(seed: tf.Tensor, row: tf.Tensor, *ranges: Any) -> list[tf.Tensor]:
        drawn = graph_blocks(seed, row, *ranges)
        first = [tf.fill(tf.shape(drawn[0]), tf.constant(tying, tf.uint32))]
        return [*first, *drawn[1:]] if len(drawn) > 1 else drawn

    monkeypatch.setattr(draws, "_random_blocks", tying_blocks)
    monkeypatch.setattr(tensor_rows, "chacha20", tying_graph)
    _drawer.cache_clear()
    rows = _drawn(_SEED, 4, 2, 3, width)
    _drawer.cache_clear()
    expected = [draws.integers(_SEED, 4 + row, 3 * TILE, width) for row in range(2)]
    np.testing.assert_array_equal(rows, expected)
    assert len(np.unique(rows)) > 2


def test_coordinates_of_a_row_are_independent_standard_normals() -> None:
    """Halves, rows and tiles against each other; 1e-7 false alarms each."""
    seed = np.frombuffer(os.urandom(16), np.int64)
    rows = np.concatenate([_drawn(seed, 7, 3, tile, TILE) for tile in (0, 1)])
    rows = rows * draws.STEP
    check_standard_normal(rows.reshape(-1, 64))
    check_standard_normal(rows.reshape(12, _HALF).T)
