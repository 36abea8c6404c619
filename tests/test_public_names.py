"""What is public of the library, and what else the packages of this repository use of it.

Public is what the table of the reference names. Simulations, tasks, experiments and benchmarks may
also use what stands in the ``__all__`` of packages, and what modules define without an underscore.
"""

import ast
import collections
import doctest
import functools
import importlib
import inspect
import json
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import mf_aggregators
from docs.extensions import reference_pages
from mf_aggregators.tff import processes

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_LIBRARY = "mf_aggregators"
_OUTSIDE = ("benchmarks", "docs", "reproduction", "simulations", "stackoverflow_nwp", "tools")
# As they are imported, used, or told to importlib.import_module or python -m; not in prose.
_DOTTED = re.compile(rf"(?<![\w.`])(?:{_LIBRARY}|mfa)((?:\.\w+)+)\b(?!-)")


@functools.cache
def _modules() -> dict[str, reference_pages.Page]:
    """The page of each public module, by all names that the module has."""
    pages = reference_pages.shared_pages()
    return {name: page for page in pages for name in (page.module, *page.aliases)}


def _is_public(dotted: str) -> bool:
    """Whether every step of a dotted name is; attributes of objects are their classes' matter."""
    module = _LIBRARY
    for name in dotted.split(".")[1:]:
        if module not in _modules():
            return True
        page = _modules()[module]
        is_module = f"{page.module}.{name}" in _modules()
        if name not in page.names and not is_module:
            return False
        module = f"{page.module}.{name}"
    return True


def _imported(source: str, package: str = _LIBRARY) -> list[tuple[str, str]]:
    """Modules of a package and the names that a source imports from them."""
    return [
        (str(node.module), alias.name)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == package
        for alias in node.names
    ]


def _used(source: str) -> list[str]:
    """The names below the library that a source uses."""
    return [
        *(f"{_LIBRARY}{below}" for below in _DOTTED.findall(source)),
        *(f"{module}.{name}" for module, name in _imported(source)),
    ]


def _faults(source: str) -> list[str]:
    """The names below the library that a source uses and that are not shared."""
    # A function may have the name of the module that it comes from.
    unknown = [module for module, _ in _imported(source) if module not in _modules()]
    return unknown or [name for name in _used(source) if not _is_public(name)]


@pytest.mark.parametrize("folder", _OUTSIDE)
def test_only_public_names_are_used_outside(folder: str) -> None:
    paths = sorted((_ROOT / folder).rglob("*.py"))
    assert paths
    found = {path: _faults(path.read_text(encoding="utf-8")) for path in paths}
    assert {path: faults for path, faults in found.items() if faults} == {}


# A row of the second table of the reference: a subject, a file and its names.
_ROW_OF_FILE = re.compile(r"^\|[^|]*\| \[`([\w/]+)\.py`\]\(\.\./\1\.py\) \| ([^|]*) \|$", re.M)


def _names_of_files() -> set[str]:
    """The names that documents use beside public ones: they move with this repository."""
    found = set()
    for file, names in _ROW_OF_FILE.findall((_ROOT / "docs/reference.md").read_text("utf-8")):
        source = (_ROOT / f"{file}.py").read_text(encoding="utf-8")
        named = re.findall(r"`(\w+)`", names)
        assert all(re.search(rf"\b{each}\b", source) for each in named), file
        found |= {f"{file.replace('/', '.')}.{name}" for name in named}
    return found


def _public_names() -> set[str]:
    return {f"{page.module}.{name}" for page in reference_pages.pages() for name in page.names}


def test_the_public_surface_fits_one_page() -> None:
    pages = reference_pages.pages()
    assert len([page for page in pages if page.module != _LIBRARY]) <= 14
    assert len(_public_names()) <= 90
    assert set(mf_aggregators.__all__) == {
        "__version__",
        *pages[0].names,
        *(page.module.rpartition(".")[2] for page in pages[1:]),
    } - {"figures", "flower"}  # They need extras.


@pytest.mark.parametrize("page", reference_pages.pages(), ids=lambda page: page.module)
def test_names_say_when_to_use_them_and_show_it(page: reference_pages.Page) -> None:
    """In docstrings; the examples are run below, those of Flower with its other tests."""
    for name in page.names:
        text = inspect.getdoc(reference_pages.value_of(page.module, name)) or ""
        assert "Use it when" in text, name
        assert ">>> " in text, name


_DOCUMENTS = sorted([*(_ROOT / "docs").glob("*.md"), *(_ROOT / "docs" / "tutorials").glob("*.md")])


@pytest.mark.parametrize("path", [_ROOT / "README.md", *_DOCUMENTS])
def test_documents_use_public_names(path: pathlib.Path) -> None:
    """Its Python uses public names, their attributes, and the modules that have them."""
    public = _public_names() | _names_of_files()
    text = path.read_text(encoding="utf-8")
    for block in re.findall(r"^```(?:python|\{code-cell\}.*)\n(.*?)^```", text, re.M | re.S):
        imported = (f"{module}.{name}" for module, name in _imported(block, "simulations"))
        for dotted in (*_used(block), *imported):
            parts = dotted.split(".")
            prefixes = {".".join(parts[:length]) for length in range(1, len(parts) + 1)}
            is_module = any(name.startswith(f"{dotted}.") for name in public)
            assert is_module or prefixes & public, dotted


_PROGRAM = """
import json, sys
import mf_aggregators
print(json.dumps(list(sys.modules)))
"""


def test_public_modules_make_the_import_no_heavier() -> None:
    """What the package lists is imported with it, but for what few need at once."""
    finished = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True
    )
    brought = json.loads(finished.stdout)
    late = {each for each in _modules()[_LIBRARY].modules if each not in brought}
    assert late == {
        "mf_aggregators.audit",
        "mf_aggregators.commands",
        "mf_aggregators.figures",
        "mf_aggregators.planning",
    }
    assert not {"absl", "matplotlib", "tensorflow", "tensorflow_federated"} & set(brought)


# Docstrings of public names:.


_OPTIONS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
# Others say what they take in a sentence, where names do not.
_BRIEF = {"commands", "kernel", "linear_algebra"}
_BRIEF |= {"atomic_files", "inputs", "memory", "noise", "observed"}
_SECTION = re.compile(r"^(?:Args|Attributes):\n((?:  .*\n?|\n)*)", re.MULTILINE)


def _public() -> Iterator[tuple[str, Any, type | None]]:
    """Names of public functions, classes and methods, what they are, and whose methods."""
    for page in reference_pages.shared_pages():
        for name, kind in page.names.items():
            value = getattr(importlib.import_module(page.module), name)
            if kind in ("class", "exception", "function"):
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
    if test.name.endswith(("states_in", "participations_in")):
        # Output that is captured by a doctest is no file, as the worker's has to be.
        processes.start_worker()

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
        if name.split(".")[1] not in _BRIEF and not _is_overridden(name, owner)
        for gap in _gaps(name, value)
    ]

    assert found == []


# Epsilons that are printed come from guarantees of the kernel: other computations are listed.


_FOLDERS = ("mf_aggregators", "simulations", "stackoverflow_nwp")
# Functions that return an epsilon or a rho of a bare noise multiplier.
_NAMES = {
    *("amplified", "amplified_epsilon", "epsilon"),
    *("exact_deltas", "exact_epsilon", "zcdp_rho"),
}
# Checks of a number, which compute none.
_CHECKS = {"numbers"}
# Files of searches and audits, and how many such calls each has.
_LISTED = {
    # Public functions of sampling schemes, and searches for noise, whose result the kernel proves.
    # Pairs of shuffled runs bound attackers alone.
    "mf_aggregators/accounting.py": 5,
    "mf_aggregators/participation/__init__.py": 3,
    "mf_aggregators/participation/certificate_search.py": 1,
    "mf_aggregators/planning/planner.py": 1,
    "mf_aggregators/mechanism.py": 1,
    # A lower bound that an audit found.
    "mf_aggregators/audit/statistics.py": 1,
}


def _calls(path: pathlib.Path) -> int:
    """How often a file calls a function that computes an epsilon, by its name."""
    found = 0
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        if isinstance(function, ast.Name):
            found += function.id in _NAMES
        elif isinstance(function, ast.Attribute) and function.attr in _NAMES:
            base = function.value
            found += not (isinstance(base, ast.Name) and base.id in _CHECKS)
    return found


def test_no_other_file_computes_an_epsilon() -> None:
    found = collections.Counter(
        {
            path.relative_to(_ROOT).as_posix(): _calls(path)
            for folder in _FOLDERS
            for path in (_ROOT / folder).rglob("*.py")
            if not path.is_relative_to(_ROOT / "mf_aggregators" / "kernel")
        }
    )
    assert dict(+found) == _LISTED, (
        "Show an epsilon of a kernel's guarantee (guarantees.of_noise has that of a noise "
        "multiplier), or list the file here with the reason."
    )


def test_calls_are_found(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "one.py"
    path.write_text("a = x.epsilon(1)\nb = epsilon(2)\nnumbers.epsilon(3)\nd.epsilon\n")
    assert _calls(path) == 2
