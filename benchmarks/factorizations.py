r"""Measures the seconds to compute factorizations, and those of plain baselines in the same run.

  python -m benchmarks.factorizations --num_rounds=1026
  python -m benchmarks.factorizations --only=optimal,blt --num_rounds=2048

optimal: the search for the fixed point of Denisov et al. Thm 3.2, beside iterating phi
  from the all-ones vector, both to a relative duality gap of 1e-6.
worst_round: the search of banded for the worst round, to a certified gap of 1e-3, beside that for
  the mean, to 1e-5.
multi_epoch: the dual search for the optimum under (6, n / 6)-participation, beside the same search
  by eigendecompositions of full matrices, as of version 0.5.0, and beside L-BFGS over the entries
  of C scaled to be feasible, until an error within 1e-4 of ours.
toeplitz: one evaluation of the error and its gradient, beside the same with dense
  triangular matrices; and optimised coefficients for --many_rounds rounds.
blt: 4 buffers, beside one L-BFGS search with numerical gradients from decays that are
  equally spaced in their logarithms; and decays for --many_rounds rounds.

Clocks are noisy: read the ratios, and the number of evaluations beside them. Seconds are those of
the processor, so that other work on the machine matters less. The baselines of multi_epoch and blt
stop after ten times our time, and their error above the target is printed then.
"""

import contextlib
import sys
import time
from collections.abc import Callable
from typing import TypeAlias, TypeVar
from unittest import mock

import numpy as np
import scipy.linalg
import scipy.optimize
from absl import flags

from mf_aggregators import linear_algebra, lower_bounds, workloads
from mf_aggregators.commands import command_line
from mf_aggregators.factorizations import (
    BandedFactorization,
    Factorization,
    banded,
    blt,
    optimal,
    toeplitz,
)
from mf_aggregators.linear_algebra import square_root_bands
from mf_aggregators.participation import FixedEpochOrder, MinSeparation, SingleParticipation
from mf_aggregators.workloads import Workload

_Fields: TypeAlias = dict[str, object]
_Result = TypeVar("_Result")

_SINGLE = SingleParticipation()
# The most time that a baseline may take, as a multiple of our own time.
_MOST_TIMES = 10.0


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags of the benchmark."""
    flags.DEFINE_integer("num_rounds", 512, "Rounds n.", flag_values=values)
    flags.DEFINE_integer("num_bands", None, "Bands; default n / 6.", flag_values=values)
    flags.DEFINE_integer(
        "many_rounds", 1_000_000, "Rounds for toeplitz and blt alone.", flag_values=values
    )
    flags.DEFINE_list("only", list(_PARTS), "Which comparisons to run.", flag_values=values)


def main(values: flags.FlagValues) -> None:
    """Times factorizations and their baselines, and prints a table."""
    fields: _Fields = {"num_rounds": values.num_rounds}
    for name in values.only:
        command_line.check_choice(
            name in _PARTS, f"--only must name some of {', '.join(_PARTS)}, found {name}."
        )
        fields |= {f"{name}_{field}": value for field, value in _PARTS[name](values).items()}
    command_line.print_result(values, fields, command_line.table(list(fields.items())))


class _Reached(Exception):  # noqa: N818 - a signal that ends a baseline.
    """Signal that a baseline has reached its target error or used up its time."""


class _Baseline:
    """Counts a baseline's evaluations; ends the baseline at its target or after its time."""

    def __init__(self, target: float, seconds: float) -> None:
        self._target, self._seconds = target, seconds
        self._start = time.process_time()
        self.evaluations, self.best = 0, np.inf

    def record(self, value: float) -> None:
        """Records one evaluation and its error; raises _Reached to end the baseline."""
        self.evaluations += 1
        self.best = min(self.best, value)
        if self.best <= self._target or time.process_time() - self._start > self._seconds:
            raise _Reached

    def fields(self, ours: float) -> _Fields:
        """Returns the table's fields for the baseline, and for our own seconds next to it."""
        seconds = time.process_time() - self._start
        return {
            "seconds": ours,
            "baseline_seconds": seconds,
            "baseline_evaluations": self.evaluations,
            "baseline_error_above_target": max(0.0, self.best / self._target - 1.0),
            "ratio": ours / seconds,
        }


def _timed(function: Callable[[], _Result]) -> tuple[_Result, float]:
    start = time.process_time()
    result = function()
    return result, time.process_time() - start


def _optimal(values: flags.FlagValues) -> _Fields:
    workload = workloads.prefix_sum(values.num_rounds)
    factorization, ours = _timed(lambda: optimal(workload))
    start, evaluations, gap = time.process_time(), 0, np.inf
    gram = workload.T @ workload
    v = np.ones(values.num_rounds)
    while gap > 1e-6:
        evaluations += 1
        root_v = np.sqrt(v)
        eigenvalues, vectors = np.linalg.eigh(gram * root_v * root_v[:, np.newaxis])
        roots = np.sqrt(np.maximum(eigenvalues, 0.0))
        phi = np.square(vectors) @ roots
        ratios = phi / v * (np.sum(v) / np.sum(phi))
        # Like our search, the baseline computes its duality gap only when that may be small.
        if np.sum(v * np.square(ratios - 1.0)) <= 0.5e-6 * np.sum(v):
            half = vectors * np.sqrt(roots) / root_v[:, np.newaxis]
            strategy = scipy.linalg.cholesky((half @ half.T)[::-1, ::-1], lower=True)
            strategy = strategy.T[::-1, ::-1] / np.linalg.norm(strategy, axis=1)[::-1]
            decoder = scipy.linalg.solve_triangular(strategy, workload.T, lower=True, trans="T")
            bound = np.sum(phi) ** 2 / np.sum(v)
            gap = float(np.sum(np.square(decoder)) / bound - 1.0)
        v = phi
    baseline = time.process_time() - start
    return {
        "total_error": factorization.total_error(workload, _SINGLE),
        "gap": factorization.optimality_gap,
        "seconds": ours,
        "baseline_seconds": baseline,
        "baseline_evaluations": evaluations,
        "baseline_gap": gap,
        "ratio": ours / baseline,
    }


def _worst_round(values: flags.FlagValues) -> _Fields:
    num_rounds = values.num_rounds
    num_bands = values.num_bands or max(1, num_rounds // 6)
    schema = MinSeparation(num_bands, -(-num_rounds // num_bands))
    mean, baseline = _timed(lambda: banded(num_rounds, num_bands, participation=schema))
    worst, ours = _timed(lambda: banded(num_rounds, num_bands, participation=schema, error="max"))
    return {
        "max_error": worst.max_error(num_rounds, schema),
        "max_error_for_the_mean": mean.max_error(num_rounds, schema),
        "gap": worst.optimality_gap,
        "seconds": ours,
        "mean_seconds": baseline,
        "ratio_to_mean": ours / baseline,
    }


def _multi_epoch(values: flags.FlagValues) -> _Fields:
    num_rounds, epochs = values.num_rounds, 6
    separation = -(-num_rounds // epochs)
    workload = workloads.prefix_sum(num_rounds)
    schema = FixedEpochOrder(epochs, separation)
    factorization, ours = _timed(lambda: optimal(workload, schema))
    with mock.patch.object(workloads, "inverse_bands", return_value=None):
        dense, of_dense = _timed(lambda: optimal(workload, schema))
    target = factorization.total_error(workload, schema) ** 2 * (1.0 + 1e-4)
    lower = np.tri(num_rounds, dtype=bool)
    classes = [np.arange(start, num_rounds, separation) for start in range(separation)]
    baseline = _Baseline(target, _MOST_TIMES * ours + 5.0)

    def error(entries: np.ndarray) -> tuple[float, np.ndarray]:
        strategy = np.zeros((num_rounds, num_rounds))
        strategy[lower] = entries
        # The columns are scaled so that every participation pattern has sensitivity one.
        blocks = [strategy[:, rounds].T @ strategy[:, rounds] for rounds in classes]
        scales = np.empty(num_rounds)
        for rounds, block in zip(classes, blocks, strict=True):
            scales[rounds] = np.sqrt(np.sum(np.abs(block)))
        scaled = strategy / scales
        decoder_t = scipy.linalg.solve_triangular(
            scaled, workload.T, lower=True, trans="T", check_finite=False
        )
        value = float(np.sum(np.square(decoder_t)))
        baseline.record(value)
        weighted_t = scipy.linalg.solve_triangular(
            scaled, decoder_t, lower=True, check_finite=False
        )
        slope = -2.0 * decoder_t @ weighted_t.T
        along = np.einsum("ij,ij->j", slope, scaled)
        gradient = slope / scales
        for rounds, block in zip(classes, blocks, strict=True):
            change = strategy[:, rounds] @ np.sign(block)
            gradient[:, rounds] -= change * (np.sum(along[rounds]) / scales[rounds[0]] ** 2)
        return value, gradient[lower]

    bands = square_root_bands(num_rounds, num_rounds)
    start = BandedFactorization(bands).strategy_matrix()
    with contextlib.suppress(_Reached):
        scipy.optimize.minimize(
            error,
            (start / np.linalg.norm(start, axis=0))[lower],
            jac=True,
            method="L-BFGS-B",
            options={"maxiter": 5000, "maxfun": 5000, "ftol": 1e-15, "gtol": 0.0},
        )
    return {
        "rmse": factorization.rmse(workload, schema),
        "gap": factorization.optimality_gap,
        "eigendecompositions_seconds": of_dense,
        "eigendecompositions_gap": dense.optimality_gap,
        "ratio_to_eigendecompositions": ours / of_dense,
        **baseline.fields(ours),
    }


def _toeplitz(values: flags.FlagValues) -> _Fields:
    num_rounds = values.num_rounds
    series = linear_algebra.square_root_coefficients(num_rounds)
    weights = _weights_of_mean(num_rounds)

    def by_series() -> np.ndarray:
        inverse = linear_algebra.reciprocal_series(series, num_rounds)
        decoder = np.cumsum(inverse)
        response = linear_algebra.product_of_series(decoder, inverse, num_rounds)
        return linear_algebra.correlation(weights * decoder, response, num_rounds)

    _, ours = _timed(by_series)

    def dense() -> np.ndarray:
        strategy = scipy.linalg.toeplitz(series, np.zeros(num_rounds))
        decoder_t = scipy.linalg.solve_triangular(
            strategy, np.tri(num_rounds).T, lower=True, trans="T", check_finite=False
        )
        weighted_t = scipy.linalg.solve_triangular(
            strategy, decoder_t, lower=True, check_finite=False
        )
        return decoder_t @ weighted_t.T

    _, baseline = _timed(dense)
    many = values.many_rounds
    factorization, seconds = _timed(lambda: toeplitz(many))
    return {
        "evaluation_seconds": ours,
        "baseline_seconds": baseline,
        "ratio": ours / baseline,
        **_many(factorization, seconds),
    }


def _blt(values: flags.FlagValues) -> _Fields:
    num_rounds, num_buffers = values.num_rounds, 4
    workload = Workload("prefix_sum", num_rounds)
    factorization, ours = _timed(lambda: blt(num_rounds, num_buffers))
    rmse = factorization.rmse(workload, _SINGLE)
    baseline = _Baseline(rmse * (1.0 + 1e-4), 2.0 * _MOST_TIMES * ours + 5.0)
    weights = _weights_of_mean(num_rounds)
    powers = np.arange(num_rounds - 1)

    def error(parameters: np.ndarray) -> float:
        decays = 1.0 / (1.0 + np.exp(parameters[:num_buffers]))
        scales = np.exp(parameters[num_buffers:])
        column = np.concatenate([[1.0], scales @ decays[:, np.newaxis] ** powers])
        decoder = np.cumsum(linear_algebra.reciprocal_series(column, num_rounds))
        value = float(np.linalg.norm(column) * np.sqrt(weights @ np.square(decoder)))
        if not np.isfinite(value):
            return 1e12
        baseline.record(value)
        return value

    first = np.linspace(np.log(1.0 / num_rounds), 0.0, num_buffers)
    with contextlib.suppress(_Reached):
        scipy.optimize.minimize(
            error,
            np.concatenate([first, np.full(num_buffers, np.log(0.1))]),
            method="L-BFGS-B",
            options={"maxiter": 5000, "maxfun": 100_000, "ftol": 1e-15},
        )
    fields = {"rmse": rmse, **baseline.fields(ours)}
    many = values.many_rounds
    return {**fields, **_many(*_timed(lambda: blt(many, num_buffers)))}


def _weights_of_mean(num_rounds: int) -> np.ndarray:
    """Returns weights of a Toeplitz decoder's squared coefficients in the mean error."""
    return 1.0 - np.arange(num_rounds) / num_rounds


def _many(factorization: Factorization, seconds: float) -> _Fields:
    workload = Workload("prefix_sum", factorization.num_rounds)
    bound = lower_bounds.compute(workload, _SINGLE)
    assert bound is not None
    return {
        "many_rounds": factorization.num_rounds,
        "many_rounds_seconds": seconds,
        "many_rounds_rmse_over_lower_bound": factorization.rmse(workload, _SINGLE) / bound.rmse,
    }


_PARTS = {
    "optimal": _optimal,
    "worst_round": _worst_round,
    "multi_epoch": _multi_epoch,
    "toeplitz": _toeplitz,
    "blt": _blt,
}


if __name__ == "__main__":
    sys.exit(command_line.run(__doc__ or "", define_flags, main))
