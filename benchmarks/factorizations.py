r"""Seconds to compute factorizations, beside plain baselines in the same run.

  python benchmarks/factorizations.py --num_rounds=1024

1. The optimum for single participation: our search for the fixed point of Denisov et al.
   Thm 3.2, beside iterating phi from the all-ones vector to the same relative gap, 1e-6.
2. The banded optimum (BandMF Problem 2): L-BFGS over the entries of C, beside L-BFGS over
   the entries of X from the same start, until the same error.

Clocks are noisy: read the ratios, and the number of evaluations beside them.
"""

import contextlib
import sys
import time

import numpy as np
import scipy.linalg
import scipy.optimize
from absl import flags

from mf_aggregators import workloads
from mf_aggregators.commands import command_line
from mf_aggregators.factorizations import banded, optimal
from mf_aggregators.participation import MinSeparation, SingleParticipation


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags of the benchmark."""
    flags.DEFINE_integer("num_rounds", 512, "Rounds n.", flag_values=values)
    flags.DEFINE_integer("num_bands", None, "Bands; default n / 6.", flag_values=values)


def main(values: flags.FlagValues) -> None:
    """Runs both comparisons and prints a table."""
    num_rounds = values.num_rounds
    num_bands = values.num_bands or max(1, num_rounds // 6)
    workload = workloads.prefix_sum(num_rounds)

    start = time.perf_counter()
    factorization = optimal(workload)
    ours = time.perf_counter() - start
    error = factorization.total_error(workload, SingleParticipation()) ** 2
    plain, steps = _plain_iteration(workload, error / (1.0 + 1e-6))
    fields = {
        "optimal_total_error": factorization.total_error(workload, SingleParticipation()),
        "optimal_seconds": ours,
        "plain_iteration_seconds": plain,
        "plain_iteration_steps": steps,
        "optimal_ratio": ours / plain,
    }
    start = time.perf_counter()
    narrow = banded(workload, num_bands)
    ours = time.perf_counter() - start
    schema = MinSeparation(num_bands)
    target = narrow.total_error(workload, SingleParticipation()) ** 2 * (1 + 1e-4)
    plain, steps, reached = _banded_over_x(workload, num_bands, target, budget=10 * ours + 5.0)
    fields |= {
        "banded_rmse": narrow.rmse(workload, schema),
        "banded_gap": narrow.optimality_gap or 0.0,
        "banded_seconds": ours,
        "banded_over_x_seconds": plain,
        "banded_over_x_evaluations": steps,
        "banded_over_x_error_above_target": max(0.0, reached / target - 1.0),
        "banded_ratio": ours / plain,
    }
    command_line.print_result(values, fields, command_line.table(list(fields.items())))


def _plain_iteration(workload: np.ndarray, target: float) -> tuple[float, int]:
    """Seconds and steps of v <- phi(v) from ones until its lower bound (Eq. 8) reaches a target.

    The target is known from the optimum, so the baseline pays for no certificate.
    """
    gram = workload.T @ workload
    v = np.ones(workload.shape[0])
    start, steps, bound = time.perf_counter(), 0, 0.0
    while bound < target:
        steps += 1
        root_v = np.sqrt(v)
        eigenvalues, vectors = np.linalg.eigh(gram * root_v * root_v[:, np.newaxis])
        phi = np.square(vectors) @ np.sqrt(np.maximum(eigenvalues, 0.0))
        bound = float(np.sum(phi) ** 2 / np.sum(v))
        v = phi
    return time.perf_counter() - start, steps


def _banded_over_x(
    workload: np.ndarray, num_bands: int, target: float, budget: float
) -> tuple[float, int, float]:
    """Seconds, evaluations and squared error of L-BFGS over the entries of X."""
    num_rounds = workload.shape[0]
    lags = np.arange(1, num_bands)
    coefficients = np.zeros(num_rounds)
    coefficients[:num_bands] = [1.0, *np.cumprod((2.0 * lags - 1.0) / (2.0 * lags))]
    first = scipy.linalg.toeplitz(coefficients, np.zeros(num_rounds))
    first /= np.linalg.norm(first, axis=0)
    rows, columns = np.nonzero(np.tri(num_rounds, k=-1) - np.tri(num_rounds, k=-num_bands))
    begin, count, best = time.perf_counter(), 0, np.inf

    class Reached(Exception):  # noqa: N818
        pass

    def error(entries: np.ndarray) -> tuple[float, np.ndarray]:
        nonlocal count, best
        count += 1
        x = np.eye(num_rounds)
        x[rows, columns] = x[columns, rows] = entries
        try:
            factor = scipy.linalg.cholesky(x, lower=True, check_finite=False)
        except np.linalg.LinAlgError:
            return 1e12, np.zeros_like(entries)
        weighted = scipy.linalg.cho_solve((factor, True), workload.T, check_finite=False).T
        value = float(np.sum(weighted * workload))
        best = min(best, value)
        if best <= target or time.perf_counter() - begin > budget:
            raise Reached
        return value, -2.0 * (weighted.T @ weighted)[rows, columns]

    with contextlib.suppress(Reached):
        scipy.optimize.minimize(
            error,
            (first.T @ first)[rows, columns],
            jac=True,
            method="L-BFGS-B",
            options={"maxiter": 5000, "maxfun": 5000, "ftol": 1e-15, "gtol": 0.0},
        )
    return time.perf_counter() - begin, count, best


if __name__ == "__main__":
    sys.exit(command_line.run(__doc__ or "", define_flags, main))
