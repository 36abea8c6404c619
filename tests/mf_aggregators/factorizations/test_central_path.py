"""Newton's method along the central path: its slopes, its matrices and wrong duals."""

import itertools
import warnings

import numpy as np
import pytest

from mf_aggregators.factorizations import NotConvergedWarning, _central_path, optimal
from mf_aggregators.factorizations._central_path import CentralPath, MultiplierCone
from mf_aggregators.factorizations._multi_epoch_dual import MultiEpochDual, PatternEntries
from mf_aggregators.factorizations._patterns import PatternLayout
from mf_aggregators.participation import FixedEpochOrder, Participation, SingleParticipation
from mf_aggregators.workloads import Workload

_VARIANTS: list[tuple[bool, PatternEntries]] = [
    (False, "any"),
    (False, "non_negative"),
    (False, "orthogonal"),
    (True, "any"),
]


def _cone(
    num_rounds: int, separation: int, most: int, equal: bool, entries: PatternEntries
) -> MultiplierCone:
    layout = PatternLayout(num_rounds, separation, most)
    return MultiEpochDual(
        np.eye(num_rounds), None, layout, equal_column_norms=equal, pattern_entries=entries
    ).cone()


def _total(matrix: np.ndarray) -> float:
    magnitudes: np.ndarray = np.abs(matrix)
    return float(magnitudes.sum())


def _patterns(num_rounds: int, separation: int, most: int) -> list[list[int]]:
    """The maximal patterns, by enumeration."""
    found = []
    for first in range(num_rounds):
        rounds = list(range(first, num_rounds, separation))[:most]
        if len(rounds) == most or first < separation:
            found.append(rounds)
    return found


def _multipliers(cone: MultiplierCone, free: np.ndarray) -> np.ndarray:
    """V, (n, n) in the order of rounds."""
    order = cone.layout.order
    found = np.zeros((len(order),) * 2)
    entries = cone.spread @ free
    found[order[cone.rows], order[cone.columns]] = entries
    found[order[cone.columns], order[cone.rows]] = entries
    return found


@pytest.mark.short_cases(5)
@pytest.mark.parametrize(("equal", "entries"), _VARIANTS)
@pytest.mark.parametrize("sizes", [(6, 2, 3), (7, 2, 4), (7, 2, 2), (5, 1, 3)])
def test_no_feasible_matrix_costs_more_than_the_cone_says(
    sizes: tuple[int, int, int], equal: bool, entries: PatternEntries
) -> None:
    """tr(V X) <= costs @ z for every V of the cone and feasible X."""
    num_rounds, _, most = sizes
    cone = _cone(*sizes, equal, entries)
    patterns = _patterns(*sizes)
    rng = np.random.default_rng(0)
    for _ in range(200):
        free = np.where(cone.costs > 0.0, rng.exponential(size=cone.size), 0.0)
        pairs = cone.costs == 0.0
        free[pairs] = rng.normal(size=int(np.sum(pairs)))
        while not np.all(cone.walls @ free >= 0.0):
            free[pairs] *= 0.8
        factor = rng.normal(size=(num_rounds, num_rounds))
        gram = factor @ factor.T
        for rounds in patterns:
            for i, j in itertools.permutations(rounds, 2):
                if equal or entries == "orthogonal":
                    gram[i, j] = 0.0
                elif entries == "non_negative":
                    gram[i, j] = abs(gram[i, j])
        if equal:
            scales = 1.0 / np.sqrt(most * np.diagonal(gram))
            gram *= scales * scales[:, np.newaxis]
        else:
            gram /= max(_total(gram[np.ix_(each, each)]) for each in patterns)
        multipliers = _multipliers(cone, free)
        if not _is_one_pattern(cone) or equal or entries == "orthogonal":
            assert np.sum(multipliers * gram) <= cone.costs @ free + 1e-12


def _is_one_pattern(cone: MultiplierCone) -> bool:
    """Whether V being definite is what bounds V[i, j], in the place of walls."""
    return cone.layout.positions == cone.layout.most


@pytest.mark.short_cases(8)
@pytest.mark.parametrize(
    "schema", [SingleParticipation(), FixedEpochOrder(4, 6), FixedEpochOrder(2, 6)], ids=str
)
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
    assert found.optimality_gap <= found.parameters["relative_gap"] <= 5e-6
    if name == "last" and not momentum:
        # Noise on the sum of all rounds alone, to which a client adds up to one in each.
        most = schema.most_participations(num_rounds)
        variance = found.per_round_variance(workload, schema)[-1]
        assert variance == pytest.approx(most**2, rel=2e-5)


@pytest.mark.short_cases(3)
@pytest.mark.parametrize(("equal", "entries"), _VARIANTS)
@pytest.mark.parametrize(
    ("schema", "momentum"), [(FixedEpochOrder(6, 5), 0.9), (FixedEpochOrder(3, 7), 0.0)], ids=str
)
def test_every_variant_of_the_maximum_is_certified(
    schema: FixedEpochOrder, equal: bool, entries: PatternEntries, momentum: float
) -> None:
    workload = Workload("momentum_sgd", 30, momentum)

    found = optimal(
        workload, schema, error="max", equal_column_norms=equal, pattern_entries=entries
    )

    assert found.optimality_gap is not None
    assert found.optimality_gap <= 1e-3
    squares = np.sum(np.square(found.matrix), axis=0)
    gram = found.matrix.T @ found.matrix
    within = [
        gram[i, j]
        for rounds in _patterns(30, schema.separation, schema.epochs)
        for i, j in itertools.combinations(rounds, 2)
    ]
    if equal:
        np.testing.assert_allclose(squares, squares[0], rtol=1e-9)
    if equal or entries == "orthogonal":
        np.testing.assert_allclose(within, 0.0, atol=1e-9)
    elif entries == "non_negative":
        assert np.min(within) >= -1e-9


def _permuted(matrix: np.ndarray, weights: np.ndarray) -> np.ndarray:
    return np.asarray(matrix * np.sqrt(weights[::-1])[:, np.newaxis])


def _of_half_the_total(self: CentralPath, point: _central_path.PathPoint) -> float:
    return 2.0 * point.estimated_bound


def _with_a_sign(
    path: CentralPath, point: _central_path.PathPoint
) -> tuple[np.ndarray, np.ndarray]:
    curvature, slope = _TRUE_CURVATURE(path, point)
    rows = len(point.row_weights)
    curvature[:rows, rows:] *= -1.0
    curvature[rows:, :rows] *= -1.0
    return curvature, slope


_TRUE_CURVATURE = CentralPath._curvature
_MUTANTS = {
    "weights permuted": (_central_path, "weighted", _permuted),
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


@pytest.mark.short_cases(1)
@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize("num_rounds", [80, 77])
def test_the_path_begins_near_the_optimum_of_fewer_rounds(
    equal: bool, num_rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema, steps = FixedEpochOrder(2, 40), []
    true_step = CentralPath.after

    def counted(path: CentralPath, point: _central_path.PathPoint) -> _central_path.PathPoint:
        steps.append(path.cone.layout.num_rounds)
        return true_step(path, point)

    monkeypatch.setattr(CentralPath, "after", counted)
    found = optimal(num_rounds, schema, error="max", equal_column_norms=equal)
    # Momentum has no optimum of fewer rounds that is alike.
    other = optimal(Workload("momentum_sgd", num_rounds, 1e-9), schema, error="max")

    assert found.optimality_gap is not None
    assert found.optimality_gap <= 1e-3
    fewer = [each for each in steps if each < num_rounds]
    assert len(fewer) > steps.count(num_rounds) // 3
    if not equal:
        error = found.max_error(num_rounds, schema)
        assert error == pytest.approx(other.max_error(num_rounds, schema), rel=1e-3)
