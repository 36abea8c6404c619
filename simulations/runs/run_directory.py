"""The directory of a run: configuration, metrics, ledger, privacy statement, states, noise."""

import contextlib
import csv
import fcntl
import hashlib
import io
import json
import math
import os
import pathlib
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mf_aggregators import atomic_files, validation

CONFIG_FILE = "config.json"
METRICS_FILE = "metrics.csv"
LEDGER_FILE = "participation.npz"
PRIVACY_FILE = "privacy.json"
STATEMENT_FILE = "PRIVACY.md"
FIGURE_FILE = "training.png"
STATES_DIRECTORY = "checkpoints"
# A state is named after its round.
STATE_PREFIX = "round_"
NOISE_DIRECTORY = "noise"
FACTORIZATION_DIRECTORY = "factorization"
# That of a larger plan, until it takes the place of the one above.
EXTENDED_DIRECTORY = "factorization.extended"
TENSORBOARD_DIRECTORY = "tensorboard"
SAMPLING_SEED_FILE = "sampling_seed.json"
DATA_FILE = "dataset.json"
LOCK_FILE = "run.lock"

# What a file of metrics begins with.
_HEADING = b"round,"

# A directory that others make and remove again and again is there in one of these.
_ATTEMPTS_TO_LOCK = 100
_SECONDS_BETWEEN_ATTEMPTS = 0.002

# What atomic_files writes here; a process that is killed may leave parts of them.
_WHOLE_FILES = (
    CONFIG_FILE,
    METRICS_FILE,
    LEDGER_FILE,
    PRIVACY_FILE,
    STATEMENT_FILE,
    FIGURE_FILE,
    f"{STATES_DIRECTORY}/{DATA_FILE}",
    f"{STATES_DIRECTORY}/{SAMPLING_SEED_FILE}",
)


class RunDirectoryError(ValueError):
    """A directory that a run cannot use; the message says why and what to do."""


class MetricsNotWrittenError(OSError):
    """Metrics that could not be written; the message says why, what is left and what to do."""


class RunDirectory:
    """Paths and files of one run."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Creates the view of a directory; nothing is read or written yet."""
        self.path = pathlib.Path(path)

    @property
    def states(self) -> pathlib.Path:
        """Where resumable states go."""
        return self.path / STATES_DIRECTORY

    @property
    def sampling_seed(self) -> pathlib.Path:
        """The seed of a run's data sampler, among the states and as secret as they are."""
        return self.states / SAMPLING_SEED_FILE

    @property
    def data(self) -> pathlib.Path:
        """What tells the run's data from others, as secret as they are: among the states."""
        return self.states / DATA_FILE

    @property
    def noise(self) -> pathlib.Path:
        """Where noise rows go unless another place is chosen: a cache, as secret as the states."""
        return self.path / NOISE_DIRECTORY

    @property
    def factorization(self) -> pathlib.Path:
        """The checkpoint of the run's factorization."""
        return self.path / FACTORIZATION_DIRECTORY

    @property
    def ledger(self) -> pathlib.Path:
        """The ledger's file."""
        return self.path / LEDGER_FILE

    @property
    def tensorboard(self) -> pathlib.Path:
        """Where TensorBoard's event files go."""
        return self.path / TENSORBOARD_DIRECTORY

    @property
    def extended_factorization(self) -> pathlib.Path:
        """Where the checkpoint of a larger plan is until the run goes on under it."""
        return self.path / EXTENDED_DIRECTORY

    def factorization_sha256(self) -> str:
        """Returns a fingerprint of the run's checkpoint, whose description has its arrays'."""
        return _description_sha256(self.factorization)

    def extended_factorization_sha256(self) -> str:
        """Returns that of the checkpoint of a larger plan."""
        return _description_sha256(self.extended_factorization)

    def settle_factorization(self, config: Mapping[str, Any]) -> None:
        """Puts the checkpoint of a larger plan into its place, once the configuration names it.

        A process that was killed may have left it at any step of that. One that the configuration
        does not name is what an extension has left that never began to count.

        Args:
          config: The run's configuration.

        Raises:
          OSError: If it cannot be moved.
        """
        extended, named = self.extended_factorization, config.get("factorization_sha256")
        for unfinished in self.path.glob(f".{EXTENDED_DIRECTORY}.*"):
            shutil.rmtree(unfinished, ignore_errors=True)
        if not extended.exists():
            return
        if named is not None and _has_sha256(extended, named):
            shutil.rmtree(self.factorization, ignore_errors=True)
            extended.rename(self.factorization)
            atomic_files.synchronise(self.path)
        elif named is None or _has_sha256(self.factorization, named):
            shutil.rmtree(extended, ignore_errors=True)

    def fix_data(self, fingerprint: str) -> None:
        """Keeps the fingerprint of a new run's data, or compares it with what was kept.

        It is no part of the configuration, which may be shown: whoever has two candidates for
        the data could tell from it which one was used.

        Args:
          fingerprint: What ``TaskData.fingerprint`` returned.

        Raises:
          RunDirectoryError: If the run began with other data, or nobody knows any more.
          OSError: If it cannot be read or written.
        """
        if not self.data.exists():
            if self.ledger.exists():
                raise RunDirectoryError(
                    f"{self.data} is missing: without it nobody knows whether the data are those "
                    "that the run began with. Restore it, or start a new run and account for both."
                )
            self.states.mkdir(mode=0o700, exist_ok=True)
            atomic_files.write_text(self.data, json.dumps({"fingerprint": fingerprint}) + "\n")
            return
        try:
            kept = validation.parsed_json(self.data.read_text(encoding="utf-8"))["fingerprint"]
        except (ValueError, KeyError, TypeError) as error:
            raise RunDirectoryError(
                f"{self.data} cannot be read ({error}): restore it, or start a new run and account "
                "for both."
            ) from error
        if kept != fingerprint:
            raise RunDirectoryError(
                f"the data have changed since the run in {self.path} began, and no run can go on "
                "with other data under the same noise: start a new one."
            )

    def has_begun(self) -> bool:
        """Returns whether there are results or a statement, which follow the first state."""
        return self.has_metrics() or (self.path / PRIVACY_FILE).exists()

    def has_states(self) -> bool:
        """Returns whether any state of a round is there, whole or damaged."""
        return any(self.states.glob(f"{STATE_PREFIX}*"))

    def delete_noise_rows(self) -> None:
        """Deletes the noise rows in the run's own directory, which a finished run needs no more."""
        for rows in self.noise.glob("rows-*"):
            shutil.rmtree(rows, ignore_errors=True)

    def has_metrics(self) -> bool:
        """Returns whether the metrics of any round were written."""
        path = self.path / METRICS_FILE
        return path.exists() and len(path.read_bytes().splitlines()) > 1

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other processes out of the directory, which is created if it is missing.

        Two processes that go on from one state would overwrite each other's ledger and rows
        of noise. The kernel releases the lock when a process ends, however it ends. What a
        killed one has left of unfinished files is removed; a directory in which nothing was
        written is removed again at the end.

        Yields:
          Once this process alone has the directory.

        Raises:
          RunDirectoryError: If another process, or this one already, has the directory; if
            it is not that of a run, cannot be written, or is on a file system without locks.
        """
        # This comes before anything is written, in case the directory is that of something else.
        self.read_config()
        is_new = not self.path.exists()
        descriptor = self._take_lock()
        try:
            for name in _WHOLE_FILES:
                atomic_files.remove_unfinished(self.path / name)
            yield
        finally:
            with contextlib.suppress(OSError):
                # While it is held, so that it is our own file that goes.
                (self.path / LOCK_FILE).unlink()
                if is_new:
                    self.path.rmdir()
            os.close(descriptor)

    def _take_lock(self) -> int:
        """Returns the open file that holds the lock."""
        path = self.path / LOCK_FILE
        for _ in range(_ATTEMPTS_TO_LOCK):
            descriptor = None
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                # Python closes it in programs that are started: TFF's workers outlive a kill.
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_at(descriptor, path):
                    os.ftruncate(descriptor, 0)
                    os.write(descriptor, f"{os.getpid()}\n".encode())
                    return descriptor
                # Whoever had the lock before has removed its file since we opened it.
            except BlockingIOError:
                assert descriptor is not None
                holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
                os.close(descriptor)
                process = f" (pid {holder})" if holder.isdecimal() else ""
                raise RunDirectoryError(
                    f"another process is running in {self.path}{process}: wait for it or end it."
                ) from None
            except FileNotFoundError:
                # Another process has removed the directory that it had made; or, as in /proc,
                # there will never be one.
                time.sleep(_SECONDS_BETWEEN_ATTEMPTS)
            except OSError as error:
                if descriptor is not None:
                    os.close(descriptor)
                raise RunDirectoryError(
                    f"{path} cannot be locked: {error.strerror}. Remove the cause, or choose "
                    "another --output_dir."
                ) from error
            if descriptor is not None:
                os.close(descriptor)
        raise RunDirectoryError(f"{self.path} cannot be made: choose another --output_dir.")

    def read_config(self) -> dict[str, Any] | None:
        """Returns the configuration of the run that the directory holds, or None if it is new.

        Raises:
          RunDirectoryError: If the directory holds something else, or its
            configuration cannot be read.
        """
        config_path = self.path / CONFIG_FILE
        try:
            if not config_path.exists():
                if self.path.exists() and not self._is_empty():
                    raise RunDirectoryError(
                        f"{self.path} exists and is not the directory of a run: choose another "
                        "--output_dir."
                    )
                return None
        except OSError as error:
            raise RunDirectoryError(
                f"{self.path} cannot be read: {error.strerror}. Choose another --output_dir."
            ) from error
        try:
            config = validation.parsed_json(config_path.read_text(encoding="utf-8"))
            if not isinstance(config, dict):
                raise ValueError("it is no JSON object")
        except (OSError, ValueError) as error:
            raise RunDirectoryError(
                f"{config_path} cannot be read: {error}. Choose another --output_dir."
            ) from error
        return config

    def _is_empty(self) -> bool:
        """Whether nothing is there but what a new run may have left before its configuration."""
        unfinished = f".{CONFIG_FILE}."
        return self.path.is_dir() and all(
            entry.name == LOCK_FILE or entry.name.startswith(unfinished)
            for entry in self.path.iterdir()
        )

    def create(self, config: Mapping[str, Any], only_for_owner: bool = False) -> None:
        """Creates the directory of a new run.

        Args:
          config: Its configuration, JSON-able.
          only_for_owner: Whether nobody else may look into it. Who took part in which
            round must stay secret where a guarantee counts on sampling.

        Raises:
          RunDirectoryError: If the directory cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if only_for_owner:
                self.path.chmod(0o700)
            self.write_json(CONFIG_FILE, config)
        except OSError as error:
            raise RunDirectoryError(
                f"{self.path} cannot be written: {error.strerror}. Choose another --output_dir."
            ) from error

    def write_json(self, name: str, contents: Mapping[str, Any]) -> None:
        """Writes a JSON file, whole or not at all."""
        text = json.dumps(contents, indent=2, allow_nan=False) + "\n"
        atomic_files.write_text(self.path / name, text)

    def write_text(self, name: str, text: str) -> None:
        """Writes a text file, whole or not at all."""
        atomic_files.write_text(self.path / name, text)


def check_same_flags(
    old: Mapping[str, Any], new: Mapping[str, Any], directory: pathlib.Path
) -> None:
    """Refuses to go on with a run under other flags.

    Args:
      old: The flags that the run was started with.
      new: The flags that it is to go on with.
      directory: The run's directory, for the message.

    Raises:
      RunDirectoryError: If any flag differs: noise, data or participation rules
        would change in the middle of one guarantee.
    """
    differing = sorted(name for name in {*old, *new} if old.get(name) != new.get(name))
    if differing:
        raise RunDirectoryError(
            f"{directory} holds a run with other flags "
            f"({', '.join(f'--{name}={old.get(name)}' for name in differing)}): repeat them to "
            "resume it, or choose another --output_dir."
        )


class MetricsLog:
    """``metrics.csv``: one row a round, for all rounds so far, also after a resume."""

    def __init__(self, directory: RunDirectory, columns: Sequence[str], num_rounds: int) -> None:
        """Opens the log, keeping the rows of the first ``num_rounds`` rounds.

        The file is replaced whole or not at all. A round whose row was never written, because
        the process ended between its state and its row, gets one without values.

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
        lines = [self._line(rows.get(number, {"round": number})) for number in _up_to(num_rounds)]
        header = self._line({name: name for name in self._columns})
        try:
            atomic_files.write_text(self._path, "".join([header, *lines]))
        except OSError as error:
            raise MetricsNotWrittenError(
                f"{self._path} cannot be written: {error.strerror}. It is as it was, and so are "
                "the states: remove the cause (free space if the disk is full), and run the same "
                "command again."
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
                f"the metrics of round {round_number} could not be written to {self._path}: "
                f"{error.strerror}. The round itself is saved: remove the cause (free space if the "
                "disk is full), and run the same command again. It goes on after this round, whose "
                "row stays without values."
            ) from error

    def _line(self, row: Mapping[str, Any]) -> str:
        line = io.StringIO(newline="")
        writer = csv.DictWriter(line, self._columns, restval="", extrasaction="ignore")
        writer.writerow(row)
        return line.getvalue()


def check_metrics(path: pathlib.Path) -> None:
    """Checks that a file of metrics, if it is there, begins as one.

    Rows that were cut off are no fault: a process that is killed leaves them.

    Args:
      path: The ``metrics.csv`` of a run.

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
    # Zero bytes, and a part of the heading, are what a loss of power leaves.
    is_whole = line.endswith(b"\n") and b"\0" not in line
    first = line.rstrip(b"\r\n\0")
    if not first.startswith(_HEADING) and (is_whole or not _HEADING.startswith(first)):
        raise RunDirectoryError(
            f"{path} is no file of metrics: its first line does not begin with "
            f"{_HEADING.decode()!r}. Restore it, or delete it: the rounds that it was about then "
            "stay without values."
        )


def _up_to(num_rounds: int) -> range:
    return range(1, num_rounds + 1)


def _whole_rows(path: pathlib.Path) -> dict[int, dict[str, str]]:
    """Returns the rows of a file of metrics by round, without what is damaged of it."""
    if not path.exists():
        return {}
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        # A number whose line has no end may be the beginning of another one. Zero bytes are what
        # some file systems leave of the last writes before a loss of power.
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


def _description_sha256(checkpoint: pathlib.Path) -> str:
    return hashlib.sha256((checkpoint / "factorization.json").read_bytes()).hexdigest()


def _has_sha256(checkpoint: pathlib.Path, named: str) -> bool:
    try:
        return _description_sha256(checkpoint) == named
    except OSError:
        return False


def _is_at(descriptor: int, path: pathlib.Path) -> bool:
    """Whether an open file is still the one of a name."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
