"""Membership inference beside an epsilon: true positive rates as fields and as sentences.

``accounting.trade_offs`` computes the highest true positive rates at two false positive rates, and
says what the attacker knows and decides.
"""

import math
from collections.abc import Mapping

from mf_aggregators.kernel.numbers import rounded_up

# The false positive rates that every statement has a true positive rate for.
FALSE_POSITIVE_RATES = (0.01, 0.001)


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
    """Returns a shorter sentence, for what follows one of :func:`rates_sentence`."""
    brief = rates_in_brief(fields)
    return f"An attacker's true positive rate is then at most {brief}." if brief else ""


def rates_line(fields: Mapping[str, float | None]) -> str:
    """Returns true positive rates for a line of a table."""
    first, *others = (
        f"{percent(most)} at {100.0 * rate:g} %"
        for rate in FALSE_POSITIVE_RATES
        if (most := fields[rate_field(rate)]) is not None
    )
    return ", ".join([f"finds at most {first} false positives", *others])


def percent(rate: float) -> str:
    """Returns a rate from 0 to 1 in percent, rounded up."""
    # The product may be rounded down.
    value = 100.0 * rate
    return f"{rounded_up(value if rate == 1.0 else math.nextafter(value, math.inf), '.5g')} %"
