"""Membership inference under a guarantee: true positive rates as numbers, fields and sentences.

``accounting`` computes the highest true positive rates, and says what the attacker knows
and decides.
"""

import math

import numpy as np

from mf_aggregators import accounting
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
        return accounting.true_positive_rate(0.0, false_positive_rate)
    if not guarantee.is_amplified:
        return accounting.true_positive_rate(multiplier, false_positive_rate)
    seed = 0 if claim.certificate is None else claim.certificate.seed
    run = SampledRun(claim.taking_part, multiplier, claim.columns)  # type: ignore[arg-type]
    return accounting.sampled_true_positive_rate(
        run,
        false_positive_rate,
        guarantees=[(guarantee.epsilon, guarantee.delta)],
        seed=seed,
    )


def rates(guarantee: Guarantee | None, prefix: str = "") -> dict[str, float | None]:
    """Returns the true positive rates that are stated, from 0 to 1, as fields of a report.

    Args:
      guarantee: The guarantee; None where none is stated.
      prefix: What the names begin with, before ``true_positive_rate_at_0.01`` and its like.

    Returns:
      A rate for each of ``FALSE_POSITIVE_RATES``, in their order; None without a guarantee.
    """
    found: list[float | None] = [None] * len(FALSE_POSITIVE_RATES)
    if guarantee is not None:
        found = np.asarray(true_positive_rate(guarantee, np.array(FALSE_POSITIVE_RATES))).tolist()
    names = (f"{prefix}true_positive_rate_at_{rate:g}" for rate in FALSE_POSITIVE_RATES)
    return dict(zip(names, found, strict=True))


def _in_words(guarantee: Guarantee, of: str) -> list[str]:
    return [
        f"{percent(most or 0.0)} at {of}{100.0 * rate:g} %"
        for rate, most in zip(FALSE_POSITIVE_RATES, rates(guarantee).values(), strict=True)
    ]


def rates_in_brief(guarantee: Guarantee) -> str:
    """Returns the true positive rates that are stated, in a few words.

    Args:
      guarantee: The guarantee.
    """
    return " and ".join(_in_words(guarantee, "a false positive rate of "))


def rates_line(guarantee: Guarantee) -> str:
    """Returns the true positive rates that are stated, for a line of a table.

    Args:
      guarantee: The guarantee.
    """
    first, *others = _in_words(guarantee, "")
    return ", ".join([f"finds at most {first} false positives", *others])


def rates_sentence(guarantee: Guarantee, *, knows_rounds: bool = True) -> str:
    """Returns the true positive rates that are stated, as a sentence.

    Args:
      guarantee: The guarantee.
      knows_rounds: Whether the attacker knows who took part in which round. False for what is
        amplified, which holds towards nobody who does.
    """
    secrets = "its noise" if knows_rounds else "its noise and who was drawn"
    return (
        f"An attacker who knows everything of a run but its secrets ({secrets}), and guesses "
        "whether one client's updates were used or replaced by zeros, has a true positive rate of "
        f"at most {rates_in_brief(guarantee)}."
    )


def percent(rate: float) -> str:
    """Returns a rate in percent, rounded up.

    Args:
      rate: From 0 to 1.
    """
    # The product may be rounded down.
    value = 100.0 * rate
    return f"{rounded_up(value if rate == 1.0 else math.nextafter(value, math.inf), '.5g')} %"
