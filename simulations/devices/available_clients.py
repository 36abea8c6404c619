"""Clients whom a sampler has drawn, without those who cannot be asked.

A client takes part in the rounds S that its secret coins or its bin say, whether it can be asked or
not: its timer starts in each of them. In a round of S in which its device is not available it
contributes nothing, which is an update of zeros. The theorem of the amplified guarantee
(``mf_aggregators.participation.monte_carlo.distributions``) covers every choice of updates of norm
at most the clip norm, zeros among them, that follows from what was released before and from S up to
this round. So absences cost nothing, as long as no later coin has a part in them: availability may
depend on the device, on the time, on the data and on the model, and here it has random numbers of
its own. The noise and the number that sums are divided by stay what they are, so that fewer clients
make the model's updates smaller in proportion.

If a timer did not start in a round of S because its device was absent, the client would come
again sooner than the distribution of S says, and the guarantee would not be the one that was
computed.
"""

import dataclasses

import numpy as np

from mf_aggregators.participation import Sampler
from simulations.devices.availability import Availability


@dataclasses.dataclass(frozen=True, eq=False)
class AvailableClients(Sampler):
    """A sampler without those of its clients who are not available; see :func:`among`.

    Attributes:
      sampler: What draws.
      availability: Which devices are available when.
      availability_seed: What availability is drawn from.
      round_seconds: The time from the start of a round to that of the next.
    """

    sampler: Sampler
    availability: Availability
    availability_seed: int = dataclasses.field(repr=False)
    round_seconds: float

    def _draw(self, round_index: int) -> np.ndarray:
        drawn = self.sampler.draw(round_index)
        return drawn[
            self.availability.available(
                drawn, round_index * self.round_seconds, round_index, self.availability_seed
            )
        ]

    def _num_eligible(self, round_index: int) -> int:
        return self.sampler.num_eligible(round_index)


def among(
    sampler: Sampler, availability: Availability, seed: int, round_seconds: float
) -> AvailableClients:
    """Returns a sampler of those clients of another one who are available in their rounds.

    Args:
      sampler: Of a scheme without parts.
      availability: Which devices are available when.
      seed: What availability is drawn from; not the seed of the sampler.
      round_seconds: The time from the start of a round to that of the next, above 0.

    Returns:
      The sampler. Its draws are functions of the two seeds and the round alone.
    """
    return AvailableClients(
        sampler.scheme, sampler.seed, sampler, availability, seed, round_seconds
    )
