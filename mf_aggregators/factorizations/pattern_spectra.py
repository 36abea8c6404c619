"""Square roots of L^T A^T A L, for L of one block for each class of rounds modulo b.

The dual of :mod:`mf_aggregators.factorizations.multi_epoch_dual` needs the trace of such a root
and its blocks for the classes. Where D = A^-1 has w bands, as for prefix sums and momentum, the
matrix is the inverse of H = L^-1 D D^T L^-T. D D^T joins rounds that are fewer than w apart, which
are in neighbouring classes, or in the last and the first ones. Two classes at a time, one from each
end, make H block tridiagonal, with blocks of 2 (w - 1) K rounds if classes have K rounds. The
blocks of H^-1/2 then take O(n w^2 K^2) operations in place of the n^3 of an eigendecomposition.
"""

import abc
import dataclasses
import functools

import numpy as np
import scipy.linalg

from mf_aggregators.factorizations.pattern_layout import PatternLayout
from mf_aggregators.linear_algebra import matrix_roots

# From so many blocks on they are faster than one large matrix.
_LEAST_BLOCKS = 24
# Eigenvalues of H are off by rounding of the largest of them, and roots follow from the least.
_LARGEST_CONDITION = 1e13


@dataclasses.dataclass(frozen=True, eq=False)
class PatternRoot:
    """The root R of L^T A^T A L.

    Attributes:
      trace: Its trace.
      blocks: (b, K, K) blocks of the classes; entries of no round are not defined.
      half: (n, n) Y with Y Y^T = R, rounds by class; None where that was not computed.
    """

    trace: float
    blocks: np.ndarray
    half: np.ndarray | None


class PatternSpectra(abc.ABC):
    """Computes the roots for one workload.

    Attributes:
      has_cheap_roots: Whether a root by blocks takes much less time than a whole one.
    """

    has_cheap_roots: bool

    @abc.abstractmethod
    def root(self, factors: np.ndarray) -> PatternRoot:
        """Returns what the dual needs of the root.

        Args:
          factors: (b, K, K) lower-triangular blocks of L, the identity's where no round is.
        """

    @abc.abstractmethod
    def whole(self, root: PatternRoot, factors: np.ndarray) -> np.ndarray:
        """Returns (n, n) R, rounds by class.

        Args:
          root: What is known of it.
          factors: The L that it belongs to.
        """


class DensePatternSpectra(PatternSpectra):
    """Those of any workload."""

    has_cheap_roots = False

    def __init__(self, workload: np.ndarray, layout: PatternLayout) -> None:
        """Computes A^T A.

        Args:
          workload: A, an (n, n) lower-triangular array.
          layout: The classes.
        """
        self._layout = layout
        self._gram = (workload.T @ workload)[np.ix_(layout.order, layout.order)]

    def root(self, factors: np.ndarray) -> PatternRoot:
        """Returns the root, by one eigendecomposition."""
        left = self._layout.blocks_times(factors.transpose(0, 2, 1), self._gram)
        eigenvalues, eigenvectors = scipy.linalg.eigh(
            self._layout.times_blocks(left, factors),
            driver="evd",
            overwrite_a=True,
            check_finite=False,
        )
        rounding = np.finfo(np.float64).eps * eigenvalues[-1]
        roots = np.sqrt(np.maximum(eigenvalues, rounding))
        eigenvectors *= np.sqrt(roots)
        vectors = self._layout.rows_by_class(eigenvectors)
        blocks = np.matmul(vectors, vectors.transpose(0, 2, 1))
        return PatternRoot(float(np.sum(roots)), blocks, eigenvectors)

    def whole(self, root: PatternRoot, factors: np.ndarray) -> np.ndarray:
        """Returns R = Y Y^T."""
        assert root.half is not None
        return root.half @ root.half.T


class BandedPatternSpectra(PatternSpectra):
    """Those of a workload whose inverse has few bands."""

    has_cheap_roots = True

    def __init__(
        self, workload: np.ndarray, inverse_bands: np.ndarray, layout: PatternLayout
    ) -> None:
        """Arranges D D^T.

        Args:
          workload: A, an (n, n) lower-triangular array.
          inverse_bands: (n, w) bands of D = A^-1, as :func:`mf_aggregators.workloads.inverse_bands`
            returns them.
          layout: The classes, of which there are enough for :meth:`is_faster`.
        """
        self._workload, self._layout = workload, layout
        columns = layout.rows_by_class(workload.T[layout.order])
        self._gram_blocks = np.matmul(columns, columns.transpose(0, 2, 1))
        self._joints = _joints(inverse_bands, layout)
        # Folded: class c is beside class b - 1 - c.
        classes = np.arange(layout.separation)
        folded = np.minimum(classes, layout.separation - 1 - classes)
        is_later = classes > layout.separation - 1 - classes
        block, within = np.divmod(folded, len(self._joints) - 1)
        self._block, self._place = block, 2 * within + is_later

    @staticmethod
    def is_faster(num_inverse_bands: int, layout: PatternLayout) -> bool:
        """Returns whether the blocks are small enough to be faster than one large matrix."""
        reach = num_inverse_bands - 1
        return reach > 0 and layout.separation >= 2 * reach * _LEAST_BLOCKS

    @functools.cached_property
    def _dense(self) -> DensePatternSpectra:
        return DensePatternSpectra(self._workload, self._layout)

    def root(self, factors: np.ndarray) -> PatternRoot:
        """Returns the root without its half, unless H is too ill-conditioned for that."""
        diagonal, above, least = self._blocks(factors)
        # Written so that NaN is ill-conditioned.
        if not matrix_roots.largest_row_sum(diagonal, above) <= _LARGEST_CONDITION * least:
            return self._dense.root(factors)
        folded = matrix_roots.inverse_root_blocks(diagonal, above, least)
        count, positions = len(folded), self._layout.positions
        by_place = folded.reshape(count, -1, positions, folded.shape[1] // positions, positions)
        blocks = by_place[self._block, self._place, :, self._place]
        diagonals = np.diagonal(blocks, axis1=1, axis2=2)
        return PatternRoot(float(np.sum(diagonals[self._layout.exists])), blocks, None)

    def whole(self, root: PatternRoot, factors: np.ndarray) -> np.ndarray:
        """Returns R."""
        if root.half is not None:
            return self._dense.whole(root, factors)
        diagonal, above, least = self._blocks(factors)
        folded = matrix_roots.inverse_root(diagonal, above, least)
        positions = self._layout.positions
        of_class = self._block * diagonal.shape[1] + self._place * positions
        rows = (of_class[:, np.newaxis] + np.arange(positions))[self._layout.exists]
        return folded[np.ix_(rows, rows)]

    def _blocks(self, factors: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
        """H: (B, s, s) diagonal blocks, (B - 1, s, s) to their right, and its least eigenvalue.

        The latter is bounded from below by the inverse of the trace of L^T A^T A L.
        """
        least = 1.0 / float(np.sum(np.matmul(self._gram_blocks, factors) * factors))
        inverse_factors = np.linalg.inv(factors)
        separation, positions = self._layout.separation, self._layout.positions
        num_blocks, places = int(np.max(self._block)) + 1, 2 * (len(self._joints) - 1)
        shape = (num_blocks, places, places, positions, positions)
        diagonal, above = np.zeros(shape), np.zeros((num_blocks - 1, *shape[1:]))
        # Where a block has fewer classes, it has rows of the identity.
        diagonal[:, np.arange(places), np.arange(places)] = np.eye(positions)
        classes = np.arange(separation)
        for lag, joints in enumerate(self._joints):
            later = (classes + lag) % separation
            joined = inverse_factors @ joints @ inverse_factors[later].transpose(0, 2, 1)
            for first, second, blocks in (
                (classes, later, joined),
                (later, classes, joined.transpose(0, 2, 1)),
            ):
                places_of_both = self._place[first], self._place[second]
                step = self._block[second] - self._block[first]
                for target, distance in ((diagonal, 0), (above, 1)):
                    here = step == distance
                    at = self._block[first][here], *(place[here] for place in places_of_both)
                    target[at] = blocks[here]
        size = places * positions
        return (
            diagonal.transpose(0, 1, 3, 2, 4).reshape(-1, size, size),
            above.transpose(0, 1, 3, 2, 4).reshape(-1, size, size),
            least,
        )


def of(
    workload: np.ndarray, inverse_bands: np.ndarray | None, layout: PatternLayout
) -> PatternSpectra:
    """Returns the spectra that are fastest.

    Args:
      workload: A, an (n, n) lower-triangular array.
      inverse_bands: (n, w) bands of A^-1; None if it has many.
      layout: The classes of rounds.
    """
    if inverse_bands is not None and BandedPatternSpectra.is_faster(inverse_bands.shape[1], layout):
        return BandedPatternSpectra(workload, inverse_bands, layout)
    return DensePatternSpectra(workload, layout)


def _joints(inverse_bands: np.ndarray, layout: PatternLayout) -> np.ndarray:
    """(w, b, K, K): D D^T between class c and the class t later, by t and c.

    Rows of no round are those of the identity.
    """
    num_rounds, width = inverse_bands.shape
    separation, positions = layout.separation, layout.positions
    joints = np.zeros((width, separation, positions, positions))
    rounds, exists = layout.rounds, layout.exists
    for lag in range(width):
        # (D D^T)[i, i + lag], of the columns that both rows have entries in.
        products = np.zeros(num_rounds)
        later = num_rounds - lag
        for t in range(width - lag):
            products[:later] += inverse_bands[:later, t] * inverse_bands[lag:, t + lag]
        classes, places = np.nonzero(exists & (rounds + lag < num_rounds))
        # After the last class comes the first one, a position later.
        later_places = places + (classes + lag) // separation
        joints[lag, classes, places, later_places] = products[rounds[classes, places]]
    classes, places = np.nonzero(~exists)
    joints[0, classes, places, places] = 1.0
    return joints
