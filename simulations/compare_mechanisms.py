r"""compare-mechanisms: trains with several mechanisms, each several times, and tabulates accuracy.

Each run is a process of its own and draws its own secret noise, cohorts and initial weights, so
that the intervals cover everything that is random. Started again with the same --output_dir,
the command goes on where it was.

Examples:
  compare-mechanisms --output_dir=comparison
  compare-mechanisms --output_dir=comparison --mechanisms=banded,identity --repetitions=5 \
    --flags="--num_rounds=100 --target_epsilon=4"
"""

import contextlib
import csv
import dataclasses
import fcntl
import itertools
import json
import math
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import scipy.stats
import tqdm
from absl import flags

from mf_aggregators import validation
from mf_aggregators.commands import command_line
from mf_aggregators.commands.command_line import CommandError, check_choice
from simulations import atomic_files, quiet, run_directory, run_figures

MARKDOWN_FILE = "comparison.md"
FIGURE_FILE = "comparison.png"

CONFIDENCE = 0.95

# Commands by module, which are started and never imported: they import this package.
_MODULES: Mapping[str, str] = types.MappingProxyType(
    {
        "run-stackoverflow": "stackoverflow_nwp.run_stackoverflow",
        "run-digits": "digit_classification.run_digits",
    }
)
_NOT_PRIVATE = "none"
_MECHANISMS = (
    _NOT_PRIVATE,
    "identity",
    "tree",
    "banded",
    "toeplitz",
    "blt",
    "banded_inverse",
    "optimal",
)
# Why runs of a comparison cannot be handed a flag.
_NOT_HANDED_ON: Mapping[str, str] = types.MappingProxyType(
    {
        "output_dir": "each run has a directory of its own in --output_dir",
        "mechanism": "--mechanisms names them",
        "checkpoint": "--mechanisms names what is compared",
        "format": "the results of runs are read as JSON",
        "noise_directory": "runs that share one would share their noise",
        "seed": "repetitions with a fixed seed are the same run, without a guarantee",
        "flagfile": "name its flags themselves",
    }
)
# A run without noise refuses these.
_OF_PRIVATE_RUNS = ("target_epsilon", "noise_multiplier")
_EPSILON_TOLERANCE = 1e-3
_METRIC = "heldout_accuracy"
_POLL_SECONDS = 0.1
_SECONDS_TO_END = 20.0
_FLAG = re.compile(r"--([A-Za-z]\w*)(?:=.*)?", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class FinishedRun:
    """What a comparison needs to know of a finished run.

    Attributes:
      test_accuracy: A fraction.
      rounds: The rounds that it trained.
      epsilon: Of the guarantee that it was planned for, or, if it broke its plan, of the
        one that it earned; None if it is not private. (One that kept its plan may earn more,
        which depends on who happened to be drawn, and has nothing to do with its noise.)
      delta: Likewise.
      seconds: Wall time; None if the run was cut off and resumed, so that nobody knows.
    """

    test_accuracy: float
    rounds: int
    epsilon: float | None
    delta: float | None
    seconds: float | None


@dataclasses.dataclass(frozen=True)
class Row:
    """The repetitions of one mechanism.

    Attributes:
      mechanism: The mechanism.
      repetitions: How many runs there are.
      test_accuracy_mean: The mean of their test accuracies, fractions.
      test_accuracy_half_width: Of the 95 % interval of Student's t around the mean, for
        accuracies that are normally distributed over runs; None of a single run.
      test_accuracy_min: The smallest.
      test_accuracy_max: The largest.
      epsilon: The largest of a run; None if one of them is not private.
      delta: Likewise.
      seconds_mean: The mean wall time of the runs that were never resumed; None if there
        is none.
    """

    mechanism: str
    repetitions: int
    test_accuracy_mean: float
    test_accuracy_half_width: float | None
    test_accuracy_min: float
    test_accuracy_max: float
    epsilon: float | None
    delta: float | None
    seconds_mean: float | None


def summarise(runs: Mapping[str, Sequence[FinishedRun]]) -> tuple[Row, ...]:
    """Summarises repeated runs.

    Args:
      runs: By mechanism its runs, at least one.

    Returns:
      A row for each mechanism: those that are not private first, for what privacy is compared
      with, and then the highest mean test accuracy first.

    Raises:
      ValueError: If a mechanism has no run.
    """
    rows = [_row(mechanism, finished) for mechanism, finished in runs.items()]
    return tuple(sorted(rows, key=lambda row: (row.epsilon is not None, -row.test_accuracy_mean)))


def _row(mechanism: str, runs: Sequence[FinishedRun]) -> Row:
    if not runs:
        raise ValueError(f"there must be at least one run of {mechanism}.")
    accuracies = np.array([run.test_accuracy for run in runs], dtype=np.float64)
    half_width = None
    if len(runs) > 1:
        quantile = scipy.stats.t.ppf(0.5 + CONFIDENCE / 2.0, len(runs) - 1)
        half_width = float(quantile * np.std(accuracies, ddof=1) / math.sqrt(len(runs)))
    seconds = [run.seconds for run in runs if run.seconds is not None]
    return Row(
        mechanism=mechanism,
        repetitions=len(runs),
        test_accuracy_mean=float(np.mean(accuracies)),
        test_accuracy_half_width=half_width,
        test_accuracy_min=float(np.min(accuracies)),
        test_accuracy_max=float(np.max(accuracies)),
        epsilon=_largest([run.epsilon for run in runs]),
        delta=_largest([run.delta for run in runs]),
        seconds_mean=float(np.mean(seconds)) if seconds else None,
    )


def _largest(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return max(known) if len(known) == len(values) else None


def separated(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Returns the pairs of rows whose intervals do not overlap.

    Args:
      rows: The rows, in any order.

    Returns:
      Pairs of mechanisms, the higher first, in the order of their means. Single runs have no
      interval, and are in none.
    """
    intervals = [
        (row.test_accuracy_mean, row.test_accuracy_half_width, row.mechanism)
        for row in sorted(rows, key=lambda row: -row.test_accuracy_mean)
    ]
    return [
        (higher, lower)
        for (mean, width, higher), (lower_mean, lower_width, lower) in itertools.combinations(
            intervals, 2
        )
        if width is not None and lower_width is not None and mean - width > lower_mean + lower_width
    ]


def unfairness(runs: Mapping[str, Sequence[FinishedRun]]) -> str | None:
    """Returns why accuracies of these runs say nothing of their mechanisms.

    Args:
      runs: By mechanism its runs.

    Returns:
      One sentence if the private runs have epsilons that differ by more than 0.1 %, or
      other deltas, or some run has another number of rounds; else None.
    """
    every = [run for of_mechanism in runs.values() for run in of_mechanism]
    epsilons = [run.epsilon for run in every if run.epsilon is not None]
    if epsilons and max(epsilons) > (1.0 + _EPSILON_TOLERANCE) * min(epsilons):
        return (
            f"the private runs have epsilons from {min(epsilons):.5g} to {max(epsilons):.5g}, "
            "and less noise is more accurate under any mechanism."
        )
    deltas = sorted({run.delta for run in every if run.delta is not None})
    if len(deltas) > 1:
        return f"the private runs have deltas from {deltas[0]:g} to {deltas[-1]:g}."
    rounds = sorted({run.rounds for run in every})
    if len(rounds) > 1:
        return f"the runs have from {rounds[0]} to {rounds[-1]} rounds."
    return None


def parse_flags(text: str) -> dict[str, str]:
    """Parses the flags that are handed to every run.

    Args:
      text: Flags as a shell would split them, each ``--name=value``, ``--name`` or
        ``--noname``.

    Returns:
      The flags as they are handed on, by name, in the order of names.

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
    """Defines the flags of compare-mechanisms."""
    flags.DEFINE_string(
        "output_dir",
        None,
        "Where runs, their logs and results, and the comparison go; required.",
        flag_values=values,
    )
    flags.DEFINE_list(
        "mechanisms",
        ["none", "blt", "banded", "tree", "identity"],
        f"What is compared, with commas: any of {', '.join(_MECHANISMS)}.",
        flag_values=values,
    )
    flags.DEFINE_integer("repetitions", 3, "Runs with each mechanism.", flag_values=values)
    flags.DEFINE_enum(
        "command",
        "run-stackoverflow",
        list(_MODULES),
        "What trains.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "flags",
        "",
        "Flags of that command for every run, in quotes: --flags='--num_rounds=100 "
        f"--clip_norm=1'. --mechanism={_NOT_PRIVATE} is not handed "
        f"{' and '.join(f'--{name}' for name in _OF_PRIVATE_RUNS)}, which it would refuse.",
        flag_values=values,
    )


@dataclasses.dataclass(frozen=True)
class _Run:
    """One run of a comparison and its files."""

    root: pathlib.Path
    command: str
    mechanism: str
    repetition: int
    flags: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.mechanism}_{self.repetition}"

    @property
    def directory(self) -> pathlib.Path:
        return self.root / self.name

    @property
    def log(self) -> pathlib.Path:
        return self.root / f"{self.name}.log"

    @property
    def result(self) -> pathlib.Path:
        return self.root / f"{self.name}.json"

    @property
    def identity(self) -> dict[str, Any]:
        """What must be the same for a result to stand for this run."""
        return {"command": self.command, "mechanism": self.mechanism, "flags": list(self.flags)}

    def arguments(self, directory: pathlib.Path) -> list[str]:
        """The command line of a process that trains into a directory."""
        return [
            sys.executable,
            "-m",
            _MODULES[self.command],
            f"--output_dir={directory}",
            f"--mechanism={self.mechanism}",
            "--format=json",
            *self.flags,
        ]


def main(values: flags.FlagValues) -> int | None:
    """Runs what is left to be run and compares; returns the exit status."""
    start = time.monotonic()
    runs = _planned(values)
    root = runs[0].root
    check_choice(
        root.is_dir() or not root.exists(),
        f"{root} is no directory: choose another --output_dir.",
    )
    root.mkdir(parents=True, exist_ok=True)
    with (
        _locked(root) as lock,
        quiet.stop_requests(
            "stopping the run after its round; Ctrl-C again stops it at once"
        ) as stop,
    ):
        finished = {run: _read_result(run) for run in runs if run.result.exists()}
        begun = {run.mechanism for run in runs if run in finished or run.directory.exists()}
        for run in {run.mechanism: run for run in runs if run.mechanism not in begun}.values():
            if not _check(run, stop):
                return _interrupted(finished, runs)
        with tqdm.tqdm(
            total=len(runs), initial=len(finished), unit="run", file=sys.stderr
        ) as progress:
            for run in runs:
                if run in finished:
                    continue
                progress.set_description(run.name)
                found = None if stop.is_set else _train(run, lock, stop)
                if found is not None:
                    finished[run] = found
                    progress.update()
                if found is None or stop.is_set:
                    return _interrupted(finished, runs)
        _report(values, runs, finished, start)
    return None


def run() -> None:
    """Entry point of the console command."""
    sys.exit(command_line.run(__doc__ or "", define_flags, main))


def _planned(values: flags.FlagValues) -> list[_Run]:
    """Returns all runs, repetition by repetition, so that a stop leaves as many of each."""
    check_choice(bool(values.output_dir), "--output_dir is required: the comparison's directory.")
    validation.positive_integer(values.repetitions, "--repetitions")
    mechanisms = [mechanism.strip() for mechanism in values.mechanisms]
    check_choice(bool(mechanisms), "--mechanisms must name at least one mechanism.")
    for mechanism in mechanisms:
        check_choice(
            mechanism in _MECHANISMS,
            f"--mechanisms takes names out of {', '.join(_MECHANISMS)}, found {mechanism!r}.",
        )
        check_choice(
            mechanisms.count(mechanism) == 1,
            f"--mechanisms has {mechanism} twice: --repetitions says how often each one runs.",
        )
    given = parse_flags(values.flags)
    without_noise = {name: word for name, word in given.items() if name not in _OF_PRIVATE_RUNS}
    return [
        _Run(
            root=pathlib.Path(values.output_dir),
            command=values.command,
            mechanism=mechanism,
            repetition=repetition,
            flags=tuple((without_noise if mechanism == _NOT_PRIVATE else given).values()),
        )
        for repetition in range(1, values.repetitions + 1)
        for mechanism in mechanisms
    ]


@contextlib.contextmanager
def _locked(root: pathlib.Path) -> Iterator[int]:
    """Keeps other comparisons out of a directory; yields the descriptor that does.

    Runs inherit it: one that outlives a killed comparison keeps the directory until it ends.
    """
    with (root / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CommandError(
                f"another comparison, or a run that one has left behind, is at work in {root}: "
                "wait until it has ended, or end it."
            ) from error
        yield file.fileno()


def _read_result(run: _Run) -> FinishedRun:
    """Reads the result of a run that finished before."""
    try:
        contents = json.loads(run.result.read_text(encoding="utf-8"))
        identity = {name: contents[name] for name in run.identity}
        was = shlex.join([identity["command"], *identity["flags"]])
        finished = _finished(contents["result"], contents["seconds"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CommandError(
            f"{run.result} cannot be read ({error!r}): delete it, and the run gives it again."
        ) from error
    if identity != run.identity:
        raise CommandError(
            f"{run.result} is the result of a run with other flags ({was}): repeat them, or choose "
            "another --output_dir."
        )
    return finished


def _finished(result: Mapping[str, Any], seconds: float | None) -> FinishedRun:
    accuracy = float(result["test_accuracy"])
    if not math.isfinite(accuracy):
        raise ValueError(f"its test_accuracy is {accuracy}")
    privacy = result["privacy"]
    kind = "earned" if privacy["keeps_plan"] is False else "planned"
    epsilon, delta = (privacy[kind][name] for name in ("epsilon", "delta"))
    is_private = privacy["is_private"] and epsilon is not None and math.isfinite(epsilon)
    return FinishedRun(
        test_accuracy=accuracy,
        rounds=int(result["rounds"]),
        epsilon=float(epsilon) if is_private else None,
        delta=float(delta) if is_private else None,
        seconds=None if seconds is None else float(seconds),
    )


def _check(run: _Run, stop: quiet.StopRequest) -> bool:
    """Lets a command check its flags, and ends it once it has begun to run.

    A mistake in the flags of the last mechanism is found before the first one has trained
    for hours.

    Returns:
      False if a stop was requested.

    Raises:
      CommandError: If the command refuses its flags.
    """
    print(f"compare-mechanisms: checking the flags of {run.mechanism}", file=sys.stderr)
    scratch = pathlib.Path(tempfile.mkdtemp(prefix=".flags-", dir=run.root))
    try:
        # By a pipe: should this process be killed, the other one cannot go on unseen.
        with _process(run.arguments(scratch / "run"), subprocess.PIPE, subprocess.PIPE) as child:
            # The configuration is written when all flags were found good.
            while not (scratch / "run" / run_directory.CONFIG_FILE).exists():
                if stop.is_set:
                    return False
                try:
                    _, errors = child.communicate(timeout=_POLL_SECONDS)
                except subprocess.TimeoutExpired:
                    continue
                if child.returncode:
                    message = _last_line(errors.decode("utf-8", "replace"))
                    raise CommandError(f"--mechanism={run.mechanism} is refused: {message}")
                return True
        return True
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _train(run: _Run, lock: int, stop: quiet.StopRequest) -> FinishedRun | None:
    """Runs or resumes a run and keeps its result; returns None if it was interrupted."""
    atomic_files.remove_unfinished(run.result)
    is_new = not run.directory.exists()
    start = time.monotonic()
    with run.log.open("ab") as log, tempfile.TemporaryFile() as output:
        log_start = log.tell()
        with _process(run.arguments(run.directory), output, log, lock) as child:
            status = _wait(child, stop)
        output.seek(0)
        printed = output.read().decode("utf-8", "replace")
    if status == command_line.DONE:
        seconds = time.monotonic() - start if is_new else None
        try:
            result = json.loads(printed)
            finished = _finished(result, seconds)
        except (ValueError, TypeError, KeyError) as error:
            raise CommandError(
                f"{run.name} printed no result that can be compared ({error!r}); its log is "
                f"{run.log}."
            ) from error
        contents = {**run.identity, "seconds": seconds, "result": result}
        atomic_files.write_text(run.result, json.dumps(contents, indent=2) + "\n")
        return finished
    if stop.is_set or status == command_line.INTERRUPTED:
        return None
    with run.log.open("rb") as log:
        log.seek(log_start)
        message = _last_line(log.read().decode("utf-8", "replace"))
    raise CommandError(
        f"{run.name} ended with status {status}; the last line of its log {run.log}: {message}"
    )


@contextlib.contextmanager
def _process(
    arguments: Sequence[str], output: Any, errors: Any, lock: int | None = None
) -> Iterator["subprocess.Popen[bytes]"]:
    """Starts a process; none is left behind, and no worker of it."""
    child = subprocess.Popen(
        arguments,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=errors,
        pass_fds=() if lock is None else (lock,),
        # A terminal's Ctrl-C reaches this process alone, which passes it on once.
        start_new_session=True,
    )
    try:
        with child:
            try:
                yield child
            finally:
                if child.poll() is None:
                    os.killpg(child.pid, signal.SIGKILL)
    finally:
        # Its workers, should it have had no time to end them.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)


def _wait(child: "subprocess.Popen[bytes]", stop: quiet.StopRequest) -> int:
    """Waits for a run, and passes a request to stop on to it."""
    passed_on = False
    try:
        while True:
            if stop.is_set and not passed_on:
                passed_on = True
                child.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                return child.wait(_POLL_SECONDS)
    except KeyboardInterrupt:
        child.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_SECONDS_TO_END)
        raise


def _last_line(text: str) -> str:
    # Progress bars end their lines by returning to the first column.
    lines = [line.strip() for line in re.split(r"[\r\n]", text)]
    return next((line for line in reversed(lines) if line), "(nothing)")


def _interrupted(finished: Mapping[_Run, FinishedRun], runs: Sequence[_Run]) -> int:
    print(
        f"compare-mechanisms: interrupted; {len(finished)} of {len(runs)} runs are finished, and "
        "the same command goes on with the others.",
        file=sys.stderr,
    )
    return command_line.INTERRUPTED


def _report(
    values: flags.FlagValues,
    runs: Sequence[_Run],
    finished: Mapping[_Run, FinishedRun],
    start: float,
) -> None:
    root = runs[0].root
    by_mechanism: dict[str, list[_Run]] = {}
    for each in runs:
        by_mechanism.setdefault(each.mechanism, []).append(each)
    results = {
        mechanism: [finished[each] for each in of_mechanism]
        for mechanism, of_mechanism in by_mechanism.items()
    }
    rows = summarise(results)
    why = unfairness(results)
    pairs = [] if why is not None else separated(rows)
    notes = [_separation_line(rows, pairs, why)]
    if any(run.seconds is None for run in finished.values()):
        notes.append("Runs that were cut off and resumed do not count towards the minutes.")
    title = f"{values.command}, {max(run.rounds for run in finished.values())} rounds"
    left_out = _draw(by_mechanism, [row.mechanism for row in rows], root / FIGURE_FILE, title)
    if left_out:
        notes.append(
            f"Not in the figure, without any {_METRIC} that all runs have: {', '.join(left_out)}."
        )
    text = f"{_markdown(rows)}\n\n" + "\n".join(notes)
    atomic_files.write_text(root / MARKDOWN_FILE, text + "\n")
    fields = {
        "output_dir": str(root),
        "rows": [dataclasses.asdict(row) for row in rows],
        "separated": [list(pair) for pair in pairs],
        "is_fair": why is None,
        "notes": notes,
        "seconds": time.monotonic() - start,
    }
    command_line.print_result(values, fields, text)


def _separation_line(rows: Sequence[Row], pairs: Sequence[tuple[str, str]], why: str | None) -> str:
    if why is not None:
        return f"This comparison is not fair, and claims no order: {why}"
    if len(rows) == 1:
        return "A single mechanism is compared with nothing."
    if any(row.test_accuracy_half_width is None for row in rows):
        return "Single runs have no interval, and no order is claimed."
    if not pairs:
        return "Intervals of all mechanisms overlap, and no order is claimed."
    listed = ", ".join(f"{higher} above {lower}" for higher, lower in pairs)
    return f"With non-overlapping intervals: {listed}."


def _markdown(rows: Sequence[Row]) -> str:
    """Returns a Markdown table whose columns are aligned, for people to read as it is."""

    def percent(fraction: float | None) -> str:
        return "-" if fraction is None else f"{100 * fraction:.2f} %"

    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    header = ["mechanism", "test accuracy", "95 % interval", "min", "max", "epsilon", "delta"]
    cells = [
        [*header, "runs", "minutes"],
        *(
            [
                row.mechanism,
                percent(row.test_accuracy_mean),
                "-"
                if row.test_accuracy_half_width is None
                else f"± {percent(row.test_accuracy_half_width)}",
                percent(row.test_accuracy_min),
                percent(row.test_accuracy_max),
                number(row.epsilon, ".3f"),
                number(row.delta, "g"),
                str(row.repetitions),
                number(None if row.seconds_mean is None else row.seconds_mean / 60.0, ".1f"),
            ]
            for row in rows
        ),
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    # The first column is of names; the others are of numbers.
    cells.insert(1, ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
    return "\n".join(
        "| "
        + " | ".join(
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        + " |"
        for line in cells
    )


def _draw(
    by_mechanism: Mapping[str, Sequence[_Run]],
    order: Sequence[str],
    path: pathlib.Path,
    title: str,
) -> list[str]:
    """Draws held-out accuracy by round; returns the mechanisms that have none."""
    series = {
        mechanism: [_metrics(run.directory) for run in by_mechanism[mechanism]]
        for mechanism in order
    }
    left_out = [
        mechanism
        for mechanism, metrics in series.items()
        if len(run_figures.mean_curve(metrics, _METRIC, CONFIDENCE).rounds) == 0
    ]
    drawn = {mechanism: series[mechanism] for mechanism in order if mechanism not in left_out}
    path.unlink(missing_ok=True)
    if drawn:
        run_figures.compare(drawn, path, title=title, name=_METRIC, confidence=CONFIDENCE)
    return left_out


def _metrics(directory: pathlib.Path) -> list[dict[str, str]]:
    path = directory / run_directory.METRICS_FILE
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


if __name__ == "__main__":
    run()
