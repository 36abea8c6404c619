"""Sampling schemes of other packages: what they say is checked as far as it can be.

Nothing here finds a wrong proof. What a scheme says has to be what its methods promise, though, and
of two numbers that contradict each other none is stated.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from mf_aggregators import validation
from mf_aggregators.accounting.gaussian import TailError
from mf_aggregators.errors import Error
from mf_aggregators.participation.monte_carlo.certificates import (
    MECHANISMS,
    Amplified,
    Certificate,
    Certification,
    MechanismBudget,
)
from mf_aggregators.participation.monte_carlo.distributions import StrategyColumns

if TYPE_CHECKING:
    from mf_aggregators.participation.schemes import SamplingScheme

# By how much a noise multiplier is raised, relative to it, where rounding alone left it too small.
_ROUNDINGS = (0.0, 1e-12, 1e-9, 1e-6)
# How precisely an inverse is found, and from where to where it is looked for.
_PRECISION = 1e-6
_LEAST_NOISE, _MOST_NOISE = 1e-6, 1e12


class SchemeError(Error, ValueError):
    """A sampling scheme of another package failed, or says what cannot be."""


def described(scheme: "SamplingScheme") -> str:
    """Returns the name of a scheme and its class, for messages.

    Args:
      scheme: The scheme.
    """
    kind = type(scheme)
    return f"the sampling scheme {scheme.name} ({kind.__module__}.{kind.__qualname__})"


@contextlib.contextmanager
def named(scheme: "SamplingScheme", method: str, *refusals: type[Exception]) -> Iterator[None]:
    """Names a scheme and its method in whatever the method raises that is no refusal.

    Args:
      scheme: The scheme.
      method: What is called of it.
      *refusals: Errors that the method may raise on purpose.

    Raises:
      SchemeError: In the place of any other error but those of memory and files.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, (SchemeError, MemoryError, OSError, *refusals)):
            raise
        raise SchemeError(
            f"{described(scheme)} failed in {method}: {type(error).__name__}: {error}"
        ) from error


def amplified(
    scheme: "SamplingScheme",
    sigma: float,
    delta: float,
    columns: StrategyColumns | None,
    certification: Certification,
    num_coordinates: int,
) -> Amplified:
    """Returns what ``SamplingScheme.amplified`` says, if it is an epsilon.

    Args:
      scheme: The scheme.
      sigma: As ``amplified`` takes it, and so all others.
      delta: As there.
      columns: As there.
      certification: As there.
      num_coordinates: As there.

    Raises:
      SchemeError: If it says anything else, or fails.
      ValueError: As the method raises it.
    """
    delta = validation.delta(delta)
    with named(scheme, "amplified", ValueError):
        found = scheme.amplified(sigma, delta, columns, certification, num_coordinates)
    if not isinstance(found, Amplified) or not isinstance(
        found.certificate, (Certificate, type(None))
    ):
        raise SchemeError(
            f"{described(scheme)}: amplified returned {validation.shown(found)}, which is no "
            "participation.Amplified: return Amplified(epsilon, None)."
        )
    try:
        epsilon = validation.number(found.epsilon, "epsilon")
    except ValueError as error:
        raise SchemeError(f"{described(scheme)}: in amplified, {error}") from error
    # Written so that NaN does not pass.
    if not epsilon >= 0.0:
        raise SchemeError(
            f"{described(scheme)}: amplified returned epsilon {epsilon:g} for the noise multiplier "
            f"{sigma:g}: an epsilon is at least 0, and infinite where nothing is guaranteed."
        )
    return dataclasses.replace(found, epsilon=epsilon)


def calibrated(
    scheme: "SamplingScheme",
    target: float,
    delta: float,
    columns: StrategyColumns | None,
    certification: Certification,
    num_coordinates: int,
) -> float:
    """Returns what ``SamplingScheme.calibrated`` says, if ``amplified`` says it of that noise too.

    Args:
      scheme: The scheme.
      target: As ``calibrated`` takes it, and so all others.
      delta: As there.
      columns: As there.
      certification: As there.
      num_coordinates: As there.

    Returns:
      The noise multiplier, larger by at most one part in a million where rounding asks for it.

    Raises:
      SchemeError: If the epsilon at that noise is above the target, or the scheme fails.
      ValueError: As the method raises it.
    """
    with named(scheme, "calibrated", ValueError):
        found = scheme.calibrated(target, delta, columns, certification, num_coordinates)
    try:
        sigma = validation.positive_number(found, "its noise multiplier")
    except ValueError as error:
        raise SchemeError(f"{described(scheme)}: in calibrated, {error}") from error
    # The guarantee of the run will be a result of its own.
    alone = dataclasses.replace(certification, budget=None)
    epsilon = math.inf
    for rounding in _ROUNDINGS:
        noise = sigma * (1.0 + rounding)
        with contextlib.suppress(TailError):
            epsilon = scheme.checked_amplified(
                noise, delta, columns, alone, num_coordinates
            ).epsilon
            if epsilon <= target:
                return noise
    raise SchemeError(
        f"{described(scheme)} contradicts itself: calibrated returned the noise multiplier "
        f"{sigma:.6g} for epsilon {target:g}, and by amplified it has epsilon {epsilon:.6g}. "
        "Mend the one that is wrong, or leave calibrated out: it is then the inverse of amplified."
    )


def of_first(scheme: "SamplingScheme", num_rounds: int) -> "SamplingScheme | None":
    """Returns what ``SamplingScheme.of_first`` does, if it is for so many rounds or more.

    Args:
      scheme: The scheme.
      num_rounds: The rounds that were released.

    Raises:
      SchemeError: If it fails, or returns anything else.
    """
    with named(scheme, f"of_first({num_rounds})"):
        found = scheme.of_first(num_rounds)
        if found is not None and found.num_rounds < num_rounds:
            raise ValueError(f"what it returned is for {found.num_rounds} rounds")
    return found


def inverse(
    scheme: "SamplingScheme", epsilon_at: Callable[[float], float], target: float, start: float
) -> float:
    """Returns a noise multiplier whose epsilon was found to be at most a target.

    Args:
      scheme: The scheme.
      epsilon_at: The epsilon of a noise multiplier, which falls with noise; it may raise TailError.
      target: The epsilon that is to hold.
      start: Where the search begins, above 0.

    Returns:
      The least one, to one part in a million on the side of more noise.

    Raises:
      SchemeError: If no noise multiplier gives the target.
    """

    def is_met(sigma: float) -> bool:
        try:
            return epsilon_at(sigma) <= target
        except TailError:
            return False

    high, step = start, 1e-9
    while not is_met(high):
        high, step = high * (1.0 + step), min(10.0 * step, 1.0)
        if high > _MOST_NOISE:
            raise SchemeError(
                f"{described(scheme)}: by amplified, no noise multiplier up to {_MOST_NOISE:g} "
                f"gives epsilon {target:g}."
            )
    low = 0.5 * high
    while low > _LEAST_NOISE and is_met(low):
        high, low = low, 0.5 * low
    while high > low * (1.0 + _PRECISION):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if is_met(middle) else (middle, high)
    return high


def for_one_result(certification: Certification) -> Certification:
    """Returns a certification by which many noise multipliers may be tried for one result.

    Args:
      certification: How epsilons are certified; the budget of it is kept, if it has one.
    """
    if certification.budget is not None:
        return certification
    return dataclasses.replace(certification, budget=MechanismBudget(MECHANISMS))
