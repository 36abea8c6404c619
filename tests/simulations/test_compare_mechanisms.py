"""compare-mechanisms: its statistics, and how it starts, keeps, resumes and stops runs.

The runs are those of a small program in the place of the next-word command, which tells what it
was handed and waits where a test asks it to.
"""

import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from absl import flags
from hypothesis import given
from hypothesis import strategies as st

from mf_aggregators import accounting
from mf_aggregators.commands import command_line
from simulations import compare_mechanisms
from simulations.examples.digit_classification import run_digits
from simulations.runs import run_config, run_directory
from simulations.runs.round_records import ParticipationLedger
from simulations.runs.run_config import RunConfig
from tests.refusals import refuses

_ROOT = pathlib.Path(__file__).parents[2]

# Accuracies in thousandths, by run. Of two values a and b, Student's t interval has the
# half-width t |a - b| / 2, where t = tan(0.475 pi) is the quantile for one degree of freedom.
_ACCURACIES = {
    "none_1": 500,
    "none_2": 502,
    "banded_1": 400,
    "banded_2": 402,
    "identity_1": 390,
    "identity_2": 396,
}
_QUANTILE = math.tan(0.475 * math.pi)

_NOISE_OF_EIGHT = accounting.noise_multiplier(8.0, 1e-4)

_RUN = f"""
import json, os, pathlib, shutil, signal, sys, time

flags = dict(flag[2:].partition("=")[::2] for flag in sys.argv[1:])
directory = pathlib.Path(flags["output_dir"])
control = pathlib.Path(__file__).parent.parent / "control"
mechanism = flags["mechanism"]
if "refuse" in flags.get("only_for", "") and mechanism == flags["only_for"].split(":")[1]:
    sys.exit("run: --only_for is not for " + mechanism)
is_check = directory.name == "run"
with (control / "started.jsonl").open("a") as file:
    file.write(json.dumps([directory.name, sys.argv[1:]]) + "\\n")
directory.mkdir(parents=True, exist_ok=True)
stops = []
signal.signal(signal.SIGTERM, lambda *_: stops.append(1))
signal.signal(signal.SIGINT, lambda *_: stops.append(1))
conditions = control / "conditions.json"
kept = json.loads(conditions.read_text()) if conditions.exists() else {{}}
seed = flags.get("cohort_seed")
(directory / "config.json").write_text(
    json.dumps({{"cohort_seed": seed, **kept.get("config", {{}})}})
)
# Who takes part is a matter of the seed.
ledger = control / f"ledger-{{seed}}.npz"
if ledger.exists():
    shutil.copy(ledger, directory / "participation.npz")
if "data" in kept:
    (directory / "checkpoints").mkdir(exist_ok=True)
    (directory / "checkpoints" / "dataset.json").write_text(json.dumps(kept["data"]))
if is_check:
    time.sleep(60)
failure = control / f"fail-{{directory.name}}"
if failure.exists():
    # Not before the one that it names, if any, is at work.
    while failure.read_text() and not (control / f"at-work-{{failure.read_text()}}").exists():
        time.sleep(0.02)
    print("  9%|#   \\r 10%|#   \\nrun: the disk is full\\n", file=sys.stderr)
    sys.exit(7)
(control / f"at-work-{{directory.name}}").write_text(str(os.getpid()))
while (control / f"hold-{{directory.name}}").exists():
    if stops:
        (control / "heard").touch()
    if len(stops) == 1 and not (control / "deaf").exists() or len(stops) > 1:
        (control / f"stops-{{directory.name}}").write_text(str(len(stops)))
        sys.exit(130)
    time.sleep(0.02)
accuracy = {_ACCURACIES!r}.get(directory.name, 100) / 1000
(directory / "metrics.csv").write_text(
    "round,heldout_accuracy\\n1,\\n2,0.25\\n3,\\n4," + str(accuracy) + "\\n"
)
is_private = mechanism != "none"
epsilon = float(flags.get("epsilon_of_" + mechanism, 8.0)) if is_private else None
if (control / f"garbage-{{directory.name}}").exists():
    print("done")
    sys.exit(0)
print("a log line", file=sys.stderr)
print(json.dumps({{
    "output_dir": str(directory),
    "rounds": 4,
    "test_accuracy": accuracy,
    "initial_model": f"of seed {{seed}}",
    "privacy": {{
        "is_private": is_private,
        # Who was drawn made it better, which is none of the mechanism's merits; or worse.
        "keeps_plan": mechanism != "tree",
        "earned": {{"epsilon": epsilon if mechanism == "tree" else 0.5, "delta": 1e-4}},
        "planned": {{
            "epsilon": 0.7 if mechanism == "tree" else epsilon,
            "delta": 1e-4,
            "noise_multiplier": {_NOISE_OF_EIGHT!r} if epsilon == 8.0 else None,
            "sampling": None,
        }},
    }},
}}))
"""


class _Workplace:
    """A directory in which the next-word command is the small program."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self.control = path / "control"
        self.output = path / "comparison"
        self.control.mkdir()
        package = path / "stackoverflow_nwp"
        package.mkdir()
        (package / "__init__.py").touch()
        (package / "run_stackoverflow.py").write_text(_RUN)

    def started(self) -> list[tuple[str, list[str]]]:
        """The directories and command lines of runs, without those that check flags."""
        return [(name, arguments) for name, arguments in self._lines() if name != "run"]

    def checks(self) -> list[list[str]]:
        return [arguments for name, arguments in self._lines() if name == "run"]

    def _lines(self) -> list[Any]:
        path = self.control / "started.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def process(self, *arguments: str) -> "subprocess.Popen[str]":
        """Starts the command as a process in a session of its own, as a shell would."""
        return subprocess.Popen(
            [
                sys.executable,
                "-m",
                "simulations.compare_mechanisms",
                f"--output_dir={self.output}",
                *arguments,
            ],
            cwd=self.path,
            env={**os.environ, "PYTHONPATH": str(_ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )


@pytest.fixture
def workplace(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> _Workplace:
    # A module that python -m starts is looked for in the current directory first.
    monkeypatch.chdir(tmp_path)
    return _Workplace(tmp_path)


def _call(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = command_line.run(
        compare_mechanisms.__doc__ or "",
        compare_mechanisms.define_flags,
        compare_mechanisms.main,
        ["compare-mechanisms", "--output_dir=comparison", *arguments],
    )
    captured = capfd.readouterr()
    return status, captured.out, captured.err


def _wait_for(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.02)


def _is_alive(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


_THREE = ("--mechanisms=identity,none,banded", "--repetitions=2")


def test_the_comparison_of_three_mechanisms(
    workplace: _Workplace, capfd: pytest.CaptureFixture[str]
) -> None:
    handed_on = "--num_rounds=4 --target_epsilon=8 --name='two words'"
    status, out, err = _call(capfd, *_THREE, f"--flags={handed_on}", "--format=json")
    assert status == 0, err
    fields = json.loads(out)
    rows = fields["rows"]
    assert [row["mechanism"] for row in rows] == ["none", "banded", "identity"]
    expected = {"none": (0.501, 0.001), "banded": (0.401, 0.001), "identity": (0.393, 0.003)}
    for row in rows:
        mean, deviation = expected[row["mechanism"]]
        assert row["repetitions"] == 2
        assert row["test_accuracy_mean"] == pytest.approx(mean, rel=1e-12)
        assert row["test_accuracy_half_width"] == pytest.approx(_QUANTILE * deviation, rel=1e-9)
        assert row["test_accuracy_min"] == pytest.approx(mean - deviation, rel=1e-12)
        assert row["test_accuracy_max"] == pytest.approx(mean + deviation, rel=1e-12)
        assert row["seconds_mean"] > 0.0
        private = row["mechanism"] != "none"
        assert (row["epsilon"], row["delta"]) == ((8.0, 1e-4) if private else (None, None))
    # 12.7 times 0.001 and 0.003: the private ones are not apart.
    assert fields["separated"] == [["none", "banded"], ["none", "identity"]]
    assert fields["is_fair"] is True
    # Four Gaussian mechanisms of epsilon 8 are one of half their noise multiplier.
    composed = fields["composed"]
    half = accounting.noise_multiplier(8.0, 1e-4) / 2.0
    assert composed["epsilon"] == pytest.approx(accounting.exact_epsilon(half, 1e-4), rel=1e-8)
    assert (composed["private_runs"], composed["other_runs"], composed["delta"]) == (4, 2, 1e-4)
    assert fields["seconds"] > sum(row["seconds_mean"] for row in rows)

    # Repetition by repetition, each with its directory, the flags and the seed of its repetition.
    names = [f"{mechanism}_{number}" for number in (1, 2) for mechanism in _THREE_MECHANISMS]
    assert [name for name, _ in workplace.started()] == names
    for name, arguments in workplace.started():
        mechanism = name[:-2]
        noise = [] if mechanism == "none" else ["--target_epsilon=8"]
        assert arguments == [
            f"--output_dir=comparison/{name}",
            f"--mechanism={mechanism}",
            "--format=json",
            f"--cohort_seed={name[-1]}",
            "--name=two words",
            "--num_rounds=4",
            *noise,
        ]
        assert (workplace.output / f"{name}.log").read_text() == "a log line\n"
    # Each mechanism's flags were checked once before, and nothing is left of that.
    assert [arguments[1:] for arguments in workplace.checks()] == [
        arguments[1:] for _, arguments in workplace.started()[3:]
    ]
    assert not list(workplace.output.glob(".flags*"))

    markdown = (workplace.output / "comparison.md").read_text()
    table = markdown.splitlines()
    header = "mechanism, test accuracy, 95 % interval, min, max, epsilon, delta, runs, minutes"
    assert [cell.strip() for cell in table[0].strip("|").split("|")] == header.split(", ")
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:5]]
    assert [line[:8] for line in cells] == [
        ["none", "50.10 %", "± 1.27 %", "50.00 %", "50.20 %", "-", "-", "2"],
        ["banded", "40.10 %", "± 1.27 %", "40.00 %", "40.20 %", "8.000", "0.0001", "2"],
        ["identity", "39.30 %", "± 3.81 %", "39.00 %", "39.60 %", "8.000", "0.0001", "2"],
    ]
    assert "non-overlapping intervals: none above banded, none above identity.\n" in markdown
    assert "All 4 private runs together, on the same clients: (19.79, 0.0001)-DP" in markdown
    assert "resumed" not in markdown
    assert (workplace.output / "comparison.png").read_bytes().startswith(b"\x89PNG")
    # No terminal, and so no bar.
    assert "\r" not in err

    # Once more: nothing is run, and people read what is in the file.
    status, out, err = _call(capfd, *_THREE, f"--flags={handed_on}")
    assert status == 0, err
    assert out == markdown
    assert len(workplace.started()) == 6
    assert len(workplace.checks()) == 3


def test_runs_with_the_same_clients_are_compared_in_pairs(
    workplace: _Workplace, capfd: pytest.CaptureFixture[str]
) -> None:
    for seed in (1, 2):
        cohorts = (np.array([0, seed]), np.array([3 - seed]))
        ledger = ParticipationLedger(("a", "b", "c"), cohorts)
        ledger.save(workplace.control / f"ledger-{seed}.npz")
    _, out, _ = _call(capfd, "--mechanisms=banded,identity", "--repetitions=2", "--format=json")
    fields = json.loads(out)
    (pair,) = fields["differences"]
    assert (pair["higher"], pair["lower"], pair["repetitions"]) == ("banded", "identity", 2)
    # 0.010 and 0.006.
    assert pair["mean"] == pytest.approx(0.008, rel=1e-9)
    assert pair["half_width"] == pytest.approx(_QUANTILE * 0.002, rel=1e-9)
    assert "no order is claimed." in fields["notes"][1]
    assert "one point would have been seen with a probability of" in fields["notes"][2]
    markdown = (workplace.output / "comparison.md").read_text()
    assert "| banded - identity |   0.80 |   ± 2.54 |" in markdown

    # Without the ledger of one run, nobody knows whether it is a pair with another.
    (workplace.output / "banded_2" / "participation.npz").unlink()
    _, out, _ = _call(capfd, "--mechanisms=banded,identity", "--repetitions=2", "--format=json")
    fields = json.loads(out)
    assert fields["differences"] == []
    assert fields["notes"][1].startswith("Runs are not compared in pairs: ")
    assert "participation.npz" in fields["notes"][1]


def test_an_audited_run_draws_its_own_clients(
    workplace: _Workplace, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its canaries follow from their seed, and have to be drawn at random."""
    one = ("--mechanisms=banded", "--repetitions=1")
    assert _call(capfd, *one, "--flags=--audit_canaries=8")[0] == 0
    ((_, arguments),) = workplace.started()
    assert not any("seed" in argument for argument in arguments)


@pytest.mark.long
def test_clip_norms_are_compared(workplace: _Workplace, capfd: pytest.CaptureFixture[str]) -> None:
    status, out, err = _call(
        capfd,
        "--mechanisms=none,banded",
        "--clip_norms=0.4,adaptive",
        "--repetitions=1",
        "--flags=--clip_quantile=0.7 --target_epsilon=4 --a=1",
        "--format=json",
    )
    assert status == 0, err
    names = {row["mechanism"] for row in json.loads(out)["rows"]}
    assert names == {
        f"{mechanism}_clip_{norm}"
        for mechanism in ("none", "banded")
        for norm in ("0.4", "adaptive")
    }
    handed = {name: set(given) for name, given in workplace.started()}
    assert {"--a=1", "--target_epsilon=4", "--clip_norm=0.4"} <= handed["banded_clip_0.4_1"]
    assert "--clip_quantile=0.7" not in handed["banded_clip_0.4_1"]
    assert {"--clip_quantile=0.7", "--clip_norm=adaptive"} <= handed["banded_clip_adaptive_1"]
    assert {"--a=1", "--clip_quantile=0.7"} <= handed["none_clip_adaptive_1"]
    assert "--target_epsilon=4" not in handed["none_clip_adaptive_1"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--clip_norms=0.4,much"], "--clip_norms takes numbers above zero and adaptive"),
        (["--clip_norms=0.4,-1"], "--clip_norms takes numbers above zero and adaptive"),
        (["--clip_norms=0.4,0.4"], "--clip_norms has 0.4 twice"),
        (["--clip_norms=0.4", "--flags=--clip_norm=1"], "--flags cannot have --clip_norm"),
    ],
)
def test_bad_clip_norms_are_refused(
    workplace: _Workplace, capfd: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    status, out, err = _call(capfd, *arguments)
    assert (status, out) == (2, "")
    assert message in err
    assert not workplace.started()


_THREE_MECHANISMS = ("identity", "none", "banded")


@pytest.mark.long
def test_more_repetitions_add_only_theirs(
    workplace: _Workplace, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--mechanisms=none,banded", "--format=json")
    _, out, _ = _call(capfd, *arguments, "--repetitions=1")
    fields = json.loads(out)
    assert [row["test_accuracy_half_width"] for row in fields["rows"]] == [None, None]
    assert fields["separated"] == []
    assert fields["notes"] == ["Single runs have no interval, and no order is claimed."]
    status, out, _ = _call(capfd, *arguments, "--repetitions=2")
    assert status == 0
    assert [row["repetitions"] for row in json.loads(out)["rows"]] == [2, 2]
    names = [name for name, _ in workplace.started()]
    assert names == ["none_1", "banded_1", "none_2", "banded_2"]
    # The order of flags makes no difference, their values do.
    result = json.loads((workplace.output / "banded_1.json").read_text())
    assert result["flags"] == []
    assert result["result"]["rounds"] == 4


def test_results_of_other_flags_are_refused(
    workplace: _Workplace, capfd: pytest.CaptureFixture[str]
) -> None:
    one = ("--mechanisms=banded", "--repetitions=1")
    assert _call(capfd, *one, "--flags=--b=2 --a=1")[0] == 0
    assert _call(capfd, *one, "--flags=--a=1 --b=2")[0] == 0
    for other in ("--flags=--a=1 --b=3", "--flags=--a=1", "--flags="):
        status, out, err = _call(capfd, *one, other)
        assert (status, out) == (2, "")
        assert "banded_1.json is the result of a run with other flags" in err
        assert "(run-stackoverflow --a=1 --b=2): repeat them" in err
    status, _, err = _call(capfd, *one, "--flags=--a=1 --b=2", "--command=run-digits")
    assert status == 2
    assert "other flags" in err
    assert len(workplace.started()) == 1
    (workplace.output / "banded_1.json").write_text('{"flags": ')
    status, _, err = _call(capfd, *one, "--flags=--a=1 --b=2")
    assert status == 2
    assert "banded_1.json cannot be read" in err


def test_runs_on_other_data_are_not_compared(
    workplace: _Workplace, capfd: pytest.CaptureFixture[str]
) -> None:
    conditions = workplace.control / "conditions.json"
    arguments = ("--mechanisms=none,banded", "--format=json")
    conditions.write_text('{"data": {"fingerprint": "one"}}')
    assert _call(capfd, *arguments, "--repetitions=1")[0] == 0
    conditions.write_text('{"data": {"fingerprint": "another"}}')
    # Found once the first of the two new runs has ended, and then before any run.
    for _ in range(2):
        status, out, err = _call(capfd, *arguments, "--repetitions=2")
        assert (status, out) == (2, "")
        assert err.splitlines()[-1].startswith(
            "compare-mechanisms: comparison/none_1 and comparison/none_2 are of different data: "
        )
        assert "another --output_dir" in err
        assert "fingerprint" not in err
        assert [name for name, _ in workplace.started()] == ["none_1", "banded_1", "none_2"]


def test_runs_of_other_versions_are_not_compared(
    workplace: _Workplace, capfd: pytest.CaptureFixture[str]
) -> None:
    conditions = workplace.control / "conditions.json"
    now = run_directory.versions()
    conditions.write_text(json.dumps({"config": {"versions": {**now, "numpy": "0.1"}}}))
    one = ("--mechanisms=banded", "--format=json")
    assert _call(capfd, *one, "--repetitions=1")[0] == 0
    # What is finished may be tabulated again, and nothing can be added.
    assert _call(capfd, *one, "--repetitions=1")[0] == 0
    status, out, err = _call(capfd, *one, "--repetitions=2")
    assert (status, out) == (2, "")
    assert "comparison/banded_1 is of other versions" in err
    assert f"(numpy 0.1 and {now['numpy']})" in err
    assert [name for name, _ in workplace.started()] == ["banded_1"]


@pytest.mark.long
def test_runs_of_different_versions_are_not_tabulated(
    workplace: _Workplace, capfd: pytest.CaptureFixture[str]
) -> None:
    now = run_directory.versions()
    conditions = workplace.control / "conditions.json"
    conditions.write_text(json.dumps({"config": {"versions": now}}))
    two = ("--mechanisms=none,banded", "--repetitions=1")
    assert _call(capfd, *two)[0] == 0
    config = workplace.output / "banded_1" / "config.json"
    config.write_text(json.dumps({"versions": {**now, "tensorflow": "3"}}))
    status, out, err = _call(capfd, *two)
    assert (status, out) == (2, "")
    assert "none_1 and comparison/banded_1 are of different versions" in err
    assert f"(tensorflow {now['tensorflow']} and 3)" in err
    # What cannot be read any more is not compared.
    config.unlink()
    assert _call(capfd, *two)[0] == 0


@pytest.mark.long
def test_a_run_that_fails_ends_the_comparison(
    workplace: _Workplace, capfd: pytest.CaptureFixture[str]
) -> None:
    failure = workplace.control / "fail-none_1"
    failure.touch()
    status, out, err = _call(capfd, *_THREE)
    assert (status, out) == (2, "")
    assert err.splitlines()[-1] == (
        "compare-mechanisms: none_1 ended with status 7; the last line of its log "
        "comparison/none_1.log: run: the disk is full"
    )
    assert [name for name, _ in workplace.started()] == ["identity_1", "none_1"]
    failure.unlink()
    # It goes on there; what it took the run that was begun before is not known.
    status, out, _ = _call(capfd, *_THREE, "--format=json")
    assert status == 0
    assert [name for name, _ in workplace.started()][2:4] == ["none_1", "banded_1"]
    assert len(workplace.started()) == 7
    fields = json.loads(out)
    result = json.loads((workplace.output / "none_1.json").read_text())
    assert result["seconds"] is None
    later = json.loads((workplace.output / "none_2.json").read_text())
    assert fields["rows"][0]["seconds_mean"] == later["seconds"] > 0.0
    assert "Runs that were cut off and resumed do not count towards the minutes." in fields["notes"]


def test_a_run_without_a_result_is_refused(
    workplace: _Workplace, capfd: pytest.CaptureFixture[str]
) -> None:
    (workplace.control / "garbage-banded_1").touch()
    status, out, err = _call(capfd, "--mechanisms=banded")
    assert (status, out) == (2, "")
    assert "banded_1 printed no result that can be compared" in err
    assert not (workplace.output / "banded_1.json").exists()


def test_flags_that_a_mechanism_refuses_are_found_before_any_run(
    workplace: _Workplace, capfd: pytest.CaptureFixture[str]
) -> None:
    status, out, err = _call(capfd, *_THREE, "--flags=--only_for=refuse:banded")
    assert (status, out) == (2, "")
    assert "--mechanism=banded is refused: run: --only_for is not for banded" in err
    assert workplace.started() == []
    assert len(workplace.checks()) == 2
    assert [path.name for path in workplace.output.iterdir()] == [".lock"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--output_dir=",), "--output_dir=: it names no path"),
        (("--output_dir=control/file",), "control/file cannot be written: Not a directory"),
        (("--repetitions=0",), "--repetitions must be at least 1, found 0"),
        (("--mechanisms=",), "--mechanisms must name at least one"),
        (("--mechanisms=banded,bandit",), "found 'bandit'"),
        (("--mechanisms=blt,tree,blt",), "--mechanisms has blt twice"),
        (("--command=run-away",), "--command=run-away"),
        (("--flags=num_rounds=3",), "as --name=value, found 'num_rounds=3'"),
        (("--flags=--num_rounds 3",), "as --name=value, found '3'"),
        (("--flags=--a='3",), "cannot be split: No closing quotation"),
        (("--flags=--a=3 --a=4",), "--flags has --a twice"),
        (("--flags=--seed=3",), "cannot have --seed: repetitions with a fixed seed"),
        (("--flags=--cohort_seed=3",), "cannot have --cohort_seed: each repetition has one"),
        (("--flags=--output_dir=x",), "cannot have --output_dir"),
        (("--flags=--mechanism=tree",), "cannot have --mechanism"),
        (("--flags=--format=text",), "cannot have --format"),
        (("--flags=--checkpoint=x",), "cannot have --checkpoint"),
        (("--flags=--noise_directory=x",), "cannot have --noise_directory"),
        (("--flags=--flagfile=x",), "cannot have --flagfile"),
    ],
)
def test_bad_flags_are_refused_in_one_line(
    workplace: _Workplace,
    capfd: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    message: str,
) -> None:
    (workplace.control / "file").touch()
    status, out, err = _call(capfd, *arguments)
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert message in err
    assert workplace.started() == []


@pytest.mark.long
def test_epsilons_that_differ_are_said_and_nothing_is_claimed(
    workplace: _Workplace, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--mechanisms=none,banded,identity", "--repetitions=2", "--format=json")
    status, out, _ = _call(capfd, *arguments, "--flags=--epsilon_of_banded=8.009")
    assert status == 0
    fields = json.loads(out)
    assert fields["rows"][1]["epsilon"] == 8.009
    assert fields["is_fair"] is False
    assert fields["separated"] == []
    unfair = "This comparison is not fair, and claims no order: the private runs have epsilons"
    assert fields["notes"][0].startswith(f"{unfair} from 8 to 8.009")
    assert f"\n{unfair}" in (workplace.output / "comparison.md").read_text()


@pytest.mark.long
def test_a_stop_is_passed_on_once_and_the_comparison_goes_on_later(
    workplace: _Workplace, capfd: pytest.CaptureFixture[str]
) -> None:
    hold = workplace.control / "hold-none_1"
    hold.touch()
    process = workplace.process(*_THREE)
    _wait_for((workplace.control / "at-work-none_1").exists)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate()
    assert process.returncode == 130, err
    assert out == ""
    assert (workplace.control / "stops-none_1").read_text() == "1"
    assert "stopping each run after its round" in err
    assert "interrupted; 1 of 6 runs are finished" in err
    hold.unlink()
    status, out, err = _call(capfd, *_THREE, "--format=json")
    assert status == 0, err
    assert [row["repetitions"] for row in json.loads(out)["rows"]] == [2, 2, 2]
    names = [name for name, _ in workplace.started()]
    assert names[:3] == ["identity_1", "none_1", "none_1"]
    assert len(names) == 7
    # Only mechanisms that had never begun were checked again.
    checked = [arguments[1] for arguments in workplace.checks()]
    assert checked == [f"--mechanism={each}" for each in (*_THREE_MECHANISMS, "banded")]


@pytest.mark.long
def test_a_second_stop_is_passed_on_at_once(workplace: _Workplace) -> None:
    for name in ("hold-banded_1", "deaf"):
        (workplace.control / name).touch()
    process = workplace.process("--mechanisms=banded")
    at_work = workplace.control / "at-work-banded_1"
    _wait_for(lambda: at_work.exists() and at_work.read_text() != "")
    process.send_signal(signal.SIGINT)
    _wait_for((workplace.control / "heard").exists)
    # Until the second one comes, nothing more is passed on.
    time.sleep(0.5)
    assert not (workplace.control / "stops-banded_1").exists()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 130, err
    assert (workplace.control / "stops-banded_1").read_text() == "2"
    assert not _is_alive(int(at_work.read_text()))


@pytest.mark.long
def test_a_run_that_ends_while_a_stop_waits_is_kept(workplace: _Workplace) -> None:
    for name in ("hold-banded_1", "deaf"):
        (workplace.control / name).touch()
    process = workplace.process("--mechanisms=banded,tree", "--repetitions=1")
    _wait_for((workplace.control / "at-work-banded_1").exists)
    process.send_signal(signal.SIGTERM)
    _wait_for((workplace.control / "heard").exists)
    (workplace.control / "hold-banded_1").unlink()
    _, err = process.communicate()
    assert process.returncode == 130
    assert "1 of 2 runs are finished" in err
    assert (workplace.output / "banded_1.json").exists()
    assert [name for name, _ in workplace.started()] == ["banded_1"]


@pytest.mark.long
def test_a_killed_comparison_goes_on_once_its_run_has_ended(
    workplace: _Workplace, capfd: pytest.CaptureFixture[str]
) -> None:
    """The run outlives it, and no second one may work in the same directory."""
    hold = workplace.control / "hold-banded_1"
    hold.touch()
    arguments = ("--mechanisms=banded,tree", "--repetitions=1")
    process = workplace.process(*arguments)
    at_work = workplace.control / "at-work-banded_1"
    _wait_for(lambda: at_work.exists() and at_work.read_text() != "")
    process.kill()
    process.communicate()
    assert _is_alive(int(at_work.read_text()))
    status, _, err = _call(capfd, *arguments)
    assert status == 2
    assert "a run that one has left behind, is at work in" in err
    assert [name for name, _ in workplace.started()] == ["banded_1"]
    hold.unlink()
    _wait_for(lambda: not _is_alive(int(at_work.read_text())))
    status, _, err = _call(capfd, *arguments)
    assert status == 0, err
    assert [name for name, _ in workplace.started()] == ["banded_1", "banded_1", "tree_1"]


def _at_work(workplace: _Workplace) -> set[str]:
    names = (path.name.removeprefix("at-work-") for path in workplace.control.glob("at-work-*"))
    return {name for name in names if name != "run"}


@pytest.mark.long
def test_two_runs_at_a_time(workplace: _Workplace, capfd: pytest.CaptureFixture[str]) -> None:
    holds = {name: workplace.control / f"hold-{name}" for name in ("none_1", "banded_1")}
    for hold in holds.values():
        hold.touch()
    process = workplace.process("--parallel_runs=2", *_THREE, "--format=json")
    # The first run has ended, two are under way, and no third one is begun.
    _wait_for(lambda: set(holds) <= _at_work(workplace))
    time.sleep(0.5)
    assert _at_work(workplace) == {"identity_1", *holds}
    # The place of one that ends is taken at once, though an earlier one is still under way.
    holds["banded_1"].unlink()
    _wait_for(lambda: "banded_2" in _at_work(workplace))
    assert not (workplace.output / "none_1.json").exists()
    _wait_for((workplace.output / "banded_2.json").exists)
    holds["none_1"].unlink()
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert [name for name, _ in workplace.started()].count("none_1") == 1
    assert len(workplace.started()) == 6
    # The same as one at a time, whatever the order in which they ended.
    status, one_at_a_time, _ = _call(capfd, *_THREE, "--format=json")
    assert status == 0
    assert json.loads(out)["rows"] == json.loads(one_at_a_time)["rows"]
    assert [row["mechanism"] for row in json.loads(out)["rows"]] == ["none", "banded", "identity"]


@pytest.mark.long
def test_a_stop_reaches_all_runs_under_way(
    workplace: _Workplace, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("identity_1", "none_1"):
        (workplace.control / f"hold-{name}").touch()
    process = workplace.process("--parallel_runs=2", *_THREE)
    _wait_for(lambda: len(_at_work(workplace)) == 2)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate()
    assert process.returncode == 130, err
    assert "interrupted; 0 of 6 runs are finished" in err
    for name in ("identity_1", "none_1"):
        assert (workplace.control / f"stops-{name}").read_text() == "1"
        (workplace.control / f"hold-{name}").unlink()
    assert _call(capfd, "--parallel_runs=3", *_THREE)[0] == 0
    assert len(workplace.started()) == 8


@pytest.mark.long
def test_two_requests_end_all_runs_under_way(workplace: _Workplace) -> None:
    for name in ("hold-identity_1", "hold-none_1", "deaf"):
        (workplace.control / name).touch()
    process = workplace.process("--parallel_runs=2", *_THREE)
    files = [workplace.control / f"at-work-{name}" for name in ("identity_1", "none_1")]
    _wait_for(lambda: all(file.exists() and file.read_text() for file in files))
    process.send_signal(signal.SIGINT)
    _wait_for((workplace.control / "heard").exists)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 130, err
    assert not any(_is_alive(int(file.read_text())) for file in files)


@pytest.mark.long
def test_a_run_that_fails_stops_the_others_after_their_rounds(
    workplace: _Workplace, capfd: pytest.CaptureFixture[str]
) -> None:
    (workplace.control / "hold-identity_1").touch()
    failure = workplace.control / "fail-none_1"
    failure.write_text("identity_1")
    status, out, err = _call(capfd, "--parallel_runs=2", *_THREE)
    assert (status, out) == (2, "")
    assert "none_1 ended with status 7; the last line of its log" in err.splitlines()[-1]
    # The other was asked once, and had the time to save its state.
    assert (workplace.control / "stops-identity_1").read_text() == "1"
    # Both at a time: whichever came first.
    assert sorted(name for name, _ in workplace.started()) == ["identity_1", "none_1"]
    failure.unlink()
    (workplace.control / "hold-identity_1").unlink()
    assert _call(capfd, "--parallel_runs=2", *_THREE)[0] == 0
    assert len(workplace.started()) == 8


def test_the_number_of_parallel_runs_is_checked(
    workplace: _Workplace, capfd: pytest.CaptureFixture[str]
) -> None:
    status, _, err = _call(capfd, *_THREE, "--parallel_runs=0")
    assert status == 2
    assert "--parallel_runs must be" in err
    assert workplace.started() == []


@given(
    st.dictionaries(
        st.from_regex(r"x[a-z_0-9]{0,5}", fullmatch=True),
        st.none() | st.text(st.characters(codec="ascii", categories=["L", "N", "P", "Z"])),
    )
)
def test_flags_are_handed_on_as_a_shell_would(given_flags: dict[str, str | None]) -> None:
    words = [
        f"--{name}" if value is None else f"--{name}={value}" for name, value in given_flags.items()
    ]
    quoted = " ".join("'" + word.replace("'", "'\"'\"'") + "'" for word in words)
    parsed = compare_mechanisms.parse_flags(quoted)
    assert list(parsed) == sorted(given_flags)
    assert sorted(parsed.values()) == sorted(words)


@pytest.mark.parametrize(
    "words", ["--audit_canaries=150", "--private_metrics --largest_loss=9 --largest_examples=50"]
)
def test_runs_without_noise_are_not_handed_what_they_refuse(words: str) -> None:
    """As the command that trains reads its flags."""

    def config(*arguments: str) -> RunConfig:
        values = flags.FlagValues()
        flags.DEFINE_enum("format", "text", ["text", "json"], "", flag_values=values)
        run_config.define_flags(values, run_digits.COMMAND)
        values(["run-digits", *arguments])
        return run_config.of_flags(values, run_digits.COMMAND)

    parsed = compare_mechanisms.parse_flags(f"{words} --target_epsilon=8")
    for mechanism, is_private in (("none", False), ("identity", True)):
        handed = compare_mechanisms._flags_of(parsed, mechanism, None)
        found = config(f"--mechanism={mechanism}", *handed)
        assert found.private_metrics == (is_private and "private_metrics" in words)
        assert found.audit_canaries == (150 if is_private and "canaries" in words else None)
    with refuses("noise"):
        config("--mechanism=none", *words.split())


@pytest.mark.long
def test_mechanisms_without_heldout_accuracy_are_left_out_of_the_figure(
    workplace: _Workplace, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--mechanisms=none,banded", "--repetitions=1", "--format=json")
    assert _call(capfd, *arguments)[0] == 0
    (workplace.output / "banded_1" / "metrics.csv").unlink()
    status, out, _ = _call(capfd, *arguments)
    assert status == 0
    note = "Not in the figure, without any heldout_accuracy that all runs have: banded."
    assert note in json.loads(out)["notes"]
    assert (workplace.output / "comparison.png").exists()
    (workplace.output / "none_1" / "metrics.csv").write_text("round,heldout_accuracy\n1,\n")
    status, out, _ = _call(capfd, *arguments)
    assert status == 0
    assert not (workplace.output / "comparison.png").exists()
