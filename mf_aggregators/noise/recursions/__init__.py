"""Noising matrices as streams: rows of correlated noise round by round, a class for each kind."""

from mf_aggregators.noise.recursions.combination import (
    DenseNoise,
    IndependentNoise,
    WindowNoise,
)
from mf_aggregators.noise.recursions.recursion import (
    BandedNoise,
    NoiseRecursion,
    NoiseState,
    SubstitutionNoise,
    ToeplitzNoise,
    bands_of_matrix,
    fingerprint,
    matrix_from_bands,
)
from mf_aggregators.noise.recursions.state_space import StateSpaceNoise

__all__ = [
    "BandedNoise",
    "DenseNoise",
    "IndependentNoise",
    "NoiseRecursion",
    "NoiseState",
    "StateSpaceNoise",
    "SubstitutionNoise",
    "ToeplitzNoise",
    "WindowNoise",
    "bands_of_matrix",
    "fingerprint",
    "matrix_from_bands",
]
