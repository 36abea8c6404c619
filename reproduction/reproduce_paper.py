"""reproduce-paper: the papers' tables and figures, recomputed beside what was printed.

With --list, or without flags but --format, it lists the experiments. Otherwise each chosen one
writes its numbers and a figure into --output_dir. A report of all that are there (report.md) is
written anew. Factorizations and noise multipliers are cached in --cache_dir.

Examples:
  reproduce-paper --list
  reproduce-paper --only=prefix-sums-table-1,denisov-figure-1 --output_dir=runs/reproduction
  reproduce-paper --output_dir=runs/reproduction
  reproduce-paper --only=training --output_dir=runs/reproduction
  reproduce-paper --only=bandmf-figure-5a --dataset=stackoverflow --workers=10.0.0.5:8000
"""

import dataclasses
import os
import pathlib
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence

from absl import flags

from mf_aggregators import atomic_files
from mf_aggregators.commands import command_line
from mf_aggregators.commands.command_line import CommandError, FlagGroup
from mf_aggregators.kernel import numbers
from mf_aggregators.planning import planner
from reproduction import (
    banded_tables,
    best_bands,
    configurations,
    fashion_mnist,
    optimal_tables,
    results,
    shakespeare,
    training,
)
from reproduction.experiment import Experiment, TrainingPlace, Workspace
from reproduction.results import Result
from simulations import flag_fields

NUMBERS = "numbers"
TRAINING = "training"


def experiments() -> Mapping[str, Experiment]:
    """Returns all experiments by name: those without training first, then the others."""
    modules = (optimal_tables, banded_tables, best_bands, training, fashion_mnist, shakespeare)
    every = [experiment for module in modules for experiment in module.EXPERIMENTS]
    return {experiment.name: experiment for experiment in every}


def experiments_named(names: Sequence[str]) -> list[Experiment]:
    """Returns experiments by their names.

    Args:
      names: Names, or ``numbers`` or ``training`` for all of a kind; each counts once.

    Returns:
      The experiments, in the order of ``experiments``.

    Raises:
      CommandError: If there is no experiment of such a name, or no name at all.
    """
    known = experiments()
    wanted = set()
    for name in names:
        if name in (NUMBERS, TRAINING):
            wanted |= {
                each.name for each in known.values() if bool(each.targets) == (name == TRAINING)
            }
            continue
        command_line.check_choice(
            name in known, f"--only has the unknown experiment {name!r}; --list prints the names."
        )
        wanted.add(name)
    command_line.check_choice(bool(wanted), "--only names no experiment; --list prints the names.")
    return [experiment for name, experiment in known.items() if name in wanted]


def define_flags(values: flags.FlagValues) -> None:
    """Defines the command's flags.

    Flags:
      only: The experiments, separated by commas: names that --list prints; 'numbers' for all that
        need no training, within the hour; 'training' for those that train, for many hours.
      list: Whether to print only the list of experiments.
      dataset: The data of experiments that train: docstrings, scaled down; stackoverflow or
        cifar10, at the papers' size (a download, and days on many machines); fashion-mnist or
        shakespeare, for the experiments of these names, in minutes.
      repetitions: The number of runs of each configuration that trains.
      targets: The epsilons whose configurations are trained, separated by commas. Default: all
        epsilons of an experiment.
      workers: The addresses host:port,... of TFF worker processes that train the clients, each
        started by start-tff-worker. Default: one process that each run starts on this machine.
      output_dir: The directory of the results and of the report.
      cache_dir: The directory in which factorizations are cached. Default: in the user's cache
        directory.
    """
    texts = flag_fields.texts_of(define_flags)
    group = FlagGroup(values, "Experiments")
    group.words("only", texts["only"], [NUMBERS])
    group.boolean("list", texts["list"], False)
    group = FlagGroup(values, "Training")
    datasets = (*configurations.DATASETS, fashion_mnist.DATASET, shakespeare.DATASET)
    group.choice("dataset", datasets, texts["dataset"], configurations.DOCSTRINGS)
    group.integer("repetitions", texts["repetitions"], 3)
    group.words("targets", texts["targets"])
    group.string("workers", texts["workers"])
    group = FlagGroup(values, "Output")
    group.path("output_dir", texts["output_dir"], "runs/reproduction")
    group.path("cache_dir", texts["cache_dir"])


def main(values: flags.FlagValues) -> None:
    """Runs the chosen experiments."""
    # If no flag is given, list the experiments: running them takes half an hour at least, and
    # begins only if a flag asks for it.
    if values.list or not any(values[name].present for name in values if name != "format"):
        _print_list(values)
        return
    chosen = experiments_named(values.only)
    numbers.positive_integer(values.repetitions, "--repetitions")
    targets = _targets(values)
    chosen, skipped = _trainable(chosen, values, targets)
    if any(experiment.targets for experiment in chosen):
        command_line.check_extra("a training run")
    command_line.check_extra("a report", ("matplotlib",))
    for reason in skipped:
        _say(f"skipped: {reason}")
    directory = pathlib.Path(values.output_dir)
    command_line.check_directory(directory, "output_dir")
    directory.mkdir(parents=True, exist_ok=True)
    workspace = Workspace(
        command_line.cache_directory(values.cache_dir, planner.FOLDER, _say),
        show_progress=True,
        training=TrainingPlace(
            directory / f"runs_{values.dataset}",
            values.dataset,
            values.repetitions,
            values.workers,
            targets,
        ),
    )
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("always", atomic_files.CacheWarning)
        for place, experiment in enumerate(chosen, start=1):
            _say(f"{experiment.name} ({place} of {len(chosen)}): {experiment.title}")
            found.append(_run(experiment, values, workspace, directory))
            _say(f"{experiment.name}: {results.verdict(found[-1].rows)}")
            # Write the report after each experiment, because a later one may fail.
            _write_report(directory)
    rows = [row for result in found for row in result.rows]
    fields = {
        "output_dir": str(directory),
        "rows": [row.to_dict() for row in rows],
        "seconds": {result.name: result.seconds for result in found},
    }
    command_line.print_result(values, fields, _as_text(found, directory))


def _targets(values: flags.FlagValues) -> tuple[float, ...] | None:
    if values.targets is None:
        return None
    try:
        found = tuple(float(target) for target in values.targets)
    except ValueError as error:
        raise CommandError(
            f"--targets takes epsilons separated by commas, found {','.join(values.targets)}."
        ) from error
    command_line.check_choice(bool(found), "--targets names no epsilon.")
    return found


def _trainable(
    chosen: Sequence[Experiment], values: flags.FlagValues, targets: tuple[float, ...] | None
) -> tuple[list[Experiment], list[str]]:
    """Returns the experiments that can be trained as asked, and the reasons for the others."""
    found, skipped = [], []
    for experiment in chosen:
        own = experiment.targets.get(values.dataset, ())
        if not experiment.targets or set(own if targets is None else targets) & set(own):
            found.append(experiment)
            continue
        of_targets = "" if targets is None else f" and --targets={','.join(values.targets)}"
        listed = "; ".join(
            f"{dataset}, at epsilon {', '.join(f'{epsilon:g}' for epsilon in epsilons)}"
            for dataset, epsilons in experiment.targets.items()
        )
        reason = (
            f"{experiment.name} cannot be trained with --dataset={values.dataset}{of_targets}: "
            f"it has {listed}."
        )
        # An experiment that --only names and that cannot be trained is an error; others are
        # skipped.
        command_line.check_choice(experiment.name not in values.only, reason)
        skipped.append(reason)
    command_line.check_choice(bool(found), "no experiment of --only can be trained so.")
    if targets is not None:
        known = {
            target for each in found if each.targets for target in each.targets[values.dataset]
        }
        unknown = [f"{target:g}" for target in targets if known and target not in known]
        command_line.check_choice(
            not unknown,
            f"--targets has {', '.join(unknown)}, which no chosen experiment trains.",
        )
    return found, skipped


def _run(
    experiment: Experiment,
    values: flags.FlagValues,
    workspace: Workspace,
    directory: pathlib.Path,
) -> Result:
    start = time.monotonic()
    outcome = experiment.run(workspace)
    seconds = time.monotonic() - start
    command = f"reproduce-paper --only={experiment.name}"
    if experiment.targets:
        command += f" --dataset={values.dataset} --repetitions={values.repetitions}"
        if values.targets is not None:
            command += f" --targets={','.join(values.targets)}"
    result = Result(
        _name(experiment, values.dataset),
        experiment.source,
        experiment.title,
        tuple(dataclasses.replace(row, experiment=experiment.name) for row in outcome.rows),
        outcome.notes,
        outcome.drawing,
        seconds,
        command,
        results.versions(),
        os.cpu_count() or 1,
    )
    results.save(result, directory)
    return result


def _name(experiment: Experiment, dataset: str) -> str:
    """Returns the name of an experiment's files, with the data set unless that is usual.

    So a run at the papers' size does not replace a scaled-down one.
    """
    is_usual = not experiment.targets or dataset in (
        configurations.DOCSTRINGS,
        fashion_mnist.DATASET,
        shakespeare.DATASET,
    )
    return experiment.name if is_usual else f"{experiment.name}-{dataset}"


def _names() -> Iterator[tuple[Experiment, str]]:
    """Yields each experiment with the names that its results may have."""
    for experiment in experiments().values():
        for dataset in experiment.targets or ("",):
            yield experiment, _name(experiment, dataset)


def _write_report(directory: pathlib.Path) -> None:
    """Writes a report of all results in a directory; damaged results count as missing."""
    found, missing = [], dict.fromkeys(experiments())
    for experiment, name in _names():
        try:
            loaded = results.load(name, directory)
        except results.DamagedResultError as error:
            _say(f"{error} The report leaves it out: compute it again.")
            continue
        if loaded is not None:
            found.append(loaded)
            missing.pop(experiment.name, None)
    results.write_report(found, [*missing], directory)


def _print_list(values: flags.FlagValues) -> None:
    every = experiments().values()
    fields = {
        "experiments": [
            {"name": each.name, "source": each.source, "title": each.title} for each in every
        ]
    }
    text = command_line.table([(each.name, f"{each.source}: {each.title}") for each in every])
    if not values.list:
        text += (
            f"\n\n--only=NAME,... computes experiments: --only={NUMBERS} those that need "
            f"no training, within the hour, and --only={TRAINING} those that train, for "
            "many hours."
        )
    command_line.print_result(values, fields, text)


def _as_text(found: list[Result], directory: pathlib.Path) -> str:
    lines = []
    for result in found:
        lines.append(f"{result.name}: {results.verdict(result.rows)} ({result.seconds:.0f} s)")
        lines += [
            f"  {row.row}, {row.quantity}: paper {row.printed or '-'}, ours {row.ours:.6g}, "
            f"{row.verdict}" + (f" ({row.explanation})" if row.explanation else "")
            for row in result.rows
        ]
    lines.append(f"Report: {directory / results.MARKDOWN_FILE}")
    return "\n".join(lines)


def _say(text: str) -> None:
    print(f"reproduce-paper: {text}", file=sys.stderr, flush=True)


def run() -> None:
    """Runs the command; the console script's entry point."""
    sys.exit(command_line.run(__doc__ or "", define_flags, main))


if __name__ == "__main__":
    run()
