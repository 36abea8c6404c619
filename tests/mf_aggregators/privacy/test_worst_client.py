"""Sensitivities of observed patterns, against direct sums over the rounds of a client."""

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators.factorizations import (
    BandedFactorization,
    DenseFactorization,
    Factorization,
    ToeplitzFactorization,
    identity,
    tree_aggregation,
)
from mf_aggregators.participation import MinSeparation, SingleParticipation
from mf_aggregators.privacy import guarantees
from mf_aggregators.privacy.ledgers import Ledger
from mf_aggregators.privacy.worst_client import WorstClient
from tests.examples import examples
from tests.mf_aggregators import small_mechanisms

_NUM_ROUNDS = 9
_patterns = st.lists(
    st.lists(st.integers(0, _NUM_ROUNDS - 1), unique=True).map(sorted), min_size=1, max_size=8
)


def _ledger(rounds_of_clients: Sequence[Sequence[int] | np.ndarray], num_rounds: int) -> Ledger:
    """A ledger whose clients are named by their index."""
    names = tuple(map(str, range(len(rounds_of_clients))))
    rounds = tuple(np.array(client, np.int64) for client in rounds_of_clients)
    return Ledger(names, rounds, num_rounds)


def _worst(
    factorization: Factorization,
    rounds_of_clients: Sequence[Sequence[int] | np.ndarray],
    num_rounds: int,
) -> WorstClient | None:
    plan = guarantees.planned(factorization, SingleParticipation(), 1.0, 1e-5)
    return WorstClient.of_ledger(plan, _ledger(rounds_of_clients, num_rounds))


@pytest.fixture(scope="module")
def mechanisms() -> tuple[Factorization, ...]:
    return small_mechanisms.factorizations(_NUM_ROUNDS)


@given(rounds_of_clients=_patterns, index=st.integers(0, 16), extra=st.integers(0, 3))
@settings(max_examples=examples(150), deadline=None)
def test_the_worst_client_has_the_largest_sum_over_its_rounds(
    mechanisms: list[Factorization], rounds_of_clients: list[list[int]], index: int, extra: int
) -> None:
    factorization = mechanisms[index]
    last = max((client[-1] for client in rounds_of_clients if client), default=-1)
    num_rounds = min(_NUM_ROUNDS, last + 1 + extra)
    worst = _worst(factorization, rounds_of_clients, num_rounds)
    if last < 0:
        assert worst is None
        return
    strategy = factorization.strategy_matrix()
    square = strategy.shape[0] == strategy.shape[1]
    strategy = strategy[:num_rounds] if square else strategy
    gram: np.ndarray = np.abs(strategy.T @ strategy)
    values = [math.sqrt(gram[np.ix_(client, client)].sum()) for client in rounds_of_clients]
    assert worst is not None
    assert worst.sensitivity == pytest.approx(max(values))
    assert values[int(worst.client_id)] == pytest.approx(max(values))
    assert list(worst.rounds) == rounds_of_clients[int(worst.client_id)]


@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_negative_correlations_count_as_much(scale: float) -> None:
    """Against all signs: bands 1, -0.5 make every other entry of C^T C negative."""
    strategy = scale * (np.eye(5) - 0.5 * np.eye(5, k=-1))
    factorization = DenseFactorization(strategy)
    assert np.any(strategy.T @ strategy < 0.0)
    patterns = [[0, 1], [0, 2, 3], [1, 2], [0, 1, 2, 3, 4], [4]]
    for pattern in patterns:
        worst = _worst(factorization, [pattern], 5)
        by_signs = max(
            np.linalg.norm(strategy[:, pattern] @ np.array(signs))
            for signs in itertools.product([1.0, -1.0], repeat=len(pattern))
        )
        assert worst is not None
        assert worst.sensitivity == pytest.approx(by_signs)


@given(rounds_of_clients=_patterns, index=st.integers(0, 16))
@settings(max_examples=examples(100), deadline=None)
def test_no_client_is_worse_off_than_the_observed_guarantee_says(
    mechanisms: list[Factorization], rounds_of_clients: list[list[int]], index: int
) -> None:
    factorization = mechanisms[index]
    plan = guarantees.planned(factorization, MinSeparation(3), 1.0, 1e-5)
    observed = guarantees.observed_participation(rounds_of_clients, _NUM_ROUNDS)
    guarantee = guarantees.observed(plan, observed)
    record = _ledger(rounds_of_clients, _NUM_ROUNDS)
    worst = WorstClient.of_ledger(plan, record)
    if worst is None:
        assert observed.max_participations == 0
    else:
        assert worst.epsilon <= guarantee.epsilon * (1 + 1e-9) + 1e-9
        assert worst.client_id in record.client_ids


def test_many_clients_are_looked_up_in_parts() -> None:
    generator = np.random.default_rng(3)
    patterns = [np.sort(generator.choice(300, 60, replace=False)) for _ in range(9_000)]
    worst = _worst(identity(300), patterns, 300)
    assert worst is not None
    assert worst.client_id == "0"
    assert worst.sensitivity == pytest.approx(np.sqrt(60))


@pytest.mark.parametrize("name", ["banded", "toeplitz", "tree", "identity"])
def test_few_rounds_of_many_planned_take_little_memory(name: str) -> None:
    """A run that ends early: all of C would have 80 GB and more."""
    planned = 100_000
    bands = np.column_stack([np.ones(planned), np.full(planned, -0.4)])
    bands[0, 1] = 0.0
    factorization = {
        "banded": lambda: BandedFactorization(bands),
        "toeplitz": lambda: ToeplitzFactorization(
            planned, np.array([1.0, 0.5]), equal_column_norms=True
        ),
        "tree": lambda: tree_aggregation(planned),
        "identity": lambda: identity(planned),
    }[name]()
    clients = [[0, 5], [1, 2, 6]]
    found = _worst(factorization, clients, 7)
    assert found is not None
    assert found.client_id == "1"
    observed = guarantees.observed_participation(clients, 7)
    plan = guarantees.planned(factorization, MinSeparation(2), 1.0, 1e-5)
    guarantee = guarantees.observed(plan, observed)
    assert found.sensitivity <= guarantee.sensitivity * (1.0 + 1e-9)


def test_too_many_rounds_have_no_answer() -> None:
    assert _worst(identity(10_000), [[1]], 10_000) is None
    assert _worst(identity(4), [], 0) is None
