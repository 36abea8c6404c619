"""Schedules of the server's learning rate: warm-up, cool-down and decay of the papers.

A schedule is fixed before training and knows nothing of the data, so that it can be part of
the workload that a mechanism is optimised for (Denisov et al. Prop. 4.2). A mechanism for
``workloads.momentum_sgd(n, momentum, schedule.rates(n, peak))`` has momentum and schedule
inside; one for ``workloads.prefix_sum(n)`` has both as post-processing. The run is the same
in both cases: TFF's ``build_sgdm`` under :func:`rate_of_round`, which is Alg. 2 of Denisov
et al., ``m_i = momentum m_(i-1) + g_i`` and ``theta_i = theta_(i-1) - rate_i m_i``, with the
rate outside of the velocity. Only the choice of the workload differs.

A ramp of share s has ceil(s n) steps. Of BandMF's 2,052 rounds (App. I) the warm-up over
15 % has 308: it begins at 0.05 and reaches the full rate in round 309. The cool-down over 25 %
has 513: each of the last 513 rounds is below the full rate and the last is at 0.05.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mf_aggregators import workloads
from mf_aggregators.kernel import numbers
from mf_aggregators.workloads import Workload

DROP = "drop"

# Shares such as 0.07 are not binary fractions: 0.07 * 100 is a little more than 7.
_ROUNDING_OF_SHARES = 1e-9
# Relative to entries, for workloads that were computed in two ways.
_ROUNDING_OF_WORKLOADS = 1e-9


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The learning rate of every round, relative to a peak.

    Where warm-up and cool-down meet, the smaller of both holds.

    Attributes:
      warmup_share: The share of the rounds over which the rate rises linearly to its peak;
        0 for none.
      cooldown_share: The share of the rounds, the last ones, in which it is below its peak;
        0 for none.
      cooldown: How it falls. ``linear``: by equal steps, to ``cooldown_factor`` in the last
        round (Denisov et al. Sec. 5, BandMF App. I). ``drop``: at once, to
        ``cooldown_factor`` (Denisov et al. Sec. 5).
      warmup_factor: The rate of the first round, relative to the peak.
      cooldown_factor: The rate of the last round, relative to the peak.

    Raises:
      ValueError: If a share or factor is out of its range, the shares exceed 1 together, or
        the cool-down has another name.
    """

    warmup_share: float = 0.0
    cooldown_share: float = 0.0
    cooldown: str = "linear"
    warmup_factor: float = 0.05
    cooldown_factor: float = 0.05

    def __post_init__(self) -> None:
        shares = self.warmup_share, self.cooldown_share
        if not all(0.0 <= share <= 1.0 for share in shares):
            raise ValueError(f"warmup_share and cooldown_share must be in [0, 1], found {shares}.")
        if sum(shares) > 1.0 + _ROUNDING_OF_SHARES:
            raise ValueError(f"warmup_share and cooldown_share are above 1 together: {shares}.")
        if self.cooldown not in ("linear", DROP):
            raise ValueError(f"cooldown must be linear or {DROP}, found {self.cooldown!r}.")
        # A rate of zero would make the workload singular.
        factors = self.warmup_factor, self.cooldown_factor
        if not all(0.0 < factor <= 1.0 for factor in factors):
            raise ValueError(f"warmup_factor and cooldown_factor must be in (0, 1]: {factors}.")

    def rates(self, num_rounds: int, peak: float) -> np.ndarray:
        """Returns the learning rate of every round.

        Args:
          num_rounds: The number of rounds n, at least 1.
          peak: The full learning rate, above 0.

        Returns:
          (n,) float64, all above 0 and at most the peak: what ``workloads.momentum_sgd`` and
          :func:`rate_of_round` take.

        Raises:
          ValueError: If an argument is out of its range.
        """
        num_rounds = numbers.positive_integer(num_rounds, "num_rounds")
        peak = numbers.positive_number(peak, "peak")
        rounds = np.arange(num_rounds)
        rising = _ramp(rounds, _steps(self.warmup_share, num_rounds), self.warmup_factor)
        steps, later = _steps(self.cooldown_share, num_rounds), rounds[::-1]
        if self.cooldown == DROP:
            falling = np.where(later < steps, self.cooldown_factor, 1.0)
        else:
            falling = _ramp(later, steps, self.cooldown_factor)
        return peak * np.minimum(rising, falling)


def _ramp(places: np.ndarray, steps: int, factor: float) -> np.ndarray:
    """Numbers that rise linearly from a factor at place 0 to 1 after some steps."""
    return factor + (1.0 - factor) * np.minimum((places + (steps == 0)) / max(steps, 1), 1.0)


# The schedules of the papers. ``decay`` is at 0.15 of the rate in the last 25 % of the rounds, and
# ``cooldown`` falls linearly from 1 to 0.05 over them (both Denisov et al. Sec. 5);
# ``warmup_cooldown`` rises from 0.05 to 1 over the first 15 % as well (BandMF App. I).
SCHEDULES: Mapping[str, Schedule] = {
    "constant": Schedule(),
    "decay": Schedule(cooldown_share=0.25, cooldown=DROP, cooldown_factor=0.15),
    "cooldown": Schedule(cooldown_share=0.25),
    "warmup_cooldown": Schedule(warmup_share=0.15, cooldown_share=0.25),
}


def is_same_training(one: Workload, other: Workload) -> bool:
    """Returns whether two workloads are the same up to a factor, which no matrix depends on.

    Args:
      one: A workload.
      other: Another one.
    """
    if one.num_rounds != other.num_rounds:
        return False
    ours, theirs = (workloads.inverse_bands(each) for each in (one, other))
    if ours is None or theirs is None:
        return one == other
    return ours.shape == theirs.shape and np.allclose(
        ours / ours[0, 0], theirs / theirs[0, 0], rtol=_ROUNDING_OF_WORKLOADS, atol=0.0
    )


def rate_of_round(rates: Sequence[float] | np.ndarray) -> Callable[[Any], Any]:
    """Returns the function that ``tff.learning.optimizers.schedule_learning_rate`` takes.

    Needs TensorFlow, which is imported here only.

    Args:
      rates: The n learning rates, finite and not negative.

    Returns:
      A function from a scalar integer tensor, the round from 0, to its learning rate, a
      scalar float32 tensor. From round n on it is the last rate: TFF asks for the rate of
      the round that comes after the last.

    Raises:
      ValueError: If the rates are not a vector of at least one finite, non-negative number.
    """
    import tensorflow as tf

    values = np.asarray(rates, dtype=np.float64)
    if values.ndim != 1 or not values.size or not np.all((values >= 0.0) & np.isfinite(values)):
        raise ValueError("rates must be a vector of finite numbers of at least 0, one for a round.")

    def rate(round_index: Any) -> Any:
        # The constant belongs to the graph that TFF is building at this moment.
        table = tf.constant(values, tf.float32)
        return tf.gather(table, tf.minimum(round_index, len(values) - 1))

    return rate


def _steps(share: float, num_rounds: int) -> int:
    return math.ceil(share * num_rounds - _ROUNDING_OF_SHARES)
