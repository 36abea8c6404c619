"""The rounds of a federated run: cohorts, one process, resumable state.

Cohorts are those of a population of devices, whose participation timers allow it, or, in a
simulation of a data centre, drawn by a data sampler. A Poisson sample may be empty. Such a
round is run as any other, with no client: the sum is zero, and its noise is added and its
model released.

What makes a run resumable without a second use of any noise row: a round is a function
of the saved state before it, the run's seed and the ledger of the rounds before it, all of
which are on disk before the round's result is shown to anyone. A round that is cut off is
run again with the same cohort, the same data and the same noise, and so releases the same
aggregate. What devices remember is not saved: the rounds before are drawn again, and must give
the cohorts of the ledger.

The ledger is never shortened, whatever becomes of the states. A run may go on from an
older state, because the newest is damaged or a copy was restored; the rounds between that
state and the ledger's end were released already, and each of them is run again only if the
cohort that is drawn for it is the one in the ledger. Other clients under the noise of a
released round would reveal their difference from the first ones: such a run is refused.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow_federated as tff

from mf_aggregators.kernel.ledger import ObservedParticipation
from mf_aggregators.kernel.numbers import Error, in_full
from mf_aggregators.participation import Participation, Sampler, SamplingScheme
from mf_aggregators.privacy import guarantees, ledgers
from mf_aggregators.privacy.guarantees import StoppingRule
from mf_aggregators.privacy.ledgers import LedgerError
from mf_aggregators.tff import client_sums, noise_states, processes
from mf_aggregators.tff.processes import StopRequest
from simulations.devices.device_behaviour import DeviceBehaviour
from simulations.devices.device_populations import (
    DevicePopulation,
    DeviceRound,
    TooFewEligibleClientsError,
)
from simulations.runs.canary_clients import CanaryClients
from simulations.runs.round_records import ParticipationLedger
from simulations.runs.state_store import Progress, StateStore

# An operating system's words for a full disk, in an error of TFF's worker.
_FULL = "No space left on device"


class StoppedByRuleError(Exception):
    """The run's stopping rule has ended it: the plan has come to its end.

    Attributes:
      cohort: (m,) int64: the clients with whom it refused the next round.
    """

    def __init__(self, message: str, cohort: np.ndarray) -> None:
        """Takes the reason, and the clients."""
        super().__init__(message)
        self.cohort = cohort


class RoundRefusedError(Error, ValueError):
    """The process refused to run a round; the message is its reason."""


@dataclasses.dataclass(frozen=True)
class FederatedRun:
    """The definition of the rounds of a run.

    Attributes:
      process: The learning process.
      initial_state: Its state before the first round.
      participation: The schema that the timers enforce, if they count rounds. The schema
        that the process scales its noise to, which its state tells, must allow all that this
        one does; they need not be equal.
      num_rounds: The number of rounds.
      clients_per_round: The cohort size.
      client_ids: The population.
      client_dataset: From a client's id and a round, from 0, to its data set in that
        round; a function of the two alone.
      seed: Seed for drawing the cohorts.
      sampler: What draws the cohorts in place of timers, which are not asked then, and
        ``seed``. For the simulation of a data centre, never for devices that decide
        themselves when to take part.
      behaviour: What the clients' devices do. By default they are always available and
        lose nothing.
      earlier_behaviours: If flags were changed, the behaviours of devices in earlier rounds: each
        by the number of rounds that it held for.
      stopping_rule: What ends the run before a round with which an epsilon would be exceeded.
      earlier_participations: The schema of each horizon that was extended to this run, by its
        number of rounds: it goes on from their saved states. Empty for a run that was not extended.
      canaries: The clients that audit the run, beside the cohort and in no ledger; the process is
        theirs. None for none.

    Raises:
      UnnoisedSumError: If the process releases a second update without noise: a ValueError.
      ValueError: If a client's id is none that a ledger keeps (``ledgers.check_names``), or two
        clients have the same; if the timers allow participations that the
        noise of the process is not scaled to; or if the sampler is for another population or
        other rounds, or is asked for together with a behaviour of devices.
    """

    process: tff.learning.templates.LearningProcess
    initial_state: Any
    participation: Participation
    num_rounds: int
    clients_per_round: int
    client_ids: tuple[str, ...]
    client_dataset: Callable[[str, int], Any]
    seed: int
    sampler: Sampler | None = None
    behaviour: DeviceBehaviour = dataclasses.field(default_factory=DeviceBehaviour)
    earlier_behaviours: Mapping[int, DeviceBehaviour] = dataclasses.field(default_factory=dict)
    stopping_rule: StoppingRule | None = None
    earlier_participations: Mapping[int, Participation] = dataclasses.field(default_factory=dict)
    canaries: CanaryClients | None = None

    def __post_init__(self) -> None:
        ledgers.check_names(self.client_ids)
        if isinstance(self.process.next, tff.framework.ConcreteComputation):
            # No update leaves the clients a second time, without noise.
            client_sums.check(self.process.next, needs_noise=False)
        if self.sampler is None:
            check_participation(self.initial_state, self.participation, self.num_rounds)
            return
        if self.behaviour != DeviceBehaviour():
            raise ValueError(
                "a data sampler draws the clients of a data centre, where no device has a "
                "behaviour: give the run one of the two."
            )
        scheme = self.sampler.scheme
        sizes = (scheme.population, scheme.num_rounds, scheme.clients_per_round)
        if sizes != (len(self.client_ids), self.num_rounds, self.clients_per_round):
            raise ValueError(
                "the sampler draws for other clients, rounds or cohorts than the run has: "
                f"{scheme.population}, {scheme.num_rounds}, {scheme.clients_per_round}."
            )

    def behaviour_in(self, index: int) -> DeviceBehaviour:
        """Returns the behaviour of devices in a round, from 0."""
        later = [rounds for rounds in self.earlier_behaviours if rounds > index]
        return self.earlier_behaviours[min(later)] if later else self.behaviour

    @property
    def sampling(self) -> SamplingScheme | None:
        """The scheme of the sampler; None for timers."""
        return None if self.sampler is None else self.sampler.scheme


def check_participation(initial_state: Any, participation: Participation, num_rounds: int) -> None:
    """Checks that timers allow no more than the noise of a process is scaled to.

    Raises:
      ValueError: If they allow more.
    """
    for declared in noise_states.participations_in(initial_state):
        if not declared.allows(participation, num_rounds):
            raise ValueError(
                f"the process scales its noise to another participation schema ({declared}) than "
                f"the timers enforce ({participation}), which allows more: build its aggregator "
                "and the run with the same participation."
            )


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
      devices: What the devices did; None if a data sampler drew the cohort.
    """

    index: int
    state: Any
    metrics: Mapping[str, Any]
    ledger: ParticipationLedger
    num_eligible: int
    seconds: float
    devices: DeviceRound | None = None


def start(run: FederatedRun, store: StateStore) -> Progress:
    """Returns the progress to resume from: what is saved, or the first state of a new run.

    The first state is saved before any round, because it holds the seed of the noise: a run that is
    cut off in its first round must not draw other noise for it.

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
        _check_same_process(run, saved.state)
        return saved
    ledger = ParticipationLedger(run.client_ids, sampling=run.sampling)
    progress = Progress(run.initial_state, 0, ledger)
    store.save(progress)
    return progress


def _check_same_process(run: FederatedRun, saved: Any) -> None:
    """Checks that later rounds follow from a saved state as the rounds before did.

    A run that was extended takes the states of earlier horizons: its process knows them, and
    refuses others.
    """
    ours, theirs = (
        [int(each.fingerprint) for each in noise_states.states_in(state)]
        for state in (run.initial_state, saved)
    )
    if ours == theirs:
        return
    schemas = tuple(map(noise_states.participations_in, (run.initial_state, saved)))
    known = {*run.earlier_participations.values(), *schemas[0]}
    if run.earlier_participations and len(ours) == len(theirs) and known.issuperset(schemas[1]):
        return
    if schemas[0] != schemas[1]:
        raise LedgerError(
            "the noise of the saved rounds was scaled to another participation schema "
            f"({_listed(schemas[1])}) than that of later rounds would be ({_listed(schemas[0])}): "
            "build the process as it was, or start a new run and account for both."
        )
    raise LedgerError(
        "the saved state is of a process with another mechanism, other options or another version: "
        "no guarantee covers both. Build it as it was, or start a new run and account for both."
    )


def _listed(schemas: tuple[Participation, ...]) -> str:
    return "; ".join(map(str, schemas)) or "none"


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
      LedgerError: If a round of the ledger would be run again with other clients, or
        what the devices remember of the rounds before cannot be known.
      TooFewEligibleClientsError: If the timers leave too few clients for a cohort, or too
        few are available or upload. The rounds before it stand.
      StoppedByRuleError: If the next round would take the run beyond the epsilon of its
        stopping rule. Nothing of that round was released; the rounds before it stand.
      RoundRefusedError: If the process itself refused a round, with its reason, or found
        no space on the disk for its noise. Nothing of the round was released.
      StateNotSavedError: If a state cannot be written. The one before is there.
      WorkerLostError: If a remote worker is lost. The rounds before stand.
      KeyboardInterrupt: If a round failed because a stop was requested: the signal may
        have reached TFF's worker as well.
    """
    state, ledger = progress.state, progress.ledger
    population = _population(run, ledger, progress.num_rounds)
    for index in range(progress.num_rounds, run.num_rounds):
        if stop.is_set:
            return
        begin = time.monotonic()
        cohort, num_eligible, devices = _cohort(run, population, ledger, index)
        if index == ledger.num_rounds:
            # The rule does not apply to rounds of the ledger: they were released already.
            _check_rule(run, ledger, cohort)
        data = [run.client_dataset(run.client_ids[client], index) for client in cohort]
        if run.canaries is not None:
            data = run.canaries.client_data(data, index)
        try:
            output = run.process.next(state, data)
        except Exception as error:
            if stop.is_set:
                raise KeyboardInterrupt from None
            refusal = processes.refusal_of(error)
            if refusal is not None:
                raise RoundRefusedError(f"round {index + 1}: {refusal}") from error
            if _FULL in str(error):
                raise RoundRefusedError(
                    f"round {index + 1} could not write its noise, because the disk of the noise "
                    "directory is full: free space and run the same command again."
                ) from error
            raise
        state = output.state
        if run.canaries is not None:
            run.canaries.record(index, output.metrics)
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
            devices=devices,
        )


def _population(
    run: FederatedRun, ledger: ParticipationLedger, num_rounds: int
) -> DevicePopulation | None:
    """Returns the devices after the first rounds of the ledger; None for a sampled run."""
    if run.sampler is not None:
        return None
    population = DevicePopulation(
        len(run.client_ids), run.participation, run.clients_per_round, run.behaviour, run.seed
    )
    for index, cohort in enumerate(ledger.cohorts[:num_rounds]):
        population.change(run.behaviour_in(index))
        if not population.follow(cohort):
            raise LedgerError(
                f"round {index + 1} took place with other clients than are drawn for it now, so "
                "that nobody knows what the devices remember of it. Use the flags, seed and trace "
                "of its first rounds, or start a new run and account for both."
            )
    return population


def _check_rule(run: FederatedRun, ledger: ParticipationLedger, cohort: np.ndarray) -> None:
    """Raises StoppedByRuleError if the next round, with a cohort, would exceed the limit."""
    rule, rounds = run.stopping_rule, ledger.num_rounds + 1
    if rule is None:
        return
    if run.sampler is not None:
        observed = ObservedParticipation(rounds, 0, None, 0, keeps_sampling=True)
    else:
        with_it = ledger.with_round(cohort)
        observed = guarantees.observed_participation(with_it.rounds_of_clients(), rounds)
    if not rule.allows(observed):
        raise StoppedByRuleError(
            f"stopped after {ledger.num_rounds} rounds: with round {rounds} the epsilon of all "
            f"rounds together would be above {in_full(rule.epsilon)}",
            cohort,
        )


def _cohort(
    run: FederatedRun,
    population: DevicePopulation | None,
    ledger: ParticipationLedger,
    index: int,
) -> tuple[np.ndarray, int, DeviceRound | None]:
    """Returns a round's cohort, how many clients might have joined, and the devices' round.

    If the ledger already has the round, the cohort must be the ledger's.
    """
    if index >= ledger.num_rounds:
        return _drawn(run, population, index)
    try:
        cohort, num_eligible, devices = _drawn(run, population, index)
    except TooFewEligibleClientsError:
        cohort, num_eligible, devices = None, 0, None
    if cohort is None or not np.array_equal(cohort, ledger.cohorts[index]):
        raise LedgerError(
            f"round {index + 1} was released with other clients than are drawn for it now, and the "
            "same noise on both would reveal their difference: restore the run's newest state and "
            "its own ledger, or start a new run and account for both."
        )
    return cohort, num_eligible, devices


def _drawn(
    run: FederatedRun, population: DevicePopulation | None, index: int
) -> tuple[np.ndarray, int, DeviceRound | None]:
    if run.sampler is not None:
        return run.sampler.draw(index), run.sampler.num_eligible(index), None
    assert population is not None
    population.change(run.behaviour_in(index))
    devices = population.next_round()
    return devices.cohort, devices.num_eligible, devices
