"""Runs a training command with several variants of its flags, each several times, in processes.

Every run draws its own secret noise. Cohorts, data order and initial weights are the same for all
variants of a repetition. Finished runs keep their results, and a run that was cut off is resumed.
Runs go repetition by repetition, so that after a stop the numbers of finished runs of two variants
differ by one at most.
"""

import contextlib
import dataclasses
import fcntl
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
from collections.abc import Iterator, Mapping, Sequence
from typing import IO

from mf_aggregators import atomic_files, inputs
from mf_aggregators.commands import command_line
from mf_aggregators.commands.command_line import CommandError
from mf_aggregators.kernel import numbers
from mf_aggregators.progress_bars import ProgressBar
from mf_aggregators.tff import processes
from simulations.runs import run_config, run_directory

# The module of each command that trains. A module is started as a process, and never imported here:
# it imports this package itself.
MODULES: Mapping[str, str] = {
    "run-stackoverflow": "stackoverflow_nwp.run_stackoverflow",
    "run-cifar10": "simulations.examples.cifar10",
    "run-digits": "simulations.examples.digits",
    "run-fashion-mnist": "simulations.examples.fashion_mnist",
}

# Matches flags that do not change a run's result: a finished run counts with any values of them.
_CHANGES_NOTHING = re.compile(rf"--({'|'.join(run_config.NOT_OF_THE_RUN)})(=|$)")
_POLL_SECONDS = 0.1
# Matches --audit_canaries. An audited run is handed no --cohort_seed: it draws canaries and cohorts
# at random.
_AUDITED = re.compile(r"--audit_canaries(=|$)")
# The seconds in which a run must end after a second request to stop, before it is killed.
_SECONDS_TO_END = 20.0


@dataclasses.dataclass(frozen=True)
class FinishedRun:
    """Result of a finished training run: the figures that comparisons use.

    Attributes:
      test_accuracy: A fraction.
      rounds: The number of trained rounds.
      epsilon: The epsilon of the planned guarantee or, if the run broke its plan, of the guarantee
        that may be stated; None if the run is not private.
      delta: The delta of the same guarantee; None if the run is not private.
      seconds: Wall time; None if the run was cut off and resumed, so that nobody knows.
      directory: The directory of the run.
      initial_model: The SHA-256 of the weights that training began with; None if an older result
        does not say it.
      is_observed: Whether the guarantee holds only if participation did not depend on released
        models or on data.
    """

    test_accuracy: float
    rounds: int
    epsilon: float | None
    delta: float | None
    seconds: float | None
    directory: pathlib.Path = pathlib.Path()
    initial_model: str | None = None
    is_observed: bool = False


@dataclasses.dataclass(frozen=True)
class Variant:
    """A variant of a training command: flags with which the command is run several times.

    Attributes:
      name: The name in its directories, files and rows.
      mechanism: The mechanism, as ``--mechanism`` names it.
      flags: The other flags of the command.
    """

    name: str
    mechanism: str
    flags: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class RepeatedRun:
    """One run of a variant and its files.

    Attributes:
      root: The directory that has the runs of all variants.
      command: A key of ``MODULES``.
      variant: The variant of flags that the run trains with.
      repetition: 1, 2, ...
    """

    root: pathlib.Path
    command: str
    variant: Variant
    repetition: int

    @property
    def name(self) -> str:
        """The name of the run's directory, log and result file: the variant and the repetition."""
        return f"{self.variant.name}_{self.repetition}"

    @property
    def directory(self) -> pathlib.Path:
        """The run's own directory."""
        return self.root / self.name

    @property
    def log(self) -> pathlib.Path:
        """The path of the run's log, which has its standard error."""
        return self.root / f"{self.name}.log"

    @property
    def result(self) -> pathlib.Path:
        """The path of the JSON file with the run's result; it exists once the run is finished."""
        return self.root / f"{self.name}.json"

    @property
    def identity(self) -> dict[str, object]:
        """The entries that a stored result must have to count as the result of this run."""
        return {
            "command": self.command,
            "mechanism": self.variant.mechanism,
            "flags": [flag for flag in self.variant.flags if not _CHANGES_NOTHING.match(flag)],
        }

    def arguments(self, directory: pathlib.Path) -> list[str]:
        """Returns the command line that trains this run and writes into a directory."""
        is_audited = any(_AUDITED.match(flag) for flag in self.variant.flags)
        return [
            sys.executable,
            "-m",
            MODULES[self.command],
            f"--output_dir={directory}",
            f"--mechanism={self.variant.mechanism}",
            "--format=json",
            *([] if is_audited else [f"--cohort_seed={self.repetition}"]),
            *self.variant.flags,
        ]


def planned(
    root: pathlib.Path, command: str, variants: Sequence[Variant], repetitions: int
) -> list[RepeatedRun]:
    """Returns all runs of a comparison, in the order in which they are trained.

    Args:
      root: The directory that runs go to.
      command: A key of ``MODULES``.
      variants: The variants, of different names.
      repetitions: How often each is run.

    Raises:
      ValueError: If there is not one repetition at least.
    """
    numbers.positive_integer(repetitions, "--repetitions")
    return [
        RepeatedRun(root, command, variant, repetition)
        for repetition in range(1, repetitions + 1)
        for variant in variants
    ]


def run_all(program: str, runs: Sequence[RepeatedRun]) -> dict[RepeatedRun, FinishedRun] | None:
    """Trains the runs that are not finished, one after the other.

    Args:
      program: The command's name, for messages.
      runs: At least one run, in the order of :func:`planned`.

    Returns:
      All results; None if it was interrupted, after a message.

    Raises:
      CommandError: If the command refuses the flags of a variant, a run fails, a result is
        damaged or of other flags, runs are of different versions of packages or different
        data, or another process is at work in the directory.
      KeyboardInterrupt: At a second request to stop. The run under way then has some seconds.
      OSError: If the directory cannot be written.
    """
    command_line.check_extra("a training run")
    root = runs[0].root
    command_line.check_directory(root, "output_dir")
    root.mkdir(parents=True, exist_ok=True)
    message = "stopping the run after its round; Ctrl-C again stops at once"
    with _locked(root) as lock, processes.stop_requests(message) as stop:
        finished = {run: _read_result(run) for run in runs if run.result.exists()}
        directories = [run.directory for run in runs]
        run_directory.check_alike(directories, with_further_runs=len(finished) < len(runs))
        begun = {run.variant for run in runs if run in finished or run.directory.exists()}
        for run in {run.variant: run for run in runs if run.variant not in begun}.values():
            if not stop.is_set:
                print(f"{program}: checking the flags of {run.variant.name}", file=sys.stderr)
                _check_flags(run, stop)
        left = [run for run in runs if run not in finished]
        with ProgressBar(
            total=len(runs), initial=len(finished), unit="run", file=sys.stderr
        ) as progress:
            for run in left:
                progress.set_description(run.name)
                result = None if stop.is_set else _run(run, lock, stop)
                if result is None:
                    break
                finished[run] = result
                progress.update()
                # Compare after each run, not only after all: packages or data may have changed in
                # between.
                run_directory.check_alike(directories)
    if len(finished) == len(runs):
        return finished
    print(
        f"{program}: interrupted; {len(finished)} of {len(runs)} runs are finished, and the same "
        "command continues with the others.",
        file=sys.stderr,
    )
    return None


def _run(run: RepeatedRun, lock: int, stop: processes.StopRequest) -> FinishedRun | None:
    """Trains one run in a process, waits for its end and saves its result.

    Args:
      run: The run to start or to resume.
      lock: A descriptor that the process inherits, so that its lock lasts as long as it does.
      stop: A request to stop, which is passed on.

    Returns:
      The result; None if the run was stopped, or failed while it was.

    Raises:
      CommandError: If the run failed or printed no result.
    """
    start = time.monotonic()
    # A resumed run reports no wall time: the time that it took before it was cut off is not known.
    is_resumed = run.directory.exists()
    atomic_files.remove_unfinished(run.result)
    with tempfile.TemporaryFile() as output, run.log.open("ab") as errors:
        log_start = errors.tell()
        with _process(run.arguments(run.directory), output, errors, (lock,)) as child:
            is_asked = False
            try:
                while child.poll() is None:
                    if stop.is_set and not is_asked:
                        is_asked = True
                        child.send_signal(signal.SIGTERM)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        child.wait(_POLL_SECONDS)
            except KeyboardInterrupt:
                child.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(_SECONDS_TO_END)
                raise
        output.seek(0)
        printed = output.read().decode("utf-8", "replace")
    seconds = None if is_resumed else time.monotonic() - start
    if child.returncode == command_line.INTERRUPTED:
        return None
    if child.returncode != command_line.DONE:
        if stop.is_set:
            return None
        with run.log.open("rb") as log:
            log.seek(log_start)
            said = _last_line(log.read())
        raise CommandError(
            f"{run.name} ended with status {child.returncode}; the last line of its log "
            f"{run.log}: {said}"
        )
    try:
        result = inputs.part(inputs.parsed_json(printed), dict)
        found = _finished(result, seconds, run.directory)
    except (ValueError, TypeError, KeyError) as error:
        raise CommandError(
            f"{run.name} printed no valid result ({error!r}); its log is {run.log}."
        ) from error
    contents = {**run.identity, "seconds": seconds, "result": result}
    atomic_files.write(run.result, json.dumps(contents, indent=2) + "\n")
    return found


@contextlib.contextmanager
def _locked(root: pathlib.Path) -> Iterator[int]:
    """Locks a directory against other comparisons; yields the file descriptor that holds the lock.

    Runs inherit the descriptor: a run that outlives a killed comparison keeps the lock until it
    ends.
    """
    with (root / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CommandError(
                f"another comparison, or a run that it started, is running in {root}: wait until "
                "it has ended, or end it."
            ) from error
        yield file.fileno()


def _read_result(run: RepeatedRun) -> FinishedRun:
    """Reads the stored result of a run that finished before."""
    try:
        contents = inputs.part(inputs.parsed_json(run.result.read_text(encoding="utf-8")), dict)
        identity = {name: contents[name] for name in run.identity}
        was = shlex.join([identity["command"], *identity["flags"]])
        finished = _finished(contents["result"], contents["seconds"], run.directory)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CommandError(
            f"{run.result} cannot be read ({error!r}): delete it, and the run is repeated."
        ) from error
    if identity != run.identity:
        raise CommandError(
            f"{run.result} is the result of a run with other flags ({was}): use those flags, or "
            "choose another --output_dir."
        )
    return finished


def _finished(result: dict, seconds: float | None, directory: pathlib.Path) -> FinishedRun:
    """Returns a FinishedRun made of the JSON result that the training command printed."""
    accuracy = float(result["test_accuracy"])
    if not math.isfinite(accuracy):
        raise ValueError(f"its test_accuracy is {accuracy}")
    privacy = result["privacy"]
    name = "planned" if privacy["keeps_plan"] is True else privacy["headline"]["guarantee"]
    stated = privacy[name]
    epsilon, delta = (stated[name] for name in ("epsilon", "delta"))
    is_private = privacy["is_private"] and epsilon is not None
    return FinishedRun(
        test_accuracy=accuracy,
        rounds=int(result["rounds"]),
        epsilon=float(epsilon) if is_private else None,
        delta=float(delta) if is_private else None,
        seconds=None if seconds is None else float(seconds),
        directory=directory,
        initial_model=result.get("initial_model"),
        is_observed=is_private and stated["only_if"] is not None,
    )


def _check_flags(run: RepeatedRun, stop: processes.StopRequest) -> None:
    """Starts a command to let it check its flags, and ends it when they are good, or at a stop.

    A mistake in the flags of the last mechanism is found before the first mechanism trains for
    hours.

    Raises:
      CommandError: If the command refuses its flags.
    """
    scratch = pathlib.Path(tempfile.mkdtemp(prefix=".flags-", dir=run.root))
    # The command writes config.json once it has found all its flags good.
    config = scratch / "run" / run_directory.CONFIG_FILE
    try:
        # With pipes as its output, the other process ends if this one is killed.
        with _process(run.arguments(scratch / "run"), subprocess.PIPE, subprocess.PIPE) as child:
            while child.returncode is None and not config.exists() and not stop.is_set:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    _, errors = child.communicate(timeout=_POLL_SECONDS)
            if child.returncode:
                variant = run.variant
                name = "" if variant.name == variant.mechanism else f" ({variant.name})"
                raise CommandError(
                    f"--mechanism={variant.mechanism}{name} is refused: {_last_line(errors)}"
                )
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextlib.contextmanager
def _process(
    arguments: Sequence[str],
    output: int | IO[bytes],
    errors: int | IO[bytes],
    inherited: Sequence[int] = (),
) -> Iterator["subprocess.Popen[bytes]"]:
    """Starts a training process; on exit, kills it and its TFF workers if they still run."""
    with subprocess.Popen(
        arguments,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=errors,
        pass_fds=inherited,
        # The child gets a session of its own: a terminal's Ctrl-C reaches only this process, which
        # passes it on once.
        start_new_session=True,
    ) as child:
        try:
            yield child
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)


def _last_line(printed: bytes) -> str:
    # Lines are split at carriage returns too, because progress bars end their lines with one.
    lines = [line.strip() for line in re.split(r"[\r\n]", printed.decode("utf-8", "replace"))]
    return next((line for line in reversed(lines) if line), "(nothing)")
