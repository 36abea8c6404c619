r"""Truncated Poisson sampling: a batch that would be larger than a largest size is cut.

Each client of a group of N comes with probability q, by a coin of its own. Where more than a
largest size L come, a uniformly random subset of L of them stays (arXiv 2411.04205, 2508.15089).
As with fixed sizes, a client that is in a cut batch has taken the place of another one.

Fix one client, and put the N - 1 others into a uniformly random order. The K others that come are
the first K of that order, where K is binomially distributed, and independent of the order and of
the client's coin. Let v_j be the sum of the first j of them.

* K < L: nothing is cut. The sum is v_K, and the client's update u on top with probability q.
* K >= L: the batch is the first L of the order, or else the first L - 1 and the client, who stays
  with probability L / (K + 1) if it came.

Given the order, and K < L or that the batch is cut, outputs have the distributions, with the client
and with zeros in its place,

    (1 - q) N(v_K) + q N(v_K + u)              and  N(v_K),
    (1 - r) N(v_L) + r N(v_{L-1} + u)          and  (1 - r) N(v_L) + r N(v_{L-1}),

where r is the mean of q L / (K + 1) over K >= L: the order does not depend on K, so that the
distributions of a cut batch are these two mixtures, whatever K is. The first pair is that of a
Poisson sample. The second one is that of a fixed size, with r in the place of B / m and the update
w = v_L - v_{L-1} of another client, whose largest divergences ``fixed_size`` proves. By joint
convexity, the divergences of a round are at most

    (1 - c) (those of a Poisson sample, with q)  +  c (those of a fixed size, with r),

c = P(K >= L). With binomial numbers, c = P(Bin(N - 1, q) >= L) and
c r = (L / N) P(Bin(N, q) > L), as q / (K + 1) P(K) = P(Bin(N, q) = K + 1) / N.

Groups have one of two sizes where m is no multiple of b. No client's divergences are above the
larger ones of the two, which are those of a pair again: the largest of two convex functions is
convex (Zhu, Dong and Wang, 2022, Prop. 10).

jax_privacy takes a replacement, of the sensitivity 2, in the place of the second pair, which is no
less. Adding P(K >= L) of all rounds to delta would be valid as well, and is more than that.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar, TypeVar

import numpy as np
import scipy.special
from dp_accounting import dp_event
from dp_accounting.pld import privacy_loss_distribution

from mf_aggregators import random_streams
from mf_aggregators.kernel import validation
from mf_aggregators.kernel.arrays import FloatArray, IntArray
from mf_aggregators.participation import fixed_size
from mf_aggregators.participation.kinds import own
from mf_aggregators.participation.poisson import PoissonSampling
from mf_aggregators.participation.sampled_runs import SampledRun
from mf_aggregators.participation.samplers import probability_of
from mf_aggregators.participation.schemes import SamplingScheme, nth_round
from mf_aggregators.random_streams import Draw, Stream

# By default a batch is cut with at most this probability, which costs next to no noise.
_PROBABILITY_OF_CUT = 1e-6
# More than what floats err by in a binomial probability, relative to it.
_ROUNDING = 1e-9

_Self = TypeVar("_Self", bound="TruncatedPoissonSampling")


@own
@dataclasses.dataclass(frozen=True)
class TruncatedPoissonSampling(PoissonSampling):
    """Poisson sampling whose batches have a largest size: of more, a random subset stays.

    Attributes:
      num_rounds: The rounds n.
      num_bands: The bands b of C.
      population: The clients m.
      clients_per_round: The clients B of a round, in expectation before batches are cut.
      largest_batch: The most clients L of a round, at least B.
    """

    largest_batch: int

    name: ClassVar[str] = "truncated_poisson"
    takes_largest_batch: ClassVar[bool] = True
    largest_move: ClassVar[float] = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        validation.set_positive_integers(self, "largest_batch")
        if self.largest_batch < self.clients_per_round:
            raise ValueError(
                f"a largest batch of {self.largest_batch} is below the {self.clients_per_round} "
                "clients that are expected in a round. Use a largest batch of at least "
                "clients_per_round, or fewer clients per round."
            )

    @classmethod
    def of_sizes(
        cls: type[_Self],
        num_rounds: int,
        num_bands: int,
        population: int,
        clients_per_round: int,
        separation: int | None = None,
        largest_batch: int | None = None,
    ) -> _Self:
        """Returns the scheme of some sizes.

        By default the largest batch is the least that a round exceeds with a probability of at
        most 1e-6.
        """
        # Without a largest batch it is Poisson sampling, which checks the other sizes.
        poisson = PoissonSampling.of_sizes(
            num_rounds, num_bands, population, clients_per_round, separation
        )
        if largest_batch is None:
            largest_batch = _seldom_exceeded(
                max(poisson.size_of_group(group) for group in range(num_bands)),
                poisson.sampling_probability,
                clients_per_round,
            )
        return cls(num_rounds, num_bands, population, clients_per_round, largest_batch)

    @property
    def label(self) -> str:
        """What tables say of the mechanism."""
        return f"{super().label}, at most {self.largest_batch}"

    @property
    def largest_cohort(self) -> int:
        """The most clients of a round."""
        return self.largest_batch

    def draw_from(self, group: IntArray, seed: int, round_index: int) -> IntArray:
        """Returns whose coins come up heads, or a random subset of them."""
        came = super().draw_from(group, seed, round_index)
        if len(came) <= self.largest_batch:
            return came
        generator = random_streams.generator_of(seed, Stream.BATCHES, Draw.CUT, round_index)
        return generator.choice(came, self.largest_batch, replace=False, shuffle=False)

    def _improbable(self, groups: IntArray, cohorts: Sequence[IntArray]) -> str | None:
        for index, cohort in enumerate(cohorts):
            if len(cohort) > self.largest_batch:
                return (
                    f"{nth_round(index)} had {len(cohort)} clients, more than the largest batch of "
                    f"{self.largest_batch}"
                )
        # Whoever stays came: there are no more of them than without a largest batch.
        return super()._improbable(groups, cohorts)

    def loss_of_round(
        self, sigma: float, interval: float
    ) -> privacy_loss_distribution.PrivacyLossDistribution:
        """Returns the privacy loss of one round, for clients of either size of group."""
        sizes = {self.size_of_group(group) for group in range(self.num_bands)}
        epsilons = fixed_size.grid_of_epsilons(sigma, interval)
        taking_part, zeroed = np.zeros_like(epsilons), np.zeros_like(epsilons)
        for size in sizes:
            found = divergences(
                sigma, self.sampling_probability, size, self.largest_batch, epsilons
            )
            taking_part = np.maximum(taking_part, found[0])
            zeroed = np.maximum(zeroed, found[1])
        return fixed_size.losses_of_divergences(interval, epsilons, taking_part, zeroed)

    def event_of(self, run: SampledRun) -> dp_event.DpEvent:
        """Returns an event that is none of dp-accounting's: it has none for cut batches."""
        return SamplingScheme.event_of(self, run)

    def condition(self, sampler: str | None = None) -> str:
        """Returns who has to do what for the guarantee to hold, after "only if"."""
        return (
            f"{super().condition(sampler)} No batch has more than {self.largest_batch} clients: "
            "of more, a random subset is drawn by the same sampler."
        )

    def run_flags(self) -> Mapping[str, int | str | None]:
        """Returns the flags of commands that train, by name."""
        return {**super().run_flags(), "largest_batch": self.largest_batch}

    def accounting_words(self) -> str:
        """Returns how the amplified guarantee is computed."""
        return (
            "Amplification by sampling for banded matrices (BandMF Thm 4, Cor. F.1): composed "
            "privacy loss distributions of Gaussian mechanisms on truncated Poisson samples "
            "(arXiv 2508.15089, here for zeros in the place of a client)."
        )

    def _draw_words(self) -> str:
        return (
            f"{super()._draw_words().rstrip('.')}; of more than {self.largest_batch} that come so, "
            f"a uniformly random subset of {self.largest_batch} stays."
        )


def divergences(
    sigma: float,
    sampling_probability: float,
    group_size: int,
    largest_batch: int,
    epsilons: FloatArray,
) -> tuple[FloatArray, FloatArray]:
    """Returns bounds on the divergences of one round, with a client from without, and back.

    Args:
      sigma: The noise multiplier, above zero.
      sampling_probability: The probability q that a client of the group comes, in (0, 1].
      group_size: The clients N of the group.
      largest_batch: The most clients L of a batch.
      epsilons: At least 0, of any shape.

    Returns:
      Two arrays of that shape.
    """
    q = sampling_probability
    # The divergences of (1 - q) N(0, s^2) + q N(1, s^2) from N(0, s^2): for a fixed size, those of
    # outputs without the client.
    with_client = fixed_size.divergence_without(sigma, q, epsilons)
    without_client = _poisson_without(sigma, q, epsilons)
    if group_size <= largest_batch:
        return with_client, without_client
    cut = float(_binomial_tail(largest_batch, group_size - 1, q))
    if cut == 0.0:
        return with_client, without_client
    # A cut batch has the client with the probability r. Divergences do not fall where r grows.
    stays = largest_batch / group_size * float(_binomial_tail(largest_batch + 1, group_size, q))
    r = min(stays / cut * (1.0 + _ROUNDING), q)
    # The weights of both add up to a little more than 1.
    whole, cut = min(1.0 - cut + _ROUNDING, 1.0), cut * (1.0 + _ROUNDING)
    return (
        whole * with_client + cut * fixed_size.divergence_with(sigma, r, epsilons),
        whole * without_client + cut * fixed_size.divergence_without(sigma, r, epsilons),
    )


def _binomial_tail(count: int, trials: int, probability: float) -> FloatArray:
    return probability_of(np.array(count), np.array(trials), probability)


def _poisson_without(sigma: float, q: float, epsilons: FloatArray) -> FloatArray:
    """The divergences of N(0, s^2) from (1 - q) N(0, s^2) + q N(1, s^2)."""
    factor = np.exp(epsilons)
    rest = 1.0 - (1.0 - q) * factor
    # Outputs below the cutoff are more probable without the client.
    with np.errstate(divide="ignore"):
        cutoff = sigma**2 * np.log(np.maximum(rest, 0.0) / (q * factor)) + 0.5
    below = scipy.special.ndtr
    found = rest * below(cutoff / sigma) - q * factor * below((cutoff - 1.0) / sigma)
    return np.asarray(np.clip(np.where(rest > 0.0, found, 0.0), 0.0, 1.0))


def _seldom_exceeded(group_size: int, probability: float, expected: int) -> int:
    """The least size, at least the expected one, that is seldom exceeded."""
    low, high = expected, max(group_size, expected)
    while low < high:
        middle = (low + high) // 2
        if float(_binomial_tail(middle + 1, group_size, probability)) <= _PROBABILITY_OF_CUT:
            high = middle
        else:
            low = middle + 1
    return low
