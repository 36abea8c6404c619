"""The example of a server releases the same bits, however often it is killed or its disk is full.

A run that was disturbed is compared with one that was not, file by file, and that one with a loop
around ``mfa.Aggregator``.
"""

import json
import pathlib
import shutil

import numpy as np
import pytest

from docs.examples import aggregation_server
from docs.examples.aggregation_server import Coordinator, Plan, Reply, Worker, ticket_for
from docs.examples.disturbed_server import COORDINATOR, WORKERS, Role, Site, update_of
from tests.examples import of_many
from tests.simulations.worker_processes import free_port


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The folder of a run before its first round."""
    folder = tmp_path_factory.mktemp("begun") / "run"
    plan = Plan(
        clients=[f"client-{i}" for i in range(8)],
        workers=[f"127.0.0.1:{free_port()}" for _ in WORKERS],
        coordinator=f"127.0.0.1:{free_port()}",
        num_parameters=5,
        num_rounds=3,
        clients_per_round=3,
        clients_asked=4,
        separation=2,
        pause=0.01,
    )
    aggregation_server.begin(folder, plan)
    return folder


@pytest.fixture(scope="module")
def whole(begun: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> Site:
    """A run that nothing disturbed."""
    site = Site(_copied(begun, tmp_path_factory.mktemp("whole")))
    site.finish()
    return site


def _copied(begun: pathlib.Path, directory: pathlib.Path) -> pathlib.Path:
    return pathlib.Path(shutil.copytree(begun, directory / "run"))


def _read(site: Site, name: str) -> str:
    return (site.folder / "coordinator" / name).read_text(encoding="utf-8")


def _check_model(site: Site, begun: pathlib.Path, *spent: int) -> None:
    """Compares the model with that of rounds in one process, of which some are spent."""
    aggregator = site.plan.aggregator(begun)
    state = aggregator.load_state(begun / "coordinator" / "state-000000.npz")
    model = np.zeros(5, np.float32)
    for i in range(3):
        if i in spent:
            state = aggregator.spend(state)
            continue
        cohort = json.loads(_read(site, f"cohort-{i:06d}.json"))
        state, mean = aggregator.next(state, [update_of(client, i) for client in cohort])
        model += np.float32(site.plan.server_rate) * mean
    found = np.load(site.folder / "coordinator" / "model-000003.npz")["arr_0"]
    np.testing.assert_array_equal(found, model)


def test_a_run_releases_what_a_loop_does(begun: pathlib.Path, whole: Site) -> None:
    _check_model(whole, begun)
    assert float(json.loads(_read(whole, "PRIVACY.json"))["headline"]["epsilon"]) <= 8.0
    numbers = dict(line.split() for line in _read(whole, "metrics.prom").splitlines())
    assert (numbers["mfa_rounds_released"], numbers["mfa_updates_summed"]) == ("3", "4")
    assert 7.9 < float(numbers["mfa_epsilon_planned"]) <= 8.0
    secrets = (*whole.folder.glob("*/**"), *whole.folder.glob("*/**/*.npz"), whole.folder / "key")
    for path in [each for each in secrets if "mechanism" not in each.parts]:
        assert not path.stat().st_mode & 0o077, path


_EVERY_LINE = pytest.param(float(of_many(1, 0)) or 0.12, marks=pytest.mark.long)


@pytest.mark.parametrize("share", [0.02, _EVERY_LINE])
def test_a_run_that_is_killed_at_any_line_leaves_the_same_files(
    begun: pathlib.Path, whole: Site, tmp_path: pathlib.Path, share: float
) -> None:
    lines, num_kills = {}, 0
    for role in (COORDINATOR, *WORKERS):
        ran = whole.lines_of(role)
        places = np.linspace(0, len(ran) - 1, round(share * len(ran)) + 1).astype(int)
        lines[role] = [ran[place] for place in places]
    total = sum(map(len, lines.values()))
    # A line that runs once needs a run of its own.
    while left := sum(map(len, lines.values())):
        site = Site(_copied(begun, tmp_path / str(left)), lines)
        site.finish()
        assert site.kept() == whole.kept()
        num_kills += site.num_kills
    assert num_kills > 0.8 * total


@pytest.mark.parametrize(
    ("role", "most_bytes"),
    # The names of a round's clients; the digest of a sum; a state; a worker's sum.
    [(COORDINATOR, 0), (COORDINATOR, 60), (COORDINATOR, 1500), (WORKERS[0], 0)],
)
@pytest.mark.short_cases(2)
def test_a_run_whose_disk_was_full_leaves_the_same_files(
    begun: pathlib.Path, whole: Site, tmp_path: pathlib.Path, role: Role, most_bytes: int
) -> None:
    site = Site(_copied(begun, tmp_path), most_bytes={role: most_bytes})
    site.finish()
    assert site.num_refused
    assert site.kept() == whole.kept()


def test_a_round_whose_sums_are_lost_is_spent(
    begun: pathlib.Path, whole: Site, tmp_path: pathlib.Path
) -> None:
    source = pathlib.Path(aggregation_server.__file__).read_text().splitlines()
    (number,) = (i for i, text in enumerate(source, 1) if "self.save(state, self.model +" in text)
    site = Site(_copied(begun, tmp_path), {COORDINATOR: [f"aggregation_server.py:{number}"]})
    site.keep_up()
    while site.is_up(COORDINATOR):
        site.turn()
    site.end()
    for path in (*site.folder.glob("worker-*/sum.npz"), *site.folder.glob("*/sum-*")):
        path.unlink()
    # The devices of the first round send other updates now.
    while not (site.folder / "coordinator" / "spent-000000.txt").exists():
        site.turn(-1.0)
    site.finish()
    _check_model(site, begun, 0)
    stated, usual = (json.loads(_read(each, "PRIVACY.json")) for each in (site, whole))
    # Its clients have taken part all the same.
    for name in ("planned", "observed", "participation", "headline"):
        assert stated[name] == usual[name]


def test_a_client_counts_once(begun: pathlib.Path, tmp_path: pathlib.Path) -> None:
    folder = _copied(begun, tmp_path)
    worker, body = Worker(folder, 0), update_of("client-0", 0).tobytes()
    clip = np.array(worker.state.clip, "<f8").tobytes()

    def reply(path: str, client: str = "", shard: int = 0, content: bytes = body) -> Reply:
        ticket = ticket_for(worker.key, path, shard, 0, client)
        return worker.respond(path, {"round": "0", "client": client}, ticket, content)

    assert reply("/update", "client-0")[0] == 409
    assert reply("/open", content=clip)[:2] == (200, b"0")
    assert reply("/update", "client-0")[:2] == (200, b"1")
    sums = worker.sums
    assert reply("/update", "client-0")[:2] == (200, b"1")
    assert worker.sums is sums
    assert reply("/update", "client-1", shard=1)[0] == 403
    with pytest.raises(ValueError, match="float32"):
        reply("/update", "client-1", content=body[4:])
    assert reply("/close")[0] == 200
    assert reply("/update", "client-1")[0] == 409
    # After a kill, the worker has all that it has thanked for.
    assert Worker(folder, 0).clients == ["client-0"]
    np.testing.assert_array_equal(Worker(folder, 0).sums[0], sums[0])


def test_two_coordinators_do_not_run(begun: pathlib.Path, tmp_path: pathlib.Path) -> None:
    folder = _copied(begun, tmp_path)
    first = Coordinator(folder)
    with pytest.raises(BlockingIOError):
        Coordinator(folder)
    # A round may be given up before its clients are drawn.
    first.spend()
    first.lock.close()
    second = Coordinator(folder)
    assert (second.state.round_index, second.cohorts) == (1, [[]])
    second.lock.close()


@pytest.mark.parametrize("name", ["cohort-000001.json", "model-000003.npz"])
def test_a_folder_that_is_damaged_is_refused(
    whole: Site, tmp_path: pathlib.Path, name: str
) -> None:
    damaged = _copied(whole.folder, tmp_path) / "coordinator" / name
    damaged.write_bytes(b"PK")
    if "cohort" in name:
        damaged.unlink()
    with pytest.raises(ValueError, match=r"damaged|lacks rounds"):
        Coordinator(tmp_path / "run")
