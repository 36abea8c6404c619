"""Schemes with groups: each round draws from one group of clients, in turn.

The clients are split into as many groups as C has bands, and round i draws from group i modulo that
number alone (BandMF Alg. 2 and 6). ``kernel.groups`` accounts for that. A data centre can draw so.
"""

import abc
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np
import scipy.optimize

from mf_aggregators.kernel import gaussian, groups, numbers
from mf_aggregators.kernel.draws_of_clients import (
    LEAST_NOISE_MULTIPLIER,
    Groups,
    RandomAllocation,
    Shuffling,
    StrategyColumns,
)
from mf_aggregators.kernel.gaussian import DEFAULT_NUM_COORDINATES, TailError, underflow_is_zero
from mf_aggregators.kernel.groups import binomial_tail
from mf_aggregators.kernel.losses import delta_of, safe_delta
from mf_aggregators.kernel.numbers import IntArray, counted
from mf_aggregators.participation.certificate_search import Amplified, Certification
from mf_aggregators.participation.schemes import LEAST_PROBABILITY, SamplingScheme, nth_round

# A first search for a noise multiplier takes intervals so many times as large, and for random
# allocation this relative step.
_COARSER, _COARSE_STEP = 10.0, 0.1
# The first step from a noise multiplier whose stated epsilon is above its target.
_RELATIVE_STEP = 1e-6
# The excess, in a search, of a noise multiplier that cannot be accounted for.
_REFUSED = 1e6


@dataclasses.dataclass(frozen=True)
class CyclicGroups(SamplingScheme):
    """Schemes that draw from one group of the clients after the other."""

    has_groups: ClassVar[bool] = True
    # The integers of the kernel that the scheme is accounted for by.
    _kind: ClassVar[Callable[..., Groups]]

    def __post_init__(self) -> None:
        super().__post_init__()
        numbers.set_positive_integers(self, *(each.name for each in dataclasses.fields(self)))
        self.as_draws()

    @property
    def rounds_of_group(self) -> int:
        """The most rounds ceil(n / b) that draw from one group."""
        return self.as_draws().rounds_of_group

    # Accounting.

    def as_draws(self) -> Groups:
        """Returns the scheme as the integers that the kernel accounts for."""
        return self._kind(*dataclasses.astuple(self))

    def amplified(
        self,
        sigma: float,
        delta: float,
        columns: StrategyColumns | None,
        certification: Certification | None,
        num_coordinates: int = DEFAULT_NUM_COORDINATES,
    ) -> Amplified:
        """Returns the epsilon of a run; it needs no columns and no certificate.

        Raises:
          TailError: As ``gaussian.epsilon`` does.
          ValueError: If delta is not below 1, and at least 1e-12 and 4e-15 times the compositions.
        """
        del columns, certification
        return Amplified(self._epsilon(sigma, delta, num_coordinates), None)

    def _epsilon(self, sigma: float, delta: float, num_coordinates: int) -> float:
        return groups.epsilon(self.as_draws(), sigma, delta, num_coordinates=num_coordinates)

    @underflow_is_zero
    def calibrated(
        self,
        target: float,
        delta: float,
        columns: StrategyColumns | None,
        certification: Certification | None,
        num_coordinates: int = DEFAULT_NUM_COORDINATES,
    ) -> float:
        """Returns the least noise multiplier for an epsilon.

        The epsilon that is stated of it, with a grid of its own, is never above the target.
        """
        del columns, certification
        safe_delta(delta, self.most_participations())
        # What suffices without amplification always suffices.
        enough = self._enough(target, delta, None, num_coordinates)
        found = self._searched(target, delta, enough, num_coordinates)

        def is_met(sigma: float) -> bool:
            try:
                return self._epsilon(sigma, delta, num_coordinates) <= target
            except TailError:
                return False

        step = _RELATIVE_STEP
        while found < enough and not is_met(found):
            found = min(found * (1.0 + step), enough)
            step *= 2.0
        return found

    def _searched(self, target: float, delta: float, enough: float, num_coordinates: int) -> float:
        """A noise multiplier that may suffice, at most one that does without amplification."""
        draws = self.as_draws()
        if isinstance(draws, Shuffling):

            def excess(sigma: float, left: float) -> float:
                # Infinite values have no place in a search for a root.
                return min(groups.amplified_epsilon(draws, sigma, left), _REFUSED) - target

            return self._smallest(excess, delta, enough, 1.5, num_coordinates)
        if isinstance(draws, RandomAllocation):
            coarse, fine = _COARSE_STEP, groups.RELATIVE_STEP
        elif draws.sampling_probability >= 1.0:
            return enough
        else:
            # Fine intervals take time if there is little noise: they only polish.
            fine = groups.interval_for(target)
            coarse = _COARSER * fine

        def log_excess(resolution: float, sigma: float, left: float) -> float:
            losses = groups.composed_losses(draws, sigma, resolution)
            return math.log(max(delta_of(losses, target), 1e-30) / left)

        near = self._smallest(
            functools.partial(log_excess, coarse), delta, enough, 1.5, num_coordinates
        )
        return self._smallest(
            functools.partial(log_excess, fine), delta, near, 1.001, num_coordinates
        )

    def _smallest(
        self,
        excess: Callable[[float, float], float],
        delta: float,
        enough: float,
        factor: float,
        num_coordinates: int,
    ) -> float:
        """Returns the least noise multiplier without an excess, at most ``enough``.

        Args:
          excess: Of a noise multiplier, and of what is left of delta; it falls with noise.
          delta: The delta of the guarantee.
          enough: What is returned if the excess is positive there already, or it is below the
            least noise multiplier.
          factor: The first steps of the search, above 1.
          num_coordinates: Parameters times rounds.

        Returns:
          The noise multiplier, to a relative error of 1e-6 on the side of more noise.
        """
        draws = self.as_draws()

        @functools.cache
        def known(log_sigma: float) -> float:
            sigma = math.exp(log_sigma)
            try:
                left = groups.delta_left(draws, sigma, delta, num_coordinates)
            except TailError:
                return _REFUSED
            return excess(sigma, left)

        # Of less noise nothing amplified is stated. A search across it would creep up to it.
        least_accounted = max(
            LEAST_NOISE_MULTIPLIER, self.largest_move * gaussian.LEAST_NOISE_MULTIPLIER
        )
        least, high = math.log(least_accounted * (1.0 + 1e-12)), math.log(enough)
        if high <= least or known(high) > 0.0:
            return enough
        step = math.log(factor)
        low = max(least, high - step)
        while known(low) <= 0.0:
            if low == least:
                return math.exp(least)
            # Never far below the root: accounting for little noise takes long.
            high, step = low, min(2.0 * step, math.log(2.5))
            low = max(least, high - step)
        root = scipy.optimize.brentq(known, low, high, xtol=5e-7, rtol=1e-9)
        step = 5e-7
        while known(root) > 0.0:
            root, step = min(root + step, high), 2.0 * step
        return math.exp(root)

    def size_of_group(self, group: int) -> int:
        """Returns how many clients a group has.

        Args:
          group: The group, from 0.
        """
        places = self.as_draws().group_slice(group)
        return int(places.stop - places.start)

    def _deviation_of_rounds(self, cohorts: Sequence[IntArray]) -> str | None:
        group_of, last = np.full(self.population, -1), np.full(self.population, -1)
        for index, cohort in enumerate(cohorts):
            group = index % self.num_bands
            if np.any((group_of[cohort] != -1) & (group_of[cohort] != group)):
                return (
                    f"a client of {nth_round(index)} also took part in a round of another group of "
                    "the population"
                )
            found = self._deviation_of_round(index, last[cohort])
            if found is not None:
                return found
            group_of[cohort], last[cohort] = group, index
        sizes = np.bincount(group_of[group_of >= 0], minlength=self.num_bands)
        for group, size in enumerate(sizes):
            if size > self.size_of_group(group):
                return f"more clients took part in the rounds of group {group + 1} than it can have"
        return self._improbable(group_of, cohorts) if cohorts else None

    def _deviation_of_round(self, index: int, last: IntArray) -> str | None:
        """Why a round cannot follow the last rounds of its clients, -1 for none."""
        del index, last
        return None

    @abc.abstractmethod
    def _improbable(self, groups: IntArray, cohorts: Sequence[IntArray]) -> str | None:
        """What has more participations than draws give.

        Args:
          groups: (m,) the group of each client; -1 where it is not known.
          cohorts: The clients of each round, at least one.
        """

    def _too_often(
        self, groups: IntArray, cohorts: Sequence[IntArray], probability: float
    ) -> str | None:
        """A client with more participations than independent draws give."""
        counts = np.bincount(np.concatenate(cohorts), minlength=self.population)
        # Rounds that draw from each client's group; clients never drawn have no known one.
        bands = self.num_bands
        rounds = (len(cohorts) - np.maximum(groups, 0) + bands - 1) // bands
        too_often = binomial_tail(counts, rounds, probability) * self.population
        if not np.any(too_often < LEAST_PROBABILITY):
            return None
        worst = int(np.argmin(too_often))
        return (
            f"a client took part in {counts[worst]} of {rounds[worst]} rounds that draw from its "
            "group, more than chance gives"
        )

    @property
    def label(self) -> str:
        """What tables say of the mechanism."""
        return "amplified"

    @abc.abstractmethod
    def _draw_words(self) -> str:
        """Whom a round draws, as the end of a sentence."""

    def assumption_words(self) -> str:
        """Returns what the guarantee assumes of the draws."""
        return (
            f"Sampling: the population is split into {counted(self.num_bands, 'group')}, as many "
            f"as C has bands, and round i draws from group i modulo {self.num_bands} alone, "
            f"{self._draw_words()} The server draws every batch itself, keeps who was drawn "
            "secret, and every client that was drawn takes part."
        )
