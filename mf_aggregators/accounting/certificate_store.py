"""A directory of claims that were proved before, so that no plan or statement proves them twice.

An entry has a name made of everything that its claim follows from, the code that searches and
proves included. It is written whole or not at all, and a damaged one is computed again.
"""

import hashlib
import inspect
import json
import os
import pathlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mf_aggregators import atomic_files, user_cache, validation
from mf_aggregators.accounting import (
    certificates,
    claim_search,
    column_bands,
    confidence_bounds,
    participation_laws,
    tilted_outputs,
)
from mf_aggregators.accounting.certificates import Claim


class CertificateStoreWarning(UserWarning):
    """An entry could not be used or written; what it is for was computed."""


def default_directory() -> pathlib.Path | None:
    """Returns where proved claims are kept unless another place is chosen.

    None stands for nowhere: the user has no home directory.
    """
    cache = user_cache.find()
    return None if cache is None else cache / "certificates"


def fetch(
    directory: pathlib.Path | None,
    description: Mapping[str, Any],
    compute: Callable[[], Claim | None],
) -> Claim | None:
    """Returns a proved claim from the directory, or computes and keeps it.

    Args:
      directory: Where claims are kept; None for nowhere.
      description: Everything that the claim follows from, JSON-able.
      compute: Searches for the claim and proves it; None if there is none to be proved.

    Returns:
      The claim, or None. With a CertificateStoreWarning, it was computed because its entry is
      damaged, or it could not be kept.
    """
    if directory is None:
        return compute()
    described = {**description, "code": fingerprint(), "numpy": np.__version__}
    name = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:32]
    entry = directory / f"{name}.json"
    if os.path.exists(entry):
        try:
            return _read(entry, described)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            warnings.warn(
                f"{entry} is damaged. It is computed again.", CertificateStoreWarning, stacklevel=2
            )
    claim = compute()
    contents = {"description": described, "claim": None if claim is None else claim.to_dict()}
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
    return claim


def _read(entry: pathlib.Path, described: Mapping[str, Any]) -> Claim | None:
    contents = validation.parsed_json(entry.read_text(encoding="utf-8"))
    stated = contents.pop("sha256")
    if contents["description"] != described or stated != _digest(contents):
        raise ValueError("another entry")
    claim = contents["claim"]
    return None if claim is None else certificates.from_dict(claim)


def _digest(contents: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()


def fingerprint() -> str:
    """Returns what tells versions of the code apart.

    No mended one is served what another proved.
    """
    sources = (
        certificates,
        claim_search,
        column_bands,
        confidence_bounds,
        participation_laws,
        tilted_outputs,
    )
    contents = "".join(inspect.getsource(module) for module in sources)
    return hashlib.sha256(contents.encode()).hexdigest()
