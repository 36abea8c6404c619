"""The directory of noise rows: for its owner alone, with room enough, gone if temporary.

The record of sums is there, as both aggregators write it;
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

import pytest

from mf_aggregators.kernel.release import ReleaseRecord
from mf_aggregators.noise import noise_directory
from mf_aggregators.noise.noise_directory import RecordError, ReleasedSums
from tests.refusals import refuses

_SPARE = 64 << 20
_STREAM, _NOISE = "stream--3-4", b"n" * 32


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
    directory = noise_directory.open_directory(path)
    assert directory == path
    assert _mode(directory) == 0o700


@pytest.mark.parametrize("mode", [0o701, 0o702, 0o704, 0o710, 0o720, 0o740, 0o755, 0o777], ids=oct)
def test_directories_that_others_may_use_are_refused(mode: int, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "noise"
    path.mkdir()
    path.chmod(mode)
    with refuses(str(path), "chmod 700"):
        noise_directory.open_directory(path)
    path.chmod(0o700)
    assert noise_directory.open_directory(path) == path


def test_directories_of_others_are_refused(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = noise_directory.open_directory(tmp_path / "noise")
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with refuses(str(path), f"chown {user + 1} {path} and chmod 700"):
        noise_directory.open_directory(path)


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o644, 0o666], ids=oct)
def test_files_that_others_may_read_are_refused(mode: int, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "state.npz"
    path.write_text("seed")
    path.chmod(mode)
    with refuses("the state", f"chmod 600 {path}"):
        noise_directory.check_private(path, "the state")
    path.chmod(0o600)
    noise_directory.check_private(path, "the state")


@pytest.mark.parametrize("character", list("*?[]\\"))
def test_paths_that_graphs_take_for_patterns_are_refused(
    character: str, tmp_path: pathlib.Path
) -> None:
    with refuses("noise_directory"):
        noise_directory.open_directory(tmp_path / f"noise{character}1" / "rows")
    assert not list(tmp_path.iterdir())


_SCRIPT = """
import pathlib, sys
from mf_aggregators.kernel.release import ReleaseRecord
from mf_aggregators.noise import noise_directory
from mf_aggregators.noise.noise_directory import RecordError, ReleasedSums
parent = pathlib.Path(sys.argv[1])
directory = noise_directory.open_directory(None)
(directory / "deep").mkdir()
(directory / "deep" / "file").write_text("noise")
print(directory)
kept = noise_directory.open_directory(parent / "kept")
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
        cwd=pathlib.Path(noise_directory.__file__).parents[2],
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
    noise_directory._check_room(tmp_path, 3_000_000_000)
    with refuses("3.0 GB", "noise_directory"):
        noise_directory._check_room(tmp_path, 3_000_000_001)
    with refuses("5.4 GB"):
        noise_directory._check_room(tmp_path, 5_432_109_876)
    _disk_with(monkeypatch, 1000)
    with refuses("0.0 GB"):
        noise_directory._check_room(tmp_path, 1)


def test_files_that_are_already_there_count_as_room(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is resumed writes over its own."""
    _disk_with(monkeypatch, _SPARE + 100)
    (tmp_path / "deep" / "deeper").mkdir(parents=True)
    (tmp_path / "deep" / "deeper" / "row").write_bytes(bytes(70))
    (tmp_path / "row").write_bytes(bytes(30))
    noise_directory._check_room(tmp_path, 200)
    with refuses("GB"):
        noise_directory._check_room(tmp_path, 201)


def _write(tmp_path: pathlib.Path, name: str) -> None:
    path = tmp_path / "released" / _STREAM / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


def test_files_and_folders_are_read_alike(tmp_path: pathlib.Path) -> None:
    assert noise_directory.ReleasedSums.streams(tmp_path) == []
    record = ReleaseRecord(tmp_path)
    record.check(_STREAM, 10, b"s" * 32, _NOISE)
    record.spend(_STREAM, 2)
    name = f"-12.7.{_NOISE.hex()}"
    _write(tmp_path, f"round-0/{name}")
    # A round that was spent after its sum was recorded.
    _write(tmp_path, f"round-1/{name}")
    _write(tmp_path, "round-1/spent")
    assert noise_directory.ReleasedSums.streams(tmp_path) == [_STREAM]
    found = noise_directory.ReleasedSums.read(tmp_path, _STREAM)
    assert found.of_rounds == {0: _NOISE.hex(), 1: "", 2: "", 10: _NOISE.hex()}
    assert (found.num_sums, found.num_rounds) == (2, 11)
    lines = (f"0 {name}", "1 spent", "2 spent", f"10 {(b's' * 32 + _NOISE).hex()}")
    assert found.text == "".join(f"{line}\n" for line in lines)
    assert found.sha256 == hashlib.sha256(found.text.encode()).hexdigest()
    assert ReleasedSums(found.text) == found
    record.check(_STREAM, 11, b"t" * 32, _NOISE)
    assert noise_directory.ReleasedSums.read(tmp_path, _STREAM).sha256 != found.sha256


@pytest.mark.parametrize("names", [("-12.7",), (), ("1.2." + "0" * 64, "1.3." + "0" * 64)])
def test_what_no_aggregator_writes_is_refused(
    names: tuple[str, ...], tmp_path: pathlib.Path
) -> None:
    (tmp_path / "released" / _STREAM / "round-3").mkdir(parents=True)
    for name in names:
        _write(tmp_path, f"round-3/{name}")
    with pytest.raises(RecordError, match="'3 "):
        noise_directory.ReleasedSums.read(tmp_path, _STREAM)


@pytest.mark.parametrize(
    "text",
    ["0 spent", "1 spent\n0 spent\n", "0 spent\n0 spent\n", "-1 spent\n", f"0 {'a' * 64}\n"],
)
def test_other_texts_are_no_record(text: str) -> None:
    with pytest.raises(RecordError, match=r"is broken, or of mf_aggregators 2\.0\.0 or older"):
        ReleasedSums(text)
