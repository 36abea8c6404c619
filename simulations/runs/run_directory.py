"""The directory of a training run, with its lock, configuration and participation ledger."""

import contextlib
import dataclasses
import fcntl
import hashlib
import importlib.metadata
import io
import json
import os
import pathlib
import platform
import shlex
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from mf_aggregators import __version__, atomic_files, inputs
from mf_aggregators.commands.command_line import CommandError
from mf_aggregators.kernel.numbers import Error
from mf_aggregators.participation import Participation, SamplingScheme
from mf_aggregators.privacy import ledgers
from mf_aggregators.privacy.ledgers import Ledger, LedgerError

CONFIG_FILE = "config.json"
METRICS_FILE = "metrics.csv"
LEDGER_FILE = ledgers.FILE_OF_RUN
PRIVACY_FILE = "privacy.json"
STATEMENT_FILE = "PRIVACY.md"
FIGURE_FILE = "training.png"
FINAL_MODEL_FILE = "final_model.npz"
# The entry of config.json that has the day on which a run began.
BEGUN = "begun"
# The name of a saved state is this prefix and the number of its round.
STATE_PREFIX = "round_"
# The entry of config.json with the earlier horizons of a run that was extended.
EXTENDS = "extends"
# The entry of config.json with flags' values before each change, keyed by the number of rounds
# released until the change, in the order of the changes.
CHANGED = "changed_flags"

_LOCK_FILE = "run.lock"
# The first bytes of every metrics.csv.
_HEADING = b"round,"
# The most attempts to lock the directory, which other processes may create and remove meanwhile.
_ATTEMPTS_TO_LOCK = 100
_SECONDS_BETWEEN_ATTEMPTS = 0.002

# Files that are written by way of temporary files, which a killed process may leave behind.
_WHOLE_FILES = (
    CONFIG_FILE,
    METRICS_FILE,
    LEDGER_FILE,
    PRIVACY_FILE,
    STATEMENT_FILE,
    FIGURE_FILE,
    FINAL_MODEL_FILE,
    "checkpoints/dataset.json",
    "checkpoints/sampling_seed.json",
)


# The packages that a run records the versions of, because its results depend on them.
_PACKAGES = ("tensorflow-federated", "tensorflow", "tensorflow-privacy", "dp-accounting", "numpy")


class RunDirectoryError(Error, ValueError):
    """A directory that a run cannot use; the message has the reason and a remedy."""


class RunDirectory:
    """The directory of one training run: the paths of its files, its lock and its configuration."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Sets the paths of the run's files; nothing is read or written yet."""
        self.path = pathlib.Path(path)
        self.ledger = self.path / LEDGER_FILE
        # The file with all weights of the final model, written when the run has ended.
        self.final_model = self.path / FINAL_MODEL_FILE
        # The directory of TensorBoard's event files.
        self.tensorboard = self.path / "tensorboard"
        # The directory of the states that a run resumes from. They are secret, and so are the two
        # other files in it: the seed of a data sampler and the fingerprint of the data.
        self.states = self.path / "checkpoints"
        self.sampling_seed = self.states / "sampling_seed.json"
        self.data = self.states / "dataset.json"
        # The default directory of noise rows on disk: a cache, as secret as the states.
        self.noise = self.path / "noise"
        # The directory of an audited run's records: for each round, the release along the canaries'
        # directions.
        self.audit = self.path / "audit"
        # The checkpoint of the run's factorization; and the checkpoint for a larger horizon while a
        # run is being extended.
        self.factorization = self.path / "factorization"
        self.extended_factorization = self.path / "factorization.extended"

    def settle_factorization(self, config: Mapping[str, object]) -> None:
        """Moves the factorization of a larger horizon into place once the configuration names it.

        An earlier process may have been killed at any step of this move. A checkpoint that the
        configuration does not name is left from an extension that never took effect, and is
        removed.

        Raises:
          OSError: If the checkpoint cannot be moved.
        """
        extended, named = self.extended_factorization, config.get("factorization_sha256")
        for unfinished in self.path.glob(f".{extended.name}.*"):
            shutil.rmtree(unfinished, ignore_errors=True)
        if not extended.exists():
            return
        if named is not None and matrix_sha256(extended) == named:
            shutil.rmtree(self.factorization, ignore_errors=True)
            extended.rename(self.factorization)
            atomic_files.synchronise(self.path)
        elif named is None or matrix_sha256(self.factorization) == named:
            shutil.rmtree(extended, ignore_errors=True)

    def fix_data(self, fingerprint: str) -> None:
        """Saves the fingerprint of a new run's data; compares a resumed run's with it.

        The fingerprint is kept out of the configuration, which may be shown to others: an adversary
        with two candidates for the data could tell from the fingerprint which one was used.

        Raises:
          RunDirectoryError: If the run began with other data, or its saved fingerprint is lost.
          OSError: If the fingerprint cannot be read or written.
        """
        if not self.data.exists():
            if self.ledger.exists():
                raise RunDirectoryError(
                    f"{self.data} is missing, and shows whether the data are those that the run "
                    "began with. Restore it, or start a new run and account for both."
                )
            self.states.mkdir(mode=0o700, exist_ok=True)
            atomic_files.write(self.data, json.dumps({"fingerprint": fingerprint}) + "\n")
            return
        try:
            found = inputs.parsed_json(self.data.read_text(encoding="utf-8"))
            kept = inputs.part(found, dict)["fingerprint"]
        except (ValueError, KeyError, TypeError) as error:
            raise RunDirectoryError(
                f"{self.data} cannot be read ({error}): restore it, or start a new run and account "
                "for both."
            ) from error
        if kept != fingerprint:
            raise RunDirectoryError(
                f"the data have changed since the run in {self.path} began, and a run cannot "
                "continue with other data under the same noise: start a new one."
            )

    def day_of_beginning(self) -> str | None:
        """Returns the day on which the run began, if its configuration says it and can be read."""
        day = _kept(self.path / CONFIG_FILE, BEGUN)
        return day if isinstance(day, str) else None

    def has_begun(self) -> bool:
        """Returns whether the run has results or a statement, written after its first state."""
        metrics = self.path / METRICS_FILE
        has_metrics = metrics.exists() and len(metrics.read_bytes().splitlines()) > 1
        return has_metrics or (self.path / PRIVACY_FILE).exists()

    def has_states(self) -> bool:
        """Returns whether the directory has the saved state of any round, even a damaged one."""
        return any(self.states.glob(f"{STATE_PREFIX}*"))

    def delete_noise_rows(self) -> None:
        """Deletes the noise rows in the run's own directory, which the run needs no more."""
        for rows in self.noise.glob("rows-*"):
            shutil.rmtree(rows, ignore_errors=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other processes out of the directory, which is created if it is missing.

        Two processes that go on from one state would overwrite each other's ledger and rows of
        noise. The kernel releases the lock when a process ends, however it ends. What a killed one
        left of unfinished files is removed, and so, at the end, is a directory in which nothing was
        written.

        Raises:
          RunDirectoryError: If another process, or this one already, has the directory; if it is
            not that of a run, cannot be written, or is on a file system without locks.
        """
        # Read the configuration before anything is written: the directory may belong to something
        # else.
        self.read_config()
        is_new = not self.path.exists()
        descriptor = self._take_lock()
        try:
            for name in _WHOLE_FILES:
                atomic_files.remove_unfinished(self.path / name)
            yield
        finally:
            with contextlib.suppress(OSError):
                # Remove the lock file while the lock is held, so that it is this process's own
                # file.
                (self.path / _LOCK_FILE).unlink()
                if is_new:
                    self.path.rmdir()
            os.close(descriptor)

    def _take_lock(self) -> int:
        """Locks the directory and returns the descriptor of the open file that holds the lock."""
        path = self.path / _LOCK_FILE
        for _ in range(_ATTEMPTS_TO_LOCK):
            descriptor = None
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                # Child programs do not inherit this descriptor. TFF's workers outlive a killed
                # parent, and would otherwise keep the lock.
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_at(descriptor, path):
                    os.ftruncate(descriptor, 0)
                    os.write(descriptor, f"{os.getpid()}\n".encode())
                    return descriptor
                # The previous holder removed its lock file after this process opened it: try again.
            except BlockingIOError:
                assert descriptor is not None
                holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
                os.close(descriptor)
                process = f" (pid {holder})" if holder.isdecimal() else ""
                raise RunDirectoryError(
                    f"another process is running in {self.path}{process}: wait for it or end it."
                ) from None
            except FileNotFoundError:
                # Another process may have removed a directory that it had made: try again. In
                # places such as /proc no directory can be made, and all attempts fail.
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
        raise RunDirectoryError(f"{self.path} cannot be created: choose another --output_dir.")

    def read_config(self) -> dict[str, object] | None:
        """Returns the configuration of the run that the directory holds, or None if it is new.

        Raises:
          RunDirectoryError: If it holds something else, or its configuration cannot be read.
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
            config = inputs.parsed_json(config_path.read_text(encoding="utf-8"))
            _check_config(config)
            return inputs.part(config, dict)
        except (OSError, ValueError) as error:
            raise RunDirectoryError(
                f"{config_path} cannot be read: {error}. Restore it, or choose another "
                "--output_dir."
            ) from error

    def _is_empty(self) -> bool:
        """Whether the directory has no files but a lock and an unfinished configuration."""
        unfinished = f".{CONFIG_FILE}."
        return self.path.is_dir() and all(
            entry.name == _LOCK_FILE or entry.name.startswith(unfinished)
            for entry in self.path.iterdir()
        )

    def create(self, config: Mapping[str, object], only_for_owner: bool = False) -> None:
        """Creates the directory of a new run.

        Args:
          config: The configuration of the run, JSON-able.
          only_for_owner: Whether nobody else may look into it: who took part in which round must
            stay secret where a guarantee counts on sampling.

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

    def save_model(self, names: Sequence[str], weights: Sequence[np.ndarray]) -> None:
        """Writes the weights of the final model by position, whole or not at all.

        Args:
          names: One for each weight.
          weights: The arrays, in the model's order.

        Raises:
          OSError: If the file cannot be written.
        """
        arrays = {f"weight_{number}": array for number, array in enumerate(weights)}
        archive = io.BytesIO()
        np.savez(archive, names=np.array(names, np.str_), **arrays)
        atomic_files.write(self.final_model, archive.getbuffer())

    def record(self, **entries: object) -> None:
        """Adds entries to the run's file config.json."""
        config = self.read_config() or {}
        if {**config, **entries} != config:
            self.write_json(CONFIG_FILE, {**config, **entries})

    def write_json(self, name: str, contents: Mapping[str, object]) -> None:
        """Writes a JSON file, whole or not at all."""
        text = json.dumps(contents, indent=2, allow_nan=False) + "\n"
        atomic_files.write(self.path / name, text)


def _check_config(config: object) -> None:
    """Raises ValueError if an entry of a configuration has the wrong form."""
    if not isinstance(config, dict):
        raise ValueError("it is not a JSON object")
    for name in ("flags", "versions", CHANGED):
        if not isinstance(config.get(name, {}), dict):
            raise ValueError(f"its {name} are not a JSON object")
    if not all(isinstance(flags, dict) for flags in config.get(CHANGED, {}).values()):
        raise ValueError(f"an entry of its {CHANGED} is not a JSON object")


@dataclasses.dataclass(frozen=True)
class Horizon:
    """An earlier horizon of a run: the number of rounds planned before the run was extended.

    Attributes:
      num_rounds: The number of rounds that were planned.
      released_rounds: How many rounds were released when the run was extended.
      participation: The schema that the timers enforced.
    """

    num_rounds: int
    released_rounds: int
    participation: Participation

    def to_dict(self) -> dict[str, object]:
        """Returns the entry of ``config.json`` for the horizon."""
        return {**vars(self), "participation": self.participation.to_dict()}


def horizons_of(begun: Mapping[str, object], directory: RunDirectory) -> tuple[Horizon, ...]:
    """Returns the earlier horizons of an extended run from its ``config.json``.

    Raises:
      RunDirectoryError: If the entries on horizons are broken.
    """
    try:
        return tuple(
            Horizon(
                int(horizon["num_rounds"]),
                int(horizon["released_rounds"]),
                Participation.from_dict(horizon["participation"]),
            )
            for horizon in inputs.part(begun.get(EXTENDS, []), list)
        )
    except (KeyError, OverflowError, TypeError, ValueError) as error:
        raise RunDirectoryError(
            f"{directory.path / CONFIG_FILE} is broken: its record of extended horizons cannot be "
            f"read ({error}). Restore it."
        ) from error


def check_same_flags(
    old: Mapping[str, object], new: Mapping[str, object], directory: pathlib.Path
) -> None:
    """Raises an error if a run is resumed with other flags than it began with.

    Raises:
      RunDirectoryError: If any flag differs: noise, data or participation rules would change in
        the middle of one guarantee.
    """
    differing = sorted(name for name in {*old, *new} if old.get(name) != new.get(name))
    if not differing:
        return
    if any(old.get(name) is not None for name in ("target_epsilon", "target_rho")):
        # With a target, the noise multiplier is no flag of the user's: the message leaves it out.
        old = {**old, "noise_multiplier": None}
    kept = [_as_flag(name, old[name]) for name in differing if old.get(name) is not None]
    extra = [f"--{name}" for name in differing if old.get(name) is None and name in new]
    advice = [f"give {' '.join(kept)}"] if kept else []
    advice += [f"leave out {' '.join(extra)}"] if extra else []
    raise RunDirectoryError(
        f"{directory} holds a run with other flags: to resume it, {' and '.join(advice)}; or "
        "choose another --output_dir."
    )


def _as_flag(name: str, value: object) -> str:
    """Returns a flag and its value as a word of a shell command."""
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no{name}"
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return f"--{name}={shlex.quote(text)}"


def versions() -> dict[str, str]:
    """Returns the versions of the packages that a run depends on, by name."""
    own = {"mf-aggregators": __version__, "python": platform.python_version()}
    return own | {package: importlib.metadata.version(package) for package in _PACKAGES}


def check_alike(directories: Iterable[pathlib.Path], *, with_further_runs: bool = False) -> None:
    """Checks that all runs had the same package versions and the same data.

    What a run has not written yet, or what was deleted since, is not compared.

    Args:
      directories: The directories of the runs.
      with_further_runs: Whether versions must be the present ones as well, which further runs have.

    Raises:
      CommandError: If two of them differ; the message names both and what to do.
    """
    runs = [RunDirectory(path) for path in directories]
    now = {"further runs": versions()} if with_further_runs else {}
    of_data = {str(run.path): _kept(run.data, "fingerprint") for run in runs}
    of_versions = {str(run.path): _kept(run.path / CONFIG_FILE, "versions") for run in runs} | now
    for what, kept in (("versions of packages", of_versions), ("data", of_data)):
        first, *others = [item for item in kept.items() if item[1] is not None] or [("", None)]
        for name, value in others:
            if value != first[1]:
                more, known = "", first[1]
                if isinstance(known, dict) and isinstance(value, dict):
                    more = f" ({_difference(known, value)})"
                raise CommandError(
                    f"{first[0]} and {name} are of different {what}{more}: they cannot be "
                    "compared. Choose another --output_dir, or delete the older runs and results."
                )


def _difference(one: Mapping[str, object], other: Mapping[str, object]) -> str:
    return ", ".join(
        f"{package} {one.get(package)} and {other.get(package)}"
        for package in sorted({*one, *other})
        if one.get(package) != other.get(package)
    )


def _kept(path: pathlib.Path, name: str) -> object:
    """Returns one entry of a JSON file; None if the file is missing or unreadable."""
    try:
        contents = inputs.parsed_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return contents.get(name) if isinstance(contents, dict) else None


def matrix_sha256(checkpoint: pathlib.Path) -> str | None:
    """Returns a fingerprint of a factorization's checkpoint, so that a changed matrix is noticed.

    Args:
      checkpoint: The directory of the checkpoint.

    Returns:
      The SHA-256 of the checkpoint's description, which has the SHA-256 of its arrays, in
      hexadecimal digits; None if there is no description.
    """
    try:
        return hashlib.sha256((checkpoint / "factorization.json").read_bytes()).hexdigest()
    except OSError:
        return None


def _is_at(descriptor: int, path: pathlib.Path) -> bool:
    """Returns whether an open file is still the file at a path."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


@dataclasses.dataclass(frozen=True, eq=False)
class ParticipationLedger:
    """Ledger of who took part: the clients of a population and the cohort of each round so far.

    Attributes:
      client_ids: The population, in the order that cohorts' indices refer to.
      cohorts: For each round, the (clients,) int64 indices of the clients who took part.
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
        """The number of rounds that the ledger records."""
        return len(self.cohorts)

    def with_round(self, cohort: np.ndarray) -> "ParticipationLedger":
        """Returns a copy of the ledger with one more round, in which a cohort took part."""
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
            # The cohort's size is hashed too, so that moving a client to the next round changes the
            # digest.
            digest.update(np.array([len(cohort), *np.sort(cohort)], "<i8").tobytes())
        return digest.hexdigest()

    def rounds_of_clients(self) -> list[np.ndarray]:
        """Returns for each client the increasing rounds, from 0, that it took part in."""
        offsets, rounds = self._by_client()
        return [rounds[offsets[i] : offsets[i + 1]] for i in range(len(self.client_ids))]

    def record(self) -> Ledger:
        """Returns the ledger as a :class:`Ledger`, which guarantees are computed from."""
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
        """Reads a participation ledger from a file that :meth:`save` wrote.

        Raises:
          LedgerError: If the file is missing or broken.
        """
        ledger = ledgers.load(path)
        return cls(ledger.client_ids, ledger.cohorts(), ledger.sampling)

    def _by_client(self) -> tuple[np.ndarray, np.ndarray]:
        sizes = [len(cohort) for cohort in self.cohorts]
        clients = np.concatenate([np.empty(0, np.int64), *self.cohorts])
        rounds = np.repeat(np.arange(self.num_rounds), sizes)
        # A stable sort by client keeps the rounds of each client in order.
        order = np.argsort(clients, kind="stable")
        counts = np.bincount(clients, minlength=len(self.client_ids))
        return np.concatenate([[0], np.cumsum(counts)]), rounds[order]


def check_metrics(path: pathlib.Path) -> None:
    """Checks that metrics.csv, if it exists, begins with the heading of a file of metrics.

    Rows that were cut off are accepted: a killed process leaves them.

    Raises:
      RunDirectoryError: If the file holds something else, or cannot be read.
    """
    try:
        with path.open("rb") as file:
            line = file.readline()
    except FileNotFoundError:
        return
    except OSError as error:
        raise RunDirectoryError(f"{path} cannot be read: {error.strerror}.") from error
    # A loss of power may leave only part of the heading, or zero bytes: accept both.
    is_whole = line.endswith(b"\n") and b"\0" not in line
    first = line.rstrip(b"\r\n\0")
    if not first.startswith(_HEADING) and (is_whole or not _HEADING.startswith(first)):
        raise RunDirectoryError(
            f"{path} is not a file of metrics: its first line does not begin with "
            f"{_HEADING.decode()!r}. Restore it, or delete it."
        )
