"""Adaptive clip norms: the released fraction of clipped updates, its noise, and the next norm.

In round t, a client clips its update x to the norm c_t and reports x / c_t, of norm at most 1, and
a *clipped-count indicator*: 1/2 if its norm was at most c_t, and -1/2 otherwise. Update and
indicator together are one vector, with one coordinate more than the model, and one run of the
matrix mechanism releases the sums of these vectors. The released sum of updates is multiplied by
c_t. The released sum of indicators estimates the fraction of clients whose norm was at most c_t,
and c_(t+1) depends only on such fractions:

    c_(t+1) = c_t exp(-learning_rate (fraction - target_unclipped_quantile))

(Andrew, Thakkar, McMahan and Ramaswamy, 2021, "Differentially Private Learning with Adaptive
Clipping", Algorithm 1 with its geometric update; there for independent noise).

*Noise.* Let z_delta be the noise of the sum of updates, in clip norms, and sigma_b the noise of the
sum of indicators, both divided by the sensitivity of C. In units of its noise, a client's vector
has a norm of at most sqrt(z_delta^-2 + (2 sigma_b)^-2). So the noise multiplier z satisfies z^-2 =
z_delta^-2 + (2 sigma_b)^-2, and

    z_delta = (z^-2 - (2 sigma_b)^-2)^(-1/2)

(there, Theorem 1; the same numbers as TFF's ``adaptive_clip_noise_params``). If indicators are
multiplied by w = z_delta / sigma_b, their sum needs the same noise as the updates. The vectors then
have a norm of at most R = sqrt(1 + (w / 2)^2) = z_delta / z, and the mechanism has clip norm R and
noise multiplier z, for any C.

*Correlated noise in the fraction.* The logarithm of the norm is a running sum of fractions, so its
noise is row t of A C^-1 Z for prefix sums A (a leaky sum, because the norm reacts), which C makes
small. The noise in the fraction of a single round, row t of C^-1 Z, is larger. So every fraction
enters the sum once, unchanged and with the same weight: it is not cut off to [0, 1], and if the
norm changes only every p rounds, it depends on the mean of all p fractions and not on the last one.

*A norm that changes in every round adds noise.* The noise of the model is A diag(c) C^-1 Z, and
noise of rounds with different norms does not cancel (``factorizations.clip_drift``). So the default
changes the norm after every ten rounds, by steps five times those of TFF.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mf_aggregators.kernel import integers, numbers
from mf_aggregators.kernel.numbers import FloatArray, RealArray

# The default standard deviation of the count's noise divided by the cohort, as in TFF's
# dp_aggregator.
_STDDEV_OF_FRACTION = 0.05
# The least standard deviation of the count's noise divided by the noise multiplier: updates then
# get at most 3.3 % more noise.
_LEAST_STDDEV_OVER_MULTIPLIER = 2.0
# The default limits of the norm are the initial norm divided by, and multiplied by, this number.
_DEFAULT_RANGE = 1000.0
# The indicator of an update within the clip norm. It is the negative for an update above it, and 0
# for an absent client.
INDICATOR_WITHIN = 0.5
# exp(x) is computed from _TERMS terms of the series of exp(x / 2^_SQUARINGS), squared _SQUARINGS
# times.
_SQUARINGS, _TERMS = 10, 20
# The logarithm of the ratio of two float64 norms is below this.
_LARGEST_EXPONENT = 1500.0


class ClipState(NamedTuple):
    """The state of an adaptive clip norm between rounds, which depends only on released numbers.

    Attributes:
      norm: float64 scalar: the clip norm of the next round.
      released_norm: float64 scalar: the clip norm of the last round; before the first round, the
        initial norm.
      released_fraction: float64 scalar: the noisy fraction of clients of the last round whose
        norm was at most its clip norm; NaN before the first one.
      fraction_sum: float64 scalar: the sum of the fractions since the norm changed.
      num_fractions: int64 scalar: the number of these fractions.
    """

    norm: float
    released_norm: float
    released_fraction: float
    fraction_sum: float
    num_fractions: int


@dataclasses.dataclass(frozen=True)
class AdaptiveClip:
    """How a clip norm adapts to the norms of the clients' updates.

    Use it when the norms of updates are not known: pass it as ``clip_norm``.

    Attributes:
      initial_norm: The clip norm of the first round.
      target_unclipped_quantile: The fraction of clients, 0 to 1, whose updates should be within the
        clip norm.
      learning_rate: By how much the logarithm of the norm changes for each unit by which the
        fraction differs from the target. Zero keeps the norm.
      smallest_norm: The lower limit of the norm; None for a thousandth of ``initial_norm``.
      largest_norm: The upper limit of the norm; None for a thousand times ``initial_norm``.
      clipped_count_stddev: sigma_b: the standard deviation of the noise in the number of clients
        within the norm, over the sensitivity of C. None for the default of
        :meth:`clipped_count_stddev_for`.
      update_period: The number of rounds after which the norm changes, by the mean of their
        fractions.

    Raises:
      ValueError: If a number is out of its range.

    Example:
      >>> import mf_aggregators as mfa
      >>> once = mfa.participation.SingleParticipation()
      >>> mechanism = mfa.Mechanism(mfa.factorizations.identity(8), once, noise_multiplier=2.0)
      >>> clip = mfa.AdaptiveClip(initial_norm=0.5, target_unclipped_quantile=0.5)
      >>> aggregator = mfa.Aggregator(mechanism, clip, clients_per_round=100)
      >>> aggregator.metrics(aggregator.initialize())["next_clip_norm"]
      0.5
    """

    initial_norm: float = 0.1
    target_unclipped_quantile: float = 0.5
    learning_rate: float = 1.0
    smallest_norm: float | None = None
    largest_norm: float | None = None
    clipped_count_stddev: float | None = None
    update_period: int = 10

    def __post_init__(self) -> None:
        initial = numbers.positive_number(self.initial_norm, "initial_norm")
        checked = {
            "initial_norm": initial,
            "target_unclipped_quantile": numbers.fraction(
                self.target_unclipped_quantile, "target_unclipped_quantile"
            ),
            "learning_rate": numbers.non_negative_number(self.learning_rate, "learning_rate"),
        }
        for name in ("smallest_norm", "largest_norm", "clipped_count_stddev"):
            value = getattr(self, name)
            if value is not None:
                checked[name] = numbers.positive_number(value, name)
        for name, number in checked.items():
            object.__setattr__(self, name, number)
        numbers.set_positive_integers(self, "update_period")
        # A default limit is kept within the range of floats.
        smallest, largest = (
            numbers.positive_number(bound, name)
            for bound, name in zip(self.bounds, ("smallest_norm", "largest_norm"), strict=True)
        )
        if not smallest <= initial <= largest:
            raise ValueError(
                f"initial_norm must be between smallest_norm and largest_norm, found {initial:g} "
                f"for {smallest:g} and {largest:g}."
            )

    @classmethod
    def constant(cls, clip_norm: float) -> "AdaptiveClip":
        """Returns a constant clip norm in the form of an adaptive one.

        Args:
          clip_norm: The norm, above 0.
        """
        return cls(clip_norm, learning_rate=0.0, smallest_norm=clip_norm, largest_norm=clip_norm)

    @property
    def bounds(self) -> tuple[float, float]:
        """The smallest and the largest norm."""
        smallest, largest = self.smallest_norm, self.largest_norm
        return (
            self.initial_norm / _DEFAULT_RANGE if smallest is None else smallest,
            self.initial_norm * _DEFAULT_RANGE if largest is None else largest,
        )

    @property
    def largest_exponent(self) -> float:
        """The largest exponent that matters: it moves any norm to one of its limits."""
        smallest, largest = self.bounds
        return min(1.0 + math.log(largest) - math.log(smallest), _LARGEST_EXPONENT)

    def clipped_count_stddev_for(self, noise_multiplier: float, clients_per_round: float) -> float:
        """Returns sigma_b: the given one, or the default for a cohort.

        The default is a twentieth of the cohort, as in TFF's ``dp_aggregator``, and at least
        twice the noise multiplier: the noise of the updates then grows by at most 3.3 %.

        Args:
          noise_multiplier: The noise multiplier of the whole mechanism.
          clients_per_round: The expected number of clients in a round.
        """
        if self.clipped_count_stddev is not None:
            return self.clipped_count_stddev
        of_cohort = _STDDEV_OF_FRACTION * clients_per_round
        return max(of_cohort, _LEAST_STDDEV_OVER_MULTIPLIER * noise_multiplier)

    def next_norm(self, norm: float, fraction: float) -> float:
        """Returns the norm after an update.

        Args:
          norm: The norm of the rounds since the last update.
          fraction: The mean of their released fractions: any finite number.
        """
        smallest, largest = self.bounds
        exponent = -self.learning_rate * (fraction - self.target_unclipped_quantile)
        most = self.largest_exponent
        moved = norm * self.exponential(min(max(exponent, -most), most))
        return float(min(max(moved, smallest), largest))

    @staticmethod
    def exponential(exponent: float) -> float:
        """Returns e to a power to a relative 1e-12, with the same bits on every machine.

        Libraries round exponentials differently, but the clip norm must be the same for everybody
        who computes it from the releases. So only sums and products are used.

        Args:
          exponent: A float, or a float64 scalar of a graph, between -1500 and 1500.
        """
        part = exponent * 2.0**-_SQUARINGS
        power = part * 0.0 + 1.0
        for term in range(_TERMS, 0, -1):
            power = power * part * (1.0 / term) + 1.0
        for _ in range(_SQUARINGS):
            power = power * power
        return power

    @property
    def first_state(self) -> ClipState:
        """The state before the first round, in Python's numbers."""
        return ClipState(self.initial_norm, self.initial_norm, math.nan, 0.0, 0)

    def following(self, state: ClipState, fraction: float) -> ClipState:
        """Returns the state after a round, in Python's numbers.

        Args:
          state: The state before the round.
          fraction: The released fraction.
        """
        total, number = state.fraction_sum + fraction, state.num_fractions + 1
        if number < self.update_period:
            return ClipState(state.norm, state.norm, fraction, total, number)
        norm = self.next_norm(state.norm, total * (1.0 / self.update_period))
        return ClipState(norm, state.norm, fraction, 0.0, 0)


@dataclasses.dataclass(frozen=True)
class NoiseSplit:
    """How the noise of a mechanism is split between updates, indicators and private metrics.

    Attributes:
      update_noise_multiplier: z_delta: the standard deviation of the noise in a sum of updates,
        divided by (clip norm times sensitivity of C).
      clipped_count_stddev: sigma_b: the standard deviation of the noise in the count, divided by
        the sensitivity of C.
      indicator_weight: w: the factor of indicators, so that their sum needs the noise of the
        updates.
      vector_norm: R: a bound on the norm of an update over its clip norm with its weighted
        indicator and its weighted metrics.
      metric_stddev: sigma_m: the standard deviation of the noise in the sum of a private metric
        (``private_metrics``), over the sensitivity of C and over the metric's range; 0 without
        metrics.
      metric_weight: The factor of metrics divided by their range, so that their sum needs the noise
        of the updates; 0 without metrics.
    """

    update_noise_multiplier: float
    clipped_count_stddev: float
    indicator_weight: float
    vector_norm: float
    metric_stddev: float = 0.0
    metric_weight: float = 0.0

    @classmethod
    def of(cls, noise_multiplier: float, clipped_count_stddev: float) -> "NoiseSplit":
        """Returns the split of a noise multiplier between updates and indicators.

        Args:
          noise_multiplier: z; zero for no noise, neither in the updates nor in the indicators.
          clipped_count_stddev: sigma_b, above z / 2.

        Returns:
          The split. ``vector_norm`` bounds the norm of the floats of a vector.

        Raises:
          ValueError: If a number is out of its range, or the count has so little noise that the
            indicators alone would break the guarantee.
        """
        z = numbers.non_negative_number(noise_multiplier, "noise_multiplier")
        sigma = numbers.positive_number(clipped_count_stddev, "clipped_count_stddev")
        if z == 0.0:
            return cls(0.0, 0.0, 1.0, math.hypot(1.0, INDICATOR_WITHIN))
        share = z / (2.0 * sigma)
        left = 1.0 - share * share
        # With a smaller rest, rounding errors would dominate the noise of the updates.
        if left < 1e-6:
            raise ValueError(
                f"clipped_count_stddev must be above half the noise multiplier, {z / 2.0:g}, found "
                f"{sigma:g}: the indicators alone would use up the guarantee. Use a larger one."
            )
        of_updates = z / math.sqrt(left)
        weight = of_updates / sigma
        # The norm is computed from the rounded weight, so the weight's rounding does no harm.
        return cls(of_updates, sigma, weight, math.hypot(1.0, INDICATOR_WITHIN * weight))

    def of_horizon(self, ratio: float) -> "NoiseSplit":
        """Returns the same noise relative to the larger sensitivity of an extended run.

        Args:
          ratio: The sensitivity before the extension divided by the one after it.
        """
        return dataclasses.replace(
            self,
            update_noise_multiplier=self.update_noise_multiplier * ratio,
            clipped_count_stddev=self.clipped_count_stddev * ratio,
            metric_stddev=self.metric_stddev * ratio,
        )


def clip_with_indicator(
    update: Sequence[RealArray], clip_norm: float
) -> tuple[list[FloatArray], float]:
    """Returns a clipped update divided by the clip norm, and its clipped-count indicator.

    Args:
      update: Arrays of floats or integers.
      clip_norm: Above zero.

    Returns:
      Float64 arrays with a joint L2 norm of at most 1, up to floating-point errors; and 1/2 if the
      norm was at most ``clip_norm``, otherwise -1/2. All zeros, also the indicator, if an entry is
      NaN or infinite.
    """
    unit, scale, is_within = integers.scaling(update, clip_norm, 1.0)
    if not unit:
        return [np.zeros(np.shape(array)) for array in update], 0.0
    scaled = [np.asarray(np.divide(array, unit, dtype=np.float64) * scale) for array in update]
    return scaled, INDICATOR_WITHIN if is_within else -INDICATOR_WITHIN
