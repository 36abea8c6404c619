r"""Measures how much larger errors get if rates change but matrices assume constant ones.

  python benchmarks/changing_rates.py --results=rates.json --plot=docs/changing_rates.png
  python benchmarks/changing_rates.py --only=banded_inverse --num_rounds=342 --results=small.json

The workload is momentum SGD with a schedule of the papers (by default the warm-up and cool-down
of BandMF App. I), and each epoch has as many rounds as clients stay away. Each mechanism is made
twice: for momentum with constant learning rates, the baseline, and for the workload itself. The
errors of both are for the workload, under the schema that the mechanism is made for: exactly so
many rounds apart for optimal, and at least as many for the others. Results are stored in
--results, and mechanisms that are there are not computed again.
"""

import json
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Literal, TypeAlias

import numpy as np
from absl import flags

from mf_aggregators import figures
from mf_aggregators.commands import command_line
from mf_aggregators.factorizations import (
    Factorization,
    banded,
    banded_inverse,
    blt,
    optimal,
    toeplitz,
)
from mf_aggregators.participation import FixedEpochOrder, MinSeparation
from mf_aggregators.workloads import Workload
from simulations.runs.run_plan import SCHEDULES

# Searches end at this certified relative gap of the squared error; the gap of the error is half of
# it.
_GAP = 1e-3

_Schema: TypeAlias = MinSeparation | FixedEpochOrder
# The variances of rounds by mechanism and kind, and the seconds that they took.
_Known: TypeAlias = dict[str, dict[str, list[float] | float]]

_MAKERS: dict[str, Callable[[Workload, _Schema, Literal["mean", "max"]], Factorization]] = {
    "optimal": lambda workload, schema, error: optimal(
        workload, schema, error=error, relative_gap=_GAP
    ),
    "banded": lambda workload, schema, error: banded(
        workload, schema.separation, participation=schema, error=error, relative_gap=_GAP
    ),
    "banded_inverse": lambda workload, schema, error: banded_inverse(
        workload, min(64, workload.num_rounds), schema, error=error
    ),
    "toeplitz": lambda workload, schema, error: toeplitz(workload, None, schema, error=error),
    "blt": lambda workload, schema, error: blt(workload, 4, schema, error=error),
}


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags of the benchmark."""
    flags.DEFINE_list("only", list(_MAKERS), "Which mechanisms.", flag_values=values)
    flags.DEFINE_integer("num_rounds", 2052, "The rounds n.", flag_values=values)
    flags.DEFINE_integer("epochs", 6, "How often a client takes part.", flag_values=values)
    flags.DEFINE_float("momentum", 0.95, "The momentum.", flag_values=values)
    flags.DEFINE_enum(
        "schedule",
        "warmup_cooldown",
        list(SCHEDULES),
        "The learning rates.",
        flag_values=values,
    )
    flags.DEFINE_enum(
        "error", "mean", ["mean", "max"], "What is minimised and printed.", flag_values=values
    )
    flags.DEFINE_string("results", "rates.json", "Where results are stored.", flag_values=values)
    flags.DEFINE_string("plot", None, "A PNG file to draw.", flag_values=values)


def main(values: flags.FlagValues) -> None:
    """Computes the missing results, prints a table of all results and draws a figure."""
    rounds, epochs = values.num_rounds, values.epochs
    rates = SCHEDULES[values.schedule].rates(rounds, 1.0)
    constant = Workload("momentum_sgd", rounds, values.momentum)
    workload = Workload("momentum_sgd", rounds, values.momentum, tuple(rates.tolist()))
    path = pathlib.Path(values.results)
    known: _Known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for name in values.only:
        command_line.check_choice(
            name in _MAKERS, f"--only must name some of {', '.join(_MAKERS)}, found {name}."
        )
        if name in known:
            continue
        separation = -(-rounds // epochs)
        schema: _Schema = MinSeparation(separation, epochs)
        if name == "optimal":
            schema = FixedEpochOrder(epochs, separation)
        made: dict[str, list[float]] = {}
        start = time.process_time()
        for label, each in (("constant", constant), ("own", workload)):
            factorization = _MAKERS[name](each, schema, values.error)
            made[label] = factorization.per_round_variance(workload, schema).tolist()
        known[name] = {**made, "seconds": time.process_time() - start}
        path.write_text(json.dumps(known) + "\n", encoding="utf-8")
    found = {name: _errors(known[name], values.error) for name in values.only}
    table = [("mechanism", "for constant rates, for these, loss in %")]
    table += [
        (name, f"{constant:.4g}, {own:.4g}, {100.0 * (constant / own - 1.0):.2f}")
        for name, (constant, own) in found.items()
    ]
    if values.plot is not None:
        _draw(known, found, rates, values.plot)
    command_line.print_result(
        values,
        {
            name: {"constant": constant, "own": own, "loss": constant / own - 1.0}
            for name, (constant, own) in found.items()
        },
        command_line.table(table),
    )


def _errors(made: dict[str, list[float] | float], error: str) -> tuple[float, float]:
    """Returns the errors of the matrix for constant rates, and of that for the workload."""
    variances = (np.array(made[name]) for name in ("constant", "own"))
    constant, own = (np.max(each) if error == "max" else np.mean(each) for each in variances)
    return float(np.sqrt(constant)), float(np.sqrt(own))


def _draw(
    known: _Known, found: dict[str, tuple[float, float]], rates: np.ndarray, path: str
) -> None:
    # The panels are below one another, so that a phone shows them at the size of its own text.
    figure, ((left,), (right,)) = figures.panels(2, 1, (3.6, 2.9))
    names = list(found)
    losses = np.array([100.0 * (constant / own - 1.0) for constant, own in found.values()])
    figures.bars(
        left,
        names,
        np.maximum(losses, 0.0),
        title="Loss by optimising for constant rates",
        x="% of the error",
        form=".2f",
    )
    shown = next(name for name in ("banded", *names) if name in names)
    rounds = np.arange(1, len(rates) + 1)
    largest = np.sqrt(max(np.max(known[shown][each]) for each in ("constant", "own")))
    figures.lines(
        right,
        {
            "for constant rates": (rounds, np.sqrt(known[shown]["constant"])),
            "for these rates": (rounds, np.sqrt(known[shown]["own"])),
            "learning rate, to scale": (rounds, rates * largest),
        },
        title=f"Error of {shown}",
        x="round",
        y="standard deviation",
    )
    figures.save(figure, path)


if __name__ == "__main__":
    sys.exit(command_line.run(__doc__ or "", define_flags, main))
