"""Computes the errors of mechanisms that the plan calculator of the site interpolates.

    python -m docs.extensions.plan_grid

The calculator computes the error of a banded square root in the browser, exactly. A mechanism that
``mf-plan`` finds for the same rounds and separation has a smaller error. The ratio of the two
errors depends little on rounds and separation, so that the calculator can interpolate in a small
table of ratios.

The file is a script, ``docs/_static/plan-grid.js``, because a page that is opened from a disk may
load scripts, and no data.
"""

import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping, Sequence

from mf_aggregators import figures, inputs, planning
from mf_aggregators.participation import MinSeparation
from mf_aggregators.planning import fleets

FILE = pathlib.Path(__file__).resolve().parent.parent / "_static" / "plan-grid.js"
_BEFORE, _AFTER = "window.planGrid = ", ";\n"

ROUNDS = (30, 100, 300, 1000)
# Separations of the table, as powers of the number of rounds n; n / 2 and n are added.
POWERS = (0.2, 0.4, 0.6, 0.8)
# The mechanisms of the table: those that are found in seconds, not minutes, for 1,000 rounds.
MECHANISMS = ("banded", "banded_inverse", "blt", "toeplitz")
_DIGITS = 4


@dataclasses.dataclass(frozen=True)
class Grid:
    """The table of ratios, as the calculator's script reads it.

    Attributes:
      rounds: The numbers of rounds.
      separations: The separations for each number of rounds.
      ratios: By kind of mechanism, the ratios for each number of rounds and each separation.
      colours: The colours of mechanisms in figures.
    """

    rounds: Sequence[int]
    separations: Sequence[Sequence[int]]
    ratios: Mapping[str, Sequence[Sequence[float]]]
    colours: Mapping[str, object]


def separations(num_rounds: int) -> list[int]:
    """Returns the table's separations for a number of rounds; the last is that number itself."""
    powers = {round(num_rounds**power) for power in POWERS}
    return [*sorted({*powers, math.ceil(num_rounds / 2)}), num_rounds]


def ratios(num_rounds: int, separation: int) -> dict[str, float]:
    """Returns the RMSE of the best mechanism of each kind over that of a banded square root.

    Args:
      num_rounds: The rounds n.
      separation: The separation b of timers, with as many participations as fit.

    Returns:
      The ratios by kind of mechanism, rounded up to four decimals.
    """
    schema = MinSeparation(separation)
    # Any guarantee would do, because ratios of errors do not depend on it.
    setting = planning.Setting(num_rounds, 10**6, 100, schema, None, 8.0, 1e-7, 10**6)
    made = planning.make(setting, mechanisms=MECHANISMS)
    found: dict[str, float] = {}
    for each in made.candidates:
        found.setdefault(each.kind, each.errors.rmse)
    noise = fleets.noise_of(num_rounds, schema)
    scale = 10.0**_DIGITS
    return {kind: math.ceil(rmse / noise * scale) / scale for kind, rmse in found.items()}


def grid() -> Grid:
    """Computes the whole table of ratios."""
    styles = figures.styles((*MECHANISMS, "identity"))
    places = {n: separations(n) for n in ROUNDS}
    found = {n: [ratios(n, separation) for separation in places[n]] for n in ROUNDS}
    return Grid(
        rounds=ROUNDS,
        separations=[places[n] for n in ROUNDS],
        ratios={kind: [[each[kind] for each in found[n]] for n in ROUNDS] for kind in MECHANISMS},
        colours={name: style["color"] for name, style in styles.items()},
    )


def read() -> Grid:
    """Reads the table of ratios that the site has."""
    text = FILE.read_text(encoding="utf-8")
    parsed = inputs.parsed_json(text.removeprefix(_BEFORE).removesuffix(_AFTER))
    return Grid(**inputs.part(parsed, dict))


def main() -> None:
    """Computes the table and writes its file."""
    text = json.dumps(dataclasses.asdict(grid()), separators=(",", ":"))
    FILE.write_text(f"{_BEFORE}{text}{_AFTER}", encoding="utf-8")


if __name__ == "__main__":
    main()
