"""Noising matrices as streams: what all kinds have in common, and the kind with few bands in C.

Row i of C^-1 Z is needed in round i and never before, and no mechanism needs a later row of Z
for it. So the noising matrix C^-1 is a stream: it says how the rows follow from one another, and
NumPy (here) and the TensorFlow graphs that TFF runs (``tff.tensor_rows``) ask it.

Two kinds of memory are told apart. Earlier rows of Z can be drawn again from their seeds, which
costs time and no state; everything else (rows of the noise, state vectors) has to be kept
between rounds.

Row i of C^-1 Z is a multiple of Z[i], by the diagonal of C^-1, and what earlier rounds add. All
arithmetic is that of a *normalised* noising matrix, whose diagonal is one, so that

    row i = Z[i] + earlier(i, history),

and rows are multiplied by the diagonal after that.

**C with few bands** is the first kind (:class:`BandedNoise`), by forward substitution
(BandMF Sec. 2, Alg. 9): from C Y = Z,
``C[i, i] Y[i] = Z[i] - sum_{t=1}^{b-1} C[i, i - t] Y[i - t]``.
"""

import abc
import dataclasses
import functools
import hashlib
import json
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np

from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.numbers import FloatArray, IntArray, RealArray

_Dtype: TypeAlias = type[np.float64] | type[np.int64]


@dataclasses.dataclass(frozen=True, eq=False)
class NoiseState:
    """Where a stream of noise rows stands.

    Attributes:
      round_index: The round that the next row is for, from 0.
      history: What the normalised noising matrix still needs of earlier rounds, (k, ...) float64,
          or int32 where all of it is rows in steps: rows of the noise or of Z in a ring, and after
          them state vectors.
    """

    round_index: int
    history: RealArray


class NoiseRecursion(abc.ABC):
    """The noising matrix as a stream: how the rows of C^-1 Z follow from one another.

    Each kind of matrix is a subclass. ``earlier`` and ``following`` make the rows one by one.

    Constructors copy their arrays and make them read-only, so that a matrix stays the one that was
    checked. They raise ValueError for a number that is not finite, also in entries that do not
    count: NumPy may leave such an entry out, and a graph multiplies it by zero, which gives NaN.
    """

    # Whether rows of the noise need rows of Z from before their round, and follow from them
    # alone. All others follow from the rows of the noise before them.
    draws_earlier_rows_of_z: ClassVar[bool] = False

    def _freeze(
        self,
        name: str,
        shape: tuple[int | None, ...],
        dtype: type[np.float64] | type[np.int64] = np.float64,
        lags_in: int | None = None,
    ) -> None:
        """Replaces a field of a new noising matrix by a checked, read-only copy of its numbers.

        Args:
          name: The field.
          shape: Its shape; None for any length above zero.
          dtype: float64, or int64 for indices.
          lags_in: n, if the last axis has lags: entries of those that reach before the first
            round become zero. Tables with a row for each round have entry [i, t] for lag t.

        Raises:
          ValueError: If it has another shape, or a number that is not finite or no index.
        """
        given = getattr(self, name)
        with np.errstate(invalid="ignore"):
            array = np.array(given, dtype=dtype)
        label = f"{name} of {type(self).__name__}"
        is_of_shape = len(array.shape) == len(shape) and all(
            found == wanted or (wanted is None and found)
            for wanted, found in zip(shape, array.shape, strict=True)
        )
        if not is_of_shape:
            wanted = ", ".join("any" if length is None else str(length) for length in shape)
            raise ValueError(f"{label} must have shape ({wanted}), found {array.shape}.")
        if not np.all(np.isfinite(array)):
            raise ValueError(
                f"{label} must be finite in all its entries, those that no row needs included."
            )
        if dtype is np.int64 and not np.array_equal(array, given):
            raise ValueError(f"{label} must be integers.")
        if lags_in is not None and len(array) == lags_in and array.ndim == 2:
            array[: array.shape[1]] = np.tril(array[: array.shape[1]])
        elif lags_in is not None:
            array[..., lags_in:] = 0.0
        array.setflags(write=False)
        object.__setattr__(self, name, array)

    if TYPE_CHECKING:
        # Some subclasses have it as a field, which a property at run time would hide.
        @property
        def num_rounds(self) -> int:
            """The number of rounds n."""

    @property
    def num_earlier_rows(self) -> int:
        """The rows of the noise that a row needs: b - 1 for b bands, else none."""
        return 0

    @property
    def num_state_vectors(self) -> int:
        """The state vectors that are kept between rounds: accumulators, or of a recurrence."""
        return 0

    @property
    def floats_per_parameter(self) -> int:
        """The floats of state that each model parameter needs between rounds.

        Rows of Z are not counted: they are drawn again from their seeds, see
        ``rows_of_z_per_round``.
        """
        return self.num_earlier_rows + self.num_state_vectors

    @property
    def rows_of_z_per_round(self) -> int:
        """The rows of Z that the most expensive round draws, earlier rows included."""
        return 1

    def first_row_of_z(self, first_round: int) -> int:
        """Returns the first row of Z that the noise of a round needs, both counted from 0."""
        return max(0, first_round - self.rows_of_z_per_round + 1)

    @property
    @abc.abstractmethod
    def diagonal(self) -> FloatArray:
        """(n,) float64: the diagonal of C^-1, without a zero."""

    @functools.cached_property
    def normalised(self) -> "NoiseRecursion":
        """The noising matrix of the rows of C^-1 Z over the diagonal of C^-1.

        Raises:
          ValueError: If the diagonal has a zero: C would have no inverse.
        """
        if not np.all(self.diagonal):
            raise ValueError("the diagonal of C^-1 must have no zero: C has an inverse.")
        # What overflows is refused by the constructor of the normalised noising matrix.
        with np.errstate(all="ignore"):
            return self._with_unit_diagonal()

    @abc.abstractmethod
    def _with_unit_diagonal(self) -> "NoiseRecursion":
        """Returns the noising matrix of the rows over the diagonal."""

    @abc.abstractmethod
    def earlier(self, i: int, history: RealArray) -> FloatArray:
        """Returns what row i of a normalised noising matrix is beside Z[i], (...) float64.

        Args:
          i: The round, from 0, of those that there are.
          history: As in ``NoiseState``.
        """

    @abc.abstractmethod
    def following(
        self, i: int, history: RealArray, row_of_z: RealArray, row: RealArray
    ) -> RealArray:
        """Returns the next history of a normalised matrix; may change the one that is given.

        Args:
          i: The round, from 0, of those that there are.
          history: As in ``NoiseState``.
          row_of_z: Row i of Z, (...).
          row: Row i of the noise, (...).
        """

    def initial_state(self, shape: tuple[int, ...]) -> NoiseState:
        """Returns the state before the first round, for rows of the given shape."""
        return NoiseState(0, np.zeros((self.rows_of_history, *shape)))

    @property
    def rows_of_history(self) -> int:
        """The rows and vectors of a history in NumPy, which cannot draw rows of Z again."""
        redrawn = self.rows_of_z_per_round if self.draws_earlier_rows_of_z else 0
        return self.floats_per_parameter + redrawn

    def copied_history(self, state: NoiseState) -> RealArray:
        """Returns a copy of a state's history, in the length that this matrix has.

        The state may be that of a matrix which this one extends, and whose ring of rows of Z is
        shorter. In a ring that was never full, slot j has row j, whatever its length.

        Args:
          state: The state.

        Raises:
          ValueError: If it lacks rows that have been, or has more than this matrix keeps.
        """
        ring = len(state.history) - self.num_state_vectors
        missing = self.rows_of_history - len(state.history)
        if missing == 0:
            return state.history.copy()
        if missing < 0 or not self.draws_earlier_rows_of_z or state.round_index > ring:
            raise ValueError(
                f"the noise of earlier rounds has {len(state.history)} rows in round "
                f"{state.round_index + 1}, and this matrix keeps {self.rows_of_history}: the "
                "state is of another one."
            )
        kept: Any = state.history
        return np.asarray(np.insert(kept, [ring] * missing, 0, axis=0))

    def check_has_round(self, round_index: int) -> None:
        """Raises ValueError if the mechanism has no round of this index, from 0."""
        if round_index >= self.num_rounds:
            raise ValueError(
                f"the mechanism has noise for {self.num_rounds} rounds, and round "
                f"{round_index + 1} was asked for: a factorization for more rounds is needed."
            )


@dataclasses.dataclass(frozen=True, eq=False)
class BandedNoise(NoiseRecursion):
    """C has few bands: row i follows from row i of Z and the b - 1 rows before it, in a ring.

    Row i of the noise is ``row_scales[i] * U[i]``, and U follows by forward substitution:
    ``sum_{t=0}^{b-1} bands[i, t] U[i - t] = Z[i]``. So C = T D with the bands of T and D = 1 /
    ``row_scales``.

    Attributes:
      num_rounds: n.
      bands: (n, b) float64, or (1, b) where all rounds have the same (T is Toeplitz); entry
        [i, 0] is not zero, and entries for rows before the first become zero.
      row_scales: (n,) float64, or None for ones.
    """

    num_rounds: int
    bands: FloatArray
    row_scales: FloatArray | None = None

    def __post_init__(self) -> None:
        numbers.set_positive_integers(self, "num_rounds")
        rounds = self.num_rounds
        self._freeze("bands", (1 if len(self.bands) == 1 else rounds, None), lags_in=rounds)
        if self.row_scales is not None:
            self._freeze("row_scales", (rounds,))

    @property
    def num_earlier_rows(self) -> int:
        """The rows before a row that it follows from, b - 1."""
        return int(self.bands.shape[1]) - 1

    @property
    def diagonal(self) -> FloatArray:
        """The row scales over the first band, (n,) float64."""
        scales = np.ones(self.num_rounds) if self.row_scales is None else self.row_scales
        return np.asarray(scales / self.bands[:, 0])

    def _with_unit_diagonal(self) -> NoiseRecursion:
        lags = np.arange(self.num_earlier_rows + 1)
        columns = np.arange(len(self.bands))[:, np.newaxis] - lags
        return BandedNoise(self.num_rounds, self.bands / self.bands[np.maximum(columns, 0), 0])

    def earlier(self, i: int, history: RealArray) -> FloatArray:
        """Substitutes the rows in the ring, whose slot j mod (b - 1) holds row j."""
        slots = self.num_earlier_rows
        if not slots:
            return np.zeros(history.shape[1:])
        lags = (i - 1 - np.arange(slots)) % slots + 1
        # Slots that no earlier round has filled count for nothing.
        weights = np.where(lags <= i, self.bands[i if len(self.bands) > 1 else 0][lags], 0.0)
        return -np.tensordot(weights, history, axes=1)

    def following(
        self, i: int, history: RealArray, row_of_z: RealArray, row: RealArray
    ) -> RealArray:
        """Keeps the row in place of the oldest one."""
        if self.num_earlier_rows:
            history[i % self.num_earlier_rows] = row
        return history


def banded_rows(bands: FloatArray) -> BandedNoise:
    """Returns the rows of a C with ``bands[i, t] = C[i, i - t]``, (n, b)."""
    return BandedNoise(len(bands), bands)


def toeplitz_rows(
    num_rounds: int, coefficients: FloatArray, row_scales: FloatArray | None = None
) -> BandedNoise:
    """Returns the rows of C = T D, T Toeplitz and D diagonal.

    Args:
      num_rounds: n.
      coefficients: (b,) the first column of T.
      row_scales: (n,) one over the diagonal of D; None for ones.
    """
    return BandedNoise(num_rounds, np.asarray(coefficients)[np.newaxis], row_scales)


def independent_rows(num_rounds: int) -> BandedNoise:
    """Returns the rows of C = I: row i of the noise is row i of Z."""
    return toeplitz_rows(num_rounds, np.ones(1))


@dataclasses.dataclass(frozen=True, eq=False)
class DenseNoise(NoiseRecursion):
    """C is dense: row i of the noise is a combination of all rows of Z so far.

    Attributes:
      inverse: C^-1, (n, n) float64, lower triangular; entries above the diagonal become zero.
    """

    draws_earlier_rows_of_z: ClassVar[bool] = True

    inverse: FloatArray

    def __post_init__(self) -> None:
        self._freeze("inverse", (len(self.inverse), len(self.inverse)))
        lower = np.tril(self.inverse)
        lower.setflags(write=False)
        object.__setattr__(self, "inverse", lower)

    @property
    def num_rounds(self) -> int:
        """The number of rounds n."""
        return int(self.inverse.shape[0])

    @property
    def rows_of_z_per_round(self) -> int:
        """The rows of Z that the last round draws, n."""
        return self.num_rounds

    @property
    def diagonal(self) -> FloatArray:
        """The diagonal of the matrix, (n,) float64."""
        return np.diagonal(self.inverse)

    def _with_unit_diagonal(self) -> NoiseRecursion:
        return DenseNoise(self.inverse / self.diagonal[:, np.newaxis])

    def earlier(self, i: int, history: RealArray) -> FloatArray:
        """Combines all rows of Z before the round's, which are the history."""
        return np.tensordot(self.inverse[i, :i], history[:i], axes=1)

    def following(
        self, i: int, history: RealArray, row_of_z: RealArray, row: RealArray
    ) -> RealArray:
        """Keeps the row of Z."""
        history[i] = row_of_z
        return history


@dataclasses.dataclass(frozen=True, eq=False)
class WindowNoise(NoiseRecursion):
    """C^-1 is banded plus low rank: row i combines the last p rows of Z and r accumulators.

    ``Y[i] = row_scales[i] (sum_{t=0}^{p-1} window[i, t] Z[i - t] + left[i] . beta_i)``
    with ``beta_i = beta_{i-1} + right[j] Z[j]``, j = i - p + 1 (Denisov et al. Alg. 3;
    without accumulators, a banded C^-1).

    Attributes:
      num_rounds: n.
      window: (n, p) float64, or (1, p) where all rounds have the same; entries for rows
        before the first become zero.
      left: (n, r) float64; r = 0 without accumulators.
      right: (n, r) float64.
      row_scales: (n,) float64, or None for ones.
    """

    draws_earlier_rows_of_z: ClassVar[bool] = True

    num_rounds: int
    window: FloatArray
    left: FloatArray
    right: FloatArray
    row_scales: FloatArray | None = None

    def __post_init__(self) -> None:
        numbers.set_positive_integers(self, "num_rounds")
        rounds, rank = self.num_rounds, np.shape(self.left)[-1]
        self._freeze("window", (1 if len(self.window) == 1 else rounds, None), lags_in=rounds)
        self._freeze("left", (rounds, rank))
        self._freeze("right", (rounds, rank))
        if self.row_scales is not None:
            self._freeze("row_scales", (rounds,))

    @property
    def window_length(self) -> int:
        """The rows of Z that one row of the noise needs, p."""
        return int(self.window.shape[1])

    @property
    def num_state_vectors(self) -> int:
        """The number of accumulators r."""
        return int(self.left.shape[1])

    @property
    def rows_of_z_per_round(self) -> int:
        """The rows of Z that a round draws, p."""
        return self.window_length

    @property
    def diagonal(self) -> FloatArray:
        """The first of the window's numbers of each round, scaled, (n,) float64."""
        entries = np.broadcast_to(self.window[:, 0], self.num_rounds)
        if self.window_length == 1:
            # The row of Z leaves the window in its own round.
            entries = entries + np.sum(self.left * self.right, axis=1)
        return entries if self.row_scales is None else entries * self.row_scales

    def _with_unit_diagonal(self) -> NoiseRecursion:
        if len(self.window) == 1 and not self.num_state_vectors:
            window, left = self.window / self.window[0, 0], self.left
        else:
            scales: float | FloatArray = 1.0 if self.row_scales is None else self.row_scales
            rows = (scales / self.diagonal)[:, np.newaxis]
            window, left = self.window * rows, self.left * rows
        return WindowNoise(self.num_rounds, window, left, self.right)

    def earlier(self, i: int, history: RealArray) -> FloatArray:
        """Combines the earlier rows of Z in the window, and the accumulators."""
        length = self.window_length
        ring, accumulators = history[:length], history[length:]
        # Rows so far only: neither the terms nor their order depend on the length of the ring.
        ring = ring[:i]
        lags = (i - np.arange(len(ring))) % length
        weights = self.window[i if len(self.window) > 1 else 0][lags]
        combined = np.tensordot(np.where((lags > 0) & (lags <= i), weights, 0.0), ring, axes=1)
        if self.num_state_vectors:
            combined = combined + np.tensordot(self.left[i], accumulators, axes=1)
            # What leaves the window in this round counts already.
            if 0 <= i - length + 1 < i:
                gain = self.left[i] @ self.right[i - length + 1]
                combined += gain * ring[(i + 1) % length]
        return combined

    def following(
        self, i: int, history: RealArray, row_of_z: RealArray, row: RealArray
    ) -> RealArray:
        """Puts the row of Z into the window, and adds what leaves it to the accumulators."""
        length, oldest = self.window_length, i - self.window_length + 1
        history[i % length] = row_of_z
        if self.num_state_vectors and oldest >= 0:
            history[length:] += np.multiply.outer(self.right[oldest], history[oldest % length])
        return history


@dataclasses.dataclass(frozen=True, eq=False)
class StateSpaceNoise(NoiseRecursion):
    """A linear recurrence over m state vectors S, which start at zero.

    With p = phases[i], the recurrence of round i is
    ``Y[i] = gains[p] Z[i] + outputs[p] . S`` and, for each state vector d,
    ``S'[d] = decays[p, d] S[sources[p, d]] + feedbacks[p, d] Y[i]``.

    Attributes:
      phases: (n,) int64: which of the P sets of weights each round uses.
      gains: (P,) float64.
      outputs: (P, m) float64.
      sources: (P, m) int64.
      decays: (P, m) float64.
      feedbacks: (P, m) float64.
    """

    phases: IntArray
    gains: FloatArray
    outputs: FloatArray
    sources: IntArray
    decays: FloatArray
    feedbacks: FloatArray

    def __post_init__(self) -> None:
        self._freeze("phases", (None,), np.int64)
        self._freeze("gains", (None,))
        phases, vectors = len(self.gains), np.shape(self.outputs)[-1]
        for name in ("outputs", "decays", "feedbacks"):
            self._freeze(name, (phases, vectors))
        self._freeze("sources", (phases, vectors), np.int64)
        # NumPy counts negative indices from the end, and a graph does not.
        for name, end in (("phases", phases), ("sources", vectors)):
            indices = getattr(self, name)
            if np.any((indices < 0) | (indices >= end)):
                raise ValueError(f"{name} of StateSpaceNoise must be at least 0 and below {end}.")

    @property
    def num_rounds(self) -> int:
        """The number of rounds n."""
        return int(self.phases.shape[0])

    @property
    def num_state_vectors(self) -> int:
        """The number of state vectors m."""
        return int(self.outputs.shape[1])

    @property
    def diagonal(self) -> FloatArray:
        """The gain of each round, (n,) float64."""
        return np.asarray(self.gains[self.phases])

    def _with_unit_diagonal(self) -> NoiseRecursion:
        column = self.gains[:, np.newaxis]
        return dataclasses.replace(
            self,
            gains=np.ones_like(self.gains),
            outputs=self.outputs / column,
            feedbacks=self.feedbacks * column,
        )

    def earlier(self, i: int, history: RealArray) -> FloatArray:
        """Combines the state vectors."""
        return np.tensordot(self.outputs[self.phases[i]], history, axes=1)

    def following(
        self, i: int, history: RealArray, row_of_z: RealArray, row: RealArray
    ) -> RealArray:
        """A step of the recurrence."""
        phase = self.phases[i]
        column = (-1,) + (1,) * row.ndim
        following = history[self.sources[phase]] * self.decays[phase].reshape(column)
        if np.any(self.feedbacks[phase]):
            following += np.multiply.outer(self.feedbacks[phase], row)
        return np.asarray(following)


def fingerprint(described: Any, rows: NoiseRecursion) -> bytes:
    """Returns a digest of a description and of rows, bit for bit.

    Rows of the same numbers but of another class, dtype or shape have another digest, and so have
    rows that differ in the last bit of one number. So a state fits the rows of a file that was
    saved, or of the same search on the same machine. Another machine may round a search otherwise.

    Args:
      described: Numbers, texts, None and truth values, in mappings with texts as names, lists and
        tuples.
      rows: The rows, of a class that is a dataclass.

    Returns:
      32 bytes.
    """
    # The shortest text of a float is that of no other float.
    found = hashlib.blake2b(json.dumps([described, type(rows).__name__]).encode(), digest_size=32)
    fields: Any = rows
    for each in dataclasses.fields(fields):
        value = getattr(rows, each.name)
        is_array = isinstance(value, np.ndarray)
        label = [each.name, *([value.dtype.str, value.shape] if is_array else [value])]
        found.update(json.dumps(label).encode())
        if is_array:
            found.update(np.ascontiguousarray(value).tobytes())
    return found.digest()
