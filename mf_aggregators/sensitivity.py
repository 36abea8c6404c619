"""L2 sensitivity of a strategy matrix C under a participation schema.

The theorems and the arithmetic are those of :mod:`mf_aggregators.kernel.sensitivity`.
"""

from typing import Any

from mf_aggregators.kernel import sensitivity as kernel
from mf_aggregators.kernel.sensitivity import Sensitivity
from mf_aggregators.participation import Participation, check

__all__ = ["Sensitivity", "compute"]


def compute(strategy_matrix: Any, participation: Participation) -> Sensitivity:
    """Computes the sensitivity of a strategy matrix under a participation schema.

    Args:
      strategy_matrix: C, an array of shape (m, n) for n rounds; m = n for square
        factorizations, larger for trees.
      participation: The schema.

    Returns:
      The sensitivity under unit clipping and zero-out adjacency.

    Raises:
      ValueError: If C is not a finite two-dimensional array with a column for
        each round.
      TypeError: If ``participation`` is not a participation schema.

    Example:
      >>> import mf_aggregators as mfa
      >>> timers = mfa.participation.MinSeparation(separation=2)
      >>> strategy = [[1.0, 0.0, 0.0], [0.5, 1.0, 0.0], [0.0, 0.5, 1.0]]
      >>> found = mfa.sensitivity.compute(strategy, timers)
      >>> round(found.value, 3), found.is_exact
      (1.5, True)
    """
    return kernel.of_matrix(strategy_matrix, check(participation).as_schema())
