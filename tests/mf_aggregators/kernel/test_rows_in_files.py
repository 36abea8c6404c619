"""Rows of noise in files: those that are made one by one, whatever happened to the files."""

import dataclasses
import os
import pathlib
import stat

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators.kernel.draws import TILE, NoiseSource
from mf_aggregators.kernel.integers import IntegerRows, RowLayout, Segment
from mf_aggregators.kernel.rows import (
    BandedNoise,
    Blocks,
    NoiseRecursion,
    StateSpaceNoise,
    WindowNoise,
    banded_rows,
    dense_rows,
    independent_rows,
    toeplitz_rows,
)
from mf_aggregators.kernel.rows_in_files import RowsInFiles
from tests.examples import examples

_SEED = np.array([3, -5], np.int64)
_ROUNDS = 150
_GENERATOR = np.random.default_rng(0)
_KINDS: dict[str, NoiseRecursion] = {
    "independent": independent_rows(_ROUNDS),
    "banded": banded_rows(_GENERATOR.uniform(0.5, 1.0, (_ROUNDS, 5)) * [2.0, 1.0, 0.5, 0.2, 0.1]),
    "toeplitz": toeplitz_rows(_ROUNDS, 1.0 / np.arange(1.0, 91.0)),
    "dense": dense_rows(np.eye(_ROUNDS) - 0.2 * np.tri(_ROUNDS, k=-1)),
    "window": WindowNoise(
        _ROUNDS,
        _GENERATOR.uniform(0.5, 1.0, (_ROUNDS, 3)),
        _GENERATOR.uniform(-0.1, 0.1, (_ROUNDS, 2)),
        _GENERATOR.uniform(-1.0, 1.0, (_ROUNDS, 2)),
    ),
    "state space": StateSpaceNoise(
        phases=np.arange(_ROUNDS) % 2,
        gains=np.array([1.0, 2.0]),
        outputs=np.array([[0.3, -0.2], [0.1, 0.5]]),
        sources=np.array([[0, 1], [1, 0]]),
        decays=np.array([[0.9, 0.5], [0.8, 0.7]]),
        feedbacks=np.array([[-0.5, 0.3], [0.2, -0.4]]),
    ),
}
_EVERY_KIND = pytest.mark.parametrize("kind", _KINDS)
_LAYOUT = RowLayout(((3,), (2,)), ("float64", "float32"))


def _files(
    kind: str, directory: pathlib.Path, source: NoiseSource = NoiseSource.PHILOX
) -> RowsInFiles:
    rows = IntegerRows.of(_KINDS[kind])
    return RowsInFiles(rows, Blocks.of(rows.recursion), source, _SEED, directory)


def _one_by_one(files: RowsInFiles, segment: Segment, num_rounds: int = _ROUNDS) -> np.ndarray:
    history, made = files.rows.first_history(segment.size), []
    for i in range(num_rounds):
        z = segment.row_of_z(files.source, files.seed, i)
        row, history = files.rows.next_row(i, history, z)
        made.append(row)
    return np.array(made)


@_EVERY_KIND
def test_rows_are_those_that_are_made_one_by_one(kind: str, tmp_path: pathlib.Path) -> None:
    files = _files(kind, tmp_path)
    for segment in _LAYOUT.segments:
        found = np.array([files.row(segment, i) for i in range(_ROUNDS)])
        assert found.dtype == np.int64
        np.testing.assert_array_equal(found, _one_by_one(files, segment))
    folders = sorted(path.name for path in tmp_path.iterdir())
    assert folders == ["tile-0", "tile-1"]
    for folder in tmp_path.iterdir():
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        names = [path.name for path in folder.iterdir()]
        assert not any(name.startswith(".") for name in names)
        # What neither the last block nor the one before it needs is gone.
        blocks, earlier = files.blocks, files.rows.normalised.num_earlier_rows
        begin = blocks.starts[blocks.num_blocks - 2]
        rows = {int(name[4:]) for name in names if name.startswith("row-")}
        assert rows == set(range(max(0, begin - earlier), _ROUNDS))
        states = {int(name[6:]) for name in names if name.startswith("state-")}
        is_kept = bool(files.rows.normalised.num_state_vectors)
        last = blocks.num_blocks - 1
        assert states == ({last - 1, last} if is_kept else set())


@given(kind=st.sampled_from([*_KINDS]), data=st.data())
@settings(deadline=None, max_examples=examples(60))
def test_files_that_are_lost_or_damaged_are_made_again(
    tmp_path_factory: pytest.TempPathFactory, kind: str, data: st.DataObject
) -> None:
    files = _files(kind, tmp_path_factory.mktemp("rows"))
    (segment, _) = _LAYOUT.segments
    end = data.draw(st.integers(1, 20))
    expected = _one_by_one(files, segment, 24)
    for i in range(end):
        files.row(segment, i)
    paths = sorted((files.directory / "tile-0").iterdir())
    for path in data.draw(st.lists(st.sampled_from(paths), max_size=5, unique=True)):
        contents = bytearray(path.read_bytes())
        harm = data.draw(st.sampled_from(["delete", "cut", "flip", "swap", "empty"]))
        if harm == "delete":
            path.unlink()
        elif harm == "cut":
            path.write_bytes(contents[:-4])
        elif harm == "flip":
            contents[data.draw(st.integers(0, len(contents) - 1))] ^= 1
            path.write_bytes(contents)
        elif harm == "swap":
            others = [other for other in paths if other.exists() and other != path]
            path.write_bytes(others[0].read_bytes() if others else b"")
        else:
            path.write_bytes(b"")
    again = dataclasses.replace(files)
    for i in data.draw(st.lists(st.integers(0, 23), min_size=1, max_size=6)):
        np.testing.assert_array_equal(again.row(segment, i), expected[i])


def test_files_of_other_noise_are_not_taken(tmp_path: pathlib.Path) -> None:
    files = _files("banded", tmp_path)
    segment = _LAYOUT.segments[0]
    first = _KINDS["banded"]
    assert isinstance(first, BandedNoise)
    bands = first.bands.copy()
    bands[20, 1] *= 1.5
    other = IntegerRows.of(banded_rows(bands))
    coarser = dataclasses.replace(files.rows, shift=files.rows.shift + 1)
    finer = Blocks(files.blocks.recursion, np.arange(_ROUNDS + 1))
    for changed in (
        dataclasses.replace(files, seed=_SEED + 1),
        dataclasses.replace(files, source=NoiseSource.CHACHA20),
        dataclasses.replace(files, rows=other, blocks=Blocks.of(other.recursion)),
        dataclasses.replace(files, rows=coarser),
        dataclasses.replace(files, blocks=finer),
    ):
        for i in range(24):
            files.row(segment, i)
        names = [f"row-{i}" for i in (22, 23)]
        before = [(tmp_path / "tile-0" / name).read_bytes() for name in names]
        np.testing.assert_array_equal(changed.row(segment, 23), _one_by_one(changed, segment)[23])
        assert (tmp_path / "tile-0" / names[1]).read_bytes() != before[1]
        # Nor are those of a longer segment.
    longer = dataclasses.replace(segment, size=segment.size + 1)
    np.testing.assert_array_equal(files.row(longer, 23), _one_by_one(files, longer)[23])


def test_tiles_are_made_one_by_one(tmp_path: pathlib.Path) -> None:
    files = _files("state space", tmp_path)
    (segment,) = RowLayout(((TILE + 3,),), ("float32",)).segments
    expected = _one_by_one(files, segment, 3)
    for i in (2, 0, 1):
        np.testing.assert_array_equal(files.row(segment, i), expected[i])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tile-0", "tile-1"]


def test_nothing_is_left_of_a_file_that_cannot_be_written(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="full"):
        _files("banded", tmp_path).row(_LAYOUT.segments[0], 0)
    assert not list((tmp_path / "tile-0").iterdir())
