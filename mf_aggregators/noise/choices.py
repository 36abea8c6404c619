"""Choices of an aggregator's user: a seed for tests, and the grid of sums.

The kernel refuses a grid whose sums could overflow. The checks here are about what a grid does to
means: no guarantee rests on them.
"""

import hashlib
import math
import warnings

import numpy as np

from mf_aggregators.kernel import validation
from mf_aggregators.kernel.arrays import IntArray
from mf_aggregators.kernel.integers import IntegerSums

# The number of updates is one of the integers of a secure sum. In fewer bits, it could wrap around
# to a number that is allowed.
_FEWEST_SECURE_BITS, _MOST_SECURE_BITS = 24, 62
# The largest change of an update by rounding, in clip norms.
_LARGEST_ROUNDING = 0.05
# The largest change of an indicator or a metric by rounding, as a fraction of its range.
_LARGEST_ROUNDING_OF_A_MEAN = 0.02


class FixedSeedWarning(UserWarning):
    """The noise comes from a seed that was given: whoever knows it can subtract the noise."""


def seed_of(number: int | None) -> IntArray | None:
    """Returns the (2,) int64 seed of a number that was given, for tests: of all of its digits.

    The caller's caller is warned of it.

    Args:
      number: A non-negative integer of any size; None for none, of which there is no seed.

    Raises:
      ValueError: If it is negative or no integer.
    """
    if number is None:
        return None
    said = "a fixed seed makes the noise predictable: use it in tests only."
    warnings.warn(said, FixedSeedWarning, stacklevel=3)
    number = validation.integer_at_least(number, 0, "seed")
    digest = hashlib.sha256(f"mf_aggregators seed {number}".encode()).digest()
    return np.frombuffer(digest, "<i8", count=2).astype(np.int64)


def integer_sums(
    secure_aggregation_bits: int | None, largest_cohort: int | None, clients_per_round: float
) -> IntegerSums:
    """Returns how updates become integers.

    Args:
      secure_aggregation_bits: The width of a secure sum's integers; None for an open sum.
      largest_cohort: The most updates in a sum; None for ``clients_per_round``, rounded up, in
        a secure sum, and for 2^22 in an open one.
      clients_per_round: The expected number of updates.

    Raises:
      ValueError: If a number is out of its range, or a cohort of the expected size could not be
        added up.
    """
    expected = math.ceil(validation.of_float32(clients_per_round, "clients_per_round"))
    if largest_cohort is not None:
        largest_cohort = validation.positive_integer(largest_cohort, "largest_cohort")
        if largest_cohort < expected:
            raise ValueError(
                f"largest_cohort must be at least clients_per_round, {expected}, found "
                f"{largest_cohort}."
            )
    if secure_aggregation_bits is None:
        return IntegerSums(largest_cohort or max(IntegerSums.largest_cohort, expected))
    bits = validation.positive_integer(secure_aggregation_bits, "secure_aggregation_bits")
    if not _FEWEST_SECURE_BITS <= bits <= _MOST_SECURE_BITS:
        raise ValueError(
            f"secure_aggregation_bits must be between {_FEWEST_SECURE_BITS} and "
            f"{_MOST_SECURE_BITS}, found {bits}."
        )
    return IntegerSums(largest_cohort or expected, bits, is_secure=True)


def rounding(sums: IntegerSums, num_parameters: int) -> float:
    """Returns the most that rounding to nearest changes an update by, in clip norms (L2).

    Args:
      sums: The grid.
      num_parameters: The entries of an update.
    """
    return math.sqrt(num_parameters) / (2.0 * sums.steps_per_clip_norm)


def check_rounding(sums: IntegerSums, num_parameters: int) -> None:
    """Raises ValueError if rounding could change updates of a size by more than 5 %.

    Args:
      sums: The grid.
      num_parameters: The entries of an update.
    """
    found = rounding(sums, num_parameters)
    if found > _LARGEST_ROUNDING:
        raise ValueError(
            f"in sums of {sums.largest_cohort} clients within {sums.bits} bits, rounding could "
            f"change an update of {num_parameters} parameters by {found:.2g} clip norms, "
            f"and {_LARGEST_ROUNDING:g} is allowed: use more secure_aggregation_bits or a "
            "smaller largest_cohort."
        )


def check_means(sums: IntegerSums, vector_norm: float, *weights: float) -> None:
    """Raises ValueError if rounding could change an indicator or a metric by 2 % of its range.

    Args:
      sums: The grid.
      vector_norm: The norm of the vectors that have indicators and metrics as coordinates.
      *weights: The length in the vector of the range of each kind; 0 for a kind without one.
    """
    step = vector_norm / sums.steps_per_clip_norm
    found = max((step / weight for weight in weights if weight > 0.0), default=0.0)
    if found > _LARGEST_ROUNDING_OF_A_MEAN:
        raise ValueError(
            f"in sums of {sums.largest_cohort} clients within {sums.bits} bits, rounding could "
            f"change the unclipped fraction or a private metric by {found:.2g} of its "
            f"range, and {_LARGEST_ROUNDING_OF_A_MEAN:g} is allowed: use more "
            "secure_aggregation_bits, a smaller largest_cohort or, for the fraction, a smaller "
            "clipped_count_stddev."
        )
