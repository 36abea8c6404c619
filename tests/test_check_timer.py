"""The checker of ports of the reference timer, and the port in JavaScript."""

import pathlib
import shutil
import sys

import pytest

from tests.console_commands import ROOT
from tools import check_timer

_PORT = ROOT / "docs" / "timer" / "timer.js"


def _node() -> str:
    program = shutil.which("node")
    assert program, "install Node.js (apt-get install nodejs): nothing is skipped"
    return program


@pytest.mark.long
def test_the_port_in_javascript_answers_as_the_reference() -> None:
    assert check_timer.main([_node(), str(_PORT)]) == check_timer.SAME


@pytest.mark.long
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("entry.round + rule.rounds", "entry.round + 1"),
        ("entry ? stricter(own, entry.policy) : own", "own"),
        ("found.mark === mark && ", ""),
        ("before.tolerance <= rule.tolerance", "true"),
        ("|| most < 1", ""),
    ],
)
def test_a_fault_of_a_port_is_shown(
    old: str, new: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = _PORT.read_text(encoding="utf-8")
    assert source.count(old) == 1
    port = tmp_path / "timer.js"
    port.write_text(source.replace(old, new), encoding="utf-8")
    assert check_timer.main([_node(), str(port)]) == check_timer.DIFFERENT
    *_, event, expected, found = capsys.readouterr().out.splitlines()
    assert event.startswith('  {"do":')
    assert expected.split()[0] == "expected"
    assert found.split()[0] == "found"


_PYTHON = (sys.executable, "-c")
_FILE = str(ROOT / "pyproject.toml")


@pytest.mark.parametrize(
    ("word", "arguments"),
    [
        ("ended", [*_PYTHON, ""]),
        ("JSON", [*_PYTHON, "input(); print('no JSON', flush=True); input()"]),
        ("silent", [*_PYTHON, "input(); print('{', end='', flush=True); input()"]),
        ("run", ["./no_such_program"]),
        (_FILE, [f"--vectors={_FILE}", sys.executable]),
    ],
)
def test_ports_and_files_that_are_none_are_refused(
    word: str,
    arguments: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(check_timer, "_SECONDS", 3.0)
    assert check_timer.main(arguments) == check_timer.UNUSABLE
    assert word in capsys.readouterr().err
