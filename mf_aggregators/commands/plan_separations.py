"""``mf-plan --separations``: what matrices lose if the separation turns out to be another one."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

from absl import flags

from mf_aggregators.commands import command_line
from mf_aggregators.commands.flag_groups import FlagGroup
from mf_aggregators.kernel import numbers
from mf_aggregators.participation import MinSeparation
from mf_aggregators.planning import Plan, Setting
from mf_aggregators.planning.robustness import Comparison, Regret

# A time limit for a plan that comes last, if those before have used up what it had.
_LEAST_SECONDS = 1.0


def define_flags(group: FlagGroup) -> None:
    """Defines the flag."""
    group.words(
        "separations",
        "Further separations, with commas between them: plans for these as well, and compares the "
        "error of every matrix under each of them with the best matrix that is made for it. For "
        "devices with timers. The plans share the time limit.",
    )


def settings_of(values: flags.FlagValues, setting: Setting) -> tuple[Setting, ...]:
    """Returns the settings of the further separations.

    Args:
      values: The parsed flags.
      setting: That of the plan.

    Returns:
      A setting for each separation that is not that of the plan, in increasing order; empty without
      the flag.

    Raises:
      CommandError: If the flag does not fit the others, or is no list of separations.
    """
    if values.separations is None:
        return ()
    own = setting.participation
    command_line.check_choice(
        isinstance(own, MinSeparation),
        "--separations is for devices with timers: leave out --sampling.",
    )
    assert isinstance(own, MinSeparation)
    try:
        separations = {int(text) for text in values.separations}
    except ValueError:
        raise command_line.CommandError(
            "--separations takes whole numbers with commas between them, found "
            f"{','.join(values.separations)!r}."
        ) from None
    command_line.check_choice(bool(separations), "--separations names no separation.")
    found = []
    for separation in sorted(separations - {own.separation}):
        numbers.positive_integer(separation, "a number of --separations")
        command_line.check_choice(
            separation <= setting.num_rounds,
            f"--separations={separation} is more than --num_rounds={setting.num_rounds}.",
        )
        schema, most = MinSeparation(separation), own.max_participations
        if most is not None and most < schema.most_participations(setting.num_rounds):
            schema = MinSeparation(separation, most)
        try:
            found.append(dataclasses.replace(setting, participation=schema))
        except ValueError as error:
            raise command_line.CommandError(f"--separations={separation}: {error}") from None
    return tuple(found)


def share_of(deadline: float | None, plans: int) -> float | None:
    """Returns the time limit of the next plan of several that share what is left.

    Args:
      deadline: Of all of them, as ``time.monotonic`` has it; None for no limit.
      plans: How many plans are left, at least 1.
    """
    if deadline is None:
        return None
    return max(_LEAST_SECONDS, (deadline - time.monotonic()) / plans)


def plans_of(
    settings: Sequence[Setting],
    make: Callable[[Setting, float | None], Plan],
    deadline: float | None,
    say: Callable[[str], None],
) -> list[Plan]:
    """Makes a plan for each further separation.

    Args:
      settings: Those of the separations.
      make: Takes a setting and a time limit, and makes a plan.
      deadline: Of all of them; None for no limit.
      say: Is told what is planned, and why a separation has no plan.
    """
    found = []
    for number, setting in enumerate(settings):
        schema = setting.participation
        say(f"planning for {schema}")
        try:
            found.append(make(setting, share_of(deadline, len(settings) - number)))
        except ValueError as error:
            say(f"{schema} is left out: {error}")
    return found


def table(comparison: Comparison) -> list[tuple[str, ...]]:
    """Returns the names of the columns, the best errors, and a row for each matrix."""
    return [
        ("mechanism", "made for", *(f"{each} apart" for each in comparison.separations)),
        (
            "best of those made for it",
            "each",
            *(f"{each.effective_error:.4g}" for each in comparison.best),
        ),
        *(
            (
                each.candidate.name,
                _separations(each),
                *(f"{100.0 * regret:+.1f} %" for regret in each.regrets),
            )
            for each in comparison.matrices
        ),
    ]


def remark(comparison: Comparison) -> str:
    """Returns what the table says, and which matrix loses least."""
    said = (
        "If the separation turns out otherwise: the effective error of each matrix over that of "
        "the best one that is made for a separation, with the noise of the same target. "
    )
    least = comparison.matrices[0]
    return (
        f"{said}{least.candidate.name}, made for {_separations(least)}, loses least: at most "
        f"{100.0 * max(0.0, least.worst):.1f} %."
    )


def fields(comparison: Comparison) -> dict[str, Any]:
    """Returns the comparison for JSON."""
    return {
        "separations": list(comparison.separations),
        "best": [
            {"mechanism": each.name, "effective_error": each.effective_error}
            for each in comparison.best
        ],
        "matrices": [
            {
                "mechanism": each.candidate.kind,
                "name": each.candidate.name,
                "made_for": list(each.made_for),
                "effective_errors": list(each.errors),
                "regrets": list(each.regrets),
            }
            for each in comparison.matrices
        ],
    }


def _separations(regret: Regret) -> str:
    return ", ".join(map(str, regret.made_for))
