"""The kernel: the part of the library that has to be right for an epsilon to be true."""

from mf_aggregators.kernel import claim, draws, integers, ledger, numbers, release, rows

__all__ = ["claim", "draws", "integers", "ledger", "numbers", "release", "rows"]
