"""Files of text: what is recognised is read in full, and other structured text is refused."""

import csv
import io
import json
import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stackoverflow_nwp import text_inputs
from stackoverflow_nwp.text_inputs import Columns
from tests.refusals import refuses

_RECORDS = [("ada", "One. Two."), ("bo", 'He said "no",\nand left;\tso'), ("ada", "Caf\u00e9.")]


def _read(
    directory: pathlib.Path, name: str, contents: str | bytes, columns: Columns | None = None
) -> list[tuple[str, str]]:
    path = directory / name
    path.write_bytes(contents.encode() if isinstance(contents, str) else contents)
    columns = columns or Columns()
    found = (
        text_inputs.prose([path], columns)
        if text_inputs.is_prose(path)
        else text_inputs.records(path, columns)
    )
    return list(found)


def _objects(records: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"client": client, "text": text} for client, text in records]


def _table(records: list[tuple[str, str]], delimiter: str) -> str:
    contents = io.StringIO()
    writer = csv.writer(contents, delimiter=delimiter)
    writer.writerows([("id", "client", "text"), *((7, *record) for record in records)])
    return contents.getvalue()


def _leaf(records: list[tuple[str, str]], name: str = "x") -> dict[str, object]:
    users = sorted({client for client, _ in records})
    own = {user: [text for client, text in records if client == user] for user in users}
    return {
        "users": users,
        "num_samples": [len(own[user]) for user in users],
        "user_data": {user: {name: texts, "y": [0] * len(texts)} for user, texts in own.items()},
    }


_FORMS = {
    "a.jsonl": "\n".join(map(json.dumps, _objects(_RECORDS))),
    "a.JSONL": "\r\n\r\n".join(map(json.dumps, _objects(_RECORDS))),
    "a.json": json.dumps(_objects(_RECORDS), indent=2),
    "a.csv": _table(_RECORDS, ","),
    "b.CSV": _table(_RECORDS, ";"),
    "c.csv": _table(_RECORDS, "\t"),
    "a.Tsv": _table(_RECORDS, "\t"),
}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
@pytest.mark.parametrize("name", _FORMS)
def test_every_form_gives_the_same_texts(tmp_path: pathlib.Path, name: str, encoding: str) -> None:
    assert _read(tmp_path, name, _FORMS[name].encode(encoding)) == _RECORDS


@pytest.mark.parametrize("name", ["x", "raw", "text", "body"])
def test_leafs_form_gives_the_texts_of_its_users(tmp_path: pathlib.Path, name: str) -> None:
    columns = Columns("client", "body" if name == "body" else "text")
    assert _read(tmp_path, "all_data.json", json.dumps(_leaf(_RECORDS, name)), columns) == sorted(
        _RECORDS, key=lambda record: record[0]
    )


@given(
    st.lists(
        st.tuples(
            st.text(st.characters(codec="utf-8", categories=["L", "N", "P"]), min_size=1),
            st.text(st.characters(codec="utf-8", exclude_characters="\0")),
        ),
        max_size=4,
    ),
    st.sampled_from([",", ";", "\t"]),
)
def test_tables_are_read_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, records: list[tuple[str, str]], delimiter: str
) -> None:
    path = tmp_path_factory.mktemp("table")
    assert _read(path, "a.csv", _table(records, delimiter)) == records


@pytest.mark.parametrize(
    ("name", "contents", "message"),
    [
        ("a.jsonl", '{"client": "a", "client": "b", "text": "x"}', "'client' twice"),
        ("a.jsonl", '{"client": "\\ud800", "text": "x"}', "surrogate"),
        ("a.jsonl", '{"client": "\\u2800\\u200b", "text": "x"}', "no visible name"),
        ("a.jsonl", b'{"client": "a", "text": "\xff"}', "not UTF-8"),
        ("a.json", '{"users": ["a"], "user_data": {"a": {"x": [["t", "u"]]}}}', "list of texts"),
        (
            "a.json",
            '{"users": ["a"], "num_samples": [2], "user_data": {"a": {"x": ["t"]}}}',
            "'num_samples' is 2, and there are 1",
        ),
        (
            "a.json",
            '{"users": ["a"], "user_data": {"a": {"x": ["To be", "o be,", " be, "]}}}',
            "windows of characters",
        ),
        ("a.csv", "ada,I like it\nbo,So do I\n", "line 1: no field 'client', only 'ada'"),
        ("a.csv", 'client,text\na,"b\nb,c\n', "line 3: unexpected end"),
        ("a.txt", "Call me.".encode("utf-16-le"), "null characters"),
    ],
)
def test_what_cannot_be_read_is_refused(
    tmp_path: pathlib.Path, name: str, contents: str | bytes, message: str
) -> None:
    with refuses(name) as caught:
        _read(tmp_path, name, contents)
    assert message in str(caught.value)


_STRUCTURED = {
    "JSON lines": "\n".join(map(json.dumps, _objects(_RECORDS))),
    "a JSON array": json.dumps(_objects(_RECORDS), indent=2),
    "LEAF's form": json.dumps(_leaf(_RECORDS)),
    "JSON that was cut off": json.dumps(_leaf(_RECORDS))[:40],
    "a table": _table(_RECORDS, ","),
    "a table without a heading": "ada,I like it\nbo,So do I\ncy,Not me\n",
    "a table of two known columns, whatever follows": "text, Client\nI like it, and more,ada\n",
    "a long table": "a,b\n" + "so,it is\n" * 100_000,
    "XML": '<?xml version="1.0"?>\n<posts><row Body="So."/></posts>',
    "HTML": "\n<!DOCTYPE html><html><body>So.",
    "a document": "{\\rtf1\\ansi So.}",
}


@pytest.mark.parametrize("contents", _STRUCTURED.values(), ids=_STRUCTURED.keys())
@pytest.mark.parametrize("name", ["a.txt", "a", "a.unknown", "a.log"])
def test_text_that_is_no_prose_is_refused(tmp_path: pathlib.Path, contents: str, name: str) -> None:
    """Each of its clients would be a part of one."""
    with refuses(name, "--allow_structured_text"):
        _read(tmp_path, name, contents)
    path = tmp_path / name
    assert list(text_inputs.prose([path], Columns(), True)) == [(name, path.read_text())]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Dear Bo,\nthanks, and so long,\nAda\n",
        "Tyger Tyger, burning bright,\nIn the forests of the night;\n",
        "Rain, wind\nSnow, ice\nSun, heat\n",
        "[Illustration]\n\nOnce upon a time.",
        "<p align=center>\n<img src=x>\n\nA readme, which ends in prose.",
        "| a | b |\n|---|---|\n| c | d |\n",
        '"Well," he said.\n"No," she said.\n',
    ],
)
def test_prose_is_prose(tmp_path: pathlib.Path, text: str) -> None:
    assert _read(tmp_path, "a.txt", text) == [("a.txt", text)]
    assert _read(tmp_path, "b.md", text.encode("utf-8-sig")) == [("b.md", text)]
