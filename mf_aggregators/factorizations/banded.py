"""Banded factorizations, with equal column norms (BandMF Problem 2) and without (App. B)."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import scipy.linalg
import scipy.optimize
import tqdm

from mf_aggregators import noise_recursions, power_series, validation, workloads
from mf_aggregators import sensitivity as sensitivities
from mf_aggregators.factorizations.convergence import Converged, warn_unless_reached
from mf_aggregators.factorizations.factorization import Factorization
from mf_aggregators.factorizations.nuclear_norm import nuclear_norm_from_below
from mf_aggregators.factorizations.pattern_layout import PatternLayout
from mf_aggregators.noise_recursions import BandedNoise
from mf_aggregators.participation import (
    FixedEpochOrder,
    MinSeparation,
    Participation,
    SingleParticipation,
    check,
    check_fits,
)
from mf_aggregators.sensitivity import Sensitivity

# Rows that one matrix product or triangular solve treats together.
_BLOCK = 128
# Evaluations between two looks at the certificate, which costs about ten of them.
_EVALUATIONS_BETWEEN_CERTIFICATES = 25
# The estimated gap at which a search ends, relative to the gap that is to be certified.
_SAFE_SHARE = 0.9
# How often entries of a dual that is not positive definite are halved.
_MOST_HALVINGS = 10


class BandedFactorization(Factorization):
    """A lower-triangular C with ``num_bands`` bands: C[i, j] = 0 for i - j >= num_bands."""

    mechanism = "banded"

    def __init__(self, bands: np.ndarray, **attributes: Any) -> None:
        """Creates the factorization.

        Args:
          bands: (n, b) with ``bands[i, t] = C[i, i - t]``, zero where i < t; the diagonal
            ``bands[:, 0]`` has no zero.
          **attributes: Those of the base class.

        Raises:
          ValueError: If the array is not as said.
        """
        super().__init__(**attributes)
        bands = np.array(bands, dtype=np.float64)
        if bands.ndim != 2 or not 1 <= bands.shape[1] <= bands.shape[0]:
            raise ValueError(
                "bands must have a row for each round and 1 to num_rounds columns, found an "
                f"array of shape {bands.shape}."
            )
        if not np.all(np.isfinite(bands)):
            raise ValueError("bands must be finite, found NaN or infinite entries.")
        if not np.all(bands[:, 0]):
            raise ValueError("the strategy matrix must be non-singular, found a zero diagonal.")
        if np.any(bands[~np.tri(bands.shape[0], bands.shape[1], dtype=bool)]):
            raise ValueError("bands must be zero before the first column of the matrix.")
        bands.flags.writeable = False
        self._bands = bands

    @property
    def num_rounds(self) -> int:
        """The number of rounds n."""
        return int(self._bands.shape[0])

    @property
    def num_bands(self) -> int:
        """The number of bands b."""
        return int(self._bands.shape[1])

    def strategy_bands(self) -> int:
        """Returns the number of bands of C."""
        return self.num_bands

    def strategy_matrix(self) -> np.ndarray:
        """Returns C as a dense (n, n) array."""
        return noise_recursions.matrix_from_bands(self._bands)

    def noise_recursion(self) -> BandedNoise:
        """Returns the recursion over the last ``num_bands - 1`` noise rows."""
        return BandedNoise(self._bands)

    def sensitivity(self, participation: Participation) -> Sensitivity:
        """Returns the sensitivity: from column norms where BandMF Thm 2 applies."""
        return self._sensitivity_of_first(self.num_rounds, participation)

    def _sensitivity_of_first(self, rounds: int, participation: Participation) -> Sensitivity:
        bands = self._bands[:rounds, : min(self.num_bands, rounds)]
        num_bands = bands.shape[1]
        most = check(participation).most_participations(rounds)
        separated = (
            not isinstance(participation, SingleParticipation)
            and participation.separation >= num_bands
        )
        if most > 1 and not separated:
            return sensitivities.compute(noise_recursions.matrix_from_bands(bands), participation)
        largest = float(np.max(np.abs(bands)))
        squared_norms = _column_sums(np.square(bands / largest))
        return sensitivities.from_column_norms(squared_norms, participation, num_bands).times(
            largest
        )

    def certifies(self, participation: Participation) -> bool:
        """Returns whether the gap holds: with equal norms, under any schema that separates."""
        if not self.parameters.get("equal_column_norms", False):
            return super().certifies(participation)
        return (
            check(participation).most_participations(self.num_rounds) == 1
            or isinstance(participation, SingleParticipation)
            or participation.separation >= self.num_bands
        )

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns the (n, b) bands of C."""
        return {"bands": self._bands}

    @classmethod
    def from_arrays(
        cls, num_rounds: int, arrays: Mapping[str, np.ndarray], **attributes: Any
    ) -> "BandedFactorization":
        """Rebuilds the factorization; see the base class."""
        if arrays["bands"].shape[:1] != (num_rounds,):
            raise ValueError(
                f"bands has shape {arrays['bands'].shape}, which is not that of a matrix for "
                f"{num_rounds} rounds"
            )
        return cls(arrays["bands"], **attributes)


def banded(
    workload: Any,
    num_bands: int,
    equal_column_norms: bool = True,
    participation: Participation | None = None,
    *,
    relative_gap: float = 1e-5,
    max_evaluations: int = 1000,
    show_progress: bool = False,
) -> BandedFactorization:
    """Computes the banded factorization of least total squared error.

    Minimises tr(A^T A X^-1) over b-banded positive definite X with diagonal one (BandMF
    Problem 2). Every such X is C^T C for exactly one lower-triangular banded C with a
    positive diagonal and columns of norm one (BandMF Prop. 4.1), and L-BFGS runs over the
    entries of C before their columns are scaled: the same problem, never infeasible, and
    solved in a fraction of the steps that the entries of X take.

    With equal column norms the squared sensitivity under any separation of at least
    ``num_bands`` is the number of participations times the squared norm, whatever the
    matrix, so one matrix is the optimum for all of them.

    Without, the diagonal of X may vary as long as it sums to at most one over every
    pattern of (k, b)-participation (BandMF App. B). Where the schema is MinSeparation, it
    is optimised for the (k, b)-participation of the same k and b, as in the paper, and
    the result says so; its sensitivity under MinSeparation is larger, and exact as well.

    Args:
      workload: A, an (n, n) lower-triangular array of full rank, or a
        ``workloads.Workload``.
      num_bands: The number of bands b, 1 (independent noise) to n (no limit).
      equal_column_norms: Whether the columns of C have equal norms.
      participation: The schema that the factorization is for; at least ``num_bands``
        rounds between participations, ``MinSeparation(num_bands)`` by default.
      relative_gap: Stop when the squared total error is certified to be within this
        fraction of the smallest possible one.
      max_evaluations: Give up after this many evaluations of the error.
      show_progress: Whether to show a progress bar on standard error.

    Returns:
      A factorization with its certified gap: with columns of norm one, or of sensitivity
      one where the norms differ. If the gap was not reached, the best matrix found, with
      its gap and a NotConvergedWarning.

    Raises:
      ValueError: If the workload is not square, finite, lower triangular and of full
        rank, the number of bands is out of range or above the schema's separation, or
        the schema names more participations than fit.
    """
    if isinstance(workload, workloads.Workload):
        workload = workload.matrix()
    # A factor on the workload changes nothing but the range of numbers.
    workload = validation.lower_triangular(workload, "the workload")
    workload = workload / np.max(np.abs(workload))
    num_rounds = workload.shape[0]
    num_bands = validation.positive_integer(num_bands, "num_bands")
    if num_bands > num_rounds:
        raise ValueError(f"num_bands must be at most num_rounds, {num_rounds}, found {num_bands}.")
    participation = check_fits(
        MinSeparation(num_bands) if participation is None else participation, num_rounds
    )
    if (
        participation.most_participations(num_rounds) > 1
        and not isinstance(participation, SingleParticipation)
        and participation.separation < num_bands
    ):
        raise ValueError(
            f"num_bands must be at most the separation of the participation schema, "
            f"{participation.separation}, found {num_bands}: with more bands, participations of "
            "one client overlap (BandMF Thm 2)."
        )
    relative_gap = validation.positive_number(relative_gap, "relative_gap")
    max_evaluations = validation.positive_integer(max_evaluations, "max_evaluations")

    constraint: _EqualNorms | _PatternNorms = _EqualNorms(num_bands)
    most = participation.most_participations(num_rounds)
    if not equal_column_norms and most > 1 and not isinstance(participation, SingleParticipation):
        participation = FixedEpochOrder(most, participation.separation)
        layout = PatternLayout(num_rounds, participation.separation, most)
        constraint = _PatternNorms(num_bands, layout)
    start = _square_root_bands(num_rounds, num_bands)
    if len(constraint.sharpness) > 1:
        # Where patterns share rounds the search is harder; equal norms are a good start.
        easier = _Search(
            workload, _EqualNorms(num_bands), relative_gap, max_evaluations, show_progress
        )
        try:
            easier.run(start)
        except Converged:
            pass
        finally:
            easier.progress.close()
        start = easier.best_bands
    search = _Search(workload, constraint, relative_gap, max_evaluations, show_progress)
    search.consider(start)
    try:
        search.run(start)
    except Converged:
        pass
    finally:
        search.progress.close()
    gap = search.certified_gap()
    warn_unless_reached(gap, relative_gap, search.evaluations)
    return BandedFactorization(
        search.best_bands,
        participation=participation,
        optimality_gap=gap,
        parameters={
            "num_bands": num_bands,
            "equal_column_norms": isinstance(constraint, _EqualNorms),
            "relative_gap": relative_gap,
            "workload": workloads.fingerprint(workload),
        },
    )


@dataclasses.dataclass(frozen=True)
class _EqualNorms:
    """Columns of norm one."""

    num_bands: int
    sharpness: tuple[float, ...] = (1.0,)

    def scales(self, squared_norms: np.ndarray, sharpness: float) -> np.ndarray:
        """Returns what each column of C is divided by, squared."""
        return squared_norms

    def by_squared_norms(
        self, along: np.ndarray, squared_norms: np.ndarray, sharpness: float
    ) -> np.ndarray:
        """Returns the part of the slope that changes the scales: a multiple of each column."""
        return along / squared_norms

    def squared_sensitivity(self, squared_norms: np.ndarray) -> float:
        """Returns the largest squared norm."""
        return float(np.max(squared_norms))

    def dual_diagonal(self, diagonal: np.ndarray) -> tuple[np.ndarray, float]:
        """Returns a diagonal of V that the constraint allows, and the sum of its weights."""
        return diagonal, float(np.sum(diagonal))


@dataclasses.dataclass(frozen=True)
class _PatternNorms:
    """Squared column norms that sum to at most one over every pattern of (k, b)-participation.

    A column's squared scale is the largest sum over the patterns that hold it, for
    which the p-norm of the sums, no smaller and smooth, stands in. Where no two patterns
    share a round, it is the one sum itself.
    """

    num_bands: int
    layout: PatternLayout

    @property
    def sharpness(self) -> tuple[float, ...]:
        """The exponents p to try in turn."""
        return (
            (1.0,) if self.layout.positions == self.layout.most else (16.0, 128.0, 1024.0, 8192.0)
        )

    def scales(self, squared_norms: np.ndarray, sharpness: float) -> np.ndarray:
        """Returns what each column of C is divided by, squared."""
        layout = self.layout
        sums = layout.sums(layout.by_position(squared_norms))
        tightest = layout.tightest(sums)
        # Shares of the largest sum, at most one, whose powers stay in range.
        shares = np.where(layout.held, sums[:, np.newaxis] / tightest[:, :, np.newaxis], 0.0)
        norms = np.sum(shares**sharpness, axis=2) ** (1.0 / sharpness)
        return layout.by_round(tightest * norms)

    def by_squared_norms(
        self, along: np.ndarray, squared_norms: np.ndarray, sharpness: float
    ) -> np.ndarray:
        """Returns the part of the slope that changes the scales: a multiple of each column."""
        layout = self.layout
        sums = layout.sums(layout.by_position(squared_norms))
        scales = layout.by_position(self.scales(squared_norms, sharpness))
        scales[~layout.exists] = 1.0
        shares = np.where(layout.held, sums[:, np.newaxis] / scales[:, :, np.newaxis], 0.0)
        powers = np.where(layout.held, shares ** (sharpness - 1.0), 0.0)
        by_pattern = np.sum((layout.by_position(along) / scales)[:, :, np.newaxis] * powers, axis=1)
        return layout.by_round(layout.cover(by_pattern))

    def squared_sensitivity(self, squared_norms: np.ndarray) -> float:
        """Returns the largest sum over a pattern: columns of one are orthogonal."""
        return float(np.max(self.layout.sums(self.layout.by_position(squared_norms))))

    def dual_diagonal(self, diagonal: np.ndarray) -> tuple[np.ndarray, float]:
        """Returns a diagonal of V that the constraint allows, and the sum of its weights.

        V[i, i] must be the sum of weights of the patterns that hold round i; the closest
        such diagonal, in relative terms, is taken.
        """
        layout = self.layout
        table, weights = layout.by_position(diagonal), np.zeros(layout.windows.shape)
        for row, exists, windows, held, found in zip(
            table, layout.exists, layout.windows, layout.held, weights, strict=True
        ):
            target = row[exists]
            holds = held[np.ix_(exists, windows)]
            relative = holds / target[:, np.newaxis]
            try:
                found[windows], _ = scipy.optimize.nnls(relative, np.ones(len(target)))
            except RuntimeError:
                # It ran out of iterations; any non-negative weights give a bound.
                solution, *_ = np.linalg.lstsq(relative, np.ones(len(target)), rcond=None)
                found[windows] = np.maximum(solution, 0.0)
        return layout.by_round(layout.cover(weights)), float(np.sum(weights))


class _Search:
    """L-BFGS over the entries of C, with the best matrix and bound so far."""

    def __init__(
        self,
        workload: np.ndarray,
        constraint: _EqualNorms | _PatternNorms,
        relative_gap: float,
        max_evaluations: int,
        show_progress: bool,
    ) -> None:
        num_bands = constraint.num_bands
        self._workload = workload
        self._constraint = constraint
        self._sharpness = constraint.sharpness[0]
        self._num_bands = num_bands
        self._relative_gap = relative_gap
        self._max_evaluations = max_evaluations
        self.progress = tqdm.tqdm(
            desc=f"{num_bands} bands", unit=" evaluations", disable=not show_progress
        )
        self.evaluations = 0
        self._best_error = np.inf
        self.best_bands = np.empty(0)
        self._estimated_bound = 0.0
        self._dual = workload, 1.0
        self._certified_error = np.inf
        in_band = np.tri(workload.shape[0], num_bands, dtype=bool)
        # bands[i, t] exists for t <= i: the first rows are shorter than the band.
        self._in_band = in_band

    def run(self, start: np.ndarray) -> None:
        """Searches from some (n, b) bands until no progress is made.

        Raises:
          Converged: When the target is certified.
        """
        entries = start[self._in_band]
        for sharpness in self._constraint.sharpness:
            self._sharpness = sharpness
            remaining = self._max_evaluations - self.evaluations
            if remaining <= 0:
                return
            entries = scipy.optimize.minimize(
                self._log_error,
                entries,
                jac=True,
                method="L-BFGS-B",
                options={
                    "maxcor": 10,
                    "maxiter": remaining,
                    "maxfun": remaining,
                    "ftol": 1e-15,
                    "gtol": 0.0,
                },
            ).x

    def consider(self, bands: np.ndarray) -> None:
        """Keeps a matrix as it is, scaled to sensitivity one, if its error is the best."""
        squared = self._constraint.squared_sensitivity(_column_sums(np.square(bands)))
        strategy = noise_recursions.matrix_from_bands(bands)
        decoder_t = _solve_transposed(strategy, self._num_bands, self._workload.T)
        self._keep(bands, squared, float(np.sum(np.square(decoder_t))))

    def _keep(self, bands: np.ndarray, squared_sensitivity: float, error: float) -> None:
        if error * squared_sensitivity < self._best_error:
            self._best_error = error * squared_sensitivity
            self.best_bands = bands / np.sqrt(squared_sensitivity)

    def certified_gap(self) -> float:
        """Returns the relative gap of the best matrix, with a lower bound that is certain."""
        self._estimated_gap()
        product, total = self._dual
        root_sum = nuclear_norm_from_below(product)
        return max(self._best_error * total / root_sum**2 - 1.0, 0.0)

    def _estimated_gap(self) -> float:
        if self._certified_error > self._best_error:
            self._certify()
        return self._best_error / self._estimated_bound - 1.0

    def _log_error(self, entries: np.ndarray) -> tuple[float, np.ndarray]:
        bands = np.zeros(self._in_band.shape)
        bands[self._in_band] = entries
        squared_norms = _column_sums(np.square(bands))
        norms = np.sqrt(self._constraint.scales(squared_norms, self._sharpness))
        scaled = _divide_columns(bands, norms)
        strategy = noise_recursions.matrix_from_bands(scaled)
        # B = A C^-1 and W = A X^-1 = B C^-T; the derivative of ||B||^2 by C is
        # -2 B^T B C^-T = -2 B^T W, of which the entries within the band are needed.
        decoder_t = _solve_transposed(strategy, self._num_bands, self._workload.T)
        error = float(np.sum(np.square(decoder_t)))
        weighted_t = _solve(strategy, self._num_bands, decoder_t)
        slope = -2.0 * _band_of_product(decoder_t, weighted_t, self._num_bands)
        # The chain rule through the scaling of columns.
        along = _column_sums(slope * scaled)
        by_norms = self._constraint.by_squared_norms(along, squared_norms, self._sharpness)
        slope = _divide_columns(slope, norms)
        slope -= bands * _spread_columns(by_norms, self._num_bands)

        self.evaluations += 1
        self.progress.update()
        # At most one, and one where the scales are exact.
        squared = self._constraint.squared_sensitivity(_column_sums(np.square(scaled)))
        self._keep(scaled, squared, error)
        if self.evaluations % _EVALUATIONS_BETWEEN_CERTIFICATES == 0:
            gap = self._estimated_gap()
            self.progress.set_postfix_str(f"relative gap {gap:.1e}")
            if gap <= _SAFE_SHARE * self._relative_gap:
                raise Converged
        return float(np.log(error)), slope[self._in_band] / error

    def _certify(self) -> None:
        """Raises the lower bound by the dual of the problem at the best matrix.

        With equal norms: for symmetric positive semi-definite V with V[i, j] = 0 for
        0 < |i - j| < b and any feasible X, tr(V X) = tr(V), so that tr(A^T A X^-1) =
        tr(A^T A X^-1) + tr(V X) - tr(V) >= 2 tr((A V A^T)^1/2) - tr(V), the matrix form of
        2 sqrt(a v) <= a / x + v x; the best multiple of V gives
        tr((A V A^T)^1/2)^2 / tr(V). At the optimum V is X^-1 A^T A X^-1, whose entries
        within the band vanish because the gradient does.
        With pattern weights w, V[i, i] the sum of those of the patterns that hold i,
        tr(V X) is at most the sum of w, which takes the place of tr(V).
        """
        strategy = noise_recursions.matrix_from_bands(self.best_bands)
        decoder_t = _solve_transposed(strategy, self._num_bands, self._workload.T)
        weighted_t = _solve(strategy, self._num_bands, decoder_t)
        dual = weighted_t @ weighted_t.T
        diagonal, total = self._constraint.dual_diagonal(np.diagonal(dual).copy())
        num_rounds = dual.shape[0]
        within_band = np.tri(num_rounds, k=self._num_bands - 1, dtype=bool)
        within_band &= within_band.T
        dual[within_band] = 0.0
        factor = np.diag(np.sqrt(diagonal))
        for _ in range(_MOST_HALVINGS):
            np.fill_diagonal(dual, diagonal)
            try:
                factor = scipy.linalg.cholesky(dual, lower=True, check_finite=False)
                break
            except np.linalg.LinAlgError:
                dual *= 0.5
        product = self._workload @ factor
        # Roots of eigenvalues are cheaper than singular values, and good enough to go on.
        spectrum = np.linalg.eigvalsh(product.T @ product)
        estimate = float(np.sum(np.sqrt(np.maximum(spectrum, 0.0)))) ** 2 / total
        if estimate > self._estimated_bound:
            self._estimated_bound, self._dual = estimate, (product, total)
        self._certified_error = self._best_error


def _square_root_bands(num_rounds: int, num_bands: int) -> np.ndarray:
    """Bands of the Toeplitz square root of the prefix sum."""
    coefficients = power_series.square_root_coefficients(num_bands)
    return np.where(np.tri(num_rounds, num_bands, dtype=bool), coefficients, 0.0)


def _column_sums(bands: np.ndarray) -> np.ndarray:
    """Sums over the rows of a matrix given by its bands, for each column."""
    num_rounds, num_bands = bands.shape
    sums = np.zeros(num_rounds)
    for t in range(num_bands):
        sums[: num_rounds - t] += bands[t:, t]
    return sums


def _spread_columns(values: np.ndarray, num_bands: int) -> np.ndarray:
    """Bands of the matrix whose column j holds values[j] within the band."""
    bands = np.zeros((values.shape[0], num_bands))
    for t in range(num_bands):
        bands[t:, t] = values[: values.shape[0] - t]
    return bands


def _divide_columns(bands: np.ndarray, divisors: np.ndarray) -> np.ndarray:
    return bands * _spread_columns(1.0 / divisors, bands.shape[1])


def _solve_transposed(strategy: np.ndarray, num_bands: int, upper: np.ndarray) -> np.ndarray:
    """Returns C^-T M for a banded lower-triangular C and an upper-triangular M."""
    num_rounds = strategy.shape[0]
    solution = np.zeros_like(upper, order="C")
    for start in range((num_rounds - 1) // _BLOCK * _BLOCK, -1, -_BLOCK):
        stop = min(start + _BLOCK, num_rounds)
        reach = min(stop + num_bands - 1, num_rounds)
        # Row i of the solution, like row i of M, is zero before column i.
        right_side = upper[start:stop, start:].copy()
        right_side[:, stop - start :] -= (
            strategy[stop:reach, start:stop].T @ solution[stop:reach, stop:]
        )
        solution[start:stop, start:] = scipy.linalg.solve_triangular(
            strategy[start:stop, start:stop],
            right_side,
            lower=True,
            trans="T",
            check_finite=False,
        )
    return solution


def _solve(strategy: np.ndarray, num_bands: int, right_side: np.ndarray) -> np.ndarray:
    """Returns C^-1 M for a banded lower-triangular C."""
    num_rounds = strategy.shape[0]
    solution = np.empty_like(right_side)
    for start in range(0, num_rounds, _BLOCK):
        stop = min(start + _BLOCK, num_rounds)
        reach = max(0, start - num_bands + 1)
        block = right_side[start:stop] - strategy[start:stop, reach:start] @ solution[reach:start]
        solution[start:stop] = scipy.linalg.solve_triangular(
            strategy[start:stop, start:stop], block, lower=True, check_finite=False
        )
    return solution


def _band_of_product(left: np.ndarray, right: np.ndarray, num_bands: int) -> np.ndarray:
    """Returns the bands of L R^T on and below the diagonal, for an upper-triangular L."""
    num_rounds = left.shape[0]
    bands = np.zeros((num_rounds, num_bands))
    for start in range(0, num_rounds, _BLOCK):
        stop = min(start + _BLOCK, num_rounds)
        first = max(0, start - num_bands + 1)
        block = left[start:stop, start:] @ right[first:stop, start:].T
        rows = np.arange(start, stop)[:, np.newaxis]
        lags = np.arange(num_bands)
        columns = rows - lags
        inside = columns >= 0
        taken = block[rows - start, np.maximum(columns, first) - first]
        bands[start:stop] = np.where(inside, taken, 0.0)
    return bands
