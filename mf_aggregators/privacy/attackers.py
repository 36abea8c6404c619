"""What an attacker can do, as fields and as sentences beside every epsilon.

``accounting.trade_offs`` computes the bounds and says what the attacker knows and decides.
"""

import math
from collections.abc import Callable, Mapping

import numpy as np

from mf_aggregators.arrays import FloatArray
from mf_aggregators.printed_guarantees import rounded_up

# The false positive rates that every statement has a true positive rate for.
FALSE_POSITIVE_RATES = (0.01, 0.001)
_FORM = ".5g"


def fields(
    true_positive_rate: Callable[[FloatArray], float | FloatArray], prefix: str = ""
) -> dict[str, float | None]:
    """Returns the highest true positive rates that are stated, as fields of a report.

    Args:
      true_positive_rate: From false positive rates to the highest true ones.
      prefix: Of the names of the fields.

    Returns:
      ``true_positive_rate_at_0.01`` and its like, with rates from 0 to 1.
    """
    found = np.asarray(true_positive_rate(np.asarray(FALSE_POSITIVE_RATES)))
    return {
        name(rate, prefix): float(most)
        for rate, most in zip(FALSE_POSITIVE_RATES, found, strict=True)
    }


def name(false_positive_rate: float, prefix: str = "") -> str:
    """Returns the name of the field of the true positive rate at a false positive rate.

    Args:
      false_positive_rate: From 0 to 1.
      prefix: What the name begins with.
    """
    return f"{prefix}true_positive_rate_at_{false_positive_rate:g}"


def sentence(
    found: Mapping[str, float | None], prefix: str = "", *, knows_rounds: bool = True
) -> str:
    """Returns what the fields say as a sentence; nothing where nothing is stated.

    Args:
      found: Has the fields, with rates from 0 to 1, or None.
      prefix: Of the names of the fields.
      knows_rounds: Whether the attacker knows who took part in which round; False for what is
        amplified, which holds towards nobody who does.
    """
    brief = in_brief(found, prefix)
    if not brief:
        return ""
    secrets = "its noise" if knows_rounds else "its noise and who was drawn"
    return (
        f"An attacker who knows everything of a run but its secrets ({secrets}), and guesses "
        "whether one client's updates were used or replaced by zeros, has a true positive rate of "
        f"at most {brief}."
    )


def remark(found: Mapping[str, float | None], prefix: str = "") -> str:
    """Returns a shorter sentence, for what follows one of :func:`sentence`.

    Args:
      found: Has the fields, with rates from 0 to 1, or None.
      prefix: Of the names of the fields.
    """
    brief = in_brief(found, prefix)
    return f"An attacker's true positive rate is then at most {brief}." if brief else ""


def in_brief(found: Mapping[str, float | None], prefix: str = "") -> str:
    """Returns what the fields say in a few words; nothing where nothing is stated.

    Args:
      found: Has the fields, with rates from 0 to 1, or None.
      prefix: Of the names of the fields.
    """
    rates = {rate: found[name(rate, prefix)] for rate in FALSE_POSITIVE_RATES}
    return " and ".join(
        f"{percent(most)} at a false positive rate of {100.0 * rate:g} %"
        for rate, most in rates.items()
        if most is not None
    )


def line(found: Mapping[str, float | None]) -> str:
    """Returns what the fields say for a line of a table.

    Args:
      found: Has the fields, with rates from 0 to 1.
    """
    first, *others = (
        f"{percent(most)} at {100.0 * rate:g} %"
        for rate in FALSE_POSITIVE_RATES
        if (most := found[name(rate)]) is not None
    )
    return ", ".join([f"finds at most {first} false positives", *others])


def percent(rate: float) -> str:
    """Returns a rate in percent, rounded up.

    Args:
      rate: From 0 to 1.
    """
    # The product may be rounded down.
    value = 100.0 * rate
    return f"{rounded_up(value if rate == 1.0 else math.nextafter(value, math.inf), _FORM)} %"
