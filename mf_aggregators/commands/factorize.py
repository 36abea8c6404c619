r"""mf-factorize: computes a factorization and saves it as a checkpoint.

With a noise multiplier or a privacy target, it saves a Mechanism, which mfa.load reads.

Examples:
  mf-factorize --mechanism=banded --num_rounds=2052 --num_bands=342 \
    --separation=342 --max_participations=6 --output=banded_342
  mf-factorize --mechanism=blt --num_rounds=1000000 --num_buffers=4 --output=blt_4
  mf-factorize --mechanism=banded --num_rounds=200 --num_bands=25 --separation=25 \
    --target_epsilon=8 --delta=1e-4 --output=mechanism
"""

import math
import sys
import time
import warnings
from collections.abc import Sequence

import numpy as np
from absl import flags

from mf_aggregators import catalogue, checkpoints, inputs, lower_bounds, workloads
from mf_aggregators.commands import command_line, mechanism_flags
from mf_aggregators.commands.command_line import FlagGroup
from mf_aggregators.kernel.numbers import rounded_up
from mf_aggregators.mechanism import Mechanism
from mf_aggregators.participation import SingleParticipation, check


def _define_flags(values: flags.FlagValues) -> None:
    """Defines the flags of mf-factorize."""
    group = FlagGroup(values, "Mechanism")
    group.choice("mechanism", list(catalogue.ENTRIES), "The mechanism to compute. Required.")
    FlagGroup(values, "Training").integer("num_rounds", "The number of rounds n. Required.")
    mechanism_flags.define(values, "workload", "participation", "privacy")
    group = FlagGroup(values, "Output")
    group.path("output", "The checkpoint directory to write. Required.")
    group.overwrite()
    mechanism_flags.define(values, "options")
    for name in ("mechanism", "num_rounds", "output"):
        group.require(name)


@inputs.limited_memory()
def _main(values: flags.FlagValues) -> None:
    """Computes and saves the factorization, and prints the report."""
    options = mechanism_flags.given_options(values.flag_values_dict(), values.mechanism)
    command_line.check_file(values.output, "output", is_directory=True)
    checkpoints.check_destination(values.output, values.overwrite)
    participation = mechanism_flags.participation(values)
    if participation is not None:
        check(participation, values.num_rounds)
    noise = mechanism_flags.noise_multiplier(values)
    command_line.check_choice(
        noise is None or participation is not None,
        "a noise multiplier or a target needs a participation schema: name it by --separation or "
        "--participation.",
    )
    workload = workloads.Workload.described(
        mechanism_flags.workload_description(values) or {"name": "prefix_sum"}, values.num_rounds
    )
    start = time.monotonic()
    factorization = catalogue.entry(values.mechanism).build(
        workload, participation, options, show_progress=True
    )
    seconds = time.monotonic() - start
    schema = participation or factorization.participation or SingleParticipation()
    described, overwrite = workload.to_dict(), values.overwrite
    guarantee: dict[str, object] = {}
    if noise is None:
        checkpoints.save(
            factorization,
            values.output,
            workload=described,
            participation=schema,
            overwrite=overwrite,
        )
    else:
        mechanism = Mechanism(factorization, schema, noise)
        mechanism.save(values.output, workload=described, overwrite=overwrite)
        epsilon = mechanism.guarantee(values.delta).epsilon
        guarantee = {"noise_multiplier": noise, "epsilon": epsilon, "delta": values.delta}
    errors = factorization.errors(workload, schema)
    bound = lower_bounds.compute(workload, schema)
    gap = mechanism_flags.gap_fields(factorization, workload, schema)
    if gap["optimality_gap"] is None and factorization.optimality_gap is not None:
        certified = rounded_up(factorization.optimality_gap, ".2g")
        warnings.warn(
            f"the matrix was optimised for {factorization.participation}, where its certified gap "
            f"is {certified}; the printed errors are for {schema}.",
            stacklevel=2,
        )
    weights, weighted = factorization.parameters.get("weights"), {}
    if weights is not None:
        squares = np.dot(inputs.part(weights, list), errors.per_round_variance)
        weighted = {"weighted_error": math.sqrt(float(squares))}
    fields: dict[str, object] = {
        "mechanism": factorization.mechanism,
        "num_rounds": factorization.num_rounds,
        "sensitivity": errors.sensitivity.value,
        "sensitivity_is_exact": errors.sensitivity.is_exact,
        **errors.to_dict(),
        **weighted,
        "rmse_lower_bound": None if bound is None else bound.rmse,
        "max_error_lower_bound": None if bound is None else bound.max_error,
        **gap,
        "seconds": seconds,
        "participation": str(schema),
        **guarantee,
        "output": values.output,
    }
    command_line.print_result(values, fields, command_line.table(list(fields.items())))


def run(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status.

    Args:
      argv: The command line with the program's name first; that of the process by default.
    """
    return command_line.run(__doc__ or "", _define_flags, _main, argv)


if __name__ == "__main__":
    sys.exit(run())
