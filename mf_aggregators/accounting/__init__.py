"""Privacy accounting: from noise multipliers to epsilon and rho, and back.

The guarantee of a run follows from its noise multiplier alone. Without amplification
the noise multiplier is relative to the sensitivity of C under the participation schema
(``epsilon``, ``noise_multiplier``, ``zcdp_rho`` and their like). Sampling schemes
(``mf_aggregators.participation``) amplify it for banded mechanisms, by methods of their own; there
it is relative to the largest column norm of C.
Devices that decide themselves when to take part are never amplified. ``*true_positive_rate*`` say
what an attacker can do under a guarantee.

Adjacency is zero-out everywhere: neighbouring data sets differ in one client, whose
contributions are replaced by zero vectors in every round that it takes part in.
"""

from mf_aggregators.accounting.calibration import (
    event,
    noise_multiplier,
    noise_multiplier_of_zcdp,
)
from mf_aggregators.accounting.composition import composed_epsilon
from mf_aggregators.accounting.trade_offs import true_positive_rate, true_positive_rate_of_pairs
from mf_aggregators.kernel.gaussian import (
    TailError,
    composed_gaussian_epsilon,
    epsilon,
    exact_epsilon,
    zcdp_delta,
    zcdp_rho,
)

__all__ = [
    "TailError",
    "composed_epsilon",
    "composed_gaussian_epsilon",
    "epsilon",
    "event",
    "exact_epsilon",
    "noise_multiplier",
    "noise_multiplier_of_zcdp",
    "true_positive_rate",
    "true_positive_rate_of_pairs",
    "zcdp_delta",
    "zcdp_rho",
]
