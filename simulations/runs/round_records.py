"""The records of the rounds of a run: who took part, in the ledger, and its metrics."""

import contextlib
import csv
import dataclasses
import hashlib
import io
import json
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mf_aggregators import atomic_files
from mf_aggregators.kernel.numbers import Error
from mf_aggregators.participation import SamplingScheme
from mf_aggregators.privacy import ledgers
from mf_aggregators.privacy.ledgers import Ledger, LedgerError
from simulations.runs.run_directory import METRICS_FILE, RunDirectory, RunDirectoryError

# The beginning of a file of metrics.
_HEADING = b"round,"


class MetricsNotWrittenError(Error, OSError):
    """Metrics that could not be written; the message has the reason, the remains and a remedy."""


@dataclasses.dataclass(frozen=True, eq=False)
class ParticipationLedger:
    """The clients of a population and the cohort of every round so far.

    Attributes:
      client_ids: The population, in the order that cohorts' indices refer to.
      cohorts: For each round, the (clients,) int64 indices of its clients.
      sampling: The scheme by which a data sampler drew the cohorts; None for cohorts of
        clients whose timers allowed it. Amplification does not hold towards whoever reads the
        cohorts of a sampled run.

    Raises:
      LedgerError: If a client's id is none that a ledger keeps (``ledgers.check_names``), or two
        clients have one: participations of one of them would not count as those of the other.
    """

    client_ids: tuple[str, ...]
    cohorts: tuple[np.ndarray, ...] = ()
    sampling: SamplingScheme | None = None

    def __post_init__(self) -> None:
        try:
            ledgers.check_names(self.client_ids)
        except ValueError as error:
            raise LedgerError(str(error)) from None

    @property
    def num_rounds(self) -> int:
        """The number of rounds so far."""
        return len(self.cohorts)

    def with_round(self, cohort: np.ndarray) -> "ParticipationLedger":
        """Returns the ledger with one more round."""
        return dataclasses.replace(self, cohorts=(*self.cohorts, np.asarray(cohort, np.int64)))

    def first_rounds(self, num_rounds: int) -> "ParticipationLedger":
        """Returns the ledger as it stood after its first ``num_rounds`` rounds."""
        return dataclasses.replace(self, cohorts=self.cohorts[:num_rounds])

    def digest(self) -> str:
        """Returns a SHA-256, in hexadecimal digits, of the population and all cohorts."""
        digest = hashlib.sha256()
        scheme = None if self.sampling is None else self.sampling.to_dict()
        digest.update(json.dumps([self.client_ids, scheme], sort_keys=True).encode("utf-8"))
        for cohort in self.cohorts:
            # The size is hashed too, so that no client can move to the next round unseen.
            digest.update(np.array([len(cohort), *np.sort(cohort)], "<i8").tobytes())
        return digest.hexdigest()

    def rounds_of_clients(self) -> list[np.ndarray]:
        """Returns for each client the increasing rounds, from 0, that it took part in."""
        offsets, rounds = self._by_client()
        return [rounds[offsets[i] : offsets[i + 1]] for i in range(len(self.client_ids))]

    def record(self) -> Ledger:
        """Returns the ledger as guarantees take it."""
        clients = tuple(self.rounds_of_clients())
        return Ledger(self.client_ids, clients, self.num_rounds, self.sampling)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the ledger as an ``.npz`` file, whole or not at all.

        The file holds ``client_ids``, and for client i its rounds, from 0, as
        ``rounds[offsets[i]:offsets[i + 1]]``; ``num_rounds`` is the number of rounds. Where a data
        sampler drew the cohorts, ``sampling`` is its scheme as JSON.

        Raises:
          OSError: If it cannot be written.
        """
        offsets, rounds = self._by_client()
        ledgers.write(path, self.client_ids, offsets, rounds, self.num_rounds, self.sampling)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "ParticipationLedger":
        """Reads a file of :meth:`save`.

        Raises:
          LedgerError: If the file is missing or broken.
        """
        ledger = ledgers.load(path)
        return cls(ledger.client_ids, ledger.cohorts(), ledger.sampling)

    def _by_client(self) -> tuple[np.ndarray, np.ndarray]:
        sizes = [len(cohort) for cohort in self.cohorts]
        clients = np.concatenate([np.empty(0, np.int64), *self.cohorts])
        rounds = np.repeat(np.arange(self.num_rounds), sizes)
        # Rounds are in order already.
        order = np.argsort(clients, kind="stable")
        counts = np.bincount(clients, minlength=len(self.client_ids))
        return np.concatenate([[0], np.cumsum(counts)]), rounds[order]


class MetricsLog:
    """``metrics.csv``: one row a round, for all rounds so far, also after a resume."""

    def __init__(self, directory: RunDirectory, columns: Sequence[str], num_rounds: int) -> None:
        """Opens the log, keeping the rows of the first ``num_rounds`` rounds.

        The file is replaced whole or not at all. A round whose row was never written, because the
        process ended between its state and its row, gets one without values.

        Args:
          directory: The run's directory.
          columns: The columns after ``round``.
          num_rounds: How many rounds were finished before.

        Raises:
          MetricsNotWrittenError: If the file cannot be written; it is as it was.
          RunDirectoryError: If what is there is no file of metrics.
        """
        self._path = directory.path / METRICS_FILE
        check_metrics(self._path)
        self._columns = ["round", *columns]
        rows = _whole_rows(self._path)
        lines = [
            self._line(rows.get(number, {"round": number})) for number in range(1, num_rounds + 1)
        ]
        header = self._line({name: name for name in self._columns})
        try:
            atomic_files.write_text(self._path, "".join([header, *lines]))
        except OSError as error:
            raise MetricsNotWrittenError(
                f"{self._path} cannot be written: {error.strerror}. It is as it was: remove the "
                "cause (free space if the disk is full), and run the same command again."
            ) from error

    def append(self, round_number: int, values: Mapping[str, float | int]) -> None:
        """Appends the row of a round.

        Args:
          round_number: The round, from 1.
          values: Values by column; what is missing or not finite stays empty.

        Raises:
          MetricsNotWrittenError: If the row cannot be written. No part of it is left.
          ValueError: If a value is of no column.
        """
        row: dict[str, Any] = {"round": round_number}
        for name, value in values.items():
            row[name] = value if math.isfinite(value) else ""
        if unknown := set(row) - set(self._columns):
            raise ValueError(f"{METRICS_FILE} has no columns {sorted(unknown)}.")
        try:
            _append(self._path, self._line(row).encode("utf-8"))
        except OSError as error:
            raise MetricsNotWrittenError(
                f"the metrics of round {round_number}, which is saved, could not be written to "
                f"{self._path}: {error.strerror}. Remove the cause (free space if the disk is "
                "full), and run the same command again: it goes on after this round."
            ) from error

    def _line(self, row: Mapping[str, Any]) -> str:
        line = io.StringIO(newline="")
        writer = csv.DictWriter(line, self._columns, restval="", extrasaction="ignore")
        writer.writerow(row)
        return line.getvalue()


def check_metrics(path: pathlib.Path) -> None:
    """Checks that a file of metrics, if it is there, begins as one.

    Rows that were cut off are no fault: a process that is killed leaves them.

    Raises:
      RunDirectoryError: If it holds something else, or cannot be read.
    """
    try:
        with path.open("rb") as file:
            line = file.readline()
    except FileNotFoundError:
        return
    except OSError as error:
        raise RunDirectoryError(f"{path} cannot be read: {error.strerror}.") from error
    # A loss of power leaves zero bytes and a part of the heading.
    is_whole = line.endswith(b"\n") and b"\0" not in line
    first = line.rstrip(b"\r\n\0")
    if not first.startswith(_HEADING) and (is_whole or not _HEADING.startswith(first)):
        raise RunDirectoryError(
            f"{path} is no file of metrics: its first line does not begin with "
            f"{_HEADING.decode()!r}. Restore it, or delete it."
        )


def _whole_rows(path: pathlib.Path) -> dict[int, dict[str, str]]:
    """The intact rows of a file of metrics, by round."""
    if not path.exists():
        return {}
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        # A line that was cut off may hold only the first digits of a number. After a loss of power
        # some file systems leave zero bytes in place of the last writes.
        lines = [line for line in file if line.endswith("\n") and "\0" not in line]
    rows = {}
    for row in csv.DictReader(lines):
        number = row.get("round") or ""
        if number.isdecimal() and None not in row and None not in row.values():
            rows[int(number)] = row
    return rows


def _append(path: pathlib.Path, line: bytes) -> None:
    """Appends a line, or leaves the file as it was."""
    with path.open("ab", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        written = 0
        try:
            # A disk that becomes full takes a part first.
            while written < len(line):
                written += file.write(line[written:])
        except OSError:
            with contextlib.suppress(OSError):
                file.truncate(size)
            raise
