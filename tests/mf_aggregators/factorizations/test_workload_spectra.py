"""Tridiagonal spectra against dense ones."""

import numpy as np
import pytest
import scipy.linalg
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators.factorizations import optimal
from mf_aggregators.factorizations.optimal import (
    TridiagonalSpectra,
    WorkloadSpectra,
    spectra_of,
)
from mf_aggregators.participation import SingleParticipation
from mf_aggregators.workloads import Workload
from tests.examples import examples


@given(st.integers(1, 60), st.booleans(), st.integers(0, 2**32 - 1))
@settings(max_examples=examples(100), deadline=None)
def test_two_bands_of_the_inverse_give_what_the_dense_workload_gives(
    num_rounds: int, has_rates: bool, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    rates = tuple(generator.uniform(0.1, 1.0, num_rounds)) if has_rates else None
    workload = Workload("momentum_sgd", num_rounds, 0.0, rates)
    found, dense = spectra_of(workload), WorkloadSpectra(workload.matrix())
    assert isinstance(found, TridiagonalSpectra)
    np.testing.assert_allclose(found.gram_diagonal(), dense.gram_diagonal(), rtol=1e-11)
    v = generator.uniform(0.1, 10.0, num_rounds)
    values, vectors = found.decomposition(v)
    expected, others = dense.decomposition(v)
    np.testing.assert_allclose(np.sort(values), np.sort(expected), rtol=1e-8)
    root = np.square(vectors) @ np.sqrt(values)
    np.testing.assert_allclose(root, np.square(others) @ np.sqrt(expected), rtol=1e-8)
    assert np.all(found.safe_eigenvalues(values) <= values)
    matrix = workload.matrix() / np.max(workload.matrix()) * np.sqrt(v)
    nuclear = float(np.sum(scipy.linalg.svdvals(matrix)))
    assert found.nuclear_norm_from_below(v) <= nuclear * (1.0 + 1e-12)
    assert found.nuclear_norm_from_below(v) == pytest.approx(nuclear, rel=1e-10)
    strategy = np.tril(generator.normal(size=(num_rounds, num_rounds))) * 0.1
    strategy[np.diag_indices(num_rounds)] = 1.0
    np.testing.assert_allclose(
        found.squared_rows(strategy), dense.squared_rows(strategy), rtol=1e-9
    )
    left = found.left_vectors(v, values, vectors)
    others = dense.left_vectors(v, expected, others)
    row_roots = np.square(left) @ np.sqrt(values)
    np.testing.assert_allclose(row_roots, np.square(others) @ np.sqrt(expected), rtol=1e-6)


def test_momentum_stays_dense() -> None:
    assert type(spectra_of(Workload("momentum_sgd", 9, 0.9))) is WorkloadSpectra


def test_an_array_and_a_name_give_the_same_optimum() -> None:
    workload = Workload("prefix_sum", 300)
    single = SingleParticipation()
    errors = [optimal(each).total_error(workload, single) for each in (workload, np.tri(300))]
    assert errors[0] == errors[1]
    # From fewer rounds, to the optimum that a search without them finds.
    dense = WorkloadSpectra(np.tri(300))
    assert dense.coarser() is None
    coarser = spectra_of(workload).coarser()
    assert coarser is not None
    assert coarser.num_rounds == 75
