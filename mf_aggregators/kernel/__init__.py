"""The kernel: the part of the library that has to be right for an epsilon to be true."""

from mf_aggregators.kernel import claim, integers, ledger, numbers, release, rows

__all__ = ["claim", "integers", "ledger", "numbers", "release", "rows"]
