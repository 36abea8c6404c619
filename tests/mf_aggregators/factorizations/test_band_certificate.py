"""The certificate of banded matrices, attacked: it may never be above what is really possible."""

import warnings

import numpy as np
import pytest
import scipy.linalg
import scipy.optimize
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators import linear_algebra, workloads
from mf_aggregators.factorizations import (
    NotConvergedWarning,
    _band_certificate,
    banded,
    optimal,
)
from mf_aggregators.factorizations._band_certificate import BandedWorkload
from mf_aggregators.factorizations.factorization import BandedFactorization, bands_of_matrix
from mf_aggregators.factorizations.searches import PatternLayout
from mf_aggregators.linear_algebra import BandedMatrix, column_sums, spread_columns
from mf_aggregators.participation import SingleParticipation
from mf_aggregators.workloads import Workload
from tests.examples import examples, of_many


def _workload(data: st.DataObject, num_rounds: int, generator: np.random.Generator) -> Workload:
    momentum = data.draw(st.sampled_from([0.0, 0.5, 0.95]))
    rates = data.draw(
        st.sampled_from([None, tuple(10.0 ** generator.uniform(-1.0, 1.0, num_rounds))])
    )
    return Workload("momentum_sgd", num_rounds, momentum, rates)


def _candidate(
    data: st.DataObject, num_rounds: int, num_bands: int, generator: np.random.Generator
) -> np.ndarray:
    """A matrix near the optimum of this or of another workload, far from it, or nearly singular."""
    kind = data.draw(st.sampled_from(["root", "optimum", "another", "any", "ill-conditioned"]))
    in_band = np.tri(num_rounds, num_bands, dtype=bool)
    bands = np.where(in_band, linear_algebra.square_root_coefficients(num_bands), 0.0)
    if kind in ("optimum", "another"):
        momentum = 0.0 if kind == "optimum" else 0.9
        found = banded(Workload("momentum_sgd", num_rounds, momentum), num_bands)
        bands = found.arrays()["bands"].copy()
    if kind == "any":
        bands = np.where(in_band, generator.normal(size=in_band.shape), 0.0)
        bands[:, 0] = generator.uniform(0.5, 2.0, num_rounds)
    if kind == "ill-conditioned":
        # Singular values of C over twelve orders of magnitude.
        bands = bands * 10.0 ** generator.uniform(-3.0, 3.0, (num_rounds, 1))
    size = data.draw(st.sampled_from([0.0, 1e-8, 1e-4, 1e-2, 0.3]))
    return np.asarray(bands * (1.0 + size * generator.normal(size=bands.shape)))


def _layout(data: st.DataObject, num_rounds: int, num_bands: int) -> PatternLayout:
    if data.draw(st.booleans()):
        return PatternLayout(num_rounds, num_rounds)
    return PatternLayout(num_rounds, data.draw(st.integers(num_bands, num_rounds)))


def _feasible(bands: np.ndarray, layout: PatternLayout) -> np.ndarray:
    scales = np.sqrt(layout.totals(column_sums(np.square(bands))))
    return np.asarray(bands * spread_columns(1.0 / scales, bands.shape[1]))


def _error(bands: np.ndarray, workload: np.ndarray) -> float:
    decoder = scipy.linalg.solve_triangular(
        BandedFactorization(bands).strategy_matrix(), workload.T, lower=True, trans="T"
    )
    return float(np.sum(np.square(decoder)))


def _least_error(
    num_rounds: int, num_bands: int, layout: PatternLayout, workload: Workload
) -> float:
    """An error that a feasible matrix has, whose bands all searches may have found."""
    participation = SingleParticipation()
    if layout.positions == 1:
        with warnings.catch_warnings():
            # Any feasible matrix will do, and learning rates over two decades take many steps.
            warnings.simplefilter("ignore", NotConvergedWarning)
            found = banded(workload, num_bands, relative_gap=1e-9, max_evaluations=150)
        assert found.sensitivity(participation) == pytest.approx(1.0, rel=1e-12)
        return _error(found.arrays()["bands"], workload.matrix() / workload.largest_entry())
    root = np.where(
        np.tri(num_rounds, num_bands, dtype=bool),
        linear_algebra.square_root_coefficients(num_bands),
        0.0,
    )
    return _error(_feasible(root, layout), workload.matrix() / workload.largest_entry())


def _drawn(
    data: st.DataObject, num_rounds: int, most_bands: int
) -> tuple[np.random.Generator, Workload, PatternLayout, np.ndarray]:
    """A workload, a constraint and a matrix that keeps it."""
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    num_bands = data.draw(st.integers(1, min(num_rounds, most_bands)))
    workload = _workload(data, num_rounds, generator)
    layout = _layout(data, num_rounds, num_bands)
    candidate = _candidate(data, num_rounds, num_bands, generator)
    return generator, workload, layout, _feasible(candidate, layout)


def _attack(num_rounds: int, data: st.DataObject) -> None:
    _, workload, layout, bands = _drawn(data, num_rounds, 40)
    num_bands = bands.shape[1]
    prepared = BandedWorkload.of(workload, num_bands)
    bound = prepared.lower_bound(bands, layout)
    own = _error(bands, workload.matrix() / workload.largest_entry())
    # What is compared with has errors of floats itself.
    assert 0.0 <= bound <= own * (1.0 + 1e-12)
    assert bound <= _least_error(num_rounds, num_bands, layout, workload) * (1.0 + 1e-12)


@given(st.integers(1, 60), st.data())
@settings(max_examples=examples(100), deadline=None)
def test_no_bound_is_above_the_error_of_a_feasible_matrix(
    num_rounds: int, data: st.DataObject
) -> None:
    _attack(num_rounds, data)


@pytest.mark.parametrize("num_rounds", [369, 391])
def test_nothing_is_known_of_a_matrix_whose_inverse_is_beyond_floats(num_rounds: int) -> None:
    generator = np.random.default_rng(0)
    in_band = np.tri(num_rounds, 8, dtype=bool)
    bands = np.where(in_band, generator.normal(size=in_band.shape), 0.0)
    bands[:, 0] = generator.uniform(0.5, 2.0, num_rounds)
    layout = PatternLayout(num_rounds, 8)
    feasible = _feasible(bands, layout)
    prepared = BandedWorkload.of(Workload("momentum_sgd", num_rounds, 0.0), 8)
    assert prepared.lower_bound(feasible, layout) == 0.0


@pytest.mark.long
@given(st.one_of(st.integers(1, 60), st.integers(61, 512)), st.data())
@settings(max_examples=of_many(1000, 60), deadline=None)
def test_no_bound_is_above_the_error_of_a_feasible_matrix_in_many_cases(
    num_rounds: int, data: st.DataObject
) -> None:
    _attack(num_rounds, data)


@given(st.integers(2, 40), st.data())
@settings(max_examples=examples(100), deadline=None)
def test_bands_bound_the_trace_of_the_root_from_below(num_rounds: int, data: st.DataObject) -> None:
    """The theorem itself: against eigenvalues, for E that are not even those of a search."""
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    num_bands = data.draw(st.integers(1, num_rounds))
    workload = Workload("momentum_sgd", num_rounds, data.draw(st.sampled_from([0.0, 0.9])))
    bands = _feasible(
        np.where(
            np.tri(num_rounds, num_bands), linear_algebra.square_root_coefficients(num_bands), 0
        )
        * (1.0 + 0.1 * generator.normal(size=(num_rounds, num_bands))),
        PatternLayout(num_rounds, num_rounds),
    )
    prepared = BandedWorkload.of(workload, num_bands)
    point = _band_certificate._Point(bands, prepared)
    size = data.draw(st.sampled_from([1e-6, 1e-3, 0.03, 0.3, 1.0]))
    dual = point.dual
    noise = np.tril(generator.normal(size=(num_rounds, num_rounds)))
    noise = bands_of_matrix(noise, num_bands)
    removed = BandedMatrix(
        dual.lower, dual.upper, size * dual.rows * BandedMatrix.symmetric(noise).rows
    )
    half = point.root.transposed().times(removed)
    epsilon = _band_certificate._epsilon(point, removed, half.times(point.root))
    matrix = workload.matrix() / workload.largest_entry()
    strategy = BandedFactorization(bands).strategy_matrix()
    weighted = np.linalg.solve((strategy.T @ strategy).T, matrix.T).T
    full = weighted.T @ weighted
    dense = removed.dense_rows(0, num_rounds)[:, removed.lower :][:, :num_rounds]
    least = float(np.linalg.eigvalsh(full - dense)[0])
    if epsilon is None:
        return
    assert least >= -1e-9 * np.max(full)
    spectrum = np.linalg.eigvalsh(matrix @ (full - dense) @ matrix.T)
    trace = float(np.sum(np.sqrt(np.maximum(spectrum, 0.0))))
    bound = _band_certificate._bound(point, removed, half, 1.0, epsilon)
    assert bound <= trace**2 * (1.0 + 1e-9)
    if size <= 1e-6:
        # Nothing is lost of the first order.
        assert bound == pytest.approx(trace**2, rel=1e-7)


def test_the_gap_is_of_second_order_in_the_distance_from_the_optimum() -> None:
    num_rounds, num_bands = 200, 12
    workload = Workload("prefix_sum", num_rounds)
    best = banded(workload, num_bands, relative_gap=1e-10).arrays()["bands"]
    generator = np.random.default_rng(0)
    direction = generator.normal(size=best.shape) * np.tri(num_rounds, num_bands)
    layout = PatternLayout(num_rounds, num_rounds)
    prepared = BandedWorkload.of(workload, num_bands)
    gaps = []
    for size in (1e-4, 1e-5):
        bands = _feasible(best + size * direction, layout)
        error = _error(bands, workload.matrix())
        gaps.append(error / prepared.lower_bound(bands, layout) - 1.0)
    assert gaps[0] / gaps[1] == pytest.approx(100.0, rel=0.2)


@pytest.mark.parametrize("dense", [False, True])
def test_workloads_of_dense_inverses_are_certified_as_well(dense: bool) -> None:
    generator = np.random.default_rng(3)
    matrix = np.tril(generator.normal(size=(30, 30))) * 0.1 + np.eye(30)
    if not dense:
        matrix = workloads.momentum_sgd(30, 0.9)
    assert (workloads.checked(matrix).inverse_bands() is None) == dense
    found = banded(matrix, 6, relative_gap=1e-8)
    assert found.optimality_gap is not None
    assert found.optimality_gap <= 1e-8


@pytest.mark.parametrize(("num_rounds", "seed"), [(200, 2), (500, 0)])
def test_rates_that_change_by_decades_from_round_to_round_give_no_false_bound(
    num_rounds: int, seed: int
) -> None:
    """Covariances of blocks are off by percents there, at a condition of 1e9."""
    rates = tuple(10.0 ** np.random.default_rng(seed).uniform(-8.0, 0.0, num_rounds))
    workload = Workload("momentum_sgd", num_rounds, 0.9, rates)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotConvergedWarning)
        found = banded(workload, 4, max_evaluations=60, relative_gap=1e-3)
    assert found.optimality_gap is not None
    stated = np.sum(found.squared_decoder_rows(workload)) / (1.0 + found.optimality_gap)
    assert stated <= np.sum(_squared_rows(found.bands, workload.matrix()))


def _attack_last_rounds(num_rounds: int, data: st.DataObject) -> None:
    generator, workload, layout, bands = _drawn(data, num_rounds, 12)
    num_bands = bands.shape[1]
    decades = data.draw(st.sampled_from([0.0, 2.0, 8.0]))
    weights = 10.0 ** generator.uniform(-decades, 0.0, num_rounds)
    num_last = data.draw(st.integers(num_bands, num_rounds))
    bound = BandedWorkload.of(workload, num_bands).lower_bound_by_last_rounds(
        bands, layout, weights, num_last
    )
    own = _squared_rows(bands, workload.matrix() / workload.largest_entry())
    assert 0.0 <= bound <= np.max(own) * (1.0 + 1e-12)
    # Any weights bound the maximum, and those of the last rounds are what was bounded.
    size = num_last + (num_rounds - num_last) % num_bands
    last = np.where(np.arange(num_rounds) < num_rounds - size, 0.0, weights)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotConvergedWarning)
        found = banded(
            workload,
            num_bands,
            layout.positions == 1,
            error=np.maximum(last, 1e-7 * np.max(last)),
            relative_gap=1e-6,
            max_evaluations=100,
        )
    # Any feasible matrix will do, whatever schema it was made for.
    best = _feasible(found.arrays()["bands"], layout)
    rows = _squared_rows(best, workload.matrix() / workload.largest_entry())
    assert bound <= float(last @ rows / np.sum(last)) * (1.0 + 1e-7)


def _squared_rows(bands: np.ndarray, workload: np.ndarray) -> np.ndarray:
    decoder = scipy.linalg.solve_triangular(
        BandedFactorization(bands).strategy_matrix(), workload.T, lower=True, trans="T"
    )
    return np.asarray(np.sum(np.square(decoder), axis=0))


@given(st.integers(1, 48), st.data())
@settings(max_examples=examples(60), deadline=None)
def test_no_bound_by_last_rounds_is_above_the_error_of_a_feasible_matrix(
    num_rounds: int, data: st.DataObject
) -> None:
    _attack_last_rounds(num_rounds, data)


@pytest.mark.long
@given(st.integers(1, 200), st.data())
@settings(max_examples=of_many(1000, 60), deadline=None)
def test_no_bound_by_last_rounds_is_above_the_error_in_many_cases(
    num_rounds: int, data: st.DataObject
) -> None:
    _attack_last_rounds(num_rounds, data)


@pytest.mark.parametrize(("num_bands", "num_blocks"), [(1, 5), (2, 9), (5, 4)])
def test_blocks_before_the_last_add_one_each_to_the_bound_of_a_block(
    num_bands: int, num_blocks: int
) -> None:
    """The closed form for prefix sums, by an eigenvalue problem of b rounds."""
    workload = Workload("prefix_sum", num_bands)
    best = optimal(workload, error="max", equal_column_norms=True, relative_gap=1e-9)
    strategy = best.strategy_matrix()
    rows = np.linalg.solve(strategy.T @ strategy, workload.matrix().T).T
    # The weights of the best dual: those that leave it diagonal.
    above = np.triu_indices(num_bands, 1)
    products = np.array([np.outer(row, row)[above] for row in rows]).T
    system = np.concatenate([products, np.ones((1, num_bands))])
    weights, _ = scipy.optimize.nnls(system, np.eye(len(system))[-1])
    blocks = scipy.linalg.block_diag(*[strategy] * num_blocks)
    num_rounds = num_blocks * num_bands
    prepared = BandedWorkload.of(Workload("prefix_sum", num_rounds), num_bands)
    bound = prepared.lower_bound_by_last_rounds(
        bands_of_matrix(blocks, num_bands),
        PatternLayout(num_rounds, num_rounds),
        np.tile(np.maximum(weights, 1e-12), num_blocks),
        num_bands,
    )
    largest = np.max(np.sum(np.square(np.linalg.solve(strategy.T, workload.matrix().T)), axis=0))
    assert bound == pytest.approx(num_blocks - 1 + largest, rel=1e-6)


def test_nothing_is_claimed_of_the_last_rounds_beyond_floats() -> None:
    bands = np.where(np.tri(400, 2, dtype=bool), np.array([1.0, 50.0]), 0.0)
    prepared = BandedWorkload.of(Workload("prefix_sum", 400), 2)
    bound = prepared.lower_bound_by_last_rounds(bands, PatternLayout(400, 400), np.ones(400), 400)
    assert bound == 0.0
