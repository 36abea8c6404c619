"""What noise costs by its storage: counted against real states and files, and the choice.

The directory of noise rows is for its owner alone, with room enough, and gone if temporary. The
record of sums is there, as both aggregators write it;
``privacy.test_statements_of_aggregators`` has whole runs.
"""

import hashlib
import os
import pathlib
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from typing import NamedTuple

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
from mf_aggregators.kernel.release import ReleaseRecord
from mf_aggregators.kernel.rows import (
    BandedNoise,
    Blocks,
    NoiseRecursion,
    StateSpaceNoise,
    WindowNoise,
)
from mf_aggregators.noise import places
from mf_aggregators.noise.places import NoiseStorage, RecordError, ReleasedSums
from mf_aggregators.tff import rows_on_disk
from mf_aggregators.tff.rows_on_disk import RowsOnDisk
from mf_aggregators.tff.tensor_rows import SegmentRows, TensorNoise
from tests.mf_aggregators.random_recursions import toeplitz_rows
from tests.mf_aggregators.small_mechanisms import blt
from tests.refusals import refuses

# So many that all files of a ring are there.
_NUM_ROUNDS = 300
_QUICKSTART_ROUNDS = 100
_LARGE = 4_000_000
_SPARE = 64 << 20
_STREAM, _NOISE = "stream--3-4", b"n" * 32


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
    (segment,) = TensorNoise.layout_of((tf.TensorSpec((size,), tf.float32),)).segments
    files = RowsOnDisk.prepared(IntegerRows.of(recursion), blocks, (segment,), directory)

    @tf.function(autograph=False)
    def make(block: tf.Tensor, tile: tf.Tensor) -> tf.Tensor:
        nothing = tf.zeros([2], tf.int64)
        drawn = SegmentRows(files.rows, segment, nothing)
        return rows_on_disk._StreamFiles(files, drawn, nothing).make(block, tile)

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
    cost = places.NoiseCost.of_run([recursion], 50, NoiseStorage.DISK)
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
    choice = places.NoiseCost.of_run([recursion], num_parameters)
    assert choice.storage is expected
    assert choice == places.NoiseCost.of_run([recursion], num_parameters, expected)


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
        choice = places.NoiseCost.of_run([recursion], num_parameters)
        assert choice.state_bytes <= places._CHEAP_STATE_IN_BYTES
        assert choice.seconds_per_round > 0.0
        state, disk = (
            places._cost(recursion, num_parameters, storage)
            for storage in (NoiseStorage.STATE, NoiseStorage.DISK)
        )
        state_fits = places._fits_in_graph(recursion) and (
            state.state_bytes <= places._CHEAP_STATE_IN_BYTES
        )
        # The cheaper of the two, by its time.
        fitting = [state, disk] if state_fits else [disk]
        assert choice.seconds_per_round == min(each.seconds_per_round for each in fitting)


def test_an_extended_run_keeps_its_noise_where_it_was() -> None:
    first, whole = BandedNoise(8), tree_aggregation(1024).noise_recursion()
    assert places.NoiseCost.of_run([first], _LARGE).storage is NoiseStorage.STATE
    assert places.NoiseCost.of_run([whole], _LARGE).storage is NoiseStorage.DISK
    for before, expected in ((first, NoiseStorage.STATE), (whole, NoiseStorage.DISK)):
        found = places.NoiseCost.of_run([before, whole], _LARGE, NoiseStorage.AUTO)
        assert found == places.NoiseCost.of_run([whole], _LARGE, expected)


def test_a_state_that_is_too_large_is_refused() -> None:
    places.NoiseCost.of_run([_dense(2052)], 10, NoiseStorage.DISK)
    for recursion, size, words in (
        (tree_aggregation(1024).noise_recursion(), 100 * _LARGE, "GiB of server state"),
        (_dense(2052), 10, "too large for a graph"),
    ):
        with refuses("noise_storage='disk'", words):
            places.NoiseCost.of_run([recursion], size, NoiseStorage.STATE)


def test_large_tables_do_not_fit_in_a_graph() -> None:
    assert not places._fits_in_graph(_dense(2052))
    assert places._fits_in_graph(_dense(256))
    assert places._fits_in_graph(BandedNoise(10**9))
    none = np.empty((3000, 0))
    assert places._fits_in_graph(WindowNoise(3000, np.ones((1, 3000)), none, none))
    assert not places._fits_in_graph(WindowNoise(3000, np.ones((3000, 3000)), none, none))
    for n, fits in ((1000, True), (10_000_000, False)):
        rounds, table = np.zeros(n, np.int64), np.zeros((1, 2))
        recursion = StateSpaceNoise(rounds, np.ones(1), table, table.astype(np.int64), table, table)
        assert places._fits_in_graph(recursion) == fits


class _Usage(NamedTuple):
    total: int
    used: int
    free: int


def _mode(path: pathlib.Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(params=[0o000, 0o022, 0o077], ids=oct)
def _umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


@pytest.mark.usefixtures("_umask")
def test_new_directories_are_private_whatever_the_umask_is(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a" / "b" / "noise"
    directory = places.open_directory(path)
    assert directory == path
    assert _mode(directory) == 0o700


@pytest.mark.parametrize("mode", [0o701, 0o702, 0o704, 0o710, 0o720, 0o740, 0o755, 0o777], ids=oct)
def test_directories_that_others_may_use_are_refused(mode: int, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "noise"
    path.mkdir()
    path.chmod(mode)
    with refuses(str(path), "chmod 700"):
        places.open_directory(path)
    path.chmod(0o700)
    assert places.open_directory(path) == path


def test_directories_of_others_are_refused(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = places.open_directory(tmp_path / "noise")
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with refuses(str(path), f"chown {user + 1} {path} and chmod 700"):
        places.open_directory(path)


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o644, 0o666], ids=oct)
def test_files_that_others_may_read_are_refused(mode: int, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "state.npz"
    path.write_text("seed")
    path.chmod(mode)
    with refuses("the state", f"chmod 600 {path}"):
        places.check_private(path, "the state")
    path.chmod(0o600)
    places.check_private(path, "the state")


@pytest.mark.parametrize("character", list("*?[]\\"))
def test_paths_that_graphs_take_for_patterns_are_refused(
    character: str, tmp_path: pathlib.Path
) -> None:
    with refuses("noise_directory"):
        places.open_directory(tmp_path / f"noise{character}1" / "rows")
    assert not list(tmp_path.iterdir())


_SCRIPT = """
import pathlib, sys
from mf_aggregators.kernel.release import ReleaseRecord
from mf_aggregators.noise import places
from mf_aggregators.noise.places import RecordError, ReleasedSums
parent = pathlib.Path(sys.argv[1])
directory = places.open_directory(None)
(directory / "deep").mkdir()
(directory / "deep" / "file").write_text("noise")
print(directory)
kept = places.open_directory(parent / "kept")
(kept / "file").write_text("noise")
if sys.argv[2] == "error":
    raise RuntimeError("as training may end")
"""


@pytest.mark.parametrize("end", ["normal", "error"])
def test_temporary_directories_go_when_python_ends(end: str, tmp_path: pathlib.Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    process = subprocess.run(
        [sys.executable, "-c", _SCRIPT, os.fspath(tmp_path), end],
        env={**os.environ, "TMPDIR": os.fspath(temporary)},
        cwd=pathlib.Path(places.__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ("as training may end" in process.stderr) == (end == "error"), process.stderr
    directory = pathlib.Path(process.stdout.strip())
    assert directory.parent == temporary
    assert directory.name.startswith("mf_aggregators-noise-")
    assert not directory.exists()
    assert (tmp_path / "kept" / "file").read_text() == "noise"


def _disk_with(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: _Usage(10 * free, 9 * free, free))


def test_room_is_what_is_free_but_for_a_reserve(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _disk_with(monkeypatch, 3_000_000_000 + _SPARE)
    places._check_room(tmp_path, 3_000_000_000)
    with refuses("3.0 GB", "noise_directory"):
        places._check_room(tmp_path, 3_000_000_001)
    with refuses("5.4 GB"):
        places._check_room(tmp_path, 5_432_109_876)
    _disk_with(monkeypatch, 1000)
    with refuses("0.0 GB"):
        places._check_room(tmp_path, 1)


def test_files_that_are_already_there_count_as_room(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is resumed writes over its own."""
    _disk_with(monkeypatch, _SPARE + 100)
    (tmp_path / "deep" / "deeper").mkdir(parents=True)
    (tmp_path / "deep" / "deeper" / "row").write_bytes(bytes(70))
    (tmp_path / "row").write_bytes(bytes(30))
    places._check_room(tmp_path, 200)
    with refuses("GB"):
        places._check_room(tmp_path, 201)


def _write(tmp_path: pathlib.Path, name: str) -> None:
    path = tmp_path / "released" / _STREAM / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


def test_files_and_folders_are_read_alike(tmp_path: pathlib.Path) -> None:
    assert places.ReleasedSums.streams(tmp_path) == []
    record = ReleaseRecord(tmp_path)
    record.check(_STREAM, 10, b"s" * 32, _NOISE)
    record.spend(_STREAM, 2)
    name = f"-12.7.{_NOISE.hex()}"
    _write(tmp_path, f"round-0/{name}")
    # A round that was spent after its sum was recorded.
    _write(tmp_path, f"round-1/{name}")
    _write(tmp_path, "round-1/spent")
    assert places.ReleasedSums.streams(tmp_path) == [_STREAM]
    found = places.ReleasedSums.read(tmp_path, _STREAM)
    assert found.of_rounds == {0: _NOISE.hex(), 1: "", 2: "", 10: _NOISE.hex()}
    assert (found.num_sums, found.num_rounds) == (2, 11)
    lines = (f"0 {name}", "1 spent", "2 spent", f"10 {(b's' * 32 + _NOISE).hex()}")
    assert found.text == "".join(f"{line}\n" for line in lines)
    assert found.sha256 == hashlib.sha256(found.text.encode()).hexdigest()
    assert ReleasedSums(found.text) == found
    record.check(_STREAM, 11, b"t" * 32, _NOISE)
    assert places.ReleasedSums.read(tmp_path, _STREAM).sha256 != found.sha256


@pytest.mark.parametrize("names", [("-12.7",), (), ("1.2." + "0" * 64, "1.3." + "0" * 64)])
def test_what_no_aggregator_writes_is_refused(
    names: tuple[str, ...], tmp_path: pathlib.Path
) -> None:
    (tmp_path / "released" / _STREAM / "round-3").mkdir(parents=True)
    for name in names:
        _write(tmp_path, f"round-3/{name}")
    with pytest.raises(RecordError, match="'3 "):
        places.ReleasedSums.read(tmp_path, _STREAM)


@pytest.mark.parametrize(
    "text",
    ["0 spent", "1 spent\n0 spent\n", "0 spent\n0 spent\n", "-1 spent\n", f"0 {'a' * 64}\n"],
)
def test_other_texts_are_no_record(text: str) -> None:
    with pytest.raises(RecordError, match=r"is broken, or of mf_aggregators 2\.0\.0 or older"):
        ReleasedSums(text)
