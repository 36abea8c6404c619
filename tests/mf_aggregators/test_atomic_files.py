"""Files are whole or not there, and cached values are believed or computed again."""

import os
import pathlib
import stat
from collections.abc import Callable
from typing import Any

import pytest

from mf_aggregators import atomic_files
from mf_aggregators.atomic_files import CacheWarning


def test_a_block_that_raises_leaves_the_old_file(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "file"
    atomic_files.write(path, "old")

    def fail_half_way() -> None:
        with atomic_files.writing(path) as file:
            file.write(b"half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_half_way()
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_other_programs_write_a_file_whole(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with atomic_files.writing(path) as partial:
        pathlib.Path(partial.name).write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"


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
    atomic_files.write(path, "new")
    assert seen == [(False, "old"), (True, "new")]


def test_files_have_the_usual_permissions(tmp_path: pathlib.Path) -> None:
    (tmp_path / "usual").write_text("")
    atomic_files.write(tmp_path / "ours", "")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_what_a_killed_process_left_of_a_file_is_removed(tmp_path: pathlib.Path) -> None:
    for name in ("a[1]", ".a[1].half", ".a[1]", ".a1.half", ".another.half", "b"):
        (tmp_path / name).write_text("")
    atomic_files.remove_unfinished(tmp_path / "a[1]")
    left = {entry.name for entry in tmp_path.iterdir()}
    assert left == {"a[1]", ".a[1]", ".a1.half", ".another.half", "b"}


# Cached values: an entry that was damaged or altered is computed again.


def _kept(value: Any) -> float:
    if not isinstance(value, float) or value < 1.0:
        raise ValueError("it is not believed")
    return value


def _fetched(entry: pathlib.Path | None, number: float, b: int = 1) -> float:
    return atomic_files.fetch(
        entry, {"b": b}, lambda: number, field="number", to_json=float, from_json=_kept
    )


def test_numbers_come_back_to_the_last_bit(tmp_path: pathlib.Path) -> None:
    number = 1.1 + 0.2
    assert _fetched(tmp_path / "new" / "entry", number) == number
    assert _fetched(tmp_path / "new" / "entry", 7.0) == number
    assert _fetched(None, 8.0) == 8.0


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[:-9],
        lambda text: text.replace("1.5", "2.5"),
        lambda text: text.replace('"b": 1', '"b": 2'),
        lambda text: "[1.5]",
        lambda text: text.replace("1.5", "NaN"),
    ],
    ids=["truncated", "altered", "foreign", "no object", "no number"],
)
def test_a_damaged_number_is_computed_again(
    tmp_path: pathlib.Path, change: Callable[[str], str]
) -> None:
    entry = tmp_path / "entry"
    _fetched(entry, 1.5)
    entry.write_text(change(entry.read_text()))
    with pytest.warns(CacheWarning):
        assert _fetched(entry, 1.25) == 1.25
    assert _fetched(entry, 7.0) == 1.25


def test_a_whole_number_that_is_not_believed_or_of_another_description(
    tmp_path: pathlib.Path,
) -> None:
    for name, number, b in (("small", 0.5, 1), ("foreign", 1.5, 2)):
        _fetched(tmp_path / name, number, b)
        with pytest.warns(CacheWarning):
            assert _fetched(tmp_path / name, 7.0) == 7.0


def test_a_value_that_cannot_be_cached_is_used_with_a_warning(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("no directory")
    with pytest.warns(CacheWarning):
        assert _fetched(tmp_path / "file" / "entry", 1.5) == 1.5
