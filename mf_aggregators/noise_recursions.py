"""Correlated noise as a recursion over rounds: (noise row, next state) from a row of Z.

Row i of C^-1 Z is needed in round i and never before, and no mechanism needs a later
row of Z for it. Each mechanism describes how its rows follow from one another as one
of the values below; NumPy (here) and the TensorFlow graph that TFF runs
(``tensor_noise``) interpret the same description.
"""

import dataclasses
import math
from typing import Any, TypeAlias

import numpy as np
import scipy.linalg


@dataclasses.dataclass(frozen=True)
class IndependentNoise:
    """C is the identity: row i of the noise is row i of Z.

    Attributes:
      num_rounds: n.
    """

    num_rounds: int


@dataclasses.dataclass(frozen=True, eq=False)
class BandedNoise:
    """C has few bands: row i of Y = C^-1 Z follows from row i of Z and earlier rows of Y.

    From C Y = Z, ``C[i, i] Y[i] = Z[i] - sum_{t=1}^{b-1} C[i, i - t] Y[i - t]`` (forward
    substitution; BandMF Sec. 2, Alg. 9).

    Attributes:
      bands: (n, b) float64 with ``bands[i, t] = C[i, i - t]``, zero where i < t.
    """

    bands: np.ndarray

    @property
    def num_rounds(self) -> int:
        """The number of rounds n."""
        return int(self.bands.shape[0])

    @property
    def num_bands(self) -> int:
        """The number of bands b."""
        return int(self.bands.shape[1])


@dataclasses.dataclass(frozen=True, eq=False)
class DenseNoise:
    """C is dense: row i of the noise is a combination of all rows of Z so far.

    Attributes:
      noising_matrix: C^-1, (n, n) float64, lower triangular.
    """

    noising_matrix: np.ndarray

    @property
    def num_rounds(self) -> int:
        """The number of rounds n."""
        return int(self.noising_matrix.shape[0])


NoiseRecursion: TypeAlias = IndependentNoise | BandedNoise | DenseNoise


@dataclasses.dataclass(frozen=True, eq=False)
class NoiseState:
    """Where a stream of noise rows stands.

    Attributes:
      round_index: The round that the next row is for, from 0.
      history: Earlier rows that the recursion still needs: (b - 1, ...) rows of
        the noise in a ring for few bands, (n, ...) rows of Z for a dense matrix,
        empty for independent noise. Owned by the stream: advancing reuses it.
    """

    round_index: int
    history: np.ndarray


def scaled_to_sensitivity_one(recursion: NoiseRecursion, sensitivity: float) -> NoiseRecursion:
    """Returns the recursion of C / sensitivity, so that every scaling of C gives the same run.

    Args:
      recursion: The recursion of C.
      sensitivity: The sensitivity of C, above zero and finite.

    Returns:
      The recursion of a matrix of sensitivity 1.

    Raises:
      ValueError: If the sensitivity is zero or not finite.
    """
    if not 0.0 < sensitivity < math.inf:
        raise ValueError(
            f"a strategy matrix of sensitivity {sensitivity} cannot be scaled to sensitivity 1."
        )
    if isinstance(recursion, BandedNoise):
        return BandedNoise(recursion.bands / sensitivity)
    if isinstance(recursion, DenseNoise):
        return DenseNoise(recursion.noising_matrix * sensitivity)
    # The identity divided by its sensitivity: one band.
    return BandedNoise(np.full((recursion.num_rounds, 1), 1.0 / sensitivity))


def floats_per_parameter(recursion: NoiseRecursion) -> int:
    """Returns how many floats of state each model parameter needs."""
    if isinstance(recursion, IndependentNoise):
        return 0
    if isinstance(recursion, BandedNoise):
        return recursion.num_bands - 1
    return recursion.num_rounds


def initial_state(
    recursion: NoiseRecursion, shape: tuple[int, ...], dtype: Any = np.float64
) -> NoiseState:
    """Returns the state before the first round, for rows of the given shape and dtype."""
    rows = floats_per_parameter(recursion)
    return NoiseState(0, np.zeros((rows, *shape), dtype))


def next_row(
    recursion: NoiseRecursion, state: NoiseState, row_of_z: np.ndarray
) -> tuple[np.ndarray, NoiseState]:
    """Returns the noise row of the state's round and the state after it.

    The history array passes to the new state and is updated in place, because
    shifting or copying it costs several times the row itself: a state must not be
    used again once it was advanced.

    Args:
      recursion: The mechanism's recursion.
      state: What :func:`initial_state` or the last call returned.
      row_of_z: A fresh row of Z, of the state's row shape.

    Returns:
      Row ``state.round_index`` of C^-1 Z, and the next state.

    Raises:
      ValueError: If the mechanism has no more rounds.
    """
    i = state.round_index
    if i >= recursion.num_rounds:
        raise ValueError(
            f"the mechanism has noise for {recursion.num_rounds} rounds, and round {i + 1} was "
            "asked for: a factorization for more rounds is needed."
        )
    history = state.history
    row = np.array(row_of_z, dtype=history.dtype)
    if isinstance(recursion, BandedNoise):
        slots = recursion.num_bands - 1
        if slots:
            weights = ring_weights(recursion, i).astype(history.dtype)
            row -= np.tensordot(weights, history, axes=1)
        row /= recursion.bands[i, 0]
        if slots:
            history[i % slots] = row
    elif isinstance(recursion, DenseNoise):
        history[i] = row
        weights = recursion.noising_matrix[i, : i + 1].astype(history.dtype)
        row = np.tensordot(weights, history[: i + 1], axes=1)
    return row, NoiseState(i + 1, history)


def ring_weights(recursion: BandedNoise, round_index: int) -> np.ndarray:
    """Returns C[i, i - t] in the order of a ring whose slot j mod (b - 1) holds row j.

    Args:
      recursion: A recursion of b >= 2 bands.
      round_index: i.

    Returns:
      (b - 1,) float64; slots that no earlier round has filled get weight zero.
    """
    slots = recursion.num_bands - 1
    lags = (round_index - 1 - np.arange(slots)) % slots + 1
    return np.where(lags <= round_index, recursion.bands[round_index, lags], 0.0)


def apply(recursion: NoiseRecursion, z: np.ndarray) -> np.ndarray:
    """Returns C^-1 Z for a whole Z of shape (n, ...), row by row through the recursion."""
    z = np.asarray(z)
    state = initial_state(recursion, z.shape[1:], np.result_type(z.dtype, np.float32))
    rows = np.empty_like(state.history, shape=z.shape)
    for i, row_of_z in enumerate(z):
        rows[i], state = next_row(recursion, state, row_of_z)
    return rows


def noising_matrix(recursion: NoiseRecursion) -> np.ndarray:
    """Returns C^-1 as a dense (n, n) float64 array."""
    if isinstance(recursion, IndependentNoise):
        return np.eye(recursion.num_rounds)
    if isinstance(recursion, DenseNoise):
        return recursion.noising_matrix
    dense = matrix_from_bands(recursion.bands)
    identity = np.eye(recursion.num_rounds)
    return scipy.linalg.solve_triangular(dense, identity, lower=True, check_finite=False)


def matrix_from_bands(bands: np.ndarray) -> np.ndarray:
    """Returns the dense lower-triangular C with ``C[i, i - t] = bands[i, t]``."""
    num_rounds, num_bands = bands.shape
    dense = np.zeros((num_rounds, num_rounds))
    for t in range(num_bands):
        rows = np.arange(t, num_rounds)
        dense[rows, rows - t] = bands[t:, t]
    return dense


def bands_of_matrix(matrix: np.ndarray, num_bands: int) -> np.ndarray:
    """Returns (n, b) ``bands[i, t] = matrix[i, i - t]``, zero where i < t."""
    num_rounds = matrix.shape[0]
    bands = np.zeros((num_rounds, num_bands))
    for t in range(num_bands):
        bands[t:, t] = np.diagonal(matrix, -t)
    return bands
