r"""What all schemes with groups share: each round draws from one group of clients, in turn.

The clients are split into as many groups as C has bands, and round i draws from group i modulo that
number alone (BandMF Alg. 2 and 6). A data centre can do that. So a client is in rounds of one group
alone, b or more rounds apart, and each of its participations changes other rows of C x: rows j to
j + b - 1, for a lower-triangular C of b bands. A run is no more revealing than k = ceil(n / b)
adaptive queries to one group, each a Gaussian mechanism whose sensitivity is the largest column
norm of C, run on the batches that the scheme draws (BandMF Thm 4, Cor. F.1 and F.2). The noise
multiplier is relative to that norm everywhere here, and adjacency is zero-out: neighbouring
populations differ in one client, who takes part in the same rounds with zero vectors.

Each kind says what the k queries reveal. None is ever more than the guarantee without
amplification: that of a Gaussian mechanism with as many participations as the scheme allows. The
batches must stay secret: who knows them sees a run that was not sampled. That noise is drawn from
tables costs a small part of delta (``kernel.gaussian``), once for the whole run, whichever
theorem is used for real normal numbers.
"""

import abc
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np
import scipy.optimize
from dp_accounting.pld import privacy_loss_distribution

from mf_aggregators import random_streams
from mf_aggregators.kernel import gaussian
from mf_aggregators.kernel.arrays import IntArray, underflow_is_zero
from mf_aggregators.kernel.certificates import Amplified, Certification
from mf_aggregators.kernel.composition import Approximation, composition_rounding, safe_delta
from mf_aggregators.kernel.dominating_pairs import StrategyColumns
from mf_aggregators.kernel.gaussian import DEFAULT_NUM_COORDINATES, TailError
from mf_aggregators.kernel.losses import of_dp_accounting
from mf_aggregators.participation.fixed_epoch_order import FixedEpochOrder
from mf_aggregators.participation.sampled_runs import LEAST_NOISE_MULTIPLIER, SampledRun
from mf_aggregators.participation.samplers import (
    LEAST_PROBABILITY,
    Sampler,
    probability_of,
)
from mf_aggregators.participation.schemes import SamplingScheme, nth_round
from mf_aggregators.printed_guarantees import counted
from mf_aggregators.random_streams import Draw, Stream

# Privacy losses are rounded to a grid of this interval times epsilon, within bounds. The rounding
# errs on the side of privacy.
_RELATIVE_INTERVAL = 1e-4
_LARGEST_INTERVAL, _SMALLEST_INTERVAL = 1e-3, 1e-7
# The grid has no more points than this, whatever is asked for.
_MOST_POINTS = 500_000
# A first search for a noise multiplier takes intervals so many times as large.
_COARSER = 10.0

# Deltas at which a curve of pairs is computed for schemes without a fast one.
_DELTAS = tuple(float(delta) for delta in np.geomspace(1e-9, 0.3, 8))
# Epsilons at which a fast one is computed, up to where its delta is next to nothing.
_NUM_EPSILONS = 120
_LEAST_DELTA_OF_CURVE = 1e-11
_MOST_DOUBLINGS = 24
# The grid of losses, relative to the spread of the sum of all losses.
_INTERVAL_OF_SPREAD = 5e-3

# The first step from a noise multiplier whose stated epsilon is above its target.
_RELATIVE_STEP = 1e-6
# The excess, in a search, of a noise multiplier that cannot be accounted for.
_REFUSED = 1e6


@dataclasses.dataclass(frozen=True)
class CyclicGroups(SamplingScheme):
    """Schemes that draw from one group of the clients after the other."""

    has_groups: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_bands * self.clients_per_round > self.population:
            raise ValueError(
                f"a population of {self.population} is too small for {self.num_bands} groups of "
                f"at least {self.clients_per_round} clients, one group for each band: "
                f"{self.num_bands * self.clients_per_round} are needed. Use fewer bands (at most "
                f"{self.population // self.clients_per_round}) or fewer clients per round."
            )

    @property
    def rounds_of_group(self) -> int:
        """The most rounds ceil(n / b) that draw from one group."""
        return math.ceil(self.num_rounds / self.num_bands)

    def schema(self) -> FixedEpochOrder:
        """Returns the schema of the rounds that draw from one group."""
        return FixedEpochOrder(self.rounds_of_group, self.num_bands)

    def of_first(self, num_rounds: int) -> SamplingScheme:
        """Returns the scheme of the first rounds, with the same probabilities."""
        return dataclasses.replace(self, num_rounds=max(num_rounds, self.num_bands))

    # Accounting.

    @abc.abstractmethod
    def amplified_epsilon(self, sigma: float, delta: float) -> float:
        """Returns the amplified epsilon of noise of real normal numbers.

        Args:
          sigma: The noise multiplier, relative to the largest column norm of C.
          delta: The delta of the guarantee.
        """

    def amplified(
        self,
        sigma: float,
        delta: float,
        columns: StrategyColumns | None,
        certification: Certification,
        num_coordinates: int = DEFAULT_NUM_COORDINATES,
    ) -> Amplified:
        """Returns the epsilon of a run; it needs no columns and no certificate.

        Raises:
          TailError: As ``gaussian.epsilon`` does.
          ValueError: If delta is not below 1, and at least 1e-12 and 4e-15 times the compositions.
        """
        del columns, certification
        return Amplified(self._epsilon(sigma, delta, num_coordinates), None)

    @underflow_is_zero
    def _epsilon(self, sigma: float, delta: float, num_coordinates: int) -> float:
        safe_delta(delta, self.most_participations())
        found, refused = self._unamplified(sigma, delta, None, num_coordinates)
        if found > 0.0 and sigma >= LEAST_NOISE_MULTIPLIER:
            try:
                left = self._delta_left(sigma, delta, num_coordinates)
                found = min(found, self.amplified_epsilon(sigma, left))
            except TailError:
                # Too little of delta is left.
                pass
        # Who is seldom drawn seldom shows: the amplified one may be accounted for all the same.
        if refused is not None and math.isinf(found):
            raise refused
        return found

    def _delta_left(self, sigma: float, delta: float, num_coordinates: int) -> float:
        """What of a stated delta is left for real normal numbers; TailError if it is too little."""
        left = gaussian.delta_left(delta, sigma / self.largest_move, num_coordinates)
        # Each share is compared with the whole: the next delta that is refused for one of them is
        # refused without amplification, too, and none loses its amplification before.
        return left - composition_rounding(self.most_participations())

    @underflow_is_zero
    def calibrated(
        self,
        target: float,
        delta: float,
        columns: StrategyColumns | None,
        certification: Certification,
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
        """What a search finds, at most a noise multiplier that suffices without amplification."""

        def excess(sigma: float, left: float) -> float:
            # Infinite values have no place in a search for a root.
            return min(self.amplified_epsilon(sigma, left), _REFUSED) - target

        return self._smallest(excess, delta, enough, 1.5, num_coordinates)

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

        @functools.cache
        def known(log_sigma: float) -> float:
            sigma = math.exp(log_sigma)
            try:
                left = self._delta_left(sigma, delta, num_coordinates)
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

    @underflow_is_zero
    def curve(self, sigma: float, num_coordinates: int) -> tuple[tuple[float, float], ...]:
        """Returns pairs (epsilon, delta) that hold."""
        pairs = []
        for delta in _DELTAS:
            try:
                pairs.append((self._epsilon(sigma, delta, num_coordinates), delta))
            except TailError:
                continue
        return tuple(pairs)

    def _pairs_of(
        self,
        losses: Callable[[], privacy_loss_distribution.PrivacyLossDistribution],
        sigma: float,
        spread: float,
        num_coordinates: int,
    ) -> tuple[tuple[float, float], ...]:
        """Returns pairs (epsilon, delta) of the losses of a run, if noise is accounted for at all.

        Args:
          losses: Returns those of real normal numbers.
          sigma: The noise multiplier.
          spread: About the standard deviation of losses.
          num_coordinates: Parameters times rounds.
        """
        try:
            failure = gaussian.failure_probability(sigma / self.largest_move, num_coordinates)
        except TailError:
            return ()
        failure += composition_rounding(self.most_participations())
        loss, most = losses(), spread
        for _ in range(_MOST_DOUBLINGS):
            if loss.get_delta_for_epsilon(most) < _LEAST_DELTA_OF_CURVE:
                break
            most *= 2.0
        epsilons = np.linspace(0.0, most, _NUM_EPSILONS)
        deltas = (float(loss.get_delta_for_epsilon(float(epsilon))) for epsilon in epsilons)
        return tuple(
            (float(epsilon), min(delta + failure, 1.0))
            for epsilon, delta in zip(epsilons, deltas, strict=True)
        )

    @abc.abstractmethod
    def group_slice(self, group: int) -> slice:
        """Returns which places of a random order of all clients are a group.

        Args:
          group: The group, from 0.
        """

    def size_of_group(self, group: int) -> int:
        """Returns how many clients a group has.

        Args:
          group: The group, from 0.
        """
        places = self.group_slice(group)
        return int(places.stop - places.start)

    def sampler(self, seed: int) -> "GroupSampler":
        """Creates the sampler of a run, of 8 bytes for each client."""
        return GroupSampler(self, seed)

    @abc.abstractmethod
    def draw_from(self, group: IntArray, seed: int, round_index: int) -> IntArray:
        """Returns the clients of a group that a round draws, in any order.

        Args:
          group: The clients of the round's group, in a random order.
          seed: The secret seed.
          round_index: The round, from 0.
        """

    def _deviation_of_rounds(self, cohorts: Sequence[IntArray]) -> str | None:
        groups, last = np.full(self.population, -1), np.full(self.population, -1)
        for index, cohort in enumerate(cohorts):
            group = index % self.num_bands
            if np.any((groups[cohort] != -1) & (groups[cohort] != group)):
                return (
                    f"a client of {nth_round(index)} also took part in a round of another group of "
                    "the population"
                )
            found = self._deviation_of_round(index, last[cohort])
            if found is not None:
                return found
            groups[cohort], last[cohort] = group, index
        sizes = np.bincount(groups[groups >= 0], minlength=self.num_bands)
        for group, size in enumerate(sizes):
            if size > self.size_of_group(group):
                return f"more clients took part in the rounds of group {group + 1} than it can have"
        return self._improbable(groups, cohorts) if cohorts else None

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
        too_often = probability_of(counts, rounds, probability) * self.population
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


@dataclasses.dataclass(frozen=True)
class ComposedGroups(CyclicGroups):
    """Schemes whose draws of one group are independent, and compose."""

    @property
    @abc.abstractmethod
    def sampling_probability(self) -> float:
        """The probability that a client of a round's group is drawn."""

    @staticmethod
    @abc.abstractmethod
    def loss_distribution(
        sigma: float, sampling_probability: float, interval: float
    ) -> privacy_loss_distribution.PrivacyLossDistribution:
        """Returns the privacy loss of one round, for real normal numbers.

        Args:
          sigma: The noise multiplier, above zero.
          sampling_probability: The probability that a client of the group is drawn, in (0, 1].
          interval: What the losses of the grid are multiples of, above zero.
        """

    def loss_of_round(
        self, sigma: float, interval: float
    ) -> privacy_loss_distribution.PrivacyLossDistribution:
        """Returns the privacy loss of one round of this run; arguments as above."""
        return self.loss_distribution(sigma, self.sampling_probability, interval)

    def composed_loss(
        self, sigma: float, interval: float
    ) -> privacy_loss_distribution.PrivacyLossDistribution:
        """Returns the privacy loss of a whole run, for real normal numbers.

        Args:
          sigma: The noise multiplier, relative to the largest column norm of C; at least 0.1.
          interval: What the losses of the grid are multiples of; larger for little noise.
        """
        loss = self.loss_of_round(sigma, max(interval, _finest_interval(sigma)))
        return loss.self_compose(self.most_participations())

    @staticmethod
    @abc.abstractmethod
    def losses_below(
        sigma: float, sampling_probability: float, interval: float
    ) -> privacy_loss_distribution.PrivacyLossDistribution:
        """Returns losses that one round's dominate; arguments of :meth:`loss_distribution`."""

    @underflow_is_zero
    def run_losses(
        self, run: SampledRun, approximation: Approximation
    ) -> privacy_loss_distribution.PrivacyLossDistribution:
        """Returns losses of composed rounds: see :meth:`SamplingScheme.run_losses`."""
        interval = approximation.interval
        if approximation.is_pessimistic:
            losses = self.loss_of_round(run.sigma, interval)
        elif type(self).loss_of_round is ComposedGroups.loss_of_round:
            losses = self.losses_below(run.sigma, self.sampling_probability, interval)
        else:
            # What is below the rounds of another scheme is not below those of this one.
            return super().run_losses(run, approximation)
        rounds = self.most_participations()
        return of_dp_accounting(losses if rounds == 1 else losses.self_compose(rounds))

    def amplified_epsilon(self, sigma: float, delta: float) -> float:
        """Returns the epsilon of composed rounds."""
        interval = _LARGEST_INTERVAL
        while True:
            found = float(self.composed_loss(sigma, interval).get_epsilon_for_delta(delta))
            needed = interval_for(found)
            if interval <= 2.0 * max(needed, _finest_interval(sigma)):
                return found
            interval = needed

    def _searched(self, target: float, delta: float, enough: float, num_coordinates: int) -> float:
        """By the privacy losses of a run."""
        if self.sampling_probability >= 1.0:
            return enough

        def excess(interval: float, sigma: float, left: float) -> float:
            loss = self.composed_loss(sigma, interval)
            return math.log(max(float(loss.get_delta_for_epsilon(target)), 1e-30) / left)

        # Fine intervals take time where there is little noise: they only polish.
        interval = interval_for(target)
        coarse = functools.partial(excess, _COARSER * interval)
        near = self._smallest(coarse, delta, enough, 1.5, num_coordinates)
        fine = functools.partial(excess, interval)
        return self._smallest(fine, delta, near, 1.001, num_coordinates)

    def curve(self, sigma: float, num_coordinates: int) -> tuple[tuple[float, float], ...]:
        """Returns pairs (epsilon, delta) of the composed rounds."""
        spread = self.sampling_probability * math.sqrt(self.most_participations()) / sigma
        interval = min(max(_INTERVAL_OF_SPREAD * spread, _SMALLEST_INTERVAL), _LARGEST_INTERVAL)
        loss = functools.partial(self.composed_loss, sigma, interval)
        return self._pairs_of(loss, sigma, spread, num_coordinates)


def interval_for(epsilon: float) -> float:
    """Returns the interval of the grid of losses that an epsilon is computed with."""
    return min(_LARGEST_INTERVAL, max(_SMALLEST_INTERVAL, _RELATIVE_INTERVAL * epsilon))


def _finest_interval(sigma: float) -> float:
    """The interval that puts the largest losses at the end of the largest grid."""
    return (0.5 / sigma**2 + 12.0 / sigma) / _MOST_POINTS


@dataclasses.dataclass(frozen=True, eq=False)
class GroupSampler(Sampler):
    """Batches of one group after the other.

    Attributes:
      scheme: How batches are drawn.
      order: (population,) int64: all clients in random order. Each group is a slice of it.
    """

    scheme: CyclicGroups
    order: IntArray = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        order = random_streams.generator_of(self.seed, Stream.BATCHES, Draw.PARTITION).permutation(
            self.scheme.population
        )
        order.flags.writeable = False
        object.__setattr__(self, "order", order)

    def group_of_round(self, round_index: int) -> IntArray:
        """Returns the group of the population that a round draws from.

        Args:
          round_index: The round, from 0.

        Returns:
          int64 indices of clients, in random order.

        Raises:
          ValueError: If the scheme has no such round.
        """
        self._check_round(round_index)
        return self.order[self.scheme.group_slice(round_index % self.scheme.num_bands)]

    def _num_eligible(self, round_index: int) -> int:
        return len(self.group_of_round(round_index))

    def _draw(self, round_index: int) -> IntArray:
        group = self.group_of_round(round_index)
        return np.sort(self.scheme.draw_from(group, self.seed, round_index))
