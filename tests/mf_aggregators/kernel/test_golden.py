"""Guarantees of version 2.0.0 stay what they were (make_golden.py wrote them)."""

import collections
import json
import math
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from tests.mf_aggregators.kernel import make_golden

_GOLDEN = json.loads((pathlib.Path(__file__).parent / "golden_2_0_0.json").read_text())
_TOLERANCE = 1e-9
# Why epsilons of a kind of case differ: by at least and at most so much, relative to them.
_REASONS = {
    "poisson": ("tails and losses of a round are rounded up", 0.0, 1e-6),
    "truncated_poisson": ("tails and losses of a round are rounded up", 0.0, 1e-6),
    "fixed_size": ("tails and losses of a round are rounded up", 0.0, 1e-6),
    "balls_in_bins": ("a certificate's test ends once its wealth suffices", -0.01, 0.0),
    "composed fixed_size": ("tails and losses of a round are rounded up", 0.0, 1e-6),
}


def _kind(case: Mapping[str, Any]) -> str:
    if "composed" in case:
        schemes = {_kind(each) for each in case["composed"]}
        return "composed fixed_size" if "fixed_size" in schemes else "composed"
    for name in ("extended", "ledger"):
        if name in case:
            return name
    scheme = case["in"].partition(" ")[0]
    return scheme if scheme not in ("single", "fixed", "timer") else "plan"


_CASES: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
for _case in _GOLDEN["cases"]:
    _CASES[_kind(_case)].append(_case)
_SHORT = ("extended", "ledger", "plan")


@pytest.fixture(scope="module")
def factorizations() -> dict[str, Any]:
    """The factorizations of the golden file by name."""
    return {name: make_golden.matrix(each) for name, each in _GOLDEN["matrices"].items()}


def _larger(after: Any, before: Any) -> float:
    """By how much a result is larger, relative to it; infinity for other ones, as None."""
    if after == before:
        return 0.0
    if isinstance(before, float) and isinstance(after, float) and math.isfinite(before):
        return (after - before) / abs(before) if before else math.inf
    return math.inf


def _is_bound_of_tree(case: Mapping[str, Any], after: Any, before: Any) -> bool:
    """Whether a value that was called exact is an upper bound, which it always was.

    Rows of the online decoder, and the first rows of the full one, have more noise than the tree's
    theorem needs.
    """
    return after is False and before is True and _is_part_of_tree(case)


def _is_part_of_tree(case: Mapping[str, Any]) -> bool:
    of = str(case.get("of"))
    return of.startswith("online") or (of.startswith("full") and "ledger" in case)


def _is_allowed(case: Mapping[str, Any], found: list[Any]) -> bool:
    differences = [
        0.0 if _is_bound_of_tree(case, after, before) else _larger(after, before)
        for after, before in zip(found, case["found"], strict=True)
    ]
    if max(map(abs, differences)) <= _TOLERANCE:
        return True
    if _kind(case) == "ledger" and _is_part_of_tree(case):
        # The first rounds of an online tree are those of a smaller tree.
        more_noise = differences.pop(4)
        return more_noise >= -_TOLERANCE and max(differences) <= _TOLERANCE
    if _kind(case) not in _REASONS:
        return False
    _, least, most = _REASONS[_kind(case)]
    if "target" in case:
        # More noise for the same epsilon.
        sensitivity, is_exact, epsilon, _, noise_multiplier = differences
        fixed = max(abs(sensitivity), abs(is_exact))
        return fixed <= _TOLERANCE and abs(epsilon) <= most and 0.0 <= noise_multiplier <= most
    epsilon = differences.pop(0 if "composed" in case else 2)
    return least <= epsilon <= most and all(abs(each) <= _TOLERANCE for each in differences)


def _check(cases: Iterable[Mapping[str, Any]], factorizations: Mapping[str, Any]) -> None:
    wrong = []
    for case in cases:
        found = make_golden.computed(case, factorizations)
        if not _is_allowed(case, found):
            wrong.append((case, found))
    assert not wrong, f"{len(wrong)} differ; the first is {wrong[0]}"


@pytest.mark.parametrize("kind", _SHORT)
def test_guarantees_without_draws_are_those_of_2_0_0(
    kind: str, factorizations: dict[str, Any]
) -> None:
    _check(_CASES[kind], factorizations)


@pytest.mark.parametrize("kind", sorted({*_CASES} - {*_SHORT}))
def test_a_guarantee_of_each_way_to_draw_is_that_of_2_0_0(
    kind: str, factorizations: dict[str, Any]
) -> None:
    _check(_CASES[kind][:1], factorizations)


@pytest.mark.long
@pytest.mark.parametrize("kind", sorted({*_CASES} - {*_SHORT}))
def test_guarantees_with_draws_are_those_of_2_0_0(
    kind: str, factorizations: dict[str, Any]
) -> None:
    _check(_CASES[kind][1:], factorizations)


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.long] * (kind == "balls_in_bins")) for kind in _REASONS],
)
def test_reasons_are_used(kind: str, factorizations: dict[str, Any]) -> None:
    assert any(
        abs(_larger(make_golden.computed(case, factorizations)[index], case["found"][index]))
        > _TOLERANCE
        for case in _CASES[kind]
        for index in (0 if "composed" in case else 2,)
    )


def test_values_of_online_trees_are_called_bounds(factorizations: dict[str, Any]) -> None:
    case = next(each for each in _CASES["plan"] if each["of"].startswith("online"))
    found = make_golden.computed(case, factorizations)
    pairs = zip(found, case["found"], strict=True)
    assert any(_is_bound_of_tree(case, *pair) for pair in pairs)


def test_the_file_has_400_guarantees_of_all_kinds() -> None:
    assert _GOLDEN["version"] == "2.0.0"
    assert len(_GOLDEN["cases"]) >= 400
    sampled = {"min_separation", "random_allocation", "shuffling"}
    assert {*_CASES} == {*_SHORT, *_REASONS, *sampled, "composed"}
    kinds = {each.get("kind") or each["json"]["mechanism"] for each in _GOLDEN["matrices"].values()}
    assert len(kinds) == 8
