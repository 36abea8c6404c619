"""What tests of Toeplitz factorizations share: workloads, dense views, errors, schemas."""

from collections.abc import Callable, Iterable
from typing import Literal, TypeAlias

import numpy as np
import scipy.linalg
import scipy.optimize
from hypothesis import strategies as st

from mf_aggregators.factorizations import Factorization
from mf_aggregators.participation import (
    FixedEpochOrder,
    MinSeparation,
    Participation,
    SingleParticipation,
)
from mf_aggregators.workloads import Workload, prefix_sum

ErrorMeasure: TypeAlias = Literal["mean", "max"]
PAPER = MinSeparation(342, 6)
SINGLE = SingleParticipation()


def prefix(num_rounds: int) -> Workload:
    """The prefix sum."""
    return Workload("prefix_sum", num_rounds)


def dense(series: np.ndarray, num_rounds: int) -> np.ndarray:
    """The (n, n) lower-triangular Toeplitz matrix with these first coefficients."""
    column = np.zeros(num_rounds)
    column[: len(series)] = series[:num_rounds]
    return np.asarray(scipy.linalg.toeplitz(column, np.zeros(num_rounds)))


def error_of(
    factorization: Factorization, error: ErrorMeasure, participation: Participation
) -> float:
    """The error for prefix sums that a search minimises."""
    workload = prefix(factorization.num_rounds)
    if error == "mean":
        return factorization.rmse(workload, participation)
    return factorization.max_error(workload, participation)


def schemas(num_rounds: int) -> st.SearchStrategy[Participation]:
    """Any schema, also of participations that do not fit."""
    separations = st.integers(1, num_rounds + 1)
    counts = st.integers(1, num_rounds + 1)
    return st.one_of(
        st.just(SINGLE),
        st.builds(FixedEpochOrder, counts, separations),
        st.builds(MinSeparation, separations, st.one_of(st.none(), counts)),
    )


@st.composite
def trainings(draw: st.DrawFn, most_rounds: int) -> Workload:
    """Training with momentum and learning rates, each present or absent."""
    num_rounds = draw(st.integers(1, most_rounds))
    numbers = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rates = tuple(numbers.uniform(0.1, 2.0, num_rounds)) if draw(st.booleans()) else None
    return Workload("momentum_sgd", num_rounds, draw(st.sampled_from([0.0, 0.5, 0.95])), rates)


def least_error_of_another_solver(
    num_rounds: int,
    separation: int,
    error: ErrorMeasure,
    column: Callable[[np.ndarray], np.ndarray],
    starts: Iterable[np.ndarray],
) -> float:
    """The least error for prefix sums that sequential quadratic programming finds, dense.

    Args:
      num_rounds: n.
      separation: Clients return after at least so many rounds, as often as fit.
      error: Which error.
      column: From free variables to the first column of C, which has to be non-negative and must
        not increase from lag ``separation`` on.
      starts: Free variables to start from.
    """
    pattern = np.zeros(num_rounds)
    pattern[::separation] = 1.0

    def function(free: np.ndarray) -> float:
        strategy = dense(column(free), num_rounds)
        inverse = scipy.linalg.solve_triangular(strategy, np.eye(num_rounds), lower=True)
        rows = np.sum((prefix_sum(num_rounds) @ inverse) ** 2, axis=1)
        squared = np.mean(rows) if error == "mean" else np.max(rows)
        return float(np.linalg.norm(strategy @ pattern) * np.sqrt(squared))

    def slacks(free: np.ndarray) -> np.ndarray:
        series = column(free)
        return np.append(series, series[separation:-1] - series[separation + 1 :])

    best = np.inf
    for start in starts:
        found = scipy.optimize.minimize(
            function,
            start,
            method="SLSQP",
            constraints={"type": "ineq", "fun": slacks},
            options={"maxiter": 300, "ftol": 1e-12},
        )
        if np.min(slacks(found.x)) >= -1e-9:
            best = min(best, float(found.fun))
    return best
