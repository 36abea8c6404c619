r"""compare-mechanisms: trains with several mechanisms, each several times, and tabulates accuracy.

Each run is a process of its own and draws its own secret noise. Cohorts, the order of data and
initial weights differ by repetition (--cohort_seed=1, 2, ...), so that the intervals cover
everything that is random, and are the same for all mechanisms: differences between them vary less
than their accuracies, and a second table has these. Started again with the same --output_dir, the
command goes on where it was.

Examples:
  compare-mechanisms --output_dir=comparison
  compare-mechanisms --output_dir=comparison --mechanisms=banded,identity --repetitions=5 \
    --flags="--num_rounds=100 --target_epsilon=4"
"""

import dataclasses
import pathlib
import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence

from absl import flags

from mf_aggregators import atomic_files
from mf_aggregators.commands import command_line, mechanism_flags
from mf_aggregators.commands.command_line import CommandError, FlagGroup, check_choice
from mf_aggregators.kernel.claim import ONLY_IF
from simulations import flag_fields
from simulations.comparison import repeated_runs, run_comparisons
from simulations.comparison.repeated_runs import FinishedRun, RepeatedRun, Variant
from simulations.comparison.run_comparisons import PairedDifference
from simulations.runs import run_config

MARKDOWN_FILE = "comparison.md"

# Flags that --flags may not contain, each with the reason for a message.
_NOT_HANDED_ON: Mapping[str, str] = {
    "output_dir": "each run has a directory of its own in --output_dir",
    "mechanism": "--mechanisms names the mechanisms",
    "checkpoint": "only built-in mechanisms are compared",
    "format": "runs print JSON, which is read",
    "noise_directory": "runs that share one would share their noise",
    "seed": "repetitions with a fixed seed are the same run, without a guarantee",
    "cohort_seed": "each repetition has its own",
    "flagfile": "name the flags of the file themselves",
}
# Flags that a run with --mechanism=none refuses, and that only private runs are handed.
_OF_PRIVATE_RUNS = (
    *("target_epsilon", "target_rho", "noise_multiplier", "audit_canaries"),
    *("private_metrics", "largest_loss", "largest_examples"),
)
_FLAG = re.compile(r"--([A-Za-z]\w*)(?:=.*)?", re.DOTALL)


def _mechanisms() -> list[str]:
    return [run_config.NOT_PRIVATE, *mechanism_flags.MECHANISMS_OF_RUNS]


def parse_flags(text: str) -> dict[str, str]:
    """Parses --flags, the flags that every run is handed, into a dict by name, in sorted order.

    Args:
      text: Flags as a shell would split them, each ``--name=value``, ``--name`` or
        ``--noname``.

    Raises:
      CommandError: If something is no such flag, is there twice, or is set by the comparison
        itself.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise CommandError(f"--flags={text} cannot be split: {error}.") from error
    found: dict[str, str] = {}
    for word in words:
        match = _FLAG.fullmatch(word)
        if match is None:
            raise CommandError(f"--flags takes flags as --name=value, found {word!r}.")
        name = match[1]
        reason = _NOT_HANDED_ON.get(name)
        check_choice(reason is None, f"--flags cannot have --{name}: {reason}.")
        check_choice(name not in found, f"--flags has --{name} twice: leave one out.")
        found[name] = word
    return dict(sorted(found.items()))


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags of compare-mechanisms.

    Flags:
      mechanisms: The mechanisms to compare, separated by commas.
      repetitions: The number of runs with each mechanism.
      command: The command that trains.
      flags: The flags of that command for every run, in quotes: --flags='--num_rounds=100
        --clip_norm=1'. Runs with --mechanism=none do not get the flags of noise, audits and private
        metrics, which they would refuse.
      output_dir: The directory of the runs, their logs and results, and the comparison. Required.
    """
    texts, group = flag_fields.texts_of(define_flags), FlagGroup(values, "Runs")
    usual = ["none", "blt", "banded", "tree", "identity"]
    group.words("mechanisms", f"{texts['mechanisms']} Any of {', '.join(_mechanisms())}.", usual)
    group.integer("repetitions", texts["repetitions"], 3)
    group.choice("command", [*repeated_runs.MODULES], texts["command"], "run-stackoverflow")
    group.string("flags", texts["flags"], "")
    group = FlagGroup(values, "Output")
    group.path("output_dir", texts["output_dir"])
    group.require("output_dir")


def main(values: flags.FlagValues) -> int | None:
    """Trains the runs that are not finished yet, compares all runs and returns the exit status."""
    start = time.monotonic()
    runs = _planned(values)
    finished = repeated_runs.run_all("compare-mechanisms", runs)
    if finished is None:
        return command_line.INTERRUPTED
    _report(values, runs, finished, start)
    return None


def run() -> None:
    """Entry point of the console command."""
    sys.exit(command_line.run(__doc__ or "", define_flags, main))


def _planned(values: flags.FlagValues) -> list[RepeatedRun]:
    mechanisms = [word.strip() for word in values.mechanisms]
    check_choice(bool(mechanisms), "--mechanisms must name at least one mechanism.")
    for mechanism in mechanisms:
        check_choice(
            mechanism in _mechanisms(),
            f"--mechanisms takes names out of {', '.join(_mechanisms())}, found {mechanism!r}.",
        )
        check_choice(
            mechanisms.count(mechanism) == 1,
            f"--mechanisms has {mechanism} twice: --repetitions says how often each one runs.",
        )
    given = parse_flags(values.flags)
    variants = [
        Variant(mechanism, mechanism, _flags_of(given, mechanism)) for mechanism in mechanisms
    ]
    return repeated_runs.planned(
        pathlib.Path(values.output_dir), values.command, variants, values.repetitions
    )


def _flags_of(given: Mapping[str, str], mechanism: str) -> tuple[str, ...]:
    """Returns the flags given in --flags, without those that runs of the mechanism refuse."""
    refused = _OF_PRIVATE_RUNS if mechanism == run_config.NOT_PRIVATE else ()
    return tuple(word for name, word in given.items() if name not in refused)


def _report(
    values: flags.FlagValues,
    runs: Sequence[RepeatedRun],
    finished: Mapping[RepeatedRun, FinishedRun],
    start: float,
) -> None:
    """Tabulates and draws the results of all runs, and prints their joint privacy guarantee."""
    root = runs[0].root
    results: dict[str, list[FinishedRun]] = {}
    for each in runs:
        results.setdefault(each.variant.name, []).append(finished[each])
    rows = run_comparisons.summarise(results)
    why = run_comparisons.unfairness(results)
    pairs = [] if why is not None else run_comparisons.separated(rows)
    differences: tuple[PairedDifference, ...] = ()
    notes = [run_comparisons.separation_line(rows, pairs, why)]
    if why is None and len(results) > 1 and values.repetitions > 1:
        why_not = run_comparisons.why_not_paired(finished)
        if why_not is None:
            differences = run_comparisons.paired_differences(
                {name: [run.test_accuracy for run in of_name] for name, of_name in results.items()}
            )
        notes += run_comparisons.lines_on_pairs(differences, why_not)
    together = run_comparisons.composition(finished.values())
    if any(run.is_observed for run in finished.values()):
        notes.append(
            "The epsilons of runs that broke their plan, and hence of all runs together, hold "
            f"{ONLY_IF}."
        )
    if any(run.seconds is None for run in finished.values()):
        notes.append("The minutes leave out runs that were interrupted and resumed.")
    tables = [run_comparisons.to_markdown(rows)]
    if differences:
        tables.append(run_comparisons.pairs_to_markdown(differences))
    text = "\n\n".join([*tables, "\n".join([run_comparisons.composition_line(together), *notes])])
    atomic_files.write(root / MARKDOWN_FILE, text + "\n")
    fields = {
        "output_dir": str(root),
        "rows": [dataclasses.asdict(row) for row in rows],
        "separated": [list(pair) for pair in pairs],
        "is_fair": why is None,
        "differences": [dataclasses.asdict(each) for each in differences],
        "composed": dataclasses.asdict(together),
        "notes": notes,
        "seconds": time.monotonic() - start,
    }
    command_line.print_result(values, fields, text)


if __name__ == "__main__":
    run()
