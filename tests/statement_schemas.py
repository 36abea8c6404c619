"""The published schema of statements, and a check of data by the part of JSON Schema it uses."""

import functools
import json
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from mf_aggregators.privacy import statement

_FILE = pathlib.Path(statement.__file__).with_name("statement.schema.json")
_TYPES: Mapping[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "null": (type(None),),
}
_KNOWN = frozenset(
    {
        *("$ref", "$defs", "$schema", "title", "description", "type", "properties", "required"),
        *("additionalProperties", "items", "minItems", "anyOf", "enum", "const", "pattern"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    }
)


@functools.cache
def schema() -> dict[str, Any]:
    """Returns the schema as it is published."""
    found: dict[str, Any] = json.loads(_FILE.read_text(encoding="utf-8"))
    return found


def check(data: Any) -> None:
    """Raises AssertionError if data are no statement, nor the file beside one."""
    name = "file" if isinstance(data, dict) and "statement" in data else "statement"
    errors = list(_errors(json.loads(json.dumps(data)), schema()["$defs"][name], name))
    assert not errors, errors


def unknown_keywords(found: Any) -> set[str]:
    """Returns the keywords of a schema that :func:`check` knows nothing of."""
    if not isinstance(found, dict):
        return set()
    parts = [found.get("items"), found.get("additionalProperties"), *found.get("anyOf", [])]
    named = [*found.get("properties", {}).values(), *found.get("$defs", {}).values()]
    return (set(found) - _KNOWN).union(*map(unknown_keywords, [*parts, *named]))


def _errors(data: Any, rule: Mapping[str, Any], name: str) -> Iterator[str]:
    if "$ref" in rule:
        yield from _errors(data, schema()["$defs"][rule["$ref"].rpartition("/")[2]], name)
    if "anyOf" in rule:
        tries = [list(_errors(data, each, name)) for each in rule["anyOf"]]
        if all(tries):
            yield from min(tries, key=len)
    kinds = rule.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    # A truth value is no number.
    is_one = [
        isinstance(data, _TYPES[k]) and isinstance(data, bool) <= (k == "boolean") for k in kinds
    ]
    if kinds and not any(is_one):
        yield f"{name} is {data!r}, no {kinds}"
        return
    if ("enum" in rule and data not in rule["enum"]) or ("const" in rule and data != rule["const"]):
        yield f"{name} is {data!r}"
    if "pattern" in rule and not re.search(rule["pattern"], data):
        yield f"{name} is {data!r}"
    if isinstance(data, dict):
        yield from _errors_of_object(data, rule, name)
    elif isinstance(data, list):
        if len(data) < rule.get("minItems", 0):
            yield f"{name} has {len(data)} items"
        for index, each in enumerate(data):
            yield from _errors(each, rule.get("items", {}), f"{name}[{index}]")
    elif isinstance(data, (int, float)) and not isinstance(data, bool):
        is_within = (
            rule.get("minimum", data) <= data <= rule.get("maximum", data)
            and ("exclusiveMinimum" not in rule or data > rule["exclusiveMinimum"])
            and ("exclusiveMaximum" not in rule or data < rule["exclusiveMaximum"])
        )
        if not is_within:
            yield f"{name} is {data!r}"


def _errors_of_object(data: Mapping[str, Any], rule: Mapping[str, Any], name: str) -> Iterator[str]:
    yield from (f"{name} has no {each}" for each in rule.get("required", []) if each not in data)
    others = rule.get("additionalProperties", True)
    for key, value in data.items():
        of_key = rule.get("properties", {}).get(key, others)
        if of_key is False:
            yield f"{name} has {key}"
        elif isinstance(of_key, dict):
            yield from _errors(value, of_key, f"{name}.{key}")
