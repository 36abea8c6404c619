"""Reads and writes federated text in the file format of TFF's StackOverflow data.

A SQLite file with one row per example (a serialized `tf.train.Example` of StackOverflow's six
fields) and one row per client and split, which `tff.simulation.datasets.SqlClientData` reads.
"""

import collections
import contextlib
import dataclasses
import hashlib
import os
import pathlib
import sqlite3
from collections.abc import Iterable, Iterator

from mf_aggregators import atomic_files
from mf_aggregators.progress_bars import ProgressBar

# The names of splits in StackOverflow's own file.
TRAIN = "train"
HELDOUT = "heldout"
TEST = "test"
SPLITS = (TRAIN, HELDOUT, TEST)

_SCHEMA = """
CREATE TABLE examples (
    split_name TEXT NOT NULL,
    client_id TEXT NOT NULL,
    serialized_example_proto BLOB NOT NULL);
CREATE TABLE client_metadata (
    client_id TEXT NOT NULL,
    split_name TEXT NOT NULL,
    num_examples INTEGER NOT NULL);
"""
# Indexes by client, because TFF reads one client at a time. They are created after all rows, which
# is faster.
_INDEXES = """
CREATE INDEX idx_examples_client_id ON examples (client_id);
CREATE INDEX idx_metadata_client_id ON client_metadata (client_id);
"""
_REQUIRED_COLUMNS = {
    "examples": {"split_name", "client_id", "serialized_example_proto"},
    "client_metadata": {"client_id", "split_name", "num_examples"},
}
# The advice in messages about a file of another form.
_REMEDY = "make one with make-text-dataset"
_CHUNK_BYTES = 1 << 20
# The smallest file that is hashed with a progress bar: a smaller file takes less than a second.
_FEWEST_BYTES_WITH_BAR = 256 << 20


@dataclasses.dataclass(frozen=True)
class Example:
    """Example of federated text, a sentence of one client with StackOverflow's fields.

    Attributes:
        client_id: The client. Without single quotes: TFF puts the name into an SQL text unchanged.
        split: The split that the client belongs to.
        tokens: The sentence's tokens, separated by single spaces.
        creation_date: When the sentence was written.
        score: The score of the sentence's post.
        tags: The tags of its post, separated by "|".
        title: The title of its post.
        post_type: "question" or "answer".
    """

    client_id: str
    split: str
    tokens: str
    creation_date: str = "1970-01-01 00:00:00 UTC"
    score: int = 0
    tags: str = ""
    title: str = ""
    post_type: str = "question"


@dataclasses.dataclass(frozen=True)
class SplitCounts:
    """The numbers of clients and examples in one split."""

    clients: int
    examples: int


@dataclasses.dataclass(frozen=True)
class Contents:
    """Identity of a SQLite file's contents at one moment, by which later changes are noticed.

    Attributes:
        path: The file.
        sha256: The SHA-256 of all its bytes, in hexadecimal digits.
        identity: Device, inode, size and both times of the file, as they were at that moment. If
            they differ later, the file has changed; equal values do not replace the hash.
    """

    path: pathlib.Path
    sha256: str
    identity: tuple[int, ...]

    @classmethod
    def of(cls, path: pathlib.Path) -> "Contents":
        """Hashes a file and returns its contents' identity; takes about a second for a gigabyte.

        Raises:
            OSError: The file cannot be read.
            ValueError: See `check`.
        """
        identity, digest = _identity(path), hashlib.sha256()
        with (
            path.open("rb") as file,
            ProgressBar(
                total=path.stat().st_size,
                desc=f"Hashing {path.name}",
                unit="B",
                unit_scale=True,
                disable=path.stat().st_size < _FEWEST_BYTES_WITH_BAR,
            ) as bar,
        ):
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
                bar.update(len(chunk))
        contents = cls(path, digest.hexdigest(), identity)
        contents.check()
        return contents

    def check(self) -> None:
        """Checks, after something was read, that the file still has these contents.

        Raises:
            OSError: The file cannot be read.
            ValueError: The file has changed, or another program has changes that are not written
                into it yet.
        """
        # SQLite keeps unwritten changes next to the real file, also if the path is a link to it.
        file = pathlib.Path(os.path.realpath(self.path))
        waiting = file.with_name(f"{file.name}-wal")
        if waiting.exists() and waiting.stat().st_size:
            raise ValueError(
                f"{self.path} has changes that are still in {waiting}: close the program that "
                "writes them, and run the same command again."
            )
        if _identity(self.path) != self.identity:
            raise ValueError(
                f"{self.path} has changed while it was read: run the same command again once no"
                " other program writes to it."
            )


def _identity(path: pathlib.Path) -> tuple[int, ...]:
    status = path.stat()
    # The modification time alone is not enough, because programs can set it; the system sets the
    # change time whenever a file is written.
    times = (status.st_mtime_ns, status.st_ctime_ns)
    return (status.st_dev, status.st_ino, status.st_size, *times)


def split_of_client(
    client_id: str, heldout_fraction: float = 0.1, test_fraction: float = 0.1
) -> str:
    """Assigns a client to "train", "heldout" or "test" by a hash of its name alone."""
    position = _position(client_id)
    if position < test_fraction:
        return TEST
    if position < test_fraction + heldout_fraction:
        return HELDOUT
    return TRAIN


def split_clients(client_ids: Iterable[str]) -> dict[str, str]:
    """Assigns clients to splits so that none is empty.

    Args:
        client_ids: The clients, at least three different ones.

    Returns:
        The split of each client, by `split_of_client`. If this leaves a split empty, the client
        with the smallest hash in the largest split is moved there.

    Raises:
        ValueError: There are fewer than three clients.
    """
    in_order = sorted(set(client_ids), key=_position)
    if len(in_order) < len(SPLITS):
        raise ValueError(
            "At least three clients are needed, one each for training, validation and the test, "
            f"found {len(in_order)}."
        )
    splits = {client: split_of_client(client) for client in in_order}
    for split in SPLITS:
        if split not in splits.values():
            sizes = collections.Counter(splits.values())
            largest = max(SPLITS, key=lambda other: sizes[other])
            splits[next(client for client in in_order if splits[client] == largest)] = split
    return splits


def serialize(example: Example) -> bytes:
    """Serializes an example in StackOverflow's format; equal examples give equal bytes."""
    # Import here: loading TensorFlow takes seconds, and other functions of this module do without.
    import tensorflow as tf

    message = tf.train.Example()
    feature = message.features.feature
    for name, text in (
        ("creation_date", example.creation_date),
        ("tags", example.tags),
        ("title", example.title),
        ("tokens", example.tokens),
        ("type", example.post_type),
    ):
        feature[name].bytes_list.value.append(text.encode("utf-8"))
    feature["score"].int64_list.value.append(example.score)
    encoded: bytes = message.SerializeToString(deterministic=True)
    return encoded


def _position(client_id: str) -> float:
    """Maps a client's name to a number in [0, 1) that looks uniformly random."""
    digest = hashlib.sha256(client_id.encode("utf-8")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def write(path: pathlib.Path, examples: Iterable[Example]) -> dict[str, SplitCounts]:
    """Writes examples to a file that TFF's `SqlClientData` reads.

    Args:
        path: The file, replaced in one step if it is there.
        examples: The examples, in the order that each client's are to have.

    Returns:
        The counts of each split that occurs.

    Raises:
        ValueError: There are no examples, or a client's name is empty or holds a single quote or
            a null character.
    """

    def rows() -> Iterator[tuple[str, str, bytes]]:
        for example in examples:
            if not example.client_id or "'" in example.client_id or "\0" in example.client_id:
                raise ValueError(
                    f"The client name {example.client_id!r} is empty or holds a single quote or a"
                    " null character, which TFF cannot look up: rename the client."
                )
            yield example.split, example.client_id, serialize(example)

    return write_serialized(path, rows())


def write_serialized(
    path: pathlib.Path, rows: Iterable[tuple[str, str, bytes]]
) -> dict[str, SplitCounts]:
    """Writes already serialized examples to a file of federated text; see `write`.

    Args:
        path: The file, replaced in one step if it is there.
        rows: The split, the client and the bytes of `serialize` of each example. Names of clients
            are not checked.

    Returns:
        The counts of each split that occurs.

    Raises:
        ValueError: There are no examples.
    """
    numbers: collections.Counter[tuple[str, str]] = collections.Counter()

    def counted() -> Iterator[tuple[str, str, bytes]]:
        for split, client, serialized in rows:
            numbers[client, split] += 1
            yield split, client, serialized

    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_files.writing(path) as temporary:
        connection = sqlite3.connect(temporary.name)
        try:
            # SQLite's journal is off: the file gets its name only when it is complete.
            connection.execute("PRAGMA journal_mode = OFF")
            connection.execute("PRAGMA synchronous = OFF")
            connection.executescript(_SCHEMA)
            connection.executemany("INSERT INTO examples VALUES (?, ?, ?)", counted())
            if not numbers:
                raise ValueError("There are no examples to write.")
            connection.executemany(
                "INSERT INTO client_metadata VALUES (?, ?, ?)",
                ((client, split, number) for (client, split), number in sorted(numbers.items())),
            )
            connection.commit()
            connection.executescript(_INDEXES)
        finally:
            connection.close()
    return count_splits(path)


def fields_of_proto(serialized: bytes, needed: str) -> dict[str, str | int]:
    """Returns the first text or integer of each field of a serialized example, by name.

    Raises:
        ValueError: The bytes are no example, or it has no text in the field that is needed.
    """
    import tensorflow as tf
    from google.protobuf import message  # type: ignore[import-untyped]

    try:
        features = tf.train.Example.FromString(serialized).features.feature
    # Serialized values that are not bytes raise a TypeError.
    except (message.DecodeError, TypeError) as error:
        raise ValueError(f"An example holds no `{needed}`.") from error
    found: dict[str, str | int] = {}
    for name, feature in features.items():
        if feature.bytes_list.value:
            found[name] = str(feature.bytes_list.value[0], "utf-8", "replace")
        elif feature.int64_list.value:
            found[name] = feature.int64_list.value[0]
    if not isinstance(found.get(needed), str):
        raise ValueError(f"An example holds no `{needed}`.")
    return found


def tokens_of_proto(serialized: bytes) -> str:
    """Returns the tokens of a serialized example; raises ValueError if the bytes are none."""
    return str(fields_of_proto(serialized, "tokens")["tokens"])


def parse(client_id: str, split: str, serialized: bytes) -> Example:
    """Decodes a serialized example; raises ValueError if the field `tokens` is missing."""
    fields = fields_of_proto(serialized, "tokens")
    names = ("tokens", "creation_date", "tags", "title")
    texts = {name: str(fields.get(name, "")) for name in names}
    post_type, score = str(fields.get("type", "")), int(fields.get("score", 0))
    return Example(client_id, split, **texts, score=score, post_type=post_type)


def read_only(path: pathlib.Path) -> sqlite3.Connection:
    """Opens a SQLite file without the right to change or create it; the caller closes it."""
    file = pathlib.Path(os.path.realpath(path))
    return sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True)


@contextlib.contextmanager
def _reading(path: pathlib.Path) -> Iterator[sqlite3.Connection]:
    """Opens a SQLite file for reading; turns errors of SQLite into ValueErrors of one line."""
    try:
        with contextlib.closing(read_only(path)) as connection:
            yield connection
    except sqlite3.Error as error:
        # SQLite raises errors for damaged pages, for names that are not UTF-8, and for tables that
        # another program has locked.
        raise ValueError(f"{path} cannot be read as a SQLite file ({error}): {_REMEDY}.") from error


def _in_order(connection: sqlite3.Connection) -> str:
    """Returns the end of a query, which sorts examples by the order in which they were written."""
    try:
        connection.execute("SELECT rowid FROM examples LIMIT 1")
    except sqlite3.OperationalError:
        return ""
    return " ORDER BY rowid"


def clients_of_split(path: pathlib.Path, split: str) -> tuple[str, ...]:
    """Returns the clients of a split, sorted as TFF's `client_ids` are.

    Raises:
        ValueError: The file cannot be read.
    """
    with _reading(path) as connection:
        rows = connection.execute(
            "SELECT DISTINCT client_id FROM client_metadata WHERE split_name = ?", (split,)
        )
        return tuple(sorted(client for (client,) in rows))


def count_splits(path: pathlib.Path) -> dict[str, SplitCounts]:
    """Counts the clients and examples of each split, from the clients' table alone.

    Raises:
        ValueError: The file cannot be read, or a split has no name or no numbers of examples.
    """
    with _reading(path) as connection:
        rows = connection.execute(
            "SELECT split_name, COUNT(DISTINCT client_id), SUM(num_examples) FROM client_metadata"
            " GROUP BY split_name ORDER BY split_name"
        )
        counts = {split: SplitCounts(clients, examples) for split, clients, examples in rows}
    for split, count in counts.items():
        if not isinstance(split, str) or not isinstance(count.examples, int):
            raise ValueError(
                f"{path} has the split {split!r} with {count.examples!r} examples; these must be a "
                f"text and an integer: {_REMEDY}."
            )
    return counts


def read_tokens(
    path: pathlib.Path, split: str, by_client: bool = False
) -> Iterator[tuple[str, str]]:
    """Yields a client and the tokens of one of its examples.

    Args:
        path: The file.
        split: The split.
        by_client: Whether a client's examples come one after another, which takes SQLite a while
            without the index on clients that files have; else they are in the order of the file.

    Raises:
        ValueError: The file cannot be read, or an example is none.
    """
    with _reading(path) as connection:
        rows = connection.execute(
            "SELECT client_id, serialized_example_proto FROM examples WHERE split_name = ?"
            + (" ORDER BY client_id" if by_client else _in_order(connection)),
            (split,),
        )
        for client, serialized in rows:
            yield _name(path, client), tokens_of_proto(serialized)


def read_tokens_of_client(path: pathlib.Path, split: str, client_id: str) -> list[str]:
    """Returns the tokens of one client's examples, in the order of the file.

    Raises:
        ValueError: The file cannot be read, or an example is none.
    """
    with _reading(path) as connection:
        rows = connection.execute(
            "SELECT serialized_example_proto FROM examples"
            " WHERE client_id = ? AND split_name = ?" + _in_order(connection),
            (client_id, split),
        )
        return [tokens_of_proto(serialized) for (serialized,) in rows]


def read_examples(path: pathlib.Path) -> Iterator[Example]:
    """Yields all examples in the file's order; a numbered client gets its number as name.

    Raises:
        ValueError: The file cannot be read, a client is neither a text nor an integer, or an
            example is none.
    """
    with _reading(path) as connection:
        rows = connection.execute(
            "SELECT client_id, split_name, serialized_example_proto FROM examples"
            + _in_order(connection)
        )
        for client, split, serialized in rows:
            yield parse(_name(path, client), split, serialized)


def _name(path: pathlib.Path, client: object) -> str:
    """Returns a client's name as text; files of other programs may have numbers for names."""
    if not isinstance(client, str | int):
        raise ValueError(
            f"{path} has a client {client!r}, which must be a text or an integer: {_REMEDY}."
        )
    return str(client)


def check_names(path: pathlib.Path) -> None:
    """Checks that clients' names are texts and not numbers, by which TFF finds no client.

    Raises:
        ValueError: A client's name is not a text; the message says how to name clients.
    """
    with _reading(path) as connection:
        row = connection.execute(
            "SELECT client_id, typeof(client_id) FROM client_metadata"
            " WHERE typeof(client_id) != 'text' LIMIT 1"
        ).fetchone()
    if row is not None:
        raise ValueError(
            f"{path} has a client {row[0]!r}, whose id is of type {row[1]} and not a text:"
            f" make-text-dataset --input={path} --output=FILE.sqlite makes a file whose clients"
            " have names."
        )


def check_format(path: pathlib.Path) -> None:
    """Checks that a file holds federated text, without reading all of it.

    Raises:
        ValueError: The file is missing, no SQLite database, cut short, or has other tables.
    """
    if not path.is_file():
        raise ValueError(f"There is no file {path}: check the path, or {_REMEDY}.")
    _check_size(path)
    with _reading(path) as connection:
        _check_tables(path, connection)
        row = connection.execute("SELECT serialized_example_proto FROM examples").fetchone()
    if row is None:
        raise ValueError(f"{path} holds no examples: {_REMEDY}.")
    try:
        tokens_of_proto(row[0])
    except ValueError as error:
        raise ValueError(
            f"{path}: its examples are not StackOverflow examples with `tokens`: {_REMEDY}."
        ) from error


def _check_size(path: pathlib.Path) -> None:
    """Checks a file's length by its SQLite header, which states pages and their size."""
    with open(path, "rb") as file:
        header = file.read(100)
    if not header.startswith(b"SQLite format 3\0") or len(header) < 100:
        raise ValueError(f"{path} is not a SQLite file: {_REMEDY}.")
    page_size = int.from_bytes(header[16:18], "big")
    pages = int.from_bytes(header[28:32], "big")
    # In SQLite's header, the page size 1 stands for 65536; and the number of pages is valid only if
    # two version numbers agree.
    expected_size = (65536 if page_size == 1 else page_size) * pages
    if header[24:28] == header[92:96] and path.stat().st_size < expected_size:
        raise ValueError(
            f"{path} is cut short, {path.stat().st_size} of {expected_size} bytes: remove it and"
            " fetch or make it again."
        )


def _check_tables(path: pathlib.Path, connection: sqlite3.Connection) -> None:
    for table, columns in _REQUIRED_COLUMNS.items():
        found = {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}
        if not found:
            raise ValueError(f"{path} has no table {table!r}: {_REMEDY}.")
        if not columns <= found:
            missing = ", ".join(sorted(columns - found))
            raise ValueError(f"{path}: table {table!r} has no {missing}: {_REMEDY}.")
