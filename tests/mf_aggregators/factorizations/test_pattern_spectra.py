"""Roots by blocks of classes against the root of one dense matrix."""

import numpy as np
import pytest
import scipy.linalg
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators import workloads
from mf_aggregators.factorizations import optimal
from mf_aggregators.factorizations._duals import (
    _BandedPatternSpectra,
    _PatternSpectra,
    _spectra_of,
    _TridiagonalSpectra,
)
from mf_aggregators.factorizations.searches import PatternLayout
from mf_aggregators.participation import FixedEpochOrder, SingleParticipation
from tests.examples import examples


def _factors(layout: PatternLayout, generator: np.random.Generator) -> np.ndarray:
    """Lower-triangular blocks, the identity's where no round is."""
    shape = (layout.separation, layout.positions, layout.positions)
    both = layout.exists[:, :, np.newaxis] & layout.exists[:, np.newaxis]
    factors = np.where(both, np.tril(generator.uniform(-0.5, 0.5, shape), -1), 0.0)
    diagonal = np.where(layout.exists, generator.uniform(0.5, 2.0, layout.exists.shape), 1.0)
    positions = np.arange(layout.positions)
    factors[:, positions, positions] = diagonal
    return factors


def _root(workload: np.ndarray, layout: PatternLayout, factors: np.ndarray) -> np.ndarray:
    """The (n, n) root of L^T A^T A L, rounds by class, by singular values of A L."""
    blocks = [
        block[np.ix_(there, there)] for block, there in zip(factors, layout.exists, strict=True)
    ]
    product = workload[:, layout.rounds[layout.exists]] @ scipy.linalg.block_diag(*blocks)
    _, values, vectors = scipy.linalg.svd(product)
    return (vectors.T * values) @ vectors


def _check(spectra: _PatternSpectra, workload: np.ndarray, seed: int) -> None:
    layout = spectra._layout
    factors = _factors(layout, np.random.default_rng(seed))
    expected = _root(workload, layout, factors)
    root = spectra.root(factors)
    assert root.trace == pytest.approx(np.trace(expected), rel=1e-9)
    largest = np.max(np.abs(expected))
    first = 0
    for block, there in zip(root.blocks, layout.exists, strict=True):
        last = first + int(np.sum(there))
        np.testing.assert_allclose(
            block[np.ix_(there, there)], expected[first:last, first:last], atol=1e-8 * largest
        )
        first = last
    whole = spectra.whole(root, factors)
    np.testing.assert_allclose(whole, expected, atol=1e-8 * largest)


@given(st.data())
@settings(max_examples=examples(40), deadline=None)
def test_roots_by_blocks_are_those_of_the_whole(data: st.DataObject) -> None:
    # D of one to three bands beside the diagonal, and classes of which some are shorter.
    reach = data.draw(st.integers(1, 3))
    separation = data.draw(st.integers(2 * reach + 1, 14))
    num_rounds = data.draw(st.integers(separation + 1, 5 * separation))
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    bands = generator.uniform(-0.4, 0.4, (num_rounds, reach + 1))
    bands[:, 0] = generator.uniform(0.5, 2.0, num_rounds)
    inverse = np.zeros((num_rounds, num_rounds))
    for t in range(reach + 1):
        bands[:t, t] = 0.0
        np.fill_diagonal(inverse[t:], bands[t:, t])
    workload = np.linalg.inv(inverse)
    layout = PatternLayout(num_rounds, separation)
    seed = data.draw(st.integers(0, 2**32 - 1))
    _check(_BandedPatternSpectra(workload, bands, layout), workload, seed)
    _check(_PatternSpectra(workload, layout), workload, seed)


@given(st.integers(2, 60), st.booleans(), st.integers(0, 2**32 - 1))
@settings(max_examples=examples(60), deadline=None)
def test_tridiagonal_spectra_are_those_of_the_dense_workload(
    num_rounds: int, has_rates: bool, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    rates = tuple(generator.uniform(0.1, 1.0, num_rounds)) if has_rates else None
    workload = workloads.Workload("momentum_sgd", num_rounds, 0.0, rates)
    layout, matrix = PatternLayout(num_rounds, num_rounds), workload.matrix()
    found, dense = (
        _spectra_of(matrix, workload.inverse_bands(), layout),
        _PatternSpectra(matrix, layout),
    )
    assert isinstance(found, _TridiagonalSpectra)
    factors = _factors(layout, generator)
    for weights in (None, generator.uniform(0.1, 10.0, num_rounds)):
        root, expected = found.root(factors, weights), dense.root(factors, weights)
        assert root.trace == pytest.approx(expected.trace, rel=1e-9)
        np.testing.assert_allclose(root.blocks, expected.blocks, rtol=1e-6)
        if root.rows is not None and expected.rows is not None:
            np.testing.assert_allclose(root.rows, expected.rows, rtol=1e-6)
        norms = [each.nuclear_norm(factors, weights) for each in (found, dense)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-10)
        assert norms[0] <= root.trace * (1.0 + 1e-12)


def test_an_array_and_a_name_give_the_same_optimum() -> None:
    errors = [optimal(each).total_error(300, SingleParticipation()) for each in (300, np.tri(300))]
    assert errors[0] == pytest.approx(errors[1], rel=1e-12)


@pytest.mark.parametrize(
    ("workload", "separation"),
    [(workloads.prefix_sum(300), 60), (workloads.momentum_sgd(401, 0.9), 100)],
)
def test_workloads_of_few_bands_have_cheap_roots(workload: np.ndarray, separation: int) -> None:
    layout = PatternLayout(len(workload), separation)
    spectra = _spectra_of(workload, workloads.inverse_bands(workload), layout)
    assert spectra.has_cheap_roots
    _check(spectra, workload, 1)


def test_nearly_singular_factors_are_left_to_the_whole() -> None:
    workload = workloads.prefix_sum(120)
    layout = PatternLayout(120, 60)
    spectra = _spectra_of(workload, workloads.inverse_bands(workload), layout)
    factors = _factors(layout, np.random.default_rng(0))
    assert spectra.root(factors).half is None
    factors[7, 1, 1] = 1e-9
    assert spectra.root(factors).half is not None
    expected = _root(workload, layout, factors)
    root = spectra.root(factors)
    assert root.trace == pytest.approx(np.trace(expected), rel=1e-6)
    largest = np.max(np.abs(expected))
    np.testing.assert_allclose(spectra.whole(root, factors), expected, atol=1e-6 * largest)


@pytest.mark.short_cases(1)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_searches_by_blocks_and_by_the_whole_find_one_optimum(
    momentum: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = workloads.momentum_sgd(240, momentum) if momentum else workloads.prefix_sum(240)
    participation = FixedEpochOrder(3, 100)
    found = []
    for is_faster in (True, False):
        monkeypatch.setattr(_BandedPatternSpectra, "is_faster", lambda *_, is_so=is_faster: is_so)
        best = optimal(workload, participation, relative_gap=1e-5)
        assert best.optimality_gap is not None
        assert best.optimality_gap <= 1e-5
        found.append(best.total_error(workload, participation))
    assert found[0] == pytest.approx(found[1], rel=1e-5)
