"""Private metrics of training, released with noise under the same guarantee as the updates.

In addition to its update, a client reports metrics. Each metric is clipped to a range that is fixed
in advance, and measured from the middle of the range, so it is at most half of the range. An absent
client counts as zeros, as if each of its metrics were in the middle. Update, clipped-count
indicator (``adaptive_clip``) and metrics are one vector, and one run of the matrix mechanism
releases the sums of these vectors.

*Noise.* Let z_0 be the noise of the updates without metrics, in clip norms, and z_1 their noise
with metrics, both divided by the sensitivity of C. k metrics, each with noise of sigma_m times its
range, satisfy

    k (2 sigma_m)^-2 = z_0^-2 - z_1^-2

So z_1 = 1.01 z_0 gives metrics a noise of sigma_m = 3.56 z_0 sqrt(k), in the sum over clients.
Updates and metrics together have the requested noise multiplier.

With a constant clip norm, a clipped-count indicator is one of the k metrics. With an adaptive one,
``AdaptiveClip`` determines the noise of its indicator.
"""

import dataclasses
import math
from collections.abc import Sequence

from mf_aggregators import inputs
from mf_aggregators.adaptive_clip import INDICATOR_WITHIN, AdaptiveClip, NoiseSplit
from mf_aggregators.kernel import numbers

# The mean loss of a client's examples in a round.
LOSS = "loss"
# The share of a client's examples that the model gets right.
ACCURACY = "accuracy"
# The number of a client's examples.
EXAMPLES = "examples"
# 1 for every client that takes part.
COUNT = "count"
# The default share by which updates get more noise.
_NOISE_INCREASE = 0.01
# The least increase that floats can split noise by, and the least range over its ends.
_LEAST_INCREASE, _LEAST_SHARE = 1e-6, 2.0**-16
# Positive numbers that float32 holds at full precision. A sum of 2^32 of them does not overflow.
FLOAT32_RANGE = 2.0**-126, (2.0 - 2.0**-23) * 2.0**95


@dataclasses.dataclass(frozen=True)
class BoundedMetric:
    """A metric of each client, clipped to a range before it leaves the client.

    Attributes:
      name: Its name.
      smallest: The least value that counts, finite.
      largest: The largest value that counts, finite and above ``smallest``.

    Raises:
      ValueError: If the range is empty, or float32 arithmetic would lose it or values in it.
    """

    name: str
    smallest: float
    largest: float

    def __post_init__(self) -> None:
        inputs.check_types(self, "name")
        for end in ("smallest", "largest"):
            number = numbers.finite_number(getattr(self, end), f"{end} in the range of {self.name}")
            object.__setattr__(self, end, number)
        if not self.smallest < self.largest:
            raise ValueError(
                f"the range of {self.name} must have its largest value above its smallest, found "
                f"{self.smallest:g} to {self.largest:g}."
            )
        least = max(FLOAT32_RANGE[0], _LEAST_SHARE * max(-self.smallest, self.largest))
        if not least <= self.range <= FLOAT32_RANGE[1]:
            raise ValueError(
                f"the range of {self.name}, {self.smallest!r} to {self.largest!r}, is too narrow "
                "or too wide for float32: report the difference from one end, or in another unit."
            )

    @property
    def range(self) -> float:
        """The largest value less the smallest."""
        return self.largest - self.smallest

    @property
    def middle(self) -> float:
        """The value that a client counts with that is not there."""
        return self.smallest + 0.5 * self.range


@dataclasses.dataclass(frozen=True)
class PrivateMetrics:
    """The metrics that a mechanism releases besides updates, and their share of the guarantee.

    Attributes:
      metrics: The metrics, at least one, with names that differ.
      noise_increase: How much more noise updates get, at least 1e-6: 0.01 for 1 %. A larger
        increase gives metrics less noise.

    Raises:
      ValueError: If there is no metric, two have one name, or the increase is out of its range.
    """

    metrics: tuple[BoundedMetric, ...]
    noise_increase: float = _NOISE_INCREASE

    def __post_init__(self) -> None:
        inputs.check_types(self, "metrics")
        names = [metric.name for metric in self.metrics]
        if not names or len(set(names)) < len(names):
            raise ValueError("there must be a private metric, and each name must be unique.")
        if numbers.positive_number(self.noise_increase, "noise_increase") < _LEAST_INCREASE:
            raise ValueError(
                f"noise_increase must be at least {_LEAST_INCREASE:g}, to split noise."
            )

    @classmethod
    def of_training(
        cls, largest_loss: float, largest_examples: float, *, counts_clients: bool
    ) -> "PrivateMetrics":
        """Returns the private metrics of training, with their ranges.

        Args:
          largest_loss: The upper end of the range of a client's mean loss, above 0.
          largest_examples: The upper end of the range of a client's number of examples in a round,
            above 0.
          counts_clients: Whether the number of clients of a round is one of the metrics, because it
            is secret if it is random. Each client counts as 1 in a range whose middle is 0, so the
            released mean is the number of clients divided by the expected number.

        Raises:
          ValueError: If a range is not valid.
        """
        metrics = [
            BoundedMetric(LOSS, 0.0, largest_loss),
            BoundedMetric(ACCURACY, 0.0, 1.0),
            BoundedMetric(EXAMPLES, 0.0, largest_examples),
        ]
        if counts_clients:
            metrics.append(BoundedMetric(COUNT, -1.0, 1.0))
        return cls(tuple(metrics))

    def split_noise(
        self, noise_multiplier: float, clip: float | AdaptiveClip, clients_per_round: float
    ) -> NoiseSplit:
        """Returns how updates, clipped-count indicators and metrics split the noise.

        Args:
          noise_multiplier: z, of all of them together; zero for no noise.
          clip: The clip norm, or how it adapts. With a constant clip norm (a number, or equal
            limits), the indicator has the noise of a metric.
          clients_per_round: The expected number of clients in a round.

        Returns:
          The split. ``vector_norm`` bounds the norm of the floats of a vector.

        Raises:
          ValueError: If a number is out of its range, or as ``NoiseSplit.of`` does.
        """
        z = numbers.non_negative_number(noise_multiplier, "noise_multiplier")
        num_metrics = len(self.metrics)
        rule = clip if isinstance(clip, AdaptiveClip) else AdaptiveClip.constant(clip)
        smallest, largest = rule.bounds
        is_constant = smallest == largest
        if z == 0.0:
            norm = math.hypot(1.0, 0.5 * math.sqrt(1 + num_metrics))
            return NoiseSplit(0.0, 0.0, 1.0, norm, 0.0, 1.0)
        without, num_equal = z, num_metrics + 1
        if not is_constant:
            count_stddev = rule.clipped_count_stddev_for(z, clients_per_round)
            without = NoiseSplit.of(z, count_stddev).update_noise_multiplier
            num_equal = num_metrics
        of_updates = (1.0 + self.noise_increase) * without
        share = 1.0 - (1.0 + self.noise_increase) ** -2
        stddev = 0.5 * math.sqrt(num_equal / share) * without
        if is_constant:
            count_stddev = stddev
        weight, of_indicator = of_updates / stddev, of_updates / count_stddev
        # The norm is computed from the rounded weights, so their rounding does no harm.
        of_metrics = 0.5 * weight * math.sqrt(num_metrics)
        norm = math.hypot(1.0, INDICATOR_WITHIN * of_indicator, of_metrics)
        return NoiseSplit(of_updates, count_stddev, of_indicator, norm, stddev, weight)


def noise_split(
    clip: float | AdaptiveClip,
    metrics: PrivateMetrics | None,
    clients_per_round: float,
    noise_multipliers: Sequence[float],
) -> NoiseSplit | None:
    """Returns how updates, clipped-count indicators and metrics split the noise of a run.

    Args:
      clip: The clip norm, or how it adapts.
      metrics: The private metrics; None for none.
      clients_per_round: The expected number of clients in a round.
      noise_multipliers: The noise multipliers before each extension of the run and after it; the
        first one determined the noise.

    Returns:
      The split, relative to the sensitivity for all rounds; None if noise is on updates only.

    Raises:
      ValueError: As ``PrivateMetrics.split_noise`` raises it.
    """
    first, last = noise_multipliers[0], noise_multipliers[-1]
    if metrics is not None:
        split = metrics.split_noise(first, clip, clients_per_round)
    elif isinstance(clip, AdaptiveClip):
        stddev = clip.clipped_count_stddev_for(first, clients_per_round)
        split = NoiseSplit.of(first, stddev)
    else:
        return None
    return split if first == last else split.of_horizon(last / first)
