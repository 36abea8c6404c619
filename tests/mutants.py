"""Runs the tests of a module of the kernel on mutants of it: which faults would they not find?

    python -m tests.mutants sensitivity --count=20 --seed=1

A mutant changes one comparison, operation, condition or number of the module. Its tests are those
of ``tests/mf_aggregators/kernel/test_<module>.py``, of the short test. Mutants that survive are
printed; ``mutants.md`` in the folder of these tests lists those that are equivalent.
"""

import argparse
import ast
import copy
import importlib.abc
import importlib.util
import os
import pathlib
import random
import sys
import time
from collections.abc import Sequence
from typing import Any

import pytest

_ROOT = pathlib.Path(__file__).parents[1]
_SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
_SECONDS_PER_MUTANT = 120


class _Mutated(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from another tree than that of its file."""

    def __init__(self, name: str, path: pathlib.Path, tree: ast.Module) -> None:
        self._name, self._path, self._tree = name, path, tree

    def find_spec(self, name: str, *_: Any) -> Any:
        if name != self._name:
            return None
        return importlib.util.spec_from_file_location(name, self._path, loader=self)

    def create_module(self, _: Any) -> None:
        return None

    def exec_module(self, module: Any) -> None:
        exec(compile(self._tree, os.fspath(self._path), "exec"), module.__dict__)


def mutated(node: Any, change: int) -> str | None:
    """Changes a node of a module, and returns what was changed; None if no mutant changes it.

    Args:
      node: The node.
      change: Which of several comparisons in a chain; 0 for others.
    """
    before = ast.unparse(node).splitlines()[0] if hasattr(node, "lineno") else ""
    if isinstance(node, ast.Compare) and type(node.ops[change]) in _SWAPPED:
        node.ops[change] = _SWAPPED[type(node.ops[change])]()
    elif isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in _SWAPPED:
        node.op = _SWAPPED[type(node.op)]()
    elif isinstance(node, ast.If | ast.IfExp):
        node.test = ast.UnaryOp(ast.Not(), node.test)
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        node.value = node.value * 2 + 1
    else:
        return None
    return f"line {node.lineno}: {before} -> {ast.unparse(node).splitlines()[0]}"


def mutants(tree: ast.Module) -> list[tuple[int, int]]:
    """Returns the place of each mutant of a module in ``ast.walk``, and its comparison.

    Args:
      tree: The module.
    """
    return [
        (place, change)
        for place, node in enumerate(ast.walk(tree))
        for change in range(len(getattr(node, "ops", [0])))
        if mutated(copy.deepcopy(node), change)
    ]


def survives(module: str, mutant: ast.Module) -> bool:
    """Returns whether all tests of a module pass on a mutant of it, in a process of their own.

    Args:
      module: The name of the module in the kernel.
      mutant: The mutant.
    """
    child = os.fork()
    if child == 0:
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        path = _ROOT / "mf_aggregators" / "kernel" / f"{module}.py"
        sys.meta_path.insert(0, _Mutated(f"mf_aggregators.kernel.{module}", path, mutant))
        tests = _ROOT / "tests" / "mf_aggregators" / "kernel" / f"test_{module}.py"
        os._exit(int(pytest.main(["-x", "-q", "-n0", "-p", "no:cacheprovider", str(tests)])))
    end = time.monotonic() + _SECONDS_PER_MUTANT
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.1)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return False


def main(words: Sequence[str] | None = None) -> int:
    """Prints the mutants that survive, and returns how many they are."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("module", help="a module of the kernel, such as sensitivity")
    parser.add_argument("--count", type=int, default=20, help="mutants, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    given = parser.parse_args(words)
    source = _ROOT / "mf_aggregators" / "kernel" / f"{given.module}.py"
    tree = ast.parse(source.read_text(encoding="utf-8"))
    every, alive = mutants(tree), 0
    drawn = random.Random(given.seed).sample(every, min(given.count, len(every)))
    for place, change in drawn:
        mutant = copy.deepcopy(tree)
        found = mutated(list(ast.walk(mutant))[place], change)
        if survives(given.module, ast.fix_missing_locations(mutant)):
            alive += 1
            print(found, flush=True)
    print(f"{alive} of {len(drawn)} mutants survive; there are {len(every)}.")
    return alive


if __name__ == "__main__":
    import hypothesis  # noqa: F401
    import scipy.optimize
    import scipy.stats  # noqa: F401
    from dp_accounting.pld import privacy_loss_distribution  # noqa: F401

    sys.exit(main() > 0)
