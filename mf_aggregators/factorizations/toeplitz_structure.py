"""What all factorizations with a lower-triangular Toeplitz strategy matrix share."""

import abc
from typing import Any

import numpy as np
import scipy.linalg
import scipy.signal

from mf_aggregators import sensitivity as sensitivities
from mf_aggregators import workloads
from mf_aggregators.factorizations.factorization import Factorization
from mf_aggregators.factorizations.toeplitz_errors import check_rounds
from mf_aggregators.linear_algebra import power_series
from mf_aggregators.participation import Participation
from mf_aggregators.sensitivity import Sensitivity
from mf_aggregators.workloads import Workload

# Rounds squared times participations: up to here a sensitivity that Toeplitz structure
# only bounds is also computed from the dense matrix, and the better of the two is taken.
_LARGEST_DENSE_BOUND = 30_000_000


class ToeplitzStructure(Factorization):
    """C is Toeplitz: C[i, j] depends on i - j alone. All but the dense views takes O(n) memory."""

    def __init__(self, num_rounds: int, what: str, **attributes: Any) -> None:
        """Creates the factorization; see :func:`check_rounds` and the base class."""
        super().__init__(**attributes)
        self._num_rounds = check_rounds(num_rounds, what)

    @property
    def num_rounds(self) -> int:
        """The number of rounds n."""
        return self._num_rounds

    @abc.abstractmethod
    def strategy_coefficients(self) -> np.ndarray | None:
        """Returns the first column of C, (n,) float64; None if scaled columns are not Toeplitz."""

    @abc.abstractmethod
    def noising_coefficients(self) -> np.ndarray | None:
        """Returns the first column of C^-1, (n,) float64; None if C^-1 is not Toeplitz."""

    def _strategy_column(self) -> np.ndarray:
        """The first column of C, of those who have one."""
        column = self.strategy_coefficients()
        assert column is not None
        return column

    def _noising_column(self) -> np.ndarray:
        """The first column of C^-1, of those who have one."""
        column = self.noising_coefficients()
        assert column is not None
        return column

    def strategy_matrix(self) -> np.ndarray:
        """Returns C as a dense (n, n) array."""
        return _dense(self._strategy_column())

    def strategy_matrix_of_first(self, num_rounds: int) -> np.ndarray:
        """Returns the leading part of C, in no more memory than that."""
        return _dense(self._strategy_column()[:num_rounds])

    def noising_matrix(self) -> np.ndarray:
        """Returns C^-1 as a dense (n, n) array."""
        return _dense(self._noising_column())

    def _encode(self, x: np.ndarray) -> np.ndarray:
        if not x.size:
            return x.copy()
        column = self._strategy_column().reshape((-1,) + (1,) * (x.ndim - 1))
        return np.asarray(scipy.signal.fftconvolve(x, column, axes=0)[: self.num_rounds])

    def _sensitivity_of_first(self, rounds: int, participation: Participation) -> Sensitivity:
        coefficients = self._strategy_column()[:rounds]
        bound = sensitivities.from_toeplitz_coefficients(coefficients, rounds, participation)
        work = rounds**2 * participation.most_participations(rounds)
        if bound.is_exact or work > _LARGEST_DENSE_BOUND:
            return bound
        dense = sensitivities.compute(_dense(coefficients), participation)
        return dense if dense <= bound else bound

    def squared_decoder_rows(self, workload: Any) -> np.ndarray:
        """Returns the squared row norms of B; in O(n) memory for a Toeplitz ``Workload``."""
        workload = workloads.resolve(workload)
        if isinstance(workload, Workload):
            self._check_rounds(workload.num_rounds)
            coefficients = workload.coefficients()
            if coefficients is not None:
                noising = self._noising_column()
                row = power_series.product(coefficients, noising, self.num_rounds)
                return np.cumsum(np.square(row))
        return super().squared_decoder_rows(workload)


def _dense(column: np.ndarray) -> np.ndarray:
    return np.asarray(scipy.linalg.toeplitz(column, np.zeros_like(column)))
