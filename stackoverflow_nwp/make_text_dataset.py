r"""make-text-dataset: makes a federated text data set, one client per file or per author.

The result is a SQLite file in the format of TFF's StackOverflow data, one example per sentence,
its clients split into train (80 %), heldout (10 %) and test (10 %) by a hash of their names.
Sentences end at full stops, question and exclamation marks, and at blank lines.

Examples:
  make-text-dataset --input='books/*.txt' --output=books.sqlite
  make-text-dataset --input=posts.jsonl --client_column=author --text_column=body \
    --output=posts.sqlite
  make-text-dataset --input=docstrings --output=docstrings.sqlite
"""

import dataclasses
import glob
import itertools
import os
import pathlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from absl import flags

from mf_aggregators import validation
from mf_aggregators.commands import command_line, flag_groups, output_paths
from mf_aggregators.commands.flag_groups import FlagGroup
from mf_aggregators.progress_bars import ProgressBar
from stackoverflow_nwp import datasets, federated_text, text_cleaning
from stackoverflow_nwp.federated_text import Example

_JSON_LINES = (".jsonl", ".ndjson")
_SQLITE = (".sqlite", ".sqlite3", ".db")


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags of make-text-dataset.

    Args:
        values: Where to define them.
    """
    group = FlagGroup(values, "Data")
    group.repeated_paths(
        "input",
        "A text file (one client each), a .jsonl file (a JSON object a line), a .sqlite file of"
        " this format (its clients are split anew), a directory (its .txt files, at any depth), a"
        ' quoted pattern such as "books/*.txt", or "docstrings" for the installed packages\''
        " documentation. It may be given several times. Required.",
    )
    group.string(
        "client_column",
        "The field of a .jsonl file's objects that names the client.",
        "client",
    )
    group.string("text_column", "The field of a .jsonl file's objects that has the text.", "text")
    group.integer("min_sentences", "Clients with fewer sentences are left out.", 1, lower_bound=1)
    FlagGroup(values, "Output").path("output", "The .sqlite file to write. Required.")
    output_paths.define_overwrite(values)
    for name in ("input", "output"):
        flag_groups.require(values, name)


def text_file_examples(paths: Sequence[pathlib.Path]) -> Iterator[Example]:
    """Reads text files, one client each.

    Args:
        paths: The files.

    Yields:
        Their sentences. A client is named after its file, seen from the directory that contains
        them all.

    Raises:
        ValueError: A file is not UTF-8 text.
        OSError: A file cannot be read.
    """
    if not paths:
        return
    absolute = [path.absolute() for path in paths]
    root = pathlib.Path(os.path.commonpath([path.parent for path in absolute]))
    for path in absolute:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 text ({error.reason}): convert it.") from error
        client = path.relative_to(root).as_posix()
        if not _is_utf8(client):
            raise ValueError(f"{path}: its name, which names a client, is not UTF-8: rename it.")
        yield from _examples(client, text)


def json_lines_examples(
    path: pathlib.Path, client_column: str, text_column: str
) -> Iterator[Example]:
    """Reads a file with one JSON object a line.

    Args:
        path: The file. Blank lines are passed over.
        client_column: The field that names the client, a text or an integer.
        text_column: The field that holds text.

    Yields:
        The sentences, in the order of the file.

    Raises:
        ValueError: A line is no JSON object or lacks one of the fields.
        OSError: The file cannot be read.
    """
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                client, text = _client_and_text(line, client_column, text_column)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
            yield from _examples(client, text)


def _client_and_text(line: bytes, client_column: str, text_column: str) -> tuple[str, str]:
    """Reads a JSON object's client and text; raises ValueError for any other line."""
    try:
        record = validation.parsed_json(line)
    except ValueError as error:
        raise ValueError(f"not JSON ({error}).") from error
    if not isinstance(record, dict):
        raise ValueError("expected a JSON object.")
    for flag, column in (("client_column", client_column), ("text_column", text_column)):
        if column not in record:
            raise ValueError(
                f"no field {column!r}, only {', '.join(map(repr, record))}: name it with --{flag}."
            )
    client, text = record[client_column], record[text_column]
    if isinstance(client, bool) or not isinstance(client, str | int) or client == "":
        raise ValueError(f"{client_column!r} must be a text or an integer.")
    if not isinstance(text, str):
        raise ValueError(f"{text_column!r} must be a text.")
    for column, value in ((client_column, str(client)), (text_column, text)):
        if not _is_utf8(value):
            raise ValueError(f"{column!r} has half of a character (a lone surrogate): mend it.")
    return str(client), text


def _is_utf8(text: str) -> bool:
    """Whether a text can be written in UTF-8, as the data set has it."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def split_anew(examples: Sequence[Example], min_sentences: int = 1) -> list[Example]:
    """Assigns clients to train, heldout and test.

    Args:
        examples: Sentences of at least three clients.
        min_sentences: Clients with fewer are left out.

    Returns:
        The examples of the clients kept, sorted by client, in their own order within each.

    Raises:
        ValueError: Fewer than three clients have enough sentences.
    """
    by_client: dict[str, list[Example]] = {}
    for example in examples:
        by_client.setdefault(example.client_id, []).append(example)
    kept = {client: own for client, own in by_client.items() if len(own) >= min_sentences}
    try:
        splits = federated_text.split_clients(kept)
    except ValueError as error:
        raise ValueError(
            f"{error} The input has {len(by_client)} clients, {len(kept)} of them with"
            f" --min_sentences={min_sentences} or more: give more input or lower that."
        ) from error
    return [
        dataclasses.replace(example, split=splits[client])
        for client in sorted(kept)
        for example in kept[client]
    ]


def main(values: flags.FlagValues) -> None:
    """Reads the input, writes the data set and reports.

    Args:
        values: The parsed flags.
    """
    output = pathlib.Path(values.output)
    command_line.check_choice(not output.is_dir(), f"--output={output} is a directory.")
    command_line.check_choice(
        output.suffix in _SQLITE, f"--output={output} must end in one of {', '.join(_SQLITE)}."
    )
    output_paths.check_file(output, "output", values.overwrite)
    command_line.check_extra("a data set in TFF's format", ["tensorflow"])
    start = time.monotonic()
    fields: dict[str, Any] = {"output": str(output)}
    if values.input == [datasets.DOCSTRINGS]:
        # These have splits of their own, and rules for which modules count.
        counts = datasets.build_docstrings(output)
        fields["sentences_before_deduplication"] = counts.sentences
    else:
        command_line.check_choice(
            datasets.DOCSTRINGS not in values.input,
            f"--input={datasets.DOCSTRINGS} cannot be combined with other input.",
        )
        examples = list(_read(values))
        command_line.check_choice(bool(examples), "The input holds no sentences.")
        federated_text.write(output, split_anew(examples, values.min_sentences))
    splits = federated_text.count_splits(output)
    fields["clients"] = sum(split.clients for split in splits.values())
    fields["sentences"] = sum(split.examples for split in splits.values())
    for name in federated_text.SPLITS:
        if name in splits:
            fields[f"{name}_clients"] = splits[name].clients
            fields[f"{name}_sentences"] = splits[name].examples
    fields["seconds"] = time.monotonic() - start
    command_line.print_result(values, fields, command_line.table(list(fields.items())))


def run() -> None:
    """Entry point of the console command."""
    # TensorFlow, which encodes the examples, logs at length as it is loaded.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    sys.exit(command_line.run(__doc__ or "", define_flags, main))


def _read(values: flags.FlagValues) -> Iterator[Example]:
    """Yields the sentences of all input."""
    # A file that two patterns match counts once.
    paths = list(dict.fromkeys(path.absolute() for text in values.input for path in _expand(text)))
    text_files = [path for path in paths if path.suffix not in (*_JSON_LINES, *_SQLITE)]
    # Its line goes at the end: a refused input leaves one line on standard error, not two.
    progress = ProgressBar(desc="Reading sentences", unit="sentence", leave=False)
    with progress:
        for example in itertools.chain(
            *(_examples_of(path, values) for path in paths), text_file_examples(text_files)
        ):
            progress.update()
            yield example


def _examples_of(path: pathlib.Path, values: flags.FlagValues) -> Iterator[Example]:
    """Yields the sentences of a JSON Lines or SQLite file, and none of a text file."""
    if path.suffix in _JSON_LINES:
        yield from json_lines_examples(path, values.client_column, values.text_column)
    elif path.suffix in _SQLITE:
        federated_text.check_format(path)
        yield from federated_text.read_examples(path)


def _expand(text: str) -> list[pathlib.Path]:
    """Lists the files that one --input names, sorted."""
    path = pathlib.Path(text)
    if path.is_file():
        return [path]
    if path.is_dir():
        found = sorted(path.rglob("*.txt"))
    else:
        found = sorted(pathlib.Path(name) for name in glob.glob(str(path), recursive=True))
    files = [name for name in found if name.is_file()]
    if not files:
        raise ValueError(f"--input={text}: no such file, directory with .txt files or pattern.")
    return files


def _examples(client: str, text: str) -> Iterator[Example]:
    # TFF puts names between single quotes in SQL, without escaping any inside.
    name = client.replace("'", "%27").replace("\0", "%00")
    for tokens in text_cleaning.sentences_of_text(text):
        yield Example(client_id=name, split="", tokens=" ".join(tokens), title=name)


if __name__ == "__main__":
    run()
