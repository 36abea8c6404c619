"""Docstrings of public names: their examples run, and they say what is given and what comes back.

The examples are those of the mathematics; what needs TensorFlow Federated is run by the documents.
"""

import doctest
import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest

from docs.extensions import reference_pages

_OPTIONS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
# What a reader of the papers looks up first; the reference has them first as well.
_COMPLETE = (
    "accounting",
    "adaptive_clip",
    "audit",
    "checkpoints",
    "factorizations",
    "lower_bounds",
    "participation",
    "planning",
    "privacy",
    "random_streams",
    "sensitivity",
    "workloads",
)
_SECTION = re.compile(r"^(?:Args|Attributes):\n((?:  .*\n?|\n)*)", re.MULTILINE)


def _public() -> Iterator[tuple[str, Any, type | None]]:
    """Names of public functions, classes and methods, what they are, and whose methods."""
    for page in reference_pages.shared_pages():
        if page.module.startswith("mf_aggregators.tff"):
            continue
        for name, kind in page.names.items():
            value = getattr(importlib.import_module(page.module), name)
            if kind in ("class", "exception", "function") and name != "mf_dp_aggregator":
                yield f"{page.module}.{name}", value, None
            if kind == "class":
                for method, found in vars(value).items():
                    function = getattr(found, "__func__", found)
                    if not method.startswith("_") and inspect.isfunction(function):
                        yield f"{page.module}.{name}.{method}", function, value


def _examples() -> list[doctest.DocTest]:
    finder = doctest.DocTestFinder(recurse=False, exclude_empty=True)
    found = [
        finder.find(value, name, globs={})
        for name, value, owner in _public()
        if not (owner is None and inspect.isclass(value) and not value.__doc__)
    ]
    return [test for tests in found for test in tests if test.examples]


@pytest.mark.parametrize("test", _examples(), ids=lambda test: test.name)
def test_examples_print_what_they_show(test: doctest.DocTest) -> None:
    printed: list[str] = []

    outcome = doctest.DocTestRunner(optionflags=_OPTIONS).run(test, out=printed.append)

    assert outcome.failed == 0, "".join(printed)


def _is_overridden(name: str, owner: type | None) -> bool:
    """Whether a base class says what a method takes and returns."""
    method = name.rpartition(".")[2]
    return owner is not None and any(hasattr(base, method) for base in owner.__mro__[1:])


def _gaps(name: str, value: Any) -> Iterator[str]:
    text = inspect.getdoc(value) or ""
    if not text:
        yield f"{name} has no docstring"
        return
    if inspect.isclass(value):
        return
    signature = inspect.signature(value)
    sections = "".join(_SECTION.findall(text))
    said = set(re.findall(r"^  \*{0,2}(\w+):", sections, re.MULTILINE))
    for parameter in signature.parameters:
        if parameter not in ("self", "cls", *said):
            yield f"{name} does not say what {parameter} is"
    returned = signature.return_annotation
    if returned not in (None, "None", "NoReturn") and not re.search(r"\b(Returns|Yields)\b", text):
        yield f"{name} does not say what it returns"


def test_public_functions_say_what_they_take_and_return() -> None:
    found = [
        gap
        for name, value, owner in _public()
        if name.split(".")[1] in _COMPLETE and not _is_overridden(name, owner)
        for gap in _gaps(name, value)
    ]

    assert found == []
