"""The configuration of a federated run: what was asked for, as flags and as JSON."""

import dataclasses
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from absl import flags

from mf_aggregators import Mechanism, catalogue
from mf_aggregators.adaptive_clip import AdaptiveClip
from mf_aggregators.audit import one_run
from mf_aggregators.commands import facts_of_runs, mechanism_flags, stated_runs
from mf_aggregators.commands.command_line import CommandError, check_choice
from mf_aggregators.commands.flag_groups import FlagGroup
from mf_aggregators.kernel import validation
from mf_aggregators.noise import DEFAULT_SOURCE, NoiseSource, NoiseStorage
from mf_aggregators.participation import sampling_schemes
from mf_aggregators.workloads import Workload
from simulations.devices import device_behaviour
from simulations.runs import run_directory
from simulations.training.federated_task import TaskCommand

# The clip norm that is no number.
ADAPTIVE = facts_of_runs.ADAPTIVE
# The mechanism that is none at all.
NOT_PRIVATE = "none"
PREFIX_SUM, TRAINING = "prefix_sum", "training"
# A workload with all that training may have; each mechanism picks what it can be optimised for.
_TRAINING_WORKLOAD = Workload("momentum_sgd", 2, 0.5, (1.0, 0.5))
# A value of --sampling: clients take part whenever their participation timers allow it.
TIMERS = facts_of_runs.TIMERS

_SAMPLING = (
    "How the clients of a round are found. timers: any that their participation timers allow, as "
    "in cross-device training. poisson, fixed_size, shuffling: a data sampler splits the "
    "population into as many groups as C has bands, goes through them in turn, and draws within "
    "one, which amplifies the guarantee (BandMF Thm 4). truncated_poisson: as poisson, but of a "
    "batch above a largest size, a random subset of that size stays. random_allocation: each "
    "client is in one random round of every cycle of its group. They simulate the papers' "
    "centralised setting, a data centre that draws every batch itself and keeps secret who was "
    "drawn; no population of devices that decide themselves when to take part may use them. "
    "min_separation: each device whose timer allows it joins with a secret coin, the timers being "
    "in their stationary state before the first round. balls_in_bins: each device is put into one "
    "of --separation rounds of each cycle, secretly and at random. Devices can do both by "
    "themselves, batches vary in size, and the guarantee is amplified while nobody learns who took "
    "part. All but timers and balls_in_bins need a mechanism whose C has bands, with --num_bands "
    "(the fewer bands, the more amplification)."
)

# The flags of an adaptive clip norm, with the names of its parameters.
OF_ADAPTIVE = facts_of_runs.OF_ADAPTIVE
_DEFAULT: Mapping[str, Any] = types.MappingProxyType(dataclasses.asdict(AdaptiveClip()))

# The flags that say how much noise there is.
_NOISE = ("noise_multiplier", "target_epsilon", "target_rho")

_FLAG = "flag"


@dataclasses.dataclass(frozen=True)
class _Flag:
    """An option as a flag: its subject, its help, its values, and when it is checked.

    ``choices`` and ``meaning`` may be functions, for what depends on installed packages.
    """

    subject: str
    meaning: str | Callable[[], str]
    choices: Sequence[str] | Callable[[], Sequence[str]] | None = None
    is_positive: bool = False
    is_share: bool = False
    is_of_the_run: bool = True
    is_path: bool = False


def _flag(
    subject: str,
    meaning: str | Callable[[], str],
    *,
    default: Any = dataclasses.MISSING,
    **details: Any,
) -> Any:
    metadata = {_FLAG: _Flag(subject, meaning, **details)}
    return dataclasses.field(default=default, metadata=metadata)


def _of_adaptive(meaning: str, name: str) -> str:
    """The help of a flag whose default AdaptiveClip has."""
    return f"With --clip_norm={ADAPTIVE}: {meaning} Default: {_DEFAULT[name]:g}."


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig(Mapping[str, Any]):
    """Every option of a run, with the defaults of its task filled in.

    It is a mapping of all options by name, the task's own included, as ``config.json`` has them;
    those that every run has are attributes too, whose help is that of their flags. A field without
    a default gets one from the task.
    """

    cache_dir: str | None = _flag(
        "Data",
        "Where data sets are kept. Default: ~/.cache.",
        default=None,
        is_of_the_run=False,
        is_path=True,
    )
    num_rounds: int = _flag(
        "Training",
        "The rounds of training. A run that is resumed with more of them is extended, if its "
        "mechanism and its target allow that.",
        is_positive=True,
    )
    clients_per_round: int = _flag(
        "Training", "The number of clients in each round.", is_positive=True
    )
    server_learning_rate: float = _flag(
        "Training", "The learning rate of the server.", is_positive=True
    )
    client_learning_rate: float = _flag(
        "Training", "The learning rate of the clients.", is_positive=True
    )
    client_epochs: int = _flag(
        "Training", "How often a client goes through its examples of a round.", is_positive=True
    )
    batch_size: int = _flag("Training", "The number of examples in a local step.", is_positive=True)
    client_optimizer: str = _flag(
        "Training", "The optimizer of the clients.", choices=("sgd", "adam")
    )
    server_momentum: float = _flag("Training", "The momentum of the server.")
    server_warmup: float = _flag(
        "Training",
        "The share of the rounds, the first ones, in which the server's rate rises from 5 % "
        "(BandMF: 0.15).",
        is_share=True,
    )
    server_cooldown: float = _flag(
        "Training",
        "The share of the rounds, the last ones, in which the server's rate falls to 5 % "
        "(BandMF: 0.25).",
        is_share=True,
    )
    cooldown: str = _flag(
        "Training",
        "How the server's rate falls: linearly to 5 %, or at once to 15 % (both in Denisov et al. "
        "Sec. 5).",
        default="linear",
        choices=("linear", "drop"),
    )
    initial_weights: str | None = _flag(
        "Training",
        "The weights that training begins with: a file that Keras wrote (.keras, .h5) of the same "
        "model, or the directory of a run that has ended. Its SHA-256 goes into the privacy "
        "statement. Needs --public_data. Default: random weights.",
        default=None,
        is_path=True,
    )
    public_data: str | None = _flag(
        "Privacy",
        "What was used besides the clients' data, in a few words, as the privacy statement says "
        "it: what --initial_weights were trained on. Nobody but you knows. Default: none.",
        default=None,
    )
    trainable_layers: str | None = _flag(
        "Training",
        "The layers or weights that are trained, by name, with commas between them; the others "
        "are frozen. Updates, clipping and noise are those of the trained part. Default: all.",
        default=None,
    )
    evaluate_every: int = _flag(
        "Training", "The number of rounds between evaluations.", is_positive=True
    )
    workers: str | None = _flag(
        "Training",
        "The addresses host:port,... of TFF worker processes that train the clients, each started "
        "by start-tff-worker. Default: one process that the run starts on this machine.",
        default=None,
        is_of_the_run=False,
    )
    seed: int | None = _flag(
        "Training",
        "A seed for tests, which makes the run repeatable, noise included, and voids its "
        "guarantee. Default: secret random bits.",
        default=None,
    )
    cohort_seed: int | None = _flag(
        "Training",
        "A seed of cohorts, devices, the order of data and initial weights: runs with the same one "
        "differ in nothing but noise and what else they are asked. Noise, and what a --sampling "
        "draws, have secret seeds all the same. Default: random bits.",
        default=None,
    )
    mechanism: str = _flag(
        "Mechanism",
        "The noise: correlated by a matrix factorization (optimal is the dense optimum for single "
        "participation), independent (identity), or none at all with the same training and "
        "clipping.",
        default="banded",
        choices=lambda: [*mechanism_flags.names(for_runs=True), NOT_PRIVATE],
    )
    checkpoint: str | None = _flag(
        "Mechanism",
        "A checkpoint directory to use in place of --mechanism. That of a Mechanism, as mf-plan "
        "and mf-factorize save it, has the rounds, the participation and the noise of the run as "
        "well; what says otherwise is refused.",
        default=None,
        is_path=True,
    )
    workload: str = _flag(
        "Mechanism",
        lambda: (
            "What the mechanism's matrix is optimised for: sums of updates, with momentum and "
            "learning rates as post-processing, or this very training, with both inside the "
            "mechanism (Denisov et al., Prop. 4.2; "
            f"--mechanism={' or '.join(mechanisms_of_training())}), as far as the mechanism knows "
            "such workloads: those that know no learning rates that change have the momentum "
            "inside. Epsilon does not depend on it, but where clients draw for themselves and "
            "--noise_multiplier is given."
        ),
        default=PREFIX_SUM,
        choices=(PREFIX_SUM, TRAINING),
    )
    target_epsilon: float | None = _flag(
        "Privacy", "The epsilon of the planned guarantee.", default=None
    )
    target_rho: float | None = _flag(
        "Privacy",
        "In place of --target_epsilon: the rho of approximate zero-concentrated differential "
        "privacy of the planned guarantee. Sampling does not amplify it.",
        default=None,
    )
    delta: float = _flag("Privacy", "The delta of the guarantee, which is to be below 1 / clients.")
    clip_norm: float | str = _flag(
        "Privacy",
        "The L2 norm that each update is clipped to: a number, or adaptive for a norm that "
        "follows a quantile of the clients' norms, as noise releases it.",
    )
    clip_initial_norm: float | None = _flag(
        "Privacy",
        _of_adaptive("the norm of the first round.", "initial_norm"),
        default=None,
        is_positive=True,
    )
    clip_quantile: float | None = _flag(
        "Privacy",
        _of_adaptive(
            "the fraction of updates that are to be within the norm.", "target_unclipped_quantile"
        ),
        default=None,
    )
    clip_learning_rate: float | None = _flag(
        "Privacy",
        _of_adaptive(
            "what the logarithm of the norm moves by for each unit that the fraction is off.",
            "learning_rate",
        ),
        default=None,
    )
    clip_smallest_norm: float | None = _flag(
        "Privacy",
        f"With --clip_norm={ADAPTIVE}: the norm is never below it. Default: a thousandth of "
        "--clip_initial_norm.",
        default=None,
        is_positive=True,
    )
    clip_largest_norm: float | None = _flag(
        "Privacy",
        f"With --clip_norm={ADAPTIVE}: the norm is never above it. Default: a thousand times "
        "--clip_initial_norm.",
        default=None,
        is_positive=True,
    )
    clip_count_stddev: float | None = _flag(
        "Privacy",
        f"With --clip_norm={ADAPTIVE}: the standard deviation of the noise in the number of "
        "clients within the norm, over the sensitivity of C. Default: a twentieth of "
        "--clients_per_round, and at least twice the noise multiplier.",
        default=None,
        is_positive=True,
    )
    clip_update_period: int | None = _flag(
        "Privacy",
        _of_adaptive("the rounds between changes of the norm.", "update_period"),
        default=None,
        is_positive=True,
    )
    noise_multiplier: float | None = _flag(
        "Privacy",
        "The noise, in place of a target: the standard deviation of Z over (clip norm "
        "times the sensitivity of C).",
        default=None,
    )
    zeroing_norm: float | None = _flag(
        "Privacy",
        "The L-infinity norm above which an update is replaced by zero.",
        default=None,
        is_positive=True,
    )
    simulated_clients: int | None = _flag(
        "Privacy",
        "For estimates of accuracy: this many clients stand for --clients_per_round, with the "
        "noise scaled down in proportion (BandMF App. I). Such a run itself has the weaker "
        "guarantee of the smaller noise, and its statement says both.",
        default=None,
        is_positive=True,
    )
    sampling: str = _flag(
        "Participation",
        _SAMPLING,
        default=TIMERS,
        choices=lambda: [TIMERS, *sampling_schemes()],
    )
    separation: int | None = _flag(
        "Participation",
        "The separation b: two participations i, j of one client satisfy |i - j| >= b. "
        "Default: the largest that the population allows; with --sampling=min_separation, "
        "--num_bands. With --sampling=balls_in_bins, the number of bins, which is also the "
        "population over --clients_per_round, its default.",
        default=None,
        is_positive=True,
    )
    largest_batch: int | None = _flag(
        "Participation",
        "With --sampling=truncated_poisson, the most clients of a round: of more that come, a "
        "random subset stays. Default: what a round exceeds with a probability of at most 1e-6.",
        default=None,
        is_positive=True,
    )
    max_participations: int | None = _flag(
        "Participation",
        "The most participations of one client. Default: as many as fit.",
        default=None,
        is_positive=True,
    )
    noise_storage: str = _flag(
        "Noise",
        "Where the noise of earlier rounds is kept: in the server's state, on disk (in "
        "--noise_directory), or in the cheaper one that fits.",
        default="auto",
        choices=[storage.value for storage in NoiseStorage],
    )
    noise_directory: str | None = _flag(
        "Noise",
        "Where noise rows go if they go to disk, and a record of what noise was added to. It must "
        "be private (mode 0700) and on the machine of TFF's worker. It is a cache, and another "
        "one may be used to resume: if it is deleted, the rows are made again and the record "
        f"begins anew. Default: {run_directory.NOISE_DIRECTORY} in --output_dir.",
        default=None,
        is_of_the_run=False,
        is_path=True,
    )
    noise_source: str = _flag(
        "Noise",
        "What the noise's random bits come from: the cipher ChaCha20, or TensorFlow's Philox, "
        "which is faster and no cipher.",
        default=DEFAULT_SOURCE.value,
        choices=[source.value for source in NoiseSource],
    )
    stop_at_epsilon: float | None = _flag(
        "Privacy",
        "Ends the run before a round with which all rounds together would exceed this epsilon, "
        "under the observed participations. Default: all rounds take place.",
        default=None,
        is_positive=True,
    )
    secure_aggregation: bool = _flag(
        "Privacy",
        "Adds updates up by a secure sum, whose server sees nothing but the sum: in TFF's "
        "simulation of one, in integers of 32 bits. Nothing else of the clients is measured then, "
        "but what --private_metrics releases.",
        default=False,
    )
    private_metrics: bool = _flag(
        "Privacy",
        "Releases loss, accuracy, the fraction of clipped updates and the number of examples in "
        "training with noise, inside the guarantee, for 1 % more noise on the updates. Nothing "
        "that the run prints, writes to metrics.csv or draws is then without noise, but for "
        "evaluations of held-out and test data.",
        default=False,
    )
    largest_loss: float | None = _flag(
        "Privacy",
        "With --private_metrics: the largest mean loss of a client that counts; a larger one "
        "counts as that. The smaller it is, the less noise the loss has. Default: "
        f"{facts_of_runs.LARGEST_LOSS:g}.",
        default=None,
        is_positive=True,
    )
    largest_examples: int | None = _flag(
        "Privacy",
        "With --private_metrics: the largest number of examples of a client in a round that "
        f"counts; a larger one counts as that. Default: {facts_of_runs.LARGEST_EXAMPLES}.",
        default=None,
        is_positive=True,
    )
    audit_canaries: int | None = _flag(
        "Privacy",
        "Audits the run itself by this many canary clients, half of which take part beside the "
        "cohorts: from what was released, epsilon is bounded from below. They disturb the model a "
        "little. Default: none.",
        default=None,
        is_positive=True,
    )
    responsible: str | None = _flag(
        "Statement", "Who answers for the run.", default=None, is_of_the_run=False
    )
    model: str | None = _flag(
        "Statement", "The model and its version.", default=None, is_of_the_run=False
    )
    custody: str | None = _flag(
        "Statement",
        "Who holds the noise seed, the state of the run and the ledger, and when they are "
        "destroyed, as a sentence.",
        default=None,
        is_of_the_run=False,
    )
    other_runs: str | None = _flag(
        "Statement", stated_runs.MEANING_OF_OTHER_RUNS, default=None, is_of_the_run=False
    )
    output_dir: str | None = _flag(
        "Output",
        "The run's directory. Default: runs/<time>.",
        default=None,
        is_of_the_run=False,
        is_path=True,
    )
    write_learning_rates: str | None = _flag(
        "Output",
        "A text file to write, with the server's learning rate of each round, one a line: what "
        "mf-factorize --workload=momentum_sgd takes as --learning_rates. Nothing is trained then.",
        default=None,
        is_of_the_run=False,
        is_path=True,
    )
    name_clients: bool = _flag(
        "Output",
        "Whether privacy.json names the client that was protected least, with its rounds.",
        default=False,
        is_of_the_run=False,
    )
    others: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # What --checkpoint has, if that is more than a matrix.
    saved: Mechanism | None = None

    def __getitem__(self, name: str) -> Any:
        """Returns the value of an option."""
        return getattr(self, name) if name in NAMES else self.others[name]

    def __iter__(self) -> Iterator[str]:
        """Iterates over the names of all options."""
        return iter((*NAMES, *self.others))

    def __len__(self) -> int:
        """Returns the number of all options."""
        return len(NAMES) + len(self.others)

    @property
    def cohort(self) -> int:
        """The clients that take part in a round: in an estimate, fewer than they stand for."""
        return facts_of_runs.cohort(self)

    @property
    def simulated_share(self) -> float:
        """The clients that take part in a round over those that they stand for."""
        return self.cohort / self.clients_per_round

    @property
    def adaptive_clip(self) -> AdaptiveClip | None:
        """How the clip norm adapts to the clients that take part; None for a constant one.

        Raises:
          ValueError: If a parameter is out of its range.
        """
        return facts_of_runs.adaptive_clip(self)

    @property
    def clip(self) -> float | AdaptiveClip:
        """The clip norm, or how it adapts."""
        return self.adaptive_clip or float(self.clip_norm)

    @property
    def layers(self) -> tuple[str, ...] | None:
        """The names of the layers that are trained; None for all."""
        if self.trainable_layers is None:
            return None
        return tuple(name.strip().strip("/") for name in self.trainable_layers.split(","))

    def of_the_run(self) -> dict[str, Any]:
        """Returns the options that a run may not change when it is resumed."""
        return {name: value for name, value in self.items() if name not in NOT_OF_THE_RUN}


_FIELDS = tuple(field for field in dataclasses.fields(RunConfig) if _FLAG in field.metadata)
NAMES = tuple(field.name for field in _FIELDS)
# Flags that change nothing about a run, and may differ when it is resumed.
NOT_OF_THE_RUN = (
    "format",
    *(field.name for field in _FIELDS if not field.metadata[_FLAG].is_of_the_run),
)
# Flags that may change when a run resumes; its configuration records each change. Released sums,
# their noise and the timers do not depend on them. Evaluations are of the released model, on
# held-out data.
MAY_CHANGE = (*device_behaviour.MAY_CHANGE, "evaluate_every")
_INTEGERS, _NUMBERS = (int, int | None), (float, float | None)
# What only a task can know.
NEED_DEFAULTS = frozenset(field.name for field in _FIELDS if field.default is dataclasses.MISSING)


def _define(values: flags.FlagValues, subjects: Sequence[str], texts: Mapping[str, str]) -> None:
    """Defines the flags of some subjects; ``texts`` is the help on defaults of a task, by flag."""
    for field in _FIELDS:
        flag: _Flag = field.metadata[_FLAG]
        if flag.subject not in subjects:
            continue
        group = FlagGroup(values, flag.subject, texts)
        meaning = flag.meaning() if callable(flag.meaning) else flag.meaning
        default = None if field.default is dataclasses.MISSING else field.default
        if flag.choices is not None:
            choices = flag.choices() if callable(flag.choices) else flag.choices
            group.choice(field.name, choices, meaning, default)
        elif field.type is bool:
            group.boolean(field.name, meaning, default)
        elif field.type in _INTEGERS:
            group.integer(field.name, meaning, default)
        elif field.type in _NUMBERS:
            group.number(field.name, meaning, default)
        elif flag.is_path:
            group.path(field.name, meaning, default)
        elif field.type == float | str:
            group.number_or_word(field.name, meaning, default)
        else:
            group.string(field.name, meaning, default)


def mechanisms_of_training() -> list[str]:
    """Returns the mechanisms of runs whose matrices can have momentum inside, or more of it."""
    known = catalogue.entries()
    nearest = {
        name: known[name].nearest_workload(_TRAINING_WORKLOAD)
        for name in mechanism_flags.names(for_runs=True)
    }
    return [name for name, each in nearest.items() if each and each.name != PREFIX_SUM]


def num_bands(options: RunConfig) -> int | None:
    """Returns the bands of the mechanism that is asked for, if the options say them."""
    return catalogue.entry(options.mechanism).num_bands({"num_bands": options["num_bands"]})


def banded_mechanisms() -> list[str]:
    """Returns the mechanisms whose matrices C have bands that are known beforehand."""
    return [name for name, each in catalogue.entries().items() if each.has_known_bands]


def define_flags(values: flags.FlagValues, command: TaskCommand) -> None:
    """Defines the flags of a command that runs a task."""
    command.define_flags(values)
    texts = command.default_texts
    subjects = ["Data", "Training", "Mechanism", "Privacy", "Participation"]
    _define(values, subjects, texts)
    device_behaviour.define_flags(values)
    _define(values, ["Noise", "Statement", "Output"], texts)
    mechanism_flags.define_options(values, for_runs=True)


def of_flags(values: flags.FlagValues, command: TaskCommand) -> RunConfig:
    """Returns every option with its default for the task, checked one by one.

    With a data sampler, the noise multiplier for a target epsilon depends on the population as
    well, and stays None.

    Raises:
      CommandError: If flags exclude each other, or one that needs a default has none.
      ValueError: If a flag is out of its range.
    """
    given: dict[str, Any] = {
        name: values[name].value for name in values if not name.startswith("flagfile")
    }
    saved = mechanism_flags.saved_mechanism(given["checkpoint"])
    if saved is not None:
        given |= _flags_of(saved, values)
    defaults = command.defaults(values)
    needed = NEED_DEFAULTS | {"target_epsilon", "max_bands"}
    if missing := {name for name in needed if defaults.get(name) is None}:
        raise CommandError(
            f"the defaults of {command.name} must have {', '.join(sorted(missing))} as well."
        )
    for name, default in defaults.items():
        if name in given and given[name] is None and name != "target_epsilon":
            given[name] = default
    given["clip_norm"] = _clip_norm(given["clip_norm"])
    own = {name: given.pop(name) for name in NAMES}
    options = RunConfig(**own, others=given, saved=saved)
    _check_numbers(options)
    command.check_flags(options)
    _check_clip(options)
    _check_mechanism(options)
    _check_simulated_clients(options)
    check_choice(
        not options.secure_aggregation or options.workers is None,
        "--secure_aggregation and --workers exclude each other: a secure sum is one of all "
        "clients, and no worker may see that of its own.",
    )
    check_choice(
        options.stop_at_epsilon is None or options.simulated_clients is None,
        "--stop_at_epsilon and --simulated_clients exclude each other: the limit is for what a run "
        "really releases, and one whose clients stand for more has too little noise for it.",
    )
    for name in ("largest_loss", "largest_examples"):
        check_choice(
            options[name] is None or options.private_metrics,
            f"--{name} belongs to --private_metrics: leave it out, or release metrics with noise.",
        )
    _check_sampling(options)
    for name in ("public_data", "responsible", "model", "custody"):
        stated_runs.check_words(options[name], name)
    _check_beginning(options)
    options = _with_noise_multiplier(options, defaults["target_epsilon"])
    _check_audit(options)
    return options


def _flags_of(saved: Mechanism, values: flags.FlagValues) -> dict[str, Any]:
    """What a Mechanism says of a run, by flag, but for flags that were given."""
    name, of_clients = f"--checkpoint={values.checkpoint}", saved.participation.run_flags()
    check_choice(
        saved.extends is None,
        f"{name} is of a run that was extended: it goes on in its own directory, and a new run of "
        "that many rounds has less noise with a mechanism that was made for them.",
    )
    if of_clients is None:
        raise CommandError(
            f"{name} is a Mechanism for {saved.participation}, which this command cannot see to."
        )
    sampling = of_clients.get("sampling", TIMERS)
    for flag, own in (("mechanism", saved.factorization.mechanism), ("sampling", sampling)):
        check_choice(
            not values[flag].present or values[flag].value == own,
            f"--{flag}={values[flag].value} and {name}, a Mechanism of --{flag}={own}, exclude "
            "each other.",
        )
    found: dict[str, Any] = {"num_rounds": saved.num_rounds, **of_clients}
    if not any(values[each].present for each in _NOISE):
        found["noise_multiplier"] = saved.noise_multiplier
    return {flag: value for flag, value in found.items() if not values[flag].present}


def _check_numbers(options: RunConfig) -> None:
    for field in _FIELDS:
        flag, value, name = field.metadata[_FLAG], options[field.name], f"--{field.name}"
        if flag.is_positive and value is not None:
            is_integer = field.type in _INTEGERS
            check = validation.positive_integer if is_integer else validation.positive_number
            check(value, name)
        check_choice(not flag.is_share or 0.0 <= value <= 1.0, f"{name} must be in [0, 1].")
    check_choice(0.0 <= options.server_momentum < 1.0, "--server_momentum must be in [0, 1).")
    check_choice(
        options.server_warmup + options.server_cooldown <= 1.0,
        "--server_warmup and --server_cooldown are shares of the rounds and must not overlap: "
        "their sum is above 1.",
    )
    if options.seed is not None:
        validation.integer_at_least(options.seed, 0, "--seed")
    if options.cohort_seed is not None:
        validation.integer_at_least(options.cohort_seed, 0, "--cohort_seed")
        check_choice(
            options.seed is None,
            "--seed and --cohort_seed exclude each other: the first is one of everything.",
        )
        check_choice(
            options.audit_canaries is None,
            "--cohort_seed and --audit_canaries exclude each other: an audit holds for canaries "
            "that are drawn at random, and these follow from that seed.",
        )


def _clip_norm(value: float | str) -> float | str:
    """The value of a flag that takes a number or a word."""
    if value == ADAPTIVE:
        return value
    meaning = f"It is a number, or {ADAPTIVE}."
    try:
        number = float(value)
    except ValueError:
        raise CommandError(f"--clip_norm must be a number, found {value!r}. {meaning}") from None
    try:
        return validation.positive_number(number, "--clip_norm")
    except ValueError as error:
        raise CommandError(f"{error} {meaning}") from None


def _check_clip(options: RunConfig) -> None:
    if options.clip_norm != ADAPTIVE:
        for flag in OF_ADAPTIVE:
            check_choice(
                options[flag] is None,
                f"--{flag} belongs to --clip_norm={ADAPTIVE}: leave it out, or clip adaptively.",
            )
        return
    if options.clip_quantile is not None:
        validation.fraction(options.clip_quantile, "--clip_quantile")
    if options.clip_learning_rate is not None:
        validation.non_negative_number(options.clip_learning_rate, "--clip_learning_rate")
    initial = options.clip_initial_norm or AdaptiveClip.initial_norm
    smallest, largest = options.clip_smallest_norm, options.clip_largest_norm
    check_choice(
        (smallest is None or smallest <= initial) and (largest is None or initial <= largest),
        "--clip_initial_norm must be between --clip_smallest_norm and --clip_largest_norm, found "
        f"{initial:g}.",
    )


def _check_mechanism(options: RunConfig) -> None:
    has_checkpoint = options.checkpoint is not None
    for name in mechanism_flags.option_names_of_runs() if has_checkpoint else ():
        check_choice(
            options[name] is None,
            f"--{name} and --checkpoint exclude each other: the checkpoint has its own.",
        )
    mechanism_flags.check_options(options, options.mechanism, for_runs=True)
    of_training = mechanisms_of_training()
    check_choice(
        options.workload == PREFIX_SUM or not has_checkpoint,
        f"--workload={TRAINING} and --checkpoint exclude each other: the checkpoint has its "
        "workload. mf-factorize makes one for the learning rates that --write_learning_rates "
        "writes.",
    )
    check_choice(
        options.workload == PREFIX_SUM or options.mechanism in of_training,
        f"--workload={TRAINING} needs --mechanism={' or '.join(of_training)}: the other "
        "mechanisms are optimised for sums alone, or for nothing.",
    )


def _check_sampling(options: RunConfig) -> None:
    """Checks the flags that a sampling scheme excludes or needs."""
    sampling, mechanism = options.sampling, options.mechanism
    check_choice(
        options.largest_batch is None
        or (sampling != TIMERS and sampling_schemes()[sampling].takes_largest_batch),
        f"--largest_batch does not belong to --sampling={sampling}: it is for a scheme that cuts "
        "batches, as --sampling=truncated_poisson.",
    )
    if sampling == TIMERS:
        return
    check_choice(
        options.separation is None or not sampling_schemes()[sampling].has_groups,
        f"--separation does not belong to --sampling={sampling}: the number of bands decides "
        "there when a client may take part.",
    )
    check_choice(
        options.max_participations is None,
        f"--max_participations belongs to --sampling={TIMERS}: with --sampling={sampling} chance "
        "decides how often a client takes part.",
    )
    banded = banded_mechanisms()
    takes_any = sampling_schemes()[sampling].takes_any_matrix
    if options.checkpoint is not None or (takes_any and mechanism not in banded):
        return
    check_choice(
        mechanism in banded,
        f"--sampling={sampling} needs a banded mechanism ({', '.join(banded)}): "
        f"nothing is amplified with --mechanism={mechanism}. Use --sampling={TIMERS} with it.",
    )
    check_choice(
        num_bands(options) is not None,
        f"--sampling={sampling} needs --num_bands: fewer bands amplify the guarantee more, and "
        "more bands cancel more noise. The papers use 9 to 64 for 2052 rounds.",
    )


def _check_audit(options: RunConfig) -> None:
    canaries = options.audit_canaries
    if canaries is None:
        return
    check_choice(
        canaries <= one_run.MOST_CANARIES,
        f"--audit_canaries must be at most {one_run.MOST_CANARIES}, found {canaries}.",
    )
    check_choice(
        options.sampling == TIMERS,
        f"--audit_canaries belongs to --sampling={TIMERS}: canaries come as often as timers allow, "
        "and are not drawn.",
    )
    check_choice(
        not options.private_metrics,
        "--audit_canaries and --private_metrics exclude each other: canaries have no metrics.",
    )
    check_choice(
        options.clip_norm != ADAPTIVE,
        f"--audit_canaries needs a constant --clip_norm: one that is {ADAPTIVE} spends its noise "
        "on counts as well.",
    )
    multiplier = (options.noise_multiplier or 0.0) * options.simulated_share
    check_choice(
        multiplier > 0.0, "--audit_canaries needs noise: without it there is no claim to audit."
    )
    provable = one_run.largest_provable_mu(canaries)
    check_choice(
        provable > 1.0 / multiplier,
        f"--audit_canaries={canaries} cannot refute a noise multiplier of {multiplier:.3g}, "
        "whatever they find: use more of them.",
    )


def _check_beginning(options: RunConfig) -> None:
    """Checks where training begins, and which part of a model it is about."""
    if options.initial_weights is not None:
        check_choice(
            options.public_data is not None,
            "--initial_weights needs --public_data, what they were trained on, in a few words: the "
            "privacy statement repeats it, and nobody but you knows.",
        )
    check_choice(
        options.layers is None or all(options.layers),
        "--trainable_layers takes names of layers or weights with commas between them, found "
        f"{options.trainable_layers!r}.",
    )


def _check_simulated_clients(options: RunConfig) -> None:
    simulated = options.simulated_clients
    if simulated is None:
        return
    check_choice(
        simulated <= options.clients_per_round,
        f"--simulated_clients={simulated} stand for fewer clients, "
        f"--clients_per_round={options.clients_per_round}: give at most as many.",
    )
    check_choice(
        options.sampling == TIMERS,
        "--simulated_clients belongs to --sampling=timers: a data sampler draws its own batches.",
    )


def _with_noise_multiplier(options: RunConfig, default_epsilon: float) -> RunConfig:
    """The options with the noise that a target needs, where the population has no say in it."""
    is_given = any(options[name] is not None for name in _NOISE)
    if options.mechanism == NOT_PRIVATE and options.checkpoint is None:
        check_choice(
            not is_given,
            f"--mechanism={NOT_PRIVATE} adds no noise: it takes none of --noise_multiplier, "
            "--target_epsilon and --target_rho.",
        )
        options = dataclasses.replace(options, noise_multiplier=0.0)
    elif not is_given:
        options = dataclasses.replace(options, target_epsilon=default_epsilon)
    multiplier = mechanism_flags.noise_multiplier(options)
    if options.sampling == TIMERS:
        options = dataclasses.replace(options, noise_multiplier=multiplier)
    check_choice(
        not options.private_metrics or options.noise_multiplier != 0.0,
        "--private_metrics needs noise, and this run adds none: leave it out, or choose a "
        "mechanism with a noise multiplier above 0.",
    )
    return options
