"""compare-mechanisms: its statistics, and how it starts and keeps runs."""

import json
import math
import os
import signal
import time
from collections.abc import Callable

import numpy as np
import pytest

from mf_aggregators import accounting
from simulations import compare_mechanisms
from simulations.examples import digits
from simulations.runs import run_directory
from simulations.runs.run_directory import ParticipationLedger
from tests.refusals import refuses
from tests.simulations.comparison_workplace import THREE, THREE_MECHANISMS, Workplace, call
from tests.simulations.parsed_flags import config_of

# Of two values a and b, Student's t interval has the half-width t |a - b| / 2, where t is the
# quantile for one degree of freedom.
_QUANTILE = math.tan(0.475 * math.pi)


def test_the_comparison_of_three_mechanisms(workplace: Workplace) -> None:
    handed_on = "--num_rounds=4 --target_epsilon=8 --name='two words'"
    ended = call(*THREE, f"--flags={handed_on}", "--format=json")
    fields = ended.fields()
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
    names = [f"{mechanism}_{number}" for number in (1, 2) for mechanism in THREE_MECHANISMS]
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
    # No terminal, and so no bar.
    assert "\r" not in ended.errors

    # Once more: nothing is run, and people read what is in the file.
    out = call(*THREE, f"--flags={handed_on}").done()
    assert out == markdown
    assert len(workplace.started()) == 6
    assert len(workplace.checks()) == 3


def test_runs_with_the_same_clients_are_compared_in_pairs(workplace: Workplace) -> None:
    for seed in (1, 2):
        cohorts = (np.array([0, seed]), np.array([3 - seed]))
        ledger = ParticipationLedger(("a", "b", "c"), cohorts)
        ledger.save(workplace.control / f"ledger-{seed}.npz")
    fields = call("--mechanisms=banded,identity", "--repetitions=2", "--format=json").fields()
    (pair,) = fields["differences"]
    assert (pair["higher"], pair["lower"], pair["repetitions"]) == ("banded", "identity", 2)
    # 0.010 and 0.006.
    assert pair["mean"] == pytest.approx(0.008, rel=1e-9)
    assert pair["half_width"] == pytest.approx(_QUANTILE * 0.002, rel=1e-9)
    assert "no order is claimed." in fields["notes"][1]
    markdown = (workplace.output / "comparison.md").read_text()
    assert "| banded - identity |   0.80 |   ± 2.54 |" in markdown

    # Without the ledger of one run, nobody knows whether it is a pair with another.
    (workplace.output / "banded_2" / "participation.npz").unlink()
    fields = call("--mechanisms=banded,identity", "--repetitions=2", "--format=json").fields()
    assert fields["differences"] == []
    assert fields["notes"][1].startswith("Runs are not compared in pairs: ")
    assert "participation.npz" in fields["notes"][1]


def test_results_of_other_flags_are_refused(workplace: Workplace) -> None:
    one = ("--mechanisms=banded", "--repetitions=1")
    assert call(*one, "--flags=--b=2 --a=1")[0] == 0
    assert call(*one, "--flags=--a=1 --b=2")[0] == 0
    for other in ("--flags=--a=1 --b=3", "--flags=--a=1", "--flags="):
        call(*one, other).refused(
            "banded_1.json is the result of a run with other flags",
            "(run-stackoverflow --a=1 --b=2): use those",
        )
    call(*one, "--flags=--a=1 --b=2", "--command=run-digits").refused("other flags")
    assert len(workplace.started()) == 1
    (workplace.output / "banded_1.json").write_text('{"flags": ')
    call(*one, "--flags=--a=1 --b=2").refused("banded_1.json cannot be read")


def test_runs_on_other_data_are_not_compared(workplace: Workplace) -> None:
    conditions = workplace.control / "conditions.json"
    arguments = ("--mechanisms=none,banded", "--format=json")
    conditions.write_text('{"data": {"fingerprint": "one"}}')
    assert call(*arguments, "--repetitions=1")[0] == 0
    conditions.write_text('{"data": {"fingerprint": "another"}}')
    # Found once the first of the two new runs has ended, and then before any run.
    for _ in range(2):
        line = call(*arguments, "--repetitions=2").refused("another --output_dir", has_begun=True)
        assert line.startswith(
            "compare-mechanisms: comparison/none_1 and comparison/none_2 are of different data: "
        )
        assert "fingerprint" not in line
        assert [name for name, _ in workplace.started()] == ["none_1", "banded_1", "none_2"]


def test_runs_of_other_versions_are_not_compared(workplace: Workplace) -> None:
    conditions = workplace.control / "conditions.json"
    now = run_directory.versions()
    conditions.write_text(json.dumps({"config": {"versions": {**now, "numpy": "0.1"}}}))
    one = ("--mechanisms=banded", "--format=json")
    assert call(*one, "--repetitions=1")[0] == 0
    # What is finished may be tabulated again, and nothing can be added.
    assert call(*one, "--repetitions=1")[0] == 0
    call(*one, "--repetitions=2").refused(
        "comparison/banded_1 and further runs are of different versions",
        f"(numpy 0.1 and {now['numpy']})",
    )
    assert [name for name, _ in workplace.started()] == ["banded_1"]


@pytest.mark.long
def test_a_run_that_fails_ends_the_comparison(workplace: Workplace) -> None:
    failure = workplace.control / "fail-none_1"
    failure.touch()
    assert call(*THREE).refused(has_begun=True) == (
        "compare-mechanisms: none_1 ended with status 7; the last line of its log "
        "comparison/none_1.log: run: the disk is full"
    )
    assert [name for name, _ in workplace.started()] == ["identity_1", "none_1"]
    failure.unlink()
    # It goes on there; what it took the run that was begun before is not known.
    out = call(*THREE, "--format=json").done()
    assert [name for name, _ in workplace.started()][2:4] == ["none_1", "banded_1"]
    assert len(workplace.started()) == 7
    fields = json.loads(out)
    result = json.loads((workplace.output / "none_1.json").read_text())
    assert result["seconds"] is None
    later = json.loads((workplace.output / "none_2.json").read_text())
    assert fields["rows"][0]["seconds_mean"] == later["seconds"] > 0.0
    assert "The minutes leave out runs that were interrupted and resumed." in fields["notes"]


def test_flags_that_a_mechanism_refuses_are_found_before_any_run(workplace: Workplace) -> None:
    call(*THREE, "--flags=--only_for=refuse:banded").refused(
        "--mechanism=banded is refused: run: --only_for is not for banded", has_begun=True
    )
    assert workplace.started() == []
    assert len(workplace.checks()) == 2
    assert [path.name for path in workplace.output.iterdir()] == [".lock"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--mechanisms=banded,bandit",), "found 'bandit'"),
        (("--mechanisms=blt,tree,blt",), "--mechanisms has blt twice"),
        (("--flags=num_rounds=3",), "as --name=value, found 'num_rounds=3'"),
        (("--flags=--seed=3",), "cannot have --seed: repetitions with a fixed seed"),
        (("--flags=--cohort_seed=3",), "cannot have --cohort_seed: each repetition has its own"),
    ],
)
def test_bad_flags_are_refused_in_one_line(
    workplace: Workplace, arguments: tuple[str, ...], message: str
) -> None:
    (workplace.control / "file").touch()
    call(*arguments).refused(message)
    assert workplace.started() == []


@pytest.mark.parametrize(
    "words", ["--audit_canaries=150", "--private_metrics --largest_loss=9 --largest_examples=50"]
)
def test_runs_without_noise_are_not_handed_what_they_refuse(words: str) -> None:
    """As the command that trains reads its flags."""
    parsed = compare_mechanisms.parse_flags(f"{words} --target_epsilon=8")
    for mechanism, is_private in (("none", False), ("identity", True)):
        handed = compare_mechanisms._flags_of(parsed, mechanism)
        found = config_of(digits.COMMAND, f"--mechanism={mechanism}", *handed)
        assert found.private_metrics == (is_private and "private_metrics" in words)
        assert found.audit_canaries == (150 if is_private and "canaries" in words else None)
    with refuses("noise"):
        config_of(digits.COMMAND, "--mechanism=none", *words.split())


# compare-mechanisms: how it stops and goes on.


def _wait_for(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.02)


def _is_alive(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.long
def test_a_stop_is_passed_on_once_and_the_comparison_goes_on_later(workplace: Workplace) -> None:
    hold = workplace.control / "hold-none_1"
    hold.touch()
    process = workplace.process(*THREE)
    _wait_for((workplace.control / "at-work-none_1").exists)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate()
    assert process.returncode == 130, err
    assert out == ""
    assert (workplace.control / "stops-none_1").read_text() == "1"
    assert "stopping the run after its round" in err
    assert "interrupted; 1 of 6 runs are finished" in err
    hold.unlink()
    out = call(*THREE, "--format=json").done()
    assert [row["repetitions"] for row in json.loads(out)["rows"]] == [2, 2, 2]
    names = [name for name, _ in workplace.started()]
    assert names[:3] == ["identity_1", "none_1", "none_1"]
    assert len(names) == 7
    # Only mechanisms that had never begun were checked again.
    checked = [arguments[1] for arguments in workplace.checks()]
    assert checked == [f"--mechanism={each}" for each in (*THREE_MECHANISMS, "banded")]


@pytest.mark.long
def test_a_killed_comparison_goes_on_once_its_run_has_ended(workplace: Workplace) -> None:
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
    call(*arguments).refused("a run that it started, is running in")
    assert [name for name, _ in workplace.started()] == ["banded_1"]
    hold.unlink()
    _wait_for(lambda: not _is_alive(int(at_work.read_text())))
    call(*arguments).done()
    assert [name for name, _ in workplace.started()] == ["banded_1", "banded_1", "tree_1"]
