"""What version 0.5.0 left of a run after 10 of 60 rounds: it loads, and does not go on.

``version_0_5_0/run`` is the directory of ``run-digits --num_rounds=60 --evaluate_every=20
--clients_per_round=5 --seed=7`` after Ctrl-C, without its pictures and without the state before
the newest. Its noise is not this version's, so that going on would mix both.
"""

import json
import pathlib
import shutil

import pytest

import mf_aggregators as mfa
from mf_aggregators import checkpoints
from mf_aggregators.commands import command_line
from mf_aggregators.participation import MinSeparation
from mf_aggregators.privacy import ledgers
from simulations.runs import run_directory
from tests import console_commands
from tests.refusals import refuses

_OF_VERSION_0_5_0 = pathlib.Path(__file__).parent / "version_0_5_0"


@pytest.fixture
def run(tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy of the run, of the packages that are installed here."""
    directory = tmp_path / "run"
    shutil.copytree(_OF_VERSION_0_5_0 / "run", directory)
    config = json.loads((directory / "config.json").read_text())
    config["versions"] = run_directory.versions()
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({}, "whose noise has format 1"),
        # One package alone may change what a run computes.
        ({"numpy": "1.0"}, "other versions"),
    ],
    ids=["noise", "packages"],
)
@pytest.mark.usefixtures("_runs_in_this_process")
def test_the_run_does_not_go_on_with_other_noise_or_packages(
    run: pathlib.Path, changed: dict[str, str], named: str
) -> None:
    config = json.loads((run / "config.json").read_text())
    config["versions"].update(changed)
    (run / "config.json").write_text(json.dumps(config))
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    arguments = ["--num_rounds=60", "--evaluate_every=20", "--clients_per_round=5", "--seed=7"]
    arguments += [f"--output_dir={run}", "--format=json"]
    status, printed, errors = console_commands.call("run-digits", *arguments)
    assert (status, printed) == (command_line.BAD_INPUT, "")
    for words in (f"{run} holds a run", named, "or start a new run"):
        assert words in errors
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_its_mechanism_loads_unless_its_seed_was_fixed(run: pathlib.Path) -> None:
    with refuses("fixed seed", error=checkpoints.CheckpointError):
        mfa.load(run)
    contents = json.loads((run / "privacy.json").read_text()) | {"noise_seed_is_fixed": False}
    (run / "privacy.json").write_text(json.dumps(contents))
    # What the run was asked for says so as well.
    with refuses("noise_seed_is_fixed", error=checkpoints.CheckpointError):
        mfa.load(run)
    asked = (run / "config.json").read_text()
    (run / "config.json").write_text(asked.replace('"seed": 7', '"seed": null'))
    mechanism = mfa.load(run)
    assert (mechanism.num_rounds, mechanism.participation) == (60, MinSeparation(28))
    assert mechanism.guarantee(1e-4).epsilon == pytest.approx(8.0)
    # More noise than was drawn is refused, if the matrix or an earlier plan shows it.
    plan = contents["planned"]
    for named, altered in {
        "sensitivity": {"planned": plan | {"sensitivity": 2.4}},
        "more noise than": {"earlier_plans": [plan | {"noise_multiplier": 0.05}]},
    }.items():
        (run / "privacy.json").write_text(json.dumps(contents | altered))
        with refuses(named, error=checkpoints.CheckpointError):
            mfa.load(run)


def test_its_checkpoint_and_its_ledger_load(run: pathlib.Path) -> None:
    factorization = checkpoints.load(run / "factorization")
    assert (factorization.mechanism, factorization.num_rounds) == ("banded", 60)
    record = ledgers.load(run / "participation.npz", 60)
    assert (record.num_rounds, len(record.client_ids)) == (10, 143)
    assert all(len(cohort) == 5 for cohort in record.cohorts())
