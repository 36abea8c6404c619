"""Rows of Z from random bits: a function of (seed, row, coordinate) alone.

An entry is a discrete Gaussian (``discrete_gaussian``): an integer number of steps. Its
distribution is that of rounded normal numbers up to a proven failure probability, which
``kernel.gaussian`` charges to delta.

**Random bits** are a function of (seed, row, block): nothing is drawn in sequence. Any block of any
row can be drawn at any time, by any process, in any order, and is the same bits: a row of noise
need not be kept where it can be drawn again. A block has 16 words of 32 bits. Two sources:

- ChaCha20 (Bernstein 2008; RFC 8439 has its block function), a stream cipher: predicting a word
  from others means breaking it. The key is the seed, of 128 bits, as the cipher defines keys of
  this length; the counter is the block, and the nonce the row.
- Philox 4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), as
  TensorFlow computes it. It is several times as fast and passes tests of randomness, but it is
  no cipher: nobody claims that it withstands an attack on its key.

**Rows** are made in tiles of coordinates, of 65,536 each. Sixteen coordinates have three blocks of
the row's random bits, one each for X1, X2 and X3: coordinate c has word c modulo 16 of the blocks
3 floor(c / 16), and so on. Each tile has a stream of further words for its ties, in a range of
blocks of its own, and the j-th tie of the tile has the j-th group of words in it.

``tff.tensor_rows`` draws the same rows in a graph.
"""

import enum
import math
import secrets

import numpy as np

from mf_aggregators.kernel import discrete_gaussian, validation
from mf_aggregators.kernel.arrays import IntArray
from mf_aggregators.kernel.discrete_gaussian import TIE_WORDS

# Which rows of noise a seed gives: a run must not go on with rows of another format. Version 0.5.0
# had 1, version 1.0.0 had 3, and version 2.0.0 had 4.
NOISE_FORMAT = 5

# The step of Z's integers where the standard deviation is one; rounded up, for no less noise.
STEP = math.nextafter(1.0 / discrete_gaussian.STANDARD_DEVIATION, 1.0)
# X1, X2 and X3.
WORDS_PER_COORDINATE = 3
# Where the words for ties of tile 0 begin, and how many blocks each tile has for them, which is
# enough if everything ties.
FIRST_TIE_BLOCK = 2**60
TIE_BLOCKS_PER_TILE = 2**17
_COORDINATE_LIMIT = 2**56
# Coordinates whose temporaries stay in a processor's cache.
_COORDINATES_AT_ONCE = 2**13

# Coordinates of a tile: a power of two, since a tile's halves start at even integers.
TILE = 2**16

WORDS_PER_BLOCK = 16

# Rows are counters of 63 bits, and blocks of 61, each of four counters of Philox.
_ROW_LIMIT = 2**63
_BLOCK_LIMIT = 2**61

# Blocks whose temporaries stay in a processor's cache.
_BLOCKS_AT_ONCE = 2**11
_LOW_32_BITS = 0xFFFFFFFF
_LOW_64_BITS = 0xFFFFFFFFFFFFFFFF

# "expand 16-byte k" as four little-endian integers: what the cipher's state begins with for keys
# of 128 bits.
CHACHA_CONSTANTS = (0x61707865, 0x3120646E, 0x79622D36, 0x6B206574)
CHACHA_DOUBLE_ROUNDS = 10
# The four words of a row of the cipher's state, turned by so many.
_TURNED = [[(word + turn) % 4 for word in range(4)] for turn in range(4)]

_PHILOX_ROUNDS = 10
_PHILOX_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_PHILOX_KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
PHILOX_COUNTERS_PER_BLOCK = 4


class NoiseSource(enum.Enum):
    """Where random bits come from: the module's docstring compares the two."""

    CHACHA20 = "chacha20"
    PHILOX = "philox"


# The source of a run that names none.
DEFAULT_SOURCE = NoiseSource.CHACHA20


def fresh_seed() -> tuple[IntArray, IntArray]:
    """Draws the secret of a stream, 128 bits from the operating system, and its public name.

    Returns:
      Two independent (2,) int64 arrays: the seed and the name.
    """
    drawn = np.frombuffer(secrets.token_bytes(32), "<i8").astype(np.int64)
    return drawn[:2], drawn[2:]


def random_blocks(
    source: NoiseSource, seed: IntArray, row: int, first_block: int, count: int
) -> IntArray:
    """Returns consecutive blocks of a row.

    Args:
      source: Which generator.
      seed: (2,) int64: the stream's secret.
      row: From 0 to 2^63 - 1.
      first_block: From 0.
      count: How many blocks; the last one is below 2^61.

    Returns:
      (count, 16) uint32.

    Raises:
      ValueError: If the seed is not (2,) int64, or a number is out of its range.
    """
    seed = checked_seed(seed)
    row = validation.integer_at_least(row, 0, "row")
    first_block = validation.integer_at_least(first_block, 0, "first_block")
    count = validation.integer_at_least(count, 0, "count")
    if row >= _ROW_LIMIT:
        raise ValueError(f"row must be below 2^63, found {row}.")
    if first_block + count > _BLOCK_LIMIT:
        raise ValueError(f"blocks must be below 2^61, found {count} from block {first_block}.")
    fill = {NoiseSource.CHACHA20: _fill_from_chacha, NoiseSource.PHILOX: _fill_from_philox}[source]
    drawn = np.empty((count, WORDS_PER_BLOCK), np.uint32)
    for start in range(0, count, _BLOCKS_AT_ONCE):
        fill(seed, row, first_block + start, drawn[start : start + _BLOCKS_AT_ONCE])
    return drawn


def checked_seed(seed: IntArray) -> IntArray:
    """Returns a seed, or raises ValueError unless it is a (2,) int64 array."""
    array = np.asarray(seed)
    if array.shape != (2,) or array.dtype != np.int64:
        raise ValueError(
            f"a seed must be an int64 array of shape (2,), found {array.dtype} of shape "
            f"{array.shape}."
        )
    return array


def _fill_from_chacha(seed: IntArray, row: int, first_block: int, drawn: IntArray) -> None:
    key = seed.astype("<i8").view("<u4")
    counters = np.arange(first_block, first_block + len(drawn), dtype=np.uint64)
    state = np.empty((WORDS_PER_BLOCK, len(drawn)), np.uint32)
    state[0:4] = np.array(CHACHA_CONSTANTS, np.uint32)[:, np.newaxis]
    state[4:8] = state[8:12] = key[:, np.newaxis]
    state[12] = counters & np.uint64(_LOW_32_BITS)
    state[13] = counters >> np.uint64(32)
    state[14], state[15] = row & _LOW_32_BITS, row >> 32
    drawn[:] = _chacha20(state).T


def _chacha20(state: IntArray) -> IntArray:
    """The ChaCha20 block function (RFC 8439, Sec. 2.3) of (16, count) uint32 states."""
    a, b, c, d = state.copy().reshape(4, 4, -1)
    for _ in range(CHACHA_DOUBLE_ROUNDS):
        # Columns, and then diagonals, which stand in columns once rows are turned.
        for turns in ((1, 2, 3), (3, 2, 1)):
            for into, of, mixed, distance in (
                (a, b, d, 16),
                (c, d, b, 12),
                (a, b, d, 8),
                (c, d, b, 7),
            ):
                into += of
                mixed ^= into
                high = mixed << np.uint32(distance)
                mixed >>= np.uint32(32 - distance)
                mixed |= high
            b, c, d = (row[_TURNED[turn]] for row, turn in zip((b, c, d), turns, strict=True))
    return np.asarray(np.concatenate([a, b, c, d]) + state)


def _fill_from_philox(seed: IntArray, row: int, first_block: int, drawn: IntArray) -> None:
    key = int(seed[0]) & _LOW_64_BITS
    upper = (int(seed[1]) + row) & _LOW_64_BITS
    lower = np.arange(PHILOX_COUNTERS_PER_BLOCK * len(drawn), dtype=np.uint64)
    lower += np.uint64(PHILOX_COUNTERS_PER_BLOCK * first_block)
    words = drawn.reshape(-1, 4)
    for place, outputs in enumerate(_philox(key, lower, upper)):
        words[:, place] = outputs


def _philox(key: int, lower: IntArray, upper: int) -> tuple[IntArray, ...]:
    """Philox 4x32-10 of the counters ``lower + 2^64 upper``: four 32-bit integers of each.

    Integers of 32 bits sit in arrays of 64, in which a product of two of them is exact. What
    all counters share stays an array of one entry for as long as it is shared.
    """
    mask, half = np.uint64(_LOW_32_BITS), np.uint64(32)
    x0: IntArray = lower & mask
    x1: IntArray = lower >> half
    x2: IntArray = np.array([upper & _LOW_32_BITS], np.uint64)
    x3: IntArray = np.array([upper >> 32], np.uint64)
    key0, key1 = key & _LOW_32_BITS, key >> 32
    for _ in range(_PHILOX_ROUNDS):
        product0, product1 = x0 * _PHILOX_MULTIPLIERS[0], x2 * _PHILOX_MULTIPLIERS[1]
        x0 = (product1 >> half) ^ x1
        x0 ^= np.uint64(key0)
        x2 = (product0 >> half) ^ x3
        x2 ^= np.uint64(key1)
        product0 &= mask
        product1 &= mask
        x1, x3 = product1, product0
        key0 = (key0 + _PHILOX_KEY_INCREMENTS[0]) & _LOW_32_BITS
        key1 = (key1 + _PHILOX_KEY_INCREMENTS[1]) & _LOW_32_BITS
    return x0, x1, x2, x3


def integers(
    source: NoiseSource, seed: IntArray, row: int, first_coordinate: int, count: int
) -> IntArray:
    """Returns ``count`` coordinates of a row of Z, in steps.

    Which words decide a tie depends on the ties before it in its tile. So a range that begins
    within a tile costs as much as one from the tile's first coordinate on.

    Args:
      source: Where random bits come from.
      seed: (2,) int64: the stream's secret.
      row: The row of Z, from 0.
      first_coordinate: The first coordinate, from 0.
      count: How many.

    Returns:
      (count,) int64: multiplied by ``STEP``, numbers of standard deviation one.

    Raises:
      ValueError: If a number is out of its range.
    """
    first_coordinate = validation.integer_at_least(first_coordinate, 0, "first_coordinate")
    count = validation.integer_at_least(count, 0, "count")
    end = first_coordinate + count
    if end > _COORDINATE_LIMIT:
        raise ValueError(
            f"coordinates must be below 2^56, found {count} from coordinate {first_coordinate}."
        )
    seed, row = checked_seed(seed), validation.integer_at_least(row, 0, "row")
    tiles = range(first_coordinate // TILE, -(-end // TILE)) if count else range(0)
    entries = [_of_tile(source, seed, row, tile, min(TILE, end - tile * TILE)) for tile in tiles]
    if not entries:
        return np.empty(0, np.int64)
    return np.concatenate(entries)[first_coordinate % TILE :]


def _of_tile(source: NoiseSource, seed: IntArray, row: int, tile: int, count: int) -> IntArray:
    """(count,) int64: the discrete Gaussian of the first coordinates of a tile."""
    entries = np.empty(count, np.int64)
    num_ties = 0
    first_tie_block = FIRST_TIE_BLOCK + tile * TIE_BLOCKS_PER_TILE

    def tie_words(ties: int) -> IntArray:
        nonlocal num_ties
        first, end = num_ties * TIE_WORDS, (num_ties + ties) * TIE_WORDS
        block, skipped = divmod(first, WORDS_PER_BLOCK)
        needed = -(-end // WORDS_PER_BLOCK) - block
        words = random_blocks(source, seed, row, first_tie_block + block, needed)
        num_ties += ties
        return words.ravel()[skipped : skipped + end - first].reshape(ties, TIE_WORDS)

    for start in range(0, count, _COORDINATES_AT_ONCE):
        part = entries[start : start + _COORDINATES_AT_ONCE]
        groups = -(-len(part) // WORDS_PER_BLOCK)
        first_block = WORDS_PER_COORDINATE * (tile * TILE + start) // WORDS_PER_BLOCK
        blocks = random_blocks(source, seed, row, first_block, WORDS_PER_COORDINATE * groups)
        words = blocks.reshape(groups, WORDS_PER_COORDINATE, WORDS_PER_BLOCK).swapaxes(1, 2)
        words = words.reshape(-1, WORDS_PER_COORDINATE)[: len(part)]
        part[:] = discrete_gaussian.from_words(words, tie_words)
    return entries
