"""The effect of a changing clip norm on the error of a matrix mechanism.

With clip norm c_t in round t, the noise of running sums A x is A diag(c) C^-1 Z, in place of
c A C^-1 Z: what C makes small is A C^-1, and noise of rounds with other norms does not cancel as
well. :func:`measure` states the constant norm that would have had as much noise, and the same for
independent noise, from which nothing cancels: what the two differ by is what the drift cost.
"""

import dataclasses
import math
from typing import Any

import numpy as np

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

    @classmethod
    def of(cls, factorization: Factorization, norms: Any) -> "ClipDrift":
        """Returns the cost of changing norms in the noise of running sums.

        Args:
          factorization: What made the noise.
          norms: (m,) the clip norms of the first m rounds, above zero, 1 <= m <= n.

        Raises:
          ValueError: If there are no norms, or more than rounds.
        """
        norms, num_rounds = numbers.real_array(norms, "norms"), factorization.num_rounds
        if norms.ndim != 1 or not 1 <= norms.size <= num_rounds:
            raise ValueError(
                f"there must be a norm for each of 1 to {num_rounds} rounds, found shape "
                f"{norms.shape}."
            )
        return cls(
            _equivalent_norm(factorization, norms), _equivalent_norm(identity(num_rounds), norms)
        )


def _equivalent_norm(factorization: Factorization, norms: FloatArray) -> float:
    rounds, moved, constant = norms.size, 0.0, 0.0
    for start in range(0, rounds, _COLUMNS_AT_A_TIME):
        columns = np.arange(start, min(start + _COLUMNS_AT_A_TIME, rounds))
        unit = np.zeros((factorization.num_rounds, len(columns)))
        unit[columns, columns - start] = 1.0
        rows = factorization.noise_rows(unit)[:rounds]
        moved += float(np.sum(np.square(np.cumsum(norms[:, np.newaxis] * rows, axis=0))))
        constant += float(np.sum(np.square(np.cumsum(rows, axis=0))))
    return math.sqrt(moved / constant)
