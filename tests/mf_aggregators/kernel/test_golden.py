"""Guarantees of version 2.0.0 stay what they were (_py wrote them)."""

import base64
import collections
import inspect
import json
import math
import pathlib
import tempfile
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pytest

import mf_aggregators as mfa
from mf_aggregators import checkpoints
from mf_aggregators.privacy.ledgers import Ledger

_GOLDEN = json.loads((pathlib.Path(__file__).parent / "golden_2_0_0.json").read_text())
_TOLERANCE = 1e-9
# The tolerance of searches for noise multipliers (``accounting.least_noise``).
_OF_SEARCHES = 5e-7
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


def _made(recipe: Mapping[str, Any]) -> Any:
    options = dict(recipe)
    kind = options.pop("kind")
    if kind == "toeplitz":
        options["workload"] = options.pop("num_rounds")
    if "participation" in options:
        options["participation"] = _participation(options["participation"], 0)
    if "factorization" in options:
        options["factorization"] = _made(options["factorization"])
    return getattr(mfa.factorizations, kind)(**options)


def _matrix(stored: Mapping[str, Any]) -> Any:
    """Returns the factorization of a recipe, or of a checkpoint in the file."""
    if "kind" in stored:
        return _made(stored)
    with tempfile.TemporaryDirectory() as directory:
        folder = pathlib.Path(directory)
        (folder / "factorization.json").write_text(json.dumps(stored["json"], indent=2) + "\n")
        (folder / "arrays.npz").write_bytes(base64.b64decode(stored["npz"]))
        return mfa.checkpoints.load(folder)


def _participation(text: str, num_rounds: int) -> Any:
    """Returns the schema or sampling scheme of a text (the module says how they are written)."""
    name, *numbers = text.split()
    sizes = [int(number) for number in numbers]
    if name == "single":
        return mfa.participation.SingleParticipation()
    if name == "fixed":
        return mfa.participation.FixedEpochOrder(*sizes)
    if name == "timer":
        return mfa.participation.MinSeparation(*sizes)
    options = {}
    if len(sizes) == 4:
        options["largest_batch" if name == "truncated_poisson" else "separation"] = sizes[3]
    return mfa.participation.sampling_scheme(
        name,
        num_rounds=num_rounds,
        num_bands=sizes[0],
        population=sizes[1],
        clients_per_round=sizes[2],
        **options,
    )


def _mechanism(case: Mapping[str, Any], factorization: Any) -> Any:
    rounds = factorization.num_rounds
    taking_part = _participation(case["in"], rounds)
    if "noise" in case:
        mechanism = mfa.Mechanism(factorization, taking_part, case["noise"])
    elif "rho" in case:
        mechanism = mfa.calibrate(factorization, taking_part, rho=case["rho"])
    else:
        mechanism = mfa.calibrate(
            factorization,
            taking_part,
            epsilon=case["target"],
            delta=case["delta"],
            **_certification(case),
        )
    for num_rounds, schema in case.get("extended", ()):
        mechanism = mechanism.extended(num_rounds, _participation(schema, num_rounds))
    return mechanism


def _certification(case: Mapping[str, Any]) -> dict[str, Any]:
    if "samples" not in case:
        return {}
    certification = mfa.participation.Certification(
        seed=case.get("seed", 0), max_samples=case["samples"]
    )
    return {"certification": certification}


def _results(guarantee: Any) -> list[float | bool]:
    rho = guarantee.rho
    return [
        float(guarantee.sensitivity),
        bool(guarantee.sensitivity.is_exact),
        float(guarantee.epsilon),
        float(rho),
        float(guarantee.noise_multiplier),
    ]


def _observed(mechanism: Any, case: Mapping[str, Any]) -> list[Any]:
    rounds = [np.array(each, np.int64) for each in case["ledger"]]
    names = tuple(f"client {index}" for index in range(len(rounds)))
    ledger = Ledger(names, tuple(rounds), case["released"])
    options = {}
    # Later versions state nothing better than the plan of a ledger that may lack lines.
    if "round_counts" in inspect.signature(mechanism.observed).parameters:
        indices = np.concatenate([*rounds, np.zeros(0, np.int64)])
        options["round_counts"] = np.bincount(indices, minlength=case["released"]).tolist()
    observed = mechanism.observed(ledger, **options)
    client = observed.worst_client(case["delta"])
    worst = observed.worst_case(case["delta"])
    return [
        *_results(observed.unamplified_guarantee(case["delta"])),
        bool(observed.keeps_participation),
        float(worst.epsilon),
        # Version 2.0.0 gives the client no guarantee of its own.
        None if client is None else float(getattr(client, "guarantee", client).epsilon),
    ]


def _computed(case: Mapping[str, Any], factorizations: Mapping[str, Any]) -> list[Any]:
    """Returns what the installed version computes for a case.

    Args:
      case: The recipe.
      factorizations: The factorizations by name.

    Returns:
      The results in the order of ``RESULTS``. Of a composition its epsilon alone. Of a ledger,
      those of the observed guarantee, whether the plan was kept, the epsilon of the worst case and
      that of the worst client (None if nobody took part).
    """
    if "composed" in case:
        events = [_mechanism(each, factorizations[each["of"]]).event() for each in case["composed"]]
        return [float(mfa.accounting.composed_epsilon(events, case["delta"]))]
    mechanism = _mechanism(case, factorizations[case["of"]])
    if "ledger" in case:
        return _observed(mechanism, case)
    return _results(mechanism.guarantee(case["delta"], **_certification(case)))


@pytest.fixture(scope="module")
def factorizations() -> dict[str, Any]:
    """The factorizations of the golden file by name."""
    return {name: _matrix(each) for name, each in _GOLDEN["matrices"].items()}


def _larger(after: Any, before: Any) -> float:
    """By how much a result is larger, relative to it; infinity for other ones, as None."""
    if after == before:
        return 0.0
    if isinstance(before, float) and isinstance(after, float) and math.isfinite(before):
        return (after - before) / abs(before) if before else math.inf
    return math.inf


def _is_part_of_tree(case: Mapping[str, Any]) -> bool:
    """Whether rows are of the online decoder, or the first rows of the full one."""
    of = str(case.get("of"))
    return of.startswith("online") or (of.startswith("full") and "ledger" in case)


def _has_less_sensitivity(case: Mapping[str, Any], found: list[Any]) -> bool:
    """Whether noise is scaled to the C of a tree's rows, which needs no more than the nodes do.

    The epsilon is that of the noise multiplier, which a plan keeps. The absolute noise of a plan is
    less, and so the multipliers of extended and observed runs are others.
    """
    before, epsilon = case["found"], mfa.accounting.epsilon(found[4], case["delta"])
    is_kept = _kind(case) != "plan" or abs(_larger(found[4], before[4])) <= _OF_SEARCHES
    is_of_noise = abs(_larger(found[2], epsilon)) <= _TOLERANCE
    return is_kept and is_of_noise and 0.7 <= found[0] / before[0] <= 1.0 + _TOLERANCE


def _is_allowed(case: Mapping[str, Any], found: list[Any]) -> bool:
    if _is_part_of_tree(case):
        return _has_less_sensitivity(case, found)
    differences = [_larger(*pair) for pair in zip(found, case["found"], strict=True)]
    if max(map(abs, differences)) <= _TOLERANCE:
        return True
    if _kind(case) == "extended" and case["of"].startswith(("banded", "unequal")):
        # Further rows are the best that 32 bits hold: of another sensitivity, and the same sigma.
        sigmas = [each[0] * each[4] for each in (found, case["found"])]
        epsilon = mfa.accounting.epsilon(found[4], case["delta"])
        is_same = max(abs(_larger(*sigmas)), abs(_larger(found[2], epsilon))) <= _TOLERANCE
        return is_same and differences[2] <= 1e-3
    if _kind(case) in _SHORT:
        return False
    _, least, most = _REASONS.get(_kind(case), ("", 0.0, 0.0))
    if "target" in case:
        # More noise for the same epsilon, or less within the tolerance of the search. No epsilon is
        # above its target.
        sensitivity, is_exact, epsilon, _, noise_multiplier = differences
        fixed = max(abs(sensitivity), abs(is_exact))
        most += _OF_SEARCHES
        # Epsilons move three times as much as noise.
        is_near = abs(epsilon) <= 4.0 * most and -_OF_SEARCHES <= noise_multiplier <= most
        return fixed <= _TOLERANCE and is_near and found[2] <= case["target"]
    epsilon = differences.pop(0 if "composed" in case else 2)
    return least <= epsilon <= most and all(abs(each) <= _TOLERANCE for each in differences)


def _check(cases: Iterable[Mapping[str, Any]], factorizations: Mapping[str, Any]) -> None:
    wrong = []
    for case in cases:
        found = _computed(case, factorizations)
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
        abs(_larger(_computed(case, factorizations)[index], case["found"][index])) > _TOLERANCE
        for case in _CASES[kind]
        for index in (0 if "composed" in case else 2,)
    )


def test_online_trees_need_less_noise_than_those_of_2_0_0(factorizations: dict[str, Any]) -> None:
    online = [each for each in _CASES["plan"] if each["of"].startswith("online")]
    ratios = [_computed(each, factorizations)[0] / each["found"][0] for each in online]
    assert np.median(ratios) < 0.97


def test_mechanisms_of_2_0_0_keep_the_noise_that_it_drew(
    factorizations: dict[str, Any], tmp_path: pathlib.Path
) -> None:
    # The first case of each kind and schema has the fewest rounds.
    plans = reversed(_CASES["plan"])
    cases = {(each["of"].split("-")[0], each["in"].split()[0]): each for each in plans}
    for number, case in enumerate(cases.values()):
        before, _, epsilon, _, multiplier = case["found"]
        folder, schema = tmp_path / str(number), _participation(case["in"], 0)
        matrix = factorizations[case["of"]]
        described = mfa.Mechanism(matrix, schema, multiplier).to_dict()
        del described["sigma"]
        checkpoints.save(matrix, folder, participation=schema, mechanism=described)
        file = folder / "factorization.json"
        contents = json.loads(file.read_text()) | {"library_version": "2.0.0"}
        contents["errors"]["sensitivity"] = before
        contents["description_sha256"] = checkpoints._hash_of(contents)
        file.write_text(json.dumps(contents))
        loaded = mfa.load(folder)
        assert loaded.sigma == pytest.approx(multiplier * before, rel=1e-12)
        assert loaded.guarantee(case["delta"]).epsilon <= epsilon * (1.0 + _TOLERANCE)
