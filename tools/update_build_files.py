"""Writes the BUILD files from the tree: a target for each module, its deps from its imports.

    python tools/update_build_files.py           # rewrites what is out of date
    python tools/update_build_files.py --check   # only says what is; exit status 1 if anything

Targets that are there keep what this tool does not derive (data, size, tags, ...), and a file
keeps its other rules. Imports under ``if TYPE_CHECKING:`` are no dependencies. A module that is
imported by name needs that module alone, not its package's ``__init__``, which would close a cycle.
"""

import ast
import dataclasses
import pathlib
import re
import sys
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parent.parent

# Folders with Python of ours; the root itself gives quickstart.py alone.
FOLDERS = (
    "cifar10_classification",
    "digit_classification",
    "mf_aggregators",
    "reproduction",
    "simulations",
    "stackoverflow_nwp",
    "tests",
    "tools",
    "benchmarks",
)

# Import names whose distribution has another name, as @pypi spells it.
DISTRIBUTIONS = {
    "absl": "absl_py",
    "attr": "attrs",
    "google.protobuf": "protobuf",
    "sklearn": "scikit_learn",
    "tree": "dm_tree",
}

RUNNER = "//tools:pytest_main.py"
DERIVED = ("name", "srcs", "deps", "main", "args", "testonly")


@dataclasses.dataclass
class Target:
    """One py_library, py_binary or py_test."""

    kind: str
    attributes: dict[str, str]  # name -> source text of the value

    def text(self) -> str:
        """The rule as BUILD source."""
        lines = [f"    {name} = {value}," for name, value in self.attributes.items()]
        return "\n".join([f"{self.kind}(", *lines, ")"])


def quoted(value: str) -> str:
    """A string as BUILD source."""
    return f'"{value}"'


def listed(values: list[str]) -> str:
    """A list of strings as BUILD source, formatted as buildifier does."""
    if len(values) < 2:
        return "[" + "".join(map(quoted, values)) + "]"
    return "[\n" + "".join(f"        {quoted(value)},\n" for value in values) + "    ]"


def runtime_imports(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """The import statements below a node, less those that only a type checker sees."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            for statement in child.orelse:
                yield from runtime_imports(ast.Module([statement], []))
        else:
            yield from runtime_imports(child)


def module_file(dotted: str, folder: pathlib.Path) -> pathlib.Path | None:
    """Our file that a dotted module name means, seen from a folder; None if it is not ours."""
    relative = pathlib.Path(*dotted.split("."))
    for base in (ROOT, folder):
        for file in (base / relative.with_suffix(".py"), base / relative / "__init__.py"):
            if file.is_file():
                return file
    return None


def label(file: pathlib.Path, folder: pathlib.Path) -> str:
    """The label of a file's target, as written in a folder's BUILD file."""
    where = "" if file.parent == ROOT else file.parent.relative_to(ROOT).as_posix()
    name = target_name(file)
    if file.parent == folder:
        return f":{name}"
    return f"//{where}" if where.split("/")[-1] == name else f"//{where}:{name}"


def target_name(file: pathlib.Path) -> str:
    """The name of a file's target: the module's, or the folder's for an ``__init__``."""
    return file.parent.name if file.stem == "__init__" else file.stem


def dependencies(file: pathlib.Path) -> set[str]:
    """The labels of what a file imports."""
    folder = file.parent
    labels = set()

    def add(*names: str) -> None:
        for dotted in names:  # the most specific first
            ours = module_file(dotted, folder)
            if ours:
                if ours != file:
                    labels.add(label(ours, folder))
                return
        top = names[-1].split(".")[0]
        # A folder of ours without __init__.py is no target, and no distribution.
        if top in sys.stdlib_module_names or (ROOT / top).is_dir():
            return
        known = [name for name in DISTRIBUTIONS if f"{names[0]}.".startswith(f"{name}.")]
        labels.add("@pypi//" + (DISTRIBUTIONS[known[0]] if known else top.lower()))

    for statement in runtime_imports(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                add(alias.name)
            continue
        base = statement.module or ""
        if statement.level:
            parents = file.relative_to(ROOT).parts[: -statement.level]
            base = ".".join([*parents, *filter(None, [base])])
        for alias in statement.names:
            add(f"{base}.{alias.name}", base)
    return labels


def console_modules() -> set[str]:
    """The modules behind the console commands that setup.py declares."""
    text = (ROOT / "setup.py").read_text(encoding="utf-8")
    return set(re.findall(r'"[\w-]+=([\w.]+):\w+"', text))


def make_target(file: pathlib.Path, kept: dict[str, str]) -> Target:
    """The target for a file, with the attributes kept from its present one."""
    folder = file.parent
    inside = file.relative_to(ROOT)
    deps = dependencies(file)
    attributes = {"name": quoted(target_name(file))}
    dotted = ".".join(inside.with_suffix("").parts)
    source = file.read_text(encoding="utf-8")
    if inside.parts[0] == "tests" and re.match(r"test_.*|.*_test$", file.stem):
        kind = "py_test"
        attributes["srcs"] = listed([file.name, RUNNER])
        attributes["args"] = listed([f"$(location :{file.name})"])
        attributes["main"] = quoted(RUNNER)
        deps.add("@pypi//pytest")
        for parent in (folder, *folder.parents):
            if (parent / "conftest.py").is_file():
                deps.add(label(parent / "conftest.py", folder))
            if parent == ROOT:
                break
    else:
        main = re.search(r"^if __name__ == .__main__.:", source, re.MULTILINE)
        kind = "py_binary" if main or dotted in console_modules() else "py_library"
        attributes["srcs"] = listed([file.name])
        if inside.parts[0] == "tests":
            attributes["testonly"] = "True"
    attributes.update({name: text for name, text in kept.items() if name not in DERIVED})
    if deps:
        attributes["deps"] = listed(sorted(deps, key=lambda item: (":/@".find(item[0]), item)))
    return Target(kind, attributes)


def build_text(folder: pathlib.Path, files: list[pathlib.Path]) -> str:
    """What a folder's BUILD file should say."""
    build = folder / "BUILD"
    old = build.read_text(encoding="utf-8") if build.is_file() else ""
    kept: dict[str, dict[str, str]] = {}
    others = []
    for statement in ast.parse(old).body:
        source = ast.get_source_segment(old, statement) or ""
        call = statement.value if isinstance(statement, ast.Expr) else None
        rule = (
            call.func.id if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) else ""
        )
        if rule in ("py_library", "py_binary", "py_test"):
            assert isinstance(call, ast.Call)
            values = {
                word.arg: ast.get_source_segment(old, word.value) or ""
                for word in call.keywords
                if word.arg
            }
            kept[values["name"].strip("\"'")] = values
        elif rule not in ("load", "package"):
            others.append(source)
    targets = [make_target(file, kept.get(target_name(file), {})) for file in files]
    names = [target.attributes["name"] for target in targets]
    if len(set(names)) < len(names):
        raise ValueError(f"{folder}: a module has its folder's name")
    rules = ", ".join(quoted(kind) for kind in sorted({target.kind for target in targets}))
    parts = [
        f'load("@rules_python//python:defs.bzl", {rules})',
        'package(default_visibility = ["//visibility:public"])',
        *others,
        *(
            target.text()
            for target in sorted(targets, key=lambda target: target.attributes["name"])
        ),
    ]
    return "\n\n".join(parts) + "\n"


def wanted() -> dict[pathlib.Path, str]:
    """Every BUILD file of ours and what it should say."""
    files: dict[pathlib.Path, list[pathlib.Path]] = {ROOT: [ROOT / "quickstart.py"]}
    for top in FOLDERS:
        for file in sorted((ROOT / top).rglob("*.py")):
            files.setdefault(file.parent, []).append(file)
    return {folder / "BUILD": build_text(folder, members) for folder, members in files.items()}


def main(arguments: list[str]) -> int:
    """Writes or checks the files; the exit status."""
    if arguments not in ([], ["--check"]):
        print("usage: update_build_files.py [--check]", file=sys.stderr)
        return 2
    stale = [
        (build, text)
        for build, text in wanted().items()
        if not build.is_file() or build.read_text(encoding="utf-8") != text
    ]
    for build, text in stale:
        print(build.relative_to(ROOT))
        if not arguments:
            build.write_text(text, encoding="utf-8")
    return 1 if arguments and stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
