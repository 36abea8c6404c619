"""What mf-report says: of a checkpoint, of more rounds under its matrix, and of a run's ledger."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from absl import flags

from mf_aggregators import (
    catalogue,
    checkpoints,
    factorizations,
    lower_bounds,
    workloads,
)
from mf_aggregators import participation as participations
from mf_aggregators.commands import mechanism_flags
from mf_aggregators.commands.command_line import CommandError, check_choice, naming, readable
from mf_aggregators.factorizations import Errors, Factorization
from mf_aggregators.kernel.claim import ONLY_IF, Guarantee
from mf_aggregators.kernel.ledger import NO_COUNTS
from mf_aggregators.kernel.numbers import counted, rounded_down, rounded_up, stated_pair
from mf_aggregators.mechanism import Mechanism, calibrate
from mf_aggregators.observed import Observed
from mf_aggregators.participation import Participation, SamplingScheme, SingleParticipation
from mf_aggregators.privacy import attackers, client_names, guarantees
from mf_aggregators.privacy.attackers import FALSE_POSITIVE_RATES, rate_field
from mf_aggregators.privacy.guarantees import INDEPENDENCE
from mf_aggregators.privacy.ledgers import Ledger
from mf_aggregators.privacy.round_times import RoundTimes
from mf_aggregators.privacy.worst_client import WorstClient
from mf_aggregators.workloads import Workload

INDEPENDENT_NOISE = "independent noise"
# The deltas beside that of the flags for which a report has the epsilon of its rho.
_DELTAS = (1e-5, 1e-6, 1e-8, 1e-10)


@dataclasses.dataclass(frozen=True, eq=False)
class Subject:
    """What a report is about.

    Attributes:
      factorization: What the checkpoint holds.
      schema: The schema of the flags, of the checkpoint's mechanism, or the one that the checkpoint
        was made for.
      workload: That of the flags, or the one that the checkpoint was made for.
      errors: The sensitivity and the errors under the schema.
      mechanism: The factorization with the schema and the noise; None if no noise is told.
      drawn: The mechanism of the checkpoint, with the noise, where a scheme draws its clients.
      is_saved: Whether the checkpoint has the mechanism, and flags name no other.
      has_own: Whether the checkpoint has a mechanism, whatever flags name.
    """

    factorization: Factorization
    schema: Participation
    workload: Workload
    errors: Errors
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
    ) -> "Subject":
        """Returns the subject of a factorization.

        Args:
          factorization: The factorization.
          schema: The schema that clients keep to.
          workload: The workload.
          noise_multiplier: Relative to the sensitivity under the schema; None if it is not told.
        """
        mechanism = None
        if noise_multiplier is not None:
            mechanism = Mechanism.of_one_schema(factorization, schema, noise_multiplier)
        errors = factorization.errors(workload, schema)
        return cls(factorization, schema, workload, errors, mechanism)

    @property
    def participation(self) -> Participation:
        """How clients take part: the scheme that draws them, or the schema that they keep to."""
        return self.schema if self.drawn is None else self.drawn.participation

    def variances(self) -> dict[str, np.ndarray]:
        """Returns the (num_rounds,) variances by round at noise multiplier 1, by what makes noise.

        Those of independent noise are beside them.
        """
        independent = factorizations.identity(self.factorization.num_rounds)
        return {
            self.factorization.mechanism: self.errors.per_round_variance,
            INDEPENDENT_NOISE: independent.per_round_variance(self.workload, self.schema),
        }

    def error_fields(self) -> dict[str, Any]:
        """Returns the errors at noise multiplier 1, beside the least possible, and the noise."""
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

    def notes(self) -> list[str]:
        """Returns what is worth knowing of the errors, as sentences."""
        made_for = self.factorization.parameters.get("workload")
        if made_for is None or workloads.has_fingerprint(self.workload, str(made_for)):
            return []
        return [
            f"The matrix was made for another workload than {self.workload.name}, whose errors "
            "these are: --workload= and --learning_rates= name its own."
        ]

    def guarantee_fields(self, delta: float, clients_per_round: int | None) -> dict[str, Any]:
        """Returns the guarantee of all rounds and the effective RMSE; None where no noise is told.

        Args:
          delta: Above 0 and below 1.
          clients_per_round: The cohort size, for the effective RMSE (BandMF Eq. 11).
        """
        found: dict[str, Any] = dict.fromkeys(("noise_multiplier", "effective_rmse"))
        mechanism = self.mechanism
        if mechanism is not None:
            found["noise_multiplier"] = multiplier = mechanism.noise_multiplier
            if clients_per_round is not None:
                found["effective_rmse"] = multiplier * self.errors.rmse / clients_per_round
        if mechanism is None or self.drawn is not None:
            # Where a scheme draws, no guarantee is that of one participation.
            names = ("zcdp_rho", "zcdp_delta", "epsilon", "delta", *map(_field_of, _DELTAS))
            stated = None if mechanism is None else delta
            return {**found, **dict.fromkeys(names), "delta": stated, **_no_rates()}
        guarantee = mechanism.guarantee(delta)
        return {
            **found,
            "zcdp_rho": guarantee.rho,
            # Zero without noise: nothing is stated then.
            "zcdp_delta": guarantee.zcdp_delta,
            "epsilon": guarantee.epsilon,
            "delta": delta,
            **{_field_of(each): mechanism.guarantee(each).epsilon for each in _DELTAS},
            **attackers.rates(guarantee),
        }

    def extension_fields(
        self, num_rounds: int, delta: float, num_parameters: int | None = None
    ) -> dict[str, Any]:
        """Returns what it costs to go on for more rounds under the same schema.

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


def _field_of(delta: float) -> str:
    return f"epsilon_at_delta_{delta:g}"


def rows_of_targets(stated: Mapping[str, Guarantee]) -> list[tuple[str, ...]]:
    """Returns what is stated as rho and as epsilon: a row for each guarantee and delta.

    An amplified epsilon is certified for its own delta alone.

    Args:
      stated: Guarantees by name.

    Returns:
      Rows of a name, rho, its delta0, a delta and the epsilon, none printed better than it is.
      Guarantees that are printed alike share their rows.
    """
    names: dict[tuple[tuple[str, ...], ...], list[str]] = {}
    for name, guarantee in stated.items():
        rho = "-"
        if math.isfinite(guarantee.rho):
            rho = readable("zcdp_rho", guarantee.rho)
        found = {guarantee.delta: guarantee.epsilon}
        if not guarantee.is_amplified and math.isfinite(guarantee.epsilon):
            found |= {
                delta: guarantee.at(delta).epsilon for delta in _DELTAS if delta != guarantee.delta
            }
        rows = tuple(
            (
                rho,
                rounded_up(guarantee.zcdp_delta, ".2g"),
                rounded_up(delta, ".6g"),
                readable("epsilon", found[delta]) if math.isfinite(found[delta]) else "-",
            )
            for delta in sorted(found, reverse=True)
        )
        names.setdefault(rows, []).append(name)
    return [("; ".join(alike), *row) for rows, alike in names.items() for row in rows]


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
    if schema is not None or saved is None:
        found = Subject.of(factorization, schema or own, workload, noise)
        return dataclasses.replace(found, has_own=saved is not None)
    if saved.sampling is not None:
        drawn = _drawn(values, saved, saved.sampling)
        found = Subject.of(factorization, saved.schema, workload, drawn.noise_multiplier)
        return dataclasses.replace(found, drawn=drawn, is_saved=drawn is saved, has_own=True)
    if noise is not None:
        found = Subject.of(factorization, saved.schema, workload, noise)
        return dataclasses.replace(found, has_own=True)
    errors = factorization.errors(workload, saved.schema)
    return Subject(
        factorization, saved.schema, workload, errors, saved, is_saved=True, has_own=True
    )


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
    had, given = (
        multiplier * saved.factorization.sensitivity(each).value
        for multiplier, each in ((saved.noise_multiplier, saved.schema), (noise_multiplier, schema))
    )
    check_choice(
        given <= had * (1.0 + 1e-9),
        f"--noise_multiplier={noise_multiplier!r} is more noise than the Mechanism of the "
        f"checkpoint has, whose {saved.noise_multiplier!r} for {saved.schema} is "
        f"{rounded_down(mechanism_flags.noise_under(saved, schema), '.6g')} for {schema}: leave it "
        "out.",
    )


def sampling_fields(plan: Guarantee, *, is_broken: bool = False) -> dict[str, Any]:
    """Returns what is planned of drawn clients as fields of a report; none of others.

    Args:
      plan: The guarantee that was planned.
      is_broken: Whether it is shown not to hold: then none of its numbers is a field.
    """
    scheme, certificate = guarantees.scheme_of(plan), plan.claim.certificate
    if scheme is None:
        return {}
    return {
        "sampling": scheme.to_dict(),
        "amplified_noise_multiplier": plan.noise_multiplier,
        "amplified_epsilon": None if is_broken else plan.epsilon,
        "amplified_certificate": (
            None if is_broken or certificate is None else certificate.to_dict()
        ),
        **(_no_rates("amplified_") if is_broken else attackers.rates(plan, "amplified_")),
    }


def drawn_sentences(plan: Guarantee, condition: str) -> str:
    """Returns what is planned of drawn clients in words, with an attacker's rates.

    Args:
      plan: The guarantee that was planned.
      condition: What it holds under, with a comma before it; or nothing.
    """
    if math.isinf(plan.epsilon):
        found = stated_pair(plan.epsilon, plan.delta)
        return f"There is so little noise that {found} is accounted for{condition}."
    attacker = attackers.rates_sentence(attackers.rates(plan), knows_rounds=False)
    return (
        f"Whoever observes all {plan.num_rounds} rounds, and does not learn who was drawn, learns "
        f"about one client at most what {stated_pair(plan.epsilon, plan.delta)} allows "
        f"(zero-out adjacency){condition}. {attacker}"
    )


@dataclasses.dataclass(frozen=True)
class LedgerReport:
    """What follows from a ledger, or from the times of rounds.

    Attributes:
      plan: The guarantee that was planned; amplified for a ledger of a data sampler.
      observed: What the ledger or the times show.
      observed_guarantee: The guarantee of the observed participations, without amplification,
        only if they did not depend on released models or on data. If the ledger is not shown to be
        complete, the guarantee of the plan, or the worst case if the plan was broken.
      worst_client: The client that is protected least. None for batches of a data sampler: who was
        drawn is a secret; for times, which tell nothing of clients; and for a ledger that is not
        shown to be complete.
      worst_case: What holds for a plan that was broken; None for others.
      times: The times of the rounds; None for a ledger.
    """

    plan: Guarantee
    observed: Observed
    observed_guarantee: Guarantee
    worst_client: WorstClient | None
    worst_case: Guarantee | None
    times: RoundTimes | None = None

    @classmethod
    def of_times(cls, mechanism: Mechanism, times: RoundTimes, delta: float) -> "LedgerReport":
        """Returns what follows from the times of rounds and the timers of devices.

        Args:
          mechanism: That of the run, with the schema that clients were to keep to.
          times: When the rounds took place.
          delta: Above 0 and below 1.

        Raises:
          ValueError: If there are more rounds than the mechanism has.
        """
        observed = mechanism.observed(times)
        return cls(
            plan=mechanism.guarantee(delta),
            observed=observed,
            observed_guarantee=observed.guarantee(delta),
            worst_client=None,
            worst_case=None if observed.keeps_participation else observed.worst_case(delta),
            times=times,
        )

    @classmethod
    def of(
        cls,
        subject: Subject,
        ledger: Ledger,
        delta: float,
        sampling_seed: int | None = None,
        *,
        round_counts: Iterable[int] | str | None = None,
        clients_per_round: int | None = None,
    ) -> "LedgerReport":
        """Returns what follows from a ledger.

        Args:
          subject: What the report is about, with noise. Where its checkpoint has no mechanism, the
            ledger says how clients were drawn.
          ledger: Who took part in which round.
          delta: Above 0 and below 1.
          sampling_seed: The secret seed of the data sampler, for a ledger that names its scheme:
            then every draw is compared with the ledger. None if it is not known.
          round_counts: As ``Mechanism.observed`` takes it.
          clients_per_round: As there.

        Raises:
          ValueError: If the ledger is broken, or its scheme does not fit the factorization.
        """
        mechanism = subject.drawn or subject.mechanism
        assert mechanism is not None
        if ledger.sampling is not None and not subject.has_own:
            # Relative to one participation, as schemes have it.
            factorization = mechanism.factorization
            ratio = factorization.sensitivity(mechanism.schema).value
            ratio /= factorization.sensitivity(SingleParticipation()).value
            mechanism = Mechanism(
                factorization, ledger.sampling, mechanism.noise_multiplier * ratio
            )
        observed = mechanism.observed(
            ledger,
            round_counts=round_counts,
            clients_per_round=clients_per_round,
            sampling_seed=sampling_seed,
        )
        certification = guarantees.default_certification(show_progress=True)
        is_broken = observed.keeps_participation is False
        is_drawn = (ledger.sampling or mechanism.sampling) is not None
        return cls(
            plan=mechanism.guarantee(delta, certification=certification),
            observed=observed,
            observed_guarantee=observed.unamplified_guarantee(delta),
            worst_client=None if is_drawn else observed.worst_client(delta),
            worst_case=observed.worst_case(delta) if is_broken else None,
        )

    @property
    def keeps_plan(self) -> bool | None:
        """Whether the plan was kept: ``Observed.keeps_participation``."""
        return self.observed.keeps_participation

    def guarantees(self) -> dict[str, Guarantee]:
        """Returns the guarantees that may be stated, by what they are called in a figure."""
        if self.worst_case is not None:
            found = {"observed": self.observed_guarantee, "worst case": self.worst_case}
        elif not self.plan.is_amplified:
            found = {"planned": self.plan, "observed": self.observed_guarantee}
        else:
            found = {"amplified": self.plan, "for who knows the batches": self.observed_guarantee}
        return {f"{name}{guarantees.only_if(each)}": each for name, each in found.items()}

    def fields(self, *, name_clients: bool = False) -> dict[str, Any]:
        """Returns it as fields of a report.

        Args:
          name_clients: Whether the client that is protected least is named, with its rounds,
            which tell it from all others as well.
        """
        found, guarantee = self.observed.participation, self.observed_guarantee
        worst, worst_case = self.worst_client, self.worst_case
        return {
            "keeps_plan": self.keeps_plan,
            "ledger_gap": self.observed.gap,
            "clients_beyond_plan": self.observed.num_outside_schema(),
            "alike_client_names": self.observed.num_alike_names,
            **self._sampling_fields(),
            **({} if self.times is None else self.times.to_dict()),
            "realised_num_rounds": found.num_rounds,
            "realised_num_clients": found.num_clients,
            "realised_separation": found.separation,
            "realised_largest_separation": found.largest_separation,
            "realised_max_participations": found.max_participations,
            "realised_sensitivity": guarantee.sensitivity,
            "realised_sensitivity_is_exact": guarantee.sensitivity.is_exact,
            "realised_noise_multiplier": guarantee.noise_multiplier,
            "realised_zcdp_rho": guarantee.rho,
            "realised_zcdp_delta": guarantee.zcdp_delta,
            "realised_epsilon": guarantee.epsilon,
            **attackers.rates(guarantee, "realised_"),
            "widened_zcdp_rho": None if worst_case is None else worst_case.rho,
            "widened_epsilon": None if worst_case is None else worst_case.epsilon,
            **(
                _no_rates("widened_")
                if worst_case is None
                else attackers.rates(worst_case, "widened_")
            ),
            "worst_client": worst.client_id if worst and name_clients else None,
            "worst_client_rounds": list(worst.rounds) if worst and name_clients else None,
            "worst_client_num_rounds": None if worst is None else len(worst.rounds),
            "worst_client_sensitivity": None if worst is None else worst.sensitivity,
            "worst_client_epsilon": None if worst is None else worst.epsilon,
            **INDEPENDENCE,
        }

    def warnings(self) -> list[str]:
        """Returns what a reader must know before anything else, as sentences."""
        found = []
        if self.worst_case is not None:
            beyond = counted(self.observed.num_outside_schema() or 0, "client")
            breaks = (
                "the times of the rounds allow more than the schema that is declared, whose "
                "guarantee is not shown."
                if self.times is not None
                else "the ledger breaks the schema that is declared, whose guarantee need not hold "
                f"for {beyond} that broke it; all others have it still."
                if not self.plan.is_amplified
                else f"the ledger contradicts its sampling scheme ({self.observed.deviation}), so "
                "that nothing is amplified."
            )
            found.append(
                f"WARNING: {breaks} {self._observed_sentences()} At worst, with the smaller "
                "separation and the larger number of participations of plan and observation: "
                f"{stated_pair(self.worst_case.epsilon, self.plan.delta)} (zero-out adjacency), "
                f"{ONLY_IF}. "
                f"{attackers.rates_remark(attackers.rates(self.worst_case))}"
            )
        gap = self.observed.gap
        if gap is not None and gap != NO_COUNTS:
            found.append(f"WARNING: {_incomplete(gap)}")
        if alike := self.observed.num_alike_names:
            found.append(f"WARNING: {client_names.warning(alike)}")
        return found

    def sentences(self) -> str:
        """Returns what the numbers mean of a plan that was not broken."""
        if not self.plan.is_amplified:
            return self._observed_sentences()
        if self.keeps_plan:
            drawn = "Every batch of the ledger is the one that the sampler's seed draws. "
            amplified = (
                f"{drawn_sentences(self.plan, '')} {'' if self.observed.num_absent else drawn}"
                "The seed must have come from secret random bits."
            )
        else:
            amplified = (
                f"{drawn_sentences(self.plan, ', if the scheme drew every batch of the ledger')} "
                "No ledger shows that: --sampling_seed, with the secret seed of the run, compares "
                "every draw of its participation.npz, as the run has done for its privacy.json."
            )
        return (
            f"{amplified} For whoever knows who was drawn, nothing is amplified. "
            f"{self._observed_sentences()} Who was drawn is a secret, and so is all that is "
            "said here of the observed participations."
        )

    def _sampling_fields(self) -> dict[str, Any]:
        if not self.plan.is_amplified:
            return {}
        # Never a number that the ledger shows not to hold.
        return {
            **sampling_fields(self.plan, is_broken=self.worst_case is not None),
            "sampling_deviation": self.observed.deviation,
            "absent_participations": self.observed.num_absent,
        }

    def _observed_sentences(self) -> str:
        found, planned = self.observed_guarantee, self.observed.mechanism.num_rounds
        if self.observed.gap is not None:
            return _incomplete(self.observed.gap)
        released = found.num_rounds
        observed = "observed" if self.times is None else "possible"
        guarantee = (
            f"The {observed} participations give {stated_pair(found.epsilon, self.plan.delta)} "
            "(zero-out adjacency), by the rounds between participations of one client and their "
            f"largest number{guarantees.only_if(found)}."
        )
        if self.times is not None:
            guarantee += f" {self.times.conditions()}"
        if released < planned:
            guarantee += (
                f" Only {released} of {planned} rounds were released: that helps only if neither "
                "the data nor what was released had a part in stopping."
            )
        return f"{guarantee} {attackers.rates_remark(attackers.rates(self.observed_guarantee))}"


def _incomplete(gap: str) -> str:
    """What is stated of a ledger that is not shown to be complete."""
    return (
        f"The ledger is not shown to be complete ({gap}), so nothing better than the plan is "
        "stated."
    )


def _no_rates(prefix: str = "") -> dict[str, float | None]:
    return dict.fromkeys(rate_field(rate, prefix) for rate in FALSE_POSITIVE_RATES)


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
