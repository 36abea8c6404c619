"""Audits of aggregators: attacks in real runs that try to refute a claimed guarantee.

Noise, clipping and rounds are the real ones. Many clients, the *canaries*, are audited at once.
Each canary owns one coordinate of the model, and sends an update far above the clip norm there, in
the rounds of one participation pattern. Coordinates without an owner show the same run without such
a client (zero-out adjacency). An attacker who knows all other updates, and chooses them and the
canaries' signs from what was released before, decides by the likelihood ratio of all releases
whether a coordinate has a canary. Its error rates give a lower bound on epsilon
(``audit.statistics``); a bound above the claim is a violation.

The attacker estimates the noise from tuning runs without canaries, and never looks at the claimed
matrix, so it attacks the real releases and not the claim.

**Drawn clients.** If a sampling scheme draws the clients, canaries take part in the rounds in which
its sampler draws them, with a new secret seed in each run. The attacker does not know these rounds:
it decides by the likelihood ratio of a mixture over many other draws of the scheme. Its error rates
give a lower bound on epsilon at each delta, which refutes the amplified claim if it is larger. (An
attacker who knows the rounds may learn more without violating this claim.) Observations have to be
independent. They are if clients draw for themselves, and for the clients of one group of Poisson
sampling (the attacker knows the group, as in the proof).
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import scipy.special

from mf_aggregators import inputs
from mf_aggregators.aggregator import Aggregator, AggregatorState
from mf_aggregators.audit import statistics
from mf_aggregators.audit.run_audit import one_run as one_run
from mf_aggregators.audit.statistics import Contribution, ErrorRates, NoiseModel
from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.numbers import FloatArray, IntArray
from mf_aggregators.mechanism import Mechanism
from mf_aggregators.participation import (
    PoissonSampling,
    SamplingScheme,
    SingleParticipation,
    check,
    secret_seed,
)
from mf_aggregators.progress_bars import ProgressBar

# The number of coordinates without a client for each canary; they cost little time. Canaries are 51
# coordinates apart, an odd number, so that they own even and odd coordinates.
_ABSENCES_PER_CANARY = 50
_CANARIES_PER_RUN = 250
_BYTES_PER_NUMBER = 8
# With fewer coordinates in tuning runs, errors of the estimated covariance reduce the attacker's
# squared power, by a share of about rounds / coordinates.
_TUNING_COORDINATES_PER_ROUND = 20
_FEWEST_TUNING_COORDINATES = 20_000
# The time to decompose the covariance grows with the cube of the rounds.
_MOST_ROUNDS = 4096
# The number of (rounds, rounds) matrices that are in memory at once.
_MATRICES = 8

# Canaries send updates this many clip norms long, so that missing or wrong clipping shows.
_EXCESS = 10.0
# The norm of the other client's update in clip norms: it is not clipped.
_BASE_NORM = 0.9
# At this delta, a feasible number of canaries can show a large epsilon for any mechanism. At the
# small deltas of real claims, no feasible number can.
LARGE_DELTA = 0.1
# The deltas of an audit of drawn clients. At the larger one, sampling amplifies little.
_DELTAS = (0.02, LARGE_DELTA)
# The least number of draws in the attacker's mixture, and the number of thresholds that are tried.
_DRAWS, _THRESHOLDS = 4000, 200
# The number of coordinates that are scored at once.
_COORDINATES = 2000

# A function that makes the first state of an aggregator; and a function from a state and clients'
# vectors to the next state, the mean and the next clip norm.
_Start: TypeAlias = Callable[[], object]
_After: TypeAlias = tuple[object, FloatArray, float | None]
_Step: TypeAlias = Callable[[object, list[FloatArray]], _After]


@dataclasses.dataclass(frozen=True)
class Claim:
    """The claim about an aggregator that an audit tests.

    Use it when you call ``audit``, whose argument it is.

    Attributes:
      mechanism: The mechanism, without sampling and with noise. The attack uses its numbers, but
        never its matrix.
      clip_norm: The L2 norm to which each client's update is clipped; if it adapts, that of the
        first round.
      clients_per_round: The number by which sums are divided.

    Raises:
      TypeError: If a sampling scheme draws the clients.
      ValueError: If a number is out of its range.

    Example:
      >>> import mf_aggregators as mfa
      >>> once = mfa.participation.SingleParticipation()
      >>> mechanism = mfa.Mechanism(mfa.factorizations.identity(2), once, noise_multiplier=1.0)
      >>> claim = mfa.audit.Claim(mechanism, clip_norm=1.0, clients_per_round=100)
      >>> claim.num_rounds, claim.mu
      (2, 1.0)
    """

    mechanism: Mechanism
    clip_norm: float
    clients_per_round: float

    def __post_init__(self) -> None:
        inputs.check_types(self, "mechanism")
        check(self.mechanism.participation)
        if self.mechanism.num_rounds > _MOST_ROUNDS:
            raise ValueError(
                f"num_rounds must be at most {_MOST_ROUNDS} in an audit, found "
                f"{self.mechanism.num_rounds}: audit a factorization of the same kind for fewer "
                "rounds."
            )
        numbers.positive_number(self.mechanism.noise_multiplier, "noise_multiplier")
        for name in ("clip_norm", "clients_per_round"):
            numbers.positive_number(getattr(self, name), name)

    @property
    def num_rounds(self) -> int:
        """The rounds of a run."""
        return self.mechanism.num_rounds

    @property
    def mu(self) -> float:
        """The mu of Gaussian differential privacy that the noise multiplier promises."""
        return 1.0 / self.mechanism.noise_multiplier


@dataclasses.dataclass(frozen=True)
class _AnyMechanismBound:
    """A bound on epsilon at one delta that assumes nothing of the mechanism.

    Attributes:
      delta: The delta.
      epsilon: The claimed epsilon there.
      epsilon_lower_bound: The largest epsilon that the audit refutes at this delta.
    """

    delta: float
    epsilon: float
    epsilon_lower_bound: float


@dataclasses.dataclass(frozen=True)
class AuditResult:
    """The result of an audit of an aggregator.

    Use it when you read the result of ``audit``.

    Attributes:
      claim: The claim that was tested.
      delta: The delta at which epsilon is stated.
      epsilon: The claimed epsilon, which follows from the noise multiplier.
      epsilon_lower_bound: The epsilon at ``delta`` of the largest refuted mu. If the mechanism is
        Gaussian, its epsilon is at least this.
      mu_lower_bound: The largest mu (one over the noise multiplier) that was refuted; the claimed
        mu is ``claim.mu``.
      any_mechanism: Bounds that hold for any mechanism, at ``delta`` and LARGE_DELTA.
      contribution: The rounds and signs of the canaries.
      rates: The observed error rates, one for each threshold.
      false_alarm_rate: An upper bound on the probability that ``exceeded`` is true for an intact
        mechanism, over all bounds together.

    Example:
      >>> import mf_aggregators as mfa
      >>> once = mfa.participation.SingleParticipation()
      >>> mechanism = mfa.Mechanism(mfa.factorizations.identity(2), once, noise_multiplier=1.0)
      >>> claim = mfa.audit.Claim(mechanism, clip_norm=1.0, clients_per_round=100)
      >>> def build():
      ...     return mfa.Aggregator(mechanism, clip_norm=1.0, clients_per_round=100)
      >>> result = mfa.audit.audit(build, claim, canaries=300)
      >>> result.epsilon_lower_bound < result.epsilon, round(result.epsilon, 2)
      (True, 4.89)
    """

    claim: Claim
    delta: float
    epsilon: float
    epsilon_lower_bound: float
    mu_lower_bound: float
    any_mechanism: tuple[_AnyMechanismBound, ...]
    contribution: Contribution
    rates: tuple[ErrorRates, ...]
    false_alarm_rate: float

    @property
    def ratio(self) -> float:
        """The lower bound divided by the claimed epsilon."""
        return self.epsilon_lower_bound / self.epsilon

    @property
    def epsilon_of_a_perfect_attack(self) -> float:
        """The lower bound that an attack without errors would reach with these canaries."""
        # Every threshold has two rates, and the bounds on all of them hold together.
        miss_probability = self.false_alarm_rate / (2 * (1 + len(self.any_mechanism)))
        rates = self.rates[0]
        most = ErrorRates.largest_mu(rates.absences, rates.presences, miss_probability)
        return statistics.epsilon_of_mu(most, self.delta)

    @property
    def exceeded(self) -> bool:
        """Whether the claim is refuted."""
        return self.mu_lower_bound > self.claim.mu or any(
            bound.epsilon_lower_bound > bound.epsilon for bound in self.any_mechanism
        )


def audit(
    build_aggregator: Callable[[], object],
    claim: Claim,
    *,
    delta: float = 1e-6,
    canaries: int = 4000,
    false_alarm_rate: float = 1e-4,
    show_progress: bool = False,
) -> AuditResult:
    """Attacks an aggregator in real runs, in TensorFlow Federated or NumPy.

    Use it when you test an implementation of an aggregator against its claim.

    Bounds assume that the noise of different coordinates is independent, as the mechanism
    promises; the audit does not test that.

    Args:
      build_aggregator: Returns an aggregator with unseeded noise: a
        ``tff.aggregators.UnweightedAggregationFactory`` such as ``mf_dp_aggregator(...)``, or a
        ``mf_aggregators.Aggregator``, which releases the same bits in a sixth of the time.
      claim: The claimed mechanism, clip norm and cohort size.
      delta: The delta at which epsilon is stated.
      canaries: The number of canaries, over all runs.
      false_alarm_rate: The largest probability of ``exceeded`` for an intact mechanism.
      show_progress: Whether to show a bar on standard error.

    Returns:
      The bounds.

    Raises:
      ValueError: If a number is out of its range, if the claim is too weak to be refuted with this
        number of canaries or has too little noise for an epsilon at ``delta``, or if the aggregator
        releases numbers that are not finite.

    Example:
      >>> import mf_aggregators as mfa
      >>> once = mfa.participation.SingleParticipation()
      >>> mechanism = mfa.Mechanism(mfa.factorizations.identity(2), once, noise_multiplier=1.0)
      >>> claim = mfa.audit.Claim(mechanism, clip_norm=1.0, clients_per_round=100)
      >>> def build():
      ...     return mfa.Aggregator(mechanism, clip_norm=1.0, clients_per_round=100)
      >>> result = mfa.audit.audit(build, claim, canaries=300)
      >>> result.exceeded
      False
    """
    canaries = numbers.positive_integer(canaries, "canaries")
    false_alarm_rate = statistics.checked_false_alarm_rate(false_alarm_rate)
    absences = canaries * _ABSENCES_PER_CANARY
    dimension = min(canaries, _CANARIES_PER_RUN) * (1 + _ABSENCES_PER_CANARY)
    inputs.check_memory(
        _BYTES_PER_NUMBER
        * (
            2 * (absences + canaries)
            + (2 * dimension + _MATRICES * claim.num_rounds) * claim.num_rounds
        ),
        f"an audit of {canaries} canaries over {claim.num_rounds} rounds",
        "use fewer canaries or rounds",
    )
    deltas = tuple(dict.fromkeys((numbers.delta(delta), LARGE_DELTA)))
    # Every threshold has two rates, and the bounds on all of them hold together.
    miss_probability = false_alarm_rate / (2 * (1 + len(deltas)))
    provable = ErrorRates.largest_mu(absences, canaries, miss_probability)
    if provable <= claim.mu:
        # With very few canaries, the lower bound is always 0.
        reach = f"a noise multiplier below {1.0 / provable:.3g}" if provable > 0.0 else "any claim"
        raise ValueError(
            f"{canaries} canaries cannot refute {reach}, found a noise multiplier of "
            f"{claim.mechanism.noise_multiplier:g}: use more canaries or a larger noise multiplier."
        )
    epsilons = {each: claim.mechanism.guarantee(each).epsilon for each in deltas}
    if epsilons[delta] == 0.0 or math.inf in epsilons.values():
        raise ValueError(
            f"the claim is epsilon {epsilons[delta]:g} at delta {delta:g}, and the audit needs a "
            "finite epsilon above 0: use another delta or noise multiplier."
        )
    of_runs = _runs_of_canaries(canaries)
    with _tuned_runner(build_aggregator, claim, of_runs, show_progress) as (runner, model):
        contribution = model.worst_contribution(claim.mechanism.participation, claim.clip_norm)
        thresholds = statistics.choose_thresholds(
            contribution.power, absences, canaries, miss_probability, deltas
        )
        absent, present = [], []
        for number in of_runs:
            scores, is_owned = runner.scores(model, contribution, number)
            absent.append(scores[~is_owned])
            present.append(scores[is_owned])
    rates = _rates(absent, present, thresholds, miss_probability)
    mu = max(rate.mu_lower_bound for rate in rates)
    return AuditResult(
        claim=claim,
        delta=delta,
        epsilon=epsilons[delta],
        epsilon_lower_bound=statistics.epsilon_of_mu(mu, delta),
        mu_lower_bound=mu,
        any_mechanism=_bounds_of_any_mechanism(epsilons, rates),
        contribution=contribution,
        rates=rates,
        false_alarm_rate=false_alarm_rate,
    )


def _rates(
    absent: Sequence[FloatArray],
    present: Sequence[FloatArray],
    thresholds: Sequence[float],
    miss_probability: float,
) -> tuple[ErrorRates, ...]:
    """The error rates at each threshold, of the scores of all runs."""
    scores = np.concatenate(absent), np.concatenate(present)
    return tuple(
        ErrorRates.of_scores(*scores, threshold, miss_probability) for threshold in thresholds
    )


def _runs_of_canaries(canaries: int, most: int = _CANARIES_PER_RUN) -> list[int]:
    """Splits the canaries into runs of about equal numbers, and returns these numbers.

    Args:
      canaries: The number of canaries.
      most: The most canaries of a run, if this is below the usual limit.
    """
    runs = math.ceil(canaries / max(min(most, _CANARIES_PER_RUN), 1))
    return [canaries // runs + (i < canaries % runs) for i in range(runs)]


def _bounds_of_any_mechanism(
    epsilons: Mapping[float, float], rates: Sequence[ErrorRates]
) -> tuple[_AnyMechanismBound, ...]:
    """Returns the bounds that hold for any mechanism with these error rates.

    Args:
      epsilons: The claimed epsilon by delta.
      rates: The error rates at some thresholds.
    """
    return tuple(
        _AnyMechanismBound(
            delta, epsilon, max(rate.epsilon_lower_bound_any_mechanism(delta) for rate in rates)
        )
        for delta, epsilon in epsilons.items()
    )


@contextlib.contextmanager
def _tuned_runner(
    build_aggregator: Callable[[], object],
    claim: Claim,
    numbers: Sequence[int],
    show_progress: bool,
) -> Iterator[tuple["_Runner", NoiseModel]]:
    """Yields a runner of an aggregation process, and its noise without canaries.

    Args:
      build_aggregator: As for :func:`audit`.
      claim: The claim that is tested.
      numbers: The canaries of each run that follows.
      show_progress: Whether to show a bar on standard error.
    """
    dimension = max(numbers) * (1 + _ABSENCES_PER_CANARY)
    needed = max(_FEWEST_TUNING_COORDINATES, _TUNING_COORDINATES_PER_ROUND * claim.num_rounds)
    tuning = math.ceil(needed / dimension)
    with ProgressBar(
        total=(tuning + len(numbers)) * claim.num_rounds,
        desc="audit",
        unit="round",
        disable=not show_progress,
    ) as progress:
        runner = _Runner(build_aggregator(), claim, dimension, progress.update)
        noise = (runner.run(0, lambda index, released: None) for _ in range(tuning))
        yield runner, NoiseModel.fitted(noise, claim.clip_norm)


def process_of(
    built: object, dtype: type[np.float32 | np.float64], dimension: int
) -> tuple[_Start, _Step]:
    """Returns functions that run an aggregator on vectors of one size.

    Args:
      built: A ``mf_aggregators.Aggregator``, or a factory of ``tff.aggregators``.
      dtype: The dtype of clients' vectors.
      dimension: Their length.

    Returns:
      A function that makes a fresh state; and one from a state and clients' vectors to the next
      state, the mean, and the next clip norm where it adapts, None else.
    """
    if isinstance(built, Aggregator):
        aggregator = built.with_template(np.zeros(dimension, dtype))

        def in_numpy(state: object, clients: list[FloatArray]) -> _After:
            assert isinstance(state, AggregatorState)
            state, mean = aggregator.next(state, clients)
            return state, mean, aggregator.metrics(state).get("next_clip_norm")

        return aggregator.initialize, in_numpy
    # Imported here, because the import takes seconds.
    import tensorflow_federated as tff

    factory: tff.aggregators.UnweightedAggregationFactory = built
    process = factory.create(tff.TensorType(dtype, [dimension]))

    def in_tff(state: object, clients: list[FloatArray]) -> _After:
        output = process.next(state, clients)
        measured = getattr(output, "measurements", None) or {}
        norm = measured.get("dp_query_metrics", {}).get("next_clip_norm")
        return output.state, np.asarray(output.result), None if norm is None else float(norm)

    return process.initialize, in_tff


class _Runner:
    """Runs an aggregation process with an attacker, each time from a new first state."""

    def __init__(
        self, factory: object, claim: Claim, dimension: int, report_rounds: Callable[[int], object]
    ) -> None:
        self._initialize, self._next = process_of(factory, np.float32, dimension)
        self._claim = claim
        self._dimension = dimension
        self._report_rounds = report_rounds

    def scores(
        self, model: NoiseModel, contribution: Contribution, canaries: int
    ) -> tuple[FloatArray, FloatArray]:
        """Returns the likelihood-ratio score of each coordinate, and which ones had a canary."""
        signs = ChosenSigns(contribution, self._dimension)
        residuals = self.run(canaries, signs.choose)
        is_owned = np.zeros(self._dimension, bool)
        is_owned[self.coordinates(canaries)] = True
        # A run with fewer canaries scores fewer coordinates.
        used = slice(canaries * (1 + _ABSENCES_PER_CANARY))
        scores = model.scores(contribution, signs.values, residuals)
        return scores[used], is_owned[used]

    def run_joined(self, joins: FloatArray) -> FloatArray:
        """Runs all rounds with canaries that take part in different rounds.

        Args:
          joins: (n, canaries): 1 in the rounds of a canary, otherwise 0.

        Returns:
          The releases, as :meth:`run` returns them.
        """
        signs = np.zeros((len(joins), self._dimension))
        signs[:, self.coordinates(joins.shape[1])] = joins
        return self.run(joins.shape[1], lambda index, released: signs[index])

    def run(
        self, canaries: int, signs_of: Callable[[int, FloatArray], FloatArray | None]
    ) -> FloatArray:
        """Runs all rounds.

        Args:
          canaries: The number of canaries.
          signs_of: A function from a round and the (d,) sum of earlier releases to the (d,) signs
            that canaries send (0 for coordinates without a canary), or None for a round without
            canaries.

        Returns:
          (n, d): the released sums less the other client's contribution, in units of the first
          round's clip norm.
        """
        claim = self._claim
        residuals = np.zeros((claim.num_rounds, self._dimension))
        # The running sum of all releases: the model at learning rate 1.
        released = np.zeros(self._dimension)
        state = self._initialize()
        norm = claim.clip_norm
        for i in range(claim.num_rounds):
            base, signs = self._base(released, norm), signs_of(i, released)
            clients = [base]
            if signs is not None:
                clients += self._updates(signs, canaries, norm)
            state, mean, next_norm = self._next(state, clients)
            total = np.asarray(mean, np.float64) * claim.clients_per_round
            # In units of the first round's clip norm, where norms adapt.
            residuals[i] = (total - base) * (claim.clip_norm / norm)
            # An adaptive aggregator releases its next clip norm.
            norm = norm if next_norm is None else next_norm
            released += total
            self._report_rounds(1)
        return residuals

    def _base(self, released: FloatArray, norm: float) -> FloatArray:
        """Returns the other client's update, which is opposite to the sum of all releases."""
        direction = -released if np.any(released) else np.ones(self._dimension)
        length = norm * _BASE_NORM / np.linalg.norm(direction)
        return np.asarray(direction * length, np.float32)

    def _updates(self, signs: FloatArray, canaries: int, norm: float) -> list[FloatArray]:
        """The updates of the canaries that take part in a round."""
        coordinates = self.coordinates(canaries)
        updates = np.zeros((canaries, self._dimension), np.float32)
        updates[np.arange(canaries), coordinates] = _EXCESS * norm * signs[coordinates]
        return list(updates[signs[coordinates] != 0.0])

    @staticmethod
    def coordinates(canaries: int) -> IntArray:
        """Returns the coordinates that canaries own, spread over all."""
        return np.arange(canaries) * (1 + _ABSENCES_PER_CANARY)


class ChosenSigns:
    """The signs of canaries' updates, which follow from earlier releases.

    Attributes:
      values: (k, m): the sign in each of the k rounds of a canary at each coordinate; 0 in later
        rounds.
    """

    def __init__(self, contribution: Contribution | None, size: int) -> None:
        self.values = np.zeros((len(contribution.rounds) if contribution else 0, size))
        self._contribution = contribution

    def choose(self, index: int, released: FloatArray) -> FloatArray | None:
        """Returns the (m,) signs for a round; None if canaries do not take part in it.

        The first sign of a group is opposite to the model's coordinate; the others follow from it.

        Args:
          index: The round, from 0.
          released: (m,) the sum of all releases.
        """
        contribution = self._contribution
        if contribution is None or index not in contribution.rounds:
            return None
        position = contribution.rounds.index(index)
        first = contribution.groups.index(contribution.groups[position])
        if position == first:
            self.values[position] = np.where(released > 0.0, -1.0, 1.0)
        else:
            self.values[position] = contribution.signs[position] * self.values[first]
        return np.asarray(self.values[position])


@dataclasses.dataclass(frozen=True)
class _DrawnResult:
    """The result of an audit of drawn clients.

    Attributes:
      mechanism: The mechanism, whose guarantee sampling amplifies.
      bounds: The claimed epsilons, and lower bounds on the true ones.
      rates: The observed error rates, one for each of the bounds.
      false_alarm_rate: The largest probability with which ``exceeded`` is true of an intact
        mechanism.
    """

    mechanism: Mechanism
    bounds: tuple[_AnyMechanismBound, ...]
    rates: tuple[ErrorRates, ...]
    false_alarm_rate: float

    @property
    def exceeded(self) -> bool:
        """Whether the amplified claim is refuted."""
        return any(bound.epsilon_lower_bound > bound.epsilon for bound in self.bounds)


def audit_drawn(
    build_aggregator: Callable[[], object],
    mechanism: Mechanism,
    *,
    clip_norm: float,
    clients_per_round: float,
    delta: float = 1e-6,
    canaries: int = 4000,
    false_alarm_rate: float = 1e-4,
    show_progress: bool = False,
) -> _DrawnResult:
    """Attacks an aggregator with drawn clients, in TensorFlow Federated or NumPy.

    Args:
      build_aggregator: As ``audit.audit`` takes it.
      mechanism: The mechanism, with the sampling scheme that draws its clients.
      clip_norm: The L2 norm to which each client's update is clipped.
      clients_per_round: The number by which sums are divided.
      delta: The delta at which epsilon is stated.
      canaries: The number of canaries, over all runs.
      false_alarm_rate: The largest probability of ``exceeded`` for an intact mechanism.
      show_progress: Whether to show a bar on standard error.

    Returns:
      The bounds at ``delta``, at 0.02 and at 0.1.

    Raises:
      ValueError: If a number is out of its range, or the scheme cannot be audited.
    """
    scheme = mechanism.sampling
    if scheme is None:
        raise ValueError("the mechanism has no sampling scheme: use audit.audit.")
    if scheme.has_groups and type(scheme) is not PoissonSampling:
        raise ValueError(
            f"there is no audit of the draws of {scheme.name}. Audit the matrix for known rounds: "
            "give --participation=single, or the schema that its clients keep."
        )
    canaries = numbers.positive_integer(canaries, "canaries")
    false_alarm_rate = statistics.checked_false_alarm_rate(false_alarm_rate)
    deltas = tuple(dict.fromkeys((numbers.delta(delta), *_DELTAS)))
    bare = dataclasses.replace(mechanism, participation=SingleParticipation())
    claim = Claim(bare, clip_norm, clients_per_round)
    epsilons = {each: mechanism.guarantee(each).epsilon for each in deltas}
    miss_probability = false_alarm_rate / (2 * len(deltas))
    patterns, weights = _mixture(scheme)
    of_runs = _runs_of_canaries(canaries, len(_draws(scheme)) - 1)
    with _tuned_runner(build_aggregator, claim, of_runs, show_progress) as (runner, model):
        thresholds = _thresholds(
            model, clip_norm * patterns, weights, canaries, deltas, miss_probability
        )
        absent, present = [], []
        for number in of_runs:
            joins = _draws(scheme)[:number].T
            found = _mixture_scores(model, clip_norm * patterns, weights, runner.run_joined(joins))
            owned = runner.coordinates(number)
            present.append(found[owned])
            absent.append(np.delete(found, owned)[: number * _ABSENCES_PER_CANARY])
    rates = _rates(absent, present, thresholds, miss_probability)
    return _DrawnResult(
        mechanism, _bounds_of_any_mechanism(epsilons, rates), rates, false_alarm_rate
    )


def _mixture_scores(
    model: NoiseModel, shifts: FloatArray, weights: FloatArray, residuals: FloatArray
) -> FloatArray:
    """Returns log-likelihood ratios of a mixture of shifted normal distributions.

    Args:
      model: The noise.
      shifts: (k, n): the contribution of a client for each draw.
      weights: (k,) their probabilities.
      residuals: (n, m): the releases less the contributions that the attacker knows.

    Returns:
      (m,) log sum_k w_k N(r; mean + shift_k, Sigma) / N(r; mean, Sigma).
    """
    directions = shifts @ model.precision
    constants = np.log(weights) - 0.5 * np.sum(directions * shifts, axis=1)
    centred = model.centred(residuals)
    return np.concatenate(
        [
            scipy.special.logsumexp(
                directions @ centred[:, begin : begin + _COORDINATES] + constants[:, np.newaxis],
                axis=0,
            )
            for begin in range(0, centred.shape[1], _COORDINATES)
        ]
    )


def _draws(scheme: SamplingScheme) -> FloatArray:
    """Draws with a new seed the rounds of clients that are independent: (clients, n)."""
    sampler = scheme.sampler(secret_seed())
    joins = np.zeros((scheme.population, scheme.num_rounds))
    for index in range(scheme.num_rounds):
        joins[sampler.draw(index), index] = 1.0
    return joins[sampler.group_of_round(0)]


def _mixture(scheme: SamplingScheme) -> tuple[FloatArray, FloatArray]:
    """The distinct draws of a scheme, with their frequencies."""
    drawn = [_draws(scheme)]
    for _ in range(math.ceil(_DRAWS / len(drawn[0])) - 1):
        drawn.append(_draws(scheme))
    patterns, counts = np.unique(np.concatenate(drawn), axis=0, return_counts=True)
    return patterns, counts / np.sum(counts)


def _thresholds(
    model: NoiseModel,
    shifts: FloatArray,
    weights: FloatArray,
    canaries: int,
    deltas: Sequence[float],
    miss_probability: float,
) -> list[float]:
    """For each delta, the threshold with the largest bound in a simulation of the fitted noise."""
    rng = np.random.default_rng(0)
    lower = np.linalg.cholesky(np.linalg.inv(model.precision))
    noise = model.mean[:, np.newaxis] + lower @ rng.standard_normal((len(lower), 2 * _DRAWS))
    chosen = shifts[rng.choice(len(weights), size=2 * _DRAWS, p=weights)].T
    without, of_client = (
        _mixture_scores(model, shifts, weights, each) for each in (noise, noise + chosen)
    )
    candidates = np.quantile(np.concatenate([without, of_client]), np.linspace(0, 1, _THRESHOLDS))
    # The shares of scores above each candidate threshold.
    above = 1.0 - np.searchsorted(np.sort(without), candidates, side="right") / len(without)
    below = np.searchsorted(np.sort(of_client), candidates, side="right") / len(of_client)
    sizes = (canaries * _ABSENCES_PER_CANARY, canaries)
    return statistics.best_thresholds(candidates, (above, below), sizes, miss_probability, deltas)
