r"""What each mechanism loses if it is optimised for constant learning rates.

  python benchmarks/learning_rates.py --error=max --format=json
  python benchmarks/learning_rates.py --num_rounds=16384 --separation=2730 --only=toeplitz

The training is momentum SGD with a schedule of the papers, and errors are those of its outputs
under (k, b)-participation. By default it is BandMF's setting (App. I), 2,052 rounds and six
participations 342 apart. Seconds are those of the process.
"""

import dataclasses
import sys
import time
from collections.abc import Callable
from typing import Any

from absl import flags

from mf_aggregators.commands import command_line
from mf_aggregators.factorizations import Factorization, blt, toeplitz
from mf_aggregators.participation import FixedEpochOrder
from mf_aggregators.workloads import Workload
from simulations.training import learning_rate_schedules

_MAKERS: dict[str, Callable[..., Factorization]] = {
    "toeplitz": toeplitz,
    "blt": lambda workload, **options: blt(workload, 4, **options),
}


@dataclasses.dataclass(frozen=True)
class Loss:
    """The errors of a mechanism for a schedule.

    Attributes:
      for_constant: The error of the matrix for constant learning rates.
      for_schedule: That of the matrix for the schedule.
      seconds: How long both searches took.
    """

    for_constant: float
    for_schedule: float
    seconds: float


def loss(
    mechanism: str, workload: Workload, participation: FixedEpochOrder, error: str = "mean"
) -> Loss:
    """Returns what a mechanism loses by constant learning rates.

    Args:
      mechanism: ``toeplitz`` or ``blt``, of four buffers.
      workload: Momentum SGD with learning rates.
      participation: The schema.
      error: ``mean`` for the rmse, or ``max``.
    """
    start = time.process_time()
    constant = Workload("momentum_sgd", workload.num_rounds, workload.momentum)
    measure = "rmse" if error == "mean" else "max_error"
    before, after = (
        getattr(_MAKERS[mechanism](each, participation=participation, error=error), measure)(
            workload, participation
        )
        for each in (constant, workload)
    )
    return Loss(before, after, time.process_time() - start)


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags of the benchmark."""
    for name, default, meaning in (
        ("num_rounds", 2052, "The rounds n."),
        ("separation", 342, "The rounds b between participations."),
        ("max_participations", 6, "The participations k of a client."),
    ):
        flags.DEFINE_integer(name, default, meaning, lower_bound=1, flag_values=values)
    flags.DEFINE_list("momentum", ["0", "0.95"], "Which momenta.", flag_values=values)
    flags.DEFINE_list("only", list(_MAKERS), "Which mechanisms.", flag_values=values)
    flags.DEFINE_enum("error", "mean", ["mean", "max"], "Which error.", flag_values=values)
    schedules = list(learning_rate_schedules.names())
    flags.DEFINE_enum("schedule", "warmup_cooldown", schedules, "Which.", flag_values=values)


def main(values: flags.FlagValues) -> None:
    """Measures and reports."""
    schema = FixedEpochOrder(values.max_participations, values.separation)
    schedule = learning_rate_schedules.by_name(values.schedule)
    rates = tuple(schedule.rates(values.num_rounds, 1.0).tolist())
    fields: dict[str, Any] = {}
    for name in values.only:
        command_line.check_choice(
            name in _MAKERS, f"--only must name some of {', '.join(_MAKERS)}, found {name}."
        )
        for momentum in values.momentum:
            workload = Workload("momentum_sgd", values.num_rounds, float(momentum), rates)
            found = dataclasses.asdict(loss(name, workload, schema, values.error))
            fields |= {f"{name}, momentum {momentum}, {key}": each for key, each in found.items()}
    command_line.print_result(values, fields, command_line.table(list(fields.items())))


if __name__ == "__main__":
    sys.exit(command_line.run(__doc__ or "", define_flags, main))
