"""Epsilon after the first rounds of a run, against enumerated sensitivities."""

import dataclasses
import functools
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mf_aggregators as mfa
from mf_aggregators.factorizations import DenseFactorization, Factorization
from mf_aggregators.kernel.sensitivity import Sensitivity, of_rows
from mf_aggregators.mechanism import Mechanism
from mf_aggregators.participation import (
    FixedEpochOrder,
    MinSeparation,
    Participation,
    SingleParticipation,
    sampling_scheme,
)
from simulations.runs.run_statements import PrivacyBudget
from tests.examples import covering, examples
from tests.mf_aggregators import brute_force, small_mechanisms
from tests.mf_aggregators.small_mechanisms import factorizations

_NUM_ROUNDS = 6
_SCHEMAS: list[Participation] = [
    SingleParticipation(),
    MinSeparation(2),
    MinSeparation(3, 2),
    FixedEpochOrder(2, 3),
    FixedEpochOrder(3, 2),
]
_DELTA = 1e-5


@functools.cache
def _factorizations() -> tuple[Factorization, ...]:
    return factorizations(_NUM_ROUNDS)


def _sensitivity_of_first(
    factorization: Factorization, rounds: int, schema: Participation
) -> Sensitivity:
    return of_rows(factorization.noise_recursion(), rounds, schema.as_schema())


def _curve(budget: PrivacyBudget, rounds: Iterable[int]) -> list[float]:
    return [budget.spent(each) for each in rounds]


def _leading(factorization: Factorization, rounds: int) -> np.ndarray:
    """What the first rounds release, up to an invertible map.

    With N the leading rows of the noise and N N^T = L L^T, the releases G + N Z say as much as
    L^-1 G plus independent noise.
    """
    rows = factorization.noising_matrix()[:rounds]
    return np.linalg.inv(np.linalg.cholesky(rows @ rows.T))


@pytest.mark.parametrize(("index", "schema"), covering(range(17), _SCHEMAS), ids=str)
def test_spent_is_the_epsilon_of_the_enumerated_sensitivity(
    index: int, schema: Participation
) -> None:
    factorization = _factorizations()[index]
    budget = PrivacyBudget(Mechanism(factorization, schema, 0.8), _DELTA, every=1)
    whole = factorization.sensitivity(schema).value
    found = _curve(budget, range(_NUM_ROUNDS + 1))
    for rounds in range(1, _NUM_ROUNDS + 1):
        released = _leading(factorization, rounds)
        enumerated = brute_force.scalar_sensitivity(released, schema)
        exact = mfa.accounting.epsilon(0.8 * whole / enumerated, _DELTA)
        assert found[rounds] >= exact * (1 - 1e-9)
        if factorization.mechanism == "tree":
            # Accounted for as if all nodes were released that the rounds are part of.
            nodes = brute_force.scalar_sensitivity(
                factorization.strategy_matrix()[:, :rounds], schema
            )
            exact = mfa.accounting.epsilon(0.8 * whole / nodes, _DELTA)
        if _sensitivity_of_first(factorization, rounds, schema).is_exact:
            assert found[rounds] == pytest.approx(exact, rel=1e-6)
    assert found[0] == 0.0
    assert found == sorted(found)
    assert found[-1] == budget.planned.epsilon
    assert found[-1] == pytest.approx(mfa.accounting.epsilon(0.8, _DELTA), rel=1e-11)


@given(
    st.integers(1, 40),
    st.integers(1, 50),
    st.integers(1, 10),
    st.sampled_from([None, 1, 2]),
    st.integers(0, 2**32),
)
@settings(deadline=None, max_examples=examples(60))
def test_it_never_falls_and_ends_at_the_plan(
    num_rounds: int, every: int, separation: int, most: int | None, seed: int
) -> None:
    # Matrices of random signs, whose sensitivity is only bounded and whose bounds may fall.
    generator = np.random.default_rng(seed)
    # Larger entries may make the matrix nearly singular, which is refused.
    matrix = np.tril(generator.normal(scale=num_rounds**-0.5, size=(num_rounds, num_rounds)))
    matrix += 0.5 * np.sign(np.diag(np.diag(matrix)))
    factorization = DenseFactorization(matrix)
    budget = PrivacyBudget(
        Mechanism(factorization, MinSeparation(separation, most), 1.5), 1e-6, every
    )
    found = _curve(budget, range(num_rounds + 1))
    assert found == sorted(found)
    assert found[-1] == budget.planned.epsilon
    for rounds in (1, num_rounds // 2, num_rounds - 1):
        if rounds >= 1:
            bound = _sensitivity_of_first(factorization, rounds, MinSeparation(separation, 1)).value
            single = 1.5 * budget.planned.sensitivity / bound
            assert found[rounds] >= mfa.accounting.epsilon(single, 1e-6) * (1 - 1e-9)


@pytest.mark.short_cases(1)
@pytest.mark.parametrize("name", ["poisson", "fixed_size", "shuffling"])
def test_sampled_runs_spend_up_to_their_amplified_plan(name: str) -> None:
    scheme = sampling_scheme(
        name, num_rounds=20, num_bands=4, population=4000, clients_per_round=10
    )
    factorization = mfa.factorizations.banded(mfa.workloads.prefix_sum(20), 4)
    budget = PrivacyBudget(Mechanism(factorization, scheme, 1.0), 1e-6, every=10)
    found = _curve(budget, range(21))
    assert found == sorted(found)
    assert found[-1] == small_mechanisms.sampled(factorization, scheme, 1.0, 1e-6).epsilon
    assert 0.0 < found[1] <= found[-1]
    # One pass of a shuffled part costs the same however far it goes.
    assert (found[1] < found[-1] * (1.0 - 1e-9)) == (name != "shuffling")
    # Ten rounds of the same draws, as a run of their own: C's leading block.
    shorter = dataclasses.replace(scheme, num_rounds=10)
    column = _sensitivity_of_first(factorization, 10, SingleParticipation()).value
    largest = factorization.sensitivity(SingleParticipation()).value
    alone = sampling_scheme(
        name, num_rounds=shorter.num_rounds, num_bands=4, population=4000, clients_per_round=10
    ).epsilon(largest / column, 1e-6)
    assert found[10] == pytest.approx(alone, rel=1e-9)
