"""Epsilons that are printed come from guarantees of the kernel: other computations are listed."""

import ast
import collections
import pathlib

_ROOT = pathlib.Path(__file__).parent.parent
_FOLDERS = ("mf_aggregators", "simulations", "stackoverflow_nwp")
# Functions that return an epsilon or a rho of a bare noise multiplier.
_NAMES = {
    *("amplified", "amplified_epsilon", "epsilon"),
    *("exact_deltas", "exact_epsilon", "zcdp_rho"),
}
# Checks of a number, which compute none.
_CHECKS = {"numbers"}
# Files of searches and audits, and how many such calls each has.
_LISTED = {
    # Public functions of sampling schemes, and searches for noise, whose result the kernel proves.
    # Pairs of shuffled runs bound attackers alone.
    "mf_aggregators/accounting.py": 5,
    "mf_aggregators/participation/__init__.py": 3,
    "mf_aggregators/participation/certificate_search.py": 1,
    "mf_aggregators/planning/planner.py": 1,
    "mf_aggregators/mechanism.py": 1,
    # A lower bound that an audit found.
    "mf_aggregators/audit/statistics.py": 1,
}


def _calls(path: pathlib.Path) -> int:
    """How often a file calls a function that computes an epsilon, by its name."""
    found = 0
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        if isinstance(function, ast.Name):
            found += function.id in _NAMES
        elif isinstance(function, ast.Attribute) and function.attr in _NAMES:
            base = function.value
            found += not (isinstance(base, ast.Name) and base.id in _CHECKS)
    return found


def test_no_other_file_computes_an_epsilon() -> None:
    found = collections.Counter(
        {
            path.relative_to(_ROOT).as_posix(): _calls(path)
            for folder in _FOLDERS
            for path in (_ROOT / folder).rglob("*.py")
            if not path.is_relative_to(_ROOT / "mf_aggregators" / "kernel")
        }
    )
    assert dict(+found) == _LISTED, (
        "Show an epsilon of a kernel's guarantee (guarantees.of_noise has that of a noise "
        "multiplier), or list the file here with the reason."
    )


def test_calls_are_found(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "one.py"
    path.write_text("a = x.epsilon(1)\nb = epsilon(2)\nnumbers.epsilon(3)\nd.epsilon\n")
    assert _calls(path) == 2
