r"""mf-factorize: computes a factorization and saves it as a checkpoint.

Examples:
  mf-factorize --mechanism=banded --num_rounds=2052 --num_bands=342 \
    --separation=342 --max_participations=6 --output=banded_342
  mf-factorize --mechanism=blt --num_rounds=1000000 --num_buffers=4 --output=blt_4
"""

import sys
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from absl import flags

from mf_aggregators import checkpoints, factorizations, lower_bounds, memory, workloads
from mf_aggregators.commands import command_line, mechanism_flags, output_paths
from mf_aggregators.commands.flag_groups import FlagGroup
from mf_aggregators.factorizations import Factorization
from mf_aggregators.participation import (
    MinSeparation,
    Participation,
    SingleParticipation,
    check_fits,
)
from mf_aggregators.workloads import Workload

# Which flags each mechanism takes, beside those that all take.
_FLAGS_OF: Mapping[str, tuple[str, ...]] = {
    "identity": (),
    "tree": ("decoder",),
    "optimal": ("equal_column_norms", "pattern_entries", "relative_gap"),
    "banded": ("num_bands", "equal_column_norms", "relative_gap"),
    "toeplitz": ("num_bands", "equal_column_norms", "coefficients", "error"),
    "blt": ("num_buffers", "error"),
    "banded_inverse": ("num_bands", "coefficients", "error"),
    "structured": ("num_diagonals", "rank", "base_checkpoint"),
}


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags of mf-factorize."""
    group = FlagGroup(values, "Mechanism")
    group.choice("mechanism", list(_FLAGS_OF), "What is computed. Required.")
    group.integer(
        "num_bands",
        "The bands of C (banded, toeplitz) or of its inverse (banded_inverse). Default: "
        "--separation for banded and toeplitz, and all n for toeplitz without a separation.",
    )
    group.integer("num_buffers", "The buffers of blt, 1 to 8.")
    group.choice(
        "decoder",
        ["online", "full"],
        "How tree estimates sums: from the nodes below alone, or from all nodes. Default: "
        "from the nodes below.",
    )
    group.choice(
        "error",
        ["mean", "max"],
        "What toeplitz, blt and banded_inverse minimise: the mean squared error over rounds, or "
        "its maximum. Default: the mean.",
    )
    group.boolean(
        "equal_column_norms",
        "Whether C has equal column norms. Default: true for banded, false for toeplitz and for "
        "optimal with clients that return.",
    )
    group.choice(
        "coefficients",
        ["optimised", "square_root"],
        "Where toeplitz and banded_inverse take their coefficients from: an optimiser, or the "
        "square root of the prefix sums. Default: the optimiser.",
    )
    group.number(
        "relative_gap",
        "The certified relative gap of the squared error at which optimal and banded stop. "
        "Default: 1e-6 for optimal (5e-6 for clients that return), 1e-5 for banded.",
    )
    group.choice(
        "pattern_entries",
        ["any", "non_negative", "orthogonal"],
        "What optimal allows the entry of C^T C to be for two rounds of one client: any number, "
        "one that is not negative, or zero. Default: any number.",
    )
    group.integer("num_diagonals", "The diagonals h that structured keeps as they are.")
    group.integer("rank", "The rank r of what structured puts in the place of the rest.")
    group.string(
        "base_checkpoint",
        "The factorization that structured approximates. Default: optimal, computed anew.",
    )
    FlagGroup(values, "Training").integer("num_rounds", "The number of rounds n. Required.")
    mechanism_flags.define_workload(values)
    mechanism_flags.define_participation(values)
    FlagGroup(values, "Output").string("output", "The checkpoint directory to write. Required.")
    output_paths.define_overwrite(values)


@memory.limited()
def main(values: flags.FlagValues) -> None:
    """Computes, saves and reports."""
    for name in ("mechanism", "num_rounds", "output"):
        command_line.check_choice(getattr(values, name) is not None, f"--{name} is required.")
    for name in sorted({name for names in _FLAGS_OF.values() for name in names}):
        takers = [mechanism for mechanism, names in _FLAGS_OF.items() if name in names]
        command_line.check_choice(
            getattr(values, name) is None or values.mechanism in takers,
            f"--{name} belongs to --mechanism={'|'.join(takers)}, not to "
            f"--mechanism={values.mechanism}.",
        )
    output_paths.check_file(values.output, "output")
    checkpoints.check_destination(values.output, values.overwrite)
    participation = mechanism_flags.participation(values)
    if participation is not None:
        check_fits(participation, values.num_rounds)
    workload = workloads.describe(
        mechanism_flags.workload_description(values) or {"name": "prefix_sum"}, values.num_rounds
    )
    start = time.monotonic()
    with warnings.catch_warnings():
        warnings.showwarning = _warn_in_one_line
        factorization = _BUILDERS[values.mechanism](values, workload, participation)
    seconds = time.monotonic() - start
    schema = participation or factorization.participation or SingleParticipation()
    checkpoints.save(
        factorization,
        values.output,
        workload=workload.to_dict(),
        participation=schema,
        overwrite=values.overwrite,
    )
    sensitivity = factorization.sensitivity(schema)
    variances = sensitivity.value**2 * factorization.squared_decoder_rows(workload)
    bound = lower_bounds.compute(workload, schema)
    gap = mechanism_flags.gap_for(factorization, workload, schema)
    if gap is None and factorization.optimality_gap is not None:
        _warn_in_one_line(
            f"the matrix was optimised for {factorization.participation}, where its certified gap "
            f"is {factorization.optimality_gap:.1e}; what is printed is for {schema}."
        )
    fields: dict[str, Any] = {
        "mechanism": factorization.mechanism,
        "num_rounds": factorization.num_rounds,
        "sensitivity": sensitivity.value,
        "sensitivity_is_exact": sensitivity.is_exact,
        "total_error": float(np.sqrt(np.sum(variances))),
        "rmse": float(np.sqrt(np.mean(variances))),
        "max_error": float(np.sqrt(np.max(variances))),
        "rmse_lower_bound": None if bound is None else bound.rmse,
        "optimality_gap": gap,
        "seconds": seconds,
        "participation": str(schema),
        "output": values.output,
    }
    command_line.print_result(values, fields, command_line.table(list(fields.items())))


def run() -> None:
    """Entry point of the console command."""
    sys.exit(command_line.run(__doc__ or "", define_flags, main))


def _given(values: flags.FlagValues, *names: str) -> dict[str, Any]:
    """The flags that were given, as arguments."""
    return {name: getattr(values, name) for name in names if getattr(values, name) is not None}


def _required(values: flags.FlagValues, name: str) -> Any:
    value = getattr(values, name)
    command_line.check_choice(value is not None, f"--mechanism={values.mechanism} needs --{name}.")
    return value


def _identity(
    values: flags.FlagValues, workload: Workload, participation: Participation | None
) -> Factorization:
    return factorizations.identity(values.num_rounds)


def _tree(
    values: flags.FlagValues, workload: Workload, participation: Participation | None
) -> Factorization:
    return factorizations.tree_aggregation(values.num_rounds, **_given(values, "decoder"))


def _optimal(
    values: flags.FlagValues, workload: Workload, participation: Participation | None
) -> Factorization:
    options = _given(values, "equal_column_norms", "pattern_entries", "relative_gap")
    return factorizations.optimal(workload.matrix(), participation, show_progress=True, **options)


def _banded(
    values: flags.FlagValues, workload: Workload, participation: Participation | None
) -> Factorization:
    num_bands = values.num_bands
    if num_bands is None and values.separation is not None:
        num_bands = min(values.separation, values.num_rounds)
    command_line.check_choice(
        num_bands is not None, "--mechanism=banded needs --num_bands or --separation."
    )
    return factorizations.banded(
        workload.matrix(),
        num_bands,
        participation=participation,
        show_progress=True,
        **_given(values, "equal_column_norms", "relative_gap"),
    )


def _toeplitz(
    values: flags.FlagValues, workload: Workload, participation: Participation | None
) -> Factorization:
    options = _given(values, "num_bands", "equal_column_norms", "coefficients", "error")
    return factorizations.toeplitz(
        values.num_rounds,
        participation=participation,
        workload=workload,
        show_progress=True,
        **options,
    )


def _blt(
    values: flags.FlagValues, workload: Workload, participation: Participation | None
) -> Factorization:
    return factorizations.blt(
        values.num_rounds,
        _required(values, "num_buffers"),
        participation,
        workload=workload,
        show_progress=True,
        **_given(values, "error"),
    )


def _banded_inverse(
    values: flags.FlagValues, workload: Workload, participation: Participation | None
) -> Factorization:
    return factorizations.banded_inverse(
        values.num_rounds,
        _required(values, "num_bands"),
        participation,
        workload=workload,
        show_progress=True,
        **_given(values, "coefficients", "error"),
    )


def _structured(
    values: flags.FlagValues, workload: Workload, participation: Participation | None
) -> Factorization:
    num_diagonals, rank = _required(values, "num_diagonals"), _required(values, "rank")
    command_line.check_choice(
        1 <= num_diagonals <= values.num_rounds and 0 <= rank <= values.num_rounds,
        f"--num_diagonals must be 1 to {values.num_rounds} and --rank 0 to {values.num_rounds}, "
        f"found {num_diagonals} and {rank}.",
    )
    is_prefix_sum = workload.name == "prefix_sum"
    if values.base_checkpoint is None:
        command_line.check_choice(
            is_prefix_sum,
            "--mechanism=structured approximates the optimum for prefix sums: for "
            f"--workload={workload.name} use --mechanism=banded or optimal, or name a "
            "factorization to approximate by --base_checkpoint.",
        )
        command_line.check_choice(
            not isinstance(participation, MinSeparation)
            or participation.most_participations(values.num_rounds) == 1,
            "--mechanism=structured approximates optimal, which has no solution for clients that "
            "return after at least --separation rounds: name a factorization to approximate by "
            "--base_checkpoint.",
        )
        prefix_sum = workloads.Workload("prefix_sum", values.num_rounds)
        base: Factorization = factorizations.optimal(
            prefix_sum.matrix(), participation, show_progress=True
        )
    else:
        base = checkpoints.load(values.base_checkpoint)
        command_line.check_choice(
            base.num_rounds == values.num_rounds,
            f"--base_checkpoint={values.base_checkpoint} is for {base.num_rounds} rounds, and "
            f"--num_rounds={values.num_rounds}.",
        )
    return factorizations.structured(base, num_diagonals, rank, show_progress=True)


_Builder = Callable[[flags.FlagValues, Workload, Participation | None], Factorization]

_BUILDERS: Mapping[str, _Builder] = {
    "identity": _identity,
    "tree": _tree,
    "optimal": _optimal,
    "banded": _banded,
    "toeplitz": _toeplitz,
    "blt": _blt,
    "banded_inverse": _banded_inverse,
    "structured": _structured,
}


def _warn_in_one_line(message: Warning | str, *unused: Any, **also_unused: Any) -> None:
    print(f"mf-factorize: warning: {message}", file=sys.stderr)


if __name__ == "__main__":
    run()
