"""Files are whole or not there."""

import pathlib

import pytest

from simulations import atomic_files


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
