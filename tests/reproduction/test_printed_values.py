"""Printed numbers and their last digits."""

import decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reproduction import printed_values
from tests.refusals import refuses


@given(st.integers(-(10**6), 10**6), st.integers(0, 6), st.floats(-3.0, 3.0))
def test_what_rounds_to_the_digits_agrees(digits: int, places: int, distance: float) -> None:
    """Half-way cases, which rounding decides by its own rule, are left out."""
    number = decimal.Decimal(digits).scaleb(-places)
    unit = decimal.Decimal(1).scaleb(-places)
    computed = float(number) + distance * float(unit)
    exactly = abs(decimal.Decimal(computed) - number) / unit
    if abs(exactly - decimal.Decimal("0.5")) < decimal.Decimal("1e-6"):
        return
    printed = printed_values.parse(f"{number:f}")
    assert printed.agrees(computed) == (exactly < decimal.Decimal("0.5"))
    assert printed.value == float(number)


def test_bounds() -> None:
    at_most = printed_values.parse("<=1.15")
    assert [at_most.agrees(value) for value in (0.2, 1.15, 1.1549, 1.156)] == [True] * 3 + [False]
    at_least = printed_values.parse(">= 2.0")
    assert [at_least.agrees(value) for value in (7.0, 1.96, 1.94)] == [True, True, False]
    for relation in ("", "<=", ">="):
        assert not printed_values.parse(f"{relation}1.5").agrees(float("nan"))


def test_differences() -> None:
    assert printed_values.parse("4.00").relative_difference(5.0) == pytest.approx(0.25)
    assert printed_values.parse("0.0").relative_difference(5.0) is None


@pytest.mark.parametrize("text", ["", "about 2", "1,000", "<1", "1.", "nan", "inf"])
def test_what_is_no_printed_number_is_refused(text: str) -> None:
    with refuses("value"):
        printed_values.parse(text)
