"""Lower bounds against linear programs, singular values and what no factorization can beat."""

from collections.abc import Callable

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
def test_equal_weights_are_the_best_for_epochs_and_valid_for_least_separations(
    num_rounds: int,
) -> None:
    workload = workloads.prefix_sum(num_rounds)
    nuclear_norm = float(np.sum(np.linalg.svd(workload, compute_uv=False)))
    for separation in range(1, num_rounds + 2):
        for limit in range(1, num_rounds + 2):
            epochs = FixedEpochOrder(limit, separation)
            best = nuclear_norm / np.sqrt(_least_weight(epochs, num_rounds))
            bound = lower_bounds.compute(workload, epochs)
            assert bound is not None
            assert bound.total_error == pytest.approx(best, rel=1e-9), epochs
            separated = lower_bounds.compute(workload, MinSeparation(separation, limit))
            assert separated is not None
            best = nuclear_norm / np.sqrt(
                _least_weight(MinSeparation(separation, limit), num_rounds)
            )
            assert separated.total_error <= best * (1 + 1e-9)
            assert separated.total_error >= bound.total_error * (1 - 1e-9)


@given(st.integers(1, 7), st.data())
@settings(max_examples=150, deadline=None)
def test_no_strategy_matrix_is_better(num_rounds: int, data: st.DataObject) -> None:
    """Sensitivities by enumeration, for one-dimensional contributions: the smallest there are."""
    participation = data.draw(schemas(num_rounds))
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    workload = np.tril(generator.normal(size=(num_rounds, num_rounds)))
    workload[np.diag_indices(num_rounds)] += data.draw(st.sampled_from([0.5, 3.0]))
    if data.draw(st.booleans()):
        workload = workloads.momentum_sgd(num_rounds, 0.9)
    bound = lower_bounds.compute(workload, participation)
    assert bound is not None
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
        assert np.max(errors) >= bound.rmse * (1 - 1e-9)


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
    closed = lower_bounds.prefix_sum_nuclear_norm(num_rounds)
    assert closed == pytest.approx(np.sum(values), rel=1e-13)


def test_the_closed_form_does_not_depend_on_how_it_is_summed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = lower_bounds.prefix_sum_nuclear_norm(1000)
    monkeypatch.setattr(lower_bounds, "_TERMS_AT_A_TIME", 7)
    assert lower_bounds.prefix_sum_nuclear_norm(1000) == pytest.approx(whole, rel=1e-14)


@given(st.integers(1, 12), st.data())
@settings(max_examples=40, deadline=None)
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


def test_more_participations_raise_the_bound_and_none_that_return_lower_it_to_single() -> None:
    workload = Workload("prefix_sum", 60)
    bounds = [lower_bounds.compute(workload, FixedEpochOrder(k, 10)) for k in (1, 2, 3, 6, 9)]
    totals = [bound.total_error for bound in bounds if bound is not None]
    assert len(totals) == 5
    assert totals == sorted(totals)
    assert totals[0] < totals[1] < totals[2] < totals[3]
    # No more than six participations fit.
    assert totals[4] == totals[3]
    assert bounds[0] == lower_bounds.compute(workload, _SINGLE)
    assert lower_bounds.compute(workload, MinSeparation(60)) == bounds[0]
    assert totals[3] == pytest.approx(
        lower_bounds.prefix_sum_nuclear_norm(60) / np.sqrt(10), rel=1e-12
    )


def test_large_workloads_have_a_bound_by_closed_form_alone() -> None:
    prefix_sum = lower_bounds.compute(Workload("prefix_sum", 3_000_000), _SINGLE)
    assert prefix_sum is not None
    # The sum of cosecants is that of Chebyshev nodes' cotangents, the Lebesgue constant.
    assert prefix_sum.rmse == pytest.approx(
        (np.log(6_000_001) + np.euler_gamma + np.log(8 / np.pi)) / np.pi, rel=1e-6
    )
    assert lower_bounds.compute(Workload("momentum_sgd", 5001), _SINGLE) is None


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
        lower_bounds.prefix_sum_nuclear_norm(0)
