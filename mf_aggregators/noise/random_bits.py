"""Integers of 64 random bits as a function of (seed, row, index): nothing is drawn in sequence.

Any range of any row can be drawn at any time, by any process, in any order, and is the same
bits: a row of noise need not be kept where it can be drawn again. Two sources:

- Philox 4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), as
  TensorFlow computes it, so that a graph and NumPy draw the same integers. It passes tests of
  randomness and is no cipher: nobody claims that it withstands an attack on its key.
- AES-256 in counter mode: predicting an integer from others means breaking AES. Needs the
  ``cryptography`` package.

Both number 128-bit blocks of two integers by a counter, so ranges start at even indices.
"""

import enum
from typing import Any

import numpy as np

from mf_aggregators import validation

# Rows and indices are counters of 63 bits: they fit an int64 everywhere.
_COUNTER_LIMIT = 2**63

# 2^15 counters of Philox and its temporaries stay in a processor's cache.
_PHILOX_PIECE = 2**15
_PHILOX_ROUNDS = 10
_PHILOX_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_PHILOX_KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
_LOW_32_BITS = 0xFFFFFFFF
_LOW_64_BITS = 0xFFFFFFFFFFFFFFFF

_AES_BLOCK_BYTES = 16
_AES_KEY_BYTES = 32
# Changing it changes every integer of the AES source.
_AES_KEY_INFO = b"mf_aggregators rows of Z: AES-256-CTR"


class NoiseSource(enum.Enum):
    """Where random bits come from: the module's docstring compares the two."""

    PHILOX = "philox"
    AES = "aes"


def integers(
    source: NoiseSource, seed: np.ndarray, row: int, first_index: int, count: int
) -> np.ndarray:
    """Returns the integers ``first_index``, ..., ``first_index + count - 1`` of a row.

    Args:
      source: Which generator.
      seed: (2,) int64: the stream's secret.
      row: From 0 to 2^63 - 1.
      first_index: An even number.
      count: How many integers; the last index is below 2^63.

    Returns:
      (count,) uint64.

    Raises:
      ValueError: If the seed is not (2,) int64, ``first_index`` is odd, or a number is out
        of its range.
      ImportError: If the AES source is asked for and ``cryptography`` is not installed.
    """
    seed = checked_seed(seed)
    row = validation.integer_at_least(row, 0, "row")
    first_index = validation.integer_at_least(first_index, 0, "first_index")
    count = validation.integer_at_least(count, 0, "count")
    if row >= _COUNTER_LIMIT:
        raise ValueError(f"row must be below 2^63, found {row}.")
    if first_index % 2:
        raise ValueError(f"first_index must be even, found {first_index}.")
    if first_index + count > _COUNTER_LIMIT:
        raise ValueError(
            f"indices must be below 2^63, found {count} integers from index {first_index}."
        )
    blocks = (count + 1) // 2
    drawn = np.empty(2 * blocks, np.uint64)
    if blocks and NoiseSource(source) is NoiseSource.AES:
        _fill_from_aes(seed, row, first_index // 2, drawn)
    elif blocks:
        _fill_from_philox(seed, row, first_index // 2, drawn)
    return drawn[:count]


def checked_seed(seed: Any) -> np.ndarray:
    """Returns a seed, or raises ValueError unless it is a (2,) int64 array."""
    array = np.asarray(seed)
    if array.shape != (2,) or array.dtype != np.int64:
        raise ValueError(
            f"a seed must be an int64 array of shape (2,), found {array.dtype} of shape "
            f"{array.shape}."
        )
    return array


def _fill_from_philox(seed: np.ndarray, row: int, first_counter: int, drawn: np.ndarray) -> None:
    key = int(seed[0]) & _LOW_64_BITS
    upper = (int(seed[1]) + row) & _LOW_64_BITS
    for start in range(0, len(drawn) // 2, _PHILOX_PIECE):
        piece = drawn[2 * start : 2 * (start + _PHILOX_PIECE)]
        lower = np.arange(len(piece) // 2, dtype=np.uint64)
        lower += np.uint64(first_counter + start)
        outputs = _philox(key, lower, upper)
        piece[0::2] = outputs[0] | (outputs[1] << np.uint64(32))
        piece[1::2] = outputs[2] | (outputs[3] << np.uint64(32))


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


def _fill_from_aes(seed: np.ndarray, row: int, first_counter: int, drawn: np.ndarray) -> None:
    try:
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF
    except ImportError as error:
        raise ImportError(
            "the AES source of random bits needs the package cryptography: install it with "
            "'pip install cryptography'."
        ) from error
    # Seeds are uniform, so no salt is needed; the derivation makes 256 bits of their 128 and
    # keeps the key apart from any other use of the seed.
    derivation = HKDF(
        algorithm=hashes.SHA256(), length=_AES_KEY_BYTES, salt=None, info=_AES_KEY_INFO
    )
    key = derivation.derive(seed.astype("<i8").tobytes())
    # The cipher counts all 128 bits up; counters below 2^62 never carry into the row.
    first_block = row.to_bytes(8, "big") + first_counter.to_bytes(8, "big")
    encryptor = Cipher(algorithms.AES(key), modes.CTR(first_block)).encryptor()
    # The encryption of zeros is the keystream. ``update_into`` asks for room for one more
    # block than it fills.
    keystream = bytearray(8 * len(drawn) + _AES_BLOCK_BYTES)
    encryptor.update_into(bytes(8 * len(drawn)), keystream)
    drawn[:] = np.frombuffer(keystream, "<u8", len(drawn))
