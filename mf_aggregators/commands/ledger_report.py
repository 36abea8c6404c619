"""What mf-report says of a run's ledger: the guarantee of what took place."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from mf_aggregators import printed_guarantees
from mf_aggregators.factorizations import Factorization
from mf_aggregators.mechanism import Mechanism, Observed
from mf_aggregators.participation import Participation, SingleParticipation
from mf_aggregators.printed_guarantees import pair
from mf_aggregators.privacy import client_names, guarantees
from mf_aggregators.privacy.guarantees import Guarantee, WorstClient
from mf_aggregators.privacy.ledgers import Ledger

_ALL_DRAWN = " Every batch of the ledger is the one that the sampler's seed draws."


@dataclasses.dataclass(frozen=True)
class LedgerReport:
    """What follows from a ledger.

    Attributes:
      plan: The guarantee that was planned; amplified for a ledger of a data sampler.
      observed: What took place.
      realised: The guarantee of what took place; without amplification.
      worst_client: The client that is protected least. None for batches of a data sampler: who
        was drawn is a secret.
      worst_case: What holds for a plan that was broken; None for others.
    """

    plan: Guarantee
    observed: Observed
    realised: Guarantee
    worst_client: WorstClient | None
    worst_case: Guarantee | None

    @property
    def keeps_plan(self) -> bool | None:
        """Whether the plan was kept: ``Observed.keeps_participation``."""
        return self.observed.keeps_participation

    def guarantees(self) -> dict[str, Guarantee]:
        """Returns the guarantees that may be stated, by what they are called in a figure."""
        if self.worst_case is not None:
            return {"what took place": self.realised, "worst case": self.worst_case}
        if self.plan.sampling is None:
            return {"planned": self.plan, "what took place": self.realised}
        return {"amplified": self.plan, "for who knows the batches": self.realised}

    def fields(self, *, name_clients: bool = False) -> dict[str, Any]:
        """Returns it as fields of a report.

        Args:
          name_clients: Whether the client that is protected least is named, with its rounds,
            which tell it from all others as well.
        """
        worst, worst_case = self.worst_client, self.worst_case
        widened = _no_rates("widened_") if worst_case is None else worst_case.attacker("widened_")
        return {
            "keeps_plan": self.keeps_plan,
            "alike_client_names": self.observed.num_alike_names,
            **self._of_sampling(),
            **self._of_what_took_place(),
            "widened_epsilon": None if worst_case is None else worst_case.epsilon,
            **widened,
            "worst_client": worst.client_id if worst and name_clients else None,
            "worst_client_rounds": list(worst.rounds) if worst and name_clients else None,
            "worst_client_num_rounds": None if worst is None else len(worst.rounds),
            "worst_client_sensitivity": None if worst is None else worst.sensitivity,
            "worst_client_epsilon": None if worst is None else worst.epsilon,
        }

    def _of_sampling(self) -> dict[str, Any]:
        plan = self.plan
        if plan.sampling is None:
            return {}
        # Never a number that the ledger shows not to hold.
        is_broken = self.keeps_plan is False
        rates = _no_rates("amplified_") if is_broken else plan.attacker("amplified_")
        return {
            "sampling": plan.sampling.to_dict(),
            "amplified_noise_multiplier": plan.noise_multiplier,
            "amplified_epsilon": None if is_broken else plan.epsilon,
            "amplified_certificate": (
                None if is_broken or plan.certificate is None else plan.certificate.to_dict()
            ),
            **rates,
            "sampling_deviation": self.observed.deviation,
            "absent_participations": self.observed.num_absent,
        }

    def _of_what_took_place(self) -> dict[str, Any]:
        took_place, guarantee = self.observed.participation, self.realised
        return {
            "realised_num_rounds": took_place.num_rounds,
            "realised_num_clients": took_place.num_clients,
            "realised_separation": took_place.separation,
            "realised_largest_separation": took_place.largest_separation,
            "realised_max_participations": took_place.max_participations,
            "realised_sensitivity": guarantee.sensitivity,
            "realised_sensitivity_is_exact": guarantee.sensitivity_is_exact,
            "realised_noise_multiplier": guarantee.noise_multiplier,
            "realised_zcdp_rho": guarantee.zcdp_rho,
            "realised_zcdp_delta": guarantee.zcdp_delta,
            "realised_epsilon": guarantee.epsilon,
            **guarantee.attacker("realised_"),
        }


def read(
    ledger: Ledger,
    factorization: Factorization,
    schema: Participation,
    noise_multiplier: float,
    delta: float,
    sampling_seed: int | None = None,
) -> LedgerReport:
    """Returns what follows from a ledger.

    Args:
      ledger: Who took part in which round.
      factorization: What made the noise.
      schema: What clients were to keep to.
      noise_multiplier: Relative to the sensitivity under that schema.
      delta: Above 0 and below 1.
      sampling_seed: The secret seed of the data sampler, for a ledger that names its scheme; then
        every draw is compared with the ledger. None if it is not known.

    Raises:
      ValueError: If the ledger is broken, or its scheme does not fit the factorization.
    """
    if ledger.sampling is None:
        mechanism = Mechanism.of_one_schema(factorization, schema, noise_multiplier)
    else:
        # Of one participation, as schemes have it.
        ratio = factorization.sensitivity(schema).value
        ratio /= factorization.sensitivity(SingleParticipation()).value
        mechanism = Mechanism(factorization, ledger.sampling, noise_multiplier * ratio)
    observed = mechanism.observed(ledger, sampling_seed=sampling_seed)
    certification = guarantees.default_certification(show_progress=True)
    return LedgerReport(
        plan=mechanism.guarantee(delta, certification=certification),
        observed=observed,
        realised=observed.unamplified_guarantee(delta),
        worst_client=None if ledger.sampling is not None else observed.worst_client(delta),
        worst_case=observed.worst_case(delta) if observed.keeps_participation is False else None,
    )


def _no_rates(prefix: str) -> dict[str, float | None]:
    return {
        printed_guarantees.rate_field(each, prefix): None
        for each in printed_guarantees.FALSE_POSITIVE_RATES
    }


def is_sampled(found: Mapping[str, Any]) -> bool:
    """Returns whether fields are of a run whose batches a data sampler drew.

    Args:
      found: What :meth:`LedgerReport.fields` returned, or an empty mapping.
    """
    return "sampling" in found


def warning_of_names(found: Mapping[str, Any]) -> str | None:
    """Returns what to know before all else of names that look alike; None if there are none.

    Args:
      found: What :meth:`LedgerReport.fields` returned, or an empty mapping.
    """
    number = found.get("alike_client_names", 0)
    return f"WARNING: {client_names.warning(number)}" if number else None


def warning(found: Mapping[str, Any], num_rounds: int, delta: float) -> str | None:
    """Returns what a reader must know before anything else, or None.

    Args:
      found: What :meth:`LedgerReport.fields` returned.
      num_rounds: Of the factorization.
      delta: That the epsilons are for.
    """
    if found["keeps_plan"] is False:
        breaks = (
            f"the ledger contradicts its sampling scheme ({found['sampling_deviation']}), so that "
            "nothing is amplified."
            if is_sampled(found)
            else "the ledger breaks the schema that is declared, whose guarantee does not hold."
        )
        return (
            f"WARNING: {breaks} {_of_what_took_place(found, num_rounds, delta)} Whatever else "
            "might have happened within that separation, and the larger of both numbers of "
            f"participations: {pair(found['widened_epsilon'], delta)}-DP. "
            f"{printed_guarantees.rates_remark(found, 'widened_')}"
        )
    if absent := found.get("absent_participations"):
        return (
            f"WARNING: of the participations that the sampler's seed draws, {absent} are not in "
            "the ledger, and all that are in it were drawn. This is right if these clients could "
            "not be asked. If they took part, the ledger is not complete, and what is said below "
            "of what took place is too good."
        )
    return None


def text(found: Mapping[str, Any], num_rounds: int, delta: float) -> str:
    """Returns sentences that say what the fields of a plan mean that was not broken.

    Args:
      found: What :meth:`LedgerReport.fields` returned.
      num_rounds: Of the factorization.
      delta: That the epsilons are for.
    """
    guarantee = _of_what_took_place(found, num_rounds, delta)
    if is_sampled(found):
        return _text_of_sampling(found, num_rounds, delta, guarantee)
    return guarantee


def _of_what_took_place(found: Mapping[str, Any], num_rounds: int, delta: float) -> str:
    guarantee = (
        f"What took place gives {pair(found['realised_epsilon'], delta)}-DP (zero-out adjacency), "
        "by the rounds between participations of one client and their largest number."
    )
    if found["realised_num_rounds"] < num_rounds:
        guarantee += (
            f" Only {found['realised_num_rounds']} of {num_rounds} rounds were released: that "
            "helps only if neither the data nor what was released had a part in stopping."
        )
    return f"{guarantee} {printed_guarantees.rates_remark(found, 'realised_')}"


def _text_of_sampling(
    found: Mapping[str, Any], num_rounds: int, delta: float, guarantee: str
) -> str:
    """What a ledger gives that its scheme may have drawn, or its seed has drawn."""
    amplified = (
        f"Whoever observes all {num_rounds} rounds, and does not learn who was drawn, learns "
        f"about one client at most what {pair(found['amplified_epsilon'], delta)}-DP allows "
        "(zero-out adjacency)"
    )
    attacker = printed_guarantees.rates_sentence(found, "amplified_", knows_rounds=False)
    if found["keeps_plan"]:
        batches = "" if found["absent_participations"] else _ALL_DRAWN
        amplified += f". {attacker}{batches} The seed must have come from secret random bits."
    else:
        amplified += (
            f", if every batch was drawn by the scheme of the ledger. {attacker} No ledger shows "
            "that: --sampling_seed, with the secret seed of the run, compares every draw, as the "
            "run has done for its privacy.json."
        )
    return (
        f"{amplified} For whoever knows who was drawn, nothing is amplified. {guarantee} Who was "
        "drawn is a secret, and so is all that is said here of what took place."
    )
