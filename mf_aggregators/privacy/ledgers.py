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
import json
import os
import pathlib
import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from mf_aggregators import atomic_files, inputs
from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.numbers import Error, IntArray
from mf_aggregators.participation import SamplingScheme, accounted, sampling_from_dict
from mf_aggregators.privacy import client_names

# Of the ledger in the directory of a training run.
FILE_OF_RUN = "participation.npz"
# A text file may begin with a heading: one of these, a comma, and one of the words for rounds.
HEADINGS_OF_CLIENTS = ("client", "client_id", "user", "user_id", "device", "device_id")
# The second word of a heading.
HEADINGS_OF_ROUNDS = ("round", "round_index")
# The first line of a file of round counts may be this.
HEADING_OF_COUNTS = "clients"

# A field is in double quotes, where two of them stand for one, or has no quote and no comma.
_FIELD = r'(?:\s*"((?:[^"]|"")*)"\s*|([^",]*))'
_LINE = re.compile(f"{_FIELD},{_FIELD}")
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
            given = getattr(self, name)
            if isinstance(given, str) or not isinstance(given, Iterable):
                raise LedgerError(f"{name} must be a tuple, found {numbers.shown(given)}.")
        names, of_clients = tuple(self.client_ids), tuple(map(np.asarray, self.rounds_of_clients))
        if self.sampling is not None:
            object.__setattr__(self, "sampling", accounted(self.sampling))
        try:
            rounds = numbers.integer_at_least(self.num_rounds, 0, "num_rounds")
        except ValueError as error:
            raise LedgerError(str(error)) from None
        object.__setattr__(self, "num_rounds", rounds)
        if len(names) != len(of_clients) or not all(isinstance(name, str) for name in names):
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
        if not kinds <= {(1, "i"), (1, "u")}:
            raise LedgerError(
                "its rounds and clients do not fit together: the rounds of each client must be an "
                "array of integers of one dimension."
            )
        every = np.concatenate([np.empty(0, np.int64), *(each for each in of_clients if each.size)])
        starts = np.zeros(len(every) + 1, dtype=bool)
        starts[np.cumsum([len(each) for each in of_clients], dtype=np.int64)] = True
        if np.any((every < 0) | (every >= rounds)) or not np.all(
            (every[1:] > every[:-1]) | starts[1:-1]
        ):
            raise LedgerError(
                "its rounds and clients do not fit together: the rounds of each client must "
                f"increase, from 0 to {rounds - 1}, the last that was released."
            )
        whole = tuple(np.asarray(each, np.int64) for each in of_clients)
        for name, values in (("client_ids", names), ("rounds_of_clients", whole)):
            object.__setattr__(self, name, values)

    def cohorts(self) -> tuple[IntArray, ...]:
        """Returns for each round the (clients,) int64 increasing indices of its clients."""
        sizes = [len(rounds) for rounds in self.rounds_of_clients]
        clients = np.repeat(np.arange(len(sizes)), sizes)
        rounds = np.concatenate([np.empty(0, np.int64), *self.rounds_of_clients])
        order = np.argsort(rounds, kind="stable")
        ends = np.cumsum(np.bincount(rounds, minlength=self.num_rounds))
        return tuple(np.split(clients[order], ends[:-1])) if self.num_rounds else ()

    def has_same_rounds(self, other: "Ledger") -> bool:
        """Returns whether each client took part in the same rounds as in another ledger.

        Args:
          other: The other ledger, whose clients may come in another order.
        """
        mine, theirs = (
            {name: rounds.tolist() for name, rounds in pairs if len(rounds)}
            for pairs in (
                zip(each.client_ids, each.rounds_of_clients, strict=True) for each in (self, other)
            )
        )
        return mine == theirs

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the ledger as an ``.npz`` file, whole or not at all; see :func:`load`.

        Args:
          path: The file.

        Raises:
          OSError: If it cannot be written.
        """
        sizes = [len(rounds) for rounds in self.rounds_of_clients]
        rounds = np.concatenate([np.empty(0, np.int64), *self.rounds_of_clients])
        offsets = np.cumsum([0, *sizes])
        write(path, self.client_ids, offsets, rounds, self.num_rounds, self.sampling)


# What ``of`` makes a ledger from.
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
        ``HEADINGS_OF_CLIENTS`` and one of ``HEADINGS_OF_ROUNDS``, in any case. Empty lines
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
    file = pathlib.Path(path)
    if is_archive(file):
        return load_archive(file)
    try:
        return _from_text(file, num_rounds)
    except OSError as error:
        raise LedgerError(f"{file} cannot be read: {error.strerror}.") from error


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
        # A damaged archive whose names cannot be read may be one.
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
    try:
        text = file.read_text(encoding="utf-8-sig")
        if file.suffix.lower() == ".json":
            listed = inputs.parsed_json(text)
            # A text would name another file, which no statement hashes.
            if not isinstance(listed, list):
                raise ValueError(f"found {numbers.shown(listed)}")
            return round_counts(listed)
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        counts = lines[lines[:1] == [HEADING_OF_COUNTS] :]
        if others := [each for each in counts if _ROUND.fullmatch(each) is None]:
            raise ValueError(f"found {_shown(others[0])}")
        return round_counts(map(int, counts))
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


def _from_text(file: pathlib.Path, num_rounds: int) -> Ledger:
    try:
        # Byte order marks of UTF-16 and UTF-32 are not UTF-8 either.
        with file.open(encoding="utf-8-sig", newline="") as lines:
            of_clients = _rounds_in_lines(lines, file, num_rounds)
    except UnicodeDecodeError:
        raise LedgerError(
            f"{file} is not text in UTF-8: save it in that encoding, as lines of a client, a "
            "comma and a round from 0."
        ) from None
    if not of_clients:
        raise LedgerError(f"{file} holds no participation.")
    rounds = tuple(np.sort(np.fromiter(found, np.int64)) for found in of_clients.values())
    return Ledger(tuple(of_clients), rounds, num_rounds)


def _rounds_in_lines(
    lines: Iterable[str], file: pathlib.Path, num_rounds: int
) -> Mapping[str, Mapping[int, int]]:
    """Returns each client's rounds, with the line that each of them stands in."""
    of_clients: dict[str, dict[int, int]] = {}
    may_be_heading = True
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text:
            continue
        fields = fields_of_line(text)
        is_heading = may_be_heading and _is_heading(fields)
        may_be_heading = False
        if is_heading:
            continue
        try:
            client, round_index = _client_and_round(text, fields, num_rounds)
        except LedgerError as error:
            raise LedgerError(f"{file}, line {number}: {error}") from None
        rounds = of_clients.setdefault(client, {})
        earlier = rounds.setdefault(round_index, number)
        if earlier != number:
            raise LedgerError(
                f"{file}, line {number}: repeats line {earlier}. One client takes part in a "
                "round once: remove the line if it was written twice, or give two clients two "
                "names."
            )
    return of_clients


def fields_of_line(text: str) -> tuple[str, str] | None:
    """Returns the two fields of a line, without quotes; None if it does not have two.

    Args:
      text: The line, as :func:`load` describes it.
    """
    match = _LINE.fullmatch(text)
    if match is None:
        return None
    quoted_client, client, quoted_round, round_text = match.groups()
    return (
        _unquoted(quoted_client) if client is None else client.strip(),
        _unquoted(quoted_round) if round_text is None else round_text.strip(),
    )


def _unquoted(text: str) -> str:
    return text.replace('""', '"').strip()


def _is_heading(fields: tuple[str, str] | None) -> bool:
    if fields is None:
        return False
    client, round_text = fields
    return client.lower() in HEADINGS_OF_CLIENTS and round_text.lower() in HEADINGS_OF_ROUNDS


def _client_and_round(
    text: str, fields: tuple[str, str] | None, num_rounds: int
) -> tuple[str, int]:
    if fields is None:
        raise LedgerError(
            f"expected a client and a round, separated by one comma, found {_shown(text)}."
        )
    client, round_text = fields
    match = _ROUND.fullmatch(round_text)
    if match is None:
        raise LedgerError(
            "expected a round as a plain number from 0, in the digits 0 to 9 alone, found "
            f"{_shown(round_text)}. Of headings only {HEADINGS_OF_CLIENTS[0]},"
            f"{HEADINGS_OF_ROUNDS[0]} and its like are known, in the first line."
        )
    round_index = int(match[1])
    if round_index >= num_rounds:
        raise LedgerError(
            f"found round {round_index}, and {num_rounds} rounds were released, of which the "
            f"last is round {num_rounds - 1}."
        )
    check_name(client)
    return client, round_index


def check_name(name: str) -> None:
    """Checks a name in a text file: it is there, and each of its characters can be seen.

    Args:
      name: The name, of a client or of a person.

    Raises:
      LedgerError: If it is empty, or has a character that cannot be seen.
    """
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
