"""Duals of optima: roots by blocks, the central path, and wrong duals."""

import itertools
import warnings

import numpy as np
import pytest
import scipy.linalg
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators import workloads
from mf_aggregators.factorizations import NotConvergedWarning, _duals, optimal
from mf_aggregators.factorizations._duals import (
    CentralPath,
    PathPoint,
    _BandedPatternSpectra,
    _MultiplierCone,
    _PatternSpectra,
    _spectra_of,
    _TridiagonalSpectra,
)
from mf_aggregators.factorizations.searches import PatternLayout
from mf_aggregators.participation import FixedEpochOrder, Participation, SingleParticipation
from mf_aggregators.workloads import Workload
from tests.examples import examples
from tests.refusals import refuses


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


@pytest.mark.parametrize(
    ("workload", "separation"),
    [(workloads.prefix_sum(300), 60), (workloads.momentum_sgd(401, 0.9), 100)],
)
def test_workloads_of_few_bands_have_cheap_roots(workload: np.ndarray, separation: int) -> None:
    layout = PatternLayout(len(workload), separation)
    spectra = _spectra_of(workload, workloads.checked(workload).inverse_bands(), layout)
    assert spectra.has_cheap_roots
    _check(spectra, workload, 1)


def test_nearly_singular_factors_are_left_to_the_whole() -> None:
    workload = workloads.prefix_sum(120)
    layout = PatternLayout(120, 60)
    spectra = _spectra_of(workload, workloads.checked(workload).inverse_bands(), layout)
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


def _total(matrix: np.ndarray) -> float:
    magnitudes: np.ndarray = np.abs(matrix)
    return float(magnitudes.sum())


def _classes(num_rounds: int, separation: int) -> list[list[int]]:
    return [list(range(first, num_rounds, separation)) for first in range(separation)]


def _multipliers(cone: _MultiplierCone, free: np.ndarray) -> np.ndarray:
    """V, (n, n) in the order of rounds."""
    order = cone.layout.order
    found = np.zeros((len(order),) * 2)
    entries = cone.entries(free)
    found[order[cone.rows], order[cone.columns]] = entries
    found[order[cone.columns], order[cone.rows]] = entries
    return found


@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize("sizes", [(6, 2), (7, 2), (5, 1)])
def test_no_feasible_matrix_costs_more_than_the_cone_says(
    sizes: tuple[int, int], equal: bool
) -> None:
    """tr(V X) <= costs @ z for every positive definite V of the cone and feasible X."""
    num_rounds, separation = sizes
    cone, classes = _MultiplierCone(PatternLayout(*sizes), equal), _classes(*sizes)
    rng = np.random.default_rng(0)
    for _ in range(200):
        free = np.where(cone.costs > 0.0, rng.exponential(size=len(cone.costs)), 0.0)
        pairs = cone.costs == 0.0
        free[pairs] = rng.normal(size=int(np.sum(pairs)))
        while np.linalg.eigvalsh(_multipliers(cone, free))[0] < 0.0:
            free[pairs] *= 0.8
        factor = rng.normal(size=(num_rounds, num_rounds))
        gram = factor @ factor.T
        if equal:
            for rounds in classes:
                for i, j in itertools.permutations(rounds, 2):
                    gram[i, j] = 0.0
            scales = 1.0 / np.sqrt(-(-num_rounds // separation) * np.diagonal(gram))
            gram *= scales * scales[:, np.newaxis]
        else:
            gram /= max(_total(gram[np.ix_(each, each)]) for each in classes)
        multipliers = _multipliers(cone, free)
        assert np.sum(multipliers * gram) <= cone.costs @ free + 1e-12
        # The slopes of a linear function of V.
        slopes = rng.normal(size=len(cone.rows))
        assert cone.gathered(slopes) @ free == pytest.approx(slopes @ cone.entries(free))


@pytest.mark.short_cases(8)
@pytest.mark.parametrize("schema", [SingleParticipation(), FixedEpochOrder(4, 6)], ids=str)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("name", ["last", "second half", "geometric", "growing"])
def test_weights_of_rounds_reach_the_target_of_the_mean(
    schema: Participation, momentum: float, name: str
) -> None:
    num_rounds = 24
    rounds = np.arange(num_rounds)
    weights = {
        "last": 1.0 * (rounds == num_rounds - 1),
        "second half": 1.0 * (rounds >= num_rounds // 2),
        "geometric": 0.3**rounds,
        "growing": rounds + 1.0,
    }[name]
    workload = Workload("momentum_sgd", num_rounds, momentum)

    found = optimal(workload, schema, error=weights)

    assert found.optimality_gap is not None
    assert found.optimality_gap <= float(str(found.parameters["relative_gap"])) <= 5e-6
    if name == "last" and not momentum:
        # Noise on the sum of all rounds alone, to which a client adds up to one in each.
        most = schema.most_participations(num_rounds)
        variance = found.per_round_variance(workload, schema)[-1]
        assert variance == pytest.approx(most**2, rel=2e-5)


@pytest.mark.short_cases(3)
@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize(
    ("schema", "momentum"), [(FixedEpochOrder(6, 5), 0.9), (FixedEpochOrder(5, 7), 0.0)], ids=str
)
def test_every_variant_of_the_maximum_is_certified(
    schema: FixedEpochOrder, equal: bool, momentum: float
) -> None:
    workload = Workload("momentum_sgd", 30, momentum)

    found = optimal(workload, schema, error="max", equal_column_norms=equal)

    assert found.optimality_gap is not None
    assert found.optimality_gap <= 1e-3
    squares = np.sum(np.square(found.matrix), axis=0)
    gram = found.matrix.T @ found.matrix
    within = [
        gram[i, j]
        for rounds in _classes(30, schema.separation)
        for i, j in itertools.combinations(rounds, 2)
    ]
    if equal:
        np.testing.assert_allclose(squares, squares[0], rtol=1e-9)
    np.testing.assert_allclose(within, 0.0, atol=1e-9)


def _permuted(matrix: np.ndarray, weights: np.ndarray) -> np.ndarray:
    return np.asarray(matrix * np.sqrt(weights[::-1])[:, np.newaxis])


def _of_half_the_total(self: CentralPath, point: PathPoint) -> float:
    return 2.0 * point.estimated_bound


def _with_a_sign(path: CentralPath, point: PathPoint) -> tuple[np.ndarray, np.ndarray]:
    curvature, slope = _TRUE_CURVATURE(path, point)
    rows = len(point.row_weights)
    curvature[:rows, rows:] *= -1.0
    curvature[rows:, :rows] *= -1.0
    return curvature, slope


_TRUE_CURVATURE = CentralPath._curvature
_MUTANTS = {
    "weights permuted": (_duals, "weighted", _permuted),
    "weights scaled": (CentralPath, "bound_from_below", _of_half_the_total),
    "a sign": (CentralPath, "_curvature", _with_a_sign),
}


@pytest.mark.parametrize("mutant", [None, *_MUTANTS])
def test_a_wrong_dual_is_caught(mutant: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It either bounds what another matrix is below of, or does not certify the target."""
    schema = FixedEpochOrder(3, 4)
    known = optimal(12, schema, error="max", relative_gap=1e-6).max_error(12, schema) ** 2
    if mutant is not None:
        monkeypatch.setattr(*_MUTANTS[mutant])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotConvergedWarning)
        found = optimal(12, schema, error="max", max_evaluations=100)

    # Nothing is certified by a bound that is above the error of the matrix itself.
    gap = np.inf if found.optimality_gap is None else found.optimality_gap
    error = found.max_error(12, schema) ** 2
    is_sound = error / (1.0 + gap) <= known
    assert (is_sound and gap <= 1e-3) == (mutant is None)


@given(
    st.floats(-100.0, 100.0),
    st.floats(0.0, 15.0),
    st.lists(st.floats(0.0, 1.0), min_size=1, max_size=20),
)
def test_sums_are_inverse_roots_between_their_bounds(
    digits: float, digits_of_condition: float, places: list[float]
) -> None:
    least = 10.0**digits
    largest = least * 10.0**digits_of_condition
    shifts, weights = _duals._inverse_square_root(least, largest)
    x = least * 10.0 ** (digits_of_condition * np.array(places))
    found = np.sum(weights / (x[:, np.newaxis] + shifts), axis=1)
    np.testing.assert_allclose(found, x**-0.5, rtol=1e-12)
    # (H + shift I)^-1 is that of a positive definite matrix, and nothing cancels.
    assert np.all(shifts > 0.0)
    assert np.all(weights > 0.0)


@pytest.mark.parametrize(
    ("least", "largest"),
    [(0.0, 1.0), (-1.0, 1.0), (2.0, 1.0), (1.0, np.inf), (np.nan, 1.0), (1e-30, 1e30)],
)
def test_bounds_that_allow_no_sum_are_refused(least: float, largest: float) -> None:
    with refuses("bounds"):
        _duals._inverse_square_root(least, largest)


@given(st.integers(1, 7), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_blocks_and_the_whole_are_those_of_a_dense_matrix(
    num_blocks: int, size: int, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    diagonal = generator.uniform(-1.0, 1.0, (num_blocks, size, size))
    diagonal += diagonal.transpose(0, 2, 1) + 5.0 * size * np.eye(size)
    above = generator.uniform(-1.0, 1.0, (num_blocks - 1, size, size))
    whole = np.zeros((num_blocks * size, num_blocks * size))
    for k, block in enumerate(diagonal):
        here = slice(k * size, (k + 1) * size)
        whole[here, here] = block
        if k + 1 < num_blocks:
            after = slice((k + 1) * size, (k + 2) * size)
            whole[here, after], whole[after, here] = above[k], above[k].T
    values, vectors = np.linalg.eigh(whole)
    assert values[-1] <= _duals._largest_row_sum(diagonal, above) * (1 + 1e-12)
    expected = (vectors / np.sqrt(values)) @ vectors.T
    found = _duals._inverse_root_blocks(diagonal, above, 0.5 * values[0])
    for k, block in enumerate(found):
        here = slice(k * size, (k + 1) * size)
        np.testing.assert_allclose(block, expected[here, here], atol=1e-12)
    found = _duals._inverse_root(diagonal, above, 0.5 * values[0])
    np.testing.assert_allclose(found, expected, atol=1e-12)
