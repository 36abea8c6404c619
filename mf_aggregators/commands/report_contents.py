"""Contents of mf-report: a checkpoint, a run's ledger, and the figure of both."""

import dataclasses
import functools
import math
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from absl import flags

from mf_aggregators import checkpoints, factorizations, lower_bounds, workloads
from mf_aggregators import participation as participations
from mf_aggregators.commands import mechanism_flags
from mf_aggregators.commands.command_line import CommandError, check_choice, naming
from mf_aggregators.factorizations import Errors, Factorization
from mf_aggregators.kernel.claim import ONLY_IF, Guarantee
from mf_aggregators.kernel.ledger import NO_COUNTS
from mf_aggregators.kernel.numbers import FloatArray, counted, stated_pair
from mf_aggregators.mechanism import Mechanism
from mf_aggregators.observed import Observed
from mf_aggregators.participation import Participation, SingleParticipation
from mf_aggregators.privacy import guarantees, ledgers, statement_file
from mf_aggregators.privacy.guarantees import INDEPENDENCE, LeastProtected
from mf_aggregators.workloads import Workload

# Width and height of a panel.
_INCHES = (5.4, 4.2)
# A matrix of more rounds is not drawn.
_MOST_ROUNDS_DRAWN = 4096
# False positive rates of the trade-off curves, on a logarithmic axis.
_LEAST_RATE_DRAWN, _RATES_DRAWN = 1e-4, 121
_TEMPLATE = pathlib.Path(__file__).with_name("templates") / "report.txt"


@dataclasses.dataclass(frozen=True, eq=False)
class Subject:
    """The checkpoint, schema, workload and noise of a report.

    Attributes:
      factorization: What the checkpoint holds.
      schema: The schema of the flags, of the checkpoint's mechanism, or the one that the checkpoint
        was made for.
      workload: That of the flags, or the one that the checkpoint was made for.
      mechanism: The factorization with the schema and the noise; None if no noise is told.
      drawn: The mechanism of the checkpoint, where a scheme draws its clients.
      is_saved: Whether the checkpoint has the mechanism, and flags name no other.
    """

    factorization: Factorization
    schema: Participation
    workload: Workload
    mechanism: Mechanism | None
    drawn: Mechanism | None = None
    is_saved: bool = False

    @functools.cached_property
    def errors(self) -> Errors:
        """The sensitivity and the errors under the schema."""
        return self.factorization.errors(self.workload, self.schema)

    def error_fields(self) -> dict[str, Any]:
        """Returns the errors at noise multiplier 1, their lower bounds, and the cost of noise."""
        factorization, errors = self.factorization, self.errors
        bound = lower_bounds.compute(self.workload, self.schema)
        recursion = factorization.noise_recursion()
        kept = recursion.num_earlier_rows + recursion.num_state_vectors
        return {
            "mechanism": factorization.mechanism,
            "num_rounds": factorization.num_rounds,
            "workload": self.workload.name,
            "participation": str(self.schema if self.drawn is None else self.drawn.participation),
            "sensitivity": errors.sensitivity.value,
            "sensitivity_is_exact": errors.sensitivity.is_exact,
            "sensitivity_theorem": errors.sensitivity.theorem,
            **errors.to_dict(),
            "rmse_lower_bound": None if bound is None else bound.rmse,
            "max_error_lower_bound": None if bound is None else bound.max_error,
            "rmse_over_lower_bound": None if bound is None else errors.rmse / bound.rmse,
            **mechanism_flags.gap_fields(factorization, self.workload, self.schema),
            "noise_state_floats_per_parameter": kept,
            "rows_of_z_per_round": recursion.rows_of_z_per_round,
        }

    @property
    def is_of_another_workload(self) -> bool:
        """Whether the matrix was made for another workload than the errors are for."""
        made_for = self.factorization.parameters.get("workload")
        return made_for is not None and not self.workload.has_fingerprint(str(made_for))

    def guarantee_fields(self, delta: float) -> dict[str, Any]:
        """Returns the guarantee of all rounds; None where no noise is told.

        Args:
          delta: Above 0 and below 1.
        """
        mechanism = self.mechanism
        # If a scheme draws, the guarantee of one participation holds for no client.
        stated = None if mechanism is None or self.drawn else mechanism.guarantee(delta)
        return {
            "noise_multiplier": None if mechanism is None else mechanism.noise_multiplier,
            **_guarantee_fields(stated),
            "delta": None if mechanism is None else delta,
        }


def _guarantee_fields(guarantee: Guarantee | None, prefix: str = "") -> dict[str, Any]:
    """The numbers of a guarantee as fields of a report; None where none is stated."""
    names = {"zcdp_rho": "rho", "zcdp_delta": "zcdp_delta", "epsilon": "epsilon"}
    values = {f"{prefix}{x}": getattr(guarantee, name, None) for x, name in names.items()}
    return {**values, **guarantees.rates(guarantee, prefix)}


def read(values: flags.FlagValues) -> Subject:
    """Reads the checkpoint that the flags name.

    Args:
      values: The parsed flags of mf-report.

    Raises:
      ValueError: If the checkpoint cannot be read, or the flags do not fit it.
    """
    factorization, description = checkpoints.load_with_description(values.checkpoint)
    made_for = description["errors"]
    given = mechanism_flags.workload_description(values) or made_for["workload"]
    workload = workloads.Workload.described(given, factorization.num_rounds)
    schema = mechanism_flags.participation(values)
    noise = mechanism_flags.noise_multiplier(values)
    saved = mechanism_flags.saved_mechanism(values.checkpoint)
    own = participations.from_dict(made_for["participation"]) if saved is None else saved.schema
    is_saved = saved is not None and schema is None and noise is None
    if (values.ledger or values.round_times) is not None:
        check_choice(
            saved is None or is_saved,
            f"--checkpoint={values.checkpoint} is a Mechanism, which has the run's participation "
            "and noise: leave out the flags that name others.",
        )
        _check_declared(factorization, own, schema or own)
    if saved is not None and schema is not None and noise is None:
        noise = mechanism_flags.noise_under(saved, schema)
    mechanism = saved if is_saved else None
    drawn = mechanism if mechanism is not None and mechanism.sampling is not None else None
    noise = noise if drawn is None else drawn.noise_multiplier
    if noise is not None:
        mechanism = Mechanism.of_one_schema(factorization, schema or own, noise)
    return Subject(factorization, schema or own, workload, mechanism, drawn, is_saved)


def _check_declared(factorization: Factorization, own: Participation, given: Participation) -> None:
    """Refuses a schema under which a noise multiplier stands for more noise than the run had."""
    # A matrix for one participation says nothing of the run.
    if own == SingleParticipation() or given == own:
        return
    planned, declared = (factorization.sensitivity(schema).value for schema in (own, given))
    check_choice(
        declared <= planned * (1.0 + 1e-9),
        f"--separation: the checkpoint is for {own}, and the flags name {given}. Noise multipliers "
        "are relative to what was planned for: leave these flags out, or name the run's Mechanism.",
    )


def sampling_fields(plan: Guarantee, *, is_broken: bool = False) -> dict[str, Any]:
    """Returns the planned guarantee of drawn clients as fields of a report; none for other clients.

    Args:
      plan: The guarantee that was planned.
      is_broken: Whether it is shown not to hold: then none of its numbers is a field.
    """
    scheme = guarantees.scheme_of(plan)
    if scheme is None:
        return {}
    certificate = None if is_broken else plan.claim.certificate
    return {
        "sampling": scheme.to_dict(),
        "amplified_noise_multiplier": plan.noise_multiplier,
        "amplified_epsilon": None if is_broken else plan.epsilon,
        "amplified_certificate": None if certificate is None else certificate.to_dict(),
        **guarantees.rates(None if is_broken else plan, "amplified_"),
    }


@dataclasses.dataclass(frozen=True)
class LedgerReport:
    """The findings of a ledger, or of the times of rounds.

    Attributes:
      plan: The guarantee that was planned; amplified for a ledger of a data sampler.
      observed: What the ledger or the times show.
    """

    plan: Guarantee
    observed: Observed

    @property
    def is_broken(self) -> bool:
        """Whether the plan is shown not to be kept (``Observed.keeps_participation``)."""
        return self.observed.keeps_participation is False

    @functools.cached_property
    def observed_guarantee(self) -> Guarantee:
        """The observed guarantee, without amplification (``Observed.unamplified_guarantee``)."""
        return self.observed.unamplified_guarantee(self.plan.delta)

    @functools.cached_property
    def worst_case(self) -> Guarantee | None:
        """The worst case of a plan that was broken; None for others."""
        return self.observed.worst_case(self.plan.delta) if self.is_broken else None

    @functools.cached_property
    def worst_client(self) -> LeastProtected | None:
        """The client that is protected least; None where clients were drawn, which is a secret."""
        return None if self.has_drawn_clients else self.observed.worst_client(self.plan.delta)

    @property
    def has_drawn_clients(self) -> bool:
        """Whether a scheme drew the clients: who was drawn is a secret."""
        of_run, ledger = self.observed.mechanism, self.observed.ledger
        return of_run.sampling is not None or (ledger is not None and ledger.sampling is not None)

    def guarantees(self) -> dict[str, Guarantee]:
        """Returns the guarantees that may be stated, by their names in a figure."""
        name = "planned" if self.worst_case is None else "worst case"
        found = {name: self.worst_case or self.plan, "observed": self.observed_guarantee}
        return {
            f"{name}, {ONLY_IF}" if each.is_observed else name: each for name, each in found.items()
        }

    def fields(self) -> dict[str, Any]:
        """Returns it as fields of a report, in which no client is named."""
        observed, seen, worst = self.observed, self.observed_guarantee, self.worst_client
        names = ("num_rounds", "num_clients", "separation", "largest_separation")
        realised = (*names, "max_participations")
        own = None if worst is None else worst.guarantee
        return {
            "keeps_plan": observed.keeps_participation,
            "ledger_gap": observed.gap,
            "clients_beyond_plan": observed.num_outside_schema(),
            "alike_client_names": observed.num_alike_names,
            # Never a number that the ledger shows not to hold.
            **sampling_fields(self.plan, is_broken=self.worst_case is not None),
            "sampling_deviation": observed.deviation,
            "absent_participations": observed.num_absent,
            "conditions": observed.participation.conditions,
            **{f"realised_{name}": getattr(observed.participation, name) for name in realised},
            "realised_sensitivity": seen.sensitivity.value,
            "realised_sensitivity_is_exact": seen.sensitivity.is_exact,
            "realised_noise_multiplier": seen.noise_multiplier,
            **_guarantee_fields(seen, "realised_"),
            **_guarantee_fields(self.worst_case, "widened_"),
            "worst_client_num_rounds": None if worst is None else len(worst.rounds),
            "worst_client_sensitivity": None if own is None else own.sensitivity.value,
            "worst_client_epsilon": None if own is None else own.epsilon,
            **INDEPENDENCE,
        }


def units_of(
    values: flags.FlagValues, mechanism: Mechanism | None, found: LedgerReport | None
) -> dict[str, Guarantee | None]:
    """Returns the guarantees of other units than one client, by their names in a report.

    Args:
      values: The parsed flags of mf-report.
      mechanism: Of the run, with the scheme that draws its clients; None without noise.
      found: What follows from its ledger; None if there is none.

    Returns:
      Those of a client in a ``window``, of a ``device`` in all of them, and of a person:
      ``person_planned`` and ``person_realised``. None for a planned one of a plan that was broken,
      and for a realised one that nobody knows, or that would tell who was drawn: a secret.

    Raises:
      CommandError: If there is no noise, or the ledger does not fit the flags.
    """
    window, people, delta = values.id_window, values.people, values.delta
    if window is None and people is None:
        return {}
    if mechanism is None:
        raise CommandError("--id_window and --people need the noise of the run.")
    units: dict[str, Guarantee | None] = {}
    if window is not None:
        ledger = None if found is None else found.observed.ledger
        of_clients = () if ledger is None else ledger.rounds_of_clients
        in_two = sum(len(r) > 0 and r[0] // window != r[-1] // window for r in of_clients)
        moved = f"{in_two} clients of the ledger took part in two windows"
        check_choice(not in_two, f"--id_window={window}: {moved}: ids did not change as stated.")
        units["window"] = mechanism.unit_guarantee(delta, window=window, num_windows=1)
        units["device"] = mechanism.unit_guarantee(delta, window=window)
    if people is not None and found is not None:
        with naming("people"):
            named = ledgers.people_of(people)
            person = found.observed.least_protected_person(named, delta)
        most = guarantees.most_clients(named)
        units["person_planned"] = mechanism.unit_guarantee(delta, num_clients=most)
        is_known = person is not None and not found.has_drawn_clients
        units["person_realised"] = person.guarantee if person and is_known else None
    if found is not None and found.is_broken:
        units |= {name: None for name, each in units.items() if each and not each.is_observed}
    return units


def fields_of_units(units: Mapping[str, Guarantee | None]) -> dict[str, float | None]:
    """Returns guarantees of other units as fields of a report.

    Args:
      units: The guarantees.
    """
    fields: dict[str, float | None] = {}
    for name, each in units.items():
        fields[f"{name}_sensitivity"] = None if each is None else each.sensitivity.value
        fields[f"{name}_epsilon"] = None if each is None else each.epsilon
    return fields


def paragraphs(
    subject: Subject,
    delta: float,
    found: LedgerReport | None,
    certified: Guarantee | None,
    units: Mapping[str, Guarantee | None],
) -> list[str]:
    """Returns the paragraphs of a report: warnings first.

    Args:
      subject: What the report is about.
      delta: That of the guarantees.
      found: What follows from a ledger; None without one.
      certified: The guarantee of a checkpoint that draws its clients, without a ledger.
      units: The guarantees of other units, of :func:`units_of`.
    """
    known = {"subject": subject, "delta": delta, "found": found, "certified": certified}
    text = statement_file.template(_TEMPLATE).render(
        known,
        units=units,
        infinite=math.inf,
        no_counts=NO_COUNTS,
        counted=counted,
        pair=lambda guarantee: stated_pair(guarantee.epsilon, guarantee.delta),
        guarantees=guarantees,
    )
    found_in = (" ".join(each.split()) for each in re.split(r"\n\s*\n", text))
    return [each for each in found_in if each]


def draw(subject: Subject, stated: Mapping[str, Guarantee], is_broken: bool, path: str) -> None:
    """Draws a report as a PNG file.

    Args:
      subject: What it is about.
      stated: The guarantees whose trade-off curves are drawn, by name.
      is_broken: Whether a ledger breaks the plan.
      path: The file.

    Raises:
      CommandError: If it cannot be written.
    """
    # Importing matplotlib takes a second.
    from mf_aggregators import figures

    factorization = subject.factorization
    has_matrix = factorization.num_rounds <= _MOST_ROUNDS_DRAWN
    figure, (axes,) = figures.panels(1, 1 + has_matrix + bool(stated), _INCHES)
    independent = factorizations.identity(factorization.num_rounds)
    variances = {
        factorization.mechanism: subject.errors.per_round_variance,
        "independent noise": independent.per_round_variance(subject.workload, subject.schema),
    }
    rounds = np.arange(1, factorization.num_rounds + 1)
    figures.lines(
        axes[0],
        {name: (rounds, np.sqrt(of_rounds)) for name, of_rounds in variances.items()},
        title="Output at noise multiplier 1",
        x="round",
        y="standard deviation",
    )
    if has_matrix:
        magnitudes = np.sqrt(np.abs(factorization.strategy_matrix()))
        figures.heat_map(figure, axes[1], magnitudes, title="Roots of magnitudes of C")
    if stated:
        figures.lines(
            axes[-1],
            _trade_offs(stated),
            title="What an attacker can do",
            x="false positive rate",
            y="highest true positive rate",
            logarithmic="xy",
        )
    schema = f"NOT kept: {subject.schema}" if is_broken else str(subject.schema)
    figures.heading(figure, f"{factorization.mechanism}, n = {factorization.num_rounds}: {schema}")
    with naming("figure"):
        figures.save(figure, path)


def _trade_offs(stated: Mapping[str, Guarantee]) -> dict[str, tuple[FloatArray, FloatArray]]:
    """The highest true positive rates of an attacker over false positive rates, by guarantee."""
    rates = np.geomspace(_LEAST_RATE_DRAWN, 1.0, _RATES_DRAWN)
    curves = {
        name: (rates, np.asarray(guarantees.true_positive_rate(each, rates)))
        for name, each in stated.items()
    }
    return {**curves, "guessing": (rates, rates)}
