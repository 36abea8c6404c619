"""What mf-plan prints for a reader: the setting, a table of the candidates, and steps to run."""

import math
from collections.abc import Sequence

from mf_aggregators import planning
from mf_aggregators.commands.plan_steps import Step
from mf_aggregators.planning import Candidate, LeftOut, Plan, Setting
from mf_aggregators.printed_guarantees import pair, rounded_up

# Of the table; the first has a mark at what is recommended, and the last is not always shown.
_COLUMNS = (
    "",
    "mechanism",
    "effective RMSE",
    "worst round",
    "RMSE",
    "noise mult.",
    "over bound",
    "noise GB",
    "disk GB",
    "s/round",
    "server rate",
)
_ABOUT = "~"


def setting_lines(setting: Setting) -> list[str]:
    """Returns what a plan is for: rounds and clients, the target, and what noise may take."""
    if setting.participation is not None:
        who = f"{setting.population} clients with timers: {setting.participation}"
    elif setting.sampling == planning.ANY_SAMPLING:
        who = f"{setting.population} clients that take part in any way"
    else:
        who = f"{setting.sampling} sampling from {setting.population} clients"
    return [
        f"{_count(setting.num_rounds, 'round')} of {_count(setting.clients_per_round, 'client')}, "
        f"{who}",
        f"target {pair(setting.epsilon, setting.delta, '.6g')}-DP for every client (zero-out); "
        f"model of {setting.model_size} parameters",
        _budget(setting),
    ]


def table(plan: Plan, show_rates: bool) -> list[tuple[str, ...]]:
    """Returns the names of the columns, and a row for each candidate.

    Args:
      plan: The plan.
      show_rates: Whether the last column has server learning rates.
    """
    rows = [_COLUMNS, *(_row(each, each is plan.recommended) for each in plan.candidates)]
    return rows if show_rates else [row[:-1] for row in rows]


def name_of(candidate: Candidate) -> str:
    """Returns the mechanism with its options and how its clients take part."""
    if candidate.mechanism.schema.is_evenly_spaced:
        return f"{candidate.name_with_sampling}, fixed epochs"
    return candidate.name_with_sampling


def mark(candidate: Candidate) -> str:
    """Returns what stands before a number that is a rough estimate; nothing before others."""
    return _ABOUT if candidate.is_estimate else ""


def remark_on_estimates(plan: Plan) -> list[str]:
    """Returns lines on what the mark of estimates means; none where there are none."""
    if not any(candidate.is_estimate for candidate in plan.candidates):
        return []
    return [
        f"Rows with {_ABOUT} are rough estimates, which no guarantee may be stated of. The noise "
        "multiplier of the",
        "recommended row is certified.",
    ]


def text(plan: Plan, steps: list[Step], show_rates: bool) -> str:
    """Returns what is printed.

    Args:
      plan: The plan.
      steps: What a user types to run it.
      show_rates: As :func:`table` takes it.
    """
    lines = [*setting_lines(plan.setting), "", *_aligned(table(plan, show_rates))]
    remark = remark_on_estimates(plan)
    if remark:
        lines += ["", *remark]
    lines += ["", f"Recommended: {plan.reason}"]
    if plan.left_out:
        lines += ["", "Left out:", *(f"  {each.mechanism} {each.reason}" for each in plan.left_out)]
    if plan.skipped:
        lines += ["", "Skipped for lack of time (--time_limit=0 computes them, and keeps them):"]
        lines += [f"  {each.mechanism} {each.reason}" for each in plan.skipped]
    lines += ["", "To run it:"]
    for step in steps:
        lines += ["", *(f"  {line}" for line in step.lines())]
    return "\n".join(lines)


def text_of_finished(
    setting: Setting, candidates: Sequence[Candidate], left_out: Sequence[LeftOut]
) -> str:
    """Returns what is printed of a plan that was interrupted.

    Args:
      setting: The setting.
      candidates: What was weighed by then, in the order of the rows.
      left_out: What does not fit.
    """
    rows = [_COLUMNS, *(_row(each, False) for each in candidates)]
    lines = [*setting_lines(setting), "", *_aligned([row[:-1] for row in rows])]
    if left_out:
        lines += ["", "Left out:", *(f"  {each.mechanism} {each.reason}" for each in left_out)]
    return "\n".join([*lines, "", "Interrupted: the others are not compared."])


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """The lines of a table."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        name = f"{row[0]:<{widths[0]}} {row[1]:<{widths[1]}}"
        numbers = (f"{text:>{width}}" for text, width in zip(row[2:], widths[2:], strict=True))
        lines.append("  ".join([name, *numbers]).rstrip())
    return lines


def _budget(setting: Setting) -> str:
    memory, disk = setting.noise_memory, setting.noise_disk
    assert disk is not None
    kept = "any amount of noise" if memory is None else f"at most {memory / 1e9:g} GB of noise"
    return f"{kept} between rounds, and at most {disk / 1e9:g} GB of files (--noise_disk_gb)"


def _count(number: int, unit: str) -> str:
    return f"{number} {unit}" if number == 1 else f"{number} {unit}s"


def _row(candidate: Candidate, is_recommended: bool) -> tuple[str, ...]:
    bound = candidate.over_lower_bound
    about = mark(candidate)
    return (
        "*" if is_recommended else "",
        name_of(candidate),
        f"{about}{candidate.effective_rmse:.4g}",
        f"{about}{candidate.max_effective_error:.4g}",
        f"{candidate.errors.rmse:.5g}",
        about + rounded_up(candidate.mechanism.noise_multiplier, ".3g" if about else ".5g"),
        "-" if bound is None else f"{bound:.3f}",
        f"{candidate.kept_bytes / 1e9:.3g}",
        f"{candidate.cost.disk_bytes / 1e9:.3g}",
        f"{candidate.cost.seconds_per_round:.2g}",
        f"{candidate.server_learning_rate:.4g}" if math.isfinite(candidate.effective_rmse) else "-",
    )
