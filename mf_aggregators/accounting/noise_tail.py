r"""What the end of the normal distribution's tail costs: a share of delta.

Normal numbers are drawn in pairs whose radius is at most T (``rows_of_z``), where real
normal numbers have no end. So some releases are possible with a client's contribution and
impossible without it, and their probability is a failure that no epsilon covers.

Let P and Q be C x + Z with and without a client, in units of the standard deviation of Z,
for real normal numbers; A and B the events that all pairs of Z are within T of their centre
in either world; P' and Q' the laws of what is drawn, P and Q given A and B, where
P(A) = Q(B) = 1 - eta, eta <= K 2^-53 for K pairs. For any set S of releases

    (1 - eta) (P'(S) - e^eps Q'(S)) = P(S and A) - e^eps Q(S and B)
        <= delta_Gauss(eps) + min(P(A without B), e^eps Q(A without B)),

by comparing P and Q on S, A and B, or on S and A. The same holds with P and Q exchanged. A
contribution m_p to pair p, sum |m_p|^2 <= M^2, takes the pair out of the disc with
probability at most

    G(|m_p|) = T sqrt(2 / pi) (Phi(|m_p| - T) - Phi(-T)) :

as the contribution grows from 0 to m, probability crosses the circle of radius T, at shift t
and angle a at most at the rate T cos(a) exp(-(T^2 - 2 T t cos(a) + t^2) / 2) / (2 pi), whose
integral over the half circle is at most T exp(-(T - t)^2 / 2) / pi. Where it does leave, the
pair is beyond T and in one half plane, of probability 2^-54 under Q. So a pair costs at
most F(m) = min(G(m), 2^-54 e^eps), which also holds if contributions depend on what was
released before: rows of Z are independent of the past, and the sum below bounds every path.

The sum of F over pairs, as a function of s = m^2, is largest as follows. F is concave up to
m = a, the smaller root of m (T - m) = 1, and convex from there to the cap, below the other
root. By concavity the pairs up to a cost no more than K equal ones; of those between a and
the cap, moving two apart costs more until one reaches an end, so that at most one is left.
"""

import math

import scipy.special

from mf_aggregators import validation
from mf_aggregators.noise import rows_of_z

# The largest share of delta that the tail may take: beyond it, a guarantee would rest on how
# the tail is bounded.
LARGEST_SHARE = 0.5
# A smaller share of delta than is left wherever anything is stated: epsilon at this share is an
# upper bound.
SMALL_SHARE = 0.8 * (1.0 - LARGEST_SHARE)
# The coordinates of all rounds together, where nobody says how many there are.
DEFAULT_NUM_COORDINATES = 2**20

_T = rows_of_z.LARGEST_NORMAL
_ROOT = math.sqrt(_T**2 - 4.0)
# Between these two, G is a convex function of the squared contribution.
_SMALL, _LARGE = (_T - _ROOT) / 2.0, (_T + _ROOT) / 2.0
_FACTOR = _T * math.sqrt(2.0 / math.pi)
# Below this the difference of two probabilities would lose its digits.
_TINY = 1e-6


class TailError(ValueError):
    """The tail of the noise is too large a part of delta for a guarantee to be stated."""


def probability(
    noise_multiplier: float,
    epsilon: float = math.inf,
    *,
    num_coordinates: int = DEFAULT_NUM_COORDINATES,
    participations: int = 1,
    chance: float = 1.0,
) -> float:
    """Returns a bound on what the end of the tail adds to delta.

    Args:
      noise_multiplier: Standard deviation of Z over what one of the participations, or for
        one all of them together, can change in C x (in L2 norm).
      epsilon: The epsilon that delta is for; infinity for a bound that serves every epsilon.
      num_coordinates: Over how many numbers a contribution may be spread: the parameters
        times the rounds.
      participations: How many participations change different rows of C x.
      chance: The probability of each participation, decided independently and kept secret:
        who did not take part is with and without a client the same.

    Returns:
      A probability, at most 1.

    Raises:
      ValueError: If a number is out of its range.
    """
    sigma = validation.positive_number(noise_multiplier, "noise_multiplier")
    pairs = (validation.positive_integer(num_coordinates, "num_coordinates") + 1) // 2
    each = 1.0 / sigma
    if each >= _LARGE:
        return 1.0
    together = math.sqrt(participations) * each
    spread = pairs * _leaves(min(_SMALL, together / math.sqrt(pairs)))
    # Among the releases with the client, the share of those in which it took part can be
    # impossible without it. Among the releases without it, none is impossible, and what is
    # missing with it is that share.
    concentrated = max(
        chance * _concentrated(each, epsilon - math.log(chance)),
        _concentrated(each, epsilon + math.log(chance)),
    )
    return min(1.0, spread + participations * concentrated)


def delta_left(delta: float, tail: float, num_coordinates: int = DEFAULT_NUM_COORDINATES) -> float:
    """Returns what of delta is left for real normal numbers.

    Args:
      delta: The delta of the guarantee.
      tail: What :func:`probability` returned.
      num_coordinates: As for :func:`probability`.

    Returns:
      A delta below the given one. If real normal numbers have it at epsilon, the noise that
      is drawn has the given one.

    Raises:
      TailError: If less than half of delta is left.
    """
    outside = num_coordinates * rows_of_z.UNIFORM_UNIT
    if tail + delta * outside > LARGEST_SHARE * delta:
        raise TailError(
            f"so little noise cannot be accounted for at delta {delta:g}: the normal numbers "
            f"that are drawn end at {_T:.4g} standard deviations, where a client may show with "
            f"probability {tail:.2g}, which is more than half of delta. Use more noise (a smaller "
            "epsilon) or a larger delta."
        )
    return delta * (1.0 - outside) - tail


def _leaves(shift: float) -> float:
    """G: how likely at most a shift takes a pair that is drawn out of the disc."""
    if shift < _TINY:
        integral = math.exp(-(_T**2) / 2.0) / math.sqrt(2.0 * math.pi) * math.expm1(_T * shift) / _T
    else:
        integral = float(scipy.special.ndtr(shift - _T) - scipy.special.ndtr(-_T))
    return _FACTOR * integral


def _concentrated(total: float, epsilon: float) -> float:
    """The largest sum of F over contributions above a, of at most a norm together."""
    if total <= _SMALL:
        return 0.0
    # Larger than the cap where that is below a: then F is concave throughout.
    cap = max(rows_of_z.UNIFORM_UNIT / 2.0 * math.exp(min(epsilon, 700.0)), _leaves(_SMALL))
    if _leaves(total) <= cap:
        return _leaves(total)
    at_cap = _T + float(scipy.special.ndtri(cap / _FACTOR + scipy.special.ndtr(-_T)))
    number = math.floor((total / at_cap) ** 2)
    rest = math.sqrt(max(0.0, total**2 - number * at_cap**2))
    return number * cap + _leaves(rest)
