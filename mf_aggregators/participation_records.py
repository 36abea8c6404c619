"""Records of who took part in which round, as files.

Two formats are read: the ``participation.npz`` of a run directory, and a text file of a
client and a round (from 0) on each line, separated by a comma, as any production system can
write it.
"""

import csv
import dataclasses
import json
import os
import pathlib

import numpy as np

from mf_aggregators import sampling_schemes
from mf_aggregators.sampling_schemes import SamplingScheme


class RecordError(ValueError):
    """A record that cannot be read; the message names the file and the reason."""


@dataclasses.dataclass(frozen=True, eq=False)
class ParticipationRecord:
    """Who took part in which round.

    Attributes:
      client_ids: The clients.
      rounds_of_clients: For each client the increasing rounds, from 0, that it took part in.
      num_rounds: The rounds that were released.
      sampling: The scheme by which a data sampler is said to have drawn the batches; None
        for clients who decided themselves, and for text files.
    """

    client_ids: tuple[str, ...]
    rounds_of_clients: tuple[np.ndarray, ...]
    num_rounds: int
    sampling: SamplingScheme | None = None


def load(path: str | os.PathLike[str], num_rounds: int) -> ParticipationRecord:
    """Reads a record.

    Args:
      path: A ``.npz`` file with ``client_ids``, ``num_rounds`` and, for client i, its rounds
        as ``rounds[offsets[i]:offsets[i + 1]]``, and ``sampling``, the scheme of a data
        sampler as JSON, if there was one; or a text file of ``client,round`` lines, of
        which the first may be a heading.
      num_rounds: The rounds that were released, for a text file, which does not say it.
        More than there were is safe, and fewer are not: what a client contributed is in
        later rounds too.

    Returns:
      The record.

    Raises:
      RecordError: If the file is missing, damaged, or is no record.
    """
    file = pathlib.Path(path)
    try:
        if file.suffix == ".npz":
            return _from_archive(file)
        return _from_text(file, num_rounds)
    except OSError as error:
        raise RecordError(f"{file} cannot be read: {error.strerror}.") from error


def _from_archive(file: pathlib.Path) -> ParticipationRecord:
    try:
        with np.load(file, allow_pickle=False) as archive:
            client_ids = tuple(str(client) for client in archive["client_ids"])
            offsets, rounds = archive["offsets"], archive["rounds"]
            num_rounds = int(archive["num_rounds"])
            sampling = (
                sampling_schemes.from_dict(json.loads(str(archive["sampling"])))
                if "sampling" in archive
                else None
            )
    except OSError:
        raise
    except Exception as error:
        # NumPy's reader raises many types for a damaged archive.
        raise RecordError(f"{file} cannot be read as a record of rounds: {error}.") from error
    ordered = offsets.shape == (len(client_ids) + 1,) and np.all(np.diff(offsets) >= 0)
    if not ordered or offsets[0] != 0 or offsets[-1] != len(rounds):
        raise RecordError(f"{file} is broken: its rounds and clients do not fit together.")
    if len(set(client_ids)) != len(client_ids):
        raise RecordError(
            f"{file} has two clients of the same name, whose rounds would not count as one "
            "client's: give each client one name."
        )
    return ParticipationRecord(
        client_ids,
        tuple(np.split(np.asarray(rounds, np.int64), offsets[1:-1])),
        num_rounds,
        sampling,
    )


def _from_text(file: pathlib.Path, num_rounds: int) -> ParticipationRecord:
    of_client: dict[str, list[int]] = {}
    try:
        with file.open(encoding="utf-8", newline="") as lines:
            for number, line in enumerate(csv.reader(lines), 1):
                is_heading = number == 1 and len(line) == 2 and not _is_round(line[1])
                if not line or is_heading:
                    continue
                if len(line) != 2 or not _is_round(line[1]):
                    raise RecordError(
                        f"{file}, line {number}: expected a client and a round from 0, found "
                        f"{','.join(line)!r}."
                    )
                of_client.setdefault(line[0].strip(), []).append(int(line[1]))
    except (UnicodeDecodeError, csv.Error) as error:
        raise RecordError(
            f"{file} cannot be read as text of clients and rounds: {error}."
        ) from None
    if not of_client:
        raise RecordError(f"{file} holds no participation.")
    rounds = tuple(np.sort(np.asarray(found, np.int64)) for found in of_client.values())
    return ParticipationRecord(tuple(of_client), rounds, num_rounds)


def _is_round(text: str) -> bool:
    return text.strip().isdecimal()
