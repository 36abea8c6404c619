"""The steps that a plan prints: commands to run, and the aggregator for one's own program."""

import dataclasses
import shlex
import textwrap
from typing import Any

from mf_aggregators.commands.training_recipes import TrainingRecipe
from mf_aggregators.mechanism import Mechanism
from mf_aggregators.noise import costs
from mf_aggregators.noise.costs import NoiseStorage
from mf_aggregators.participation import SamplingScheme
from mf_aggregators.planning import Plan
from mf_aggregators.printed_guarantees import pair

# In place of the data set in a template.
PLACEHOLDER = "YOUR_DATASET"
# Where a plan knows nothing of the data.
_CLIP_NORM_TO_BEGIN_WITH = 1.0
_NOTE_ON_CLIP_NORM = (
    f"clip_norm={_CLIP_NORM_TO_BEGIN_WITH!r} is a place to begin: fill in the L2 norm that suits "
    "your updates. The guarantee does not depend on it."
)
_LINE_LENGTH = 100


@dataclasses.dataclass(frozen=True)
class Step:
    """A command of the shell, or an expression of Python.

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
        return [*comments, self.command]

    def to_dict(self) -> dict[str, Any]:
        """Returns the step as JSON has it."""
        return dataclasses.asdict(self)


def of(plan: Plan, recipe: TrainingRecipe | None, directory: str, factorize: bool) -> list[Step]:
    """Returns what a user types to run the recommended candidate.

    Privacy parameters are printed in full: rounded ones are those of another guarantee.

    Args:
      plan: The plan.
      recipe: How to train; None for a template that leaves the data set open.
      directory: Of the candidate's checkpoint.
      factorize: Whether the checkpoint is still to be made.

    Returns:
      The steps, in their order.
    """
    steps = _factorize(plan, directory) if factorize else []
    # The bands of a sampling scheme are those of the checkpoint.
    clients = plan.recommended.mechanism.participation.run_flags()
    if clients is not None:
        steps.append(_train(plan, recipe, directory, clients))
    return [*steps, _aggregator(plan, recipe, directory)]


def as_strings(steps: list[Step]) -> list[str]:
    """Returns the commands alone; what a guarantee depends on stays with its aggregator."""
    return [
        f"{step.command}  # {' '.join(step.notes)}" if step.language == "python" else step.command
        for step in steps
    ]


def _factorize(plan: Plan, directory: str) -> list[Step]:
    chosen = plan.recommended
    scheme = chosen.mechanism.sampling
    if scheme is not None and scheme.depends_on_matrix:
        # The certificate is for one matrix, and for no other of the same name.
        return [_plan_again(plan, directory)]
    rounds, schema = plan.setting.num_rounds, chosen.mechanism.schema.factorize_flags()
    steps, base = [], ""
    if chosen.base is not None:
        kind, options = chosen.base
        base_directory = shlex.quote(f"{directory}_base")
        steps.append(
            _shell(
                f"mf-factorize --mechanism={kind} --num_rounds={rounds}",
                *(f"--{name}={value}" for name, value in options),
                f"{schema} --output={base_directory}",
            )
        )
        base = f"--base_checkpoint={base_directory}"
    own = _shell(
        f"mf-factorize --mechanism={chosen.kind} --num_rounds={rounds}",
        *(f"--{name}={value}" for name, value in chosen.options),
        schema,
        base,
        f"--output={shlex.quote(directory)}",
    )
    return [*steps, own]


def _plan_again(plan: Plan, directory: str) -> Step:
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
        f"--output={shlex.quote(directory)}",
    )
    note = (
        "Writes the matrix that the certificate is for; its guarantee is not that of another one."
    )
    return dataclasses.replace(step, notes=(note,))


def _train(plan: Plan, recipe: TrainingRecipe | None, directory: str, clients: str) -> Step:
    setting, chosen = plan.setting, plan.recommended
    dataset = PLACEHOLDER if recipe is None else shlex.quote(recipe.dataset)
    rate = ""
    if recipe is not None and recipe.follows_rate_rule:
        rate = f"--server_learning_rate={chosen.server_learning_rate:.4g}"
    step = _shell(
        f"run-stackoverflow --dataset={dataset} --checkpoint={shlex.quote(directory)}",
        clients,
        f"--num_rounds={setting.num_rounds}",
        f"--clients_per_round={setting.clients_per_round}",
        f"--target_epsilon={setting.epsilon!r} --delta={setting.delta!r}",
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
        aggregator(
            directory,
            chosen.mechanism,
            setting.clients_per_round,
            _CLIP_NORM_TO_BEGIN_WITH if recipe is None else recipe.clip_norm,
            chosen.cost.storage if _storage_is_forced(plan) else None,
        ),
        "python",
        notes=tuple(notes),
        sampler=_sampler(chosen.mechanism.sampling),
    )


def of_checkpoint(
    directory: str, mechanism: Mechanism, clients_per_round: int | None, condition: str
) -> Step:
    """Returns what uses a checkpoint that is there already, in one's own program.

    Args:
      directory: Of the checkpoint.
      mechanism: That of its factorization.
      clients_per_round: The cohort size; None for a template that leaves it open.
      condition: What the guarantee depends on.
    """
    notes = [condition, _NOTE_ON_CLIP_NORM]
    if clients_per_round is None:
        notes.append("A template: put the size of your cohorts in the place of None.")
    return Step(
        aggregator(directory, mechanism, clients_per_round, _CLIP_NORM_TO_BEGIN_WITH),
        "python",
        is_template=clients_per_round is None,
        notes=tuple(notes),
    )


def aggregator(
    directory: str,
    mechanism: Mechanism,
    clients_per_round: int | None,
    clip_norm: float,
    storage: NoiseStorage | None = None,
) -> str:
    """Returns the expression of an aggregator; arguments are those of ``mf_dp_aggregator``."""
    arguments = [
        repr(directory),
        f"participation=mfa.participation.{mechanism.schema!r}",
        f"noise_multiplier={mechanism.noise_multiplier!r}",
        f"clip_norm={clip_norm!r}",
        f"clients_per_round={clients_per_round}",
    ]
    if storage is not None:
        arguments.append(f"noise_storage={storage.value!r}")
    return f"mfa.mf_dp_aggregator({', '.join(arguments)})"


def _storage_is_forced(plan: Plan) -> bool:
    """Whether the noise is not where it would go without a limit of disk."""
    recursion = plan.recommended.mechanism.factorization.noise_recursion()
    unlimited = costs.choose(recursion, plan.setting.model_size)
    return unlimited.storage is not plan.recommended.cost.storage


def _condition(plan: Plan) -> str:
    """Who has to do what for the guarantee to hold, in a sentence or two."""
    mechanism = plan.recommended.mechanism
    guarantee = f"{pair(plan.setting.epsilon, plan.setting.delta, '.6g')}-DP"
    sampler = _sampler(mechanism.sampling)
    return f"{guarantee} only if {mechanism.participation.condition(sampler)}"


def _sampler(scheme: SamplingScheme | None) -> str | None:
    if scheme is None:
        return None
    seed = "mfa.sampling.sampling_seeds.secret_seed()"
    return f"mfa.participation.{scheme!r}.sampler(seed={seed})"


def _shell(*words: str) -> Step:
    return Step(" ".join(word for word in words if word), "shell")
