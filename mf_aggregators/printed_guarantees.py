"""Numbers of guarantees as text, rounded so that what is printed is never better than computed.

An epsilon, a delta, a rho and a noise multiplier that is required are rounded up, a lower bound
is rounded down. A float stands for the shortest decimal that is read as that float, as 0.0001 is
what 1e-4 means, and decimal arithmetic is exact: what is printed, read as a float again, is never
on the wrong side of the value.
"""

import decimal
import math

# What every decimal of so many digits survives as a float, so that floats can be formatted.
_MOST_DIGITS = 15
# Enough for all digits of any float.
_ALL_DIGITS = 1100


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
