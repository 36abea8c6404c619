"""Numbers: others are refused by name, and printed ones are never better than computed ones."""

import decimal
import fractions
import json
import math
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mf_aggregators as mfa
from mf_aggregators import inputs
from mf_aggregators.kernel import numbers
from mf_aggregators.participation import (
    FixedEpochOrder,
    MinSeparation,
    PoissonSampling,
    sampling_scheme,
)
from tests.refusals import refuses

_POSITIVE = st.floats(1e-9, 1e7)
_NO_NUMBERS: list[Any] = [
    "1",
    b"1",
    bytearray(b"1"),
    np.str_("1"),
    np.array("1"),
    True,
    np.bool_(True),
    np.array(True),
    None,
    [1.0],
    np.array([1.0]),
    np.array([[1]]),
    1j,
    np.complex128(1.0),
    np.timedelta64(1),
    {},
    np.ma.masked,
    np.ma.array(2.0, mask=True),
    *(np.array(each, object) for each in (np.complex128(1j), np.timedelta64(1))),
]
# What makes other kinds of numbers of Python's.
_KINDS: list[Callable[[Any], Any]] = [
    np.float32,
    np.float64,
    np.array,
    fractions.Fraction,
    decimal.Decimal,
]
_INTEGER_KINDS: list[Callable[[Any], Any]] = [np.int32, np.uint8, np.array]
_NO_INTEGERS = [1.0, np.float64(1.0), math.nan, math.inf, fractions.Fraction(1)]
_ONE = mfa.factorizations.identity(4)
_SINGLE = mfa.participation.SingleParticipation()
_SCHEME = {"num_rounds": 4, "num_bands": 2, "population": 40, "clients_per_round": 10}
_POISSON = PoissonSampling(**_SCHEME)
_NOISE = {"noise_multiplier": 1.0, "delta": 1e-6}


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
    assert Decimal(inputs.in_full(value, factor)) == _decimal(value) * factor


def test_numbers_in_full_are_as_people_write_them() -> None:
    for value, text in ((48.0, "48"), (100.0, "100"), (0.001, "0.001"), (0.0, "0"), (-1.5, "-1.5")):
        assert inputs.in_full(value) == text
    assert (inputs.in_full(0.0007, 100), inputs.in_full(0.001, 100)) == ("0.07", "0.1")
    assert (inputs.in_full(1e-9), inputs.in_full(1e300)) == ("1e-9", "1e+300")
    assert inputs.in_full(math.inf) == "inf"


@pytest.mark.parametrize("form", ["4g", ".4e", ".g", ".16g", ".0f", ""])
def test_other_formats_are_refused(form: str) -> None:
    with pytest.raises(ValueError, match="form must"):
        numbers.rounded_up(1.0, form)


def _with(function: Callable[..., Any], name: str, /, **others: Any) -> Callable[[Any], Any]:
    """A function of one of its arguments, the others of which are given."""
    return lambda value: function(**{**others, name: value})


# By the name of an argument: a public function of it.
_REALS: list[tuple[str, Callable[[Any], Any]]] = [
    ("noise_multiplier", _with(mfa.accounting.epsilon, "noise_multiplier", delta=1e-6)),
    ("delta", _with(mfa.accounting.epsilon, "delta", noise_multiplier=1.0)),
    ("epsilon", _with(mfa.accounting.noise_multiplier, "epsilon", delta=1e-6)),
    ("rho", mfa.accounting.noise_multiplier_of_zcdp),
    ("noise_multiplier", _with(_POISSON.epsilon, "noise_multiplier", delta=1e-6)),
    ("momentum", lambda value: mfa.workloads.momentum_sgd(4, momentum=value)),
    ("initial_norm", _with(mfa.AdaptiveClip, "initial_norm")),
]
_INTEGERS: list[tuple[str, Callable[[Any], Any]]] = [
    ("update_period", _with(mfa.AdaptiveClip, "update_period")),
    ("max_participations", lambda value: MinSeparation(1, value)),
    ("epochs", lambda value: FixedEpochOrder(value, 1)),
    ("num_rounds", mfa.factorizations.identity),
    ("num_bands", lambda value: mfa.factorizations.toeplitz(4, num_bands=value)),
    ("rank", lambda value: mfa.factorizations.structured(_ONE, 1, value)),
    ("num_coordinates", _with(mfa.accounting.epsilon, "num_coordinates", **_NOISE)),
    *((name, _with(PoissonSampling, name, **_SCHEME)) for name in _SCHEME),
]
_ARRAYS: list[tuple[str, Callable[[Any], Any]]] = [
    ("strategy", lambda value: mfa.sensitivity.compute(value, _SINGLE)),
    ("workload", lambda value: inputs.lower_triangular(value, "the workload")),
    ("learning_rates", lambda value: mfa.workloads.momentum_sgd(2, learning_rates=value)),
    ("false_positive_rate", lambda value: mfa.accounting.true_positive_rate(1.0, value)),
    ("bands", mfa.factorizations.BandedFactorization),
]


def _refused(function: Callable[[Any], Any], value: Any, name: str) -> None:
    with pytest.raises(ValueError, match=name) as raised:
        function(value)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 200


@pytest.mark.parametrize(("name", "function"), _REALS)
def test_what_is_no_number_is_refused_by_name(name: str, function: Callable[[Any], Any]) -> None:
    for value in [*_NO_NUMBERS, math.nan, np.float32("nan"), -math.inf, 10**400]:
        _refused(function, value, name)


@pytest.mark.parametrize(("name", "function"), _INTEGERS)
def test_what_is_no_integer_is_refused_by_name(name: str, function: Callable[[Any], Any]) -> None:
    optional = ("max_participations", "num_bands")
    for value in [*_NO_NUMBERS, *_NO_INTEGERS, 0, -1]:
        # None stands for a default there, and a rank may be zero.
        if not (value is None and name in optional) and not (value == 0 and name == "rank"):
            _refused(function, value, name)


@pytest.mark.parametrize(("name", "function"), _ARRAYS)
def test_texts_in_arrays_are_refused_by_name(name: str, function: Callable[[Any], Any]) -> None:
    for value in (
        [["1", "0"], ["1", "1"]],
        [[b"1", b"0"], [b"1", b"1"]],
        np.array([["1", 0], [1, 1]], object),
        [[1j, 0], [1, 1]],
        [[fractions.Fraction(1), 0], [np.complex128(1j), 1]],
        [[np.array(True), 0], [1, 1]],
        np.ma.array([[1.0, 0.0], [1.0, 1.0]], mask=[[0, 1], [0, 0]]),
        np.zeros((2, 2), "f8,f8"),
        [[1.0], [1.0, 1.0]],
        "1",
        {},
        [10**400],
    ):
        _refused(function, value, name)


def test_things_are_counted() -> None:
    assert [numbers.counted(number, "round") for number in (0, 1, 2)] == [
        *("0 rounds", "1 round", "2 rounds")
    ]


def test_numbers_of_numpy_are_numbers() -> None:
    for function, value in (
        (_with(mfa.accounting.epsilon, "noise_multiplier", delta=2.0**-20), 0.5),
        (_with(mfa.accounting.epsilon, "delta", noise_multiplier=1.0), 2.0**-20),
        (_with(mfa.AdaptiveClip, "initial_norm"), 0.5),
        (_with(mfa.AdaptiveClip, "clipped_count_stddev"), 4.0),
    ):
        plain = function(value)
        for kind in _KINDS:
            assert function(kind(value)) == plain
    for integers in _INTEGER_KINDS:
        separation = integers(3)
        schema = MinSeparation(separation, max_participations=separation)
        assert schema == MinSeparation(3, 3)
        assert hash(schema) == hash(MinSeparation(3, 3))
        assert json.loads(json.dumps(schema.to_dict()))["separation"] == 3
        scheme = sampling_scheme(
            "balls_in_bins", **{name: integers(size) for name, size in _SCHEME.items()}
        )
        assert json.loads(json.dumps(scheme.to_dict())) == scheme.to_dict()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (np.ones((3, 2)), "an array of shape (3, 2)"),
        (np.float64(0.5), repr(np.float64(0.5))),
        ([1] * 99, "a list of length 99"),
        ("a" * 99, "a str of length 99"),
        (["a", 1], "['a', 1]"),
        ("a" * 78, repr("a" * 78)),
    ],
    ids=str,
)
def test_values_are_shown_in_few_words(value: Any, text: str) -> None:
    assert numbers.shown(value) == text


@pytest.mark.parametrize(
    ("check", "taken", "refused"),
    [
        (numbers.non_negative_integer, (0,), (-1,)),
        (numbers.finite_number, (-2.5, 0.0), (math.inf, math.nan)),
        (numbers.fraction, (0.0, 1.0), (-5e-324, 1.0 + 2.0**-52, math.nan)),
        (numbers.positive_number, (5e-324,), (0.0, math.inf)),
        (numbers.non_negative_number, (0.0,), (-5e-324, math.inf)),
        (numbers.epsilon, (0.0, math.inf), (-5e-324, math.nan)),
        (numbers.delta, (5e-324, 1.0 - 2.0**-53), (0.0, 1.0, math.nan)),
    ],
)
def test_ranges_end_where_they_are_said_to(
    check: Callable[[Any, str], float], taken: tuple[float, ...], refused: tuple[float, ...]
) -> None:
    assert tuple(check(each, "x") for each in taken) == taken
    for each in refused:
        with refuses("x"):
            check(each, "x")


def test_infinity_is_no_epsilon_and_floats_are_not_copied() -> None:
    assert numbers.stated_pair(1.0, 0.25) == "(1, 0.25)-DP"
    assert numbers.stated_pair(math.inf, 0.25) == "no finite epsilon at delta 0.25"
    ones = np.ones(3)
    assert numbers.real_array(ones, "x") is ones
    assert len(numbers.digest("")) == 32
