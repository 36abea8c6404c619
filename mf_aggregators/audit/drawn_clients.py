"""An audit of clients that are drawn: what an attacker learns who does not know the draws.

Canaries are clients of the sampling scheme, in the rounds in which its own sampler draws them, by a
new secret seed in each run. Nobody knows these rounds: the attacker decides by the likelihood ratio
of the mixture over draws, made of many other draws of the scheme. Its error rates bound epsilon
from below at each delta (``AnyMechanismBound``), and refute the amplified claim where that bound
is above it. What an attacker learns who knows the rounds is no violation of that claim.

Observations have to be independent. Clients that draw for themselves are, and so are those of one
group that Poisson sampling draws from, whose group the attacker knows, as in the proof.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import scipy.special

from mf_aggregators.audit import statistics
from mf_aggregators.audit.auditing import (
    ABSENCES_PER_CANARY,
    LARGE_DELTA,
    AnyMechanismBound,
    Claim,
    bounds_of_any_mechanism,
    runs_of_canaries,
    tuned_runner,
)
from mf_aggregators.audit.statistics import ErrorRates, NoiseModel
from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.numbers import FloatArray
from mf_aggregators.mechanism import Mechanism
from mf_aggregators.participation import (
    PoissonSampling,
    SamplingScheme,
    SingleParticipation,
    secret_seed,
)

# At these, a feasible number of observations shows much of an epsilon. At the larger one, sampling
# amplifies little.
_DELTAS = (0.02, LARGE_DELTA)
# Draws that the attacker's mixture is made of, at least, and thresholds that are tried.
_DRAWS, _THRESHOLDS = 4000, 200
# The number of coordinates that are scored at once.
_COORDINATES = 2000


@dataclasses.dataclass(frozen=True)
class DrawnResult:
    """Result of an audit of drawn clients.

    Attributes:
      mechanism: The mechanism, whose guarantee sampling amplifies.
      bounds: The claimed epsilons, and bounds on them from below.
      rates: The observed error rates, one for each of the bounds.
      false_alarm_rate: The largest probability with which ``exceeded`` is true of an intact
        mechanism.
    """

    mechanism: Mechanism
    bounds: tuple[AnyMechanismBound, ...]
    rates: tuple[ErrorRates, ...]
    false_alarm_rate: float

    @property
    def exceeded(self) -> bool:
        """Whether the amplified claim is refuted."""
        return any(bound.epsilon_lower_bound > bound.epsilon for bound in self.bounds)


def check_scheme(scheme: SamplingScheme) -> None:
    """Raises ValueError if no audit of a scheme's draws is known.

    Args:
      scheme: The scheme.
    """
    if scheme.has_groups and type(scheme) is not PoissonSampling:
        raise ValueError(
            f"no audit of the draws of {scheme.name} is known. Audit the matrix alone, towards who "
            "knows the rounds: --participation=single, or the schema that its clients keep."
        )


def audit_drawn(
    build_aggregator: Callable[[], Any],
    mechanism: Mechanism,
    *,
    clip_norm: float,
    clients_per_round: float,
    delta: float = 1e-6,
    canaries: int = 4000,
    false_alarm_rate: float = 1e-4,
    show_progress: bool = False,
) -> DrawnResult:
    """Audits an aggregator by runs with drawn clients, in TensorFlow Federated or NumPy.

    Args:
      build_aggregator: As ``audit.audit`` takes it.
      mechanism: The mechanism, whose clients a sampling scheme draws.
      clip_norm: The L2 norm to which each client's update is clipped.
      clients_per_round: What sums are divided by.
      delta: The delta at which epsilon is stated.
      canaries: The number of canaries, over all runs.
      false_alarm_rate: The largest probability of ``exceeded`` for an intact mechanism.
      show_progress: Whether to show a bar on standard error.

    Returns:
      The bounds at ``delta``, at 0.02 and at 0.1.

    Raises:
      ValueError: If a number is out of its range, or no audit of the draws is known.
    """
    scheme = mechanism.sampling
    if scheme is None:
        raise ValueError("no scheme draws the clients of the mechanism: use audit.audit.")
    check_scheme(scheme)
    canaries = numbers.positive_integer(canaries, "canaries")
    false_alarm_rate = statistics.checked_false_alarm_rate(false_alarm_rate)
    deltas = tuple(dict.fromkeys((numbers.delta(delta), *_DELTAS)))
    bare = dataclasses.replace(mechanism, participation=SingleParticipation())
    claim = Claim(bare, clip_norm, clients_per_round)
    epsilons = {each: mechanism.guarantee(each).epsilon for each in deltas}
    miss_probability = false_alarm_rate / (2 * len(deltas))
    patterns, weights = _mixture(scheme)
    of_runs = runs_of_canaries(canaries, len(_draws(scheme)) - 1)
    with tuned_runner(build_aggregator, claim, of_runs, show_progress) as (runner, model):
        thresholds = _thresholds(
            model, clip_norm * patterns, weights, canaries, deltas, miss_probability
        )
        absent, present = [], []
        for number in of_runs:
            joins = _draws(scheme)[:number].T
            residuals, owned = runner.run_joined(joins)
            found = mixture_scores(model, clip_norm * patterns, weights, residuals)
            present.append(found[owned])
            absent.append(np.delete(found, owned)[: number * ABSENCES_PER_CANARY])
    rates = tuple(
        statistics.rates_of_scores(
            np.concatenate(absent), np.concatenate(present), threshold, miss_probability
        )
        for threshold in thresholds
    )
    return DrawnResult(mechanism, bounds_of_any_mechanism(epsilons, rates), rates, false_alarm_rate)


def mixture_scores(
    model: NoiseModel, shifts: FloatArray, weights: FloatArray, residuals: FloatArray
) -> FloatArray:
    """Returns log-likelihood ratios of a mixture of normal distributions from one of them.

    Args:
      model: The noise.
      shifts: (k, n) what a client adds by each draw.
      weights: (k,) their probabilities.
      residuals: (n, m) what was released, less what the attacker knows.

    Returns:
      (m,) log sum_k w_k N(r; mean + shift_k, Sigma) / N(r; mean, Sigma).
    """
    directions = shifts @ model.precision
    constants = np.log(weights) - 0.5 * np.sum(directions * shifts, axis=1)
    centred = residuals - model.mean[:, np.newaxis]
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
    """The rounds of all clients that are drawn independently, by a new seed: (clients, n)."""
    sampler = scheme.sampler(secret_seed())
    joins = np.zeros((scheme.population, scheme.num_rounds))
    for index in range(scheme.num_rounds):
        joins[sampler.draw(index), index] = 1.0
    return joins[sampler.group_of_round(0)]


def _mixture(scheme: SamplingScheme) -> tuple[FloatArray, FloatArray]:
    """Draws of a scheme, each once, and how often they came."""
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
    """For each delta the threshold that shows most in a simulation of the fitted noise."""
    rng = np.random.default_rng(0)
    absences = canaries * ABSENCES_PER_CANARY
    lower = np.linalg.cholesky(np.linalg.inv(model.precision))
    noise = model.mean[:, np.newaxis] + lower @ rng.standard_normal((len(lower), 2 * _DRAWS))
    chosen = shifts[rng.choice(len(weights), size=2 * _DRAWS, p=weights)].T
    without, of_client = (
        mixture_scores(model, shifts, weights, each) for each in (noise, noise + chosen)
    )
    candidates = np.quantile(np.concatenate([without, of_client]), np.linspace(0, 1, _THRESHOLDS))
    found = []
    for delta in deltas:
        expected = [
            ErrorRates.of_counts(
                float(each),
                float(np.mean(without > each)) * absences,
                absences,
                float(np.mean(of_client <= each)) * canaries,
                canaries,
                miss_probability,
            ).epsilon_lower_bound_any_mechanism(delta)
            for each in candidates
        ]
        found.append(float(candidates[int(np.argmax(expected))]))
    return found
