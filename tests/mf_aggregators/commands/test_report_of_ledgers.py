"""mf-report --ledger: the guarantee of what was observed."""

import json
import math
import pathlib

import pytest

import mf_aggregators as mfa
from mf_aggregators import accounting, checkpoints
from mf_aggregators.participation import MinSeparation
from tests import console_commands
from tests.mf_aggregators.commands.small_reports import (
    NAMED,
    call_report,
    fields_of_report,
    flag_of_ledger,
    flags_of_complete_ledger,
)


def test_a_run_that_kept_its_plan(tmp_path: pathlib.Path, checkpoint: pathlib.Path) -> None:
    flags = flags_of_complete_ledger(tmp_path, "ada,0\nada,4\nada,8\nbo,3\nbo,11\n", 12)
    fields = call_report(checkpoint, *flags, "--format=json").fields()
    assert fields["ledger_gap"] is None
    assert fields["keeps_plan"] is True
    assert fields["realised_separation"] == 4
    assert fields["realised_max_participations"] == 3
    assert fields["realised_sensitivity_is_exact"] is True
    assert fields["realised_epsilon"] == pytest.approx(fields["epsilon"])
    assert fields["widened_epsilon"] is None
    assert fields["worst_client_num_rounds"] == 3
    # Columns of norm one, four rounds apart and so orthogonal.
    assert fields["worst_client_sensitivity"] == pytest.approx(math.sqrt(3))


@pytest.mark.parametrize("rounds", [(0, 4, 8), (0, 1, 2)])
def test_no_client_is_named(
    tmp_path: pathlib.Path, checkpoint: pathlib.Path, rounds: tuple[int, ...]
) -> None:
    """Neither by its name nor by its rounds, in nothing that is printed or written."""
    lines = "".join(f"{NAMED}ada,{each}\n" for each in rounds)
    given = flags_of_complete_ledger(tmp_path, lines, 12)
    figure = tmp_path / "figure.png"
    for flags in (("--format=text", f"--figure={figure}"), ("--format=json",)):
        _, out, err = call_report(checkpoint, *given, *flags)
        for written in (out, err, figure.read_bytes().decode("latin-1")):
            assert NAMED not in written
            assert str(list(rounds)) not in written


def test_a_run_that_broke_its_plan(tmp_path: pathlib.Path, checkpoint: pathlib.Path) -> None:
    ledger = flag_of_ledger(tmp_path, "ada,0\nada,4\nada,8\nbo,3\nbo,5\ncy,11\n")
    out = call_report(checkpoint, ledger).done(1)
    assert out.startswith("WARNING: the ledger breaks the schema")
    # The worst case stands beside the smaller epsilon of what was observed.
    assert "At worst, with the smaller separation" in out.partition("\n\n")[0]
    # Nothing that the plan would have given stands in the sentences.
    assert "if every client keeps to" not in out
    complete = flags_of_complete_ledger(tmp_path, "ada,0\nada,4\nada,8\nbo,3\nbo,5\ncy,11\n", 12)
    _, out, _ = call_report(checkpoint, *complete)
    warning = out.partition("\n\n")[0]
    assert "The observed participations give" in warning
    assert "At worst, with the smaller separation" in warning
    fields = call_report(checkpoint, ledger, "--format=json").fields(1)
    assert fields["keeps_plan"] is False
    # bo, whose rounds are two apart.
    assert fields["clients_beyond_plan"] == 1
    assert fields["realised_sensitivity_is_exact"] is False
    assert fields["widened_epsilon"] >= fields["realised_epsilon"] > fields["epsilon"]
    assert fields["widened_zcdp_rho"] >= fields["realised_zcdp_rho"] > fields["zcdp_rho"]
    assert fields["realised_epsilon"] == pytest.approx(
        accounting.epsilon(fields["realised_noise_multiplier"], 1e-5)
    )


def test_no_pair_of_an_infinite_epsilon_is_printed(
    tmp_path: pathlib.Path, checkpoint: pathlib.Path
) -> None:
    """Clients that kept the plan have a guarantee, and one that broke it has none."""
    ledger = flags_of_complete_ledger(tmp_path, "".join(f"ada,{i}\n" for i in range(12)), 12)
    flags = (f"--checkpoint={checkpoint}", "--separation=4", "--delta=1e-5", *ledger)
    ended = console_commands.call("mf-report", *flags, "--noise_multiplier=0.22")
    assert ended.status == 1
    assert "all others have it still" in ended.printed
    assert "The observed participations give no finite epsilon at delta 1e-05" in ended.printed
    assert "of plan and observation: no finite epsilon at delta 1e-05 (zero-out" in ended.printed
    assert "(inf" not in ended.printed


_TIMES = "".join(
    f"{index},2026-03-01T{index:02}:00:00Z,2026-03-01T{index + 1:02}:00:00Z\n"
    for index in range(12)
)


def test_times_in_the_place_of_a_ledger(tmp_path: pathlib.Path, checkpoint: pathlib.Path) -> None:
    """A timer of more than four hours, and devices that count to two."""
    file = tmp_path / "times.csv"
    file.write_text(_TIMES)
    given = (f"--round_times={file}", "--timer_hours=5", "--clock_margin_minutes=5")
    fields = call_report(
        checkpoint, *given, "--timer_max_participations=2", "--format=json"
    ).fields()
    assert fields["keeps_plan"] is True
    assert (fields["realised_separation"], fields["realised_max_participations"]) == (4, 2)
    assert "within 5 hours" in fields["conditions"]
    assert "too fast by at most 0.1 % and 5 minutes" in fields["conditions"]
    assert fields["realised_num_clients"] is None
    assert fields["realised_epsilon"] < fields["epsilon"]
    # Columns of norm one, four rounds apart and so orthogonal.
    assert fields["realised_sensitivity"] == pytest.approx(math.sqrt(2))
    out = call_report(checkpoint, *given[:1], "--timer_hours=3").done(1)
    assert out.startswith("WARNING")


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (("--round_times={}",), "--timer_hours"),
        (("--timer_hours=5",), "--round_times"),
        (("--round_times={}.gone", "--timer_hours=5"), "--round_times: "),
        (("--round_times={}", "--timer_hours=5", "--clock_drift=1"), "clock_drift"),
        (("--clock_drift=0.1",), "--round_times"),
        (("--round_times={}", "--timer_hours=5", "--ledger={}"), "--ledger"),
        (("--round_times={}", "--timer_hours=5", "--released_rounds=3"), "--released_rounds"),
    ],
)
def test_times_that_mean_nothing_are_refused_in_one_line(
    tmp_path: pathlib.Path,
    checkpoint: pathlib.Path,
    given: tuple[str, ...],
    named: str,
) -> None:
    file = tmp_path / "times.csv"
    file.write_text(_TIMES)
    call_report(checkpoint, *(each.format(file) for each in given)).refused(named)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (("Z,2026-03-01T12", "Z,2026-03-02T12"), "round 11 lasted 25 hours"),
        (("0,2026-03-01", "0,0001-01-01"), "starts must"),
    ],
)
def test_a_file_of_times_is_refused_by_its_flag(
    tmp_path: pathlib.Path,
    checkpoint: pathlib.Path,
    change: tuple[str, str],
    named: str,
) -> None:
    file = tmp_path / "times.csv"
    file.write_text(_TIMES.replace(*change))
    err = call_report(checkpoint, f"--round_times={file}", "--timer_hours=5").refused(named)
    assert err.startswith("mf-report: --round_times: ")


def test_a_ledger_is_refused_by_its_flag(tmp_path: pathlib.Path, checkpoint: pathlib.Path) -> None:
    ledger = flag_of_ledger(tmp_path, "a,0\na,12\n")
    assert call_report(checkpoint, ledger).refused().startswith("mf-report: --ledger: ")
    line = call_report(checkpoint, ledger, "--released_rounds=13").refused()
    assert line.startswith("mf-report: --released_rounds: 13 rounds were released")


def test_names_that_look_alike_are_the_first_thing_said(
    tmp_path: pathlib.Path, checkpoint: pathlib.Path
) -> None:
    """Three participations of one person under three names give the epsilon of one each."""
    lines = "\u00e9va,0\ne\u0301va,4\n\u00c9VA,8\nbo,3\n"
    ledger = flag_of_ledger(tmp_path, lines)
    out = call_report(checkpoint, ledger).done()
    sentences = out.split("\n\n")
    assert sentences[0].startswith("WARNING: 3 clients have names that look like")
    assert "WARNING" not in "".join(sentences[1:])
    fields = call_report(checkpoint, ledger, "--format=json").fields()
    assert fields["alike_client_names"] == 3
    assert fields["realised_max_participations"] == 1
    ledger = flag_of_ledger(tmp_path, "ada,0\nbo,3\n")
    other = call_report(checkpoint, ledger, "--format=json").fields()
    assert other["alike_client_names"] == 0


# Of two clients, under a plan of three times at least four rounds apart.
_TWICE = [("ada", 0), ("bo", 1), ("ada", 6), ("bo", 7)]


@pytest.mark.parametrize(
    ("lines", "counts", "flags", "named"),
    [
        (_TWICE, _TWICE, (), None),
        (_TWICE, None, (), "nobody gave the number of clients of each round"),
        (_TWICE[:3], _TWICE, (), "with 0 rows for 1 clients"),
        (_TWICE[:3], None, (), "nobody gave the number"),
        (_TWICE, _TWICE, ("--clients_per_round=6500",), "to have had 6500 clients a round"),
        (_TWICE, None, ("--clients_per_round=6500",), "to have had 6500 clients a round"),
        # Ids that change are two clients each.
        ([(f"{name}{i > 5}", i) for name, i in _TWICE], None, (), "nobody gave the number"),
        (_TWICE, _TWICE, ("--released_rounds=11",), "11 rounds, and the server counted 12"),
    ],
)
def test_a_ledger_that_may_lack_lines_has_no_better_epsilon_than_the_plan(
    tmp_path: pathlib.Path,
    checkpoint: pathlib.Path,
    lines: list[tuple[str, int]],
    counts: list[tuple[str, int]] | None,
    flags: tuple[str, ...],
    named: str | None,
) -> None:
    def text(of: list[tuple[str, int]]) -> str:
        return "".join(f"{name},{index}\n" for name, index in of)

    given = list(flags)
    if counts is not None:
        given.append(flags_of_complete_ledger(tmp_path, text(counts), 12)[1])
    given.append(flag_of_ledger(tmp_path, text(lines)))
    fields = call_report(checkpoint, *given, "--format=json").fields()
    assert fields["keeps_plan"] is True
    assert fields["participation_independent_of_releases"] == (
        "An observed guarantee holds only if participation did not depend on released models or "
        "on data."
    )
    _, out, _ = call_report(checkpoint, *given)
    if named is None:
        assert fields["ledger_gap"] is None
        assert fields["worst_client_epsilon"] <= fields["realised_epsilon"] < fields["epsilon"]
        assert "largest number, only if participation did not depend on released models" in out
        return
    assert named in fields["ledger_gap"]
    assert fields["realised_epsilon"] == fields["epsilon"]
    assert fields["worst_client_epsilon"] is None
    assert out.startswith("WARNING") == (not named.startswith("nobody"))
    assert f"{fields['ledger_gap']}), so nothing better than the plan is stated." in out
    # What breaks the plan refutes it, whether lines are missing or not.
    given[-1] = flag_of_ledger(tmp_path, text([*lines, ("cy", 2), ("cy", 3)]))
    out = call_report(checkpoint, *given, "--format=json").done(1)
    assert json.loads(out)["realised_epsilon"] > fields["epsilon"]


def test_counts_belong_to_a_ledger(tmp_path: pathlib.Path, checkpoint: pathlib.Path) -> None:
    _, counts = flags_of_complete_ledger(tmp_path, "ada,0\n", 12)
    call_report(checkpoint, counts).refused("--round_counts needs --ledger")


def test_rounds_without_the_client_count_as_released(
    tmp_path: pathlib.Path, checkpoint: pathlib.Path
) -> None:
    """What a client contributed in round 0 is in the noise-hidden sums of rounds 1 to 3 too."""
    flags = flags_of_complete_ledger(tmp_path, "ada,0\n", 12)
    fields = call_report(checkpoint, *flags, "--format=json").fields()
    assert fields["realised_num_rounds"] == 12
    assert fields["realised_sensitivity"] == pytest.approx(1.0)
    first = (*flags_of_complete_ledger(tmp_path, "ada,0\n", 1), "--released_rounds=1")
    assert call_report(checkpoint, *first, "--format=json").fields()["realised_sensitivity"] < 0.99
    _, out, _ = call_report(checkpoint, *first)
    assert "Only 1 of 12 rounds were released" in out


def test_a_mechanism_is_reported_with_its_own_participation_and_noise(
    tmp_path: pathlib.Path, checkpoint: pathlib.Path
) -> None:
    mechanism = mfa.Mechanism(checkpoints.load(checkpoint), MinSeparation(4, 2), 0.7)
    mechanism.save(tmp_path / "mechanism")
    own = f"--checkpoint={tmp_path / 'mechanism'}"
    ledger = flag_of_ledger(tmp_path, "a,0\na,4\nb,1\n")
    flags = (f"--checkpoint={checkpoint}", "--separation=4", "--max_participations=2")
    for more in ([], [ledger]):
        assert fields_of_report(own, *more) == fields_of_report(
            *flags, "--noise_multiplier=0.7", *more
        )
    # Flags are for the matrix alone, and the ledger is of the noise that the run had.
    assert fields_of_report(own, "--noise_multiplier=0.9") == fields_of_report(
        *flags, "--noise_multiplier=0.9"
    )
    for named in ("--separation=6", "--noise_multiplier=0.7"):
        console_commands.call("mf-report", own, ledger, "--delta=1e-5", named).refused(
            "leave out the flags for these"
        )


@pytest.mark.parametrize("has_mechanism", [True, False])
@pytest.mark.parametrize("source", ["ledger", "round_times"])
def test_a_broken_plan_is_not_declared_anew(
    tmp_path: pathlib.Path,
    checkpoint: pathlib.Path,
    has_mechanism: bool,
    source: str,
) -> None:
    """Neither with noise for the new schema, nor with the multiplier of the old one."""
    ledger = flag_of_ledger(tmp_path, "a,0\na,3\na,7\nb,1\n")
    times = tmp_path / "times.csv"
    times.write_text(_TIMES)
    of_run = [ledger] if source == "ledger" else [f"--round_times={times}", "--timer_hours=4"]
    matrix, planned, noise = checkpoints.load(checkpoint), MinSeparation(4, 3), 0.9
    if has_mechanism:
        mfa.Mechanism(matrix, planned, noise).save(checkpoint)

    def call(*flags: str) -> console_commands.Ended:
        of_all = (f"--checkpoint={checkpoint}", "--delta=1e-5", *of_run)
        return console_commands.call("mf-report", *of_all, *flags)

    def refused(*flags: str) -> str:
        err = call(*flags).refused()
        return err

    for target in ("--target_epsilon=8", "--target_rho=0.5"):
        for schema in ([], ["--separation=3"]):
            said = refused(target, *schema)
            assert f"--{source} describes a run that took place" in said
            assert target.partition("=")[0] in said
    said = refused(f"--noise_multiplier={noise}", "--separation=3")
    assert ("leave out the flags" if has_mechanism else "--separation: ") in said
    if has_mechanism:
        assert "leave out the flags" in refused(f"--noise_multiplier={noise}")
    # What is left of the noise that the run had: of sqrt(3), for columns four apart.
    of_noise = [] if has_mechanism else [f"--noise_multiplier={noise}"]
    fields = call("--format=json", *of_noise).fields(1)
    assert (fields["keeps_plan"], fields["realised_separation"]) == (False, 3)
    observed = MinSeparation(3, fields["realised_max_participations"])
    ratio = mfa.sensitivity.compute(matrix.strategy_matrix(), observed).value / math.sqrt(3.0)
    assert ratio > 1.01
    assert fields["realised_epsilon"] == pytest.approx(accounting.epsilon(noise / ratio, 1e-5))


def test_errors_of_another_workload_than_the_matrix_is_for_are_said_to_be(
    tmp_path: pathlib.Path,
) -> None:
    matrix = mfa.factorizations.banded(mfa.workloads.momentum_sgd(12, 0.9), num_bands=3)
    mfa.Mechanism(matrix, MinSeparation(3), 1.0).save(tmp_path)
    for flags, is_said in (([], True), (["--workload=momentum_sgd", "--momentum=0.9"], False)):
        ended = console_commands.call("mf-report", f"--checkpoint={tmp_path}", *flags)
        assert ("made for another workload than prefix_sum" in ended.done()) == is_said


def test_ids_that_change_have_the_guarantee_of_a_window(
    tmp_path: pathlib.Path, checkpoint: pathlib.Path
) -> None:
    """At most three participations of columns that are orthogonal, two in a window of six."""
    lines = "ada 1,0\nada 1,4\nada 2,8\nbo 1,3\nbo 2,11\n"
    flags = flags_of_complete_ledger(tmp_path, lines, 12)
    fields = call_report(checkpoint, *flags, "--id_window=6", "--format=json").fields()
    assert fields["window_sensitivity"] == pytest.approx(math.sqrt(2))
    assert fields["window_epsilon"] < fields["epsilon"] <= fields["device_epsilon"]
    _, text, _ = call_report(checkpoint, *flags, "--id_window=6")
    assert "for each client in a window of 6 rounds over 12 rounds" in " ".join(text.split())
    call_report(checkpoint, *flags, "--id_window=4").refused(
        "1 clients of the ledger took part in two windows"
    )


def test_people_have_the_guarantee_of_all_their_clients(
    tmp_path: pathlib.Path, checkpoint: pathlib.Path
) -> None:
    lines = f"{NAMED}phone,0\n{NAMED}phone,4\n{NAMED}tablet,0\nbo,3\n"
    flags = flags_of_complete_ledger(tmp_path, lines, 12)
    file = tmp_path / "people.csv"
    file.write_text(f"{NAMED}ada,{NAMED}phone\n{NAMED}ada,{NAMED}tablet\nBo,bo\n")
    status, out, _ = call_report(checkpoint, *flags, f"--people={file}", "--format=json")
    fields = json.loads(out)
    assert status == 0
    # Two clients in one round, and one in a round of other rows.
    assert fields["person_realised_sensitivity"] == pytest.approx(math.sqrt(5))
    assert fields["person_planned_sensitivity"] == pytest.approx(2 * fields["sensitivity"])
    assert fields["person_realised_epsilon"] < fields["person_planned_epsilon"]
    assert NAMED not in out
    _, text, _ = call_report(checkpoint, *flags, f"--people={file}")
    assert "The person that the ledger protects least has" in text
    call_report(checkpoint, f"--people={file}").refused("--people needs --ledger")
    file.write_text("Bo,bo\n")
    err = call_report(checkpoint, *flags, f"--people={file}").refused("--people")
    assert NAMED not in err


def test_a_broken_plan_promises_nothing_to_other_units(
    tmp_path: pathlib.Path, checkpoint: pathlib.Path
) -> None:
    flags = flags_of_complete_ledger(tmp_path, "ada,0\nada,1\n", 12)
    file = tmp_path / "people.csv"
    file.write_text("Ada,ada\n")
    fields = call_report(
        checkpoint, *flags, f"--people={file}", "--id_window=6", "--format=json"
    ).fields(1)
    names = ("window_epsilon", "device_epsilon", "person_planned_epsilon")
    assert [fields[name] for name in names] == [None] * 3
    assert fields["person_realised_epsilon"] == pytest.approx(fields["worst_client_epsilon"])
