r"""Privacy accounting: epsilon, rho and attackers' success for noise multipliers, and inverses.

The guarantee of a run follows from its noise multiplier alone. Without amplification
the noise multiplier is relative to the sensitivity of C under the participation schema
(``epsilon``, ``noise_multiplier``, ``zcdp_rho`` and their like). Sampling schemes
(``mf_aggregators.participation``) have their own methods for amplified guarantees; there, the noise
multiplier is relative to the largest column norm of C. Guarantees of devices that decide themselves
when to take part are never amplified.

Adjacency is zero-out everywhere: neighbouring data sets differ in one client, whose
contributions are replaced by zero vectors in every round that it takes part in.

No guarantee depends on this module: the kernel has the epsilon of a noise multiplier
(``kernel.sensitivity``, and ``kernel.losses`` where clients are drawn) and of several runs together
(``kernel.composition``).

**True positive rates.** The attacker sees all releases of a run, and knows everything about it
except whether one client's updates were used or replaced by zeros, and guesses which. Its false
positive rate x is the probability that it guesses "used" if they were replaced, and its true
positive rate is the probability that it guesses "used" if they were used. No test has a higher true
positive rate than the bound here (Wasserman and Zhou, 2010, Thm 2.4; Kairouz, Oh and Viswanath,
2015, Thm 2.1):

* Unamplified runs are one Gaussian mechanism of noise multiplier sigma, that is mu-GDP with
  mu = 1 / sigma, so that the rate is Phi(Phi^-1(x) + 1 / sigma) (Dong, Roth and Su, 2022,
  Eq. 6), for real normal numbers.
* From (epsilon, delta)-DP follows P(S) <= e^epsilon Q(S) + delta for the set S of outputs where
  the attacker says "used", and the same for the complement of S with P and Q exchanged. So the rate
  is at most e^epsilon x + delta, and at most 1 - e^-epsilon (1 - x - delta). If several pairs
  (epsilon, delta) hold, the smallest of these bounds holds; the whole curve of pairs gives the best
  bound.

* Clients who draw for themselves have a pair (P, Q) that dominates the run
  (``kernel.certificate``) with known moments M_a = E_Q (P/Q)^a of integer orders a > 1. The moments
  of the attacker's guess are no larger: a true positive rate y satisfies y^a x^(1 - a) + (1 - y)^a
  (1 - x)^(1 - a) <= M_a. (The theorem there is for convex functions that grow linearly; the a-th
  power is a supremum of such functions.)

For sampled runs, the bound for an attacker who knows the batches holds as well: for each draw the
run is a Gaussian mechanism, and divergences of a mixture are no larger than the largest one of its
parts.

The noise that is drawn has the curve delta(epsilon) of real normal numbers plus the failure
probability p of ``sensitivity``, at every epsilon, also a negative one. The mu-GDP rate is the
smallest of e^epsilon x + delta(epsilon) over all epsilons, so it grows by p at most.
"""

import functools
import math
from collections.abc import Callable, Sequence

import numpy as np
import scipy.optimize
from dp_accounting import dp_event as dp_events
from scipy import special

from mf_aggregators.kernel import losses, numbers, sensitivity
from mf_aggregators.kernel.certificate import ImportanceSampler, dominating_pair
from mf_aggregators.kernel.composition import EpsilonDeltaDpEvent as EpsilonDeltaDpEvent
from mf_aggregators.kernel.composition import SampledRunDpEvent
from mf_aggregators.kernel.composition import composed_epsilon as composed_epsilon
from mf_aggregators.kernel.losses import (
    Groups,
    InGroups,
    Poisson,
    RandomAllocation,
    SampledRun,
    Shuffling,
)
from mf_aggregators.kernel.numbers import FloatArray
from mf_aggregators.kernel.sensitivity import DEFAULT_NUM_COORDINATES
from mf_aggregators.kernel.sensitivity import TailError as TailError
from mf_aggregators.kernel.sensitivity import epsilon as epsilon
from mf_aggregators.kernel.sensitivity import exact_epsilon as exact_epsilon
from mf_aggregators.kernel.sensitivity import zcdp_delta as zcdp_delta
from mf_aggregators.kernel.sensitivity import zcdp_rho as zcdp_rho

# The smallest and the largest noise multiplier of a search.
_SMALLEST_NOISE_MULTIPLIER = 1e-3
_LARGEST_NOISE_MULTIPLIER = 1e8
# For schemes with groups, the first search uses grids that are coarser by these factors (the second
# one for random allocation). The second search begins with a small step.
_COARSER, _COARSER_CYCLES, _FINE_STEP = 10.0, 3.0, 1.001
# The excess that a search assigns to a noise multiplier that is too small for accounting, and the
# smallest epsilon of which the logarithm is taken.
_REFUSED, _LEAST_EPSILON = 1e3, 1e-300
# The share by which a noise multiplier may be rounded down before its epsilon is computed.
_ROUNDING = 1e-14
# A factor that moves the smallest noise multiplier into the range of accounting.
_JUST_ABOVE = 1.0 + 1e-12
# Upper bounds on the rounding errors of a bound on a true positive rate: relative to the rate, and
# absolute.
_ROUNDING_OF_RATE = 1e-12
_ABSOLUTE_ROUNDING = 1e-15
# The number of epsilons on the curve of a run that draws from groups, up to a tiny delta.
_NUM_EPSILONS = 120
_LEAST_DELTA_OF_CURVE = 1e-11
_MOST_DOUBLINGS = 24
# The grid of the curve is as coarse as that for an epsilon of 50 times the spread of all losses.
_FINER = 50.0
# The deltas of the pairs of a shuffled run.
_DELTAS_OF_SHUFFLING = tuple(float(delta) for delta in np.geomspace(1e-9, 0.3, 8))
# Upper bound on the rounding error of a moment of the privacy loss, relative to it.
_ROUNDING_OF_MOMENTS = 1e-6
_HALVINGS = 50


def noise_multiplier(
    epsilon: float,
    delta: float,
    *,
    num_coordinates: int = DEFAULT_NUM_COORDINATES,
    disjoint_participations: int = 1,
    draws: Groups | None = None,
) -> float:
    """Returns the smallest noise multiplier for a target epsilon, the inverse of :func:`epsilon`.

    Use it when you know the target epsilon, and no clients are sampled.

    Args:
      epsilon: Above 0.
      delta: Above 0 and below 1.
      num_coordinates: As in :func:`epsilon`.
      disjoint_participations: As there.
      draws: For a run that draws clients from groups, its draws; num_coordinates and
        disjoint_participations then follow from them. None for an unamplified run.

    Returns:
      The noise multiplier, relative to the sensitivity of C under its participation
      schema, or to the largest column norm of C if clients are drawn. For a large target, it is the
      smallest noise multiplier for which an epsilon is stated, and this epsilon is below the
      target.

    Raises:
      TailError: If delta is too small for num_coordinates (a ValueError).
      ValueError: If an argument is out of its range, or no noise multiplier between
        0.001 and 10^8 gives the target.

    Example:
      >>> import mf_aggregators as mfa
      >>> round(mfa.accounting.noise_multiplier(epsilon=8.0, delta=1e-6), 4)
      0.6529
    """
    if draws is not None:
        return _noise_multiplier_of_groups(draws, epsilon, delta)
    return _noise_multiplier(
        numbers.positive_number(epsilon, "epsilon"),
        numbers.delta(delta),
        numbers.positive_integer(num_coordinates, "num_coordinates"),
        numbers.positive_integer(disjoint_participations, "disjoint_participations"),
    )


# Plans and comparisons ask for the same targets again and again.
@functools.lru_cache(maxsize=256)
@np.errstate(under="ignore")
def _noise_multiplier(
    target: float, delta: float, num_coordinates: int, disjoint_participations: int
) -> float:
    def excess(sigma: float) -> float:
        try:
            # Epsilon has to be within the target also for a slightly smaller noise multiplier. For
            # a tiny epsilon, rounding may make it larger with more noise.
            stated = max(
                sensitivity.epsilon(
                    each,
                    delta,
                    num_coordinates=num_coordinates,
                    disjoint_participations=disjoint_participations,
                )
                for each in (sigma, sigma * (1.0 - _ROUNDING))
            )
        except TailError:
            return _REFUSED
        return math.log(max(stated, _LEAST_EPSILON) / target)

    spread = math.sqrt(disjoint_participations)
    # Raises an error if delta is too small for every noise multiplier.
    sensitivity.delta_left(delta, _LARGEST_NOISE_MULTIPLIER * spread, num_coordinates)
    least = sensitivity.LEAST_NOISE_MULTIPLIER / spread * _JUST_ABOVE
    least = max(least, _SMALLEST_NOISE_MULTIPLIER)
    # A loss is 1 / (2 sigma^2) + z / sigma for a normal z, which almost never exceeds this root.
    root = math.sqrt(-2.0 * math.log(delta))
    enough = max(0.5 * (root + math.sqrt(root**2 + 2.0 * target)) / target, least)
    if enough > _LARGEST_NOISE_MULTIPLIER or excess(enough) > 0.0:
        enough = _LARGEST_NOISE_MULTIPLIER
    is_too_large = sensitivity.exact_epsilon(_SMALLEST_NOISE_MULTIPLIER, delta) <= target
    if is_too_large or excess(enough) > 0.0:
        raise ValueError(
            f"no noise multiplier between {_SMALLEST_NOISE_MULTIPLIER:g} and "
            f"{_LARGEST_NOISE_MULTIPLIER:g} gives epsilon {target:g} at delta {delta:g}."
        )
    return least_noise(excess, enough, least, tolerance=1e-13)


def least_noise(
    excess: Callable[[float], float],
    enough: float,
    least: float,
    *,
    first_step: float = 1.5,
    largest_step: float = 2.5,
    tolerance: float = 5e-7,
) -> float:
    """Returns the smallest sufficient noise multiplier, by a search downwards.

    Args:
      excess: A decreasing function of the noise multiplier: positive if it does not suffice.
      enough: A noise multiplier that suffices; returned if no smaller one suffices.
      least: The smallest noise multiplier that is tried.
      first_step: The first factor by which the search divides, above 1. Factors grow.
      largest_step: The largest factor.
      tolerance: The relative error of the result, which is rounded to more noise.
    """

    @functools.cache
    def known(log_sigma: float) -> float:
        return excess(math.exp(log_sigma))

    if enough <= least:
        return enough
    last, high = math.log(least), math.log(enough)
    low, step = high, math.log(first_step)
    while low > last:
        low = max(last, low - step)
        if known(low) > 0.0:
            break
        high, step = low, min(2.0 * step, math.log(largest_step))
    else:
        return min(math.exp(high), enough)
    if high == math.log(enough) and excess(enough) > 0.0:
        return enough
    root = scipy.optimize.brentq(known, low, high, xtol=tolerance, rtol=1e-15)
    step = tolerance
    while known(root) > 0.0:
        root, step = min(root + step, high), 2.0 * step
    return min(math.exp(root), enough)


@np.errstate(under="ignore")
def _noise_multiplier_of_groups(draws: Groups, epsilon: float, delta: float) -> float:
    """The smallest noise multiplier for a target epsilon of a run that draws from groups.

    The epsilon that is stated for the result, with its own grid, is never above the target.
    """
    # The noise multiplier that suffices without amplification.
    run = SampledRun(draws, 1.0)
    alone = noise_multiplier(epsilon, delta, disjoint_participations=run.disjoint_participations)
    enough = alone * run.norm_of_all
    # The smallest noise multiplier with an amplified epsilon.
    least = draws.largest_move * sensitivity.LEAST_NOISE_MULTIPLIER * _JUST_ABOVE

    @functools.cache
    def excess(sigma: float, coarser: float = 1.0) -> float:
        run = SampledRun(draws, sigma)
        try:
            if coarser == 1.0:
                stated = run.epsilon(delta)
            else:
                compositions = draws.most_participations
                left = sensitivity.delta_left(
                    delta, run.amplified_part, DEFAULT_NUM_COORDINATES, compositions
                )
                stated = losses.epsilon_of(run.losses_near(epsilon, coarser), left)
        except TailError:
            return _REFUSED
        return math.log(max(stated, _LEAST_EPSILON) / epsilon)

    if isinstance(draws, Shuffling):
        found = least_noise(excess, enough, least)
    else:
        # A coarse grid is used first, because fine grids take long.
        coarser = _COARSER_CYCLES if isinstance(draws, RandomAllocation) else _COARSER
        near = least_noise(
            functools.partial(excess, coarser=coarser), enough, least, tolerance=1e-4
        )
        found = least_noise(excess, near, least, first_step=_FINE_STEP)
    step = 1e-6
    # Roundings may make the epsilon of ``enough``, too, larger than the target.
    while excess(found) > 0.0 and found < 1.001 * enough:
        found, step = found * (1.0 + step), 2.0 * step
    return found


def noise_multiplier_of_zcdp(rho: float) -> float:
    """Returns the noise multiplier of an unamplified run with a given rho of approximate zCDP.

    Args:
      rho: Above 0.

    Returns:
      1 / sqrt(2 rho), rounded so that ``zcdp_rho`` of the result is not above rho; infinity if the
      result is too large for floats.

    Raises:
      ValueError: If rho is not above zero and finite.
    """
    sigma = math.sqrt(0.5 / numbers.positive_number(rho, "rho"))
    while math.isfinite(sigma) and sensitivity.zcdp_rho(sigma) > rho:
        sigma = math.nextafter(sigma, math.inf)
    return sigma


def event(of: SampledRun | float) -> dp_events.DpEvent:
    """Returns the event of a run, for composition with other events.

    Use it when you compose a run with others, here (``composed_epsilon``) or in dp-accounting.

    Args:
      of: The noise multiplier of an unamplified run, relative to the sensitivity of C under its
        participation schema; or a run with drawn clients.

    Returns:
      For an unamplified run, one Gaussian event for all rounds and any matrix. Its adjacency is
      zero-out; accountants for adding or removing one client, and for ``REPLACE_SPECIAL``, are
      correct for it. For Poisson sampling, the composed sampled Gaussian events of BandMF App. F.3.
      For other schemes, an event that ``composed_epsilon`` composes with amplification if possible,
      and that accountants of dp-accounting treat as a Gaussian mechanism without amplification.

    Raises:
      ValueError: If the noise multiplier is negative or not finite.

    Example:
      >>> import mf_aggregators as mfa
      >>> mfa.accounting.event(2.0)
      GaussianDpEvent(noise_multiplier=2.0)
    """
    if not isinstance(of, SampledRun):
        return dp_events.GaussianDpEvent(numbers.non_negative_number(of, "noise_multiplier"))
    draws = of.draws
    if isinstance(draws, Poisson):
        sampled = dp_events.PoissonSampledDpEvent(
            draws.sampling_probability, dp_events.GaussianDpEvent(of.sigma)
        )
        return dp_events.SelfComposedDpEvent(sampled, draws.most_participations)
    if of.is_amplified:
        return SampledRunDpEvent(of.noise_multiplier, of)
    return dp_events.GaussianDpEvent(of.noise_multiplier)


@np.errstate(under="ignore")
def true_positive_rate(
    noise_multiplier: SampledRun | float,
    false_positive_rate: float | FloatArray,
    *,
    guarantees: Sequence[tuple[float, float]] = (),
    num_coordinates: int = DEFAULT_NUM_COORDINATES,
    disjoint_participations: int = 1,
) -> float | FloatArray:
    """Returns an upper bound on the true positive rate of every attacker of a run.

    Use it when you explain a guarantee by the success of an attacker.

    Args:
      noise_multiplier: The noise multiplier of an unamplified run, relative to the sensitivity of C
        under its participation schema (zero for no noise, infinity if no client took part); or a
        run with drawn clients, whose attacker does not know the draws.
      false_positive_rate: At which false positive rate, from 0 to 1; or an array of them.
      guarantees: Pairs (epsilon, delta) that are known to hold for a run with drawn clients.
      num_coordinates: Parameters times rounds, as in :func:`epsilon`.
      disjoint_participations: As in :func:`epsilon`; ignored for a run with drawn clients.

    Returns:
      Phi(Phi^-1(false positive rate) + 1 / noise_multiplier) plus the failure probability of the
      noise, at most 1, in the shape of the argument; for a run with drawn clients, at most that.

    Raises:
      TailError: If the noise multiplier is below 0.2 and not zero, or a run with drawn clients has
        too little noise to account for (a ValueError).
      ValueError: If an argument is out of its range.

    Example:
      >>> import mf_aggregators as mfa
      >>> round(mfa.accounting.true_positive_rate(1.0, false_positive_rate=0.01), 3)
      0.092
    """
    if isinstance(noise_multiplier, SampledRun):
        run = noise_multiplier
        return _sampled_true_positive_rate(run, false_positive_rate, guarantees, num_coordinates)
    rates = _rates(false_positive_rate)
    participations = numbers.positive_integer(disjoint_participations, "disjoint_participations")
    if numbers.number(noise_multiplier, "noise_multiplier") == math.inf:
        return _of_shape(rates, false_positive_rate)
    sigma = numbers.non_negative_number(noise_multiplier, "noise_multiplier")
    if sigma == 0.0:
        return _of_shape(np.ones_like(rates), false_positive_rate)
    each = sigma * math.sqrt(participations)
    failure = sensitivity.failure_probability(each, num_coordinates)
    found = special.ndtr(special.ndtri(rates) + 1.0 / sigma)
    return _of_shape(_rounded(found + failure), false_positive_rate)


def _rate_of_pairs(
    guarantees: Sequence[tuple[float, float]], false_positive_rate: float | FloatArray
) -> float | FloatArray:
    """Returns the highest true positive rate that pairs (epsilon, delta) allow an attacker.

    Args:
      guarantees: Pairs of an epsilon (possibly infinite) and a delta, all of which hold.
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
        if epsilon < math.log(1.0 / _ROUNDING_OF_RATE):
            found = np.minimum(found, math.exp(epsilon) * rates + delta)
        else:
            # If the factor overflows, the bound is 1, except at x = 0.
            found = np.minimum(found, np.where(rates > 0.0, 1.0, delta))
        found = np.minimum(found, 1.0 - math.exp(-epsilon) * np.maximum(1.0 - rates - delta, 0.0))
    return _of_shape(_rounded(found), false_positive_rate)


def _sampled_true_positive_rate(
    run: SampledRun,
    false_positive_rate: float | FloatArray,
    guarantees: Sequence[tuple[float, float]],
    num_coordinates: int,
) -> float | FloatArray:
    """A bound on the rate of an attacker who does not know the batches, using :func:`_curve`."""
    rates = _rates(false_positive_rate)
    pairs, refused = tuple(guarantees), None
    pairs += _curve(run, num_coordinates)
    by_moments = _rates_by_moments(run, rates, num_coordinates)
    try:
        found = np.asarray(
            true_positive_rate(
                run.noise_multiplier,
                rates,
                num_coordinates=num_coordinates,
                disjoint_participations=run.disjoint_participations if run.sigma else 1,
            )
        )
    except TailError as error:
        found, refused = np.ones_like(rates), error
    is_bounded = by_moments is not None or any(math.isfinite(epsilon) for epsilon, _ in pairs)
    if refused is not None and not is_bounded:
        raise refused
    found = np.minimum(found, _rate_of_pairs(pairs, rates))
    if by_moments is not None:
        found = np.minimum(found, by_moments)
    return _of_shape(found, false_positive_rate)


# Statements ask for the same curve again and again.
@functools.lru_cache(maxsize=64)
@np.errstate(under="ignore")
def _curve(run: SampledRun, num_coordinates: int) -> tuple[tuple[float, float], ...]:
    """Returns pairs (epsilon, delta) that hold for a run that draws from groups of clients.

    About a hundred pairs with deltas from 1 to 1e-12 bound the attacker closely; a dozen would not.
    Deltas include the cost of drawing integers (``sensitivity.failure_probability``).

    Args:
      run: The run.
      num_coordinates: Parameters times rounds.

    Returns:
      The pairs; empty if there is too little noise for amplification, or if clients draw for
      themselves.
    """
    draws, sigma = run.draws, run.sigma
    if not run.is_amplified or not isinstance(draws, InGroups):
        return ()
    if isinstance(draws, Shuffling):
        return _pairs_of_shuffling(run, num_coordinates)
    try:
        failure = sensitivity.failure_probability(
            run.amplified_part, num_coordinates, draws.most_participations
        )
    except TailError:
        return ()
    root = math.sqrt(draws.most_participations)
    if isinstance(draws, RandomAllocation):
        spread = root / math.sqrt(draws.rounds_of_cycle) / sigma
    else:
        spread = draws.sampling_probability * root / sigma
    composed = run.losses_near(_FINER * spread)
    most = spread
    for _ in range(_MOST_DOUBLINGS):
        if losses.delta_of(composed, most) < _LEAST_DELTA_OF_CURVE:
            break
        most *= 2.0
    return tuple(
        (each, min(losses.delta_of(composed, each) + failure, 1.0))
        for each in map(float, np.linspace(0.0, most, _NUM_EPSILONS))
    )


def _pairs_of_shuffling(run: SampledRun, num_coordinates: int) -> tuple[tuple[float, float], ...]:
    pairs = []
    for delta in _DELTAS_OF_SHUFFLING:
        try:
            found = run.epsilon(delta, num_coordinates)
        except TailError:
            continue
        pairs.append((found, delta))
    return tuple(pairs)


def _rates_by_moments(
    run: SampledRun, rates: FloatArray, num_coordinates: int
) -> FloatArray | None:
    """Bounds on the true positive rates if clients draw for themselves; None if not amplified."""
    if not run.is_amplified or isinstance(run.draws, InGroups):
        return None
    try:
        failure = sensitivity.failure_probability(run.amplified_part, num_coordinates)
    except TailError:
        return None
    low, found = np.array(rates), np.ones_like(rates)
    moments = _log_moments(run, num_coordinates)
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + found)
        with np.errstate(divide="ignore", invalid="ignore"):
            # In logarithms, because powers of small rates overflow.
            divergences = [
                np.logaddexp(
                    a * np.log(middle) + (1 - a) * np.log(rates),
                    a * np.log1p(-middle) + (1 - a) * np.log1p(-rates),
                )
                <= log_moment + _ROUNDING_OF_MOMENTS
                for a, log_moment in moments
            ]
        is_possible = np.all(divergences, axis=0)
        low, found = np.where(is_possible, middle, low), np.where(is_possible, found, middle)
    return _rounded(found + failure)


# Statements ask for the same moments again and again.
@functools.lru_cache(maxsize=64)
def _log_moments(run: SampledRun, num_coordinates: int) -> tuple[tuple[int, float], ...]:
    """Orders a > 1 with log E_Q (P/Q)^a of the pair that dominates a run."""
    pair = dominating_pair(run, num_coordinates)
    found = ((a, ImportanceSampler(pair, a).log_mgf) for a in pair.orders if a > 1)
    return tuple((a, log_moment) for a, log_moment in found if math.isfinite(log_moment))


def _rates(false_positive_rate: float | FloatArray) -> FloatArray:
    rates = numbers.real_array(false_positive_rate, "false_positive_rate")
    if not np.all((rates >= 0.0) & (rates <= 1.0)):
        raise ValueError(f"false_positive_rate must be from 0 to 1, found {false_positive_rate}.")
    return rates


def _rounded(found: FloatArray) -> FloatArray:
    """Adds the rounding errors of their computation to bounds."""
    return np.minimum(found * (1.0 + _ROUNDING_OF_RATE) + _ABSOLUTE_ROUNDING, 1.0)


def _of_shape(found: FloatArray, argument: float | FloatArray) -> float | FloatArray:
    return found if isinstance(argument, np.ndarray) else float(found)
