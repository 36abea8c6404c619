"""Iterates of phi for prefix sums, by inverses of tridiagonal matrices."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mf_aggregators import factorizations, workloads
from mf_aggregators.participation import SingleParticipation
from reproduction import fixed_point


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
    np.testing.assert_allclose(fixed_point.phi(v), expected, rtol=1e-9, atol=4.0 * tolerance)


def test_phi_of_two_rounds_in_closed_form() -> None:
    """The root of [[2, 1], [1, 1]] is [[3, 1], [1, 2]] / sqrt(5)."""
    np.testing.assert_allclose(
        fixed_point.phi(np.ones(2)), np.array([3.0, 2.0]) / np.sqrt(5.0), rtol=1e-13
    )


def test_iterates_end_at_the_optimum_by_the_rule() -> None:
    num_rounds = 128
    best = factorizations.optimal(workloads.prefix_sum(num_rounds), relative_gap=1e-9)
    least = best.total_error(workloads.prefix_sum(num_rounds), SingleParticipation())
    iterates = fixed_point.iterate(num_rounds, seed=3)
    assert np.all(iterates.total_errors >= least * (1.0 - 1e-9))
    assert iterates.total_errors[-1] <= least * (1.0 + 1e-4)
    assert iterates.changes[-1] < 1e-5 <= np.min(iterates.changes[:-1])
    step = iterates.first_with(1.01 * least)
    assert step is not None
    assert iterates.total_errors[step] <= 1.01 * least < iterates.total_errors[step - 1]
    assert iterates.first_with(0.99 * least) is None
