"""The sensitivity of C for patterns that took place, client by client.

The contributions of one client in the rounds of a pattern change C x by at most
``sqrt(sum |X[i, j]|)`` over i, j in the pattern, with X = C^T C (BandMF Eq. 5 for a schema
of this one pattern), and by exactly that where the signs of the entries fit together.
"""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from mf_aggregators.arrays import FloatArray, IntArray
from mf_aggregators.factorizations import Factorization

# The Gram matrix of more rounds than this takes more than half a gigabyte.
_MOST_ROUNDS_OF_GRAM = 8192
# Entries of the Gram matrix that are looked up together: bounds the memory.
_ENTRIES_AT_A_TIME = 1 << 24


@dataclasses.dataclass(frozen=True)
class WorstPattern:
    """The client whose participations can change C x the most.

    Attributes:
      index: Which of the clients.
      rounds: The rounds that it took part in, from 0.
      sensitivity: sqrt(sum |X[i, j]|) over its rounds, at unit clipping.
    """

    index: int
    rounds: tuple[int, ...]
    sensitivity: float


def worst_client(
    factorization: Factorization,
    rounds_of_clients: Iterable[Sequence[int] | IntArray],
    num_rounds: int,
) -> WorstPattern | None:
    """Finds the client whose pattern has the largest sensitivity.

    Args:
      factorization: What made the noise.
      rounds_of_clients: For each client, the rounds that it took part in, from 0,
        increasing and below ``num_rounds``.
      num_rounds: The rounds that were released, at most those of the factorization.

    Returns:
      The client, the first of several; None if nobody took part, or for more than 8,192
      rounds, whose Gram matrix would not fit into memory.
    """
    if not 1 <= num_rounds <= _MOST_ROUNDS_OF_GRAM:
        return None
    by_count: dict[int, tuple[list[int], list[IntArray]]] = {}
    for index, rounds in enumerate(rounds_of_clients):
        if len(rounds):
            indices, patterns = by_count.setdefault(len(rounds), ([], []))
            indices.append(index)
            patterns.append(np.asarray(rounds, np.int64))
    if not by_count:
        return None
    # Rows of C that only later rounds see are left out.
    leading = factorization.strategy_matrix_of_first(num_rounds)
    magnitudes = np.abs(leading.T @ leading)
    best = WorstPattern(-1, (), -1.0)
    for indices, patterns in by_count.values():
        stacked = np.stack(patterns)
        squared = _squared(magnitudes, stacked)
        worst = int(np.argmax(squared))
        value = float(np.sqrt(squared[worst]))
        ahead = value == best.sensitivity and indices[worst] < best.index
        if value > best.sensitivity or ahead:
            best = WorstPattern(indices[worst], tuple(int(i) for i in stacked[worst]), value)
    return best


def _squared(magnitudes: FloatArray, patterns: IntArray) -> FloatArray:
    """For (N, c) patterns, the sums of |X| over all pairs of each."""
    count = patterns.shape[1]
    at_a_time = max(1, _ENTRIES_AT_A_TIME // count**2)
    sums = [
        magnitudes[chunk[:, :, np.newaxis], chunk[:, np.newaxis, :]].sum(axis=(1, 2))
        for chunk in (
            patterns[first : first + at_a_time] for first in range(0, len(patterns), at_a_time)
        )
    ]
    return np.concatenate(sums)
