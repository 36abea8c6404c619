"""A plan as a page: the comparison as pictures and as a table, and the commands to copy."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags

from mf_aggregators import figures
from mf_aggregators.commands import pages, plan_text
from mf_aggregators.commands.pages import Picture
from mf_aggregators.commands.plan_text import Step
from mf_aggregators.kernel.claim import Guarantee
from mf_aggregators.planning import Candidate, Plan
from mf_aggregators.planning.plans import words_of
from mf_aggregators.privacy import attackers

# More curves than these are hard to tell apart.
_MOST_CURVES = 6


def write(
    plan: Plan,
    candidates: Sequence[Mapping[str, Any]],
    guarantee: Guarantee,
    steps: Sequence[Step],
    show_rates: bool,
    values: flags.FlagValues,
) -> None:
    """Writes a plan as a page.

    Args:
      plan: The plan.
      candidates: The ``plan_text.fields_of`` of its candidates.
      guarantee: Of what it recommends.
      steps: What a user types to run it; the notes of the last say what the guarantee depends on.
      show_rates: Whether the table has server learning rates.
      values: The parsed flags; ``report`` is the file.

    Raises:
      CommandError: If it cannot be written.
    """
    setting, chosen = plan.setting, plan.recommended
    # The mark of the recommended row is its colour.
    columns, *rows = plan_text.table(setting, candidates, show_rates)
    pages.write(
        "mf-plan",
        values,
        "plan.html",
        title=f"A plan for {setting.num_rounds} rounds of {setting.clients_per_round} clients",
        plan=plan,
        setting=plan_text.setting_lines(setting, not values["model_size"].present, chosen),
        attacker=attackers.rates_sentence(attackers.rates(guarantee)),
        columns=columns,
        rows=rows,
        marked=plan.candidates.index(chosen),
        remark=" ".join(plan_text.remark_on_estimates(candidates)),
        steps=steps,
        pictures={"comparison": _comparison(plan, [each["name"] for each in candidates])},
    )


def _is_independent(candidate: Candidate) -> bool:
    recursion = candidate.mechanism.factorization.noise_recursion()
    return recursion.floats_per_parameter + recursion.rows_of_z_per_round == 1


def _comparison(plan: Plan, names: Sequence[str]) -> list[Picture]:
    """Bars of the errors, and curves of the recommended and of the best of each mechanism."""
    words, chosen = words_of(plan.setting.error), plan.recommended
    finite = {
        name: each
        for name, each in zip(names, plan.candidates, strict=True)
        if math.isfinite(each.effective_error)
    }
    own = next(name for name, each in finite.items() if each is chosen)
    labels = [
        f"{'~' if each.is_estimate else ''}{name}{' (recommended)' if each is chosen else ''}"
        for name, each in finite.items()
    ]
    errors, axes = pages.one_panel(figures.height_of_rows(labels))
    title = f"{words.quantity[0].upper()}{words.quantity[1:]}"
    figures.bars(axes, labels, [each.effective_error for each in finite.values()], title=title)
    drawn = {chosen.kind: own}
    for name, each in finite.items():
        drawn.setdefault(each.kind, name)
    # Readers know independent noise.
    known = [each for each in drawn.values() if _is_independent(finite[each])]
    others = [each for each in drawn.values() if each not in known]
    by_round, axes = pages.one_panel()
    pages.draw_by_round(
        axes,
        {
            name: finite[name].errors.per_round_variance
            * (finite[name].mechanism.noise_multiplier / plan.setting.clients_per_round) ** 2
            for name in [*others[: _MOST_CURVES - len(known)], *known]
        },
        title="Noise by round",
        logarithmic="y",
    )
    return [
        Picture(
            errors,
            f"{title}: what the noise does to a parameter after a round of SGD with learning rate "
            f"and clip norm 1, {words.rounds}. {own} has {chosen.effective_error:.4g}.",
        ),
        Picture(
            by_round,
            "Standard deviation of the noise in a parameter after each round. The worst round of "
            f"{own} has {chosen.max_effective_error:.4g}.",
        ),
    ]
