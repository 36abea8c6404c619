"""What simulations, tasks, experiments and benchmarks use of the library is public.

A name of ``mf_aggregators`` is public if every step of the way to it is. In a package it has to
stand in ``__all__``; in a module, it has to be defined there without an underscore in front.
A module that stands in ``mf_aggregators.__all__`` is one that ``import mf_aggregators`` brings
anyhow; only packages may be imported when they are first used.

Sources are read and not run: most of the package ``tff`` cannot be imported without TensorFlow.
"""

import ast
import functools
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_LIBRARY = "mf_aggregators"
# What build tools write, as ruff leaves it out.
_NOT_OURS = ("build", "dist")
# What importlib.import_module or python -m is told.
_DOTTED = re.compile(rf"{_LIBRARY}(\.\w+)+")
_PACKAGES = sorted(
    ".".join(path.parent.relative_to(_ROOT).parts)
    for path in (_ROOT / _LIBRARY).rglob("__init__.py")
)


def _outside() -> list[pathlib.Path]:
    """All sources outside of the library and of the tests, which may look inside."""
    folders = [
        path
        for path in _ROOT.iterdir()
        if path.is_dir()
        and not path.name.startswith(".")
        and path.name not in (_LIBRARY, "tests", *_NOT_OURS)
    ]
    found = [path for folder in folders for path in folder.rglob("*.py")]
    return sorted([*_ROOT.glob("*.py"), *found])


def _source(module: str) -> pathlib.Path | None:
    """The file of a module or a package; None if there is none of this name."""
    path = _ROOT.joinpath(*module.split("."))
    for each in (path / "__init__.py", path.with_suffix(".py")):
        if each.is_file():
            return each
    return None


def _is_package(module: str) -> bool:
    path = _source(module)
    return path is not None and path.name == "__init__.py"


@functools.cache
def _tree(module: str) -> ast.Module:
    path = _source(module)
    assert path is not None
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def _defined(module: str) -> frozenset[str]:
    """The names that a module itself defines, and does not import."""
    found: set[str] = set()
    for node in _tree(module).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            every = [each for target in targets for each in ast.walk(target)]
            found |= {each.id for each in every if isinstance(each, ast.Name)}
    return frozenset(found)


@functools.cache
def _imported(module: str) -> dict[str, str]:
    """By the names that a module imports from modules, the dotted names of what they are."""
    return {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(_tree(module))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


@functools.cache
def _listed(package: str) -> tuple[str, ...] | None:
    """The ``__all__`` of a package; None if it has none."""
    for node in _tree(package).body:
        if isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            target, value = node.target, node.value
        else:
            continue
        if isinstance(target, ast.Name) and target.id == "__all__":
            return tuple(ast.literal_eval(value))
    return None


def _submodule(module: str, name: str) -> str | None:
    """The module that a name of a module means; None if it means something else."""
    if not _is_package(module) or name in _defined(module):
        return None
    dotted = _imported(module).get(name, f"{module}.{name}")
    return dotted if _source(dotted) is not None else None


def _is_public(module: str, name: str) -> bool:
    if _is_package(module):
        return name in (_listed(module) or ())
    return name in _defined(module) and not name.startswith("_")


def public_names_of_sources(module: str = _LIBRARY) -> list[str]:
    """Returns the dotted names of all that is public in a module, and of the module itself.

    Older names of modules are left out.
    """
    found = [module]
    for name in _listed(module) or ():
        submodule = _submodule(module, name)
        if submodule is None:
            found.append(f"{module}.{name}")
        elif submodule == f"{module}.{name}":
            found += public_names_of_sources(submodule)
    if not _is_package(module):
        found += [f"{module}.{name}" for name in _defined(module) if _is_public(module, name)]
    return found


class _Reader:
    """Reads a source, and collects what in it uses a name that is not public."""

    def __init__(self, source: str, where: str) -> None:
        self.faults: list[str] = []
        self._where = where
        self._modules: dict[str, str | None] = {}
        tree = ast.parse(source)
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                self._read_import(node)
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                self._read_import_from(node)
            elif isinstance(node, ast.Constant) and _DOTTED.fullmatch(str(node.value)):
                self._reach(str(node.value), node.lineno)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                self._check(self._module_of(node.value), node.attr, node.lineno)

    def _read_import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name.partition(".")[0] == _LIBRARY:
                module = self._reach(alias.name, node.lineno)
                self._modules[alias.asname or _LIBRARY] = module if alias.asname else _LIBRARY

    def _read_import_from(self, node: ast.ImportFrom) -> None:
        assert node.module is not None
        if node.module.partition(".")[0] != _LIBRARY:
            return
        module = self._reach(node.module, node.lineno)
        for alias in node.names:
            self._check(module, alias.name, node.lineno)
            if module is not None:
                name = alias.asname or alias.name
                self._modules[name] = _submodule(module, alias.name)

    def _reach(self, dotted: str, line: int) -> str | None:
        """The module of a dotted name, each step of which has to be public."""
        module: str | None = _LIBRARY
        for name in dotted.split(".")[1:]:
            assert module is not None
            self._check(module, name, line)
            found = _submodule(module, name)
            if found is None and _is_public(module, name):
                # A function may have the name of the module that it comes from.
                self._add(line, f"{module}.{name} is public as an object and not as a module")
            module = found
            if module is None:
                break
        return module

    def _module_of(self, node: ast.expr) -> str | None:
        """The module of the library that an expression is; None if it is none."""
        if isinstance(node, ast.Name):
            return self._modules.get(node.id)
        if isinstance(node, ast.Attribute):
            module = self._module_of(node.value)
            return None if module is None else _submodule(module, node.attr)
        return None

    def _check(self, module: str | None, name: str, line: int) -> None:
        if module is not None and not _is_public(module, name):
            self._add(line, f"{module}.{name} is not public")

    def _add(self, line: int, words: str) -> None:
        fault = f"{self._where}:{line}: {words}"
        if fault not in self.faults:
            self.faults.append(fault)


def _faults() -> Iterator[str]:
    for path in _outside():
        where = path.relative_to(_ROOT).as_posix()
        yield from _Reader(path.read_text(encoding="utf-8"), where).faults


def test_only_public_names_are_used_outside() -> None:
    found = list(_faults())
    assert found == [], "\n".join(["", *found])


def test_all_sources_outside_are_read() -> None:
    folders = {path.relative_to(_ROOT).parts[0] for path in _outside()}
    assert folders >= {
        "benchmarks",
        "quickstart.py",
        "reproduction",
        "setup.py",
        "simulations",
        "stackoverflow_nwp",
        "tools",
    }
    assert folders & {_LIBRARY, "tests"} == set()


@pytest.mark.parametrize(
    "source",
    [
        "import mf_aggregators as mfa\nmfa.accounting.epsilon(1.0, 1e-6)",
        "import mf_aggregators\nmf_aggregators.mf_dp_aggregator",
        "import mf_aggregators as mfa\nmfa.privacy_statement.RunFacts.to_dict",
        "from mf_aggregators import __version__, figures, validation\nfigures.lines",
        "from mf_aggregators.factorizations import Factorization, toeplitz\ntoeplitz._anything",
        "from mf_aggregators.noise.recursions import NoiseRecursion",
        "from mf_aggregators.tff import processes\nprocesses.end_workers()",
        "import mf_aggregators.tff.processes as p\np.end_workers()",
        "from numpy import _core",
    ],
)
def test_public_names_are_let_pass(source: str) -> None:
    assert _Reader(source, "a.py").faults == []


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        (
            "import mf_aggregators.linear_algebra.nuclear_norm",
            "mf_aggregators.linear_algebra.nuclear_norm is not public",
        ),
        ("from mf_aggregators import *", "mf_aggregators.* is not public"),
        ("from mf_aggregators import version", "mf_aggregators.version is not public"),
        (
            "from mf_aggregators.accounting.gaussian import epsilon",
            "mf_aggregators.accounting.gaussian is not public",
        ),
        (
            "from mf_aggregators.tff.tensor_rows_of_z import chacha20",
            "mf_aggregators.tff.tensor_rows_of_z is not public",
        ),
        (
            "from mf_aggregators.factorizations.toeplitz import toeplitz",
            "mf_aggregators.factorizations.toeplitz is public as an object and not as a module",
        ),
        ("from mf_aggregators.validation import np", "mf_aggregators.validation.np is not public"),
        (
            "from mf_aggregators.noise.costs import _bytes",
            "mf_aggregators.noise.costs._bytes is not public",
        ),
        (
            "import mf_aggregators as mfa; mfa.accounting.gaussian.epsilon(1.0, 1e-6)",
            "mf_aggregators.accounting.gaussian is not public",
        ),
        (
            "from mf_aggregators import accounting as a; print(a.noise_failure)",
            "mf_aggregators.accounting.noise_failure is not public",
        ),
        (
            "import mf_aggregators as mfa; mfa.privacy_statement._bits",
            "mf_aggregators.privacy.statement._bits is not public",
        ),
        (
            "importlib.import_module('mf_aggregators.tff.aggregator')",
            "mf_aggregators.tff.aggregator is not public",
        ),
        ("def f():\n    import mf_aggregators.nothing", "mf_aggregators.nothing is not public"),
    ],
)
def test_other_names_are_found_with_their_lines(source: str, fault: str) -> None:
    line = 1 + source.count("\n")
    assert f"a.py:{line}: {fault}" in _Reader(source, "a.py").faults


@pytest.mark.parametrize("package", _PACKAGES)
def test_a_package_has_what_it_lists(package: str) -> None:
    listed = _listed(package)
    assert listed is not None, f"{package} has no __all__"
    missing = [
        name
        for name in listed
        if name not in _defined(package)
        and name not in _imported(package)
        and _source(f"{package}.{name}") is None
    ]
    assert missing == []


_PROGRAM = """
import json, sys
import mf_aggregators as mfa
brought = list(sys.modules)
found = [name for name in mfa.__all__ if name != "mf_dp_aggregator" and hasattr(mfa, name)]
print(json.dumps([brought, found]))
"""


def test_public_modules_make_the_import_no_heavier() -> None:
    finished = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True
    )
    brought, found = ast.literal_eval(finished.stdout)
    listed = _listed(_LIBRARY)
    assert listed is not None
    # What is imported when it is used is there all the same.
    assert found == [name for name in listed if name != "mf_dp_aggregator"]
    modules = {each for name in listed if (each := _submodule(_LIBRARY, name)) is not None}
    late = {each for each in modules if each not in brought}
    assert late == {"mf_aggregators.commands", "mf_aggregators.figures"}
    assert all(_is_package(each) for each in late)
    heavy = ("absl", "matplotlib", "tensorflow", "tensorflow_federated")
    assert [name for name in heavy if name in brought] == []
