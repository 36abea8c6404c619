"""The privacy statement of a run: what it planned, and what may be stated."""

import contextlib
import dataclasses

from mf_aggregators import participation
from mf_aggregators.adaptive_clip import AdaptiveClip
from mf_aggregators.participation import Sampler, SamplingScheme
from mf_aggregators.privacy import client_names, guarantees
from mf_aggregators.privacy.ledgers import Ledger
from mf_aggregators.privacy.statement import (
    TIMERS_BY_ROUNDS,
    AdaptiveClipping,
    PrivacyStatement,
    Represented,
    RunFacts,
)
from simulations.devices import device_populations
from simulations.devices.device_populations import DeviceBehaviour
from simulations.runs import run_directory, sampled_runs
from simulations.runs.round_records import ParticipationLedger
from simulations.runs.run_designs import RunDesign
from simulations.runs.run_directory import RunDirectory

_DRAWN_BATCHES = (
    "The server draws every batch itself and keeps secret who was drawn; there are no timers."
)
_OWN_DRAWS = (
    "The simulation draws for each client as its device would, and keeps secret who took part."
)


class RunStatements:
    """The statements of one run, written as it begins, breaks its plan, fails or ends.

    ``privacy.json`` never says more than the rounds that were released allow, whatever ends
    the process: a run that goes on begins with the statement of its earlier rounds, and a run
    that breaks its plan says so after the round in which it did.
    """

    def __init__(
        self,
        design: RunDesign,
        behaviour: DeviceBehaviour,
        directory: RunDirectory,
        sampler: Sampler | None,
    ) -> None:
        """Prepares them; nothing is written yet.

        Args:
          design: What the run does.
          behaviour: What the clients' devices do.
          directory: Where they go.
          sampler: What draws the clients; None for timers.
        """
        self._design = design
        self._directory = directory
        self._sampler = sampler
        self._planned = planned(design, behaviour)
        self._can_break = behaviour.timer is not None or (
            behaviour.history_loss_probability > 0.0
            and behaviour.after_history_loss == device_populations.REJOIN
        )
        self._broken: PrivacyStatement | None = None
        self._has_begun = False

    def before(self, ledger: ParticipationLedger) -> None:
        """Writes the statement of a run that is about to train, once its ledger was found right.

        Args:
          ledger: The ledger of the rounds that were released already.
        """
        self._has_begun = True
        number = client_names.num_alike(ledger.client_ids)
        facts = dataclasses.replace(self._planned.facts, num_alike_names=number)
        self._planned = dataclasses.replace(self._planned, facts=facts)
        if ledger.num_rounds:
            self.after(ledger)
        else:
            self._write(self._planned)

    def after_round(self, ledger: ParticipationLedger) -> PrivacyStatement | None:
        """Returns the statement of a run whose plan is broken, written if it is another one.

        Args:
          ledger: The ledger of all released rounds.

        Returns:
          None if the plan is kept.
        """
        if not self._can_break:
            return None
        took_place = guarantees.realised_participation(
            ledger.rounds_of_clients(), ledger.num_rounds
        )
        if guarantees.keeps_plan(self._planned.plan.participation, took_place):
            return None
        before = None if self._broken is None else self._broken.took_place
        if self._broken is None or before is None or before.schema() != took_place.schema():
            self._broken = self.after(ledger)
        return self._broken

    def after(self, ledger: ParticipationLedger, stopped_by_rule: bool = False) -> PrivacyStatement:
        """Writes and returns the statement of a run that ended.

        Args:
          ledger: The ledger of all released rounds.
          stopped_by_rule: Whether its stopping rule has ended it.
        """
        statement = dataclasses.replace(
            realised(self._design, self._planned, ledger, self._sampler),
            stopped_by_rule=stopped_by_rule,
        )
        self._write(statement)
        return statement

    def _write(self, statement: PrivacyStatement) -> None:
        write(self._directory, statement, name_clients=self._design.options.name_clients)

    def after_failure(self) -> None:
        """Writes the statement of a run that an error ended, out of the ledger on disk.

        That of a run that was refused before it began stays as it is. Where nothing can be
        written or read, the one on disk stays, too: the error that ended the run is what
        has to be seen.
        """
        if not self._has_begun:
            return
        with contextlib.suppress(OSError, ValueError):
            ledger = ParticipationLedger.load(self._directory.ledger)
            if ledger.num_rounds:
                self.after(ledger)


def planned(design: RunDesign, behaviour: DeviceBehaviour) -> PrivacyStatement:
    """Returns the statement of a run that is under way.

    Args:
      design: What the run does.
      behaviour: What the clients' devices do.
    """
    options, clip = design.options, design.clip
    factorization, delta = design.factorization, options.delta
    represented = None
    if design.sampling is None and design.simulated_clients != options.clients_per_round:
        represented = Represented(
            clients_per_round=options.clients_per_round,
            num_clients=participation.smallest_population(
                design.participation, options.num_rounds, options.clients_per_round
            ),
            guarantee=guarantees.planned(
                factorization, design.participation, design.noise_multiplier, delta
            ),
        )
    return PrivacyStatement(
        facts=RunFacts(
            mechanism=(
                "None: clipping without noise"
                if design.noise_multiplier == 0.0
                else f"{factorization.mechanism.capitalize()} matrix factorization for "
                f"{factorization.num_rounds} rounds"
            ),
            num_clients=design.data.num_clients,
            clients_per_round=design.simulated_clients,
            clip_norm=clip.initial_norm if isinstance(clip, AdaptiveClip) else clip,
            noise_seed_is_fixed=options.seed is not None,
            enforcement=_enforcement(behaviour, design.sampling),
            adaptive_clip=_adaptive_clipping(design),
            has_run_directory=True,
        ),
        plan=dataclasses.replace(design.planned_guarantee(), num_rounds=options.num_rounds),
        represented=represented,
        stopping_rule=design.stopping_rule,
        earlier_plans=design.earlier_plans,
    )


def realised(
    design: RunDesign,
    statement: PrivacyStatement,
    ledger: ParticipationLedger,
    sampler: Sampler | None,
) -> PrivacyStatement:
    """Returns the statement of a run that ended, with what really took place.

    Args:
      design: What the run did.
      statement: What :func:`planned` returned.
      ledger: The ledger of all released rounds.
      sampler: What drew the clients; None for timers.
    """
    rounds_of_clients = ledger.rounds_of_clients()
    took_place = (
        guarantees.realised_participation(rounds_of_clients, ledger.num_rounds)
        if sampler is None
        else sampled_runs.took_place(sampler, ledger)
    )
    record = Ledger(ledger.client_ids, tuple(rounds_of_clients), ledger.num_rounds)
    planned_guarantee = statement.plan
    keeps_plan = guarantees.keeps_plan(
        planned_guarantee.sampling or planned_guarantee.participation, took_place
    )
    return dataclasses.replace(
        statement,
        took_place=took_place,
        worst_case=(
            None
            if keeps_plan
            else guarantees.worst_case(planned_guarantee, design.factorization, took_place)
        ),
        realised=guarantees.realised(planned_guarantee, design.factorization, took_place),
        # Who was drawn in a sampled run is a secret that the statement must not tell, not even
        # for a run that left its scheme: its other batches were drawn.
        worst_client=(
            None
            if planned_guarantee.sampling is not None
            else guarantees.worst_client(planned_guarantee, design.factorization, record)
        ),
    )


def write(
    directory: RunDirectory, statement: PrivacyStatement, *, name_clients: bool = False
) -> None:
    """Writes ``privacy.json`` and ``PRIVACY.md``.

    Args:
      directory: The directory of the run.
      statement: The statement.
      name_clients: Whether ``privacy.json`` names the client that was protected least.

    Raises:
      OSError: If a file cannot be written.
    """
    directory.write_json(run_directory.PRIVACY_FILE, statement.to_dict(name_clients=name_clients))
    directory.write_text(run_directory.STATEMENT_FILE, statement.to_markdown())


def _adaptive_clipping(design: RunDesign) -> AdaptiveClipping | None:
    clip, shares = design.clip, design.noise_shares
    if not isinstance(clip, AdaptiveClip) or shares is None:
        return None
    smallest, largest = clip.bounds
    whole = dataclasses.replace(
        clip, smallest_norm=smallest, largest_norm=largest, count_stddev=shares.count_stddev
    )
    return AdaptiveClipping(whole, shares.update_noise_multiplier, shares.count_stddev)


def _enforcement(behaviour: DeviceBehaviour, sampling: SamplingScheme | None) -> str:
    if sampling is not None:
        return _OWN_DRAWS if sampled_runs.needs_matrix(sampling) else _DRAWN_BATCHES
    if behaviour.timer is not None:
        hours = behaviour.timer.seconds / 3600.0
        text = (
            f"A timer on each client lets {hours:g} hours pass between two participations;\n"
            "     that these are as many rounds apart is assumed, not enforced. What took place\n"
            "     is said below."
        )
    else:
        text = TIMERS_BY_ROUNDS
    loses = behaviour.history_loss_probability > 0.0
    if loses and behaviour.after_history_loss == device_populations.REJOIN:
        text += (
            " Clients that lost the\n     history of their participations joined again as new ones,"
            " which breaks the schema."
        )
    return text
