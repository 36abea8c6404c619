"""Commands without some of the standard streams, and with output that takes no more."""

import json
import pathlib
import subprocess
import sys

import pytest

# A command that fails or prints, after it has warned and opened a file as libraries do.
_PROGRAM = """
import sys

from mf_aggregators.commands import command_line
from mf_aggregators.progress_bars import ProgressBar


def main(values):
    file = open("opened", "w")
    print("warning", file=sys.stderr, flush=True)
    for _ in ProgressBar(range(3)):
        pass
    if values.fails:
        raise command_line.CommandError("refused")
    command_line.print_result(values, {"answer": 42, "name": "a\\udcff"}, "42 a\\udcff")


def define_flags(values):
    command_line.FlagGroup(values, "Output").boolean("fails", "Whether it fails.", False)


sys.exit(command_line.run("", define_flags, main))
"""


def _call(
    folder: pathlib.Path, redirections: str, *arguments: str
) -> "subprocess.CompletedProcess[str]":
    words = " ".join([f"'{sys.executable}' program.py", *arguments, redirections])
    (folder / "program.py").write_text(_PROGRAM)
    return subprocess.run(
        ["bash", "-c", words], cwd=folder, capture_output=True, text=True, check=False
    )


@pytest.mark.short_cases(1)
@pytest.mark.parametrize(
    ("redirections", "status", "out", "err"),
    [
        ("", 0, "42 a\\udcff\n", "warning\n"),
        ("2>&-", 0, "42 a\\udcff\n", ""),
        (">&-", 0, "", "warning\n"),
        ("<&- >&- 2>&-", 0, "", ""),
        (">/dev/full", 2, "", "warning\nprogram.py: standard output cannot be written: "),
    ],
)
def test_work_is_done_with_the_streams_that_are_there(
    redirections: str, status: int, out: str, err: str, tmp_path: pathlib.Path
) -> None:
    ended = _call(tmp_path, redirections)
    assert (ended.returncode, ended.stdout) == (status, out)
    assert ended.stderr.startswith(err)
    assert ended.stderr.count("\n") <= 2
    # Nothing of what was printed has gone where the stream was.
    assert (tmp_path / "opened").read_text() == ""


@pytest.mark.long
def test_refusals_never_go_to_standard_output(tmp_path: pathlib.Path) -> None:
    for redirections in ("2>&-", ">&- 2>&-"):
        ended = _call(tmp_path, redirections, "--fails")
        assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", "")
        assert (tmp_path / "opened").read_text() == ""


def test_json_is_ascii_with_the_same_name_in_it(tmp_path: pathlib.Path) -> None:
    ended = _call(tmp_path, "", "--format=json")
    assert ended.stdout.isascii()
    assert json.loads(ended.stdout) == {"answer": 42, "name": "a\udcff"}
