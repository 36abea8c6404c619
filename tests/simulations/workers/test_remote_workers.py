"""Rounds on several workers: the same result, one row of noise, and errors that end."""

import pathlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import Any

import grpc  # type: ignore[import-untyped]
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
from hypothesis import given
from hypothesis import strategies as st
from tensorflow.core.framework import tensor_pb2

from mf_aggregators.tff import processes
from mf_aggregators.tff.processes import StopRequest
from simulations.runs import training_loop
from simulations.workers import remote_workers
from simulations.workers.remote_workers import DividedContext, Timeouts, WorkerLostError
from tests.refusals import refuses
from tests.simulations import linear_run
from tests.simulations.worker_processes import WorkerProcess, ending, free_port

_ROUNDS = 4
_FEATURES = 50
# Seven vectors of norm 1 are added and divided by 3: two orders of the sum differ by at most
# 2 * 6 * 6e-8 * 7 / 3 = 2e-6 in a coordinate. Four rounds of it, and what training makes of it.
_ROUNDING = 2e-5


@pytest.fixture(scope="module")
def workers() -> Iterator[tuple[WorkerProcess, ...]]:
    with ending(
        WorkerProcess("127.0.0.1", free_port()), WorkerProcess("127.0.0.2", free_port())
    ) as started:
        yield started
    processes.end_workers()


@pytest.fixture
def addresses(workers: tuple[WorkerProcess, ...]) -> tuple[str, ...]:
    """The workers' addresses, whatever an earlier test did to them."""
    return _ready(workers)


def _ready(workers: tuple[WorkerProcess, ...]) -> tuple[str, ...]:
    for worker in workers:
        if not worker.process.is_running() or worker.process.status() == "zombie":
            worker.start()
    return tuple(worker.wait_until_ready().address for worker in workers)


@pytest.fixture(scope="module")
def process() -> Any:
    return linear_run.learning_process(_ROUNDS, _FEATURES)


@pytest.fixture(scope="module")
def disk_process(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, pathlib.Path]:
    """A process whose noise is on disk, and where."""
    directory = tmp_path_factory.mktemp("noise")
    process = linear_run.learning_process(_ROUNDS, noise_storage="disk", noise_directory=directory)
    return process, directory


@pytest.fixture(scope="module")
def whole(
    disk_process: tuple[Any, pathlib.Path],
    workers: tuple[WorkerProcess, ...],
    tmp_path_factory: pytest.TempPathFactory,
) -> list[np.ndarray]:
    """The models of a run that nothing happens to."""
    addresses = _ready(workers)
    return _released(disk_process[0], tmp_path_factory.mktemp("whole"), addresses, [])


def _installed(context: Any) -> Any:
    return tff.framework.get_context_stack().install(context)


def _local() -> Any:
    return tff.framework.get_context_stack().current


class _LocalHost:
    """A host of clients in this process, with what it was asked to do."""

    # All hosts share this process's context, which runs one computation at a time: a second
    # thread would find its executor closed when the first one has ended.
    _one_at_a_time = threading.Lock()

    def __init__(self, before: Callable[[], Any] = lambda: None) -> None:
        self._local = _local()
        self._before = before
        self.num_clients: list[int] = []

    def run(self, computation: Any, arguments: Sequence[Any], abandoned: threading.Event) -> Any:
        self.num_clients.append(len(arguments[1]))
        self._before()
        with self._one_at_a_time, _installed(self._local):
            return computation(*arguments)


def _datasets(num_clients: int, num_features: int = _FEATURES) -> list[tf.data.Dataset]:
    generator = np.random.default_rng(num_clients)

    def client() -> tf.data.Dataset:
        x = generator.normal(size=(4, num_features)).astype(np.float32)
        y = x[:, :1] + generator.normal(size=(4, 1)).astype(np.float32)
        return tf.data.Dataset.from_tensor_slices((x, y)).batch(2)

    return [client() for _ in range(num_clients)]


def _trained(process: Any, context: Any, data: list[tf.data.Dataset]) -> list[Any]:
    """Each round's metrics and model."""
    with _installed(context):
        state, rounds = process.initialize(), []
        for _ in range(_ROUNDS):
            output = process.next(state, data)
            state = output.state
            rounds.append((output.metrics, linear_run.weights_of(process, state)))
        return rounds


def _assert_same(one: list[Any], other: list[Any], rounding: float) -> None:
    """Models bit for bit; metrics, which are sums of floats, up to a rounding."""
    for (metrics, model), (other_metrics, other_model) in zip(one, other, strict=True):
        tf.nest.assert_same_structure(metrics, other_metrics)
        for value, other_value in zip(
            tf.nest.flatten(metrics), tf.nest.flatten(other_metrics), strict=True
        ):
            assert value.dtype == other_value.dtype
            if not np.issubdtype(value.dtype, np.floating):
                assert value == other_value
            np.testing.assert_allclose(value, other_value, rtol=rounding)
        np.testing.assert_array_equal(model, other_model)


@pytest.mark.long_cases(1)
@pytest.mark.long
@pytest.mark.parametrize(
    "num_clients",
    [pytest.param(0, marks=pytest.mark.long), pytest.param(1, marks=pytest.mark.long), 7],
)
def test_workers_give_what_one_process_gives(
    process: Any, addresses: tuple[str, ...], num_clients: int
) -> None:
    data = _datasets(num_clients)
    whole = _trained(process, _local(), data)
    assert np.all(np.diff([model for _, model in whole], axis=0) != 0)
    _assert_same(_trained(process, remote_workers.connect(addresses[:1]), data), whole, 0.0)
    two = _trained(process, remote_workers.connect(addresses), data)
    _assert_same(two, whole, _ROUNDING if num_clients > 1 else 0.0)
    # In this process and in the same order, no bit of the metrics is different either.
    hosts = DividedContext(_local(), [_LocalHost(), _LocalHost()])
    _assert_same(two, _trained(process, hosts, data), 0.0)


@pytest.mark.long
def test_noise_files_and_their_record_stay_here(
    disk_process: tuple[Any, pathlib.Path], addresses: tuple[str, ...]
) -> None:
    process, directory = disk_process
    local = _local()
    with _installed(remote_workers.connect(addresses)):
        first = process.initialize()
        released = process.next(first, _datasets(4, 2))
        again = process.next(first, _datasets(4, 2))
        np.testing.assert_array_equal(
            linear_run.weights_of(process, released.state),
            linear_run.weights_of(process, again.state),
        )
        with refuses("released", error=Exception):
            process.next(first, _datasets(5, 2))
    # The record is the one that a run without workers reads and writes.
    with _installed(local):
        alone = process.next(first, _datasets(4, 2))
        np.testing.assert_allclose(
            linear_run.weights_of(process, released.state),
            linear_run.weights_of(process, alone.state),
            atol=_ROUNDING,
        )
        with refuses("released", error=Exception):
            process.next(first, _datasets(5, 2))
    assert any(directory.rglob("row*"))


def test_the_seed_is_sent_to_nobody(
    process: Any, addresses: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[bytes] = []
    call = remote_workers._Worker._call

    def recorded(stub: Any, method: Any, request: Any) -> Any:
        sent.append(request.SerializeToString())
        return call(stub, method, request)

    monkeypatch.setattr(remote_workers._Worker, "_call", recorded)
    with _installed(remote_workers.connect(addresses)):
        state = process.initialize()
        for _ in range(2):
            state = process.next(state, _datasets(3)).state
    everything = b"".join(sent)
    # What clients have to know is found; what they have not is not, in any of its forms.
    (kernel, _) = state.global_model_weights.trainable
    assert struct.pack("<d", 1.0) in everything
    noise = state.aggregator.query_state.numerator_state
    assert not any(form in everything for form in _forms(noise.seed))
    assert not any(form in everything for form in _forms(noise.stream))
    whole_state = tf.make_tensor_proto(noise.seed).SerializeToString()
    assert any(form in whole_state for form in _forms(noise.seed))
    # Nor is the model after the last round, which nobody was told yet.
    assert kernel.tobytes() not in everything


def _forms(words: np.ndarray) -> list[bytes]:
    """How integers may stand in a message: as they are in memory, or as protocol buffers pack."""
    packed = tensor_pb2.TensorProto(int64_val=[int(words[0])])
    return [words[:1].tobytes(), words[1:].tobytes(), packed.SerializeToString()[2:]]


_BREAKS = [
    "killed within",
    pytest.param("killed before", marks=pytest.mark.long),
    pytest.param("frozen", marks=pytest.mark.long),
    pytest.param("started again", marks=pytest.mark.long),
]


@pytest.mark.long_cases(1)
@pytest.mark.long
@pytest.mark.timeout(120)
@pytest.mark.parametrize("what", _BREAKS)
def test_a_lost_worker_ends_the_run_which_resumes(
    disk_process: tuple[Any, pathlib.Path],
    whole: list[np.ndarray],
    workers: tuple[WorkerProcess, ...],
    addresses: tuple[str, ...],
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
) -> None:
    process = disk_process[0]
    # The worker is lost in the second round, when it has its clients and may have begun with them.
    computes = []
    killing = threading.Timer(0.5, workers[1].kill)
    compute = remote_workers._Worker.compute

    def broken(stub: Any, request: Any) -> Any:
        if stub._address != addresses[1]:
            return compute(stub, request)
        computes.append(request)
        if len(computes) == 2:
            if what == "killed before":
                workers[1].kill()
            elif what == "started again":
                workers[1].kill()
                workers[1].start()
                workers[1].wait_until_ready()
                grpc.channel_ready_future(stub._channel).result(timeout=30.0)
            else:
                workers[1].freeze()
            if what == "killed within":
                killing.start()
        return compute(stub, request)

    monkeypatch.setattr(remote_workers._Worker, "compute", broken)
    released: list[np.ndarray] = []
    try:
        with pytest.raises(WorkerLostError) as lost:
            _released(process, tmp_path, addresses, released)
    finally:
        monkeypatch.undo()
        if what == "killed within":
            killing.join()
        workers[1].thaw()
    message = str(lost.value)
    assert f"the TFF worker at {addresses[1]} was lost" in message
    assert f"start-tff-worker --port={addresses[1].split(':')[1]}" in message
    assert "run the same command to resume" in message
    assert "\n" not in message
    assert len(released) == 1

    if not workers[1].workers():
        workers[1].start()
        workers[1].wait_until_ready()
    _released(process, tmp_path, addresses, released)
    np.testing.assert_array_equal(released, whole)


def _released(
    process: Any, directory: pathlib.Path, addresses: tuple[str, ...], released: list[np.ndarray]
) -> list[np.ndarray]:
    """Runs the rounds that are left in a directory, and adds the models after them."""
    timeouts = Timeouts(seconds_between_keep_alives=0.3, seconds_to_answer=1.5)
    with _installed(remote_workers.connect(addresses, timeouts)):
        run = linear_run.federated_run(process, _ROUNDS)
        store = linear_run.store_of(directory)
        progress = training_loop.start(run, store)
        assert progress.num_rounds == len(released)
        for finished in training_loop.rounds(run, store, progress, StopRequest()):
            released.append(linear_run.weights_of(process, finished.state))
    return released


class _Silence(grpc.RpcError):
    """A keep-alive that was not answered in its time."""

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.DEADLINE_EXCEEDED

    def details(self) -> str:
        return "Deadline Exceeded"


class _FrozenWorker:
    """Answers nothing, and counts what it is asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def future(request: Any, timeout: float | None = None) -> Any:
            self.asked.append(name)
            answer: futures.Future[Any] = futures.Future()
            if timeout is not None:
                answer.set_exception(_Silence())
            return answer

        def method(request: Any, timeout: float) -> Any:
            self.asked.append(name)

        method.future = future  # type: ignore[attr-defined]
        return method


def test_a_frozen_worker_is_waited_for_once_in_a_round() -> None:
    """Each further call of the round would wait as long again, and so would cleaning up."""
    stub = remote_workers._Worker("127.0.0.1:1", Timeouts(seconds_between_keep_alives=0.1))
    stub._calls = frozen = _FrozenWorker()
    for _ in range(2):
        with refuses("127.0.0.1:1", error=WorkerLostError):
            stub.compute(None)
    stub.dispose(None)
    assert frozen.asked == ["Compute", "Dispose"]
    # The next round asks it again.
    stub.is_lost = False
    with refuses("127.0.0.1:1", error=WorkerLostError):
        stub.compute(None)
    assert frozen.asked == ["Compute", "Dispose"] * 2


def test_an_error_of_a_client_is_no_lost_worker(addresses: tuple[str, ...]) -> None:
    @tff.tensorflow.computation(np.float32)
    def checked(value: tf.Tensor) -> tf.Tensor:
        with tf.control_dependencies([tf.debugging.Assert(value < 5.0, ["too large"])]):
            return tf.identity(value)

    process = _sum_process(lambda value: tff.federated_map(checked, value))
    with _installed(remote_workers.connect(addresses)):
        with refuses("too large", error=grpc.RpcError):
            process(0.0, [1.0, 9.0])
        assert process(0.0, [1.0, 2.0]) == (3.0, 3.0)


def _sum_process(client_work: Callable[[Any], Any] = lambda value: value) -> Any:
    """From (state, a number for each client) to (state + sum, state + sum)."""
    add = tff.tensorflow.computation(lambda x, y: x + y, (np.float32, np.float32))

    @tff.federated_computation(
        tff.FederatedType(np.float32, tff.SERVER), tff.FederatedType(np.float32, tff.CLIENTS)
    )
    def process(state: Any, clients: Any) -> Any:
        total = tff.federated_map(add, (state, tff.federated_sum(client_work(clients))))
        return total, total

    return process


@pytest.mark.parametrize(
    ("num_clients", "shares"),
    [(0, [0]), (1, [1]), (2, [1, 1]), (3, [1, 1, 1]), (7, [2, 2, 3]), (8, [2, 3, 3])],
)
def test_clients_are_divided_evenly(num_clients: int, shares: list[int]) -> None:
    hosts = [_LocalHost() for _ in range(3)]
    clients = [2.0**client for client in range(num_clients)]
    with _installed(DividedContext(_local(), hosts)):
        assert _sum_process()(1.0, clients)[0] == 2.0**num_clients
    assert [count for host in hosts for count in host.num_clients] == shares


def test_sums_are_added_in_the_order_of_clients() -> None:
    # (1e8 - 1e8) + 1 is 1, and (1 - 1e8) + 1e8 is 0 in float32.
    waits = (0.6, 0.3, 0.0)
    hosts = [_LocalHost(lambda wait=wait: time.sleep(wait)) for wait in waits]  # type: ignore[misc]
    with _installed(DividedContext(_local(), hosts)):
        assert _sum_process()(0.0, [1e8, -1e8, 1.0]) == (1.0, 1.0)


def test_what_cannot_be_divided_is_refused() -> None:
    state = tff.FederatedType(np.int32, tff.SERVER)
    clients = tff.FederatedType(np.int32, tff.CLIENTS)

    @tff.federated_computation(state, clients)
    def secure(state: Any, values: Any) -> Any:
        return state, tff.federated_secure_sum(values, 10)

    @tff.federated_computation(state, clients)
    def twice(state: Any, values: Any) -> Any:
        first = tff.federated_broadcast(tff.federated_sum(values))
        return state, tff.federated_sum(first)

    hosts = [_LocalHost()]
    with _installed(DividedContext(_local(), hosts)):
        with refuses("aggregates"):
            secure(1, [1, 2])
        with refuses("divided"):
            twice(1, [1, 2])
    assert not hosts[0].num_clients


@pytest.mark.long
def test_a_worker_that_is_not_there_is_named() -> None:
    address = f"127.0.0.2:{free_port()}"
    with refuses(address, "start-tff-worker", error=WorkerLostError):
        remote_workers.use((address,), Timeouts(seconds_to_connect=1.0))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with refuses(address, error=WorkerLostError):
            remote_workers.use((address,), Timeouts(seconds_to_connect=1.0))
    with refuses("worker"):
        remote_workers.use(())


_NAMES = st.from_regex(r"[a-z][a-z0-9-]{0,10}[a-z0-9](\.[a-z]{2,5}){0,2}", fullmatch=True)
_HOSTS = st.one_of(
    _NAMES,
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6).map(lambda address: f"[{address}]"),
)


@given(st.lists(st.tuples(_HOSTS, st.integers(1, 65535)), min_size=1, unique=True))
def test_addresses_are_parsed(pairs: list[tuple[str, int]]) -> None:
    expected = tuple(f"{host}:{port}" for host, port in pairs)
    assert remote_workers.parse(",".join(expected)) == expected
    assert remote_workers.parse(" , ".join(expected)) == expected
    with refuses("twice"):
        remote_workers.parse(",".join([*expected, expected[0].upper()]))


@pytest.mark.parametrize(
    "text",
    [
        *("", "a:1,,b:2", "a:1,", "host", "host:", "host:http", "host:-1", "host:0", "host:65536"),
        *(":8000", "a b:8000", "-a:8000", "a..b:8000", "user@host:8000", "http://host:8000"),
        *("::1:8000", "[::1]", "[::g]:8000", "256.0.0.1:8000", "10.0.1:8000"),
    ],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with refuses("host:port", "65535"):
        remote_workers.parse(text)
