"""Tests of the command make-text-dataset."""

import functools
import json
import pathlib
import sqlite3

import pytest

from stackoverflow_nwp import datasets, federated_text, token_arrays
from stackoverflow_nwp.federated_text import Example
from tests import console_commands
from tests.refusals import refuses

_call = functools.partial(console_commands.call, "make-text-dataset")


@pytest.fixture
def books(tmp_path: pathlib.Path) -> pathlib.Path:
    directory = tmp_path / "books"
    for name, text in {
        "one.txt": "Call me Ishmael. Some years ago!",
        "two.txt": "It was the best of times.\n\nSee https://example.org now.",
        "deep/three.txt": "All happy families are alike.",
        "deep/o'neill.txt": "Long day's journey.",
        "deep/notes.md": "Not a text file. Of two sentences.",
        "empty.txt": "",
    }.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    return directory


def test_text_files(books: pathlib.Path, tmp_path: pathlib.Path) -> None:
    output = tmp_path / "books.sqlite"
    fields = _call(f"--input={books}", f"--output={output}", "--format=json").fields()
    assert (fields["clients"], fields["sentences"]) == (4, 6)
    examples = list(federated_text.read_examples(output))
    assert {example.client_id for example in examples} == {
        "one.txt",
        "two.txt",
        "deep/three.txt",
        "deep/o%27neill.txt",
    }
    assert [example.tokens for example in examples if example.client_id == "two.txt"] == [
        "it was the best of times .",
        "see <URL> now .",
    ]
    text = datasets.load(str(output))
    assert sum(counts.clients for counts in text.splits.values()) == 4
    assert fields["train_clients"] == text.splits["train"].clients


def test_json_lines(tmp_path: pathlib.Path) -> None:
    source, output = tmp_path / "posts.jsonl", tmp_path / "posts.sqlite"
    records: list[dict[str, str | int]] = [
        {"who": author, "body": f"Post {i}. It ends."} for i, author in enumerate("abcaba")
    ]
    records.append({"who": 17, "body": "A number."})
    source.write_text("\n\n".join(json.dumps(record) for record in records))
    columns = ["--client_column=who", "--text_column=body"]
    out = _call(f"--input={source}", f"--output={output}", *columns).done()
    assert "sentences" in out
    examples = list(federated_text.read_examples(output))
    assert {client: sum(e.client_id == client for e in examples) for client in "abc"} == {
        "a": 6,
        "b": 4,
        "c": 2,
    }
    assert "17" in {example.client_id for example in examples}


def test_names_that_look_the_same_are_one_client(tmp_path: pathlib.Path) -> None:
    """A client is a unit of privacy, which nothing unseen may divide; others are warned of."""
    source, output = tmp_path / "posts.jsonl", tmp_path / "posts.sqlite"
    names = [
        "ada",
        " ada",
        "ad\u00a0a",
        "ad a",
        "e\u0301",
        "\u00e9",
        "ada\u200b",
        "bo",
        "Bo",
        "\uff42o",
    ]
    source.write_text("\n".join(json.dumps({"client": each, "text": "A word."}) for each in names))
    arguments = [f"--input={source}", f"--output={output}", "--overwrite"]
    text = _call(*arguments).printed
    assert text.startswith("WARNING: 3 clients have names that look like")
    fields = _call(*arguments, "--format=json").fields()
    assert (fields["merged_client_names"], fields["alike_client_names"]) == (4, 3)
    counts: dict[str, int] = {}
    for example in federated_text.read_examples(output):
        counts[example.client_id] = counts.get(example.client_id, 0) + 1
    assert counts == {"ada": 3, "ad a": 2, "\u00e9": 2, "bo": 1, "Bo": 1, "\uff42o": 1}


@pytest.mark.parametrize(
    "table",
    [
        ("client_id INTEGER, split_name TEXT, serialized_example_proto BLOB", ""),
        ("client_id, split_name, serialized_example_proto", ""),
        (
            "client_id TEXT, split_name TEXT, serialized_example_proto BLOB, n INTEGER,"
            " PRIMARY KEY (client_id, n)",
            "WITHOUT ROWID",
        ),
    ],
)
def test_sqlite_files_of_other_programs_are_read(
    tmp_path: pathlib.Path, table: tuple[str, str]
) -> None:
    source, output = tmp_path / "theirs.sqlite", tmp_path / "out.sqlite"
    columns, options = table
    connection = sqlite3.connect(source)
    connection.execute(f"CREATE TABLE examples ({columns}) {options}")
    connection.execute(
        "CREATE TABLE client_metadata (client_id, split_name TEXT, num_examples INTEGER)"
    )
    for client in range(6):
        split = ("train", "heldout", "test")[client % 3]
        proto = federated_text.serialize(Example(str(client), split, f"the word {client}"))
        row = (client, split, proto, 0)[: 3 + bool(options)]
        connection.execute(f"INSERT INTO examples VALUES ({', '.join('?' * len(row))})", row)
        name = str(client) if options else client
        connection.execute("INSERT INTO client_metadata VALUES (?, ?, 1)", (name, split))
    connection.commit()
    connection.close()
    if options:
        text = datasets.load(str(source))
        tokens = token_arrays.open_client_tokens(text.contents, "train", ["word"], 4)
        assert tokens.client_ids == ("0", "3")
        assert tokens.tokens_of("3").tolist() == [[2 + 1, 2, 1, 2, 4]]
    else:
        with refuses("integer", "make-text-dataset"):
            datasets.load(str(source))
    assert _call(f"--input={source}", f"--output={output}").status == 0
    found = {example.client_id: example.tokens for example in federated_text.read_examples(output)}
    assert found == {str(client): f"the word {client}" for client in range(6)}
    assert sum(each.clients for each in datasets.load(str(output)).splits.values()) == 6


@pytest.mark.parametrize(
    ("contents", "arguments", "message"),
    [
        ("", ["--input=in.jsonl", "--output=x.txt"], "must end in"),
        ("", ["--input=in.jsonl", "--output=x.sqlite"], "no sentences"),
        ('{"client": "a"}', ["--input=in.jsonl", "--output=x.sqlite"], "--text_column"),
        ('{"client": "a", "text": "x"}', ["--input=in.jsonl", "--output=x.sqlite"], "three"),
        ("text", ["--input=in.sqlite", "--output=x.sqlite"], "not a SQLite file"),
        ("", ["--input=docstrings", "--input=in.txt", "--output=x.sqlite"], "combined"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    contents: str,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("in.jsonl", "in.txt", "in.sqlite"):
        (tmp_path / name).write_bytes(contents.encode("latin-1"))
    _call(*arguments).refused(message)
    assert not (tmp_path / "x.sqlite").exists()
