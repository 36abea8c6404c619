"""Reads users' text files by client; files in a form that is not recognised are refused.

If a table or a JSON file were read as prose, it would become one client, and the unit of privacy
would be a file in place of a person. So the form of a file is recognised by its ending (in capitals
or not), and a file that is read as the text of one client may not look like another form.
"""

import codecs
import csv
import dataclasses
import io
import itertools
import json
import os
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence

from mf_aggregators import inputs
from mf_aggregators.privacy import ledgers

JSON = ".json"
JSON_LINES = (".jsonl", ".ndjson")
# Endings of tables, each with the delimiters that are tried; the first that fits is used.
TABLES = {".csv": (",", ";", "\t"), ".tsv": ("\t",)}
SQLITE = (".sqlite", ".sqlite3", ".db")
# Files with these endings are not read as prose, even if they begin like it.
_STRUCTURED = (".htm", ".html", ".rtf", ".toml", ".xhtml", ".xml", ".yaml", ".yml")

# The fields of LEAF's data (Caldas et al. 2018) that may hold text, unless a flag names one.
_LEAF_TEXTS = ("raw", "x")

_MARKS = (
    # UTF-32 comes first, because its byte order mark begins with that of UTF-16.
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)

_QUOTED = r'"(?:[^"\\]|\\.)*"'
_JSON_BEGINS = re.compile(
    rf"\{{\s*(?:{_QUOTED}|'[^'\n]*')\s*:|\[[\s\[]*(?:\{{\s*[\"']|{_QUOTED}\s*[,\]])"
)
_XML_BEGINS = re.compile(r"<\?xml\b|<!doctype\b|<html\b", re.IGNORECASE)
# A text is other mark-up only if tags enclose all of it: Markdown may begin with a tag too.
_TAGS = re.compile(r"<[a-z][^<>]*>.*</[a-z][^<>]*>\s*", re.IGNORECASE | re.DOTALL)
_DOCUMENT_BEGINS = re.compile(r"\{\\rtf|%PDF-|%!PS")
_ROWS_LOOKED_AT = 50
_CHARACTERS_LOOKED_AT = 200_000
_MOST_FIELDS_SHOWN = 20
# The most characters in a field of a table: the largest limit that every platform accepts.
_LARGEST_FIELD = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Columns:
    """Names of the fields of a record that have its client and its text."""

    client: str = "client"
    text: str = "text"


def ending(path: pathlib.Path) -> str:
    """Returns the ending of a file's name, in small letters."""
    return path.suffix.lower()


def is_prose(path: pathlib.Path) -> bool:
    """Returns whether a file's name says that it is the text of one client."""
    return ending(path) not in (JSON, *JSON_LINES, *TABLES, *SQLITE)


def records(path: pathlib.Path, columns: Columns) -> Iterator[tuple[str, str]]:
    """Yields the client and the text of each record in a JSON, JSON lines or table file.

    Raises:
        ValueError: The file has another form, or one of its records has no client or text.
        OSError: The file cannot be read.
    """
    kind = ending(path)
    if kind == JSON:
        yield from _json(path, columns)
    elif kind in JSON_LINES:
        yield from _json_lines(path, columns)
    else:
        yield from _table(path, columns, TABLES[kind])


def prose(
    paths: Sequence[pathlib.Path], columns: Columns, allow_structured: bool = False
) -> Iterator[tuple[str, str]]:
    """Reads text files, each of which becomes one client.

    Args:
        paths: The files.
        columns: The names of columns by which a table is recognised.
        allow_structured: Whether to read files that look like anything but prose.

    Yields:
        A client, named after its file as seen from the directory that contains them all, and its
        text.

    Raises:
        ValueError: A file is no text, or looks like JSON, a table, XML or a document.
        OSError: A file cannot be read.
    """
    if not paths:
        return
    absolute = [path.absolute() for path in paths]
    root = pathlib.Path(os.path.commonpath([path.parent for path in absolute]))
    for path in absolute:
        text = _contents(path)
        found = None if allow_structured else structure(path, text, columns)
        if found is not None:
            raise ValueError(
                f"{path} {found}. As plain text, the whole file would be one client: use "
                "--allow_structured_text for that."
            )
        yield _named(path, path.relative_to(root).as_posix()), text


def structure(path: pathlib.Path, text: str, columns: Columns) -> str | None:
    """Returns the end of a message on a text that is not prose, with advice; None for prose."""
    beginning = text[:_CHARACTERS_LOOKED_AT].lstrip()
    if _JSON_BEGINS.match(beginning):
        return (
            "looks like JSON: name it .jsonl if each line is an object, or .json if the file is "
            "one array or has LEAF's form"
        )
    if (
        _XML_BEGINS.match(beginning)
        or _DOCUMENT_BEGINS.match(beginning)
        or _TAGS.fullmatch(text.strip())
    ):
        return (
            "looks like XML, HTML or a document: make plain text of it, or a .csv or .jsonl file"
            f" with the fields {columns.client!r} and {columns.text!r}"
        )
    number = _num_columns(beginning, columns, is_cut=len(text) > _CHARACTERS_LOOKED_AT)
    if number > 1:
        return (
            f"looks like a table of {number} columns: name it .csv or .tsv, with a first line that"
            " names them"
        )
    if ending(path) in _STRUCTURED:
        return (
            "has an ending that is not that of plain text: make plain text of it, or a .csv or "
            f".jsonl file with the fields {columns.client!r} and {columns.text!r}"
        )
    return None


def _num_columns(text: str, columns: Columns, is_cut: bool) -> int:
    """Returns the number of columns if a text is a table; 0 if it is not.

    In prose, a comma or a semicolon is followed by a space or the end of the line, and different
    lines have different numbers of commas or semicolons.
    """
    for delimiter in (",", ";", "\t", "|"):
        lines = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
        try:
            rows = list(itertools.islice(filter(None, lines), _ROWS_LOOKED_AT))
        except csv.Error:
            continue
        if is_cut and len(rows) < _ROWS_LOOKED_AT:
            # Leave out the last row of a text that was cut, because it may be incomplete.
            rows = rows[:-1]
        if not rows or len(rows[0]) < 2:
            continue
        heading = [name.strip().lower() for name in rows[0]]
        if {columns.client.lower(), columns.text.lower()} <= set(heading):
            return len(heading)
        later = (field for row in rows for field in row[1:])
        if (
            len(rows) > 1
            and all(heading)
            and all(len(row) == len(heading) for row in rows)
            and (delimiter == "\t" or not any(field[:1].isspace() for field in later))
        ):
            return len(heading)
    return 0


def _encoding(path: pathlib.Path) -> str:
    with open(path, "rb") as file:
        first = file.read(4)
    return next((name for mark, name in _MARKS if first.startswith(mark)), "utf-8-sig")


def _not_text(path: pathlib.Path, reason: str) -> ValueError:
    return ValueError(
        f"{path} is not UTF-8 text ({reason}): convert it, or unpack it if it is an archive."
    )


def _contents(path: pathlib.Path) -> str:
    try:
        text = path.read_text(encoding=_encoding(path))
    except UnicodeError as error:
        raise _not_text(path, getattr(error, "reason", str(error))) from error
    if "\0" in text:
        # Text with null characters is UTF-16 without a byte order mark, or another program's
        # format.
        raise _not_text(path, "it holds null characters")
    return text


def _named(place: object, client: str) -> str:
    """Returns a client's name; raises ValueError if it is invisible or cannot be stored."""
    if not ledgers.name_in_one_form(_encodable(place, client)):
        raise ValueError(f"{place}: the client has no visible name, found {client!a}.")
    return client


def _encodable(place: object, text: str) -> str:
    """Returns a text; raises ValueError if it cannot be stored as UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(
            f"{str(place)!a}: a text has half of a character (a lone surrogate): remove it."
        ) from None
    return text


def _parsed(text: str) -> object:
    return inputs.parsed_json(text, _without_repeats)


def _without_repeats(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"an object has the field {twice!a} twice")
    return found


def _json_lines(path: pathlib.Path, columns: Columns) -> Iterator[tuple[str, str]]:
    with open(path, encoding=_encoding(path), newline="\n") as file:
        try:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _record(f"{path}, line {number}", line, columns)
        except UnicodeError as error:
            raise _not_text(path, getattr(error, "reason", str(error))) from error


def _record(place: str, line: str, columns: Columns) -> tuple[str, str]:
    try:
        record = _parsed(line)
    except ValueError as error:
        raise ValueError(
            f"{place}: not JSON ({error}). Each line must be an object; a file that is one array, "
            f"or has LEAF's form, must end in {JSON}."
        ) from error
    return _client_and_text(place, record, columns)


def _client_and_text(place: str, record: object, columns: Columns) -> tuple[str, str]:
    if not isinstance(record, dict):
        raise ValueError(f"{place}: expected a JSON object.")
    _check_fields(place, list(record), columns)
    client, text = record[columns.client], record[columns.text]
    if isinstance(client, bool) or not isinstance(client, str | int):
        raise ValueError(f"{place}: {columns.client!r} must be a text or an integer.")
    if not isinstance(text, str):
        raise ValueError(f"{place}: {columns.text!r} must be a text.")
    return _named(place, str(client)), _encodable(place, text)


def _check_fields(place: str, fields: Sequence[str], columns: Columns) -> None:
    for flag, column in (("client_column", columns.client), ("text_column", columns.text)):
        if column not in fields:
            shown = ", ".join(map(ascii, fields[:_MOST_FIELDS_SHOWN])) or "none"
            raise ValueError(f"{place}: no field {column!r}, only {shown}: name it with --{flag}.")


def _json(path: pathlib.Path, columns: Columns) -> Iterator[tuple[str, str]]:
    text = _contents(path)
    try:
        value = _parsed(text)
    except json.JSONDecodeError as error:
        first = next(filter(str.strip, io.StringIO(text)), "")
        try:
            _parsed(first)
        except ValueError:
            raise ValueError(f"{path} is not JSON ({error}).") from error
        yield from _json_lines(path, columns)
        return
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}.") from error
    if isinstance(value, dict) and {"users", "user_data"} <= set(value):
        yield from _leaf(path, value, columns)
    elif isinstance(value, list):
        for number, record in enumerate(value, start=1):
            yield _client_and_text(f"{path}, entry {number}", record, columns)
    else:
        yield _client_and_text(str(path), value, columns)


def _leaf(
    path: pathlib.Path, value: Mapping[str, object], columns: Columns
) -> Iterator[tuple[str, str]]:
    """Reads JSON in LEAF's form, with ``users``, ``num_samples`` and ``user_data``."""
    users, data = value["users"], value["user_data"]
    numbers = value.get("num_samples", [None] * len(users) if isinstance(users, list) else None)
    if (
        not isinstance(users, list)
        or not isinstance(data, dict)
        or not isinstance(numbers, list)
        or len(numbers) != len(users)
        or sorted(map(str, users)) != sorted(data)
    ):
        raise ValueError(
            f"{path} has not LEAF's form: 'users' must list the names in 'user_data', each once,"
            " and 'num_samples' a number for each."
        )
    for user, number in zip(map(str, users), numbers, strict=True):
        place = f"{path}, user {user!a}"
        for text in _texts_of_user(place, data[user], number, columns):
            yield _named(place, user), _encodable(place, text)


def _texts_of_user(place: str, own: object, number: object, columns: Columns) -> Sequence[str]:
    names = (columns.text, *_LEAF_TEXTS)
    fields = own if isinstance(own, dict) else {}
    name = next((each for each in names if each in fields), None)
    if name is None:
        raise ValueError(
            f"{place}: expected an object with text in one of {', '.join(map(repr, names))}: name"
            " the field with --text_column."
        )
    texts = [fields[name]] if isinstance(fields[name], str) else fields[name]
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(
            f"{place}: {name!r} must be a text or a list of texts: name such a field with "
            "--text_column, or make a .jsonl file of it."
        )
    if name == "x" and isinstance(number, int) and number != len(texts):
        raise ValueError(f"{place}: 'num_samples' is {number}, and there are {len(texts)} texts.")
    if len(texts) > 1 and len(texts[0]) > 1 and texts[1].startswith(texts[0][1:]):
        raise ValueError(
            f"{place}: {name!r} has overlapping windows of characters instead of texts: use a file "
            "with the raw text (LEAF's --raw)."
        )
    return texts


def _table(
    path: pathlib.Path, columns: Columns, delimiters: Sequence[str]
) -> Iterator[tuple[str, str]]:
    limit = csv.field_size_limit(_LARGEST_FIELD)
    try:
        with open(path, encoding=_encoding(path), newline="") as file:
            first = file.readline()
            file.seek(0)
            yield from _rows(path, file, columns, _delimiter(first, columns, delimiters))
    except UnicodeError as error:
        raise _not_text(path, getattr(error, "reason", str(error))) from error
    finally:
        csv.field_size_limit(limit)


def _fields(line: str, delimiter: str) -> list[str]:
    return [name.strip() for name in next(csv.reader([line], delimiter=delimiter), [])]


def _delimiter(heading: str, columns: Columns, delimiters: Sequence[str]) -> str:
    """Returns the delimiter with which a table's heading has the columns, or else most fields."""
    by_delimiter = {each: _fields(heading, each) for each in delimiters}
    for delimiter, fields in by_delimiter.items():
        if {columns.client, columns.text} <= set(fields):
            return delimiter
    return max(delimiters, key=lambda each: len(by_delimiter[each]))


def _rows(
    path: pathlib.Path, lines: Iterator[str], columns: Columns, delimiter: str
) -> Iterator[tuple[str, str]]:
    # Parse strictly: otherwise a quote that is never closed would give one client all the rows that
    # follow.
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    heading: list[str] | None = None
    try:
        for row in reader:
            place = f"{path}, line {reader.line_num}"
            if not row:
                continue
            if heading is None:
                heading = [name.strip() for name in row]
                _check_fields(place, heading, columns)
                if len(set(heading)) != len(heading):
                    raise ValueError(f"{place}: two columns have the same name: rename one.")
                client, text = heading.index(columns.client), heading.index(columns.text)
                continue
            if len(row) != len(heading):
                raise ValueError(
                    f"{place}: found {len(row)} fields, and the first line has {len(heading)}: put"
                    " fields with the separator, a quote or a line break in double quotes."
                )
            yield _named(place, row[client]), row[text]
    except csv.Error as error:
        raise ValueError(f"{path}, line {reader.line_num}: {error}.") from error
