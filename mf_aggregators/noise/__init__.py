"""Rows of noise: where they are kept and what they cost, and compiled functions for them."""

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
