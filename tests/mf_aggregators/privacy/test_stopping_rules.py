"""The rule ends a run before its limit, neither a round later nor a round sooner."""

import functools
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mf_aggregators as mfa
from mf_aggregators.factorizations import Factorization, banded, identity
from mf_aggregators.kernel.claim import Guarantee
from mf_aggregators.participation import MinSeparation, sampling_scheme
from mf_aggregators.privacy import guarantees
from mf_aggregators.privacy.guarantees import ObservedParticipation
from mf_aggregators.privacy.stopping_rules import StoppingRule
from tests.examples import examples
from tests.mf_aggregators import small_mechanisms
from tests.mf_aggregators.small_mechanisms import factorizations
from tests.refusals import refuses

_NUM_ROUNDS = 6
_DELTA = 1e-5


@functools.cache
def _factorizations() -> tuple[Factorization, ...]:
    return factorizations(_NUM_ROUNDS)


def _rounds_of_clients(cohorts: list[list[int]], num_clients: int) -> list[list[int]]:
    return [
        [index for index, cohort in enumerate(cohorts) if client in cohort]
        for client in range(num_clients)
    ]


def _rounds_released(rule: StoppingRule, cohorts: list[list[int]], num_clients: int) -> int:
    """How many rounds take place, of those with these cohorts."""
    for number in range(1, len(cohorts) + 1):
        observed = guarantees.observed_participation(
            _rounds_of_clients(cohorts[:number], num_clients), number
        )
        if not rule.allows(observed):
            return number - 1
    return len(cohorts)


@given(
    index=st.integers(0, 16),
    cohorts=st.lists(
        st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True),
        min_size=_NUM_ROUNDS,
        max_size=_NUM_ROUNDS,
    ),
    share=st.floats(0.55, 1.6),
)
@settings(max_examples=examples(200), deadline=None)
def test_what_is_released_is_within_the_limit_for_every_client(
    index: int, cohorts: list[list[int]], share: float
) -> None:
    """The true change by each client's own rounds, enumerated, whether the plan is kept or not."""
    factorization = _factorizations()[index]
    plan = guarantees.planned(factorization, MinSeparation(2), 1.5, _DELTA)
    limit = share * plan.epsilon
    try:
        rule = StoppingRule(plan, limit)
    except ValueError:
        return
    released = _rounds_released(rule, cohorts, 4)
    assert released >= 1
    # With N the leading rows of the noise and N N^T = L L^T, releases G + N Z say as much as
    # L^-1 G plus independent noise.
    rows = factorization.noising_matrix()[:released]
    changes = np.linalg.inv(np.linalg.cholesky(rows @ rows.T))
    for rounds in _rounds_of_clients(cohorts[:released], 4):
        if not rounds:
            continue
        most = max(
            float(np.linalg.norm(changes[:, rounds] @ np.array([1.0, *signs])))
            for signs in itertools.product([1.0, -1.0], repeat=len(rounds) - 1)
        )
        multiplier = plan.noise_multiplier * plan.sensitivity / most
        assert mfa.accounting.epsilon(multiplier, _DELTA) <= limit * (1 + 1e-9)
        # So the event that is composed with other runs is of no less noise than there is.
        assert multiplier >= rule.guarantee.noise_multiplier * (1 - 1e-9)
    assert rule.guarantee.epsilon <= limit


@pytest.mark.parametrize("most", [1, 2, 3])
def test_independent_noise_ends_before_a_client_takes_part_once_too_often(most: int) -> None:
    """The sensitivity of k participations is sqrt(k), so that limits between two are known."""
    factorization = identity(12)
    plan = guarantees.planned(factorization, MinSeparation(2, 4), 1.0, _DELTA)
    # Relative to one participation, the noise multiplier is that of the plan times two.
    epsilons = [mfa.accounting.epsilon(2.0 / k**0.5, _DELTA) for k in (most, most + 1)]
    for limit in (epsilons[0] * (1 + 1e-9), 0.5 * sum(epsilons), epsilons[1] * (1 - 1e-9)):
        rule = StoppingRule(plan, limit)
        # One client in every second round, another one once.
        cohorts = [[0] if index % 2 == 0 else [1 + index] for index in range(12)]
        assert _rounds_released(rule, cohorts, 14) == 2 * most


def test_a_limit_above_the_plan_ends_nothing_that_keeps_the_plan() -> None:
    factorization = banded(mfa.workloads.prefix_sum(9), 3)
    plan = guarantees.planned(factorization, MinSeparation(3), 1.0, _DELTA)
    rule = StoppingRule(plan, plan.epsilon * (1 + 1e-6))
    assert _rounds_released(rule, [[index % 3] for index in range(9)], 3) == 9
    # One that breaks it is ended: all nine rounds of one client are too much.
    assert _rounds_released(rule, [[0]] * 9, 1) < 9


def _sampled_plan(num_rounds: int) -> Guarantee:
    factorization = banded(mfa.workloads.prefix_sum(num_rounds), 2)
    scheme = sampling_scheme(
        "poisson", num_rounds=num_rounds, num_bands=2, population=400, clients_per_round=20
    )
    return small_mechanisms.sampled(factorization, scheme, 1.0, 1e-4)


@pytest.mark.long
def test_a_sampled_run_ends_after_the_most_rounds_that_are_within_the_limit() -> None:
    plan = _sampled_plan(12)
    # Columns have a norm of one from the second round on, and so have all their leading parts.
    epsilons = [
        sampling_scheme(
            "poisson", num_rounds=rounds, num_bands=2, population=400, clients_per_round=20
        ).epsilon(1.0, 1e-4)
        for rounds in range(2, 13)
    ]
    limit = 0.5 * (epsilons[4] + epsilons[6])
    most = max(rounds for rounds, each in enumerate(epsilons, start=2) if each <= limit)
    assert 2 < most < 12
    rule = StoppingRule(plan, limit)
    drawn = [ObservedParticipation(rounds, 0, None, 0, True) for rounds in range(1, 13)]
    assert [rule.allows(each) for each in drawn] == [True] * most + [False] * (12 - most)
    assert rule.guarantee.epsilon == pytest.approx(epsilons[most - 2], rel=1e-9)
    # Batches that were drawn in another way are not what the limit was found for.
    assert not rule.allows(ObservedParticipation(1, 1, None, 1, False))


def test_limits_that_allow_no_round_are_refused() -> None:
    factorization = identity(4)
    plan = guarantees.planned(factorization, MinSeparation(2), 1.0, _DELTA)
    with refuses("limit", "0.1"):
        StoppingRule(plan, 0.1)
    with refuses("epsilon"):
        StoppingRule(plan, 0.0)
    silent = guarantees.planned(factorization, MinSeparation(2), 0.0, _DELTA)
    with refuses("noise"):
        StoppingRule(silent, 1.0)
    sampled = _sampled_plan(12)
    with refuses("limit", "0.001"):
        StoppingRule(sampled, 1e-3)


@pytest.mark.parametrize("sampling", ["min_separation", "balls_in_bins"])
def test_where_clients_draw_for_themselves_a_limit_is_for_all_rounds(sampling: str) -> None:
    factorization = identity(6)
    scheme = sampling_scheme(
        sampling, num_rounds=6, num_bands=1, population=60, clients_per_round=15, separation=4
    )
    plan = small_mechanisms.sampled(factorization, scheme, 1.0, 1e-3)
    with refuses("limit", "clients"):
        StoppingRule(plan, 0.99 * plan.epsilon)
    rule = StoppingRule(plan, 1.01 * plan.epsilon)
    drawn = [ObservedParticipation(rounds, 0, None, 0, True) for rounds in range(1, 7)]
    assert all(rule.allows(each) for each in drawn)
    assert rule.guarantee.epsilon == plan.epsilon
