"""Factorizations on disk: the library's own checkpoints, and matrices published elsewhere."""

from mf_aggregators.checkpoints.format import (
    ARRAYS_FILE,
    DESCRIPTION_FILE,
    FORMAT_VERSION,
    CheckpointError,
    check_destination,
    load,
    load_with_description,
    save,
)

__all__ = [
    "ARRAYS_FILE",
    "DESCRIPTION_FILE",
    "FORMAT_VERSION",
    "CheckpointError",
    "check_destination",
    "factorization_cache",
    "load",
    "load_with_description",
    "save",
]
