"""The kernel: the part of the library that has to be right for an epsilon to be true."""

from mf_aggregators.kernel import errors, validation

__all__ = ["errors", "validation"]
