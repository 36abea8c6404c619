"""How the rows of C^-1 Z follow from one another and from random bits, in NumPy."""

from mf_aggregators.noise.costs import NoiseStorage
from mf_aggregators.noise.random_bits import NoiseSource

__all__ = [
    "NoiseSource",
    "NoiseStorage",
    "blocks",
    "costs",
    "recursions",
    "streams",
]
