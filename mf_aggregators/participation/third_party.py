"""Sampling schemes of other packages: what they say is checked as far as it can be.

Nothing here finds a wrong proof. What a scheme says has to be what its methods promise, though, and
of two numbers that contradict each other none is stated.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from mf_aggregators import packages, validation
from mf_aggregators.accounting.gaussian import TailError
from mf_aggregators.accounting.trade_offs import AllParticipations
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
# More than what floats err by in a norm, relative to it.
_ROUNDING_OF_NORMS = 1e-9


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


def overrides(kind: type, method: str) -> bool:
    """Returns whether the method that a class has is of another package.

    Args:
      kind: The class, which has the method or inherits it.
      method: Its name.
    """
    defining = next(each for each in kind.__mro__ if method in vars(each))
    return packages.other_package(defining) is not None


def check_overrides(scheme: "SamplingScheme", kind: type, methods: Sequence[str]) -> None:
    """Raises SchemeError if another package's class has one of these methods of its own.

    Args:
      scheme: The scheme.
      kind: Its class, or that of its sampler.
      methods: What the library computes or checks, from other methods of the class.
    """
    for method in methods:
        if overrides(kind, method):
            raise SchemeError(
                f"{described(scheme)}: {kind.__qualname__} overrides {method}, which follows from "
                "its other methods: leave it out."
            )


def all_participations(
    scheme: "SamplingScheme",
    columns: StrategyColumns | None,
    by_schema: Callable[[StrategyColumns | None], AllParticipations],
) -> AllParticipations:
    """Returns what ``SamplingScheme.all_participations`` does, if its schema allows no more.

    Args:
      scheme: The scheme.
      columns: As ``all_participations`` takes them.
      by_schema: The same of the library's own method, once participations have been counted.

    Returns:
      What the scheme says. Where participations share rows, only C shows whether it is too little.

    Raises:
      SchemeError: If it says less than its schema, or fails.
      ValueError: If participations share rows, and the scheme does not account for them.
    """
    if overrides(type(scheme), "most_participations"):
        with named(scheme, "most_participations"):
            most = scheme.most_participations()
        known = scheme.schema().most_participations(scheme.num_rounds)
        if most != known:
            raise SchemeError(
                f"{described(scheme)} contradicts itself: most_participations is {most}, and by "
                f"schema() a client may take part {known} times. Mend the one that is wrong, or "
                "leave most_participations out."
            )
    if not overrides(type(scheme), "all_participations"):
        return scheme.all_participations(columns)
    with named(scheme, "all_participations", ValueError):
        found = scheme.all_participations(columns)
    least = by_schema(columns) if not scheme.shares_rows else AllParticipations()
    is_one = isinstance(found, AllParticipations) and found.disjoint in (1, least.disjoint)
    # Written so that NaN does not pass.
    if not (is_one and least.norm <= found.norm * (1.0 + _ROUNDING_OF_NORMS) < math.inf):
        raise SchemeError(
            f"{described(scheme)} contradicts itself: all_participations returned "
            f"{validation.shown(found)}, and by schema() they are {least}. Leave it out."
        )
    return found


def check_participations(scheme: "SamplingScheme", columns: StrategyColumns | None) -> None:
    """Raises SchemeError if a scheme says less of all participations than its schema allows.

    Args:
      scheme: The scheme.
      columns: As ``all_participations`` takes them.

    Raises:
      ValueError: As :func:`all_participations` does, but where participations share rows of C, for
        which ``amplified`` may account by itself.
    """
    try:
        scheme.checked_participations(columns)
    except ValueError as error:
        if isinstance(error, SchemeError) or not scheme.shares_rows:
            raise


def check_norm(scheme: "SamplingScheme", norm: float, known: float) -> None:
    """Raises SchemeError if all participations are said to be less than they are in a matrix.

    Args:
      scheme: The scheme.
      norm: What it says, see ``AllParticipations``.
      known: The sensitivity of C under its schema, over the largest column norm of C.
    """
    if norm * (1.0 + _ROUNDING_OF_NORMS) < known:
        raise SchemeError(
            f"{described(scheme)}: all_participations has the norm {norm:.6g}, and in this matrix "
            f"the participations of its schema() have {known:.6g}."
        )


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
