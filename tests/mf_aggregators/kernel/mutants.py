"""Mutants of a kernel module, drawn at random and run against the module's own short tests.

    python -m tests.mf_aggregators.kernel.mutants losses --count=20 --seed=0

A mutant changes one comparison, operation, condition or number. Each runs in a process of its own,
which has loaded other packages already. Mutants that survive are printed with their lines;
``mutants.md`` lists those that are equivalent.
"""

import argparse
import ast
import functools
import importlib
import importlib.abc
import importlib.machinery
import os
import pathlib
import random
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType

import pytest

_ROOT = pathlib.Path(__file__).parents[3]
_KERNEL = "mf_aggregators.kernel"
_LOADED = ("numpy", "scipy.optimize", "scipy.stats", "dp_accounting", "hypothesis", "mpmath")
_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt},
    **{ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is},
    **{ast.In: ast.NotIn, ast.NotIn: ast.In},
}
_OPERATIONS: dict[type[ast.operator], type[ast.operator]] = {
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult},
    **{ast.FloorDiv: ast.Div, ast.Mod: ast.Mult, ast.Pow: ast.Mult},
}
# A mutant that takes more processor time counts as found.
_SECONDS = 120


def _mutations(tree: ast.Module) -> Iterator[tuple[int, str, Callable[[], None]]]:
    """Yields the line, a description and a function that alters the tree, of each mutant."""
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        for field in ("annotation", "returns", "decorator_list"):
            value = getattr(node, field, None)
            for root in value if isinstance(value, list) else [value]:
                skipped.update(ast.walk(root) if root is not None else ())
    for node in ast.walk(tree):
        if node in skipped or isinstance(node, ast.JoinedStr):
            continue
        if isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARISONS:
            other = _COMPARISONS[type(node.ops[0])]()
            yield (
                node.lineno,
                f"{ast.unparse(node)}: {type(other).__name__}",
                functools.partial(node.ops.__setitem__, 0, other),
            )
        elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
            operation = _OPERATIONS[type(node.op)]()
            yield (
                node.lineno,
                f"{ast.unparse(node)}: {type(operation).__name__}",
                functools.partial(setattr, node, "op", operation),
            )
        elif isinstance(node, ast.If | ast.IfExp | ast.While):
            negated = ast.UnaryOp(ast.Not(), node.test)
            yield (
                node.test.lineno,
                f"not ({ast.unparse(node.test)})",
                functools.partial(setattr, node, "test", negated),
            )
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
            value = node.value + 1 if type(node.value) is int else 1.5 * node.value + 1e-3
            yield (
                node.lineno,
                f"{node.value} becomes {value}",
                functools.partial(setattr, node, "value", value),
            )


class _Mutated(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from an altered tree."""

    def __init__(self, name: str, tree: ast.Module) -> None:
        self._name, self._tree = name, tree

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self) if name == self._name else None

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(ast.fix_missing_locations(self._tree), self._name, "exec"), module.__dict__)


def _is_found(name: str, tree: ast.Module, tests: Sequence[str]) -> bool:
    child = os.fork()
    if child == 0:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
        resource.setrlimit(resource.RLIMIT_CPU, (_SECONDS, _SECONDS))
        sys.meta_path.insert(0, _Mutated(name, tree))
        options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist"]
        os._exit(1 if pytest.main([*options, *tests]) else 0)
    return os.waitpid(child, 0)[1] != 0


def main() -> None:
    """Draws mutants of a module and prints those that its tests do not find."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("module", help="The module of the kernel.")
    parser.add_argument("--tests", nargs="*", help="Test files; by default the module's own.")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    values = parser.parse_args()
    for name in _LOADED:
        importlib.import_module(name)
    source = (_ROOT / "mf_aggregators" / "kernel" / f"{values.module}.py").read_text("utf-8")
    tests = values.tests or [str(pathlib.Path(__file__).parent / f"test_{values.module}.py")]
    number = sum(1 for _ in _mutations(ast.parse(source)))
    chosen = random.Random(values.seed).sample(range(number), min(values.count, number))
    begun, alive = time.monotonic(), 0
    for index in chosen:
        tree = ast.parse(source)
        line, words, alter = list(_mutations(tree))[index]
        alter()
        if not _is_found(f"{_KERNEL}.{values.module}", tree, tests):
            alive += 1
            print(f"{values.module}.py:{line}: {words}", flush=True)
    seconds = time.monotonic() - begun
    print(f"{len(chosen)} of {number} mutants, {alive} alive, {seconds:.0f} s")


if __name__ == "__main__":
    main()
