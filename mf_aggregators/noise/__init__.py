"""How the rows of C^-1 Z follow from one another and from random bits, in NumPy."""

from mf_aggregators.inputs import FixedSeedWarning
from mf_aggregators.kernel.draws import DEFAULT_SOURCE, NOISE_FORMAT, NoiseSource
from mf_aggregators.noise.costs import NoiseStorage

__all__ = [
    "DEFAULT_SOURCE",
    "NOISE_FORMAT",
    "FixedSeedWarning",
    "NoiseSource",
    "NoiseStorage",
    "costs",
    "noise_directory",
]
