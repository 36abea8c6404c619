"""Guarantees are of exactly the library's schemas and schemes, made anew from their fields."""

from typing import Any

import numpy as np
import pytest

import mf_aggregators as mfa
from mf_aggregators.participation import (
    Amplified,
    MinSeparation,
    Participation,
    PoissonSampling,
    SamplingScheme,
)
from mf_aggregators.privacy.ledgers import Ledger
from tests.refusals import refuses

_DELTA = 1e-5
_SIZES = (8, 1, 40, 10)


class _Once(MinSeparation):
    pass


class _Seldom(PoissonSampling):
    @property
    def sampling_probability(self) -> float:
        return 1e-9


class _Duck:
    name = "duck"

    def as_schema(self) -> None:
        raise AssertionError


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (_Once(2), "MinSeparation"),
        (_Seldom(*_SIZES), "schema that they keep"),
        (_Duck(), "MinSeparation"),
        (None, "MinSeparation"),
        (MinSeparation, "MinSeparation"),
        (3, "MinSeparation"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_classes_are_refused(given: Any, words: str) -> None:
    matrix = mfa.factorizations.identity(8)
    with refuses(words, "participation", error=TypeError):
        mfa.Mechanism(matrix, given, 1.0)
    with refuses(words, error=TypeError):
        mfa.calibrate(matrix, given, epsilon=8.0, delta=1e-6)
    if not isinstance(given, SamplingScheme):
        with refuses("MinSeparation", error=TypeError):
            mfa.sensitivity.compute(np.eye(8), given)
    sampling: Any = 3 if given is None else given
    with refuses("no subclass", error=TypeError):
        Ledger(("a",), (np.array([0]),), 2, sampling)


def test_a_scheme_is_no_schema() -> None:
    with refuses("MinSeparation", "PoissonSampling", error=TypeError):
        mfa.participation.check(PoissonSampling(*_SIZES))


def test_methods_and_fields_that_were_replaced_count_for_nothing() -> None:
    timers: Participation = MinSeparation(2)
    drawn = PoissonSampling(*_SIZES)
    matrix = mfa.factorizations.identity(8)
    expected = mfa.Mechanism(matrix, timers, 1.0).guarantee(_DELTA)
    object.__setattr__(timers, "as_schema", lambda: MinSeparation(8).as_schema())
    assert mfa.Mechanism(matrix, timers, 1.0).guarantee(_DELTA) == expected
    amplified = drawn.epsilon(1.0, _DELTA)
    object.__setattr__(drawn, "amplified", lambda *_: Amplified(0.01, None))
    mechanism = mfa.Mechanism(matrix, drawn, 1.0)
    assert mechanism.guarantee(_DELTA).epsilon == pytest.approx(amplified)
    object.__setattr__(drawn, "clients_per_round", 400)
    with refuses("population of 40"):
        mfa.Mechanism(matrix, drawn, 1.0)
