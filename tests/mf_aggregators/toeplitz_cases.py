"""What tests of Toeplitz factorizations share: workloads, dense views, errors, schemas."""

import numpy as np
import scipy.linalg
from hypothesis import strategies as st

from mf_aggregators.factorizations import Factorization
from mf_aggregators.factorizations._toeplitz_search import ErrorMeasure
from mf_aggregators.participation import (
    FixedEpochOrder,
    MinSeparation,
    Participation,
    SingleParticipation,
)
from mf_aggregators.workloads import Workload

PAPER = MinSeparation(342, 6)
SINGLE = SingleParticipation()


def prefix(num_rounds: int) -> Workload:
    """The prefix sum."""
    return Workload("prefix_sum", num_rounds)


def dense(series: np.ndarray, num_rounds: int) -> np.ndarray:
    """The (n, n) lower-triangular Toeplitz matrix with these first coefficients."""
    column = np.zeros(num_rounds)
    column[: len(series)] = series
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
