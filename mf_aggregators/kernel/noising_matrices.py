"""C^-1 as matrices: of all rounds, of a block of rounds, and the norms of its rows.

The rows are linear in Z, so those of rounds s to e - 1 together are

    rows = Z + W_earlier * (rows before s) + W_state * (state vectors at s) + W * (driving rows)

for a normalised noising matrix. The driving rows are rows of Z if rows follow from those, and the
block's own rows otherwise, each of which enters only later ones. The state vectors at e follow in
the same way. These weights, the *transition* of a block, are small and the same for all coordinates
of the model.
"""

import dataclasses
import functools

import numpy as np
import scipy.linalg

from mf_aggregators.kernel.arrays import FloatArray
from mf_aggregators.kernel.rows import (
    BandedNoise,
    DenseNoise,
    IndependentNoise,
    NoiseRecursion,
    StateSpaceNoise,
    SubstitutionNoise,
    ToeplitzNoise,
    WindowNoise,
)

# The least and the largest sensitivity of C: their squares are far from where floats lose digits.
_SENSITIVITIES = (1e-100, 1e100)
# Columns of C^-1 that are computed at once.
_COLUMNS = 512
# Rows of a banded C^-1 whose covariance is computed at once, at least.
_FEWEST_ROWS = 64


def apply(recursion: NoiseRecursion, z: FloatArray) -> FloatArray:
    """Returns C^-1 Z for a whole Z of shape (n, ...), row by row, in real arithmetic.

    It is computed in float64 and has the dtype of Z, or float32 for integers.

    Args:
      recursion: The noising matrix.
      z: Z, of at most as many rows as there are rounds.

    Raises:
      ValueError: If there are more rows of Z than rounds.
    """
    z = np.asarray(z)
    if len(z):
        recursion.check_has_round(len(z) - 1)
    rows = np.empty(z.shape, np.result_type(z.dtype, np.float32))
    normalised, diagonal = recursion.normalised, recursion.diagonal
    history = recursion.initial_state(z.shape[1:]).history
    for i in range(len(z)):
        row_of_z = np.array(z[i], np.float64)
        row = row_of_z + normalised.earlier(i, history)
        history = normalised.following(i, history, row_of_z, row)
        rows[i] = diagonal[i] * row
    return rows


def scaled_to_sensitivity_one(recursion: NoiseRecursion, sensitivity: float) -> NoiseRecursion:
    """Returns the noising matrix of C / sensitivity: every scaling of C gives the same run.

    Args:
      recursion: The noising matrix.
      sensitivity: The sensitivity of C, from 1e-100 to 1e100.

    Raises:
      ValueError: If the sensitivity is another number: it was computed from squares, which
        floats do not hold.
    """
    least, largest = _SENSITIVITIES
    if not least <= sensitivity <= largest:
        raise ValueError(
            f"a strategy matrix of sensitivity {sensitivity:g} cannot be scaled to sensitivity "
            f"1: use one between {least:g} and {largest:g}."
        )
    # Constructors refuse numbers that overflow.
    with np.errstate(all="ignore"):
        return _divided(recursion, sensitivity)


def _divided(rows: NoiseRecursion, divisor: float) -> NoiseRecursion:
    """The noising matrix of C / divisor."""
    if isinstance(rows, BandedNoise):
        return BandedNoise(rows.bands / divisor)
    if isinstance(rows, ToeplitzNoise):
        return dataclasses.replace(rows, coefficients=rows.coefficients / divisor)
    if isinstance(rows, DenseNoise):
        return DenseNoise(rows.inverse * divisor)
    if isinstance(rows, WindowNoise):
        return dataclasses.replace(rows, window=rows.window * divisor, left=rows.left * divisor)
    if isinstance(rows, StateSpaceNoise):
        return dataclasses.replace(rows, gains=rows.gains * divisor)
    return ToeplitzNoise(rows.num_rounds, np.array([1.0 / divisor]))


def dense(recursion: NoiseRecursion) -> FloatArray:
    """Returns C^-1 as an (n, n) float64 array.

    Args:
      recursion: The noising matrix.
    """
    if isinstance(recursion, DenseNoise):
        return recursion.inverse
    identity = np.eye(recursion.num_rounds)
    if isinstance(recursion, BandedNoise):
        matrix = _rows_of_bands(recursion.bands, 0, recursion.num_rounds)
        return np.asarray(
            scipy.linalg.solve_triangular(matrix, identity, lower=True, check_finite=False)
        )
    return np.tril(apply(recursion, identity))


@functools.singledispatch
def transition(normalised: NoiseRecursion, start: int, end: int) -> FloatArray:
    """Returns the transition of rounds ``start`` to ``end - 1`` of a normalised matrix.

    Args:
      normalised: A normalised noising matrix.
      start: The first round.
      end: The round after the last.

    Returns:
      (end - start + m, earlier rows + m + driving rows) float64 for m state vectors. First what
      the rows are beside the row of Z of their round, and then the state vectors at ``end``:
      from the last ``num_earlier_rows`` rows before ``start`` (oldest first; fewer in the
      first rounds), the state vectors at ``start``, and the driving rows. Those are the rows of
      Z from ``first_row_of_z(start)`` on if ``draws_earlier_rows_of_z``, and the block's own rows
      otherwise. No row has a weight for itself or for a later one.
    """
    raise TypeError(f"no noising matrix: {normalised!r}")


@transition.register
def _of_independent(normalised: IndependentNoise, start: int, end: int) -> FloatArray:
    del normalised
    return np.zeros((end - start, end - start))


@transition.register
def _of_bands(normalised: SubstitutionNoise, start: int, end: int) -> FloatArray:
    """The entries of C off its diagonal, for the rows before the block and its own."""
    size, num_earlier = end - start, min(normalised.num_earlier_rows, start)
    matrix = np.zeros((size, num_earlier + size))
    for row in range(size):
        last = num_earlier + row
        lags = min(normalised.num_bands, last + 1)
        weights = normalised.weights(start + row)
        matrix[row, last - lags + 1 : last] = -weights[1:lags][::-1]
    return matrix


@transition.register
def _of_dense(normalised: DenseNoise, start: int, end: int) -> FloatArray:
    """Rows of the matrix, without its diagonal."""
    return np.tril(normalised.inverse[start:end, :end], start - 1)


@transition.register
def _of_window(normalised: WindowNoise, start: int, end: int) -> FloatArray:
    """The window's diagonals, and accumulators of what leaves the window within the block."""
    length, first_row_of_z = normalised.window_length, normalised.first_row_of_z(start)
    rows_of_z = np.arange(first_row_of_z, end)
    lags = np.arange(start, end)[:, np.newaxis] - rows_of_z
    windows = normalised.window[start:end] if len(normalised.window) > 1 else normalised.window
    windows = np.broadcast_to(windows, (end - start, length))
    inside = (lags >= 0) & (lags < length)
    of_z = np.where(inside, np.take_along_axis(windows, np.clip(lags, 0, length - 1), 1), 0.0)
    left, right = normalised.left[start:end], normalised.right[first_row_of_z:end]
    # The accumulators at the start hold rows up to start - length.
    added = (rows_of_z > start - length) & (lags >= length - 1)
    of_z = of_z + np.where(added, left @ right.T, 0.0)
    # A row's own row of Z has no weight here, even where it leaves the window at once.
    weights = np.concatenate([left, np.where(lags > 0, of_z, 0.0)], axis=1)
    leaves = (rows_of_z > start - length) & (rows_of_z <= end - length)
    kept = np.eye(normalised.num_state_vectors)
    following = np.concatenate([kept, np.where(leaves, right.T, 0.0)], axis=1)
    return np.concatenate([weights, following])


@transition.register
def _of_state_vectors(normalised: StateSpaceNoise, start: int, end: int) -> FloatArray:
    """The recurrence applied to one unit vector for each state vector and each row."""
    vectors, size = normalised.num_state_vectors, end - start
    rows, state = np.zeros((size, vectors + size)), np.eye(vectors, vectors + size)
    for row, phase in enumerate(normalised.phases[start:end]):
        rows[row] = normalised.outputs[phase] @ state
        state = state[normalised.sources[phase]] * normalised.decays[phase][:, np.newaxis]
        state[:, vectors + row] += normalised.feedbacks[phase]
    return np.concatenate([rows, state])


def is_toeplitz(normalised: NoiseRecursion) -> bool:
    """Returns whether a normalised noising matrix is known to be the same in all rounds.

    Args:
      normalised: The normalised noising matrix.
    """
    if isinstance(normalised, StateSpaceNoise):
        return bool(np.all(normalised.phases == normalised.phases[0]))
    if isinstance(normalised, WindowNoise):
        return len(normalised.window) == 1 and not normalised.num_state_vectors
    return isinstance(normalised, IndependentNoise | ToeplitzNoise)


def signature(normalised: NoiseRecursion, start: int, end: int) -> object:
    """Returns an object that is equal for blocks that are known to have equal transitions.

    Args:
      normalised: A normalised noising matrix.
      start: The first round.
      end: The round after the last.
    """
    if isinstance(normalised, StateSpaceNoise):
        return normalised.phases[start:end].tobytes()
    if not is_toeplitz(normalised):
        return "rounds", start, end
    first = start - normalised.first_row_of_z(start)
    return end - start, min(normalised.num_earlier_rows, start), first


def following_by_phase(rows: StateSpaceNoise) -> FloatArray:
    """Returns how the state vectors follow from one round to the next, for each phase.

    Args:
      rows: The rows.

    Returns:
      (P, m, m + 1) float64: the next state vectors from the state vectors and the row.
    """
    phases, vectors = len(rows.gains), rows.num_state_vectors
    kept = np.eye(vectors)[rows.sources] * rows.decays[:, :, np.newaxis]
    return np.concatenate([kept, rows.feedbacks.reshape(phases, vectors, 1)], axis=2)


def row_norms(recursion: NoiseRecursion) -> FloatArray:
    """Returns the (n,) L2 norms of the rows of C^-1; infinite where they are beyond floats.

    Args:
      recursion: The noising matrix.
    """
    if isinstance(recursion, DenseNoise):
        return np.asarray(np.linalg.norm(recursion.inverse, axis=1))
    if isinstance(recursion, BandedNoise):
        with np.errstate(all="ignore"):
            return _row_norms_of_bands(recursion.bands)
    return np.asarray(np.abs(recursion.diagonal) * _normalised_row_norms(recursion.normalised))


def _row_norms_of_bands(bands: FloatArray) -> FloatArray:
    """The (n,) norms of the rows of C^-1, from the covariances of blocks of rows: O(n b^2)."""
    num_rounds, num_bands = bands.shape
    size = max(num_bands, _FEWEST_ROWS)
    squares, covariance = np.empty(num_rounds), np.zeros((0, 0))
    for start in range(0, num_rounds, size):
        end = min(start + size, num_rounds)
        before, own = np.split(_rows_of_bands(bands, start, end), [len(covariance)], axis=1)
        inverse = scipy.linalg.solve_triangular(
            own, np.eye(end - start), lower=True, check_finite=False
        )
        moved = inverse @ before
        covariance = inverse @ inverse.T + moved @ covariance @ moved.T
        squares[start:end] = np.diagonal(covariance)
    return np.where(squares < np.inf, np.sqrt(squares), np.inf)


def _rows_of_bands(bands: FloatArray, start: int, end: int) -> FloatArray:
    """Rows of a banded C: (end - start, columns), from the block of rows before on."""
    first = max(0, start - max(bands.shape[1], _FEWEST_ROWS))
    rows = np.zeros((end - start, end - first))
    for t in range(bands.shape[1]):
        i = np.arange(max(start, first + t), end)
        rows[i - start, i - t - first] = bands[i, t]
    return rows


def largest_row_norm(recursion: NoiseRecursion) -> float:
    """Returns the largest L2 norm of the rows of C^-1.

    Args:
      recursion: The noising matrix.
    """
    return float(np.max(row_norms(recursion)))


def state_vector_norms(normalised: NoiseRecursion) -> FloatArray:
    """Returns (m,) bounds on the L2 norms of the state vectors, as combinations of rows of Z.

    Args:
      normalised: A normalised noising matrix.
    """
    if isinstance(normalised, StateSpaceNoise):
        return _state_space_norms(normalised)[1]
    if isinstance(normalised, WindowNoise):
        # The accumulators only grow.
        return np.asarray(np.linalg.norm(normalised.right, axis=0))
    return np.zeros(normalised.num_state_vectors)


def _normalised_row_norms(normalised: NoiseRecursion) -> FloatArray:
    """The (n,) norms of the rows of a normalised noising matrix."""
    num_rounds = normalised.num_rounds
    if isinstance(normalised, StateSpaceNoise):
        return _state_space_norms(normalised)[0]
    if is_toeplitz(normalised):
        # Each row has the entries of the row before it and one more.
        impulse = np.eye(num_rounds, 1)[:, 0]
        return np.asarray(np.sqrt(np.cumsum(np.square(apply(normalised, impulse)))))
    squares = np.zeros(num_rounds)
    for first in range(0, num_rounds, _COLUMNS):
        columns = np.eye(num_rounds, min(_COLUMNS, num_rounds - first), -first)
        squares += np.sum(np.square(apply(normalised, columns)), axis=1)
    return np.sqrt(squares)


def _state_space_norms(normalised: StateSpaceNoise) -> tuple[FloatArray, FloatArray]:
    """The (n,) norms of a normalised matrix's rows, and (m,) the largest of its state vectors.

    They follow from the covariance of the state vectors, from round to round, if Z is independent
    with variance one.
    """
    vectors = normalised.num_state_vectors
    squares, most = np.empty(normalised.num_rounds), np.zeros(vectors)
    covariance = np.zeros((vectors, vectors))
    of_phases = following_by_phase(normalised)
    for i, phase in enumerate(normalised.phases):
        outputs, of_row = normalised.outputs[phase], of_phases[phase, :, -1]
        squares[i] = 1.0 + outputs @ covariance @ outputs / normalised.gains[phase] ** 2
        step = of_phases[phase, :, :-1] + np.multiply.outer(of_row, outputs)
        of_z = of_row * normalised.gains[phase]
        covariance = step @ covariance @ step.T + np.multiply.outer(of_z, of_z)
        np.maximum(most, np.diagonal(covariance), out=most)
    return np.sqrt(squares), np.sqrt(most)
