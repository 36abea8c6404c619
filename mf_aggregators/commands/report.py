r"""mf-report: what a checkpoint is, how good it is, and what privacy it gives.

Examples:
  mf-report --checkpoint=banded_342 --separation=342 --max_participations=6 \
    --target_epsilon=8 --delta=1e-6 --figure=banded_342.png
  mf-report --checkpoint=run/factorization --separation=25 --noise_multiplier=0.54 \
    --delta=1e-4 --ledger=run/participation.npz
"""

import math
import pathlib
import sys
import time
from typing import Any

import numpy as np
from absl import flags

from mf_aggregators import (
    accounting,
    checkpoints,
    factorizations,
    lower_bounds,
    memory,
    validation,
    workloads,
)
from mf_aggregators import participation as participations
from mf_aggregators.commands import command_line, ledger_report, mechanism_flags, output_paths
from mf_aggregators.commands.flag_groups import FlagGroup
from mf_aggregators.factorizations import Factorization
from mf_aggregators.noise import costs
from mf_aggregators.noise.recursions import NoiseRecursion
from mf_aggregators.privacy import ledgers, printed_guarantees

# Above this, a figure shows the first column of C instead of the whole matrix.
_MOST_ROUNDS_DRAWN = 4096


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags of mf-report."""
    FlagGroup(values, "Mechanism").string(
        "checkpoint", "The checkpoint directory to report on. Required."
    )
    mechanism_flags.define_privacy(values)
    mechanism_flags.define_participation(values)
    group = FlagGroup(values, "Participation")
    group.string(
        "ledger",
        "A ledger of who took part in which round: the participation.npz of a run, or a text file "
        "(UTF-8) with a client, a comma and a round from 0 on each line. Its first line may be a "
        f"heading: {_headings()}. A line of any other form is refused. The report then has the "
        "guarantee that follows from it, and the amplified one where a data sampler drew the "
        "batches.",
    )
    group.integer(
        "released_rounds",
        "How many rounds the run of a text --ledger released. Default: all of the checkpoint.",
    )
    mechanism_flags.define_workload(values)
    group = FlagGroup(values, "Training")
    group.integer(
        "clients_per_round",
        "The cohort size, which adds the effective RMSE (BandMF Eq. 11) to a noise multiplier.",
    )
    group.integer(
        "model_size",
        "The number of parameters of a model, which adds what a round's noise costs for it.",
    )
    FlagGroup(values, "Output").string(
        "figure", "A PNG file to write, with the error by round and the matrix."
    )


def _headings() -> str:
    *clients, last = ledgers.HEADINGS_OF_CLIENTS
    rounds = " or ".join(ledgers.HEADINGS_OF_ROUNDS)
    return f"{', '.join(clients)} or {last} before the comma, and {rounds} after it"


@memory.limited()
def main(values: flags.FlagValues) -> None:
    """Reads, computes and reports."""
    command_line.check_choice(values.checkpoint is not None, "--checkpoint is required.")
    command_line.check_choice(
        values.figure is None or values.figure.endswith(".png"),
        f"--figure must name a .png file, found {values.figure}.",
    )
    for name in ("model_size", "clients_per_round", "released_rounds"):
        if getattr(values, name) is not None:
            validation.positive_integer(getattr(values, name), f"--{name}")
    command_line.check_choice(
        values.released_rounds is None
        or (values.ledger is not None and not ledgers.is_archive(values.ledger)),
        "--released_rounds belongs to a text --ledger: the participation.npz of a run states how "
        "many rounds it released.",
    )
    if values.figure is not None:
        output_paths.check_file(values.figure, "figure")
    start = time.monotonic()
    factorization, description = checkpoints.load_with_description(values.checkpoint)
    schema = mechanism_flags.participation(values) or participations.from_dict(
        description["errors"]["participation"]
    )
    workload_description = (
        mechanism_flags.workload_description(values) or description["errors"]["workload"]
    )
    workload = workloads.describe(workload_description, factorization.num_rounds)
    errors = factorization.errors(workload, schema)
    bound = lower_bounds.compute(workload, schema)
    multiplier = mechanism_flags.noise_multiplier(values)
    for name in ("ledger", "clients_per_round"):
        command_line.check_choice(
            getattr(values, name) is None or multiplier is not None,
            f"--{name} needs --noise_multiplier or --target_epsilon, the noise of the run.",
        )
    recursion = factorization.noise_recursion()
    fields: dict[str, Any] = {
        "mechanism": factorization.mechanism,
        "num_rounds": factorization.num_rounds,
        "workload": workload_description["name"],
        "participation": str(schema),
        "sensitivity": errors.sensitivity.value,
        "sensitivity_is_exact": errors.sensitivity.is_exact,
        "sensitivity_theorem": errors.sensitivity.theorem,
        **errors.to_dict(),
        "rmse_lower_bound": None if bound is None else bound.rmse,
        "rmse_over_lower_bound": None if bound is None else errors.rmse / bound.rmse,
        "optimality_gap": mechanism_flags.gap_for(factorization, workload, schema),
        "noise_state_floats_per_parameter": recursion.floats_per_parameter,
        "rows_of_z_per_round": recursion.rows_of_z_per_round,
        "noise_multiplier": multiplier,
        "effective_rmse": (
            None
            if multiplier is None or values.clients_per_round is None
            else multiplier * errors.rmse / values.clients_per_round
        ),
        "zcdp_rho": None if multiplier is None else accounting.zcdp_rho(multiplier),
        "epsilon": None if multiplier is None else accounting.epsilon(multiplier, values.delta),
        "delta": None if multiplier is None else values.delta,
    }
    if values.model_size is not None:
        fields |= _costs(recursion, values.model_size)
    realised: dict[str, Any] = {}
    if values.ledger is not None and multiplier is not None:
        ledger = ledgers.load(values.ledger, values.released_rounds or factorization.num_rounds)
        realised = ledger_report.fields(ledger, factorization, schema, multiplier, values.delta)
        fields |= realised
    if values.figure is not None:
        deviations = np.sqrt(errors.per_round_variance)
        _draw(factorization, workload, schema, deviations, pathlib.Path(values.figure))
        fields["figure"] = values.figure
    fields["seconds"] = time.monotonic() - start
    text = command_line.table(list(fields.items()))
    if multiplier is None:
        text += "\n\n--noise_multiplier or --target_epsilon adds the privacy guarantee."
    elif math.isfinite(fields["epsilon"]) and not ledger_report.is_sampled(realised):
        text += (
            f"\n\nWhoever observes all {factorization.num_rounds} rounds learns about one client "
            f"at most what {printed_guarantees.pair(fields['epsilon'], values.delta)}-DP allows "
            f"(zero-out adjacency), if every client keeps to: {schema}."
        )
    if realised:
        text += f"\n\n{ledger_report.text(realised, factorization.num_rounds, values.delta)}"
    command_line.print_result(values, fields, text)


def run() -> None:
    """Entry point of the console command."""
    sys.exit(command_line.run(__doc__ or "", define_flags, main))


def _costs(recursion: NoiseRecursion, model_size: int) -> dict[str, Any]:
    """What a round's noise costs for a float32 model, with the storage that is chosen for it."""
    cost = costs.choose(recursion, model_size)
    return {
        "model_size": model_size,
        "noise_storage": cost.storage.value,
        "noise_state_gb": cost.state_bytes / 1e9,
        "noise_disk_gb": cost.disk_bytes / 1e9,
        "noise_memory_gb": cost.memory_bytes / 1e9,
        "noise_seconds_per_round": cost.seconds_per_round,
    }


def _draw(
    factorization: Factorization,
    workload: workloads.Workload,
    schema: participations.Participation,
    deviations: np.ndarray,
    path: pathlib.Path,
) -> None:
    # matplotlib takes a second to import, which only this flag needs.
    from mf_aggregators import figures

    independent = factorizations.identity(factorization.num_rounds)
    rounds = np.arange(1, factorization.num_rounds + 1)
    figure, ((error_axes, matrix_axes),) = figures.panels(1, 2, (5.4, 4.2))
    figures.lines(
        error_axes,
        {
            factorization.mechanism: (rounds, deviations),
            "independent noise": (
                rounds,
                np.sqrt(independent.per_round_variance(workload, schema)),
            ),
        },
        title="Output at noise multiplier 1",
        x="round",
        y="standard deviation",
    )
    if factorization.num_rounds <= _MOST_ROUNDS_DRAWN:
        figures.heat_map(
            figure,
            matrix_axes,
            np.sqrt(np.abs(factorization.strategy_matrix())),
            title="Strategy matrix C (root of magnitudes)",
        )
    else:
        first = np.zeros(factorization.num_rounds)
        first[0] = 1.0
        column = np.abs(factorization.encode(first))[: len(rounds)]
        figures.lines(
            matrix_axes,
            {factorization.mechanism: (rounds, column)},
            title="First column of C (magnitudes)",
            x="row",
            y="magnitude",
            logarithmic="xy",
            with_legend=False,
        )
    figures.heading(figure, f"{factorization.mechanism}, n = {len(rounds)}: {schema}")
    try:
        figures.save(figure, str(path))
    except OSError as error:
        raise command_line.CommandError(
            f"--figure={path} cannot be written: {error.strerror}."
        ) from error


if __name__ == "__main__":
    run()
