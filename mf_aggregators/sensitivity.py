"""L2 sensitivity of a strategy matrix C under a participation schema.

The theorems and the arithmetic are those of :mod:`mf_aggregators.kernel.sensitivity`.
"""

import math

import numpy as np

from mf_aggregators.kernel import numbers
from mf_aggregators.kernel import sensitivity as kernel
from mf_aggregators.kernel.numbers import FloatArray
from mf_aggregators.kernel.rows import Strategy
from mf_aggregators.kernel.sensitivity import Schema, Sensitivity
from mf_aggregators.participation import Participation, check

__all__ = ["Sensitivity", "compute"]

# The largest deviation of X from C_T^T C_T of a tree, which is added to the sensitivity.
_ROUNDING_OF_TREE = 1e-11


def compute(strategy_matrix: object, participation: Participation) -> Sensitivity:
    """Computes the sensitivity of a strategy matrix under a participation schema.

    Use it when C is an array and not a factorization.

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
    strategy = numbers.real_array(strategy_matrix, "the strategy matrix")
    if strategy.ndim != 2 or not strategy.size or not np.all(np.isfinite(strategy)):
        found = f"an array of shape {strategy.shape}"
        raise ValueError(f"the strategy matrix must be two-dimensional and finite, found {found}.")
    return _of_matrix(strategy, check(participation).as_schema())


def _of_matrix(strategy: FloatArray, schema: Schema) -> Sensitivity:
    # C is scaled so that squares stay within the range of floats.
    scale = float(np.max(np.abs(strategy))) or 1.0
    found = kernel.of_strategy(Strategy(strategy / scale, strategy.shape[1], is_dense=True), schema)
    of_tree = None if found.is_exact else _of_tree(strategy, schema)
    return of_tree if of_tree is not None else found.replace(value=scale * found.value)


def _of_tree(strategy: FloatArray, schema: Schema) -> Sensitivity | None:
    """The sensitivity if C^T C equals that of a binary tree up to rounding; otherwise None.

    If h_i nodes lie above round i, rounds i > j share h_i minus the number of bits of i xor j of
    them, or none.
    """
    with np.errstate(over="ignore"):
        gram = strategy.T @ strategy
    num_rounds, num_leaves = len(gram), 0
    while num_leaves < num_rounds:
        height = np.rint(gram[num_leaves, num_leaves])
        if not 1 <= height <= 64:
            return None
        num_leaves += 1 << (int(height) - 1)
    rounds = np.arange(num_rounds)
    nodes = [rounds < num_leaves >> h << h for h in range(num_leaves.bit_length())]
    heights = np.sum(nodes, axis=0)
    bits = np.frexp(np.bitwise_xor.outer(rounds, rounds))[1]
    shared = np.maximum(heights[np.maximum.outer(rounds, rounds)] - bits, 0)
    deviation = float(np.max(np.abs(gram - shared)))
    if not deviation <= _ROUNDING_OF_TREE:
        return None
    found = kernel.of_tree(num_leaves, num_rounds, schema)
    squared = found.value**2 + deviation * schema.most_in(num_rounds) ** 2
    return Sensitivity(math.sqrt(squared), is_exact=found.is_exact, theorem=found.theorem)
