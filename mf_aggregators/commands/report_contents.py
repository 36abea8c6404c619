"""Contents of mf-report: a checkpoint, more rounds under its matrix, and a run's ledger."""

import dataclasses
import functools
import math
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from absl import flags

from mf_aggregators import catalogue, checkpoints, factorizations, lower_bounds, workloads
from mf_aggregators import participation as participations
from mf_aggregators.commands import mechanism_flags
from mf_aggregators.commands.command_line import CommandError, check_choice, naming
from mf_aggregators.factorizations import Errors, Factorization
from mf_aggregators.kernel.claim import ONLY_IF, Guarantee
from mf_aggregators.kernel.ledger import NO_COUNTS
from mf_aggregators.kernel.numbers import counted, rounded_down, stated_pair
from mf_aggregators.mechanism import Mechanism, calibrate
from mf_aggregators.observed import Observed
from mf_aggregators.participation import Participation, SamplingScheme, SingleParticipation
from mf_aggregators.privacy import attackers, client_names, guarantees, statement_file, units
from mf_aggregators.privacy.guarantees import INDEPENDENCE
from mf_aggregators.privacy.round_times import RoundTimes
from mf_aggregators.privacy.units import Person, WorstClient
from mf_aggregators.workloads import Workload

# A report has the epsilons of its rho for these deltas, too.
_DELTAS = (1e-5, 1e-6, 1e-8, 1e-10)
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
      drawn: The mechanism of the checkpoint, with the noise, where a scheme draws its clients.
      is_saved: Whether the checkpoint has the mechanism, and flags name no other.
      has_own: Whether the checkpoint has a mechanism, whatever flags name.
    """

    factorization: Factorization
    schema: Participation
    workload: Workload
    mechanism: Mechanism | None
    drawn: Mechanism | None = None
    is_saved: bool = False
    has_own: bool = False

    @classmethod
    def of(
        cls,
        factorization: Factorization,
        schema: Participation,
        workload: Workload,
        noise_multiplier: float | None = None,
        **options: Any,
    ) -> "Subject":
        """Returns the subject of a factorization.

        Args:
          factorization: The factorization.
          schema: The schema that clients keep to.
          workload: The workload.
          noise_multiplier: Relative to the sensitivity under the schema; None if it is not told.
          **options: Further attributes.
        """
        mechanism = None
        if noise_multiplier is not None:
            mechanism = Mechanism.of_one_schema(factorization, schema, noise_multiplier)
        return cls(factorization, schema, workload, mechanism, **options)

    @functools.cached_property
    def errors(self) -> Errors:
        """The sensitivity and the errors under the schema."""
        return self.factorization.errors(self.workload, self.schema)

    @property
    def participation(self) -> Participation:
        """How clients take part: the scheme that draws them, or the schema that they keep to."""
        return self.schema if self.drawn is None else self.drawn.participation

    def variances(self) -> dict[str, np.ndarray]:
        """Returns the (num_rounds,) variances by round at noise multiplier 1, by factorization.

        Those of independent noise are beside them.
        """
        independent = factorizations.identity(self.factorization.num_rounds)
        return {
            self.factorization.mechanism: self.errors.per_round_variance,
            "independent noise": independent.per_round_variance(self.workload, self.schema),
        }

    def error_fields(self) -> dict[str, Any]:
        """Returns the errors at noise multiplier 1, their lower bounds, and the cost of noise."""
        factorization, errors = self.factorization, self.errors
        bound = lower_bounds.compute(self.workload, self.schema)
        recursion = factorization.noise_recursion()
        return {
            "mechanism": factorization.mechanism,
            "num_rounds": factorization.num_rounds,
            "workload": self.workload.name,
            "participation": str(self.participation),
            "sensitivity": errors.sensitivity.value,
            "sensitivity_is_exact": errors.sensitivity.is_exact,
            "sensitivity_theorem": errors.sensitivity.theorem,
            **errors.to_dict(),
            "rmse_lower_bound": None if bound is None else bound.rmse,
            "max_error_lower_bound": None if bound is None else bound.max_error,
            "rmse_over_lower_bound": None if bound is None else errors.rmse / bound.rmse,
            **mechanism_flags.gap_fields(factorization, self.workload, self.schema),
            "noise_state_floats_per_parameter": recursion.floats_per_parameter,
            "rows_of_z_per_round": recursion.rows_of_z_per_round,
        }

    @property
    def is_of_another_workload(self) -> bool:
        """Whether the matrix was made for another workload than the errors are for."""
        made_for = self.factorization.parameters.get("workload")
        return made_for is not None and not workloads.has_fingerprint(self.workload, str(made_for))

    def guarantee_fields(self, delta: float, clients_per_round: int | None) -> dict[str, Any]:
        """Returns the guarantee of all rounds and the effective RMSE; None where no noise is told.

        Args:
          delta: Above 0 and below 1.
          clients_per_round: The cohort size, for the effective RMSE (BandMF Eq. 11).
        """
        mechanism, multiplier, effective = self.mechanism, None, None
        if mechanism is not None:
            multiplier = mechanism.noise_multiplier
            if clients_per_round is not None:
                effective = multiplier * self.errors.rmse / clients_per_round
        # If a scheme draws, the guarantee of one participation holds for no client.
        stated = None if mechanism is None or self.drawn else mechanism.guarantee(delta)
        return {
            "noise_multiplier": multiplier,
            "effective_rmse": effective,
            **_guarantee_fields(stated),
            "delta": None if mechanism is None else delta,
            **{
                f"epsilon_at_delta_{each:g}": None if stated is None else stated.at(each).epsilon
                for each in _DELTAS
            },
        }

    def extension_fields(
        self, num_rounds: int, delta: float, num_parameters: int | None = None
    ) -> dict[str, Any]:
        """Returns the costs of going on for more rounds under the same schema.

        Args:
          num_rounds: The rounds of the whole run.
          delta: Above 0 and below 1.
          num_parameters: The parameters of the model; None leaves out what roundings of more rounds
            take of the noise.

        Returns:
          ``extend_to``; the ``extended_`` sensitivity, rmse, noise_multiplier and epsilon of the
          whole, for a workload of the same name; ``planned_rmse`` of the same mechanism made for
          all rounds (None where it cannot be, as with more bands than the separation), and the
          ratio ``extended_rmse_over_planned``. Errors are at noise multiplier 1, so that they
          compare matrices at one guarantee.

        Raises:
          CommandError: If there is no such extension; the message says why.
        """
        try:
            if self.drawn is not None:
                # Which refuses it.
                self.drawn.extended(num_rounds)
            workload = _longer(self.workload, num_rounds)
            whole = self.factorization.extended(
                num_rounds, participation=self.schema, workload=workload
            )
        except ValueError as error:
            raise CommandError(f"--extend_to={num_rounds}: {error}") from error
        rmse = whole.rmse(workload, self.schema)
        planned_rmse = _planned_rmse(self.factorization, self.schema, workload)
        multiplier, epsilon = None, None
        if self.mechanism is not None:
            extended = self.mechanism.extended(
                num_rounds, workload=workload, num_parameters=num_parameters
            )
            multiplier, epsilon = extended.noise_multiplier, extended.guarantee(delta).epsilon
        return {
            "extend_to": num_rounds,
            "extended_sensitivity": whole.sensitivity(self.schema).value,
            "extended_rmse": rmse,
            "planned_rmse": planned_rmse,
            "extended_rmse_over_planned": None if planned_rmse is None else rmse / planned_rmse,
            "extended_noise_multiplier": multiplier,
            "extended_epsilon": epsilon,
        }


def _guarantee_fields(guarantee: Guarantee | None, prefix: str = "") -> dict[str, Any]:
    """The numbers of a guarantee as fields of a report; None where none is stated."""
    names = {"zcdp_rho": "rho", "zcdp_delta": "zcdp_delta", "epsilon": "epsilon"}
    values = {
        f"{prefix}{field}": None if guarantee is None else getattr(guarantee, name)
        for field, name in names.items()
    }
    return {**values, **attackers.rates(guarantee, prefix)}


def read(values: flags.FlagValues) -> Subject:
    """Reads the checkpoint that the flags name.

    Args:
      values: The parsed flags of mf-report.

    Raises:
      ValueError: If the checkpoint cannot be read, or the flags do not fit it.
    """
    factorization, description = checkpoints.load_with_description(values.checkpoint)
    made_for = description["errors"]
    workload = workloads.describe(
        mechanism_flags.workload_description(values) or made_for["workload"],
        factorization.num_rounds,
    )
    schema = mechanism_flags.participation(values)
    noise = mechanism_flags.noise_multiplier(values)
    saved = mechanism_flags.saved_mechanism(values.checkpoint)
    own = participations.from_dict(made_for["participation"]) if saved is None else saved.schema
    has_taken_place = (values.ledger or values.round_times) is not None
    if has_taken_place:
        _check_declared(factorization, own, schema or own)
    if saved is not None and noise is not None and (has_taken_place or schema is not None):
        _check_had(saved, schema or own, noise)
    if saved is not None and noise is None and schema is not None and not has_taken_place:
        noise = mechanism_flags.noise_under(saved, schema)
    if saved is None or schema is not None:
        return Subject.of(factorization, schema or own, workload, noise, has_own=saved is not None)
    if saved.sampling is not None:
        drawn = _drawn(values, saved, saved.sampling)
        of_drawn = {"drawn": drawn, "is_saved": drawn is saved, "has_own": True}
        return Subject.of(factorization, own, workload, drawn.noise_multiplier, **of_drawn)
    if noise is not None:
        return Subject.of(factorization, own, workload, noise, has_own=True)
    return Subject(factorization, own, workload, saved, is_saved=True, has_own=True)


def _drawn(values: flags.FlagValues, saved: Mechanism, scheme: SamplingScheme) -> Mechanism:
    """The mechanism of a checkpoint that draws its clients, with the noise that flags ask for."""
    if values.target_epsilon is None and values.target_rho is None:
        noise = mechanism_flags.noise_multiplier(values)
        return saved if noise is None else dataclasses.replace(saved, noise_multiplier=noise)
    has_epsilon = values.target_epsilon is not None
    with naming("target_epsilon" if has_epsilon else "target_rho"):
        return calibrate(
            saved.factorization,
            scheme,
            epsilon=values.target_epsilon,
            delta=values.delta if has_epsilon else None,
            rho=values.target_rho,
            certification=guarantees.default_certification(show_progress=True),
        )


def _check_declared(factorization: Factorization, own: Participation, given: Participation) -> None:
    """Refuses a schema under which a noise multiplier stands for more noise than the run had."""
    # A matrix for one participation says nothing of the run.
    if own == SingleParticipation() or given == own:
        return
    planned, declared = (factorization.sensitivity(schema).value for schema in (own, given))
    check_choice(
        declared <= planned * (1.0 + 1e-9),
        f"--separation: the checkpoint is for {own}, and the flags name {given}. A run's noise "
        "multiplier is relative to the schema that it was planned for: leave these flags out, and "
        "say with --ledger or --round_times what took place, or name the checkpoint of its own "
        "Mechanism.",
    )


def _check_had(saved: Mechanism, schema: Participation, noise_multiplier: float) -> None:
    """Refuses more noise than the mechanism of a run has."""
    had = mechanism_flags.noise_under(saved, schema)
    check_choice(
        noise_multiplier <= had * (1.0 + 1e-9),
        f"--noise_multiplier={noise_multiplier!r} is more noise than the Mechanism of the "
        f"checkpoint has, whose {saved.noise_multiplier!r} for {saved.schema} is "
        f"{rounded_down(had, '.6g')} for {schema}: leave it out.",
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
    stated = None if is_broken else plan
    certificate = None if stated is None else stated.claim.certificate
    return {
        "sampling": scheme.to_dict(),
        "amplified_noise_multiplier": plan.noise_multiplier,
        "amplified_epsilon": None if stated is None else stated.epsilon,
        "amplified_certificate": None if certificate is None else certificate.to_dict(),
        **attackers.rates(stated, "amplified_"),
    }


@dataclasses.dataclass(frozen=True)
class LedgerReport:
    """The findings of a ledger, or of the times of rounds.

    Attributes:
      plan: The guarantee that was planned; amplified for a ledger of a data sampler.
      observed: What the ledger or the times show.
      times: The times of the rounds; None for a ledger.
    """

    plan: Guarantee
    observed: Observed
    times: RoundTimes | None = None

    @property
    def keeps_plan(self) -> bool | None:
        """Whether the plan was kept: ``Observed.keeps_participation``."""
        return self.observed.keeps_participation

    @functools.cached_property
    def observed_guarantee(self) -> Guarantee:
        """The observed guarantee, without amplification (``Observed.unamplified_guarantee``)."""
        return self.observed.unamplified_guarantee(self.plan.delta)

    @functools.cached_property
    def worst_case(self) -> Guarantee | None:
        """The worst case of a plan that was broken; None for others."""
        return self.observed.worst_case(self.plan.delta) if self.keeps_plan is False else None

    @functools.cached_property
    def worst_client(self) -> WorstClient | None:
        """The client that is protected least; None where clients were drawn, which is a secret."""
        found = self.observed
        is_drawn = found.mechanism.sampling or (found.ledger and found.ledger.sampling)
        return None if is_drawn else found.worst_client(self.plan.delta)

    def guarantees(self) -> dict[str, Guarantee]:
        """Returns the guarantees that may be stated, by their names in a figure."""
        if self.worst_case is not None:
            found = {"observed": self.observed_guarantee, "worst case": self.worst_case}
        elif not self.plan.is_amplified:
            found = {"planned": self.plan, "observed": self.observed_guarantee}
        else:
            found = {"amplified": self.plan, "for who knows the batches": self.observed_guarantee}
        return {
            f"{name}, {ONLY_IF}" if each.is_observed else name: each for name, each in found.items()
        }

    def fields(self, *, name_clients: bool = False) -> dict[str, Any]:
        """Returns it as fields of a report.

        Args:
          name_clients: Whether the client that is protected least is named, with its rounds,
            which tell it from all others as well.
        """
        observed, seen, worst = self.observed, self.observed_guarantee, self.worst_client
        realised = ("num_rounds", "num_clients", "separation", "largest_separation")
        own, is_named = None if worst is None else worst.guarantee, worst and name_clients
        return {
            "keeps_plan": self.keeps_plan,
            "ledger_gap": observed.gap,
            "clients_beyond_plan": observed.num_outside_schema(),
            "alike_client_names": observed.num_alike_names,
            **self._sampling_fields(),
            **({} if self.times is None else self.times.to_dict()),
            **{
                f"realised_{name}": getattr(observed.participation, name)
                for name in (*realised, "max_participations")
            },
            "realised_sensitivity": seen.sensitivity.value,
            "realised_sensitivity_is_exact": seen.sensitivity.is_exact,
            "realised_noise_multiplier": seen.noise_multiplier,
            **_guarantee_fields(seen, "realised_"),
            **_guarantee_fields(self.worst_case, "widened_"),
            "worst_client": worst.client_id if worst and is_named else None,
            "worst_client_rounds": list(worst.rounds) if worst and is_named else None,
            "worst_client_num_rounds": None if worst is None else len(worst.rounds),
            "worst_client_sensitivity": None if own is None else own.sensitivity.value,
            "worst_client_epsilon": None if own is None else own.epsilon,
            **INDEPENDENCE,
        }

    def _sampling_fields(self) -> dict[str, Any]:
        if not self.plan.is_amplified:
            return {}
        # Never a number that the ledger shows not to hold.
        return {
            **sampling_fields(self.plan, is_broken=self.worst_case is not None),
            "sampling_deviation": self.observed.deviation,
            "absent_participations": self.observed.num_absent,
        }


@dataclasses.dataclass(frozen=True)
class Units:
    """Guarantees of other units than one client: clients in windows, devices, and people.

    Attributes:
      fields: Their numbers, as fields of a report.
      planned: The guarantees that were planned, if the plan was not broken, with a condition.
      person: The person that the ledger protects least; None if nobody knows.
    """

    fields: Mapping[str, Any]
    planned: Mapping[str, Guarantee]
    person: Person | None = None


def units_of(
    values: flags.FlagValues, mechanism: Mechanism | None, found: LedgerReport | None
) -> Units:
    """Returns the guarantees of windows, devices and people.

    Args:
      values: The parsed flags of mf-report.
      mechanism: Of the run; None without noise.
      found: What follows from its ledger; None if there is none.

    Raises:
      CommandError: If there is no noise, or the ledger does not fit the flags.
    """
    fields: dict[str, Any] = {}
    stated: dict[str, Guarantee | None] = {}
    planned: dict[str, Guarantee] = {}
    person, window = None, values.id_window
    if window is None and values.people is None:
        return Units(fields, planned)
    check_choice(mechanism is not None, "--id_window and --people need the noise of the run.")
    assert mechanism is not None
    delta = values.delta
    if window is not None:
        _check_windows(found, window)
        fields["id_window"] = window
        for name, number in (("window", 1), ("device", None)):
            unit = mechanism.unit_guarantee(delta, window=window, num_windows=number)
            planned[name] = stated[name] = unit
    if values.people is not None:
        assert found is not None
        with naming("people"):
            named = units.people_of(values.people)
            person = found.observed.least_protected_person(named, delta)
        unit = mechanism.unit_guarantee(delta, num_clients=units.most_clients(named))
        planned["person_planned"] = stated["person_planned"] = unit
        stated["person_realised"] = None if person is None else person.guarantee
        fields |= {
            "most_clients_of_a_person": units.most_clients(named),
            "alike_person_names": client_names.num_alike(named),
            "least_protected_person": person.name if person and values.name_clients else None,
            "least_protected_person_clients": None if person is None else len(person.clients),
        }
    if found is not None and found.keeps_plan is False:
        stated |= dict.fromkeys(planned)
        planned = {}
    for name, each in stated.items():
        fields[f"{name}_sensitivity"] = None if each is None else each.sensitivity.value
        fields[f"{name}_epsilon"] = None if each is None else each.epsilon
    return Units(fields, planned, person)


def _check_windows(found: LedgerReport | None, window: int) -> None:
    ledger = None if found is None else found.observed.ledger
    in_two = sum(
        len(rounds) > 0 and rounds[0] // window != rounds[-1] // window
        for rounds in (() if ledger is None else ledger.rounds_of_clients)
    )
    check_choice(
        not in_two,
        f"--id_window={window}: {in_two} clients of the ledger took part in two windows, "
        "so that ids did not change as stated.",
    )


def paragraphs(
    subject: Subject,
    delta: float,
    found: LedgerReport | None,
    certified: Guarantee | None,
    others: Units,
) -> list[str]:
    """Returns the paragraphs of a report: warnings first.

    Args:
      subject: What the report is about.
      delta: That of the guarantees.
      found: What follows from a ledger; None without one.
      certified: The guarantee of a checkpoint that draws its clients, without a ledger.
      others: The guarantees of other units.
    """
    mechanism = subject.mechanism
    text = statement_file.template(_TEMPLATE).render(
        subject=subject,
        mechanism=mechanism,
        planned=None if mechanism is None else mechanism.guarantee(delta),
        found=found,
        is_broken=found is not None and found.keeps_plan is False,
        certified=certified,
        units=others,
        infinite=math.inf,
        only_if=ONLY_IF,
        no_counts=NO_COUNTS,
        counted=counted,
        alike=client_names.warning,
        pair=lambda guarantee: stated_pair(guarantee.epsilon, guarantee.delta),
        attack=attackers.rates_sentence,
        rates=attackers.rates_in_brief,
    )
    found_in = (" ".join(each.split()) for each in re.split(r"\n\s*\n", text))
    return [each for each in found_in if each]


def _longer(workload: Workload, num_rounds: int) -> Workload:
    description = workload.to_dict()
    if any(isinstance(value, list) for value in description.values()):
        raise ValueError(
            "the workload has a learning rate or a coefficient for each of its rounds, and none "
            "for more: name the workload of the extended horizon in Python "
            "(Factorization.extended)."
        )
    return workloads.describe(description, num_rounds)


def _planned_rmse(
    factorization: Factorization, schema: Participation, workload: Workload
) -> float | None:
    """The rmse of the same mechanism with the same options, made for all rounds."""
    mechanism = catalogue.entry(factorization.mechanism)
    options = mechanism.options
    given = {name: each for name, each in factorization.parameters.items() if name in options}
    if factorization.strategy_bands() == factorization.num_rounds:
        # All bands that there are: then of all rounds.
        given = {name: each for name, each in given.items() if name != "num_bands"}
    try:
        made = mechanism.build(workload, schema, given)
    except ValueError:
        return None
    return made.rmse(workload, schema)
