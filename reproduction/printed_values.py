"""Numbers as papers print them, and whether a computed one is the same to the printed digits."""

import dataclasses
import decimal
import re

# A bound may be printed in place of a number.
_PATTERN = re.compile(r"(<=|>=)?\s*(-?\d+(?:\.\d+)?(?:e-?\d+)?)")
# Half a digit is itself no number that float64 holds.
_SLACK = 1e-9


@dataclasses.dataclass(frozen=True)
class PrintedValue:
    """A number with its printed digits, or a bound.

    Attributes:
      text: As printed, ``74.4`` or ``<=1.15``.
      relation: ``=``, ``<=`` or ``>=``: how what is computed has to stand to the number.
      value: The number.
      half_digit: Half a unit of its last printed digit.
    """

    text: str
    relation: str
    value: float
    half_digit: float

    def agrees(self, computed: float) -> bool:
        """Returns whether a number rounds to the printed digits, or keeps the printed bound.

        Args:
          computed: The number; NaN agrees with nothing.

        Returns:
          Whether it is the same; for a bound, whether it is not beyond it by more than
          half a digit.
        """
        reach = self.half_digit * (1.0 + _SLACK)
        above, below = computed - self.value <= reach, self.value - computed <= reach
        return {"=": above and below, "<=": above, ">=": below}[self.relation]

    def relative_difference(self, computed: float) -> float | None:
        """Returns (computed - printed) / printed; None for a printed zero."""
        return None if self.value == 0.0 else (computed - self.value) / self.value


def parse(text: str) -> PrintedValue:
    """Reads a printed number.

    Args:
      text: A decimal number with the digits that were printed, after ``<=`` or ``>=`` if
        what was printed is a bound.

    Returns:
      The value.

    Raises:
      ValueError: If it is not one.
    """
    match = _PATTERN.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"a printed value must be a decimal number, found {text!r}.")
    number = decimal.Decimal(match[2])
    exponent = number.as_tuple().exponent
    assert isinstance(exponent, int)
    return PrintedValue(text, match[1] or "=", float(number), 0.5 * 10.0**exponent)
