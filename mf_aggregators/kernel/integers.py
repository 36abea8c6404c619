"""Updates as integers, which are clipped and added up exactly, in NumPy.

A sum of floats depends on its order, and on what each of its terms is: taking one client out can
move it by more than that client's norm. Here each update is rounded to a grid that no data
determine, multiples of a quantization step, and its L2 norm is bounded after the rounding, in
integers. So one client moves the sum of any cohort, added up in any order and on any number of
machines, by at most the clip norm, in exact arithmetic and not only up to rounding.

The norm that an update is scaled by is itself a sum of integers, squares in units of the largest
entry, so that it depends on no order either: ``tff.grid`` clips to the same integers in a graph,
on any number of threads.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from mf_aggregators.kernel import validation
from mf_aggregators.kernel.arrays import FloatArray, IntArray, RealArray
from mf_aggregators.kernel.integer_rows import DEFAULT_LARGEST_COHORT

# The squares of an update's integers, of at most this many steps, add up within int64, and each of
# them fits into int32.
STEPS_PER_CLIP_NORM = 1 << 30
# Float64 squares and norms err by less, for any model that fits into a machine.
MARGIN = 2.0**-30
# Updates of no larger entry are zero: quotients of what hardly is a float lose their digits, and
# processors may take it for zero.
LEAST_UNIT = 1e-290
# Integers that are added up in the open.
_OPEN_BITS = 64
# Squares of at most one add up below 2 to this power, and have as many binary digits as floats.
_BITS_OF_SQUARES, _MOST_BITS_OF_A_SQUARE = 62, 52


@dataclasses.dataclass(frozen=True)
class IntegerSums:
    """How updates become integers that add up without overflow.

    Attributes:
      largest_cohort: The most updates in a sum.
      bits: The width of a sum's integers, one bit of which is the sign.
      is_secure: Whether a secure sum adds them up, modulo 2^bits.

    Raises:
      ValueError: If the updates of so many clients cannot be added up in so many bits, or these are
        more than 64.
    """

    largest_cohort: int = DEFAULT_LARGEST_COHORT
    bits: int = _OPEN_BITS
    is_secure: bool = False

    def __post_init__(self) -> None:
        validation.set_positive_integers(self, "largest_cohort", "bits")
        object.__setattr__(self, "is_secure", bool(self.is_secure))
        if self.bits > _OPEN_BITS or self.steps_per_clip_norm < 1:
            raise ValueError(
                f"the updates of {self.largest_cohort} clients cannot be added up in integers of "
                f"{self.bits} bits: use fewer clients in a round."
            )

    @property
    def steps_per_clip_norm(self) -> int:
        """The grid: updates are multiples of the clip norm over this number.

        The largest for which ``largest_cohort`` of them cannot overflow, up to 2^30.
        """
        most = ((1 << (self.bits - 1)) - 1) // self.largest_cohort
        return min(most, STEPS_PER_CLIP_NORM)


def units_of_squares(num_entries: int) -> float:
    """Returns 2^k: squares are rounded up to multiples of 2^-k, to be added up in int64.

    Args:
      num_entries: How many are added up, each at most 1.
    """
    bits = _BITS_OF_SQUARES - max(num_entries, 1).bit_length()
    return 2.0 ** min(bits, _MOST_BITS_OF_A_SQUARE)


def clip_to_grid(
    update: Sequence[RealArray], clip_norm: float, steps_per_clip_norm: int
) -> list[IntArray]:
    """Scales arrays to a joint L2 norm of at most ``clip_norm``, in quantization steps.

    Entries are rounded to the nearest step; where the norm would then exceed the clip norm, they
    are rounded towards zero instead, which never lengthens an update. The sum of squares that
    decides it is one of integers.

    Args:
      update: Arrays of floats or integers.
      clip_norm: Above zero; the step is ``clip_norm / steps_per_clip_norm``.
      steps_per_clip_norm: Steps in a clip norm, at most ``STEPS_PER_CLIP_NORM``.

    Returns:
      The arrays as int64, in steps, whose squares add up to at most ``steps_per_clip_norm ** 2``;
      all zeros if any entry is NaN or infinite.
    """
    scaled, _, _ = clipped(update, clip_norm, float(steps_per_clip_norm))
    steps: list[IntArray] = [np.rint(array).astype(np.int64) for array in scaled]
    most = steps_per_clip_norm**2
    if _sum_of_squares(steps) > most:
        # Less than the limit by more than all roundings of floats on the way here.
        steps = [(array * (1.0 - MARGIN)).astype(np.int64) for array in scaled]
        # Nothing is left to the sizes of roundings: what exceeds the norm all the same is zero.
        kept = int(_sum_of_squares(steps) <= most)
        steps = [array * kept for array in steps]
    return steps


def clipped(
    update: Sequence[RealArray], clip_norm: float, unit_norm: float
) -> tuple[list[FloatArray], bool, bool]:
    """Returns arrays that are scaled to a joint L2 norm, but for errors of floats.

    Args:
      update: Arrays of floats or integers.
      clip_norm: Above zero: a larger norm becomes this one.
      unit_norm: The number that stands for the clip norm in what is returned.

    Returns:
      Float64 arrays, all zeros if any entry is NaN or infinite; whether the norm was at most
      ``clip_norm``; and whether all entries were finite.
    """
    wide = [np.asarray(array, np.float64) for array in update]
    # The extremes of each array: they are NaN if an entry is.
    ends = [float(end) for array in wide if array.size for end in (array.max(), -array.min())]
    if not all(map(math.isfinite, ends)):
        return [np.zeros_like(array) for array in wide], True, False
    largest = max(ends, default=0.0)
    unit = largest if largest > LEAST_UNIT else 1.0
    in_units = [array / unit for array in wide]
    units = units_of_squares(sum(array.size for array in wide))
    squares = sum(
        int(np.ceil(np.square(array) * units).astype(np.int64).sum()) for array in in_units
    )
    norm_in_units = math.sqrt(float(squares) / units)
    # An update that is not above the clip norm keeps its length.
    is_within = unit * norm_in_units <= clip_norm
    scale = unit * (unit_norm / clip_norm) if is_within else unit_norm / max(norm_in_units, 1.0)
    return [array * scale for array in in_units], is_within, True


def _sum_of_squares(arrays: Sequence[IntArray]) -> int:
    return sum(int(np.square(array).sum()) for array in arrays)
