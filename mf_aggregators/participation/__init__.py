"""Ways to take part in a run: timers, fixed orders, and sampling schemes.

``SingleParticipation``, ``FixedEpochOrder`` and ``MinSeparation`` are schemas: sets of rounds in
which one client may take part, however they come about. ``PoissonSampling``, ``FixedSizeSampling``,
``TruncatedPoissonSampling``, ``Shuffling``, ``RandomAllocation``, ``MinSeparationSampling`` and
``BallsInBins`` are random rules, which amplify the guarantee towards whoever does not know the
draws.
"""

from mf_aggregators.participation.certificate_search import Amplified, Certification
from mf_aggregators.participation.schemes import (
    BallsInBins,
    FixedEpochOrder,
    FixedSizeSampling,
    MinSeparation,
    MinSeparationSampling,
    Participation,
    PoissonSampling,
    RandomAllocation,
    Sampler,
    SamplingScheme,
    SeparatedScheme,
    Shuffling,
    SingleParticipation,
    TruncatedPoissonSampling,
    accounted,
    check,
    check_extended,
    check_fits,
    check_population,
    from_dict,
    of_draws,
    of_schema,
    sampling_from_dict,
    sampling_scheme,
    sampling_schemes,
    smallest_population,
)
from mf_aggregators.random_streams import secret_seed

__all__ = [
    "Amplified",
    "BallsInBins",
    "Certification",
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
