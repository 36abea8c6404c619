"""The kernel: the part of the library that has to be right for an epsilon to be true."""

from mf_aggregators.kernel import errors, rows, validation

__all__ = ["errors", "rows", "validation"]
