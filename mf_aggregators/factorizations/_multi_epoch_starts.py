"""Where searches under (k, b)-participation start: from bands, or from fewer rounds.

**Many participations.** A matrix of b bands has X[i, j] = 0 for rounds b apart and more, which is
feasible under (k, b)-participation and, for many participations, near the optimum (BandMF Sec. 4).
At the optimum V = X^-1 A^T A X^-1, so that this V of the banded X, cut to the classes of rounds
modulo b, is near the solution of the dual.

**Many rounds.** For prefix sums weights and correlations hardly depend on n at the same share of a
class of one length: those of fewer classes are interpolated.
"""

import dataclasses
import warnings

import numpy as np
import scipy.linalg

from mf_aggregators.factorizations._central_path import CentralPath, PathPoint
from mf_aggregators.factorizations._multi_epoch_dual import MultiEpochDual
from mf_aggregators.factorizations._patterns import PatternLayout
from mf_aggregators.factorizations.banded import banded
from mf_aggregators.factorizations.convergence import NotConvergedWarning
from mf_aggregators.kernel.numbers import FloatArray
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

    strategy_matrix: FloatArray
    diagonal: FloatArray
    correlation_factors: FloatArray | None


def banded_start(
    workload: FloatArray,
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


def refined_start(
    point: PathPoint,
    known: MultiEpochDual,
    fewer: PatternLayout,
    path: CentralPath,
    dual: MultiEpochDual,
    layout: PatternLayout,
) -> PathPoint | None:
    """Returns a start from a point of fewer rounds; None if V would not be positive definite.

    Args:
      point: Near the optimum of fewer rounds, for the maximum.
      known: The dual that it belongs to.
      fewer: Its layout, as ``layout.fewer`` returns it.
      path: That of all rounds.
      dual: Its dual.
      layout: Its layout.
    """
    # Variables are weights first, and then entries off the diagonal, both by class.
    num_weights = int(np.sum(known.weights_mask))
    weights, ratios = np.zeros(known.weights_mask.shape), np.zeros(known.pair_exists.shape)
    weights[known.weights_mask] = np.log(point.free[:num_weights])
    roots = known.cone().roots_of_diagonal(point.free)
    ratios[known.pair_exists] = point.free[num_weights:] / roots
    free, num_weights = np.zeros(path.cone.size), int(np.sum(dual.weights_mask))
    free[:num_weights] = np.exp(layout.refined(weights, fewer)[dual.weights_mask])
    free[num_weights:] = layout.refined(ratios, fewer)[dual.pair_exists]
    free[num_weights:] *= path.cone.roots_of_diagonal(free)
    row_weights = layout.refined(fewer.by_position(np.log(point.row_weights)), fewer)
    try:
        return path.near_optimum(np.exp(layout.by_round(row_weights)), free)
    except np.linalg.LinAlgError:
        return None
