"""Secret seeds, and the random streams that follow from them."""

from mf_aggregators.sampling import random_streams, sampling_seeds

__all__ = ["random_streams", "sampling_seeds"]
