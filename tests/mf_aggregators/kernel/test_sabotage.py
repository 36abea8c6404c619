"""No function outside the kernel makes a stated epsilon false, and the measure sees what is false.

``sabotage.py`` says what is replaced and how the truth is measured.
"""

import contextlib
import dataclasses
import functools
import math
import pickle
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import mpmath
import numpy as np
import pytest

from tests.mf_aggregators.kernel import sabotage
from tests.mf_aggregators.kernel.sabotage import Run

_SHORT_CASES, _LONG_SECONDS = 12, 300.0
_PRINTED = "(4, 1e-05)-DP for each client over 8 rounds: participations at least 3 rounds apart"
# Sensitivity of the identity under it: three participations.
_STDDEV = math.sqrt(3.0) / sabotage.largest_distance(4.0, 1e-5)


def _synthetic(stddev: float = 1.02 * _STDDEV, **changes: Any) -> Run:
    """A run with independent noise, a little more than is needed."""
    generator = np.random.default_rng(7)
    noise = generator.normal(0.0, stddev, (8, 24_000))
    without = generator.normal(0.0, stddev, (8, 64))
    with_client = without.copy()
    with_client[np.arange(8), 8 * np.arange(8) + 3] += 1.0
    other = generator.normal(0.0, stddev, (1, 24_000))
    found = Run(_PRINTED, 4.0, 1e-5, noise, other, without, with_client)
    return dataclasses.replace(found, **changes)


def _contributions() -> np.ndarray:
    found = _synthetic()
    return found.with_client - found.without


@functools.cache
def _matrices() -> dict[str, bytes]:
    return sabotage.factorizations()


@pytest.mark.parametrize("epsilon", [0.0, 0.5, 4.0, 20.0])
@pytest.mark.parametrize("delta", [1e-10, 1e-5, 0.3])
def test_largest_distance_of_gaussians(epsilon: float, delta: float) -> None:
    distance = sabotage.largest_distance(epsilon, delta)
    with mpmath.workdps(40):
        d = mpmath.mpf(distance)
        found = mpmath.ncdf(d / 2 - epsilon / d)
        found -= mpmath.exp(epsilon) * mpmath.ncdf(-d / 2 - epsilon / d)
    assert float(found) == pytest.approx(delta, rel=1e-6)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.long] * (name in sabotage.IN_TFF))
        for name in sabotage.JOURNEYS
        if name not in sabotage.SAMPLED
    ],
)
def test_what_is_stated_is_true_and_not_by_much(name: str) -> None:
    found = sabotage.run(name, pickle.loads(_matrices()[name]))
    epsilon, delta, schema = sabotage.stated(found)
    assert len(schema) == 3
    least = sabotage.measured(found, [*sabotage.patterns(*schema), *found.ledger])
    allowed = sabotage.largest_distance(epsilon, delta)
    assert 0.93 * allowed < least <= allowed
    assert sabotage.verdict(found)[0] == "true"
    # A pair that is a little better than the truth is false, wherever it is stated.
    better = 0.9 * epsilon, delta
    assert sabotage.verdict(dataclasses.replace(found, more=(better,)))[0] == "FALSE"
    if found.begun is not None:
        begun = found.begun[0], 0.9 * found.begun[1], delta
        assert sabotage.verdict(dataclasses.replace(found, begun=begun))[0] == "FALSE"


@pytest.mark.parametrize("name", sabotage.SAMPLED)
def test_what_is_stated_of_draws_is_true_and_not_by_much(name: str) -> None:
    found = sabotage.run(name, pickle.loads(_matrices()[name]))
    assert sabotage.verdict(found)[0] == "true"
    assert found.drawn is not None
    # A client who joins by a coin loses less than one whose place another one takes.
    near = 0.9 if name == "poisson" else 0.5
    changes: list[dict[str, Any]] = [
        {"epsilon": near * found.epsilon},
        {"printed": found.printed.replace("of 2 of", "of 1 of")},
        {"printed": found.printed.replace("of 16", "of 32")},
        # Clients who are drawn in two rounds or in none, and clients of both groups.
        {"drawn": np.repeat(found.drawn[:, :4], 2, axis=1)},
        {"drawn": found.drawn | found.drawn[:, ::-1]},
    ]
    for false in changes:
        assert sabotage.verdict(dataclasses.replace(found, **false))[0] == "FALSE"


def _edited(name: str, edit: Callable[[np.ndarray], Any]) -> Run:
    found = _synthetic()
    array = getattr(found, name).copy()
    changed = edit(array)
    return dataclasses.replace(found, **{name: array if changed is None else changed})


def _zero(array: np.ndarray, place: Any) -> None:
    array[place] = 0.0


_FALSE: dict[str, Callable[[], Run]] = {
    "an epsilon that is half": lambda: _synthetic(epsilon=2.0),
    "a pair of the statement": lambda: _synthetic(more=((9.0, 1e-5), (2.0, 1e-5))),
    "NaN in the statement": lambda: _synthetic(more=((math.nan, 1e-5),)),
    "the first rounds": lambda: _synthetic(begun=(_PRINTED, 2.0, 1e-5)),
    "rounds of a client in the ledger": lambda: _synthetic(ledger=((0, 2, 4, 6),)),
    "printed epsilon": lambda: _synthetic(printed=_PRINTED.replace("4,", "2,")),
    "a smaller delta": lambda: _synthetic(delta=1e-9),
    "printed separation": lambda: _synthetic(printed=_PRINTED.replace("least 3", "least 2")),
    "NaN": lambda: _synthetic(epsilon=math.nan),
    "words without numbers": lambda: _synthetic(printed="private"),
    "nine tenths of the noise": lambda: _synthetic(0.9 * _STDDEV),
    "a block with nine tenths": lambda: _edited(
        "noise", lambda noise: noise * np.where(np.arange(24_000) < 3000, 0.9, 1.0)
    ),
    "a round without noise": lambda: _edited("noise", lambda noise: _zero(noise, 5)),
    "two rounds with the same noise": lambda: _edited(
        "noise", lambda noise: np.concatenate([noise[:1], noise[:1], noise[2:]])
    ),
    "two coordinates with the same noise": lambda: _edited(
        "noise", lambda noise: np.concatenate([noise[:, :-1], noise[:, :1]], axis=1)
    ),
    "noise of another run": lambda: _edited("other_noise", lambda _: _synthetic().noise[3:4]),
    "contributions of twice the norm": lambda: _edited(
        "with_client", lambda sums: sums + _contributions()
    ),
    "contributions that stay": lambda: _edited(
        "with_client", lambda sums: sums + np.cumsum(_contributions(), 0)
    ),
    "other noise with a contribution": lambda: _edited(
        "with_client", lambda sums: np.roll(sums, 1, axis=1)
    ),
    "a contribution to all its coordinates": lambda: _edited(
        "with_client",
        lambda sums: _synthetic().without + np.repeat(np.eye(8), 8, axis=1),
    ),
    "NaN in the place of a contribution": lambda: _edited(
        "with_client", lambda sums: np.where(sums > sums.max() - 1e-9, np.nan, sums)
    ),
}


@pytest.mark.parametrize("what", _FALSE)
def test_what_is_false_is_found(what: str) -> None:
    assert sabotage.verdict(_FALSE[what]())[0] == "FALSE"


def test_what_is_true_is_not_called_false() -> None:
    assert sabotage.verdict(_synthetic())[0] == "true"
    assert (
        sabotage.verdict(_synthetic(epsilon=math.inf, printed=_PRINTED.replace("4,", "inf,")))[0]
        == "true"
    )
    moved = _synthetic(with_client=np.roll(_contributions(), 1, axis=1) + _synthetic().without)
    assert sabotage.verdict(moved)[0] == "true"
    assumed = _synthetic(printed=f"{_PRINTED}, if nobody learns who was drawn")
    assert sabotage.verdict(assumed)[0] == "true"
    # Nothing is released.
    nothing = {
        name: np.zeros_like(getattr(_synthetic(), name))
        for name in ("noise", "other_noise", "without", "with_client")
    }
    assert sabotage.verdict(_synthetic(**nothing))[0] == "true"
    # A round that releases NaN alone.
    for name in ("noise", "without", "with_client"):
        nothing[name] = getattr(_synthetic(), name).copy()
        nothing[name][2] = np.nan
    del nothing["other_noise"]
    assert sabotage.verdict(_synthetic(**nothing))[0] == "true"


@dataclasses.dataclass(frozen=True)
class _Numbers:
    number: float
    count: int


_Numbers.__module__ = "mf_aggregators.somewhere"


@pytest.mark.parametrize(
    ("way", "expected"),
    [
        ("half", (1.5, 4, _Numbers(0.5, 3), [1.0, 2.0])),
        ("double", (6.0, 4, _Numbers(2.0, 3), [4.0, 8.0])),
        ("zero", (0.0, 4, _Numbers(0.0, 3), [0.0, 0.0])),
        ("shifted", (4.0, 4, _Numbers(2.0, 3), [4.0, 2.0])),
        ("half integers", (3.0, 2, _Numbers(1.0, 1), [2.0, 4.0])),
        ("shifted integers", (3.0, 5, _Numbers(1.0, 4), [2.0, 4.0])),
    ],
)
def test_functions_are_replaced(way: str, expected: tuple[Any, ...]) -> None:
    captured = 3.0

    def plain(count: int = 4) -> tuple[Any, ...]:
        return captured, count, _Numbers(1.0, 3), np.array([2.0, 4.0])

    def items() -> Iterator[float]:
        yield captured

    imported = plain
    sabotage.replace([plain, items], way)
    *found, array = imported()
    assert found == [*expected[:-1]]
    assert array.tolist() == expected[-1]
    assert [*items()] == [expected[0]]


def test_constructors_are_replaced() -> None:
    class Thing:
        def __init__(self, number: float) -> None:
            self.number = number

    sabotage.replace([Thing.__init__], "half")
    assert Thing(3.0).number == 1.5


def test_constants_are_found() -> None:
    found = sabotage.constants_by_key()
    key = ("adaptive_clip.py", 0, "INDICATOR_WITHIN")
    assert found[key]["INDICATOR_WITHIN"] == 0.5
    assert not [key for key in found if key[0].startswith("kernel/")]


def _false(cases: list[sabotage.Case], seconds: float = math.inf) -> list[Any]:
    """The cases that make a statement false, of those that are judged in so many seconds."""
    found, begun = [], time.monotonic()
    with contextlib.closing(sabotage.judged(cases, _matrices(), processes=1)) as judged:
        for case, kind, reason in judged:
            if kind == "FALSE":
                found.append((case, reason))
            if time.monotonic() - begun > seconds:
                break
    return found


def test_a_release_is_of_the_noise_that_is_guaranteed() -> None:
    """Whatever the functions between a mechanism and its release return."""
    names = ("claim", "proved_horizons", "release")
    found = [*sabotage.functions_by_key()]
    keys = [key for key in found if key[0] == "mechanism.py" and key[2] in names]
    (ledger,) = (key for key in found if key[0] == "observed.py" and key[2] == "__post_init__")
    assert len(keys) == 3
    cases = [sabotage.Case("extended", key, way) for key in keys for way in ("half", "double")]
    cases.append(sabotage.Case("observed", ledger, "double integers"))
    assert not _false([*cases, sabotage.Case("blt", keys[-1], "half")])


def test_some_functions_outside_the_kernel_make_nothing_false() -> None:
    names = [name for name in sabotage.JOURNEYS if name not in sabotage.IN_TFF]
    cases = sabotage.cases(names, _matrices(), sabotage.WAYS)
    assert not _false(cases[:: max(1, len(cases) // _SHORT_CASES)])


@pytest.mark.long
@pytest.mark.begun_first
@pytest.mark.timeout(900)
def test_five_minutes_of_drawn_cases_make_nothing_false() -> None:
    """The program ``sabotage`` has all cases."""
    cases = sabotage.cases(sabotage.JOURNEYS, _matrices(), sabotage.WAYS)
    random.shuffle(cases)
    assert not _false(cases, _LONG_SECONDS)
