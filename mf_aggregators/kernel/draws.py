r"""Rows of Z: discrete Gaussian noise from random bits, a function of (seed, row, coordinate).

An entry is an integer number of steps. Its distribution is that of rounded normal numbers up to a
failure probability, which is proved below and which ``kernel.sensitivity`` charges to delta.

**Random bits** are a function of (seed, row, block): nothing is drawn in sequence. Any block of any
row can be drawn at any time, by any process, in any order, and is the same bits: a row of noise
need not be kept where it can be drawn again. A block has 16 words of 32 bits. They are those of
ChaCha20 (Bernstein 2008; RFC 8439 has its block function), a stream cipher: predicting a word from
others means breaking it. The key is the seed, of 128 bits, as the cipher defines keys of this
length; the counter is the block, and the nonce the row.

**Rows** are made in tiles of coordinates, of 65,536 each. Sixteen coordinates have three blocks of
the row's random bits, one each for X1, X2 and X3: coordinate c has word c modulo 16 of the blocks
3 floor(c / 16), and so on. Each tile has a stream of further words for its ties, in a range of
blocks of its own, and the j-th tie of the tile has the j-th group of words in it.

``tff.tensor_rows`` draws the same rows in a graph.

**The discrete Gaussian** is drawn from 32-bit words, by integer operations alone.

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
(eps, delta + N FAILURE_PER_NUMBER).

**Approximate zCDP.** Z is bounded and its bounds move with the data, so every Renyi divergence of
P' from Q' may be infinite: no pure zCDP holds. But if rounded normals have shifts of at most
LARGEST_SHIFT s, of squares that sum up to at most (s / sigma)^2 whatever was released, then P' and
Q' are (rho, delta0)-approximate zCDP (Bun and Steinke, 2016, Def. 8.1) with rho = 1 / (2 sigma^2),
for the same rho, and delta0 = N FAILURE_PER_NUMBER. *Proof.* Let a coordinate have the
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
   most N FAILURE_PER_NUMBER, which has both of them twice.

All of this presumes words that are independent and uniform, which those of a generator can only
seem to be.
"""

import concurrent.futures
import contextlib
import dataclasses
import decimal
import functools
import math
import operator
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import TypeAlias, TypeVar

import numpy as np

from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.numbers import IntArray, RealArray, ReleaseError

COLUMN_BITS = 16
_FRACTION_BITS = 32 - COLUMN_BITS
# Z = X1 + 2^10 X2 + 2^20 X3. The standard deviation of the X is two such factors, 2^11, which makes
# sums of multiples of 2^10 smooth; the table of the X ends at 16 standard deviations.
STEP_BITS = 10
_SIGMA_OF_TABLE = Fraction(2 * 2**STEP_BITS)
# The number of 32-bit words by which a threshold of the table is extended for ties: enough that
# even the last column's probability, 2^-197, has a relative error below 2^-100.
TIE_WORDS = 9
# The largest shift of one coordinate by a client, in standard deviations, that the proof covers.
LARGEST_SHIFT = 5.0
_END = 2 ** (COLUMN_BITS - 1)
_RADIX = 2**STEP_BITS
# The largest |Z| that can be drawn.
LARGEST = _END * (1 + _RADIX + _RADIX**2)
# The largest |z| at which the distribution of Z is proved to be that of a rounded normal number.
COVERED = _END * _RADIX**2 - _END * (1 + _RADIX) - 1
_VARIANCE = _SIGMA_OF_TABLE**2 * (1 + _RADIX**2 + _RADIX**4)
# The standard deviation, rounded down, of a real normal number that, rounded to an integer, has the
# distribution of Z but for the failure probability.
STANDARD_DEVIATION = math.nextafter(math.sqrt(_VARIANCE - Fraction(1, 12)), 0.0)
# A factor that exceeds all floating-point errors in the failure probability below.
_SLACK = 1.0 + 1e-6
_GUARD_BITS = 64
# The version of the function from a seed to rows of noise: a run must not continue with rows of
# another version. Release 0.5.0 had 1, release 1.0.0 had 3, and release 2.0.0 had 4.
NOISE_FORMAT = 5
# The real number that one integer step of Z stands for if the standard deviation is one; rounded
# up, so that there is no less noise than stated.
STEP = math.nextafter(1.0 / STANDARD_DEVIATION, 1.0)
# Each coordinate takes three random words: one each for X1, X2 and X3.
WORDS_PER_COORDINATE = 3
# The first block of random words for the ties of tile 0, and the number of such blocks for each
# tile, which suffices even if every coordinate ties.
FIRST_TIE_BLOCK = 2**60
TIE_BLOCKS_PER_TILE = 2**17
_COORDINATE_LIMIT = 2**56
# The number of coordinates of a tile: a power of two, so that every tile begins with a block of
# random words, and small enough that temporary arrays stay near a processor's cache.
TILE = 2**16
WORDS_PER_BLOCK = 16
# Row numbers have 63 bits. Block numbers have 61 bits, and every row has fewer blocks than that.
_ROW_LIMIT = 2**63
_LOW_32_BITS = 0xFFFFFFFF
# "expand 16-byte k" as four little-endian integers: the beginning of the cipher's state for keys
# of 128 bits.
_CHACHA_CONSTANTS = (0x61707865, 0x3120646E, 0x79622D36, 0x6B206574)
_DOUBLE_ROUNDS = 10
# Vectors with fewer coordinates than this are computed on one thread.
_FEWEST_FOR_THREADS = 2**17
# With at least this number of tiles, one tile of each row that an engine's function draws is
# compared with the kernel's own.
_FEW_TILES = 16
# The number of entries of a piece of an update: its temporary arrays stay in a processor's cache.
_ENTRIES_AT_ONCE = 2**15
# The most tasks into which the pieces of a vector are divided for threads.
_RUNS = 16
_Piece = TypeVar("_Piece")
_Value = TypeVar("_Value")
FillTile: TypeAlias = Callable[[IntArray, int, int, IntArray], None]
Squares: TypeAlias = Callable[[RealArray, float, float], int]
ToGrid: TypeAlias = Callable[[RealArray, float, float, bool, RealArray], None]
# Compiled functions, in the order of the attributes of an ``Engine``.
Compiled: TypeAlias = tuple[()] | tuple[FillTile] | tuple[FillTile, Squares, ToGrid]
# The indices of the four words in each row of ChaCha20's state after a rotation by 0 to 3 places.
_TURNED = [[(word + turn) % 4 for word in range(4)] for turn in range(4)]


@dataclasses.dataclass(frozen=True)
class _AliasTable:
    """An alias table: draws integers with given probabilities from random words.

    Attributes:
      column_bits: The table has 2^column_bits columns, for the integers from -2^(column_bits - 1)
        on.
      fraction_bits: The number of bits of a first word that are compared with thresholds. All words
        have column_bits + fraction_bits bits.
      packed: (columns,) uint32: ``threshold << column_bits | alias`` with the first bits of the
        threshold; a column that is its own alias is always chosen.
      further: (columns, tie_words) uint32: the further words of thresholds, which decide ties.
    """

    column_bits: int
    fraction_bits: int
    packed: IntArray
    further: IntArray

    def draw(self, words: IntArray, tie_words: Callable[[int], IntArray]) -> IntArray:
        """Returns integers of the table's distribution, as a function of random words.

        Args:
          words: An array of uint32, one for each integer.
          tie_words: Takes the number of ties and returns (ties, tie_words) uint32, for ties in the
            order of the array.

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
            further = self.further[columns[tied]].tolist()
            # Lists compare from their first elements on, as numbers do from their largest digit on.
            kept[tied] = [*map(operator.lt, tie_words(len(further)).tolist(), further)]
        chosen = np.where(kept, columns, entries & mask)
        return np.asarray(chosen.astype(np.int64) - 2 ** (self.column_bits - 1))


def _integer_weights(sigma: Fraction, column_bits: int, total_bits: int) -> list[int]:
    """Returns integer weights of D(sigma) with the sum 2^total_bits, by largest remainders.

    Args:
      sigma: The standard deviation; rational, so that tables are the same everywhere.
      column_bits: The weights are for the integers from -2^(column_bits - 1) to 2^(column_bits - 1)
        - 1.
      total_bits: The weights add up to 2^total_bits.

    Returns:
      A list of 2^column_bits integers, each within one of the exact real weight.
    """
    # Errors of the fixed-point numbers below add up to at most (number of steps)^2 units, which the
    # guard bits absorb.
    bits = total_bits + 2 * column_bits + _GUARD_BITS
    half = 2 ** (column_bits - 1)
    with decimal.localcontext() as context:
        context.prec = math.ceil(bits * math.log10(2.0)) + 10
        exponent = decimal.Decimal(sigma.denominator**2) / decimal.Decimal(2 * sigma.numerator**2)
        ratio = int((-exponent).exp() * 2**bits)
        factor = int((-2 * exponent).exp() * 2**bits)
    # The loop uses that exp(-k^2 x) is the product of exp(-(2 j - 1) x) over j = 1, ..., k.
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


def _alias_table(
    sigma: Fraction, column_bits: int, fraction_bits: int, tie_words: int
) -> _AliasTable:
    """Returns the alias table of D(sigma), which draws with its integer weights exactly.

    Args:
      sigma: The standard deviation.
      column_bits: The table has 2^column_bits columns.
      fraction_bits: How many bits of a first word are compared with thresholds.
      tie_words: The number of further words of a threshold, of column_bits + fraction_bits bits
        each. Weights are multiples of 2^-((1 + tie_words) (column_bits + fraction_bits)).
    """
    word_bits = column_bits + fraction_bits
    threshold_bits = fraction_bits + tie_words * word_bits
    # Each column holds 2^threshold_bits units: those below its threshold stand for the column's
    # integer, and those above it for the integer of its alias.
    room = 2**threshold_bits
    thresholds = _integer_weights(sigma, column_bits, column_bits + threshold_bits)
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
    # A full column is its own alias, so the value of its threshold does not matter.
    shifts, mask = range(tie_words * word_bits, -1, -word_bits), 2**word_bits - 1
    digits = [[threshold >> shift & mask for shift in shifts] for threshold in thresholds]
    words = np.array(digits, np.uint32)
    packed = words[:, 0] % 2**fraction_bits << np.uint32(column_bits) | np.array(aliases, np.uint32)
    further = np.ascontiguousarray(words[:, 1:])
    packed.setflags(write=False)
    further.setflags(write=False)
    return _AliasTable(column_bits, fraction_bits, packed, further)


@functools.cache
def table() -> _AliasTable:
    """Returns the alias table of X1, X2 and X3: 3 MB, computed in about a quarter of a second."""
    return _alias_table(_SIGMA_OF_TABLE, COLUMN_BITS, _FRACTION_BITS, TIE_WORDS)


def _from_words(words: IntArray, tie_words: Callable[[int], IntArray]) -> IntArray:
    """Returns Z = X1 + 2^10 X2 + 2^20 X3 as a function of random words.

    Args:
      words: (count, 3) uint32: the words for X1, X2 and X3 of each coordinate.
      tie_words: Takes the number of ties and returns (ties, TIE_WORDS) uint32, independent of
        ``words`` and of each other, for ties in the order of coordinates, and of X1, X2 and X3 in
        a coordinate. It is called at most once.

    Returns:
      (count,) int64, at most LARGEST in absolute value.
    """
    drawn = table().draw(words, tie_words)
    return np.asarray(drawn[:, 0] + (drawn[:, 1] << STEP_BITS) + (drawn[:, 2] << 2 * STEP_BITS))


# The eta of the module's docstring, rounded up; a test computes it again from the table's sizes.
_RELATIVE_DEFICIT = 4.1013809848254414e-34
# The delta that is added for each drawn number if Z is accounted for as a normal number with
# standard deviation STANDARD_DEVIATION that a client shifts by at most LARGEST_SHIFT standard
# deviations. The second term is counted twice: in E_P[r], where shifted noise is beyond COVERED,
# and in the total variation, where noise itself is.
FAILURE_PER_NUMBER = 2.0 * _RELATIVE_DEFICIT + 2.0 * math.erfc(
    (COVERED / STANDARD_DEVIATION - LARGEST_SHIFT) / math.sqrt(2.0) / _SLACK
)


def fresh_seed() -> tuple[IntArray, IntArray]:
    """Draws the secret of a stream, 128 bits from the operating system, and its public name.

    Returns:
      Two independent (2,) int64 arrays: the seed and the name.
    """
    drawn = np.frombuffer(secrets.token_bytes(32), "<i8").astype(np.int64)
    return drawn[:2], drawn[2:]


def generator_of(seed: int, *coordinates: int) -> np.random.Generator:
    """Returns a random generator that is a function of a seed and of integer coordinates alone.

    Args:
      seed: Any non-negative integer.
      *coordinates: Non-negative integers: a ``random_streams.Stream`` and at least one more, or,
        for a cohort, the round alone.

    Returns:
      The generator; different coordinates give independent generators.
    """
    sequence = np.random.SeedSequence(entropy=seed, spawn_key=coordinates)
    return np.random.Generator(np.random.Philox(sequence))


def _random_blocks(seed: IntArray, row: int, first_block: int, count: int) -> IntArray:
    """Returns consecutive blocks of 16 random words that belong to a row of Z.

    Args:
      seed: (2,) int64: the stream's secret.
      row: The row, from 0 to 2^63 - 1.
      first_block: The first block, from 0.
      count: The number of blocks; the last block is below 2^61.

    Returns:
      (count, 16) uint32. Arguments are not checked: ``integers`` does that.
    """
    counters = np.arange(first_block, first_block + count, dtype=np.uint64)
    state = np.empty((WORDS_PER_BLOCK, count), np.uint32)
    state[0:4] = np.array(_CHACHA_CONSTANTS, np.uint32)[:, np.newaxis]
    state[4:8] = state[8:12] = seed.astype("<i8").view("<u4")[:, np.newaxis]
    state[12] = counters & np.uint64(_LOW_32_BITS)
    state[13] = counters >> np.uint64(32)
    state[14], state[15] = row & _LOW_32_BITS, row >> 32
    return np.ascontiguousarray(_chacha20(state).T)


def checked_seed(seed: IntArray) -> IntArray:
    """Returns the seed as an array, or raises ValueError unless it is a (2,) int64 array."""
    array = np.asarray(seed)
    if array.shape != (2,) or array.dtype != np.int64:
        found = f"{array.dtype} of shape {array.shape}"
        raise ValueError(f"a seed must be an int64 array of shape (2,), found {found}.")
    return array


def _chacha20(state: IntArray) -> IntArray:
    """Computes the ChaCha20 block function (RFC 8439) of (16, count) uint32 states."""
    a, b, c, d = state.copy().reshape(4, 4, -1)
    for _ in range(_DOUBLE_ROUNDS):
        # A column round, then a diagonal round: rotating the rows of the state turns its diagonals
        # into columns.
        for turns in ((1, 2, 3), (3, 2, 1)):
            steps = (a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)
            for into, of, mixed, distance in steps:
                into += of
                mixed ^= into
                high = mixed << np.uint32(distance)
                mixed >>= np.uint32(32 - distance)
                mixed |= high
            b, c, d = (row[_TURNED[turn]] for row, turn in zip((b, c, d), turns, strict=True))
    return np.asarray(np.concatenate([a, b, c, d]) + state)


@dataclasses.dataclass(frozen=True)
class Engine:
    """Threads and compiled functions that compute the same numbers faster, bit for bit.

    Attributes:
      pool: The threads; None to compute on the caller's thread alone.
      fill_tile: Takes a seed, a row, a tile and a (TILE,) int64 array, which it fills with the
        numbers of ``integers``; None for the kernel's own function. ``integers`` compares one tile
        with it.
      squares: A function that replaces ``integers._squares``; None for the kernel's own.
      to_grid: A function that replaces ``integers._to_grid``; None for the kernel's own. If
        ``squares`` or ``to_grid`` is wrong, the clip norm still holds: the kernel adds up the
        squares of the integers that they make.
    """

    pool: concurrent.futures.Executor | None = None
    fill_tile: FillTile | None = None
    squares: Squares | None = None
    to_grid: ToGrid | None = None

    def over(
        self, function: Callable[[_Piece], _Value], pieces: Sequence[_Piece]
    ) -> Sequence[_Value]:
        """Applies a function to pieces of a vector, on the engine's threads if there are any.

        Args:
          function: The function; its calls must not depend on one another.
          pieces: The arguments of the calls.
        """
        if self.pool is None:
            return [*map(function, pieces)]
        length = max(1, -(-len(pieces) // _RUNS))
        runs = [pieces[first : first + length] for first in range(0, len(pieces), length)]
        found = self.pool.map(lambda run: [*map(function, run)], runs)
        return [value for run in found for value in run]

    @staticmethod
    def pieces(arrays: Sequence[RealArray]) -> list[RealArray]:
        """Returns the flat pieces of arrays in order, as views if the arrays are contiguous."""
        # Masked arrays, as an example, would leave out entries of sums and maxima, so all become
        # plain arrays.
        flats = [np.ravel(np.asarray(each)) for each in arrays]
        starts = [(flat, range(0, len(flat), _ENTRIES_AT_ONCE)) for flat in flats]
        return [flat[start : start + _ENTRIES_AT_ONCE] for flat, of in starts for start in of]

    @classmethod
    @contextlib.contextmanager
    def of_size(cls, size: int, functions: Compiled = ()) -> Iterator["Engine"]:
        """Yields an engine with a thread for each core that the process may use.

        Args:
          size: The number of coordinates to compute; if it is small, no threads are used.
          functions: The compiled functions.
        """
        # Some systems do not tell which cores a process may use: all cores count there.
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        # The executor starts a thread only when there is work for it.
        with concurrent.futures.ThreadPoolExecutor(cores) as pool:
            yield cls(pool if size >= _FEWEST_FOR_THREADS else None, *functions)


# The engine without threads and without compiled functions.
PLAIN = Engine()


def integers(
    seed: IntArray, row: int, first_coordinate: int, count: int, engine: Engine = PLAIN
) -> IntArray:
    """Returns ``count`` coordinates of a row of Z, as integers in steps of Z.

    The words that decide a tie depend on the earlier ties in its tile. So a range that begins
    within a tile costs as much as a range from the tile's first coordinate on.

    Args:
      seed: (2,) int64: the stream's secret.
      row: The row of Z, from 0.
      first_coordinate: The first coordinate, from 0.
      count: The number of coordinates.
      engine: How tiles are drawn. If a compiled function draws whole tiles, one tile, chosen at
        random, is compared with the kernel; if there are fewer than 16 tiles, with a probability of
        the number of tiles over 16.

    Returns:
      (count,) int64: multiplied by ``STEP``, numbers of standard deviation one.

    Raises:
      ReleaseError: If the compiled function differs from the kernel where they are compared.
      ValueError: If a number is out of its range.
    """
    first_coordinate = numbers.integer_at_least(first_coordinate, 0, "first_coordinate")
    count = numbers.integer_at_least(count, 0, "count")
    seed, row = checked_seed(seed), numbers.integer_at_least(row, 0, "row")
    if first_coordinate + count > _COORDINATE_LIMIT or row >= _ROW_LIMIT:
        found = f"{count} from coordinate {first_coordinate} of row {row}"
        raise ValueError(f"coordinates must be below 2^56 and row below 2^63, found {found}.")
    first_tile, skipped = divmod(first_coordinate, TILE)
    drawn = np.empty(skipped + count if count else 0, np.int64)
    again = secrets.randbelow(max(len(drawn) // TILE, _FEW_TILES))

    def draw(number: int) -> None:
        part, tile = drawn[number * TILE : (number + 1) * TILE], first_tile + number
        if engine.fill_tile is None or len(part) < TILE:
            part[:] = _of_tile(seed, row, tile, len(part))
            return
        engine.fill_tile(seed, row, tile, part)
        if number == again and not np.array_equal(part, _of_tile(seed, row, tile, TILE)):
            how = "uninstall numba, or set NUMBA_DISABLE_JIT=1"
            raise ReleaseError(f"The compiled function and the kernel draw different noise: {how}.")

    engine.over(draw, range(-(-len(drawn) // TILE)))
    return drawn[skipped:]


def _of_tile(seed: IntArray, row: int, tile: int, count: int) -> IntArray:
    """Returns (count,) int64: the discrete Gaussian numbers of the first coordinates of a tile."""

    def tie_words(ties: int) -> IntArray:
        first, needed = FIRST_TIE_BLOCK + tile * TIE_BLOCKS_PER_TILE, ties * TIE_WORDS
        words = _random_blocks(seed, row, first, -(-needed // WORDS_PER_BLOCK))
        return words.ravel()[:needed].reshape(ties, TIE_WORDS)

    groups = -(-count // WORDS_PER_BLOCK)
    first_block = WORDS_PER_COORDINATE * (tile * TILE) // WORDS_PER_BLOCK
    blocks = _random_blocks(seed, row, first_block, WORDS_PER_COORDINATE * groups)
    words = blocks.reshape(groups, WORDS_PER_COORDINATE, WORDS_PER_BLOCK).swapaxes(1, 2)
    return _from_words(words.reshape(-1, WORDS_PER_COORDINATE)[:count], tie_words)
