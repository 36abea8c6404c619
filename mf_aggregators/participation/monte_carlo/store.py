"""A cache of certificates, so that no plan or statement searches twice.

An entry has a name made of everything that its certificate follows from, the version of the
accounting included. An entry only says what there is to prove: whoever can write into the directory
can make any entry with its checksum. So a certificate is proved again before it is returned, once
in each process. The test has the same random numbers as the first time, and takes most of the time
that search and proof took.
"""

import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mf_aggregators import caches
from mf_aggregators.participation.monte_carlo import certificates
from mf_aggregators.participation.monte_carlo.certificates import Certificate

# What is kept of another version is computed again. Raise it whenever a number of the accounting
# changes: a test holds golden values of all its modules against it.
ACCOUNTING_VERSION = 3

# The folder of the user's cache directory that certificates are kept in by default.
FOLDER = "certificates"

# What this process has proved, with the names of entries. Statements ask again and again.
_proved: set[tuple[str, Certificate | None]] = set()


def fetch(
    directory: pathlib.Path | None,
    description: Mapping[str, Any],
    compute: Callable[[], Certificate | None],
    is_proved: Callable[[Certificate], bool],
) -> Certificate | None:
    """Returns a proved certificate, from the cache or computed and cached.

    Args:
      directory: The cache; None for none.
      description: Everything that the certificate follows from, JSON-able.
      compute: Searches for a certificate and proves it; None if there is none to be proved.
      is_proved: Proves a certificate that was found, and that ``compute`` may return it.

    Returns:
      The certificate, or None. With a ``caches.CacheWarning``, it was computed because its entry is
      damaged or is not proved, or it could not be cached.
    """
    if directory is None:
        return compute()
    described = {**description, "accounting": ACCOUNTING_VERSION, "numpy": np.__version__}
    name = caches.digest(described)[:32]

    def from_json(claim: Mapping[str, Any] | None) -> Certificate | None:
        kept = None if claim is None else certificates.from_dict(claim)
        if kept is not None and (name, kept) not in _proved and not is_proved(kept):
            raise ValueError("its certificate is not proved")
        return kept

    found = caches.fetch(
        directory / f"{name}.json",
        described,
        compute,
        field="claim",
        to_json=lambda certificate: None if certificate is None else certificate.to_dict(),
        from_json=from_json,
    )
    _proved.add((name, found))
    return found
