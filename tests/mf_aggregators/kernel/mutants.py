"""Mutants of kernel modules, each run against the module's own tests.

    python -m tests.mf_aggregators.kernel.mutants losses rows

A mutant changes one comparison, operation, condition, name or number. Tests are imported once, and
each runs once in a process of its own that notes which lines it reaches. A mutant of a function
replaces its code in another process, which runs the tests that reach the changed statement, the
quickest first. Where an import runs the statement, the module and its tests are imported anew.
Mutants that survive are printed with their lines; ``mutants.md`` says why each may.
"""

import ast
import contextlib
import functools
import gc
import importlib
import importlib.machinery
import multiprocessing
import operator
import os
import pathlib
import resource
import sys
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import coverage
import hypothesis
import pytest

_HERE = pathlib.Path(__file__).parent
_LOADED = ("numpy", "scipy.optimize", "scipy.stats", "dp_accounting.pld.pld_privacy_accountant")
_TESTS: dict[str, tuple[str, ...]] = {
    **{"allocation": ("losses",), "cohorts": ("draws_of_clients",), "rows": ("rows", "trees")},
    **{
        "sensitivity": ("sensitivity", "trees", "gaussian"),
        "losses": ("losses", "draws_of_clients"),
    },
}
_CHANGED: dict[type[ast.AST], Callable[[], ast.AST]] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt},
    **{ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is},
    **{ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult},
    **{ast.FloorDiv: ast.Div, ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.USub: ast.UAdd},
}
_PAIRS = (("min", "max"), ("minimum", "maximum"), ("floor", "ceil"), ("any", "all"))
_NAMES = dict(_PAIRS) | {second: first for first, second in _PAIRS}
_NUMBERS: dict[type, Callable[[Any], Any]] = {
    **{bool: operator.not_, int: lambda x: x + 1, float: lambda x: 1.5 * x + 1e-3}
}
# A mutant that takes more memory or processor time, beside a multiple of its tests', is found.
_BYTES, _SECONDS, _TIMES = 6 << 30, 5, 3

# The lines of its statement, whether a function has it, its node, the field and its new value.
_Mutant = tuple[range, bool, ast.AST, str, Any]


def _changes(node: ast.AST) -> Iterator[tuple[str, Any]]:
    """Yields a field and its new value, for each mutant of a node."""
    for field, value in ast.iter_fields(node):
        if type(value) in _CHANGED:
            yield field, _CHANGED[type(value)]()
        elif field == "ops":
            for place, each in enumerate(value):
                yield field, [*value[:place], _CHANGED[type(each)](), *value[place + 1 :]]
        elif field == "test":
            yield field, ast.UnaryOp(ast.Not(), value)
        elif field == "value" and type(value) in _NUMBERS:
            yield field, _NUMBERS[type(value)](value)
        elif field in ("id", "attr") and value in _NAMES:
            yield field, _NAMES[value]


def _mutants(parent: ast.AST, lines: range, is_inside: bool) -> Iterator[_Mutant]:
    for field, values in ast.iter_fields(parent):
        is_body = field == "body" and isinstance(parent, ast.FunctionDef | ast.Lambda)
        for node in values if isinstance(values, list) else [values]:
            if isinstance(node, ast.AST) and field not in ("annotation", "returns"):
                here = lines
                if isinstance(node, ast.stmt):
                    body = getattr(node, "body", None)
                    end = body[0].lineno if body else (node.end_lineno or 0) + 1
                    here = range(node.lineno, end)
                for change in _changes(node):
                    yield here, is_inside or is_body, node, *change
                yield from _mutants(node, here, is_inside or is_body)


def _described(mutant: _Mutant) -> str:
    """The line of a mutant, and what becomes of what."""
    lines, _, node, field, value = mutant
    shown = "test" if field == "test" else ""
    before, usual = ast.unparse(getattr(node, shown, node)), getattr(node, field)
    setattr(node, field, value)
    after = ast.unparse(getattr(node, shown, node))
    setattr(node, field, usual)
    return f"{getattr(node, 'lineno', lines.start)}: {before} becomes {after}"


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _codes(each)


def _forked(call: Callable[[], Any], seconds: float) -> Any:
    """What a function returns in a process of its own; None if that ends before."""
    reader, writer = multiprocessing.Pipe(duplex=False)

    def answer() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds) + 1))
        resource.setrlimit(resource.RLIMIT_AS, (_BYTES, _BYTES))
        writer.send(call())

    process = multiprocessing.get_context("fork").Process(target=answer)
    process.start()
    writer.close()
    with contextlib.suppress(EOFError):
        return reader.recv()


class _Tests:
    """The tests of a module, as a plugin of pytest that ends where one fails."""

    def __init__(self, module: str) -> None:
        self.name = f"mf_aggregators.kernel.{module}"
        self.path = _HERE.parents[2] / "mf_aggregators" / "kernel" / f"{module}.py"
        self.tree = ast.parse(self.path.read_text("utf-8"))
        self.mutants = list(_mutants(self.tree, range(0), False))
        own = "frozen", *_TESTS.get(module, (module,))
        self.files = [str(_HERE / f"test_{each}.py") for each in own]
        self.coverage = coverage.Coverage(None, config_file=False, include=[str(self.path)])
        self.is_imported = False
        # Mutants that survive, those that have to be imported, and seconds of the tests.
        self.found: tuple[list[int], list[int], float] | None = None

    def code(self) -> types.CodeType:
        """The code of the module as its tree is now."""
        return compile(ast.fix_missing_locations(self.tree), str(self.path), "exec")

    def run(self) -> bool:
        """Returns whether all tests pass."""
        for each in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), each)
        options = ["-q", "-s", "--timeout=300", "-pno:cacheprovider", "-pno:xdist"]
        return pytest.main([*options, *self.files], plugins=[self]) == 0

    def of_functions(self) -> Any:
        """Runs the mutants of functions, and returns what is found."""
        self.coverage.start()
        self.run()
        return self.found

    def survives_import(self, index: int) -> bool:
        """Returns whether all tests pass where a mutant is imported."""
        setattr(*self.mutants[index][2:])
        loader: Any = importlib.machinery.SourceFileLoader
        code, usual, self.is_imported = self.code(), loader.get_code, True
        loader.get_code = lambda own, name: code if name == self.name else usual(own, name)
        return self.run()

    def _record(self, item: pytest.Item) -> tuple[float, set[int]]:
        """The time of a test, and the lines that it reaches."""
        begun = time.process_time()
        self.coverage.erase()
        self.coverage.start()
        item.ihook.pytest_runtest_protocol(item=item, nextitem=None)
        return time.process_time() - begun, self._lines()

    def _lines(self) -> set[int]:
        self.coverage.stop()
        return set(self.coverage.get_data().lines(str(self.path)) or ())

    def _survives(self, index: int, items: list[pytest.Item]) -> bool:
        """Whether tests pass where the code of functions is replaced."""
        setattr(*self.mutants[index][2:])
        for functions, code in zip(self.functions, _codes(self.code()), strict=True):
            for each in functions:
                each.__code__ = code
        for item in items:
            item.ihook.pytest_runtest_protocol(item=item, nextitem=None)
        return True

    def pytest_sessionstart(self) -> None:
        """Draws the same examples each time, and does not look for smaller ones."""
        phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate, hypothesis.Phase.target]
        settings = hypothesis.settings(derandomize=True, database=None, phases=phases)
        hypothesis.settings.register_profile("mutants", settings)
        hypothesis.settings.load_profile("mutants")

    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> None:
        """Ends the process of a mutant that is found."""
        if call.excinfo and not isinstance(call.excinfo.value, pytest.skip.Exception):
            os._exit(1)

    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Runs each mutant of a function against the tests that reach it."""
        if self.is_imported:
            return None
        if session.testsfailed:
            raise session.Interrupted("a module of tests cannot be imported")
        at_import = self._lines()
        every = [each for each in gc.get_objects() if isinstance(each, types.FunctionType)]
        self.functions = [
            [each for each in every if each.__code__ == code] for code in _codes(self.code())
        ]
        gc.freeze()
        timed = []
        for item in session.items:
            timed.append((*_forked(functools.partial(self._record, item), 1e6), item))
        timed.sort(key=lambda each: each[0])
        seconds = sum(each[0] for each in timed)
        alive: list[int] = []
        imported: list[int] = []
        for index, (lines, is_in_function, *_) in enumerate(self.mutants):
            reaching = [each for each in timed if not each[1].isdisjoint(lines)]
            items, most = [each[2] for each in reaching], sum(each[0] for each in reaching)
            survives = functools.partial(self._survives, index, items)
            if not is_in_function or _forked(survives, _SECONDS + _TIMES * most):
                is_final = is_in_function and at_import.isdisjoint(lines)
                (alive if is_final else imported).append(index)
        self.found = alive, imported, seconds
        return True


def main() -> None:
    """Prints the mutants of modules that their tests do not find."""
    for name in _LOADED:
        importlib.import_module(name)
    for module in sys.argv[1:]:
        tests = _Tests(module)
        found = _forked(tests.of_functions, 1e6)
        if found is None:
            raise SystemExit(f"a test of {module} fails without any mutant.")
        alive, imported, seconds = found
        for index in imported:
            survives = functools.partial(tests.survives_import, index)
            if _forked(survives, _SECONDS + _TIMES * seconds):
                alive.append(index)
        for index in sorted(alive):
            print(f"{module}.py:{_described(tests.mutants[index])}")
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        print(
            f"{module}: {len(tests.mutants)} mutants, {len(imported)} of them imported, "
            f"{len(alive)} alive; tests take {seconds:.1f} s of a processor, and all modules until "
            f"now {(used.ru_utime + used.ru_stime) / 60:.1f} minutes",
            flush=True,
        )


if __name__ == "__main__":
    main()
