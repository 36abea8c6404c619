"""Input and result of a plan: a setting, and mechanisms by their effective error.

The effective RMSE (BandMF Eq. 11) is the root mean square error of prefix sums at sensitivity 1,
times the noise multiplier that the target needs, over the clients per round. That is the standard
deviation that the noise gives to a model parameter after a round, on average over rounds, for SGD
with clip norm and learning rate one. A plan for another error compares the worst round, or a mean
with weights, in the same unit; a plan for another workload has momentum and learning rates in it.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

import numpy as np

from mf_aggregators import accounting, inputs
from mf_aggregators import participation as participations
from mf_aggregators.catalogue import Variant
from mf_aggregators.factorizations import Errors
from mf_aggregators.factorizations.searches import RoundError
from mf_aggregators.kernel import numbers
from mf_aggregators.lower_bounds import LowerBound
from mf_aggregators.mechanism import Mechanism
from mf_aggregators.noise.places import NoiseCost
from mf_aggregators.participation import Participation, sampling_scheme
from mf_aggregators.planning import fleets
from mf_aggregators.planning.fleets import Fleet
from mf_aggregators.privacy import guarantees
from mf_aggregators.workloads import Workload

# The compared error: ``mean``, ``max``, or a weight for each round.
_PlannedError: TypeAlias = str | tuple[float, ...]

# The sampling of a plan that evaluates all ways of taking part.
ANY_SAMPLING = "any"


class _Words(NamedTuple):
    """The words for an error of the rounds.

    Attributes:
      planned: The column of the error at sensitivity 1 and noise multiplier 1.
      column: The column of the effective error, which a plan compares.
      quantity: The name of the effective error in a sentence.
      compared: The error that is compared, after "compared by".
    """

    planned: str
    column: str
    quantity: str
    compared: str


_WORDS: Mapping[str, _Words] = {
    "mean": _Words("RMSE", "effective RMSE", "effective RMSE", "the mean error"),
    "max": _Words(
        "max error", "worst round", "effective maximum error", "the error of the worst round"
    ),
    "weights": _Words(
        "weighted error",
        "weighted",
        "effective weighted error",
        "the mean error with weights on rounds",
    ),
}

# BandMF App. I: log(rate) = slope log(effective RMSE) + offset, rounded to powers of a base.
_RATE_SLOPE = -0.95
_RATE_OFFSET = -4.64
_RATE_BASE = 1.7


@dataclasses.dataclass(frozen=True)
class Setting:
    """Rounds, clients, target and limits of a run.

    Use it when a plan is asked for: it is the question.

    Attributes:
      num_rounds: The rounds n.
      population: The clients m.
      clients_per_round: The cohort or batch size B.
      participation: The schema that participation timers enforce; None where clients are
        drawn, or for the one of least noise that the fleet survives.
      sampling: The name of a sampling scheme; ``ANY_SAMPLING`` to evaluate timers alone and all
        schemes that are not dominated; None for timers alone.
      epsilon: The privacy target; with ``rho`` or ``noise_multiplier``, the one that
        ``accounting.epsilon`` has for the least sufficient noise, or for that noise, at ``delta``.
      delta: Of the target.
      model_size: The parameters d of the model.
      noise_memory: Bytes of noise that a mechanism may have to keep between rounds; None for
        no limit.
      error: What mechanisms are made for and compared by: the ``mean`` squared error over rounds,
        its ``max``, or the mean with (n,) weights on rounds, none below zero, kept as a tuple.
      weights_file: The file that the weights are from, for commands that are printed.
      workload: What mechanisms are made for and compared by: A for ``num_rounds`` rounds; None for
        the prefix sum.
      rates_file: The file that the workload's learning rates are from, likewise.
      may_extend_to: The rounds of the whole run if it is extended, more than ``num_rounds``, for
        timers: mechanisms that can go on are compared at both horizons. None for no extension.
      rho: The target of approximate zero-concentrated differential privacy, for timers alone:
        sampling does not amplify it. None where epsilon is the target.
      noise_multiplier: In the place of a target, for timers alone: the standard deviation of Z over
        (clip norm times the sensitivity of C under the schema), of every mechanism; above 0. None
        where there is a target.
      fleet: The devices with timers, of the same population and clients per round; None where
        nothing is known of them.

    Raises:
      ValueError: If a value is of another type or out of its range, both or none of participation
        (or fleet) and sampling are given, the fleet survives no schema, the workload has other
        rounds, the population cannot fill the rounds, rho or a noise multiplier is given with
        sampling, with the other one, or with another epsilon than its own, or an extension with
        what is for ``num_rounds`` alone.

    Example:
      >>> import mf_aggregators as mfa
      >>> timers = mfa.participation.MinSeparation(separation=4)
      >>> sizes = {"num_rounds": 16, "population": 400, "clients_per_round": 50, "model_size": 1000}
      >>> setting = mfa.planning.Setting(
      ...     **sizes, participation=timers, sampling=None, epsilon=8.0, delta=1e-4
      ... )
      >>> setting.population, setting.most_bands
      (400, 8)
    """

    num_rounds: int
    population: int
    clients_per_round: int
    participation: Participation | None
    sampling: str | None
    epsilon: float
    delta: float
    model_size: int
    noise_memory: float | None = None
    error: _PlannedError = "mean"
    weights_file: str = "WEIGHTS"
    workload: Workload | None = None
    rates_file: str = "RATES"
    may_extend_to: int | None = None
    rho: float | None = None
    noise_multiplier: float | None = None
    fleet: Fleet | None = None

    def __post_init__(self) -> None:
        for field in ("num_rounds", "population", "clients_per_round", "model_size"):
            numbers.positive_integer(getattr(self, field), field)
        inputs.check_types(self, "weights_file", "workload", "rates_file")
        if self.trained.num_rounds != self.num_rounds:
            raise ValueError(
                f"the workload is for {self.trained.num_rounds} rounds, and the plan for "
                f"{self.num_rounds}."
            )
        numbers.positive_number(self.epsilon, "epsilon")
        numbers.delta(self.delta)
        if self.delta >= 1.0 / self.population:
            raise ValueError(
                f"delta {self.delta:g} is not below 1 / {self.population} clients: a mechanism "
                "that publishes one client's data outright would satisfy it."
            )
        if self.noise_memory is not None:
            numbers.non_negative_number(self.noise_memory, "noise_memory")
        inputs.check_charged(self.model_size, self.num_rounds)
        found = RoundError.of(self.error, self.num_rounds)
        error: _PlannedError = "max" if found.is_maximum else "mean"
        if found.weights is not None:
            error = tuple(map(float, self.error))
        object.__setattr__(self, "error", error)
        self._check_extension()
        self._choose_schema()
        if (self.participation is None) == (self.sampling is None):
            raise ValueError("a plan needs a participation schema or a sampling scheme, not both.")
        if self.rho is not None or self.noise_multiplier is not None:
            if self.participation is None or None not in (self.rho, self.noise_multiplier):
                raise ValueError(
                    "a plan takes rho or a noise multiplier for timers alone, in place of a target "
                    "of epsilon: sampling does not amplify rho, and each way of sampling has "
                    "another epsilon of a noise multiplier."
                )
            noise = self.noise_multiplier
            if self.rho is not None:
                noise = accounting.noise_multiplier_of_zcdp(self.rho)
            assert noise is not None
            if self.epsilon != guarantees.of_noise(noise, self.delta).epsilon:
                raise ValueError(
                    f"epsilon {self.epsilon:g} is not that of rho or of the noise multiplier."
                )
        if self.participation is None:
            # Refuses a population that is smaller than a batch, in the words of all schemes.
            sampling_scheme(
                "poisson",
                num_rounds=self.num_rounds,
                num_bands=1,
                population=self.population,
                clients_per_round=self.clients_per_round,
            )
        else:
            participations.check(self.participation, self.num_rounds)
            self.participation.check_population(
                self.may_extend_to or self.num_rounds, self.population, self.clients_per_round
            )

    def _check_extension(self) -> None:
        if self.may_extend_to is None:
            return
        rounds = numbers.positive_integer(self.may_extend_to, "may_extend_to")
        if rounds <= self.num_rounds:
            raise ValueError(f"may_extend_to, {rounds}, must be above {self.num_rounds} rounds.")
        inputs.check_charged(self.model_size, rounds)
        if self.sampling not in (None, ANY_SAMPLING):
            raise ValueError(
                f"the scheme {self.sampling} draws clients for all of its rounds: a run with it "
                "cannot be extended."
            )
        if self.error not in ("mean", "max") or self.trained.learning_rates is not None:
            raise ValueError(
                f"weights and learning rates are for {self.num_rounds} rounds, and not for what "
                "may_extend_to adds: plan for one horizon, or leave them out."
            )

    @property
    def trained(self) -> Workload:
        """The workload, the prefix sum if none is given."""
        return self.workload or Workload("prefix_sum", self.num_rounds)

    @property
    def extended_workload(self) -> Workload | None:
        """The workload of the extended run; None without an extension."""
        if self.may_extend_to is None:
            return None
        return dataclasses.replace(self.trained, num_rounds=self.may_extend_to)

    def _choose_schema(self) -> None:
        """Fills in the schema of least noise that the fleet survives, where none is given."""
        if self.fleet is None:
            return
        sizes = (self.fleet.population, self.fleet.clients_per_round)
        if self.sampling is not None or sizes != (self.population, self.clients_per_round):
            raise ValueError(
                "a fleet is for timers, without sampling, and has the population and the clients "
                "per round of the plan."
            )
        if self.participation is None:
            pairs = fleets.choose(self.fleet, self.num_rounds, may_extend_to=self.may_extend_to)
            object.__setattr__(self, "participation", pairs[0].participation)

    @property
    def most_bands(self) -> int:
        """The most bands that sampling allows: n, or m / B, where nothing is amplified."""
        return min(self.num_rounds, self.population // self.clients_per_round)

    @property
    def words(self) -> _Words:
        """The words for the compared error."""
        return _WORDS[self.error if isinstance(self.error, str) else "weights"]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A mechanism for a setting.

    Attributes:
      variant: The kind of mechanism, its options, and how its clients are drawn.
      mechanism: The mechanism, with the noise multiplier that the target needs.
      is_estimate: Whether the noise multiplier, and what follows from it, is a rough estimate that
        may miss the target. That of a recommended candidate never is.
      errors: Those of the plan's workload at noise multiplier 1, relative to the sensitivity under
        the mechanism's schema.
      rmse_of_sums: The root mean square error of prefix sums, likewise.
      lower_bound: A lower bound on the errors of every factorization under the schema; None for an
        amplified candidate, whose noise multiplier belongs to its bands.
      cost: What its noise costs for the model with the storage that is chosen for it, which
        may keep more of it on disk to be faster.
      clients_per_round: That of the setting.
      error: That of the setting.
      extended: The mechanism of the run after the extension that the setting allows: its noise
        multiplier is what is left of the noise that the run began with, relative to the larger
        sensitivity and after the roundings of all rounds. This and all below are None without an
        extension.
      extended_epsilon: The epsilon of that run, at the setting's delta.
      extended_errors: The errors of that run's workload at noise multiplier 1.
    """

    variant: Variant
    mechanism: Mechanism
    is_estimate: bool
    errors: Errors = dataclasses.field(repr=False, compare=False)
    rmse_of_sums: float
    lower_bound: LowerBound | None
    cost: NoiseCost
    clients_per_round: int
    error: _PlannedError = "mean"
    extended: Mechanism | None = dataclasses.field(default=None, repr=False)
    extended_epsilon: float | None = None
    extended_errors: Errors | None = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def kind(self) -> str:
        """As ``mf-factorize --mechanism`` spells it."""
        return self.variant.kind

    @property
    def num_bands(self) -> int | None:
        """The bands that its options name, or by which sampling amplifies it; None for others."""
        scheme = self.mechanism.sampling
        return self.variant.options.get("num_bands") if scheme is None else scheme.num_bands

    @property
    def name(self) -> str:
        """Its kind with its options, for a reader."""
        return self.variant.name

    @property
    def name_with_sampling(self) -> str:
        """The same, and how its clients take part if that amplifies it."""
        return self.variant.name_with_sampling

    @property
    def effective_rmse(self) -> float:
        """The rmse times the noise multiplier over the clients per round (BandMF Eq. 11)."""
        return self.errors.rmse * self.mechanism.noise_multiplier / self.clients_per_round

    @property
    def max_effective_error(self) -> float:
        """The largest error of a round, likewise."""
        return self.errors.max_error * self.mechanism.noise_multiplier / self.clients_per_round

    @property
    def planned_error(self) -> float:
        """The error that the plan is for, at sensitivity 1 and noise multiplier 1."""
        if isinstance(self.error, str):
            return self._compared(self.errors)
        weights = np.divide(self.error, np.max(self.error))
        return float(np.sqrt(weights @ self.errors.per_round_variance / np.sum(weights)))

    def _compared(self, errors: Errors) -> float:
        return errors.max_error if self.error == "max" else errors.rmse

    @property
    def effective_error_extended(self) -> float | None:
        """The effective error of the extended run, with the noise that it has."""
        if self.extended is None or self.extended_errors is None:
            return None
        noise = self.extended.noise_multiplier / self.clients_per_round
        return self._compared(self.extended_errors) * noise

    @property
    def ranked_error(self) -> float:
        """The effective error; of a run that may be extended, the geometric mean of two.

        They are those of both horizons at the noise multiplier of the target, as if each were the
        last one: the noise that a run has gives its extension more privacy loss, and epsilon is the
        same function of the noise multiplier for all candidates.
        """
        if self.extended_errors is None:
            return self.effective_error
        extended = self._compared(self.extended_errors)
        return self.effective_error * math.sqrt(extended / self.planned_error)

    @property
    def effective_error(self) -> float:
        """The compared quantity: the effective RMSE, and likewise for another error."""
        return self.planned_error * self.mechanism.noise_multiplier / self.clients_per_round

    @property
    def over_lower_bound(self) -> float | None:
        """The error that the plan is for over its lower bound; None where there is none.

        There is none for weights: the bounds of the mean do not hold for them.
        """
        if self.lower_bound is None or not isinstance(self.error, str):
            return None
        bound = self.lower_bound
        return self.planned_error / (bound.max_error if self.error == "max" else bound.rmse)

    @property
    def server_learning_rate(self) -> float:
        """The server learning rate that BandMF App. I's rule suggests, by the effective RMSE.

        The rule was fitted to the effective RMSE of prefix sums by matrices for the mean: that of
        this matrix is used, for plans of another workload or error, too.
        """
        effective = self.rmse_of_sums * self.mechanism.noise_multiplier / self.clients_per_round
        return _server_learning_rate(effective)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The mechanisms that fit a setting, the least error first.

    Use it when you read what ``make`` returned.

    Attributes:
      setting: The setting.
      candidates: Those that fit, by increasing ``ranked_error``.
      infeasible: Why each of the others does not fit, by its name.
      recommended: One of the candidates.
      reason: Why, in one sentence.
      skipped: Why mechanisms were not evaluated within the time limit, by their names.

    Example:
      >>> import mf_aggregators as mfa
      >>> timers = mfa.participation.MinSeparation(separation=4)
      >>> sizes = {"num_rounds": 16, "population": 400, "clients_per_round": 50, "model_size": 1000}
      >>> setting = mfa.planning.Setting(
      ...     **sizes, participation=timers, sampling=None, epsilon=8.0, delta=1e-4
      ... )
      >>> plan = mfa.planning.make(setting, mechanisms={"identity", "banded"})
      >>> print(plan.reason)
      banded 4 has the smallest effective RMSE of the 2 mechanisms that fit, 0.04134; the next,
      identity, has 53.2 % more.
    """

    setting: Setting
    candidates: tuple[Candidate, ...]
    infeasible: Mapping[str, str]
    recommended: Candidate
    reason: str
    skipped: Mapping[str, str]


def _server_learning_rate(effective_rmse: float) -> float:
    """The server learning rate suggested for an effective RMSE (BandMF App. I).

    A linear fit of logarithms over StackOverflow next-word prediction with federated SGD
    with server momentum 0.95 and clip norm 1, rounded to a power of 1.7 as there: a place
    to begin tuning elsewhere.

    Args:
      effective_rmse: As in :class:`Candidate`.

    Returns:
      The learning rate.

    Raises:
      ValueError: If the error is not above zero.
    """
    error = numbers.positive_number(effective_rmse, "effective_rmse")
    fitted = _RATE_SLOPE * math.log(error) + _RATE_OFFSET
    return float(_RATE_BASE ** round(fitted / math.log(_RATE_BASE)))


def powers_of_two(largest: int) -> list[int]:
    """Returns 1, 2, 4, ... up to ``largest``, and ``largest`` itself.

    Args:
      largest: At least 1.
    """
    return sorted({2**i for i in range(largest.bit_length())} | {largest})
