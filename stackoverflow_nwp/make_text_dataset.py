r"""make-text-dataset: makes a federated text data set, one client per author or per file.

The result is a SQLite file in the format of TFF's StackOverflow data, one example per sentence,
its clients split into train (80 %), heldout (10 %) and test (10 %) by a hash of their names.
Sentences end at full stops, question and exclamation marks, and at blank lines.

Examples:
  make-text-dataset --input='books/*.txt' --output=books.sqlite
  make-text-dataset --input=posts.jsonl --client_column=author --text_column=body \
    --output=posts.sqlite
  make-text-dataset --input=reviews.csv --client_column=user --text_column=review \
    --output=reviews.sqlite
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

from absl import flags

from mf_aggregators.commands import command_line
from mf_aggregators.commands.command_line import FlagGroup
from mf_aggregators.privacy import ledgers
from mf_aggregators.progress_bars import ProgressBar
from simulations import flag_fields
from stackoverflow_nwp import datasets, federated_text, text_cleaning, text_inputs
from stackoverflow_nwp.federated_text import Example
from stackoverflow_nwp.text_inputs import Columns


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags of make-text-dataset.

    Flags:
      input: A file whose records name their client: .jsonl (a JSON object on each line), .json (an
        array of objects, or LEAF's users and user_data), .csv or .tsv (the first line names the
        columns); a .sqlite file of this format (its clients are split anew); a text file (one
        client each); a directory (its .txt files, at any depth); a quoted pattern such as
        "books/*.txt"; or "docstrings" for the documentation of the installed packages. It may be
        given several times. Required.
      client_column: The field of each record with the name of the client.
      text_column: The field of each record with the text; for LEAF's users, raw or x are found
        without it.
      allow_structured_text: Whether files that look like JSON, a table, XML or HTML, without such
        an ending, are read as the text of one client each.
      min_sentences: The fewest sentences of a client; clients with fewer are left out.
      output: The .sqlite file to write. Required.
    """
    texts, group = flag_fields.texts_of(define_flags), FlagGroup(values, "Data")
    group.repeated_paths("input", texts["input"])
    group.string("client_column", texts["client_column"], "client")
    group.string("text_column", texts["text_column"], "text")
    group.boolean("allow_structured_text", texts["allow_structured_text"], False)
    group.integer("min_sentences", texts["min_sentences"], 1, lower_bound=1)
    group = FlagGroup(values, "Output")
    group.path("output", texts["output"])
    group.overwrite()
    for name in ("input", "output"):
        group.require(name)


def split_anew(examples: Sequence[Example], min_sentences: int = 1) -> list[Example]:
    """Assigns clients to the splits train, heldout and test, and leaves out small clients.

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
            f"{error} The input has {len(by_client)} clients, {len(kept)} of them with "
            f"--min_sentences={min_sentences} or more: give more input or lower the limit."
        ) from error
    return [
        dataclasses.replace(example, split=splits[client])
        for client in sorted(kept)
        for example in kept[client]
    ]


def main(values: flags.FlagValues) -> None:
    """Reads the input files, writes the data set and prints a report."""
    output = pathlib.Path(values.output)
    command_line.check_choice(
        text_inputs.ending(output) in text_inputs.SQLITE,
        f"--output={output} must end in one of {', '.join(text_inputs.SQLITE)}.",
    )
    command_line.check_file(output, "output", values.overwrite)
    command_line.check_extra("a data set in TFF's format", ["tensorflow"])
    start = time.monotonic()
    fields: dict[str, object] = {"output": str(output)}
    if values.input == [datasets.DOCSTRINGS]:
        # Docstrings have splits of their own, and own rules on which modules count.
        fields["sentences_before_deduplication"] = datasets.build_docstrings(output)
    else:
        command_line.check_choice(
            datasets.DOCSTRINGS not in values.input,
            f"--input={datasets.DOCSTRINGS} cannot be combined with other input.",
        )
        names: dict[str, str] = {}
        examples = list(_read(values, names))
        command_line.check_choice(bool(examples), "The input holds no sentences.")
        federated_text.write(output, split_anew(examples, values.min_sentences))
        # Report how many names were merged, because they look like another client's name.
        fields["merged_client_names"] = len(names) - len(set(names.values()))
        fields["alike_client_names"] = ledgers.num_alike_names(set(names.values()))
    splits = federated_text.count_splits(output)
    fields["clients"] = sum(split.clients for split in splits.values())
    fields["sentences"] = sum(split.examples for split in splits.values())
    for name in federated_text.SPLITS:
        if name in splits:
            fields[f"{name}_clients"] = splits[name].clients
            fields[f"{name}_sentences"] = splits[name].examples
    fields["seconds"] = time.monotonic() - start
    text = command_line.table(list(fields.items()))
    if number := fields.get("alike_client_names"):
        text = (
            f"WARNING: {number} clients have names that look like another client's. Each counts as "
            f"a client of its own.\n\n{text}"
        )
    command_line.print_result(values, fields, text)


def run() -> None:
    """Entry point of the console command."""
    # Silence TensorFlow, which encodes the examples: it logs at length when it is imported.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    sys.exit(command_line.run(__doc__ or "", define_flags, main))


def _read(values: flags.FlagValues, names: dict[str, str]) -> Iterator[Example]:
    """Yields the sentences of all input; fills ``names`` with clients' given and new names."""
    # A file is read once, even if several patterns or paths lead to it.
    found: dict[str, pathlib.Path] = {}
    for path in (path for text in values.input for path in _expand(text)):
        found.setdefault(os.path.realpath(path), path.absolute())
    paths = list(found.values())
    columns = Columns(values.client_column, values.text_column)
    text_files = [path for path in paths if text_inputs.is_prose(path)]
    others = [path for path in paths if not text_inputs.is_prose(path)]
    # The progress bar's line is removed at the end: a refused input leaves one line on standard
    # error, not two.
    progress = ProgressBar(desc="Reading sentences", unit="sentence", leave=False)
    with progress:
        for example in itertools.chain(
            *(_examples_of(path, columns, names) for path in others),
            _sentences(text_inputs.prose(text_files, columns, values.allow_structured_text), names),
        ):
            progress.update()
            yield example


def _examples_of(path: pathlib.Path, columns: Columns, names: dict[str, str]) -> Iterator[Example]:
    """Yields the sentences of one file with clients' names: records, a table or SQLite."""
    if text_inputs.ending(path) not in text_inputs.SQLITE:
        yield from _sentences(text_inputs.records(path, columns), names)
        return
    federated_text.check_format(path)
    for example in federated_text.read_examples(path):
        yield dataclasses.replace(example, client_id=_name(example.client_id, names))


def _sentences(texts: Iterator[tuple[str, str]], names: dict[str, str]) -> Iterator[Example]:
    for client, text in texts:
        name = _name(client, names)
        for tokens in text_cleaning.sentences_of_text(text):
            yield Example(client_id=name, split="", tokens=" ".join(tokens), title=name)


def _name(client: str, names: dict[str, str]) -> str:
    """Returns a client's name in the data set; names that look the same become one name."""
    if client not in names:
        # Replace single quotes: TFF puts names between single quotes in SQL, without escaping.
        names[client] = ledgers.name_in_one_form(client).replace("'", "%27")
    return names[client]


def _expand(text: str) -> list[pathlib.Path]:
    """Returns the files that one --input names, sorted."""
    path = pathlib.Path(text)
    if path.is_file():
        return [path]
    if path.is_dir():
        return _text_files(path, text)
    found = sorted(pathlib.Path(name) for name in glob.glob(str(path), recursive=True))
    files = [name for name in found if name.is_file()]
    if not files:
        raise ValueError(f"--input={text}: no such file, directory with .txt files or pattern.")
    return files


def _text_files(directory: pathlib.Path, text: str) -> list[pathlib.Path]:
    """Returns the .txt files in a directory that an --input names."""
    files = [path for path in sorted(directory.rglob("*")) if path.is_file()]
    found = [path for path in files if text_inputs.ending(path) == ".txt"]
    if not found:
        others = sorted({path.suffix for path in files if not text_inputs.is_prose(path)})
        hint = f": --input='{text}/*{others[0]}' names others" if others else ""
        raise ValueError(f"--input={text}: no .txt files in this directory{hint}.")
    return found


if __name__ == "__main__":
    run()
