"""How the rows of C^-1 Z follow from one another and from random bits, in NumPy."""

from mf_aggregators.noise.costs import NoiseStorage
from mf_aggregators.noise.random_bits import DEFAULT_SOURCE, NoiseSource
from mf_aggregators.noise.rows_of_z import NOISE_FORMAT

__all__ = [
    "DEFAULT_SOURCE",
    "NOISE_FORMAT",
    "NoiseSource",
    "NoiseStorage",
    "blocks",
    "costs",
    "integer_rows",
    "recursions",
    "streams",
]
