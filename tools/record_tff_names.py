r"""Records which names TensorFlow Federated's main branch exports, and their parameters.

  python tools/record_tff_names.py --commit=63f73da48 --federated=SOURCES/tensorflow_federated \
    --language=SITE_PACKAGES/federated_language --output=tests/mf_aggregators/tff/tff_main.json

No release is made from that branch, so that nothing here can be run with it. The record says which
of the names that this project uses are there. It holds names and nothing else of the sources,
which are read and not run.
"""

import argparse
import ast
import json
import pathlib
import re
import sys
from typing import Any

_VERSION = re.compile(r"__version__ = ['\"]([^'\"]+)['\"]")
# Modules that are used and not exported.
_BESIDES = (
    "federated_language.common_libs.structure",
    "federated_language.proto.computation_pb2",
    "tensorflow_federated.python.aggregators.privacy.query",
)


class Sources:
    """The sources of some packages.

    Attributes:
      folders: The folder of each package, by name.
    """

    def __init__(self, folders: dict[str, pathlib.Path]) -> None:
        self.folders = folders

    def file_of(self, module: str) -> pathlib.Path | None:
        """Returns the file of a module or package; None if there is none."""
        package, *rest = module.split(".")
        if package not in self.folders:
            return None
        path = self.folders[package].joinpath(*rest)
        for each in (path / "__init__.py", path.with_suffix(".py")):
            if each.is_file():
                return each
        return None

    def exports(self, module: str) -> dict[str, Any]:
        """Returns what a module has: parameters by name, and of packages in it the same.

        Parameters are a list for functions and classes, and None for what is neither.
        """
        found: dict[str, Any] = {}
        for node in self._tree(module).body:
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    name = alias.asname or alias.name
                    inner = f"{node.module}.{alias.name}"
                    if self.file_of(inner) is not None and _is_ours(inner):
                        is_package = self.file_of(inner).name == "__init__.py"  # type: ignore
                        found[name] = self.exports(inner) if is_package else self.defined(inner)
                    elif self.file_of(node.module) is not None:
                        found[name] = self.defined(node.module).get(alias.name)
        return {name: found[name] for name in sorted(found) if not name.startswith("_")}

    def defined(self, module: str) -> dict[str, Any]:
        """Returns what a module defines itself: parameters by name."""
        found: dict[str, Any] = {}
        for node in self._tree(module).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found[node.name] = _parameters(node.args)
            elif isinstance(node, ast.ClassDef):
                found[node.name] = _parameters_of_class(node)
            elif isinstance(node, ast.Assign):
                names = [each.id for each in node.targets if isinstance(each, ast.Name)]
                found.update(dict.fromkeys(names))
        return {name: found[name] for name in sorted(found) if not name.startswith("_")}

    def _tree(self, module: str) -> ast.Module:
        path = self.file_of(module)
        assert path is not None, module
        return ast.parse(path.read_text(encoding="utf-8"))


def _is_ours(module: str) -> bool:
    return module.split(".")[0] in ("federated_language", "tensorflow_federated")


def _parameters(arguments: ast.arguments) -> list[str]:
    """Names of parameters; those that may be left out end with an equals sign."""
    positional = [each.arg for each in (*arguments.posonlyargs, *arguments.args)]
    required = len(positional) - len(arguments.defaults)
    found = [name if i < required else f"{name}=" for i, name in enumerate(positional)]
    if arguments.vararg is not None:
        found.append(f"*{arguments.vararg.arg}")
    elif arguments.kwonlyargs:
        found.append("*")
    pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    found += [each.arg if default is None else f"{each.arg}=" for each, default in pairs]
    if arguments.kwarg is not None:
        found.append(f"**{arguments.kwarg.arg}")
    return found


def _parameters_of_class(node: ast.ClassDef) -> list[str] | None:
    """Those of its ``__init__``, or the fields of a named tuple; None if it has neither."""
    for each in node.body:
        if isinstance(each, ast.FunctionDef) and each.name == "__init__":
            return _parameters(each.args)[1:]
    if any(isinstance(base, ast.Name) and base.id == "NamedTuple" for base in node.bases):
        fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
        return [
            each.target.id if each.value is None else f"{each.target.id}="
            for each in fields
            if isinstance(each.target, ast.Name)
        ]
    return None


def main(arguments: list[str]) -> None:
    """Reads the sources and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("commit", "federated", "language", "output"):
        parser.add_argument(f"--{name}", required=True)
    given = parser.parse_args(arguments)
    folders = {
        "tensorflow_federated": pathlib.Path(given.federated),
        "federated_language": pathlib.Path(given.language),
    }
    sources = Sources(folders)
    versions = {
        package: match[1]
        for package, folder in folders.items()
        if (match := _VERSION.search((folder / "version.py").read_text())) is not None
    }
    record = {
        "commit": given.commit,
        "versions": versions,
        "exports": {package: sources.exports(package) for package in sorted(folders)},
        "besides": {module: sources.defined(module) for module in _BESIDES},
    }
    text = json.dumps(record, indent=1, sort_keys=True)
    # Lists of parameters on one line each.
    text = re.sub(r"\[\s+([^\]]*?)\s+\]", lambda m: f"[{' '.join(m[1].split())}]", text)
    pathlib.Path(given.output).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
