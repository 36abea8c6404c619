"""Numba's compiled functions for tiles of Z and for clipping; they need the extra ``fast``.

``kernel.draws`` and ``kernel.integers`` define the numbers. Random words of 64 groups of 16
coordinates are drawn at once. The cipher is a loop over groups without a branch, which compilers
turn into vector instructions: for this its ten double rounds are written one after another.
"""

from collections.abc import Callable
from typing import TypeAlias, TypeVar

import numba
import numpy as np

from mf_aggregators.kernel import draws, integers
from mf_aggregators.kernel.draws import FIRST_TIE_BLOCK, TIE_BLOCKS_PER_TILE, TIE_WORDS, TILE
from mf_aggregators.kernel.numbers import IntArray, RealArray

_Words: TypeAlias = tuple[np.uint32, ...]

_Function = TypeVar("_Function")
_GROUPS = 64
_CONSTANTS = tuple(np.frombuffer(b"expand 16-byte k", "<u4"))
_7, _8, _12, _16, _20, _24, _25 = map(np.uint32, (7, 8, 12, 16, 20, 24, 25))
_LOW, _HALF, _STEP_BITS = np.uint32(0xFFFF), np.int64(2**15), np.int64(draws.STEP_BITS)
_F4, _F8, _MARGIN = numba.float32, numba.float64, 1.0 - integers.MARGIN


def _compiled(function: _Function) -> _Function:
    found: _Function = numba.njit(nogil=True, cache=True)(function)
    return found


@_compiled
def _quarter(a: np.uint32, b: np.uint32, c: np.uint32, d: np.uint32) -> _Words:
    a = np.uint32(a + b)
    d = np.uint32(d ^ a)
    d = np.uint32((d << _16) | (d >> _16))
    c = np.uint32(c + d)
    b = np.uint32(b ^ c)
    b = np.uint32((b << _12) | (b >> _20))
    a = np.uint32(a + b)
    d = np.uint32(d ^ a)
    d = np.uint32((d << _8) | (d >> _24))
    c = np.uint32(c + d)
    b = np.uint32(b ^ c)
    b = np.uint32((b << _7) | (b >> _25))
    return a, b, c, d


@_compiled
def _double_round(x: _Words) -> _Words:
    a0, b0, c0, d0 = _quarter(x[0], x[4], x[8], x[12])
    a1, b1, c1, d1 = _quarter(x[1], x[5], x[9], x[13])
    a2, b2, c2, d2 = _quarter(x[2], x[6], x[10], x[14])
    a3, b3, c3, d3 = _quarter(x[3], x[7], x[11], x[15])
    a0, b1, c2, d3 = _quarter(a0, b1, c2, d3)
    a1, b2, c3, d0 = _quarter(a1, b2, c3, d0)
    a2, b3, c0, d1 = _quarter(a2, b3, c0, d1)
    a3, b0, c1, d2 = _quarter(a3, b0, c1, d2)
    return a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3


@_compiled
def _blocks(key: IntArray, row: int, first: int, step: int, found: IntArray) -> None:
    """Fills an array with the words of ChaCha20 blocks first, first + step, ..., word by word."""
    k0, k1, k2, k3 = key[0], key[1], key[2], key[3]
    n0, n1 = np.uint32(row), np.uint32(row >> 32)
    e0, e1, e2, e3 = _CONSTANTS
    for j in range(_GROUPS):
        counter = first + step * j
        low, high = np.uint32(counter), np.uint32(counter >> 32)
        x: _Words = (e0, e1, e2, e3, k0, k1, k2, k3, k0, k1, k2, k3, low, high, n0, n1)
        x = _double_round(_double_round(_double_round(_double_round(_double_round(x)))))
        x = _double_round(_double_round(_double_round(_double_round(_double_round(x)))))
        found[j] = x[0] + e0
        found[1 * _GROUPS + j] = x[1] + e1
        found[2 * _GROUPS + j] = x[2] + e2
        found[3 * _GROUPS + j] = x[3] + e3
        found[4 * _GROUPS + j] = x[4] + k0
        found[5 * _GROUPS + j] = x[5] + k1
        found[6 * _GROUPS + j] = x[6] + k2
        found[7 * _GROUPS + j] = x[7] + k3
        found[8 * _GROUPS + j] = x[8] + k0
        found[9 * _GROUPS + j] = x[9] + k1
        found[10 * _GROUPS + j] = x[10] + k2
        found[11 * _GROUPS + j] = x[11] + k3
        found[12 * _GROUPS + j] = x[12] + low
        found[13 * _GROUPS + j] = x[13] + high
        found[14 * _GROUPS + j] = x[14] + n0
        found[15 * _GROUPS + j] = x[15] + n1


@_compiled
def _is_less(
    key: IntArray, row: int, tile: int, tie: int, threshold: IntArray, block: IntArray
) -> bool:
    """Whether a tie's further random words are less, as a number, than those of a threshold."""
    held = -1
    for place in range(TIE_WORDS):
        number = tie * TIE_WORDS + place
        if number >> 4 != held:
            held = number >> 4
            _blocks(key, row, FIRST_TIE_BLOCK + tile * TIE_BLOCKS_PER_TILE + held, 1, block)
        word = block[(number & 15) * _GROUPS]
        if word != threshold[place]:
            return bool(word < threshold[place])
    return False


@_compiled
def fill(
    key: IntArray, row: int, tile: int, packed: IntArray, further: IntArray, found: IntArray
) -> None:
    """Fills a tile with entries of a row of Z, as ``kernel.draws`` defines them.

    Args:
      key: (4,) uint32: the seed's words.
      row: The row of Z.
      tile: The index of the tile.
      packed: The first words of the alias table.
      further: The further words of the alias table.
      found: (TILE,) int64, which is filled.
    """
    words = np.empty((3, 16 * _GROUPS), np.uint32)
    chosen = np.empty((3, 16 * _GROUPS), np.int64)
    block = np.empty(16 * _GROUPS, np.uint32)
    tie = 0
    for start in range(0, TILE // 16, _GROUPS):
        first = 3 * (tile * (TILE // 16) + start)
        for number in range(3):
            _blocks(key, row, first + number, 3, words[number])
        tied = np.uint32(0)
        for number in range(3):
            for at in range(16 * _GROUPS):
                word = words[number, at]
                column = word & _LOW
                entry = packed[column]
                fraction, threshold = word >> _16, entry >> _16
                kept = column if fraction < threshold else entry & _LOW
                chosen[number, at] = np.int64(kept)
                tied |= np.uint32(fraction == threshold)
        if tied:
            for j in range(_GROUPS):
                for place in range(16):
                    for number in range(3):
                        word = words[number, place * _GROUPS + j]
                        column = word & _LOW
                        if word >> _16 == packed[column] >> _16:
                            if _is_less(key, row, tile, tie, further[column], block):
                                chosen[number, place * _GROUPS + j] = np.int64(column)
                            tie += 1
        for j in range(_GROUPS):
            for place in range(16):
                total = chosen[2, place * _GROUPS + j] - _HALF
                total = (total << _STEP_BITS) + chosen[1, place * _GROUPS + j] - _HALF
                total = (total << _STEP_BITS) + chosen[0, place * _GROUPS + j] - _HALF
                found[16 * (start + j) + place] = total


def _compiled_for_entries(
    result: numba.types.Type, *arguments: numba.types.Type
) -> Callable[[_Function], _Function]:
    """Compiles a function for read-only or writable arrays of float32 and of float64 entries."""
    kinds = (numba.types.Array(each, 1, "C", readonly=True) for each in (_F4, _F8))
    signatures = [result(kind, *arguments) for kind in kinds]
    found: Callable[[_Function], _Function] = numba.njit(signatures, nogil=True, cache=True)
    return found


@_compiled_for_entries(numba.int64, _F8, _F8)
def squares(entries: RealArray, unit: float, units: float) -> np.int64:
    """Returns the sum of squares that ``kernel.integers._squares`` defines."""
    total = np.int64(0)
    for place in range(entries.size):
        ratio = np.float64(entries[place]) / unit
        total += np.int64(np.ceil(ratio * ratio * units))
    return total


@_compiled_for_entries(numba.void, _F8, _F8, numba.boolean, numba.int64[::1])
def to_grid(entries: RealArray, unit: float, scale: float, is_short: bool, into: RealArray) -> None:
    """Fills ``into`` with the quantization steps that ``kernel.integers._to_grid`` defines."""
    if is_short:
        for place in range(entries.size):
            into[place] = np.int64(np.float64(entries[place]) / unit * scale * _MARGIN)
    else:
        for place in range(entries.size):
            into[place] = np.int64(np.rint(np.float64(entries[place]) / unit * scale))
