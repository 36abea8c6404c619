r"""The highest true positive rate of an attacker at a false positive rate.

The attacker sees all that a run released, knows everything about it but whether one client's
updates were used or replaced by zeros, and decides which it was. Its false positive rate x is the
probability that it says "used" where they were replaced, its true positive rate the probability
that it says so where they were used. No test has a higher true positive rate than the bound here
(Wasserman and Zhou, 2010, Thm 2.4; Kairouz, Oh and Viswanath, 2015, Thm 2.1):

* Unamplified runs are one Gaussian mechanism of noise multiplier sigma, that is mu-GDP with
  mu = 1 / sigma, so that the rate is Phi(Phi^-1(x) + 1 / sigma) (Dong, Roth and Su, 2022,
  Eq. 6), for real normal numbers.
* From (epsilon, delta)-DP follows P(S) <= e^epsilon Q(S) + delta for the set S of outputs where
  the attacker says "used", and the same for its complement with P and Q exchanged. So the rate is
  at most e^epsilon x + delta, and at most 1 - e^-epsilon (1 - x - delta). The smallest of both over
  any number of pairs that hold holds as well; the whole curve of pairs gives the best bound.

For sampled runs, the bound of whoever knows the batches holds too: for each way to draw them the
run is a Gaussian mechanism, and divergences of mixtures are no larger than the largest of their
parts.

The noise that is drawn has the curve delta(epsilon) of real normal numbers plus the failure
probability p of ``gaussian``, at every epsilon, also a negative one. The mu-GDP rate is the
smallest of e^epsilon x + delta(epsilon) over all epsilons, so it grows by p at most.
"""

import functools
import math
from collections.abc import Sequence

import numpy as np
from scipy import special

from mf_aggregators.kernel import certificate, gaussian, losses, numbers
from mf_aggregators.kernel.dominating_pairs import dominating_pair
from mf_aggregators.kernel.draws_of_clients import (
    InGroups,
    RandomAllocation,
    SampledRun,
    Shuffling,
    is_accounted,
)
from mf_aggregators.kernel.gaussian import DEFAULT_NUM_COORDINATES, TailError, underflow_is_zero
from mf_aggregators.kernel.numbers import FloatArray

# Upper bounds on the rounding errors of the normal distribution function, its inverse and
# exponentials: relative to the rate, and absolute.
_ROUNDING = 1e-12
_ABSOLUTE_ROUNDING = 1e-15
# Epsilons of the curve of a run that draws from groups, up to where delta is next to nothing.
_NUM_EPSILONS = 120
_LEAST_DELTA_OF_CURVE = 1e-11
_MOST_DOUBLINGS = 24
# The grid of losses, relative to the spread of the sum of all losses.
_INTERVAL_OF_SPREAD = 5e-3
# The epsilons at which samples bound divergences, how many samples, down to which divergence they
# are close, and the failure probability.
_EPSILONS = 10.0 * np.linspace(0.0, 1.0, 61) ** 1.5
_SAMPLES, _LEVEL, _FAILURE = 2**15, 1e-6, 1e-9


@underflow_is_zero
def true_positive_rate(
    noise_multiplier: float,
    false_positive_rate: float | FloatArray,
    *,
    num_coordinates: int = DEFAULT_NUM_COORDINATES,
    disjoint_participations: int = 1,
) -> float | FloatArray:
    """Returns the highest true positive rate that an attacker of an unamplified run can have.

    Args:
      noise_multiplier: Relative to the sensitivity of C under its participation schema; zero
        means no noise, and infinity that nothing was released of any client.
      false_positive_rate: At which false positive rate, from 0 to 1; or an array of them.
      num_coordinates: Parameters times rounds, as in :func:`epsilon`.
      disjoint_participations: As in :func:`epsilon`.

    Returns:
      Phi(Phi^-1(false positive rate) + 1 / noise_multiplier) and the failure probability of the
      noise, at most 1; of the shape of the argument.

    Raises:
      TailError: If the noise multiplier is below 0.2 and not zero: a ValueError.
      ValueError: If an argument is out of its range.
    """
    rates = _rates(false_positive_rate)
    participations = numbers.positive_integer(disjoint_participations, "disjoint_participations")
    if numbers.number(noise_multiplier, "noise_multiplier") == math.inf:
        return _of_shape(rates, false_positive_rate)
    sigma = numbers.non_negative_number(noise_multiplier, "noise_multiplier")
    if sigma == 0.0:
        return _of_shape(np.ones_like(rates), false_positive_rate)
    each = sigma * math.sqrt(participations)
    failure = gaussian.failure_probability(each, num_coordinates)
    found = special.ndtr(special.ndtri(rates) + 1.0 / sigma)
    return _of_shape(_rounded(found + failure), false_positive_rate)


def true_positive_rate_of_pairs(
    guarantees: Sequence[tuple[float, float]], false_positive_rate: float | FloatArray
) -> float | FloatArray:
    """Returns the highest true positive rate that (epsilon, delta)-DP allows an attacker.

    Args:
      guarantees: Pairs of an epsilon, which may be infinite, and a delta, all of which hold.
      false_positive_rate: At which false positive rate, from 0 to 1; or an array of them.

    Returns:
      The smallest of e^epsilon x + delta and 1 - e^-epsilon (1 - x - delta) over all pairs, at
      most 1, where x is the false positive rate; of the shape of the argument.

    Raises:
      ValueError: If an argument is out of its range.
    """
    rates = _rates(false_positive_rate)
    found = np.ones_like(rates)
    for pair in guarantees:
        epsilon, delta = (numbers.number(each, "each of guarantees") for each in pair)
        if not (epsilon >= 0.0 and 0.0 <= delta <= 1.0):
            raise ValueError(
                "guarantees must be pairs of an epsilon of at least 0 and a delta from 0 to 1, "
                f"found ({epsilon}, {delta})."
            )
        if epsilon < math.log(1.0 / _ROUNDING):
            found = np.minimum(found, math.exp(epsilon) * rates + delta)
        else:
            # The factor may overflow, and nothing is left of the bound but for x = 0.
            found = np.minimum(found, np.where(rates > 0.0, 1.0, delta))
        found = np.minimum(found, 1.0 - math.exp(-epsilon) * np.maximum(1.0 - rates - delta, 0.0))
    return _of_shape(_rounded(found), false_positive_rate)


@underflow_is_zero
def sampled_true_positive_rate(
    run: SampledRun,
    false_positive_rate: float | FloatArray,
    *,
    guarantees: Sequence[tuple[float, float]] = (),
    seed: int = 0,
    num_coordinates: int = DEFAULT_NUM_COORDINATES,
) -> float | FloatArray:
    """Returns the highest true positive rate of an attacker who does not know the batches.

    Args:
      run: The run; a sigma of zero means no noise.
      false_positive_rate: At which false positive rate, from 0 to 1; or an array of them.
      guarantees: Pairs (epsilon, delta) that are known to hold, besides those of :func:`curve`.
      seed: What samples follow from, for clients who draw for themselves.
      num_coordinates: As in :func:`epsilon`.

    Returns:
      The rate, of the shape of the argument; never above that without amplification.

    Raises:
      TailError: If so little noise cannot be accounted for: a ValueError.
      ValueError: If an argument is out of its range.
    """
    sigma, together = run.sigma, run.together
    rates = _rates(false_positive_rate)
    pairs, refused = tuple(guarantees), None
    pairs += curve(run, seed, num_coordinates)
    try:
        found = np.asarray(
            true_positive_rate(
                run.noise_multiplier,
                rates,
                num_coordinates=num_coordinates,
                disjoint_participations=together.disjoint if sigma else 1,
            )
        )
    except TailError as error:
        found, refused = np.ones_like(rates), error
    if refused is not None and not any(math.isfinite(epsilon) for epsilon, _ in pairs):
        raise refused
    found = np.minimum(found, true_positive_rate_of_pairs(pairs, rates))
    return _of_shape(found, false_positive_rate)


# Statements ask for the same curve again and again.
@functools.lru_cache(maxsize=64)
@underflow_is_zero
def curve(run: SampledRun, seed: int, num_coordinates: int) -> tuple[tuple[float, float], ...]:
    """Returns pairs (epsilon, delta) that hold of a run with drawn clients.

    Between pairs nothing is known: with a hundred of them, of deltas from 1 to 1e-12, an attacker
    that they allow is close to the true one, with a dozen it is not. Deltas include what integers
    cost (``gaussian.failure_probability``).

    Args:
      run: The run.
      seed: What samples follow from, for clients who draw for themselves. Their bounds hold but for
        a probability of 1e-9, which is added to each delta.
      num_coordinates: Parameters times rounds.

    Returns:
      The pairs; none for less noise than is amplified.
    """
    draws, sigma = run.draws, run.sigma
    if not is_accounted(sigma):
        return ()
    if isinstance(draws, Shuffling):
        return losses.shuffled_pairs(draws, sigma, num_coordinates)
    largest_part = max(run.together.largest_part, draws.largest_move)
    try:
        failure = gaussian.failure_probability(sigma / largest_part, num_coordinates)
    except TailError:
        return ()
    if not isinstance(draws, InGroups):
        pair = dominating_pair(run, num_coordinates)
        profile = certificate.Profile(pair, _FAILURE, _LEVEL, seed=seed, samples=_SAMPLES)
        deltas = np.max(profile.upper(_EPSILONS), axis=0) + failure + _FAILURE
        return tuple(zip(_EPSILONS.tolist(), np.minimum(deltas, 1.0).tolist(), strict=True))
    failure += losses.composition_rounding(draws.most_participations)
    root = math.sqrt(draws.most_participations)
    if isinstance(draws, RandomAllocation):
        spread = root / math.sqrt(draws.rounds_of_cycle) / sigma
        resolution = losses.RELATIVE_STEP
    else:
        spread = draws.sampling_probability * root / sigma
        resolution = _INTERVAL_OF_SPREAD * spread
        resolution = min(max(resolution, losses.SMALLEST_INTERVAL), losses.LARGEST_INTERVAL)
    composed = losses.composed_losses(draws, sigma, resolution)  # type: ignore[arg-type]
    most = spread
    for _ in range(_MOST_DOUBLINGS):
        if losses.delta_of(composed, most) < _LEAST_DELTA_OF_CURVE:
            break
        most *= 2.0
    return tuple(
        (each, min(losses.delta_of(composed, each) + failure, 1.0))
        for each in map(float, np.linspace(0.0, most, _NUM_EPSILONS))
    )


def _rates(false_positive_rate: float | FloatArray) -> FloatArray:
    rates = numbers.real_array(false_positive_rate, "false_positive_rate")
    if not np.all((rates >= 0.0) & (rates <= 1.0)):
        raise ValueError(f"false_positive_rate must be from 0 to 1, found {false_positive_rate}.")
    return rates


def _rounded(found: FloatArray) -> FloatArray:
    """Bounds enlarged by the rounding errors of their computation."""
    return np.minimum(found * (1.0 + _ROUNDING) + _ABSOLUTE_ROUNDING, 1.0)


def _of_shape(found: FloatArray, argument: float | FloatArray) -> float | FloatArray:
    return found if isinstance(argument, np.ndarray) else float(found)
