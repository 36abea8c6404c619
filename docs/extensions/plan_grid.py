"""Computes the grid of plans that the plan calculator of the site shows.

    python -m docs.extensions.plan_grid

A setting is what ``mf-plan`` takes: rounds, population, clients per round and epsilon. Its plan
compares the mechanisms that are quick to compute, for participation timers that let every client
return as late as the population allows. A matrix depends on rounds and separation alone, and the
noise multiplier on epsilon and delta alone, so that few numbers make all plans.

The file is a script, ``docs/_static/plan-grid.js``, because a page that is opened from a disk may
load scripts, and no data.
"""

import itertools
import json
import math
import pathlib
from typing import Any

import numpy as np

import mf_aggregators as mfa
from mf_aggregators import figures, inputs, planning
from mf_aggregators.participation import MinSeparation

FILE = pathlib.Path(__file__).resolve().parent.parent / "_static" / "plan-grid.js"
_BEFORE, _AFTER = "window.planGrid = ", ";\n"

ROUNDS = (100, 200, 500, 1000)
POPULATIONS = (10_000, 20_000, 50_000, 100_000, 200_000, 500_000, 1_000_000)
CLIENTS_PER_ROUND = (100, 1000)
EPSILONS = (0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 10.0, 12.0, 16.0, 20.0)
# The parameters of the model that noise is kept for.
MODEL_SIZE = 1_000_000
# Those that take seconds and not minutes for 1,000 rounds.
MECHANISMS = ("banded", "banded_inverse", "blt", "identity", "toeplitz", "tree")
# At which false positive rate an attacker is shown.
FALSE_POSITIVE_RATE = 0.01
# Points of a curve, and digits of every number.
POINTS, DIGITS = 40, 6


def delta_of(population: int) -> float:
    """Returns the delta of a population: the next power of ten below one over it."""
    return 10.0 ** -(math.floor(math.log10(population)) + 1)


def separation_of(num_rounds: int, population: int, clients_per_round: int) -> int:
    """Returns the largest separation that a population can fill."""
    return min(num_rounds, population // clients_per_round)


def plan(num_rounds: int, population: int, clients_per_round: int, epsilon: float) -> planning.Plan:
    """Returns the plan of a setting of the grid.

    Args:
      num_rounds: One of ``ROUNDS``.
      population: One of ``POPULATIONS``.
      clients_per_round: One of ``CLIENTS_PER_ROUND``.
      epsilon: One of ``EPSILONS``.
    """
    separation = separation_of(num_rounds, population, clients_per_round)
    setting = planning.Setting(
        num_rounds,
        population,
        clients_per_round,
        MinSeparation(separation, None),
        None,
        epsilon,
        delta_of(population),
        MODEL_SIZE,
    )
    return planning.make(setting, mechanisms=MECHANISMS)


def places(num_rounds: int) -> list[int]:
    """Returns the rounds, from 0, that a curve has points at."""
    found = np.unique(np.round(np.linspace(0, num_rounds - 1, POINTS)).astype(int))
    return [int(each) for each in found]


def matrices(made: planning.Plan) -> dict[str, Any]:
    """Returns the numbers of a plan that depend on rounds and separation alone.

    Args:
      made: A plan.

    Returns:
      A JSON-able mapping: the ``candidates``, the least error first, each with its ``name`` and
      ``kind``, ``rmse`` at noise multiplier 1, bytes of noise that it keeps for a parameter, and,
      for the best one of its kind, standard deviations by round; which is ``recommended``.
    """
    found: list[dict[str, Any]] = []
    for each in made.candidates:
        candidate = {
            "name": each.name,
            "kind": each.kind,
            "rmse": _rounded(each.errors.rmse),
            "bytes": each.kept_bytes // MODEL_SIZE,
        }
        if each.kind not in {other["kind"] for other in found}:
            variance = np.asarray(each.errors.per_round_variance)[places(made.setting.num_rounds)]
            candidate["curve"] = [_rounded(float(value)) for value in np.sqrt(variance)]
        found.append(candidate)
    return {"candidates": found, "recommended": made.recommended.name}


def guarantee(epsilon: float, delta: float) -> dict[str, float]:
    """Returns the noise multiplier of a target and how often an attacker finds a client."""
    noise_multiplier = mfa.accounting.noise_multiplier(epsilon, delta)
    rate = mfa.accounting.true_positive_rate(noise_multiplier, FALSE_POSITIVE_RATE)
    return {"noise_multiplier": _rounded(noise_multiplier), "true_positive_rate": _rounded(rate)}


def grid() -> dict[str, Any]:
    """Returns the whole grid, as the script of the page reads it."""
    plans: dict[str, Any] = {}
    for num_rounds, population, clients in itertools.product(
        ROUNDS, POPULATIONS, CLIENTS_PER_ROUND
    ):
        key = f"{num_rounds},{separation_of(num_rounds, population, clients)}"
        if key not in plans:
            plans[key] = matrices(plan(num_rounds, population, clients, EPSILONS[-1]))
    deltas = {population: delta_of(population) for population in POPULATIONS}
    styles = figures.styles(MECHANISMS)
    return {
        "rounds": ROUNDS,
        "populations": POPULATIONS,
        "clients_per_round": CLIENTS_PER_ROUND,
        "epsilons": EPSILONS,
        "deltas": deltas,
        "model_size": MODEL_SIZE,
        "mechanisms": MECHANISMS,
        "false_positive_rate": FALSE_POSITIVE_RATE,
        "guarantees": {
            f"{epsilon:g},{delta:g}": guarantee(epsilon, delta)
            for epsilon, delta in itertools.product(EPSILONS, sorted(set(deltas.values())))
        },
        "places": {num_rounds: places(num_rounds) for num_rounds in ROUNDS},
        "colours": {name: style.colour for name, style in styles.items()},
        "plans": plans,
    }


def read() -> dict[str, Any]:
    """Returns the grid that the site has."""
    text = FILE.read_text(encoding="utf-8")
    found: dict[str, Any] = inputs.parsed_json(text.removeprefix(_BEFORE).removesuffix(_AFTER))
    return found


def _rounded(value: Any) -> float:
    """A number, rounded up: no noise or rate is smaller on the page than it is."""
    digits = DIGITS - 1 - math.floor(math.log10(value)) if value > 0.0 else 0
    return math.ceil(float(value) * 10.0**digits) / 10.0**digits


def main() -> None:
    """Writes the file."""
    text = json.dumps(grid(), separators=(",", ":"))
    FILE.write_text(f"{_BEFORE}{text}{_AFTER}", encoding="utf-8")


if __name__ == "__main__":
    main()
