"""The privacy loss of a Gaussian sum over a Poisson sample, on a grid of losses.

dp-accounting inverts the privacy loss, and adds up a delta, one number at a time, in Python, which
takes most of the time of a sampled run's epsilon. Here all numbers are taken at once; the grid,
what is rounded up and the composition are dp-accounting's.
"""

import functools
import math
from typing import Any

import numpy as np
from dp_accounting.pld import pld_pmf, privacy_loss_distribution, privacy_loss_mechanism
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType


def loss_distribution(
    sigma: float, sampling_probability: float, interval: float
) -> privacy_loss_distribution.PrivacyLossDistribution:
    """Returns the privacy loss of one Gaussian sum of sensitivity 1 over a Poisson sample.

    Its losses are rounded so that no epsilon is too small (Doroshenko et al. 2022, Alg. 1).

    Args:
      sigma: The standard deviation of the noise, above zero.
      sampling_probability: The probability that a client is drawn, in (0, 1].
      interval: What the losses of the grid are multiples of, above zero.
    """
    losses = functools.partial(_losses, sigma, sampling_probability, interval)
    remove = losses(AdjacencyType.REMOVE)
    if sampling_probability == 1.0:
        return privacy_loss_distribution.PrivacyLossDistribution(remove)
    return privacy_loss_distribution.PrivacyLossDistribution(remove, losses(AdjacencyType.ADD))


class SampledGaussianLoss(privacy_loss_mechanism.GaussianPrivacyLoss):
    """dp-accounting's Gaussian mechanism on a sample, with deltas of many epsilons at once.

    Arguments are those of dp-accounting's class. Newer versions of it know that a client may be
    replaced by another one; here a client is added or removed, and that raises a ValueError.
    """

    def __init__(self, sigma: float, **options: Any) -> None:
        super().__init__(sigma, **options)
        if self.adjacency_type not in (AdjacencyType.ADD, AdjacencyType.REMOVE):
            raise ValueError(
                f"adjacency_type must be ADD or REMOVE, found {self.adjacency_type.value}."
            )
        self._sigma = sigma

    def get_delta_for_epsilon(self, epsilon: float | list[float] | np.ndarray) -> np.ndarray:
        """Returns the deltas of epsilons (the hockey-stick divergences), of their shape.

        Args:
          epsilon: Epsilons, also negative ones.
        """
        epsilons = np.asarray(epsilon, dtype=np.float64)
        cutoffs = self._largest_outputs(epsilons)
        deltas = self.mu_upper_cdf(cutoffs) - np.exp(epsilons + self.mu_lower_log_cdf(cutoffs))
        # An output of any size has at least this loss.
        is_always = np.isposinf(cutoffs)
        deltas[is_always] = -np.expm1(epsilons[is_always])
        deltas[np.isneginf(cutoffs)] = 0.0
        return np.clip(deltas, 0.0, 1.0)

    def _largest_outputs(self, losses: np.ndarray) -> np.ndarray:
        """The largest outputs whose privacy loss is at least the given ones."""
        sign = -1.0 if self.adjacency_type == AdjacencyType.ADD else 1.0
        if self.sampling_prob == 1.0:
            unsampled = losses
        else:
            # The loss l of a sample is sign log(1 - q + q exp(sign u)) for the loss u without
            # sampling, so that sign u = sign l - log q + log(1 - (1 - q) exp(-sign l)).
            rest = -np.expm1(math.log1p(-self.sampling_prob) - sign * losses)
            with np.errstate(divide="ignore"):
                logarithm = np.log(np.maximum(rest, 0.0))
            unsampled = losses + sign * (logarithm - math.log(self.sampling_prob))
        # Without sampling, and at sensitivity 1, the loss of an output x is (1/2 - x) / sigma^2
        # where a client is added, and (-1/2 - x) / sigma^2 where it is removed.
        return -sign * 0.5 * self.sensitivity - unsampled * (self._sigma**2) / self.sensitivity


class DenseLosses(pld_pmf.DensePLDPmf):
    """dp-accounting's losses on a grid, with a delta of one sum."""

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

    def self_compose(self, num_times: int, tail_mass_truncation: float = 1e-15) -> "DenseLosses":
        """Returns the losses of as many independent outputs."""
        return self.of(super().self_compose(num_times, tail_mass_truncation))

    def get_delta_for_epsilon(self, epsilon: float) -> float:
        """Returns the delta of one epsilon: the hockey-stick divergence."""
        losses = (np.arange(self.size) + self._lower_loss) * self._discretization
        first = int(np.searchsorted(losses, epsilon, side="right"))
        shares = -np.expm1(epsilon - losses[first:])
        return self._infinity_mass + float(shares @ self._probs[first:])


def _losses(
    sigma: float, sampling_probability: float, interval: float, adjacency: AdjacencyType
) -> DenseLosses:
    loss = SampledGaussianLoss(
        sigma, sensitivity=1.0, sampling_prob=sampling_probability, adjacency_type=adjacency
    )
    bounds = loss.connect_dots_bounds()
    lower = math.floor(bounds.epsilon_lower / interval)
    upper = math.ceil(bounds.epsilon_upper / interval)
    deltas = loss.get_delta_for_epsilon(np.arange(lower, upper + 1) * interval)
    # Rounding may let a delta be larger than an earlier one. Versions of dp-accounting refuse that,
    # or make it smaller, which is not on the side of privacy.
    deltas = np.maximum.accumulate(deltas[::-1])[::-1]
    return DenseLosses.of(
        pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(interval, lower, upper, deltas)
    )
