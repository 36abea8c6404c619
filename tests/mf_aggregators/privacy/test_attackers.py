"""What is said of attackers is never better than what was computed."""

from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators import accounting
from mf_aggregators.factorizations import identity
from mf_aggregators.participation import MinSeparation
from mf_aggregators.privacy import attackers, guarantees, statements
from tests.examples import examples


@given(st.floats(1e-6, 1.0))
@settings(max_examples=examples(200))
def test_percents_are_rounded_up(rate: float) -> None:
    shown = Decimal(attackers.percent(rate).removesuffix(" %")) / 100
    assert shown >= Decimal(rate)
    assert shown <= Decimal(rate) * Decimal("1.00011")


def test_a_guarantee_says_what_an_attacker_can_do() -> None:
    guarantee = guarantees.planned(identity(6), MinSeparation(2), 0.543, 1e-5)
    found = attackers.rates(guarantee, "planned_")
    assert list(found) == [
        "planned_true_positive_rate_at_0.01",
        "planned_true_positive_rate_at_0.001",
    ]
    assert found["planned_true_positive_rate_at_0.01"] == pytest.approx(0.3139349, abs=1e-6)
    # In per cent, rounded up.
    stated = statements.described(guarantee)["true_positive_percent"]
    assert stated == {"1": "31.4", "0.1": "10.6"}
    brief = attackers.rates_in_brief(guarantee)
    assert brief == (
        "31.394 % at a false positive rate of 1 % and 10.591 % at a false positive rate of 0.1 %"
    )
    assert attackers.rates_line(guarantee) == (
        "finds at most 31.394 % at 1 % false positives, 10.591 % at 0.1 %"
    )
    assert attackers.rates_sentence(guarantee).endswith(f"at most {brief}.")


def test_without_a_guarantee_an_attacker_may_find_everybody() -> None:
    for multiplier in (0.0, 0.1):
        guarantee = guarantees.planned(identity(6), MinSeparation(2), multiplier, 1e-5)
        assert set(attackers.rates(guarantee).values()) == {1.0}
    assert set(attackers.rates(None).values()) == {None}


def test_who_was_in_no_round_is_found_by_guessing_alone() -> None:
    factorization = identity(6)
    plan = guarantees.planned(factorization, MinSeparation(2), 1.0, 1e-5)
    nobody = guarantees.observed_participation([], 3)
    rates = attackers.rates(guarantees.observed(plan, nobody))
    assert list(rates.values()) == [0.01, 0.001]
    assert attackers.true_positive_rate(plan, 0.25) == accounting.true_positive_rate(1.0, 0.25)
