"""A plan as a page: the comparison as pictures and as a table, and the commands to copy."""

import contextlib
import math
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np
from absl import flags

from mf_aggregators import accounting, figures
from mf_aggregators.commands import pages, plan_text
from mf_aggregators.commands.pages import Picture
from mf_aggregators.commands.plan_text import Step
from mf_aggregators.kernel.claim import Guarantee
from mf_aggregators.kernel.numbers import pair
from mf_aggregators.planning import Candidate, Plan, proposals
from mf_aggregators.planning.plans import ErrorName, error_name, quantity_of
from mf_aggregators.planning.robustness import Comparison
from mf_aggregators.privacy import attackers

# More curves than these are hard to tell apart.
_MOST_CURVES = 6
# Noise multipliers of a curve of epsilons, relative to that of the plan. Epsilons that sampling
# amplifies take a second each.
_LEAST_FACTOR, _MOST_FACTOR, _NUM_FACTORS = 0.5, 4.0, 7
# Which rounds an error is about, after "after a round of SGD".
_ROUNDS: Mapping[ErrorName, str] = {
    "mean": "on average over rounds",
    "max": "in the worst round",
    "weights": "on average over rounds with their weights",
}
# Epsilons relative to the target, whose noise is estimated if clients draw for themselves.
_ESTIMATED_TARGETS = (0.25, 0.5, 2.0)


def write(
    plan: Plan,
    guarantee: Guarantee,
    steps: Sequence[Step],
    show_rates: bool,
    values: flags.FlagValues,
    cache: pathlib.Path | None,
    comparison: Comparison | None = None,
) -> None:
    """Writes a plan as a page.

    Args:
      plan: The plan.
      guarantee: Of what it recommends.
      steps: What a user types to run it; the notes of the last say what the guarantee depends on.
      show_rates: Whether the table has server learning rates.
      values: The parsed flags; ``report`` is the file.
      cache: Where noise multipliers are cached between calls; None for nowhere.
      comparison: What matrices lose under other separations, if that was asked for.

    Raises:
      CommandError: If it cannot be written.
    """
    setting = plan.setting
    # The mark of the recommended row is its colour.
    columns, *rows = plan_text.table(setting, plan.candidates, show_rates)
    pages.write(
        "mf-plan",
        values,
        "plan.html",
        title=f"A plan for {setting.num_rounds} rounds of {setting.clients_per_round} clients",
        plan=plan,
        setting=plan_text.setting_lines(
            setting, not values["model_size"].present, plan.recommended
        ),
        attacker=attackers.rates_sentence(attackers.rates(guarantee)),
        columns=columns,
        rows=rows,
        marked=plan.candidates.index(plan.recommended),
        remark=" ".join(plan_text.remark_on_estimates(plan.candidates)),
        steps=steps,
        separations=None if comparison is None else plan_text.table_of_separations(comparison),
        on_separations="" if comparison is None else plan_text.remark_on_separations(comparison),
        pictures={"comparison": _comparison(plan, guarantee, cache)},
    )


def _comparison(plan: Plan, guarantee: Guarantee, cache: pathlib.Path | None) -> list[Picture]:
    setting, chosen = plan.setting, plan.recommended
    finite = [each for each in plan.candidates if math.isfinite(each.effective_error)]
    quantity = quantity_of(setting.error)
    drawn = _drawn(plan)
    names = [
        plan_text.mark(each)
        + plan_text.name_of(each)
        + (" (recommended)" if each is chosen else "")
        for each in finite
    ]
    errors, axes = pages.one_panel(figures.height_of_rows(names))
    title = f"{quantity[0].upper()}{quantity[1:]}"
    figures.bars(axes, names, [each.effective_error for each in finite], title=title)
    by_round, axes = pages.one_panel()
    pages.draw_by_round(
        axes,
        {
            name: each.errors.per_round_variance
            * (each.mechanism.noise_multiplier / setting.clients_per_round) ** 2
            for name, each in drawn.items()
        },
        title="Noise by round",
        logarithmic="y",
    )
    epsilons, axes = pages.one_panel()
    pages.draw_epsilons(
        axes,
        _epsilons(plan, drawn, cache),
        x=quantity,
        delta=setting.delta,
        target=setting.epsilon,
    )
    trade_offs, axes = pages.one_panel()
    rates = pages.false_positive_rates()
    allowed = accounting.true_positive_rate_of_pairs([(setting.epsilon, setting.delta)], rates)
    target = f"all that {pair(setting.epsilon, setting.delta, '.6g')}-DP allows"
    pages.draw_trade_offs(
        axes, {plan_text.name_of(chosen): guarantee}, {target: (rates, np.asarray(allowed))}
    )
    best = (
        ""
        if len(drawn) == len(plan.candidates)
        else ", of the best of each mechanism of least error, and of independent noise"
    )
    return [
        Picture(
            errors,
            f"{title}: what the noise does to a parameter after a round of SGD with learning rate "
            f"and clip norm 1, {_ROUNDS[error_name(setting.error)]}. {plan_text.name_of(chosen)} "
            f"has {chosen.effective_error:.4g}.",
        ),
        Picture(
            by_round,
            f"Standard deviation of the noise in a parameter after each round{best}. The worst "
            f"round of {plan_text.name_of(chosen)} has {chosen.max_effective_error:.4g}.",
        ),
        Picture(epsilons, _caption_of_epsilons(plan)),
        Picture(
            trade_offs,
            "The highest true positive rate of an attacker who decides whether one client's "
            "updates were used, over the false positive rate: "
            f"{attackers.rates_in_brief(attackers.rates(guarantee))}.",
        ),
    ]


def _drawn(plan: Plan) -> dict[str, Candidate]:
    """The candidates that have curves, by name: the recommended, then the best of each mechanism.

    Independent noise is among them, if it is a candidate: readers know it.
    """
    best: dict[str, Candidate] = {plan.recommended.kind: plan.recommended}
    for each in plan.candidates:
        if math.isfinite(each.effective_error):
            best.setdefault(each.kind, each)
    found = list(best.values())
    if len(found) > _MOST_CURVES:
        baseline = [each for each in found[_MOST_CURVES - 1 :] if _is_independent(each)]
        found = found[: _MOST_CURVES - len(baseline)] + baseline
    return {plan_text.name_of(each): each for each in found}


def _is_independent(candidate: Candidate) -> bool:
    recursion = candidate.mechanism.factorization.noise_recursion()
    return recursion.floats_per_parameter + recursion.rows_of_z_per_round == 1


def _epsilons(
    plan: Plan, drawn: dict[str, Candidate], cache: pathlib.Path | None
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Epsilons over effective errors.

    Where clients draw for themselves, proofs of other epsilons would take minutes: those of what is
    recommended are estimates, and others have the point of the plan alone.
    """
    setting, factors = plan.setting, np.geomspace(_LEAST_FACTOR, _MOST_FACTOR, _NUM_FACTORS)

    curves = {}
    for name, each in drawn.items():
        scheme, multiplier = each.mechanism.sampling, each.mechanism.noise_multiplier
        if scheme is None or _has_groups(each):
            multipliers, found = pages.epsilons_of(multiplier * factors, setting.delta, scheme)
        else:
            estimated = _estimated(plan, cache) if each is plan.recommended else {}
            estimated[setting.epsilon] = multiplier
            found = np.array(sorted(estimated))
            multipliers = np.array([estimated[epsilon] for epsilon in found])
        curves[name] = multipliers * each.planned_error / setting.clients_per_round, found
    return curves


def _estimated(plan: Plan, cache: pathlib.Path | None) -> dict[float, float]:
    """Estimated noise multipliers of the recommended mechanism for other epsilons."""
    setting, chosen = plan.setting, plan.recommended
    found = {}
    for factor in _ESTIMATED_TARGETS:
        epsilon = factor * setting.epsilon
        # If no noise multiplier gives an epsilon, its point is missing.
        with contextlib.suppress(ValueError):
            found[epsilon] = proposals.calibrated(
                chosen.mechanism.factorization,
                chosen.mechanism.participation,
                epsilon,
                setting.delta,
                cache,
                is_estimate=True,
            ).noise_multiplier
    return found


def _has_groups(candidate: Candidate) -> bool:
    """Whether clients are sampled in groups, where an amplified epsilon is fast to compute."""
    scheme = candidate.mechanism.sampling
    return scheme is not None and scheme.has_groups


def _caption_of_epsilons(plan: Plan) -> str:
    quantity = quantity_of(plan.setting.error)
    caption = f"Epsilon over the {quantity}: what more or less noise would give."
    if plan.recommended.mechanism.sampling is not None and not _has_groups(plan.recommended):
        caption += (
            f" For {plan_text.name_of(plan.recommended)} these are rough estimates, which no "
            "guarantee may be stated of, but for the target, which is certified. A single point is "
            "the noise of the plan."
        )
    return caption
