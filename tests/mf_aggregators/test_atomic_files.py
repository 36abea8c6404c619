"""Files are whole or not there."""

import os
import pathlib
import stat

import pytest

from mf_aggregators import atomic_files


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


def test_other_programs_write_a_file_whole_or_not_at_all(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with atomic_files.replacing(path) as partial:
        partial.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"

    def fail_half_way() -> None:
        with atomic_files.replacing(path) as partial:
            partial.write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_half_way()
    assert path.read_text() == "new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_file_takes_its_name_after_its_contents_and_before_its_directory_is_on_disk(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, fsync = tmp_path / "file", os.fsync
    path.write_text("old")
    seen: list[tuple[bool, str]] = []

    def watched(descriptor: int) -> None:
        fsync(descriptor)
        is_directory = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        seen.append((is_directory, path.read_text()))

    monkeypatch.setattr(os, "fsync", watched)
    atomic_files.write_text(path, "new")
    assert seen == [(False, "old"), (True, "new")]


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
