"""Toeplitz factorizations: square roots of workloads, with bands, optimised, or normalised.

For a Toeplitz workload A, row i of B = A C^-1 has the squared norm b_0^2 + ... + b_i^2,
where b(x) = a(x) / c(x): the running sum of the coefficients of C^-1 for the prefix sum,
and for momentum beta with constant learning rates the running sum with
1 / (1 - beta x) applied to it. So, at noise multiplier 1,

* the mean squared error is sens(C)^2 sum_t (1 - t / n) b_t^2,
* the maximal squared error, that of the last round, is sens(C)^2 sum_t b_t^2,

With non-increasing coefficients, sens(C) is the norm of the sum of the columns 0, b, 2 b, ...
(``kernel.sensitivity.toeplitz_bound``); with at most b bands, it is the norm of the vector of their
norms.

**The search.** If there are at most b coefficients, for a separation of b, the columns of one
client are orthogonal, and L-BFGS runs over all coefficients but the first. If columns overlap, the
sensitivity is known for non-negative coefficients that do not increase from lag b on (after Kalinin
and Lampert, Thm 2), so L-BFGS keeps the coefficients before lag b, and the decrements after it,
non-negative.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import ClassVar, Literal, NamedTuple, TypeAlias

import numpy as np
import scipy.linalg
import scipy.optimize
import scipy.signal

from mf_aggregators import inputs, linear_algebra, workloads
from mf_aggregators.factorizations._decoder_rows import DecoderRows
from mf_aggregators.factorizations.factorization import ExtensionError, Factorization
from mf_aggregators.factorizations.searches import (
    NotConvergedWarning,
    Objective,
    RoundError,
    RoundWeights,
    check_bands,
    minimise,
    minimise_with_restarts,
    progress_bar,
)
from mf_aggregators.kernel import numbers
from mf_aggregators.kernel import sensitivity as sensitivities
from mf_aggregators.kernel.numbers import FloatArray
from mf_aggregators.kernel.rows import (
    BandedNoise,
    NoiseRecursion,
    ScaledNoise,
    Strategy,
    WindowNoise,
)
from mf_aggregators.kernel.sensitivity import Sensitivity, pattern_sum
from mf_aggregators.participation import Participation, SingleParticipation, check
from mf_aggregators.progress_bars import ProgressBar
from mf_aggregators.workloads import AnyWorkload, Workload

# The (b,) coefficients with the least error, and the result of the search.
_Optimum: TypeAlias = tuple[FloatArray, scipy.optimize.OptimizeResult]
# A lower estimate of the memory for the search, errors and sensitivity.
_BYTES_PER_ROUND = 48
# The tolerance for entries of an array that is recognised as a named workload.
_ROUNDING_OF_WORKLOAD = 1e-9
_DIGITS_OF_MOMENTUM = 12
_ROUNDING_OF_SEARCH = 1e-9
# The most evaluations of the search for the coefficients that an extension adds.
_EVALUATIONS_OF_EXTENSION = 500
# If there are more bands than this share of the rounds, the noise draws earlier rows of Z again, as
# for a dense matrix, instead of keeping rows of noise.
_MOST_BANDS_KEPT_SHARE = 0.5
# The largest bands times rounds of a column-normalised matrix: its error takes as many operations.
_LARGEST_NORMALISED = 10**10


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ToeplitzStructure(Factorization):
    """A factorization with Toeplitz C, which takes O(n) memory (without dense matrices)."""

    # The name of the matrix in messages about memory.
    _described_as: ClassVar[str]

    num_rounds: int

    def __post_init__(self) -> None:
        super().__post_init__()
        rounds = numbers.positive_integer(self.num_rounds, "num_rounds")
        inputs.check_rounds(rounds, _BYTES_PER_ROUND, self._described_as)
        self._set(num_rounds=rounds)

    @abc.abstractmethod
    def strategy_coefficients(self) -> FloatArray:
        """Returns the first column of C, (n,) float64."""

    @abc.abstractmethod
    def noising_coefficients(self) -> FloatArray:
        """Returns the first column of C^-1, (n,) float64."""

    def strategy_matrix(self) -> FloatArray:
        """Returns C as a dense (n, n) array."""
        return _dense(self.strategy_coefficients())

    def noising_matrix(self) -> FloatArray:
        """Returns C^-1 as a dense (n, n) array."""
        return _dense(self.noising_coefficients())

    def _encode(self, x: FloatArray) -> FloatArray:
        if not x.size:
            return x.copy()
        column = self.strategy_coefficients().reshape((-1,) + (1,) * (x.ndim - 1))
        return np.asarray(scipy.signal.fftconvolve(x, column, axes=0)[: self.num_rounds])

    def _sensitivity(self, participation: Participation) -> Sensitivity:
        schema = check(participation).as_schema()
        strategy = Strategy(self.strategy_coefficients()[np.newaxis], self.num_rounds)
        return sensitivities.of_strategy(strategy, schema)

    def _squared_rows(self, workload: AnyWorkload) -> FloatArray | None:
        """Takes O(n) memory for a Toeplitz workload, and O(n^1.5) for other named workloads."""
        if not isinstance(workload, Workload):
            return None
        return DecoderRows.of(workload).squared(self.noising_coefficients())


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ToeplitzOfCoefficients(ToeplitzStructure):
    """A Toeplitz factorization with the first coefficients of C, or of C^-1, as its field.

    Attributes:
      num_rounds: n.
      coefficients: (b,), read-only, b at most n; further ones are zero. The first is not zero.

    Raises:
      ValueError: If the coefficients are not as said.
    """

    coefficients: FloatArray

    def __post_init__(self) -> None:
        super().__post_init__()
        series = numbers.real_array(self.coefficients, "coefficients").copy()
        if series.ndim != 1 or not 1 <= len(series) <= self.num_rounds:
            raise ValueError(
                f"coefficients must be a vector of 1 to {self.num_rounds} entries, found an array "
                f"of shape {series.shape}."
            )
        if not np.all(np.isfinite(series)):
            raise ValueError("coefficients must be finite, found NaN or infinite entries.")
        if series[0] == 0.0:
            raise ValueError("the matrix must be non-singular, found a zero first coefficient.")
        self._set(coefficients=series)
        for column in (self.strategy_coefficients(), self.noising_coefficients()):
            largest = float(np.max(np.abs(column)))
            # The comparison is negated so that NaN is refused, too.
            if not 1e-100 < largest < 1e100:
                raise ValueError(
                    "the strategy matrix or its inverse is too large or too small for float64 "
                    f"arithmetic: a largest entry of {largest:.1e}."
                )

    @property
    def num_bands(self) -> int:
        """The number of bands b."""
        return len(self.coefficients)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class IdentityFactorization(ToeplitzStructure):
    """The factorization C = I, B = A, with independent noise in each round.

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
        """Returns the recursion for independent rows."""
        return BandedNoise(self.num_rounds)

    def _encode(self, x: FloatArray) -> FloatArray:
        return x.copy()


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ToeplitzFactorization(ToeplitzOfCoefficients):
    """A lower-triangular Toeplitz C = T, or C = T D with columns scaled to norm one.

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

    equal_column_norms: bool = dataclasses.field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        inputs.check_types(self, "equal_column_norms")
        stated = {**self.parameters, "equal_column_norms": self.equal_column_norms}
        self._set(parameters=stated)

    def strategy_coefficients(self) -> FloatArray:
        """Returns the first column of T, (n,) float64."""
        return linear_algebra.padded(self.coefficients, self.num_rounds)

    def noising_coefficients(self) -> FloatArray:
        """Returns the first column of T^-1, (n,) float64."""
        column = np.empty(0)
        for rounds in (*self.horizons, self.num_rounds):
            # The last bits of a longer reciprocal may be others, and rows were released with these.
            longer = linear_algebra.reciprocal_series(self.coefficients[:rounds], rounds)
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
        scales = np.ones(self.num_rounds), 1.0 / norms
        strategy = Strategy(self.coefficients[np.newaxis], self.num_rounds, scales=scales)
        return sensitivities.of_strategy(strategy, schema)

    def noise_recursion(self) -> NoiseRecursion:
        """Returns forward substitution for few bands, and the product with T^-1 for many."""
        rows = _recursion_of(
            self.num_rounds, self.coefficients, self.noising_coefficients, self.horizons[:1]
        )
        if not self.equal_column_norms:
            return rows
        return ScaledNoise(rows, np.ones(self.num_rounds), self._column_norms())

    def _squared_rows(self, workload: AnyWorkload) -> FloatArray | None:
        if not self.equal_column_norms:
            return super()._squared_rows(workload)
        return self._squared_rows_of_prefix_sums() if workload.is_prefix_sum else None

    def _column_norms(self) -> FloatArray:
        if not self.equal_column_norms:
            return np.ones(self.num_rounds)
        # Column j ends at row n - 1.
        return np.asarray(np.sqrt(np.cumsum(np.square(self.strategy_coefficients()))[::-1]))

    def _squared_rows_of_prefix_sums(self) -> FloatArray:
        """Row i of B is row i - 1 plus column norm i times row i of T^-1: O(n) memory."""
        norms, inverse = self._column_norms(), self.noising_coefficients()
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
        workload: AnyWorkload,
        parameters: dict[str, object],
    ) -> "ToeplitzFactorization":
        if self.equal_column_norms:
            raise ExtensionError(
                f"a Toeplitz factorization with equal column norms for {self.num_rounds} rounds "
                "cannot be extended: its last columns are scaled up because they end with the last "
                "round."
            )
        made = functools.partial(ToeplitzFactorization, num_rounds, participation=participation)
        kept = made(self.coefficients, parameters=parameters)
        first = (*self.horizons, self.num_rounds)[0]
        if self.num_bands < self.num_rounds or not _is_redrawn(self.num_bands, first):
            return kept
        # Weights of the rounds that there were say nothing of more.
        error: RoundWeights = "max" if parameters.get("error") == "max" else "mean"
        problem = Problem.of(workload, participation, error, _EVALUATIONS_OF_EXTENSION)
        is_optimised = parameters.get("coefficients") != "square_root"
        series = _continued(self.coefficients, problem, is_optimised)
        longer = made(series, parameters={**parameters, "num_bands": num_rounds})
        return min(kept, longer, key=lambda each: each.total_error(workload, participation))

    def _for_rounds(
        self, num_rounds: int, parameters: dict[str, object]
    ) -> "ToeplitzFactorization":
        series = self.coefficients[:num_rounds]
        parameters = {**parameters, "num_bands": len(series)}
        return ToeplitzFactorization(
            num_rounds, series, participation=self.participation, parameters=parameters
        )


def identity(num_rounds: int) -> IdentityFactorization:
    """Returns the identity factorization, the noise of DP-SGD and DP-FedAvg.

    Use it when noise is to be independent, as in DP-SGD: the baseline of comparisons.

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
    workload: object,
    num_bands: int | None = None,
    participation: Participation | None = None,
    *,
    coefficients: Literal["optimised", "square_root"] = "optimised",
    error: RoundWeights = "mean",
    equal_column_norms: bool = False,
    max_evaluations: int = 2000,
    show_progress: bool = False,
) -> ToeplitzFactorization:
    """Computes a Toeplitz factorization of a workload, without any (n, n) matrix.

    Use it when there are too many rounds to optimise each row.

    The first ``num_bands`` coefficients of C are those of the square root of the workload,
    (1 - x)^(-1/2) for the prefix sum, or minimise the mean or the maximal squared error. The
    workload may be any that is known by its name: with learning rates that change, the search
    begins at the optimum for constant ones, and is never worse.
    Where more bands than the separation are asked for, coefficients are kept non-negative
    and, from that lag on, non-increasing: then the sensitivity is known exactly
    (``kernel.sensitivity.toeplitz_bound``).

    Args:
      workload: What to optimise for: an int n for the prefix sum of n rounds, a
        ``workloads.Workload``, or the (n, n) array of one.
      num_bands: The number of bands b, 1 (independent noise) to n. None: all n for single
        participation, else the separation.
      participation: The schema to optimise for; SingleParticipation by default.
      coefficients: ``optimised``, or ``square_root`` for the closed form, which workloads of
        constant learning rates have.
      error: What to minimise: the ``mean`` squared error over rounds, its ``max``, or the sum with
        (n,) weights of the rounds, none below zero. A maximum that may be of any round is
        approached by norms, to a fraction of a percent.
      equal_column_norms: Whether to scale the columns of C to norm one afterwards: the
        last b - 1 columns, cut off by the last round, are shorter than the others.
        The coefficients are optimised for the matrix before that.
      max_evaluations: Give up after this many evaluations of the error.
      show_progress: Whether to show a progress bar on standard error.

    Returns:
      The factorization. If the optimiser stopped before its gradient vanished, the best
      coefficients found, with a NotConvergedWarning.

    Raises:
      ValueError: If an argument is out of its range, the workload is another, the closed form is
        asked for where there is none, or the schema names more participations than fit.

    Example:
      >>> import mf_aggregators as mfa
      >>> square_root = mfa.factorizations.toeplitz(4, coefficients="square_root")
      >>> square_root.strategy_matrix()[:, 0]
      array([1.    , 0.5   , 0.375 , 0.3125])
    """
    problem = Problem.of(
        workload, participation, error, max_evaluations, "the Toeplitz matrix", coefficients
    )
    num_rounds = problem.pattern.num_rounds
    num_bands = check_bands(num_bands, num_rounds, min(num_rounds, problem.pattern.separation))
    if equal_column_norms and num_bands * num_rounds > _LARGEST_NORMALISED:
        raise ValueError(
            f"equal_column_norms with {num_bands} bands and {num_rounds} rounds would take more "
            "than a few minutes: use fewer bands."
        )
    if coefficients == "square_root" or num_bands == 1:
        series = _square_root(problem.named, num_bands)
    else:
        with progress_bar(f"Toeplitz, {num_bands} bands", show=show_progress) as progress:
            series, end = _optimised(problem, num_bands, progress)
        # Below zero, entries of the size of the search's rounding would make sensitivities bounds.
        series[np.abs(series) < _ROUNDING_OF_SEARCH] = 0.0
        NotConvergedWarning.unless_stationary(end)
    return ToeplitzFactorization(
        num_rounds,
        series,
        equal_column_norms=equal_column_norms,
        participation=problem.participation,
        parameters={
            "num_bands": num_bands,
            "coefficients": coefficients,
            "equal_column_norms": equal_column_norms,
            **problem.parameters(),
        },
    )


def from_coefficients(c: object) -> ToeplitzFactorization:
    """Makes a factorization of a given lower-triangular Toeplitz strategy matrix.

    Use it when the first column of C is known, from a paper or another program.

    Args:
      c: (n,) floats, finite: the first column of C, whose first entry is not zero. Zeros at its end
        do not count as bands.

    Returns:
      A factorization for n rounds, of a float64 copy, without an optimality gap.

    Raises:
      ValueError: If the coefficients do not have this form, or C or its inverse is too large or too
        small for floats.

    Example:
      >>> import mf_aggregators as mfa
      >>> matrix = mfa.factorizations.from_coefficients([1.0, 0.5, 0.375, 0.3125])
      >>> round(matrix.rmse(4, mfa.participation.SingleParticipation()), 4)
      1.3814
    """
    column = numbers.real_array(c, "coefficients")
    if column.ndim == 1 and np.any(column):
        return ToeplitzFactorization(len(column), np.trim_zeros(column, "b"))
    return ToeplitzFactorization(max(1, column.size), column)


def _square_root(workload: Workload, num_bands: int) -> FloatArray:
    """The coefficients of a Toeplitz workload's square root; one band is 1 for any workload."""
    momentum = workload.constant_momentum()
    if momentum is not None:
        return linear_algebra.square_root_coefficients(num_bands, momentum)
    if num_bands == 1:
        return np.ones(1)
    raise ValueError(
        "coefficients=square_root needs constant learning rates, because the square root of this "
        "workload is not Toeplitz: use coefficients=optimised."
    )


def _dense(column: FloatArray) -> FloatArray:
    return np.asarray(scipy.linalg.toeplitz(column, np.zeros_like(column)))


def _recursion_of(
    num_rounds: int,
    coefficients: FloatArray,
    inverse: Callable[[], FloatArray],
    first_horizon: tuple[int, ...] = (),
) -> BandedNoise | WindowNoise:
    """Returns forward substitution for few bands, and the product with T^-1 for many.

    Args:
      num_rounds: n.
      coefficients: (b,) the first column of T.
      inverse: Returns the (n,) first column of T^-1; called for many bands.
      first_horizon: The number of rounds before the first extension, which decides the kind of
        recursion, because a run does not change it. Empty without an extension.

    Returns:
      For few bands, forward substitution, which keeps b - 1 rows of noise; for many bands, the
      product with T^-1, which draws earlier rows of Z again.
    """
    if not _is_redrawn(len(coefficients), *(first_horizon or (num_rounds,))):
        return BandedNoise(num_rounds, coefficients[np.newaxis])
    none = np.empty((num_rounds, 0))
    return WindowNoise(num_rounds, inverse()[np.newaxis], none, none)


def _is_redrawn(num_bands: int, num_rounds: int) -> bool:
    """Whether noise for a number of bands and rounds draws earlier rows of Z again."""
    return min(num_bands, num_rounds) > max(1.0, _MOST_BANDS_KEPT_SHARE * num_rounds)


@dataclasses.dataclass(frozen=True)
class PatternOfRounds:
    """The worst pattern of a schema for non-increasing coefficients: rounds 0, b, 2 b, ...

    Attributes:
      num_rounds: n.
      separation: b; n if no client returns.
      most: The number of participations.
    """

    num_rounds: int
    separation: int
    most: int

    @classmethod
    def of(cls, participation: Participation, num_rounds: int) -> "PatternOfRounds":
        """Returns the pattern of a schema for ``num_rounds`` rounds."""
        most = check(participation).most_participations(num_rounds)
        separation = num_rounds if most == 1 else participation.separation_in(num_rounds)
        return cls(num_rounds, separation, most)

    def squared_sensitivity(self, column: FloatArray) -> tuple[float, FloatArray]:
        """Returns the squared norm of the pattern's columns summed, and its gradient.

        Args:
          column: (m,) the first column of C; zeros follow. If m is at most b, columns are
            orthogonal, and signs do not matter.

        Returns:
          The value and an (m,) gradient by ``column``.
        """
        if len(column) <= self.separation:
            starts = np.arange(self.most) * self.separation
            # Entry t of the column of round s exists if s + t < n.
            copies = np.searchsorted(starts, self.num_rounds - np.arange(len(column)), side="left")
            return float(copies @ np.square(column)), 2.0 * copies * column
        longer = linear_algebra.padded(column, self.num_rounds)
        total = pattern_sum(longer, self.separation, self.most)
        # The transpose of summing shifted copies is summing copies that are shifted the other way.
        gradient = pattern_sum(total[::-1], self.separation, self.most)[::-1]
        return float(total @ total), 2.0 * gradient[: len(column)]


class Problem(NamedTuple):
    """The workload, participation and error for which a Toeplitz C or C^-1 is optimised.

    Attributes:
      workload: A: a named workload, or an (n, n) array that is not recognised as one.
      participation: The schema.
      pattern: The worst pattern of the schema.
      error: The error over rounds.
      max_evaluations: The most evaluations of a search.
    """

    workload: AnyWorkload
    participation: Participation
    pattern: PatternOfRounds
    error: RoundError
    max_evaluations: int

    @classmethod
    def of(
        cls,
        workload: object,
        participation: Participation | None,
        error: RoundWeights,
        max_evaluations: int,
        what: str = "the matrix",
        coefficients: object = "optimised",
    ) -> "Problem":
        """Checks the arguments of a function that makes a matrix.

        Args:
          workload: A ``workloads.Workload``, an (n, n) array, or n for the prefix sum.
          participation: The schema; None for single participation.
          error: ``mean``, ``max`` or weights.
          max_evaluations: At least 1.
          what: The name of the matrix, for a message about memory.
          coefficients: ``optimised`` or ``square_root``.

        Raises:
          TypeError: If the workload is not valid.
          ValueError: If an argument is out of its range.
          MemoryError: If there is too little memory.
        """
        if coefficients not in ("optimised", "square_root"):
            raise ValueError(
                "coefficients must be 'optimised' or 'square_root', found "
                f"{numbers.shown(coefficients)}."
            )
        found = workloads.checked(workload)
        rounds = found.num_rounds
        inputs.check_rounds(rounds, _BYTES_PER_ROUND, what)
        if not isinstance(found, Workload):
            found = _described(found.matrix()) or found
        schema = check(participation or SingleParticipation(), rounds)
        return cls(
            found,
            schema,
            PatternOfRounds.of(schema, rounds),
            RoundError.of(error, rounds),
            numbers.positive_integer(max_evaluations, "max_evaluations"),
        )

    @property
    def named(self) -> Workload:
        """The named workload; raises ValueError if it is an array that is not recognised."""
        if not isinstance(self.workload, Workload):
            shape = self.workload.matrix().shape
            raise ValueError(
                f"the workload, an array of shape {shape}, is not one of momentum and learning "
                "rates: use banded or optimal."
            )
        return self.workload

    @property
    def has_constant_rates(self) -> bool:
        """Whether the workload is a named one with constant learning rates."""
        workload = self.workload
        return isinstance(workload, Workload) and workload.constant_momentum() is not None

    @property
    def momentum(self) -> float:
        """The momentum of the workload; 0 without momentum."""
        workload = self.workload
        if isinstance(workload, Workload) and workload.name == "momentum_sgd":
            return workload.momentum
        return 0.0

    @property
    def nearest_constant(self) -> Workload:
        """The workload with the same momentum and constant learning rates."""
        rounds, momentum = self.pattern.num_rounds, self.momentum
        if momentum:
            return Workload("momentum_sgd", rounds, momentum)
        return Workload("prefix_sum", rounds)

    def parameters(self) -> dict[str, object]:
        """Returns the parameters of a factorization that state its error and its workload."""
        stated = {"error": "mean", **self.error.parameters()}
        if self.momentum:
            stated["momentum"] = self.momentum
        if not self.has_constant_rates:
            stated["workload"] = self.workload.fingerprint()
        return stated


def _described(matrix: FloatArray) -> Workload | None:
    """The named workload that an array equals (momentum with some learning rates), or None.

    The scale of constant learning rates is ignored.
    """
    column, rates, num_rounds = matrix[:, 0], np.diagonal(matrix), len(matrix)
    with np.errstate(all="ignore"):
        momentum = 0.0 if num_rounds == 1 else float((column[1] - column[0]) / rates[1])
        is_constant = np.allclose(rates, rates[0], rtol=_ROUNDING_OF_WORKLOAD, atol=0.0)
        scaled = matrix / rates[0] if is_constant else matrix
    for beta in (round(momentum, _DIGITS_OF_MOMENTUM), momentum) if np.isfinite(momentum) else ():
        if not (0.0 <= beta < 1.0 and (is_constant or np.all(rates > 0.0))):
            continue
        if is_constant and not beta:
            found = Workload("prefix_sum", num_rounds)
        else:
            each = None if is_constant else tuple(rates)
            found = Workload("momentum_sgd", num_rounds, beta, each)
        if np.allclose(scaled, found.matrix(), rtol=_ROUNDING_OF_WORKLOAD, atol=0.0):
            return found
    return None


def _optimised(problem: Problem, num_bands: int, progress: ProgressBar) -> _Optimum:
    """Returns the (b,) coefficients with the least error, and the search's result.

    If learning rates are not constant, the search starts at the optimum for constant ones, and its
    result is never worse.
    """
    workload, pattern = problem.named, problem.pattern

    def searched(series: FloatArray, workload: Workload) -> _Optimum:
        for log_error in _log_errors(workload, problem):
            series, end = _minimised(
                log_error, series, pattern.separation, problem.max_evaluations, progress
            )
        return series, end

    root = linear_algebra.square_root_coefficients(num_bands, problem.momentum)
    if problem.has_constant_rates:
        return searched(root, workload)
    best = searched(root, problem.nearest_constant)[0]
    rows = DecoderRows.of(workload)

    def squared_error(series: FloatArray) -> float:
        with np.errstate(over="ignore", invalid="ignore"):
            squared = rows.squared(linear_algebra.reciprocal_series(series, pattern.num_rounds))
            value = pattern.squared_sensitivity(series)[0] * problem.error.of_rows(squared)
        return value if np.isfinite(value) else np.inf

    found, end = searched(best, workload)
    return min([found, best], key=squared_error), end


def _log_errors(workload: Workload, problem: Problem) -> list[Objective]:
    """The objectives that a search minimises one after another: logarithms of squared errors."""
    pattern = problem.pattern

    def log_error(series: FloatArray, squared_rows_of: Objective) -> tuple[float, FloatArray]:
        inverse = linear_algebra.reciprocal_series(series, pattern.num_rounds)
        squared_rows, slope = squared_rows_of(inverse)
        # A change of c_j changes 1 / c(x) by -x^j / c(x)^2.
        response = linear_algebra.product_of_series(inverse, inverse, pattern.num_rounds)
        by_rows = linear_algebra.correlation(slope, response, len(series))
        squared_sensitivity, by_sensitivity = pattern.squared_sensitivity(series)
        gradient = by_sensitivity / squared_sensitivity - by_rows / squared_rows
        return float(np.log(squared_sensitivity) + np.log(squared_rows)), gradient

    objectives = DecoderRows.of(workload).objectives(problem.error)
    return [functools.partial(log_error, squared_rows_of=each) for each in objectives]


def _continued(released: FloatArray, problem: Problem, is_optimised: bool) -> FloatArray:
    """Returns coefficients for more rounds, which begin with the released ones.

    The new coefficients continue like those of the square root. If no client takes part twice, they
    are then optimised. Otherwise they are not, because they would have to stay non-increasing.

    Args:
      released: The coefficients for the first rounds.
      problem: The problem for which further coefficients are optimised.
      is_optimised: Whether the first coefficients were optimised, so that further ones may be.

    Returns:
      (n,) coefficients.
    """
    num_rounds, head = problem.pattern.num_rounds, len(released)
    root = linear_algebra.square_root_coefficients(num_rounds, problem.momentum)
    series = np.concatenate([released, root[head:] * (released[-1] / root[head - 1])])
    if not is_optimised or num_rounds > problem.pattern.separation:
        return np.asarray(series)
    log_error = _log_errors(problem.named, problem)[-1]

    def of_tail(tail: FloatArray) -> tuple[float, FloatArray]:
        value, gradient = log_error(np.concatenate([released, tail]))
        return value, gradient[head:]

    found = minimise(
        of_tail,
        series[head:],
        max_evaluations=problem.max_evaluations,
        corrections=20,
        least_change=1e-13,
    )
    return np.concatenate([released, found.x])


def _minimised(
    objective: Objective,
    start: FloatArray,
    separation: int,
    max_evaluations: int,
    progress: ProgressBar,
) -> _Optimum:
    """Minimises by L-BFGS over c_1, c_2, ... with c_0 = 1, because the scale of C is arbitrary.

    If there are more coefficients than the separation, those before the separation, and the
    decrements from there on, are kept non-negative.
    """
    start = start / start[0]
    before = min(separation, len(start)) - 1

    def series(free: FloatArray) -> FloatArray:
        return np.concatenate([[1.0], free[:before], np.cumsum(free[before:][::-1])[::-1]])

    def function(free: FloatArray) -> tuple[float, FloatArray]:
        value, gradient = objective(series(free))
        return value, np.append(gradient[1 : before + 1], np.cumsum(gradient[before + 1 :]))

    free = np.append(start[1 : before + 1], -np.diff(start[before + 1 :], append=0.0))
    is_free = len(start) <= separation
    result = minimise_with_restarts(
        function,
        free,
        max_evaluations=max_evaluations,
        least_change=1e-13,
        progress=progress,
        is_free=is_free,
    )
    return series(result.x), result
