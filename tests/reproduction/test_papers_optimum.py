"""Three methods for one optimum, and iterates of phi for prefix sums."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mf_aggregators import factorizations, workloads
from mf_aggregators.participation import SingleParticipation
from reproduction import papers_optimum


@pytest.mark.parametrize("method", papers_optimum.METHODS)
@pytest.mark.parametrize("momentum", [0.0, 0.8])
def test_each_method_comes_to_the_optimum(method: str, momentum: float) -> None:
    workload = workloads.momentum_sgd(12, momentum)
    best = factorizations.optimal(workload, relative_gap=1e-10)
    least = best.total_error(workload, SingleParticipation()) ** 2
    course = papers_optimum.run(workload, method, least * (1.0 + 1e-6), math.inf)
    assert course.losses[-1] <= least * (1.0 + 1e-6)
    # No loss is below the optimum, up to its own gap, and none gets worse.
    assert np.min(course.losses) >= least * (1.0 - 1e-9)
    assert np.all(np.diff(course.losses) <= 0.0)
    assert np.all(np.diff(course.seconds) >= 0.0)
    assert course.seconds_until(course.losses[0]) == course.seconds[0]
    assert course.seconds_until(0.5 * least) == float("inf")


def test_all_methods_start_from_one_matrix() -> None:
    """Its loss is tr(A^T A X^-1) of X(1) scaled to diagonal one, by NumPy alone."""
    workload = workloads.prefix_sum(9)
    gram = workload.T @ workload
    eigenvalues, vectors = np.linalg.eigh(gram)
    root = (vectors * np.sqrt(eigenvalues)) @ vectors.T
    scale = 1.0 / np.sqrt(np.diagonal(root))
    start = root * scale * scale[:, np.newaxis]
    loss = float(np.trace(gram @ np.linalg.inv(start)))
    for method in papers_optimum.METHODS:
        course = papers_optimum.run(workload, method, 0.0, 30.0, most_steps=1)
        assert course.losses[0] == pytest.approx(loss, rel=1e-9)
        assert len(course.losses) == 2


@given(
    st.lists(st.floats(1e-4, 1e4), min_size=1, max_size=40),
)
def test_phi_is_the_diagonal_of_a_matrix_root(values: list[float]) -> None:
    """By the eigenvectors of the dense matrix."""
    v = np.array(values)
    workload = np.tril(np.ones((len(v), len(v))))
    root_v = np.sqrt(v)
    gram = workload.T @ workload * root_v * root_v[:, np.newaxis]
    eigenvalues, vectors = np.linalg.eigh(gram)
    expected = np.square(vectors) @ np.sqrt(np.maximum(eigenvalues, 0.0))
    # The reference knows small eigenvalues only to the rounding of the largest one.
    tolerance = np.sqrt(np.finfo(np.float64).eps * eigenvalues[-1])
    np.testing.assert_allclose(papers_optimum.phi(v), expected, rtol=1e-9, atol=4.0 * tolerance)


def test_iterates_end_at_the_optimum_by_the_rule() -> None:
    num_rounds = 128
    best = factorizations.optimal(workloads.prefix_sum(num_rounds), relative_gap=1e-9)
    least = best.total_error(workloads.prefix_sum(num_rounds), SingleParticipation())
    iterates = papers_optimum.iterate(num_rounds, seed=3)
    assert np.all(iterates.total_errors >= least * (1.0 - 1e-9))
    assert iterates.total_errors[-1] <= least * (1.0 + 1e-4)
    assert iterates.changes[-1] < 1e-5 <= np.min(iterates.changes[:-1])
    step = iterates.first_with(1.01 * least)
    assert step is not None
    assert iterates.total_errors[step] <= 1.01 * least < iterates.total_errors[step - 1]
    assert iterates.first_with(0.99 * least) is None
