r"""mf-report: what a checkpoint is, how good it is, and what privacy it gives.

Examples:
  mf-report --checkpoint=banded_342 --separation=342 --max_participations=6 \
    --target_epsilon=8 --delta=1e-6 --figure=banded_342.png
  mf-report --checkpoint=run/factorization --separation=25 --noise_multiplier=0.54 \
    --delta=1e-4 --ledger=run/participation.npz
  mf-report --checkpoint=run/factorization --separation=25 --noise_multiplier=0.54 \
    --delta=1e-4 --extend_to=3000
  mf-report --checkpoint=run/factorization --noise_multiplier=0.54 --delta=1e-4 \
    --ledger=run/participation.npz --sampling_seed=run/checkpoints/sampling_seed.json
"""

import math
import pathlib
import sys
import time
from typing import Any

from absl import flags

from mf_aggregators import (
    accounting,
    lower_bounds,
    memory,
    printed_guarantees,
    random_streams,
    validation,
)
from mf_aggregators.accounting import gaussian
from mf_aggregators.commands import (
    command_line,
    flag_groups,
    html_pages,
    ledger_report,
    mechanism_flags,
    output_paths,
    report_subject,
)
from mf_aggregators.commands.flag_groups import FlagGroup
from mf_aggregators.commands.report_subject import Subject
from mf_aggregators.noise import costs
from mf_aggregators.noise.recursions import NoiseRecursion
from mf_aggregators.privacy import attackers, guarantees, ledgers
from mf_aggregators.privacy.guarantees import Guarantee
from mf_aggregators.privacy.ledgers import Ledger


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags of mf-report."""
    FlagGroup(values, "Mechanism").path(
        "checkpoint", "The checkpoint directory to report on. Required."
    )
    flag_groups.require(values, "checkpoint")
    mechanism_flags.define_privacy(values)
    mechanism_flags.define_participation(values)
    group = FlagGroup(values, "Participation")
    group.path(
        "ledger",
        "A ledger of who took part in which round: the participation.npz of a run, or a text file "
        "(UTF-8) with a client, a comma and a round from 0 on each line. Its first line may be a "
        f"heading: {_headings()}. A line of any other form is refused. The report then has the "
        "guarantee that follows from it, and the amplified one where a data sampler drew the "
        "batches.",
    )
    group.path(
        "sampling_seed",
        "The file with the secret seed of the data sampler that drew the batches of --ledger: "
        "checkpoints/sampling_seed.json of a run. Every draw is compared with the ledger. "
        "Without it the report says what holds if the ledger is right, and for whoever knows who "
        "was drawn.",
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
    group.integer(
        "extend_to",
        "More rounds, for which a run under the checkpoint's matrix might go on with the noise "
        "that it has. Adds what guarantee and error of the whole would be, beside the error of "
        "the same mechanism planned for so many rounds. The participation flags are for both.",
    )
    FlagGroup(values, "Output").path(
        "figure",
        "A PNG file to write, with the error by round, the matrix and, with a noise multiplier, "
        "what an attacker can do.",
    )
    html_pages.define_report(
        values,
        "the same as pictures, epsilon over noise, what the noise costs, all numbers, and what "
        "uses the checkpoint.",
    )
    output_paths.define_overwrite(values, "--figure and --report")
    FlagGroup(values, "Output").boolean(
        "name_clients",
        "Whether the report names the client of --ledger that was protected least, with its "
        "rounds.",
        False,
    )


def _headings() -> str:
    *clients, last = ledgers.HEADINGS_OF_CLIENTS
    rounds = " or ".join(ledgers.HEADINGS_OF_ROUNDS)
    return f"{', '.join(clients)} or {last} before the comma, and {rounds} after it"


@memory.limited()
def main(values: flags.FlagValues) -> int:
    """Reads, computes and reports; returns the exit status."""
    _check_flags(values)
    start = time.monotonic()
    subject = report_subject.read(values)
    factorization = subject.factorization
    fields = _errors(subject)
    multiplier = mechanism_flags.noise_multiplier(values)
    for name in ("ledger", "clients_per_round"):
        command_line.check_choice(
            getattr(values, name) is None or multiplier is not None,
            f"--{name} needs --noise_multiplier or --target_epsilon, the noise of the run.",
        )
    fields |= _guarantee(subject, multiplier, values.delta, values.clients_per_round)
    if values.model_size is not None:
        if multiplier:
            rounds = max(factorization.num_rounds, values.extend_to or 0)
            gaussian.check_charged(values.model_size, rounds)
        fields |= _costs(factorization.noise_recursion(), values.model_size)
    if values.extend_to is not None:
        fields |= report_subject.extension_fields(
            factorization,
            subject.schema,
            subject.workload,
            values.extend_to,
            multiplier,
            values.delta,
            values.model_size,
        )
    realised: dict[str, Any] = {}
    stated = {} if multiplier is None else {"planned": _planned(subject, multiplier, values.delta)}
    if values.ledger is not None and multiplier is not None:
        rounds = values.released_rounds or factorization.num_rounds
        ledger = ledgers.load(values.ledger, rounds)
        seed = _sampling_seed(values, ledger)
        found = ledger_report.read(
            ledger, factorization, subject.schema, multiplier, values.delta, seed
        )
        realised = found.fields(name_clients=values.name_clients)
        stated = found.guarantees()
        fields |= realised
    is_broken = bool(realised) and realised["keeps_plan"] is False
    warnings: list[str | None] = []
    if realised:
        warnings = [
            ledger_report.warning(realised, factorization.num_rounds, values.delta),
            ledger_report.warning_of_names(realised),
        ]
    first = [warning for warning in warnings if warning is not None]
    sentences = _sentences(fields, subject, values.delta, realised)
    # What draws takes a second to import, which these flags alone need.
    if values.figure is not None:
        from mf_aggregators.commands import report_page

        report_page.save_figure(subject, stated, is_broken, pathlib.Path(values.figure))
        fields["figure"] = values.figure
    if values.report is not None:
        fields["report"] = values.report
    fields["seconds"] = time.monotonic() - start
    if values.report is not None:
        from mf_aggregators.commands import report_page

        report_page.write(subject, stated, fields, [*first, *sentences], is_broken, values)
    text = "\n\n".join([*first, command_line.table(list(fields.items())), *sentences])
    command_line.print_result(values, fields, text)
    return command_line.REFUTED if is_broken else command_line.DONE


def _check_flags(values: flags.FlagValues) -> None:
    command_line.check_choice(
        values.figure is None or values.figure.endswith(".png"),
        f"--figure must name a .png file, found {values.figure}.",
    )
    for name in ("model_size", "clients_per_round", "released_rounds", "extend_to"):
        if getattr(values, name) is not None:
            validation.positive_integer(getattr(values, name), f"--{name}")
    command_line.check_choice(
        values.released_rounds is None
        or (values.ledger is not None and not ledgers.is_archive(values.ledger)),
        "--released_rounds belongs to a text --ledger: the participation.npz of a run states how "
        "many rounds it released.",
    )
    command_line.check_choice(
        values.sampling_seed is None or values.ledger is not None,
        "--sampling_seed needs --ledger, whose draws it checks.",
    )
    if values.figure is not None:
        command_line.check_extra("--figure", ("matplotlib",))
        output_paths.check_parent(values.figure, "figure")
        output_paths.check_apart(values.figure, "figure", values.checkpoint)
        output_paths.check_file(values.figure, "figure", values.overwrite)
    html_pages.check_report(values, values.checkpoint)


def _sampling_seed(values: flags.FlagValues, ledger: Ledger) -> int | None:
    if values.sampling_seed is None:
        return None
    command_line.check_choice(
        ledger.sampling is not None,
        f"--sampling_seed needs a ledger that names the scheme of its draws, and {values.ledger} "
        "does not: give the participation.npz of a run that samples.",
    )
    return random_streams.load_seed(values.sampling_seed)


def _errors(subject: Subject) -> dict[str, Any]:
    """The errors at noise multiplier 1, how near the best possible they are, and the noise."""
    factorization, errors = subject.factorization, subject.errors
    bound = lower_bounds.compute(subject.workload, subject.schema)
    recursion = factorization.noise_recursion()
    return {
        "mechanism": factorization.mechanism,
        "num_rounds": factorization.num_rounds,
        "workload": subject.workload.name,
        "participation": str(subject.schema),
        "sensitivity": errors.sensitivity.value,
        "sensitivity_is_exact": errors.sensitivity.is_exact,
        "sensitivity_theorem": errors.sensitivity.theorem,
        **errors.to_dict(),
        "rmse_lower_bound": None if bound is None else bound.rmse,
        "rmse_over_lower_bound": None if bound is None else errors.rmse / bound.rmse,
        "optimality_gap": mechanism_flags.gap_for(factorization, subject.workload, subject.schema),
        "noise_state_floats_per_parameter": recursion.floats_per_parameter,
        "rows_of_z_per_round": recursion.rows_of_z_per_round,
    }


def _planned(subject: Subject, multiplier: float, delta: float) -> Guarantee:
    return guarantees.planned(subject.factorization, subject.schema, multiplier, delta)


def _guarantee(
    subject: Subject, multiplier: float | None, delta: float, clients_per_round: int | None
) -> dict[str, Any]:
    """The guarantee of all rounds and the effective RMSE (BandMF Eq. 11); None without noise."""
    if multiplier is None:
        names = ("noise_multiplier", "effective_rmse", "zcdp_rho", "zcdp_delta", "epsilon", "delta")
        return dict.fromkeys((*names, *map(attackers.name, attackers.FALSE_POSITIVE_RATES)))
    return {
        "noise_multiplier": multiplier,
        "effective_rmse": (
            None
            if clients_per_round is None
            else multiplier * subject.errors.rmse / clients_per_round
        ),
        "zcdp_rho": accounting.zcdp_rho(multiplier),
        # Zero without noise: nothing is stated then.
        "zcdp_delta": accounting.zcdp_delta(multiplier),
        "epsilon": accounting.epsilon(multiplier, delta),
        "delta": delta,
        **_planned(subject, multiplier, delta).attacker(),
    }


def _sentences(
    fields: dict[str, Any], subject: Subject, delta: float, realised: dict[str, Any]
) -> list[str]:
    """In words, what guarantee the fields state; nothing where a warning has said it."""
    num_rounds = subject.factorization.num_rounds
    if fields["noise_multiplier"] is None:
        return ["--noise_multiplier or --target_epsilon adds the privacy guarantee."]
    if realised and realised["keeps_plan"] is False:
        return []
    found = []
    if math.isfinite(fields["epsilon"]) and not ledger_report.is_sampled(realised):
        found.append(
            f"Whoever observes all {num_rounds} rounds learns about one client "
            f"at most what {printed_guarantees.pair(fields['epsilon'], delta)}-DP allows "
            f"(zero-out adjacency), if every client keeps to: {subject.schema}. "
            f"{attackers.sentence(fields)}"
        )
    if realised:
        found.append(ledger_report.text(realised, num_rounds, delta))
    return found


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


if __name__ == "__main__":
    run()
