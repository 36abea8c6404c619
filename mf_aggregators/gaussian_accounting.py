"""Privacy accounting of unamplified runs: one Gaussian mechanism, whatever the matrix.

The noise multiplier is the standard deviation of Z over (clip norm times the
sensitivity of C under the declared participation schema). Then the whole released
stream, C x + Z and with it everything computed from it, is one Gaussian mechanism of
that noise multiplier (Denisov et al. Thm 4.1; BandMF Sec. 2), also when each round's
updates depend on the rounds before it.

Adjacency is zero-out: neighbouring data sets differ in one client, whose contributions
are replaced by zero vectors in every round that it takes part in.

The privacy loss of the Gaussian mechanism is dp-accounting's.
"""

import math

import scipy.optimize
from dp_accounting import dp_event
from dp_accounting.pld import privacy_loss_mechanism

from mf_aggregators import validation

# Noise multipliers that epsilon and noise_multiplier deal with; outside, epsilon is
# far from any use and the privacy loss over- or underflows.
_SMALLEST_NOISE_MULTIPLIER = 1e-3
_LARGEST_NOISE_MULTIPLIER = 1e8
# What a noise multiplier may lose on its way to where its epsilon is stated, relative to it.
_ROUNDING = 1e-14


def epsilon(noise_multiplier: float, delta: float) -> float:
    """Returns the epsilon of an unamplified run at a delta, by the exact Gaussian curve.

    Args:
      noise_multiplier: Relative to the sensitivity of C under its participation
        schema; zero means no noise.
      delta: Above 0 and below 1.

    Returns:
      The smallest epsilon >= 0 for which the run is (epsilon, delta)-DP; infinity
      without noise.

    Raises:
      ValueError: If an argument is out of its range.
    """
    noise_multiplier = validation.non_negative_number(noise_multiplier, "noise_multiplier")
    delta = validation.delta(delta)
    return _epsilon(noise_multiplier, delta)


def noise_multiplier(epsilon: float, delta: float) -> float:
    """Returns the smallest noise multiplier that gives an unamplified run (epsilon, delta)-DP.

    Args:
      epsilon: Above 0.
      delta: Above 0 and below 1.

    Returns:
      The noise multiplier, relative to the sensitivity of C under its participation
      schema.

    Raises:
      ValueError: If an argument is out of its range, or no noise multiplier between
        0.001 and 10^8 gives the target.
    """
    target = validation.positive_number(epsilon, "epsilon")
    delta = validation.delta(delta)

    def excess(log_multiplier: float) -> float:
        return _gaussian(math.exp(log_multiplier)).get_delta_for_epsilon(target) - delta

    low, high = math.log(_SMALLEST_NOISE_MULTIPLIER), math.log(_LARGEST_NOISE_MULTIPLIER)
    if excess(low) <= 0.0 or excess(high) > 0.0:
        raise ValueError(
            f"no noise multiplier between {_SMALLEST_NOISE_MULTIPLIER:g} and "
            f"{_LARGEST_NOISE_MULTIPLIER:g} gives epsilon {target:g} at delta {delta:g}."
        )
    root = scipy.optimize.brentq(excess, low, high, xtol=1e-13, rtol=1e-13) + 1e-11
    # Where epsilon is tiny, the curve itself carries rounding: err on the side of noise.
    while excess(root) > 0.0:
        root += 1e-9
    # What is stated of this noise is its epsilon, with that one's margin, and after roundings.
    step = 1e-11
    while _epsilon(math.exp(root) * (1.0 - _ROUNDING), delta) > target:
        root += step
        step *= 2.0
    return math.exp(root)


def zcdp_rho(noise_multiplier: float) -> float:
    """Returns the rho of zero-concentrated DP of an unamplified run: 1 / (2 sigma^2).

    Args:
      noise_multiplier: sigma, relative to the sensitivity of C under its schema.

    Returns:
      rho (Bun and Steinke, Prop. 1.6); infinity without noise.

    Raises:
      ValueError: If the noise multiplier is negative or not finite.
    """
    sigma = validation.non_negative_number(noise_multiplier, "noise_multiplier")
    return math.inf if sigma == 0.0 else 0.5 / sigma**2


def noise_multiplier_of_zcdp(rho: float) -> float:
    """Returns the noise multiplier of an unamplified run that is rho-zCDP, the inverse of zcdp_rho.

    Args:
      rho: Above 0.

    Returns:
      1 / sqrt(2 rho).

    Raises:
      ValueError: If rho is not above zero and finite.
    """
    return math.sqrt(0.5 / validation.positive_number(rho, "rho"))


def epsilon_of_zcdp(rho: float, delta: float) -> float:
    """Returns the epsilon of an unamplified run that is rho-zCDP.

    Such a run is a Gaussian mechanism, so this is its exact epsilon and not the larger one
    that holds for everything that is rho-zCDP.

    Args:
      rho: Above 0.
      delta: Above 0 and below 1.

    Returns:
      The smallest epsilon >= 0.

    Raises:
      ValueError: If an argument is out of its range.
    """
    return epsilon(noise_multiplier_of_zcdp(rho), delta)


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


def _gaussian(sigma: float) -> privacy_loss_mechanism.GaussianPrivacyLoss:
    return privacy_loss_mechanism.GaussianPrivacyLoss(sigma)


def _epsilon(noise_multiplier: float, delta: float) -> float:
    if noise_multiplier < _SMALLEST_NOISE_MULTIPLIER:
        return math.inf
    loss = _gaussian(noise_multiplier)

    def excess(candidate: float) -> float:
        return loss.get_delta_for_epsilon(candidate) - delta

    if excess(0.0) <= 0.0:
        return 0.0
    # zCDP bounds epsilon from above (Bun and Steinke, Prop. 1.3).
    rho = zcdp_rho(noise_multiplier)
    upper = rho + 2.0 * math.sqrt(rho * math.log(1.0 / delta)) + 1.0
    root = scipy.optimize.brentq(excess, 0.0, upper, xtol=1e-12, rtol=1e-12)
    # The root may lie below the true one by the solver's tolerance.
    return float(root * (1.0 + 1e-11) + 1e-11)
