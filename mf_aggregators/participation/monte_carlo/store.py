"""A directory of certificates that were found before, so that no plan or statement searches twice.

An entry has a name made of everything that its certificate follows from, the version of the
accounting included. It is written whole or not at all, and a damaged one is computed again. An
entry only says what there is to prove: whoever can write into the directory can make any entry with
its checksum, so that a certificate is proved again before it is returned, once in each process. The
test has the same random numbers as the first time, and takes most of the time that search and proof
took.
"""

import hashlib
import json
import os
import pathlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mf_aggregators import atomic_files, user_cache, validation
from mf_aggregators.participation.monte_carlo import certificates
from mf_aggregators.participation.monte_carlo.certificates import Certificate

# What is kept of another version is computed again. Raise it whenever a number of the accounting
# changes: a test holds golden values of all its modules against it.
ACCOUNTING_VERSION = 3

# What this process has proved, with the names of entries. Statements ask again and again.
_proved: set[tuple[str, Certificate]] = set()


class CertificateStoreWarning(UserWarning):
    """An entry could not be used or written; what it is for was computed."""


def default_directory() -> pathlib.Path | None:
    """Returns where certificates are kept unless another place is chosen.

    None stands for nowhere: the user has no home directory.
    """
    cache = user_cache.find()
    return None if cache is None else cache / "certificates"


def fetch(
    directory: pathlib.Path | None,
    description: Mapping[str, Any],
    compute: Callable[[], Certificate | None],
    is_proved: Callable[[Certificate], bool],
) -> Certificate | None:
    """Returns a proved certificate, found in the directory or computed and kept.

    Args:
      directory: Where certificates are kept; None for nowhere.
      description: Everything that the certificate follows from, JSON-able.
      compute: Searches for a certificate and proves it; None if there is none to be proved.
      is_proved: Proves a certificate that was found, and that ``compute`` may return it.

    Returns:
      The certificate, or None. With a CertificateStoreWarning, it was computed because its entry is
      damaged or is not proved, or it could not be kept.
    """
    if directory is None:
        return compute()
    described = {**description, "accounting": ACCOUNTING_VERSION, "numpy": np.__version__}
    name = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:32]
    entry = directory / f"{name}.json"
    if os.path.exists(entry):
        try:
            kept = _read(entry, described)
            if kept is None or (name, kept) in _proved:
                return kept
            if is_proved(kept):
                _proved.add((name, kept))
                return kept
            problem = "holds a certificate that is not proved"
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            problem = "is damaged"
        warnings.warn(
            f"{entry} {problem}. It is computed again.", CertificateStoreWarning, stacklevel=2
        )
    found = compute()
    if found is not None:
        _proved.add((name, found))
    contents = {"description": described, "claim": None if found is None else found.to_dict()}
    text = json.dumps({**contents, "sha256": _digest(contents)}) + "\n"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        atomic_files.write_text(entry, text)
    except OSError as error:
        warnings.warn(
            f"{entry} cannot be written: {error.strerror}. The certificate is used without being "
            "kept.",
            CertificateStoreWarning,
            stacklevel=2,
        )
    return found


def _read(entry: pathlib.Path, described: Mapping[str, Any]) -> Certificate | None:
    contents = validation.parsed_json(entry.read_text(encoding="utf-8"))
    stated = contents.pop("sha256")
    if contents["description"] != described or stated != _digest(contents):
        raise ValueError("another entry")
    claim = contents["claim"]
    return None if claim is None else certificates.from_dict(claim)


def _digest(contents: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()
