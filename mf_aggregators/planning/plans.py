"""Input and result of a plan: a setting, and mechanisms sorted by effective error.

The effective RMSE (BandMF Eq. 11) is the root mean square error of prefix sums at sensitivity 1,
times the noise multiplier that the target needs, divided by the clients per round. It is the
standard deviation of the noise in a model parameter after a round, on average (root mean square)
over rounds, for SGD with clip norm and learning rate one. A plan for another error compares the
error of the worst round, or a weighted mean, in the same unit. A plan for another workload includes
momentum and learning rates.
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
from mf_aggregators.mechanism import Mechanism, check_charged
from mf_aggregators.noise.places import NoiseCost
from mf_aggregators.participation import Participation, sampling_scheme
from mf_aggregators.planning.fleets import Fleet
from mf_aggregators.privacy import guarantees
from mf_aggregators.workloads import Workload

# The compared error: ``mean``, ``max``, or a weight for each round.
_PlannedError: TypeAlias = str | tuple[float, ...]

# The value of ``sampling`` for a plan that compares timers and all sampling schemes.
ANY_SAMPLING = "any"


class _Words(NamedTuple):
    """The words that describe an error over rounds.

    Attributes:
      planned: The name of the column with the error at sensitivity 1 and noise multiplier 1.
      column: The name of the column with the effective error, which a plan compares.
      quantity: The name of the effective error in a sentence.
      compared: The name of the compared error after the words "compared by".
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
    """The setting of a plan: rounds, clients, privacy target and limits of a run.

    Use it when you call ``make``: a plan is its input.

    Attributes:
      num_rounds: The rounds n.
      population: The clients m.
      clients_per_round: The cohort or batch size B.
      participation: The schema that timers enforce. None if clients are drawn, or to choose the
        schema with the least noise that the fleet survives.
      sampling: The name of a sampling scheme; ``ANY_SAMPLING`` to compare timers and all schemes
        that are not dominated; None for timers alone.
      epsilon: The target epsilon. With ``rho`` or ``noise_multiplier`` given, the epsilon of the
        corresponding noise at ``delta``, by ``accounting.epsilon``.
      delta: The delta of the target.
      model_size: The parameters d of the model.
      noise_memory: The most bytes of noise that a mechanism may keep between rounds; None for no
        limit.
      error: The error that mechanisms are optimised for and compared by: the ``mean`` squared error
        over rounds, its ``max``, or the mean with n non-negative weights, stored as a tuple.
      weights_file: The file with the weights, for printed commands.
      workload: The workload A, for ``num_rounds`` rounds, that mechanisms are optimised for and
        compared by; None for the prefix sum.
      rates_file: The file with the workload's learning rates, for printed commands.
      may_extend_to: For timers: the number of rounds, above ``num_rounds``, to which the run may be
        extended. Only mechanisms that can be extended are compared, by their errors for both
        numbers of rounds. None for no extension.
      rho: The target rho of approximate zero-concentrated differential privacy, only for timers,
        because sampling does not amplify rho. None if epsilon is the target.
      noise_multiplier: Instead of a target, only for timers: the noise multiplier of every
        mechanism, relative to the sensitivity of C under the schema; above 0. None if there is a
        target.
      fleet: The behaviour of the devices with timers, with the same population and clients per
        round; None if it is not known.

    Raises:
      ValueError: If a value has another type or is out of its range; if both or neither of
        participation (or fleet) and sampling are given; if the fleet survives no schema; if the
        workload has another number of rounds; if the population is too small for the rounds; if rho
        or a noise multiplier is given with sampling, together, or with an epsilon that does not
        follow from it; or if weights or learning rates for ``num_rounds`` are given with an
        extension.

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
                "that publishes all data of one client would satisfy it. Use a smaller delta."
            )
        if self.noise_memory is not None:
            numbers.non_negative_number(self.noise_memory, "noise_memory")
        check_charged(self.model_size, self.num_rounds)
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
                    "a plan takes rho or a noise multiplier only for timers, in place of a target "
                    "epsilon: sampling does not amplify rho, and each scheme has another epsilon "
                    "for a noise multiplier."
                )
            noise = self.noise_multiplier
            if self.rho is not None:
                noise = accounting.noise_multiplier_of_zcdp(self.rho)
            assert noise is not None
            if self.epsilon != guarantees.of_noise(noise, self.delta).epsilon:
                raise ValueError(
                    f"epsilon {self.epsilon:g} does not follow from rho or the noise multiplier."
                )
        if self.participation is None:
            # Refuses a population that is smaller than a batch, with the same message as all
            # schemes.
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
        check_charged(self.model_size, rounds)
        if self.sampling not in (None, ANY_SAMPLING):
            raise ValueError(
                f"the scheme {self.sampling} is for a fixed number of rounds: a run with it cannot "
                "be extended."
            )
        if self.error not in ("mean", "max") or self.trained.learning_rates is not None:
            raise ValueError(
                f"weights and learning rates are for {self.num_rounds} rounds, and may_extend_to "
                "adds rounds without them: plan for one horizon, or leave them out."
            )

    @property
    def trained(self) -> Workload:
        """The workload; the prefix sum if none is given."""
        return self.workload or Workload("prefix_sum", self.num_rounds)

    @property
    def extended_workload(self) -> Workload | None:
        """The workload for the extended number of rounds; None without an extension."""
        if self.may_extend_to is None:
            return None
        return dataclasses.replace(self.trained, num_rounds=self.may_extend_to)

    def _choose_schema(self) -> None:
        """If no schema is given, chooses the one with the least noise that the fleet survives."""
        if self.fleet is None:
            return
        sizes = (self.fleet.population, self.fleet.clients_per_round)
        if self.sampling is not None or sizes != (self.population, self.clients_per_round):
            raise ValueError(
                "a fleet needs a plan without sampling, with the same population and clients per "
                "round."
            )
        if self.participation is None:
            pairs = self.fleet.choose(self.num_rounds, may_extend_to=self.may_extend_to)
            object.__setattr__(self, "participation", pairs[0].participation)

    @property
    def most_bands(self) -> int:
        """The largest number of bands under sampling: n, or m / B (without amplification)."""
        return min(self.num_rounds, self.population // self.clients_per_round)

    @property
    def words(self) -> _Words:
        """The words for the compared error."""
        return _WORDS[self.error if isinstance(self.error, str) else "weights"]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A mechanism that a plan compares, with its noise, errors and costs.

    Attributes:
      variant: The kind of mechanism, its options, and how its clients are drawn.
      mechanism: The mechanism with the noise multiplier that the target needs.
      is_estimate: Whether the noise multiplier, and all numbers that follow from it, are estimates
        that may miss the target. The recommended candidate never has an estimate.
      errors: The errors for the plan's workload at noise multiplier 1, with noise scaled to the
        sensitivity under the mechanism's schema.
      rmse_of_sums: The root mean square error of prefix sums, with the same noise.
      lower_bound: A lower bound on the errors of every factorization under the schema; None for an
        amplified candidate, whose noise multiplier belongs to its bands.
      cost: The memory, disk and time of the noise for the model, with the chosen storage (which may
        use more disk to be faster).
      clients_per_round: The clients per round of the setting.
      error: The compared error of the setting.
      extended: The mechanism after the planned extension. It has the same noise, so its noise
        multiplier is smaller, because of the larger sensitivity and the roundings of all rounds.
        This and the attributes below are None without an extension.
      extended_epsilon: The epsilon of the extended run, at the setting's delta.
      extended_errors: The errors for the extended run's workload at noise multiplier 1.
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
        """The kind of mechanism, as ``mf-factorize --mechanism`` spells it."""
        return self.variant.kind

    @property
    def num_bands(self) -> int | None:
        """The number of bands in the options or the sampling scheme; None if neither has one."""
        scheme = self.mechanism.sampling
        found = self.variant.options.get("num_bands")
        own = None if found is None else inputs.part(found, int)
        return own if scheme is None else scheme.num_bands

    @property
    def name(self) -> str:
        """The kind of mechanism with its options, as text."""
        return self.variant.name

    @property
    def name_with_sampling(self) -> str:
        """The name and, if sampling amplifies the guarantee, the sampling scheme."""
        return self.variant.name_with_sampling

    @property
    def effective_rmse(self) -> float:
        """The rmse times noise multiplier, divided by clients per round (BandMF Eq. 11)."""
        return self.errors.rmse * self.mechanism.noise_multiplier / self.clients_per_round

    @property
    def max_effective_error(self) -> float:
        """The largest error of a round times noise multiplier, divided by clients per round."""
        return self.errors.max_error * self.mechanism.noise_multiplier / self.clients_per_round

    @property
    def planned_error(self) -> float:
        """The error that the plan compares, at sensitivity 1 and noise multiplier 1."""
        if isinstance(self.error, str):
            return self._compared(self.errors)
        weights = np.divide(self.error, np.max(self.error))
        return float(np.sqrt(weights @ self.errors.per_round_variance / np.sum(weights)))

    def _compared(self, errors: Errors) -> float:
        return errors.max_error if self.error == "max" else errors.rmse

    @property
    def effective_error_extended(self) -> float | None:
        """The effective error of the extended run, which keeps the noise of the first rounds."""
        if self.extended is None or self.extended_errors is None:
            return None
        noise = self.extended.noise_multiplier / self.clients_per_round
        return self._compared(self.extended_errors) * noise

    @property
    def ranked_error(self) -> float:
        """The error by which candidates are ranked: the effective error, or a mean of two.

        If the run may be extended, it is the geometric mean of the effective errors for the planned
        and for the extended rounds, both at the target's noise multiplier. (The real extension
        keeps its noise and has a larger epsilon; ranking at equal noise multipliers compares errors
        at equal epsilons.)
        """
        if self.extended_errors is None:
            return self.effective_error
        extended = self._compared(self.extended_errors)
        return self.effective_error * math.sqrt(extended / self.planned_error)

    @property
    def effective_error(self) -> float:
        """The effective RMSE; for a plan by another error, the effective value of that error."""
        return self.planned_error * self.mechanism.noise_multiplier / self.clients_per_round

    @property
    def over_lower_bound(self) -> float | None:
        """The compared error divided by its lower bound for any matrix; None without a bound.

        A weighted error has no bound, because the bounds for the mean do not hold for it.
        """
        if self.lower_bound is None or not isinstance(self.error, str):
            return None
        bound = self.lower_bound
        return self.planned_error / (bound.max_error if self.error == "max" else bound.rmse)

    @property
    def server_learning_rate(self) -> float:
        """The server learning rate that the rule of BandMF App. I gives for the effective RMSE.

        The rule was fitted to effective RMSEs of prefix sums with matrices for the mean error.
        Plans for another workload or error also use the effective RMSE of prefix sums with their
        matrix.
        """
        effective = self.rmse_of_sums * self.mechanism.noise_multiplier / self.clients_per_round
        return _server_learning_rate(effective)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The result of a plan: the mechanisms that fit a setting, and the recommended one.

    Use it when you read the result of ``make``.

    Attributes:
      setting: The setting.
      candidates: The mechanisms that fit, by increasing ``ranked_error``.
      infeasible: The reason why a mechanism does not fit, by its name.
      recommended: The recommended candidate.
      reason: The reason for the recommendation, in one sentence.
      skipped: The reason why a mechanism was not evaluated within the time limit, by its name.

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

    BandMF's authors fitted the logarithm of the best rate to that of the effective RMSE, for
    StackOverflow next-word prediction with server momentum 0.95 and clip norm 1. The result is
    rounded to a power of 1.7, as there. For other tasks, it is a place to begin tuning.

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
