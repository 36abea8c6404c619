"""Reports of a run: its privacy statement, the epsilon spent by each round, metrics and a figure.

The noise is scaled to the sensitivity of C for all n rounds. What the first t rounds have released
depends on the leading t rows of C alone, whose sensitivity is smaller: the same noise is a larger
multiple of it, and the guarantee of these t releases a better one. Its epsilon grows with every
round and reaches the planned epsilon in the last round; :class:`PrivacyBudget` computes it, for
curves of a run. A run that stops early keeps its planned guarantee, unless neither the data nor
what was released had a part in the decision to stop.

The figure is drawn from the rows of ``metrics.csv``. matplotlib's figure objects are used and not
pyplot: no state stays, and no window is opened.
"""

import contextlib
import csv
import dataclasses
import datetime
import io
import logging
import math
import os
import pathlib
import re
import types
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import matplotlib.figure
import numpy as np

from mf_aggregators import Mechanism, atomic_files, figures
from mf_aggregators.audit.run_audit import RunAudit
from mf_aggregators.commands import stated_runs
from mf_aggregators.commands.command_line import CommandError
from mf_aggregators.commands.stated_runs import Others
from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.claim import check
from mf_aggregators.kernel.ledger import ObservedParticipation
from mf_aggregators.kernel.numbers import Error, rounded_up
from mf_aggregators.observed import Observed
from mf_aggregators.privacy import ledgers
from mf_aggregators.privacy.statements import Statement
from simulations.runs import run_directory
from simulations.runs.run_directory import ParticipationLedger, RunDirectory
from simulations.runs.run_plan import Run

_LOGGER = logging.getLogger(__name__)

# The number of points of a curve of epsilon, about: with more, it would look the same.
_POINTS = 100

# A row of metrics.csv: text, as csv.DictReader gives it, or numbers.
Row: TypeAlias = Mapping[str, str | float]

_PANELS_OF_A_ROW = 2
_INCHES_OF_A_PANEL = (5.2, 2.6)
_SMOOTHED = ("train_accuracy", "train_loss", "clipped_fraction")
# The figure's panels by label: each has columns of metrics.csv and their names in the legend. {}
# stands for how a metric was released.
_PANELS: Mapping[str, Mapping[str, str]] = {
    "accuracy, %": {"train_accuracy": "training{}", "heldout_accuracy": "held out"},
    "loss": {"train_loss": "training{}", "heldout_loss": "held out"},
    "L2 norm of updates": {
        "update_norm": "mean",
        "max_update_norm": "largest",
        "clip_norm": "clip norm (a private release)",
    },
    "of the updates, %": {"clipped_fraction": "clipped{}", "zeroed_fraction": "zeroed"},
    "within the clip norm, %": {"unclipped_fraction": "a private release"},
    "L2 norm of a round": {"noise_norm": "noise in it", "released_norm": "released mean"},
    "clients": {
        "eligible_clients": "free by the timer",
        "available_clients": "available of these",
    },
    "epsilon": {"epsilon_spent": "spent"},
}
# In a figure, a metric released with noise is averaged over one part in this many of all rounds.
_WINDOWS_OF_A_RUN = 20


class RunStatements:
    """Writes the privacy statement of one run when it begins, breaks its plan, fails or ends.

    Whatever ends the process, ``privacy.json`` never claims a guarantee that the released rounds do
    not have: a resumed run begins with the statement of its earlier rounds, and a run that breaks
    its plan says so right after the round in which it did.
    """

    def __init__(self, run: Run) -> None:
        """Prepares the statements of a run; nothing is written yet."""
        self._run = run
        self._planned = planned(run)
        behaviour = run.behaviour
        self._can_break = behaviour.timer_hours is not None or behaviour.forgets
        self._broken: Statement | None = None
        self._has_begun = False

    def before(self, ledger: ParticipationLedger) -> None:
        """Writes the privacy statement before training starts, after the ledger was checked."""
        self._has_begun = True
        number = ledgers.num_alike_names(ledger.client_ids)
        facts = dataclasses.replace(self._planned.facts, num_alike_names=number)
        self._planned = dataclasses.replace(self._planned, facts=facts)
        if ledger.num_rounds:
            self.after(ledger)
        else:
            self._write(self._planned)

    def after_round(self, ledger: ParticipationLedger) -> Statement | None:
        """Returns the statement if the run broke its plan, else None; writes it if it changed."""
        if not self._can_break:
            return None
        found = self._run.mechanism.observed(ledger.record())
        if found.keeps_participation:
            return None
        before = None if self._broken is None else self._broken.observed_participation
        if before is None or before.schema != found.participation.schema:
            self._broken = self.after(ledger)
        return self._broken

    def after(self, ledger: ParticipationLedger, audit: RunAudit | None = None) -> Statement:
        """Writes and returns the privacy statement of a run that ended, from its ledger and audit.

        Without ``audit``, the audit is computed from the run's records, if there are any.
        """
        run, folder = self._run, self._run.directory.path
        is_there = (folder / run_directory.CONFIG_FILE).exists()
        config = (run.directory.read_config() if is_there else None) or _config(run)
        found = observed(run, ledger)
        return self._write(stated_runs.ended(self._with_last_day(), folder, config, found, audit))

    def after_failure(self) -> None:
        """After an error ended the run, writes its privacy statement from the ledger on disk.

        If the run was refused before it began, the statement on disk stays as it is. It also stays
        if a file cannot be read or written: the user should see the error that ended the run, not
        this one.
        """
        if not self._has_begun:
            return
        with contextlib.suppress(OSError, ValueError):
            ledger = ParticipationLedger.load(self._run.directory.ledger)
            if ledger.num_rounds:
                self.after(ledger)

    def _with_last_day(self) -> Statement:
        """Returns the planned statement with the day of the last round as the end of its period."""
        facts, file = self._planned.facts, self._run.directory.ledger
        if facts.period and file.exists():
            # The time of the ledger file is that of the last round, because every round writes it.
            last = datetime.datetime.fromtimestamp(file.stat().st_mtime, datetime.timezone.utc)
            period = f"{facts.period} to {last.date().isoformat()}"
            facts = dataclasses.replace(facts, period=period)
        return dataclasses.replace(self._planned, facts=facts)

    def _write(self, statement: Statement) -> Statement:
        """Adds the other runs and the run's files to a statement, writes it, and returns it."""
        run, directory = self._run, self._run.directory
        try:
            others = _others(run, statement.plan.delta)
            statement = stated_runs.with_evidence(statement, directory.path, run.mechanism, others)
        except CommandError as error:
            # The other runs could be read when this run began, but not now: state this run's
            # guarantee without them.
            _LOGGER.warning("the statement leaves other runs out: %s", error)
            statement = stated_runs.with_evidence(statement, directory.path, run.mechanism, None)
        files = (run_directory.STATEMENT_FILE, run_directory.PRIVACY_FILE)
        statement.write(*(directory.path / name for name in files))
        return statement


def planned(run: Run) -> Statement:
    """Returns the planned privacy statement of a run, before its rounds are known."""
    config, begun = run.config, run.directory.day_of_beginning()
    told = {name: config[name] or "" for name in ("responsible", "signer", "model", "custody")}
    return stated_runs.planned(
        _config(run),
        run.mechanism,
        population=run.data.num_clients,
        told={**told, "period": "" if begun is None else f"from {begun}"},
    )


def observed(run: Run, ledger: ParticipationLedger) -> Observed:
    """Returns the observed participation that follows from a run's ledger."""
    found = run.mechanism.observed(
        ledger.record(),
        # Cohort sizes are known, because the run recorded each round's cohort before its release.
        round_counts=[len(cohort) for cohort in ledger.cohorts],
        sampler=run.sampler,
    )
    if found.deviation is not None:
        _LOGGER.warning("the run has no amplified guarantee: %s.", found.deviation)
    return found


def _config(run: Run) -> dict[str, object]:
    """Returns the part of ``config.json`` that privacy statements are made from."""
    return {"flags": run.config.of_the_run(), "versions": run_directory.versions()}


def _others(run: Run, delta: float) -> Others | None:
    directory = run.directory
    return stated_runs.Others.named(
        run.config.other_runs, directory.path, delta, directory.sampling_seed
    )


class PrivacyBudget:
    """Computes the epsilon spent by the first t rounds of a run, when asked, and caches it.

    Epsilon is computed for every ``every``-th round, and a round in between has the epsilon of the
    next computed round. So it is never below the epsilon of the exact sensitivity: the releases of
    fewer rounds are part of the releases of more rounds. It never decreases with t, never exceeds
    the planned epsilon, and equals that in the last round. If the sensitivity is known only as an
    upper bound, which need not grow with the rounds, the largest epsilon so far is used. With
    min-separation sampling and balls in bins, epsilon is the smaller of the planned epsilon and the
    epsilon without amplification.

    Attributes:
      planned: The guarantee of all rounds.
      every: How many rounds apart epsilon is computed.
    """

    def __init__(self, mechanism: Mechanism, delta: float, every: int | None = None) -> None:
        """Creates the budget of a run; only the planned guarantee is computed here.

        Args:
          mechanism: The mechanism. Where a scheme samples its clients, the guarantee is amplified,
            and that of fewer rounds is for the same probability of being drawn.
          delta: Above 0 and below 1; at least 1e-12 with a sampling scheme.
          every: How many rounds apart epsilon is computed; None for a hundredth of
            the rounds, rounded down, but at least 1.

        Raises:
          ValueError: If a number is out of its range.
        """
        self.planned = mechanism.guarantee(delta)
        rounds = mechanism.num_rounds
        self.every = numbers.positive_integer(
            max(1, rounds // _POINTS) if every is None else every, "every"
        )
        self._factorization = mechanism.factorization
        # Cached epsilons of rounds 0, every, 2 every, ...; the last entry may be that of the last
        # round.
        self._spent = [0.0]

    def spent(self, rounds: int) -> float:
        """Returns the epsilon that the releases of the first rounds spend, at the planned delta.

        Args:
          rounds: How many rounds were released, 0 to n.

        Returns:
          Epsilon: 0 before the first round, infinity after it if there is no noise.

        Raises:
          ValueError: If there are more rounds than the factorization has, or fewer than 0.
        """
        rounds = numbers.integer_at_least(rounds, 0, "rounds")
        last = self._factorization.num_rounds
        if rounds > last:
            raise ValueError(
                f"rounds must be at most {last}, the rounds of the factorization, found {rounds}."
            )
        if rounds == last:
            return self.planned.epsilon
        point = -(-rounds // self.every)
        while len(self._spent) <= point:
            following = min(len(self._spent) * self.every, last)
            epsilon = min(self._epsilon_of_first(following), self.planned.epsilon)
            self._spent.append(max(self._spent[-1], epsilon))
        return self._spent[point]

    def _epsilon_of_first(self, rounds: int) -> float:
        plan = self.planned
        if math.isinf(plan.epsilon):
            return math.inf
        if plan.run is not None and plan.run.columns is None:
            # An amplified guarantee does not depend on who was drawn, so that no participations are
            # given.
            nobody = ObservedParticipation(rounds, 0, None, 0, keeps_sampling=True)
            return nobody.guarantee(plan).epsilon
        # To certify an amplified epsilon of fewer rounds would take minutes. For schemes without
        # groups, the planned epsilon and the epsilon without amplification are upper bounds as
        # well.
        return check(plan.without_draws(num_rounds=rounds)).epsilon


class MetricsNotWrittenError(Error, OSError):
    """Metrics that could not be written; the message has the reason, the remains and a remedy."""


class MetricsLog:
    """Log of a run's metrics in ``metrics.csv``, with one row for every round so far."""

    def __init__(self, directory: RunDirectory, columns: Sequence[str], num_rounds: int) -> None:
        """Opens the log of metrics, and keeps the rows of the first ``num_rounds`` rounds.

        The file is replaced whole or not at all. A round whose row was never written, because the
        process ended between its state and its row, gets one without values.

        Args:
          directory: The run's directory.
          columns: The columns after ``round``.
          num_rounds: How many rounds were finished before.

        Raises:
          MetricsNotWrittenError: If the file cannot be written; it is as it was.
          RunDirectoryError: If what is there is no file of metrics.
        """
        self._path = directory.path / run_directory.METRICS_FILE
        run_directory.check_metrics(self._path)
        self._columns = ["round", *columns]
        rows = _whole_rows(self._path)
        lines = [
            self._line(rows.get(number, {"round": number})) for number in range(1, num_rounds + 1)
        ]
        header = self._line({name: name for name in self._columns})
        try:
            atomic_files.write(self._path, "".join([header, *lines]))
        except OSError as error:
            raise MetricsNotWrittenError(
                f"{self._path} cannot be written: {error.strerror}. Its contents are unchanged: "
                "remove the cause (free space if the disk is full), and run the same command again."
            ) from error

    def append(self, round_number: int, values: Mapping[str, float | int]) -> None:
        """Appends the row of a round to metrics.csv.

        Args:
          round_number: The round, from 1.
          values: Values by column; what is missing or not finite stays empty.

        Raises:
          MetricsNotWrittenError: If the row cannot be written. No part of it is left.
          ValueError: If a value is of no column.
        """
        row: dict[str, object] = {"round": round_number}
        for name, value in values.items():
            row[name] = value if math.isfinite(value) else ""
        if unknown := set(row) - set(self._columns):
            raise ValueError(f"{run_directory.METRICS_FILE} has no columns {sorted(unknown)}.")
        try:
            _append(self._path, self._line(row).encode("utf-8"))
        except OSError as error:
            raise MetricsNotWrittenError(
                f"the metrics of round {round_number}, which is saved, could not be written to "
                f"{self._path}: {error.strerror}. Remove the cause (free space if the disk is "
                "full), and run the same command again: it continues after this round."
            ) from error

    def _line(self, row: Mapping[str, object]) -> str:
        line = io.StringIO(newline="")
        writer = csv.DictWriter(line, self._columns, restval="", extrasaction="ignore")
        writer.writerow(row)
        return line.getvalue()


def _whole_rows(path: pathlib.Path) -> dict[int, dict[str, str]]:
    """Returns the undamaged rows of metrics.csv, by round."""
    if not path.exists():
        return {}
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        # Drop lines without an end, which may hold only the first digits of a number; and lines
        # with zero bytes, which some file systems leave after a loss of power.
        lines = [line for line in file if line.endswith("\n") and "\0" not in line]
    rows = {}
    for row in csv.DictReader(lines):
        number = row.get("round") or ""
        if number.isdecimal() and None not in row and None not in row.values():
            rows[int(number)] = row
    return rows


def _append(path: pathlib.Path, line: bytes) -> None:
    """Appends a line to a file; after an error, the file is as it was."""
    with path.open("ab", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        written = 0
        try:
            # Write in a loop: a disk that becomes full takes a part of the line before it fails.
            while written < len(line):
                written += file.write(line[written:])
        except OSError:
            with contextlib.suppress(OSError):
                file.truncate(size)
            raise


def draw_figure(run: Run, planned_epsilon: float) -> None:
    """Draws the figure of a run from the metrics in its directory.

    Raises:
      OSError: If the metrics cannot be read, or the figure cannot be written.
    """
    config, mechanism, clip = run.config, run.mechanism, run.config.adaptive_clip
    levels = {
        "clients": ("clients per round", config.cohort),
        "epsilon": ("planned", planned_epsilon),
    }
    if clip is None:
        levels["L2 norm of updates"] = ("clip norm", float(config.clip_norm))
    else:
        levels["within the clip norm, %"] = ("target", 100.0 * clip.target_unclipped_quantile)
    with (run.directory.path / run_directory.METRICS_FILE).open(newline="") as file:
        rows = list(csv.DictReader(file))
    figure = draw(
        rows,
        f"{mechanism.factorization.mechanism if mechanism.noise_multiplier else 'no noise'}, "
        f"{config.num_rounds} rounds of {config.cohort} clients",
        levels,
        config.delta,
        max(1, config.num_rounds // _WINDOWS_OF_A_RUN) if config.private_metrics else None,
    )
    with atomic_files.writing(run.directory.path / run_directory.FIGURE_FILE) as file:
        figures.save(figure, file, "png")


def draw(
    rows: Sequence[Row],
    title: str,
    levels: Mapping[str, tuple[str, float]] = types.MappingProxyType({}),
    delta: float | None = None,
    released_window: int | None = None,
) -> matplotlib.figure.Figure:
    """Returns the figure of a run's metrics, as a matplotlib figure.

    Its panels are accuracy, loss, norms of the clients' updates, how many of them were clipped
    or zeroed, the released fraction within a clip norm that adapts, norms of noise and released
    mean, clients who might have joined, and the privacy budget. A panel without any data is left
    out; a missing or empty cell is a gap that its line goes straight across.

    Args:
      rows: The rows of ``metrics.csv``: mappings from columns to numbers or their text.
      title: The heading.
      levels: Numbers that are drawn as levels, each with its name, by the label of their panel:
        ``L2 norm of updates``, ``within the clip norm, %``, ``clients`` or ``epsilon``. An infinite
        one is left out.
      delta: The delta of epsilons, for their label.
      released_window: Of metrics of training that were released with noise, how many rounds the
        lines show the mean of, at least 1: noise that is correlated cancels there. None for metrics
        without noise, which are drawn as they are.
    """
    window, release = released_window or 1, ""
    if released_window is not None:
        release = f" (a private release{f', mean of {window}' if window > 1 else ''})"
    drawn = {label: _curves(rows, label, lines, window) for label, lines in _PANELS.items()}
    drawn = {label: curves for label, curves in drawn.items() if curves}
    figure, places = panels(max(1, len(drawn)), _INCHES_OF_A_PANEL)
    for axes, (label, curves) in zip(places, drawn.items(), strict=False):
        name, level = levels.get(label, ("", math.inf))
        with_delta = "" if delta is None else f" at delta {scientific(delta)}"
        figures.lines(
            axes,
            {legend.format(release): curve for legend, curve in curves.items()},
            x="round",
            y=f"{label}{with_delta}" if label == "epsilon" else label,
            logarithmic="y" if label.startswith(("L2", "clients")) else "",
            levels={name: level} if math.isfinite(level) else {},
        )
    if not drawn:
        places[0].set_axis_off()
        places[0].text(0.5, 0.5, "no metrics", ha="center", va="center")
    figures.heading(figure, title)
    figure.align_ylabels()
    return figure


def _column(rows: Sequence[Row], name: str) -> np.ndarray:
    """Returns one column of ``metrics.csv`` as numbers, with NaN for missing ones.

    Returns:
      (len(rows),) float64, NaN where a row has no such cell, an empty one, or one that is no
      finite number.
    """
    return np.array([_number(row.get(name, "")) for row in rows], dtype=np.float64)


def _number(cell: str | float) -> float:
    try:
        number = float(cell)
    except (TypeError, ValueError):
        return math.nan
    return number if math.isfinite(number) else math.nan


def _curves(
    rows: Sequence[Row], label: str, lines: Mapping[str, str], window: int
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns the curves of a panel by legend name, each as its known rounds and values."""
    rounds, factor = _column(rows, "round"), 100.0 if label.endswith("%") else 1.0
    curves = {}
    for name, legend in lines.items():
        values = factor * _column(rows, name)
        known = np.isfinite(rounds + values)
        if np.any(known):
            values = _smoothed(values[known], window if name in _SMOOTHED else 1)
            curves[legend] = (rounds[known], values)
    return curves


def _smoothed(values: np.ndarray, window: int) -> np.ndarray:
    """Returns moving averages: the mean of each value and up to ``window`` - 1 values before it."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - window, 0)
    return np.asarray((sums[ends] - sums[starts]) / (ends - starts))


def scientific(number: float) -> str:
    """Returns a delta as text for a sentence, as 1e-6 and not 1e-06, rounded up.

    Args:
      number: The number.
    """
    return re.sub(r"e([-+])0*", r"e\1", rounded_up(number, ".6g")).replace("e+", "e")


def panels(
    number: int, inches: tuple[float, float | Sequence[str]]
) -> tuple[matplotlib.figure.Figure, list[matplotlib.axes.Axes]]:
    """Returns a figure and its panels; the last panel fills the rest of its row.

    Args:
      number: The number of panels, at least 1.
      inches: The width and height of a panel, as ``figures.panels`` takes them.
    """
    num_columns = min(number, _PANELS_OF_A_ROW)
    figure, grid = figures.panels(-(-number // num_columns), num_columns, inches)
    places = list(grid.ravel())
    for axes in places[number:]:
        axes.remove()
    place = places[number - 1].get_subplotspec()
    places[number - 1].set_subplotspec(place.get_gridspec()[-1, place.colspan.start :])
    return figure, places[:number]
