"""Membership inference under a guarantee: true positive rates as numbers, fields and sentences.

``accounting.trade_offs`` computes the highest true positive rates, and says what the attacker knows
and decides.
"""

import math
from collections.abc import Mapping

import numpy as np

from mf_aggregators.accounting import trade_offs
from mf_aggregators.kernel.claim import Guarantee
from mf_aggregators.kernel.draws_of_clients import SampledRun
from mf_aggregators.kernel.numbers import FloatArray, rounded_up

# The false positive rates that every statement has a true positive rate for.
FALSE_POSITIVE_RATES = (0.01, 0.001)


def true_positive_rate(
    guarantee: Guarantee, false_positive_rate: float | FloatArray
) -> float | FloatArray:
    """Returns the highest true positive rate that an attacker can have.

    Of clients who draw their rounds for themselves, samples bound it, with the seed of the
    certificate. They are drawn when the first rate is asked for.

    Args:
      guarantee: The guarantee.
      false_positive_rate: From 0 to 1, or an array of them; others raise a ValueError.

    Returns:
      A rate of the argument's shape; 1 where epsilon is infinite.
    """
    claim, multiplier = guarantee.claim, guarantee.noise_multiplier
    if math.isinf(guarantee.epsilon):
        return trade_offs.true_positive_rate(0.0, false_positive_rate)
    if not guarantee.is_amplified:
        return trade_offs.true_positive_rate(multiplier, false_positive_rate)
    seed = 0 if claim.certificate is None else claim.certificate.seed
    run = SampledRun(claim.taking_part, multiplier, claim.columns)  # type: ignore[arg-type]
    return trade_offs.sampled_true_positive_rate(
        run,
        false_positive_rate,
        guarantees=[(guarantee.epsilon, guarantee.delta)],
        seed=seed,
    )


def rates(guarantee: Guarantee, prefix: str = "") -> dict[str, float | None]:
    """Returns the true positive rates that are stated, from 0 to 1, as fields of a report.

    Args:
      guarantee: The guarantee.
      prefix: The first part of the names: by default they are ``true_positive_rate_at_0.01`` and
        its like.
    """
    found = np.asarray(true_positive_rate(guarantee, np.asarray(FALSE_POSITIVE_RATES)))
    return {
        rate_field(rate, prefix): float(most)
        for rate, most in zip(FALSE_POSITIVE_RATES, found, strict=True)
    }


def rate_field(false_positive_rate: float, prefix: str = "") -> str:
    """Returns the name of the field that has the true positive rate at a false positive rate.

    Args:
      false_positive_rate: From 0 to 1.
      prefix: What the name begins with.
    """
    return f"{prefix}true_positive_rate_at_{false_positive_rate:g}"


def rates_in_brief(fields: Mapping[str, float | None]) -> str:
    """Returns true positive rates in a few words; nothing where none is stated.

    Args:
      fields: Has the fields of :func:`rate_field`, with rates from 0 to 1, or None.
    """
    return " and ".join(
        f"{percent(most)} at a false positive rate of {100.0 * rate:g} %"
        for rate in FALSE_POSITIVE_RATES
        if (most := fields[rate_field(rate)]) is not None
    )


def rates_sentence(fields: Mapping[str, float | None], *, knows_rounds: bool = True) -> str:
    """Returns true positive rates as a sentence; nothing where none is stated.

    Args:
      fields: As :func:`rates_in_brief` takes them.
      knows_rounds: Whether the attacker knows who took part in which round. False for what is
        amplified, which holds towards nobody who does.
    """
    brief = rates_in_brief(fields)
    if not brief:
        return ""
    secrets = "its noise" if knows_rounds else "its noise and who was drawn"
    return (
        f"An attacker who knows everything of a run but its secrets ({secrets}), and guesses "
        "whether one client's updates were used or replaced by zeros, has a true positive rate of "
        f"at most {brief}."
    )


def rates_remark(fields: Mapping[str, float | None]) -> str:
    """Returns a shorter sentence, to follow one of :func:`rates_sentence`.

    Args:
      fields: As :func:`rates_in_brief` takes them.
    """
    brief = rates_in_brief(fields)
    return f"An attacker's true positive rate is then at most {brief}." if brief else ""


def rates_line(fields: Mapping[str, float | None]) -> str:
    """Returns true positive rates for a line of a table.

    Args:
      fields: As :func:`rates_in_brief` takes them.
    """
    first, *others = (
        f"{percent(most)} at {100.0 * rate:g} %"
        for rate in FALSE_POSITIVE_RATES
        if (most := fields[rate_field(rate)]) is not None
    )
    return ", ".join([f"finds at most {first} false positives", *others])


def percent(rate: float) -> str:
    """Returns a rate in percent, rounded up.

    Args:
      rate: From 0 to 1.
    """
    # The product may be rounded down.
    value = 100.0 * rate
    return f"{rounded_up(value if rate == 1.0 else math.nextafter(value, math.inf), '.5g')} %"
