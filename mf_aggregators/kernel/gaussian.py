"""Privacy accounting of unamplified runs: one Gaussian mechanism, whatever the matrix.

The noise multiplier is the standard deviation of Z over (clip norm times the
sensitivity of C under the declared participation schema). Then the whole released
stream, C x + Z and with it everything computed from it, is one Gaussian mechanism of
that noise multiplier (Denisov et al. Thm 4.1; BandMF Sec. 2), also when each round's
updates depend on the rounds before it.

Adjacency is zero-out: neighbouring data sets differ in one client, whose contributions
are replaced by zero vectors in every round that it takes part in.

The privacy loss of the Gaussian mechanism is dp-accounting's. Noise is drawn from tables of
integers, and a guarantee (epsilon, delta) of real normal numbers is one of (epsilon, delta + p) of
what is drawn (``kernel.discrete_gaussian`` has the proof); p is the delta0 of approximate zCDP as
well. The failure probability p grows with the numbers that are drawn, and does not depend on
epsilon. Where it is not small beside delta, nothing is stated.
"""

import functools
import math
from collections.abc import Callable, Iterable

import numpy as np
import scipy.optimize
from dp_accounting import dp_event
from dp_accounting.pld import privacy_loss_mechanism
from scipy import special

from mf_aggregators.kernel import discrete_gaussian, validation
from mf_aggregators.kernel.arrays import FloatArray, underflow_is_zero
from mf_aggregators.kernel.errors import Error

# Noise multipliers that epsilon and noise_multiplier deal with; outside, epsilon is
# far from any use and the privacy loss over- or underflows.
_SMALLEST_NOISE_MULTIPLIER = 1e-3
_LARGEST_NOISE_MULTIPLIER = 1e8
LARGEST_NOISE_MULTIPLIER_ACCOUNTED = 1e100
# What a noise multiplier may lose on its way to where its epsilon is stated, relative to it.
_ROUNDING = 1e-14
# Of normal distribution functions and exponentials far out, many times over.
_ROUNDING_OF_DELTAS = 1e-12
# The largest share of delta that the failure probability may take.
LARGEST_SHARE = 1e-3
# With less noise a client may move a number by more standard deviations than are covered.
LEAST_NOISE_MULTIPLIER = 1.0 / discrete_gaussian.LARGEST_SHIFT
# The coordinates of all rounds together that every statement charges for where nobody says how
# many there are. No noise is made for more (:func:`check_charged`).
DEFAULT_NUM_COORDINATES = 2**40


class TailError(Error, ValueError):
    """The noise that is drawn adds too large a part of delta for a guarantee to be stated."""


def epsilon(
    noise_multiplier: float,
    delta: float,
    *,
    num_coordinates: int = DEFAULT_NUM_COORDINATES,
    disjoint_participations: int = 1,
) -> float:
    """Returns the epsilon of an unamplified run at a delta.

    It is that of the exact Gaussian curve at what is left of delta (``gaussian.delta_left``).

    Args:
      noise_multiplier: Relative to the sensitivity of C under its participation
        schema; zero means no noise.
      delta: Above 0 and below 1.
      num_coordinates: Parameters times rounds: each costs a delta of about 1e-27.
      disjoint_participations: 1, or the largest number of participations of a client if
        each changes rows of C x of its own, all of them by the same norm.

    Returns:
      An epsilon >= 0 for which the run is (epsilon, delta)-DP; infinity without noise.

    Raises:
      TailError: If the noise that is drawn costs more than a thousandth of delta, or the noise
        multiplier is below 0.2: a ValueError.
      ValueError: If an argument is out of its range.

    Example:
      >>> import mf_aggregators as mfa
      >>> round(mfa.accounting.epsilon(1.0, delta=1e-6), 3)
      4.887
    """
    noise_multiplier = validation.non_negative_number(noise_multiplier, "noise_multiplier")
    delta = validation.delta(delta)
    return _epsilon(
        noise_multiplier,
        delta,
        validation.positive_integer(num_coordinates, "num_coordinates"),
        validation.positive_integer(disjoint_participations, "disjoint_participations"),
    )


def exact_epsilon(noise_multiplier: float, delta: float) -> float:
    """Returns the epsilon of the Gaussian mechanism of real normal numbers, which nothing draws.

    Args:
      noise_multiplier: sigma; zero means no noise.
      delta: Above 0 and below 1.

    Returns:
      The smallest epsilon >= 0 at which it is (epsilon, delta)-DP; infinity without noise.

    Raises:
      ValueError: If an argument is out of its range.
    """
    sigma = validation.non_negative_number(noise_multiplier, "noise_multiplier")
    delta = validation.delta(delta)
    return math.inf if sigma < _SMALLEST_NOISE_MULTIPLIER else _exact_epsilon(sigma, delta)


@underflow_is_zero
def exact_deltas(noise_multiplier: float, epsilons: FloatArray) -> FloatArray:
    """Returns the deltas of the Gaussian mechanism of real normal numbers, at many epsilons.

    Args:
      noise_multiplier: sigma, above zero.
      epsilons: Of any sign, (J,).

    Returns:
      (J,), rounded up.
    """
    half = 0.5 / noise_multiplier
    low = np.minimum(special.log_ndtr(-half - epsilons * noise_multiplier) + epsilons, 0.0)
    high = special.ndtr(half - epsilons * noise_multiplier)
    return np.asarray(np.clip(high * (1.0 + _ROUNDING_OF_DELTAS) - np.exp(low), 0.0, 1.0))


def composed_gaussian_epsilon(noise_multipliers: Iterable[float], delta: float) -> float:
    """Returns the epsilon of several unamplified runs together, for clients who may be in all.

    Together they are one Gaussian mechanism of noise multiplier 1 / sqrt(sum of 1 / sigma^2)
    (Dong, Roth and Su, 2022, Cor. 3.3), at what is left of delta.

    Args:
      noise_multipliers: Of the runs, at least one, each as in :func:`epsilon`.
      delta: Above 0 and below 1.

    Returns:
      The epsilon of the composition; infinity if one of the runs has no noise.

    Raises:
      TailError: As in :func:`epsilon`.
      ValueError: If an argument is out of its range.

    Example:
      >>> import mf_aggregators as mfa
      >>> round(mfa.accounting.composed_gaussian_epsilon([2.0, 2.0], delta=1e-6), 3)
      3.308
      >>> round(mfa.accounting.epsilon(2.0**0.5, delta=1e-6), 3)
      3.308
    """
    sigmas = [
        validation.non_negative_number(each, "each of noise_multipliers")
        for each in noise_multipliers
    ]
    if not sigmas:
        raise ValueError("noise_multipliers must have at least one number, found none.")
    delta = validation.delta(delta)
    if min(sigmas) == 0.0:
        return math.inf
    coordinates = len(sigmas) * DEFAULT_NUM_COORDINATES
    left = delta_left(delta, min(sigmas), coordinates)
    # Squares of floats may be too large or too small for one, which hypot takes care of.
    return exact_epsilon(1.0 / math.hypot(*(1.0 / sigma for sigma in sigmas)), left)


def _left(sigma: float, delta: float, num_coordinates: int, participations: int) -> float:
    """What of delta is left for real normal numbers; raises TailError if it is too little."""
    # The squared norms of disjoint participations add up.
    each = sigma * math.sqrt(participations)
    return delta_left(delta, each, num_coordinates)


def noise_multiplier(
    epsilon: float,
    delta: float,
    *,
    num_coordinates: int = DEFAULT_NUM_COORDINATES,
    disjoint_participations: int = 1,
) -> float:
    """Returns the smallest noise multiplier for a target, the inverse of :func:`epsilon`.

    Args:
      epsilon: Above 0.
      delta: Above 0 and below 1.
      num_coordinates: As in :func:`epsilon`.
      disjoint_participations: As there.

    Returns:
      The noise multiplier, relative to the sensitivity of C under its participation
      schema. For a large epsilon it is the smallest for which an epsilon is stated, and that
      one is smaller.

    Raises:
      TailError: If delta is too small for so many numbers: a ValueError.
      ValueError: If an argument is out of its range, or no noise multiplier between
        0.001 and 10^8 gives the target.

    Example:
      >>> import mf_aggregators as mfa
      >>> round(mfa.accounting.noise_multiplier(epsilon=8.0, delta=1e-6), 4)
      0.6529
    """
    return _noise_multiplier(
        validation.positive_number(epsilon, "epsilon"),
        validation.delta(delta),
        validation.positive_integer(num_coordinates, "num_coordinates"),
        validation.positive_integer(disjoint_participations, "disjoint_participations"),
    )


# Plans and comparisons ask for the same targets again and again.
@functools.lru_cache(maxsize=256)
@underflow_is_zero
def _noise_multiplier(
    target: float, delta: float, num_coordinates: int, disjoint_participations: int
) -> float:
    def exact_excess(log_multiplier: float) -> float:
        return float(_gaussian(math.exp(log_multiplier)).get_delta_for_epsilon(target) - delta)

    def excess(log_multiplier: float) -> float:
        sigma = math.exp(log_multiplier)
        try:
            left = _left(sigma, delta, num_coordinates, disjoint_participations)
        except TailError:
            return 1.0
        return float(_gaussian(sigma).get_delta_for_epsilon(target) - left)

    def found(log_multiplier: float) -> float:
        try:
            # The epsilon that is stated, with its margin, has to hold also for a noise multiplier
            # that was rounded down. If epsilon is tiny, rounding may make it larger at more noise.
            sigma = math.exp(log_multiplier)
            return max(
                _epsilon(each, delta, num_coordinates, disjoint_participations)
                for each in (sigma, sigma * (1.0 - _ROUNDING))
            )
        except TailError:
            return math.inf

    low, high = math.log(_SMALLEST_NOISE_MULTIPLIER), math.log(_LARGEST_NOISE_MULTIPLIER)
    if exact_excess(low) <= 0.0 or exact_excess(high) > 0.0 or found(high) > target:
        # If delta is too small for any noise, that is the reason.
        _left(_LARGEST_NOISE_MULTIPLIER, delta, num_coordinates, disjoint_participations)
        raise ValueError(
            f"no noise multiplier between {_SMALLEST_NOISE_MULTIPLIER:g} and "
            f"{_LARGEST_NOISE_MULTIPLIER:g} gives epsilon {target:g} at delta {delta:g}."
        )
    root = scipy.optimize.brentq(excess, low, high, xtol=1e-13, rtol=1e-13) + 1e-11
    # Where epsilon is tiny, the curve itself carries rounding: err on the side of noise.
    if target * (1.0 - 1e-6) <= found(root + 1e-10) <= target:
        return math.exp(root + 1e-10)
    # For a large epsilon, none is stated at so little noise: find the least noise that has one.
    below = scipy.optimize.brentq(exact_excess, low, high, xtol=1e-13, rtol=1e-13)
    root, step = below, 1e-9
    while found(root) > target:
        below, root, step = root, min(root + step, high), 4.0 * step
    while root - below > 1e-9:
        middle = 0.5 * (below + root)
        below, root = (below, middle) if found(middle) <= target else (middle, root)
    return math.exp(root)


def zcdp_rho(noise_multiplier: float) -> float:
    """Returns the rho of approximate zero-concentrated DP of an unamplified run: 1 / (2 sigma^2).

    The noise that is drawn is bounded, and a client moves its bounds. So no released number is
    zCDP without an exception: what holds is (rho, delta0)-approximate zCDP (Bun and Steinke, 2016,
    Def. 8.1), with the delta0 of :func:`zcdp_delta`.

    Args:
      noise_multiplier: sigma, relative to the sensitivity of C under its schema.

    Returns:
      rho (Bun and Steinke, Prop. 1.6); infinity without noise.

    Raises:
      ValueError: If the noise multiplier is negative or not finite.

    Example:
      >>> import mf_aggregators as mfa
      >>> mfa.accounting.zcdp_rho(0.5)
      2.0
    """
    sigma = validation.non_negative_number(noise_multiplier, "noise_multiplier")
    if sigma == 0.0:
        return math.inf
    # Divided twice: the square of a float may be too large or too small for one. What is too
    # small is no guarantee of 0.
    return max(0.5 / sigma / sigma, math.ulp(0.0))


def zcdp_delta(
    noise_multiplier: float,
    *,
    num_coordinates: int = DEFAULT_NUM_COORDINATES,
    disjoint_participations: int = 1,
) -> float:
    """Returns the delta0 of approximate zero-concentrated DP that belongs to :func:`zcdp_rho`.

    Of an unamplified run's released numbers, (rho, delta0)-approximate zCDP is proved
    (``kernel.discrete_gaussian``): in both of two neighbouring worlds there is an event of
    probability 1 - delta0 or more, given which the Renyi divergences of every order alpha > 1 are
    at most rho alpha. The delta0 of several runs together is the sum of theirs.

    Args:
      noise_multiplier: As in :func:`epsilon`.
      num_coordinates: As there.
      disjoint_participations: As there.

    Returns:
      A probability; 0 without noise, where rho is infinite.

    Raises:
      TailError: If the noise multiplier is so small that nothing is proved.
      ValueError: If an argument is out of its range.

    Example:
      >>> import mf_aggregators as mfa
      >>> mfa.accounting.zcdp_delta(0.5) < 1e-15
      True
    """
    sigma = validation.non_negative_number(noise_multiplier, "noise_multiplier")
    if sigma == 0.0:
        return 0.0
    each = sigma * math.sqrt(validation.positive_integer(disjoint_participations, "participations"))
    return failure_probability(each, num_coordinates)


def noise_multiplier_of_zcdp(rho: float) -> float:
    """Returns the noise multiplier of an unamplified run of a rho, the inverse of zcdp_rho.

    Args:
      rho: Above 0.

    Returns:
      1 / sqrt(2 rho), rounded so that ``zcdp_rho`` is not above rho; infinity for a rho so small
      that no float is large enough.

    Raises:
      ValueError: If rho is not above zero and finite.
    """
    sigma = math.sqrt(0.5 / validation.positive_number(rho, "rho"))
    while math.isfinite(sigma) and zcdp_rho(sigma) > rho:
        sigma = math.nextafter(sigma, math.inf)
    return sigma


def epsilon_of_zcdp(
    rho: float,
    delta: float,
    *,
    num_coordinates: int = DEFAULT_NUM_COORDINATES,
    zcdp_delta: float | None = None,
) -> float:
    """Returns the epsilon of an unamplified run that is (rho, delta0)-approximate zCDP.

    But for delta0, such a run is a Gaussian mechanism. So this is its own epsilon, at what delta0
    leaves of delta, and not the larger one that holds for everything that is approximate zCDP.

    Args:
      rho: Above 0.
      delta: Above 0 and below 1.
      num_coordinates: As in :func:`epsilon`.
      zcdp_delta: The delta0, at least that of ``num_coordinates``, which is charged in any case;
        None for that one.

    Returns:
      An epsilon >= 0.

    Raises:
      ValueError: As :func:`epsilon` does, or if delta0 leaves nothing of delta.
    """
    sigma = noise_multiplier_of_zcdp(rho)
    delta = validation.delta(delta)
    left = delta_left(delta, sigma, num_coordinates)
    if zcdp_delta is not None:
        left = min(left, delta - validation.non_negative_number(zcdp_delta, "zcdp_delta"))
        if left <= 0.0:
            raise ValueError(
                f"a zcdp_delta of {zcdp_delta:g} leaves nothing of delta, {delta:g}: use a larger "
                "delta."
            )
    return exact_epsilon(sigma, left)


def event(noise_multiplier: float) -> dp_event.DpEvent:
    """Returns an unamplified run as an event of dp-accounting, to be composed with others.

    Args:
      noise_multiplier: Relative to the sensitivity of C under its participation schema.

    Returns:
      A Gaussian event: one for the whole run, whatever its matrix and rounds. Its
      adjacency is zero-out, for which accountants of adding or removing one client, and
      of ``REPLACE_SPECIAL``, are right.

    Raises:
      ValueError: If the noise multiplier is negative or not finite.
    """
    return dp_event.GaussianDpEvent(
        validation.non_negative_number(noise_multiplier, "noise_multiplier")
    )


def check_charged(num_parameters: int, num_rounds: int) -> None:
    """Raises ValueError if a run draws more numbers than guarantees are stated for.

    Args:
      num_parameters: The numbers of a row: the model's parameters, and one more where the clip
        norm adapts.
      num_rounds: The rows.
    """
    if num_parameters * num_rounds > DEFAULT_NUM_COORDINATES:
        raise ValueError(
            f"noise of {num_parameters} numbers in each of {num_rounds} rounds is of "
            f"{num_parameters * num_rounds:.3g} numbers, and guarantees are stated for at most "
            f"2^40 ({DEFAULT_NUM_COORDINATES:.2g}): use a smaller model or fewer rounds."
        )


def delta_left(delta: float, noise_multiplier: float, num_coordinates: int) -> float:
    """Returns what of delta is left for real normal numbers.

    Args:
      delta: The delta of the guarantee.
      noise_multiplier: Standard deviation of Z over what one of a client's participations can
        change in C x (in L2 norm), above zero.
      num_coordinates: The numbers that are drawn: parameters times rounds, of all runs.

    Returns:
      A delta below the given one. If real normal numbers have it at some epsilon, the noise that
      is drawn has the given one.

    Raises:
      TailError: If less than 999 thousandths of delta are left, or there is so little noise that
        the bound does not hold.
      ValueError: If a number is out of its range.
    """
    failure = failure_probability(noise_multiplier, num_coordinates)
    if failure > LARGEST_SHARE * delta:
        raise TailError(
            f"delta must be at least {failure / LARGEST_SHARE:.3g} for the noise of "
            f"{num_coordinates} numbers, because it is a thousand times the failure probability "
            f"of their generator, found {delta:g}. Use a larger delta, or fewer rounds or "
            "parameters."
        )
    return delta - failure


def failure_probability(noise_multiplier: float, num_coordinates: int) -> float:
    """Returns what the noise that is drawn adds to the delta of real normal numbers.

    It is the same at every epsilon.

    Args:
      noise_multiplier: As in ``gaussian.delta_left``.
      num_coordinates: As there.

    Raises:
      TailError: If there is so little noise that the bound does not hold.
      ValueError: If a number is out of its range.
    """
    sigma = validation.positive_number(noise_multiplier, "noise_multiplier")
    if sigma * discrete_gaussian.LARGEST_SHIFT < 1.0:
        raise TailError(
            f"so little noise cannot be accounted for: a client may move a number by "
            f"{1.0 / sigma:.3g} standard deviations, and {discrete_gaussian.LARGEST_SHIFT:g} are "
            "covered. Use more noise (a smaller epsilon)."
        )
    return discrete_gaussian.failure_probability(num_coordinates)


def _gaussian(sigma: float) -> privacy_loss_mechanism.GaussianPrivacyLoss:
    # Beyond, dp-accounting's arithmetic overflows; less noise has no smaller epsilon.
    return privacy_loss_mechanism.GaussianPrivacyLoss(
        min(sigma, LARGEST_NOISE_MULTIPLIER_ACCOUNTED)
    )


def _epsilon(sigma: float, delta: float, num_coordinates: int, participations: int) -> float:
    if sigma < _SMALLEST_NOISE_MULTIPLIER:
        return math.inf
    return _exact_epsilon(sigma, _left(sigma, delta, num_coordinates, participations))


# Plans, reports and statements ask for the same ones again and again; each takes milliseconds.
@functools.lru_cache(maxsize=1024)
@underflow_is_zero
def _exact_epsilon(sigma: float, delta: float) -> float:
    loss = _gaussian(sigma)
    # Of real normal numbers, zCDP bounds epsilon from above (Bun and Steinke, Prop. 1.3).
    rho = zcdp_rho(sigma)
    upper = rho + 2.0 * math.sqrt(rho * math.log(1.0 / delta)) + 1.0
    return _first_root(lambda candidate: loss.get_delta_for_epsilon(candidate) - delta, upper)


def _first_root(excess: Callable[[float], float], upper: float) -> float:
    """An epsilon, at most about ``upper``, at which the excess is no longer positive."""
    if excess(0.0) <= 0.0:
        return 0.0
    root = scipy.optimize.brentq(excess, 0.0, upper, xtol=1e-12, rtol=1e-12)
    # The root may lie below the true one by the solver's tolerance.
    return float(root * (1.0 + 1e-11) + 1e-11)
