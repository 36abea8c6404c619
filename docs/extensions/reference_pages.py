"""Writes a page for each public module, and one for each of its classes: the reference.

A name is public if it stands in the table of ``docs/reference.md``. Pages are written into
``docs/reference/``, and Sphinx fills them from the docstrings. Signatures show defaults as a user
types them, and their types lead to the documentation of the packages that have them.

Other packages of this repository may use more of the library (:func:`shared_pages`): every name in
the ``__all__`` of a package; every name without a leading underscore in a module that ``__all__``
lists; and, for packages without ``__all__``, every such name in them and their modules.
"""

import ast
import contextlib
import dataclasses
import enum
import importlib
import importlib.util
import inspect
import pathlib
import re
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any, get_args, get_type_hints
from unittest import mock

from docs.extensions import generated_pages

PACKAGE = "mf_aggregators"
_DIRECTORY = pathlib.Path(__file__).resolve().parent.parent / "reference"

_TABLE = pathlib.Path(__file__).resolve().parent.parent / "reference.md"
# Matches a row of the table in reference.md: a subject, a module, and its names.
_ROW = re.compile(r"^\|[^|]*\| \{py:mod\}`([\w.]+)` \| ([^|]*) \|$", re.MULTILINE)

# The name of the page of classes that signatures name and that are not public.
_TYPES = "types"
# Kinds of names, in the order of their sections on a page.
_KINDS = ("function", "class", "exception", "data", "foreign")
_FOREIGN = "What the installed TensorFlow Federated has by this name, or by its new one."
# The most characters of a constant's value that a page shows.
_LONGEST_VALUE = 60
# Modules with names that are public in the package mf_aggregators itself.
_BY_OTHER_NAMES = {"__init__", "mechanism", "version"}
# Modules that need Flower, which cannot be installed together with TensorFlow Federated.
_ELSEWHERE = {"flower"}
_MODULES_OF_FLOWER = ("flwr", "flwr.app", "flwr.serverapp", "flwr.serverapp.strategy")
# Addresses of other projects' documentation of a name, by patterns of its module; {0} is the
# module, {1} the name.
_PYTHON = "https://docs.python.org/3/library/"
_OTHER_PROJECTS = {
    r"collections\.abc": _PYTHON + "collections.abc.html#collections.abc.{1}",
    r"typing": _PYTHON + "typing.html#typing.{1}",
    r"(os|pathlib|enum|abc|dataclasses)": _PYTHON + "{0}.html#{0}.{1}",
    r"numpy.*": "https://numpy.org/doc/stable/reference/generated/{0}.{1}.html",
    r"dp_accounting.*": "https://github.com/google/differential-privacy/tree/main/python/"
    "dp_accounting",
    r"matplotlib\.figure": "https://matplotlib.org/stable/api/figure_api.html#{0}.{1}",
    r"matplotlib\.axes.*": "https://matplotlib.org/stable/api/_as_gen/matplotlib.axes.{1}.html",
    r"(tensorflow_federated|tff).*": "https://github.com/google-parfait/tensorflow-federated",
    r"flwr.*": "https://flower.ai/docs/framework/ref-api/flwr.html",
}
# The page of Python's documentation about each built-in name.
_BUILT_IN = {
    **dict.fromkeys(("bool", "bytes", "dict", "float", "int", "list", "str", "tuple"), "stdtypes"),
    **dict.fromkeys(("type", "object"), "functions"),
    "None": "constants",
    "range": "stdtypes",
}
_RETURNS = re.compile(r"(Returns|Yields):\s*")
_USE = re.compile(r"^Use it when\b")
# Matches the type of a NumPy array with its type arguments.
_ARRAY = re.compile(
    r"(~?numpy\.ndarray)\[~?typing\.Any, ~?numpy\.dtype\[~?numpy\.\w+(?:\[~?typing\.Any\])?\]\]"
)
_LITERAL = re.compile(r"(``.*?``|`.*?`)")


@dataclasses.dataclass(frozen=True)
class Page:
    """Page of one module: its public names.

    Attributes:
      module: The module's dotted name.
      names: The module's public names, each with its kind: ``function``, ``class``, ``exception``
        or ``data``; ``foreign`` for names of another project.
      modules: The dotted names of its public modules.
      aliases: Other public names of the module.
    """

    module: str
    names: Mapping[str, str]
    modules: tuple[str, ...]
    aliases: tuple[str, ...] = ()


def pages() -> list[Page]:
    """Returns the public names of each module in the table of docs/reference.md.

    Raises:
      AttributeError: If the table has a name that does not exist.
      ImportError: If the table has a module that does not exist.
    """
    rows = _ROW.findall(_TABLE.read_text(encoding="utf-8"))
    modules = tuple(module for module, _ in rows if module != PACKAGE)
    found = []
    for module, names in rows:
        kinds = {name: _kind(value_of(module, name)) for name in re.findall(r"`([\w.]+)`", names)}
        in_order = sorted(kinds.items(), key=lambda item: _KINDS.index(item[1]))
        found.append(Page(module, dict(in_order), modules if module == PACKAGE else ()))
    return found


def shared_pages() -> list[Page]:
    """Returns, by module, the names that other packages of this repository may use."""
    aliases: dict[str, set[str]] = {}
    found: dict[str, Page] = {}
    _collect(PACKAGE, found, aliases)
    return [
        dataclasses.replace(page, aliases=tuple(sorted(aliases.get(page.module, ()))))
        for page in found.values()
    ]


def texts(page: Page) -> dict[str, str]:
    """Returns the reStructuredText pages of a module and its classes, by dotted name."""
    found = {page.module: text(page)}
    for dotted in _pages_of_classes(page):
        title = f"``{dotted.removeprefix(f'{page.module}.')}``"
        lines = [title, "=" * len(title), "", f".. autoclass:: {dotted}"]
        found[dotted] = "\n".join([*lines, "   :members:", "   :show-inheritance:", ""])
    return found


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
        lines += [""]
    for name, kind in page.names.items():
        if kind in ("data", "foreign"):
            lines += _data(page.module, name, kind)
        elif kind != "class":
            lines += [f".. auto{kind}:: {page.module}.{name}"]
            lines += ["   :show-inheritance:", ""] if kind == "exception" else [""]
    below = [*_pages_of_classes(page), *page.modules, *([_TYPES] if page.modules else [])]
    if below:
        lines += [".. toctree::", "   :hidden:", ""]
        lines += [f"   {dotted.rpartition('.')[2]} <{dotted}>" for dotted in below]
        lines += [""]
    return "\n".join(lines)


def _pages_of_classes(page: Page) -> list[str]:
    """Returns the dotted names of a module's public classes, each of which has a page."""
    return [f"{page.module}.{name}" for name, kind in page.names.items() if kind == "class"]


def named_types(found: list[Page]) -> list[type]:
    """Returns the classes of this library that are not public but named in public signatures.

    Args:
      found: The pages of public names.
    """
    public = [value_of(page.module, name) for page in found for name in page.names]
    named: set[type] = set()
    for value in public:
        members = vars(value).values() if isinstance(value, type) else ()
        for each in (value, *members):
            each = getattr(each, "fget", None) or getattr(each, "__func__", each)
            if inspect.isfunction(each) or isinstance(each, type):
                for annotation in get_type_hints(each).values():
                    named.update(_classes_in(annotation))
    own = [each for each in named - set(public) if each.__module__.startswith(PACKAGE)]
    return sorted(own, key=lambda each: (each.__name__.lstrip("_"), each.__module__))


def _classes_in(annotation: Any) -> Iterator[type]:
    parts = get_args(annotation)
    if isinstance(annotation, type) and not parts:
        yield annotation
    for each in parts:
        for one in each if isinstance(each, list) else [each]:
            yield from _classes_in(one)


def _page_of_types(found: list[Page]) -> str:
    title = "Types that signatures name"
    lines = [title, "=" * len(title), "", "Functions return them. Your program needs no import"]
    lines += ["of them, and their modules may move.", ""]
    for each in named_types(found):
        lines += [f".. autoclass:: {each.__module__}.{each.__name__}", "   :members:", ""]
    return "\n".join(lines)


def write(directory: pathlib.Path = _DIRECTORY) -> None:
    """Writes all pages of the reference, and removes pages of names not public any more.

    Args:
      directory: Where pages go; created if it is missing.
    """
    every = pages()
    found = {dotted: each for page in every for dotted, each in texts(page).items()}
    found[_TYPES] = _page_of_types(every)
    files = {f"{dotted}.rst": each for dotted, each in found.items()}
    generated_pages.write(directory, files, ".rst")


def _purpose(module: str) -> str:
    """Returns the first line of a module's docstring."""
    return (_imported(module).__doc__ or "").partition("\n")[0]


def value_of(module: str, name: str) -> Any:
    """Returns the object that a name in a module stands for.

    Args:
      module: The dotted name of the module.
      name: A name in the module, or a dotted name of a module below and a name in that.

    Raises:
      AttributeError: If the module has no such name.
    """
    below, _, own = name.rpartition(".")
    return getattr(_imported(f"{module}.{below}" if below else module), own)


def _imported(module: str) -> types.ModuleType:
    with _stand_ins() if module.rpartition(".")[2] in _ELSEWHERE else contextlib.nullcontext():
        return importlib.import_module(module)


class _StandIn(types.ModuleType):
    """Stand-in for a module of Flower: it has a class with any name that is asked for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        vars(self)[name] = type(name, (), {"__module__": self.__name__})
        return vars(self)[name]


def _stand_ins() -> Any:
    """Returns a context in which modules that need Flower can be imported without it."""
    if "flwr" in sys.modules or importlib.util.find_spec("flwr") is not None:
        return contextlib.nullcontext()
    made = {name: _StandIn(name) for name in _MODULES_OF_FLOWER}
    for each in made.values():
        each.__path__ = []
    return mock.patch.dict(sys.modules, made)


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
            # "import name as name" re-exports another module's name.
            defined = [alias.name for alias in node.names if alias.asname == alias.name]
        else:
            continue
        yield from (name for name in defined if not name.startswith("_"))


def _data(module: str, name: str, kind: str) -> list[str]:
    """Returns the reference's entry of a constant, with its value and the comment above it."""
    value = repr(getattr(importlib.import_module(module), name))
    shown = [f"   :value: {value}"] if kind == "data" and len(value) <= _LONGEST_VALUE else []
    meaning = _FOREIGN if kind == "foreign" else _comment(module, name)
    return [f".. py:data:: {name}", f"   :module: {module}", *shown, "", f"   {meaning}", ""]


def _comment(module: str, name: str) -> str:
    """Returns the comment above the assignment of a name, in the module that defines it."""
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
    """Returns a docstring with bars and results' colons escaped, so that they are not mark-up.

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
    lines[:] = [_USE.sub(r"**\g<0>**", line) for line in plain(lines)]
    if what in ("attribute", "property"):
        # Napoleon would take a first line with a colon for a type: put an empty comment before it.
        lines[:0] = ["..", ""]


class _AsTyped:
    """Default of a parameter with a repr that is the text a user types."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def typed(default: Any) -> Any:
    """Returns a parameter's default, or an object with the repr that a user would type for it.

    Args:
      default: The default of a parameter.
    """
    if isinstance(default, enum.Enum):
        return typed(default.value)
    if isinstance(default, Mapping):
        return _AsTyped(repr(dict(default)))
    # Defaults that are functions, or that a field's factory makes, are shown as "...".
    if callable(default) or repr(default) == "<factory>":
        return _AsTyped("...")
    return default


def _with_short_arrays(
    app: Any, what: str, name: str, value: Any, options: Any, arguments: str, returned: str
) -> tuple[str, ...]:
    """Shortens the types of arrays in signatures: docstrings state shapes and dtypes."""
    return tuple(_ARRAY.sub(r"\1", each) if each else each for each in (arguments, returned))


def _with_typed_defaults(app: Any, value: Any, is_bound: bool) -> None:
    """Replaces defaults in a function's signature by objects shown as a user types them."""
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):
        return
    parameters = [
        each if each.default is each.empty else each.replace(default=typed(each.default))
        for each in found.parameters.values()
    ]
    function = getattr(value, "__func__", value)
    with contextlib.suppress(AttributeError):
        function.__signature__ = found.replace(parameters=parameters)


def page_of(target: str) -> str | None:
    """Returns the address of another project's page about a name; None if none is known.

    Args:
      target: The dotted name, as an annotation has it.
    """
    if target in _BUILT_IN:
        return f"{_PYTHON}{_BUILT_IN[target]}.html#{target}"
    module, _, name = target.rpartition(".")
    for pattern, page in _OTHER_PROJECTS.items():
        if re.fullmatch(pattern, module):
            return page.format(module, name)
    return None


def _link_elsewhere(app: Any, environment: Any, node: Any, content: Any) -> Any:
    """Links names of other projects to their pages; private names of this library get no link."""
    target = str(node.get("reftarget", ""))
    page = page_of(target) if node.get("refdomain") == "py" else None
    if page is not None:
        nodes = importlib.import_module("docutils.nodes")
        return nodes.reference("", "", content, refuri=page, internal=False)
    if node.get("refdoc") == f"reference/{_TYPES}":
        return content
    if not target.startswith(f"{PACKAGE}."):
        return None
    module, _, name = target.rpartition(".")
    try:
        return content if hasattr(importlib.import_module(module), name) else None
    except ImportError:
        return None


def _begin() -> None:
    # The stand-ins stay until the site is built, because Sphinx imports the modules as well.
    _stand_ins().__enter__()
    write()


def setup(app: Any) -> dict[str, bool]:
    """Sphinx extension that writes the pages of the reference before Sphinx looks for sources."""
    app.connect("builder-inited", lambda app: _begin())
    # Priority 400 runs before Napoleon (500), which reads the sections of docstrings.
    app.connect("autodoc-process-docstring", _prepare, priority=400)
    app.connect("autodoc-before-process-signature", _with_typed_defaults)
    app.connect("autodoc-process-signature", _with_short_arrays)
    app.connect("missing-reference", _link_elsewhere)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
