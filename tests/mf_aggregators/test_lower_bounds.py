"""Lower bounds against linear programs, singular values and what no factorization can beat."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import scipy.optimize
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators import lower_bounds, workloads
from mf_aggregators.factorizations import optimal
from mf_aggregators.participation import (
    FixedEpochOrder,
    MinSeparation,
    Participation,
    SingleParticipation,
)
from mf_aggregators.workloads import Workload
from tests.examples import examples
from tests.mf_aggregators import brute_force
from tests.mf_aggregators.toeplitz_cases import schemas
from tests.refusals import refuses

_SINGLE = SingleParticipation()


def _least_weight(participation: Participation, num_rounds: int) -> float:
    """The least sum of weights of patterns with every round in weight one, by linear programming.

    The bound is the nuclear norm over the root of any such sum.
    """
    patterns = list(brute_force.patterns(participation, num_rounds))
    holds = np.zeros((num_rounds, len(patterns)))
    for column, pattern in enumerate(patterns):
        holds[list(pattern), column] = 1.0
    solved = scipy.optimize.linprog(
        np.ones(len(patterns)), A_eq=holds, b_eq=np.ones(num_rounds), method="highs"
    )
    return float(solved.fun)


@pytest.mark.parametrize("num_rounds", range(1, 10))
def test_no_patterns_hold_every_round_with_less_weight(num_rounds: int) -> None:
    for separation in range(1, num_rounds + 2):
        for limit in range(1, num_rounds + 2):
            for schema in (FixedEpochOrder(limit, separation), MinSeparation(separation, limit)):
                least = lower_bounds._equal_weights(schema, num_rounds)
                assert least == pytest.approx(_least_weight(schema, num_rounds), rel=1e-9), schema


def _paths(
    chain: lower_bounds._Chain, moments: lower_bounds._Moments
) -> Iterator[tuple[tuple[int, ...], float, np.ndarray]]:
    """The cells, the probability and the mean of the outer product of the signs of each path."""
    waiting: list[tuple[tuple[int, ...], float, np.ndarray]] = [
        ((i,), float(p), np.eye(1)) for i, p in enumerate(moments.starts)
    ]
    while waiting:
        path, probability, signs = waiting.pop()
        i, goes_on = path[-1], 0.0
        if len(path) < chain.most:
            for j in np.flatnonzero(moments.moves[i]):
                goes_on += float(moments.moves[i, j])
                to = signs[-1] * moments.signs[i, j]
                longer = np.block([[signs, to[:, np.newaxis]], [to, np.ones(1)]])
                waiting.append(((*path, int(j)), probability * float(moments.moves[i, j]), longer))
        yield path, probability * (1.0 - goes_on), signs


def _any_parameters(
    chain: lower_bounds._Chain, generator: np.random.Generator
) -> lower_bounds._Parameters:
    return chain.unpacked(generator.normal(size=len(chain.start().packed())))


@given(st.integers(1, 8), st.data())
@settings(max_examples=examples(60), deadline=None)
def test_second_moments_are_those_of_random_signs_on_patterns_of_the_schema(
    num_rounds: int, data: st.DataObject
) -> None:
    participation = data.draw(schemas(num_rounds))
    chain = lower_bounds._Chain.under(participation, num_rounds, 1)
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    moments = chain.moments(_any_parameters(chain, generator))
    patterns = set(brute_force.patterns(participation, num_rounds))
    second, total = np.zeros((num_rounds, num_rounds)), 0.0
    for path, probability, signs in _paths(chain, moments):
        assert path in patterns
        second[np.ix_(path, path)] += probability * signs
        total += probability
    assert total == pytest.approx(1.0, rel=1e-12)
    np.testing.assert_allclose(moments.second, second, rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", [2, 3, 7])
def test_chains_of_cells_are_chains_of_rounds(size: int) -> None:
    """Each path, moved to each place of its cells, is a pattern of the schema."""
    num_rounds = 5 * size + 1
    for participation in (MinSeparation(2 * size - 1, 2), FixedEpochOrder(2, 2 * size), _SINGLE):
        chain = lower_bounds._Chain.under(participation, num_rounds, size)
        assert chain.num_cells == 5
        moments = chain.moments(_any_parameters(chain, np.random.default_rng(size)))
        for path, _, _ in _paths(chain, moments):
            gaps = [size * int(gap) for gap in np.diff(path)]
            assert brute_force.allowed(participation, len(path), gaps)
        assert (chain.most > 1) == (participation is not _SINGLE)


def _whole(workload: np.ndarray, second: np.ndarray, size: int, weights: np.ndarray) -> float:
    """||diag(w)^1/2 A L||_* for V = V' x I / m, over the root of the sum of w."""
    cells = len(second)
    factor = np.kron(np.linalg.cholesky(second), np.eye(size)) / np.sqrt(size)
    rows = np.append(np.repeat(weights, size), np.full(len(workload) - cells * size, weights[-1]))
    matrix = np.sqrt(rows)[:, np.newaxis] * workload[:, : cells * size] @ factor
    return float(np.sum(np.linalg.svd(matrix, compute_uv=False)) / np.sqrt(np.sum(rows)))


_RATES = tuple(float(rate) for rate in np.repeat(np.linspace(1.0, 0.2, 5), [13, 13, 13, 13, 15]))


@pytest.mark.parametrize(
    "workload",
    [
        Workload("prefix_sum", 67),
        Workload("momentum_sgd", 67, 0.0, _RATES),
        Workload("momentum_sgd", 67, 0.8),
        workloads.momentum_sgd(67, 0.8),
    ],
)
@pytest.mark.parametrize("modes", [1, 2, 4, 8, 13])
def test_cells_give_no_more_than_all_rounds_and_nearly_as_much(
    workload: Workload | np.ndarray, modes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lower_bounds, "_MOST_ROUNDS_OF_DENSE_BOUND", 10)
    generator = np.random.default_rng(modes)
    chain = lower_bounds._Chain.under(MinSeparation(13, 4), 67, 13)
    second = chain.moments(_any_parameters(chain, generator)).second
    weights = generator.uniform(0.1, 1.0, 5)
    known = workloads.checked(workload)
    cells = lower_bounds._Cells.of(known, 13, modes)
    assert cells is not None
    matrix = known.matrix()
    bound = cells.bound(second, weights, chain.most)
    whole = _whole(matrix, second, 13, weights)
    assert bound <= whole * (1 + 1e-12)
    if modes == 13:
        assert bound == pytest.approx(whole, rel=1e-6)
    elif cells.local > 0.0:
        assert bound >= whole * (1 - 0.1 / modes)


@pytest.mark.parametrize("modes", [1, 3, 8])
def test_what_polynomials_do_not_see_of_a_cell(modes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    size = 170
    _, unseen = lower_bounds._shares(size, modes)
    whole = lower_bounds._local_norm(size, unseen)
    points = np.vander(np.linspace(-1.0, 1.0, size), modes, increasing=True)
    others = scipy.linalg.null_space(points.T)
    # C leaves these as they are, and more is left if C is more.
    least = np.sum(np.linalg.svd(others.T @ np.tri(size) @ others, compute_uv=False))
    assert least <= whole * (1 + 1e-7)
    assert whole <= np.sum(np.linalg.svd(np.tri(size), compute_uv=False))
    monkeypatch.setattr(lower_bounds, "_ROUNDS_OF_SMALLEST_CELL", 100)
    monkeypatch.setattr(lower_bounds, "_CELLS_OF_A_CELL", 5)
    nested = lower_bounds._local_norm(size, unseen)
    assert 0.98 * whole <= nested <= whole


def test_shares_leave_nothing_out_and_take_nothing_twice() -> None:
    for size, modes in ((1, 1), (5, 5), (20, 1), (20, 2), (20, 10)):
        seen, unseen = lower_bounds._shares(size, modes)
        np.testing.assert_allclose(seen**2 + unseen**2, np.ones(modes), rtol=1e-14)
        assert unseen[0] == 0.0
        basis = lower_bounds._polynomials(size, modes)
        np.testing.assert_allclose(basis.T @ basis, np.eye(modes), atol=1e-13)
        assert np.ptp(basis[:, 0]) < 1e-14


@given(st.integers(1, 7), st.data())
@settings(max_examples=examples(30), deadline=None)
def test_no_strategy_matrix_is_better(num_rounds: int, data: st.DataObject) -> None:
    """Sensitivities by enumeration, for one-dimensional contributions: the smallest there are."""
    participation = data.draw(schemas(num_rounds))
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    workload = np.tril(generator.normal(size=(num_rounds, num_rounds)))
    workload[np.diag_indices(num_rounds)] += data.draw(st.sampled_from([0.5, 3.0]))
    if data.draw(st.booleans()):
        workload = workloads.momentum_sgd(num_rounds, 0.9)
    bound = lower_bounds.compute(workload, participation)
    of_mean = lower_bounds.compute(workload, participation, maximum=False)
    assert bound is not None
    assert of_mean is not None
    assert of_mean.rmse == bound.rmse
    assert of_mean.max_error <= bound.max_error
    spread = data.draw(st.sampled_from([0.0, 0.1, 1.0]))
    # Not only triangular ones, and close to the symmetric root that is best without patterns.
    _, values, right = np.linalg.svd(workload)
    root = right.T @ np.diag(np.sqrt(values)) @ right
    for start in (np.eye(num_rounds), root):
        strategy = start + spread * generator.normal(size=start.shape)
        if np.linalg.cond(strategy) > 1e8:
            continue
        sensitivity = brute_force.scalar_sensitivity(strategy, participation)
        decoder = np.linalg.solve(strategy.T, workload.T).T
        errors = sensitivity * np.linalg.norm(decoder, axis=1)
        assert np.linalg.norm(errors) >= bound.total_error * (1 - 1e-9)
        assert np.sqrt(np.mean(errors**2)) >= bound.rmse * (1 - 1e-9)
        assert np.max(errors) >= bound.max_error * (1 - 1e-9)


def test_the_bound_is_reached_where_rounds_do_not_interact() -> None:
    """With A diagonal of equal entries the identity is the best factorization."""
    bound = lower_bounds.compute(3.0 * np.eye(6), _SINGLE)
    assert bound is not None
    assert bound.total_error == pytest.approx(3.0 * np.sqrt(6), rel=1e-12)
    repeated = lower_bounds.compute(3.0 * np.eye(6), FixedEpochOrder(3, 2))
    assert repeated is not None
    # One pattern for each of the two classes: three times the squared error of single.
    assert repeated.total_error == pytest.approx(3.0 * np.sqrt(6 * 3), rel=1e-12)


@pytest.mark.parametrize("num_rounds", [1, 2, 3, 10, 200])
def test_the_closed_form_is_the_sum_of_singular_values(num_rounds: int) -> None:
    values = np.linalg.svd(np.tri(num_rounds), compute_uv=False)
    closed = lower_bounds._prefix_sum_nuclear_norm(num_rounds)
    assert closed == pytest.approx(np.sum(values), rel=1e-13)


@given(st.integers(1, 12), st.data())
@settings(max_examples=12, deadline=None)
def test_a_description_gives_the_bound_of_its_matrix(num_rounds: int, data: st.DataObject) -> None:
    participation = data.draw(schemas(num_rounds))
    rates = tuple(float(rate) for rate in np.linspace(1.0, 0.2, num_rounds))
    workload = data.draw(
        st.sampled_from(
            [
                Workload("prefix_sum", num_rounds),
                Workload("momentum_sgd", num_rounds, 0.8),
                Workload("momentum_sgd", num_rounds, 0.8, rates),
                # The prefix sum by another name, which need not use the closed form.
                Workload("momentum_sgd", num_rounds, 0.0),
            ]
        )
    )
    described = lower_bounds.compute(workload, participation)
    dense = lower_bounds.compute(workload.matrix(), participation)
    assert described is not None
    assert dense is not None
    assert described.total_error == pytest.approx(dense.total_error, rel=1e-10)
    assert described.rmse == pytest.approx(described.total_error / np.sqrt(num_rounds), rel=1e-12)


@pytest.mark.parametrize(
    ("num_rounds", "schema"),
    [(40, _SINGLE), (200, _SINGLE), (24, FixedEpochOrder(4, 6)), (72, FixedEpochOrder(4, 18))],
)
def test_optimal_is_certified_from_here_as_well(num_rounds: int, schema: Participation) -> None:
    """Within what a chain leaves out of the dual, and cells of the rounds: two searches meet."""
    workload = workloads.prefix_sum(num_rounds)
    bound = lower_bounds.compute(workload, schema)
    assert bound is not None
    mean = optimal(workload, schema, relative_gap=1e-4).rmse(workload, schema)
    assert 0.994 * mean <= bound.rmse <= mean
    worst = optimal(workload, schema, error="max", relative_gap=2e-3).max_error(workload, schema)
    assert 0.985 * worst <= bound.max_error <= worst


def test_timers_have_a_larger_bound_than_an_exact_order() -> None:
    """2,052 rounds, where no matrix is known that has less than 8.456 in the mean."""
    timers = lower_bounds.compute(2052, MinSeparation(342, 6))
    epochs = lower_bounds.compute(2052, FixedEpochOrder(6, 342))
    assert timers is not None
    assert epochs is not None
    assert 8.05 < epochs.rmse < 8.152
    assert max(8.152, epochs.rmse) < timers.rmse < 8.456
    assert timers.max_error > timers.rmse


@pytest.mark.long
def test_large_workloads_have_a_bound_by_closed_form_or_by_cells(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prefix_sum = lower_bounds.compute(Workload("prefix_sum", 3_000_000), _SINGLE)
    assert prefix_sum is not None
    # The sum of cosecants is that of Chebyshev nodes' cotangents, the Lebesgue constant.
    assert prefix_sum.rmse == pytest.approx(
        (np.log(6_000_001) + np.euler_gamma + np.log(8 / np.pi)) / np.pi, rel=2e-3
    )
    workload, schema = Workload("momentum_sgd", 700, 0.9), MinSeparation(140)
    known = lower_bounds.compute(workload, schema)
    monkeypatch.setattr(lower_bounds, "_MOST_ROUNDS_OF_SINGULAR_VALUES", 600)
    assert lower_bounds._best(workload, schema, True) == known
    monkeypatch.setattr(lower_bounds, "_MOST_ROUNDS_BY_COLUMNS", 600)
    assert lower_bounds._best(workload, schema, True) is None
    assert lower_bounds._best(workloads.checked(workload.matrix()), schema, True) is None


@pytest.mark.parametrize("scale", [1e-180, 1e180])
def test_bounds_scale_with_the_workload(scale: float) -> None:
    workload = workloads.momentum_sgd(12, 0.5)
    known = lower_bounds.compute(workload, MinSeparation(3))
    scaled = lower_bounds.compute(scale * workload, MinSeparation(3))
    assert known is not None
    assert scaled is not None
    assert scaled.rmse == pytest.approx(scale * known.rmse, rel=1e-9)
    assert scaled.max_error == pytest.approx(scale * known.max_error, rel=1e-6)


@pytest.mark.parametrize("function", [lambda a: lower_bounds.compute(a, _SINGLE), optimal])
@pytest.mark.parametrize(
    ("workload", "names"),
    [
        (np.ones((2, 2)), ["lower triangular"]),
        (np.ones((2, 3)), ["square"]),
        (np.tri(3, k=-1), ["singular"]),
        (np.array([[1.0, 0.0], [1.0, 0.0]]), ["singular"]),
        (np.tri(2) * np.nan, ["finite"]),
    ],
)
def test_bad_workloads_are_refused(
    function: Callable[[np.ndarray], object], workload: np.ndarray, names: list[str]
) -> None:
    with refuses(*names):
        function(workload)


def test_bad_arguments_are_refused() -> None:
    with refuses("participation", error=TypeError):
        lower_bounds.compute(np.eye(2), "often")  # type: ignore[arg-type]
    with refuses("num_rounds"):
        lower_bounds._prefix_sum_nuclear_norm(0)
