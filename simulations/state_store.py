"""The states and the ledger of a run on disk, and which of them a run can go on from."""

import asyncio
import dataclasses
import logging
import os
import pathlib
import shutil
from typing import Any

import tensorflow_federated as tff

from simulations import atomic_files
from simulations.participation_ledger import LedgerError, ParticipationLedger

_LOGGER = logging.getLogger(__name__)

# The newest states that are kept: one more than needed, should the newest be damaged.
_STATES_KEPT = 2
_STATE_PREFIX = "round_"


@dataclasses.dataclass(frozen=True)
class Progress:
    """Where a run stands.

    Attributes:
      state: The process's state.
      num_rounds: The rounds that it comes after.
      ledger: Of these rounds, and of any later ones that were released before the run
        went back to this state.
    """

    state: Any
    num_rounds: int
    ledger: ParticipationLedger


class StateStore:
    """States and ledger of a run on disk: TFF's program-state manager and one ledger file."""

    def __init__(
        self, directory: str | os.PathLike[str], ledger_path: str | os.PathLike[str]
    ) -> None:
        """Creates the store.

        Args:
          directory: Where states go; created if missing.
          ledger_path: The ledger's file.
        """
        self._directory = pathlib.Path(directory)
        # The states hold the seed of the noise: whoever reads it can subtract the noise.
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._manager = tff.program.FileProgramStateManager(
            root_dir=os.fspath(directory),
            prefix=_STATE_PREFIX,
            keep_total=_STATES_KEPT,
            keep_first=False,
        )
        self._ledger_path = pathlib.Path(ledger_path)

    def save(self, progress: Progress) -> None:
        """Saves where a run stands, the ledger first."""
        progress.ledger.save(self._ledger_path)
        asyncio.run(self._manager.save(progress.state, progress.num_rounds))
        # After a loss of power, a ledger without its states would have to be given up.
        saved = self._directory / f"{_STATE_PREFIX}{progress.num_rounds}"
        for path in (*saved.rglob("*"), saved, self._directory):
            atomic_files.synchronise(path)

    def load(self, initial_state: Any, client_ids: tuple[str, ...]) -> Progress | None:
        """Returns the newest state and the whole ledger, or None for a new run.

        Args:
          initial_state: A state of the same structure.
          client_ids: The population.

        Returns:
          Where the run stands. The ledger may have more rounds than the state.

        Raises:
          LedgerError: If no state can be read though rounds were released, or the
            ledger is broken, shorter than the state, or of another population: who took
            part cannot be known, and no further round is safe.
        """
        # What a process that was killed while it saved has left behind holds the noise's seed too.
        for unfinished in self._directory.glob(f"{_STATE_PREFIX}*_temp*"):
            shutil.rmtree(unfinished)
        versions = asyncio.run(self._manager.get_versions()) or []
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
        if ledger.client_ids != client_ids or ledger.num_rounds < version:
            raise LedgerError(
                f"{self._ledger_path} does not belong to the saved state: the run cannot go on "
                "without breaking its participation schema. Start a new run."
            )
        return Progress(state, version, ledger)

    def _newest_readable(self, versions: list[int], initial_state: Any) -> tuple[Any, int]:
        """The newest state that can be read; damaged newer ones are removed.

        The rounds after it are run again as they were: same cohorts, data and noise.
        """
        damaged: list[pathlib.Path] = []
        for version in reversed(versions):
            try:
                state = asyncio.run(self._manager.load(version, initial_state))
            except Exception:
                # TFF and TensorFlow raise many types for a damaged state.
                damaged.append(self._directory / f"{_STATE_PREFIX}{version}")
                continue
            for path in damaged:
                _LOGGER.warning("%s is damaged; going on from round %d.", path, version)
                shutil.rmtree(path)
            return state, version
        raise LedgerError(
            f"no state in {self._directory} can be read: the run cannot go on. Restore the states "
            "from a copy, or start a new run and account for both."
        )
