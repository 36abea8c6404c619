"""Toeplitz factorizations: the square root of the prefix sum, banded, optimised, normalised.

For a Toeplitz workload A, row i of B = A C^-1 has the squared norm b_0^2 + ... + b_i^2,
where b(x) = a(x) / c(x): the running sum of the coefficients of C^-1 for the prefix sum,
and for momentum beta with constant learning rates the running sum with
1 / (1 - beta x) applied to it. So, at noise multiplier 1,

* the mean squared error is sens(C)^2 sum_t (1 - t / n) b_t^2,
* the maximal squared error, that of the last round, is sens(C)^2 sum_t b_t^2,

and with non-increasing coefficients, or no more bands than the separation, sens(C) is
the norm of the columns 0, b, 2 b, ... summed (``kernel.sensitivity.toeplitz_bound``),
respectively of their norms.

**The search.** Where b coefficients are at most the separation, columns of one client are
orthogonal, and L-BFGS runs over all coefficients but the first. Where they overlap, the sensitivity
is known for non-negative coefficients that do not increase from lag b on (after Kalinin and
Lampert, Thm 2), and those before, and the decrements of the others, are bounded.
"""

import abc
import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
import scipy.linalg
import scipy.signal

from mf_aggregators import inputs, memory, workloads
from mf_aggregators import participation as participations
from mf_aggregators.factorizations import _decoder_rows
from mf_aggregators.factorizations._decoder_rows import StateRows, States
from mf_aggregators.factorizations._round_errors import RoundError, RoundWeights
from mf_aggregators.factorizations.convergence import (
    NotConvergedWarning,
    Objective,
    is_stationary,
    minimise,
    warn_unless_stationary,
)
from mf_aggregators.factorizations.factorization import ExtensionError, Factorization
from mf_aggregators.kernel import numbers, schemas
from mf_aggregators.kernel import sensitivity as sensitivities
from mf_aggregators.kernel.numbers import FloatArray
from mf_aggregators.kernel.rows import (
    BandedNoise,
    WindowNoise,
    independent_rows,
    toeplitz_rows,
)
from mf_aggregators.kernel.sensitivity import Sensitivity
from mf_aggregators.linear_algebra import power_series
from mf_aggregators.participation import (
    Participation,
    SingleParticipation,
    check,
    check_fits,
)
from mf_aggregators.progress_bars import ProgressBar
from mf_aggregators.workloads import Workload

# A lower estimate, for errors and sensitivity as well.
_BYTES_PER_ROUND = 64
# How far an array's entries may be from those of a workload that is known by its name.
_ROUNDING_OF_WORKLOAD = 1e-9
_DIGITS_OF_MOMENTUM = 12
# The most evaluations of the search for the coefficients that an extension adds.
_EVALUATIONS_OF_EXTENSION = 500
# How often a search that came to a halt starts again from where it is.
_MOST_STARTS = 10
_Given = TypeVar("_Given")
# Above this many bands the noise draws earlier rows of Z again, as for a dense matrix,
# instead of keeping as many rows of the noise.
_MOST_BANDS_KEPT_SHARE = 0.5
# Rounds squared times participations, for sensitivities of dense column-normalised matrices.
_LARGEST_DENSE_SENSITIVITY = 400_000_000
# Bands times rounds: the error of a column-normalised matrix takes as many operations.
_LARGEST_NORMALISED = 10**10


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ToeplitzStructure(Factorization):
    """C is Toeplitz: C[i, j] depends on i - j alone. All but the dense views takes O(n) memory."""

    # How messages about memory call the matrix.
    _described_as: ClassVar[str]

    num_rounds: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set(num_rounds=check_rounds(self.num_rounds, self._described_as))

    @abc.abstractmethod
    def strategy_coefficients(self) -> FloatArray | None:
        """Returns the first column of C, (n,) float64; None if scaled columns are not Toeplitz."""

    @abc.abstractmethod
    def noising_coefficients(self) -> FloatArray | None:
        """Returns the first column of C^-1, (n,) float64; None if C^-1 is not Toeplitz."""

    def _strategy_column(self) -> FloatArray:
        """The first column of C, of those who have one."""
        column = self.strategy_coefficients()
        assert column is not None
        return column

    def _noising_column(self) -> FloatArray:
        """The first column of C^-1, of those who have one."""
        column = self.noising_coefficients()
        assert column is not None
        return column

    def strategy_matrix(self) -> FloatArray:
        """Returns C as a dense (n, n) array."""
        return _dense(self._strategy_column())

    def noising_matrix(self) -> FloatArray:
        """Returns C^-1 as a dense (n, n) array."""
        return _dense(self._noising_column())

    def _encode(self, x: FloatArray) -> FloatArray:
        if not x.size:
            return x.copy()
        column = self._strategy_column().reshape((-1,) + (1,) * (x.ndim - 1))
        return np.asarray(scipy.signal.fftconvolve(x, column, axes=0)[: self.num_rounds])

    def _sensitivity(self, participation: Participation) -> Sensitivity:
        schema = check(participation).as_schema()
        return sensitivities.of_coefficients(self._strategy_column(), self.num_rounds, schema)

    def _squared_rows(self, workload: Workload | FloatArray) -> FloatArray | None:
        """In O(n) memory for a Toeplitz workload, and O(n^1.5) for another with a name."""
        if not isinstance(workload, Workload):
            return None
        return _decoder_rows.of(workload).squared(self._noising_column())


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class IdentityFactorization(ToeplitzStructure):
    """C = I and B = A: the noise of different rounds is independent.

    Attributes:
      num_rounds: The number of rounds n.
    """

    mechanism = "identity"
    _described_as = "the identity"
    can_extend = True

    def strategy_bands(self) -> int:
        """Returns the number of bands of C."""
        return 1

    def strategy_coefficients(self) -> FloatArray:
        """Returns the first column of C, (n,) float64."""
        return np.asarray(np.eye(1, self.num_rounds)[0])

    def noising_coefficients(self) -> FloatArray:
        """Returns the first column of C^-1, (n,) float64."""
        return self.strategy_coefficients()

    def noise_recursion(self) -> BandedNoise:
        """Returns the recursion without memory."""
        return independent_rows(self.num_rounds)

    def _encode(self, x: FloatArray) -> FloatArray:
        return x.copy()

    def _squared_rows(self, workload: Workload | FloatArray) -> FloatArray | None:
        recursions = workload.recursions() if isinstance(workload, Workload) else None
        if recursions is None:
            return super()._squared_rows(workload)
        none = np.empty(0)
        return StateRows(recursions).squared(States(self.noising_coefficients(), none, none))


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ToeplitzFactorization(ToeplitzStructure):
    """C = T, lower-triangular Toeplitz of few or all bands, or C = T D with columns of norm one.

    Attributes:
      num_rounds: n.
      coefficients: (b,), read-only: the first column of T, b at most n; zeros follow. The first
        is not zero.
      equal_column_norms: Whether the columns of T are scaled to norm one.

    Raises:
      ValueError: If the coefficients are not as said.
    """

    mechanism = "toeplitz"
    _described_as = "the Toeplitz matrix"
    can_extend = True

    coefficients: FloatArray
    equal_column_norms: bool = dataclasses.field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        inputs.check_types(self, "equal_column_norms")
        self._set(
            coefficients=checked_coefficients(self.coefficients, self.num_rounds),
            parameters={**self.parameters, "equal_column_norms": self.equal_column_norms},
        )
        check_range(self._strategy_column(), self._noising_column())

    @property
    def num_bands(self) -> int:
        """The number of bands b."""
        return len(self.coefficients)

    def strategy_coefficients(self) -> FloatArray | None:
        """Returns the first column of C, (n,) float64; None with equal column norms."""
        return None if self.equal_column_norms else self._strategy_column()

    def noising_coefficients(self) -> FloatArray | None:
        """Returns the first column of C^-1, (n,) float64; None with equal column norms."""
        return None if self.equal_column_norms else self._noising_column()

    def _strategy_column(self) -> FloatArray:
        """The first column of T, also where C is T with its columns scaled."""
        return power_series.padded(self.coefficients, self.num_rounds)

    def _noising_column(self) -> FloatArray:
        """The first column of T^-1."""
        column = np.empty(0)
        for rounds in (*self.horizons, self.num_rounds):
            # The last bits of a longer reciprocal may be others, and rows were released with these.
            longer = power_series.reciprocal(self.coefficients[:rounds], rounds)
            column = np.concatenate([column, longer[len(column) :]])
        return column

    def strategy_bands(self) -> int:
        """Returns the number of bands of C."""
        return self.num_bands

    def strategy_matrix(self) -> FloatArray:
        """Returns C as a dense (n, n) array."""
        return super().strategy_matrix() / self._column_norms()

    def noising_matrix(self) -> FloatArray:
        """Returns C^-1 as a dense (n, n) array."""
        return super().noising_matrix() * self._column_norms()[:, np.newaxis]

    def _encode(self, x: FloatArray) -> FloatArray:
        norms = self._column_norms().reshape((-1,) + (1,) * (x.ndim - 1))
        return super()._encode(x / norms)

    def _sensitivity(self, participation: Participation) -> Sensitivity:
        if not self.equal_column_norms:
            return super()._sensitivity(participation)
        schema, norms = check(participation).as_schema(), self._column_norms()
        found = sensitivities.of_scaled_columns(self.coefficients, 1.0 / norms, schema)
        operations = self.num_rounds**2 * schema.most_in(self.num_rounds)
        if found.is_exact or operations > _LARGEST_DENSE_SENSITIVITY:
            return found
        return sensitivities.of_matrix(_dense(self._strategy_column()) / norms, schema)

    def noise_recursion(self) -> BandedNoise | WindowNoise:
        """Returns forward substitution for few bands, and the product with T^-1 for many."""
        scales = self._column_norms() if self.equal_column_norms else None
        return recursion_of(
            self.num_rounds, self.coefficients, self._noising_column, scales, self.horizons[:1]
        )

    def _squared_rows(self, workload: Workload | FloatArray) -> FloatArray | None:
        if not self.equal_column_norms:
            return super()._squared_rows(workload)
        return self._squared_rows_of_prefix_sums() if workloads.is_prefix_sum(workload) else None

    def _column_norms(self) -> FloatArray:
        if not self.equal_column_norms:
            return np.ones(self.num_rounds)
        return np.sqrt(power_series.truncated_column_norms(self.coefficients, self.num_rounds))

    def _squared_rows_of_prefix_sums(self) -> FloatArray:
        """Row i of B is row i - 1 plus column norm i times row i of T^-1: O(n) memory."""
        norms, inverse = self._column_norms(), self._noising_column()
        # All columns but the last b - 1 have the same norm, so that B is Toeplitz at first.
        alike = self.num_rounds - self.num_bands + 1
        decoder = norms[0] * np.cumsum(inverse)[:alike]
        squared = np.empty(self.num_rounds)
        squared[:alike] = np.cumsum(np.square(decoder))
        row = np.zeros(self.num_rounds)
        row[:alike] = decoder[::-1]
        for i in range(alike, self.num_rounds):
            row[: i + 1] += norms[i] * inverse[i::-1]
            squared[i] = row @ row
        return squared

    def _extended(
        self,
        num_rounds: int,
        participation: Participation,
        workload: Workload,
        parameters: dict[str, Any],
    ) -> "ToeplitzFactorization":
        if self.equal_column_norms:
            raise ExtensionError(
                f"a Toeplitz factorization with equal column norms for {self.num_rounds} rounds "
                "cannot be extended: its last columns were scaled up because they end with the "
                "last round, and would not end there."
            )
        kept = ToeplitzFactorization(
            num_rounds, self.coefficients, participation=participation, parameters=parameters
        )
        first, has_all_bands = (
            (*self.horizons, self.num_rounds)[0],
            self.num_bands == self.num_rounds,
        )
        if not (has_all_bands and _is_redrawn(self.num_bands, first)):
            return kept
        # Weights of the rounds that there were say nothing of more.
        error = parameters.get("error", "mean")
        series = _continued(
            self.coefficients,
            PatternOfRounds.of(participation, num_rounds),
            RoundError.of("max" if error == "max" else "mean", num_rounds),
            workload,
            is_optimised=parameters.get("coefficients") != "square_root",
        )
        longer = ToeplitzFactorization(
            num_rounds,
            series,
            participation=participation,
            parameters={**parameters, "num_bands": num_rounds},
        )
        return min(kept, longer, key=lambda each: each.total_error(workload, participation))

    def _for_rounds(self, num_rounds: int, parameters: dict[str, Any]) -> "ToeplitzFactorization":
        series = self.coefficients[:num_rounds]
        return ToeplitzFactorization(
            num_rounds,
            series,
            participation=self.participation,
            parameters={**parameters, "num_bands": len(series)},
        )


def identity(num_rounds: int) -> IdentityFactorization:
    """Returns the identity factorization, the noise of DP-SGD and DP-FedAvg.

    Args:
      num_rounds: The number of rounds n, at least 1.

    Returns:
      The factorization C = I.

    Raises:
      ValueError: If ``num_rounds`` is not a positive integer.

    Example:
      >>> import mf_aggregators as mfa
      >>> once = mfa.participation.SingleParticipation()
      >>> independent = mfa.factorizations.identity(64)
      >>> round(independent.rmse(mfa.workloads.prefix_sum(64), once), 3)
      5.701
    """
    return IdentityFactorization(num_rounds)


def toeplitz(
    num_rounds: Any = None,
    num_bands: int | None = None,
    participation: Participation | None = None,
    *,
    coefficients: Literal["optimised", "square_root"] = "optimised",
    error: RoundWeights = "mean",
    equal_column_norms: bool = False,
    workload: Any = None,
    max_evaluations: int = 2000,
    show_progress: bool = False,
) -> ToeplitzFactorization:
    """Computes a Toeplitz factorization of a workload, without any (n, n) matrix.

    The first ``num_bands`` coefficients of C are those of the square root of the workload,
    (1 - x)^(-1/2) for the prefix sum, or minimise the mean or the maximal squared error. The
    workload may be any that is known by its name: with learning rates that change, the search
    begins at the optimum for constant ones, and is never worse.
    Where more bands than the separation are asked for, coefficients are kept non-negative
    and, from that lag on, non-increasing: then the sensitivity is known exactly
    (``kernel.sensitivity.toeplitz_bound``).

    Args:
      num_rounds: n, for the prefix sum of n rounds; or the workload itself, as ``workload``.
      num_bands: The number of bands b, 1 (independent noise) to n. None: all n for single
        participation, else the separation.
      participation: The schema to optimise for; SingleParticipation by default.
      coefficients: ``optimised``, or ``square_root`` for the closed form, which Toeplitz workloads
        have.
      error: What to minimise: the ``mean`` squared error over rounds, its ``max``, or the sum with
        (n,) weights of the rounds, none below zero. A maximum that may be of any round is
        approached by norms, to a fraction of a percent.
      equal_column_norms: Whether to scale the columns of C to norm one afterwards: the
        last b - 1 columns, cut off by the last round, are shorter than the others.
        The coefficients are optimised for the matrix before that.
      workload: What to optimise for: the prefix sum, which is the default, or another, a
        ``workloads.Workload`` or an (n, n) array that is Toeplitz or has learning rates.
      max_evaluations: Give up after this many evaluations of the error.
      show_progress: Whether to show a progress bar on standard error.

    Returns:
      The factorization. If the optimiser stopped before its gradient vanished, the best
      coefficients found, with a NotConvergedWarning.

    Raises:
      ValueError: If an argument is out of its range, the workload is another or given twice, the
        closed form is asked for where there is none, or the schema names more participations than
        fit.

    Example:
      >>> import mf_aggregators as mfa
      >>> square_root = mfa.factorizations.toeplitz(4, coefficients="square_root")
      >>> square_root.strategy_matrix()[:, 0]
      array([1.    , 0.5   , 0.375 , 0.3125])
    """
    num_rounds, workload = given_workload(
        num_rounds, workload, "the Toeplitz matrix", described_training
    )
    participation = check_fits(
        SingleParticipation() if participation is None else participation, num_rounds
    )
    pattern = PatternOfRounds.of(participation, num_rounds)
    num_bands = check_bands(num_bands, num_rounds, min(num_rounds, pattern.separation))
    measure = RoundError.of(error, num_rounds)
    max_evaluations = numbers.positive_integer(max_evaluations, "max_evaluations")
    check_kind(coefficients)
    if equal_column_norms and num_bands * num_rounds > _LARGEST_NORMALISED:
        raise ValueError(
            f"equal_column_norms with {num_bands} bands and {num_rounds} rounds would take more "
            "than minutes: ask for fewer bands."
        )
    if coefficients == "square_root" or num_bands == 1:
        series = _square_root(workload, num_bands)
    else:
        series = _optimised_for(
            workload, measure, num_bands, pattern, max_evaluations, show_progress
        )
    return ToeplitzFactorization(
        num_rounds,
        series,
        equal_column_norms=equal_column_norms,
        participation=participation,
        parameters={
            "num_bands": num_bands,
            "coefficients": coefficients,
            "equal_column_norms": equal_column_norms,
            **stated_parameters(workload, measure),
        },
    )


def from_coefficients(c: Any) -> ToeplitzFactorization:
    """Makes a factorization of any lower-triangular Toeplitz strategy matrix.

    Args:
      c: (n,) floats, finite: the first column of C, whose first entry is not zero. Zeros at its end
        are no bands.

    Returns:
      A factorization for n rounds of a float64 copy, which states no optimality gap.

    Raises:
      ValueError: If the coefficients are not as said, or C or its inverse is too large or too small
        for floats.
    """
    column = numbers.real_array(c, "coefficients")
    if column.ndim == 1 and np.any(column):
        return ToeplitzFactorization(len(column), np.trim_zeros(column, "b"))
    return ToeplitzFactorization(max(1, column.size), column)


def _square_root(workload: Workload, num_bands: int) -> FloatArray:
    """The coefficients of the square root of a Toeplitz workload; a single one for any workload."""
    momentum, column = workload.constant_momentum(), workload.coefficients()
    if momentum is not None:
        return power_series.square_root_coefficients(num_bands, momentum)
    if num_bands == 1:
        return np.ones(1)
    if column is None or column[0] < 0.0:
        raise ValueError(
            "coefficients=square_root needs a Toeplitz workload whose first coefficient is above "
            "zero: this one has no square root that is Toeplitz; use coefficients=optimised."
        )
    return power_series.square_root(column / column[0], num_bands)


def _dense(column: FloatArray) -> FloatArray:
    return np.asarray(scipy.linalg.toeplitz(column, np.zeros_like(column)))


def recursion_of(
    num_rounds: int,
    coefficients: FloatArray,
    inverse: Callable[[], FloatArray],
    row_scales: FloatArray | None = None,
    first_horizon: tuple[int, ...] = (),
) -> BandedNoise | WindowNoise:
    """Returns forward substitution for few bands, and the product with T^-1 for many.

    Args:
      num_rounds: n.
      coefficients: (b,) the first column of T.
      inverse: Returns the (n,) first column of T^-1; called for many bands.
      row_scales: (n,) factors of the rows; None for ones.
      first_horizon: The horizon that an extended run began with, which decides: the noise of a run
        does not change its kind. Empty for a horizon that extends none.

    Returns:
      A recursion that keeps b - 1 rows of the noise, or one that draws earlier rows of Z
      again.
    """
    if not _is_redrawn(len(coefficients), *(first_horizon or (num_rounds,))):
        return toeplitz_rows(num_rounds, coefficients, row_scales)
    none = np.empty((num_rounds, 0))
    return WindowNoise(num_rounds, inverse()[np.newaxis], none, none, row_scales)


def _is_redrawn(num_bands: int, num_rounds: int) -> bool:
    """Whether the noise of a horizon draws earlier rows of Z again."""
    return min(num_bands, num_rounds) > max(1.0, _MOST_BANDS_KEPT_SHARE * num_rounds)


def checked_coefficients(coefficients: Any, num_rounds: int) -> FloatArray:
    """Returns read-only float64 coefficients of a Toeplitz matrix.

    Args:
      coefficients: (m,) with 1 <= m <= n, finite, the first not zero.
      num_rounds: n.

    Returns:
      A copy.

    Raises:
      ValueError: If they are not as said.
    """
    series = numbers.real_array(coefficients, "coefficients").copy()
    if series.ndim != 1 or not 1 <= len(series) <= num_rounds:
        raise ValueError(
            f"coefficients must be a vector of 1 to {num_rounds} entries, found an array of "
            f"shape {series.shape}."
        )
    if not np.all(np.isfinite(series)):
        raise ValueError("coefficients must be finite, found NaN or infinite entries.")
    if series[0] == 0.0:
        raise ValueError("the matrix must be non-singular, found a zero first coefficient.")
    series.flags.writeable = False
    return series


def check_range(*columns: FloatArray) -> None:
    """Raises ValueError unless all entries are finite and their squares can be summed."""
    for column in columns:
        largest = float(np.max(np.abs(column)))
        # Written so that NaN does not pass.
        if not 1e-100 < largest < 1e100:
            raise ValueError(
                "the strategy matrix or its inverse is too large or too small for float64 "
                f"arithmetic: a largest entry of {largest:.1e}."
            )


def check_rounds(num_rounds: int, what: str) -> int:
    """Returns n, or raises an error if it is below 1 or there is too little memory."""
    rounds = numbers.positive_integer(num_rounds, "num_rounds")
    memory.check_rounds(rounds, _BYTES_PER_ROUND, what)
    return rounds


def given_workload(
    num_rounds: Any,
    workload: Any,
    what: str,
    of_array: Callable[[FloatArray], _Given],
) -> tuple[int, Workload | _Given]:
    """Returns the rounds and the workload that a matrix is optimised for.

    Args:
      num_rounds: n, or the workload in its place; None where the other argument says it.
      workload: A ``workloads.Workload``, an (n, n) array or an int; None for the prefix sum of
        the rounds, or where the other argument is the workload.
      what: What is to be made, for a message about memory.
      of_array: Makes the workload of an array whose learning rates are not constant.

    Returns:
      n, and the workload.

    Raises:
      TypeError: If it is no workload.
      ValueError: If there are two workloads or none, n is not above zero, the rounds of both
        arguments differ, or ``of_array`` raises it.
      InsufficientMemoryError: If there is too little memory.
    """
    is_number = num_rounds is not None and np.ndim(num_rounds) == 0
    if isinstance(num_rounds, Workload) or not (num_rounds is None or is_number):
        if workload is not None:
            raise ValueError(
                "there are two workloads, the first argument and workload=: give one of them."
            )
        num_rounds, workload = None, num_rounds
    if workload is None:
        workload = numbers.positive_integer(num_rounds, "num_rounds")
    workload = workloads.checked(workload)
    own = workloads.rounds_of(workload)
    if not isinstance(workload, Workload):
        workload = _of_constant_rates(workload) or of_array(workload)
    rounds = check_rounds(own if num_rounds is None else num_rounds, what)
    if rounds != own:
        raise ValueError(f"the workload is for {own} rounds, and num_rounds is {rounds}.")
    return rounds, workload


def described_training(matrix: FloatArray) -> Workload:
    """Returns the workload of an array: Toeplitz, or momentum with any learning rates.

    Args:
      matrix: A, (n, n) and lower triangular.

    Raises:
      ValueError: If it is neither.
    """
    column, diagonal = matrix[:, 0], np.diagonal(matrix)
    candidates = [Workload("toeplitz", len(matrix), first_column=tuple(column))]
    with np.errstate(all="ignore"):
        momentum = 0.0 if len(matrix) == 1 else (column[1] - column[0]) / diagonal[1]
    for beta in (round(momentum, _DIGITS_OF_MOMENTUM), momentum):
        if np.all(diagonal > 0.0) and 0.0 <= beta < 1.0:
            rates = tuple(diagonal)
            candidates.append(Workload("momentum_sgd", len(matrix), float(beta), rates))
    for found in candidates:
        if np.allclose(matrix, found.matrix(), rtol=_ROUNDING_OF_WORKLOAD, atol=0.0):
            return found
    raise ValueError(
        f"the workload, an array of shape {matrix.shape}, is neither Toeplitz nor that of momentum "
        "with learning rates: give it as a workloads.Workload, or use banded or optimal."
    )


def _of_constant_rates(matrix: FloatArray) -> Workload | None:
    """The workload of constant learning rates that an array is a multiple of, if any."""
    num_rounds, rate = len(matrix), float(matrix[0, 0])
    momentum = 0.0 if num_rounds == 1 else float(matrix[1, 0]) / rate - 1.0
    for beta in (round(momentum, _DIGITS_OF_MOMENTUM), momentum):
        if not 0.0 <= beta < 1.0:
            continue
        found = Workload("momentum_sgd", num_rounds, beta) if beta else None
        found = found or Workload("prefix_sum", num_rounds)
        if np.allclose(matrix / rate, found.matrix(), rtol=_ROUNDING_OF_WORKLOAD, atol=0.0):
            return found
    return None


def stated_parameters(workload: Workload | FloatArray, error: RoundError) -> dict[str, Any]:
    """Returns the parameters of a factorization that state its error and its workload.

    Args:
      workload: What the factorization was optimised for.
      error: The error that was minimised.
    """
    stated = {"error": "mean", **error.parameters()}
    if momentum := momentum_of(workload):
        stated["momentum"] = momentum
    if not has_constant_rates(workload):
        stated["workload"] = workloads.fingerprint(workload)
    return stated


def has_constant_rates(workload: Workload | FloatArray) -> bool:
    """Returns whether a workload is known to have constant learning rates, and nothing else.

    Args:
      workload: A, known by its name or an (n, n) array.
    """
    return isinstance(workload, Workload) and workload.constant_momentum() is not None


def nearest_constant(workload: Workload | FloatArray) -> Workload:
    """Returns the workload of constant learning rates that is nearest to another.

    Args:
      workload: A, known by its name or an (n, n) array.
    """
    momentum, num_rounds = momentum_of(workload), workloads.rounds_of(workload)
    if momentum:
        return Workload("momentum_sgd", num_rounds, momentum)
    return Workload("prefix_sum", num_rounds)


def momentum_of(workload: Workload | FloatArray) -> float:
    """Returns the momentum of the workload of constant learning rates that is nearest to another.

    Args:
      workload: A, known by its name or an (n, n) array.
    """
    if isinstance(workload, Workload) and workload.name == "momentum_sgd":
        return workload.momentum
    return 0.0


@dataclasses.dataclass(frozen=True)
class PatternOfRounds:
    """The worst pattern of a schema for non-increasing coefficients: rounds 0, b, 2 b, ...

    Attributes:
      num_rounds: n.
      separation: b; n where nobody returns.
      most: The number of participations.
    """

    num_rounds: int
    separation: int
    most: int

    @classmethod
    def of(cls, participation: Participation, num_rounds: int) -> "PatternOfRounds":
        """Returns the pattern of a schema for ``num_rounds`` rounds."""
        participations.check(participation)
        most = participation.most_participations(num_rounds)
        if most == 1:
            return cls(num_rounds, num_rounds, 1)
        return cls(num_rounds, participation.separation_in(num_rounds), most)

    def squared_sensitivity(self, column: FloatArray) -> tuple[float, FloatArray]:
        """Returns the squared norm of the pattern's columns summed, and its gradient.

        Args:
          column: (n,) the first column of C.

        Returns:
          The value and an (n,) gradient by ``column``.
        """
        total = schemas.pattern_sum(column, self.separation, self.most)
        # The adjoint of summing shifted copies is summing copies shifted the other way.
        gradient = schemas.pattern_sum_adjoint(total, self.separation, self.most)
        return float(total @ total), 2.0 * gradient

    def sum_of_squared_norms(self, column: FloatArray) -> tuple[float, FloatArray]:
        """Returns the sum of the squared norms of the pattern's columns, and its gradient.

        Their squared sum is the same where the columns are orthogonal, whatever the signs.

        Args:
          column: (m,) the first column of C, m at most b.

        Returns:
          The value and an (m,) gradient.
        """
        starts = np.arange(self.most) * self.separation
        # Entry t of a column that starts at round s is there if s + t < n.
        copies = np.searchsorted(starts, self.num_rounds - np.arange(len(column)), side="left")
        weights = copies.astype(np.float64)
        return float(weights @ np.square(column)), 2.0 * weights * column


def check_kind(coefficients: Any) -> None:
    """Raises ValueError unless the kind of coefficients is ``optimised`` or ``square_root``."""
    if coefficients not in ("optimised", "square_root"):
        raise ValueError(
            "coefficients must be 'optimised' or 'square_root', found "
            f"{numbers.shown(coefficients)}."
        )


def check_bands(num_bands: int | None, num_rounds: int, default: int = 1) -> int:
    """Returns the number of bands, or raises ValueError unless it is between 1 and n."""
    if num_bands is None:
        return default
    num_bands = numbers.positive_integer(num_bands, "num_bands")
    if num_bands > num_rounds:
        raise ValueError(f"num_bands must be at most num_rounds, {num_rounds}, found {num_bands}.")
    return num_bands


def objectives_by_strategy(workload: Workload, error: RoundError) -> list[Objective]:
    """Returns the objectives of a search in turn, as functions of the coefficients of C.

    Args:
      workload: A.
      error: The error of the rows of B.

    Returns:
      Functions of (m,) first entries of C's first column, which zeros follow: the value, and its
      (m,) gradient.
    """
    objectives = _decoder_rows.objectives(_decoder_rows.of(workload), error)
    return [_by_strategy(each, workload.num_rounds) for each in objectives]


def _by_strategy(objective: Objective, num_rounds: int) -> Objective:
    """A function of the coefficients of C^-1 as one of those of C."""

    def squared_rows(coefficients: FloatArray) -> tuple[float, FloatArray]:
        inverse = power_series.reciprocal(coefficients, num_rounds)
        value, slope = objective(inverse)
        # A change of c_j changes 1 / c(x) by -x^j / c(x)^2.
        response = power_series.product(inverse, inverse, num_rounds)
        return value, -power_series.correlation(slope, response, len(coefficients))

    return squared_rows


def _optimised(
    start: FloatArray,
    pattern: PatternOfRounds,
    squared_rows: Sequence[Objective],
    max_evaluations: int,
    show_progress: bool,
) -> FloatArray:
    """Returns the coefficients of least error.

    Args:
      start: (b,) coefficients to begin with, the first above zero.
      pattern: The rounds n, and the participations of a client.
      squared_rows: What to minimise, one after another, times the squared sensitivity.
      max_evaluations: The most evaluations of each.
      show_progress: Whether to show a bar on standard error.

    Returns:
      (b,) coefficients, the first of them one; with a NotConvergedWarning if the last search
      stopped before its slope vanished.
    """
    with ProgressBar(
        desc=f"Toeplitz, {len(start)} bands", unit=" evaluations", disable=not show_progress
    ) as progress:
        for each in squared_rows:
            log_error = _log_error_of(pattern, each, len(start))
            with warnings.catch_warnings():
                if each is not squared_rows[-1]:
                    warnings.simplefilter("ignore", NotConvergedWarning)
                start = _minimised(log_error, start, pattern.separation, max_evaluations, progress)
    return start


def _optimised_for(
    workload: Workload,
    error: RoundError,
    num_bands: int,
    pattern: PatternOfRounds,
    max_evaluations: int,
    show_progress: bool,
) -> FloatArray:
    """Returns the (b,) coefficients of least error for any workload that is known by its name.

    If learning rates are not constant, the search starts at the optimum for constant ones, and is
    never worse than that.

    Args:
      workload: A.
      error: The error.
      num_bands: b.
      pattern: The rounds n, and the participations of a client.
      max_evaluations: The most evaluations of a search.
      show_progress: Whether to show a bar on standard error.
    """
    root = power_series.square_root_coefficients(num_bands, momentum_of(workload))
    limits = max_evaluations, show_progress
    if has_constant_rates(workload):
        return _optimised(root, pattern, objectives_by_strategy(workload, error), *limits)
    plain = objectives_by_strategy(nearest_constant(workload), error)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotConvergedWarning)
        starts = [_optimised(root, pattern, plain, *limits)]
    column = workload.coefficients()
    if column is not None and column[0] > 0.0 and num_bands <= pattern.separation:
        own = power_series.square_root(column, num_bands)
        starts += [own / own[0]] if np.all(np.isfinite(own)) else []

    rows = _decoder_rows.of(workload)

    def squared_error(series: FloatArray) -> float:
        with np.errstate(over="ignore", invalid="ignore"):
            squared = rows.squared(power_series.reciprocal(series, workload.num_rounds))
            value = _squared_sensitivity(series, pattern)[0]
            value *= error.of_rows(squared)
        return value if np.isfinite(value) else np.inf

    best = min(starts, key=squared_error)
    found = _optimised(best, pattern, objectives_by_strategy(workload, error), *limits)
    return min([found, best], key=squared_error)


def _continued(
    released: FloatArray,
    pattern: PatternOfRounds,
    measure: RoundError,
    workload: Workload,
    is_optimised: bool,
) -> FloatArray:
    """Returns coefficients of all rounds of a pattern that begin with those that were released.

    They go on as those of the square root do. Where no client comes twice they are optimised from
    there; otherwise they would have to stay non-increasing, and are left as they are.

    Args:
      released: The coefficients of the horizon that is extended.
      pattern: The rounds n of the whole, and the participations of a client.
      measure: Which error.
      workload: What further coefficients are optimised for.
      is_optimised: Whether those of the horizon were optimised, and further ones may be.

    Returns:
      (n,) coefficients.
    """
    num_rounds, head = pattern.num_rounds, len(released)
    root = power_series.square_root_coefficients(num_rounds, momentum_of(workload))
    series = np.concatenate([released, root[head:] * (released[-1] / root[head - 1])])
    if not is_optimised or num_rounds > pattern.separation:
        return np.asarray(series)
    squared_rows = objectives_by_strategy(workload, measure)[-1]
    log_error = _log_error_of(pattern, squared_rows, num_rounds)

    def of_tail(tail: FloatArray) -> tuple[float, FloatArray]:
        value, gradient = log_error(np.concatenate([released, tail]))
        return value, gradient[head:]

    found = minimise(
        of_tail,
        series[head:],
        max_evaluations=_EVALUATIONS_OF_EXTENSION,
        corrections=20,
        least_change=1e-13,
    )
    return np.concatenate([released, found.x])


def _log_error_of(
    pattern: PatternOfRounds, squared_rows_of: Objective, num_bands: int
) -> Objective:
    """The logarithm of the squared error of coefficients, with its slope."""

    def log_error(series: FloatArray) -> tuple[float, FloatArray]:
        squared_sensitivity, by_sensitivity = _squared_sensitivity(series, pattern)
        squared_rows, by_rows = squared_rows_of(series)
        gradient = by_sensitivity[:num_bands] / squared_sensitivity + by_rows / squared_rows
        return float(np.log(squared_sensitivity) + np.log(squared_rows)), gradient

    return log_error


def _squared_sensitivity(series: FloatArray, pattern: PatternOfRounds) -> tuple[float, FloatArray]:
    """The squared sensitivity of (b,) coefficients, and its slope by them or by more."""
    if len(series) <= pattern.separation:
        return pattern.sum_of_squared_norms(series)
    return pattern.squared_sensitivity(power_series.padded(series, pattern.num_rounds))


def _minimised(
    objective: Objective,
    start: FloatArray,
    separation: int,
    max_evaluations: int,
    progress: ProgressBar,
) -> FloatArray:
    """Minimises by L-BFGS over c_1, c_2, ... with c_0 = 1: the scale of C does not count.

    Where (b,) coefficients are more than the separation, those before it and the decrements from
    there on are kept at least zero.
    """
    start = start / start[0]
    is_free, before = len(start) <= separation, min(separation, len(start)) - 1
    bound = None if is_free else (0.0, None)

    def series(free: FloatArray) -> FloatArray:
        return np.concatenate([[1.0], free[:before], np.cumsum(free[before:][::-1])[::-1]])

    # A step too far makes errors so large that a line search would interpolate from them
    # to no step at all: it is told a value that is bad enough.
    with np.errstate(over="ignore", invalid="ignore"):
        bad = objective(start)[0] + 1.0

    def function(free: FloatArray) -> tuple[float, FloatArray]:
        progress.update()
        with np.errstate(over="ignore", invalid="ignore"):
            value, gradient = objective(series(free))
        if not (value < bad and np.all(np.isfinite(gradient))):
            return bad, np.zeros_like(free)
        return value, np.append(gradient[1 : before + 1], np.cumsum(gradient[before + 1 :]))

    tail = start[before + 1 :]
    free, evaluations = np.append(start[1 : before + 1], -np.diff(tail, append=0.0)), 0
    for _ in range(_MOST_STARTS):
        result = minimise(
            function,
            free,
            bounds=None if bound is None else [bound] * len(free),
            max_evaluations=max_evaluations - evaluations,
            corrections=20,
            least_change=1e-13,
        )
        free, evaluations = result.x, evaluations + result.nfev
        scale = np.full(len(free), np.linalg.norm(free))
        if not is_free:
            scale = np.where((free > 0.0) | (result.jac < 0.0), scale, 0.0)
        # Near bounds, steps may come to nothing before slopes do: a new start forgets them.
        if is_stationary(result, scale) or evaluations >= max_evaluations:
            break
    warn_unless_stationary(result, scale)
    return series(free)
