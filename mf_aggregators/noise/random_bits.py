"""Random bits as a function of (seed, row, block): nothing is drawn in sequence.

Any block of any row can be drawn at any time, by any process, in any order, and is the same
bits: a row of noise need not be kept where it can be drawn again. A block has 16 words of 32
bits. Two sources:

- ChaCha20 (Bernstein 2008; RFC 8439 has its block function), a stream cipher: predicting a word
  from others means breaking it. The key is the seed, of 128 bits, as the cipher defines keys of
  this length; the counter is the block, and the nonce the row.
- Philox 4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), as
  TensorFlow computes it. It is several times as fast and passes tests of randomness, but it is
  no cipher: nobody claims that it withstands an attack on its key.

``tff.tensor_random_bits`` computes the same words in a graph.
"""

import enum
from typing import Any

import numpy as np

from mf_aggregators import validation

WORDS_PER_BLOCK = 16

# Rows are counters of 63 bits, and blocks of 61, each of four counters of Philox.
_ROW_LIMIT = 2**63
_BLOCK_LIMIT = 2**61

# Blocks whose temporaries stay in a processor's cache.
_TILE = 2**11
_LOW_32_BITS = 0xFFFFFFFF
_LOW_64_BITS = 0xFFFFFFFFFFFFFFFF

# "expand 16-byte k" as four little-endian integers: what the cipher's state begins with for keys
# of 128 bits.
CHACHA_CONSTANTS = (0x61707865, 0x3120646E, 0x79622D36, 0x6B206574)
CHACHA_DOUBLE_ROUNDS = 10

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


def blocks(
    source: NoiseSource, seed: np.ndarray, row: int, first_block: int, count: int
) -> np.ndarray:
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
    for start in range(0, count, _TILE):
        fill(seed, row, first_block + start, drawn[start : start + _TILE])
    return drawn


def checked_seed(seed: Any) -> np.ndarray:
    """Returns a seed, or raises ValueError unless it is a (2,) int64 array."""
    array = np.asarray(seed)
    if array.shape != (2,) or array.dtype != np.int64:
        raise ValueError(
            f"a seed must be an int64 array of shape (2,), found {array.dtype} of shape "
            f"{array.shape}."
        )
    return array


def _fill_from_chacha(seed: np.ndarray, row: int, first_block: int, drawn: np.ndarray) -> None:
    key = seed.astype("<i8").view("<u4")
    counters = np.arange(first_block, first_block + len(drawn), dtype=np.uint64)
    state = np.empty((WORDS_PER_BLOCK, len(drawn)), np.uint32)
    state[0:4] = np.array(CHACHA_CONSTANTS, np.uint32)[:, np.newaxis]
    state[4:8] = state[8:12] = key[:, np.newaxis]
    state[12] = counters & np.uint64(_LOW_32_BITS)
    state[13] = counters >> np.uint64(32)
    state[14], state[15] = row & _LOW_32_BITS, row >> 32
    drawn[:] = _chacha20(state).T


def _chacha20(state: np.ndarray) -> np.ndarray:
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
            b, c, d = (
                np.roll(row, -turn, axis=0) for row, turn in zip((b, c, d), turns, strict=True)
            )
    return np.concatenate([a, b, c, d]) + state


def _fill_from_philox(seed: np.ndarray, row: int, first_block: int, drawn: np.ndarray) -> None:
    key = int(seed[0]) & _LOW_64_BITS
    upper = (int(seed[1]) + row) & _LOW_64_BITS
    lower = np.arange(PHILOX_COUNTERS_PER_BLOCK * len(drawn), dtype=np.uint64)
    lower += np.uint64(PHILOX_COUNTERS_PER_BLOCK * first_block)
    words = drawn.reshape(-1, 4)
    for place, outputs in enumerate(_philox(key, lower, upper)):
        words[:, place] = outputs


def _philox(key: int, lower: np.ndarray, upper: int) -> tuple[np.ndarray, ...]:
    """Philox 4x32-10 of the counters ``lower + 2^64 upper``: four 32-bit integers of each.

    Integers of 32 bits sit in arrays of 64, in which a product of two of them is exact. What
    all counters share stays an array of one entry for as long as it is shared.
    """
    mask, half = np.uint64(_LOW_32_BITS), np.uint64(32)
    x0, x1 = lower & mask, lower >> half
    x2 = np.array([upper & _LOW_32_BITS], np.uint64)
    x3 = np.array([upper >> 32], np.uint64)
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
