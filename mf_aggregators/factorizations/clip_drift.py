"""The effect of a changing clip norm on the error of a matrix mechanism.

With clip norm c_t in round t, the noise of the outputs A x is A diag(c) C^-1 Z, in place of
c A C^-1 Z: what C makes small is A C^-1, and noise of rounds with other norms does not cancel as
well. :func:`measure` states the constant norm that would have had as much noise, and the same for
independent noise, from which nothing cancels: what the two differ by is what the drift cost.
"""

import dataclasses
import math
from typing import Any

import numpy as np

from mf_aggregators import workloads
from mf_aggregators.factorizations.factorization import Factorization
from mf_aggregators.factorizations.toeplitz import identity
from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.numbers import FloatArray

# Columns of C^-1 at a time: bounds memory at n times this.
_COLUMNS_AT_A_TIME = 256


@dataclasses.dataclass(frozen=True)
class ClipDrift:
    """The noise of a run, compared with that of a run with a constant norm.

    Attributes:
      equivalent_norm: The constant norm with which the noise of the outputs would have had the
        same root mean square over the rounds, at the same noise in clip norms.
      independent_norm: The same, of independent noise: a mean of the norms, in which a round
        counts for all outputs that it is in.
    """

    equivalent_norm: float
    independent_norm: float

    @property
    def cost(self) -> float:
        """The share that the drift added to the noise of the outputs; 0 without drift."""
        return self.equivalent_norm / self.independent_norm - 1.0


def squared_rows(factorization: Factorization, norms: Any, workload: Any = None) -> FloatArray:
    """Returns the squared norm of each row of A diag(norms) C^-1.

    Args:
      factorization: What makes the noise.
      norms: (m,) the clip norms of the first m rounds, 1 <= m <= n.
      workload: A, an (m, m) lower-triangular array, a ``workloads.Workload``, or the int m for
        the prefix sum; None for prefix sums as well, which need no matrix.

    Returns:
      (m,) float64: the variance of the noise in each output, in variances of Z.

    Raises:
      ValueError: If there are no norms, or more than rounds, or the workload is not for as many.
    """
    norms = numbers.real_array(norms, "norms")
    num_rounds, rounds = factorization.num_rounds, norms.size
    if norms.ndim != 1 or not 1 <= rounds <= num_rounds:
        raise ValueError(
            f"there must be a norm for each of 1 to {num_rounds} rounds, found shape {norms.shape}."
        )
    matrix = _matrix(workload, rounds)
    squares = np.zeros(rounds)
    for start in range(0, rounds, _COLUMNS_AT_A_TIME):
        columns = np.arange(start, min(start + _COLUMNS_AT_A_TIME, rounds))
        unit = np.zeros((num_rounds, len(columns)))
        unit[columns, columns - start] = 1.0
        rows = norms[:, np.newaxis] * factorization.noise_rows(unit)[:rounds]
        outputs = np.cumsum(rows, axis=0) if matrix is None else matrix @ rows
        squares += np.einsum("ij,ij->i", outputs, outputs)
    return squares


def _matrix(workload: Any, rounds: int) -> FloatArray | None:
    """The (m, m) matrix of a workload for m rounds; None for the prefix sum."""
    workload = workloads.checked(rounds if workload is None else workload)
    if (found := workloads.rounds_of(workload)) != rounds:
        raise ValueError(f"the workload is for {found} rounds, and there are {rounds} norms.")
    return None if workloads.is_prefix_sum(workload) else workloads.matrix_of(workload)


def measure(factorization: Factorization, norms: Any, workload: Any = None) -> ClipDrift:
    """Returns the cost of changing norms in the noise of the outputs.

    Args:
      factorization: What made the noise.
      norms: (m,) above zero, as :func:`squared_rows` takes them.
      workload: As there.

    Raises:
      ValueError: As there.
    """
    norms = numbers.real_array(norms, "norms")
    return ClipDrift(
        _equivalent(factorization, norms, workload),
        _equivalent(identity(factorization.num_rounds), norms, workload),
    )


def _equivalent(factorization: Factorization, norms: FloatArray, workload: Any) -> float:
    moved = float(np.sum(squared_rows(factorization, norms, workload)))
    return math.sqrt(
        moved / float(np.sum(squared_rows(factorization, np.ones_like(norms), workload)))
    )
