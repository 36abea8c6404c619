"""Files are whole or not there."""

import pathlib
import subprocess

import pytest

from simulations.runs import atomic_files


def test_a_block_that_raises_leaves_the_old_file(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "file"
    atomic_files.write_text(path, "old")

    def fail_half_way() -> None:
        with atomic_files.writing(path) as file:
            file.write(b"half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_half_way()
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_files_have_the_usual_permissions(tmp_path: pathlib.Path) -> None:
    (tmp_path / "usual").write_text("")
    atomic_files.write_text(tmp_path / "ours", "")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_what_a_killed_process_left_of_a_file_is_removed(tmp_path: pathlib.Path) -> None:
    for name in ("a[1]", ".a[1].half", ".a[1]", ".a1.half", ".another.half", "b"):
        (tmp_path / name).write_text("")
    atomic_files.remove_unfinished(tmp_path / "a[1]")
    left = {entry.name for entry in tmp_path.iterdir()}
    assert left == {"a[1]", ".a[1]", ".a1.half", ".another.half", "b"}


def test_checksums_are_those_of_sha256sum(tmp_path: pathlib.Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "large").write_bytes(bytes(3_000_001))
    (tmp_path / "file").write_text("contents")
    atomic_files.seal(tmp_path, "two files")
    atomic_files.check_seal(tmp_path, "two files")
    command = ["sha256sum", "--check", "--strict", "--quiet", atomic_files.CHECKSUM_FILE]
    assert subprocess.run(command, cwd=tmp_path, check=True, capture_output=True).stdout == b""


def test_a_directory_is_only_what_it_was_sealed_as(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("contents")
    with pytest.raises(atomic_files.DamagedDirectoryError, match="SHA256SUMS cannot be read"):
        atomic_files.check_seal(tmp_path, "round 7")
    atomic_files.seal(tmp_path, "round 7")
    with pytest.raises(atomic_files.DamagedDirectoryError, match="SHA256SUMS is not that of round"):
        atomic_files.check_seal(tmp_path, "round 9")
    (tmp_path / "file").write_text("content")
    with pytest.raises(atomic_files.DamagedDirectoryError, match="file does not match"):
        atomic_files.check_seal(tmp_path, "round 7")
