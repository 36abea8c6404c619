"""Where the search for the optimum of returning clients starts: at a banded matrix.

A matrix of b bands has X[i, j] = 0 for rounds b apart and more, which is feasible under
(k, b)-participation and, for many participations, near the optimum (BandMF Sec. 4). At the
optimum V = X^-1 A^T A X^-1, so that this V of the banded X, cut to the classes of rounds
modulo b, is near the solution of the dual.
"""

import dataclasses
import warnings

import numpy as np
import scipy.linalg

from mf_aggregators.factorizations.banded import banded
from mf_aggregators.factorizations.convergence import NotConvergedWarning
from mf_aggregators.factorizations.pattern_layout import PatternLayout
from mf_aggregators.participation import Participation

# The relative gap of the banded matrix: a start need not be near its own optimum.
_RELATIVE_GAP = 1e-2


@dataclasses.dataclass(frozen=True, eq=False)
class BandedStart:
    """A feasible matrix, and the multipliers V that would go with it at the optimum.

    Attributes:
      strategy_matrix: C of sensitivity one, (n, n).
      diagonal: (b, K) diagonal of V; one where there is no round.
      correlation_factors: (b, K, K) lower-triangular L with rows of norm one: V[i, j] is
        (V[i, i] V[j, j])^1/2 (L L^T)[i, j]; None if V has lost its positive definiteness to
        rounding.
    """

    strategy_matrix: np.ndarray
    diagonal: np.ndarray
    correlation_factors: np.ndarray | None


def banded_start(
    workload: np.ndarray,
    participation: Participation,
    layout: PatternLayout,
    *,
    equal_column_norms: bool,
    max_evaluations: int,
    show_progress: bool,
) -> BandedStart:
    """Returns a start.

    Args:
      workload: A, an (n, n) lower-triangular array.
      participation: The schema.
      layout: Its classes of rounds, each of which is one pattern.
      equal_column_norms: Whether columns of C must have equal norms.
      max_evaluations: The most evaluations of the search for the banded matrix.
      show_progress: Whether to show a progress bar on standard error.
    """
    with warnings.catch_warnings():
        # However near it has come.
        warnings.simplefilter("ignore", NotConvergedWarning)
        matrix = banded(
            workload,
            layout.separation,
            equal_column_norms,
            participation,
            relative_gap=_RELATIVE_GAP,
            max_evaluations=max_evaluations,
            show_progress=show_progress,
        )
    strategy = matrix.strategy_matrix() / matrix.sensitivity(participation).value
    # A X^-1 = A C^-1 C^-T, by two triangular solves for its transpose.
    half = scipy.linalg.solve_triangular(strategy, workload.T, lower=True, trans="T")
    half = scipy.linalg.solve_triangular(strategy, half, lower=True)
    rounds, exists = layout.rounds, layout.exists
    blocks = np.tile(np.eye(layout.positions), (layout.separation, 1, 1))
    for of_class, there, block in zip(rounds, exists, blocks, strict=True):
        rows = half[of_class[there]]
        block[np.ix_(there, there)] = rows @ rows.T
    diagonal = np.diagonal(blocks, axis1=1, axis2=2).copy()
    roots = np.sqrt(diagonal)
    try:
        factors = np.linalg.cholesky(blocks / (roots[:, :, np.newaxis] * roots[:, np.newaxis]))
    except np.linalg.LinAlgError:
        factors = None
    return BandedStart(strategy, diagonal, factors)
