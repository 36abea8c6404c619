"""The kernel: the part of the library that has to be right for an epsilon to be true."""

from mf_aggregators.kernel import (
    claim,
    errors,
    integer_rows,
    ledger,
    noising_matrices,
    numbers,
    release,
    rows,
    validation,
)

__all__ = [
    "claim",
    "errors",
    "integer_rows",
    "ledger",
    "noising_matrices",
    "numbers",
    "release",
    "rows",
    "validation",
]
