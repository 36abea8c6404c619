"""How the rows of C^-1 Z follow from one another and from random bits, in NumPy."""

from mf_aggregators.inputs import FixedSeedWarning
from mf_aggregators.kernel.draws import NOISE_FORMAT
from mf_aggregators.noise.places import NoiseStorage

__all__ = [
    "NOISE_FORMAT",
    "FixedSeedWarning",
    "NoiseStorage",
    "fast_tiles",
    "places",
]
