"""Directories with checksums: any damage is seen."""

import pathlib
import subprocess

from simulations.runs import sealed_directories
from simulations.runs.sealed_directories import DamagedDirectoryError
from tests.refusals import refuses


def test_checksums_are_those_of_sha256sum(tmp_path: pathlib.Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "large").write_bytes(bytes(3_000_001))
    (tmp_path / "file").write_text("contents")
    sealed_directories.seal(tmp_path, "two files")
    sealed_directories.check_seal(tmp_path, "two files")
    command = ["sha256sum", "--check", "--strict", "--quiet", sealed_directories.CHECKSUM_FILE]
    assert subprocess.run(command, cwd=tmp_path, check=True, capture_output=True).stdout == b""


def test_a_directory_is_only_what_it_was_sealed_as(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("contents")
    with refuses("SHA256SUMS", error=DamagedDirectoryError):
        sealed_directories.check_seal(tmp_path, "round 7")
    sealed_directories.seal(tmp_path, "round 7")
    with refuses("SHA256SUMS", "round", error=DamagedDirectoryError):
        sealed_directories.check_seal(tmp_path, "round 9")
    (tmp_path / "file").write_text("content")
    with refuses("file", error=DamagedDirectoryError):
        sealed_directories.check_seal(tmp_path, "round 7")
