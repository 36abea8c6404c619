"""The plan of a training run, made from its configuration and directory without TensorFlow.

:class:`~simulations.runs.run_config.RunConfig` is what was asked, and a :class:`Run` what follows:
a mechanism for the data that there are, and where its clients, files and random numbers come from.
Guarantees and statements are asked of the mechanism.

The schedule of the server's learning rate is fixed before training and knows nothing of the data,
so that it can be part of the workload that a mechanism is optimised for (Denisov et al. Prop. 4.2).
A mechanism for ``workloads.momentum_sgd(n, momentum, schedule.rates(n, peak))`` has momentum and
schedule inside; one for ``workloads.prefix_sum(n)`` has both as post-processing. The run is the
same in both cases: TFF's ``build_sgdm`` under ``training_parts.rate_of_round``, which is Alg. 2 of
Denisov et al., ``m_i = momentum m_(i-1) + g_i`` and ``theta_i = theta_(i-1) - rate_i m_i``, with
the rate outside of the velocity. Only the workload of the mechanism differs.

A ramp of share s has ceil(s n) steps. Of BandMF's 2,052 rounds (App. I) the warm-up over
15 % has 308: it begins at 0.05 and reaches the full rate in round 309. The cool-down over 25 %
has 513: each of the last 513 rounds is below the full rate and the last is at 0.05.
"""

import dataclasses
import functools
import math
import os
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np

from mf_aggregators import (
    Mechanism,
    calibrate,
    catalogue,
    checkpoints,
    factorizations,
    inputs,
    workloads,
)
from mf_aggregators import participation as participations
from mf_aggregators.adaptive_clip import NoiseSplit
from mf_aggregators.commands import mechanism_flags, stated_runs
from mf_aggregators.commands.command_line import CommandError, check_choice
from mf_aggregators.factorizations import ExtensionError, Factorization
from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.claim import Guarantee
from mf_aggregators.kernel.ledger import ObservedParticipation
from mf_aggregators.participation import (
    MinSeparation,
    Participation,
    Sampler,
    SamplingScheme,
    SingleParticipation,
)
from mf_aggregators.participation.certificate_search import Certification
from mf_aggregators.planning import fleets
from mf_aggregators.privacy import guarantees
from mf_aggregators.privacy.guarantees import StoppingRule
from mf_aggregators.private_metrics import PrivateMetrics
from mf_aggregators.workloads import Workload
from simulations.devices.device_behaviour import DeviceBehaviour
from simulations.devices.device_populations import DevicePopulation
from simulations.runs import run_config, run_directory
from simulations.runs.run_config import TIMERS, RunConfig
from simulations.runs.run_directory import Horizon, RunDirectory, RunDirectoryError
from simulations.training.federated_task import TaskData

DROP = "drop"

# Tolerance for shares of rounds: those such as 0.07 are not binary fractions, and 0.07 * 100 is a
# little more than 7.
_ROUNDING_OF_SHARES = 1e-9
# Relative tolerance for entries of one workload that was computed in two ways.
_ROUNDING_OF_WORKLOADS = 1e-9


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Schedule of the server's learning rate: the rate of every round, relative to a peak.

    Where warm-up and cool-down overlap, the rate is the smaller of the two.

    Attributes:
      warmup_share: The share of the rounds over which the rate rises linearly to its peak;
        0 for none.
      cooldown_share: The share of the rounds, the last ones, in which it is below its peak;
        0 for none.
      cooldown: How it falls. ``linear``: by equal steps, to ``cooldown_factor`` in the last
        round (Denisov et al. Sec. 5, BandMF App. I). ``drop``: at once, to
        ``cooldown_factor`` (Denisov et al. Sec. 5).
      warmup_factor: The rate of the first round, relative to the peak.
      cooldown_factor: The rate of the last round, relative to the peak.

    Raises:
      ValueError: If a share or factor is out of its range, the shares exceed 1 together, or
        the cool-down has another name.
    """

    warmup_share: float = 0.0
    cooldown_share: float = 0.0
    cooldown: str = "linear"
    warmup_factor: float = 0.05
    cooldown_factor: float = 0.05

    def __post_init__(self) -> None:
        shares = self.warmup_share, self.cooldown_share
        if not all(0.0 <= share <= 1.0 for share in shares):
            raise ValueError(f"warmup_share and cooldown_share must be in [0, 1], found {shares}.")
        if sum(shares) > 1.0 + _ROUNDING_OF_SHARES:
            raise ValueError(f"warmup_share and cooldown_share are above 1 together: {shares}.")
        if self.cooldown not in ("linear", DROP):
            raise ValueError(f"cooldown must be linear or {DROP}, found {self.cooldown!r}.")
        # A rate of zero would make the workload singular.
        factors = self.warmup_factor, self.cooldown_factor
        if not all(0.0 < factor <= 1.0 for factor in factors):
            raise ValueError(f"warmup_factor and cooldown_factor must be in (0, 1]: {factors}.")

    def rates(self, num_rounds: int, peak: float) -> np.ndarray:
        """Returns the learning rate of every round.

        Args:
          num_rounds: The number of rounds n, at least 1.
          peak: The full learning rate, above 0.

        Returns:
          (n,) float64, all above 0 and at most the peak: what ``workloads.momentum_sgd`` and
          ``training_parts.rate_of_round`` take.

        Raises:
          ValueError: If an argument is out of its range.
        """
        num_rounds = numbers.positive_integer(num_rounds, "num_rounds")
        peak = numbers.positive_number(peak, "peak")
        rounds = np.arange(num_rounds)
        rising = _ramp(rounds, _steps(self.warmup_share, num_rounds), self.warmup_factor)
        steps, later = _steps(self.cooldown_share, num_rounds), rounds[::-1]
        if self.cooldown == DROP:
            falling = np.where(later < steps, self.cooldown_factor, 1.0)
        else:
            falling = _ramp(later, steps, self.cooldown_factor)
        return peak * np.minimum(rising, falling)


def _ramp(places: np.ndarray, steps: int, factor: float) -> np.ndarray:
    """Returns numbers that rise linearly from ``factor`` at place 0 to 1 at place ``steps``."""
    return factor + (1.0 - factor) * np.minimum((places + (steps == 0)) / max(steps, 1), 1.0)


def _steps(share: float, num_rounds: int) -> int:
    return math.ceil(share * num_rounds - _ROUNDING_OF_SHARES)


# Learning-rate schedules of the papers, by name. ``decay`` is at 0.15 of the rate in the last 25 %
# of the rounds, and ``cooldown`` falls linearly from 1 to 0.05 over them (both Denisov et al. Sec.
# 5); ``warmup_cooldown`` rises from 0.05 to 1 over the first 15 % as well (BandMF App. I).
SCHEDULES: Mapping[str, Schedule] = {
    "constant": Schedule(),
    "decay": Schedule(cooldown_share=0.25, cooldown=DROP, cooldown_factor=0.15),
    "cooldown": Schedule(cooldown_share=0.25),
    "warmup_cooldown": Schedule(warmup_share=0.15, cooldown_share=0.25),
}


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """The plan of a training run, checked, with all defaults filled in.

    Attributes:
      config: The configuration of the run, as its flags ask.
      data: The task's data.
      mechanism: The mechanism of the sums that are released, with all horizons of a run that was
        extended. Where few clients stand for a larger cohort, it has the smaller noise of the few.
      directory: Where states, ledger, metrics and statements go.
      seed: Seed of cohorts under timers, devices, the order of data and initial weights.
      workload: The workload that the matrix is optimised for; its checkpoint states errors for it.
      behaviour: The behaviour of the clients' devices.
      earlier_behaviours: Behaviours before flags changed, by the rounds until then, newest first.
      sampler: The sampler that draws the clients of each round; None for timers.
      horizons: The horizons before, of a run that was extended.
    """

    config: RunConfig
    data: TaskData
    mechanism: Mechanism
    directory: RunDirectory
    seed: int
    workload: Workload
    behaviour: DeviceBehaviour = dataclasses.field(default_factory=DeviceBehaviour)
    earlier_behaviours: Mapping[int, DeviceBehaviour] = dataclasses.field(default_factory=dict)
    sampler: Sampler | None = None
    horizons: tuple[Horizon, ...] = ()

    @functools.cached_property
    def guarantee(self) -> Guarantee:
        """The privacy guarantee of all planned rounds, if participations follow the plan."""
        certification = Certification.default(show_progress=True)
        return self.mechanism.guarantee(self.config.delta, certification=certification)

    @functools.cached_property
    def stopping_rule(self) -> StoppingRule | None:
        """The rule of --stop_at_epsilon that ends a run before it exceeds an epsilon, or None.

        Raises:
          ValueError: If the rule would not let the first round take place.
        """
        limit = self.config.stop_at_epsilon
        if limit is None:
            return None
        return StoppingRule(self.guarantee, limit)

    @property
    def noise_multiplier(self) -> float:
        """The noise multiplier of a cohort of ``clients_per_round``; 0 for no noise."""
        share = self.config.simulated_share
        if share == 1.0 or self.horizons:
            return self.mechanism.noise_multiplier / share
        assert self.config.noise_multiplier is not None
        return self.config.noise_multiplier

    @property
    def noise_split(self) -> NoiseSplit | None:
        """How updates, clip indicators and metrics split the noise; None for updates alone.

        Raises:
          ValueError: If the clipped count has too little noise.
        """
        return stated_runs.RunFlags(self.config).noise_split(self.mechanism)

    @property
    def private_metrics(self) -> PrivateMetrics | None:
        """The training metrics that are released with noise; None for none."""
        return stated_runs.RunFlags(self.config).private_metrics()

    @property
    def noise_directory(self) -> pathlib.Path:
        """The directory for noise rows, if they are kept on disk."""
        return pathlib.Path(self.config.noise_directory or self.directory.noise)

    @property
    def server_rates(self) -> np.ndarray:
        """(n,) float64: the server's learning rate of every round."""
        return server_rates(self.config, self.horizons)

    @property
    def training(self) -> Workload:
        """The workload of the training, with the server's momentum and learning rates."""
        return _training(self.config, self.horizons)


def plan(
    config: RunConfig,
    data: TaskData,
    directory: RunDirectory,
    *,
    seed: int = 0,
    behaviour: DeviceBehaviour | None = None,
    begun: Mapping[str, object] | None = None,
    horizons: tuple[Horizon, ...] = (),
) -> Run:
    """Plans a training run, with its mechanism, and writes nothing.

    Args:
      config: The configuration, checked flag by flag.
      data: The task's data.
      directory: The run's directory, from which a resumed run has its matrix.
      seed: See :class:`Run`.
      behaviour: The behaviour of devices; None for devices that only take part.
      begun: The ``config.json`` of a run that goes on; None for a new one.
      horizons: The earlier horizons of a run that was or is to be extended.

    Returns:
      The run. Where a scheme samples its clients, it has no sampler yet: see :func:`sampler_of`.

    Raises:
      CommandError: If flags do not fit the data or one another.
      ValueError: If the library refuses the mechanism or its noise.
    """
    check_choice(
        config.delta < 1.0 / data.num_clients,
        f"--delta={config.delta:g} is not below 1 / {data.num_clients} clients: a mechanism that "
        "publishes all data of one client would satisfy it. Use a smaller one.",
    )
    own, made_for = None, None
    # A resumed run uses the factorization in its own directory, even if the --checkpoint that it
    # came from has changed.
    if begun is not None and directory.factorization.exists():
        own, made_for = _read(directory.factorization)
    elif config.checkpoint is not None:
        own, made_for = _loaded(config)
    workload = _workload(config, horizons, made_for)
    if config.sampling == TIMERS:
        mechanism = _of_timers(config, data, own, workload, begun or {}, horizons)
    elif horizons:
        raise CommandError(
            f"a run with --sampling={config.sampling} cannot be extended: its guarantee is for all "
            "rounds of the scheme. Start a new run."
        )
    else:
        known_noise = inputs.part(begun or {}, dict).get("noise_multiplier")
        mechanism = _of_sampling(config, data, own, workload, known_noise)
    if begun is None and config.saved is not None:
        assert config.checkpoint is not None
        # With --simulated_clients the mechanism has less noise than was asked for, so that the
        # asked one is compared.
        noise = config.noise_multiplier
        mechanism_flags.check_is_saved(
            config.saved,
            config.checkpoint,
            mechanism.participation,
            mechanism.noise_multiplier if noise is None else noise,
        )
    behaviour = DeviceBehaviour() if behaviour is None else behaviour
    run = Run(config, data, mechanism, directory, seed, workload, behaviour, horizons=horizons)
    try:
        _ = run.noise_split
    except ValueError as error:
        raise CommandError(f"--clip_count_stddev: {error}") from None
    try:
        _ = run.stopping_rule
    except ValueError as error:
        raise CommandError(f"--stop_at_epsilon={config.stop_at_epsilon:g}: {error}") from error
    return run


def with_separation(
    config: RunConfig, data: TaskData, behaviour: DeviceBehaviour, seed: int
) -> RunConfig:
    """Returns a new run's flags; without --separation, with the largest that leaves enough devices.

    For devices that never fail, this is the largest separation possible, and the flag stays unset.
    If even a separation of 1 leaves too few devices, the result is 1.

    Args:
      config: The flags.
      data: The task's data.
      behaviour: The behaviour of the devices.
      seed: The seed of the devices.
    """
    if config.separation or behaviour.is_undisturbed or config.sampling != TIMERS:
        return config
    found = _largest_separation(config, data, behaviour, seed)
    return dataclasses.replace(config, separation=max(1, found))


def check_devices(run: Run) -> None:
    """Checks by simulation that enough of a new run's devices may take part in every round.

    A run with ``--stop_at_epsilon`` passes if it ends before a round that has too few devices.

    Raises:
      CommandError: If a round would have too few devices.
    """
    config, behaviour = run.config, run.behaviour
    if run.mechanism.sampling is not None:
        return
    refusal, cohorts = _population(config, run.data, behaviour, run.seed).starves(config.num_rounds)
    if refusal is None:
        return
    rule = run.stopping_rule
    if rule is not None and cohorts:
        names = tuple(map(str, range(run.data.num_clients)))
        clients = run_directory.ParticipationLedger(names, cohorts).rounds_of_clients()
        if not rule.allows(ObservedParticipation.of(clients, len(cohorts))):
            return
    fleet = fleets.Fleet(run.data.num_clients, config.cohort, 1.0 - behaviour.arriving)
    selected = max(behaviour.over_selection, fleet.selected_per_upload)
    more = dataclasses.replace(behaviour, over_selection=selected)
    advice = "Use fewer clients per round or fewer rounds"
    if behaviour.timer_hours is not None:
        advice = f"Use a shorter timer than --timer_hours={behaviour.timer_hours:g}"
    elif separation := _largest_separation(config, run.data, more, run.seed):
        needed = f"--separation={separation} and "
        if separation >= participation_of(config, run.data).separation:
            needed = ""
        elif config.saved is not None:
            needed = f"a checkpoint for {needed}"
        advice = f"With {needed}--over_selection={selected:g} it would not"
    raise CommandError(f"the run would end early for lack of devices: {refusal.found} {advice}.")


def _population(
    config: RunConfig, data: TaskData, behaviour: DeviceBehaviour, seed: int
) -> DevicePopulation:
    schema = participation_of(config, data)
    return DevicePopulation(data.num_clients, schema, config.cohort, behaviour, seed)


def _largest_separation(
    config: RunConfig, data: TaskData, behaviour: DeviceBehaviour, seed: int
) -> int:
    """Returns the largest separation at which no round lacks devices (3 seeds), or 0."""

    def survive(separation: int) -> bool:
        tried = dataclasses.replace(config, separation=separation)
        fleet = (_population(tried, data, behaviour, each) for each in range(seed, seed + 3))
        return not any(each.starves(config.num_rounds)[0] for each in fleet)

    return fleets.largest(1, min(config.num_rounds, data.num_clients // config.cohort), survive)


def participation_of(config: RunConfig, data: TaskData) -> MinSeparation:
    """Returns the participation schema that a run's timers enforce.

    Raises:
      CommandError: If there are too few clients for a cohort.
    """
    cohort = config.clients_per_round
    separation = config.separation or min(config.num_rounds, data.num_clients // cohort)
    check_choice(
        separation > 0,
        f"{data.name} has {data.num_clients} training clients, fewer than "
        f"--clients_per_round={cohort}: use fewer.",
    )
    return MinSeparation(separation, config.max_participations)


def scheme_of(
    config: RunConfig, num_clients: int, checkpoint: Factorization | None
) -> SamplingScheme:
    """Returns the sampling scheme that draws clients; ``checkpoint`` is the matrix, if it is known.

    Raises:
      CommandError: If the factorization is not banded.
      ValueError: If the sizes do not fit one another.
    """
    takes_any = participations.SCHEMES[config.sampling].takes_any_matrix
    if checkpoint is None:
        num_bands = run_config.num_bands(config)
        if num_bands is None and takes_any:
            num_bands = config.num_rounds
    else:
        num_bands = checkpoint.strategy_bands()
        check_choice(
            num_bands < max(2, checkpoint.num_rounds)
            or takes_any
            or checkpoint.mechanism in run_config.banded_mechanisms(),
            f"--sampling={config.sampling} needs a banded matrix, and the checkpoint's, of the "
            f"mechanism {checkpoint.mechanism}, is not: use --sampling={TIMERS} with it.",
        )
    assert num_bands is not None
    return participations.sampling_scheme(
        config.sampling,
        num_rounds=config.num_rounds,
        num_bands=num_bands,
        population=num_clients,
        clients_per_round=config.clients_per_round,
        separation=config.separation,
        largest_batch=config.largest_batch,
    )


def _num_beside_updates(config: RunConfig) -> int:
    """Returns how many entries a noise row has in addition to the model's parameters."""
    metrics = stated_runs.RunFlags(config).private_metrics()
    if metrics is None:
        return int(config.adaptive_clip is not None)
    # One entry is for the indicator of clipped updates, and one for each metric.
    return 1 + len(metrics.metrics)


def server_rates(config: RunConfig, horizons: Sequence[Horizon]) -> np.ndarray:
    """Returns (n,) float64, the server's learning rate of every round.

    Released rounds of an extended run keep their rates: run again from an older state, they must
    give the same model, because later updates and their noise were computed from it. The first
    round that is not released keeps its rate as well, which the saved state holds already. If all
    rounds of the earlier horizon were released, that round has the rate of the horizon's last
    round.
    """
    name = "decay" if config.cooldown == DROP else "cooldown"
    schedule = dataclasses.replace(
        SCHEDULES[name],
        warmup_share=config.server_warmup,
        cooldown_share=config.server_cooldown,
    )
    lengths = [*(horizon.num_rounds for horizon in horizons), config.num_rounds]
    joined, *later = (schedule.rates(n, config.server_learning_rate) for n in lengths)
    for horizon, following in zip(horizons, later, strict=True):
        known = horizon.released_rounds + 1
        joined = np.concatenate([np.append(joined, joined[-1])[:known], following[known:]])
    return joined


def is_same_training(one: Workload, other: Workload) -> bool:
    """Returns whether two workloads are equal up to a factor, which changes no optimal matrix.

    Args:
      one: A workload.
      other: Another one.
    """
    if one.num_rounds != other.num_rounds:
        return False
    ours, theirs = (each.inverse_bands() for each in (one, other))
    return ours.shape == theirs.shape and np.allclose(
        ours / ours[0, 0], theirs / theirs[0, 0], rtol=_ROUNDING_OF_WORKLOADS, atol=0.0
    )


def _of_timers(
    config: RunConfig,
    data: TaskData,
    own: Factorization | None,
    workload: Workload,
    begun: Mapping[str, object],
    horizons: Sequence[Horizon],
) -> Mechanism:
    num_rounds, participation = config.num_rounds, participation_of(config, data)
    participation.check_population(num_rounds, data.num_clients, config.cohort)
    if own is None:
        bands = min(participation.separation, num_rounds, config.max_bands)
        own = _factorization(config, participation, bands, workload)
    if horizons:
        return _extended(config, participation, own, workload, begun, horizons)
    assert config.noise_multiplier is not None
    return Mechanism(own, participation, config.noise_multiplier * config.simulated_share)


def _extended(
    config: RunConfig,
    participation: MinSeparation,
    factorization: Factorization,
    workload: Workload,
    begun: Mapping[str, object],
    horizons: Sequence[Horizon],
) -> Mechanism:
    """Returns the mechanism of an extended run; its matrix may be that of fewer rounds."""
    size = begun.get("num_parameters")
    if not isinstance(size, int):
        raise RunDirectoryError(
            "the run has not begun, and cannot be extended: start a new run with this --num_rounds."
        )
    lengths = [horizon.num_rounds for horizon in horizons]
    known = [*factorization.horizons, factorization.num_rounds]
    if known not in (lengths, [*lengths, config.num_rounds]):
        raise CommandError(
            f"the matrix of the run extends horizons of {list(factorization.horizons)} rounds, and "
            f"{run_directory.CONFIG_FILE} says {lengths}: restore the files of this run."
        )
    assert config.noise_multiplier is not None
    first, *later = horizons
    mechanism = Mechanism(
        factorization.at_horizon(first.num_rounds),
        first.participation,
        config.noise_multiplier * config.simulated_share,
    )
    of_horizons = {horizon.num_rounds: horizon.participation for horizon in later}
    for num_rounds, schema in {**of_horizons, config.num_rounds: participation}.items():
        is_known = num_rounds in known
        try:
            mechanism = mechanism.extended(
                num_rounds,
                schema,
                workload=None if is_known else workload,
                num_parameters=size + _num_beside_updates(config),
                largest_cohort=config.cohort if config.secure_aggregation else None,
                storage=inputs.part(begun, dict).get("noise_storage", config.noise_storage),
                factorization=factorization.at_horizon(num_rounds) if is_known else None,
            )
        except ExtensionError as error:
            raise CommandError(f"--num_rounds={num_rounds}: {error}") from error
    planned = guarantees.of_noise(mechanism.noise_multiplier / config.simulated_share, config.delta)
    for name, found in (("rho", planned.rho), ("epsilon", planned.epsilon)):
        target = getattr(config, f"target_{name}")
        check_choice(
            target is None or found <= target,
            f"the noise of the run, which an extension does not change, gives {config.num_rounds} "
            f"rounds {name} {numbers.rounded_up(found, '.6g')}, above "
            f"--target_{name}={target or 0:g}: give a larger target, or fewer --num_rounds.",
        )
    return mechanism


def _of_sampling(
    config: RunConfig,
    data: TaskData,
    own: Factorization | None,
    workload: Workload,
    own_noise_multiplier: float | None,
) -> Mechanism:
    scheme = scheme_of(config, data.num_clients, own)
    if own is None:
        schema = scheme.support() if scheme.shares_rows else SingleParticipation()
        own = _factorization(config, schema, scheme.num_bands, workload)
    multiplier = config.noise_multiplier if own_noise_multiplier is None else own_noise_multiplier
    if multiplier is not None:
        return Mechanism(own, scheme, multiplier)
    if config.target_rho is not None:
        return calibrate(own, scheme, rho=config.target_rho)
    return calibrate(own, scheme, epsilon=config.target_epsilon, delta=config.delta)


def _read(checkpoint: str | os.PathLike[str]) -> tuple[Factorization, Workload]:
    """Reads a checkpoint: its factorization, and the workload that it says it was optimised for."""
    factorization, description = checkpoints.load_with_description(checkpoint)
    made_for = inputs.part(description, dict, "errors", "workload")
    return factorization, workloads.Workload.described(made_for, factorization.num_rounds)


def _loaded(config: RunConfig) -> tuple[Factorization, Workload]:
    assert config.checkpoint is not None
    factorization, workload = _read(config.checkpoint)
    check_choice(
        factorization.num_rounds == config.num_rounds,
        f"--checkpoint={config.checkpoint} is for {factorization.num_rounds} rounds, and "
        f"--num_rounds is {config.num_rounds}: make the two equal.",
    )
    return factorization, workload


def _factorization(
    config: RunConfig, participation: Participation, default_bands: int, workload: Workload
) -> Factorization:
    num_rounds, name = config.num_rounds, config.mechanism
    if name == run_config.NOT_PRIVATE:
        return factorizations.identity(num_rounds)
    mechanism = catalogue.entry(name)
    given = mechanism_flags.given_options(config, name, for_runs=True)
    return mechanism.build(
        workload,
        participation if mechanism.has_schema_in_runs else None,
        mechanism.options_of_run(given, num_rounds, default_bands),
        show_progress=True,
    )


def _workload(
    config: RunConfig, horizons: Sequence[Horizon], made_for: Workload | None
) -> Workload:
    """Returns the workload that the matrix for all rounds is optimised for.

    Args:
      config: The configuration of the run, as its flags ask.
      horizons: The earlier horizons of the run.
      made_for: What the checkpoint is for, which the run uses or began with; it may be one of fewer
        rounds. None for a matrix that is to be computed.
    """
    num_rounds = config.num_rounds
    sums = Workload("prefix_sum", num_rounds)
    if config.checkpoint is None or made_for is None:
        if config.workload != run_config.TRAINING:
            return sums
        training = _training(config, horizons)
        return catalogue.entry(config.mechanism).nearest_workload(training) or sums
    if made_for.num_rounds == num_rounds:
        return made_for
    before = dataclasses.replace(config, num_rounds=made_for.num_rounds)
    earlier = [each for each in horizons if each.num_rounds < made_for.num_rounds]
    if is_same_training(made_for, _training(before, earlier)):
        return _training(config, horizons)
    return sums


def _training(config: RunConfig, horizons: Sequence[Horizon]) -> Workload:
    rates = tuple(server_rates(config, horizons).tolist())
    return Workload("momentum_sgd", len(rates), config.server_momentum, rates)
