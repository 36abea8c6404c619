"""Clients' tokens on disk: what was put in, or nothing."""

import logging
import multiprocessing
import pathlib
import sqlite3

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from stackoverflow_nwp import federated_text, token_arrays
from stackoverflow_nwp.token_cache import TokenCache
from tests.stackoverflow_nwp.small_text import WORDS, small_examples

_ROWS = np.arange(400 * 21, dtype=np.int32).reshape(400, 21)


@settings(max_examples=30, deadline=None)
@given(
    rows=hnp.arrays(np.int32, st.tuples(st.integers(0, 30), st.integers(2, 25))),
    client=st.text(max_size=10).filter(lambda name: "\x00" not in name and name.isprintable()),
)
def test_rows_come_back(
    tmp_path_factory: pytest.TempPathFactory, rows: np.ndarray, client: str
) -> None:
    path = tmp_path_factory.mktemp("cache") / "cache"
    cache = TokenCache(path, "key", rows.shape[1])
    assert cache.get(client) is None
    cache.put(client, rows)
    for reader in (cache, TokenCache(path, "key", rows.shape[1])):
        found = reader.get(client)
        assert found is not None
        assert found.dtype == np.int32
        np.testing.assert_array_equal(found, rows)
    assert cache.get(client + "x") is None


def test_another_key_finds_nothing_and_replaces(tmp_path: pathlib.Path) -> None:
    old, new = (TokenCache(tmp_path / "cache", key, 21) for key in ("old", "new"))
    old.put("a", _ROWS)
    assert new.get("a") is None
    new.put("a", _ROWS[:3])
    assert old.get("a") is None
    found = new.get("a")
    assert found is not None
    np.testing.assert_array_equal(found, _ROWS[:3])


def test_a_changed_byte_gives_the_rows_or_nothing(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "cache"
    cache = TokenCache(path, "key", 21)
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
    cache = TokenCache(path, "key", 21)
    assert cache.get("a") is None
    cache.put("a", _ROWS)
    assert "is broken" in caplog.text
    cache.put("a", _ROWS)
    assert cache.get("a") is not None


def test_what_cannot_be_written_is_not_kept(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = TokenCache(tmp_path / "nowhere" / "cache", "key", 21)
    for client in "ab":
        cache.put(client, _ROWS)
        assert cache.get(client) is None
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "tokenized each time" in warnings[0].getMessage()


def _fill(path: pathlib.Path, first: int) -> None:
    cache = TokenCache(path, "key", 21)
    for client in range(first, first + 40):
        cache.put(str(client), _ROWS[client:])


def test_processes_share_a_file(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "cache"
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_fill, args=(path, first)) for first in (0, 20, 40)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    cache = TokenCache(path, "key", 21)
    for client in range(80):
        found = cache.get(str(client))
        assert found is not None
        np.testing.assert_array_equal(found, _ROWS[client:])


def test_clients_are_tokenized_once(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "small.sqlite"
    federated_text.write(path, small_examples())
    tokenized = []
    rows_of = token_arrays.SentenceTokenizer.rows

    def counted(tokenizer: token_arrays.SentenceTokenizer, sentences: list[str]) -> np.ndarray:
        tokenized.append(len(sentences))
        return rows_of(tokenizer, sentences)

    monkeypatch.setattr(token_arrays.SentenceTokenizer, "rows", counted)

    def opened() -> token_arrays.ClientTokens:
        return token_arrays.open_client_tokens(path, "train", WORDS, max_eager_examples=0)

    first = opened()
    expected = {client: first.tokens_of(client) for client in first.client_ids}
    assert len(tokenized) == len(expected)
    again = opened()
    for client, rows in expected.items():
        np.testing.assert_array_equal(again.tokens_of(client), rows)
        np.testing.assert_array_equal(again.tokens_of(client, 1), rows[:1])
    assert len(tokenized) == len(expected)
    # Other text in the same file.
    with sqlite3.connect(path) as connection:
        connection.execute("DELETE FROM examples WHERE rowid % 2")
    changed = opened()
    assert sum(len(changed.tokens_of(client)) for client in changed.client_ids) < sum(
        map(len, expected.values())
    )
