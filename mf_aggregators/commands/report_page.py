"""What mf-report draws: a figure, or a page with the same panels, a table and what to type."""

import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from absl import flags

from mf_aggregators import checkpoints, factorizations, figures
from mf_aggregators.commands import command_line, pages, plan_text, report_contents
from mf_aggregators.commands.pages import Picture
from mf_aggregators.commands.plan_text import Step
from mf_aggregators.commands.report_contents import INDEPENDENT_NOISE, Subject
from mf_aggregators.kernel.claim import Guarantee
from mf_aggregators.noise import costs

_TITLE_OF_ERRORS = "Output at noise multiplier 1"
# Noise multipliers of a curve of epsilons; below the least, none is stated.
_LEAST_MULTIPLIER, _NUM_MULTIPLIERS = 0.2, 15


def save_figure(
    subject: Subject, stated: Mapping[str, Guarantee], is_broken: bool, path: pathlib.Path
) -> None:
    """Draws a report as a PNG file.

    Args:
      subject: What it is about.
      stated: The guarantees whose trade-off curves are drawn, by name.
      is_broken: Whether a ledger breaks the plan.
      path: The file.

    Raises:
      CommandError: If it cannot be written.
    """
    factorization = subject.factorization
    figure, (axes,) = figures.panels(1, 3 if stated else 2, pages.INCHES)
    pages.draw_by_round(axes[0], subject.variances(), title=_TITLE_OF_ERRORS)
    pages.draw_matrix(figure, axes[1], factorization)
    if stated:
        pages.draw_trade_offs(axes[2], stated)
    schema = f"NOT kept: {subject.schema}" if is_broken else str(subject.schema)
    figures.heading(figure, f"{factorization.mechanism}, n = {factorization.num_rounds}: {schema}")
    try:
        figures.save(figure, str(path))
    except OSError as error:
        raise command_line.CommandError(
            f"--figure={path} cannot be written: {error.strerror}."
        ) from error


def write(
    subject: Subject,
    stated: Mapping[str, Guarantee],
    fields: Mapping[str, Any],
    sentences: Sequence[str],
    is_broken: bool,
    values: flags.FlagValues,
) -> None:
    """Writes a report as a page.

    Args:
      subject: What the report is about.
      stated: The guarantees that may be stated, by name.
      fields: What ``--format=json`` prints.
      sentences: What the fields mean, and what a guarantee depends on; what a reader must know
        before anything else is the first.
      is_broken: Whether a ledger breaks the plan.
      values: The parsed flags; ``report`` is the file.

    Raises:
      CommandError: If it cannot be written.
    """
    factorization = subject.factorization
    pages.write(
        "mf-report",
        values,
        "report.html",
        title=f"{factorization.mechanism}, {factorization.num_rounds} rounds",
        subject=subject,
        sentences=sentences,
        is_broken=is_broken,
        model_size=values.model_size,
        rows=[(name, command_line.readable(name, value)) for name, value in fields.items()],
        targets=report_contents.rows_of_targets(stated),
        step=_step(subject, values),
        pictures={
            "guarantee": _pictures(subject, stated, values.delta),
            "costs": _costs(subject, values.model_size),
        },
    )


def _pictures(subject: Subject, stated: Mapping[str, Guarantee], delta: float) -> list[Picture]:
    mechanism = subject.factorization.mechanism
    errors, axes = pages.one_panel()
    pages.draw_by_round(axes, subject.variances(), title=_TITLE_OF_ERRORS)
    matrix, axes = pages.one_panel()
    pages.draw_matrix(matrix, axes, subject.factorization)
    epsilons, axes = pages.one_panel()
    pages.draw_epsilons(axes, _epsilons(stated, delta), x="noise multiplier", delta=delta)
    found = [
        Picture(
            errors,
            "Standard deviation of the output of each round, at sensitivity 1 and noise "
            f"multiplier 1: {mechanism} has an RMSE of {subject.errors.rmse:.5g}, and at most "
            f"{subject.errors.max_error:.5g} in a round.",
        ),
        Picture(matrix, f"The strategy matrix C of {mechanism}, which correlates the noise."),
        Picture(epsilons, _caption_of_epsilons(stated)),
    ]
    if stated:
        attackers, axes = pages.one_panel()
        pages.draw_trade_offs(axes, stated)
        found.append(
            Picture(
                attackers,
                "The highest true positive rate of an attacker who decides whether one client's "
                "updates were used, over the false positive rate.",
            )
        )
    return found


def _epsilons(stated: Mapping[str, Guarantee], delta: float) -> pages.Curves:
    """Epsilons without amplification over noise multipliers, and what is stated as points."""
    points = {
        name: (np.array([guarantee.noise_multiplier]), np.array([guarantee.epsilon]))
        for name, guarantee in stated.items()
        if math.isfinite(guarantee.epsilon) and 0.0 < guarantee.noise_multiplier < math.inf
    }
    own = [float(multipliers[0]) for multipliers, _ in points.values()] or [1.0]
    least = max(0.25 * min(own), _LEAST_MULTIPLIER)
    multipliers, found = pages.epsilons_of(
        np.geomspace(least, max(4.0 * max(own), 2.0 * least), _NUM_MULTIPLIERS), delta
    )
    return {"without amplification": (multipliers, found), **points}


def _caption_of_epsilons(stated: Mapping[str, Guarantee]) -> str:
    caption = (
        "Epsilon over the noise multiplier. Without amplification, nothing else matters: it is "
        "relative to the sensitivity under the participation schema."
    )
    if any(guarantee.is_amplified for guarantee in stated.values()):
        caption += " That of an amplified guarantee is relative to one participation."
    return caption


def _costs(subject: Subject, model_size: int | None) -> list[Picture]:
    if model_size is None:
        return []
    independent = factorizations.identity(subject.factorization.num_rounds)
    recursions = {
        subject.factorization.mechanism: subject.factorization.noise_recursion(),
        INDEPENDENT_NOISE: independent.noise_recursion(),
    }
    found = {name: costs.choose(each, model_size) for name, each in recursions.items()}
    quantities = (
        ("Memory of a round, GB", [cost.memory_bytes / 1e9 for cost in found.values()]),
        ("Files, GB", [cost.disk_bytes / 1e9 for cost in found.values()]),
        ("Seconds a round", [cost.seconds_per_round for cost in found.values()]),
    )
    pictures = []
    for quantity, values in quantities:
        figure, axes = pages.one_panel(figures.height_of_rows(list(found)))
        figures.bars(axes, list(found), values, title=quantity)
        words = ", ".join(f"{name} {each:.3g}" for name, each in zip(found, values, strict=True))
        pictures.append(Picture(figure, f"{quantity}: {words}."))
    return pictures


def _step(subject: Subject, values: flags.FlagValues) -> Step | None:
    """How to use the checkpoint, for a run that is still to come."""
    mechanism = subject.mechanism
    if mechanism is None or not mechanism.noise_multiplier:
        return None
    if values.ledger is not None or values.round_times is not None:
        return None
    if checkpoints.is_run(values.checkpoint):
        return None
    clients, condition = values.clients_per_round, f"every client keeps to: {subject.schema}."
    if subject.drawn is not None and subject.drawn.sampling is not None:
        clients = clients or subject.drawn.sampling.clients_per_round
        condition = plan_text.condition_of(subject.drawn)
    return plan_text.step_of_checkpoint(
        values.checkpoint,
        mechanism,
        clients,
        f"The guarantee holds only if {condition}",
        is_saved=subject.is_saved,
    )
