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
from mf_aggregators.commands import command_line, output_paths
from mf_aggregators.commands.command_line import FlagGroup
from mf_aggregators.privacy import statement_file

_TEMPLATES = pathlib.Path(__file__).parent / "templates"


def record(document: Mapping[str, Any]) -> str:
    """Returns the record of a statement, in YAML.

    Args:
      document: What ``Statement.to_dict`` returned.

    Raises:
      ValueError: If the statement guarantees nothing.
    """
    import jinja2

    headline, facts = document["headline"], document["facts"]
    if not document["is_private"] or headline["epsilon"] is None:
        raise ValueError(
            "the statement guarantees nothing, and the registry has deployments of differential "
            "privacy."
        )
    names = [facts[name]["value"] or "Not stated." for name in ("model", "responsible")]
    # As the registry names records.
    parts = (*names, (document["date"] or "1900")[:4])
    slug = "_".join(re.sub(r"\W+", "_", part.lower()) for part in parts).replace("_", "-")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
        finalize=_in_one_line,
    )
    environment.filters["number"] = _number
    return environment.get_template("registry.yaml").render(
        document,
        stated=document[headline["guarantee"]],
        slug=slug,
        sha256=hashlib.sha256(statement_file.canonical(document).encode()).hexdigest(),
    )


def define_flag(values: flags.FlagValues) -> None:
    """Defines --registry.

    Args:
      values: The flags of mf-report.
    """
    FlagGroup(values, "Statement").path(
        "registry",
        "A .yaml file to write, with --statement or --verify: a draft of a record of the statement "
        "for OpenDP's registry of deployments of differential privacy. A person completes it.",
    )


def check_flag(values: flags.FlagValues) -> None:
    """Checks --registry before anything is computed.

    Args:
      values: The parsed flags of mf-report.

    Raises:
      CommandError: If it goes with no statement, or the file cannot be written.
    """
    path = values.registry
    if path is None:
        return
    command_line.check_choice(
        values.statement is not None or values.verify is not None,
        "--registry needs --statement or --verify, whose statement the record is of.",
    )
    command_line.check_choice(
        path.endswith(".yaml"), f"--registry must name a .yaml file, found {path}."
    )
    output_paths.check_parent(path, "registry")
    output_paths.check_file(path, "registry", values.overwrite)
    if values.checkpoint is not None:
        output_paths.check_apart(path, "registry", values.checkpoint)


def write(values: flags.FlagValues, data: str | os.PathLike[str]) -> dict[str, Any]:
    """Writes the record of a statement, whole or not at all, if --registry asks for it.

    Args:
      values: The parsed flags of mf-report.
      data: The JSON file of the statement.

    Returns:
      The field of the report that names the file; none without --registry.

    Raises:
      OSError: If a file cannot be read or written.
      ValueError: As :func:`record` does.
    """
    if values.registry is None:
        return {}
    with command_line.naming("registry"):
        atomic_files.write_text(values.registry, record(statement_file.read(data)))
    return {"registry": values.registry}


def _in_one_line(value: Any) -> Any:
    """A value without line ends, which could end a text of YAML."""
    return re.sub(r"\s*\n\s*", " ", value) if isinstance(value, str) else value


def _number(text: str) -> str:
    """A printed decimal as readers of YAML 1.1 know a float: 1e-06 would be a text."""
    return re.sub(r"^(\d+)e", r"\1.0e", text)
