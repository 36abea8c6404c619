"""A run that version 0.5.0 began and left after 10 of 60 rounds goes on as it would have there.

``version_0_5_0/run`` is the directory of ``run-digits --num_rounds=60 --evaluate_every=20
--clients_per_round=5 --seed=7`` after Ctrl-C, without its pictures and without the state before
the newest. The metrics beside it are those of the same run when version 0.5.0 went on with it.
"""

import csv
import json
import pathlib
import shutil
import signal

import pytest

from mf_aggregators import checkpoints
from mf_aggregators.commands import command_line
from mf_aggregators.privacy import ledgers
from simulations.examples.digit_classification import run_digits
from simulations.runs import federated_runs, run_flags
from simulations.runs.state_store import Progress, StateStore

_OF_VERSION_0_5_0 = pathlib.Path(__file__).parent / "version_0_5_0"


@pytest.fixture
def run(tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy of the run, of the packages that are installed here."""
    directory = tmp_path / "run"
    shutil.copytree(_OF_VERSION_0_5_0 / "run", directory)
    config = json.loads((directory / "config.json").read_text())
    config["versions"] = federated_runs.versions()
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def _metrics(path: pathlib.Path) -> list[dict[str, float]]:
    with path.open(newline="") as file:
        return [
            {name: float(value) for name, value in row.items() if value and name != "seconds"}
            for row in csv.DictReader(file)
        ]


@pytest.mark.usefixtures("_runs_in_this_process")
@pytest.mark.parametrize("num_rounds", [22, pytest.param(60, marks=pytest.mark.long)])
def test_the_run_goes_on(
    num_rounds: int,
    run: pathlib.Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To its end, or until a user presses Ctrl-C after an evaluation and two more rounds."""
    save = StateStore.save

    def save_and_press_ctrl_c(store: StateStore, progress: Progress) -> None:
        save(store, progress)
        if progress.num_rounds == num_rounds < 60:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(StateStore, "save", save_and_press_ctrl_c)
    arguments = ["--num_rounds=60", "--evaluate_every=20", "--clients_per_round=5", "--seed=7"]
    status = command_line.run(
        "",
        lambda values: run_flags.define_flags(values, run_digits.COMMAND),
        lambda values: federated_runs.main(values, run_digits.COMMAND),
        ["run-digits", f"--output_dir={run}", "--format=json", *arguments],
    )
    printed, errors = capfd.readouterr()
    assert status == (0 if num_rounds == 60 else command_line.INTERRUPTED), errors
    assert "resuming the run" in errors
    assert json.loads(printed)["rounds"] == num_rounds
    found = _metrics(run / "metrics.csv")
    expected = _metrics(_OF_VERSION_0_5_0 / "metrics_of_the_whole_run.csv")[:num_rounds]
    assert len(found) == len(expected) == num_rounds
    for row, of_version_0_5_0 in zip(found, expected, strict=True):
        # Another processor may add floats in another order; other noise would differ by its size.
        known = {name: row[name] for name in of_version_0_5_0}
        assert known == pytest.approx(of_version_0_5_0, rel=1e-3, abs=1e-5)


def test_its_checkpoint_and_its_ledger_load(run: pathlib.Path) -> None:
    factorization = checkpoints.load(run / "factorization")
    assert (factorization.mechanism, factorization.num_rounds) == ("banded", 60)
    record = ledgers.load(run / "participation.npz", 60)
    assert (record.num_rounds, len(record.client_ids)) == (10, 143)
    assert all(len(cohort) == 5 for cohort in record.cohorts())
