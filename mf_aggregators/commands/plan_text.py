"""The text of mf-plan: the setting, a table of the candidates, and the steps to run one.

Steps are commands to run, and the aggregator for one's own program. Commands that train repeat
what ``run-stackoverflow`` needs of its recipe for a data set: recipes are tuned for the docstrings
of the installed packages, and are the papers' for StackOverflow.
"""

import dataclasses
import math
import os
import pathlib
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from mf_aggregators import planning
from mf_aggregators.catalogue import Variant
from mf_aggregators.commands.command_line import aligned, check_choice
from mf_aggregators.kernel.numbers import counted, pair, rounded_up
from mf_aggregators.mechanism import Mechanism
from mf_aggregators.noise import costs
from mf_aggregators.noise.costs import NoiseStorage
from mf_aggregators.participation import SamplingScheme
from mf_aggregators.planning import Candidate, Infeasible, Plan, Setting, Skipped
from mf_aggregators.planning.plans import ErrorName, error_name
from mf_aggregators.planning.robustness import Comparison, Regret
from mf_aggregators.privacy import guarantees
from mf_aggregators.privacy.guarantees import ObservedParticipation

DOCSTRINGS = "docstrings"
STACKOVERFLOW = "stackoverflow"

# Stands for the data set in a template.
PLACEHOLDER = "YOUR_DATASET"
# A clip norm to begin with, where a plan knows nothing of the data.
_CLIP_NORM_TO_BEGIN_WITH = 1.0
_SECRET_SEED = "mfa.participation.secret_seed()"
_NOTE_ON_CLIP_NORM = (
    f"clip_norm={_CLIP_NORM_TO_BEGIN_WITH!r} is a place to begin: fill in the L2 norm that suits "
    "your updates. The guarantee does not depend on it."
)
_LINE_LENGTH = 100
# The error that a plan is for, at sensitivity 1 and noise multiplier 1, and its effective value.
_ERRORS: Mapping[ErrorName, tuple[str, str]] = {
    "mean": ("RMSE", "effective RMSE"),
    "max": ("max error", "worst round"),
    "weights": ("weighted error", "weighted"),
}
# Further columns of the table; the last is not always shown.
_COLUMNS = (
    "noise mult.",
    "over bound",
    "noise GB",
    "disk GB",
    "s/round",
    "server rate",
)
_ABOUT = "~"


@dataclasses.dataclass(frozen=True)
class TrainingRecipe:
    """How ``run-stackoverflow`` trains on a data set.

    Attributes:
      dataset: As ``run-stackoverflow --dataset`` spells it.
      description: The data set and its recipe, in words.
      population: Its training clients; None where nobody but its owner knows.
      clip_norm: The L2 norm that its recipe clips updates to.
      follows_rate_rule: Whether its server learning rate follows the noise by the rule of
        BandMF App. I. Otherwise the recipe has one rate, which is the default of the run.
    """

    dataset: str
    description: str
    population: int | None
    clip_norm: float
    follows_rate_rule: bool


# The docstrings are those of the locked environment.
_RECIPES: Mapping[str, TrainingRecipe] = {
    DOCSTRINGS: TrainingRecipe(
        dataset=DOCSTRINGS,
        description="the docstrings of the installed packages, by the recipe tuned on them",
        population=2511,
        clip_norm=1.2,
        follows_rate_rule=False,
    ),
    STACKOVERFLOW: TrainingRecipe(
        dataset=STACKOVERFLOW,
        description="StackOverflow, by the recipe of the papers and the server learning rate of "
        "BandMF App. I's rule",
        population=342_477,
        clip_norm=1.0,
        follows_rate_rule=True,
    ),
}


def recipe_of(dataset: str | None, population: int) -> TrainingRecipe | None:
    """Returns the recipe of a data set, which its population tells where it is not named.

    Args:
      dataset: ``docstrings``, ``stackoverflow``, the path of a file, or None.
      population: The clients of the plan.

    Returns:
      The recipe; None if no data set is named and none is known by its population.

    Raises:
      CommandError: If there is no such data set, or StackOverflow has fewer clients.
    """
    if dataset is None:
        known = (each for each in _RECIPES.values() if each.population == population)
        return next(known, None)
    if dataset in _RECIPES:
        recipe = _RECIPES[dataset]
        most = recipe.population if dataset == STACKOVERFLOW else None
        check_choice(
            most is None or population <= most,
            f"--population={population} is more than the {most} training clients of "
            f"--dataset={dataset}.",
        )
        return recipe
    check_choice(
        bool(dataset) and (os.sep in dataset or bool(pathlib.PurePath(dataset).suffix)),
        f"--dataset={dataset} must be {', '.join(_RECIPES)} or the path of a .sqlite file that "
        "run-stackoverflow can train on (make-text-dataset makes one).",
    )
    return TrainingRecipe(
        dataset=dataset,
        description=f"{dataset}, by the recipe that was tuned on docstrings: a place to begin "
        "tuning learning rates and clip norm",
        population=None,
        clip_norm=_RECIPES[DOCSTRINGS].clip_norm,
        follows_rate_rule=False,
    )


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
    language: str
    is_template: bool = False
    notes: tuple[str, ...] = ()
    sampler: str | None = None

    def lines(self) -> list[str]:
        """Returns the command below its notes, which are comments in both languages."""
        comments = textwrap.wrap(
            " ".join(self.notes), _LINE_LENGTH, initial_indent="# ", subsequent_indent="# "
        )
        return [*comments, *self.command.splitlines()]

    def to_dict(self) -> dict[str, Any]:
        """Returns the step as JSON has it."""
        return dataclasses.asdict(self)


def steps_of(
    plan: Plan, recipe: TrainingRecipe | None, directory: str, factorize: bool
) -> list[Step]:
    """Returns the commands and the Python code that run the recommended candidate.

    Privacy parameters are printed in full: rounded ones are those of another guarantee.

    Args:
      plan: The plan.
      recipe: How to train; None for a template that leaves the data set open.
      directory: Of the candidate's checkpoint.
      factorize: Whether the checkpoint is still to be made.

    Returns:
      The steps, in their order.
    """
    variant = plan.recommended.variant
    if factorize and variant.factorization is not None:
        own, mechanism = variant.options["checkpoint"], plan.recommended.mechanism
        num_clients = plan.setting.clients_per_round
        return [step_of_checkpoint(own, mechanism, num_clients, _condition(plan), is_saved=False)]
    steps = _factorize(plan, directory) if factorize else []
    clients = plan.recommended.mechanism.participation.run_flags()
    if clients is not None:
        # Flags that the Mechanism determines are left out.
        size = f"--clients_per_round={plan.setting.clients_per_round}"
        cohort = "" if "clients_per_round" in clients else size
        steps.append(_train(plan, recipe, directory, cohort))
    return [*steps, _aggregator(plan, recipe, directory)]


def commands_of(steps: list[Step]) -> list[str]:
    """Returns the commands alone; the aggregator keeps the conditions of the guarantee."""
    return [
        f"{step.command}  # {' '.join(step.notes)}" if step.language == "python" else step.command
        for step in steps
    ]


def flags_of(variant: Variant, setting: Setting) -> dict[str, Any]:
    """Returns the flags of ``mf-factorize`` that options stand for, with the file of weights.

    Args:
      variant: Has the options.
      setting: That of the plan.
    """
    return {
        name: setting.weights_file if isinstance(value, tuple) else value
        for name, value in variant.options.items()
    }


def _mechanism_flags(variant: Variant, setting: Setting) -> str:
    words = (
        f"--{name}={shlex.quote(str(each))}" for name, each in flags_of(variant, setting).items()
    )
    return " ".join(
        [f"mf-factorize --mechanism={variant.kind} --num_rounds={setting.num_rounds}", *words]
    )


def _factorize(plan: Plan, directory: str) -> list[Step]:
    chosen, setting = plan.recommended, plan.setting
    if chosen.mechanism.sampling is not None:
        return [_plan_again(plan, directory, chosen.mechanism.sampling)]
    schema, base = chosen.mechanism.schema.factorize_flags(), chosen.variant.base
    own = _mechanism_flags(chosen.variant, setting)
    output = f"{_target(setting)} --output={shlex.quote(directory)}"
    if base is None:
        return [_shell(own, schema, output)]
    of_base = shlex.quote(f"{directory}_base")
    return [
        _shell(_mechanism_flags(base, setting), schema, f"--output={of_base}"),
        _shell(own, schema, f"--base_checkpoint={of_base}", output),
    ]


def _plan_again(plan: Plan, directory: str, scheme: SamplingScheme) -> Step:
    setting = plan.setting
    memory, disk = setting.noise_memory, setting.noise_disk
    step = _shell(
        f"mf-plan --num_rounds={setting.num_rounds} --population={setting.population}",
        f"--clients_per_round={setting.clients_per_round} --sampling={setting.sampling}",
        f"--target_epsilon={setting.epsilon!r} --delta={setting.delta!r}",
        f"--model_size={setting.model_size}",
        "" if plan.mechanisms is None else f"--mechanisms={','.join(plan.mechanisms)}",
        "" if memory is None else f"--noise_memory_gb={memory / 1e9!r}",
        "" if disk is None else f"--noise_disk_gb={disk / 1e9!r}",
        "" if setting.error == "mean" else f"--error={_error_flag(setting)}",
        f"--output={shlex.quote(directory)}",
    )
    # The certificate is for one matrix, and for no other of the same name.
    note = (
        "Writes the mechanism, with the scheme that draws its clients."
        if scheme.has_groups
        else "Writes the matrix that the certificate is for; its guarantee is not that of another."
    )
    if plan.skipped:
        note = (
            "Without a time limit it may choose another mechanism, with a scheme of its own: the "
            "one that it writes counts. --output= beside --time_limit= saves the one of this plan."
        )
    return dataclasses.replace(step, notes=(note,))


def _target(setting: Setting) -> str:
    """The target, or the noise in its place, as flags."""
    flag = f"--target_epsilon={setting.epsilon!r}"
    if setting.rho is not None:
        flag = f"--target_rho={setting.rho!r}"
    if setting.noise_multiplier is not None:
        flag = f"--noise_multiplier={setting.noise_multiplier!r}"
    return f"{flag} --delta={setting.delta!r}"


def _train(plan: Plan, recipe: TrainingRecipe | None, directory: str, cohort: str) -> Step:
    setting, chosen = plan.setting, plan.recommended
    dataset = PLACEHOLDER if recipe is None else shlex.quote(recipe.dataset)
    rate = ""
    if recipe is not None and recipe.follows_rate_rule:
        rate = f"--server_learning_rate={chosen.server_learning_rate:.4g}"
    step = _shell(
        f"run-stackoverflow --dataset={dataset} --checkpoint={shlex.quote(directory)}",
        cohort,
        f"--delta={setting.delta!r}",
        rate,
        f"--noise_storage={chosen.cost.storage.value}" if _storage_is_forced(plan) else "",
    )
    if recipe is not None:
        return dataclasses.replace(step, notes=(f"Trains on {recipe.description}.",))
    return dataclasses.replace(
        step,
        is_template=True,
        notes=(
            f"A template: put the path of a .sqlite file with your {setting.population} clients "
            f"in the place of {PLACEHOLDER} (make-text-dataset makes one), or name it by mf-plan "
            "--dataset.",
            "Add --client_learning_rate, --server_learning_rate and --clip_norm once you have "
            "tuned them: the defaults were tuned on another data set.",
        ),
    )


def _aggregator(plan: Plan, recipe: TrainingRecipe | None, directory: str) -> Step:
    setting, chosen = plan.setting, plan.recommended
    notes = [_condition(plan)]
    if recipe is None:
        notes.append(_NOTE_ON_CLIP_NORM)
    return Step(
        _aggregator_lines(
            f"mfa.load({directory!r})",
            setting.clients_per_round,
            _CLIP_NORM_TO_BEGIN_WITH if recipe is None else recipe.clip_norm,
            chosen.cost.storage if _storage_is_forced(plan) else None,
        ),
        "python",
        notes=tuple(notes),
        sampler=_sampler_of(plan),
    )


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
    return Step(
        _aggregator_lines(made, clients_per_round, _CLIP_NORM_TO_BEGIN_WITH),
        "python",
        is_template=clients_per_round is None,
        notes=tuple(notes),
    )


def _aggregator_lines(
    mechanism: str,
    clients_per_round: int | None,
    clip_norm: float,
    storage: NoiseStorage | None = None,
) -> str:
    """Two lines of Python: the mechanism, of an expression, and its aggregator."""
    arguments = ["mechanism", f"clip_norm={clip_norm!r}", f"clients_per_round={clients_per_round}"]
    if storage is not None:
        arguments.append(f"noise_storage={storage.value!r}")
    return f"mechanism = {mechanism}\naggregator = mfa.mf_dp_aggregator({', '.join(arguments)})"


def _storage_is_forced(plan: Plan) -> bool:
    """Whether the limit of disk decides where the noise is kept."""
    recursion = plan.recommended.mechanism.factorization.noise_recursion()
    unlimited = costs.choose(recursion, plan.setting.model_size)
    return unlimited.storage is not plan.recommended.cost.storage


def _condition(plan: Plan) -> str:
    """The conditions of the guarantee, in a sentence or two."""
    guarantee = f"{pair(plan.setting.epsilon, plan.setting.delta, '.6g')}-DP"
    return f"{guarantee} only if {condition_of(plan.recommended.mechanism, _sampler_of(plan))}"


def condition_of(mechanism: Mechanism, sampler: str | None = None) -> str:
    """Returns the condition that devices or a data centre have to meet, to follow "only if".

    Args:
      mechanism: The mechanism.
      sampler: The Python expression of the sampler that has to draw; None for that of the scheme.
    """
    return mechanism.participation.condition(sampler or _sampler(mechanism.sampling))


def _sampler_of(plan: Plan) -> str | None:
    """The sampler of a plan's mechanism; of the one that is loaded, where it may be another."""
    scheme = plan.recommended.mechanism.sampling
    if scheme is not None and plan.skipped:
        return f"mechanism.sampling.sampler(seed={_SECRET_SEED})"
    return _sampler(scheme)


def _sampler(scheme: SamplingScheme | None) -> str | None:
    if scheme is None:
        return None
    return f"mfa.participation.{scheme!r}.sampler(seed={_SECRET_SEED})"


def _shell(*words: str) -> Step:
    return Step(" ".join(word for word in words if word), "shell")


def table(
    setting: Setting, candidates: Sequence[Candidate], show_rates: bool
) -> list[tuple[str, ...]]:
    """Returns the names of the columns, and a row for each candidate.

    Args:
      setting: That of the plan.
      candidates: The candidates.
      show_rates: Whether the last column has server learning rates.
    """
    planned, effective = _ERRORS[error_name(setting.error)]
    names = dict.fromkeys((effective, "effective RMSE", "worst round"))
    rows = [("mechanism", *names, planned, *_COLUMNS), *map(_row, candidates)]
    return rows if show_rates else [row[:-1] for row in rows]


def name_of(candidate: Candidate) -> str:
    """Returns the mechanism with its options and how its clients take part."""
    if candidate.mechanism.schema.is_evenly_spaced:
        return f"{candidate.name_with_sampling}, fixed epochs"
    return candidate.name_with_sampling


def mark(candidate: Candidate) -> str:
    """Returns the mark of a number that is a rough estimate; nothing for others."""
    return _ABOUT if candidate.is_estimate else ""


def remark_on_estimates(candidates: Sequence[Candidate]) -> list[str]:
    """Returns lines that explain the mark of estimates; none where there are none."""
    if not any(candidate.is_estimate for candidate in candidates):
        return []
    return [
        f"Rows with {_ABOUT} are rough estimates, which no guarantee may be stated of. The noise "
        "multiplier of the",
        "recommended row is certified.",
    ]


def text(
    setting: Setting,
    candidates: Sequence[Candidate],
    infeasible: Sequence[Infeasible],
    assumes_size: bool,
    *,
    plan: Plan | None = None,
    steps: Sequence[Step] = (),
    show_rates: bool = False,
    comparison: Comparison | None = None,
) -> str:
    """Returns the text that is printed.

    Args:
      setting: The setting.
      candidates: The mechanisms that fit, in the order of the rows.
      infeasible: Those that do not fit.
      assumes_size: As :func:`setting_lines` takes it.
      plan: The plan; None if it was interrupted.
      steps: What a user types to run it.
      show_rates: As :func:`table` takes it.
      comparison: What matrices lose under other separations, if that was asked for.
    """
    chosen = None if plan is None else plan.recommended
    header, *rows = table(setting, candidates, show_rates)
    marks = ["*" if each is chosen else " " for each in candidates]
    rows = [(f"{mark} {row[0]}", *row[1:]) for mark, row in zip(marks, rows, strict=True)]
    sections = [
        setting_lines(setting, assumes_size, chosen),
        aligned([(f"  {header[0]}", *header[1:]), *rows]),
        remark_on_estimates(candidates),
        [] if plan is None else [f"Recommended: {plan.reason}"],
        _with_reasons("Infeasible:", infeasible),
    ]
    if plan is None:
        sections.append(["Interrupted: the others are not compared."])
    else:
        title = "Skipped for lack of time (--time_limit=0 computes and caches them):"
        sections.append(_with_reasons(title, plan.skipped))
    if comparison is not None:
        sections.append(textwrap.wrap(remark_on_separations(comparison), _LINE_LENGTH))
        of_separations = table_of_separations(comparison)
        sections.append(aligned([(f"  {row[0]}", *row[1:]) for row in of_separations]))
    if steps:
        sections.append(["To run it:"])
        sections += [[f"  {line}" for line in step.lines()] for step in steps]
    return "\n\n".join("\n".join(section) for section in sections if section)


def _with_reasons(title: str, found: Sequence[Infeasible | Skipped]) -> list[str]:
    return [title, *(f"  {each.mechanism} {each.reason}" for each in found)] if found else []


def _row(candidate: Candidate) -> tuple[str, ...]:
    bound = candidate.over_lower_bound
    about = mark(candidate)
    errors = {
        _ERRORS[error_name(candidate.error)][1]: candidate.effective_error,
        "effective RMSE": candidate.effective_rmse,
        "worst round": candidate.max_effective_error,
    }
    return (
        name_of(candidate),
        *(f"{about}{error:.4g}" for error in errors.values()),
        f"{candidate.planned_error:.5g}",
        about + rounded_up(candidate.mechanism.noise_multiplier, ".3g" if about else ".5g"),
        "-" if bound is None else f"{bound:.3f}",
        f"{candidate.kept_bytes / 1e9:.3g}",
        f"{candidate.cost.disk_bytes / 1e9:.3g}",
        f"{candidate.cost.seconds_per_round:.2g}",
        f"{candidate.server_learning_rate:.4g}" if math.isfinite(candidate.effective_rmse) else "-",
    )


def table_of_separations(comparison: Comparison) -> list[tuple[str, ...]]:
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


def remark_on_separations(comparison: Comparison) -> str:
    """Returns an explanation of the table, with the matrix of least regret."""
    said = (
        "If the separation turns out otherwise: the effective error of each matrix over that of "
        "the best one that is made for a separation, with the noise of the same target. "
    )
    least = comparison.matrices[0]
    return (
        f"{said}{least.candidate.name}, made for {_separations(least)}, loses least: at most "
        f"{100.0 * max(0.0, least.worst):.1f} %."
    )


def _separations(regret: Regret) -> str:
    return ", ".join(map(str, regret.made_for))


def setting_lines(
    setting: Setting, assumes_size: bool, chosen: Candidate | None = None
) -> list[str]:
    """Returns the setting of a plan: rounds and clients, the target, and limits of noise.

    Args:
      setting: The setting.
      assumes_size: Whether nobody said the size of the model.
      chosen: What is recommended, if anything is yet.
    """
    if setting.participation is not None:
        who = f"{setting.population} clients with timers: {setting.participation}"
    elif setting.sampling == planning.ANY_SAMPLING:
        who = f"{setting.population} clients that take part in any way"
    else:
        who = f"{setting.sampling} sampling from {setting.population} clients"
    model = f"model of {setting.model_size} parameters"
    compared = {
        "mean": [],
        "max": ["made for and compared by the error of the worst round (--error=max)"],
        "weights": [
            "made for and compared by the mean error with weights on rounds "
            f"(--error={_error_flag(setting)})"
        ],
    }
    return [
        f"{counted(setting.num_rounds, 'round')} of "
        f"{counted(setting.clients_per_round, 'client')}, {who}",
        f"{_asked(setting)}{pair(setting.epsilon, setting.delta, '.6g')}-DP for every "
        f"client (zero-out){'' if assumes_size else f'; {model}'}",
        *_conditions_of_epsilon(setting, chosen),
        _budget(setting),
        *([f"GB and s/round are for a {model} (--model_size)"] if assumes_size else []),
        *compared[error_name(setting.error)],
    ]


def _asked(setting: Setting) -> str:
    """The beginning of the line with the guarantee: its target, or its noise."""
    if setting.noise_multiplier is not None:
        return f"noise multiplier {setting.noise_multiplier!r} of every mechanism, which is "
    if setting.rho is not None:
        rho = rounded_up(setting.rho, ".6g")
        return f"target rho = {rho} (approximate zCDP), which is "
    return "target "


def _conditions_of_epsilon(setting: Setting, chosen: Candidate | None) -> list[str]:
    """Conditions of the epsilon of a noise multiplier; none if there is a target."""
    timers = setting.participation
    if setting.noise_multiplier is None or timers is None:
        return []
    most = timers.most_participations(setting.num_rounds)
    if most == setting.num_rounds:
        return ["this epsilon is that of a client in every round: no timer is needed"]
    separation = timers.separation_in(setting.num_rounds)
    is_largest = separation == setting.population // setting.clients_per_round
    largest = f" (the largest that {setting.population} clients can fill)" if is_largest else ""
    often = (
        f", and so at most {counted(most, 'participation')}"
        if timers.limit is None
        else f" and --max_participations={timers.limit}"
    )
    lines = [
        "this epsilon holds only if a timer on every device enforces "
        f"--separation={separation}{largest}{often}"
    ]
    if chosen is not None:
        epsilon = epsilon_in_every_round(setting, chosen.mechanism)
        stated = (
            f"epsilon {rounded_up(epsilon, '.6g')}"
            if math.isfinite(epsilon)
            else "so little noise that no finite epsilon is accounted for"
        )
        lines.append(f"without timers, a client in every round has {stated} ({chosen.name})")
    return lines


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
    plan = mechanism.guarantee(setting.delta)
    return guarantees.worst_case(plan, in_all).epsilon


def _budget(setting: Setting) -> str:
    memory, disk = setting.noise_memory, setting.noise_disk
    assert disk is not None
    kept = "any amount of noise" if memory is None else f"at most {memory / 1e9:g} GB of noise"
    return f"{kept} between rounds, and at most {disk / 1e9:g} GB of files (--noise_disk_gb)"


def _error_flag(setting: Setting) -> str:
    """The value of ``--error`` for a setting."""
    error = setting.error
    return error if isinstance(error, str) else shlex.quote(setting.weights_file)
