"""Numbers as figures write them: beside ticks, in sentences and as powers of ten."""

import math
import re
from collections.abc import Sequence

import matplotlib.ticker
import numpy as np


class PlainNumbers(matplotlib.ticker.Formatter):
    """Numbers with as few digits as tell them apart, without an offset somewhere else."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        """Returns the label of a single tick."""
        del pos
        return _number(x, 6)

    def format_ticks(self, values: Sequence[float]) -> list[str]:
        """Returns the labels of all ticks: on a linear axis with equally many decimals."""
        steps = np.diff(np.unique(np.asarray(values, float)))
        # The label of a single tick has nothing to be told apart from, and is right all the same.
        error = (
            0.01 * float(np.min(steps))
            if steps.size
            else 1e-3 * float(np.max(np.abs(values), initial=0.0))
        )
        labels: list[str] = []
        digits = 2
        for digits in range(2, 16):
            labels = [_number(value, digits) for value in values]
            if all(abs(float(f"{value:.{digits}g}") - value) <= error for value in values):
                break
        is_linear = self.axis is not None and self.axis.get_scale() == "linear"
        if not is_linear and any("$" in label for label in labels):
            labels = [_power(value, digits) for value in values]
        decimals = max((len(label.partition(".")[2]) for label in labels), default=0)
        if is_linear and decimals and not any("$" in label for label in labels):
            labels = [f"{value:,.{decimals}f}".replace("-", "−") for value in values]
        return labels


def scientific(number: float) -> str:
    """Returns a number as people write it in a sentence: 1e-6, not 1e-06.

    Args:
      number: The number.
    """
    return re.sub(r"e([-+])0*", r"e\1", f"{number:g}").replace("e+", "e")


def _number(value: float, digits: int) -> str:
    if value == 0.0 or not math.isfinite(value):
        return f"{abs(value):g}"
    rounded = float(f"{value:.{digits}g}")
    exponent = math.floor(math.log10(abs(rounded)))
    if not -4 <= exponent < 6:
        return _power(value, digits)
    text = f"{rounded:,.{max(0, digits - 1 - exponent)}f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return text.replace("-", "−")


def _power(value: float, digits: int) -> str:
    """A number times a power of ten."""
    if value == 0.0:
        return "0"
    mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
    mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
    factor = {"1": "", "-1": "-"}.get(mantissa, f"{mantissa}\\cdot ")
    return f"${factor}10^{{{int(exponent)}}}$"
