"""The command: its list, rows, report, and what it does about broken files."""

import html
import json
import pathlib

import pytest

from mf_aggregators import figures
from mf_aggregators.commands import command_line
from reproduction import reproduce_paper, results
from reproduction.experiment import Row
from tests.refusals import refuses

_DOCUMENTED = pathlib.Path(__file__).parents[2] / "docs" / "reproduction"
_QUICK = "denisov-epsilons,bandmf-production,bandmf-figure-6"


def _call(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = command_line.run(
        "", reproduce_paper.define_flags, reproduce_paper.main, ["reproduce-paper", *arguments]
    )
    return status, *capfd.readouterr()


def _arguments(tmp_path: pathlib.Path, only: str = _QUICK) -> list[str]:
    return [
        f"--only={only}",
        f"--output_dir={tmp_path / 'out'}",
        f"--cache_dir={tmp_path / 'cache'}",
    ]


def test_the_list_names_every_experiment(capfd: pytest.CaptureFixture[str]) -> None:
    status, out, _ = _call(capfd, "--list", "--format=json")
    assert status == 0
    names = [each["name"] for each in json.loads(out)["experiments"]]
    assert names == list(reproduce_paper.experiments())
    status, out, _ = _call(capfd, "--list")
    assert [line.split()[0] for line in out.splitlines()] == names
    # Without flags no work begins that nobody asked for.
    status, without_flags, _ = _call(capfd)
    assert status == 0
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
    status, out, err = _call(capfd, *_arguments(tmp_path), "--format=json")
    assert status == 0, err
    fields = json.loads(out)
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
    assert "denisov-epsilons: agreed: all 5 printed numbers" in err
    assert "bandmf-production: differs: 1 of 2 printed numbers, by at most 1.02 %" in err

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
    status, out, err = _call(capfd, *_arguments(tmp_path, "bandmf-figure-7"))
    assert status == 0, err
    assert "bandmf-figure-7: nothing printed to compare with" in out
    assert (directory / "report.md").read_text().count("\n### ") == 4


@pytest.mark.long
def test_broken_caches_and_results_are_noticed(
    tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = _arguments(tmp_path, "bandmf-figure-6")
    status, first, err = _call(capfd, *arguments, "--format=json")
    assert status == 0, err
    assert "computed again" not in err
    status, second, err = _call(capfd, *arguments, "--format=json")
    assert "computed again" not in err
    entries = sorted((tmp_path / "cache").iterdir())
    assert len(entries) == 7
    # Half-written, empty, and altered in one byte.
    half = entries[0] / "arrays.npz"
    half.write_bytes(half.read_bytes()[: half.stat().st_size // 2])
    (entries[1] / "factorization.json").write_text("")
    altered = bytearray((entries[2] / "arrays.npz").read_bytes())
    altered[len(altered) // 2] ^= 1
    (entries[2] / "arrays.npz").write_bytes(altered)
    status, third, err = _call(capfd, *arguments, "--format=json")
    assert status == 0
    assert err.count("It is computed again.") == 3
    assert json.loads(first)["rows"] == json.loads(second)["rows"] == json.loads(third)["rows"]
    status, _, err = _call(capfd, *arguments)
    assert "computed again" not in err

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
        (["--only=bandmf-table-99"], "no experiment 'bandmf-table-99'; --list prints the names"),
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
    status, out, err = _call(capfd, *arguments, f"--output_dir={tmp_path / 'out'}")
    assert status == 2
    assert not out
    assert message in err
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_results_of_other_code_are_reported_as_such(
    tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    status, _, err = _call(capfd, *_arguments(tmp_path, "denisov-epsilons"))
    assert status == 0, err
    report_file = tmp_path / "out" / "report.md"
    assert "## denisov-epsilons" in report_file.read_text()
    assert "other code" not in report_file.read_text()
    path = tmp_path / "out" / "denisov-epsilons.json"
    (result, _) = results.load("denisov-epsilons", path.parent) or (None, False)
    assert result is not None
    results.save(result, path.parent, "of other code")
    status, _, err = _call(capfd, *_arguments(tmp_path, "bandmf-production"))
    assert status == 0, err
    text = report_file.read_text()
    assert "## bandmf-production" in text
    assert (
        "\nComputed by other code or versions than those of this report: `denisov-epsilons`.\n"
        in text
    )
    assert "`denisov-epsilons`" not in text.partition("Not computed yet: ")[2].splitlines()[0]
    section = text.partition("## denisov-epsilons")[2]
    assert ", other code): " in section
    assert ", other code): " not in text.partition("## bandmf-production")[2]


@pytest.mark.long
def test_figures_are_drawn_again_from_what_results_keep(
    tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["bandmf-production", "denisov-epsilons"]
    status, _, err = _call(capfd, *_arguments(tmp_path, ",".join(names)))
    assert status == 0, err
    directory = tmp_path / "out"
    before = {name: json.loads((directory / f"{name}.json").read_text()) for name in names}
    for name in names:
        (directory / f"{name}.png").unlink()

    def refuse(*arguments: object) -> None:
        raise AssertionError("nothing is to be computed")

    monkeypatch.setattr(reproduce_paper, "_run", refuse)
    # A wider line, and the numbers are not void.
    style = tmp_path / "wide.mplstyle"
    style.write_text(pathlib.Path(figures._STYLE).read_text() + "axes.linewidth: 3.0\n")
    monkeypatch.setattr(figures, "_STYLE", style)
    status, out, err = _call(capfd, "--redraw", f"--output_dir={directory}", "--format=json")
    assert status == 0, err
    assert sorted(json.loads(out)["redrawn"]) == names
    for name in names:
        after = json.loads((directory / f"{name}.json").read_text())
        assert after["figure_sha256"] != before[name]["figure_sha256"]
        of_figure = ("figure_sha256", "sha256")
        assert {k: v for k, v in after.items() if k not in of_figure} == {
            k: v for k, v in before[name].items() if k not in of_figure
        }
        assert results.load(name, directory) is not None
    # Numbers that were altered are not drawn.
    path = directory / "denisov-epsilons.json"
    path.write_text(path.read_text().replace("0.341", "0.342"))
    status, _, err = _call(capfd, "--redraw", f"--output_dir={directory}")
    assert status == 0
    assert "was altered. Its figure is not drawn" in err
    status, _, err = _call(capfd, "--redraw", f"--output_dir={tmp_path / 'nowhere'}")
    assert status == 2
    assert "--redraw finds no result" in err


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
