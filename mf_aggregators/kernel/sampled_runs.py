"""Runs with randomly drawn clients, as data, and their privacy losses.

Neighbouring data sets differ in one client: all of its updates are zeroed, and it is drawn for the
same rounds as otherwise. This composes with mechanisms of others that add or remove a client: in
one world both have all data of the client, in the other none of it.

Losses of schemes with groups are computed (``groups``). Losses of clients who draw for themselves
follow from bounds by samples on both divergences of the pair that dominates the run
(``profiles``). They are infinite with the probability that these bounds fail.
"""

import dataclasses
import functools
from collections.abc import Callable

import numpy as np
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

from mf_aggregators.kernel import (
    dominating_pairs,
    draws_of_clients,
    gaussian,
    groups,
    profiles,
    validation,
)
from mf_aggregators.kernel.arrays import FloatArray, IntArray
from mf_aggregators.kernel.dominating_pairs import StrategyColumns
from mf_aggregators.kernel.draws_of_clients import (
    AllParticipations,
    BallsInBins,
    Draws,
    MinSeparation,
)
from mf_aggregators.kernel.groups import LARGEST_NOISE_MULTIPLIER, LEAST_NOISE_MULTIPLIER
from mf_aggregators.kernel.losses import (
    Approximation,
    connected_losses,
    gaussian_losses,
    steps_to,
    with_infinite_losses,
)

# Epsilons at which losses are bounded: from 0, with larger and larger gaps, up to where a bound is
# a share of the level down to which bounds are close.
_POINTS = 160
_SHARE_OF_TAIL, _LARGEST_EPSILON, _HALVINGS = 1e-3, 500.0, 12


@dataclasses.dataclass(frozen=True)
class SampledRun:
    """A run with randomly drawn clients.

    Attributes:
      draws: How clients are drawn.
      sigma: The noise multiplier, relative to the largest column norm of C.
      columns: C and its roundings, for clients who draw for themselves; None for groups.

    Raises:
      TypeError: If the draws or columns are of other classes than the kernel's.
      ValueError: If sigma is negative or not finite, or sizes do not fit one another.
    """

    draws: Draws
    sigma: float
    columns: StrategyColumns | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "draws", draws_of_clients.check(self.draws))
        if not isinstance(self.draws, MinSeparation | BallsInBins):
            object.__setattr__(self, "columns", None)
        elif type(self.columns) is not StrategyColumns:
            raise TypeError(
                f"columns must be StrategyColumns, found {validation.shown(self.columns)}."
            )
        sigma = validation.non_negative_number(self.sigma, "sigma")
        object.__setattr__(self, "sigma", sigma)

    @functools.cached_property
    def together(self) -> AllParticipations:
        """All participations of a client, against an adversary who knows their rounds."""
        draws = self.draws
        if isinstance(draws, BallsInBins) and draws.shares_rows:
            assert self.columns is not None
            return AllParticipations(dominating_pairs.largest_part(self.columns, draws))
        return draws.together

    @property
    def compositions(self) -> int:
        """Upper bound on the number of mechanisms that its losses are composed of."""
        return self.draws.most_participations

    @property
    def noise_multiplier(self) -> float:
        """The noise multiplier of all participations, for an adversary who knows their rounds."""
        return self.sigma / self.together.norm

    @property
    def part_noise_multiplier(self) -> float:
        """The noise multiplier of the largest shift of one row."""
        part = self.sigma / self.together.largest_part
        return min(part, self._amplified_part) if self.is_amplified else part

    @property
    def is_amplified(self) -> bool:
        """Whether its losses are those against an adversary who does not know the rounds."""
        return is_accounted(self.sigma) and self._amplified_part >= gaussian.LEAST_NOISE_MULTIPLIER

    @property
    def _amplified_part(self) -> float:
        return self.sigma / max(self.together.largest_part, self.draws.largest_move)


def is_accounted(sigma: float) -> bool:
    """Returns whether a noise multiplier is amplified at all.

    Args:
      sigma: The noise multiplier, relative to the largest column norm of C.
    """
    return LEAST_NOISE_MULTIPLIER <= sigma <= LARGEST_NOISE_MULTIPLIER


def losses(run: SampledRun, approximation: Approximation) -> PrivacyLossDistribution:
    """Returns losses that dominate a run, for real normal numbers, unless samples mislead.

    Args:
      run: The run.
      approximation: The grid, and how samples bound losses.
    """
    if not run.is_amplified:
        return gaussian_losses(run.noise_multiplier, approximation.interval)
    if not isinstance(run.draws, MinSeparation | BallsInBins):
        return groups.losses(run.draws, run.sigma, approximation.interval)
    return _bounded_losses(run, approximation)


# Compositions ask for the same losses again and again.
@functools.lru_cache(maxsize=16)
def _bounded_losses(run: SampledRun, approximation: Approximation) -> PrivacyLossDistribution:
    interval = approximation.interval
    profile, steps = profile_of(run, approximation, _POINTS)
    unamplified = gaussian.exact_deltas(run.noise_multiplier, steps * interval)
    bounds = [np.minimum(each, unamplified) for each in profile.upper(steps * interval)]
    connected = connected_losses(interval, steps, *bounds)
    return with_infinite_losses(connected, approximation.failure, interval)


def profile_of(
    run: SampledRun, approximation: Approximation, points: int
) -> tuple[profiles.Profile, IntArray]:
    """Returns the profile of the pair that dominates a run, and multiples of the interval.

    Args:
      run: A run of clients who draw for themselves.
      approximation: The grid, and how samples bound losses.
      points: About how many multiples, from 0 up to where divergences are negligible.
    """
    assert isinstance(run.draws, MinSeparation | BallsInBins)
    assert run.columns is not None
    pair = dominating_pairs.dominating_pair(run.columns, run.draws, run.sigma)
    level = approximation.level
    profile = profiles.Profile(pair, approximation.failure, level, seed=approximation.seed)

    def without_samples(epsilons: FloatArray) -> FloatArray:
        unamplified = gaussian.exact_deltas(run.noise_multiplier, epsilons)
        return np.minimum(profile.renyi_bounds(epsilons), unamplified)

    most = _last_epsilon(without_samples, _SHARE_OF_TAIL * level)
    return profile, steps_to(most, approximation.interval, points)


def _last_epsilon(bound: Callable[[FloatArray], FloatArray], tail: float) -> float:
    """An epsilon at which a bound that falls is below a tail, and not far beyond."""
    low, high = 0.0, 1.0
    while bound(np.array([high]))[0] > tail and high < _LARGEST_EPSILON:
        low, high = high, 2.0 * high
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if bound(np.array([middle]))[0] > tail else (low, middle)
    return high
