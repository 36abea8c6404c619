"""The command: its list, rows, report, and what it does about broken files."""

import dataclasses
import html
import json
import pathlib

import pytest

from mf_aggregators.commands import command_line
from reproduction import reproduce_paper, results
from reproduction.experiment import Row
from tests import console_commands
from tests.refusals import refuses

_DOCUMENTED = pathlib.Path(__file__).parents[2] / "docs" / "reproduction"
_QUICK = "denisov-epsilons,bandmf-production,bandmf-figure-6"


def _call(capfd: pytest.CaptureFixture[str], *arguments: str) -> console_commands.Ended:
    status = command_line.run(
        "", reproduce_paper.define_flags, reproduce_paper.main, ["reproduce-paper", *arguments]
    )
    return console_commands.Ended(status, *capfd.readouterr())


def _arguments(tmp_path: pathlib.Path, only: str = _QUICK) -> list[str]:
    return [
        f"--only={only}",
        f"--output_dir={tmp_path / 'out'}",
        f"--cache_dir={tmp_path / 'cache'}",
    ]


def test_the_list_names_every_experiment(capfd: pytest.CaptureFixture[str]) -> None:
    listed = _call(capfd, "--list", "--format=json").fields()
    names = [each["name"] for each in listed["experiments"]]
    assert names == list(reproduce_paper.experiments())
    out = _call(capfd, "--list").done()
    assert [line.split()[0] for line in out.splitlines()] == names
    # Without flags no work begins that nobody asked for.
    without_flags = _call(capfd).done()
    assert without_flags.startswith(out)
    assert "--only=NAME" in without_flags.removeprefix(out)
    assert _call(capfd, "--format=json") == _call(capfd, "--list", "--format=json")
    # What the papers print or draw without private data.
    for printed in (
        *("prefix-sums-table-1", "prefix-sums-figure-1"),
        *("denisov-figure-1", "denisov-table-2", "denisov-figure-4", "denisov-figure-5"),
        *("denisov-epsilons", "bandmf-table-2", "bandmf-table-3", "bandmf-figure-4a"),
        *("bandmf-figure-4b", "bandmf-figure-4c", "bandmf-figure-6", "bandmf-figure-7"),
        *("bandmf-figure-9", "bandmf-table-4-noise", "bandmf-table-5-noise"),
        "bandmf-production",
    ):
        assert printed in names


@pytest.mark.long
def test_rows_figures_and_report(tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]) -> None:
    ended = _call(capfd, *_arguments(tmp_path), "--format=json")
    fields = ended.fields()
    rows = fields["rows"]
    assert {row["experiment"] for row in rows} == set(_QUICK.split(","))
    assert all({"experiment", "row", "quantity", "paper", "ours"} <= set(row) for row in rows)
    by_verdict: dict[str, int] = {}
    for row in rows:
        by_verdict[row["verdict"]] = by_verdict.get(row["verdict"], 0) + 1
        assert (row["paper"] is None) == (row["verdict"] not in ("agrees", "differs"))
    # Five epsilons by Renyi accounting, one of two of the production run; two lags.
    assert by_verdict == {"agrees": 6, "differs": 1, "not printed": 5, "holds": 2}
    (differs,) = [row for row in rows if row["verdict"] == "differs"]
    assert (differs["paper"], round(differs["ours"], 2)) == (4.35, 4.39)
    assert "two digits" in differs["reason"]
    assert "denisov-epsilons: agreed: all 5 printed numbers" in ended.errors
    assert "bandmf-production: differs: 1 of 2 printed numbers, by at most 1.02 %" in ended.errors

    directory = tmp_path / "out"
    report = (directory / "report.md").read_text()
    for name in _QUICK.split(","):
        figure = directory / f"{name}.png"
        assert figure.read_bytes().startswith(b"\x89PNG")
        assert figure.stat().st_size < 300_000
        assert f"({name}.png)" in report
    assert "Not computed yet: `prefix-sums-table-1`" in report
    assert "**6 of 7 printed numbers agree**" in report
    assert "2 of 2 statements hold. 5 numbers of ours" in report
    opening = report.partition("## Experiments")[0]
    assert "| 4.35 | 4.39448 | differs by +1.02 % |" in opening
    assert "two digits" in opening

    # Another experiment joins the report; the others stay.
    out = _call(capfd, *_arguments(tmp_path, "bandmf-figure-7")).done()
    assert "bandmf-figure-7: nothing printed to compare with" in out
    assert (directory / "report.md").read_text().count("\n### ") == 4


@pytest.mark.long
def test_broken_caches_and_results_are_noticed(
    tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = _arguments(tmp_path, "bandmf-figure-6")
    first, second = (_call(capfd, *arguments, "--format=json") for _ in range(2))
    assert "computed again" not in first.errors + second.errors
    entries = sorted((tmp_path / "cache").iterdir())
    assert len(entries) == 7
    # Half-written, empty, and altered in one byte.
    half = entries[0] / "arrays.npz"
    half.write_bytes(half.read_bytes()[: half.stat().st_size // 2])
    (entries[1] / "factorization.json").write_text("")
    altered = bytearray((entries[2] / "arrays.npz").read_bytes())
    altered[len(altered) // 2] ^= 1
    (entries[2] / "arrays.npz").write_bytes(altered)
    third = _call(capfd, *arguments, "--format=json")
    assert third.errors.count("It is computed again.") == 3
    assert first.fields()["rows"] == second.fields()["rows"] == third.fields()["rows"]
    assert "computed again" not in _call(capfd, *arguments).errors

    # A result that was cut or altered is not reported.
    name = "bandmf-figure-6"
    path = tmp_path / "out" / "bandmf-figure-6.json"
    whole = path.read_text()
    assert results.load(name, tmp_path / "out") is not None
    for broken in (whole[: len(whole) // 2], whole.replace("16.0", "17.0"), "[]", ""):
        assert broken != whole
        path.write_text(broken)
        with refuses("bandmf-figure-6", error=results.DamagedResultError):
            results.load(name, tmp_path / "out")
    status, _, err = _call(capfd, *_arguments(tmp_path, "denisov-epsilons"))
    assert status == 0
    assert "compute it again" in err
    assert "`bandmf-figure-6`" in (tmp_path / "out" / "report.md").read_text()
    path.write_text(whole)
    figure = tmp_path / "out" / "bandmf-figure-6.png"
    figure.write_bytes((tmp_path / "out" / "denisov-epsilons.png").read_bytes())
    with refuses("bandmf-figure-6.png", error=results.DamagedResultError):
        results.load(name, tmp_path / "out")
    figure.unlink()
    with refuses("bandmf-figure-6.png", error=results.DamagedResultError):
        results.load(name, tmp_path / "out")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only=bandmf-table-99"], "unknown experiment 'bandmf-table-99'; --list prints"),
        (["--only="], "--only names no experiment"),
        (["--lists"], "--help lists the flags"),
    ],
)
def test_bad_flags(
    arguments: list[str],
    message: str,
    tmp_path: pathlib.Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    _call(capfd, *arguments, f"--output_dir={tmp_path / 'out'}").refused(message)
    assert not (tmp_path / "out").exists()


def test_a_result_says_which_version_computed_it(
    tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    _call(capfd, *_arguments(tmp_path, "denisov-epsilons")).done()
    path = tmp_path / "out" / "denisov-epsilons.json"
    result = results.load("denisov-epsilons", path.parent)
    assert result is not None
    other = {**result.versions, "mf-aggregators": "0.1"}
    results.save(dataclasses.replace(result, versions=other), path.parent)
    _call(capfd, *_arguments(tmp_path, "bandmf-production")).done()
    text = (tmp_path / "out" / "report.md").read_text()
    section = text.partition("## denisov-epsilons")[2].partition("## bandmf-production")[0]
    assert ", mf-aggregators 0.1): " in section
    assert text.count(", mf-aggregators 0.1): ") == 1
    assert "`denisov-epsilons`" not in text.partition("Not computed yet: ")[2].splitlines()[0]


def test_the_results_of_the_documentation_are_whole() -> None:
    """Each with its figure, as the command wrote them, and what the report there is made of."""
    text = (_DOCUMENTED / "report.md").read_text()
    for name in reproduce_paper.experiments():
        is_there = (_DOCUMENTED / f"{name}.json").exists()
        # Raises if altered.
        results.load(name, _DOCUMENTED)
        assert (f"## {name}\n" in text) == is_there, name
    stored = list(_DOCUMENTED.glob("*.json"))
    assert text.count("\n### ") == len(stored)
    rows = [Row(**row) for path in stored for row in json.loads(path.read_text())["rows"]]
    printed = [row.verdict for row in rows if row.printed is not None]
    assert f"\n**{printed.count('agrees')} of {len(printed)} printed numbers agree** " in text
    # The opening has each that differs, with its reason.
    opening = text.partition("\n## Experiments\n")[0]
    for row in rows:
        if row.verdict == "differs":
            assert f" | {row.printed} | {row.ours:.6g} | " in opening
            assert row.explanation is not None
            assert row.explanation[1:] in html.unescape(opening)
