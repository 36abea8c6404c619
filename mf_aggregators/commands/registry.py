"""A draft of a record for OpenDP's registry of deployments of differential privacy.

The record follows ``schemas/deployments-schema.yaml`` of ``opendp/deployments-registry-data``, and
is a function of a statement's JSON document. Fields that the document does not have read "Not
stated.": a person fills them in before the record is submitted.
"""

import hashlib
import os
import pathlib
import re
from collections.abc import Mapping

from absl import flags

from mf_aggregators import atomic_files, inputs
from mf_aggregators.commands import command_line
from mf_aggregators.privacy import statement_file

_TEMPLATE = pathlib.Path(__file__).with_name("templates") / "registry.yaml"


def _record(document: Mapping[str, object]) -> str:
    """The record of a statement, in YAML; ValueError if the statement guarantees nothing."""
    headline, facts = (inputs.part(document, dict, name) for name in ("headline", "facts"))
    if not document["is_private"] or headline["epsilon"] is None:
        raise ValueError(
            "the statement has no guarantee, and the registry lists deployments of differential "
            "privacy."
        )
    names = [facts[name]["value"] or "Not stated." for name in ("model", "responsible")]
    # The registry uses this form of names for records.
    parts = (*names, (inputs.part(document, str, "date") or "1900")[:4])
    slug = "_".join(re.sub(r"\W+", "_", part.lower()) for part in parts).replace("_", "-")
    return statement_file.template(_TEMPLATE, finalize=_in_one_line).render(
        document,
        stated=document[headline["guarantee"]],
        slug=slug,
        number=_number,
        sha256=hashlib.sha256(statement_file.canonical(document).encode()).hexdigest(),
    )


def write(values: flags.FlagValues, data: str | os.PathLike[str]) -> dict[str, str]:
    """Writes the record of a statement atomically, if --registry was given.

    Args:
      values: The parsed flags of mf-report.
      data: The JSON file of the statement.

    Returns:
      The field of the report that names the file; empty without --registry.

    Raises:
      OSError: If a file cannot be read or written.
      ValueError: If the statement guarantees nothing.
    """
    if values.registry is None:
        return {}
    with command_line.naming("registry"):
        atomic_files.write(values.registry, _record(statement_file.read(data)))
    return {"registry": values.registry}


def _in_one_line(value: object) -> object:
    """A value without line breaks, which could end a YAML text too early."""
    return re.sub(r"\s*\n\s*", " ", value) if isinstance(value, str) else value


def _number(text: str) -> str:
    """A decimal in a form that YAML 1.1 reads as a float (it would read 1e-06 as a text)."""
    return re.sub(r"^(\d+)e", r"\1.0e", text)
