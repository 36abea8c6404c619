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


_WITHOUT_PROXY = "no_grpc_proxy"
_CLOSED_PORT = "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, "localhost"),
        ({"no_proxy": "example.org"}, "example.org,localhost"),
        ({"no_proxy": "example.org", "no_grpc_proxy": "example.net"}, "example.net,localhost"),
        ({"no_proxy": "example.org,localhost"}, None),
    ],
)
def test_a_proxy_of_the_environment_is_not_asked_for_this_machine(
    before: dict[str, str], after: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    # Restored afterwards, whoever sets it.
    monkeypatch.setenv("no_grpc_proxy", before.get("no_grpc_proxy", ""))
    processes._reach_local_worker()
    assert os.environ[_WITHOUT_PROXY] == (after or "")


_WITH_AGGREGATOR = """
import numpy as np, tensorflow_federated as tff
import mf_aggregators as mfa
from mf_aggregators.tff import processes
processes.end_workers_at_exit()
mechanism = mfa.Mechanism(mfa.factorizations.identity(2), mfa.participation.MinSeparation(1), 1.0)
aggregator = mfa.mf_dp_aggregator(mechanism, clip_norm=1.0, clients_per_round=1)
process = aggregator.create(tff.TensorType(np.float32, [2]))
process.initialize()
"""
_UNREACHABLE = """
import os
from mf_aggregators.tff import processes
processes.prepare_environment()
os.environ["no_grpc_proxy"] = os.environ["no_proxy"] = "nowhere"
import tensorflow_federated
processes.end_workers_at_exit()
print("ready", flush=True)
processes.start_worker()
"""


@pytest.mark.long
def test_the_worker_is_reached_past_a_proxy() -> None:
    environment = {**os.environ, "http_proxy": _CLOSED_PORT, "no_proxy": "", "no_grpc_proxy": ""}
    program = [sys.executable, "-c", _WITH_AGGREGATOR]
    assert subprocess.run(program, env=environment, timeout=120).returncode == 0


@pytest.mark.long
def test_a_signal_ends_a_program_whose_worker_is_not_reached() -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", _UNREACHABLE],
        stdout=subprocess.PIPE,
        env={**os.environ, "http_proxy": _CLOSED_PORT},
    )
    assert program.stdout is not None
    assert program.stdout.readline() == b"ready\n"
    with pytest.raises(subprocess.TimeoutExpired):
        program.wait(5.0)
    program.send_signal(signal.SIGTERM)
    assert program.wait(120.0) == 128 + signal.SIGTERM


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
