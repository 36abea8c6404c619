"""Numbers of guarantees as text, rounded so that what is printed is never better than computed.

An epsilon, a delta, a rho and a noise multiplier that is required are rounded up, a lower bound
is rounded down. A float stands for the shortest decimal that is read as that float, as 0.0001 is
what 1e-4 means, and decimal arithmetic is exact: what is printed, read as a float again, is never
on the wrong side of the value.

What membership inference can do stands beside every epsilon: the highest true positive rates at two
false positive rates, as fields and as sentences. ``kernel.trade_offs`` computes them and says
what the attacker knows and decides.
"""

import decimal
import math
from collections.abc import Mapping

# The false positive rates that every statement has a true positive rate for.
FALSE_POSITIVE_RATES = (0.01, 0.001)

# What every decimal of so many digits survives as a float, so that floats can be formatted.
_MOST_DIGITS = 15
# Enough for all digits of any float.
_ALL_DIGITS = 1100
# Outside of these, numbers in full have an exponent.
_LEAST_IN_FULL, _MOST_IN_FULL = decimal.Decimal("1e-6"), decimal.Decimal("1e16")


def rounded_up(value: float, form: str = ".4g") -> str:
    """Returns the least number of a format that is not below a value.

    Args:
      value: Any float.
      form: As ``format`` takes it: ``.4g`` for four significant digits, ``.3f`` for three
        decimals.

    Returns:
      The text; that of ``format`` for what is not finite.

    Raises:
      ValueError: If the format is no such one, or has more than 15 digits.
    """
    return _rounded(value, form, decimal.ROUND_CEILING)


def rounded_down(value: float, form: str = ".4g") -> str:
    """Returns the largest number of a format that is not above a value: for lower bounds.

    Args:
      value: Any float.
      form: As in :func:`rounded_up`.

    Returns:
      The text; that of ``format`` for what is not finite.

    Raises:
      ValueError: If the format is no such one, or has more than 15 digits.
    """
    return _rounded(value, form, decimal.ROUND_FLOOR)


def in_full(value: float, factor: int = 1) -> str:
    """Returns all digits of a number, as in ``48`` and ``1234.5649``.

    For what a guarantee assumes, and for flags: rounded either way, it would be another.

    Args:
      value: Any float.
      factor: A whole number to multiply it by exactly, as 100 for per cent.
    """
    if not math.isfinite(value):
        return format(value, "g")
    exact = decimal.Decimal(repr(float(value))) * factor
    if exact and not _LEAST_IN_FULL <= abs(exact) < _MOST_IN_FULL:
        return f"{exact.normalize():e}"
    text = f"{exact:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def counted(number: int, noun: str) -> str:
    """Returns a number of things, as in ``1 round`` and ``3 rounds``.

    Args:
      number: How many.
      noun: One of them.
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def pair(epsilon: float, delta: float, form: str = ".4g") -> str:
    """Returns the numbers of a guarantee as ``(8, 1e-06)``, both rounded up.

    Args:
      epsilon: The epsilon.
      delta: The delta, which is shown to six significant digits.
      form: The format of epsilon, as in :func:`rounded_up`.

    Raises:
      ValueError: If the format is none of :func:`rounded_up`.
    """
    return f"({rounded_up(epsilon, form)}, {rounded_up(delta, '.6g')})"


def stated_pair(epsilon: float, delta: float, form: str = ".4g") -> str:
    """Returns the numbers of a guarantee as ``(8, 1e-06)-DP``, or that there is no finite epsilon.

    Args:
      epsilon: The epsilon, or infinity.
      delta: As in :func:`pair`.
      form: As there.

    Raises:
      ValueError: As there.
    """
    if math.isfinite(epsilon):
        return f"{pair(epsilon, delta, form)}-DP"
    return f"no finite epsilon at delta {rounded_up(delta, '.6g')}"


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


def _rounded(value: float, form: str, rounding: str) -> str:
    digits, kind = form[1:-1], form[-1:]
    if form[:1] != "." or kind not in ("f", "g") or not digits.isdecimal():
        raise ValueError(f"form must be like '.4g' or '.3f', found {form!r}.")
    if not 0 < int(digits) <= _MOST_DIGITS:
        raise ValueError(f"form must have 1 to {_MOST_DIGITS} digits, found {form!r}.")
    if not math.isfinite(value):
        return format(value, form)
    exact = decimal.Decimal(repr(float(value)))
    if kind == "f":
        context = decimal.Context(prec=_ALL_DIGITS, rounding=rounding)
        return f"{exact.quantize(decimal.Decimal(1).scaleb(-int(digits)), context=context):f}"
    return format(float(decimal.Context(prec=int(digits), rounding=rounding).plus(exact)), form)
