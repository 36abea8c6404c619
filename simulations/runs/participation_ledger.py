"""The ledger of a run: who took part in which round, as it really happened."""

import dataclasses
import hashlib
import io
import json
import os

import numpy as np

from mf_aggregators import atomic_files
from mf_aggregators.participation import SamplingScheme
from mf_aggregators.privacy import client_names, ledgers
from mf_aggregators.privacy.ledgers import LedgerError


@dataclasses.dataclass(frozen=True, eq=False)
class ParticipationLedger:
    """The clients of a population and the cohort of every round so far.

    Attributes:
      client_ids: The population, in the order that cohorts' indices refer to.
      cohorts: For each round, the (clients,) int64 indices of its clients.
      sampling: The scheme by which a data sampler drew the cohorts; None for cohorts of
        clients whose timers allowed it. Of a sampled run, whoever reads the cohorts sees
        no sampling, and no amplification holds towards them.

    Raises:
      LedgerError: If a client's id is none that a ledger keeps (``client_names.check``), or two
        clients have one: participations of one of them would not count as those of the other.
    """

    client_ids: tuple[str, ...]
    cohorts: tuple[np.ndarray, ...] = ()
    sampling: SamplingScheme | None = None

    def __post_init__(self) -> None:
        try:
            client_names.check(self.client_ids)
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

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the ledger as an ``.npz`` file, whole or not at all.

        The file holds ``client_ids``, and for client i its rounds, from 0, as
        ``rounds[offsets[i]:offsets[i + 1]]``; ``num_rounds`` is the number of rounds. Where
        a data sampler drew the cohorts, ``sampling`` is its scheme as JSON.

        Args:
          path: The file.

        Raises:
          OSError: If it cannot be written.
        """
        offsets, rounds = self._by_client()
        arrays = {
            "client_ids": np.array(self.client_ids, dtype=np.str_),
            "offsets": offsets,
            "rounds": rounds,
            "num_rounds": np.array(self.num_rounds),
        }
        if self.sampling is not None:
            arrays["sampling"] = np.array(json.dumps(self.sampling.to_dict()))
        # In memory first: an archive that a full disk has cut off would print a traceback of its
        # own when it is collected.
        archive = io.BytesIO()
        np.savez_compressed(archive, **arrays)
        atomic_files.write_bytes(path, archive.getbuffer())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "ParticipationLedger":
        """Reads what :meth:`save` wrote.

        Args:
          path: The file.

        Returns:
          The ledger.

        Raises:
          LedgerError: If the file is missing or broken.
        """
        ledger = ledgers.load_archive(path)
        return cls(ledger.client_ids, ledger.cohorts(), ledger.sampling)

    def _by_client(self) -> tuple[np.ndarray, np.ndarray]:
        sizes = [len(cohort) for cohort in self.cohorts]
        clients = np.concatenate([np.empty(0, np.int64), *self.cohorts])
        rounds = np.repeat(np.arange(self.num_rounds), sizes)
        order = np.lexsort((rounds, clients))
        counts = np.bincount(clients, minlength=len(self.client_ids))
        return np.concatenate([[0], np.cumsum(counts)]), rounds[order]
