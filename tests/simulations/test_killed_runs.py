"""Runs that are killed at random moments and resumed release what one without a pause releases.

A run of each storage of the noise is killed again and again until it is through, a dozen times in
all, or twice as often with every case: at times that are uniform over rounds, and while files of a
state, of the ledger or of the noise are written.
"""

import concurrent.futures
import contextlib
import dataclasses
import json
import os
import pathlib
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable

import numpy as np
import psutil
import pytest
import tensorflow as tf

from mf_aggregators.kernel.ledger import ObservedParticipation
from mf_aggregators.participation import MinSeparation
from mf_aggregators.privacy.guarantees import keeps_plan
from simulations.devices.device_behaviour import DeviceBehaviour
from simulations.devices.device_populations import DevicePopulation
from simulations.runs.run_directory import ParticipationLedger, RunDirectory
from tests.examples import of_many
from tests.simulations import linear_run
from tests.simulations.command_processes import CommandServer

# Some fifteen processes, each of which makes its graphs: minutes on a machine that has other work.
pytestmark = [pytest.mark.begun_first, pytest.mark.long, pytest.mark.timeout(1800)]

_SECONDS_TO_GET_THERE = 180.0


_NUM_ROUNDS = 24
# When each process of a run is killed, by storage, in an order of its own.
_MOMENTS = {
    storage: random.Random(storage).sample(moments, len(moments))
    for storage, moments in {
        "disk": ["any", "any", "saving state", "saving state", "saving ledger", "making noise"]
        + of_many(1, 0) * ["any", "any", "any", "saving state", "making noise"],
        "state": ["any"] * 4
        + ["saving state", "saving ledger"]
        + of_many(1, 0) * ["any", "any", "any", "saving state", "saving state"],
    }.items()
}
# The numbers of kills after which a byte of the newest state is altered.
_DAMAGED_AFTER = (2, 4, 8)


class _Killable:
    """A process that does the rounds that are left of a run, and TFF's workers that it starts."""

    def __init__(
        self, commands: CommandServer, directory: pathlib.Path, storage: str, num_rounds: int
    ) -> None:
        self._process = commands.start(
            "tests.simulations.linear_run", storage, str(num_rounds), str(directory)
        )
        self._directory = directory

    def marks(self) -> list[str]:
        """The lines of its file of marks."""
        path = self._directory / f"marks-{self._process.number}"
        return path.read_text().splitlines() if path.exists() else []

    def wait_until(self, condition: Callable[[], bool], pause: float = 0.002) -> None:
        """Waits for a moment of the run, or its end, looking again after each pause."""
        deadline = time.monotonic() + _SECONDS_TO_GET_THERE
        while not condition() and not (self._directory / "done").exists():
            assert self._process.is_running(), self._process.errors()[-2000:]
            assert time.monotonic() < deadline
            time.sleep(pause)

    def wait_for_marks(self, rounds_begun: int) -> None:
        """Waits until it has begun so many rounds."""
        self.wait_until(
            lambda: sum(mark.startswith("began") for mark in self.marks()) >= rounds_begun,
            pause=0.02,
        )

    def wait_for_end(self) -> None:
        """Waits until the run is through."""
        self.wait_until(lambda: False, pause=0.1)

    def kill(self) -> list[psutil.Process]:
        """Kills the process alone, and returns the workers that it leaves behind."""
        return self._process.kill()


def _end(processes: list[psutil.Process]) -> None:
    for process in processes:
        # The handle of psutil never means another process of the same number.
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=10)


@dataclasses.dataclass(frozen=True)
class _KilledRun:
    """A run that was killed until it was through.

    Attributes:
      directory: The directory of the run.
      whole: The directory of a run without a pause.
      landed: What the run was doing at each kill.
      num_damaged: How many states were altered between two processes.
    """

    directory: pathlib.Path
    whole: pathlib.Path
    landed: list[str]
    num_damaged: int


def _kill_until_through(
    commands: CommandServer,
    directory: pathlib.Path,
    whole: pathlib.Path,
    noise_storage: str,
) -> _KilledRun:
    """Goes on from the first state of the whole run, which has a random name for noise files."""
    while not (whole / "states" / "round_0").exists():
        time.sleep(0.02)
    # As a store makes it: one that is open to others is refused.
    (directory / "states").mkdir(mode=0o700)
    shutil.copytree(whole / "states" / "round_0", directory / "states" / "round_0")
    ParticipationLedger(linear_run.CLIENTS).save(directory / "ledger.npz")
    rng = random.Random(noise_storage)
    landed: list[str] = []
    num_damaged = 0
    orphans: list[psutil.Process] = []
    for number, moment in enumerate(_MOMENTS[noise_storage]):
        process = _Killable(commands, directory, noise_storage, _NUM_ROUNDS)
        process.wait_for_marks(1)
        # Workers of a killed process live on for a while, and may still write noise files.
        _end(orphans)
        _wait_for(moment, process, directory, rng)
        orphans = process.kill()
        if (directory / "done").exists():
            break
        landed.append(_where(process.marks(), directory))
        if rng.random() < 0.5:
            _end(orphans)
        if number in _DAMAGED_AFTER:
            num_damaged += _alter_newest_state(directory, rng)
    process = _Killable(commands, directory, noise_storage, _NUM_ROUNDS)
    process.wait_for_end()
    _end([*orphans, *process.kill()])
    return _KilledRun(directory, whole, landed, num_damaged)


def _wait_for(
    moment: str,
    process: _Killable,
    directory: pathlib.Path,
    rng: random.Random,
) -> None:
    """Waits until it is time to kill a process whose first round has begun."""
    if moment == "any":
        # The first round of a process takes longer, because its graphs are still being made.
        whole_rounds = rng.randrange(2)
        process.wait_for_marks(1 + whole_rounds)
        time.sleep(rng.uniform(0.0, 0.7 if whole_rounds else 2.0))
    elif moment == "making noise":
        before = _noise_files(directory)
        process.wait_until(lambda: _noise_files(directory) != before)
    elif moment == "saving ledger":
        process.wait_until(lambda: any(directory.glob(".ledger.npz.*")))
    else:
        process.wait_until(lambda: any((directory / "states").glob("unfinished/*")))
        time.sleep(rng.uniform(0.0, 0.08))


def _noise_files(directory: pathlib.Path) -> dict[pathlib.Path, int]:
    times = {}
    # Unlike pathlib, it puts up with directories that are gone again.
    for parent, _, names in os.walk(directory / "noise"):
        for path in (pathlib.Path(parent, name) for name in names):
            with contextlib.suppress(FileNotFoundError):
                times[path] = path.stat().st_mtime_ns
    return times


def _where(marks: list[str], directory: pathlib.Path) -> str:
    """Says what a killed process was doing."""
    what, _, index = marks[-1].partition(" ")
    if what == "began":
        return "in a round"
    if what != "saving":
        return "between rounds"
    if any(directory.glob(".ledger.npz.*")):
        return "saving: ledger"
    unfinished = [path.name for path in (directory / "states").glob("unfinished/*")]
    if any("temp" in name for name in unfinished):
        return "saving: state"
    if unfinished:
        return "saving: checksums"
    if (directory / "states" / f"round_{int(index) + 1}").exists():
        return "saving: state is there"
    return "saving: begin"


def _alter_newest_state(directory: pathlib.Path, rng: random.Random) -> int:
    """Flips a bit of the values of the newest state, if there is one before it."""
    states = sorted(
        (directory / "states").glob("round_*"), key=lambda path: int(path.name.split("_")[1])
    )
    if len(states) < 2:
        return 0
    (values,) = states[-1].glob("variables/variables.data*")
    contents = bytearray(values.read_bytes())
    contents[rng.randrange(len(contents))] ^= 1 << rng.randrange(8)
    values.write_bytes(contents)
    return 1


@pytest.fixture(scope="module")
def runs(
    commands: CommandServer, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, _KilledRun]:
    """By storage, a run that was killed, beside one without a pause."""
    with concurrent.futures.ThreadPoolExecutor() as pool:
        whole = {storage: tmp_path_factory.mktemp("whole") for storage in _MOMENTS}
        processes = [
            _Killable(commands, whole[storage], storage, _NUM_ROUNDS) for storage in _MOMENTS
        ]
        futures = {
            storage: pool.submit(
                _kill_until_through,
                commands,
                tmp_path_factory.mktemp("killed"),
                whole[storage],
                storage,
            )
            for storage in _MOMENTS
        }
        for process in processes:
            process.wait_for_end()
            _end(process.kill())
        return {storage: futures[storage].result() for storage in _MOMENTS}


def _released(directory: pathlib.Path, num_rounds: int) -> list[list[list[np.ndarray]]]:
    """For each round, what was released in it: once, or by several processes."""
    released: list[list[list[np.ndarray]]] = [[] for _ in range(num_rounds)]
    for path in (directory / "released").iterdir():
        # A killed process may leave a part of a file.
        if not path.name.startswith("."):
            with np.load(path) as arrays:
                released[int(path.name.split("-")[0])].append([arrays[name] for name in arrays])
    return released


def _final_states(directory: pathlib.Path) -> dict[str, dict[str, np.ndarray]]:
    """Every value of every state that is left, past the store."""
    states = {}
    for path in (directory / "states").iterdir():
        reader = tf.train.load_checkpoint(str(path / "variables" / "variables"))
        names = reader.get_variable_to_shape_map()
        states[path.name] = {name: reader.get_tensor(name) for name in names}
    return states


def _assert_same(ours: list[np.ndarray], theirs: list[np.ndarray]) -> None:
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == other.dtype
        np.testing.assert_array_equal(mine, other)


def test_the_kills_landed(runs: dict[str, _KilledRun]) -> None:
    landed = Counter(where for killed in runs.values() for where in killed.landed)
    num_damaged = sum(killed.num_damaged for killed in runs.values())
    print(landed)
    assert landed.total() >= of_many(20, 11)
    assert landed["in a round"] >= of_many(4, 2)
    assert landed["saving: state"] >= of_many(2, 1)
    assert num_damaged >= 2


def test_whatever_was_released_is_what_a_run_without_a_pause_releases(
    runs: dict[str, _KilledRun],
) -> None:
    for killed in runs.values():
        expected = _released(killed.whole, _NUM_ROUNDS)
        for index, releases in enumerate(_released(killed.directory, _NUM_ROUNDS)):
            # A kill between a round's save and its release leaves it to nobody.
            for release in releases:
                _assert_same(release, expected[index][0])


def test_the_last_states_and_ledgers_are_those_of_a_run_without_a_pause(
    runs: dict[str, _KilledRun],
) -> None:
    for killed in runs.values():
        ours, theirs = _final_states(killed.directory), _final_states(killed.whole)
        last = _NUM_ROUNDS
        assert set(ours) == set(theirs) == {f"round_{last - 1}", f"round_{last}"}
        for version in ours:
            assert set(ours[version]) == set(theirs[version])
            for name, value in ours[version].items():
                np.testing.assert_array_equal(value, theirs[version][name])

        ledger = ParticipationLedger.load(killed.directory / "ledger.npz")
        other = ParticipationLedger.load(killed.whole / "ledger.npz")
        assert ledger.num_rounds == other.num_rounds == last
        _assert_same(list(ledger.cohorts), list(other.cohorts))
        observed = ObservedParticipation.of(ledger.rounds_of_clients(), last)
        assert keeps_plan(linear_run.PARTICIPATION, observed)
        assert not [
            path.name for path in killed.directory.iterdir() if path.name.startswith(".ledger")
        ]


def test_rounds_between_kills_have_the_clients_of_their_own_flags(
    commands: CommandServer, tmp_path: pathlib.Path
) -> None:
    """The ledger is that of an unbroken simulation whose server changes after the same rounds."""
    directory = RunDirectory(tmp_path / "run")
    command = ["simulations.examples.digits", f"--output_dir={directory.path}"]
    command += ["--num_rounds=30", "--clients_per_round=10", "--separation=2"]
    command += ["--mechanism=identity", "--dropout_probability=0.3", "--over_selection=1.3"]
    unchanged: list[str] = []
    changed = ["--minimum_uploads=2", "--over_selection=1"]

    def num_rounds() -> int:
        ledger = directory.ledger
        return ParticipationLedger.load(ledger).num_rounds if ledger.exists() else 0

    def kill_after_some_rounds(*flags: str) -> None:
        enough, deadline = num_rounds() + 3, time.monotonic() + _SECONDS_TO_GET_THERE
        process = commands.start(*command, *flags)
        while num_rounds() < enough:
            assert process.is_running(), process.errors()[-2000:]
            assert time.monotonic() < deadline
            time.sleep(0.02)
        _end(process.kill())

    for flags in (unchanged, changed):
        kill_after_some_rounds(*flags)
        # A round that has its noise and is not in the ledger yet keeps its flags.
        while len([*directory.noise.glob("released/*/round-*")]) > num_rounds():
            kill_after_some_rounds(*flags)
    status, _, errors = commands.start(*command).wait()
    assert status == 0, errors
    config = json.loads((directory.path / "config.json").read_text())
    (first, before), (second, between) = config["changed_flags"].items()
    assert before == {"minimum_uploads": None, "over_selection": 1.3}
    assert between == {"minimum_uploads": 2, "over_selection": 1.0}
    usual = DeviceBehaviour(dropout_probability=0.3, over_selection=1.3)
    other = dataclasses.replace(usual, **between)
    ledger = ParticipationLedger.load(directory.ledger)
    population = DevicePopulation(
        len(ledger.client_ids), MinSeparation(2), 10, usual, config["cohort_seed"]
    )
    for index, cohort in enumerate(ledger.cohorts):
        population.change(other if int(first) <= index < int(second) else usual)
        np.testing.assert_array_equal(population.next_round().cohort, cohort)
    sizes = [len(cohort) for cohort in ledger.cohorts]
    assert {*sizes[: int(first)], *sizes[int(second) :]} == {10}
    assert min(sizes) < 10
