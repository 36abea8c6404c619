"""Who is protected least, against direct sums over rounds and signs; and files that name people."""

import itertools
import math
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mf_aggregators as mfa
from mf_aggregators.factorizations import (
    BandedFactorization,
    DenseFactorization,
    Factorization,
    ToeplitzFactorization,
    identity,
    tree_aggregation,
)
from mf_aggregators.kernel.claim import Assumption
from mf_aggregators.participation import MinSeparation, SingleParticipation
from mf_aggregators.privacy import guarantees, units
from mf_aggregators.privacy.ledgers import Ledger, LedgerError
from mf_aggregators.privacy.units import WorstClient
from tests.examples import examples
from tests.mf_aggregators import small_mechanisms

_ROUNDS, _DELTA = 5, 1e-6


def _mechanism(noise_multiplier: float = 9.0) -> mfa.Mechanism:
    matrix = mfa.factorizations.banded(_ROUNDS, num_bands=3)
    timers = mfa.participation.MinSeparation(separation=2, max_participations=2)
    return mfa.Mechanism(matrix, timers, noise_multiplier)


def _ledger(rounds: Mapping[str, Sequence[int] | np.ndarray], num_rounds: int = _ROUNDS) -> Ledger:
    arrays = tuple(np.array(each, np.int64) for each in rounds.values())
    return Ledger(tuple(rounds), arrays, num_rounds)


def _named(
    rounds_of_clients: Sequence[Sequence[int] | np.ndarray],
) -> dict[str, Sequence[int] | np.ndarray]:
    """Clients that are named by their index."""
    return {str(index): each for index, each in enumerate(rounds_of_clients)}


def _counts(ledger: Ledger) -> list[int]:
    return np.bincount(np.concatenate(ledger.rounds_of_clients), minlength=_ROUNDS).tolist()


_OWNERS = st.lists(st.sampled_from("ABC"), min_size=4, max_size=4)
_PATTERNS = st.lists(
    st.lists(st.integers(0, _ROUNDS - 1), unique=True, min_size=1).map(sorted),
    min_size=4,
    max_size=4,
)


@settings(max_examples=examples(120), deadline=None)
@given(owners=_OWNERS, patterns=_PATTERNS, shares=st.booleans())
def test_the_least_protected_person_moves_most(
    owners: list[str], patterns: list[list[int]], shares: bool
) -> None:
    """Every sign of every participation of each client; C has no entry below zero."""
    rounds = {str(i): each for i, each in enumerate(patterns)}
    clients: dict[str, tuple[str, ...]] = {}
    for client, owner in zip(rounds, owners, strict=True):
        clients[owner] = (*clients.get(owner, ()), client)
    if shares:
        clients["D"] = ("0",)
    mechanism, ledger = _mechanism(), _ledger(rounds)
    matrix = mechanism.factorization.strategy_matrix()
    assert np.all(matrix >= 0.0)
    moved = {}
    for person, own in clients.items():
        # With and without a person's part, the update of a client that others share may turn round.
        sizes = [
            np.bincount(rounds[each], minlength=_ROUNDS) * (1 + (shares and each == "0"))
            for each in own
        ]
        most = np.sum(sizes, axis=0)
        moved[person] = max(
            float(np.linalg.norm(matrix @ (most * signs)))
            for signs in itertools.product((-1.0, 1.0), repeat=_ROUNDS)
        )
    observed = mechanism.observed(ledger, round_counts=_counts(ledger))
    found = observed.least_protected_person(clients, _DELTA)
    assert found is not None
    assert found.guarantee.sensitivity.value == pytest.approx(max(moved.values()))
    assert moved[found.name] == pytest.approx(max(moved.values()))
    assert found.clients == clients[found.name]
    assert Assumption.PEOPLE in found.guarantee.assumptions
    if observed.keeps_participation:
        planned = mechanism.unit_guarantee(_DELTA, num_clients=units.most_clients(clients))
        assert planned.sensitivity.value >= found.guarantee.sensitivity.value * (1.0 - 1e-12)


def test_one_client_each_is_the_worst_client() -> None:
    ledger = _ledger({"a": [0, 2], "b": [1], "c": [1, 4]})
    observed = _mechanism().observed(ledger, round_counts=_counts(ledger))
    worst = observed.worst_client(_DELTA)
    person = observed.least_protected_person({f"person {each}": (each,) for each in "abc"}, _DELTA)
    assert worst is not None
    assert person is not None
    assert person.clients == (worst.client_id,)
    assert person.guarantee.epsilon == worst.guarantee.epsilon


def test_an_incomplete_ledger_shows_nothing_of_people() -> None:
    observed = _mechanism().observed(_ledger({"a": [0, 2]}))
    assert observed.least_protected_person({"A": ("a",)}, _DELTA) is None


def test_files_say_whose_clients_are_whose(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "people.csv"
    file.write_text('person,client\nAda,phone\n\n"Bo, the second", tablet \nAda,tablet\n')
    found = units.people_of(file)
    assert found == {"Ada": ("phone", "tablet"), "Bo, the second": ("tablet",)}
    assert units.most_clients(found) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names nobody"),
        ("person,client\n", "names nobody"),
        ("Ada\n", "line 1: expected a person"),
        ("Ada,phone,7\n", "line 1: expected a person"),
        ("Ada,phone\nAda,phone\n", "line 2: repeats"),
        ("Ada,\n", "a name is empty"),
        ("Ada\u200b,phone\n", "U\\+200B"),
    ],
)
def test_other_files_are_refused(tmp_path: pathlib.Path, text: str, message: str) -> None:
    file = tmp_path / "people.csv"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(LedgerError, match=message):
        units.people_of(file)
    with pytest.raises(LedgerError, match="cannot be read"):
        units.people_of(tmp_path / "missing.csv")


def test_clients_that_are_nobodys_are_refused() -> None:
    ledger = _ledger({"a": [0], "b": [1], "never asked": []})
    observed = _mechanism().observed(ledger, round_counts=_counts(ledger))
    with pytest.raises(LedgerError, match="1 of 2 clients that took part are nobody's"):
        observed.least_protected_person({"A": ("a",)}, _DELTA)
    with pytest.raises(ValueError, match="needs clients"):
        units.people_of({"A": ("a", "a")})


_NUM_ROUNDS = 9
_patterns = st.lists(
    st.lists(st.integers(0, _NUM_ROUNDS - 1), unique=True).map(sorted), min_size=1, max_size=8
)


def _worst(
    factorization: Factorization,
    rounds_of_clients: Sequence[Sequence[int] | np.ndarray],
    num_rounds: int,
) -> WorstClient | None:
    plan = guarantees.planned(factorization, SingleParticipation(), 1.0, 1e-5)
    return units.worst_client(plan, _ledger(_named(rounds_of_clients), num_rounds))


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
    assert worst.guarantee.sensitivity.value == pytest.approx(max(values))
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
        assert worst.guarantee.sensitivity.value == pytest.approx(by_signs)


@given(rounds_of_clients=_patterns, index=st.integers(0, 16))
@settings(max_examples=examples(100), deadline=None)
def test_no_client_is_worse_off_than_the_observed_guarantee_says(
    mechanisms: list[Factorization], rounds_of_clients: list[list[int]], index: int
) -> None:
    factorization = mechanisms[index]
    plan = guarantees.planned(factorization, MinSeparation(3), 1.0, 1e-5)
    observed = guarantees.observed_participation(rounds_of_clients, _NUM_ROUNDS)
    guarantee = guarantees.observed(plan, observed)
    record = _ledger(_named(rounds_of_clients), _NUM_ROUNDS)
    worst = units.worst_client(plan, record)
    if worst is None:
        assert observed.max_participations == 0
    else:
        assert worst.guarantee.epsilon <= guarantee.epsilon * (1 + 1e-9) + 1e-9
        assert worst.client_id in record.client_ids


def test_many_clients_are_looked_up_in_parts() -> None:
    generator = np.random.default_rng(3)
    patterns = [np.sort(generator.choice(300, 60, replace=False)) for _ in range(9_000)]
    worst = _worst(identity(300), patterns, 300)
    assert worst is not None
    assert worst.client_id == "0"
    assert worst.guarantee.sensitivity.value == pytest.approx(np.sqrt(60))


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
    assert found.guarantee.sensitivity.value <= guarantee.sensitivity * (1.0 + 1e-9)
