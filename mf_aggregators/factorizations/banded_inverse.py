"""Factorizations with a banded noising matrix: noise from the last rows of Z alone.

C^-1 is Toeplitz with ``num_bands`` coefficients, those of (1 - x)^(1/2) cut off or better
ones, so that a row of the noise combines the last ``num_bands`` rows of Z, which are
drawn again from their seeds: no state (Kalinin, McKenna, Upadhyay and Lampert, "Back to
square roots").
"""

import dataclasses
from typing import Any, Literal

import numpy as np
import scipy.optimize
import scipy.special

from mf_aggregators import sensitivity as sensitivities
from mf_aggregators import validation
from mf_aggregators.arrays import FloatArray
from mf_aggregators.factorizations._toeplitz_search import (
    ErrorMeasure,
    PatternOfRounds,
    check_bands,
    check_measure,
    check_workload,
    error_weights,
    parameters_of,
    with_momentum,
    with_momentum_adjoint,
)
from mf_aggregators.factorizations.convergence import minimise, warn_unless_stationary
from mf_aggregators.factorizations.toeplitz import (
    ToeplitzStructure,
    check_range,
    checked_coefficients,
)
from mf_aggregators.linear_algebra import power_series
from mf_aggregators.noise.recursions import WindowNoise
from mf_aggregators.participation import Participation, SingleParticipation, check_fits
from mf_aggregators.progress_bars import ProgressBar

# Bounds of the search's variables: logarithms of steps, or of odds.
_LARGEST_LOG = 40.0


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class BandedInverseFactorization(ToeplitzStructure):
    """C^-1 is lower-triangular Toeplitz with ``num_bands`` coefficients.

    Attributes:
      num_rounds: n.
      coefficients: (p,), read-only: the first column of C^-1, p at most n; zeros follow. The
        first is not zero.

    Raises:
      ValueError: If the coefficients are not as said.
    """

    mechanism = "banded_inverse"
    _described_as = "the banded inverse"
    ends_because = "the bands of C^-1 are optimised together for all rounds"

    coefficients: FloatArray

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set(coefficients=checked_coefficients(self.coefficients, self.num_rounds))
        check_range(self.strategy_coefficients(), self.noising_coefficients())

    @property
    def num_bands(self) -> int:
        """The number of bands of C^-1."""
        return len(self.coefficients)

    def strategy_coefficients(self) -> FloatArray:
        """Returns the first column of C, (n,) float64."""
        return power_series.reciprocal(self.coefficients, self.num_rounds)

    def noising_coefficients(self) -> FloatArray:
        """Returns the first column of C^-1, (n,) float64."""
        return power_series.padded(self.coefficients, self.num_rounds)

    def noise_recursion(self) -> WindowNoise:
        """Returns the combination of the last ``num_bands`` rows of Z."""
        none = np.empty((self.num_rounds, 0))
        return WindowNoise(self.num_rounds, self.coefficients[np.newaxis], none, none)


def banded_inverse(
    num_rounds: Any = None,
    num_bands: int | None = None,
    participation: Participation | None = None,
    *,
    coefficients: Literal["optimised", "square_root"] = "optimised",
    error: ErrorMeasure = "mean",
    workload: Any = None,
    max_evaluations: int = 2000,
    show_progress: bool = False,
) -> BandedInverseFactorization:
    """Computes a factorization of a Toeplitz workload with a banded C^-1, in O(n) memory.

    Args:
      num_rounds: n, for the prefix sum of n rounds; or the workload itself, as ``workload``.
      num_bands: The number of bands of C^-1, 1 (independent noise) to n.
      participation: The schema to optimise for; SingleParticipation by default.
      coefficients: ``optimised``, or ``square_root`` for those of the inverse of the workload's
        square root, (1 - x)^(1/2) for the prefix sum.
      error: What to minimise: the ``mean`` squared error over rounds or its ``max``.
      workload: What to optimise for: the prefix sum, which is the default, or momentum with
        constant learning rates, a ``workloads.Workload`` or an (n, n) array.
      max_evaluations: Give up after this many evaluations of the error.
      show_progress: Whether to show a progress bar on standard error.

    Returns:
      The factorization; the coefficients of C are non-negative. If the optimiser stopped
      before its gradient vanished, the best coefficients found, with a
      NotConvergedWarning.

    Raises:
      ValueError: If an argument is out of its range, the workload has other learning rates than
        constant ones or is given twice, or the schema names more participations than fit.

    Example:
      >>> import mf_aggregators as mfa
      >>> make = mfa.factorizations.banded_inverse
      >>> make(4, num_bands=2, coefficients="square_root").noising_matrix()[:, 0]
      array([ 1. , -0.5,  0. ,  0. ])
    """
    num_rounds, momentum = check_workload(num_rounds, workload, "the banded inverse")
    participation = check_fits(
        SingleParticipation() if participation is None else participation, num_rounds
    )
    num_bands = check_bands(validation.positive_integer(num_bands, "num_bands"), num_rounds, 1)
    error = check_measure(error)
    max_evaluations = validation.positive_integer(max_evaluations, "max_evaluations")
    if coefficients not in ("optimised", "square_root"):
        raise ValueError(
            "coefficients must be 'optimised' or 'square_root', found "
            f"{validation.shown(coefficients)}."
        )
    weights = error_weights(num_rounds, error)
    series = power_series.inverse_square_root_coefficients(num_bands, momentum)
    candidates: list[tuple[FloatArray, Any]] = [(series, None)]
    if coefficients == "optimised" and num_bands > 1:
        pattern = PatternOfRounds.of(participation, num_rounds)
        # Where clients return, the better of two: with ordered ratios the sensitivity is
        # exact by construction, without it is what the coefficients turn out to give.
        candidates = [
            _optimised(
                series,
                _ErrorByRatios(pattern, weights, momentum, ordered),
                max_evaluations,
                show_progress,
            )
            for ordered in ((False, True) if pattern.most > 1 else (False,))
        ]
    series, result = min(
        candidates, key=lambda found: _squared_error(found[0], participation, weights, momentum)
    )
    if result is not None:
        warn_unless_stationary(result)
    return BandedInverseFactorization(
        num_rounds,
        series,
        participation=participation,
        parameters={
            "num_bands": num_bands,
            "coefficients": coefficients,
            "error": error,
            **parameters_of(momentum),
        },
    )


def _squared_error(
    coefficients: FloatArray, participation: Participation, weights: FloatArray, momentum: float
) -> float:
    """sens(C)^2 sum_t w_t b_t^2 of the coefficients of C^-1, whatever they are."""
    num_rounds = len(weights)
    column = power_series.reciprocal(coefficients, num_rounds)
    bound = sensitivities.from_toeplitz_coefficients(column, num_rounds, participation)
    decoder = with_momentum(np.cumsum(power_series.padded(coefficients, num_rounds)), momentum)
    return bound.value**2 * float(weights @ np.square(decoder))


@dataclasses.dataclass(frozen=True, eq=False)
class _ErrorByRatios:
    """The squared error by the ratios r_t = s_t / s_(t-1) of running sums s of C^-1's coefficients.

    Ratios between 0 and 1 keep the coefficients of C non-negative and at most one. If
    ``ordered``, the ratios are also kept non-decreasing: then s, which is constant
    after its last ratio, is log-convex, all coefficients of 1 / s(x) after the first are
    non-positive (Kaluza), and as these are the differences of the coefficients of
    C = 1 / ((1 - x) s(x)), C does not increase. The decoder's b(x) is s(x) / (1 - beta x).

    The free variables are the logarithms of odds r_t / (1 - r_t), or, if ``ordered``, those of
    the steps between logarithms of ratios.

    Attributes:
      pattern: The worst pattern of the schema.
      weights: (n,) weights of the squares of the decoder's coefficients.
      momentum: beta.
      ordered: Whether the ratios are kept non-decreasing.
    """

    pattern: PatternOfRounds
    weights: FloatArray
    momentum: float
    ordered: bool

    def free_variables(self, sums: FloatArray) -> FloatArray:
        """Returns the (p - 1,) free variables of (p,) running sums."""
        logs = np.log(sums[1:] / sums[:-1])
        if self.ordered:
            return np.asarray(np.log(np.diff(logs, append=0.0)))
        return np.asarray(logs - np.log(-np.expm1(logs)))

    def running_sums(self, free: FloatArray) -> FloatArray:
        """Returns the (p,) running sums of (p - 1,) free variables."""
        logs = -_sums_from_each(np.exp(free)) if self.ordered else scipy.special.log_expit(free)
        return np.asarray(np.exp(np.concatenate([[0.0], np.cumsum(logs)])))

    def logarithm(self, free: FloatArray) -> tuple[float, FloatArray]:
        """Returns log(sens(C)^2 sum_t w_t b_t^2) and its gradient by the free variables."""
        sums = self.running_sums(free)
        squared_sensitivity, by_noising = self._squared_sensitivity(np.diff(sums, prepend=0.0))
        squared_rows, by_all_sums = self._squared_rows(sums)
        by_sums = by_noising / squared_sensitivity
        by_sums[:-1] -= by_sums[1:].copy()
        by_sums += by_all_sums[: len(sums)] / squared_rows
        # The last running sum stands for all later rounds as well.
        by_sums[-1] += np.sum(by_all_sums[len(sums) :]) / squared_rows
        value = float(np.log(squared_sensitivity) + np.log(squared_rows))
        by_logs = _sums_from_each(by_sums * sums)[1:]
        if self.ordered:
            return value, -np.cumsum(by_logs) * np.exp(free)
        return value, by_logs * (1.0 - scipy.special.expit(free))

    def _squared_sensitivity(self, noising: FloatArray) -> tuple[float, FloatArray]:
        """The pattern's squared sensitivity, and its gradient by the (p,) coefficients of C^-1."""
        column = power_series.reciprocal(noising, self.pattern.num_rounds)
        value, by_column = self.pattern.squared_sensitivity(column)
        # A change of C^-1 by x^j changes c(x) by -x^j c(x)^2.
        response = power_series.product(column, column, self.pattern.num_rounds)
        return value, -power_series.correlation(by_column, response, len(noising))

    def _squared_rows(self, sums: FloatArray) -> tuple[float, FloatArray]:
        """The sum of w_t b_t^2, and its gradient by the running sums of all n rounds."""
        all_sums = np.pad(sums, (0, self.pattern.num_rounds - len(sums)), mode="edge")
        decoder = with_momentum(all_sums, self.momentum)
        slopes = with_momentum_adjoint(2.0 * self.weights * decoder, self.momentum)
        return float(self.weights @ np.square(decoder)), slopes


def _sums_from_each(values: FloatArray) -> FloatArray:
    """The sums of each entry and all after it."""
    return np.asarray(np.cumsum(values[::-1])[::-1])


def _optimised(
    start: FloatArray, error: _ErrorByRatios, max_evaluations: int, show_progress: bool
) -> tuple[FloatArray, Any]:
    """L-BFGS over the free variables of the ratios, from the coefficients of some C^-1."""
    with ProgressBar(
        desc=f"banded inverse, {len(start)} bands", unit=" evaluations", disable=not show_progress
    ) as progress:

        def function(free: FloatArray) -> tuple[float, FloatArray]:
            progress.update()
            return error.logarithm(free)

        largest = _LARGEST_LOG / 10.0 if error.ordered else _LARGEST_LOG
        result = minimise(
            function,
            error.free_variables(np.cumsum(start)),
            max_evaluations=max_evaluations,
            corrections=20,
            least_change=1e-10,
            bounds=scipy.optimize.Bounds(-_LARGEST_LOG, largest),
        )
    return np.diff(error.running_sums(result.x), prepend=0.0), result
