"""Whole runs: one as a user starts it, those that are stopped from forks, others in the tests."""

import csv
import itertools
import json
import os
import pathlib
import subprocess
import sys
import time
from typing import Any

import numpy as np
import psutil
import pytest

import mf_aggregators as mfa
from mf_aggregators.commands import command_line
from mf_aggregators.participation import (
    PoissonSampling,
)
from mf_aggregators.privacy import statement_file
from simulations.devices.device_behaviour import DeviceBehaviour
from simulations.devices.device_populations import DevicePopulation
from simulations.runs import (
    run_command,
)
from simulations.runs.run_config import RunConfig
from simulations.runs.run_directory import ParticipationLedger, RunDirectory
from simulations.runs.run_plan import Run
from stackoverflow_nwp import federated_text, run_stackoverflow
from stackoverflow_nwp.federated_text import Example
from tests import console_commands
from tests.refusals import refuses
from tests.simulations.command_processes import CommandServer
from tests.simulations.parsed_flags import config_of

pytestmark = pytest.mark.begun_first

_WORDS = ("the", "model", "returns", "a", "list", "of", "values", ".")
_NUM_CLIENTS = 24

_COMMAND = run_stackoverflow.command()


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    generator = np.random.default_rng(0)
    examples = []
    for split, clients in (("train", _NUM_CLIENTS), ("heldout", 4), ("test", 4)):
        for client in range(clients):
            for _ in range(6):
                start = int(generator.integers(len(_WORDS)))
                words = [_WORDS[(start + i) % len(_WORDS)] for i in range(7)]
                examples.append(Example(f"{split}_{client}", split, " ".join(words)))
    path = tmp_path_factory.mktemp("data") / "small.sqlite"
    federated_text.write(path, examples)
    return path


def _arguments(dataset: pathlib.Path, output: pathlib.Path, *more: str) -> list[str]:
    given = {each.partition("=")[0] for each in more}
    paths = {"--dataset": dataset, "--cache_dir": dataset.parent, "--output_dir": output}
    return [
        *(f"{name}={path}" for name, path in paths.items() if name not in given),
        "--num_rounds=6",
        "--clients_per_round=6",
        "--vocab_size=8",
        "--sequence_length=8",
        "--embedding_size=4",
        "--lstm_size=4",
        "--delta=0.01",
        "--evaluate_every=2",
        "--format=json",
        *more,
    ]


def _options(arguments: list[str]) -> RunConfig:
    return config_of(_COMMAND, *arguments)


_MODULE = "stackoverflow_nwp.run_stackoverflow"
# The same, and quicker.
_WITH_A_SMALLER_MODEL = "tests.stackoverflow_nwp.last_word_model"


def _start_as_a_user(arguments: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", _MODULE, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"},
    )


def _interrupted(
    commands: CommandServer, arguments: list[str], output: pathlib.Path
) -> tuple[int, str, str]:
    """Presses Ctrl-C in a run after its first round; what it left."""
    process = commands.start(_WITH_A_SMALLER_MODEL, *arguments)
    while process.is_running() and not (output / "checkpoints" / "round_1").exists():
        time.sleep(0.05)
    process.interrupt()
    return process.wait()


def _rows(output: pathlib.Path) -> list[dict[str, str]]:
    with (output / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def _check_directory(output: pathlib.Path, rounds: int) -> dict[str, Any]:
    """What must hold of any run directory, finished or not; returns privacy.json."""
    config = json.loads((output / "config.json").read_text())
    assert config["flags"]["num_rounds"] == 6
    assert config["versions"]["tensorflow-federated"] == "0.87.0"
    assert [row["round"] for row in _rows(output)] == [str(i + 1) for i in range(rounds)]
    with np.load(output / "participation.npz") as archive:
        assert int(archive["num_rounds"]) >= rounds
        offsets, all_rounds = archive["offsets"], archive["rounds"]
        assert len(archive["client_ids"]) == _NUM_CLIENTS
        for first, last in itertools.pairwise(offsets):
            # 24 clients in cohorts of 6: the separation is 4.
            assert np.all(np.diff(all_rounds[first:last]) >= 4)
    assert any((output / "tensorboard").iterdir())
    assert any((output / "checkpoints").iterdir())
    assert (output / "checkpoints").stat().st_mode & 0o077 == 0
    assert (output / "factorization" / "factorization.json").exists()
    assert (output / "PRIVACY.md").read_text().startswith("# Privacy statement")
    privacy: dict[str, Any] = json.loads((output / "privacy.json").read_text())
    assert privacy["adjacency"] == "zero-out"
    assert statement_file.read(output / "privacy.json") == privacy
    return privacy


@pytest.mark.long
def test_a_private_run_from_start_to_statement(
    dataset: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    output = tmp_path / "run"
    process = _start_as_a_user(_arguments(dataset, output))
    workers: set[int] = set()
    while process.poll() is None:
        children = psutil.Process(process.pid).children() if process.poll() is None else []
        workers |= {child.pid for child in children}
        time.sleep(0.2)
    out, err = process.communicate()
    assert process.returncode == 0, err
    result = json.loads(out)
    assert result.keys() >= {"output_dir", "rounds", "test_accuracy", "privacy"}
    assert result["rounds"] == 6
    privacy = _check_directory(output, 6)
    assert privacy == result["privacy"]
    assert privacy["status"] == "finished"
    assert privacy["is_private"] is True
    assert privacy["keeps_plan"] is True
    planned, observed = privacy["planned"], privacy["observed"]
    assert planned["epsilon"] == "8"
    assert float(observed["epsilon"]) <= 8.0
    assert planned["schema"]["separation"] == 4
    for noise in ("grappler", "CUDA", "cuda", "gRPC", "TensorRT", "Warning"):
        assert noise not in err
    # The seed of the noise stands in the states alone.
    assert privacy["facts"]["seed_is_fixed"]["value"] is False
    assert workers
    assert not any(psutil.pid_exists(pid) for pid in workers)


@pytest.mark.long
def test_ctrl_c_leaves_a_valid_directory_and_the_run_resumes(
    dataset: pathlib.Path, tmp_path: pathlib.Path, commands: CommandServer
) -> None:
    output = tmp_path / "run"
    arguments = _arguments(dataset, output, "--num_rounds=6")
    status, out, err = _interrupted(commands, arguments, output)
    assert status == command_line.INTERRUPTED, err
    assert "Traceback" not in err
    rounds = json.loads(out)["rounds"]
    assert 1 <= rounds < 6
    privacy = _check_directory(output, rounds)
    assert privacy["status"] == "open"
    observed = privacy["observed"]
    assert observed["num_rounds"] == rounds
    # Stopping early earns no more than was planned: the data may have been looked at.
    assert privacy["headline"]["guarantee"] == "planned"
    before = _rows(output)

    status, out, err = commands.start(_WITH_A_SMALLER_MODEL, *arguments).wait()
    assert status == 0, err
    assert json.loads(out)["rounds"] == 6
    assert _check_directory(output, 6)["status"] == "finished"
    assert _rows(output)[:rounds] == before


@pytest.mark.long
def test_a_sampled_run_is_amplified_and_resumes_with_the_draws_of_its_seed(
    dataset: pathlib.Path, tmp_path: pathlib.Path, commands: CommandServer
) -> None:
    output = tmp_path / "run"
    more = ["--sampling=poisson", "--num_bands=2", "--clients_per_round=1"]
    arguments = _arguments(dataset, output, *more)
    status, out, err = _interrupted(commands, arguments, output)
    assert status == command_line.INTERRUPTED, err
    first_rounds = json.loads(out)["rounds"]
    assert 1 <= first_rounds < 6
    privacy = json.loads((output / "privacy.json").read_text())
    assert privacy["keeps_plan"] is True
    assert privacy["headline"]["guarantee"] == "planned"
    before = _rows(output)

    status, out, err = commands.start(_WITH_A_SMALLER_MODEL, *arguments).wait()
    assert status == 0, err
    assert _rows(output)[:first_rounds] == before
    # Nobody else may look: with the batches there is no amplification.
    assert output.stat().st_mode & 0o077 == 0
    seed = json.loads((output / "checkpoints" / "sampling_seed.json").read_text())["seed"]
    for name in ("config.json", "privacy.json", "PRIVACY.md"):
        text = (output / name).read_text()
        assert seed not in text
        assert str(int(seed, 16)) not in text
    # Who was drawn is as secret as the seed.
    stated = [out, err, *((output / name).read_text() for name in ("privacy.json", "PRIVACY.md"))]
    for client in ParticipationLedger.load(output / "participation.npz").client_ids:
        assert not any(client in text for text in stated)
    scheme = PoissonSampling(6, num_bands=2, population=_NUM_CLIENTS, clients_per_round=1)
    sampler = scheme.sampler(int(seed, 16))
    ledger = ParticipationLedger.load(output / "participation.npz")
    assert ledger.num_rounds == 6
    assert sampler.deviation(_NUM_CLIENTS, ledger.cohorts) is None
    for row, cohort in zip(_rows(output), ledger.cohorts, strict=True):
        assert (row["train_loss"] == "") == (len(cohort) == 0)
        assert row["eligible_clients"] == "12"

    privacy = json.loads(out)["privacy"]
    assert privacy["status"] == "finished"
    assert privacy["keeps_plan"] is True
    planned = privacy["planned"]
    assert planned["sampling"] == scheme.to_dict()
    assert float(planned["epsilon"]) == pytest.approx(8.0, rel=1e-3)
    assert planned["schema"]["separation"] == 2
    assert float(planned["sensitivity"]) == pytest.approx(1.0, rel=1e-5)
    noise = float(privacy["noise"]["noise_multipliers"][0])
    assert noise == json.loads((output / "config.json").read_text())["noise_multiplier"]
    # This is less noise than one participation needs without amplification, and there may be three.
    assert noise < mfa.accounting.noise_multiplier(8.0, 0.01)


@pytest.mark.long
def test_runs_of_one_cohort_seed_differ_in_noise_alone(
    dataset: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """Cohorts, data and initial weights of two mechanisms, as training takes them from a run."""

    def begun(name: str, *more: str) -> Run:
        options = _options(_arguments(dataset, tmp_path / name, *more))
        directory = RunDirectory(tmp_path / name)
        return run_command.begin(options, _COMMAND, directory, DeviceBehaviour())

    def facts(run: Run) -> list[Any]:
        task = run.data.load(run.seed)
        sizes = (len(task.client_ids), run.mechanism.noise_reference, run.config.cohort)
        devices = DevicePopulation(*sizes, run.behaviour, run.seed)
        cohorts = [devices.next_round().cohort.tolist() for _ in range(6)]
        batches = [
            tuple(array.tolist() for array in batch)
            for index in range(2)
            for client in cohorts[index]
            for batch in task.client_dataset(task.client_ids[client], index).as_numpy_iterator()
        ]
        return [cohorts, batches, [weight.tolist() for weight in task.initial_weights]]

    identity = ("--mechanism=identity", "--noise_multiplier=1")
    seven = ("--cohort_seed=7", "--sentences_per_client=2")
    banded = begun("banded", "--noise_multiplier=2", *seven)
    assert facts(banded) == facts(begun("none", "--mechanism=none", *seven))
    other = begun("other", *identity, "--cohort_seed=8", "--sentences_per_client=2")
    assert not any(a == b for a, b in zip(facts(banded), facts(other), strict=True))
    # Without one, each has its own.
    assert begun("random", *identity).seed != begun("random_as_well", *identity).seed
    # What amplifies is as secret as before.
    sampled = [
        begun(name, "--sampling=poisson", *identity, *seven).sampler
        for name in ("sampled", "sampled_again")
    ]
    first, second = (each.seed for each in sampled if each is not None)
    assert first != second
    assert 7 not in (first, second)


def test_a_sampled_run_without_its_seed_is_not_resumed(
    dataset: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    output = tmp_path / "run"
    directory = RunDirectory(output)
    scheme = PoissonSampling(6, num_bands=2, population=24, clients_per_round=6)
    sampler = run_command.sampler_of(scheme, directory, None)
    assert directory.sampling_seed.parent.stat().st_mode & 0o077 == 0
    assert run_command.sampler_of(scheme, directory, None).seed == sampler.seed
    assert sampler.seed != run_command.sampler_of(scheme, RunDirectory(tmp_path), None).seed
    assert run_command.sampler_of(scheme, directory, 7).seed == 7
    ParticipationLedger(("a",)).save(directory.ledger)
    directory.sampling_seed.unlink()
    with refuses("sampling_seed.json", error=command_line.CommandError):
        run_command.sampler_of(scheme, directory, None)
    assert not directory.sampling_seed.exists()
    for broken in ("", "{}", "[1]", '{"seed": 7}', '{"seed": "seven"}'):
        directory.sampling_seed.write_text(broken)
        with refuses("sampling_seed.json", error=command_line.CommandError):
            run_command.sampler_of(scheme, directory, None)


@pytest.mark.short_cases(20)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--clients_per_round=25"], "fewer than the 25 needed"),
        (["--delta=0.1"], "1 / 24 clients"),
        (["--secure_aggregation", "--workers=localhost:8000"], "exclude each other: a worker"),
        (["--sampling=poisson", "--num_bands=5"], "30 are needed: use fewer bands"),
        (["--sampling=poisson", "--checkpoint=blt"], "needs a banded matrix"),
        (["--dataset=nowhere.sqlite"], "--dataset: There is no file"),
        (["--dataset=shakespeare", "--characters", "--vocab_size=9"], "--vocab_size must be 86"),
        (["--noise_directory=a_file"], "a_file cannot be written: Not a directory"),
        (["--noise_directory=open_to_all"], "is accessible to other users"),
    ],
)
def test_bad_flags_are_one_clear_line_before_anything_starts(
    dataset: pathlib.Path,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a_file").write_text("")
    mfa.checkpoints.save(mfa.factorizations.blt(6, 1), tmp_path / "blt")
    (tmp_path / "open_to_all").mkdir()
    (tmp_path / "open_to_all").chmod(0o755)
    output = tmp_path / "run"
    given = _arguments(dataset, output, *arguments)
    console_commands.call("run-stackoverflow", *given).refused(message, has_begun=True)
    assert not output.exists()
