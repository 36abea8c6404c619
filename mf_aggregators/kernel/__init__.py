"""The kernel: the part of the library that has to be right for an epsilon to be true."""

from mf_aggregators.kernel import (
    blocks,
    claim,
    errors,
    integer_rows,
    ledger,
    numbers,
    release,
    rows,
    validation,
)

__all__ = [
    "blocks",
    "claim",
    "errors",
    "integer_rows",
    "ledger",
    "numbers",
    "release",
    "rows",
    "validation",
]
