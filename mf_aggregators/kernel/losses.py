"""Privacy losses on a grid, with deltas and epsilons that are rounded up.

Losses, composition and the format are dp-accounting's. Its masses of a grid are differences of
deltas, divided by the interval: floats lose 1e-16 over the interval there. Its epsilons add up a
million masses in turn, at losses that are themselves sums of intervals. Here both err on the side
of privacy.
"""

import math
from collections.abc import Sequence

import numpy as np
from dp_accounting.pld import pld_pmf, privacy_loss_distribution

from mf_aggregators.kernel.arrays import FloatArray, underflow_is_zero

# Upper bound on the rounding error of one mass, in spacings of floats.
_ROUNDINGS = 8
# Upper bound on the relative rounding error of sums by halves and of exponentials.
_ROUNDING_OF_SUMS = 2e-14


# dp-accounting ships no types.
class DenseLosses(pld_pmf.DensePLDPmf):  # type: ignore[misc]
    """dp-accounting's losses on a grid, with deltas and epsilons that are rounded up."""

    @classmethod
    def of(cls, losses: pld_pmf.PLDPmf) -> "DenseLosses":
        """Returns the same losses."""
        dense = losses.to_dense_pmf()
        return cls(
            dense._discretization,
            dense._lower_loss,
            np.asarray(dense._probs),
            dense._infinity_mass,
            dense._pessimistic_estimate,
        )

    @classmethod
    @underflow_is_zero
    def of_deltas(cls, interval: float, first: int, deltas: FloatArray) -> "DenseLosses":
        """Returns losses that dominate a pair, by its deltas (Doroshenko et al. 2022, Alg. 1).

        Args:
          interval: The distance of neighbouring losses, which are multiples of it.
          first: The first multiple.
          deltas: The hockey-stick divergences at the multiples from the first one on, which do not
            rise. At least two.

        Returns:
          Losses whose masses are at least those of exact arithmetic on these deltas.
        """
        # If long floats are no longer than doubles, masses are raised by a little more.
        wide = np.asarray(deltas, np.longdouble)
        falls, width = -np.diff(wide), np.expm1(np.longdouble(interval))
        # The chords before and behind each multiple; the first and the last multiple have one each.
        before = np.concatenate([[0.0], falls * np.exp(np.longdouble(interval)) / width])
        behind = np.concatenate([falls / width, [0.0]])
        exact = before - behind
        exact[0] += 1.0 - wide[0]
        raised = exact + _ROUNDINGS * np.finfo(np.longdouble).eps * (before + behind + 1.0)
        masses = np.maximum(raised, 0.0).astype(np.float64) * (1.0 + 2.0 * np.finfo(float).eps)
        return cls(interval, first, masses, float(deltas[-1]), True)

    def self_compose(self, num_times: int, tail_mass_truncation: float = 1e-15) -> "DenseLosses":
        """Returns the losses of ``num_times`` independent outputs."""
        return self.of(super().self_compose(num_times, tail_mass_truncation))

    def compose(self, other: pld_pmf.PLDPmf, tail_mass_truncation: float = 1e-15) -> "DenseLosses":
        """Returns the losses of an output of each."""
        return self.of(super().compose(other, tail_mass_truncation))

    @underflow_is_zero
    def get_delta_for_epsilon(self, epsilon: float | Sequence[float]) -> float | list[float]:
        """Returns the delta of one epsilon, the hockey-stick divergence, or of each of several."""
        if isinstance(epsilon, Sequence):
            return [self._delta(each) for each in epsilon]
        return self._delta(epsilon)

    @underflow_is_zero
    def get_epsilon_for_delta(self, delta: float) -> float:
        """Returns the least epsilon of a delta, rounded up; infinity if there is none."""
        if self._infinity_mass > delta:
            return math.inf
        losses = self._losses()
        low, high = int(np.searchsorted(losses, 0.0, side="right")) - 1, self.size - 1
        if high <= low or self._delta(0.0) <= delta:
            return 0.0
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._delta(losses[middle]) > delta else (low, middle)
        # Up to this loss, delta is the mass from here to infinity, less e^epsilon times a sum.
        above = self._probs[high:]
        together = float(np.sum(above * np.exp(losses[high] - losses[high:])))
        excess = float(self._infinity_mass) + float(np.sum(above)) - delta
        ratio = excess / together if together > 0.0 else 1.0
        # A loss is a rounded product.
        rounding = 4.0 * np.finfo(float).eps * (1.0 + losses[-1])
        found = losses[high] + math.log(min(max(ratio, math.exp(-self._discretization)), 1.0))
        found = max(found, 0.0) + rounding
        while self._delta(found) > delta and math.isfinite(found):
            found, rounding = found + rounding, 2.0 * rounding
        return float(found)

    def _losses(self) -> FloatArray:
        return np.asarray((np.arange(self.size) + self._lower_loss) * self._discretization)

    def _delta(self, epsilon: float) -> float:
        losses = self._losses()
        first = int(np.searchsorted(losses, epsilon, side="right"))
        finite = float(np.sum(-np.expm1(epsilon - losses[first:]) * self._probs[first:]))
        return float(self._infinity_mass) + finite * (1.0 + _ROUNDING_OF_SUMS)


def of_dp_accounting(
    losses: privacy_loss_distribution.PrivacyLossDistribution,
) -> privacy_loss_distribution.PrivacyLossDistribution:
    """Returns the same losses in dp-accounting's own classes, which compose with no others.

    Args:
      losses: Dense ones.
    """
    return privacy_loss_distribution.PrivacyLossDistribution(
        *(
            pld_pmf.DensePLDPmf(
                each._discretization,
                each._lower_loss,
                each._probs,
                each._infinity_mass,
                each._pessimistic_estimate,
            )
            for each in (losses._pmf_remove, losses._pmf_add)
        )
    )


def epsilon_of(losses: privacy_loss_distribution.PrivacyLossDistribution, delta: float) -> float:
    """Returns the epsilon of losses in both directions, rounded up.

    Args:
      losses: Pessimistic ones.
      delta: Above 0 and below 1.
    """
    return max(
        DenseLosses.of(each).get_epsilon_for_delta(delta)
        for each in (losses._pmf_remove, losses._pmf_add)
    )
