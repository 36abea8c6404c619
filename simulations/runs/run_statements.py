"""What a run states of its privacy: its statement, and the epsilon that each round has spent.

The noise is scaled to the sensitivity of C for all n rounds. What the first t rounds have
released depends on the leading t rows of C alone, whose sensitivity is smaller: the same
noise is a larger multiple of it, and the guarantee of these t releases a better one. It grows
with every round and meets the planned guarantee with the last: the :class:`PrivacyBudget`, for
curves of a run. A run that stops early keeps its planned guarantee, unless neither the data nor
what was released had a part in the decision to stop.
"""

import contextlib
import dataclasses
import datetime
import logging
import math
import os
import pathlib
import textwrap
from collections.abc import Sequence
from typing import Any

from mf_aggregators import Mechanism, participation
from mf_aggregators.audit import one_run
from mf_aggregators.audit.one_run import RunAudit
from mf_aggregators.commands import evidence, facts_of_runs, stated_runs
from mf_aggregators.commands.command_line import CommandError
from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.ledger import ObservedParticipation
from mf_aggregators.privacy import client_names, guarantees
from mf_aggregators.privacy.provenance import Provenance
from mf_aggregators.privacy.statement import (
    PrivacyStatement,
    Represented,
    RunFacts,
)
from simulations.runs import run_directory
from simulations.runs.planned_runs import Run
from simulations.runs.round_records import ParticipationLedger
from simulations.runs.run_directory import RunDirectory
from simulations.training import weights_files

_LOGGER = logging.getLogger(__name__)

# The characters of a line of a statement, without its margin.
_LINE_LENGTH = 90
# A curve of about this many points is smooth enough.
_POINTS = 100


class RunStatements:
    """The statements of one run, written as it begins, breaks its plan, fails or ends.

    ``privacy.json`` never says more than the rounds that were released allow, whatever ends
    the process: a run that goes on begins with the statement of its earlier rounds, and a run
    that breaks its plan says so after the round in which it did.
    """

    def __init__(self, run: Run) -> None:
        """Prepares them; nothing is written yet."""
        self._run = run
        self._planned = planned(run)
        behaviour = run.behaviour
        self._can_break = behaviour.timer_hours is not None or behaviour.forgets
        self._broken: PrivacyStatement | None = None
        self._has_begun = False

    def before(self, ledger: ParticipationLedger) -> None:
        """Writes the statement of a run that is about to train, whose ledger was found right."""
        self._has_begun = True
        number = client_names.num_alike(ledger.client_ids)
        facts = dataclasses.replace(self._planned.facts, num_alike_names=number)
        self._planned = dataclasses.replace(self._planned, facts=facts)
        if ledger.num_rounds:
            self.after(ledger)
        else:
            write(self._run, _with_provenance(self._run, self._planned))

    def after_round(self, ledger: ParticipationLedger) -> PrivacyStatement | None:
        """Returns the statement of a run whose plan is broken, written if it changed, or None."""
        if not self._can_break:
            return None
        found = self._run.mechanism.observed(ledger.record())
        if found.keeps_participation:
            return None
        before = None if self._broken is None else self._broken.observed_participation
        if before is None or before.schema != found.participation.schema:
            self._broken = self.after(ledger)
        return self._broken

    def after(
        self,
        ledger: ParticipationLedger,
        stopped_by_rule: bool = False,
        audit: RunAudit | None = None,
    ) -> PrivacyStatement:
        """Writes and returns the statement of a run that ended, with its ledger and its audit."""
        statement = _with_provenance(
            self._run,
            dataclasses.replace(
                observed(self._run, self._planned, ledger),
                stopped_by_rule=stopped_by_rule,
            ),
        )
        write(self._run, statement, audit)
        return statement

    def after_failure(self) -> None:
        """Writes the statement of a run that an error ended, out of the ledger on disk.

        That of a run that was refused before it began stays as it is. So does the one on disk where
        nothing can be written or read: the error that ended the run is what has to be seen.
        """
        if not self._has_begun:
            return
        with contextlib.suppress(OSError, ValueError):
            ledger = ParticipationLedger.load(self._run.directory.ledger)
            if ledger.num_rounds:
                self.after(ledger)


def planned(run: Run) -> PrivacyStatement:
    """Returns the statement of a run that is under way."""
    config, mechanism = run.config, run.mechanism
    facts = RunFacts(
        **facts_of_runs.of_configuration(config, mechanism),
        num_clients=run.data.num_clients,
        public_data=_public_data(run),
        enforcement=_enforcement(run),
    )
    certification = guarantees.default_certification(show_progress=True)
    return dataclasses.replace(
        mechanism.statement(facts, config.delta, certification=certification),
        represented=_represented(run),
        stopping_rule=run.stopping_rule,
    )


def _public_data(run: Run) -> str:
    """What was used besides the clients' data: as whoever runs it says, with a file's hash."""
    config = run.config
    words = facts_of_runs.public_data(config)
    if config.initial_weights is None:
        return words
    file = weights_files.find(config.initial_weights)
    text = (
        f"{words}. Training began with the weights of {file.name} (SHA-256 "
        f"{weights_files.sha256(file)}); what they were trained on is as whoever ran it says, and "
        "was not checked"
    )
    lines = textwrap.wrap(text, _LINE_LENGTH, break_long_words=False, break_on_hyphens=False)
    return "\n     ".join(lines)


def observed(
    run: Run, statement: PrivacyStatement, ledger: ParticipationLedger
) -> PrivacyStatement:
    """Returns the statement of a run that ended, with the participation that was observed."""
    found = run.mechanism.observed(
        ledger.record(),
        # The run itself wrote who was summed in each round, before its release.
        round_counts=[len(cohort) for cohort in ledger.cohorts],
        sampler=run.sampler,
    )
    if found.deviation is not None:
        _LOGGER.warning("the run has no amplified guarantee: %s.", found.deviation)
    return found.completed(statement)


def write(run: Run, statement: PrivacyStatement, audit: RunAudit | None = None) -> None:
    """Writes ``privacy.json`` and ``PRIVACY.md`` into the directory of a run.

    Raises:
      OSError: If a file cannot be written.
    """
    text = statement.to_markdown()
    if run.config.audit_canaries is not None:
        text += one_run.point_of_statement(run.config.audit_canaries, audit)
    run.directory.write_json(run_directory.PRIVACY_FILE, to_dict(run, statement, audit))
    run.directory.write_text(run_directory.STATEMENT_FILE, text)


def to_dict(run: Run, statement: PrivacyStatement, audit: RunAudit | None = None) -> dict[str, Any]:
    """Returns the contents of ``privacy.json``, with ``audit`` for a run that has canaries."""
    contents = statement.to_dict(name_clients=run.config.name_clients)
    if run.config.audit_canaries is None:
        return contents
    return {
        **contents,
        "audit_canaries": run.config.audit_canaries,
        "audit": None if audit is None else audit.to_dict(),
    }


def _with_provenance(run: Run, statement: PrivacyStatement) -> PrivacyStatement:
    """The statement with its day, other runs and, of a run that released something, its files."""
    config, directory = run.config, run.directory
    others = stated_runs.other_runs(config.other_runs)
    begun = directory.day_of_beginning()
    given = Provenance(
        responsible=config.responsible or "",
        model=config.model or "",
        period="" if begun is None else f"from {begun}",
        custody=config.custody or "",
        secure_aggregation=config.secure_aggregation,
        date=evidence.today(),
    )
    if statement.observed_participation is not None and directory.ledger.exists():
        # Every round writes the ledger.
        last = datetime.datetime.fromtimestamp(
            directory.ledger.stat().st_mtime, datetime.timezone.utc
        )
        given = dataclasses.replace(
            given,
            period=given.period and f"{given.period} to {last.date().isoformat()}",
            **_files(directory, others, is_secret=run.sampler is not None),
        )
    facts = dataclasses.replace(statement.facts, provenance=given)
    statement = dataclasses.replace(statement, facts=facts)
    try:
        return stated_runs.with_other_runs(
            statement, others, directory.path, directory.sampling_seed
        )
    except CommandError as error:
        # They could be read when the run began. Its own statement must not be lost with them.
        _LOGGER.warning("the statement leaves other runs out: %s", error)
        return statement


def _files(
    directory: RunDirectory, others: Sequence[pathlib.Path], *, is_secret: bool
) -> dict[str, Any]:
    """The hashes of the files that a statement follows from.

    The ledger of a sampled run gets a keyed hash, which confirms no guess of who was drawn.
    """
    folder = directory.path
    own = [
        folder / run_directory.CONFIG_FILE,
        *sorted(directory.factorization.glob("*")),
        folder / weights_files.FINAL_MODEL_FILE,
        directory.ledger,
        *(file for other in others for file in stated_runs.files_of(other)),
    ]
    secrets = [directory.ledger, directory.sampling_seed] if is_secret else []
    files = evidence.hashes(
        (file for file in own if file.is_file()),
        folder,
        secrets=[file for file in secrets if file.is_file()],
    )
    # A run with a fixed seed has no file of it, and no guarantee.
    if not is_secret or not directory.sampling_seed.exists():
        return {"files": files}
    secret = evidence.hashes([directory.ledger], folder, directory.sampling_seed)
    return {
        "files": (*files, *secret),
        "secret_files": tuple(name for name, _ in secret),
        "key_file": os.path.relpath(directory.sampling_seed, folder),
    }


def _represented(run: Run) -> Represented | None:
    """The larger cohort that a run's few clients stand for."""
    config, mechanism = run.config, run.mechanism
    if config.simulated_share == 1.0:
        return None
    return Represented(
        clients_per_round=config.clients_per_round,
        num_clients=participation.smallest_population(
            mechanism.schema, config.num_rounds, config.clients_per_round
        ),
        guarantee=guarantees.planned(
            mechanism.factorization, mechanism.schema, run.noise_multiplier, config.delta
        ),
    )


def _enforcement(run: Run) -> str:
    behaviour = run.behaviour
    return facts_of_runs.enforcement(
        run.mechanism.sampling,
        behaviour.timer_hours,
        forgets=behaviour.forgets,
    )


class PrivacyBudget:
    """The epsilon of the first t rounds of a run, computed when asked for and kept.

    It is computed for every ``every``-th round, and a round between two of them counts as
    the later one. So it is never below the epsilon of the exact sensitivity, for the
    releases of fewer rounds are part of those of more. It never falls, and it is the planned
    epsilon at the last round and never above: where the sensitivity is known as an
    upper bound only, which need not grow with the rounds, the largest so far holds. With
    min-separation sampling and balls in bins it is the epsilon without amplification, or the
    planned one where that is smaller.

    Attributes:
      planned: The guarantee of all rounds.
      every: How many rounds apart epsilon is computed.
    """

    def __init__(self, mechanism: Mechanism, delta: float, every: int | None = None) -> None:
        """Prepares the budget of a run; only the planned guarantee is computed at once.

        Args:
          mechanism: The mechanism. Where a scheme samples its clients, the guarantee is amplified,
            and that of fewer rounds is for the same probability of being drawn.
          delta: Above 0 and below 1; at least 1e-12 with a sampling scheme.
          every: How many rounds apart epsilon is computed; None for a hundredth of
            the rounds, rounded down, but at least 1.

        Raises:
          ValueError: If a number is out of its range.
        """
        self.planned = mechanism.guarantee(delta)
        rounds = mechanism.num_rounds
        self.every = numbers.positive_integer(
            max(1, rounds // _POINTS) if every is None else every, "every"
        )
        self._factorization = mechanism.factorization
        # The epsilons of the multiples of ``every``, from 0 on; the last entry may be that of the
        # last round.
        self._spent = [0.0]

    def spent(self, rounds: int) -> float:
        """Returns the epsilon of the releases of the first rounds, at the planned delta.

        Args:
          rounds: How many rounds were released, 0 to n.

        Returns:
          Epsilon: 0 before the first round, infinity after it if there is no noise.

        Raises:
          ValueError: If there are more rounds than the factorization has, or fewer than 0.
        """
        rounds = numbers.integer_at_least(rounds, 0, "rounds")
        last = self._factorization.num_rounds
        if rounds > last:
            raise ValueError(
                f"rounds must be at most {last}, the rounds of the factorization, found {rounds}."
            )
        if rounds == last:
            return self.planned.epsilon
        point = -(-rounds // self.every)
        while len(self._spent) <= point:
            following = min(len(self._spent) * self.every, last)
            epsilon = min(self._epsilon_of_first(following), self.planned.epsilon)
            self._spent.append(max(self._spent[-1], epsilon))
        return self._spent[point]

    def _epsilon_of_first(self, rounds: int) -> float:
        plan = self.planned
        if math.isinf(plan.epsilon):
            return math.inf
        if plan.is_amplified and plan.claim.columns is None:
            # Who was drawn plays no part in an amplified guarantee.
            nobody = ObservedParticipation(rounds, 0, None, 0, keeps_sampling=True)
            return guarantees.observed(plan, nobody).epsilon
        # To certify an epsilon takes minutes. Of schemes without groups, the planned one and that
        # without amplification are bounds of fewer rounds too.
        return guarantees.of_first_rounds(plan, rounds).epsilon
