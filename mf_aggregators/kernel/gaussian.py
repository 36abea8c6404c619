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
what is drawn (``kernel.draws`` has the proof); p is the delta0 of approximate zCDP as
well. The failure probability p grows with the numbers that are drawn, and does not depend on
epsilon. Where it is not small beside delta, nothing is stated.
"""

import dataclasses
import functools
import math

import numpy as np
import scipy.optimize
from dp_accounting.pld import privacy_loss_mechanism
from scipy import special

from mf_aggregators.kernel import draws, numbers
from mf_aggregators.kernel.numbers import Error, FloatArray

# Noise multipliers that an epsilon is computed for. Outside, dp-accounting's arithmetic over- or
# underflows, and an epsilon is far from any use.
_SMALLEST_NOISE_MULTIPLIER = 1e-3
LARGEST_NOISE_MULTIPLIER_ACCOUNTED = 1e100
# Many times the relative roundings of normal distribution functions and exponentials in the tails.
_ROUNDING_OF_DELTAS = 1e-12
# The largest share of delta that the failure probability may take.
_LARGEST_SHARE = 1e-3
# With less noise a client may move a number by more standard deviations than are covered.
LEAST_NOISE_MULTIPLIER = 1.0 / draws.LARGEST_SHIFT
# The coordinates of all rounds together that every statement charges for by default. No noise is
# made for more.
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
    sigma = numbers.non_negative_number(noise_multiplier, "noise_multiplier")
    participations = numbers.positive_integer(disjoint_participations, "disjoint_participations")
    coordinates = numbers.positive_integer(num_coordinates, "num_coordinates")
    if sigma >= _SMALLEST_NOISE_MULTIPLIER:
        # The squared norms of disjoint participations add up.
        delta = delta_left(numbers.delta(delta), sigma * math.sqrt(participations), coordinates)
    return exact_epsilon(sigma, delta)


@dataclasses.dataclass(frozen=True)
class AllParticipations:
    """All participations of a client together, against an adversary who knows their rounds.

    Attributes:
      norm: Their sensitivity over the largest column norm of C.
      disjoint: Their number, if each changes rows of C x of its own, by one norm; otherwise 1.
    """

    norm: float = 1.0
    disjoint: int = 1

    @property
    def largest_part(self) -> float:
        """Upper bound on the shift of one row, over the largest column norm of C."""
        return self.norm / math.sqrt(self.disjoint)


def unamplified(
    together: AllParticipations, sigma: float, delta: float, num_coordinates: int
) -> tuple[float, TailError | None]:
    """Returns the epsilon against an adversary who knows all draws, or infinity and the error.

    Args:
      together: All participations of a client.
      sigma: The noise multiplier, relative to the largest column norm of C.
      delta: Above 0 and below 1.
      num_coordinates: Parameters times rounds.
    """
    try:
        found = epsilon(
            sigma / together.norm,
            delta,
            num_coordinates=num_coordinates,
            disjoint_participations=together.disjoint,
        )
    except TailError as error:
        return math.inf, error
    return found, None


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
    sigma = numbers.non_negative_number(noise_multiplier, "noise_multiplier")
    delta = numbers.delta(delta)
    return math.inf if sigma < _SMALLEST_NOISE_MULTIPLIER else _exact_epsilon(sigma, delta)


# Tails may underflow to zero, also in a program that raises floating-point errors.
@np.errstate(under="ignore")
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
    sigma = numbers.non_negative_number(noise_multiplier, "noise_multiplier")
    if sigma == 0.0:
        return math.inf
    # Divided twice: the square of a float may be too large or too small for one. A rho that is
    # too small for a float is not 0.
    return max(0.5 / sigma / sigma, math.ulp(0.0))


def zcdp_delta(
    noise_multiplier: float,
    *,
    num_coordinates: int = DEFAULT_NUM_COORDINATES,
    disjoint_participations: int = 1,
) -> float:
    """Returns the delta0 of approximate zero-concentrated DP that belongs to :func:`zcdp_rho`.

    Of an unamplified run's released numbers, (rho, delta0)-approximate zCDP is proved
    (``kernel.draws``): in both of two neighbouring worlds there is an event of
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
    sigma = numbers.non_negative_number(noise_multiplier, "noise_multiplier")
    if sigma == 0.0:
        return 0.0
    each = sigma * math.sqrt(numbers.positive_integer(disjoint_participations, "participations"))
    return failure_probability(each, num_coordinates)


def delta_left(delta: float, noise_multiplier: float, num_coordinates: int) -> float:
    """Returns the part of delta that is left for real normal numbers.

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
    if failure > _LARGEST_SHARE * delta:
        raise TailError(
            f"delta must be at least {failure / _LARGEST_SHARE:.3g} for {num_coordinates} numbers "
            f"of noise, found {delta:g}: use a larger delta, or fewer rounds or parameters."
        )
    return delta - failure


def failure_probability(noise_multiplier: float, num_coordinates: int) -> float:
    """Returns the delta that drawn noise adds to that of real normal numbers.

    It is the same at every epsilon.

    Args:
      noise_multiplier: As in ``gaussian.delta_left``.
      num_coordinates: As there.

    Raises:
      TailError: If there is so little noise that the bound does not hold.
      ValueError: If a number is out of its range.
    """
    sigma = numbers.positive_number(noise_multiplier, "noise_multiplier")
    if sigma * draws.LARGEST_SHIFT < 1.0:
        raise TailError(
            f"so little noise cannot be accounted for: a client moves numbers by {1.0 / sigma:.3g} "
            f"standard deviations, above {draws.LARGEST_SHIFT:g}. Use more (a smaller epsilon)."
        )
    coordinates = numbers.positive_integer(num_coordinates, "num_coordinates")
    return min(1.0, coordinates * draws.FAILURE_PER_NUMBER)


# Plans, reports and statements ask for the same ones again and again; each takes milliseconds.
@functools.lru_cache(maxsize=1024)
@np.errstate(under="ignore")
def _exact_epsilon(sigma: float, delta: float) -> float:
    # Less noise than this has no smaller epsilon.
    loss = privacy_loss_mechanism.GaussianPrivacyLoss(
        min(sigma, LARGEST_NOISE_MULTIPLIER_ACCOUNTED)
    )
    if loss.get_delta_for_epsilon(0.0) <= delta:
        return 0.0
    # For real normal numbers, zCDP bounds epsilon from above (Bun and Steinke, Prop. 1.3).
    rho = zcdp_rho(sigma)
    upper = rho + 2.0 * math.sqrt(rho * math.log(1.0 / delta)) + 1.0
    root = scipy.optimize.brentq(
        lambda each: loss.get_delta_for_epsilon(each) - delta, 0.0, upper, xtol=1e-12, rtol=1e-12
    )
    # The root may lie below the true one by the solver's tolerance.
    return float(root * (1.0 + 1e-11) + 1e-11)
