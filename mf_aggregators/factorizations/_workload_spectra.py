"""The spectra of a workload A, as the search for one participation needs them.

What is needed is the eigendecomposition of V^1/2 A^T A V^1/2. For a workload whose inverse D has
two bands, as the prefix sum and SGD with learning rates have, the inverse V^-1/2 D D^T V^-1/2 is
tridiagonal: its eigenvalues and eigenvectors take O(n^2) operations (Dhillon's multiple relatively
robust representations, LAPACK's stemr), where those of a dense matrix take O(n^3). Inverses of
three bands, as of momentum, would have to be brought to tridiagonal form first, and the
eigenvectors back, in O(n^3) as well: nothing is gained there.

A certificate needs the singular values of A V^1/2, which are one over those of the bidiagonal
V^-1/2 D. They are eigenvalues of the tridiagonal matrix of Golub and Kahan of twice the size, whose
condition number is that of A and not its square.
"""

import abc
import copy

import numpy as np
import scipy.linalg
from scipy.linalg.lapack import dtrtri

from mf_aggregators import workloads
from mf_aggregators.factorizations._round_errors import weighted, weighted_inverse
from mf_aggregators.kernel.numbers import FloatArray
from mf_aggregators.linear_algebra import matrix_roots
from mf_aggregators.workloads import Workload

# Below so many rounds a search needs no start from fewer.
_ROUNDS_OF_COARSEST = 256
_ROUNDS_PER_COARSER_ROUND = 4


class WorkloadSpectra(abc.ABC):
    """A workload over its largest entry, and its spectra.

    Attributes:
      num_rounds: The number of rounds n.
    """

    num_rounds: int

    @abc.abstractmethod
    def workload(self) -> FloatArray:
        """Returns A, (n, n)."""

    @abc.abstractmethod
    def gram_diagonal(self) -> FloatArray:
        """Returns the (n,) diagonal of A^T A."""

    @abc.abstractmethod
    def decomposition(self, v: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Returns eigenvalues and eigenvectors of V^1/2 A^T A V^1/2.

        Args:
          v: (n,) the diagonal of V, above zero.

        Returns:
          (n,) eigenvalues, what rounding made non-positive being set to rounding, and the (n, n)
          eigenvectors, which the caller may overwrite.
        """

    @abc.abstractmethod
    def safe_eigenvalues(self, eigenvalues: FloatArray) -> FloatArray:
        """Returns (n,) eigenvalues less what rounding may have added to any of them."""

    @abc.abstractmethod
    def nuclear_norm_from_below(self, v: FloatArray) -> float:
        """Returns the sum of the singular values of A V^1/2, less what rounding may have added."""

    @abc.abstractmethod
    def squared_rows(self, strategy: FloatArray) -> FloatArray:
        """Returns the (n,) squared norms of the rows of A C^-1, C an (n, n) triangle."""

    @abc.abstractmethod
    def weighted(self, weights: FloatArray | None) -> "WorkloadSpectra":
        """Returns the spectra of diag(w)^1/2 A.

        Args:
          weights: (n,) above zero; None for ones.
        """

    @abc.abstractmethod
    def left_vectors(
        self, v: FloatArray, eigenvalues: FloatArray, eigenvectors: FloatArray
    ) -> FloatArray:
        """Returns the (n, n) left singular vectors of A V^1/2, in columns.

        Args:
          v: (n,) the diagonal of V, above zero.
          eigenvalues: (n,) of V^1/2 A^T A V^1/2.
          eigenvectors: (n, n) of the same.
        """

    def coarser(self) -> "WorkloadSpectra | None":
        """Returns the spectra of a similar workload of fewer rounds; None if there is none."""
        return None


class DenseSpectra(WorkloadSpectra):
    """Those of any workload."""

    def __init__(self, workload: FloatArray) -> None:
        """Computes A^T A.

        Args:
          workload: A, an (n, n) lower-triangular array.
        """
        self.num_rounds = len(workload)
        # A factor on the workload changes nothing but the range of numbers.
        self._workload = workload / np.max(np.abs(workload))
        self._gram = self._workload.T @ self._workload

    def workload(self) -> FloatArray:
        """Returns A."""
        return np.asarray(self._workload)

    def gram_diagonal(self) -> FloatArray:
        """Returns the diagonal of A^T A."""
        return np.diagonal(self._gram)

    def decomposition(self, v: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Returns eigenvalues and eigenvectors."""
        root_v = np.sqrt(v)
        eigenvalues, eigenvectors = np.linalg.eigh(self._gram * root_v * root_v[:, np.newaxis])
        floor = np.finfo(np.float64).eps * eigenvalues[-1]
        return np.maximum(eigenvalues, floor), eigenvectors

    def safe_eigenvalues(self, eigenvalues: FloatArray) -> FloatArray:
        """Less rounding: once for the product A^T A, once for its eigenvalues."""
        rounding = 2.0 * self.num_rounds * np.finfo(np.float64).eps * np.max(eigenvalues)
        return np.maximum(eigenvalues - rounding, 0.0)

    def nuclear_norm_from_below(self, v: FloatArray) -> float:
        """Returns the sum of the singular values of A V^1/2."""
        return matrix_roots.nuclear_norm_from_below(self._workload * np.sqrt(v))

    def squared_rows(self, strategy: FloatArray) -> FloatArray:
        """Returns the squared norms of the rows of A C^-1, by a triangular solve."""
        decoder = scipy.linalg.solve_triangular(
            strategy, self._workload.T, lower=True, trans="T", check_finite=False
        )
        return np.asarray(np.sum(np.square(decoder), axis=0))

    def weighted(self, weights: FloatArray | None) -> "DenseSpectra":
        """Returns the spectra of diag(w)^1/2 A."""
        if weights is None:
            return self
        found = copy.copy(self)
        found._workload = weighted(self._workload, weights)
        found._gram = found._workload.T @ found._workload
        return found

    def left_vectors(
        self, v: FloatArray, eigenvalues: FloatArray, eigenvectors: FloatArray
    ) -> FloatArray:
        """Returns the left singular vectors, by a product with A V^1/2."""
        vectors = (self._workload * np.sqrt(v)) @ eigenvectors
        return np.asarray(vectors / np.sqrt(eigenvalues))


class TridiagonalSpectra(WorkloadSpectra):
    """Those of a workload whose inverse has one or two bands."""

    def __init__(self, inverse_bands: FloatArray) -> None:
        """Keeps D.

        Args:
          inverse_bands: (n, 2), or (n, 1), with ``inverse_bands[i, t] = D[i, i - t]``.
        """
        self.num_rounds = len(inverse_bands)
        self._diagonal = inverse_bands[:, 0]
        # That of a diagonal workload has one band.
        has_second = inverse_bands.shape[1] > 1
        self._below = inverse_bands[1:, 1] if has_second else np.zeros(self.num_rounds - 1)

    def workload(self) -> FloatArray:
        """Returns A."""
        bands = np.stack([self._diagonal, np.append(self._below, 0.0)])
        return np.asarray(
            scipy.linalg.solve_banded((1, 0), bands, np.eye(self.num_rounds), check_finite=False)
        )

    def gram_diagonal(self) -> FloatArray:
        """Returns the diagonal of A^T A, by the columns of A from the last one on."""
        # Column j of A: 1 / D[j, j] in row j, and after that a multiple of column j + 1.
        squares = np.empty(self.num_rounds)
        later = 0.0
        for j in range(self.num_rounds - 1, -1, -1):
            if j + 1 < self.num_rounds:
                later *= self._below[j] ** 2
            later = (1.0 + later) / self._diagonal[j] ** 2
            squares[j] = later
        return squares

    def decomposition(self, v: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Returns eigenvalues and eigenvectors."""
        scales = 1.0 / np.sqrt(v)
        diagonal = np.square(self._diagonal * scales)
        diagonal[1:] += np.square(self._below * scales[1:])
        off_diagonal = self._diagonal[:-1] * self._below * scales[:-1] * scales[1:]
        inverses, eigenvectors = scipy.linalg.eigh_tridiagonal(
            diagonal, off_diagonal, check_finite=False
        )
        floor = np.finfo(np.float64).tiny / np.finfo(np.float64).eps
        return 1.0 / np.maximum(inverses, floor), eigenvectors

    def safe_eigenvalues(self, eigenvalues: FloatArray) -> FloatArray:
        """Less rounding: their inverses are off by n units of the largest of them, at most."""
        inverses = 1.0 / eigenvalues
        rounding = 2.0 * self.num_rounds * np.finfo(np.float64).eps * np.max(inverses)
        return np.asarray(1.0 / (inverses + rounding))

    def nuclear_norm_from_below(self, v: FloatArray) -> float:
        """Returns the sum of the singular values of A V^1/2."""
        scales = 1.0 / np.sqrt(v)
        off_diagonal = np.empty(2 * self.num_rounds - 1)
        off_diagonal[0::2] = self._diagonal * scales
        off_diagonal[1::2] = self._below * scales[1:]
        values = scipy.linalg.eigvalsh_tridiagonal(
            np.zeros(2 * self.num_rounds),
            np.abs(off_diagonal),
            check_finite=False,
            lapack_driver="sterf",
        )[self.num_rounds :]
        rounding = 2.0 * self.num_rounds * np.finfo(np.float64).eps * values[-1]
        return float(np.sum(1.0 / (np.maximum(values, 0.0) + rounding)))

    def squared_rows(self, strategy: FloatArray) -> FloatArray:
        """Returns the squared norms of the rows of B: those of C^-1, summed as D B = C^-1 says."""
        inverse, _ = dtrtri(strategy.T, lower=0)
        # LAPACK's order of columns makes rows of C^-1 of its columns.
        row, squared = np.zeros(self.num_rounds), np.empty(self.num_rounds)
        for i in range(self.num_rounds):
            if i:
                row[:i] *= -self._below[i - 1]
            row[: i + 1] += inverse[: i + 1, i]
            row[: i + 1] /= self._diagonal[i]
            squared[i] = np.dot(row[: i + 1], row[: i + 1])
        return squared

    def weighted(self, weights: FloatArray | None) -> "TridiagonalSpectra":
        """Returns the spectra of diag(w)^1/2 A."""
        if weights is None:
            return self
        bands = np.column_stack([self._diagonal, np.append(0.0, self._below)])
        return TridiagonalSpectra(weighted_inverse(bands, weights))

    def left_vectors(
        self, v: FloatArray, eigenvalues: FloatArray, eigenvectors: FloatArray
    ) -> FloatArray:
        """Returns the left singular vectors, by a product with the transposed inverse."""
        scaled = eigenvectors / np.sqrt(v)[:, np.newaxis]
        vectors = scaled * self._diagonal[:, np.newaxis]
        vectors[:-1] += scaled[1:] * self._below[:, np.newaxis]
        return np.asarray(vectors * np.sqrt(eigenvalues))

    def coarser(self) -> "WorkloadSpectra | None":
        """Returns the spectra of a prefix sum of a fourth of the rounds, if that is one."""
        if self.num_rounds <= _ROUNDS_OF_COARSEST:
            return None
        if np.ptp(self._diagonal) > 0.0 or np.ptp(self._below) > 0.0:
            return None
        rounds = self.num_rounds // _ROUNDS_PER_COARSER_ROUND
        bands = np.column_stack(
            [self._diagonal[:rounds], np.append(0.0, self._below[: rounds - 1])]
        )
        return TridiagonalSpectra(bands)


def spectra_of(workload: Workload | FloatArray) -> WorkloadSpectra:
    """Returns the spectra of a workload over its largest entry.

    Args:
      workload: A, known by its name or an (n, n) lower-triangular array of full rank.
    """
    bands = workloads.inverse_bands(workload)
    if bands is not None and bands.shape[1] <= 2:
        return TridiagonalSpectra(bands * workloads.largest_entry(workload))
    return DenseSpectra(workload.matrix() if isinstance(workload, Workload) else workload)
