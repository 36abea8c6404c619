"""A scheme of another package is accounted for by its schema alone, and its draws are checked.

Schemes here are of the package ``tests``, which is another one than the library.
"""

import dataclasses
import math
import pathlib
from typing import Any, ClassVar

import numpy as np
import pytest
from dp_accounting import dp_event

import mf_aggregators as mfa
from mf_aggregators import accounting
from mf_aggregators.kernel.draws_of_clients import AllParticipations
from mf_aggregators.participation import (
    Amplified,
    FixedEpochOrder,
    MinSeparation,
    Participation,
    PoissonSampling,
    Sampler,
    SamplingScheme,
    SingleParticipation,
    registry,
    samplers,
)
from mf_aggregators.privacy import guarantees
from mf_aggregators.privacy.ledgers import Ledger
from tests.refusals import refuses

_DELTA = 1e-5
_SIZES = (8, 1, 40, 10)


class _Nobody(Sampler):
    def _draw(self, round_index: int) -> np.ndarray:
        return np.zeros(0, np.int64)


@dataclasses.dataclass(frozen=True)
class _Enrolled(SamplingScheme):
    """Everybody is in one round at most."""

    name: ClassVar[str] = "enrolled"

    def schema(self) -> Participation:
        return SingleParticipation()

    def sampler(self, seed: int) -> Sampler:
        return _Nobody(self, seed)


_ENROLLED = _Enrolled(*_SIZES)


def _scheme(**methods: Any) -> SamplingScheme:
    """The scheme with other methods."""
    made = type("_Other", (_Enrolled,), {**methods, "__module__": __name__})
    found: SamplingScheme = made(*_SIZES)
    return found


# Each would make the guarantee of the four participations of its schema better than it is.
_CLAIMS: dict[str, Any] = {
    "amplified": lambda *_: Amplified(0.01, None),
    "calibrated": lambda *_: 0.1,
    "estimated": lambda *_: 0.1,
    "epsilon": lambda *_, **__: 0.01,
    "is_amplified": True,
    "all_participations": lambda *_: AllParticipations(0.1, 1),
    "most_participations": lambda *_: 1,
    "separation_in": lambda *_: 8,
    "shares_rows": False,
    "largest_move": 0.01,
    "of_first": lambda self, rounds: dataclasses.replace(self, num_rounds=rounds),
    "curve": lambda *_: ((0.0, 1e-9),),
    "log_moments": lambda *_: ((2, 1e-9),),
    "divergences": lambda *_: ((0.0, 1e-9),),
    "run_losses": lambda *_: None,
    "event_of": lambda *_: dp_event.NoOpDpEvent(),
    "deviation": lambda *_: None,
    "_deviation_of_rounds": lambda *_: None,
    "_unamplified": lambda *_: (0.01, None),
    "_enough": lambda *_: 0.1,
    "__eq__": lambda *_: True,
    "__hash__": lambda *_: 0,
}


@pytest.mark.parametrize(
    "claims", [{each: _CLAIMS[each]} for each in _CLAIMS] + [_CLAIMS], ids=[*_CLAIMS, "all"]
)
def test_nothing_is_amplified_whatever_a_scheme_overrides(claims: dict[str, Any]) -> None:
    """Guarantee, calibration, event, attacker, parts of runs and observed ledgers."""
    scheme = _scheme(schema=lambda self: FixedEpochOrder(4, 2), **claims)
    matrix = mfa.factorizations.identity(8)
    sigma = 2.0 * accounting.noise_multiplier(3.0, _DELTA)
    mechanism = mfa.calibrate(matrix, scheme, epsilon=3.0, delta=_DELTA)
    assert mechanism.noise_multiplier == pytest.approx(sigma, rel=1e-9)
    plan = mechanism.guarantee(_DELTA)
    assert 2.99 <= plan.epsilon <= 3.0
    assert not plan.is_amplified
    assert guarantees.sampled(matrix, scheme, sigma, _DELTA).epsilon >= 2.99
    assert accounting.composed_epsilon([mechanism.event()], _DELTA) >= 2.99
    alone = accounting.true_positive_rate(sigma / 2.0, 0.01)
    assert plan.true_positive_rate(0.01) == pytest.approx(alone, rel=1e-4)
    if "epsilon" not in claims:
        assert scheme.epsilon(sigma, _DELTA) >= 2.99
    # A client in adjacent rounds breaks the schema.
    ledger = Ledger(("a",), (np.array([0, 1]),), 2)
    assert mechanism.observed(ledger).keeps_participation is False


@pytest.mark.parametrize("schema", [PoissonSampling(*_SIZES), None, _ENROLLED, 3])
def test_a_schema_is_one_of_the_library(schema: Any) -> None:
    with refuses("schema() of the sampling scheme enrolled", "MinSeparation"):
        mfa.Mechanism(mfa.factorizations.identity(8), _scheme(schema=lambda *_: schema), 1.0)


def test_a_schema_that_fails_is_named() -> None:
    with refuses("schema() of the sampling scheme enrolled", "zero"):
        mfa.Mechanism(mfa.factorizations.identity(8), _scheme(schema=lambda *_: 1 / 0), 1.0)


def test_subclasses_of_the_librarys_schemas_and_schemes_are_refused() -> None:
    class Once(MinSeparation):
        def largest_sum(self, weights: np.ndarray) -> float:
            return 0.1

    class Seldom(PoissonSampling):
        @property
        def sampling_probability(self) -> float:
            return 1e-9

    matrix = mfa.factorizations.identity(8)
    for given, base in ((Once(2), "MinSeparation"), (Seldom(*_SIZES), "PoissonSampling")):
        with refuses(type(given).__qualname__, base, "SamplingScheme", error=TypeError):
            mfa.calibrate(matrix, given, epsilon=8.0, delta=1e-6)
    with refuses("Once", "MinSeparation", error=TypeError):
        mfa.sensitivity.compute(np.eye(8), Once(2))
    with refuses("Seldom", "PoissonSampling", error=TypeError):
        Seldom(*_SIZES).epsilon(1.0, _DELTA)


def test_methods_of_an_object_alone_count_for_nothing() -> None:
    timers, drawn = MinSeparation(2), PoissonSampling(*_SIZES)
    object.__setattr__(timers, "largest_sum", lambda weights: 0.1)
    with refuses("attributes of its own", error=TypeError):
        mfa.Mechanism(mfa.factorizations.identity(8), timers, 1.0)
    expected = drawn.epsilon(1.0, _DELTA)
    object.__setattr__(drawn, "amplified", lambda *_: Amplified(0.01, None))
    assert drawn.epsilon(1.0, _DELTA) == expected
    mechanism = mfa.Mechanism(mfa.factorizations.identity(8), drawn, 1.0)
    assert mechanism.guarantee(_DELTA).epsilon == pytest.approx(expected)
    object.__setattr__(drawn, "clients_per_round", 400)
    with refuses("population of 40"):
        mfa.Mechanism(mfa.factorizations.identity(8), drawn, 1.0)


def test_a_saved_mechanism_of_a_package_that_is_gone_is_not_broken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    mechanism = mfa.Mechanism(mfa.factorizations.identity(8), _ENROLLED, 1.0)
    mechanism.save(tmp_path / "theirs")
    monkeypatch.setattr(registry, "sampling_schemes", lambda: {"enrolled": _Enrolled})
    assert mfa.load(tmp_path / "theirs") == mechanism
    monkeypatch.setattr(registry, "sampling_schemes", lambda: {"poisson": PoissonSampling})
    with refuses(
        *("the sampling scheme 'enrolled'", "install", registry.GROUP),
        error=mfa.checkpoints.CheckpointError,
    ) as refused:
        mfa.load(tmp_path / "theirs")
    assert "broken" not in str(refused.value)


def test_a_sampler_is_one_of_the_scheme() -> None:
    for made in (None, 3, _Nobody):
        with refuses("enrolled", "sampler", "participation.Sampler"):
            samplers.sampler_of(_scheme(sampler=lambda *_, made=made: made), 1)
    other = dataclasses.replace(_ENROLLED, population=50)
    with refuses("enrolled", "this scheme"):
        samplers.sampler_of(_scheme(sampler=lambda *_: _Nobody(other, 1)), 1)
    assert len(samplers.sampler_of(_ENROLLED, 1).draw(0)) == 0


@pytest.mark.parametrize(
    ("drawn", "problem"),
    [
        ([1, 2], "no array but list"),
        (None, "no array but NoneType"),
        (np.array([1.0, 2.0]), "float64"),
        (np.array([True, False]), "bool"),
        (np.array([[1, 2]]), "shape (1, 2)"),
        (np.array([1, 1, 2]), "a client twice"),
        (np.array([2, 1, 2]), "a client twice"),
        (np.array([2, 1]), "increasing order"),
        (np.array([2, 1], np.uint64), "increasing order"),
        (np.array([1, 40]), "outside of the population"),
        (np.array([-1, 1]), "outside of the population"),
        (np.array([2**64 - 1], np.uint64), "outside of the population"),
    ],
)
def test_draws_are_different_clients_of_the_population(drawn: Any, problem: str) -> None:
    """Also where the sampler has a check of its own that finds nothing wrong."""

    class Drawing(_Nobody):
        def _draw(self, round_index: int) -> np.ndarray:
            return drawn if round_index == 3 else super()._draw(round_index)

        def _problem_of(self, drawn: Any) -> None:
            return None

    sampler = samplers.sampler_of(_scheme(sampler=lambda self, seed: Drawing(self, seed)), 1)
    assert len(sampler.draw(2)) == 0
    with refuses("enrolled", "draw(3)", problem, "population of 40"):
        sampler.draw(3)


def test_draws_that_fail_are_named() -> None:
    class Drawing(_Nobody):
        def _draw(self, round_index: int) -> np.ndarray:
            raise KeyError(math.pi)

    scheme = _scheme(sampler=lambda self, seed: Drawing(self, seed))
    with refuses("enrolled", "draw(1)", "KeyError"):
        samplers.sampler_of(scheme, 1).draw(1)


def test_draws_are_int64() -> None:
    class Drawing(_Nobody):
        def _draw(self, round_index: int) -> np.ndarray:
            return np.array([0, 39], np.uint16)

    found = Drawing(_ENROLLED, 1).draw(0)
    assert found.dtype == np.int64
    assert found.tolist() == [0, 39]
