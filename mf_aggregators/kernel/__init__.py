"""The kernel: the part of the library that has to be right for an epsilon to be true."""

from mf_aggregators.kernel import claim, integers, ledger, noising_matrices, numbers, release, rows

__all__ = ["claim", "integers", "ledger", "noising_matrices", "numbers", "release", "rows"]
