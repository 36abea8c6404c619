"""Pages: what stands on them, whatever it is made of, and where they are written."""

import importlib.util
import pathlib
from types import SimpleNamespace
from typing import Any

import jinja2
import pytest
from absl import flags

from mf_aggregators import figures
from mf_aggregators.commands import command_line, pages
from mf_aggregators.commands.command_line import CommandError
from mf_aggregators.commands.pages import Picture
from mf_aggregators.commands.plan_text import Step
from tests import page_checks
from tests.refusals import refuses

_AWKWARD = "</p><script>alert('1 & \"2\"')</script>"


def _picture(caption: str) -> Picture:
    figure, ((axes,),) = figures.panels(1, 1, (3.0, 2.0))
    figures.bars(axes, ["banded", "tree"], [1.0, 2.0], title="Errors")
    return Picture(figure, caption)


def _values(path: pathlib.Path, *given: str) -> flags.FlagValues:
    values = flags.FlagValues()
    command_line.define_report(values, "everything")
    for name in ("unused", "dataset"):
        flags.DEFINE_string(name, None, "", flag_values=values)
    flags.DEFINE_bool("fast", True, "", flag_values=values)
    values(["mf-plan", f"--report={path}", *given])
    return values


def test_a_plan_with_text_of_any_kind(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "deeper" / "page.html"
    step = Step(f"# {_AWKWARD}\nmf-plan --x='a b'  --y", "shell", notes=("only if",))
    pages.write(
        "mf-plan",
        _values(path, "--dataset=it's mine", "--nofast"),
        "plan.html",
        title=_AWKWARD,
        plan=SimpleNamespace(reason=_AWKWARD, infeasible={_AWKWARD: "is none"}),
        setting=["a plan"],
        attacker=_AWKWARD,
        columns=(_AWKWARD, "b", "c"),
        rows=[("0", "1", "2"), (_AWKWARD, "1", "2")],
        marked=1,
        remark="",
        steps=[step],
        pictures={"comparison": [_picture(_AWKWARD), _picture("2"), _picture("3")]},
    )
    page = page_checks.read(path)
    assert page.faults == []
    assert page.paragraphs == [
        "A plan.",
        f"Recommended: {_AWKWARD}",
        "only if",
        _AWKWARD,
        f"Infeasible: {_AWKWARD} is none.",
    ]
    assert page.conditions == ["only if"]
    assert page.captions == [_AWKWARD, "2", "3"]
    assert page.tables == [
        [[_AWKWARD, "b", "c"], ["0", "1", "2"], [_AWKWARD, "1", "2"]],
    ]
    assert page.marked == [[_AWKWARD, "1", "2"]]
    # The command that made the page has the flags that were given.
    assert page.commands == [
        "\n".join(step.lines()),
        f"mf-plan --report={path} '--dataset=it'\"'\"'s mine' --nofast",
    ]


def test_a_report_with_text_of_any_kind(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "page.html"
    context: dict[str, Any] = {
        "title": _AWKWARD,
        "command": _AWKWARD,
        "subject": SimpleNamespace(participation=_AWKWARD, workload=SimpleNamespace(name=_AWKWARD)),
        "sentences": [_AWKWARD, "only if"],
        "is_broken": True,
        "rows": [("a_name", _AWKWARD), (_AWKWARD, "2")],
        "step": None,
    }
    path.write_text(pages._text("report.html", pictures={"guarantee": []}, **context))
    page = page_checks.read(path)
    assert page.faults == []
    assert page.conditions == [_AWKWARD, "only if"]
    assert page.paragraphs[2:] == [f"Clients were to keep to: {_AWKWARD}.\nWorkload: {_AWKWARD}."]
    (numbers,) = page.tables
    assert numbers == [["field", "value"], ["a_name", _AWKWARD], [_AWKWARD, "2"]]
    assert page.commands == [_AWKWARD]

    del context["sentences"]
    with pytest.raises(jinja2.UndefinedError):
        pages._text("report.html", pictures={"guarantee": []}, **context)


def test_a_page_that_cannot_be_written_leaves_the_old_one(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("old")
    values = _values(tmp_path / "file" / "page.html")
    with refuses("--report", error=CommandError):
        pages.write("mf-plan", values, "page.html", title="A page", pictures={})
    assert (tmp_path / "file").read_text() == "old"


def test_a_page_needs_matplotlib(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find_spec(name)
    )
    values = _values(tmp_path / "page.html")
    with refuses("--report", "matplotlib", error=CommandError):
        command_line.check_report(values, None)
