"""What the noise that is drawn adds to delta, beyond what real normal numbers do.

Rows of Z are drawn from tables of integers (``noise.discrete_gaussian``, which has the proof):
a guarantee (epsilon, delta) of real normal numbers is one of (epsilon, delta + p) of what is
drawn, and p is the delta0 of approximate zCDP as well. The failure probability p grows with the
numbers that are drawn, and does not depend on epsilon. Where it is not small beside delta, nothing
is stated.
"""

from mf_aggregators import validation
from mf_aggregators.errors import Error
from mf_aggregators.noise import discrete_gaussian

# The largest share of delta that the failure probability may take.
LARGEST_SHARE = 1e-3
# With less noise a client may move a number by more standard deviations than are covered.
LEAST_NOISE_MULTIPLIER = 1.0 / discrete_gaussian.LARGEST_SHIFT
# The coordinates of all rounds together that every statement charges for where nobody says how
# many there are. No noise is made for more (:func:`check_charged`).
DEFAULT_NUM_COORDINATES = 2**40


class TailError(Error, ValueError):
    """The noise that is drawn adds too large a part of delta for a guarantee to be stated."""


def check_charged(num_parameters: int, num_rounds: int) -> None:
    """Raises ValueError if a run draws more numbers than guarantees are stated for.

    Args:
      num_parameters: The numbers of a row: the model's parameters, and one more where the clip
        norm adapts.
      num_rounds: The rows.
    """
    if num_parameters * num_rounds > DEFAULT_NUM_COORDINATES:
        raise ValueError(
            f"noise of {num_parameters} numbers in each of {num_rounds} rounds is of "
            f"{num_parameters * num_rounds:.3g} numbers, and guarantees are stated for at most "
            f"2^40 ({DEFAULT_NUM_COORDINATES:.2g}): use a smaller model or fewer rounds."
        )


def delta_left(delta: float, noise_multiplier: float, num_coordinates: int) -> float:
    """Returns what of delta is left for real normal numbers.

    Args:
      delta: The delta of the guarantee.
      noise_multiplier: Standard deviation of Z over what one of a client's participations can
        change in C x (in L2 norm), above zero.
      num_coordinates: The numbers that are drawn: parameters times rounds, of all runs.

    Returns:
      A delta below the given one. If real normal numbers have it at some epsilon, the noise that
      is drawn has the given one.

    Raises:
      TailError: If less than 999 thousandths of delta are left, or there is so little noise that
        the bound does not hold.
      ValueError: If a number is out of its range.
    """
    failure = failure_probability(noise_multiplier, num_coordinates)
    if failure > LARGEST_SHARE * delta:
        raise TailError(
            f"the noise of {num_coordinates} numbers cannot be accounted for at delta {delta:g}: "
            f"the generator's failure probability is {failure:.2g}, which is more than a "
            "thousandth of delta. Use a larger delta, or fewer rounds or parameters."
        )
    return delta - failure


def failure_probability(noise_multiplier: float, num_coordinates: int) -> float:
    """Returns what the noise that is drawn adds to the delta of real normal numbers.

    It is the same at every epsilon.

    Args:
      noise_multiplier: As in :func:`delta_left`.
      num_coordinates: As there.

    Raises:
      TailError: If there is so little noise that the bound does not hold.
      ValueError: If a number is out of its range.
    """
    sigma = validation.positive_number(noise_multiplier, "noise_multiplier")
    if sigma * discrete_gaussian.LARGEST_SHIFT < 1.0:
        raise TailError(
            f"so little noise cannot be accounted for: a client may move a number by "
            f"{1.0 / sigma:.3g} standard deviations, and {discrete_gaussian.LARGEST_SHIFT:g} are "
            "covered. Use more noise (a smaller epsilon)."
        )
    return discrete_gaussian.failure_probability(num_coordinates)
