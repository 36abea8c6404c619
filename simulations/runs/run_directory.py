"""The directory of a run: where its files are, who may use it, and what else is to be like it."""

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import os
import pathlib
import platform
import shlex
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from mf_aggregators import __version__, atomic_files, inputs
from mf_aggregators.commands import facts_of_runs
from mf_aggregators.commands.command_line import CommandError
from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.numbers import Error
from mf_aggregators.privacy import ledgers
from simulations.training import weights_files

CONFIG_FILE = "config.json"
METRICS_FILE = "metrics.csv"
LEDGER_FILE = ledgers.FILE_OF_RUN
PRIVACY_FILE = "privacy.json"
STATEMENT_FILE = "PRIVACY.md"
FIGURE_FILE = "training.png"
# The entry of config.json that has the day on which a run began.
BEGUN = "begun"
STATES_DIRECTORY = "checkpoints"
# A state is named after its round.
STATE_PREFIX = "round_"
NOISE_DIRECTORY = "noise"
# The releases of an audited run along the directions of canaries, by round.
AUDIT_DIRECTORY = "audit"
FACTORIZATION_DIRECTORY = "factorization"
# The factorization of a larger horizon, until it takes the place of the one above.
EXTENDED_DIRECTORY = "factorization.extended"
TENSORBOARD_DIRECTORY = "tensorboard"
SAMPLING_SEED_FILE = "sampling_seed.json"
DATA_FILE = "dataset.json"
LOCK_FILE = "run.lock"
# The entry of config.json that has the horizons before, of a run that was extended.
EXTENDS = "extends"
# The entry of config.json that has the flags that were changed: each time, the values before, and
# the rounds that were released with them.
CHANGED = "changed_flags"

# How often to try to lock a directory that other processes make and remove in the meantime.
_ATTEMPTS_TO_LOCK = 100
_SECONDS_BETWEEN_ATTEMPTS = 0.002

# Files that atomic_files writes; a killed process may leave parts of them.
_WHOLE_FILES = (
    CONFIG_FILE,
    METRICS_FILE,
    LEDGER_FILE,
    PRIVACY_FILE,
    STATEMENT_FILE,
    FIGURE_FILE,
    weights_files.FINAL_MODEL_FILE,
    f"{STATES_DIRECTORY}/{DATA_FILE}",
    f"{STATES_DIRECTORY}/{SAMPLING_SEED_FILE}",
)


# The packages that a run depends on.
_PACKAGES = (
    "tensorflow-federated",
    "tensorflow",
    "tensorflow-privacy",
    "dp-accounting",
    "numpy",
)


class RunDirectoryError(Error, ValueError):
    """A directory that a run cannot use; the message has the reason and a remedy."""


class RunDirectory:
    """Paths and files of one run."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Names the files; nothing is read or written yet."""
        self.path = pathlib.Path(path)
        self.ledger = self.path / LEDGER_FILE
        # All weights of the model, once the run has ended.
        self.final_model = self.path / weights_files.FINAL_MODEL_FILE
        # TensorBoard's event files.
        self.tensorboard = self.path / TENSORBOARD_DIRECTORY
        # States that a run resumes from. They are secret, as are the seed of a data sampler and the
        # fingerprint of the data among them.
        self.states = self.path / STATES_DIRECTORY
        self.sampling_seed = self.states / SAMPLING_SEED_FILE
        self.data = self.states / DATA_FILE
        # Rows of noise, unless another place is chosen: a cache, as secret as the states.
        self.noise = self.path / NOISE_DIRECTORY
        self.audit = self.path / AUDIT_DIRECTORY
        # The checkpoint of the factorization; that of a larger horizon, until it counts.
        self.factorization = self.path / FACTORIZATION_DIRECTORY
        self.extended_factorization = self.path / EXTENDED_DIRECTORY

    def settle_factorization(self, config: Mapping[str, Any]) -> None:
        """Puts the checkpoint of a larger horizon into its place, once the configuration names it.

        A process that was killed may have left it at any step of that. A checkpoint that the
        configuration does not name is a remnant of an extension that never began to count.

        Raises:
          OSError: If it cannot be moved.
        """
        extended, named = self.extended_factorization, config.get("factorization_sha256")
        for unfinished in self.path.glob(f".{EXTENDED_DIRECTORY}.*"):
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
        """Keeps the fingerprint of a new run's data, or compares it with the kept one.

        It is no part of the configuration, which may be shown: whoever has two candidates for the
        data could tell from it which one was used.

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
            kept = inputs.parsed_json(self.data.read_text(encoding="utf-8"))["fingerprint"]
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

    def day_of_beginning(self) -> str | None:
        """Returns the day on which the run began, if its configuration says it and can be read."""
        with contextlib.suppress(RunDirectoryError):
            day = (self.read_config() or {}).get(BEGUN)
            return day if isinstance(day, str) else None
        return None

    def has_begun(self) -> bool:
        """Returns whether there are results or a statement, which follow the first state."""
        return self.has_metrics() or (self.path / PRIVACY_FILE).exists()

    def has_states(self) -> bool:
        """Returns whether any state of a round is there, whole or damaged."""
        return any(self.states.glob(f"{STATE_PREFIX}*"))

    def delete_noise_rows(self) -> None:
        """Deletes the rows of noise in the run's own directory, once it needs them no more."""
        for rows in self.noise.glob("rows-*"):
            shutil.rmtree(rows, ignore_errors=True)

    def discard(self) -> None:
        """Deletes the files of a new run without a state, so that another may begin here.

        A run with a state, a ledger or results stays as it is.
        """
        if self.has_states() or self.ledger.exists() or self.has_begun():
            return
        with contextlib.suppress(OSError):
            for kept in (self.factorization, self.states, self.noise):
                shutil.rmtree(kept, ignore_errors=True)
            # This file is deleted last: without it, the directory no longer belongs to a run.
            (self.path / CONFIG_FILE).unlink(missing_ok=True)

    def has_metrics(self) -> bool:
        """Returns whether the metrics of any round were written."""
        path = self.path / METRICS_FILE
        return path.exists() and len(path.read_bytes().splitlines()) > 1

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
                # The holder of the lock before has removed its file since we opened it.
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
        except (OSError, ValueError) as error:
            raise RunDirectoryError(
                f"{config_path} cannot be read: {error}. Restore it, or choose another "
                "--output_dir."
            ) from error
        return config

    def _is_empty(self) -> bool:
        """Whether the directory has no files but those of a new run without a configuration."""
        unfinished = f".{CONFIG_FILE}."
        return self.path.is_dir() and all(
            entry.name == LOCK_FILE or entry.name.startswith(unfinished)
            for entry in self.path.iterdir()
        )

    def create(self, config: Mapping[str, Any], only_for_owner: bool = False) -> None:
        """Creates the directory of a new run.

        Args:
          config: Its configuration, JSON-able.
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

    def write_json(self, name: str, contents: Mapping[str, Any]) -> None:
        """Writes a JSON file, whole or not at all."""
        text = json.dumps(contents, indent=2, allow_nan=False) + "\n"
        atomic_files.write_text(self.path / name, text)


def _check_config(config: Any) -> None:
    """Raises ValueError unless a configuration has the form of one, as far as it goes."""
    if not isinstance(config, dict):
        raise ValueError("it is no JSON object")
    for name in ("flags", "versions"):
        if not isinstance(config.get(name, {}), dict):
            raise ValueError(f"its {name} are no JSON object")
    changes = config.get(CHANGED, [])
    if not isinstance(changes, list) or not all(isinstance(each, dict) for each in changes):
        raise ValueError(f"its {CHANGED} are no list of JSON objects")
    for change in changes:
        numbers.integer_at_least(change.get("released_rounds"), 0, "released_rounds")
        if not isinstance(change.get("flags"), dict):
            raise ValueError(f"an entry of its {CHANGED} has no flags")


def check_same_flags(
    old: Mapping[str, Any], new: Mapping[str, Any], directory: pathlib.Path
) -> None:
    """Refuses to go on with a run under other flags than it began with.

    Raises:
      RunDirectoryError: If any flag differs: noise, data or participation rules would change in
        the middle of one guarantee.
    """
    differing = sorted(name for name in {*old, *new} if old.get(name) != new.get(name))
    if not differing:
        return
    if any(old.get(name) is not None for name in ("target_epsilon", "target_rho")):
        # It follows from the target then.
        old = {**old, "noise_multiplier": None}
    kept = [_as_flag(name, old[name]) for name in differing if old.get(name) is not None]
    extra = [f"--{name}" for name in differing if old.get(name) is None and name in new]
    advice = [f"give {' '.join(kept)}"] if kept else []
    advice += [f"leave out {' '.join(extra)}"] if extra else []
    raise RunDirectoryError(
        f"{directory} holds a run with other flags: to resume it, {' and '.join(advice)}; or "
        "choose another --output_dir."
    )


def _as_flag(name: str, value: Any) -> str:
    """A flag as a shell takes it."""
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no{name}"
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return f"--{name}={shlex.quote(text)}"


def beginning(initial_weights: str | None) -> dict[str, str]:
    """Returns the entry of ``config.json`` for the weights that training begins with, if any.

    Args:
      initial_weights: The file; None for random weights.
    """
    if initial_weights is None:
        return {}
    return {facts_of_runs.INITIAL_WEIGHTS: weights_files.sha256(initial_weights)}


def versions() -> dict[str, str]:
    """Returns the versions of the packages that a run depends on, by name."""
    found = {"mf-aggregators": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def check_alike(directories: Iterable[pathlib.Path], *, with_further_runs: bool = False) -> None:
    """Checks that runs had the same versions of packages and the same data.

    What a run has not written yet, or what was deleted since, is not compared.

    Args:
      directories: Those of the runs.
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
                more = f" ({_difference(first[1], value)})" if isinstance(value, dict) else ""
                raise CommandError(
                    f"{first[0]} and {name} are of different {what}{more}: they cannot be "
                    "compared. Choose another --output_dir, or delete the older runs and results."
                )


def _difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{package} {one.get(package)} and {other.get(package)}"
        for package in sorted({*one, *other})
        if one.get(package) != other.get(package)
    )


def _kept(path: pathlib.Path, name: str) -> Any:
    """An entry of a JSON file; None if the file is not there or not readable."""
    try:
        contents = inputs.parsed_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return contents.get(name) if isinstance(contents, dict) else None


def matrix_sha256(checkpoint: pathlib.Path) -> str | None:
    """Returns a fingerprint of a checkpoint: that of its description, which has that of its arrays.

    Args:
      checkpoint: Its directory.

    Returns:
      The SHA-256 of the description, in hexadecimal digits; None if it is not there.
    """
    try:
        return hashlib.sha256((checkpoint / "factorization.json").read_bytes()).hexdigest()
    except OSError:
        return None


def _is_at(descriptor: int, path: pathlib.Path) -> bool:
    """Whether an open file is still the one of a name."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
