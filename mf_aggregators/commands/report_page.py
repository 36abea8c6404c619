"""Figure and page of mf-report; the page has the same panels, a table and commands to type."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags

from mf_aggregators import checkpoints, figures
from mf_aggregators.commands import command_line, pages, plan_text
from mf_aggregators.commands.pages import Picture
from mf_aggregators.commands.plan_text import Step
from mf_aggregators.commands.report_contents import Subject
from mf_aggregators.kernel.claim import Guarantee

_TITLE_OF_ERRORS = "Output at noise multiplier 1"


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
    with command_line.naming("figure"):
        figures.save(figure, str(path))


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
        rows=[(name, command_line.readable(name, value)) for name, value in fields.items()],
        step=_step(subject, values),
        pictures={"guarantee": _pictures(subject, stated)},
    )


def _pictures(subject: Subject, stated: Mapping[str, Guarantee]) -> list[Picture]:
    mechanism = subject.factorization.mechanism
    errors, axes = pages.one_panel()
    pages.draw_by_round(axes, subject.variances(), title=_TITLE_OF_ERRORS)
    matrix, axes = pages.one_panel()
    pages.draw_matrix(matrix, axes, subject.factorization)
    found = [
        Picture(
            errors,
            "Standard deviation of the output of each round, at sensitivity 1 and noise "
            f"multiplier 1: {mechanism} has an RMSE of {subject.errors.rmse:.5g}, and at most "
            f"{subject.errors.max_error:.5g} in a round.",
        ),
        Picture(matrix, f"The strategy matrix C of {mechanism}, which correlates the noise."),
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


def _step(subject: Subject, values: flags.FlagValues) -> Step | None:
    """How to use the checkpoint, for a run that is still to come."""
    mechanism = subject.mechanism
    took_place = values.ledger or values.round_times or checkpoints.is_run(values.checkpoint)
    if mechanism is None or not mechanism.noise_multiplier or took_place:
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
