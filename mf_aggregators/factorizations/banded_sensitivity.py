"""L2 sensitivity of a banded strategy matrix C from its bands, in O(n b) memory.

The statements are those of :mod:`mf_aggregators.sensitivity`, and so are the values; X = C^T C is
banded here, and no sum over a pattern needs what is zero.
"""

import numpy as np

from mf_aggregators import sensitivity as sensitivities
from mf_aggregators.linear_algebra.banded_matrices import BandedMatrix
from mf_aggregators.participation import (
    Participation,
    SingleParticipation,
    check,
)
from mf_aggregators.participation.fixed_epoch_order import maximal_starts
from mf_aggregators.sensitivity import Sensitivity

# Rows of X that are treated at a time.
_ROWS_AT_A_TIME = 4096
# For more participations of the worst pattern, only matrices without signs are seen to be exact.
_MOST_PARTICIPATIONS_WITH_SIGNS = 2048
_ROUNDING_OF_GRAM = 1e-14


def compute(bands: np.ndarray, participation: Participation) -> Sensitivity:
    """Computes the sensitivity of a banded strategy matrix under a participation schema.

    Args:
      bands: (n, b) finite floats with ``bands[i, t] = C[i, i - t]``, zero where i < t.
      participation: The schema.

    Returns:
      The sensitivity, exact or an upper bound.

    Raises:
      TypeError: If ``participation`` is not a participation schema.
    """
    check(participation)
    largest = float(np.max(np.abs(bands)))
    if largest == 0.0:
        return Sensitivity(0.0, is_exact=True, theorem="zero matrix")
    used = int(np.flatnonzero(np.any(bands, axis=0))[-1]) + 1
    # Squares of very large or small entries would over- or underflow.
    return _of_unit_scale(bands[:, :used] / largest, participation).times(largest)


def _of_unit_scale(bands: np.ndarray, participation: Participation) -> Sensitivity:
    num_rounds, num_bands = bands.shape
    strategy = BandedMatrix.lower_triangular(bands)
    squared_norms = np.sum(np.square(strategy.transposed().rows), axis=1)
    most = participation.most_participations(num_rounds)
    if most == 1:
        return sensitivities.from_column_norms(squared_norms, SingleParticipation(), None)
    separation = participation.separation_in(num_rounds)
    if num_bands <= separation:
        return sensitivities.from_column_norms(squared_norms, participation, num_bands)
    gram = strategy.transposed().times(strategy)
    # above[i, t] = X[i, i + t].
    above = gram.rows[:, gram.lower :]
    above[:, 0] = squared_norms
    if participation.is_evenly_spaced:
        return _enumerated(above, separation, most)
    if int(np.flatnonzero(np.any(above, axis=0))[-1]) < separation:
        return sensitivities.from_column_norms(squared_norms, participation, separation)
    below = np.abs(gram.rows[:, gram.lower :: -1])
    above = np.abs(above)
    row_bounds = np.empty(num_rounds)
    for start in range(0, num_rounds, _ROWS_AT_A_TIME):
        rows = slice(start, start + _ROWS_AT_A_TIME)
        row_bounds[rows] = above[rows, 0] + _largest_sums_of_both_sides(
            np.ascontiguousarray(above[rows].T),
            np.ascontiguousarray(below[rows].T),
            separation,
            most,
        )
    return sensitivities.from_row_bounds(row_bounds, squared_norms, separation, most)


def _enumerated(above: np.ndarray, separation: int, most: int) -> Sensitivity:
    """BandMF Eq. 5: sums over all patterns at once, diagonal by diagonal of X."""
    num_rounds, num_bands = above.shape
    sums = sensitivities.pattern_sum_adjoint(above[:, 0], separation, most)
    for count in range(1, min(most, -(-num_bands // separation))):
        # Pairs of participations so many separations apart, the first of each pair.
        pairs = np.abs(above[:, count * separation])
        sums = sums + 2.0 * sensitivities.pattern_sum_adjoint(pairs, separation, most - count)
    starts = maximal_starts(num_rounds, separation, most)
    start = int(np.argmax(sums[: len(starts)]))
    rounds = np.arange(start, min(num_rounds, start + separation * most), separation)
    return Sensitivity(
        float(np.sqrt(sums[start])),
        is_exact=_is_reached(above[rounds], separation),
        theorem="enumeration of patterns (BandMF Eq. 5)",
    )


def _is_reached(above: np.ndarray, separation: int) -> bool:
    """Whether the sum over a pattern is reached, X being given by its rows of the pattern."""
    lags = above[:, ::separation]
    if np.all(lags >= -_ROUNDING_OF_GRAM * np.max(lags[:, 0])):
        return True
    count = len(lags)
    if count > _MOST_PARTICIPATIONS_WITH_SIGNS:
        return False
    pattern = np.zeros((count, count))
    for lag in range(min(count, lags.shape[1])):
        first = np.arange(count - lag)
        pattern[first, first + lag] = pattern[first + lag, first] = lags[: count - lag, lag]
    return sensitivities.is_reached(pattern)


def _largest_sums_of_both_sides(
    above: np.ndarray, below: np.ndarray, separation: int, most: int
) -> np.ndarray:
    """For each row of |X|, its largest sum over the other rounds of a pattern that holds it.

    Args:
      above: (b, rows): entry t after the diagonal.
      below: (b, rows): entry t before it.
      separation: At most b - 1.
      most: k.
    """
    fitting = (len(above) - 1) // separation
    if most - 1 >= 2 * fitting:
        unlimited = [_largest_sums(side, separation, None)[-1] for side in (above, below)]
        return unlimited[0] + unlimited[1]
    levels = min(most - 1, fitting)
    after, before = (_largest_sums(side, separation, levels) for side in (above, below))
    # m participations after the row leave most - 1 - m before it.
    return np.max([after[m] + before[min(most - 1 - m, levels)] for m in range(levels + 1)], axis=0)


def _largest_sums(side: np.ndarray, separation: int, levels: int | None) -> list[np.ndarray]:
    """The largest sums over at most 0, 1, ..., ``levels`` entries of each row, b or more apart.

    The first is at least b from the diagonal as well. Without levels, one sum without a limit.
    """
    width, rows = side.shape
    if levels is None:
        sums = np.zeros((width + separation, rows))
        for t in range(width - 1, separation - 1, -1):
            np.maximum(side[t] + sums[t + separation], sums[t + 1], out=sums[t])
        return [sums[separation]]
    found = [np.zeros(rows)]
    fewer = np.zeros((width + separation, rows))
    for _ in range(levels):
        sums = np.zeros_like(fewer)
        for t in range(width - 1, separation - 1, -1):
            np.maximum(side[t] + fewer[t + separation], sums[t + 1], out=sums[t])
        found.append(sums[separation])
        fewer = sums
    return found
