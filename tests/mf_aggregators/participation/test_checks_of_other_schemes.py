"""A scheme of another package that contradicts itself, or says what cannot be, is refused by name.

Schemes here are of the package ``tests``, which is another one than the library.
"""

import dataclasses
import math
import pathlib
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest

import mf_aggregators as mfa
from mf_aggregators import accounting
from mf_aggregators.accounting.trade_offs import AllParticipations
from mf_aggregators.commands import plan_text
from mf_aggregators.participation import (
    Amplified,
    FixedEpochOrder,
    PoissonSampling,
    Sampler,
    SamplingScheme,
    SingleParticipation,
    registry,
    samplers,
)
from mf_aggregators.participation.third_party import SchemeError
from mf_aggregators.planning import planner, plans, proposals
from mf_aggregators.privacy import guarantees
from tests.refusals import refuses

_DELTA = 1e-5
_PROBABILITY = 0.25
_SIZES = (8, 1, 40, 10)


class _Nobody(Sampler):
    def _draw(self, round_index: int) -> np.ndarray:
        return np.zeros(0, np.int64)


@dataclasses.dataclass(frozen=True)
class _Enrolled(SamplingScheme):
    """One secret coin per client: in all of its rounds with probability q, in none without.

    A mixture with what is released without the client: (log(1 + q (exp(e) - 1)), q d)-DP for every
    (e, d) of the unamplified run. It inherits the inverse.
    """

    name: ClassVar[str] = "enrolled"

    def schema(self) -> SingleParticipation:
        return SingleParticipation()

    def sampler(self, seed: int) -> Sampler:
        return _Nobody(self, seed)

    def amplified(self, sigma: float, delta: float, *rest: Any) -> Amplified:
        alone = accounting.epsilon(sigma, delta / _PROBABILITY)
        return Amplified(math.log1p(_PROBABILITY * math.expm1(alone)), None)


_ENROLLED = _Enrolled(*_SIZES)


def _scheme(**methods: Any) -> SamplingScheme:
    """The scheme with other methods."""
    made = type("_Other", (_Enrolled,), {**methods, "__module__": __name__})
    found: SamplingScheme = made(*_SIZES)
    return found


def _says(answer: Any) -> SamplingScheme:
    return _scheme(amplified=lambda *_: answer)


@pytest.mark.parametrize("target", [0.1, 3.0, 20.0])
def test_the_inverse_of_an_override_is_found(target: float) -> None:
    """Against the closed form, and never on the side of less noise."""
    closed = accounting.noise_multiplier(
        math.log1p(math.expm1(target) / _PROBABILITY), _DELTA / _PROBABILITY
    )
    found = _ENROLLED.noise_multiplier(target, _DELTA)
    assert found == pytest.approx(closed, rel=2e-6)
    assert _ENROLLED.epsilon(found, _DELTA) <= target
    # That there is amplification at all.
    assert found < 0.95 * accounting.noise_multiplier(target, _DELTA)


def test_the_inverse_starts_somewhere_where_participations_share_rows() -> None:
    class Returning(_Enrolled):
        def schema(self) -> FixedEpochOrder:  # type: ignore[override]
            return FixedEpochOrder(2, 1)

    scheme = Returning(8, 2, 40, 10)
    with refuses("1 apart"):
        scheme.all_participations(None)
    expected = _ENROLLED.noise_multiplier(3.0, _DELTA)
    assert scheme.noise_multiplier(3.0, _DELTA) == pytest.approx(expected, rel=2e-6)


def test_no_noise_gives_what_is_never_met() -> None:
    class Shared(_Enrolled):
        def schema(self) -> FixedEpochOrder:  # type: ignore[override]
            return FixedEpochOrder(2, 1)

        def amplified(self, *_: Any) -> Amplified:
            return Amplified(math.inf, None)

    with refuses("no noise multiplier up to 1e+12"):
        Shared(8, 2, 40, 10).noise_multiplier(3.0, _DELTA)


def test_noise_that_is_too_little_for_the_own_epsilon_is_refused() -> None:
    scheme = _scheme(calibrated=lambda *_: 0.3)
    alone = scheme.epsilon(0.3, _DELTA)
    matrix = mfa.factorizations.identity(8)
    said = ("enrolled", f"{__name__}._Other", "0.3", "epsilon 3", f"epsilon {alone:.6g}", "inverse")
    for refused in (
        lambda: scheme.noise_multiplier(3.0, _DELTA),
        lambda: mfa.calibrate(matrix, scheme, epsilon=3.0, delta=_DELTA),
        lambda: proposals.calibrated(matrix, scheme, 3.0, _DELTA, None),
    ):
        with refuses(*said, error=SchemeError):
            refused()
    # More than enough is the scheme's own business.
    assert _scheme(calibrated=lambda *_: 30.0).noise_multiplier(3.0, _DELTA) == 30.0


def test_an_inherited_inverse_of_another_epsilon_is_refused() -> None:
    """Poisson sampling's own inverse never asks what a subclass says in amplified."""

    class Weaker(PoissonSampling):
        def amplified(self, *given: Any, **more: Any) -> Amplified:
            found = super().amplified(*given, **more)
            return Amplified(1.1 * found.epsilon, None)

    assert PoissonSampling(*_SIZES).noise_multiplier(1.0, _DELTA) > 0.0
    with refuses("Weaker", "contradicts itself", error=SchemeError):
        Weaker(*_SIZES).noise_multiplier(1.0, _DELTA)


def test_rounding_alone_is_made_up_for() -> None:
    exact = _ENROLLED.noise_multiplier(3.0, _DELTA)
    least = _ENROLLED.epsilon(exact * (1.0 + 1e-13), _DELTA)
    scheme = _scheme(calibrated=lambda *_: exact)
    found = scheme.noise_multiplier(least, _DELTA)
    assert exact < found <= exact * (1.0 + 1.1e-6)
    assert scheme.epsilon(found, _DELTA) <= least


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (1.0, ("found", "Amplified")),
        (None, ("None", "Amplified")),
        (Amplified(1.0, "no certificate"), ("Amplified",)),  # type: ignore[arg-type]
        (Amplified(math.nan, None), ("nan",)),
        (Amplified(-3.0, None), ("-3", "at least 0")),
        (Amplified("one", None), ("number", "one")),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_epsilon_is_refused(answer: Any, words: tuple[str, ...]) -> None:
    scheme = _says(answer)
    matrix = mfa.factorizations.identity(8)
    for refused in (
        lambda: scheme.epsilon(1.0, _DELTA),
        lambda: scheme.noise_multiplier(3.0, _DELTA),
        lambda: guarantees.sampled(matrix, scheme, 1.0, _DELTA),
    ):
        with refuses("enrolled", "_Other", "amplified", *words[1:], error=SchemeError):
            refused()


def test_a_plan_names_it_and_weighs_others(monkeypatch: pytest.MonkeyPatch) -> None:
    scheme = type(_scheme(calibrated=lambda *_: 0.3))
    known = {"poisson": PoissonSampling, "enrolled": scheme}
    for module in (registry, planner, proposals):
        monkeypatch.setattr(module, "sampling_schemes", lambda: known)
    setting = plans.Setting(8, 80, 10, None, "enrolled", 3.0, _DELTA, 100)
    with refuses("enrolled", "contradicts itself", error=SchemeError):
        planner.make(setting, mechanisms=("identity",))
    setting = dataclasses.replace(setting, sampling=plans.ANY_SAMPLING)
    plan = planner.make(setting, mechanisms=("identity",))
    assert ["contradicts" in each.reason for each in plan.infeasible] == [True]
    assert len(plan.candidates) == 2


def test_a_saved_mechanism_of_a_package_that_is_gone_is_not_broken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    mechanism = mfa.Mechanism(mfa.factorizations.identity(8), _ENROLLED, 1.0)
    mechanism.save(tmp_path / "theirs")
    monkeypatch.setattr(registry, "sampling_schemes", lambda: {"poisson": PoissonSampling})
    with refuses(
        *("the sampling scheme 'enrolled'", "install", registry.GROUP),
        error=mfa.checkpoints.CheckpointError,
    ) as refused:
        mfa.load(tmp_path / "theirs")
    assert "broken" not in str(refused.value)


@pytest.mark.parametrize("condition", ["a coin is thrown", "a coin is thrown."])
def test_a_condition_ends_once(condition: str) -> None:
    scheme = _scheme(condition=lambda *_: condition)
    mechanism = mfa.Mechanism(mfa.factorizations.identity(8), scheme, 1.0)
    assert plan_text.condition_of(mechanism) == "a coin is thrown."


@pytest.mark.parametrize("noise", [math.nan, -1.0, 0.0, math.inf, None])
def test_what_is_no_noise_multiplier_is_refused(noise: Any) -> None:
    with refuses("enrolled", "_Other", "calibrated", error=SchemeError):
        _scheme(calibrated=lambda *_: noise).noise_multiplier(3.0, _DELTA)


def test_a_method_that_fails_is_named() -> None:
    def fails(*_: Any) -> Any:
        raise KeyError("slot")

    with refuses("_Other", "amplified", "KeyError", "slot", error=SchemeError):
        _scheme(amplified=fails).epsilon(1.0, _DELTA)
    with refuses("_Other", "calibrated", "KeyError", error=SchemeError):
        _scheme(calibrated=fails).noise_multiplier(1.0, _DELTA)
    with refuses("_Other", "sampler", "KeyError", error=SchemeError):
        samplers.sampler_of(_scheme(sampler=fails), 1)


def test_never_more_is_stated_than_without_amplification() -> None:
    plain = accounting.epsilon(1.0, _DELTA)
    assert _says(Amplified(99.0, None)).epsilon(1.0, _DELTA) == plain
    assert _says(Amplified(math.inf, None)).epsilon(1.0, _DELTA) == plain
    assert _ENROLLED.epsilon(1.0, _DELTA) < plain


@dataclasses.dataclass(frozen=True)
class _Often(SamplingScheme):
    """A client may be in each third round of twelve."""

    name: ClassVar[str] = "often"
    has_random_sizes: ClassVar[bool] = False

    def schema(self) -> FixedEpochOrder:
        return FixedEpochOrder(4, 3)

    def sampler(self, seed: int) -> Sampler:
        return _Nobody(self, seed)


_BANDED = mfa.factorizations.banded(12, num_bands=2)


def _often(num_bands: int = 2, **methods: Any) -> SamplingScheme:
    made = type("_Other", (_Often,), {**methods, "__module__": __name__})
    found: SamplingScheme = made(12, num_bands, 100, 10)
    return found


def _stated(scheme: SamplingScheme, matrix: Any = _BANDED) -> tuple[Callable[[], Any], ...]:
    """All that states something of a scheme, without its numbers being asked for one by one."""
    return (
        lambda: mfa.Mechanism(matrix, scheme, 1.0),
        lambda: mfa.calibrate(matrix, scheme, epsilon=3.0, delta=_DELTA),
        lambda: mfa.calibrate(matrix, scheme, rho=0.5),
        lambda: guarantees.sampled(matrix, scheme, 1.0, _DELTA),
        lambda: scheme.epsilon(1.0, _DELTA),
        lambda: scheme.noise_multiplier(3.0, _DELTA),
        lambda: scheme.true_positive_rate(1.0, 0.1),
        lambda: scheme.event(1.0),
    )


@pytest.mark.parametrize(
    ("methods", "words"),
    [
        ({"most_participations": lambda *_: 1}, ("most_participations is 1", "4 times")),
        ({"most_participations": lambda *_: 5}, ("most_participations is 5", "4 times")),
        ({"all_participations": lambda *_: AllParticipations(0.5)}, ("norm=0.5", "norm=2.0")),
        ({"all_participations": lambda *_: AllParticipations(math.nan)}, ("norm=nan",)),
        ({"all_participations": lambda *_: AllParticipations(2.0, 9)}, ("disjoint=9",)),
        ({"all_participations": lambda *_: 2.0}, ("2.0", "contradicts")),
    ],
)
@pytest.mark.parametrize("is_amplified", [False, True])
def test_participations_are_those_of_the_schema(
    methods: dict[str, Any], words: tuple[str, ...], is_amplified: bool
) -> None:
    """Whoever knows all draws has the epsilon of the schema, and no smaller one is stated."""
    if is_amplified:
        methods = {**methods, "amplified": lambda *_: Amplified(1.0, None)}
    for stated in _stated(_often(**methods)):
        with refuses("often", "_Other", *words, error=SchemeError):
            stated()


def test_the_epsilon_of_the_schema_is_that_of_the_matrix() -> None:
    """More than the schema allows may be accounted for, and what it allows be said again."""
    order = mfa.Mechanism(_BANDED, FixedEpochOrder(4, 3), 0.5).guarantee(_DELTA)
    same: list[dict[str, Any]] = [
        {},
        {"most_participations": lambda *_: 4},
        {"all_participations": lambda *_: AllParticipations(2.0, 4)},
    ]
    for methods in same:
        found = mfa.Mechanism(_BANDED, _often(**methods), 1.0).guarantee(_DELTA)
        assert not found.is_amplified
        assert found.epsilon == pytest.approx(order.epsilon, rel=1e-9)
    more = _often(all_participations=lambda *_: AllParticipations(3.0))
    assert mfa.Mechanism(_BANDED, more, 1.0).guarantee(_DELTA).epsilon > order.epsilon


def test_participations_that_share_rows_are_those_of_the_matrix() -> None:
    """Five bands, and participations three rounds apart: C says how long the sum of columns is."""
    matrix = mfa.factorizations.banded(12, num_bands=5)
    dense = matrix.strategy_matrix()
    lengths = [np.linalg.norm(np.abs(dense[:, first::3]).sum(axis=1)) for first in range(3)]
    truth = float(max(lengths) / np.max(np.linalg.norm(dense, axis=0)))

    def scheme(norm: float) -> SamplingScheme:
        return _often(
            5,
            all_participations=lambda *_: AllParticipations(norm),
            amplified=lambda *_: Amplified(1.0, None),
        )

    assert _often(5, amplified=lambda *_: Amplified(1.0, None)).shares_rows
    assert mfa.Mechanism(matrix, scheme(truth), 1.0).guarantee(_DELTA).epsilon == 1.0
    with refuses("often", "_Other", f"{truth:.6g}", error=SchemeError):
        mfa.Mechanism(matrix, scheme(0.99 * truth), 1.0)
    with refuses("often", "_Other", f"{truth:.6g}", error=SchemeError):
        guarantees.sampled(matrix, scheme(0.99 * truth), 1.0, _DELTA)


@pytest.mark.parametrize(
    ("method", "made"),
    [
        ("is_amplified", False),
        ("deviation", lambda *_: None),
        ("checked_amplified", lambda *_: Amplified(0.1, None)),
        ("checked_participations", lambda *_: AllParticipations(0.1)),
        ("check_participations", lambda *_: None),
        ("noise_multiplier", lambda *_: 0.1),
        ("_unamplified", lambda *_: (0.1, None)),
        ("_enough", lambda *_: 0.1),
    ],
)
def test_what_follows_from_other_methods_is_left_to_the_library(method: str, made: Any) -> None:
    with refuses("often", "_Other", f"overrides {method}", error=SchemeError):
        _often(**{method: made})


def test_a_ledger_is_checked_against_the_schema_whatever_the_scheme_says() -> None:
    """Its own check may say more, and its own separations count for nothing."""
    cohorts = [np.array([3]), np.array([3])]
    weaker: list[dict[str, Any]] = [
        {},
        {"_deviation_of_rounds": lambda *_: None},
        {"allows_separations": lambda *_: True},
    ]
    for methods in weaker:
        scheme = dataclasses.replace(_often(**methods), clients_per_round=1)
        assert "exactly 3 rounds apart" in str(scheme.deviation(100, cohorts))
    more = dataclasses.replace(
        _often(_deviation_of_rounds=lambda *_: "it rained"), clients_per_round=1
    )
    assert more.deviation(100, cohorts[:1]) == "it rained"


def test_a_sampler_is_checked_whatever_it_overrides() -> None:
    class Unchecked(_Nobody):
        def draw(self, round_index: int) -> np.ndarray:
            return np.array([1, 1])

    scheme = _often(sampler=lambda self, seed: Unchecked(self, seed))
    with refuses("often", "Unchecked overrides draw", error=SchemeError):
        samplers.sampler_of(scheme, 1)


def test_the_librarys_own_schemes_are_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their inverses are tested, and a certificate takes minutes."""
    asked = []
    original = PoissonSampling.amplified

    def counted(*given: Any) -> Amplified:
        asked.append(given)
        return original(*given)

    monkeypatch.setattr(PoissonSampling, "amplified", counted)
    PoissonSampling(*_SIZES).noise_multiplier(3.0, _DELTA)
    assert not asked
    PoissonSampling(*_SIZES).epsilon(3.0, _DELTA)
    assert len(asked) == 1


def test_a_part_of_a_run_is_asked_for_before_it_begins() -> None:
    broken = _scheme(of_first=lambda self, rounds: dataclasses.replace(self, num_rounds=rounds))
    broken = dataclasses.replace(broken, num_bands=2)
    with refuses("_Other", "of_first(1)", "2 bands for 1 rounds", error=SchemeError):
        mfa.Mechanism(mfa.factorizations.banded(8, num_bands=2), broken, 1.0)
    longer = _scheme(of_first=lambda self, _: self)
    assert longer.checked_of_first(1) == longer
    shorter = _scheme(of_first=lambda self, _: dataclasses.replace(self, num_rounds=2))
    with refuses("of_first(3)", "2 rounds", error=SchemeError):
        shorter.checked_of_first(3)


def test_a_sampler_is_one_of_the_scheme() -> None:
    for made in (None, 3, _Nobody):
        with refuses("_Other", "sampler", "participation.Sampler", error=SchemeError):
            samplers.sampler_of(_scheme(sampler=lambda *_, made=made: made), 1)
    other = dataclasses.replace(_ENROLLED, population=50)
    with refuses("another scheme", error=SchemeError):
        samplers.sampler_of(_scheme(sampler=lambda *_: _Nobody(other, 1)), 1)
    assert isinstance(samplers.sampler_of(_ENROLLED, 1), _Nobody)


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
    class Drawing(_Nobody):
        def _draw(self, round_index: int) -> np.ndarray:
            return drawn if round_index == 3 else super()._draw(round_index)

    sampler = Drawing(_ENROLLED, 1)
    assert len(sampler.draw(2)) == 0
    with refuses("enrolled", "draw(3)", problem, "population of 40", error=SchemeError):
        sampler.draw(3)


def test_draws_are_int64() -> None:
    class Drawing(_Nobody):
        def _draw(self, round_index: int) -> np.ndarray:
            return np.array([0, 39], np.uint16)

    found = Drawing(_ENROLLED, 1).draw(0)
    assert found.dtype == np.int64
    assert found.tolist() == [0, 39]
