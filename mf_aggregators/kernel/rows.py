"""Noising matrices C^-1 as arrays, and how each row of the noise C^-1 Z follows from earlier ones.

Row i of C^-1 Z is needed in round i and never before, and no mechanism needs a later row of Z
for it. So rows are made one after another, or in blocks, in NumPy (``kernel.integers``) and in the
TensorFlow graphs that TFF runs (``tff.tensor_rows``).

Two kinds of memory are told apart. Earlier rows of Z can be drawn again from their seeds, which
costs time and no state; everything else (rows of the noise, state vectors) has to be kept
between rounds.

Row i of C^-1 Z is a multiple of Z[i], by the diagonal of C^-1, and what earlier rounds add. All
arithmetic is that of a *normalised* noising matrix, whose diagonal is one, so that

    row i = Z[i] + what earlier rounds add,

and rows are multiplied by the diagonal after that. The rows of rounds s to e - 1 together are

    rows = Z + W_earlier * (rows before s) + W_state * (state vectors at s) + W * (driving rows).

The driving rows are rows of Z if rows follow from those, and the block's own rows otherwise, each
of which enters only later ones. The state vectors at e follow in the same way. These weights, the
*transition* of a block, are small and the same for all coordinates of the model.

Row by row, all that is kept of earlier rounds is read in every round: with b bands, b - 1 rows of
the model's size. The rows of a *block* are one matrix product, which reads it once. Blocks start
small and double (rounds 0, 1, 2 to 3, 4 to 7, ...) up to their largest size, so that no round has
to wait for a whole large block, and so that each block can be made while the one before it is used.

**Trees.** The tree over n leaves has a node over rounds a 2^h to (a + 1) 2^h - 1 for all a and h
with (a + 1) 2^h <= n. Its strategy matrix C_T has a row of ones and zeros for each node. A node
over m > 1 leaves splits at the largest power of two below m. Its sum is released if it is over 2^h
leaves; the other nodes join the complete trees of the binary expansion of n.

**Strategy matrices.** C of the rows that are drawn, Y = C^-1 Z, is computed from the rows alone.

Every kind of rows gives C as data, with a bound on its errors:

* **Bands**: C is what the rows are defined by.
* **State spaces**: C Y = Z is a state space with the same state vectors, which follow from Y alone:
  ``Z[i] = (Y[i] - outputs . S) / gains``. Each state vector is a product of decays and one
  feedback, so that an entry of C is a sum of m products of at most i - j + 2 factors, and floats
  change it by at most gamma_(i - j + m + 4) times the sum of their magnitudes (gamma_k =
  k u / (1 - k u), u = 2^-53; Higham, Accuracy and Stability of Numerical Algorithms, Ch. 3).
  Numbers of normalised rows, which are what is drawn, have up to four roundings more.
* **Scaled rows**: C = P T D for the T of the inner rows, whose errors grow by at most the largest
  scales, and a few roundings.
* **All others**: C is the inverse of N, the noising matrix, by a triangular solve, or by the
  reciprocal of a power series if N is Toeplitz. The computed matrix M is believed only because of
  its *left residual* E = M N - I. With e >= ||E||_2 and e < 1, M = (I + E) C, so that

      C - M = -E C = -E (I + E)^-1 M,      ||column j of (C - M)|| <= e / (1 - e) ||column j of M||.

  The computed product P of M and N has errors of at most gamma_(n + 1) |M| |N|, entry by entry, in
  whichever order terms are summed (Higham, Sec. 3.5), so that e = ||P - I||_F + gamma_(n + 1)
  || |M| |N| ||_2. The norm of a non-negative matrix is at most the square root of its largest row
  sum times its largest column sum; both take products with a vector.
* **Power series.** A Toeplitz matrix has at most the sum of the magnitudes of its first column as
  its norm. The product p of two series a and b is computed by Fourier transforms of N = 2^L points,
  in numbers of 64 bits with roundoff v where the processor has them. A transform has a relative
  error of at most t = 16 L v in L2 norm (Higham, Thm 24.2, for twiddle factors of errors of a few
  v), and no entry of it is larger than the sum of magnitudes. So the L2 error of p is at most
  t (||a||_1 ||b||_2 + 2 ||a||_2 ||b||_1): of the transform of b, and of the transform of a and the
  one back with the roundings of the products. Its L1 norm is at most sqrt(n) times that.

All of these are proofs, and none is a sample. ``Strategy.error`` bounds the norms of the columns
of C - M. It adds at most k ``error`` to the sensitivity under a schema of at most k participations:
for contributions x_j of norm at most one, ||sum_j (C - M)_j x_j^T||_F <= sum_j ||(C - M)_j||.

The leading part of C is the inverse of the leading part of N, because both are lower triangular:
it is what a run that stopped early has released.
"""

import abc
import dataclasses
import functools
import itertools
import json
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import scipy.fft
import scipy.linalg
from scipy.linalg.lapack import dtrtri

from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.numbers import FloatArray, IntArray, NotProved

# The fewest rows of a block when covariances of rows are computed.
_FEWEST_ROWS = 64
# The most rows in a block, if each row of Z is drawn once (larger blocks read the kept rows less
# often, and hold more rows), and if earlier rows of Z are drawn again (larger blocks draw fewer
# rows).
_ROWS_PER_BLOCK, _ROWS_PER_REDRAWING_BLOCK = 64, 128
# From this number of earlier rows on, blocks have fewer rows: they should add little to the memory
# of the rows that are kept.
_MANY_EARLIER_ROWS = 128
_FEWEST_ROWS_PER_BLOCK = 24
_EARLIER_ROWS_PER_ROW_OF_BLOCK = 14
# The least scale of a row of a scaled matrix; the largest scale is its inverse.
LEAST_SCALE = 1e-50


class NoiseRecursion(abc.ABC):
    """A noising matrix C^-1: how the rows of C^-1 Z follow from Z and from earlier rows.

    Each kind of matrix is a subclass. Its method ``transition`` returns the weights of its rows.

    Constructors copy their arrays and make them read-only, so that a matrix stays the one that was
    checked. They raise ValueError for a number that is not finite, even in entries that are not
    used: NumPy may leave such an entry out, and a graph multiplies it by zero, which gives NaN.

    Attributes:
      num_rounds: The number of rounds n.
      draws_earlier_rows_of_z: Whether rows of the noise follow from rows of Z, earlier ones
        included. If it is False, they follow from the round's row of Z and from earlier rows of the
        noise.
      num_earlier_rows: The number of earlier rows of the noise that a row needs: b - 1 for b bands,
        and otherwise 0.
      num_state_vectors: The number of state vectors that are kept between rounds, which are
        accumulators or those of a recurrence.
      rows_of_z_per_round: The number of rows of Z that the most expensive round draws, earlier rows
        included.
      is_toeplitz: Whether the matrix is known to be Toeplitz: its weights are the same in all
        rounds.
    """

    num_rounds: int
    draws_earlier_rows_of_z: bool = False
    num_earlier_rows: int = 0
    num_state_vectors: int = 0
    rows_of_z_per_round: int = 1
    is_toeplitz: bool = False
    # Each kind of matrix is a dataclass.
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[object]]]

    def _set(self, **values: object) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _freeze(
        self, name: str, *shape: int | None, end: int | None = None, has_lags: bool = False
    ) -> None:
        """Replaces a field of a new noising matrix by a checked, read-only copy.

        Args:
          name: The name of the field.
          *shape: The shape that it must have; None for any length above zero.
          end: For an array of indices, which become int64: all must be below this number. None for
            other arrays, which become float64.
          has_lags: Whether the last axis is that of lags: entries of lags that reach before the
            first round become zero. Tables with a row for each round have entry [i, t] for lag t.

        Raises:
          ValueError: If the field has another shape, or a number that is not finite or not a valid
            index.
        """
        given, label = getattr(self, name), f"{name} of {type(self).__name__}"
        with np.errstate(invalid="ignore"):
            array = np.array(given, np.float64 if end is None else np.int64)
        pairs = zip(array.shape, shape, strict=False)
        fits = [length if wanted is None else length == wanted for length, wanted in pairs]
        if array.ndim != len(shape) or not all(fits):
            wanted = str(shape).replace("None", "any")
            raise ValueError(f"{label} must have shape {wanted}, found {array.shape}.")
        if not np.all(np.isfinite(array)):
            raise ValueError(f"{label} must be finite, also in entries that no row uses.")
        # Negative indices are refused: NumPy counts them from the end, and a TensorFlow graph does
        # not.
        if end is not None and np.any((array != np.asarray(given)) | (array < 0) | (array >= end)):
            raise ValueError(f"{label} must be integers of at least 0 and below {end}.")
        if has_lags and len(array) > 1:
            array[: array.shape[1]] = np.tril(array[: array.shape[1]])
        elif has_lags:
            array[:, self.num_rounds :] = 0.0
        # A read-only buffer cannot be made writeable again by a flag.
        self._set(**{name: np.asarray(array.data.toreadonly())})

    def __reduce__(self) -> tuple[object, ...]:
        # Copying and unpickling call the constructor, because a copy that NumPy makes could be
        # written to.
        fields = dataclasses.fields(self)
        return type(self), tuple(getattr(self, field.name) for field in fields)

    @property
    def reach(self) -> int:
        """The number of rows, from its own on, that a round's column of C and roundings reach."""
        is_far = self.draws_earlier_rows_of_z or self.num_state_vectors > 0
        return self.num_rounds if is_far else self.num_earlier_rows + 1

    def first_row_of_z(self, first_round: int) -> int:
        """Returns the first row of Z that the noise of a round needs, counted from 0."""
        return max(0, first_round - self.rows_of_z_per_round + 1)

    @property
    @abc.abstractmethod
    def diagonal(self) -> FloatArray:
        """(n,) float64: the diagonal of C^-1, without a zero."""

    @functools.cached_property
    def normalised(self) -> "NoiseRecursion":
        """The noising matrix with each row divided by its diagonal entry, which becomes 1.

        Raises:
          ValueError: If the diagonal has a zero: C would have no inverse.
        """
        if not np.all(self.diagonal):
            raise ValueError("the diagonal of C^-1 must have no zero: C has an inverse.")
        # Infinite entries may result, and the constructor of the normalised noising matrix refuses
        # them.
        with np.errstate(all="ignore"):
            return self._with_unit_diagonal()

    @abc.abstractmethod
    def _with_unit_diagonal(self) -> "NoiseRecursion":
        """Returns the noising matrix with each row divided by its diagonal entry."""

    @abc.abstractmethod
    def transition(self, start: int, end: int) -> FloatArray:
        """Returns the weights that make a block's rows from earlier rows; for normalised ones.

        Args:
          start: The first round.
          end: The round after the last.

        Returns:
          (end - start + m, earlier rows + m + driving rows) float64 for m state vectors. The first
          end - start rows of the array are the weights of the block's rows, without the row of Z of
          their own round; the last m are those of the state vectors at ``end``. The weights are for
          the last ``num_earlier_rows`` rows before ``start`` (oldest first; fewer in the first
          rounds), the state vectors at ``start``, and the driving rows. The driving rows are the
          rows of Z from ``first_row_of_z(start)`` on if ``draws_earlier_rows_of_z``, and the
          block's own rows otherwise. No row has a weight for itself or for a later row.
        """

    def _signature(self, start: int, end: int) -> object:
        """Returns a key that is equal for blocks with equal transitions; None if none is known."""
        if not self.is_toeplitz:
            return None
        first = start - self.first_row_of_z(start)
        return end - start, min(self.num_earlier_rows, start), first

    def linear_map(self, start: int, end: int) -> FloatArray:
        """Returns a block's rows and state vectors as a linear map of earlier ones and of Z.

        The matrix must be normalised.

        Args:
          start: The first round.
          end: The round after the last.

        Returns:
          (end - start + m, k + end - start) float64 for m state vectors. The first end - start rows
          give the rows of the noise in rounds ``start`` to ``end - 1``, and the last m the state
          vectors at ``end``. The columns are the k columns of ``transition`` that come before the
          block's own, and then the rows of Z of the block's rounds.
        """
        size, matrix = end - start, self.transition(start, end)
        before, own = matrix[:, :-size], matrix[:, -size:]
        one = np.eye(size)
        if self.draws_earlier_rows_of_z:
            own[:size] += one
            return matrix
        inverse = scipy.linalg.solve_triangular(
            one - own[:size], one, lower=True, check_finite=False
        )
        rows = inverse @ np.hstack([before[:size], one])
        vectors = own[size:] @ rows
        vectors[:, : before.shape[1]] += before[size:]
        return np.vstack([rows, vectors])

    def row_norms(self) -> tuple[FloatArray, FloatArray]:
        """Returns at least the L2 norms of rows and of state vectors, as combinations of rows of Z.

        The matrix must be normalised. The norms are standard deviations if numbers of Z are
        independent with a standard deviation of one. They follow from the covariances of the kept
        rows and vectors, block by block: in O(n b^2) operations for b bands. What roundings may
        take off is added, because covariances may cancel.

        Returns:
          (n,) float64 norms of the rows, and (m,) the largest norm of each state vector in any
          round; infinite or NaN if a norm is beyond floats.
        """
        vectors, size = self.num_state_vectors, max(self.num_earlier_rows, _FEWEST_ROWS)
        if vectors and not self.draws_earlier_rows_of_z:
            # With state vectors, each round is a block: a state vector may be larger within a
            # longer block than at its end.
            size = 1
        maps: dict[object, tuple[FloatArray, FloatArray]] = {}
        squares, most, covariance = np.ones(self.num_rounds), np.zeros(vectors), 0 * np.eye(vectors)
        with np.errstate(all="ignore"):
            for start in range(0, self.num_rounds, size):
                end = min(start + size, self.num_rounds)
                key = self._signature(start, end)
                if key is None or key not in maps:
                    kept, of_z = np.split(self.linear_map(start, end), [len(covariance)], axis=1)
                    # The block's rows of Z are independent of the kept rows and state vectors, so
                    # covariances add up.
                    maps[key] = kept, of_z @ of_z.T
                kept, own = maps[key]
                sizes = np.abs(kept) @ np.sqrt(np.diagonal(covariance)) + np.sqrt(np.diagonal(own))
                after = kept @ covariance @ kept.T + own
                # Errors are |e_ij| <= gamma s_i s_j, so that e is at most this diagonal matrix.
                after.flat[:: len(after) + 1] += _gamma(4 * sum(kept.shape)) * len(kept) * sizes**2
                squares[start:end], states = np.split(np.diagonal(after), [end - start])
                np.maximum(most, states, out=most)
                first = max(0, end - start - self.num_earlier_rows)
                covariance = after[first:, first:]
            return np.sqrt(squares), np.sqrt(most)

    def fingerprint(self, described: object) -> bytes:
        """Returns a digest of a description and of all numbers of this matrix, bit for bit.

        Matrices of other classes, dtypes or shapes have other digests, and so do matrices that
        differ in the last bit of one number. So a state fits the rows of a file that was saved, or
        of the same search on the same machine. Another machine may round a search otherwise.

        Args:
          described: Numbers, texts, None and truth values, in mappings with texts as names, lists
            and tuples.

        Returns:
          32 bytes.
        """
        values = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        arrays = {name: each for name, each in values.items() if isinstance(each, np.ndarray)}
        # JSON writes the shortest text of a float, which no other float has.
        others = {
            name: each.fingerprint(None).hex() if isinstance(each, NoiseRecursion) else each
            for name, each in values.items()
            if name not in arrays
        }
        label = [described, type(self).__name__, others, list(arrays)]
        return numbers.digest(json.dumps(label), arrays.values())


@dataclasses.dataclass(frozen=True, eq=False)
class BandedNoise(NoiseRecursion):
    """A C with b bands: row i of the noise follows from row i of Z and the b - 1 rows before it.

    The rows follow by forward substitution (BandMF Sec. 2, Alg. 9):
    ``sum_{t=0}^{b-1} bands[i, t] Y[i - t] = Z[i]``.

    Attributes:
      num_rounds: n.
      bands: (n, b) float64, or (1, b) if all rounds have the same bands (C is Toeplitz); entry [i,
        0] is not zero, and entries for rows before the first become zero. By default C = I.
    """

    num_rounds: int
    bands: FloatArray = dataclasses.field(default_factory=lambda: np.ones((1, 1)))

    def __post_init__(self) -> None:
        numbers.set_positive_integers(self, "num_rounds")
        is_toeplitz = len(self.bands) == 1
        self._freeze("bands", 1 if is_toeplitz else self.num_rounds, None, has_lags=True)
        self._set(num_earlier_rows=self.bands.shape[1] - 1, is_toeplitz=is_toeplitz)

    @property
    def diagonal(self) -> FloatArray:
        """The diagonal of C^-1, (n,) float64: one over the first band of C."""
        return np.asarray(np.ones(self.num_rounds) / self.bands[:, 0])

    def _with_unit_diagonal(self) -> NoiseRecursion:
        lags = np.arange(self.num_earlier_rows + 1)
        columns = np.arange(len(self.bands))[:, np.newaxis] - lags
        return BandedNoise(self.num_rounds, self.bands / self.bands[np.maximum(columns, 0), 0])

    def transition(self, start: int, end: int) -> FloatArray:
        """Returns C's entries off the diagonal, negated, as weights of earlier rows of noise."""
        columns = min(self.num_earlier_rows, start) + end - start
        return 0.0 - _below_diagonal(self.bands, start, end, columns)


@dataclasses.dataclass(frozen=True, eq=False)
class WindowNoise(NoiseRecursion):
    """A C^-1 that is banded plus low rank: rows combine the last p rows of Z and r accumulators.

    ``Y[i] = sum_{t=0}^{p-1} window[i, t] Z[i - t] + left[i] . beta_i``
    with ``beta_i = beta_{i-1} + right[j] Z[j]``, j = i - p + 1 (Denisov et al. Alg. 3;
    without accumulators, a banded C^-1).

    Attributes:
      num_rounds: n.
      window: (n, p) float64, or (1, p) if all rounds have the same weights; entries for rows before
        the first become zero.
      left: (n, r) float64; r = 0 without accumulators.
      right: (n, r) float64.
    """

    num_rounds: int
    window: FloatArray
    left: FloatArray
    right: FloatArray

    def __post_init__(self) -> None:
        numbers.set_positive_integers(self, "num_rounds")
        rounds, rank = self.num_rounds, np.shape(self.left)[-1]
        self._freeze("window", 1 if len(self.window) == 1 else rounds, None, has_lags=True)
        self._freeze("left", rounds, rank)
        self._freeze("right", rounds, rank)
        self._set(num_state_vectors=rank, rows_of_z_per_round=self.window.shape[1])
        # A row of Z leaves the window for the accumulators, so earlier rows of Z have to be drawn
        # again.
        self._set(draws_earlier_rows_of_z=True, is_toeplitz=len(self.window) == 1 and not rank)

    @property
    def diagonal(self) -> FloatArray:
        """The diagonal of C^-1, (n,) float64: the window's weight of the round's own row of Z."""
        entries = np.broadcast_to(self.window[:, 0], self.num_rounds)
        if self.rows_of_z_per_round > 1:
            return entries
        # With a window of one row, the row of Z enters the accumulators in its own round.
        return np.asarray(entries + np.sum(self.left * self.right, axis=1))

    def _with_unit_diagonal(self) -> NoiseRecursion:
        if self.is_toeplitz:
            return dataclasses.replace(self, window=self.window / self.window[0, 0])
        rows = (1.0 / self.diagonal)[:, np.newaxis]
        return dataclasses.replace(self, window=self.window * rows, left=self.left * rows)

    def transition(self, start: int, end: int) -> FloatArray:
        """Returns the weights of rows of Z in the window, and of accumulators after the window."""
        first, length = self.first_row_of_z(start), self.rows_of_z_per_round
        of_z = _below_diagonal(self.window, start, end, end - first)
        if not self.num_state_vectors:
            return of_z
        rows_of_z, left, right = np.arange(first, end), self.left[start:end], self.right[first:end]
        lags = np.arange(start, end)[:, np.newaxis] - rows_of_z
        # The accumulators at the start hold rows of Z up to start - length. The row of Z of a row's
        # own round has no weight here, even if it leaves the window in that round.
        is_new = rows_of_z > start - length
        of_z += np.where(is_new & (lags >= max(length - 1, 1)), left @ right.T, 0.0)
        leaves = np.where(is_new & (rows_of_z <= end - length), right.T, 0.0)
        return np.block([[left, of_z], [np.eye(self.num_state_vectors), leaves]])


@dataclasses.dataclass(frozen=True, eq=False)
class StateSpaceNoise(NoiseRecursion):
    """A C^-1 that is a linear recurrence over m state vectors S, which start at zero.

    With p = phases[i], the recurrence of round i is
    ``Y[i] = gains[p] Z[i] + outputs[p] . S`` and, for each state vector d,
    ``S'[d] = decays[p, d] S[sources[p, d]] + feedbacks[p, d] Y[i]``.

    Attributes:
      phases: (n,) int64: the index of the set of weights, of P sets, that each round uses.
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
        self._freeze("gains", None)
        phases, vectors = len(self.gains), np.shape(self.outputs)[-1]
        self._freeze("phases", None, end=phases)
        for name in ("outputs", "decays", "feedbacks"):
            self._freeze(name, phases, vectors)
        self._freeze("sources", phases, vectors, end=vectors)
        self._set(num_rounds=len(self.phases), num_state_vectors=vectors)
        self._set(is_toeplitz=bool(np.all(self.phases == self.phases[0])))

    @property
    def diagonal(self) -> FloatArray:
        """The diagonal of C^-1, (n,) float64: the gain of each round."""
        return np.asarray(self.gains[self.phases])

    def _with_unit_diagonal(self) -> NoiseRecursion:
        column = self.gains[:, np.newaxis]
        changed = {"outputs": self.outputs / column, "feedbacks": self.feedbacks * column}
        return dataclasses.replace(self, gains=np.ones_like(self.gains), **changed)

    def transition(self, start: int, end: int) -> FloatArray:
        """Returns a block's weights, from the recurrence of unit vectors of state and rows."""
        vectors, size = self.num_state_vectors, end - start
        rows, state = np.zeros((size, vectors + size)), np.eye(vectors, vectors + size)
        for row, phase in enumerate(self.phases[start:end]):
            rows[row] = self.outputs[phase] @ state
            state = state[self.sources[phase]] * self.decays[phase][:, np.newaxis]
            state[:, vectors + row] += self.feedbacks[phase]
        return np.concatenate([rows, state])

    def _signature(self, start: int, end: int) -> object:
        return self.phases[start:end].tobytes()


@dataclasses.dataclass(frozen=True, eq=False)
class ScaledNoise(NoiseRecursion):
    """A C = P T D, with T Toeplitz and P, D diagonal: the noise is Y = D^-1 T^-1 (P^-1 Z).

    Attributes:
      inner: The noising matrix T^-1, which is Toeplitz and is not a ScaledNoise itself.
      scales: (n,) float64: the diagonal of P^-1, from 1e-50 to 1e50.
      row_scales: (n,) float64: the diagonal of D^-1, from 1e-50 to 1e50.
    """

    inner: NoiseRecursion
    scales: FloatArray
    row_scales: FloatArray

    def __post_init__(self) -> None:
        if not isinstance(self.inner, NoiseRecursion) or isinstance(self.inner, ScaledNoise):
            raise TypeError(f"inner must be rows without scales, found {type(self.inner)}.")
        if not self.inner.is_toeplitz:
            raise ValueError("inner must be the rows of a Toeplitz matrix.")
        of_inner = "num_rounds", "num_earlier_rows", "num_state_vectors", "rows_of_z_per_round"
        for name in (*of_inner, "draws_earlier_rows_of_z"):
            self._set(**{name: getattr(self.inner, name)})
        for name in ("scales", "row_scales"):
            self._freeze(name, self.num_rounds)
            scales = getattr(self, name)
            # With these limits, products of both kinds of scales, and squares of the products, are
            # within floats.
            if not np.all((scales >= LEAST_SCALE) & (scales <= 1.0 / LEAST_SCALE)):
                raise ValueError(f"{name} of ScaledNoise must be from 1e-50 to 1e50, above zero.")

    @property
    def diagonal(self) -> FloatArray:
        """The diagonal of C^-1, (n,) float64: the product of both scales and the inner diagonal."""
        return np.asarray(self.row_scales * self.inner.diagonal * self.scales)

    def _with_unit_diagonal(self) -> NoiseRecursion:
        if np.all(self.scales == self.scales[0]):
            return self.inner.normalised
        return ScaledNoise(self.inner.normalised, self.scales, 1.0 / self.scales)

    def transition(self, start: int, end: int) -> FloatArray:
        """Returns the weights of the inner matrix, with the row scales of both rows applied.

        The matrix is normalised, so that the scale of a row of Z is one over the row scale.
        """
        weights, scales = self.inner.transition(start, end), self.row_scales
        earlier = min(self.num_earlier_rows, start)
        driving = weights.shape[1] - earlier - self.num_state_vectors
        weights[: end - start] *= scales[start:end, np.newaxis]
        weights[:, :earlier] /= scales[start - earlier : start]
        weights[:, earlier + self.num_state_vectors :] /= scales[end - driving : end]
        return weights


def is_complete(size: int) -> bool:
    """Returns whether a tree node over ``size`` leaves is released, which powers of two are.

    Args:
      size: The number of leaves.
    """
    return size & (size - 1) == 0


def _left_size(size: int) -> int:
    """Returns the leaves of a tree node's left child: the largest power of two below ``size``.

    Args:
      size: The number of leaves of the node, above 1.
    """
    return 1 << ((size - 1).bit_length() - 1)


@functools.cache
def tree_variance(size: int) -> float:
    """Returns the variance of the best estimate of a tree node's sum from its subtree alone.

    A leaf has only its own observation, of variance 1. The sum of a node is observed twice,
    by the node itself and by the sum of its children's estimates, and precisions add:
    1 / v = 1 + 1 / (v_left + v_right), without the 1 where the node is not released.

    Args:
      size: The number of leaves of the node.
    """
    if size == 1:
        return 1.0
    left = _left_size(size)
    below = tree_variance(left) + tree_variance(size - left)
    return below / (1.0 + below) if is_complete(size) else below


def online_tree_rows(num_rounds: int, num_slots: int) -> StateSpaceNoise:
    """Returns the noise rows of an online tree, which estimates prefix sums from below.

    The estimates E of the largest completed nodes form a stack, a node of 2^h leaves in
    slot h, and their sum is the prefix estimate. Round i completes its leaf and merges it
    with the slots 0 to t - 1, for t the number of trailing ones of i in binary. Of the new
    noise in the nodes completed together only the part in the topmost is ever used,
    E_top = g Z_i + sum_h c_h s_h with s_h the entry of slot h, c_h the product of 1 - w
    over the new nodes of more than 2^h leaves, and g^2 the variance of what the new nodes
    contribute: f = 1 for the leaf, then w^2 + (1 - w)^2 f. The noise row is
    E_top - sum_h s_h. State vector h is Q_h, the sum of slots 0 to h, which changes by that
    row unless all of them were merged, and then is zero.

    Args:
      num_rounds: The number of rounds n.
      num_slots: The number s of state vectors, with n < 2^(s + 1).
    """
    weights = [tree_variance(1 << slot) for slot in range(num_slots + 1)]
    gains = np.ones(num_slots + 1)
    # There is one phase for each number of merges that a round may do.
    outputs, kept = (np.zeros((num_slots + 1, num_slots)) for _ in range(2))
    for merges in range(1, num_slots + 1):
        own = weights[merges]
        gains[merges] = np.sqrt(own**2 + ((1.0 - own) * gains[merges - 1]) ** 2)
        changes = np.cumprod(np.subtract(1.0, weights[merges:0:-1]))[::-1] - 1.0
        # The state holds prefix sums Q_h of slots, so the entry of slot h is s_h = Q_h - Q_{h - 1}.
        outputs[merges, :merges] = changes
        outputs[merges, : merges - 1] -= changes[1:]
    for merges in range(num_slots + 1):
        kept[merges, merges:] = 1.0
    lengths = np.arange(1, num_rounds + 1)
    trailing_ones = np.frexp((lengths & -lengths).astype(np.float64))[1] - 1
    sources = np.tile(np.arange(num_slots), (num_slots + 1, 1))
    return StateSpaceNoise(trailing_ones.astype(np.int64), gains, outputs, sources, kept, kept)


def full_tree_rows(num_rounds: int) -> StateSpaceNoise:
    """Returns the noise rows of the full tree, by the pseudo-inverse: precision matrix C_T^T C_T.

    The density of the noise is a product with a factor exp(-s_v^2 / 2) for the sum s_v over each
    released node v, so that rows can be drawn one after the other by messages along the tree. Given
    the rows before its first leaf, and by the factors of v and of all nodes that are
    not below v, the sum over v is normal with a precision lambda_v and a mean mu_v. Let
    p_v be 1 if v is released and else 0, and tau_v the variance of the sum by the factors
    of v and below (:func:`tree_variance`):

    * for the root r, lambda = p_r and mu = 0;
    * for the left child a of v, with b its sibling and
      rho = 1 / (1 / lambda_v + tau_b), lambda = p_a + rho and mu = rho / lambda mu_v;
    * for the right child b, the sum s over the left one being known,
      lambda = p_b + lambda_v and mu = lambda_v / lambda (mu_v - s).

    (Where lambda is zero, so is mu.) Row i is mu of its leaf plus Z_i / sqrt(lambda). State
    vector d belongs to the node at depth d above the current leaf and is R = mu_v - (sum of
    the rows within v so far): every mean is then a multiple of its parent's R, so that
    the nodes on the way from the last common ancestor of leaves i and i + 1 down to leaf
    i + 1 get multiples of that ancestor's R, and the nodes above it lose the row.

    Args:
      num_rounds: The number of leaves n.
    """
    # One round needs no state vector. It gets one that is not used, because a recurrence has at
    # least one.
    height = max((num_rounds - 1).bit_length(), 1)
    precisions_of_leaves, shares_of_leaves = np.ones((2, num_rounds))
    # For each leaf, the depth of the last common ancestor of the leaf and of the one before it.
    branchings = np.zeros(num_rounds, np.int64)
    shares_on_path = np.zeros((num_rounds, height))
    # The stack of nodes to visit. Each entry has the node's first leaf, number of leaves, depth and
    # lambda, and the quotient of its mu and the R of the node at which the way to its first leaf
    # branches off.
    nodes = [(0, num_rounds, 0, float(is_complete(num_rounds)), 1.0)]
    while nodes:
        start, size, depth, precision, share = nodes.pop()
        if size == 1:
            precisions_of_leaves[start], shares_of_leaves[start] = precision, share
            continue
        shares_on_path[start, depth] = share
        left = _left_size(size)
        right = size - left
        branchings[start + left] = depth
        from_above = precision / (1.0 + precision * tree_variance(right))
        of_left, of_right = 1.0 + from_above, is_complete(right) + precision
        share_of_right = precision / of_right if of_right else 0.0
        nodes.append((start, left, depth + 1, of_left, share * from_above / of_left))
        nodes.append((start + left, right, depth + 1, of_right, share_of_right))

    outputs = np.zeros((num_rounds, height))
    later = np.arange(1, num_rounds)
    outputs[later, branchings[later]] = shares_of_leaves[later]
    slots = np.arange(height)
    sources = np.tile(slots, (num_rounds, 1))
    decays = np.zeros((num_rounds, height))
    sources[:-1] = np.minimum(slots, branchings[later, np.newaxis])
    decays[:-1] = np.where(slots <= branchings[later, np.newaxis], 1.0, shares_on_path[later])
    gains = 1.0 / np.sqrt(precisions_of_leaves)
    return StateSpaceNoise(np.arange(num_rounds), gains, outputs, sources, decays, -decays)


def check_rounds(rows: NoiseRecursion, num_rounds: int) -> None:
    """Raises NotProved unless rows are of the kernel's own classes and cover the rounds.

    Args:
      rows: The noising matrix.
      num_rounds: The number of its rounds that are used.
    """
    kind = type(rows.inner) if type(rows) is ScaledNoise else type(rows)
    if kind not in (BandedNoise, StateSpaceNoise, WindowNoise):
        raise NotProved(f"rows must be of the kernel's own classes, found {type(rows)}.")
    if num_rounds > rows.num_rounds:
        raise NotProved(f"the rows are for {rows.num_rounds} rounds, not {num_rounds}.")


@dataclasses.dataclass(frozen=True, eq=False)
class Blocks:
    """The division of a run's rounds into blocks, in which rows of noise are made together.

    Attributes:
      recursion: The noising matrix.
      starts: (number of blocks + 1,) int64: block k has the rounds ``starts[k]`` to
        ``starts[k + 1] - 1``; the last entry is the number of rounds.
    """

    recursion: NoiseRecursion
    starts: IntArray

    @classmethod
    def of(cls, recursion: NoiseRecursion, horizons: Sequence[int] = ()) -> "Blocks":
        """Returns the blocks of a run, which double in size up to a largest size.

        Args:
          recursion: The noising matrix.
          horizons: The numbers of rounds of the horizons that were extended to this one,
            increasing. A block ends with each of them, so that rows are products of the same shapes
            as before.

        Returns:
          The blocks, which depend on the arguments alone, so that a run that is resumed elsewhere
          makes the same rows.
        """
        largest, earlier = _ROWS_PER_BLOCK, recursion.num_earlier_rows
        if recursion.draws_earlier_rows_of_z:
            largest = _ROWS_PER_REDRAWING_BLOCK
        elif earlier >= _MANY_EARLIER_ROWS:
            largest = max(_FEWEST_ROWS_PER_BLOCK, earlier // _EARLIER_ROWS_PER_ROW_OF_BLOCK)
        starts = [0]
        for end in (*horizons, recursion.num_rounds):
            begin = starts[-1]
            while starts[-1] < end:
                size = min(largest, max(1, starts[-1] - begin))
                starts.append(min(end, starts[-1] + size))
        return cls(recursion, np.array(starts, dtype=np.int64))

    @property
    def num_blocks(self) -> int:
        """The number of blocks of the run."""
        return len(self.starts) - 1

    def rounds(self, block: int) -> tuple[int, int]:
        """Returns the first round of a block and the round after its last."""
        return int(self.starts[block]), int(self.starts[block + 1])

    def num_earlier_rows(self, block: int) -> int:
        """Returns the number of rows before a block that its transition has weights for."""
        return min(self.recursion.num_earlier_rows, int(self.starts[block]))

    def first_row_of_z(self, block: int) -> int:
        """Returns the first row of Z that a block needs; it needs rows up to its last round's."""
        return self.recursion.first_row_of_z(int(self.starts[block]))

    def transition(self, block: int) -> FloatArray:
        """Returns the weights of a block's rows; see ``NoiseRecursion.transition``."""
        return self.recursion.normalised.transition(*self.rounds(block))

    def distinct_transitions(self) -> IntArray:
        """Returns, for each block, the first block that is known to have an equal transition.

        Toeplitz matrices, and matrices that repeat themselves, have few different transitions.

        Returns:
          (number of blocks,) int64.
        """
        first_of: dict[object, int] = {}
        signature = self.recursion.normalised._signature
        ends = enumerate(itertools.pairwise(self.starts.tolist()))
        return np.array([first_of.setdefault(signature(*of) or block, block) for block, of in ends])


def _below_diagonal(table: FloatArray, start: int, end: int, columns: int) -> FloatArray:
    """Returns (end - start, columns) weights of a block's rows, from a table of weights by lag.

    The last end - start columns belong to the block's own rounds.

    Args:
      table: (n, p), or (1, p) if all rounds have the same weights: entry [i, t] is for lag t.
      start: The first round.
      end: The round after the last.
      columns: The number of columns; the last one belongs to round end - 1.
    """
    matrix = np.zeros((end - start, columns))
    rounds = np.arange(start, end) * (len(table) > 1)
    for row, of_row in enumerate(table[rounds]):
        last = columns - (end - start) + row
        lags = min(len(of_row), last + 1)
        matrix[row, last - lags + 1 : last] = of_row[1:lags][::-1]
    return matrix


# The largest accepted error of a computed C, relative to its largest column norm. ``claim.check``
# charges for smaller errors.
_LARGEST_ERROR = 1e-6
# Entries of a computed inverse below this number, relative to the norm of their column, are taken
# for rounding errors of zeros.
_ROUNDING_OF_ZEROS = 1e-13
# With magnitudes between these numbers, squares and products are within the range of floats.
_LEAST, _LARGEST = 1e-100, 1e100
_ROUNDOFF = 2.0**-53
# The number of n x n matrices that fit into memory together when a dense C and its sensitivity are
# computed, the rows included.
_DENSE_MATRICES = 6
_ROWS_AT_A_TIME = 512


@dataclasses.dataclass(frozen=True, eq=False)
class Strategy:
    """A strategy matrix C as arrays: dense, banded, or Toeplitz between diagonal matrices.

    Attributes:
      entries: If ``is_dense``, C as (n, n) float64. Otherwise (n, b) bands with ``entries[i, t] =
        C[i, i - t]``, zero where i < t; or (1, m) coefficients of T for C = P T D.
      num_rounds: n.
      error: An upper bound on the norms of the columns of C minus the matrix of ``entries``.
      is_dense: Whether ``entries`` is a whole matrix.
      scales: For a Toeplitz T, the diagonals of P and D, (n,) float64 above zero; None for ones.
    """

    entries: FloatArray
    num_rounds: int
    error: float = 0.0
    is_dense: bool = False
    scales: tuple[FloatArray, FloatArray] | None = None

    @property
    def num_bands(self) -> int:
        """The number of bands of C: the least b with C[i, j] = 0 for i - j >= b."""
        if self.is_dense:
            is_entry = self.entries != 0.0
            return int(np.max(np.arange(len(is_entry)) - np.argmax(is_entry, axis=1))) + 1
        return int(np.flatnonzero(np.any(self.entries, axis=0))[-1]) + 1

    def compact_columns(self, width: int) -> FloatArray:
        """Returns the first ``width`` entries of each column from its diagonal on, (n, width).

        Args:
          width: The number of entries of each column, at least 1; entries below the last round are
            zero.
        """
        made = np.zeros((self.num_rounds, width))
        for j, column in enumerate(made):
            entries = self._column(j)[:width]
            column[: len(entries)] = entries
        return made

    def columns(self, rounds: tuple[int, ...]) -> FloatArray:
        """Returns some columns of C as (n, m) float64.

        Args:
          rounds: The m indices of the columns, from 0.
        """
        made = np.zeros((self.num_rounds, len(rounds)))
        for place, j in enumerate(rounds):
            entries = self._column(j)
            made[j : j + len(entries), place] = entries
        return made

    def _column(self, j: int) -> FloatArray:
        """Returns column j from its diagonal on, without the zeros below its bands."""
        if self.is_dense:
            return self.entries[j:, j]
        lags = np.arange(min(self.entries.shape[1], self.num_rounds - j))
        entries = self.entries[j + lags if len(self.entries) > 1 else 0, lags]
        if self.scales is None:
            return np.asarray(entries)
        rows, columns = self.scales
        return np.asarray(columns[j] * rows[j + lags] * entries)


def strategy_of(rows: NoiseRecursion, num_rounds: int) -> Strategy:
    """Returns C of the first rounds, computed from the rows of noise drawn in them.

    Args:
      rows: The noising matrix, of one of the kernel's own classes.
      num_rounds: The number of its rounds: all, or those of a run that stopped early.

    Raises:
      NotProved: If the matrix is of another class, if C or its errors are too large for a proof, or
        if there are too many rounds for a proof.
    """
    num_rounds = numbers.positive_integer(num_rounds, "num_rounds")
    check_rounds(rows, num_rounds)
    with np.errstate(all="ignore"):
        diagonal = rows.diagonal[:num_rounds]
        if not np.all(np.isfinite(diagonal) & (diagonal != 0.0)):
            raise NotProved("the diagonal of C^-1 has a zero, or C has one: there is no inverse.")
        try:
            found, size = _of_kind(rows, num_rounds)
        except ValueError as error:  # Normalised rows have numbers beyond floats.
            raise NotProved(str(error)) from error
    # Comparisons are written so that NaN is refused.
    if not (_LEAST <= size <= _LARGEST and found.error <= _LARGEST_ERROR * size):
        found_in = f"columns of norm {size:g} have errors of {found.error:g}"
        raise NotProved(f"the rows are nearly singular: in their C, {found_in}.")
    return found


def _of_kind(rows: NoiseRecursion, num_rounds: int) -> tuple[Strategy, float]:
    """Returns C and its largest column norm, by a method for each kind of noising matrix."""
    if isinstance(rows, BandedNoise):
        found = Strategy(rows.bands[:num_rounds, :num_rounds], num_rounds)
        return found, _largest_column_of_bands(found.entries)
    if isinstance(rows, ScaledNoise):
        found, size = _of_kind(rows.inner, num_rounds)
        if found.is_dense or len(found.entries) != 1:
            raise NotProved("the inner rows of ScaledNoise are not known to be Toeplitz.")
        if not _LEAST <= size <= _LARGEST:
            raise NotProved(f"the inner rows of ScaledNoise have columns of norm {size:g}.")
        outer, inner = 1.0 / rows.scales[:num_rounds], 1.0 / rows.row_scales[:num_rounds]
        largest = float(np.max(outer) * np.max(inner))
        # The 9 roundings: two divisions, two products, and those of normalised rows.
        error = (found.error + _gamma(9) * size) * largest
        scaled = dataclasses.replace(found, error=error, scales=(outer, inner))
        return scaled, float(np.min(outer) * np.min(inner)) * size
    unit, vectors = rows.normalised, rows.num_state_vectors
    if isinstance(rows, WindowNoise) and unit.is_toeplitz:
        series = rows.window[0, :num_rounds]
        coefficients = _reciprocal(series, num_rounds)
        residual = _residual_of_series(coefficients, series)
        size = float(np.linalg.norm(coefficients))
        error = _error(residual) * size
        return Strategy(coefficients[np.newaxis], num_rounds, error), size
    if isinstance(unit, StateSpaceNoise):
        phases = unit.phases[:num_rounds]
        phase = phases[0]
        keeps_places = np.array_equal(unit.sources[phase], np.arange(vectors))
        if np.all(phases == phase) and keeps_places:
            weights = unit.outputs[phase] * unit.feedbacks[phase]
            # Computed powers are within four units in the last place.
            powers = unit.decays[phase][:, np.newaxis] ** np.arange(num_rounds - 1)
            coefficients = np.append(1.0, -weights @ powers) / rows.diagonal[0]
            sizes = np.append(1.0, np.abs(weights) @ np.abs(powers)) / rows.diagonal[0]
            error = _gamma(vectors + 14) * float(np.linalg.norm(sizes))
            found = Strategy(coefficients[np.newaxis], num_rounds, error)
            return found, float(np.linalg.norm(coefficients))
    return _of_transition(rows, num_rounds)


def _of_transition(rows: NoiseRecursion, num_rounds: int) -> tuple[Strategy, float]:
    """Returns a dense C and its largest column norm, from the weights of all rows together."""
    try:
        # The allocation fails early if there is no memory; memory is taken only once it is written
        # to.
        np.empty((_DENSE_MATRICES, num_rounds, num_rounds))
    except MemoryError:
        advice = "use fewer rounds, or a matrix that is banded, Toeplitz or a BLT"
        raise NotProved(f"too little memory for C of {num_rounds} rounds: {advice}.") from None
    unit = rows.normalised
    diagonal, vectors = rows.diagonal[:num_rounds], rows.num_state_vectors

    def weights(of: NoiseRecursion) -> FloatArray:
        return of.transition(0, num_rounds)[:num_rounds, vectors:]

    matrix = weights(unit)
    np.fill_diagonal(matrix, 1.0)
    sizes = np.abs(matrix)
    if vectors:
        # The sums of the magnitudes of the terms of each entry, which bound the rounding errors.
        arrays = {name: np.abs(each) for name, each in vars(unit).items() if np.ndim(each)}
        magnitudes = dataclasses.replace(unit, **arrays)
        sizes = weights(magnitudes)
        np.fill_diagonal(sizes, magnitudes.diagonal[:num_rounds])
    if rows.draws_earlier_rows_of_z:
        matrix *= diagonal[:, np.newaxis]
        sizes *= np.abs(diagonal)[:, np.newaxis]
        return _inverted(matrix, sizes, vectors + 8)
    # For rows that follow from earlier rows of the noise Y, the weights give C itself, as C Y = Z.
    matrix = (2.0 * np.eye(num_rounds) - matrix) / diagonal
    error = _gamma(num_rounds + vectors + 12) * _largest_column(sizes / diagonal)
    return Strategy(matrix, num_rounds, error, is_dense=True), _largest_column(matrix)


def _inverted(noising: FloatArray, sizes: FloatArray, terms: int) -> tuple[Strategy, float]:
    """Returns C as the inverse of a dense noising matrix N, and its largest column norm.

    ``sizes`` is at least |N|, and N is known to within gamma_terms times ``sizes``.
    """
    num_rounds = len(noising)
    # LAPACK reads a matrix that is stored by rows as its transpose.
    matrix = dtrtri(noising.T, lower=0)[0].T
    # Blocks above the diagonal are zero and left out of the product.
    product = np.zeros_like(matrix)
    for first in range(0, num_rounds, _ROWS_AT_A_TIME):
        stop = first + _ROWS_AT_A_TIME
        product[first:stop, :stop] = matrix[first:stop, :stop] @ noising[:stop, :stop]
    product[np.diag_indices(num_rounds)] -= 1.0
    residual = float(np.linalg.norm(product))
    magnitudes = np.abs(matrix, out=product)
    by_rows = np.max(magnitudes @ np.sum(sizes, axis=1))
    by_columns = np.max(np.sum(magnitudes, axis=0) @ sizes)
    residual += _gamma(num_rounds + terms + 1) * float(np.sqrt(by_rows * by_columns))
    # Rounding errors are set to zero where C has zeros, because its zeros show its number of bands.
    norms = np.linalg.norm(matrix, axis=0)
    is_rounding = magnitudes <= _ROUNDING_OF_ZEROS * norms
    dropped = _largest_column(np.multiply(matrix, is_rounding, out=product))
    matrix[is_rounding] = 0.0
    largest = float(np.max(norms))
    error = _error(residual) * largest + dropped
    return Strategy(matrix, num_rounds, error, is_dense=True), largest


def _reciprocal(series: FloatArray, num_rounds: int) -> FloatArray:
    """Returns the first n coefficients of one over a power series, by Newton's iteration."""
    wide = series.astype(np.longdouble)
    found = 1.0 / wide[:1]
    while len(found) < num_rounds:
        length = min(2 * len(found), num_rounds)
        product, _ = product_of_series(found, wide[:length], length)
        product[0] -= 2.0
        found, _ = product_of_series(-found, product, length)
    return np.asarray(found, np.float64)


def _residual_of_series(coefficients: FloatArray, series: FloatArray) -> float:
    """Returns an upper bound on the sum of magnitudes of c(x) s(x) - 1, for n coefficients."""
    num_rounds = len(coefficients)
    product, error = product_of_series(coefficients, series, num_rounds)
    product[0] -= 1.0
    return float(np.sum(np.abs(product)) + np.sqrt(num_rounds) * error)


def product_of_series(
    first: FloatArray, second: FloatArray, length: int
) -> tuple[FloatArray, float]:
    """Returns the first coefficients of the product of two power series, and an error bound.

    Args:
      first: (n,) coefficients.
      second: (m,) coefficients.
      length: The number of coefficients of the product.

    Returns:
      (length,) long doubles, and an upper bound on the L2 norm of their errors.
    """
    levels = (len(first) + len(second)).bit_length()
    points = 1 << (len(first) + len(second) - 1).bit_length()
    wide = (each.astype(np.longdouble) for each in (first, second))
    one, other = (scipy.fft.rfft(each, points) for each in wide)
    found = scipy.fft.irfft(one * other, points)[:length]
    one, other = (np.sum(np.abs(each)) for each in (first, second))
    sizes = one * np.linalg.norm(second) + 2.0 * np.linalg.norm(first) * other
    roundoff = 16.0 * levels * float(np.finfo(np.longdouble).eps) / 2.0
    found = np.append(found, np.zeros(length - len(found), np.longdouble))
    return found, float(roundoff * sizes)


def _error(residual: float) -> float:
    """Returns e / (1 - e), with e enlarged by one percent for its own rounding errors."""
    return 1.01 * residual / (1.0 - 1.01 * residual) if residual < 0.5 else np.inf


def _gamma(operations: int) -> float:
    return operations * _ROUNDOFF / (1.0 - operations * _ROUNDOFF)


def _largest_column(matrix: FloatArray) -> float:
    return float(np.max(np.linalg.norm(matrix, axis=0)))


def _largest_column_of_bands(bands: FloatArray) -> float:
    # Entries that would be in columns before the first are zero, so they may be counted in column
    # 0.
    columns = np.arange(len(bands))[:, np.newaxis] - np.arange(bands.shape[1])
    squares = np.bincount(np.maximum(columns, 0).ravel(), np.square(bands).ravel())
    return float(np.sqrt(np.max(squares)))
