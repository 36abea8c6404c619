"""Printed numbers are never better than computed ones, and nearly as good: as decimals."""

import math
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mf_aggregators.kernel import numbers

_POSITIVE = st.floats(1e-9, 1e7)


def _decimal(value: float) -> Decimal:
    """The shortest decimal that is read as a float."""
    return Decimal(repr(float(value)))


def _unit(text: str) -> Decimal:
    """One unit of the last digit that a text shows or leaves out as a trailing zero of g."""
    exponent = Decimal(text).as_tuple().exponent
    assert isinstance(exponent, int)
    return Decimal(1).scaleb(exponent)


@given(_POSITIVE, st.integers(1, 15))
def test_significant_digits_are_rounded_up_and_down_by_less_than_a_unit(
    value: float, digits: int
) -> None:
    form = f".{digits}g"
    unit = Decimal(1).scaleb(_decimal(value).adjusted() - digits + 1)
    above, below = numbers.rounded_up(value, form), numbers.rounded_down(value, form)
    assert 0 <= Decimal(above) - _decimal(value) < unit
    assert 0 <= _decimal(value) - Decimal(below) < unit
    assert float(above) >= value >= float(below)
    # The number is as short as format would have it.
    assert len(above.replace("-", "").split("e")[0].replace(".", "").lstrip("0")) <= digits + 1
    assert format(value, form) in (above, below)


@given(_POSITIVE, st.integers(1, 12))
def test_decimals_are_rounded_up_and_down_by_less_than_a_unit(value: float, digits: int) -> None:
    above, below = (f(value, f".{digits}f") for f in (numbers.rounded_up, numbers.rounded_down))
    assert _unit(above) == _unit(below) == Decimal(1).scaleb(-digits)
    assert 0 <= Decimal(above) - _decimal(value) < _unit(above)
    assert 0 <= _decimal(value) - Decimal(below) < _unit(below)


def test_numbers_that_the_format_has_are_printed_as_they_are() -> None:
    assert numbers.rounded_up(8.0, ".3f") == numbers.rounded_down(8.0, ".3f") == "8.000"
    assert numbers.rounded_up(8.0) == "8"
    assert numbers.rounded_up(math.nextafter(8.0, 9.0), ".3f") == "8.001"
    assert numbers.rounded_up(0.0, ".6g") == "0"
    assert numbers.rounded_up(math.inf) == "inf"
    assert numbers.pair(7.9999999999, 1.2345678e-6) == "(8, 1.23457e-06)"


@given(st.floats(1e-300, 1e300), st.sampled_from([1, 100]))
def test_numbers_in_full_are_the_numbers(value: float, factor: int) -> None:
    assert Decimal(numbers.in_full(value, factor)) == _decimal(value) * factor


def test_numbers_in_full_are_as_people_write_them() -> None:
    for value, text in ((48.0, "48"), (100.0, "100"), (0.001, "0.001"), (0.0, "0"), (-1.5, "-1.5")):
        assert numbers.in_full(value) == text
    assert (numbers.in_full(0.0007, 100), numbers.in_full(0.001, 100)) == ("0.07", "0.1")
    assert (numbers.in_full(1e-9), numbers.in_full(1e300)) == ("1e-9", "1e+300")
    assert numbers.in_full(math.inf) == "inf"


@pytest.mark.parametrize("form", ["4g", ".4e", ".g", ".16g", ".0f", ""])
def test_other_formats_are_refused(form: str) -> None:
    with pytest.raises(ValueError, match="form must"):
        numbers.rounded_up(1.0, form)
