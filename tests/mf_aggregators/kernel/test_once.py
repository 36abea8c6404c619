"""The record of released sums; ``test_aggregator_in_numpy`` has copies, pickles and threads."""

import os
import pathlib
import pickle

import pytest

from mf_aggregators.kernel.errors import ReleaseError
from mf_aggregators.kernel.once import ReleaseRecord

_ONE, _OTHER = b"1" * 32, b"2" * 32


@pytest.mark.parametrize("has_directory", [True, False])
def test_a_row_has_one_sum(has_directory: bool, tmp_path: pathlib.Path) -> None:
    one, other = (ReleaseRecord(tmp_path if has_directory else None) for _ in range(2))
    stream = str(tmp_path.name)
    one.check(stream, 0, _ONE)
    for record in (one, other):
        record.check(stream, 0, _ONE)
        with pytest.raises(ReleaseError, match="other data"):
            record.check(stream, 0, _OTHER)
    # Other rows, and rows of other streams, are others.
    other.check(stream, 1, _OTHER)
    other.check(f"{stream}-other", 0, _OTHER)
    other.spend(stream, 0)
    for found in (_ONE, _OTHER):
        with pytest.raises(ReleaseError, match="spent"):
            other.check(stream, 0, found)
    # One that knows the sum asks the directory again.
    with pytest.raises(ReleaseError, match="spent"):
        one.check(stream, 0, _ONE)
    other.spend(stream, 2)
    with pytest.raises(ReleaseError, match="Round 2 was spent"):
        one.check(stream, 2, _ONE)


def test_files_are_private_and_whole(tmp_path: pathlib.Path) -> None:
    record = ReleaseRecord(tmp_path)
    record.check("stream", 3, _ONE)
    assert (tmp_path / "released" / "stream").stat().st_mode & 0o077 == 0
    (path,) = (tmp_path / "released" / "stream").iterdir()
    assert (path.name, path.read_bytes(), path.stat().st_mode & 0o077) == ("round-3", _ONE, 0)
    record.spend("stream", 3)
    (path,) = (tmp_path / "released" / "stream").iterdir()
    assert path.read_bytes() == b"spent"
    assert pickle.loads(pickle.dumps(record))._directory == tmp_path


def test_a_directory_that_was_emptied_is_not_forgotten(tmp_path: pathlib.Path) -> None:
    record = ReleaseRecord(tmp_path)
    record.check("stream", 0, _ONE)
    (tmp_path / "released" / "stream" / "round-0").unlink()
    with pytest.raises(ReleaseError, match="other data"):
        record.check("stream", 0, _OTHER)


def test_what_is_written_reaches_the_disk(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file first, and then the directory that names it."""
    synchronised: list[str] = []
    fsync = os.fsync

    def recorded(descriptor: int) -> None:
        synchronised.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recorded)
    ReleaseRecord(tmp_path).check("stream", 0, _ONE)
    assert [pathlib.Path(path).parent.name for path in synchronised] == ["stream", "released"]


def test_a_record_that_cannot_be_written_refuses(tmp_path: pathlib.Path) -> None:
    (tmp_path / "released").write_bytes(b"")
    record = ReleaseRecord(tmp_path)
    with pytest.raises(OSError, match="released"):
        record.check("stream", 0, _ONE)
    with pytest.raises(OSError, match="released"):
        record.spend("stream", 0)
    with pytest.raises(TypeError, match="subclasses"):
        type("Lenient", (ReleaseRecord,), {})


def test_a_record_of_a_process_is_of_that_process(monkeypatch: pytest.MonkeyPatch) -> None:
    record = ReleaseRecord()
    with pytest.raises(ReleaseError, match="noise_directory"):
        pickle.dumps(record)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    for use in (lambda: record.check("fork", 0, _ONE), lambda: record.spend("fork", 0)):
        with pytest.raises(ReleaseError, match="another process"):
            use()
