"""Optima against printed values, closed forms, other solvers and bounds made anew."""

import itertools
import sys
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import scipy.linalg
import scipy.optimize
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators import workloads
from mf_aggregators.factorizations import (
    DenseFactorization,
    Factorization,
    NotConvergedWarning,
    banded,
    identity,
    optimal,
)
from mf_aggregators.factorizations.optimal import (
    _lower_triangular_factor,
    _ObjectiveBySlopes,
    _OptimumSearch,
    _with_walls,
)
from mf_aggregators.factorizations.searches import Objective, minimise
from mf_aggregators.participation import (
    FixedEpochOrder,
    MinSeparation,
    Participation,
    SingleParticipation,
)
from tests.examples import examples
from tests.mf_aggregators import brute_force
from tests.refusals import refuses

_SINGLE = SingleParticipation()


@pytest.mark.parametrize(
    ("num_rounds", "printed"),
    [
        (256, 40.4),
        (512, 62.0),
        pytest.param(1024, 94.6, marks=pytest.mark.long),
        pytest.param(2048, 143.6, marks=pytest.mark.long),
    ],
)
def test_prefix_sums_reach_the_printed_errors(num_rounds: int, printed: float) -> None:
    """Denisov et al. Table 2; the prefix-sum paper's Table 1."""
    workload = workloads.prefix_sum(num_rounds)
    factorization = optimal(workload)
    assert round(factorization.total_error(workload, _SINGLE), 1) == printed
    assert factorization.optimality_gap is not None
    assert factorization.optimality_gap <= 1e-6
    assert factorization.sensitivity(_SINGLE) == pytest.approx(1.0, rel=1e-12)


def test_two_rounds_have_a_closed_form() -> None:
    # X = [[1, c], [c, 1]] gives tr(A^T A X^-1) = (3 - 2 c) / (1 - c^2), least at
    # c = (3 - sqrt(5)) / 2, where it is the square of the golden ratio.
    workload = workloads.prefix_sum(2)
    factorization = optimal(workload, relative_gap=1e-12)
    golden = (1 + np.sqrt(5)) / 2
    assert factorization.total_error(workload, _SINGLE) == pytest.approx(golden, rel=1e-10)


@given(st.integers(1, 12), st.floats(0.0, 0.97), st.integers(0, 2**32 - 1))
@settings(max_examples=examples(40))
def test_the_certificate_holds_for_momentum_and_learning_rates(
    num_rounds: int, momentum: float, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    workload = workloads.momentum_sgd(num_rounds, momentum, generator.uniform(0.2, 1, num_rounds))
    with warnings.catch_warnings():
        warnings.simplefilter("error", NotConvergedWarning)
        factorization = optimal(workload)
    decoder = factorization.decoder_matrix(workload)
    np.testing.assert_allclose(decoder @ factorization.strategy_matrix(), workload, atol=1e-9)
    # Nothing feasible is better than the certified bound: not the identity, not a
    # perturbation of the optimum with columns of norm one.
    error = factorization.total_error(workload, _SINGLE) ** 2
    bound = error / (1 + (factorization.optimality_gap or 0.0)) * (1 - 1e-9)
    assert identity(num_rounds).total_error(workload, _SINGLE) ** 2 >= bound
    for size in (1e-3, 1e-1):
        strategy = factorization.strategy_matrix()
        strategy = strategy + size * np.tril(generator.normal(size=strategy.shape))
        strategy /= np.linalg.norm(strategy, axis=0)
        if np.min(np.abs(np.diagonal(strategy))) > 1e-6:
            perturbed = np.linalg.norm(np.linalg.solve(strategy.T, workload.T)) ** 2
            assert perturbed >= bound


def test_a_solver_that_is_stopped_says_so_and_states_its_gap() -> None:
    workload = workloads.prefix_sum(64)
    with pytest.warns(NotConvergedWarning):
        factorization = optimal(workload, max_evaluations=1)
    assert factorization.optimality_gap is not None
    assert factorization.optimality_gap > 1e-6
    best = optimal(workload).total_error(workload, _SINGLE)
    stated = factorization.total_error(workload, _SINGLE) ** 2 / (1 + factorization.optimality_gap)
    assert stated <= best**2 * (1 + 1e-6)


def test_clients_that_return_are_refused() -> None:
    with refuses("participation"):
        optimal(workloads.prefix_sum(8), MinSeparation(2))
    # A schema under which nobody can return is single participation.
    optimal(workloads.prefix_sum(8), MinSeparation(8))


# Rounds, epochs and separation: classes of one length and shorter ones.
_SIZES = [(4, 2, 2), (5, 3, 2), (6, 3, 2), (5, 5, 1), (6, 2, 4)]


def _random_workload(num_rounds: int, seed: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return np.tril(generator.normal(size=(num_rounds, num_rounds))) + 2.0 * np.eye(num_rounds)


def _within_patterns(num_rounds: int, participation: FixedEpochOrder) -> np.ndarray:
    """(n, n) bool: the pairs of different rounds that some pattern holds."""
    lags = np.subtract.outer(np.arange(num_rounds), np.arange(num_rounds))
    repeats, rest = np.divmod(np.abs(lags), participation.separation)
    held: np.ndarray = (rest == 0) & (repeats > 0) & (repeats < participation.epochs)
    return held


def _other_optimum(
    workload: np.ndarray,
    participation: FixedEpochOrder,
    equal_diagonal: bool = False,
) -> float:
    """The least tr(A^T A X^-1), by sequential quadratic programming over the entries of X.

    An entry within a pattern is the difference of two non-negative variables, which makes
    the sums of magnitudes linear. The patterns are enumerated from their definition.
    """
    num_rounds = workload.shape[0]
    gram = workload.T @ workload
    within = _within_patterns(num_rounds, participation)
    # Basis matrices of X, with how much each adds to the sum of a pattern.
    basis, lower = [], []
    if equal_diagonal:
        basis, lower = [np.eye(num_rounds)], [1e-6]
    else:
        for i in range(num_rounds):
            basis.append(np.diag(np.eye(num_rounds)[i]))
            lower.append(1e-6)
    diagonals = len(basis)
    for i, j in itertools.combinations(range(num_rounds), 2):
        pair = np.zeros((num_rounds, num_rounds))
        pair[i, j] = pair[j, i] = 1.0
        if not within[i, j]:
            basis.append(pair)
            lower.append(-np.inf)
        elif not equal_diagonal:
            basis += [pair, -pair]
            lower += [0.0, 0.0]
    stacked = np.array(basis)
    patterns = list(brute_force.patterns(participation, num_rounds))
    sums = np.array([np.abs(stacked[:, p][:, :, p]).sum(axis=(1, 2)) for p in patterns])

    def log_error(free: np.ndarray) -> tuple[float, np.ndarray]:
        x = np.tensordot(free, stacked, axes=1)
        if np.linalg.eigvalsh(x)[0] <= 1e-10:
            return 1e3, np.zeros_like(free)
        inverse = np.linalg.inv(x)
        value = float(np.sum(gram * inverse))
        slope = -inverse @ gram @ inverse
        return np.log(value), np.tensordot(stacked, slope, axes=2) / value

    start = np.zeros(len(stacked))
    start[:diagonals] = 0.9 / max(len(pattern) for pattern in patterns)
    start[diagonals:] = np.where(np.isfinite(lower[diagonals:]), 1e-4, 0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        found = scipy.optimize.minimize(
            log_error,
            start,
            jac=True,
            method="SLSQP",
            bounds=[(bound, None) for bound in lower],
            constraints=[{"type": "ineq", "fun": lambda x: 1.0 - sums @ x, "jac": lambda x: -sums}],
            options={"maxiter": 2000, "ftol": 1e-14},
        ).x
    found = np.maximum(found, lower)
    return float(np.exp(log_error(found / max(1.0, float(np.max(sums @ found))))[0]))


def test_another_solver_finds_nothing_better() -> None:
    schema, workload = FixedEpochOrder(1, 5), _random_workload(5, 0)
    squared = optimal(workload, schema, relative_gap=1e-9).total_error(workload, schema) ** 2
    assert squared == pytest.approx(_other_optimum(workload, schema), rel=1e-6)


def _let_searches_start_from_bands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the number of participations, and however good the diagonal is."""
    module = sys.modules[_OptimumSearch.__module__]
    monkeypatch.setattr(module, "_MANY_PARTICIPATIONS", 2)
    monkeypatch.setattr(_OptimumSearch, "_run_from_diagonal", _one_evaluation)


def _one_evaluation(search: _OptimumSearch) -> None:
    weights = search._dual.weights_mask.astype(np.float64)
    search._evaluate(weights, np.zeros(search._dual.pair_exists.shape), None)


@pytest.fixture(params=[True, False], ids=["from bands", "from the diagonal"])
def _start(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Either start of the search, where classes are one pattern each."""
    if request.param:
        _let_searches_start_from_bands(monkeypatch)


@pytest.mark.short_cases(4)
@pytest.mark.usefixtures("_start")
@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize(("num_rounds", "epochs", "separation"), _SIZES)
def test_another_solver_finds_the_same_optimum(
    num_rounds: int, epochs: int, separation: int, equal: bool
) -> None:
    participation = FixedEpochOrder(epochs, separation)
    for workload in (
        workloads.prefix_sum(num_rounds),
        workloads.momentum_sgd(num_rounds, 0.9),
        _random_workload(num_rounds, 7),
    ):
        factorization = optimal(workload, participation, equal_column_norms=equal)
        error = factorization.total_error(workload, participation) ** 2
        other = _other_optimum(workload, participation, equal)
        assert factorization.optimality_gap is not None
        assert factorization.optimality_gap <= 5e-6
        assert error / (1.0 + factorization.optimality_gap) <= other * (1 + 1e-9)
        assert error <= other * (1 + 1e-5)
        truth = brute_force.scalar_sensitivity(factorization.strategy_matrix(), participation)
        computed = factorization.sensitivity(participation)
        assert computed == pytest.approx(1.0, rel=1e-12)
        assert computed.value >= truth * (1 - 1e-12)
        assert not computed.is_exact or truth == pytest.approx(1.0, rel=1e-9)


@pytest.mark.short_cases(2)
@pytest.mark.parametrize(("num_rounds", "epochs", "separation"), [(23, 4, 6), (25, 5, 5)])
def test_the_matrix_is_in_the_class_it_is_the_best_of(
    num_rounds: int, epochs: int, separation: int
) -> None:
    """Also where the search is stopped long before the optimum."""
    participation = FixedEpochOrder(epochs, separation)
    within = _within_patterns(num_rounds, participation)
    workload = _random_workload(num_rounds, 3)
    for evaluations in (2, 9, 300):
        for equal in (False, True):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", NotConvergedWarning)
                factorization = optimal(
                    workload,
                    participation,
                    equal_column_norms=equal,
                    max_evaluations=evaluations,
                )
            strategy = factorization.strategy_matrix()
            entries = (strategy.T @ strategy)[within]
            np.testing.assert_allclose(entries, 0.0, atol=1e-14)
            if equal:
                norms = np.linalg.norm(strategy, axis=0)
                np.testing.assert_allclose(norms, norms[0], rtol=1e-12)
            assert factorization.sensitivity(participation) == pytest.approx(1.0, rel=1e-12)
            np.testing.assert_allclose(
                factorization.decoder_matrix(workload) @ strategy, workload, atol=1e-9
            )


@given(st.integers(2, 12), st.data())
@settings(max_examples=examples(60, one_in=12))
def test_no_matrix_is_below_the_certified_bound(num_rounds: int, data: st.DataObject) -> None:
    """Whether the search has converged or not, and for sensitivities by enumeration."""
    separation = data.draw(st.integers(1, num_rounds - 1))
    fitting = -(-num_rounds // separation)
    participation = FixedEpochOrder(fitting, separation)
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    workload = np.tril(generator.normal(size=(num_rounds, num_rounds))) + 2.0 * np.eye(num_rounds)
    if data.draw(st.booleans()):
        workload = workloads.momentum_sgd(
            num_rounds, data.draw(st.floats(0.0, 0.99)), generator.uniform(0.1, 1.0, num_rounds)
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotConvergedWarning)
        factorization = optimal(
            workload,
            participation,
            max_evaluations=data.draw(st.sampled_from([1, 4, 16, 300])),
        )
        better = optimal(workload, participation, max_evaluations=1000)
    gap = factorization.optimality_gap
    assert gap is not None
    assert gap >= 0.0
    bound = factorization.total_error(workload, participation) ** 2 / (1.0 + gap) * (1 - 1e-9)
    assert better.total_error(workload, participation) ** 2 >= bound
    assert identity(num_rounds).total_error(workload, participation) ** 2 >= bound
    strategy = better.strategy_matrix()
    for size in (1e-4, 1e-2, 1.0):
        changed = strategy + size * np.tril(generator.normal(size=strategy.shape))
        if np.linalg.cond(changed) < 1e8:
            other = DenseFactorization(changed)
            assert other.total_error(workload, participation) ** 2 >= bound


def test_clients_that_cannot_return_are_single_participation() -> None:
    workload = workloads.prefix_sum(9)
    single = optimal(workload).strategy_matrix()
    schemas: list[Participation] = [
        FixedEpochOrder(1, 2),
        FixedEpochOrder(1, 12),
        MinSeparation(9),
    ]
    for participation in schemas:
        found = optimal(workload, participation)
        np.testing.assert_array_equal(found.strategy_matrix(), single)
        assert found.parameters["equal_column_norms"] is True


@pytest.mark.short_cases(2)
@pytest.mark.parametrize("equal_column_norms", [False, True])
@pytest.mark.parametrize(
    ("num_rounds", "epochs", "separation"), [(96, 12, 8), (96, 32, 3), (97, 49, 2), (60, 60, 1)]
)
@pytest.mark.filterwarnings("ignore::mf_aggregators.factorizations.NotConvergedWarning")
def test_many_participations_converge(
    num_rounds: int, epochs: int, separation: int, equal_column_norms: bool
) -> None:
    workload, participation = workloads.prefix_sum(num_rounds), FixedEpochOrder(epochs, separation)
    best = optimal(
        workload,
        participation,
        equal_column_norms=equal_column_norms,
        relative_gap=1e-3,
        max_evaluations=80,
    )
    assert best.optimality_gap is not None
    assert best.optimality_gap < 5e-3
    # One of the same class.
    bands = banded(workload, separation, equal_column_norms, participation)
    assert best.rmse(workload, participation) <= 1.0005 * bands.rmse(workload, participation)
    if separation == 1:
        # All rounds are one pattern: X is diagonal, and one column norm x_i costs a_i / x_i.
        squares = np.arange(num_rounds, 0, -1.0)
        if equal_column_norms:
            least = num_rounds * np.sum(squares)
        else:
            least = np.sum(np.sqrt(squares)) ** 2
        squared_error = best.total_error(workload, participation) ** 2
        assert least * (1 - 1e-9) <= squared_error <= least * (1 + best.optimality_gap + 1e-9)


def test_nearly_singular_multipliers_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """V of the start is definite as it was made, and not as the search begins with it."""
    powers = np.concatenate(
        [[1.0], np.cumprod((11.661016949152541 + np.arange(23)) / np.arange(1, 24))]
    )
    workload = scipy.linalg.toeplitz(powers, np.zeros(24))
    _let_searches_start_from_bands(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotConvergedWarning)
        found = optimal(workload, FixedEpochOrder(12, 2), equal_column_norms=True)
    assert found.sensitivity(FixedEpochOrder(12, 2)).value == pytest.approx(1.0)


def test_what_cannot_be_solved_is_refused() -> None:
    workload = workloads.prefix_sum(8)
    with refuses("banded"):
        optimal(workload, MinSeparation(3))
    with refuses("3"):
        optimal(workload, FixedEpochOrder(4, 3))
    with refuses("banded"):
        optimal(200, FixedEpochOrder(200, 1), error="max")
    with refuses("relative_gap"):
        optimal(workload, FixedEpochOrder(2, 4), relative_gap=0.0)
    with refuses("max_evaluations"):
        optimal(workload, FixedEpochOrder(2, 4), max_evaluations=0)


@pytest.mark.parametrize("error", ["mean", "max"])
def test_fewer_participations_than_fit_are_widened_to_all(error: str) -> None:
    schema, every = FixedEpochOrder(2, 4), FixedEpochOrder(3, 4)
    builders: list[Callable[..., Factorization]] = [
        optimal,
        lambda rounds, schema, **options: banded(rounds, 4, False, schema, **options),
    ]
    for build in builders:
        found = build(12, schema, error=error)
        np.testing.assert_array_equal(
            found.strategy_matrix(), build(12, every, error=error).strategy_matrix()
        )
        assert found.participation == every
        assert not found.gap_holds_for(schema)
        assert found.sensitivity(schema).value <= found.sensitivity(every).value


_ROUNDING = 1e-9


def _rounded(scales: np.ndarray, generator: np.random.Generator) -> Objective:
    """The sum of log(2 cosh(scale x)), with values that are off by up to 1e-9."""

    def objective(x: np.ndarray) -> tuple[float, np.ndarray]:
        value = float(np.sum(np.logaddexp(scales * x, -scales * x)))
        return value + _ROUNDING * generator.uniform(-1.0, 1.0), scales * np.tanh(scales * x)

    return objective


@given(st.integers(0, 2**32 - 1))
def test_slopes_lead_on_where_values_are_rounded(seed: int) -> None:
    generator = np.random.default_rng(seed)
    scales = generator.uniform(0.5, 3.0, 8)
    objective = _ObjectiveBySlopes(_rounded(scales, generator))
    start = generator.uniform(-1.0, 1.0, 8)
    result = minimise(
        objective,
        start,
        max_evaluations=200,
        corrections=10,
        least_change=0.0,
        callback=objective.accept,
    )
    # By values the minimum is known to about the root of their rounding, 3e-5.
    assert np.max(np.abs(result.x)) < 1e-6


@given(st.lists(st.floats(-5.0, 5.0), min_size=2, max_size=12))
def test_shown_values_differ_as_true_ones_do(places: list[float]) -> None:
    def objective(x: np.ndarray) -> tuple[float, np.ndarray]:
        return float(np.sum(x**4)), 4.0 * x**3

    shown = _ObjectiveBySlopes(objective)
    first, _ = shown(np.array(places[:1]))
    assert first == 0.0
    for place in places[1:]:
        x = np.array([place])
        value, gradient = shown(x)
        true = objective(x)[0] - objective(np.array(places[:1]))[0]
        assert value == pytest.approx(true, rel=1e-9, abs=2e-6 * len(places))
        np.testing.assert_array_equal(gradient, 4.0 * x**3)
        shown.accept(x)


def test_behind_a_wall_the_value_is_above_the_last_one() -> None:
    def objective(x: np.ndarray) -> tuple[float, np.ndarray]:
        if x[0] < 0.0:
            raise np.linalg.LinAlgError
        return float(x[0]), np.ones(1)

    walled = _with_walls(objective)
    with pytest.raises(np.linalg.LinAlgError):
        walled(np.array([-1.0]))
    assert walled(np.array([2.0])) == (2.0, np.ones(1))
    value, gradient = walled(np.array([-1.0]))
    assert value == 5.0
    assert gradient[0] == -1.0


@given(st.integers(1, 10), st.integers(1, 10), st.integers(0, 2**32 - 1))
def test_the_factor_is_on_the_right_side_lower_triangular_and_banded(
    num_rounds: int, num_bands: int, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    root: np.ndarray = np.tril(generator.normal(size=(num_rounds, num_rounds)))
    root -= np.tril(root, -num_bands)
    np.fill_diagonal(root, 2.0)
    gram = root.T @ root
    factor = _lower_triangular_factor(gram)
    np.testing.assert_allclose(factor.T @ factor, gram, atol=1e-9)
    assert np.array_equal(factor, np.tril(factor))
    np.testing.assert_allclose(np.tril(factor, -num_bands), 0.0, atol=1e-12)
    # There is one such factor with a positive diagonal.
    np.testing.assert_allclose(factor, root, atol=1e-8)


def test_indefinite_matrices_are_refused() -> None:
    with pytest.raises(np.linalg.LinAlgError):
        _lower_triangular_factor(np.array([[1.0, 2.0], [2.0, 1.0]]))
