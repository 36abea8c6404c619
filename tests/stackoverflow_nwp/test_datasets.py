"""Tests of datasets: what a name or a path loads, and how the wrong ones are refused."""

import collections
import contextlib
import hashlib
import os
import pathlib
import sqlite3
from typing import Any

import pytest

from stackoverflow_nwp import datasets, docstrings, federated_text, token_arrays
from stackoverflow_nwp.federated_text import Contents
from tests.refusals import refuses


def _fake_packages(directory: pathlib.Path) -> tuple[docstrings.Package, ...]:
    modules = []
    for number in range(30):
        path = directory / f"module{number}.py"
        text = " ".join(f"The part {number} of {word} is here." for word in "abcdefghijkl")
        path.write_text(f'"""{text}"""\n')
        modules.append((f"package.module{number}", path))
    return (docstrings.Package("package", "1", tuple(modules)),)


def test_docstrings_are_built_once(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = _fake_packages(tmp_path)
    monkeypatch.setattr(docstrings, "find_packages", lambda: packages)
    cache = tmp_path / "cache"
    text = datasets.load("docstrings", cache, show_progress=False)
    assert text.path == cache / f"docstrings-{docstrings.fingerprint(packages)}.sqlite"
    assert sum(counts.examples for counts in text.splits.values()) == 30 * 12

    def refuse(*arguments: Any) -> None:
        raise AssertionError("built again")

    monkeypatch.setattr(docstrings, "examples", refuse)
    assert datasets.load("docstrings", cache) == text


def test_stackoverflow(
    tmp_path: pathlib.Path, small_file: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorflow_federated.python.simulation.datasets import download, stackoverflow

    fetched: list[str] = []

    def fetch(origin: str, filename: str) -> None:
        fetched.append(origin)
        pathlib.Path(filename).write_bytes(small_file.read_bytes()[: None if whole else -4096])

    def word_counts(cache_dir: str | None = None) -> dict[str, int]:
        fetched.append(f"word counts in {cache_dir}")
        return collections.OrderedDict(the=6, cat=5)

    # TFF's own loader runs; only what reaches the network is replaced.
    monkeypatch.setattr(download, "_fetch_lzma_file", fetch)
    monkeypatch.setattr(stackoverflow, "load_word_counts", word_counts)
    cache = tmp_path / "cache"
    whole = False
    with refuses("StackOverflow"):
        datasets.load("stackoverflow", cache)
    for file in cache.iterdir():
        file.unlink()
    whole = True
    text = datasets.load("stackoverflow", cache)
    assert text.path == cache / "stackoverflow.sqlite"
    assert [file.name for file in cache.iterdir()] == ["stackoverflow.sqlite"]
    assert datasets.load("stackoverflow", cache) == text
    assert len(fetched) == 2
    assert "stackoverflow.sqlite.lzma" in fetched[1]
    assert text.vocabulary(1) == ("the",)
    assert text.vocabulary(2) == ("the", "cat")
    assert fetched[2:] == [f"word counts in {cache}"]


def test_a_fingerprint_is_of_every_byte(small_file: pathlib.Path) -> None:
    original, status = small_file.read_bytes(), small_file.stat()
    text = datasets.load(str(small_file))
    assert text.fingerprint() == hashlib.sha256(original).hexdigest()
    changed = bytearray(original)
    changed[-1] ^= 1
    small_file.write_bytes(changed)
    # The file looks as old as before.
    os.utime(small_file, ns=(status.st_atime_ns, status.st_mtime_ns))
    with refuses(str(small_file), "changed"):
        text.fingerprint()
    again = Contents.of(small_file)
    assert again.sha256 == hashlib.sha256(changed).hexdigest()


def test_changes_that_are_not_in_the_file_yet_are_refused(small_file: pathlib.Path) -> None:
    """SQLite keeps them beside the file that a link leads to, and not beside the link."""
    path = small_file.parent / "links" / "text.sqlite"
    path.parent.mkdir()
    path.symlink_to(small_file)
    text = datasets.load(str(path))
    with contextlib.closing(sqlite3.connect(small_file)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        with connection:
            connection.execute("DELETE FROM examples WHERE rowid = 1")
        with refuses("small.sqlite-wal"):
            text.fingerprint()


def test_caches_are_of_contents(tmp_path: pathlib.Path) -> None:
    """Words and tokens of another text of the same size, which looks as old, are made anew."""
    path, found = tmp_path / "text.sqlite", []
    for word in ("old", "new"):
        federated_text.write(path, [federated_text.Example("a", "train", f"{word} text")])
        os.utime(path, ns=(0, 0))
        contents = Contents.of(path)
        tokens = token_arrays.load_token_arrays(contents, "train", ("old", "new"), 2).tokens
        found.append((path.stat().st_size, datasets.load_word_counts(contents), tokens.tolist()))
    (size, counts, tokens), (other_size, other_counts, other_tokens) = found
    assert size == other_size
    assert (counts, other_counts) == ({"old": 1, "text": 1}, {"new": 1, "text": 1})
    assert tokens != other_tokens


def test_a_vocabulary_has_the_words_that_most_clients_use(small_file: pathlib.Path) -> None:
    text = datasets.load(str(small_file))
    counts = text.word_counts()
    assert text.vocabulary(2) == tuple(counts)[:2]
    with refuses(str(len(counts)), "words"):
        text.vocabulary(len(counts) + 1)
    with refuses("size"):
        text.vocabulary(0)
