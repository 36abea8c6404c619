"""The states and the ledger of a run on disk, and which of them a run can go on from.

A state takes its name only once it is complete, has checksums of all its files, and is on the disk
itself; only then are older ones removed. So, whatever ends a process, every state with a name is
whole, or was altered afterwards. A run never goes on from an altered one: a noise seed with one
wrong bit would put other noise on rounds that were released already.
"""

import asyncio
import dataclasses
import logging
import os
import pathlib
import re
import shutil
from typing import Any

import tensorflow as tf
import tensorflow_federated as tff

from mf_aggregators import atomic_files
from mf_aggregators.kernel.numbers import Error
from mf_aggregators.noise import noise_directory
from mf_aggregators.privacy.ledgers import LedgerError
from simulations.runs.round_records import ParticipationLedger
from simulations.runs.run_directory import STATE_PREFIX
from simulations.training import weights_files

_LOGGER = logging.getLogger(__name__)

# The newest states that are kept: one more than needed, should the newest be damaged.
_STATES_KEPT = 2
_STATE_NAME = re.compile(rf"{STATE_PREFIX}(0|[1-9][0-9]*)")
# The folder of a state until it is complete. Its files hold the noise's seed as well.
_UNFINISHED = "unfinished"
# In each state: the digest of the ledger of its rounds.
_LEDGER_DIGEST_FILE = "ledger.sha256"
CHECKSUM_FILE = "SHA256SUMS"


class StateNotSavedError(Error, OSError):
    """A state that could not be written; the message has the reason, the remains and a remedy.

    The round that led to it was shown to nobody. Run again from the newest saved state, it
    has the same cohort, data and noise.
    """


class DamagedDirectoryError(Error, ValueError):
    """A directory that is not as it was written; the message names the file and the reason."""


@dataclasses.dataclass(frozen=True)
class Progress:
    """Where a run stands.

    Attributes:
      state: The process's state.
      num_rounds: The rounds that it comes after.
      ledger: The ledger of these rounds, and of any later ones that were released before the
        run went back to this state.
    """

    state: Any
    num_rounds: int
    ledger: ParticipationLedger


class StateStore:
    """States and ledger of a run on disk: TFF's program-state manager and one ledger file."""

    def __init__(
        self, directory: str | os.PathLike[str], ledger_path: str | os.PathLike[str]
    ) -> None:
        """Creates the store, and the directory of states if it is missing.

        Raises:
          ValueError: If the directory is open to others: the states hold the seed of the noise.
          OSError: If it cannot be made.
        """
        self._directory = pathlib.Path(directory)
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        noise_directory.check_private(self._directory, "the directory of states")
        atomic_files.synchronise(self._directory.parent)
        self._ledger_path = pathlib.Path(ledger_path)

    def save(self, progress: Progress) -> None:
        """Saves where a run stands, the ledger first.

        The two newest states stay; they and the new one need room at the same time.

        Raises:
          StateNotSavedError: If the disk is full or refuses something else. States that were saved
            before are as they were, and nothing is left of the new one.
        """
        try:
            progress.ledger.save(self._ledger_path)
            rounds = progress.ledger.first_rounds(progress.num_rounds)
            self._save_state(progress.state, progress.num_rounds, rounds.digest())
        except (OSError, tf.errors.OpError) as error:
            raise StateNotSavedError(self._refusal(progress.num_rounds, error)) from error
        finally:
            shutil.rmtree(self._directory / _UNFINISHED, ignore_errors=True)
        # A state that cannot be removed now is removed after the next round.
        for version in self._versions()[:-_STATES_KEPT]:
            shutil.rmtree(self._path(version), ignore_errors=True)

    def _save_state(self, state: Any, version: int, ledger_digest: str) -> None:
        unfinished = self._directory / _UNFINISHED
        unfinished.mkdir(mode=0o700, exist_ok=True)
        asyncio.run(_manager(unfinished).save(state, version))
        written = unfinished / f"{STATE_PREFIX}{version}"
        (written / _LEDGER_DIGEST_FILE).write_text(ledger_digest + "\n", encoding="ascii")
        # On disk before it takes its name: a loss of power must not leave a name without contents.
        seal(written, _title(version))
        written.rename(self._path(version))
        atomic_files.synchronise(self._directory)

    def _refusal(self, version: int, error: Exception) -> str:
        """One line about a state that was not saved."""
        what = f"round {version}" if version else "the state before the first round"
        versions = self._versions()
        left = f"round {versions[-1]}'s" if versions else "none"
        return (
            f"{what} could not be saved in {self._directory}: {_first_line(error)}. The newest "
            f"state that is saved is {left}. Remove the cause (free space if the disk is full), "
            "and run the same command again: it goes on as if nothing had happened."
        )

    def load(self, initial_state: Any, client_ids: tuple[str, ...]) -> Progress | None:
        """Returns the newest state and the whole ledger, or None for a new run.

        A damaged state is removed, with a warning, once an older one could be read.

        Args:
          initial_state: A state of the same structure.
          client_ids: The population.

        Returns:
          Where the run stands. The ledger may have more rounds than the state.

        Raises:
          LedgerError: If no state can be read though rounds were released, or the ledger is broken,
            or not the one that was saved with the state (it may only have more rounds): who took
            part cannot be known, and no further round is safe.
        """
        self._remove_unfinished()
        versions = self._versions()
        if not versions and not self._ledger_path.exists():
            return None
        ledger = ParticipationLedger.load(self._ledger_path)
        if not versions:
            # Nothing was released if no round is in the ledger: the process ended between
            # the two files. Otherwise fresh noise on the same clients would be a second
            # release that no ledger knows of.
            if ledger.num_rounds == 0:
                return None
            raise LedgerError(
                f"{self._directory} holds no state, and {self._ledger_path} records "
                f"{ledger.num_rounds} released rounds: without their noise the run cannot go on. "
                "Restore the states, or start a new run and account for both."
            )
        state, version = self._newest_readable(versions, initial_state)
        if (
            ledger.client_ids != client_ids
            or ledger.num_rounds < version
            or ledger.first_rounds(version).digest() != self._ledger_digest(version)
        ):
            raise LedgerError(
                f"{self._ledger_path} does not belong to the saved state: the run cannot go on "
                "without breaking its participation schema. Restore the ledger from a copy, or "
                "start a new run and account for both."
            )
        return Progress(state, version, ledger)

    def _newest_readable(self, versions: list[int], initial_state: Any) -> tuple[Any, int]:
        """The newest state that can be read; damaged newer ones are removed.

        The rounds after it are run again as they were: same cohorts, data and noise.
        """
        damaged: dict[int, str] = {}
        for version in reversed(versions):
            try:
                state = self._read(version, initial_state)
            except DamagedDirectoryError as error:
                damaged[version] = str(error)
                continue
            for newer, reason in damaged.items():
                _LOGGER.warning(
                    "%s is damaged; going on from round %d. (%s.)",
                    self._path(newer),
                    version,
                    reason,
                )
                self._remove_damaged(newer)
            return state, version
        raise LedgerError(
            f"no state in {self._directory} can be read ({'; '.join(damaged.values())}): restore "
            "the states from a copy, or start a new run and account for both."
        )

    def _read(self, version: int, initial_state: Any) -> Any:
        # TFF finds no fault with most altered bytes, those of the seed and the model among them.
        check_seal(self._path(version), _title(version))
        manager = _manager(self._directory)
        try:
            return asyncio.run(manager.load(version, initial_state))
        except Exception as error:
            # TFF and TensorFlow raise many types, and some messages hold the state with its seed.
            reason = type(error).__name__
        raise DamagedDirectoryError(f"{self._path(version)} cannot be loaded: {reason}")

    def _ledger_digest(self, version: int) -> str | None:
        """The ledger digest of a state with right checksums; None if it has no digest."""
        path = self._path(version) / _LEDGER_DIGEST_FILE
        return path.read_text(encoding="ascii").strip() if path.exists() else None

    def _remove_damaged(self, version: int) -> None:
        path = self._path(version)
        try:
            if path.is_dir() and not path.is_symlink():
                # A directory that cannot be read cannot be emptied either.
                path.chmod(0o700)
                for directory, names, _ in os.walk(path):
                    for name in names:
                        os.chmod(os.path.join(directory, name), 0o700)
                shutil.rmtree(path)
            else:
                path.unlink()
        except OSError as error:
            raise LedgerError(
                f"{path} is damaged and cannot be removed: {error.strerror}. Remove it, and run "
                "the same command again."
            ) from error

    def _remove_unfinished(self) -> None:
        """Removes the unfinished files of a process that was killed while it saved."""
        shutil.rmtree(self._directory / _UNFINISHED, ignore_errors=True)
        # TFF itself put unfinished states of older runs here.
        for unfinished in self._directory.glob(f"{STATE_PREFIX}*_temp*"):
            shutil.rmtree(unfinished, ignore_errors=True)
        atomic_files.remove_unfinished(self._ledger_path)

    def _versions(self) -> list[int]:
        paths = self._directory.glob(f"{STATE_PREFIX}*")
        matches = (_STATE_NAME.fullmatch(path.name) for path in paths)
        return sorted(int(match[1]) for match in matches if match is not None)

    def _path(self, version: int) -> pathlib.Path:
        return self._directory / f"{STATE_PREFIX}{version}"


def _manager(directory: pathlib.Path) -> tff.program.FileProgramStateManager:
    # It would remove old states before the new one is on disk.
    return tff.program.FileProgramStateManager(
        root_dir=os.fspath(directory), prefix=STATE_PREFIX, keep_total=0
    )


def _title(version: int) -> str:
    # A state that was renamed or copied is that of another round.
    return f"state after round {version}"


def _first_line(error: Exception) -> str:
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(text).splitlines()[0]


def seal(directory: str | os.PathLike[str], title: str) -> None:
    """Writes the checksums of a directory's files into it, and waits until all are on disk.

    The file has the format of ``sha256sum``, after a comment with the title, one line that says
    what the directory is and counts as a part of the contents.

    Raises:
      OSError: If a file cannot be read or the disk refuses one.
    """
    directory = pathlib.Path(directory)
    atomic_files.write_text(directory / CHECKSUM_FILE, _checksums(directory, title))
    for path in (*directory.rglob("*"), directory):
        atomic_files.synchronise(path)


def check_seal(directory: str | os.PathLike[str], title: str) -> None:
    """Compares a directory with the checksums of :func:`seal` for a title, byte by byte.

    Raises:
      DamagedDirectoryError: If a file was altered, is missing, cannot be read or came
        afterwards, or the directory was sealed as another one or never.
    """
    directory = pathlib.Path(directory)
    try:
        stated = (directory / CHECKSUM_FILE).read_bytes()
        found = _checksums(directory, title)
    except OSError as error:
        path = pathlib.Path(error.filename or directory)
        raise DamagedDirectoryError(f"{path} cannot be read: {error.strerror}") from error
    # The whole text is compared, so that no altered byte of the checksums is overlooked either.
    different = set(stated.splitlines()) ^ set(found.encode("utf-8").splitlines())
    if stated != found.encode("utf-8"):
        names = sorted(line.decode("utf-8", "replace").rpartition(" ")[2] for line in different)
        raise DamagedDirectoryError(
            f"{directory / CHECKSUM_FILE} does not match: {', '.join(names)}"
        )


def _checksums(directory: pathlib.Path, title: str) -> str:
    files = sorted(
        path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()
    )
    lines = [
        f"{weights_files.file_sha256(directory / name)}  {name}\n"
        for name in files
        if name != CHECKSUM_FILE
    ]
    return "".join([f"# {title}\n", *lines])
