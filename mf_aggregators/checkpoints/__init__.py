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
    is_run,
    load,
    load_with_description,
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
    "factorization_cache",
    "is_run",
    "load",
    "load_with_description",
    "save",
]
