"""The privacy of Gaussian sums over shuffled batches (Feldman, McMillan and Talwar, 2021).

Their Thm 3.1 and 3.8 bound a pass over a part in which each batch is a mechanism on one client of
a uniformly random order; passes are composed.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from dp_accounting.pld import common as pld_common
from dp_accounting.pld import privacy_loss_distribution

from mf_aggregators.accounting import gaussian

if TYPE_CHECKING:
    from mf_aggregators.participation import Shuffling

# Points of the grid of local deltas over which the bound is minimised.
_LOCAL_DELTAS = 24


def epsilon(
    scheme: "Shuffling",
    sigma: float,
    delta: float,
    interval_for: Callable[[float], float],
) -> float:
    """Returns the least epsilon over how delta is shared between the theorem's parts.

    Args:
      scheme: How batches are shuffled.
      sigma: The noise multiplier, relative to the largest column norm of C.
      delta: Above 0 and below 1: of noise of real normal numbers.
      interval_for: The interval of the grid of losses for an epsilon.

    Returns:
      An epsilon; infinity where the theorem's condition does not hold.
    """
    passes, batches = scheme.num_passes, scheme.batches_per_pass
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
    return float(loss.self_compose(passes).get_epsilon_for_delta(delta))


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
