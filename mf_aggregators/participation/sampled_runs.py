"""A run whose clients a scheme draws, by value: what is composed with other runs.

Neighbouring data sets differ in one client: all of its updates are zeroed, and it is drawn for the
same rounds as otherwise. This composes with mechanisms of others that add or remove a client: in
one world both have all data of the client, in the other none of it.
"""

import dataclasses
from typing import TYPE_CHECKING

from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

from mf_aggregators.kernel import gaussian
from mf_aggregators.kernel.dominating_pairs import StrategyColumns
from mf_aggregators.kernel.draws_of_clients import AllParticipations
from mf_aggregators.kernel.groups import (
    LARGEST_NOISE_MULTIPLIER,
    LEAST_NOISE_MULTIPLIER,
    nothing_from_below,
)
from mf_aggregators.kernel.losses import Approximation, gaussian_losses

if TYPE_CHECKING:
    from mf_aggregators.participation.schemes import SamplingScheme


def is_accounted(sigma: float) -> bool:
    """Returns whether so much noise is amplified at all.

    Args:
      sigma: The noise multiplier, relative to the largest column norm of C.
    """
    return LEAST_NOISE_MULTIPLIER <= sigma <= LARGEST_NOISE_MULTIPLIER


@dataclasses.dataclass(frozen=True)
class SampledRun:
    """A run whose clients a scheme draws (``composition.SampledRun``).

    Attributes:
      scheme: How clients take part.
      sigma: The noise multiplier, relative to the largest column norm of C.
      columns: C, where the guarantee depends on it; None for a diagonal C of equal entries.
    """

    scheme: "SamplingScheme"
    sigma: float
    columns: StrategyColumns | None = None

    @property
    def noise_multiplier(self) -> float:
        """That of all participations of a client, towards who knows the rounds."""
        return self.sigma / self._together.norm

    @property
    def part_noise_multiplier(self) -> float:
        """The noise multiplier of the largest shift of one row."""
        return self._part_if_amplified if self.is_amplified else self._part

    @property
    def is_amplified(self) -> bool:
        """Whether its losses are those of who does not know the rounds."""
        return (
            self.scheme.is_amplified
            and is_accounted(self.sigma)
            and self._part_if_amplified >= gaussian.LEAST_NOISE_MULTIPLIER
        )

    @property
    def _together(self) -> AllParticipations:
        return self.scheme.all_participations(self.columns)

    @property
    def _part(self) -> float:
        return self.sigma / self._together.largest_part

    @property
    def _part_if_amplified(self) -> float:
        return min(self._part, self.sigma / self.scheme.largest_move)

    @property
    def compositions(self) -> int:
        """How many mechanisms its losses are composed of, at most."""
        return self.scheme.most_participations()

    def losses(self, approximation: Approximation) -> PrivacyLossDistribution:
        """Returns losses that dominate the run, for real normal numbers, or are dominated by them.

        Args:
          approximation: How losses are rounded.

        Raises:
          ValueError: If losses are asked for that are dominated, and none are known.
        """
        if not self.is_amplified:
            return self.unamplified_losses(approximation)
        return self.scheme.run_losses(self, approximation)

    def unamplified_losses(self, approximation: Approximation) -> PrivacyLossDistribution:
        """Returns losses of who knows the rounds of each client, which dominate the run.

        Args:
          approximation: How losses are rounded.

        Raises:
          ValueError: If losses are asked for that are dominated: these are no such.
        """
        if not approximation.is_pessimistic:
            raise nothing_from_below(self.scheme)
        return gaussian_losses(self.noise_multiplier, approximation.interval)
