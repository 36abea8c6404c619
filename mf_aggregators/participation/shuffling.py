"""Shuffling: batches are cut from a shuffled list of a round's group.

Feldman, McMillan and Talwar (2021), Thm 3.1 and 3.8, bound a pass over a group in which each batch
is a mechanism on one client of a uniformly random order; passes are composed. In each batch one
place is singled out, the same for the whole pass and the one where the client is. Given everybody
else, the clients at these places are in uniformly random order, and each batch is a mechanism on
one of them.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from dp_accounting.pld import common as pld_common
from dp_accounting.pld import privacy_loss_distribution

from mf_aggregators import random_streams
from mf_aggregators.kernel import gaussian
from mf_aggregators.kernel.arrays import IntArray
from mf_aggregators.kernel.losses import epsilon_of
from mf_aggregators.participation.cyclic_groups import CyclicGroups, interval_for
from mf_aggregators.participation.kinds import own
from mf_aggregators.participation.schemes import nth_round
from mf_aggregators.random_streams import Draw, Stream

# Points of the grid of local deltas over which the bound is minimised.
_LOCAL_DELTAS = 24


@own
@dataclasses.dataclass(frozen=True)
class Shuffling(CyclicGroups):
    """A round's group is shuffled and cut into batches of B, afresh whenever it is used up.

    As in Cor. F.2 each pass over a group shows every client of it once. The groups have a
    multiple of B clients, floor(m / (b B)) B; fewer than b B clients never take part.

    Attributes:
      num_rounds: The rounds n.
      num_bands: The bands b of C.
      population: The clients m.
      clients_per_round: The clients B of a round.
    """

    name: ClassVar[str] = "shuffling"
    has_random_sizes: ClassVar[bool] = False
    is_dominated: ClassVar[bool] = True

    @property
    def batches_per_pass(self) -> int:
        """The batches floor(m / (b B)) of one pass over a group."""
        return self.population // (self.num_bands * self.clients_per_round)

    @property
    def group_size(self) -> int:
        """The clients floor(m / (b B)) B of each group."""
        return self.batches_per_pass * self.clients_per_round

    @property
    def num_passes(self) -> int:
        """The passes over a group that n rounds begin."""
        return math.ceil(self.rounds_of_group / self.batches_per_pass)

    def most_participations(self, num_rounds: int | None = None) -> int:
        """Returns the passes over a group, in each of which a client is once."""
        return math.ceil(super().most_participations(num_rounds) / self.batches_per_pass)

    def group_slice(self, group: int) -> slice:
        """Returns the places of a group."""
        return slice(group * self.group_size, (group + 1) * self.group_size)

    def draw_from(self, group: IntArray, seed: int, round_index: int) -> IntArray:
        """Returns the next batch of the pass; all batches of a pass come from one shuffle."""
        number, batch = divmod(round_index // self.num_bands, self.batches_per_pass)
        generator = random_streams.generator_of(
            seed, Stream.BATCHES, Draw.PASS, round_index % self.num_bands, number
        )
        size = self.clients_per_round
        return generator.permutation(group)[batch * size : (batch + 1) * size]

    def _deviation_of_round(self, index: int, last: IntArray) -> str | None:
        before = last[last >= 0] // self.num_bands // self.batches_per_pass
        if np.any(before == index // self.num_bands // self.batches_per_pass):
            return f"a client of {nth_round(index)} took part twice in one pass over its group"
        return None

    def _improbable(self, groups: IntArray, cohorts: Sequence[IntArray]) -> None:
        """Nothing else: a pass has every client at most once."""

    def amplified_epsilon(self, sigma: float, delta: float) -> float:
        """Returns the least epsilon over how delta is shared; infinity where nothing is proved."""
        passes, batches = self.num_passes, self.batches_per_pass
        # Composition needs a share of delta of its own.
        pass_delta = delta if passes == 1 else 0.5 * delta / passes
        best = math.inf
        for share in np.geomspace(1e-6, 0.25, _LOCAL_DELTAS):
            local_delta = share * pass_delta / batches
            # Replacing one client changes a batch by twice what zeroing it does.
            local_epsilon = gaussian.exact_epsilon(sigma / 2.0, local_delta)
            bound = _clones(local_epsilon, local_delta, batches, 0.5 * pass_delta)
            if bound is not None and bound[1] <= pass_delta:
                best = min(best, bound[0])
        if passes == 1 or math.isinf(best):
            return best
        loss = privacy_loss_distribution.from_privacy_parameters(
            pld_common.DifferentialPrivacyParameters(best, pass_delta),
            value_discretization_interval=interval_for(best),
        )
        return epsilon_of(loss.self_compose(passes), delta)

    def accounting_words(self) -> str:
        """Returns how the amplified guarantee is computed."""
        return (
            "Amplification by shuffling for banded matrices (BandMF Thm 4, Cor. F.2), by "
            "Feldman, McMillan and Talwar (2021), Thm 3.8, or no amplification where that is "
            "better."
        )

    def _draw_words(self) -> str:
        return (
            f"the next batch of {self.clients_per_round} of a shuffled list of all its "
            f"{self.group_size}, shuffled afresh for each pass."
        )


def _clones(
    local_epsilon: float, local_delta: float, count: int, delta: float
) -> tuple[float, float] | None:
    """Feldman, McMillan and Talwar, Thm 3.1 and 3.8: the (epsilon, delta) of a shuffled pass.

    Returns None where the theorem's condition on the local epsilon does not hold.
    """
    most = math.log(max(count / (16.0 * math.log(2.0 / delta)), 1e-300))
    if local_epsilon > most:
        return None
    grown = math.exp(local_epsilon)
    amplified = math.log1p(
        (grown - 1.0)
        / (grown + 1.0)
        * (8.0 * math.sqrt(grown * math.log(4.0 / delta) / count) + 8.0 * grown / count)
    )
    failure = delta + (math.exp(amplified) + 1.0) * (1.0 + 0.5 / grown) * count * local_delta
    return amplified, failure
