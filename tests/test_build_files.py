"""The BUILD files say what the tree holds: every module once, with what it imports."""

import ast
import pathlib
import re
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGES = (
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
RULES = ("py_library", "py_binary", "py_test")
RUNNER = "tools/pytest_main.py"  # the main of every py_test

# Import names whose distribution has another name.
DISTRIBUTIONS = {"absl": "absl_py", "sklearn": "scikit_learn", "tree": "dm_tree"}

RENEW = "run tools/update_build_files.py"


def _targets() -> dict[str, tuple[str, dict[str, object]]]:
    """Every Python target: "folder:name" -> (rule, attributes)."""
    targets: dict[str, tuple[str, dict[str, object]]] = {}
    builds = [ROOT / "BUILD", *(path for top in PACKAGES for path in (ROOT / top).rglob("BUILD"))]
    for build in builds:
        for node in ast.parse(build.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call):
                continue
            rule = ast.unparse(node.value.func)
            if rule not in RULES:
                continue
            values = {
                word.arg: ast.literal_eval(word.value)
                for word in node.value.keywords
                if word.arg in ("name", "srcs", "deps", "main", "args", "testonly")
            }
            key = f"{_inside(build.parent)}:{values['name']}"
            assert key not in targets, f"{key} is declared twice"
            targets[key] = (rule, values)
    return targets


def _inside(path: pathlib.Path) -> str:
    text = path.relative_to(ROOT).as_posix()
    return "" if text == "." else text


def _absolute(label: str, folder: str) -> str:
    """A label as "folder:name"; a third-party one unchanged."""
    if label.startswith("@"):
        return label
    if label.startswith(":"):
        return folder + label
    assert label.startswith("//"), label
    where, _, name = label[2:].partition(":")
    return f"{where}:{name or where.rsplit('/', 1)[-1]}"


def _sources(key: str, attributes: dict[str, object]) -> list[str]:
    folder = key.partition(":")[0]
    paths = []
    srcs = attributes["srcs"]
    assert isinstance(srcs, list)
    for source in srcs:
        if ":" in source:
            paths.append(_absolute(source, folder).replace(":", "/"))
        else:
            paths.append(f"{folder}/{source}".lstrip("/"))
    return paths


class _Imports(ast.NodeVisitor):
    """Collects (module, name imported from it or ""), leaving out what only type checkers see."""

    def __init__(self, file: pathlib.Path) -> None:
        self.package = file.relative_to(ROOT).parts[:-1]
        self.found: set[tuple[str, str]] = set()
        self.visit(ast.parse(file.read_text(encoding="utf-8")))

    def visit_If(self, node: ast.If) -> None:
        names = {part.id for part in ast.walk(node.test) if isinstance(part, ast.Name)}
        names |= {part.attr for part in ast.walk(node.test) if isinstance(part, ast.Attribute)}
        for child in node.orelse if "TYPE_CHECKING" in names else [*node.body, *node.orelse]:
            self.visit(child)

    def visit_Import(self, node: ast.Import) -> None:
        self.found |= {(alias.name, "") for alias in node.names}

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        if node.level:
            up = self.package[: len(self.package) - node.level + 1]
            module = ".".join([*up, module]).rstrip(".")
        self.found |= {(module, alias.name) for alias in node.names}


def _expected(file: pathlib.Path, targets_of_files: dict[str, str]) -> set[str]:
    """The targets that a file's imports ask for."""

    def of_module(module: str) -> str | None:
        path = module.replace(".", "/")
        for folder in ("", f"{_inside(file.parent)}/"):
            for candidate in (f"{folder}{path}.py", f"{folder}{path}/__init__.py"):
                if candidate in targets_of_files:
                    return targets_of_files[candidate]
        return None

    expected = set()
    for module, name in _Imports(file).found:
        target = (of_module(f"{module}.{name}") if name else None) or of_module(module)
        top = module.partition(".")[0]
        if target:
            expected.add(target)
        elif top == "google":
            assert module.startswith("google.protobuf"), module
            expected.add("@pypi//protobuf")
        elif top not in sys.stdlib_module_names and not (ROOT / top).is_dir():
            expected.add(f"@pypi//{DISTRIBUTIONS.get(top, top)}")
    return expected - {targets_of_files[_inside(file)]}


@pytest.fixture(scope="module")
def targets() -> dict[str, tuple[str, dict[str, object]]]:
    return _targets()


@pytest.fixture(scope="module")
def targets_of_files(targets: dict[str, tuple[str, dict[str, object]]]) -> dict[str, str]:
    owners: dict[str, list[str]] = {}
    for key, (_, attributes) in targets.items():
        for path in _sources(key, attributes):
            if path != RUNNER or key.startswith("tools:"):
                owners.setdefault(path, []).append(key)
    several = {path: keys for path, keys in owners.items() if len(keys) > 1}
    assert not several
    return {path: keys[0] for path, keys in owners.items()}


def test_every_module_is_in_exactly_one_target_of_its_folder(
    targets_of_files: dict[str, str],
) -> None:
    modules = {_inside(path) for top in PACKAGES for path in (ROOT / top).rglob("*.py")}
    modules.add("quickstart.py")

    assert set(targets_of_files) == modules, RENEW
    for path, key in targets_of_files.items():
        assert path.rpartition("/")[0] == key.partition(":")[0]


def test_deps_are_what_the_module_imports(
    targets: dict[str, tuple[str, dict[str, object]]], targets_of_files: dict[str, str]
) -> None:
    wrong = {}
    for path, key in targets_of_files.items():
        rule, attributes = targets[key]
        folder = key.partition(":")[0]
        deps = attributes.get("deps", [])
        assert isinstance(deps, list)
        declared = [_absolute(label, folder) for label in deps]
        assert len(set(declared)) == len(declared), f"{key} repeats a dependency"
        expected = _expected(ROOT / path, targets_of_files)
        if rule == "py_test":  # what the runner and pytest itself load
            expected.add("@pypi//pytest")
            for parent in pathlib.PurePosixPath(path).parents:
                conftest = (parent / "conftest.py").as_posix()
                if conftest in targets_of_files:
                    expected.add(targets_of_files[conftest])
        if set(declared) != expected:
            wrong[key] = sorted(set(declared) ^ expected)
    assert not wrong, RENEW


def test_no_target_depends_on_itself(targets: dict[str, tuple[str, dict[str, object]]]) -> None:
    finished: set[str] = set()

    def visit(key: str, path: tuple[str, ...]) -> None:
        assert key not in path, "Bazel refuses a cycle: " + " -> ".join([*path, key])
        if key in finished or key.startswith("@"):
            return
        deps = targets[key][1].get("deps", [])
        assert isinstance(deps, list)
        for dep in deps:
            visit(_absolute(dep, key.partition(":")[0]), (*path, key))
        finished.add(key)

    for key in targets:
        visit(key, ())


def test_every_console_command_is_a_binary(
    targets: dict[str, tuple[str, dict[str, object]]],
) -> None:
    modules = re.findall(r'"[\w-]+=([\w.]+):\w+"', (ROOT / "setup.py").read_text(encoding="utf-8"))

    assert modules
    for module in modules:
        folder, _, name = module.rpartition(".")
        key = f"{folder.replace('.', '/')}:{name}"
        assert targets.get(key, ("missing",))[0] == "py_binary", key


def test_tests_run_by_pytest(targets: dict[str, tuple[str, dict[str, object]]]) -> None:
    tests = {key: attributes for key, (rule, attributes) in targets.items() if rule == "py_test"}

    assert tests
    for key, attributes in tests.items():
        # A test file as its own main would define its tests, run none and pass.
        assert attributes["main"] == f"//{RUNNER.replace('/', ':')}"
        assert attributes["args"] == [f"$(location :{key.partition(':')[2]}.py)"]
