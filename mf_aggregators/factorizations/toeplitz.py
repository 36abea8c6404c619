"""Toeplitz factorizations: the square root of the prefix sum, banded, optimised, normalised."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import numpy as np
import scipy.linalg
import scipy.signal

from mf_aggregators import inputs, workloads
from mf_aggregators.factorizations import _decoder_rows, _toeplitz_search
from mf_aggregators.factorizations._round_errors import RoundError, RoundWeights
from mf_aggregators.factorizations._toeplitz_search import (
    PatternOfRounds,
    check_bands,
    check_rounds,
    check_training,
    is_plain,
    measure_of,
    parameters_for,
    plain_squared_rows,
)
from mf_aggregators.factorizations.factorization import ExtensionError, Factorization
from mf_aggregators.kernel import numbers
from mf_aggregators.kernel import sensitivity as sensitivities
from mf_aggregators.kernel.numbers import FloatArray
from mf_aggregators.kernel.rows import BandedNoise, WindowNoise, toeplitz_rows
from mf_aggregators.kernel.sensitivity import Sensitivity
from mf_aggregators.linear_algebra import power_series
from mf_aggregators.participation import (
    Participation,
    SingleParticipation,
    check,
    check_fits,
)
from mf_aggregators.workloads import Workload

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

    def squared_decoder_rows(self, workload: Any) -> FloatArray:
        """Returns the squared row norms of B; without any (n, n) matrix for a ``Workload``.

        Args:
          workload: A, as ``Factorization.errors`` takes it.

        Returns:
          (n,) float64, in O(n) memory for a Toeplitz workload, and O(n^1.5) for another.

        Raises:
          ValueError: As ``Factorization.decoder_matrix`` does, or if it would take very long.
        """
        workload = workloads.resolve(workload)
        if isinstance(workload, Workload):
            self._check_rounds(workload.num_rounds)
            return self._squared_rows(workload)
        return super().squared_decoder_rows(workload)

    def _squared_rows(self, workload: Workload) -> FloatArray:
        return _decoder_rows.of(workload).squared(self._noising_column())


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
    goes_on = (
        "with the same bands; where C has all n, further ones by the optimiser, or by the closed "
        "form of the square root"
    )

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
        for rounds in (*self.plans, self.num_rounds):
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
        schema, rounds = check(participation).as_schema(), self.num_rounds
        most, separation = schema.most_in(rounds), schema.separation_in(rounds)
        norms = self._column_norms()
        first = power_series.padded(self.coefficients, rounds)
        if self.num_bands <= separation:
            squared = power_series.truncated_column_norms(first, rounds) / np.square(norms)
            return Sensitivity(
                float(np.sqrt(schema.largest_sum(squared))),
                is_exact=True,
                theorem="column norms, orthogonal in every pattern (BandMF Thm 2)",
            )
        if rounds**2 * most <= _LARGEST_DENSE_SENSITIVITY:
            dense = scipy.linalg.toeplitz(first, np.zeros(rounds)) / norms
            return sensitivities.of_matrix(dense, schema)
        # No column is divided by less than |c_0|, and by none more than norm one remains.
        plain = sensitivities.toeplitz_bound(np.abs(first[: self.num_bands]), rounds, schema)
        by_norms = float(most)
        return Sensitivity(
            min(by_norms, plain.value / abs(float(first[0]))),
            is_exact=False,
            theorem="upper bound: column norms, or coefficients divided by the shortest column",
        )

    def noise_recursion(self) -> BandedNoise | WindowNoise:
        """Returns forward substitution for few bands, and the product with T^-1 for many."""
        scales = self._column_norms() if self.equal_column_norms else None
        return recursion_of(
            self.num_rounds, self.coefficients, self._noising_column, scales, self.plans[:1]
        )

    def squared_decoder_rows(self, workload: Any) -> FloatArray:
        """Returns the squared row norms of B: see the base class."""
        if not self.equal_column_norms:
            return super().squared_decoder_rows(workload)
        workload = workloads.resolve(workload)
        if isinstance(workload, Workload) and workload.name == "prefix_sum":
            self._check_rounds(workload.num_rounds)
            return self._squared_rows_of_prefix_sums()
        decoder = self.decoder_matrix(workload)
        return np.asarray(np.einsum("ij,ij->i", decoder, decoder))

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
        has_all_bands = self.num_bands == self.num_rounds
        if not (has_all_bands and _is_redrawn(self.num_bands, (*self.plans, self.num_rounds)[0])):
            return kept
        # Weights of the rounds that there were say nothing of more.
        error = parameters.get("error", "mean")
        series = _toeplitz_search.continued(
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

    def _of_first_rounds(
        self, num_rounds: int, parameters: dict[str, Any]
    ) -> "ToeplitzFactorization":
        series = self.coefficients[:num_rounds]
        return ToeplitzFactorization(
            num_rounds,
            series,
            participation=self.participation,
            parameters={**parameters, "num_bands": len(series)},
        )


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
    num_rounds, workload = check_training(num_rounds, workload, "the Toeplitz matrix")
    participation = check_fits(
        SingleParticipation() if participation is None else participation, num_rounds
    )
    pattern = PatternOfRounds.of(participation, num_rounds)
    num_bands = check_bands(num_bands, num_rounds, min(num_rounds, pattern.separation))
    measure = RoundError.of(error, num_rounds)
    max_evaluations = numbers.positive_integer(max_evaluations, "max_evaluations")
    if coefficients not in ("optimised", "square_root"):
        raise ValueError(
            "coefficients must be 'optimised' or 'square_root', found "
            f"{numbers.shown(coefficients)}."
        )
    if equal_column_norms and num_bands * num_rounds > _LARGEST_NORMALISED:
        raise ValueError(
            f"equal_column_norms with {num_bands} bands and {num_rounds} rounds would take more "
            "than minutes: ask for fewer bands."
        )
    momentum = workload.constant_momentum()
    if coefficients == "square_root" or num_bands == 1:
        series = _square_root(workload, num_bands)
    elif is_plain(workload, measure):
        assert momentum is not None
        series = _toeplitz_search.optimised(
            power_series.square_root_coefficients(num_bands, momentum),
            pattern,
            [plain_squared_rows(num_rounds, measure_of(measure), momentum)],
            max_evaluations,
            show_progress,
        )
    else:
        series = _toeplitz_search.optimised_for(
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
            "error": measure.parameters().get("error", "mean"),
            "equal_column_norms": equal_column_norms,
            **parameters_for(workload, measure),
        },
    )


def _square_root(workload: Workload, num_bands: int) -> FloatArray:
    """The coefficients of the square root of a Toeplitz workload; one, whatever it is."""
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
    first_plan: tuple[int, ...] = (),
) -> BandedNoise | WindowNoise:
    """Returns forward substitution for few bands, and the product with T^-1 for many.

    Args:
      num_rounds: n.
      coefficients: (b,) the first column of T.
      inverse: Returns the (n,) first column of T^-1; called for many bands.
      row_scales: (n,) factors of the rows; None for ones.
      first_plan: The rounds of the plan that an extended run began with, which decides: the noise
        of a run does not change its kind. Empty for a plan that extends none.

    Returns:
      A recursion that keeps b - 1 rows of the noise, or one that draws earlier rows of Z
      again.
    """
    if not _is_redrawn(len(coefficients), *(first_plan or (num_rounds,))):
        return toeplitz_rows(num_rounds, coefficients, row_scales)
    none = np.empty((num_rounds, 0))
    return WindowNoise(num_rounds, inverse()[np.newaxis], none, none, row_scales)


def _is_redrawn(num_bands: int, num_rounds: int) -> bool:
    """Whether the noise of a plan draws earlier rows of Z again."""
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
