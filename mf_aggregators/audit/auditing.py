"""An empirical privacy audit of the aggregator: real noise, real clipping, real rounds.

Many clients, the *canaries*, are audited at once. Each owns one coordinate of the model and sends
an update far above the clip norm there, in the rounds of one participation pattern. Coordinates
that nobody owns show the same run without such a client (zero-out adjacency). An attacker who
knows all other updates, and chooses them and the canaries' signs from what was released before,
decides by the likelihood ratio of the whole released stream. Its error rates bound epsilon from
below, see ``audit.statistics``; a bound above the claim is a violation.

The attacker learns the noise from tuning runs without canaries and never looks at the claimed
matrix, so that it finds what a mechanism leaks, whatever the mechanism says of itself.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mf_aggregators import inputs, memory
from mf_aggregators.audit import processes, statistics
from mf_aggregators.audit.statistics import Contribution, ErrorRates, NoiseModel
from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.numbers import FloatArray, IntArray
from mf_aggregators.mechanism import Mechanism
from mf_aggregators.participation import check
from mf_aggregators.progress_bars import ProgressBar

# Coordinates without a client for each canary: they are cheap, and canaries are not. Canaries are
# 51 coordinates apart, an odd number, so that they own even and odd ones.
ABSENCES_PER_CANARY = 50
_CANARIES_PER_RUN = 250
_BYTES_PER_NUMBER = 8
# With fewer coordinates in tuning runs, errors of the covariance cost the attacker power: about the
# rounds over the coordinates, relative to the squared power.
_TUNING_COORDINATES_PER_ROUND = 50
_FEWEST_TUNING_COORDINATES = 20_000
# Residuals are kept in memory, a row for each round.
_MOST_ROUNDS = 1024

# Canaries send updates this many clip norms long, so that missing or wrong clipping shows.
_EXCESS = 10.0
# The other client's update is shorter than the clip norm by this factor: clipping changes nothing.
_BASE_NORM = 0.9
# At this delta, a feasible number of observations shows a large epsilon of any mechanism. At the
# deltas in use, no feasible number does.
LARGE_DELTA = 0.1


@dataclasses.dataclass(frozen=True)
class Claim:
    """The claim of an aggregator.

    Attributes:
      mechanism: The mechanism, without sampling and with noise. The attack looks at its numbers
        alone, never at its matrix.
      clip_norm: The L2 norm to which each client's update is clipped; that of the first round if
        it adapts.
      clients_per_round: What sums are divided by.

    Raises:
      TypeError: If a sampling scheme draws the clients.
      ValueError: If a number is out of its range.
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
class AnyMechanismBound:
    """A bound on epsilon at one delta that assumes nothing of the mechanism.

    Attributes:
      delta: The delta.
      epsilon: The claimed epsilon there.
      epsilon_lower_bound: The largest epsilon that the audit refutes there.
    """

    delta: float
    epsilon: float
    epsilon_lower_bound: float


@dataclasses.dataclass(frozen=True)
class AuditResult:
    """Result of an audit.

    Attributes:
      claim: What was audited.
      delta: The delta that epsilon is stated at.
      epsilon: The claimed epsilon, exact for the noise multiplier.
      epsilon_lower_bound: The epsilon at ``delta`` of the largest mu that was refuted: below
        it, the trade-off curve that the noise multiplier promises does not hold.
      mu_lower_bound: The largest mu that was refuted; the claimed one is ``claim.mu``.
      any_mechanism: Bounds that do not use the promised curve, at ``delta`` and LARGE_DELTA.
      contribution: The rounds and signs of the canaries.
      rates: The observed error rates, one for each threshold.
      false_alarm_rate: The largest probability with which ``exceeded`` is true of an intact
        mechanism; it covers all bounds together.
    """

    claim: Claim
    delta: float
    epsilon: float
    epsilon_lower_bound: float
    mu_lower_bound: float
    any_mechanism: tuple[AnyMechanismBound, ...]
    contribution: Contribution
    rates: tuple[ErrorRates, ...]
    false_alarm_rate: float

    @property
    def ratio(self) -> float:
        """The lower bound over the claimed epsilon: how much of the claim the attack reached."""
        return self.epsilon_lower_bound / self.epsilon

    @property
    def epsilon_of_a_perfect_attack(self) -> float:
        """The lower bound that an attack without any error gets from this number of canaries."""
        # Every threshold has two rates, and the bounds on all of them hold together.
        miss_probability = self.false_alarm_rate / (2 * (1 + len(self.any_mechanism)))
        rates = self.rates[0]
        most = statistics.largest_provable_mu(rates.absences, rates.presences, miss_probability)
        return statistics.epsilon_of_mu(most, self.delta)

    @property
    def exceeded(self) -> bool:
        """Whether the claim is refuted."""
        return self.mu_lower_bound > self.claim.mu or any(
            bound.epsilon_lower_bound > bound.epsilon for bound in self.any_mechanism
        )


def audit(
    build_aggregator: Callable[[], Any],
    claim: Claim,
    *,
    delta: float = 1e-6,
    canaries: int = 4000,
    false_alarm_rate: float = 1e-4,
    show_progress: bool = False,
) -> AuditResult:
    """Audits an aggregator by runs in TensorFlow Federated, or in NumPy.

    Bounds assume that the noise of different coordinates is independent, as the mechanism
    promises; the audit does not test that.

    Args:
      build_aggregator: Returns an aggregator with unseeded noise: a
        ``tff.aggregators.UnweightedAggregationFactory`` such as ``mf_dp_aggregator(...)``, or a
        ``mf_aggregators.Aggregator``, which releases the same bits in a sixth of the time.
      claim: What it promises.
      delta: The delta at which epsilon is stated.
      canaries: The number of canaries, over all runs.
      false_alarm_rate: The largest probability of ``exceeded`` for an intact mechanism.
      show_progress: Whether to show a bar on standard error.

    Returns:
      The bounds.

    Raises:
      ValueError: If a number is out of its range, the claim is too weak to be refuted by so
        few clients or has so little noise that no epsilon holds at ``delta``, or the
        aggregator releases what is not finite.
    """
    canaries = numbers.positive_integer(canaries, "canaries")
    false_alarm_rate = statistics.checked_false_alarm_rate(false_alarm_rate)
    absences = canaries * ABSENCES_PER_CANARY
    dimension = min(canaries, _CANARIES_PER_RUN) * (1 + ABSENCES_PER_CANARY)
    memory.check(
        _BYTES_PER_NUMBER * (2 * (absences + canaries) + 2 * dimension * claim.num_rounds),
        f"an audit of {canaries} canaries over {claim.num_rounds} rounds",
        "use fewer of them",
    )
    deltas = tuple(dict.fromkeys((numbers.delta(delta), LARGE_DELTA)))
    # Every threshold has two rates, and the bounds on all of them hold together.
    miss_probability = false_alarm_rate / (2 * (1 + len(deltas)))
    provable = statistics.largest_provable_mu(absences, canaries, miss_probability)
    if provable <= claim.mu:
        # With very few canaries, every bound is 0.
        reach = f"a noise multiplier below {1.0 / provable:.3g}" if provable > 0.0 else "any claim"
        raise ValueError(
            f"{canaries} canaries cannot refute {reach}, found a noise multiplier of "
            f"{claim.mechanism.noise_multiplier:g}: use more canaries or a larger noise multiplier."
        )
    epsilons = {each: claim.mechanism.guarantee(each).epsilon for each in deltas}
    if math.inf in epsilons.values():
        raise ValueError(
            f"so little noise as that of the noise multiplier {claim.mechanism.noise_multiplier:g} "
            "has no epsilon that an audit could refute: use more noise, or a larger delta."
        )
    if epsilons[delta] == 0.0:
        raise ValueError(
            f"the claim is epsilon 0 at delta {delta:g}, of which no share can be shown: use a "
            "smaller delta or noise multiplier."
        )
    of_runs = runs_of_canaries(canaries)
    with tuned_runner(build_aggregator, claim, of_runs, show_progress) as (runner, model):
        contribution = statistics.choose_contribution(
            model, claim.mechanism.participation, claim.clip_norm
        )
        thresholds = statistics.choose_thresholds(
            contribution.power, absences, canaries, miss_probability, deltas
        )
        absent, present = [], []
        for number in of_runs:
            scores, is_owned = runner.scores(model, contribution, number)
            absent.append(scores[~is_owned])
            present.append(scores[is_owned])
    rates = tuple(
        statistics.rates_of_scores(
            np.concatenate(absent), np.concatenate(present), threshold, miss_probability
        )
        for threshold in thresholds
    )
    mu = max(rate.mu_lower_bound for rate in rates)
    return AuditResult(
        claim=claim,
        delta=delta,
        epsilon=epsilons[delta],
        epsilon_lower_bound=statistics.epsilon_of_mu(mu, delta),
        mu_lower_bound=mu,
        any_mechanism=bounds_of_any_mechanism(epsilons, rates),
        contribution=contribution,
        rates=rates,
        false_alarm_rate=false_alarm_rate,
    )


def runs_of_canaries(canaries: int, most: int = _CANARIES_PER_RUN) -> list[int]:
    """Returns the number of canaries in each run, about the same in all.

    Args:
      canaries: Their number.
      most: How many a run may have, if it is fewer than runs have anyway.
    """
    runs = math.ceil(canaries / max(min(most, _CANARIES_PER_RUN), 1))
    return [canaries // runs + (i < canaries % runs) for i in range(runs)]


def bounds_of_any_mechanism(
    epsilons: Mapping[float, float], rates: Sequence[ErrorRates]
) -> tuple[AnyMechanismBound, ...]:
    """Returns the bounds that hold for any mechanism with these error rates.

    Args:
      epsilons: What is claimed, by delta.
      rates: The error rates at some thresholds.
    """
    return tuple(
        AnyMechanismBound(
            delta, epsilon, max(rate.epsilon_lower_bound_any_mechanism(delta) for rate in rates)
        )
        for delta, epsilon in epsilons.items()
    )


@contextlib.contextmanager
def tuned_runner(
    build_aggregator: Callable[[], Any], claim: Claim, numbers: Sequence[int], show_progress: bool
) -> Iterator[tuple["Runner", NoiseModel]]:
    """Yields a runner of an aggregation process, and its noise without canaries.

    Args:
      build_aggregator: As :func:`audit` takes it.
      claim: What is audited.
      numbers: The canaries of each run that follows.
      show_progress: Whether to show a bar on standard error.
    """
    dimension = max(numbers) * (1 + ABSENCES_PER_CANARY)
    needed = max(_FEWEST_TUNING_COORDINATES, _TUNING_COORDINATES_PER_ROUND * claim.num_rounds)
    tuning = math.ceil(needed / dimension)
    with ProgressBar(
        total=(tuning + len(numbers)) * claim.num_rounds,
        desc="audit",
        unit="round",
        disable=not show_progress,
    ) as progress:
        runner = Runner(build_aggregator(), claim, dimension, progress.update)
        noise = [runner.run(None, 0)[0] for _ in range(tuning)]
        model = statistics.fit_noise(np.concatenate(noise, axis=1), claim.clip_norm)
        del noise
        yield runner, model


class Runner:
    """Runs one aggregation process, from a fresh start each time, with the attacker in it."""

    def __init__(
        self, factory: Any, claim: Claim, dimension: int, report_rounds: Callable[[int], Any]
    ) -> None:
        self._process = processes.of(factory, np.float32, dimension)
        self._claim = claim
        self._dimension = dimension
        self._report_rounds = report_rounds

    def scores(
        self, model: NoiseModel, contribution: Contribution, canaries: int
    ) -> tuple[FloatArray, FloatArray]:
        """Returns the likelihood-ratio score of each coordinate, and which ones had a canary."""
        residuals, signs = self.run(contribution, canaries)
        if not np.all(np.isfinite(residuals)):
            raise ValueError("the aggregator released numbers that are not finite.")
        is_owned = np.zeros(self._dimension, bool)
        is_owned[self._coordinates(canaries)] = True
        # A run with fewer canaries scores fewer coordinates.
        used = slice(canaries * (1 + ABSENCES_PER_CANARY))
        scores = statistics.scores(model, contribution, signs, residuals)
        return scores[used], is_owned[used]

    def run_joined(self, joins: FloatArray) -> tuple[FloatArray, IntArray]:
        """Runs all rounds with canaries of which each has rounds of its own.

        Args:
          joins: (n, canaries) 1 in the rounds of a canary, and else 0.

        Returns:
          What was released, as :meth:`run` does, and the coordinates of the canaries.
        """
        coordinates = self._coordinates(joins.shape[1])
        signs = np.zeros((len(joins), self._dimension))
        signs[:, coordinates] = joins
        residuals, _ = self.run(None, joins.shape[1], signs)
        if not np.all(np.isfinite(residuals)):
            raise ValueError("the aggregator released numbers that are not finite.")
        return residuals, coordinates

    def run(
        self,
        contribution: Contribution | None,
        canaries: int,
        joins: FloatArray | None = None,
    ) -> tuple[FloatArray, FloatArray]:
        """Runs all rounds.

        Args:
          contribution: What the canaries send; None without any.
          canaries: Their number.
          joins: (n, d) in the place of a contribution, the sign of the canary of each coordinate.

        Returns:
          (n, d): the released sums less the other client's contribution; and (k, d): the sign
          that a canary of each coordinate has in each of its k rounds, whether there is one or
          not.
        """
        claim = self._claim
        rounds = contribution.rounds if contribution else ()
        signs = np.zeros((len(rounds), self._dimension))
        residuals = np.zeros((claim.num_rounds, self._dimension))
        # The running sum of all that was released: a model that is trained at rate 1.
        released = np.zeros(self._dimension)
        state = self._process.initialize()
        norm = claim.clip_norm
        for i in range(claim.num_rounds):
            base = self._base(released, norm)
            clients = [base]
            if contribution and i in rounds:
                position = rounds.index(i)
                signs[position] = _next_signs(contribution, position, signs, released)
                clients += self._updates(signs[position], canaries, norm)
            if joins is not None:
                clients += [
                    each for each in self._updates(joins[i], canaries, norm) if np.any(each)
                ]
            state, mean, next_norm = self._process.next(state, clients)
            total = np.asarray(mean, np.float64) * claim.clients_per_round
            # In units of the first round's clip norm, where norms adapt.
            residuals[i] = (total - base) * (claim.clip_norm / norm)
            # An adaptive aggregator releases its next clip norm.
            norm = norm if next_norm is None else next_norm
            released += total
            self._report_rounds(1)
        return residuals, signs

    def _base(self, released: FloatArray, norm: float) -> FloatArray:
        """Returns the other client's update, which pulls the model back to where it began."""
        direction = -released if np.any(released) else np.ones(self._dimension)
        length = norm * _BASE_NORM / np.linalg.norm(direction)
        return np.asarray(direction * length, np.float32)

    def _updates(self, signs: FloatArray, canaries: int, norm: float) -> list[FloatArray]:
        updates = np.zeros((canaries, self._dimension), np.float32)
        coordinates = self._coordinates(canaries)
        updates[np.arange(canaries), coordinates] = _EXCESS * norm * signs[coordinates]
        return list(updates)

    @staticmethod
    def _coordinates(canaries: int) -> IntArray:
        """Returns the coordinates that canaries own, spread over all."""
        return np.arange(canaries) * (1 + ABSENCES_PER_CANARY)


def _next_signs(
    contribution: Contribution, position: int, signs: FloatArray, released: FloatArray
) -> FloatArray:
    """Returns the sign at every coordinate in one participation, from earlier releases.

    The first of a group opposes the model's coordinate; the others follow the first.
    """
    first = contribution.groups.index(contribution.groups[position])
    if position == first:
        return np.where(released > 0.0, -1.0, 1.0)
    return np.asarray(contribution.signs[position] * signs[first])
