r"""The optimal number of bands for every privacy target and number of epochs (BandMF Table 3).

  python benchmarks/number_of_bands.py --num_rounds=1024 --epsilons=0.5,1,2 --epochs=1,2,4

Compares powers of two by the noise multiplier of Poisson sampling and the best banded matrix,
and prints for each cell the best number of bands, the next best, and by how much its error
is larger. Factorizations and noise multipliers are cached in the user's cache directory.
"""

import sys

from absl import flags

from mf_aggregators import caches
from mf_aggregators.checkpoints import factorization_cache
from mf_aggregators.commands import command_line
from mf_aggregators.planning import band_choice

_CLIENTS_PER_ROUND = 64


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags of the benchmark."""
    flags.DEFINE_integer("num_rounds", 1024, "The rounds n, a power of two.", flag_values=values)
    flags.DEFINE_float("delta", 1e-6, "The delta of the guarantee.", flag_values=values)
    flags.DEFINE_list(
        "epsilons",
        ["0.03125", "0.0625", "0.125", "0.25", "0.5", "1", "2", "4", "8", "16"],
        "The privacy targets.",
        flag_values=values,
    )
    flags.DEFINE_list(
        "epochs",
        [str(2**i) for i in range(11)],
        "The epochs k, divisors of n: the population is n B / k.",
        flag_values=values,
    )


def main(values: flags.FlagValues) -> None:
    """Computes all cells, each printed when it is known."""
    rounds = values.num_rounds
    cells = []
    for epsilon in map(float, values.epsilons):
        for epochs in map(int, values.epochs):
            command_line.check_choice(
                rounds % epochs == 0, f"--epochs={epochs} does not divide {rounds} rounds."
            )
            choices = band_choice.compare(
                epsilon,
                values.delta,
                num_rounds=rounds,
                population=rounds * _CLIENTS_PER_ROUND // epochs,
                clients_per_round=_CLIENTS_PER_ROUND,
                cache_directory=caches.find(factorization_cache.FOLDER),
            )
            ranked = sorted(choices, key=lambda choice: choice.effective_rmse)
            second = ranked[1] if len(ranked) > 1 else None
            cell = {
                "epsilon": epsilon,
                "epochs": epochs,
                "num_bands": ranked[0].num_bands,
                "second": None if second is None else second.num_bands,
                "second_has_more": (
                    None
                    if second is None
                    else second.effective_rmse / ranked[0].effective_rmse - 1.0
                ),
            }
            cells.append(cell)
            print(", ".join(f"{name} {value}" for name, value in cell.items()), file=sys.stderr)
    table = [("epsilon", "bands for epochs " + " ".join(values.epochs))]
    for epsilon in map(float, values.epsilons):
        row = [str(cell["num_bands"]) for cell in cells if cell["epsilon"] == epsilon]
        table.append((f"{epsilon:g}", " ".join(row)))
    command_line.print_result(values, {"cells": cells}, command_line.table(table))


if __name__ == "__main__":
    sys.exit(command_line.run(__doc__ or "", define_flags, main))
