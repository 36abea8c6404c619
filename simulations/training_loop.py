"""The rounds of a federated run: cohorts, one process, resumable state.

Cohorts are drawn among the clients whose participation timers allow it, or, in a simulation
of a data centre, by a data sampler. A Poisson sample may be empty. Such a round is run as
any other, with no client: the sum is zero, and its noise is added and its model released.

What makes a run resumable without a second use of any noise row: a round is a function
of the saved state before it, the run's seed and the ledger of the rounds before it, all of
which are on disk before the round's result is shown to anyone. A round that is cut off is
run again with the same cohort, the same data and the same noise, and so releases the same
aggregate.

The ledger is never shortened, whatever becomes of the states. A run may go on from an
older state, because the newest is damaged or a copy was restored; the rounds between that
state and the ledger's end were released already, and each of them is run again only if the
cohort that is drawn for it is the one in the ledger. Other clients under the noise of a
released round would reveal their difference from the first ones: such a run is refused.
"""

import dataclasses
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow_federated as tff

from mf_aggregators.participation import Participation
from mf_aggregators.sampling_schemes import SamplingScheme
from simulations import cohorts, participation_timers
from simulations.cohorts import TooFewEligibleClientsError
from simulations.data_samplers import DataSampler
from simulations.participation_ledger import LedgerError, ParticipationLedger
from simulations.participation_timers import TimerState
from simulations.quiet import StopRequest
from simulations.state_store import Progress, StateStore

# What an assertion of a process's graph says, somewhere in the error of TFF's worker.
_REFUSAL = re.compile(r"assertion failed: \[([^\]]*)\]")


class RoundRefusedError(ValueError):
    """The process refused to run a round; the message is its reason."""


@dataclasses.dataclass(frozen=True)
class FederatedRun:
    """What defines the rounds of a run.

    Attributes:
      process: The learning process.
      initial_state: Its state before the first round.
      participation: The schema that the timers enforce.
      num_rounds: The number of rounds.
      clients_per_round: The cohort size.
      client_ids: The population.
      client_dataset: From a client's id and a round, from 0, to its data set in that
        round; a function of the two alone.
      seed: Of the cohorts.
      sampler: What draws the cohorts in place of timers, which are not asked then, and
        ``seed``. For the simulation of a data centre, never for devices that decide
        themselves when to take part.

    Raises:
      ValueError: If the sampler is for another population or other rounds.
    """

    process: tff.learning.templates.LearningProcess
    initial_state: Any
    participation: Participation
    num_rounds: int
    clients_per_round: int
    client_ids: tuple[str, ...]
    client_dataset: Callable[[str, int], Any]
    seed: int
    sampler: DataSampler | None = None

    def __post_init__(self) -> None:
        if self.sampler is None:
            return
        scheme = self.sampler.scheme
        sizes = (scheme.population, scheme.num_rounds, scheme.clients_per_round)
        if sizes != (len(self.client_ids), self.num_rounds, self.clients_per_round):
            raise ValueError(
                f"the sampler draws {scheme.clients_per_round} of {scheme.population} clients in "
                f"{scheme.num_rounds} rounds, and the run has {self.clients_per_round} of "
                f"{len(self.client_ids)} in {self.num_rounds}."
            )

    @property
    def sampling(self) -> SamplingScheme | None:
        """The scheme of the sampler; None for timers."""
        return None if self.sampler is None else self.sampler.scheme


@dataclasses.dataclass(frozen=True)
class Round:
    """A finished round, saved already.

    Attributes:
      index: The round, from 0.
      state: The process's state after it.
      metrics: The process's metrics.
      ledger: The ledger with this round, and with any later ones that were released before.
      num_eligible: How many clients might have joined: those whose timers allowed it, or
        the part of the population that the round's sample was drawn from.
      seconds: How long the round took.
    """

    index: int
    state: Any
    metrics: Mapping[str, Any]
    ledger: ParticipationLedger
    num_eligible: int
    seconds: float


def start(run: FederatedRun, store: StateStore) -> Progress:
    """Returns what to go on from: what is saved, or the first state of a new run.

    The first state is saved before any round, because it holds the seed of the noise: a
    run that is cut off in its first round must not draw other noise for it.

    Args:
      run: The run.
      store: Its states.

    Returns:
      Where the run stands.

    Raises:
      LedgerError: If what is saved cannot be gone on from.
    """
    saved = store.load(run.initial_state, run.client_ids)
    if saved is not None:
        if saved.ledger.sampling != run.sampling:
            raise LedgerError(
                "the clients of the saved rounds were drawn in another way than those of later "
                "rounds would be: no guarantee covers both. Start a new run."
            )
        return saved
    ledger = ParticipationLedger(run.client_ids, sampling=run.sampling)
    progress = Progress(run.initial_state, 0, ledger)
    store.save(progress)
    return progress


def rounds(
    run: FederatedRun, store: StateStore, progress: Progress, stop: StopRequest
) -> Iterator[Round]:
    """Runs and saves the rounds that are left.

    Args:
      run: The run.
      store: Where states go.
      progress: What :func:`start` returned.
      stop: Checked between rounds.

    Yields:
      Each round, once its state and the ledger are on disk.

    Raises:
      LedgerError: If a round of the ledger would be run again with other clients.
      TooFewEligibleClientsError: If the timers leave too few clients for a cohort. The
        rounds before it stand.
      RoundRefusedError: If the process itself refused a round, with its reason.
      KeyboardInterrupt: If a round failed because a stop was requested: the signal may
        have reached TFF's worker as well.
    """
    state, ledger = progress.state, progress.ledger
    timers = ledger.first_rounds(progress.num_rounds).timers()
    for index in range(progress.num_rounds, run.num_rounds):
        if stop.is_set:
            return
        begin = time.monotonic()
        cohort, num_eligible = _cohort(run, timers, ledger, index)
        data = [run.client_dataset(run.client_ids[client], index) for client in cohort]
        try:
            output = run.process.next(state, data)
        except Exception as error:
            if stop.is_set:
                raise KeyboardInterrupt from None
            refusal = _REFUSAL.search(str(error))
            if refusal is not None:
                raise RoundRefusedError(f"round {index + 1}: {refusal[1]}") from error
            raise
        state = output.state
        timers = participation_timers.record(timers, cohort, index)
        if index == ledger.num_rounds:
            ledger = ledger.with_round(cohort)
        store.save(Progress(state, index + 1, ledger))
        yield Round(
            index=index,
            state=state,
            metrics=output.metrics,
            ledger=ledger,
            num_eligible=num_eligible,
            seconds=time.monotonic() - begin,
        )


def _cohort(
    run: FederatedRun, timers: TimerState, ledger: ParticipationLedger, index: int
) -> tuple[np.ndarray, int]:
    """Draws a round's cohort; of a round in the ledger, it must be the one of the ledger.

    Returns:
      The cohort, and how many clients might have joined.
    """
    if index >= ledger.num_rounds:
        return _drawn(run, timers, index)
    try:
        cohort, num_eligible = _drawn(run, timers, index)
    except TooFewEligibleClientsError:
        cohort, num_eligible = None, 0
    if cohort is None or not np.array_equal(cohort, ledger.cohorts[index]):
        raise LedgerError(
            f"round {index + 1} was released with other clients than are drawn for it now, and the "
            "same noise on both would reveal their difference: the run cannot go on from this "
            "state. Restore its newest state and its own ledger, or start a new run and account "
            "for both."
        )
    return cohort, num_eligible


def _drawn(run: FederatedRun, timers: TimerState, index: int) -> tuple[np.ndarray, int]:
    if run.sampler is not None:
        return run.sampler.draw(index), len(run.sampler.part_of_round(index))
    eligible = participation_timers.eligible(timers, run.participation, index)
    cohort = cohorts.draw(eligible, run.clients_per_round, run.seed, index)
    return cohort, int(np.count_nonzero(eligible))
