"""The effect of a changing clip norm on the error of a matrix mechanism.

With clip norm c_t in round t, the noise of running sums A x is A diag(c) C^-1 Z instead of c A C^-1
Z. C makes A C^-1 small, but noise of rounds with different norms cancels less. :class:`ClipDrift`
has the constant norm that would have had as much noise, and the same for independent noise, which
never cancels. The difference of the two is the cost of the changing norm (its *drift*).
"""

import dataclasses
import math

import numpy as np

from mf_aggregators.factorizations.factorization import Factorization
from mf_aggregators.factorizations.toeplitz import identity
from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.numbers import FloatArray

# How many columns of C^-1 are computed at a time, which bounds the memory.
_COLUMNS_AT_A_TIME = 256


@dataclasses.dataclass(frozen=True)
class ClipDrift:
    """The noise of a run with changing clip norms, compared with a constant clip norm.

    Attributes:
      equivalent_norm: The constant norm with which the noise of the outputs would have had the
        same root mean square over the rounds, at the same noise in clip norms.
      independent_norm: The constant norm for independent noise: a root mean square of the norms, in
        which a round counts for all outputs that contain it.
    """

    equivalent_norm: float
    independent_norm: float

    @property
    def cost(self) -> float:
        """The share by which changing norms increased the noise of the outputs; 0 if constant."""
        return self.equivalent_norm / self.independent_norm - 1.0

    @classmethod
    def of(cls, factorization: Factorization, norms: object) -> "ClipDrift":
        """Returns the effect of changing norms on the noise of running sums.

        Args:
          factorization: The factorization of the run.
          norms: (m,) the clip norms of the first m rounds, above zero, 1 <= m <= n.

        Raises:
          ValueError: If there are no norms, or more than rounds.
        """
        norms, num_rounds = numbers.real_array(norms, "norms"), factorization.num_rounds
        if norms.ndim != 1 or not 1 <= norms.size <= num_rounds:
            raise ValueError(
                f"norms must be a vector of 1 to {num_rounds} norms, found shape {norms.shape}."
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
