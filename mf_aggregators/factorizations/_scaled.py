r"""Toeplitz matrices with scaled rows and columns: C = P T D.

P is a positive diagonal matrix, and D divides each column of P T by its norm. The noise is
D^-1 T^-1 (P^-1 Z), which takes the memory of T and two factors a round. A Toeplitz matrix alone has
columns whose norms fall towards the last round, and rows of B whose norms rise; the scales make up
for both. T is the best Toeplitz matrix without scales. To search T together with the scales takes
less than 0.1 % off the error of a BLT, and nothing off that of a banded inverse.

**Scales.** log P is linear between knots, whose distances from the first and from the last round
are 0, 1, 3, 7, and so on. As a function of the logarithm of the distance over n, it is nearly the
same for any number of rounds: P is nearly constant at the beginning, and a power of the distance
at the end. So P of fewer rounds serves more rounds, continued at both ends.

**Gradients.** With s the norms of the columns of P T, t the coefficients of T and nu = P^-2, a
kind of T states the squared norms e of the rows of B = A D^-1 T^-1 P^-1, and their slopes by nu and
s. As s^2 is a correlation of P^2 with t^2, slopes by s become slopes by P.
"""

import abc
import dataclasses
from typing import Protocol, TypeVar

import numpy as np

from mf_aggregators import linear_algebra
from mf_aggregators.factorizations.factorization import ExtensionError, Factorization
from mf_aggregators.factorizations.searches import NotConvergedWarning, minimise
from mf_aggregators.factorizations.toeplitz import PatternOfRounds, Problem, ToeplitzStructure
from mf_aggregators.kernel import numbers
from mf_aggregators.kernel import sensitivity as sensitivities
from mf_aggregators.kernel.numbers import FloatArray, IntArray
from mf_aggregators.kernel.rows import LEAST_SCALE, NoiseRecursion, ScaledNoise, Strategy
from mf_aggregators.kernel.sensitivity import Sensitivity
from mf_aggregators.participation import Participation, check
from mf_aggregators.workloads import AnyWorkload, Workload

_Made = TypeVar("_Made", bound="ScaledToeplitz")

# The most rounds for which scales are searched; for more rounds, the scales for this number are
# carried over.
MOST_ROUNDS = 1 << 14
# The orders of the norms over rounds that approach the maximum, in rising order.
_ORDERS = 16.0, 64.0, 256.0, 1024.0
# A search ends when a step lowers the logarithm of the error by less than this, relative to it.
_LEAST_CHANGE = 1e-8
# The largest magnitude of the logarithm of a row scale.
_LARGEST_LOG = 5.0
# Near both ends, the first knot from which scales are carried over, and the last knot of the linear
# fit at the end.
_FIRST_KNOT, _LAST_KNOT = 4, 8


class _DecoderSquares(Protocol):
    """The squared norms e of the rows of B, (n,), with their slopes by the scales."""

    squared: FloatArray

    def slopes(self, weights: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Returns the gradient of sum_i w_i e_i for (n,) weights w: by nu, and by s."""


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ScaledToeplitz(ToeplitzStructure):
    """A strategy matrix C = P T D with Toeplitz T and diagonal P and D, or C = T without scales.

    Attributes:
      row_scales: (n,), read-only: the diagonal of P, from 1e-50 to 1e50; None without scales.
      column_norms: (n,), read-only: the norms of the columns of P T, by which D divides the
        columns; None without scales.

    Raises:
      ValueError: If one kind of scales is missing, or a scale is out of its range.
    """

    row_scales: FloatArray | None = dataclasses.field(default=None, kw_only=True)
    column_norms: FloatArray | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.row_scales is None and self.column_norms is None:
            return
        for name in ("row_scales", "column_norms"):
            scales = numbers.real_array(getattr(self, name), name).copy()
            # Written so that NaN is refused.
            are_usual = np.all((scales >= LEAST_SCALE) & (scales <= 1.0 / LEAST_SCALE))
            if scales.shape != (self.num_rounds,) or not are_usual:
                raise ValueError(
                    f"{name} must be {self.num_rounds} finite numbers above zero, from 1e-50 to "
                    f"1e50, found an array of shape {scales.shape}."
                )
            self._set(**{name: scales})
        self._set(parameters={**self.parameters, "equal_column_norms": True})

    def strategy_matrix(self) -> FloatArray:
        """Returns the strategy matrix C as a dense (n, n) array."""
        rows, norms = self._scales()
        return rows[:, np.newaxis] * super().strategy_matrix() / norms

    def noising_matrix(self) -> FloatArray:
        """Returns the noising matrix C^-1 as a dense (n, n) array."""
        rows, norms = self._scales()
        return norms[:, np.newaxis] * super().noising_matrix() / rows

    def noise_recursion(self) -> NoiseRecursion:
        """Returns the recursion of the noise rows: that of T^-1, with scales if there are any."""
        rows = self._inner_rows()
        if self.row_scales is None or self.column_norms is None:
            return rows
        return ScaledNoise(rows, 1.0 / self.row_scales, self.column_norms)

    @abc.abstractmethod
    def _inner_rows(self) -> NoiseRecursion:
        """Returns the recursion of the rows of T^-1 Z, without scales."""

    @abc.abstractmethod
    def _decoder_squares(
        self, momentum: float, rates: FloatArray, nu: FloatArray, norms: FloatArray
    ) -> _DecoderSquares:
        """Returns the squared norms of the rows of B, for (n,) learning rates, nu and s."""

    def _scales(self) -> tuple[FloatArray, FloatArray]:
        """Returns the diagonals of P and of D^-1; ones without scales."""
        if self.row_scales is None or self.column_norms is None:
            return np.ones(self.num_rounds), np.ones(self.num_rounds)
        return self.row_scales, self.column_norms

    def _encode(self, x: FloatArray) -> FloatArray:
        rows, norms = (each.reshape((-1,) + (1,) * (x.ndim - 1)) for each in self._scales())
        return rows * super()._encode(x / norms)

    def _sensitivity(self, participation: Participation) -> Sensitivity:
        if self.column_norms is None:
            return super()._sensitivity(participation)
        schema = check(participation).as_schema()
        rows, norms = self._scales()
        column = self.strategy_coefficients()[np.newaxis]
        strategy = Strategy(column, self.num_rounds, scales=(rows, 1.0 / norms))
        return sensitivities.of_strategy(strategy, schema)

    def _squared_rows(self, workload: AnyWorkload) -> FloatArray | None:
        if self.row_scales is None:
            return super()._squared_rows(workload)
        return self._scaled_squares(workload) if isinstance(workload, Workload) else None

    def _scaled_squares(self, workload: Workload) -> FloatArray:
        rows, norms = self._scales()
        squares = self._decoder_squares(*_training(workload), 1.0 / np.square(rows), norms)
        return squares.squared

    def _extended(
        self,
        num_rounds: int,
        participation: Participation,
        workload: AnyWorkload,
        parameters: dict[str, object],
    ) -> Factorization:
        if self.row_scales is not None:
            raise ExtensionError(
                f"a {self.mechanism} factorization with equal column norms for {self.num_rounds} "
                f"rounds cannot be extended to {num_rounds}: its scales depend on the last round. "
                "Use a BLT without equal column norms."
            )
        return super()._extended(num_rounds, participation, workload, parameters)

    def scaled(self: _Made, problem: Problem, shorter: _Made | None = None) -> _Made:
        """Returns this matrix with the scales that give the least error.

        Args:
          problem: The error that is minimised; its workload is known by its name.
          shorter: A scaled matrix for fewer rounds, from which scales are carried over. For one
            participation, the mean or maximum and constant rates the carried scales are used as
            they are; otherwise the search begins with them.
        """
        scales = np.zeros(len(_knots(self.num_rounds)))
        is_found = False
        if shorter is not None and shorter.row_scales is not None:
            known = np.log(shorter.row_scales[_knots(shorter.num_rounds)])
            scales = _carried(known, shorter.num_rounds, self.num_rounds)
            has_returning_clients = problem.pattern.most > 1
            is_found = problem.has_constant_rates and problem.error.weights is None
            is_found = is_found and not has_returning_clients
        if not is_found:
            scales = self._searched(problem, scales)
        rows = _row_scales(scales, self.num_rounds)
        norms = _column_norms(self.strategy_coefficients(), rows)
        return dataclasses.replace(self, row_scales=rows, column_norms=norms)

    def _searched(self, problem: Problem, start: FloatArray) -> FloatArray:
        """Searches for the logarithms of row scales at their knots by L-BFGS, and returns them."""
        column, (momentum, rates) = self.strategy_coefficients(), _training(problem.named)
        error, scales = problem.error, start
        for order in _ORDERS if error.is_maximum else (None,):

            def function(logs: FloatArray, order: float | None = order) -> tuple[float, FloatArray]:
                rows = _row_scales(logs, self.num_rounds)
                norms = _column_norms(column, rows)
                squares = self._decoder_squares(momentum, rates, 1.0 / np.square(rows), norms)
                value, weights = error.weighed(squares.squared, order)
                by_nu, by_norms = (each / value for each in squares.slopes(weights))
                by_rows, added = -2.0 * by_nu / rows**3, 0.0
                if problem.pattern.most > 1:
                    sensitivity, slopes = _squared_sensitivity(column, rows, norms, problem.pattern)
                    by_rows += slopes[0] / sensitivity
                    by_norms += slopes[1] / sensitivity
                    added = float(np.log(sensitivity))
                by_squares = by_norms / (2.0 * norms)
                spread = linear_algebra.product_of_series(
                    by_squares, np.square(column), self.num_rounds
                )
                by_rows += 2.0 * rows * spread
                return float(np.log(value)) + added, _at_knots(by_rows * rows)

            result = minimise(
                function,
                scales,
                bounds=[(-_LARGEST_LOG, _LARGEST_LOG)] * len(scales),
                max_evaluations=problem.max_evaluations,
                corrections=40,
                least_change=_LEAST_CHANGE,
            )
            scales = result.x
        NotConvergedWarning.unless_stationary(result)
        return np.asarray(scales)


def _training(workload: Workload) -> tuple[float, FloatArray]:
    """Returns the momentum and the (n,) learning rates of a workload."""
    stages = workload.recursions()
    return float(stages[0].kept[0]) if len(stages) > 1 else 0.0, stages[-1].added


def _distances(num_rounds: int) -> IntArray:
    """Returns distances of knots from the nearer end: 0, 1, 3, 7, ..., below half of the rounds."""
    distances = 2 ** np.arange(num_rounds.bit_length()) - 1
    return np.asarray(distances[distances < (num_rounds + 1) // 2])


def _knots(num_rounds: int) -> IntArray:
    """Returns the rounds at which log P has knots, in increasing order."""
    distances = _distances(num_rounds)
    return np.asarray(np.unique(np.concatenate([distances, num_rounds - 1 - distances])))


def _row_scales(logs: FloatArray, num_rounds: int) -> FloatArray:
    """Returns the (n,) diagonal of P, from its logarithms at the knots."""
    return np.asarray(np.exp(np.interp(np.arange(num_rounds), _knots(num_rounds), logs)))


def _column_norms(strategy: FloatArray, scales: FloatArray) -> FloatArray:
    """Returns the (n,) column norms of P T, from T's first column and the diagonal of P."""
    squares = linear_algebra.correlation(np.square(scales), np.square(strategy), len(scales))
    # Fourier transforms may make the smallest squares negative, so each is at least its first term.
    least = np.square(scales * strategy[0])
    return np.asarray(np.sqrt(np.maximum(squares, least)))


def _at_knots(values: FloatArray) -> FloatArray:
    """Applies the transpose of the interpolation between knots to (n,) values."""
    places = _knots(len(values))
    if len(places) == 1:
        return np.array([np.sum(values)])
    rounds = np.arange(len(values))
    after = np.clip(np.searchsorted(places, rounds, side="right"), 1, len(places) - 1)
    share = (rounds - places[after - 1]) / (places[after] - places[after - 1])
    before = np.bincount(after - 1, values * (1.0 - share), len(places))
    return np.asarray(before + np.bincount(after, values * share, len(places)), np.float64)


def _carried(logs: FloatArray, fewer: int, num_rounds: int) -> FloatArray:
    """Carries logarithms of scales over to the knots of more rounds.

    They are interpolated by the logarithm of the distance from an end over the number of rounds.
    Nearer to an end than the first knot that is used, they are constant at the beginning and linear
    at the end.
    """
    known = np.append(np.arange(len(_distances(fewer))) - np.log2(fewer), -1.0)[_FIRST_KNOT:]
    places = np.arange(len(_distances(num_rounds))) - np.log2(num_rounds)
    half = len(logs) // 2
    sides = []
    for values, is_end in ((logs, False), (logs[::-1], True)):
        middle = 0.5 * (logs[half - 1] + logs[-half])
        values = np.append(values[: len(_distances(fewer))], middle)[_FIRST_KNOT:]
        found = np.interp(places, known, values)
        if is_end:
            slope = (values[_LAST_KNOT - _FIRST_KNOT] - values[0]) / (_LAST_KNOT - _FIRST_KNOT)
            found += slope * np.minimum(places - known[0], 0.0)
        sides.append(found)
    # If the number of rounds is odd, both sides may have the round in the middle, which is kept
    # once.
    count = len(_knots(num_rounds)) - len(places)
    return np.concatenate([sides[0], sides[1][:count][::-1]])


def _squared_sensitivity(
    strategy: FloatArray, scales: FloatArray, norms: FloatArray, pattern: PatternOfRounds
) -> tuple[float, tuple[FloatArray, FloatArray]]:
    """Returns ||sum of columns 0, b, 2 b, ...||^2, and its gradient by P and s."""
    n = len(strategy)
    starts = range(0, n, pattern.separation)[: pattern.most]
    summed = np.zeros(n)
    for start in starts:
        summed[start:] += strategy[: n - start] / norms[start]
    by_sum, by_norms = 2.0 * np.square(scales) * summed, np.zeros(n)
    for start in starts:
        by_norms[start] = -float(by_sum[start:] @ strategy[: n - start]) / norms[start] ** 2
    return 0.5 * float(by_sum @ summed), (2.0 * scales * np.square(summed), by_norms)
