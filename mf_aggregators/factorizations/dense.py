"""Factorizations with a dense lower-triangular strategy matrix."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import scipy.linalg

from mf_aggregators import validation, workloads
from mf_aggregators.factorizations.factorization import Factorization
from mf_aggregators.noise.recursions import DenseNoise
from mf_aggregators.workloads import Workload

# Rows of a decoder that are summed together.
_ROWS_AT_A_TIME = 256


def squared_rows_of_prefix_sums(strategy_matrix: np.ndarray) -> np.ndarray:
    """Returns ||row i of B||^2 of the prefix sum: running sums of the rows of C^-1.

    The inverse of a triangle takes a third of the operations of a solve for B.

    Args:
      strategy_matrix: C, (n, n), lower triangular and invertible.
    """
    # LAPACK's order of columns makes rows of C^-1 of its columns.
    inverse, _ = scipy.linalg.lapack.dtrtri(strategy_matrix.T, lower=0)
    num_rounds = len(strategy_matrix)
    sums, squared = np.zeros((1, num_rounds)), np.empty(num_rounds)
    for first in range(0, num_rounds, _ROWS_AT_A_TIME):
        rows = slice(first, first + _ROWS_AT_A_TIME)
        decoder = sums + np.cumsum(np.triu(inverse[:, rows], -first).T, axis=0)
        squared[rows] = np.einsum("ij,ij->i", decoder, decoder)
        sums = decoder[-1:]
    return squared


class DenseFactorization(Factorization):
    """Any lower-triangular, invertible strategy matrix."""

    mechanism = "optimal"
    ends_because = "its rows are optimised together, and those of the first rounds would be others"

    def __init__(self, strategy_matrix: np.ndarray, **attributes: Any) -> None:
        super().__init__(**attributes)
        matrix = validation.lower_triangular(strategy_matrix, "the strategy matrix")
        self._strategy_matrix = matrix.copy()
        self._strategy_matrix.flags.writeable = False

    @property
    def num_rounds(self) -> int:
        """The number of rounds n."""
        return int(self._strategy_matrix.shape[0])

    def strategy_matrix(self) -> np.ndarray:
        """Returns C, read-only."""
        return self._strategy_matrix

    def noise_recursion(self) -> DenseNoise:
        """Returns the recursion over all earlier rows of Z."""
        inverse = scipy.linalg.solve_triangular(
            self._strategy_matrix, np.eye(self.num_rounds), lower=True, check_finite=False
        )
        return DenseNoise(np.tril(inverse))

    def squared_decoder_rows(self, workload: Any) -> np.ndarray:
        """Returns ||row i of B||^2: for the prefix sum from the inverse alone."""
        workload = workloads.resolve(workload)
        if isinstance(workload, Workload) and workload.name == "prefix_sum":
            self._check_rounds(workload.num_rounds)
            return squared_rows_of_prefix_sums(self._strategy_matrix)
        return super().squared_decoder_rows(workload)

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns the lower triangle of C, row by row."""
        # Row by row: indices of the triangle would take as much memory as three matrices.
        rows = [row[: i + 1] for i, row in enumerate(self._strategy_matrix)]
        return {"lower_triangle": np.concatenate(rows)}

    @classmethod
    def from_arrays(
        cls, num_rounds: int, arrays: Mapping[str, np.ndarray], **attributes: Any
    ) -> "DenseFactorization":
        """Rebuilds the factorization; see the base class."""
        triangle = arrays["lower_triangle"]
        if triangle.shape != (num_rounds * (num_rounds + 1) // 2,):
            raise ValueError(
                f"lower_triangle has shape {triangle.shape}, which is not that of a matrix for "
                f"{num_rounds} rounds"
            )
        matrix = np.zeros((num_rounds, num_rounds))
        start = 0
        for i in range(num_rounds):
            matrix[i, : i + 1] = triangle[start : start + i + 1]
            start += i + 1
        return cls(matrix, **attributes)
