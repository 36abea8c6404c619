r"""Wide discrete Gaussian noise from 32-bit random words, by integer operations alone.

D(s) is the discrete Gaussian: P(k) proportional to exp(-k^2 / (2 s^2)) on the integers. Here

    Z = X1 + 2^10 X2 + 2^20 X3,    sigma^2 = s1^2 (1 + 2^20 + 2^40),    s1 = 2^11,

with X1, X2 and X3 from one table of D(s1), drawn by the alias method (Walker 1977; Vose 1991):
the lower 16 bits of a word choose a column, and the other 16 are compared with the first bits of
the column's threshold. Equality, of probability 2^-16, is a tie, and nine further words decide it,
which are compared with the other bits of the threshold. So weights have as many bits as the far
tail needs. Further words are those of a stream of their own, in the order of the ties: which draws
tie depends on the first words alone, so that further words are uniform whatever these are.

Below, Q is the distribution of a real normal number of variance s^2 = sigma^2 - 1/12, rounded to an
integer. **Claim:** P(Z = z) >= (1 - eta) Q(z) for all |z| <= COVERED, about 16 s.

1. *Table.* Its distribution is within one unit u of D(s1) given that it is in the table, which is
   above D(s1); so it is at least (1 - g) D(s1), g = u / (probability of the last column).
2. *Convolution.* Let A ~ D(a), B ~ D(b), Y = A + m B, v^2 = a^2 + m^2 b^2, t = a b / v. By
   completing the square, P(Y = n, B = j) is proportional to
   exp(-n^2 / (2 v^2)) exp(-(j - c n)^2 / (2 t^2)), c = m b^2 / v^2. By Poisson summation the
   sum over j is t sqrt(2 pi) (1 +- e), e = 2 sum_k exp(-2 pi^2 t^2 k^2), k = 1, 2, .... So the
   distribution of Y is between (1 - e) / (1 + e) and (1 + e) / (1 - e) times D(v). It is used
   twice: for W = X2 + 2^10 X3, and for X1 + 2^10 W.
3. *Ends of the tables.* Given Y = n, A has its centre at n a^2 / v^2, and |A| >= 2^15 only if
   |j - c n| >= R = (2^15 - |n| a^2 / v^2) / m. As (R + i)^2 >= R^2 + 2 R i, such j have a share
   of at most 2 exp(-R^2 / (2 t^2)) / (1 - exp(-R / t^2)) / (t sqrt(2 pi) (1 - e)), which is
   to be multiplied by ((1 + e) / (1 - e))^2 of W where B is W. This bounds how much of P(Z = z)
   would come from X1 and X2 outside their table. X3 is never outside its own: COVERED is the
   largest |z| for which the others exclude it.
4. *Rounded normal.* Q(k) is the normal density at k times the mean, over t in [-1/2, 1/2], of
   cosh(k t / s^2) exp(-t^2 / (2 s^2)). One factor grows with |t| and one falls, so by
   Chebyshev's inequality it is at most the product of the means, of which
   sinh(x/2) / (x/2) <= exp(x^2 / 24), x = k / s^2, bounds the first, and
   1 - 1 / (24 s^2) + 1 / (640 s^4) the second. With sigma / s <= 1 + 1 / (24 s^2) there remains
   Q(k) <= (1 + e) exp(k^2 / (288 s^4 sigma^2)) D(sigma)(k), if s^2 >= 3/8, where
   e = 2 sum_k exp(-2 pi^2 sigma^2 k^2).

**Consequence.** Each of N coordinates of a release is an integer function of what was released
before, plus Z. Let P' and Q' be its distributions in two neighbouring worlds, whose functions
differ by at most LARGEST_SHIFT s (given all randomness but that of one client and of Z), and P, Q
the same with rounded normals. Then Q' >= (1 - r) Q, where r is N eta, or 1 where some coordinate
of the release needs |z| > COVERED. Since

    max(0, P - e^eps (1 - r) Q) <= max(0, P - e^eps Q) + r P,

a guarantee (eps, delta) of rounded normals, which is one of real normal numbers followed by
rounding, gives P(S) - e^eps Q'(S) <= delta + E_P[r], with no factor e^eps. The total variation
between P' and P is at most N (eta + Q(|z| > COVERED)). So the release has the guarantee
(eps, delta + :func:`failure_probability` (N)).

**Approximate zCDP.** Z is bounded and its bounds move with the data, so every Renyi divergence of
P' from Q' may be infinite: no pure zCDP holds. But if rounded normals have shifts of at most
LARGEST_SHIFT s, of squares that sum up to at most (s / sigma)^2 whatever was released, then P' and
Q' are (rho, delta0)-approximate zCDP (Bun and Steinke, 2016, Def. 8.1) with rho = 1 / (2 sigma^2),
for the same rho, and delta0 = :func:`failure_probability` (N). *Proof.* Let a coordinate have the
means h and h' in the two worlds, given what was released before. Cut both real normals off to the
interval A of centre (h + h') / 2 and half length COVERED - |h - h'| / 2 - 1/2, and round.

1. *Order alpha.* The product of the densities to alpha and 1 - alpha is
   exp(alpha (alpha - 1) (h - h')^2 / (2 s^2)) times a normal density of mean
   alpha h + (1 - alpha) h'. For alpha > 1 that mean is no nearer to the centre of A than h, so A
   has no more of that density than of the one at h. It has as much of the one at h' as of that at
   h. So the divergence of the cut normals is at most that of whole ones, alpha (h - h')^2 /
   (2 s^2), and rounding makes it no larger. Backwards over the coordinates, the divergence of all
   of them, F from G, is at most alpha rho, and so is that of G from F.
2. *Probability.* A misses the normal at h with a probability t of at most that of a normal number
   beyond (COVERED - 1/2) / s - LARGEST_SHIFT standard deviations. Whatever rounds from A is within
   COVERED of h. So P' >= ((1 - eta) (1 - t))^N F >= (1 - N (eta + t)) F: with a coin of its own, P'
   has an event of that probability given which it is F. Likewise Q' and G. And N (eta + t) is at
   most :func:`failure_probability` (N), which has both of them twice.

All of this presumes words that are independent and uniform, which those of a generator can only
seem to be.
"""

import dataclasses
import decimal
import functools
import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np

from mf_aggregators.kernel import validation
from mf_aggregators.kernel.arrays import BoolArray, IntArray

COLUMN_BITS = 16
FRACTION_BITS = 32 - COLUMN_BITS
# Each of X1, X2, X3 counts in steps of 2^10 of the one before. A standard deviation of two such
# steps makes the sums of step 2 smooth, and the table ends at 16 standard deviations.
STEP_BITS = 10
SIGMA_OF_TABLE = Fraction(2 * 2**STEP_BITS)
# Further words of a threshold: enough that even the last column's probability, 2^-197, has a
# relative error below 2^-100.
TIE_WORDS = 9
# How far a contribution may move one coordinate, in standard deviations.
LARGEST_SHIFT = 5.0

_END = 2 ** (COLUMN_BITS - 1)
_STEP = 2**STEP_BITS
# The largest |Z| that can be drawn.
LARGEST = _END * (1 + _STEP + _STEP**2)
# The largest |z| at which the distribution is proved to be that of a rounded normal.
COVERED = _END * _STEP**2 - _END * (1 + _STEP) - 1
_VARIANCE_W = SIGMA_OF_TABLE**2 * (1 + _STEP**2)
VARIANCE = SIGMA_OF_TABLE**2 + _STEP**2 * _VARIANCE_W
# Of the real normal number whose rounding Z stands for, rounded down.
STANDARD_DEVIATION = math.nextafter(math.sqrt(VARIANCE - Fraction(1, 12)), 0.0)
# More than the rounding of the floating-point numbers in the bound.
_SLACK = 1.0 + 1e-6
_GUARD_BITS = 64


@dataclasses.dataclass(frozen=True)
class AliasTable:
    """The distribution of an integer, for drawing it from random words.

    Attributes:
      column_bits: The table has 2^column_bits columns, for values from -2^(column_bits - 1).
      fraction_bits: How many bits of a first word are compared with thresholds. All words have
        column_bits + fraction_bits bits.
      packed: (columns,) uint32: ``threshold << column_bits | alias`` with the first bits of the
        threshold; a column that is its own alias is always chosen.
      further: (columns, tie_words) uint32: the further words of thresholds.
    """

    column_bits: int
    fraction_bits: int
    packed: IntArray
    further: IntArray

    def draw(self, words: IntArray, tie_words: Callable[[int], IntArray]) -> IntArray:
        """Returns integers as a function of words.

        Args:
          words: An array of uint32.
          tie_words: Takes the number of ties and returns (ties, tie_words) uint32, for ties in
            the order of the array.

        Returns:
          int64 values, an array of the same shape.
        """
        shift, mask = np.uint32(self.column_bits), np.uint32(2**self.column_bits - 1)
        columns = words & mask
        entries = self.packed[columns]
        fractions, thresholds = words >> shift, entries >> shift
        kept = fractions < thresholds
        tied = np.nonzero(fractions == thresholds)
        if len(tied[0]):
            further = self.further[columns[tied]]
            kept[tied] = _is_less(tie_words(len(further)), further)
        chosen = np.where(kept, columns, entries & mask)
        return np.asarray(chosen.astype(np.int64) - 2 ** (self.column_bits - 1))


def _is_less(left: IntArray, right: IntArray) -> BoolArray:
    """Whether rows of words are less than others, as numbers whose first word counts most."""
    differs = left != right
    places = np.argmax(differs, axis=1)[:, np.newaxis]
    smaller = np.take_along_axis(left, places, 1) < np.take_along_axis(right, places, 1)
    return np.asarray(smaller[:, 0])


def integer_weights(sigma: Fraction, column_bits: int, total_bits: int) -> list[int]:
    """Returns weights of D(sigma) that sum to 2^total_bits exactly, by largest remainders.

    Args:
      sigma: The standard deviation; rational, so that tables are the same everywhere.
      column_bits: For the values from -2^(column_bits - 1) to 2^(column_bits - 1) - 1.
      total_bits: Their sum is 2^total_bits.

    Returns:
      A list of 2^column_bits integers, within one of the exact numbers.
    """
    # Errors of the fixed-point numbers below add up to at most (number of steps)^2 units.
    bits = total_bits + 2 * column_bits + _GUARD_BITS
    half = 2 ** (column_bits - 1)
    with decimal.localcontext() as context:
        context.prec = math.ceil(bits * math.log10(2.0)) + 10
        exponent = decimal.Decimal(sigma.denominator**2) / decimal.Decimal(2 * sigma.numerator**2)
        ratio = int((-exponent).exp() * 2**bits)
        factor = int((-2 * exponent).exp() * 2**bits)
    # exp(-k^2 x) is the product of exp(-(2 j - 1) x), j = 1, ..., k.
    falling = [2**bits]
    for _ in range(half):
        falling.append(falling[-1] * ratio >> bits)
        ratio = ratio * factor >> bits
    exact = falling[:0:-1] + falling[:-1]
    total = sum(exact)
    divided = [divmod(weight << total_bits, total) for weight in exact]
    weights = [quotient for quotient, _ in divided]
    missing = 2**total_bits - sum(weights)
    by_remainder = sorted(range(len(exact)), key=lambda column: -divided[column][1])
    for column in by_remainder[:missing]:
        weights[column] += 1
    return weights


def alias_table(
    sigma: Fraction, column_bits: int, fraction_bits: int, tie_words: int
) -> AliasTable:
    """Returns the table of D(sigma), whose distribution is that of its integer weights exactly.

    Args:
      sigma: The standard deviation.
      column_bits: The table has 2^column_bits columns.
      fraction_bits: How many bits of a first word are compared with thresholds.
      tie_words: How many further words a threshold has, of column_bits + fraction_bits bits each.
        Weights are multiples of 2^-((1 + tie_words) (column_bits + fraction_bits)).
    """
    word_bits = column_bits + fraction_bits
    threshold_bits = fraction_bits + tie_words * word_bits
    # A column holds 2^threshold_bits units: its own below the threshold, its alias's above.
    room = 2**threshold_bits
    thresholds = integer_weights(sigma, column_bits, column_bits + threshold_bits)
    aliases = list(range(len(thresholds)))
    poor = [column for column, weight in enumerate(thresholds) if weight < room]
    rich = [column for column, weight in enumerate(thresholds) if weight > room]
    while poor:
        column, donor = poor.pop(), rich[-1]
        aliases[column] = donor
        thresholds[donor] -= room - thresholds[column]
        if thresholds[donor] <= room:
            rich.pop()
            if thresholds[donor] < room:
                poor.append(donor)
    # Of a full column, which is its own alias, the threshold does not matter.
    firsts = [
        threshold >> tie_words * word_bits & (2**fraction_bits - 1) for threshold in thresholds
    ]
    packed = np.array(firsts, np.uint32) << np.uint32(column_bits) | np.array(aliases, np.uint32)
    shifts = range((tie_words - 1) * word_bits, -1, -word_bits)
    further = np.array(
        [[threshold >> shift & (2**word_bits - 1) for shift in shifts] for threshold in thresholds],
        np.uint32,
    )
    packed.setflags(write=False)
    further.setflags(write=False)
    return AliasTable(column_bits, fraction_bits, packed, further)


@functools.cache
def table() -> AliasTable:
    """Returns the table of X1, X2 and X3: 3 MB that take about a quarter of a second."""
    return alias_table(SIGMA_OF_TABLE, COLUMN_BITS, FRACTION_BITS, TIE_WORDS)


def from_words(words: IntArray, tie_words: Callable[[int], IntArray]) -> IntArray:
    """Returns Z as a function of random words.

    Args:
      words: (count, 3) uint32: for X1, X2 and X3 of each coordinate.
      tie_words: Takes the number of ties and returns (ties, TIE_WORDS) uint32, independent of
        ``words`` and of each other, for ties in the order of coordinates, and of X1, X2 and X3 in
        a coordinate. It is called at most once.

    Returns:
      (count,) int64, at most LARGEST in absolute value.

    Raises:
      ValueError: If ``words`` is not (count, 3) uint32.
    """
    if words.dtype != np.uint32 or words.ndim != 2 or words.shape[1] != 3:
        raise ValueError(
            f"words must be a uint32 array of shape (count, 3), found {words.dtype} of shape "
            f"{words.shape}."
        )
    drawn = table().draw(words, tie_words)
    return np.asarray(drawn[:, 0] + (drawn[:, 1] << STEP_BITS) + (drawn[:, 2] << 2 * STEP_BITS))


@functools.cache
def _relative_deficit() -> float:
    """The eta of the module's docstring."""
    rounding = 3.0 * _unit_share(SIGMA_OF_TABLE, TIE_WORDS)
    end_w, variance_of_x = Fraction(COVERED + _END, _STEP), SIGMA_OF_TABLE**2
    ripple_w, outside_w = _convolution(variance_of_x, variance_of_x, _STEP, _END, end_w)
    ripple_z, outside_z = _convolution(variance_of_x, _VARIANCE_W, _STEP, _END, Fraction(COVERED))
    outside = outside_w + outside_z * ((1.0 + ripple_w) / (1.0 - ripple_w)) ** 2
    variance = VARIANCE - Fraction(1, 12)
    # The e of step 4 is exp(-2^67) and less than any float.
    rounded = math.expm1(COVERED**2 / (288 * variance**2 * VARIANCE))
    # 1 / (1 + rounded) >= 1 - rounded, and (1 - e) / (1 + e) >= 1 - 2 e.
    return _SLACK * (rounding + outside + 2.0 * (ripple_w + ripple_z) + rounded)


def _unit_share(sigma: Fraction, tie_words: int) -> float:
    """A table's unit over the probability of its last column: the g of step 1."""
    # The sum of exp(-k^2 / (2 s^2)) is below s sqrt(2 pi) + 1.
    log_last = -float(_END**2 / (2 * sigma**2)) - math.log(sigma * math.sqrt(2.0 * math.pi) + 1.0)
    unit_bits = (1 + tie_words) * (COLUMN_BITS + FRACTION_BITS)
    return math.exp(-unit_bits * math.log(2.0) - log_last)


def _convolution(
    first: Fraction, second: Fraction, step: int, table_end: int, largest: Fraction
) -> tuple[float, float]:
    """The e of step 2, and the share of step 3.

    Args:
      first: The variance a^2.
      second: The variance b^2.
      step: The factor m.
      table_end: What |A| stays below in its table.
      largest: For |n| up to this.
    """
    variance = first + step**2 * second
    t_squared = float(first * second / variance)
    smallest = math.exp(-2.0 * math.pi**2 * t_squared)
    ripple = 2.0 * smallest / (1.0 - smallest)
    radius = float((table_end - largest * first / variance) / step)
    tail = 2.0 * math.exp(-(radius**2) / (2.0 * t_squared)) / -math.expm1(-radius / t_squared)
    return ripple, tail / (math.sqrt(2.0 * math.pi * t_squared) * (1.0 - ripple))


def failure_probability(num_coordinates: int) -> float:
    """Returns what Z adds to delta if it is accounted for as normal numbers.

    Divide by STANDARD_DEVIATION: a contribution moves a coordinate by at most LARGEST_SHIFT of
    them. It is the delta0 of approximate zCDP as well. The module's docstring has the proofs.

    Args:
      num_coordinates: The coordinates of all rounds together.

    Returns:
      A probability, at most 1.

    Raises:
      ValueError: If ``num_coordinates`` is not a positive integer.
    """
    coordinates = validation.positive_integer(num_coordinates, "num_coordinates")
    # Twice: in E_P[r], where noise moved by a contribution is beyond COVERED, and in the total
    # variation, where noise itself is.
    distance = COVERED / STANDARD_DEVIATION - LARGEST_SHIFT
    leaving = 2.0 * math.erfc(distance / math.sqrt(2.0) / _SLACK)
    return min(1.0, coordinates * (2.0 * _relative_deficit() + leaving))
