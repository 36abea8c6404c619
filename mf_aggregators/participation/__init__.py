"""Ways to take part in a run: timers, fixed orders, and sampling schemes.

``SingleParticipation``, ``FixedEpochOrder`` and ``MinSeparation`` are schemas: sets of rounds in
which one client may take part, however they come about. ``PoissonSampling``, ``FixedSizeSampling``,
``TruncatedPoissonSampling``, ``Shuffling``, ``RandomAllocation``, ``MinSeparationSampling`` and
``BallsInBins`` are random rules, which amplify the guarantee towards whoever does not know the
draws.
"""

from mf_aggregators.participation.balls_in_bins import BallsInBins
from mf_aggregators.participation.certificate_search import Amplified, Certification
from mf_aggregators.participation.cyclic_groups import CyclicGroups
from mf_aggregators.participation.fixed_size import FixedSizeSampling
from mf_aggregators.participation.kinds import (
    FixedEpochOrder,
    MinSeparation,
    Participation,
    SingleParticipation,
    check,
    check_fits,
    of_schema,
)
from mf_aggregators.participation.min_separation_sampling import MinSeparationSampling
from mf_aggregators.participation.poisson import PoissonSampling
from mf_aggregators.participation.random_allocation import RandomAllocation
from mf_aggregators.participation.registry import (
    accounted,
    check_extended,
    check_population,
    from_dict,
    of_draws,
    sampling_from_dict,
    sampling_scheme,
    sampling_schemes,
    smallest_population,
)
from mf_aggregators.participation.schemes import Sampler, SamplingScheme
from mf_aggregators.participation.separated import SeparatedScheme
from mf_aggregators.participation.shuffling import Shuffling
from mf_aggregators.participation.truncated_poisson import TruncatedPoissonSampling
from mf_aggregators.random_streams import secret_seed

__all__ = [
    "Amplified",
    "BallsInBins",
    "Certification",
    "CyclicGroups",
    "FixedEpochOrder",
    "FixedSizeSampling",
    "MinSeparation",
    "MinSeparationSampling",
    "Participation",
    "PoissonSampling",
    "RandomAllocation",
    "Sampler",
    "SamplingScheme",
    "SeparatedScheme",
    "Shuffling",
    "SingleParticipation",
    "TruncatedPoissonSampling",
    "accounted",
    "check",
    "check_extended",
    "check_fits",
    "check_population",
    "from_dict",
    "of_draws",
    "of_schema",
    "sampling_from_dict",
    "sampling_scheme",
    "sampling_schemes",
    "secret_seed",
    "smallest_population",
]
