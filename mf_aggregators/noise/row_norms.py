"""L2 norms of the rows of C^-1, and of the state vectors that rows follow from."""

import numpy as np

from mf_aggregators.kernel.arrays import FloatArray
from mf_aggregators.kernel.rows import (
    BandedNoise,
    DenseNoise,
    NoiseRecursion,
    StateSpaceNoise,
    WindowNoise,
)
from mf_aggregators.linear_algebra.banded_matrices import BandedCovariances, WorkloadBlocks

# Columns of C^-1 that are computed at once.
_COLUMNS = 512


def of(recursion: NoiseRecursion) -> FloatArray:
    """Returns the (n,) L2 norms of the rows of C^-1; infinite where they are beyond floats.

    Args:
      recursion: The noising matrix.
    """
    if isinstance(recursion, DenseNoise):
        return np.asarray(np.linalg.norm(recursion.inverse, axis=1))
    if isinstance(recursion, BandedNoise):
        # O(n b^2) operations.
        identity = WorkloadBlocks.identity(recursion.num_rounds, recursion.num_bands)
        with np.errstate(all="ignore"):
            squares = BandedCovariances(recursion.bands, identity).squared_rows()
            return np.where(squares < np.inf, np.sqrt(squares), np.inf)
    return np.asarray(np.abs(recursion.diagonal) * _normalised(recursion.normalised))


def largest(recursion: NoiseRecursion) -> float:
    """Returns the largest L2 norm of the rows of C^-1.

    Args:
      recursion: The noising matrix.
    """
    return float(np.max(of(recursion)))


def of_state_vectors(normalised: NoiseRecursion) -> FloatArray:
    """Returns (m,) bounds on the L2 norms of the state vectors, as combinations of rows of Z.

    Args:
      normalised: A normalised noising matrix.
    """
    if isinstance(normalised, StateSpaceNoise):
        return _of_state_space(normalised)[1]
    if isinstance(normalised, WindowNoise):
        # The accumulators only grow.
        return np.asarray(np.linalg.norm(normalised.right, axis=0))
    return np.zeros(normalised.num_state_vectors)


def _normalised(normalised: NoiseRecursion) -> FloatArray:
    """The (n,) norms of the rows of a normalised noising matrix."""
    num_rounds = normalised.num_rounds
    if isinstance(normalised, StateSpaceNoise):
        return _of_state_space(normalised)[0]
    if normalised.is_toeplitz:
        # Each row has the entries of the row before it and one more.
        impulse = np.eye(num_rounds, 1)[:, 0]
        return np.asarray(np.sqrt(np.cumsum(np.square(normalised.apply(impulse)))))
    squares = np.zeros(num_rounds)
    for first in range(0, num_rounds, _COLUMNS):
        columns = np.eye(num_rounds, min(_COLUMNS, num_rounds - first), -first)
        squares += np.sum(np.square(normalised.apply(columns)), axis=1)
    return np.sqrt(squares)


def _of_state_space(normalised: StateSpaceNoise) -> tuple[FloatArray, FloatArray]:
    """The (n,) norms of a normalised matrix's rows, and (m,) the largest of its state vectors.

    They follow from the covariance of the state vectors, from round to round, if Z is independent
    with variance one.
    """
    vectors = normalised.num_state_vectors
    squares, most = np.empty(normalised.num_rounds), np.zeros(vectors)
    covariance = np.zeros((vectors, vectors))
    of_phases = normalised.following_by_phase()
    for i, phase in enumerate(normalised.phases):
        outputs, of_row = normalised.outputs[phase], of_phases[phase, :, -1]
        squares[i] = 1.0 + outputs @ covariance @ outputs / normalised.gains[phase] ** 2
        step = of_phases[phase, :, :-1] + np.multiply.outer(of_row, outputs)
        of_z = of_row * normalised.gains[phase]
        covariance = step @ covariance @ step.T + np.multiply.outer(of_z, of_z)
        np.maximum(most, np.diagonal(covariance), out=most)
    return np.sqrt(squares), np.sqrt(most)
