"""Factorizations on disk: the library's own checkpoints, and matrices published elsewhere."""

from mf_aggregators.checkpoints.format import (
    ARRAYS_FILE,
    DESCRIPTION_FILE,
    FORMAT_VERSION,
    MECHANISM_FILE,
    RUN_CHECKPOINT,
    STATEMENT_FILE,
    CheckpointError,
    check_destination,
    described_by_statement,
    has_mechanism,
    is_run,
    load,
    load_with_description,
    load_with_mechanism,
    save,
)

__all__ = [
    "ARRAYS_FILE",
    "DESCRIPTION_FILE",
    "FORMAT_VERSION",
    "MECHANISM_FILE",
    "RUN_CHECKPOINT",
    "STATEMENT_FILE",
    "CheckpointError",
    "check_destination",
    "described_by_statement",
    "factorization_cache",
    "has_mechanism",
    "is_run",
    "load",
    "load_with_description",
    "load_with_mechanism",
    "save",
]
