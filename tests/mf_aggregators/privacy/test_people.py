"""People with several clients, against sums over all signs, and files that name their clients."""

import itertools
import pathlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mf_aggregators as mfa
from mf_aggregators.kernel.claim import Assumption
from mf_aggregators.privacy import people
from mf_aggregators.privacy.ledgers import Ledger, LedgerError
from mf_aggregators.privacy.people import People
from tests.examples import examples

_ROUNDS, _DELTA = 5, 1e-6


def _mechanism(noise_multiplier: float = 9.0) -> mfa.Mechanism:
    matrix = mfa.factorizations.banded(_ROUNDS, num_bands=3)
    timers = mfa.participation.MinSeparation(separation=2, max_participations=2)
    return mfa.Mechanism(matrix, timers, noise_multiplier)


def _ledger(rounds: dict[str, list[int]]) -> Ledger:
    arrays = tuple(np.array(each, np.int64) for each in rounds.values())
    return Ledger(tuple(rounds), arrays, _ROUNDS)


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
        planned = mechanism.unit_guarantee(_DELTA, num_clients=People(clients).most_clients)
        assert planned.sensitivity.value >= found.guarantee.sensitivity.value * (1.0 - 1e-12)


def test_one_client_each_is_the_worst_client() -> None:
    ledger = _ledger({"a": [0, 2], "b": [1], "c": [1, 4]})
    observed = _mechanism().observed(ledger, round_counts=_counts(ledger))
    worst = observed.worst_client(_DELTA)
    person = observed.least_protected_person({f"person {each}": (each,) for each in "abc"}, _DELTA)
    assert worst is not None
    assert person is not None
    assert person.clients == (worst.client_id,)
    assert person.guarantee.epsilon == worst.epsilon


def test_an_incomplete_ledger_shows_nothing_of_people() -> None:
    observed = _mechanism().observed(_ledger({"a": [0, 2]}))
    assert observed.least_protected_person({"A": ("a",)}, _DELTA) is None


def test_a_person_with_two_clients_is_planned_with_half_the_noise() -> None:
    mechanism = _mechanism()
    alone, two = (mechanism.unit_guarantee(_DELTA, num_clients=m) for m in (1, 2))
    assert alone.epsilon == mechanism.guarantee(_DELTA).epsilon
    assert two.noise_multiplier == pytest.approx(0.5 * alone.noise_multiplier)
    assert two.sigma == alone.sigma


def test_draws_have_no_amplified_guarantee_of_people() -> None:
    scheme = mfa.participation.PoissonSampling(8, 2, 100, 5)
    drawn = mfa.Mechanism(mfa.factorizations.banded(8, num_bands=2), scheme, 4.0)
    found = drawn.unit_guarantee(1e-5, num_clients=2)
    # Four participations in rows of their own, twice.
    assert found.sensitivity.value == pytest.approx(4.0 * drawn.guarantee(1e-5).sensitivity.value)
    assert not found.is_amplified


def test_files_say_whose_clients_are_whose(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "people.csv"
    file.write_text('person,client\nAda,phone\n\n"Bo, the second", tablet \nAda,tablet\n')
    found = people.load(file)
    assert found.clients == {"Ada": ("phone", "tablet"), "Bo, the second": ("tablet",)}
    assert found.weights == {"phone": 1, "tablet": 2}
    assert found.most_clients == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names nobody"),
        ("person,client\n", "names nobody"),
        ("Ada\n", "line 1 is not a person"),
        ("Ada,phone,7\n", "line 1 is not a person"),
        ("Ada,phone\nAda,phone\n", "line 2 repeats"),
        ("Ada,\n", "a name is empty"),
        ("Ada\u200b,phone\n", "U\\+200B"),
    ],
)
def test_other_files_are_refused(tmp_path: pathlib.Path, text: str, message: str) -> None:
    file = tmp_path / "people.csv"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(LedgerError, match=message):
        people.load(file)
    with pytest.raises(LedgerError, match="cannot be read"):
        people.load(tmp_path / "missing.csv")


def test_clients_that_are_nobodys_are_refused() -> None:
    ledger = _ledger({"a": [0], "b": [1], "never asked": []})
    observed = _mechanism().observed(ledger, round_counts=_counts(ledger))
    with pytest.raises(LedgerError, match="1 of 2 clients that took part are nobody's"):
        observed.least_protected_person({"A": ("a",)}, _DELTA)
    with pytest.raises(ValueError, match="needs clients"):
        People({"A": ("a", "a")})
