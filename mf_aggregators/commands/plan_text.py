"""Text and page of mf-plan: the setting, a table of the candidates, and the steps to run one.

Steps are commands to run, and the aggregator for one's own program. Commands that train repeat
the parts of the recipe for a data set that ``run-stackoverflow`` needs: recipes are tuned for the
docstrings of the installed packages, and are the papers' for StackOverflow.
"""

import dataclasses
import math
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from absl import flags

from mf_aggregators import planning
from mf_aggregators.catalogue import Variant
from mf_aggregators.kernel.claim import Guarantee
from mf_aggregators.kernel.numbers import counted, pair, rounded_up
from mf_aggregators.mechanism import Mechanism
from mf_aggregators.noise import costs
from mf_aggregators.participation import SamplingScheme
from mf_aggregators.planning import Candidate, Plan, Setting
from mf_aggregators.planning.plans import words_of
from mf_aggregators.privacy import attackers, guarantees
from mf_aggregators.privacy.guarantees import ObservedParticipation

# Stands for the data set in a template.
_PLACEHOLDER = "YOUR_DATASET"
# A clip norm to begin with, where a plan knows nothing of the data.
_CLIP_NORM_TO_BEGIN_WITH = 1.0
_SECRET_SEED = "mfa.participation.secret_seed()"
_NOTE_ON_CLIP_NORM = (
    f"clip_norm={_CLIP_NORM_TO_BEGIN_WITH!r} is a place to begin: fill in the L2 norm that suits "
    "your updates. The guarantee does not depend on it."
)
_LINE_LENGTH = 100
_ABOUT = "~"
# More curves than these are hard to tell apart.
_MOST_CURVES = 6


class Recipe(NamedTuple):
    """How ``run-stackoverflow`` trains on a data set.

    Attributes:
      dataset: As ``run-stackoverflow --dataset`` spells it.
      description: The data set and its recipe, in words.
      clip_norm: The L2 norm that its recipe clips updates to.
      population: Its training clients; None where only its owner knows.
      follows_rate_rule: Whether its server learning rate follows the noise by the rule of
        BandMF App. I. Otherwise the recipe has one rate, which is the default of the run.
    """

    dataset: str
    description: str
    clip_norm: float
    population: int | None = None
    follows_rate_rule: bool = False


# The docstrings are those of the locked environment.
_DOCSTRINGS = Recipe(
    "docstrings",
    "the docstrings of the installed packages, by the recipe tuned on them",
    clip_norm=1.2,
    population=2511,
)
_STACKOVERFLOW = Recipe(
    "stackoverflow",
    "StackOverflow, by the recipe of the papers and the server learning rate of BandMF App. I's "
    "rule",
    clip_norm=1.0,
    population=342_477,
    follows_rate_rule=True,
)


def recipe_of(dataset: str | None, population: int) -> Recipe | None:
    """Returns the recipe of a data set.

    Args:
      dataset: ``docstrings``, ``stackoverflow``, the path of a file, or None to tell it by the
        population.
      population: The clients of the plan.

    Returns:
      The recipe; None if no data set is named and none is known by its population.
    """
    for known in (_DOCSTRINGS, _STACKOVERFLOW):
        if dataset == known.dataset or (dataset is None and population == known.population):
            return known
    if dataset is None:
        return None
    description = f"{dataset}, by the recipe that was tuned on docstrings: a place to begin tuning "
    return Recipe(dataset, f"{description}learning rates and clip norm", _DOCSTRINGS.clip_norm)


@dataclasses.dataclass(frozen=True)
class Step:
    """A command of the shell, or lines of Python.

    Attributes:
      command: What to type.
      language: ``shell`` or ``python``.
      is_template: Whether it does not run before something is filled in.
      notes: Sentences that must be read with it: what to fill in, and what the guarantee
        depends on.
      sampler: The Python expression of the sampler that has to draw the batches; None
        where clients are not sampled.
    """

    command: str
    language: str = "shell"
    is_template: bool = False
    notes: tuple[str, ...] = ()
    sampler: str | None = None

    def lines(self) -> list[str]:
        """Returns the command below its notes, which are comments in both languages."""
        comments = textwrap.wrap(
            " ".join(self.notes), _LINE_LENGTH, initial_indent="# ", subsequent_indent="# "
        )
        return [*comments, *self.command.splitlines()]

    def alone(self) -> str:
        """Returns the command; Python keeps its notes, with the conditions of the guarantee."""
        is_python = self.language == "python"
        return f"{self.command}  # {' '.join(self.notes)}" if is_python else self.command


def steps_of(plan: Plan, recipe: Recipe | None, directory: str, again: str | None) -> list[Step]:
    """Returns the commands and the Python code that run the recommended candidate.

    Privacy parameters are printed in full: rounded ones are those of another guarantee.

    Args:
      plan: The plan.
      recipe: How to train; None for a template that leaves the data set open.
      directory: Of the candidate's checkpoint.
      again: The command of the plan without its output; None if the checkpoint is there already.

    Returns:
      The steps, in their order.
    """
    setting, chosen = plan.setting, plan.recommended
    mechanism, clients = chosen.mechanism, setting.clients_per_round
    scheme, storage = mechanism.sampling, None
    sampler = None
    if scheme is not None:
        # A plan without a limit on time may choose, and write, another scheme.
        drawn = "mechanism.sampling" if plan.skipped else f"mfa.participation.{scheme!r}"
        sampler = f"{drawn}.sampler(seed={_SECRET_SEED})"
    condition = (
        f"{pair(setting.epsilon, setting.delta, '.6g')}-DP only if "
        f"{mechanism.participation.condition(sampler)}"
    )
    if again is not None and chosen.variant.factorization is not None:
        own = chosen.variant.options["checkpoint"]
        return [step_of_checkpoint(own, mechanism, clients, condition, is_saved=False)]
    unlimited = costs.choose(mechanism.factorization.noise_recursion(), setting.model_size)
    if unlimited.storage is not chosen.cost.storage:
        # The limit of disk decides where the noise is kept.
        storage = chosen.cost.storage.value
    steps = [] if again is None else _save(plan, directory, again)
    flags = mechanism.participation.run_flags()
    if flags is not None:
        # Flags that the Mechanism determines are left out.
        words = [] if "clients_per_round" in flags else [f"--clients_per_round={clients}"]
        words.append(f"--delta={setting.delta!r}")
        if recipe is not None and recipe.follows_rate_rule:
            words.append(f"--server_learning_rate={chosen.server_learning_rate:.4g}")
        words += [] if storage is None else [f"--noise_storage={storage}"]
        steps.append(_train(recipe, directory, setting.population, words))
    clip_norm = _CLIP_NORM_TO_BEGIN_WITH if recipe is None else recipe.clip_norm
    lines = _aggregator(f"mfa.load({directory!r})", clients, clip_norm, storage)
    notes = (condition, *([_NOTE_ON_CLIP_NORM] if recipe is None else []))
    return [*steps, Step(lines, "python", notes=notes, sampler=sampler)]


def _save(plan: Plan, directory: str, again: str) -> list[Step]:
    """The commands that save the recommended mechanism."""
    setting, chosen, quoted = plan.setting, plan.recommended, shlex.quote(directory)
    scheme, variant = chosen.mechanism.sampling, chosen.variant
    if scheme is not None:
        # The certificate is for one matrix, and for no other of the same name.
        note = (
            "Writes the matrix that the certificate is for; its guarantee is not that of another."
        )
        if scheme.has_groups:
            note = "Writes the mechanism, with the scheme that draws its clients."
        if plan.skipped:
            note = (
                "Without a time limit it may choose another mechanism, with a scheme of its own: "
                "the one that it writes counts. --output= beside --time_limit= saves the one of "
                "this plan."
            )
        return [Step(f"{again} --output={quoted}", notes=(note,))]
    target = f"--target_epsilon={setting.epsilon!r}"
    if setting.rho is not None:
        target = f"--target_rho={setting.rho!r}"
    if setting.noise_multiplier is not None:
        target = f"--noise_multiplier={setting.noise_multiplier!r}"
    target += f" --delta={setting.delta!r} --output={quoted}"
    schema = chosen.mechanism.schema.factorize_flags()
    own = f"{_factorize(variant, setting)} {schema}"
    if variant.base is None:
        return [Step(f"{own} {target}")]
    base = shlex.quote(f"{directory}_base")
    return [
        Step(f"{_factorize(variant.base, setting)} {schema} --output={base}"),
        Step(f"{own} --base_checkpoint={base} {target}"),
    ]


def _train(recipe: Recipe | None, directory: str, population: int, words: Sequence[str]) -> Step:
    dataset = _PLACEHOLDER if recipe is None else shlex.quote(recipe.dataset)
    command = f"run-stackoverflow --dataset={dataset} --checkpoint={shlex.quote(directory)}"
    notes: tuple[str, ...] = (
        f"A template: put the path of a .sqlite file with your {population} clients "
        f"in the place of {_PLACEHOLDER} (make-text-dataset makes one), or name it by mf-plan "
        "--dataset.",
        "Add --client_learning_rate, --server_learning_rate and --clip_norm once you have "
        "tuned them: the defaults were tuned on another data set.",
    )
    if recipe is not None:
        notes = (f"Trains on {recipe.description}.",)
    return Step(" ".join([command, *words]), is_template=recipe is None, notes=notes)


def _flags_of(variant: Variant, setting: Setting) -> dict[str, Any]:
    """The flags of ``mf-factorize`` that options stand for, with the file of weights."""
    return {
        name: setting.weights_file if isinstance(value, tuple) else value
        for name, value in variant.options.items()
    }


def _factorize(variant: Variant, setting: Setting) -> str:
    flags = _flags_of(variant, setting).items()
    words = (f" --{name}={shlex.quote(str(value))}" for name, value in flags)
    rounds = f"--num_rounds={setting.num_rounds}"
    return f"mf-factorize --mechanism={variant.kind} {rounds}{''.join(words)}"


def step_of_checkpoint(
    directory: str,
    mechanism: Mechanism,
    clients_per_round: int | None,
    condition: str,
    *,
    is_saved: bool,
) -> Step:
    """Returns the Python code that uses an existing checkpoint.

    Args:
      directory: Of the checkpoint.
      mechanism: That of its factorization.
      clients_per_round: The cohort size; None for a template that leaves it open.
      condition: What the guarantee depends on.
      is_saved: Whether the checkpoint has the mechanism, and not its factorization alone.
    """
    made = f"mfa.load({directory!r})"
    if not is_saved:
        kind = "mfa.Mechanism" + (".of_one_schema" if mechanism.extends else "")
        made = (
            f"{kind}(mfa.checkpoints.load({directory!r}), "
            f"mfa.participation.{mechanism.sampling or mechanism.schema!r}, "
            f"{mechanism.noise_multiplier!r})"
        )
    notes = [condition, _NOTE_ON_CLIP_NORM]
    if clients_per_round is None:
        notes.append("A template: put the size of your cohorts in the place of None.")
    lines = _aggregator(made, clients_per_round, _CLIP_NORM_TO_BEGIN_WITH)
    return Step(lines, "python", clients_per_round is None, tuple(notes))


def _aggregator(
    mechanism: str, clients_per_round: int | None, clip_norm: float, storage: str | None = None
) -> str:
    """Two lines of Python: the mechanism, of an expression, and its aggregator."""
    arguments = ["mechanism", f"clip_norm={clip_norm!r}", f"clients_per_round={clients_per_round}"]
    arguments += [] if storage is None else [f"noise_storage={storage!r}"]
    return f"mechanism = {mechanism}\naggregator = mfa.mf_dp_aggregator({', '.join(arguments)})"


def condition_of(mechanism: Mechanism) -> str:
    """Returns the condition that devices or a data centre have to meet, to follow "only if".

    Args:
      mechanism: The mechanism; a sampling scheme of it draws clients.
    """
    scheme: SamplingScheme | None = mechanism.sampling
    sampler = None if scheme is None else f"mfa.participation.{scheme!r}.sampler"
    return mechanism.participation.condition(sampler and f"{sampler}(seed={_SECRET_SEED})")


def fields_of(candidate: Candidate, setting: Setting, *, is_recommended: bool) -> dict[str, Any]:
    """Returns a candidate as JSON has it.

    Args:
      candidate: The candidate.
      setting: That of the plan.
      is_recommended: Whether the plan recommends it.
    """
    mechanism, errors = candidate.mechanism, candidate.errors
    scheme, bound = mechanism.sampling, candidate.lower_bound
    name = candidate.name_with_sampling
    return {
        "mechanism": candidate.kind,
        "name": f"{name}, fixed epochs" if mechanism.schema.is_evenly_spaced else name,
        "num_bands": candidate.num_bands,
        "options": _flags_of(candidate.variant, setting),
        "participation": str(mechanism.schema),
        "amplified": scheme is not None,
        "sampling": None if scheme is None else scheme.to_dict(),
        "condition": condition_of(mechanism),
        "is_estimate": candidate.is_estimate,
        "rmse": errors.rmse,
        "max_error": errors.max_error,
        "planned_error": candidate.planned_error,
        "noise_multiplier": mechanism.noise_multiplier,
        "effective_rmse": candidate.effective_rmse,
        "max_effective_error": candidate.max_effective_error,
        "effective_error": candidate.effective_error,
        "rmse_over_lower_bound": None if bound is None else errors.rmse / bound.rmse,
        "error_over_lower_bound": candidate.over_lower_bound,
        "memory_gb": candidate.kept_bytes / 1e9,
        "disk_gb": candidate.cost.disk_bytes / 1e9,
        "working_memory_gb": candidate.cost.memory_bytes / 1e9,
        "noise_storage": candidate.cost.storage.value,
        "seconds_per_round": candidate.cost.seconds_per_round,
        "server_learning_rate": candidate.server_learning_rate,
        "recommended": is_recommended,
    }


def _table(
    setting: Setting, candidates: Sequence[Mapping[str, Any]], show_rates: bool
) -> list[list[str]]:
    """The names of the columns, and a row for each of the :func:`fields_of` candidates."""
    words = words_of(setting.error)
    errors = {words.column: "effective_error", "effective RMSE": "effective_rmse"}
    columns = {name: (field, ".4g") for name, field in errors.items()}
    columns |= {
        "worst round": ("max_effective_error", ".4g"),
        words.planned: ("planned_error", ".5g"),
        "noise mult.": ("noise_multiplier", ".5g"),
        "over bound": ("error_over_lower_bound", ".3f"),
        "noise GB": ("memory_gb", ".3g"),
        "disk GB": ("disk_gb", ".3g"),
        "s/round": ("seconds_per_round", ".2g"),
    }
    columns |= {"server rate": ("server_learning_rate", ".4g")} if show_rates else {}
    rows = [["mechanism", *columns]]
    for each in candidates:
        row = [each["name"]]
        for field, form in columns.values():
            value = each[field]
            about = _ABOUT if each["is_estimate"] and field in _ESTIMATED else ""
            if value is None:
                row.append("-")
            elif field == "noise_multiplier":
                row.append(about + rounded_up(value, ".3g" if about else form))
            else:
                row.append(f"{about}{value:{form}}")
        rows.append(row)
    return rows


_ESTIMATED = ("effective_error", "effective_rmse", "max_effective_error", "noise_multiplier")


def _remark_on_estimates(candidates: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines that explain the mark of estimates; none where there are none."""
    if not any(each["is_estimate"] for each in candidates):
        return []
    return [
        f"Rows with {_ABOUT} are rough estimates, which no guarantee may be stated of. The noise "
        "multiplier of the",
        "recommended row is certified.",
    ]


def text(
    plan: Plan,
    candidates: Sequence[Mapping[str, Any]],
    assumes_size: bool,
    steps: Sequence[Step],
    show_rates: bool,
) -> str:
    """Returns the text that is printed.

    Args:
      plan: The plan.
      candidates: The :func:`fields_of` of its candidates.
      assumes_size: Whether the size of the model is the default.
      steps: What a user types to run it.
      show_rates: Whether the last column has server learning rates.
    """
    rows = _table(plan.setting, candidates, show_rates)
    marks = [" ", *("*" if each["recommended"] else " " for each in candidates)]
    marked = [[f"{mark} {row[0]}", *row[1:]] for mark, row in zip(marks, rows, strict=True)]
    sections = [
        _setting_lines(plan.setting, assumes_size, plan.recommended),
        _aligned(marked),
        _remark_on_estimates(candidates),
        [f"Recommended: {plan.reason}"],
    ]
    limit = "Skipped for lack of time (--time_limit=0 computes and caches them):"
    for title, found in (("Infeasible:", plan.infeasible), (limit, plan.skipped)):
        lines = [f"  {name} {reason}" for name, reason in found.items()]
        sections.append([title, *lines] if lines else [])
    sections.append(["To run it:"])
    sections += [[f"  {line}" for line in step.lines()] for step in steps]
    return "\n\n".join("\n".join(section) for section in sections if section)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table: names at the left, then columns of numbers."""
    first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    lines = []
    for name, *numbers in rows:
        cells = (f"{each:>{width}}" for each, width in zip(numbers, others, strict=True))
        lines.append("  ".join([f"{name:<{first}}", *cells]).rstrip())
    return lines


def _setting_lines(setting: Setting, assumes_size: bool, chosen: Candidate) -> list[str]:
    """The setting of a plan: rounds and clients, the target, and limits of noise."""
    population = setting.population
    who = f"{setting.sampling} sampling from {population} clients"
    if setting.participation is not None:
        who = f"{population} clients with timers: {setting.participation}"
    elif setting.sampling == planning.ANY_SAMPLING:
        who = f"{population} clients that take part in any way"
    asked = "target "
    if setting.noise_multiplier is not None:
        asked = f"noise multiplier {setting.noise_multiplier!r} of every mechanism, which is "
    elif setting.rho is not None:
        asked = f"target rho = {rounded_up(setting.rho, '.6g')} (approximate zCDP), which is "
    model = f"model of {setting.model_size} parameters"
    memory, disk = setting.noise_memory, setting.noise_disk
    assert disk is not None
    kept = "any amount of noise" if memory is None else f"at most {memory / 1e9:g} GB of noise"
    lines = [
        f"{counted(setting.num_rounds, 'round')} of "
        f"{counted(setting.clients_per_round, 'client')}, {who}",
        f"{asked}{pair(setting.epsilon, setting.delta, '.6g')}-DP for every "
        f"client (zero-out){'' if assumes_size else f'; {model}'}",
        *_conditions_of_epsilon(setting, chosen),
        f"{kept} between rounds, and at most {disk / 1e9:g} GB of files (--noise_disk_gb)",
    ]
    if assumes_size:
        lines.append(f"GB and s/round are for a {model} (--model_size)")
    if setting.error != "mean":
        file = setting.error if isinstance(setting.error, str) else setting.weights_file
        compared = words_of(setting.error).compared
        lines.append(f"made for and compared by {compared} (--error={shlex.quote(file)})")
    return lines


def _conditions_of_epsilon(setting: Setting, chosen: Candidate) -> list[str]:
    """Conditions of the epsilon of a noise multiplier; none if there is a target."""
    timers = setting.participation
    if setting.noise_multiplier is None or timers is None:
        return []
    most = timers.most_participations(setting.num_rounds)
    if most == setting.num_rounds:
        return ["this epsilon is that of a client in every round: no timer is needed"]
    separation, population = timers.separation_in(setting.num_rounds), setting.population
    largest, often = "", f", and so at most {counted(most, 'participation')}"
    if separation == population // setting.clients_per_round:
        largest = f" (the largest that {population} clients can fill)"
    if timers.limit is not None:
        often = f" and --max_participations={timers.limit}"
    stated = "so little noise that no finite epsilon is accounted for"
    epsilon = epsilon_in_every_round(setting, chosen.mechanism)
    if math.isfinite(epsilon):
        stated = f"epsilon {rounded_up(epsilon, '.6g')}"
    return [
        "this epsilon holds only if a timer on every device enforces "
        f"--separation={separation}{largest}{often}",
        f"without timers, a client in every round has {stated} ({chosen.name})",
    ]


def epsilon_in_every_round(setting: Setting, mechanism: Mechanism) -> float:
    """Returns the epsilon of a client that no timer keeps out of any round.

    Args:
      setting: Of a plan for timers.
      mechanism: Of one of its candidates.

    Returns:
      The epsilon at the plan's delta, or an upper bound; infinity for so little noise that none is
      stated.
    """
    rounds = setting.num_rounds
    in_all = ObservedParticipation(rounds, None, 1, rounds)
    return guarantees.worst_case(mechanism.guarantee(setting.delta), in_all).epsilon


def write_page(
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
      candidates: The ``fields_of`` of its candidates.
      guarantee: Of what it recommends.
      steps: What a user types to run it; the notes of the last say what the guarantee depends on.
      show_rates: Whether the table has server learning rates.
      values: The parsed flags; ``report`` is the file.

    Raises:
      CommandError: If it cannot be written.
    """
    # Matplotlib takes a second to import, and pages alone need it.
    from mf_aggregators.commands import pages

    setting, chosen = plan.setting, plan.recommended
    # The mark of the recommended row is its colour.
    columns, *rows = _table(setting, candidates, show_rates)
    pages.write(
        "mf-plan",
        values,
        "plan.html",
        title=f"A plan for {setting.num_rounds} rounds of {setting.clients_per_round} clients",
        plan=plan,
        setting=_setting_lines(setting, not values["model_size"].present, chosen),
        attacker=attackers.rates_sentence(guarantee),
        columns=columns,
        rows=rows,
        marked=plan.candidates.index(chosen),
        remark=" ".join(_remark_on_estimates(candidates)),
        steps=steps,
        pictures={"comparison": _comparison(plan, [each["name"] for each in candidates])},
    )


def _is_independent(candidate: Candidate) -> bool:
    recursion = candidate.mechanism.factorization.noise_recursion()
    return recursion.floats_per_parameter + recursion.rows_of_z_per_round == 1


def _comparison(plan: Plan, names: Sequence[str]) -> list[Any]:
    """Bars of the errors, and curves of the recommended and of the best of each mechanism."""
    from mf_aggregators import figures
    from mf_aggregators.commands import pages

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
        pages.Picture(
            errors,
            f"{title}: what the noise does to a parameter after a round of SGD with learning rate "
            f"and clip norm 1, {words.rounds}. {own} has {chosen.effective_error:.4g}.",
        ),
        pages.Picture(
            by_round,
            "Standard deviation of the noise in a parameter after each round. The worst round of "
            f"{own} has {chosen.max_effective_error:.4g}.",
        ),
    ]
