r"""Measures how the time to compute each factorization grows with the rounds, and draws it.

  python benchmarks/growth.py --rounds=1000,3162,10000 --results=growth.json
  python benchmarks/growth.py --only=banded --rounds=31623,100000 --results=growth.json
  python benchmarks/growth.py --rounds= --results=growth.json --plot=docs/growth.png

banded: 32 bands, to a certified gap of 1e-3; optimal: to one of 1e-6; toeplitz: all coefficients
optimised; blt: 4 buffers; banded_inverse: 16 bands. All are for the prefix sum and one
participation. Processor seconds are those of the process, in which numerical libraries may
use several threads: set OMP_NUM_THREADS=1 on a machine that has other work. Measurements
are stored in --results, and a figure is drawn of all of them.
"""

import json
import pathlib
import sys
import time
from collections.abc import Callable

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
from mf_aggregators.workloads import Workload

_MAKERS: dict[str, Callable[[int], Factorization]] = {
    "banded": lambda rounds: banded(Workload("prefix_sum", rounds), 32, relative_gap=1e-3),
    "optimal": lambda rounds: optimal(Workload("prefix_sum", rounds)),
    "toeplitz": toeplitz,
    "blt": lambda rounds: blt(rounds, 4),
    "banded_inverse": lambda rounds: banded_inverse(rounds, 16),
}
# The most rounds of each search: with more it takes long or does not fit into memory.
_MOST_ROUNDS = {"optimal": 16_384}


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags of the benchmark."""
    flags.DEFINE_list("only", list(_MAKERS), "Which mechanisms.", flag_values=values)
    flags.DEFINE_list("rounds", ["1000", "3162"], "Which numbers of rounds.", flag_values=values)
    flags.DEFINE_string("results", "growth.json", "Where results are stored.", flag_values=values)
    flags.DEFINE_string("plot", None, "A PNG file to draw.", flag_values=values)


def main(values: flags.FlagValues) -> None:
    """Measures the missing times, and draws a figure of all measurements."""
    path = pathlib.Path(values.results)
    seconds: dict[str, dict[str, float]] = (
        json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    )
    for rounds in (int(each) for each in values.rounds if each):
        for name in values.only:
            command_line.check_choice(
                name in _MAKERS, f"--only must name some of {', '.join(_MAKERS)}, found {name}."
            )
            if rounds > _MOST_ROUNDS.get(name, rounds):
                continue
            start = time.process_time()
            _MAKERS[name](rounds)
            seconds.setdefault(name, {})[str(rounds)] = time.process_time() - start
            path.write_text(json.dumps(seconds, indent=2) + "\n", encoding="utf-8")
    if values.plot is not None:
        _draw(seconds, values.plot)
    fields = {
        f"{name} {rounds}": value
        for name, by_rounds in seconds.items()
        for rounds, value in by_rounds.items()
    }
    command_line.print_result(values, fields, command_line.table(list(fields.items())))


def _draw(seconds: dict[str, dict[str, float]], path: str) -> None:
    curves = {}
    for name, by_rounds in seconds.items():
        rounds = np.array(sorted(int(each) for each in by_rounds))
        taken = np.array([by_rounds[str(each)] for each in rounds])
        curves[name] = (rounds, taken)
    figure, ((axes,),) = figures.panels(1, 1, (6.4, 4.4))
    figures.lines(
        axes,
        curves,
        title="Computing a factorization of prefix sums, one thread",
        x="rounds n",
        y="processor seconds",
        logarithmic="xy",
    )
    figures.save(figure, path)


if __name__ == "__main__":
    sys.exit(command_line.run(__doc__ or "", define_flags, main))
