"""Runs the rounds of a federated run, with its states and participation ledger saved on disk.

A round's cohort consists of devices whose participation timers allow them to take part; or, in a
simulation of a data centre, a data sampler draws it. A Poisson sample may be empty. A round with an
empty cohort is run as any other: its sum is zero, noise is added and the model is released.

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

A state takes its name only once it is complete, has checksums of all its files, and is on the disk
itself; only then are older ones removed. So, whatever ends a process, every state with a name is
whole, or was altered afterwards. A run never goes on from an altered one: a noise seed with one
wrong bit would put other noise on rounds that were released already.
"""

import asyncio
import dataclasses
import hashlib
import logging
import os
import pathlib
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from mf_aggregators import atomic_files, inputs
from mf_aggregators.kernel.ledger import ObservedParticipation
from mf_aggregators.kernel.numbers import Error
from mf_aggregators.noise import places
from mf_aggregators.participation import Participation, Sampler, SamplingScheme
from mf_aggregators.privacy import ledgers
from mf_aggregators.privacy.guarantees import StoppingRule
from mf_aggregators.privacy.ledgers import LedgerError
from mf_aggregators.tff import client_sums, processes
from mf_aggregators.tff.processes import RefusalError, StopRequest
from simulations.devices.device_behaviour import DeviceBehaviour
from simulations.devices.device_populations import (
    DevicePopulation,
    DeviceRound,
    TooFewEligibleClientsError,
)
from simulations.runs.canary_clients import CanaryClients
from simulations.runs.run_directory import STATE_PREFIX, ParticipationLedger

_LOGGER = logging.getLogger(__name__)

# How many of the newest states are kept: the second one is needed only if the newest is damaged.
_STATES_KEPT = 2
_STATE_NAME = re.compile(rf"{STATE_PREFIX}(0|[1-9][0-9]*)")
# The folder in which a state is written until it is complete. Its files are secret: they hold the
# noise's seed.
_UNFINISHED = "unfinished"
# A file in each state's folder, with the digest of the ledger of the state's rounds.
_LEDGER_DIGEST_FILE = "ledger.sha256"
CHECKSUM_FILE = "SHA256SUMS"
# How the operating system words a full disk, as found in errors of TFF's worker.
_FULL = "No space left on device"
# The bytes that are read at once for a checksum: a file may have many gigabytes.
_BYTES_AT_ONCE = 1 << 20


class StateNotSavedError(Error, OSError):
    """A state that could not be written; the message has the reason, the remains and a remedy.

    The round before this state was released to nobody. If it is run again from the newest saved
    state, it has the same cohort, data and noise.
    """


class DamagedDirectoryError(Error, ValueError):
    """A directory that is not as it was written; the message names the file and the reason."""


@dataclasses.dataclass(frozen=True)
class Progress:
    """Progress of a run: its newest state, the rounds behind it, and the participation ledger.

    Attributes:
      state: The learning process's state.
      num_rounds: The number of rounds after which the state is.
      ledger: The ledger of these rounds, and of any later ones that were released before the
        run went back to this state.
    """

    state: Any
    num_rounds: int
    ledger: ParticipationLedger


class StateStore:
    """Saves and loads a run's states (by TFF's program-state manager) and its ledger file."""

    def __init__(
        self, directory: str | os.PathLike[str], ledger_path: str | os.PathLike[str]
    ) -> None:
        """Creates the store of states, and their directory if it is missing.

        Raises:
          ValueError: If the directory is open to others: the states hold the seed of the noise.
          OSError: If the directory cannot be made.
        """
        self._directory = pathlib.Path(directory)
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        places.check_private(self._directory, "the directory of states")
        atomic_files.synchronise(self._directory.parent)
        self._ledger_path = pathlib.Path(ledger_path)

    def save(self, progress: Progress) -> None:
        """Saves the progress of a run, first the ledger and then the state.

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
        # Remove states that are too old; one that cannot be removed now is removed after the next
        # round.
        for version in self._versions()[:-_STATES_KEPT]:
            shutil.rmtree(self._path(version), ignore_errors=True)

    def _save_state(self, state: Any, version: int, ledger_digest: str) -> None:
        unfinished = self._directory / _UNFINISHED
        unfinished.mkdir(mode=0o700, exist_ok=True)
        asyncio.run(_manager(unfinished).save(state, version))
        written = unfinished / f"{STATE_PREFIX}{version}"
        (written / _LEDGER_DIGEST_FILE).write_text(ledger_digest + "\n", encoding="ascii")
        # The state's files are on disk before the folder gets its final name: a loss of power must
        # not leave a named state without contents.
        seal(written, _title(version))
        written.rename(self._path(version))
        atomic_files.synchronise(self._directory)

    def _refusal(self, version: int, error: Exception) -> str:
        """Returns the message of an error that kept a state from being saved."""
        what = f"round {version}" if version else "the state before the first round"
        versions = self._versions()
        left = f"round {versions[-1]}'s" if versions else "none"
        said = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return (
            f"{what} could not be saved in {self._directory}: {said.splitlines()[0]}. The newest "
            f"saved state is {left}. Remove the cause (free space if the disk is full), and run "
            "the same command again: it continues from that state."
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
        # Remove folders that a process left when it was killed while it saved a state. Older
        # versions let TFF save into folders ending in _temp, next to the states.
        for left in (_UNFINISHED, f"{STATE_PREFIX}*_temp*"):
            for unfinished in self._directory.glob(left):
                shutil.rmtree(unfinished, ignore_errors=True)
        atomic_files.remove_unfinished(self._ledger_path)
        versions = self._versions()
        if not versions and not self._ledger_path.exists():
            return None
        ledger = ParticipationLedger.load(self._ledger_path)
        if not versions:
            # If the ledger has no round, nothing was released: the process ended between writing
            # ledger and state, and the run may start anew. With rounds in the ledger, a new start
            # would add fresh noise to the same clients' sums: a second release that no ledger
            # records.
            if ledger.num_rounds == 0:
                return None
            raise LedgerError(
                f"{self._directory} holds no state, and {self._ledger_path} records "
                f"{ledger.num_rounds} released rounds: without their noise the run cannot "
                "continue. Restore the states, or start a new run and account for both."
            )
        state, version = self._newest_readable(versions, initial_state)
        if (
            ledger.client_ids != client_ids
            or ledger.num_rounds < version
            or ledger.first_rounds(version).digest() != self._ledger_digest(version)
        ):
            raise LedgerError(
                f"{self._ledger_path} does not belong to the saved state: the run cannot continue "
                "without breaking its participation schema. Restore the ledger from a copy, or "
                "start a new run and account for both."
            )
        return Progress(state, version, ledger)

    def _newest_readable(self, versions: list[int], initial_state: Any) -> tuple[Any, int]:
        """Returns the newest state that can be read, and removes damaged states that are newer.

        The rounds after this state are run again with the same cohorts, data and noise.
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
                    "%s is damaged; continuing from round %d. (%s.)",
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
        # Compare checksums first: TFF loads a state with altered bytes without an error, even if
        # they are in the seed or the model.
        check_seal(self._path(version), _title(version))
        manager = _manager(self._directory)
        try:
            return asyncio.run(manager.load(version, initial_state))
        except Exception as error:
            # TFF and TensorFlow raise many types. Their messages are dropped, because some contain
            # the state with its seed.
            reason = type(error).__name__
        raise DamagedDirectoryError(f"{self._path(version)} cannot be loaded: {reason}")

    def _ledger_digest(self, version: int) -> str | None:
        """Returns the digest of the ledger of a state's rounds; None if the state has none."""
        path = self._path(version) / _LEDGER_DIGEST_FILE
        return path.read_text(encoding="ascii").strip() if path.exists() else None

    def _remove_damaged(self, version: int) -> None:
        path = self._path(version)
        try:
            if path.is_dir() and not path.is_symlink():
                # Make the directory and those in it readable first, because unreadable ones cannot
                # be emptied.
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

    def _versions(self) -> list[int]:
        paths = self._directory.glob(f"{STATE_PREFIX}*")
        matches = (_STATE_NAME.fullmatch(path.name) for path in paths)
        return sorted(int(match[1]) for match in matches if match is not None)

    def _path(self, version: int) -> pathlib.Path:
        return self._directory / f"{STATE_PREFIX}{version}"


def _manager(directory: pathlib.Path) -> tff.program.FileProgramStateManager:
    # TFF's manager keeps all states (keep_total=0): otherwise it would remove old ones before the
    # new one is on disk.
    return tff.program.FileProgramStateManager(
        root_dir=os.fspath(directory), prefix=STATE_PREFIX, keep_total=0
    )


def _title(version: int) -> str:
    # The title has the round, so that a state that was renamed or copied does not pass as that of
    # another round.
    return f"state after round {version}"


def seal(directory: str | os.PathLike[str], title: str) -> None:
    """Writes checksums of a directory's files into the directory, and waits until all are on disk.

    The file has the format of ``sha256sum``, after a comment with the title, one line that says
    what the directory is and counts as a part of the contents.

    Raises:
      OSError: If a file cannot be read or the disk refuses one.
    """
    directory = pathlib.Path(directory)
    atomic_files.write(directory / CHECKSUM_FILE, _checksums(directory, title))
    for path in (*directory.rglob("*"), directory):
        atomic_files.synchronise(path)


def check_seal(directory: str | os.PathLike[str], title: str) -> None:
    """Checks that a directory's files and title are those that :func:`seal` wrote checksums of.

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
    # The whole text of the checksum file is compared, so that altered bytes in the file itself are
    # found too.
    different = set(stated.splitlines()) ^ set(found.encode("utf-8").splitlines())
    if stated != found.encode("utf-8"):
        names = sorted(line.decode("utf-8", "replace").rpartition(" ")[2] for line in different)
        raise DamagedDirectoryError(
            f"{directory / CHECKSUM_FILE} does not match: {', '.join(names)}"
        )


def _sha256(path: pathlib.Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BYTES_AT_ONCE):
            digest.update(block)
    return digest.hexdigest()


def _checksums(directory: pathlib.Path, title: str) -> str:
    files = sorted(
        path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()
    )
    lines = [f"{_sha256(directory / name)}  {name}\n" for name in files if name != CHECKSUM_FILE]
    return "".join([f"# {title}\n", *lines])


class StoppedByRuleError(Exception):
    """Error that ends a run because its stopping rule allows no further round.

    Attributes:
      cohort: (m,) int64: the clients of the next round, which the rule refused.
    """

    def __init__(self, message: str, cohort: np.ndarray) -> None:
        """Creates the error from the reason and the clients of the refused round."""
        super().__init__(message)
        self.cohort = cohort


class RoundRefusedError(Error, ValueError):
    """The learning process refused to run a round; the message has its reason."""


@dataclasses.dataclass(frozen=True)
class FederatedRun:
    """Definition of a federated run: its process, clients, cohorts and number of rounds.

    Attributes:
      process: The learning process.
      initial_state: The process's state before the first round.
      participation: The schema that the timers enforce, if they count rounds. The schema
        that the process scales its noise to, which its state tells, must allow all that this
        one does; they need not be equal.
      num_rounds: The number of rounds.
      clients_per_round: The cohort size.
      client_ids: The population.
      client_dataset: A function from a client's id and a round, from 0, to the client's data set in
        that round; the data set depends on these two alone.
      seed: Seed for drawing the cohorts.
      sampler: A sampler that draws the cohorts; timers and ``seed`` are not used then. None for
        cohorts that timers allow. For the simulation of a data centre, never for devices that
        decide themselves when to take part.
      behaviour: What the clients' devices do. By default they are always available and
        lose nothing.
      earlier_behaviours: Behaviours before flags changed, by the rounds until then, newest first.
      stopping_rule: A rule that ends the run before a round that would exceed an epsilon.
      earlier_participations: The schema of each horizon that was extended to this run, by its
        number of rounds: it goes on from their saved states. Empty for a run that was not extended.
      canaries: Canary clients that audit the run, in addition to the cohort and in no ledger;
        ``process`` is then their :meth:`learning_process`. None for none.

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
            # Check that the process sums no function of the updates a second time without noise.
            client_sums.check(self.process.next, needs_noise=False)
        if self.sampler is None:
            check_participation(self.initial_state, self.participation, self.num_rounds)
            return
        if self.behaviour != DeviceBehaviour():
            raise ValueError(
                "a data sampler and a behaviour of devices exclude each other: give the run one of "
                "the two."
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
        # If flags changed several times after the round, the earliest change counts, the last entry
        # here. So rounds that were released before an older ledger was restored keep their flags
        # too.
        earlier = [before for rounds, before in self.earlier_behaviours.items() if rounds > index]
        return earlier[-1] if earlier else self.behaviour

    @property
    def sampling(self) -> SamplingScheme | None:
        """The sampling scheme that draws the cohorts; None if timers decide."""
        return None if self.sampler is None else self.sampler.scheme


def check_participation(initial_state: Any, participation: Participation, num_rounds: int) -> None:
    """Checks that timers allow only participations that the process's noise is scaled to.

    Raises:
      ValueError: If the timers allow more.
    """
    for declared in processes.participations_in(initial_state):
        if not declared.allows(participation, num_rounds):
            raise ValueError(
                f"the process scales its noise to another participation schema ({declared}) than "
                f"the timers enforce ({participation}), which allows more: build its aggregator "
                "and the run with the same participation."
            )


@dataclasses.dataclass(frozen=True)
class Round:
    """Record of one finished round, after its state and ledger were saved.

    Attributes:
      index: The round, from 0.
      state: The process's state after the round.
      metrics: The process's metrics.
      ledger: The ledger with this round, and with any later ones that were released before.
      num_eligible: How many clients might have joined: those whose timers allowed it; or, with a
        sampler, those that the round's sample was drawn from.
      seconds: How long the round took.
      devices: The record of the devices; None if a data sampler drew the cohort.
    """

    index: int
    state: Any
    metrics: Mapping[str, Any]
    ledger: ParticipationLedger
    num_eligible: int
    seconds: float
    devices: DeviceRound | None = None


def start(run: FederatedRun, store: StateStore) -> Progress:
    """Returns the saved progress of a run, or saves and returns the first state of a new run.

    The first state is saved before any round, because it holds the seed of the noise: a run that is
    cut off in its first round must not draw other noise for it.

    Raises:
      LedgerError: If the run cannot be resumed from what is saved.
    """
    saved = store.load(run.initial_state, run.client_ids)
    if saved is not None:
        if saved.ledger.sampling != run.sampling:
            raise LedgerError(
                "the clients of the saved rounds were drawn by another scheme than those of later "
                "rounds: no guarantee covers both. Start a new run."
            )
        _check_same_process(run, saved.state)
        return saved
    ledger = ParticipationLedger(run.client_ids, sampling=run.sampling)
    progress = Progress(run.initial_state, 0, ledger)
    store.save(progress)
    return progress


def _check_same_process(run: FederatedRun, saved: Any) -> None:
    """Checks that a saved state belongs to the run's learning process.

    An extended run also resumes from states of its earlier horizons; its process knows these
    states, and refuses others.
    """
    ours, theirs = (
        [int(each.fingerprint) for each in processes.states_in(state)]
        for state in (run.initial_state, saved)
    )
    if ours == theirs:
        return
    schemas = tuple(map(processes.participations_in, (run.initial_state, saved)))
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
        "the saved state belongs to a process with another mechanism, other options or another "
        "version: no guarantee covers both. Build the process as it was, or start a new run and "
        "account for both."
    )


def _listed(schemas: tuple[Participation, ...]) -> str:
    return "; ".join(map(str, schemas)) or "none"


def rounds(
    run: FederatedRun, store: StateStore, progress: Progress, stop: StopRequest
) -> Iterator[Round]:
    """Runs the remaining rounds of a run, and saves each.

    Args:
      run: The run.
      store: The store that states and ledger are saved in.
      progress: The result of :func:`start`.
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
            # The stopping rule is not applied to rounds in the ledger: they were released already.
            _check_rule(run, ledger, cohort)
        data = [run.client_dataset(run.client_ids[client], index) for client in cohort]
        if run.canaries is not None:
            data = run.canaries.client_data(data, index)
        try:
            output = run.process.next(state, data)
        except Exception as error:
            if stop.is_set:
                raise KeyboardInterrupt from None
            refusal = RefusalError.reason_of(error)
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
    """Returns the simulated devices after the ledger's first rounds; None with a sampler."""
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
                "that the timers of devices are unknown. Use the flags, seed and trace of its "
                "first rounds, or start a new run and account for both."
            )
    return population


def _check_rule(run: FederatedRun, ledger: ParticipationLedger, cohort: np.ndarray) -> None:
    """Raises StoppedByRuleError if a next round with this cohort would exceed the limit."""
    rule, rounds = run.stopping_rule, ledger.num_rounds + 1
    if rule is None:
        return
    if run.sampler is not None:
        observed = ObservedParticipation(rounds, 0, None, 0, keeps_sampling=True)
    else:
        with_it = ledger.with_round(cohort)
        observed = ObservedParticipation.of(with_it.rounds_of_clients(), rounds)
    if not rule.allows(observed):
        raise StoppedByRuleError(
            f"stopped after {ledger.num_rounds} rounds: with round {rounds} the epsilon of all "
            f"rounds together would be above {inputs.in_full(rule.epsilon)}",
            cohort,
        )


def _cohort(
    run: FederatedRun, population: DevicePopulation | None, ledger: ParticipationLedger, index: int
) -> tuple[np.ndarray, int, DeviceRound | None]:
    """Returns a round's cohort, how many clients might have joined, and the record of its devices.

    If the ledger already has the round, the drawn cohort must equal the ledger's; otherwise
    LedgerError is raised.
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
            "same noise on both sums would reveal their difference: restore the run's newest state "
            "and its own ledger, or start a new run and account for both."
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
