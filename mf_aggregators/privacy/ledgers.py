"""Ledgers of who took part in which round, as files.

Two formats are read: the ``participation.npz`` of a run directory, and a text file of a
client and a round (from 0) on each line, separated by a comma, as any production system can
write it.

A line that is lost, or counted for another client, makes the guarantee that follows from
the file better than the truth. So a text file is read only where each of its lines has one
meaning, and is refused, with the number of the line, where it may have another. A ledger is
complete if each round has as many rows as the server counted clients (``kernel.ledger.gap``).
"""

import dataclasses
import io
import itertools
import json
import os
import pathlib
import re
import zipfile
from collections.abc import Callable, Container, Iterable, Mapping, Sequence, Set
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from mf_aggregators import atomic_files, inputs
from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.numbers import Error, IntArray
from mf_aggregators.participation import SamplingScheme, accounted, sampling_from_dict
from mf_aggregators.privacy import client_names

# The name of the ledger in the directory of a training run.
FILE_OF_RUN = "participation.npz"
# A text file may begin with a heading: one of these, a comma, and one of the words for rounds.
_HEADINGS_OF_CLIENTS = ("client", "client_id", "user", "user_id", "device", "device_id")
# The second word of a heading.
_HEADINGS_OF_ROUNDS = ("round", "round_index")

# A field is in double quotes, where two of them stand for one, or has no quote and no comma.
_FIELD = re.compile(r'(?:\s*"((?:[^"]|"")*)"\s*|([^",]*)),')
# Eighteen digits fit into 64 bits.
_ROUND = re.compile("0*([0-9]{1,18})")
_MOST_CHARACTERS_SHOWN = 60
# Every round writes the ledger: zlib's usual level takes four times as long for a tenth less.
_COMPRESSION = 1


class LedgerError(Error, ValueError):
    """A ledger that cannot be read; the message names the file and the reason."""


@dataclasses.dataclass(frozen=True, eq=False)
class Ledger:
    """Who took part in which round.

    Attributes:
      client_ids: The clients.
      rounds_of_clients: For each client the increasing rounds, from 0, that it took part in.
      num_rounds: The rounds that were released.
      sampling: The scheme by which a data sampler is said to have drawn the batches; None
        for clients who decided themselves, and for text files.

    Raises:
      TypeError: If ``sampling`` is not a sampling scheme.
      LedgerError: If clients and rounds differ in number, two clients have one name, or rounds are
        no increasing integers, each of a round that was released.
    """

    client_ids: tuple[str, ...]
    rounds_of_clients: tuple[IntArray, ...]
    num_rounds: int
    sampling: SamplingScheme | None = None

    def __post_init__(self) -> None:
        for name in ("client_ids", "rounds_of_clients"):
            if not isinstance(getattr(self, name), Iterable):
                raise LedgerError(f"{name} must be a tuple.")
        names, of_clients = tuple(self.client_ids), tuple(map(np.asarray, self.rounds_of_clients))
        if self.sampling is not None:
            object.__setattr__(self, "sampling", accounted(self.sampling))
        try:
            num_rounds = numbers.integer_at_least(self.num_rounds, 0, "num_rounds")
        except ValueError as error:
            raise LedgerError(str(error)) from None
        given: object = self.client_ids
        is_named = not isinstance(given, str) and all(isinstance(x, str) for x in names)
        if len(names) != len(of_clients) or not is_named:
            raise LedgerError(
                f"{len(names)} client_ids and {len(of_clients)} rounds_of_clients do not fit "
                "together: give each client a text as its name, and its rounds."
            )
        if len(set(names)) != len(names):
            raise LedgerError(
                "there are two clients of the same name, whose rounds would not count as one "
                "client's: give each client one name."
            )
        # An empty list has no type of its own.
        kinds = {(each.ndim, each.dtype.kind) for each in of_clients if each.size or each.ndim != 1}
        is_sound = kinds <= {(1, "i"), (1, "u")}
        if is_sound:
            every = _joined(of_clients)
            starts = np.zeros(len(every) + 1, dtype=bool)
            starts[np.cumsum([len(each) for each in of_clients], dtype=np.int64)] = True
            increases = np.all((every[1:] > every[:-1]) | starts[1:-1])
            is_sound = bool(increases and np.all((every >= 0) & (every < num_rounds)))
        if not is_sound:
            raise LedgerError(
                "its rounds and clients do not fit together: rounds_of_clients must have for each "
                f"client integers that increase, from 0 to {num_rounds - 1}, the last round that "
                "was released."
            )
        whole = tuple(np.asarray(each, np.int64) for each in of_clients)
        object.__setattr__(self, "client_ids", names)
        object.__setattr__(self, "rounds_of_clients", whole)
        object.__setattr__(self, "num_rounds", num_rounds)

    def cohorts(self) -> tuple[IntArray, ...]:
        """Returns for each round the (clients,) int64 increasing indices of its clients."""
        sizes = [len(rounds) for rounds in self.rounds_of_clients]
        clients = np.repeat(np.arange(len(sizes)), sizes)
        rounds = _joined(self.rounds_of_clients)
        order = np.argsort(rounds, kind="stable")
        ends = np.cumsum(np.bincount(rounds, minlength=self.num_rounds))
        return tuple(np.split(clients[order], ends[:-1])) if self.num_rounds else ()

    def by_name(self) -> dict[str, IntArray]:
        """Returns the rounds of each client that took part, by its name."""
        named = zip(self.client_ids, self.rounds_of_clients, strict=True)
        return {name: rounds for name, rounds in named if len(rounds)}

    def has_same_rounds(self, other: "Ledger") -> bool:
        """Returns whether each client took part in the same rounds as in another ledger.

        Args:
          other: The other ledger, whose clients may come in another order.
        """
        mine, theirs = self.by_name(), other.by_name()
        return mine.keys() == theirs.keys() and all(
            np.array_equal(rounds, theirs[name]) for name, rounds in mine.items()
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the ledger as an ``.npz`` file, whole or not at all; see :func:`load`.

        Args:
          path: The file.

        Raises:
          OSError: If it cannot be written.
        """
        offsets = np.cumsum([0, *map(len, self.rounds_of_clients)])
        rounds = _joined(self.rounds_of_clients)
        write(path, self.client_ids, offsets, rounds, self.num_rounds, self.sampling)


def _joined(of_clients: Iterable[IntArray]) -> IntArray:
    """The rounds of all clients, one client after the other."""
    return np.concatenate([np.empty(0, np.int64), *(each for each in of_clients if each.size)])


# The forms of a ledger that ``of`` takes.
GivenLedger: TypeAlias = (
    Ledger | str | os.PathLike[str] | Mapping[Any, Iterable[int]] | Sequence[Iterable[Any]]
)


def write(
    path: str | os.PathLike[str],
    client_ids: Sequence[str],
    offsets: IntArray,
    rounds: IntArray,
    num_rounds: int,
    sampling: SamplingScheme | None,
) -> None:
    """Writes a ledger as an ``.npz`` file, whole or not at all; :func:`load` reads it.

    Args:
      path: The file.
      client_ids: The m clients of the population.
      offsets: (m + 1,): client i took part in the rounds between entries i and i + 1.
      rounds: One round for each participation, client by client, in order.
      num_rounds: n, the number of rounds.
      sampling: How cohorts were drawn at random; None where timers bound participations.

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
    # In memory first: an archive that a full disk has cut off would print a traceback of its
    # own when it is collected.
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, compresslevel=_COMPRESSION) as file:
        for name, array in arrays.items():
            with file.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(  # type: ignore[no-untyped-call]
                    entry, np.asarray(array), allow_pickle=False
                )
    atomic_files.write_bytes(path, archive.getbuffer())


def of(given: GivenLedger, num_rounds: int) -> Ledger:
    """Returns a ledger from any of its forms.

    Args:
      given: A ledger; its file, which :func:`load` reads; a mapping from each client to its rounds,
        from 0, in any order; or a list with the clients of each released round.
      num_rounds: The rounds that were released, for a text file and a mapping, which do not say it.

    Raises:
      LedgerError: If it is none of these, a client is in a round twice, or a round was not
        released.
    """
    if isinstance(given, Ledger):
        return given
    if isinstance(given, (str, os.PathLike)):
        return load(given, num_rounds)
    of_clients: dict[Any, list[Any]] = {}
    if isinstance(given, Mapping):
        of_clients = {client: sorted(rounds) for client, rounds in given.items()}
    elif isinstance(given, Sequence) and not any(isinstance(each, str) for each in given):
        num_rounds = len(given)
        for index, cohort in enumerate(given):
            for client in cohort:
                of_clients.setdefault(client, []).append(index)
    else:
        raise LedgerError(
            "a ledger is a Ledger, a file, a mapping from clients to rounds, or a list with the "
            f"clients of each round, found {numbers.shown(given)}."
        )
    rounds = tuple(map(np.asarray, of_clients.values()))
    return Ledger(tuple(map(str, of_clients)), rounds, num_rounds)


def load(path: str | os.PathLike[str], num_rounds: int) -> Ledger:
    """Reads a ledger.

    Args:
      path: A ``.npz`` file with ``client_ids``, ``num_rounds`` and, for client i, its rounds
        as ``rounds[offsets[i]:offsets[i + 1]]``, and ``sampling``, the scheme of a data
        sampler as JSON, if there was one; or a text file in UTF-8, with or without a byte
        order mark, of ``client,round`` lines. Either field may be in double quotes. White
        space around a name or a round is no part of it; otherwise names are compared as
        they are written. The first line may be a heading: one of
        ``client``, ``user`` or ``device``, with or without ``_id``, and ``round`` or
        ``round_index``, in any case. Empty lines
        mean nothing.
      num_rounds: The rounds that were released, for a text file, which does not say it.
        More than there were is safe, and fewer are not: what a client contributed is in
        later rounds too.

    Returns:
      The ledger.

    Raises:
      LedgerError: If the file is missing, damaged, or is no ledger; of a text file, for any
        other line: one without exactly one client and one round, with a round that is not
        written in the digits 0 to 9 alone or was not released, with a name that is empty or
        has characters that cannot be seen (``client_names.hidden_character``), or that repeats
        another line.
    """
    # Messages begin with the path as commands know it.
    path = pathlib.Path(path)
    if is_archive(path):
        return load_archive(path)
    of_clients: dict[str, dict[int, int]] = {}

    def add(number: int, fields: Sequence[str]) -> None:
        client, index = fields[0], round_of(fields[1])
        if index is None:
            raise LedgerError(
                "expected a round as a plain number from 0, in the digits 0 to 9 alone, found "
                f"{_shown(fields[1])}. Of headings only client,round and its like are known, in "
                "the first line."
            )
        if index >= num_rounds:
            raise LedgerError(
                f"found round {index}, and {num_rounds} rounds were released, of which the last is "
                f"round {num_rounds - 1}."
            )
        _check_name(client)
        earlier = of_clients.setdefault(client, {}).setdefault(index, number)
        if earlier != number:
            raise LedgerError(
                f"repeats line {earlier}. One client takes part in a round once: remove the line "
                "if it was written twice, or give two clients two names."
            )

    headings = set(itertools.product(_HEADINGS_OF_CLIENTS, _HEADINGS_OF_ROUNDS))
    read_lines(path, add, headings, "a client and a round, separated by one comma", widths=(2,))
    if not of_clients:
        raise LedgerError(f"{path} holds no participation.")
    rounds = tuple(np.sort(np.fromiter(found, np.int64)) for found in of_clients.values())
    return Ledger(tuple(of_clients), rounds, num_rounds)


def load_people(path: str | os.PathLike[str]) -> dict[str, tuple[str, ...]]:
    """Reads the clients of each person.

    Args:
      path: A text file in UTF-8, with or without a byte order mark, with a person, a comma and a
        client on each line, written like the lines of a ledger. The first line may be
        ``person,client``. Empty lines mean nothing.

    Returns:
      The clients of each person, by the person's name.

    Raises:
      LedgerError: If the file cannot be read, names nobody, or has a line of another form, a line
        twice, or a name with characters that cannot be seen.
    """
    path = pathlib.Path(path)
    clients: dict[str, dict[str, None]] = {}

    def add(_number: int, fields: Sequence[str]) -> None:
        for name in fields:
            _check_name(name)
        own = clients.setdefault(fields[0], {})
        if fields[1] in own:
            raise LedgerError("repeats an earlier line.")
        own[fields[1]] = None

    read_lines(path, add, {("person", "client")}, "a person, a comma and a client", widths=(2,))
    if not clients:
        raise LedgerError(f"{path} names nobody.")
    return {person: tuple(own) for person, own in clients.items()}


def read_lines(
    path: str | os.PathLike[str],
    add: Callable[[int, Sequence[str]], None],
    headings: Container[tuple[str, ...]],
    expected: str,
    *,
    widths: Container[int],
) -> None:
    """Reads a text file of fields with commas between them.

    Args:
      path: A text file in UTF-8, with or without a byte order mark. Fields may be in double quotes;
        white space around them, and empty lines, mean nothing.
      add: Takes each line: its number from 1, and its fields. It may raise a LedgerError.
      headings: What the first line may be, in any case; it is not passed to ``add`` then.
      expected: What a line has, in words.
      widths: How many fields a line may have.

    Raises:
      LedgerError: If the file cannot be read, or a line has another form: with its number.
    """
    number, is_first = 0, True
    try:
        # Byte order marks of UTF-16 and UTF-32 are not UTF-8 either.
        with open(path, encoding="utf-8-sig", newline="") as lines:
            for number, line in enumerate(lines, 1):
                if not (text := line.strip()):
                    continue
                fields = _fields_of(text)
                if not is_first or tuple(map(str.lower, fields)) not in headings:
                    if len(fields) not in widths:
                        raise LedgerError(f"expected {expected}, found {_shown(text)}.")
                    add(number, fields)
                is_first = False
    except OSError as error:
        raise LedgerError(f"{path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError:
        raise LedgerError(f"{path} is not text in UTF-8: save it in that encoding.") from None
    except LedgerError as error:
        raise LedgerError(f"{path}, line {number}: {error}") from None


def _fields_of(text: str) -> Sequence[str]:
    """The fields of a line, without quotes; none if quotes are in the wrong place."""
    if '"' not in text:
        return [field.strip() for field in text.split(",")]
    found = list(_FIELD.finditer(f"{text},"))
    if "".join(match[0] for match in found) != f"{text},":
        return ()
    return [
        (match[2] if match[1] is None else match[1].replace('""', '"')).strip() for match in found
    ]


def round_of(text: str) -> int | None:
    """Returns the number that a text is, in the digits 0 to 9 alone; None if it is none.

    Args:
      text: The text.
    """
    match = _ROUND.fullmatch(text)
    return None if match is None else int(match[1])


def is_archive(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path names the ``.npz`` file of a ledger and not a text file.

    Args:
      path: The path, which need not be there; its ending may be in any case.
    """
    return pathlib.Path(path).suffix.lower() == ".npz"


def is_of_drawn_clients(path: str | os.PathLike[str]) -> bool:
    """Returns whether a file, by any name, is a ledger of clients that a sampler drew: a secret.

    Args:
      path: The file. A damaged archive is a secret by the names of its arrays, or if the names
        cannot be read. A missing file is no secret, and neither is one that is no archive.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            return {"client_ids.npy", "sampling.npy"} <= set(archive.namelist())
    except (OSError, zipfile.BadZipFile):
        return False
    except Exception:
        # Such an archive is damaged, and may have been a ledger of drawn clients.
        return True


def load_archive(path: str | os.PathLike[str]) -> Ledger:
    """Reads the ``.npz`` file of a ledger; see :func:`load`.

    Args:
      path: The file.

    Returns:
      The ledger.

    Raises:
      LedgerError: If the file is missing or damaged; or its arrays are not of integers, do not
        fit together, have a client's rounds out of order or outside the rounds that were
        released, or name two clients alike; or if clients are named neither by texts (bytes are
        read as UTF-8) nor by integers.
    """
    file = pathlib.Path(path)
    try:
        with np.load(file, allow_pickle=False) as archive:
            names = _names(archive["client_ids"])
            offsets, rounds, num_rounds = (
                _integers(archive[name]) for name in ("offsets", "rounds", "num_rounds")
            )
            # Records without it are of cohorts under timers.
            sampling = (
                sampling_from_dict(inputs.parsed_json(str(archive["sampling"])))
                if "sampling" in archive
                else None
            )
    except OSError as error:
        raise LedgerError(f"{file} cannot be read: {error.strerror or error}.") from error
    except Exception as error:
        # NumPy's reader raises many types for a damaged archive.
        reason = str(error).rstrip(".")
        raise LedgerError(f"{file} cannot be read as a ledger: {reason}.") from error
    if not _fit_together(names, offsets, rounds, num_rounds):
        raise LedgerError(f"{file} is broken: its rounds and clients do not fit together.")
    of_clients = np.split(rounds, offsets[1:-1]) if len(names) else []
    try:
        return Ledger(tuple(names.tolist()), tuple(of_clients), int(num_rounds), sampling)
    except LedgerError as error:
        raise LedgerError(f"{file} is broken: {error}") from None


def round_counts(
    given: Iterable[int] | str | os.PathLike[str] | None,
) -> tuple[int, ...] | None:
    """Returns how many clients each round summed, by the server's own count.

    Args:
      given: The numbers; None if they are not known; or a file of them: ``.json`` with a list, or
        a text in UTF-8 with one number on each line, in the order of rounds, with or without a
        first line ``clients``. Empty lines mean nothing.

    Raises:
      LedgerError: If the file cannot be read, or is none of these.
      TypeError: If the numbers are no list.
      ValueError: If one of them is no integer or below 0.
    """
    if given is None:
        return None
    if not isinstance(given, (str, os.PathLike)):
        # The keys of a mapping, a set and the bytes of a path are numbers too, and no counts.
        if isinstance(given, Mapping | Set | bytes):
            raise TypeError(f"round_counts must be a list, found a {type(given).__name__}.")
        return tuple(numbers.integer_at_least(each, 0, "round_counts") for each in given)
    file = pathlib.Path(given)
    counts: list[int] = []

    def add(_number: int, fields: Sequence[str]) -> None:
        found = round_of(",".join(fields))
        if found is None:
            raise LedgerError(f"found {_shown(','.join(fields))}")
        counts.append(found)

    try:
        if file.suffix.lower() != ".json":
            read_lines(file, add, {("clients",)}, "one number", widths=range(1, 9))
            return tuple(counts)
        listed = inputs.parsed_json(file.read_text(encoding="utf-8-sig"))
        # A text would name another file, which no statement hashes.
        if not isinstance(listed, list):
            raise ValueError(f"found {numbers.shown(listed)}")
        return round_counts(listed)
    except OSError as error:
        raise LedgerError(f"{file} cannot be read: {error.strerror}.") from error
    except (TypeError, ValueError) as error:
        raise LedgerError(f"{file} is no list of one number a round: {error}") from error


def _names(array: npt.NDArray[Any]) -> npt.NDArray[np.str_]:
    """Returns names as texts; raises ValueError for fractions and truth values."""
    if np.issubdtype(array.dtype, np.bytes_):
        return np.char.decode(array, "utf-8")
    is_named = np.issubdtype(array.dtype, np.str_) or np.issubdtype(array.dtype, np.integer)
    if array.size and not is_named:
        raise ValueError(f"client_ids holds {array.dtype}, neither texts nor integers")
    return array.astype(np.str_)


def _integers(array: npt.NDArray[Any]) -> IntArray:
    """Returns an array as int64; raises ValueError for fractions, which it would cut off."""
    # An empty list has no type of its own.
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"an array of integers holds {array.dtype}")
    return np.asarray(array, np.int64)


def _fit_together(
    names: npt.NDArray[np.str_], offsets: IntArray, rounds: IntArray, num_rounds: IntArray
) -> bool:
    """Returns whether arrays have the shapes of a ledger, and offsets those of its clients."""
    if (names.ndim, rounds.ndim, num_rounds.ndim) != (1, 1, 0):
        return False
    if offsets.shape != (len(names) + 1,):
        return False
    return offsets[0] == 0 and offsets[-1] == len(rounds) and bool(np.all(np.diff(offsets) >= 0))


def _check_name(name: str) -> None:
    """Raises LedgerError if a name is empty, or has a character that cannot be seen."""
    if not name:
        raise LedgerError("a name is empty, and participations are counted by name.")
    hidden = client_names.hidden_character(name)
    if hidden is not None:
        raise LedgerError(
            f"the name {_shown(name)} has the character U+{ord(hidden):04X}, which cannot be "
            "seen or told from a space, so that two names may look like one: remove it, or write "
            "a space."
        )


def _shown(text: str) -> str:
    if len(text) <= _MOST_CHARACTERS_SHOWN:
        return ascii(text)
    return f"{text[:_MOST_CHARACTERS_SHOWN]!a} and more"
