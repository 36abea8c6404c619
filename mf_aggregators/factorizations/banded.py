r"""Banded factorizations, with equal column norms (BandMF Problem 2) and without (App. B).

**Sensitivity.** The statements are those of :mod:`mf_aggregators.kernel.sensitivity`, and so are
the values; X = C^T C is banded here, and no sum over a pattern needs what is zero.

**Extension.** Rows of C that were used do not change. What is free is every entry in a later row:
whole columns from the first new round on, and the lower ends of the last b - 1 columns, which ended
with the plan. New columns get the norm that the old ones have. An old column can only become
longer, which costs guarantee; if it stays as it is, no later row cancels any of the noise of its
round. Between the two, the squared norm of each of these columns may grow by at most a share of
what it was. A client has at most one participation in b - 1 rounds,
so that the share raises the squared sensitivity of k participations by a k-th of it.

The best share of a few is chosen by the error of a simple matrix, and then L-BFGS runs over all
free entries, for the squared error at that share and at none: new columns are scaled to their norm,
and ends of old ones are r v / sqrt(1 + |v|^2), which no v makes longer than r. Error and slope come
from :mod:`mf_aggregators.linear_algebra`, in O(n b^2) operations.
"""

import dataclasses
import functools
from typing import Any

import numpy as np

from mf_aggregators import inputs, linear_algebra, workloads
from mf_aggregators.factorizations import _banded_search
from mf_aggregators.factorizations._band_certificate import BandedWorkload
from mf_aggregators.factorizations.factorization import BandedFactorization, bands_of_matrix
from mf_aggregators.factorizations.searches import (
    NotConvergedWarning,
    PatternLayout,
    RoundError,
    RoundWeights,
    check_bands,
    minimise,
)
from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.numbers import FloatArray
from mf_aggregators.kernel.rows import BandedNoise, Strategy
from mf_aggregators.kernel.sensitivity import of_strategy
from mf_aggregators.participation import (
    FixedEpochOrder,
    MinSeparation,
    Participation,
    check,
)
from mf_aggregators.workloads import Workload

# The least bytes that a search keeps for each entry of C, in bands, blocks and steps: for the mean
# and in an extension; and for the maximum, with twice as many steps and the last few C^T C.
_BYTES_PER_ENTRY, _BYTES_PER_ENTRY_FOR_MAXIMUM = 8 * 30, 8 * 70
# The shares that the squared norm of a column that ended with the horizon may grow by.
_SHARES_OF_GROWTH = (0.0, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0)
_MOST_EVALUATIONS_OF_EXTENSION = 200
_LEAST_CHANGE_OF_EXTENSION = 1e-6
# By how much further rows of noise may be longer than the longest of the first horizon. Its steps
# hold 20 standard deviations of that, and have to hold 17 of these (``kernel.integers``).
_GROWTH_OF_ROWS = 1.1
# In place of the logarithm of an error beyond floats.
_LARGEST_LOG = 1e3


def banded(
    workload: Any,
    num_bands: int,
    equal_column_norms: bool = True,
    participation: Participation | None = None,
    *,
    error: RoundWeights = "mean",
    relative_gap: float | None = None,
    max_evaluations: int | None = None,
    show_progress: bool = False,
) -> BandedFactorization:
    """Computes the banded factorization of least squared error: in the mean, or as asked for.

    Use it when clients come back after a known time, or are sampled: the first choice.

    For the mean it minimises tr(A^T A X^-1) over b-banded positive definite X with diagonal one
    (BandMF Problem 2). Every such X is C^T C for exactly one lower-triangular banded C with a
    positive diagonal and columns of norm one (BandMF Prop. 4.1), and L-BFGS runs over the
    entries of C before their columns are scaled: the same problem, never infeasible, and
    solved in a fraction of the steps that the entries of X take. Where A has a banded inverse, as
    the prefix sum and momentum have, a step takes O(n b^2) operations and O(n b) memory, so that
    100,000 rounds are no obstacle; for any other array it takes those of dense matrices.

    With equal column norms the squared sensitivity under any separation of at least
    ``num_bands`` is the number of participations times the squared norm, whatever the
    matrix, so one matrix is the optimum for all of them.

    Without, the diagonal of X may vary as long as it sums to at most one over all rounds that are
    b apart (BandMF App. B). Where the schema is MinSeparation, or allows fewer participations than
    fit, it is optimised for clients that take part in every b-th round, and the result says so; its
    sensitivity under the schema itself is exact as well.

    Args:
      workload: A, an (n, n) lower-triangular array of full rank, a ``workloads.Workload``, or an
        int n for the prefix sum of n rounds.
      num_bands: The number of bands b, 1 (independent noise) to n (no limit).
      equal_column_norms: Whether the columns of C have equal norms.
      participation: The schema that the factorization is for, with participations at least
        ``num_bands`` rounds apart; ``MinSeparation(num_bands)`` by default.
      error: What to minimise: the ``mean`` squared error over rounds, its ``max``, or the mean with
        (n,) weights on rounds, all above zero, as an array; :func:`optimal` takes zeros as well.
      relative_gap: Stop when the squared error is certified to be within this fraction of the
        smallest possible one; default 1e-5, and 1e-3 for ``max``.
      max_evaluations: Give up after this many evaluations of the error; default 1000, and 3000 for
        ``max``.
      show_progress: Whether to show a progress bar on standard error.

    Returns:
      A factorization with its certified gap: with columns of norm one, or of sensitivity
      one where the norms differ. If the gap was not reached, the best matrix found, with
      its gap and a NotConvergedWarning.

    Raises:
      ValueError: If the workload is not square, finite, lower triangular and of full
        rank, the number of bands is out of range or above the schema's separation, or
        the schema names more participations than fit.

    Example:
      >>> import mf_aggregators as mfa
      >>> workload = mfa.workloads.prefix_sum(64)
      >>> timers = mfa.participation.MinSeparation(separation=16)
      >>> factorization = mfa.factorizations.banded(workload, num_bands=16, participation=timers)
      >>> round(factorization.rmse(workload, timers), 2)
      4.59
      >>> factorization.sensitivity(timers).is_exact
      True
    """
    workload = workloads.checked(workload)
    num_rounds = workload.num_rounds
    num_bands = numbers.positive_integer(num_bands, "num_bands")
    measure = RoundError.of(error, num_rounds)
    if measure.has_vanishing_weights:
        raise ValueError(
            "error must hold weights above zero for banded, and above 1e-8 of the largest, found "
            f"{float(np.min(np.asarray(error)))}: use optimal for others."
        )
    bytes_per_entry = _BYTES_PER_ENTRY_FOR_MAXIMUM if measure.is_maximum else _BYTES_PER_ENTRY
    inputs.check_rounds(num_rounds, bytes_per_entry * num_bands, "the banded factorization")
    check_bands(num_bands, num_rounds)
    participation = check(
        MinSeparation(num_bands) if participation is None else participation, num_rounds
    )
    separation = participation.separation_in(num_rounds)
    if participation.most_participations(num_rounds) > 1 and separation < num_bands:
        raise ValueError(
            f"num_bands must be at most the separation of the participation schema, "
            f"{separation}, found {num_bands}: with more bands, participations of "
            "one client overlap (BandMF Thm 2)."
        )
    if relative_gap is None:
        relative_gap = 1e-3 if measure.is_maximum else 1e-5
    relative_gap = numbers.positive_number(relative_gap, "relative_gap")
    if max_evaluations is None:
        max_evaluations = 3000 if measure.is_maximum else 1000
    max_evaluations = numbers.positive_integer(max_evaluations, "max_evaluations")

    most = participation.most_participations(num_rounds)
    equal_column_norms = equal_column_norms or most == 1
    parameters = {
        **measure.parameters(),
        "num_bands": num_bands,
        "equal_column_norms": equal_column_norms,
        "relative_gap": relative_gap,
        "workload": workload.fingerprint(),
    }
    if num_bands == num_rounds and equal_column_norms:
        # No limit on the bands: the dense optimum, by eigenvalues in place of n^3 operations a
        # step. That module needs this one, for another search.
        from mf_aggregators.factorizations.optimal import optimal

        optimum = optimal(
            workload,
            error=error,
            relative_gap=relative_gap,
            max_evaluations=max_evaluations,
            show_progress=show_progress,
        )
        return BandedFactorization(
            bands_of_matrix(optimum.strategy_matrix(), num_bands),
            participation=participation,
            optimality_gap=optimum.optimality_gap,
            parameters=parameters,
        )
    if not equal_column_norms:
        participation = FixedEpochOrder(-(-num_rounds // separation), separation)
    bands, gap, evaluations = _banded_search.search(
        workload,
        PatternLayout(num_rounds, num_rounds if equal_column_norms else separation),
        num_bands,
        measure,
        relative_gap=relative_gap,
        max_evaluations=max_evaluations,
        show_progress=show_progress,
    )
    factorization = BandedFactorization(bands, participation=participation, parameters=parameters)
    NotConvergedWarning.unless_reached(gap, relative_gap, evaluations)
    return dataclasses.replace(factorization, optimality_gap=gap if np.isfinite(gap) else None)


def from_bands(bands: Any) -> BandedFactorization:
    """Makes a factorization of any banded strategy matrix, without an (n, n) array.

    Use it when another program has computed a banded C.

    Args:
      bands: (n, b) floats, finite, with ``bands[i, t] = C[i, i - t]``, zero where i < t, and no
        zero on the diagonal ``bands[:, 0]``.

    Returns:
      A factorization of a float64 copy, which states no optimality gap.

    Raises:
      ValueError: If the bands are not as said, or the inverse of C is too large for floats.

    Example:
      >>> import numpy as np
      >>> import mf_aggregators as mfa
      >>> bands = np.tile([1.0, 0.5], (4, 1))
      >>> bands[0, 1] = 0.0  # there is no round before the first one
      >>> mfa.factorizations.from_bands(bands).strategy_matrix()
      array([[1. , 0. , 0. , 0. ],
             [0.5, 1. , 0. , 0. ],
             [0. , 0.5, 1. , 0. ],
             [0. , 0. , 0.5, 1. ]])
    """
    made = BandedFactorization(bands)
    with np.errstate(all="ignore"):
        is_invertible = np.all(np.isfinite(made.squared_decoder_rows(made.num_rounds)))
    if not is_invertible:
        raise ValueError("the inverse of the strategy matrix is too large for floats.")
    return made


def extended_bands(
    bands: FloatArray, workload: Workload, participation: Participation, first_horizon: int
) -> FloatArray:
    """Returns the bands of a matrix for more rounds, with given first rows.

    Args:
      bands: (n, b) of the rows that stay, ``bands[i, t] = C[i, i - t]``.
      workload: The workload of the whole, for m > n rounds, which names that number.
      participation: The schema of the whole.
      first_horizon: The rounds that the run began with, in whose steps its noise goes on.

    Returns:
      (m, b), whose first n rows are those that were given. Rows of noise are not much longer than
      those of the first horizon, so that 32 bits hold them in its steps.
    """
    inputs.check_rounds(
        workload.num_rounds, _BYTES_PER_ENTRY * bands.shape[1], "the extended banded factorization"
    )
    prepared = BandedWorkload.of(workload, bands.shape[1])
    rows = _FreeRows(bands, workload.num_rounds)
    start = rows.start()

    schema = participation.as_schema()

    def squared_error(free: FloatArray, share: float) -> float:
        made = rows.of(free, share)
        error = linear_algebra.BandedCovariances(made, prepared.blocks).squared_error
        return error * of_strategy(Strategy(made, len(made)), schema).value ** 2

    def log_error(free: FloatArray, share: float) -> tuple[float, FloatArray]:
        with np.errstate(all="ignore"):
            covariances = linear_algebra.BandedCovariances(rows.of(free, share), prepared.blocks)
            error = covariances.squared_error
            slope = covariances.slope() if np.isfinite(error) else np.full(rows.shape, np.nan)
            slope = rows.by_free(free, share, slope) / error
        if not (0.0 < error < np.inf and np.all(np.isfinite(slope))):
            # The line search takes a shorter step.
            return _LARGEST_LOG, np.zeros(free.shape)
        return float(np.log(error)), slope

    share = min(_SHARES_OF_GROWTH, key=lambda share: squared_error(start, share))
    found = [(start, share)]
    for tried in {0.0, share}:
        result = minimise(
            functools.partial(log_error, share=tried),
            start,
            max_evaluations=_MOST_EVALUATIONS_OF_EXTENSION,
            corrections=10,
            least_change=_LEAST_CHANGE_OF_EXTENSION,
        )
        found.append((np.asarray(result.x), tried))
    # Longer ends of old columns have made the sensitivity larger as well.
    found += [(free, share) for free, _ in found for share in _SHARES_OF_GROWTH]
    longest = _GROWTH_OF_ROWS * np.max(_row_norms(bands[:first_horizon]))
    # Independent noise always fits.
    fitting = [(rows.independent(), 0.0)]
    fitting += [each for each in found if np.max(_row_norms(rows.of(*each))) <= longest]
    return rows.of(*min(fitting, key=lambda each: squared_error(*each)))


def _row_norms(bands: FloatArray) -> FloatArray:
    """The L2 norms of the rows of C^-1, each over the entry on its diagonal."""
    return BandedNoise(len(bands), bands).normalised.row_norms()[0]


class _FreeRows:
    """The matrix as a function of its free entries."""

    def __init__(self, bands: FloatArray, num_rounds: int) -> None:
        self._released = bands
        released, num_bands = bands.shape
        self.shape = (num_rounds, num_bands)
        squared_norms = linear_algebra.column_sums(np.square(bands))
        self._is_free = np.zeros(self.shape, dtype=bool)
        self._is_free[released:] = np.tri(num_rounds, num_bands, dtype=bool)[released:]
        # New columns get the norm of whole columns of C; others are shorter if norms are not equal.
        whole = squared_norms[: max(1, released - num_bands + 1)]
        self._radii = np.full(num_rounds, np.sqrt(np.mean(whole)))
        self._radii[:released] = np.sqrt(squared_norms)
        self._is_old = np.arange(num_rounds) < released

    def start(self) -> FloatArray:
        """The free entries of the Toeplitz square root of the prefix sum."""
        return np.asarray(linear_algebra.square_root_bands(*self.shape)[self._is_free])

    def independent(self) -> FloatArray:
        """The free entries of noise that is independent after the rows that stay."""
        return np.asarray(np.eye(1, self.shape[1]).repeat(self.shape[0], axis=0)[self._is_free])

    def of(self, free: FloatArray, share: float) -> FloatArray:
        """Returns the (m, b) bands of the matrix.

        Args:
          free: The free entries, before columns are scaled.
          share: By which the squared norms of old columns may grow.
        """
        entries, scales, _ = self._scaled(free, share)
        bands = entries * linear_algebra.spread_columns(scales, self.shape[1])
        bands[: len(self._released)] = self._released
        return bands

    def by_free(self, free: FloatArray, share: float, slope: FloatArray) -> FloatArray:
        """Returns the slope by the free entries, from the (m, b) slope by the matrix."""
        entries, scales, divisors = self._scaled(free, share)
        slope = np.where(self._is_free, slope, 0.0)
        along = linear_algebra.column_sums(entries * slope) / divisors
        # From the slopes of 1 / |v| (new columns) and of 1 / sqrt(1 + |v|^2) (old columns).
        slope -= entries * linear_algebra.spread_columns(along, self.shape[1])
        slope *= linear_algebra.spread_columns(scales, self.shape[1])
        return np.asarray(slope[self._is_free])

    def _scaled(self, free: FloatArray, share: float) -> tuple[FloatArray, FloatArray, FloatArray]:
        """The entries, the factors of the columns, and the squares that these are divided by."""
        entries = np.zeros(self.shape)
        entries[self._is_free] = free
        divisors = self._is_old + linear_algebra.column_sums(np.square(entries))
        radii = np.where(self._is_old, np.sqrt(share), 1.0) * self._radii
        return entries, radii / np.sqrt(divisors), divisors
