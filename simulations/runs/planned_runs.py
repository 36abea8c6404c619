"""A run before TensorFlow is loaded: what follows from its configuration and its directory.

:class:`~simulations.runs.run_config.RunConfig` is what was asked, and a :class:`Run` what follows:
a mechanism for the data that there are, and where its clients, files and random numbers come from.
Guarantees and statements are asked of the mechanism.
"""

import dataclasses
import functools
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mf_aggregators import (
    Mechanism,
    calibrate,
    catalogue,
    checkpoints,
    factorizations,
    random_streams,
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
from mf_aggregators.random_streams import SeedError
from mf_aggregators.workloads import Workload
from simulations.devices.device_behaviour import DeviceBehaviour
from simulations.devices.device_populations import DevicePopulation
from simulations.runs import run_config, run_directory
from simulations.runs.run_config import TIMERS, RunConfig
from simulations.runs.run_directory import RunDirectory, RunDirectoryError
from simulations.training import learning_rate_schedules
from simulations.training.federated_task import TaskData


@dataclasses.dataclass(frozen=True)
class Horizon:
    """The rounds that a run was planned for before it was extended.

    Attributes:
      num_rounds: How many.
      released_rounds: Those of them that were released when the run was extended.
      participation: The schema that the timers enforced.
    """

    num_rounds: int
    released_rounds: int
    participation: Participation

    def to_dict(self) -> dict[str, Any]:
        """Returns the entry of ``config.json`` for the horizon."""
        return {**vars(self), "participation": self.participation.to_dict()}


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """A planned run, with all defaults filled in and checked.

    Attributes:
      config: What was asked.
      data: The task's data.
      mechanism: The mechanism of the sums that are released, with all horizons of a run that was
        extended. Where few clients stand for a larger cohort, it has the smaller noise of the few.
      directory: Where states, ledger, metrics and statements go.
      seed: Seed of cohorts under timers, devices, the order of data and initial weights.
      workload: What the matrix is optimised for, and the errors in its checkpoint are stated for.
      behaviour: What the clients' devices do.
      earlier_behaviours: Behaviours before flags changed, by the rounds until then, newest first.
      sampler: What draws the clients of each round in the place of timers; None for timers.
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
        """The guarantee of all rounds, if clients keep to the participation."""
        certification = Certification.default(show_progress=True)
        return self.mechanism.guarantee(self.config.delta, certification=certification)

    @functools.cached_property
    def stopping_rule(self) -> StoppingRule | None:
        """The rule that ends the run before a round with which an epsilon would be exceeded.

        Raises:
          ValueError: If it would not let the first round take place.
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
        """How updates, indicators and metrics split the noise; None where updates have all of it.

        Raises:
          ValueError: If the clipped count has too little noise.
        """
        return stated_runs.noise_split(self.config, self.mechanism)

    @property
    def private_metrics(self) -> PrivateMetrics | None:
        """The metrics of training that are released with noise; None for none."""
        return stated_runs.private_metrics(self.config)

    @property
    def noise_directory(self) -> pathlib.Path:
        """Where rows of noise go, if they go to disk."""
        return pathlib.Path(self.config.noise_directory or self.directory.noise)

    @property
    def server_rates(self) -> np.ndarray:
        """(n,) float64: the server's learning rate of every round."""
        return server_rates(self.config, self.horizons)

    @property
    def training(self) -> Workload:
        """The workload of the training, with momentum and the learning rate of every round."""
        return _training(self.config, self.horizons)


def plan(
    config: RunConfig,
    data: TaskData,
    directory: RunDirectory,
    *,
    seed: int = 0,
    behaviour: DeviceBehaviour | None = None,
    begun: Mapping[str, Any] | None = None,
    horizons: tuple[Horizon, ...] = (),
) -> Run:
    """Plans a run: finds its mechanism, and writes nothing.

    Args:
      config: What was asked, checked flag by flag.
      data: The task's data.
      directory: Its directory, from which a run that goes on has its matrix.
      seed: See :class:`Run`.
      behaviour: What devices do; None for nothing but taking part.
      begun: The ``config.json`` of a run that goes on; None for a new one.
      horizons: Those before, of a run that was or is to be extended.

    Returns:
      The run. Where a scheme samples its clients, it has no sampler yet: see :func:`sampler_of`.

    Raises:
      CommandError: If flags do not fit the data or one another.
      ValueError: As the library says it.
    """
    check_choice(
        config.delta < 1.0 / data.num_clients,
        f"--delta={config.delta:g} is not below 1 / {data.num_clients} clients: a mechanism "
        "that publishes one client's data outright would satisfy it.",
    )
    own, made_for = None, None
    # One factorization for all rounds of a run, also if the checkpoint that it came from changes.
    if begun is not None and directory.factorization.exists():
        own, made_for = _read(directory.factorization)
    elif config.checkpoint is not None:
        own, made_for = _loaded(config)
    workload = _workload(config, horizons, made_for)
    if config.sampling == TIMERS:
        mechanism = _of_timers(config, data, own, workload, begun or {}, horizons)
    elif horizons:
        raise CommandError(
            f"a run with --sampling={config.sampling} cannot be extended: its batches are drawn "
            "by a scheme for all of its rounds, which its guarantee rests on. Start a new run."
        )
    else:
        known_noise = (begun or {}).get("noise_multiplier")
        mechanism = _of_sampling(config, data, own, workload, known_noise)
    if begun is None and config.saved is not None:
        assert config.checkpoint is not None
        # Few clients that stand for more have less noise than was asked for.
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
    """Returns a new run's flags with the separation that its devices survive, if none is given.

    Devices that never fail survive the largest one, for which no flag stands. If they survive none,
    it is 1.

    Args:
      config: The flags.
      data: The task's data.
      behaviour: The behaviour of the devices.
      seed: That of the devices.
    """
    if config.separation or behaviour.is_undisturbed or config.sampling != TIMERS:
        return config
    found = _largest_separation(config, data, behaviour, seed)
    return dataclasses.replace(config, separation=max(1, found))


def check_devices(run: Run) -> None:
    """Checks that the devices of a new run, with its seed, come to the last round.

    A run with ``--stop_at_epsilon`` may end before they starve.

    Raises:
      CommandError: If they do not.
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
        advice = f"With --separation={separation} and --over_selection={selected:g} they do not"
    raise CommandError(f"the devices of this run would end it early: {refusal.found} {advice}.")


def _population(
    config: RunConfig, data: TaskData, behaviour: DeviceBehaviour, seed: int
) -> DevicePopulation:
    schema = participation_of(config, data)
    return DevicePopulation(data.num_clients, schema, config.cohort, behaviour, seed)


def _largest_separation(
    config: RunConfig, data: TaskData, behaviour: DeviceBehaviour, seed: int
) -> int:
    """The largest separation that devices of this seed and of two others survive, or 0."""

    def survive(separation: int) -> bool:
        tried = dataclasses.replace(config, separation=separation)
        fleet = (_population(tried, data, behaviour, each) for each in range(seed, seed + 3))
        return not any(each.starves(config.num_rounds)[0] for each in fleet)

    return fleets.largest(1, min(config.num_rounds, data.num_clients // config.cohort), survive)


def participation_of(config: RunConfig, data: TaskData) -> MinSeparation:
    """Returns the schema that the timers of a run enforce.

    Raises:
      CommandError: If there are too few clients for a cohort.
    """
    cohort = config.clients_per_round
    separation = config.separation or min(config.num_rounds, data.num_clients // cohort)
    check_choice(
        separation > 0,
        f"{data.name} has {data.num_clients} training clients, fewer than "
        f"--clients_per_round={cohort}: use fewer clients per round.",
    )
    return MinSeparation(separation, config.max_participations)


def scheme_of(
    config: RunConfig, num_clients: int, checkpoint: Factorization | None
) -> SamplingScheme:
    """Returns the scheme by which clients are drawn; ``checkpoint`` is the matrix, if it is known.

    Raises:
      CommandError: If the factorization is not banded.
      ValueError: If the sizes do not fit one another.
    """
    takes_any = participations.sampling_schemes()[config.sampling].takes_any_matrix
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


def sampler_of(scheme: SamplingScheme, directory: RunDirectory, fixed_seed: int | None) -> Sampler:
    """Returns the sampler of a run, with the secret seed in its directory.

    The seed is not that of data order and initial weights: whoever gets the initial model could
    find 32 bits of that one by trial. It is with the states, which are as secret.

    Args:
      scheme: How clients are drawn.
      directory: The run's directory; the seed of a new run is made and saved there.
      fixed_seed: A seed in place of a secret one, for tests.

    Raises:
      CommandError: If the seed of rounds that were released is lost or damaged: other draws
        would not be of the same partition.
      OSError: If it cannot be saved.
    """
    if fixed_seed is not None:
        return scheme.sampler(fixed_seed)
    path = directory.sampling_seed
    if path.exists():
        try:
            return scheme.sampler(random_streams.load_seed(path))
        except SeedError as error:
            raise CommandError(
                f"{path} cannot be read: restore it, or start a new run and account for both."
            ) from error
    if directory.ledger.exists():
        raise CommandError(
            f"{path} is missing: without it nobody knows whom the next round would have drawn. "
            "Restore it, or start a new run and account for both."
        )
    seed = random_streams.secret_seed()
    directory.states.mkdir(parents=True, exist_ok=True, mode=0o700)
    random_streams.save_seed(seed, path)
    return scheme.sampler(seed)


def horizons_of(begun: Mapping[str, Any], directory: RunDirectory) -> tuple[Horizon, ...]:
    """Returns the horizons before the present one of a run with this ``config.json``.

    Raises:
      RunDirectoryError: If they are broken.
    """
    try:
        return tuple(
            Horizon(
                int(horizon["num_rounds"]),
                int(horizon["released_rounds"]),
                participations.from_dict(horizon["participation"]),
            )
            for horizon in begun.get(run_directory.EXTENDS, ())
        )
    except (KeyError, OverflowError, TypeError, ValueError) as error:
        raise RunDirectoryError(
            f"{directory.path / run_directory.CONFIG_FILE} is broken: what it says of the "
            f"horizons that were extended cannot be read ({error}). Restore it."
        ) from error


def _num_beside_updates(config: RunConfig) -> int:
    """The number of entries of a row of noise in addition to those of the model."""
    metrics = stated_runs.private_metrics(config)
    if metrics is None:
        return int(config.adaptive_clip is not None)
    # The clipped-count indicator, and the metrics.
    return 1 + len(metrics.metrics)


def server_rates(config: RunConfig, horizons: Sequence[Horizon]) -> np.ndarray:
    """Returns (n,) float64, the server's learning rate of every round.

    Rounds that were released keep their rate: run again from an older state, they must lead to the
    same model, whose updates got the noise of the rounds after them. So does the round after them,
    whose rate the saved state holds already; after the last round of a horizon, that is the rate of
    the last one.
    """
    name = "decay" if config.cooldown == learning_rate_schedules.DROP else "cooldown"
    schedule = dataclasses.replace(
        learning_rate_schedules.SCHEDULES[name],
        warmup_share=config.server_warmup,
        cooldown_share=config.server_cooldown,
    )
    lengths = [*(horizon.num_rounds for horizon in horizons), config.num_rounds]
    joined, *later = (schedule.rates(n, config.server_learning_rate) for n in lengths)
    for horizon, following in zip(horizons, later, strict=True):
        known = horizon.released_rounds + 1
        joined = np.concatenate([np.append(joined, joined[-1])[:known], following[known:]])
    return joined


def _of_timers(
    config: RunConfig,
    data: TaskData,
    own: Factorization | None,
    workload: Workload,
    begun: Mapping[str, Any],
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
    begun: Mapping[str, Any],
    horizons: Sequence[Horizon],
) -> Mechanism:
    """The mechanism of a run that is extended, from the matrix of the horizon before or of all."""
    size = begun.get("num_parameters")
    if not isinstance(size, int):
        raise RunDirectoryError(
            "the run has not begun, and cannot be extended: start a new one with that many "
            "--num_rounds."
        )
    lengths = [horizon.num_rounds for horizon in horizons]
    known = [*factorization.horizons, factorization.num_rounds]
    if known not in (lengths, [*lengths, config.num_rounds]):
        raise CommandError(
            f"the matrix of the run extends horizons of {list(factorization.horizons)} rounds, and "
            f"{run_directory.CONFIG_FILE} says {lengths}: restore what is not of this run."
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
                storage=begun.get("noise_storage", config.noise_storage),
                factorization=factorization.at_horizon(num_rounds) if is_known else None,
            )
        except ExtensionError as error:
            raise CommandError(f"--num_rounds={num_rounds}: {error}") from error
    planned = guarantees.of_noise(mechanism.noise_multiplier / config.simulated_share, config.delta)
    for name, found in (("rho", planned.rho), ("epsilon", planned.epsilon)):
        target = config[f"target_{name}"]
        check_choice(
            target is None or found <= target,
            f"the noise of the run, which stays what it was, gives {config.num_rounds} rounds "
            f"{name} {numbers.rounded_up(found, '.6g')}, above --target_{name}={target or 0:g}: "
            f"give a larger target, or fewer --num_rounds.",
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
        schema = scheme.schema() if scheme.shares_rows else SingleParticipation()
        own = _factorization(config, schema, scheme.num_bands, workload)
    multiplier = config.noise_multiplier if own_noise_multiplier is None else own_noise_multiplier
    if multiplier is not None:
        return Mechanism(own, scheme, multiplier)
    if config.target_rho is not None:
        return calibrate(own, scheme, rho=config.target_rho)
    return calibrate(own, scheme, epsilon=config.target_epsilon, delta=config.delta)


def _read(checkpoint: str | os.PathLike[str]) -> tuple[Factorization, Workload]:
    """A checkpoint's factorization, and the workload that it is said to be for."""
    factorization, description = checkpoints.load_with_description(checkpoint)
    made_for = description["errors"]["workload"]
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
    """The workload that the matrix of all rounds is optimised for.

    Args:
      config: What was asked.
      horizons: Those before.
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
    if learning_rate_schedules.is_same_training(made_for, _training(before, earlier)):
        return _training(config, horizons)
    return sums


def _training(config: RunConfig, horizons: Sequence[Horizon]) -> Workload:
    rates = tuple(server_rates(config, horizons).tolist())
    return Workload("momentum_sgd", len(rates), config.server_momentum, rates)
