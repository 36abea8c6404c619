"""Ledgers (who took part in which round), times of rounds, and names of clients.

Two formats of a ledger can be read: the ``participation.npz`` of a run directory, and a text file
with a client and a round (from 0) on each line, separated by a comma.

If a line is lost, or counted for another client, the guarantee that follows from the file is better
than the truth. So a text file with a line that may have several meanings is refused, with the
number of the line. A ledger counts as complete if each round has as many rows as the server counted
clients (``kernel.ledger.gap``).

Participations are counted by name. If one client appears under two names that look alike, it counts
as two clients, and the guarantee that follows is better than the truth. So names with invisible
characters are refused, and reports give the number of names that differ only in case, width or
Unicode normal form.

If client names are not known, the times of rounds and the timers of devices bound how often and how
closely a client can have taken part (:class:`RoundTimes`).
"""

import codecs
import collections
import contextlib
import dataclasses
import datetime
import functools
import io
import itertools
import json
import operator
import os
import pathlib
import re
import unicodedata
import zipfile
from collections.abc import Callable, Container, Iterable, Mapping, Sequence, Set
from typing import TypeAlias

import numpy as np

from mf_aggregators import atomic_files, inputs
from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.ledger import ObservedParticipation, TimedRounds
from mf_aggregators.kernel.numbers import Error, IntArray
from mf_aggregators.participation import SamplingScheme

# The name of the ledger in the directory of a training run.
FILE_OF_RUN = "participation.npz"
# A text file may begin with a heading: one of these, a comma, and one of the words for rounds.
_HEADINGS_OF_CLIENTS = ("client", "client_id", "user", "user_id", "device", "device_id")
_HEADINGS = {*itertools.product(_HEADINGS_OF_CLIENTS, ("round", "round_index"))}

# A field is in double quotes, in which two quotes mean one, or has no quote and no comma.
_FIELD = re.compile(r'(?:\s*"((?:[^"]|"")*)"\s*|([^",]*)),')
# All bytes except commas, line ends and quotes.
_NO_MARKS = bytes({*range(256)} - {*b',\n\r"'})
# Longer fields, in bytes, are not read in bulk, because each line would take that much memory.
_LONGEST_FIELD = 128
# A field has one key: the sum of its words, each times a power of this odd number.
_MULTIPLIER = 0x9E3779B97F4A7C15
# A round in at most eighteen digits, which fit into 64 bits.
_ROUND = re.compile("0*([0-9]{1,18})")
# Every round writes the ledger. zlib's usual level takes four times as long to save a tenth.
_COMPRESSION = 1
# Numbers in this range (the years 2001 to 2049) are read as Unix seconds; minutes, milliseconds and
# dates in digits lie outside.
_UNIX_SECONDS = (1.0e9, 2.5e9)
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)
_SECONDS = re.compile(r"[0-9]+(\.[0-9]+)?")
# Invisible characters that are not controls, formats or separators: those with Unicode's property
# Default_Ignorable_Code_Point, and blanks.
_BLANKS = "\u2800\U0001d159\U00013441\U00013442\U00016fe4"
_IGNORABLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2065\u3164\ufe00-\ufe0f\uffa0\ufff0-\ufff8"
    "\U000e0000-\U000e0fff]"
)


# A single surrogate, half of a pair, which cannot be written to a file.
_SURROGATE = re.compile("[\ud800-\udfff]")


class LedgerError(Error, ValueError):
    """A ledger cannot be read; the message names the file and the reason."""


@dataclasses.dataclass(frozen=True, eq=False)
class Ledger:
    """A ledger: which clients took part in which rounds.

    Use it when a program keeps its ledger in arrays.

    Attributes:
      client_ids: The names of the clients.
      rounds_of_clients: For each client, the increasing rounds, from 0, in which it took part.
      num_rounds: The number of released rounds.
      sampling: The scheme that drew the batches, as the ledger says; None if no sampler drew the
        clients, and for text files.

    Raises:
      TypeError: If ``sampling`` is not a sampling scheme.
      LedgerError: If the numbers of client_ids and rounds_of_clients differ, if two clients have
        the same name, or if rounds are not increasing integers of released rounds.

    Example:
      >>> import numpy as np
      >>> from mf_aggregators.privacy import ledgers
      >>> ledger = ledgers.Ledger(("ada", "bo"), (np.array([0, 3]), np.array([0])), num_rounds=4)
      >>> [cohort.tolist() for cohort in ledger.cohorts()]
      [[0, 1], [], [], [0]]
    """

    client_ids: tuple[str, ...]
    rounds_of_clients: tuple[IntArray, ...]
    num_rounds: int
    sampling: SamplingScheme | None = None

    def __post_init__(self) -> None:
        if self.sampling is not None:
            object.__setattr__(self, "sampling", SamplingScheme.accounted(self.sampling))
        try:
            names = tuple(self.client_ids)
            of_clients = tuple(map(np.asarray, self.rounds_of_clients))
        except TypeError:
            raise LedgerError("client_ids and rounds_of_clients must be tuples.") from None
        given: object = self.client_ids
        is_named = not isinstance(given, str) and all(isinstance(x, str) for x in names)
        if len(names) != len(of_clients) or not is_named:
            found = f"{len(names)} client_ids and {len(of_clients)} rounds_of_clients"
            raise LedgerError(f"{found} do not fit together: give each client a text and rounds.")
        if len(set(names)) != len(names):
            raise LedgerError("two clients have the same name: give each one its own.")
        # An empty list has no integer type in NumPy.
        kinds = {(each.ndim, each.dtype.kind) for each in of_clients if each.size or each.ndim != 1}
        try:
            if not kinds <= {(1, "i"), (1, "u")}:
                raise ValueError("rounds_of_clients must be arrays of integers.")
            num_rounds = numbers.integer_at_least(self.num_rounds, 0, "num_rounds")
            ObservedParticipation.of(of_clients, num_rounds)
        except ValueError as error:
            raise LedgerError(f"its rounds and clients do not fit together: {error}") from None
        whole = tuple(np.asarray(each, np.int64) for each in of_clients)
        object.__setattr__(self, "client_ids", names)
        object.__setattr__(self, "rounds_of_clients", whole)
        object.__setattr__(self, "num_rounds", num_rounds)

    @classmethod
    def of(cls, given: "GivenLedger", num_rounds: int) -> "Ledger":
        """Returns a ledger from a file, a mapping or lists.

        Args:
          given: A ledger; a file, which :func:`load` reads; a mapping from each client to its
            rounds, from 0, in any order; or a list with the clients of each released round.
          num_rounds: The number of released rounds, for a text file and a mapping, which do not
            contain it.

        Raises:
          LedgerError: If ``given`` is none of these, a client is in a round twice, or a round was
            not released.

        Example:
          >>> from mf_aggregators.privacy import ledgers
          >>> ledger = ledgers.Ledger.of({"ada": [0, 3], "bo": [0]}, num_rounds=4)
          >>> ledger.by_name()
          {'ada': (0, 3), 'bo': (0,)}
        """
        if isinstance(given, cls):
            return given
        if isinstance(given, (str, os.PathLike)):
            return load(given, num_rounds)
        of_clients: dict[object, list[int]] = {}
        if isinstance(given, Mapping):
            of_clients = {client: sorted(rounds) for client, rounds in given.items()}
        elif isinstance(given, Sequence) and not any(isinstance(each, str) for each in given):
            num_rounds = len(given)
            for index, cohort in enumerate(given):
                for client in cohort:
                    of_clients.setdefault(client, []).append(index)
        else:
            forms = "a file, a mapping from clients to rounds, or a list of the clients by round"
            raise LedgerError(f"a ledger is a Ledger, {forms}, found {numbers.shown(given)}.")
        rounds = tuple(map(np.asarray, of_clients.values()))
        return cls(tuple(map(str, of_clients)), rounds, num_rounds)

    def cohorts(self) -> tuple[IntArray, ...]:
        """Returns, for each round, the increasing int64 indices of its clients."""
        sizes = [len(rounds) for rounds in self.rounds_of_clients]
        clients = np.repeat(np.arange(len(sizes)), sizes)
        rounds = _joined(self.rounds_of_clients)
        order = np.argsort(rounds, kind="stable")
        ends = np.cumsum(np.bincount(rounds, minlength=self.num_rounds))
        return tuple(np.split(clients[order], ends[:-1])) if self.num_rounds else ()

    def by_name(self) -> dict[str, tuple[int, ...]]:
        """Returns the rounds of each client that took part, by the client's name."""
        pairs = zip(self.client_ids, self.rounds_of_clients, strict=True)
        return {name: tuple(rounds.tolist()) for name, rounds in pairs if len(rounds)}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the ledger as an ``.npz`` file, whole or not at all; see :func:`load`.

        Args:
          path: The file.

        Raises:
          OSError: If it cannot be written.

        Example:
          >>> import pathlib, tempfile
          >>> from mf_aggregators.privacy import ledgers
          >>> path = pathlib.Path(tempfile.mkdtemp()) / "participation.npz"
          >>> ledgers.Ledger.of({"ada": [0, 3], "bo": [0]}, num_rounds=4).save(path)
          >>> ledgers.load(path).num_rounds
          4
        """
        offsets = np.cumsum([0, *map(len, self.rounds_of_clients)])
        rounds = _joined(self.rounds_of_clients)
        write(path, self.client_ids, offsets, rounds, self.num_rounds, self.sampling)


def _joined(of_clients: Iterable[IntArray]) -> IntArray:
    """The concatenated rounds of all clients."""
    return np.concatenate([np.empty(0, np.int64), *(each for each in of_clients if each.size)])


# The types that ``Ledger.of`` accepts.
_ByClient: TypeAlias = Mapping[str, Iterable[int]] | Mapping[int, Iterable[int]]
GivenLedger: TypeAlias = Ledger | str | os.PathLike[str] | _ByClient | Sequence[Iterable[object]]


def write(
    path: str | os.PathLike[str],
    client_ids: Sequence[str],
    offsets: IntArray,
    rounds: IntArray,
    num_rounds: int,
    sampling: SamplingScheme | None,
) -> None:
    """Writes a ledger atomically as an ``.npz`` file, which :func:`load` reads.

    Args:
      path: The file.
      client_ids: The m clients of the population.
      offsets: (m + 1,): client i took part in ``rounds[offsets[i]:offsets[i + 1]]``.
      rounds: One round for each participation, client by client, increasing for each client.
      num_rounds: The number n of rounds.
      sampling: The scheme that drew the cohorts; None for timers.

    Raises:
      OSError: If it cannot be written.
    """
    arrays = {
        "client_ids": np.array(client_ids, dtype=np.str_),
        "offsets": offsets,
        "rounds": rounds,
        "num_rounds": np.array(num_rounds),
    }
    if sampling is not None:
        arrays["sampling"] = np.array(json.dumps(sampling.to_dict()))
    # The archive is made in memory first, because an archive that a full disk cut off would print a
    # traceback when it is garbage-collected.
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, compresslevel=_COMPRESSION) as file:
        for name, array in arrays.items():
            with file.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(  # type: ignore[no-untyped-call]
                    entry, np.asarray(array), allow_pickle=False
                )
    atomic_files.write(path, archive.getbuffer())


def load(path: str | os.PathLike[str], num_rounds: int = 0) -> Ledger:
    """Reads a ledger from a file.

    Use it when you read the ledger of a run, or one that another program wrote.

    Args:
      path: A ``.npz`` file with ``client_ids``, ``num_rounds`` and, for client i, its rounds
        as ``rounds[offsets[i]:offsets[i + 1]]``, and ``sampling``, the scheme of a data
        sampler as JSON, if there was one; or a text file in UTF-8, with or without a byte
        order mark, of ``client,round`` lines. Either field may be in double quotes. White space
        around a name or a round is ignored; apart from that, names are compared as they are
        written. The first line may be a heading: one of ``client``, ``user`` or ``device``, with or
        without ``_id``, and ``round`` or ``round_index``, in any case. Empty lines are ignored.
      num_rounds: The number of released rounds, for a text file, which does not contain it; an
        archive does. A number that is too large is safe. One that is too small is not, because a
        client's contribution also affects later rounds.

    Returns:
      The ledger.

    Raises:
      LedgerError: If the file is missing, damaged, or not a ledger. For an archive: if arrays are
        not integers, do not fit together, have a client's rounds out of order or outside the
        released rounds, or have two clients with the same name; or if names are neither texts
        (bytes are read as UTF-8) nor integers. For a text file: if a line does not have exactly one
        client and one round, if a round is not written in the digits 0 to 9 or was not released, if
        a name is empty or has invisible characters (``_hidden_character``), or if a line is
        repeated.

    Example:
      >>> import pathlib, tempfile
      >>> from mf_aggregators.privacy import ledgers
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "ledger.npz"
      >>> ledgers.Ledger.of({"ada": [0, 3], "bo": [0]}, num_rounds=4).save(path)
      >>> ledgers.load(path).by_name()
      {'ada': (0, 3), 'bo': (0,)}
    """
    # Messages begin with the path, by which commands find the flag.
    path = pathlib.Path(path)
    if path.suffix.lower() == ".npz":
        return _load_archive(path)
    fields: list[str] = []
    seen: set[tuple[str, int]] = set()

    # Cached, because a ledger has many lines for each round.
    @functools.cache
    def released(text: str) -> int:
        if (index := _round_of(text)) is None:
            expected = "a round in digits 0 to 9, or client,round in the first line"
            raise LedgerError(f"expected {expected}, found {numbers.shown(text)}.")
        if index >= num_rounds:
            raise LedgerError(f"found round {index}: {num_rounds} were released, counted from 0.")
        return index

    def add(client: str, text: str) -> None:
        index = released(text)
        _check_name(client)
        if (client, index) in seen:
            raise LedgerError("repeats an earlier line: remove it, or give two clients two names.")
        seen.add((client, index))
        fields.extend((client, text))

    def found(clients: _Fields, rounds: _Fields) -> Ledger:
        numbers_of: dict[str, int] = collections.defaultdict(itertools.count().__next__)
        whose = np.fromiter(map(numbers_of.__getitem__, clients[0]), np.int64)[clients[1]]
        any(map(_check_name, numbers_of))
        known, when = np.unique(
            np.fromiter(map(released, rounds[0]), np.int64), return_inverse=True
        )
        # Sorting one integer for each line takes a third of the time of sorting pairs.
        lines = np.sort(whose * len(known) + when[rounds[1]])
        if not len(lines) or not np.all(np.diff(lines)):
            raise LedgerError(f"{path} has no participation.")
        whose, when = np.divmod(lines, len(known))
        ends = np.searchsorted(whose, np.arange(len(numbers_of) + 1)).tolist()
        each_round = known[when]
        of_clients = tuple(each_round[first:end] for first, end in itertools.pairwise(ends))
        return Ledger(tuple(numbers_of), of_clients, num_rounds)

    with contextlib.suppress(OSError, ValueError):
        # A pipe can be read once only.
        return found(*_plain_fields(path.read_bytes() if path.is_file() else b""))
    # Lines have other forms or errors: they are read one by one, to name the first wrong line.
    _read_lines(path, add, _HEADINGS, "a client and a round, separated by one comma", 2)
    return found((fields[::2], slice(None)), (fields[1::2], slice(None)))


# Fields of lines: distinct ones, and for each line the number of its own.
_Fields: TypeAlias = tuple[Sequence[str], IntArray | slice]


def _plain_fields(contents: bytes) -> tuple[_Fields, _Fields]:
    """The clients and the rounds of plain lines; raises ValueError if a line may not be plain."""
    contents = contents.replace(b"\r\n", b"\n").removeprefix(codecs.BOM_UTF8)
    contents = contents.removesuffix(b"\n") + b"\n"
    marks = contents.translate(None, _NO_MARKS)
    if marks != b",\n" * (len(marks) // 2):
        raise ValueError("a line is not plain.")
    heading = contents[: contents.index(b"\n") + 1].decode().split(",")
    if tuple(each.strip().lower() for each in heading) in _HEADINGS:
        contents = contents[contents.index(b"\n") + 1 :]
    characters = np.frombuffer(contents, np.uint8)
    ends = np.flatnonzero((characters == ord(",")) | (characters == ord("\n")))
    starts = np.concatenate([[0], ends + 1])[:-1]
    clients, rounds = (_distinct(contents, starts[k::2], ends[k::2]) for k in range(2))
    return clients, rounds


def _distinct(contents: bytes, starts: IntArray, ends: IntArray) -> _Fields:
    """The distinct fields ``contents[start:end]``, without white space around them.

    They are in the order in which they appear first. Raises ValueError for fields that this fast
    method cannot tell apart.
    """
    sizes = ends - starts
    width = 8 * (int(np.max(sizes, initial=1)) // 8 + 1)
    if width > _LONGEST_FIELD or b"\0" in contents:
        raise ValueError("a field is too long, or has a null character.")
    padded = np.frombuffer(contents + bytes(width), np.uint8)
    texts = np.lib.stride_tricks.sliding_window_view(padded, width)[starts]
    texts[np.arange(width) >= sizes[:, None]] = 0
    words = texts.view(np.uint64)
    keys = words @ np.cumprod(np.full(width // 8, _MULTIPLIER, np.uint64))
    _, first, number = np.unique(keys, return_index=True, return_inverse=True)
    if not np.array_equal(words, words[first[number]]):
        raise ValueError("two fields have the same key.")
    order = np.argsort(first)
    places = zip(starts[first[order]].tolist(), ends[first[order]].tolist(), strict=True)
    return [contents[start:end].decode().strip() for start, end in places], np.argsort(order)[
        number
    ]


def people_of(
    given: Mapping[str, Iterable[str]] | str | os.PathLike[str],
) -> dict[str, tuple[str, ...]]:
    """Returns the clients of each person.

    Args:
      given: The clients of each person, by the person's name; or a text file in UTF-8 with a
        person, a comma and a client on each line, written like the lines of a ledger. The first
        line may be ``person,client``.

    Raises:
      LedgerError: If the file cannot be read, names no person, has a line of another form, a
        repeated line, or a name with invisible characters; or if two people have names that look
        alike, because they may be one person.
      ValueError: If a person has no client, or a client twice.
    """
    people: dict[str, list[str]] = {}

    def add(person: str, client: str) -> None:
        _check_name(person)
        _check_name(client)
        own = people.setdefault(person, [])
        if client in own:
            raise LedgerError("repeats an earlier line.")
        own.append(client)

    if isinstance(given, Mapping):
        people = {person: list(clients) for person, clients in given.items()}
    else:
        path = pathlib.Path(given)
        _read_lines(path, add, {("person", "client")}, "a person, a comma and a client", 2)
        if not people:
            raise LedgerError(f"{path} names no person.")
    for person, clients in people.items():
        if not clients or len(set(clients)) < len(clients):
            raise ValueError(f"the person {person!r} needs clients, each one once.")
    if alike := num_alike_names(people):
        raise LedgerError(f"{alike} people have names that look alike: give each person one name.")
    return {person: tuple(clients) for person, clients in people.items()}


def _read_lines(
    path: pathlib.Path,
    add: Callable[[str], None] | Callable[[str, str], None] | Callable[[str, str, str], None],
    headings: Container[tuple[str, ...]],
    expected: str,
    num_fields: int,
) -> None:
    """Reads a text file with fields separated by commas.

    Args:
      path: A text file in UTF-8, with or without a byte order mark. Fields may be in double quotes;
        white space around them, and empty lines, are ignored.
      add: Called with the fields of each line; may raise a LedgerError.
      headings: Possible first lines, in lower or upper case, which are not passed to ``add``.
      expected: A description of a line, for messages.
      num_fields: The number of fields of a line.

    Raises:
      LedgerError: If the file cannot be read, or a line has another form; it names the line's
        number.
    """
    number, is_first = 0, True
    try:
        # Files in UTF-16 and UTF-32 are refused, because their byte order marks are not UTF-8.
        with open(path, encoding="utf-8-sig", newline="") as lines:
            for number, line in enumerate(lines, 1):  # noqa: B007
                plain = '"' not in line
                fields = [*map(str.strip, line.split(","))] if plain else _fields_of(line.strip())
                if len(fields) != num_fields or fields == [""]:
                    if not (text := line.strip()):
                        continue
                    raise LedgerError(f"expected {expected}, found {numbers.shown(text)}.")
                if not is_first or tuple(map(str.lower, fields)) not in headings:
                    add(*fields)
                is_first = False
    except OSError as error:
        raise LedgerError(f"{path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError:
        raise LedgerError(f"{path} is not text in UTF-8: save it in that encoding.") from None
    except LedgerError as error:
        raise LedgerError(f"{path}, line {number}: {error}") from None


def _fields_of(text: str) -> Sequence[str]:
    """The fields of a line, without their quotes; empty if quotes are in the wrong place."""
    found = list(_FIELD.finditer(f"{text},"))
    if "".join(match[0] for match in found) != f"{text},":
        return ()
    return [
        (match[2] if match[1] is None else match[1].replace('""', '"')).strip() for match in found
    ]


def _round_of(text: str) -> int | None:
    """The number that up to eighteen digits 0 to 9 mean; None for any other text."""
    match = _ROUND.fullmatch(text)
    return None if match is None else int(match[1])


def is_of_drawn_clients(path: str | os.PathLike[str]) -> bool:
    """Returns whether a file is a ledger of clients that a sampler drew, which is secret.

    Args:
      path: The file, with any name. A damaged archive counts as secret if the names of its arrays
        say so or cannot be read. A missing file, or one that is not an archive, does not.
    """
    try:
        with open(path, "rb") as file:
            begins = file.read(2)
        with zipfile.ZipFile(path) as archive:
            return {"client_ids.npy", "sampling.npy"} <= set(archive.namelist())
    except OSError:
        return False
    except zipfile.BadZipFile:
        return begins == b"PK"
    except Exception:
        # The archive is damaged, and may have been a ledger of drawn clients.
        return True


def _load_archive(file: pathlib.Path) -> Ledger:
    """Reads a ledger's ``.npz`` file; raises LedgerError if it is damaged or not a ledger."""
    try:
        with np.load(file, allow_pickle=False) as archive:
            names, offsets, rounds = (archive[each] for each in ("client_ids", "offsets", "rounds"))
            num_rounds = operator.index(archive["num_rounds"])
            sampling = None
            # Ledgers without this entry are of cohorts under timers.
            if "sampling" in archive:
                sampling = SamplingScheme.from_dict(inputs.parsed_json(str(archive["sampling"])))
        if names.dtype.kind == "S":
            names = np.char.decode(names, "utf-8")
        if names.size and names.dtype.kind not in "Uiu":
            raise ValueError(f"client_ids must be texts or integers, found {names.dtype}")
        ends = offsets.tolist()
        if ends[0] != 0 or ends[-1] != len(rounds) or ends != sorted(ends):
            raise LedgerError("its rounds and clients do not fit together.")
        of_clients = tuple(rounds[first:end] for first, end in itertools.pairwise(ends))
        return Ledger(tuple(names.astype(np.str_).tolist()), of_clients, num_rounds, sampling)
    except OSError as error:
        raise LedgerError(f"{file} cannot be read: {error.strerror or error}.") from error
    except LedgerError as error:
        raise LedgerError(f"{file} is broken: {error}") from None
    except Exception as error:
        # NumPy raises errors of many types for a damaged archive.
        reason = str(error).rstrip(".")
        raise LedgerError(f"{file} cannot be read as a ledger: {reason}.") from error


def round_counts(given: Iterable[int] | str | os.PathLike[str] | None) -> tuple[int, ...] | None:
    """Returns the server's own count of clients for each round.

    Args:
      given: The numbers; None if they are not known; or a UTF-8 text file with one number on each
        line, in the order of rounds, and possibly a first line ``clients``. Empty lines are
        ignored.

    Raises:
      LedgerError: If the file cannot be read, or has another form.
      TypeError: If the numbers are not a list.
      ValueError: If a number is not an integer or is below 0.
    """
    if given is None:
        return None
    if not isinstance(given, (str, os.PathLike)):
        # Mappings, sets and bytes may also contain numbers, but these are not counts in order.
        if isinstance(given, Mapping | Set | bytes):
            raise TypeError(f"round_counts must be a list, found a {type(given).__name__}.")
        return tuple(numbers.integer_at_least(each, 0, "round_counts") for each in given)
    counts: list[int] = []

    def add(text: str) -> None:
        found = _round_of(text)
        if found is None:
            raise LedgerError(f"expected one number, found {numbers.shown(text)}.")
        counts.append(found)

    _read_lines(pathlib.Path(given), add, {("clients",)}, "one number", 1)
    return tuple(counts)


def _check_name(name: str) -> None:
    """Raises LedgerError if a name is empty, or has an invisible character."""
    if not name:
        raise LedgerError("a name is empty: give each client a name.")
    if hidden := _hidden_character(name):
        found = f"the character U+{ord(hidden):04X}, which is invisible or looks like a space"
        raise LedgerError(
            f"the name {numbers.shown(name)} has {found}: remove it, or write a space."
        )


def _hidden_character(name: str) -> str | None:
    """The first invisible character of a name; None if there is none.

    Invisible characters are those with Unicode's property Default_Ignorable_Code_Point, controls,
    formats, separators other than the space, and blanks of notations and scripts.
    """
    if name.isascii() and name.isprintable():
        return None
    for each in name.replace(" ", ""):
        is_separator = unicodedata.category(each) in ("Cc", "Cf", "Zl", "Zp", "Zs")
        if is_separator or each in _BLANKS or _IGNORABLE.match(each):
            return each
    return None


def name_in_one_form(name: str) -> str:
    """Returns a name without invisible characters, in Unicode's normal form C.

    Each run of white space and blanks becomes one space, and is removed at the ends. Names with the
    same form look the same to a reader.

    Args:
      name: The name.

    Returns:
      The normalised name (normalising it again changes nothing); empty if all characters are
      invisible.
    """
    # Removing a character may put an accent next to its letter, so the name is normalised last.
    return unicodedata.normalize("NFC", _seen(name))


def _folded(name: str) -> str:
    """A key that is equal for names that differ only in case, width or normal form.

    This is Unicode's NFKC_Casefold of :func:`name_in_one_form`.
    """
    if name.isascii() and name.isprintable():
        return " ".join(name.lower().split())
    text = unicodedata.normalize("NFD", _seen(name))
    text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKD", text.casefold()).casefold())
    return _seen(text)


def num_alike_names(names: Iterable[str]) -> int:
    """Returns how many of the given names look like another one of them.

    Args:
      names: The names, none twice.

    Returns:
      The number of names that have the same folded form as another name.
    """
    found = collections.Counter(map(_folded, names))
    return sum(number for number in found.values() if number > 1)


def check_names(names: Iterable[str]) -> None:
    """Checks that a ledger file can store names, so that the same names are read again.

    Args:
      names: The names of all clients of a run.

    Raises:
      ValueError: If a name is not a text, is empty, has a null character (which ends texts in the
        file) or a single surrogate (which cannot be written); or if two names are equal.
    """
    found = tuple(names)
    for each in found:
        if not isinstance(each, str):
            raise ValueError(
                f"client ids must be texts, found {each!r} ({type(each).__name__}): give str(id) "
                "for each, and have client_dataset take these texts."
            )
    # All names are checked at once, because there may be millions, in every round.
    together = "".join(found)
    is_bad = "\0" in together or (not together.isascii() and _SURROGATE.search(together))
    if is_bad or "" in found:
        found_in_one = "is empty, holds a null character or half of a surrogate pair"
        raise ValueError(f"a client id {found_in_one}, which no file keeps: rename the client.")
    if len(set(found)) != len(found):
        raise ValueError("two clients have the same name: give each one its own.")


@functools.cache
def _seen_character(character: str) -> str:
    if character.isspace() or character in _BLANKS:
        return " "
    return "" if _hidden_character(character) else character


def _seen(name: str) -> str:
    """Returns a name with one space for white space, and without other invisible characters."""
    return " ".join("".join(map(_seen_character, name)).split())


class RoundTimes(TimedRounds):
    """The start and end times of rounds, and the timers of devices.

    Use it when devices keep timers, and the server does not know clients by name.

    Attributes:
      starts: (n,) float64, non-decreasing: the times, in seconds, before which no device can have
        received a round's model.
      ends: (n,) float64, non-decreasing: the times, by the same clock, after which no upload of a
        round can have been summed. No round ends before it starts.
      timer_hours: The hours that a device waits, after a request on which it takes part (or after
        its upload), until it accepts another request.
      clock_drift: The share by which devices' clocks may be too fast, at least 0 and below 1.
      clock_margin_minutes: The minutes by which timers may be too short for other reasons: clocks
        that are set, and clocks of servers that differ.
      max_participations: The largest number of participations that devices allow; None if they do
        not count.

    Raises:
      ValueError: If an attribute is out of its range, times are out of order, the timer less drift
        and margin is not positive, or a round lasted as long as this or longer.

    Example:
      >>> import numpy as np
      >>> from mf_aggregators.privacy.ledgers import RoundTimes
      >>> ends = 600.0 * np.arange(1, 1001)  # a week of rounds of ten minutes
      >>> times = RoundTimes(ends - 600.0, ends, timer_hours=48.0, clock_margin_minutes=5.0)
      >>> found = times.participation()
      >>> found.separation, found.max_participations
      (287, 4)
    """

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], timer_hours: float, **options: object
    ) -> "RoundTimes":
        """Reads the times of rounds from a text file.

        Args:
          path: A text file in UTF-8 of ``round,start,end`` lines. Rounds count from 0 without gaps.
            A time is a date with a UTC offset, such as ``2026-03-01T04:00:00Z``, or a number of
            seconds since 1970, the same for all lines. A heading ``round,start,end`` and empty
            lines are ignored.
          timer_hours: As for the class.
          **options: Further attributes of the class.

        Returns:
          The times of all released rounds.

        Raises:
          LedgerError: If the file cannot be read, or a line has another form; it names the line's
            number.
          ValueError: As the class raises it.

        Example:
          >>> import os, pathlib, tempfile
          >>> from mf_aggregators.privacy.ledgers import RoundTimes
          >>> path = pathlib.Path(tempfile.mkdtemp()) / "times.csv"
          >>> days = [f"{day},2026-03-1{day}T04:00Z,2026-03-1{day}T05:00Z" for day in range(3)]
          >>> _ = path.write_text(os.linesep.join(days))
          >>> found = RoundTimes.load(path, timer_hours=30.0).participation()
          >>> found.separation, found.max_participations
          (2, 2)
        """
        times: list[list[float]] = []
        kinds: set[bool] = set()

        def add(index: str, *texts: str) -> None:
            if _round_of(index) != len(times):
                expected = f"round {len(times)}, as rounds count from 0 and each has one line"
                raise LedgerError(f"expected {expected}, found {numbers.shown(index)}.")
            found = [_time(text) for text in texts]
            kinds.update(is_date for _, is_date in found)
            if len(kinds) > 1:
                raise LedgerError("all times must be dates, or all seconds.")
            times.append([seconds for seconds, _ in found])

        heading = ("round", "start", "end")
        _read_lines(pathlib.Path(path), add, {heading}, "a round, its start and its end", 3)
        if not times:
            raise LedgerError(f"{path} has no rounds.")
        starts, ends = np.array(times).T
        try:
            # The class checks its arguments.
            return cls(starts, ends, timer_hours, **options)  # type: ignore[arg-type]
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def participation(self) -> ObservedParticipation:
        """Returns the smallest separation and the largest count that one device can have had.

        The ``conditions`` of the result are sentences that say when this holds.
        """
        most = self.max_participations
        often = "once" if most == 1 else f"{most} times"
        counted = "" if most is None else f", and takes part at most {often}"
        conditions = (
            "This holds if each device accepts no request within "
            f"{inputs.in_full(self.timer_hours)} hours of one that it took part on, by a clock "
            f"that is too fast by at most {inputs.in_full(self.clock_drift, 100)} % and "
            f"{inputs.in_full(self.clock_margin_minutes)} minutes{counted}; and if an upload is "
            "summed only between the start and the end of the round that it was made for. A device "
            "whose history is lost counts as another client, unless it waits for a whole timer "
            "again."
        )
        return dataclasses.replace(super().participation(), conditions=conditions)


def _time(text: str) -> tuple[float, bool]:
    """Returns a time in seconds, and whether it was written as a date."""
    if _SECONDS.fullmatch(text) and _UNIX_SECONDS[0] <= float(text) <= _UNIX_SECONDS[1]:
        return float(text), False
    try:
        found = datetime.datetime.fromisoformat(re.sub("[Zz]$", "+00:00", text))
        # Dates without an offset are refused: when clocks are set back, some local times occur
        # twice.
        if found.tzinfo is not None:
            return (found - _EPOCH).total_seconds(), True
    except ValueError:
        pass
    expected = "seconds since 1970, or a date with its UTC offset, such as 2026-03-01T04:00:00Z"
    raise LedgerError(f"{numbers.shown(text)} is not a time: write {expected}.")
