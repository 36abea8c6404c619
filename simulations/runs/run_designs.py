"""What a run does: its mechanism, participation and noise, before TensorFlow is loaded."""

import dataclasses
import pathlib
from typing import Any

import numpy as np

from mf_aggregators import (
    accounting,
    adaptive_clip,
    catalogue,
    checkpoints,
    factorizations,
    printed_guarantees,
    workloads,
)
from mf_aggregators.adaptive_clip import AdaptiveClip, NoiseShares
from mf_aggregators.catalogue import (
    Request,
)
from mf_aggregators.commands import mechanism_flags
from mf_aggregators.commands.command_line import CommandError, check_choice
from mf_aggregators.factorizations import (
    ExtensionError,
    Factorization,
)
from mf_aggregators.noise import NoiseStorage
from mf_aggregators.participation import (
    MinSeparation,
    Participation,
    SamplingScheme,
    SingleParticipation,
    check_population,
)
from mf_aggregators.privacy import (
    amplification_conditions,
    extensions,
    guarantees,
)
from mf_aggregators.privacy.extensions import FirstPlan
from mf_aggregators.privacy.guarantees import Guarantee
from mf_aggregators.privacy.stopping_rules import StoppingRule
from simulations.runs import run_config, run_directory, run_extensions, sampled_runs
from simulations.runs.run_config import RunConfig
from simulations.runs.run_extensions import Begun
from simulations.training import learning_rate_schedules
from simulations.training.federated_task import TaskData
from simulations.training.learning_rate_schedules import Schedule


@dataclasses.dataclass(frozen=True)
class RunDesign:
    """What a run does, all defaults filled in and checked, before TensorFlow is loaded.

    Attributes:
      options: Every option, with its default for the task.
      data: The task's data.
      participation: The schema that the timers enforce; single participation, whose
        sensitivity is the largest column norm of C, if a data sampler draws the clients.
      factorization: What makes the noise.
      noise_multiplier: The noise multiplier of a cohort of ``clients_per_round``, relative to
        the sensitivity under the schema; 0 for none.
      sampling: The scheme by which a data sampler draws the clients of each round; None for
        timers.
      stopping_rule: What ends the run before an epsilon is exceeded; None for nothing.
      begun: What a run had fixed that was extended; None for others. The noise multiplier above is
        that of the whole, and the one of the options that of the first plan.
    """

    options: RunConfig
    data: TaskData
    participation: Participation
    factorization: Factorization
    noise_multiplier: float
    sampling: SamplingScheme | None = None
    stopping_rule: StoppingRule | None = None
    begun: Begun | None = None

    @property
    def first_plan(self) -> FirstPlan | None:
        """What a run that was extended began with, of the released sums; None for others."""
        if self.begun is None:
            return None
        assert self.options.noise_multiplier is not None
        first, *later = (plan.participation for plan in self.begun.plans)
        return FirstPlan(first, self.options.noise_multiplier * self._simulated_share, tuple(later))

    @property
    def earlier_plans(self) -> tuple[Guarantee, ...]:
        """The guarantees that the plans before promised, if the run was extended."""
        if self.begun is None:
            return ()
        return tuple(
            guarantees.planned(
                self.factorization.of_plan(plan.num_rounds),
                plan.participation,
                self._released_in(plan.num_rounds, plan.participation),
                self.options.delta,
            )
            for plan in self.begun.plans
        )

    def _released_in(self, num_rounds: int, participation: Participation) -> float:
        """The noise multiplier of the released sums of a plan of an extended run."""
        first, begun = self.first_plan, self.begun
        assert first is not None
        assert begun is not None
        factorization = self.factorization
        if num_rounds != factorization.num_rounds:
            factorization = factorization.of_plan(num_rounds)
        if not factorization.plans:
            return first.noise_multiplier
        known = tuple(rounds for rounds in begun.horizons if rounds < num_rounds)
        if factorization.plans != known:
            raise CommandError(
                f"the matrix of the run extends plans of {list(factorization.plans)} rounds, and "
                f"{run_directory.CONFIG_FILE} has the participation of those of {list(known)}: "
                "restore the one that is not of this run."
            )
        first = dataclasses.replace(
            first, later_participations=first.later_participations[: len(known) - 1]
        )
        options = self.options
        cohort = self.simulated_clients if options.secure_aggregation else None
        return extensions.noise_multiplier(
            factorization,
            participation,
            first,
            # The bits of an adaptive clip norm are one number more.
            num_parameters=begun.num_parameters + int(isinstance(self.clip, AdaptiveClip)),
            largest_cohort=cohort,
            storage=NoiseStorage(begun.noise_storage),
        )

    @property
    def simulated_clients(self) -> int:
        """The clients that take part in a round: fewer than they stand for, in an estimate."""
        return int(self.options.simulated_clients or self.options.clients_per_round)

    @property
    def released_noise_multiplier(self) -> float:
        """The multiplier of the released sums: smaller if few clients stand for a larger cohort."""
        return self.noise_multiplier * self._simulated_share

    @property
    def _simulated_share(self) -> float:
        return self.simulated_clients / int(self.options.clients_per_round)

    @property
    def clip(self) -> float | AdaptiveClip:
        """The clip norm, or how it adapts to the clients that are simulated."""
        clip = self.options.clip
        if not isinstance(clip, AdaptiveClip) or clip.count_stddev is None:
            return clip
        # In a fraction of fewer clients, the same noise.
        return dataclasses.replace(clip, count_stddev=clip.count_stddev * self._simulated_share)

    @property
    def noise_shares(self) -> NoiseShares | None:
        """What of the released noise is the updates' and the bits'; None for a constant norm.

        Raises:
          ValueError: If the bits have too little noise.
        """
        clip = self.clip
        if not isinstance(clip, AdaptiveClip):
            return None
        first = self.first_plan
        multiplier = self.released_noise_multiplier
        began_with = multiplier if first is None else first.noise_multiplier
        stddev = clip.count_stddev_for(began_with, self.simulated_clients)
        shares = adaptive_clip.noise_shares(began_with, stddev)
        if first is None or began_with == 0.0:
            return shares
        # The same noise, relative to the sensitivity of the whole.
        ratio = multiplier / began_with
        return dataclasses.replace(
            shares,
            update_noise_multiplier=shares.update_noise_multiplier * ratio,
            count_stddev=shares.count_stddev * ratio,
        )

    def planned_guarantee(self) -> Guarantee:
        """Returns the guarantee of all rounds of the factorization, if the plan is kept."""
        delta = self.options.delta
        if self.sampling is not None:
            return guarantees.sampled(
                self.factorization,
                self.sampling,
                self.noise_multiplier,
                delta,
                certification=amplification_conditions.default_certification(show_progress=True),
            )
        return guarantees.planned(
            self.factorization, self.participation, self.released_noise_multiplier, delta
        )


def make(
    options: RunConfig,
    data: TaskData,
    max_bands: int,
    own: pathlib.Path | None,
    own_noise_multiplier: float | None,
    begun: Begun | None = None,
) -> RunDesign:
    """Designs a run: computes or loads its factorization.

    Args:
      options: Every flag by name, checked one by one.
      data: The task's data.
      max_bands: The most bands that a mechanism gets without ``--num_bands``.
      own: The checkpoint of the run, if it has one already.
      own_noise_multiplier: The one that the run was found to need when it began, if it did.
      begun: What a run had fixed that is or was extended; its checkpoint may be of the plan before.

    Returns:
      The design.

    Raises:
      CommandError: If flags do not fit the data or one another.
      ValueError: As the library says it.
    """
    check_choice(
        options.delta < 1.0 / data.num_clients,
        f"--delta={options.delta:g} is not below 1 / {data.num_clients} clients: a mechanism "
        "that publishes one client's data outright would satisfy it.",
    )
    if options.sampling == sampled_runs.TIMERS:
        design = _under_timers(options, data, max_bands, own, begun)
    elif begun is not None:
        raise CommandError(
            f"a run with --sampling={options.sampling} cannot be extended: its batches are drawn "
            "by a scheme for all of its rounds, which its guarantee rests on. Start a new run."
        )
    else:
        design = _sampled(options, data, own, own_noise_multiplier)
    try:
        _ = design.noise_shares
    except ValueError as error:
        raise CommandError(str(error).replace("count_stddev", "--clip_count_stddev")) from None
    if options.stop_at_epsilon is None:
        return design
    try:
        rule = StoppingRule(
            design.planned_guarantee(), design.factorization, options.stop_at_epsilon
        )
    except ValueError as error:
        raise CommandError(f"--stop_at_epsilon={options.stop_at_epsilon:g}: {error}") from error
    return dataclasses.replace(design, stopping_rule=rule)


def server_rates(options: RunConfig, begun: Begun | None) -> np.ndarray:
    """Returns the server's learning rate of every round.

    Args:
      options: Every flag by name, checked.
      begun: What a run had fixed that was extended; None for others.

    Returns:
      (n,) float64. Rounds that were released before have the rate that they had.
    """
    plans = () if begun is None else begun.plans
    schedule, rate = server_schedule(options), options.server_learning_rate
    lengths = (*(plan.num_rounds for plan in plans), options.num_rounds)
    return run_extensions.joined_rates([schedule.rates(n, rate) for n in lengths], plans)


def server_schedule(options: RunConfig) -> Schedule:
    """Returns the schedule of the server's learning rate.

    Args:
      options: Every flag by name, checked.
    """
    name = "decay" if options.cooldown == learning_rate_schedules.DROP else "cooldown"
    return dataclasses.replace(
        learning_rate_schedules.by_name(name),
        warmup_share=options.server_warmup,
        cooldown_share=options.server_cooldown,
    )


def participation_of(options: RunConfig, data: TaskData) -> MinSeparation:
    """Returns the schema that the timers of a run enforce.

    Args:
      options: Every flag by name.
      data: The task's data.

    Raises:
      CommandError: If there are too few clients for a cohort.
    """
    cohort = options.clients_per_round
    separation = options.separation or min(options.num_rounds, data.num_clients // cohort)
    check_choice(
        separation > 0,
        f"{data.name} has {data.num_clients} training clients, fewer than "
        f"--clients_per_round={cohort}: a population that small cannot be what "
        "--simulated_clients stand for. Use fewer clients per round.",
    )
    return MinSeparation(separation, options.max_participations)


def _under_timers(
    options: RunConfig,
    data: TaskData,
    max_bands: int,
    own: pathlib.Path | None,
    begun: Begun | None,
) -> RunDesign:
    num_rounds, participation = options.num_rounds, participation_of(options, data)
    clients = options.simulated_clients or options.clients_per_round
    check_population(participation, num_rounds, data.num_clients, clients)
    factorization = (
        _factorization(options, participation, min(participation.separation, num_rounds, max_bands))
        if own is None
        else checkpoints.load(own)
    )
    assert options.noise_multiplier is not None
    if begun is None:
        return RunDesign(options, data, participation, factorization, options.noise_multiplier)
    return _extended(options, data, participation, factorization, begun)


def _extended(
    options: RunConfig,
    data: TaskData,
    participation: MinSeparation,
    factorization: Factorization,
    begun: Begun,
) -> RunDesign:
    """The design of a run that is extended, from the matrix of the plan before or of the whole."""
    if factorization.num_rounds < options.num_rounds:
        workload = workloads.describe(_workload(options, begun), options.num_rounds)
        try:
            factorization = factorization.extended(
                options.num_rounds, participation=participation, workload=workload
            )
        except ExtensionError as error:
            raise CommandError(f"--num_rounds={options.num_rounds}: {error}") from error
    assert options.noise_multiplier is not None
    design = RunDesign(
        options, data, participation, factorization, options.noise_multiplier, begun=begun
    )
    released = design._released_in(options.num_rounds, participation)
    design = dataclasses.replace(design, noise_multiplier=released / design._simulated_share)
    target = options.target_epsilon
    if target is not None:
        epsilon = accounting.epsilon(design.noise_multiplier, options.delta)
        check_choice(
            epsilon <= target,
            f"the noise of the run, which stays what it was, gives {options.num_rounds} rounds "
            f"epsilon {printed_guarantees.rounded_up(epsilon, '.6g')}, above "
            f"--target_epsilon={target:g}: give that epsilon as the target, or more, to extend the "
            "run, or fewer --num_rounds.",
        )
    return design


def _sampled(
    options: RunConfig,
    data: TaskData,
    own: pathlib.Path | None,
    own_noise_multiplier: float | None,
) -> RunDesign:
    participation = SingleParticipation()
    factorization = None
    if own is not None:
        factorization = checkpoints.load(own)
    elif options.checkpoint is not None:
        factorization = _loaded(options)
    # Where it can be, the noise is found, or found impossible, before a matrix is computed.
    scheme = sampled_runs.scheme_of(options, data.num_clients, factorization)
    noise_multiplier = own_noise_multiplier
    if factorization is None and sampled_runs.needs_matrix(scheme):
        factorization = _factorization(options, participation, scheme.num_bands)
    if noise_multiplier is None:
        noise_multiplier = sampled_runs.noise_multiplier(options, scheme, factorization)
    if factorization is None:
        factorization = _factorization(options, participation, scheme.num_bands)
    return RunDesign(options, data, participation, factorization, noise_multiplier, scheme)


def _loaded(options: RunConfig) -> Factorization:
    assert options.checkpoint is not None
    factorization = checkpoints.load(options.checkpoint)
    check_choice(
        factorization.num_rounds == options.num_rounds,
        f"--checkpoint={options.checkpoint} is for {factorization.num_rounds} rounds, and "
        f"--num_rounds is {options.num_rounds}: noise for other rounds than those of the run "
        "would be too much or too little. Make the two equal.",
    )
    return factorization


def _factorization(
    options: RunConfig, participation: Participation, default_bands: int
) -> Factorization:
    num_rounds, name = options.num_rounds, options.mechanism
    if options.checkpoint is not None:
        return _loaded(options)
    if name == run_config.NOT_PRIVATE:
        return factorizations.identity(num_rounds)
    mechanism = catalogue.entry(name)
    request = Request(
        num_rounds,
        workloads.describe(_workload(options, None), num_rounds),
        participation,
        mechanism_flags.given_options(options, name),
        show_progress=True,
    )
    factorization = mechanism.build(mechanism.for_run(request, default_bands))
    assert isinstance(factorization, Factorization)
    return factorization


def _workload(options: RunConfig, begun: Begun | None) -> dict[str, Any]:
    """The description of the workload that a run's matrix is optimised for."""
    if options.workload != run_config.TRAINING:
        return {"name": "prefix_sum"}
    return {
        "name": "momentum_sgd",
        "momentum": options.server_momentum,
        "learning_rates": [float(rate) for rate in server_rates(options, begun)],
    }
