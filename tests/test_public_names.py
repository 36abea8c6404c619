"""What is public of the library, and what else the packages of this repository use of it.

Public is what the table of the reference names. Simulations, tasks, experiments and benchmarks may
also use what stands in the ``__all__`` of packages, and what modules define without an underscore.
"""

import ast
import functools
import json
import pathlib
import re
import subprocess
import sys

import pytest

import mf_aggregators
from docs.extensions import reference_pages

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
    assert len([page for page in pages if page.module != _LIBRARY]) <= 12
    assert len(_public_names()) <= 80
    assert set(mf_aggregators.__all__) == {
        "__version__",
        *pages[0].names,
        *(page.module.rpartition(".")[2] for page in pages[1:]),
    }


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
