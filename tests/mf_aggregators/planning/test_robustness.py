"""What matrices lose under other separations, against dense matrices and all patterns."""

import dataclasses
import math

import numpy as np
import pytest

from mf_aggregators import planning
from mf_aggregators.participation import FixedEpochOrder, MinSeparation
from mf_aggregators.planning import Plan, Setting, robustness
from tests.mf_aggregators import brute_force
from tests.refusals import refuses

_SEPARATIONS = (2, 3, 6)
# Two participations six rounds apart are all that fit.
_SCHEMAS = {2: MinSeparation(2, 3), 3: MinSeparation(3, 3), 6: MinSeparation(6)}
_SETTING = Setting(
    num_rounds=12,
    population=120,
    clients_per_round=10,
    participation=MinSeparation(3, 3),
    sampling=None,
    epsilon=8.0,
    delta=1e-6,
    model_size=1000,
)


@pytest.fixture(scope="module")
def plans() -> list[Plan]:
    found = []
    for separation in _SEPARATIONS:
        setting = dataclasses.replace(_SETTING, participation=_SCHEMAS[separation])
        mechanisms = ("identity", "banded", "toeplitz", "blt")
        found.append(planning.make(setting, mechanisms=mechanisms))
    return found


@pytest.mark.long
def test_regrets_from_dense_matrices_and_all_patterns(plans: list[Plan]) -> None:
    """Entries of C and of C^T C are not negative here: the worst pattern is that of their sums."""
    # Any order of plans is as good.
    comparison = robustness.compare([plans[2], plans[0], plans[1]])
    assert comparison.separations == _SEPARATIONS
    patterns = {each: list(brute_force.patterns(_SCHEMAS[each], 12)) for each in _SEPARATIONS}
    best = [plan.candidates[0].effective_rmse for plan in plans]
    assert [each.effective_error for each in comparison.best] == best
    exact = 0
    for regret in comparison.matrices:
        mechanism = regret.candidate.mechanism
        matrix = mechanism.factorization.strategy_matrix()
        gram = matrix.T @ matrix
        assert np.min(gram) >= -1e-12
        rows = np.tri(12) @ np.linalg.inv(matrix)
        rmse = math.sqrt(np.sum(rows**2) / 12)
        for number, separation in enumerate(_SEPARATIONS):
            worst = max(np.sum(gram[np.ix_(each, each)]) for each in patterns[separation])
            expected = rmse * math.sqrt(worst) * mechanism.noise_multiplier / 10
            found = regret.errors[number]
            # Sensitivities that are bounds are never below: noise is scaled to them.
            assert found >= expected * (1.0 - 1e-9)
            if mechanism.factorization.sensitivity(_SCHEMAS[separation]).is_exact:
                assert found == pytest.approx(expected, rel=1e-9)
                exact += 1
            assert regret.regrets[number] == pytest.approx(found / best[number] - 1.0)
        assert regret.worst == max(regret.regrets)
    assert exact > len(comparison.matrices)
    worst = [each.worst for each in comparison.matrices]
    assert worst == sorted(worst)


@pytest.mark.long
def test_every_candidate_is_compared_and_the_same_matrix_once(plans: list[Plan]) -> None:
    comparison = robustness.compare(plans)
    by_name: dict[str, list[int]] = {}
    for each in comparison.matrices:
        by_name.setdefault(each.candidate.name, []).extend(each.made_for)
    for plan, separation in zip(plans, _SEPARATIONS, strict=True):
        for candidate in plan.candidates:
            assert separation in by_name[candidate.name]
    assert by_name["identity"] == list(_SEPARATIONS)
    (identity,) = (each for each in comparison.matrices if each.candidate.kind == "identity")
    assert identity.made_for == _SEPARATIONS
    for number, plan in enumerate(plans):
        # What is made for a separation has the plan's error under it; the best one no regret.
        errors = {each.name: each.effective_error for each in plan.candidates}
        for each in comparison.matrices:
            if _SEPARATIONS[number] in each.made_for:
                assert each.errors[number] == pytest.approx(errors[each.candidate.name], rel=1e-12)
        assert min(abs(each.regrets[number]) for each in comparison.matrices) < 1e-12


def test_plans_that_cannot_be_compared_are_refused(plans: list[Plan]) -> None:
    with refuses("no plan"):
        robustness.compare([])
    with refuses("another least separation"):
        robustness.compare([plans[0], plans[0]])
    fixed = dataclasses.replace(plans[0].setting, participation=FixedEpochOrder(2, 3))
    with refuses("another least separation"):
        robustness.compare([dataclasses.replace(plans[0], setting=fixed)])
