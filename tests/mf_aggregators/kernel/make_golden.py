"""Writes golden_2_0_0.json: 400 guarantees of the version of mf_aggregators that is installed.

    PYTHONPATH=<checkout of version 2.0.0> python make_golden.py golden_2_0_0.json

A case is a recipe: a matrix, a way to take part, and noise, in numbers and short texts alone.
:func:`computed` makes its guarantee by the public interface, which versions 2.0.0 and later have.
Matrices that a search finds are checkpoints in the file, so that no search is repeated.

Ways to take part are texts: ``single``, ``fixed 3 8`` (epochs, separation), ``timer 4`` and
``timer 4 3`` (separation, most participations), or a sampling scheme's name with its sizes, as
``poisson 4 1000 10`` (bands, population, clients per round; then the separation, or the largest
batch).
"""

import base64
import inspect
import json
import pathlib
import random
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

import mf_aggregators as mfa
from mf_aggregators.privacy.ledgers import Ledger

# The order of a case's results.
RESULTS = ("sensitivity", "is_exact", "epsilon", "rho", "noise_multiplier")
_DELTA = 1e-6
_SCHEMES = (
    "poisson",
    "fixed_size",
    "truncated_poisson",
    "shuffling",
    "random_allocation",
    "min_separation",
    "balls_in_bins",
)


def matrix_recipes() -> dict[str, dict[str, Any]]:
    """Returns keyword arguments of factorizations by name; ``kind`` is the function."""
    return {
        "identity-16": {"kind": "identity", "num_rounds": 16},
        "identity-64": {"kind": "identity", "num_rounds": 64},
        "identity-1024": {"kind": "identity", "num_rounds": 1024},
        "online-8": {"kind": "tree_aggregation", "num_rounds": 8, "decoder": "online"},
        "online-21": {"kind": "tree_aggregation", "num_rounds": 21, "decoder": "online"},
        "online-64": {"kind": "tree_aggregation", "num_rounds": 64, "decoder": "online"},
        "online-512": {"kind": "tree_aggregation", "num_rounds": 512, "decoder": "online"},
        "full-8": {"kind": "tree_aggregation", "num_rounds": 8, "decoder": "full"},
        "full-24": {"kind": "tree_aggregation", "num_rounds": 24, "decoder": "full"},
        "full-64": {"kind": "tree_aggregation", "num_rounds": 64, "decoder": "full"},
        "full-1024": {"kind": "tree_aggregation", "num_rounds": 1024, "decoder": "full"},
        "root-96": {"kind": "toeplitz", "num_rounds": 96, "coefficients": "square_root"},
        "root-1024": {"kind": "toeplitz", "num_rounds": 1024, "coefficients": "square_root"},
        "optimal-12": {"kind": "optimal", "workload": 12},
        "optimal-24": {"kind": "optimal", "workload": 24, "participation": "fixed 6 4"},
        "optimal-16": {"kind": "optimal", "workload": 16, "participation": "fixed 2 8"},
        "optimal-max-12": {"kind": "optimal", "workload": 12, "error": "max"},
        "banded-16": {"kind": "banded", "workload": 16, "num_bands": 4},
        "banded-32": {"kind": "banded", "workload": 32, "num_bands": 8},
        "banded-64": {"kind": "banded", "workload": 64, "num_bands": 4},
        "banded-512": {"kind": "banded", "workload": 512, "num_bands": 2},
        "unequal-24": {
            "kind": "banded",
            "workload": 24,
            "num_bands": 3,
            "equal_column_norms": False,
        },
        "unequal-16": {
            "kind": "banded",
            "workload": 16,
            "num_bands": 4,
            "equal_column_norms": False,
            "participation": "timer 4 2",
        },
        "toeplitz-16": {"kind": "toeplitz", "num_rounds": 16},
        "toeplitz-bands-64": {"kind": "toeplitz", "num_rounds": 64, "num_bands": 8},
        "toeplitz-bands-1024": {"kind": "toeplitz", "num_rounds": 1024, "num_bands": 16},
        "toeplitz-equal-32": {
            "kind": "toeplitz",
            "num_rounds": 32,
            "num_bands": 4,
            "equal_column_norms": True,
        },
        "blt-32": {"kind": "blt", "num_rounds": 32, "num_buffers": 2},
        "blt-96": {"kind": "blt", "num_rounds": 96, "num_buffers": 3, "participation": "timer 12"},
        "blt-1024": {"kind": "blt", "num_rounds": 1024, "num_buffers": 3},
        "inverse-32": {"kind": "banded_inverse", "num_rounds": 32, "num_bands": 3},
        "inverse-96": {"kind": "banded_inverse", "num_rounds": 96, "num_bands": 4},
        "inverse-512": {"kind": "banded_inverse", "num_rounds": 512, "num_bands": 4},
        "structured-24": {
            "kind": "structured",
            "factorization": {"kind": "optimal", "workload": 24, "participation": "fixed 4 6"},
            "num_diagonals": 3,
            "rank": 2,
        },
        "structured-12": {
            "kind": "structured",
            "factorization": {"kind": "optimal", "workload": 12},
            "num_diagonals": 2,
            "rank": 2,
        },
    }


def is_closed_form(recipe: Mapping[str, Any]) -> bool:
    """Returns whether a matrix follows from its recipe by a formula, not by a search."""
    return (
        recipe["kind"] in ("identity", "tree_aggregation")
        or recipe.get("coefficients") == "square_root"
    )


def _made(recipe: Mapping[str, Any]) -> Any:
    options = dict(recipe)
    kind = options.pop("kind")
    if "participation" in options:
        options["participation"] = participation(options["participation"], 0)
    if "factorization" in options:
        options["factorization"] = _made(options["factorization"])
    return getattr(mfa.factorizations, kind)(**options)


def _packed(factorization: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        mfa.checkpoints.save(factorization, directory)
        folder = pathlib.Path(directory)
        arrays = (folder / "arrays.npz").read_bytes()
        return {
            "json": json.loads((folder / "factorization.json").read_text()),
            "npz": base64.b64encode(arrays).decode(),
        }


def matrix(stored: Mapping[str, Any]) -> Any:
    """Returns the factorization of a recipe, or of a checkpoint in the file."""
    if "kind" in stored:
        return _made(stored)
    with tempfile.TemporaryDirectory() as directory:
        folder = pathlib.Path(directory)
        (folder / "factorization.json").write_text(json.dumps(stored["json"], indent=2) + "\n")
        (folder / "arrays.npz").write_bytes(base64.b64decode(stored["npz"]))
        return mfa.checkpoints.load(folder)


def participation(text: str, num_rounds: int) -> Any:
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
    taking_part = participation(case["in"], rounds)
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
        mechanism = mechanism.extended(num_rounds, participation(schema, num_rounds))
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
        None if client is None else float(client.epsilon),
    ]


def computed(case: Mapping[str, Any], factorizations: Mapping[str, Any]) -> list[Any]:
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


def _schemas(rounds: int) -> Iterator[str]:
    quarter = max(2, rounds // 4)
    yield "single"
    yield f"fixed 2 {rounds // 2}"
    yield f"fixed 4 {rounds // 4}"
    yield f"timer {quarter}"
    yield f"timer {max(1, rounds // 6)} 3"
    yield f"timer {max(1, rounds // 8)}"
    yield f"timer {max(1, rounds // 5)} 2"


def _noise(draw: random.Random) -> dict[str, Any]:
    delta = draw.choice([1e-5, 1e-6, 1e-10])
    kind = draw.randrange(4)
    if kind == 0:
        return {"target": draw.choice([0.5, 2.0, 8.0]), "delta": delta}
    if kind == 1:
        return {"rho": draw.choice([0.05, 0.5, 2.0]), "delta": delta}
    return {"noise": round(draw.uniform(0.3, 6.0), 3), "delta": delta}


def _sampled(draw: random.Random) -> Iterator[dict[str, Any]]:
    of_bands = {1: "identity-64", 4: "banded-64", 8: "banded-32", 2: "banded-512"}
    for name in _SCHEMES[:5]:
        for bands, population, batch in (
            (1, 100, 2),
            (1, 2000, 20),
            (4, 400, 10),
            (4, 4000, 10),
            (8, 1600, 20),
            (2, 5000, 10),
        ):
            noise = {"noise": round(draw.uniform(0.6, 3.0), 3)}
            if draw.random() < 0.3 and name != "shuffling":
                noise = {"target": draw.choice([1.0, 4.0])}
            text = f"{name} {bands} {population} {batch}"
            yield {"of": of_bands[bands], "in": text, **noise, "delta": _DELTA}
    for text, of in (
        ("truncated_poisson 1 2000 20 45", "identity-64"),
        ("truncated_poisson 4 800 10 30", "banded-64"),
    ):
        yield {"of": of, "in": text, "noise": 1.2, "delta": _DELTA}
    for text, of in (
        ("min_separation 4 200 5 8", "banded-16"),
        ("min_separation 4 80 5", "banded-16"),
        ("min_separation 1 160 5 8", "identity-16"),
        ("balls_in_bins 4 40 5 8", "banded-16"),
        ("balls_in_bins 4 20 5", "banded-16"),
        ("balls_in_bins 1 40 5 8", "identity-16"),
        ("balls_in_bins 12 12 2 6", "optimal-12"),
        ("balls_in_bins 16 24 3 8", "toeplitz-16"),
    ):
        for noise_multiplier in (0.8, 1.5):
            yield {
                "of": of,
                "in": text,
                "noise": noise_multiplier,
                "delta": 1e-4,
                "samples": 2**14,
                "seed": draw.randrange(1000),
            }


def _extended(draw: random.Random) -> Iterator[dict[str, Any]]:
    for of, rounds in (
        ("identity-16", 16),
        ("online-21", 21),
        ("banded-16", 16),
        ("unequal-24", 24),
        ("toeplitz-16", 16),
        ("toeplitz-bands-64", 64),
        ("blt-32", 32),
        ("root-96", 96),
    ):
        separation = max(2, rounds // 4)
        longer, longest = rounds + separation, 2 * rounds
        timer, seldom, often = (
            f"timer {separation}",
            f"timer {separation} 2",
            f"timer {separation} 3",
        )
        for begun, further in (
            (timer, [[longer, timer]]),
            (timer, [[longer, timer], [longest, timer]]),
            (seldom, [[longest, often]]),
            ("single", [[longest, timer]]),
        ):
            noise = {"noise": round(draw.uniform(0.5, 3.0), 3)}
            yield {"of": of, "in": begun, **noise, "extended": further, "delta": _DELTA}


def _ledgers(draw: random.Random) -> Iterator[dict[str, Any]]:
    for of, rounds in (
        ("identity-16", 16),
        ("online-21", 21),
        ("full-24", 24),
        ("optimal-24", 24),
        ("banded-32", 32),
        ("unequal-24", 24),
        ("toeplitz-16", 16),
        ("blt-32", 32),
        ("inverse-32", 32),
        ("structured-24", 24),
    ):
        for separation, released in (
            (2, rounds),
            (4, rounds),
            (4, rounds - 3),
            (rounds // 2, rounds),
            (rounds // 3, rounds - 1),
            (6, 5),
        ):
            clients = []
            for _ in range(6):
                # Some come back one round too early.
                gaps = [
                    separation + draw.choice([0, 0, 1, 3, 7, -1 if draw.random() < 0.15 else 2])
                    for _ in range(rounds)
                ]
                first = draw.randrange(max(1, released // 2))
                found = [first + sum(gaps[:index]) for index in range(rounds)]
                clients.append([each for each in found if each < released])
            noise = {"noise": round(draw.uniform(0.5, 3.0), 3)}
            yield {
                "of": of,
                "in": f"timer {separation}",
                **noise,
                "delta": _DELTA,
                "ledger": clients,
                "released": released,
            }


def _composed(draw: random.Random) -> Iterator[dict[str, Any]]:
    parts = (
        ("identity-16", "single"),
        ("banded-16", "timer 4"),
        ("blt-32", "timer 8 2"),
        ("identity-64", "poisson 1 2000 20"),
        ("banded-64", "poisson 4 4000 10"),
        ("banded-64", "random_allocation 4 4000 10"),
        ("identity-64", "fixed_size 1 2000 20"),
    )
    for first in range(len(parts)):
        for second in (0, 1, 3, 5):
            chosen = [
                {"of": of, "in": text, "noise": round(draw.uniform(0.9, 3.0), 3)}
                for of, text in (parts[first], parts[second])
            ]
            yield {"composed": chosen, "delta": 1e-6}


def case_recipes() -> Iterator[dict[str, Any]]:
    """Yields the recipes, drawn from one seed."""
    draw = random.Random(20)
    recipes = matrix_recipes()
    for name in recipes:
        rounds = int(name.rpartition("-")[2])
        for schema in _schemas(rounds):
            yield {"of": name, "in": schema, **_noise(draw)}
    yield from _sampled(draw)
    yield from _extended(draw)
    yield from _ledgers(draw)
    yield from _composed(draw)


def main() -> None:
    """Writes the file that the command line names."""
    (path,) = sys.argv[1:]
    stored: dict[str, Any] = {}
    for name, recipe in matrix_recipes().items():
        stored[name] = recipe if is_closed_form(recipe) else _packed(_made(recipe))
    factorizations = {name: matrix(each) for name, each in stored.items()}
    cases = []
    for case in case_recipes():
        try:
            found = computed(case, factorizations)
        except ValueError as error:
            print(f"{case}: {error}", file=sys.stderr)
            continue
        cases.append({**case, "found": found})
    lines = ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases)
    head = json.dumps(
        {"version": mfa.__version__, "matrices": stored}, separators=(",", ":")
    ).removesuffix("}")
    pathlib.Path(path).write_text(f'{head},\n"cases":[\n{lines}\n]}}\n', encoding="utf-8")
    print(len(cases), "cases", file=sys.stderr)


if __name__ == "__main__":
    main()
