"""Three methods for one optimum."""

import numpy as np
import pytest

from mf_aggregators import factorizations, workloads
from mf_aggregators.participation import SingleParticipation
from reproduction import solver_race


@pytest.mark.parametrize("method", solver_race.METHODS)
@pytest.mark.parametrize("momentum", [0.0, 0.8])
def test_each_method_comes_to_the_optimum(method: str, momentum: float) -> None:
    workload = workloads.momentum_sgd(12, momentum)
    best = factorizations.optimal(workload, relative_gap=1e-10)
    least = best.total_error(workload, SingleParticipation()) ** 2
    course = solver_race.run(workload, method, least * (1.0 + 1e-6), 30.0)
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
    for method in solver_race.METHODS:
        course = solver_race.run(workload, method, 0.0, 30.0, most_steps=1)
        assert course.losses[0] == pytest.approx(loss, rel=1e-9)
        assert len(course.losses) == 2


def test_a_method_ends_after_its_time() -> None:
    course = solver_race.run(workloads.prefix_sum(8), "gradient descent", 0.0, 0.0)
    assert len(course.losses) == 1
