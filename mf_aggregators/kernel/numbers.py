"""Numbers of guarantees as text, rounded so that no printed number is better than the computed one.

An epsilon, a delta, a rho and a required noise multiplier are rounded up; a lower bound is rounded
down. A float stands for the shortest decimal that is read as that float: 1e-4 means 0.0001.
Decimal arithmetic is exact, so a printed number, read as a float again, is never on the wrong side
of the value.
"""

import decimal
import math

# Every decimal of so many digits survives as a float, so that floats can be formatted.
_MOST_DIGITS = 15
# Enough for all digits of any float.
_ALL_DIGITS = 1100
# Numbers outside of these bounds have an exponent where all digits are shown.
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
