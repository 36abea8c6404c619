"""Workloads as the search for banded matrices takes them: by the bands of their inverses."""

import dataclasses

import numpy as np
from scipy.linalg.lapack import dtrtri

from mf_aggregators import workloads
from mf_aggregators.linear_algebra.banded_matrices import WorkloadBlocks
from mf_aggregators.workloads import Workload


@dataclasses.dataclass(frozen=True, eq=False)
class BandedWorkload:
    """A workload over its largest entry.

    Attributes:
      blocks: In blocks of rounds.
      inverse_bands: (n, w) of A^-1; w is n where it is not banded.
      condition: The largest condition number, for maxima, of a diagonal block of A.
    """

    blocks: WorkloadBlocks
    inverse_bands: np.ndarray
    condition: float

    @classmethod
    def of(cls, workload: Workload | np.ndarray, num_bands: int) -> "BandedWorkload":
        """Returns a workload.

        Args:
          workload: A, known by its name or an (n, n) lower-triangular array of full rank.
          num_bands: The bands b of strategy matrices.
        """
        largest = workloads.largest_entry(workload)
        inverse_bands = workloads.inverse_bands(workload)
        if inverse_bands is not None:
            inverse_bands = inverse_bands * largest
            blocks = WorkloadBlocks.of_inverse(inverse_bands, num_bands)
            return cls(blocks, inverse_bands, blocks.largest_condition(inverse_bands))
        assert isinstance(workload, np.ndarray)
        scaled = workload / largest
        inverse, _ = dtrtri(scaled.T, lower=0)
        inverse = np.tril(inverse.T)
        condition = np.linalg.norm(scaled, np.inf) * np.linalg.norm(inverse, np.inf)
        blocks = WorkloadBlocks.of_matrix(scaled)
        return cls(blocks, _bands(inverse), float(condition))


def _bands(lower: np.ndarray) -> np.ndarray:
    """(n, n) bands of a dense lower-triangular matrix."""
    num_rounds = len(lower)
    lags = np.arange(num_rounds)
    columns = lags[:, np.newaxis] - lags
    rows = np.broadcast_to(lags[:, np.newaxis], columns.shape)
    return np.where(columns >= 0, lower[rows, np.maximum(columns, 0)], 0.0)
