"""Coins under timers in the place of BandMF's parts, for the settings of its Table 5."""

import functools
import math

from mf_aggregators import planning
from mf_aggregators.participation import sampling_scheme
from mf_aggregators.planning import band_choice
from reproduction.banded_errors import PAPER
from reproduction.experiment import Drawing, Experiment, Outcome, Row, Workspace, for_drawing

_DELTA = 1e-6
_NUM_ROUNDS, _POPULATION, _CLIENTS_PER_ROUND, _MOST = 2052, 342_000, 1000, 6
# By epsilon: the bands of Table 5, and the printed noise multiplier for Poisson sampling of parts.
_PRINTED = {1: (9, "0.79118"), 2: (18, "0.64708"), 4: (32, "0.52224"), 8: (64, "0.43490")}


def table_5(name: str, workspace: Workspace) -> Outcome:
    """Computes certified noise multipliers for coins, with the bands of Table 5.

    Args:
      name: The experiment's name.
      workspace: Where factorizations and noise multipliers are kept.

    Returns:
      A row for each epsilon, in the table's unit: for sensitivity 1 under six participations.
    """
    rows = []
    for epsilon, (num_bands, printed) in _PRINTED.items():
        scheme = sampling_scheme(
            "min_separation",
            num_rounds=_NUM_ROUNDS,
            num_bands=num_bands,
            population=_POPULATION,
            clients_per_round=_CLIENTS_PER_ROUND,
        )
        cache = workspace.cache_directory
        matrix = band_choice.banded_matrix(_NUM_ROUNDS, num_bands, cache)
        mechanism = planning.calibrated(matrix, scheme, float(epsilon), _DELTA, cache)
        ours = mechanism.noise_multiplier / math.sqrt(_MOST)
        share = 100.0 * (1.0 - ours / float(printed))
        rows.append(
            Row(
                name,
                f"BandMF of {num_bands} bands, coins at least {num_bands} rounds apart, "
                f"epsilon {epsilon}",
                "noise multiplier for sensitivity 1 under (6, 342)",
                None,
                ours,
                f"the table prints {printed} for Poisson sampling of {num_bands} parts, with the "
                f"same matrix and rate of participation: coins need {share:.1f} % less noise",
            )
        )
    data = {
        "table": "Table 5",
        "delta": _DELTA,
        "epsilons": list(_PRINTED),
        "noise_multipliers": {
            "parts, printed": for_drawing([float(printed) for _, printed in _PRINTED.values()]),
            "coins": for_drawing([row.ours for row in rows]),
        },
    }
    return Outcome(tuple(rows), Drawing("noise multipliers", data))


def experiments() -> tuple[Experiment, ...]:
    """Returns the experiments of this module."""
    name = "bandmf-table-5-coins"
    return (
        Experiment(
            name,
            f"{PAPER}, Table 5; Dong and Ganesh (arXiv 2602.09338)",
            "Noise multipliers for coins under timers beside those for parts",
            functools.partial(table_5, name),
        ),
    )
