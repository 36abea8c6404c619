"""Writes a page for each public module, with every public name: the reference.

A name is public if it stands in the table of ``docs/reference.md``. Pages are written into
``docs/reference/``, and Sphinx fills them from the docstrings.

What the packages of this repository may use of the library is more: every name that stands in the
``__all__`` of its package, or is defined without an underscore in front in a module that stands
there, or in a package without that list or one of its modules (:func:`shared_pages`).
"""

import ast
import dataclasses
import importlib
import inspect
import pathlib
import re
import types
from collections.abc import Iterator, Mapping
from typing import Any

from docs.extensions import generated_pages

PACKAGE = "mf_aggregators"
_DIRECTORY = pathlib.Path(__file__).resolve().parent.parent / "reference"

_TABLE = pathlib.Path(__file__).resolve().parent.parent / "reference.md"
# A row: a subject, a module, and its names.
_ROW = re.compile(r"^\|[^|]*\| \{py:mod\}`([\w.]+)` \| ([^|]*) \|$", re.MULTILINE)

# In the order in which a page has them.
_KINDS = ("function", "class", "exception", "data", "foreign")
_FOREIGN = "What the installed TensorFlow Federated has by this name, or by its new one."
# The longest repr of a constant that a page shows.
_LONGEST_VALUE = 60
# Names of the package itself.
_BY_OTHER_NAMES = {"__init__", "mechanism", "version"}
# Needs Flower, which is in no environment with TensorFlow Federated: a tutorial has its names.
_ELSEWHERE = {"flower"}
_RETURNS = re.compile(r"(Returns|Yields):\s*")
_LITERAL = re.compile(r"(``.*?``|`.*?`)")


@dataclasses.dataclass(frozen=True)
class Page:
    """The public names of a module.

    Attributes:
      module: Its dotted name.
      names: What it has beside modules, and of which kind: ``function``, ``class``, ``exception``
        or ``data``; ``foreign`` for what is another project's.
      modules: The dotted names of its public modules.
      aliases: Other public names of the module.
    """

    module: str
    names: Mapping[str, str]
    modules: tuple[str, ...]
    aliases: tuple[str, ...] = ()


def pages() -> list[Page]:
    """Returns public names, module by module, as in the table of the reference.

    Raises:
      AttributeError: If the table has a name that does not exist.
      ImportError: If it has a module that does not.
    """
    rows = _ROW.findall(_TABLE.read_text(encoding="utf-8"))
    modules = tuple(module for module, _ in rows if module != PACKAGE)
    found = []
    for module, names in rows:
        kinds = {name: _kind(_value(module, name)) for name in re.findall(r"`([\w.]+)`", names)}
        in_order = sorted(kinds.items(), key=lambda item: _KINDS.index(item[1]))
        found.append(Page(module, dict(in_order), modules if module == PACKAGE else ()))
    return found


def shared_pages() -> list[Page]:
    """Returns names that packages of this repository may use, by module, from the package down."""
    aliases: dict[str, set[str]] = {}
    found: dict[str, Page] = {}
    _collect(PACKAGE, found, aliases)
    return [
        dataclasses.replace(page, aliases=tuple(sorted(aliases.get(page.module, ()))))
        for page in found.values()
    ]


def text(page: Page) -> str:
    """Returns the page of a module as reStructuredText."""
    title = f"``{page.module}``"
    lines = [title, "=" * len(title), "", f".. automodule:: {page.module}", ""]
    if page.aliases:
        names = ", ".join(f"``{alias}``" for alias in page.aliases)
        lines += [f"It has another name, for older programs: {names}.", ""]
    own = [name for name, kind in page.names.items() if kind not in ("data", "foreign")]
    if own:
        lines += [f".. currentmodule:: {page.module}", "", ".. autosummary::", "   :nosignatures:"]
        lines += ["", *(f"   ~{page.module}.{name}" for name in own), ""]
    if page.modules:
        lines += [".. rubric:: Modules", ""]
        lines += [f"* :py:mod:`{module}`: {_purpose(module)}" for module in page.modules]
        lines += ["", ".. toctree::", "   :hidden:", ""]
        lines += [f"   {module.rpartition('.')[2]} <{module}>" for module in page.modules]
        lines += [""]
    for name, kind in page.names.items():
        if kind in ("data", "foreign"):
            lines += _data(page.module, name, kind)
            continue
        lines += [f".. auto{kind}:: {page.module}.{name}"]
        if kind in ("class", "exception"):
            lines += ["   :members:", "   :show-inheritance:"]
        lines += [""]
    return "\n".join(lines)


def write(directory: pathlib.Path = _DIRECTORY) -> None:
    """Writes all pages, and removes those of modules that are not public any more.

    Args:
      directory: Where to; made if it is not there.
    """
    generated_pages.write(directory, {f"{page.module}.rst": text(page) for page in pages()}, ".rst")


def _purpose(module: str) -> str:
    """The first line of a module's docstring."""
    return (importlib.import_module(module).__doc__ or "").partition("\n")[0]


def _value(module: str, name: str) -> Any:
    """The object of a module by its name, or by that of a module below it and a name there."""
    below, _, own = name.rpartition(".")
    return getattr(importlib.import_module(f"{module}.{below}" if below else module), own)


def _collect(name: str, found: dict[str, Page], aliases: dict[str, set[str]]) -> None:
    module = importlib.import_module(name)
    names: dict[str, str] = {}
    modules: list[str] = []
    for each in _shared(module):
        value = getattr(module, each)
        if isinstance(value, types.ModuleType) and not value.__name__.startswith(PACKAGE):
            names[each] = "foreign"
        elif not isinstance(value, types.ModuleType):
            names[each] = _kind(value)
        elif value.__name__ == f"{name}.{each}":
            modules.append(value.__name__)
        else:
            aliases.setdefault(value.__name__, set()).add(f"{name}.{each}")
    in_order = sorted(names.items(), key=lambda item: _KINDS.index(item[1]))
    found[name] = Page(name, dict(in_order), tuple(modules))
    for each in modules:
        _collect(each, found, aliases)


def _shared(module: types.ModuleType) -> Iterator[str]:
    if hasattr(module, "__path__"):
        below = pathlib.Path(module.__path__[0])
        modules = (
            path.stem
            for path in below.iterdir()
            if (path / "__init__.py").exists() or path.suffix == ".py"
        )
        listed = getattr(module, "__all__", None)
        has_all = listed is None or module.__name__ == PACKAGE
        names = {*(listed or ()), *(modules if has_all else ())}
        for name in sorted(names - _BY_OTHER_NAMES - _ELSEWHERE):
            if not hasattr(module, name):
                importlib.import_module(f"{module.__name__}.{name}")
            yield name
        if listed is not None:
            return
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined = [node.name]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            every = [each for target in targets for each in ast.walk(target)]
            defined = [each.id for each in every if isinstance(each, ast.Name)]
        elif isinstance(node, ast.ImportFrom):
            # Another module's name, which this one has as well.
            defined = [alias.name for alias in node.names if alias.asname == alias.name]
        else:
            continue
        yield from (name for name in defined if not name.startswith("_"))


def _data(module: str, name: str, kind: str) -> list[str]:
    """The entry of a constant: its value, and the comment that stands above it."""
    value = repr(getattr(importlib.import_module(module), name))
    shown = [f"   :value: {value}"] if kind == "data" and len(value) <= _LONGEST_VALUE else []
    meaning = _FOREIGN if kind == "foreign" else _comment(module, name)
    return [f".. py:data:: {name}", f"   :module: {module}", *shown, "", f"   {meaning}", ""]


def _comment(module: str, name: str) -> str:
    """The comment above the assignment of a name, in the module that it is imported from."""
    tree = ast.parse(inspect.getsource(importlib.import_module(module)))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and name in [alias.name for alias in node.names]:
            return _comment(str(node.module), name)
    lines = inspect.getsource(importlib.import_module(module)).splitlines()
    found: list[str] = []
    for line in lines[: _line_of(tree, name) - 1][::-1]:
        if not line.startswith("#"):
            break
        found.insert(0, line.lstrip("# "))
    return plain([" ".join(found)])[0]


def _line_of(tree: ast.Module, name: str) -> int:
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(each, ast.Name) and each.id == name for each in targets):
                return node.lineno
    return 1


def _kind(value: Any) -> str:
    if not (getattr(value, "__module__", None) or PACKAGE).startswith((PACKAGE, "typing")):
        return "foreign" if callable(value) else "data"
    if isinstance(value, type):
        return "exception" if issubclass(value, BaseException) else "class"
    return "function" if inspect.isroutine(value) else "data"


def plain(lines: list[str]) -> list[str]:
    """Returns a docstring in which neither a bar nor a colon of a result means mark-up.

    Args:
      lines: The docstring.
    """
    found = []
    in_result = begins = False
    for line in lines:
        parts = _LITERAL.split(line)
        line = "".join(
            part if place % 2 else part.replace("|", r"\|") for place, part in enumerate(parts)
        )
        match = _RETURNS.fullmatch(line)
        if match:
            in_result = begins = True
            found.append(f":{match[1].lower()}:")
            continue
        if in_result and line.strip() and not line.startswith(" "):
            in_result = False
        if begins and line.strip():
            found[-1] += f" {line.strip()}"
            begins = False
        else:
            found.append(line)
    return found


def _prepare(app: Any, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    lines[:] = plain(lines)
    if what in ("attribute", "property"):
        # Napoleon takes a first line with a colon for a type; an empty comment has none.
        lines[:0] = ["..", ""]


def _without_link(app: Any, environment: Any, node: Any, content: Any) -> Any:
    """Leaves names that annotations mention and that are not public as they are, if they exist."""
    target = str(node.get("reftarget", ""))
    if not target.startswith(f"{PACKAGE}."):
        return None
    module, _, name = target.rpartition(".")
    try:
        return content if hasattr(importlib.import_module(module), name) else None
    except ImportError:
        return None


def setup(app: Any) -> dict[str, bool]:
    """Writes the pages before Sphinx looks for sources."""
    app.connect("builder-inited", lambda app: write())
    # Before Napoleon reads the sections of docstrings.
    app.connect("autodoc-process-docstring", _prepare, priority=400)
    app.connect("missing-reference", _without_link)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
