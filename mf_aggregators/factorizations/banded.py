r"""Banded factorizations, with equal column norms (BandMF Problem 2) and without (App. B).

**Sensitivity.** :mod:`mf_aggregators.kernel.sensitivity` has the theorems and computes the values.
X = C^T C is banded here, so sums over a pattern skip its zeros.

**Extension.** Rows of C that were used do not change. All entries of later rows are free: the
columns of new rounds, and the lower ends of the last b - 1 old columns. New columns get the norm of
the old ones. If an old column is continued, its norm grows, which weakens the guarantee. If it is
not continued, no later row cancels the noise of its round. As a compromise, the squared norm of
each of these columns may grow by at most a given share. A client has at most one participation in b
- 1 rounds, so the squared sensitivity of k participations grows by at most a k-th of this share.

The best of a few shares is chosen by the error of a simple matrix. Then L-BFGS minimises the
squared error over all free entries, once with this share and once with share zero. New columns are
scaled to their norm, and the ends of old columns are r v / sqrt(1 + |v|^2), which has a norm of at
most r for every v. :mod:`mf_aggregators.linear_algebra` computes error and gradient in O(n b^2)
operations.
"""

import dataclasses
import functools

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
from mf_aggregators.participation import FixedEpochOrder, MinSeparation, Participation, check
from mf_aggregators.workloads import AnyWorkload

# The bytes that a search needs at least for each entry of C (bands, blocks and steps): for the mean
# error and for an extension; and for the maximum, which keeps twice as many steps and the last few
# C^T C.
_BYTES_PER_ENTRY, _BYTES_PER_ENTRY_FOR_MAXIMUM = 8 * 30, 8 * 70
# The shares that are tried by which the squared norms of the last old columns may grow.
_SHARES_OF_GROWTH = (0.0, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0)
_MOST_EVALUATIONS_OF_EXTENSION = 200
_LEAST_CHANGE_OF_EXTENSION = 1e-6
# The factor by which new rows of noise may be longer than the longest first row. Integers hold 20
# standard deviations of the first rows, and have to hold 17 of the new ones (``kernel.integers``).
_GROWTH_OF_ROWS = 1.1
# Stands for the logarithm of an error that is too large for floats.
_LARGEST_LOG = 1e3


def banded(
    workload: object,
    num_bands: int,
    equal_column_norms: bool = True,
    participation: Participation | None = None,
    *,
    error: RoundWeights = "mean",
    relative_gap: float | None = None,
    max_evaluations: int | None = None,
    show_progress: bool = False,
) -> BandedFactorization:
    """Computes the banded factorization with the least squared error (mean, maximum or weighted).

    Use it when clients return after a known number of rounds, or are sampled: the first choice.

    For the mean it minimises tr(A^T A X^-1) over b-banded positive definite X with diagonal one
    (BandMF Problem 2). Every such X is C^T C for exactly one lower-triangular banded C with a
    positive diagonal and columns of norm one (BandMF Prop. 4.1), and L-BFGS runs over the entries
    of C before its columns are scaled. This is the same problem without constraints, and takes a
    fraction of the steps of a search over X. If the inverse of A is banded (for the prefix sum and
    momentum), a step takes O(n b^2) operations and O(n b) memory, so 100,000 rounds are possible.
    For any other array, a step takes the operations and memory of dense matrices.

    With equal column norms, the squared sensitivity for any separation of at least ``num_bands`` is
    the number of participations times the squared norm. It does not depend on the matrix, so one
    matrix is optimal for all these schemas.

    Without equal column norms, the diagonal of X has to sum to at most one over each set of rounds
    that are b apart (BandMF App. B). If the schema is MinSeparation, or allows fewer participations
    than fit, the matrix is optimised for clients that take part in every b-th round, and
    ``participation`` of the result says so. Its sensitivity under the given schema is exact as
    well.

    Args:
      workload: A, an (n, n) lower-triangular array of full rank, a ``workloads.Workload``, or an
        int n for the prefix sum of n rounds.
      num_bands: The number of bands b, from 1 (independent noise) to n (a full matrix).
      equal_column_norms: Whether the columns of C have equal norms.
      participation: The schema of the run, with participations at least ``num_bands`` rounds apart;
        ``MinSeparation(num_bands)`` by default.
      error: The error to minimise: the ``mean`` squared error over rounds, its ``max``, or the mean
        with (n,) positive weights on rounds, as an array; :func:`optimal` accepts zeros as well.
      relative_gap: Stop when the squared error is certified to be within this fraction of the
        smallest possible one; default 1e-5, and 1e-3 for ``max``.
      max_evaluations: Give up after this many evaluations of the error; default 1000, and 3000 for
        ``max``.
      show_progress: Whether to show a progress bar on standard error.

    Returns:
      A factorization with its certified gap. Its columns have norm one; without equal column norms,
        its sensitivity is one. If the required gap was not reached, the best matrix found, with its
        gap and a NotConvergedWarning.

    Raises:
      ValueError: If the workload is not square, finite, lower triangular and of full
        rank, if the number of bands is out of range or above the schema's separation, or if the
        schema's participations do not fit into the rounds.

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
            f"{float(np.min(np.asarray(error)))}: use optimal for smaller weights."
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
        # A full matrix: the dense optimum, which needs fewer steps. Imported here, because that
        # module imports this one.
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


def from_bands(bands: object) -> BandedFactorization:
    """Makes a factorization of a given banded strategy matrix, without an (n, n) array.

    Use it when another program has computed a banded C.

    Args:
      bands: (n, b) floats, finite, with ``bands[i, t] = C[i, i - t]``, zero where i < t, and no
        zero on the diagonal ``bands[:, 0]``.

    Returns:
      A factorization of a float64 copy, without an optimality gap.

    Raises:
      ValueError: If the bands do not have this form, or the inverse of C is too large for floats.

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
    made = BandedFactorization(numbers.real_array(bands, "bands"))
    with np.errstate(all="ignore"):
        is_invertible = np.all(np.isfinite(made.squared_decoder_rows(made.num_rounds)))
    if not is_invertible:
        raise ValueError("the inverse of the strategy matrix is too large for floats.")
    return made


def extended_bands(
    bands: FloatArray, workload: AnyWorkload, participation: Participation, first_horizon: int
) -> FloatArray:
    """Returns the bands of a matrix for more rounds, with given first rows.

    Args:
      bands: (n, b), the given rows, ``bands[i, t] = C[i, i - t]``.
      workload: The workload of the extended run, for m > n rounds.
      participation: The schema of the extended run.
      first_horizon: The number of rounds for which the run began, which determines the steps of its
        noise.

    Returns:
      (m, b); the first n rows are the given ones. The new rows of noise are not much longer than
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
            # A large value makes the line search take a shorter step.
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
    # All shares are tried with the found entries: longer old columns also raise the sensitivity.
    found += [(free, share) for free, _ in found for share in _SHARES_OF_GROWTH]
    longest = _GROWTH_OF_ROWS * np.max(_row_norms(bands[:first_horizon]))
    # Independent noise in the new rounds always fits into 32 bits.
    fitting = [(rows.independent(), 0.0)]
    fitting += [each for each in found if np.max(_row_norms(rows.of(*each))) <= longest]
    return rows.of(*min(fitting, key=lambda each: squared_error(*each)))


def _row_norms(bands: FloatArray) -> FloatArray:
    """The L2 norms of the rows of C^-1, each divided by its diagonal entry."""
    return BandedNoise(len(bands), bands).normalised.row_norms()[0]


class _FreeRows:
    """The extended matrix as a function of its free entries."""

    def __init__(self, bands: FloatArray, num_rounds: int) -> None:
        self._released = bands
        released, num_bands = bands.shape
        self.shape = (num_rounds, num_bands)
        squared_norms = linear_algebra.column_sums(np.square(bands))
        self._is_free = np.zeros(self.shape, dtype=bool)
        self._is_free[released:] = np.tri(num_rounds, num_bands, dtype=bool)[released:]
        # New columns get the norm of complete old columns; the last b - 1 old columns are
        # incomplete.
        whole = squared_norms[: max(1, released - num_bands + 1)]
        self._radii = np.full(num_rounds, np.sqrt(np.mean(whole)))
        self._radii[:released] = np.sqrt(squared_norms)
        self._is_old = np.arange(num_rounds) < released

    def start(self) -> FloatArray:
        """The free entries from the Toeplitz square root of the prefix sum, to start a search."""
        return np.asarray(linear_algebra.square_root_bands(*self.shape)[self._is_free])

    def independent(self) -> FloatArray:
        """The free entries for which the noise of new rounds is independent."""
        return np.asarray(np.eye(1, self.shape[1]).repeat(self.shape[0], axis=0)[self._is_free])

    def of(self, free: FloatArray, share: float) -> FloatArray:
        """Returns the (m, b) bands of the matrix.

        Args:
          free: The free entries, before columns are scaled.
          share: The share by which the squared norms of old columns may grow.
        """
        entries, scales, _ = self._scaled(free, share)
        bands = entries * linear_algebra.spread_columns(scales, self.shape[1])
        bands[: len(self._released)] = self._released
        return bands

    def by_free(self, free: FloatArray, share: float, slope: FloatArray) -> FloatArray:
        """Returns the gradient by the free entries, from the (m, b) gradient by the matrix."""
        entries, scales, divisors = self._scaled(free, share)
        slope = np.where(self._is_free, slope, 0.0)
        along = linear_algebra.column_sums(entries * slope) / divisors
        # Columns of new rounds are scaled by 1 / |v| and those of released rounds by 1 / sqrt(1 +
        # |v|^2), for their free entries v: these are the derivatives of both factors.
        slope -= entries * linear_algebra.spread_columns(along, self.shape[1])
        slope *= linear_algebra.spread_columns(scales, self.shape[1])
        return np.asarray(slope[self._is_free])

    def _scaled(self, free: FloatArray, share: float) -> tuple[FloatArray, FloatArray, FloatArray]:
        """The entries, the factors of columns, and the squares by which these are divided."""
        entries = np.zeros(self.shape)
        entries[self._is_free] = free
        divisors = self._is_old + linear_algebra.column_sums(np.square(entries))
        radii = np.where(self._is_old, np.sqrt(share), 1.0) * self._radii
        return entries, radii / np.sqrt(divisors), divisors
