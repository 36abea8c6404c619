"""What draws the batches of a run by a sampling scheme, from a secret seed.

A training run draws with it, and whoever has the seed can check a run's ledger with it: both need
the same draws.
"""

from mf_aggregators.sampling import data_samplers, random_streams, sampling_seeds

__all__ = ["data_samplers", "random_streams", "sampling_seeds"]
