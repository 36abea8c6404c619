"""Tests of token_arrays: the very rows of TFF's preprocessing, cached or read when asked for."""

import dataclasses
import logging
import multiprocessing
import os
import pathlib
import sqlite3
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from stackoverflow_nwp import federated_text, token_arrays
from stackoverflow_nwp.federated_text import Contents
from tests import flipped_bits
from tests.examples import examples
from tests.refusals import refuses
from tests.stackoverflow_nwp.small_text import WORDS

_VOCABULARY = WORDS[:-1]
_ROWS = np.arange(400 * 21, dtype=np.int32).reshape(400, 21)


@pytest.fixture(scope="module")
def tff_rows() -> Callable[[list[str]], np.ndarray]:
    """TFF's mapping of sentences to padded rows of 5 + 1 tokens."""
    import tensorflow as tf
    from tensorflow_federated.python.simulation.baselines.stackoverflow import (
        word_prediction_preprocessing as preprocessing,
    )

    to_ids = tf.function(
        preprocessing.build_to_ids_fn(list(_VOCABULARY), 5),
        input_signature=[{"tokens": tf.TensorSpec((), tf.string)}],
    )

    def rows(sentences: list[str]) -> np.ndarray:
        padded = [
            np.pad(ids, (0, 6 - len(ids)))
            for ids in (to_ids({"tokens": tf.constant(text)}).numpy() for text in sentences)
        ]
        return np.array(padded)

    return rows


def test_special_tokens_are_those_of_tff() -> None:
    from tensorflow_federated.python.simulation.baselines.stackoverflow import (
        word_prediction_preprocessing as preprocessing,
    )

    theirs = preprocessing.get_special_tokens(123, num_out_of_vocab_buckets=1)
    assert token_arrays.SpecialTokens.of_vocabulary(123) == token_arrays.SpecialTokens(
        padding=theirs.padding,
        out_of_vocabulary=theirs.out_of_vocab[0],
        beginning_of_sentence=theirs.beginning_of_sentence,
        end_of_sentence=theirs.end_of_sentence,
    )


@settings(max_examples=examples(150), deadline=None)
@given(
    st.lists(
        st.lists(st.sampled_from((*WORDS, "", "\t", "na\u00efve", "The")), max_size=8).map(
            " ".join
        ),
        min_size=1,
        max_size=4,
    )
)
def test_rows_are_those_of_tff(
    tff_rows: Callable[[list[str]], np.ndarray], sentences: list[str]
) -> None:
    tokenizer = token_arrays.SentenceTokenizer(_VOCABULARY, 5)
    np.testing.assert_array_equal(tokenizer.rows(sentences), tff_rows(sentences))


@pytest.mark.short_cases(1)
@pytest.mark.parametrize("split", federated_text.SPLITS)
def test_clients_have_the_rows_of_tffs_pipeline(small_file: pathlib.Path, split: str) -> None:
    import tensorflow_federated as tff
    from tensorflow_federated.python.simulation.baselines.stackoverflow import (
        word_prediction_preprocessing as preprocessing,
    )
    from tensorflow_federated.python.simulation.datasets import stackoverflow

    data = tff.simulation.datasets.SqlClientData(str(small_file), split).preprocess(
        stackoverflow._add_proto_parsing
    )
    preprocess = preprocessing.create_preprocess_fn(
        tff.simulation.baselines.ClientSpec(num_epochs=1, batch_size=100, shuffle_buffer_size=1),
        list(_VOCABULARY),
        sequence_length=20,
    )
    eager = token_arrays.open_client_tokens(
        Contents.of(small_file), split, _VOCABULARY, show_progress=False
    )
    lazy = token_arrays.open_client_tokens(
        Contents.of(small_file), split, _VOCABULARY, max_eager_examples=0
    )
    assert isinstance(eager, token_arrays.EagerClientTokens)
    assert isinstance(lazy, token_arrays.LazyClientTokens)
    assert eager.client_ids == lazy.client_ids == tuple(data.client_ids)
    # A client of each length is enough of the slow pipeline.
    for client in eager.client_ids[:2]:
        batch = preprocess(data.create_tf_dataset_for_client(client))
        ((inputs, targets),) = batch.as_numpy_iterator()
        np.testing.assert_array_equal(eager.tokens_of(client)[:, :-1], inputs)
        np.testing.assert_array_equal(eager.tokens_of(client)[:, 1:], targets)
    for client in eager.client_ids:
        assert eager.tokens_of(client).dtype == lazy.tokens_of(client).dtype == np.int32
        np.testing.assert_array_equal(eager.tokens_of(client), lazy.tokens_of(client))
    both: tuple[token_arrays.ClientTokens, ...] = (eager, lazy)
    for tokens in both:
        with pytest.raises(KeyError):
            tokens.tokens_of("nobody")


def test_rows_cannot_be_changed(small_file: pathlib.Path) -> None:
    tokens = token_arrays.open_client_tokens(
        Contents.of(small_file), "train", _VOCABULARY, show_progress=False
    )
    with refuses("read-only"):
        tokens.tokens_of("train.client1")[0, 0] = 0


def test_arrays_are_cached(small_file: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(length: int = 20) -> token_arrays.TokenArrays:
        return token_arrays.load_token_arrays(
            Contents.of(small_file), "train", _VOCABULARY, length, show_progress=False
        )

    first = load()
    (cache,) = small_file.parent.glob("*.npz")
    calls = []
    tokenize = token_arrays.tokenize_split

    def counted(*arguments: object) -> token_arrays.TokenArrays:
        calls.append(arguments)
        return tokenize(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(token_arrays, "tokenize_split", counted)
    second = load()
    assert not calls
    assert first.client_ids == second.client_ids
    np.testing.assert_array_equal(first.offsets, second.offsets)
    np.testing.assert_array_equal(first.tokens, second.tokens)
    # Cut short, or no archive at all: made anew.
    for contents in (cache.read_bytes()[:-200], b"", b"text"):
        cache.write_bytes(contents)
        calls.clear()
        np.testing.assert_array_equal(load().tokens, first.tokens)
        assert len(calls) == 1
    # Another length has a cache of its own.
    calls.clear()
    assert load(5).tokens.shape[1] == 6
    load()
    assert len(calls) == 1
    # Other text in the same file.
    calls.clear()
    federated_text.write(small_file, [federated_text.Example("a", "train", "the cat")])
    assert load().client_ids == ("a",)
    assert len(calls) == 1


@pytest.mark.parametrize("max_eager_examples", [0, 10**9])
def test_tokens_are_those_of_the_contents_whatever_the_times_say(
    small_file: pathlib.Path, max_eager_examples: int
) -> None:
    """A text of the same size and time, as copies that keep times leave it, has its own tokens."""

    def tokens() -> np.ndarray:
        opened = token_arrays.open_client_tokens(
            Contents.of(small_file), "train", _VOCABULARY, 20, max_eager_examples, False
        )
        return opened.tokens_of("train.client1").copy()

    first, status = tokens(), small_file.stat()
    rewritten = [
        dataclasses.replace(each, tokens=" ".join(each.tokens.split()[::-1]))
        for each in federated_text.read_examples(small_file)
    ]
    federated_text.write(small_file, rewritten)
    os.utime(small_file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert small_file.stat().st_size == status.st_size
    assert not np.array_equal(tokens(), first)


@pytest.mark.parametrize("max_eager_examples", [0, 10**9])
def test_a_file_that_changes_while_it_is_read_is_refused(
    small_file: pathlib.Path, max_eager_examples: int
) -> None:
    contents = Contents.of(small_file)
    lazy = token_arrays.open_client_tokens(contents, "train", _VOCABULARY, max_eager_examples=0)
    federated_text.write(small_file, list(federated_text.read_examples(small_file))[:-1])
    with refuses(str(small_file), "changed"):
        lazy.tokens_of("train.client1")
    with refuses(str(small_file), "changed"):
        token_arrays.open_client_tokens(
            contents, "train", _VOCABULARY, 20, max_eager_examples, show_progress=False
        )
    # Nothing of the other contents was kept.
    kept = [*small_file.parent.glob("*.npz"), *small_file.parent.glob("*.sqlite_cache")]
    assert not kept


def test_bad_arguments(small_file: pathlib.Path) -> None:
    with refuses("vocabulary"):
        token_arrays.SentenceTokenizer(["a", "a"])
    with refuses("vocabulary"):
        token_arrays.SentenceTokenizer([])
    with refuses("length"):
        token_arrays.SentenceTokenizer(["a"], 0)
    with refuses("dev"):
        token_arrays.open_client_tokens(Contents.of(small_file), "dev", _VOCABULARY)


@settings(max_examples=examples(30), deadline=None)
@given(
    rows=hnp.arrays(np.int32, st.tuples(st.integers(0, 30), st.integers(2, 25))),
    client=st.text(max_size=10).filter(lambda name: "\x00" not in name and name.isprintable()),
)
def test_rows_come_back(
    tmp_path_factory: pytest.TempPathFactory, rows: np.ndarray, client: str
) -> None:
    path = tmp_path_factory.mktemp("cache") / "cache"
    cache = token_arrays.TokenCache(path, "key", rows.shape[1])
    assert cache.get(client) is None
    cache.put(client, rows)
    for reader in (cache, token_arrays.TokenCache(path, "key", rows.shape[1])):
        found = reader.get(client)
        assert found is not None
        assert found.dtype == np.int32
        np.testing.assert_array_equal(found, rows)
    assert cache.get(client + "x") is None


def test_another_key_finds_nothing_and_replaces(tmp_path: pathlib.Path) -> None:
    old, new = (token_arrays.TokenCache(tmp_path / "cache", key, 21) for key in ("old", "new"))
    old.put("a", _ROWS)
    assert new.get("a") is None
    new.put("a", _ROWS[:3])
    assert old.get("a") is None
    found = new.get("a")
    assert found is not None
    np.testing.assert_array_equal(found, _ROWS[:3])


def test_a_changed_byte_gives_the_rows_or_nothing(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "cache"
    cache = token_arrays.TokenCache(path, "key", 21)
    for client in "abc":
        cache.put(client, _ROWS[ord(client) - ord("a") :])
    contents = path.read_bytes()
    generator = np.random.default_rng(0)
    lost = 0
    for place in generator.choice(len(contents), 150, replace=False):
        changed = bytearray(contents)
        changed[place] ^= 1 << generator.integers(8)
        path.write_bytes(changed)
        for client in "abc":
            found = cache.get(client)
            lost += found is None
            if found is not None:
                np.testing.assert_array_equal(found, _ROWS[ord(client) - ord("a") :])
    assert lost > 10


@pytest.mark.parametrize("contents", [b"no data base", b"SQLite format 3\x00" + bytes(300)])
def test_a_broken_file_is_begun_anew(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, contents: bytes
) -> None:
    path = tmp_path / "cache"
    path.write_bytes(contents * 20)
    cache = token_arrays.TokenCache(path, "key", 21)
    assert cache.get("a") is None
    cache.put("a", _ROWS)
    assert "is broken" in caplog.text
    cache.put("a", _ROWS)
    assert cache.get("a") is not None


def test_damaged_arrays_are_not_found(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "cache.npz"
    names = {"key": np.array("k"), "client_ids": np.array(["a"])}
    np.savez(path, tokens=np.ones((1, 5), np.int32), offsets=np.array([0, 1]), **names)
    found = [token_arrays._read_cache(path, "k", 4) for _ in flipped_bits.flipped(path)]
    assert found.count(None) > 500
    whole = token_arrays._read_cache(path, "k", 4)
    assert whole is not None
    np.savez(path, **names)
    assert token_arrays._read_cache(path, "k", 4) is None


def test_what_cannot_be_written_is_not_kept(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = token_arrays.TokenCache(tmp_path / "nowhere" / "cache", "key", 21)
    for client in "ab":
        cache.put(client, _ROWS)
        assert cache.get(client) is None
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "tokenized each time" in warnings[0].getMessage()


def _fill(path: pathlib.Path, first: int) -> None:
    cache = token_arrays.TokenCache(path, "key", 21)
    for client in range(first, first + 40):
        cache.put(str(client), _ROWS[client:])


@pytest.mark.long
def test_processes_share_a_file(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "cache"
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_fill, args=(path, first)) for first in (0, 20, 40)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    cache = token_arrays.TokenCache(path, "key", 21)
    for client in range(80):
        found = cache.get(str(client))
        assert found is not None
        np.testing.assert_array_equal(found, _ROWS[client:])


def test_clients_are_tokenized_once(
    small_file: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenized = []
    rows_of = token_arrays.SentenceTokenizer.rows

    def counted(tokenizer: token_arrays.SentenceTokenizer, sentences: list[str]) -> np.ndarray:
        tokenized.append(len(sentences))
        return rows_of(tokenizer, sentences)

    monkeypatch.setattr(token_arrays.SentenceTokenizer, "rows", counted)

    def opened() -> token_arrays.ClientTokens:
        return token_arrays.open_client_tokens(
            Contents.of(small_file), "train", WORDS, max_eager_examples=0
        )

    first = opened()
    expected = {client: first.tokens_of(client) for client in first.client_ids}
    assert len(tokenized) == len(expected)
    again = opened()
    for client, rows in expected.items():
        np.testing.assert_array_equal(again.tokens_of(client), rows)
    assert len(tokenized) == len(expected)
    # Other text in the same file.
    with sqlite3.connect(small_file) as connection:
        connection.execute("DELETE FROM examples WHERE rowid % 2")
    changed = opened()
    assert sum(len(changed.tokens_of(client)) for client in changed.client_ids) < sum(
        map(len, expected.values())
    )
