"""Compares the participation in a run (from its ledger or round times) with its mechanism."""

import dataclasses
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.claim import Guarantee, check
from mf_aggregators.kernel.ledger import ObservedParticipation, gap
from mf_aggregators.participation import Sampler, SamplingScheme
from mf_aggregators.privacy import guarantees, ledgers
from mf_aggregators.privacy.guarantees import LeastProtected
from mf_aggregators.privacy.ledgers import GivenLedger, Ledger, RoundTimes
from mf_aggregators.privacy.statements import RunFacts, Statement

if TYPE_CHECKING:
    from mf_aggregators.mechanism import Mechanism


@dataclasses.dataclass(frozen=True)
class Observed:
    """The observed participation of a run, compared with its mechanism, and observed guarantees.

    Attributes:
      mechanism: The mechanism.
      ledger: Who took part in which round; None if only the times of rounds are known.
      participation: The observed smallest separation and largest number of participations; from
        times of rounds, the smallest and largest that were possible.
      keeps_participation: Whether the mechanism's participation allows them. If a sampling scheme
        draws the clients, only its seed can show this: None if the seed is not given and the ledger
        does not contradict the scheme.
      deviation: How the ledger deviates from the draws of the scheme or its seed, as the end of a
        sentence; None if it does not, and without a scheme.
      num_absent: The number of participations that the seed draws but the ledger lacks; None if it
        is not known.
      round_counts: The number of clients that the server counted in each round; None if it is not
        known.
      clients_per_round: The claimed cohort size of the run; None if no size is claimed.
    """

    mechanism: "Mechanism"
    ledger: Ledger | None
    participation: ObservedParticipation
    keeps_participation: bool | None
    deviation: str | None = None
    num_absent: int | None = None
    round_counts: tuple[int, ...] | None = None
    clients_per_round: float | None = None

    def __post_init__(self) -> None:
        if self.clients_per_round is not None:
            numbers.positive_number(self.clients_per_round, "clients_per_round")

    @classmethod
    def of_run(
        cls,
        mechanism: "Mechanism",
        ledger: GivenLedger | RoundTimes,
        sampling_seed: int | None,
        sampler: Sampler | None,
    ) -> "Observed":
        """Computes observed separations and counts, without the server's round counts."""
        if not isinstance(ledger, RoundTimes):
            ledger = Ledger.of(ledger, mechanism.num_rounds)
        if ledger.num_rounds > mechanism.num_rounds:
            raise ValueError(
                f"{ledger.num_rounds} rounds were released, and the mechanism is for "
                f"{mechanism.num_rounds}: give the mechanism of the run."
            )
        if isinstance(ledger, RoundTimes):
            if mechanism.sampling is not None:
                raise ValueError(
                    f"the times of rounds do not show the draws of {mechanism.sampling.name}: give "
                    "the ledger of the run."
                )
            found = ledger.participation()
            return cls(
                mechanism, None, found, guarantees.keeps_plan(mechanism.noise_reference, found)
            )
        found = ObservedParticipation.of(ledger.rounds_of_clients, ledger.num_rounds)
        if mechanism.sampling is None:
            return cls(
                mechanism, ledger, found, guarantees.keeps_plan(mechanism.noise_reference, found)
            )
        return _observed_draws(mechanism, mechanism.sampling, ledger, found, sampling_seed, sampler)

    @property
    def gap(self) -> str | None:
        """The reason why the ledger is not shown to be complete (``kernel.ledger.gap``), or None.

        A ledger that lacks lines shows too good a guarantee, so no guarantee better than the plan
        is stated. Draws that follow from a seed show all participations, and times of rounds need
        no ledger.
        """
        if self.ledger is None:
            return None
        if self.mechanism.sampling is None or self.keeps_participation is not True:
            return gap(
                self.ledger.rounds_of_clients,
                self.ledger.num_rounds,
                self.round_counts,
                self.clients_per_round,
            )
        absent = self.num_absent
        return f"{absent} participations that the seed draws are not in it" if absent else None

    @property
    def num_alike_names(self) -> int:
        """The number of clients with a name like another's (``ledgers.num_alike_names``)."""
        return 0 if self.ledger is None else ledgers.num_alike_names(self.ledger.client_ids)

    def num_outside_schema(self) -> int | None:
        """Returns the number of clients that took part when the mechanism's schema forbids it.

        Only these clients may have lost the planned guarantee, because neighbouring data sets
        differ in one client.

        Returns:
          The number; None without a ledger, or if a sampling scheme draws the clients.
        """
        schema = self.mechanism.participation
        if self.ledger is None or schema.is_sampled:
            return None
        if self.keeps_participation:
            return 0
        returned = [rounds for rounds in self.ledger.rounds_of_clients if len(rounds) > 1]
        if not returned:
            return 0
        sizes = np.array([len(rounds) for rounds in returned])
        gaps = np.delete(np.diff(np.concatenate(returned)), np.cumsum(sizes)[:-1] - 1)
        return guarantees.num_outside_schema(schema.as_schema(), sizes, gaps)

    def guarantee(self, delta: float) -> Guarantee:
        """Returns the observed guarantee of the released rounds, which rests on an assumption.

        Sampling amplifies the guarantee if the seed has shown that the scheme made every draw.
        Otherwise it is :meth:`unamplified_guarantee`, which holds only if participation did not
        depend on released models or on data. A run that kept its plan has ``Mechanism.guarantee``
        without this assumption.

        Args:
          delta: Above 0 and below 1; at least 1e-12 with amplification.

        Raises:
          ValueError: If delta is out of its range.
        """
        if self.mechanism.sampling is None or self.keeps_participation is not True:
            return self.unamplified_guarantee(delta)
        drawn = dataclasses.replace(self.participation, keeps_sampling=True)
        return drawn.guarantee(self.mechanism.guarantee(delta))

    def unamplified_guarantee(self, delta: float) -> Guarantee:
        """Returns the guarantee against an adversary who knows the rounds of each client.

        The guarantee follows from the smallest separation and the largest number of participations
        of a client. It holds only if participation did not depend on released models or on data.
        Epsilon is 0 if no client took part. If the ledger is not shown to be complete
        (:attr:`gap`), it is the planned guarantee, or :meth:`worst_case` if the plan was broken.

        Args:
          delta: Above 0 and below 1.

        Raises:
          ValueError: If delta is out of its range.
        """
        plan = self._unamplified(delta)
        if self.gap is None:
            return self.participation.guarantee(plan)
        if self.keeps_participation:
            return plan
        return self.participation.worst_case(plan)

    def worst_case(self, delta: float) -> Guarantee:
        """Returns the guarantee of all planned rounds for a run that broke its plan.

        The guarantee is for the smaller separation and the larger number of participations of plan
        and ledger. It holds only if participation did not depend on released models or on data.

        Args:
          delta: Above 0 and below 1.

        Raises:
          ValueError: If delta is out of its range.
        """
        # If clients are drawn, the plan's guarantee is the one for all rounds that a draw can have.
        return self.participation.worst_case(self.mechanism.guarantee(delta))

    def worst_client(self, delta: float) -> LeastProtected | None:
        """Returns the least protected client of the ledger, without amplification.

        Its epsilon holds only if participation did not depend on released models or on data.

        Args:
          delta: Above 0 and below 1.

        Returns:
          The client. None if no client took part, if there are more rounds than can be searched, if
          client names are not known, or if the ledger is not shown to be complete.
        """
        if self.ledger is None or self.gap is not None:
            return None
        return LeastProtected.of(self._unamplified(delta), self.ledger)

    def least_protected_person(
        self, people: Mapping[str, Iterable[str]] | str | os.PathLike[str], delta: float
    ) -> LeastProtected | None:
        """Returns the least protected person with all of its clients, without amplification.

        Its guarantee holds only if participation did not depend on released models or on data.

        Args:
          people: The clients of each person, as for ``ledgers.people_of``: a mapping, or a file.
          delta: Above 0 and below 1.

        Returns:
          The person; None as for :meth:`worst_client`.

        Raises:
          LedgerError: If a file cannot be read, or a client that took part belongs to no person.
          ValueError: If a person has no client, or has a client twice.
        """
        named = ledgers.people_of(people)
        if self.ledger is None or self.gap is not None:
            return None
        return LeastProtected.of(self._unamplified(delta), self.ledger, named)

    def statement(self, facts: RunFacts, delta: float) -> Statement:
        """Returns the privacy statement of a run that ended.

        Args:
          facts: Further facts of the run, for the statement.
          delta: Above 0 and below 1.

        Returns:
          The statement. If the plan was broken, or the draws of a sampling scheme were not checked,
          it says so first, and has the worst-case guarantee. If clients are sampled, it names no
          client, because the draws are secret.
        """
        return self.completed(self.mechanism.statement(facts, delta))

    def completed(self, statement: Statement) -> Statement:
        """Returns the statement of a run that has ended, with its observed guarantee.

        Args:
          statement: The result of :meth:`Mechanism.statement`.

        Returns:
          The statement that :meth:`statement` returns, without proving the plan again. It leaves
          out other runs, because a run with a broken plan composes differently with them.
        """
        claimed = self
        # The ledger of a training command is reliable, so it is not compared with a cohort size.
        if not statement.facts.has_run_directory:
            claimed = dataclasses.replace(self, clients_per_round=statement.facts.clients_per_round)
        gap = claimed.gap
        is_drawn = self.mechanism.sampling is not None
        observed = dataclasses.replace(
            self.participation,
            keeps_sampling=self.keeps_participation if is_drawn else None,
            gap=gap,
        )
        return dataclasses.replace(
            statement,
            observed_participation=observed,
            worst_client=(
                None
                if is_drawn or self.ledger is None or gap is not None
                else LeastProtected.of(statement.plan, self.ledger)
            ),
            other_runs=None,
        )

    def _unamplified(self, delta: float) -> Guarantee:
        """The guarantee without amplification, for the observed schema or all possible draws."""
        claimed = self.mechanism.claim(delta)
        if self.mechanism.sampling is not None:
            # If draws are not secret, a client counts as taking part in as many rounds as a draw
            # may have.
            schema = self.mechanism.sampling.as_draws().schema
            claimed = dataclasses.replace(claimed, taking_part=schema, basis=None)
        return check(claimed)


def _observed_draws(
    mechanism: "Mechanism",
    scheme: SamplingScheme,
    ledger: Ledger,
    found: ObservedParticipation,
    seed: int | None,
    sampler: Sampler | None,
) -> Observed:
    num_clients, cohorts = len(ledger.client_ids), ledger.cohorts()
    if ledger.sampling is None:
        if seed is not None:
            raise ValueError(
                "the ledger does not record its sampling scheme, so that draws cannot be matched "
                "with clients: give the participation.npz of the run, or no sampling_seed."
            )
        # The ledger does not name clients that were never drawn.
        num_clients = max(num_clients, scheme.population)
    if (ledger.sampling is not None or sampler is not None) and ledger.sampling != scheme:
        deviation = "the ledger records another sampling scheme"
        return Observed(mechanism, ledger, found, False, deviation)
    if sampler is not None and sampler.scheme != scheme:
        raise ValueError("the sampler has another sampling scheme than the mechanism.")
    if sampler is not None and not scheme.has_groups:
        # The sampler may know absent clients: absences do not count as deviations here.
        unlike = sampler.deviation(num_clients, cohorts)
        return Observed(mechanism, ledger, found, unlike is None, unlike)
    secret = seed if sampler is None else sampler.seed
    if secret is None:
        unlike = scheme.deviation(num_clients, cohorts)
        return Observed(mechanism, ledger, found, None if unlike is None else False, unlike)
    drawn = scheme.sampler(secret)
    unlike = drawn.deviation(num_clients, cohorts, may_be_absent=not scheme.has_groups)
    absent = drawn.num_absent(cohorts) if sampler is None and unlike is None else None
    return Observed(mechanism, ledger, found, unlike is None, unlike, num_absent=absent)
