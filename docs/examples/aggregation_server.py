"""A server of private federated averaging: a coordinator, two workers, and 300 simulated devices.

    python aggregation_server.py begin run        # the plan, the key and the first state
    python aggregation_server.py worker run 0     # adds up the updates of the clients of shard 0
    python aggregation_server.py worker run 1
    python aggregation_server.py coordinator run  # draws clients, adds noise, makes models
    python aggregation_server.py devices run

A coordinator or worker that was killed at any line is started again by the same command, and the
run ends with the same bits. The rule: a file takes its name once it is whole and on the disk, and
nobody is told of a step before its file is there.
"""

import argparse
import dataclasses
import fcntl
import hashlib
import hmac
import http.client
import http.server
import io
import json
import os
import pathlib
import secrets
import shutil
import sys
import tempfile
import threading
import time
import urllib.parse
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np

import mf_aggregators as mfa
from mf_aggregators.adaptive_clip import ClipState
from mf_aggregators.aggregator import AggregatorState

Reply = tuple[int, bytes, Mapping[str, str]]


@dataclasses.dataclass(frozen=True)
class Plan:
    """Plan of a run: settings made before the first round, without a look at clients' data."""

    clients: Sequence[str]
    workers: Sequence[str] = ("127.0.0.1:8101", "127.0.0.1:8102")
    coordinator: str = "127.0.0.1:8100"
    num_parameters: int = 650
    num_rounds: int = 60
    clients_per_round: int = 20
    # How many clients are asked in a round: more than are needed, because some do not answer.
    clients_asked: int = 25
    separation: int = 10
    epsilon: float = 8.0
    delta: float = 1e-4
    clip_norm: float = 0.3
    server_rate: float = 1.0
    # The seconds after which a round is closed, if at least one client has answered by then.
    patience: float = 60.0
    pause: float = 0.2

    @classmethod
    def read(cls, folder: pathlib.Path) -> "Plan":
        """Reads the plan from the folder of a run."""
        return cls(**json.loads((folder / "plan.json").read_text()))

    def shard(self, client: str) -> int:
        """Returns the number of the one worker that accepts this client's updates."""
        return zlib.crc32(client.encode()) % len(self.workers)

    def aggregator(
        self, folder: pathlib.Path, noise_directory: pathlib.Path | None = None
    ) -> mfa.Aggregator:
        """Returns an aggregator of the run's mechanism, equal bit for bit in all processes."""
        return mfa.Aggregator(
            mfa.load(folder / "mechanism"),
            mfa.AdaptiveClip(self.clip_norm),
            self.clients_per_round,
            template=np.zeros(self.num_parameters, np.float32),
            noise_directory=noise_directory,
        )


def begin(folder: pathlib.Path, plan: Plan) -> None:
    """Creates the folder of a new run completely, or not at all."""
    if folder.exists():
        raise FileExistsError(f"{folder} is there already: a run begins in a new folder")
    if plan.clients_asked * plan.separation > len(plan.clients):
        raise ValueError("timers leave too few clients: ask fewer, or use a shorter separation")
    partial = pathlib.Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    own = partial / "coordinator"
    for each in (own, own / "noise", *(partial / f"worker-{i}" for i in range(len(plan.workers)))):
        each.mkdir(mode=0o700)
    timers = mfa.participation.MinSeparation(plan.separation)
    matrix = mfa.factorizations.banded(
        plan.num_rounds, num_bands=plan.separation, participation=timers
    )
    mfa.calibrate(matrix, timers, epsilon=plan.epsilon, delta=plan.delta).save(
        partial / "mechanism"
    )
    write(partial / "plan.json", json.dumps(dataclasses.asdict(plan)).encode())
    write(partial / "key", secrets.token_hex(32).encode())
    aggregator = plan.aggregator(partial, noise_directory=own / "noise")
    aggregator.save_state(aggregator.initialize(), own / "state-000000.npz")
    write(own / "model-000000.npz", packed(np.zeros(plan.num_parameters, np.float32)))
    partial.rename(folder)


class Worker:
    """Clips the updates of one shard of the clients, and adds them up in integers.

    A worker has no noise seed: ``record`` needs none. Its file is on the disk before a client gets
    the answer that its update was accepted.
    """

    def __init__(self, folder: pathlib.Path, shard: int) -> None:
        """Creates a worker, which resumes the round that its file has."""
        self.shard, self.key = shard, (folder / "key").read_text()
        self.plan, self.path = Plan.read(folder), folder / f"worker-{shard}" / "sum.npz"
        if not 0 <= shard < len(self.plan.workers):
            raise ValueError(f"the plan has {len(self.plan.workers)} workers, from 0")
        self.aggregator, self.lock = self.plan.aggregator(folder), threading.Lock()
        self.state = self.aggregator.initialize()
        for partial in self.path.parent.glob(".*"):
            partial.unlink()
        self.round_index, self.is_open = -1, 0
        self.clients: list[str] = []
        self.sums: list[np.ndarray] = []
        if (found := unpacked(self.path)) is not None:
            (self.round_index, self.is_open), clip, clients, *self.sums = found
            self.clients = clients.tolist()
            self.state = dataclasses.replace(self.state, clip=ClipState(*clip))

    def save(self) -> None:
        """Writes the sum of updates to disk, with the names of the clients in it."""
        progress = np.array([self.round_index, self.is_open])
        clients = np.array(self.clients, str)
        write(self.path, packed(progress, np.array(self.state.clip), clients, *self.sums))

    def respond(self, path: str, query: Mapping[str, str], ticket: str, body: bytes) -> Reply:
        """Answers a device (``/update``) or the coordinator (``/open`` and ``/close``)."""
        i, client = int(query["round"]), query.get("client", "")
        if not hmac.compare_digest(ticket, ticket_for(self.key, path, self.shard, i, client)):
            return 403, b"no ticket of this round, client and worker", {}
        with self.lock:
            if path == "/open" and i > self.round_index:
                clip = ClipState(*np.frombuffer(body, "<f8"))
                self.state = dataclasses.replace(self.state, clip=clip)
                self.round_index, self.is_open, self.clients, self.sums = i, 1, [], []
                self.save()
            if i != self.round_index or (path == "/update" and not self.is_open):
                return 409, b"the round is closed, or has not begun", {}
            if path == "/close":
                self.is_open = 0
                self.save()
                return 200, self.path.read_bytes(), {}
            if path == "/update" and client not in self.clients:
                update = np.frombuffer(body, "<f4")
                parts = self.aggregator.record(self.state, update)
                before = self.clients, self.sums
                self.clients = [*self.clients, client]
                self.sums = added(self.sums, parts)
                try:
                    self.save()
                except OSError:
                    self.clients, self.sums = before
                    raise
            return 200, str(len(self.clients)).encode(), {}


class Coordinator:
    """Draws each round's clients, adds noise to the sum of their updates, and makes the model.

    A round is four files, and each of them follows from those before it: the names of its clients,
    the sum of their updates, the state after the round, and the model.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        """Creates the coordinator, which resumes with the round after the newest model."""
        self.plan, self.key = Plan.read(folder), (folder / "key").read_text()
        self.own = folder / "coordinator"
        # The lock is held until the process ends, so that only one coordinator runs.
        self.lock = (self.own / "lock").open("w")
        fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.aggregator = self.plan.aggregator(folder, noise_directory=self.own / "noise")
        newest = max(self.own.glob("model-*.npz"))
        if (model := unpacked(newest)) is None:
            raise ValueError(f"{newest} is damaged: begin another run, and account for both")
        (self.model,) = model
        self.state = self.aggregator.load_state(newest.with_name(f"state-{newest.stem[6:]}.npz"))
        paths = sorted(self.own.glob("cohort-*.json"))
        # The file with the next round's clients may be there already.
        known = [self.path("cohort", i, "json") for i in range(self.state.round_index + 1)]
        if paths not in (known, known[:-1]):
            raise ValueError(f"the ledger in {self.own} lacks rounds: restore its cohort files")
        self.cohorts = [json.loads(path.read_text()) for path in paths]
        self.asked: dict[str, Reply] = {}
        self.deadline, self.is_over = 0.0, False
        # Delete older and unfinished files that a killed process left: some of them have the seed.
        kept = {newest.name, f"state-{newest.stem[6:]}.npz", f"sum-{newest.stem[6:]}.npz"}
        for path in (*self.own.glob(".*"), *self.own.glob("*.npz")):
            if path.name not in kept:
                path.unlink()

    def path(self, kind: str, i: int, ending: str = "npz") -> pathlib.Path:
        """Returns the path of one of the files of round i."""
        return self.own / f"{kind}-{i:06d}.{ending}"

    def step(self) -> bool:
        """Does the next step of the run; returns False if the run is over."""
        i = self.state.round_index
        if i == self.plan.num_rounds:
            self.write_statement()
            self.asked, self.is_over = {}, True
            return False
        if len(self.cohorts) == i:
            self.keep(self.drawn(i))
        if not self.asked:
            self.asked = {client: self.task(i, client) for client in self.cohorts[i]}
            self.deadline = time.monotonic() + self.plan.patience
        if (found := unpacked(self.path("sum", i))) is None:
            found = self.collected(i)
        if found is not None:
            self.release(i, found)
        return True

    def keep(self, cohort: list[str]) -> None:
        """Writes the names of the next round's clients to disk, before any of them is asked."""
        write(self.path("cohort", len(self.cohorts), "json"), json.dumps(cohort).encode())
        self.cohorts.append(cohort)

    def drawn(self, i: int) -> list[str]:
        """Draws the clients of round i among all with timers that have run out."""
        last = {client: j for j, cohort in enumerate(self.cohorts) for client in cohort}
        wait = self.plan.separation
        free = [each for each in self.plan.clients if i - last.get(each, i - wait) >= wait]
        generator = np.random.default_rng([*self.key.encode(), i])
        number = min(self.plan.clients_asked, len(free))
        return sorted(generator.choice(free, number, replace=False).tolist())

    def task(self, i: int, client: str) -> Reply:
        """Returns the reply to a client of round i, with model, worker's address and ticket."""
        shard = self.plan.shard(client)
        ticket = ticket_for(self.key, "/update", shard, i, client)
        heads = {"X-Round": str(i), "X-Worker": self.plan.workers[shard], "X-Ticket": ticket}
        return 200, self.model.astype("<f4").tobytes(), heads

    def respond(self, path: str, query: Mapping[str, str], ticket: str, body: bytes) -> Reply:
        """Answers a device's request for a task."""
        if self.is_over:
            return 410, b"the run is over", {}
        return self.asked.get(query["client"], (204, b"", {}))

    def collected(self, i: int) -> list[np.ndarray] | None:
        """Returns the clients and the sum of round i when all answered or time is up; else None."""
        shards = range(len(self.plan.workers))
        clip = np.array(self.state.clip, "<f8").tobytes()
        opened = {shard: self.ask(shard, "/open", i, clip) for shard in shards}
        answers = sum(int(each) for each in opened.values() if each is not None)
        is_late = time.monotonic() > self.deadline
        if answers < len(self.cohorts[i]) and not (is_late and answers):
            return None
        clients: list[str] = []
        sums: list[np.ndarray] = []
        for shard in [each for each in shards if opened[each] is not None]:
            if (closed := self.ask(shard, "/close", i)) is None:
                return None
            _, _, names, *parts = list(np.load(io.BytesIO(closed)).values())
            if any(self.plan.shard(each) != shard for each in names):
                raise ValueError(f"worker {shard} has clients of another shard")
            clients += names.tolist()
            sums = added(sums, parts)
        if len({*clients} & {*self.cohorts[i]}) < len(clients):
            raise ValueError(f"a sum of round {i} has a client twice, or one that was not asked")
        found = [np.array(clients), *sums]
        # Once the sum is on disk, the round can be released without its clients.
        write(self.path("sum", i), packed(*found))
        return found

    def release(self, i: int, found: Sequence[np.ndarray]) -> None:
        """Releases round i; gives it up if its noise was added to another sum before."""
        clients, *sums = found
        try:
            state, mean = self.aggregator.release(self.state, sums, len(clients), self.model)
        except mfa.Error as error:
            alarm(f"round {i} is spent: {error}")
            self.spend()
        else:
            self.save(state, self.model + np.float32(self.plan.server_rate) * mean)
        self.report(len(clients))

    def spend(self) -> None:
        """Gives up the next round, so that its clients count and its noise is never used."""
        if len(self.cohorts) == self.state.round_index:
            self.keep([])
        self.path("spent", self.state.round_index, "txt").touch()
        self.save(self.aggregator.spend(self.state), self.model)

    def save(self, state: AggregatorState, model: np.ndarray) -> None:
        """Writes the state after a round and then the model, with which the round is complete."""
        i = self.state.round_index
        self.aggregator.save_state(state, self.path("state", i + 1))
        write(self.path("model", i + 1), packed(model))
        self.state, self.model, self.asked = state, model, {}
        for kind in ("model", "state", "sum"):
            self.path(kind, i).unlink(missing_ok=True)

    def report(self, num_updates: int) -> None:
        """Writes metrics of the run without secrets, as a text file for Prometheus."""
        counts = [len(each) for each in self.cohorts]
        spent = mfa.spent(
            self.aggregator.mechanism, self.cohorts, self.plan.delta, round_counts=counts
        )
        numbers = {
            **self.aggregator.metrics(self.state),
            "epsilon_planned": spent.planned.epsilon,
            "epsilon_so_far_if_participation_ignores_data": spent.so_far.epsilon,
            "clients_asked": counts[-1],
            "updates_summed": num_updates,
            "rounds_spent": len([*self.own.glob("spent-*")]),
            "clients_so_far": len({client for cohort in self.cohorts for client in cohort}),
            "free_bytes": shutil.disk_usage(self.own).free,
            "time_of_round": int(time.time()),
        }
        lines = [f"mfa_{name} {value}\n" for name, value in numbers.items()]
        write(self.own / "metrics.prom", "".join(lines).encode())

    def write_statement(self) -> None:
        """Writes the privacy statement of the whole run."""
        statement = self.aggregator.statement(
            self.cohorts,
            state=self.state,
            # All clients that were asked count as participants, even if their updates did not
            # arrive.
            round_counts=[len(each) for each in self.cohorts],
            population=len(self.plan.clients),
            public_data="none",
            enforcement="The coordinator asks no client whose timer has not ended.",
            delta=self.plan.delta,
        )
        statement.write(self.own / "PRIVACY.md", self.own / "PRIVACY.json")

    def ask(self, shard: int, path: str, i: int, body: bytes = b"") -> bytes | None:
        """Sends a request to a worker and returns the answer; None if the request fails."""
        ticket = ticket_for(self.key, path, shard, i)
        try:
            status, found, _ = call(self.plan.workers[shard], f"{path}?round={i}", body, ticket)
        except (OSError, http.client.HTTPException) as error:
            status, found = 0, str(error).encode()
        if status != 200:
            alarm(f"worker {shard}: {found.decode(errors='replace')}")
        return found if status == 200 else None


def devices(folder: pathlib.Path) -> None:
    """Simulates all devices, each with five images of digits, until the run is over."""
    from sklearn import datasets

    plan, over = Plan.read(folder), False
    images, labels = datasets.load_digits(return_X_y=True)
    images, one_hot = np.hstack([images / 16, np.ones((len(images), 1))]), np.eye(10)[labels]
    while not over:
        for number, client in enumerate(plan.clients):
            status, body, heads = call_patiently(plan.coordinator, f"/task?client={client}")
            over = over or status == 410
            if status != 200:
                continue
            own = slice(5 * number, 5 * number + 5)
            model = np.frombuffer(body, "<f4").reshape(65, 10)
            update = (trained(model, images[own], one_hot[own]) - model).astype("<f4").tobytes()
            target = f"/update?round={heads['X-Round']}&client={client}"
            call_patiently(heads["X-Worker"], target, update, heads["X-Ticket"])
    model = np.load(max((folder / "coordinator").glob("model-*.npz")))["arr_0"].reshape(65, 10)
    right = (images[1500:] @ model).argmax(axis=1) == labels[1500:]
    print(f"test accuracy {right.mean():.3f}")


def trained(model: np.ndarray, images: np.ndarray, one_hot: np.ndarray) -> np.ndarray:
    """Trains a linear classifier with three steps on a device's images, and returns it."""
    for _ in range(3):
        scores = np.exp(images @ model)
        errors = scores / scores.sum(axis=1, keepdims=True) - one_hot
        model = model - 0.5 * images.T @ errors / len(images)
    return model


def ticket_for(key: str, path: str, shard: int, i: int, client: str = "") -> str:
    """Returns the ticket that a request needs for a worker to accept it."""
    words = json.dumps([path, shard, i, client])
    return hmac.new(key.encode(), words.encode(), hashlib.sha256).hexdigest()


def write(path: pathlib.Path, content: bytes) -> None:
    """Writes a file atomically and durably, readable for its owner alone."""
    descriptor, partial = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        os.replace(partial, path)
    except OSError:
        os.unlink(partial)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def added(sums: list[np.ndarray], parts: list[np.ndarray]) -> list[np.ndarray]:
    """Returns the sums of two lists of integer arrays; an empty list counts as zeros."""
    if not (sums and parts):
        return sums or parts
    return [a + b for a, b in zip(sums, parts, strict=True)]


def packed(*arrays: np.ndarray) -> bytes:
    """Returns arrays as the bytes of an .npz file."""
    file = io.BytesIO()
    np.savez(file, *arrays)
    return file.getvalue()


def unpacked(path: pathlib.Path) -> list[np.ndarray] | None:
    """Returns the arrays of an .npz file; None if the file is missing or damaged."""
    try:
        with np.load(path, allow_pickle=False) as found:
            return list(found.values())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        alarm(f"{path} is damaged: {error}")
        return None


def alarm(words: str) -> None:
    """Writes an alarm for the operator to the log."""
    print(f"ALARM {words}", file=sys.stderr, flush=True)


def call(address: str, target: str, body: bytes = b"", ticket: str = "") -> Reply:
    """Sends one HTTP request, and returns the reply."""
    connection = http.client.HTTPConnection(address, timeout=60.0)
    try:
        connection.request("POST", target, body, {"X-Ticket": ticket})
        response = connection.getresponse()
        return response.status, response.read(), dict(response.getheaders())
    finally:
        connection.close()


def call_patiently(address: str, target: str, body: bytes = b"", ticket: str = "") -> Reply:
    """Sends an HTTP request again and again, until a server replies without an error of its own."""
    while True:
        try:
            if (reply := call(address, target, body, ticket))[0] < 500:
                return reply
        except (OSError, http.client.HTTPException):
            pass
        time.sleep(0.05)


def serve(
    address: str,
    respond: Callable[[str, Mapping[str, str], str, bytes], Reply],
    largest_body: int,
) -> None:
    """Starts an HTTP server that answers each request in a thread."""

    class Handler(http.server.BaseHTTPRequestHandler):
        timeout = 60.0

        def do_POST(self) -> None:
            found = urllib.parse.urlsplit(self.path)
            query = dict(urllib.parse.parse_qsl(found.query))
            try:
                size = int(self.headers.get("Content-Length", 0))
                if not 0 <= size <= largest_body:
                    raise ValueError(f"a body has at most {largest_body} bytes")
                body, ticket = self.rfile.read(size), self.headers.get("X-Ticket", "")
                status, answer, heads = respond(found.path, query, ticket, body)
            except (KeyError, TypeError, ValueError) as error:
                status, answer, heads = 400, f"{error}".encode(), {}
            except OSError as error:
                alarm(f"{error}")
                status, answer, heads = 507, b"try again later", {}
            self.send_response(status)
            for name, value in {**heads, "Content-Length": str(len(answer))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            """Logs nothing, to keep the names of clients out of the log."""

    host, port = address.rsplit(":", 1)
    server = http.server.ThreadingHTTPServer((host, int(port)), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()


def main(role: str, folder: pathlib.Path, shard: int = 0) -> None:
    """Runs one of this script's commands."""
    os.umask(0o077)
    if role == "begin":
        return begin(folder, Plan([f"client-{i:03d}" for i in range(300)]))
    if role == "devices":
        return devices(folder)
    if role == "worker":
        worker = Worker(folder, shard)
        size = 4 * worker.plan.num_parameters
        serve(worker.plan.workers[shard], worker.respond, max(size, 64))
    else:
        coordinator = Coordinator(folder)
        if role == "spend":
            return coordinator.spend()
        serve(coordinator.plan.coordinator, coordinator.respond, 0)
        while coordinator.step():
            time.sleep(coordinator.plan.pause)
    # The server answers until the process is ended.
    threading.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("role", choices=("begin", "coordinator", "worker", "devices", "spend"))
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("shard", type=int, nargs="?", default=0)
    given = parser.parse_args()
    try:
        main(given.role, given.folder, given.shard)
    except (mfa.Error, OSError, ValueError) as problem:
        sys.exit(f"{given.role}: {problem}")
