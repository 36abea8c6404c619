"""Correlated noise as a recursion over rounds: (noise row, next state) from a row of Z.

Row i of C^-1 Z is needed in round i and never before, and no mechanism needs a later
row of Z for it. Each mechanism describes how its rows follow from one another as one
of the values below; NumPy (here) and the TensorFlow graph that TFF runs
(``tensor_noise``) interpret the same description.

Two kinds of memory are told apart. Earlier rows of Z can be drawn again from their
seeds, which costs time and no state; everything else (rows of the noise, accumulators)
is state that has to be kept between rounds.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator
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

    def weights(self, round_index: int) -> np.ndarray:
        """Returns the (b,) entries C[i, i], C[i, i - 1], ... of row i."""
        return np.asarray(self.bands[round_index])


@dataclasses.dataclass(frozen=True, eq=False)
class ToeplitzNoise:
    """C = T D with T a banded Toeplitz matrix and D diagonal: BandedNoise in b + n numbers.

    With U = T^-1 Z, row i of the noise is ``row_scales[i] * U[i]``, and U follows by
    forward substitution with the same coefficients in every round.

    Attributes:
      num_rounds: n.
      coefficients: (b,) float64: the first column of T; ``coefficients[0]`` is not zero.
      row_scales: (n,) float64: the diagonal of D^-1; None for ones.
    """

    num_rounds: int
    coefficients: np.ndarray
    row_scales: np.ndarray | None = None

    @property
    def num_bands(self) -> int:
        """The number of bands b."""
        return int(self.coefficients.shape[0])

    def weights(self, round_index: int) -> np.ndarray:
        """Returns the (b,) entries T[i, i], T[i, i - 1], ..., the same for every row i."""
        return self.coefficients


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


@dataclasses.dataclass(frozen=True, eq=False)
class WindowNoise:
    """C^-1 is banded plus low rank: row i combines the last p rows of Z and r accumulators.

    ``Y[i] = row_scales[i] (sum_{t=0}^{p-1} window[i, t] Z[i - t] + left[i] . beta_i)``
    with ``beta_i = beta_{i-1} + right[j] Z[j]``, j = i - p + 1 (Denisov et al. Alg. 3;
    without accumulators, a banded C^-1).

    Attributes:
      num_rounds: n.
      window: (n, p) float64, or (1, p) where all rounds have the same; entries for rows
        before the first do not count.
      left: (n, r) float64; r = 0 without accumulators.
      right: (n, r) float64.
      row_scales: (n,) float64, or None for ones.
    """

    num_rounds: int
    window: np.ndarray
    left: np.ndarray
    right: np.ndarray
    row_scales: np.ndarray | None = None

    @property
    def window_length(self) -> int:
        """The rows of Z that one row of the noise needs, p."""
        return int(self.window.shape[1])

    @property
    def num_accumulators(self) -> int:
        """The number of accumulators r."""
        return int(self.left.shape[1])


@dataclasses.dataclass(frozen=True, eq=False)
class StateSpaceNoise:
    """A linear recurrence over m state vectors S: buffered linear Toeplitz matrices and trees.

    With p = phases[i], the recurrence of round i is
    ``Y[i] = gains[p] Z[i] + outputs[p] . S`` and, for each state vector d,
    ``S'[d] = decays[p, d] S[sources[p, d]] + inputs[p, d] Z[i] + feedbacks[p, d] Y[i]``.
    S starts at zero.

    Attributes:
      phases: (n,) int64: which of the P sets of weights each round uses.
      gains: (P,) float64.
      outputs: (P, m) float64.
      sources: (P, m) int64.
      decays: (P, m) float64.
      inputs: (P, m) float64.
      feedbacks: (P, m) float64.
    """

    phases: np.ndarray
    gains: np.ndarray
    outputs: np.ndarray
    sources: np.ndarray
    decays: np.ndarray
    inputs: np.ndarray
    feedbacks: np.ndarray

    @property
    def num_rounds(self) -> int:
        """The number of rounds n."""
        return int(self.phases.shape[0])

    @property
    def num_state_vectors(self) -> int:
        """The number of state vectors m."""
        return int(self.outputs.shape[1])


NoiseRecursion: TypeAlias = (
    IndependentNoise | BandedNoise | ToeplitzNoise | DenseNoise | WindowNoise | StateSpaceNoise
)


@dataclasses.dataclass(frozen=True, eq=False)
class NoiseState:
    """Where a stream of noise rows stands.

    Attributes:
      round_index: The round that the next row is for, from 0.
      history: What the recursion still needs of earlier rounds: (b - 1, ...) rows in a
        ring for few bands; (p, ...) rows of Z in a ring and (r, ...) accumulators for a
        window; (m, ...) state vectors; (n, ...) rows of Z for a dense matrix; empty for
        independent noise. A value, as the rest of the state: :func:`next_row` leaves it
        as it is.
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
    if isinstance(recursion, ToeplitzNoise):
        return dataclasses.replace(recursion, coefficients=recursion.coefficients / sensitivity)
    if isinstance(recursion, DenseNoise):
        return DenseNoise(recursion.noising_matrix * sensitivity)
    if isinstance(recursion, WindowNoise):
        return dataclasses.replace(
            recursion, window=recursion.window * sensitivity, left=recursion.left * sensitivity
        )
    if isinstance(recursion, StateSpaceNoise):
        return dataclasses.replace(
            recursion, gains=recursion.gains * sensitivity, inputs=recursion.inputs * sensitivity
        )
    # The identity divided by its sensitivity: one band.
    return ToeplitzNoise(recursion.num_rounds, np.array([1.0 / sensitivity]))


def floats_per_parameter(recursion: NoiseRecursion) -> int:
    """Returns how many floats of state each model parameter needs between rounds.

    Rows of Z are not counted: they are drawn again from their seeds, see
    :func:`rows_of_z_per_round`.
    """
    if isinstance(recursion, BandedNoise | ToeplitzNoise):
        return recursion.num_bands - 1
    if isinstance(recursion, WindowNoise):
        return recursion.num_accumulators
    if isinstance(recursion, StateSpaceNoise):
        return recursion.num_state_vectors
    return 0


def rows_of_z_per_round(recursion: NoiseRecursion) -> int:
    """Returns how many rows of Z the most expensive round draws, earlier rows included."""
    if isinstance(recursion, DenseNoise):
        return recursion.num_rounds
    if isinstance(recursion, WindowNoise):
        return recursion.window_length
    return 1


def initial_state(
    recursion: NoiseRecursion, shape: tuple[int, ...], dtype: Any = np.float64
) -> NoiseState:
    """Returns the state before the first round, for rows of the given shape and dtype."""
    rows = floats_per_parameter(recursion)
    if isinstance(recursion, DenseNoise | WindowNoise):
        # NumPy's stream is given its rows of Z and cannot draw them again.
        rows += rows_of_z_per_round(recursion)
    return NoiseState(0, np.zeros((rows, *shape), dtype))


def next_row(
    recursion: NoiseRecursion, state: NoiseState, row_of_z: np.ndarray
) -> tuple[np.ndarray, NoiseState]:
    """Returns the noise row of the state's round and the state after it.

    The given state does not change and can be used again: the same row of Z gives the same
    noise and the same next state. That costs a copy of the history each round, which
    :func:`stream` saves where rows are taken one after another.

    Args:
      recursion: The mechanism's recursion.
      state: What :func:`initial_state` or an earlier call returned.
      row_of_z: The round's row of Z, of the state's row shape.

    Returns:
      Row ``state.round_index`` of C^-1 Z, and the next state.

    Raises:
      ValueError: If the mechanism has no more rounds.
    """
    own = dataclasses.replace(state, history=state.history.copy())
    return _next_row_in_place(recursion, own, row_of_z)


def stream(
    recursion: NoiseRecursion,
    rows_of_z: Iterable[np.ndarray],
    shape: tuple[int, ...],
    dtype: Any = np.float64,
) -> Iterator[np.ndarray]:
    """Yields the noise rows of all rows of Z in order, without a copy of the history.

    Args:
      recursion: The mechanism's recursion.
      rows_of_z: The rows of Z; each is asked for when its noise row is.
      shape: The shape of a row.
      dtype: The dtype of the noise.

    Yields:
      Row i of C^-1 Z, for i = 0, 1, ....

    Raises:
      ValueError: If there are more rows of Z than the mechanism has rounds.
    """
    # Nobody else ever sees this state, so its history can be updated in place.
    state = initial_state(recursion, shape, dtype)
    for row_of_z in rows_of_z:
        row, state = _next_row_in_place(recursion, state, row_of_z)
        yield row


def check_has_round(recursion: NoiseRecursion, round_index: int) -> None:
    """Raises ValueError if a mechanism has no round of this index, from 0."""
    if round_index >= recursion.num_rounds:
        raise ValueError(
            f"the mechanism has noise for {recursion.num_rounds} rounds, and round "
            f"{round_index + 1} was asked for: a factorization for more rounds is needed."
        )


def _next_row_in_place(
    recursion: NoiseRecursion, state: NoiseState, row_of_z: np.ndarray
) -> tuple[np.ndarray, NoiseState]:
    """What :func:`next_row` returns; the history passes to the next state and is updated."""
    i = state.round_index
    check_has_round(recursion, i)
    history = state.history
    row = np.array(row_of_z, dtype=history.dtype)
    if isinstance(recursion, BandedNoise | ToeplitzNoise):
        row = _substituted(recursion, i, history, row)
    elif isinstance(recursion, DenseNoise):
        history[i] = row
        weights = recursion.noising_matrix[i, : i + 1]
        row = np.tensordot(weights, history[: i + 1], axes=1).astype(history.dtype)
    elif isinstance(recursion, WindowNoise):
        row = _windowed(recursion, i, history, row)
    elif isinstance(recursion, StateSpaceNoise):
        row, history = _advanced(recursion, i, history, row)
    # Arithmetic on arrays without dimensions gives NumPy scalars.
    return np.asarray(row), NoiseState(i + 1, history)


def _substituted(
    recursion: BandedNoise | ToeplitzNoise, i: int, history: np.ndarray, row: np.ndarray
) -> np.ndarray:
    slots = recursion.num_bands - 1
    if slots:
        weights = ring_weights(recursion, i).astype(history.dtype)
        row -= np.tensordot(weights, history, axes=1)
    row /= recursion.weights(i)[0]
    if slots:
        history[i % slots] = row
    if isinstance(recursion, ToeplitzNoise) and recursion.row_scales is not None:
        row = row * row.dtype.type(recursion.row_scales[i])
    return row


def _windowed(recursion: WindowNoise, i: int, history: np.ndarray, row: np.ndarray) -> np.ndarray:
    """A row of a banded C^-1 with accumulators, in float64.

    Weights rounded to single precision would be those of another matrix, whose inverse
    may differ by more than they do.
    """
    length = recursion.window_length
    ring, accumulators = history[:length], history[length:]
    ring[i % length] = row
    window = recursion.window[i if len(recursion.window) > 1 else 0]
    lags = (i - np.arange(length)) % length
    result = np.tensordot(np.where(lags <= i, window[lags], 0.0), ring, axes=1)
    if recursion.num_accumulators:
        oldest = i - length + 1
        if oldest >= 0:
            added = np.multiply.outer(recursion.right[oldest], ring[oldest % length])
            accumulators += added.astype(history.dtype)
        result += np.tensordot(recursion.left[i], accumulators, axes=1)
    if recursion.row_scales is not None:
        result *= recursion.row_scales[i]
    return np.asarray(result).astype(history.dtype)


def _advanced(
    recursion: StateSpaceNoise, i: int, history: np.ndarray, z: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """A step of the recurrence, in float64: rounded decays would be those of another matrix."""
    phase = recursion.phases[i]
    row = recursion.gains[phase] * z + np.tensordot(recursion.outputs[phase], history, axes=1)
    column = (-1,) + (1,) * z.ndim
    following = history[recursion.sources[phase]] * recursion.decays[phase].reshape(column)
    if np.any(recursion.inputs[phase]):
        following += np.multiply.outer(recursion.inputs[phase], z)
    if np.any(recursion.feedbacks[phase]):
        following += np.multiply.outer(recursion.feedbacks[phase], row)
    return row.astype(history.dtype), following.astype(history.dtype)


def ring_weights(recursion: BandedNoise | ToeplitzNoise, round_index: int) -> np.ndarray:
    """Returns C[i, i - t] in the order of a ring whose slot j mod (b - 1) holds row j.

    Args:
      recursion: A recursion of b >= 2 bands.
      round_index: i.

    Returns:
      (b - 1,) float64; slots that no earlier round has filled get weight zero.
    """
    slots = recursion.num_bands - 1
    lags = (round_index - 1 - np.arange(slots)) % slots + 1
    return np.where(lags <= round_index, recursion.weights(round_index)[lags], 0.0)


def apply(recursion: NoiseRecursion, z: np.ndarray) -> np.ndarray:
    """Returns C^-1 Z for a whole Z of shape (n, ...), row by row through the recursion."""
    z = np.asarray(z)
    dtype = np.result_type(z.dtype, np.float32)
    rows = np.empty(z.shape, dtype)
    for i, row in enumerate(stream(recursion, z, z.shape[1:], dtype)):
        rows[i] = row
    return rows


def noising_matrix(recursion: NoiseRecursion) -> np.ndarray:
    """Returns C^-1 as a dense (n, n) float64 array."""
    if isinstance(recursion, IndependentNoise):
        return np.eye(recursion.num_rounds)
    if isinstance(recursion, DenseNoise):
        return recursion.noising_matrix
    if isinstance(recursion, BandedNoise):
        dense = matrix_from_bands(recursion.bands)
        identity = np.eye(recursion.num_rounds)
        return scipy.linalg.solve_triangular(dense, identity, lower=True, check_finite=False)
    return np.tril(apply(recursion, np.eye(recursion.num_rounds)))


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
