"""Data source and release manager for ``tff.learning.programs.train_model`` with private processes.

That program saves the state of a process with the iterator that draws its clients, and neither
keeps participations nor a record of who was drawn. :class:`CohortDataSource` draws cohorts whose
timers allow it and keeps the ledger. Each round is written there before its clients' data are
handed out, and a round that is in the ledger is run again with the clients that stand there,
whatever state of the run the program goes on from: the same noise meets the same sum.

Noise follows from the first state of a run. Every run draws a number of its own, which is saved
with each of its states and stands beside the ledger from the first round on. So a state of
another run, with other noise, cannot go on with rounds of this one, not even the first state that
a program saves before it has asked for a client.

The program also hands the whole state of the process to its ``model_output_manager``, in which
the secret seed of the noise stands. :class:`ModelReleaseManager` passes on the model and nothing
else.
"""

import json
import os
import pathlib
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow_federated as tff

from mf_aggregators import atomic_files, inputs
from mf_aggregators.participation import Participation
from mf_aggregators.privacy import guarantees
from mf_aggregators.privacy.ledgers import LedgerError
from mf_aggregators.tff import client_sums, compatibility, declared_participation
from simulations.devices.device_populations import DevicePopulation
from simulations.runs import training_loop
from simulations.runs.round_records import ParticipationLedger

_WHAT_TO_DO = (
    "Restore the program state and the ledger that belong together, or start a new run, with "
    "another ledger, and account for both."
)


class CohortDataSource(compatibility.FederatedDataSource):
    """Draws the clients of each round by timers, and remembers them in a ledger.

    Only one program may use a ledger at a time.
    """

    def __init__(
        self,
        process: tff.learning.templates.LearningProcess,
        initial_state: Any,
        *,
        client_ids: Sequence[str],
        client_dataset: Callable[[str, int], Any],
        participation: Participation,
        num_rounds: int,
        clients_per_round: int,
        seed: int,
        ledger_path: str | os.PathLike[str],
    ) -> None:
        """Creates the source of a new run, or of one that is resumed.

        Args:
          process: The process that will be trained.
          initial_state: A first state of it, to check that its noise is scaled to what the timers
            allow: what the program gets as its ``initial_train_state``.
          client_ids: The population: texts, each another one, in the same order whenever the run
            is resumed.
          client_dataset: From a client's id and a round, from 0, to its data set in that round; a
            function of the two alone.
          participation: The schema that the timers enforce.
          num_rounds: The rounds of the whole run.
          clients_per_round: The cohort size.
          seed: Seed for drawing the cohorts: any integer from 0.
          ledger_path: The ledger's file, which ``mf-report --ledger`` reads. It is made with the
            first round. The number of its run is in a file of the same name with ``.run`` behind.

        Raises:
          LedgerError: If the ledger is broken, or of another population, or a client's id is none
            that a ledger keeps (``client_names.check``).
          UnnoisedSumError: If the process releases a second update without noise.
          ValueError: If a number is out of its range, or the timers allow participations that
            the noise of the process is not scaled to.
        """
        client_sums.check_others(process.next)
        training_loop.check_participation(initial_state, participation, num_rounds)
        self._noise = [each.to_dict() for each in declared_participation.in_state(initial_state)]
        self._federated_type = process.next.type_signature.parameter[1]
        self._client_dataset = client_dataset
        self._clients_per_round = clients_per_round
        self._num_rounds = num_rounds
        self._new_population = lambda: DevicePopulation(
            len(client_ids), participation, clients_per_round, seed=seed
        )
        self._population = self._new_population()
        self._path = pathlib.Path(ledger_path)
        self._run_path = self._path.with_name(f"{self._path.name}.run")
        self._ledger = ParticipationLedger(tuple(client_ids))
        if self._path.exists():
            self._ledger = ParticipationLedger.load(self._path)
            if self._ledger.client_ids != tuple(client_ids):
                raise LedgerError(
                    f"{self._path} is the ledger of another population: name the clients of the "
                    "run, in their order, or another ledger."
                )
            observed = guarantees.observed_participation(
                self._ledger.rounds_of_clients(), self._ledger.num_rounds
            )
            if not guarantees.keeps_plan(participation, observed):
                raise LedgerError(
                    f"{self._path} has participations that the timers do not allow: it is the "
                    "ledger of another run. Use the participation of its first round, or another "
                    "ledger."
                )

        class Iterator(_CohortIterator):
            """The iterator of this source: TFF makes one from bytes, and knows its class alone."""

            source = self

        self._iterator = Iterator

    @property
    def federated_type(self) -> Any:
        """The type of the clients' data."""
        return self._federated_type

    @property
    def ledger(self) -> ParticipationLedger:
        """The ledger of all rounds with data that were handed out."""
        return self._ledger

    def iterator(self) -> Any:
        """Returns the iterator of a run that begins."""
        return self._iterator(0, secrets.token_hex(16))

    def resumed(self, buffer: bytes) -> Any:
        """Returns the iterator of a saved state, the bytes of its ``to_bytes``.

        Raises:
          LedgerError: If the state is damaged, or the ledger is not the one that was there when it
            was saved.
        """
        try:
            saved = inputs.parsed_json(bytes(buffer))
            position, run = int(saved["num_rounds"]), str(saved["run"])
            digest, noise = saved["ledger"], saved["noise"]
        except (KeyError, TypeError, ValueError) as error:
            raise LedgerError(f"the program state is damaged ({error!r}): {_WHAT_TO_DO}") from error
        rounds = self._ledger.first_rounds(position)
        if rounds.num_rounds != position or rounds.digest() != digest:
            raise LedgerError(
                f"{self._path} is not the ledger of the program state after round {position}: "
                f"nobody would know who took part. {_WHAT_TO_DO}"
            )
        if noise != self._noise:
            raise LedgerError(
                "the noise of the saved rounds was scaled to another participation schema than "
                "that of later rounds would be: no guarantee covers both. Build the process as it "
                "was, or start a new run and account for both."
            )
        self._check_run(run)
        self._population = self._new_population()
        return self._iterator(position, run)

    def saved(self, position: int, run: str) -> bytes:
        """Returns the bytes for :meth:`resumed`, after a number of rounds of a run."""
        digest = self._ledger.first_rounds(position).digest()
        contents = {"num_rounds": position, "ledger": digest, "noise": self._noise, "run": run}
        return json.dumps(contents).encode()

    def _check_run(self, run: str) -> None:
        """Raises LedgerError if the ledger has rounds of another run than that of a state."""
        if not self._ledger.num_rounds:
            return
        try:
            of_ledger = self._run_path.read_text(encoding="ascii").strip()
        except OSError as error:
            raise LedgerError(
                f"{self._run_path} cannot be read ({error.strerror}), and without it nobody knows "
                f"which noise the rounds of {self._path} have. {_WHAT_TO_DO}"
            ) from error
        if run != of_ledger:
            raise LedgerError(
                f"{self._path} has {self._ledger.num_rounds} rounds that were released, and the "
                "program has no state of them: other noise on the same clients would be a second "
                f"release. {_WHAT_TO_DO}"
            )

    def select(self, position: int, number: int | None, run: str) -> list[Any]:
        """Returns the data of a round's clients, once the ledger has them.

        Args:
          position: The round, from 0.
          number: How many clients.
          run: The number of the run.
        """
        if number != self._clients_per_round:
            raise ValueError(
                f"the aggregate is divided by {self._clients_per_round} clients a round, and "
                f"{number} were asked for: give the program and this source the same number."
            )
        if position >= self._num_rounds:
            raise ValueError(
                f"the run was planned for {self._num_rounds} rounds, and there is no noise for "
                "more: end the program there."
            )
        if position < self._population.num_rounds:
            raise ValueError(
                f"round {position + 1} was run already: run again with the same clients it "
                "releases the same, and with others it would reveal their difference. Leave out "
                "should_discard_round."
            )
        self._check_run(run)
        while self._population.num_rounds < min(position, self._ledger.num_rounds):
            self._population.follow(self._ledger.cohorts[self._population.num_rounds])
        if position < self._ledger.num_rounds:
            self._population.follow(self._ledger.cohorts[position])
        else:
            cohort = self._population.next_round().cohort
            # The ledger is on disk before a client's data are handed out.
            if not self._ledger.num_rounds:
                atomic_files.write_bytes(self._run_path, run.encode("ascii"))
            ledger = self._ledger.with_round(cohort)
            ledger.save(self._path)
            self._ledger = ledger
        cohort = self._ledger.cohorts[position]
        return [self._client_dataset(self._ledger.client_ids[each], position) for each in cohort]


class _CohortIterator(compatibility.FederatedDataSourceIterator):
    """Where a program stands in the rounds of a source."""

    source: CohortDataSource

    def __init__(self, position: int, run: str) -> None:
        self._position = position
        self._run = run

    @classmethod
    def from_bytes(cls, buffer: bytes) -> "_CohortIterator":
        """Returns the iterator of a saved state; see ``CohortDataSource.resumed``."""
        iterator: _CohortIterator = cls.source.resumed(buffer)
        return iterator

    def to_bytes(self) -> bytes:
        """Returns the bytes of the iterator for ``from_bytes``."""
        return self.source.saved(self._position, self._run)

    @property
    def federated_type(self) -> Any:
        """The type of the clients' data."""
        return self.source.federated_type

    def select(self, k: int | None = None) -> list[Any]:
        """Returns the data of the next round's clients; see ``CohortDataSource.select``."""
        data = self.source.select(self._position, k, self._run)
        self._position += 1
        return data

    def __deepcopy__(self, memo: Any) -> "_CohortIterator":
        # The source has the one ledger that there is.
        return type(self)(self._position, self._run)


class ModelReleaseManager(compatibility.ReleaseManager):
    """Passes on the model of a state, and not the state, which has the seed of the noise."""

    def __init__(
        self, process: tff.learning.templates.LearningProcess, release_manager: Any
    ) -> None:
        """Creates the manager.

        Args:
          process: Whose states are released.
          release_manager: The ``ReleaseManager`` that gets the model's weights.
        """
        self._process = process
        self._release_manager = release_manager

    async def release(self, value: Any, key: Any) -> None:
        """Releases the model weights of a state; see the base class."""
        await self._release_manager.release(self._process.get_model_weights(value), key)
