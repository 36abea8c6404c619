r"""mf-factorize: computes a factorization and saves it as a checkpoint.

Example:
  mf-factorize --mechanism=banded --num_rounds=2052 --num_bands=342 \
    --separation=342 --max_participations=6 --output=banded_342
"""

import sys
import time
import warnings
from typing import Any

import numpy as np
from absl import flags

from mf_aggregators import checkpoints, factorizations, workloads
from mf_aggregators.commands import command_line, mechanism_flags
from mf_aggregators.factorizations import Factorization
from mf_aggregators.participation import Participation, SingleParticipation

_MECHANISMS = ("identity", "optimal", "banded")


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags of mf-factorize."""
    flags.DEFINE_enum("mechanism", None, list(_MECHANISMS), "What to compute.", flag_values=values)
    flags.DEFINE_integer("num_rounds", None, "The number of rounds n.", flag_values=values)
    flags.DEFINE_string("output", None, "The checkpoint directory to write.", flag_values=values)
    flags.DEFINE_integer(
        "num_bands",
        None,
        "Bands of --mechanism=banded; default: --separation.",
        flag_values=values,
    )
    flags.DEFINE_bool(
        "equal_column_norms", True, "Whether C has equal column norms.", flag_values=values
    )
    flags.DEFINE_float(
        "relative_gap",
        None,
        "The certified relative gap of the squared error at which the solver stops; default "
        "1e-6 for optimal, 1e-5 for banded.",
        flag_values=values,
    )
    mechanism_flags.define_workload(values)
    mechanism_flags.define_participation(values)


def main(values: flags.FlagValues) -> None:
    """Computes, saves and reports."""
    for name in ("mechanism", "num_rounds", "output"):
        command_line.check_choice(getattr(values, name) is not None, f"--{name} is required.")
    participation = mechanism_flags.participation(values)
    description = mechanism_flags.workload_description(values) or {"name": "prefix_sum"}
    workload = workloads.from_description(description, values.num_rounds)
    start = time.monotonic()
    with warnings.catch_warnings():
        warnings.showwarning = _warn_in_one_line
        factorization = _factorize(values, workload, participation)
    seconds = time.monotonic() - start
    schema = participation or factorization.participation or SingleParticipation()
    checkpoints.save(factorization, values.output, workload=description, participation=schema)
    variances = factorization.per_round_variance(workload, schema)
    fields: dict[str, Any] = {
        "mechanism": factorization.mechanism,
        "num_rounds": factorization.num_rounds,
        "sensitivity": factorization.sensitivity(schema).value,
        "total_error": float(np.sqrt(np.sum(variances))),
        "rmse": float(np.sqrt(np.mean(variances))),
        "max_error": float(np.sqrt(np.max(variances))),
        "optimality_gap": factorization.optimality_gap,
        "seconds": seconds,
        "participation": str(schema),
        "output": values.output,
    }
    command_line.print_result(values, fields, command_line.table(list(fields.items())))


def run() -> None:
    """Entry point of the console command."""
    sys.exit(command_line.run(__doc__ or "", define_flags, main))


def _factorize(
    values: flags.FlagValues, workload: np.ndarray, participation: Participation | None
) -> Factorization:
    mechanism = values.mechanism
    command_line.check_choice(
        mechanism == "banded" or values.num_bands is None,
        f"--num_bands belongs to --mechanism=banded, not to --mechanism={mechanism}.",
    )
    solver: dict[str, Any] = {"show_progress": True}
    if values.relative_gap is not None:
        solver["relative_gap"] = values.relative_gap
    if mechanism == "identity":
        return factorizations.identity(values.num_rounds)
    if mechanism == "optimal":
        return factorizations.optimal(workload, participation, **solver)
    num_bands = values.separation if values.num_bands is None else values.num_bands
    command_line.check_choice(
        num_bands is not None, "--mechanism=banded needs --num_bands or --separation."
    )
    return factorizations.banded(
        workload, num_bands, values.equal_column_norms, participation, **solver
    )


def _warn_in_one_line(message: Warning | str, *unused: Any, **also_unused: Any) -> None:
    print(f"mf-factorize: warning: {message}", file=sys.stderr)


if __name__ == "__main__":
    run()
