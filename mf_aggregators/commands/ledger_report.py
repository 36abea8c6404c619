"""What mf-report says of a run's ledger: the guarantee of what took place."""

from collections.abc import Mapping
from typing import Any

from mf_aggregators.factorizations import Factorization
from mf_aggregators.participation import Participation, SingleParticipation
from mf_aggregators.privacy import guarantees, sampled_cohorts
from mf_aggregators.privacy.guarantees import Guarantee, RealisedParticipation
from mf_aggregators.privacy.ledgers import Ledger
from mf_aggregators.privacy.printed_guarantees import pair


def fields(
    ledger: Ledger,
    factorization: Factorization,
    schema: Participation,
    noise_multiplier: float,
    delta: float,
) -> dict[str, Any]:
    """Returns the guarantee of what took place, as fields of a report.

    Args:
      ledger: Who took part in which round.
      factorization: What made the noise.
      schema: What clients were to keep to.
      noise_multiplier: Relative to the sensitivity under that schema.
      delta: Above 0 and below 1.

    Returns:
      The realised separation, participations and guarantee, without amplification. For
      batches of a data sampler also its scheme and the amplified guarantee; whether the plan
      was kept is None there, because only the sampler's seed can show it, unless the ledger
      contradicts the scheme. The worst client is left out there: who was drawn is a secret.

    Raises:
      ValueError: If the ledger is broken, or its scheme does not fit the factorization.
    """
    took_place = guarantees.realised_participation(ledger.rounds_of_clients, ledger.num_rounds)
    if ledger.sampling is None:
        plan = guarantees.planned(factorization, schema, noise_multiplier, delta)
        keeps_plan: bool | None = guarantees.keeps_plan(schema, took_place)
        worst = guarantees.worst_client(plan, factorization, ledger)
        of_sampling: dict[str, Any] = {}
    else:
        single = factorization.sensitivity(SingleParticipation()).value
        of_schema = factorization.sensitivity(schema).value
        plan = guarantees.sampled(
            factorization, ledger.sampling, noise_multiplier * of_schema / single, delta
        )
        deviation = sampled_cohorts.deviation(
            ledger.sampling, len(ledger.client_ids), ledger.cohorts()
        )
        keeps_plan = None if deviation is None else False
        worst = None
        of_sampling = {
            "sampling": ledger.sampling.to_dict(),
            "amplified_noise_multiplier": plan.noise_multiplier,
            # Never a number that the ledger shows not to hold.
            "amplified_epsilon": None if keeps_plan is False else plan.epsilon,
            "sampling_deviation": deviation,
        }
    guarantee = guarantees.realised(plan, factorization, took_place)
    return {
        "keeps_plan": keeps_plan,
        **of_sampling,
        **_realised(took_place, guarantee),
        "widened_epsilon": (
            guarantees.worst_case(plan, factorization, took_place).epsilon
            if keeps_plan is False
            else None
        ),
        "worst_client": None if worst is None else worst.client_id,
        "worst_client_rounds": None if worst is None else list(worst.rounds),
        "worst_client_sensitivity": None if worst is None else worst.sensitivity,
        "worst_client_epsilon": None if worst is None else worst.epsilon,
    }


def _realised(took_place: RealisedParticipation, guarantee: Guarantee) -> dict[str, Any]:
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
        "realised_epsilon": guarantee.epsilon,
    }


def is_sampled(found: Mapping[str, Any]) -> bool:
    """Returns whether fields are of a run whose batches a data sampler drew.

    Args:
      found: What :func:`fields` returned, or an empty mapping.
    """
    return "sampling" in found


def text(found: Mapping[str, Any], num_rounds: int, delta: float) -> str:
    """Returns sentences that say what the fields mean.

    Args:
      found: What :func:`fields` returned.
      num_rounds: Of the factorization.
      delta: That the epsilons are for.
    """
    guarantee = (
        f"What took place gives {pair(found['realised_epsilon'], delta)}-DP, by the rounds "
        "between participations of one client and their largest number."
    )
    if found["realised_num_rounds"] < num_rounds:
        guarantee += (
            f" Only {found['realised_num_rounds']} of {num_rounds} rounds were released: that "
            "helps only if neither the data nor what was released had a part in stopping."
        )
    if found["keeps_plan"]:
        return guarantee
    if found["keeps_plan"] is None:
        amplified = f"{pair(found['amplified_epsilon'], delta)}-DP"
        return (
            f"Whoever observes all {num_rounds} rounds, and does not learn who was drawn, learns "
            f"about one client at most what {amplified} allows (zero-out adjacency), if every "
            "batch was drawn by the scheme of the ledger. No ledger shows that: the run compares "
            "its draws with its secret seed, and its privacy.json says what it found. For whoever "
            f"knows who was drawn, nothing is amplified. {guarantee} Who was drawn is a secret, "
            "and so is all that is said here of what took place."
        )
    breaks = (
        f"the ledger contradicts its sampling scheme ({found['sampling_deviation']}), so that "
        "nothing is amplified."
        if is_sampled(found)
        else "the ledger breaks the schema that is declared, whose guarantee does not hold."
    )
    return (
        f"WARNING: {breaks} {guarantee} Whatever else might have happened within that separation, "
        f"and the larger of both numbers of participations: "
        f"{pair(found['widened_epsilon'], delta)}-DP."
    )
