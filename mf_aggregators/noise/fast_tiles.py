"""A faster function for tiles of rows of Z, where Numba is installed (the extra ``fast``).

Its numbers are those of the kernel, bit for bit. The kernel compares: tiles of a secret seed when a
run begins or goes on, and a secret tile of each row. So a function that draws other noise makes a
refusal. Without Numba, or with ``NUMBA_DISABLE_JIT=1``, rows take longer and are the same.
"""

import functools
import os
import warnings

import numpy as np

from mf_aggregators.kernel import draws
from mf_aggregators.kernel.draws import TILE, FillTile
from mf_aggregators.kernel.numbers import IntArray


@functools.cache
def load() -> FillTile | None:
    """Returns the function that fills a tile, see ``kernel.draws.Engine``; None without Numba.

    If Numba is installed and does not work, it warns, and returns None as well. The first call on a
    machine compiles for some seconds, and later ones read Numba's cache.
    """
    if os.environ.get("NUMBA_DISABLE_JIT", "0") != "0":
        return None
    table = draws.table()

    def fill_tile(seed: IntArray, row: int, tile: int, found: IntArray) -> None:
        from mf_aggregators.noise import numba_tiles

        key = np.ascontiguousarray(seed, "<i8").view("<u4")
        numba_tiles.fill(key, row, tile, table.packed, table.further, found)

    try:
        fill_tile(np.zeros(2, np.int64), 0, 0, np.empty(TILE, np.int64))
    except ModuleNotFoundError:
        return None
    # Numba has many errors: for another NumPy, for a folder that it cannot write, of compilers.
    except Exception as error:
        warnings.warn(f"Numba does not work, so noise takes longer: {error}", stacklevel=2)
        return None
    return fill_tile
