"""The end of TFF's workers, beside what a program does about signals itself.

And states of processes, which say which participation schema their noise is scaled to.
"""

import collections
import os
import signal
import subprocess
import sys
from typing import Any, NamedTuple

import numpy as np
import psutil
import pytest

from mf_aggregators.participation import (
    FixedEpochOrder,
    MinSeparation,
    Participation,
    SingleParticipation,
)
from mf_aggregators.tff import dp_query, processes
from mf_aggregators.tff.processes import NoiseState

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


# Workers end with the program, quietly, and stop requests come in order.


_PROGRAM_of_ends = """
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
        [sys.executable, "-c", _PROGRAM_of_ends, *arguments],
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


class _State(NamedTuple):
    model: Any
    aggregator: Any


@pytest.mark.parametrize(
    "participation",
    [
        SingleParticipation(),
        FixedEpochOrder(6, 342),
        MinSeparation(1),
        MinSeparation(342, 6),
        MinSeparation(2**40, 2**40),
    ],
    ids=str,
)
def test_a_schema_is_found_wherever_it_stands_in_a_state(participation: Participation) -> None:
    noise = NoiseState(5, 0, None, None, np.array(dp_query._schema_numbers(participation)), ())
    zeroing = collections.OrderedDict(norm=np.float32(1.0), inner=([np.zeros(2), noise], b"x"))
    state = _State([np.ones((2, 3)), "text"], zeroing)
    assert processes.participations_in(state) == (participation,)
    assert processes.participations_in(noise) == (participation,)
    both = _State(noise, (noise,))
    assert processes.participations_in(both) == (participation, participation)
    other = noise._replace(round_index=1)
    assert processes.states_in(other.put_into(state)) == [other]


def test_a_state_may_declare_nothing() -> None:
    assert processes.participations_in(_State([np.ones(3)], {"a": (1, 2, 3)})) == ()
