"""The end of TFF's workers, beside what a program does about signals itself."""

import signal
import subprocess
import sys

import pytest

# A child that is called as TFF's worker is.
_PROGRAM = """
import os, pathlib, shutil, signal, subprocess, sys, threading

from mf_aggregators.tff import processes

folder = pathlib.Path(sys.argv[1])
worker = folder / "worker_binary"
shutil.copy("/bin/sleep", worker)

def save(number, frame):
    (folder / "saved").touch()
    sys.exit(7)

{first}
child = subprocess.Popen([worker, "600"])
(folder / "worker").write_text(str(child.pid))
{then}
"""
_TERMINATE = "os.kill(os.getpid(), signal.SIGTERM)\nsys.exit(3)"
_IN_A_THREAD = """
raised = []
threading.excepthook = raised.append
thread = threading.Thread(target=processes.end_workers_at_exit)
thread.start()
thread.join()
assert not raised, raised[0]
"""


@pytest.mark.long_cases(2)
@pytest.mark.short_cases(1)
@pytest.mark.parametrize(
    ("first", "then", "status", "saves"),
    [
        ("processes.end_workers_at_exit()", _TERMINATE, 128 + signal.SIGTERM, False),
        (
            "signal.signal(signal.SIGTERM, save)\nprocesses.end_workers_at_exit()",
            _TERMINATE,
            7,
            True,
        ),
        (
            "processes.end_workers_at_exit()\nsignal.signal(signal.SIGTERM, save)",
            _TERMINATE,
            7,
            True,
        ),
        (
            "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nprocesses.end_workers_at_exit()",
            _TERMINATE,
            3,
            False,
        ),
        (_IN_A_THREAD, "sys.exit(5)", 5, False),
        (f"signal.signal(signal.SIGTERM, save){_IN_A_THREAD}", _TERMINATE, 7, True),
    ],
    ids=["alone", "handler", "later_handler", "ignored", "thread", "thread_and_handler"],
)
def test_workers_end_and_a_handler_of_the_program_is_called(
    first: str, then: str, status: int, saves: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("processes")
    program = _PROGRAM.format(first=first, then=then)
    ended = subprocess.run(
        [sys.executable, "-c", program, str(folder)], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (status, "")
    assert (folder / "saved").exists() == saves
    worker = int((folder / "worker").read_text())
    assert not _is_alive(worker)


def _is_alive(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
