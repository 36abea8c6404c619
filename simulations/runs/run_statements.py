"""Privacy statements of a run: its statement, and the epsilon that each round has spent.

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
from typing import Any

from mf_aggregators import Mechanism
from mf_aggregators.audit.run_audit import RunAudit
from mf_aggregators.commands import stated_runs
from mf_aggregators.commands.command_line import CommandError
from mf_aggregators.commands.stated_runs import Others
from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.claim import check
from mf_aggregators.kernel.ledger import ObservedParticipation
from mf_aggregators.observed import Observed
from mf_aggregators.privacy import ledgers, statement_file
from mf_aggregators.privacy.statements import Statement
from simulations.runs import run_directory
from simulations.runs.planned_runs import Run
from simulations.runs.run_directory import ParticipationLedger

_LOGGER = logging.getLogger(__name__)

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
        self._broken: Statement | None = None
        self._has_begun = False

    def before(self, ledger: ParticipationLedger) -> None:
        """Writes the statement before training, once the ledger was checked."""
        self._has_begun = True
        number = ledgers.num_alike_names(ledger.client_ids)
        facts = dataclasses.replace(self._planned.facts, num_alike_names=number)
        self._planned = dataclasses.replace(self._planned, facts=facts)
        if ledger.num_rounds:
            self.after(ledger)
        else:
            self._write(self._planned)

    def after_round(self, ledger: ParticipationLedger) -> Statement | None:
        """Returns the statement if the plan is broken, else None; writes it if it changed."""
        if not self._can_break:
            return None
        found = self._run.mechanism.observed(ledger.record())
        if found.keeps_participation:
            return None
        before = None if self._broken is None else self._broken.observed_participation
        if before is None or before.schema != found.participation.schema:
            self._broken = self.after(ledger)
        return self._broken

    def after(self, ledger: ParticipationLedger, audit: RunAudit | None = None) -> Statement:
        """Writes and returns the statement of a run that ended, with its ledger and its audit.

        The audit is made of what the run recorded unless it is given.
        """
        run, folder = self._run, self._run.directory.path
        is_there = (folder / run_directory.CONFIG_FILE).exists()
        config = (run.directory.read_config() if is_there else None) or _config(run)
        found = observed(run, ledger)
        return self._write(stated_runs.ended(self._with_last_day(), folder, config, found, audit))

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

    def _with_last_day(self) -> Statement:
        """The planned statement, with the day of the last round in its period."""
        facts, file = self._planned.facts, self._run.directory.ledger
        if facts.period and file.exists():
            # Every round writes the ledger.
            last = datetime.datetime.fromtimestamp(file.stat().st_mtime, datetime.timezone.utc)
            period = f"{facts.period} to {last.date().isoformat()}"
            facts = dataclasses.replace(facts, period=period)
        return dataclasses.replace(self._planned, facts=facts)

    def _write(self, statement: Statement) -> Statement:
        """Writes a statement with other runs and its files, and returns it."""
        run, directory = self._run, self._run.directory
        try:
            others = _others(run, statement.plan.delta)
            statement = stated_runs.with_evidence(statement, directory.path, run.mechanism, others)
        except CommandError as error:
            # They could be read when the run began. Its own statement must not be lost with them.
            _LOGGER.warning("the statement leaves other runs out: %s", error)
            statement = stated_runs.with_evidence(statement, directory.path, run.mechanism, None)
        statement_file.write(
            statement.to_dict(),
            directory.path / run_directory.STATEMENT_FILE,
            directory.path / run_directory.PRIVACY_FILE,
        )
        return statement


def planned(run: Run) -> Statement:
    """Returns the statement of a run that is under way."""
    config, begun = run.config, run.directory.day_of_beginning()
    told = {name: config[name] or "" for name in ("responsible", "signer", "model", "custody")}
    return stated_runs.planned(
        _config(run),
        run.mechanism,
        population=run.data.num_clients,
        told={**told, "period": "" if begun is None else f"from {begun}"},
    )


def observed(run: Run, ledger: ParticipationLedger) -> Observed:
    """Returns the participation that the ledger of a run shows."""
    found = run.mechanism.observed(
        ledger.record(),
        # The run itself wrote who was summed in each round, before its release.
        round_counts=[len(cohort) for cohort in ledger.cohorts],
        sampler=run.sampler,
    )
    if found.deviation is not None:
        _LOGGER.warning("the run has no amplified guarantee: %s.", found.deviation)
    return found


def _config(run: Run) -> dict[str, Any]:
    """The part of ``config.json`` that statements follow from."""
    return {"flags": run.config.of_the_run(), "versions": run_directory.versions()}


def _others(run: Run, delta: float) -> Others | None:
    directory = run.directory
    return stated_runs.others_of(
        run.config.other_runs, directory.path, delta, directory.sampling_seed
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
            return nobody.guarantee(plan).epsilon
        # To certify an epsilon takes minutes. Of schemes without groups, the planned one and that
        # without amplification are bounds of fewer rounds too.
        return check(plan.without_draws(num_rounds=rounds)).epsilon
