"""A draft of a record for OpenDP's registry of deployments of differential privacy.

The record is by ``schemas/deployments-schema.yaml`` of ``opendp/deployments-registry-data``, and a
function of a statement's JSON document. What the document does not have reads "Not stated.": a
person writes it before the record is submitted.
"""

import hashlib
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from absl import flags

from mf_aggregators import atomic_files
from mf_aggregators.commands import command_line
from mf_aggregators.privacy import statement_file

_TEMPLATE = pathlib.Path(__file__).with_name("templates") / "registry.yaml"


def _record(document: Mapping[str, Any]) -> str:
    """The record of a statement, in YAML; raises ValueError if it guarantees nothing."""
    headline, facts = document["headline"], document["facts"]
    if not document["is_private"] or headline["epsilon"] is None:
        raise ValueError(
            "the statement guarantees nothing, and the registry has deployments of differential "
            "privacy."
        )
    names = [facts[name]["value"] or "Not stated." for name in ("model", "responsible")]
    # The registry names records in this way.
    parts = (*names, (document["date"] or "1900")[:4])
    slug = "_".join(re.sub(r"\W+", "_", part.lower()) for part in parts).replace("_", "-")
    return statement_file.template(_TEMPLATE, finalize=_in_one_line).render(
        document,
        stated=document[headline["guarantee"]],
        slug=slug,
        number=_number,
        sha256=hashlib.sha256(statement_file.canonical(document).encode()).hexdigest(),
    )


def write(values: flags.FlagValues, data: str | os.PathLike[str]) -> dict[str, Any]:
    """Writes the record of a statement, whole or not at all, if --registry asks for it.

    Args:
      values: The parsed flags of mf-report.
      data: The JSON file of the statement.

    Returns:
      The field of the report that names the file; none without --registry.

    Raises:
      OSError: If a file cannot be read or written.
      ValueError: If the statement guarantees nothing.
    """
    if values.registry is None:
        return {}
    with command_line.naming("registry"):
        atomic_files.write(values.registry, _record(statement_file.read(data)))
    return {"registry": values.registry}


def _in_one_line(value: Any) -> Any:
    """A value without line ends, which could end a text of YAML."""
    return re.sub(r"\s*\n\s*", " ", value) if isinstance(value, str) else value


def _number(text: str) -> str:
    """A printed decimal as readers of YAML 1.1 know a float: 1e-06 would be a text."""
    return re.sub(r"^(\d+)e", r"\1.0e", text)
