"""Files of statements: strict JSON, its Markdown text, and the comparison of two documents.

The values of a document determine its bytes: a file with other spaces, another order of keys, a
repeated key or ``true`` instead of 1 is refused.
"""

import functools
import json
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from typing import TYPE_CHECKING

from mf_aggregators import inputs
from mf_aggregators.kernel.claim import Guarantee
from mf_aggregators.kernel.ledger import NO_COUNTS
from mf_aggregators.kernel.numbers import Error, rounded_down, rounded_up

if TYPE_CHECKING:
    import jinja2

# The number of the document's format, which is raised when older programs cannot read a change.
FORMAT = 3
# The text for a fact that is not stated.
NOT_STATED = "not stated"
_FOLDER = pathlib.Path(__file__).parent
_TYPES: Mapping[str, type] = {
    **{"object": dict, "array": list, "string": str, "boolean": bool, "integer": int},
    "null": type(None),
}
# If the origin of a fact begins with one of these words, no file can confirm the fact.
_TOLD = ("told by ", "recorded by ", NOT_STATED)
# The significant digits to which computed numbers are rounded.
_DIGITS: Mapping[str, int] = {
    **dict.fromkeys(("epsilon", "rho", "sensitivity", "noise_multiplier"), 6),
    **dict.fromkeys(("epsilon_with_named_runs", "amplified_epsilon", "amplified_delta"), 6),
    **dict.fromkeys(("factor", "delta_times_population"), 4),
    **dict.fromkeys(("zcdp_delta", "failure_probability"), 2),
}
# Finds the version that wrote a document (2.0.0 and older versions used another key).
_VERSION = re.compile(r'"(?:library_version|mf_aggregators)": "([0-9A-Za-z.+!-]{1,40})"')
# Finds characters that have a meaning in Markdown.
_MARKS = re.compile(r"([\\`*_\[\]<>|#])")


class StatementError(Error, ValueError):
    """A file is not a statement that this version can read; the message says why."""


def canonical(document: Mapping[str, object]) -> str:
    """Returns the JSON text of a document.

    Args:
      document: The result of ``Statement.to_dict``.
    """
    return json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def read(path: str | os.PathLike[str]) -> dict[str, object]:
    """Reads and checks a statement's JSON file.

    Args:
      path: The JSON file.

    Returns:
      The document: a dict of JSON values.

    Raises:
      StatementError: If the file cannot be read, has another format, has unknown or missing keys or
        a value of another type, or if its bytes are not those that its values determine.
    """
    file = pathlib.Path(path)
    try:
        text = file.read_bytes().decode("utf-8")
        document = inputs.parsed_json(text, is_strict=True)
        if not isinstance(document, dict):
            raise ValueError("it is not a JSON object")
        if document.get("format") != FORMAT:
            made_by = _VERSION.search(text)
            program = f"mf_aggregators {made_by[1]}, which" if made_by else "the version that"
            raise ValueError(
                f"its format is {document.get('format')!r}, and this version reads {FORMAT}: "
                f"verify it with {program} wrote it"
            )
        for problem in problems(document):
            raise ValueError(problem)
        if text != canonical(document):
            raise ValueError("its values are not in the form of a statement")
    except OSError as error:
        raise StatementError(f"{file} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise StatementError(f"{file} cannot be read as a statement: {error}.") from error
    return document


def render(document: Mapping[str, object]) -> str:
    """Returns the Markdown text of a document.

    Args:
      document: The result of ``Statement.to_dict``.
    """
    made = template(_FOLDER / "statement.md").render(
        document, document=document, no_counts=NO_COUNTS
    )
    return re.sub(r"\n{3,}", "\n\n", made).strip("\n") + "\n"


def warnings(text: str) -> list[str]:
    """Returns the warnings at the beginning of a statement.

    Args:
      text: The result of :func:`render`.
    """
    found = re.findall(r"^\*\*Warning\.(.*)$", text, re.MULTILINE)
    return [line.replace("**", "").strip() for line in found]


def _leaves(value: object, name: str = "") -> Iterator[tuple[str, object]]:
    """Yields all values of a document with their names, such as ``facts.model.value``."""
    items = enumerate(value) if isinstance(value, list) else ()
    parts = [*(value.items() if isinstance(value, dict) else items)]
    if not parts:
        yield name, value
    for key, part in parts:
        yield from _leaves(part, f"{name}.{key}" if name else str(key))


def told(document: Mapping[str, object]) -> dict[str, object]:
    """Returns the values of a document that a person or a clock stated, and no file shows.

    Args:
      document: The document.
    """
    facts, noise = (inputs.part(document[name], dict) for name in ("facts", "noise"))
    found = {
        f"facts.{name}": fact["value"]
        for name, fact in facts.items()
        if fact["origin"].startswith(_TOLD)
    }
    # Flags that are facts as well are compared as facts.
    flags = inputs.part(document["flags"] or {}, dict)
    found |= {f"flags.{name}": value for name, value in flags.items() if name not in facts}
    # A verifier may have no access to the secret directory with the record of sums.
    if noise["recorded_sums"] is not None:
        found |= {f"noise.{name}": noise[name] for name in ("recorded_sums", "record_sha256")}
    return {"date": document["date"], **found}


def compare(
    document: Mapping[str, object], again: Mapping[str, object], proved: Mapping[str, Guarantee]
) -> tuple[list[str], list[str]]:
    """Compares a document with the document that was made again from its files.

    Args:
      document: The document.
      again: The document that follows from its files.
      proved: The guarantees that follow from the files, by the names of their epsilons in the
        document. Each stated epsilon is checked as a claim about its guarantee
        (``Guarantee.prove``).

    Returns:
      Sentences about differences, and sentences about harmless differences: versions of programs,
        stated epsilons that are proved and at most a relative 1e-5 above the recomputed ones, and
        other computed numbers that claim less by one in their last digit.
    """
    stated, now = dict(_leaves(document)), dict(_leaves(again))
    refused: dict[str, str] = {}
    notes: list[str] = []
    for name, guarantee in proved.items():
        try:
            guarantee.prove(None if stated[name] is None else float(inputs.part(stated, str, name)))
        except (KeyError, TypeError, ValueError) as error:
            refused[name] = f"{name} is not proved: {error}"
    differing = list(refused.values())
    for name in dict.fromkeys([*stated, *now]):
        before, after = (each.get(name, "not there") for each in (stated, now))
        # Types are compared as well, because False equals 0.
        if name in refused or (type(before) is type(after) and before == after):
            continue
        found = f"{name} is {before!r} in the statement, and {after!r}"
        if name.startswith("program."):
            notes.insert(0, f"The statement was made by another program: {found} here.")
        elif _claims_less(name, before, after, is_proved=name in proved):
            notes.append(f"{found} by its files. That claims less, by a rounding.")
        else:
            differing.append(f"{found} by its files.")
    if not differing and list(stated) != list(now):
        differing.append("its keys are in another order.")
    return differing, notes


def _claims_less(name: str, before: object, after: object, *, is_proved: bool) -> bool:
    """Whether a stated number claims less than the recomputed one, by one in its last digit.

    Args:
      name: The name of the value.
      before: The stated number, as printed.
      after: The recomputed number, as printed.
      is_proved: Whether the kernel checks the stated number, so that only its format is checked
        here.
    """
    *parts, last = name.split(".")
    is_computed = last in _DIGITS or "true_positive_percent" in parts or "split" in parts
    if not is_computed or parts[0] == "flags" or not (type(before) is type(after) is str):
        return False
    # The key of a true positive rate contains a point, so the name has one more part.
    digits = 4 if "true_positive_percent" in parts else _DIGITS.get(last, 6)
    is_less_noise = last == "noise_multiplier" or "split" in parts
    rounded = rounded_down if is_less_noise else rounded_up
    try:
        if rounded(float(before), f".{digits}g") != before:
            return False
        found, shift = Decimal(after), Decimal(before) - Decimal(after)
        unit = Decimal(1).scaleb(found.adjusted() - digits + 1)
        return bool(is_proved or 0 < (-shift if is_less_noise else shift) <= unit)
    except (ArithmeticError, ValueError):
        return False


def problems(value: object, rule: object = None, name: str = "the statement") -> Iterator[str]:
    """Yields the differences between a document and the schema.

    Args:
      value: The document, or a part of the document.
      rule: The schema of the part; None for the schema of the document.
      name: The name of the part, for messages.
    """
    own, parts = inputs.part(rule or _schema(), dict), inputs.part(_schema(), dict, "$defs")
    own = parts[own["$ref"].rpartition("/")[2]] if "$ref" in own else own
    kinds = own["type"] if isinstance(own["type"], list) else [own["type"]]
    # Exact types are compared, because bool is a subclass of int.
    if type(value) not in [_TYPES[kind] for kind in kinds]:
        yield f"{name} is not of type {' or '.join(kinds)}"
    elif "enum" in own and value not in own["enum"]:
        yield f"{name} is {value!r}, and must be one of {own['enum']}"
    elif "pattern" in own and isinstance(value, str) and not re.fullmatch(own["pattern"], value):
        yield f"{name} is {value!r}, which does not match {own['pattern']}"
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from problems(each, own["items"], f"{name}[{index}]")
    elif isinstance(value, dict):
        keys = own.get("properties") or dict.fromkeys(value, own.get("additionalProperties"))
        odd = sorted(keys.keys() ^ value.keys())
        if odd:
            yield f"{name} lacks keys, or has unknown ones: {', '.join(odd)}"
        elif list(keys) != list(value):
            yield f"{name} has its keys in another order"
        for key in keys.keys() & value.keys():
            yield from problems(value[key], keys[key], f"{name}.{key}")


@functools.cache
def template(path: pathlib.Path, finalize: Callable[[object], object] = str) -> "jinja2.Template":
    """Returns a jinja2 template for plain text, which raises an error for unknown names.

    Args:
      path: Its file.
      finalize: Converts each value before it is printed.
    """
    # Imported here, because mechanisms do not need templates.
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(path.parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
        finalize=finalize,
    )
    environment.filters["said"] = _said
    return environment.get_template(path.name)


@functools.cache
def _schema() -> object:
    return inputs.parsed_json((_FOLDER / "statement.schema.json").read_text("utf-8"))


def _said(value: object) -> str:
    """A value with the special characters of Markdown escaped."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return _MARKS.sub(r"\\\1", str(value))
