"""The configuration of a federated run, from flags and as JSON."""

import dataclasses
from collections.abc import Iterator, Mapping

from absl import flags

from mf_aggregators import Mechanism, catalogue, inputs
from mf_aggregators.adaptive_clip import AdaptiveClip
from mf_aggregators.audit import run_audit
from mf_aggregators.commands import mechanism_flags, stated_runs
from mf_aggregators.commands.command_line import CommandError, check_choice
from mf_aggregators.kernel import numbers
from mf_aggregators.noise import NoiseStorage
from mf_aggregators.participation import SCHEMES
from mf_aggregators.workloads import Workload
from simulations import flag_fields
from simulations.devices import device_behaviour
from simulations.flag_fields import flag
from simulations.training.federated_task import TaskCommand

# The value of --clip_norm for a clip norm that adapts; all other values are numbers.
ADAPTIVE = stated_runs.ADAPTIVE
# The value of --mechanism for a run without any noise.
NOT_PRIVATE = "none"
PREFIX_SUM, TRAINING = "prefix_sum", "training"
# A workload with momentum and changing rates, by which mechanisms tell which of both they can be
# optimised for.
_TRAINING_WORKLOAD = Workload("momentum_sgd", 2, 0.5, (1.0, 0.5))
# The value of --sampling for runs in which participation timers, not a sampler, decide who takes
# part.
TIMERS = stated_runs.TIMERS

# The flags of an adaptive clip norm, each with the parameter of AdaptiveClip that it sets.
OF_ADAPTIVE = stated_runs.OF_ADAPTIVE

# The flags that set the amount of noise: at most one of them may be given.
_NOISE = ("noise_multiplier", "target_epsilon", "target_rho")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig(Mapping[str, object]):
    """Every option of a run, with the defaults of its task filled in.

    It is a mapping of all options by name, the task's own included, as ``config.json`` has them;
    those that every run has are attributes too, whose texts here are the help of their flags. A
    field without a default gets one from the task.

    Attributes:
      cache_dir: Where data sets are kept. Default: ~/.cache.
      num_rounds: The rounds of training. A run that is resumed with more of them is extended, if
        its mechanism and its target allow that.
      clients_per_round: The number of clients in each round.
      server_learning_rate: The learning rate of the server.
      client_learning_rate: The learning rate of the clients.
      client_epochs: The number of passes of a client over its examples in a round.
      batch_size: The number of examples in a local step.
      client_optimizer: The optimizer of the clients.
      server_momentum: The momentum of the server.
      server_warmup: The share of the rounds, at the start, in which the server's rate rises from 5
        % (BandMF: 0.15).
      server_cooldown: The share of the rounds, at the end, in which the server's rate falls, as
        --cooldown says (BandMF: 0.25).
      cooldown: How the server's rate falls in the last rounds: linearly to 5 %, or at once to 15 %
        (both in Denisov et al. Sec. 5).
      public_data: Other data that was used besides that of the clients, in a few words for the
        privacy statement, such as the training data of initial weights. Nobody but you knows.
        Default: none.
      evaluate_every: The number of rounds between evaluations.
      workers: The addresses host:port,... of TFF worker processes that train the clients, each
        started by start-tff-worker. Default: one process that the run starts on this machine.
      seed: A seed for tests, which makes the run repeatable, including its noise, and voids its
        guarantee. Default: secret random bits.
      cohort_seed: A seed of cohorts, devices, the order of data and initial weights, to compare
        runs. The noise and the draws of a --sampling keep secret seeds. Default: random bits.
      mechanism: The noise: correlated by a matrix factorization (optimal is the dense optimum for
        single participation), independent (identity), or none at all with the same training and
        clipping.
      checkpoint: A checkpoint directory to use in place of --mechanism. A Mechanism, as mf-plan and
        mf-factorize save it, also has the rounds, the participation and the noise of the run; flags
        that contradict it are refused.
      workload: The sums for which the matrix is optimised: prefix_sum, with momentum and learning
        rates as post-processing, or training, with both inside the mechanism (Denisov et al., Prop.
        4.2); the matrices of identity and tree depend on neither.
        Epsilon depends on it only if clients draw for themselves and --noise_multiplier is given.
      target_epsilon: The epsilon of the planned guarantee.
      target_rho: In place of --target_epsilon: the rho of approximate zero-concentrated
        differential privacy of the planned guarantee. Sampling does not amplify it.
      delta: The delta of the guarantee, which must be below 1 / clients.
      clip_norm: The L2 norm to which each update is clipped: a number, or adaptive for a norm that
        follows a quantile of the clients' norms, estimated with noise.
      clip_initial_norm: With --clip_norm=adaptive: the norm of the first round.
      clip_quantile: With --clip_norm=adaptive: the fraction of updates that should be within the
        norm.
      clip_learning_rate: With --clip_norm=adaptive: the change of the norm's logarithm for each
        unit of difference between the fraction and --clip_quantile.
      clip_smallest_norm: With --clip_norm=adaptive: the smallest norm. Default: a thousandth of
        --clip_initial_norm.
      clip_largest_norm: With --clip_norm=adaptive: the largest norm. Default: a thousand times
        --clip_initial_norm.
      clip_count_stddev: With --clip_norm=adaptive: the standard deviation of the noise in the
        number of clients within the norm, divided by the sensitivity of C. Default: a twentieth of
        --clients_per_round, and at least twice the noise multiplier.
      clip_update_period: With --clip_norm=adaptive: the number of rounds between changes of the
        norm.
      noise_multiplier: In place of a target: the standard deviation of Z, divided by the clip norm
        and by the sensitivity of C.
      zeroing_norm: The L-infinity norm above which an update is replaced by zero.
      simulated_clients: For estimates of accuracy, with --sampling=timers: this number of clients
        stands for --clients_per_round, with the noise scaled down in proportion (BandMF App. I).
        Such a run itself has the weaker guarantee of the smaller noise; its statement has both
        guarantees.
      sampling: How the clients of a round are selected. timers: any clients whose participation
        timers allow it, as in cross-device training. The others amplify the guarantee while the
        draws are secret, and are not for devices that decide themselves when to participate. All
        but timers and balls_in_bins need a mechanism whose C has bands, with --num_bands (the fewer
        bands, the more amplification).
      separation: The separation b: two participations i, j of one client satisfy |i - j| >= b.
        Default: the largest with which simulated devices suffice; with --sampling=min_separation,
        --num_bands. With --sampling=balls_in_bins, the number of bins; default: the population over
        --clients_per_round.
      largest_batch: With --sampling=truncated_poisson: the most clients of a round; of more, a
        random subset stays. Default: the size that a round exceeds with a probability of at most
        1e-6.
      max_participations: With --sampling=timers: the most participations of one client. Default: as
        many as fit into the rounds.
      noise_storage: Where the noise of earlier rounds is kept: in the server's state, on disk (in
        --noise_directory), or in the cheaper one that fits.
      noise_directory: The directory of noise rows on disk, and of the record of sums that noise was
        added to. It must be private (mode 0700) and on the machine of TFF's worker. It is a cache,
        and another one may be used to resume: if it is deleted, the rows are made again and a new
        record begins. Default: noise in --output_dir.
      stop_at_epsilon: Ends the run before a round with which the epsilon of all rounds together,
        under the observed participations, would exceed this one. Default: all rounds take place.
      secure_aggregation: Adds updates up in a secure sum, so that the server sees only the sum: in
        TFF's simulation of one, in integers of 32 bits. Nothing else is then measured on clients,
        except with --private_metrics.
      private_metrics: Releases loss, accuracy, the fraction of clipped updates and the number of
        examples in training with noise, inside the guarantee, for 1 % more noise on the updates.
        Then all that the run prints, draws or writes to metrics.csv about clients has noise, except
        evaluations of held-out and test data.
      largest_loss: With --private_metrics: the largest mean loss of a client; a larger one counts
        as this one. A smaller bound needs less noise.
      largest_examples: With --private_metrics: the largest number of examples of a client in a
        round; a larger one counts as this one.
      audit_canaries: The number of canary clients with which the run audits itself, with
        --sampling=timers: half of them take part besides the cohorts, and the releases bound
        epsilon from below. They disturb the model a little. Default: no audit.
      responsible: The person or organisation that answers for the run.
      model: The model and its version.
      custody: Who holds the noise seed, the state of the run and the ledger, and when they are
        destroyed, as a sentence.
      signer: The name under which the statement is signed, as the list of signers has it.
      other_runs: Other runs on the same clients: directories of training runs or of saved
        Mechanisms, separated by commas. The statement has the guarantee of all runs together.
      output_dir: The run's directory. Default: runs/<time>.
      others: The options of the task and of devices.
      max_bands: The most bands that a mechanism gets without --num_bands.
      saved: The Mechanism in --checkpoint, if that is more than a matrix.
    """

    cache_dir: str | None = flag("Data", None, is_path=True, is_of_the_run=False)
    num_rounds: int = flag("Training", is_positive=True)
    clients_per_round: int = flag("Training", is_positive=True)
    server_learning_rate: float = flag("Training", is_positive=True)
    client_learning_rate: float = flag("Training", is_positive=True)
    client_epochs: int = flag("Training", is_positive=True)
    batch_size: int = flag("Training", is_positive=True)
    client_optimizer: str = flag("Training", choices=("sgd", "adam"))
    server_momentum: float = flag("Training", least=0.0, below=1.0)
    server_warmup: float = flag("Training", least=0.0, most=1.0)
    server_cooldown: float = flag("Training", least=0.0, most=1.0)
    cooldown: str = flag("Training", "linear", choices=("linear", "drop"))
    public_data: str | None = flag("Privacy", None)
    evaluate_every: int = flag("Training", is_positive=True)
    workers: str | None = flag("Training", None, is_of_the_run=False)
    seed: int | None = flag("Training", None, least=0)
    cohort_seed: int | None = flag("Training", None, least=0)
    mechanism: str = flag(
        "Mechanism",
        "banded",
        choices=lambda: [*mechanism_flags.MECHANISMS_OF_RUNS, NOT_PRIVATE],
    )
    checkpoint: str | None = flag("Mechanism", None, is_path=True)
    workload: str = flag("Mechanism", PREFIX_SUM, choices=(PREFIX_SUM, TRAINING))
    target_epsilon: float | None = flag("Privacy", None)
    target_rho: float | None = flag("Privacy", None)
    delta: float = flag("Privacy")
    clip_norm: float | str = flag("Privacy")
    clip_initial_norm: float | None = flag("Privacy", None, is_positive=True)
    clip_quantile: float | None = flag("Privacy", None, is_positive=True, below=1.0)
    clip_learning_rate: float | None = flag("Privacy", None, least=0.0)
    clip_smallest_norm: float | None = flag("Privacy", None, is_positive=True)
    clip_largest_norm: float | None = flag("Privacy", None, is_positive=True)
    clip_count_stddev: float | None = flag("Privacy", None, is_positive=True)
    clip_update_period: int | None = flag("Privacy", None, is_positive=True)
    noise_multiplier: float | None = flag("Privacy", None)
    zeroing_norm: float | None = flag("Privacy", None, is_positive=True)
    simulated_clients: int | None = flag("Privacy", None, is_positive=True)
    sampling: str = flag("Participation", TIMERS, choices=lambda: [TIMERS, *SCHEMES])
    separation: int | None = flag("Participation", None, is_positive=True)
    largest_batch: int | None = flag("Participation", None, is_positive=True)
    max_participations: int | None = flag("Participation", None, is_positive=True)
    noise_storage: str = flag("Noise", "auto", choices=[storage.value for storage in NoiseStorage])
    noise_directory: str | None = flag("Noise", None, is_path=True, is_of_the_run=False)
    stop_at_epsilon: float | None = flag("Privacy", None, is_positive=True)
    secure_aggregation: bool = flag("Privacy", False)
    private_metrics: bool = flag("Privacy", False)
    largest_loss: float | None = flag("Privacy", None, is_positive=True)
    largest_examples: int | None = flag("Privacy", None, is_positive=True)
    audit_canaries: int | None = flag("Privacy", None, is_positive=True)
    responsible: str | None = flag("Statement", None, is_of_the_run=False)
    model: str | None = flag("Statement", None, is_of_the_run=False)
    custody: str | None = flag("Statement", None, is_of_the_run=False)
    signer: str | None = flag("Statement", None, is_of_the_run=False)
    other_runs: str | None = flag("Statement", None, is_of_the_run=False)
    output_dir: str | None = flag("Output", None, is_path=True, is_of_the_run=False)
    others: Mapping[str, object] = dataclasses.field(default_factory=dict)
    max_bands: int
    saved: Mechanism | None = None

    def __post_init__(self) -> None:
        flag_fields.check(self, "--")

    def __getitem__(self, name: str) -> object:
        """Returns the value of an option of the run."""
        return getattr(self, name) if name in NAMES else self.others[name]

    def __iter__(self) -> Iterator[str]:
        """Iterates over the names of all options."""
        return iter((*NAMES, *self.others))

    def __len__(self) -> int:
        """Returns the number of all options."""
        return len(NAMES) + len(self.others)

    @property
    def cohort(self) -> int:
        """The number of clients in a round; with --simulated_clients, fewer than they stand for."""
        return stated_runs.RunFlags(self).cohort()

    @property
    def simulated_share(self) -> float:
        """The number of clients in a round over the number that they stand for."""
        return self.cohort / self.clients_per_round

    @property
    def adaptive_clip(self) -> AdaptiveClip | None:
        """The adaptive clip norm's parameters; None for a constant clip norm.

        Raises:
          ValueError: If a parameter is out of its range.
        """
        return stated_runs.RunFlags(self).adaptive_clip()

    @property
    def clip(self) -> float | AdaptiveClip:
        """The clip norm as a number, or the parameters of an adaptive one."""
        return self.adaptive_clip or float(self.clip_norm)

    def of_the_run(self) -> dict[str, object]:
        """Returns the options that config.json records, and that a resumed run is compared by."""
        return {name: value for name, value in self.items() if name not in NOT_OF_THE_RUN}


NAMES = tuple(flag_fields.fields_of(RunConfig))
# Flags that have no effect on a run's result, and may differ when it is resumed.
NOT_OF_THE_RUN = (
    "format",
    *(name for name, (own, _) in flag_fields.fields_of(RunConfig).items() if not own.is_of_the_run),
)
# Flags that may change when a run resumes. They cannot change rounds in the ledger: each is run
# with the values that it had, or the run is refused. --evaluate_every costs no privacy, because
# released models are evaluated on held-out data.
MAY_CHANGE = (*device_behaviour.MAY_CHANGE, "evaluate_every")
# Flags with defaults that differ from task to task, so that each task must say them.
NEED_DEFAULTS = frozenset(
    name
    for name, (_, field) in flag_fields.fields_of(RunConfig).items()
    if field.default is dataclasses.MISSING
)
# Pairs of flags that exclude each other, each with the reason.
_EXCLUSIONS = (
    ("secure_aggregation", "workers", "a worker sees the updates of its own clients"),
    (
        "stop_at_epsilon",
        "simulated_clients",
        "simulated clients have less noise than the planned ones",
    ),
    ("seed", "cohort_seed", "--seed is a seed of everything"),
    ("cohort_seed", "audit_canaries", "canaries must be drawn at random"),
    ("audit_canaries", "private_metrics", "canaries do not report metrics"),
)
# Flags that have an effect only with another flag.
_BELONG_TO = {
    **dict.fromkeys(OF_ADAPTIVE, f"--clip_norm={ADAPTIVE}"),
    **dict.fromkeys(("largest_loss", "largest_examples"), "--private_metrics"),
    **dict.fromkeys(
        ("audit_canaries", "simulated_clients", "max_participations"), f"--sampling={TIMERS}"
    ),
}


def mechanisms_of_training() -> list[str]:
    """Returns the mechanisms that can be optimised for training with momentum."""
    known = catalogue.ENTRIES
    nearest = {
        name: known[name].nearest_workload(_TRAINING_WORKLOAD)
        for name in mechanism_flags.MECHANISMS_OF_RUNS
    }
    return [name for name, each in nearest.items() if each and each.name != PREFIX_SUM]


def num_bands(options: RunConfig) -> int | None:
    """Returns the chosen mechanism's number of bands; None if the options do not say."""
    return catalogue.entry(options.mechanism).num_bands({"num_bands": options["num_bands"]})


def banded_mechanisms() -> list[str]:
    """Returns the names of mechanisms with a strategy matrix C of a known number of bands."""
    return [name for name, each in catalogue.ENTRIES.items() if each.has_known_bands]


def define_flags(values: flags.FlagValues, command: TaskCommand) -> None:
    """Defines the flags of a training command."""
    command.define_flags(values)
    defaults = {
        "largest_loss": stated_runs.LARGEST_LOSS,
        "largest_examples": stated_runs.LARGEST_EXAMPLES,
        **{flag: getattr(AdaptiveClip, name) for flag, name in OF_ADAPTIVE.items()},
    }
    texts = {
        **{flag: f"Default: {each:g}." for flag, each in defaults.items() if each is not None},
        "workload": f"{TRAINING} needs --mechanism={' or '.join(mechanisms_of_training())}.",
        "sampling": "Schemes: docs/sampling.md.",
        **command.default_texts,
    }
    subjects = ["Data", "Training", "Mechanism", "Privacy", "Participation"]
    flag_fields.define(values, RunConfig, subjects, texts)
    device_behaviour.define_flags(values)
    flag_fields.define(values, RunConfig, ["Noise", "Statement", "Output"], texts)
    mechanism_flags.define(values, "options_of_runs")


def of_flags(values: flags.FlagValues, command: TaskCommand) -> RunConfig:
    """Returns the checked configuration of a run, with the task's defaults for flags not given.

    With a data sampler, the noise multiplier for a target epsilon depends on the population as
    well, and stays None.

    Raises:
      CommandError: If flags exclude each other, or one that needs a default has none.
      ValueError: If a flag is out of its range.
    """
    given = {name: values[name].value for name in values if not name.startswith("flagfile")}
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
    options = RunConfig(
        **own, others=given, max_bands=inputs.part(defaults["max_bands"], int), saved=saved
    )
    command.check_flags(options)
    _check_together(options)
    _check_mechanism(options)
    _check_sampling(options)
    for name in ("public_data", "responsible", "model", "custody", "signer"):
        inputs.check_words(getattr(options, name), name)
    default_epsilon = numbers.positive_number(defaults["target_epsilon"], "--target_epsilon")
    options = _with_noise_multiplier(options, default_epsilon)
    _check_audit(options)
    return options


def _flags_of(saved: Mechanism, values: flags.FlagValues) -> dict[str, object]:
    """Returns the flags that a saved Mechanism determines, without those that were given."""
    name, of_clients = f"--checkpoint={values.checkpoint}", saved.participation.run_flags()
    check_choice(
        saved.extends is None,
        f"{name} belongs to an extended run, which continues only in its own directory.",
    )
    if of_clients is None:
        raise CommandError(
            f"{name} is a Mechanism for {saved.participation}, which this command cannot enforce."
        )
    sampling = of_clients.get("sampling", TIMERS)
    for each, own in (("mechanism", saved.factorization.mechanism), ("sampling", sampling)):
        check_choice(
            not values[each].present or values[each].value == own,
            f"--{each}={values[each].value} contradicts {name}, a Mechanism of --{each}={own}.",
        )
    found: dict[str, object] = {"num_rounds": saved.num_rounds, **of_clients}
    if not any(values[each].present for each in _NOISE):
        found["noise_multiplier"] = saved.noise_multiplier
    return {each: value for each, value in found.items() if not values[each].present}


def _check_together(options: RunConfig) -> None:
    """Checks that the flags fit together: some pairs exclude, others need each other."""
    for one, other, reason in _EXCLUSIONS:
        is_given = [options[name] not in (None, False) for name in (one, other)]
        check_choice(not all(is_given), f"--{one} and --{other} exclude each other: {reason}.")
    settings = {
        f"--clip_norm={ADAPTIVE}": options.clip_norm == ADAPTIVE,
        "--private_metrics": options.private_metrics,
        f"--sampling={TIMERS}": options.sampling == TIMERS,
    }
    for name, owner in _BELONG_TO.items():
        check_choice(
            options[name] is None or settings[owner],
            f"--{name} needs {owner}: leave it out, or give both.",
        )
    check_choice(
        options.server_warmup + options.server_cooldown <= 1.0,
        "--server_warmup and --server_cooldown overlap: their sum must be at most 1.",
    )
    initial = options.clip_initial_norm or AdaptiveClip.initial_norm
    smallest, largest = options.clip_smallest_norm, options.clip_largest_norm
    check_choice(
        (smallest or initial) <= initial <= (largest or initial),
        f"--clip_initial_norm={initial:g} is outside --clip_smallest_norm to --clip_largest_norm.",
    )


def _clip_norm(value: float | str) -> float | str:
    """Returns the value of --clip_norm, a number or the word adaptive."""
    if value == ADAPTIVE:
        return value
    try:
        return numbers.positive_number(float(value), "--clip_norm")
    except ValueError:
        raise CommandError(
            f"--clip_norm must be a number above 0, or {ADAPTIVE}, found {value!r}."
        ) from None


def _check_mechanism(options: RunConfig) -> None:
    has_checkpoint = options.checkpoint is not None
    for name in catalogue.OPTIONS_OF_RUNS if has_checkpoint else ():
        check_choice(
            options[name] is None,
            f"--{name} and --checkpoint exclude each other: the checkpoint has its own.",
        )
    mechanism_flags.given_options(options, options.mechanism, for_runs=True)
    of_training = mechanisms_of_training()
    check_choice(
        options.workload == PREFIX_SUM or not has_checkpoint,
        f"--workload={TRAINING} and --checkpoint exclude each other: the checkpoint has its "
        "workload. mf-factorize makes one for --workload=momentum_sgd and --learning_rates.",
    )
    check_choice(
        options.workload == PREFIX_SUM or options.mechanism in of_training,
        f"--workload={TRAINING} needs --mechanism={' or '.join(of_training)}.",
    )


def _check_sampling(options: RunConfig) -> None:
    """Checks the flags that the chosen --sampling excludes or needs."""
    sampling, mechanism = options.sampling, options.mechanism
    scheme = None if sampling == TIMERS else SCHEMES[sampling]
    check_choice(
        options.largest_batch is None
        or (scheme is not None and scheme.own_size() == "largest_batch"),
        f"--largest_batch needs a scheme that cuts batches, found --sampling={sampling}.",
    )
    check_choice(
        (options.simulated_clients or 0) <= options.clients_per_round,
        f"--simulated_clients={options.simulated_clients} is above --clients_per_round.",
    )
    if scheme is None:
        return
    check_choice(
        options.separation is None or not scheme.has_groups,
        f"--sampling={sampling} takes no --separation: use --num_bands.",
    )
    banded = banded_mechanisms()
    if options.checkpoint is not None or (scheme.takes_any_matrix and mechanism not in banded):
        return
    check_choice(
        mechanism in banded,
        f"--sampling={sampling} needs a banded mechanism ({', '.join(banded)}): "
        f"nothing is amplified with --mechanism={mechanism}. Use --sampling={TIMERS} with it.",
    )
    check_choice(
        num_bands(options) is not None,
        f"--sampling={sampling} needs --num_bands; the papers use 9 to 64 for 2052 rounds.",
    )


def _check_audit(options: RunConfig) -> None:
    canaries = options.audit_canaries
    if canaries is None:
        return
    check_choice(
        canaries <= run_audit.MOST_CANARIES,
        f"--audit_canaries must be at most {run_audit.MOST_CANARIES}, found {canaries}.",
    )
    check_choice(
        options.clip_norm != ADAPTIVE,
        f"--audit_canaries needs a constant --clip_norm, found {ADAPTIVE}.",
    )
    multiplier = (options.noise_multiplier or 0.0) * options.simulated_share
    check_choice(
        multiplier > 0.0, "--audit_canaries needs noise: without it there is no claim to audit."
    )
    check_choice(
        run_audit.mu_of_right_guesses(canaries, canaries, 0.5 * run_audit.FALSE_ALARM_RATE)
        > 1.0 / multiplier,
        f"--audit_canaries={canaries} cannot refute noise multiplier {multiplier:.3g}: use more.",
    )


def _with_noise_multiplier(options: RunConfig, default_epsilon: float) -> RunConfig:
    """Returns the options with the target's noise multiplier, if clients use timers."""
    is_given = any(options[name] is not None for name in _NOISE)
    if options.mechanism == NOT_PRIVATE and options.checkpoint is None:
        check_choice(
            not is_given,
            f"--mechanism={NOT_PRIVATE} adds no noise: leave out --{', --'.join(_NOISE)}.",
        )
        options = dataclasses.replace(options, noise_multiplier=0.0)
    elif not is_given:
        options = dataclasses.replace(options, target_epsilon=default_epsilon)
    multiplier = mechanism_flags.noise_multiplier(options)
    if options.sampling == TIMERS:
        options = dataclasses.replace(options, noise_multiplier=multiplier)
    check_choice(
        not options.private_metrics or options.noise_multiplier != 0.0,
        "--private_metrics needs noise, and this run adds none: leave it out.",
    )
    return options
