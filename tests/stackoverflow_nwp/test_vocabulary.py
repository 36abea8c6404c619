"""Tests of vocabulary: counts by training clients, in TFF's order and format."""

import collections
import os
import pathlib

import pytest

from stackoverflow_nwp import federated_text, vocabulary
from tests.refusals import refuses
from tests.stackoverflow_nwp.small_text import small_examples


@pytest.fixture
def small_file(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "small.sqlite"
    federated_text.write(path, small_examples())
    return path


def test_a_client_counts_once_and_ties_are_alphabetical() -> None:
    pairs = [("a", "x b b"), ("b", "c x"), ("a", "x b"), ("c", "c b .")]
    counts = vocabulary.count_words(pairs)
    assert list(counts.items()) == [("b", 2), ("c", 2), ("x", 2), (".", 1)]


def test_tff_reads_the_file_format(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tensorflow as tf
    from tensorflow_federated.python.simulation.datasets import stackoverflow

    counts = {"the": 3, "<URL>": 2, "it's": 1}
    vocabulary.write_word_counts(tmp_path / "stackoverflow.word_count", counts)
    archive = str(tmp_path / "stackoverflow.word_count.tar.bz2")
    monkeypatch.setattr(tf.keras.utils, "get_file", lambda *_, **__: archive)
    assert dict(stackoverflow.load_word_counts()) == counts


def test_counts_are_of_training_clients(small_file: pathlib.Path) -> None:
    clients = collections.defaultdict(set)
    for example in small_examples():
        for word in example.tokens.split():
            if example.split == "train":
                clients[word].add(example.client_id)
    counts = vocabulary.load_word_counts(small_file)
    assert counts == {word: len(own) for word, own in clients.items()}


def test_cache(small_file: pathlib.Path) -> None:
    counts = vocabulary.load_word_counts(small_file)
    cache = small_file.with_name("small.word_count")
    lines = cache.read_text().splitlines()
    assert lines == [f"{word} {count}" for word, count in counts.items()]

    def refuse(path: pathlib.Path) -> dict[str, int]:
        raise AssertionError("counted again")

    assert list(vocabulary.load_word_counts(small_file, refuse).items()) == list(counts.items())
    # Broken, or of a file that has changed since: counted again.
    text_time = small_file.stat().st_mtime_ns
    cache.write_text("the\n")
    os.utime(cache, ns=(text_time, text_time))
    assert vocabulary.load_word_counts(small_file) == counts
    federated_text.write(small_file, [federated_text.Example("a", "train", "new text")])
    os.utime(small_file, ns=(text_time + 1, text_time + 1))
    assert vocabulary.load_word_counts(small_file) == {"new": 1, "text": 1}


@pytest.mark.parametrize("text", ["a\n", "a 1 2\n", "a b\n", "a 1\na 2\n"])
def test_broken_counts_are_refused(tmp_path: pathlib.Path, text: str) -> None:
    path = tmp_path / "x.word_count"
    path.write_text(text)
    with refuses("line"):
        vocabulary.read_word_counts(path)


def test_most_frequent() -> None:
    counts = {"b": 3, "a": 2, "c": 1}
    assert vocabulary.most_frequent(counts, 2) == ("b", "a")
    with refuses("3", "words"):
        vocabulary.most_frequent(counts, 4)
    with refuses("size"):
        vocabulary.most_frequent(counts, 0)


def test_fingerprint_depends_on_the_order() -> None:
    assert vocabulary.fingerprint(["a", "b"]) != vocabulary.fingerprint(["b", "a"])
    assert vocabulary.fingerprint(["a", "b"]) == vocabulary.fingerprint(("a", "b"))
