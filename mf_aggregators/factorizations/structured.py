"""Structured approximations of a factorization: a few diagonals and a low-rank rest.

The decoder B of the prefix sum S is replaced by B_hat, which has the same first h diagonals and
equals L R^T below them. With C_hat = B_hat^-1 S, a row of noise needs only h + 1 rows of Z and r
accumulators (Denisov et al. App. H, Alg. 3; prefix-sum paper Sec. 4.2).
"""

import dataclasses
import warnings
from collections.abc import Iterator

import numpy as np
import scipy.linalg
import scipy.sparse.linalg

from mf_aggregators import inputs, workloads
from mf_aggregators.factorizations.factorization import Factorization, bands_of_matrix
from mf_aggregators.factorizations.searches import NotConvergedWarning, progress_bar
from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.numbers import FloatArray
from mf_aggregators.kernel.rows import WindowNoise
from mf_aggregators.workloads import AnyWorkload

# Denisov et al. App. H: the weight of the squared norms of L and R, for columns of C of
# norm at most one.
_PENALTY = 1e-6
# Least squares ends after _PATIENCE iterations that do not lower the total error by the given
# fraction.
_PATIENCE = 10
_LEAST_IMPROVEMENT = 1e-4
# The number of entries of normal equations that are solved together, which bounds the memory.
_STACK = 1 << 22


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class StructuredFactorization(Factorization):
    """C = B^-1 S for the prefix sum S and B = L R^T below the first h diagonals of B.

    Attributes:
      diagonals: (n, h), read-only, with ``diagonals[i, t] = B[i, i - t]``, zero where i < t; the
        main diagonal ``diagonals[:, 0]`` has no zero.
      left: L, (n, r), read-only.
      right: R, (n, r), read-only.

    Raises:
      ValueError: If the arrays do not have this form.
    """

    mechanism = "structured"
    has_dense_rows = True
    reason = "it approximates a matrix for one number of rounds"

    diagonals: FloatArray
    left: FloatArray
    right: FloatArray

    def __post_init__(self) -> None:
        super().__post_init__()
        diagonals = self._checked_bands(self.diagonals, "diagonals")
        left, right = (
            numbers.real_array(getattr(self, name), name).copy() for name in ("left", "right")
        )
        num_rounds = len(diagonals)
        is_matrix = left.ndim == 2 and left.shape[0] == num_rounds >= left.shape[1]
        if not is_matrix or right.shape != left.shape:
            raise ValueError(
                f"left and right must both have a row for each of the {num_rounds} rounds and at "
                f"most as many columns, found arrays of shapes {left.shape} and {right.shape}."
            )
        if not (np.all(np.isfinite(left)) and np.all(np.isfinite(right))):
            raise ValueError("left and right must be finite, found NaN or infinite entries.")
        self._set(diagonals=diagonals, left=left, right=right, num_rounds=num_rounds)

    @property
    def num_diagonals(self) -> int:
        """The number of diagonals h."""
        return int(self.diagonals.shape[1])

    @property
    def rank(self) -> int:
        """The number of accumulators r."""
        return int(self.left.shape[1])

    def _prefix_decoder(self) -> FloatArray:
        """Returns B, the decoder of the prefix sum, as a dense (n, n) array."""
        return _decoder(self.diagonals, self.left, self.right)

    def strategy_matrix(self) -> FloatArray:
        """Returns C = B^-1 S as a dense (n, n) array."""
        return _strategy(self._prefix_decoder())

    def noise_recursion(self) -> WindowNoise:
        """Returns the recursion over the last h + 1 rows of Z and r accumulators.

        Row i of the noise is y_i - y_{i-1} for y = B Z, that is
        y_i = sum_{t < h} diagonals[i, t] Z[i - t] + L[i] . beta_i with
        beta_i = beta_{i-1} + R[i - h] Z[i - h]. Since beta_{i-1} = beta_i - R[i - h] Z[i - h],
        row i of the noise consists of (L[i] - L[i - 1]) . beta_i, of the differences of the
        diagonals times their rows of Z, and of L[i - 1] . R[i - h] times Z[i - h].
        """
        length = self.num_diagonals
        window = np.zeros((self.num_rounds, length + 1))
        window[:, :length] = self.diagonals
        window[1:, 1:] -= self.diagonals[:-1]
        if length < self.num_rounds:
            leaving = self.left[length - 1 : -1] * self.right[: self.num_rounds - length]
            window[length:, length] += np.sum(leaving, axis=1)
        left = self.left.copy()
        left[1:] -= self.left[:-1]
        return WindowNoise(self.num_rounds, window, left, self.right)

    def _decoder_matrix(self, workload: FloatArray) -> FloatArray:
        # A C^-1 = (A S^-1) B, and A S^-1 consists of the differences of adjacent columns of A.
        differences = workload.copy()
        differences[:, :-1] -= workload[:, 1:]
        return np.tril(differences @ self._prefix_decoder())

    def _encode(self, x: FloatArray) -> FloatArray:
        sums = np.cumsum(x, axis=0).reshape(self.num_rounds, -1)
        product = scipy.linalg.solve_triangular(
            self._prefix_decoder(), sums, lower=True, check_finite=False
        )
        return np.asarray(product.reshape(x.shape))

    def _squared_rows(self, workload: AnyWorkload) -> FloatArray | None:
        """Takes O(n (h + r^2)) operations for the prefix sum."""
        if not workload.is_prefix_sum:
            return None
        return _squared_rows(self.diagonals, self.left, self.right)


def structured(
    factorization: Factorization,
    num_diagonals: int,
    rank: int,
    *,
    max_iterations: int = 200,
    show_progress: bool = False,
) -> StructuredFactorization:
    """Approximates a factorization of the prefix sum by diagonals and a low-rank matrix.

    Use it when you run an optimal matrix with less memory and time than its dense rows need.

    Alternating least squares fits L R^T to the entries of B below its first h diagonals, with the
    penalty of Denisov et al. App. H on the squared norms of L and R. (B is scaled so that columns
    of C have norm at most one.) The goal is the total error of B_hat with its C_hat, ||B_hat||_F
    times the largest column norm of C_hat, which does not always fall with the least-squares error.
    So the total error of every iteration is computed, and the best iteration is returned.

    Args:
      factorization: The factorization to approximate, with a square strategy matrix.
      num_diagonals: The number h of diagonals of B that are kept, 1 to n. The main diagonal has to
        be kept, so that B_hat is invertible.
      rank: The rank r of L R^T, 0 to n.
      max_iterations: Give up after this many iterations, each a least-squares problem
        for L and one for R.
      show_progress: Whether to show a progress bar on standard error.

    Returns:
      The approximation, with the participation schema of the given factorization. If the total
      error was still falling in the last iterations, the best result so far, with a
      NotConvergedWarning.

    Raises:
      ValueError: If an argument is out of its range or the strategy matrix is not square.

    Example:
      >>> import mf_aggregators as mfa
      >>> once = mfa.participation.SingleParticipation()
      >>> best = mfa.factorizations.optimal(mfa.workloads.prefix_sum(64))
      >>> few = mfa.factorizations.structured(best, num_diagonals=4, rank=8)
      >>> round(few.rmse(mfa.workloads.prefix_sum(64), once), 3)
      2.1
    """
    num_rounds = factorization.num_rounds
    num_diagonals = numbers.positive_integer(num_diagonals, "num_diagonals")
    rank = numbers.integer_at_least(rank, 0, "rank")
    for name, value in (("num_diagonals", num_diagonals), ("rank", rank)):
        if value > num_rounds:
            raise ValueError(f"{name} must be at most num_rounds, {num_rounds}, found {value}.")
    max_iterations = numbers.positive_integer(max_iterations, "max_iterations")
    inputs.check_rounds(num_rounds, 4 * 8 * num_rounds, "the structured factorization")
    strategy = factorization.strategy_matrix()
    if strategy.shape != (num_rounds, num_rounds):
        raise ValueError(
            "structured approximates factorizations with a square strategy matrix, found one of "
            f"shape {strategy.shape}."
        )
    decoder = factorization.decoder_matrix(workloads.prefix_sum(num_rounds))
    scale = float(np.sqrt(np.max(np.einsum("ij,ij->j", strategy, strategy))))
    decoder *= scale
    diagonals = bands_of_matrix(decoder, num_diagonals)
    rest = np.tril(decoder, -num_diagonals)
    if rank >= num_rounds - num_diagonals:
        left, right = _exact_factors(rest, num_diagonals, rank)
    elif rank == 0 or not np.any(rest):
        left, right = np.zeros((num_rounds, rank)), np.zeros((num_rounds, rank))
    else:
        left, right = _alternating_least_squares(
            diagonals, rest, rank, max_iterations, show_progress
        )
    return StructuredFactorization(
        diagonals / scale,
        left / scale,
        right,
        participation=factorization.participation,
        parameters={
            "num_diagonals": num_diagonals,
            "rank": rank,
            "base_mechanism": factorization.mechanism,
        },
    )


def _exact_factors(rest: FloatArray, lag: int, rank: int) -> tuple[FloatArray, FloatArray]:
    """Exact factors of a matrix that is zero in its last ``lag`` columns."""
    columns = rest.shape[0] - lag
    left, right = np.zeros((rest.shape[0], rank)), np.zeros((rest.shape[0], rank))
    left[:, :columns] = rest[:, :columns]
    right[np.arange(columns), np.arange(columns)] = 1.0
    return left, right


def _alternating_least_squares(
    diagonals: FloatArray, rest: FloatArray, rank: int, max_iterations: int, show_progress: bool
) -> tuple[FloatArray, FloatArray]:
    """Returns L and R of the iteration with the least total error."""
    lag = diagonals.shape[1]
    # A fixed start makes the result reproducible.
    start = np.ones(rest.shape[0])
    left, values, right_t = scipy.sparse.linalg.svds(rest, k=rank, v0=start)
    left, right = left * np.sqrt(values), right_t.T * np.sqrt(values)
    transposed = np.ascontiguousarray(rest.T)
    best_error, best_factors = np.inf, (left, right)
    patience = _PATIENCE
    progress = progress_bar(
        f"rank {rank}", show=show_progress, unit=" iterations", total=max_iterations
    )
    with progress:
        for _ in range(max_iterations):
            left = _ridge_rows(rest @ right, right, lag)
            # The problem for R is that for L with rows and columns in reverse order.
            right = _ridge_rows((transposed @ left)[::-1], left[::-1], lag)[::-1]
            error = _total_error(diagonals, left, right)
            progress.update()
            progress.set_postfix_str(f"total error {min(error, best_error):.6g}")
            patience -= 1
            if error < best_error * (1.0 - _LEAST_IMPROVEMENT):
                patience = _PATIENCE
            if error < best_error:
                best_error, best_factors = error, (left, right)
            if not patience:
                break
        else:
            warnings.warn(
                f"least squares stopped after {max_iterations} iterations with a total error of "
                f"{best_error:.6g} under single participation, which may fall further with more "
                "iterations; the returned factorization has that error.",
                NotConvergedWarning,
                stacklevel=3,
            )
    return best_factors


def _ridge_rows(targets: FloatArray, factors: FloatArray, lag: int) -> FloatArray:
    """Solves a ridge regression for each row i, over the factors of rows 0 to i - lag.

    Args:
      targets: (n, r): the sums over those rows j of factors[j] times the entry (i, j).
      factors: (n, r).
      lag: At least 1.

    Returns:
      (n, r) minimisers of the squared errors plus the penalty.
    """
    solution = np.zeros_like(targets)
    penalty = _PENALTY * np.eye(factors.shape[1])
    for rows, grams in _running_grams(factors, lag):
        solved = np.linalg.solve(grams + penalty, targets[rows, :, np.newaxis])
        solution[rows] = solved[:, :, 0]
    return solution


def _running_grams(factors: FloatArray, lag: int) -> Iterator[tuple[slice, FloatArray]]:
    """Yields blocks of rows i >= lag with the (r, r) sums of f_j f_j^T over j <= i - lag."""
    num_rounds, rank = factors.shape
    gram = np.zeros((rank, rank))
    rows = max(1, _STACK // max(1, rank**2))
    for first in range(lag, num_rounds, rows):
        stop = min(first + rows, num_rounds)
        added = factors[first - lag : stop - lag]
        grams = gram + np.cumsum(added[:, :, np.newaxis] * added[:, np.newaxis, :], axis=0)
        yield slice(first, stop), grams
        gram = grams[-1]


def _squared_rows(diagonals: FloatArray, left: FloatArray, right: FloatArray) -> FloatArray:
    """Squared row norms of B: ||R_{<= i - h} L[i]||^2 by sums of outer products of rows of R."""
    squared = np.einsum("ij,ij->i", diagonals, diagonals)
    for rows, grams in _running_grams(right, diagonals.shape[1]):
        squared[rows] += np.einsum("ia,iab,ib->i", left[rows], grams, left[rows])
    return np.asarray(squared)


def _decoder(diagonals: FloatArray, left: FloatArray, right: FloatArray) -> FloatArray:
    """B, the (n, n) decoder of the prefix sum."""
    decoder = np.tril(left @ right.T, -diagonals.shape[1])
    rounds = np.arange(len(decoder))
    for t, diagonal in enumerate(diagonals.T):
        decoder[rounds[t:], rounds[: len(decoder) - t]] = diagonal[t:]
    return decoder


def _strategy(decoder: FloatArray) -> FloatArray:
    """C = B^-1 S, (n, n)."""
    transposed, _ = scipy.linalg.lapack.dtrtri(decoder.T, overwrite_c=True)
    # Summing the columns from j on gives the product with S in n^2 operations.
    strategy = transposed.T
    np.cumsum(strategy[:, ::-1], axis=1, out=strategy[:, ::-1])
    return np.asarray(strategy)


def _total_error(diagonals: FloatArray, left: FloatArray, right: FloatArray) -> float:
    """||B||_F times the largest column norm of C."""
    strategy = _strategy(_decoder(diagonals, left, right))
    largest = np.max(np.einsum("ij,ij->j", strategy, strategy))
    return float(np.sqrt(np.sum(_squared_rows(diagonals, left, right)) * largest))
