"""Workers end with the program, quietly, and stop requests come in order."""

import os
import signal
import subprocess
import sys

import psutil
import pytest

from mf_aggregators.tff import processes

_PROGRAM = """
import sys
from mf_aggregators.tff import processes
processes.prepare_environment()
import tensorflow_federated as tff
processes.end_workers_at_exit()
one = tff.federated_computation(lambda: 1)
assert one() == 1
import psutil
print([child.pid for child in psutil.Process().children()])
if "again" in sys.argv:
    processes.end_workers()
    assert one() == 1
if "raise" in sys.argv:
    raise SystemExit(3)
"""


@pytest.mark.long_cases(1)
@pytest.mark.long
@pytest.mark.long
@pytest.mark.parametrize(("arguments", "status"), [((), 0), (("again", "raise"), 3)])
def test_a_program_leaves_no_worker_and_no_message(arguments: tuple[str, ...], status: int) -> None:
    finished = subprocess.run(
        [sys.executable, "-c", _PROGRAM, *arguments],
        # A worker that outlived the program would keep these pipes open for ever.
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert finished.returncode == status
    assert finished.stderr == ""
    (worker,) = [int(pid) for pid in finished.stdout.strip("[]\n").split(",")]
    assert not psutil.pid_exists(worker)


def test_the_first_signal_requests_and_the_second_interrupts(
    capfd: pytest.CaptureFixture[str],
) -> None:
    before = signal.getsignal(signal.SIGINT)
    with processes.stop_requests("one more round") as request:
        requested = [request.is_set]
        os.kill(os.getpid(), signal.SIGINT)
        requested.append(request.is_set)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
    assert requested == [False, True]
    assert signal.getsignal(signal.SIGINT) is before
    assert capfd.readouterr().err.count("one more round") == 1
