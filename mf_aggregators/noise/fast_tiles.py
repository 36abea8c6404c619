"""Faster functions, compiled by Numba, for drawing tiles of Z and for clipping.

Numba is the extra ``fast``. The functions compute the same numbers as the kernel, bit for bit. The
kernel compares tiles: with a secret seed when a run begins or resumes, and a secret tile of each
row. So it refuses to release if a function draws other noise. The kernel itself adds up the squares
of clipped updates. Without Numba, or with ``NUMBA_DISABLE_JIT=1``, results are the same but take
longer.
"""

import functools
import os
import warnings

import numpy as np

from mf_aggregators.kernel import draws, integers
from mf_aggregators.kernel.draws import TILE, Compiled, Engine
from mf_aggregators.kernel.numbers import IntArray, RealArray

# The dtypes for which clipping is compiled; other floats are converted to one of these.
_COMPILED_DTYPES = (np.dtype(np.float32), np.dtype(np.float64))


@functools.cache
def load() -> Compiled:
    """Returns the compiled functions for ``kernel.draws.Engine``; empty without Numba.

    If Numba is installed but does not work, or clips differently from the kernel, it warns and
    returns none as well. The first call on a machine compiles for some seconds; later calls read
    Numba's cache.
    """
    if os.environ.get("NUMBA_DISABLE_JIT", "0") != "0":
        return ()
    table = draws.table()

    def fill_tile(seed: IntArray, row: int, tile: int, found: IntArray) -> None:
        from mf_aggregators.noise import numba_tiles

        key = np.ascontiguousarray(seed, "<i8").view("<u4")
        numba_tiles.fill(key, row, tile, table.packed, table.further, found)

    def squares(entries: RealArray, unit: float, units: float) -> int:
        from mf_aggregators.noise import numba_tiles

        return int(numba_tiles.squares(_plain(entries), unit, units))

    def to_grid(
        entries: RealArray, unit: float, scale: float, is_short: bool, into: RealArray
    ) -> None:
        from mf_aggregators.noise import numba_tiles

        numba_tiles.to_grid(_plain(entries), unit, scale, is_short, into)

    functions = fill_tile, squares, to_grid
    try:
        fill_tile(np.zeros(2, np.int64), 0, 0, np.empty(TILE, np.int64))
        _check_clipping(functions)
    except ModuleNotFoundError:
        return ()
    # Numba may raise many errors: for an unsupported NumPy, an unwritable folder, or a compiler.
    except Exception as error:
        warnings.warn(f"Numba does not work, so that noise takes longer: {error}", stacklevel=2)
        return ()
    return functions


def _plain(entries: RealArray) -> RealArray:
    is_plain = entries.dtype in _COMPILED_DTYPES and entries.flags.aligned
    return entries if is_plain else entries.astype(np.float64)


def _check_clipping(functions: Compiled) -> None:
    """Raises ArithmeticError if the functions clip test updates differently from the kernel."""
    drawn = np.random.default_rng().standard_normal(TILE)
    updates: tuple[RealArray, ...] = drawn.astype(np.float32), drawn
    for update in updates:
        for norm in (1.0, 1e3):
            plain, found = (
                integers.clip_to_grid(
                    [update], norm, integers.STEPS_PER_CLIP_NORM, engine=Engine(None, *each)
                )
                for each in ((), functions)
            )
            if not np.array_equal(plain, found):
                raise ArithmeticError("its clipped updates differ from those of the kernel")
